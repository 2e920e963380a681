/* The account tree: partitions, the quotas of tenants in them, and the leases in these; and a change of it.
 *
 * A change is a tree of what the nodes are to have: a reload makes it from the next config, and a request for a lease
 * changes or adds one node. It is checked as a whole, and then applied in one turn by steps that cannot fail. A limit may
 * be lower than what is charged (see account.h), but nothing is guaranteed twice.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_CHANGE_H
#define BFCD_CHANGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "daemon/memory/broker.h"

struct tree_node {
        struct tree_node *parent;    /* NULL: a partition */
        struct partition *partition; /* that it is, or is in */
        const struct tenant *tenant; /* NULL: a partition, or it is to be made */
        struct quota *quota;         /* NULL: a partition, or it is to be made */
        struct account *account;     /* NULL: it is to be made */
        struct quota_limits to;      /* of a partition only limit_bytes */
        bool is_removed;
        /* After the change, by tree_sum(). */
        uint64_t committed_bytes, promised_bytes;
        uint64_t n_extents;        /* that it may have */
        uint64_t n_extents_leased; /* of a tenant's quota: the most of one of its leases */
};

struct tree {
        struct broker *b;
        struct tree_node *nodes; /* partitions first, as the broker has them; each one after its parent */
        size_t n;
        size_t n_made;             /* nodes that exist; the others are to be made */
        bool is_whole;             /* it has all tenants */
        struct broker_needs needs; /* of all quotas and leases, by tree_sum() */
};

/* The tree as it is, with room for n_more nodes. t: only this tenant, and those that have leases: what users ask for costs
 * no more with thousands of tenants. NULL: all. -ENOMEM. */
int tree_new(struct broker *b, const struct tenant *t, size_t n_more, struct tree *ret);
void tree_free(struct tree *tree);

/* The node of a quota. */
struct tree_node *tree_find(const struct tree *tree, const struct quota *q);

/* Adds a node that is to be made below `parent`. */
struct tree_node *tree_add(struct tree *tree, struct tree_node *parent, const struct quota_limits *to);

/* Sums up what the nodes are to have: before the functions below. */
void tree_sum(struct tree *tree);

/* Which of the nodes above does not fit; NULL: all do. */
const struct account *tree_misfit(const struct tree_node *node);

/* The ledger has the records. */
bool tree_has_room(const struct tree *tree);

/* Sets limits and removes quotas, where something differs; releases free extents beyond limits, and asks sessions for
 * idle memory there. All nodes have been made, and quota_prepare_limit() was called for new limits. Leases of removed quotas
 * are not ended yet; lease_tick() does that in the next turn. */
void tree_apply(struct tree *tree);

/* Counts anew what all quotas of tenants may need, in b->needs. */
void tree_count_tenants(struct broker *b);

/* ---- a change of the config while the broker serves ---- */

/* It is all or nothing: everything is checked and made
 * first, and then applied by steps that cannot fail, in one turn of the loop.
 *
 * Devices, partitions, and their growth and share modes stay; the config reader ensures that. Limits,
 * reserves, counts, time-outs, tenants, their quotas and matches may change. Sessions keep their tenant
 * and quotas, including those that the new config lacks: these are freed after their last session has
 * left. A limit may be lower than what is charged: see account.h.
 *
 * A change is refused if it cannot be guaranteed: a reserve that other tenants have charged, a device too
 * small for its partitions' limits and charges beyond them, more records than the ledger has room for,
 * and new memory of partitions that preallocate. */

/* Applies `next`, and owns it on success. A dry run only reports. Each change is a line in `changes`;
 * each reason of a failure is a line in `errors`. -EINVAL: the change is refused. -ENOMEM. On failure
 * nothing has changed. Quotas whose limit has changed have limit_changed set. */
int change_config(struct broker *b, struct config *next, bool dry_run, FILE *changes, FILE *errors);

#endif
