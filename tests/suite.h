/* What every Check program shares: TAP on standard output, a teardown that finds
 * leaked fds, and a choice of tests by the environment.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 *   BFC_TEST_LIST=1     prints "# test NAME" for each test, and runs none
 *   BFC_TEST_ONLY=NAME  runs that test alone, with every index of a loop test */
#ifndef BFC_TESTS_SUITE_H
#define BFC_TESTS_SUITE_H

#include <check.h>
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static inline void suite_add_test(TCase *tcase, const TTest *test, int from, int to)
{
        const char *only = getenv("BFC_TEST_ONLY");

        if (getenv("BFC_TEST_LIST"))
                printf("# test %s\n", test->name);
        else if (!only || strcmp(only, test->name) == 0)
                tcase_add_loop_test_raise_signal(tcase, test, 0, from, to);
}

/* Seconds that a test may take. It only ends what hangs: a loaded machine is many times slower than a quiet
 * one. A case may have more, not less. */
#define SUITE_TIMEOUT 600.0

static inline void suite_set_timeout(TCase *tcase, double seconds)
{
        tcase_set_timeout(tcase, seconds < SUITE_TIMEOUT ? SUITE_TIMEOUT : seconds);
}

static inline TCase *suite_create_case(const char *name)
{
        TCase *tcase = tcase_create(name);

        suite_set_timeout(tcase, 0);
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

static inline int suite_count_fds(void)
{
        DIR *d;
        int n = 0;

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

#endif
