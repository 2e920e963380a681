/* Counts this process's crashes: its end by a signal that it caused itself (an assertion, a bad address).
 * A signal from another process does not count, whatever its number: neither SIGKILL nor the SIGABRT of
 * the service manager's watchdog. A client may cause a hanging loop, which must not cost the other
 * clients their sessions.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_CRASH_H
#define BFCD_CRASH_H

#include <stdatomic.h>
#include <stdint.h>

/* From now on a crash adds one to *count, which is in shared memory and outlives the process, and then
 * continues as usual. NULL: stop counting. One counter at a time; before threads are started, or from the
 * thread that started them. */
void crash_count_in(_Atomic uint32_t *count);

#endif
