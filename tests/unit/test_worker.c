/* Workers: each job runs once and is done once, in order, and done() belongs to
 * the thread that polls.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/worker.h"

#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "tests/suite.h"

#define N_JOBS 100u

struct step {
        struct worker_job job; /* first: it is one */
        unsigned number;
        pthread_t ran_on;
        unsigned n_runs;
        unsigned n_dones;
        sem_t *gate;           /* run() waits for it; NULL: it does not */
        struct step *follower; /* what done() submits; NULL: nothing */
};

static struct worker *w;
static struct step steps[N_JOBS];
static unsigned ran[2 * N_JOBS], done[2 * N_JOBS];
static unsigned n_ran, n_done; /* n_ran: the worker's; read only after done() */
static pthread_t polled_by;
static atomic_uint n_notified;
static sem_t notified;
static pthread_t notified_on;

static void step_run(struct worker_job *job)
{
        struct step *s = (struct step *)job;

        if (s->gate)
                sem_wait(s->gate);
        s->ran_on = pthread_self();
        s->n_runs++;
        ran[n_ran++] = s->number;
}

static void step_done(struct worker_job *job)
{
        struct step *s = (struct step *)job;

        ck_assert_uint_eq(s->n_runs, 1);
        ck_assert(pthread_equal(pthread_self(), polled_by));
        s->n_dones++;
        done[n_done++] = s->number;
        if (s->follower)
                worker_submit(w, &s->follower->job);
}

static void on_notify(void *userdata)
{
        ck_assert_ptr_eq(userdata, &n_notified);
        notified_on = pthread_self();
        atomic_fetch_add(&n_notified, 1);
        sem_post(&notified);
}

static void setup(void)
{
        memset(steps, 0, sizeof(steps));
        for (unsigned i = 0; i < N_JOBS; i++) {
                steps[i].job.run = step_run;
                steps[i].job.done = step_done;
                steps[i].number = i;
        }
        n_ran = n_done = 0;
        atomic_store(&n_notified, 0);
        sem_init(&notified, 0, 0);
        polled_by = pthread_self();
}

static void teardown(void)
{
        w = worker_free(w);
        ck_assert_ptr_null(worker_free(NULL));
        sem_destroy(&notified);
}

FIXTURE(worker, setup, teardown);

static void assert_all_in_order(unsigned n)
{
        ck_assert_uint_eq(n_ran, n);
        ck_assert_uint_eq(n_done, n);
        for (unsigned i = 0; i < n; i++) {
                ck_assert_uint_eq(ran[i], i);
                ck_assert_uint_eq(done[i], i);
                ck_assert_uint_eq(steps[i].n_runs, 1);
                ck_assert_uint_eq(steps[i].n_dones, 1);
        }
}

TEST(test_order)
{
        ck_assert_int_eq(worker_new(1, on_notify, &n_notified, &w), 0);
        for (unsigned i = 0; i < N_JOBS; i++)
                worker_submit(w, &steps[i].job);
        ck_assert_uint_eq(worker_n_pending(w), N_JOBS);
        for (unsigned i = 0; i < N_JOBS; i++)
                sem_wait(&notified);
        /* All have run; none is done before somebody polls. */
        ck_assert_uint_eq(n_done, 0);
        ck_assert_uint_eq(worker_n_pending(w), N_JOBS);
        ck_assert_uint_eq(worker_poll(w), N_JOBS);
        assert_all_in_order(N_JOBS);
        for (unsigned i = 0; i < N_JOBS; i++) {
                ck_assert(!pthread_equal(steps[i].ran_on, pthread_self()));
                ck_assert(pthread_equal(steps[i].ran_on, steps[0].ran_on));
        }
        ck_assert_uint_eq(worker_n_pending(w), 0);
        ck_assert_uint_eq(worker_poll(w), 0);
}

TEST(test_notify)
{
        sem_t gate;

        sem_init(&gate, 0, 0);
        steps[1].gate = &gate;
        ck_assert_int_eq(worker_new(1, on_notify, &n_notified, &w), 0);
        worker_submit(w, &steps[0].job);
        worker_submit(w, &steps[1].job);
        sem_wait(&notified);
        ck_assert(pthread_equal(notified_on, steps[0].ran_on));
        ck_assert(!pthread_equal(notified_on, pthread_self()));
        /* The second still runs: the first does not wait for it. */
        ck_assert_uint_eq(worker_poll(w), 1);
        ck_assert_uint_eq(atomic_load(&n_notified), 1);
        ck_assert_uint_eq(worker_n_pending(w), 1);
        ck_assert_uint_eq(worker_poll(w), 0);
        sem_post(&gate);
        sem_wait(&notified);
        ck_assert_uint_eq(worker_poll(w), 1);
        ck_assert_uint_eq(atomic_load(&n_notified), 2);
        assert_all_in_order(2);
        sem_destroy(&gate);
}

/* Each job is submitted by the one before it. */
static void chain(void)
{
        for (unsigned i = 0; i + 1 < N_JOBS; i++)
                steps[i].follower = &steps[i + 1];
        worker_submit(w, &steps[0].job);
}

TEST(test_drain)
{
        ck_assert_int_eq(worker_new(1, NULL, NULL, &w), 0);
        worker_drain(w); /* nothing to wait for */
        chain();
        worker_drain(w);
        assert_all_in_order(N_JOBS);
        ck_assert_uint_eq(worker_n_pending(w), 0);
}

TEST(test_free_with_jobs_queued)
{
        ck_assert_int_eq(worker_new(1, on_notify, &n_notified, &w), 0);
        for (unsigned i = 0; i < N_JOBS; i++)
                worker_submit(w, &steps[i].job);
        w = worker_free(w);
        assert_all_in_order(N_JOBS);
}

TEST(test_free_with_a_chain)
{
        ck_assert_int_eq(worker_new(1, NULL, NULL, &w), 0);
        chain();
        worker_free(w); /* w is what done() submits to until it returns */
        w = NULL;
        assert_all_in_order(N_JOBS);
}

/* ---- lanes ------------------------------------------------------------------ */

/* Jobs in pieces; a piece says what it is in `ran`. */
struct pieces {
        struct worker_job job; /* first: it is one */
        unsigned number;
        unsigned n_pieces;     /* still to be run */
        sem_t *arrived, *gate; /* each piece posts the one and waits for the other; NULL: it does not */
        atomic_bool *until;    /* more pieces come until this is true; NULL: n_pieces says it */
        atomic_bool is_done;
};

static struct worker_lane lanes[3];
static struct pieces work[3];
static sem_t arrived, gate;
static pthread_mutex_t ran_mutex = PTHREAD_MUTEX_INITIALIZER;

static void pieces_run(struct worker_job *job)
{
        struct pieces *p = (struct pieces *)job;

        if (p->gate) {
                sem_post(p->arrived);
                sem_wait(p->gate);
        }
        pthread_mutex_lock(&ran_mutex);
        if (n_ran < sizeof(ran) / sizeof(ran[0]))
                ran[n_ran++] = p->number;
        pthread_mutex_unlock(&ran_mutex);
        p->n_pieces -= p->n_pieces > 0;
        job->goes_on = p->until ? !atomic_load(p->until) : p->n_pieces > 0;
}

static void pieces_done(struct worker_job *job)
{
        struct pieces *p = (struct pieces *)job;

        ck_assert(!p->is_done);
        atomic_store(&p->is_done, true);
        done[n_done++] = p->number;
}

/* One in each lane; the first waits for the gate at each of its pieces. */
static void setup_lanes(void)
{
        setup();
        memset(lanes, 0, sizeof(lanes));
        memset(work, 0, sizeof(work));
        sem_init(&arrived, 0, 0);
        sem_init(&gate, 0, 0);
        for (unsigned i = 0; i < 3; i++) {
                work[i].job.run = pieces_run;
                work[i].job.done = pieces_done;
                work[i].job.lane = &lanes[i];
                work[i].number = i;
                work[i].n_pieces = 1;
        }
        work[0].arrived = &arrived;
        work[0].gate = &gate;
}

static void teardown_lanes(void)
{
        teardown();
        sem_destroy(&arrived);
        sem_destroy(&gate);
}

static void poll_until(unsigned n)
{
        while (n_done < n) {
                sem_wait(&notified);
                (void)worker_poll(w);
        }
}

FIXTURE(lanes, setup_lanes, teardown_lanes);

/* A job of one piece waits for one piece of a long one, not for all. */
TEST(test_turns)
{
        ck_assert_int_eq(worker_new(1, on_notify, &n_notified, &w), 0);
        work[0].n_pieces = 50;
        worker_submit(w, &work[0].job);
        sem_wait(&arrived);
        worker_submit(w, &work[1].job);
        worker_submit(w, &work[2].job);
        sem_post(&gate);
        poll_until(2);
        ck_assert(!work[0].is_done);
        ck_assert_uint_eq(done[0], 1);
        ck_assert_uint_eq(done[1], 2);
        for (unsigned i = 0; i < 49; i++)
                sem_post(&gate);
        poll_until(3);
        ck_assert_uint_eq(n_ran, 52);
}

/* The jobs of a lane are run in order, one at a time, also where there is another thread; those of another
 * lane are run beside them. */
TEST(test_two_threads)
{
        ck_assert_int_eq(worker_new(2, on_notify, &n_notified, &w), 0);
        work[1].job.lane = &lanes[0];
        worker_submit(w, &work[0].job);
        sem_wait(&arrived);
        worker_submit(w, &work[1].job);
        worker_submit(w, &work[2].job);
        poll_until(1);
        ck_assert_uint_eq(done[0], 2); /* while the first one is still run */
        ck_assert_uint_eq(worker_n_pending(w), 2);
        sem_post(&gate);
        poll_until(3);
        ck_assert_uint_eq(ran[1], 0);
        ck_assert_uint_eq(ran[2], 1);
        ck_assert_uint_eq(done[2], 1);
}

/* Jobs that wait for a client's lock: others run meanwhile, however many such jobs there are. Else this test would not end. */
LOOP_TEST(test_held_turns, 2)
{
        enum { N = 12 };
        struct worker_lane held_lanes[N] = { 0 };
        struct pieces held[N] = { 0 };

        ck_assert_int_eq(worker_new((unsigned)_i + 1, on_notify, &n_notified, &w), 0);
        for (unsigned i = 0; i < N; i++) {
                held[i] = work[0];
                held[i].job.lane = &held_lanes[i];
                held[i].job.may_be_held = true;
                held[i].number = 3 + i;
                held[i].n_pieces = 2;
                worker_submit(w, &held[i].job);
        }
        for (unsigned i = 0; i < N; i++)
                sem_wait(&arrived);
        lanes[1].is_waited_for = true;
        lanes[2].is_background = true; /* which waits for none that is held */
        worker_submit(w, &work[1].job);
        poll_until(1);
        worker_submit(w, &work[2].job);
        poll_until(2);
        ck_assert_uint_eq(done[0], 1);
        ck_assert_uint_eq(done[1], 2);
        for (unsigned i = 0; i < 2 * N; i++)
                sem_post(&gate);
        poll_until(2 + N);
        ck_assert_uint_eq(n_ran, 2 + 2 * N);
}

/* What a request waits for goes first, but the other class gets its share: neither can keep the other
 * from its end. */
TEST(test_classes)
{
        ck_assert_int_eq(worker_new(1, on_notify, &n_notified, &w), 0);
        lanes[2].is_waited_for = true;
        worker_submit(w, &work[0].job);
        sem_wait(&arrived);
        worker_submit(w, &work[1].job);
        worker_submit(w, &work[2].job);
        sem_post(&gate);
        poll_until(3);
        ck_assert_uint_eq(done[1], 2);
        ck_assert_uint_eq(done[2], 1);

        for (unsigned endless = 1; endless <= 2; endless++) {
                n_done = 0;
                work[1].until = work[2].until = NULL;
                work[endless].until = &work[3 - endless].is_done;
                atomic_store(&work[1].is_done, false);
                atomic_store(&work[2].is_done, false);
                worker_submit(w, &work[endless].job);
                worker_submit(w, &work[3 - endless].job);
                poll_until(2);
                ck_assert_uint_eq(done[0], 3 - endless);
        }
}

/* A background lane waits for all others, also for one that is between two turns or runs on another thread. */
TEST(test_background)
{
        for (unsigned n_threads = 1; n_threads <= 2; n_threads++) {
                ck_assert_int_eq(worker_new(n_threads, on_notify, &n_notified, &w), 0);
                n_ran = n_done = 0;
                lanes[1].is_background = true;
                work[0].n_pieces = 3;
                work[0].is_done = work[1].is_done = false;
                worker_submit(w, &work[0].job);
                sem_wait(&arrived);
                worker_submit(w, &work[1].job);
                for (unsigned i = 0; i < 3; i++)
                        sem_post(&gate);
                poll_until(2);
                ck_assert_uint_eq(done[0], 0);
                ck_assert_uint_eq(ran[n_ran - 1], 1);
                if (n_threads == 1)
                        w = worker_free(w);
        }
}

/* Where turns are counted: the class that no request waits for has a fifth, and an idle lane saved nothing up. */
TEST(test_shares)
{
        unsigned n_others = 0;

        ck_assert_int_eq(worker_new_inline(&w), 0);
        lanes[0].is_waited_for = lanes[1].is_waited_for = true;
        for (unsigned i = 0; i < N_JOBS; i++)
                steps[i].job.lane = &lanes[i < 60 ? 0 : i < 80 ? 1 : 2];
        for (unsigned i = 0; i < 20; i++) {
                worker_submit(w, &steps[i].job);
                ck_assert_uint_eq(worker_poll(w), 1);
        }
        for (unsigned i = 20; i < N_JOBS; i++)
                worker_submit(w, &steps[i].job);
        for (unsigned i = 0; i < 25; i++) {
                ck_assert_uint_eq(worker_poll(w), 1);
                n_others += done[20 + i] >= 80;
        }
        ck_assert_uint_eq(n_others, 5);
        ck_assert_uint_eq(steps[29].n_dones, 1); /* 10 of each lane */
        ck_assert_uint_eq(steps[30].n_dones, 0);
        ck_assert_uint_eq(steps[69].n_dones, 1);
        ck_assert_uint_eq(steps[70].n_dones, 0);
        worker_drain(w);
        ck_assert_uint_eq(n_done, N_JOBS);
}

/* ---- parallel lanes ------------------------------------------------------------ */

/* Two jobs of one lane are run at the same time: each of these pieces waits for the other's. */
TEST(jobs_of_a_parallel_lane_are_run_beside_each_other)
{
        ck_assert_int_eq(worker_new(2, on_notify, &n_notified, &w), 0);
        lanes[0].is_parallel = true;
        work[1] = work[0];
        work[1].number = 1;
        worker_submit(w, &work[0].job);
        worker_submit(w, &work[1].job);
        sem_wait(&arrived);
        sem_wait(&arrived);
        sem_post(&gate);
        sem_post(&gate);
        poll_until(2);
        ck_assert_uint_eq(n_ran, 2);
}

/* One with less to do does not wait for the rest of the others, and the oldest has every second turn. */
TEST(small_jobs_of_a_parallel_lane_are_first)
{
        const uint64_t n_left[3] = { 50, 10, 2 };

        ck_assert_int_eq(worker_new(1, on_notify, &n_notified, &w), 0);
        lanes[0].is_parallel = true;
        for (unsigned i = 0; i < 3; i++) {
                work[i].job.lane = &lanes[0];
                work[i].n_pieces = (unsigned)n_left[i];
                work[i].job.n_left = n_left[i];
        }
        worker_submit(w, &work[0].job);
        sem_wait(&arrived);
        worker_submit(w, &work[1].job);
        worker_submit(w, &work[2].job);
        for (unsigned i = 0; i < 50; i++)
                sem_post(&gate);
        poll_until(3);
        ck_assert_uint_eq(done[0], 2);
        ck_assert_uint_eq(done[1], 1);
        ck_assert_uint_eq(done[2], 0);
        for (unsigned i = 0, n = 0; i < 24; i++) {
                n += ran[i] == 0;
                ck_assert_uint_le(n, i / 2 + 2);
                ck_assert_uint_ge(n, i / 2);
        }
}

/* However many smaller ones come. */
TEST(small_jobs_of_a_parallel_lane_do_not_starve_a_large_one)
{
        ck_assert_int_eq(worker_new(1, on_notify, &n_notified, &w), 0);
        lanes[0].is_parallel = true;
        work[0].gate = NULL;
        work[1].job.lane = &lanes[0];
        work[0].n_pieces = 100;
        work[0].job.n_left = 100;
        work[1].until = &work[0].is_done; /* has always less to do, and does not end before */
        worker_submit(w, &work[0].job);
        worker_submit(w, &work[1].job);
        poll_until(2);
        ck_assert_uint_eq(done[0], 0);
}

TEST_OF(worker, test_inline)
{
        ck_assert_int_eq(worker_new_inline(&w), 0);
        ck_assert_uint_eq(worker_poll(w), 0);
        for (unsigned i = 0; i < 3; i++)
                worker_submit(w, &steps[i].job);
        ck_assert_uint_eq(n_ran, 0);
        for (unsigned i = 0; i < 3; i++) {
                ck_assert_uint_eq(worker_n_pending(w), 3 - i);
                ck_assert_uint_eq(worker_poll(w), 1); /* one a call */
                ck_assert_uint_eq(n_ran, i + 1);
                ck_assert_uint_eq(n_done, i + 1);
                ck_assert(pthread_equal(steps[i].ran_on, pthread_self()));
        }
        ck_assert_uint_eq(worker_poll(w), 0);
        assert_all_in_order(3);
}

TEST_OF(worker, test_inline_chain)
{
        ck_assert_int_eq(worker_new_inline(&w), 0);
        chain();
        ck_assert_uint_eq(worker_poll(w), 1);
        ck_assert_uint_eq(worker_n_pending(w), 1);
        worker_drain(w);
        assert_all_in_order(N_JOBS);
}

TEST_OF(worker, test_inline_free_with_jobs_queued)
{
        ck_assert_int_eq(worker_new_inline(&w), 0);
        for (unsigned i = 0; i < N_JOBS; i++)
                worker_submit(w, &steps[i].job);
        w = worker_free(w);
        assert_all_in_order(N_JOBS);
}

TEST(test_next_turn)
{
        ck_assert_uint_eq(worker_next_turn(8, 5000000), 8);
        ck_assert_uint_eq(worker_next_turn(8, 4000000), 10);
        ck_assert_uint_eq(worker_next_turn(8, 10000000), 4);
        ck_assert_uint_eq(worker_next_turn(1, 0), 2);
        ck_assert_uint_eq(worker_next_turn(3, 100), 6);
        ck_assert_uint_eq(worker_next_turn(3, UINT64_C(1) << 40), 1);
}

TEST(test_calls)
{
        struct worker_calls calls;
        uint64_t now_ns = clock_ns();

        ck_assert_int_eq(worker_new_inline(&w), 0);
        worker_note_call(NULL, WORKER_MAKES, now_ns, true);
        worker_note_call(w, WORKER_MAKES, now_ns - 2000000, true);
        worker_note_call(w, WORKER_MAKES, now_ns - 1000000000, false);
        worker_count_calls(w, WORKER_MAKES, &calls);
        ck_assert_uint_eq(calls.n, 2);
        ck_assert_uint_eq(calls.n_failed, 1);
        ck_assert_uint_ge(calls.longest_ns, 1000000000);
        ck_assert_uint_ge(calls.ns, calls.longest_ns + 2000000);
        worker_count_calls(w, WORKER_DESTROYS, &calls);
        ck_assert_uint_eq(calls.n + calls.n_failed + calls.ns + calls.longest_ns, 0);
        w = worker_free(w);
}
