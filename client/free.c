/* Freeing; see free.h and bfcclient.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * While a free waits for the device, its block is marked as leaving: a second free does not find it, and its
 * extents cannot be retired. It leaves the table and the statistics before the daemon is told, which may grant the
 * same place to another thread at once. So what is counted is never more than what the daemon has granted.
 *
 * A block can be stashed if its memory can be another block's at once: cut by the cache, at most 1 MiB, and
 * of a device that works only for this process's own code. Only blocks of the client's own partition are
 * stashed, so there is one set of magazines. */
#include "client/free.h"

#include <errno.h>
#include <string.h>

#include "client/client.h"
#include "client/session.h"
#include "client/park.h"
#include "client/reclaim.h"
#include "client/shared.h"
#include "client/stash.h"
#include "client/stream_free.h"

/* ---- stashing ----------------------------------------------------------------- */

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

/* ---- freeing ----------------------------------------------------------------- */

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
