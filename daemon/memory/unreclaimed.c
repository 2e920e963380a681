/* Memory that the device did not return. It stays charged until the device says that it was returned. Of the host's
 * memory the daemon keeps the extents, and looks at each again; that of a GPU has no extent any more.
 *
 * Direct charges end with their process, whose memory the driver returns then, unless another process has
 * it, too. The device tells only sums. So what others use beside direct charges and unreclaimed memory is sampled while
 * processes charge, and if it is more after the end of a process than in all samples, the difference is unreclaimed.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/arena_internal.h"

#include <errno.h>

#include "daemon/base/clock.h"
#include "daemon/base/number.h"

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

void arena_note_unreclaimed_items(struct operation *op)
{
        for (size_t i = 0; i < op->n_items; i++) {
                struct charge charge;

                if (!op->items[i].unreclaimed)
                        continue;
                charge_split(&op->charge, arena_slot_bytes(op->arena, op->items[i].slot), &charge);
                arena_note_unreclaimed(op->arena, &charge);
        }
}

/* On the worker. */
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

void arena_note_foreign(struct arena *a, uint64_t n_bytes)
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
