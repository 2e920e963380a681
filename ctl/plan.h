/* A plan: the smallest limit with which the daemon serves a trace.
 *
 * A limit serves a trace if the daemon refuses no request of one process that replays the trace as bfc-replay
 * does, without other users of the quota. The limit of a plan serves, and 2 MiB less does not. A still lower limit
 * may serve by chance, because blocks are placed differently. The search does not look for it.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CTL_PLAN_H
#define BFC_CTL_PLAN_H

#include <jansson.h>
#include <signal.h>
#include <stdio.h>

#include "ctl/plan_place.h"
#include "ctl/trace.h"

#define PLAN_STEP_BYTES (UINT64_C(2) << 20) /* limits are multiples of it */

struct plan_options {
        const struct trace *trace;
        struct plan_place place;
        bool has_cache;
        const volatile sig_atomic_t *stop;
};

/* The limit is the sum of the peak of live bytes and four differences. The last two may be negative. */
struct plan {
        uint64_t limit_bytes;
        uint64_t peak_live_bytes;
        int64_t rounding_bytes;      /* blocks are multiples of 256 bytes */
        int64_t placement_bytes;     /* one region of memory with best fit needs more than the blocks */
        int64_t extent_bytes;        /* memory comes and goes in whole extents */
        int64_t cache_bytes;         /* the client's cache; 0 without one */
        uint64_t peak_charged_bytes; /* with this limit */
        uint64_t peak_client_bytes;
        uint64_t largest_extent_bytes; /* in which a block began or ended */
        uint64_t n_runs;               /* replays */
        double seconds;
};

/* Removes all variables BFC_... from the environment: a plan is the same in a job of bfcctl run, too. Not beside another
 * thread. -ERANGE: no limit serves the trace; -EINTR; -ENOMEM, ...: with a sentence, the caller's to free. */
int plan_find(const struct plan_options *options, struct plan *ret, char **ret_error);

/* The report, for people and for programs. trace_name and scale as in a replay's. */
struct plan_report {
        const char *trace_name;
        double scale;
        const struct plan_options *options;
        const struct plan *plan;
};
int plan_print(FILE *out, const struct plan_report *report); /* -ENOMEM, -EIO */
json_t *plan_json(const struct plan_report *report);         /* NULL when out of memory */

#endif
