/* A client's pages; see pages.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The counters' home is the cache, not the page: the daemon has that mapped too, and what
 * this process reckons with is nobody else's to write. */
#include "client/pages.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "client/client.h"
#include "client/error.h"

int client_pages_open(bfc_client *client)
{
        struct client_pages *p = &client->pages;
        int fds[2], r = 0;

        call_take_page_fds(client->connection, fds);
        if (fds[0] < 0)
                return 0;
        (void)pages_map_usage(fds[0], &p->usage);
        if (pages_map_client(fds[1], &p->own) == 0) {
                p->direct_bytes = calloc(client->hello->hello->n_partitions + 1, sizeof(*p->direct_bytes));
                if (p->direct_bytes) {
                        atomic_store_explicit(&p->own->version, PAGES_VERSION, memory_order_relaxed);
                        atomic_store_explicit(&p->own->magic, PAGES_CLIENT_MAGIC, memory_order_release);
                } else {
                        r = error_set(-ENOMEM, "this process is out of memory");
                }
        }
        close(fds[0]);
        close(fds[1]);
        return r;
}

void client_pages_close(struct client_pages *p)
{
        if (p->usage.page)
                munmap((void *)(uintptr_t)p->usage.page, p->usage.n_bytes);
        if (p->own)
                munmap(p->own, pages_client_bytes());
        free(p->direct_bytes);
        *p = (struct client_pages){ .own = NULL };
}

int client_pages_read(const bfc_client *client, uint32_t partition, struct bfc_tenant_usage *ret)
{
        const struct pages_entry *e = pages_view_entry(
                &client->pages.usage, client->hello->hello->partitions[partition]->usage_entry);
        uint64_t f[PAGES_N_FIGURES];

        if (!e || pages_read(e, f) < 0)
                return -EAGAIN;
        *ret = (struct bfc_tenant_usage){
                .struct_size = ret->struct_size,
                .bytes_limit = f[PAGES_BYTES_LIMIT],
                .bytes_reserved = f[PAGES_BYTES_RESERVED],
                .peak_bytes_reserved = f[PAGES_PEAK_BYTES_RESERVED],
                .bytes_in_use = f[PAGES_BYTES_IN_USE],
                .peak_bytes_in_use = f[PAGES_PEAK_BYTES_IN_USE],
                .bytes_requested = f[PAGES_BYTES_REQUESTED],
                .num_blocks = f[PAGES_NUM_BLOCKS],
                .num_sessions = f[PAGES_NUM_SESSIONS],
                .largest_free_block_bytes = f[PAGES_LARGEST_FREE_BLOCK_BYTES],
                .lifetime_peak_bytes_in_use = f[PAGES_LIFETIME_PEAK_BYTES_IN_USE],
                .lifetime_peak_bytes_reserved = f[PAGES_LIFETIME_PEAK_BYTES_RESERVED],
        };
        return 0;
}

/* ---- the client's own ------------------------------------------------------ */

static void add_cache(const bfc_client *client, uint32_t partition, struct cache_figures *sum)
{
        struct cache_figures f;

        if (!client->cache)
                return;
        cache_figures(client->cache, partition, &f);
        sum->bytes_reserved += f.bytes_reserved;
        sum->bytes_in_use += f.bytes_in_use;
}

static void put(_Atomic uint64_t *word, uint64_t n)
{
        atomic_store_explicit(word, n, memory_order_relaxed);
}

static void page_put(struct pages_held *held, const struct cache_figures *f, uint64_t direct_bytes)
{
        put(&held->bytes_held, f->bytes_reserved + direct_bytes);
        put(&held->bytes_in_use, f->bytes_in_use + direct_bytes);
        put(&held->bytes_idle, f->bytes_reserved - f->bytes_in_use);
}

/* Those that share the last entry. */
static void page_put_rest(bfc_client *client)
{
        struct client_pages *p = &client->pages;
        struct cache_figures sum = { 0 };
        uint64_t direct_bytes = 0;

        for (uint32_t i = PAGES_MAX_PARTITIONS; i < client->hello->hello->n_partitions; i++) {
                add_cache(client, i, &sum);
                direct_bytes += p->direct_bytes[i];
        }
        page_put(&p->own->held[PAGES_MAX_PARTITIONS], &sum, direct_bytes);
}

void client_page_update(bfc_client *client, uint32_t partition)
{
        struct client_pages *p = &client->pages;
        struct cache_figures f = { 0 };

        if (!p->own)
                return;
        if (partition >= PAGES_MAX_PARTITIONS) {
                page_put_rest(client);
                return;
        }
        add_cache(client, partition, &f);
        page_put(&p->own->held[partition], &f, p->direct_bytes[partition]);
}

void client_page_count(bfc_client *client, uint32_t partition, int64_t n_bytes)
{
        struct client_pages *p = &client->pages;

        if (!p->own || partition >= client->hello->hello->n_partitions)
                return;
        p->direct_bytes[partition] += (uint64_t)n_bytes;
        client_page_update(client, partition);
}
