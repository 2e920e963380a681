/* Trimming: before a request is refused, sessions are asked to give back what lies idle in their
 * clients' caches. That is the ladder's step for which quota_options.trim() calls upwards.
 *
 * A Trim names ranges that would become wholly free: extents in which nothing lies but blocks of
 * sessions that answer. To know them without looking at blocks, all are counted by slot of
 * their arena (see arena.h): in all, those of sessions that answer, and each session's own. Of
 * a tenant's own shortage (-EDQUOT) its own sessions are asked, the one that asks first; where the
 * partition is full (-ENOMEM) also those of tenants above their reserve. Who has the most
 * comes first; one is asked, then two more, then four, as long as nobody gives enough, and the next
 * are asked beside those who take their time. What counts is what was freed since, never what an
 * answer says.
 *
 * A session has one open Trim in each partition. Who does not answer within the reclaim
 * time-out is deaf: nobody waits for it, or counts on its extents, until it answers.
 *
 * Each call looks at a bounded number of sessions, slots and pages. Who had no range is not looked at
 * again until a block of the quota came or went, or somebody became deaf or answers again.
 *
 * Invariants: of a slot, n_willing is the sum of n_mine over the shares that are listed and not deaf,
 * and n_willing <= n_all; a share is listed only while its session is LIVE; a Trim that is
 * open is in the broker's list exactly if its session is not deaf; n_open counts these.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_TRIM_H
#define BFCD_TRIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>

#include "daemon/broker.h"

#define TRIM_MAX_RANGES 64u                 /* in one event */
#define TRIM_MAX_LOOKS  256u                /* sessions, in one call */
#define TRIM_MAX_SLOTS  4096u               /* for the ranges of one session */
#define TRIM_MAX_ROUND  16u                 /* sessions asked at once */
#define TRIM_MAX_BYTES  (UINT64_C(1) << 62) /* asked for at once */
#define TRIM_MAX_READS  32u                 /* clients' pages, in one call */
#define TRIM_HINT_MS    20u                 /* so long a client's word lasts */

/* What else counts as a look. */
#define TRIM_LOOKS_A_READ 8u
#define TRIM_SLOTS_A_LOOK 64u

#define TRIM_SLOW_MS 40u /* after that the next are asked too */

struct session;
struct session_share;
struct trim_order;

/* A session's part in one quota; in its session_share. Zero is the beginning. */
struct trim_share {
        struct session *session; /* set while it is listed */
        struct session_share *share;
        bool is_listed;
        bool is_deaf;
        uint64_t sequence; /* of the open Trim; 0: none */
        uint64_t sent_ms;
        uint64_t bytes_held;
        uint64_t bytes_freed;      /* in all */
        uint64_t bytes_freed_then; /* when the Trim was sent */
        uint64_t spent_clock;      /* the broker's trim_clock, when it had no more to give */
        uint64_t empty_since;      /* the quota's n_changes, when it had no range; 0: never */
        uint64_t hint, hint_ms;    /* what its client said lies idle, and when */
        size_t cursor;             /* slots before it were asked for, in vain */
        struct trim_order *order;  /* an operator's, for which it was asked; or NULL */
        uint32_t *n_mine;          /* blocks, by slot */
        size_t n_slots;
        TAILQ_ENTRY(trim_share) of_quota, of_broker;
};

/* For broker_options.trim; see quota_options.trim. */
bool trim_ask(struct broker *b, struct quota *q, struct quota_request *first, int refusal, uint64_t missing);

/* For broker_options.want_back: asks those of the quota's sessions that have the most for so much,
 * each; nobody waits for it. */
void trim_want_back(struct broker *b, struct quota *q, uint64_t n_bytes);

/* The session has one more block in that quota, or one less. */
void trim_add_block(struct session *s, struct session_share *share, uint64_t offset, uint64_t n_bytes);
void trim_remove_block(struct session_share *share, uint64_t offset, uint64_t n_bytes);

/* One of its blocks is two from now on. */
void trim_split_block(struct session *s, struct session_share *share, uint64_t offset, uint64_t n_bytes,
                      uint64_t at);

/* A block is nobody's own any more, so nobody gives it back; and such a one is gone. */
void trim_publish_block(struct session_share *share, uint64_t offset, uint64_t n_bytes);
void trim_remove_shared_block(struct quota *q, uint64_t offset, uint64_t n_bytes);

/* What there was when this process began: blocks of a session are added as new ones; a shared
 * one; and a session that has come back answers from now on. */
void trim_add_shared_block(struct quota *q, uint64_t offset, uint64_t n_bytes);
void trim_begin(struct session *s);

/* Nothing is known of the quota any more; it has no session. */
void trim_forget(struct quota *q);

/* Asks for n_bytes of what lies idle. False: it cannot be asked now, or has nothing in its ranges. */
bool trim_send(struct trim_share *share, uint64_t n_bytes, uint64_t now_ms);

/* Its answer. -EPROTO: to nothing that is open; *ret_why says so. */
int trim_answer(struct session *s, uint64_t sequence, const char **ret_why);

/* It answers nothing any more. And: its place in the quotas goes. */
void trim_end(struct session *s);
void trim_share_free(struct session_share *share);

/* Sessions whose time is up are deaf. */
void trim_tick(struct broker *b, uint64_t now_ms);

/* Every invariant; slow. 0, or -EBADMSG and a sentence. */
int trim_check(const struct broker *b, const char **ret_why);

#endif
