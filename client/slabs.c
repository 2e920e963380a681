/* Slabs; see slabs.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "client/slabs.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static void slab_forget(struct slab *s)
{
        struct slab *origin = s->origin;
        bool is_last = --origin->n_parts == 0;

        if (s != origin)
                free(s);
        if (is_last)
                free(origin);
}

void slabs_clear(struct slabs *p)
{
        for (size_t k = 0; k < p->n_slots; k++)
                slab_forget(p->slots[k].slab);
        free(p->spare);
        free(p->slots);
        free(p->regions);
        bfc_destroy(p->bfc);
}

size_t slabs_up_to(const struct slabs *p, uint64_t at)
{
        const struct slot *low = p->slots;

        if (p->n_slots == 0)
                return 0;
        /* Without a branch at each step, which would be mispredicted half of the time. */
        for (size_t n = p->n_slots; n > 1; n -= n / 2)
                low = low[n / 2].at <= at ? low + n / 2 : low;
        return (size_t)(low - p->slots) + (low->at <= at);
}

size_t slabs_at(struct slabs *p, uint64_t at)
{
        size_t i = p->last;

        if (i < p->n_slots && at - p->slots[i].at < p->slots[i].slab->n_bytes)
                return i;
        return p->last = slabs_up_to(p, at) - 1;
}

struct slab_region *slabs_region(const struct slabs *p, uint64_t id)
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

int slabs_make_room(struct slabs *p)
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

void slabs_set_idle(struct slabs *p, struct slab *s)
{
        s->idle_stamp = ++p->n_stamps;
        TAILQ_INSERT_TAIL(&p->idle, s, idle);
}

void slabs_insert(struct slabs *p, size_t i, struct slab *s)
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

int slabs_add(struct slabs *p, const struct cache_grant *grant, struct slab *s)
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

void slabs_remove(struct slabs *p, struct slab *s)
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

const char *slabs_check(const struct slabs *p)
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
