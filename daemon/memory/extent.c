/* One extent: its memory, on any thread, and its record and slot, on the loop.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/arena_internal.h"

#include <assert.h>
#include <errno.h>

#include "daemon/clock.h"
#include "daemon/net/fd_reserve.h"
#include "daemon/number.h"

/* ---- memory ----------------------------------------------------------------- */

static int extent_destroy_memory(const struct arena_options *o, struct device_extent *memory)
{
        uint64_t begun_ns = clock_ns();
        int r = device_destroy(o->device, memory);

        worker_note_call(o->worker, WORKER_DESTROYS, begun_ns, r < 0);
        return r;
}

static int extent_make_memory(const struct arena_options *o, uint64_t n_bytes, struct device_extent *ret)
{
        uint64_t begun_ns = clock_ns();
        int r = device_make_of(o->device, &o->supply, o->share, n_bytes, ret);

        worker_note_call(o->worker, WORKER_MAKES, begun_ns, r < 0);
        return r;
}

/* Where the device empties mappings, it does so by the fd, so a successor can do it while the store has it.
 * Where only fds keep the memory, the manager must have closed its own before the device is asked whether
 * the memory was returned. */
int extent_destroy(const struct arena_options *o, struct device_extent *memory, uint64_t key)
{
        int r;

        memory->clears = o->clears;
        if (!o->device->empties_mappings) {
                (void)store_remove_extent(o->store, key, true);
                return extent_destroy_memory(o, memory);
        }
        r = extent_destroy_memory(o, memory);
        (void)store_remove_extent(o->store, key, false);
        return r;
}

static int extent_try_to_make(const struct arena_options *o, uint64_t n_bytes, uint64_t key,
                              struct device_extent *ret, bool *ret_unreclaimed)
{
        bool is_ready = standby_take(o->standby, &o->supply, o->share, n_bytes, ret), is_reserved;
        int r = is_ready ? 0 : extent_make_memory(o, n_bytes, ret), r_store;

        if (r < 0)
                return r;
        is_reserved = fd_reserve_has(ret->fd);
        r_store = is_reserved ? -EMFILE : store_put_extent(o->store, key, ret->fd);
        if (r_store == 0)
                return 0;
        r = extent_destroy_memory(o, ret);
        *ret_unreclaimed = r < 0;
        if (r == -ENODEV)
                return r;
        return r_store == -EXFULL || is_reserved ? r_store : -ECOMM;
}

int extent_make(const struct arena_options *o, uint64_t n_bytes, uint64_t key, struct device_extent *ret,
                bool *ret_unreclaimed)
{
        uint64_t n_drops = standby_n_drops(o->standby);
        int r = extent_try_to_make(o, n_bytes, key, ret, ret_unreclaimed);

        if (standby_may_help(r) && !*ret_unreclaimed && standby_drop(o->standby, n_drops))
                r = extent_try_to_make(o, n_bytes, key, ret, ret_unreclaimed);
        return r;
}

/* ---- records and slots ------------------------------------------------------ */

/* sign: 1 or UINT64_MAX. */
static void arena_count_pages(struct arena *a, uint32_t extent, uint64_t sign)
{
        const struct ledger_extent *e = ledger_extent_at(a->o.ledger, extent);
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
        store_share_add(a->o.stored, 1);
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
                .quota = a->o.quota,
                .fd = memory.fd,
                .huge_mib = (uint32_t)(memory.huge_bytes >> 20),
                .is_unseen = 1,
        };
        int r;

        assert(s->extent == LEDGER_NONE);
        r = ledger_extent_add(a->o.ledger, &facts, &s->extent);
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
        extent_strike(a->o.ledger, s->extent);
        occupancy_close(&s->occupancy);
        s->extent = LEDGER_NONE;
        a->totals.n_extents--;
        store_share_return(a->o.stored, 1);
        if (unreclaimed)
                arena_note_unreclaimed(a, &s->charge);
        charge_drop(&s->charge);
}
