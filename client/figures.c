/* What a client has and what its tenant uses; see bfcclient.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <string.h>

#include "client/client.h"
#include "client/error.h"

/* What the first version's had. */
#define BLOCK_INFO_MIN_BYTES offsetof(struct bfc_block_info, share)
#define USAGE_MIN_BYTES      offsetof(struct bfc_tenant_usage, lifetime_peak_bytes_in_use)

/* n_bytes: what the first version's had. */
static int check_struct(const char *function, const void *ret, size_t struct_size, size_t n_bytes)
{
        if (!ret)
                return error_set(-EINVAL, "%s: ret is NULL", function);
        if (struct_size < n_bytes)
                return error_set(-EINVAL, "%s: struct_size is %zu: set it to the size of the structure, %zu",
                                 function, struct_size, n_bytes);
        return 0;
}

void fill_struct(void *ret, size_t struct_size, const void *known, size_t n_bytes)
{
        n_bytes = n_bytes < struct_size ? n_bytes : struct_size;
        memcpy((char *)ret + sizeof(size_t), (const char *)known + sizeof(size_t), n_bytes - sizeof(size_t));
        memset((char *)ret + n_bytes, 0, struct_size - n_bytes);
}

BFC_API int bfc_stats(bfc_client *client, struct bfc_client_stats *ret)
{
        struct bfc_client_stats stats;
        int r = client_check(client);

        if (r == 0)
                r = check_struct("bfc_stats", ret, ret ? ret->struct_size : 0,
                                 offsetof(struct bfc_client_stats, bytes_reserved));
        if (r < 0)
                return r;
        pthread_mutex_lock(&client->lock);
        client_read_stats(client, &stats);
        pthread_mutex_unlock(&client->lock);
        stats.num_calls = __atomic_load_n(&client->n_calls, __ATOMIC_RELAXED);
        stats.num_returns = __atomic_load_n(&client->n_returns, __ATOMIC_RELAXED);
        fill_struct(ret, ret->struct_size, &stats, sizeof(stats));
        return 0;
}

BFC_API int bfc_reset_peaks(bfc_client *client)
{
        int r = client_check(client);

        if (r < 0)
                return r;
        pthread_mutex_lock(&client->lock);
        magazines_reset_peak(client->magazines);
        client->stats.peak_bytes_reserved = client->stats.bytes_reserved;
        pthread_mutex_unlock(&client->lock);
        streams_reset_peaks(client);
        return 0;
}

static int usage_ask(bfc_client *client, uint32_t partition, struct bfc_tenant_usage *ret)
{
        Bfcd__Request request = BFCD__REQUEST__INIT;
        Bfcd__Usage body = BFCD__USAGE__INIT;
        const Bfcd__Figures *f;
        Bfcd__Reply *reply = NULL;
        uint64_t epoch;
        int r;

        body.partition = partition;
        request.body_case = BFCD__REQUEST__BODY_USAGE;
        request.usage = &body;
        r = client_ask(client, &request, BFCD__REPLY__BODY_USAGE, &reply, &epoch);
        if (r < 0)
                return r;
        f = reply->usage->figures;
        if (f)
                *ret = (struct bfc_tenant_usage){
                        .struct_size = ret->struct_size,
                        .bytes_limit = f->bytes_limit,
                        .bytes_reserved = f->bytes_reserved,
                        .peak_bytes_reserved = f->peak_bytes_reserved,
                        .bytes_in_use = f->bytes_in_use,
                        .peak_bytes_in_use = f->peak_bytes_in_use,
                        .bytes_requested = f->bytes_requested,
                        .num_blocks = f->num_blocks,
                        .num_sessions = f->num_sessions,
                        .largest_free_block_bytes = f->largest_free_block_bytes,
                        .lifetime_peak_bytes_in_use = f->lifetime_peak_bytes_in_use,
                        .lifetime_peak_bytes_reserved = f->lifetime_peak_bytes_reserved,
                };
        else
                r = error_set(-EPROTO, "the daemon's answer has no figures");
        bfcd__reply__free_unpacked(reply, NULL);
        return r;
}

/* What a page says of a session that is over is old, and nobody says how old. */
static int usage_read(const bfc_client *client, uint32_t partition, struct bfc_tenant_usage *ret)
{
        if (__atomic_load_n(&client->lost, __ATOMIC_RELAXED) != 0)
                return -EAGAIN;
        return client_pages_read(client, partition, ret);
}

BFC_API int bfc_usage(bfc_client *client, const char *partition, struct bfc_tenant_usage *ret)
{
        struct bfc_tenant_usage usage;
        uint32_t index = 0;
        int r = client_check(client);

        if (r == 0)
                r = check_struct("bfc_usage", ret, ret ? ret->struct_size : 0, USAGE_MIN_BYTES);
        if (r == 0)
                r = client_partition_index(client, partition, &index);
        if (r < 0)
                return r;
        usage.struct_size = ret->struct_size;
        if (usage_read(client, index, &usage) < 0)
                r = usage_ask(client, index, &usage);
        if (r < 0)
                return r;
        if (ret->struct_size == sizeof(usage)) /* so that no size has to be looked at */
                *ret = usage;
        else
                fill_struct(ret, ret->struct_size, &usage, sizeof(usage));
        return 0;
}

/* The lock is held. */
static void info_add_origin(const bfc_client *client, struct bfc_block_info *info)
{
        struct region_origin origin;

        if (regions_origin(&client->regions, info->region_id, info->offset, &origin) < 0)
                return; /* cannot be: the block was resolved there */
        info->share = origin.share == DEVICE_SHARE_FD ? BFC_SHARE_FD : BFC_SHARE_CUDA_IPC;
        info->extent_bytes = origin.n_bytes;
        info->extent_offset = info->offset - origin.offset;
        memcpy(info->handle, origin.handle, sizeof(info->handle));
}

BFC_API int bfc_block_info(bfc_client *client, const void *ptr, struct bfc_block_info *ret)
{
        struct bfc_block_info info = { 0 };
        const struct block *block;
        int r = client_check(client);

        if (r == 0)
                r = check_struct("bfc_block_info", ret, ret ? ret->struct_size : 0, BLOCK_INFO_MIN_BYTES);
        if (r < 0)
                return r;
        pthread_mutex_lock(&client->lock);
        block = blocks_find(&client->blocks, ptr);
        if (block)
                info = (struct bfc_block_info){
                        .block_id = block->block_id,
                        .region_id = block->region_id,
                        .offset = block->offset,
                        .n_bytes = block->n_bytes,
                        .n_requested = block->n_requested,
                        .block_offset = block->life   ? streams_offset(client, block)
                                        : block->slab ? cache_offset(block)
                                                      : 0,
                };
        if (block)
                info_add_origin(client, &info);
        pthread_mutex_unlock(&client->lock);
        if (!block)
                return error_set(-EINVAL, "%p is not a block of this client", ptr);
        fill_struct(ret, ret->struct_size, &info, sizeof(info));
        return 0;
}
