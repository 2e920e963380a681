/* The pages of proto/pages.h, as a client has them: what its tenant uses, to be read without asking,
 * and what it says of its own cache.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CLIENT_PAGES_H
#define BFC_CLIENT_PAGES_H

#include <bfcclient.h>

#include "proto/pages.h"

/* Zero-initialised is none. */
struct client_pages {
        struct pages_view usage;  /* constant */
        struct pages_client *own; /* NULL: none; constant */
};

/* Takes over the fds that came with the hello's reply, both or none, once cache and magazines
 * are made and before anybody uses them. A page that is not made and sealed as it must be is left
 * alone, and its figures are asked for. The pages must outlive cache and magazines. */
void client_pages_open(bfc_client *client);
void client_pages_close(struct client_pages *p);

/* A tenant's figures in a partition. -EAGAIN: there is no page with them, or they are being
 * written again and again: ask. No lock, no system call. */
int client_pages_read(const bfc_client *client, uint32_t partition, struct bfc_tenant_usage *ret);

/* The program has a block of the daemon's as it came, in none of the cache's slabs; or no more: then
 * n_bytes is negative. Lock held. */
void client_page_whole(bfc_client *client, uint32_t partition, int64_t n_bytes);

/* Where it is told what of a partition streams' pools have and nobody uses; NULL: nowhere. */
_Atomic uint64_t *client_page_streams(const bfc_client *client, uint32_t partition);

#endif
