/* The process of a peer: after a restart of the daemon it is found again by its pid and its start time.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/net/peer_process.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/base/process.h"
#include "tests/suite.h"

static pid_t child;
static struct peer_process found;

static void setup(void)
{
        child = fork();
        if (child == 0) {
                pause();
                _exit(0);
        }
        ck_assert_int_gt(child, 0);
}

static void end_child(void)
{
        if (child <= 0)
                return;
        kill(child, SIGKILL);
        ck_assert_int_eq(waitpid(child, NULL, 0), child);
        child = 0;
}

FIXTURE(peer_process, setup, end_child);

/* As the ledger has it. */
static struct credentials session_of_child(void)
{
        struct credentials who = { .pid = child };
        struct process p;

        ck_assert_int_eq(process_read("/proc", child, &p), 0);
        who.start_time = p.start_time;
        return who;
}

static int find(const struct credentials *who)
{
        found = (struct peer_process){ .pidfd = -1 };
        return peer_process_find(&found, who);
}

TEST(process_of_a_session_is_found)
{
        struct credentials who = session_of_child();
        struct pollfd p = { .events = POLLIN };

        ck_assert_int_eq(find(&who), 0);
        ck_assert(!peer_process_has_exited(&found));
        p.fd = found.pidfd;
        kill(child, SIGKILL);
        ck_assert_int_eq(poll(&p, 1, 60000), 1);
        ck_assert(peer_process_has_exited(&found));
        peer_process_close(&found);
        ck_assert_int_eq(found.pidfd, -1);
}

/* A session of which the start time is not known. */
TEST(process_is_found_by_its_pid_alone)
{
        const struct credentials who = { .pid = child };

        ck_assert_int_eq(find(&who), 0);
        ck_assert_int_ge(found.pidfd, 0);
        peer_process_close(&found);
}

/* The session's process has exited, and its pid is another one's. That began later; an earlier one is none of the
 * session's either. _i: by how much, in ticks of the clock. */
LOOP_TEST(pid_of_another_process, 2)
{
        struct credentials who = session_of_child();
        int n_fds = suite_count_fds();

        who.start_time += _i == 0 ? (uint64_t)-1 : 1;
        ck_assert_int_eq(find(&who), -ESRCH);
        ck_assert_int_eq(found.pidfd, -1);
        ck_assert_int_eq(suite_count_fds(), n_fds);
}

TEST(process_has_exited)
{
        struct credentials who = session_of_child();

        end_child();
        ck_assert_int_eq(find(&who), -ESRCH);
        ck_assert_int_eq(found.pidfd, -1);
        who.pid = 0; /* of a PID namespace that is not visible */
        ck_assert_int_eq(find(&who), -EINVAL);
        ck_assert_int_eq(found.pidfd, -1);
}
