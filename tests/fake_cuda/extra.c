/* What only the proxy of the driver (preload/) and frameworks ask for: memory pools without memory, managed memory that
 * is the device's, arrays that take none, and others. cuGetProcAddress() finds those in a table at the end only.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/fake_cuda/fake.h"

#ifndef BFC_CUDA_REAL_HEADER

#include <stdlib.h>
#include <string.h>

#include "preload/api.h"

API CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *ret_pool, CUdevice device)
{
        struct fake_device *d = fake_device_get(device);

        if (!d || !ret_pool)
                return d ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_DEVICE;
        *ret_pool = (CUmemoryPool)(void *)d;
        return CUDA_SUCCESS;
}

API CUresult cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute which, void *ret_value)
{
        (void)which;
        if (!pool || !ret_value)
                return CUDA_ERROR_INVALID_VALUE;
        *(cuuint64_t *)ret_value = 0;
        return CUDA_SUCCESS;
}

CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute which, void *value);

API CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute which, void *value)
{
        (void)which;
        return pool && value ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *what, size_t n)
{
        (void)n;
        return pool && what ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t n_bytes)
{
        (void)n_bytes;
        return pool ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuMemAllocManaged(CUdeviceptr *ret_pointer, size_t n_bytes, unsigned int flags)
{
        return flags == 1 || flags == 2 ? cuMemAlloc_v2(ret_pointer, n_bytes) : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuArrayCreate_v2(CUarray *ret_array, const CUDA_ARRAY_DESCRIPTOR *what)
{
        *ret_array = what->Width > 0 ? malloc(1) : NULL;
        return *ret_array ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuArray3DCreate_v2(CUarray *ret_array, const CUDA_ARRAY3D_DESCRIPTOR *what)
{
        return cuArrayCreate_v2(ret_array, &(CUDA_ARRAY_DESCRIPTOR){ .Width = what->Width });
}

API CUresult cuMipmappedArrayCreate(CUmipmappedArray *ret_array, const CUDA_ARRAY3D_DESCRIPTOR *what,
                                    unsigned int n_levels)
{
        return n_levels > 0 ? cuArray3DCreate_v2((CUarray *)ret_array, what) : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuMipmappedArrayDestroy(CUmipmappedArray array)
{
        return cuArrayDestroy((CUarray)array);
}

API CUresult cuArrayDestroy(CUarray array)
{
        if (!array)
                return CUDA_ERROR_INVALID_HANDLE;
        free(array);
        return CUDA_SUCCESS;
}

API CUresult cuMemMapArrayAsync(CUarrayMapInfo *infos, unsigned int n, CUstream stream)
{
        (void)n, (void)stream;
        return infos ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuMemMapArrayAsync_ptsz(CUarrayMapInfo *infos, unsigned int n, CUstream stream)
{
        return cuMemMapArrayAsync(infos, n, stream);
}

/* Any handle. */
API CUresult cuLogicalEndpointBindMem(unsigned int endpoint, CUdevice device, cuuint64_t endpoint_offset,
                                      CUmemGenericAllocationHandle handle, cuuint64_t offset,
                                      cuuint64_t n_bytes, unsigned long long flags)
{
        (void)endpoint, (void)device, (void)endpoint_offset, (void)handle, (void)offset, (void)flags;
        return n_bytes > 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Pinned memory is memory. */
CUresult cuMemHostAlloc(void **ret, size_t n_bytes, unsigned int flags);
CUresult cuMemFreeHost(void *p);

API CUresult cuMemHostAlloc(void **ret, size_t n_bytes, unsigned int flags)
{
        (void)flags;
        if (!ret || n_bytes == 0)
                return CUDA_ERROR_INVALID_VALUE;
        return posix_memalign(ret, 4096, n_bytes) == 0 ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

API CUresult cuMemFreeHost(void *p)
{
        free(p);
        return CUDA_SUCCESS;
}

/* Of equal bytes, as frameworks clear memory. */
CUresult cuMemsetD32Async(CUdeviceptr to, unsigned int value, size_t n, CUstream stream);

API CUresult cuMemsetD32Async(CUdeviceptr to, unsigned int value, size_t n, CUstream stream)
{
        if (value != (value & 0xff) * 0x01010101u || n > SIZE_MAX / 4)
                return CUDA_ERROR_NOT_SUPPORTED;
        return cuMemsetD8Async(to, (unsigned char)value, 4 * n, stream);
}

/* The attributes of no memory are 0, as NVIDIA's driver has it. */
API CUresult cuPointerGetAttributes(unsigned int n, CUpointer_attribute *which, void **ret_values,
                                    CUdeviceptr pointer)
{
        for (unsigned int i = 0; i < n; i++)
                if (cuPointerGetAttribute(ret_values[i], which[i], pointer) != CUDA_SUCCESS)
                        *(CUdeviceptr *)ret_values[i] = 0;
        return CUDA_SUCCESS;
}

/* ---- in the order of a stream: at once ------------------------------------------------ */

API CUresult cuMemAllocAsync(CUdeviceptr *ret_pointer, size_t n_bytes, CUstream stream)
{
        (void)stream;
        return cuMemAlloc_v2(ret_pointer, n_bytes);
}

API CUresult cuMemAllocAsync_ptsz(CUdeviceptr *ret_pointer, size_t n_bytes, CUstream stream)
{
        return cuMemAllocAsync(ret_pointer, n_bytes, stream);
}

API CUresult cuMemAllocFromPoolAsync(CUdeviceptr *ret_pointer, size_t n_bytes, CUmemoryPool pool,
                                     CUstream stream)
{
        return pool ? cuMemAllocAsync(ret_pointer, n_bytes, stream) : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *ret_pointer, size_t n_bytes, CUmemoryPool pool,
                                          CUstream stream)
{
        return cuMemAllocFromPoolAsync(ret_pointer, n_bytes, pool, stream);
}

API CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream stream)
{
        CUresult result = cuStreamSynchronize(stream);

        return result == CUDA_SUCCESS ? cuMemFree_v2(pointer) : result;
}

API CUresult cuMemFreeAsync_ptsz(CUdeviceptr pointer, CUstream stream)
{
        return cuMemFreeAsync(pointer, stream);
}

/* ---- by cuGetProcAddress() ------------------------------------------------------------ */

void *fake_extra(const char *base, int version, bool is_per_thread)
{
        static const struct {
                const char *base;
                int version;
                void (*legacy)(void), (*per_thread)(void);
        } functions[] = {
#define E(name, per_thread) { #name, 11020, (void (*)(void))name, (void (*)(void))per_thread }
                E(cuMemAllocAsync, cuMemAllocAsync_ptsz),
                E(cuMemAllocFromPoolAsync, cuMemAllocFromPoolAsync_ptsz),
                E(cuMemFreeAsync, cuMemFreeAsync_ptsz),
                E(cuMemPoolGetAttribute, cuMemPoolGetAttribute),
                E(cuMemPoolSetAccess, cuMemPoolSetAccess),
                E(cuMemPoolTrimTo, cuMemPoolTrimTo),
                E(cuMemAllocManaged, cuMemAllocManaged),
                E(cuPointerGetAttributes, cuPointerGetAttributes),
#undef E
        };
        void *found = NULL;

        for (size_t i = 0; i < sizeof(functions) / sizeof(functions[0]); i++)
                if (strcmp(functions[i].base, base) == 0 && functions[i].version <= version)
                        memcpy(&found, is_per_thread ? &functions[i].per_thread : &functions[i].legacy,
                               sizeof(found));
        return found;
}

#else

void *fake_extra(const char *base, int version, bool is_per_thread)
{
        (void)base, (void)version, (void)is_per_thread;
        return NULL;
}

#endif
