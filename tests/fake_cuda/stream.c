/* Streams, as the API has them; queue.c does the work.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A context's default stream is made at its first use, and stands for the
 * per-thread one as well. Invariant: a stream is on the list from its creation
 * until it is destroyed or its context ends, and only such are let in. */
#include "tests/fake_cuda/fake.h"

#include <stdlib.h>

static struct CUstream_st *stream_new(CUcontext c, unsigned int flags)
{
        struct CUstream_st *s = calloc(1, sizeof(*s));

        if (!s)
                return NULL;
        s->context = c;
        s->flags = flags;
        s->last = &s->first;
        pthread_mutex_lock(&fake_stream_lock);
        s->next = fake_streams;
        fake_streams = s;
        pthread_mutex_unlock(&fake_stream_lock);
        return s;
}

/* Off the list first, so that nobody finds it; then all of its work is done. */
static void stream_destroy(struct CUstream_st *s)
{
        struct CUstream_st **at = &fake_streams;

        pthread_mutex_lock(&fake_stream_lock);
        while (*at && *at != s)
                at = &(*at)->next;
        if (*at)
                *at = s->next;
        pthread_mutex_unlock(&fake_stream_lock);
        fake_stream_finish(s);
        free(s);
}

void fake_streams_destroy_of(CUcontext c)
{
        for (;;) {
                struct CUstream_st *s;

                pthread_mutex_lock(&fake_stream_lock);
                for (s = fake_streams; s && s->context != c; s = s->next)
                        ;
                pthread_mutex_unlock(&fake_stream_lock);
                if (!s)
                        break;
                stream_destroy(s);
        }
        __atomic_store_n(&c->default_stream, NULL, __ATOMIC_RELAXED);
}

static bool is_known(CUstream s)
{
        bool is_found = false;

        pthread_mutex_lock(&fake_stream_lock);
        for (struct CUstream_st *other = fake_streams; other; other = other->next)
                is_found |= other == s;
        pthread_mutex_unlock(&fake_stream_lock);
        return is_found;
}

CUresult fake_stream_get(CUstream handle, CUstream *ret)
{
        static pthread_mutex_t making = PTHREAD_MUTEX_INITIALIZER;
        CUcontext c;
        CUresult r = fake_context(&c);

        if (r != CUDA_SUCCESS)
                return r;
        if (handle && handle != CU_STREAM_LEGACY && handle != CU_STREAM_PER_THREAD) {
                if (!is_known(handle))
                        return CUDA_ERROR_INVALID_HANDLE;
                *ret = handle;
                return CUDA_SUCCESS;
        }
        pthread_mutex_lock(&making);
        *ret = __atomic_load_n(&c->default_stream, __ATOMIC_RELAXED);
        if (!*ret) {
                *ret = stream_new(c, CU_STREAM_DEFAULT);
                __atomic_store_n(&c->default_stream, *ret, __ATOMIC_RELAXED);
        }
        pthread_mutex_unlock(&making);
        return *ret ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

API CUresult cuStreamCreate(CUstream *ret_stream, unsigned int flags)
{
        CUcontext c;
        CUresult r;

        ENTER(cuStreamCreate);
        r = fake_context(&c);
        if (r != CUDA_SUCCESS)
                return r;
        if (!ret_stream || flags > CU_STREAM_NON_BLOCKING)
                return CUDA_ERROR_INVALID_VALUE;
        *ret_stream = stream_new(c, flags);
        return *ret_stream ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

API CUresult cuStreamDestroy_v2(CUstream stream)
{
        CUstream s;
        CUresult r;

        ENTER(cuStreamDestroy_v2);
        r = fake_stream_get(stream, &s);
        if (r != CUDA_SUCCESS)
                return r;
        if (s != stream)
                return CUDA_ERROR_INVALID_HANDLE;
        stream_destroy(s);
        return CUDA_SUCCESS;
}

/* To ask or wait is refused while the stream itself is captured, and may be
 * where another is. */
static CUresult stream_to_ask(CUstream handle, CUstream *ret)
{
        CUresult r = fake_stream_get(handle, ret);

        if (r != CUDA_SUCCESS)
                return r;
        if (fake_stream_is_capturing(*ret)) {
                fake_capture_invalidate(*ret);
                return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
        return fake_capture_allows_unsafe();
}

API CUresult cuStreamQuery(CUstream stream)
{
        CUstream s;
        CUresult r;

        ENTER(cuStreamQuery);
        r = stream_to_ask(stream, &s);
        if (r != CUDA_SUCCESS)
                return r;
        return fake_mark_is_done(&s->mark) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

API CUresult cuStreamSynchronize(CUstream stream)
{
        CUstream s;
        CUresult r;

        ENTER(cuStreamSynchronize);
        r = stream_to_ask(stream, &s);
        if (r != CUDA_SUCCESS)
                return r;
        if (s == __atomic_load_n(&s->context->default_stream, __ATOMIC_RELAXED))
                return fake_stream_put(s, NULL, true); /* behind the blocking streams' work too */
        fake_mark_wait(&s->mark);
        return __atomic_load_n(&s->context->sticky, __ATOMIC_RELAXED);
}

API CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *data)
{
        const struct fake_work work = { .function = function, .data = data };
        CUstream s;
        CUresult r;

        ENTER(cuLaunchHostFunc);
        if (!function)
                return CUDA_ERROR_INVALID_VALUE;
        r = fake_stream_get(stream, &s);
        return r != CUDA_SUCCESS ? r : fake_stream_put(s, &work, false);
}
