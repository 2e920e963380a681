/* The limits of leases that the daemon makes by itself: `per: cgroup` of a quota in the config. They follow the config;
 * without the key they keep what they have until they end.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_BROKER_LEASE_AUTO_H
#define BFCD_BROKER_LEASE_AUTO_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/config/config.h"

struct broker;
struct lease;
struct partition;
struct quota;
struct tenant;

/* The quota of the tenant in the partition as the current config has it; NULL: it has none. */
const struct config_quota *broker_config_quota(const struct broker *b, const struct tenant *t,
                                               const struct partition *p);

/* The current config's quota of the tenant if it has `per`; else NULL. */
const struct config_quota *lease_auto_per(const struct broker *b, const struct tenant *t,
                                          const struct partition *p);

/* Whether the config decides the limits of the lease. */
bool lease_auto_follows(const struct broker *b, const struct lease *lease, const struct config_quota *per);

/* The limits of such a lease; the limit is at most what the sizes of its extents allow. */
struct lease_auto_limits {
        uint64_t limit_bytes, reserve_bytes;
};
struct lease_auto_limits lease_auto_limits(const struct quota *q, const struct config_quota *per);

/* What all leases below `parent` are guaranteed and have committed once they follow `per` (may be NULL), in place of
 * parent->account.promised_bytes and committed_bytes. */
void lease_auto_sums(const struct broker *b, const struct tenant *t, const struct quota *parent,
                     const struct config_quota *per, uint64_t *ret_promised, uint64_t *ret_committed);

/* Stores limits in the lease's record. */
void lease_store_limits(struct broker *b, const struct lease *lease, uint64_t limit_bytes,
                        uint64_t reserve_bytes);

/* Sets the limits, which the caller has checked; see quota_set(). */
void lease_auto_set(struct broker *b, struct lease *lease, const struct config_quota *per);

#endif
