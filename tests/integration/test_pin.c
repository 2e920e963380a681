/* Which process connected, and what else depends on the kernel's version. Before Linux 6.5 there is no
 * SO_PEERPIDFD, so a process must show that it is the one whose pid the kernel told, before anything but
 * its hello is done for it. Later kernels pin the process at once.
 *
 * BFCD is a daemon for which BFC_TEST_KERNEL is the kernel's version (old_kernel.c).
 *
 * SPDX-License-Identifier: Apache-2.0 */
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

#include "tests/integration/tools.h"

#define SEALS_OF_OLD (F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL)
/* Headers may not have these. */
#define SEAL_EXEC   0x20    /* Linux 6.3 */
#define NOEXEC_SEAL 0x0008U /* Linux 6.3 */
#define PEERPIDFD   77      /* Linux 6.5 */

static const struct rig_config plain;

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
        n += raw_pack(&r, frame + n);
        m.n_bytes = 1000;
        r.id = 2;
        r.body_case = BFCD__REQUEST__BODY_MALLOC;
        r.malloc = &m;
        n += raw_pack(&r, frame + n);
        return n;
}

static bool is_unread(const struct raw *raw)
{
        int n_bytes = 0;

        return ioctl(raw->fd, SIOCOUTQ, &n_bytes) == 0 && n_bytes > 0;
}

RIG_TEST(clients_work, plain)
{
        bfc_client *client = client_open(rig, NULL, NULL);
        void *p;

        for (unsigned i = 0; i < 20; i++) {
                ck_assert_ok(bfc_malloc(client, 1 * MIB, &p));
                memset(p, 1, 1 * MIB);
                ck_assert_ok(bfc_free(client, p));
        }
        bfc_disconnect(client);
}

static void hold_some(void *arg)
{
        const struct rig *rig = arg;
        bfc_client *client = child_client_open(rig->socket, "red");
        void *p;

        REQUIRE(bfc_malloc(client, 8 * MIB, &p) == 0, "%s", bfc_last_error());
        pause();
}

RIG_TEST(a_clients_death_is_detected, plain)
{
        pid_t pid = child_start(hold_some, rig);

        ck_assert(WAIT_FOR(rig_stats(rig, "red", "train").bytes_in_use == 8 * MIB, SETTLE_MS));
        child_kill(pid);
        ck_assert(WAIT_FOR(rig_charge(rig, "red", "train") == 0, SETTLE_MS));
}

/* What comes when the daemon has looked already shows it, however much of it. */
RIG_TEST(hello_and_request_in_one_write_after_accept, plain)
{
        unsigned n_fds = process_count_fds(rig->pid);
        uint8_t frame[256];
        Bfcd__Reply *reply;
        struct raw *raw;

        ck_assert_int_eq(raw_open(rig->socket, &raw), 0);
        ck_assert(
                WAIT_FOR(process_count_fds(rig->pid) == n_fds + 2, SETTLE_MS)); /* the socket and the pidfd */
        ck_assert_int_eq(raw_send_bytes(raw, frame, hello_and_malloc(frame)), 0);
        for (unsigned i = 0; i < 2; i++) {
                ck_assert_int_eq(raw_receive(raw, RAW_TIMEOUT_MS, &reply), 0);
                ck_assert_uint_eq(reply->id, i + 1);
                bfcd__reply__free_unpacked(reply, NULL);
        }
        session_end(raw);
}

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

LOOP_TEST(hello_and_request_before_accept_disconnect, is_before_6_5())
{
        struct rig *rig = rig_start(&plain);
        uint8_t frame[256];
        struct raw *raw;

        child_stop(rig->pid);
        ck_assert_int_eq(raw_open(rig->socket, &raw), 0);
        ck_assert_int_eq(raw_send_bytes(raw, frame, hello_and_malloc(frame)), 0);
        kill(rig->pid, SIGCONT);
        ck_assert_int_eq(raw_wait_hang_up(raw, RAW_TIMEOUT_MS), 0);
        ck_assert(WAIT_FOR(rig_logged(rig, "did not wait for the reply to its hello"), SETTLE_MS));
        raw_close(raw);
        rig_stop(rig);
}

static void say_hello(void *arg)
{
        struct raw *raw = arg;

        REQUIRE(raw_hello(raw, NULL, NULL) < 0, "it was believed");
}

/* Before the daemon looked, or after: a process that did not connect is not authenticated. */
static void assert_only_who_connected(bool before)
{
        struct rig *rig = rig_start(&plain);
        size_t n_fds = process_count_fds(rig->pid);
        struct raw *raw;
        pid_t pid;

        if (before)
                child_stop(rig->pid);
        ck_assert_int_eq(raw_open(rig->socket, &raw), 0);
        if (!before) /* it asks the kernel for senders when it has the pidfd; what is sent just before that has none */
                ck_assert(WAIT_FOR(process_count_fds(rig->pid) == n_fds + 2, SETTLE_MS));
        pid = child_start(say_hello, raw);
        if (before) {
                ck_assert(WAIT_FOR(is_unread(raw), SETTLE_MS));
                kill(rig->pid, SIGCONT);
        }
        child_join(pid);
        ck_assert_int_eq(raw_wait_hang_up(raw, RAW_TIMEOUT_MS), 0);
        ck_assert(WAIT_FOR(rig_logged(rig, "a process other than the one that connected"), SETTLE_MS));
        raw_close(raw);
        rig_stop(rig);
}

LOOP_TEST(only_the_connecting_process_is_authenticated, is_before_6_5() ? 2 : 0)
{
        assert_only_who_connected(_i != 0);
}

/* Also after the hello: no process has shown its identity yet. */
LOOP_TEST(only_the_process_of_the_hello_is_authenticated, is_before_6_5())
{
        struct rig *rig = rig_start(&plain);
        uint8_t frame[256];
        Bfcd__Reply *reply;
        struct raw *raw;
        size_t n_hello;
        pid_t pid;

        child_stop(rig->pid);
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
        ck_assert(WAIT_FOR(rig_logged(rig, "a process other than the one that connected"), SETTLE_MS));
        ck_assert_uint_eq(rig_charge(rig, "red", "train"), 0);
        raw_close(raw);
        rig_stop(rig);
}

/* The connecting process has ended when the daemon looks, and another one has its socket. */
RIG_TEST(a_dead_peer_is_not_authenticated, plain)
{
        struct raw *raw = NULL;
        int pair[2], status;
        char byte;
        pid_t pid;

        ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
        child_stop(rig->pid);
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
}

/* Where the kernel pins the process, it may send more than its hello at once. */
LOOP_TEST(hello_and_request_before_accept_are_served, !is_before_6_5())
{
        struct rig *rig = rig_start(&plain);
        uint8_t frame[256];
        Bfcd__Reply *reply;
        struct raw *raw;

        child_stop(rig->pid);
        ck_assert_int_eq(raw_open(rig->socket, &raw), 0);
        ck_assert_int_eq(raw_send_bytes(raw, frame, hello_and_malloc(frame)), 0);
        kill(rig->pid, SIGCONT);
        for (unsigned i = 0; i < 2; i++) {
                ck_assert_int_eq(raw_receive(raw, RAW_TIMEOUT_MS, &reply), 0);
                ck_assert_uint_eq(reply->id, i + 1);
                bfcd__reply__free_unpacked(reply, NULL);
        }
        session_end(raw);
        rig_stop(rig);
}

static bool is_before_6_3(void)
{
        int fd = memfd_create("test", MFD_CLOEXEC | NOEXEC_SEAL);

        if (fd >= 0)
                close(fd);
        return is_told_old() || fd < 0;
}

/* Since Linux 6.3 a memfd can be made such that it can never be executed. */
RIG_TEST(extents_are_sealed_as_the_kernel_can, plain)
{
        struct raw *raw = session_open(rig->socket, NULL);
        Bfcd__Block block;
        int seals;

        ck_assert_int_eq(raw_malloc(raw, 0, 1000, &block), 0);
        ck_assert_uint_eq(raw->n_extents, 1);
        seals = fcntl(raw->extents[0].fd, F_GET_SEALS);
        ck_assert_int_eq(seals & SEALS_OF_OLD, SEALS_OF_OLD);
        ck_assert_int_eq((seals & SEAL_EXEC) != 0, !is_before_6_3());
        session_end(raw);
}
