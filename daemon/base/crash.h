/* Writes down this process's crashes: its end by a signal that it caused itself (an assertion, a bad address).
 * A signal from another process does not count, whatever its number: neither SIGKILL nor the SIGABRT of
 * the service manager's watchdog. A client may cause a hanging loop, which must not cost the other
 * clients their sessions.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_CRASH_H
#define BFCD_CRASH_H

#include <stdatomic.h>
#include <stdint.h>

/* Of *object: the process crashed while it was at this object. */
#define CRASH_MARK (UINT32_C(1) << 31)

/* From now on a crash is written down and then continues as usual. *object is what the main thread is at, without
 * CRASH_MARK; 0: at no object. A crash of that thread at an object sets CRASH_MARK there. Any other crash adds one to
 * *count. Both are in shared memory and outlive the process. NULL: stop. One place at a time; before threads are
 * started, or from the thread that started them. */
void crash_count_in(_Atomic uint32_t *count, _Atomic uint32_t *object);

#endif
