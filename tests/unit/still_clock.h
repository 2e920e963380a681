/* A clock that moves only when the test says so. So no time-out ends early on a slow machine. For programs that
 * are linked with -Wl,--wrap=clock_gettime.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_STILL_CLOCK_H
#define BFC_TESTS_STILL_CLOCK_H

#include <stdint.h>
#include <time.h>

static uint64_t still_clock_ms = 1000000;

int __wrap_clock_gettime(clockid_t clock, struct timespec *ret);
int __wrap_clock_gettime(clockid_t clock, struct timespec *ret)
{
        uint64_t now = __atomic_load_n(&still_clock_ms, __ATOMIC_RELAXED);

        (void)clock;
        ret->tv_sec = (time_t)(now / 1000);
        ret->tv_nsec = (long)(now % 1000) * 1000000;
        return 0;
}

static inline void still_clock_pass(uint64_t ms)
{
        __atomic_add_fetch(&still_clock_ms, ms, __ATOMIC_RELAXED);
}

#endif
