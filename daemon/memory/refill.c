/* Refills: memory that clients wrote into destroyed extents, through mappings or fds that they kept. The
 * watch finds it. The hole is punched again, and what was found is charged as far as the account has room.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/arena_internal.h"

#include <fcntl.h>
#include <stddef.h>
#include <stdlib.h>

#include "daemon/number.h"

#define MAX_JOBS 16u /* at once: what has to wait is found again by the next look */

/* A hole that is punched again. */
struct refill_job {
        struct worker_job job;
        struct arena *arena;
        struct punch_request punch;
        TAILQ_ENTRY(refill_job) of_arena;
};

/* On the worker. The arena of a test may have no punch. */
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

static void refill_job_done(struct worker_job *job)
{
        struct refill_job *r = (struct refill_job *)job;

        TAILQ_REMOVE(&r->arena->refills.jobs, r, of_arena);
        r->arena->refills.n_jobs--;
        free(r);
}

/* On the punch's thread. */
static void on_refill_punched(struct punch_request *request, int result)
{
        struct refill_job *r =
                (struct refill_job *)(void *)((char *)request - offsetof(struct refill_job, punch));

        (void)result;
        worker_submit(r->arena->o.worker, &r->job);
}

static void arena_punch_again(struct arena *a, int fd, uint64_t n_bytes)
{
        bool is_possible = a->refills.n_jobs < MAX_JOBS && !(a->o.punch && punch_is_stopped(a->o.punch));
        struct refill_job *r = is_possible ? calloc(1, sizeof(*r)) : NULL;

        if (!r)
                return;
        r->arena = a;
        r->job.lane = &a->the_rest;
        r->job.run = refill_job_run;
        r->job.done = refill_job_done;
        r->punch = (struct punch_request){ .fd = fcntl(fd, F_DUPFD_CLOEXEC, 3),
                                           .n_bytes = n_bytes,
                                           .lane = a->o.lane,
                                           .done = on_refill_punched };
        if (r->punch.fd < 0) {
                free(r);
                return;
        }
        TAILQ_INSERT_TAIL(&a->refills.jobs, r, of_arena);
        a->refills.n_jobs++;
        if (a->o.punch)
                punch_submit(a->o.punch, &r->punch);
        else
                worker_submit(a->o.worker, &r->job);
}

/* Where there is no room nothing is charged, but the account's owner is told all the same. */
static void refills_charge(struct arena_refills *f)
{
        uint64_t want = f->owner.n_bytes, have = f->charge.n_bytes, missing;
        struct charge more = { NULL, 0 };

        if (have > want) {
                charge_split(&f->charge, have - want, &more);
                charge_drop(&more);
                return;
        }
        if (!f->account)
                return;
        want = min_u64(want - have, account_room(f->account));
        if (charge_take(f->account, want, &more, &missing) == 0)
                charge_join(&f->charge, &more);
}

static void on_refill(struct watch_owner *o, int fd, uint64_t n_bytes)
{
        struct arena *a = (struct arena *)(void *)((char *)o - offsetof(struct arena, refills.owner));

        if (fd >= 0) {
                a->refills.n++;
                arena_punch_again(a, fd, n_bytes);
        }
        refills_charge(&a->refills);
}

void arena_refills_init(struct arena *a)
{
        TAILQ_INIT(&a->refills.jobs);
        watch_owner_init(&a->refills.owner, on_refill);
}

void arena_drop_refills(struct arena *a)
{
        struct refill_job *r;

        while ((r = TAILQ_FIRST(&a->refills.jobs)))
                refill_job_done(&r->job);
}

uint64_t arena_refilled_bytes(const struct arena *a)
{
        return a->refills.owner.n_bytes;
}

uint64_t arena_n_refills(const struct arena *a)
{
        return a->refills.n;
}
