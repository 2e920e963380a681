/* The pages of proto/pages.h, as a client has them: what its tenant uses, to be read without asking,
 * and what it says of its own cache.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CLIENT_PAGES_H
#define BFC_CLIENT_PAGES_H

#include <bfcclient.h>

#include "proto/pages.h"

/* Zero-initialised is none. Blocks that are the daemon's own, in none of the cache's slabs,
 * are counted here, by partition; the rest the cache knows. */
struct client_pages {
        struct pages_view usage;  /* constant */
        struct pages_client *own; /* NULL: none; constant */
        uint64_t *direct_bytes;   /* under the client's lock; NULL: no page */
};

/* Takes over the fds that came with the hello's reply, both or none. A page that is not made and
 * sealed as it must be is left alone, and its figures are asked for. -ENOMEM. */
int client_pages_open(bfc_client *client);
void client_pages_close(struct client_pages *p);

/* A tenant's figures in a partition. -EAGAIN: there is no page with them, or they are being
 * written again and again: ask. No lock, no system call. */
int client_pages_read(const bfc_client *client, uint32_t partition, struct bfc_tenant_usage *ret);

/* A block of the daemon's own came to the client, or goes; n_bytes may be negative. Lock held. */
void client_page_count(bfc_client *client, uint32_t partition, int64_t n_bytes);

/* Writes what the client has in this partition into its page: where what it holds or uses there
 * has changed. A few stores. Lock held. */
void client_page_update(bfc_client *client, uint32_t partition);

#endif
