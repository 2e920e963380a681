/* Ancestors of processes that exit, change, or cannot be read.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/base/process.h"

#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/suite.h"

static char proc[] = "/tmp/bfcd-proc-XXXXXX";

static void setup(void)
{
        strcpy(proc + strlen(proc) - 6, "XXXXXX");
        ck_assert_ptr_nonnull(mkdtemp(proc));
}

static void teardown(void)
{
        char command[64];

        snprintf(command, sizeof(command), "rm -r %s", proc);
        ck_assert_int_eq(system(command), 0);
}

FIXTURE(ancestors, setup, teardown);

static void add(int pid, int parent, unsigned start_time)
{
        char path[128];
        FILE *f;

        snprintf(path, sizeof(path), "%s/%d", proc, pid);
        ck_assert_int_eq(mkdir(path, 0700), 0);
        strcat(path, "/task");
        ck_assert_int_eq(mkdir(path, 0700), 0);
        snprintf(path + strlen(path), sizeof(path) - strlen(path), "/%d", pid);
        ck_assert_int_eq(mkdir(path, 0700), 0);
        strcat(path, "/stat");
        f = fopen(path, "w");
        ck_assert_ptr_nonnull(f);
        fprintf(f, "%d (a) b) S %d 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 1 0 %u 0\n", pid, parent, start_time);
        fclose(f);
}

TEST_OF(ancestors, the_top_has_no_parent)
{
        struct process list[3];

        add(1, 0, 5);
        add(8, 1, 5);
        add(9, 8, 7);
        ck_assert_int_eq(process_ancestors(proc, 9, 0, list, 3), 3);
        ck_assert_int_eq(list[0].pid, 9);
        ck_assert_int_eq(list[2].pid, 1);
        ck_assert_int_eq(process_ancestors(proc, 9, 0, list, 2), -ELOOP);
        ck_assert_int_eq(process_ancestors(proc, 10, 0, list, 3), -ESRCH);
        ck_assert_int_eq(process_ancestors(proc, 0, 0, list, 3), -ESRCH);
}

TEST_OF(ancestors, a_missing_ancestor_is_not_the_top)
{
        struct process list[8];

        add(8, 7, 5);
        add(9, 8, 7);
        ck_assert_int_eq(process_ancestors(proc, 9, 0, list, 8), -EAGAIN);
}

/* The pid of a parent that exited was used again. */
TEST_OF(ancestors, a_parent_is_not_younger)
{
        struct process list[8];

        add(1, 0, 1);
        add(8, 1, 8);
        add(9, 8, 7);
        ck_assert_int_eq(process_ancestors(proc, 9, 0, list, 8), -EAGAIN);
}

/* All further ones are older, so it is not looked at. */
TEST_OF(ancestors, it_ends_with_the_first_that_is_too_old)
{
        struct process list[3];

        add(7, 6, 4); /* its parent cannot be read */
        add(8, 7, 5);
        add(9, 8, 7);
        ck_assert_int_eq(process_ancestors(proc, 9, 5, list, 3), 3);
        ck_assert_int_eq(list[2].pid, 7);
        ck_assert_int_eq(process_ancestors(proc, 9, 6, list, 3), 2);
        ck_assert_int_eq(process_ancestors(proc, 9, UINT64_MAX, list, 3), 1);
        ck_assert_int_eq(process_ancestors(proc, 9, 4, list, 4), -EAGAIN);
}

enum { N_CHAIN = 40, N_ROUNDS = 60 };
static volatile pid_t *chain; /* shared; the leaf last */

static void be_chain(void)
{
        signal(SIGCHLD, SIG_IGN); /* no zombies */
        for (unsigned i = 0; i < N_CHAIN; i++) {
                pid_t child = i + 1 < N_CHAIN ? fork() : -1;

                if (child != 0) {
                        chain[i] = getpid();
                        for (;;)
                                pause();
                }
        }
}

static pid_t fork_chain(void)
{
        pid_t first;

        memset((void *)(uintptr_t)chain, 0, N_CHAIN * sizeof(*chain));
        first = fork();
        if (first == 0)
                be_chain();
        for (unsigned i = 0; i < N_CHAIN; i++)
                while (chain[i] == 0)
                        usleep(100);
        return chain[N_CHAIN - 1];
}

/* Kills the nearest ancestors of the leaf first, while this process looks for itself among them. */
TEST(ancestors_that_are_killed_hide_no_others)
{
        chain = mmap(NULL, N_CHAIN * sizeof(*chain), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
                     0);
        ck_assert_ptr_ne((void *)(uintptr_t)chain, MAP_FAILED);
        ck_assert_int_eq(prctl(PR_SET_CHILD_SUBREAPER, 1), 0);
        for (unsigned i = 0; i < N_ROUNDS; i++) {
                struct process list[N_CHAIN + PROCESS_MAX_ANCESTORS];
                pid_t leaf = fork_chain(), killer = fork();
                bool is_found = false;
                int n;

                if (killer == 0) {
                        usleep(10 * i);
                        for (unsigned k = N_CHAIN - 1; k-- > 0;)
                                kill(chain[k], SIGKILL);
                        _exit(0);
                }
                do {
                        n = process_ancestors("/proc", leaf, 0, list, N_CHAIN + PROCESS_MAX_ANCESTORS);
                        is_found = n == -EAGAIN;
                        for (int k = 0; k < n; k++)
                                is_found |= list[k].pid == getpid();
                        ck_assert_msg(is_found, "round %u: %d ancestors", i, n);
                } while (kill(killer, 0) == 0 && waitpid(killer, NULL, WNOHANG) == 0);
                kill(leaf, SIGKILL);
                while (wait(NULL) > 0)
                        ;
        }
        ck_assert_int_eq(prctl(PR_SET_CHILD_SUBREAPER, 0), 0);
        munmap((void *)(uintptr_t)chain, N_CHAIN * sizeof(*chain));
}
