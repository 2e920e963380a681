/* Delivery of blocks to a client.
 *
 * Blocks are delivered in the order of their requests. A block waits until the client has
 * acknowledged the extents before it. SESSION_MAX_DELIVERIES and SESSION_MAX_PENDING together
 * bound the number of blocks that wait.
 *
 * Invariant: an extent is exported to a session exactly if the slot in the session's share says so.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_DELIVERY_H
#define BFCD_DELIVERY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>

#include "proto/bfcd.pb-c.h"

#define SESSION_MAX_LOST       256u /* extents sent again because the client lost them; bounds fds in flight */
#define SESSION_MAX_DELIVERIES 1024u /* then new requests are refused; granted ones are still added */
#define SESSION_DELIVERY_SLICE 16u   /* blocks delivered in one turn */

struct ledger_block;
struct session;
struct session_share;
struct delivery_state;

void delivery_init(struct delivery_state *d);

/* A turn of a LIVE session whose delivery is due: delivers at most a slice of blocks. */
void session_deliver(struct session *s);

/* True: too many blocks wait for an acknowledgement, and the request was refused. */
bool session_refuse_delivery(struct session *s, uint64_t id);

/* Begins to deliver a block that was taken out of the share's quota for request `id`. Its ledger
 * record has the facts. On failure the block is freed and the request refused. */
void session_deliver_block(struct session *s, uint64_t id, struct session_share *share,
                           const struct ledger_block *facts);

/* Delivers a block that the session has already, with extents that it has not. If they cannot be sent, the
 * request is refused and the block stays. -ENOMEM: nothing was begun. */
int session_deliver_again(struct session *s, uint64_t id, uint32_t block);

/* Begins to deliver a shared block. shared_delivered() or shared_undelivered() tells the result,
 * possibly inside this call. -ENOMEM: nothing was begun. */
int session_deliver_ref(struct session *s, uint64_t id, struct session_share *share, uint32_t block,
                        uint32_t ref);

/* Delivers a shared block that the session woke, by its reference, whose parks_to is set again on a refusal. It
 * is in delivery already, and no longer after the answer; -ENOMEM: it still is. */
int session_deliver_woken(struct session *s, uint64_t id, uint32_t block, uint32_t ref, uint32_t parks_to);

/* Drops at most n_max deliveries without an answer; returns how many fewer it dropped. */
size_t session_drop_deliveries(struct session *s, size_t n_max);

/* The handler of Ack. */
int delivery_ack(struct session *s, const Bfcd__Request *r, const char **ret_why);

#endif
