/* The cache: blocks of the broker's, kept and cut by this process itself.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A block that the broker gave is a slab here, whatever its size. Each partition
 * has a pool of its own: the broker's allocator, run over the slabs. Where two lie side by
 * side in a region their free space is one, and a block may lie across; each goes
 * back as it came.
 *
 * A slab in use can be split where no block needs it, so that the free part can be given back. The
 * blocks of a slab name the slab that they were cut from, whatever becomes of it.
 *
 * Bookkeeping only: who calls asks the broker, and holds a lock around each of
 * these. The slabs that cache_take_idle() names are forgotten when it returns, so
 * the broker may be told without that lock, and may give the place again at once. */
#ifndef BFC_CLIENT_CACHE_H
#define BFC_CLIENT_CACHE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "client/blocks.h"
#include "proto/pages.h"

struct cache;

enum { CACHE_MISS = 1 }; /* the pool has no free space that is large enough */

struct cache_sizes {
        uint64_t slab_bytes; /* asked for at least, where a request is at most half of it */
        uint64_t idle_bytes; /* more than that goes back on a free, where it is whole slabs */
        bool has_grid;       /* the broker's extents have a size of their own, a multiple of 2 MiB */
};

/* sizes: one for each partition. -ENOMEM. */
int cache_new(const struct cache_sizes *sizes, uint32_t n_partitions, struct cache **ret);
struct cache *cache_free(struct cache *c); /* takes NULL */

/* How much to ask the broker for when a request missed: a multiple of 256. That may be less
 * than n_bytes: where the broker puts it beside free space of ours, they are enough
 * together. Where it does not, cache_alloc() misses again: take it out by
 * cache_take_wrong(), give it back, and ask for cache_want_whole(). -ENOMEM: it stays. */
uint64_t cache_want(struct cache *c, uint32_t partition, uint64_t n_bytes);
uint64_t cache_want_whole(const struct cache *c, uint32_t partition, uint64_t n_bytes);
/* The least that would do, where cache_want() was refused; the same holds for it. */
uint64_t cache_want_least(const struct cache *c, uint32_t partition, uint64_t n_bytes);
int cache_take_wrong(struct cache *c, uint32_t partition, uint64_t block_id);

/* What the broker gave. */
struct cache_given {
        uint64_t block_id;
        uint64_t region_id;
        uint64_t region_bytes;
        uint64_t offset;
        uint64_t n_bytes;
        void *ptr;
};

/* Takes it in, free. -EEXIST: there is a slab already. -ENOSPC: the regions
 * have no room beside each other. -EINVAL: it does not lie as blocks do. -ENOMEM. */
int cache_add(struct cache *c, uint32_t partition, const struct cache_given *given);

/* Fills in a block of n_bytes, but for what it was asked for. CACHE_MISS. -ENOMEM. */
int cache_alloc(struct cache *c, uint32_t partition, uint64_t n_bytes, struct block *ret);

/* The block's place is free again. It must have come from cache_alloc(). */
void cache_dealloc(const struct block *block);

/* A block that is all of its slab: it leaves the cache with it, and is the broker's block as it
 * came. -EINVAL: it is not all of one. -ENOMEM. */
int cache_take_whole(const struct block *block);
uint64_t cache_block_id(const struct block *block); /* the broker's, of the slab in which it begins */

/* From now on what the pool has is added there too, slabs and what is cut. `held` must outlive
 * the cache. */
void cache_show(struct cache *c, uint32_t partition, struct pages_held *held);

/* Meanwhile nothing is to stay idle: the bound is 0. */
void cache_set_draining(struct cache *c, uint32_t partition, bool is_draining);

/* How much is idle, in whole slabs or beside blocks. */
uint64_t cache_idle_bytes(const struct cache *c, uint32_t partition);

/* How much is idle beyond the bound, where something could go back for that; 0. */
uint64_t cache_excess(const struct cache *c, uint32_t partition);

/* A request of n_bytes missed. True: with want_bytes more, the slabs would exceed the peak of the bytes in use
 * by more than a small part, so free extents should be given back first. False where slabs cannot be split. */
bool cache_has_surplus(const struct cache *c, uint32_t partition, uint64_t n_bytes, uint64_t want_bytes);

/* Takes slabs out in which nothing lies, those first that have been idle the longest,
 * until they have want_bytes or are max. Returns how many; *ret_bytes is their
 * sum. */
size_t cache_take_idle(struct cache *c, uint32_t partition, uint64_t want_bytes, uint64_t *ret_block_ids,
                       size_t max, uint64_t *ret_bytes);

/* The same with those only that have bytes in [offset, offset + n_bytes) of the region, the lowest
 * first: while one lies across a bound of it, what is inside is not free. */
size_t cache_take_idle_in(struct cache *c, uint32_t partition, uint64_t region_id, uint64_t offset,
                          uint64_t n_bytes, uint64_t want_bytes, uint64_t *ret_block_ids, size_t max,
                          uint64_t *ret_bytes);

/* ---- splitting ----
 * Find where, hold a slab, ask the broker, split or not, for each place; then count. Only one thread at a
 * time is between the first and the last of these, but the pool may change in between. */

/* A range of a region. */
struct cache_range {
        uint64_t region_id;
        uint64_t offset;
        uint64_t n_bytes;
};

/* The broker's extent at a place of a region: where it begins and ends in it. False: there is none. */
typedef bool (*cache_extent_fn)(void *userdata, uint64_t region_id, uint64_t offset, uint64_t *ret_begin,
                                uint64_t *ret_end);

/* Places where slabs in use are to be split, so that extents without a block of the pool become idle slabs:
 * until these are want_bytes or the places are max. in: only
 * extents in this range; NULL: all. Looks at every block of the pool. Returns how many. */
struct cache_place {
        uint64_t region_id;
        uint64_t offset;
        bool needs_next; /* of no use without the place that follows */
};
size_t cache_find_splits(const struct cache *c, uint32_t partition, const struct cache_range *in,
                         cache_extent_fn extent, void *userdata, uint64_t want_bytes, struct cache_place *ret,
                         size_t max);

/* The slab that has this place inside stays until it was counted, as if a block lay in it, and the next
 * cache_split() cannot fail. -ENOENT: there is none. -ENOMEM. */
int cache_hold(struct cache *c, uint32_t partition, const struct cache_place *at, uint64_t *ret_block_id,
               uint64_t *ret_n_bytes);

/* What is behind the place is a slab of its own, the broker's block of this id. The slab is held. */
void cache_split(struct cache *c, uint32_t partition, const struct cache_place *at, uint64_t block_id);

/* Counts the blocks of all slabs that were held. Looks at every block of the pool. */
void cache_count(struct cache *c, uint32_t partition);

/* Each time that a slab becomes one in which nothing lies it gets a stamp, higher than all
 * before. `first` is the stamp of the slab that cache_take_idle() would take first, `last` of the
 * one that it would take last; 0: there is none. */
struct cache_idle {
        uint64_t first, last;
        uint64_t first_block_id;
};
void cache_look_idle(const struct cache *c, uint32_t partition, struct cache_idle *ret);

/* Whether a slab has bytes in [offset, offset + n_bytes) of the region. */
bool cache_lies_in(const struct cache *c, uint64_t region_id, uint64_t offset, uint64_t n_bytes);

/* How many slabs there are; the broker's ids of the first so many. */
size_t cache_list(const struct cache *c, uint64_t *ret_block_ids, size_t max);

uint64_t cache_offset(const struct block *block); /* in the slab in which it begins */

/* Verifies every invariant; slow. 0, or -EBADMSG and a sentence (static). */
int cache_check(const struct cache *c, const char **ret_why);

#endif
