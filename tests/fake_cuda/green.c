/* Green contexts: contexts of their own on a device whose primary context lives.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Only what shows in events is modelled: a stream that was made in one belongs to
 * its context, and takes events of that context alone. They have no memory of
 * their own, and are never freed, as all contexts here. A driver's part of the
 * device (CUdevResourceDesc) is not looked at. */
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

#define MAX_GREEN 16

static CUcontext green[MAX_GREEN];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

bool fake_green_is_alive(CUcontext c)
{
        bool is_alive = false;

        pthread_mutex_lock(&lock);
        for (size_t i = 0; i < MAX_GREEN; i++)
                is_alive |= c && green[i] == c && __atomic_load_n(&c->n_refs, __ATOMIC_RELAXED) > 0;
        pthread_mutex_unlock(&lock);
        return is_alive;
}

#ifndef BFC_CUDA_REAL_HEADER /* some have no green contexts */

CUresult cuGreenCtxCreate(void **ret_green, void *desc, CUdevice device, unsigned int flags);
CUresult cuGreenCtxDestroy(void *which);
CUresult cuGreenCtxStreamCreate(CUstream *ret_stream, void *which, unsigned int flags, int priority);

API CUresult cuGreenCtxCreate(void **ret_green, void *desc, CUdevice device, unsigned int flags)
{
        struct fake_device *d = fake_device_get(device);
        CUcontext c;
        size_t i = 0;

        (void)desc;
        if (!ret_green || flags != 1) /* CU_GREEN_CTX_DEFAULT_STREAM */
                return CUDA_ERROR_INVALID_VALUE;
        if (!d || !d->primary || __atomic_load_n(&d->primary->n_refs, __ATOMIC_RELAXED) == 0)
                return CUDA_ERROR_INVALID_DEVICE;
        c = calloc(1, sizeof(*c));
        if (!c)
                return CUDA_ERROR_OUT_OF_MEMORY;
        c->device = d;
        c->n_refs = 1;
        pthread_mutex_lock(&lock);
        while (i < MAX_GREEN && green[i])
                i++;
        if (i < MAX_GREEN)
                green[i] = c;
        pthread_mutex_unlock(&lock);
        if (i == MAX_GREEN) {
                free(c);
                return CUDA_ERROR_OUT_OF_MEMORY;
        }
        *ret_green = c;
        return CUDA_SUCCESS;
}

API CUresult cuGreenCtxDestroy(void *which)
{
        if (!fake_green_is_alive(which))
                return CUDA_ERROR_INVALID_HANDLE;
        fake_streams_destroy_of(which);
        __atomic_store_n(&((CUcontext)which)->n_refs, 0, __ATOMIC_RELAXED);
        return CUDA_SUCCESS;
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
