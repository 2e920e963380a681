/* Pages: the daemon's end of proto/pages.h. A usage page for each tenant, which quotas
 * write; a client page for each session that asked for one, which its client writes.
 *
 * The daemon keeps no mapping of a client page: a client that punches holes into it through many
 * mappings would make the daemon wait in a page fault for locks of the file, and on a machine without
 * free memory the access would be a SIGBUS. It reads the pages that the file had at first, which a
 * pipe holds, without the file. A client that punches holes into its page is not understood any more.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_PAGES_H
#define BFCD_PAGES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/pages.h"

struct usage_page {
        int fd;  /* clients are given memfd_lend() of it */
        int pin; /* keeps the kernel from moving the page; -1: none */
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
struct client_page *client_page_free(struct client_page *p); /* takes NULL; the closer closes it */

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
int client_page_read(const struct client_page *p, struct client_word *ret);

/* A client's word of the ages of its blocks, by classes of ages.h, of those partitions that have an entry of
 * their own. */
struct client_ages {
        bool are_told[PAGES_MAX_PARTITIONS];
        uint64_t bytes[PAGES_MAX_PARTITIONS][AGES_CLASSES];
};

/* The ages at tick `now`. The sums are what the page says. -ENODATA: nothing. */
int client_page_ages(const struct client_page *p, uint32_t now, struct client_ages *ret);

#endif
