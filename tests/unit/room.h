/* Room in the ledger's tables as a test wants it; for tests that are linked with wrap['broker_room'].
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_ROOM_H
#define BFC_TESTS_ROOM_H

#include "daemon/memory/broker.h"

struct ledger_limits __real_broker_room(const struct broker *b);
struct ledger_limits __wrap_broker_room(const struct broker *b);

static struct ledger_limits room; /* instead of the ledger's; no quotas: it has its own */

struct ledger_limits __wrap_broker_room(const struct broker *b)
{
        return room.n_quotas > 0 ? room : __real_broker_room(b);
}

#endif
