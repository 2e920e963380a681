/* Allocation on streams; see stream_malloc.h and bfcclient.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "client/stream_malloc.h"

#include <errno.h>
#include <stdlib.h>
#include <time.h>

#include "client/alloc.h"
#include "client/client.h"
#include "client/stream_free.h"
#include "client/streams.h"

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

/* ---- the client's side ------------------------------------------------------ */

/* ---- allocating ------------------------------------------------------------------ */

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

/* ---- freeing ------------------------------------------------------------- */

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
