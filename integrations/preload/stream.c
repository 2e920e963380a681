/* Allocations in the order of a stream, by bfcd.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A captured stream's allocations belong to its graph and are the driver's; see graph.c. A device's pools are the
 * partition. Only those whose memory can be shared are the driver's, and charged as it reserves memory for them. */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/queue.h>

#include "integrations/preload/charge.h"
#include "integrations/preload/charged_context.h"
#include "integrations/preload/outside.h"
#include "integrations/preload/reserved.h"

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
        enum { PARTITION, DRIVERS, MANAGED, ON_HOST } kind;
        struct reserved memory; /* DRIVERS */
        bool is_ended;          /* DRIVERS: for the program; it still has memory */
};

static LIST_HEAD(, pool) pools = LIST_HEAD_INITIALIZER(pools);
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool has_drivers; /* atomic: there was a pool of this kind */

static void in_child(void)
{
        lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
        LIST_INIT(&pools);
}

static void __attribute__((constructor)) watch_forks(void)
{
        pthread_atfork(NULL, NULL, in_child);
}

/* NULL: it is none of the list. */
static struct pool *find_pool(CUmemoryPool pool)
{
        struct pool *each;

        pthread_mutex_lock(&lock);
        LIST_FOREACH(each, &pools, link)
        {
                if (each->pool == pool)
                        break;
        }
        pthread_mutex_unlock(&lock);
        return each;
}

/* The GPU of whose partition the pool is, as far as bfcd has it. */
static struct gpu *pool_gpu(CUmemoryPool pool)
{
        const struct pool *own = find_pool(pool);
        CUmemoryPool other;
        int n = 0;

        if (own)
                return own->kind == PARTITION ? broker_gpu(own->device) : NULL;
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
        CUresult result = context_client(gpu, &client);
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

static CUresult call_driver(CUdeviceptr *ret, size_t n_bytes, CUmemoryPool pool, CUstream stream)
{
        return pool ? real_cuMemAllocFromPoolAsync(ret, n_bytes, pool, stream)
                    : real_cuMemAllocAsync(ret, n_bytes, stream);
}

/* pool: NULL for the device's own. */
static CUresult alloc_outside(struct gpu *gpu, size_t n_bytes, CUmemoryPool pool, bool is_managed,
                              CUstream stream, CUdeviceptr *ret)
{
        struct outside o = { .gpu = gpu,
                             .n_bytes = n_bytes,
                             .is_managed = is_managed,
                             .function = pool ? "cuMemAllocFromPoolAsync" : "cuMemAllocAsync" };
        CUresult result = outside_begin(&o);

        if (result != CUDA_SUCCESS)
                return result;
        result = call_driver(ret, n_bytes, pool, stream);
        return outside_end(&o, result, OUTSIDE_POINTER, *ret);
}

/* Of one whose memory can be shared. */
static CUresult alloc_drivers(struct pool *pool, size_t n_bytes, CUstream stream, CUdeviceptr *ret)
{
        struct gpu *gpu = broker_gpu(pool->device);
        uint64_t n_most = reserved_most(n_bytes);
        CUresult result;
        int r = -ENOTSUP;

        if (pool->is_ended)
                return CUDA_ERROR_INVALID_VALUE;
        if (gpu) {
                __atomic_store_n(&pool->memory.gpu, gpu, __ATOMIC_RELAXED);
                r = reserved_begin(&pool->memory, n_most, stream);
        }
        if (r == -ENOTSUP)
                return alloc_outside(gpu, n_bytes, pool->pool, false, stream, ret);
        if (r < 0)
                return r == -EBUSY ? CUDA_ERROR_OUT_OF_MEMORY : broker_result(r); /* the device is drained */
        result = call_driver(ret, n_bytes, pool->pool, stream);
        reserved_end(&pool->memory, n_most);
        return result;
}

/* The one that the program has set for the GPU, if the driver has its memory. */
static struct pool *current_of_driver(struct gpu *gpu)
{
        CUmemoryPool current;
        struct pool *pool;

        if (!__atomic_load_n(&has_drivers, __ATOMIC_RELAXED) ||
            cuDeviceGetMemPool(&current, broker_ordinal(gpu)) != CUDA_SUCCESS)
                return NULL;
        pool = find_pool(current);
        return pool && pool->kind == DRIVERS ? pool : NULL;
}

static CUresult alloc(CUdeviceptr *ret_pointer, size_t n_bytes, CUmemoryPool pool, CUstream stream)
{
        bool is_graphs = is_captured(stream);
        struct pool *own;
        struct gpu *gpu;
        IN_CALL;
        CUresult result;

        result = stream_gpu(stream, &gpu);
        if (result != CUDA_SUCCESS)
                return result;
        if (!ret_pointer || n_bytes == 0)
                return CUDA_ERROR_INVALID_VALUE;
        own = pool ? find_pool(pool) : gpu ? current_of_driver(gpu) : NULL;
        if (is_graphs || (own && own->kind == ON_HOST))
                return call_driver(ret_pointer, n_bytes, pool, stream);
        if (own && own->kind == DRIVERS)
                return alloc_drivers(own, n_bytes, stream, ret_pointer);
        if (gpu && (!pool || pool_gpu(pool) == gpu))
                return alloc_block(gpu, n_bytes, stream, ret_pointer);
        return alloc_outside(gpu, n_bytes, pool, own && own->kind == MANAGED, stream, ret_pointer);
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

static cuuint64_t used_bytes(CUmemoryPool pool)
{
        cuuint64_t n = 0;

        return real_cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &n) == CUDA_SUCCESS ? n : 0;
}

/* The lock is held across the call, in which the driver frees the handle. */
static CUresult destroy_locked(CUmemoryPool pool, struct pool *own)
{
        CUresult result;

        if (own)
                reserved_hide(&own->memory);
        result = real_cuMemPoolDestroy(pool);
        if (own)
                reserved_hidden(&own->memory, result == CUDA_SUCCESS);
        if (own && result == CUDA_SUCCESS) {
                LIST_REMOVE(own, link);
                free(own);
        }
        return result;
}

/* Pools that the program has destroyed, and whose memory it has freed since. */
static void destroy_ended_locked(void)
{
        struct pool *each, *next;

        for (each = LIST_FIRST(&pools); each; each = next) {
                next = LIST_NEXT(each, link);
                if (each->is_ended && used_bytes(each->pool) == 0)
                        (void)destroy_locked(each->pool, each);
        }
}

static struct pool *pool_of(CUmemoryPool pool, const CUmemPoolProps *what)
{
        int device = location_device(&what->location);
        struct pool *own = calloc(1, sizeof(*own));

        if (!own)
                return NULL;
        *own = (struct pool){ .pool = pool, .device = device, .kind = DRIVERS };
        if (device < 0)
                own->kind = ON_HOST;
        else if ((int)what->allocType == CU_MEM_ALLOCATION_TYPE_MANAGED)
                own->kind = MANAGED;
        else if (what->handleTypes == 0 && what->location.type == CU_MEM_LOCATION_TYPE_DEVICE)
                own->kind = PARTITION;
        own->memory = (struct reserved){ .pool = pool, .device = device };
        return own;
}

CUresult cuMemPoolCreate(CUmemoryPool *ret_pool, const CUmemPoolProps *what)
{
        IN_CALL;
        CUresult result = real_cuMemPoolCreate(ret_pool, what);
        struct pool *own = result == CUDA_SUCCESS ? pool_of(*ret_pool, what) : NULL;

        if (!own)
                return result;
        if (own->kind == DRIVERS)
                __atomic_store_n(&has_drivers, true, __ATOMIC_RELAXED);
        pthread_mutex_lock(&lock);
        destroy_ended_locked();
        LIST_INSERT_HEAD(&pools, own, link);
        pthread_mutex_unlock(&lock);
        return result;
}

/* The driver would keep the memory until all of it is freed, and not tell how much it is. So it is not told before. */
static void end_locked(struct pool *own)
{
        CUmemoryPool current;
        cuuint64_t none = 0;

        own->is_ended = true;
        (void)cuMemPoolSetAttribute(own->pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &none);
        if (cuDeviceGetMemPool(&current, own->device) == CUDA_SUCCESS && current == own->pool &&
            cuDeviceGetDefaultMemPool(&current, own->device) == CUDA_SUCCESS)
                (void)cuDeviceSetMemPool(own->device, current);
}

/* Blocks outlive it, as allocations do. */
CUresult cuMemPoolDestroy(CUmemoryPool pool)
{
        struct pool *own = find_pool(pool);
        CUresult result = CUDA_SUCCESS;
        IN_CALL;

        pthread_mutex_lock(&lock);
        if (own && own->is_ended)
                result = CUDA_ERROR_INVALID_VALUE;
        else if (own && own->memory.gpu && used_bytes(pool) > 0)
                end_locked(own);
        else
                result = destroy_locked(pool, own);
        destroy_ended_locked();
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
        struct pool *own = find_pool(pool);

        if (own && own->memory.gpu)
                reserved_settle(own->memory.gpu);
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
