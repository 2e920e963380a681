/* Frames: a 32-bit little-endian length, then that many bytes of payload.
 *
 * A reader collects bytes as they arrive and returns whole payloads; a writer queues frames and sends as
 * much as the socket accepts. A length is checked before memory is allocated for it. No policy, no
 * protobuf, no log. Not thread-safe.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_PROTO_FRAME_H
#define BFC_PROTO_FRAME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define FRAME_MAX_PAYLOAD  65536u
#define FRAME_HEADER_BYTES 4u
#define FRAME_MAX_FDS      64u /* with one frame; the kernel takes 253 at most */
/* That the peer of a writer may not have read: the kernel counts them against the sender's user. A largest frame beside
 * the three fds with the reply to a hello. */
#define FRAME_MAX_UNREAD_FDS (FRAME_MAX_FDS + 3u)

/* ---- reading ------------------------------------------------------------- */

struct frame_reader;

/* take_fds: the peer may send fds. If false, an fd is a violation; the kernel discards it because no
 * control buffer is offered. -ENOMEM. */
int frame_reader_new(bool take_fds, struct frame_reader **ret);
struct frame_reader *frame_reader_free(struct frame_reader *r); /* closes remaining fds */

enum {
        FRAME_AGAIN = 1, /* nothing (more) to read now */
        FRAME_EOF,       /* the peer hung up between frames */
        FRAME_CROWDED,   /* too many fds are in flight on this machine: try later */
        FRAME_UNREAD,    /* the peer has to read the fds that were sent to it first: try later */
};

/* One recvmsg() into the buffer. 0: bytes were read. FRAME_AGAIN, FRAME_EOF. -EPROTO: unexpected fds, or
 * too many. -ECONNRESET: hung up inside a frame, or reset. Other -errno of recvmsg(). flags: 0 or
 * MSG_DONTWAIT. */
int frame_reader_receive(struct frame_reader *r, int fd, int flags);

/* True: the last receive returned fewer bytes than were asked for, so the socket had no more at that time. Without
 * SO_PASSCRED, fds and out-of-band bytes: there the kernel ends a receive early. */
bool frame_reader_is_drained(const struct frame_reader *r);

/* Receives at most n_max bytes. For data that was written byte by byte the kernel's cost per byte is
 * that of a frame. */
int frame_reader_receive_some(struct frame_reader *r, int fd, int flags, size_t n_max);

/* Receives at most n_max bytes, and returns the sender's pid if the socket has SO_PASSCRED; 0: the kernel does not
 * report it. All bytes of one call are from one process. Only for readers that take no fds. */
int frame_reader_receive_from(struct frame_reader *r, int fd, int flags, size_t n_max, pid_t *ret_sender);

/* The next whole payload, if there is one: 0 and a pointer into the buffer,
 * valid until the next frame_reader_receive(). FRAME_AGAIN: incomplete.
 * -EPROTO: a length of 0 or above FRAME_MAX_PAYLOAD. */
int frame_reader_next(struct frame_reader *r, const uint8_t **ret_payload, size_t *ret_n_bytes);

/* The next whole payload, which the next call returns again. */
int frame_reader_peek(const struct frame_reader *r, const uint8_t **ret_payload, size_t *ret_n_bytes);

/* For tests and fuzzers: adds bytes as if received from a socket. Returns how many fitted into the
 * buffer. */
size_t frame_reader_feed(struct frame_reader *r, const uint8_t *bytes, size_t n_bytes);

/* Hands over the n oldest received fds (CLOEXEC); the caller owns them. -EPROTO: fewer were received.
 * -EMFILE: this process had no free fd numbers for all fds of their frame: the received ones come first
 * and belong to the caller, the rest are -1. */
int frame_reader_take_fds(struct frame_reader *r, int *ret_fds, size_t n_fds);

/* The number of received fds that were not taken. */
size_t frame_reader_n_fds(const struct frame_reader *r);

/* ---- writing ------------------------------------------------------------- */

struct frame_writer;

/* max_queued_bytes: frames beyond it are refused with -ENOBUFS. */
int frame_writer_new(size_t max_queued_bytes, struct frame_writer **ret);
struct frame_writer *frame_writer_free(struct frame_writer *w);

/* Drops queued frames and their fds, for a socket that is no longer used. */
void frame_writer_clear(struct frame_writer *w);

/* Room for a payload of exactly n_bytes (1 to FRAME_MAX_PAYLOAD); the header is already written. Fill it
 * before the next call on w. -EMSGSIZE, -ENOBUFS, -ENOMEM. fds (n_fds <= FRAME_MAX_FDS) are sent with the
 * frame and then closed; they are taken over on success. */
int frame_writer_add(struct frame_writer *w, size_t n_bytes, const int *fds, size_t n_fds,
                     uint8_t **ret_payload);

/* Sends queued bytes without blocking. 0: all were sent. FRAME_AGAIN: the socket is full; call again when
 * it is writable. FRAME_CROWDED: the kernel refuses more fds in flight (ETOOMANYREFS), even on a writable
 * socket; call again later. FRAME_UNREAD: FRAME_MAX_UNREAD_FDS would be exceeded; call again when
 * frame_n_unread() is 0. -EPIPE, -ECONNRESET, other -errno. Never raises SIGPIPE. */
int frame_writer_flush(struct frame_writer *w, int fd);

/* Sent on this Unix socket and not read by its peer: bytes, as the kernel counts them. */
size_t frame_n_unread(int fd);

size_t frame_writer_n_queued(const struct frame_writer *w); /* bytes */
size_t frame_writer_n_fds(const struct frame_writer *w);    /* open in the queue */

#endif
