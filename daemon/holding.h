/* Holdings: what each session has of a quota, so that whoever is refused is told
 * who has the memory.
 *
 * Sums are kept with each block that comes and goes, and so are those who have the most,
 * as far as they grow. Who has the most once others have freed is looked for only when
 * somebody asks, through the quota's sessions, and at most every 20 ms: so a flood of
 * refusals ranks no more often. The figures that are told are always those of the moment.
 *
 * Invariant: over a quota's holdings the sums of n_blocks and bytes are the quota's
 * (but for blocks that are no session's own).
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_HOLDING_H
#define BFCD_HOLDING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>

#include "daemon/quota.h"

struct session;

struct holding { /* embedded in the session's share of the quota */
        struct session *session;
        struct quota *quota;
        uint32_t n_blocks;
        bool largest_is_old; /* it was freed: largest_bytes is the most that it can be */
        uint64_t bytes;      /* of these blocks */
        uint64_t largest_bytes;
        TAILQ_ENTRY(holding) of_quota;
};

/* The session begins to use the quota, and ends to. */
void holding_join(struct holding *h, struct session *s, struct quota *q);
void holding_leave(struct holding *h);

void holding_add(struct holding *h, uint64_t n_bytes);
void holding_remove(struct holding *h, uint64_t n_bytes);
void holding_split(struct holding *h, uint64_t n_bytes); /* one of n_bytes is two from now on */

/* Those of the quota with the most bytes (blocks), the most first, and none that has
 * nothing. Returns how many there are, QUOTA_RANKS at most. */
size_t holding_rank(struct quota *q, bool by_blocks, struct holding *ret[QUOTA_RANKS]);

/* The same with n places, NULL where there are not as many, and of this moment: it looks
 * at all sessions. */
void holding_most(const struct quota *q, struct holding **ret, size_t n);

/* Its largest block. Where that was freed, the next largest is looked for among its
 * blocks, if they are no more than *budget, which goes down by what was looked at;
 * otherwise the answer is the most that it can be: that one's size, or all that there is. */
uint64_t holding_largest(struct holding *h, size_t *budget);

/* The sums against the ledger, for all holdings of a quota, and that the ranking is of
 * sessions that are there; slow. 0, or -EBADMSG and a
 * sentence. */
int holding_check(const struct quota *q, const char **ret_why);

#endif
