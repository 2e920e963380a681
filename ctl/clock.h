/* The monotonic clock, and pauses.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CTL_CLOCK_H
#define BFC_CTL_CLOCK_H

#include <stdint.h>
#include <time.h>

static inline uint64_t clock_ms(void)
{
        struct timespec now;

        clock_gettime(CLOCK_MONOTONIC, &now);
        return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

static inline void clock_pause(unsigned ms)
{
        nanosleep(&(struct timespec){ .tv_sec = ms / 1000, .tv_nsec = (long)(ms % 1000) * 1000000 }, NULL);
}

#endif
