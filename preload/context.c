/* Contexts: their ends, a reset, which ends all memory of a GPU, and access of other GPUs.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * As in a process without bfcd, cuDevicePrimaryCtxReset() ends what the program has on the GPU, and the program can
 * allocate again: the client of the GPU ends, and the next allocation makes another one. Memory in contexts that
 * the program made itself ends with it where it is bfcd's, because the library has all memory in the primary one. The last
 * cuDevicePrimaryCtxRelease() ends nothing while bfcd has memory there. */
#include "preload/ipc.h"
#include "preload/lent.h"
#include "preload/outside.h"

/* The device's primary context. NULL: it is not active. */
static CUcontext find_primary(CUdevice device)
{
        CUcontext context = NULL;
        unsigned int flags;
        int is_active = 0;

        if (cuDevicePrimaryCtxGetState(device, &flags, &is_active) == CUDA_SUCCESS && is_active &&
            real_cuDevicePrimaryCtxRetain(&context, device) == CUDA_SUCCESS)
                real_cuDevicePrimaryCtxRelease_v2(device);
        return context;
}

/* It has ended. The next one is charged again. */
static void forget_primary(struct gpu *gpu, CUcontext primary)
{
        outside_forget(primary);
        __atomic_store_n(&gpu->has_context, false, __ATOMIC_RELEASE);
}

/* ---- resets ---------------------------------------------------------------------- */

/* Waits for all work. False: the context is broken, or one of its streams is captured. */
static bool finish(CUcontext context)
{
        CUcontext top;
        CUresult result = cuCtxPushCurrent_v2(context);

        if (result != CUDA_SUCCESS)
                return false;
        result = cuCtxSynchronize();
        cuCtxPopCurrent_v2(&top);
        return result == CUDA_SUCCESS;
}

/* In a context that does not work nothing could be unmapped, so it is reset before. */
static void end_memory(struct gpu *gpu, CUdevice device)
{
        CUcontext context;
        unsigned n_retained = real_cuDevicePrimaryCtxRetain(&context, device) == CUDA_SUCCESS;

        if (n_retained == 0 || !finish(context)) {
                real_cuDevicePrimaryCtxReset_v2(device);
                n_retained += real_cuDevicePrimaryCtxRetain(&context, device) == CUDA_SUCCESS;
        }
        lent_forget(gpu);
        ipc_forget(gpu);
        broker_end_client(gpu);
        while (n_retained-- > 0)
                real_cuDevicePrimaryCtxRelease_v2(device);
}

CUresult cuDevicePrimaryCtxReset_v2(CUdevice device)
{
        struct gpu *gpu = broker_stop_calls(device);
        CUcontext primary = gpu ? find_primary(device) : NULL;
        CUresult result;

        if (gpu && gpu->client)
                end_memory(gpu, device);
        result = real_cuDevicePrimaryCtxReset_v2(device);
        if (primary && result == CUDA_SUCCESS)
                forget_primary(gpu, primary);
        broker_resume_calls();
        return result;
}

/* The variant before CUDA 11, for what was compiled with it. */
CUresult cuDevicePrimaryCtxReset(CUdevice device)
{
        return cuDevicePrimaryCtxReset_v2(device);
}

/* ---- ends ------------------------------------------------------------------------ */

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
        struct gpu *gpu = broker_stop_calls(device);
        CUcontext primary = gpu ? find_primary(device) : NULL;
        CUresult result = real_cuDevicePrimaryCtxRelease_v2(device);

        if (primary && !find_primary(device))
                forget_primary(gpu, primary);
        broker_resume_calls();
        return result;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device)
{
        return cuDevicePrimaryCtxRelease_v2(device);
}

CUresult cuCtxDestroy_v2(CUcontext context)
{
        CUresult result;

        (void)broker_stop_calls(-1);
        result = real_cuCtxDestroy_v2(context);
        if (context && result == CUDA_SUCCESS)
                outside_forget(context);
        broker_resume_calls();
        return result;
}

CUresult cuCtxDestroy(CUcontext context)
{
        return cuCtxDestroy_v2(context);
}

/* ---- access ----------------------------------------------------------------------- */

static CUresult context_gpu(CUcontext context, struct gpu **ret)
{
        CUcontext top;
        CUresult result = cuCtxPushCurrent_v2(context);

        if (result != CUDA_SUCCESS)
                return result;
        result = broker_current_gpu(ret);
        cuCtxPopCurrent_v2(&top);
        return result;
}

/* Of the current context, to memory of another one. The driver gives it for memory of its own only. */
CUresult cuCtxEnablePeerAccess(CUcontext context, unsigned int flags)
{
        struct gpu *gpu = NULL;
        CUdevice device;
        IN_CALL;
        CUresult result = real_cuCtxEnablePeerAccess(context, flags);

        if (result != CUDA_SUCCESS)
                return result;
        result = context_gpu(context, &gpu);
        if (result == CUDA_SUCCESS)
                result = broker_device(&device);
        if (result == CUDA_SUCCESS && gpu)
                result = broker_enable_peer(gpu, device);
        if (result != CUDA_SUCCESS)
                cuCtxDisablePeerAccess(context);
        return result;
}
