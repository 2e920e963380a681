/* The worker; see worker.h. Two singly linked queues under one mutex.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/worker.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>

struct job_queue {
        struct worker_job *first;
        struct worker_job **last; /* where the next one is hung */
};

struct worker {
        void (*notify)(void *userdata);
        void *userdata;
        bool threaded;
        bool stop;
        size_t n_pending; /* the loop's */
        pthread_t thread;
        pthread_mutex_t mutex; /* guards the queues and stop */
        pthread_cond_t wake;   /* for the thread: waiting has a job, or stop */
        pthread_cond_t ready;  /* for worker_drain(): finished has a job */
        struct job_queue waiting;
        struct job_queue finished;
};

static void job_queue_init(struct job_queue *q)
{
        q->first = NULL;
        q->last = &q->first;
}

static void job_queue_push(struct job_queue *q, struct worker_job *job)
{
        job->next = NULL;
        *q->last = job;
        q->last = &job->next;
}

static struct worker_job *job_queue_pop(struct job_queue *q)
{
        struct worker_job *job = q->first;

        if (job) {
                q->first = job->next;
                if (!q->first)
                        q->last = &q->first;
        }
        return job;
}

static void *worker_main(void *userdata)
{
        struct worker *w = userdata;

        pthread_mutex_lock(&w->mutex);
        for (;;) {
                struct worker_job *job = job_queue_pop(&w->waiting);

                if (!job) {
                        if (w->stop)
                                break;
                        pthread_cond_wait(&w->wake, &w->mutex);
                        continue;
                }
                pthread_mutex_unlock(&w->mutex);
                job->run(job);
                pthread_mutex_lock(&w->mutex);
                job_queue_push(&w->finished, job);
                pthread_cond_signal(&w->ready);
                if (w->notify)
                        w->notify(w->userdata);
        }
        pthread_mutex_unlock(&w->mutex);
        return NULL;
}

int worker_new_inline(struct worker **ret)
{
        struct worker *w = calloc(1, sizeof(*w));

        if (!w)
                return -ENOMEM;
        job_queue_init(&w->waiting);
        job_queue_init(&w->finished);
        pthread_mutex_init(&w->mutex, NULL);
        pthread_cond_init(&w->wake, NULL);
        pthread_cond_init(&w->ready, NULL);
        *ret = w;
        return 0;
}

int worker_new(void (*notify)(void *userdata), void *userdata, struct worker **ret)
{
        struct worker *w;
        sigset_t all, before;
        int r;

        r = worker_new_inline(&w);
        if (r < 0)
                return r;
        w->notify = notify;
        w->userdata = userdata;
        w->threaded = true;

        /* Signals belong to the loop's thread. */
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        r = -pthread_create(&w->thread, NULL, worker_main, w);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        if (r < 0) {
                w->threaded = false;
                worker_free(w);
                return r;
        }
        *ret = w;
        return 0;
}

struct worker *worker_free(struct worker *w)
{
        if (!w)
                return NULL;
        worker_drain(w);
        if (w->threaded) {
                pthread_mutex_lock(&w->mutex);
                w->stop = true;
                pthread_cond_signal(&w->wake);
                pthread_mutex_unlock(&w->mutex);
                pthread_join(w->thread, NULL);
        }
        pthread_cond_destroy(&w->ready);
        pthread_cond_destroy(&w->wake);
        pthread_mutex_destroy(&w->mutex);
        free(w);
        return NULL;
}

void worker_submit(struct worker *w, struct worker_job *job)
{
        w->n_pending++;
        pthread_mutex_lock(&w->mutex);
        job_queue_push(&w->waiting, job);
        pthread_cond_signal(&w->wake);
        pthread_mutex_unlock(&w->mutex);
}

static struct worker_job *worker_take_finished(struct worker *w)
{
        struct worker_job *job;

        pthread_mutex_lock(&w->mutex);
        job = job_queue_pop(&w->finished);
        pthread_mutex_unlock(&w->mutex);
        return job;
}

size_t worker_poll(struct worker *w)
{
        struct worker_job *job;
        size_t n = 0;

        if (!w->threaded) {
                job = job_queue_pop(&w->waiting);
                if (job) {
                        job->run(job);
                        job_queue_push(&w->finished, job);
                }
        }
        while ((job = worker_take_finished(w))) {
                w->n_pending--;
                job->done(job);
                n++;
        }
        return n;
}

void worker_drain(struct worker *w)
{
        while (w->n_pending > 0) {
                pthread_mutex_lock(&w->mutex);
                while (w->threaded && !w->finished.first)
                        pthread_cond_wait(&w->ready, &w->mutex);
                pthread_mutex_unlock(&w->mutex);
                worker_poll(w);
        }
}

size_t worker_n_pending(const struct worker *w)
{
        return w->n_pending;
}
