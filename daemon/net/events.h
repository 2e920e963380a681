/* The events socket of a connection: the daemon sends events to the client, and reads its replies. It is
 * one end of a socketpair; the client received the other. So a client's events thread and its callers
 * never read from the same socket.
 *
 * Bounds: the senders of events limit how many are unanswered. Events that the client does not read wait
 * here, at most 64 KiB.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_EVENTS_H
#define BFCD_EVENTS_H

#include <stdbool.h>

#include "proto/message.h"

struct events;
struct poller;

struct events_ops {
        /* Bytes have arrived: call events_turn() soon. */
        void (*ready)(void *userdata);
        /* A negative errno is a violation; *ret_why says which. */
        int (*reply)(void *userdata, const Bfcd__EventReply *reply, const char **ret_why);
        /* Nothing more is read. why: the violation; NULL: the client hung up. */
        void (*end)(void *userdata, const char *why);
};

/* arena: for the current reply. *ret_fd is the client's end, owned by the caller. -EMFILE, -ENFILE,
 * -ENOMEM. */
int events_new(struct poller *poller, struct message_arena *arena, const struct events_ops *ops,
               void *userdata, struct events **ret, int *ret_fd);

/* As stream_drop_input(), before events_close(): nothing more is reported or sent. Takes NULL. */
bool events_drop_input(struct events *e);

/* Closes the socket; nothing more is reported or sent. May be called inside its own ops. Takes NULL. */
void events_close(struct events *e);

/* Closes it, too. Takes NULL, returns NULL. */
struct events *events_free(struct events *e);

/* Reads and handles available bytes. */
void events_turn(struct events *e);

/* Sends the event, now or when the client has read earlier ones. */
void events_send(struct events *e, const Bfcd__Event *event);

#endif
