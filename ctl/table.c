/* Tables for people: see table.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Cells are finished texts in one array, row by row; widths are found when
 * printing. No cell is empty and no line ends in blanks, so that output can be compared and copied. */
#include "ctl/table.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ctl/text.h"

#define GAP       2  /* blanks between columns */
#define MIN_TEXT  4  /* what is left of a text at least */
#define MIN_SIZE  10 /* "1023.9 MiB" */
#define MIN_TIME  7  /* "59m 59s" */
#define MIN_SHARE 5  /* "100.0" */

struct cell {
        char *text;
        size_t min_width;
        enum table_mark mark;
};

struct table {
        const struct table_column *columns;
        size_t n_columns;
        struct cell *cells;
        size_t n_cells;
        size_t n_allocated;
        size_t *widths; /* of all that table_print_part() has printed; NULL: nothing */
        bool out_of_memory;
};

struct table_look table_look;

bool table_may_colour(int fd)
{
        const char *forbidden = getenv("NO_COLOR"), *terminal = getenv("TERM");

        return isatty(fd) && !(forbidden && *forbidden) && terminal && *terminal &&
               strcmp(terminal, "dumb") != 0;
}

int table_new(const struct table_column *columns, size_t n_columns, struct table **ret)
{
        struct table *t = calloc(1, sizeof(*t));

        assert(n_columns > 0);
        if (!t)
                return -ENOMEM;
        t->columns = columns;
        t->n_columns = n_columns;
        *ret = t;
        return 0;
}

static void clear_cells(struct table *t)
{
        for (size_t i = 0; i < t->n_cells; i++)
                free(t->cells[i].text);
        t->n_cells = 0;
}

struct table *table_free(struct table *t)
{
        if (!t)
                return NULL;
        clear_cells(t);
        free(t->cells);
        free(t->widths);
        free(t);
        return NULL;
}

/* Takes the text over. */
static void add(struct table *t, size_t min_width, char *text)
{
        if (text && t->n_cells == t->n_allocated) {
                size_t n = t->n_allocated ? t->n_allocated * 2 : 64;
                struct cell *cells = reallocarray(t->cells, n, sizeof(*cells));

                if (cells) {
                        t->cells = cells;
                        t->n_allocated = n;
                }
        }
        if (!text || t->n_cells == t->n_allocated) {
                t->out_of_memory = true;
                free(text);
                return;
        }
        t->cells[t->n_cells++] = (struct cell){ .text = text, .min_width = min_width };
}

void table_text(struct table *t, const char *s)
{
        add(t, 0, text_escape(s && *s ? s : "-"));
}

void table_number(struct table *t, uint64_t n)
{
        char text[TEXT_MAX];

        snprintf(text, sizeof(text), "%" PRIu64, n);
        add(t, 0, strdup(text));
}

void table_hex(struct table *t, uint64_t n)
{
        char text[TEXT_MAX];

        snprintf(text, sizeof(text), "0x%" PRIx64, n);
        add(t, 0, strdup(text));
}

void table_size(struct table *t, uint64_t n_bytes)
{
        char text[TEXT_MAX];

        add(t, MIN_SIZE, strdup(text_size(n_bytes, text)));
}

void table_duration(struct table *t, uint64_t ms)
{
        char text[TEXT_MAX];

        add(t, MIN_TIME, strdup(text_duration(ms, text)));
}

void table_percent(struct table *t, uint64_t part, uint64_t whole)
{
        char text[TEXT_MAX];

        add(t, MIN_SHARE, strdup(text_percent(part, whole, text)));
}

void table_mark(struct table *t, enum table_mark mark)
{
        if (!t->out_of_memory)
                t->cells[t->n_cells - 1].mark = mark;
}

static size_t max(size_t a, size_t b)
{
        return a > b ? a : b;
}

static bool is_shown(const struct table_column *c)
{
        return !(c->flags & (table_look.is_wide ? TABLE_NARROW : TABLE_WIDE));
}

static size_t width_of(const struct table *t, size_t column)
{
        size_t width = text_columns(t->columns[column].title);

        for (size_t i = column; i < t->n_cells; i += t->n_columns)
                width = max(width, max(t->cells[i].min_width, text_columns(t->cells[i].text)));
        return width;
}

/* The widest column of texts that can be cut; first those whose titles stay whole. NULL: there is none. */
static size_t *find_widest(const struct table *t, size_t *widths, bool cuts_titles)
{
        size_t *widest = NULL;

        for (size_t c = 0; c < t->n_columns; c++) {
                size_t least = cuts_titles ? 0 : text_columns(t->columns[c].title);

                if (is_shown(&t->columns[c]) && !(t->columns[c].flags & TABLE_RIGHT) &&
                    widths[c] > max(least, MIN_TEXT) && (!widest || widths[c] > *widest))
                        widest = &widths[c];
        }
        return widest;
}

/* Takes from the widest text, one character at a time, until all fits. */
static void fit(const struct table *t, size_t *widths)
{
        size_t sum = 0;

        for (size_t c = 0; c < t->n_columns; c++)
                sum += is_shown(&t->columns[c]) ? widths[c] + (sum ? GAP : 0) : 0;
        for (; sum > TABLE_COLUMNS; sum--) {
                size_t *widest = find_widest(t, widths, false);

                widest = widest ? widest : find_widest(t, widths, true);
                if (!widest)
                        return;
                --*widest;
        }
}

/* How many bytes the first characters take. */
static size_t bytes_of(const char *text, size_t n_characters)
{
        size_t n = 0;

        for (; text[n]; n++)
                if (((unsigned char)text[n] & 0xc0) != 0x80 && n_characters-- == 0)
                        break;
        return n;
}

static const char *colour_of(const struct cell *cell)
{
        if (!table_look.has_colour)
                return "";
        if (!cell)
                return "\033[1m";
        return cell->mark == TABLE_ALARM ? "\033[31m" : cell->mark == TABLE_WARNING ? "\033[33m" : "";
}

/* cell: NULL: the title. */
static void print_cell(const struct table *t, FILE *out, size_t column, size_t width, const struct cell *cell)
{
        const char *text = cell ? cell->text : t->columns[column].title, *colour = colour_of(cell);
        size_t n = text_columns(text);
        bool is_cut = n > width, is_right = t->columns[column].flags & TABLE_RIGHT;

        n = is_cut ? width : n;
        fprintf(out, "%*s%s%.*s%s%s", is_right ? (int)(width - n) : 0, "", colour,
                (int)bytes_of(text, is_cut ? width - 1 : n), text, is_cut ? "+" : "",
                *colour ? "\033[0m" : "");
        for (size_t c = column + 1; !is_right && c < t->n_columns; c++)
                if (is_shown(&t->columns[c])) {
                        fprintf(out, "%*s", (int)(width - n), "");
                        break;
                }
}

/* Blanks stand before a cell, so that nothing stands after the last. */
static void print_row(const struct table *t, FILE *out, const size_t *widths, const struct cell *row)
{
        int gap = 0;

        for (size_t c = 0; c < t->n_columns; c++) {
                if (!is_shown(&t->columns[c]))
                        continue;
                fprintf(out, "%*s", gap, "");
                print_cell(t, out, c, widths[c], row ? &row[c] : NULL);
                gap = GAP;
        }
        fputc('\n', out);
}

static void widen(const struct table *t, size_t *widths)
{
        for (size_t c = 0; c < t->n_columns; c++)
                widths[c] = max(widths[c], width_of(t, c));
}

/* widths: before they are cut. */
static void print_rows(const struct table *t, FILE *out, size_t *widths, bool has_titles)
{
        if (!table_look.is_wide)
                fit(t, widths);
        if (has_titles)
                print_row(t, out, widths, NULL);
        for (size_t i = 0; i < t->n_cells; i += t->n_columns)
                print_row(t, out, widths, &t->cells[i]);
}

int table_print(const struct table *t, FILE *out)
{
        size_t *widths;

        if (t->out_of_memory)
                return -ENOMEM;
        assert(t->n_cells % t->n_columns == 0);
        widths = calloc(t->n_columns, sizeof(*widths));
        if (!widths)
                return -ENOMEM;
        widen(t, widths);
        print_rows(t, out, widths, true);
        free(widths);
        return ferror(out) ? -EIO : 0;
}

int table_print_part(struct table *t, FILE *out)
{
        bool is_first = !t->widths;
        size_t *widths = calloc(t->n_columns, sizeof(*widths));

        if (is_first)
                t->widths = calloc(t->n_columns, sizeof(*t->widths));
        if (t->out_of_memory || !widths || !t->widths) {
                free(widths);
                return -ENOMEM;
        }
        assert(t->n_cells % t->n_columns == 0);
        widen(t, t->widths);
        memcpy(widths, t->widths, t->n_columns * sizeof(*widths));
        print_rows(t, out, widths, is_first);
        free(widths);
        clear_cells(t);
        return ferror(out) ? -EIO : 0;
}

int table_print_upright(const struct table *t, FILE *out)
{
        size_t width = 0;

        if (t->out_of_memory)
                return -ENOMEM;
        assert(t->n_cells == t->n_columns);
        for (size_t c = 0; c < t->n_columns; c++) {
                size_t n = text_columns(t->columns[c].title);

                width = n > width ? n : width;
        }
        for (size_t c = 0; c < t->n_columns; c++) {
                const char *title = t->columns[c].title;

                fprintf(out, "%s%*s%s\n", title, (int)(width - text_columns(title)) + GAP, "",
                        t->cells[c].text);
        }
        return ferror(out) ? -EIO : 0;
}
