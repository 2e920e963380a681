/* See wraps.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/wraps.h"

#include "client/streams.h"

WRAP(int, streams_put_aside, (bfc_client * client, const struct block *block, uint32_t partition),
     (client, block, partition))
