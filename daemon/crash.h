/* Counts this process's crashes: its end by a signal that says that it, or what it works on, is
 * broken (an assertion, a bad address, the watchdog of the service manager). Whoever ends it
 * from outside, with SIGKILL or SIGTERM, is not counted.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_CRASH_H
#define BFCD_CRASH_H

#include <stdatomic.h>
#include <stdint.h>

/* From now on a crash adds one to *count, which outlives the process (it lies in shared memory),
 * and then goes on as it would have. NULL: not any more. One at a time; before threads are
 * started, or from the thread that started them. */
void crash_count_in(_Atomic uint32_t *count);

#endif
