/* Allocations in the order of a stream, by bfcd.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A captured stream's allocations belong to its graph and are the driver's: outside of bfcd, and not counted. A device's
 * pools are the partition: what a pool of the driver takes at once is not known before. Only of those whose memory can be
 * shared the allocations are the driver's, and charged. */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/queue.h>

#include "preload/broker.h"
#include "preload/charge.h"
#include "preload/outside.h"

/* False also where the driver will refuse the stream. */
static bool is_captured(CUstream stream)
{
        CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;

        return cuStreamIsCapturing(stream, &status) == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT ||
               status != CU_STREAM_CAPTURE_STATUS_NONE;
}

/* The GPU of a stream, which need not be that of the current context. */
static CUresult stream_gpu(CUstream stream, struct gpu **ret)
{
        CUcontext context, top;
        CUresult result;

        if (!stream || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD)
                return broker_current_gpu(ret);
        result = cuStreamGetCtx(stream, &context);
        if (result == CUDA_SUCCESS)
                result = cuCtxPushCurrent_v2(context);
        if (result != CUDA_SUCCESS)
                return result;
        result = broker_current_gpu(ret);
        cuCtxPopCurrent_v2(&top);
        return result;
}

/* A pool of the program. */
struct pool {
        LIST_ENTRY(pool) link;
        CUmemoryPool pool;
        CUdevice device;
};

static LIST_HEAD(, pool) pools = LIST_HEAD_INITIALIZER(pools);
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void in_child(void)
{
        lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
        LIST_INIT(&pools);
}

static void __attribute__((constructor)) watch_forks(void)
{
        pthread_atfork(NULL, NULL, in_child);
}

/* -1: it is none of the list. */
static CUdevice pool_device(CUmemoryPool pool)
{
        const struct pool *each;
        CUdevice ret = -1;

        pthread_mutex_lock(&lock);
        LIST_FOREACH(each, &pools, link)
        {
                if (each->pool == pool)
                        ret = each->device;
        }
        pthread_mutex_unlock(&lock);
        return ret;
}

/* The GPU of whose partition the pool is, as far as bfcd has it. */
static struct gpu *pool_gpu(CUmemoryPool pool)
{
        CUdevice device = pool_device(pool);
        CUmemoryPool other;
        int n = 0;

        if (device >= 0)
                return broker_gpu(device);
        if (cuDeviceGetCount(&n) != CUDA_SUCCESS)
                return NULL;
        for (int i = 0; i < n; i++)
                if (cuDeviceGetDefaultMemPool(&other, i) == CUDA_SUCCESS && other == pool)
                        return broker_gpu(i);
        return NULL;
}

static CUresult alloc_block(struct gpu *gpu, size_t n_bytes, CUstream stream, CUdeviceptr *ret)
{
        bfc_client *client;
        CUresult result = broker_client(gpu, &client);
        void *pointer;
        int r;

        if (result != CUDA_SUCCESS)
                return result;
        do
                r = bfc_malloc_async_in(client, gpu->partition, n_bytes, (uintptr_t)stream, &pointer);
        while (r < 0 && charge_makes_room(gpu, r));
        if (r == -EBUSY) /* the device is drained */
                return CUDA_ERROR_OUT_OF_MEMORY;
        if (r == 0)
                *ret = (CUdeviceptr)(uintptr_t)pointer;
        return broker_result(r);
}

/* pool: NULL for the device's own. */
static CUresult alloc_outside(struct gpu *gpu, size_t n_bytes, CUmemoryPool pool, CUstream stream,
                              CUdeviceptr *ret)
{
        struct outside o = { .gpu = gpu,
                             .n_bytes = n_bytes,
                             .function = pool ? "cuMemAllocFromPoolAsync" : "cuMemAllocAsync" };
        CUresult result = outside_begin(&o);

        if (result != CUDA_SUCCESS)
                return result;
        result = pool ? real_cuMemAllocFromPoolAsync(ret, n_bytes, pool, stream)
                      : real_cuMemAllocAsync(ret, n_bytes, stream);
        return outside_end(&o, result, OUTSIDE_POINTER, *ret);
}

static CUresult alloc(CUdeviceptr *ret_pointer, size_t n_bytes, CUmemoryPool pool, CUstream stream)
{
        bool is_graphs = is_captured(stream);
        struct gpu *gpu;
        IN_CALL;
        CUresult result;

        result = stream_gpu(stream, &gpu);
        if (result != CUDA_SUCCESS)
                return result;
        if (!ret_pointer || n_bytes == 0)
                return CUDA_ERROR_INVALID_VALUE;
        if (gpu && !is_graphs && (!pool || pool_gpu(pool) == gpu))
                return alloc_block(gpu, n_bytes, stream, ret_pointer);
        return alloc_outside(is_graphs ? NULL : gpu, n_bytes, pool, stream, ret_pointer);
}

static CUstream per_thread(CUstream stream)
{
        return stream ? stream : CU_STREAM_PER_THREAD;
}

CUresult cuMemAllocAsync(CUdeviceptr *ret_pointer, size_t n_bytes, CUstream stream)
{
        return alloc(ret_pointer, n_bytes, NULL, stream);
}

CUresult cuMemAllocAsync_ptsz(CUdeviceptr *ret_pointer, size_t n_bytes, CUstream stream)
{
        return alloc(ret_pointer, n_bytes, NULL, per_thread(stream));
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr *ret_pointer, size_t n_bytes, CUmemoryPool pool, CUstream stream)
{
        return alloc(ret_pointer, n_bytes, pool, stream);
}

CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *ret_pointer, size_t n_bytes, CUmemoryPool pool,
                                      CUstream stream)
{
        return alloc(ret_pointer, n_bytes, pool, per_thread(stream));
}

CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream stream)
{
        struct outside_entry *entry;
        bfc_client *client;
        size_t cursor = 0;
        CUdevice device;
        IN_CALL;
        CUresult result = broker_device(&device);
        int r = -EINVAL;

        if (result != CUDA_SUCCESS)
                return result;
        if (pointer && !is_captured(stream))
                while (r == -EINVAL && (client = broker_next_client(&cursor)))
                        r = bfc_free_async(client, (void *)(uintptr_t)pointer, (uintptr_t)stream);
        if (r != -EINVAL)
                return broker_result(r);
        entry = outside_take(OUTSIDE_POINTER, pointer);
        return outside_took(entry, real_cuMemFreeAsync(pointer, stream));
}

CUresult cuMemFreeAsync_ptsz(CUdeviceptr pointer, CUstream stream)
{
        return cuMemFreeAsync(pointer, per_thread(stream));
}

/* ---- pools ------------------------------------------------------------------------- */

CUresult cuMemPoolCreate(CUmemoryPool *ret_pool, const CUmemPoolProps *what)
{
        CUresult result = real_cuMemPoolCreate(ret_pool, what);
        struct pool *pool;

        if (result != CUDA_SUCCESS || what->handleTypes != 0 ||
            what->location.type != CU_MEM_LOCATION_TYPE_DEVICE || !(pool = malloc(sizeof(*pool))))
                return result;
        *pool = (struct pool){ .pool = *ret_pool, .device = what->location.id };
        pthread_mutex_lock(&lock);
        LIST_INSERT_HEAD(&pools, pool, link);
        pthread_mutex_unlock(&lock);
        return result;
}

/* The lock is held across the call, in which the driver frees the handle. Blocks outlive it, as allocations do. */
CUresult cuMemPoolDestroy(CUmemoryPool pool)
{
        struct pool *each;
        CUresult result;

        pthread_mutex_lock(&lock);
        result = real_cuMemPoolDestroy(pool);
        LIST_FOREACH(each, &pools, link)
        {
                if (each->pool == pool)
                        break;
        }
        if (each && result == CUDA_SUCCESS) {
                LIST_REMOVE(each, link);
                free(each);
        }
        pthread_mutex_unlock(&lock);
        return result;
}

/* NULL: it is no pool of bfcd's, or has no memory. */
static bfc_client *pool_client(CUmemoryPool pool, struct bfc_client_stats *ret_stats)
{
        const struct gpu *gpu = pool_gpu(pool);
        bfc_client *client = gpu ? __atomic_load_n(&gpu->client, __ATOMIC_ACQUIRE) : NULL;

        *ret_stats = (struct bfc_client_stats){ .struct_size = sizeof(*ret_stats) };
        return client && bfc_stats_in(client, gpu->partition, ret_stats) == 0 ? client : NULL;
}

CUresult cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute which, void *ret_value)
{
        struct bfc_client_stats stats;
        IN_CALL;
        CUresult result = real_cuMemPoolGetAttribute(pool, which, ret_value);

        if (result != CUDA_SUCCESS || !pool_client(pool, &stats))
                return result;
        if (which == CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)
                *(cuuint64_t *)ret_value = stats.bytes_reserved;
        else if (which == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH)
                *(cuuint64_t *)ret_value = stats.peak_bytes_reserved;
        else if (which == CU_MEMPOOL_ATTR_USED_MEM_CURRENT)
                *(cuuint64_t *)ret_value = stats.bytes_in_use;
        else if (which == CU_MEMPOOL_ATTR_USED_MEM_HIGH)
                *(cuuint64_t *)ret_value = stats.peak_bytes_in_use;
        return result;
}

CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t n_bytes)
{
        struct bfc_client_stats stats;
        IN_CALL;
        CUresult result = real_cuMemPoolTrimTo(pool, n_bytes);
        bfc_client *client = result == CUDA_SUCCESS ? pool_client(pool, &stats) : NULL;

        if (client && stats.bytes_reserved > n_bytes)
                bfc_trim(client, stats.bytes_reserved - n_bytes);
        return result;
}

/* Blocks are in no pool, so the driver knows nothing of theirs. */
CUresult cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *what, size_t n)
{
        IN_CALL;
        CUresult result = real_cuMemPoolSetAccess(pool, what, n);
        struct gpu *gpu = result == CUDA_SUCCESS ? pool_gpu(pool) : NULL;

        for (size_t i = 0; result == CUDA_SUCCESS && gpu && i < n; i++)
                if (what[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
                    what[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
                        result = broker_enable_peer(gpu, what[i].location.id);
        return result;
}

/* ---- ends of streams ----------------------------------------------------------------- */

/* The library must not ask the driver about a stream that is gone. */
static CUresult end_stream(CUstream stream)
{
        bfc_client *client;
        size_t cursor = 0;
        int r = 0;

        while (r != -EBUSY && r != -ENOMEM && (client = broker_next_client(&cursor)))
                r = bfc_end_stream(client, (uintptr_t)stream);
        return r == -EBUSY || r == -ENOMEM ? broker_result(r) : CUDA_SUCCESS;
}

CUresult cuStreamDestroy(CUstream stream)
{
        IN_CALL;
        CUresult result = end_stream(stream);

        return result == CUDA_SUCCESS ? real_cuStreamDestroy(stream) : result;
}

CUresult cuStreamDestroy_v2(CUstream stream)
{
        IN_CALL;
        CUresult result = end_stream(stream);

        return result == CUDA_SUCCESS ? real_cuStreamDestroy_v2(stream) : result;
}
