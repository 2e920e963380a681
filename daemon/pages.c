/* Pages; see pages.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/pages.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

/* ---- usage pages ---------------------------------------------------------- */

int usage_page_new(size_t n_entries, struct usage_page **ret)
{
        struct usage_page *p = calloc(1, sizeof(*p));
        void *map;
        int r;

        if (!p)
                return -ENOMEM;
        p->n_entries = n_entries;
        p->n_bytes = pages_usage_bytes(n_entries);
        r = p->n_bytes > PAGES_MAX_BYTES ? -EINVAL : pages_make("bfcd-usage", p->n_bytes, true, &map, &p->fd);
        if (r < 0) {
                free(p);
                return r;
        }
        p->page = map;
        p->page->magic = PAGES_USAGE_MAGIC;
        p->page->version = PAGES_VERSION;
        p->page->n_entries = n_entries;
        p->page->entry_bytes = sizeof(struct pages_entry);
        *ret = p;
        return 0;
}

struct usage_page *usage_page_free(struct usage_page *p)
{
        if (!p)
                return NULL;
        for (size_t i = 0; i < p->n_entries; i++)
                pages_close(&p->page->entries[i]);
        munmap(p->page, p->n_bytes);
        close(p->fd);
        free(p);
        return NULL;
}

struct pages_entry *usage_page_entry(const struct usage_page *p, size_t i)
{
        return p && i < p->n_entries ? &p->page->entries[i] : NULL;
}

/* ---- client pages --------------------------------------------------------- */

struct client_page {
        void *map; /* never loaded from */
};

int client_page_new(struct client_page **ret, int *ret_fd)
{
        struct client_page *p = calloc(1, sizeof(*p));
        int r;

        if (!p)
                return -ENOMEM;
        r = pages_make("bfcd-client", pages_client_bytes(), false, &p->map, ret_fd);
        if (r < 0) {
                free(p);
                return r;
        }
        *ret = p;
        return 0;
}

struct client_page *client_page_free(struct client_page *p)
{
        if (!p)
                return NULL;
        munmap(p->map, pages_client_bytes());
        free(p);
        return NULL;
}

/* The copy lies in memory of the daemon's own: the kernel writes a client page into a file,
 * which is this memory. Where it cannot read the page the call fails. */
struct client_page_reader {
        int fd;
        const struct pages_client *copy;
};

int client_page_reader_new(struct client_page_reader **ret)
{
        struct client_page_reader *reader = calloc(1, sizeof(*reader));
        void *map;
        int r;

        if (!reader)
                return -ENOMEM;
        r = pages_make("bfcd-client-copy", pages_client_bytes(), false, &map, &reader->fd);
        if (r < 0) {
                free(reader);
                return r;
        }
        reader->copy = map;
        *ret = reader;
        return 0;
}

struct client_page_reader *client_page_reader_free(struct client_page_reader *reader)
{
        if (!reader)
                return NULL;
        munmap((void *)(uintptr_t)reader->copy, pages_client_bytes());
        close(reader->fd);
        free(reader);
        return NULL;
}

static uint64_t word(const _Atomic uint64_t *p)
{
        return atomic_load_explicit(p, memory_order_relaxed);
}

int client_page_read(const struct client_page *p, struct client_page_reader *reader, struct client_word *ret)
{
        const struct pages_client *copy;

        if (!p || !reader ||
            pwrite(reader->fd, p->map, sizeof(struct pages_client), 0) != sizeof(struct pages_client))
                return -ENODATA;
        copy = reader->copy;
        if (word(&copy->magic) != PAGES_CLIENT_MAGIC || word(&copy->version) != PAGES_VERSION)
                return -ENODATA;
        for (size_t i = 0; i <= PAGES_MAX_PARTITIONS; i++)
                ret->partitions[i] = (struct client_figures){ word(&copy->held[i].bytes_held),
                                                              word(&copy->held[i].bytes_in_use),
                                                              word(&copy->held[i].bytes_idle) };
        return 0;
}
