/* Counts this process's crashes: its end by a signal that it caused itself (an assertion, a bad
 * address). A signal that another process sends does not count, whatever its number: neither
 * SIGKILL nor the SIGABRT of the service manager's watchdog. A loop that hangs can be the work of a
 * client, and must not cost the other clients their sessions.
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
