/* The state of bfcctl top; see top_model.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "ctl/top_model.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ctl/show.h"

/* ---- columns -------------------------------------------------------------------- */

#define SPARK_BARS 20u

static const char *not_told(const void *row)
{
        return ((const struct top_row *)row)->outside == UINT64_MAX ? "-" : NULL;
}

static void history_text(const void *row, char ret[static TABLE_TEXT_MAX])
{
        const struct top_history *h = ((const struct top_row *)row)->history;

        if (h)
                top_spark(h, SPARK_BARS, ret);
}

static const struct table_column outside_column = {
        "OUTSIDE",          NULL, TABLE_RIGHT | TABLE_SUM, TABLE_SIZE, TABLE_MEMBER(struct top_row, outside),
        .instead = not_told
};
static const struct table_column history_column = { "HISTORY", NULL, .type = TABLE_MADE,
                                                    .text = history_text };

bool top_is_history(const struct table_column *c)
{
        return c == &history_column;
}

static const struct {
        const char *name;
        Bfcd__List__Kind kind;
        const char *sort;
} views[TOP_VIEWS] = {
        [TOP_SESSIONS] = { "sessions", BFCD__LIST__KIND__SESSIONS, "HELD" },
        [TOP_TENANTS] = { "tenants", BFCD__LIST__KIND__TENANTS, "IN-USE" },
        [TOP_PARTITIONS] = { "partitions", BFCD__LIST__KIND__PARTITIONS, NULL },
};

const char *top_view_name(enum top_view view)
{
        return views[view].name;
}

Bfcd__List__Kind top_kind(enum top_view view)
{
        return views[view].kind;
}

static void add_column(struct top *t, const struct table_column *c, bool is_own)
{
        if (t->n_columns < TOP_MAX_COLUMNS)
                t->columns[t->n_columns++] = (struct top_column){ c, is_own };
}

static bool has_outside(const struct top *t)
{
        const struct list *l = t->sample.list;
        size_t i = 0;

        while (l && i < l->n_sessions && l->sessions[i]->bytes_outside == 0)
                i++;
        return l && i < l->n_sessions;
}

/* A wide table has the column of memory outside. */
static void choose_columns(struct top *t)
{
        t->n_columns = 0;
        for (const struct table_column *c = show_columns(views[t->view].kind); !table_is_end(c); c++) {
                if (!table_is_shown(c, t->is_wide))
                        continue;
                add_column(t, c, false);
                if (t->view == TOP_SESSIONS && !t->is_wide && has_outside(t) && strcmp(c->title, "IDLE") == 0)
                        add_column(t, &outside_column, true);
        }
        if (t->view == TOP_TENANTS)
                add_column(t, &history_column, true);
}

static const struct top_column *sort_column(const struct top *t)
{
        const char *title = t->choices[t->view].sort;

        for (size_t i = 0; title && i < t->n_columns; i++)
                if (strcmp(t->columns[i].column->title, title) == 0)
                        return &t->columns[i];
        return NULL;
}

void top_sort_by(struct top *t, const char *title, bool is_descending)
{
        t->choices[t->view].sort = title;
        t->choices[t->view].is_descending = is_descending;
}

void top_sort_step(struct top *t, int step)
{
        const struct top_column *now = sort_column(t);
        size_t i = now ? (size_t)(now - t->columns) : step > 0 ? t->n_columns - 1 : 0;
        const struct table_column *c;

        if (t->n_columns == 0)
                return;
        i = step > 0 ? (i + 1) % t->n_columns : (i + t->n_columns - 1) % t->n_columns;
        c = t->columns[i].column;
        top_sort_by(t, c->title, table_is_number(c));
}

/* ---- history -------------------------------------------------------------------- */

void top_spark(const struct top_history *h, size_t n_bars, char *ret)
{
        static const char *const bars[] = { "\u2581", "\u2582", "\u2583", "\u2584",
                                            "\u2585", "\u2586", "\u2587", "\u2588" };
        size_t n = h->n < n_bars ? h->n : n_bars;
        const uint64_t *bytes = h->bytes + TOP_HISTORY - n;
        uint64_t most = 1;

        for (size_t i = 0; i < n; i++)
                most = bytes[i] > most ? bytes[i] : most;
        for (size_t i = 0; i < n; i++) {
                size_t bar = (size_t)((double)bytes[i] / (double)most * 7 + 0.5);

                ret = stpcpy(ret, bytes[i] == 0 ? " " : bars[bar < 8 ? bar : 7]);
        }
        *ret = '\0';
}

/* partition NULL: of all. */
static struct top_history *find_history(const struct top *t, const char *tenant, const char *partition)
{
        for (size_t i = 0; i < t->n_histories; i++) {
                struct top_history *h = &t->histories[i];

                if (strcmp(h->tenant, tenant) == 0 &&
                    (partition ? h->partition && strcmp(h->partition, partition) == 0 : !h->partition))
                        return h;
        }
        return NULL;
}

static void history_free(struct top_history *h)
{
        free(h->tenant);
        free(h->partition);
}

static struct top_history *need_history(struct top *t, const char *tenant, const char *partition)
{
        struct top_history *h = find_history(t, tenant, partition), *more;

        if (h)
                return h;
        more = reallocarray(t->histories, t->n_histories + 1, sizeof(*more));
        if (!more)
                return NULL;
        t->histories = more;
        h = &more[t->n_histories];
        *h = (struct top_history){ .tenant = strdup(tenant),
                                   .partition = partition ? strdup(partition) : NULL };
        if (!h->tenant || (partition && !h->partition)) {
                history_free(h);
                return NULL;
        }
        t->n_histories++;
        return h;
}

static void remove_unseen(struct top *t)
{
        size_t n = 0;

        t->n_tenants = 0;
        for (size_t i = 0; i < t->n_histories; i++) {
                struct top_history *h = &t->histories[i];

                if (h->is_seen) {
                        t->n_tenants += !h->partition;
                        t->histories[n++] = *h;
                } else {
                        history_free(h);
                }
        }
        t->n_histories = n;
}

static int add_bytes(struct top *t, const char *tenant, const char *partition, uint64_t n_bytes)
{
        struct top_history *h = need_history(t, tenant, partition);

        if (!h)
                return -ENOMEM;
        if (!h->is_seen) {
                memmove(h->bytes, h->bytes + 1, sizeof(h->bytes) - sizeof(h->bytes[0]));
                h->bytes[TOP_HISTORY - 1] = 0;
                h->n += h->n < TOP_HISTORY;
                h->is_seen = true;
        }
        h->bytes[TOP_HISTORY - 1] += n_bytes;
        return 0;
}

static int add_to_histories(struct top *t)
{
        const struct list *l = t->sample.list;

        for (size_t i = 0; i < t->n_histories; i++)
                t->histories[i].is_seen = false;
        for (size_t i = 0; i < l->n_tenants; i++) {
                const Bfcd__TenantRow *row = l->tenants[i];
                uint64_t n_bytes = row->stats ? row->stats->bytes_reserved : 0;

                if (add_bytes(t, row->tenant, NULL, n_bytes) < 0 ||
                    add_bytes(t, row->tenant, row->partition, n_bytes) < 0)
                        return -ENOMEM;
        }
        remove_unseen(t);
        return 0;
}

/* ---- rows ----------------------------------------------------------------------- */

static void free_rows(struct top *t)
{
        for (size_t i = 0; i < t->n_rows; i++)
                free(t->rows[i].text);
        free(t->rows);
        free(t->lines);
        t->rows = NULL;
        t->lines = NULL;
        t->n_rows = t->n_lines = t->n_all = 0;
}

static size_t count_rows(const struct top *t)
{
        const struct list *l = t->sample.list;

        return !l                        ? 0
               : t->view == TOP_SESSIONS ? l->n_sessions
               : t->view == TOP_TENANTS  ? l->n_tenants
                                         : l->n_partitions;
}

static struct top_row row_at(const struct top *t, size_t i)
{
        const struct list *l = t->sample.list;
        struct top_row ret = { .index = i, .outside = UINT64_MAX };

        if (t->view == TOP_PARTITIONS) {
                ret.row = l->partitions[i];
                return ret;
        }
        if (t->view == TOP_TENANTS) {
                ret.row = l->tenants[i];
                ret.tenant = l->tenants[i]->tenant;
                ret.history = find_history(t, ret.tenant, l->tenants[i]->partition);
        } else {
                ret.row = l->sessions[i];
                ret.tenant = l->sessions[i]->tenant;
                ret.outside = l->sessions[i]->bytes_outside > 0 ? l->sessions[i]->bytes_outside : UINT64_MAX;
        }
        return ret;
}

static char *cell_of(const struct top_column *c, const struct top_row *row)
{
        return table_cell(c->column, c->is_own ? (const void *)row : row->row);
}

static uint64_t number_of(const struct top_column *c, const struct top_row *row)
{
        uint64_t n = table_number(c->column, c->is_own ? (const void *)row : row->row);

        return c->column == &outside_column && n == UINT64_MAX ? 0 : n;
}

/* Names and numbers that identify, not amounts. */
static bool is_searched(const struct table_column *c)
{
        return c->type == TABLE_TEXT || (c->type == TABLE_MADE && c != &history_column) ||
               (c->type == TABLE_NUMBER && c->key &&
                (strcmp(c->key, "session_id") == 0 || strcmp(c->key, "pid") == 0));
}

static bool matches(const struct top *t, const struct top_row *row, const char *text)
{
        bool found = false;

        if (!*text)
                return true;
        for (size_t i = 0; i < t->n_columns && !found; i++) {
                char *cell;

                if (!is_searched(t->columns[i].column))
                        continue;
                cell = cell_of(&t->columns[i], row);
                found = cell && strcasestr(cell, text);
                free(cell);
        }
        return found;
}

/* Rows that pass the filter, with what they are sorted by. */
static int choose_rows(struct top *t)
{
        const struct top_column *sort = sort_column(t);
        size_t n = count_rows(t);

        t->rows = calloc(n + 1, sizeof(*t->rows));
        t->lines = calloc(2 * n + 1, sizeof(*t->lines));
        if (!t->rows || !t->lines)
                return -ENOMEM;
        t->n_all = n;
        for (size_t i = 0; i < n; i++) {
                struct top_row row = row_at(t, i);

                if (!matches(t, &row, t->filter))
                        continue;
                if (sort && table_is_number(sort->column))
                        row.number = number_of(sort, &row);
                else if (sort && !(row.text = cell_of(sort, &row)))
                        return -ENOMEM;
                t->rows[t->n_rows++] = row;
        }
        return 0;
}

static bool is_tree(const struct top *t)
{
        return t->choices[t->view].is_tree && t->view != TOP_PARTITIONS;
}

/* Groups by their sums, if they have some, else by name; then rows. */
static int compare_rows(const void *left, const void *right, void *userdata)
{
        const struct top_row *a = left, *b = right;
        const struct top *t = userdata;
        bool is_descending = t->choices[t->view].is_descending;
        int r = 0;

        if (is_tree(t) && a->sum != b->sum)
                return (a->sum < b->sum) == is_descending ? 1 : -1;
        if (is_tree(t))
                r = strcmp(a->tenant, b->tenant);
        if (r != 0)
                return r;
        if (a->text && b->text)
                r = strcmp(a->text, b->text);
        else
                r = (a->number > b->number) - (a->number < b->number);
        if (r != 0)
                return is_descending ? -r : r;
        return (a->index > b->index) - (a->index < b->index);
}

static void sort_rows(struct top *t)
{
        if (t->n_rows > 1)
                qsort_r(t->rows, t->n_rows, sizeof(*t->rows), compare_rows, t);
}

static size_t end_of_group(const struct top *t, size_t first)
{
        size_t i = first;

        while (i < t->n_rows && strcmp(t->rows[i].tenant, t->rows[first].tenant) == 0)
                i++;
        return i;
}

static void sum_groups(struct top *t)
{
        const struct top_column *sort = sort_column(t);

        if (!sort || !table_is_number(sort->column) || !(sort->column->flags & TABLE_SUM))
                return;
        for (size_t i = 0, end; i < t->n_rows; i = end) {
                uint64_t sum = 0;

                end = end_of_group(t, i);
                for (size_t k = i; k < end; k++)
                        sum += t->rows[k].number;
                for (size_t k = i; k < end; k++)
                        t->rows[k].sum = sum;
        }
        sort_rows(t);
}

static void make_lines(struct top *t)
{
        if (!is_tree(t)) {
                for (size_t i = 0; i < t->n_rows; i++)
                        t->lines[t->n_lines++] = (struct top_line){ .first = i, .n = 1 };
                return;
        }
        for (size_t i = 0, end; i < t->n_rows; i = end) {
                const struct top_history *h = find_history(t, t->rows[i].tenant, NULL);

                end = end_of_group(t, i);
                t->lines[t->n_lines++] = (struct top_line){ i, end - i, .is_group = true };
                for (size_t k = i; k < end && !(h && h->is_collapsed); k++)
                        t->lines[t->n_lines++] =
                                (struct top_line){ .first = k, .n = 1, .is_last = k + 1 == end };
        }
}

/* ---- the cursor ------------------------------------------------------------------- */

static void identify(const struct top *t, size_t i, char ret[static 512])
{
        const struct top_line *line = &t->lines[i];
        const struct top_row *row = &t->rows[line->first];

        if (line->is_group)
                snprintf(ret, 512, "group %s", row->tenant);
        else if (t->view == TOP_SESSIONS)
                snprintf(ret, 512, "%llu",
                         (unsigned long long)((const Bfcd__SessionRow *)row->row)->session_id);
        else if (t->view == TOP_TENANTS)
                snprintf(ret, 512, "%s/%s", row->tenant, ((const Bfcd__TenantRow *)row->row)->partition);
        else
                snprintf(ret, 512, "%s", ((const Bfcd__PartitionRow *)row->row)->name);
}

void top_select(struct top *t, size_t line)
{
        struct top_choice *c = &t->choices[t->view];

        c->selected = t->n_lines == 0 ? 0 : line < t->n_lines ? line : t->n_lines - 1;
        c->identity[0] = '\0';
        /* The first line is a place, so that the largest ones are in view; any other line is what it shows. */
        if (c->selected > 0)
                identify(t, c->selected, c->identity);
}

static void follow(struct top *t)
{
        struct top_choice *c = &t->choices[t->view];
        char identity[512];

        for (size_t i = 0; *c->identity && i < t->n_lines; i++) {
                identify(t, i, identity);
                if (strcmp(identity, c->identity) == 0) {
                        c->selected = i;
                        return;
                }
        }
        top_select(t, c->selected);
}

bool top_find(struct top *t, bool from_next)
{
        size_t begin = t->choices[t->view].selected + from_next;

        for (size_t i = 0; i < t->n_lines; i++) {
                size_t at = (begin + i) % t->n_lines;

                if (*t->search && matches(t, &t->rows[t->lines[at].first], t->search)) {
                        top_select(t, at);
                        return true;
                }
        }
        return false;
}

/* ---- the whole -------------------------------------------------------------------- */

int top_arrange(struct top *t)
{
        int r;

        free_rows(t);
        choose_columns(t);
        r = choose_rows(t);
        if (r < 0) {
                free_rows(t);
                return r;
        }
        sort_rows(t);
        if (is_tree(t))
                sum_groups(t);
        make_lines(t);
        follow(t);
        return 0;
}

void top_sample_end(struct top_sample *sample)
{
        sample->list = list_free(sample->list);
        free(sample->outside);
        sample->outside = NULL;
        sample->n_outside = 0;
}

int top_take(struct top *t, struct top_sample *sample)
{
        int r;

        free_rows(t);
        top_sample_end(&t->sample);
        t->sample = *sample;
        *sample = (struct top_sample){ 0 };
        r = add_to_histories(t);
        return r < 0 ? r : top_arrange(t);
}

int top_show(struct top *t, enum top_view view)
{
        t->view = view;
        return top_arrange(t);
}

void top_init(struct top *t, enum top_view view, unsigned interval_ms, bool is_wide)
{
        *t = (struct top){ .view = view, .interval_ms = interval_ms, .is_wide = is_wide };
        for (enum top_view v = 0; v < TOP_VIEWS; v++) {
                t->choices[v].sort = views[v].sort;
                t->choices[v].is_descending = views[v].sort != NULL;
        }
        choose_columns(t);
}

void top_end(struct top *t)
{
        free_rows(t);
        top_sample_end(&t->sample);
        for (size_t i = 0; i < t->n_histories; i++)
                history_free(&t->histories[i]);
        free(t->histories);
        t->histories = NULL;
        t->n_histories = 0;
}

/* ---- cells ------------------------------------------------------------------------ */

static bool is_tenant_column(const struct top_column *c)
{
        return c->column->key && strcmp(c->column->key, "tenant") == 0;
}

static char *group_history(const struct top_history *h, const struct top_row *first)
{
        struct top_row row = *first;

        row.history = h;
        return table_cell(&history_column, &row);
}

static char *group_cell(const struct top *t, const struct top_line *line, const struct top_column *c)
{
        const struct top_row *first = &t->rows[line->first];
        const struct top_history *group = find_history(t, first->tenant, NULL);
        uint64_t sum = 0;
        char *name, *ret = NULL;

        if (is_tenant_column(c)) {
                name = cell_of(c, first);
                if (name && asprintf(&ret, "%c %s (%zu)", group && group->is_collapsed ? '+' : '-', name,
                                     line->n) < 0)
                        ret = NULL;
                free(name);
                return ret;
        }
        if (top_is_history(c->column))
                return group_history(group, first);
        if (!(c->column->flags & TABLE_SUM))
                return strdup("");
        for (size_t i = line->first; i < line->first + line->n; i++)
                if (__builtin_add_overflow(sum, number_of(c, &t->rows[i]), &sum))
                        sum = UINT64_MAX;
        return table_number_cell(c->column, sum);
}

char *top_cell(const struct top *t, const struct top_line *line, size_t column)
{
        const struct top_column *c = &t->columns[column];
        char *name, *ret = NULL;

        if (line->is_group)
                return group_cell(t, line, c);
        name = cell_of(c, &t->rows[line->first]);
        if (!name || !is_tree(t) || !is_tenant_column(c))
                return name;
        if (asprintf(&ret, "%s %s", line->is_last ? "\u2514\u2500" : "\u251c\u2500", name) < 0)
                ret = NULL;
        free(name);
        return ret;
}

enum table_mark top_mark(const struct top *t, const struct top_line *line, size_t column)
{
        const struct top_column *c = &t->columns[column];

        if (line->is_group || !c->column->mark)
                return TABLE_PLAIN;
        return c->column->mark(t->rows[line->first].row);
}
