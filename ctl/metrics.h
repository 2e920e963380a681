/* bfcctl metrics: the daemon's state for Prometheus.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CTL_METRICS_H
#define BFC_CTL_METRICS_H

#include <stdbool.h>
#include <stdio.h>

#include "ctl/list.h"

/* The kinds that it needs in one list; see ask_lists(). */
#define METRICS_LISTS 5u
extern const Bfcd__List__Kind metrics_lists[METRICS_LISTS];

struct metrics_options {
        bool openmetrics; /* in this format; else in the text format of Prometheus, version 0.0.4 */
        bool each_lease; /* also those that processes caused: else these are summed by tenant, partition and maker */
};

/* The list has these. -EIO, -ENOMEM. */
int metrics_print(FILE *out, const struct list *l, const struct metrics_options *o);

#endif
