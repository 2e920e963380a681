/* The shares that a session gets at its hello: in each partition the quota of its tenant, or the lease there that it is in.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_SHARE_TAKE_H
#define BFCD_SHARE_TAKE_H

#include <stddef.h>

struct ledger_session;
struct session;

/* One share for each quota of the session's tenant, or for the lease in it that the session matches. Where
 * none can be chosen, or the lease has ended, the session gets no memory; in the session's default partition that is an
 * error, and the sentence says why. partition: the default; "": the tenant's first. -ENOMEM. */
int session_take_shares(struct session *s, const char *partition, char *sentence, size_t n_sentence);

/* session_take_shares() for a session of the previous daemon: it had the quotas with ids below quotas_end, and
 * leases. */
int session_take_shares_again(struct session *s, const struct ledger_session *record);

/* Notes in the record of a new session which leases it is in. */
void session_note_leases(const struct session *s, struct ledger_session *facts);

#endif
