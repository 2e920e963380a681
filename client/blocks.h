/* Blocks: what this process holds, by pointer.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A hash table with open addressing; constant time. Not thread-safe. */
#ifndef BFC_CLIENT_BLOCKS_H
#define BFC_CLIENT_BLOCKS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct slab; /* the cache's */

struct block {
        const void *ptr; /* NULL: an empty slot */
        uint64_t block_id;
        uint64_t region_id;
        uint64_t offset; /* in the region */
        uint64_t n_bytes;
        uint64_t n_requested;
        struct slab *slab; /* in which it begins; NULL: it is the broker's own */
        uint64_t handle;   /* the slab's pool knows it by that */
        bool is_leaving;   /* being freed: still there, and nobody else's to find */
};

/* Zero-initialised is empty.
 * Invariant: n_used <= 3/4 of n_slots, a power of two; every block is reached
 * from its home slot without passing an empty one. */
struct blocks {
        struct block *slots;
        size_t n_slots;
        size_t n_used;
};

void blocks_clear(struct blocks *b); /* back to empty; frees */

/* Adds a copy. -ENOMEM; -EEXIST: there is a block at this pointer. */
int blocks_add(struct blocks *b, const struct block *block);

/* The block that starts at ptr, or NULL, also for one that leaves. Valid until the next change. */
const struct block *blocks_find(const struct blocks *b, const void *ptr);

/* The block in whose memory all of [ptr, ptr + n_bytes) lies, or NULL. At once where
 * ptr is the block's begin; else it looks at all of them. */
const struct block *blocks_find_around(const struct blocks *b, const void *ptr, uint64_t n_bytes);

/* Whether any block has bytes in [offset, offset + n_bytes) of the region. Looks at
 * all of them, those that leave too. */
bool blocks_lie_in(const struct blocks *b, uint64_t region_id, uint64_t offset, uint64_t n_bytes);

/* Marks the block as leaving: it keeps its place in the table and is found by blocks_take()
 * and blocks_lie_in() alone. -ENOENT, also when it leaves already. */
int blocks_leave(struct blocks *b, const void *ptr, struct block *ret);
void blocks_stay(struct blocks *b, const void *ptr); /* one that was leaving */

/* Takes it out, whether it leaves or not. -ENOENT. */
int blocks_take(struct blocks *b, const void *ptr, struct block *ret);

#endif
