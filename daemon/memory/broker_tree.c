/* The account tree; see broker_tree.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/broker_tree.h"

#include <errno.h>
#include <stdlib.h>

#include "daemon/memory/broker_lease.h"
#include "daemon/base/number.h"

static struct quota_limits limits_of(const struct quota *q)
{
        return (struct quota_limits){ q->account.limit_bytes, q->account.reserve_bytes, q->max_sessions,
                                      q->max_blocks };
}

static void tree_add_quota(struct tree *tree, const struct tenant *t, struct quota *q)
{
        struct tree_node *parent = &tree->nodes[q->partition - tree->b->partitions];

        if (quota_parent(q))
                parent = tree_find(tree, quota_parent(q));
        tree->nodes[tree->n++] = (struct tree_node){ .parent = parent,
                                                     .partition = q->partition,
                                                     .tenant = t,
                                                     .quota = q,
                                                     .account = &q->account,
                                                     .to = limits_of(q),
                                                     .is_removed = q->is_removed };
}

static bool tree_has(const struct tenant *t, const struct tenant *wanted)
{
        return !wanted || t == wanted || t->n_leases > 0;
}

int tree_new(struct broker *b, const struct tenant *t, size_t n_more, struct tree *ret)
{
        size_t n_nodes = b->n_partitions + n_more;

        for (size_t i = 0; i < b->n_tenants; i++)
                n_nodes += tree_has(&b->tenants[i], t) ? b->tenants[i].n_quotas : 0;
        *ret = (struct tree){ .b = b, .nodes = calloc(n_nodes, sizeof(*ret->nodes)), .is_whole = !t };
        if (!ret->nodes)
                return -ENOMEM;
        for (size_t i = 0; i < b->n_partitions; i++)
                ret->nodes[ret->n++] =
                        (struct tree_node){ .partition = &b->partitions[i],
                                            .account = &b->partitions[i].pool,
                                            .to.limit_bytes = b->partitions[i].pool.limit_bytes };
        for (size_t i = 0; i < b->n_tenants; i++)
                for (size_t k = 0; tree_has(&b->tenants[i], t) && k < b->tenants[i].n_quotas; k++)
                        tree_add_quota(ret, &b->tenants[i], b->tenants[i].quotas[k]);
        ret->n_made = ret->n;
        return 0;
}

void tree_free(struct tree *tree)
{
        free(tree->nodes);
}

/* The last ones first: a lease follows the quotas of its tenant. */
struct tree_node *tree_find(const struct tree *tree, const struct quota *q)
{
        size_t i = tree->n - 1;

        while (tree->nodes[i].quota != q)
                i--;
        return &tree->nodes[i];
}

struct tree_node *tree_add(struct tree *tree, struct tree_node *parent, const struct quota_limits *to)
{
        struct tree_node *node = &tree->nodes[tree->n++];

        *node = (struct tree_node){ .parent = parent, .partition = parent->partition, .to = *to };
        return node;
}

/* ---- checking ---------------------------------------------------------------- */

static uint64_t node_extents(const struct tree_node *node)
{
        const struct partition *p = node->partition;
        struct extent_sizes sizes;

        if (node->quota)
                return arena_extent_room(node->quota->arena, node->to.limit_bytes);
        sizes = extent_sizes_for(p->share, p->device->is_cuda, node->to.limit_bytes,
                                 device_granularity(p->device));
        return extent_max_records(p->share, node->to.limit_bytes, &sizes);
}

static uint64_t count_sessions(const struct broker *b, const struct quota *q, const struct quota_limits *to)
{
        return min_u64(max_u64(to->max_sessions, q ? q->all.n_sessions : 0), broker_room(b).n_sessions);
}

/* Adds a tenant's quota. The sessions of its leases are among its own, and each has the extents of one of these quotas:
 * at most n_extents_most. */
static void needs_add(struct broker_needs *needs, const struct broker *b, const struct quota *q,
                      const struct quota_limits *to, uint64_t n_extents, uint64_t n_extents_most)
{
        needs->n_quotas++;
        needs->n_extents += n_extents;
        needs->n_exports += n_extents_most * count_sessions(b, q, to);
        needs->n_blocks += max_u64(to->max_blocks, q ? q->all.n_blocks : 0);
}

void tree_count_tenants(struct broker *b)
{
        b->needs = (struct broker_needs){ 0 };
        for (size_t i = 0; i < b->n_tenants; i++)
                for (size_t k = 0; k < b->tenants[i].n_quotas; k++) {
                        const struct quota *q = b->tenants[i].quotas[k];
                        uint64_t n_extents = arena_extent_room(q->arena, q->account.limit_bytes);
                        struct quota_limits to = limits_of(q);

                        if (!quota_parent(q))
                                needs_add(&b->needs, b, q, &to, n_extents, n_extents);
                }
}

/* A tenant's quota. Without all tenants, b->needs has it already, and its leases add to it. */
static void tree_count(struct tree *tree, const struct tree_node *node)
{
        uint64_t most = max_u64(node->n_extents, node->n_extents_leased);

        if (tree->is_whole)
                needs_add(&tree->needs, tree->b, node->quota, &node->to, node->n_extents, most);
        else
                tree->needs.n_exports +=
                        (most - node->n_extents) * count_sessions(tree->b, node->quota, &node->to);
}

void tree_sum(struct tree *tree)
{
        const struct broker_needs none = { 0 };

        tree->needs = tree->is_whole ? none : tree->b->needs;
        for (size_t i = 0; i < tree->n; i++) {
                struct tree_node *node = &tree->nodes[i];

                node->committed_bytes = node->account ? node->account->committed_bytes : 0;
                node->promised_bytes = node->account ? node->account->promised_bytes : 0;
                node->n_extents_leased = 0;
        }
        for (size_t i = tree->n; i-- > 0;) { /* those below first */
                struct tree_node *node = &tree->nodes[i], *parent = node->parent;

                if (!parent)
                        continue;
                parent->committed_bytes += max_u64(node->to.reserve_bytes, node->committed_bytes) -
                                           (node->account ? account_takes(node->account) : 0);
                parent->promised_bytes += max_u64(node->to.reserve_bytes, node->promised_bytes) -
                                          (node->account ? account_guaranteed(node->account) : 0);
                node->n_extents = node_extents(node);
                if (!parent->parent) {
                        tree_count(tree, node);
                        continue;
                }
                tree->needs.n_quotas++;
                tree->needs.n_extents += node->n_extents;
                parent->n_extents_leased = max_u64(parent->n_extents_leased, node->n_extents);
        }
}

bool tree_fits(const struct tree_node *node)
{
        return !node->account || account_fits(node->account, node->to.limit_bytes, node->committed_bytes);
}

const struct account *tree_misfit(const struct tree_node *node)
{
        for (const struct tree_node *each = node->parent; each; each = each->parent)
                if (!tree_fits(each))
                        return each->account;
        return NULL;
}

bool tree_has_room(const struct tree *tree)
{
        struct ledger_limits room = broker_room(tree->b);

        return tree->needs.n_quotas <= room.n_quotas && tree->needs.n_extents <= room.n_extents &&
               tree->needs.n_exports <= room.n_exports && tree->needs.n_blocks <= room.n_blocks;
}

/* ---- applying ---------------------------------------------------------------- */

static void node_apply(struct broker *b, const struct tree_node *node)
{
        const struct quota_limits *to = &node->to;
        struct quota *q = node->quota;

        if (node->is_removed && !quota_parent(q)) {
                quota_remove(q);
                broker_note_leave(b, q);
        }
        if (node->is_removed || (!q->is_removed && to->limit_bytes == q->account.limit_bytes &&
                                 to->reserve_bytes == q->account.reserve_bytes &&
                                 to->max_sessions == q->max_sessions && to->max_blocks == q->max_blocks))
                return;
        if (quota_parent(q))
                lease_store_limits(b, lease_of(q), to);
        quota_set(q, to);
}

void tree_apply(struct tree *tree)
{
        struct broker *b = tree->b;

        for (size_t i = b->n_partitions; i < tree->n; i++)
                node_apply(b, &tree->nodes[i]);
        for (size_t i = 0; i < b->n_partitions; i++)
                partition_set_limit(&b->partitions[i], tree->nodes[i].to.limit_bytes);
        for (size_t i = b->n_partitions; b->options.upcalls && i < tree->n; i++) {
                uint64_t n_bytes = quota_excess(tree->nodes[i].quota);

                if (n_bytes > 0)
                        b->options.upcalls->trim_excess(b, tree->nodes[i].quota, n_bytes);
        }
}
