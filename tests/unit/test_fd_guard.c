/* The guard and the closer: file descriptors that are sent are refused, or found before they are
 * read, and closed without waiting.
 *
 * setsockopt() is wrapped: it pretends a kernel before 6.16. closer_n_waiting() is wrapped: it pretends that more wait.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/base/closer.h"
#include "daemon/net/fd_guard.h"
#include "proto/frame.h"
#include "tests/integration/lingering.h"
#include "tests/suite.h"

#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define LONG_S     3600 /* longer than any test */
#define TIMEOUT_MS 60000

static bool is_old;
static int theirs, ours, pipes[2];
static struct fd_guard guard;

int __real_setsockopt(int fd, int level, int option, const void *value, socklen_t n);
int __wrap_setsockopt(int fd, int level, int option, const void *value, socklen_t n);
int __wrap_setsockopt(int fd, int level, int option, const void *value, socklen_t n)
{
        if (is_old && option == 83) {
                errno = ENOPROTOOPT;
                return -1;
        }
        return __real_setsockopt(fd, level, option, value, n);
}

static size_t n_more_waiting;

size_t __real_closer_n_waiting(void);
size_t __wrap_closer_n_waiting(void);
size_t __wrap_closer_n_waiting(void)
{
        return __real_closer_n_waiting() + n_more_waiting;
}

static void setup(void)
{
        int pair[2];

        is_old = true;
        ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair), 0);
        theirs = pair[0];
        ours = pair[1];
        ck_assert_int_eq(pipe(pipes), 0);
}

static void teardown(void)
{
        close(theirs);
        close(pipes[0]);
}

FIXTURE(fd_guard, setup, teardown);

/* The only copy of the pipe's other end. */
static void send_last(const char *bytes, int flags)
{
        ck_assert_int_eq(fd_send(theirs, bytes, strlen(bytes), pipes[1], flags), 0);
        close(pipes[1]);
}

static bool is_closed(int timeout_ms)
{
        struct pollfd p = { .fd = pipes[0] };

        return poll(&p, 1, timeout_ms) == 1;
}

static void say(const char *bytes)
{
        ck_assert_int_eq(send(theirs, bytes, strlen(bytes), 0), (ssize_t)strlen(bytes));
}

static int look(size_t *ret_n)
{
        *ret_n = 1000;
        return fd_guard_look(&guard, ours, false, ret_n);
}

/* As the daemon reads: as much as was looked at. */
static void assert_reads(const char *bytes)
{
        char here[64];
        size_t n;

        ck_assert_int_eq(look(&n), 0);
        ck_assert_uint_eq(n, strlen(bytes));
        ck_assert_int_eq(recv(ours, here, n, 0), (ssize_t)n);
        ck_assert_int_eq(memcmp(here, bytes, n), 0);
}

static void assert_finds_and_closes(void)
{
        size_t n;

        ck_assert_int_eq(look(&n), -EPROTO);
        ck_assert_int_eq(look(&n), -EPROTO);
        ck_assert(!is_closed(0)); /* looking closes nothing */
        fd_guard_close(&guard, ours);
        /* The peer sees the end: of the stream, or once the thread has closed it, a reset. */
        ck_assert(recv(theirs, &n, 1, 0) == 0 || errno == ECONNRESET);
        ck_assert(is_closed(TIMEOUT_MS));
}

static bool kernel_refuses(void)
{
        is_old = false;
        if (fd_guard_refuse(ours))
                return true;
        printf("# skipped: this kernel does not know SO_PASSRIGHTS (Linux 6.16)\n");
        return false;
}

TEST(kernel_refuses_fds)
{
        size_t n;

        if (!kernel_refuses())
                return;
        fd_guard_init(&guard, ours);
        ck_assert(!guard.is_open);
        ck_assert_int_eq(fd_send(theirs, "x", 1, pipes[1], 0), -EPERM);
        ck_assert_int_eq(fd_send(theirs, "x", 1, pipes[1], MSG_OOB), -EPERM);
        ck_assert_int_eq(look(&n), 0);
        ck_assert_uint_eq(n, 1000); /* no reason to look */
        fd_guard_close(&guard, ours);
        close(pipes[1]);
}

/* Sent before the option was set: an inherited listening socket may have such connections. */
LOOP_TEST(fds_queued_before_the_guard_are_found, 2)
{
        if (!kernel_refuses())
                return;
        ck_assert_int_eq(setsockopt(ours, SOL_SOCKET, 83, &(int){ 1 }, sizeof(int)), 0);
        say("abc");
        if (_i == 1)
                send_last("d", 0);
        fd_guard_init(&guard, ours);
        ck_assert(guard.is_open);
        if (_i == 1) {
                ck_assert_int_eq(fd_send(theirs, "x", 1, pipes[0], 0), -EPERM);
                for (size_t n; look(&n) == 0;)
                        assert_reads("abc");
                assert_finds_and_closes();
                return;
        }
        assert_reads("abc");
        ck_assert(!guard.is_open);
        fd_guard_close(&guard, ours);
        close(pipes[1]);
}

TEST(bytes_pass)
{
        size_t n;

        fd_guard_init(&guard, ours);
        ck_assert(guard.is_open);
        ck_assert_int_eq(look(&n), FRAME_AGAIN);
        say("abc");
        say("def");
        assert_reads("abcdef");
        ck_assert(guard.is_open);
        shutdown(theirs, SHUT_WR);
        ck_assert_int_eq(look(&n), 0);
        ck_assert_int_eq(recv(ours, &n, 1, 0), 0);
        fd_guard_close(&guard, ours);
        close(pipes[1]);
}

/* What is looked at is at most what one buffer holds, and is read as such. */
TEST(look_is_bounded)
{
        char bytes[FD_GUARD_LOOK_BYTES + 2];
        size_t n;

        memset(bytes, 'x', sizeof(bytes) - 1);
        bytes[sizeof(bytes) - 1] = '\0';
        fd_guard_init(&guard, ours);
        say(bytes);
        ck_assert_int_eq(look(&n), 0);
        ck_assert_uint_eq(n, FD_GUARD_LOOK_BYTES);
        n = 2;
        ck_assert_int_eq(fd_guard_look(&guard, ours, false, &n), 0);
        ck_assert_uint_eq(n, 2);
        fd_guard_close(&guard, ours);
        close(pipes[1]);
}

/* At the front, behind bytes, out of band; what arrives between the look and the read is behind
 * what was looked at, and is found by the next look. */
LOOP_TEST(fds_are_found, 4)
{
        char here[8];
        size_t n;

        fd_guard_init(&guard, ours);
        switch (_i) {
        case 0:
                send_last("abc", 0);
                break;
        case 1:
                say("abc");
                ck_assert_int_eq(look(&n), 0);
                ck_assert_uint_eq(n, 3);
                send_last("d", 0);
                ck_assert_int_eq(recv(ours, here, n, 0), 3);
                break;
        case 2:
                send_last("o", MSG_OOB);
                say("abc");
                break;
        default: /* bytes, an out-of-band byte with fds, bytes */
                say("abc");
                send_last("o", MSG_OOB);
                say("def");
                for (unsigned i = 0; look(&n) == 0; i++) {
                        ck_assert_uint_lt(i, 3);
                        ck_assert_int_eq(recv(ours, here, n, 0), (ssize_t)n);
                }
        }
        assert_finds_and_closes();
}

/* SO_PASSCRED gives each message a control message, which is none with fds. */
TEST(credentials_are_not_fds)
{
        int yes = 1, n_before = suite_count_fds();
        size_t n = 100;

        fd_guard_init(&guard, ours);
        ck_assert_int_eq(setsockopt(ours, SOL_SOCKET, SO_PASSCRED, &yes, sizeof(yes)), 0);
        say("abc");
        ck_assert_int_eq(fd_guard_look(&guard, ours, true, &n), 0);
        ck_assert_uint_eq(n, 3);
        ck_assert_int_eq(fd_send(theirs, "x", 1, pipes[1], 0), 0);
        ck_assert_int_eq(recv(ours, &n, 3, 0), 3);
        n = 100;
        ck_assert_int_eq(fd_guard_look(&guard, ours, true, &n), -EPROTO);
        ck_assert_int_eq(suite_count_fds(), n_before); /* none was installed */
        fd_guard_close(&guard, ours);
        close(pipes[1]);
        ck_assert(is_closed(TIMEOUT_MS));
}

static size_t n_threads(void)
{
        DIR *dir = opendir("/proc/self/task");
        size_t n = 0;

        ck_assert_ptr_nonnull(dir);
        while (readdir(dir))
                n++;
        closedir(dir);
        return n;
}

/* A close of single bytes takes as long as one of so many frames, and their number is the sender's choice. */
LOOP_TEST(a_thread_closes_what_has_much_unread_input, 2)
{
        size_t n_before = n_threads();

        is_old = _i == 1;
        fd_guard_init(&guard, ours);
        for (int i = 0; i < 200; i++)
                say("x");
        fd_guard_close(&guard, ours);
        ck_assert_uint_gt(n_threads(), n_before); /* a sanitizer may have started one, too */
        ck_assert_int_eq(send(theirs, "x", 1, MSG_NOSIGNAL), -1);
        ck_assert_int_eq(errno, EPIPE);
        close(pipes[1]);
}

/* Little unread input, or much where many sockets wait for a thread already. */
LOOP_TEST(the_caller_closes_the_others, 2)
{
        size_t n_before = n_threads();

        is_old = false;
        n_more_waiting = _i == 1 ? CLOSER_THREADS : 0;
        fd_guard_init(&guard, ours);
        for (int i = 0; i < (_i == 1 ? 200 : 10); i++)
                say("x");
        fd_guard_close(&guard, ours);
        n_more_waiting = 0;
        ck_assert_uint_eq(n_threads(), n_before);
        close(pipes[1]);
}

/* More sockets than threads, and each would linger for longer than the test: the caller does not
 * wait, and no close hangs. */
TEST(close_does_not_wait_for_lingering_sockets)
{
        enum { N = 2 * CLOSER_THREADS };
        static struct lingering all[N];
        int n_before = suite_count_fds();
        const struct timespec moment = { .tv_nsec = 10000000 };

        for (size_t i = 0; i < N; i++) {
                int pair[2], r = lingering_new(LONG_S, &all[i]);

                if (r < 0) {
                        printf("# skipped: no TCP over the loopback interface: %s\n", strerror(-r));
                        return;
                }
                ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
                ck_assert_int_eq(fd_send(pair[0], "x", 1, all[i].fd, 0), 0);
                lingering_close(&all[i]);
                close(pair[0]);
                closer_close(pair[1]); /* with it the last copy of the lingering one */
        }
        for (unsigned ms = 0; closer_n_waiting() + closer_n_busy() > 0; ms += 10) {
                ck_assert_uint_lt(ms, TIMEOUT_MS);
                nanosleep(&moment, NULL);
        }
        ck_assert_int_eq(suite_count_fds(), n_before + N); /* the peers, which are open still */
        for (size_t i = 0; i < N; i++)
                lingering_free(&all[i]);
        close(ours);
        close(pipes[1]);
}
