/* Statistics of a client: counters of its blocks, by partition.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CLIENT_STATS_H
#define BFC_CLIENT_STATS_H

#include <bfcclient.h>
#include <stdbool.h>
#include <stdint.h>

#include "proto/pages.h"

struct block;

/* Without what the magazines count; bfc_stats() adds it. */
struct counters {
        uint64_t n_requests;                 /* to the daemon; atomic. The rest is under the client's lock */
        struct bfc_client_stats *partitions; /* the client's own one without bytes_in_use and its peak */
        uint64_t bytes_reserved;             /* the sum over all partitions */
        uint64_t peak_bytes_reserved;
        struct ages ages[PAGES_AGES]; /* as in the client page; the rest is in the magazines */
};

/* The next four: a block is used from now on, or no longer; n_bytes of the daemon were reserved or
 * released. The lock is held. */
void client_count_alloc(bfc_client *client, const struct block *block);
void client_count_free(bfc_client *client, const struct block *block);
void client_count_reserved(bfc_client *client, uint32_t partition, uint64_t n_bytes);
void client_count_released(bfc_client *client, uint32_t partition, uint64_t n_bytes);
/* It stays reserved after a free that failed, and is in the peak already. The lock is held. */
void client_count_restored(bfc_client *client, uint32_t partition, uint64_t n_bytes);

/* Sets the age of a block without a tag that is about to be entered. */
void client_stamp(const bfc_client *client, uint32_t partition, struct block *block);
/* A shared block has no age in this session. The lock is held. */
void client_share_age(bfc_client *client, const struct block *block, bool is_shared);

#endif
