/* Accounts: how many extent bytes may be charged to whom.
 *
 * A pool is a partition's; an account is one tenant's in it; a charge is bytes
 * taken from an account, and it lives inside what it pays for.
 *
 * Invariants, asserted at every change:
 *   account: charged == sum of its charges <= ceiling
 *   pool:    committed == sum over accounts of max(reserve, charged) <= ceiling
 * A ceiling is the limit, or what was charged (committed) when the limit was set
 * lower than that; it comes down with every charge that is dropped, and nothing
 * that would go beyond the limit is charged meanwhile. So a ceiling never grows
 * but by a change of limits, whose maker answers for it: see pool_fits().
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_ACCOUNT_H
#define BFCD_ACCOUNT_H

#include <stdbool.h>
#include <stdint.h>

struct pool {
        uint64_t limit_bytes;
        uint64_t ceiling_bytes;   /* the limit, or what was committed when it was lowered */
        uint64_t committed_bytes; /* what is charged or guaranteed */
        uint64_t reserve_bytes;   /* the sum of all accounts' */
        uint64_t charged_bytes;
        uint64_t peak_charged_bytes;
        uint64_t peak_charged_ms; /* when: milliseconds since 1970; 0: never */
        uint64_t lifetime_peak_charged_bytes;
};

struct account {
        struct pool *pool;
        uint64_t limit_bytes;
        uint64_t ceiling_bytes; /* the limit, or what was charged when it was lowered */
        uint64_t reserve_bytes; /* guaranteed */
        uint64_t charged_bytes;
        uint64_t peak_charged_bytes;
        uint64_t peak_charged_ms;
        uint64_t lifetime_peak_charged_bytes;
        void (*changed)(struct account *a); /* see account_note_change(); may be NULL */
};

struct charge {
        struct account *account; /* NULL: nothing is charged */
        uint64_t n_bytes;
};

void pool_init(struct pool *p, uint64_t limit_bytes);

/* Joins a pool and takes its guarantee out of it. -ENOMEM: the pool does not
 * hold the reserve. -EINVAL: the reserve is above the limit. */
int account_init(struct account *a, struct pool *p, uint64_t limit_bytes, uint64_t reserve_bytes);

/* Leaves the pool; nothing may be charged any more (asserted). */
void account_deinit(struct account *a);

/* Changes limits and guarantees while charges live on; none of them fails. Between
 * them the pool may promise more than it has: whoever changes several asks
 * pool_fits() before, and sets the pool's limit last. */
void account_set(struct account *a, uint64_t limit_bytes, uint64_t reserve_bytes);
void pool_set_limit(struct pool *p, uint64_t limit_bytes);

/* Calls a->changed, as every change of charged_bytes does. */
void account_note_change(struct account *a);

/* Whether a pool could have this limit with so much committed after the change: it
 * may be over its limit only by what is charged already, never by a promise. */
bool pool_fits(const struct pool *p, uint64_t limit_bytes, uint64_t committed_bytes);

/* By how much it is over its limit; 0. */
uint64_t account_excess(const struct account *a);
uint64_t pool_excess(const struct pool *p);

/* Whether n_bytes could be charged now; fails as charge_take() does. */
int account_probe(const struct account *a, uint64_t n_bytes, uint64_t *ret_missing_bytes);

/* The most that it could ever have charged: with all others at their reserves. */
uint64_t account_attainable(const struct account *a);

/* The most that could be charged now. */
uint64_t account_room(const struct account *a);

/* Charges n_bytes. -EDQUOT: the account's limit; -ENOMEM: the pool's. A failure
 * changes nothing and says by how many bytes it failed. */
int charge_take(struct account *a, uint64_t n_bytes, struct charge *ret, uint64_t *ret_missing_bytes);

/* Adds what `from`, of the same account, holds; `from` is empty afterwards. */
void charge_join(struct charge *c, struct charge *from);

/* Takes n_bytes out of a charge into one of their own. */
void charge_split(struct charge *c, uint64_t n_bytes, struct charge *ret);

/* Gives the bytes back. An empty charge is fine. */
void charge_drop(struct charge *c);

/* Peaks begin again at the present values; lifetime peaks stay. */
void account_clear_peaks(struct account *a);
void pool_clear_peaks(struct pool *p);

#endif
