/* The socket of a connection: reads frames, queues and writes replies. It knows no session.
 *
 * Bounds: a turn reads a few requests. A peer that reads none of its replies for too long fails.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_STREAM_H
#define BFCD_STREAM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <uv.h>

#include "daemon/net/fd_guard.h"
#include "daemon/net/poller.h"

#define STREAM_NO_TIMEOUT UINT64_MAX

struct frame_reader;
struct frame_writer;
struct peer_process;

struct stream_ops {
        void (*ready)(void *userdata);                 /* a turn is due */
        void (*fail)(void *userdata, const char *why); /* the stream has failed */
        void (*drained)(void *userdata);               /* see stream_drain() */
        void (*closed)(void *userdata);                /* after stream_end() */
};

struct stream {
        const struct stream_ops *ops;
        void *userdata;
        int fd; /* -1: there is none */
        struct poller *poller;
        struct poller_item item; /* of fd */
        struct fd_guard guard;
        struct frame_reader *reader;
        struct frame_writer *writer;
        uv_timer_t timer;   /* while crowded, stuck or draining */
        bool is_open;       /* the timer is in use */
        bool is_readable;   /* the kernel reported readable bytes, and not all of them were read */
        bool has_left;      /* the kernel reported that the peer hung up */
        bool has_urgent;    /* out-of-band bytes have come, at which the kernel ends a read */
        bool is_incomplete; /* no bytes yet, or the last ones completed no frame */
        bool is_crowded;    /* too many fds are in flight: the kernel refuses more */
        bool is_stuck;      /* replies wait for the peer to read */
        bool is_unread;     /* so do fds that were sent; no event tells when */
        size_t n_unread;    /* bytes in the socket at the start of that time */
        uint64_t stuck_ms;  /* the start */
        uint64_t read_timeout_ms;
        uint64_t look_ms; /* the interval to the next look, doubling: while unread or draining */
};

/* True: the peer of an accepted socket has already closed its end. Bytes may still be there. */
bool stream_has_hung_up(int fd);

/* Takes over fd on success, and waits for what comes. -ENOMEM; -errno: everything is undone. */
int stream_open(struct stream *s, struct uv_loop_s *loop, struct poller *poller, int fd,
                const struct fd_guard *guard, const struct stream_ops *ops, void *userdata);

/* Waits for the events that the stream needs. Without reads it still notices a hang-up. */
void stream_wait(struct stream *s, bool reads);

/* The kernel reports once what has come: a turn is due as long as it has not all been read, or the peer has hung up. */
bool stream_is_readable(const struct stream *s);
bool stream_has_left(const struct stream *s);

/* Reads some bytes and, while the identity check is open, checks which process sent them. 0; FRAME_AGAIN;
 * FRAME_EOF; -ECONNRESET; -EPROTO: fds came with them; -EPERM: another process sent them; -errno. */
int stream_read(struct stream *s, struct peer_process *p);

/* How many bytes the kernel has for the daemon to read. */
size_t stream_n_input(const struct stream *s);

/* The next frame that was read; see frame_reader_next(). */
int stream_next(struct stream *s, const uint8_t **ret_payload, size_t *ret_n_bytes);

/* True: so many replies are queued that no more requests may be read. Fds that are queued, or sent and not read,
 * count, because a client can acknowledge what it has not read. */
bool stream_is_full(const struct stream *s);

/* Writes what the socket accepts, with at most FRAME_MAX_UNREAD_FDS that the peer has not read. The time-out restarts whenever the peer reads something.
 * STREAM_NO_TIMEOUT: none. Negative: the socket failed. */
int stream_flush(struct stream *s, uint64_t read_timeout_ms);

/* Before stream_shut(), which takes long if much was not read: see fd_guard_drop(). */
bool stream_drop_input(struct stream *s);

/* Drops what is queued and stops using the socket. keeps_fd: the peer can still read what was sent. */
void stream_shut(struct stream *s, bool keeps_fd);

/* Calls drained(), now or later, when the socket's queue is empty. Fds that were sent are in flight until
 * the peer reads them or every copy of its socket is closed. */
void stream_drain(struct stream *s);

/* After closed() call stream_free(). */
void stream_end(struct stream *s);
void stream_free(struct stream *s);

#endif
