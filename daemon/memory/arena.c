/* The arena: slots, regions, blocks and limits; see arena.h and arena_internal.h.
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
#include <unistd.h>

#include "daemon/base/number.h"

const struct arena_slot arena_unused_slot = { .extent = LEDGER_NONE, .memory = DEVICE_EXTENT_EMPTY };

#define UNUSED_SLOT ((struct arena_slot *)(uintptr_t)&arena_unused_slot) /* only read */

static const struct arena_layout *layout_of(enum device_share share)
{
        return share == DEVICE_SHARE_FD ? &arena_layout_fd : &arena_layout_ipc;
}

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

uint64_t arena_regions_end(const struct arena *a)
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

int arena_reserve_region(struct arena *a)
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

void arena_unmake_slot(struct arena *a, size_t slot)
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

/* ---- making and ending one --------------------------------------------------- */

static uint64_t arena_max_count(const struct arena *a, uint64_t limit_bytes)
{
        return extent_max_count(a->o.partition->share, limit_bytes, &a->o.sizes);
}

static uint64_t arena_max_records(const struct arena *a, uint64_t limit_bytes)
{
        return extent_max_records(a->o.partition->share, limit_bytes, &a->o.sizes);
}

int arena_begin(const struct arena_options *options, size_t n_extents, struct arena **ret)
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
        a->growths.is_waited_for = true;
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

void arena_free_tables(struct arena *a)
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
        size_t last = arena_slot_at(a, offset + n_bytes - 1);

        for (size_t slot = arena_slot_at(a, offset); slot <= last; slot++) {
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

/* Ids of extents are never used again, in any arena, also not after a restart. */
uint64_t arena_region_id(const struct arena *a, const struct arena_region *r)
{
        if (r->id != 0)
                return r->id;
        if (arena_is_single(r))
                return ARENA_REGION_OF_EXTENT |
                       ledger_extent_at(a->o.partition->ledger, arena_slot_of(a, r->first_slot)->extent)->id;
        return ((uint64_t)a->o.quota + 1) << 32 | (uint64_t)(r - a->regions.items);
}

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
        *ret_last = arena_slot_at(a, offset + n_bytes - 1);
        return arena_slot_at(a, offset);
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
