/* Allocation on streams: the client's side of the streams' pools (stream_pool.h).
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CLIENT_STREAMS_H
#define BFC_CLIENT_STREAMS_H

#include <bfcclient.h>
#include <stdbool.h>
#include <stdint.h>

struct block;
struct malloc_how;
struct stream_alloc;

int streams_new(bfc_client *client); /* -ENOMEM */
void streams_free(bfc_client *client);

/* Between these the pools do not change. */
void streams_lock(bfc_client *client);
void streams_unlock(bfc_client *client);

/* Checks which work of streams is complete, and returns the memory that this frees to the cache or the
 * daemon. Waits for other threads that do the same. Any thread. False: there was nothing. */
bool streams_collect(bfc_client *client);

/* True: freed memory waits for incomplete work. */
bool streams_check_pending(bfc_client *client);

/* Without a cache, memory that waits for a stream's work is freed at the daemon, so the client's thread
 * checks that work. Returns the number of ms until the next check; -1: nothing waits. */
int streams_watch(bfc_client *client);

/* All work that could use the block, which has left the table, is complete. */
void streams_free_done(bfc_client *client, struct stream_alloc *alloc);

/* True: a known stream may be being captured, so the partition's device must not be waited for. */
bool streams_check_captured(bfc_client *client, uint32_t partition);

/* Moves a block that leaves the table to the pools, until all work on the device can be waited for. -ENOMEM:
 * it is still in the table. */
int streams_put_aside(bfc_client *client, const struct block *block, uint32_t partition);

/* bfc_malloc_async_in() with flags and a wait. */
int client_malloc_async(bfc_client *client, const char *partition, size_t n_bytes, uintptr_t stream,
                        const struct malloc_how *how, void **ret_ptr);

/* For frameworks, which do not destroy their streams: the driver may get this one at any time. The first is
 * bfc_free_async(), but -EBUSY while that stream or another known one may be being captured: the block stays. */
int client_free_async_unless_captured(bfc_client *client, void *ptr, uintptr_t stream);
int client_record_permanent_stream(bfc_client *client, const void *ptr, uintptr_t stream);

/* The daemon's block, and the offset in it. The lock is held. */
uint64_t streams_block_id(const struct block *block);
uint64_t streams_offset(const struct block *block);

void streams_reset_peaks(bfc_client *client);

/* Every invariant of the streams' pools; slow. 0, or -EBADMSG and a sentence (static). */
int streams_check(bfc_client *client, const char **ret_why);

#endif
