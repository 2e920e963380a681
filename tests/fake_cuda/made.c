/* Contexts that a program makes beside the primary ones.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Those of cuCtxCreate have what a primary one has: streams, memory, and bytes of the device
 * (FAKE_CUDA_CONTEXT_BYTES) until cuCtxDestroy. Of green ones, which retain the primary context, only what shows
 * in events is modelled: a stream that was made in one belongs to its context, and takes events of that context alone.
 * They have no memory of their own. A driver's part of the device (CUdevResourceDesc) is not looked at.
 *
 * Invariant: a context is on the list from its making, alive while n_refs is not 0, and never freed. */
#include "tests/fake_cuda/fake.h"

#include <stdlib.h>

API CUresult cuStreamGetCtx(CUstream stream, CUcontext *ret_context)
{
        CUstream s;
        CUresult r;

        ENTER(cuStreamGetCtx);
        r = fake_stream_get(stream, &s);
        if (r != CUDA_SUCCESS)
                return r;
        if (!ret_context)
                return CUDA_ERROR_INVALID_VALUE;
        *ret_context = s->context;
        return CUDA_SUCCESS;
}

static CUcontext made;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

bool fake_made_is_alive(CUcontext c)
{
        const struct CUctx_st *each;
        bool is;

        pthread_mutex_lock(&lock);
        for (each = made; each && each != c; each = each->next)
                ;
        is = each && __atomic_load_n(&each->n_refs, __ATOMIC_RELAXED) > 0;
        pthread_mutex_unlock(&lock);
        return is;
}

#ifndef BFC_CUDA_REAL_HEADER /* not all have all of them */

static CUresult make(struct fake_device *d, unsigned int flags, bool is_green, CUcontext *ret)
{
        CUcontext c = calloc(1, sizeof(*c));
        CUresult r;

        if (!c)
                return CUDA_ERROR_OUT_OF_MEMORY;
        c->device = d;
        c->flags = flags;
        c->is_green = is_green;
        c->n_refs = 1;
        r = is_green ? CUDA_SUCCESS : fake_context_start(c);
        if (r != CUDA_SUCCESS) {
                free(c);
                return r;
        }
        pthread_mutex_lock(&lock);
        c->next = made;
        made = c;
        pthread_mutex_unlock(&lock);
        *ret = c;
        return CUDA_SUCCESS;
}

/* True: it lived, and has ended by this. */
static bool end(CUcontext c, bool is_green)
{
        return c && fake_made_is_alive(c) && c->is_green == is_green &&
               __atomic_exchange_n(&c->n_refs, 0, __ATOMIC_RELAXED) > 0;
}

/* ---- contexts of their own ------------------------------------------------- */

CUresult cuCtxCreate(CUcontext *ret_context, unsigned int flags, CUdevice device);
CUresult cuCtxCreate_v2(CUcontext *ret_context, unsigned int flags, CUdevice device);
CUresult cuCtxCreate_v3(CUcontext *ret_context, void *parameters, int n_parameters, unsigned int flags,
                        CUdevice device);
CUresult cuCtxCreate_v4(CUcontext *ret_context, void *parameters, unsigned int flags, CUdevice device);
CUresult cuCtxDestroy_v2(CUcontext context);
CUresult cuCtxAttach(CUcontext *ret_context, unsigned int flags);
CUresult cuCtxDetach(CUcontext context);

API CUresult cuCtxCreate(CUcontext *ret_context, unsigned int flags, CUdevice device)
{
        return cuCtxCreate_v2(ret_context, flags, device);
}

/* It becomes the thread's current one. */
API CUresult cuCtxCreate_v2(CUcontext *ret_context, unsigned int flags, CUdevice device)
{
        struct fake_device *d;
        CUcontext c;
        CUresult r;

        ENTER(cuDevicePrimaryCtxRetain);
        d = fake_device_get(device);
        if (!ret_context || flags > 0xff)
                return CUDA_ERROR_INVALID_VALUE;
        if (!d || fake_device_attribute(d, CU_DEVICE_ATTRIBUTE_COMPUTE_MODE) == CU_COMPUTEMODE_PROHIBITED)
                return CUDA_ERROR_INVALID_DEVICE;
        r = fake_device_health(d);
        if (r == CUDA_SUCCESS)
                r = make(d, flags, false, &c);
        if (r != CUDA_SUCCESS)
                return r;
        r = cuCtxPushCurrent_v2(c);
        if (r == CUDA_SUCCESS)
                *ret_context = c;
        else
                cuCtxDestroy_v2(c);
        return r;
}

API CUresult cuCtxCreate_v3(CUcontext *ret_context, void *parameters, int n_parameters, unsigned int flags,
                            CUdevice device)
{
        return parameters || n_parameters != 0 ? CUDA_ERROR_NOT_SUPPORTED
                                               : cuCtxCreate_v2(ret_context, flags, device);
}

API CUresult cuCtxCreate_v4(CUcontext *ret_context, void *parameters, unsigned int flags, CUdevice device)
{
        return parameters ? CUDA_ERROR_NOT_SUPPORTED : cuCtxCreate_v2(ret_context, flags, device);
}

API CUresult cuCtxDestroy_v2(CUcontext context)
{
        ENTER(cuDevicePrimaryCtxRelease_v2);
        if (!end(context, false))
                return CUDA_ERROR_INVALID_CONTEXT;
        fake_context_end(context);
        fake_context_leave(context);
        return CUDA_SUCCESS;
}

/* One more reference to the current context, which the program has made. */
API CUresult cuCtxAttach(CUcontext *ret_context, unsigned int flags)
{
        CUcontext c = fake_context_current();

        if (!ret_context || flags != 0)
                return CUDA_ERROR_INVALID_VALUE;
        if (!c || c->is_green || !fake_made_is_alive(c))
                return CUDA_ERROR_INVALID_CONTEXT;
        __atomic_add_fetch(&c->n_refs, 1, __ATOMIC_RELAXED);
        *ret_context = c;
        return CUDA_SUCCESS;
}

API CUresult cuCtxDetach(CUcontext context)
{
        unsigned int n = 2;

        if (!context || context->is_green || !fake_made_is_alive(context))
                return CUDA_ERROR_INVALID_CONTEXT;
        while (!__atomic_compare_exchange_n(&context->n_refs, &n, n - 1, false, __ATOMIC_RELAXED,
                                            __ATOMIC_RELAXED))
                if (n < 2)
                        return cuCtxDestroy_v2(context);
        return CUDA_SUCCESS;
}

/* ---- green ones ------------------------------------------------------------ */

CUresult cuGreenCtxCreate(void **ret_green, void *desc, CUdevice device, unsigned int flags);
CUresult cuGreenCtxDestroy(void *which);
CUresult cuGreenCtxStreamCreate(CUstream *ret_stream, void *which, unsigned int flags, int priority);

API CUresult cuGreenCtxCreate(void **ret_green, void *desc, CUdevice device, unsigned int flags)
{
        struct fake_device *d = fake_device_get(device);
        CUcontext c;
        CUresult r;

        (void)desc;
        if (!ret_green || flags != 1) /* CU_GREEN_CTX_DEFAULT_STREAM */
                return CUDA_ERROR_INVALID_VALUE;
        r = cuDevicePrimaryCtxRetain(&c, device);
        if (r != CUDA_SUCCESS)
                return r;
        r = make(d, 0, true, &c);
        if (r == CUDA_SUCCESS)
                *ret_green = c;
        else
                cuDevicePrimaryCtxRelease_v2(device);
        return r;
}

API CUresult cuGreenCtxDestroy(void *which)
{
        CUcontext c = which;

        if (!end(c, true))
                return CUDA_ERROR_INVALID_HANDLE;
        fake_streams_destroy_of(c);
        return cuDevicePrimaryCtxRelease_v2(fake_device_ordinal(c->device));
}

API CUresult cuGreenCtxStreamCreate(CUstream *ret_stream, void *which, unsigned int flags, int priority)
{
        CUcontext top;
        CUresult r = cuCtxPushCurrent_v2(which);

        (void)priority;
        if (r != CUDA_SUCCESS)
                return r;
        r = flags == CU_STREAM_NON_BLOCKING ? cuStreamCreate(ret_stream, flags) : CUDA_ERROR_INVALID_VALUE;
        (void)cuCtxPopCurrent_v2(&top);
        return r;
}

#endif
