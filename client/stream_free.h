/* Freeing on streams: blocks return to the pools, and slabs that leave the pools to the cache or the daemon.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CLIENT_STREAM_FREE_H
#define BFC_CLIENT_STREAM_FREE_H

#include <bfcclient.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "client/streams.h"

struct block;

/* Checks which work of streams is complete, and returns the memory that this frees to the cache or the
 * daemon. Waits for other threads that do the same. Any thread. False: there was nothing. */
bool streams_collect(bfc_client *client);

/* Without a cache, memory that waits for a stream's work is freed at the daemon, so the client's thread
 * checks that work. Returns the number of ms until the next check; -1: nothing waits. */
int streams_watch(bfc_client *client);

/* All work that could use the block, which has left the table, is complete. */
void streams_free_done(bfc_client *client, struct stream_alloc *alloc);

/* Moves a block that leaves the table to the pools, until all work on the device can be waited for. -ENOMEM:
 * it is still in the table. */
int streams_put_aside(bfc_client *client, const struct block *block, uint32_t partition);

/* For frameworks, which do not destroy their streams: the driver may get this one at any time. This is bfc_free_async(),
 * but -EBUSY while that stream or another known one may be being captured: the block stays. */
int client_free_async_unless_captured(bfc_client *client, void *ptr, uintptr_t stream);

/* The slabs that left the pools; slab: NULL, or one more. The pools' lock is held. */
void stream_batch_take(struct streams *s, struct stream_slab *slab, struct stream_batch *ret);
/* No lock is held. Returns whether there was anything. */
bool stream_batch_return(bfc_client *client, struct stream_batch *batch);

/* Ends what the call does with the pools: no stream is named from here on. The second checks a few allocations before. */
void streams_unlock_named(struct streams *s);
void streams_look_and_unlock(bfc_client *client);

#endif
