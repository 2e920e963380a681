/* Sessions of another process: how they are kept, and how their clients come back.
 *
 * After a restart each session of the ledger is there again, QUARANTINED, with all that it
 * held, and waits: for its client, if that was granted CAPABILITY_RETURN, for as long as
 * its process lives; otherwise like any that has hung up. A client comes back on a new
 * connection, by a Hello with the session's id and secret from the same process. Then the
 * session is RETURNING, and the client says what it holds, in Held messages: extents that
 * it has mapped, blocks, shared blocks with their counts. What it does not name is what it was
 * never told of, or has freed: it is freed, in slices, and then the session is LIVE.
 *
 * The whole of a Held is looked at, and nothing is freed before the last one was: a client that
 * names what is not its session's is disconnected, and nothing has changed.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_RESTORE_H
#define BFCD_RESTORE_H

#include <stddef.h>
#include <stdint.h>

#include "daemon/broker.h"
#include "daemon/session.h"

/* Makes the sessions of the ledger that the broker was begun with; once, before it serves.
 * None of them has a connection yet: whoever makes these finds them in b->sessions, and sets
 * ops and userdata. What is held by nobody any more goes back. Where nothing was taken over it
 * does nothing. -ENOMEM; -EBADMSG: the ledger has what no daemon writes. */
int session_restore_all(struct broker *b);

/* Whether sessions of this user were suspended at the start, and some sessions still are. */
bool session_is_awaited_of(const struct broker *b, uid_t uid);

/* For broker_leave(): no session is left but in the ledger. */
void session_forget_all(struct broker *b);

/* A Hello with a session's id, of a session that is NEW: answers it. If that is granted, *s
 * has been freed. */
int homecoming_hello(struct session *s, const Bfcd__Request *r);

/* The handler of Held. */
int homecoming_held(struct session *s, const Bfcd__Request *r, const char **ret_why);

/* Goes on with a session_is_settling(), with about as much work as freeing n blocks. SESSION_MORE;
 * 0: it is LIVE, and its Held is answered; negative: what it named cannot be its own, disconnect it
 * (*ret_why). */
int homecoming_settle(struct session *s, size_t n, const char **ret_why);

/* Its connection is gone: it is awaited again. */
void homecoming_break_off(struct session *s);

#endif
