/* Frames over real sockets: every split, every bad length, fds and their order.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "proto/frame.h"
#include "proto/message.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/suite.h"

static int sv[2];
static struct frame_reader *reader;
static struct frame_writer *writer;

static void setup(void)
{
        ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sv), 0);
        ck_assert_int_eq(frame_reader_new(true, &reader), 0);
        ck_assert_int_eq(frame_writer_new(1u << 20, &writer), 0);
}

static void teardown(void)
{
        reader = frame_reader_free(reader);
        writer = frame_writer_free(writer);
        ck_assert_ptr_null(frame_reader_free(NULL));
        ck_assert_ptr_null(frame_writer_free(NULL));
        close(sv[0]);
        if (sv[1] >= 0)
                close(sv[1]);
}

FIXTURE(frame, setup, teardown);

static void add(size_t n_bytes, uint8_t fill, const int *fds, size_t n_fds)
{
        uint8_t *p = NULL;
        int copies[FRAME_MAX_FDS] = { 0 };

        for (size_t i = 0; i < n_fds; i++)
                copies[i] = fcntl(fds[i], F_DUPFD_CLOEXEC, 3);
        ck_assert_int_eq(frame_writer_add(writer, n_bytes, copies, n_fds, &p), 0);
        memset(p, fill, n_bytes);
}

static void expect(size_t n_bytes, uint8_t fill)
{
        const uint8_t *p = NULL;
        size_t n = 0;

        ck_assert_int_eq(frame_reader_next(reader, &p, &n), 0);
        ck_assert_uint_eq(n, n_bytes);
        for (size_t i = 0; i < n; i++)
                ck_assert_uint_eq(p[i], fill);
}

static void expect_none(void)
{
        const uint8_t *p = (const uint8_t *)"untouched";
        const uint8_t *before = p;
        size_t n = 77;

        ck_assert_int_eq(frame_reader_next(reader, &p, &n), FRAME_AGAIN);
        ck_assert_ptr_eq(p, before);
        ck_assert_uint_eq(n, 77);
}

static int new_memfd(size_t n_bytes)
{
        int fd = memfd_create("test", MFD_CLOEXEC);

        ck_assert_int_ge(fd, 0);
        ck_assert_int_eq(ftruncate(fd, (off_t)n_bytes), 0);
        return fd;
}

static void expect_size(int fd, off_t size)
{
        struct stat st;

        ck_assert_int_eq(fstat(fd, &st), 0);
        ck_assert_int_eq(st.st_size, size);
        ck_assert_int_eq(fcntl(fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
}

/* Takes one fd, which must be the memfd of this size. */
static void expect_fd(off_t size)
{
        int fd = -1;

        ck_assert_int_eq(frame_reader_take_fds(reader, &fd, 1), 0);
        expect_size(fd, size);
        close(fd);
}

TEST(split_at_every_byte)
{
        uint8_t wire[4 + 5 + 4 + 300 + 4 + 1] = { 5, 0, 0, 0, 1, 1, 1, 1, 1, 44, 1 };

        memset(wire + 13, 2, 300);
        wire[313] = 1;
        wire[317] = 3;
        for (size_t cut = 1; cut < sizeof(wire); cut++) {
                const uint8_t *p;
                size_t n, n_frames = 0, sizes[] = { 5, 300, 1 };

                for (int half = 0; half < 2; half++) {
                        const uint8_t *from = half ? wire + cut : wire;
                        size_t n_bytes = half ? sizeof(wire) - cut : cut;

                        ck_assert_int_eq(send(sv[0], from, n_bytes, 0), (ssize_t)n_bytes);
                        ck_assert_int_eq(frame_reader_receive(reader, sv[1], MSG_DONTWAIT), 0);
                        while (frame_reader_next(reader, &p, &n) == 0) {
                                ck_assert_uint_eq(n, sizes[n_frames]);
                                ck_assert_uint_eq(p[0], ++n_frames);
                                ck_assert_uint_eq(p[n - 1], n_frames);
                        }
                }
                ck_assert_uint_eq(n_frames, 3);
                ck_assert_int_eq(frame_reader_receive(reader, sv[1], MSG_DONTWAIT), FRAME_AGAIN);
        }
}

TEST(byte_by_byte)
{
        add(1, 9, NULL, 0);
        add(1000, 7, NULL, 0);
        ck_assert_int_eq(frame_writer_flush(writer, sv[0]), 0);
        for (int i = 0; i < 5 + 1004; i++) {
                uint8_t byte;

                ck_assert_int_eq(recv(sv[1], &byte, 1, 0), 1);
                ck_assert_uint_eq(frame_reader_feed(reader, &byte, 1), 1);
                if (i == 4)
                        expect(1, 9);
                else if (i < 1008)
                        expect_none();
        }
        expect(1000, 7);
        expect_none();
}

TEST(bad_lengths)
{
        static const uint8_t bad[][4] = {
                { 0, 0, 0, 0 }, { 1, 0, 1, 0 }, { 255, 255, 255, 255 }, { 0, 0, 0, 128 }
        };
        const uint8_t *p;
        size_t n;

        for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
                struct frame_reader *r = NULL;

                ck_assert_int_eq(frame_reader_new(false, &r), 0);
                ck_assert_uint_eq(frame_reader_feed(r, bad[i], 4), 4);
                ck_assert_int_eq(frame_reader_next(r, &p, &n), -EPROTO);
                ck_assert_int_eq(frame_reader_next(r, &p, &n), -EPROTO);
                frame_reader_free(r);
        }
}

TEST(largest_frames_back_to_back)
{
        uint8_t *p;

        ck_assert_int_eq(frame_writer_add(writer, 0, NULL, 0, &p), -EMSGSIZE);
        ck_assert_int_eq(frame_writer_add(writer, FRAME_MAX_PAYLOAD + 1, NULL, 0, &p), -EMSGSIZE);
        for (uint8_t i = 0; i < 10; i++)
                add(FRAME_MAX_PAYLOAD, i, NULL, 0);
        for (uint8_t i = 0; i < 10;) {
                const uint8_t *payload;
                size_t n;

                ck_assert_int_ge(frame_writer_flush(writer, sv[0]), 0);
                ck_assert_int_ge(frame_reader_receive(reader, sv[1], MSG_DONTWAIT), 0);
                while (frame_reader_next(reader, &payload, &n) == 0) {
                        ck_assert_uint_eq(n, FRAME_MAX_PAYLOAD);
                        ck_assert_uint_eq(payload[0], i);
                        ck_assert_uint_eq(payload[n - 1], i);
                        i++;
                }
        }
        ck_assert_uint_eq(frame_writer_n_queued(writer), 0);
        expect_none();
}

TEST(feed_takes_what_fits)
{
        static uint8_t zeros[200000];
        size_t n = frame_reader_feed(reader, zeros, sizeof(zeros));

        ck_assert_uint_ge(n, FRAME_HEADER_BYTES + FRAME_MAX_PAYLOAD);
        ck_assert_uint_lt(n, sizeof(zeros));
        ck_assert_uint_eq(frame_reader_feed(reader, zeros, 1), 0);
        /* A full reader does not take "no room" for "hung up". */
        ck_assert_int_eq(frame_reader_receive(reader, sv[1], MSG_DONTWAIT), 0);
}

TEST(hang_up)
{
        ck_assert_int_eq(frame_reader_receive(reader, sv[1], MSG_DONTWAIT), FRAME_AGAIN);
        ck_assert_int_eq(send(sv[0], "\2\0\0\0ab", 6, 0), 6);
        shutdown(sv[0], SHUT_WR);
        ck_assert_int_eq(frame_reader_receive(reader, sv[1], 0), 0);
        const uint8_t *p;
        size_t n;
        ck_assert_int_eq(frame_reader_next(reader, &p, &n), 0);
        ck_assert_int_eq(frame_reader_receive(reader, sv[1], 0), FRAME_EOF);
}

TEST(hang_up_inside_a_frame)
{
        ck_assert_int_eq(send(sv[0], "\2\0\0\0a", 5, 0), 5);
        shutdown(sv[0], SHUT_WR);
        ck_assert_int_eq(frame_reader_receive(reader, sv[1], 0), 0);
        expect_none();
        ck_assert_int_eq(frame_reader_receive(reader, sv[1], 0), -ECONNRESET);
}

TEST(reset)
{
        ck_assert_int_eq(send(sv[0], "x", 1, 0), 1);
        ck_assert_int_eq(send(sv[1], "x", 1, 0), 1);
        close(sv[1]); /* with unread bytes: a reset for the other end */
        sv[1] = -1;
        ck_assert_int_eq(frame_reader_receive(reader, sv[0], 0), 0);
        ck_assert_int_eq(frame_reader_receive(reader, sv[0], 0), -ECONNRESET);
        add(1, 1, NULL, 0);
        ck_assert_int_eq(frame_writer_flush(writer, sv[0]), -EPIPE);
}

TEST(fds_come_with_their_frames)
{
        int fds[3] = { new_memfd(1), new_memfd(2), new_memfd(3) };

        add(10, 'a', NULL, 0);
        add(20, 'b', fds, 2);
        add(30, 'c', NULL, 0);
        add(40, 'd', fds + 2, 1);
        add(50, 'e', NULL, 0);
        for (int i = 0; i < 3; i++)
                close(fds[i]); /* the writer has its own */
        ck_assert_int_eq(frame_writer_flush(writer, sv[0]), 0);

        /* However the kernel cuts the stream, the fds are here when their frame is. */
        while (frame_reader_receive(reader, sv[1], MSG_DONTWAIT) == 0) {
                const uint8_t *p;
                size_t n;

                while (frame_reader_next(reader, &p, &n) == 0) {
                        if (p[0] == 'b') {
                                ck_assert_uint_ge(frame_reader_n_fds(reader), 2);
                                expect_fd(1);
                                expect_fd(2);
                        } else if (p[0] == 'd') {
                                ck_assert_uint_eq(frame_reader_n_fds(reader), 1);
                                expect_fd(3);
                        }
                        ck_assert_uint_eq(n, 10u * (unsigned)(p[0] - 'a' + 1));
                }
        }
        int fd = -1;
        ck_assert_int_eq(frame_reader_take_fds(reader, &fd, 1), -EPROTO);
        ck_assert_int_eq(fd, -1);
}

TEST(fds_through_a_full_socket)
{
        int fds[FRAME_MAX_FDS], small = 1, fd = new_memfd(5), n_again = 0;
        size_t n_seen = 0;

        for (size_t i = 0; i < FRAME_MAX_FDS; i++)
                fds[i] = fd;
        ck_assert_int_eq(setsockopt(sv[0], SOL_SOCKET, SO_SNDBUF, &small, sizeof(small)), 0);
        for (int i = 0; i < 8; i++) {
                add(1000, (uint8_t)i, NULL, 0);
                add(5000, (uint8_t)(100 + i), fds, FRAME_MAX_FDS);
                ck_assert_uint_eq(frame_writer_n_fds(writer), (size_t)(i + 1) * FRAME_MAX_FDS);
        }
        while (n_seen < 16) {
                int r = frame_writer_flush(writer, sv[0]);

                ck_assert_int_ge(r, 0);
                n_again += r == FRAME_AGAIN;
                ck_assert_int_eq(frame_reader_receive(reader, sv[1], MSG_DONTWAIT), 0);
                const uint8_t *p;
                size_t n;
                while (frame_reader_next(reader, &p, &n) == 0) {
                        ck_assert_uint_eq(p[0], (n_seen % 2 ? 100 : 0) + n_seen / 2);
                        for (size_t i = 0; n_seen % 2 && i < FRAME_MAX_FDS; i++)
                                expect_fd(5);
                        n_seen++;
                }
        }
        ck_assert_int_gt(n_again, 0); /* else this tested nothing */
        ck_assert_uint_eq(frame_writer_n_fds(writer), 0);
        ck_assert_uint_eq(frame_reader_n_fds(reader), 0);
        close(fd);
}

TEST(fds_refused)
{
        struct frame_reader *r = NULL;
        int fd = new_memfd(1), n_before;

        ck_assert_int_eq(frame_reader_new(false, &r), 0);
        add(3, 1, &fd, 1);
        ck_assert_int_eq(frame_writer_flush(writer, sv[0]), 0);
        n_before = suite_count_fds();
        ck_assert_int_eq(frame_reader_receive(r, sv[1], 0), -EPROTO);
        ck_assert_int_eq(suite_count_fds(), n_before);
        frame_reader_free(r);
        close(fd);
}

/* More fds at once than a frame may have: cut off by the kernel. */
TEST(too_many_fds)
{
        int fd = new_memfd(1), n_before, many[FRAME_MAX_FDS + 1];
        union {
                struct cmsghdr align;
                char bytes[CMSG_SPACE(sizeof(many))];
        } control = { 0 };
        struct iovec iov = { (void *)(uintptr_t) "\1\0\0\0a", 5 };
        struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control };
        uint8_t *p;

        for (size_t i = 0; i < FRAME_MAX_FDS + 1; i++)
                many[i] = fd;
        ck_assert_int_eq(frame_writer_add(writer, 1, many, FRAME_MAX_FDS + 1, &p), -EMSGSIZE);
        msg.msg_controllen = sizeof(control);
        control.align = (struct cmsghdr){ CMSG_LEN(sizeof(many)), SOL_SOCKET, SCM_RIGHTS };
        memcpy(CMSG_DATA(&control.align), many, sizeof(many));
        ck_assert_int_eq(sendmsg(sv[0], &msg, 0), 5);
        n_before = suite_count_fds();
        ck_assert_int_eq(frame_reader_receive(reader, sv[1], 0), -EPROTO);
        ck_assert_int_eq(suite_count_fds(), n_before);
        close(fd);
}

/* Frames whose fds are not taken: bounded, then a violation. */
TEST(untaken_fds_are_bounded)
{
        int fds[FRAME_MAX_FDS], fd = new_memfd(1), r = 0;

        for (size_t i = 0; i < FRAME_MAX_FDS; i++)
                fds[i] = fd;
        for (int i = 0; i < 3; i++) { /* a writer alone would wait for the reader */
                add(1, 1, fds, FRAME_MAX_FDS);
                ck_assert_int_eq(frame_writer_flush(writer, sv[0]), 0);
                frame_writer_free(writer);
                ck_assert_int_eq(frame_writer_new(1u << 20, &writer), 0);
        }
        for (int i = 0; i < 3 && r == 0; i++)
                r = frame_reader_receive(reader, sv[1], MSG_DONTWAIT);
        ck_assert_int_eq(r, -EPROTO);
        ck_assert_uint_eq(frame_reader_n_fds(reader), 2 * FRAME_MAX_FDS);
        close(fd);
}

/* The limit below which n numbers of fds are free: the test may have inherited some. */
static rlim_t limit_with_room_for(unsigned n)
{
        for (int fd = 0;; fd++)
                if (fcntl(fd, F_GETFD) < 0 && n-- == 0)
                        return (rlim_t)fd;
}

/* Receives, with numbers for so many fds. */
static int receive_with_room_for(unsigned n_fds)
{
        struct rlimit old, tight;
        int r;

        ck_assert_int_eq(getrlimit(RLIMIT_NOFILE, &old), 0);
        tight = old;
        tight.rlim_cur = limit_with_room_for(n_fds);
        ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &tight), 0);
        r = frame_reader_receive(reader, sv[1], 0);
        ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &old), 0);
        return r;
}

/* A process short of fds: the kernel cuts off, which ends nothing, and nothing is left open. */
TEST(receiver_out_of_fds)
{
        static const unsigned rooms[] = { 3, 0, 7 };
        int fds[8], fd = new_memfd(1), n_before;

        for (size_t i = 0; i < 8; i++)
                fds[i] = fd;
        n_before = suite_count_fds();
        for (size_t i = 0; i < sizeof(rooms) / sizeof(rooms[0]); i++) {
                int taken[8], n_taken = 0;

                add(1, (uint8_t)i, fds, 8);
                ck_assert_int_eq(frame_writer_flush(writer, sv[0]), 0);
                ck_assert_int_eq(receive_with_room_for(rooms[i]), 0);
                expect(1, (uint8_t)i);
                ck_assert_int_eq(frame_reader_take_fds(reader, taken, 8), -EMFILE);
                for (int k = 0; k < 8; k++) {
                        ck_assert_int_eq(taken[k] >= 0, k < (int)rooms[i]);
                        if (taken[k] >= 0) {
                                expect_size(taken[k], 1);
                                close(taken[k]);
                                n_taken++;
                        }
                }
                ck_assert_int_eq(n_taken, (int)rooms[i]);
                ck_assert_int_eq(frame_reader_take_fds(reader, taken, 1), -EPROTO);
        }
        ck_assert_int_eq(suite_count_fds(), n_before);
        close(fd);
}

/* The frames before and behind one that was cut off have theirs; those that are left are closed. */
TEST(frames_beside_one_that_was_cut_off)
{
        int fd = new_memfd(2), fds[4] = { fd, fd, fd, fd }, taken[4], n_before;

        for (int i = 0; i < 4; i++) {
                add(1, (uint8_t)i, fds, 4);
                ck_assert_int_eq(frame_writer_flush(writer, sv[0]), 0);
        }
        n_before = suite_count_fds();
        for (int i = 0; i < 4; i++)
                ck_assert_int_eq(receive_with_room_for(i % 2 ? 2 : 4), 0);
        for (int i = 0; i < 3; i++) {
                expect(1, (uint8_t)i);
                ck_assert_int_eq(frame_reader_take_fds(reader, taken, 4), i % 2 ? -EMFILE : 0);
                for (int k = 0; k < (i % 2 ? 2 : 4); k++) {
                        expect_size(taken[k], 2);
                        close(taken[k]);
                }
        }
        reader = frame_reader_free(reader);
        ck_assert_int_eq(suite_count_fds(), n_before);
        ck_assert_int_eq(frame_reader_new(true, &reader), 0);
        close(fd);
}

/* The kernel refuses to have more fds in flight than the sender's limit on open
 * fds; not for root, so only as somebody else. */
TEST(too_many_references)
{
        struct rlimit limit, tight;
        int fds[32], fd = new_memfd(1), r = 0, n_frames = 0;

        ck_assert_int_eq(getrlimit(RLIMIT_NOFILE, &limit), 0);
        tight = limit;
        tight.rlim_cur = 30;
        if (geteuid() == 0 && setuid(54321) < 0)
                ck_abort_msg("setuid: %s", strerror(errno));
        for (size_t i = 0; i < 32; i++)
                fds[i] = fd;
        for (; n_frames < 8 && r == 0; n_frames++) {
                add(1, (uint8_t)n_frames, fds, 32);
                ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &tight), 0);
                r = frame_writer_flush(writer, sv[0]);
                ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
        }
        ck_assert_int_eq(r, FRAME_CROWDED);
        for (int i = 0; i < n_frames; i++) {
                ck_assert_int_eq(frame_reader_receive(reader, sv[1], MSG_DONTWAIT), 0);
                expect(1, (uint8_t)i);
                for (int j = 0; j < 32; j++)
                        expect_fd(1);
                ck_assert_int_eq(frame_writer_flush(writer, sv[0]), 0);
        }
        close(fd);
}

/* The kernel counts fds that are sent and not read against the sender's user, in all its processes. */
TEST(unread_fds_are_bounded)
{
        int fds[FRAME_MAX_FDS], fd = new_memfd(1);

        for (size_t i = 0; i < FRAME_MAX_FDS; i++)
                fds[i] = fd;
        add(1, 0, fds, FRAME_MAX_FDS);
        add(1, 1, fds, FRAME_MAX_UNREAD_FDS - FRAME_MAX_FDS);
        add(1, 2, NULL, 0);
        ck_assert_int_eq(frame_writer_flush(writer, sv[0]), 0);
        add(1, 3, fds, 1);
        add(1, 4, NULL, 0);
        ck_assert_int_eq(frame_writer_flush(writer, sv[0]), FRAME_UNREAD);
        for (uint8_t i = 0; i < 3; i++) { /* until all is read */
                ck_assert_int_eq(frame_writer_flush(writer, sv[0]), FRAME_UNREAD);
                ck_assert_uint_eq(frame_writer_n_fds(writer), 1);
                ck_assert_uint_gt(frame_n_unread(sv[0]), 0);
                ck_assert_int_eq(
                        frame_reader_receive_some(reader, sv[1], MSG_DONTWAIT, FRAME_HEADER_BYTES + 1), 0);
                expect(1, i);
                while (frame_reader_n_fds(reader) > 0)
                        expect_fd(1);
        }
        ck_assert_uint_eq(frame_n_unread(sv[0]), 0);
        ck_assert_int_eq(frame_writer_flush(writer, sv[0]), 0);
        ck_assert_int_eq(frame_reader_receive(reader, sv[1], MSG_DONTWAIT), 0);
        expect(1, 3);
        expect_fd(1);
        expect(1, 4);
        close(fd);
}

TEST(queue_is_bounded)
{
        struct frame_writer *w = NULL;
        uint8_t *p = NULL;

        ck_assert_int_eq(frame_writer_new(100, &w), 0);
        ck_assert_int_eq(frame_writer_add(w, 97, NULL, 0, &p), -ENOBUFS);
        ck_assert_ptr_null(p);
        ck_assert_int_eq(frame_writer_add(w, 40, NULL, 0, &p), 0);
        memset(p, 1, 40);
        ck_assert_int_eq(frame_writer_add(w, 53, NULL, 0, &p), -ENOBUFS);
        ck_assert_int_eq(frame_writer_add(w, 52, NULL, 0, &p), 0);
        memset(p, 2, 52);
        ck_assert_uint_eq(frame_writer_n_queued(w), 100);
        ck_assert_int_eq(frame_writer_flush(w, sv[0]), 0);
        ck_assert_uint_eq(frame_writer_n_queued(w), 0);
        frame_writer_free(w);
        ck_assert_int_eq(frame_reader_receive(reader, sv[1], 0), 0);
        expect(40, 1);
        expect(52, 2);
}

TEST(writer_takes_over_fds)
{
        int fds[3] = { new_memfd(1), new_memfd(2), new_memfd(3) };
        uint8_t *p = NULL;

        ck_assert_int_eq(frame_writer_add(writer, 0, fds, 1, &p), -EMSGSIZE);
        ck_assert_int_ge(fcntl(fds[0], F_GETFD), 0); /* it was not taken */
        for (int i = 0; i < 2; i++) {
                ck_assert_int_eq(frame_writer_add(writer, 1, &fds[i], 1, &p), 0);
                ck_assert_int_eq(frame_writer_flush(writer, sv[0]), 0);
                ck_assert_int_lt(fcntl(fds[i], F_GETFD), 0); /* the message has it */
        }
        ck_assert_int_eq(frame_writer_add(writer, 1, &fds[2], 1, &p), 0);
        frame_writer_clear(writer);
        ck_assert_int_lt(fcntl(fds[2], F_GETFD), 0);
        for (int i = 1; i <= 2; i++) {
                const uint8_t *payload;
                size_t n;

                ck_assert_int_eq(frame_reader_receive(reader, sv[1], 0), 0);
                ck_assert_int_eq(frame_reader_next(reader, &payload, &n), 0);
                expect_fd(i);
        }
}

/* Adding while part of the queue is sent: bytes stay in order, memory is reused. */
TEST(many_frames_in_flight)
{
        unsigned n_added = 0, n_seen = 0, seed = 1;

        while (n_seen < 20000) {
                const uint8_t *p;
                size_t n;

                for (int i = 0; i < 7 && n_added < 20000 && frame_writer_n_queued(writer) < 500000; i++) {
                        seed = seed * 1103515245u + 12345u;
                        add(1 + (seed >> 16) % 3000, (uint8_t)n_added, NULL, 0);
                        n_added++;
                }
                ck_assert_int_ge(frame_writer_flush(writer, sv[0]), 0);
                if (seed & 0x10000)
                        continue;
                ck_assert_int_ge(frame_reader_receive(reader, sv[1], MSG_DONTWAIT), 0);
                while (frame_reader_next(reader, &p, &n) == 0) {
                        ck_assert_uint_eq(p[0], (uint8_t)n_seen);
                        ck_assert_uint_eq(p[n - 1], (uint8_t)n_seen);
                        n_seen++;
                }
        }
}

TEST(messages_in_bounded_memory)
{
        Bfcd__Request request = BFCD__REQUEST__INIT, *got;
        Bfcd__Hello hello = BFCD__HELLO__INIT;
        struct message_arena *a = NULL, *tiny = NULL;
        char name[3000] = { 0 };
        uint8_t bytes[4096];
        size_t n;

        memset(name, 'n', sizeof(name) - 1);
        hello.version = 1;
        hello.name = name;
        request.id = 7;
        request.body_case = BFCD__REQUEST__BODY_HELLO;
        request.hello = &hello;
        n = bfcd__request__pack(&request, bytes);
        ck_assert_int_eq(message_arena_new(MESSAGE_ARENA_BYTES, &a), 0);
        ck_assert_int_eq(message_arena_new(2000, &tiny), 0);
        for (int i = 0; i < 1000; i++) {
                ck_assert_ptr_null(message_unpack_request(tiny, bytes, n));
                got = message_unpack_request(a, bytes, n);
                ck_assert_ptr_nonnull(got);
                ck_assert_uint_eq(got->id, 7);
                ck_assert_str_eq(got->hello->name, name);
        }
        for (size_t cut = 1; cut < n; cut++)
                message_unpack_request(a, bytes, cut);
        ck_assert_ptr_null(message_unpack_request(a, (const uint8_t *)"\377\377\377", 3));
        message_arena_free(a);
        message_arena_free(tiny);
}

/* A few bytes that ask for much: 32,000 empty rows in a reply. */
TEST(greedy_message)
{
        struct message_arena *a = NULL;
        uint8_t bytes[2 + 4 + 64000];
        size_t n = 0;

        bytes[n++] = 8 << 3 | 2; /* Reply.list, of 64000 bytes */
        bytes[n++] = 0x80;
        bytes[n++] = 0xf4;
        bytes[n++] = 0x03;
        for (int i = 0; i < 32000; i++) {
                bytes[n++] = 6 << 3 | 2; /* ListReply.blocks, empty */
                bytes[n++] = 0;
        }
        ck_assert_int_eq(message_arena_new(MESSAGE_ARENA_BYTES, &a), 0);
        ck_assert_ptr_null(message_unpack_reply(a, bytes, n));
        message_arena_free(a);
}
