/* The stash; see stash.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "client/stash.h"

#include <string.h>

#include "client/client.h"

bool client_needs_wipe(const bfc_client *client, uint32_t partition)
{
        return client->regions.inherits && !client->places[partition].is_cuda &&
               fork_guard_has_forked(&client->fork) && !__atomic_load_n(&client->lost, __ATOMIC_RELAXED);
}

void client_wipe(const bfc_client *client, uint32_t partition, const struct block *block)
{
        if (client_needs_wipe(client, partition) && !block->is_parked)
                memset((void *)(uintptr_t)block->ptr, 0, block->n_bytes);
}

int stash_init(bfc_client *client, uint64_t idle_bytes)
{
        bool stashes = client->cache && !device_view_has_work(&client->places[client->partition]);
        int r = magazines_new(stashes ? idle_bytes / 8 : 0, &client->stash.magazines);

        if (r == 0 && magazines_max_block(client->stash.magazines) > 0)
                client->stash.state = STASH_ON;
        return r;
}

/* Into the cache. The lock is held. */
static void unstash_into_cache(bfc_client *client, struct record *list)
{
        struct record *below;
        struct block block;

        for (; list; list = below) {
                below = list->below;
                blocks_take_stashed(&client->blocks, list, &block);
                cache_dealloc(&block);
        }
}

uint64_t stash_spill(bfc_client *client, struct record *list)
{
        uint64_t excess;

        pthread_mutex_lock(&client->lock);
        unstash_into_cache(client, list);
        excess = cache_excess(client->cache, client->partition);
        pthread_mutex_unlock(&client->lock);
        return excess;
}

bool client_drain_stash(bfc_client *client)
{
        struct record *all = magazines_take_all(client->stash.magazines);

        unstash_into_cache(client, all);
        return all != NULL;
}

/* If the free was sent, the daemon may have taken the memory back before it went away. */
void client_restore_block(bfc_client *client, const struct block *gone)
{
        struct block copy = *gone;
        const struct block *block = &copy;
        void *ptr;

        copy.parkable = NULL; /* the session has ended */
        pthread_mutex_lock(&client->lock);
        if (regions_resolve(&client->regions, block->region_id, block->offset, block->n_bytes, &ptr) == 0 &&
            ptr == block->ptr && blocks_add(&client->blocks, block) == 0) {
                client_count_alloc(client, block);
                client->partitions[block->partition].stats.num_allocs--;
                client->partitions[block->partition].stats.num_frees--;
                if (!block->slab && !block->stream_alloc)
                        client_count_restored(client, block->partition, block->n_bytes);
        }
        pthread_mutex_unlock(&client->lock);
}
