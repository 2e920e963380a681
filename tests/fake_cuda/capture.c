/* Stream capture, as far as it forbids things: only memory becomes a node of the graph.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * While a stream is captured its work is recorded instead of done, and calls
 * that could wait for the device or ask it are not legal: on that stream and on
 * its events never, and elsewhere ("unsafe" calls: memory, queries,
 * synchronising) as the modes say. A capture in global mode forbids them in all
 * threads, one in thread-local mode in its own, a relaxed one in none; a thread
 * may relax itself by cuThreadExchangeStreamCaptureMode. A forbidden call
 * answers 900 and spoils the capture that forbade it. To wait for a context is
 * refused to a relaxed thread too while one of its streams is captured, in
 * whatever mode, and spoils all those captures. To use the default stream while
 * a blocking one is captured is refused (906) and spoils that. Whether one is
 * captured can be asked of the default stream without harm: 906. */
#include "tests/fake_cuda/fake.h"

#include <stdlib.h>

static __thread CUstreamCaptureMode own_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
static unsigned int n_captures; /* a guard that spares every call the lock */

bool fake_stream_is_capturing(CUstream s)
{
        bool is_capturing;

        pthread_mutex_lock(&fake_stream_lock);
        is_capturing = s->capture != CU_STREAM_CAPTURE_STATUS_NONE;
        pthread_mutex_unlock(&fake_stream_lock);
        return is_capturing;
}

void fake_capture_invalidate(CUstream s)
{
        pthread_mutex_lock(&fake_stream_lock);
        if (s->capture == CU_STREAM_CAPTURE_STATUS_ACTIVE)
                s->capture = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
        pthread_mutex_unlock(&fake_stream_lock);
}

static bool forbids(const struct CUstream_st *s)
{
        if (s->capture == CU_STREAM_CAPTURE_STATUS_NONE || s->capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED)
                return false;
        if (pthread_equal(s->capture_thread, pthread_self()))
                return true;
        return s->capture_mode == CU_STREAM_CAPTURE_MODE_GLOBAL && own_mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
}

CUresult fake_capture_allows_unsafe(void)
{
        CUresult r = CUDA_SUCCESS;

        if (__atomic_load_n(&n_captures, __ATOMIC_RELAXED) == 0 || own_mode == CU_STREAM_CAPTURE_MODE_RELAXED)
                return CUDA_SUCCESS;
        pthread_mutex_lock(&fake_stream_lock);
        for (struct CUstream_st *s = fake_streams; s; s = s->next) {
                if (!forbids(s))
                        continue;
                s->capture = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
                r = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
        pthread_mutex_unlock(&fake_stream_lock);
        return r;
}

/* Of virtual memory and of handles; what else is unsafe asks by itself. */
bool fake_call_is_unsafe(enum fake_function f)
{
        switch (f) {
        case FN_cuIpcGetMemHandle:
        case FN_cuIpcOpenMemHandle_v2:
        case FN_cuIpcCloseMemHandle:
        case FN_cuMemCreate:
        case FN_cuMemRelease:
        case FN_cuMemExportToShareableHandle:
        case FN_cuMemImportFromShareableHandle:
        case FN_cuMemAddressReserve:
        case FN_cuMemAddressFree:
        case FN_cuMemMap:
        case FN_cuMemUnmap:
        case FN_cuMemSetAccess:
                return true;
        default:
                return false;
        }
}

static bool is_captured_blocking(const struct CUstream_st *s, CUcontext c)
{
        return s->context == c && s->capture != CU_STREAM_CAPTURE_STATUS_NONE &&
               !(s->flags & CU_STREAM_NON_BLOCKING);
}

bool fake_capture_of_blocking(CUcontext c)
{
        bool is_capturing = false;

        pthread_mutex_lock(&fake_stream_lock);
        for (const struct CUstream_st *s = fake_streams; s; s = s->next)
                is_capturing |= is_captured_blocking(s, c);
        pthread_mutex_unlock(&fake_stream_lock);
        return is_capturing;
}

CUresult fake_capture_allows_use(const struct CUstream_st *s)
{
        CUresult r = CUDA_SUCCESS;

        if (__atomic_load_n(&n_captures, __ATOMIC_RELAXED) == 0 || !fake_stream_is_default(s))
                return CUDA_SUCCESS;
        for (struct CUstream_st *other = fake_streams; other; other = other->next) {
                if (!is_captured_blocking(other, s->context))
                        continue;
                other->capture = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
                r = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        }
        return r;
}

static void end_capture(struct CUstream_st *s)
{
        s->capture = CU_STREAM_CAPTURE_STATUS_NONE;
        s->captured = NULL;
        __atomic_sub_fetch(&n_captures, 1, __ATOMIC_RELAXED);
}

void fake_capture_forget(CUstream s)
{
        if (s->capture == CU_STREAM_CAPTURE_STATUS_NONE)
                return;
        free(s->captured); /* without its nodes, which are few */
        end_capture(s);
}

CUresult fake_capture_allows_wait(CUcontext c)
{
        CUresult r = CUDA_SUCCESS;

        pthread_mutex_lock(&fake_stream_lock);
        for (struct CUstream_st *s = fake_streams; s; s = s->next) {
                if (s->context != c || s->capture == CU_STREAM_CAPTURE_STATUS_NONE)
                        continue;
                s->capture = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
                r = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
        pthread_mutex_unlock(&fake_stream_lock);
        return r;
}

API CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
        CUstreamCaptureMode before = own_mode;

        ENTER(cuThreadExchangeStreamCaptureMode);
        if (!mode || (unsigned int)*mode > CU_STREAM_CAPTURE_MODE_RELAXED)
                return CUDA_ERROR_INVALID_VALUE;
        own_mode = *mode;
        *mode = before;
        return CUDA_SUCCESS;
}

API CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *ret_status)
{
        CUstream s;
        CUresult r;

        ENTER(cuStreamIsCapturing);
        if (!ret_status)
                return CUDA_ERROR_INVALID_VALUE;
        r = fake_stream_get(stream, &s);
        if (r != CUDA_SUCCESS)
                return r;
        if (fake_stream_is_default(s) && fake_capture_of_blocking(s->context))
                return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        pthread_mutex_lock(&fake_stream_lock);
        *ret_status = s->capture;
        pthread_mutex_unlock(&fake_stream_lock);
        return CUDA_SUCCESS;
}

API CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode)
{
        CUstream s;
        CUresult r;

        ENTER(cuStreamBeginCapture_v2);
        r = fake_stream_get(stream, &s);
        if (r != CUDA_SUCCESS)
                return r;
        if ((unsigned int)mode > CU_STREAM_CAPTURE_MODE_RELAXED)
                return CUDA_ERROR_INVALID_VALUE;
        if (fake_stream_is_default(s)) /* it cannot be captured */
                return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        pthread_mutex_lock(&fake_stream_lock);
        if (s->capture == CU_STREAM_CAPTURE_STATUS_NONE) {
                s->capture = CU_STREAM_CAPTURE_STATUS_ACTIVE;
                s->capture_mode = mode;
                s->capture_thread = pthread_self();
                s->captured = fake_graph_new();
                __atomic_add_fetch(&n_captures, 1, __ATOMIC_RELAXED);
        } else {
                r = CUDA_ERROR_ILLEGAL_STATE;
        }
        pthread_mutex_unlock(&fake_stream_lock);
        return r;
}

API CUresult cuStreamEndCapture(CUstream stream, CUgraph *ret_graph)
{
        CUgraph graph = NULL;
        CUstream s;
        CUresult r;

        ENTER(cuStreamEndCapture);
        if (!ret_graph)
                return CUDA_ERROR_INVALID_VALUE;
        r = fake_stream_get(stream, &s);
        if (r != CUDA_SUCCESS)
                return r;
        *ret_graph = NULL;
        pthread_mutex_lock(&fake_stream_lock);
        if (s->capture == CU_STREAM_CAPTURE_STATUS_NONE) {
                r = CUDA_ERROR_ILLEGAL_STATE;
        } else if (s->capture_mode != CU_STREAM_CAPTURE_MODE_RELAXED &&
                   !pthread_equal(s->capture_thread, pthread_self())) {
                r = CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
        } else {
                if (s->capture == CU_STREAM_CAPTURE_STATUS_INVALIDATED)
                        r = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
                graph = s->captured;
                end_capture(s);
        }
        pthread_mutex_unlock(&fake_stream_lock);
        if (r != CUDA_SUCCESS && graph)
                cuGraphDestroy(graph);
        if (r != CUDA_SUCCESS)
                return r;
        *ret_graph = graph;
        return CUDA_SUCCESS;
}
