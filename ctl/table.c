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

#include "ctl/text.h"

#define GAP 2 /* blanks between columns */

struct table {
        const struct table_column *columns;
        size_t n_columns;
        char **cells;
        size_t n_cells;
        size_t n_allocated;
        bool out_of_memory;
};

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

struct table *table_free(struct table *t)
{
        if (!t)
                return NULL;
        for (size_t i = 0; i < t->n_cells; i++)
                free(t->cells[i]);
        free(t->cells);
        free(t);
        return NULL;
}

/* Takes the text over. */
static void add(struct table *t, char *text)
{
        if (text && t->n_cells == t->n_allocated) {
                size_t n = t->n_allocated ? t->n_allocated * 2 : 64;
                char **cells = reallocarray(t->cells, n, sizeof(*cells));

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
        t->cells[t->n_cells++] = text;
}

void table_text(struct table *t, const char *s)
{
        add(t, text_escape(s && *s ? s : "-"));
}

void table_number(struct table *t, uint64_t n)
{
        char text[TEXT_MAX];

        snprintf(text, sizeof(text), "%" PRIu64, n);
        add(t, strdup(text));
}

void table_hex(struct table *t, uint64_t n)
{
        char text[TEXT_MAX];

        snprintf(text, sizeof(text), "0x%" PRIx64, n);
        add(t, strdup(text));
}

void table_size(struct table *t, uint64_t n_bytes)
{
        char text[TEXT_MAX];

        add(t, strdup(text_size(n_bytes, text)));
}

void table_duration(struct table *t, uint64_t ms)
{
        char text[TEXT_MAX];

        add(t, strdup(text_duration(ms, text)));
}

void table_percent(struct table *t, uint64_t part, uint64_t whole)
{
        char text[TEXT_MAX];

        add(t, strdup(text_percent(part, whole, text)));
}

static size_t width_of(const struct table *t, size_t column)
{
        size_t width = text_columns(t->columns[column].title);

        for (size_t i = column; i < t->n_cells; i += t->n_columns) {
                size_t n = text_columns(t->cells[i]);

                width = n > width ? n : width;
        }
        return width;
}

/* One cell; the gap stands before it, so that nothing stands after the last. */
static void print_cell(const struct table *t, FILE *out, size_t column, size_t width, const char *text)
{
        int n_blanks = (int)(width - text_columns(text));
        bool is_last = column + 1 == t->n_columns;

        if (column > 0)
                fprintf(out, "%*s", GAP, "");
        if (t->columns[column].right)
                fprintf(out, "%*s%s", n_blanks, "", text);
        else
                fprintf(out, "%s%*s", text, is_last ? 0 : n_blanks, "");
        if (is_last)
                fputc('\n', out);
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
        for (size_t c = 0; c < t->n_columns; c++)
                widths[c] = width_of(t, c);
        for (size_t c = 0; c < t->n_columns; c++)
                print_cell(t, out, c, widths[c], t->columns[c].title);
        for (size_t i = 0; i < t->n_cells; i++)
                print_cell(t, out, i % t->n_columns, widths[i % t->n_columns], t->cells[i]);
        free(widths);
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

                fprintf(out, "%s%*s%s\n", title, (int)(width - text_columns(title)) + GAP, "", t->cells[c]);
        }
        return ferror(out) ? -EIO : 0;
}
