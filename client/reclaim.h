/* Reclaim: idle memory of this client is freed at the daemon.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CLIENT_RECLAIM_H
#define BFC_CLIENT_RECLAIM_H

#include <bfcclient.h>
#include <stdint.h>

#include "client/cache.h"
#include "proto/bfcd.pb-c.h"

/* Frees whole idle slabs, up to want_bytes in total. in: only slabs in this range; NULL: all. There must
 * be a cache. */
int client_free_idle(bfc_client *client, uint32_t partition, const struct cache_range *in,
                     uint64_t want_bytes, uint64_t *ret_bytes);
/* client_free_idle(), and then extents without a block in slabs in use. */
int client_free_unused(bfc_client *client, uint32_t partition, const struct cache_range *in,
                       uint64_t want_bytes, uint64_t *ret_bytes);

/* For events.h. -EPROTO: the Trim is invalid; -ECONNRESET: the session has ended. */
int client_on_trim(bfc_client *client, const Bfcd__Trim *trim);

#endif
