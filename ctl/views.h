/* Pictures of a trace: for PyTorch's memory viewer, for Perfetto, and as a plot.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CTL_VIEWS_H
#define BFC_CTL_VIEWS_H

#include <stdio.h>

#include "ctl/trace.h"

/* The number of events, without the frees of buffers that were never freed. They are the last events. */
size_t views_n_events(const struct trace *t);

/* The time between the first event of the trace and this one. n: views_n_events(). An event from index n on is 1
 * after the last of these n. */
uint64_t views_time(const struct trace *t, size_t n, size_t event);

/* The number of events up to the allocation that reaches the peak, including it. *ret_bytes: the peak. */
size_t views_peak(const struct trace *t, uint64_t *ret_bytes);

/* A label as text in JSON, without quotes. */
void views_json_text(FILE *out, const char *text);

/* Each writes a whole file. name: the trace's. -ENOMEM, -EIO; -ERANGE: it does not fit into 1 TiB. */
int views_snapshot(FILE *out, const struct trace *t);
int views_timeline(FILE *out, const struct trace *t);
int views_plot(FILE *out, const struct trace *t, const char *name);

#endif
