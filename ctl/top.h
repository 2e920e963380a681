/* bfcctl top: a live view of sessions, tenants and partitions.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CTL_TOP_H
#define BFC_CTL_TOP_H

#include "ctl/top_feed.h"

struct top_options {
        const char *socket; /* NULL: BFC_MONITOR_SOCKET, or the default one */
        unsigned interval_ms;
        bool is_once; /* one frame, to standard output */
        bool is_wide;
        enum top_view view;
};

/* "sessions", "tenants", "partitions". */
bool top_find_view(const char *name, enum top_view *ret);

/* Prints its errors; the exit status: 0, or 1. */
int top_run(const struct top_options *o);

/* The screen (top_screen.c), until the user ends it. Takes the source over. A negative errno: *ret_error says what
 * to do. */
int top_screen_run(struct top *t, struct top_source *source, const char *socket, const char **ret_error);

#endif
