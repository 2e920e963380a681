/* How long requests waited for their grant, by the way in which they were served, as counts in fixed classes.
 *
 * The time is from the moment when the request was handled to its grant. A request that is served at once from backed
 * space is not timed: it counts in the first class with no time, because a look at the clock would cost as much as
 * a part of the grant.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_GRANTS_H
#define BFCD_GRANTS_H

#include <stddef.h>
#include <stdint.h>

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

#endif
