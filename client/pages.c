/* A client's counters and pages; see pages.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The cache and the magazines write into the client's page themselves: a store or two beside those to their
 * own counters. These counters stay, because the daemon has the page mapped too, and could write to it.
 *
 * Another daemon makes pages of its own. They are moved to the addresses of the old ones, because threads
 * read and write there without a lock. For the usage page as much address space is reserved as
 * the largest one needs: it may have grown. */
#include "client/pages.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "client/client.h"

int client_pages_read(const bfc_client *client, uint32_t partition, struct bfc_tenant_usage *ret)
{
        const struct pages_entry *e =
                atomic_load_explicit(&client->partitions[partition].usage, memory_order_acquire);
        uint64_t f[PAGES_N_STATS];

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
                .bytes_direct = f[PAGES_BYTES_DIRECT],
        };
        return 0;
}

/* ---- the client's own ------------------------------------------------------ */

static struct pages_held *entry_of(const struct client_pages *p, uint32_t partition)
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
                cache_show(client->cache, i, entry_of(&client->pages, i));
        for (unsigned i = 0; client->cache && i < PAGES_AGES; i++) {
                client->counters.ages[i].tick = ages_now();
                client_page_ages(client, i, AGES_CLASSES);
        }
        for (uint32_t i = 0; i < client->hello->hello->n_partitions && i < PAGES_MAX_PARTITIONS; i++)
                parkables_show(&client->partitions[i].parkables, &own->idle[i]);
        put(&own->stashed_partition, (uint64_t)(entry_of(&client->pages, client->partition) - own->held));
        put(&own->n_stashed, magazines_show(client->stash.magazines, own->stashed, PAGES_MAX_STASHED));
        put(&own->version, PAGES_VERSION);
        atomic_store_explicit(&own->magic, PAGES_CLIENT_MAGIC, memory_order_release);
}

void client_page_whole(bfc_client *client, uint32_t partition, int64_t n_bytes)
{
        struct client_pages *p = &client->pages;

        if (p->own)
                pages_add(&entry_of(p, partition)->bytes_whole, (uint64_t)n_bytes);
}

void client_page_outside(bfc_client *client, uint32_t partition, int64_t n_bytes)
{
        struct pages_client *own = client->pages.own;

        if (own)
                pages_add(&own->bytes_outside[partition < PAGES_MAX_PARTITIONS ? partition
                                                                               : PAGES_MAX_PARTITIONS],
                          (uint64_t)n_bytes);
}

void client_page_ages(bfc_client *client, unsigned place, unsigned class)
{
        struct pages_client *own = client->pages.own;

        if (own && class == AGES_CLASSES)
                pages_show_ages(&own->ages[place], &client->counters.ages[place]);
        else if (own)
                pages_show_class(&own->ages[place], &client->counters.ages[place], class);
}

_Atomic uint64_t *client_page_streams(const bfc_client *client, uint32_t partition)
{
        return client->pages.own ? &entry_of(&client->pages, partition)->bytes_streams : NULL;
}

void client_page_pressure_fn(bfc_client *client)
{
        if (client->pages.own)
                put(&client->pages.own->has_pressure_fn,
                    __atomic_load_n(&client->pressure.fn, __ATOMIC_RELAXED) != NULL);
}

/* ---- both ------------------------------------------------------------------ */

static void drop_usage(const struct pages_view *v)
{
        if (v->page)
                munmap((void *)(uintptr_t)v->page, v->n_bytes);
}

/* v: NULL: there are none from now on. */
static void show_entries(bfc_client *client, const struct pages_view *v, const Bfcd__HelloReply *hello)
{
        for (size_t i = 0; i < client->hello->hello->n_partitions; i++)
                atomic_store_explicit(&client->partitions[i].usage,
                                      v ? pages_view_entry(v, hello->partitions[i]->usage_entry) : NULL,
                                      memory_order_release);
}

/* Moves the page to the reserved addresses. False: it stays where it is. */
static bool place_usage(struct client_pages *p, struct pages_view *v)
{
        void *old = (void *)(uintptr_t)v->page;

        if (!p->usage || !v->page)
                return false;
        if (mremap(old, v->n_bytes, v->n_bytes, MREMAP_MAYMOVE | MREMAP_FIXED, p->usage) == MAP_FAILED)
                return false;
        v->page = p->usage;
        return true;
}

void client_pages_hide(const struct client_pages *p)
{
        if (p->usage)
                fork_hide_range(p->usage, PAGES_MAX_BYTES);
        if (p->own)
                fork_hide_range(p->own, pages_client_bytes());
}

/* Room for the largest page: that of another daemon may be larger. */
static void reserve_usage(bfc_client *client)
{
        void *place =
                mmap(NULL, PAGES_MAX_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

        if (place != MAP_FAILED)
                client->pages.usage = place;
}

void client_pages_keep(struct call_connection *connection, struct client_pages_next *ret)
{
        int fds[2];

        *ret = (struct client_pages_next){ .own = NULL };
        call_take_page_fds(connection, fds);
        if (fds[0] < 0)
                return;
        (void)pages_map_usage(fds[0], &ret->usage);
        (void)pages_map_client(fds[1], &ret->own);
        close(fds[0]);
        close(fds[1]);
}

void client_pages_drop(struct client_pages_next *next)
{
        drop_usage(&next->usage);
        if (next->own)
                munmap(next->own, pages_client_bytes());
        *next = (struct client_pages_next){ .own = NULL };
}

void client_pages_open(bfc_client *client)
{
        struct client_pages_next next;

        client_pages_keep(client->connection, &next);
        client->pages.own = next.own;
        if (next.own)
                client_page_begin(client);
        if (!next.usage.page)
                return;
        reserve_usage(client);
        if (place_usage(&client->pages, &next.usage))
                show_entries(client, &next.usage, client->hello->hello);
        else
                drop_usage(&next.usage);
}

/* ---- another daemon's -------------------------------------------------------- */

void client_pages_invalidate(bfc_client *client)
{
        show_entries(client, NULL, NULL);
}

/* Copies the old page to the new one, the header's first word last. No thread writes to either. */
static void copy_own(const struct pages_client *from, struct pages_client *to)
{
        memcpy((char *)to + sizeof(to->magic), (const char *)from + sizeof(from->magic),
               sizeof(*to) - sizeof(to->magic));
        atomic_store_explicit(&to->magic, PAGES_CLIENT_MAGIC, memory_order_release);
}

/* No thread writes meanwhile. If the page cannot be moved the old one stays, which has no reader. */
static void renew_own(bfc_client *client, struct client_pages_next *next)
{
        size_t n_bytes = pages_client_bytes();

        pthread_mutex_lock(&client->lock);
        magazines_lock(client->stash.magazines);
        copy_own(client->pages.own, next->own);
        if (mremap(next->own, n_bytes, n_bytes, MREMAP_MAYMOVE | MREMAP_FIXED, client->pages.own) !=
            MAP_FAILED)
                next->own = NULL;
        magazines_unlock(client->stash.magazines);
        pthread_mutex_unlock(&client->lock);
}

void client_pages_renew(bfc_client *client, struct client_pages_next *next, const Bfcd__HelloReply *hello)
{
        if (client->pages.own && next->own)
                renew_own(client, next);
        if (place_usage(&client->pages, &next->usage)) {
                show_entries(client, &next->usage, hello);
                next->usage.page = NULL;
        }
        client_pages_drop(next);
}

void client_pages_close(struct client_pages *p)
{
        if (p->usage)
                munmap(p->usage, PAGES_MAX_BYTES);
        if (p->own)
                munmap(p->own, pages_client_bytes());
        *p = (struct client_pages){ .own = NULL };
}

/* ---- counters ------------------------------------------------------------------- */

uint64_t client_bytes_reserved(const bfc_client *client)
{
        uint64_t sum = 0;

        for (size_t i = 0; i < client->hello->hello->n_partitions; i++)
                sum += client->partitions[i].stats.bytes_reserved;
        return sum;
}

static void add_with_peak(uint64_t *sum, uint64_t *peak, uint64_t n_bytes)
{
        *sum += n_bytes;
        if (*sum > *peak)
                *peak = *sum;
}

void client_count_reserved(bfc_client *client, uint32_t partition, uint64_t n_bytes)
{
        struct bfc_client_stats *s = &client->partitions[partition].stats;
        uint64_t sum = client_bytes_reserved(client);

        add_with_peak(&s->bytes_reserved, &s->peak_bytes_reserved, n_bytes);
        add_with_peak(&sum, &client->counters.peak_bytes_reserved, n_bytes);
}

void client_count_released(bfc_client *client, uint32_t partition, uint64_t n_bytes)
{
        client->partitions[partition].stats.bytes_reserved -= n_bytes;
}

void client_count_restored(bfc_client *client, uint32_t partition, uint64_t n_bytes)
{
        client->partitions[partition].stats.bytes_reserved += n_bytes;
}

void client_stamp(const bfc_client *client, uint32_t partition, struct block *block)
{
        if (!client->cache)
                return; /* the daemon knows the ages of its own blocks */
        block->age_place = (uint8_t)(1 + (block->may_stash                   ? PAGES_SMALL
                                          : partition < PAGES_MAX_PARTITIONS ? partition
                                                                             : PAGES_MAX_PARTITIONS));
        block->born = ages_now();
}

/* The lock is held. */
static void count_age(bfc_client *client, const struct block *block, uint64_t n_bytes)
{
        unsigned place = block->age_place - 1u;
        bool moved;
        unsigned c;

        if (block->born == 0)
                return;
        c = ages_count(&client->counters.ages[place], block->born, n_bytes, &moved);
        client_page_ages(client, place, moved ? AGES_CLASSES : c);
}

void client_share_age(bfc_client *client, const struct block *block, bool is_shared)
{
        const void *ptr = block->ptr;

        if (block->age_place == 0)
                return;
        if (is_shared)
                count_age(client, block, -block->n_bytes);
        blocks_set_born(&client->blocks, ptr, is_shared ? 0 : ages_now());
        if (!is_shared)
                count_age(client, block, block->n_bytes);
}

void client_count_alloc(bfc_client *client, const struct block *block)
{
        struct bfc_client_stats *s = &client->partitions[block->partition].stats;

        s->num_allocs++;
        s->bytes_requested += block->n_requested;
        if (block->n_bytes > s->largest_alloc_size)
                s->largest_alloc_size = block->n_bytes;
        if (block->partition == client->partition) {
                magazines_count_alloc(client->stash.magazines, block->n_bytes);
        } else {
                s->bytes_in_use += block->n_bytes;
                if (s->bytes_in_use > s->peak_bytes_in_use)
                        s->peak_bytes_in_use = s->bytes_in_use;
                magazines_count_other_alloc(client->stash.magazines, block->n_bytes);
        }
        count_age(client, block, block->n_bytes);
        if (block->parkable)
                parkable_enter(&client->partitions[block->partition].parkables, block->parkable,
                               blocks_find(&client->blocks, block->ptr));
}

void client_count_free(bfc_client *client, const struct block *block)
{
        struct bfc_client_stats *s = &client->partitions[block->partition].stats;

        s->num_frees++;
        s->bytes_requested -= block->n_requested;
        if (block->partition == client->partition) {
                magazines_count_free(client->stash.magazines, block->n_bytes);
        } else {
                s->bytes_in_use -= block->n_bytes;
                magazines_count_other_free(client->stash.magazines, block->n_bytes);
        }
        count_age(client, block, -block->n_bytes);
        if (block->parkable)
                parkable_drop(block, block->parkable);
}
