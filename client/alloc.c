/* Allocating and freeing; see alloc.h and bfcclient.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A small host block that is freed waits in a magazine (magazine.h) for the next request of its size. A request that
 * finds none there goes to the cache, and then to the daemon. A block that the daemon grants becomes a slab of the cache,
 * from which the request is cut. bytes_reserved is the sum over the slabs and over the blocks that are the daemon's
 * own. */
#include "client/alloc.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "client/park.h"
#include "client/session.h"
#include "client/stream_alloc.h"
#include "client/streams.h"

/* ---- the stash ------------------------------------------------------------------
 *
 * What bfc_free() rarely needs is not inlined: it would save registers for it in each call. */

/* Forked children may have the memory of blocks mapped (BFC_INHERIT): client_wipe() zeroes it. */
static bool client_needs_wipe(const bfc_client *client, uint32_t partition)
{
        return client->regions.inherits && !client->places[partition].is_cuda &&
               fork_guard_has_forked(&client->fork) && !__atomic_load_n(&client->lost, __ATOMIC_RELAXED);
}

void __attribute__((noinline))
client_wipe(const bfc_client *client, uint32_t partition, const struct block *block)
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

/* Moves what the magazines had no room for into the cache. Returns the idle bytes beyond the bound of the cache. */
static uint64_t __attribute__((noinline)) stash_spill(bfc_client *client, struct record *list)
{
        uint64_t excess;

        pthread_mutex_lock(&client->lock);
        unstash_into_cache(client, list);
        excess = cache_excess(client->cache, client->partition);
        pthread_mutex_unlock(&client->lock);
        return excess;
}

/* Moves all stashed blocks into the cache, also while other threads are busy. False: there was none. The lock
 * is held. */
static bool client_drain_stash(bfc_client *client)
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

/* ---- reclaiming idle memory --------------------------------------------------
 *
 * Slabs leave the cache under the client's lock and are freed at the daemon without it, so other threads go
 * on.
 *
 * Then slabs in use shrink: the daemon is asked to split a slab where whole extents without a block begin
 * and end. The parts between are idle slabs, and are freed as others are. One Split is under way at a time:
 * the inventory names it, because a daemon that was killed may or may not have done it. A part between two
 * blocks takes two Splits. If max_blocks does not allow both, the first is refused, too. */

#define SHRINK_PLACES       128u /* at a time */
#define TRIM_MAX_RANGES     64u
#define RELEASE_MS          10000
#define RELEASE_STEP_NS     200000
#define RELEASE_MAX_STEP_NS 20000000

int client_free_idle(bfc_client *client, uint32_t partition, const struct cache_range *in,
                     uint64_t want_bytes, uint64_t *ret_bytes)
{
        uint64_t block_ids[CALL_MAX_AT_ONCE], sum = 0, n_bytes, epoch;
        size_t n;
        int r = 0;

        do {
                pthread_mutex_lock(&client->lock);
                if (!in)
                        (void)client_drain_stash(client);
                n = cache_take_idle(client->cache, partition, in, want_bytes - sum, block_ids,
                                    CALL_MAX_AT_ONCE, &n_bytes);
                client_count_released(client, partition, n_bytes);
                epoch = client->epoch;
                pthread_mutex_unlock(&client->lock);
                sum += n_bytes;
                r = client_free_blocks(client, block_ids, n, epoch);
        } while (r == 0 && n == CALL_MAX_AT_ONCE && sum < want_bytes);
        *ret_bytes = sum;
        return r;
}

/* ---- slabs in use ------------------------------------------------------------ */

static bool find_extent(void *userdata, uint64_t region_id, uint64_t offset, uint64_t *ret_begin,
                        uint64_t *ret_end)
{
        const bfc_client *client = userdata;
        struct region_origin origin;

        if (regions_origin(&client->regions, region_id, offset, &origin) < 0)
                return false;
        *ret_begin = origin.offset;
        *ret_end = origin.offset + origin.n_bytes;
        return true;
}

/* -ENOENT: no slab has the place inside any more. */
static int split_begin(bfc_client *client, uint32_t partition, const struct cache_place *at, Bfcd__Split *ret)
{
        int r;

        pthread_mutex_lock(&client->lock);
        r = cache_split_begin(client->cache, partition, at, &ret->block_id, &ret->n_bytes);
        if (r == 0)
                client->splitting = (struct pending_split){ ret->block_id, ret->n_bytes };
        pthread_mutex_unlock(&client->lock);
        return r;
}

/* Asked again by whichever daemon there is, it is answered as before. */
static int split_at(bfc_client *client, uint32_t partition, const struct cache_place *at)
{
        Bfcd__Request request = BFCD__REQUEST__INIT;
        Bfcd__Split body = BFCD__SPLIT__INIT;
        Bfcd__Reply *reply = NULL;
        uint64_t epoch;
        int r = split_begin(client, partition, at, &body);

        if (r < 0)
                return r == -ENOENT ? 0 : r;
        request.body_case = BFCD__REQUEST__BODY_SPLIT;
        request.split = &body;
        body.n_more = at->needs_next;
        r = client_request(client, NULL, &request, BFCD__REPLY__BODY_SPLIT, &reply, &epoch);
        pthread_mutex_lock(&client->lock);
        client->splitting = (struct pending_split){ 0, 0 };
        if (r == 0)
                cache_split_commit(client->cache, partition, at, reply->split->block_id);
        pthread_mutex_unlock(&client->lock);
        if (r == 0)
                bfcd__reply__free_unpacked(reply, NULL);
        return r;
}

/* Refused two Splits, the daemon may do one elsewhere. */
static int split_all(bfc_client *client, uint32_t partition, const struct cache_place *places, size_t n,
                     bool *ret_refused)
{
        int r = 0;

        *ret_refused = false;
        for (size_t i = 0; r == 0 && i < n; i++) {
                bool is_two = places[i].needs_next;

                if (!is_two || !*ret_refused)
                        r = split_at(client, partition, &places[i]);
                if (is_two && r == -EDQUOT) {
                        *ret_refused = true;
                        r = 0;
                }
                if (is_two && *ret_refused)
                        i++;
        }
        return r;
}

static int shrink(bfc_client *client, uint32_t partition, const struct cache_range *in, uint64_t want_bytes,
                  bool *ret_more)
{
        struct cache_place places[SHRINK_PLACES];
        bool is_refused;
        size_t n;
        int r;

        pthread_mutex_lock(&client->split_lock);
        pthread_mutex_lock(&client->lock);
        client_drain_stash(client);
        n = cache_find_splits(client->cache, partition, in, find_extent, client, want_bytes, places,
                              SHRINK_PLACES);
        pthread_mutex_unlock(&client->lock);
        r = split_all(client, partition, places, n, &is_refused);
        pthread_mutex_lock(&client->lock);
        if (n > 0)
                cache_split_end(client->cache, partition);
        pthread_mutex_unlock(&client->lock);
        pthread_mutex_unlock(&client->split_lock);
        *ret_more = r == 0 && !is_refused && n + 2 > SHRINK_PLACES;
        /* What was refused stays as it is. */
        return client_has_ended(r) || r == -EPROTO ? r : 0;
}

int client_free_unused(bfc_client *client, uint32_t partition, const struct cache_range *in,
                       uint64_t want_bytes, uint64_t *ret_bytes)
{
        uint64_t n_bytes;
        bool more = true;
        int r = client_free_idle(client, partition, in, want_bytes, ret_bytes);

        while (r == 0 && more && *ret_bytes < want_bytes) {
                r = shrink(client, partition, in, want_bytes - *ret_bytes, &more);
                if (r == 0)
                        r = client_free_idle(client, partition, in, want_bytes - *ret_bytes, &n_bytes);
                if (r == 0)
                        *ret_bytes += n_bytes;
        }
        return r;
}

/* ---- for the daemon ---------------------------------------------------------- */

static bool trim_is_valid(const bfc_client *client, const Bfcd__Trim *trim)
{
        if (trim->partition >= client->hello->hello->n_partitions || trim->n_ranges == 0 ||
            trim->n_ranges > TRIM_MAX_RANGES)
                return false;
        for (size_t i = 0; i < trim->n_ranges; i++)
                if (trim->ranges[i]->n_bytes > UINT64_MAX - trim->ranges[i]->offset)
                        return false;
        return true;
}

static int trim_ranges(bfc_client *client, const Bfcd__Trim *trim)
{
        uint64_t sum = 0, n_bytes;
        int r = 0;

        streams_collect(client);
        pthread_mutex_lock(&client->lock);
        (void)client_drain_stash(client);
        pthread_mutex_unlock(&client->lock);
        for (size_t i = 0; r == 0 && client->cache && i < trim->n_ranges && sum < trim->n_bytes; i++) {
                const struct cache_range in = { trim->ranges[i]->region_id, trim->ranges[i]->offset,
                                                trim->ranges[i]->n_bytes };

                r = client_free_unused(client, trim->partition, &in, trim->n_bytes - sum, &n_bytes);
                sum += n_bytes;
        }
        return client_has_ended(r) || r == -EPROTO ? -ECONNRESET : 0;
}

int client_on_trim(bfc_client *client, const Bfcd__Trim *trim)
{
        if (!trim_is_valid(client, trim))
                return client_end(client, -EPROTO, "the daemon sent a Trim with invalid ranges");
        return trim_ranges(client, trim);
}

/* ---- for the program --------------------------------------------------------- */

/* Releases n_bytes of the tenant's extents without a block to the device. *ret_bytes: what
 * is still on its way. */
static int release_extents(bfc_client *client, uint32_t partition, uint64_t n_bytes, uint64_t *ret_bytes)
{
        Bfcd__Request request = BFCD__REQUEST__INIT;
        Bfcd__Release body = BFCD__RELEASE__INIT;
        Bfcd__Reply *reply = NULL;
        uint64_t epoch;
        int r;

        body.partition = partition;
        body.n_bytes = n_bytes;
        request.body_case = BFCD__REQUEST__BODY_RELEASE;
        request.release = &body;
        r = client_request(client, NULL, &request, BFCD__REPLY__BODY_RELEASED, &reply, &epoch);
        if (r < 0)
                return r;
        *ret_bytes = reply->released->bytes_returning;
        bfcd__reply__free_unpacked(reply, NULL);
        return 0;
}

/* Until the extents are back, or RELEASE_MS are over. Without a thread of the client's own, this one has
 * to unmap what the daemon takes back. */
static int wait_for_release(bfc_client *client, uint32_t partition, uint64_t n_bytes, int64_t until_ms)
{
        struct timespec step = { 0, RELEASE_STEP_NS };
        uint64_t returning = 0;
        int r = release_extents(client, partition, n_bytes, &returning);

        while (r == 0 && returning > 0 && clock_now_ms() < until_ms) {
                if (events_fd(client->events) >= 0)
                        r = bfc_poll(client);
                if (r < 0 && r != -EBUSY)
                        return r;
                nanosleep(&step, NULL);
                /* A quarter of what was waited so far, so that the last step adds little. */
                if (step.tv_nsec < RELEASE_MAX_STEP_NS)
                        step.tv_nsec += step.tv_nsec / 4;
                r = release_extents(client, partition, 0, &returning);
        }
        return r;
}

BFC_API int bfc_trim(bfc_client *client, size_t n_bytes)
{
        uint64_t left = n_bytes, given_back;
        int64_t until_ms;
        int r = client_check(client);

        if (r < 0)
                return r;
        streams_collect(client);
        for (uint32_t i = 0; r == 0 && client->cache && i < client->hello->hello->n_partitions; i++) {
                r = client_free_unused(client, i, NULL, left, &given_back);
                left -= given_back < left ? given_back : left;
        }
        until_ms = clock_now_ms() + RELEASE_MS;
        for (uint32_t i = 0; r == 0 && n_bytes > 0 && i < client->hello->hello->n_partitions; i++)
                r = wait_for_release(client, i, n_bytes, until_ms);
        return r;
}

/* ---- allocating -------------------------------------------------------------- */

#define BLOCK_GRANULE 256u

/* The cache may serve it from a slab, so that the daemon does not know the block. */
static bool malloc_can_be_cut(const struct malloc_how *how)
{
        return how->flags == 0 && !how->tag;
}

/* Such a block can be stashed when it is freed. */
static bool client_can_stash(const bfc_client *client, uint32_t partition, uint64_t n_bytes)
{
        return partition == client->partition && n_bytes <= magazines_max_block(client->stash.magazines);
}

/* A stashed block for this request. False: there is none. The lock is not held. */
static inline __attribute__((always_inline)) bool client_unstash(bfc_client *client, uint32_t partition,
                                                                 uint64_t n_bytes, void **ret_ptr)
{
        struct record *record;

        if (partition != client->partition || n_bytes > MAGAZINE_HUGE_BYTES ||
            __atomic_load_n(&client->stash.state, __ATOMIC_RELAXED) == STASH_NONE)
                return false;
        record = magazines_get(client->stash.magazines, n_bytes);
        if (!record)
                return false;
        *ret_ptr = (void *)(uintptr_t)record->block.ptr;
        return true;
}

/* Enters a new block into the table. The lock is held. */
static int enter_block(bfc_client *client, struct block *block, uint64_t n_requested,
                       const struct malloc_how *how, void **ret_ptr)
{
        int r;

        /* A stream's pool has it from here on: the program gets parts of it. */
        if (how->ret_slab) {
                block->is_slab = true;
                r = block->slab ? 0 : blocks_add(&client->blocks, block);
                if (r == 0)
                        *how->ret_slab = *block;
                return r == -EEXIST ? -EPROTO : r;
        }

        /* Everything that can fail comes before the counts. A place that is in the table already was given
         * twice. */
        block->n_requested = n_requested;
        block->parkable = (how->flags & BFC_PARKABLE) != 0 ? parkable_new(how->tag) : NULL;
        if ((how->flags & BFC_PARKABLE) != 0 && !block->parkable)
                return -ENOMEM;
        r = blocks_add(&client->blocks, block);
        if (r < 0) {
                free(block->parkable);
                return r == -EEXIST ? -EPROTO : r;
        }
        client_count_alloc(client, block);
        *ret_ptr = (void *)(uintptr_t)block->ptr;
        return 0;
}

/* A block from what the cache has. The lock is held. CACHE_MISS. */
static int cut_block(bfc_client *client, uint32_t partition, uint64_t n_bytes, const struct malloc_how *how,
                     void **ret_ptr)
{
        struct block block;
        int r = cache_alloc(client->cache, partition, n_bytes, &block);

        /* Stashed blocks count as used in the cache, so they can hide a place that is large enough. */
        if (r == CACHE_MISS && client_drain_stash(client))
                r = cache_alloc(client->cache, partition, n_bytes, &block);
        if (r != 0)
                return r;
        block.may_stash = !how->ret_slab && client_can_stash(client, partition, n_bytes);
        if (!how->ret_slab)
                client_stamp(client, partition, &block);
        r = enter_block(client, &block, n_bytes, how, ret_ptr);
        if (r < 0)
                cache_dealloc(&block);
        return r;
}

/* A block that the daemon granted: becomes a slab and is cut, or is used as it is if the cache cannot take
 * it. The lock is held. *kept: the daemon's block is in a table, also if this fails. -ECANCELED:
 * client_resolve()'s, with *ret_why. */
static int take_granted(bfc_client *client, uint32_t partition, const Bfcd__Block *got, uint64_t n_bytes,
                        const struct malloc_how *how, bool *kept, int *ret_why, void **ret_ptr)
{
        struct block block = { .block_id = got->block_id,
                               .region_id = got->region_id,
                               .offset = got->offset,
                               .n_bytes = got->n_bytes,
                               .partition = (uint16_t)partition };
        void *ptr;
        int r;

        /* The extents came before the reply: they are mapped now, at the latest. */
        r = client_resolve(client, got, ret_why, &ptr);
        if (r < 0)
                return r;
        block.ptr = ptr;

        /* The cache takes it as a slab, which may join free space beside it. */
        if (client->cache && malloc_can_be_cut(how)) {
                struct cache_grant given = {
                        got->block_id, got->region_id, regions_size(&client->regions, got->region_id),
                        got->offset,   got->n_bytes,   ptr
                };

                r = cache_add(client->cache, partition, &given);
                if (r == -EEXIST)
                        return -EPROTO; /* it gave that place before */
                *kept = r == 0;
        }
        if (*kept) {
                /* It was requested smaller than the request, to fit beside free space here, and the daemon
                 * placed it elsewhere: the slab goes back. */
                r = cut_block(client, partition, n_bytes, how, ret_ptr);
                if (r == CACHE_MISS && cache_take_mismatched(client->cache, partition, got->block_id) < 0)
                        r = -ENOMEM;
                *kept = r != CACHE_MISS;
                if (*kept)
                        client_count_reserved(client, partition, got->n_bytes);
                return r;
        }

        /* The block is used as it is. */
        if (got->n_bytes < n_bytes)
                return CACHE_MISS;
        if (!how->ret_slab && !how->tag)
                client_stamp(client, partition, &block);
        r = enter_block(client, &block, n_bytes, how, ret_ptr);
        *kept = r == 0;
        if (*kept) {
                client_count_reserved(client, partition, got->n_bytes);
                client_page_whole(client, partition, (int64_t)got->n_bytes);
        }
        return r;
}

int client_malloc_failed(bfc_client *client, uint32_t partition, int error)
{
        pthread_mutex_lock(&client->lock);
        client->partitions[partition].stats.num_failures++;
        pthread_mutex_unlock(&client->lock);
        return error;
}

/* A part of the same call that does not wait. */
static struct malloc_how without_wait(const struct malloc_how *how, bool again)
{
        struct malloc_how at_once = *how;

        at_once.wait_ms = 0;
        at_once.again = again;
        return at_once;
}

/* Requests a block, and takes n_bytes of it. *ret_stale: the answer is of an earlier epoch, and dropped. */
static int fetch_once(bfc_client *client, uint32_t partition, Bfcd__Request *request, uint64_t n_bytes,
                      const struct malloc_how *how, bool *ret_stale, void **ret_ptr)
{
        Bfcd__Reply *reply = NULL;
        bool kept = false;
        uint64_t epoch;
        int r, why = 0;

        *ret_stale = false;
        r = client_request(client, how->call, request, BFCD__REPLY__BODY_BLOCK, &reply, &epoch);
        if (r < 0)
                return r;

        /* The daemon may have restarted between the reply and this lock. Then the block was not listed in the
         * resume, and the new daemon has freed it. */
        pthread_mutex_lock(&client->lock);
        *ret_stale = epoch != client->epoch;
        if (!*ret_stale)
                r = reply->block->n_bytes < request->malloc->n_bytes
                            ? -EPROTO
                            : take_granted(client, partition, reply->block, n_bytes, how, &kept, &why,
                                           ret_ptr);
        pthread_mutex_unlock(&client->lock);

        /* A block that this process could not use is returned. After any other error the daemon is not trusted:
         * it stays. */
        if ((r == -ENOMEM || r == CACHE_MISS || why < 0) && !kept)
                client_free_block(client, reply->block->block_id, epoch);
        if (why < 0)
                r = client_unmappable(client, partition, why);
        else if (r == -ENOMEM)
                r = error_no_memory();
        else if (r < 0)
                r = error_set(r, "the daemon returned a block of %llu bytes at an invalid place",
                              (unsigned long long)reply->block->n_bytes);
        bfcd__reply__free_unpacked(reply, NULL);
        return r;
}

/* The extents that come while such a block is asked for keep their fds: any thread may read them. */
static void note_shareable(bfc_client *client, int n)
{
        pthread_mutex_lock(&client->lock);
        client->regions.n_shareable += n;
        pthread_mutex_unlock(&client->lock);
}

/* Requests ask_bytes, and takes n_bytes of them. CACHE_MISS: they were fewer, and are not beside free space
 * here; they were freed. */
static int fetch(bfc_client *client, uint32_t partition, uint64_t ask_bytes, uint64_t n_bytes,
                 const struct malloc_how *how, void **ret_ptr)
{
        Bfcd__Malloc body = BFCD__MALLOC__INIT;
        Bfcd__Request request = REQUEST(MALLOC, malloc, &body);
        bool is_stale;
        int r;

        body.partition = partition;
        body.n_bytes = ask_bytes;
        body.n_needed = n_bytes != ask_bytes ? n_bytes : 0;
        body.flags = how->flags & BFC_ONE_EXTENT; /* BFC_WHOLE is between this client and its cache */
        if ((how->flags & BFC_PARKABLE) != 0)
                body.flags |= BFCD__MALLOC_FLAG__MALLOC_FLAG_PARKABLE;
        if (how->again)
                body.flags |= BFCD__MALLOC_FLAG__MALLOC_FLAG_AGAIN;
        body.wait_ms = how->wait_ms;
        body.tag = (char *)(uintptr_t)how->tag;
        if ((how->flags & BFC_SHAREABLE) != 0)
                note_shareable(client, 1);
        do
                r = fetch_once(client, partition, &request, n_bytes, how, &is_stale, ret_ptr);
        while (is_stale);
        if ((how->flags & BFC_SHAREABLE) != 0)
                note_shareable(client, -1);
        return r;
}

static int try_cut(bfc_client *client, uint32_t partition, uint64_t n_bytes, const struct malloc_how *how,
                   void **ret_ptr)
{
        int r;

        pthread_mutex_lock(&client->lock);
        r = cut_block(client, partition, n_bytes, how, ret_ptr);
        pthread_mutex_unlock(&client->lock);
        if (r < 0)
                return error_set(r, r == -ENOMEM ? "this process is out of memory"
                                                 : "the daemon returned the same place twice");
        return r;
}

/* Frees unused extents before the slabs exceed the peak of the bytes in use by more than a small part. Frees
 * all: fewer would leave gaps in which no request fits, and the next miss would free again. CACHE_MISS:
 * the caller requests want_bytes. */
static int free_surplus(bfc_client *client, uint32_t partition, uint64_t n_bytes, uint64_t want_bytes,
                        const struct malloc_how *how, void **ret_ptr)
{
        uint64_t n_freed;
        bool has_surplus;
        int r;

        pthread_mutex_lock(&client->lock);
        has_surplus = cache_has_surplus(client->cache, partition, n_bytes, want_bytes);
        pthread_mutex_unlock(&client->lock);
        if (!has_surplus)
                return CACHE_MISS;
        r = client_free_unused(client, partition, NULL, UINT64_MAX, &n_freed);
        if (r < 0 || n_freed == 0)
                return r < 0 ? r : CACHE_MISS;
        return try_cut(client, partition, n_bytes, how, ret_ptr);
}

/* Frees what is unused here, and requests no more than is needed. This request may wait. The daemon counts it
 * if it is refused. It did not count the first one if it was told that another follows. */
static int retry_refused(bfc_client *client, uint32_t partition, int error, bool again, uint64_t n_bytes,
                         const struct malloc_how *how, void **ret_ptr)
{
        const struct malloc_how at_once = without_wait(how, true);
        uint64_t n_freed = 0, want = n_bytes;
        int r;

        /* All that is idle here is freed. If nothing was, the refusal stands, unless the daemon was told that
         * another request follows: then it counts that one. */
        streams_collect(client);
        r = client_free_unused(client, partition, NULL, UINT64_MAX, &n_freed);
        if (r < 0)
                return r;
        if (n_freed == 0 && !again)
                return error;

        if (malloc_can_be_cut(how)) {
                /* Another thread may have freed something meanwhile. */
                r = try_cut(client, partition, n_bytes, how, ret_ptr);
                if (r != CACHE_MISS)
                        return r;

                /* Only what is missing beside free space here, so that a limit can be used to its last byte. */
                pthread_mutex_lock(&client->lock);
                want = cache_want_least(client->cache, partition, n_bytes);
                pthread_mutex_unlock(&client->lock);
        }
        if (want < n_bytes) {
                r = fetch(client, partition, want, n_bytes, &at_once, ret_ptr);
                if (r != CACHE_MISS && r != -EDQUOT && r != -ENOMEM)
                        return r;
        }

        /* That was granted elsewhere, or refused. The whole size is requested now, and this request may wait. */
        return fetch(client, partition, n_bytes, n_bytes, how, ret_ptr);
}

/* A request that waits takes its place in the queue at once: if it were refused first, later ones would
 * overtake it. Only if pending work here keeps freed memory is that checked before. */
static int malloc_uncached(bfc_client *client, uint32_t partition, uint64_t n_bytes,
                           const struct malloc_how *how, void **ret_ptr)
{
        bool keeps = streams_check_pending(client), is_last = how->wait_ms > 0 && !keeps;
        struct malloc_how at_once = without_wait(how, how->again || keeps);
        int r = fetch(client, partition, n_bytes, n_bytes, is_last ? how : &at_once, ret_ptr);

        if (is_last || (r != -EDQUOT && r != -ENOMEM) || how->call->is_final)
                return r;
        if (!streams_collect(client) && how->wait_ms == 0 && !keeps)
                return r;
        return fetch(client, partition, n_bytes, n_bytes, how, ret_ptr);
}

/* From the cache, or else from the daemon. */
int client_malloc(bfc_client *client, uint32_t partition, uint64_t n_bytes, const struct malloc_how *how,
                  void **ret_ptr)
{
        struct call_interrupt interrupt = { .cancel_fd = how->cancel_fd > 0 ? how->cancel_fd : -1 };
        struct client_call call = { .interrupt = how->wait_ms > 0 ? &interrupt : NULL };
        struct malloc_how with_call = *how, at_once;
        uint64_t want = n_bytes;
        int r = __atomic_load_n(&client->lost, __ATOMIC_RELAXED);

        with_call.call = &call;
        how = &with_call;
        if (r != 0)
                return client_lost(client, r);
        if (!client->cache)
                return malloc_uncached(client, partition, n_bytes, how, ret_ptr);

        /* The cache may have the memory. Only the daemon knows where extents end, so a block with flags is
         * never cut. */
        if (malloc_can_be_cut(how)) {
                if (!how->ret_slab && !how->is_not_stashed &&
                    client_unstash(client, partition, n_bytes, ret_ptr))
                        return 0;
                want = cache_want(client->cache, partition, n_bytes);
                r = try_cut(client, partition, n_bytes, how, ret_ptr);
                if (r == CACHE_MISS)
                        r = free_surplus(client, partition, n_bytes, want, how, ret_ptr);
                if (r != CACHE_MISS)
                        return r;
        }

        /* The first request does not wait, since idle memory here is freed before. The daemon does not count
         * its refusal if another one follows: that may wait, be for less, or come after what is idle here was
         * freed. */
        at_once = without_wait(how, how->again || how->wait_ms > 0 || want >= n_bytes + BLOCK_GRANULE);
        if (!at_once.again) {
                pthread_mutex_lock(&client->lock);
                at_once.again = client_bytes_reserved(client) > 0;
                pthread_mutex_unlock(&client->lock);
        }
        r = fetch(client, partition, want, n_bytes, &at_once, ret_ptr);
        if ((r == -EDQUOT || r == -ENOMEM) && !how->call->is_final)
                r = retry_refused(client, partition, r, at_once.again, n_bytes, how, ret_ptr);
        return r;
}

int client_check_malloc(bfc_client *client, const char *partition, size_t n_bytes, void **ret_ptr,
                        uint32_t *ret_index)
{
        int r = client_check(client);

        if (r < 0)
                return r;
        if (!ret_ptr)
                return error_set(-EINVAL, "bfc_malloc: ret_ptr is NULL");
        if (n_bytes == 0)
                return error_set(-EINVAL, "the size is 0 bytes: request at least 1 byte");
        r = client_partition_index(client, partition, ret_index);
        return r < 0 ? r : client_check_device(client, *ret_index);
}

void client_record(const bfc_client *client, uint32_t partition, const void *ptr, uint64_t n_bytes,
                   const struct malloc_how *how)
{
        if (client->recorder)
                recorder_given(client->recorder, ptr,
                               &(struct recorder_block){
                                       .n_bytes = n_bytes,
                                       .partition = client->hello->hello->partitions[partition]->name,
                                       .tag = how->tag,
                                       .flags = how->flags });
}

static int malloc_as(bfc_client *client, const char *partition, size_t n_bytes, const struct malloc_how *how,
                     void **ret_ptr)
{
        uint32_t index = 0;
        int r = client_check_malloc(client, partition, n_bytes, ret_ptr, &index);

        if (r < 0)
                return r;
        if ((how->flags & ~(BFC_ONE_EXTENT | BFC_WHOLE | BFC_PARKABLE | BFC_SHAREABLE)) != 0)
                return error_set(-EINVAL,
                                 "unknown flags 0x%llx: this library supports BFC_ONE_EXTENT, BFC_WHOLE, "
                                 "BFC_PARKABLE and BFC_SHAREABLE",
                                 (unsigned long long)how->flags);
        if ((how->flags & BFC_SHAREABLE) != 0 && (how->flags & BFC_ONE_EXTENT) == 0)
                return error_set(-EINVAL, "BFC_SHAREABLE needs BFC_ONE_EXTENT");
        r = client_malloc(client, index, n_bytes, how, ret_ptr);
        if (r < 0)
                return client_malloc_failed(client, index, r);
        client_record(client, index, *ret_ptr, n_bytes, how);
        return 0;
}

BFC_API int bfc_malloc_with(bfc_client *client, size_t n_bytes, const struct bfc_malloc_options *options,
                            void **ret_ptr)
{
        const char *partition = NULL;
        struct malloc_how how;
        int r = malloc_how_read(options, &partition, &how);

        return r < 0 ? r : malloc_as(client, partition, n_bytes, &how, ret_ptr);
}

BFC_API int bfc_malloc_flags(bfc_client *client, const char *partition, size_t n_bytes, uint64_t flags,
                             void **ret_ptr)
{
        struct malloc_how how = { .flags = flags };

        return malloc_as(client, partition, n_bytes, &how, ret_ptr);
}

/* The common case in one step, without what another call may need: a stashed block. */
static bool malloc_fast(bfc_client *client, size_t n_bytes, void **ret_ptr)
{
        if (!client || !fork_guard_is_own(&client->fork) || !ret_ptr || n_bytes == 0 ||
            __atomic_load_n(&client->lost, __ATOMIC_RELAXED) != 0 ||
            !client_unstash(client, client->partition, n_bytes, ret_ptr))
                return false;
        if (client->recorder)
                client_record(client, client->partition, *ret_ptr, n_bytes, &(struct malloc_how){ 0 });
        return true;
}

BFC_API int bfc_malloc_in(bfc_client *client, const char *partition, size_t n_bytes, void **ret_ptr)
{
        return bfc_malloc_flags(client, partition, n_bytes, 0, ret_ptr);
}

BFC_API int bfc_malloc(bfc_client *client, size_t n_bytes, void **ret_ptr)
{
        static const struct malloc_how slow = { .is_not_stashed = true };

        return malloc_fast(client, n_bytes, ret_ptr) ? 0 : malloc_as(client, NULL, n_bytes, &slow, ret_ptr);
}

/* ---- freeing -----------------------------------------------------------------
 *
 * While a free waits for the device, its block is marked as leaving: a second free does not find it, and its
 * extents cannot be retired. It leaves the table and the statistics before the daemon is told, which may grant the
 * same place to another thread at once. So what is counted is never more than what the daemon has granted.
 *
 * A block can be stashed if its memory can be another block's at once: cut by the cache, at most 32 MiB, and
 * of a device that works only for this process's own code. Only blocks of the client's own partition are
 * stashed, so there is one set of magazines. */

/* Frees a block by stashing it. False: it cannot be stashed; *ret_excess is set if so many idle bytes exceed
 * the cache's bound. The lock is not held. */
static inline __attribute__((always_inline)) bool client_stash(bfc_client *client, const void *ptr,
                                                               uint64_t *ret_excess)
{
        struct record *record, *full;

        if (__atomic_load_n(&client->stash.state, __ATOMIC_RELAXED) != STASH_ON ||
            __atomic_load_n(&client->lost, __ATOMIC_RELAXED) != 0)
                return false;
        record = blocks_stash(&client->blocks, ptr);
        if (!record)
                return false;
        if (__builtin_expect(client->regions.inherits, 0))
                client_wipe(client, client->partition, &record->block);
        full = magazines_put(client->stash.magazines, record);
        if (full)
                *ret_excess = stash_spill(client, full);
        return true;
}

/* Frees the block in the cache. The lock is held. Returns how many idle bytes exceed the bound. */
static uint64_t uncut(bfc_client *client, const struct block *block)
{
        cache_dealloc(block);
        return cache_excess(client->cache, block->partition);
}

/* The common case in one step: a cached block of memory on which no device works. False: it is no such block,
 * or it must be zeroed, which takes too long for a lock. */
static bool uncut_fast(bfc_client *client, const void *ptr, uint32_t *ret_partition, uint64_t *ret_excess)
{
        const struct block *found;
        struct block block;
        bool done;

        pthread_mutex_lock(&client->lock);
        found = blocks_find(&client->blocks, ptr);
        done = found && found->slab && !device_view_has_work(&client->places[found->partition]) &&
               !client_needs_wipe(client, found->partition) &&
               !__atomic_load_n(&client->lost, __ATOMIC_RELAXED);
        if (done)
                done = blocks_take(&client->blocks, ptr, &block) == 0;
        if (done) {
                client_count_free(client, &block);
                *ret_partition = block.partition;
                *ret_excess = uncut(client, &block);
        }
        pthread_mutex_unlock(&client->lock);
        return done;
}

/* What a free does while it would have to wait. */
enum wait { WAIT, WAIT_OR_PUT_ASIDE, NO_WAIT };
enum { PUT_ASIDE = 1 };

/* Frees of one call. All work with their blocks was queued before the call, so it waits once: for each region where
 * regions differ in the GPUs that have access, else for each partition. */
struct free_call {
        bool has_waited;
        uint32_t partition;
        uint64_t region_id;
};

static bool has_waited(const bfc_client *client, const struct free_call *call, const struct block *block)
{
        return call && call->has_waited && call->partition == block->partition &&
               (call->region_id == block->region_id ||
                client->places[block->partition].share == DEVICE_SHARE_CUDA_IPC);
}

/* Waits for the work, and then takes the block out of the table. PUT_ASIDE: the wait is not possible now, and
 * the pools of streams have the block. call: may be NULL. */
static int take_out(bfc_client *client, const void *ptr, enum wait wait, struct free_call *call,
                    struct block *ret, uint64_t *ret_epoch)
{
        struct device_range *range = NULL;
        uint32_t partition = 0;
        int r;

        pthread_mutex_lock(&client->lock);
        /* Another thread may publish it now, which is an error of the program. */
        do
                r = shared_has(client, ptr) ? -EINVAL : blocks_leave(&client->blocks, ptr, ret);
        while (r == -ENOENT && client_wait_parkable(client, ptr));
        if (r == 0)
                range = regions_range(&client->regions, ret->region_id);
        if (r == 0)
                partition = regions_partition(&client->regions, ret->region_id);
        pthread_mutex_unlock(&client->lock);
        if (r < 0)
                return error_set(-EINVAL,
                                 "%p is not a block of this client: never allocated, or already freed", ptr);
        if (wait != NO_WAIT && !has_waited(client, call, ret))
                r = client_finish(client, partition, range);
        if (r == 0 && call)
                *call = (struct free_call){ true, partition, ret->region_id };
        if (r == -EBUSY && wait == WAIT_OR_PUT_ASIDE && streams_put_aside(client, ret, partition) == 0)
                return PUT_ASIDE;
        pthread_mutex_lock(&client->lock);
        if (r < 0)
                blocks_stay(&client->blocks, ptr);
        else if (blocks_take(&client->blocks, ptr, ret) == 0) {
                client_count_free(client, ret);
                if (ret->is_parked)
                        regions_unkeep(&client->regions, ret->region_id);
        }
        *ret_epoch = client->epoch;
        pthread_mutex_unlock(&client->lock);
        if (r == 0)
                client_wipe(client, partition, ret);
        return r;
}

/* A block of the daemon is no longer counted before the daemon is told, as it leaves the table before. */
static void count_leaving(bfc_client *client, const struct block *block)
{
        pthread_mutex_lock(&client->lock);
        client_count_released(client, block->partition, block->n_bytes);
        client_page_whole(client, block->partition, -(int64_t)block->n_bytes);
        pthread_mutex_unlock(&client->lock);
}

/* A block that no work uses goes to the cache, or is freed at the daemon. It left the table in this epoch. */
static int put_back(bfc_client *client, const struct block *block, uint64_t epoch, uint64_t *ret_excess)
{
        int r = block->slab || block->stream_alloc ? __atomic_load_n(&client->lost, __ATOMIC_RELAXED) : 0;

        if (r != 0)
                return client_lost(client, r);
        if (block->stream_alloc) {
                streams_free_done(client, block->stream_alloc);
                return 0;
        }
        if (!block->slab) {
                count_leaving(client, block);
                return client_free_block(client, block->block_id, epoch);
        }
        pthread_mutex_lock(&client->lock);
        *ret_excess = uncut(client, block);
        pthread_mutex_unlock(&client->lock);
        return 0;
}

int client_return_slab(bfc_client *client, const struct block *slab)
{
        uint64_t excess = 0, n_bytes, epoch = 0;
        struct block gone;
        int r;

        if (!slab->slab) {
                pthread_mutex_lock(&client->lock);
                blocks_take_slab(&client->blocks, slab->ptr, &gone);
                epoch = client->epoch;
                pthread_mutex_unlock(&client->lock);
        }
        r = put_back(client, slab, epoch, &excess);
        if (excess > 0)
                client_free_idle(client, slab->partition, NULL, excess, &n_bytes);
        return r;
}

/* *ret_stays: the call failed and the block is still this process's. */
static int free_block(bfc_client *client, const void *ptr, enum wait wait, struct free_call *call,
                      bool *ret_stays)
{
        uint64_t excess = 0, n_bytes, epoch = 0;
        uint32_t partition = 0;
        struct block block;
        int r = 0;

        *ret_stays = false;
        partition = client->partition;
        if (!client_stash(client, ptr, &excess) && !uncut_fast(client, ptr, &partition, &excess)) {
                r = shared_detach(client, ptr, wait != NO_WAIT, ret_stays);
                if (r != SHARED_NONE)
                        return r;
                r = take_out(client, ptr, wait, call, &block, &epoch);
                *ret_stays = r < 0 && r != -EINVAL;
                if (r != 0)
                        return r == PUT_ASIDE ? 0 : r;
                partition = block.partition;
                r = put_back(client, &block, epoch, &excess);
                if (client_has_ended(r) ||
                    (r < 0 && (block.slab || block.stream_alloc))) { /* it stays mapped in this process */
                        client_restore_block(client, &block);
                        *ret_stays = true;
                }
        }
        if (excess > 0)
                client_free_idle(client, partition, NULL, excess, &n_bytes);
        return r;
}

static int free_now(bfc_client *client, void *ptr, enum wait wait, struct free_call *call)
{
        struct recorder_lifetime lifetime;
        bool stays = false;
        int r = client_check(client);

        if (r < 0)
                return r;
        if (!ptr)
                return 0;
        recorder_freeing(client->recorder, ptr, &lifetime);
        r = free_block(client, ptr, wait, call, &stays);
        if (stays)
                recorder_kept(client->recorder, &lifetime);
        else
                recorder_freed(client->recorder, &lifetime);
        return r;
}

/* The common case in one step: a block that can be stashed. */
static bool free_fast(bfc_client *client, const void *ptr)
{
        uint64_t excess = 0, n_bytes;

        if (!client || !fork_guard_is_own(&client->fork) || client->recorder ||
            !client_stash(client, ptr, &excess))
                return false;
        if (excess > 0)
                client_free_idle(client, client->partition, NULL, excess, &n_bytes);
        return true;
}

BFC_API int bfc_free(bfc_client *client, void *ptr)
{
        return free_fast(client, ptr) ? 0 : free_now(client, ptr, WAIT_OR_PUT_ASIDE, NULL);
}

BFC_API int bfc_free_unused(bfc_client *client, void *ptr)
{
        return free_fast(client, ptr) ? 0 : free_now(client, ptr, NO_WAIT, NULL);
}

int client_free_unless_captured(bfc_client *client, void *const *ptrs, size_t n)
{
        struct free_call call = { 0 };
        int r = 0;

        for (size_t i = 0; i < n; i++) {
                int r_one = free_now(client, ptrs[i], WAIT, &call);

                r = r < 0 ? r : r_one;
        }
        return r;
}
