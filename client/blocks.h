/* Blocks: what this process has allocated, by pointer.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A hash table of chains; constant time, except for interior pointers. All functions need a lock of the
 * caller except blocks_stash() and blocks_unstash(), which any thread may call at any time. So the state of
 * a record is in one word with the pointer, and changes by compare-and-exchange: of two frees of one
 * block exactly one succeeds.
 *
 *   used      the program has it
 *   leaving   it is being freed: still in the table, but no search finds it
 *   stashed    freed, and kept in this table for the next block of its size (magazine.h)
 *
 * A slab of a stream's pool is a block of the daemon of which the program has parts, which are blocks of their own.
 * So it is found by blocks_take_slab() only, and its place may be that of another block.
 *
 * What only parkable blocks have, those of BFC_PARKABLE, is beside the table. */
#ifndef BFC_CLIENT_BLOCKS_H
#define BFC_CLIENT_BLOCKS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>

struct slab; /* the cache's */
struct stream_alloc;
struct parkable;

struct block {
        const void *ptr;
        uint64_t block_id;
        uint64_t region_id;
        uint64_t offset; /* in the region */
        uint64_t n_bytes;
        uint64_t n_requested;
        struct slab *slab;                 /* in which it begins; NULL: a block of the daemon */
        uint64_t handle;                   /* of the slab's allocator */
        struct stream_alloc *stream_alloc; /* allocated on a stream; NULL: not */
        struct parkable *parkable;         /* allocated with BFC_PARKABLE; NULL: not */
        bool may_stash;                    /* it can be stashed when it is freed */
        bool is_parked;                    /* by bfc_park(): it has no memory */
        bool is_slab;                      /* of a stream's pool */
        uint8_t age_place;                 /* 1 + the index in the client page that counts its age; 0: none */
        uint16_t partition;                /* index into the client's partitions */
        uint32_t born;                     /* in ticks of ages.h; 0: it is not counted */
};

/* A block in the table. The table owns its memory until blocks_clear(). */
struct record {
        uint64_t word;        /* atomic: the pointer and the state; 0: a spare record */
        struct record *next;  /* atomic: in the chain */
        struct record *below; /* in a list: of the magazine, or of spare records */
        struct block block;   /* constant while it is in the table, except n_requested, born and is_parked */
} __attribute__((aligned(64))); /* no two threads' blocks in one cache line */

struct blocks_heads;

#define BLOCKS_MAX_STEPS 48u /* of the table's growth, each doubles it; the first NULL ends them */

/* Zero-initialised is empty.
 * Invariant: every record whose word is not 0 is in the chain of its pointer's head; there are
 * at least as many heads as records; n_used of them are not spare, stashed ones included. */
struct blocks {
        struct blocks_heads *heads; /* atomic */
        struct record *records[BLOCKS_MAX_STEPS];
        struct record *spare;
        size_t n_used;
        void *by_place; /* a tree of all records but spare ones and slabs, by address; NULL: it is not made yet */
};

void blocks_clear(struct blocks *b); /* back to empty; frees */

/* Adds a copy. -ENOMEM; -EEXIST: there is a block at this pointer. */
int blocks_add(struct blocks *b, const struct block *block);

/* The block that starts at ptr and is used, or NULL. Valid until the next change. */
const struct block *blocks_find(const struct blocks *b, const void *ptr);

/* The used block that contains all of [ptr, ptr + n_bytes), or NULL; n_bytes > 0. Constant time if ptr is
 * the block's start. The first other pointer builds a tree of all blocks; then a search takes logarithmic
 * time, and so does adding or removing a block, until there is none. */
const struct block *blocks_find_around(struct blocks *b, const void *ptr, uint64_t n_bytes);

/* True: a block has bytes in [offset, offset + n_bytes) of the region. Checks all blocks, including
 * leaving and stashed ones and slabs. */
bool blocks_lie_in(const struct blocks *b, uint64_t region_id, uint64_t offset, uint64_t n_bytes);

/* Iterates over the used blocks in no order: *cursor is 0 at first. NULL: no more. */
const struct block *blocks_next(const struct blocks *b, size_t *cursor);

/* blocks_next() with leaving blocks and slabs: all except stashed ones. */
const struct block *blocks_next_kept(const struct blocks *b, size_t *cursor);

/* Marks a used block as leaving. -ENOENT, also if it is leaving already. */
int blocks_leave(struct blocks *b, const void *ptr, struct block *ret);
void blocks_stay(struct blocks *b, const void *ptr); /* one that was leaving */

/* Of a block that blocks_find() finds. */
void blocks_set_born(struct blocks *b, const void *ptr, uint32_t born);

/* Of a block that blocks_find() finds: bfc_park() or bfc_wake() was called for it. */
void blocks_set_parked(struct blocks *b, const void *ptr, bool is_parked);

/* Removes a used or leaving block. -ENOENT. */
int blocks_take(struct blocks *b, const void *ptr, struct block *ret);

int blocks_take_slab(struct blocks *b, const void *ptr, struct block *ret);

/* Any thread: stashes a used block that can be stashed. NULL: it cannot, or was not found without the lock:
 * search again with it. */
struct record *blocks_stash(const struct blocks *b, const void *ptr);

/* Any thread: makes a stashed block used again, and returns it. */
struct record *blocks_unstash(struct record *record, uint64_t n_requested, uint32_t born);

/* Removes a stashed block. The record is then spare. */
void blocks_take_stashed(struct blocks *b, struct record *record, struct block *ret);

/* ---- parkable blocks ---------------------------------------------------------
 *
 * Those of BFC_PARKABLE, with their tags, their uses, and the time of their last use.
 *
 * A block is idle if it is awake, not in use, not shared, and no call parks or wakes it; only idle ones may be
 * parked. The idle blocks of a partition are a list in the order of their last uses.
 *
 * All functions need the client's lock. A parkable lives as long as its block is in the table: its owner is
 * the list that it is in. */

struct pages_idle;

#define PARKABLE_TAG_BYTES 32u

struct parkable {
        const struct block *block; /* in the table */
        struct parkables *in;
        char tag[PARKABLE_TAG_BYTES];
        uint32_t n_uses;
        uint32_t n_copies; /* of bfc_read() and bfc_write(): the program cannot end these */
        uint32_t n_begins; /* calls that begin to use it together with others that are parked */
        int64_t used_ms;   /* the end of the last use, the wake or the allocation; CLOCK_MONOTONIC */
        bool is_busy;      /* a call parks or wakes it: it is leaving the table, or looks so */
        bool waits;        /* and that call waits for room */
        bool is_shared;
        bool is_idle; /* in which list it is */
        TAILQ_ENTRY(parkable) link;
};
TAILQ_HEAD(parkable_list, parkable);

/* Of one partition. */
struct parkables {
        struct parkable_list idle, others;
        uint64_t idle_bytes;
        struct pages_idle *page; /* where they are published; NULL: nowhere */
};

void parkables_init(struct parkables *s);
void parkables_clear(struct parkables *s);

/* NULL: no memory. tag: NULL for none. It is entered when its block is in the table. */
struct parkable *parkable_new(const char *tag);
void parkable_enter(struct parkables *s, struct parkable *p, const struct block *block);
/* The block leaves the table: frees it. */
void parkable_drop(const struct block *block, struct parkable *p);

static inline bool parkable_is_used(const struct parkable *p)
{
        return p->n_uses > 0 || p->n_copies > 0;
}

/* After any change of its members: moves it to the list where it belongs. */
void parkable_sort(struct parkable *p);
void parkable_touch(struct parkable *p); /* it was used until now */

/* tag: NULL matches all. */
bool parkable_has_tag(const struct parkable *p, const char *tag);

/* The busy one in which this place is; NULL: none. */
struct parkable *parkables_find_busy(const struct parkables *s, const void *ptr);

/* Publishes the idle blocks here from now on. */
void parkables_show(struct parkables *s, struct pages_idle *page);

/* Whether a place is part of a block that is parked, or being parked or woken. */
bool parkables_cover(const struct parkables *s, uint64_t region_id, uint64_t offset);

#endif
