/* Primary contexts and each thread's stack of current ones.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A device has one primary context, counted by cuDevicePrimaryCtxRetain; made.c has the
 * others. Its last release takes all that lived in it: streams, events, cuMemAlloc's memory and opened handles,
 * but not cuMemCreate's. It may cost memory of the device
 * (FAKE_CUDA_CONTEXT_BYTES), as real ones do. An error that broke a context
 * stays: every later call that needs it returns the same, until the context is given up and
 * retained again. cuDevicePrimaryCtxReset ends the same as the last release, but no reference; the next retain
 * makes the context anew, at the same address.
 *
 * Contexts are never freed, so a stale CUcontext is recognised instead of
 * crashing. Invariant: a context lives exactly while n_refs > 0 and it was not reset since the last retain. */
#include "tests/fake_cuda/fake.h"

#include <stdlib.h>
#include <string.h>

#define PEER_ACCESS_ALREADY_ENABLED ((CUresult)704) /* CUDA_ERROR_... */
#define PEER_ACCESS_NOT_ENABLED     ((CUresult)705)

#define MAX_DEPTH 64

static __thread CUcontext stack[MAX_DEPTH];
static __thread unsigned int depth;

CUcontext fake_context_current(void)
{
        return depth > 0 ? stack[depth - 1] : NULL;
}

void fake_context_stick(CUcontext c, CUresult error)
{
        CUresult none = CUDA_SUCCESS;

        /* The first error is the one that stays. */
        __atomic_compare_exchange_n(&c->sticky, &none, error, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}

static bool lives(CUcontext c)
{
        return __atomic_load_n(&c->n_refs, __ATOMIC_RELAXED) > 0 &&
               !__atomic_load_n(&c->is_reset, __ATOMIC_RELAXED);
}

CUresult fake_context(CUcontext *ret)
{
        CUcontext c = fake_context_current();
        CUresult r;

        if (!c)
                return CUDA_ERROR_INVALID_CONTEXT;
        if (!lives(c))
                return CUDA_ERROR_CONTEXT_IS_DESTROYED;
        r = __atomic_load_n(&c->sticky, __ATOMIC_RELAXED);
        if (r != CUDA_SUCCESS)
                return r;
        r = fake_device_health(c->device);
        if (r != CUDA_SUCCESS) {
                fake_context_stick(c, r);
                return r;
        }
        *ret = c;
        return CUDA_SUCCESS;
}

/* ---- primary contexts ---------------------------------------------------- */

CUresult fake_context_start(CUcontext c)
{
        return fake.context_n_bytes == 0 ? CUDA_SUCCESS
                                         : fake_bytes_take(c->device, fake.context_n_bytes, &c->bytes);
}

static CUresult retain_locked(struct fake_device *d, CUcontext *ret)
{
        CUcontext c = d->primary;
        CUresult r;

        if (!c) {
                c = calloc(1, sizeof(*c));
                if (!c)
                        return CUDA_ERROR_OUT_OF_MEMORY;
                c->device = d;
                d->primary = c;
        }
        if (lives(c) && __atomic_load_n(&c->sticky, __ATOMIC_RELAXED) != CUDA_SUCCESS)
                return __atomic_load_n(&c->sticky, __ATOMIC_RELAXED);
        if (!lives(c)) {
                r = fake_context_start(c);
                if (r != CUDA_SUCCESS)
                        return r;
                __atomic_store_n(&c->sticky, CUDA_SUCCESS, __ATOMIC_RELAXED);
                __atomic_store_n(&c->is_reset, false, __ATOMIC_RELAXED);
        }
        __atomic_add_fetch(&c->n_refs, 1, __ATOMIC_RELAXED);
        *ret = c;
        return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext *ret_context, CUdevice device)
{
        struct fake_device *d;
        CUresult r;

        ENTER(cuDevicePrimaryCtxRetain);
        d = fake_device_get(device);
        if (!ret_context)
                return CUDA_ERROR_INVALID_VALUE;
        if (!d)
                return CUDA_ERROR_INVALID_DEVICE;
        r = fake_device_health(d);
        if (r != CUDA_SUCCESS)
                return r;
        if (fake_device_attribute(d, CU_DEVICE_ATTRIBUTE_COMPUTE_MODE) == CU_COMPUTEMODE_PROHIBITED)
                return CUDA_ERROR_INVALID_DEVICE;
        pthread_rwlock_wrlock(&fake_memory_lock);
        r = retain_locked(d, ret_context);
        pthread_rwlock_unlock(&fake_memory_lock);
        return r;
}

void fake_context_end(CUcontext c)
{
        fake_streams_destroy_of(c); /* its work still needs the memory */
        fake_pinned_drop_of(c);
        fake_arrays_destroy_of(c);
        pthread_rwlock_wrlock(&fake_memory_lock);
        fake_pools_forget(c);
        fake_graphs_forget(c);
        fake_ranges_destroy_of(c);
        memset(c->reaches, 0, sizeof(c->reaches));
        fake_bytes_give_back(&c->bytes);
        pthread_rwlock_unlock(&fake_memory_lock);
}

API CUresult cuDevicePrimaryCtxReset_v2(CUdevice device)
{
        struct fake_device *d;
        CUcontext c;
        bool ends;

        ENTER(cuDevicePrimaryCtxReset_v2);
        d = fake_device_get(device);
        if (!d)
                return CUDA_ERROR_INVALID_DEVICE;
        pthread_rwlock_wrlock(&fake_memory_lock);
        c = d->primary;
        ends = c && lives(c);
        if (ends)
                __atomic_store_n(&c->is_reset, true, __ATOMIC_RELAXED);
        pthread_rwlock_unlock(&fake_memory_lock);
        if (ends)
                fake_context_end(c);
        return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
        struct fake_device *d;
        CUcontext c;
        bool is_reset;

        ENTER(cuDevicePrimaryCtxRelease_v2);
        d = fake_device_get(device);
        if (!d)
                return CUDA_ERROR_INVALID_DEVICE;
        pthread_rwlock_wrlock(&fake_memory_lock);
        c = d->primary;
        if (!c || c->n_refs == 0) {
                pthread_rwlock_unlock(&fake_memory_lock);
                return CUDA_ERROR_INVALID_CONTEXT;
        }
        is_reset = c->is_reset;
        if (__atomic_sub_fetch(&c->n_refs, 1, __ATOMIC_RELAXED) > 0) {
                pthread_rwlock_unlock(&fake_memory_lock);
                return CUDA_SUCCESS;
        }
        pthread_rwlock_unlock(&fake_memory_lock);
        if (!is_reset)
                fake_context_end(c);
        return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *ret_flags, int *ret_active)
{
        struct fake_device *d;

        ENTER(cuDevicePrimaryCtxGetState);
        d = fake_device_get(device);
        if (!ret_flags || !ret_active)
                return CUDA_ERROR_INVALID_VALUE;
        if (!d)
                return CUDA_ERROR_INVALID_DEVICE;
        pthread_rwlock_rdlock(&fake_memory_lock);
        *ret_flags = d->primary ? d->primary->flags : 0;
        *ret_active = d->primary && lives(d->primary);
        pthread_rwlock_unlock(&fake_memory_lock);
        return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned int flags)
{
        struct fake_device *d;

        ENTER(cuDevicePrimaryCtxSetFlags_v2);
        d = fake_device_get(device);
        if (!d)
                return CUDA_ERROR_INVALID_DEVICE;
        if (flags > 0xff)
                return CUDA_ERROR_INVALID_VALUE;
        pthread_rwlock_wrlock(&fake_memory_lock);
        if (d->primary)
                d->primary->flags = flags;
        pthread_rwlock_unlock(&fake_memory_lock);
        return CUDA_SUCCESS;
}

/* ---- each thread's stack ------------------------------------------------- */

static bool is_alive(CUcontext c)
{
        for (unsigned int i = 0; i < fake.n_visible; i++)
                if (fake.visible[i]->primary == c)
                        return lives(c);
        return fake_made_is_alive(c);
}

API CUresult cuCtxPushCurrent_v2(CUcontext context)
{
        ENTER(cuCtxPushCurrent_v2);
        if (!context || !is_alive(context))
                return CUDA_ERROR_INVALID_CONTEXT;
        if (depth == MAX_DEPTH)
                return CUDA_ERROR_OUT_OF_MEMORY;
        stack[depth++] = context;
        return CUDA_SUCCESS;
}

API CUresult cuCtxPopCurrent_v2(CUcontext *ret_context)
{
        ENTER(cuCtxPopCurrent_v2);
        if (depth == 0)
                return CUDA_ERROR_INVALID_CONTEXT;
        depth--;
        if (ret_context)
                *ret_context = stack[depth];
        return CUDA_SUCCESS;
}

/* Replaces the top of the stack; NULL takes it away. */
API CUresult cuCtxSetCurrent(CUcontext context)
{
        ENTER(cuCtxSetCurrent);
        if (context && !is_alive(context))
                return CUDA_ERROR_INVALID_CONTEXT;
        if (depth > 0)
                depth--;
        if (context)
                stack[depth++] = context;
        return CUDA_SUCCESS;
}

/* The context was destroyed: it is no longer this thread's current one. */
void fake_context_leave(CUcontext c)
{
        if (fake_context_current() == c)
                depth--;
}

API CUresult cuCtxGetCurrent(CUcontext *ret_context)
{
        ENTER(cuCtxGetCurrent);
        if (!ret_context)
                return CUDA_ERROR_INVALID_VALUE;
        *ret_context = fake_context_current();
        return CUDA_SUCCESS;
}

API CUresult cuCtxGetDevice(CUdevice *ret_device)
{
        CUcontext c;

        ENTER(cuCtxGetDevice);
        c = fake_context_current();
        if (!ret_device)
                return CUDA_ERROR_INVALID_VALUE;
        if (!c)
                return CUDA_ERROR_INVALID_CONTEXT;
        *ret_device = fake_device_ordinal(c->device);
        return CUDA_SUCCESS;
}

API CUresult cuCtxSynchronize(void)
{
        CUcontext c;
        CUresult r;

        ENTER(cuCtxSynchronize);
        r = fake_context(&c);
        if (r != CUDA_SUCCESS)
                return r;
        r = fake_capture_allows_unsafe();
        if (r == CUDA_SUCCESS)
                r = fake_capture_allows_wait(c);
        return r != CUDA_SUCCESS ? r : fake_streams_wait(c);
}

/* ---- access of other devices ---------------------------------------------- */

/* Of the current context to memory of another one. Only what is asked for is noted: any memory can be used here. */
static CUresult change_access(CUcontext other, bool is_on)
{
        CUcontext c;
        CUresult r = fake_context(&c);
        bool was_on;

        if (r != CUDA_SUCCESS)
                return r;
        if (!other || !is_alive(other) || other->device == c->device)
                return CUDA_ERROR_INVALID_CONTEXT;
        if (!fake.peer_access)
                return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
        pthread_rwlock_wrlock(&fake_memory_lock);
        was_on = c->reaches[other->device->index];
        c->reaches[other->device->index] = is_on;
        pthread_rwlock_unlock(&fake_memory_lock);
        if (was_on == is_on)
                return is_on ? PEER_ACCESS_ALREADY_ENABLED : PEER_ACCESS_NOT_ENABLED;
        return CUDA_SUCCESS;
}

API CUresult cuCtxEnablePeerAccess(CUcontext context, unsigned int flags)
{
        ENTER(cuCtxEnablePeerAccess);
        return flags == 0 ? change_access(context, true) : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuCtxDisablePeerAccess(CUcontext context)
{
        ENTER(cuCtxDisablePeerAccess);
        return change_access(context, false);
}
