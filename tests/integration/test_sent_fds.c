/* Clients send file descriptors whose close takes as long as they like: no other client waits
 * for it.
 *
 * Each TCP socket that is sent would linger for an hour, so a daemon that closes one itself does
 * not answer within the time of any test.
 *
 * Runs with the daemon as it is, for which Linux 6.16 refuses what is sent; and with one that an
 * older kernel is pretended to (BFC_TEST_KERNEL, old_kernel.c).
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "tests/integration/tools.h"
#include "tests/integration/lingering.h"

#define LINGER_S   3600
#define N_MANY     100 /* more than the daemon has threads to close them */
#define TIMEOUT_MS 60000

static const struct rig_config plain = { .top = "timeouts: {quarantine: 500ms}\n" };

/* A connection, and what was sent over it. */
struct sender {
        struct raw *raw;
        struct lingering sent;
};

/* SO_PASSRIGHTS */
static bool kernel_refuses(void)
{
        int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), no = 0;
        bool knows = setsockopt(fd, SOL_SOCKET, 83, &no, sizeof(no)) == 0;

        close(fd);
        return knows && !getenv("BFC_TEST_KERNEL");
}

static bool has_loopback(void)
{
        struct lingering l;
        int r = lingering_new(1, &l);

        if (r < 0)
                printf("# skipped: no TCP over the loopback interface: %s\n", strerror(-r));
        else
                lingering_free(&l);
        return r == 0;
}

/* true: it was sent, and no other copy is left. The daemon is paused: if it closed its copy before
 * we close ours, we would linger. */
static bool send_lingering(struct sender *s, int socket, const char *bytes, size_t n_bytes, int flags)
{
        int r;

        ck_assert_int_eq(lingering_new(LINGER_S, &s->sent), 0);
        r = fd_send(socket, bytes, n_bytes, s->sent.fd, flags);
        if (kernel_refuses()) {
                ck_assert_int_eq(r, -EPERM);
                return false;
        }
        ck_assert_int_eq(r, 0);
        lingering_close(&s->sent);
        return true;
}

static void assert_serves(const struct rig *rig)
{
        bfc_client *client = client_open(rig, NULL, NULL);
        void *p;

        ck_assert_ok(bfc_malloc(client, MIB, &p));
        ck_assert_ok(bfc_free(client, p));
        bfc_disconnect(client);
}

static void assert_closed(const struct rig *rig)
{
        ck_assert(WAIT_FOR(process_count_fds(rig->pid) == rig->n_fds, TIMEOUT_MS));
}

enum way {
        BEFORE_THE_HELLO,
        AFTER_THE_HELLO,
        WITH_HALF_A_FRAME,
        OUT_OF_BAND,
        BEHIND_BYTES,
        BEHIND_A_VIOLATION, /* unread when the connection ends */
        ON_THE_EVENTS_SOCKET,
        AND_GONE,
        N_WAYS
};

static bool send_by(enum way way, struct sender *s)
{
        char many[300];

        memset(many, 0, sizeof(many));
        many[0] = 100; /* the frame goes on for long */
        many[1] = 1;
        switch (way) {
        case OUT_OF_BAND:
                return send_lingering(s, s->raw->fd, "x", 1, MSG_OOB);
        case BEHIND_BYTES:
                ck_assert_int_eq(raw_send_bytes(s->raw, many, sizeof(many)), 0);
                return send_lingering(s, s->raw->fd, "x", 1, 0);
        case BEHIND_A_VIOLATION:
                ck_assert_int_eq(raw_send_bytes(s->raw, "\0\0\0\0", 4), 0);
                return send_lingering(s, s->raw->fd, "x", 1, 0);
        case WITH_HALF_A_FRAME:
                return send_lingering(s, s->raw->fd, "\5", 1, 0);
        case ON_THE_EVENTS_SOCKET:
                return send_lingering(s, s->raw->events_fd, "x", 1, 0);
        default:
                return send_lingering(s, s->raw->fd, "\5\0\0\0hello", 9, 0);
        }
}

LOOP_TEST(sent_fds_delay_no_other_client, N_WAYS)
{
        enum way way = (enum way)_i;
        struct rig *rig = rig_start(&plain);
        struct sender senders[3] = { { .sent = { -1, -1 } }, { .sent = { -1, -1 } }, { .sent = { -1, -1 } } };

        for (size_t i = 0; has_loopback() && i < 3; i++) {
                struct sender *s = &senders[i];
                bool is_sent;

                ck_assert_int_eq(raw_open(rig->socket, &s->raw), 0);
                s->raw->wants_events = true;
                if (way == AFTER_THE_HELLO || way == ON_THE_EVENTS_SOCKET || way == AND_GONE)
                        ck_assert_int_eq(raw_hello(s->raw, NULL, NULL), 0);
                child_stop(rig->pid);
                is_sent = send_by(way, s);
                kill(rig->pid, SIGCONT);
                if (way == AND_GONE)
                        s->raw = raw_close(s->raw);
                assert_serves(rig);
                if (is_sent && s->raw)
                        ck_assert_int_eq(raw_wait_hang_up(s->raw, TIMEOUT_MS), 0);
                if (is_sent && way != BEHIND_A_VIOLATION && way != AND_GONE)
                        ck_assert(WAIT_FOR(rig_logged(rig, "disconnected: the client sent file descriptors"),
                                           TIMEOUT_MS));
        }
        for (size_t i = 0; i < 3; i++)
                senders[i].raw = raw_close(senders[i].raw);
        assert_closed(rig); /* though each would linger for longer */
        for (size_t i = 0; i < 3; i++)
                lingering_free(&senders[i].sent);
        rig_stop(rig);
}

/* More than the daemon has threads. */
static void send_many(const struct rig *rig, struct sender *senders)
{
        for (size_t i = 0; i < N_MANY; i++) {
                ck_assert_int_eq(raw_open(rig->socket, &senders[i].raw), 0);
                (void)send_lingering(&senders[i], senders[i].raw->fd, "x", 1, 0);
                senders[i].raw = raw_close(senders[i].raw);
        }
}

RIG_TEST(many_senders_of_fds_are_disconnected, plain)
{
        static struct sender senders[N_MANY];

        if (has_loopback()) {
                child_stop(rig->pid);
                send_many(rig, senders);
                kill(rig->pid, SIGCONT);
                assert_serves(rig);
                assert_closed(rig);
                for (size_t i = 0; i < N_MANY; i++)
                        lingering_free(&senders[i].sent);
        }
}

/* SIGTERM while closes are under way, and while the queue of its listening socket has more. */
LOOP_TEST(sigterm_while_fds_are_closed, 2)
{
        static struct sender senders[N_MANY];
        struct rig *rig = rig_start(&plain);
        bool can = has_loopback();

        rig->admin = raw_close(rig->admin);
        child_stop(rig->pid);
        if (can)
                send_many(rig, senders);
        if (_i == 1)
                kill(rig->pid, SIGTERM); /* it accepts none before it is told to end */
        kill(rig->pid, SIGCONT);
        rig_terminate(rig);
        for (size_t i = 0; can && i < N_MANY; i++)
                lingering_free(&senders[i].sent);
        rig_discard(rig);
}

int main(void)
{
        return harness_cases_with("sent-fds", 2 * TEST_TIMEOUT, NULL);
}
