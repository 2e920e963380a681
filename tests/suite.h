/* What every Check program shares: TAP on standard output, and a teardown that
 * finds leaked fds.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_SUITE_H
#define BFC_TESTS_SUITE_H

#include <check.h>
#include <dirent.h>
#include <stdlib.h>

/* Open fds of this process, without the one that looks. */
static inline int suite_count_fds(void)
{
        DIR *d = opendir("/proc/self/fd");
        int n = 0;

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
