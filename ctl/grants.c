/* bfcctl grants; see grants.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The daemon counts in classes, so a percentile is the bound of its class: the true value is not larger. */
#include "ctl/grants.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "ctl/show.h"
#include "ctl/table.h"
#include "ctl/text.h"

/* A row with the bounds of its classes, for the columns. */
struct line {
        Bfcd__GrantsRow row;
        const struct list *list;
};

static const struct line *line_of(const void *row)
{
        return row;
}

static uint64_t sum_of(const Bfcd__GrantsRow *row)
{
        uint64_t n = 0;

        for (size_t i = 0; i < row->n_counts; i++)
                n += row->counts[i];
        return n;
}

static void count_text(const void *row, char ret[static TABLE_TEXT_MAX])
{
        snprintf(ret, TABLE_TEXT_MAX, "%" PRIu64, sum_of(&line_of(row)->row));
}

static void mean_text(const void *row, char ret[static TABLE_TEXT_MAX])
{
        uint64_t n = sum_of(&line_of(row)->row);

        text_time(n > 0 ? line_of(row)->row.total_ns / n : 0, ret);
}

/* The bound of the class in which the part of all grants, in thousandths, is reached. */
static void percentile_text(const struct line *line, uint64_t part, char ret[static TABLE_TEXT_MAX])
{
        uint64_t n = 0, sum = sum_of(&line->row);
        uint64_t wanted = sum / 1000 * part + (sum % 1000 * part + 999) / 1000;
        size_t i = 0;

        for (; i < line->row.n_counts; i++) {
                n += line->row.counts[i];
                if (n >= wanted)
                        break;
        }
        if (i < line->list->n_grant_bounds_ns) {
                strcpy(ret, "<=");
                text_time(line->list->grant_bounds_ns[i], ret + strlen(ret));
        } else {
                strcpy(ret, "more");
        }
}

static void median_text(const void *row, char ret[static TABLE_TEXT_MAX])
{
        percentile_text(row, 500, ret);
}

static void p99_text(const void *row, char ret[static TABLE_TEXT_MAX])
{
        percentile_text(row, 990, ret);
}

static void most_text(const void *row, char ret[static TABLE_TEXT_MAX])
{
        percentile_text(row, 1000, ret);
}

static json_t *numbers_json(const uint64_t *numbers, size_t n)
{
        json_t *ret = json_array();

        for (size_t i = 0; i < n; i++)
                table_json_push(&ret, table_json_number(numbers[i]));
        return ret;
}

static json_t *sum_json(const void *row)
{
        return table_json_number(sum_of(&line_of(row)->row));
}

static json_t *bounds_json(const void *row)
{
        return numbers_json(line_of(row)->list->grant_bounds_ns, line_of(row)->list->n_grant_bounds_ns);
}

static json_t *counts_json(const void *row)
{
        return numbers_json(line_of(row)->row.counts, line_of(row)->row.n_counts);
}

static const struct table_column columns[] = {
        { "TENANT", "tenant", 0, TABLE_TEXT, TABLE_MEMBER(struct line, row.tenant) },
        { "PARTITION", "partition", 0, TABLE_TEXT, TABLE_MEMBER(struct line, row.partition) },
        { "SERVED", "served", 0, TABLE_TEXT, TABLE_MEMBER(struct line, row.way) },
        { "GRANTS", "num_grants", TABLE_RIGHT, .type = TABLE_MADE, .text = count_text, .json = sum_json },
        { "MEAN", NULL, TABLE_RIGHT, .type = TABLE_MADE, .text = mean_text },
        { "MEDIAN", NULL, TABLE_RIGHT, .type = TABLE_MADE, .text = median_text },
        { "P99", NULL, TABLE_RIGHT, .type = TABLE_MADE, .text = p99_text },
        { "MOST", NULL, TABLE_RIGHT, .type = TABLE_MADE, .text = most_text },
        { .key = "total_ns", .type = TABLE_NUMBER, TABLE_MEMBER(struct line, row.total_ns) },
        { .key = "bounds_ns", .json = bounds_json },
        { .key = "counts", .json = counts_json },
        { 0 },
};

/* Lines and pointers to them, in one piece. */
static struct line **lines_new(const struct list *l)
{
        struct line **ret = malloc(l->n_grants * (sizeof(*ret) + sizeof(**ret)) + 1);
        struct line *lines = ret ? (struct line *)(void *)(ret + l->n_grants) : NULL;

        for (size_t i = 0; lines && i < l->n_grants; i++) {
                lines[i] = (struct line){ *l->grants[i], l };
                ret[i] = &lines[i];
        }
        return ret;
}

int grants_print(FILE *out, const struct list *l)
{
        struct line **lines = lines_new(l);
        int r = lines ? table_print(out, columns, (const void *const *)lines, l->n_grants, "No grants yet.")
                      : -ENOMEM;

        free(lines);
        return r;
}

json_t *grants_json(const struct list *l)
{
        struct line **lines = lines_new(l);
        json_t *rows = lines ? table_json_rows(columns, (const void *const *)lines, l->n_grants) : NULL;

        free(lines);
        return show_document("grants", rows);
}
