/* File descriptors that only connections of administrators can take, so that the admin socket is served
 * when clients have used up all others.
 *
 * The kernel gives numbers below the soft limit (RLIMIT_NOFILE) only. So the soft limit stays below the hard
 * one, and is raised only while the event loop accepts or serves an administrator. Another thread may get a
 * number of the reserve in that time. So extents with such numbers are not kept; what is open for a short
 * time only is why the reserve is larger than what administrators need.
 *
 * Shortage in the whole system (ENFILE) is not covered.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_FD_RESERVE_H
#define BFCD_FD_RESERVE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/resource.h>

#define FD_RESERVE_MAX 144u /* the socket and the process of 64 administrators, and files that are read */

/* How many file descriptors a hard limit leaves for everything else: without the reserve, which is FD_RESERVE_MAX or an
 * eighth of a small limit. And those of this process. */
uint64_t fd_reserve_usable_of(const struct rlimit *limit);
uint64_t fd_reserve_usable(void);

/* Makes this the soft limit, and returns it. */
uint64_t fd_reserve_set(void);

/* Whether this number is of the reserve. From any thread. */
bool fd_reserve_has(int fd);

/* From the event loop, in pairs, which do not nest. */
void fd_reserve_begin(void);
void fd_reserve_end(void);

#endif
