/* What a session that comes back still has: the list that the daemon compares with its own.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CLIENT_HELD_H
#define BFC_CLIENT_HELD_H

#include <stddef.h>
#include <stdint.h>

#include "client/call.h"

struct bfc_client;

struct held_shared {
        uint64_t block_id;
        uint32_t count;
};

/* A Split, see proto/bfcd.proto. block_id 0: none. */
struct held_split {
        uint64_t block_id;
        uint64_t n_bytes;
};

/* Zero-initialised is empty. */
struct held {
        uint64_t *extents;
        size_t n_extents;
        uint64_t *blocks; /* sorted, each once, none that is shared */
        size_t n_blocks;
        struct held_shared *shared;
        size_t n_shared;
        struct held_split splitting; /* that was not answered */
};

/* All of this moment, with which a new epoch begins. -ENOMEM. The client's lock is not held. */
int held_take(struct bfc_client *client, struct held *ret, uint64_t *ret_epoch);

/* Says it all, and waits for the last answer. -ECONNRESET, -EPROTO; -EBADMSG: refused, *ret_refusal has
 * the reply, the caller's. */
int held_send(const struct held *h, struct call_connection *c, Bfcd__Reply **ret_refusal);

void held_clear(struct held *h);

#endif
