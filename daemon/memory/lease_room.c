/* Room for leases; see lease_room.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/lease_room.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/log.h"
#include "daemon/memory/broker.h"
#include "daemon/memory/broker_lease.h"
#include "daemon/base/fd_reserve.h"
#include "daemon/base/number.h"

/* How many extents a lease with this limit may have. */
static uint64_t lease_extents(const struct quota *parent, const struct lease *lease, uint64_t limit)
{
        const struct partition *p = parent->partition;
        struct extent_sizes sizes =
                extent_sizes_for(p->share, p->device->is_cuda, limit, device_granularity(p->device));

        return lease ? arena_extent_room(lease->quota->arena, limit)
                     : extent_max_records(p->share, limit, &sizes);
}

/* Of a lease, or of one that is asked for. */
struct in_family {
        const struct quota *parent;
        uint64_t n_extents;
};

static int compare_parents(const void *left, const void *right)
{
        uintptr_t a = (uintptr_t)((const struct in_family *)left)->parent;
        uintptr_t b = (uintptr_t)((const struct in_family *)right)->parent;

        return (a > b) - (a < b);
}

/* The sessions of a quota and of its leases are at most the quota's, and each has the extents of one of them. Those of
 * the quota are counted already. */
static uint64_t more_exports(const struct broker *b, struct in_family *leases, size_t n)
{
        uint64_t n_exports = 0;

        qsort(leases, n, sizeof(*leases), compare_parents);
        for (size_t i = 0, k; i < n; i = k) {
                const struct quota *q = leases[i].parent;
                uint64_t own = arena_extent_room(q->arena, q->account.limit_bytes), most = own;

                for (k = i; k < n && leases[k].parent == q; k++)
                        most = max_u64(most, leases[k].n_extents);
                n_exports += (most - own) * broker_quota_sessions(b, q);
        }
        return n_exports;
}

/* As many records as all quotas may need, with a lease of this limit. lease: it exists; NULL: a new one. */
static int check_tables(const struct broker *b, const struct quota *parent, const struct lease *lease,
                        uint64_t limit, char *why, size_t n)
{
        struct in_family leases[CAPACITY_LEASES + 1];
        struct broker_needs need = b->leases.others;
        size_t n_leases = 0;

        leases[n_leases++] = (struct in_family){ parent, lease_extents(parent, lease, limit) };
        for (size_t i = 0; i < b->leases.n; i++) {
                const struct quota *q = b->leases.list[i]->quota;

                if (b->leases.list[i] != lease)
                        leases[n_leases++] =
                                (struct in_family){ q->lease.parent,
                                                    arena_extent_room(q->arena, q->account.limit_bytes) };
        }
        need.n_quotas += n_leases;
        for (size_t i = 0; i < n_leases; i++)
                need.n_extents += leases[i].n_extents;
        need.n_exports += more_exports(b, leases, n_leases);
        if (need.n_quotas <= b->room.n_quotas && need.n_extents <= b->room.n_extents &&
            need.n_exports <= b->room.n_exports)
                return 0;
        snprintf(why, n,
                 "the daemon's tables are too small for a lease of %s: end other leases, lower "
                 "max_sessions of tenant '%s', or restart bfcd",
                 NUMBER_SIZE(limit), parent->tenant);
        return -ENOSPC;
}

/* After a reload the config may list partitions in another order. */
static struct capacity_lease lease_in(const struct broker *b, const struct quota *q, uint64_t limit)
{
        size_t i = 0;

        while (i < b->config->n_partitions && strcmp(b->config->partitions[i].name, q->partition->name) != 0)
                i++;
        return (struct capacity_lease){ i, limit };
}

/* The leases that processes of a tenant caused leave room to operators and other tenants: of the extents and file
 * descriptors that the config's quotas do not need, each tenant whose processes may cause leases has an equal share, and
 * operators have one, too. */
static int check_share(const struct broker *b, const struct tenant *t, const struct quota *parent,
                       const struct lease *lease, uint64_t limit, char *why, size_t n)
{
        struct capacity_lease leases[LEASES_PER_TENANT + 1];
        uint64_t n_extents = lease_extents(parent, lease, limit), n_usable = fd_reserve_usable();
        uint64_t n_shares = b->own.capacity->n_lease_tenants + 1;
        uint64_t n_fds = capacity_fds(b->own.capacity, b->sessions.n_clients, NULL, 0), n_more;
        size_t k = 0;

        leases[k++] = lease_in(b, parent, limit);
        for (size_t i = 0; i < b->leases.n && k < sizeof(leases) / sizeof(leases[0]); i++) {
                const struct lease *each = b->leases.list[i];
                const struct quota *q = each->quota;

                if (each == lease || each->tenant != t || lease_record(b, each)->maker == LEASE_BY_OPERATOR)
                        continue;
                n_extents += arena_extent_room(q->arena, q->account.limit_bytes);
                leases[k++] = lease_in(b, q, q->account.limit_bytes);
        }
        n_more = capacity_fds(b->own.capacity, b->sessions.n_clients, leases, k) - n_fds;
        if (b->leases.others.n_extents + n_extents * n_shares <= b->room.n_extents &&
            n_fds + n_more * n_shares <= n_usable)
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
                        leases[k++] = lease_in(b, q, q->account.limit_bytes);
        }
        leases[k++] = lease_in(b, parent, limit);
        n_wanted = capacity_fds(b->own.capacity, b->sessions.n_clients, leases, k);
        if (n_wanted > n_usable) {
                snprintf(why, n,
                         "the limit on file descriptors is too low for a lease of %s: with it, all extents "
                         "and the %zu sessions that exist can need %" PRIu64 ", and %" PRIu64
                         " are available: raise LimitNOFILE= of the service, or end other leases",
                         NUMBER_SIZE(limit), b->sessions.n_clients, n_wanted, n_usable);
                return -EMFILE;
        }
        n_wanted = capacity_fds(b->own.capacity, max_sessions, leases, k);
        if (n_wanted > n_usable && capacity_fds(b->own.capacity, max_sessions, leases, k - 1) <= n_usable)
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
