/* Access inside blocks: descriptions, copies, and bfc_pool; see bfcclient.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A pool is one block, from whose front pieces are cut, and which is reset as a whole. A piece costs one
 * compare-and-swap, so any number of threads may take pieces at the same time. A pool does not know the
 * device: its user knows which work still uses old pieces.
 *
 * Invariant of a pool: n_used <= n_bytes, both multiples of PIECE_BYTES. */
#include <bfcclient.h>

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/client.h"
#include "client/park.h"
#include "client/streams.h"
#include "proto/region.h"

#define PIECE_BYTES ((size_t)256)

/* The lock is held. */
static void info_add_origin(const bfc_client *client, const void *ptr, struct bfc_block_info *info)
{
        uint64_t at = info->offset + (uint64_t)((uintptr_t)ptr - (uintptr_t)info->base);
        struct region_origin origin;

        if (regions_origin(&client->regions, info->region_id, info->offset, &origin) < 0)
                return; /* it is parked */
        info->share = origin.share == DEVICE_SHARE_FD ? BFC_SHARE_FD : BFC_SHARE_CUDA_IPC;
        info->extent_bytes = origin.n_bytes;
        info->extent_offset = info->offset - origin.offset;
        memcpy(info->handle, origin.handle, sizeof(info->handle));
        if (regions_origin(&client->regions, info->region_id, at, &origin) == 0) {
                info->ptr_extent_bytes = origin.n_bytes;
                info->ptr_extent_offset = at - origin.offset;
        }
}

/* The lock is held. */
static void info_describe(const bfc_client *client, const struct block *block, const void *ptr,
                          struct bfc_block_info *ret)
{
        *ret = (struct bfc_block_info){
                .block_id = block->stream_alloc ? streams_block_id(block)
                            : block->slab       ? cache_block_id(block)
                                                : block->block_id,
                .region_id = block->region_id,
                .offset = block->offset,
                .n_bytes = block->n_bytes,
                .n_requested = block->n_requested,
                .block_offset = block->stream_alloc ? streams_offset(block)
                                : block->slab       ? cache_offset(block)
                                                    : 0,
                .base = (void *)(uintptr_t)block->ptr,
        };
        ret->is_parked = block->is_parked;
        info_add_origin(client, ptr, ret);
        ret->region_id = region_shown_id(block->region_id);
}

static void info_add_device(const bfc_client *client, uint32_t partition, struct bfc_block_info *info)
{
        struct bfc_partition_info p;

        client_describe_partition(client, partition, &p);
        info->partition = p.partition;
        info->device = p.device;
        info->device_ordinal = p.device_ordinal;
        memcpy(info->device_uuid, p.device_uuid, sizeof(info->device_uuid));
}

BFC_API int bfc_block_info(bfc_client *client, const void *ptr, struct bfc_block_info *ret)
{
        uint32_t partition = UINT32_MAX;
        struct bfc_block_info info;
        const struct block *block;
        int r = client_check(client);

        if (r == 0)
                r = struct_check("bfc_block_info", ret, sizeof(*ret));
        if (r < 0)
                return r;
        pthread_mutex_lock(&client->lock);
        do
                block = blocks_find_around(&client->blocks, ptr, 1);
        while (!block && client_wait_parkable(client, ptr));
        if (block) {
                info_describe(client, block, ptr, &info);
                partition = regions_partition(&client->regions, block->region_id);
        }
        pthread_mutex_unlock(&client->lock);
        if (!block)
                return error_set(-EINVAL, "%p is not inside a block of this client", ptr);
        if (partition < client->hello->hello->n_partitions)
                info_add_device(client, partition, &info);
        struct_fill(ret, ret->struct_size, &info, sizeof(info));
        return 0;
}

BFC_API int bfc_extent_fd(bfc_client *client, const void *ptr, int *ret_fd)
{
        const struct block *block;
        int r = client_check(client), fd = -1;

        if (r < 0)
                return r;
        if (!ret_fd)
                return error_set(-EINVAL, "bfc_extent_fd: no place for the fd");
        pthread_mutex_lock(&client->lock);
        block = blocks_find_around(&client->blocks, ptr, 1);
        if (block)
                fd = regions_fd(&client->regions, block->region_id);
        if (fd >= 0)
                fd = fcntl(fd, F_DUPFD_CLOEXEC, 3);
        else
                r = -ENOTSUP;
        pthread_mutex_unlock(&client->lock);
        if (!block)
                return error_set(-EINVAL, "%p is not inside a block of this client", ptr);
        if (r == -ENOTSUP)
                return error_set(
                        r,
                        "the block has no fd: it must be allocated with BFC_SHAREABLE, on a GPU with 'share: fd', "
                        "and have an extent of its own");
        if (fd < 0)
                return error_set(
                        -EMFILE,
                        "the process is at its limit of open files: raise RLIMIT_NOFILE (ulimit -n)");
        *ret_fd = fd;
        return 0;
}

/* ---- copies ------------------------------------------------------------------ */

static int copy_failed(int error)
{
        switch (error) {
        case -EBUSY:
                return error_set(error,
                                 "the copy would have to wait for a stream that is being captured: copy "
                                 "after the capture");
        case -ENODEV:
                return error_set(error, "the device is lost");
        case -EIO:
                return error_set(error, "this process's CUDA context is broken: an earlier kernel or call "
                                        "broke it");
        default:
                return error_set(error, "the copy failed: %s", strerror(-error));
        }
}

/* Where bytes of a block are. */
struct place {
        struct device_range *range;
        uint64_t offset;
        const void *
                used; /* the parkable block, which the copy uses: nothing parks it meanwhile; NULL: not parkable */
};

/* A block's range changes only when the block is gone or parked, so the copy needs no lock. */
static int locate(bfc_client *client, const void *ptr, size_t n_bytes, bool writes, struct place *ret)
{
        const struct block *block;
        int r = 0;

        pthread_mutex_lock(&client->lock);
        do
                block = blocks_find_around(&client->blocks, ptr, n_bytes);
        while (!block && client_wait_parkable(client, ptr));
        if (!block)
                r = error_set(-EINVAL, "%zu bytes at %p are not inside a block of this client", n_bytes, ptr);
        else if (block->is_parked)
                r = error_set(-EBUSY, "the block at %p is parked: wake it first", ptr);
        else if (writes && shared_is_read_only(client, block->ptr))
                r = error_set(-EACCES, "the block at %p is attached read-only", ptr);
        else if (block->parkable)
                client_begin_copy(block->parkable);
        if (r == 0)
                *ret = (struct place){
                        .range = regions_range(&client->regions, block->region_id),
                        .offset = block->offset + (uint64_t)((uintptr_t)ptr - (uintptr_t)block->ptr),
                        .used = block->parkable ? block->ptr : NULL,
                };
        pthread_mutex_unlock(&client->lock);
        return r;
}

/* One of src and dst is NULL. */
static int copy(bfc_client *client, const void *ptr, const void *src, void *dst, size_t n_bytes)
{
        struct place place = { .range = NULL };
        int r = locate(client, ptr, n_bytes, src != NULL, &place);

        if (r < 0)
                return r;
        r = src ? device_range_write(place.range, place.offset, src, n_bytes)
                : device_range_read(place.range, place.offset, n_bytes, dst);
        if (place.used)
                client_end_copy(client, place.used);
        return r < 0 ? copy_failed(r) : 0;
}

BFC_API int bfc_write(bfc_client *client, void *ptr, const void *src, size_t n_bytes)
{
        int r = client_check(client);

        if (r < 0 || n_bytes == 0)
                return r;
        return src ? copy(client, ptr, src, NULL, n_bytes) : error_set(-EINVAL, "bfc_write: src is NULL");
}

BFC_API int bfc_read(bfc_client *client, void *dst, const void *ptr, size_t n_bytes)
{
        int r = client_check(client);

        if (r < 0 || n_bytes == 0)
                return r;
        return dst ? copy(client, ptr, NULL, dst, n_bytes) : error_set(-EINVAL, "bfc_read: dst is NULL");
}

/* ---- pools ------------------------------------------------------------------- */

struct bfc_pool {
        bfc_client *client;
        unsigned char *block;
        size_t n_bytes;
        _Atomic size_t n_used;
};

/* 0 if the pool can be used. */
static int pool_check(const bfc_pool *pool)
{
        if (!pool)
                return error_set(-EINVAL, "pool is NULL");
        return client_check(pool->client);
}

/* In whole pieces; 0 if there are none of that size. */
static size_t round_up(size_t n_bytes)
{
        return n_bytes > SIZE_MAX - (PIECE_BYTES - 1) ? 0 : (n_bytes + PIECE_BYTES - 1) & ~(PIECE_BYTES - 1);
}

BFC_API int bfc_pool_new(bfc_client *client, size_t n_bytes, bfc_pool **ret_pool)
{
        bfc_pool *pool;
        void *block;
        int r;

        if (!ret_pool)
                return error_set(-EINVAL, "bfc_pool_new: ret_pool is NULL");
        pool = calloc(1, sizeof(*pool));
        if (!pool)
                return error_no_memory();
        r = bfc_malloc(client, n_bytes, &block);
        if (r < 0) {
                free(pool);
                return r;
        }
        pool->client = client;
        pool->block = block;
        pool->n_bytes = round_up(n_bytes);
        *ret_pool = pool;
        return 0;
}

BFC_API int bfc_pool_alloc(bfc_pool *pool, size_t n_bytes, void **ret_ptr)
{
        size_t piece = round_up(n_bytes), n_used;
        int r = pool_check(pool);

        if (r < 0)
                return r;
        if (!ret_ptr)
                return error_set(-EINVAL, "bfc_pool_alloc: ret_ptr is NULL");
        if (n_bytes == 0)
                return error_set(-EINVAL, "the size is 0 bytes: request at least 1 byte");
        n_used = atomic_load_explicit(&pool->n_used, memory_order_relaxed);
        do {
                if (piece == 0 || piece > pool->n_bytes - n_used)
                        return error_set(-ENOMEM,
                                         "%zu bytes do not fit in the pool: its size is %zu bytes, and "
                                         "%zu bytes are used",
                                         n_bytes, pool->n_bytes, n_used);
        } while (!atomic_compare_exchange_weak_explicit(&pool->n_used, &n_used, n_used + piece,
                                                        memory_order_relaxed, memory_order_relaxed));
        *ret_ptr = pool->block + n_used;
        return 0;
}

BFC_API int bfc_pool_reset(bfc_pool *pool)
{
        int r = pool_check(pool);

        if (r == 0)
                atomic_store_explicit(&pool->n_used, 0, memory_order_relaxed);
        return r;
}

BFC_API int bfc_pool_free(bfc_pool *pool)
{
        int r;

        if (!pool)
                return 0;
        r = bfc_free(pool->client, pool->block);
        if (r != -EBUSY && r != -ENOMEM && r != -EIO)
                free(pool);
        return r;
}
