/* bench-client --trace: a job's own life, through the cache.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_BENCH_CLIENT_TRACE_H
#define BFC_BENCH_CLIENT_TRACE_H

#include <stdbool.h>

/* Replays a trace n_repeats times, with a daemon of its own whose limit is limit_mib (0: twice
 * what lives at most), and reports. */
void client_trace(const char *bfcd, const char *path, unsigned n_repeats, unsigned limit_mib, bool json);

#endif
