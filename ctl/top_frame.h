/* A screen of bfcctl top as text with styles, before it reaches a terminal or a file.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Widths are columns of a terminal, so the process needs a locale with UTF-8 (LC_CTYPE). */
#ifndef BFC_CTL_TOP_FRAME_H
#define BFC_CTL_TOP_FRAME_H

#include <stdio.h>

#include "ctl/top_model.h"

enum top_style {
        TOP_PLAIN,
        TOP_BOLD,
        TOP_TITLE,
        TOP_SORTED,
        TOP_SELECTED,
        TOP_WARNING,
        TOP_ALARM,
        TOP_USED,
        TOP_RESERVED,
        TOP_GUARANTEED,
        TOP_KEY,
        TOP_STYLES,
};

/* Printable UTF-8 of one row. */
struct top_span {
        unsigned row, column, width;
        enum top_style style;
        char *text;
};

struct top_frame {
        unsigned n_rows, n_columns;
        struct top_span *spans; /* from the top down, from left to right */
        size_t n_spans, n_room;
        bool failed; /* out of memory */
};

/* n_rows 0: for a file, with all lines, and without keys. Scrolls so that the cursor is visible. -ENOMEM. */
int top_draw(struct top *t, unsigned n_rows, unsigned n_columns, struct top_frame *ret);
void top_frame_end(struct top_frame *f);

/* As lines without styles. -EIO. */
int top_frame_print(FILE *out, const struct top_frame *f);

/* Appends at most `width` columns of a text; returns how many. */
unsigned top_put(struct top_frame *f, unsigned row, unsigned column, unsigned width, enum top_style style,
                 const char *text);

#endif
