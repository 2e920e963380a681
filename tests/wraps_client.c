/* See wraps.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/wraps.h"

#include "client/events.h"
#include "client/streams.h"

WRAP(void, events_wake, (struct events * e), (e))
WRAP(int, streams_put_aside, (bfc_client * client, const struct block *block, uint32_t partition),
     (client, block, partition))
