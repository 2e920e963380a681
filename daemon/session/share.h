/* A session's share of a quota: the session joins the quota, has blocks there, and uses so much of it.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_SHARE_H
#define BFCD_SHARE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>

#include "daemon/memory/quota.h"
#include "daemon/session/session.h"

/* The session leaves its quotas, and has no shares any more. */
void session_leave_shares(struct session *s);

/* Joins the quota, unless it has. On failure the request `id` has been refused. */
int session_join(struct session *s, struct session_share *share, uint64_t id);

/* session_join() for a session of the previous daemon, whatever the limits say now. -ENOMEM. */
int session_rejoin(struct session *s, struct session_share *share);

/* Counts a block of the session. */
void session_add_block(struct session *s, struct session_share *share, uint64_t offset, uint64_t n_bytes);

/* Frees a block of the session. */
void session_remove_block(struct session_share *share, uint64_t offset, uint64_t n_bytes);

/* The session has freed all its blocks: its peaks no longer count. */
void session_forget_peaks(struct session *s);

/* Usage: how much each session has of a quota, and which sessions have the most. Refusals name these.
 *
 * Sums, and the ranking of sessions that grow, are updated with each block. After frees the ranking is
 * recomputed only on request, over the quota's sessions, and at most every 20 ms, also under a flood of
 * refusals. Reported statistics are always current.
 *
 * Invariant: over a quota's sessions the sums of n_blocks, bytes and direct are the quota's, without shared blocks;
 * with the sessions of its leases, that of bytes_contexts is. */

void usage_remove(struct usage *h, uint64_t n_bytes);
void usage_note_direct(struct usage *h);             /* its direct charge grew */
void usage_split(struct usage *h, uint64_t n_bytes); /* a block of n_bytes became two */

/* What is cached of the quota, which may be old; NULL: out of memory. */
struct quota_report *usage_report(struct quota *q);

/* The quota's sessions with the most bytes (blocks), largest first, without empty ones. Returns their
 * number, at most QUOTA_RANKS. */
size_t usage_rank(struct quota *q, bool by_blocks, struct usage *ret[QUOTA_RANKS]);

/* The n sessions with the most bytes, always current: it looks at all sessions. Empty places are NULL. */
void usage_most(const struct quota *q, struct usage **ret, size_t n);

/* So much of its direct charge is contexts, as its client says. Of a share that has joined. */
void usage_set_contexts(struct usage *h, uint64_t n_bytes);

/* The largest block. If that was freed, its blocks are searched, provided that they are no more than
 * *budget, which is reduced by their number. Otherwise the answer is an upper bound. */
uint64_t usage_largest(struct usage *h, size_t *budget);

#endif
