/* Command lines of other processes, in a bounded time.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The kernel reads /proc/PID/cmdline from the memory of that process, under the lock of that memory. A process with a file
 * system of its own (FUSE) can keep the lock: munmap() has it while it writes to a file. Only SIGKILL ends such a read. So a
 * child reads, which has no other file and can be left behind. Functions are for one thread at a time.
 *
 * Bounds: a read takes CMDLINE_WAIT_MS at most. After one that took longer no command line of the same user is read for
 * CMDLINE_PAUSE_MS, nor while that child waits. At most CMDLINE_STUCK users can do so: then none is read. */
#ifndef BFC_CTL_CMDLINE_H
#define BFC_CTL_CMDLINE_H

#include <stddef.h>
#include <stdint.h>

#define CMDLINE_WAIT_MS  1000u
#define CMDLINE_PAUSE_MS 600000u
#define CMDLINE_STUCK    2u

/* The arguments, each with its 0, in ret, which has room for n_max > 0 bytes and is ended by a 0; how many bytes. 0: the
 * process is not visible, or its user lets reads wait. uid: of the session's process. */
size_t cmdline_read(uint64_t pid, uint64_t uid, char *ret, size_t n_max);

/* Ends the child, as an exit does. */
void cmdline_stop(void);

#endif
