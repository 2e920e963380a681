/* Allocations of the driver API by bfcd: blocks, their addresses, and how much there is.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Each function first asks the real driver for the current context, so its errors, as before cuInit() and in a forked
 * child, are the driver's. */
#include <errno.h>

#include "integrations/preload/charge.h"
#include "integrations/preload/charged_context.h"
#include "integrations/preload/outside.h"
#include "integrations/preload/reserved.h"

#define PITCH_BYTES ((size_t)512)         /* as drivers align rows */
#define SMALL_BYTES ((size_t)1024 * 1024) /* up to which the library divides blocks of the daemon */

/* With "share: cuda-ipc" the driver opens memory in one context, the primary one. */
static bool reaches_current(struct gpu *gpu)
{
        CUcontext current, primary;
        unsigned int flags;
        CUdevice device;
        int is_active = 0;
        bool is_same = false;

        if (gpu->share != BFC_SHARE_CUDA_IPC)
                return true;
        if (cuCtxGetCurrent(&current) != CUDA_SUCCESS)
                return false;
        if (current == __atomic_load_n(&gpu->primary, __ATOMIC_RELAXED))
                return true;
        if (cuCtxGetDevice(&device) != CUDA_SUCCESS ||
            cuDevicePrimaryCtxGetState(device, &flags, &is_active) != CUDA_SUCCESS || !is_active)
                return false;
        if (real_cuDevicePrimaryCtxRetain(&primary, device) == CUDA_SUCCESS) {
                is_same = primary == current;
                real_cuDevicePrimaryCtxRelease_v2(device);
        }
        if (is_same)
                __atomic_store_n(&gpu->primary, current, __ATOMIC_RELAXED);
        return is_same;
}

static CUresult alloc_block(struct gpu *gpu, size_t n_bytes, CUdeviceptr *ret)
{
        bfc_client *client;
        CUresult result = context_client(gpu, &client);
        void *pointer;
        int r;

        if (result != CUDA_SUCCESS)
                return result;
        do
                r = gpu->partition ? bfc_malloc_in(client, gpu->partition, n_bytes, &pointer)
                                   : bfc_malloc(client, n_bytes, &pointer);
        while (r < 0 && charge_makes_room(gpu, r));
        if (r == -EBUSY) /* the device is drained */
                return CUDA_ERROR_OUT_OF_MEMORY;
        if (r == 0)
                *ret = (CUdeviceptr)(uintptr_t)pointer;
        return broker_result(r);
}

CUresult cuMemAlloc_v2(CUdeviceptr *ret_pointer, size_t n_bytes)
{
        struct outside o = { .n_bytes = outside_whole(n_bytes), .function = "cuMemAlloc" };
        struct gpu *gpu;
        IN_CALL;
        CUresult result = broker_current_gpu(&gpu);

        if (result != CUDA_SUCCESS)
                return result;
        if (!ret_pointer || n_bytes == 0)
                return CUDA_ERROR_INVALID_VALUE;
        if (gpu && reaches_current(gpu))
                return alloc_block(gpu, n_bytes, ret_pointer);
        o.gpu = gpu;
        result = outside_begin(&o);
        if (result != CUDA_SUCCESS)
                return result;
        result = real_cuMemAlloc_v2(ret_pointer, n_bytes);
        return outside_end(&o, result, OUTSIDE_POINTER, *ret_pointer);
}

CUresult cuMemAllocPitch_v2(CUdeviceptr *ret_pointer, size_t *ret_pitch, size_t n_width, size_t n_height,
                            unsigned int n_element)
{
        size_t n_bytes, n_pitch;
        CUresult result;

        if (!ret_pointer || !ret_pitch || n_width == 0 || n_height == 0 ||
            (n_element != 4 && n_element != 8 && n_element != 16))
                return CUDA_ERROR_INVALID_VALUE;
        if (__builtin_add_overflow(n_width, PITCH_BYTES - 1, &n_pitch) ||
            __builtin_mul_overflow(n_pitch & ~(PITCH_BYTES - 1), n_height, &n_bytes))
                return CUDA_ERROR_OUT_OF_MEMORY;
        result = cuMemAlloc_v2(ret_pointer, n_bytes);
        if (result == CUDA_SUCCESS)
                *ret_pitch = n_pitch & ~(PITCH_BYTES - 1);
        return result;
}

/* Such memory moves between the GPU and the host, so it is outside of bfcd unless BFC_STRICT is set. */
CUresult cuMemAllocManaged(CUdeviceptr *ret_pointer, size_t n_bytes, unsigned int flags)
{
        struct outside o = { .n_bytes = n_bytes, .is_managed = true, .function = "cuMemAllocManaged" };
        IN_CALL;
        CUresult result = broker_current_gpu(&o.gpu);

        if (result == CUDA_SUCCESS)
                result = outside_begin(&o);
        if (result != CUDA_SUCCESS)
                return result;
        result = real_cuMemAllocManaged(ret_pointer, n_bytes, flags);
        return outside_end(&o, result, OUTSIDE_POINTER, result == CUDA_SUCCESS ? *ret_pointer : 0);
}

static CUresult free_outside(CUdeviceptr pointer)
{
        struct outside_entry *entry = outside_take(OUTSIDE_POINTER, pointer);

        return outside_took(entry, real_cuMemFree_v2(pointer));
}

CUresult cuMemFree_v2(CUdeviceptr pointer)
{
        bfc_client *client;
        size_t cursor = 0;
        CUdevice device;
        IN_CALL;
        CUresult result = broker_device(&device);
        int r = -EINVAL;

        if (result != CUDA_SUCCESS)
                return result;
        while (pointer && r == -EINVAL && (client = broker_next_client(&cursor)))
                r = bfc_free(client, (void *)(uintptr_t)pointer);
        if (r == -EINVAL)
                return free_outside(pointer);
        if (r == -EIO && (result = cuCtxSynchronize()) != CUDA_SUCCESS)
                return result; /* the error that broke the context */
        return broker_result(r);
}

/* ---- how much there is ------------------------------------------------------------ */

CUresult cuMemGetInfo_v2(size_t *ret_n_free, size_t *ret_n_total)
{
        struct gpu *gpu;
        IN_CALL;
        CUresult result = broker_current_gpu(&gpu);

        if (result != CUDA_SUCCESS)
                return result;
        if (!gpu)
                return real_cuMemGetInfo_v2(ret_n_free, ret_n_total);
        if (!ret_n_free || !ret_n_total)
                return CUDA_ERROR_INVALID_VALUE;
        reserved_settle(gpu);
        return broker_mem_info(gpu, ret_n_free, ret_n_total);
}

CUresult cuDeviceTotalMem_v2(size_t *ret_n_bytes, CUdevice device)
{
        IN_CALL;
        CUresult result = real_cuDeviceTotalMem_v2(ret_n_bytes, device);
        struct gpu *gpu = result == CUDA_SUCCESS ? broker_gpu(device) : NULL;
        size_t n_free;

        return gpu ? broker_mem_info(gpu, &n_free, ret_n_bytes) : result;
}

/* ---- addresses ----------------------------------------------------------------------- */

/* What the program has at an address: a block. */
struct memory {
        CUdeviceptr base;
        size_t n_bytes;
        bool is_ipc; /* cuIpcGetMemHandle() shares it */
};

/* By cuIpcGetMemHandle() all but small blocks can be shared, and no block in another way. */
static bool find_memory(CUdeviceptr pointer, struct memory *ret)
{
        struct bfc_block_info info;

        if (!broker_find_block(pointer, &info))
                return false;
        *ret = (struct memory){ (CUdeviceptr)(uintptr_t)info.base, info.n_requested,
                                info.n_bytes > SMALL_BYTES };
        return true;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *ret_base, size_t *ret_n_bytes, CUdeviceptr pointer)
{
        struct memory memory;
        CUdevice device;
        IN_CALL;
        CUresult result = broker_device(&device);

        if (result != CUDA_SUCCESS)
                return result;
        if (!find_memory(pointer, &memory))
                return real_cuMemGetAddressRange_v2(ret_base, ret_n_bytes, pointer);
        if (ret_base)
                *ret_base = memory.base;
        if (ret_n_bytes)
                *ret_n_bytes = memory.n_bytes;
        return CUDA_SUCCESS;
}

static bool is_memory_attribute(CUpointer_attribute which)
{
        return which == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR || which == CU_POINTER_ATTRIBUTE_RANGE_SIZE ||
               which == CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE;
}

static void set_attribute(CUpointer_attribute which, const struct memory *memory, void *ret_value)
{
        if (which == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR)
                *(CUdeviceptr *)ret_value = memory->base;
        else if (which == CU_POINTER_ATTRIBUTE_RANGE_SIZE)
                *(size_t *)ret_value = memory->n_bytes;
        else
                *(bool *)ret_value = memory->is_ipc;
}

CUresult cuPointerGetAttribute(void *ret_value, CUpointer_attribute which, CUdeviceptr pointer)
{
        IN_CALL;
        CUresult result = real_cuPointerGetAttribute(ret_value, which, pointer);
        struct memory memory;

        if (result == CUDA_SUCCESS && is_memory_attribute(which) && find_memory(pointer, &memory))
                set_attribute(which, &memory, ret_value);
        return result;
}

CUresult cuPointerGetAttributes(unsigned int n, CUpointer_attribute *which, void **ret_values,
                                CUdeviceptr pointer)
{
        IN_CALL;
        CUresult result = real_cuPointerGetAttributes(n, which, ret_values, pointer);
        struct memory memory;
        bool is_found = false;

        for (unsigned int i = 0; result == CUDA_SUCCESS && i < n; i++) {
                if (!is_memory_attribute(which[i]))
                        continue;
                if (!is_found && !(is_found = find_memory(pointer, &memory)))
                        break;
                set_attribute(which[i], &memory, ret_values[i]);
        }
        return result;
}
