/* The events socket; see events.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/net/events.h"

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/net/fd_guard.h"
#include "daemon/net/poller.h"
#include "proto/frame.h"

#define EVENTS_QUEUE_MAX     (64u * 1024u)
#define EVENTS_RECEIVE_BYTES 128u /* in one turn */

struct events {
        int fd; /* -1: it is closed */
        struct poller *poller;
        struct poller_item item; /* of fd */
        struct fd_guard guard;   /* of fd */
        bool ended;              /* ops->end() was called */
        bool readable;           /* bytes have come, and not all were read; the kernel says so once */
        const struct events_ops *ops;
        void *userdata;
        struct message_arena *arena;
        struct frame_reader *reader;
        struct frame_writer *writer;
};

static void events_end(struct events *e, const char *why)
{
        if (e->ended)
                return;
        e->ended = true;
        (void)poller_set(e->poller, &e->item, 0);
        e->ops->end(e->userdata, why);
}

/* Sends what the socket takes. A hang-up is noticed by the next read. */
static void events_flush(struct events *e)
{
        int r = frame_writer_flush(e->writer, e->fd);

        if (!e->ended)
                (void)poller_set(e->poller, &e->item, EPOLLIN | EPOLLET | (r == FRAME_AGAIN ? EPOLLOUT : 0));
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

static void on_events(struct poller_item *item, uint32_t events)
{
        struct events *e = (struct events *)((char *)item - offsetof(struct events, item));

        if (events & EPOLLOUT)
                events_flush(e);
        if (!(events & EPOLLIN) || e->ended)
                return;
        e->readable = true;
        e->ops->ready(e->userdata);
}

void events_turn(struct events *e)
{
        size_t n_max = EVENTS_RECEIVE_BYTES;
        int r;

        if (e->ended || !e->readable)
                return;
        r = fd_guard_look(&e->guard, e->fd, false, &n_max);
        if (r == 0)
                r = frame_reader_receive_some(e->reader, e->fd, MSG_DONTWAIT, n_max);
        e->readable = r == 0;
        if (r == 0)
                events_handle_frames(e);
        else if (r == -EPROTO)
                events_end(e, "the client sent file descriptors, which the protocol does not allow");
        else if (r == FRAME_EOF || r == -ECONNRESET)
                events_end(e, NULL);
        else if (r != FRAME_AGAIN)
                events_end(e, r == -ENOMEM ? "out of memory" : strerror(-r));
        if (e->readable && !e->ended)
                e->ops->ready(e->userdata);
}

bool events_drop_input(struct events *e)
{
        if (!e || e->fd < 0 || !fd_guard_drop(&e->guard, e->fd))
                return false;
        e->ended = true;
        (void)poller_set(e->poller, &e->item, 0);
        return true;
}

void events_close(struct events *e)
{
        if (!e)
                return;
        e->ended = true;
        if (e->fd < 0)
                return;
        (void)poller_set(e->poller, &e->item, 0);
        fd_guard_close(&e->guard, e->fd);
        e->fd = -1;
}

struct events *events_free(struct events *e)
{
        if (!e)
                return NULL;
        events_close(e);
        frame_reader_free(e->reader);
        frame_writer_free(e->writer);
        free(e);
        return NULL;
}

static int events_open(struct events *e, int *ret_fd)
{
        int fds[2], r;

        r = frame_reader_new(false, &e->reader);
        if (r == 0)
                r = frame_writer_new(EVENTS_QUEUE_MAX, &e->writer);
        if (r < 0)
                return r;
        if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) < 0)
                return -errno;
        fd_guard_init_pair(&e->guard, fds[0]);
        e->fd = e->item.fd = fds[0];
        r = poller_set(e->poller, &e->item, EPOLLIN | EPOLLET);
        if (r < 0)
                close(fds[1]);
        else
                *ret_fd = fds[1];
        return r;
}

int events_new(struct poller *poller, struct message_arena *arena, const struct events_ops *ops,
               void *userdata, struct events **ret, int *ret_fd)
{
        struct events *e = calloc(1, sizeof(*e));
        int r;

        if (!e)
                return -ENOMEM;
        *e = (struct events){ .fd = -1,
                              .poller = poller,
                              .item.report = on_events,
                              .ops = ops,
                              .userdata = userdata,
                              .arena = arena };
        r = events_open(e, ret_fd);
        if (r < 0)
                events_free(e);
        else
                *ret = e;
        return r;
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
