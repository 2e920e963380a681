/* Streams, as the API has them; queue.c does the work.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A context's default stream is made at its first use, and stands for the
 * per-thread one as well. What a program has of the others are handles of a
 * table: one that was destroyed is free at once, for the next stream, while
 * its work goes on. Invariant: a stream is on the list from its creation until
 * it is destroyed, or its context ends, and its work is done; only those that
 * have a handle are let in. */
#include "tests/fake_cuda/fake.h"

#include <stdlib.h>

#define MAX_HANDLES 4096

static char handles[MAX_HANDLES]; /* their addresses */
static bool is_taken[MAX_HANDLES];
static unsigned long long n_ids; /* of all streams so far */

/* ---- handles; the lock is held -------------------------------------------- */

static CUstream handle_take(void)
{
        for (size_t i = 0; i < MAX_HANDLES; i++) {
                if (is_taken[i])
                        continue;
                is_taken[i] = true;
                return (CUstream)(void *)&handles[i];
        }
        return NULL;
}

static bool was_handle(CUstream handle)
{
        return (uintptr_t)handle >= (uintptr_t)handles &&
               (uintptr_t)handle < (uintptr_t)(handles + MAX_HANDLES);
}

static void destroy(struct CUstream_st *s)
{
        if (s->handle)
                is_taken[(char *)s->handle - handles] = false;
        s->handle = NULL;
        fake_capture_forget(s);
        fake_stream_close(s);
}

/* ---- streams -------------------------------------------------------------- */

bool fake_stream_is_default(const struct CUstream_st *s)
{
        return s == __atomic_load_n(&s->context->default_stream, __ATOMIC_RELAXED);
}

static struct CUstream_st *stream_new(CUcontext c, unsigned int flags, bool is_default)
{
        struct CUstream_st *s = calloc(1, sizeof(*s));

        if (!s)
                return NULL;
        s->context = c;
        s->flags = flags;
        s->last = &s->first;
        pthread_mutex_lock(&fake_stream_lock);
        s->handle = is_default ? NULL : handle_take();
        if (is_default || s->handle) {
                s->id = ++n_ids;
                s->next = fake_streams;
                fake_streams = s;
        } else {
                free(s);
                s = NULL;
        }
        pthread_mutex_unlock(&fake_stream_lock);
        return s;
}

static CUstream find(CUstream handle)
{
        struct CUstream_st *s;

        pthread_mutex_lock(&fake_stream_lock);
        for (s = fake_streams; s && s->handle != handle; s = s->next)
                ;
        pthread_mutex_unlock(&fake_stream_lock);
        return s;
}

static CUresult no_such_stream(CUstream handle)
{
        if (!was_handle(handle))
                return CUDA_ERROR_INVALID_HANDLE;
        if (fake.destroyed_stream == CUDA_SUCCESS)
                fake_die("a call with the stream %p, which was destroyed", (void *)handle);
        return fake.destroyed_stream;
}

CUresult fake_stream_get(CUstream handle, CUstream *ret)
{
        static pthread_mutex_t making = PTHREAD_MUTEX_INITIALIZER;
        CUcontext c;
        CUresult r = fake_context(&c);

        if (r != CUDA_SUCCESS)
                return r;
        if (handle && handle != CU_STREAM_LEGACY && handle != CU_STREAM_PER_THREAD) {
                *ret = find(handle);
                return *ret ? CUDA_SUCCESS : no_such_stream(handle);
        }
        pthread_mutex_lock(&making);
        *ret = __atomic_load_n(&c->default_stream, __ATOMIC_RELAXED);
        if (!*ret) {
                *ret = stream_new(c, CU_STREAM_DEFAULT, true);
                __atomic_store_n(&c->default_stream, *ret, __ATOMIC_RELAXED);
        }
        pthread_mutex_unlock(&making);
        return *ret ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

void fake_streams_destroy_of(CUcontext c)
{
        pthread_mutex_lock(&fake_stream_lock);
        for (struct CUstream_st *s = fake_streams, *next; s; s = next) {
                next = s->next;
                if (s->context == c && !s->is_closing)
                        destroy(s);
        }
        fake_streams_wait_for_end(c);
        __atomic_store_n(&c->default_stream, NULL, __ATOMIC_RELAXED);
        pthread_mutex_unlock(&fake_stream_lock);
}

static CUresult create(CUstream *ret_stream, unsigned int flags)
{
        struct CUstream_st *s;
        CUcontext c;
        CUresult r;

        r = fake_context(&c);
        if (r != CUDA_SUCCESS)
                return r;
        if (!ret_stream || flags > CU_STREAM_NON_BLOCKING)
                return CUDA_ERROR_INVALID_VALUE;
        s = stream_new(c, flags, false);
        if (!s)
                return CUDA_ERROR_OUT_OF_MEMORY;
        *ret_stream = s->handle;
        return CUDA_SUCCESS;
}

API CUresult cuStreamCreate(CUstream *ret_stream, unsigned int flags)
{
        ENTER(cuStreamCreate);
        return create(ret_stream, flags);
}

/* There is one priority. A driver takes one outside of its range as the nearest. */
API CUresult cuCtxGetStreamPriorityRange(int *ret_least, int *ret_greatest)
{
        CUcontext c;
        CUresult r;

        ENTER(cuCtxGetStreamPriorityRange);
        r = fake_context(&c);
        if (r != CUDA_SUCCESS)
                return r;
        if (ret_least)
                *ret_least = 0;
        if (ret_greatest)
                *ret_greatest = 0;
        return CUDA_SUCCESS;
}

API CUresult cuStreamCreateWithPriority(CUstream *ret_stream, unsigned int flags, int priority)
{
        (void)priority;
        ENTER(cuStreamCreateWithPriority);
        return create(ret_stream, flags);
}

/* Not legal for a captured stream, whatever the thread's mode. */
API CUresult cuStreamGetId(CUstream stream, unsigned long long *ret_id)
{
        CUstream s;
        CUresult r;

        ENTER(cuStreamGetId);
        if (!ret_id)
                return CUDA_ERROR_INVALID_VALUE;
        r = fake_stream_get(stream, &s);
        if (r != CUDA_SUCCESS)
                return r;
        if (fake_stream_is_capturing(s)) {
                fake_capture_invalidate(s);
                return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
        *ret_id = s->id;
        return CUDA_SUCCESS;
}

/* Returns at once: the work goes on. */
API CUresult cuStreamDestroy_v2(CUstream stream)
{
        CUstream s;
        CUresult r;

        ENTER(cuStreamDestroy_v2);
        r = fake_stream_get(stream, &s);
        if (r != CUDA_SUCCESS)
                return r;
        if (fake_stream_is_default(s))
                return CUDA_ERROR_INVALID_HANDLE;
        pthread_mutex_lock(&fake_stream_lock);
        destroy(s);
        pthread_mutex_unlock(&fake_stream_lock);
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
        pthread_mutex_lock(&fake_stream_lock);
        r = fake_capture_allows_use(*ret);
        pthread_mutex_unlock(&fake_stream_lock);
        return r != CUDA_SUCCESS ? r : fake_capture_allows_unsafe();
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
        if (fake_stream_is_default(s))
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

struct write {
        uint64_t *to;
        uint64_t value;
};

static void write_value(void *data)
{
        struct write *w = data;

        __atomic_store_n(w->to, w->value, __ATOMIC_RELEASE);
        free(w);
}

CUresult cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr to, uint64_t value, unsigned int flags);

/* For XLA, which writes to memory of the host. */
API CUresult cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr to, uint64_t value, unsigned int flags)
{
        struct fake_work work = { .function = write_value };
        struct write *w;
        CUstream s;
        CUresult r;

        if (to == 0 || to % sizeof(value) != 0 || flags > 1)
                return CUDA_ERROR_INVALID_VALUE;
        r = fake_stream_get(stream, &s);
        if (r != CUDA_SUCCESS)
                return r;
        w = malloc(sizeof(*w));
        if (!w)
                return CUDA_ERROR_OUT_OF_MEMORY;
        *w = (struct write){ (uint64_t *)(uintptr_t)to, value };
        work.data = w;
        r = fake_stream_put(s, &work, false);
        if (r != CUDA_SUCCESS)
                free(w);
        return r;
}
