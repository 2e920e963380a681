/* Copies and fills: checked where they are asked for, done by a stream.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A device's side must be memory that the device may touch, or the call is
 * refused (1). The synchronous ones go through the default stream and wait, so
 * they come after all work that is on its way. Host memory is used when the
 * work runs and not before: a caller that reuses it too early is found out.
 *
 * Pinned memory is only a list: copies are the same from and to any memory. */
#include "tests/fake_cuda/fake.h"

#include <stdlib.h>

static CUresult put(struct fake_work *w, CUstream stream, bool wait)
{
        bool is_allowed;
        CUstream s;
        CUresult r = fake_stream_get(stream, &s);

        if (r != CUDA_SUCCESS)
                return r;
        if (w->n_bytes == 0)
                return CUDA_SUCCESS;
        if (!w->to || (!w->from && w->is_from_device))
                return CUDA_ERROR_INVALID_VALUE;
        pthread_rwlock_rdlock(&fake_memory_lock);
        is_allowed = (!w->is_to_device || fake_range_allows((uintptr_t)w->to, w->n_bytes, true)) &&
                     (!w->is_from_device || fake_range_allows((uintptr_t)w->from, w->n_bytes, false));
        pthread_rwlock_unlock(&fake_memory_lock);
        if (!is_allowed)
                return CUDA_ERROR_INVALID_VALUE;
        if (wait) {
                r = fake_capture_allows_unsafe();
                if (r != CUDA_SUCCESS)
                        return r;
        }
        return fake_stream_put(s, w, wait);
}

static CUresult h_to_d(CUdeviceptr to, const void *from, size_t n_bytes, CUstream stream, bool wait)
{
        struct fake_work w = {
                .to = (void *)(uintptr_t)to, .from = from, .n_bytes = n_bytes, .is_to_device = true
        };

        return !from && n_bytes > 0 ? CUDA_ERROR_INVALID_VALUE : put(&w, stream, wait);
}

static CUresult d_to_h(void *to, CUdeviceptr from, size_t n_bytes, CUstream stream, bool wait)
{
        struct fake_work w = {
                .to = to, .from = (const void *)(uintptr_t)from, .n_bytes = n_bytes, .is_from_device = true
        };

        return put(&w, stream, wait);
}

static CUresult d_to_d(CUdeviceptr to, CUdeviceptr from, size_t n_bytes, CUstream stream, bool wait)
{
        struct fake_work w = { .to = (void *)(uintptr_t)to,
                               .from = (const void *)(uintptr_t)from,
                               .n_bytes = n_bytes,
                               .is_to_device = true,
                               .is_from_device = true };

        return put(&w, stream, wait);
}

static CUresult fill(CUdeviceptr to, unsigned char value, size_t n_bytes, CUstream stream, bool wait)
{
        struct fake_work w = {
                .to = (void *)(uintptr_t)to, .n_bytes = n_bytes, .value = value, .is_to_device = true
        };

        return put(&w, stream, wait);
}

API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t n_bytes)
{
        ENTER(cuMemcpyHtoD_v2);
        return h_to_d(to, from, n_bytes, NULL, true);
}

API CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t n_bytes)
{
        ENTER(cuMemcpyDtoH_v2);
        return d_to_h(to, from, n_bytes, NULL, true);
}

API CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t n_bytes)
{
        ENTER(cuMemcpyDtoD_v2);
        return d_to_d(to, from, n_bytes, NULL, true);
}

API CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t n_bytes)
{
        ENTER(cuMemsetD8_v2);
        return fill(to, value, n_bytes, NULL, true);
}

API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t n_bytes, CUstream stream)
{
        ENTER(cuMemcpyHtoDAsync_v2);
        return h_to_d(to, from, n_bytes, stream, false);
}

API CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t n_bytes, CUstream stream)
{
        ENTER(cuMemcpyDtoHAsync_v2);
        return d_to_h(to, from, n_bytes, stream, false);
}

API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t n_bytes, CUstream stream)
{
        ENTER(cuMemcpyDtoDAsync_v2);
        return d_to_d(to, from, n_bytes, stream, false);
}

API CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t n_bytes, CUstream stream)
{
        ENTER(cuMemsetD8Async);
        return fill(to, value, n_bytes, stream, false);
}

/* ---- pinned memory --------------------------------------------------------- */

struct pinned {
        uintptr_t at;
        size_t n_bytes;
        struct pinned *next;
};

static pthread_mutex_t pinned_lock = PTHREAD_MUTEX_INITIALIZER;
static struct pinned *pinned;

static CUresult pin(uintptr_t at, size_t n_bytes)
{
        struct pinned *p;

        for (p = pinned; p; p = p->next)
                if (at < p->at + p->n_bytes && p->at < at + n_bytes)
                        return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
        p = malloc(sizeof(*p));
        if (!p)
                fake_die("out of memory");
        *p = (struct pinned){ at, n_bytes, pinned };
        pinned = p;
        return CUDA_SUCCESS;
}

static CUresult unpin(uintptr_t at)
{
        for (struct pinned **each = &pinned; *each; each = &(*each)->next) {
                struct pinned *p = *each;

                if (p->at != at)
                        continue;
                *each = p->next;
                free(p);
                return CUDA_SUCCESS;
        }
        return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

API CUresult cuMemHostRegister_v2(void *memory, size_t n_bytes, unsigned int flags)
{
        CUcontext c;
        CUresult r;

        ENTER(cuMemHostRegister_v2);
        r = fake_context(&c);
        if (r != CUDA_SUCCESS)
                return r;
        if (!memory || n_bytes == 0 || flags != 0) /* none of the flags is modelled */
                return CUDA_ERROR_INVALID_VALUE;
        pthread_mutex_lock(&pinned_lock);
        r = pin((uintptr_t)memory, n_bytes);
        pthread_mutex_unlock(&pinned_lock);
        return r;
}

API CUresult cuMemHostUnregister(void *memory)
{
        CUcontext c;
        CUresult r;

        ENTER(cuMemHostUnregister);
        r = fake_context(&c);
        if (r != CUDA_SUCCESS)
                return r;
        pthread_mutex_lock(&pinned_lock);
        r = unpin((uintptr_t)memory);
        pthread_mutex_unlock(&pinned_lock);
        return r;
}
