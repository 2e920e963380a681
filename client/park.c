/* Park and wake; see bfcclient.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A block that is being parked or woken is marked as leaving, so that no other call finds it. It stays mapped
 * until the daemon has answered: if the daemon refuses, nothing has changed. After a restart of the daemon the
 * requests are repeated; the daemon answers them also if it had carried them out. */
#include <errno.h>

#include "client/client.h"
#include "client/extents.h"
#include "client/partitions.h"
#include "client/request.h"

/* Marks the block as leaving. *ret_is_parked: as it is now. */
static int take(bfc_client *client, const void *ptr, struct block *ret)
{
        bool can_park = false;
        int r;

        pthread_mutex_lock(&client->lock);
        r = blocks_leave(&client->blocks, ptr, ret);
        if (r == 0)
                can_park = ret->is_parkable;
        if (r == 0 && !can_park)
                blocks_stay(&client->blocks, ptr);
        pthread_mutex_unlock(&client->lock);
        if (r < 0)
                return error_set(-EINVAL, "%p is not a block of this client, or another call is using it",
                                 ptr);
        return can_park ? 0 : error_set(-EINVAL, "the block at %p was not allocated with BFC_PARKABLE", ptr);
}

static void give_back(bfc_client *client, const struct block *block, bool is_parked)
{
        pthread_mutex_lock(&client->lock);
        blocks_stay(&client->blocks, block->ptr);
        blocks_set_parked(&client->blocks, block->ptr, is_parked);
        pthread_mutex_unlock(&client->lock);
}

static int send_park(bfc_client *client, const struct block *block, unsigned how, uint32_t partition)
{
        Bfcd__Request request = BFCD__REQUEST__INIT;
        Bfcd__Park body = BFCD__PARK__INIT;
        Bfcd__Reply *reply = NULL;
        uint64_t epoch;
        int r;

        body.block_id = block->block_id;
        body.discard = how == BFC_DISCARD;
        body.partition = partition;
        request.body_case = BFCD__REQUEST__BODY_PARK;
        request.park = &body;
        r = client_request(client, NULL, &request, BFCD__REPLY__BODY_DONE, &reply, &epoch);
        if (r == 0)
                bfcd__reply__free_unpacked(reply, NULL);
        return r;
}

BFC_API int bfc_park(bfc_client *client, void *ptr, unsigned how, const char *partition)
{
        uint32_t index = 0;
        struct block block;
        int r = client_check(client);

        if (r == 0 && how != BFC_BACKUP && how != BFC_DISCARD)
                r = error_set(-EINVAL, "bfc_park: how is neither BFC_BACKUP nor BFC_DISCARD");
        if (r == 0 && how == BFC_BACKUP && !partition)
                r = error_set(-EINVAL, "bfc_park: a backup needs the name of a partition");
        if (r == 0 && how == BFC_BACKUP)
                r = client_partition_index(client, partition, &index);
        if (r == 0)
                r = take(client, ptr, &block);
        if (r < 0)
                return r;
        if (block.is_parked) {
                give_back(client, &block, true);
                return error_set(-EALREADY, "the block at %p is parked already", ptr);
        }
        r = send_park(client, &block, how, index);
        if (r == 0) {
                pthread_mutex_lock(&client->lock);
                regions_unmap_all_in(&client->regions, block.region_id, block.offset, block.n_bytes);
                pthread_mutex_unlock(&client->lock);
        }
        give_back(client, &block, r == 0);
        return r;
}

/* The memory is mapped again, at the same address. */
static int check_woken(bfc_client *client, const struct block *block, const Bfcd__Block *got, uint64_t epoch,
                       bool *ret_stale)
{
        void *ptr = NULL;
        int why = 0, r;

        pthread_mutex_lock(&client->lock);
        *ret_stale = epoch != client->epoch;
        r = *ret_stale ? 0 : client_resolve(client, got, &why, &ptr);
        pthread_mutex_unlock(&client->lock);
        if (*ret_stale)
                return 0;
        if (why < 0)
                return client_unmappable(client, block->partition, why);
        return r == 0 && ptr == block->ptr
                       ? 0
                       : error_set(-EPROTO, "the daemon returned the block at an invalid place");
}

static int send_wake(bfc_client *client, const struct block *block, uint32_t wait_ms)
{
        struct client_call call = { .interrupt = NULL };
        Bfcd__Request request = BFCD__REQUEST__INIT;
        Bfcd__Wake body = BFCD__WAKE__INIT;
        bool is_stale = true;
        int r = 0;

        request.body_case = BFCD__REQUEST__BODY_WAKE;
        request.wake = &body;
        body.block_id = block->block_id;
        body.wait_ms = wait_ms;
        while (r == 0 && is_stale) {
                Bfcd__Reply *reply = NULL;
                uint64_t epoch = 0;

                r = client_request(client, &call, &request, BFCD__REPLY__BODY_BLOCK, &reply, &epoch);
                if (r < 0)
                        break;
                r = check_woken(client, block, reply->block, epoch, &is_stale);
                bfcd__reply__free_unpacked(reply, NULL);
        }
        return r;
}

BFC_API int bfc_wake(bfc_client *client, void *ptr, uint32_t wait_ms)
{
        struct block block;
        int r = client_check(client);

        if (r == 0)
                r = take(client, ptr, &block);
        if (r < 0)
                return r;
        if (block.is_parked)
                r = send_wake(client, &block, wait_ms);
        give_back(client, &block, block.is_parked && r < 0);
        return r;
}
