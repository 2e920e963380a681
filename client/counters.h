/* Counters of a client's blocks, by partition.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CLIENT_COUNTERS_H
#define BFC_CLIENT_COUNTERS_H

#include <bfcclient.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct block;

/* The next four: a block is used from now on, or no longer; n_bytes of the daemon were reserved or
 * released. The lock is held. */
void client_count_alloc(bfc_client *client, const struct block *block);
void client_count_free(bfc_client *client, const struct block *block);
void client_count_reserved(bfc_client *client, uint32_t partition, uint64_t n_bytes);
void client_count_released(bfc_client *client, uint32_t partition, uint64_t n_bytes);
/* It stays reserved after a free that failed, and is in the peak already. The lock is held. */
void client_count_restored(bfc_client *client, uint32_t partition, uint64_t n_bytes);

/* The sum over all partitions. The lock is held. */
uint64_t client_bytes_reserved(const bfc_client *client);

/* Sets the age of a block without a tag that is about to be entered. */
void client_stamp(const bfc_client *client, uint32_t partition, struct block *block);
/* A shared block has no age in this session. The lock is held. */
void client_share_age(bfc_client *client, const struct block *block, bool is_shared);

#endif
