/* How much memory was returned recently: to a quota or a partition, for requests that wait.
 *
 * Two halves of a window are counted, so that nothing is kept per return. The rate is that of the last
 * RETURNS_HALF_MS to twice as long; a shorter history counts as that long, too.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_RETURNS_H
#define BFCD_RETURNS_H

#include <stdint.h>

#define RETURNS_HALF_MS 120000u
#define RETURNS_UNKNOWN UINT64_MAX

struct returns {
        uint64_t began_ms; /* this half; 0: nothing was returned yet */
        uint64_t n_bytes;  /* in this half */
        uint64_t n_before; /* in the half before */
};

static inline struct returns returns_at(const struct returns *r, uint64_t now_ms)
{
        uint64_t age_ms = now_ms - r->began_ms;

        if (age_ms < RETURNS_HALF_MS)
                return *r;
        if (age_ms < 2 * RETURNS_HALF_MS)
                return (struct returns){ r->began_ms + RETURNS_HALF_MS, 0, r->n_bytes };
        return (struct returns){ now_ms, 0, 0 };
}

static inline void returns_add(struct returns *r, uint64_t n_bytes, uint64_t now_ms)
{
        *r = returns_at(r, now_ms);
        r->n_bytes += n_bytes;
}

/* When n_bytes more will have been returned at this rate. RETURNS_UNKNOWN: nothing was returned. */
static inline uint64_t returns_estimate_ms(const struct returns *r, uint64_t n_bytes, uint64_t now_ms)
{
        struct returns at = returns_at(r, now_ms);
        double ms, sum = (double)at.n_bytes + (double)at.n_before;

        if (at.n_bytes == 0 && at.n_before == 0)
                return RETURNS_UNKNOWN;
        ms = (double)n_bytes / sum * (double)(RETURNS_HALF_MS + now_ms - at.began_ms);
        return ms < 1e18 ? (uint64_t)ms : RETURNS_UNKNOWN;
}

#endif
