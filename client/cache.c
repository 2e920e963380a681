/* The cache; see cache.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A pool's allocator has one linear space, in which each region has a place as
 * long as itself; its offsets there are `at`. Regions come and go with their first
 * and last slab. The grid is the allocator's finest, so that a slab is backed and
 * given back at its own bounds.
 *
 * A slab counts the blocks that have bytes in it. So what can go back is known
 * without looking: `idle` lists the slabs in which nothing lies, in the order in which
 * they became so.
 *
 * Where a slab is split its low part stays the same `struct slab`, and the high part is a new one. Blocks name
 * the first of all of these, their origin, which tells their place as long as any part of it is there. A slab
 * that is held has so many uses that it cannot become idle, until it is counted.
 *
 * Invariants, for each pool: slabs are sorted by `at` and do not overlap; the
 * allocator's backed ranges are exactly theirs; n_reserved is their sum, n_in_use that of
 * the blocks; a slab is in `idle` exactly while its n_used == 0; a region has
 * n_slabs > 0. */
#include "client/cache.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>

#include "bfc/bfc.h"

#define DOUBTS      16u                 /* after a wrong guess */
#define HELD        (UINT64_C(1) << 62) /* uses of a slab that is held */
#define EXTENT_STEP (UINT64_C(2) << 20)

/* Slabs may have free beyond the peak of what is in use: this part of the peak, or so many bytes where that is more. */
#define SURPLUS_SHARE 32u
#define SURPLUS_BYTES (UINT64_C(32) << 20)

struct cache_region {
        uint64_t id;
        uint64_t base; /* in the allocator's space */
        uint64_t n_bytes;
        char *ptr; /* where it begins in this process */
        size_t n_slabs;
};

struct slab {
        struct pool *pool;
        char *ptr;
        uint64_t at; /* in the allocator's space */
        uint64_t n_bytes;
        uint64_t n_used; /* blocks that have bytes in it; from HELD / 2 on: it is held */
        TAILQ_ENTRY(slab) idle;
        uint64_t idle_stamp; /* while it is in that list, which is sorted by it */
        uint64_t offset;     /* in the region */
        uint64_t region_id;
        uint64_t block_id;
        struct slab *origin; /* itself, or what it was split off from at first */
        size_t n_parts;      /* of an origin: slabs that name it. It stays until there is none */
        bool was_split;      /* the same: it was */
};

/* By place: the number, beside the pointer, is what a search reads. */
struct slot {
        uint64_t at;
        struct slab *slab;
};

TAILQ_HEAD(slabs, slab);

struct pool {
        struct cache_sizes sizes;
        struct bfc *bfc; /* NULL: nothing was added yet */
        size_t last;     /* the slab that was found last; any number */
        struct slot *slots;
        size_t n_slots;
        size_t n_room;
        struct slabs idle; /* the first has been idle the longest */
        uint64_t n_stamps;
        uint64_t n_reserved;
        uint64_t n_in_use;
        uint64_t peak_in_use; /* since the pool last had no slab */
        bool is_draining;
        struct pages_held *shown;     /* where that is told */
        struct pages_held unseen;     /* to nobody, so far */
        struct cache_region *regions; /* sorted by base */
        size_t n_regions;
        struct slab *spare; /* for the next split; so there is room for a slot more */
        unsigned n_doubts;  /* so many misses go without a guess where the broker will put it */
};

struct cache {
        uint32_t n_pools;
        struct pool pools[];
};

int cache_new(const struct cache_sizes *sizes, uint32_t n_partitions, struct cache **ret)
{
        struct cache *c = calloc(1, sizeof(*c) + n_partitions * sizeof(c->pools[0]));

        if (!c)
                return -ENOMEM;
        c->n_pools = n_partitions;
        for (uint32_t i = 0; i < n_partitions; i++) {
                c->pools[i].sizes = sizes[i];
                c->pools[i].shown = &c->pools[i].unseen;
                TAILQ_INIT(&c->pools[i].idle);
        }
        *ret = c;
        return 0;
}

static void slab_forget(struct slab *s)
{
        struct slab *origin = s->origin;
        bool is_last = --origin->n_parts == 0;

        if (s != origin)
                free(s);
        if (is_last)
                free(origin);
}

struct cache *cache_free(struct cache *c)
{
        if (!c)
                return NULL;
        for (uint32_t i = 0; i < c->n_pools; i++) {
                struct pool *p = &c->pools[i];

                for (size_t k = 0; k < p->n_slots; k++)
                        slab_forget(p->slots[k].slab);
                free(p->spare);
                free(p->slots);
                free(p->regions);
                bfc_destroy(p->bfc);
        }
        free(c);
        return NULL;
}

/* ---- slabs by place ------------------------------------------------------ */

/* How many slabs begin at or before `at`. */
static size_t slots_up_to(const struct pool *p, uint64_t at)
{
        const struct slot *low = p->slots;

        if (p->n_slots == 0)
                return 0;
        /* Without a guess at each step: it would be wrong every second time. */
        for (size_t n = p->n_slots; n > 1; n -= n / 2)
                low = low[n / 2].at <= at ? low + n / 2 : low;
        return (size_t)(low - p->slots) + (low->at <= at);
}

/* The slab that has this byte; there is one. */
static size_t slot_at(struct pool *p, uint64_t at)
{
        size_t i = p->last;

        if (i < p->n_slots && at - p->slots[i].at < p->slots[i].slab->n_bytes)
                return i;
        return p->last = slots_up_to(p, at) - 1;
}

static uint64_t slab_end(const struct slab *s)
{
        return s->at + s->n_bytes;
}

/* ---- regions ------------------------------------------------------------- */

static struct cache_region *region_find(const struct pool *p, uint64_t id)
{
        for (size_t i = 0; i < p->n_regions; i++)
                if (p->regions[i].id == id)
                        return &p->regions[i];
        return NULL;
}

static int region_add(struct pool *p, const struct cache_given *given, struct cache_region **ret)
{
        struct cache_region *regions = realloc(p->regions, (p->n_regions + 1) * sizeof(*regions));
        uint64_t base = 0, n_bytes = given->region_bytes / BFC_GRANULE * BFC_GRANULE;
        size_t i;
        int r;

        if (!regions)
                return -ENOMEM;
        p->regions = regions;
        for (i = 0; i < p->n_regions && regions[i].base - base < n_bytes; i++)
                base = regions[i].base + regions[i].n_bytes;
        if (n_bytes > BFC_MAX_SPACE - base)
                return -ENOSPC;
        r = bfc_add_region(p->bfc, base, n_bytes, 0, false);
        if (r < 0)
                return r;
        memmove(regions + i + 1, regions + i, (p->n_regions - i) * sizeof(*regions));
        regions[i] = (struct cache_region){ given->region_id, base, n_bytes,
                                            (char *)given->ptr - given->offset, 0 };
        p->n_regions++;
        *ret = &regions[i];
        return 0;
}

static void region_remove(struct pool *p, struct cache_region *region)
{
        bfc_remove_region(p->bfc, region->base);
        p->n_regions--;
        memmove(region, region + 1, (size_t)(p->regions + p->n_regions - region) * sizeof(*region));
}

/* ---- taking in ------------------------------------------------------------ */

static int pool_make_room(struct pool *p)
{
        size_t n_room = p->n_room ? p->n_room * 2 : 16;
        struct slot *slots;

        if (!p->bfc) {
                int r = bfc_new(BFC_GRANULE, &p->bfc);

                if (r < 0)
                        return r;
        }
        if (p->n_slots + (p->spare != NULL) < p->n_room)
                return 0;
        slots = realloc(p->slots, n_room * sizeof(*slots));
        if (!slots)
                return -ENOMEM;
        p->slots = slots;
        p->n_room = n_room;
        return 0;
}

static void slab_idle(struct pool *p, struct slab *s)
{
        s->idle_stamp = ++p->n_stamps;
        TAILQ_INSERT_TAIL(&p->idle, s, idle);
}

static void slot_insert(struct pool *p, size_t i, struct slab *s)
{
        memmove(p->slots + i + 1, p->slots + i, (p->n_slots - i) * sizeof(*p->slots));
        p->slots[i] = (struct slot){ s->at, s };
        p->n_slots++;
}

static int pool_insert(struct pool *p, struct slab *s)
{
        size_t i = slots_up_to(p, s->at);
        int r;

        if ((i > 0 && slab_end(p->slots[i - 1].slab) > s->at) ||
            (i < p->n_slots && p->slots[i].at < slab_end(s)))
                return -EEXIST;
        r = bfc_back(p->bfc, (struct bfc_range){ s->at, slab_end(s) });
        if (r < 0)
                return r;
        slot_insert(p, i, s);
        slab_idle(p, s);
        p->n_reserved += s->n_bytes;
        pages_add(&p->shown->bytes_slabs, s->n_bytes);
        return 0;
}

static int pool_add(struct pool *p, const struct cache_given *given, struct slab *s)
{
        struct cache_region *region = region_find(p, given->region_id);
        int r = 0;

        if (!region)
                r = region_add(p, given, &region);
        if (r < 0)
                return r;
        if (given->offset + given->n_bytes > region->n_bytes || region->ptr + given->offset != given->ptr)
                r = -EINVAL;
        s->at = region->base + given->offset;
        if (r == 0)
                r = pool_insert(p, s);
        if (r == 0)
                region->n_slabs++;
        else if (region->n_slabs == 0)
                region_remove(p, region);
        return r;
}

int cache_add(struct cache *c, uint32_t partition, const struct cache_given *given)
{
        struct pool *p = &c->pools[partition];
        struct slab *s;
        int r;

        if ((given->offset | given->n_bytes) % BFC_GRANULE != 0 || given->n_bytes == 0 ||
            given->n_bytes > given->region_bytes || given->offset > given->region_bytes - given->n_bytes)
                return -EINVAL;
        r = pool_make_room(p);
        if (r < 0)
                return r;
        s = malloc(sizeof(*s));
        if (!s)
                return -ENOMEM;
        *s = (struct slab){ .pool = p,
                            .ptr = given->ptr,
                            .n_bytes = given->n_bytes,
                            .offset = given->offset,
                            .region_id = given->region_id,
                            .block_id = given->block_id,
                            .origin = s,
                            .n_parts = 1 };
        r = pool_add(p, given, s);
        if (r < 0)
                free(s);
        return r;
}

/* ---- what to ask for ------------------------------------------------------ */

/* What is a multiple of its extents the broker places in whole ones, and leaves free what is
 * before them: the next guess would land there, and not beside what is ours. */
static uint64_t want_odd(const struct pool *p, uint64_t n_bytes)
{
        return p->sizes.has_grid && n_bytes % EXTENT_STEP == 0 ? n_bytes + BFC_GRANULE : n_bytes;
}

uint64_t cache_want_whole(const struct cache *c, uint32_t partition, uint64_t n_bytes)
{
        const struct pool *p = &c->pools[partition];

        if (n_bytes <= p->sizes.slab_bytes / 2)
                return bfc_block_bytes(p->sizes.slab_bytes);
        return n_bytes < BFC_MAX_SPACE ? want_odd(p, bfc_block_bytes(n_bytes)) : n_bytes;
}

/* The broker places by the same rules as this pool's allocator. Where it serves nobody else, the
 * place that needs the fewest new bytes here is so there too, and only these are asked for:
 * otherwise each new largest request leaves the free end of the region before it. */
uint64_t cache_want(struct cache *c, uint32_t partition, uint64_t n_bytes)
{
        uint64_t n_whole = cache_want_whole(c, partition, n_bytes), n_slab;
        struct pool *p = &c->pools[partition];
        struct bfc_growth plan;

        n_slab = bfc_block_bytes(p->sizes.slab_bytes);
        if (!p->bfc || n_whole <= n_slab || n_whole > BFC_MAX_SPACE)
                return n_whole;
        if (p->n_doubts > 0) {
                p->n_doubts--;
                return n_whole;
        }
        if (bfc_plan_growth(p->bfc, n_bytes, n_whole - BFC_GRANULE, &plan) != 0)
                return n_whole;
        return plan.new_bytes > n_slab ? want_odd(p, plan.new_bytes) : n_slab;
}

uint64_t cache_want_least(const struct cache *c, uint32_t partition, uint64_t n_bytes)
{
        const struct pool *p = &c->pools[partition];
        struct bfc_growth plan;

        if (!p->bfc || n_bytes > BFC_MAX_SPACE ||
            bfc_plan_growth(p->bfc, n_bytes, bfc_block_bytes(n_bytes) - BFC_GRANULE, &plan) != 0 ||
            plan.new_bytes == 0)
                return n_bytes;
        return plan.new_bytes;
}

/* ---- blocks -------------------------------------------------------------- */

static void slab_use(struct pool *p, struct slab *s)
{
        if (s->n_used++ == 0)
                TAILQ_REMOVE(&p->idle, s, idle);
}

static void slab_unuse(struct pool *p, struct slab *s)
{
        if (--s->n_used == 0)
                slab_idle(p, s);
}

int cache_alloc(struct cache *c, uint32_t partition, uint64_t n_bytes, struct block *ret)
{
        struct pool *p = &c->pools[partition];
        uint64_t at, n_block = bfc_block_bytes(n_bytes);
        bfc_handle handle;
        struct slab *s;
        size_t i;
        int r;

        if (!p->bfc || n_bytes > BFC_MAX_SPACE)
                return CACHE_MISS;
        r = bfc_alloc(p->bfc, n_bytes, &handle, &at);
        if (r != 0)
                return r < 0 ? r : CACHE_MISS;
        i = slot_at(p, at);
        s = p->slots[i].slab;
        slab_use(p, s);
        *ret = (struct block){ .ptr = s->ptr + (at - s->at),
                               .block_id = s->block_id,
                               .region_id = s->region_id,
                               .offset = s->offset + (at - s->at),
                               .n_bytes = n_block,
                               .slab = s->origin,
                               .handle = handle,
                               .partition = (uint16_t)partition };
        while (slab_end(p->slots[i].slab) < at + n_block)
                slab_use(p, p->slots[++i].slab);
        p->n_in_use += n_block;
        if (p->n_in_use > p->peak_in_use)
                p->peak_in_use = p->n_in_use;
        pages_add(&p->shown->bytes_cut, n_block);
        return 0;
}

/* In which the block begins. */
static struct slab *slab_of(const struct block *block)
{
        struct slab *origin = block->slab;

        if (!origin->was_split)
                return origin;
        return origin->pool->slots[slot_at(origin->pool, origin->at + (block->offset - origin->offset))].slab;
}

void cache_dealloc(const struct block *block)
{
        struct slab *s = slab_of(block);
        struct pool *p = s->pool;
        uint64_t end = s->at + (block->offset - s->offset) + block->n_bytes;

        bfc_dealloc(p->bfc, block->handle);
        p->n_in_use -= block->n_bytes;
        pages_add(&p->shown->bytes_cut, -block->n_bytes);
        slab_unuse(p, s);
        if (slab_end(s) < end)
                for (size_t i = slots_up_to(p, s->at); i < p->n_slots && p->slots[i].at < end; i++)
                        slab_unuse(p, p->slots[i].slab);
}

uint64_t cache_offset(const struct block *block)
{
        return block->offset - slab_of(block)->offset;
}

uint64_t cache_block_id(const struct block *block)
{
        return slab_of(block)->block_id;
}

/* ---- giving back --------------------------------------------------------- */

void cache_show(struct cache *c, uint32_t partition, struct pages_held *held)
{
        struct pool *p = &c->pools[partition];

        pages_add(&held->bytes_slabs, p->n_reserved);
        pages_add(&held->bytes_cut, p->n_in_use);
        p->shown = held;
}

void cache_set_draining(struct cache *c, uint32_t partition, bool is_draining)
{
        c->pools[partition].is_draining = is_draining;
}

uint64_t cache_idle_bytes(const struct cache *c, uint32_t partition)
{
        return c->pools[partition].n_reserved - c->pools[partition].n_in_use;
}

uint64_t cache_excess(const struct cache *c, uint32_t partition)
{
        const struct pool *p = &c->pools[partition];
        uint64_t n_idle = p->n_reserved - p->n_in_use, bound = p->is_draining ? 0 : p->sizes.idle_bytes;

        if (n_idle <= bound || TAILQ_EMPTY(&p->idle))
                return 0;
        return n_idle - bound;
}

bool cache_has_surplus(const struct cache *c, uint32_t partition, uint64_t n_bytes, uint64_t want_bytes)
{
        const struct pool *p = &c->pools[partition];
        uint64_t peak, surplus;

        if (!p->sizes.has_grid || n_bytes > BFC_MAX_SPACE || want_bytes > BFC_MAX_SPACE)
                return false;
        peak = p->n_in_use + bfc_block_bytes(n_bytes);
        if (peak < p->peak_in_use)
                peak = p->peak_in_use;
        surplus = peak / SURPLUS_SHARE > SURPLUS_BYTES ? peak / SURPLUS_SHARE : SURPLUS_BYTES;
        return p->n_reserved + want_bytes > peak + surplus;
}

/* Nothing lies in it. */
static void pool_remove(struct pool *p, struct slab *s)
{
        struct cache_region *region = region_find(p, s->region_id);
        struct bfc_range range = { s->at, slab_end(s) };
        size_t i = slots_up_to(p, s->at) - 1;

        TAILQ_REMOVE(&p->idle, s, idle);
        p->n_slots--;
        memmove(p->slots + i, p->slots + i + 1, (p->n_slots - i) * sizeof(*p->slots));
        p->n_reserved -= s->n_bytes;
        if (p->n_reserved == 0)
                p->peak_in_use = 0;
        pages_add(&p->shown->bytes_slabs, -s->n_bytes);
        bfc_release_commit(p->bfc, range);
        if (--region->n_slabs == 0)
                region_remove(p, region);
        slab_forget(s);
}

size_t cache_take_idle(struct cache *c, uint32_t partition, uint64_t want_bytes, uint64_t *ret_block_ids,
                       size_t max, uint64_t *ret_bytes)
{
        struct pool *p = &c->pools[partition];
        struct slab *s;
        size_t n = 0;

        *ret_bytes = 0;
        while (n < max && *ret_bytes < want_bytes && (s = TAILQ_FIRST(&p->idle))) {
                /* It can fail only for want of memory for the allocator's own records. */
                if (bfc_release_begin(p->bfc, (struct bfc_range){ s->at, slab_end(s) }) < 0)
                        break;
                ret_block_ids[n++] = s->block_id;
                *ret_bytes += s->n_bytes;
                pool_remove(p, s);
        }
        return n;
}

size_t cache_take_idle_in(struct cache *c, uint32_t partition, uint64_t region_id, uint64_t offset,
                          uint64_t n_bytes, uint64_t want_bytes, uint64_t *ret_block_ids, size_t max,
                          uint64_t *ret_bytes)
{
        struct pool *p = &c->pools[partition];
        const struct cache_region *region = region_find(p, region_id);
        uint64_t at, end;
        size_t i, n = 0;

        *ret_bytes = 0;
        if (!region || offset >= region->n_bytes)
                return 0;
        at = region->base + offset;
        end = n_bytes < region->n_bytes - offset ? at + n_bytes : region->base + region->n_bytes;
        i = slots_up_to(p, at);
        if (i > 0 && slab_end(p->slots[i - 1].slab) > at)
                i--;
        while (n < max && *ret_bytes < want_bytes && i < p->n_slots && p->slots[i].at < end) {
                struct slab *s = p->slots[i].slab;

                if (s->n_used > 0 ||
                    bfc_release_begin(p->bfc, (struct bfc_range){ s->at, slab_end(s) }) < 0) {
                        i++;
                        continue;
                }
                ret_block_ids[n++] = s->block_id;
                *ret_bytes += s->n_bytes;
                pool_remove(p, s);
        }
        return n;
}

int cache_take_wrong(struct cache *c, uint32_t partition, uint64_t block_id)
{
        struct pool *p = &c->pools[partition];
        struct slab *s = TAILQ_LAST(&p->idle, slabs); /* the last that was added */

        p->n_doubts = DOUBTS;
        if (!s || s->block_id != block_id ||
            bfc_release_begin(p->bfc, (struct bfc_range){ s->at, slab_end(s) }) < 0)
                return -ENOMEM;
        pool_remove(p, s);
        return 0;
}

int cache_take_whole(const struct block *block)
{
        struct slab *s = slab_of(block);
        struct pool *p = s->pool;

        if (block->offset != s->offset || block->n_bytes != s->n_bytes || s->n_used != 1)
                return -EINVAL;
        /* Free for a moment: there is no way back, so what could fail is done before. */
        if (bfc_release_reserve(p->bfc) < 0)
                return -ENOMEM;
        cache_dealloc(block);
        if (bfc_release_begin(p->bfc, (struct bfc_range){ s->at, slab_end(s) }) < 0)
                return -ENOMEM; /* cannot be */
        pool_remove(p, s);
        return 0;
}

/* ---- splitting ----------------------------------------------------------- */

struct search {
        const struct pool *pool;
        const struct cache_range *in; /* NULL: all */
        cache_extent_fn extent;
        void *userdata;
        uint64_t want_bytes;
        struct cache_place *places;
        size_t n, max;
        size_t region;      /* in which the gap is */
        uint64_t gap_begin; /* there is no block from there on; in the allocator's space */
        uint64_t gap_end;
};

/* The extents that have all of their bytes in [*begin, *end) of the region. False: there is none. */
static bool search_extents(const struct search *s, uint64_t region_id, uint64_t *begin, uint64_t *end)
{
        uint64_t from, to;

        if (s->in && s->in->region_id != region_id)
                return false;
        if (s->in && s->in->offset > *begin)
                *begin = s->in->offset;
        if (s->in && s->in->offset + s->in->n_bytes < *end)
                *end = s->in->offset + s->in->n_bytes;
        if (*begin >= *end)
                return false;
        if (s->extent(s->userdata, region_id, *begin, &from, &to) && from < *begin)
                *begin = to;
        if (s->extent(s->userdata, region_id, *end - 1, &from, &to) && to > *end)
                *end = from;
        return *begin < *end;
}

/* Places at which slabs in use reach into the extents, or out of them. */
static void search_gap(struct search *s)
{
        const struct pool *p = s->pool;
        const struct cache_region *region = &p->regions[s->region];
        uint64_t begin = s->gap_begin - region->base, end = s->gap_end - region->base;
        size_t i;

        if (s->gap_begin >= s->gap_end || s->want_bytes == 0 || s->n + 2 > s->max ||
            !search_extents(s, region->id, &begin, &end))
                return;
        i = slots_up_to(p, region->base + begin);
        for (i -= i > 0; i < p->n_slots && p->slots[i].at < region->base + end; i++) {
                const struct slab *slab = p->slots[i].slab;
                uint64_t low, high;
                bool is_two;

                if (slab_end(slab) <= region->base + begin || slab->n_used == 0)
                        continue;
                low = slab->offset > begin ? slab->offset : begin;
                high = slab->offset + slab->n_bytes < end ? slab->offset + slab->n_bytes : end;
                is_two = slab->offset < low && high < slab->offset + slab->n_bytes && s->n + 1 < s->max;
                if (slab->offset < low && s->n < s->max)
                        s->places[s->n++] = (struct cache_place){ region->id, low, is_two };
                if (high < slab->offset + slab->n_bytes && s->n < s->max)
                        s->places[s->n++] = (struct cache_place){ region->id, high, false };
                s->want_bytes -= high - low < s->want_bytes ? high - low : s->want_bytes;
        }
}

static int search_chunk(void *userdata, char kind, struct bfc_range range)
{
        struct search *s = userdata;
        const struct cache_region *region = &s->pool->regions[s->region];

        while (range.begin >= region->base + region->n_bytes) {
                search_gap(s);
                region = &s->pool->regions[++s->region];
                s->gap_begin = s->gap_end = region->base;
        }
        if (kind == 'u') {
                search_gap(s);
                s->gap_begin = range.end;
        }
        s->gap_end = range.end;
        return s->want_bytes == 0 || s->n + 2 > s->max;
}

size_t cache_find_splits(const struct cache *c, uint32_t partition, const struct cache_range *in,
                         cache_extent_fn extent, void *userdata, uint64_t want_bytes, struct cache_place *ret,
                         size_t max)
{
        const struct pool *p = &c->pools[partition];
        struct search s = { .pool = p,
                            .in = in,
                            .extent = extent,
                            .userdata = userdata,
                            .want_bytes = want_bytes,
                            .places = ret,
                            .max = max };

        if (p->n_regions == 0)
                return 0;
        s.gap_begin = s.gap_end = p->regions[0].base;
        if (bfc_walk(p->bfc, search_chunk, &s) == 0)
                search_gap(&s);
        return s.n;
}

/* The slab that has the place inside, not where it begins. */
static struct slab *slab_around(struct pool *p, const struct cache_place *at)
{
        const struct cache_region *region = region_find(p, at->region_id);
        size_t i = region ? slots_up_to(p, region->base + at->offset) : 0;
        struct slab *s = i > 0 ? p->slots[i - 1].slab : NULL;

        return s && s->region_id == at->region_id && s->offset < at->offset &&
                               at->offset < s->offset + s->n_bytes
                       ? s
                       : NULL;
}

int cache_hold(struct cache *c, uint32_t partition, const struct cache_place *at, uint64_t *ret_block_id,
               uint64_t *ret_n_bytes)
{
        struct pool *p = &c->pools[partition];
        struct slab *s = slab_around(p, at);

        if (!s || s->n_used == 0)
                return -ENOENT;
        if (!p->spare)
                p->spare = calloc(1, sizeof(*p->spare));
        if (!p->spare || pool_make_room(p) < 0)
                return -ENOMEM;
        if (s->n_used < HELD / 2)
                s->n_used += HELD;
        *ret_block_id = s->block_id;
        *ret_n_bytes = at->offset - s->offset;
        return 0;
}

void cache_split(struct cache *c, uint32_t partition, const struct cache_place *at, uint64_t block_id)
{
        struct pool *p = &c->pools[partition];
        struct slab *low = slab_around(p, at), *high = p->spare;
        uint64_t n_low = at->offset - low->offset;

        p->spare = NULL;
        *high = (struct slab){ .pool = p,
                               .ptr = low->ptr + n_low,
                               .at = low->at + n_low,
                               .n_bytes = low->n_bytes - n_low,
                               .n_used = HELD,
                               .offset = at->offset,
                               .region_id = low->region_id,
                               .block_id = block_id,
                               .origin = low->origin };
        low->n_bytes = n_low;
        low->n_used = HELD;
        low->origin->n_parts++;
        low->origin->was_split = true;
        slot_insert(p, slots_up_to(p, high->at), high);
        region_find(p, at->region_id)->n_slabs++;
}

static bool slab_is_held(const struct slab *s)
{
        return s->n_used >= HELD / 2;
}

struct count {
        struct pool *pool;
        size_t i; /* the first slab that may have bytes of the chunk */
};

static int count_chunk(void *userdata, char kind, struct bfc_range range)
{
        struct count *c = userdata;
        struct pool *p = c->pool;

        if (kind != 'u')
                return 0;
        while (c->i < p->n_slots && slab_end(p->slots[c->i].slab) <= range.begin)
                c->i++;
        for (size_t i = c->i; i < p->n_slots && p->slots[i].at < range.end; i++)
                if (slab_is_held(p->slots[i].slab))
                        p->slots[i].slab->n_used++;
        return 0;
}

void cache_count(struct cache *c, uint32_t partition)
{
        struct pool *p = &c->pools[partition];
        struct count count = { .pool = p };

        free(p->spare);
        p->spare = NULL;
        for (size_t i = 0; i < p->n_slots; i++)
                if (slab_is_held(p->slots[i].slab))
                        p->slots[i].slab->n_used = HELD;
        if (p->bfc)
                bfc_walk(p->bfc, count_chunk, &count);
        for (size_t i = 0; i < p->n_slots; i++) {
                struct slab *s = p->slots[i].slab;

                if (!slab_is_held(s))
                        continue;
                s->n_used -= HELD;
                if (s->n_used == 0)
                        slab_idle(p, s);
        }
}

/* ---- looking ------------------------------------------------------------- */

void cache_look_idle(const struct cache *c, uint32_t partition, struct cache_idle *ret)
{
        const struct pool *p = &c->pools[partition];
        const struct slab *first = TAILQ_FIRST(&p->idle), *last = TAILQ_LAST(&p->idle, slabs);

        *ret = (struct cache_idle){ 0 };
        if (first)
                *ret = (struct cache_idle){ first->idle_stamp, last->idle_stamp, first->block_id };
}

bool cache_lies_in(const struct cache *c, uint64_t region_id, uint64_t offset, uint64_t n_bytes)
{
        for (uint32_t i = 0; i < c->n_pools; i++) {
                const struct pool *p = &c->pools[i];

                for (size_t k = 0; k < p->n_slots; k++) {
                        const struct slab *s = p->slots[k].slab;

                        if (s->region_id == region_id && s->offset < offset + n_bytes &&
                            offset < s->offset + s->n_bytes)
                                return true;
                }
        }
        return false;
}

size_t cache_list(const struct cache *c, uint64_t *ret_block_ids, size_t max)
{
        size_t n = 0;

        for (uint32_t i = 0; i < c->n_pools; i++)
                for (size_t k = 0; k < c->pools[i].n_slots; k++, n++)
                        if (n < max)
                                ret_block_ids[n] = c->pools[i].slots[k].slab->block_id;
        return n;
}

struct walk {
        const struct pool *pool;
        uint64_t n_blocks; /* that have bytes in a slab, one for each */
        const char *why;
};

static int walk_chunk(void *userdata, char kind, struct bfc_range range)
{
        struct walk *w = userdata;

        for (size_t i = 0; i < w->pool->n_slots; i++) {
                const struct slab *s = w->pool->slots[i].slab;

                if (s->at >= range.end || range.begin >= slab_end(s))
                        continue;
                if (kind == 'u')
                        w->n_blocks++;
                else if (kind != 'f')
                        w->why = "a slab is not backed";
        }
        return 0;
}

static const char *pool_check(const struct pool *p)
{
        uint64_t n_reserved = 0, n_used = 0, n_idle = 0, n_slabs = 0, n_stamp = 0;
        struct walk walk = { .pool = p };
        struct bfc_stats stats;
        const struct slab *s;

        for (size_t i = 0; i < p->n_slots; i++) {
                s = p->slots[i].slab;
                if (p->slots[i].at != s->at || (i > 0 && slab_end(p->slots[i - 1].slab) > s->at))
                        return "slabs are not sorted, or overlap";
                n_reserved += s->n_bytes;
                n_used += s->n_used;
                n_idle += s->n_used == 0;
        }
        TAILQ_FOREACH(s, &p->idle, idle)
        {
                if (n_idle-- == 0 || s->n_used > 0)
                        return "a slab in use is listed as idle";
                if (s->idle_stamp <= n_stamp)
                        return "idle slabs are not in the order in which they became idle";
                n_stamp = s->idle_stamp;
        }
        if (n_idle > 0)
                return "an idle slab is not listed";
        for (size_t i = 0; i < p->n_regions; i++) {
                if (p->regions[i].n_slabs == 0)
                        return "a region has no slab";
                n_slabs += p->regions[i].n_slabs;
        }
        bfc_read_stats(p->bfc, &stats);
        if (n_slabs != p->n_slots || n_reserved != p->n_reserved || stats.bytes_reserved != n_reserved ||
            stats.bytes_in_use != p->n_in_use)
                return "a sum is wrong";
        bfc_walk(p->bfc, walk_chunk, &walk);
        if (!walk.why && walk.n_blocks != n_used)
                walk.why = "blocks are counted wrongly in slabs";
        return walk.why;
}

int cache_check(const struct cache *c, const char **ret_why)
{
        for (uint32_t i = 0; i < c->n_pools; i++) {
                const struct pool *p = &c->pools[i];
                const char *why = NULL;

                if (!p->bfc || bfc_check(p->bfc, &why) < 0 || (why = pool_check(p))) {
                        if (!why)
                                continue;
                        *ret_why = why;
                        return -EBADMSG;
                }
        }
        return 0;
}
