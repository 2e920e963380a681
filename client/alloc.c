/* Allocation; see alloc.h and bfcclient.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A request goes to the cache first, and then to the daemon. A block that the daemon grants becomes a slab
 * of the cache, from which the request is cut. bytes_reserved is the sum over the slabs and over the blocks
 * that are the daemon's own. */
#include "client/alloc.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "client/client.h"
#include "client/session.h"
#include "client/reclaim.h"
#include "client/streams.h"
#include "client/stash.h"
#include "client/stream_free.h"

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

        if (partition != client->partition || n_bytes > MAGAZINE_BLOCK_BYTES ||
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
                if (!how->ret_slab && client_unstash(client, partition, n_bytes, ret_ptr))
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
        return malloc_fast(client, n_bytes, ret_ptr) ? 0 : bfc_malloc_in(client, NULL, n_bytes, ret_ptr);
}
