/* The stand-in for the service manager, with a little daemon that says texts and dies.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "tests/manager/stand_in.h"
#include "tests/suite.h"

#define WAIT_MS 60000

static char folder[32], socket_path[64], notify_path[64];
static struct stand_in *manager;
static int n_fds;

static struct stand_in_state look(void)
{
        struct stand_in_state state;

        ck_assert_int_eq(stand_in_look(manager, &state), 0);
        return state;
}

static void set_up(void)
{
        static const char *const argv[] = { LITTLE_DAEMON, NULL };
        struct stand_in_options options = {
                .argv = argv, .socket = socket_path, .notify = notify_path, .keeps = true
        };

        n_fds = suite_count_fds();
        strcpy(folder, "/tmp/stand-in-XXXXXX");
        ck_assert_ptr_nonnull(mkdtemp(folder));
        snprintf(socket_path, sizeof(socket_path), "%s/socket", folder);
        snprintf(notify_path, sizeof(notify_path), "%s/notify", folder);
        ck_assert_int_eq(stand_in_start(&options, &manager), 0);
        ck_assert_int_eq(stand_in_wait_ready(manager, 1, WAIT_MS), 0);
}

static void tear_down(void)
{
        pid_t pid = look().pid;

        manager = stand_in_end(manager);
        ck_assert(pid == 0 || kill(pid, 0) < 0);
        unlink(socket_path);
        unlink(notify_path);
        ck_assert_int_eq(rmdir(folder), 0);
        ck_assert_int_eq(suite_count_fds(), n_fds);
}

/* What the daemon answers; "" where it died of it. */
static const char *tell(const char *line)
{
        struct sockaddr_un address = { .sun_family = AF_UNIX };
        int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        static char text[4096];
        size_t n_bytes = 0;
        ssize_t n;

        strcpy(address.sun_path, socket_path);
        ck_assert_int_eq(connect(fd, (struct sockaddr *)&address, sizeof(address)), 0);
        ck_assert_int_eq(send(fd, line, strlen(line), MSG_NOSIGNAL), (ssize_t)strlen(line));
        while ((n = read(fd, text + n_bytes, sizeof(text) - 1 - n_bytes)) > 0)
                n_bytes += (size_t)n;
        text[n_bytes] = '\0';
        close(fd);
        return text;
}

static void does(const char *line)
{
        ck_assert_str_eq(tell(line), "ok\n");
}

static void restart(int number)
{
        ck_assert_int_eq(stand_in_restart(manager, number, WAIT_MS), 0);
}

static void await_start(unsigned n)
{
        ck_assert_int_eq(stand_in_wait_ready(manager, n, WAIT_MS), 0);
}

LOOP_TEST(the_next_daemon_gets_the_socket, 2)
{
        ck_assert_str_eq(tell("tell"), "1 client keep=\n");
        restart(_i == 0 ? SIGTERM : SIGKILL);
        ck_assert_str_eq(tell("tell"), "1 client keep=\n");
        ck_assert_uint_eq(look().n_starts, 2);
        ck_assert_uint_eq(look().n_bad, 0);
        ck_assert_str_eq(look().said, "up");
}

TEST(messages_before_a_death_count)
{
        ck_assert_int_eq(stand_in_hold(manager, true), 0);
        ck_assert_str_eq(tell("say-and-die STATUS=last"), "");
        ck_assert_int_eq(stand_in_wait_end(manager, WAIT_MS), 0);
        ck_assert_str_eq(look().said, "last");
        ck_assert_uint_eq(look().n_bad, 1);
        ck_assert_int_eq(stand_in_signal(manager, SIGTERM), -ESRCH);
        ck_assert_int_eq(stand_in_hold(manager, false), 0);
        await_start(2);
        (void)tell("exit 3");
        await_start(3);
        ck_assert_uint_eq(look().n_bad, 2);
}

TEST(other_messages_are_ignored)
{
        struct sockaddr_un address = { .sun_family = AF_UNIX };
        int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);

        does("by-another STATUS=another's");
        ck_assert_uint_eq(look().n_ignored, 1);
        strcpy(address.sun_path, notify_path);
        ck_assert_int_eq(sendto(fd, "STATUS=mine", 11, 0, (struct sockaddr *)&address, sizeof(address)), 11);
        close(fd);
        ck_assert_uint_eq(look().n_ignored, 2);
        does("say-nul");
        ck_assert_uint_eq(look().n_ignored, 3);
        does("say-fd");
        ck_assert_uint_eq(look().n_ignored, 4);
        ck_assert_str_eq(look().said, "up");
}

/* Or SIGTERM to a daemon that is about to be started ends the test, too. */
TEST(the_service_inherits_no_handler)
{
        struct sigaction now;

        ck_assert_int_eq(sigaction(SIGTERM, NULL, &now), 0);
        ck_assert(now.sa_handler == SIG_DFL);
}

int main(void)
{
        return suite_run(suite_of_tests("stand-in", 0, set_up, tear_down));
}
