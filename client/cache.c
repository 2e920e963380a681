/* The cache; see cache.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "client/cache.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>

#include "bfc/bfc.h"

/* ---- slabs ---------------------------------------------------------------------
 *
 * The blocks of the daemon that one partition's cache owns, by place, and the allocator that runs over them.
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
 * n_used == 0; a region has n_slabs > 0. */

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

/* The slabs may exceed the peak of what is in use by this part of it, or by so many bytes if that is more. */
#define SURPLUS_SHARE 32u
#define SURPLUS_BYTES (UINT64_C(32) << 20)

static void slab_forget(struct slab *s)
{
        struct slab *origin = s->origin;
        bool is_last = --origin->n_parts == 0;

        if (s != origin)
                free(s);
        if (is_last)
                free(origin);
}

static void slabs_clear(struct slabs *p)
{
        for (size_t k = 0; k < p->n_slots; k++)
                slab_forget(p->slots[k].slab);
        free(p->spare);
        free(p->slots);
        free(p->regions);
        bfc_destroy(p->bfc);
}

/* The number of slabs that begin at or before `at`. */
static size_t slabs_up_to(const struct slabs *p, uint64_t at)
{
        const struct slot *low = p->slots;

        if (p->n_slots == 0)
                return 0;
        /* Without a branch at each step, which would be mispredicted half of the time. */
        for (size_t n = p->n_slots; n > 1; n -= n / 2)
                low = low[n / 2].at <= at ? low + n / 2 : low;
        return (size_t)(low - p->slots) + (low->at <= at);
}

/* The slab that contains this byte; there is one. */
static size_t slabs_at(struct slabs *p, uint64_t at)
{
        size_t i = p->last;

        if (i < p->n_slots && at - p->slots[i].at < p->slots[i].slab->n_bytes)
                return i;
        return p->last = slabs_up_to(p, at) - 1;
}

/* NULL: there is none. */
static struct slab_region *slabs_region(const struct slabs *p, uint64_t id)
{
        for (size_t i = 0; i < p->n_regions; i++)
                if (p->regions[i].id == id)
                        return &p->regions[i];
        return NULL;
}

static int region_add(struct slabs *p, const struct cache_grant *grant, struct slab_region **ret)
{
        struct slab_region *regions = realloc(p->regions, (p->n_regions + 1) * sizeof(*regions));
        uint64_t base = 0, n_bytes = grant->region_bytes / BFC_GRANULE * BFC_GRANULE;
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
        regions[i] = (struct slab_region){ grant->region_id, base, n_bytes,
                                           (char *)grant->ptr - grant->offset, 0 };
        p->n_regions++;
        *ret = &regions[i];
        return 0;
}

static void region_remove(struct slabs *p, struct slab_region *region)
{
        bfc_remove_region(p->bfc, region->base);
        p->n_regions--;
        memmove(region, region + 1, (size_t)(p->regions + p->n_regions - region) * sizeof(*region));
}

/* Memory for one more slab beside `spare`. -ENOMEM. */
static int slabs_make_room(struct slabs *p)
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

static void slabs_set_idle(struct slabs *p, struct slab *s)
{
        s->idle_stamp = ++p->n_stamps;
        TAILQ_INSERT_TAIL(&p->idle, s, idle);
}

/* Inserts a part of a slab that was split. There is room. */
static void slabs_insert(struct slabs *p, size_t i, struct slab *s)
{
        memmove(p->slots + i + 1, p->slots + i, (p->n_slots - i) * sizeof(*p->slots));
        p->slots[i] = (struct slot){ s->at, s };
        p->n_slots++;
}

static int back_slab(struct slabs *p, struct slab *s)
{
        size_t i = slabs_up_to(p, s->at);
        int r;

        if ((i > 0 && slab_end(p->slots[i - 1].slab) > s->at) ||
            (i < p->n_slots && p->slots[i].at < slab_end(s)))
                return -EEXIST;
        r = bfc_back(p->bfc, (struct bfc_range){ s->at, slab_end(s) });
        if (r < 0)
                return r;
        slabs_insert(p, i, s);
        slabs_set_idle(p, s);
        p->n_reserved += s->n_bytes;
        pages_add(&p->shown->bytes_slabs, s->n_bytes);
        return 0;
}

/* Adds a block of the daemon as a new idle slab s; see cache_add(). There is room. */
static int slabs_add(struct slabs *p, const struct cache_grant *grant, struct slab *s)
{
        struct slab_region *region = slabs_region(p, grant->region_id);
        int r = 0;

        if (!region)
                r = region_add(p, grant, &region);
        if (r < 0)
                return r;
        if (grant->offset + grant->n_bytes > region->n_bytes || region->ptr + grant->offset != grant->ptr)
                r = -EINVAL;
        s->at = region->base + grant->offset;
        if (r == 0)
                r = back_slab(p, s);
        if (r == 0)
                region->n_slabs++;
        else if (region->n_slabs == 0)
                region_remove(p, region);
        return r;
}

static void slabs_remove(struct slabs *p, struct slab *s)
{
        struct slab_region *region = slabs_region(p, s->region_id);
        struct bfc_range range = { s->at, slab_end(s) };
        size_t i = slabs_up_to(p, s->at) - 1;

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

struct walk {
        const struct slabs *set;
        uint64_t n_blocks; /* that have bytes in a slab, one for each */
        const char *why;
};

static int walk_chunk(void *userdata, char kind, struct bfc_range range)
{
        struct walk *w = userdata;

        for (size_t i = 0; i < w->set->n_slots; i++) {
                const struct slab *s = w->set->slots[i].slab;

                if (s->at >= range.end || range.begin >= slab_end(s))
                        continue;
                if (kind == 'u')
                        w->n_blocks++;
                else if (kind != 'f')
                        w->why = "a slab is not backed";
        }
        return 0;
}

static const char *slabs_check(const struct slabs *p)
{
        uint64_t n_reserved = 0, n_used = 0, n_idle = 0, n_slabs = 0, n_stamp = 0;
        struct walk walk = { .set = p };
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

/* ---- the cache ------------------------------------------------------------------ */

int cache_new(const struct cache_sizes *sizes, uint32_t n_partitions, struct cache **ret)
{
        struct cache *c = calloc(1, sizeof(*c) + n_partitions * sizeof(c->items[0]));

        if (!c)
                return -ENOMEM;
        c->n_items = n_partitions;
        for (uint32_t i = 0; i < n_partitions; i++) {
                c->items[i].sizes = sizes[i];
                c->items[i].shown = &c->items[i].unseen;
                TAILQ_INIT(&c->items[i].idle);
        }
        *ret = c;
        return 0;
}

struct cache *cache_free(struct cache *c)
{
        if (!c)
                return NULL;
        for (uint32_t i = 0; i < c->n_items; i++)
                slabs_clear(&c->items[i]);
        free(c);
        return NULL;
}

int cache_add(struct cache *c, uint32_t partition, const struct cache_grant *grant)
{
        struct slabs *p = &c->items[partition];
        struct slab *s;
        int r;

        if ((grant->offset | grant->n_bytes) % BFC_GRANULE != 0 || grant->n_bytes == 0 ||
            grant->n_bytes > grant->region_bytes || grant->offset > grant->region_bytes - grant->n_bytes)
                return -EINVAL;
        r = slabs_make_room(p);
        if (r < 0)
                return r;
        s = malloc(sizeof(*s));
        if (!s)
                return -ENOMEM;
        *s = (struct slab){ .set = p,
                            .ptr = grant->ptr,
                            .n_bytes = grant->n_bytes,
                            .offset = grant->offset,
                            .region_id = grant->region_id,
                            .block_id = grant->block_id,
                            .origin = s,
                            .n_parts = 1 };
        r = slabs_add(p, grant, s);
        if (r < 0)
                free(s);
        return r;
}

uint64_t cache_want(const struct cache *c, uint32_t partition, uint64_t n_bytes)
{
        const struct slabs *p = &c->items[partition];

        if (n_bytes <= p->sizes.slab_bytes / 2)
                return bfc_block_bytes(p->sizes.slab_bytes);
        return n_bytes < BFC_MAX_SPACE ? bfc_block_bytes(n_bytes) : n_bytes;
}

uint64_t cache_want_least(const struct cache *c, uint32_t partition, uint64_t n_bytes)
{
        const struct slabs *p = &c->items[partition];
        struct bfc_growth plan;

        if (!p->bfc || n_bytes > BFC_MAX_SPACE ||
            bfc_plan_growth(p->bfc, n_bytes, bfc_block_bytes(n_bytes) - BFC_GRANULE, &plan) != 0 ||
            plan.new_bytes == 0)
                return n_bytes;
        return plan.new_bytes;
}

/* ---- blocks -------------------------------------------------------------- */

static void slab_use(struct slabs *p, struct slab *s)
{
        if (s->n_used++ == 0)
                TAILQ_REMOVE(&p->idle, s, idle);
}

static void slab_unuse(struct slabs *p, struct slab *s)
{
        if (--s->n_used == 0)
                slabs_set_idle(p, s);
}

int cache_alloc(struct cache *c, uint32_t partition, uint64_t n_bytes, struct block *ret)
{
        struct slabs *p = &c->items[partition];
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
        i = slabs_at(p, at);
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

/* The slab in which the block begins. */
static struct slab *slab_of_block(const struct block *block)
{
        struct slab *origin = block->slab;

        if (!origin->was_split)
                return origin;
        return origin->set->slots[slabs_at(origin->set, origin->at + (block->offset - origin->offset))].slab;
}

void cache_dealloc(const struct block *block)
{
        struct slab *s = slab_of_block(block);
        struct slabs *p = s->set;
        uint64_t end = s->at + (block->offset - s->offset) + block->n_bytes;

        bfc_dealloc(p->bfc, block->handle);
        p->n_in_use -= block->n_bytes;
        pages_add(&p->shown->bytes_cut, -block->n_bytes);
        slab_unuse(p, s);
        if (slab_end(s) < end)
                for (size_t i = slabs_up_to(p, s->at); i < p->n_slots && p->slots[i].at < end; i++)
                        slab_unuse(p, p->slots[i].slab);
}

uint64_t cache_offset(const struct block *block)
{
        return block->offset - slab_of_block(block)->offset;
}

uint64_t cache_block_id(const struct block *block)
{
        return slab_of_block(block)->block_id;
}

size_t cache_list(const struct cache *c, uint64_t *ret_block_ids, size_t max)
{
        size_t n = 0;

        for (uint32_t i = 0; i < c->n_items; i++)
                for (size_t k = 0; k < c->items[i].n_slots; k++, n++)
                        if (n < max)
                                ret_block_ids[n] = c->items[i].slots[k].slab->block_id;
        return n;
}

/* ---- idle slabs ---------------------------------------------------------- */

void cache_show(struct cache *c, uint32_t partition, struct pages_held *page)
{
        struct slabs *p = &c->items[partition];

        pages_add(&page->bytes_slabs, p->n_reserved);
        pages_add(&page->bytes_cut, p->n_in_use);
        p->shown = page;
}

void cache_set_draining(struct cache *c, uint32_t partition, bool is_draining)
{
        c->items[partition].is_draining = is_draining;
}

uint64_t cache_idle_bytes(const struct cache *c, uint32_t partition)
{
        return c->items[partition].n_reserved - c->items[partition].n_in_use;
}

uint64_t cache_excess(const struct cache *c, uint32_t partition)
{
        const struct slabs *p = &c->items[partition];
        uint64_t n_idle = p->n_reserved - p->n_in_use, bound = p->is_draining ? 0 : p->sizes.idle_bytes;

        if (n_idle <= bound || TAILQ_EMPTY(&p->idle))
                return 0;
        return n_idle - bound;
}

bool cache_has_surplus(const struct cache *c, uint32_t partition, uint64_t n_bytes, uint64_t want_bytes)
{
        const struct slabs *p = &c->items[partition];
        uint64_t peak, surplus;

        if (!p->sizes.can_split || n_bytes > BFC_MAX_SPACE || want_bytes > BFC_MAX_SPACE)
                return false;
        peak = p->n_in_use + bfc_block_bytes(n_bytes);
        if (peak < p->peak_in_use)
                peak = p->peak_in_use;
        surplus = peak / SURPLUS_SHARE > SURPLUS_BYTES ? peak / SURPLUS_SHARE : SURPLUS_BYTES;
        return p->n_reserved + want_bytes > peak + surplus;
}

/* False: it can fail only for want of memory for the allocator's own records. */
static bool take_slab(struct slabs *p, struct slab *s, uint64_t *ret_block_id, uint64_t *n_bytes)
{
        if (bfc_release_begin(p->bfc, (struct bfc_range){ s->at, slab_end(s) }) < 0)
                return false;
        *ret_block_id = s->block_id;
        *n_bytes += s->n_bytes;
        slabs_remove(p, s);
        return true;
}

static size_t take_in(struct slabs *p, const struct cache_range *in, uint64_t want_bytes,
                      uint64_t *ret_block_ids, size_t max, uint64_t *ret_bytes)
{
        const struct slab_region *region = slabs_region(p, in->region_id);
        uint64_t at, end;
        size_t i, n = 0;

        if (!region || in->offset >= region->n_bytes)
                return 0;
        at = region->base + in->offset;
        end = in->n_bytes < region->n_bytes - in->offset ? at + in->n_bytes : region->base + region->n_bytes;
        i = slabs_up_to(p, at);
        if (i > 0 && slab_end(p->slots[i - 1].slab) > at)
                i--;
        while (n < max && *ret_bytes < want_bytes && i < p->n_slots && p->slots[i].at < end) {
                struct slab *s = p->slots[i].slab;

                if (s->n_used == 0 && take_slab(p, s, &ret_block_ids[n], ret_bytes))
                        n++;
                else
                        i++;
        }
        return n;
}

size_t cache_take_idle(struct cache *c, uint32_t partition, const struct cache_range *in, uint64_t want_bytes,
                       uint64_t *ret_block_ids, size_t max, uint64_t *ret_bytes)
{
        struct slabs *p = &c->items[partition];
        struct slab *s;
        size_t n = 0;

        *ret_bytes = 0;
        if (in)
                return take_in(p, in, want_bytes, ret_block_ids, max, ret_bytes);
        while (n < max && *ret_bytes < want_bytes && (s = TAILQ_FIRST(&p->idle)) &&
               take_slab(p, s, &ret_block_ids[n], ret_bytes))
                n++;
        return n;
}

int cache_take_mismatched(struct cache *c, uint32_t partition, uint64_t block_id)
{
        struct slabs *p = &c->items[partition];
        struct slab *s = TAILQ_LAST(&p->idle, slab_list); /* the last that was added */

        if (!s || s->block_id != block_id ||
            bfc_release_begin(p->bfc, (struct bfc_range){ s->at, slab_end(s) }) < 0)
                return -ENOMEM;
        slabs_remove(p, s);
        return 0;
}

int cache_take_whole(const struct block *block)
{
        struct slab *s = slab_of_block(block);
        struct slabs *p = s->set;

        if (block->offset != s->offset || block->n_bytes != s->n_bytes || s->n_used != 1)
                return -EINVAL;
        /* It is free for a moment and cannot be allocated again, so what can fail is done before. */
        if (bfc_release_reserve(p->bfc) < 0)
                return -ENOMEM;
        cache_dealloc(block);
        if (bfc_release_begin(p->bfc, (struct bfc_range){ s->at, slab_end(s) }) < 0)
                return -ENOMEM; /* cannot be */
        slabs_remove(p, s);
        return 0;
}

void cache_look_idle(const struct cache *c, uint32_t partition, struct cache_idle *ret)
{
        const struct slabs *p = &c->items[partition];
        const struct slab *first = TAILQ_FIRST(&p->idle), *last = TAILQ_LAST(&p->idle, slab_list);

        *ret = (struct cache_idle){ 0 };
        if (first)
                *ret = (struct cache_idle){ first->idle_stamp, last->idle_stamp, first->block_id };
}

bool cache_lies_in(const struct cache *c, uint64_t region_id, uint64_t offset, uint64_t n_bytes)
{
        for (uint32_t i = 0; i < c->n_items; i++) {
                const struct slabs *p = &c->items[i];

                for (size_t k = 0; k < p->n_slots; k++) {
                        const struct slab *s = p->slots[k].slab;

                        if (s->region_id == region_id && s->offset < offset + n_bytes &&
                            offset < s->offset + s->n_bytes)
                                return true;
                }
        }
        return false;
}

int cache_check(const struct cache *c, const char **ret_why)
{
        for (uint32_t i = 0; i < c->n_items; i++) {
                const struct slabs *p = &c->items[i];
                const char *why = NULL;

                if (!p->bfc || bfc_check(p->bfc, &why) < 0 || (why = slabs_check(p))) {
                        if (!why)
                                continue;
                        *ret_why = why;
                        return -EBADMSG;
                }
        }
        return 0;
}

/* ---- splitting slabs ---------------------------------------------------------
 *
 * A slab that is being split has so many uses that it cannot become idle, until these are counted again. */

#define SPLITTING (UINT64_C(1) << 62) /* uses of a slab that is being split */

struct search {
        const struct slabs *set;
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
        const struct slabs *p = s->set;
        const struct slab_region *region = &p->regions[s->region];
        uint64_t begin = s->gap_begin - region->base, end = s->gap_end - region->base;
        size_t i;

        if (s->gap_begin >= s->gap_end || s->want_bytes == 0 || s->n + 2 > s->max ||
            !search_extents(s, region->id, &begin, &end))
                return;
        i = slabs_up_to(p, region->base + begin);
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
        const struct slab_region *region = &s->set->regions[s->region];

        while (range.begin >= region->base + region->n_bytes) {
                search_gap(s);
                region = &s->set->regions[++s->region];
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
        const struct slabs *p = &c->items[partition];
        struct search s = { .set = p,
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
static struct slab *slab_around(struct slabs *p, const struct cache_place *at)
{
        const struct slab_region *region = slabs_region(p, at->region_id);
        size_t i = region ? slabs_up_to(p, region->base + at->offset) : 0;
        struct slab *s = i > 0 ? p->slots[i - 1].slab : NULL;

        return s && s->region_id == at->region_id && s->offset < at->offset &&
                               at->offset < s->offset + s->n_bytes
                       ? s
                       : NULL;
}

int cache_split_begin(struct cache *c, uint32_t partition, const struct cache_place *at,
                      uint64_t *ret_block_id, uint64_t *ret_n_bytes)
{
        struct slabs *p = &c->items[partition];
        struct slab *s = slab_around(p, at);

        if (!s || s->n_used == 0)
                return -ENOENT;
        if (!p->spare)
                p->spare = calloc(1, sizeof(*p->spare));
        if (!p->spare || slabs_make_room(p) < 0)
                return -ENOMEM;
        if (s->n_used < SPLITTING / 2)
                s->n_used += SPLITTING;
        *ret_block_id = s->block_id;
        *ret_n_bytes = at->offset - s->offset;
        return 0;
}

void cache_split_commit(struct cache *c, uint32_t partition, const struct cache_place *at, uint64_t block_id)
{
        struct slabs *p = &c->items[partition];
        struct slab *low = slab_around(p, at), *high = p->spare;
        uint64_t n_low = at->offset - low->offset;

        p->spare = NULL;
        *high = (struct slab){ .set = p,
                               .ptr = low->ptr + n_low,
                               .at = low->at + n_low,
                               .n_bytes = low->n_bytes - n_low,
                               .n_used = SPLITTING,
                               .offset = at->offset,
                               .region_id = low->region_id,
                               .block_id = block_id,
                               .origin = low->origin };
        low->n_bytes = n_low;
        low->n_used = SPLITTING;
        low->origin->n_parts++;
        low->origin->was_split = true;
        slabs_insert(p, slabs_up_to(p, high->at), high);
        slabs_region(p, at->region_id)->n_slabs++;
}

static bool is_splitting(const struct slab *s)
{
        return s->n_used >= SPLITTING / 2;
}

struct count {
        struct slabs *set;
        size_t i; /* the first slab that may have bytes of the chunk */
};

static int count_chunk(void *userdata, char kind, struct bfc_range range)
{
        struct count *c = userdata;
        struct slabs *p = c->set;

        if (kind != 'u')
                return 0;
        while (c->i < p->n_slots && slab_end(p->slots[c->i].slab) <= range.begin)
                c->i++;
        for (size_t i = c->i; i < p->n_slots && p->slots[i].at < range.end; i++)
                if (is_splitting(p->slots[i].slab))
                        p->slots[i].slab->n_used++;
        return 0;
}

void cache_split_end(struct cache *c, uint32_t partition)
{
        struct slabs *p = &c->items[partition];
        struct count count = { .set = p };

        free(p->spare);
        p->spare = NULL;
        for (size_t i = 0; i < p->n_slots; i++)
                if (is_splitting(p->slots[i].slab))
                        p->slots[i].slab->n_used = SPLITTING;
        if (p->bfc)
                bfc_walk(p->bfc, count_chunk, &count);
        for (size_t i = 0; i < p->n_slots; i++) {
                struct slab *s = p->slots[i].slab;

                if (!is_splitting(s))
                        continue;
                s->n_used -= SPLITTING;
                if (s->n_used == 0)
                        slabs_set_idle(p, s);
        }
}
