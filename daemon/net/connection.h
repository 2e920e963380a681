/* A connection: one accepted socket and its session. It reads frames, passes requests to the session,
 * writes its replies, and watches the peer's process. It exists until the session is reaped. The session
 * decides when it may be read, served or closed.
 *
 * Three time-outs end a connection. session_states.c decides on the first, and session_deadline_ms() says when:
 * SESSION_HELLO_TIMEOUT_MS (10 s) for the hello, and for the list of a resumed client. stream.c decides on
 * the second: 30 s for a client that does not read its replies. retire_miss() in recall.c decides on the third:
 * RETIRE_TIMEOUT_MS for a session without events that has memory to unmap. docs/operations.md lists the
 * reasons for a disconnect.
 *
 * Bounds: a turn is a few requests, or some microseconds. Tenants have turns one after the other, however
 * many connections each has. Nothing is read while stream_is_full(): more than 128 KiB of replies, or too many fds,
 * wait for the peer to read. While a session has SESSION_MAX_PENDING waiting requests, only a Cancel is handled.
 * Connections before the hello and to the monitor and lease sockets are limited (places.h).
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_CONNECTION_H
#define BFCD_CONNECTION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>

#include "daemon/memory/broker.h"
#include "daemon/net/places.h"
#include "daemon/net/sched.h"
#include "proto/message.h"

struct connection;
struct lease_socket;
struct poller;
struct session;
struct uv_loop_s;
TAILQ_HEAD(connection_list, connection);

/* What all connections share; owned by the server. */
struct connection_host {
        struct uv_loop_s *loop;
        struct poller *poller; /* the loop runs it */
        struct broker *broker;
        struct message_arena *arena; /* for the request at hand */
        struct connection_list all;
        struct connection_list working; /* see session_has_work() */
        struct sched sched;
        struct places unauth, monitors, schedulers; /* unauth: clients before their hello */
        size_t n_connections[ROLE_COUNT];
        struct log_limits unauth_logs, disconnect_logs;
        struct log_limit accept_log;
        void (*wake)(struct connection_host *host); /* work is due in a list */
};

/* host->poller is the caller's to run and to free. -ENOMEM, -EMFILE, -ENFILE. */
int connection_host_init(struct connection_host *host);

/* Takes over fd, also on failure. socket: of leases, to which it connected; or NULL. May close another connection that has not
 * sent a hello, or of a monitor or scheduler. -EUSERS: there are too many of these, and none may be displaced, or too many on the
 * admin socket; logged. -ECONNABORTED: the peer has already hung up. */
int connection_new(struct connection_host *host, int fd, enum role role, const struct lease_socket *socket);

/* A connection without a socket, for a session of the previous daemon. It watches the client's process, and
 * lives until the session is reaped or resumed. -ENOMEM. */
int connection_keep(struct connection_host *host, struct session *s);

/* Runs turns of ready connections for one time slice from now_ns on, and one slice of sessions' work. And whether there
 * is any. */
void connection_turn(struct connection_host *host, uint64_t now_ns);
bool connection_is_due(const struct connection_host *host);

/* Ends every connection. Sessions that a successor can inherit stay in the ledger, all others end. */
void connection_leave_all(struct connection_host *host, const char *why);

/* Ends every connection and session now, whatever they have. */
void connection_drop_all(struct connection_host *host, const char *why);

#endif
