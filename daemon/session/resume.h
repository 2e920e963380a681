/* Resume: the client of a suspended session continues it on a new connection.
 *
 * The client sends a Hello with the session's id and secret, from the same process. Then the session is
 * LISTING: the client lists its memory in Held messages: extents that it has mapped, blocks, and shared
 * blocks with their counts. Then the session is RESUMING: what the client did not list is freed, in
 * slices, because the client never received it or has freed it. Then the session is LIVE.
 *
 * Nothing is freed before the whole list was checked. A client that lists memory of another session is
 * disconnected without effect.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_RESUME_H
#define BFCD_RESUME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "proto/bfcd.pb-c.h"

struct broker;
struct resumption; /* the list, and how far it was processed */
struct session;
struct tenant;

/* A Hello with a session's id on a NEW session. If it is granted, *s has been freed. */
int resume_hello(struct session *s, const Bfcd__Request *r);

/* The handler of Held. */
int resume_list(struct session *s, const Bfcd__Request *r, const char **ret_why);

/* Processes the list of a RESUMING session: about as much work as freeing n blocks. SESSION_MORE. 0: the
 * session is LIVE. Negative: the list is invalid (*ret_why), disconnect the client. */
int resume_step(struct session *s, size_t n, const char **ret_why);

/* Sessions of the previous daemon.
 *
 * After a restart each session of the ledger exists again, with all of its memory. A session that was
 * granted can_resume is SUSPENDED: it waits for its client as long as the client's process lives;
 * see above. Any other session is QUARANTINED, as if its client had disconnected. */

/* Makes the sessions of the inherited ledger; once, before the daemon serves. They are in b->sessions and
 * need session_attach(). Extents that no session uses are released. Without an inherited ledger nothing
 * happens. -ENOMEM; -EBADMSG: the ledger has what no daemon writes. */
int restore_sessions(struct broker *b);

/* The tenant of one of this user's sessions that were suspended at the start. NULL: there was none, or no session is
 * suspended any more. */
const struct tenant *restore_suspended_tenant(const struct broker *b, uid_t uid);

/* For broker_leave(): leaves all sessions in the ledger only. */
void restore_forget(struct broker *b);

#endif
