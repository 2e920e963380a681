/* See bfc_arena.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/bfc_arena.h"

#include <errno.h>

static int add_region(struct arena_sim *a, uint64_t at_least)
{
        uint64_t n_bytes = a->region_bytes > at_least ? a->region_bytes : at_least;
        struct bfc_zones zones = { 0, a->extent_bytes, 0 };
        int r;

        n_bytes = (n_bytes + a->extent_bytes - 1) / a->extent_bytes * a->extent_bytes;
        if (a->next_base == 0 && a->zones.small_extent_bytes > 0)
                zones = a->zones;
        r = bfc_add_zoned_region(a->b, a->next_base, n_bytes, &zones, false);
        if (r == 0)
                a->next_base += n_bytes;
        return r;
}

int arena_sim_init(struct arena_sim *a, uint64_t extent_bytes, uint64_t limit_bytes, double space_factor)
{
        return arena_sim_init_zoned(a, extent_bytes, &(struct bfc_zones){ 0 }, limit_bytes, space_factor);
}

int arena_sim_init_zoned(struct arena_sim *a, uint64_t extent_bytes, const struct bfc_zones *zones,
                         uint64_t limit_bytes, double space_factor)
{
        int r;

        *a = (struct arena_sim){
                .extent_bytes = extent_bytes,
                .zones = *zones,
                .limit_bytes = limit_bytes / extent_bytes * extent_bytes,
                .region_bytes = (uint64_t)((double)limit_bytes * space_factor),
        };
        r = bfc_new(extent_bytes, &a->b);
        if (r == 0)
                r = add_region(a, extent_bytes);
        return r;
}

void arena_sim_done(struct arena_sim *a)
{
        a->b = bfc_destroy(a->b);
}

static uint64_t reserved(const struct arena_sim *a)
{
        struct bfc_stats s;

        bfc_read_stats(a->b, &s);
        return s.bytes_reserved;
}

static uint64_t peak_reserved(const struct arena_sim *a)
{
        struct bfc_stats s;

        bfc_read_stats(a->b, &s);
        return s.peak_bytes_reserved;
}

/* Gives back at least n_bytes outside the plan. 0, or BFC_OVER_BUDGET: there are not as many. */
static int release(struct arena_sim *a, uint64_t n_bytes, const struct bfc_growth *keep)
{
        struct bfc_range ranges[16];
        uint64_t sum, n_given = 0;

        while (n_given < n_bytes) {
                size_t n = bfc_plan_release(a->b, n_bytes - n_given, keep, ranges, 16, &sum);

                if (n == 0)
                        return BFC_OVER_BUDGET;
                n_given += sum;
                for (size_t i = 0; i < n; i++)
                        if (bfc_release_begin(a->b, ranges[i]) != 0)
                                return -EBADMSG;
                for (size_t i = 0; i < n; i++)
                        if (bfc_release_commit(a->b, ranges[i]) != 0)
                                return -EBADMSG;
                a->n_releases += n;
        }
        return 0;
}

static int grow(struct arena_sim *a, const struct bfc_growth *plan, bfc_handle *ret_handle,
                uint64_t *ret_offset)
{
        bfc_handle h;

        if (bfc_grow_begin(a->b, plan, &h) != 0 || bfc_grow_commit(a->b, h) != 0)
                return -EBADMSG;
        if (reserved(a) > a->limit_bytes)
                return -EDQUOT;
        a->n_backings++;
        *ret_handle = h;
        *ret_offset = plan->offset;
        return 0;
}

int arena_sim_alloc(struct arena_sim *a, uint64_t n_bytes, bfc_handle *ret_handle, uint64_t *ret_offset)
{
        struct bfc_growth plan;
        uint64_t room;
        int r = bfc_alloc(a->b, n_bytes, ret_handle, ret_offset);

        if (r != BFC_NO_FIT)
                return r;
        room = a->limit_bytes - reserved(a);
        r = bfc_plan_growth(a->b, n_bytes, room, &plan);
        if (r == BFC_NO_FIT) {
                if (n_bytes > a->limit_bytes)
                        return BFC_OVER_BUDGET;
                a->n_regions++;
                r = add_region(a, n_bytes);
                if (r == 0)
                        r = bfc_plan_growth(a->b, n_bytes, room, &plan);
        }
        if (r == BFC_OVER_BUDGET) {
                r = release(a, plan.new_bytes - room, &plan);
                /* The place is as good as before: nothing of it was given back. */
                if (r == 0 && bfc_plan_growth(a->b, n_bytes, a->limit_bytes - reserved(a), &plan) != 0)
                        return -EBADMSG;
        }
        if (r == 0 && a->thrifty && reserved(a) + plan.new_bytes > peak_reserved(a)) {
                r = release(a, reserved(a) + plan.new_bytes - peak_reserved(a), &plan);
                r = r == BFC_OVER_BUDGET ? 0 : r; /* as much as there is */
                /* What was given back may make another place the better one. */
                if (r == 0 && bfc_plan_growth(a->b, n_bytes, a->limit_bytes - reserved(a), &plan) != 0)
                        return -EBADMSG;
        }
        return r == 0 ? grow(a, &plan, ret_handle, ret_offset) : r;
}

struct free_sum {
        uint64_t extent_bytes;
        uint64_t sum;
};

/* Regions of an arena begin at multiples of the extent's size. */
static int sum_free(void *userdata, char kind, struct bfc_range range)
{
        struct free_sum *f = userdata;
        uint64_t begin = (range.begin + f->extent_bytes - 1) / f->extent_bytes,
                 end = range.end / f->extent_bytes;

        if (kind == 'f' && begin < end)
                f->sum += (end - begin) * f->extent_bytes;
        return 0;
}

uint64_t arena_sim_releasable(const struct arena_sim *a)
{
        struct free_sum f = { a->extent_bytes, 0 };

        (void)bfc_walk(a->b, sum_free, &f);
        return f.sum;
}
