/* The report of bfc-replay.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CTL_REPORT_H
#define BFC_CTL_REPORT_H

#include <jansson.h>
#include <stdio.h>

#include "ctl/job.h"

struct report {
        const char *trace_name;
        const struct trace *trace; /* scaled */
        double scale;
        uint32_t n_jobs;
        uint32_t n_repeats;
        bool verify;
        bool ends_at_refusal; /* each job */
        double seconds;       /* from the first job's start to the last one's end */
        const struct job_totals *totals;
        const struct job_result *results; /* n_jobs */
};

enum {
        REPORT_FINE = 0,
        REPORT_REFUSED = 1,   /* refusals, or a job that failed */
        REPORT_CORRUPTED = 3, /* a block that changed, or was left */
};

int report_status(const struct report *report);

/* -ENOMEM, -EIO. */
int report_text(FILE *out, const struct report *report);

/* NULL when out of memory. */
json_t *report_json(const struct report *report);

/* Problems, one per line; no output if there are none. */
void report_troubles(FILE *out, const struct report *report);

#endif
