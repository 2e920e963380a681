/* Frames: a 32-bit little-endian length, then that many bytes of payload.
 *
 * A reader collects bytes as they come and yields whole payloads; a writer
 * queues frames and sends as much as the socket takes. Neither allocates in
 * proportion to what the other end claims: a length is checked before anything
 * is kept. No policy, no protobuf, no log. Not thread-safe.
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

/* ---- reading ------------------------------------------------------------- */

struct frame_reader;

/* take_fds: whether this end may be sent fds at all. Where it may not, an fd
 * from the other end is a violation (the kernel discards it: no control buffer
 * is offered). -ENOMEM. */
int frame_reader_new(bool take_fds, struct frame_reader **ret);
struct frame_reader *frame_reader_free(struct frame_reader *r); /* closes fds not taken */

enum {
        FRAME_AGAIN = 1, /* nothing (more) to read now */
        FRAME_EOF,       /* the other end hung up between frames */
        FRAME_CROWDED,   /* too many fds are in flight on this machine: try later */
};

/* One recvmsg() into the buffer. 0: some bytes came. FRAME_AGAIN, FRAME_EOF.
 * -EPROTO: fds where none may come, too many fds. -ECONNRESET: hung up inside a frame, or reset. Other -errno
 * from recvmsg(). flags: 0 or MSG_DONTWAIT. */
int frame_reader_receive(struct frame_reader *r, int fd, int flags);

/* The same with at most so many bytes: what was written byte by byte costs the
 * kernel as much for each byte as for a frame. */
int frame_reader_receive_some(struct frame_reader *r, int fd, int flags, size_t n_max);

/* The same, and by which process it was sent, where the socket has SO_PASSCRED; 0: the kernel does not
 * say. What one call brings one process sent. For readers that take no fds. */
int frame_reader_receive_from(struct frame_reader *r, int fd, int flags, size_t n_max, pid_t *ret_sender);

/* The next whole payload, if there is one: 0 and a pointer into the buffer,
 * valid until the next frame_reader_receive(). FRAME_AGAIN: incomplete.
 * -EPROTO: a length of 0 or above FRAME_MAX_PAYLOAD. */
int frame_reader_next(struct frame_reader *r, const uint8_t **ret_payload, size_t *ret_n_bytes);

/* The same without taking it: the next call gives it again. */
int frame_reader_peek(const struct frame_reader *r, const uint8_t **ret_payload, size_t *ret_n_bytes);

/* For tests and fuzzers: bytes as if they had come from a socket. Takes at most
 * what the buffer has room for and returns how many. */
size_t frame_reader_feed(struct frame_reader *r, const uint8_t *bytes, size_t n_bytes);

/* Hands over the n oldest fds received (CLOEXEC); the caller owns them. -EPROTO
 * when fewer have come. -EMFILE: this process had no number for all of their frame's: those that it had
 * come first, and are the caller's, the rest are -1. */
int frame_reader_take_fds(struct frame_reader *r, int *ret_fds, size_t n_fds);

/* How many fds wait to be taken. */
size_t frame_reader_n_fds(const struct frame_reader *r);

/* ---- writing ------------------------------------------------------------- */

struct frame_writer;

/* max_queued_bytes: more than this waiting is refused with -ENOBUFS. */
int frame_writer_new(size_t max_queued_bytes, struct frame_writer **ret);
struct frame_writer *frame_writer_free(struct frame_writer *w);

/* Drops what waits, and its fds: of a socket that is not used any more. */
void frame_writer_clear(struct frame_writer *w);

/* Room for a payload of exactly n_bytes (1 to FRAME_MAX_PAYLOAD); the header
 * is written already. Fill it before the next call on w. -EMSGSIZE, -ENOBUFS,
 * -ENOMEM, -EMFILE. fds (n_fds <= FRAME_MAX_FDS) go with the frame; they are duplicated
 * here, so the caller keeps its own. */
int frame_writer_add(struct frame_writer *w, size_t n_bytes, const int *fds, size_t n_fds,
                     uint8_t **ret_payload);

/* Sends without blocking what is queued. 0: all is gone. FRAME_AGAIN: the
 * socket is full; call again when it is writable. FRAME_CROWDED: the kernel
 * refuses more fds in flight (ETOOMANYREFS), also to a writable socket; call
 * again after a while. -EPIPE, -ECONNRESET, other -errno. Never raises
 * SIGPIPE. */
int frame_writer_flush(struct frame_writer *w, int fd);

size_t frame_writer_n_queued(const struct frame_writer *w); /* bytes */
size_t frame_writer_n_fds(const struct frame_writer *w);    /* open in the queue */

#endif
