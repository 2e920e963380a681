/* Pages: the daemon's end of proto/pages.h. A usage page for each tenant, which quotas
 * write; a client page for each session that asked for one, which its client writes.
 *
 * What a client has written is read by the kernel, not by a load, so that nothing that a client does
 * to its page (a hole in it, on a machine that has no memory left) can end the daemon.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_PAGES_H
#define BFCD_PAGES_H

#include <stddef.h>
#include <stdint.h>

#include "proto/pages.h"

struct usage_page {
        int fd; /* for clients, to be borrowed */
        struct pages_usage *page;
        size_t n_bytes;
        size_t n_entries;
};

/* -EINVAL: this kernel cannot seal it. -EMFILE, -ENFILE, -ENOMEM. */
int usage_page_new(size_t n_entries, struct usage_page **ret);
/* Every read of it fails from now on, wherever it is mapped. Takes NULL. */
struct usage_page *usage_page_free(struct usage_page *p);

/* Where a quota writes; NULL: p is NULL, or has no such entry. */
struct pages_entry *usage_page_entry(const struct usage_page *p, size_t i);

/* A session's. */
struct client_page;

/* *ret_fd: for the client; the caller closes it. -EMFILE, -ENFILE, -ENOMEM. */
int client_page_new(struct client_page **ret, int *ret_fd);
struct client_page *client_page_free(struct client_page *p); /* takes NULL */

/* What clients' pages are read through. */
struct client_page_reader;

int client_page_reader_new(struct client_page_reader **ret);
struct client_page_reader *client_page_reader_free(struct client_page_reader *r); /* takes NULL */

/* A client's word of its cache in one partition. */
struct client_figures {
        uint64_t bytes_held;
        uint64_t bytes_in_use;
        uint64_t bytes_idle;
};

struct client_word {
        struct client_figures partitions[PAGES_MAX_PARTITIONS + 1]; /* the last: all further ones */
};

/* Copies the page: whatever it says, up to UINT64_MAX each. -ENODATA: it says nothing, or in a
 * version that this daemon does not know. */
int client_page_read(const struct client_page *p, struct client_page_reader *reader, struct client_word *ret);

#endif
