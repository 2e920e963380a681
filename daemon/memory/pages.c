/* Pages; see pages.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/pages.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include "daemon/base/closer.h"
#include "daemon/base/number.h"
#include "proto/memfd.h"

#define AGE_TRIES 4u /* of a copy, while its client moves counters */

/* ---- usage pages ---------------------------------------------------------- */

/* A pipe that holds references to the pages. The kernel moves no page with references that it
 * does not know. So a client that has the pages mapped cannot have them moved into a huge page
 * (MADV_COLLAPSE), for which the kernel would take them out of the daemon's mapping and make the
 * loop wait for the page's lock. One page of 2 MiB is enough, so the pipe need not hold all.
 * -1: no pipe could be had, or it holds less than min_bytes; errno says why. */
static int pin_memory(void *memory, size_t n_bytes, size_t min_bytes)
{
        struct iovec iov = { .iov_base = memory, .iov_len = n_bytes };
        ssize_t n;
        int ends[2];

        if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) < 0)
                return -1;
        (void)fcntl(ends[1], F_SETPIPE_SZ, n_bytes);
        n = vmsplice(ends[1], &iov, 1, SPLICE_F_NONBLOCK);
        if (n <= 0 || (size_t)n < min_bytes) {
                errno = ENOMEM;
                close(ends[0]);
                ends[0] = -1;
        }
        close(ends[1]);
        return ends[0];
}

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
        p->pin = pin_memory(map, p->n_bytes, 1);
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
        if (p->pin >= 0)
                close(p->pin);
        closer_close(p->fd);
        free(p);
        return NULL;
}

struct pages_entry *usage_page_entry(const struct usage_page *p, size_t i)
{
        return p && i < p->n_entries ? &p->page->entries[i] : NULL;
}

/* ---- client pages --------------------------------------------------------- */

/* The pipe references the file's first pages. Later changes of the file by the client, such as holes, and
 * locks on the file or on its pages do not affect reads from the pipe. The daemon keeps no fd of the file: its last
 * close, which frees all that the client attached to it, is the client's. */
struct client_page {
        int pin; /* a pipe with the pages, which the daemon reads */
};

int client_page_new(struct client_page **ret, int *ret_fd)
{
        struct client_page *p = calloc(1, sizeof(*p));
        void *map;
        int r, fd;

        if (!p)
                return -ENOMEM;
        r = pages_make("bfcd-client", pages_client_bytes(), false, &map, &fd);
        if (r < 0) {
                free(p);
                return r;
        }
        p->pin = pin_memory(map, pages_client_bytes(), sizeof(struct pages_client));
        r = p->pin < 0 ? -errno : 0;
        munmap(map, pages_client_bytes());
        if (r < 0) {
                close(fd);
                free(p);
                return r;
        }
        *ret_fd = fd;
        *ret = p;
        return 0;
}

struct client_page *client_page_free(struct client_page *p)
{
        if (!p)
                return NULL;
        close(p->pin);
        free(p);
        return NULL;
}

/* By a second pipe with the same pages, since what is read from a pipe leaves it. pread() of the file
 * waits for the lock of each of its pages, which the kernel may hold for as long as it unmaps the page
 * from all of the client's mappings (MADV_COLLAPSE). */
static bool read_pinned(int pin, void *ret, size_t n_bytes)
{
        bool is_read;
        int ends[2];

        if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) < 0)
                return false;
        is_read = tee(pin, ends[1], n_bytes, SPLICE_F_NONBLOCK) == (ssize_t)n_bytes &&
                  read(ends[0], ret, n_bytes) == (ssize_t)n_bytes;
        close(ends[0]);
        close(ends[1]);
        return is_read;
}

static uint64_t word(const _Atomic uint64_t *p)
{
        return atomic_load_explicit(p, memory_order_relaxed);
}

/* Sums stop at UINT64_MAX, differences at 0. */
static uint64_t sum_of(uint64_t a, uint64_t b)
{
        return a > UINT64_MAX - b ? UINT64_MAX : a + b;
}

static size_t n_stashed(const struct pages_client *copy)
{
        return (size_t)min_u64(word(&copy->n_stashed), PAGES_MAX_STASHED);
}

static uint64_t stashed_bytes(const struct pages_client *copy)
{
        uint64_t sum = 0;

        for (size_t i = 0; i < n_stashed(copy); i++)
                sum = sum_of(sum, word(&copy->stashed[i].n_bytes));
        return sum;
}

static struct client_usage held_stats(const struct pages_held *held, uint64_t stashed)
{
        uint64_t slabs = word(&held->bytes_slabs), whole = word(&held->bytes_whole);
        uint64_t cut = excess_u64(word(&held->bytes_cut), stashed), used = sum_of(cut, whole);
        uint64_t streams = min_u64(word(&held->bytes_streams), used);

        return (struct client_usage){ .bytes_held = sum_of(slabs, whole),
                                      .bytes_in_use = used - streams,
                                      .bytes_idle = sum_of(excess_u64(slabs, cut), streams) };
}

/* False: the page says nothing, or in a version that this daemon does not know. */
static bool copy_page(const struct client_page *p, struct pages_client *ret)
{
        return p && read_pinned(p->pin, ret, sizeof(*ret)) && word(&ret->magic) == PAGES_CLIENT_MAGIC &&
               word(&ret->version) == PAGES_VERSION;
}

int client_page_read(const struct client_page *p, struct client_word *ret)
{
        struct pages_client copy;
        uint64_t stashed, stashed_partition;

        if (!copy_page(p, &copy))
                return -ENODATA;
        stashed = stashed_bytes(&copy);
        stashed_partition = word(&copy.stashed_partition);
        for (size_t i = 0; i <= PAGES_MAX_PARTITIONS; i++)
                ret->partitions[i] = held_stats(&copy.held[i], i == stashed_partition ? stashed : 0);
        for (size_t i = 0; i < PAGES_MAX_PARTITIONS; i++)
                ret->idle[i] =
                        (struct client_idle){ word(&copy.idle[i].bytes), word(&copy.idle[i].since_ms) };
        ret->has_pressure_fn = word(&copy.has_pressure_fn) != 0;
        ret->bytes_outside = 0;
        for (size_t i = 0; i <= PAGES_MAX_PARTITIONS; i++)
                ret->bytes_outside =
                        min_u64(sum_of(ret->bytes_outside, word(&copy.bytes_outside[i])), INT64_MAX);
        return 0;
}

/* ---- ages --------------------------------------------------------------------- */

/* Whether no counters were being moved while the page was copied. */
static bool is_stable(const struct pages_client *copy)
{
        bool is = true;

        for (size_t i = 0; i < PAGES_AGES; i++)
                is = is && word(&copy->ages[i].done) == word(&copy->ages[i].begun);
        for (size_t i = 0; i < n_stashed(copy); i++)
                is = is && atomic_load_explicit(&copy->stashed[i].done, memory_order_relaxed) ==
                                   atomic_load_explicit(&copy->stashed[i].begun, memory_order_relaxed);
        return is;
}

static void read_ages(const struct pages_ages *from, uint32_t now, struct ages *ret)
{
        ret->tick = word(&from->done);
        for (unsigned c = 0; c < AGES_CLASSES; c++)
                ret->bytes[c] = word(&from->bytes[c]);
        ages_advance(ret, now);
}

/* Blocks that may be stashed: their sums count granules, modulo 2^32. */
static void add_small(const struct pages_client *copy, uint32_t now, uint64_t bytes[AGES_CLASSES])
{
        struct ages each;
        uint32_t sums[AGES_CLASSES];

        read_ages(&copy->ages[PAGES_SMALL], now, &each);
        for (unsigned c = 0; c < AGES_CLASSES; c++)
                sums[c] = (uint32_t)(each.bytes[c] / PAGES_AGE_GRANULE);
        for (size_t i = 0; i < n_stashed(copy); i++) {
                const struct pages_stashed *from = &copy->stashed[i];

                each.tick = atomic_load_explicit(&from->done, memory_order_relaxed);
                for (unsigned c = 0; c < AGES_CLASSES; c++)
                        each.bytes[c] = atomic_load_explicit(&from->granules[c], memory_order_relaxed);
                ages_advance(&each, now);
                for (unsigned c = 0; c < AGES_CLASSES; c++)
                        sums[c] += (uint32_t)each.bytes[c];
        }
        for (unsigned c = 0; c < AGES_CLASSES; c++) /* below 0: read while it changed */
                bytes[c] = sum_of(bytes[c], sums[c] > INT32_MAX ? 0 : (uint64_t)sums[c] * PAGES_AGE_GRANULE);
}

int client_page_ages(const struct client_page *p, uint32_t now, struct client_ages *ret)
{
        struct pages_client copy;
        struct ages each;
        unsigned n_tries = 0;

        do
                if (!copy_page(p, &copy))
                        return -ENODATA;
        while (!is_stable(&copy) && ++n_tries < AGE_TRIES);
        for (size_t i = 0; i < PAGES_MAX_PARTITIONS; i++) {
                ret->are_told[i] = word(&copy.ages[i].done) != 0;
                read_ages(&copy.ages[i], now, &each);
                for (unsigned c = 0; c < AGES_CLASSES; c++)
                        ret->bytes[i][c] = each.bytes[c] > INT64_MAX ? 0 : each.bytes[c];
                if (i == word(&copy.stashed_partition))
                        add_small(&copy, now, ret->bytes[i]);
        }
        return 0;
}
