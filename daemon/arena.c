/* The arena; see arena.h.
 *
 * Growth and release are operations: a worker job with the slots that it is
 * about. While one is under way the memory that it makes or destroys belongs to
 * the operation, and the allocator keeps everybody else off those offsets
 * (pending, retiring). The loop's side alone touches slots, ledger and
 * allocator. The operation of an extent that is retired waits in its slot until
 * nobody has the extent any more; it is made beforehand, so that nothing can
 * fail then.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/arena.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/clock.h"
#include "daemon/fd_reserve.h"
#include "daemon/number.h"
#include "device/host_free.h"

#define ARENA_MIN_EXTENT_BYTES  (UINT64_C(2) << 20)
#define ARENA_EXTENTS_PER_LIMIT 256u
/* Up to this limit there are no more extents than of one size. */
#define ARENA_FEW_EXTENTS_LIMIT (UINT64_C(4) << 30)
#define ARENA_FEW_PER_ZONE      32u
#define ARENA_MANY_PER_ZONE     64u
/* cuda-ipc: who asks for so much has an extent for himself; others share one. */
#define ARENA_OWN_EXTENT_BYTES    (UINT64_C(16) << 20)
#define ARENA_SHARED_EXTENT_BYTES (UINT64_C(32) << 20)
#define ARENA_SMALL_EXTENTS       64u /* so many may be smaller than either */

#define ARENA_MAX_REFILL_JOBS 16u /* at once */

#define ARENA_NO_SLOT SIZE_MAX

#define ARENA_LATE_MS 1000u /* without progress, and a release is late */

/* An operation releases so much at most (but one extent of any size), and is then uncharged. So a request that
 * waits for room does not wait for all of a large release. */
#define ARENA_RELEASE_BYTES (UINT64_C(64) << 20)
#define ARENA_RELEASE_ITEMS (ARENA_RELEASE_BYTES / ARENA_MIN_EXTENT_BYTES)

struct arena_slot {
        struct bfc_range range; /* empty: not in use (cuda-ipc) */
        uint32_t extent;        /* in the ledger; LEDGER_NONE: unbacked */
        struct device_extent memory;
        struct charge charge;
        struct occupancy occupancy; /* of the extent */
        struct operation *retired;  /* not NULL: to be destroyed without exports */
        uint32_t n_late;            /* of its exports; while it is retired */
};

struct arena_region {
        uint64_t base;
        uint64_t n_bytes;
        size_t first_slot;
        uint32_t number;
        uint32_t record; /* in the ledger; LEDGER_NONE: cuda-ipc */
};

/* A question to the device about what escaped. */
struct arena_question {
        struct worker_job job;
        struct arena *arena;
        uint64_t escaped_bytes; /* when it was submitted */
        uint64_t others_bytes;
        int result;
        bool is_asked;
};

TAILQ_HEAD(operation_list, operation);
TAILQ_HEAD(refill_job_list, refill_job);

struct arena {
        struct arena_options o;
        struct worker_lane growths;  /* requests wait for them */
        struct worker_lane the_rest; /* releases, questions, refills, and what is made in advance */
        struct arena_question question;
        struct bfc *bfc;
        struct arena_region *regions; /* by base */
        size_t n_regions, n_regions_room;
        struct arena_slot **slots; /* fd: of all regions, in order; unused_slot: nothing was made there */
        size_t n_slots;            /* that there are places for */
        size_t n_slots_room;       /* in the table */
        size_t n_made;             /* slots that are not unused_slot */
        uint32_t n_numbers;        /* regions ever made */
        size_t planned;            /* cuda-ipc: the slot that was made for a plan, or none */
        struct bfc_range *ranges;  /* to plan a release in */
        uint32_t *retired;
        size_t n_ranges_room;          /* of both, at least n_made */
        size_t n_extents_max;          /* as many extents as there may be, or might have been before */
        uint64_t pending_bytes;        /* >= retiring */
        uint64_t leaving_bytes;        /* they are being destroyed */
        uint64_t late_bytes;           /* of these, in releases that are late */
        struct operation_list punched; /* releases whose extents are with the punch, or have been */
        _Atomic uint64_t progress_ms;  /* of these, which the punch does in order; see ARENA_LATE_MS */
        uint64_t awaited_bytes;        /* of retired extents that are not late */
        uint64_t retiring_bytes;       /* leaving + awaited + late */
        uint32_t n_extents;
        uint64_t huge_bytes;   /* of these, made in pages of 2 MiB */
        uint64_t small_bytes;  /* the rest */
        bool is_lost;          /* the device said so */
        struct charge escaped; /* for memory that the device did not take back */
        uint64_t
                confirmed_bytes; /* of that: the device was asked since, and has not taken it back; may be more */
        struct watch_owner refills;
        struct charge refilled;  /* for memory in destroyed extents */
        struct account *account; /* of its charges; NULL: nothing was released yet */
        uint64_t n_refills;
        struct refill_job_list refill_jobs;
        unsigned n_refill_jobs; /* of these */
};

/* A hole that is punched again. */
struct refill_job {
        struct worker_job job;
        struct arena *arena;
        struct punch_request punch;
        TAILQ_ENTRY(refill_job) of_arena;
};

/* An extent that is being made or given back. */
struct operation_item {
        size_t slot;
        struct device_extent memory;
        uint64_t key; /* in the store; 0: it is not there */
        bool escaped; /* the device did not take it back */
        int watched;  /* an fd of the extent to be watched when it is destroyed; -1: none */
        struct punch_request punch;
        struct operation *operation; /* of the item, while it is with the punch */
};

struct operation {
        struct worker_job job;
        struct arena *arena;
        struct charge charge; /* growth: for all items */
        bfc_handle handle;
        struct bfc_growth plan;
        uint64_t n_bytes;
        int result;
        bool is_lost;      /* the device said so */
        bool is_punched;   /* in arena.punched */
        bool is_late;      /* counted in arena.late_bytes */
        size_t n_to_punch; /* the punch's, from its submission on */
        size_t n_made;     /* items that are made, the first ones; the worker's */
        size_t n_gone;     /* items that are destroyed, the first ones; the worker's */
        TAILQ_ENTRY(operation) of_arena;
        arena_grown_fn grown;
        arena_released_fn released;
        void *userdata;
        size_t n_items;
        struct operation_item items[];
};

static uint64_t round_up(uint64_t n, uint64_t to)
{
        return (n + to - 1) / to * to;
}

/* What the zones take. The grid is valid. */
static uint64_t grid_zones_bytes(const struct arena_grid *g)
{
        return bfc_zones_bytes(&(struct bfc_zones){ 0, g->small_extent_bytes, g->extents_per_zone },
                               g->extent_bytes);
}

uint64_t arena_max_extents_of_size(uint64_t limit_bytes, const struct arena_grid *g, uint64_t size)
{
        uint64_t n_zoned = grid_zones_bytes(g);

        if (size == g->extent_bytes)
                return (limit_bytes - min_u64(limit_bytes, n_zoned)) / size;
        return size >= g->small_extent_bytes && size < g->extent_bytes
                       ? min_u64(limit_bytes / size, g->extents_per_zone)
                       : 0;
}

uint64_t arena_max_extents(enum device_share share, uint64_t limit_bytes, const struct arena_grid *g)
{
        uint64_t rest = limit_bytes, n = 1; /* the first one, which may be of any size */

        if (share != DEVICE_SHARE_FD)
                return limit_bytes / ARENA_OWN_EXTENT_BYTES + ARENA_SMALL_EXTENTS;
        for (uint64_t size = g->small_extent_bytes; size < g->extent_bytes; size *= 2) {
                uint64_t n_here = min_u64(rest / size, g->extents_per_zone);

                n += n_here;
                rest -= n_here * size;
        }
        return n + rest / g->extent_bytes;
}

uint64_t arena_grid_limit_max(const struct arena_grid *g)
{
        uint64_t n_zoned = arena_max_extents(DEVICE_SHARE_FD, grid_zones_bytes(g), g);

        return grid_zones_bytes(g) + g->extent_bytes * (ARENA_MAX_EXTENTS - n_zoned);
}

struct arena_grid arena_grid(enum device_share share, uint64_t limit_bytes, uint64_t granularity)
{
        uint64_t unit = round_up(ARENA_MIN_EXTENT_BYTES, granularity);
        bool is_few = limit_bytes <= ARENA_FEW_EXTENTS_LIMIT;
        struct arena_grid g = { unit, unit, 0 };

        if (share != DEVICE_SHARE_FD || limit_bytes == 0)
                return g;
        while (g.extent_bytes <= (limit_bytes - 1) / ARENA_EXTENTS_PER_LIMIT ||
               (is_few && arena_max_extents(share, limit_bytes, &g) > ARENA_EXTENTS_PER_LIMIT + 1)) {
                g.extent_bytes *= 2;
                g.extents_per_zone = is_few ? ARENA_FEW_PER_ZONE : ARENA_MANY_PER_ZONE;
        }
        return g;
}

bool arena_grid_is_valid(const struct arena_grid *g, uint64_t granularity)
{
        uint64_t size = g->small_extent_bytes;

        if (size == 0 || size % granularity != 0 || g->extent_bytes > BFC_MAX_SPACE)
                return false;
        while (size < g->extent_bytes)
                size *= 2;
        return size == g->extent_bytes && grid_zones_bytes(g) <= BFC_MAX_SPACE / 2 &&
               arena_max_extents(DEVICE_SHARE_FD, grid_zones_bytes(g), g) < ARENA_MAX_EXTENTS;
}

/* The largest extents never become smaller with a higher limit. */
uint64_t arena_limit_for_extent(uint64_t n_bytes, uint64_t granularity)
{
        uint64_t low = 0, high = BFC_MAX_SPACE / ARENA_MIN_EXTENT_BYTES; /* in such steps */

        while (low + 1 < high) {
                uint64_t middle = low + (high - low) / 2;
                struct arena_grid g =
                        arena_grid(DEVICE_SHARE_FD, middle * ARENA_MIN_EXTENT_BYTES, granularity);

                if (g.extent_bytes >= n_bytes)
                        high = middle;
                else
                        low = middle;
        }
        return high * ARENA_MIN_EXTENT_BYTES;
}

static bool arena_has_grid(const struct arena *a)
{
        return a->o.share == DEVICE_SHARE_FD;
}

static struct arena_grid arena_grid_of(const struct arena *a)
{
        return (struct arena_grid){ a->o.extent_bytes, a->o.small_extent_bytes, a->o.extents_per_zone };
}

static uint64_t arena_max_of(const struct arena *a, uint64_t limit_bytes)
{
        struct arena_grid g = arena_grid_of(a);

        return arena_max_extents(a->o.share, limit_bytes, &g);
}

static const struct arena_slot unused_slot = { .extent = LEDGER_NONE, .memory = DEVICE_EXTENT_EMPTY };

#define UNUSED_SLOT ((struct arena_slot *)(uintptr_t)&unused_slot) /* only read */

/* ---- slots and regions --------------------------------------------------- */

static struct arena_slot *arena_slot_of(const struct arena *a, size_t slot)
{
        return slot < a->n_slots_room ? a->slots[slot] : UNUSED_SLOT;
}

static const struct arena_region *arena_region_at(const struct arena *a, uint64_t offset)
{
        size_t low = 0, high = a->n_regions;

        while (low < high) {
                size_t middle = low + (high - low) / 2;

                if (a->regions[middle].base <= offset)
                        low = middle + 1;
                else
                        high = middle;
        }
        assert(low > 0 && offset - a->regions[low - 1].base < a->regions[low - 1].n_bytes);
        return &a->regions[low - 1];
}

static size_t arena_slot_at(const struct arena *a, uint64_t offset)
{
        const struct arena_region *r = arena_region_at(a, offset);
        size_t number;

        if (!arena_has_grid(a))
                return r->first_slot;
        (void)bfc_extent_at(a->bfc, offset, &number);
        return r->first_slot + number;
}

static struct bfc_range arena_slot_range(const struct arena *a, size_t slot)
{
        size_t i = a->n_regions;

        if (arena_slot_of(a, slot) != UNUSED_SLOT || !arena_has_grid(a))
                return arena_slot_of(a, slot)->range;
        while (a->regions[--i].first_slot > slot)
                ;
        return bfc_extent_numbered(a->bfc, a->regions[i].base, slot - a->regions[i].first_slot);
}

static uint64_t arena_slot_bytes(const struct arena *a, size_t slot)
{
        struct bfc_range range = arena_slot_range(a, slot);

        return range.end - range.begin;
}

static int arena_reserve_region(struct arena *a)
{
        size_t n = a->n_regions + 1;
        struct arena_region *regions;

        if (n <= a->n_regions_room)
                return 0;
        n += n / 2;
        regions = reallocarray(a->regions, n, sizeof(*regions));
        if (!regions)
                return -ENOMEM;
        a->regions = regions;
        a->n_regions_room = n;
        return 0;
}

/* The table ends behind the highest slot that was ever made, or a little later: most arenas use few of the
 * slots that they could have. */
static int arena_reserve_slot(struct arena *a, size_t slot)
{
        struct arena_slot **slots;
        size_t n = slot + 1 + slot / 2;

        if (slot < a->n_slots_room)
                return 0;
        slots = reallocarray(a->slots, n, sizeof(*slots));
        if (!slots)
                return -ENOMEM;
        a->slots = slots;
        while (a->n_slots_room < n)
                a->slots[a->n_slots_room++] = UNUSED_SLOT;
        return 0;
}

static int arena_reserve_ranges(struct arena *a, size_t n)
{
        struct bfc_range *ranges;
        uint32_t *retired;

        if (n <= a->n_ranges_room)
                return 0;
        n += n / 2;
        ranges = reallocarray(a->ranges, n, sizeof(*ranges));
        if (!ranges)
                return -ENOMEM;
        a->ranges = ranges;
        retired = reallocarray(a->retired, n, sizeof(*retired));
        if (!retired)
                return -ENOMEM;
        a->retired = retired;
        a->n_ranges_room = n;
        return 0;
}

/* Makes an unused slot ready for an extent. It stays so until its extent is gone. -ENOMEM. */
static int arena_make_slot(struct arena *a, size_t slot, struct bfc_range range)
{
        struct arena_slot *s;

        if (arena_slot_of(a, slot) != UNUSED_SLOT)
                return 0;
        if (arena_reserve_ranges(a, a->n_made + 1) < 0 || arena_reserve_slot(a, slot) < 0)
                return -ENOMEM;
        s = malloc(sizeof(*s));
        if (!s)
                return -ENOMEM;
        *s = unused_slot;
        s->range = range;
        a->slots[slot] = s;
        a->n_made++;
        return 0;
}

static int arena_make_slots(struct arena *a, size_t first, size_t last)
{
        int r = 0;

        for (size_t slot = first; r == 0 && slot <= last; slot++)
                r = arena_make_slot(a, slot, arena_slot_range(a, slot));
        return r;
}

static void arena_unmake_slot(struct arena *a, size_t slot)
{
        if (arena_slot_of(a, slot) == UNUSED_SLOT)
                return;
        free(arena_slot_of(a, slot));
        a->slots[slot] = UNUSED_SLOT;
        a->n_made--;
}

static uint64_t arena_zones_bytes(const struct arena *a)
{
        struct arena_grid g = arena_grid_of(a);

        return grid_zones_bytes(&g);
}

static bool arena_is_first_region(const struct ledger_region *facts)
{
        return facts->base == 0;
}

/* How a region is cut. Only the first one has zones: what is made when its space has no stretch is
 * made for large blocks. */
static struct bfc_zones arena_zones(const struct arena *a, const struct ledger_region *facts)
{
        struct bfc_zones zones = { facts->first_extent_bytes, a->o.extent_bytes, 0 };

        if (arena_is_first_region(facts) && a->o.extents_per_zone > 0) {
                zones.small_extent_bytes = a->o.small_extent_bytes;
                zones.extents_per_zone = a->o.extents_per_zone;
        }
        return zones;
}

/* What the grid leaves of the limit is the first extent of the first region, so
 * that every byte of the limit can be backed. There is one such extent and no more. */
static uint64_t arena_first_extent_bytes(const struct arena *a, uint64_t zones_bytes)
{
        if (a->o.limit_bytes < zones_bytes)
                return a->o.limit_bytes % a->o.small_extent_bytes;
        return (a->o.limit_bytes - zones_bytes) % a->o.extent_bytes;
}

/* Room for it is there, the ledger has it. */
static void arena_put_region(struct arena *a, const struct ledger_region *facts, uint32_t record,
                             size_t n_slots)
{
        a->regions[a->n_regions++] = (struct arena_region){
                facts->base, facts->n_bytes, a->n_slots, a->n_numbers++, record,
        };
        a->n_slots += n_slots;
}

/* The region's space, in the allocator, and room for the rest. */
static int arena_open_region(struct arena *a, const struct ledger_region *facts, size_t *ret_n_slots)
{
        struct bfc_zones zones = arena_zones(a, facts);
        int r = bfc_add_zoned_region(a->bfc, facts->base, facts->n_bytes, &zones, false);

        if (r < 0)
                return r;
        (void)bfc_extent_at(a->bfc, facts->base + facts->n_bytes - BFC_GRANULE, ret_n_slots);
        ++*ret_n_slots;
        r = arena_reserve_region(a);
        if (r < 0)
                (void)bfc_remove_region(a->bfc, facts->base);
        return r;
}

/* Twice the limit of address space (less where so much is not left), in whole
 * extents. */
static int arena_add_region(struct arena *a)
{
        uint64_t e = a->o.extent_bytes, space = 2 * a->o.limit_bytes, base = 0, fixed = 0;
        struct ledger_region facts = { .quota = a->o.quota, .number = a->n_numbers };
        size_t n_slots;
        uint32_t record;
        int r;

        if (a->n_regions > 0) {
                base = a->regions[a->n_regions - 1].base + a->regions[a->n_regions - 1].n_bytes;
        } else {
                fixed = arena_zones_bytes(a);
                facts.first_extent_bytes = arena_first_extent_bytes(a, fixed);
                fixed += facts.first_extent_bytes;
        }
        if (round_up(a->o.limit_bytes, e) > BFC_MAX_SPACE - base || fixed > BFC_MAX_SPACE - base)
                return -ENOMEM;
        facts.base = base;
        facts.n_bytes = fixed + (space > fixed ? round_up(space - fixed, e) : 0);
        if (facts.n_bytes > BFC_MAX_SPACE - base)
                facts.n_bytes = fixed + (BFC_MAX_SPACE - base - fixed) / e * e;
        if (ledger_region_add(a->o.ledger, &facts, &record) < 0)
                return -ENOMEM;
        r = arena_open_region(a, &facts, &n_slots);
        if (r < 0) {
                ledger_region_clear(a->o.ledger, record);
                return r;
        }
        arena_put_region(a, &facts, record, n_slots);
        return 0;
}

/* The first one is added when it is needed: most tenants of a large config use few of their quotas. */
static int arena_need_region(struct arena *a)
{
        return a->n_regions > 0 ? 0 : arena_add_region(a);
}

/* ---- regions of one extent (cuda-ipc) -------------------------------------------- */

/* The lowest gap between regions that is large enough; its index in regions. */
static int arena_find_gap(const struct arena *a, uint64_t n_bytes, size_t *ret_index, uint64_t *ret_base)
{
        uint64_t base = 0;
        size_t i;

        for (i = 0; i < a->n_regions && a->regions[i].base - base < n_bytes; i++)
                base = a->regions[i].base + a->regions[i].n_bytes;
        if (n_bytes > BFC_MAX_SPACE - base)
                return -ENOMEM;
        *ret_index = i;
        *ret_base = base;
        return 0;
}

static int arena_add_extent_region(struct arena *a, uint64_t n_bytes, size_t *ret_slot)
{
        size_t index, slot = 0;
        uint64_t base;
        int r = a->n_numbers == UINT32_MAX ? -ENOMEM : arena_find_gap(a, n_bytes, &index, &base);

        if (r == 0)
                r = arena_reserve_region(a);
        if (r == 0)
                r = bfc_add_region(a->bfc, base, n_bytes, n_bytes, false);
        if (r < 0)
                return r;
        while (slot < a->n_slots && arena_slot_of(a, slot) != UNUSED_SLOT)
                slot++;
        if (slot == a->n_slots)
                a->n_slots++;
        r = arena_make_slot(a, slot, (struct bfc_range){ base, base + n_bytes });
        if (r < 0) {
                (void)bfc_remove_region(a->bfc, base);
                return r;
        }
        memmove(a->regions + index + 1, a->regions + index, (a->n_regions - index) * sizeof(a->regions[0]));
        a->regions[index] = (struct arena_region){ base, n_bytes, slot, a->n_numbers++, LEDGER_NONE };
        a->n_regions++;
        *ret_slot = slot;
        return 0;
}

/* Of an extent that is gone, or was never made. */
static void arena_remove_extent_region(struct arena *a, size_t slot)
{
        uint64_t base = arena_slot_range(a, slot).begin;
        size_t index = (size_t)(arena_region_at(a, base) - a->regions);
        int r = bfc_remove_region(a->bfc, base);

        assert(r == 0 && arena_slot_of(a, slot)->extent == LEDGER_NONE);
        (void)r;
        a->n_regions--;
        memmove(a->regions + index, a->regions + index + 1, (a->n_regions - index) * sizeof(a->regions[0]));
        arena_unmake_slot(a, slot);
}

static void arena_forget_plan(struct arena *a)
{
        if (a->planned != ARENA_NO_SLOT)
                arena_remove_extent_region(a, a->planned);
        a->planned = ARENA_NO_SLOT;
}

/* How large an extent is made for a block. */
static uint64_t arena_new_extent_bytes(const struct arena *a, uint64_t n_bytes, uint64_t room_bytes)
{
        uint64_t own = round_up(n_bytes, a->o.extent_bytes),
                 room = room_bytes - room_bytes % a->o.extent_bytes;
        uint64_t shared = round_up(ARENA_SHARED_EXTENT_BYTES, a->o.extent_bytes);

        if (n_bytes >= ARENA_OWN_EXTENT_BYTES || room <= own)
                return own;
        return room < shared ? room : shared;
}

static int arena_plan_extent(struct arena *a, uint64_t n_bytes, uint64_t room_bytes)
{
        if (n_bytes > BFC_MAX_SPACE || a->n_regions >= a->n_extents_max)
                return -ENOMEM;
        return arena_add_extent_region(a, arena_new_extent_bytes(a, n_bytes, room_bytes), &a->planned);
}

/* ---- extents ------------------------------------------------------------------------ */

/* sign: 1 or UINT64_MAX. */
static void arena_count_pages(struct arena *a, uint32_t extent, uint64_t sign)
{
        const struct ledger_extent *e = ledger_extent_at(a->o.ledger, extent);
        uint64_t huge_bytes = min_u64((uint64_t)e->huge_mib << 20, e->n_bytes);

        a->huge_bytes += sign * huge_bytes;
        a->small_bytes += sign * (e->n_bytes - huge_bytes);
}

/* The slot's extent is in the ledger, and its memory is here. */
static void arena_occupy_slot(struct arena *a, size_t slot, struct device_extent memory,
                              struct charge *charge)
{
        struct arena_slot *s = arena_slot_of(a, slot);

        s->memory = memory;
        occupancy_open(&s->occupancy, memory.n_bytes);
        charge_split(charge, memory.n_bytes, &s->charge);
        a->n_extents++;
        arena_count_pages(a, s->extent, 1);
}

/* Writes an extent down and puts it in its slot. The ledger has a place for
 * every extent that the limits allow, so this cannot fail. */
static void arena_fill_slot(struct arena *a, size_t slot, struct device_extent memory, uint64_t key,
                            struct charge *charge)
{
        struct arena_slot *s = arena_slot_of(a, slot);
        struct ledger_extent facts = {
                .offset = arena_slot_range(a, slot).begin,
                .n_bytes = memory.n_bytes,
                .store_key = key,
                .quota = a->o.quota,
                .fd = memory.fd,
                .huge_mib = (uint32_t)(memory.huge_bytes >> 20),
        };
        int r;

        assert(s->extent == LEDGER_NONE);
        r = ledger_extent_add(a->o.ledger, &facts, &s->extent);
        assert(r == 0);
        (void)r;
        arena_occupy_slot(a, slot, memory, charge);
}

static void strike_extent(struct ledger *l, uint32_t extent)
{
        const struct ledger_extent *e = ledger_extent_at(l, extent);

        while (e->links.first_export != LEDGER_NONE)
                ledger_export_clear(l, e->links.first_export);
        ledger_extent_clear(l, extent);
}

/* What the device did not take back stays charged, until arena_settle_escapes(). */
static void arena_note_escape(struct arena *a, struct charge *charge)
{
        a->escaped.account = charge->account;
        a->escaped.n_bytes += charge->n_bytes;
        *charge = (struct charge){ NULL, 0 };
}

/* Strikes an extent whose memory has been given back, or has escaped. */
static void arena_empty_slot(struct arena *a, size_t slot, bool escaped)
{
        struct arena_slot *s = arena_slot_of(a, slot);

        arena_count_pages(a, s->extent, UINT64_MAX);
        strike_extent(a->o.ledger, s->extent);
        occupancy_close(&s->occupancy);
        s->extent = LEDGER_NONE;
        a->n_extents--;
        if (escaped)
                arena_note_escape(a, &s->charge);
        charge_drop(&s->charge);
        if (arena_has_grid(a)) /* else with its region */
                arena_unmake_slot(a, slot);
}

/* ---- memory, beside the loop ------------------------------------------------- */

static uint64_t next_key(const struct arena_options *o)
{
        return o->share == DEVICE_SHARE_FD ? store_next_key(o->store) : 0;
}

/* Mappings are emptied by the fd, so a successor can do it while the store has it. Where an
 * fd alone keeps the memory, the manager must have closed its own before anybody looks whether
 * it is back. */
static int destroy_memory(const struct arena_options *o, struct device_extent *memory, uint64_t key)
{
        int r;

        memory->clears = o->clears;
        if (!o->device->empties_mappings) {
                (void)store_remove_extent(o->store, key, true);
                return device_destroy(o->device, memory);
        }
        r = device_destroy(o->device, memory);
        (void)store_remove_extent(o->store, key, false);
        return r;
}

static int make_extent(const struct arena_options *o, uint64_t n_bytes, struct device_extent *ret)
{
        if (standby_take(o->standby, &o->supply, o->share, n_bytes, ret))
                return 0;
        return device_make_of(o->device, &o->supply, o->share, n_bytes, ret);
}

/* Both or none. */
static int try_to_make_memory(const struct arena_options *o, uint64_t n_bytes, uint64_t key,
                              struct device_extent *ret, bool *ret_escaped)
{
        int r = make_extent(o, n_bytes, ret), r_store;
        bool is_reserved;

        if (r < 0)
                return r;
        is_reserved = fd_reserve_has(ret->fd);
        r_store = is_reserved ? -EMFILE : store_put_extent(o->store, key, ret->fd);
        if (r_store == 0)
                return 0;
        r = device_destroy(o->device, ret);
        *ret_escaped = r < 0;
        if (r == -ENODEV)
                return r;
        return r_store == -EXFULL || is_reserved ? r_store : -ECOMM;
}

static int make_memory(const struct arena_options *o, uint64_t n_bytes, uint64_t key,
                       struct device_extent *ret, bool *ret_escaped)
{
        uint64_t n_drops = standby_n_drops(o->standby);
        int r = try_to_make_memory(o, n_bytes, key, ret, ret_escaped);

        if (standby_may_help(r) && !*ret_escaped && standby_drop(o->standby, n_drops))
                r = try_to_make_memory(o, n_bytes, key, ret, ret_escaped);
        return r;
}

static void arena_on_refill(struct watch_owner *o, int fd, uint64_t n_bytes);

/* Without a region. */
static int arena_begin(const struct arena_options *options, size_t n_extents, struct arena **ret)
{
        struct arena *a;
        int r;

        assert(options->extent_bytes > 0 && options->limit_bytes > 0);
        a = calloc(1, sizeof(*a));
        if (!a)
                return -ENOMEM;
        a->o = *options;
        TAILQ_INIT(&a->punched);
        TAILQ_INIT(&a->refill_jobs);
        a->planned = ARENA_NO_SLOT;
        a->growths.is_waited_for = true;
        watch_owner_init(&a->refills, arena_on_refill);
        if (a->o.extents_per_zone == 0)
                a->o.small_extent_bytes = a->o.extent_bytes;
        a->n_extents_max = (size_t)arena_max_of(a, a->o.limit_bytes);
        if (n_extents > a->n_extents_max)
                a->n_extents_max = n_extents;
        r = bfc_new(a->o.extent_bytes, &a->bfc);
        if (r < 0)
                a = arena_free(a);
        *ret = a;
        return r;
}

int arena_new(const struct arena_options *options, struct arena **ret)
{
        struct arena *a = NULL;
        int r;

        if (options->share == DEVICE_SHARE_FD &&
            round_up(options->limit_bytes, options->extent_bytes) > BFC_MAX_SPACE)
                return -ENOMEM;
        r = arena_begin(options, 0, &a);
        if (r == 0)
                *ret = a;
        return r;
}

int arena_prepare_limit(const struct arena *a, uint64_t limit_bytes)
{
        if (arena_has_grid(a) && limit_bytes > a->o.limit_bytes &&
            arena_max_of(a, limit_bytes) > ARENA_MAX_EXTENTS)
                return -ENOTSUP;
        return 0;
}

void arena_set_limit(struct arena *a, uint64_t limit_bytes)
{
        a->n_extents_max = (size_t)arena_extent_room(a, limit_bytes);
        a->o.limit_bytes = limit_bytes;
}

uint64_t arena_extent_room(const struct arena *a, uint64_t limit_bytes)
{
        return max_u64(arena_max_of(a, limit_bytes), a->n_extents_max);
}

uint64_t arena_limit_max(const struct arena *a)
{
        struct arena_grid g = arena_grid_of(a);

        return arena_has_grid(a) ? max_u64(arena_grid_limit_max(&g), a->o.limit_bytes) : UINT64_MAX;
}

static void arena_free_tables(struct arena *a)
{
        watch_leave(a->o.watch, &a->refills);
        charge_drop(&a->refilled);
        charge_drop(&a->escaped);
        bfc_destroy(a->bfc);
        free(a->ranges);
        free(a->retired);
        for (size_t i = 0; i < a->n_slots; i++)
                arena_unmake_slot(a, i);
        free(a->slots);
        free(a->regions);
        free(a);
}

static void arena_destroy_slot(struct arena *a, size_t slot)
{
        uint32_t extent = arena_slot_of(a, slot)->extent;

        struct device_extent *memory = &arena_slot_of(a, slot)->memory;
        uint64_t key = ledger_extent_at(a->o.ledger, extent)->store_key;

        ledger_extent_leave(a->o.ledger, extent);
        if (!a->o.punch) {
                (void)destroy_memory(&a->o, memory, key);
                return;
        }
        if (memory->fd >= 0)
                punch_discard(a->o.punch, memory->fd, memory->n_bytes, a->o.quota);
        *memory = DEVICE_EXTENT_EMPTY;
        (void)store_remove_extent(a->o.store, key, false);
}

static void refill_job_done(struct worker_job *job)
{
        struct refill_job *r = (struct refill_job *)job;

        TAILQ_REMOVE(&r->arena->refill_jobs, r, of_arena);
        r->arena->n_refill_jobs--;
        free(r);
}

/* After punch_stop(): the punch does not refer to them any more. */
static void arena_drop_punched(struct arena *a)
{
        struct operation *op;
        struct refill_job *refill;

        while ((refill = TAILQ_FIRST(&a->refill_jobs)))
                refill_job_done(&refill->job);

        while ((op = TAILQ_FIRST(&a->punched))) {
                TAILQ_REMOVE(&a->punched, op, of_arena);
                a->pending_bytes -= op->n_bytes;
                a->retiring_bytes -= op->n_bytes;
                a->leaving_bytes -= op->n_bytes;
                for (size_t i = 0; i < op->n_items; i++)
                        if (op->items[i].watched >= 0)
                                close(op->items[i].watched);
                free(op);
        }
}

struct arena *arena_free(struct arena *a)
{
        if (!a)
                return NULL;
        arena_drop_punched(a);
        assert(a->pending_bytes == 0 && !a->question.is_asked);
        for (size_t i = 0; i < a->n_slots; i++) {
                if (arena_slot_of(a, i)->extent == LEDGER_NONE)
                        continue;
                arena_destroy_slot(a, i);
                arena_empty_slot(a, i, false);
        }
        for (size_t i = 0; i < a->n_regions; i++)
                if (a->regions[i].record != LEDGER_NONE)
                        ledger_region_clear(a->o.ledger, a->regions[i].record);
        arena_free_tables(a);
        return NULL;
}

struct arena *arena_leave(struct arena *a)
{
        if (!a)
                return NULL;
        arena_drop_punched(a);
        assert(a->leaving_bytes == 0 && a->pending_bytes == a->retiring_bytes && !a->question.is_asked);
        for (size_t i = 0; i < a->n_slots; i++) {
                struct arena_slot *s = arena_slot_of(a, i);

                if (s->extent == LEDGER_NONE)
                        continue;
                free(s->retired); /* whoever has it is told again */
                if (s->memory.fd >= 0)
                        close(s->memory.fd);
                occupancy_close(&s->occupancy);
                charge_drop(&s->charge);
        }
        arena_free_tables(a);
        return NULL;
}

/* ---- blocks --------------------------------------------------------------- */

/* A block comes to lie at an offset, or leaves: each of its extents knows its part. */
static void arena_count_block(struct arena *a, uint64_t offset, uint64_t n_bytes,
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

typedef int (*alloc_fn)(struct bfc *b, uint64_t n_bytes, bfc_handle *ret_handle, uint64_t *ret_offset);

static int alloc_by(struct arena *a, alloc_fn alloc, uint64_t n_bytes, bfc_handle *ret_handle,
                    uint64_t *ret_offset)
{
        int r = alloc(a->bfc, n_bytes, ret_handle, ret_offset);

        if (r == 0)
                arena_count_block(a, *ret_offset, bfc_block_bytes(n_bytes), occupancy_add);
        return r;
}

int arena_alloc(struct arena *a, uint64_t n_bytes, bfc_handle *ret_handle, uint64_t *ret_offset)
{
        return alloc_by(a, bfc_alloc, n_bytes, ret_handle, ret_offset);
}

int arena_dealloc(struct arena *a, bfc_handle handle)
{
        struct bfc_info info;
        int r = bfc_info(a->bfc, handle, &info);

        if (r == 0)
                r = bfc_dealloc(a->bfc, handle);
        if (r == 0)
                arena_count_block(a, info.offset, info.n_bytes, occupancy_remove);
        return r;
}

/* Of the extents behind it only that one sees a change in which the block is cut: a cell counts bytes, but
 * a block that has all of an extent is in no cell. */
int arena_split(struct arena *a, bfc_handle handle, uint64_t at, bfc_handle *ret_high)
{
        struct bfc_range range, part;
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
        part = (struct bfc_range){ 0, range.end - range.begin };
        occupancy_remove(&arena_slot_of(a, slot)->occupancy, part);
        occupancy_add(&arena_slot_of(a, slot)->occupancy, (struct bfc_range){ 0, cut - range.begin });
        occupancy_add(&arena_slot_of(a, slot)->occupancy, (struct bfc_range){ cut - range.begin, part.end });
        return 0;
}

int arena_alloc_in_extent(struct arena *a, uint64_t n_bytes, bfc_handle *ret_handle, uint64_t *ret_offset)
{
        /* A region of one extent has no grid, so nothing crosses it. */
        return alloc_by(a, arena_has_grid(a) ? bfc_alloc_in_extent : bfc_alloc, n_bytes, ret_handle,
                        ret_offset);
}

uint64_t arena_max_in_extent(const struct arena *a)
{
        return arena_has_grid(a) ? a->o.extent_bytes : BFC_MAX_SPACE;
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
        r = arena_has_grid(a) ? arena_add_region(a) : arena_plan_extent(a, n_bytes, room_bytes);
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
        return plan_by(a, arena_has_grid(a) ? bfc_plan_growth_in_extent : bfc_plan_growth, n_bytes,
                       room_bytes, ret);
}

/* ---- taking over ----------------------------------------------------------- */

static int compare_regions(const void *x, const void *y, void *userdata)
{
        const struct ledger_region *p = ledger_region_get(userdata, *(const uint32_t *)x);
        const struct ledger_region *q = ledger_region_get(userdata, *(const uint32_t *)y);

        return p->base < q->base ? -1 : p->base > q->base;
}

/* The next region, as arena_add_region() made it; they lie side by side from 0 on. */
static int restore_region(struct arena *a, uint32_t record, const char **ret_why)
{
        const struct ledger_region *g = ledger_region_get(a->o.ledger, record);
        const struct arena_region *before = a->n_regions > 0 ? &a->regions[a->n_regions - 1] : NULL;
        uint64_t fixed = g->first_extent_bytes + (arena_is_first_region(g) ? arena_zones_bytes(a) : 0);
        size_t n_slots;
        int r;

        *ret_why = "a region is not at its recorded address";
        if (g->base != (before ? before->base + before->n_bytes : 0) || g->number != a->n_numbers)
                return -EBADMSG;
        *ret_why = "a region does not belong to the arena's extents";
        if (g->first_extent_bytes > a->o.extent_bytes || fixed > g->n_bytes ||
            (g->n_bytes - fixed) % a->o.extent_bytes != 0)
                return -EBADMSG;
        r = arena_open_region(a, g, &n_slots);
        if (r == 0)
                arena_put_region(a, g, record, n_slots);
        return r == -EINVAL ? -EBADMSG : r;
}

static int restore_regions(struct arena *a, const char **ret_why)
{
        uint32_t end = ledger_region_end(a->o.ledger), n = 0;
        uint32_t *records = calloc((size_t)end + 1, sizeof(*records));
        int r = 0;

        if (!records)
                return -ENOMEM;
        for (uint32_t i = 0; i < end; i++) {
                const struct ledger_region *g = ledger_region_get(a->o.ledger, i);

                if (g && g->quota == a->o.quota)
                        records[n++] = i;
        }
        qsort_r(records, n, sizeof(*records), compare_regions, a->o.ledger);
        for (uint32_t i = 0; r == 0 && i < n; i++)
                r = restore_region(a, records[i], ret_why);
        free(records);
        return r;
}

/* Puts the extent's index in its slot, and backs it. */
static int restore_extent(struct arena *a, uint32_t extent, const char **ret_why)
{
        const struct ledger_extent *e = ledger_extent_at(a->o.ledger, extent);
        const struct arena_region *last = a->n_regions > 0 ? &a->regions[a->n_regions - 1] : NULL;
        struct bfc_range range;
        size_t slot;
        int r;

        *ret_why = "an extent is outside all regions";
        if (!last || e->offset >= last->base + last->n_bytes)
                return -EBADMSG;
        slot = arena_slot_at(a, e->offset);
        range = arena_slot_range(a, slot);
        *ret_why = "an extent is not aligned to the arena's extent size";
        if (range.begin != e->offset || range.end - range.begin != e->n_bytes ||
            arena_slot_of(a, slot)->extent != LEDGER_NONE)
                return -EBADMSG;
        r = arena_make_slot(a, slot, range);
        if (r < 0)
                return r;
        arena_slot_of(a, slot)->extent = extent;
        return bfc_back(a->bfc, range);
}

static int restore_blocks(struct arena *a, const struct arena_remains *remains, bfc_handle *handles,
                          const char **ret_why)
{
        struct bfc_place *places = calloc(remains->n_blocks + 1, sizeof(*places));
        int r = places ? 0 : -ENOMEM;

        for (size_t i = 0; r == 0 && i < remains->n_blocks; i++) {
                const struct ledger_block *b = ledger_block_at(a->o.ledger, remains->blocks[i]);

                if (b->n_requested > BFC_MAX_SPACE || b->n_bytes != bfc_block_bytes(b->n_requested)) {
                        *ret_why = "a block's size does not match its requested size";
                        r = -EBADMSG;
                }
                places[i] = (struct bfc_place){ b->offset, b->n_requested };
        }
        if (r == 0)
                r = bfc_restore(a->bfc, places, remains->n_blocks, handles);
        if (r == -EINVAL) {
                *ret_why = "blocks are outside the extents";
                r = -EBADMSG;
        }
        free(places);
        return r;
}

/* The memory of each extent, which has its slot already. All or none. */
static int restore_memory(struct arena *a, const struct arena_remains *remains,
                          struct device_extent *memories, const char **ret_why)
{
        for (size_t i = 0; i < remains->n_extents; i++) {
                const struct ledger_extent *e = ledger_extent_at(a->o.ledger, remains->extents[i]);
                int r = device_adopt(a->o.device, remains->fds[i], e->n_bytes, &memories[i]);

                if (r == -EPROTO) {
                        *ret_why = "an fd does not belong to its extent";
                        r = -EBADMSG;
                }
                if (r < 0)
                        return r;
        }
        return 0;
}

/* Everything that can fail. */
static int restore_all(struct arena *a, const struct arena_remains *remains, bfc_handle *handles,
                       struct device_extent *memories, const char **ret_why)
{
        int r = restore_regions(a, ret_why);

        for (size_t i = 0; r == 0 && i < remains->n_extents; i++)
                r = restore_extent(a, remains->extents[i], ret_why);
        if (r == 0)
                r = restore_blocks(a, remains, handles, ret_why);
        if (r == 0)
                r = restore_memory(a, remains, memories, ret_why);
        return r;
}

static void restore_commit(struct arena *a, const struct arena_remains *remains, const bfc_handle *handles,
                           const struct device_extent *memories, struct charge *charge)
{
        for (size_t i = 0; i < remains->n_extents; i++) {
                struct ledger_extent *e = ledger_extent_at(a->o.ledger, remains->extents[i]);

                e->fd = memories[i].fd;
                arena_occupy_slot(a, arena_slot_at(a, e->offset), memories[i], charge);
        }
        for (size_t i = 0; i < remains->n_blocks; i++) {
                struct ledger_block *b = ledger_block_at(a->o.ledger, remains->blocks[i]);

                b->handle = handles[i];
                arena_count_block(a, b->offset, b->n_bytes, occupancy_add);
        }
        assert(charge->n_bytes == 0);
        *charge = (struct charge){ NULL, 0 };
}

int arena_restore(const struct arena_options *options, const struct arena_remains *remains,
                  struct charge *charge, struct arena **ret, const char **ret_why)
{
        bfc_handle *handles = calloc(remains->n_blocks + 1, sizeof(*handles));
        struct device_extent *memories = calloc(remains->n_extents + 1, sizeof(*memories));
        struct arena *a = NULL;
        int r = handles && memories ? 0 : -ENOMEM;

        if (r == 0 && options->share != DEVICE_SHARE_FD)
                r = -ENOTSUP;
        if (r == 0)
                r = arena_begin(options, remains->n_extents, &a);
        if (r == 0)
                r = restore_all(a, remains, handles, memories, ret_why);
        if (r == 0) {
                restore_commit(a, remains, handles, memories, charge);
                *ret = a;
        } else if (a) {
                arena_free_tables(a);
        }
        free(handles);
        free(memories);
        return r;
}

int arena_finish(const struct arena_options *options, uint32_t extent, int fd)
{
        const struct ledger_extent *e = ledger_extent_at(options->ledger, extent);
        struct device_extent memory = DEVICE_EXTENT_EMPTY;
        int r = fd >= 0 ? device_adopt(options->device, fd, e->n_bytes, &memory) : 0;

        assert(e->is_leaving);
        if (r < 0) {
                close(fd);
                (void)store_remove_extent(options->store, e->store_key, false);
        } else if (fd >= 0) {
                r = destroy_memory(options, &memory, e->store_key);
        }
        strike_extent(options->ledger, extent);
        return r;
}

/* ---- growth -------------------------------------------------------------- */

static struct operation *operation_new(struct arena *a, size_t n_items)
{
        struct operation *op = calloc(1, sizeof(*op) + n_items * sizeof(op->items[0]));

        if (op) {
                op->arena = a;
                for (size_t i = 0; i < n_items; i++) {
                        op->items[i].memory = DEVICE_EXTENT_EMPTY;
                        op->items[i].watched = -1;
                }
        }
        return op;
}

/* The slot's extent is to be made, unless there is one. */
static void operation_make(struct operation *op, size_t slot)
{
        struct arena *a = op->arena;

        if (arena_slot_of(a, slot)->extent != LEDGER_NONE)
                return;
        op->items[op->n_items].slot = slot;
        op->items[op->n_items].key = next_key(&a->o);
        op->items[op->n_items++].memory.n_bytes = arena_slot_bytes(a, slot);
        op->n_bytes += arena_slot_bytes(a, slot);
}

/* On the worker. */
static void operation_destroy(struct operation *op, struct operation_item *item)
{
        int r = destroy_memory(&op->arena->o, &item->memory, item->key);

        item->escaped = r < 0;
        op->is_lost = op->is_lost || r == -ENODEV;
}

/* The kernel may kill this process for lack of memory here. The record tells its successor. */
static void arena_begin_growth(const struct arena *a, uint64_t n_bytes)
{
        if (a->o.device->charges_process)
                ledger_quota_grows(a->o.ledger, a->o.quota, n_bytes, host_free_oom_kills());
}

static void arena_end_growth(const struct arena *a)
{
        if (a->o.device->charges_process)
                ledger_quota_grows(a->o.ledger, a->o.quota, 0, 0);
}

/* The next extent. What the end of the process would give back is not made any more. */
static void growth_make(struct operation *op)
{
        const struct arena_options *o = &op->arena->o;
        struct operation_item *item = &op->items[op->n_made];

        if (__atomic_load_n(&o->device->is_ending, __ATOMIC_RELAXED))
                op->result = -ECANCELED;
        else
                op->result = make_memory(o, item->memory.n_bytes, item->key, &item->memory, &item->escaped);
        op->is_lost = op->result == -ENODEV;
        op->n_made += op->result == 0;
}

/* On the worker, an extent a turn: all of them, or none. The note is there from the first turn to
 * the last: the kernel may kill this process also between them, for what has been made. */
static void growth_run(struct worker_job *job)
{
        struct operation *op = (struct operation *)job;

        if (op->result < 0) {
                operation_destroy(op, &op->items[--op->n_made]);
        } else if (op->n_made < op->n_items) {
                if (op->n_made == 0)
                        arena_begin_growth(op->arena, op->n_bytes);
                growth_make(op);
        }
        job->goes_on = op->result < 0 ? op->n_made > 0 : op->n_made < op->n_items;
        if (!job->goes_on)
                arena_end_growth(op->arena);
}

static void growth_done(struct worker_job *job)
{
        struct operation *op = (struct operation *)job;
        struct arena *a = op->arena;
        int r;

        a->pending_bytes -= op->n_bytes;
        a->is_lost = a->is_lost || op->is_lost;
        if (op->result < 0) {
                for (size_t i = 0; i < op->n_items; i++) {
                        struct charge charge;

                        if (!op->items[i].escaped)
                                continue;
                        charge_split(&op->charge, arena_slot_bytes(a, op->items[i].slot), &charge);
                        arena_note_escape(a, &charge);
                }
                r = bfc_grow_cancel(a->bfc, op->handle);
                op->handle = 0;
                if (!arena_has_grid(a))
                        arena_remove_extent_region(a, op->items[0].slot);
        } else {
                for (size_t i = 0; i < op->n_items; i++)
                        arena_fill_slot(a, op->items[i].slot, op->items[i].memory, op->items[i].key,
                                        &op->charge);
                r = bfc_grow_commit(a->bfc, op->handle);
                arena_count_block(a, op->plan.offset, op->plan.n_bytes, occupancy_add);
                assert(op->charge.n_bytes == 0);
        }
        assert(r == 0);
        (void)r;
        charge_drop(&op->charge);
        op->grown(op->userdata, op->result, op->handle, op->plan.offset);
        free(op);
}

int arena_grow(struct arena *a, const struct bfc_growth *plan, struct charge *charge, arena_grown_fn done,
               void *userdata)
{
        size_t first = arena_slot_at(a, plan->span.begin), last = arena_slot_at(a, plan->span.end - 1);
        struct operation *op;
        int r;

        assert(charge->n_bytes == plan->new_bytes);
        if (arena_make_slots(a, first, last) < 0)
                return -ENOMEM;
        op = operation_new(a, last - first + 1);
        if (!op)
                return -ENOMEM;
        for (size_t slot = first; slot <= last; slot++)
                operation_make(op, slot);
        assert(op->n_bytes == plan->new_bytes);
        r = bfc_grow_begin(a->bfc, plan, &op->handle);
        if (r < 0) {
                free(op);
                return r;
        }
        a->planned = ARENA_NO_SLOT; /* it has become a region like others */
        op->plan = *plan;
        op->grown = done;
        op->userdata = userdata;
        op->charge = *charge;
        *charge = (struct charge){ NULL, 0 };
        op->job.run = growth_run;
        op->job.done = growth_done;
        op->job.lane = &a->growths;
        a->pending_bytes += op->n_bytes;
        worker_submit(a->o.worker, &op->job);
        return 0;
}

static int arena_back_slot(struct arena *a, size_t slot, struct charge *charge)
{
        struct bfc_range range = arena_slot_range(a, slot);
        struct device_extent memory = DEVICE_EXTENT_EMPTY;
        uint64_t key = next_key(&a->o);
        bool escaped = false; /* nobody is charged for it: the daemon does not start */
        int r = arena_make_slot(a, slot, range);

        if (r < 0)
                return r;
        arena_begin_growth(a, range.end - range.begin);
        r = make_memory(&a->o, range.end - range.begin, key, &memory, &escaped);
        arena_end_growth(a);
        if (r < 0)
                return r;
        arena_fill_slot(a, slot, memory, key, charge);
        return bfc_back(a->bfc, range);
}

int arena_back(struct arena *a, uint64_t n_bytes, struct charge *charge)
{
        size_t slot = 0, last;
        int r = 0;

        if (arena_has_grid(a)) {
                r = arena_need_region(a);
                last = r == 0 ? arena_slot_at(a, n_bytes - 1) : 0;
        } else {
                r = arena_add_extent_region(a, n_bytes, &slot);
                last = slot;
        }
        for (; r == 0 && slot <= last; slot++)
                if (arena_slot_of(a, slot)->extent == LEDGER_NONE &&
                    arena_slot_bytes(a, slot) <= charge->n_bytes)
                        r = arena_back_slot(a, slot, charge);
        if (charge->n_bytes == 0)
                *charge = (struct charge){ NULL, 0 };
        return r;
}

/* ---- release ------------------------------------------------------------- */

/* On the worker, an extent a turn. */
static void release_run(struct worker_job *job)
{
        struct operation *op = (struct operation *)job;

        operation_destroy(op, &op->items[op->n_gone++]);
        job->goes_on = op->n_gone < op->n_items;
}

static void release_done(struct worker_job *job)
{
        struct operation *op = (struct operation *)job;
        struct arena *a = op->arena;

        a->pending_bytes -= op->n_bytes;
        a->retiring_bytes -= op->n_bytes;
        a->is_lost = a->is_lost || op->is_lost;
        a->leaving_bytes -= op->n_bytes;
        if (op->is_punched)
                TAILQ_REMOVE(&a->punched, op, of_arena);
        a->late_bytes -= op->is_late ? op->n_bytes : 0;
        for (size_t i = 0; i < op->n_items; i++) {
                int r = bfc_release_commit(a->bfc, arena_slot_range(a, op->items[i].slot));

                assert(r == 0);
                (void)r;
                a->account = arena_slot_of(a, op->items[i].slot)->charge.account;
                if (op->items[i].watched >= 0)
                        watch_add(a->o.watch, &a->refills, op->items[i].watched,
                                  arena_slot_bytes(a, op->items[i].slot));
                arena_empty_slot(a, op->items[i].slot, op->items[i].escaped);
                if (!arena_has_grid(a))
                        arena_remove_extent_region(a, op->items[i].slot);
        }
        op->released(op->userdata, op->n_bytes);
        free(op);
}

/* ---- backing while the loop runs ------------------------------------------ */

/* With a grid, the slots that hold [0, n_bytes). */
static size_t arena_slots_up_to(const struct arena *a, uint64_t n_bytes)
{
        return arena_slot_at(a, n_bytes - 1) + 1;
}

uint64_t arena_unbacked_bytes(struct arena *a, uint64_t n_bytes)
{
        uint64_t n_missing = 0;

        if (!arena_has_grid(a))
                return a->n_extents == 0 && a->pending_bytes == 0 ? n_bytes : 0;
        if (arena_need_region(a) < 0)
                return n_bytes;
        for (size_t slot = 0; slot < arena_slots_up_to(a, n_bytes); slot++)
                n_missing += arena_slot_of(a, slot)->extent == LEDGER_NONE ? arena_slot_bytes(a, slot) : 0;
        return n_missing;
}

static void backing_fail(struct operation *op)
{
        struct arena *a = op->arena;

        for (size_t i = 0; i < op->n_items; i++) {
                struct charge charge;

                if (!op->items[i].escaped)
                        continue;
                charge_split(&op->charge, arena_slot_bytes(a, op->items[i].slot), &charge);
                arena_note_escape(a, &charge);
        }
        if (!arena_has_grid(a))
                arena_remove_extent_region(a, op->items[0].slot);
}

static void backing_done(struct worker_job *job)
{
        struct operation *op = (struct operation *)job;
        struct arena *a = op->arena;
        struct bfc_range range = { arena_slot_range(a, op->items[0].slot).begin,
                                   arena_slot_range(a, op->items[op->n_items - 1].slot).end };

        if (op->result == 0 && bfc_back(a->bfc, range) < 0) {
                op->result = -ENOMEM; /* it has no memory for that: the worker takes all back */
                op->job.run = release_run;
                worker_submit(a->o.worker, &op->job);
                return;
        }
        a->pending_bytes -= op->n_bytes;
        a->is_lost = a->is_lost || op->is_lost;
        if (op->result < 0)
                backing_fail(op);
        for (size_t i = 0; op->result == 0 && i < op->n_items; i++)
                arena_fill_slot(a, op->items[i].slot, op->items[i].memory, op->items[i].key, &op->charge);
        charge_drop(&op->charge);
        op->grown(op->userdata, op->result, 0, 0);
        free(op);
}

/* The slots that are to be backed; with cuda-ipc one is made. */
static int backing_collect(struct operation *op, uint64_t n_bytes)
{
        struct arena *a = op->arena;
        size_t first = 0, end;

        if (arena_has_grid(a)) {
                end = arena_slots_up_to(a, n_bytes);
                if (arena_make_slots(a, 0, end - 1) < 0)
                        return -ENOMEM;
        } else {
                int r = arena_add_extent_region(a, n_bytes, &first);

                if (r < 0)
                        return r;
                end = first + 1;
        }
        for (size_t slot = first; slot < end; slot++)
                operation_make(op, slot);
        return 0;
}

int arena_back_later(struct arena *a, uint64_t n_bytes, struct charge *charge, arena_grown_fn done,
                     void *userdata)
{
        struct operation *op = NULL;
        int r;

        if (!arena_has_grid(a) || arena_need_region(a) == 0)
                op = operation_new(a, arena_has_grid(a) ? arena_slots_up_to(a, n_bytes) : 1);
        if (!op)
                return -ENOMEM;
        arena_forget_plan(a);
        r = backing_collect(op, n_bytes);
        if (r < 0) {
                free(op);
                return r;
        }
        assert(op->n_items > 0 && op->n_bytes == charge->n_bytes);
        op->grown = done;
        op->userdata = userdata;
        op->charge = *charge;
        *charge = (struct charge){ NULL, 0 };
        op->job.run = growth_run;
        op->job.done = backing_done;
        op->job.lane = &a->the_rest;
        a->pending_bytes += op->n_bytes;
        worker_submit(a->o.worker, &op->job);
        return 0;
}

static struct operation *release_new(struct arena *a, size_t n_items, arena_released_fn done, void *userdata)
{
        struct operation *op = operation_new(a, n_items);

        if (op) {
                op->released = done;
                op->userdata = userdata;
                op->job.run = release_run;
                op->job.done = release_done;
                op->job.lane = &a->the_rest;
        }
        return op;
}

/* An fd of the extent for the watch; -1: it is not to be watched, or there is no fd left. */
static int arena_watched_fd(const struct arena *a, const struct device_extent *memory)
{
        int fd;

        if (!a->o.watch || !a->o.device->empties_mappings || memory->fd < 0)
                return -1;
        fd = fcntl(memory->fd, F_DUPFD_CLOEXEC, 3);
        if (!fd_reserve_has(fd)) /* an administrator's order may have been the cause */
                return fd;
        close(fd);
        return -1;
}

/* From here on the memory is the operation's, or a successor's. */
static void release_add(struct operation *op, size_t slot)
{
        struct device_extent *memory = &arena_slot_of(op->arena, slot)->memory;
        struct ledger *l = op->arena->o.ledger;
        uint32_t extent = arena_slot_of(op->arena, slot)->extent;

        ledger_extent_leave(l, extent);
        op->items[op->n_items++] = (struct operation_item){
                .slot = slot,
                .memory = *memory,
                .key = ledger_extent_at(l, extent)->store_key,
                .watched = arena_watched_fd(op->arena, memory),
        };
        op->n_bytes += memory->n_bytes;
        *memory = DEVICE_EXTENT_EMPTY;
}

/* From any thread. */
static void arena_note_progress(struct arena *a)
{
        atomic_store_explicit(&a->progress_ms, clock_ms(), memory_order_relaxed);
}

/* On the worker, when all are punched; an extent a turn. */
static void punched_run(struct worker_job *job)
{
        struct operation *op = (struct operation *)job;

        (void)store_remove_extent(op->arena->o.store, op->items[op->n_gone++].key, false);
        arena_note_progress(op->arena);
        job->goes_on = op->n_gone < op->n_items;
}

/* On the punch's thread. */
static void item_is_punched(struct punch_request *request, int result)
{
        struct operation_item *item =
                (struct operation_item *)(void *)((char *)request - offsetof(struct operation_item, punch));
        struct operation *op = item->operation;

        item->escaped = result < 0;
        arena_note_progress(op->arena);
        if (--op->n_to_punch == 0)
                worker_submit(op->arena->o.worker, &op->job);
}

/* The process ends without a successor: the helper does what is sent to it, and is not waited for. */
static void release_discard(struct operation *op)
{
        for (size_t i = 0; i < op->n_items; i++) {
                struct device_extent *memory = &op->items[i].memory;

                punch_discard(op->arena->o.punch, memory->fd, memory->n_bytes, op->arena->o.quota);
                *memory = DEVICE_EXTENT_EMPTY;
        }
        op->job.run = punched_run;
        worker_submit(op->arena->o.worker, &op->job);
}

static void release_punch(struct operation *op)
{
        struct arena *a = op->arena;

        op->job.run = punched_run;
        op->n_to_punch = op->n_items;
        op->is_punched = true;
        if (TAILQ_EMPTY(&a->punched))
                arena_note_progress(a);
        TAILQ_INSERT_TAIL(&a->punched, op, of_arena);
        for (size_t i = 0; i < op->n_items; i++) {
                struct operation_item *item = &op->items[i];

                item->operation = op;
                item->punch = (struct punch_request){ .fd = item->memory.fd,
                                                      .n_bytes = item->memory.n_bytes,
                                                      .lane = a->o.quota,
                                                      .done = item_is_punched };
                item->memory = DEVICE_EXTENT_EMPTY;
                punch_submit(a->o.punch, &item->punch);
        }
}

static void release_submit(struct operation *op)
{
        op->arena->leaving_bytes += op->n_bytes;
        if (op->arena->o.punch && punch_is_stopped(op->arena->o.punch))
                release_discard(op);
        else if (op->arena->o.punch)
                release_punch(op);
        else
                worker_submit(op->arena->o.worker, &op->job);
}

/* One that another extent can be added to: op, or a new one where that is full. NULL: there is no memory
 * for it; op has been submitted. */
static struct operation *release_continue(struct operation *op)
{
        struct operation *next;

        if (op->n_items < ARENA_RELEASE_ITEMS && op->n_bytes < ARENA_RELEASE_BYTES)
                return op;
        next = release_new(op->arena, ARENA_RELEASE_ITEMS, op->released, op->userdata);
        release_submit(op);
        return next;
}

static void release_finish(struct operation *op)
{
        if (op && op->n_items > 0)
                release_submit(op);
        else
                free(op);
}

/* Others may still have this extent mapped, where the device cannot help it. */
static bool arena_must_retire(const struct arena *a, size_t slot)
{
        return !a->o.device->empties_mappings &&
               ledger_extent_at(a->o.ledger, arena_slot_of(a, slot)->extent)->links.n_exports > 0;
}

/* Begins to give back one extent, with the others in `op` or by an operation of
 * its own. Less comes back where memory is short. */
static void arena_release_slot(struct arena *a, size_t slot, struct operation *op, uint32_t *retired,
                               size_t *n_retired)
{
        struct arena_slot *s = arena_slot_of(a, slot);
        struct operation *own = NULL;

        if (arena_must_retire(a, slot)) {
                own = release_new(a, 1, op->released, op->userdata);
                if (!own)
                        return;
        }
        if (bfc_release_begin(a->bfc, arena_slot_range(a, slot)) < 0) {
                free(own);
                return;
        }
        a->pending_bytes += s->memory.n_bytes;
        a->retiring_bytes += s->memory.n_bytes;
        if (own) {
                a->awaited_bytes += s->memory.n_bytes;
                s->retired = own;
                s->n_late = 0;
                retired[(*n_retired)++] = s->extent;
                own = NULL;
        } else {
                release_add(op, slot);
        }
}

int arena_resume_release(struct arena *a, arena_released_fn done, void *userdata)
{
        struct operation *op = release_new(a, a->n_extents, done, userdata);

        if (!op)
                return -ENOMEM;
        for (size_t slot = 0; slot < a->n_slots; slot++) {
                const struct arena_slot *s = arena_slot_of(a, slot);

                if (s->extent == LEDGER_NONE || !ledger_extent_at(a->o.ledger, s->extent)->is_leaving)
                        continue;
                if (bfc_release_begin(a->bfc, arena_slot_range(a, slot)) < 0) {
                        free(op); /* the arena is to be given up: what was begun is done by a successor */
                        return -ENOMEM;
                }
                a->pending_bytes += s->memory.n_bytes;
                a->retiring_bytes += s->memory.n_bytes;
                release_add(op, slot);
        }
        release_finish(op);
        return 0;
}

enum release { RELEASE_ANY, RELEASE_SOON, RELEASE_UNMAPPED };

static bool arena_comes_soon(const struct arena *a, size_t slot, enum release kind)
{
        if (kind == RELEASE_UNMAPPED)
                return !arena_must_retire(a, slot);
        return !a->o.lets_go || !arena_must_retire(a, slot) ||
               a->o.lets_go(a->o.userdata, arena_slot_of(a, slot)->extent);
}

/* Begins to give back what is in a->ranges, at least want_bytes of it where it must be soon. */
static uint64_t arena_release_ranges(struct arena *a, size_t n_ranges, uint64_t want_bytes, enum release kind,
                                     arena_released_fn done, void *userdata)
{
        uint64_t pending_before = a->pending_bytes;
        size_t n_retired = 0;
        struct operation *op = n_ranges > 0 ? release_new(a, ARENA_RELEASE_ITEMS, done, userdata) : NULL;

        for (size_t i = 0; op && i < n_ranges; i++) {
                size_t first = arena_slot_at(a, a->ranges[i].begin),
                       last = arena_slot_at(a, a->ranges[i].end - 1), slot;

                for (slot = last + 1;
                     op && slot-- > first;) { /* the highest first, as bfc_plan_release() says */
                        if (kind != RELEASE_ANY && (a->pending_bytes - pending_before >= want_bytes ||
                                                    !arena_comes_soon(a, slot, kind)))
                                continue;
                        arena_release_slot(a, slot, op, a->retired, &n_retired);
                        op = release_continue(op);
                }
        }
        release_finish(op);
        if (n_retired > 0)
                a->o.retire(a->o.userdata, a->retired, n_retired);
        return a->pending_bytes - pending_before;
}

uint64_t arena_release(struct arena *a, uint64_t want_bytes, const struct bfc_growth *keep,
                       arena_released_fn done, void *userdata)
{
        uint64_t n_bytes;
        size_t n_ranges = bfc_plan_release(a->bfc, want_bytes, keep, a->ranges, a->n_ranges_room, &n_bytes);

        return arena_release_ranges(a, n_ranges, want_bytes, RELEASE_ANY, done, userdata);
}

uint64_t arena_release_soon(struct arena *a, uint64_t want_bytes, const struct bfc_growth *keep,
                            arena_released_fn done, void *userdata)
{
        uint64_t n_bytes;
        size_t n_ranges = bfc_plan_release(a->bfc, UINT64_MAX, keep, a->ranges, a->n_ranges_room, &n_bytes);

        return arena_release_ranges(a, n_ranges, want_bytes, RELEASE_SOON, done, userdata);
}

uint64_t arena_release_unmapped(struct arena *a, uint64_t want_bytes, arena_released_fn done, void *userdata)
{
        uint64_t n_bytes;
        size_t n_ranges = bfc_plan_release(a->bfc, UINT64_MAX, NULL, a->ranges, a->n_ranges_room, &n_bytes);

        return arena_release_ranges(a, n_ranges, want_bytes, RELEASE_UNMAPPED, done, userdata);
}

uint64_t arena_release_beyond(struct arena *a, uint64_t keep_bytes, arena_released_fn done, void *userdata)
{
        uint64_t n_bytes;
        size_t n_ranges = bfc_plan_release(a->bfc, UINT64_MAX, NULL, a->ranges, a->n_ranges_room, &n_bytes);

        while (n_ranges > 0 && keep_bytes > 0) {
                struct bfc_range *lowest = &a->ranges[n_ranges - 1];

                n_bytes = arena_slot_bytes(a, arena_slot_at(a, lowest->begin));
                lowest->begin += n_bytes;
                keep_bytes -= min_u64(keep_bytes, n_bytes);
                n_ranges -= lowest->begin == lowest->end;
        }
        return arena_release_ranges(a, n_ranges, UINT64_MAX, RELEASE_ANY, done, userdata);
}

static struct arena_slot *arena_slot_of_extent(const struct arena *a, uint32_t extent)
{
        return arena_slot_of(a, arena_slot_at(a, ledger_extent_at(a->o.ledger, extent)->offset));
}

bool arena_extent_is_retired(const struct arena *a, uint32_t extent)
{
        return arena_slot_of_extent(a, extent)->retired != NULL;
}

void arena_export_is_late(struct arena *a, uint32_t extent)
{
        struct arena_slot *s = arena_slot_of_extent(a, extent);

        assert(s->extent == extent && s->retired);
        if (s->n_late++ == 0)
                a->awaited_bytes -= s->memory.n_bytes;
}

void arena_export_is_gone(struct arena *a, uint32_t extent, bool was_late)
{
        struct arena_slot *s = arena_slot_of_extent(a, extent);
        struct operation *op = s->retired;

        assert(s->extent == extent);
        if (!op)
                return;
        assert(s->n_late >= was_late);
        s->n_late -= was_late;
        if (was_late && s->n_late == 0)
                a->awaited_bytes += s->memory.n_bytes;
        if (ledger_extent_at(a->o.ledger, extent)->links.n_exports > 0)
                return;
        assert(s->n_late == 0);
        s->retired = NULL;
        a->awaited_bytes -= s->memory.n_bytes;
        release_add(op, arena_slot_at(a, s->range.begin));
        release_submit(op);
}

uint64_t arena_releasable(const struct arena *a, const struct bfc_growth *keep)
{
        uint64_t n_bytes = 0;

        if (bfc_plan_release(a->bfc, UINT64_MAX, keep, a->ranges, a->n_ranges_room, &n_bytes) == 0)
                return 0;
        return n_bytes;
}

uint64_t arena_releasable_soon(const struct arena *a, const struct bfc_growth *keep)
{
        uint64_t n_bytes = 0, n_soon = 0;
        size_t n_ranges = bfc_plan_release(a->bfc, UINT64_MAX, keep, a->ranges, a->n_ranges_room, &n_bytes);

        for (size_t i = 0; i < n_ranges; i++) {
                size_t slot = arena_slot_at(a, a->ranges[i].begin),
                       last = arena_slot_at(a, a->ranges[i].end - 1);

                for (; slot <= last; slot++)
                        n_soon += arena_comes_soon(a, slot, RELEASE_SOON)
                                          ? arena_slot_of(a, slot)->memory.n_bytes
                                          : 0;
        }
        return n_soon;
}

/* ---- escapes ------------------------------------------------------------- */

static void question_run(struct worker_job *job)
{
        struct arena_question *q = (struct arena_question *)job;

        q->result = device_others(q->arena->o.device, &q->others_bytes);
}

/* What others hold in all is the most that can still be away of what had escaped when the device was
 * asked. What escaped later may not be in the sum, so it does not count here. Contexts and foreign
 * processes only make the answer larger: the charge then stays higher than it must. */
static void question_done(struct worker_job *job)
{
        struct arena_question *q = (struct arena_question *)job;
        struct arena *a = q->arena;
        struct charge back;

        q->is_asked = false;
        if (a->escaped.n_bytes == 0)
                return;
        a->confirmed_bytes = q->escaped_bytes;
        account_note_change(a->escaped.account);
        if (q->result < 0 || q->others_bytes >= q->escaped_bytes)
                return;
        a->confirmed_bytes = q->others_bytes;
        charge_split(&a->escaped, min_u64(q->escaped_bytes - q->others_bytes, a->escaped.n_bytes), &back);
        charge_drop(&back);
}

void arena_recover(struct arena *a, uint64_t n_bytes)
{
        struct charge back;

        a->is_lost = false;
        if (a->escaped.n_bytes <= n_bytes)
                return;
        charge_split(&a->escaped, a->escaped.n_bytes - n_bytes, &back);
        charge_drop(&back);
}

void arena_settle_escapes(struct arena *a)
{
        struct arena_question *q = &a->question;

        if (q->is_asked || a->escaped.n_bytes == 0)
                return;
        q->arena = a;
        q->escaped_bytes = a->escaped.n_bytes;
        q->is_asked = true;
        q->job.lane = &a->the_rest;
        q->job.run = question_run;
        q->job.done = question_done;
        worker_submit(a->o.worker, &q->job);
}

/* ---- refills ------------------------------------------------------------- */

/* On the worker. The arena of a test may have no punch; there the hole is punched here. */
static void refill_job_run(struct worker_job *job)
{
        struct refill_job *r = (struct refill_job *)job;
        struct device_extent memory = DEVICE_EXTENT_EMPTY;

        if (r->arena->o.punch)
                return;
        memory.fd = r->punch.fd;
        memory.n_bytes = r->punch.n_bytes;
        (void)device_destroy(r->arena->o.device, &memory);
}

/* On the punch's thread. */
static void refill_is_punched(struct punch_request *request, int result)
{
        struct refill_job *r =
                (struct refill_job *)(void *)((char *)request - offsetof(struct refill_job, punch));

        (void)result;
        worker_submit(r->arena->o.worker, &r->job);
}

/* If one of these has to wait, no more are begun than ARENA_MAX_REFILL_JOBS: the next look comes
 * back to the extent. */
static void arena_punch_again(struct arena *a, int fd, uint64_t n_bytes)
{
        bool is_possible =
                a->n_refill_jobs < ARENA_MAX_REFILL_JOBS && !(a->o.punch && punch_is_stopped(a->o.punch));
        struct refill_job *r = is_possible ? calloc(1, sizeof(*r)) : NULL;

        if (!r)
                return;
        r->arena = a;
        r->job.lane = &a->the_rest;
        r->job.run = refill_job_run;
        r->job.done = refill_job_done;
        r->punch = (struct punch_request){ .fd = fcntl(fd, F_DUPFD_CLOEXEC, 3),
                                           .n_bytes = n_bytes,
                                           .lane = a->o.quota,
                                           .done = refill_is_punched };
        if (r->punch.fd < 0) {
                free(r);
                return;
        }
        TAILQ_INSERT_TAIL(&a->refill_jobs, r, of_arena);
        a->n_refill_jobs++;
        if (a->o.punch)
                punch_submit(a->o.punch, &r->punch);
        else
                worker_submit(a->o.worker, &r->job);
}

/* Charges what was found, as far as the account has room, and drops what is charged too much. Where there
 * is no room nothing is taken, but the account's owner is told all the same. */
static void arena_charge_refills(struct arena *a)
{
        uint64_t want = a->refills.n_bytes, have = a->refilled.n_bytes, missing;
        struct charge more = { NULL, 0 };

        if (have > want) {
                charge_split(&a->refilled, have - want, &more);
                charge_drop(&more);
                return;
        }
        if (!a->account)
                return;
        want = min_u64(want - have, account_room(a->account));
        if (charge_take(a->account, want, &more, &missing) == 0)
                charge_join(&a->refilled, &more);
}

static void arena_on_refill(struct watch_owner *o, int fd, uint64_t n_bytes)
{
        struct arena *a = (struct arena *)(void *)((char *)o - offsetof(struct arena, refills));

        if (fd >= 0) {
                a->n_refills++;
                arena_punch_again(a, fd, n_bytes);
        }
        arena_charge_refills(a);
}

uint64_t arena_refilled_bytes(const struct arena *a)
{
        return a->refills.n_bytes;
}

uint64_t arena_n_refills(const struct arena *a)
{
        return a->n_refills;
}

uint64_t arena_unreclaimed_bytes(const struct arena *a)
{
        return a->escaped.n_bytes + a->refills.n_bytes;
}

/* ---- looking ------------------------------------------------------------- */

uint64_t arena_pending_bytes(const struct arena *a)
{
        return a->pending_bytes;
}

bool arena_is_quiet(const struct arena *a)
{
        return a->pending_bytes == 0 && a->n_extents == 0 && !a->question.is_asked && a->n_refill_jobs == 0;
}

/* Notes whether the releases are late by now. */
static void arena_note_late(struct arena *a)
{
        uint64_t since_ms = atomic_load_explicit(&a->progress_ms, memory_order_relaxed);
        uint64_t now_ms = TAILQ_EMPTY(&a->punched) ? 0 : clock_ms();
        struct operation *op;

        if (now_ms < since_ms || now_ms - since_ms < ARENA_LATE_MS)
                return;
        TAILQ_FOREACH(op, &a->punched, of_arena)
        {
                a->late_bytes += op->is_late ? 0 : op->n_bytes;
                op->is_late = true;
        }
}

uint64_t arena_leaving_bytes(struct arena *a)
{
        arena_note_late(a);
        return a->leaving_bytes - a->late_bytes;
}

uint64_t arena_late_bytes(struct arena *a)
{
        arena_note_late(a);
        return a->late_bytes;
}

uint64_t arena_awaited_bytes(const struct arena *a)
{
        return a->awaited_bytes;
}

uint64_t arena_retiring_bytes(const struct arena *a)
{
        return a->retiring_bytes;
}

uint64_t arena_escaped_bytes(const struct arena *a)
{
        return a->escaped.n_bytes;
}

uint64_t arena_confirmed_escaped_bytes(const struct arena *a)
{
        return min_u64(a->confirmed_bytes, a->escaped.n_bytes);
}

uint32_t arena_n_extents(const struct arena *a)
{
        return a->n_extents;
}

uint64_t arena_huge_bytes(const struct arena *a)
{
        return a->huge_bytes;
}

uint64_t arena_small_bytes(const struct arena *a)
{
        return a->small_bytes;
}

bool arena_is_lost(const struct arena *a)
{
        return a->is_lost;
}

/* How many extents of a zone are not there; slot: the first of the zone. */
static uint64_t arena_n_unbacked(const struct arena *a, size_t slot)
{
        uint64_t n = 0;

        for (size_t i = slot; i < slot + a->o.extents_per_zone; i++)
                n += a->n_regions == 0 || arena_slot_of(a, i)->extent == LEDGER_NONE;
        return n;
}

/* Without the first extent, which may have any size. Each other size divides the next, so the largest
 * come first. */
static uint64_t arena_fit(const struct arena *a, uint64_t room_bytes, size_t n_first)
{
        uint64_t rest = room_bytes % a->o.extent_bytes, size = a->o.extent_bytes;
        size_t n_zones = 0;

        for (uint64_t small = a->o.small_extent_bytes; small < size; small *= 2)
                n_zones++;
        while (n_zones-- > 0) {
                size /= 2;
                rest -= min_u64(rest / size, arena_n_unbacked(a, n_first + n_zones * a->o.extents_per_zone)) *
                        size;
        }
        return room_bytes - rest;
}

uint64_t arena_growable(const struct arena *a, uint64_t room_bytes)
{
        uint64_t first = 0;
        bool is_there = false;

        if (arena_has_grid(a) && a->n_regions > 0) {
                first = ledger_region_get(a->o.ledger, a->regions[0].record)->first_extent_bytes;
                is_there = first > 0 && arena_slot_of(a, 0)->extent != LEDGER_NONE;
        } else if (arena_has_grid(a)) {
                first = arena_first_extent_bytes(a, arena_zones_bytes(a));
        }
        if (first == 0 || is_there || first > room_bytes)
                return arena_fit(a, room_bytes, first > 0);
        return max_u64(arena_fit(a, room_bytes, 1), first + arena_fit(a, room_bytes - first, 1));
}

void arena_read_stats(const struct arena *a, struct bfc_stats *ret)
{
        bfc_read_stats(a->bfc, ret);
}

void arena_locate(const struct arena *a, uint64_t offset, struct arena_place *ret)
{
        const struct arena_region *r = arena_region_at(a, offset);

        *ret = (struct arena_place){
                .region_id = ((uint64_t)a->o.quota + 1) << 32 | r->number,
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
        assert(!arena_slot_of(a, slot)->retired); /* it is sent to no session any more */
        return arena_slot_of(a, slot)->extent;
}

const struct device_extent *arena_slot_memory(const struct arena *a, size_t slot)
{
        assert(arena_slot_of(a, slot)->extent != LEDGER_NONE);
        return &arena_slot_of(a, slot)->memory;
}

size_t arena_n_slots(const struct arena *a)
{
        return min_u64(a->n_slots, a->n_slots_room);
}

static bool arena_slot_leaves(const struct arena *a, size_t slot)
{
        return arena_slot_of(a, slot)->retired || arena_slot_of(a, slot)->memory.n_bytes == 0;
}

/* From the first extent to the end of the last one. */
static struct bfc_range arena_span(const struct arena *a)
{
        struct bfc_range span = { UINT64_MAX, 0 };

        for (size_t i = 0; i < a->n_slots; i++) {
                struct bfc_range range = arena_slot_range(a, i);

                if (arena_slot_of(a, i)->extent == LEDGER_NONE)
                        continue;
                span.begin = range.begin < span.begin ? range.begin : span.begin;
                span.end = range.end > span.end ? range.end : span.end;
        }
        return span.end > 0 ? span : (struct bfc_range){ 0, 0 };
}

void arena_draw(const struct arena *a, char ret_picture[PICTURE_CHARACTERS + 1])
{
        struct picture picture;

        picture_begin(&picture, arena_span(a));
        for (size_t i = 0; i < a->n_slots; i++) {
                if (arena_slot_of(a, i)->extent == LEDGER_NONE)
                        continue;
                picture_add(&picture, arena_slot_range(a, i), &arena_slot_of(a, i)->occupancy,
                            arena_slot_leaves(a, i));
        }
        picture_draw(&picture, ret_picture);
}

static const char *arena_check_retired(const struct arena *a)
{
        uint64_t n_awaited = 0, n_late = 0;

        for (size_t i = 0; i < a->n_slots; i++) {
                const struct arena_slot *s = arena_slot_of(a, i);

                if (!s->retired)
                        continue;
                if (a->o.device->empties_mappings || s->extent == LEDGER_NONE ||
                    ledger_extent_at(a->o.ledger, s->extent)->links.n_exports == 0)
                        return "a retired extent has no export";
                if (s->n_late > ledger_extent_at(a->o.ledger, s->extent)->links.n_exports)
                        return "an extent has more late exports than exports";
                *(s->n_late > 0 ? &n_late : &n_awaited) += s->memory.n_bytes;
        }
        if (n_awaited != a->awaited_bytes)
                return "the retired extents do not match the pending ones";
        if (a->leaving_bytes + n_awaited + n_late != a->retiring_bytes)
                return "the sum of the bytes to release is wrong";
        if (a->retiring_bytes > a->pending_bytes)
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
        for (size_t i = 0; i < a->n_slots; i++) {
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
        bfc_read_stats(a->bfc, &stats);
        /* A block that waits for its backing is the allocator's already. */
        if (n_used > stats.bytes_in_use || (a->pending_bytes == 0 && n_used != stats.bytes_in_use)) {
                *ret_why = "blocks in extents and blocks of the allocator differ";
                return -EBADMSG;
        }
        /* While extents are made their bytes are reserved and in no slot yet. */
        if (n_extents != a->n_extents || n_backed > stats.bytes_reserved ||
            stats.bytes_reserved - n_backed > a->pending_bytes) {
                *ret_why = "extents in slots and reserved bytes of the allocator differ";
                return -EBADMSG;
        }
        return 0;
}
