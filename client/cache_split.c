/* Splitting slabs; see cache_split.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A slab that is being split has so many uses that it cannot become idle, until these are counted again. */
#include "client/cache_split.h"

#include <errno.h>
#include <stdlib.h>

#include "bfc/bfc.h"
#include "client/slabs.h"

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
