/* Progress on a terminal: one line on standard error, from the first second on. Nothing where standard error is
 * not a terminal.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CTL_PROGRESS_H
#define BFC_CTL_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

struct progress {
        const char *what; /* "replay": what is being done */
        uint64_t n_done;
        uint64_t n_total;  /* 0: not known */
        uint64_t begin_ms; /* 0: nothing is to be shown */
        uint64_t shown_ms; /* 0: not yet */
        FILE *out;
};

/* out: NULL for standard error. what: constant text. n_total: 0: not known. */
void progress_begin(struct progress *p, FILE *out, const char *what, uint64_t n_total);

/* False: nothing is ever shown. */
static inline bool progress_is_shown(const struct progress *p)
{
        return p->begin_ms != 0;
}

/* Sets both numbers and reads the clock. For callers that wait and call this a few times a second. */
void progress_set(struct progress *p, uint64_t n_done, uint64_t n_total);

/* Takes the line away. May be called again. */
void progress_end(struct progress *p);

#endif
