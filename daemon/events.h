/* The events socket of a connection: what the daemon tells a client unasked goes
 * out here, and its answers come in. It is a socketpair of which the client was
 * sent one end, so that a client's thread for events and its callers never read
 * from the same socket.
 *
 * Bounds: whoever sends events bounds how many are unanswered; what a client
 * does not read waits here, and never more than 64 KiB of it.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_EVENTS_H
#define BFCD_EVENTS_H

#include "proto/message.h"

struct events;
struct uv_loop_s;

struct events_ops {
        /* Something came: call events_turn() soon. */
        void (*ready)(void *userdata);
        /* A negative errno is a violation; *ret_why says which. */
        int (*reply)(void *userdata, const Bfcd__EventReply *reply, const char **ret_why);
        /* Nothing more is read. why: the violation; NULL: the client hung up. */
        void (*end)(void *userdata, const char *why);
};

/* arena: for the reply at hand. *ret_fd is the client's end, the caller's.
 * -EMFILE, -ENFILE, -ENOMEM. */
int events_new(struct uv_loop_s *loop, struct message_arena *arena, const struct events_ops *ops,
               void *userdata, struct events **ret, int *ret_fd);

/* Also inside its own ops. Takes NULL, returns NULL. */
struct events *events_close(struct events *e);

/* Reads a little of what came, if anything did. */
void events_turn(struct events *e);

/* Sends, now or when the client has read what is before. */
void events_send(struct events *e, const Bfcd__Event *event);

#endif
