/* What is counted of blocks, and small ones of the host's that are parked when they are freed;
 * see magazine.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A block may be parked where its memory may be anybody's of this process at once: cut by the
 * cache, small, and of a device on which no work goes on behind our back. And only in the
 * client's own partition, so there is one set of magazines. */
#include "client/client.h"

#define MAGAZINE_BYTES UINT64_C(262144) /* in each; in all of them at most an eighth of what may be idle */

int client_start_magazines(bfc_client *client, uint64_t idle_bytes)
{
        bool parks = client->cache && !client->places[client->partition].is_cuda;
        uint64_t n_bytes = parks ? idle_bytes / 8 : 0;

        client->parks = n_bytes > 0;
        return magazines_new(n_bytes, MAGAZINE_BYTES, &client->magazines);
}

void client_count_alloc(bfc_client *client, const struct block *block)
{
        struct bfc_client_stats *s = &client->stats;

        s->num_allocs++;
        s->bytes_requested += block->n_requested;
        if (block->n_bytes > s->largest_alloc_size)
                s->largest_alloc_size = block->n_bytes;
        magazines_count_alloc(client->magazines, block->n_bytes);
}

void client_count_free(bfc_client *client, const struct block *block)
{
        client->stats.num_frees++;
        client->stats.bytes_requested -= block->n_requested;
        magazines_count_free(client->magazines, block->n_bytes);
}

void client_read_stats(bfc_client *client, struct bfc_client_stats *ret)
{
        struct magazine_sums sums;

        magazines_read(client->magazines, &sums);
        *ret = client->stats;
        ret->num_allocs += sums.num_allocs;
        ret->num_frees += sums.num_frees;
        ret->num_blocks = ret->num_allocs - ret->num_frees;
        ret->bytes_requested += sums.bytes_requested;
        ret->bytes_in_use = sums.bytes_in_use;
        ret->peak_bytes_in_use = sums.peak_bytes_in_use;
        ret->bytes_idle = ret->bytes_reserved - ret->bytes_in_use;
}

bool client_may_park(const bfc_client *client, uint32_t partition, uint64_t n_bytes)
{
        return client->parks && partition == client->partition && n_bytes <= MAGAZINE_BLOCK_BYTES;
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

        if (!client->parks || __atomic_load_n(&client->lost, __ATOMIC_RELAXED) != 0)
                return false;
        record = blocks_park(&client->blocks, ptr);
        if (!record)
                return false;
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
        struct record *all = client->parks ? magazines_take_all(client->magazines) : NULL;

        client_clear_out(client, all);
        return all != NULL;
}
