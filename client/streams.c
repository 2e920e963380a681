/* Allocation on streams; see bfcclient.h. What is whose when is stream_pool.c's business.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The pools have a lock of their own, under which a driver may be asked for an event; the
 * client's lock is taken inside of it, never the other way round. Neither is held while the
 * daemon is asked, or while slabs go back.
 *
 * A block of a stream is in the client's table like any other, so copies, figures and
 * bfc_free() find it; there it has its life, which only this file reads. A life's memory
 * comes from slabs that the partition's cache cut, or the daemon gave. Without a cache each
 * block is the daemon's own.
 *
 * Slabs that the pools have let go of are given back by whichever thread looked. */
#include <errno.h>
#include <stdlib.h>
#include <time.h>

#include "client/client.h"
#include "client/clock.h"
#include "client/error.h"
#include "client/stream_pool.h"

#define BLOCK_GRANULE   256u
#define LOOK_LIVES      4u /* on each free */
#define LOOK_POOLS      1u
#define LOOK_MISS       32u
#define PENDING_MS      2000 /* how long a refused request waits for work that is under way */
#define PENDING_STEP_NS 200000

#define WATCH_MIN_MS 2
#define WATCH_MAX_MS 64

/* What left the pools, on its way back. */
struct gift {
        TAILQ_ENTRY(gift) in_all; /* where there is anything in it */
        struct stream_slabs slabs;
        uint64_t number;
};

struct streams {
        pthread_mutex_t lock;
        struct stream_pools *pools;
        TAILQ_HEAD(, gift) gifts; /* the first one first */
        uint64_t n_gifts;         /* so far */
        pthread_cond_t given;
        int watch_ms; /* in so many the client's thread looks again; 0: it sleeps until it is woken */
};

/* What a request has to do with, as it goes from step to step. */
struct stream_request {
        bfc_client *client;
        uint32_t partition;
        uintptr_t stream;
        uint64_t n_bytes;
        bool is_captured;
        bool is_pooled;
};

/* ---- the client's part ------------------------------------------------------ */

/* No stream that is known is being captured. */
static int finish_region(void *userdata, uint64_t region_id)
{
        bfc_client *client = userdata;
        struct device_range *range;
        int r;

        pthread_mutex_lock(&client->lock);
        range = regions_range(&client->regions, region_id);
        pthread_mutex_unlock(&client->lock);
        r = range ? device_range_finish(range) : -ENOENT; /* no block is there without it */
        return r == -ENODEV || r == -EIO ? 0 : r;
}

int streams_new(bfc_client *client)
{
        struct stream_pools_options options = { .places = client->places,
                                                .n_partitions = (uint32_t)client->hello->hello->n_partitions,
                                                .finish = finish_region,
                                                .userdata = client };
        struct streams *s = calloc(1, sizeof(*s));

        if (!s || stream_pools_new(&options, &s->pools) < 0) {
                free(s);
                return error_set(-ENOMEM, "this process is out of memory");
        }
        for (uint32_t i = 0; i < options.n_partitions; i++)
                if (client_page_streams(client, i))
                        stream_pools_show(s->pools, i, client_page_streams(client, i));
        pthread_mutex_init(&s->lock, NULL);
        pthread_cond_init(&s->given, NULL);
        TAILQ_INIT(&s->gifts);
        client->streams = s;
        return 0;
}

void streams_free(bfc_client *client)
{
        struct streams *s = client->streams;

        if (!s)
                return;
        stream_pools_free(s->pools);
        pthread_cond_destroy(&s->given);
        pthread_mutex_destroy(&s->lock);
        free(s);
        client->streams = NULL;
}

void streams_hold(bfc_client *client)
{
        pthread_mutex_lock(&client->streams->lock);
}

void streams_release(bfc_client *client)
{
        pthread_mutex_unlock(&client->streams->lock);
}

/* What left the pools; slab: and that one, or NULL. The lock is held. */
static void take_gift(struct streams *s, struct stream_slab *slab, struct gift *ret)
{
        stream_pools_take_leaving(s->pools, &ret->slabs);
        if (slab)
                LIST_INSERT_HEAD(&ret->slabs, slab, next);
        if (LIST_EMPTY(&ret->slabs))
                return;
        ret->number = ++s->n_gifts;
        TAILQ_INSERT_TAIL(&s->gifts, ret, in_all);
}

/* No lock is held. Returns whether there was anything. */
static bool give_back(bfc_client *client, struct gift *gift)
{
        struct streams *s = client->streams;
        struct stream_slab *slab;

        if (LIST_EMPTY(&gift->slabs))
                return false;
        while ((slab = LIST_FIRST(&gift->slabs))) {
                LIST_REMOVE(slab, next);
                client_return(client, &slab->block);
                free(slab);
        }
        pthread_mutex_lock(&s->lock);
        TAILQ_REMOVE(&s->gifts, gift, in_all);
        pthread_cond_broadcast(&s->given);
        pthread_mutex_unlock(&s->lock);
        return true;
}

/* What other threads give back has arrived. Returns whether there was anything. */
static bool wait_for_gifts(struct streams *s)
{
        const struct gift *first;
        uint64_t upto;
        bool any;

        pthread_mutex_lock(&s->lock);
        upto = s->n_gifts;
        any = !TAILQ_EMPTY(&s->gifts);
        while ((first = TAILQ_FIRST(&s->gifts)) && first->number <= upto)
                pthread_cond_wait(&s->given, &s->lock);
        pthread_mutex_unlock(&s->lock);
        return any;
}

/* Looks at so many, and unlocks. */
static bool look_and_unlock(bfc_client *client, size_t max_lives, size_t max_pools, bool may_wait)
{
        struct streams *s = client->streams;
        struct gift gift;
        bool wake;

        stream_pools_look(s->pools, max_lives, max_pools, may_wait);
        take_gift(s, NULL, &gift);
        wake = !client->cache && client->events && s->watch_ms == 0 && stream_pools_is_pending(s->pools);
        if (wake)
                s->watch_ms = WATCH_MIN_MS;
        pthread_mutex_unlock(&s->lock);
        if (wake)
                events_wake(client->events);
        return give_back(client, &gift);
}

bool streams_keep(bfc_client *client)
{
        bool ret;

        pthread_mutex_lock(&client->streams->lock);
        ret = stream_pools_wait(client->streams->pools);
        pthread_mutex_unlock(&client->streams->lock);
        return ret;
}

int streams_watch(bfc_client *client)
{
        struct streams *s = client->streams;
        struct gift gift;
        int ms = -1;

        if (client->cache)
                return -1;
        pthread_mutex_lock(&s->lock);
        stream_pools_look(s->pools, SIZE_MAX, SIZE_MAX, true);
        take_gift(s, NULL, &gift);
        if (!stream_pools_is_pending(s->pools))
                s->watch_ms = 0;
        else if (s->watch_ms == 0 || !LIST_EMPTY(&gift.slabs))
                ms = s->watch_ms = WATCH_MIN_MS;
        else
                ms = s->watch_ms = s->watch_ms < WATCH_MAX_MS ? s->watch_ms * 2 : WATCH_MAX_MS;
        pthread_mutex_unlock(&s->lock);
        give_back(client, &gift);
        return ms;
}

int streams_check(bfc_client *client, const char **ret_why)
{
        int r;

        pthread_mutex_lock(&client->streams->lock);
        r = stream_pools_check(client->streams->pools, ret_why);
        pthread_mutex_unlock(&client->streams->lock);
        return r;
}

bool streams_collect(bfc_client *client)
{
        bool any;

        pthread_mutex_lock(&client->streams->lock);
        any = look_and_unlock(client, SIZE_MAX, SIZE_MAX, true);
        return wait_for_gifts(client->streams) || any;
}

bool streams_are_captured(bfc_client *client, uint32_t partition)
{
        bool ret;

        pthread_mutex_lock(&client->streams->lock);
        ret = stream_pools_are_captured(client->streams->pools, partition);
        pthread_mutex_unlock(&client->streams->lock);
        return ret;
}

void streams_free_done(bfc_client *client, struct stream_life *life)
{
        pthread_mutex_lock(&client->streams->lock);
        stream_life_free_done(client->streams->pools, life);
        look_and_unlock(client, LOOK_LIVES, LOOK_POOLS, false);
}

uint64_t streams_block_id(const struct block *block)
{
        return stream_life_block_id(block->life);
}

uint64_t streams_offset(const struct block *block)
{
        return stream_life_offset(block->life);
}

void streams_reset_peaks(bfc_client *client)
{
        pthread_mutex_lock(&client->streams->lock);
        stream_pools_reset_peaks(client->streams->pools);
        pthread_mutex_unlock(&client->streams->lock);
}

static int no_such_stream(int error, uintptr_t stream)
{
        if (error == -EINVAL)
                return error_set(error, "0x%llx is not a stream of the partition's device",
                                 (unsigned long long)stream);
        if (error == -ENOMEM || error == -EAGAIN)
                return error_set(-ENOMEM, "an event could not be recorded in the stream");
        if (error == -EIO)
                return error_set(error, "this process's CUDA context is broken");
        return error_set(error, "the device is lost or not visible to this process");
}

/* ---- taking ------------------------------------------------------------------ */

/* Writes a life down as a block that is used. The pools' lock is held. */
static int keep(bfc_client *client, uint32_t partition, struct stream_life *life, uint64_t n_bytes,
                void **ret_ptr)
{
        struct block block;
        int r;

        stream_life_block(life, &block);
        block.life = life;
        block.n_requested = n_bytes;
        client_stamp(client, partition, &block);
        pthread_mutex_lock(&client->lock);
        r = blocks_add(&client->blocks, &block);
        if (r == 0)
                client_count_alloc(client, &block);
        pthread_mutex_unlock(&client->lock);
        if (r < 0) {
                stream_life_undo(client->streams->pools, life);
                return error_set(-ENOMEM, "this process is out of memory");
        }
        *ret_ptr = (void *)(uintptr_t)block.ptr;
        return 0;
}

/* From what the stream has. CACHE_MISS. */
static int take_at_once(const struct stream_request *q, void **ret_ptr)
{
        struct streams *s = q->client->streams;
        struct stream_life *life;
        int r = CACHE_MISS;

        for (int i = 0; i < 2 && r == CACHE_MISS; i++) {
                struct gift gift;

                pthread_mutex_lock(&s->lock);
                if (i > 0) /* what is free by now may be free in this very pool */
                        stream_pools_look(s->pools, LOOK_MISS, LOOK_MISS, false);
                r = stream_pools_alloc(s->pools, q->partition, q->stream, q->is_captured, q->n_bytes, &life);
                if (r == 0)
                        r = keep(q->client, q->partition, life, q->n_bytes, ret_ptr);
                take_gift(s, NULL, &gift);
                pthread_mutex_unlock(&s->lock);
                give_back(q->client, &gift);
        }
        return r == -ENOMEM ? error_set(r, "this process is out of memory") : r;
}

/* A slab of the partition, of at least so many bytes. */
static int fetch_slab(const struct stream_request *q, uint64_t n_bytes, bool again, struct stream_slab **ret)
{
        struct stream_slab *slab = calloc(1, sizeof(*slab));
        struct malloc_how how = { .ret_slab = slab ? &slab->block : NULL, .again = again };
        int r = slab ? client_malloc(q->client, q->partition, n_bytes, &how, NULL)
                     : error_set(-ENOMEM, "this process is out of memory");

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

/* How much to ask for: as the partition's cache does of the daemon. */
static uint64_t slab_bytes(const struct stream_request *q)
{
        return q->is_pooled ? cache_want_whole(q->client->cache, q->partition, q->n_bytes) : q->n_bytes;
}

static uint64_t rounded_up(uint64_t n_bytes)
{
        return n_bytes > UINT64_MAX - BLOCK_GRANULE
                       ? n_bytes
                       : (n_bytes + BLOCK_GRANULE - 1) / BLOCK_GRANULE * BLOCK_GRANULE;
}

/* False: nothing more will come by waiting, or not in time. */
static bool wait_for_more(bfc_client *client, int64_t deadline_ms)
{
        const struct timespec step = { 0, PENDING_STEP_NS };

        do {
                if (!streams_keep(client) || clock_now_ms() >= deadline_ms)
                        return false;
                nanosleep(&step, NULL);
        } while (!streams_collect(client));
        return true;
}

/* Refused, it asks for no more than it needs, and then waits for work that is under way: a free
 * that waited for it would have taken as long. */
static int fetch(const struct stream_request *q, struct stream_slab **ret)
{
        uint64_t want = slab_bytes(q), least = rounded_up(q->n_bytes);
        int64_t deadline_ms = clock_now_ms() + PENDING_MS;
        bool waits = streams_keep(q->client);
        int r = fetch_slab(q, want, waits || want > least, ret);

        if ((r == -EDQUOT || r == -ENOMEM) && want > least)
                r = fetch_slab(q, want = least, waits, ret);
        while ((r == -EDQUOT || r == -ENOMEM) && wait_for_more(q->client, deadline_ms))
                r = fetch_slab(q, want, waits = true, ret);
        if ((r == -EDQUOT || r == -ENOMEM) && waits) /* the last: the daemon counts it */
                r = fetch_slab(q, want, false, ret);
        return r;
}

static int take_from_slab(const struct stream_request *q, struct stream_slab *slab, void **ret_ptr)
{
        struct streams *s = q->client->streams;
        struct stream_life *life;
        struct gift gift;
        bool kept;
        int r;

        pthread_mutex_lock(&s->lock);
        r = q->is_pooled ? stream_pools_alloc_with(s->pools, q->partition, q->stream, q->is_captured,
                                                   q->n_bytes, slab, &life)
                         : stream_pools_alloc_whole(s->pools, q->partition, q->stream, false, slab, &life);
        kept = r == 0 || r == CACHE_MISS;
        if (r == 0)
                r = keep(q->client, q->partition, life, q->n_bytes, ret_ptr);
        take_gift(s, kept ? NULL : slab, &gift);
        pthread_mutex_unlock(&s->lock);
        give_back(q->client, &gift);
        return r == 0 ? 0 : error_set(-ENOMEM, "this process is out of memory");
}

static int streams_malloc(struct stream_request *q, void **ret_ptr)
{
        struct streams *s = q->client->streams;
        struct stream_slab *slab;
        int r;

        pthread_mutex_lock(&s->lock);
        r = stream_pools_look_at(s->pools, q->partition, q->stream);
        pthread_mutex_unlock(&s->lock);
        if (r < 0)
                return no_such_stream(r, q->stream);
        q->is_captured = r > 0;
        q->is_pooled = q->client->cache && stream_pools_can(s->pools, q->partition, q->stream);
        r = __atomic_load_n(&q->client->lost, __ATOMIC_RELAXED);
        if (r != 0)
                return client_lost(q->client, r);
        r = q->is_pooled ? take_at_once(q, ret_ptr) : CACHE_MISS;
        if (r != CACHE_MISS)
                return r;
        r = fetch(q, &slab);
        return r < 0 ? r : take_from_slab(q, slab, ret_ptr);
}

BFC_API int bfc_malloc_async_in(bfc_client *client, const char *partition, size_t n_bytes, uintptr_t stream,
                                void **ret_ptr)
{
        struct stream_request q = { .client = client, .stream = stream, .n_bytes = n_bytes };
        int r = client_check_malloc(client, partition, n_bytes, ret_ptr, &q.partition);

        if (r < 0)
                return r;
        r = streams_malloc(&q, ret_ptr);
        if (r < 0)
                return client_malloc_failed(client, q.partition, r);
        recorder_given(client->recorder, *ret_ptr, n_bytes);
        return 0;
}

BFC_API int bfc_malloc_async(bfc_client *client, size_t n_bytes, uintptr_t stream, void **ret_ptr)
{
        return bfc_malloc_async_in(client, NULL, n_bytes, stream, ret_ptr);
}

/* ---- giving back ------------------------------------------------------------- */

static int no_such_block(const void *ptr)
{
        return error_set(-EINVAL, "%p is not a block of this client: never allocated, or already freed", ptr);
}

/* A block of bfc_malloc()'s gets a life, which has one thing to do: wait. */
static int make_life(bfc_client *client, const struct block *block, uint32_t partition,
                     struct stream_slab **ret_slab, struct stream_life **ret)
{
        struct stream_slab *slab = calloc(1, sizeof(*slab));
        int r = slab ? 0 : -ENOMEM;

        if (r == 0)
                slab->block = *block;
        if (r == 0 && !block->slab) {
                pthread_mutex_lock(&client->lock);
                r = blocks_add(&client->slabs, block);
                pthread_mutex_unlock(&client->lock);
        }
        if (r == 0)
                r = stream_pools_alloc_whole(client->streams->pools, partition, 0, true, slab, ret);
        if (r < 0) {
                free(slab);
                return error_set(-ENOMEM, "this process is out of memory");
        }
        *ret_slab = slab;
        return 0;
}

/* The life of the block that leaves, from now on the pools'. stream: NULL: whatever streams it was used by. */
static int end_life(bfc_client *client, const struct block *block, uint32_t partition,
                    const uintptr_t *stream)
{
        struct stream_pools *pools = client->streams->pools;
        struct stream_life *life = block->life;
        struct stream_slab *slab = NULL;
        struct block gone;
        int r = life ? 0 : make_life(client, block, partition, &slab, &life);

        if (r == 0)
                r = stream ? stream_life_free(pools, life, *stream) : stream_life_put_aside(pools, life);
        if (r < 0 && slab) { /* back to how it was */
                stream_life_drop(pools, life);
                free(slab);
        }
        if (r < 0 && !block->life && !block->slab) {
                pthread_mutex_lock(&client->lock);
                blocks_take(&client->slabs, block->ptr, &gone);
                pthread_mutex_unlock(&client->lock);
        }
        return r;
}

int streams_put_aside(bfc_client *client, const struct block *block, uint32_t partition)
{
        struct block gone;
        int r;

        pthread_mutex_lock(&client->streams->lock);
        r = end_life(client, block, partition, NULL);
        pthread_mutex_lock(&client->lock);
        if (r == 0 && blocks_take(&client->blocks, block->ptr, &gone) == 0)
                client_count_free(client, &gone);
        pthread_mutex_unlock(&client->lock);
        look_and_unlock(client, 0, 0, false);
        return r;
}

/* On a stream: -EBUSY where that one, or any that is known, is being captured and that counts. */
static int free_on(bfc_client *client, const struct block *block, uint32_t partition, uintptr_t stream,
                   bool in_captures)
{
        struct stream_pools *pools = client->streams->pools;
        int r = stream_pools_look_at(pools, partition, stream);

        if (!in_captures && (r > 0 || stream_pools_are_captured(pools, partition)))
                return error_set(-EBUSY, "a stream is being captured, and its graph may use the block");
        if (r != -EINVAL)
                r = end_life(client, block, partition, &stream);
        return r < 0 ? no_such_stream(r, stream) : 0;
}

static int streams_free_block(bfc_client *client, const void *ptr, uintptr_t stream, bool in_captures)
{
        struct block block;
        uint32_t partition = 0;
        bool is_shared;
        int r;

        pthread_mutex_lock(&client->lock);
        is_shared = shared_has(client, ptr);
        r = is_shared ? -EINVAL : blocks_leave(&client->blocks, ptr, &block);
        if (r == 0)
                partition = regions_partition(&client->regions, block.region_id);
        pthread_mutex_unlock(&client->lock);
        if (is_shared)
                return error_set(r, "%p is shared: release it with bfc_detach()", ptr);
        if (r < 0)
                return no_such_block(ptr);
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
        struct recorder_life life;
        int r = client_check(client);

        if (r < 0)
                return r;
        if (!ptr)
                return 0;
        recorder_freeing(client->recorder, ptr, &life);
        pthread_mutex_lock(&client->streams->lock);
        r = streams_free_block(client, ptr, stream, in_captures);
        look_and_unlock(client, LOOK_LIVES, LOOK_POOLS, false);
        if (r < 0)
                recorder_kept(client->recorder, &life);
        else
                recorder_freed(client->recorder, &life);
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

static int streams_record(bfc_client *client, const void *ptr, uintptr_t stream)
{
        struct stream_life *life = NULL;
        const struct block *found;
        uint32_t partition;
        int r;

        pthread_mutex_lock(&client->lock);
        found = blocks_find(&client->blocks, ptr);
        if (found)
                life = found->life;
        pthread_mutex_unlock(&client->lock);
        if (!found)
                return no_such_block(ptr);
        if (!life)
                return error_set(-EINVAL, "%p belongs to no stream: it was allocated with bfc_malloc()", ptr);
        partition = stream_life_partition(life);
        if (!stream_pools_can(client->streams->pools, partition, stream))
                return error_set(-EINVAL, "the stream is the per-thread default stream (2), and only "
                                          "its own thread can check its work: use another stream");
        r = stream_pools_look_at(client->streams->pools, partition, stream);
        if (r >= 0)
                r = stream_life_record(client->streams->pools, life, stream);
        return r < 0 ? no_such_stream(r, stream) : 0;
}

BFC_API int bfc_record_stream(bfc_client *client, void *ptr, uintptr_t stream)
{
        int r = client_check(client);

        if (r < 0)
                return r;
        pthread_mutex_lock(&client->streams->lock);
        r = streams_record(client, ptr, stream);
        pthread_mutex_unlock(&client->streams->lock);
        return r;
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
        look_and_unlock(client, LOOK_LIVES, LOOK_POOLS, false);
        if (r == -EBUSY)
                return error_set(r, "the stream is being captured: end it after the capture");
        return r < 0 ? no_such_stream(r, stream) : 0;
}

/* ---- figures ------------------------------------------------------------------ */

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
        fill_struct(ret, ret->struct_size, &known, sizeof(known));
        return 0;
}
