/* The states of a session: their time limits and transitions, and what its connection calls.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_SESSION_STATES_H
#define BFCD_SESSION_STATES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/session/session.h"

#define SESSION_REAP_SLICE       64u    /* blocks freed in one turn of the loop */
#define SESSION_HELLO_TIMEOUT_MS 10000u /* 10 s for the hello, and for the list of a resumed client */

enum session_event {
        EVENT_ADMITTED,           /* its hello was granted */
        EVENT_RESTORED,           /* made from the ledger of the previous daemon */
        EVENT_RESTORED_RESUMABLE, /* the same, and its client may resume it */
        EVENT_RESUMED,            /* its client resumes it */
        EVENT_LISTED,             /* the client's list is complete */
        EVENT_RECONCILED,         /* what was not listed is freed */
        EVENT_DISCONNECTED,       /* its connection is gone, and it has memory */
        EVENT_DISCONNECTED_EMPTY, /* the same, and it has none */
        EVENT_RESUME_FORBIDDEN,   /* its client may not resume it any more */
        EVENT_CLOSED,             /* it is to end */
        EVENT_REAPED,             /* its memory is freed */
        EVENT_REMOVED,            /* it has left the ledger and its quotas */
        EVENT_LEFT,               /* a successor inherits it */
        EVENT_COUNT,
};

/* who: taken over, also on failure. -ENOMEM. */
int session_new(struct broker *b, enum role role, struct credentials *who, const struct session_ops *ops,
                void *userdata, struct session **ret);

/* Gives a session of the previous daemon its connection. has_exited: the client's process is gone. */
void session_attach(struct session *s, const struct session_ops *ops, void *userdata, bool has_exited);

/* is_watched: whether the connection will call session_exit() when the process exits. */
void session_set_watched(struct session *s, bool is_watched);

/* session_handle() and session_handle_event(), in request.h, take what the client sends. session_work() there is for a
 * session that session_has_work().
 * session_deliver(), in delivery.h, is a turn while session_may_deliver(). */

/* The connection is gone. failure: why the daemon ended it, for the session's record; NULL: the client did. 1: the session
 * stays until session_exit() or its deadline. 0: it is closing, and does not wait. */
int session_hang_up(struct session *s, const char *failure);

/* The client's process has exited, or nothing waits for that any more. */
void session_exit(struct session *s);

/* The deadline has passed: the session is closed, or its connection aborted. */
void session_expire(struct session *s);

/* Begins to free all that the session has. why: for the log. */
void session_close(struct session *s, const char *why);

enum {
        SESSION_MORE = 1, /* call again */
        SESSION_LINGERS,  /* as below: call session_end_linger() when no fds are in flight */
        SESSION_DONE,     /* free it */
};

/* Frees at most n_blocks of a closing session, and detaches shared blocks. 0: all is gone. SESSION_LINGERS:
 * fds that were sent may still be in the socket's queue, where the kernel counts them as ours. An
 * acknowledgement proves nothing, because a client can send it unread. So the session keeps its place in
 * its quotas until session_end_linger(). A session with direct charges keeps them until its process has ended, too. */
int session_reap(struct session *s, size_t n_blocks);

/* No fds are in flight any more: reap again. */
void session_end_linger(struct session *s);

/* A successor inherits the session: drops its requests and its places in quotas; all its memory stays in
 * the ledger. Free it after that. */
void session_leave_behind(struct session *s);

/* The session must be NEW, or reaped. Takes NULL. */
struct session *session_free(struct session *s);

/* Forbids the client to resume the session, and ends a resume that is in progress; nothing happens if it could not be
 * resumed. */
void session_forbid_resume(struct session *s);

/* Ends a session that session_may_be_evicted(). reason: continues "session N was evicted", for the client and
 * the session's record; ended: for the log. -ENOMEM. */
bool session_may_be_evicted(const struct session *s);
int session_evict(struct session *s, const char *reason, const char *ended);

/* session_work() has something to do. */
bool session_has_work(const struct session *s);

/* It has direct charges, and waits with them for session_exit(). */
bool session_waits_for_exit(const struct session *s);

/* A successor can inherit it. */
bool session_can_stay(const struct session *s);

/* When to call session_expire(), by clock_ms(); 0: never. */
uint64_t session_deadline_ms(const struct session *s);

/* The only place where the state changes. why: for the session's record and the log, of an event that may end the session;
 * else NULL. An event that the table does not have for the state changes nothing. */
void session_transit(struct session *s, enum session_event event, const char *why);

/* Closes sessions whose memory is no longer mapped. Bounded: call it every BROKER_LOOK_MS while
 * mappings_are_watched(). */
void mappings_look(struct broker *b);
bool mappings_are_watched(const struct broker *b);

#endif
