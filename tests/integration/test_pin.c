/* Which process connected, and what else depends on the kernel's version. Before Linux 6.5 there is no
 * SO_PEERPIDFD, so a process must show that it is the one whose pid the kernel told, before anything but
 * its hello is done for it. Later kernels pin the process at once.
 *
 * BFCD is a daemon for which BFC_TEST_KERNEL is the kernel's version (old_kernel.c).
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "tests/integration/harness.h"

#define SEALS_OF_OLD (F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL)
/* Headers may not have these. */
#define SEAL_EXEC   0x20    /* Linux 6.3 */
#define NOEXEC_SEAL 0x0008U /* Linux 6.3 */
#define PEERPIDFD   77      /* Linux 6.5 */

static const struct rig_config plain;

static void add_request(Bfcd__Request *r, uint8_t *frame, size_t *n)
{
        size_t n_payload = bfcd__request__get_packed_size(r);

        frame[*n] = (uint8_t)n_payload;
        frame[*n + 1] = (uint8_t)(n_payload >> 8);
        frame[*n + 2] = frame[*n + 3] = 0;
        bfcd__request__pack(r, frame + *n + 4);
        *n += 4 + n_payload;
}

/* A hello and a malloc in one piece. */
static size_t hello_and_malloc(uint8_t *frame)
{
        Bfcd__Request r = BFCD__REQUEST__INIT;
        Bfcd__Hello hello = BFCD__HELLO__INIT;
        Bfcd__Malloc m = BFCD__MALLOC__INIT;
        size_t n = 0;

        hello.version = 1;
        r.id = 1;
        r.body_case = BFCD__REQUEST__BODY_HELLO;
        r.hello = &hello;
        add_request(&r, frame, &n);
        m.n_bytes = 1000;
        r.id = 2;
        r.body_case = BFCD__REQUEST__BODY_MALLOC;
        r.malloc = &m;
        add_request(&r, frame, &n);
        return n;
}

static bool has_logged(const struct rig *rig, const char *words)
{
        char *log = rig_log(rig);
        bool has = strstr(log, words);

        free(log);
        return has;
}

static unsigned n_fds_of(pid_t pid)
{
        char path[64];
        unsigned n = 0;
        DIR *dir;

        snprintf(path, sizeof(path), "/proc/%d/fd", (int)pid);
        dir = opendir(path);
        ck_assert_ptr_nonnull(dir);
        while (readdir(dir))
                n++;
        closedir(dir);
        return n;
}

static bool is_unread(const struct raw *raw)
{
        int n_bytes = 0;

        return ioctl(raw->fd, SIOCOUTQ, &n_bytes) == 0 && n_bytes > 0;
}

START_TEST(clients_work)
{
        struct rig *rig = rig_start(&plain);
        bfc_client *client = client_open(rig, NULL, NULL);
        void *p;

        for (unsigned i = 0; i < 20; i++) {
                ck_assert_ok(bfc_malloc(client, 1 * MIB, &p));
                memset(p, 1, 1 * MIB);
                ck_assert_ok(bfc_free(client, p));
        }
        bfc_disconnect(client);
        rig_stop(rig);
}
END_TEST

static void hold_some(void *arg)
{
        const struct rig *rig = arg;
        bfc_client *client = child_client_open(rig->socket, "red");
        void *p;

        REQUIRE(bfc_malloc(client, 8 * MIB, &p) == 0, "%s", bfc_last_error());
        pause();
}

START_TEST(death_is_seen)
{
        struct rig *rig = rig_start(&plain);
        pid_t pid = child_start(hold_some, rig);

        ck_assert(WAIT_FOR(rig_figures(rig, "red", "train").bytes_in_use == 8 * MIB, SETTLE_MS));
        child_kill(pid);
        ck_assert(WAIT_FOR(rig_charge(rig, "red", "train") == 0, SETTLE_MS));
        rig_stop(rig);
}
END_TEST

/* What comes when the daemon has looked already shows it, however much of it. */
START_TEST(all_at_once_but_later)
{
        struct rig *rig = rig_start(&plain);
        unsigned n_fds = n_fds_of(rig->pid);
        uint8_t frame[256];
        Bfcd__Reply *reply;
        struct raw *raw;

        ck_assert_int_eq(raw_open(rig->socket, &raw), 0);
        ck_assert(WAIT_FOR(n_fds_of(rig->pid) == n_fds + 2, SETTLE_MS)); /* the socket and the pidfd */
        ck_assert_int_eq(raw_send_bytes(raw, frame, hello_and_malloc(frame)), 0);
        for (unsigned i = 0; i < 2; i++) {
                ck_assert_int_eq(raw_receive(raw, RAW_TIMEOUT_MS, &reply), 0);
                ck_assert_uint_eq(reply->id, i + 1);
                bfcd__reply__free_unpacked(reply, NULL);
        }
        ck_assert_int_eq(raw_goodbye(raw), 0);
        raw_close(raw);
        rig_stop(rig);
}
END_TEST

START_TEST(all_at_once_and_before)
{
        struct rig *rig = rig_start(&plain);
        uint8_t frame[256];
        struct raw *raw;

        kill(rig->pid, SIGSTOP);
        ck_assert_int_eq(raw_open(rig->socket, &raw), 0);
        ck_assert_int_eq(raw_send_bytes(raw, frame, hello_and_malloc(frame)), 0);
        kill(rig->pid, SIGCONT);
        ck_assert_int_eq(raw_wait_hang_up(raw, RAW_TIMEOUT_MS), 0);
        ck_assert(WAIT_FOR(has_logged(rig, "did not wait for the reply to its hello"), SETTLE_MS));
        raw_close(raw);
        rig_stop(rig);
}
END_TEST

static void say_hello(void *arg)
{
        struct raw *raw = arg;

        REQUIRE(raw_hello(raw, NULL, NULL) < 0, "it was believed");
}

/* Before the daemon looked, or after: who has not connected is not heard. */
static void assert_only_who_connected(bool before)
{
        struct rig *rig = rig_start(&plain);
        struct raw *raw;
        pid_t pid;

        if (before)
                kill(rig->pid, SIGSTOP);
        ck_assert_int_eq(raw_open(rig->socket, &raw), 0);
        pid = child_start(say_hello, raw);
        if (before) {
                ck_assert(WAIT_FOR(is_unread(raw), SETTLE_MS));
                kill(rig->pid, SIGCONT);
        }
        child_join(pid);
        ck_assert_int_eq(raw_wait_hang_up(raw, RAW_TIMEOUT_MS), 0);
        ck_assert(WAIT_FOR(has_logged(rig, "a process other than the one that connected"), SETTLE_MS));
        raw_close(raw);
        rig_stop(rig);
}

START_TEST(only_who_connected)
{
        assert_only_who_connected(_i != 0);
}
END_TEST

/* Also after the hello: nobody has shown it yet. */
START_TEST(only_who_said_hello)
{
        struct rig *rig = rig_start(&plain);
        uint8_t frame[256];
        Bfcd__Reply *reply;
        struct raw *raw;
        size_t n_hello;
        pid_t pid;

        kill(rig->pid, SIGSTOP);
        ck_assert_int_eq(raw_open(rig->socket, &raw), 0);
        (void)hello_and_malloc(frame);
        n_hello = 4 + (size_t)frame[0];
        ck_assert_int_eq(raw_send_bytes(raw, frame, n_hello), 0);
        kill(rig->pid, SIGCONT);
        ck_assert_int_eq(raw_receive(raw, RAW_TIMEOUT_MS, &reply), 0);
        ck_assert_int_eq(reply->body_case, BFCD__REPLY__BODY_HELLO);
        bfcd__reply__free_unpacked(reply, NULL);
        pid = fork();
        if (pid == 0)
                _exit(raw_send_bytes(raw, frame + n_hello, hello_and_malloc(frame) - n_hello) == 0 ? 0 : 99);
        child_join(pid);
        ck_assert_int_eq(raw_wait_hang_up(raw, RAW_TIMEOUT_MS), 0);
        ck_assert(WAIT_FOR(has_logged(rig, "a process other than the one that connected"), SETTLE_MS));
        ck_assert_uint_eq(rig_charge(rig, "red", "train"), 0);
        raw_close(raw);
        rig_stop(rig);
}
END_TEST

/* The one that connected is gone when the daemon looks, and somebody has its socket. */
START_TEST(nobody_is_there)
{
        struct rig *rig = rig_start(&plain);
        struct raw *raw = NULL;
        int pair[2], status;
        char byte;
        pid_t pid;

        ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
        kill(rig->pid, SIGSTOP);
        pid = fork();
        if (pid == 0) {
                struct raw wire = { .fd = pair[1] };

                if (raw_open(rig->socket, &raw) == 0)
                        (void)raw_send_fds(&wire, "x", 1, &raw->fd, 1);
                _exit(0);
        }
        ck_assert_int_eq(waitpid(pid, &status, 0), pid); /* its pid is free */
        {
                union {
                        char bytes[CMSG_SPACE(sizeof(int))];
                        struct cmsghdr align;
                } control;
                struct iovec iov = { .iov_base = &byte, .iov_len = 1 };
                struct msghdr message = { .msg_iov = &iov, .msg_iovlen = 1 };
                int fd;

                message.msg_control = control.bytes;
                message.msg_controllen = sizeof(control.bytes);
                ck_assert_int_eq(recvmsg(pair[0], &message, MSG_CMSG_CLOEXEC), 1);
                memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(int));
                kill(rig->pid, SIGCONT);
                ck_assert(WAIT_FOR(recv(fd, &byte, 1, MSG_DONTWAIT) == 0 || errno == ECONNRESET, SETTLE_MS));
                close(fd);
        }
        close(pair[0]);
        close(pair[1]);
        rig_stop(rig);
}
END_TEST

/* Where the kernel pins the process, it may send more than its hello at once. */
START_TEST(all_at_once_of_a_known_process)
{
        struct rig *rig = rig_start(&plain);
        uint8_t frame[256];
        Bfcd__Reply *reply;
        struct raw *raw;

        kill(rig->pid, SIGSTOP);
        ck_assert_int_eq(raw_open(rig->socket, &raw), 0);
        ck_assert_int_eq(raw_send_bytes(raw, frame, hello_and_malloc(frame)), 0);
        kill(rig->pid, SIGCONT);
        for (unsigned i = 0; i < 2; i++) {
                ck_assert_int_eq(raw_receive(raw, RAW_TIMEOUT_MS, &reply), 0);
                ck_assert_uint_eq(reply->id, i + 1);
                bfcd__reply__free_unpacked(reply, NULL);
        }
        ck_assert_int_eq(raw_goodbye(raw), 0);
        raw_close(raw);
        rig_stop(rig);
}
END_TEST

static bool is_told_old(void)
{
        const char *kernel = getenv("BFC_TEST_KERNEL");

        return kernel && strcmp(kernel, "6.1") == 0;
}

/* By what the daemon is told, or by the kernel that runs. */
static bool is_before_6_5(void)
{
        int pair[2], pidfd = -1;
        socklen_t n = sizeof(pidfd);

        if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) < 0)
                abort();
        (void)getsockopt(pair[0], SOL_SOCKET, PEERPIDFD, &pidfd, &n);
        close(pair[0]);
        close(pair[1]);
        if (pidfd >= 0)
                close(pidfd);
        return is_told_old() || pidfd < 0;
}

static bool is_before_6_3(void)
{
        int fd = memfd_create("test", MFD_CLOEXEC | NOEXEC_SEAL);

        if (fd >= 0)
                close(fd);
        return is_told_old() || fd < 0;
}

/* Since Linux 6.3 a memfd can be made such that it can never be executed. */
START_TEST(extents_are_sealed_as_the_kernel_can)
{
        struct rig *rig = rig_start(&plain);
        struct raw *raw = raw_connect(rig->socket, NULL);
        Bfcd__Block block;
        int seals;

        ck_assert_ptr_nonnull(raw);
        ck_assert_int_eq(raw_malloc(raw, 0, 1000, &block), 0);
        ck_assert_uint_eq(raw->n_extents, 1);
        seals = fcntl(raw->extents[0].fd, F_GET_SEALS);
        ck_assert_int_eq(seals & SEALS_OF_OLD, SEALS_OF_OLD);
        ck_assert_int_eq((seals & SEAL_EXEC) != 0, !is_before_6_3());
        ck_assert_int_eq(raw_goodbye(raw), 0);
        raw_close(raw);
        rig_stop(rig);
}
END_TEST

int main(void)
{
        const TTest *const tests[] = {
                clients_work,
                death_is_seen,
                all_at_once_but_later,
                nobody_is_there,
                extents_are_sealed_as_the_kernel_can,
                NULL,
        };
        const TTest *const before_6_5[] = { all_at_once_and_before, only_who_said_hello, NULL };
        const TTest *const since_6_5[] = { all_at_once_of_a_known_process, NULL };
        Suite *suite = harness_suite("pin", tests);
        TCase *tc = tcase_create("by version");
        bool is_old = is_before_6_5();

        tcase_set_timeout(tc, TEST_TIMEOUT);
        for (const TTest *const *t = is_old ? before_6_5 : since_6_5; *t; t++)
                tcase_add_test(tc, *t);
        if (is_old)
                tcase_add_loop_test(tc, only_who_connected, 0, 2);
        suite_add_tcase(suite, tc);
        return harness_main(suite);
}
