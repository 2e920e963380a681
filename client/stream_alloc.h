/* Allocating and freeing on streams: blocks come from a stream's pool (streams.h) and return there, and slabs that leave
 * the pools return to the cache or the daemon.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CLIENT_STREAM_ALLOC_H
#define BFC_CLIENT_STREAM_ALLOC_H

#include <bfcclient.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "client/streams.h"

/* ---- freeing ------------------------------------------------------------------ */

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

/* ---- allocating --------------------------------------------------------------- */

struct malloc_how;

/* bfc_malloc_async_in() with flags and a wait. */
int client_malloc_async(bfc_client *client, const char *partition, size_t n_bytes, uintptr_t stream,
                        const struct malloc_how *how, void **ret_ptr);

/* For frameworks, which do not destroy their streams: the driver may get this one at any time. */
int client_record_permanent_stream(bfc_client *client, const void *ptr, uintptr_t stream);

#endif
