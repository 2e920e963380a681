/* Room for leases; see lease_room.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/lease_room.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>

#include "daemon/base/log.h"
#include "daemon/memory/broker.h"
#include "daemon/memory/broker_lease.h"
#include "daemon/memory/broker_tree.h"
#include "daemon/base/fd_reserve.h"
#include "daemon/base/number.h"

static struct capacity_lease lease_in(const struct broker *b, const struct partition *p, uint64_t limit)
{
        return (struct capacity_lease){ (size_t)(p - b->partitions), limit };
}

/* The leases that processes of a tenant caused leave room to operators and other tenants: of the extents and file
 * descriptors that the config's quotas do not need, each tenant whose processes may cause leases has an equal share, and
 * operators have one, too. */
static int check_share(const struct tree *tree, const struct tree_node *node, const struct tenant *t,
                       char *why, size_t n)
{
        const struct broker *b = tree->b;
        struct capacity_lease leases[LEASES_PER_TENANT + 1];
        uint64_t n_extents = node->n_extents;
        uint64_t n_shares = b->own.capacity->n_lease_tenants + 1, n_usable = fd_reserve_usable();
        uint64_t n_fds = capacity_fds(b->own.capacity, b->sessions.n_clients, NULL, 0), n_more;
        size_t k = 0;

        leases[k++] = lease_in(b, node->partition, node->to.limit_bytes);
        for (size_t i = b->n_partitions; i < tree->n; i++) {
                const struct tree_node *each = &tree->nodes[i];

                if (!each->parent->parent || each == node || each->tenant != t ||
                    k == sizeof(leases) / sizeof(leases[0]) ||
                    lease_record(b, lease_of(each->quota))->maker == LEASE_BY_OPERATOR)
                        continue;
                n_extents += each->n_extents;
                leases[k++] = lease_in(b, each->partition, each->to.limit_bytes);
        }
        n_more = capacity_fds(b->own.capacity, b->sessions.n_clients, leases, k) - n_fds;
        if (b->needs.n_extents + n_extents * n_shares <= broker_room(b).n_extents &&
            n_fds + n_more * n_shares <= n_usable)
                return 0;
        snprintf(
                why, n,
                "a lease of %s would exceed what processes of tenant '%s' may take of the daemon's tables and file "
                "descriptors with leases: choose a lower limit, or end other leases",
                NUMBER_SIZE(node->to.limit_bytes), t->name);
        return -EDQUOT;
}

/* As many fds as all extents may need beside the sessions that exist, the same way. As at the start, it is only a
 * warning if max_sessions would need more; users cause it as often as they ask. */
static int check_fds(const struct tree *tree, const struct tree_node *node, struct tenant *t, char *why,
                     size_t n)
{
        const struct broker *b = tree->b;
        uint64_t n_usable = fd_reserve_usable(), max_sessions = b->config->max_sessions, n_wanted;
        struct capacity_lease leases[CAPACITY_LEASES + 1];
        size_t k = 0;

        for (size_t i = b->n_partitions; i < tree->n; i++)
                if (tree->nodes[i].parent->parent && &tree->nodes[i] != node)
                        leases[k++] = lease_in(b, tree->nodes[i].partition, tree->nodes[i].to.limit_bytes);
        leases[k++] = lease_in(b, node->partition, node->to.limit_bytes);
        n_wanted = capacity_fds(b->own.capacity, b->sessions.n_clients, leases, k);
        if (n_wanted > n_usable) {
                snprintf(why, n,
                         "the limit on file descriptors is too low for a lease of %s: with it, all extents "
                         "and the %zu sessions that exist can need %" PRIu64 ", and %" PRIu64
                         " are available: raise LimitNOFILE= of the service, or end other leases",
                         NUMBER_SIZE(node->to.limit_bytes), b->sessions.n_clients, n_wanted, n_usable);
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

int lease_check_room(const struct tree *tree, const struct tree_node *node, struct tenant *t,
                     enum ledger_lease_maker maker, char *why, size_t n)
{
        int r = maker == LEASE_BY_OPERATOR ? 0 : check_share(tree, node, t, why, n);

        if (r < 0)
                return r;
        if (tree_has_room(tree))
                return check_fds(tree, node, t, why, n);
        snprintf(why, n,
                 "the daemon's tables are too small for a lease of %s: end other leases, lower "
                 "max_sessions of tenant '%s', or restart bfcd",
                 NUMBER_SIZE(node->to.limit_bytes), t->name);
        return -ENOSPC;
}
