/* Sessions of the previous daemon.
 *
 * After a restart each session of the ledger exists again, with all of its memory. A session that was
 * granted can_resume is SUSPENDED: it waits for its client as long as the client's process lives;
 * see resume.h. Any other session is QUARANTINED, as if its client had disconnected.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_RESTORE_H
#define BFCD_RESTORE_H

#include <sys/types.h>

struct broker;
struct tenant;

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
