/* A child that is killed at a random moment.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_KILLED_H
#define BFC_TESTS_KILLED_H

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tests/suite.h"

/* The child calls act(userdata), which does not return, and is killed so long after it began. */
static inline void run_and_kill(void (*act)(void *userdata), void *userdata, long delay_ns)
{
        struct timespec delay = { .tv_nsec = delay_ns };
        int started[2], status;
        pid_t pid;
        char c;

        ck_assert_int_eq(pipe2(started, O_CLOEXEC), 0);
        pid = fork();
        if (pid == 0) {
                alarm(20); /* should the parent die first */
                if (write(started[1], "x", 1) == 1)
                        act(userdata);
                _exit(1);
        }
        ck_assert_int_gt(pid, 0);
        close(started[1]);
        ck_assert_int_eq(read(started[0], &c, 1), 1);
        close(started[0]);
        nanosleep(&delay, NULL);
        ck_assert_int_eq(kill(pid, SIGKILL), 0);
        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        ck_assert(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

#endif
