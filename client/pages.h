/* The pages of proto/pages.h, as a client has them: what its tenant uses, to be read without asking,
 * and what it says of its own cache.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CLIENT_PAGES_H
#define BFC_CLIENT_PAGES_H

#include <bfcclient.h>

#include "client/call.h"
#include "client/fork.h"
#include "proto/pages.h"

/* Zero-initialised is none. */
struct client_pages {
        /* By partition, of the usage page; NULL: not there, or it is of a daemon that is gone. The array
         * is constant. */
        _Atomic(const struct pages_entry *) *entries;
        void *usage; /* where that page is, and its bytes; constant */
        size_t usage_bytes;
        struct pages_client *own;               /* NULL: none; constant */
        struct fork_entry usage_fork, own_fork; /* registered where the page is there */
};

/* Takes over the fds that came with the hello's reply, both or none, once cache and magazines
 * are made and before anybody uses them. A page that is not made and sealed as it must be is left
 * alone, and its figures are asked for. The pages must outlive cache and magazines. */
void client_pages_open(bfc_client *client);
void client_pages_close(struct client_pages *p);

/* The daemon is gone: what its pages say is old. */
void client_pages_away(bfc_client *client);

/* Another daemon's, which take the place of the old ones, so that nobody who reads or writes them
 * notices. Takes the fds of that connection, whose hello that is; keep() is to be followed by renew() or
 * drop(). */
struct client_pages_next {
        struct pages_view usage;
        struct pages_client *own;
};
void client_pages_keep(struct call_connection *connection, struct client_pages_next *ret);
void client_pages_drop(struct client_pages_next *next);
void client_pages_renew(bfc_client *client, struct client_pages_next *next, const Bfcd__HelloReply *hello);

/* A tenant's figures in a partition. -EAGAIN: there is no page with them, or they are being
 * written again and again: ask. No lock, no system call. */
int client_pages_read(const bfc_client *client, uint32_t partition, struct bfc_tenant_usage *ret);

/* The program has a block of the daemon's as it came, in none of the cache's slabs; or no more: then
 * n_bytes is negative. Lock held. */
void client_page_whole(bfc_client *client, uint32_t partition, int64_t n_bytes);

/* The ages in client->ages[place] have changed, in one class, or in all: AGES_CLASSES. Lock held. */
void client_page_ages(bfc_client *client, unsigned place, unsigned class);

/* Where it is told what of a partition streams' pools have and nobody uses; NULL: nowhere. */
_Atomic uint64_t *client_page_streams(const bfc_client *client, uint32_t partition);

#endif
