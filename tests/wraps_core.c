/* See wraps.h: the C library's functions, and those of device/ and client/process.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/wraps.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>

#include "client/process.h"
#include "device/backend.h"
#include "device/device.h"

WRAP(void *, malloc, (size_t n_bytes), (n_bytes))
WRAP(void *, calloc, (size_t n, size_t n_bytes), (n, n_bytes))
WRAP(void *, realloc, (void *p, size_t n_bytes), (p, n_bytes))
WRAP(int, clock_gettime, (clockid_t clock, struct timespec *ret), (clock, ret))
WRAP(int, nanosleep, (const struct timespec *pause, struct timespec *ret_left), (pause, ret_left))
WRAP(int, madvise, (void *at, size_t n_bytes, int advice), (at, n_bytes, advice))
WRAP(int, memfd_create, (const char *name, unsigned flags), (name, flags))
WRAP(int, epoll_ctl, (int epoll, int op, int fd, struct epoll_event *event), (epoll, op, fd, event))
WRAP(int, getsockopt, (int fd, int level, int option, void *ret, socklen_t *ret_n),
     (fd, level, option, ret, ret_n))
WRAP(int, setsockopt, (int fd, int level, int option, const void *value, socklen_t n),
     (fd, level, option, value, n))
WRAP(int, thread_new, (void *(*run)(void *), void *userdata, const char *name, pthread_t *ret),
     (run, userdata, name, ret))
WRAP(int, device_range_new, (const struct device_view *view, uint64_t n_bytes, struct device_range **ret),
     (view, n_bytes, ret))
WRAP(int, host_streams_finish, (void), ())
