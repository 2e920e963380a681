/* What the client counts, by partition, and its side of the pages of proto/pages.h: the usage of its tenant, read
 * without a request, and the statistics of its own cache.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CLIENT_PAGES_H
#define BFC_CLIENT_PAGES_H

#include <bfcclient.h>

#include "client/call.h"
#include "client/process.h"
#include "proto/pages.h"

struct client_pages;

/* Takes over the fds of the hello's reply, both or none, after cache and magazines are made and before
 * they are used. An invalid page is not used; its statistics are then requested. The pages must outlive
 * cache and magazines. */
void client_pages_open(bfc_client *client);
void client_pages_close(struct client_pages *p);

/* In a forked child: reserves their addresses. */
void client_pages_hide(const struct client_pages *p);

/* The daemon is gone: its usage page is outdated. */
void client_pages_invalidate(bfc_client *client);

/* Another daemon's pages replace the old ones without an effect on readers and writers. keep() takes the
 * fds of that connection, and is followed by renew() with its hello and the lock of the streams, or by drop(). */
struct client_pages_next {
        struct pages_view usage;
        struct pages_client *own;
};
void client_pages_keep(struct call_connection *connection, struct client_pages_next *ret);
void client_pages_drop(struct client_pages_next *next);
void client_pages_renew(bfc_client *client, struct client_pages_next *next, const Bfcd__HelloReply *hello);

/* A tenant's statistics in a partition. -EAGAIN: no page has them, or they are being written
 * continuously: send a request. No lock, no system call. */
int client_pages_read(const bfc_client *client, uint32_t partition, struct bfc_tenant_usage *ret);

/* Adds n_bytes, which may be negative, to the blocks of the daemon outside the cache. The lock is held. */
void client_page_whole(bfc_client *client, uint32_t partition, int64_t n_bytes);

/* Adds n_bytes, which may be negative, to the memory without bfcd. The lock is held. */
void client_page_outside(bfc_client *client, uint32_t partition, int64_t n_bytes);

/* Publishes client->counters.ages[place], one class, or all: AGES_CLASSES. The lock is held. */
void client_page_ages(bfc_client *client, unsigned place, unsigned class);

/* Publishes whether the program has a function for Pressures now. The lock is held. */
void client_page_pressure_fn(bfc_client *client);

/* The word for the idle bytes of the streams' pools in a partition; NULL: none. */
_Atomic uint64_t *client_page_streams(const bfc_client *client, uint32_t partition);

/* ---- counters ------------------------------------------------------------------- */

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
