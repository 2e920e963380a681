/* Pages: the daemon's side of proto/pages.h. A usage page for each tenant, which quotas write; a client
 * page for each session that requested one, which its client writes.
 *
 * The daemon does not keep a client page mapped. A client that punches holes into it through many
 * mappings could make the daemon wait in a page fault for locks of the file, and without free memory the
 * access would raise SIGBUS. Instead the daemon reads the file's initial memory pages through a pipe that
 * references them, without the file. If a client punches holes into its page, later values are not seen.
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
        int pin; /* a pipe that prevents the kernel from moving the page; -1: none */
        struct pages_usage *page;
        size_t n_bytes;
        size_t n_entries;
};

/* -EINVAL: this kernel cannot seal it. -EMFILE, -ENFILE, -ENOMEM. */
int usage_page_new(size_t n_entries, struct usage_page **ret);
/* Every later read of it fails, in all processes. Takes NULL. */
struct usage_page *usage_page_free(struct usage_page *p);

/* Where a quota writes; NULL: p is NULL, or has no such entry. */
struct pages_entry *usage_page_entry(const struct usage_page *p, size_t i);

/* A session's. */
struct client_page;

/* *ret_fd: for the client; the caller gives it away and keeps none. -EMFILE, -ENFILE, -ENOMEM. */
int client_page_new(struct client_page **ret, int *ret_fd);
struct client_page *client_page_free(struct client_page *p); /* takes NULL */

/* The statistics of the cache in one partition, as a client reports them. */
struct client_usage {
        uint64_t bytes_held;
        uint64_t bytes_in_use;
        uint64_t bytes_idle;
};

/* Of a partition, blocks that could be parked, and since when the first of them has been idle. */
struct client_idle {
        uint64_t bytes;
        uint64_t since_ms;
};

struct client_word {
        struct client_usage partitions[PAGES_MAX_PARTITIONS + 1]; /* the last one: all further partitions */
        struct client_idle idle[PAGES_MAX_PARTITIONS];
        bool has_pressure_fn;
        uint64_t bytes_outside; /* of all; at most INT64_MAX */
};

/* Copies the page; values are unchecked, up to UINT64_MAX each. -ENODATA: it has no values, or an unknown
 * version. */
int client_page_read(const struct client_page *p, struct client_word *ret);

/* The ages of blocks as a client reports them, by classes of ages.h, of partitions with an entry of their
 * own. */
struct client_ages {
        bool are_told[PAGES_MAX_PARTITIONS];
        uint64_t bytes[PAGES_MAX_PARTITIONS][AGES_CLASSES];
};

/* The ages at tick `now`, with unchecked sums. -ENODATA: none. */
int client_page_ages(const struct client_page *p, uint32_t now, struct client_ages *ret);

#endif
