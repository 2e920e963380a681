/* Accounts: how many extent bytes may be charged.
 *
 * A pool belongs to a partition; an account is one tenant's part of it; a charge is bytes taken from an
 * account, embedded in the object that it pays for.
 *
 * Invariants, asserted at every change:
 *   account: charged == sum of its charges <= ceiling
 *   pool:    committed == sum over accounts of max(reserve, charged) <= ceiling
 *
 * A ceiling is the limit, or the bytes that were charged (committed) when the limit was set below them.
 * It falls with every charge that is dropped, and nothing beyond the limit is charged meanwhile. A
 * ceiling grows only by a change of limits, which the caller must check; see pool_fits().
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
        uint64_t reserve_bytes;   /* the sum over all accounts */
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
        uint64_t window_peak_bytes;         /* since the quota's last record */
        void (*changed)(struct account *a); /* see account_note_change(); may be NULL */
};

struct charge {
        struct account *account; /* NULL: nothing is charged */
        uint64_t n_bytes;
};

void pool_init(struct pool *p, uint64_t limit_bytes);

/* Adds an account to a pool and takes its reserve from it. -ENOMEM: the pool does not have the reserve.
 * -EINVAL: the reserve is above the limit. */
int account_init(struct account *a, struct pool *p, uint64_t limit_bytes, uint64_t reserve_bytes);

/* Removes the account from the pool; it must have no charges (asserted). */
void account_deinit(struct account *a);

/* Changes limits and reserves while there are charges; cannot fail. Between two changes the pool may
 * promise more than it has: before several changes the caller checks pool_fits(), and it sets the pool's
 * limit last. */
void account_set(struct account *a, uint64_t limit_bytes, uint64_t reserve_bytes);
void pool_set_limit(struct pool *p, uint64_t limit_bytes);

/* Calls a->changed, as every change of charged_bytes does. */
void account_note_change(struct account *a);

/* True: a pool can have this limit with committed_bytes after the change. It may exceed its limit only by
 * existing charges, never by a reserve. */
bool pool_fits(const struct pool *p, uint64_t limit_bytes, uint64_t committed_bytes);

/* The excess over its limit, or 0. */
uint64_t account_excess(const struct account *a);
uint64_t pool_excess(const struct pool *p);

/* Whether n_bytes can be charged now; fails as charge_take() does. */
int account_probe(const struct account *a, uint64_t n_bytes, uint64_t *ret_missing_bytes);

/* The most that it can ever have charged, with all other accounts at their reserves. */
uint64_t account_attainable(const struct account *a);

/* The most that could be charged now. */
uint64_t account_room(const struct account *a);

/* Charges n_bytes. -EDQUOT: the account's limit; -ENOMEM: the pool's. A failure changes nothing and
 * returns the missing bytes. */
int charge_take(struct account *a, uint64_t n_bytes, struct charge *ret, uint64_t *ret_missing_bytes);

/* Adds the charge `from` of the same account, which is empty afterwards. */
void charge_join(struct charge *c, struct charge *from);

/* Moves n_bytes of a charge to another one. */
void charge_split(struct charge *c, uint64_t n_bytes, struct charge *ret);

/* Drops a charge, which may be empty. */
void charge_drop(struct charge *c);

/* Resets peaks to the current values; lifetime peaks stay. */
void account_clear_peaks(struct account *a);
void pool_clear_peaks(struct pool *p);

#endif
