/* The program's word that it is idle; see docs/preload.md.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Between the two calls the program uses none of its memory of cuMemCreate(), neither by work nor by calls, except to let it go. So
 * this memory sleeps (lent.h), and bfcd may have it parked: by an operator, or for others that wait. Without a begin none is ever
 * parked. These functions are the program's, which finds them by dlsym(), as python/bfcd does. */
#ifndef BFC_PRELOAD_IDLE_H
#define BFC_PRELOAD_IDLE_H

#include <stdbool.h>
#include <stdint.h>

#define IDLE_WAIT_MS 600000u /* the longest wait of the daemon */

/* Waits for the work of the GPUs. Returns how many bytes may be parked. 0: no memory can be, or the program has bound some to
 * multicast objects or has handles of it for other devices. -EBUSY: work fails, or a stream is being captured: the begin does not
 * count. All others count, and each needs an end. */
__attribute__((visibility("default"))) int64_t bfc_idle_begin(void);

/* While other begins have no end it only counts. That of the last begin wakes all of the memory, waiting up to wait_ms for room on each
 * GPU, at the same addresses. An end with an error does not count: some of the memory sleeps on, and the program calls it again.
 * -EDQUOT, -ENOMEM: there is no room. -EINTR: a signal handler ran in the waiting thread. Others: as bfc_use_begin_tag(). -EINVAL: no
 * begin is without an end. */
__attribute__((visibility("default"))) int bfc_idle_end(uint32_t wait_ms);

/* Between these two nothing sleeps, so that a GPU's client can end. False: there is no room. */
bool idle_stop(void);
void idle_resume(void);

#endif
