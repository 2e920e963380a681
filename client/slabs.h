/* For cache.c and cache_split.c. Slabs: the blocks of the daemon that one partition's cache owns, by place, and the allocator that runs
 * over them.
 *
 * The allocator has one linear space, in which each region has a range of its own length; its offsets
 * there are `at`. Regions are added and removed with their first and last slab. The extent alignment is
 * the allocator's finest, so a slab is backed and released at its own bounds.
 *
 * A slab counts the blocks that have bytes in it, so idle slabs are known: `idle` lists them in the order
 * in which they became idle.
 *
 * When a slab is split its low part stays the same `struct slab`, and the high part is a new one. Blocks
 * refer to the first of all of these, their origin, which stays valid as long as any part exists.
 *
 * Invariants: slabs are sorted by `at` and do not overlap; the allocator's backed ranges are exactly
 * theirs; n_reserved is their sum, n_in_use that of the blocks; a slab is in `idle` exactly while its
 * n_used == 0; a region has n_slabs > 0.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CLIENT_SLABS_H
#define BFC_CLIENT_SLABS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>

#include "bfc/bfc.h"
#include "client/cache.h"

struct slab_region {
        uint64_t id;
        uint64_t base; /* in the allocator's space */
        uint64_t n_bytes;
        char *ptr; /* its address in this process */
        size_t n_slabs;
};

struct slab {
        struct slabs *set;
        char *ptr;
        uint64_t at; /* in the allocator's space */
        uint64_t n_bytes;
        uint64_t n_used; /* blocks that have bytes in it; from SPLITTING / 2 on: it is being split */
        TAILQ_ENTRY(slab) idle;
        uint64_t idle_stamp; /* while it is in that list, which is sorted by it */
        uint64_t offset;     /* in the region */
        uint64_t region_id;
        uint64_t block_id;
        struct slab *origin; /* itself, or the slab that it was first split off from */
        size_t n_parts;      /* of an origin: slabs that refer to it; it is freed with the last one */
        bool was_split;      /* of an origin: it was split */
};

/* By place: a search reads the number beside the pointer. */
struct slot {
        uint64_t at;
        struct slab *slab;
};

TAILQ_HEAD(slab_list, slab);

struct slabs {
        struct cache_sizes sizes;
        struct bfc *bfc; /* NULL: nothing was added yet */
        size_t last;     /* the slab that was found last; a hint */
        struct slot *slots;
        size_t n_slots;
        size_t n_room;
        struct slab_list idle; /* the first has been idle the longest */
        uint64_t n_stamps;
        uint64_t n_reserved;
        uint64_t n_in_use;
        uint64_t peak_in_use; /* since there was no slab */
        bool is_draining;
        struct pages_held *shown;    /* where the sums are published */
        struct pages_held unseen;    /* until cache_show() */
        struct slab_region *regions; /* sorted by base */
        size_t n_regions;
        struct slab *spare; /* for the next split; guarantees room for one more slot */
};

struct cache {
        uint32_t n_items;
        struct slabs items[];
};

static inline uint64_t slab_end(const struct slab *s)
{
        return s->at + s->n_bytes;
}

/* The number of slabs that begin at or before `at`. */
size_t slabs_up_to(const struct slabs *p, uint64_t at);
/* The slab that contains this byte; there is one. */
size_t slabs_at(struct slabs *p, uint64_t at);
struct slab_region *slabs_region(const struct slabs *p, uint64_t id); /* NULL: there is none */

/* Memory for one more slab beside `spare`. -ENOMEM. */
int slabs_make_room(struct slabs *p);
/* Inserts a part of a slab that was split. There is room. */
void slabs_insert(struct slabs *p, size_t i, struct slab *s);
void slabs_set_idle(struct slabs *p, struct slab *s);

#endif
