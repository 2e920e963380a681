/* Pages of 2 MiB for host memory, by a process of its own. The kernel has one lock for all collapses of the machine and
 * waits for all processors under it, for seconds where jobs use them, and a process that waits can map nothing: bfcd
 * could serve no client.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KEEPER_COLLAPSE_H
#define KEEPER_COLLAPSE_H

#include <stdint.h>

/* The process starts, so that the first call need not wait for that; and ends. */
void keeper_start_collapsing(void);
void keeper_stop_collapsing(void);

/* As host_pages_collapse(), but returns after some ms: pages stay small where the kernel takes longer, also of the calls
 * until it has done that. A call is 20 ms and 2 ms a page, and at most 200 ms; part of it may be spent on another
 * thread's. Without the process it is host_pages_collapse(). Any thread. */
void keeper_collapse(int fd, uint64_t n_bytes);

#endif
