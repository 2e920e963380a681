/* The allocator's data structures: chunks, regions, records. Internal to bfc/.
 *
 * All chunks are in one array of 32-bit words, eight per record. Its address space is reserved at the
 * start and made accessible in steps, so growth never copies and a record never moves. A chunk is named
 * by the number of its first word (u32, a multiple of 8): a processor can scale an index by 4 during a
 * load, but not by 32.
 *
 * A "slot" is the number of a word that contains such a name: the head of a bin, or a link in another
 * free chunk. A free chunk knows its slot, so one store replaces or unlinks it, wherever it is.
 *
 *   words[chunk_at(i)->slot] == i    for every free chunk i
 *   chunk_at(i)->slot == 0           for everything that is not free
 *
 * Record 0 is a scratch record: link 0 means "none", and stores through it are harmless, which saves
 * branches. Its `slot` is never read, and its children and `equal` stay 0. The heads of the bins follow,
 * one word each; then the instance itself; then chunks. So an unused instance takes one page, and one
 * with a few chunks two: the chunks are next to the instance, and the heads of small sizes next to record
 * 0.
 *
 * Every region has one edge record, which closes its chunks to a ring: edge.next is the lowest chunk,
 * edge.prev the highest. It is never free, so merging needs no test for the ends.
 *
 * Sizes and addresses are in granules of 256 bytes (u32).
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CORE_H
#define BFC_CORE_H

#include "bfc/bfc.h"

#include <assert.h>

#define GRANULE_SHIFT 8u

/* 128 bins per octave: one per size below 256 granules, then ever wider ones.
 * bin_of(2^32 - 1) == N_BINS - 1. */
#define N_BINS        3328u
#define N_MAP_WORDS   (N_BINS / 64u)
#define WORDS_PER_REC 8u
#define FIRST_HEAD    WORDS_PER_REC                                         /* slot of bin 0 */
#define END_OF_HEADS  (FIRST_HEAD + N_BINS)                                 /* slots below are heads */
#define BFC_AT        ((END_OF_HEADS * sizeof(uint32_t) + 63u) / 64u * 64u) /* of the instance, in bytes */
#define MAX_RECORDS   (UINT32_C(1) << 26)                                   /* 2 GiB of address space */
#define MIN_RECORDS   (UINT32_C(1) << 12)                                   /* if address space is scarce */

enum kind {
        KIND_NONE, /* a spare record */
        KIND_USED,
        KIND_PENDING, /* the first piece of a pending block; the handle names it */
        KIND_PIECE,   /* a further piece, or the rest of the last new extent */
        KIND_HOLE,
        KIND_RETIRING,
        KIND_EDGE,
        KIND_FREE, /* never stored: slot != 0 marks it */
};

/* Flags of pending pieces, beside the kind. */
#define PIECE_NEW  (1u << 16) /* was a hole */
#define PIECE_TAIL (1u << 17) /* beyond the block: becomes free on commit */

struct chunk {
        uint32_t addr;
        uint32_t size;
        uint32_t prev; /* neighbours by address */
        uint32_t next; /* spare records: the next spare one */
        union {
                struct { /* free, see index.h */
                        uint32_t child[2];
                        uint32_t slot;
                        uint32_t equal;
                };
                struct {                /* anything else */
                        uint32_t stamp; /* used, pending: never 0; holes, retiring: next in the list */
                        uint32_t meta;  /* waste in bytes (8 bits), kind (8 bits), flags */
                        uint32_t zero;  /* slot */
                        uint32_t link;  /* pending: block size; piece: its block; holes, retiring: previous */
                };
        };
};

static_assert(sizeof(struct chunk) == WORDS_PER_REC * sizeof(uint32_t), "a record is eight words");
static_assert(BFC_GRANULE == 1u << GRANULE_SHIFT, "the granule is a power of two");

#define SLOT_CHILD(i, k) ((i) + 4u + (k))
#define SLOT_EQUAL(i)    ((i) + 7u)
#define SLOT_OWNER(slot) ((slot) & ~(WORDS_PER_REC - 1u)) /* of a link: the chunk that it is in */

struct region {
        uint32_t base;
        uint32_t size;
        uint32_t first;    /* size of its first extent; 0: no special size */
        uint32_t small;    /* size of the extents of zone 0; doubles with each zone */
        uint32_t per_zone; /* extents of a zone */
        uint32_t n_zones;
        uint32_t body; /* end of the zones; from here on extents have the instance's size */
        uint32_t edge;
};

static_assert(sizeof(struct region) == 32, "128 regions fill a page");

#define N_OWN_REGIONS 2u /* of the instance's; further ones are mapped */

/* Many fields: 20 of them are the regions' that each instance has from the start, the others its indexes and counters. */
struct bfc {
        /* The index: which bins are not empty (map), which words of map are not 0 (map_top). */
        uint64_t map_top;
        uint64_t map[N_MAP_WORDS + 1]; /* the last one stays 0 */

        uint32_t spare;      /* list of spare records */
        uint32_t n_records;  /* records ever used, spare ones included */
        uint32_t n_ready;    /* records with memory */
        uint32_t n_reserved; /* records with address space */
        uint32_t n_spare;
        uint32_t last_stamp;

        /* used + idle + free == reserved, in granules; n_requested in bytes */
        uint64_t n_used; /* blocks, pending ones included */
        uint64_t peak_used;
        uint64_t n_requested;
        uint64_t peak_requested;
        uint64_t n_allocs;
        uint64_t n_frees;
        uint32_t largest; /* block ever */

        uint32_t extent;   /* the largest extents */
        uint32_t smallest; /* of any zone of any region so far */
        uint64_t reserved;
        uint64_t peak_reserved;
        uint64_t idle; /* retiring chunks and tails of pending blocks */
        uint32_t n_pending;
        uint32_t n_pieces; /* KIND_PIECE chunks */
        uint32_t n_holes;
        uint32_t n_retiring;
        uint32_t holes; /* lists */
        uint32_t retiring;
        uint32_t n_regions;
        uint32_t n_regions_room;
        struct region *regions; /* by base: own_regions, or mapped */
        struct region own_regions[N_OWN_REGIONS];
} __attribute__((aligned(64)));

#define FIRST_CHUNK  ((uint32_t)((BFC_AT + sizeof(struct bfc)) / sizeof(uint32_t)))
#define FIRST_RECORD (FIRST_CHUNK / WORDS_PER_REC)

static_assert(sizeof(struct bfc) % sizeof(struct chunk) == 0 && FIRST_CHUNK % WORDS_PER_REC == 0,
              "heads and the instance fill records");

/* The number of nodes visited by all calls; counted only in test builds, which define it. */
#ifdef BFC_COUNT_VISITS
extern uint64_t bfc_n_visits;
#define VISIT() ((void)bfc_n_visits++)
#else
#define VISIT() ((void)0)
#endif

/* The words begin this far before the instance. */
static inline uint32_t *words_of(const struct bfc *b)
{
        return (uint32_t *)((uintptr_t)b - BFC_AT);
}

/* Like strchr(): the result is as const as the caller's use. */
static inline struct chunk *chunk_at(const struct bfc *b, uint32_t i)
{
        return (struct chunk *)(uintptr_t)(words_of(b) + i);
}

static inline enum kind chunk_kind(const struct chunk *c)
{
        return c->slot != 0 ? KIND_FREE : (enum kind)(c->meta >> 8 & 0xffu);
}

static inline void chunk_set_meta(struct chunk *c, enum kind kind, uint32_t flags_and_waste)
{
        c->meta = (uint32_t)kind << 8 | flags_and_waste;
        c->slot = 0;
}

static inline uint32_t chunk_waste(const struct chunk *c)
{
        return c->meta & 0xffu;
}

static inline uint32_t chunk_end(const struct chunk *c)
{
        return c->addr + c->size;
}

static inline uint64_t to_bytes(uint64_t n_granules)
{
        return n_granules << GRANULE_SHIFT;
}

/* ---- records --------------------------------------------------------------- */

/* Provides memory for n further records. 0 or -ENOMEM. */
int bfc_records_grow(struct bfc *b, uint32_t n);

/* Ensures that the next n calls of record_new() succeed. 0 or -ENOMEM. */
static inline int records_reserve(struct bfc *b, uint32_t n)
{
        if (b->n_spare >= n || b->n_spare + (b->n_ready - b->n_records) >= n)
                return 0;
        return bfc_records_grow(b, n);
}

static inline uint32_t record_new(struct bfc *b)
{
        uint32_t i = b->spare;

        if (i != 0) {
                b->spare = chunk_at(b, i)->next;
                b->n_spare--;
                return i;
        }
        return b->n_records++ * WORDS_PER_REC;
}

static inline void record_release(struct bfc *b, uint32_t i)
{
        struct chunk *c = chunk_at(b, i);

        chunk_set_meta(c, KIND_NONE, 0);
        c->next = b->spare;
        b->spare = i;
        b->n_spare++;
}

/* Inserts record i between `next` and the record before it. */
static inline void link_before(struct bfc *b, uint32_t i, uint32_t next)
{
        struct chunk *c = chunk_at(b, i), *n = chunk_at(b, next);

        c->prev = n->prev;
        c->next = next;
        chunk_at(b, n->prev)->next = i;
        n->prev = i;
}

/* Removes record i from its region's ring and frees it. */
static inline void unlink_release(struct bfc *b, uint32_t i)
{
        struct chunk *c = chunk_at(b, i);

        chunk_at(b, c->prev)->next = c->next;
        chunk_at(b, c->next)->prev = c->prev;
        record_release(b, i);
}

/* ---- blocks ---------------------------------------------------------------- */

static inline void count_used(struct bfc *b, uint32_t size, uint64_t n_requested)
{
        b->n_used += size;
        b->n_requested += n_requested;
        if (b->n_used > b->peak_used)
                b->peak_used = b->n_used;
        if (b->n_requested > b->peak_requested)
                b->peak_requested = b->n_requested;
}

static inline void count_unused(struct bfc *b, uint32_t size, uint32_t waste)
{
        b->n_used -= size;
        b->n_requested -= to_bytes(size) - waste;
}

/* Counts through 2^32 - 1 values: a handle repeats only after that many allocations, if its record is
 * used again. */
static inline uint32_t next_stamp(struct bfc *b)
{
        if (++b->last_stamp == 0)
                b->last_stamp = 1;
        return b->last_stamp;
}

static inline bfc_handle chunk_handle(const struct chunk *c, uint32_t i)
{
        return (uint64_t)c->stamp << 32 | i / WORDS_PER_REC;
}

/* The chunk of this kind (used or pending) that a handle names; 0: none. Safe for any number. */
static inline uint32_t handle_chunk(const struct bfc *b, bfc_handle h, enum kind kind)
{
        uint32_t record = (uint32_t)h, i = record * WORDS_PER_REC;
        const struct chunk *c;

        if (record - FIRST_RECORD >= b->n_records - FIRST_RECORD)
                return 0;
        c = chunk_at(b, i);
        if (c->slot != 0 || c->stamp != (uint32_t)(h >> 32) || (c->meta >> 8 & 0xffu) != (uint32_t)kind)
                return 0;
        return i;
}

/* ---- holes and retiring chunks ------------------------------------------------ */

static inline void count_reserved(struct bfc *b, uint32_t size)
{
        b->reserved += size;
        if (b->reserved > b->peak_reserved)
                b->peak_reserved = b->reserved;
}

/* Removes a hole or retiring chunk from its list. */
void bfc_list_take(struct bfc *b, uint32_t i);

/* Chunk i (in its ring, not free) becomes a hole and merges with holes beside it. */
void bfc_hole_put(struct bfc *b, uint32_t i);

/* Inserts a chunk of this kind into its list. */
void bfc_list_put(struct bfc *b, uint32_t i, enum kind kind);

/* Splits chunk i, which is not free and in no list, at `at`; the upper part is the new record. */
uint32_t bfc_cut(struct bfc *b, uint32_t i, uint32_t at);

/* ---- regions and their extents ----------------------------------------------- */

/* The region that contains granule `addr`, or NULL. */
const struct region *bfc_region_at(const struct bfc *b, uint32_t addr);

static inline uint32_t region_end(const struct region *r)
{
        return r->base + r->size;
}

/* The zone of granule `addr`, and the start of that zone. Zone k is 2^k times as long as zone 0, so the
 * zones up to k have 2^(k+1) - 1 times the length of zone 0. */
static inline uint32_t grid_zone(const struct region *r, uint32_t addr, uint32_t *ret_begin)
{
        uint32_t zones = r->base + r->first, zone_0 = r->per_zone * r->small;
        uint32_t zone = 31u ^ (uint32_t)__builtin_clz((addr - zones) / zone_0 + 1);

        *ret_begin = zones + zone_0 * ((UINT32_C(1) << zone) - 1);
        return zone;
}

/* The largest extent boundary <= addr; region_end(r) is one too. */
static inline uint32_t grid_down(const struct bfc *b, const struct region *r, uint32_t addr)
{
        uint32_t zone, begin;

        if (addr == region_end(r))
                return addr;
        if (addr >= r->body)
                return addr - (addr - r->body) % b->extent;
        if (addr - r->base < r->first)
                return r->base;
        zone = grid_zone(r, addr, &begin);
        return addr - (addr - begin) % (r->small << zone);
}

/* The size of the extent that begins at this boundary; the region's end may shorten it. */
static inline uint32_t grid_size(const struct bfc *b, const struct region *r, uint32_t point)
{
        uint32_t begin;

        if (point >= r->body)
                return b->extent;
        return point - r->base < r->first ? r->first : r->small << grid_zone(r, point, &begin);
}

/* The smallest extent boundary >= addr. */
static inline uint32_t grid_up(const struct bfc *b, const struct region *r, uint32_t addr)
{
        uint32_t down = grid_down(b, r, addr), size;

        if (down == addr)
                return addr;
        size = grid_size(b, r, down);
        return region_end(r) - down <= size ? region_end(r) : down + size;
}

/* The number of the extent that contains granule `addr`, from 0 on. */
static inline uint32_t grid_number(const struct bfc *b, const struct region *r, uint32_t addr)
{
        uint32_t n = r->first > 0 ? 1 : 0, zone, begin;

        if (addr >= r->body)
                return n + r->n_zones * r->per_zone + (addr - r->body) / b->extent;
        if (addr - r->base < r->first)
                return 0;
        zone = grid_zone(r, addr, &begin);
        return n + zone * r->per_zone + (addr - begin) / (r->small << zone);
}

static inline bool grid_has(const struct bfc *b, const struct region *r, uint32_t addr)
{
        return grid_down(b, r, addr) == addr;
}

#endif
