/* Splitting: slabs in use are split at extent boundaries, so that extents without a block become idle
 * slabs.
 *
 * Find the places. For each: begin, ask the daemon, and commit unless it refused. Then end. Only one
 * thread at a time is between the first and the last of these steps, but the cache may change in between.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CLIENT_CACHE_SPLIT_H
#define BFC_CLIENT_CACHE_SPLIT_H

#include "client/cache.h"

/* The extent at a place of a region: its start and end. False: there is none. */
typedef bool (*cache_extent_fn)(void *userdata, uint64_t region_id, uint64_t offset, uint64_t *ret_begin,
                                uint64_t *ret_end);

/* Places where slabs in use can be split, so that extents without a block become idle slabs, up to
 * want_bytes in total or max places. in: only extents in this range; NULL: all. Checks every block.
 * Returns the number of places. */
struct cache_place {
        uint64_t region_id;
        uint64_t offset;
        bool needs_next; /* useless without the place that follows */
};
size_t cache_find_splits(const struct cache *c, uint32_t partition, const struct cache_range *in,
                         cache_extent_fn extent, void *userdata, uint64_t want_bytes, struct cache_place *ret,
                         size_t max);

/* The slab at this place stays until cache_split_end(), and the next cache_split_commit() cannot fail.
 * -ENOENT: there is none. -ENOMEM. */
int cache_split_begin(struct cache *c, uint32_t partition, const struct cache_place *at,
                      uint64_t *ret_block_id, uint64_t *ret_n_bytes);

/* Makes the part after the place a separate slab, the daemon's block with this id. After
 * cache_split_begin(). */
void cache_split_commit(struct cache *c, uint32_t partition, const struct cache_place *at, uint64_t block_id);

/* Counts the blocks of all slabs that were begun. Checks every block. */
void cache_split_end(struct cache *c, uint32_t partition);

#endif
