/* A worker makes the slow calls of one device, on one or more threads.
 *
 * The loop submits a job and continues; a thread runs it and wakes the loop, which calls worker_poll() to
 * run the job's done() on the loop's thread. So only run() is executed on another thread.
 *
 * A job belongs to a lane. The jobs of a lane run one at a time, in order, and lanes take turns: the next
 * turn is for the lane that has used the least time. A job that sets goes_on in run() is run again in a
 * later turn of its lane. So work in small pieces delays other lanes by no more than their share and one
 * piece.
 *
 * The jobs of a parallel lane run beside each other, on as many threads as there are. The job with the least work
 * left has the lane's next turn, and the oldest job has every second one. So a small job does not wait for a large
 * one, and a large one is not delayed for ever by small ones.
 *
 * Lanes are of two classes, each with its own turns: lanes that requests wait for, and others, which get
 * at most a fifth of the time while both have jobs. A background lane has turns only while no other lane
 * has a job.
 *
 * A job that may be held, because a client or another device can delay it, delays its own lane only: after 20 ms in one turn another thread
 * takes its place, for up to 64 such turns at once.
 *
 * Invariant: every submitted job is run until it does not go on, and then done once; in the order of
 * submission within a lane that is not parallel.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_WORKER_H
#define BFCD_WORKER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>

/* Embedded in the object of its jobs, which may be freed when they are done. All zero: a new lane that no
 * request waits for. */
struct worker_lane {
        bool is_waited_for; /* this and the next: set before the first job; not both */
        bool is_background;
        bool is_parallel; /* set before the first job; no job of it may be held */
        /* Only the worker uses what follows. */
        struct worker_job *first, *last;
        uint64_t used; /* of the thread's time */
        bool is_held;
        bool oldest_is_next; /* parallel */
        TAILQ_ENTRY(worker_lane) link;
};

/* Embedded in its object; owned by the submitter, who may free it in done(). */
struct worker_job {
        void (*run)(struct worker_job *job);  /* on the worker */
        void (*done)(struct worker_job *job); /* inside worker_poll() */
        struct worker_lane *lane;             /* NULL: the worker's own, that no request waits for */
        bool may_be_held; /* run() waits for locks that a client can hold, or for another device */
        bool goes_on;     /* set by run(): it is to be run again; the worker clears it before each run */
        uint64_t
                n_left; /* in a parallel lane: how much work it has, in the lane's unit; run() may change it */
        /* Only the worker uses what follows. */
        struct worker_job *next;
        bool is_running;
};

struct worker;

/* Starts the threads. notify (may be NULL) is called on a worker's thread
 * after each job: it must only wake the loop. */
int worker_new(unsigned n_threads, void (*notify)(void *userdata), void *userdata, struct worker **ret);

/* A worker without a thread: jobs run inside worker_poll(), one per call, completely. Turns are counted,
 * not timed. For tests and fuzzers, which so control when a device answers. */
int worker_new_inline(struct worker **ret);

/* Drains, ends the threads. Takes NULL. */
struct worker *worker_free(struct worker *w);

/* For a job that does as many parts in a turn as other jobs can wait for: how many the next turn should have, where
 * n parts took so long. At most twice as many, at least one. */
uint64_t worker_next_turn(uint64_t n_parts, uint64_t ns);

/* From any thread. */
void worker_submit(struct worker *w, struct worker_job *job);

/* Calls done() of every job that has run; returns how many. */
size_t worker_poll(struct worker *w);

/* Waits until every job, also those that done() submits, is done. */
void worker_drain(struct worker *w);

/* Calls of the device that take long, made by jobs and for them. */
enum worker_call { WORKER_MAKES, WORKER_DESTROYS, WORKER_CALLS };
struct worker_calls {
        uint64_t n, n_failed;
        uint64_t ns, longest_ns;
};

/* From any thread: such a call, begun then by clock_ns(), has ended. w may be NULL. */
void worker_note_call(struct worker *w, enum worker_call kind, uint64_t begun_ns, bool has_failed);
/* All calls of a kind so far. */
void worker_count_calls(struct worker *w, enum worker_call kind, struct worker_calls *ret);

/* Jobs submitted and not done. */
size_t worker_n_pending(struct worker *w);

#endif
