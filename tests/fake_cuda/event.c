/* Events: a point in a stream's work, remembered.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Recording puts an empty job into the stream and keeps its mark; an event that
 * was never recorded counts as passed. One that was recorded into a capture is
 * part of the graph and can be neither asked nor waited for (907). Events end
 * with cuEventDestroy; what the program forgets stays, and is no error. */
#include "tests/fake_cuda/fake.h"

#include <stdlib.h>

struct CUevent_st {
        struct CUevent_st *next;
        CUcontext context;
        struct fake_mark *mark;
        bool is_captured;
};

static struct CUevent_st *events;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static CUresult event_get(CUevent handle)
{
        CUcontext c;
        CUresult r = fake_context(&c);
        bool is_found = false;

        if (r != CUDA_SUCCESS)
                return r;
        pthread_mutex_lock(&lock);
        for (struct CUevent_st *e = events; e; e = e->next)
                is_found |= e == handle;
        pthread_mutex_unlock(&lock);
        return is_found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

API CUresult cuEventCreate(CUevent *ret_event, unsigned int flags)
{
        struct CUevent_st *e;
        CUcontext c;
        CUresult r;

        ENTER(cuEventCreate);
        r = fake_context(&c);
        if (r != CUDA_SUCCESS)
                return r;
        if (!ret_event || flags > 7)
                return CUDA_ERROR_INVALID_VALUE;
        e = calloc(1, sizeof(*e));
        if (!e)
                return CUDA_ERROR_OUT_OF_MEMORY;
        e->context = c;
        pthread_mutex_lock(&lock);
        e->next = events;
        events = e;
        pthread_mutex_unlock(&lock);
        *ret_event = e;
        return CUDA_SUCCESS;
}

API CUresult cuEventDestroy_v2(CUevent event)
{
        struct CUevent_st **at = &events;
        CUresult r;

        ENTER(cuEventDestroy_v2);
        r = event_get(event);
        if (r != CUDA_SUCCESS)
                return r;
        pthread_mutex_lock(&lock);
        while (*at != event)
                at = &(*at)->next;
        *at = event->next;
        pthread_mutex_unlock(&lock);
        fake_mark_replace(&event->mark, NULL);
        free(event);
        return CUDA_SUCCESS;
}

API CUresult cuEventRecord(CUevent event, CUstream stream)
{
        struct fake_mark *mark = NULL;
        CUstream s;
        CUresult r;

        ENTER(cuEventRecord);
        r = event_get(event);
        if (r == CUDA_SUCCESS)
                r = fake_stream_get(stream, &s);
        if (r != CUDA_SUCCESS)
                return r;
        if (s->context != event->context)
                return CUDA_ERROR_INVALID_HANDLE;
        event->is_captured = fake_stream_is_capturing(s);
        if (event->is_captured)
                return CUDA_SUCCESS;
        r = fake_stream_put_marked(s, NULL, &mark);
        if (r == CUDA_SUCCESS)
                fake_mark_replace(&event->mark, mark);
        return r;
}

static CUresult event_to_ask(CUevent event)
{
        CUresult r = event_get(event);

        if (r != CUDA_SUCCESS)
                return r;
        return event->is_captured ? CUDA_ERROR_CAPTURED_EVENT : fake_capture_allows_unsafe();
}

API CUresult cuEventQuery(CUevent event)
{
        CUresult r;

        ENTER(cuEventQuery);
        r = event_to_ask(event);
        if (r != CUDA_SUCCESS)
                return r;
        return fake_mark_is_done(&event->mark) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

API CUresult cuEventSynchronize(CUevent event)
{
        CUresult r;

        ENTER(cuEventSynchronize);
        r = event_to_ask(event);
        if (r != CUDA_SUCCESS)
                return r;
        fake_mark_wait(&event->mark);
        return __atomic_load_n(&event->context->sticky, __ATOMIC_RELAXED);
}

API CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags)
{
        CUstream s;
        CUresult r;

        ENTER(cuStreamWaitEvent);
        r = event_get(event);
        if (r == CUDA_SUCCESS)
                r = fake_stream_get(stream, &s);
        if (r != CUDA_SUCCESS)
                return r;
        if (flags > 1)
                return CUDA_ERROR_INVALID_VALUE;
        if (event->is_captured || fake_stream_is_capturing(s))
                return CUDA_SUCCESS; /* an edge of the graph */
        return fake_stream_put_marked(s, &event->mark, NULL);
}
