/* The arena: slots, regions, blocks and limits, by share mode; parked blocks; an arena of inherited records. See arena.h.
 *
 * Growth and release are operations: a worker job with its slots. While one is under way, the
 * memory that it makes or destroys belongs to the operation, and the allocator keeps others
 * off those offsets (pending, retiring). Only the loop touches slots, ledger and allocator.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/arena_internal.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/number.h"
#include "daemon/ledger/store.h"

const struct arena_slot arena_unused_slot = { .extent = LEDGER_NONE, .memory = DEVICE_EXTENT_EMPTY };

#define UNUSED_SLOT ((struct arena_slot *)(uintptr_t)&arena_unused_slot) /* only read */

/* ---- slots and regions --------------------------------------------------- */

const struct arena_region *arena_region_at(const struct arena *a, uint64_t offset)
{
        const struct arena_region *regions = a->regions.items;
        size_t low = 0, high = a->regions.n;

        while (low < high) {
                size_t middle = low + (high - low) / 2;

                if (regions[middle].base <= offset)
                        low = middle + 1;
                else
                        high = middle;
        }
        assert(low > 0 && offset - regions[low - 1].base < regions[low - 1].n_bytes);
        return &regions[low - 1];
}

static uint64_t arena_regions_end(const struct arena *a)
{
        const struct arena_region *last = a->regions.n > 0 ? &a->regions.items[a->regions.n - 1] : NULL;

        return last ? last->base + last->n_bytes : 0;
}

size_t arena_slot_at(const struct arena *a, uint64_t offset)
{
        const struct arena_region *r = arena_region_at(a, offset);
        size_t number = 0;

        if (r->n_slots > 1)
                (void)bfc_extent_at(a->bfc, offset, &number);
        return r->first_slot + number;
}

struct bfc_range arena_slot_range(const struct arena *a, size_t slot)
{
        const struct arena_region *r = a->regions.items;

        if (arena_slot_is_made(a, slot))
                return arena_slot_of(a, slot)->range;
        while (slot - r->first_slot >= r->n_slots)
                r++;
        return bfc_extent_numbered(a->bfc, r->base, slot - r->first_slot);
}

uint64_t arena_slot_bytes(const struct arena *a, size_t slot)
{
        struct bfc_range range = arena_slot_range(a, slot);

        return range.end - range.begin;
}

/* See struct arena_place. Ids of extents are never used again, in any arena, also not after a restart. */
static uint64_t arena_region_id(const struct arena *a, const struct arena_region *r)
{
        if (r->id != 0)
                return r->id;
        if (arena_is_single(r))
                return ARENA_REGION_OF_EXTENT |
                       ledger_extent_at(a->o.partition->ledger, arena_slot_of(a, r->first_slot)->extent)->id;
        return ((uint64_t)a->o.quota + 1) << 32 | (uint64_t)(r - a->regions.items);
}

/* Reserves memory for one more region. */
static int arena_reserve_region(struct arena *a)
{
        size_t n = a->regions.n + 1;
        struct arena_region *regions;

        if (n <= a->regions.n_room)
                return 0;
        n += n / 2;
        regions = reallocarray(a->regions.items, n, sizeof(*regions));
        if (!regions)
                return -ENOMEM;
        a->regions.items = regions;
        a->regions.n_room = n;
        return 0;
}

/* The table ends behind the highest slot that was ever made, or a little later: most arenas use few of the
 * slots that they could have. */
static int arena_reserve_slot(struct arena *a, size_t slot)
{
        struct arena_slot **table;
        size_t n = slot + 1 + slot / 2;

        if (slot < a->slots.n_room)
                return 0;
        table = reallocarray(a->slots.table, n, sizeof(*table));
        if (!table)
                return -ENOMEM;
        a->slots.table = table;
        while (a->slots.n_room < n)
                table[a->slots.n_room++] = UNUSED_SLOT;
        return 0;
}

static int arena_reserve_scratch(struct arena *a, size_t n)
{
        struct arena_scratch *s = &a->scratch;
        struct bfc_range *ranges;
        uint32_t *retired;

        if (n <= s->n_room)
                return 0;
        n += n / 2;
        ranges = reallocarray(s->ranges, n, sizeof(*ranges));
        if (!ranges)
                return -ENOMEM;
        s->ranges = ranges;
        retired = reallocarray(s->retired, n, sizeof(*retired));
        if (!retired)
                return -ENOMEM;
        s->retired = retired;
        s->n_room = n;
        return 0;
}

int arena_make_slot(struct arena *a, size_t slot, struct bfc_range range)
{
        struct arena_slot *s;

        if (arena_slot_is_made(a, slot))
                return 0;
        if (arena_reserve_scratch(a, a->slots.n_made + 1) < 0 || arena_reserve_slot(a, slot) < 0)
                return -ENOMEM;
        s = malloc(sizeof(*s));
        if (!s)
                return -ENOMEM;
        *s = arena_unused_slot;
        s->range = range;
        a->slots.table[slot] = s;
        a->slots.n_made++;
        return 0;
}

int arena_make_slots(struct arena *a, size_t first, size_t last)
{
        int r = 0;

        for (size_t slot = first; r == 0 && slot <= last; slot++)
                r = arena_make_slot(a, slot, arena_slot_range(a, slot));
        return r;
}

static void arena_unmake_slot(struct arena *a, size_t slot)
{
        if (!arena_slot_is_made(a, slot))
                return;
        free(a->slots.table[slot]->waking); /* not committed: the process ends */
        free(a->slots.table[slot]);
        a->slots.table[slot] = UNUSED_SLOT;
        a->slots.n_made--;
}

void arena_forget_plan(struct arena *a)
{
        if (a->regions.planned != ARENA_NO_SLOT)
                a->layout->drop_slot(a, a->regions.planned);
        a->regions.planned = ARENA_NO_SLOT;
}

/* ---- share mode fd: large regions ---------------------------------------- */

/* Large regions, in which extents of fixed sizes come and go. The first region is for the limit that the arena was made
 * with; another one is added where none has space. They are side by side from 0 on. Above them are the regions of exact
 * blocks. */

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

/* The first large region is there, or it is added. -ENOMEM. */
static uint64_t arena_large_end(const struct arena *a)
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
static int arena_need_large_region(struct arena *a)
{
        return a->regions.n_large > 0 ? 0 : region_add(a);
}

/* ---- regions of one extent ----------------------------------------------- */

/* With share mode cuda-ipc all regions are one extent, since the driver chooses where a client sees it. With fd
 * a large block that must be in one extent has such a region: the block is the whole extent, which is made for it and
 * released when it is freed. Such a region comes and goes with its extent, and has its id: see arena_locate(). That of a parked
 * block stays without an extent, and keeps the id.
 *
 * With fd these regions are at the top of the arena's space, and those with many extents at the bottom. */

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

/* Adds a region of one extent at this place, before the region with this index; its slot is made. -EINVAL: it overlaps
 * another; -ENOMEM. */
static int arena_open_single(struct arena *a, size_t index, uint64_t base, uint64_t n_bytes, bool is_backed,
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

static int arena_alloc_exact(struct arena *a, uint64_t n_bytes, bfc_handle *ret_handle, uint64_t *ret_offset)
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

/* A plan without a place. */
static int arena_plan_exact(struct arena *a, uint64_t n_bytes, struct bfc_growth *ret)
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

/* ---- exact blocks that are parked or inherited -------------------------------------------------------------- */

void arena_keep_exact(struct arena *a, struct arena_region *r)
{
        r->id = arena_region_id(a, r);
        r->is_parked = true;
}

void arena_unkeep_exact(struct arena *a, uint64_t offset)
{
        arena_region_to_change(a, offset)->is_parked = false;
}

/* The region of an inherited parked block; those of its extents are there. -EBADMSG. */
static int arena_restore_parked_exact(struct arena *a, const struct ledger_block *b)
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

/* The regions of inherited extents that are above the large regions. */
static int arena_restore_exact(struct arena *a, const struct arena_inherited *inherited, const char **ret_why)
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

/* ---- share mode fd: what is backed in advance --------------------------------------------- */

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

/* ---- share mode fd: how much can grow ----------------------------------------------------- */

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

/* ---- share mode fd: what is inherited, and the layout ------------------------------------------------------- */

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

static const struct arena_layout arena_layout_fd = {
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

/* ---- share mode cuda-ipc: each region is one extent ----------------------- */

/* The lowest gap between regions that is large enough; its index in the regions. */
static int ipc_find_gap(const struct arena *a, uint64_t n_bytes, size_t *ret_index, uint64_t *ret_base)
{
        const struct arena_region *regions = a->regions.items;
        uint64_t base = 0;
        size_t i;

        for (i = 0; i < a->regions.n && regions[i].base - base < n_bytes; i++)
                base = regions[i].base + regions[i].n_bytes;
        if (n_bytes > BFC_MAX_SPACE - base)
                return -ENOMEM;
        *ret_index = i;
        *ret_base = base;
        return 0;
}

static int ipc_region_add(struct arena *a, uint64_t n_bytes, size_t *ret_slot)
{
        uint64_t base;
        size_t index;
        int r = ipc_find_gap(a, n_bytes, &index, &base);

        return r < 0 ? r : arena_open_single(a, index, base, n_bytes, false, ret_slot);
}

/* How large an extent is made for a block. */
static uint64_t new_extent_bytes(const struct arena *a, uint64_t n_bytes, uint64_t room_bytes)
{
        uint64_t unit = a->o.sizes.extent_bytes, own = round_up_u64(n_bytes, unit);
        uint64_t room = room_bytes - room_bytes % unit;

        if (n_bytes >= EXTENT_OWN_BYTES || room <= own)
                return own;
        return min_u64(room, round_up_u64(EXTENT_SHARED_BYTES, unit));
}

static int ipc_add_space(struct arena *a, uint64_t n_bytes, uint64_t room_bytes)
{
        if (n_bytes > BFC_MAX_SPACE || a->regions.n >= a->n_extents_max)
                return -ENOMEM;
        return ipc_region_add(a, new_extent_bytes(a, n_bytes, room_bytes), &a->regions.planned);
}

static int ipc_add_first_space(struct arena *a, uint64_t n_bytes, size_t *ret_first, size_t *ret_end)
{
        int r = ipc_region_add(a, n_bytes, ret_first);

        if (r == 0)
                *ret_end = *ret_first + 1;
        return r;
}

static uint64_t ipc_unbacked_bytes(struct arena *a, uint64_t n_bytes)
{
        return a->totals.n_extents == 0 && a->totals.pending_bytes == 0 ? n_bytes : 0;
}

static uint64_t ipc_growable(const struct arena *a, uint64_t room_bytes)
{
        return room_bytes - room_bytes % a->o.sizes.extent_bytes;
}

static uint64_t ipc_max_in_extent(const struct arena *a)
{
        (void)a;
        return BFC_MAX_SPACE;
}

/* One for each extent. */
static int ipc_restore_regions(struct arena *a, const struct arena_inherited *inherited, const char **ret_why)
{
        int r = 0;

        for (size_t i = 0; r == 0 && i < inherited->n_extents; i++) {
                const struct ledger_extent *e =
                        ledger_extent_at(a->o.partition->ledger, inherited->extents[i]);
                size_t slot;

                *ret_why = "an extent is not aligned to the arena's extent size";
                r = e->n_bytes % a->o.sizes.extent_bytes == 0
                            ? arena_open_single(a, a->regions.n, e->offset, e->n_bytes, false, &slot)
                            : -EBADMSG;
        }
        return r == -EINVAL ? -EBADMSG : r;
}

static const struct arena_layout arena_layout_ipc = {
        .limit_max_bytes = UINT64_MAX,
        .max_extents = UINT64_MAX,
        .alloc_in_extent = bfc_alloc,
        .plan_in_extent = bfc_plan_growth,
        .max_in_extent = ipc_max_in_extent,
        .add_space = ipc_add_space,
        .add_first_space = ipc_add_first_space,
        .unbacked_bytes = ipc_unbacked_bytes,
        .growable = ipc_growable,
        .drop_slot = arena_drop_single,
        .restore_regions = ipc_restore_regions,
};

static const struct arena_layout *layout_of(enum device_share share)
{
        return share == DEVICE_SHARE_FD ? &arena_layout_fd : &arena_layout_ipc;
}

/* ---- making and ending one --------------------------------------------------- */

static uint64_t arena_max_count(const struct arena *a, uint64_t limit_bytes)
{
        return extent_max_count(a->o.partition->share, limit_bytes, &a->o.sizes);
}

static uint64_t arena_max_records(const struct arena *a, uint64_t limit_bytes)
{
        return extent_max_records(a->o.partition->share, limit_bytes, &a->o.sizes);
}

/* An arena without a region; n_extents: the number of inherited extents. */
static int arena_begin(const struct arena_options *options, size_t n_extents, struct arena **ret)
{
        struct arena *a;
        int r;

        assert(options->sizes.extent_bytes > 0 && options->limit_bytes > 0);
        a = calloc(1, sizeof(*a));
        if (!a)
                return -ENOMEM;
        a->o = *options;
        a->layout = layout_of(options->partition->share);
        if (a->o.sizes.extents_per_zone == 0)
                a->o.sizes.small_extent_bytes = a->o.sizes.extent_bytes;
        TAILQ_INIT(&a->kept);
        a->regions.planned = ARENA_NO_SLOT;
        a->growths.is_waited_for = a->growths.is_parallel = true;
        a->n_extents_max = (size_t)max_u64(arena_max_records(a, a->o.limit_bytes), n_extents);
        r = bfc_new(a->o.sizes.extent_bytes, &a->bfc);
        if (r < 0)
                a = arena_free(a);
        *ret = a;
        return r;
}

int arena_new(const struct arena_options *options, struct arena **ret)
{
        struct arena *a = NULL;
        int r = options->limit_bytes > layout_of(options->partition->share)->limit_max_bytes
                        ? -ENOMEM
                        : arena_begin(options, 0, &a);

        if (r == 0)
                *ret = a;
        return r;
}

/* An arena without a region; n_extents: the number of inherited extents. */
static void arena_free_tables(struct arena *a)
{
        arena_count_parked(a, -a->totals.parked_bytes);
        a->o.partition->device->direct.unreclaimed_bytes -= a->unreclaimed.charge.n_bytes;
        charge_drop(&a->unreclaimed.charge);
        charge_drop(&a->unreclaimed.ended);
        bfc_destroy(a->bfc);
        free(a->scratch.ranges);
        free(a->scratch.retired);
        for (size_t i = 0; i < a->slots.n; i++)
                arena_unmake_slot(a, i);
        free(a->slots.table);
        free(a->regions.items);
        free(a);
}

static void arena_destroy_slot(struct arena *a, size_t slot)
{
        uint32_t extent = arena_slot_of(a, slot)->extent;
        struct device_extent *memory = &arena_slot_of(a, slot)->memory;
        uint64_t key = ledger_extent_at(a->o.partition->ledger, extent)->store_key;

        ledger_extent_leave(a->o.partition->ledger, extent);
        memory->was_lent = false; /* the daemon ends: it keeps nothing back */
        (void)extent_destroy(a->o.partition, memory, key);
}

struct arena *arena_free(struct arena *a)
{
        if (!a)
                return NULL;
        arena_drop_kept(a);
        assert(a->totals.pending_bytes == 0 && !a->unreclaimed.is_asked);
        for (size_t i = 0; i < a->slots.n; i++) {
                if (!arena_slot_is_backed(a, i))
                        continue;
                arena_destroy_slot(a, i);
                arena_empty_slot(a, i, false);
        }
        for (size_t i = 0; i < a->regions.n; i++)
                if (!arena_is_single(&a->regions.items[i]))
                        ledger_region_clear(a->o.partition->ledger, a->regions.items[i].record);
        arena_free_tables(a);
        return NULL;
}

struct arena *arena_leave(struct arena *a)
{
        if (!a)
                return NULL;
        arena_drop_kept(a);
        assert(a->totals.leaving_bytes == 0 && a->totals.pending_bytes == a->totals.retiring_bytes &&
               !a->unreclaimed.is_asked);
        for (size_t i = 0; i < a->slots.n; i++) {
                struct arena_slot *s = arena_slot_of(a, i);

                if (s->extent == LEDGER_NONE)
                        continue;
                free(s->retired); /* the successor asks the sessions again */
                if (s->memory.fd >= 0)
                        close(s->memory.fd);
                occupancy_close(&s->occupancy);
                charge_drop(&s->charge);
        }
        arena_free_tables(a);
        return NULL;
}

/* ---- limits --------------------------------------------------------------- */

int arena_prepare_limit(const struct arena *a, uint64_t limit_bytes)
{
        return limit_bytes > a->o.limit_bytes && arena_max_count(a, limit_bytes) > a->layout->max_extents
                       ? -ENOTSUP
                       : 0;
}

void arena_set_limit(struct arena *a, uint64_t limit_bytes)
{
        a->n_extents_max = (size_t)arena_extent_room(a, limit_bytes);
        a->o.limit_bytes = limit_bytes;
}

uint64_t arena_extent_room(const struct arena *a, uint64_t limit_bytes)
{
        return max_u64(arena_max_records(a, limit_bytes), a->n_extents_max);
}

uint64_t arena_limit_max(const struct arena *a)
{
        return a->layout->max_extents == UINT64_MAX
                       ? UINT64_MAX
                       : max_u64(extent_max_limit(&a->o.sizes), a->o.limit_bytes);
}

uint64_t arena_growable(const struct arena *a, uint64_t room_bytes)
{
        return a->layout->growable(a, room_bytes);
}

/* ---- blocks --------------------------------------------------------------- */

void arena_count_block(struct arena *a, uint64_t offset, uint64_t n_bytes,
                       void (*count)(struct occupancy *o, struct bfc_range range))
{
        size_t last, slot;

        for (slot = arena_slots(a, offset, n_bytes, &last); slot <= last; slot++) {
                struct bfc_range range = arena_slot_range(a, slot), part = { 0, range.end - range.begin };

                if (offset > range.begin)
                        part.begin = offset - range.begin;
                if (offset + n_bytes < range.end)
                        part.end = offset + n_bytes - range.begin;
                count(&arena_slot_of(a, slot)->occupancy, part);
        }
}

int arena_alloc(struct arena *a, uint64_t n_bytes, bfc_handle *ret_handle, uint64_t *ret_offset)
{
        int r = bfc_alloc(a->bfc, n_bytes, ret_handle, ret_offset);

        if (r == 0)
                arena_count_block(a, *ret_offset, bfc_block_bytes(n_bytes), occupancy_add);
        return r;
}

int arena_alloc_in_extent(struct arena *a, uint64_t n_bytes, bfc_handle *ret_handle, uint64_t *ret_offset)
{
        int r = arena_is_exact(a, n_bytes)
                        ? arena_alloc_exact(a, n_bytes, ret_handle, ret_offset)
                        : a->layout->alloc_in_extent(a->bfc, n_bytes, ret_handle, ret_offset);

        if (r == 0)
                arena_count_block(a, *ret_offset, bfc_block_bytes(n_bytes), occupancy_add);
        return r;
}

int arena_dealloc(struct arena *a, bfc_handle handle)
{
        const struct arena_region *region;
        struct bfc_info info;
        int r = bfc_info(a->bfc, handle, &info);

        if (r == 0)
                r = bfc_dealloc(a->bfc, handle);
        if (r < 0)
                return r;
        arena_count_block(a, info.offset, info.n_bytes, occupancy_remove);
        region = arena_region_at(a, info.offset);
        a->regions.has_freed |=
                a->layout->has_fds && arena_is_single(region) && arena_single_is_free(a, region);
        return 0;
}

/* Only the extent in which the block is cut sees a change: a cell counts bytes, but a block that has
 * all of an extent is in no cell. */
int arena_split(struct arena *a, bfc_handle handle, uint64_t at, bfc_handle *ret_high)
{
        struct occupancy *occupancy;
        struct bfc_range range;
        struct bfc_info info;
        uint64_t cut;
        size_t slot;
        int r = bfc_info(a->bfc, handle, &info);

        if (r == 0)
                r = bfc_split(a->bfc, handle, at, ret_high);
        if (r < 0)
                return r;
        cut = info.offset + at;
        slot = arena_slot_at(a, cut);
        range = arena_slot_range(a, slot);
        if (range.begin == cut || info.offset > range.begin || info.offset + info.n_bytes < range.end)
                return 0;
        occupancy = &arena_slot_of(a, slot)->occupancy;
        cut -= range.begin;
        range.end -= range.begin;
        occupancy_remove(occupancy, (struct bfc_range){ 0, range.end });
        occupancy_add(occupancy, (struct bfc_range){ 0, cut });
        occupancy_add(occupancy, (struct bfc_range){ cut, range.end });
        return 0;
}

uint64_t arena_max_in_extent(const struct arena *a)
{
        return a->layout->max_in_extent(a);
}

typedef int (*plan_fn)(const struct bfc *b, uint64_t n_bytes, uint64_t max_new_bytes, struct bfc_growth *ret);

static int plan_by(struct arena *a, plan_fn plan, uint64_t n_bytes, uint64_t room_bytes,
                   struct bfc_growth *ret)
{
        int r;

        arena_forget_plan(a);
        r = plan(a->bfc, n_bytes, UINT64_MAX, ret);
        if (r != BFC_NO_FIT)
                return r;
        r = a->layout->add_space(a, n_bytes, room_bytes);
        if (r < 0)
                return r;
        r = plan(a->bfc, n_bytes, UINT64_MAX, ret);
        return r == BFC_NO_FIT ? -ENOMEM : r;
}

int arena_plan(struct arena *a, uint64_t n_bytes, uint64_t room_bytes, struct bfc_growth *ret)
{
        return plan_by(a, bfc_plan_growth, n_bytes, room_bytes, ret);
}

int arena_plan_in_extent(struct arena *a, uint64_t n_bytes, uint64_t room_bytes, struct bfc_growth *ret)
{
        int r = arena_is_exact(a, n_bytes) ? arena_need_large_region(a) : 0;

        if (r < 0)
                return r;
        if (arena_is_exact(a, n_bytes)) /* also beside the first large region */
                return arena_plan_exact(a, n_bytes, ret);
        return plan_by(a, a->layout->plan_in_extent, n_bytes, room_bytes, ret);
}

int arena_plan_whole(struct arena *a, uint64_t n_bytes, bool in_extent, uint64_t room_bytes,
                     struct bfc_growth *ret)
{
        int r = in_extent ? arena_need_large_region(a) : 0;

        if (r < 0)
                return r;
        if (in_extent)
                return arena_is_exact(a, n_bytes) ? arena_plan_exact(a, n_bytes, ret) : -ENOMEM;
        /* Each extent of a GPU costs calls of the driver, an fd and a mapping in each process. */
        return plan_by(a,
                       a->o.partition->device->charges_process ? bfc_plan_growth_whole : bfc_plan_growth_few,
                       n_bytes, room_bytes, ret);
}

/* ---- places --------------------------------------------------------------- */

void arena_locate(const struct arena *a, uint64_t offset, struct arena_place *ret)
{
        const struct arena_region *r = arena_region_at(a, offset);

        *ret = (struct arena_place){
                .region_id = arena_region_id(a, r),
                .region_bytes = r->n_bytes,
                .offset = offset - r->base,
        };
}

size_t arena_slots(const struct arena *a, uint64_t offset, uint64_t n_bytes, size_t *ret_last)
{
        const struct arena_region *r = arena_region_at(a, offset);
        struct bfc_range first = { r->base, r->base + r->n_bytes };
        size_t number = 0;

        if (r->n_slots > 1)
                first = bfc_extent_at(a->bfc, offset, &number);
        *ret_last = offset + n_bytes <= first.end ? r->first_slot + number
                                                  : arena_slot_at(a, offset + n_bytes - 1);
        return r->first_slot + number;
}

uint32_t arena_slot_extent(const struct arena *a, size_t slot)
{
        assert(!arena_slot_of(a, slot)->retired); /* no session is given it any more */
        return arena_slot_of(a, slot)->extent;
}

const struct device_extent *arena_slot_memory(const struct arena *a, size_t slot)
{
        assert(arena_slot_is_backed(a, slot));
        return &arena_slot_of(a, slot)->memory;
}

size_t arena_n_slots(const struct arena *a)
{
        return min_u64(a->slots.n, a->slots.n_room);
}

/* ---- statistics, the map, the check -------------------------------------- */

uint64_t arena_pending_bytes(const struct arena *a)
{
        return a->totals.pending_bytes - a->totals.late_bytes;
}

bool arena_is_quiet(const struct arena *a)
{
        return a->totals.pending_bytes == 0 && a->totals.n_extents == 0 && !a->unreclaimed.is_asked;
}

uint64_t arena_suspended_bytes(const struct arena *a)
{
        return a->totals.suspended_bytes;
}

uint64_t arena_retiring_bytes(const struct arena *a)
{
        return a->totals.retiring_bytes - a->totals.late_bytes;
}

uint32_t arena_n_extents(const struct arena *a)
{
        return a->totals.n_extents;
}

uint64_t arena_huge_bytes(const struct arena *a)
{
        return a->totals.huge_bytes;
}

uint64_t arena_small_bytes(const struct arena *a)
{
        return a->totals.small_bytes;
}

bool arena_is_lost(const struct arena *a)
{
        return a->is_lost;
}

/* The allocator takes parked blocks for others. */
void arena_read_stats(const struct arena *a, struct bfc_stats *ret)
{
        bfc_read_stats(a->bfc, ret);
        ret->bytes_in_use -= a->totals.parked_bytes;
        ret->bytes_requested -= a->totals.parked_bytes;
        ret->bytes_reserved -= a->totals.away_bytes;
}

static bool arena_slot_leaves(const struct arena *a, size_t slot)
{
        return arena_slot_of(a, slot)->retired || arena_slot_of(a, slot)->memory.n_bytes == 0;
}

bool arena_is_retiring(const struct arena *a, uint64_t offset)
{
        return arena_slot_leaves(a, arena_slot_at(a, offset));
}

/* Of cuda-ipc the space has nothing else. */
static bool is_exact_slot(const struct arena *a, size_t slot)
{
        return a->layout->has_fds && arena_is_single(arena_region_at(a, arena_slot_of(a, slot)->range.begin));
}

/* From the first extent to the end of the last one, without exact blocks. */
static struct bfc_range arena_span(const struct arena *a)
{
        struct bfc_range span = { UINT64_MAX, 0 };

        for (size_t i = 0; i < a->slots.n; i++) {
                struct bfc_range range = arena_slot_of(a, i)->range;

                if (!arena_slot_is_backed(a, i) || is_exact_slot(a, i))
                        continue;
                span.begin = range.begin < span.begin ? range.begin : span.begin;
                span.end = range.end > span.end ? range.end : span.end;
        }
        return span.end > 0 ? span : (struct bfc_range){ 0, 0 };
}

static void arena_draw_slot(const struct arena *a, size_t slot, struct bfc_range at, struct picture *picture)
{
        picture_add(picture, at, &arena_slot_of(a, slot)->occupancy, arena_slot_leaves(a, slot));
}

/* Those of exact blocks, which are far away in the arena's space, from `at` on. NULL: only adds up. Returns the end. */
static uint64_t arena_draw_exact(const struct arena *a, uint64_t at, struct picture *picture)
{
        for (size_t i = a->regions.n_large; a->layout->has_fds && i < a->regions.n; i++) {
                const struct arena_region *r = &a->regions.items[i];

                if (!arena_slot_is_backed(a, r->first_slot))
                        continue;
                if (picture)
                        arena_draw_slot(a, r->first_slot, (struct bfc_range){ at, at + r->n_bytes }, picture);
                at += r->n_bytes;
        }
        return at;
}

void arena_draw(const struct arena *a, char ret_picture[PICTURE_CHARACTERS + 1])
{
        struct bfc_range span = arena_span(a);
        struct picture picture;

        picture_begin(&picture, (struct bfc_range){ span.begin, arena_draw_exact(a, span.end, NULL) });
        for (size_t i = 0; i < a->slots.n; i++)
                if (arena_slot_is_backed(a, i) && !is_exact_slot(a, i))
                        arena_draw_slot(a, i, arena_slot_range(a, i), &picture);
        (void)arena_draw_exact(a, span.end, &picture);
        picture_draw(&picture, ret_picture);
}

static const char *arena_check_retired(const struct arena *a)
{
        uint64_t n_suspended = 0, n_late = 0;

        for (size_t i = 0; i < a->slots.n; i++) {
                const struct arena_slot *s = arena_slot_of(a, i);

                if (!s->retired)
                        continue;
                if (s->extent == LEDGER_NONE ||
                    ledger_extent_at(a->o.partition->ledger, s->extent)->links.n_exports == 0)
                        return "a retired extent has no export";
                if (s->n_late > ledger_extent_at(a->o.partition->ledger, s->extent)->links.n_exports)
                        return "an extent has more late exports than exports";
                *(s->n_late > 0 ? &n_late : &n_suspended) += s->memory.n_bytes;
        }
        if (n_suspended != a->totals.suspended_bytes)
                return "the retired extents do not match the pending ones";
        if (a->totals.leaving_bytes + n_suspended + n_late != a->totals.retiring_bytes)
                return "the sum of the bytes to release is wrong";
        if (a->totals.retiring_bytes > a->totals.pending_bytes)
                return "more bytes are released than are pending";
        return NULL;
}

int arena_check(const struct arena *a, const char **ret_why)
{
        struct bfc_stats stats;
        uint64_t n_backed = 0, n_used = 0;
        uint32_t n_extents = 0;
        const char *why;
        int r;

        r = bfc_check(a->bfc, ret_why);
        if (r < 0)
                return r;
        why = arena_check_retired(a);
        if (why) {
                *ret_why = why;
                return -EBADMSG;
        }
        for (size_t i = 0; i < a->slots.n; i++) {
                const struct arena_slot *s = arena_slot_of(a, i);

                if (s->extent == LEDGER_NONE)
                        continue;
                n_extents++;
                n_backed += s->charge.n_bytes;
                if (s->charge.n_bytes != arena_slot_bytes(a, i)) {
                        *ret_why = "an extent's charge does not match its slot";
                        return -EBADMSG;
                }
                if (!occupancy_check(&s->occupancy)) {
                        *ret_why = "the cells of an extent have a wrong sum";
                        return -EBADMSG;
                }
                n_used += s->occupancy.used_bytes;
        }
        arena_read_stats(a, &stats);
        /* A block that waits for its backing is the allocator's already. */
        if (n_used > stats.bytes_in_use || (a->totals.pending_bytes == 0 && n_used != stats.bytes_in_use)) {
                *ret_why = "blocks in extents and blocks of the allocator differ";
                return -EBADMSG;
        }
        /* While extents are made their bytes are reserved and in no slot yet. */
        if (n_extents != a->totals.n_extents || n_backed > stats.bytes_reserved ||
            stats.bytes_reserved - n_backed > a->totals.pending_bytes) {
                *ret_why = "extents in slots and reserved bytes of the allocator differ";
                return -EBADMSG;
        }
        return 0;
}

/* ---- parked blocks: the allocator keeps them as blocks in use, so their offsets stay reserved ---- */

bool arena_is_whole(const struct arena *a, uint64_t offset, uint64_t n_bytes)
{
        size_t last, first = arena_slots(a, offset, n_bytes, &last);

        return a->layout->has_fds && arena_slot_range(a, first).begin == offset &&
               arena_slot_range(a, last).end == offset + n_bytes;
}

/* ---- extents that no session has received ---------------------------------------- */

/* In a range of wholly free extents, the place that wastes the least, if that is less than in `best`. None that wastes
 * more than the copy has: then new extents are better. */
static void find_unseen(const struct arena *a, struct bfc_range range, uint64_t n_bytes,
                        struct bfc_range *best)
{
        size_t first = arena_slot_at(a, range.begin), last = arena_slot_at(a, range.end - 1);
        uint64_t sum = 0;

        /* The window of unseen extents ends at `slot`, and begins as late as n_bytes allow. */
        for (size_t slot = first; slot <= last; slot++) {
                if (!ledger_extent_at(a->o.partition->ledger, arena_slot_of(a, slot)->extent)->is_unseen) {
                        first = slot + 1;
                        sum = 0;
                        continue;
                }
                sum += arena_slot_bytes(a, slot);
                while (sum - arena_slot_bytes(a, first) >= n_bytes)
                        sum -= arena_slot_bytes(a, first++);
                if (sum >= n_bytes && sum - n_bytes <= n_bytes &&
                    (best->end == best->begin || sum < best->end - best->begin))
                        *best = (struct bfc_range){ arena_slot_range(a, first).begin,
                                                    arena_slot_range(a, slot).end };
        }
}

int arena_alloc_unseen(struct arena *a, uint64_t n_bytes, bfc_handle *ret_handle, uint64_t *ret_offset,
                       uint64_t *ret_n_bytes)
{
        struct bfc_range best = { 0, 0 };
        uint64_t n_free;
        size_t n = bfc_plan_release(a->bfc, UINT64_MAX, NULL, a->scratch.ranges, a->scratch.n_room, &n_free);
        int r;

        while (n-- > 0)
                find_unseen(a, a->scratch.ranges[n], n_bytes, &best);
        if (best.begin == best.end)
                return BFC_NO_FIT;
        r = bfc_alloc_range(a->bfc, best, ret_handle);
        if (r < 0)
                return r;
        *ret_offset = best.begin;
        *ret_n_bytes = best.end - best.begin;
        arena_count_block(a, best.begin, best.end - best.begin, occupancy_add);
        return 0;
}

/* ---- what is away, and wakes ---- */

uint64_t arena_parked_bytes(const struct arena *a)
{
        return a->totals.parked_bytes;
}

/* n_bytes more (modulo 2^64). */
void arena_count_parked(struct arena *a, uint64_t n_bytes)
{
        a->totals.parked_bytes += n_bytes;
        if (a->o.parked_bytes)
                *a->o.parked_bytes += n_bytes;
}

size_t arena_slots_of_block(const struct arena *a, bfc_handle handle, struct bfc_info *ret, size_t *ret_last)
{
        int r = bfc_info(a->bfc, handle, ret);

        assert(r == 0);
        (void)r;
        return arena_slots(a, ret->offset, ret->n_bytes, ret_last);
}

bool arena_is_away(const struct arena *a, bfc_handle handle)
{
        struct bfc_info info;
        size_t last, slot = arena_slots_of_block(a, handle, &info, &last);
        bool is_away = !arena_slot_of(a, slot)->waking;

        for (; slot <= last; slot++)
                is_away = is_away && !arena_slot_is_backed(a, slot);
        return is_away;
}

/* The place is unbacked space again. Without memory for that it stays reserved. */
static void arena_vacate(struct arena *a, bfc_handle handle, const struct bfc_info *info)
{
        struct bfc_range range = { info->offset, info->offset + info->n_bytes };
        int r;

        /* With this memory none of the calls below can fail. */
        if (bfc_release_reserve(a->bfc) < 0)
                return;
        arena_count_parked(a, -info->n_bytes);
        a->totals.away_bytes -= info->n_bytes;
        r = bfc_dealloc(a->bfc, handle);
        if (r == 0)
                r = bfc_release_begin(a->bfc, range);
        if (r == 0)
                r = bfc_release_commit(a->bfc, range);
        assert(r == 0);
        if (arena_is_single(arena_region_at(a, range.begin))) {
                arena_unkeep_exact(a, range.begin);
                a->layout->drop_slot(a, arena_slot_at(a, range.begin));
        }
}

/* Extents that still leave are waited for: release_done() calls this again. */
void arena_drop_parked(struct arena *a, bfc_handle handle)
{
        struct bfc_info info;
        size_t last, first = arena_slots_of_block(a, handle, &info, &last);

        /* A wake is in progress: growth_woken() frees the block. */
        if (arena_slot_of(a, first)->waking) {
                assert(arena_slot_of(a, first)->waking->wakes);
                arena_slot_of(a, first)->waking->is_dropped = true;
                return;
        }
        for (size_t slot = last + 1; slot-- > first;) {
                if (!arena_slot_is_backed(a, slot))
                        continue;
                arena_slot_of(a, slot)->dropped = handle; /* often the last that leaves */
                return;
        }
        arena_vacate(a, handle, &info);
}

struct worker_lane *arena_copy_lane(struct arena *a)
{
        return &a->copies;
}

void arena_wake_commit(struct arena *a, bfc_handle handle)
{
        struct bfc_info info;
        size_t last;
        struct arena_slot *first = arena_slot_of(a, arena_slots_of_block(a, handle, &info, &last));

        free(first->waking);
        first->waking = NULL;
}

/* A parked block of inherited records keeps its place. */
static int arena_restore_parked(struct arena *a, const struct ledger_block *b)
{
        struct bfc_range range = { b->offset, b->offset + b->n_bytes };
        size_t slot, last;
        uint64_t end = arena_large_end(a);
        int r = 0;

        /* Its place is one extent in a region of its own, or a range of the large regions. */
        if (b->n_bytes > 0 && b->offset >= end)
                r = arena_restore_parked_exact(a, b);
        else if (b->n_bytes == 0 || b->n_bytes > end - b->offset)
                r = -EBADMSG;
        if (r == 0)
                r = bfc_back(a->bfc, range);
        if (r < 0)
                return r == -EINVAL ? -EBADMSG : r;

        /* Extents that had not left when the previous daemon ended are released again (arena_release_parked()). */
        arena_count_parked(a, b->n_bytes);
        for (slot = arena_slots(a, b->offset, b->n_bytes, &last); slot <= last; slot++) {
                if (arena_slot_is_backed(a, slot))
                        arena_slot_of(a, slot)->is_parked = true;
                else
                        a->totals.away_bytes += arena_slot_bytes(a, slot);
        }
        return 0;
}

/* ---- an arena of what an earlier process left, see arena_restore() ------------ */

/* Puts the extent's index in its slot, and backs it. */
static int restore_extent(struct arena *a, uint32_t extent, const char **ret_why)
{
        const struct ledger_extent *e = ledger_extent_at(a->o.partition->ledger, extent);
        struct bfc_range range;
        size_t slot;
        int r;

        *ret_why = "an extent is outside all regions";
        if (e->offset >= arena_regions_end(a))
                return -EBADMSG;
        slot = arena_slot_at(a, e->offset);
        range = arena_slot_range(a, slot);
        *ret_why = "an extent is not aligned to the arena's extent size";
        if (range.begin != e->offset || range.end - range.begin != e->n_bytes ||
            arena_slot_is_backed(a, slot))
                return -EBADMSG;
        r = arena_make_slot(a, slot, range);
        if (r < 0)
                return r;
        arena_slot_of(a, slot)->extent = extent;
        return bfc_back(a->bfc, range);
}

static int restore_blocks(struct arena *a, const struct arena_inherited *inherited, bfc_handle *handles,
                          const char **ret_why)
{
        struct bfc_place *places = calloc(inherited->n_blocks + 1, sizeof(*places));
        int r = places ? 0 : -ENOMEM;

        for (size_t i = 0; r == 0 && i < inherited->n_blocks; i++) {
                const struct ledger_block *b = ledger_block_at(a->o.partition->ledger, inherited->blocks[i]);

                if (b->n_requested > BFC_MAX_SPACE || b->n_bytes != bfc_block_bytes(b->n_requested)) {
                        *ret_why = "a block's size does not match its requested size";
                        r = -EBADMSG;
                }
                if (r == 0 && ledger_block_is_parked(b)) {
                        r = arena_restore_parked(a, b);
                        *ret_why = "a parked block is not on whole extents";
                }
                places[i] = (struct bfc_place){ b->offset, b->n_requested };
        }
        if (r == 0)
                r = bfc_restore(a->bfc, places, inherited->n_blocks, handles);
        if (r == -EINVAL) {
                *ret_why = "blocks are outside the extents";
                r = -EBADMSG;
        }
        free(places);
        return r;
}

/* -ENOENT: the keeper does not have it; -EPROTO: it has something else. */
static int take_memory(const struct partition *p, const struct ledger_extent *e, int fd,
                       struct device_extent *ret)
{
        if (device_keeps(p->device))
                return device_take(p->device, e->store_key, e->n_bytes, ret);
        return fd >= 0 ? device_adopt(p->device, fd, e->n_bytes, ret) : -ENOENT;
}

/* The fds that a keeper sent; those that were inherited are the caller's. */
static void close_taken(const struct partition *p, const struct arena_inherited *inherited,
                        const struct device_extent *memories)
{
        for (size_t i = 0; device_keeps(p->device) && i < inherited->n_extents; i++)
                if (memories[i].fd >= 0)
                        close(memories[i].fd);
}

/* The memory of each extent, which has its slot already. All or none. */
static int restore_memory(struct arena *a, const struct arena_inherited *inherited,
                          struct device_extent *memories, const char **ret_why)
{
        for (size_t i = 0; i < inherited->n_extents; i++)
                memories[i] = DEVICE_EXTENT_EMPTY;
        for (size_t i = 0; i < inherited->n_extents; i++) {
                const struct ledger_extent *e =
                        ledger_extent_at(a->o.partition->ledger, inherited->extents[i]);
                int r = take_memory(a->o.partition, e, inherited->fds[i], &memories[i]);

                if (r == 0 && memories[i].share != a->o.partition->share)
                        r = -EPROTO;
                if (r == -EPROTO || r == -ENOENT) {
                        *ret_why = r == -EPROTO ? "the keeper has something else for an extent"
                                                : "the keeper does not have all of its extents";
                        r = -EBADMSG;
                }
                if (r < 0) {
                        close_taken(a->o.partition, inherited, memories);
                        return r;
                }
        }
        return 0;
}

/* Everything that can fail. */
static int restore_all(struct arena *a, const struct arena_inherited *inherited, bfc_handle *handles,
                       struct device_extent *memories, const char **ret_why)
{
        int r = a->layout->restore_regions(a, inherited, ret_why);

        for (size_t i = 0; r == 0 && i < inherited->n_extents; i++)
                r = restore_extent(a, inherited->extents[i], ret_why);
        if (r == 0)
                r = restore_blocks(a, inherited, handles, ret_why);
        if (r == 0)
                r = restore_memory(a, inherited, memories, ret_why);
        return r;
}

static void restore_commit(struct arena *a, const struct arena_inherited *inherited,
                           const bfc_handle *handles, const struct device_extent *memories,
                           struct charge *charge)
{
        for (size_t i = 0; i < inherited->n_extents; i++) {
                struct ledger_extent *e = ledger_extent_at(a->o.partition->ledger, inherited->extents[i]);

                e->fd = memories[i].fd;
                arena_occupy_slot(a, arena_slot_at(a, e->offset), memories[i], charge);
        }
        for (size_t i = 0; i < inherited->n_blocks; i++) {
                struct ledger_block *b = ledger_block_at(a->o.partition->ledger, inherited->blocks[i]);

                b->handle = handles[i];
                if (!ledger_block_is_parked(b))
                        arena_count_block(a, b->offset, b->n_bytes, occupancy_add);
        }
        assert(charge->n_bytes == 0);
        *charge = (struct charge){ NULL, 0 };
}

int arena_restore(const struct arena_options *options, const struct arena_inherited *inherited,
                  struct charge *charge, struct arena **ret, const char **ret_why)
{
        bfc_handle *handles = calloc(inherited->n_blocks + 1, sizeof(*handles));
        struct device_extent *memories = calloc(inherited->n_extents + 1, sizeof(*memories));
        struct arena *a = NULL;
        int r = handles && memories ? 0 : -ENOMEM;

        if (r == 0)
                r = arena_begin(options, inherited->n_extents, &a);
        if (r == 0)
                r = restore_all(a, inherited, handles, memories, ret_why);
        if (r == 0) {
                restore_commit(a, inherited, handles, memories, charge);
                *ret = a;
        } else if (a) {
                arena_free_tables(a);
        }
        free(handles);
        free(memories);
        return r;
}

int arena_finish(const struct partition *p, uint32_t extent, int fd)
{
        const struct ledger_extent *e = ledger_extent_at(p->ledger, extent);
        struct device_extent memory = DEVICE_EXTENT_EMPTY;
        int r = take_memory(p, e, fd, &memory);

        assert(e->is_leaving);
        if (r == 0)
                r = extent_destroy(p, &memory, e->store_key);
        else if (fd >= 0) {
                close(fd);
                (void)store_remove_extent(p->store, e->store_key);
        }
        extent_strike(p->ledger, extent);
        return r == -ENOENT ? 0 : r; /* it was released before */
}
