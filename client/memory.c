/* Blocks: taking and giving back; see bfcclient.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * While a free waits for the device, its block is
 * marked as leaving: a second free of it, or another thread's, finds nothing, and
 * a Retire of where it lies is a lie, so its range lasts. It is removed before
 * the daemon is told, which may hand the same place to another thread at once.
 *
 * Where there is a cache (cache.h) it is asked before the daemon and given before it; its
 * slabs are the daemon's blocks, and ours are cut from them. bytes_reserved is the sum over the
 * slabs and over the blocks that are the daemon's own. */
#include <errno.h>
#include <string.h>
#include <time.h>

#include "client/client.h"
#include "client/clock.h"
#include "client/error.h"

#define BLOCK_GRANULE       256u
#define RELEASE_MS          10000
#define RELEASE_STEP_NS     200000
#define RELEASE_MAX_STEP_NS 20000000

static void add_with_peak(uint64_t *sum, uint64_t *peak, uint64_t n_bytes)
{
        *sum += n_bytes;
        if (*sum > *peak)
                *peak = *sum;
}

void client_count_reserved(bfc_client *client, uint32_t partition, uint64_t n_bytes)
{
        struct bfc_client_stats *s = &client->stats[partition];

        add_with_peak(&s->bytes_reserved, &s->peak_bytes_reserved, n_bytes);
        add_with_peak(&client->bytes_reserved, &client->peak_bytes_reserved, n_bytes);
}

void client_count_released(bfc_client *client, uint32_t partition, uint64_t n_bytes)
{
        client->stats[partition].bytes_reserved -= n_bytes;
        client->bytes_reserved -= n_bytes;
}

/* Writes a new block down. Lock held. */
static int client_keep(bfc_client *client, struct block *block, uint64_t n_requested,
                       const struct malloc_how *how, void **ret_ptr)
{
        int r;

        if (how->ret_slab) {
                r = block->slab ? 0 : blocks_add(&client->slabs, block);
                if (r == 0)
                        *how->ret_slab = *block;
                return r == -EEXIST ? -EPROTO : r;
        }
        block->n_requested = n_requested;
        r = blocks_add(&client->blocks, block);
        if (r < 0)
                return r == -EEXIST ? -EPROTO : r;
        client_count_alloc(client, block);
        *ret_ptr = (void *)(uintptr_t)block->ptr;
        return 0;
}

/* A block out of what this client has already. Lock held. CACHE_MISS. */
static int client_cut(bfc_client *client, uint32_t partition, uint64_t n_bytes, const struct malloc_how *how,
                      void **ret_ptr)
{
        struct block block;
        int r = cache_alloc(client->cache, partition, n_bytes, &block);

        if (r == CACHE_MISS && client_drain(client))
                r = cache_alloc(client->cache, partition, n_bytes, &block);
        if (r != 0)
                return r;
        block.may_park = !how->ret_slab && client_may_park(client, partition, n_bytes);
        if (!how->ret_slab)
                client_stamp(client, partition, &block);
        r = client_keep(client, &block, n_bytes, how, ret_ptr);
        if (r < 0)
                cache_dealloc(&block);
        return r;
}

/* What the daemon gave: into the cache and cut, or as it is where the cache cannot take
 * it. Lock held. *kept: the daemon's block is written down, also where this fails. -ECANCELED:
 * client_resolve()'s, with *ret_why. */
static int client_take(bfc_client *client, uint32_t partition, const Bfcd__Block *got, uint64_t n_bytes,
                       const struct malloc_how *how, bool *kept, int *ret_why, void **ret_ptr)
{
        struct block block = { .block_id = got->block_id,
                               .region_id = got->region_id,
                               .offset = got->offset,
                               .n_bytes = got->n_bytes,
                               .partition = (uint16_t)partition };
        void *ptr;
        int r;

        r = client_resolve(client, got, ret_why, &ptr);
        if (r < 0)
                return r;
        block.ptr = ptr;
        if (client->cache && malloc_may_be_cut(how)) {
                struct cache_given given = {
                        got->block_id, got->region_id, regions_size(&client->regions, got->region_id),
                        got->offset,   got->n_bytes,   ptr
                };

                r = cache_add(client->cache, partition, &given);
                if (r == -EEXIST)
                        return -EPROTO; /* it gave that place before */
                *kept = r == 0;
        }
        if (*kept) {
                r = client_cut(client, partition, n_bytes, how, ret_ptr);
                if (r == CACHE_MISS && cache_take_wrong(client->cache, partition, got->block_id) < 0)
                        r = -ENOMEM;
                *kept = r != CACHE_MISS;
                if (*kept)
                        client_count_reserved(client, partition, got->n_bytes);
                return r;
        }
        if (got->n_bytes < n_bytes)
                return CACHE_MISS;
        if (!how->ret_slab && !how->tag)
                client_stamp(client, partition, &block);
        r = client_keep(client, &block, n_bytes, how, ret_ptr);
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
        client->stats[partition].num_failures++;
        pthread_mutex_unlock(&client->lock);
        return error;
}

bool client_sees_place(bfc_client *client, uint32_t partition)
{
        const struct device_view *place = &client->places[partition];
        uint8_t uuid[DEVICE_UUID_BYTES];

        if (!place->is_cuda || __atomic_load_n(&client->is_seen[partition], __ATOMIC_RELAXED))
                return true;
        for (int ordinal = 0; device_cuda_ordinal_uuid(ordinal, uuid) == 0; ordinal++) {
                if (memcmp(uuid, place->uuid, sizeof(uuid)) != 0)
                        continue;
                __atomic_store_n(&client->is_seen[partition], true, __ATOMIC_RELAXED);
                return true;
        }
        return false;
}

/* Found out before the daemon makes memory that this process cannot map. */
static int client_check_place(bfc_client *client, uint32_t partition)
{
        if (client_sees_place(client, partition))
                return 0;
        return error_set(-ENODEV,
                         "partition '%s' is on device '%s', which is not visible to this process: check "
                         "CUDA_VISIBLE_DEVICES and the devices of the container (a process forked from "
                         "one that used CUDA sees no device)",
                         client->hello->hello->partitions[partition]->name,
                         client->hello->hello->partitions[partition]->device);
}

/* A part of the same call that waits for nothing. */
static struct malloc_how malloc_at_once(const struct malloc_how *how, bool again)
{
        struct malloc_how at_once = *how;

        at_once.wait_ms = 0;
        at_once.again = again;
        return at_once;
}

/* Asks the daemon, and takes n_bytes of what it gives. *ret_stale: that came before a return, and is
 * worth nothing. */
static int client_fetch_once(bfc_client *client, uint32_t partition, Bfcd__Request *request, uint64_t n_bytes,
                             const struct malloc_how *how, bool *ret_stale, void **ret_ptr)
{
        Bfcd__Reply *reply = NULL;
        bool kept = false;
        uint64_t epoch;
        int r, why = 0;

        *ret_stale = false;
        r = client_ask_for(client, how->call, request, BFCD__REPLY__BODY_BLOCK, &reply, &epoch);
        if (r < 0)
                return r;
        pthread_mutex_lock(&client->lock);
        *ret_stale = epoch != client->epoch;
        if (!*ret_stale)
                r = reply->block->n_bytes < request->malloc->n_bytes
                            ? -EPROTO
                            : client_take(client, partition, reply->block, n_bytes, how, &kept, &why,
                                          ret_ptr);
        pthread_mutex_unlock(&client->lock);
        if ((r == -ENOMEM || r == CACHE_MISS || why < 0) && !kept)
                client_give_back(client, reply->block->block_id, epoch);
        if (why < 0)
                r = client_unmappable(client, partition, why);
        else if (r == -ENOMEM)
                r = error_set(r, "this process is out of memory");
        else if (r < 0)
                r = error_set(r, "the daemon returned a block of %llu bytes at an invalid place",
                              (unsigned long long)reply->block->n_bytes);
        bfcd__reply__free_unpacked(reply, NULL);
        return r;
}

/* Asks the daemon for ask_bytes, and takes n_bytes of it. CACHE_MISS: they were less, and did
 * not come to lie beside what is free here; they went back. */
static int client_fetch(bfc_client *client, uint32_t partition, uint64_t ask_bytes, uint64_t n_bytes,
                        const struct malloc_how *how, void **ret_ptr)
{
        Bfcd__Request request = BFCD__REQUEST__INIT;
        Bfcd__Malloc body = BFCD__MALLOC__INIT;
        bool is_stale;
        int r;

        body.partition = partition;
        body.n_bytes = ask_bytes;
        body.n_needed = n_bytes != ask_bytes ? n_bytes : 0;
        body.flags = how->flags & BFC_ONE_EXTENT; /* BFC_WHOLE is between this client and its cache */
        if (how->again && (client->hello->hello->capabilities & BFCD__CAPABILITY__CAPABILITY_AGAIN))
                body.flags |= BFCD__MALLOC_FLAG__MALLOC_FLAG_AGAIN;
        body.wait_ms = how->wait_ms;
        body.tag = (char *)(uintptr_t)how->tag;
        request.body_case = BFCD__REQUEST__BODY_MALLOC;
        request.malloc = &body;
        do
                r = client_fetch_once(client, partition, &request, n_bytes, how, &is_stale, ret_ptr);
        while (is_stale);
        return r;
}

/* Gives whole idle slabs back, until they were want_bytes or there is none. */
static int client_give_back_idle(bfc_client *client, uint32_t partition, uint64_t want_bytes,
                                 uint64_t *ret_bytes)
{
        uint64_t block_ids[CALL_MAX_AT_ONCE], sum = 0, n_bytes, epoch;
        size_t n;
        int r = 0;

        do {
                pthread_mutex_lock(&client->lock);
                client_drain(client);
                n = cache_take_idle(client->cache, partition, want_bytes - sum, block_ids, CALL_MAX_AT_ONCE,
                                    &n_bytes);
                client_count_released(client, partition, n_bytes);
                epoch = client->epoch;
                pthread_mutex_unlock(&client->lock);
                sum += n_bytes;
                r = client_give_back_all(client, block_ids, n, epoch);
        } while (r == 0 && n == CALL_MAX_AT_ONCE && sum < want_bytes);
        *ret_bytes = sum;
        return r;
}

/* The same, and then what no block needs of slabs in use. */
static int client_give_back_free(bfc_client *client, uint32_t partition, uint64_t want_bytes,
                                 uint64_t *ret_bytes)
{
        uint64_t n_bytes;
        bool more = true;
        int r = client_give_back_idle(client, partition, want_bytes, ret_bytes);

        while (r == 0 && more && *ret_bytes < want_bytes) {
                r = client_shrink(client, partition, NULL, want_bytes - *ret_bytes, &more);
                if (r == 0)
                        r = client_give_back_idle(client, partition, want_bytes - *ret_bytes, &n_bytes);
                if (r == 0)
                        *ret_bytes += n_bytes;
        }
        return r;
}

/* CACHE_MISS: *ret_want is to be asked for. */
static int client_try_cut(bfc_client *client, uint32_t partition, uint64_t n_bytes,
                          const struct malloc_how *how, uint64_t *ret_want, void **ret_ptr)
{
        int r;

        pthread_mutex_lock(&client->lock);
        r = client_cut(client, partition, n_bytes, how, ret_ptr);
        if (r == CACHE_MISS)
                *ret_want = cache_want(client->cache, partition, n_bytes);
        pthread_mutex_unlock(&client->lock);
        if (r < 0)
                return error_set(r, r == -ENOMEM ? "this process is out of memory"
                                                 : "the daemon returned the same place twice");
        return r;
}

/* Gives free extents back before the slabs exceed the peak of the bytes in use by more than a small part.
 * All of them: fewer leave gaps in which no request fits, and the next miss gives back again.
 * CACHE_MISS: *ret_want is to be asked for. */
static int client_give_back_surplus(bfc_client *client, uint32_t partition, uint64_t n_bytes,
                                    const struct malloc_how *how, uint64_t *ret_want, void **ret_ptr)
{
        uint64_t given_back;
        bool has_surplus;
        int r;

        pthread_mutex_lock(&client->lock);
        has_surplus = cache_has_surplus(client->cache, partition, n_bytes, *ret_want);
        pthread_mutex_unlock(&client->lock);
        if (!has_surplus)
                return CACHE_MISS;
        r = client_give_back_free(client, partition, UINT64_MAX, &given_back);
        if (r < 0 || given_back == 0)
                return r < 0 ? r : CACHE_MISS;
        return client_try_cut(client, partition, n_bytes, how, ret_want, ret_ptr);
}

/* Only what is missing beside what is free here, so that a limit can be used to its last byte.
 * CACHE_MISS: that did not come about. */
static int client_fetch_least(bfc_client *client, uint32_t partition, uint64_t n_bytes,
                              const struct malloc_how *how, void **ret_ptr)
{
        struct malloc_how at_once = malloc_at_once(how, true);
        uint64_t want;
        int r;

        pthread_mutex_lock(&client->lock);
        want = cache_want_least(client->cache, partition, n_bytes);
        pthread_mutex_unlock(&client->lock);
        if (want >= n_bytes)
                return CACHE_MISS;
        r = client_fetch(client, partition, want, n_bytes, &at_once, ret_ptr);
        return r == -EDQUOT || r == -ENOMEM ? CACHE_MISS : r;
}

/* What is idle here goes back, and no more is asked for than is needed. Now it may wait. The daemon
 * counts what is refused now; where it was told that it is asked again, it is. */
static int client_refused(bfc_client *client, uint32_t partition, int error, bool again, uint64_t n_bytes,
                          const struct malloc_how *how, void **ret_ptr)
{
        uint64_t given_back = 0, want;
        int r;

        streams_collect(client);
        r = client_give_back_free(client, partition, UINT64_MAX, &given_back);
        if (r < 0)
                return r;
        if (given_back == 0 && !again)
                return error;
        /* Another thread may have freed something meanwhile. */
        r = malloc_may_be_cut(how) ? client_try_cut(client, partition, n_bytes, how, &want, ret_ptr)
                                   : CACHE_MISS;
        if (r == CACHE_MISS && malloc_may_be_cut(how))
                r = client_fetch_least(client, partition, n_bytes, how, ret_ptr);
        return r == CACHE_MISS ? client_fetch(client, partition, n_bytes, n_bytes, how, ret_ptr) : r;
}

/* Who waits takes its place in line at once: refused first, it would come behind who asked later. Only
 * where work that is under way here keeps memory that was freed, that is looked at before. */
static int client_malloc_uncached(bfc_client *client, uint32_t partition, uint64_t n_bytes,
                                  const struct malloc_how *how, void **ret_ptr)
{
        bool keeps = streams_keep(client), is_last = how->wait_ms > 0 && !keeps;
        struct malloc_how at_once = malloc_at_once(how, how->again || keeps);
        int r = client_fetch(client, partition, n_bytes, n_bytes, is_last ? how : &at_once, ret_ptr);

        if (is_last || (r != -EDQUOT && r != -ENOMEM) || how->call->is_final)
                return r;
        if (!streams_collect(client) && how->wait_ms == 0 && !keeps)
                return r;
        return client_fetch(client, partition, n_bytes, n_bytes, how, ret_ptr);
}

/* Whether it will not leave it at a refusal: where it could wait or ask for less, or has something that
 * may lie idle. */
static bool client_tries_again(bfc_client *client, uint64_t n_asked, uint64_t n_bytes,
                               const struct malloc_how *how)
{
        bool has_some;

        if (how->again || how->wait_ms > 0 || n_asked >= n_bytes + BLOCK_GRANULE)
                return true;
        pthread_mutex_lock(&client->lock);
        has_some = client->bytes_reserved > 0;
        pthread_mutex_unlock(&client->lock);
        return has_some;
}

/* From the cache, or else from the daemon. Where extents end only the daemon knows, so what has
 * flags is a block of its own. Nobody waits for room as long as something is idle here, nor
 * for more than is needed. */
static int client_malloc_call(bfc_client *client, uint32_t partition, uint64_t n_bytes,
                              const struct malloc_how *how, void **ret_ptr)
{
        struct malloc_how at_once = malloc_at_once(how, true);
        uint64_t want = n_bytes;
        int r = __atomic_load_n(&client->lost, __ATOMIC_RELAXED);

        if (r != 0)
                return client_lost(client, r);
        if (!client->cache)
                return client_malloc_uncached(client, partition, n_bytes, how, ret_ptr);
        if (malloc_may_be_cut(how)) {
                if (!how->ret_slab && client_unpark(client, partition, n_bytes, ret_ptr))
                        return 0;
                r = client_try_cut(client, partition, n_bytes, how, &want, ret_ptr);
                if (r == CACHE_MISS)
                        r = client_give_back_surplus(client, partition, n_bytes, how, &want, ret_ptr);
                if (r != CACHE_MISS)
                        return r;
        }
        at_once.again = client_tries_again(client, want, n_bytes, how);
        r = client_fetch(client, partition, want, n_bytes, &at_once, ret_ptr);
        if (r == CACHE_MISS) {
                want = cache_want_whole(client->cache, partition, n_bytes);
                at_once.again = client_tries_again(client, want, n_bytes, how);
                r = client_fetch(client, partition, want, n_bytes, &at_once, ret_ptr);
        }
        if ((r == -EDQUOT || r == -ENOMEM) && !how->call->is_final)
                r = client_refused(client, partition, r, at_once.again, n_bytes, how, ret_ptr);
        return r;
}

int client_malloc(bfc_client *client, uint32_t partition, uint64_t n_bytes, const struct malloc_how *how,
                  void **ret_ptr)
{
        struct call_interrupt interrupt = { .cancel_fd = how->cancel_fd > 0 ? how->cancel_fd : -1 };
        struct client_call call = { .interrupt = how->wait_ms > 0 ? &interrupt : NULL };
        struct malloc_how with_call = *how;

        with_call.call = &call;
        return client_malloc_call(client, partition, n_bytes, &with_call, ret_ptr);
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
        return r < 0 ? r : client_check_place(client, *ret_index);
}

static int client_malloc_as(bfc_client *client, const char *partition, size_t n_bytes,
                            const struct malloc_how *how, void **ret_ptr)
{
        uint32_t index = 0;
        int r = client_check_malloc(client, partition, n_bytes, ret_ptr, &index);

        if (r < 0)
                return r;
        if ((how->flags & ~(BFC_ONE_EXTENT | BFC_WHOLE)) != 0)
                return error_set(-EINVAL,
                                 "unknown flags 0x%llx: this library supports BFC_ONE_EXTENT and BFC_WHOLE",
                                 (unsigned long long)how->flags);
        r = client_malloc(client, index, n_bytes, how, ret_ptr);
        if (r < 0)
                return client_malloc_failed(client, index, r);
        recorder_given(client->recorder, *ret_ptr, n_bytes);
        return 0;
}

BFC_API int bfc_malloc_with(bfc_client *client, size_t n_bytes, const struct bfc_malloc_options *options,
                            void **ret_ptr)
{
        const char *partition = NULL;
        struct malloc_how how;
        int r = malloc_how_read(options, &partition, &how);

        return r < 0 ? r : client_malloc_as(client, partition, n_bytes, &how, ret_ptr);
}

BFC_API int bfc_malloc_flags(bfc_client *client, const char *partition, size_t n_bytes, uint64_t flags,
                             void **ret_ptr)
{
        struct malloc_how how = { .flags = flags };

        return client_malloc_as(client, partition, n_bytes, &how, ret_ptr);
}

/* The common case in one step, without all that another call may need: a parked block. */
static bool client_malloc_at_once(bfc_client *client, size_t n_bytes, void **ret_ptr)
{
        if (!client || !*client->alive || !ret_ptr || n_bytes == 0 ||
            __atomic_load_n(&client->lost, __ATOMIC_RELAXED) != 0 ||
            !client_unpark(client, client->partition, n_bytes, ret_ptr))
                return false;
        if (client->recorder)
                recorder_given(client->recorder, *ret_ptr, n_bytes);
        return true;
}

BFC_API int bfc_malloc(bfc_client *client, size_t n_bytes, void **ret_ptr)
{
        struct malloc_how how = { .flags = 0 };

        if (client_malloc_at_once(client, n_bytes, ret_ptr))
                return 0;
        return client_malloc_as(client, NULL, n_bytes, &how, ret_ptr);
}

BFC_API int bfc_malloc_in(bfc_client *client, const char *partition, size_t n_bytes, void **ret_ptr)
{
        return bfc_malloc_flags(client, partition, n_bytes, 0, ret_ptr);
}

/* Writes down again a block whose free did not come about, where its memory is still
 * there: once it was sent, the daemon may have taken that back before it went away. */
void client_keep_on(bfc_client *client, const struct block *block)
{
        void *ptr;

        pthread_mutex_lock(&client->lock);
        if (regions_resolve(&client->regions, block->region_id, block->offset, block->n_bytes, &ptr) == 0 &&
            ptr == block->ptr && blocks_add(&client->blocks, block) == 0) {
                client_count_alloc(client, block);
                client->stats[block->partition].num_allocs--;
                client->stats[block->partition].num_frees--;
        }
        pthread_mutex_unlock(&client->lock);
}

/* The next owner of the block must not meet our kernels in it. The block is
 * still ours, here and at the daemon, so its region stays. */
int client_finish(bfc_client *client, uint32_t partition, struct device_range *range)
{
        int r = streams_are_captured(client, partition) ? -EBUSY : device_range_finish(range);

        if (r == -EBUSY)
                return error_set(r, "a stream is being captured, so a kernel may still use the block: "
                                    "free it after the capture");
        /* No work of ours runs on a device that is lost, or in a context that is broken. */
        if (r == 0 || r == -ENODEV || r == -EIO)
                return 0;
        return error_set(r == -ENOMEM ? r : -EIO,
                         "waiting for the work on the device failed (%s), so the block was not freed: "
                         "free it again",
                         strerror(-r));
}

/* Its place is free for this process's next bfc_malloc(). Lock held. Returns how much is
 * to go back for that. */
static uint64_t client_uncut(bfc_client *client, const struct block *block)
{
        cache_dealloc(block);
        return cache_excess(client->cache, block->partition);
}

bool client_wipes(const bfc_client *client, uint32_t partition)
{
        return client->regions.inherits && !client->places[partition].is_cuda &&
               fork_count() != client->n_forks && !__atomic_load_n(&client->lost, __ATOMIC_RELAXED);
}

void client_wipe(const bfc_client *client, uint32_t partition, const struct block *block)
{
        if (client_wipes(client, partition))
                memset((void *)(uintptr_t)block->ptr, 0, block->n_bytes);
}

/* The common case in one step: a cached block of memory on which no device works. A block that is to
 * be zeroed is none, since that takes long for a lock.
 * False: it is no such block. */
static bool client_uncut_at_once(bfc_client *client, const void *ptr, uint32_t *ret_partition,
                                 uint64_t *ret_excess)
{
        const struct block *found;
        struct block block;
        bool done;

        pthread_mutex_lock(&client->lock);
        found = blocks_find(&client->blocks, ptr);
        done = found && found->slab && !client->places[found->partition].is_cuda &&
               !client_wipes(client, found->partition) && !__atomic_load_n(&client->lost, __ATOMIC_RELAXED);
        if (done)
                done = blocks_take(&client->blocks, ptr, &block) == 0;
        if (done) {
                client_count_free(client, &block);
                *ret_partition = block.partition;
                *ret_excess = client_uncut(client, &block);
        }
        pthread_mutex_unlock(&client->lock);
        return done;
}

enum { PUT_ASIDE = 1 };

/* Waits for the work, and then takes the block out of the table. PUT_ASIDE: it cannot wait now, and others
 * will, so the block is not the caller's any more. */
static int client_take_out(bfc_client *client, const void *ptr, bool in_captures, struct block *ret,
                           uint64_t *ret_epoch)
{
        struct device_range *range = NULL;
        uint32_t partition = 0;
        int r;

        pthread_mutex_lock(&client->lock);
        /* Another thread may publish it at this moment, which is a mistake of the caller's. */
        r = shared_has(client, ptr) ? -EINVAL : blocks_leave(&client->blocks, ptr, ret);
        if (r == 0)
                range = regions_range(&client->regions, ret->region_id);
        if (r == 0)
                partition = regions_partition(&client->regions, ret->region_id);
        pthread_mutex_unlock(&client->lock);
        if (r < 0)
                return error_set(-EINVAL,
                                 "%p is not a block of this client: never allocated, or already freed", ptr);
        r = client_finish(client, partition, range);
        if (r == -EBUSY && in_captures && streams_put_aside(client, ret, partition) == 0)
                return PUT_ASIDE;
        pthread_mutex_lock(&client->lock);
        if (r < 0)
                blocks_stay(&client->blocks, ptr);
        else if (blocks_take(&client->blocks, ptr, ret) == 0)
                client_count_free(client, ret);
        *ret_epoch = client->epoch;
        pthread_mutex_unlock(&client->lock);
        if (r == 0)
                client_wipe(client, partition, ret);
        return r;
}

/* A block that no work touches any more goes to the cache, or to the daemon. It left the table in this
 * epoch. */
static int client_put_back(bfc_client *client, const struct block *block, uint64_t epoch,
                           uint64_t *ret_excess)
{
        int r = block->slab || block->life ? __atomic_load_n(&client->lost, __ATOMIC_RELAXED) : 0;

        if (r != 0)
                return client_lost(client, r);
        if (block->life) {
                streams_free_done(client, block->life);
                return 0;
        }
        if (!block->slab)
                r = client_give_back(client, block->block_id, epoch);
        if (client_has_ended(r))
                return r;
        pthread_mutex_lock(&client->lock);
        if (block->slab) {
                *ret_excess = client_uncut(client, block);
        } else {
                client_count_released(client, block->partition, block->n_bytes);
                client_page_whole(client, block->partition, -(int64_t)block->n_bytes);
        }
        pthread_mutex_unlock(&client->lock);
        return r;
}

int client_return(bfc_client *client, const struct block *slab)
{
        uint64_t excess = 0, n_bytes, epoch = 0;
        struct block gone;
        int r;

        if (!slab->slab) {
                pthread_mutex_lock(&client->lock);
                blocks_take(&client->slabs, slab->ptr, &gone);
                epoch = client->epoch;
                pthread_mutex_unlock(&client->lock);
        }
        r = client_put_back(client, slab, epoch, &excess);
        if (excess > 0)
                client_give_back_idle(client, slab->partition, excess, &n_bytes);
        return r;
}

/* *ret_stays: the block is still this process's, although the call failed. */
static int client_free_block(bfc_client *client, const void *ptr, bool in_captures, bool *ret_stays)
{
        uint64_t excess = 0, n_bytes, epoch = 0;
        uint32_t partition = 0;
        struct block block;
        int r = 0;

        *ret_stays = false;
        partition = client->partition;
        if (!client_park(client, ptr, &excess) && !client_uncut_at_once(client, ptr, &partition, &excess)) {
                r = shared_let_go(client, ptr, ret_stays);
                if (r != SHARED_NONE)
                        return r;
                r = client_take_out(client, ptr, in_captures, &block, &epoch);
                *ret_stays = r < 0 && r != -EINVAL;
                if (r != 0)
                        return r == PUT_ASIDE ? 0 : r;
                partition = block.partition;
                r = client_put_back(client, &block, epoch, &excess);
                if (client_has_ended(r) ||
                    (r < 0 &&
                     (block.slab || block.life))) { /* mapped, and this process's, as long as it lasts */
                        client_keep_on(client, &block);
                        *ret_stays = true;
                }
        }
        if (excess > 0)
                client_give_back_idle(client, partition, excess, &n_bytes);
        return r;
}

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
        r = client_ask(client, &request, BFCD__REPLY__BODY_RELEASED, &reply, &epoch);
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
                if (client->polls)
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
                r = client_give_back_free(client, i, left, &given_back);
                left -= given_back < left ? given_back : left;
        }
        until_ms = clock_now_ms() + RELEASE_MS;
        for (uint32_t i = 0; r == 0 && n_bytes > 0 && i < client->hello->hello->n_partitions; i++)
                r = wait_for_release(client, i, n_bytes, until_ms);
        return r;
}

static int free_now(bfc_client *client, void *ptr, bool in_captures)
{
        struct recorder_life life;
        bool stays = false;
        int r = client_check(client);

        if (r < 0)
                return r;
        if (!ptr)
                return 0;
        recorder_freeing(client->recorder, ptr, &life);
        r = client_free_block(client, ptr, in_captures, &stays);
        if (stays)
                recorder_kept(client->recorder, &life);
        else
                recorder_freed(client->recorder, &life);
        return r;
}

/* The common case in one step: a block that can be parked. */
static bool client_free_at_once(bfc_client *client, const void *ptr)
{
        uint64_t excess = 0, n_bytes;

        if (!client || !*client->alive || client->recorder || !client_park(client, ptr, &excess))
                return false;
        if (excess > 0)
                client_give_back_idle(client, client->partition, excess, &n_bytes);
        return true;
}

BFC_API int bfc_free(bfc_client *client, void *ptr)
{
        return client_free_at_once(client, ptr) ? 0 : free_now(client, ptr, true);
}

int client_free_unless_captured(bfc_client *client, void *ptr)
{
        return free_now(client, ptr, false);
}
