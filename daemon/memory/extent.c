/* One extent: its memory, on any thread, and its record and slot, on the loop.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/arena_internal.h"

#include <assert.h>
#include <errno.h>

#include "daemon/ledger/store.h"
#include "daemon/base/clock.h"
#include "daemon/base/fd_reserve.h"
#include "daemon/base/number.h"

/* ---- memory ----------------------------------------------------------------- */

static int extent_destroy_memory(const struct partition *p, struct device_extent *memory)
{
        uint64_t begun_ns = clock_ns();
        int r = device_destroy(p->device, memory);

        if (!device_extent_is_made(memory)) /* a look at what a process keeps is no call that lasts */
                worker_note_call(p->worker, WORKER_DESTROYS, begun_ns, r < 0);
        return r;
}

/* What standby memory does not have. On success all have memory. */
static int extents_make_memory(const struct partition *p, struct operation_item *items, size_t n)
{
        struct device_extent missing[DEVICE_MAKES];
        size_t n_missing = 0;
        uint64_t begun_ns;
        int r;

        for (size_t i = 0; i < n; i++)
                if (!standby_take(p->standby.standby, &p->memory.supply, p->share, items[i].memory.n_bytes,
                                  &items[i].memory))
                        missing[n_missing++] = items[i].memory;
        if (n_missing == 0)
                return 0;
        begun_ns = clock_ns();
        r = device_make_all(p->device, &p->memory.supply, p->share, missing, n_missing);
        worker_note_call(p->worker, WORKER_MAKES, begun_ns, r < 0);
        for (size_t i = n; r == 0 && i-- > 0;)
                if (!device_extent_is_made(&items[i].memory))
                        items[i].memory = missing[--n_missing];
        return r;
}

/* Where a process keeps the host's memory a successor is to have it: the store keeps its fd until it is gone. */
int extent_destroy(const struct partition *p, struct device_extent *memory, uint64_t key)
{
        int r;

        memory->clears = p->clears;
        if (device_keeps(p->device))
                return extent_destroy_memory(p, memory);
        r = extent_destroy_memory(p, memory);
        if (!device_extent_is_made(memory))
                (void)store_remove_extent(p->store, key);
        return r;
}

/* So that a successor can take them. */
static int extents_store(const struct partition *p, struct operation_item *items, size_t n)
{
        for (size_t i = 0; i < n; i++) {
                int r;

                if (fd_reserve_has(items[i].memory.fd))
                        return -EMFILE;
                if (device_keeps(p->device)) {
                        items[i].key = items[i].memory.native;
                        continue;
                }
                items[i].key = store_next_key(p->store);
                r = store_put_extent(p->store, items[i].key, items[i].memory.fd);
                if (r < 0)
                        return -ECOMM;
        }
        return 0;
}

/* 0; -ENODEV: the device is lost. */
static int extent_undo(const struct partition *p, struct operation_item *item)
{
        struct device_extent unmade = { .fd = -1, .n_bytes = item->memory.n_bytes };
        int r = device_extent_is_made(&item->memory) ? extent_destroy(p, &item->memory, item->key) : 0;

        item->unreclaimed = r < 0;
        item->memory = unmade;
        return r == -ENODEV ? r : 0;
}

static int extents_try_to_make(const struct partition *p, struct operation_item *items, size_t n,
                               size_t *ret_n_unreclaimed)
{
        int r = extents_make_memory(p, items, n);

        if (r == 0)
                r = extents_store(p, items, n);
        *ret_n_unreclaimed = 0;
        for (size_t i = 0; r < 0 && i < n; i++) {
                if (extent_undo(p, &items[i]) < 0)
                        r = -ENODEV;
                *ret_n_unreclaimed += items[i].unreclaimed;
        }
        return r;
}

int extents_make(const struct partition *p, struct operation_item *items, size_t n)
{
        uint64_t n_drops = standby_n_drops(p->standby.standby);
        size_t n_unreclaimed;
        int r = extents_try_to_make(p, items, n, &n_unreclaimed);

        if (standby_may_help(r) && n_unreclaimed == 0 && standby_drop(p->standby.standby, n_drops))
                r = extents_try_to_make(p, items, n, &n_unreclaimed);
        return r;
}

/* ---- records and slots ------------------------------------------------------ */

/* sign: 1 or UINT64_MAX. */
static void arena_count_pages(struct arena *a, uint32_t extent, uint64_t sign)
{
        const struct ledger_extent *e = ledger_extent_at(a->o.partition->ledger, extent);
        uint64_t huge_bytes = min_u64((uint64_t)e->huge_mib << 20, e->n_bytes);

        a->totals.huge_bytes += sign * huge_bytes;
        a->totals.small_bytes += sign * (e->n_bytes - huge_bytes);
}

void arena_occupy_slot(struct arena *a, size_t slot, struct device_extent memory, struct charge *charge)
{
        struct arena_slot *s = arena_slot_of(a, slot);

        s->memory = memory;
        occupancy_open(&s->occupancy, memory.n_bytes);
        charge_split(charge, memory.n_bytes, &s->charge);
        a->totals.n_extents++;
        arena_count_pages(a, s->extent, 1);
}

void arena_fill_slot(struct arena *a, size_t slot, struct device_extent memory, uint64_t key,
                     struct charge *charge)
{
        struct arena_slot *s = arena_slot_of(a, slot);
        struct ledger_extent facts = {
                .offset = s->range.begin,
                .n_bytes = memory.n_bytes,
                .store_key = key,
                .region_id = arena_region_at(a, s->range.begin)->id,
                .quota = a->o.quota,
                .fd = memory.fd,
                .huge_mib = (uint32_t)(memory.huge_bytes >> 20),
                .is_unseen = 1,
        };
        int r;

        assert(s->extent == LEDGER_NONE);
        r = ledger_extent_add(a->o.partition->ledger, &facts, &s->extent);
        assert(r == 0);
        (void)r;
        arena_occupy_slot(a, slot, memory, charge);
}

void extent_strike(struct ledger *l, uint32_t extent)
{
        const struct ledger_extent *e = ledger_extent_at(l, extent);

        while (e->links.first_export != LEDGER_NONE)
                ledger_export_clear(l, e->links.first_export);
        ledger_extent_clear(l, extent);
}

void arena_empty_slot(struct arena *a, size_t slot, bool unreclaimed)
{
        struct arena_slot *s = arena_slot_of(a, slot);

        arena_count_pages(a, s->extent, UINT64_MAX);
        extent_strike(a->o.partition->ledger, s->extent);
        occupancy_close(&s->occupancy);
        s->extent = LEDGER_NONE;
        a->totals.n_extents--;
        if (unreclaimed)
                arena_note_unreclaimed(a, &s->charge);
        charge_drop(&s->charge);
}
