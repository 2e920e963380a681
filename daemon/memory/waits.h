/* What is counted of waiting: how long requests waited for their grant, and how fast memory is returned to those that wait.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_WAITS_H
#define BFCD_WAITS_H

#include <stddef.h>
#include <stdint.h>

/* ---- grants ---- */

/* How long requests waited for their grant, by the way in which they were served, as counts in fixed classes.
 *
 * The time is from the moment when the request was handled to its grant. A request that is served at once from backed
 * space is not timed: it counts in the first class with no time, because a look at the clock would cost as much as
 * a part of the grant. */

enum grant_way {
        GRANT_BACKED,    /* there was backed space for it */
        GRANT_GROWN,     /* the device made memory for it */
        GRANT_RECLAIMED, /* memory was released for it, or asked for */
        GRANT_WAITED,    /* it waited for others to free, for as long as it allowed */
        GRANT_WAYS,
};

#define GRANT_CLASSES 13u /* the last one has no bound */

/* The longest time of each class but the last. */
static const uint64_t grant_bounds_ns[GRANT_CLASSES - 1] = {
        100000,      500000,      2000000,     10000000,    50000000,     200000000,
        1000000000u, 5000000000u, 20000000000, 60000000000, 180000000000, 600000000000,
};

struct grants {
        struct grants_of_way {
                uint64_t n[GRANT_CLASSES];
                uint64_t ns; /* of all of them */
        } ways[GRANT_WAYS];
};

static inline const char *grant_way_name(enum grant_way way)
{
        static const char *const names[GRANT_WAYS] = { "backed", "grown", "reclaimed", "waited" };

        return names[way];
}

static inline void grants_add(struct grants *g, enum grant_way way, uint64_t ns)
{
        size_t i = 0;

        while (i < GRANT_CLASSES - 1 && ns > grant_bounds_ns[i])
                i++;
        g->ways[way].n[i]++;
        g->ways[way].ns += ns;
}

/* ---- returns ---- */

/* How much memory was returned recently: to a quota or a partition, for requests that wait.
 *
 * Two halves of a window are counted, so that nothing is kept per return. The rate is that of the last
 * RETURNS_HALF_MS to twice as long; a shorter history counts as that long, too. */

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
