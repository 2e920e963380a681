/* The stand-in for the service manager, with a little daemon that stores texts and dies.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
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

static void set_up_with(unsigned max_stored)
{
        static const char *const argv[] = { LITTLE_DAEMON, NULL };
        struct stand_in_options options = {
                .argv = argv, .socket = socket_path, .notify = notify_path, .max_stored = max_stored
        };

        n_fds = suite_count_fds();
        strcpy(folder, "/tmp/stand-in-XXXXXX");
        ck_assert_ptr_nonnull(mkdtemp(folder));
        snprintf(socket_path, sizeof(socket_path), "%s/socket", folder);
        snprintf(notify_path, sizeof(notify_path), "%s/notify", folder);
        ck_assert_int_eq(stand_in_start(&options, &manager), 0);
        ck_assert_int_eq(stand_in_wait_ready(manager, 1, WAIT_MS), 0);
}

static void set_up(void)
{
        set_up_with(16);
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

/* The names of what is kept. */
static const char *names(void)
{
        static char text[4096];
        char name[STAND_IN_NAME_BYTES];

        text[0] = '\0';
        for (unsigned i = 0; stand_in_name(manager, i, name) == 0; i++) {
                strcat(text, i > 0 ? " " : "");
                strcat(text, name);
        }
        return text;
}

static void restart(int number)
{
        ck_assert_int_eq(stand_in_restart(manager, number, WAIT_MS), 0);
}

static void await_start(unsigned n)
{
        ck_assert_int_eq(stand_in_wait_ready(manager, n, WAIT_MS), 0);
}

LOOP_TEST(stored_fds_are_passed_to_the_next_daemon, 2)
{
        does("store a one");
        does("store b two");
        ck_assert_str_eq(names(), "b a");
        restart(_i == 0 ? SIGTERM : SIGKILL);
        ck_assert_str_eq(tell("tell"), "client=? b=two a=one\n");
        ck_assert_uint_eq(look().n_starts, 2);
        ck_assert_uint_eq(look().n_bad, 0);
        does("say FDSTOREREMOVE=1,FDNAME=b");
        restart(SIGKILL);
        ck_assert_str_eq(tell("tell"), "client=? a=one\n");
        ck_assert_str_eq(look().said, "up");
}

TEST(messages_before_a_death_count)
{
        for (unsigned i = 0; i < 20; i++) {
                unsigned n_starts = look().n_starts;

                ck_assert_str_eq(tell("store-and-die last word"), "");
                await_start(n_starts + 1);
                ck_assert_str_eq(tell("tell"), "client=? last=word\n");
                does("say FDSTOREREMOVE=1,FDNAME=last");
                ck_assert_uint_eq(look().n_stored, 0);
        }
        ck_assert_uint_eq(look().n_bad, 20);
}

TEST(names_are_checked)
{
        char line[400] = "store ", longest[256];

        does("store with:colon x");
        ck_assert_str_eq(names(), "stored");
        memset(longest, 'n', 255);
        longest[255] = '\0';
        does(strcat(strcat(line, longest), " x"));
        ck_assert_int_eq(strncmp(names(), longest, 255), 0);
        line[6] = '\0';
        does(strcat(strcat(line, longest), "n x"));
        ck_assert_uint_eq(look().n_stored, 3);
        does("say FDSTOREREMOVE=1"); /* of what? */
        does("say FDSTOREREMOVE=1,FDNAME=a:b");
        ck_assert_uint_eq(look().n_stored, 3);
        does("say FDSTOREREMOVE=1,FDNAME=stored"); /* both at once */
        ck_assert_str_eq(names(), longest);
}

TEST(the_same_fd_is_stored_once)
{
        does("store-twice a");
        ck_assert_str_eq(names(), "a");
        does("store a other");
        ck_assert_str_eq(names(), "a a");
        restart(SIGKILL);
        ck_assert_str_eq(tell("tell"), "client=? a=other a=twice\n");
}

TEST(fds_above_the_limit_are_not_stored)
{
        char line[32];

        for (unsigned i = 0; i < 18; i++) {
                snprintf(line, sizeof(line), "store n%u x", i);
                does(line);
        }
        ck_assert_uint_eq(look().n_stored, 16);
        ck_assert_uint_eq(look().n_full, 2);
        restart(SIGTERM);
        ck_assert_int_eq(stand_in_drop(manager, "n3"), 1);
        does("store again x");
        ck_assert_uint_eq(look().n_stored, 16);
}

TEST(polled_fds_are_dropped_on_a_hang_up)
{
        does("store-pipe FDPOLL=0");
        does("store-pipe");
        for (unsigned i = 0; look().n_stored > 1 && i < WAIT_MS; i++)
                usleep(1000);
        ck_assert_uint_eq(look().n_stored, 1);
        usleep(30000);
        ck_assert_uint_eq(look().n_stored, 1);
}

TEST(messages_of_other_processes_are_ignored)
{
        struct sockaddr_un address = { .sun_family = AF_UNIX };
        int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);

        does("by-another stolen");
        ck_assert_uint_eq(look().n_ignored, 1);
        strcpy(address.sun_path, notify_path);
        ck_assert_int_eq(sendto(fd, "STATUS=mine", 11, 0, (struct sockaddr *)&address, sizeof(address)), 11);
        close(fd);
        ck_assert_uint_eq(look().n_ignored, 2);
        does("say-nul");
        ck_assert_uint_eq(look().n_ignored, 3);
        ck_assert_uint_eq(look().n_stored, 0);
        ck_assert_str_eq(look().said, "up");
}

TEST(a_barrier_waits_for_earlier_messages)
{
        does("store a one");
        does("barrier");
        does("say FDSTOREREMOVE=1,FDNAME=a,BARRIER=1"); /* with other words it counts for nothing */
        ck_assert_str_eq(names(), "a");
}

TEST(tests_can_change_the_store)
{
        int fd, other = memfd_create("other", MFD_CLOEXEC);
        char text[8] = "";

        does("store a one");
        ck_assert_int_eq(stand_in_hold(manager, true), 0);
        ck_assert_int_eq(stand_in_signal(manager, SIGKILL), 0);
        ck_assert_int_eq(stand_in_wait_end(manager, WAIT_MS), 0);
        fd = stand_in_get(manager, "a");
        ck_assert_int_ge(fd, 0);
        ck_assert_int_eq(pread(fd, text, 8, 0), 3);
        ck_assert_str_eq(text, "one");
        ck_assert_int_eq(pwrite(fd, "ONE", 3, 0), 3);
        close(fd);
        ck_assert_int_eq(stand_in_get(manager, "b"), -ENOENT);
        ck_assert_int_eq(stand_in_put(manager, "b", other), 0);
        ck_assert_int_eq(stand_in_hold(manager, false), 0);
        await_start(2);
        ck_assert_str_eq(tell("tell"), "client=? b= a=ONE\n");
        ck_assert_int_eq(stand_in_replace(manager, "a", other), 0);
        ck_assert_int_eq(stand_in_replace(manager, "c", other), -ENOENT);
        ck_assert_int_eq(pwrite(other, "new", 3, 0), 3);
        restart(SIGKILL);
        ck_assert_str_eq(tell("tell"), "client=? b=new a=new\n");
        ck_assert_int_eq(stand_in_drop(manager, "a"), 1);
        ck_assert_int_eq(stand_in_drop(manager, "a"), 0);
        close(other);
}

/* Or SIGTERM to a daemon that is about to be started ends the test, too. */
TEST(the_service_inherits_no_handler)
{
        struct sigaction now;

        ck_assert_int_eq(sigaction(SIGTERM, NULL, &now), 0);
        ck_assert(now.sa_handler == SIG_DFL);
}

TEST(a_stopped_service_loses_its_fds)
{
        does("store a one");
        ck_assert_int_eq(stand_in_stop(manager), 0);
        ck_assert_int_eq(stand_in_wait_end(manager, WAIT_MS), 0);
        ck_assert_uint_eq(look().n_stored, 0);
        ck_assert_int_eq(stand_in_signal(manager, SIGTERM), -ESRCH);
        ck_assert_int_eq(stand_in_hold(manager, false), 0);
        await_start(2);
        ck_assert_str_eq(tell("tell"), "client=?\n");
        (void)tell("exit 3");
        await_start(3);
        ck_assert_uint_eq(look().n_bad, 1);
}

int main(void)
{
        return suite_run(suite_of_tests("stand-in", 0, set_up, tear_down));
}
