/* Freeing: blocks return to the cache or the daemon, or are stashed: freed host blocks wait in magazines
 * for the next request of their size (magazine.h).
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CLIENT_FREE_H
#define BFC_CLIENT_FREE_H

#include <bfcclient.h>
#include <stdbool.h>
#include <stdint.h>

#include "client/magazine.h"

struct block;

/* Returns a slab of malloc_how.ret_slab to the cache or the daemon. */
int client_return_slab(bfc_client *client, const struct block *slab);

/* Enters a block again whose free failed, if its memory is still mapped. The lock is not held. */
void client_restore_block(bfc_client *client, const struct block *block);

/* bfc_free() of each, with one wait for the device, but -EBUSY while a known stream is being captured: the block stays.
 * The first error; the others are freed nevertheless. */
int client_free_unless_captured(bfc_client *client, void *const *ptrs, size_t n);

/* Zeroes a block's memory if forked children may have it mapped (BFC_INHERIT). Only the caller can reach the
 * block. */
void client_wipe(const bfc_client *client, uint32_t partition, const struct block *block);

/* ---- stashing --------------------------------------------------------------- */

struct stash {
        struct magazines *magazines; /* constant */
        uint64_t max_bytes;          /* of the largest block that is stashed; 0: none is; constant */
        bool is_enabled;             /* false while its partition's device is drained; atomic */
};

/* idle_bytes: the bound of idle memory in the client's own partition. -ENOMEM. */
int stash_init(bfc_client *client, uint64_t idle_bytes);

/* While it drains, idle memory is freed at once. The lock is held. */
void client_set_draining(bfc_client *client, uint32_t partition, bool is_draining);

/* Moves all stashed blocks into the cache, also while other threads are busy. False: there was none. The lock
 * is held. */
bool client_drain_stash(bfc_client *client);

#endif
