/* Other functions that only the proxy of the driver (integrations/preload/) and frameworks ask for. cuGetProcAddress() finds those of
 * extra.c, array.c, graph.c, made.c, managed.c, pinned.c and pool.c in a table at the end only.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/fake_cuda/fake.h"

#ifndef BFC_CUDA_REAL_HEADER

#include <string.h>

#include "integrations/preload/api.h"

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

/* It has no handles of memory for other devices, and no multicast objects. */
CUresult cuMemGetHandleForAddressRange(void *ret_handle, CUdeviceptr pointer, size_t n_bytes, int type,
                                       unsigned long long flags);

API CUresult cuMemGetHandleForAddressRange(void *ret_handle, CUdeviceptr pointer, size_t n_bytes, int type,
                                           unsigned long long flags)
{
        (void)pointer;
        (void)type;
        (void)flags;
        return ret_handle && n_bytes > 0 ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMulticastCreate(CUmemGenericAllocationHandle *ret_handle, const void *prop);

API CUresult cuMulticastCreate(CUmemGenericAllocationHandle *ret_handle, const void *prop)
{
        return ret_handle && prop ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_VALUE;
}

/* ---- by cuGetProcAddress() ------------------------------------------------------------ */

/* Of this form, or of another one that the table does not look at. */
CUresult cuMemPrefetchAsync(void);
CUresult cuGraphCreate(void), cuGraphAddMemAllocNode(void), cuGraphAddMemFreeNode(void),
        cuGraphAddChildGraphNode(void);
CUresult cuMemHostAlloc(void), cuMemAllocHost_v2(void), cuMemFreeHost(void),
        cuMemHostGetDevicePointer_v2(void);

/* The newest variant that is not newer than version. */
void *fake_extra(const char *base, int version, bool is_per_thread)
{
        static const struct {
                const char *base;
                int version;
                void (*legacy)(void), (*per_thread)(void);
        } functions[] = {
#define E(base, version, symbol) { #base, version, (void (*)(void))symbol, (void (*)(void))symbol }
#define S(base, version)                                                                                     \
        {                                                                                                    \
#base, version, (void (*)(void))base, (void (*)(void))base##_ptsz                            \
        }
                S(cuMemAllocAsync, 11020),
                S(cuMemAllocFromPoolAsync, 11020),
                S(cuMemFreeAsync, 11020),
                S(cuGraphInstantiateWithParams, 12000),
                S(cuGraphLaunch, 10000),
                S(cuGraphUpload, 11010),
                E(cuArray3DCreate, 3020, cuArray3DCreate_v2),
                E(cuArrayCreate, 3020, cuArrayCreate_v2),
                E(cuArrayDestroy, 2000, cuArrayDestroy),
                E(cuCtxCreate, 2000, cuCtxCreate),
                E(cuCtxCreate, 3020, cuCtxCreate_v2),
                E(cuCtxCreate, 11040, cuCtxCreate_v3),
                E(cuCtxCreate, 12050, cuCtxCreate_v4),
                E(cuCtxDestroy, 4000, cuCtxDestroy_v2),
                E(cuCtxDetach, 2000, cuCtxDetach),
                E(cuDeviceGetGraphMemAttribute, 11040, cuDeviceGetGraphMemAttribute),
                E(cuDeviceGraphMemTrim, 11040, cuDeviceGraphMemTrim),
                E(cuGraphAddChildGraphNode, 10000, cuGraphAddChildGraphNode),
                E(cuGraphAddMemAllocNode, 11040, cuGraphAddMemAllocNode),
                E(cuGraphAddMemFreeNode, 11040, cuGraphAddMemFreeNode),
                E(cuGraphChildGraphNodeGetGraph, 10000, cuGraphChildGraphNodeGetGraph),
                E(cuGraphCreate, 10000, cuGraphCreate),
                E(cuGraphExecDestroy, 10000, cuGraphExecDestroy),
                E(cuGraphGetNodes, 10000, cuGraphGetNodes),
                E(cuGraphInstantiate, 10000, cuGraphInstantiate),
                E(cuGraphInstantiate, 11000, cuGraphInstantiate_v2),
                E(cuGraphInstantiate, 12000, cuGraphInstantiateWithFlags),
                E(cuGraphInstantiateWithFlags, 11040, cuGraphInstantiateWithFlags),
                E(cuGraphMemAllocNodeGetParams, 11040, cuGraphMemAllocNodeGetParams),
                E(cuGraphNodeGetType, 10000, cuGraphNodeGetType),
                E(cuDeviceGetDefaultMemPool, 11020, cuDeviceGetDefaultMemPool),
                E(cuDeviceGetMemPool, 11020, cuDeviceGetMemPool),
                E(cuDeviceSetMemPool, 11020, cuDeviceSetMemPool),
                E(cuGreenCtxCreate, 12040, cuGreenCtxCreate),
                E(cuGreenCtxDestroy, 12040, cuGreenCtxDestroy),
                E(cuMemAllocHost, 3020, cuMemAllocHost_v2),
                E(cuMemAllocManaged, 6000, cuMemAllocManaged),
                E(cuMemAllocPitch, 3020, cuMemAllocPitch_v2),
                E(cuMemFreeHost, 2000, cuMemFreeHost),
                E(cuMemHostAlloc, 2020, cuMemHostAlloc),
                E(cuMemHostGetDevicePointer, 3020, cuMemHostGetDevicePointer_v2),
                E(cuMemPoolCreate, 11020, cuMemPoolCreate),
                E(cuMemPoolDestroy, 11020, cuMemPoolDestroy),
                E(cuMemPoolGetAttribute, 11020, cuMemPoolGetAttribute),
                E(cuMemPoolSetAccess, 11020, cuMemPoolSetAccess),
                E(cuMemPoolSetAttribute, 11020, cuMemPoolSetAttribute),
                E(cuMemPoolTrimTo, 11020, cuMemPoolTrimTo),
                E(cuMemPrefetchAsync, 8000, cuMemPrefetchAsync),
                E(cuMipmappedArrayCreate, 5000, cuMipmappedArrayCreate),
                E(cuMipmappedArrayDestroy, 5000, cuMipmappedArrayDestroy),
                E(cuPointerGetAttributes, 7000, cuPointerGetAttributes),
#undef E
#undef S
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
