/* What only the proxy of the driver (preload/) asks for: memory pools without memory, managed memory that is the
 * device's, and arrays that take none. cuGetProcAddress() does not find these functions.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/fake_cuda/fake.h"

#ifndef BFC_CUDA_REAL_HEADER

#include <stdlib.h>

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

API CUresult cuArrayDestroy(CUarray array)
{
        if (!array)
                return CUDA_ERROR_INVALID_HANDLE;
        free(array);
        return CUDA_SUCCESS;
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

#endif
