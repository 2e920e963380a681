/* Extents are made and released by operations: a worker job with its slots. While one is under way, the memory that it
 * makes or destroys belongs to the operation, and the allocator keeps others off those offsets (pending, retiring).
 *
 * A growth makes the extents of a plan, or some in advance. A release destroys extents. That of a retired extent waits in
 * its slot until no session has the extent any more; it is made beforehand, so that nothing can fail then.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/arena_internal.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

#include "daemon/base/clock.h"
#include "daemon/base/fd_reserve.h"
#include "daemon/base/number.h"
#include "daemon/ledger/store.h"
#include "daemon/memory/upcalls.h"
#include "device/host_free.h"

#define TURN_BYTES (UINT64_C(512) << 20) /* of a GPU in one turn, or one extent of any size */

#define LATE_MS 1000u /* after that a process keeps the memory, and has not only forked */

/* An operation releases so much at most (but one extent of any size), and is then uncharged. So a request
 * that waits for room does not wait for all of a large release. */
#define RELEASE_BYTES (UINT64_C(64) << 20)
#define RELEASE_ITEMS (RELEASE_BYTES / EXTENT_MIN_BYTES)

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

static int extents_make(const struct partition *p, struct operation_item *items, size_t n)
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

/* Records an extent in the ledger and puts it into its slot. The ledger has a record for every extent
 * that the limits allow, so this cannot fail. */
static void arena_fill_slot(struct arena *a, size_t slot, struct device_extent memory, uint64_t key,
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

/* ---- operations ------------------------------------------------------------- */

static struct operation *operation_new(struct arena *a, size_t n_items)
{
        struct operation *op = calloc(1, sizeof(*op) + n_items * sizeof(op->items[0]));

        if (!op)
                return NULL;
        op->arena = a;
        for (size_t i = 0; i < n_items; i++)
                op->items[i].memory = DEVICE_EXTENT_EMPTY;
        return op;
}

static void operation_destroy(struct operation *op, struct operation_item *item)
{
        int r = extent_destroy(op->arena->o.partition, &item->memory, item->key);

        item->unreclaimed = r < 0;
        op->is_lost = op->is_lost || r == -ENODEV;
        if (r == -EBUSY && !device_extent_is_made(&item->memory) &&
            device_foreign_bytes(op->arena->o.partition->device, &op->foreign_bytes) < 0)
                op->foreign_bytes = 0;
}

/* ---- memory that the device did not return ------------------------------- */

/* It stays charged until the device says that it was returned. Of the host's
 * memory the daemon keeps the extents, and looks at each again; that of a GPU has no extent any more.
 *
 * Direct charges end with their process, whose memory the driver returns then, unless another process has
 * it, too. The device tells only sums. So what others use beside direct charges and unreclaimed memory is sampled while
 * processes charge, and if it is more after the end of a process than in all samples, the difference is unreclaimed. */

#define SAMPLES_MS  900u /* between samples */
#define SAMPLES_MIN 2u   /* one may be of the moment between a charge and what it is for */

/* The next daemon charges this. It has no earlier answers to compare its first one with, so it is told only what
 * the device has confirmed. A host's extents tell it themselves. */
static void note_in_ledger(const struct arena *a)
{
        const struct arena_unreclaimed *u = &a->unreclaimed;

        if (a->o.partition->device->ops->others)
                ledger_quota_set_unreclaimed(a->o.partition->ledger, a->o.quota,
                                             min_u64(u->confirmed_bytes, u->charge.n_bytes));
}

void arena_note_unreclaimed(struct arena *a, struct charge *charge)
{
        a->o.partition->device->direct.unreclaimed_bytes += charge->n_bytes;
        a->unreclaimed.charge.account = charge->account;
        a->unreclaimed.charge.n_bytes += charge->n_bytes;
        *charge = (struct charge){ NULL, 0 };
}

/* Keeps charged what a failed operation could not release. */
static void arena_note_unreclaimed_items(struct operation *op)
{
        for (size_t i = 0; i < op->n_items; i++) {
                struct charge charge;

                if (!op->items[i].unreclaimed)
                        continue;
                charge_split(&op->charge, arena_slot_bytes(op->arena, op->items[i].slot), &charge);
                arena_note_unreclaimed(op->arena, &charge);
        }
}

static void question_run(struct worker_job *job)
{
        struct arena_unreclaimed *u = (struct arena_unreclaimed *)job;

        u->result = device_foreign_bytes(u->arena->o.partition->device, &u->foreign_bytes);
}

static void unreclaimed_drop(struct arena *a, uint64_t n_bytes)
{
        struct charge *charge = &a->unreclaimed.charge, back;

        charge_split(charge, min_u64(n_bytes, charge->n_bytes), &back);
        a->o.partition->device->direct.unreclaimed_bytes -= back.n_bytes;
        a->unreclaimed.asked_bytes = excess_u64(a->unreclaimed.asked_bytes, back.n_bytes);
        charge_drop(&back);
        note_in_ledger(a);
}

/* Direct charges of others are no unreclaimed memory. */
static void note_foreign(struct device *d, uint64_t n_bytes)
{
        n_bytes = excess_u64(n_bytes, d->direct.n_bytes);
        if (d->foreign_bytes > n_bytes)
                d->foreign_fallen += d->foreign_bytes - n_bytes;
        d->foreign_bytes = n_bytes;
}

/* What others have there, contexts and foreign processes included, is the most that is still unreclaimed. A fall of it
 * counts as a return, to one arena: the device does not say whose memory it was, and without this a charge would stay
 * as long as there are contexts. Their sizes differ a little, and no extent is as small as such a rest. */
static uint64_t count_left(struct device *d, uint64_t n_bytes)
{
        uint64_t returned = min_u64(n_bytes, d->foreign_fallen);
        uint64_t left = min_u64(n_bytes - returned, d->foreign_bytes);

        d->foreign_fallen -= returned;
        return left < EXTENT_MIN_BYTES ? 0 : left;
}

/* ---- direct charges of processes that have ended ------------------------------ */

static uint64_t others_bytes(const struct device *d)
{
        return excess_u64(d->foreign_bytes, d->direct.unreclaimed_bytes);
}

static uint64_t samples_most(const struct device_direct *direct)
{
        uint64_t most = 0;

        for (unsigned i = 0; i < direct->n; i++)
                most = max_u64(most, direct->others[i]);
        return direct->n < SAMPLES_MIN ? UINT64_MAX : most;
}

static void samples_add(struct device_direct *direct, uint64_t others)
{
        uint64_t now_ms = clock_ms();

        if (direct->n > 0 && now_ms - direct->taken_ms < SAMPLES_MS)
                return;
        for (unsigned i = DEVICE_DIRECT_SAMPLES - 1; i > 0; i--)
                direct->others[i] = direct->others[i - 1];
        direct->others[0] = others;
        direct->n += direct->n < DEVICE_DIRECT_SAMPLES;
        direct->n_due -= direct->n_due > 0;
        direct->taken_ms = now_ms;
}

/* Of what was asked for, the device has returned what others do not have now. */
static void ended_done(struct arena_unreclaimed *u)
{
        const struct device *d = u->arena->o.partition->device;
        uint64_t n_bytes = u->asked_ended_bytes, n_left = n_bytes;
        struct charge part;

        if (n_bytes == 0)
                return;
        if (u->result == 0)
                n_left = min_u64(n_bytes, excess_u64(others_bytes(d), samples_most(&d->direct)));
        else if (u->result == -ENOTSUP)
                n_left = 0;
        if (n_left < EXTENT_MIN_BYTES)
                n_left = 0;
        charge_split(&u->ended, n_bytes - n_left, &part);
        charge_drop(&part);
        charge_split(&u->ended, n_left, &part);
        if (n_left > 0)
                arena_note_unreclaimed(u->arena, &part);
        u->ended_fn(u->userdata, n_bytes - n_left);
}

/* What became unreclaimed later than the question may not be in the answer, so it does not count here. */
static void unreclaimed_done(struct arena_unreclaimed *u)
{
        struct device *d = u->arena->o.partition->device;

        if (u->charge.n_bytes == 0)
                return;
        u->confirmed_bytes = u->asked_bytes;
        account_note_change(u->charge.account);
        if (u->result < 0)
                return;
        u->confirmed_bytes = count_left(d, u->asked_bytes);
        unreclaimed_drop(u->arena, u->asked_bytes - u->confirmed_bytes);
}

static void question_done(struct worker_job *job)
{
        struct arena_unreclaimed *u = (struct arena_unreclaimed *)job;
        struct device *d = u->arena->o.partition->device;

        u->is_asked = false;
        if (u->result == 0)
                note_foreign(d, u->foreign_bytes);
        unreclaimed_done(u);
        ended_done(u);
        if (u->result == 0)
                samples_add(&d->direct, others_bytes(d));
        if (u->ended.n_bytes > 0)
                arena_check_unreclaimed(u->arena);
}

void arena_end_direct(struct arena *a, struct charge *charge, arena_released_fn done, void *userdata)
{
        charge_join(&a->unreclaimed.ended, charge);
        a->unreclaimed.ended_fn = done;
        a->unreclaimed.userdata = userdata;
        arena_check_unreclaimed(a);
}

uint64_t arena_ended_bytes(const struct arena *a)
{
        return a->unreclaimed.ended.n_bytes;
}

/* ---- the question ---------------------------------------------------------------- */

void arena_check_unreclaimed(struct arena *a)
{
        struct arena_unreclaimed *u = &a->unreclaimed;

        if (u->is_asked ||
            (u->charge.n_bytes + u->ended.n_bytes == 0 && a->o.partition->device->direct.n_due == 0))
                return;
        u->arena = a;
        u->asked_bytes = u->charge.n_bytes;
        u->asked_ended_bytes = u->ended.n_bytes;
        u->is_asked = true;
        u->job.lane = &a->the_rest;
        u->job.run = question_run;
        u->job.done = question_done;
        worker_submit(a->o.partition->worker, &u->job);
}

/* The bytes of others on the device after that; 0: unknown. Beyond these nothing is unreclaimed: a process may have
 * taken, at the same time, as much by itself as was returned. */
static void arena_note_foreign(struct arena *a, uint64_t n_bytes)
{
        struct device *d = a->o.partition->device;

        if (n_bytes == 0)
                return;
        note_foreign(d, n_bytes);
        unreclaimed_drop(a, excess_u64(a->unreclaimed.charge.n_bytes, d->foreign_bytes));
}

void arena_recover(struct arena *a, uint64_t n_bytes)
{
        a->is_lost = false;
        if (a->unreclaimed.charge.n_bytes > n_bytes)
                unreclaimed_drop(a, a->unreclaimed.charge.n_bytes - n_bytes);
}

uint64_t arena_unreclaimed_bytes(const struct arena *a)
{
        return a->unreclaimed.charge.n_bytes + a->unreclaimed.ended.n_bytes + a->totals.late_bytes;
}

bool arena_has_kept(const struct arena *a)
{
        return a->n_kept_releases > 0;
}

uint64_t arena_confirmed_unreclaimed_bytes(const struct arena *a)
{
        return min_u64(a->unreclaimed.confirmed_bytes, a->unreclaimed.charge.n_bytes) + a->totals.late_bytes;
}

/* ---- release: on the worker ----------------------------------------------------------- */

/* An extent a turn. */
static void release_run(struct worker_job *job)
{
        struct operation *op = (struct operation *)job;

        operation_destroy(op, &op->items[op->n_gone++]);
        job->goes_on = op->n_gone < op->n_items;
}

/* ---- release: one operation ------------------------------------------------------------ */

/* The memory of an extent is gone, or unreclaimed. */
static void item_finish(struct arena *a, const struct operation_item *item)
{
        struct bfc_range range = arena_slot_range(a, item->slot);
        bool is_parked = arena_slot_of(a, item->slot)->is_parked;
        bfc_handle dropped = arena_slot_of(a, item->slot)->dropped;
        int r = is_parked ? 0 : bfc_release_commit(a->bfc, range);

        /* The place is unbacked space again, except that of a parked block, which stays the block's. */
        assert(r == 0);
        (void)r;
        a->totals.away_bytes += is_parked ? range.end - range.begin : 0;
        arena_empty_slot(a, item->slot, item->unreclaimed);
        a->layout->drop_slot(a, item->slot);
        if (dropped != 0)
                arena_drop_parked(a, dropped);
}

/* Of an operation, from its bytes and its arena's. */
static void release_uncount(struct operation *op, uint64_t n_bytes)
{
        struct arena_totals *t = &op->arena->totals;

        t->pending_bytes -= n_bytes;
        t->retiring_bytes -= n_bytes;
        t->leaving_bytes -= n_bytes;
        t->late_bytes -= op->is_late ? n_bytes : 0;
        op->n_bytes -= n_bytes;
}

/* True: other requests no longer wait for it. */
static bool release_note_late(struct operation *op)
{
        struct arena *a = op->arena;

        if (op->is_late || clock_ms() - op->since_ms < LATE_MS)
                return false;
        op->is_late = true;
        a->totals.late_bytes += op->n_bytes;
        account_note_change(arena_slot_of(a, op->items[0].slot)->charge.account);
        return true;
}

/* Another process still has some extents: arena_look_at_kept() tries again. */
static bool release_keep(struct operation *op)
{
        struct arena *a = op->arena;

        if (!op->is_kept)
                account_note_change(arena_slot_of(a, op->items[0].slot)->charge.account);
        a->n_kept_releases += !op->is_kept;
        op->is_kept = true;
        TAILQ_INSERT_TAIL(&a->kept, op, of_arena);
        return release_note_late(op);
}

/* Only the items that are kept stay in the operation. Returns the bytes that are gone. */
static uint64_t release_drop_gone(struct operation *op)
{
        uint64_t n_bytes = op->n_bytes;
        size_t n_kept = 0;

        for (size_t i = 0; i < op->n_items; i++)
                if (device_extent_is_made(&op->items[i].memory))
                        n_bytes -= op->items[i].memory.n_bytes;
        release_uncount(op, n_bytes);
        for (size_t i = 0; i < op->n_items; i++) {
                if (device_extent_is_made(&op->items[i].memory))
                        op->items[n_kept++] = op->items[i];
                else
                        item_finish(op->arena, &op->items[i]);
        }
        op->n_items = n_kept;
        return n_bytes;
}

static void release_done(struct worker_job *job)
{
        struct operation *op = (struct operation *)job;
        struct arena *a = op->arena;
        uint64_t n_gone = release_drop_gone(op);
        bool is_late = op->n_items > 0 && release_keep(op);

        /* The quota learns what is uncharged. It also looks again when a release becomes late, since requests
         * no longer wait for that. */
        a->is_lost = a->is_lost || op->is_lost;
        arena_note_foreign(a, op->foreign_bytes);
        if (n_gone > 0 || is_late)
                op->released(op->userdata, n_gone);
        if (op->n_items == 0) {
                a->n_kept_releases -= op->is_kept;
                free(op);
        }
}

/* An operation that can release so many extents, without any yet. */
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

/* From here on the memory is the operation's, or a successor's. */
static void release_add(struct operation *op, size_t slot)
{
        struct arena *a = op->arena;
        struct device_extent *memory = &arena_slot_of(a, slot)->memory;
        uint32_t extent = arena_slot_of(a, slot)->extent;

        /* A successor that finds this mark releases the extent, whatever has become of the operation. */
        ledger_extent_leave(a->o.partition->ledger, extent);
        op->items[op->n_items++] = (struct operation_item){
                .slot = slot,
                .memory = *memory,
                .key = ledger_extent_at(a->o.partition->ledger, extent)->store_key,
        };
        op->items[op->n_items - 1].memory.was_lent =
                !ledger_extent_at(a->o.partition->ledger, extent)->is_unseen;
        op->n_bytes += memory->n_bytes;
        *memory = DEVICE_EXTENT_EMPTY;
}

static void release_submit(struct operation *op)
{
        struct arena *a = op->arena;

        a->totals.leaving_bytes += op->n_bytes;
        op->since_ms = clock_ms();
        op->job.may_be_held = a->o.partition->memory.is_pinned; /* by a GPU that hangs */
        worker_submit(a->o.partition->worker, &op->job);
}

/* One that another extent can be added to: op, or a new one where that is full. NULL: there is no memory
 * for it; op has been submitted. */
static struct operation *release_continue(struct operation *op)
{
        struct operation *next;

        if (op->n_items < RELEASE_ITEMS && op->n_bytes < RELEASE_BYTES)
                return op;
        next = release_new(op->arena, RELEASE_ITEMS, op->released, op->userdata);
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

size_t arena_look_at_kept(struct arena *a, size_t n_max)
{
        struct operation *op, *late = NULL;
        size_t n = 0;

        while (n < n_max && (op = TAILQ_FIRST(&a->kept))) {
                TAILQ_REMOVE(&a->kept, op, of_arena);
                op->n_gone = 0;
                n += op->n_items;
                worker_submit(a->o.partition->worker, &op->job);
        }
        TAILQ_FOREACH(op, &a->kept, of_arena)
        late = release_note_late(op) ? op : late;
        if (late)
                late->released(late->userdata, 0);
        return n;
}

void arena_drop_kept(struct arena *a)
{
        struct operation *op;

        while ((op = TAILQ_FIRST(&a->kept))) {
                TAILQ_REMOVE(&a->kept, op, of_arena);
                release_uncount(op, op->n_bytes);
                for (size_t i = 0; i < op->n_items; i++)
                        arena_slot_of(a, op->items[i].slot)->memory = op->items[i].memory;
                a->n_kept_releases--;
                free(op);
        }
}

/* ---- release: which extents ------------------------------------------------------------ */

enum release { RELEASE_ANY, RELEASE_SOON, RELEASE_UNMAPPED };

/* Sessions may still have this extent mapped. */
static bool arena_must_retire(const struct arena *a, size_t slot)
{
        return ledger_extent_at(a->o.partition->ledger, arena_slot_of(a, slot)->extent)->links.n_exports > 0;
}

static bool arena_may_release(const struct arena *a, size_t slot, enum release kind)
{
        if (kind == RELEASE_ANY || !arena_must_retire(a, slot))
                return true;
        return kind == RELEASE_SOON && a->o.partition->up.calls->unmaps_soon(a->o.partition->up.broker,
                                                                             arena_slot_of(a, slot)->extent);
}

static int arena_begin_release(struct arena *a, size_t slot)
{
        int r = arena_slot_of(a, slot)->is_parked ? 0 : bfc_release_begin(a->bfc, arena_slot_range(a, slot));

        if (r == 0) {
                a->totals.pending_bytes += arena_slot_of(a, slot)->memory.n_bytes;
                a->totals.retiring_bytes += arena_slot_of(a, slot)->memory.n_bytes;
        }
        return r;
}

/* It is released when its last export is gone. */
static void arena_retire_slot(struct arena *a, size_t slot, struct operation *own, size_t *n_retired)
{
        struct arena_slot *s = arena_slot_of(a, slot);

        a->totals.suspended_bytes += s->memory.n_bytes;
        s->retired = own;
        s->n_late = 0;
        a->scratch.retired[(*n_retired)++] = s->extent;
}

/* Begins to release one extent, with the others in `op` or by an operation of its own. Where memory is
 * short it stays. */
static void arena_release_slot(struct arena *a, size_t slot, struct operation *op, size_t *n_retired)
{
        bool must_retire = arena_must_retire(a, slot);
        struct operation *own = must_retire ? release_new(a, 1, op->released, op->userdata) : NULL;

        /* A retired extent waits for its sessions with an operation of its own, so that it delays no other. */
        if ((must_retire && !own) || arena_begin_release(a, slot) < 0) {
                free(own);
                return;
        }
        if (!own) {
                release_add(op, slot);
                return;
        }
        arena_retire_slot(a, slot, own, n_retired);
}

/* Begins to release what was planned, at least want_bytes of it where only some may be. */
static uint64_t arena_release_planned(struct arena *a, size_t n_ranges, uint64_t want_bytes,
                                      enum release kind, arena_released_fn done, void *userdata)
{
        uint64_t pending_before = a->totals.pending_bytes;
        size_t n_retired = 0;
        struct operation *op = n_ranges > 0 ? release_new(a, RELEASE_ITEMS, done, userdata) : NULL;

        for (size_t i = 0; op && i < n_ranges; i++) {
                size_t first = arena_slot_at(a, a->scratch.ranges[i].begin);

                /* The highest first, as bfc_plan_release() says. */
                for (size_t slot = arena_slot_at(a, a->scratch.ranges[i].end - 1) + 1;
                     op && slot-- > first;) {
                        if (kind != RELEASE_ANY && (a->totals.pending_bytes - pending_before >= want_bytes ||
                                                    !arena_may_release(a, slot, kind)))
                                continue;
                        arena_release_slot(a, slot, op, &n_retired);
                        op = release_continue(op);
                }
        }
        release_finish(op);

        /* The sessions are asked once, with all extents. */
        if (n_retired > 0)
                a->o.partition->up.calls->retire(a->o.partition->up.broker, a->scratch.retired, n_retired);
        return a->totals.pending_bytes - pending_before;
}

/* Into the scratch. Returns the number of ranges; *ret_n_bytes only where there are any. */
static size_t plan_release(const struct arena *a, uint64_t want_bytes, const struct bfc_growth *keep,
                           uint64_t *ret_n_bytes)
{
        return bfc_plan_release(a->bfc, want_bytes, keep, a->scratch.ranges, a->scratch.n_room, ret_n_bytes);
}

uint64_t arena_release(struct arena *a, uint64_t want_bytes, const struct bfc_growth *keep,
                       arena_released_fn done, void *userdata)
{
        uint64_t n_bytes;
        size_t n_ranges = plan_release(a, want_bytes, keep, &n_bytes);

        return arena_release_planned(a, n_ranges, want_bytes, RELEASE_ANY, done, userdata);
}

uint64_t arena_release_soon(struct arena *a, uint64_t want_bytes, const struct bfc_growth *keep,
                            arena_released_fn done, void *userdata)
{
        uint64_t n_bytes;
        size_t n_ranges = plan_release(a, UINT64_MAX, keep, &n_bytes);

        return arena_release_planned(a, n_ranges, want_bytes, RELEASE_SOON, done, userdata);
}

uint64_t arena_release_unmapped(struct arena *a, uint64_t want_bytes, arena_released_fn done, void *userdata)
{
        uint64_t n_bytes;
        size_t n_ranges = plan_release(a, UINT64_MAX, NULL, &n_bytes);

        return arena_release_planned(a, n_ranges, want_bytes, RELEASE_UNMAPPED, done, userdata);
}

uint64_t arena_release_exact(struct arena *a, arena_released_fn done, void *userdata)
{
        size_t n_ranges = 0;

        for (size_t i = a->regions.n_large; a->regions.has_freed && i < a->regions.n; i++) {
                const struct arena_region *r = &a->regions.items[i];

                if (arena_single_is_free(a, r))
                        a->scratch.ranges[n_ranges++] = (struct bfc_range){ r->base, r->base + r->n_bytes };
        }
        a->regions.has_freed = false;
        return arena_release_planned(a, n_ranges, UINT64_MAX, RELEASE_SOON, done, userdata);
}

int arena_resume_release(struct arena *a, arena_released_fn done, void *userdata)
{
        struct operation_list ready = TAILQ_HEAD_INITIALIZER(ready);
        struct operation *op = NULL;
        int r = 0;

        for (size_t slot = 0; r == 0 && slot < a->slots.n; slot++) {
                const struct arena_slot *s = arena_slot_of(a, slot);

                if (s->extent == LEDGER_NONE ||
                    !ledger_extent_at(a->o.partition->ledger, s->extent)->is_leaving)
                        continue;
                if (!op || op->n_items == RELEASE_ITEMS || op->n_bytes >= RELEASE_BYTES) {
                        op = release_new(a, RELEASE_ITEMS, done, userdata);
                        if (op)
                                TAILQ_INSERT_TAIL(&ready, op, of_arena);
                }
                r = op && arena_begin_release(a, slot) == 0 ? 0 : -ENOMEM;
                if (r == 0)
                        release_add(op, slot);
        }
        while ((op = TAILQ_FIRST(&ready))) {
                TAILQ_REMOVE(&ready, op, of_arena);
                if (r == 0)
                        release_submit(op);
                else
                        free(op); /* the arena will be left to a successor, which continues */
        }
        return r;
}

uint64_t arena_releasable(const struct arena *a, const struct bfc_growth *keep)
{
        uint64_t n_bytes = 0;

        return plan_release(a, UINT64_MAX, keep, &n_bytes) == 0 ? 0 : n_bytes;
}

uint64_t arena_releasable_soon(const struct arena *a, const struct bfc_growth *keep)
{
        uint64_t n_bytes = 0, n_soon = 0;
        size_t n_ranges = plan_release(a, UINT64_MAX, keep, &n_bytes);

        for (size_t i = 0; i < n_ranges; i++) {
                size_t last = arena_slot_at(a, a->scratch.ranges[i].end - 1);

                for (size_t slot = arena_slot_at(a, a->scratch.ranges[i].begin); slot <= last; slot++)
                        if (arena_may_release(a, slot, RELEASE_SOON))
                                n_soon += arena_slot_of(a, slot)->memory.n_bytes;
        }
        return n_soon;
}

/* ---- parked blocks ------------------------------------------------------------- */

/* Releases the extents in these slots, of a parked block. op: of release_new(), for as many; taken over. -ENOMEM:
 * nothing has changed. */
static int arena_release_place(struct arena *a, size_t first, size_t last, struct operation *op)
{
        struct operation_list retired = TAILQ_HEAD_INITIALIZER(retired);
        struct operation *own;
        size_t n_retired = 0;
        int r = op ? 0 : -ENOMEM;

        for (size_t slot = first; r == 0 && slot <= last; slot++) {
                if (!arena_must_retire(a, slot))
                        continue;
                own = release_new(a, 1, op->released, op->userdata);
                r = own ? 0 : -ENOMEM;
                if (own)
                        TAILQ_INSERT_TAIL(&retired, own, of_arena);
        }
        for (size_t slot = first; r == 0 && slot <= last; slot++) {
                struct arena_slot *s = arena_slot_of(a, slot);

                s->is_parked = true;
                (void)arena_begin_release(a, slot);
                if (!arena_must_retire(a, slot)) {
                        release_add(op, slot);
                        continue;
                }
                own = TAILQ_FIRST(&retired);
                TAILQ_REMOVE(&retired, own, of_arena);
                arena_retire_slot(a, slot, own, &n_retired);
        }
        while ((own = TAILQ_FIRST(&retired))) {
                TAILQ_REMOVE(&retired, own, of_arena);
                free(own);
        }
        release_finish(op);
        if (n_retired > 0)
                a->o.partition->up.calls->retire(a->o.partition->up.broker, a->scratch.retired, n_retired);
        return r;
}

/* Releases the extents of a whole block, whose place the allocator keeps. */
static int arena_unback(struct arena *a, const struct bfc_info *block, struct operation *op)
{
        size_t last, first = arena_slots(a, block->offset, block->n_bytes, &last);
        int r = arena_release_place(a, first, last, op);

        if (r < 0)
                return r;
        if (arena_is_single(arena_region_at(a, block->offset)))
                arena_keep_exact(a, arena_region_to_change(a, block->offset));
        arena_count_block(a, block->offset, block->n_bytes, occupancy_remove);
        arena_count_parked(a, block->n_bytes);
        return 0;
}

int arena_park(struct arena *a, bfc_handle handle, arena_released_fn done, void *userdata)
{
        struct bfc_info info;
        size_t last, first = arena_slots_of_block(a, handle, &info, &last);

        assert(arena_is_whole(a, info.offset, info.n_bytes));
        return arena_unback(a, &info, release_new(a, last - first + 1, done, userdata));
}

/* No session has got the extents, so none is to unmap them. */
void arena_wake_undo(struct arena *a, bfc_handle handle)
{
        struct bfc_info info;
        size_t last;
        struct arena_slot *first = arena_slot_of(a, arena_slots_of_block(a, handle, &info, &last));
        struct operation *op = first->waking;
        int r;

        first->waking = NULL;
        r = arena_unback(a, &info, op);
        assert(r == 0);
        (void)r;
}

int arena_release_parked(struct arena *a, arena_released_fn done, void *userdata)
{
        int r = 0;

        for (size_t slot = 0; r == 0 && slot < a->slots.n; slot++) {
                const struct arena_slot *s = arena_slot_of(a, slot);

                if (s->extent != LEDGER_NONE && s->is_parked && !s->retired && s->memory.n_bytes > 0)
                        r = arena_release_place(a, slot, slot, release_new(a, 1, done, userdata));
        }
        return r;
}

/* ---- retired extents ---------------------------------------------------------- */

static struct arena_slot *arena_slot_of_extent(const struct arena *a, uint32_t extent)
{
        struct arena_slot *s =
                arena_slot_of(a, arena_slot_at(a, ledger_extent_at(a->o.partition->ledger, extent)->offset));

        assert(s->extent == extent);
        return s;
}

bool arena_extent_is_retired(const struct arena *a, uint32_t extent)
{
        return arena_slot_of_extent(a, extent)->retired != NULL;
}

void arena_note_late_export(struct arena *a, uint32_t extent)
{
        struct arena_slot *s = arena_slot_of_extent(a, extent);

        assert(s->retired);
        if (s->n_late++ == 0)
                a->totals.suspended_bytes -= s->memory.n_bytes;
}

void arena_note_export_gone(struct arena *a, uint32_t extent, bool was_late)
{
        struct arena_slot *s = arena_slot_of_extent(a, extent);
        struct operation *op = s->retired;

        if (!op)
                return;
        assert(s->n_late >= was_late);
        s->n_late -= was_late;
        if (was_late && s->n_late == 0)
                a->totals.suspended_bytes += s->memory.n_bytes;
        if (ledger_extent_at(a->o.partition->ledger, extent)->links.n_exports > 0)
                return;
        assert(s->n_late == 0);
        s->retired = NULL;
        a->totals.suspended_bytes -= s->memory.n_bytes;
        release_add(op, arena_slot_at(a, s->range.begin));
        release_submit(op);
}

/* ---- release: how much -------------------------------------------------------------------- */

uint64_t arena_leaving_bytes(const struct arena *a)
{
        return a->totals.leaving_bytes - a->totals.late_bytes;
}

uint64_t arena_late_bytes(const struct arena *a)
{
        return a->totals.late_bytes;
}

/* ---- growth: on the worker ----------------------------------------------------------- */

/* The kernel may kill this process for lack of memory here. The record tells its successor. */
static void arena_begin_growth(const struct arena *a, uint64_t n_bytes)
{
        if (a->o.partition->device->charges_process)
                ledger_quota_grows(a->o.partition->ledger, a->o.quota, n_bytes, host_free_oom_kills());
}

static void arena_end_growth(const struct arena *a, uint64_t n_bytes)
{
        if (a->o.partition->device->charges_process)
                ledger_quota_has_grown(a->o.partition->ledger, a->o.quota, n_bytes);
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
        for (; op->result == 0 && n > 0; n--)
                op->job.n_left -= op->items[op->n_made++].memory.n_bytes;
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
                arena_end_growth(op->arena, op->n_bytes);
}

/* ---- growth: on the loop --------------------------------------------------------------- */

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
        op->job.n_left = op->n_bytes;
        a->totals.pending_bytes += op->n_bytes;
        worker_submit(a->o.partition->worker, &op->job);
}

/* Fills the slots, or drops them. */
static void growth_finish(struct operation *op)
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

/* A growth that wakes a block has ended. */
static void growth_woken(struct operation *op)
{
        struct arena *a = op->arena;
        struct arena_slot *first = arena_slot_of(a, op->items[0].slot);
        bool is_awake = op->result == 0 && !op->is_dropped;

        /* The undo stays with the block until its contents are back: arena_wake_commit() frees it. */
        first->waking = is_awake ? op->undo : NULL;
        if (!is_awake)
                free(op->undo);
        growth_finish(op);

        /* The growth failed: the block is parked as before, or was freed meanwhile. */
        if (op->result < 0) {
                if (op->is_dropped)
                        arena_drop_parked(a, op->handle);
                op->handle = 0;
                return;
        }

        if (arena_is_single(arena_region_at(a, op->plan.offset)))
                arena_unkeep_exact(a, op->plan.offset);
        arena_count_parked(a, -op->plan.n_bytes);
        a->totals.away_bytes -= op->plan.n_bytes;
        arena_count_block(a, op->plan.offset, op->plan.n_bytes, occupancy_add);
        if (op->is_dropped) {
                (void)arena_dealloc(a, op->handle);
                op->handle = 0;
        }
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

int arena_wake(struct arena *a, bfc_handle handle, struct charge *charge, arena_grown_fn done, void *userdata,
               arena_released_fn undone, void *undone_userdata)
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
                op->undo = release_new(a, last + 1 - first, undone, undone_userdata);
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

/* ---- growth: what is backed in advance ------------------------------------------------- */

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
        arena_end_growth(a, range.end - range.begin);
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
