/* The library's clock: milliseconds of CLOCK_MONOTONIC, for time-outs.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CLIENT_CLOCK_H
#define BFC_CLIENT_CLOCK_H

#include <stdint.h>
#include <time.h>

static inline int64_t clock_now_ms(void)
{
        struct timespec now;

        clock_gettime(CLOCK_MONOTONIC, &now);
        return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

#endif
