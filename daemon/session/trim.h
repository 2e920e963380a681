/* Trimming: before a request is refused, sessions are asked to return idle memory of their clients'
 * caches. This is the reclaim step for which the quota layer calls upcalls.trim().
 *
 * A Trim is a recall (see recall.h) of ranges that would become wholly free: extents that contain
 * only blocks of sessions that answer. To find them without a look at blocks, blocks are counted by
 * slot of their arena (see arena.h): all, those of sessions that answer, and each session's own.
 * Where a tenant's quota is short (-EDQUOT) its own sessions are asked, the requesting session
 * first. Where the partition is full (-ENOMEM) so are the sessions of tenants above their reserve.
 * The sessions with the most idle memory come first. One is asked, then two more, then four, until
 * enough was freed; slow ones are not waited for. What counts is what was freed, never what an
 * answer claims.
 *
 * A session has one open Trim in each partition. A session that does not answer within
 * `timeouts.reclaim` is unresponsive: it is skipped, and its extents are not counted on, until it
 * answers.
 *
 * Each call looks at a bounded number of sessions, slots and pages. A session without a range is
 * skipped until a block of its quota is added or removed, or a session becomes unresponsive or
 * answers again.
 *
 * Invariants: of a slot, n_responsive is the sum of n_own over the listed shares without an overdue
 * Trim, and n_responsive <= n_all; a share is listed only while its session is LIVE, and only such a
 * share has an open Trim; n_open counts the Trims with a deadline.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_TRIM_H
#define BFCD_TRIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>

#include "daemon/session/recall.h"
#include "daemon/memory/broker.h"

#define TRIM_MAX_RANGES 64u                 /* in one event */
#define TRIM_MAX_LOOKS  256u                /* sessions, in one call */
#define TRIM_MAX_SLOTS  4096u               /* for the ranges of one session */
#define TRIM_MAX_ROUND  16u                 /* sessions asked at once */
#define TRIM_MAX_BYTES  (UINT64_C(1) << 62) /* asked for at once */
#define TRIM_MAX_READS  32u                 /* clients' pages, in one call */
#define TRIM_HINT_MS    20u                 /* a client's statistics are read again after that */

/* What else counts as a look. */
#define TRIM_LOOKS_A_READ 8u
#define TRIM_SLOTS_A_LOOK 64u

#define TRIM_SLOW_MS 40u /* after this time the next sessions are asked too */

struct session;
struct session_share;

/* For upcalls; see upcalls.h. */
bool trim_ask(struct broker *b, struct quota *q, struct quota_request *first, const struct account *scope,
              uint64_t missing);
bool trim_is_asked(const struct quota *q, const struct session *s);
void trim_excess(struct broker *b, struct quota *q, uint64_t n_bytes);

/* The session has one more block in that quota, or one fewer. */
void trim_add_block(struct session *s, struct session_share *share, uint64_t offset, uint64_t n_bytes);
void trim_remove_block(struct session_share *share, uint64_t offset, uint64_t n_bytes);

/* One of its blocks was split into two. */
void trim_split_block(struct session *s, struct session_share *share, uint64_t offset, uint64_t n_bytes,
                      uint64_t at);

/* A block is shared from now on, so no single session can return it; and a shared block was freed. */
void trim_publish_block(struct session_share *share, uint64_t offset, uint64_t n_bytes);
void trim_remove_shared_block(struct quota *q, uint64_t offset, uint64_t n_bytes);

/* After a restart: blocks of a session are added as new ones; this adds a shared block; and a resumed
 * session answers from now on. */
void trim_add_shared_block(struct quota *q, uint64_t offset, uint64_t n_bytes);
void trim_begin(struct session *s);

/* Drops all counts of the quota, which has no session. */
void trim_forget(struct quota *q);

/* Asks for n_bytes of idle memory. False: it cannot be asked now, or has no range. */
bool trim_send(struct trim_share *share, uint64_t n_bytes, uint64_t now_ms);

/* The client has answered a Trim, or missed its time-out. */
void trim_answer(struct recall *r);
void trim_miss(struct recall *r);

/* The session will not answer any more. */
void trim_end(struct session *s);
/* Frees the session's counts in a quota. */
void trim_share_free(struct session_share *share);

/* Every invariant; slow. 0, or -EBADMSG and a sentence. */
int trim_check(const struct broker *b, const char **ret_why);

#endif
