/* The state of bfcctl top: the last sample of the daemon's lists, and what the user chose to see of it.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * It knows no terminal and no socket. top_take() replaces the sample, top_arrange() filters, sorts and groups its
 * rows to lines, top_key() applies a key, and top_frame.h draws. Rows are those of the lists; `lines` are what
 * is shown of them: line i covers rows[first, first + n), and a line that is no group covers one row. */
#ifndef BFC_CTL_TOP_MODEL_H
#define BFC_CTL_TOP_MODEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ctl/list.h"
#include "device/nvml.h"
#include "ctl/table.h"

enum top_view { TOP_SESSIONS, TOP_TENANTS, TOP_PARTITIONS, TOP_VIEWS };

#define TOP_MAX_COLUMNS 40u
#define TOP_HISTORY     60u /* samples */
#define TOP_TEXT        64u /* bytes that a user may type, with the 0 */
#define TOP_MIN_MS      100u
#define TOP_MAX_MS      3600000u

/* What was read at one time. */
struct top_sample {
        char version[64];  /* the daemon's */
        struct list *list; /* partitions and tenants, also sessions if has_sessions */
        bool has_sessions;
        struct nvml_use *outside; /* the memory of processes outside of the broker */
        size_t n_outside;
        bool has_outside;                /* NVML works */
        uint64_t n_others, bytes_others; /* processes of these without a session; with has_sessions */
};

/* A tenant's reserved bytes, to which limits apply, in a partition and in all. */
struct top_history {
        char *tenant;
        char *partition;             /* NULL: all */
        uint64_t bytes[TOP_HISTORY]; /* the last one is the newest */
        size_t n;                    /* samples, at the end of bytes */
        bool is_seen;
        bool is_collapsed; /* its group in the tree */
};

struct top_column {
        const struct table_column *column;
        bool is_own; /* of struct top_row, not of the daemon's row */
};

struct top_row {
        const void *row;    /* of the list */
        const char *tenant; /* NULL: of a partition */
        const struct top_history *history;
        uint64_t outside; /* UINT64_MAX: not known */
        uint64_t number;  /* of the column by which rows are sorted */
        uint64_t sum;     /* of its group, if such a sum has a meaning */
        char *text;       /* as number, of a column of texts */
        size_t index;     /* in the list */
};

struct top_line {
        size_t first, n;
        bool is_group, is_last; /* the last one of its group */
};

enum top_mode { TOP_LIST, TOP_SEARCHING, TOP_FILTERING, TOP_SORTING, TOP_TIMING, TOP_HELPING };

/* What the user chose in one view. */
struct top_choice {
        const char *sort; /* title of a column; NULL: the daemon's order */
        bool is_descending, is_tree;
        size_t selected, first;           /* lines: with the cursor, and the first one on the screen */
        char identity[512];               /* of the selected line */
        size_t shift;                     /* columns that are scrolled out at the left */
        unsigned widths[TOP_MAX_COLUMNS]; /* columns do not become narrower */
        size_t n_widths;                  /* the columns that these are of */
};

struct top {
        struct top_sample sample;
        struct top_history *histories;
        size_t n_histories, n_tenants; /* n_tenants of these are of all partitions */
        struct top_row *rows;
        size_t n_rows, n_all; /* after the filter, and before it */
        struct top_line *lines;
        size_t n_lines;
        enum top_view view;
        enum top_mode mode;
        struct top_choice choices[TOP_VIEWS];
        struct top_column columns[TOP_MAX_COLUMNS]; /* of the view */
        size_t n_columns;
        char filter[TOP_TEXT], search[TOP_TEXT], typed[TOP_TEXT]; /* typed: in TOP_TIMING */
        size_t menu;                                              /* the line of TOP_SORTING */
        unsigned interval_ms;
        bool is_wide;        /* all columns */
        size_t n_visible;    /* lines that the screen has room for, as it was drawn last */
        const char *trouble; /* instead of fresh data, or NULL */
        char note[128];      /* the answer to a key */
};

void top_init(struct top *t, enum top_view view, unsigned interval_ms, bool is_wide);
void top_end(struct top *t);

/* Takes the sample over, also on failure. -ENOMEM. */
int top_take(struct top *t, struct top_sample *sample);
void top_sample_end(struct top_sample *sample);

/* Makes the lines again: after a choice changed. -ENOMEM. */
int top_arrange(struct top *t);

/* Changes the view; the rows of another one need another sample if that has none of them. */
int top_show(struct top *t, enum top_view view);

const char *top_view_name(enum top_view view);
Bfcd__List__Kind top_kind(enum top_view view);

/* The text of a line in a column; the caller frees it. NULL when out of memory. */
char *top_cell(const struct top *t, const struct top_line *line, size_t column);
enum table_mark top_mark(const struct top *t, const struct top_line *line, size_t column);

/* Puts the cursor on a line, at most the last one. */
void top_select(struct top *t, size_t line);

/* The next line after the cursor with the text of the search; false: there is none. */
bool top_find(struct top *t, bool from_next);

/* The column of bars, of which the end counts. */
bool top_is_history(const struct table_column *c);

/* Sorts by another column: by its title, or steps to the next shown one. */
void top_sort_by(struct top *t, const char *title, bool is_descending);
void top_sort_step(struct top *t, int step);

/* The history as bars, the newest sample at the right: at most n_bars, which are three bytes each. */
void top_spark(const struct top_history *h, size_t n_bars, char *ret);

#endif
