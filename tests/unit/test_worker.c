/* Workers: each job runs once and is done once, in order, and done() belongs to
 * the thread that polls.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/worker.h"

#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <string.h>

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
static int n_fds_before;

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
        n_fds_before = suite_count_fds();
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
        ck_assert_int_eq(suite_count_fds(), n_fds_before);
}

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

START_TEST(test_order)
{
        ck_assert_int_eq(worker_new(on_notify, &n_notified, &w), 0);
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
END_TEST

START_TEST(test_notify)
{
        sem_t gate;

        sem_init(&gate, 0, 0);
        steps[1].gate = &gate;
        ck_assert_int_eq(worker_new(on_notify, &n_notified, &w), 0);
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
END_TEST

/* Each job is submitted by the one before it. */
static void chain(void)
{
        for (unsigned i = 0; i + 1 < N_JOBS; i++)
                steps[i].follower = &steps[i + 1];
        worker_submit(w, &steps[0].job);
}

START_TEST(test_drain)
{
        ck_assert_int_eq(worker_new(NULL, NULL, &w), 0);
        worker_drain(w); /* nothing to wait for */
        chain();
        worker_drain(w);
        assert_all_in_order(N_JOBS);
        ck_assert_uint_eq(worker_n_pending(w), 0);
}
END_TEST

START_TEST(test_free_with_jobs_queued)
{
        ck_assert_int_eq(worker_new(on_notify, &n_notified, &w), 0);
        for (unsigned i = 0; i < N_JOBS; i++)
                worker_submit(w, &steps[i].job);
        w = worker_free(w);
        assert_all_in_order(N_JOBS);
}
END_TEST

START_TEST(test_free_with_a_chain)
{
        ck_assert_int_eq(worker_new(NULL, NULL, &w), 0);
        chain();
        worker_free(w); /* w is what done() submits to until it returns */
        w = NULL;
        assert_all_in_order(N_JOBS);
}
END_TEST

START_TEST(test_inline)
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
END_TEST

START_TEST(test_inline_chain)
{
        ck_assert_int_eq(worker_new_inline(&w), 0);
        chain();
        ck_assert_uint_eq(worker_poll(w), 1);
        ck_assert_uint_eq(worker_n_pending(w), 1);
        worker_drain(w);
        assert_all_in_order(N_JOBS);
}
END_TEST

START_TEST(test_inline_free_with_jobs_queued)
{
        ck_assert_int_eq(worker_new_inline(&w), 0);
        for (unsigned i = 0; i < N_JOBS; i++)
                worker_submit(w, &steps[i].job);
        w = worker_free(w);
        assert_all_in_order(N_JOBS);
}
END_TEST

int main(void)
{
        Suite *suite = suite_create("worker");
        TCase *tc = tcase_create("worker");

        tcase_add_checked_fixture(tc, setup, teardown);
        tcase_set_timeout(tc, 30);
        tcase_add_test(tc, test_order);
        tcase_add_test(tc, test_notify);
        tcase_add_test(tc, test_drain);
        tcase_add_test(tc, test_free_with_jobs_queued);
        tcase_add_test(tc, test_free_with_a_chain);
        tcase_add_test(tc, test_inline);
        tcase_add_test(tc, test_inline_chain);
        tcase_add_test(tc, test_inline_free_with_jobs_queued);
        suite_add_tcase(suite, tc);
        return suite_run(suite);
}
