/* What every Check program shares: TAP on standard output, a teardown that finds
 * leaked fds, and a choice of tests by the environment.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 *   BFC_TEST_LIST=1     prints "# test NAME" for each test, and runs none
 *   BFC_TEST_ONLY=NAME  runs that test alone, with every index of a loop test
 *   BFC_TEST_LONG=1     random walks and the like take all their steps, as in the nightly run */
#ifndef BFC_TESTS_SUITE_H
#define BFC_TESTS_SUITE_H

#include <check.h>
#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define KIB (UINT64_C(1) << 10)
#define MIB (UINT64_C(1) << 20)
#define GIB (UINT64_C(1) << 30)

/* Check writes a message to its parent for every assertion that holds, which takes more time than most tests. */
#undef _mark_point
#define _mark_point(file, line) ((void)0)

static inline bool suite_is_long(void)
{
        return getenv("BFC_TEST_LONG") != NULL;
}

/* Steps of a random walk that takes n in the nightly run. */
static inline unsigned suite_steps(unsigned n)
{
        return suite_is_long() ? n : n / 10;
}

static inline void suite_add_test(TCase *tcase, const TTest *test, int from, int to)
{
        const char *only = getenv("BFC_TEST_ONLY");

        if (getenv("BFC_TEST_LIST"))
                printf("# test %s\n", test->name);
        else if (!only || strcmp(only, test->name) == 0)
                tcase_add_loop_test_raise_signal(tcase, test, 0, from, to);
}

/* Seconds that a test may take. It only ends what hangs: a loaded machine is many times slower than a quiet
 * one. A program may have more, not less. */
#ifndef SUITE_TIMEOUT
#define SUITE_TIMEOUT 600.0
#endif

/* Waits for the end of a thread for two minutes: one that was not woken fails the test before the test's time is over. */
static inline void suite_join(pthread_t thread, void **ret)
{
        struct timespec until;

        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_sec += 120;
        ck_assert_msg(pthread_timedjoin_np(thread, ret, &until) == 0, "a thread does not end");
}

static inline void suite_set_timeout(TCase *tcase, double seconds)
{
        tcase_set_timeout(tcase, seconds < SUITE_TIMEOUT ? SUITE_TIMEOUT : seconds);
}

/* Check's handler passes a SIGTERM on to all processes of the test. A child that gets one before it calls exec() has
 * inherited the handler. */
static inline void suite_forget_handlers(void)
{
        signal(SIGTERM, SIG_DFL);
        signal(SIGINT, SIG_DFL);
}

static inline TCase *suite_create_case(const char *name)
{
        TCase *tcase = tcase_create(name);

        suite_set_timeout(tcase, 0);
        tcase_add_checked_fixture(tcase, suite_forget_handlers, NULL);
        return tcase;
}
#define tcase_create      suite_create_case
#define tcase_set_timeout suite_set_timeout
#undef tcase_add_test
#undef tcase_add_loop_test
#define tcase_add_test(tcase, test)                suite_add_test(tcase, test, 0, 1)
#define tcase_add_loop_test(tcase, test, from, to) suite_add_test(tcase, test, from, to)

/* Open fds of this process, without the one that looks. A test that links the
 * daemon's closer waits for its threads first. */
size_t closer_n_waiting(void) __attribute__((weak));
size_t closer_n_busy(void) __attribute__((weak));
/* The child that reads command lines: see ctl/cmdline.h. */
void cmdline_stop(void) __attribute__((weak));

static inline int suite_count_fds(void)
{
        DIR *d;
        int n = 0;

        if (cmdline_stop)
                cmdline_stop();
        while (closer_n_waiting && (closer_n_waiting() > 0 || closer_n_busy() > 0))
                usleep(100);
        d = opendir("/proc/self/fd");
        if (!d)
                return -1;
        while (readdir(d))
                n++;
        closedir(d);
        return n - 3; /* ".", "..", the folder itself */
}

/* Where NVML's pids are those that a process knows. */
static inline bool suite_has_initial_pids(void)
{
        struct stat st;

        return stat("/proc/self/ns/pid", &st) == 0 && st.st_ino == 0xEFFFFFFCu;
}

/* Around each test of suite_main(), outside of its fixture. */
int suite_n_fds_before __attribute__((weak));

static inline void suite_remember_fds(void)
{
        suite_n_fds_before = suite_count_fds();
}

static inline void suite_assert_fds(void)
{
        ck_assert_int_eq(suite_count_fds(), suite_n_fds_before);
}

/* ---- tests that register themselves ---- */

/* One TCase. */
struct suite_fixture {
        const char *name;
        void (*setup)(void), (*teardown)(void);
        const char *file;
        int line;
        TCase *tcase;
        struct suite_fixture *next;
};

struct suite_test {
        TTest test;
        struct suite_fixture *fixture; /* NULL: the last one above it */
        int (*count)(void);
        struct suite_test *next;
};

/* Of all files of a program, in the order of their definitions. */
struct suite_test *suite_first_test __attribute__((weak));
struct suite_test **suite_last_test __attribute__((weak));

struct suite_fixture *suite_fixtures __attribute__((weak));

static inline void suite_register(struct suite_test *t, struct suite_fixture *fixture)
{
        t->fixture = fixture;
        if (!suite_last_test)
                suite_last_test = &suite_first_test;
        *suite_last_test = t;
        suite_last_test = &t->next;
}

/* The tests below it run between these functions; either may be NULL. */
#define FIXTURE(id, setup_function, teardown_function)                                                       \
        static struct suite_fixture suite_fixture_##id = { .name = #id,                                      \
                                                           .setup = setup_function,                          \
                                                           .teardown = teardown_function,                    \
                                                           .file = __FILE__,                                 \
                                                           .line = __LINE__ };                               \
        __attribute__((constructor)) static void suite_fixture_##id##_register(void)                         \
        {                                                                                                    \
                suite_fixture_##id.next = suite_fixtures;                                                    \
                suite_fixtures = &suite_fixture_##id;                                                        \
        }                                                                                                    \
        struct suite_end_of_fixture

#define SUITE_TEST(id, n_loops, its_fixture)                                                                 \
        static void id##_fn(int _i);                                                                         \
        static int id##_count(void)                                                                          \
        {                                                                                                    \
                return (int)(n_loops);                                                                       \
        }                                                                                                    \
        __attribute__((constructor)) static void id##_register(void)                                         \
        {                                                                                                    \
                static struct suite_test t = { .test = { #id, id##_fn, __FILE__, __LINE__ },                 \
                                               .count = id##_count };                                        \
                                                                                                             \
                suite_register(&t, its_fixture);                                                             \
        }                                                                                                    \
        static void id##_fn(int _i __attribute__((unused)))

/* TEST(name) { ... }: a test. It needs no entry in a list. The _OF forms take the fixture of that name in
 * place of the last one above them. A loop test runs n times, with _i from 0 on. n is computed when the
 * suite is made; 0 where a machine lacks something. */
#define TEST(id)                     SUITE_TEST(id, 1, NULL)
#define TEST_OF(fixture, id)         SUITE_TEST(id, 1, &suite_fixture_##fixture)
#define LOOP_TEST(id, n)             SUITE_TEST(id, n, NULL)
#define LOOP_TEST_OF(fixture, id, n) SUITE_TEST(id, n, &suite_fixture_##fixture)

/* Runs the suite; the exit status for main(). */
static inline int suite_run(Suite *suite)
{
        SRunner *runner = srunner_create(suite);
        int n_failed;

        srunner_set_tap(runner, "-");
        srunner_run_all(runner, CK_SILENT);
        n_failed = srunner_ntests_failed(runner);
        srunner_free(runner);
        return n_failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

/* By lines: compilers may run the constructors of a file in another order. NULL: there is none above. */
static inline struct suite_fixture *suite_fixture_of(const struct suite_test *t)
{
        struct suite_fixture *last = t->fixture;

        if (last)
                return last;
        for (struct suite_fixture *f = suite_fixtures; f; f = f->next)
                if (strcmp(f->file, t->test.file) == 0 && f->line < t->test.line &&
                    (!last || f->line > last->line))
                        last = f;
        return last;
}

/* A suite of all tests that are registered. finds_fds: a test that leaves an fd open fails. timeout: seconds
 * of each test. setup and teardown, which may be NULL, are those of the tests without a FIXTURE. */
static inline Suite *suite_make(const char *name, bool finds_fds, double timeout, void (*setup)(void),
                                void (*teardown)(void))
{
        static struct suite_fixture none;
        Suite *suite = suite_create(name);

        none = (struct suite_fixture){ .name = name, .setup = setup, .teardown = teardown };
        for (struct suite_test *t = suite_first_test; t; t = t->next) {
                struct suite_fixture *f = suite_fixture_of(t);

                if (!f)
                        f = &none;
                if (!f->tcase) {
                        f->tcase = tcase_create(f->name);
                        tcase_set_timeout(f->tcase, timeout);
                        if (finds_fds)
                                tcase_add_checked_fixture(f->tcase, suite_remember_fds, suite_assert_fds);
                        tcase_add_checked_fixture(f->tcase, f->setup, f->teardown);
                        suite_add_tcase(suite, f->tcase);
                }
                suite_add_test(f->tcase, &t->test, 0, t->count());
        }
        return suite;
}

#define suite_of_tests(name, timeout, setup, teardown) suite_make(name, false, timeout, setup, teardown)

/* Runs all tests that are registered, and finds leaked fds; the exit status for main(). A program without a
 * main() has one that calls this (suite.c). */
static inline int suite_main(const char *name)
{
        return suite_run(suite_make(name, true, 0, NULL, NULL));
}

/* The name of a program without "test_": of its suite. */
static inline const char *suite_name(void)
{
        const char *name = program_invocation_short_name;

        return strncmp(name, "test_", 5) == 0 ? name + 5 : name;
}

#endif
