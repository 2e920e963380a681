/* The events socket; see events.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/net/events.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>
#include <uv.h>

#include "daemon/net/fd_guard.h"
#include "proto/frame.h"

#define EVENTS_QUEUE_MAX     (64u * 1024u)
#define EVENTS_RECEIVE_BYTES 128u /* in one turn */
#define EVENTS_HEARD_MAX     8u   /* as STREAM_HEARD_MAX */

struct events {
        uv_poll_t poll;
        int fd;
        struct fd_guard guard; /* of fd */
        bool ended;            /* ops->end() was called */
        bool readable;         /* bytes have come; the turn reads them */
        unsigned n_reports;    /* how often the kernel has said so */
        int awaited;           /* events that poll waits for */
        const struct events_ops *ops;
        void *userdata;
        struct message_arena *arena;
        struct frame_reader *reader;
        struct frame_writer *writer;
};

static void on_events(uv_poll_t *handle, int status, int events);

static void events_end(struct events *e, const char *why)
{
        if (e->ended)
                return;
        e->ended = true;
        uv_poll_stop(&e->poll);
        e->ops->end(e->userdata, why);
}

/* events 0: waits for nothing until the turn. A change costs system calls. */
static void events_await(struct events *e, int events)
{
        if (e->ended || events == e->awaited)
                return;
        e->awaited = events;
        if (events == 0)
                uv_poll_stop(&e->poll);
        else
                uv_poll_start(&e->poll, events, on_events);
}

/* Sends what the socket takes. A hang-up is noticed by the next read. */
static void events_flush(struct events *e)
{
        int r = frame_writer_flush(e->writer, e->fd);

        if (!e->readable || e->awaited != 0)
                events_await(e, UV_READABLE | (r == FRAME_AGAIN ? UV_WRITABLE : 0));
}

static void events_handle_frames(struct events *e)
{
        const uint8_t *payload;
        size_t n_bytes;
        int r = 0;

        while (!e->ended && (r = frame_reader_next(e->reader, &payload, &n_bytes)) == 0) {
                const Bfcd__EventReply *reply = message_unpack_event_reply(e->arena, payload, n_bytes);
                const char *why = "the client sent a frame that is not a reply to an event";

                if (!reply || e->ops->reply(e->userdata, reply, &why) < 0)
                        events_end(e, why);
        }
        if (r < 0)
                events_end(e, "the client sent a frame with an invalid length on its events socket");
}

static void on_events(uv_poll_t *handle, int status, int events)
{
        struct events *e = handle->data;

        if (status < 0) {
                events_end(e, NULL);
                return;
        }
        if (events & UV_WRITABLE)
                events_flush(e);
        if (!(events & UV_READABLE) || e->ended)
                return;
        e->readable = true;
        if (++e->n_reports >= EVENTS_HEARD_MAX)
                events_await(e, 0);
        e->ops->ready(e->userdata);
}

void events_turn(struct events *e)
{
        size_t n_max = EVENTS_RECEIVE_BYTES;
        int r;

        if (e->ended || !e->readable)
                return;
        e->readable = false;
        e->n_reports = 0;
        events_flush(e); /* and waits for events again */
        r = fd_guard_look(&e->guard, e->fd, false, &n_max);
        if (r == 0)
                r = frame_reader_receive_some(e->reader, e->fd, MSG_DONTWAIT, n_max);
        if (r == 0)
                events_handle_frames(e);
        else if (r == -EPROTO)
                events_end(e, "the client sent file descriptors, which the protocol does not allow");
        else if (r != FRAME_AGAIN)
                events_end(e, NULL);
}

static void on_closed(uv_handle_t *handle)
{
        struct events *e = handle->data;

        fd_guard_close(&e->guard, e->fd);
        frame_reader_free(e->reader);
        frame_writer_free(e->writer);
        free(e);
}

struct events *events_close(struct events *e)
{
        if (!e)
                return NULL;
        e->ended = true;
        uv_close((uv_handle_t *)&e->poll, on_closed);
        return NULL;
}

static int events_open(struct events *e, struct uv_loop_s *loop, int *ret_fd)
{
        int fds[2], r;

        r = frame_reader_new(false, &e->reader);
        if (r == 0)
                r = frame_writer_new(EVENTS_QUEUE_MAX, &e->writer);
        if (r < 0)
                return r;
        if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) < 0)
                return -errno;
        r = uv_poll_init(loop, &e->poll, fds[0]); /* makes this end non-blocking, and no other */
        if (r < 0) {
                close(fds[0]);
                close(fds[1]);
                return r;
        }
        fd_guard_init(&e->guard, fds[0]);
        e->poll.data = e;
        e->fd = fds[0];
        *ret_fd = fds[1];
        return 0;
}

int events_new(struct uv_loop_s *loop, struct message_arena *arena, const struct events_ops *ops,
               void *userdata, struct events **ret, int *ret_fd)
{
        struct events *e = calloc(1, sizeof(*e));
        int r;

        if (!e)
                return -ENOMEM;
        e->ops = ops;
        e->userdata = userdata;
        e->arena = arena;
        r = events_open(e, loop, ret_fd);
        if (r < 0) {
                frame_reader_free(e->reader);
                frame_writer_free(e->writer);
                free(e);
                return r;
        }
        events_await(e, UV_READABLE);
        *ret = e;
        return 0;
}

void events_send(struct events *e, const Bfcd__Event *event)
{
        uint8_t *payload;

        /* No room: an answer that is due has a time-out. */
        if (e->ended ||
            frame_writer_add(e->writer, bfcd__event__get_packed_size(event), NULL, 0, &payload) < 0)
                return;
        bfcd__event__pack(event, payload);
        events_flush(e);
}
