/* A worker: one thread that makes the slow calls of one device, in order.
 *
 * The loop submits a job and goes on; the worker runs it and wakes the loop,
 * which then calls worker_poll() to have the job's done() run on its own
 * thread. So nothing outside of run() is ever touched by two threads.
 *
 * Invariant: every job submitted is run once and then done once, in order.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_WORKER_H
#define BFCD_WORKER_H

#include <stddef.h>

/* Embedded in what the job is about; owned by the submitter, who may free it in
 * done(). */
struct worker_job {
        void (*run)(struct worker_job *job);  /* on the worker */
        void (*done)(struct worker_job *job); /* inside worker_poll() */
        struct worker_job *next;              /* the worker's */
};

struct worker;

/* Starts the thread. notify (may be NULL) is called on the worker's thread
 * after each job: it must only wake the loop. */
int worker_new(void (*notify)(void *userdata), void *userdata, struct worker **ret);

/* A worker without a thread: jobs run inside worker_poll(), one a call. For
 * tests and fuzzers, which so decide when a device answers. */
int worker_new_inline(struct worker **ret);

/* Drains, ends the thread. Takes NULL. */
struct worker *worker_free(struct worker *w);

void worker_submit(struct worker *w, struct worker_job *job);

/* Calls done() of every job that has run; returns how many. */
size_t worker_poll(struct worker *w);

/* Waits until every job, also those that done() submits, is done. */
void worker_drain(struct worker *w);

/* Jobs submitted and not done. */
size_t worker_n_pending(const struct worker *w);

#endif
