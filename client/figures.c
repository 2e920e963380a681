/* What a client has and what its tenant uses; see bfcclient.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "client/client.h"
#include "client/error.h"

/* What the first version's had. */
#define BLOCK_INFO_MIN_BYTES    offsetof(struct bfc_block_info, share)
#define BLOCK_INFO_DEVICE_BYTES offsetof(struct bfc_block_info, partition)
#define USAGE_MIN_BYTES         offsetof(struct bfc_tenant_usage, lifetime_peak_bytes_in_use)
#define STATS_MIN_BYTES         offsetof(struct bfc_client_stats, bytes_reserved)

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

static void stats_give(const bfc_client *client, struct bfc_client_stats *stats, struct bfc_client_stats *ret)
{
        stats->num_calls = __atomic_load_n(&client->n_calls, __ATOMIC_RELAXED);
        stats->num_returns = __atomic_load_n(&client->n_returns, __ATOMIC_RELAXED);
        fill_struct(ret, ret->struct_size, stats, sizeof(*stats));
}

BFC_API int bfc_stats(bfc_client *client, struct bfc_client_stats *ret)
{
        struct bfc_client_stats stats;
        int r = client_check(client);

        if (r == 0)
                r = check_struct("bfc_stats", ret, ret ? ret->struct_size : 0, STATS_MIN_BYTES);
        if (r < 0)
                return r;
        pthread_mutex_lock(&client->lock);
        client_read_stats(client, &stats);
        pthread_mutex_unlock(&client->lock);
        stats_give(client, &stats, ret);
        return 0;
}

BFC_API int bfc_stats_in(bfc_client *client, const char *partition, struct bfc_client_stats *ret)
{
        struct bfc_client_stats stats;
        uint32_t index = 0;
        int r = client_check(client);

        if (r == 0)
                r = check_struct("bfc_stats_in", ret, ret ? ret->struct_size : 0, STATS_MIN_BYTES);
        if (r == 0)
                r = client_partition_index(client, partition, &index);
        if (r < 0)
                return r;
        pthread_mutex_lock(&client->lock);
        client_read_stats_in(client, index, &stats);
        pthread_mutex_unlock(&client->lock);
        stats_give(client, &stats, ret);
        return 0;
}

BFC_API int bfc_reset_peaks(bfc_client *client)
{
        int r = client_check(client);

        if (r < 0)
                return r;
        pthread_mutex_lock(&client->lock);
        client_reset_peaks(client);
        pthread_mutex_unlock(&client->lock);
        streams_reset_peaks(client);
        return 0;
}

/* ret_room: NULL, or it is asked for too. */
static int usage_ask(bfc_client *client, uint32_t partition, struct bfc_tenant_usage *ret,
                     Bfcd__Room *ret_room)
{
        Bfcd__Request request = BFCD__REQUEST__INIT;
        Bfcd__Usage body = BFCD__USAGE__INIT;
        const Bfcd__Figures *f;
        Bfcd__Reply *reply = NULL;
        uint64_t epoch;
        int r;

        body.partition = partition;
        body.with_room = ret_room != NULL;
        request.body_case = BFCD__REQUEST__BODY_USAGE;
        request.usage = &body;
        r = client_ask(client, &request, BFCD__REPLY__BODY_USAGE, &reply, &epoch);
        if (r < 0)
                return r;
        f = reply->usage->figures;
        if (f && ret_room && !reply->usage->room)
                f = NULL;
        if (f && ret_room)
                *ret_room = (Bfcd__Room){ .bytes_free = reply->usage->room->bytes_free,
                                          .bytes_total = reply->usage->room->bytes_total };
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
                r = error_set(-EPROTO, "the daemon's reply has no statistics");
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
                r = usage_ask(client, index, &usage, NULL);
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

/* The lock is held. */
static void info_describe(const bfc_client *client, const struct block *block, struct bfc_block_info *ret)
{
        *ret = (struct bfc_block_info){
                .block_id = block->life   ? streams_block_id(block)
                            : block->slab ? cache_block_id(block)
                                          : block->block_id,
                .region_id = block->region_id,
                .offset = block->offset,
                .n_bytes = block->n_bytes,
                .n_requested = block->n_requested,
                .block_offset = block->life   ? streams_offset(block)
                                : block->slab ? cache_offset(block)
                                              : 0,
                .base = (void *)(uintptr_t)block->ptr,
        };
        info_add_origin(client, ret);
}

/* The number under which this process knows the GPU; -1: it does not see it. */
static int ordinal_of(const struct device_view *place)
{
        uint8_t uuid[DEVICE_UUID_BYTES];

        for (int ordinal = 0; device_cuda_ordinal_uuid(ordinal, uuid) == 0; ordinal++)
                if (memcmp(uuid, place->uuid, sizeof(uuid)) == 0)
                        return ordinal;
        return -1;
}

static void info_add_device(const bfc_client *client, uint32_t partition, struct bfc_block_info *info)
{
        const struct device_view *place = &client->places[partition];
        size_t n = 0;

        info->partition = client->hello->hello->partitions[partition]->name;
        info->device = client->hello->hello->partitions[partition]->device;
        info->device_ordinal = place->is_cuda ? ordinal_of(place) : -1;
        n += (size_t)snprintf(info->device_uuid, sizeof(info->device_uuid), place->is_cuda ? "GPU-" : "host");
        for (size_t i = 0; place->is_cuda && i < sizeof(place->uuid); i++)
                n += (size_t)snprintf(info->device_uuid + n, sizeof(info->device_uuid) - n, "%s%02x",
                                      i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", place->uuid[i]);
}

BFC_API int bfc_block_info(bfc_client *client, const void *ptr, struct bfc_block_info *ret)
{
        uint32_t partition = UINT32_MAX;
        struct bfc_block_info info;
        const struct block *block;
        int r = client_check(client);

        if (r == 0)
                r = check_struct("bfc_block_info", ret, ret ? ret->struct_size : 0, BLOCK_INFO_MIN_BYTES);
        if (r < 0)
                return r;
        pthread_mutex_lock(&client->lock);
        block = blocks_find_around(&client->blocks, ptr, 1);
        if (block) {
                info_describe(client, block, &info);
                partition = regions_partition(&client->regions, block->region_id);
        }
        pthread_mutex_unlock(&client->lock);
        if (!block)
                return error_set(-EINVAL, "%p is not inside a block of this client", ptr);
        if (partition < client->hello->hello->n_partitions && ret->struct_size > BLOCK_INFO_DEVICE_BYTES)
                info_add_device(client, partition, &info);
        fill_struct(ret, ret->struct_size, &info, sizeof(info));
        return 0;
}

/* What the client itself has idle, for any request. */
static uint64_t idle_bytes(bfc_client *client, uint32_t partition)
{
        struct magazine_sums sums;
        uint64_t n_bytes = 0;

        streams_collect(client);
        pthread_mutex_lock(&client->lock);
        magazines_read(client->magazines, &sums);
        if (client->cache)
                n_bytes = cache_idle_bytes(client->cache, partition);
        pthread_mutex_unlock(&client->lock);
        if (partition == client->partition) /* parked there, and cut as the cache sees it */
                n_bytes += sums.bytes_parked;
        return n_bytes;
}

BFC_API int bfc_mem_get_info(bfc_client *client, const char *partition, size_t *ret_free_bytes,
                             size_t *ret_total_bytes)
{
        struct bfc_tenant_usage usage;
        Bfcd__Room room = BFCD__ROOM__INIT;
        uint64_t n_bytes;
        uint32_t index = 0;
        int r = client_check(client);

        if (r == 0 && (!ret_free_bytes || !ret_total_bytes))
                r = error_set(-EINVAL, "bfc_mem_get_info: ret_free_bytes or ret_total_bytes is NULL");
        if (r == 0)
                r = client_partition_index(client, partition, &index);
        if (r == 0)
                r = usage_ask(client, index, &usage, &room);
        if (r < 0)
                return r;
        n_bytes = room.bytes_free + idle_bytes(client, index);
        *ret_free_bytes = n_bytes < room.bytes_total ? n_bytes : room.bytes_total;
        *ret_total_bytes = room.bytes_total;
        return 0;
}
