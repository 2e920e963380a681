/* A client's pages; see pages.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The cache and the magazines write into the client's page themselves, in passing: a store or
 * two beside those to their own counters. These stay: the daemon has the page mapped too, and
 * what this process reckons with is nobody else's to write. */
#include "client/pages.h"

#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include "client/client.h"

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

static struct pages_held *held_of(const struct client_pages *p, uint32_t partition)
{
        return &p->own->held[partition < PAGES_MAX_PARTITIONS ? partition : PAGES_MAX_PARTITIONS];
}

static void put(_Atomic uint64_t *word, uint64_t n)
{
        atomic_store_explicit(word, n, memory_order_relaxed);
}

static void client_page_begin(bfc_client *client)
{
        struct pages_client *own = client->pages.own;

        for (uint32_t i = 0; client->cache && i < client->hello->hello->n_partitions; i++)
                cache_show(client->cache, i, held_of(&client->pages, i));
        put(&own->parked_partition, (uint64_t)(held_of(&client->pages, client->partition) - own->held));
        put(&own->n_parked, magazines_show(client->magazines, own->parked, PAGES_MAX_PARKED));
        put(&own->version, PAGES_VERSION);
        atomic_store_explicit(&own->magic, PAGES_CLIENT_MAGIC, memory_order_release);
}

void client_page_whole(bfc_client *client, uint32_t partition, int64_t n_bytes)
{
        struct client_pages *p = &client->pages;

        if (p->own)
                pages_add(&held_of(p, partition)->bytes_whole, (uint64_t)n_bytes);
}

_Atomic uint64_t *client_page_streams(const bfc_client *client, uint32_t partition)
{
        return client->pages.own ? &held_of(&client->pages, partition)->bytes_streams : NULL;
}

/* ---- both ------------------------------------------------------------------ */

void client_pages_open(bfc_client *client)
{
        struct client_pages *p = &client->pages;
        int fds[2];

        call_take_page_fds(client->connection, fds);
        if (fds[0] < 0)
                return;
        (void)pages_map_usage(fds[0], &p->usage);
        if (pages_map_client(fds[1], &p->own) == 0)
                client_page_begin(client);
        close(fds[0]);
        close(fds[1]);
}

void client_pages_close(struct client_pages *p)
{
        if (p->usage.page)
                munmap((void *)(uintptr_t)p->usage.page, p->usage.n_bytes);
        if (p->own)
                munmap(p->own, pages_client_bytes());
        *p = (struct client_pages){ .own = NULL };
}
