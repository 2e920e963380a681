/* The list of bfcctl top: its columns and lines on the screen.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CTL_TOP_LIST_H
#define BFC_CTL_TOP_LIST_H

#include "ctl/top_frame.h"

/* Draws the titles and the lines, or the menu of columns, in rows from `row` to before `end`. end 0: all lines.
 * -ENOMEM. */
int top_draw_list(struct top *t, struct top_frame *f, unsigned row, unsigned end);

#endif
