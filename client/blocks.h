/* Blocks: what this process holds, by pointer.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A hash table of chains; constant time, but for interior pointers. All of it takes one thread at a time, under a lock of
 * the caller's, but for blocks_park() and blocks_unpark(): these any thread may call at any
 * time. So the state of a record is one word, together with the pointer, and changes by
 * comparing it: of two frees of one block exactly one succeeds.
 *
 *   used      a block that somebody has
 *   leaving   it is being freed: still there, and nobody else's to find
 *   parked    freed, and kept in this table for the next block of its size (magazine.h) */
#ifndef BFC_CLIENT_BLOCKS_H
#define BFC_CLIENT_BLOCKS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct slab; /* the cache's */
struct stream_life;

struct block {
        const void *ptr;
        uint64_t block_id;
        uint64_t region_id;
        uint64_t offset; /* in the region */
        uint64_t n_bytes;
        uint64_t n_requested;
        struct slab *slab;        /* in which it begins; NULL: it is the broker's own */
        uint64_t handle;          /* the slab's pool knows it by that */
        struct stream_life *life; /* a stream's, which knows where it is from; NULL: no stream's */
        bool may_park;            /* its memory may be another block's at once when it is freed */
        uint8_t age_place;        /* 1 + where in the client page its age is counted; 0: nowhere */
        uint16_t partition;       /* index into the client's partitions */
        uint32_t born;            /* in ticks of ages.h; 0: it is not counted */
};

/* A block in the table. Its memory is the table's, until blocks_clear(). */
struct record {
        uint64_t word;          /* atomic: the pointer and the state; 0: a spare record */
        struct record *next;    /* atomic: in the chain */
        struct record *below;   /* in a list of whoever parked it, or of the spare ones */
        struct block block;     /* constant while it is in the table, but for n_requested, born */
} __attribute__((aligned(64))); /* no two threads' blocks in one line */

struct blocks_heads;

#define BLOCKS_MAX_STEPS 48u /* of the table's growth, each doubles it */

/* Zero-initialised is empty.
 * Invariant: every record whose word is not 0 is in the chain of its pointer's head; there are
 * at least as many heads as records; n_used of them are not spare, parked ones included. */
struct blocks {
        struct blocks_heads *heads; /* atomic */
        struct record *records[BLOCKS_MAX_STEPS];
        unsigned n_steps;
        struct record *spare;
        size_t n_used;
        void *by_place;    /* a tree of all records that are not spare, by address */
        bool has_by_place; /* made by the first search by an interior pointer; kept from then on */
};

void blocks_clear(struct blocks *b); /* back to empty; frees */

/* Adds a copy. -ENOMEM; -EEXIST: there is a block at this pointer. */
int blocks_add(struct blocks *b, const struct block *block);

/* The block that starts at ptr and is used, or NULL. Valid until the next change. */
const struct block *blocks_find(const struct blocks *b, const void *ptr);

/* The used block that contains all of [ptr, ptr + n_bytes), or NULL; n_bytes > 0. Constant
 * time where ptr is the block's begin. The first other pointer makes a tree of all blocks, after
 * which a search takes logarithmic time, and so does each block that is added or taken out. */
const struct block *blocks_find_around(struct blocks *b, const void *ptr, uint64_t n_bytes);

/* Whether any block has bytes in [offset, offset + n_bytes) of the region. Looks at
 * all of them, also those that leave or are parked. */
bool blocks_lie_in(const struct blocks *b, uint64_t region_id, uint64_t offset, uint64_t n_bytes);

/* The used blocks, one after the other, in no order: *cursor is 0 at first. NULL: no more. */
const struct block *blocks_next(const struct blocks *b, size_t *cursor);

/* The same with those that leave: all but the parked ones. */
const struct block *blocks_next_kept(const struct blocks *b, size_t *cursor);

/* Marks a used block as leaving. -ENOENT, also when it leaves already. */
int blocks_leave(struct blocks *b, const void *ptr, struct block *ret);
void blocks_stay(struct blocks *b, const void *ptr); /* one that was leaving */

/* Of a block that blocks_find() finds. */
void blocks_set_born(struct blocks *b, const void *ptr, uint32_t born);

/* Takes it out, used or leaving. -ENOENT. */
int blocks_take(struct blocks *b, const void *ptr, struct block *ret);

/* Any thread: a used block that may be parked is so now, and the caller's. NULL: it is none, or
 * was not found without the lock; look again with it. */
struct record *blocks_park(const struct blocks *b, const void *ptr);

/* Any thread: a parked one is used again. */
void blocks_unpark(struct record *record, uint64_t n_requested, uint32_t born);

/* Takes a parked one out. The record is spare then. */
void blocks_take_parked(struct blocks *b, struct record *record, struct block *ret);

#endif
