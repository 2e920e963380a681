/* Freeing: blocks return to the cache or the daemon, or are stashed (stash.h).
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CLIENT_FREE_H
#define BFC_CLIENT_FREE_H

#include <bfcclient.h>
#include <stdbool.h>
#include <stdint.h>

struct block;

/* Returns a slab of malloc_how.ret_slab to the cache or the daemon. */
int client_return_slab(bfc_client *client, const struct block *slab);

/* bfc_free() of each, with one wait for the device, but -EBUSY while a known stream is being captured: the block stays.
 * The first error; the others are freed nevertheless. */
int client_free_unless_captured(bfc_client *client, void *const *ptrs, size_t n);

#endif
