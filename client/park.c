/* What is counted of blocks, and those of the host's that are parked when they are freed;
 * see magazine.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A block may be parked where its memory may be anybody's of this process at once: cut by the
 * cache, at most 1 MiB, and of a device on which no work goes on behind our back. And only in the
 * client's own partition, so there is one set of magazines. */
#include "client/client.h"

int client_start_magazines(bfc_client *client, uint64_t idle_bytes)
{
        bool parks = client->cache && !client->places[client->partition].is_cuda;
        int r = magazines_new(parks ? idle_bytes / 8 : 0, &client->magazines);

        client->park_bytes = r == 0 ? magazines_max_block(client->magazines) : 0;
        client->parks = client->park_bytes > 0;
        return r;
}

void client_stamp(const bfc_client *client, uint32_t partition, struct block *block)
{
        if (!client->cache)
                return; /* the daemon knows the ages of its own blocks */
        block->age_place = (uint8_t)(1 + (block->may_park                    ? PAGES_SMALL
                                          : partition < PAGES_MAX_PARTITIONS ? partition
                                                                             : PAGES_MAX_PARTITIONS));
        block->born = ages_now();
}

/* Lock held. */
static void client_count_age(bfc_client *client, const struct block *block, uint64_t n_bytes)
{
        unsigned place = block->age_place - 1u;
        bool moved;
        unsigned c;

        if (block->born == 0)
                return;
        c = ages_count(&client->ages[place], block->born, n_bytes, &moved);
        client_page_ages(client, place, moved ? AGES_CLASSES : c);
}

void client_share_age(bfc_client *client, const struct block *block, bool is_shared)
{
        const void *ptr = block->ptr;

        if (block->age_place == 0)
                return;
        if (is_shared)
                client_count_age(client, block, -block->n_bytes);
        blocks_set_born(&client->blocks, ptr, is_shared ? 0 : ages_now());
        if (!is_shared)
                client_count_age(client, block, block->n_bytes);
}

void client_count_alloc(bfc_client *client, const struct block *block)
{
        struct bfc_client_stats *s = &client->stats[block->partition];

        s->num_allocs++;
        s->bytes_requested += block->n_requested;
        if (block->n_bytes > s->largest_alloc_size)
                s->largest_alloc_size = block->n_bytes;
        if (block->partition == client->partition) {
                magazines_count_alloc(client->magazines, block->n_bytes);
        } else {
                s->bytes_in_use += block->n_bytes;
                if (s->bytes_in_use > s->peak_bytes_in_use)
                        s->peak_bytes_in_use = s->bytes_in_use;
                magazines_count_other_alloc(client->magazines, block->n_bytes);
        }
        client_count_age(client, block, block->n_bytes);
}

void client_count_free(bfc_client *client, const struct block *block)
{
        struct bfc_client_stats *s = &client->stats[block->partition];

        s->num_frees++;
        s->bytes_requested -= block->n_requested;
        if (block->partition == client->partition) {
                magazines_count_free(client->magazines, block->n_bytes);
        } else {
                s->bytes_in_use -= block->n_bytes;
                magazines_count_other_free(client->magazines, block->n_bytes);
        }
        client_count_age(client, block, -block->n_bytes);
}

/* Of one partition, without bytes_mapped and what follows from the others. */
static void read_counts(const bfc_client *client, uint32_t partition, const struct magazine_sums *sums,
                        struct bfc_client_stats *ret)
{
        *ret = client->stats[partition];
        if (partition == client->partition) {
                ret->num_allocs += sums->num_allocs;
                ret->num_frees += sums->num_frees;
                ret->bytes_requested += sums->bytes_requested;
                ret->bytes_in_use = sums->bytes_in_use;
                ret->peak_bytes_in_use = sums->peak_bytes_in_use;
        }
}

static void derive_stats(struct bfc_client_stats *s)
{
        s->num_blocks = s->num_allocs - s->num_frees;
        s->bytes_idle = s->bytes_reserved - s->bytes_in_use;
}

void client_read_stats_in(bfc_client *client, uint32_t partition, struct bfc_client_stats *ret)
{
        struct magazine_sums sums;

        magazines_read(client->magazines, &sums);
        read_counts(client, partition, &sums, ret);
        ret->bytes_mapped = regions_mapped(&client->regions, partition);
        derive_stats(ret);
}

void client_read_stats(bfc_client *client, struct bfc_client_stats *ret)
{
        struct magazine_sums sums;

        magazines_read(client->magazines, &sums);
        *ret = (struct bfc_client_stats){ .bytes_in_use = sums.all_bytes_in_use,
                                          .peak_bytes_in_use = sums.all_peak_bytes_in_use,
                                          .bytes_mapped = client->regions.n_bytes_mapped,
                                          .bytes_reserved = client->bytes_reserved,
                                          .peak_bytes_reserved = client->peak_bytes_reserved };
        for (uint32_t i = 0; i < client->hello->hello->n_partitions; i++) {
                struct bfc_client_stats s;

                read_counts(client, i, &sums, &s);
                ret->num_allocs += s.num_allocs;
                ret->num_frees += s.num_frees;
                ret->num_failures += s.num_failures;
                ret->bytes_requested += s.bytes_requested;
                if (s.largest_alloc_size > ret->largest_alloc_size)
                        ret->largest_alloc_size = s.largest_alloc_size;
        }
        derive_stats(ret);
}

void client_reset_peaks(bfc_client *client)
{
        magazines_reset_peak(client->magazines);
        client->peak_bytes_reserved = client->bytes_reserved;
        for (uint32_t i = 0; i < client->hello->hello->n_partitions; i++) {
                client->stats[i].peak_bytes_in_use = client->stats[i].bytes_in_use;
                client->stats[i].peak_bytes_reserved = client->stats[i].bytes_reserved;
        }
}

bool client_may_park(const bfc_client *client, uint32_t partition, uint64_t n_bytes)
{
        return n_bytes <= client->park_bytes && partition == client->partition;
}

void client_set_draining(bfc_client *client, uint32_t partition, bool is_draining)
{
        if (client->cache)
                cache_set_draining(client->cache, partition, is_draining);
        if (client->park_bytes > 0 && partition == client->partition)
                __atomic_store_n(&client->parks, !is_draining, __ATOMIC_RELAXED);
}

bool client_unpark(bfc_client *client, uint32_t partition, uint64_t n_bytes, void **ret_ptr)
{
        struct record *record;

        if (!client_may_park(client, partition, n_bytes))
                return false;
        record = magazines_get(client->magazines, n_bytes);
        if (!record)
                return false;
        *ret_ptr = (void *)(uintptr_t)record->block.ptr;
        return true;
}

/* Back into the cache. Lock held. */
static void client_clear_out(bfc_client *client, struct record *list)
{
        struct record *below;
        struct block block;

        for (; list; list = below) {
                below = list->below;
                blocks_take_parked(&client->blocks, list, &block);
                cache_dealloc(&block);
        }
}

bool client_park(bfc_client *client, const void *ptr, uint64_t *ret_excess)
{
        struct record *record, *full;

        if (!__atomic_load_n(&client->parks, __ATOMIC_RELAXED) ||
            __atomic_load_n(&client->lost, __ATOMIC_RELAXED) != 0)
                return false;
        record = blocks_park(&client->blocks, ptr);
        if (!record)
                return false;
        if (client->regions.inherits)
                client_wipe(client, client->partition, &record->block);
        full = magazines_put(client->magazines, record);
        if (full) {
                pthread_mutex_lock(&client->lock);
                client_clear_out(client, full);
                *ret_excess = cache_excess(client->cache, client->partition);
                pthread_mutex_unlock(&client->lock);
        }
        return true;
}

bool client_drain(bfc_client *client)
{
        struct record *all = client->park_bytes > 0 ? magazines_take_all(client->magazines) : NULL;

        client_clear_out(client, all);
        return all != NULL;
}
