/* A connection: one accepted socket and the session behind it. It reads frames,
 * hands requests to the session, writes its replies, and watches the peer's
 * process after the hang-up. It lives until the session is reaped.
 *
 * Bounds: 32 requests a turn, then others have theirs; no reading while replies
 * wait in the queue or too many requests are unanswered; a peer that does not
 * say hello in time, or violates the protocol, is dropped.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_CONNECTION_H
#define BFCD_CONNECTION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>

#include "daemon/broker.h"
#include "proto/message.h"

struct connection;
struct uv_loop_s;
TAILQ_HEAD(connection_list, connection);

/* What all connections share; owned by the server. */
struct connection_host {
        struct uv_loop_s *loop;
        struct broker *broker;
        struct message_arena *arena;         /* for the request at hand */
        struct connection_list all;
        struct connection_list ready;        /* have more to do without the kernel's word */
        struct connection_list closing;      /* sessions to be reaped, in slices */
        size_t n_connections[2];             /* clients, admins */
        void (*wake)(struct connection_host *host); /* there is something in a list */
};

/* Takes over fd, also on failure. */
int connection_new(struct connection_host *host, int fd, bool admin);

/* One turn of what is ready and closing; false: nothing is left to do. */
bool connection_turn(struct connection_host *host);

/* Ends every connection and session now, whatever they hold. */
void connection_drop_all(struct connection_host *host, const char *why);

#endif
