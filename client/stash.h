/* The stash: freed host blocks wait in magazines for the next request of their size (magazine.h). And what
 * else happens to the memory of freed blocks in this process.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CLIENT_STASH_H
#define BFC_CLIENT_STASH_H

#include <bfcclient.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "client/client.h"

struct block;
struct record;

/* idle_bytes: the bound of idle memory in the client's own partition. -ENOMEM. */
int stash_init(bfc_client *client, uint64_t idle_bytes);

/* Moves all stashed blocks into the cache, also while other threads are busy. False: there was none. The lock
 * is held. */
bool client_drain_stash(bfc_client *client);

/* Moves what the magazines had no room for into the cache. Returns how many idle bytes exceed the cache's bound. */
uint64_t stash_spill(bfc_client *client, struct record *list);

/* Forked children may have the memory of blocks mapped (BFC_INHERIT): client_wipe() zeroes it. */
bool client_needs_wipe(const bfc_client *client, uint32_t partition);

/* Zeroes a block's memory if that is needed. Only the caller can reach the block. */
void client_wipe(const bfc_client *client, uint32_t partition, const struct block *block);

/* Enters a block again whose free failed, if its memory is still mapped. The lock is not held. */
void client_restore_block(bfc_client *client, const struct block *block);

#endif
