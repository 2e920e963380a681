/* The closer: closes file descriptors whose close may take long, on its own threads.
 *
 * When the kernel closes a socket it also closes the contents of its queue, including file descriptors
 * that another process sent. The sender determines how long that takes: a TCP socket lingers, a memory
 * file of many GiB is freed page by page, as are buffers of one byte each. So the loop never closes such a socket.
 *
 * Bounds: at most CLOSER_THREADS threads. Further file descriptors wait in a list. A timer signal
 * interrupts each close after CLOSER_TIME_LIMIT_MS, which ends the lingering of sockets but not the freeing
 * of memory. Threads end after some seconds without work.
 *
 * The state belongs to the process, since a thread in a close may outlive everything else. Any thread may
 * call the functions. No policy, no log.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_CLOSER_H
#define BFCD_CLOSER_H

#include <stddef.h>

#define CLOSER_THREADS       64u
#define CLOSER_TIME_LIMIT_MS 10u

/* Takes over fd and closes it soon. Does not wait. */
void closer_close(int fd);

/* How many file descriptors wait for a thread; those whose close has begun do not count. */
size_t closer_n_waiting(void);

/* How many closes are under way. */
size_t closer_n_busy(void);

#endif
