/* See wraps.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/wraps.h"

#include "daemon/memory/broker.h"
#include "daemon/session/lease.h"
#include "daemon/session/session.h"
#include "daemon/ledger/store.h"
#include "daemon/base/closer.h"

WRAP(struct ledger_limits, broker_room, (const struct broker *b), (b))
WRAP(size_t, closer_n_waiting, (void), ())
WRAP(void, lease_gone, (const struct lease_end *end), (end))
WRAP(void, tell_limits, (struct broker * b), (b))
WRAP(int, store_put_extent, (struct store * s, uint64_t key, int fd), (s, key, fd))
WRAP(int, store_remove_extent, (struct store * s, uint64_t key), (s, key))
