/* Copies and fills: checked where they are asked for, done by a stream.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A device's side must be memory that the device may touch, or the call is
 * refused (1). The synchronous ones go through the default stream and wait, so
 * they come after all work that is on its way. Host memory is used when the
 * work runs and not before: a caller that reuses it too early is found out.
 */
#include "tests/fake_cuda/fake.h"

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
        fake_managed_use(w->is_to_device ? (uintptr_t)w->to : 0, w->n_bytes);
        fake_managed_use(w->is_from_device ? (uintptr_t)w->from : 0, w->n_bytes);
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
