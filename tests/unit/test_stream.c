/* A connection's socket: how much is read at once, unread input at the end, and the time that a client has to read its
 * replies.
 *
 * clock_gettime() is wrapped: each look at the clock finds a millisecond later, so the time to drop is over after one read,
 * and no read is quick.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/net/stream.h"

#include <errno.h>
#include <linux/sockios.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <time.h>

#include "daemon/net/peer_process.h"
#include "proto/frame.h"
#include "tests/suite.h"

static uv_loop_t loop;
static struct poller *poller;
static struct stream stream;
static int peer;          /* -1: closed */
static bool clock_stands; /* each read is quick */

int __wrap_clock_gettime(clockid_t clock, struct timespec *ret);
int __wrap_clock_gettime(clockid_t clock, struct timespec *ret)
{
        static uint64_t now_ms;

        (void)clock;
        now_ms += !clock_stands;
        *ret = (struct timespec){ .tv_sec = (time_t)(now_ms / 1000),
                                  .tv_nsec = (long)(now_ms % 1000) * 1000000 };
        return 0;
}

/* Of what the stream calls; no identity is open here. */
int peer_identity_verify_sender(struct peer_identity *identity, int socket, int pidfd, pid_t sender)
{
        (void)identity, (void)socket, (void)pidfd, (void)sender;
        return 0;
}

static unsigned n_ready, n_failures;

static void count_ready(void *unused)
{
        (void)unused;
        n_ready++;
}

static void nothing(void *unused)
{
        (void)unused;
}

static void count_failure(void *unused, const char *why)
{
        (void)unused;
        ck_assert_msg(strncmp(why, "timeout: ", 9) == 0, "%s", why);
        n_failures++;
}

static const struct stream_ops ops = {
        .ready = count_ready, .fail = count_failure, .drained = nothing, .closed = nothing
};

static void stream_begin(void)
{
        const struct fd_guard guard = { .refuses = true };
        int fds[2];

        ck_assert_int_eq(uv_loop_init(&loop), 0);
        ck_assert_int_eq(poller_new(&poller), 0);
        ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds), 0);
        peer = fds[1];
        ck_assert_int_eq(stream_open(&stream, &loop, poller, fds[0], &guard, &ops, NULL), 0);
}

static void stream_finish(void)
{
        ck_assert_uint_eq(n_failures, 0);
        stream_shut(&stream, false);
        stream_end(&stream);
        uv_run(&loop, UV_RUN_DEFAULT);
        stream_free(&stream);
        uv_loop_close(&loop);
        uv_library_shutdown(); /* closes what all loops share */
        poller_free(poller);
        if (peer >= 0)
                close(peer);
}

static size_t n_input(void)
{
        int n = 0;

        ck_assert_int_eq(ioctl(stream.fd, SIOCINQ, &n), 0);
        return (size_t)n;
}

static int send_to_it(size_t n_bytes)
{
        static const uint8_t bytes[65536];

        return send(peer, bytes, n_bytes, MSG_NOSIGNAL) < 0 ? -errno : 0;
}

static void fill(size_t n_bytes)
{
        int r;

        while ((r = send_to_it(n_bytes)) == 0)
                ;
        ck_assert_int_eq(r, -EAGAIN);
}

static void drop_all(void)
{
        while (stream_drop_input(&stream))
                ;
}

TEST(unread_input_is_dropped_in_parts)
{
        const size_t units[] = { 65536, 1000, 8 };

        for (size_t i = 0; i < sizeof(units) / sizeof(units[0]); i++) {
                size_t n_before, n;

                stream_begin();
                fill(units[i]);
                n_before = n_input();
                ck_assert_uint_gt(n_before, 2 * FD_GUARD_FEW_BYTES);
                while (stream_drop_input(&stream)) {
                        n = n_input();
                        ck_assert_uint_lt(n, n_before);
                        ck_assert_uint_le(n_before - n, FD_GUARD_FEW_BYTES);
                        n_before = n;
                        ck_assert_int_eq(send_to_it(1), -EPIPE);
                }
                ck_assert_uint_le(n_input(), FD_GUARD_FEW_BYTES);
                stream_finish();
        }
}

/* The socket stays as it is: what was sent can still be read, and more can come. */
TEST(little_input_is_left)
{
        stream_begin();
        ck_assert(!stream_drop_input(&stream));
        ck_assert_int_eq(send_to_it(FD_GUARD_FEW_BYTES), 0);
        ck_assert(!stream_drop_input(&stream));
        ck_assert_uint_eq(n_input(), FD_GUARD_FEW_BYTES);
        ck_assert_int_eq(send_to_it(1), 0);
        ck_assert(stream_drop_input(&stream));
        ck_assert_uint_eq(n_input(), FD_GUARD_FEW_BYTES + 1 - 16);
        stream_finish();
}

/* File descriptors may be in it; the guard closes those. */
TEST(input_that_is_guarded_is_left)
{
        size_t n;

        stream_begin();
        stream.guard.is_open = true;
        fill(65536);
        n = n_input();
        ck_assert(!stream_drop_input(&stream));
        ck_assert_uint_eq(n_input(), n);
        ck_assert_int_eq(send_to_it(1), -EAGAIN);
        stream.guard.is_open = false;
        drop_all();
        stream_finish();
}

TEST(nothing_comes_once_input_is_dropped)
{
        stream_begin();
        fill(65536);
        ck_assert(stream_drop_input(&stream));
        ck_assert_int_eq(send_to_it(1), -EPIPE);
        poller_run(poller, 0);
        ck_assert_uint_eq(n_ready, 0);
        drop_all();
        stream_finish();
}

/* A read of single bytes takes as long as one of so many frames. */
TEST(few_bytes_are_read_until_they_complete_a_frame)
{
        static const uint8_t frame[] = { 1, 0, 0, 0, 'x' };
        struct peer_process process = { .pidfd = -1 };
        const uint8_t *payload;
        size_t n_bytes;

        stream_begin();
        ck_assert_int_eq(send(peer, frame, sizeof(frame), 0), (ssize_t)sizeof(frame));
        for (int i = 0; i < 200; i++)
                ck_assert_int_eq(send_to_it(1), 0);
        ck_assert_int_eq(stream_read(&stream, &process), 0);
        ck_assert_uint_eq(n_input(), 205 - 16);
        ck_assert_int_eq(stream_read(&stream, &process), 0);
        ck_assert_uint_eq(n_input(), 205 - 2 * 16);
        ck_assert_int_eq(stream_next(&stream, &payload, &n_bytes), 0);
        ck_assert_uint_eq(n_bytes, 1);
        ck_assert_int_eq(stream_read(&stream, &process), 0);
        ck_assert_uint_eq(n_input(), 205 - 2 * 16 - 128);
        stream_finish();
}

/* A quick read is followed by one of twice as many bytes in the same turn, until there is a frame or a limit. */
TEST(long_frames_are_read_in_few_turns)
{
        static const uint8_t frame[200] = { 196 }, long_header[] = { 0, 0x20, 0, 0 };
        struct peer_process process = { .pidfd = -1 };
        const uint8_t *payload;
        size_t n_bytes;

        stream_begin();
        clock_stands = true;
        ck_assert_int_eq(send(peer, frame, sizeof(frame), 0), (ssize_t)sizeof(frame));
        poller_run(poller, 0);
        ck_assert_int_eq(stream_read(&stream, &process), 0);
        ck_assert_int_eq(stream_next(&stream, &payload, &n_bytes), 0);
        ck_assert_uint_eq(n_bytes, 196);
        ck_assert_int_eq(stream_read(&stream, &process), FRAME_AGAIN);
        ck_assert_int_eq(send(peer, long_header, sizeof(long_header), 0), (ssize_t)sizeof(long_header));
        ck_assert_int_eq(send_to_it(8000), 0);
        poller_run(poller, 0);
        ck_assert_int_eq(stream_read(&stream, &process), 0);
        ck_assert_uint_eq(n_input(), 8004 - 496); /* 16 + 32 + ... + 256 */
        clock_stands = false;
        ck_assert_int_eq(stream_read(&stream, &process), 0);
        ck_assert_uint_eq(n_input(), 8004 - 496 - 16);
        stream_finish();
}

/* However often the kernel is asked. The stream knows what is still unread. */
TEST(input_is_reported_once)
{
        struct peer_process process = { .pidfd = -1 };

        stream_begin();
        n_ready = 0;
        for (int i = 0; i < 20; i++)
                ck_assert_int_eq(send_to_it(1), 0);
        for (int i = 0; i < 3; i++)
                poller_run(poller, 0);
        ck_assert_uint_eq(n_ready, 1);
        ck_assert_int_eq(stream_read(&stream, &process), 0);
        ck_assert(stream_is_readable(&stream)); /* four are left */
        ck_assert_int_eq(stream_read(&stream, &process), 0);
        ck_assert(!stream_is_readable(&stream));
        ck_assert_int_eq(send_to_it(1), 0);
        poller_run(poller, 0);
        ck_assert_uint_eq(n_ready, 2);
        ck_assert(stream_is_readable(&stream));
        stream_finish();
}

/* Exactly what one read takes: only the next one tells that there is no more. */
TEST(input_is_unread_until_a_read_finds_too_little)
{
        struct peer_process process = { .pidfd = -1 };

        stream_begin();
        ck_assert_int_eq(send_to_it(16), 0);
        poller_run(poller, 0);
        ck_assert_int_eq(stream_read(&stream, &process), 0);
        ck_assert(stream_is_readable(&stream));
        ck_assert_int_eq(stream_read(&stream, &process), FRAME_AGAIN);
        ck_assert(!stream_is_readable(&stream));
        stream_finish();
}

/* A read that looked first got as much as the look found. */
TEST(short_reads_of_a_guarded_socket_leave_it_readable)
{
        struct peer_process process = { .pidfd = -1 };

        stream_begin();
        stream.guard = (struct fd_guard){ .is_open = true };
        ck_assert_int_eq(send_to_it(1), 0);
        poller_run(poller, 0);
        ck_assert_int_eq(stream_read(&stream, &process), 0);
        ck_assert(stream_is_readable(&stream));
        ck_assert_int_eq(stream_read(&stream, &process), FRAME_AGAIN);
        ck_assert(!stream_is_readable(&stream));
        stream_finish();
}

/* The kernel ends a read before such a byte. */
TEST(urgent_bytes_do_not_hide_what_comes_after_them)
{
        struct peer_process process = { .pidfd = -1 };
        unsigned n_reads = 0;

        stream_begin();
        ck_assert_int_eq(send_to_it(4), 0);
        if (send(peer, "!", 1, MSG_OOB) < 0) {
                ck_assert_int_eq(errno, EOPNOTSUPP); /* so nothing is urgent */
                stream_finish();
                return;
        }
        ck_assert_int_eq(send_to_it(4), 0);
        poller_run(poller, 0);
        for (; stream_is_readable(&stream); n_reads++)
                (void)stream_read(&stream, &process);
        ck_assert_uint_le(n_input(), 1); /* where the kernel counts the urgent one */
        ck_assert_uint_ge(n_reads, 2);
        stream_finish();
}

/* The kernel ends a read before the first byte with a sender: it was asked for senders after it had queued others. */
TEST(bytes_without_a_sender_do_not_hide_what_comes_after_them)
{
        struct peer_process process = { .pidfd = -1, .identity.is_open = true };
        unsigned n_reads = 0;
        int yes = 1;

        stream_begin();
        ck_assert_int_eq(send_to_it(4), 0);
        ck_assert_int_eq(setsockopt(stream.fd, SOL_SOCKET, SO_PASSCRED, &yes, sizeof(yes)), 0);
        ck_assert_int_eq(send_to_it(4), 0);
        poller_run(poller, 0);
        for (; stream_is_readable(&stream); n_reads++)
                (void)stream_read(&stream, &process);
        ck_assert_uint_eq(n_input(), 0);
        ck_assert_uint_ge(n_reads, 2);
        stream_finish();
}

/* Reading does not make the stream forget it. Nothing is reported while no reads are waited for but this. */
TEST(a_peer_that_leaves_with_unread_input)
{
        struct peer_process process = { .pidfd = -1 };

        stream_begin();
        n_ready = 0;
        for (int i = 0; i < 20; i++)
                ck_assert_int_eq(send_to_it(1), 0);
        close(peer);
        peer = -1;
        poller_run(poller, 0);
        poller_run(poller, 0);
        ck_assert_uint_eq(n_ready, 1);
        ck_assert_int_eq(stream_read(&stream, &process), 0);
        ck_assert(stream_is_readable(&stream));
        ck_assert_int_eq(stream_read(&stream, &process), 0);
        ck_assert_uint_eq(n_input(), 0);
        ck_assert(stream_has_left(&stream));
        stream_finish();
}

/* What came meanwhile is reported when the stream waits for it again. */
TEST(a_pause_of_reading_loses_nothing)
{
        stream_begin();
        n_ready = 0;
        stream_wait(&stream, false);
        ck_assert_int_eq(send_to_it(1), 0);
        poller_run(poller, 0);
        ck_assert_uint_eq(n_ready, 0);
        stream_wait(&stream, true);
        poller_run(poller, 0);
        ck_assert_uint_eq(n_ready, 1);
        ck_assert(stream_is_readable(&stream));
        stream_wait(&stream, false);
        ck_assert_int_eq(shutdown(peer, SHUT_WR), 0);
        poller_run(poller, 0);
        ck_assert_uint_eq(n_ready, 2);
        ck_assert(stream_has_left(&stream));
        stream_finish();
}

/* Whether or not there is something to read. A peer that has shut down its end for writing can still read. */
TEST(a_peer_that_has_closed_is_noticed)
{
        for (int has_sent = 0; has_sent < 2; has_sent++) {
                stream_begin();
                if (has_sent)
                        ck_assert_int_eq(send_to_it(1), 0);
                ck_assert(!stream_has_hung_up(stream.fd));
                ck_assert_int_eq(shutdown(peer, SHUT_WR), 0);
                ck_assert(!stream_has_hung_up(stream.fd));
                close(peer);
                ck_assert(stream_has_hung_up(stream.fd));
                peer = -1;
                stream_finish();
        }
}

static void read_replies(void)
{
        static uint8_t bytes[65536];

        while (recv(peer, bytes, sizeof(bytes), 0) > 0)
                ;
}

/* A client that did not read for a moment, and then all of it, is not disconnected later. */
TEST(read_timeout_ends_with_the_last_reply)
{
        enum { N_REPLIES = 10, REPLY_BYTES = 60000 }; /* more than a socket takes */
        uint8_t *payload;

        stream_begin();
        for (int i = 0; i < N_REPLIES; i++) {
                ck_assert_int_eq(frame_writer_add(stream.writer, REPLY_BYTES, NULL, 0, &payload), 0);
                memset(payload, i, REPLY_BYTES);
        }
        ck_assert_int_eq(stream_flush(&stream, 1), 0);
        ck_assert_uint_gt(frame_writer_n_queued(stream.writer), 0);
        ck_assert(uv_loop_alive(&loop)); /* it has a millisecond, which does not pass here */
        while (frame_writer_n_queued(stream.writer) > 0) {
                read_replies();
                ck_assert_int_eq(stream_flush(&stream, 1), 0);
        }
        read_replies();
        ck_assert_int_eq(uv_run(&loop, UV_RUN_DEFAULT), 0); /* at once: the loop waits for nothing */
        stream_finish();
}

static void add_fds(unsigned n_fds)
{
        int fds[FRAME_MAX_FDS];
        uint8_t *payload;

        for (unsigned i = 0; i < n_fds; i++)
                fds[i] = dup(peer);
        ck_assert_int_eq(frame_writer_add(stream.writer, 1, fds, n_fds, &payload), 0);
        *payload = 1;
}

/* The socket is writable all the time, and a client that acknowledges without reading is not read either. */
TEST(fds_wait_for_the_reader)
{
        stream_begin();
        for (int i = 0; i < 3; i++)
                add_fds(FRAME_MAX_FDS);
        ck_assert_int_eq(stream_flush(&stream, 1000000), 0);
        stream_wait(&stream, true);
        for (unsigned n_left = 2; n_left > 0; n_left--) {
                ck_assert_uint_eq(frame_writer_n_fds(stream.writer), n_left * FRAME_MAX_FDS);
                ck_assert(stream_is_full(&stream));
                ck_assert_int_eq(stream_flush(&stream, 1000000), 0);
                n_ready = 0;
                for (int i = 0; i < 5; i++) { /* looks */
                        ck_assert_int_ne(uv_run(&loop, UV_RUN_ONCE), 0);
                        poller_run(poller, 0);
                }
                ck_assert_uint_eq(n_ready, 0);
                read_replies();
                while (n_ready == 0)
                        ck_assert_int_ne(uv_run(&loop, UV_RUN_ONCE), 0);
                ck_assert_int_eq(stream_flush(&stream, 1000000), 0);
        }
        ck_assert_uint_eq(frame_writer_n_queued(stream.writer), 0);
        ck_assert(!stream_is_full(&stream));
        ck_assert_int_eq(uv_run(&loop, UV_RUN_DEFAULT), 0); /* it waits for nothing */
        stream_finish();
}

/* It has the time of one that reads no replies; without a time-out it is looked at all the same. */
TEST(fds_wait_for_the_read_timeout)
{
        stream_begin();
        for (int i = 0; i < 2; i++)
                add_fds(FRAME_MAX_FDS);
        ck_assert_int_eq(stream_flush(&stream, STREAM_NO_TIMEOUT), 0);
        for (int i = 0; i < 3; i++)
                ck_assert_int_ne(uv_run(&loop, UV_RUN_ONCE), 0);
        read_replies();
        n_ready = 0;
        while (n_ready == 0)
                ck_assert_int_ne(uv_run(&loop, UV_RUN_ONCE), 0);
        add_fds(FRAME_MAX_FDS);
        ck_assert_int_eq(stream_flush(&stream, 5), 0);
        while (n_failures == 0)
                (void)uv_run(&loop, UV_RUN_ONCE);
        n_failures = 0;
        stream_finish();
}
