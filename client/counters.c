/* Counters; see counters.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "client/counters.h"

#include "client/client.h"
#include "client/pages.h"

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
