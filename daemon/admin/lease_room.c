/* Room for leases; see lease_room.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/admin/lease_room.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>

#include "daemon/admin/lease_bounds.h"
#include "daemon/log.h"
#include "daemon/memory/broker.h"
#include "daemon/memory/broker_lease.h"
#include "daemon/net/fd_reserve.h"
#include "daemon/number.h"

struct lease_need {
        uint64_t n_quotas, n_extents, n_exports;
};

/* How many extents a lease with this limit may have. */
static uint64_t lease_extents(const struct quota *parent, const struct lease *lease, uint64_t limit)
{
        const struct partition *p = parent->partition;
        struct extent_sizes sizes = extent_sizes_for(p->share, limit, device_granularity(p->device));

        return lease ? arena_extent_room(lease->quota->arena, limit)
                     : extent_max_count(p->share, limit, &sizes);
}

/* What the tables need for a quota, its leases and perhaps one more: the sessions of all of them together are at most the
 * quota's. */
static void add_family(const struct tenant *t, const struct quota *q, const struct lease *left_out,
                       uint64_t more, uint64_t max_sessions, struct lease_need *need)
{
        uint64_t most = max_u64(arena_extent_room(q->arena, q->account.limit_bytes), more);
        uint64_t n_sessions = max_u64(q->max_sessions, q->all.n_sessions);

        need->n_extents += arena_extent_room(q->arena, q->account.limit_bytes) + more;
        need->n_quotas += more > 0 ? 2 : 1;
        for (size_t i = 0; q->account.n_children > 0 && i < t->n_quotas; i++) {
                const struct quota *each = t->quotas[i];
                uint64_t extents = arena_extent_room(each->arena, each->account.limit_bytes);

                if (each->lease.parent != q || (left_out && each == left_out->quota))
                        continue;
                need->n_quotas++;
                need->n_extents += extents;
                most = max_u64(most, extents);
        }
        need->n_exports += most * min_u64(n_sessions, max_sessions);
}

/* As many records as all quotas may need, with a lease of this limit. lease: it exists; NULL: a new one. */
static int check_tables(const struct broker *b, const struct quota *parent, const struct lease *lease,
                        uint64_t limit, char *why, size_t n)
{
        struct lease_need need = { 0 };

        for (size_t i = 0; i < b->n_tenants; i++) {
                const struct tenant *t = &b->tenants[i];

                for (size_t k = 0; k < t->n_quotas; k++) {
                        const struct quota *q = t->quotas[k];
                        bool is_parent = q == parent;

                        if (!q->lease.parent)
                                add_family(t, q, is_parent ? lease : NULL,
                                           is_parent ? lease_extents(parent, lease, limit) : 0,
                                           b->room.n_sessions, &need);
                }
        }
        if (need.n_quotas <= b->room.n_quotas && need.n_extents <= b->room.n_extents &&
            need.n_exports <= b->room.n_exports)
                return 0;
        snprintf(why, n,
                 "the daemon's tables are too small for a lease of %s: end other leases, lower "
                 "max_sessions of tenant '%s', or restart bfcd",
                 NUMBER_SIZE(limit), parent->tenant);
        return -ENOSPC;
}

/* The leases that processes of a tenant caused leave room to operators and other tenants: of the extents and file
 * descriptors that the config's quotas do not need, each tenant whose processes may cause leases has an equal share, and
 * operators have one, too. */
static int check_share(const struct broker *b, const struct tenant *t, const struct quota *parent,
                       const struct lease *lease, uint64_t limit, char *why, size_t n)
{
        struct capacity_lease leases[LEASES_PER_TENANT + 1];
        uint64_t n_extents = lease_extents(parent, lease, limit), of_config = 0,
                 n_usable = fd_reserve_usable();
        uint64_t n_shares = lease_bounds_tenants(b->config) + 1;
        uint64_t n_fds = capacity_fds(b->config, b->sessions.n_clients, NULL, 0), n_more;
        size_t k = 0;

        leases[k++] = (struct capacity_lease){ (size_t)(parent->partition - b->partitions), limit };
        for (size_t i = 0; i < b->leases.n && k < sizeof(leases) / sizeof(leases[0]); i++) {
                const struct lease *each = b->leases.list[i];
                const struct quota *q = each->quota;

                if (each == lease || each->tenant != t || lease_record(b, each)->maker == LEASE_BY_OPERATOR)
                        continue;
                n_extents += arena_extent_room(q->arena, q->account.limit_bytes);
                leases[k++] = (struct capacity_lease){ (size_t)(q->partition - b->partitions),
                                                       q->account.limit_bytes };
        }
        for (size_t i = 0; i < b->n_tenants; i++)
                for (size_t j = 0; j < b->tenants[i].n_quotas; j++) {
                        const struct quota *q = b->tenants[i].quotas[j];

                        if (!q->lease.parent)
                                of_config += arena_extent_room(q->arena, q->account.limit_bytes);
                }
        n_more = capacity_fds(b->config, b->sessions.n_clients, leases, k) - n_fds;
        if (of_config + n_extents * n_shares <= b->room.n_extents && n_fds + n_more * n_shares <= n_usable)
                return 0;
        snprintf(
                why, n,
                "a lease of %s would exceed what processes of tenant '%s' may take of the daemon's tables and file "
                "descriptors with leases: choose a lower limit, or end other leases",
                NUMBER_SIZE(limit), t->name);
        return -EDQUOT;
}

/* As many fds as all extents may need beside the sessions that exist, the same way. As at the start, it is only a
 * warning if max_sessions would need more; users cause it as often as they ask. */
static int check_fds(const struct broker *b, struct tenant *t, const struct quota *parent,
                     const struct lease *lease, uint64_t limit, char *why, size_t n)
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
                log_limited(&t->lease_log, LOG_LEVEL_WARNING,
                            "the limit on file descriptors is too low for all leases beside max_sessions: "
                            "%" PRIu64 ", which together can need %" PRIu64 ": %" PRIu64
                            " are available; raise LimitNOFILE= of the service, or lower max_sessions",
                            max_sessions, n_wanted, n_usable);
        return 0;
}

int lease_check_room(const struct broker *b, struct tenant *t, const struct quota *parent,
                     const struct lease *lease, uint64_t limit, enum ledger_lease_maker maker, char *why,
                     size_t n)
{
        int r = maker == LEASE_BY_OPERATOR ? 0 : check_share(b, t, parent, lease, limit, why, n);

        if (r == 0)
                r = check_tables(b, parent, lease, limit, why, n);
        return r == 0 ? check_fds(b, t, parent, lease, limit, why, n) : r;
}
