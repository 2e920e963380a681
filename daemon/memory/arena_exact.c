/* Regions of one extent. With share mode cuda-ipc all are, since the driver chooses where a client sees an extent. With fd
 * a large block that must be in one extent has such a region: the block is the whole extent, which is made for it and
 * released when it is freed. Such a region comes and goes with its extent, and has its id: see arena_locate(). That of a parked
 * block stays without an extent, and keeps the id.
 *
 * With fd these regions are at the top of the arena's space, and those with many extents at the bottom.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/arena_internal.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

#include "daemon/base/number.h"

/* ---- regions --------------------------------------------------------------- */

static const struct arena_region *large_region_of(const struct arena *a, size_t slot)
{
        for (size_t i = 0; i < a->regions.n_large; i++)
                if (slot - a->regions.items[i].first_slot < a->regions.items[i].n_slots)
                        return &a->regions.items[i];
        return NULL;
}

/* The lowest slot that no region has. */
static size_t find_slot(const struct arena *a)
{
        const struct arena_region *large;
        size_t slot = 0;

        while (slot < a->slots.n) {
                if (arena_slot_is_made(a, slot))
                        slot++;
                else if ((large = large_region_of(a, slot)))
                        slot = large->first_slot + large->n_slots;
                else
                        break;
        }
        return slot;
}

/* Smaller than an extent that the limit may have in its place; see extent_max_exact(). */
static bool is_small(const struct arena *a, uint64_t n_bytes)
{
        return a->layout->has_fds && n_bytes < a->o.sizes.extent_bytes;
}

int arena_open_single(struct arena *a, size_t index, uint64_t base, uint64_t n_bytes, bool is_backed,
                      size_t *ret_slot)
{
        struct arena_region *at;
        size_t slot = find_slot(a);
        int r = arena_reserve_region(a);

        if (r == 0)
                r = bfc_add_region(a->bfc, base, n_bytes, n_bytes, is_backed);
        if (r < 0)
                return r;
        r = arena_make_slot(a, slot, (struct bfc_range){ base, base + n_bytes });
        if (r < 0) {
                (void)bfc_remove_region(a->bfc, base);
                return r;
        }
        a->slots.n += slot == a->slots.n;
        at = a->regions.items + index;
        memmove(at + 1, at, (a->regions.n++ - index) * sizeof(*at));
        *at = (struct arena_region){
                .base = base, .n_bytes = n_bytes, .first_slot = slot, .n_slots = 1, .record = LEDGER_NONE
        };
        a->regions.n_small += is_small(a, n_bytes);
        *ret_slot = slot;
        return 0;
}

/* It stays made, so that no other region gets it. */
static void empty_slot(struct arena *a, size_t slot)
{
        struct arena_slot *s = arena_slot_of(a, slot);
        struct bfc_range range = s->range;

        assert(!s->waking);
        *s = arena_unused_slot;
        s->range = range;
}

void arena_drop_single(struct arena *a, size_t slot)
{
        uint64_t base = arena_slot_range(a, slot).begin;
        struct arena_region *at = arena_region_to_change(a, base);
        int r = at->is_parked ? 0 : bfc_remove_region(a->bfc, base);

        assert(r == 0 && !arena_slot_is_backed(a, slot));
        (void)r;
        if (at->is_parked) {
                empty_slot(a, slot);
                return;
        }
        a->regions.n_small -= is_small(a, at->n_bytes);
        memmove(at, at + 1, (size_t)(a->regions.items + --a->regions.n - at) * sizeof(*at));
        arena_unmake_slot(a, slot);
}

bool arena_single_is_free(const struct arena *a, const struct arena_region *r)
{
        const struct arena_slot *s = arena_slot_of(a, r->first_slot);

        return s->extent != LEDGER_NONE && !s->retired && s->memory.n_bytes > 0 &&
               s->occupancy.used_bytes == 0;
}

/* ---- exact blocks ------------------------------------------------------------ */

static uint64_t exact_bytes(const struct arena *a, uint64_t n_bytes)
{
        return round_up_u64(n_bytes, max_u64(EXTENT_MIN_BYTES, device_granularity(a->o.partition->device)));
}

/* There is a record for it: an extent that is not small takes that of one that the limit has no room for then. */
static bool has_record(const struct arena *a, uint64_t n_bytes)
{
        return !is_small(a, n_bytes) ||
               a->regions.n_small < extent_max_exact(a->o.partition->share, a->o.limit_bytes, &a->o.sizes);
}

/* The highest gap above the large regions that is large enough; its index in the regions. */
static int find_gap(const struct arena *a, uint64_t n_bytes, size_t *ret_index, uint64_t *ret_base)
{
        uint64_t end = BFC_MAX_SPACE / EXTENT_MIN_BYTES * EXTENT_MIN_BYTES, low = end;
        size_t i;

        for (i = a->regions.n; i > 0; i--) {
                const struct arena_region *below = &a->regions.items[i - 1];

                low = below->base + below->n_bytes;
                if (end >= low && end - low >= n_bytes)
                        break;
                if (i == a->regions.n_large)
                        return -ENOMEM;
                end = below->base;
        }
        if (i == 0)
                return -ENOMEM;
        *ret_index = i;
        *ret_base = end - n_bytes;
        return 0;
}

/* There is space for it. Before the first large region this is not known; what is too large for these has no other. */
static bool has_space(const struct arena *a, uint64_t n_bytes)
{
        uint64_t base;
        size_t index;

        return a->regions.n_large == 0 || n_bytes > a->o.sizes.extent_bytes ||
               find_gap(a, n_bytes, &index, &base) == 0;
}

bool arena_is_exact(const struct arena *a, uint64_t n_bytes)
{
        uint64_t size;

        if (!a->layout->has_fds || a->o.partition->preallocate || n_bytes > arena_max_in_extent(a))
                return false;
        size = exact_bytes(a, n_bytes);
        return (n_bytes >= EXTENT_EXACT_BYTES || n_bytes > a->o.sizes.extent_bytes) && has_record(a, size) &&
               has_space(a, size);
}

int arena_alloc_exact(struct arena *a, uint64_t n_bytes, bfc_handle *ret_handle, uint64_t *ret_offset)
{
        for (size_t i = a->regions.n_large; i < a->regions.n; i++) {
                const struct arena_region *r = &a->regions.items[i];

                if (r->n_bytes != n_bytes || !arena_single_is_free(a, r))
                        continue;
                *ret_offset = r->base;
                return bfc_alloc_range(a->bfc, (struct bfc_range){ r->base, r->base + n_bytes }, ret_handle);
        }
        return BFC_NO_FIT;
}

int arena_plan_exact(struct arena *a, uint64_t n_bytes, struct bfc_growth *ret)
{
        uint64_t base;
        size_t index;
        int r;

        n_bytes = exact_bytes(a, n_bytes);
        r = find_gap(a, n_bytes, &index, &base);
        if (r < 0)
                return r;
        *ret = (struct bfc_growth){ .n_bytes = n_bytes,
                                    .n_requested = n_bytes,
                                    .new_bytes = n_bytes,
                                    .in_extent = true,
                                    .is_whole = true };
        return 0;
}

int arena_begin_exact(struct arena *a, uint64_t n_bytes, size_t *ret_slot, bfc_handle *ret_handle)
{
        uint64_t base;
        size_t index;
        int r = find_gap(a, n_bytes, &index, &base);

        if (r == 0)
                r = arena_open_single(a, index, base, n_bytes, true, ret_slot);
        if (r < 0)
                return r;
        r = bfc_alloc_range(a->bfc, (struct bfc_range){ base, base + n_bytes }, ret_handle);
        if (r < 0)
                arena_drop_single(a, *ret_slot);
        return r;
}

/* ---- parked blocks -------------------------------------------------------------- */

void arena_keep_exact(struct arena *a, struct arena_region *r)
{
        r->id = arena_region_id(a, r);
        r->is_parked = true;
}

void arena_unkeep_exact(struct arena *a, uint64_t offset)
{
        arena_region_to_change(a, offset)->is_parked = false;
}

int arena_restore_parked_exact(struct arena *a, const struct ledger_block *b)
{
        uint64_t end = arena_large_end(a);
        struct arena_region *r;
        size_t index, slot;
        int result;

        for (index = a->regions.n_large; index < a->regions.n; index++)
                if (a->regions.items[index].base >= b->offset)
                        break;
        if (end == 0 || b->offset < end || b->n_bytes % exact_bytes(a, 1) != 0 ||
            !(b->region_id & ARENA_REGION_OF_EXTENT))
                return -EBADMSG;
        if (index == a->regions.n || a->regions.items[index].base != b->offset) {
                result = arena_open_single(a, index, b->offset, b->n_bytes, false, &slot);
                if (result < 0)
                        return result == -EINVAL ? -EBADMSG : result;
        }
        r = &a->regions.items[index];
        if (r->n_bytes != b->n_bytes)
                return -EBADMSG;
        r->id = b->region_id;
        r->is_parked = true;
        return 0;
}

/* ---- what is inherited ------------------------------------------------------------ */

int arena_restore_exact(struct arena *a, const struct arena_inherited *inherited, const char **ret_why)
{
        uint64_t end = arena_large_end(a), unit = exact_bytes(a, 1);
        int r = 0;

        for (size_t i = 0; r == 0 && i < inherited->n_extents; i++) {
                const struct ledger_extent *e =
                        ledger_extent_at(a->o.partition->ledger, inherited->extents[i]);
                size_t slot;

                if (e->offset < end)
                        continue;
                *ret_why = "an extent is outside all regions";
                r = end > 0 && e->n_bytes > 0 && e->n_bytes % unit == 0
                            ? arena_open_single(a, a->regions.n, e->offset, e->n_bytes, false, &slot)
                            : -EBADMSG;
                if (r == 0)
                        a->regions.items[a->regions.n - 1].id = e->region_id;
        }
        a->regions.has_freed = a->regions.n > a->regions.n_large;
        return r == -EINVAL ? -EBADMSG : r;
}
