/* The list on the screen; see top_list.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "ctl/top_list.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "ctl/text.h"

/* The lines that are drawn, as texts. */
struct grid {
        struct top *top;
        size_t first, n; /* lines */
        char **cells;    /* n times n_columns */
        unsigned widths[TOP_MAX_COLUMNS];
};

static char *grid_cell(const struct grid *g, size_t line, size_t column)
{
        return g->cells[line * g->top->n_columns + column];
}

static int grid_fill(struct grid *g)
{
        const struct top *t = g->top;

        g->cells = calloc(g->n * t->n_columns + 1, sizeof(char *));
        if (!g->cells)
                return -ENOMEM;
        for (size_t i = 0; i < g->n; i++)
                for (size_t k = 0; k < t->n_columns; k++) {
                        char *cell = top_cell(t, &t->lines[g->first + i], k);

                        if (!cell)
                                return -ENOMEM;
                        g->cells[i * t->n_columns + k] = cell;
                }
        return 0;
}

static void grid_free(struct grid *g)
{
        for (size_t i = 0; g->cells && i < g->n * g->top->n_columns; i++)
                free(g->cells[i]);
        free(g->cells);
}

static void measure(struct grid *g, const struct top_frame *f)
{
        struct top *t = g->top;
        struct top_choice *c = &t->choices[t->view];
        const struct table_column *columns[TOP_MAX_COLUMNS];

        if (c->n_widths != t->n_columns)
                memset(c->widths, 0, sizeof(c->widths));
        c->n_widths = t->n_columns;
        for (size_t k = 0; k < t->n_columns; k++) {
                const struct table_column *column = columns[k] = t->columns[k].column;
                unsigned width = text_columns(column->title), least = table_least_width(column);

                width = width > least ? width : least;
                width = width > c->widths[k] ? width : c->widths[k];
                for (size_t i = 0; i < g->n; i++) {
                        unsigned n = text_columns(grid_cell(g, i, k));

                        width = n > width ? n : width;
                }
                c->widths[k] = g->widths[k] = width;
        }
        /* The first column always stays. */
        for (size_t k = 1; k <= c->shift && k < t->n_columns; k++)
                g->widths[k] = 0;
        if (f->n_rows > 0)
                table_fit(columns, g->widths, t->n_columns, 1, f->n_columns);
}

static enum top_style style_of(const struct top *t, size_t line, size_t column)
{
        enum table_mark mark = top_mark(t, &t->lines[line], column);

        return mark == TABLE_ALARM                         ? TOP_ALARM
               : mark == TABLE_WARNING                     ? TOP_WARNING
               : t->lines[line].is_group                   ? TOP_BOLD
               : top_is_history(t->columns[column].column) ? TOP_USED
                                                           : TOP_PLAIN;
}

static void put_cell(const struct grid *g, struct top_frame *f, unsigned row, unsigned x, size_t column,
                     enum top_style style, const char *text)
{
        const struct table_column *c = g->top->columns[column].column;
        unsigned width = g->widths[column], n = text_columns(text);

        if (top_is_history(c))
                for (; n > width; n--) /* bars and blanks take a column each */
                        text += *text == ' ' ? 1 : 3;
        if (n < width && (c->flags & TABLE_RIGHT))
                x += width - n;
        top_put(f, row, x, width, style, text);
}

/* A whole row in one style, so that the terminal shows it as a bar. */
static void put_blank(struct top_frame *f, unsigned row, enum top_style style)
{
        char blank[1024];
        unsigned n = f->n_columns < sizeof(blank) ? f->n_columns : (unsigned)sizeof(blank) - 1;

        if (f->n_rows == 0)
                return;
        memset(blank, ' ', n);
        blank[n] = '\0';
        top_put(f, row, 0, n, style, blank);
}

static void put_titles(const struct grid *g, struct top_frame *f, unsigned row)
{
        const struct top *t = g->top;
        const char *sort = t->choices[t->view].sort;
        unsigned x = 0;

        put_blank(f, row, TOP_TITLE);
        for (size_t k = 0; k < t->n_columns; k++) {
                const char *title = t->columns[k].column->title;

                if (g->widths[k] == 0)
                        continue;
                put_cell(g, f, row, x, k, sort && strcmp(sort, title) == 0 ? TOP_SORTED : TOP_TITLE, title);
                x += g->widths[k] + 1;
        }
}

static void put_line(const struct grid *g, struct top_frame *f, unsigned row, size_t i)
{
        const struct top *t = g->top;
        bool is_selected = f->n_rows > 0 && g->first + i == t->choices[t->view].selected;
        unsigned x = 0;

        if (is_selected)
                put_blank(f, row, TOP_SELECTED);
        for (size_t k = 0; k < t->n_columns; k++) {
                if (g->widths[k] == 0)
                        continue;
                put_cell(g, f, row, x, k, is_selected ? TOP_SELECTED : style_of(t, g->first + i, k),
                         grid_cell(g, i, k));
                x += g->widths[k] + 1;
        }
}

static void draw_menu(const struct top *t, struct top_frame *f, unsigned row, unsigned end)
{
        size_t n_room = end > row ? end - row : 0, first = t->menu >= n_room ? t->menu + 1 - n_room : 0;

        for (size_t i = first; i < t->n_columns && i < first + n_room; i++)
                top_put(f, row + (unsigned)(i - first), 0, f->n_columns,
                        i == t->menu ? TOP_SELECTED : TOP_PLAIN, t->columns[i].column->title);
}

static void scroll_to_cursor(struct top *t)
{
        struct top_choice *c = &t->choices[t->view];

        if (c->selected < c->first)
                c->first = c->selected;
        if (t->n_visible > 0 && c->selected >= c->first + t->n_visible)
                c->first = c->selected + 1 - t->n_visible;
        if (c->first + t->n_visible > t->n_lines)
                c->first = t->n_lines > t->n_visible ? t->n_lines - t->n_visible : 0;
}

int top_draw_list(struct top *t, struct top_frame *f, unsigned row, unsigned end)
{
        struct grid g = { .top = t };
        int r;

        if (end > 0 && t->mode == TOP_SORTING) {
                draw_menu(t, f, row, end);
                return 0;
        }
        t->n_visible = end == 0 ? t->n_lines : end > row + 1 ? end - row - 1 : 0;
        scroll_to_cursor(t);
        g.first = t->choices[t->view].first;
        g.n = t->n_lines - g.first < t->n_visible ? t->n_lines - g.first : t->n_visible;
        r = grid_fill(&g);
        if (r == 0) {
                measure(&g, f);
                put_titles(&g, f, row);
                for (size_t i = 0; i < g.n; i++)
                        put_line(&g, f, row + 1 + (unsigned)i, i);
        }
        grid_free(&g);
        return r;
}
