/* The worker; see worker.h.
 *
 * Turns are start-time fair queuing: each lane, and each class, has a sum of the time that it has
 * used, and the lowest sum is next. A lane that had no jobs begins with the sum of the lane that was
 * served last, if its own is lower. So an idle lane saves no turns up, and a lane that was served
 * beyond its share still owes that when it has jobs again.
 *
 * A turn that waits for a client's lock must not take a thread from the others. While a turn of such a job runs, an idle
 * thread watches it, and another one is started where none is idle. After HELD_NS the turn is held: it does not
 * count any more among the n_threads that run at once.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/worker.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>

#include "daemon/base/clock.h"
#include "daemon/base/number.h"

#define MAX_THREADS 4u
#define MAX_HELD    64u
#define HELD_NS     UINT64_C(20000000) /* some turns */
#define OTHERS_COST 4u                 /* their class pays so many times what it uses */
#define TURN_NS     UINT64_C(5000000)

TAILQ_HEAD(lane_list, worker_lane);

/* Lanes with jobs, of those that requests wait for, or of the others. */
struct lane_class {
        struct lane_list lanes;
        uint64_t used;
        uint64_t lane_now; /* the sum of the lane served last, or a higher one before */
};

/* Of a job that may be held. */
struct turn {
        struct worker_lane *lane;
        uint64_t begun_ns;
        TAILQ_ENTRY(turn) link;
};
TAILQ_HEAD(turn_list, turn);

struct worker {
        void (*notify)(void *userdata);
        void *userdata;
        unsigned n_threads;    /* that run at once, without held ones; 0: inline */
        pthread_mutex_t mutex; /* guards what follows, lanes, and jobs that do not run */
        pthread_cond_t wake;   /* for the threads: a lane has a job, a turn is to be watched, or stop */
        pthread_cond_t ready;  /* for worker_drain(): there is a finished job */
        bool stop;
        pthread_t threads[MAX_THREADS + MAX_HELD];
        unsigned n_started, n_running, n_held;
        struct turn_list turns; /* that may become held, the oldest first */
        bool has_watcher;
        _Atomic size_t n_pending;     /* changed under the mutex */
        struct lane_class classes[2]; /* by is_waited_for */
        struct lane_class background;
        uint64_t class_now;
        struct worker_lane own;
        struct worker_job *finished, **last_finished;
        struct worker_calls calls[WORKER_CALLS];
};

/* ---- lanes ------------------------------------------------------------------ */

static void raise_to(uint64_t *n, uint64_t least)
{
        if (*n < least)
                *n = least;
}

static struct lane_class *class_of(struct worker *w, const struct worker_lane *lane)
{
        return lane->is_background ? &w->background : &w->classes[lane->is_waited_for];
}

static void lane_add(struct worker *w, struct worker_lane *lane, struct worker_job *job)
{
        struct lane_class *c = class_of(w, lane);

        job->next = NULL;
        job->is_running = false;
        if (lane->first) {
                lane->last = lane->last->next = job;
                return;
        }
        lane->first = lane->last = job;
        raise_to(&lane->used, c->lane_now);
        if (TAILQ_EMPTY(&c->lanes))
                raise_to(&c->used, w->class_now);
        TAILQ_INSERT_TAIL(&c->lanes, lane, link);
}

static void lane_remove(struct worker_lane *lane, const struct worker_job *job)
{
        struct worker_job **at = &lane->first, *before = NULL;

        while (*at != job) {
                before = *at;
                at = &before->next;
        }
        *at = job->next;
        if (lane->last == job)
                lane->last = before;
}

/* The oldest job that can have a turn; NULL: none can. */
static struct worker_job *lane_oldest(const struct worker_lane *lane)
{
        struct worker_job *job = lane->first;

        while (lane->is_parallel && job && job->is_running) /* at most one for each thread */
                job = job->next;
        return job && !job->is_running ? job : NULL;
}

/* The job that has the lane's next turn. There is one that can have it. */
static struct worker_job *lane_next(struct worker_lane *lane)
{
        struct worker_job *next = lane_oldest(lane);
        bool is_for_oldest = lane->oldest_is_next;

        lane->oldest_is_next = !is_for_oldest;
        if (!lane->is_parallel || is_for_oldest)
                return next;
        for (struct worker_job *job = next->next; job; job = job->next)
                if (!job->is_running && job->n_left < next->n_left)
                        next = job;
        return next;
}

static struct worker_lane *class_next(const struct lane_class *c)
{
        struct worker_lane *lane, *least = NULL;

        TAILQ_FOREACH(lane, &c->lanes, link)
        if (lane_oldest(lane) && (!least || lane->used < least->used))
                least = lane;
        return least;
}

/* A lane that runs is still in its class. */
static bool class_is_idle(const struct lane_class *c)
{
        const struct worker_lane *lane;

        TAILQ_FOREACH(lane, &c->lanes, link)
        if (!lane->is_held)
                return false;
        return true;
}

/* Whose turn it is; NULL: there is nothing to do. */
static struct worker_lane *worker_next(struct worker *w)
{
        struct worker_lane *other = class_next(&w->classes[false]);
        struct worker_lane *lane = class_next(&w->classes[true]);
        struct lane_class *c;

        if (!lane || (other && w->classes[false].used < w->classes[true].used))
                lane = other;
        if (!lane && class_is_idle(&w->classes[false]) && class_is_idle(&w->classes[true]))
                lane = class_next(&w->background);
        if (!lane)
                return NULL;
        c = class_of(w, lane);
        if (!lane->is_background)
                raise_to(&w->class_now, c->used);
        raise_to(&c->lane_now, lane->used);
        return lane;
}

/* After a turn of a job. A class does not pay for the time in which a turn was held. */
static void worker_charge(struct worker *w, struct worker_lane *lane, struct worker_job *job, uint64_t used)
{
        struct lane_class *c = class_of(w, lane);

        lane->used += used;
        used = lane->is_held ? min_u64(used, HELD_NS) : used;
        c->used += lane->is_waited_for ? used : OTHERS_COST * used;
        job->is_running = lane->is_held = false;
        if (job->goes_on)
                return;
        lane_remove(lane, job);
        if (!lane->first)
                TAILQ_REMOVE(&c->lanes, lane, link);
        job->next = NULL;
        *w->last_finished = job;
        w->last_finished = &job->next;
        pthread_cond_signal(&w->ready);
        if (w->notify)
                w->notify(w->userdata);
}

uint64_t worker_next_turn(uint64_t n_parts, uint64_t ns)
{
        return max_u64(1, min_u64(2 * n_parts, n_parts * TURN_NS / max_u64(1, ns)));
}

/* ---- threads ---------------------------------------------------------------- */

static void job_run(struct worker_job *job)
{
        job->goes_on = false;
        job->run(job);
}

static void *worker_main(void *userdata);

/* A failure is tried again with a later turn. */
static int worker_add_thread(struct worker *w)
{
        int r = w->n_started < MAX_THREADS + MAX_HELD
                        ? -pthread_create(&w->threads[w->n_started], NULL, worker_main, w)
                        : -EAGAIN;

        w->n_started += r == 0;
        return r;
}

/* There is a thread that will see when a turn is held. */
static void worker_keep_watcher(struct worker *w)
{
        if (TAILQ_EMPTY(&w->turns) || w->has_watcher)
                return;
        if (w->n_started == w->n_running)
                (void)worker_add_thread(w);
        else
                pthread_cond_signal(&w->wake);
}

static void worker_take_turn(struct worker *w, struct worker_lane *lane)
{
        struct worker_job *job = lane_next(lane);
        struct turn turn = { .lane = lane, .begun_ns = clock_ns() };
        bool may_be_held = job->may_be_held;

        job->is_running = true;
        w->n_running++;
        if (may_be_held)
                TAILQ_INSERT_TAIL(&w->turns, &turn, link);
        worker_keep_watcher(w);
        pthread_mutex_unlock(&w->mutex);
        job_run(job);
        pthread_mutex_lock(&w->mutex);
        w->n_running--;
        w->n_held -= lane->is_held;
        if (may_be_held && !lane->is_held)
                TAILQ_REMOVE(&w->turns, &turn, link);
        worker_charge(w, lane, job, clock_ns() - turn.begun_ns);
}

static void wait_for_ns(struct worker *w, uint64_t ns)
{
        struct timespec until;

        clock_gettime(CLOCK_MONOTONIC, &until);
        ns += (uint64_t)until.tv_nsec;
        until.tv_sec += (time_t)(ns / 1000000000);
        until.tv_nsec = (long)(ns % 1000000000);
        (void)pthread_cond_timedwait(&w->wake, &w->mutex, &until);
}

/* Waits for a turn of its own, and watches the oldest of the others where no thread does. */
static void worker_wait(struct worker *w)
{
        struct turn *oldest = TAILQ_FIRST(&w->turns);
        uint64_t ran_ns = oldest ? clock_ns() - oldest->begun_ns : 0;

        if (!oldest || w->has_watcher) {
                pthread_cond_wait(&w->wake, &w->mutex);
        } else if (ran_ns < HELD_NS) {
                w->has_watcher = true;
                wait_for_ns(w, HELD_NS - ran_ns);
                w->has_watcher = false;
        } else {
                TAILQ_REMOVE(&w->turns, oldest, link);
                oldest->lane->is_held = true;
                w->n_held++;
        }
}

static void *worker_main(void *userdata)
{
        struct worker *w = userdata;

        pthread_mutex_lock(&w->mutex);
        for (;;) {
                bool has_place = w->n_running - w->n_held < w->n_threads;
                struct worker_lane *lane = has_place ? worker_next(w) : NULL;

                if (lane)
                        worker_take_turn(w, lane);
                else if (w->stop)
                        break;
                else
                        worker_wait(w);
        }
        pthread_mutex_unlock(&w->mutex);
        return NULL;
}

/* Its time-outs do not depend on the time of day. */
static void condition_init(pthread_cond_t *condition)
{
        pthread_condattr_t attributes;

        pthread_condattr_init(&attributes);
        pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
        pthread_cond_init(condition, &attributes);
        pthread_condattr_destroy(&attributes);
}

int worker_new_inline(struct worker **ret)
{
        struct worker *w = calloc(1, sizeof(*w));

        if (!w)
                return -ENOMEM;
        TAILQ_INIT(&w->turns);
        TAILQ_INIT(&w->classes[false].lanes);
        TAILQ_INIT(&w->classes[true].lanes);
        TAILQ_INIT(&w->background.lanes);
        w->last_finished = &w->finished;
        pthread_mutex_init(&w->mutex, NULL);
        condition_init(&w->wake);
        pthread_cond_init(&w->ready, NULL);
        *ret = w;
        return 0;
}

static int worker_start(struct worker *w, unsigned n_threads)
{
        sigset_t all, before;
        int r = 0;

        /* Signals belong to the loop's thread. */
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        pthread_mutex_lock(&w->mutex);
        while (r == 0 && w->n_threads < n_threads) {
                r = worker_add_thread(w);
                w->n_threads += r == 0;
        }
        pthread_mutex_unlock(&w->mutex);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        return r;
}

int worker_new(unsigned n_threads, void (*notify)(void *userdata), void *userdata, struct worker **ret)
{
        struct worker *w;
        int r;

        r = n_threads >= 1 && n_threads <= MAX_THREADS ? worker_new_inline(&w) : -EINVAL;
        if (r < 0)
                return r;
        w->notify = notify;
        w->userdata = userdata;
        r = worker_start(w, n_threads);
        if (r < 0) {
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
        pthread_mutex_lock(&w->mutex);
        w->stop = true;
        pthread_cond_broadcast(&w->wake);
        pthread_mutex_unlock(&w->mutex);
        while (w->n_started > 0)
                pthread_join(w->threads[--w->n_started], NULL);
        pthread_cond_destroy(&w->ready);
        pthread_cond_destroy(&w->wake);
        pthread_mutex_destroy(&w->mutex);
        free(w);
        return NULL;
}

void worker_submit(struct worker *w, struct worker_job *job)
{
        pthread_mutex_lock(&w->mutex);
        w->n_pending++;
        lane_add(w, job->lane ? job->lane : &w->own, job);
        pthread_cond_signal(&w->wake);
        pthread_mutex_unlock(&w->mutex);
}

static struct worker_job *worker_take_finished(struct worker *w)
{
        struct worker_job *job;

        pthread_mutex_lock(&w->mutex);
        job = w->finished;
        if (job) {
                w->finished = job->next;
                if (!w->finished)
                        w->last_finished = &w->finished;
                w->n_pending--;
        }
        pthread_mutex_unlock(&w->mutex);
        return job;
}

/* One job, if there is any, on this thread. */
static void worker_run_inline(struct worker *w)
{
        struct worker_lane *lane;
        struct worker_job *job;

        pthread_mutex_lock(&w->mutex);
        lane = worker_next(w);
        job = lane ? lane_next(lane) : NULL;
        pthread_mutex_unlock(&w->mutex);
        if (!job)
                return;
        do
                job_run(job);
        while (job->goes_on);
        pthread_mutex_lock(&w->mutex);
        worker_charge(w, lane, job, 1);
        pthread_mutex_unlock(&w->mutex);
}

size_t worker_poll(struct worker *w)
{
        struct worker_job *job;
        size_t n = 0;

        if (w->n_threads == 0)
                worker_run_inline(w);
        while ((job = worker_take_finished(w))) {
                job->done(job);
                n++;
        }
        return n;
}

void worker_drain(struct worker *w)
{
        while (worker_n_pending(w) > 0) {
                pthread_mutex_lock(&w->mutex);
                while (w->n_threads > 0 && !w->finished)
                        pthread_cond_wait(&w->ready, &w->mutex);
                pthread_mutex_unlock(&w->mutex);
                worker_poll(w);
        }
}

size_t worker_n_pending(struct worker *w)
{
        return w->n_pending;
}

/* ---- calls ------------------------------------------------------------------ */

void worker_note_call(struct worker *w, enum worker_call kind, uint64_t begun_ns, bool has_failed)
{
        uint64_t ns = clock_ns() - begun_ns;
        struct worker_calls *c;

        if (!w)
                return;
        pthread_mutex_lock(&w->mutex);
        c = &w->calls[kind];
        c->n++;
        c->n_failed += has_failed;
        c->ns += ns;
        raise_to(&c->longest_ns, ns);
        pthread_mutex_unlock(&w->mutex);
}

void worker_count_calls(struct worker *w, enum worker_call kind, struct worker_calls *ret)
{
        pthread_mutex_lock(&w->mutex);
        *ret = w->calls[kind];
        pthread_mutex_unlock(&w->mutex);
}
