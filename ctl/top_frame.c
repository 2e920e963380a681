/* A screen as text with styles; see top_frame.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "ctl/top_frame.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <wchar.h>

#include "ctl/text.h"
#include "ctl/top_list.h"

#define MAX_MARKS    2u /* combining characters on one character */
#define NAME_COLUMNS 12u
#define LIST_ROWS    6u /* that the list gets in any case */
#define SPARK_BARS   16u

/* ---- text -------------------------------------------------------------------------- */

/* The part of a text that fits. What a terminal would not print becomes a question mark. */
static char *clip(const char *text, unsigned n_columns, unsigned *ret_width)
{
        char *ret = malloc(strlen(text) + 1), *out = ret;
        unsigned n_marks = 0, n = 0, width;
        mbstate_t state = { 0 };

        if (!ret)
                return NULL;
        while (*text) {
                mbstate_t before = state;
                wchar_t c;
                size_t n_bytes = text_character(text, &state, &width);
                bool is_good = mbrtowc(&c, text, n_bytes, &before) == n_bytes && wcwidth(c) >= 0;

                if (n + width > n_columns)
                        break;
                n_marks = width == 0 ? n_marks + 1 : 0;
                if (n_marks <= MAX_MARKS && is_good)
                        out = mempcpy(out, text, n_bytes);
                else if (!is_good)
                        *out++ = '?';
                text += n_bytes;
                n += width;
        }
        *out = '\0';
        *ret_width = n;
        return ret;
}

unsigned top_put(struct top_frame *f, unsigned row, unsigned column, unsigned width, enum top_style style,
                 const char *text)
{
        struct top_span span = { .row = row, .column = column, .style = style };

        if (column >= f->n_columns || (f->n_rows > 0 && row >= f->n_rows))
                return 0;
        if (width > f->n_columns - column)
                width = f->n_columns - column;
        if (f->n_spans == f->n_room) {
                size_t n_room = f->n_room ? 2 * f->n_room : 256;
                struct top_span *more = reallocarray(f->spans, n_room, sizeof(*more));

                if (!more) {
                        f->failed = true;
                        return 0;
                }
                f->spans = more;
                f->n_room = n_room;
        }
        span.text = text ? clip(text, width, &span.width) : NULL;
        if (!span.text) {
                f->failed = true;
                return 0;
        }
        f->spans[f->n_spans++] = span;
        return span.width;
}

static unsigned __attribute__((format(printf, 5, 6)))
put_format(struct top_frame *f, unsigned row, unsigned column, enum top_style style, const char *format, ...)
{
        char text[512];
        va_list arguments;

        va_start(arguments, format);
        vsnprintf(text, sizeof(text), format, arguments);
        va_end(arguments);
        return top_put(f, row, column, f->n_columns, style, text);
}

static unsigned put_escaped(struct top_frame *f, unsigned row, unsigned column, unsigned width,
                            enum top_style style, const char *text)
{
        char *clean = text_escape(text);
        unsigned n = top_put(f, row, column, width, style, clean);

        free(clean);
        return n;
}

int top_frame_print(FILE *out, const struct top_frame *f)
{
        unsigned row = 0, column = 0;

        for (size_t i = 0; i < f->n_spans; i++) {
                const struct top_span *s = &f->spans[i];

                for (; row < s->row; row++, column = 0)
                        fputc('\n', out);
                if (strspn(s->text, " ") == strlen(s->text))
                        continue;
                fprintf(out, "%*s%s", (int)(s->column - column), "", s->text);
                column = s->column + s->width;
        }
        fputc('\n', out);
        return ferror(out) ? -EIO : 0;
}

void top_frame_end(struct top_frame *f)
{
        for (size_t i = 0; i < f->n_spans; i++)
                free(f->spans[i].text);
        free(f->spans);
        *f = (struct top_frame){ 0 };
}

/* ---- the header --------------------------------------------------------------------- */

static void put_summary(const struct top *t, struct top_frame *f)
{
        const struct top_sample *s = &t->sample;
        char size[TEXT_MAX];
        unsigned n = put_format(f, 0, 0, TOP_BOLD, "bfcd ");

        n += put_escaped(f, 0, n, NAME_COLUMNS, TOP_BOLD, s->version);
        if (!s->list)
                return;
        n += put_format(f, 0, n, TOP_PLAIN, "  %zu tenant%s", t->n_tenants, t->n_tenants == 1 ? "" : "s");
        if (s->has_sessions)
                n += put_format(f, 0, n, TOP_PLAIN, "  %zu session%s", s->list->n_sessions,
                                s->list->n_sessions == 1 ? "" : "s");
        if (s->has_outside && s->n_others > 0)
                n += put_format(f, 0, n, TOP_WARNING, "  outside: %llu process%s, %s",
                                (unsigned long long)s->n_others, s->n_others == 1 ? "" : "es",
                                text_size(s->bytes_others, size));
        if (f->n_rows > 0)
                put_format(f, 0, n, TOP_PLAIN, "  every %g s", t->interval_ms / 1000.0);
}

/* What tenants are still promised: guarantees beyond what is reserved. */
static uint64_t guaranteed_rest(const struct list *l, const char *partition)
{
        uint64_t sum = 0;

        for (size_t i = 0; i < l->n_tenants; i++) {
                const Bfcd__Statistics *s = l->tenants[i]->stats;

                if (s && strcmp(l->tenants[i]->partition, partition) == 0 &&
                    s->bytes_guaranteed > s->bytes_reserved &&
                    __builtin_add_overflow(sum, s->bytes_guaranteed - s->bytes_reserved, &sum))
                        return UINT64_MAX;
        }
        return sum;
}

static unsigned part_of(unsigned width, double n_bytes, double limit)
{
        double part = limit > 0 ? n_bytes / limit * width + 0.5 : 0;

        return part >= width ? width : n_bytes > 0 && part < 1 ? 1 : (unsigned)part;
}

static unsigned put_part(struct top_frame *f, unsigned row, unsigned column, unsigned from, unsigned to,
                         enum top_style style, char mark)
{
        char text[512];
        unsigned n = to > from ? to - from : 0;

        n = n < sizeof(text) ? n : (unsigned)sizeof(text) - 1;
        memset(text, mark, n);
        text[n] = '\0';
        if (n > 0)
                top_put(f, row, column + from, n, style, text);
        return to > from ? to : from;
}

/* In a file no name is cut. */
static unsigned name_columns(const struct list *l, const struct top_frame *f)
{
        size_t n = NAME_COLUMNS;

        for (size_t i = 0; f->n_rows == 0 && i < l->n_partitions; i++)
                n = strlen(l->partitions[i]->name) > n ? strlen(l->partitions[i]->name) : n;
        return (unsigned)n;
}

/* "train  [|||||####::::      ] 3.0 MiB of 64.0 MiB reserved" */
static void put_bar(const struct top *t, struct top_frame *f, unsigned row, const Bfcd__PartitionRow *p)
{
        const Bfcd__Statistics none = BFCD__STATISTICS__INIT, *s = p->stats ? p->stats : &none;
        char used[TEXT_MAX], limit[TEXT_MAX], reserved[TEXT_MAX], rest[TEXT_MAX], text[6 * TEXT_MAX];
        uint64_t promised = guaranteed_rest(t->sample.list, p->name);
        double whole = (double)s->bytes_limit;
        unsigned width, at = 0, n_name = name_columns(t->sample.list, f), begin = n_name + 2;

        text_size(s->bytes_in_use, used);
        text_size(s->bytes_limit, limit);
        text_size(s->bytes_reserved, reserved);
        text_size(promised, rest);
        if (f->n_columns >= 120)
                snprintf(text, sizeof(text), "%s in use, %s reserved, %s guaranteed, limit %s", used,
                         reserved, rest, limit);
        else
                snprintf(text, sizeof(text), "%s of %s reserved", reserved, limit);
        width = (unsigned)strlen(text);
        width = f->n_columns > begin + width + 12 ? f->n_columns - begin - width - 2 : 10;
        put_escaped(f, row, 0, n_name, TOP_BOLD, p->name);
        top_put(f, row, begin - 1, 1, TOP_BOLD, "[");
        at = put_part(f, row, begin, at, part_of(width, (double)(s->bytes_in_use + s->bytes_direct), whole),
                      TOP_USED, '|');
        at = put_part(f, row, begin, at, part_of(width, (double)s->bytes_reserved, whole), TOP_RESERVED, '#');
        at = put_part(f, row, begin, at,
                      promised ? part_of(width, (double)s->bytes_reserved + (double)promised, whole) : 0,
                      TOP_GUARANTEED, ':');
        put_part(f, row, begin, at, width, TOP_PLAIN, ' ');
        top_put(f, row, begin + width, 1, TOP_BOLD, "]");
        top_put(f, row, begin + width + 2, f->n_columns, TOP_PLAIN, text);
}

static unsigned put_bars(const struct top *t, struct top_frame *f, unsigned row)
{
        const struct list *l = t->sample.list;
        unsigned n_most = f->n_rows == 0 ? UINT32_MAX : f->n_rows / 6 + 1;

        for (size_t i = 0; l && i < l->n_partitions; i++) {
                if (i + 1 == n_most && l->n_partitions > n_most) {
                        put_format(f, row++, 0, TOP_PLAIN, "and %zu more partitions", l->n_partitions - i);
                        break;
                }
                put_bar(t, f, row++, l->partitions[i]);
        }
        return row;
}

static int compare_use(const void *left, const void *right)
{
        const struct top_history *const *a = left, *const *b = right;
        uint64_t x = (*a)->bytes[TOP_HISTORY - 1], y = (*b)->bytes[TOP_HISTORY - 1];

        return x != y ? (x < y) - (x > y) : strcmp((*a)->tenant, (*b)->tenant);
}

/* A cell of 40 columns for each of the tenants with the most memory. */
static unsigned put_histories(const struct top *t, struct top_frame *f, unsigned row)
{
        unsigned n_beside = f->n_columns / 40, n_most = n_beside * (f->n_rows / 12), i;
        size_t n = 0;
        const struct top_history **order = calloc(t->n_histories + 1, sizeof(*order));

        if (!order) {
                f->failed = true;
                return row;
        }
        for (size_t k = 0; k < t->n_histories; k++)
                if (!t->histories[k].partition)
                        order[n++] = &t->histories[k];
        qsort(order, n, sizeof(*order), compare_use);
        for (i = 0; i < n_most && i < n; i++) {
                char bars[3 * SPARK_BARS + 1], size[TEXT_MAX];
                unsigned y = row + i / n_beside, x = i % n_beside * 40;
                size_t n_bars = order[i]->n < SPARK_BARS ? order[i]->n : SPARK_BARS;

                top_spark(order[i], SPARK_BARS, bars);
                put_escaped(f, y, x, NAME_COLUMNS, TOP_BOLD, order[i]->tenant);
                top_put(f, y, x + NAME_COLUMNS + 1 + SPARK_BARS - (unsigned)n_bars, SPARK_BARS, TOP_USED,
                        bars);
                top_put(f, y, x + NAME_COLUMNS + SPARK_BARS + 2, 10, TOP_PLAIN,
                        text_size(order[i]->bytes[TOP_HISTORY - 1], size));
        }
        free(order);
        return n_beside > 0 ? row + (i + n_beside - 1) / n_beside : row;
}

static unsigned put_tabs(const struct top *t, struct top_frame *f, unsigned row)
{
        const struct top_choice *c = &t->choices[t->view];
        unsigned n = 0;

        for (enum top_view v = 0; v < TOP_VIEWS; v++) {
                if (f->n_rows == 0 && v != t->view)
                        continue;
                n += put_format(f, row, n, v == t->view ? TOP_SELECTED : TOP_PLAIN, " %s ", top_view_name(v));
        }
        if (t->n_rows != t->n_all)
                n += put_format(f, row, n, TOP_PLAIN, "  %zu of %zu", t->n_rows, t->n_all);
        if (c->sort)
                n += put_format(f, row, n, TOP_PLAIN, "  by %s, %s", c->sort,
                                c->is_descending ? "descending" : "ascending");
        if (*t->filter)
                put_format(f, row, n, TOP_WARNING, "  filter: %s", t->filter);
        return row + 1;
}

/* ---- the last line -------------------------------------------------------------------- */

static void put_keys(struct top_frame *f, unsigned row)
{
        static const char *const keys[][2] = {
                { "F1", "Help" }, { "F3", "Search" }, { "F4", "Filter" },  { "F5", "Tree" },
                { "F6", "Sort" }, { "Tab", "Next" },  { "d", "Interval" }, { "F10", "Quit" },
        };
        unsigned n = 0;

        for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
                n += top_put(f, row, n, 4, TOP_BOLD, keys[i][0]);
                n += top_put(f, row, n, 12, TOP_KEY, keys[i][1]);
                n += 1;
        }
}

static void put_last_line(const struct top *t, struct top_frame *f)
{
        unsigned row = f->n_rows - 1;

        if (t->mode == TOP_SEARCHING)
                put_format(f, row, 0, TOP_KEY, "Search: %s_  F3 next, Esc end  %s", t->search, t->note);
        else if (t->mode == TOP_FILTERING)
                put_format(f, row, 0, TOP_KEY, "Filter: %s_  Enter keep, Esc remove", t->filter);
        else if (t->mode == TOP_TIMING)
                put_format(f, row, 0, TOP_KEY, "Seconds between samples: %s_", t->typed);
        else if (t->mode == TOP_SORTING)
                put_format(f, row, 0, TOP_KEY, "Sort by: Enter choose, Esc back");
        else if (*t->note)
                put_format(f, row, 0, TOP_WARNING, "%s", t->note);
        else
                put_keys(f, row);
}

static void put_help(struct top_frame *f)
{
        static const char *const lines[] = {
                "bfcctl top: sessions, tenants and partitions of bfcd",
                "",
                "Bars: | in use   # reserved, but not in use   : guaranteed, but not reserved",
                "",
                "Up Down PgUp PgDn Home End   move            Left Right   scroll the columns",
                "Tab  Shift-Tab     sessions, tenants, partitions",
                "F3 /               search               F4 \\         filter",
                "F5 t               tree by tenant       Enter Space  open and close a tenant",
                "F6                 choose a column      < >          sort by the next column",
                "M P R T N          sort by memory in use, peak, reserved or idle, age, name",
                "I                  invert the order",
                "d                  set the interval     + -          change it",
                "F1 h ?             this help            F10 q        quit",
                "",
                "Any key returns.",
        };

        for (unsigned i = 0; i < sizeof(lines) / sizeof(lines[0]); i++)
                top_put(f, i, 0, f->n_columns, i == 0 ? TOP_BOLD : TOP_PLAIN, lines[i]);
}

int top_draw(struct top *t, unsigned n_rows, unsigned n_columns, struct top_frame *ret)
{
        struct top_frame f = { .n_rows = n_rows, .n_columns = n_columns };
        unsigned row = 1;

        if (t->mode == TOP_HELPING && n_rows > 0) {
                put_help(&f);
        } else {
                put_summary(t, &f);
                if (t->trouble)
                        put_escaped(&f, row++, 0, n_columns, TOP_ALARM, t->trouble);
                row = put_bars(t, &f, row);
                if (n_rows >= row + LIST_ROWS + 4)
                        row = put_histories(t, &f, row);
                row = put_tabs(t, &f, row);
                if (n_rows == 0)
                        f.n_columns = UINT16_MAX; /* in a file nothing is cut */
                if (top_draw_list(t, &f, row, n_rows > 0 ? n_rows - 1 : 0) < 0)
                        f.failed = true;
                if (n_rows > 0)
                        put_last_line(t, &f);
        }
        if (f.failed) {
                top_frame_end(&f);
                return -ENOMEM;
        }
        *ret = f;
        return 0;
}
