/* Allocation: blocks from the cache or the daemon.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CLIENT_ALLOC_H
#define BFC_CLIENT_ALLOC_H

#include <bfcclient.h>
#include <stddef.h>
#include <stdint.h>

#include "client/client.h"

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

#endif
