/* The internals of an arena. Only arena.c and extents.c include this.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_ARENA_INTERNAL_H
#define BFCD_ARENA_INTERNAL_H

#include <sys/queue.h>

#include "daemon/memory/arena.h"

#define ARENA_NO_SLOT SIZE_MAX

struct operation;

struct arena_slot {
        struct bfc_range range;
        uint32_t extent; /* in the ledger; LEDGER_NONE: unbacked */
        struct device_extent memory;
        struct charge charge;
        struct occupancy occupancy; /* of the extent */
        struct operation *retired;  /* not NULL: submitted when the extent has no exports */
        uint32_t n_late;            /* of its exports; while it is retired */
        bool is_parked;             /* its extent leaves, and a parked block keeps the place */
        bfc_handle dropped;         /* that block, if it was freed */
        struct operation *waking;   /* the first slot of a block that wakes: its growth, then its `undo` */
};

struct arena_region {
        uint64_t base;
        uint64_t n_bytes;
        size_t first_slot;
        size_t n_slots;
        uint32_t record; /* in the ledger; LEDGER_NONE: it is one extent */
        bool is_parked;  /* one extent: its block is parked, and keeps the region */
        uint64_t id;     /* one extent: since its block was parked; 0: it has that of its extent */
};

/* The parts that depend on the share mode. The functions that make extents are not called per block. */
struct arena_layout {
        uint64_t limit_max_bytes; /* of a new arena */
        uint64_t max_extents;     /* up to which a limit can be raised */
        bool has_fds;
        /* bfc_alloc_in_extent() and bfc_plan_growth_in_extent(), or the simpler functions if regions are
         * extents. */
        int (*alloc_in_extent)(struct bfc *b, uint64_t n_bytes, bfc_handle *ret_handle, uint64_t *ret_offset);
        int (*plan_in_extent)(const struct bfc *b, uint64_t n_bytes, uint64_t max_new_bytes,
                              struct bfc_growth *ret);
        uint64_t (*max_in_extent)(const struct arena *a);
        /* Adds a region in which a plan for n_bytes finds space. room_bytes: see arena_plan(). */
        int (*add_space)(struct arena *a, uint64_t n_bytes, uint64_t room_bytes);
        /* Adds the missing parts of the regions that cover [0, n_bytes), and returns their slots. */
        int (*add_first_space)(struct arena *a, uint64_t n_bytes, size_t *ret_first, size_t *ret_end);
        uint64_t (*unbacked_bytes)(struct arena *a, uint64_t n_bytes);
        uint64_t (*growable)(const struct arena *a, uint64_t room_bytes);
        /* The slot's extent was removed, or could not be made. */
        void (*drop_slot)(struct arena *a, size_t slot);
        int (*restore_regions)(struct arena *a, const struct arena_inherited *inherited,
                               const char **ret_why);
};

TAILQ_HEAD(operation_list, operation);

struct arena_regions {
        struct arena_region *items; /* by base */
        size_t n, n_room;
        size_t n_large; /* fd: the first ones, of many extents; the others are one extent */
        size_t n_small; /* fd: of the others, those smaller than the largest extents of the limit */
        bool has_freed; /* fd: a block in one of these was freed, or may have been */
        size_t planned; /* cuda-ipc: the slot that was made for a plan, or ARENA_NO_SLOT */
};

struct arena_slots {
        struct arena_slot **table; /* arena_unused_slot: nothing was made there */
        size_t n;                  /* number of places */
        size_t n_room;             /* in the table */
        size_t n_made;             /* that are not arena_unused_slot */
};

/* Working memory for planning a release. */
struct arena_scratch {
        struct bfc_range *ranges;
        uint32_t *retired;
        size_t n_room; /* of both, at least slots.n_made */
};

/* retiring == leaving + suspended + late-by-a-session <= pending; late <= leaving */
struct arena_totals {
        uint32_t n_extents;
        uint64_t huge_bytes; /* of the extents, made in pages of 2 MiB */
        uint64_t small_bytes;
        uint64_t pending_bytes;
        uint64_t retiring_bytes;
        uint64_t leaving_bytes;   /* with the worker, or kept by a process */
        uint64_t late_bytes;      /* of these, in releases that a process has delayed for LATE_MS */
        uint64_t suspended_bytes; /* of retired extents without a late export */
        uint64_t parked_bytes;    /* of parked blocks, until their extents are made again */
        uint64_t away_bytes;      /* of these, without an extent: for the allocator they are backed */
};

/* Memory that the device did not return, and the query to the device about it. */
struct arena_unreclaimed {
        struct worker_job job;
        struct arena *arena;
        struct charge charge;
        uint64_t confirmed_bytes; /* confirmed by the device since; may be more than is charged */
        uint64_t asked_bytes;     /* when the query was submitted */
        uint64_t foreign_bytes;   /* the answer */
        struct charge ended;      /* direct charges of ended processes: the answer says what is returned */
        uint64_t asked_ended_bytes;
        arena_released_fn ended_fn;
        void *userdata;
        int result;
        bool is_asked;
};

/* Many fields: three lanes of the worker, and what the device did not return, are most of them. */
struct arena {
        struct arena_options o;
        const struct arena_layout *layout;
        struct bfc *bfc;
        struct arena_regions regions;
        struct arena_slots slots;
        struct arena_scratch scratch;
        struct arena_totals totals;
        struct worker_lane growths;  /* requests wait for them */
        struct worker_lane the_rest; /* releases, queries, and preallocation */
        struct worker_lane copies;   /* of parked blocks: apart, because a client can delay them */
        struct operation_list kept;  /* releases of extents that another process still has */
        size_t n_kept_releases;      /* these, and those of them at whose extents the worker looks again */
        struct arena_unreclaimed unreclaimed;
        size_t n_extents_max; /* the maximum number, now or earlier */
        bool is_lost;         /* as the device reported */
};

/* An extent that is being made or released. */
struct operation_item {
        size_t slot;
        struct device_extent memory;
        uint64_t key;     /* in the store; 0: it is not there */
        bool unreclaimed; /* the device did not return it */
};

/* Many fields: the worker's job, the plan of the growth and an item per extent are inside, so that it is allocated once. */
struct operation {
        struct worker_job job;
        struct arena *arena;
        struct charge charge; /* growth: for all items */
        bfc_handle handle;    /* growth; 0: preallocation */
        struct bfc_growth plan;
        uint64_t n_bytes;
        int result;
        bool is_lost;      /* as the device reported */
        bool is_kept;      /* release: a process had some of it */
        bool is_late;      /* counted in totals.late_bytes */
        bool wakes;        /* a growth for a parked block */
        bool is_dropped;   /* the block that wakes was freed meanwhile */
        uint64_t since_ms; /* release: when it was submitted */
        size_t n_made;     /* the first n_made items are made; used by the worker */
        size_t n_gone;     /* the first n_gone items were given to the device; used by the worker */
        uint64_t
                foreign_bytes; /* the bytes of others on the device after an item was not returned; 0: unknown */
        TAILQ_ENTRY(operation) of_arena;
        arena_grown_fn grown;
        arena_released_fn released;
        void *userdata;
        struct operation *undo; /* of a growth that wakes: releases the extents again */
        size_t n_items;
        struct operation_item items[];
};

/* ---- arena.c: slots and regions ---------------------------------------------- */

extern const struct arena_slot arena_unused_slot;

/* The slot, or a constant one for reading if it was not made. */
static inline struct arena_slot *arena_slot_of(const struct arena *a, size_t slot)
{
        return slot < a->slots.n_room ? a->slots.table[slot]
                                      : (struct arena_slot *)(uintptr_t)&arena_unused_slot;
}

static inline bool arena_slot_is_made(const struct arena *a, size_t slot)
{
        return arena_slot_of(a, slot) != &arena_unused_slot;
}

static inline bool arena_slot_is_backed(const struct arena *a, size_t slot)
{
        return arena_slot_of(a, slot)->extent != LEDGER_NONE;
}

const struct arena_region *arena_region_at(const struct arena *a, uint64_t offset);
size_t arena_slot_at(const struct arena *a, uint64_t offset);
struct bfc_range arena_slot_range(const struct arena *a, size_t slot);
uint64_t arena_slot_bytes(const struct arena *a, size_t slot);

/* Prepares an unused slot for an extent. It stays prepared until its extent is gone. -ENOMEM. */
int arena_make_slot(struct arena *a, size_t slot, struct bfc_range range);
int arena_make_slots(struct arena *a, size_t first, size_t last);

static inline bool arena_is_single(const struct arena_region *r)
{
        return r->record == LEDGER_NONE;
}

static inline struct arena_region *arena_region_to_change(struct arena *a, uint64_t offset)
{
        return a->regions.items + (arena_region_at(a, offset) - a->regions.items);
}

/* A block now occupies a range, or no longer does: each of its extents counts its part. */
void arena_count_block(struct arena *a, uint64_t offset, uint64_t n_bytes,
                       void (*count)(struct occupancy *o, struct bfc_range range));

/* cuda-ipc: drops the slot that was made for an unused plan. */
void arena_forget_plan(struct arena *a);

/* Drops a region of one extent, which it has no more. */
void arena_drop_single(struct arena *a, size_t slot);

/* It has its extent, which has no block and is not being released. */
bool arena_single_is_free(const struct arena *a, const struct arena_region *r);

/* The place of an exact block, which is the whole region of this slot. -ENOMEM. */
int arena_begin_exact(struct arena *a, uint64_t n_bytes, size_t *ret_slot, bfc_handle *ret_handle);

/* Of a plan for an exact block, which has no place. Its block is backed for the allocator before it is. */
static inline bool arena_plan_is_exact(const struct bfc_growth *plan)
{
        return plan->span.end == 0;
}

/* A parked block keeps its region and the name of that: it loses its extent. It has none any more: it is awake, or was freed. */
void arena_keep_exact(struct arena *a, struct arena_region *r);
void arena_unkeep_exact(struct arena *a, uint64_t offset);

/* The first slot of a block, and its last one. */
size_t arena_slots_of_block(const struct arena *a, bfc_handle handle, struct bfc_info *ret, size_t *ret_last);

/* Of parked blocks, n_bytes more (modulo 2^64). */
void arena_count_parked(struct arena *a, uint64_t n_bytes);

/* ---- extents.c ---------------------------------------------------------------- */

int extent_destroy(const struct partition *p, struct device_extent *memory, uint64_t key);

/* Clears an extent and its exports in the ledger. */
void extent_strike(struct ledger *l, uint32_t extent);

/* Puts an extent that is in the ledger into its slot. */
void arena_occupy_slot(struct arena *a, size_t slot, struct device_extent memory, struct charge *charge);

/* Clears an extent whose memory was released or is unreclaimed. */
void arena_empty_slot(struct arena *a, size_t slot, bool unreclaimed);

/* The arena ends: their slots get back the extents of releases that another process still keeps. */
void arena_drop_kept(struct arena *a);

#endif
