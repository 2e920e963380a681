/* Pages; see pages.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/pages.h"

#include <errno.h>
#include <stdbool.h>
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

/* Copies so much of the page; false: it cannot be read. */
static bool copy_page(const struct client_page *p, struct client_page_reader *reader, size_t n_bytes)
{
        return pwrite(reader->fd, p->map, n_bytes, 0) == (ssize_t)n_bytes;
}

/* Sums stop at UINT64_MAX, differences at 0. */
static uint64_t sum_of(uint64_t a, uint64_t b)
{
        return a > UINT64_MAX - b ? UINT64_MAX : a + b;
}

static uint64_t less(uint64_t a, uint64_t b)
{
        return a > b ? a - b : 0;
}

static uint64_t parked_bytes(const struct pages_client *copy, size_t n_parked)
{
        uint64_t sum = 0;

        for (size_t i = 0; i < n_parked; i++)
                sum = sum_of(sum, word(&copy->parked[i].n_bytes));
        return sum;
}

static struct client_figures held_figures(const struct pages_held *held, uint64_t parked)
{
        uint64_t slabs = word(&held->bytes_slabs), whole = word(&held->bytes_whole);
        uint64_t cut = less(word(&held->bytes_cut), parked), used = sum_of(cut, whole);
        uint64_t streams = word(&held->bytes_streams);

        streams = streams < used ? streams : used;
        return (struct client_figures){ .bytes_held = sum_of(slabs, whole),
                                        .bytes_in_use = used - streams,
                                        .bytes_idle = sum_of(less(slabs, cut), streams) };
}

int client_page_read(const struct client_page *p, struct client_page_reader *reader, struct client_word *ret)
{
        const struct pages_client *copy;
        uint64_t n_parked, parked, parked_partition;

        if (!p || !reader || !copy_page(p, reader, offsetof(struct pages_client, parked)))
                return -ENODATA;
        copy = reader->copy;
        if (word(&copy->magic) != PAGES_CLIENT_MAGIC || word(&copy->version) != PAGES_VERSION)
                return -ENODATA;
        n_parked = word(&copy->n_parked);
        if (n_parked > PAGES_MAX_PARKED)
                n_parked = PAGES_MAX_PARKED;
        /* Places that are not used are not touched: that would take memory. */
        if (!copy_page(p, reader, offsetof(struct pages_client, parked) + n_parked * sizeof(copy->parked[0])))
                return -ENODATA;
        parked = parked_bytes(copy, n_parked);
        parked_partition = word(&copy->parked_partition);
        for (size_t i = 0; i <= PAGES_MAX_PARTITIONS; i++)
                ret->partitions[i] = held_figures(&copy->held[i], i == parked_partition ? parked : 0);
        return 0;
}
