/* Allocating and freeing: blocks come from the cache or the daemon, and return there or are stashed.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CLIENT_ALLOC_H
#define BFC_CLIENT_ALLOC_H

#include <bfcclient.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "client/cache.h"
#include "client/client.h"
#include "proto/bfcd.pb-c.h"

/* ---- allocating --------------------------------------------------------------- */

/* From the cache, or else from the daemon. */
int client_malloc(bfc_client *client, uint32_t partition, uint64_t n_bytes, const struct malloc_how *how,
                  void **ret_ptr);

/* The checks of every bfc_malloc(). -EINVAL, -ENOENT, -ENODEV. */
int client_check_malloc(bfc_client *client, const char *partition, size_t n_bytes, void **ret_ptr,
                        uint32_t *ret_index);

/* Counts a failed call, and returns error. */
int client_malloc_failed(bfc_client *client, uint32_t partition, int error);

/* Notes a new block in the client's trace, if it has one. */
void client_record(const bfc_client *client, uint32_t partition, const void *ptr, uint64_t n_bytes,
                   const struct malloc_how *how);

/* ---- freeing ------------------------------------------------------------------ */

/* Returns a slab of malloc_how.ret_slab to the cache or the daemon. */
int client_return_slab(bfc_client *client, const struct block *slab);

/* bfc_free() of each, with one wait for the device, but -EBUSY while a known stream is being captured: the block stays.
 * The first error; the others are freed nevertheless. */
int client_free_unless_captured(bfc_client *client, void *const *ptrs, size_t n);

/* ---- the stash ---------------------------------------------------------------
 *
 * Freed host blocks wait in magazines for the next request of their size (magazine.h). What else happens to the
 * memory of freed blocks in this process is here, too. */

/* idle_bytes: the bound of idle memory in the client's own partition. -ENOMEM. */
int stash_init(bfc_client *client, uint64_t idle_bytes);

/* Zeroes a block's memory if that is needed. Only the caller can reach the block. */
void client_wipe(const bfc_client *client, uint32_t partition, const struct block *block);

/* Enters a block again whose free failed, if its memory is still mapped. The lock is not held. */
void client_restore_block(bfc_client *client, const struct block *block);

/* ---- reclaiming idle memory --------------------------------------------------
 *
 * Idle memory of this client is freed at the daemon. */

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
