/* An arena as the daemon runs one, without a device: a limit on backed bytes,
 * growth on demand, release when the limit is in the way, a further region when
 * the address space has no stretch that is long enough. Backing and release are
 * confirmed at once. What tests prove and the bench measures about growth goes
 * through here.
 *
 *   reserved <= limit
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_ARENA_H
#define BFC_TESTS_ARENA_H

#include "bfc/bfc.h"

struct arena_sim {
        struct bfc *b;
        uint64_t extent_bytes;
        struct bfc_zones zones; /* of the first region; small_extent_bytes 0: none */
        uint64_t limit_bytes;   /* a multiple of extent_bytes */
        uint64_t region_bytes;
        uint64_t next_base;
        bool thrifty; /* gives back what is wholly free before it backs more than ever before */
        uint64_t n_backings, n_releases, n_regions; /* ranges given back; regions beyond the first */
};

/* The first region, and each further one, has space_factor times the limit, and is unbacked. */
int arena_sim_init(struct arena_sim *a, uint64_t extent_bytes, uint64_t limit_bytes, double space_factor);
int arena_sim_init_zoned(struct arena_sim *a, uint64_t extent_bytes, const struct bfc_zones *zones,
                         uint64_t limit_bytes, double space_factor);
void arena_sim_done(struct arena_sim *a);

/* 0; BFC_OVER_BUDGET: the limit does not allow it, also after a release of what is wholly free;
 * -errno: anything else, which is an error in the allocator. */
int arena_sim_alloc(struct arena_sim *a, uint64_t n_bytes, bfc_handle *ret_handle, uint64_t *ret_offset);

/* Backed extents that are wholly free, summed up. */
uint64_t arena_sim_releasable(const struct arena_sim *a);

#endif
