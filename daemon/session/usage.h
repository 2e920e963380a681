/* Usage: how much each session has of a quota, and which sessions have the most. Refusals name these.
 *
 * Sums, and the ranking of sessions that grow, are updated with each block. After frees the ranking is
 * recomputed only on request, over the quota's sessions, and at most every 20 ms, also under a flood of
 * refusals. Reported statistics are always current.
 *
 * Invariant: over a quota's sessions the sums of n_blocks, bytes and direct are the quota's, without shared blocks.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_USAGE_H
#define BFCD_USAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>

#include "daemon/memory/quota.h"

struct session;

struct usage { /* in the session's share of the quota */
        struct session *session;
        struct quota *quota;
        uint32_t n_blocks;
        bool largest_is_old; /* its block was freed: largest_bytes is an upper bound */
        uint64_t bytes;      /* of these blocks */
        uint64_t largest_bytes;
        struct charge direct;    /* see direct.h */
        uint64_t bytes_contexts; /* of the direct charge, as the client says */
        TAILQ_ENTRY(usage) of_quota;
};

/* Of blocks and of the direct charge. */
static inline uint64_t usage_bytes(const struct usage *h)
{
        return h->bytes + h->direct.n_bytes;
}

/* The session joins the quota, and leaves it. */
void usage_join(struct usage *h, struct session *s, struct quota *q);
void usage_leave(struct usage *h);

void usage_add(struct usage *h, uint64_t n_bytes);
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

/* The contexts in direct charges of the quota and its leases, as clients say. */
uint64_t usage_contexts(const struct quota *q);

/* The largest block. If that was freed, its blocks are searched, provided that they are no more than
 * *budget, which is reduced by their number. Otherwise the answer is an upper bound. */
uint64_t usage_largest(struct usage *h, size_t *budget);

#endif
