/* Allocating and freeing on streams; see stream_alloc.h and bfcclient.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "client/stream_alloc.h"

#include <errno.h>
#include <stdlib.h>
#include <time.h>

#include "client/alloc.h"
#include "client/client.h"
#include "client/park.h"

/* ---- freeing ----------------------------------------------------------------- */

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

/* The slabs that left the pools; slab: NULL, or one more. The pools' lock is held. */
static void stream_batch_take(struct streams *s, struct stream_slab *slab, struct stream_batch *ret)
{
        stream_pools_take_leaving(s->pools, &ret->slabs);
        if (slab)
                LIST_INSERT_HEAD(&ret->slabs, slab, next);
        if (LIST_EMPTY(&ret->slabs))
                return;
        ret->number = ++s->n_batches;
        TAILQ_INSERT_TAIL(&s->batches, ret, in_all);
}

/* No lock is held. Returns whether there was anything. */
static bool stream_batch_return(bfc_client *client, struct stream_batch *batch)
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

/* Ends what the call does with the pools: no stream is named from here on. The second checks a few allocations before. */
static void streams_unlock_named(struct streams *s)
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

static void streams_look_and_unlock(bfc_client *client)
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

/* ---- allocating -------------------------------------------------------------- */

#define BLOCK_GRANULE   256u
#define LOOK_MISS       32u
#define PENDING_MS      2000 /* how long a refused request waits for work that is under way */
#define PENDING_STEP_NS 200000

/* A request, for its steps. */
struct stream_request {
        bfc_client *client;
        uint32_t partition;
        uintptr_t stream;
        uint64_t n_bytes;
        uint64_t flags;
        uint32_t wait_ms;
        bool is_permanent; /* the stream is never destroyed */
        bool is_captured;
        bool is_pooled;
};

/* Enters an allocation into the table of blocks. The pools' lock is held. */
static int enter_alloc(bfc_client *client, uint32_t partition, struct stream_alloc *alloc, uint64_t n_bytes,
                       void **ret_ptr)
{
        struct block block;
        int r;

        stream_alloc_block(alloc, &block);
        block.stream_alloc = alloc;
        block.n_requested = n_bytes;
        client_stamp(client, partition, &block);
        pthread_mutex_lock(&client->lock);
        r = blocks_add(&client->blocks, &block);
        if (r == 0)
                client_count_alloc(client, &block);
        pthread_mutex_unlock(&client->lock);
        if (r < 0) {
                stream_alloc_undo(client->streams->pools, alloc);
                return error_no_memory();
        }
        *ret_ptr = (void *)(uintptr_t)block.ptr;
        return 0;
}

/* The request names its stream. The pools' lock is held. */
static int look_at_stream(struct stream_request *q)
{
        int r = stream_pools_look_at(q->client->streams->pools, q->partition, q->stream, q->is_permanent);

        if (r < 0)
                return streams_failed(r, q->stream);
        q->is_captured = r > 0;
        return 0;
}

/* The pools' lock is held, and the stream is named. */
static int take_named(struct stream_request *q, bool looks, void **ret_ptr)
{
        struct stream_pools *pools = q->client->streams->pools;
        int r = __atomic_load_n(&q->client->lost, __ATOMIC_RELAXED);
        struct stream_alloc *alloc;

        if (r != 0)
                return client_lost(q->client, r);
        q->is_pooled = q->client->cache && q->flags == 0 && stream_pools_can(pools, q->partition, q->stream);
        if (!q->is_pooled)
                return CACHE_MISS;
        if (looks)
                stream_pools_look(pools, LOOK_MISS, LOOK_MISS, STREAM_WAIT_NONE);
        r = stream_pools_alloc(pools, q->partition, q->stream, q->is_captured, q->n_bytes, &alloc);
        if (r == 0)
                r = enter_alloc(q->client, q->partition, alloc, q->n_bytes, ret_ptr);
        return r == -ENOMEM ? error_no_memory() : r;
}

/* From what the stream has. CACHE_MISS. looks: memory that is free by now may be in this pool. */
static int take_at_once(struct stream_request *q, bool looks, void **ret_ptr)
{
        struct streams *s = q->client->streams;
        struct stream_batch batch;
        int r;

        pthread_mutex_lock(&s->lock);
        r = look_at_stream(q);
        if (r == 0)
                r = take_named(q, looks, ret_ptr);
        stream_batch_take(s, NULL, &batch);
        streams_unlock_named(s);
        stream_batch_return(q->client, &batch);
        return r;
}

/* A slab of the partition, of at least so many bytes. */
static int fetch_slab(const struct stream_request *q, uint64_t n_bytes, bool again, uint32_t wait_ms,
                      struct stream_slab **ret)
{
        struct stream_slab *slab = calloc(1, sizeof(*slab));
        struct malloc_how how = {
                .flags = q->flags, .wait_ms = wait_ms, .ret_slab = slab ? &slab->block : NULL, .again = again
        };
        int r = slab ? client_malloc(q->client, q->partition, n_bytes, &how, NULL) : error_no_memory();

        if (r < 0) {
                free(slab);
                return r;
        }
        pthread_mutex_lock(&q->client->lock);
        slab->region_bytes = regions_size(&q->client->regions, slab->block.region_id);
        pthread_mutex_unlock(&q->client->lock);
        *ret = slab;
        return 0;
}

/* How much to request: as the cache does of the daemon. */
static uint64_t slab_bytes(const struct stream_request *q)
{
        return q->is_pooled ? cache_want(q->client->cache, q->partition, q->n_bytes) : q->n_bytes;
}

static uint64_t rounded_up(uint64_t n_bytes)
{
        return n_bytes > UINT64_MAX - BLOCK_GRANULE
                       ? n_bytes
                       : (n_bytes + BLOCK_GRANULE - 1) / BLOCK_GRANULE * BLOCK_GRANULE;
}

/* False: nothing can be freed by waiting, or not in time. */
static bool wait_for_more(bfc_client *client, int64_t deadline_ms)
{
        const struct timespec step = { 0, PENDING_STEP_NS };

        do {
                if (!streams_check_pending(client) || clock_now_ms() >= deadline_ms)
                        return false;
                nanosleep(&step, NULL);
        } while (!streams_collect(client));
        return true;
}

/* After a refusal it requests no more than it needs, and then waits for work that is under way: a free that
 * waited for it would have taken as long. Then it waits for memory of others, if it may. */
static int fetch(const struct stream_request *q, struct stream_slab **ret)
{
        uint64_t want = slab_bytes(q), least = rounded_up(q->n_bytes);
        int64_t deadline_ms = clock_now_ms() + PENDING_MS;
        bool again = streams_check_pending(q->client) || q->wait_ms > 0;
        int r = fetch_slab(q, want, again || want > least, 0, ret);

        if ((r == -EDQUOT || r == -ENOMEM) && want > least)
                r = fetch_slab(q, want = least, again, 0, ret);
        while ((r == -EDQUOT || r == -ENOMEM) && !q->is_captured && wait_for_more(q->client, deadline_ms))
                r = fetch_slab(q, want, again = true, 0, ret);
        if ((r == -EDQUOT || r == -ENOMEM) && again) /* the last one, which the daemon counts */
                r = fetch_slab(q, want, false, q->wait_ms, ret);
        return r;
}

static int take_from_slab(struct stream_request *q, struct stream_slab *slab, void **ret_ptr)
{
        struct streams *s = q->client->streams;
        struct stream_alloc *alloc;
        struct stream_batch batch;
        int r, error;
        bool kept;

        pthread_mutex_lock(&s->lock);
        error = look_at_stream(q);
        if (error < 0)
                r = error;
        else if (q->is_pooled)
                r = stream_pools_alloc_with(s->pools, q->partition, q->stream, q->is_captured, q->n_bytes,
                                            slab, &alloc);
        else
                r = stream_pools_alloc_whole(s->pools, q->partition, q->stream, false, slab, &alloc);
        kept = r == 0 || r == CACHE_MISS;
        if (r == 0)
                r = enter_alloc(q->client, q->partition, alloc, q->n_bytes, ret_ptr);
        stream_batch_take(s, kept ? NULL : slab, &batch);
        streams_unlock_named(s);
        stream_batch_return(q->client, &batch);
        return r == 0 || error < 0 ? r : error_no_memory();
}

static int streams_malloc(struct stream_request *q, void **ret_ptr)
{
        struct stream_slab *slab;
        int r = take_at_once(q, false, ret_ptr);

        if (r == CACHE_MISS && q->is_pooled)
                r = take_at_once(q, true, ret_ptr);
        if (r != CACHE_MISS)
                return r;
        r = fetch(q, &slab);
        return r < 0 ? r : take_from_slab(q, slab, ret_ptr);
}

int client_malloc_async(bfc_client *client, const char *partition, size_t n_bytes, uintptr_t stream,
                        const struct malloc_how *how, void **ret_ptr)
{
        struct stream_request q = { .client = client,
                                    .stream = stream,
                                    .n_bytes = n_bytes,
                                    .flags = how->flags,
                                    .wait_ms = how->wait_ms,
                                    .is_permanent = how->is_stream_permanent };
        int r = client_check_malloc(client, partition, n_bytes, ret_ptr, &q.partition);

        if (r < 0)
                return r;
        r = streams_malloc(&q, ret_ptr);
        if (r < 0)
                return client_malloc_failed(client, q.partition, r);
        client_record(client, q.partition, *ret_ptr, n_bytes, how);
        return 0;
}

BFC_API int bfc_malloc_async_in(bfc_client *client, const char *partition, size_t n_bytes, uintptr_t stream,
                                void **ret_ptr)
{
        return client_malloc_async(client, partition, n_bytes, stream, &(struct malloc_how){ .flags = 0 },
                                   ret_ptr);
}

BFC_API int bfc_malloc_async(bfc_client *client, size_t n_bytes, uintptr_t stream, void **ret_ptr)
{
        return bfc_malloc_async_in(client, NULL, n_bytes, stream, ret_ptr);
}

/* ---- streams ------------------------------------------------------------------ */

static int streams_record(bfc_client *client, const void *ptr, uintptr_t stream, bool is_permanent)
{
        struct stream_alloc *alloc;
        const struct block *found;
        uint32_t partition;
        int r;

        pthread_mutex_lock(&client->lock);
        found = blocks_find(&client->blocks, ptr);
        alloc = found ? found->stream_alloc : NULL;
        pthread_mutex_unlock(&client->lock);
        if (!found)
                return streams_no_such_block(ptr);
        if (!alloc)
                return error_set(-EINVAL, "%p belongs to no stream: it was allocated with bfc_malloc()", ptr);
        partition = stream_alloc_partition(alloc);
        if (!stream_pools_can(client->streams->pools, partition, stream))
                return error_set(-EINVAL, "the stream is the per-thread default stream (2), and only "
                                          "its own thread can check its work: use another stream");
        r = stream_pools_look_at(client->streams->pools, partition, stream, is_permanent);
        if (r >= 0)
                r = stream_alloc_record(alloc, stream);
        return r < 0 ? streams_failed(r, stream) : 0;
}

static int record_stream(bfc_client *client, const void *ptr, uintptr_t stream, bool is_permanent)
{
        int r = client_check(client);

        if (r < 0)
                return r;
        pthread_mutex_lock(&client->streams->lock);
        r = streams_record(client, ptr, stream, is_permanent);
        streams_unlock_named(client->streams);
        return r;
}

BFC_API int bfc_record_stream(bfc_client *client, void *ptr, uintptr_t stream)
{
        return record_stream(client, ptr, stream, false);
}

int client_record_permanent_stream(bfc_client *client, const void *ptr, uintptr_t stream)
{
        return record_stream(client, ptr, stream, true);
}

BFC_API int bfc_end_stream(bfc_client *client, uintptr_t stream)
{
        int r = client_check(client), error;

        if (r < 0)
                return r;
        pthread_mutex_lock(&client->streams->lock);
        for (uint32_t i = 0; i < client->hello->hello->n_partitions; i++) {
                error = stream_pools_end_stream(client->streams->pools, i, stream);
                if (error < 0 && error != -ENOENT && r == 0)
                        r = error;
        }
        streams_look_and_unlock(client);
        if (r == -EBUSY)
                return error_set(r, "the stream is being captured: end it after the capture");
        return r < 0 ? streams_failed(r, stream) : 0;
}

/* ---- statistics ------------------------------------------------------------------ */

BFC_API int bfc_stats_stream(bfc_client *client, const char *partition, uintptr_t stream,
                             struct bfc_stream_stats *ret)
{
        struct bfc_stream_stats known = { 0 };
        struct stream_stats stats = { 0 };
        uint32_t index = 0;
        int r = client_check(client);

        if (r == 0 && (!ret || ret->struct_size < sizeof(known)))
                r = error_set(-EINVAL, "bfc_stats_stream: set struct_size to the size of the structure, %zu",
                              sizeof(known));
        if (r == 0)
                r = client_partition_index(client, partition, &index);
        if (r < 0)
                return r;
        pthread_mutex_lock(&client->streams->lock);
        stream_pools_stats(client->streams->pools, index, stream, &stats); /* unknown: zeros */
        pthread_mutex_unlock(&client->streams->lock);
        known = (struct bfc_stream_stats){
                .num_allocs = stats.num_allocs,
                .num_frees = stats.num_frees,
                .bytes_in_use = stats.bytes_in_use,
                .peak_bytes_in_use = stats.peak_bytes_in_use,
                .bytes_reserved = stats.bytes_reserved,
                .peak_bytes_reserved = stats.peak_bytes_reserved,
                .bytes_pending = stats.bytes_pending,
                .largest_alloc_size = stats.largest_alloc_size,
        };
        struct_fill(ret, ret->struct_size, &known, sizeof(known));
        return 0;
}
