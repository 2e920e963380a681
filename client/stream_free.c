/* Freeing on streams; see stream_free.h and bfcclient.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "client/stream_free.h"

#include <errno.h>
#include <stdlib.h>

#include "client/client.h"
#include "client/alloc.h"
#include "client/park.h"
#include "client/streams.h"

#define LOOK_ALLOCS  4u /* on each free */
#define LOOK_POOLS   1u
#define WATCH_MIN_MS 2
#define WATCH_MAX_MS 64

/* No stream that is known is being captured, and a slab is in the region. No lock is held. */
static int finish_region(bfc_client *client, uint64_t region_id)
{
        struct device_range *range;

        pthread_mutex_lock(&client->lock);
        range = regions_range(&client->regions, region_id);
        pthread_mutex_unlock(&client->lock);
        return range ? device_range_finish(range) : -ENOENT; /* no slab is there without it */
}

void stream_batch_take(struct streams *s, struct stream_slab *slab, struct stream_batch *ret)
{
        stream_pools_take_leaving(s->pools, &ret->slabs);
        if (slab)
                LIST_INSERT_HEAD(&ret->slabs, slab, next);
        if (LIST_EMPTY(&ret->slabs))
                return;
        ret->number = ++s->n_batches;
        TAILQ_INSERT_TAIL(&s->batches, ret, in_all);
}

bool stream_batch_return(bfc_client *client, struct stream_batch *batch)
{
        struct streams *s = client->streams;
        struct stream_slab *slab;

        if (LIST_EMPTY(&batch->slabs))
                return false;
        while ((slab = LIST_FIRST(&batch->slabs))) {
                LIST_REMOVE(slab, next);
                client_return_slab(client, &slab->block);
                free(slab);
        }
        pthread_mutex_lock(&s->lock);
        TAILQ_REMOVE(&s->batches, batch, in_all);
        pthread_cond_broadcast(&s->changed);
        pthread_mutex_unlock(&s->lock);
        return true;
}

/* Waits until other threads have returned their batches. Returns whether there was one. */
static bool wait_for_batches(struct streams *s)
{
        const struct stream_batch *first;
        uint64_t upto;
        bool any;

        pthread_mutex_lock(&s->lock);
        upto = s->n_batches;
        any = !TAILQ_EMPTY(&s->batches);
        while ((first = TAILQ_FIRST(&s->batches)) && first->number <= upto)
                condition_wait(&s->changed, &s->lock, -1);
        pthread_mutex_unlock(&s->lock);
        return any;
}

void streams_unlock_named(struct streams *s)
{
        stream_pools_unname(s->pools);
        pthread_mutex_unlock(&s->lock);
}

/* Checks all, and waits for all work that this asks for. The lock is held, but not during that wait, so no
 * stream may be named. If another thread waits, this one only checks. */
static void look_and_wait(bfc_client *client, enum stream_wait wait)
{
        struct streams *s = client->streams;
        uint64_t number, region_id;
        int r;

        stream_pools_look(s->pools, SIZE_MAX, SIZE_MAX, s->is_waiting ? STREAM_WAIT_NONE : wait);
        if (s->is_waiting || !stream_pools_begin_wait(s->pools, &number))
                return;
        s->is_waiting = true;
        for (uint32_t i = 0; i < client->hello->hello->n_partitions; i++) {
                if (!stream_pools_is_wanted(s->pools, i, &region_id))
                        continue;
                pthread_mutex_unlock(&s->lock);
                r = finish_region(client, region_id);
                pthread_mutex_lock(&s->lock);
                stream_pools_end_wait(s->pools, i, number, r == 0 || r == -ENODEV || r == -EIO);
        }
        s->is_waiting = false;
        pthread_cond_broadcast(&s->changed);
        stream_pools_look(s->pools, SIZE_MAX, SIZE_MAX, STREAM_WAIT_NONE);
}

/* Returns what left the pools, and unlocks. */
static bool return_and_unlock(bfc_client *client)
{
        struct streams *s = client->streams;
        struct stream_batch batch;
        bool wake;

        stream_batch_take(s, NULL, &batch);
        wake = !client->cache && client->events && s->watch_ms == 0 && stream_pools_is_pending(s->pools);
        if (wake)
                s->watch_ms = WATCH_MIN_MS;
        streams_unlock_named(s);
        if (wake)
                events_wake(client->events);
        return stream_batch_return(client, &batch);
}

void streams_look_and_unlock(bfc_client *client)
{
        stream_pools_look(client->streams->pools, LOOK_ALLOCS, LOOK_POOLS, STREAM_WAIT_NONE);
        return_and_unlock(client);
}

int streams_watch(bfc_client *client)
{
        struct streams *s = client->streams;
        struct stream_batch batch;
        int ms = -1;

        if (client->cache)
                return -1;
        pthread_mutex_lock(&s->lock);
        look_and_wait(client, STREAM_WAIT_ASIDE);
        stream_batch_take(s, NULL, &batch);
        if (!stream_pools_is_pending(s->pools))
                s->watch_ms = 0;
        else if (s->watch_ms == 0 || !LIST_EMPTY(&batch.slabs))
                ms = s->watch_ms = WATCH_MIN_MS;
        else
                ms = s->watch_ms = s->watch_ms < WATCH_MAX_MS ? s->watch_ms * 2 : WATCH_MAX_MS;
        pthread_mutex_unlock(&s->lock);
        stream_batch_return(client, &batch);
        return ms;
}

bool streams_collect(bfc_client *client)
{
        struct streams *s = client->streams;
        bool any;

        pthread_mutex_lock(&s->lock);
        while (s->is_waiting) /* what is freed since then is not covered */
                condition_wait(&s->changed, &s->lock, -1);
        look_and_wait(client, STREAM_WAIT_ALL);
        any = return_and_unlock(client);
        return wait_for_batches(s) || any;
}

void streams_free_done(bfc_client *client, struct stream_alloc *alloc)
{
        pthread_mutex_lock(&client->streams->lock);
        stream_alloc_free_done(client->streams->pools, alloc);
        streams_look_and_unlock(client);
}

/* A block of bfc_malloc() becomes an allocation that waits. */
static int make_alloc(bfc_client *client, const struct block *block, uint32_t partition,
                      struct stream_slab **ret_slab, struct stream_alloc **ret)
{
        struct stream_slab *slab = calloc(1, sizeof(*slab));
        int r = slab ? 0 : -ENOMEM;

        if (r == 0)
                slab->block = *block;
        if (r == 0 && !block->slab) {
                slab->block.is_slab = true;
                pthread_mutex_lock(&client->lock);
                r = blocks_add(&client->blocks, &slab->block);
                pthread_mutex_unlock(&client->lock);
        }
        if (r == 0)
                r = stream_pools_alloc_whole(client->streams->pools, partition, 0, true, slab, ret);
        if (r < 0) {
                free(slab);
                return error_no_memory();
        }
        *ret_slab = slab;
        return 0;
}

/* The pools own the allocation of the block that leaves. stream: NULL: any stream may have used it. */
static int end_alloc(bfc_client *client, const struct block *block, uint32_t partition,
                     const uintptr_t *stream)
{
        struct stream_pools *pools = client->streams->pools;
        struct stream_alloc *alloc = block->stream_alloc;
        struct stream_slab *slab = NULL;
        struct block gone;
        int r = alloc ? 0 : make_alloc(client, block, partition, &slab, &alloc);

        if (r == 0)
                r = stream ? stream_alloc_free(pools, alloc, *stream) : stream_alloc_put_aside(pools, alloc);
        if (r < 0 && slab) { /* undo */
                stream_alloc_drop(pools, alloc);
                free(slab);
        }
        if (r < 0 && !block->stream_alloc && !block->slab) {
                pthread_mutex_lock(&client->lock);
                blocks_take_slab(&client->blocks, block->ptr, &gone);
                pthread_mutex_unlock(&client->lock);
        }
        return r;
}

int streams_put_aside(bfc_client *client, const struct block *block, uint32_t partition)
{
        struct block gone;
        int r;

        pthread_mutex_lock(&client->streams->lock);
        r = end_alloc(client, block, partition, NULL);
        pthread_mutex_lock(&client->lock);
        if (r == 0 && blocks_take(&client->blocks, block->ptr, &gone) == 0)
                client_count_free(client, &gone);
        pthread_mutex_unlock(&client->lock);
        return_and_unlock(client);
        return r;
}

/* -EBUSY: that stream, or another that is known, is being captured, and a framework's graph may use the block.
 * Frameworks do not destroy their streams. */
static int free_on(bfc_client *client, const struct block *block, uint32_t partition, uintptr_t stream,
                   bool in_captures)
{
        struct stream_pools *pools = client->streams->pools;
        int r = stream_pools_look_at(pools, partition, stream, !in_captures);

        if (!in_captures && (r > 0 || stream_pools_check_captured(pools, partition)))
                return error_set(-EBUSY, "a stream is being captured, and its graph may use the block");
        if (r != -EINVAL && r != -ENOBUFS)
                r = end_alloc(client, block, partition, &stream);
        return r < 0 ? streams_failed(r, stream) : 0;
}

/* -EAGAIN: the block is parked or woken now; this cannot be waited for here. */
static int streams_free_block(bfc_client *client, const void *ptr, uintptr_t stream, bool in_captures)
{
        struct block block;
        uint32_t partition = 0;
        bool is_shared, is_busy;
        int r;

        pthread_mutex_lock(&client->lock);
        is_shared = shared_has(client, ptr);
        r = is_shared ? -EINVAL : blocks_leave(&client->blocks, ptr, &block);
        is_busy = r == -ENOENT && client_find_busy(client, ptr);
        if (r == 0)
                partition = regions_partition(&client->regions, block.region_id);
        pthread_mutex_unlock(&client->lock);
        if (is_shared)
                return error_set(r, "%p is shared: release it with bfc_detach()", ptr);
        if (is_busy)
                return -EAGAIN;
        if (r < 0)
                return streams_no_such_block(ptr);
        r = __atomic_load_n(&client->lost, __ATOMIC_RELAXED);
        if (r != 0)
                r = client_lost(client, r);
        else
                r = free_on(client, &block, partition, stream, in_captures);
        if (r == 0) /* the pools' lock is held: no other request has the memory yet */
                client_wipe(client, partition, &block);
        pthread_mutex_lock(&client->lock);
        if (r < 0)
                blocks_stay(&client->blocks, ptr);
        else if (blocks_take(&client->blocks, ptr, &block) == 0)
                client_count_free(client, &block);
        pthread_mutex_unlock(&client->lock);
        return r;
}

static int free_async(bfc_client *client, void *ptr, uintptr_t stream, bool in_captures)
{
        struct recorder_lifetime lifetime;
        int r = client_check(client);

        if (r < 0)
                return r;
        if (!ptr)
                return 0;
        recorder_freeing(client->recorder, ptr, &lifetime);
        for (;;) {
                pthread_mutex_lock(&client->streams->lock);
                r = streams_free_block(client, ptr, stream, in_captures);
                streams_look_and_unlock(client);
                if (r != -EAGAIN)
                        break;
                pthread_mutex_lock(&client->lock);
                (void)client_wait_parkable(client, ptr);
                pthread_mutex_unlock(&client->lock);
        }
        if (r < 0)
                recorder_kept(client->recorder, &lifetime);
        else
                recorder_freed(client->recorder, &lifetime);
        return r;
}

BFC_API int bfc_free_async(bfc_client *client, void *ptr, uintptr_t stream)
{
        return free_async(client, ptr, stream, true);
}

int client_free_async_unless_captured(bfc_client *client, void *ptr, uintptr_t stream)
{
        return free_async(client, ptr, stream, false);
}
