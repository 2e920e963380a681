/* The cache: blocks of the daemon that this process keeps and divides.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A block that the daemon granted is a slab here, whatever its size. Each partition has its own set of
 * slabs, over which the daemon's allocator runs. Free space of adjacent slabs in a region is
 * contiguous, and a block may cross their bounds. Each slab is freed at the daemon as it was granted.
 *
 * A slab in use can be split where no block needs it, so that the free part can be freed.
 *
 * Bookkeeping only: the caller sends the requests, and holds a lock during each of these functions. A
 * slab that leaves is forgotten when the function returns. So the daemon may be told without that lock,
 * and may grant the place again at once. */
#ifndef BFC_CLIENT_CACHE_H
#define BFC_CLIENT_CACHE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "client/blocks.h"
#include "proto/pages.h"

struct cache;

enum { CACHE_MISS = 1 }; /* no free space is large enough */

struct cache_sizes {
        uint64_t slab_bytes; /* requested for blocks of at most half of it */
        uint64_t idle_bytes; /* bound: whole idle slabs beyond it are freed at the daemon */
        bool can_split;      /* at extent boundaries: extents are smaller than a region */
};

/* sizes: one for each partition. -ENOMEM. */
int cache_new(const struct cache_sizes *sizes, uint32_t n_partitions, struct cache **ret);
struct cache *cache_free(struct cache *c); /* takes NULL */

/* How much to request from the daemon after a miss: a multiple of 256. */
uint64_t cache_want(const struct cache *c, uint32_t partition, uint64_t n_bytes);
/* After a refusal: the bytes that are missing beside free space here. If the daemon places them
 * elsewhere, cache_alloc() misses again: remove them by cache_take_mismatched() and free them. -ENOMEM: they
 * stay. */
uint64_t cache_want_least(const struct cache *c, uint32_t partition, uint64_t n_bytes);
int cache_take_mismatched(struct cache *c, uint32_t partition, uint64_t block_id);

/* A block that the daemon granted. */
struct cache_grant {
        uint64_t block_id;
        uint64_t region_id;
        uint64_t region_bytes;
        uint64_t offset;
        uint64_t n_bytes;
        void *ptr;
};

/* Adds it as an idle slab. -EEXIST: there is a slab already. -ENOSPC: the regions do not fit into the
 * address space. -EINVAL: it is not aligned as blocks are. -ENOMEM. */
int cache_add(struct cache *c, uint32_t partition, const struct cache_grant *grant);

/* A block of n_bytes; n_requested is the caller's to set. CACHE_MISS. -ENOMEM. */
int cache_alloc(struct cache *c, uint32_t partition, uint64_t n_bytes, struct block *ret);

/* Frees a block of cache_alloc(). */
void cache_dealloc(const struct block *block);

/* A block that is all of its slab leaves the cache with it, and is a block of the daemon again. -EINVAL:
 * it is not all of one. -ENOMEM. */
int cache_take_whole(const struct block *block);
uint64_t cache_block_id(const struct block *block); /* of the slab in which it begins */

/* From now on the bytes of slabs and of blocks are also added in `page`, which must outlive the cache. */
void cache_show(struct cache *c, uint32_t partition, struct pages_held *page);

/* While it drains, the bound of idle bytes is 0. */
void cache_set_draining(struct cache *c, uint32_t partition, bool is_draining);

/* Idle bytes, in whole slabs or beside blocks. */
uint64_t cache_idle_bytes(const struct cache *c, uint32_t partition);

/* Idle bytes beyond the bound; 0 if no whole slab is idle. */
uint64_t cache_excess(const struct cache *c, uint32_t partition);

/* A request of n_bytes missed. True: with want_bytes more, the slabs would exceed the peak of the bytes in
 * use by more than a small part, so unused extents should be freed first. False if slabs cannot be split. */
bool cache_has_surplus(const struct cache *c, uint32_t partition, uint64_t n_bytes, uint64_t want_bytes);

/* A range of a region. */
struct cache_range {
        uint64_t region_id;
        uint64_t offset;
        uint64_t n_bytes;
};

/* Removes idle slabs, up to want_bytes in total or max slabs. in: NULL, and the longest idle first; or
 * only slabs with bytes in this range, the lowest first. Returns their number; *ret_bytes is their sum. */
size_t cache_take_idle(struct cache *c, uint32_t partition, const struct cache_range *in, uint64_t want_bytes,
                       uint64_t *ret_block_ids, size_t max, uint64_t *ret_bytes);

/* A slab that becomes idle gets a stamp, higher than all before. `first` is the stamp of the slab that
 * cache_take_idle() would take first, `last` of the one that it would take last; 0: there is none. */
struct cache_idle {
        uint64_t first, last;
        uint64_t first_block_id;
};
void cache_look_idle(const struct cache *c, uint32_t partition, struct cache_idle *ret);

/* True: a slab has bytes in [offset, offset + n_bytes) of the region. */
bool cache_lies_in(const struct cache *c, uint64_t region_id, uint64_t offset, uint64_t n_bytes);

/* Returns the number of slabs, and the ids of the first `max`. */
size_t cache_list(const struct cache *c, uint64_t *ret_block_ids, size_t max);

uint64_t cache_offset(const struct block *block); /* in the slab in which it begins */

/* Verifies every invariant; slow. 0, or -EBADMSG and a sentence (static). */
int cache_check(const struct cache *c, const char **ret_why);

/* ---- splitting ---------------------------------------------------------------
 *
 * Slabs in use are split at extent boundaries, so that extents without a block become idle
 * slabs.
 *
 * Find the places. For each: begin, ask the daemon, and commit unless it refused. Then end. Only one
 * thread at a time is between the first and the last of these steps, but the cache may change in between. */

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
