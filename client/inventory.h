/* The inventory: all extents and blocks of a session that is resumed. The daemon compares it with its own
 * list.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CLIENT_INVENTORY_H
#define BFC_CLIENT_INVENTORY_H

#include <bfcclient.h>
#include <stddef.h>
#include <stdint.h>

#include "client/client.h"
#include "client/shared_list.h"

/* Zero-initialised is empty. */
struct inventory {
        uint64_t *extents;
        size_t n_extents;
        uint64_t *blocks; /* sorted, each once, without the shared ones */
        size_t n_blocks;
        struct shared_count *shared;
        size_t n_shared;
        struct pending_split splitting;
        struct held_charge {
                uint64_t n_bytes, bytes_contexts;
        } * charges; /* direct ones, by partition */
        size_t n_charges;
};

/* A consistent snapshot, which begins a new epoch. -ENOMEM. The client's lock is not held. */
int inventory_take(bfc_client *client, struct inventory *ret, uint64_t *ret_epoch);

/* Sends it, and waits for the last reply. -ECONNRESET, -EPROTO; -EBADMSG: refused, and the caller owns
 * the reply *ret_refusal. */
int inventory_send(const struct inventory *i, struct call_connection *c, Bfcd__Reply **ret_refusal);

void inventory_clear(struct inventory *i);

#endif
