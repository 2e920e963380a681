/* Room for leases; see lease_room.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/admin/lease_room.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>

#include "daemon/log.h"
#include "daemon/memory/broker.h"
#include "daemon/memory/broker_lease.h"
#include "daemon/net/fd_reserve.h"
#include "daemon/number.h"

/* How many extents a lease with this limit may have. */
static uint64_t lease_extents(const struct quota *parent, const struct lease *lease, uint64_t limit)
{
        const struct partition *p = parent->partition;
        struct extent_sizes sizes = extent_sizes_for(p->share, limit, device_granularity(p->device));

        return lease ? arena_extent_room(lease->quota->arena, limit)
                     : extent_max_count(p->share, limit, &sizes);
}

/* As many records as all quotas may need, with a lease of this limit. lease: it exists; NULL: a new one. */
static int check_tables(const struct broker *b, const struct quota *parent, const struct lease *lease,
                        uint64_t limit, char *why, size_t n)
{
        uint64_t n_quotas = 1, n_extents = lease_extents(parent, lease, limit);
        uint64_t n_exports = n_extents * min_u64(max_u64(parent->max_sessions, parent->all.n_sessions),
                                                 b->room.n_sessions);

        for (size_t i = 0; i < b->n_tenants; i++) {
                for (size_t k = 0; k < b->tenants[i].n_quotas; k++) {
                        const struct quota *q = b->tenants[i].quotas[k];
                        uint64_t extents = arena_extent_room(q->arena, q->account.limit_bytes);

                        if (lease && q == lease->quota)
                                continue;
                        n_quotas++;
                        n_extents += extents;
                        n_exports += extents *
                                     min_u64(max_u64(q->max_sessions, q->sessions.n), b->room.n_sessions);
                }
        }
        if (n_quotas <= b->room.n_quotas && n_extents <= b->room.n_extents && n_exports <= b->room.n_exports)
                return 0;
        snprintf(why, n,
                 "the daemon's tables are too small for a lease of %s: end other leases, lower "
                 "max_sessions of tenant '%s', or restart bfcd",
                 NUMBER_SIZE(limit), parent->tenant);
        return -ENOSPC;
}

/* As many fds as all extents may need beside the sessions that exist, the same way. As at the start, it is only a
 * warning if max_sessions would need more. */
static int check_fds(const struct broker *b, const struct quota *parent, const struct lease *lease,
                     uint64_t limit, char *why, size_t n)
{
        uint64_t n_usable = fd_reserve_usable(), max_sessions = b->config->max_sessions, n_wanted;
        struct capacity_lease leases[CAPACITY_LEASES + 1];
        const struct quota *replaced = lease ? lease->quota : NULL;
        size_t k = 0;

        for (size_t i = 0; i < b->leases.n; i++) {
                const struct quota *q = b->leases.list[i]->quota;

                if (q != replaced)
                        leases[k++] = (struct capacity_lease){ (size_t)(q->partition - b->partitions),
                                                               q->account.limit_bytes };
        }
        leases[k++] = (struct capacity_lease){ (size_t)(parent->partition - b->partitions), limit };
        n_wanted = capacity_fds(b->config, b->sessions.n_clients, leases, k);
        if (n_wanted > n_usable) {
                snprintf(why, n,
                         "the limit on file descriptors is too low for a lease of %s: with it, all extents "
                         "and the %zu sessions that exist can need %" PRIu64 ", and %" PRIu64
                         " are available: raise LimitNOFILE= of the service, or end other leases",
                         NUMBER_SIZE(limit), b->sessions.n_clients, n_wanted, n_usable);
                return -EMFILE;
        }
        n_wanted = capacity_fds(b->config, max_sessions, leases, k);
        if (n_wanted > n_usable && capacity_fds(b->config, max_sessions, leases, k - 1) <= n_usable)
                log_warning("the limit on file descriptors is too low for all leases beside max_sessions: "
                            "%" PRIu64 ", which together can need %" PRIu64 ": %" PRIu64
                            " are available; raise LimitNOFILE= of the service, or lower max_sessions",
                            max_sessions, n_wanted, n_usable);
        return 0;
}

int lease_check_room(const struct broker *b, const struct quota *parent, const struct lease *lease,
                     uint64_t limit, char *why, size_t n)
{
        int r = check_tables(b, parent, lease, limit, why, n);

        return r == 0 ? check_fds(b, parent, lease, limit, why, n) : r;
}
