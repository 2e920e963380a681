/* A connection: one accepted socket and the session behind it. It reads frames,
 * hands requests to the session, writes its replies, and watches the peer's
 * process after the hang-up. It lives until the session is reaped.
 *
 * Bounds: a turn is a few requests, or some microseconds, and tenants have turns
 * one after the other, however many connections each has; no reading while
 * replies wait in the queue or too many requests are unanswered; few connections
 * that have not said hello (crowd.h); a peer that does not say it in time,
 * takes none of its replies for too long, or violates the protocol, is dropped.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_CONNECTION_H
#define BFCD_CONNECTION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>

#include "daemon/broker.h"
#include "daemon/crowd.h"
#include "daemon/party.h"
#include "proto/message.h"

struct connection;
struct session;
struct uv_loop_s;
TAILQ_HEAD(connection_list, connection);

/* What all connections share; owned by the server. */
struct connection_host {
        struct uv_loop_s *loop;
        struct broker *broker;
        struct message_arena *arena; /* for the request at hand */
        struct connection_list all;
        struct connection_list closing;   /* sessions to be reaped, or settled, in slices */
        struct connection_list looked_at; /* sessions in quarantine, whose memory may be unmapped by now */
        struct parties parties;           /* who has something to do */
        struct crowd crowd;               /* clients that have not said hello */
        size_t n_connections[2];          /* clients, admins */
        struct log_limits crowd_logs, violation_logs;
        void (*wake)(struct connection_host *host); /* there is something in a list */
};

void connection_host_init(struct connection_host *host);

/* Takes over fd, also on failure. It may close another connection that has not said hello. -EUSERS: there
 * are too many of these, and none has to give way; logged. -ECONNABORTED: it has hung up already. */
int connection_new(struct connection_host *host, int fd, bool admin);

/* A connection without a socket, for a session that another process had: its process is watched,
 * and it lives until the session is reaped or its client has come back. -ENOMEM; -errno. */
int connection_keep(struct connection_host *host, struct session *s);

/* Turns of who is ready, for as long as a slice, and one of what is closing; and whether
 * there is any of that. */
void connection_turn(struct connection_host *host);
bool connection_is_due(const struct connection_host *host);

/* Ends sessions in quarantine whose memory no process has mapped any more. Bounded: call it every
 * BROKER_LOOK_MS while connection_looks(). */
void connection_look(struct connection_host *host);
bool connection_looks(const struct connection_host *host);

/* Ends every connection; sessions that a successor may have stay in the ledger, all others end. */
void connection_leave_all(struct connection_host *host, const char *why);

/* Ends every connection and session now, whatever they hold. */
void connection_drop_all(struct connection_host *host, const char *why);

#endif
