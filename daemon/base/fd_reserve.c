/* The reserve of file descriptors; see fd_reserve.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/base/fd_reserve.h"

#define FD_RESERVE_PART 8u /* of a small hard limit */

static struct {
        struct rlimit usual, raised;
} limits;

uint64_t fd_reserve_usable_of(const struct rlimit *limit)
{
        rlim_t n = limit->rlim_max / FD_RESERVE_PART;

        return limit->rlim_max - (n < FD_RESERVE_MAX ? n : FD_RESERVE_MAX);
}

uint64_t fd_reserve_usable(void)
{
        struct rlimit now;

        return getrlimit(RLIMIT_NOFILE, &now) < 0 ? UINT64_MAX : fd_reserve_usable_of(&now);
}

uint64_t fd_reserve_set(void)
{
        if (getrlimit(RLIMIT_NOFILE, &limits.raised) < 0)
                return UINT64_MAX;
        limits.raised.rlim_cur = limits.raised.rlim_max;
        limits.usual = limits.raised;
        limits.usual.rlim_cur = fd_reserve_usable_of(&limits.raised);
        (void)setrlimit(RLIMIT_NOFILE, &limits.usual);
        return limits.usual.rlim_cur;
}

bool fd_reserve_has(int fd)
{
        return limits.usual.rlim_max > 0 && fd >= 0 && (rlim_t)fd >= limits.usual.rlim_cur;
}

static void set_limit(const struct rlimit *limit)
{
        if (limit->rlim_max > 0) /* fd_reserve_set() was called */
                (void)setrlimit(RLIMIT_NOFILE, limit);
}

void fd_reserve_begin(void)
{
        set_limit(&limits.raised);
}

void fd_reserve_end(void)
{
        set_limit(&limits.usual);
}
