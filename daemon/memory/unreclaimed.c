/* Memory that the device did not return. It has no extent and stays charged, until the device says that it
 * was returned.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/arena_internal.h"

#include "daemon/number.h"

void arena_note_unreclaimed(struct arena *a, struct charge *charge)
{
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

        u->result = device_foreign_bytes(u->arena->o.device, &u->foreign_bytes);
}

static void unreclaimed_drop(struct arena_unreclaimed *u, uint64_t n_bytes)
{
        struct charge back;

        charge_split(&u->charge, min_u64(n_bytes, u->charge.n_bytes), &back);
        charge_drop(&back);
}

/* Of what was unreclaimed when the device was asked, no more can still be than all others have there. What
 * became unreclaimed later may not be in that sum, so it does not count here. Contexts and foreign
 * processes only make the answer larger: the charge then stays higher than it must. */
static void question_done(struct worker_job *job)
{
        struct arena_unreclaimed *u = (struct arena_unreclaimed *)job;

        u->is_asked = false;
        if (u->charge.n_bytes == 0)
                return;
        u->confirmed_bytes = u->asked_bytes;
        account_note_change(u->charge.account);
        if (u->result < 0 || u->foreign_bytes >= u->asked_bytes)
                return;
        u->confirmed_bytes = u->foreign_bytes;
        unreclaimed_drop(u, u->asked_bytes - u->foreign_bytes);
}

void arena_check_unreclaimed(struct arena *a)
{
        struct arena_unreclaimed *u = &a->unreclaimed;

        if (u->is_asked || u->charge.n_bytes == 0)
                return;
        u->arena = a;
        u->asked_bytes = u->charge.n_bytes;
        u->is_asked = true;
        u->job.lane = &a->the_rest;
        u->job.run = question_run;
        u->job.done = question_done;
        worker_submit(a->o.worker, &u->job);
}

void arena_recover(struct arena *a, uint64_t n_bytes)
{
        a->is_lost = false;
        if (a->unreclaimed.charge.n_bytes > n_bytes)
                unreclaimed_drop(&a->unreclaimed, a->unreclaimed.charge.n_bytes - n_bytes);
}

uint64_t arena_unreclaimed_bytes(const struct arena *a)
{
        return a->unreclaimed.charge.n_bytes;
}

uint64_t arena_confirmed_unreclaimed_bytes(const struct arena *a)
{
        return min_u64(a->unreclaimed.confirmed_bytes, a->unreclaimed.charge.n_bytes);
}
