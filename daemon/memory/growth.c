/* Operations that make extents: for a plan, or in advance.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/arena_internal.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

#include "daemon/base/number.h"
#include "device/host_free.h"
#include "daemon/ledger/store.h"
#include "daemon/base/clock.h"
#include "daemon/base/fd_reserve.h"

#define TURN_BYTES (UINT64_C(512) << 20) /* of a GPU in one turn, or one extent of any size */

struct operation *operation_new(struct arena *a, size_t n_items)
{
        struct operation *op = calloc(1, sizeof(*op) + n_items * sizeof(op->items[0]));

        if (!op)
                return NULL;
        op->arena = a;
        for (size_t i = 0; i < n_items; i++)
                op->items[i].memory = DEVICE_EXTENT_EMPTY;
        return op;
}

void operation_destroy(struct operation *op, struct operation_item *item)
{
        int r = extent_destroy(op->arena->o.partition, &item->memory, item->key);

        item->unreclaimed = r < 0;
        op->is_lost = op->is_lost || r == -ENODEV;
        if (r == -EBUSY && !device_extent_is_made(&item->memory) &&
            device_foreign_bytes(op->arena->o.partition->device, &op->foreign_bytes) < 0)
                op->foreign_bytes = 0;
}

/* ---- on the worker ----------------------------------------------------------- */

/* The kernel may kill this process for lack of memory here. The record tells its successor. */
static void arena_begin_growth(const struct arena *a, uint64_t n_bytes)
{
        if (a->o.partition->device->charges_process)
                ledger_quota_grows(a->o.partition->ledger, a->o.quota, n_bytes, host_free_oom_kills());
}

static void arena_end_growth(const struct arena *a)
{
        if (a->o.partition->device->charges_process)
                ledger_quota_grows(a->o.partition->ledger, a->o.quota, 0, 0);
}

/* How many extents the next turn makes. Other tenants wait for it. */
static size_t growth_n_next(const struct operation *op)
{
        const struct operation_item *items = &op->items[op->n_made];
        size_t n_left = op->n_items - op->n_made, n = 1;
        uint64_t n_bytes = items[0].memory.n_bytes;

        if (!op->arena->o.partition->device->is_cuda)
                return 1;
        while (n < min_u64(n_left, DEVICE_MAKES) && n_bytes + items[n].memory.n_bytes <= TURN_BYTES)
                n_bytes += items[n++].memory.n_bytes;
        return n;
}

/* The next extents; none any more while the process ends. */
static void growth_make(struct operation *op)
{
        const struct partition *p = op->arena->o.partition;
        size_t n = growth_n_next(op);

        if (__atomic_load_n(&p->device->is_ending, __ATOMIC_RELAXED))
                op->result = -ECANCELED;
        else
                op->result = extents_make(p, &op->items[op->n_made], n);
        op->is_lost = op->result == -ENODEV;
        op->n_made += op->result == 0 ? n : 0;
}

/* An extent a turn, or some of a GPU: all of them, or none. The note is there from the first turn to the last: the kernel may
 * kill this process also between them, for what has been made. */
static void growth_run(struct worker_job *job)
{
        struct operation *op = (struct operation *)job;

        if (op->result < 0) {
                if (op->n_made > 0)
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

/* ---- on the loop --------------------------------------------------------------- */

/* Slots without an extent are no operation's: they were to be made, and are not. */
static void arena_drop_unbacked(struct arena *a, size_t first, size_t end)
{
        for (size_t slot = first; slot < end; slot++)
                if (arena_slot_is_made(a, slot) && !arena_slot_is_backed(a, slot))
                        a->layout->drop_slot(a, slot);
}

/* For the slots [first, end), which are made, as far as they have no extent. */
static struct operation *growth_new(struct arena *a, size_t first, size_t end)
{
        struct operation *op = operation_new(a, end - first);

        for (size_t slot = first; op && slot < end; slot++) {
                struct operation_item *item = &op->items[op->n_items];

                if (arena_slot_is_backed(a, slot))
                        continue;
                item->slot = slot;
                item->memory.n_bytes = arena_slot_bytes(a, slot);
                op->n_bytes += item->memory.n_bytes;
                op->n_items++;
        }
        return op;
}

static void growth_submit(struct operation *op, struct charge *charge, arena_grown_fn grown, void *userdata)
{
        struct arena *a = op->arena;

        assert(op->n_bytes == charge->n_bytes);
        op->grown = grown;
        op->userdata = userdata;
        op->charge = *charge;
        *charge = (struct charge){ NULL, 0 };
        op->job.run = growth_run;
        a->totals.pending_bytes += op->n_bytes;
        worker_submit(a->o.partition->worker, &op->job);
}

/* Fills the slots, or drops them. */
void growth_finish(struct operation *op)
{
        struct arena *a = op->arena;

        a->totals.pending_bytes -= op->n_bytes;
        a->is_lost = a->is_lost || op->is_lost;
        if (op->result < 0)
                arena_note_unreclaimed_items(op);
        arena_note_foreign(a, op->foreign_bytes);
        for (size_t i = 0; i < op->n_items; i++) {
                if (op->result < 0)
                        a->layout->drop_slot(a, op->items[i].slot);
                else
                        arena_fill_slot(a, op->items[i].slot, op->items[i].memory, op->items[i].key,
                                        &op->charge);
        }
        assert(op->result < 0 || op->charge.n_bytes == 0);
        charge_drop(&op->charge);
}

static void growth_done(struct worker_job *job)
{
        struct operation *op = (struct operation *)job;
        struct arena *a = op->arena;
        int r;

        if (op->wakes) {
                growth_woken(op);
                op->grown(op->userdata, op->result, op->handle, op->plan.offset);
                free(op);
                return;
        }
        if (op->result < 0) {
                r = arena_plan_is_exact(&op->plan) ? bfc_dealloc(a->bfc, op->handle)
                                                   : bfc_grow_cancel(a->bfc, op->handle);
                op->handle = 0;
                growth_finish(op);
        } else {
                growth_finish(op);
                r = arena_plan_is_exact(&op->plan) ? 0 : bfc_grow_commit(a->bfc, op->handle);
                arena_count_block(a, op->plan.offset, op->plan.n_bytes, occupancy_add);
        }
        assert(r == 0);
        (void)r;
        op->grown(op->userdata, op->result, op->handle, op->plan.offset);
        free(op);
}

/* Of a plan of arena_plan_exact(). */
static int growth_begin_exact(struct arena *a, const struct bfc_growth *plan, struct operation **ret)
{
        struct operation *op;
        bfc_handle handle;
        size_t slot;
        int r = arena_begin_exact(a, plan->n_bytes, &slot, &handle);

        if (r < 0)
                return r;
        op = growth_new(a, slot, slot + 1);
        if (!op) {
                (void)bfc_dealloc(a->bfc, handle);
                arena_drop_single(a, slot);
                return -ENOMEM;
        }
        op->handle = handle;
        op->plan = *plan;
        op->plan.offset = arena_slot_range(a, slot).begin;
        *ret = op;
        return 0;
}

/* Of others. */
static int growth_begin(struct arena *a, const struct bfc_growth *plan, struct operation **ret)
{
        size_t first = arena_slot_at(a, plan->span.begin), last = arena_slot_at(a, plan->span.end - 1);
        struct operation *op;
        int r;

        op = arena_make_slots(a, first, last) == 0 ? growth_new(a, first, last + 1) : NULL;
        if (!op)
                return -ENOMEM;
        r = bfc_grow_begin(a->bfc, plan, &op->handle);
        if (r < 0) {
                free(op);
                return r;
        }
        a->regions.planned = ARENA_NO_SLOT; /* it has become a region like others */
        op->plan = *plan;
        *ret = op;
        return 0;
}

int arena_grow(struct arena *a, const struct bfc_growth *plan, struct charge *charge, arena_grown_fn done,
               void *userdata)
{
        struct operation *op;
        int r = arena_plan_is_exact(plan) ? growth_begin_exact(a, plan, &op) : growth_begin(a, plan, &op);

        if (r < 0)
                return r;
        assert(charge->n_bytes == plan->new_bytes);
        op->job.done = growth_done;
        op->job.lane = &a->growths;
        growth_submit(op, charge, done, userdata);
        return 0;
}

int arena_wake(struct arena *a, bfc_handle handle, struct charge *charge, arena_grown_fn done,
               arena_released_fn undone, void *userdata)
{
        struct operation *op = NULL;
        struct bfc_info info;
        size_t first, last;

        assert(arena_is_away(a, handle));
        first = arena_slots_of_block(a, handle, &info, &last);
        assert(charge->n_bytes == info.n_bytes);
        if (arena_make_slots(a, first, last) == 0)
                op = growth_new(a, first, last + 1);
        if (op)
                op->undo = release_new(a, last + 1 - first, undone, userdata);
        if (!op || !op->undo) {
                free(op);
                arena_drop_unbacked(a, first, last + 1);
                return -ENOMEM;
        }
        op->wakes = true;
        op->handle = handle;
        op->plan = (struct bfc_growth){ .offset = info.offset, .n_bytes = info.n_bytes };
        op->job.done = growth_done;
        op->job.lane = &a->growths;
        arena_slot_of(a, first)->waking = op;
        growth_submit(op, charge, done, userdata);
        return 0;
}

/* ---- what is backed in advance ------------------------------------------------- */

uint64_t arena_unbacked_bytes(struct arena *a, uint64_t n_bytes)
{
        return a->layout->unbacked_bytes(a, n_bytes);
}

static int arena_back_slot(struct arena *a, size_t slot, struct charge *charge)
{
        struct bfc_range range = arena_slot_range(a, slot);
        struct operation_item item = { .memory = { .fd = -1, .n_bytes = range.end - range.begin } };
        int r = arena_make_slot(a, slot, range);

        if (r < 0)
                return r;
        arena_begin_growth(a, item.memory.n_bytes);
        r = extents_make(a->o.partition, &item, 1);
        arena_end_growth(a);
        if (r < 0)
                return r; /* what is unreclaimed is not charged: the daemon does not start */
        arena_fill_slot(a, slot, item.memory, item.key, charge);
        return bfc_back(a->bfc, range);
}

int arena_back(struct arena *a, uint64_t n_bytes, struct charge *charge)
{
        size_t slot = 0, end = 0;
        int r = a->layout->add_first_space(a, n_bytes, &slot, &end);

        for (; r == 0 && slot < end; slot++)
                if (!arena_slot_is_backed(a, slot) && arena_slot_bytes(a, slot) <= charge->n_bytes)
                        r = arena_back_slot(a, slot, charge);
        if (charge->n_bytes == 0)
                *charge = (struct charge){ NULL, 0 };
        return r;
}

static void backing_done(struct worker_job *job)
{
        struct operation *op = (struct operation *)job;
        struct arena *a = op->arena;
        struct bfc_range range = { arena_slot_range(a, op->items[0].slot).begin,
                                   arena_slot_range(a, op->items[op->n_items - 1].slot).end };

        if (op->result == 0 && bfc_back(a->bfc, range) < 0) {
                op->result = -ENOMEM; /* the allocator has no memory for that: the worker releases all */
                op->job.run = release_run;
                worker_submit(a->o.partition->worker, &op->job);
                return;
        }
        growth_finish(op);
        op->grown(op->userdata, op->result, 0, 0);
        free(op);
}

int arena_back_later(struct arena *a, uint64_t n_bytes, struct charge *charge, arena_grown_fn done,
                     void *userdata)
{
        struct operation *op = NULL;
        size_t first = 0, end = 0;
        int r;

        arena_forget_plan(a);
        r = a->layout->add_first_space(a, n_bytes, &first, &end);
        if (r < 0)
                return r;
        if (arena_make_slots(a, first, end - 1) == 0)
                op = growth_new(a, first, end);
        if (!op) {
                arena_drop_unbacked(a, first, end);
                return -ENOMEM;
        }
        assert(op->n_items > 0);
        op->job.done = backing_done;
        op->job.lane = &a->the_rest;
        growth_submit(op, charge, done, userdata);
        return 0;
}

/* ---- one extent ---------------------------------------------------------- */

/* Its memory, on any thread, and its record and slot, on the loop. */

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
