/* Allocations in the order of a stream, by bfcd.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A captured stream's allocations belong to its graph and are the driver's: outside of bfcd, and not counted. So are
 * those of pools that the program makes, which are counted. A device's default pool is the partition. */
#include <errno.h>

#include "preload/broker.h"
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

/* The GPU whose default pool this is, as far as bfcd has it. */
static struct gpu *pool_gpu(CUmemoryPool pool)
{
        CUmemoryPool other;
        int n = 0;

        if (!broker_client() || cuDeviceGetCount(&n) != CUDA_SUCCESS)
                return NULL;
        for (int i = 0; i < n; i++)
                if (cuDeviceGetDefaultMemPool(&other, i) == CUDA_SUCCESS && other == pool)
                        return broker_gpu(i);
        return NULL;
}

static CUresult alloc_block(struct gpu *gpu, size_t n_bytes, CUstream stream, CUdeviceptr *ret)
{
        CUresult result = broker_check_room(gpu, n_bytes);
        void *pointer;
        int r;

        if (result != CUDA_SUCCESS)
                return result;
        r = bfc_malloc_async_in(gpu->client, gpu->partition, n_bytes, (uintptr_t)stream, &pointer);
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
        bfc_client *client = broker_client();
        struct outside_entry *entry;
        CUdevice device;
        CUresult result = broker_device(&device);
        int r = -EINVAL;

        if (result != CUDA_SUCCESS)
                return result;
        if (client && pointer && !is_captured(stream))
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

CUresult cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute which, void *ret_value)
{
        struct bfc_client_stats stats = { .struct_size = sizeof(stats) };
        CUresult result = real_cuMemPoolGetAttribute(pool, which, ret_value);
        struct gpu *gpu = result == CUDA_SUCCESS ? pool_gpu(pool) : NULL;

        if (!gpu || bfc_stats_in(gpu->client, gpu->partition, &stats) < 0)
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
        struct bfc_client_stats stats = { .struct_size = sizeof(stats) };
        CUresult result = real_cuMemPoolTrimTo(pool, n_bytes);
        struct gpu *gpu = result == CUDA_SUCCESS ? pool_gpu(pool) : NULL;

        if (gpu && bfc_stats_in(gpu->client, gpu->partition, &stats) == 0 && stats.bytes_reserved > n_bytes)
                bfc_trim(gpu->client, stats.bytes_reserved - n_bytes);
        return result;
}

/* ---- ends of streams ----------------------------------------------------------------- */

/* The library must not ask the driver about a stream that is gone. */
static CUresult end_stream(CUstream stream)
{
        bfc_client *client = broker_client();
        int r = client ? bfc_end_stream(client, (uintptr_t)stream) : 0;

        return r == -EBUSY || r == -ENOMEM ? broker_result(r) : CUDA_SUCCESS;
}

CUresult cuStreamDestroy(CUstream stream)
{
        CUresult result = end_stream(stream);

        return result == CUDA_SUCCESS ? real_cuStreamDestroy(stream) : result;
}

CUresult cuStreamDestroy_v2(CUstream stream)
{
        CUresult result = end_stream(stream);

        return result == CUDA_SUCCESS ? real_cuStreamDestroy_v2(stream) : result;
}
