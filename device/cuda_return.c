/* Released memory that returns, or not; see cuda_return.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "device/cuda_return.h"

#include <errno.h>
#include <time.h>

#define LOOKS       7 /* waiting 1, 2, 4, ... 32 ms before each but the first */
#define LOOKS_SMALL 8 /* 32 ms more before another one */
#define MAX_CONTEXTS                                                                                         \
        (UINT64_C(1) << 30)  /* the most that others may take at a time; a context has at most 555 MiB */
#define TIMEOUT_MS      100  /* maximum waiting time in a period */
#define PATIENCE_PERIOD 1000 /* ms */

static int64_t now_ms(void)
{
        struct timespec now;

        clock_gettime(CLOCK_MONOTONIC, &now);
        return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

struct cuda_wait_budget cuda_wait_budget_new(void)
{
        return (struct cuda_wait_budget){ .period_ms = now_ms() };
}

/* false: not any more. */
static bool wait_ms(struct cuda_wait_budget *p, int64_t ms)
{
        const struct timespec pause = { .tv_nsec = ms * 1000000L };
        int64_t now = now_ms();

        if (now - p->period_ms >= PATIENCE_PERIOD) {
                p->period_ms = now;
                p->waited_ms = 0;
        }
        if (p->gave_up || ms > TIMEOUT_MS - p->waited_ms)
                return false;
        p->waited_ms += ms;
        nanosleep(&pause, NULL);
        return true;
}

/* An extent is returned whole or not at all. It counts as returned when the free bytes have risen by half
 * of it above their lowest value. Unreclaimed memory does not change them. If they changed by too little,
 * other processes were active: that proves nothing about an extent that is not larger than what they may
 * take, and it counts as returned. A larger one counts as unreclaimed.
 *
 * -EBUSY: unreclaimed. A client that keeps hundreds of extents must not delay all growth for each of
 * them. So once memory was not returned, the next checks do not wait until one finds its memory at once,
 * and the waiting time per period is bounded. As a consequence, memory that returns late, after
 * unreclaimed memory or after many late returns, counts as unreclaimed too. */
int cuda_wait_for_return(struct cuda_wait_budget *p, cuda_free_bytes_fn look, void *device,
                         uint64_t n_free_before, uint64_t n_bytes)
{
        const bool is_small = n_bytes <= MAX_CONTEXTS;
        uint64_t n_free, lowest = n_free_before;
        bool has_changed = false;
        int r, n_looks = 0;

        do {
                r = look(device, &n_free);
                if (r == -ENODEV || r == -ENOTRECOVERABLE)
                        return r;
                if (r == 0 && n_free >= lowest && n_free - lowest >= n_bytes / 2) {
                        p->gave_up = false;
                        return 0;
                }
                if (r == 0)
                        has_changed = has_changed || n_free != n_free_before;
                if (r == 0 && n_free < lowest)
                        lowest = n_free;
                n_looks++;
        } while (n_looks < (is_small ? LOOKS_SMALL : LOOKS) &&
                 wait_ms(p, INT64_C(1) << (n_looks < LOOKS ? n_looks - 1 : LOOKS - 2)));
        if (is_small && has_changed)
                return 0;
        p->gave_up = true;
        return -EBUSY;
}
