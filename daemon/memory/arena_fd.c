/* The layout of share mode fd: large regions, in which extents of fixed sizes come and go. The first
 * region is for the limit that the arena was made with; another one is added where none has space. They are side by
 * side from 0 on. Above them are the regions of exact blocks.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/arena_internal.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/number.h"

static uint64_t arena_zones_bytes(const struct arena *a)
{
        return extent_zones_bytes(&a->o.sizes);
}

/* What zones and extents leave of the limit is the first extent of the first region, so
 * that every byte of the limit can be backed. There is one such extent. */
static uint64_t first_extent_bytes(const struct arena *a)
{
        uint64_t zones_bytes = arena_zones_bytes(a);

        if (a->o.limit_bytes < zones_bytes)
                return a->o.limit_bytes % a->o.sizes.small_extent_bytes;
        return (a->o.limit_bytes - zones_bytes) % a->o.sizes.extent_bytes;
}

/* ---- regions --------------------------------------------------------------- */

/* Only the first region has zones: others are added for large blocks. */
static bool region_has_zones(const struct ledger_region *facts)
{
        return facts->base == 0;
}

/* Adds the region's space to the allocator, and the region. */
static int region_open(struct arena *a, const struct ledger_region *facts, uint32_t record)
{
        const struct extent_sizes *sizes = &a->o.sizes;
        struct bfc_zones zones = { facts->first_extent_bytes, sizes->extent_bytes, 0 };
        struct arena_region *region;
        size_t last;
        int r;

        if (region_has_zones(facts) && sizes->extents_per_zone > 0) {
                zones.small_extent_bytes = sizes->small_extent_bytes;
                zones.extents_per_zone = sizes->extents_per_zone;
        }
        r = arena_reserve_region(a);
        if (r == 0)
                r = bfc_add_zoned_region(a->bfc, facts->base, facts->n_bytes, &zones, false);
        if (r < 0)
                return r;
        (void)bfc_extent_at(a->bfc, facts->base + facts->n_bytes - BFC_GRANULE, &last);
        region = &a->regions.items[a->regions.n_large]; /* its number is its index: large regions stay */
        memmove(region + 1, region, (a->regions.n++ - a->regions.n_large++) * sizeof(*region));
        *region = (struct arena_region){
                .base = facts->base,
                .n_bytes = facts->n_bytes,
                .first_slot = a->slots.n,
                .n_slots = last + 1,
                .record = record,
        };
        a->slots.n += region->n_slots;
        return 0;
}

uint64_t arena_large_end(const struct arena *a)
{
        const struct arena_region *last =
                a->regions.n_large > 0 ? &a->regions.items[a->regions.n_large - 1] : NULL;

        return last ? last->base + last->n_bytes : 0;
}

/* The space for another large region. The first one leaves some to exact blocks: the limit, or half of what is left. */
static uint64_t large_region_room(const struct arena *a)
{
        uint64_t end =
                a->regions.n > a->regions.n_large ? a->regions.items[a->regions.n_large].base : BFC_MAX_SPACE;
        uint64_t room = end - arena_large_end(a), need;

        if (a->regions.n_large > 0 || a->o.partition->preallocate)
                return room;
        need = round_up_u64(a->o.limit_bytes, a->o.sizes.extent_bytes);
        return room - min_u64(a->o.limit_bytes, excess_u64(room, need) / 2);
}

/* Twice the limit of address space (less where so much is not left), in whole extents. -ENOMEM: there is no address
 * space, or parked blocks have parts of as many regions as an arena may have. */
static int region_add(struct arena *a)
{
        uint64_t e = a->o.sizes.extent_bytes, room = large_region_room(a), fixed = 0;
        struct ledger_region facts = { .quota = a->o.quota,
                                       .number = (uint32_t)a->regions.n_large,
                                       .base = arena_large_end(a) };
        uint32_t record;
        int r;

        if (a->regions.n_large == 0) {
                facts.first_extent_bytes = first_extent_bytes(a);
                fixed = arena_zones_bytes(a) + facts.first_extent_bytes;
        }
        if (a->regions.n_large >= LEDGER_QUOTA_REGIONS || round_up_u64(a->o.limit_bytes, e) > room ||
            fixed > room)
                return -ENOMEM;
        facts.n_bytes = fixed + round_up_u64(excess_u64(2 * a->o.limit_bytes, fixed), e);
        if (facts.n_bytes > room)
                facts.n_bytes = fixed + (room - fixed) / e * e;
        if (ledger_region_add(a->o.partition->ledger, &facts, &record) < 0)
                return -ENOMEM;
        r = region_open(a, &facts, record);
        if (r < 0)
                ledger_region_clear(a->o.partition->ledger, record);
        return r;
}

static int fd_add_space(struct arena *a, uint64_t n_bytes, uint64_t room_bytes)
{
        (void)n_bytes;
        (void)room_bytes;
        return region_add(a);
}

/* The first one is added when it is needed: most tenants of a large config use few of their quotas. */
int arena_need_large_region(struct arena *a)
{
        return a->regions.n_large > 0 ? 0 : region_add(a);
}

/* ---- what is backed in advance --------------------------------------------- */

static int fd_add_first_space(struct arena *a, uint64_t n_bytes, size_t *ret_first, size_t *ret_end)
{
        int r = arena_need_large_region(a);

        if (r == 0) {
                *ret_first = 0;
                *ret_end = arena_slot_at(a, n_bytes - 1) + 1;
        }
        return r;
}

static uint64_t fd_unbacked_bytes(struct arena *a, uint64_t n_bytes)
{
        uint64_t n_missing = 0;
        size_t first = 0, end = 0;

        if (fd_add_first_space(a, n_bytes, &first, &end) < 0)
                return n_bytes;
        for (size_t slot = first; slot < end; slot++)
                n_missing += arena_slot_is_backed(a, slot) ? 0 : arena_slot_bytes(a, slot);
        return n_missing;
}

/* ---- how much can grow ----------------------------------------------------- */

/* How many extents of a zone are not there; slot: the first of the zone. */
static uint64_t zone_n_unbacked(const struct arena *a, size_t slot)
{
        uint64_t n = 0;

        for (size_t i = slot; i < slot + a->o.sizes.extents_per_zone; i++)
                n += !arena_slot_is_backed(a, i);
        return n;
}

/* Without the first extent, which may have any size. Each other size divides the next, so the largest
 * come first. */
static uint64_t fd_fit(const struct arena *a, uint64_t room_bytes, size_t n_first)
{
        const struct extent_sizes *sizes = &a->o.sizes;
        uint64_t rest = room_bytes % sizes->extent_bytes, size = sizes->extent_bytes;
        size_t n_zones = 0;

        for (uint64_t small = sizes->small_extent_bytes; small < size; small *= 2)
                n_zones++;
        while (n_zones-- > 0) {
                size /= 2;
                rest -= size *
                        min_u64(rest / size, zone_n_unbacked(a, n_first + n_zones * sizes->extents_per_zone));
        }
        return room_bytes - rest;
}

/* Of the region that is there, or will be. */
static uint64_t first_extent_of(const struct arena *a)
{
        return a->regions.n_large > 0 ? ledger_region_get(a->o.partition->ledger, a->regions.items[0].record)
                                                ->first_extent_bytes
                                      : first_extent_bytes(a);
}

void arena_count_next(const struct arena *a, uint64_t smallest_bytes, uint64_t room_bytes, size_t n_sizes,
                      uint64_t *ret)
{
        size_t slot = first_extent_of(a) > 0;
        uint64_t size = smallest_bytes;

        for (size_t i = 0; i < n_sizes && size <= a->o.sizes.extent_bytes; i++, size *= 2) {
                uint64_t n = room_bytes / size;

                if (size < a->o.sizes.small_extent_bytes)
                        continue;
                if (size < a->o.sizes.extent_bytes) {
                        n = min_u64(n, zone_n_unbacked(a, slot));
                        slot += a->o.sizes.extents_per_zone;
                }
                ret[i] += n;
                room_bytes -= n * size;
        }
}

static uint64_t fd_growable(const struct arena *a, uint64_t room_bytes)
{
        uint64_t first = first_extent_of(a);

        if (first == 0 || first > room_bytes || arena_slot_is_backed(a, 0))
                return fd_fit(a, room_bytes, first > 0);
        return max_u64(fd_fit(a, room_bytes, 1), first + fd_fit(a, room_bytes - first, 1));
}

/* ---- what is inherited ------------------------------------------------------- */

static int compare_regions(const void *x, const void *y, void *userdata)
{
        const struct ledger_region *p = ledger_region_get(userdata, *(const uint32_t *)x);
        const struct ledger_region *q = ledger_region_get(userdata, *(const uint32_t *)y);

        return p->base < q->base ? -1 : p->base > q->base;
}

/* The next region, as region_add() made it: they are side by side from 0 on. */
static int restore_region(struct arena *a, uint32_t record, const char **ret_why)
{
        const struct ledger_region *g = ledger_region_get(a->o.partition->ledger, record);
        uint64_t fixed = g->first_extent_bytes + (region_has_zones(g) ? arena_zones_bytes(a) : 0);
        int r;

        *ret_why = "a region is not at its recorded address";
        if (g->base != arena_large_end(a) || g->number != a->regions.n_large)
                return -EBADMSG;
        *ret_why = "a region does not belong to the arena's extents";
        if (g->first_extent_bytes > a->o.sizes.extent_bytes || fixed > g->n_bytes ||
            (g->n_bytes - fixed) % a->o.sizes.extent_bytes != 0)
                return -EBADMSG;
        r = region_open(a, g, record);
        return r == -EINVAL ? -EBADMSG : r;
}

static int fd_restore_regions(struct arena *a, const struct arena_inherited *inherited, const char **ret_why)
{
        uint32_t end = ledger_region_end(a->o.partition->ledger), n = 0;
        uint32_t *records = calloc((size_t)end + 1, sizeof(*records));
        int r = 0;

        if (!records)
                return -ENOMEM;
        for (uint32_t i = 0; i < end; i++) {
                const struct ledger_region *g = ledger_region_get(a->o.partition->ledger, i);

                if (g && g->quota == a->o.quota)
                        records[n++] = i;
        }
        qsort_r(records, n, sizeof(*records), compare_regions, a->o.partition->ledger);
        for (uint32_t i = 0; r == 0 && i < n; i++)
                r = restore_region(a, records[i], ret_why);
        free(records);
        return r < 0 ? r : arena_restore_exact(a, inherited, ret_why);
}

static uint64_t fd_max_in_extent(const struct arena *a)
{
        if (a->o.partition->preallocate)
                return a->o.sizes.extent_bytes;
        return a->o.partition->device->charges_process
                       ? max_u64(EXTENT_EXACT_HOST_BYTES, a->o.sizes.extent_bytes)
                       : BFC_MAX_SPACE;
}

static void fd_drop_slot(struct arena *a, size_t slot)
{
        if (arena_is_single(arena_region_at(a, arena_slot_range(a, slot).begin)))
                arena_drop_single(a, slot);
        else
                arena_unmake_slot(a, slot);
}

const struct arena_layout arena_layout_fd = {
        .limit_max_bytes = BFC_MAX_SPACE,
        .max_extents = EXTENT_MAX_COUNT,
        .has_fds = true,
        .alloc_in_extent = bfc_alloc_in_extent,
        .plan_in_extent = bfc_plan_growth_in_extent,
        .max_in_extent = fd_max_in_extent,
        .add_space = fd_add_space,
        .add_first_space = fd_add_first_space,
        .unbacked_bytes = fd_unbacked_bytes,
        .growable = fd_growable,
        .drop_slot = fd_drop_slot,
        .restore_regions = fd_restore_regions,
};

/* ---- regions of one extent ----------------------------------------------- */

/* With share mode cuda-ipc all regions are one extent, since the driver chooses where a client sees it. With fd
 * a large block that must be in one extent has such a region: the block is the whole extent, which is made for it and
 * released when it is freed. Such a region comes and goes with its extent, and has its id: see arena_locate(). That of a parked
 * block stays without an extent, and keeps the id.
 *
 * With fd these regions are at the top of the arena's space, and those with many extents at the bottom. */

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
