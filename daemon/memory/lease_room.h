/* Room in the daemon's tables, and file descriptors, for a lease.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_LEASE_ROOM_H
#define BFCD_LEASE_ROOM_H

#include <stddef.h>
#include <stdint.h>

#include "daemon/ledger/ledger.h"

struct tenant;
struct tree;
struct tree_node;

/* For the node of a lease of `t` in a tree of what is wanted, after tree_sum(). maker: who makes or changes it. -ENOSPC,
 * -EMFILE, -EDQUOT, with a sentence. */
int lease_check_room(const struct tree *tree, const struct tree_node *node, struct tenant *t,
                     enum ledger_lease_maker maker, char *why, size_t n);

#endif
