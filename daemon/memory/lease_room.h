/* Room in the daemon's tables, and file descriptors, for a lease.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_LEASE_ROOM_H
#define BFCD_LEASE_ROOM_H

#include <stddef.h>
#include <stdint.h>

#include "daemon/ledger/ledger.h"

struct broker;
struct lease;
struct quota;
struct tenant;

/* For a lease of this limit within `parent`, a quota of `t`. lease: it exists; NULL: a new one. maker: who makes or
 * changes it. -ENOSPC, -EMFILE, -EDQUOT, with a sentence. */
int lease_check_room(const struct broker *b, struct tenant *t, const struct quota *parent,
                     const struct lease *lease, uint64_t limit, enum ledger_lease_maker maker, char *why,
                     size_t n);

#endif
