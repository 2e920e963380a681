/* Invariants of the daemon's objects, which tests run after what they do. Each is slow, and returns 0,
 * or -EBADMSG and a sentence.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_CHECKS_H
#define BFC_TESTS_CHECKS_H

#include <stdint.h>

struct broker;
struct ledger;
struct quota;

/* Every table, list and count. */
int ledger_check(const struct ledger *l, const char **ret_why);

/* Its tables have no more records than these, so that a test can fill them: before the first block. */
void ledger_shrink(struct ledger *l, uint32_t n_blocks, uint32_t n_refs);

/* Charges, blocks and statistics agree; arena_check(). */
int quota_check(const struct quota *q, const char **ret_why);

/* Each session's usage agrees with the ledger, and the ranking names only sessions of the quota. */
int usage_check(const struct quota *q, const char **ret_why);

/* The ledger, all quotas and all devices. */
int broker_check(const struct broker *b, const char **ret_why);

#endif
