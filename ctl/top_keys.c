/* Keys of bfcctl top; see top_keys.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "ctl/top_keys.h"

#include <stdio.h>
#include <string.h>

#include "ctl/amount.h"

#define N_ELEMENTS(a) (sizeof(a) / sizeof((a)[0]))

bool top_read_interval(const char *text, unsigned *ret_ms)
{
        uint64_t ms;

        if (!amount_time(text, &ms) || ms < TOP_MIN_MS || ms > TOP_MAX_MS)
                return false;
        *ret_ms = (unsigned)ms;
        return true;
}

static struct top_choice *choice(struct top *t)
{
        return &t->choices[t->view];
}

/* ---- typed text ----------------------------------------------------------------- */

/* One line of UTF-8; a character that does not fit is ignored, as is a control character. */
static void add_character(char text[static TOP_TEXT], uint32_t c)
{
        size_t n = strlen(text), n_bytes = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;

        if (c < 0x20 || (c >= 0x7f && c < 0xa0) || n + n_bytes >= TOP_TEXT)
                return;
        if (n_bytes == 1) {
                text[n++] = (char)c;
        } else {
                static const unsigned char leads[] = { 0, 0, 0xc0, 0xe0, 0xf0 };

                text[n++] = (char)(leads[n_bytes] | c >> 6 * (n_bytes - 1));
                for (size_t i = n_bytes - 1; i > 0; i--)
                        text[n++] = (char)(0x80 | (c >> 6 * (i - 1) & 0x3f));
        }
        text[n] = '\0';
}

static void remove_character(char text[static TOP_TEXT])
{
        size_t n = strlen(text);

        while (n > 0 && ((unsigned char)text[--n] & 0xc0) == 0x80)
                ;
        text[n] = '\0';
}

static bool edit(char text[static TOP_TEXT], uint32_t key)
{
        if (key == TOP_KEY_BACKSPACE)
                remove_character(text);
        else if (key < TOP_KEY_UP)
                add_character(text, key);
        else
                return false;
        return true;
}

static int search_key(struct top *t, uint32_t key)
{
        bool is_next = key == TOP_KEY_F3 || key == TOP_KEY_DOWN;

        if (key == TOP_KEY_ENTER || key == TOP_KEY_ESCAPE) {
                t->mode = TOP_LIST;
                return TOP_DONE;
        }
        if (!edit(t->search, key) && !is_next)
                return TOP_DONE;
        if (*t->search && !top_find(t, is_next))
                snprintf(t->note, sizeof(t->note), "not found");
        return TOP_DONE;
}

/* The list is filtered while the user types. Escape removes the filter. */
static int filter_key(struct top *t, uint32_t key)
{
        if (key == TOP_KEY_ENTER || key == TOP_KEY_ESCAPE)
                t->mode = TOP_LIST;
        if (key == TOP_KEY_ESCAPE)
                t->filter[0] = '\0';
        else if (!edit(t->filter, key))
                return TOP_DONE;
        return top_arrange(t);
}

static int timing_key(struct top *t, uint32_t key)
{
        if (edit(t->typed, key))
                return TOP_DONE;
        if (key == TOP_KEY_ESCAPE)
                t->mode = TOP_LIST;
        if (key != TOP_KEY_ENTER)
                return TOP_DONE;
        t->mode = TOP_LIST;
        if (top_read_interval(t->typed, &t->interval_ms))
                return TOP_READ;
        snprintf(t->note, sizeof(t->note), "an interval is 0.1s to 1h");
        return TOP_DONE;
}

/* ---- the menu of columns ---------------------------------------------------------- */

static int sorting_key(struct top *t, uint32_t key)
{
        const struct table_column *c;

        if (key == TOP_KEY_UP && t->menu > 0)
                t->menu--;
        else if (key == TOP_KEY_DOWN && t->menu + 1 < t->n_columns)
                t->menu++;
        else if (key == TOP_KEY_HOME)
                t->menu = 0;
        else if (key == TOP_KEY_END)
                t->menu = t->n_columns - 1;
        if (key == TOP_KEY_ESCAPE || key == TOP_KEY_F6 || key == 'q')
                t->mode = TOP_LIST;
        if (key != TOP_KEY_ENTER)
                return TOP_DONE;
        t->mode = TOP_LIST;
        c = t->columns[t->menu].column;
        top_sort_by(t, c->title, table_is_number(c));
        return top_arrange(t);
}

static void open_menu(struct top *t)
{
        t->mode = TOP_SORTING;
        t->menu = 0;
        for (size_t i = 0; choice(t)->sort && i < t->n_columns; i++)
                if (strcmp(t->columns[i].column->title, choice(t)->sort) == 0)
                        t->menu = i;
}

/* ---- the list ---------------------------------------------------------------------- */

/* Columns of which one letter sorts; the first one that the view has. */
static const struct {
        char key;
        const char *titles[3];
} sort_keys[] = {
        { 'M', { "HELD", "IN-USE", NULL } },       { 'P', { "PEAK-HELD", "PEAK", NULL } },
        { 'R', { "RESERVED", "IDLE", NULL } },     { 'T', { "AGE", "AGO", NULL } },
        { 'N', { "PID", "TENANT", "PARTITION" } },
};

static bool has_column(const struct top *t, const char *title)
{
        for (size_t i = 0; title && i < t->n_columns; i++)
                if (strcmp(t->columns[i].column->title, title) == 0)
                        return true;
        return false;
}

static int sort_letter(struct top *t, uint32_t key)
{
        for (size_t i = 0; i < N_ELEMENTS(sort_keys); i++) {
                if ((uint32_t)sort_keys[i].key != key)
                        continue;
                for (size_t k = 0; k < N_ELEMENTS(sort_keys[i].titles); k++) {
                        if (!has_column(t, sort_keys[i].titles[k]))
                                continue;
                        top_sort_by(t, sort_keys[i].titles[k], key != 'N');
                        return top_arrange(t);
                }
                snprintf(t->note, sizeof(t->note), "this table has no such column");
        }
        return TOP_DONE;
}

static bool move(struct top *t, uint32_t key)
{
        size_t at = choice(t)->selected, page = t->n_visible > 1 ? t->n_visible - 1 : 1;

        switch (key) {
        case TOP_KEY_UP:
                top_select(t, at > 0 ? at - 1 : 0);
                return true;
        case TOP_KEY_DOWN:
                top_select(t, at + 1);
                return true;
        case TOP_KEY_PAGE_UP:
                top_select(t, at > page ? at - page : 0);
                return true;
        case TOP_KEY_PAGE_DOWN:
                top_select(t, at + page);
                return true;
        case TOP_KEY_HOME:
                top_select(t, 0);
                return true;
        case TOP_KEY_END:
                top_select(t, SIZE_MAX);
                return true;
        case TOP_KEY_LEFT:
                choice(t)->shift -= choice(t)->shift > 0;
                return true;
        case TOP_KEY_RIGHT:
                choice(t)->shift += choice(t)->shift + 1 < t->n_columns;
                return true;
        default:
                return false;
        }
}

static int step_interval(struct top *t, bool is_up)
{
        static const unsigned steps[] = { 100, 200, 500, 1000, 2000, 3000, 5000, 10000, 30000, 60000 };
        unsigned best = t->interval_ms;

        for (size_t i = 0; i < N_ELEMENTS(steps); i++) {
                if (is_up && steps[i] > t->interval_ms) {
                        best = steps[i];
                        break;
                }
                if (!is_up && steps[i] < t->interval_ms)
                        best = steps[i];
        }
        t->interval_ms = best;
        return TOP_READ;
}

static int toggle_tree(struct top *t)
{
        if (t->view == TOP_PARTITIONS) {
                snprintf(t->note, sizeof(t->note), "partitions have no tree");
                return TOP_DONE;
        }
        choice(t)->is_tree = !choice(t)->is_tree;
        return top_arrange(t);
}

static int toggle_group(struct top *t)
{
        size_t at = choice(t)->selected;
        const char *tenant;

        if (at >= t->n_lines || !choice(t)->is_tree || t->view == TOP_PARTITIONS)
                return TOP_DONE;
        tenant = t->rows[t->lines[at].first].tenant;
        for (size_t i = 0; i < t->n_histories; i++)
                if (!t->histories[i].partition && strcmp(t->histories[i].tenant, tenant) == 0)
                        t->histories[i].is_collapsed = !t->histories[i].is_collapsed;
        while (at > 0 && !t->lines[at].is_group)
                at--;
        top_select(t, at);
        return top_arrange(t);
}

static int show_next(struct top *t, int step)
{
        int r = top_show(t, (enum top_view)(((int)t->view + step + TOP_VIEWS) % TOP_VIEWS));

        return r < 0 ? r : TOP_READ;
}

static int invert(struct top *t)
{
        choice(t)->is_descending = !choice(t)->is_descending;
        return top_arrange(t);
}

static int step_sort(struct top *t, int step)
{
        top_sort_step(t, step);
        return top_arrange(t);
}

static int enter(struct top *t, enum top_mode mode)
{
        t->mode = mode;
        if (mode == TOP_TIMING)
                t->typed[0] = '\0';
        else if (mode == TOP_SEARCHING)
                t->search[0] = '\0';
        else if (mode == TOP_SORTING)
                open_menu(t);
        return TOP_DONE;
}

static int list_key(struct top *t, uint32_t key)
{
        switch (key) {
        case 'q':
        case TOP_KEY_F10:
                return TOP_QUIT;
        case 'h':
        case '?':
        case TOP_KEY_F1:
                return enter(t, TOP_HELPING);
        case '/':
        case TOP_KEY_F3:
                return enter(t, TOP_SEARCHING);
        case '\\':
        case TOP_KEY_F4:
                return enter(t, TOP_FILTERING);
        case 't':
        case TOP_KEY_F5:
                return toggle_tree(t);
        case TOP_KEY_F6:
                return enter(t, TOP_SORTING);
        case 'd':
                return enter(t, TOP_TIMING);
        case '<':
        case '>':
                return step_sort(t, key == '>' ? 1 : -1);
        case '+':
        case '-':
                return step_interval(t, key == '+');
        case 'I':
                return invert(t);
        case ' ':
        case TOP_KEY_ENTER:
                return toggle_group(t);
        case TOP_KEY_TAB:
        case TOP_KEY_BACK_TAB:
                return show_next(t, key == TOP_KEY_TAB ? 1 : -1);
        default:
                return sort_letter(t, key);
        }
}

int top_key(struct top *t, uint32_t key)
{
        t->note[0] = '\0';
        switch (t->mode) {
        case TOP_SEARCHING:
                return search_key(t, key);
        case TOP_FILTERING:
                return filter_key(t, key);
        case TOP_TIMING:
                return timing_key(t, key);
        case TOP_SORTING:
                return sorting_key(t, key);
        case TOP_HELPING:
                t->mode = TOP_LIST;
                return TOP_DONE;
        case TOP_LIST:
                break;
        }
        return move(t, key) ? TOP_DONE : list_key(t, key);
}
