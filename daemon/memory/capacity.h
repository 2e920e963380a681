/* The maximum needs of a config: records in the ledger, fds, and standby memory.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_CAPACITY_H
#define BFCD_CAPACITY_H

#include <stddef.h>
#include <stdint.h>

#include "daemon/config/config.h"
#include "daemon/ledger/ledger.h"
#include "daemon/memory/extent_sizes.h"
#include "daemon/memory/standby.h"
#include "device/device.h"

enum device_share capacity_share(const struct config_partition *p);

/* The number of records that the limits allow: no table is ever full. -EINVAL, and a sentence. */
struct capacity_records {
        uint64_t n_quotas, n_extents, n_exports, n_blocks, n_refs, n_metadata;
};
int capacity_count(const struct config *c, struct capacity_records *ret, char *ret_sentence,
                   size_t n_sentence);

/* A ledger for these, with room for a later config, which takes only address space. */
struct ledger_limits capacity_ledger(const struct capacity_records *n);

/* The maximum number of shared blocks of a session; and of all sessions. */
#define CAPACITY_REFS 1024u
uint64_t capacity_refs(const struct config *c);

/* Shared blocks of a tenant that are kept or have metadata. */
#define CAPACITY_KEPT 256u

/* Leases of all tenants. */
#define CAPACITY_LEASES 1024u

/* Sums over all tenants and quotas of a config, made once for it: users cause what asks for them. */
#define CAPACITY_SIZES                                                                                       \
        43u /* of extents: CONFIG_GRANULARITY, and each twice the one before, up to UINT64_MAX */
struct capacity {
        uint64_t n_other_fds; /* beside sessions and extents of quotas */
        size_t n_lease_shares; /* each tenant whose processes may cause leases has one, and all schedulers one */
        size_t n_partitions;
        struct capacity_partition {
                uint64_t limit_bytes; /* 0: its extents are no fds */
                bool is_cuda;
                uint64_t n_quotas;
                uint64_t n_of_size[CAPACITY_SIZES]; /* extents that the quotas may have */
        } partitions[];                             /* as the config lists them */
};

/* NULL: out of memory. */
struct capacity *capacity_new(const struct config *c);

/* The approximate number of fds for so many sessions, for all extents of the config and of the leases, and everything
 * else. With fewer than for max_sessions, connections may be refused below the limits. */
struct capacity_lease {
        size_t partition; /* the config's index */
        uint64_t limit_bytes;
};
uint64_t capacity_fds(const struct capacity *sums, uint64_t n_sessions, const struct capacity_lease *leases,
                      size_t n_leases);

/* The standby memory of a device: for the quota with the highest limit, whose sizes include those of
 * lower limits. */
struct standby_goal capacity_standby(const struct config *c, size_t device);

#endif
