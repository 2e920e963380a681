/* Accounts: how many extent bytes may be charged.
 *
 * Accounts are a tree. The root is a partition, its children are the quotas of tenants, and theirs are
 * leases. A charge is bytes taken from an account, embedded in the object that it pays for. An account at any
 * level can have charges of its own.
 *
 * Invariants for each account, of which charged <= committed is asserted at each charge:
 *   charged == sum of its charges + sum over its children of charged
 *   committed == sum of its charges + sum over its children of max(reserve, committed) <= ceiling
 *   ceiling == max(limit, committed)
 *
 * So what an account guarantees to a child is taken from all accounts above it, too.
 *
 * More than the limit is committed only after the limit was set below that. Then the ceiling falls with every charge that
 * is dropped, because nothing beyond the limit is charged meanwhile. It grows only by a change of limits, which the caller
 * must check; see account_fits().
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_ACCOUNT_H
#define BFCD_ACCOUNT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct account {
        struct account *parent; /* NULL: the root, or not in a tree */
        size_t n_children;
        uint64_t limit_bytes;
        uint64_t reserve_bytes;   /* guaranteed */
        uint64_t own_bytes;       /* of its own charges */
        uint64_t charged_bytes;   /* with those of the accounts below */
        uint64_t committed_bytes; /* what is charged or guaranteed to the accounts below */
        uint64_t promised_bytes;  /* the sum over its children of what is guaranteed to them */
        uint64_t peak_charged_bytes;
        uint64_t peak_charged_ms;           /* when: milliseconds since 1970; 0: never */
        uint64_t window_peak_bytes;         /* since the quota's last record */
        uint64_t tally_bytes;               /* for account_tally() */
        void (*changed)(struct account *a); /* see account_note_change(); may be NULL */
};

struct charge {
        struct account *account; /* NULL: nothing is charged */
        uint64_t n_bytes;
};

void account_init_root(struct account *a, uint64_t limit_bytes);

/* Adds an account below another one and takes its reserve from all above. -ENOMEM: one of these does not have the
 * reserve. -EINVAL: the reserve is above the limit. */
int account_init(struct account *a, struct account *parent, uint64_t limit_bytes, uint64_t reserve_bytes);

/* Removes the account from its parent; it must have no charges and no children (asserted). */
void account_deinit(struct account *a);

/* Changes limits and reserves while there are charges; cannot fail. Between two changes the accounts above may
 * promise more than they have: before several changes the caller checks account_fits(), and it sets the
 * root's limit last. */
void account_set(struct account *a, uint64_t limit_bytes, uint64_t reserve_bytes);

/* The largest reserve that all accounts above have the bytes for, of an account without one: with it none of
 * these exceeds its limit except by existing charges. */
uint64_t account_reserve_max(const struct account *a);

/* What it takes from the account above: what is committed, or guaranteed to it. */
uint64_t account_takes(const struct account *a);

/* What is guaranteed to it, or to accounts below. */
uint64_t account_guaranteed(const struct account *a);

/* Calls a->changed, as every change of charged_bytes does. */
void account_note_change(struct account *a);

/* True: an account can have this limit with committed_bytes after the change. It may exceed its limit only by
 * existing charges, never by a reserve. */
bool account_fits(const struct account *a, uint64_t limit_bytes, uint64_t committed_bytes);

/* The most that may be committed. */
uint64_t account_ceiling(const struct account *a);

/* The excess over its limit, or 0. */
uint64_t account_excess(const struct account *a);

/* Whether n_bytes can be charged now; fails as charge_take() does. */
int account_probe(const struct account *a, uint64_t n_bytes, uint64_t *ret_missing_bytes);

/* The account whose limit refuses n_bytes more: a, or one above it. NULL: none does. */
const struct account *account_short_of(const struct account *a, uint64_t n_bytes);

/* How many of n_bytes more the accounts from a up to below `scope` do not have: that must have them. scope: a, or above
 * it; NULL: the root. */
uint64_t account_takes_of(const struct account *a, const struct account *scope, uint64_t n_bytes);

/* The most that it can ever have charged itself, with all other accounts at their reserves; by the limits of
 * the accounts up to `scope`, which is a or above it. NULL: up to the root. */
uint64_t account_attainable(const struct account *a, const struct account *scope);

/* The most that could be charged now. */
uint64_t account_room(const struct account *a);

/* How many of its own bytes return to `scope` when they are dropped: the rest is guaranteed to a, or to
 * accounts between. 0: it is not in this account. */
uint64_t account_surplus(const struct account *a, const struct account *scope);

/* account_surplus() for several accounts together: how many of n_bytes return to `scope`, after those that were
 * tallied before. account_clear_tally() comes first, for each of the accounts. */
uint64_t account_tally(struct account *a, const struct account *scope, uint64_t n_bytes);
void account_clear_tally(struct account *a);

/* Whether a is `scope` or below it. */
bool account_is_in(const struct account *a, const struct account *scope);

/* Charges n_bytes. -EDQUOT: the limit of the account or of one above it that is not the root; -ENOMEM: the
 * root's. A failure changes nothing and returns the missing bytes. */
int charge_take(struct account *a, uint64_t n_bytes, struct charge *ret, uint64_t *ret_missing_bytes);

/* Adds the charge `from` of the same account, which is empty afterwards. */
void charge_join(struct charge *c, struct charge *from);

/* Moves n_bytes of a charge to another one. */
void charge_split(struct charge *c, uint64_t n_bytes, struct charge *ret);

/* Drops a charge, which may be empty. */
void charge_drop(struct charge *c);

/* Resets peaks to the current values; those of records stay. */
void account_clear_peaks(struct account *a);

#endif
