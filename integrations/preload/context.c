/* Contexts: their ends, a reset, which ends all memory of a GPU, and access of other GPUs.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * As in a process without bfcd, cuDevicePrimaryCtxReset() ends what the program has on the GPU, and the program can
 * allocate again: the client of the GPU ends, and the next allocation makes another one. Memory in contexts that
 * the program made itself ends with it where it is bfcd's, because the library has all memory in the primary one. The last
 * cuDevicePrimaryCtxRelease() ends nothing while bfcd has memory there. */
#include "integrations/preload/charged_context.h"
#include "integrations/preload/idle.h"
#include "integrations/preload/ipc.h"
#include "integrations/preload/lent.h"
#include "integrations/preload/outside.h"

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
static void end_memory(struct gpu *gpu)
{
        CUcontext context;
        unsigned n_retained = real_cuDevicePrimaryCtxRetain(&context, gpu->device) == CUDA_SUCCESS;

        if (n_retained == 0 || !finish(context)) {
                real_cuDevicePrimaryCtxReset_v2(gpu->device);
                n_retained += real_cuDevicePrimaryCtxRetain(&context, gpu->device) == CUDA_SUCCESS;
        }
        lent_forget(gpu);
        ipc_forget(gpu);
        broker_end_client(gpu);
        while (n_retained-- > 0)
                real_cuDevicePrimaryCtxRelease_v2(gpu->device);
        context_drop_primary(gpu);
}

CUresult cuDevicePrimaryCtxReset_v2(CUdevice device)
{
        bool is_awake = idle_stop(); /* memory of cuMemCreate() outlives the reset */
        struct gpu *gpu = broker_stop_calls(device);
        CUresult result = CUDA_ERROR_NOT_READY;

        if (is_awake && gpu && gpu->client)
                end_memory(gpu);
        if (is_awake)
                result = real_cuDevicePrimaryCtxReset_v2(device);
        if (gpu && result == CUDA_SUCCESS)
                context_was_reset(gpu);
        broker_resume_calls();
        idle_resume();
        return result;
}

/* The variant before CUDA 11, for what was compiled with it. */
CUresult cuDevicePrimaryCtxReset(CUdevice device)
{
        return cuDevicePrimaryCtxReset_v2(device);
}

/* ---- ends of contexts of the program -------------------------------------------------- */

static bool is_alive(CUcontext context)
{
        CUcontext top;

        if (cuCtxPushCurrent_v2(context) != CUDA_SUCCESS)
                return false;
        cuCtxPopCurrent_v2(&top);
        return true;
}

/* The driver waits for the context's work, and other threads call it meanwhile. */
CUresult cuCtxDestroy_v2(CUcontext context)
{
        uint64_t mark = outside_mark();
        CUresult result = real_cuCtxDestroy_v2(context);
        IN_CALL;

        if (context && result == CUDA_SUCCESS)
                outside_forget(context, mark);
        return result;
}

CUresult cuCtxDestroy(CUcontext context)
{
        return cuCtxDestroy_v2(context);
}

/* Ends the context with the last of its references; cuCtxAttach() makes more. */
CUresult cuCtxDetach(CUcontext context)
{
        uint64_t mark = outside_mark();
        CUresult result = real_cuCtxDetach(context);
        IN_CALL;

        if (context && result == CUDA_SUCCESS && !is_alive(context))
                outside_forget(context, mark);
        return result;
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
