/* Streams of a CUDA device, on the client's side; see device.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A stream accepts only events of its own context. That is the device's primary context for the runtime
 * API's streams; those of green contexts have others. A stream of another device is refused. As in
 * cuda_range.c the thread is in relaxed capture mode meanwhile, in which a driver permits making and
 * querying events during a capture.
 *
 * The work of a stream that is being captured becomes a graph, which runs later, or never. An event
 * recorded there would become a part of the graph and could never be queried (907). So the stream is
 * queried first; if a capture begins in between, the query of the event detects it.
 *
 * A driver ends the process if it gets a destroyed stream, whose handle the next stream can have. So the
 * caller passes only streams that exist, and an id tells them apart. The driver gives no id of a captured
 * stream: the query would invalidate the capture. Drivers before CUDA 12.0 have no ids. */
#include <errno.h>
#include <stdlib.h>

#include "device/backend.h"
#include "device/cuda_driver.h"

struct cuda_streams {
        struct device_streams streams; /* first: it is cast to */
        struct cuda_context context;
};

struct device_event {
        CUevent event;
        CUcontext context; /* in which it was made */
};

/* An unexpected error says nothing about the work, so it is not -EIO. */
static int stream_errno(CUresult result)
{
        int r = cuda_driver_broke_context(result) ? -EIO : cuda_driver_errno(result);

        if (result == CUDA_ERROR_NOT_READY)
                return DEVICE_PENDING;
        if (result == CUDA_ERROR_CAPTURED_EVENT)
                return -ESTALE;
        if (r == -EIO && !cuda_driver_broke_context(result))
                return -EAGAIN;
        return r == -ENOTSUP ? -EAGAIN : r;
}

static CUstream handle_of(uintptr_t stream)
{
        return (CUstream)stream; /* NOLINT: it came as a pointer */
}

/* 906 for the default stream: a stream that synchronizes with it is captured. */
static int is_captured(const struct cuda_streams *c, uintptr_t stream)
{
        CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
        CUresult result = c->context.cu->cuStreamIsCapturing(handle_of(stream), &status);

        if (result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
                return 1;
        if (result != CUDA_SUCCESS)
                return stream_errno(result);
        return status != CU_STREAM_CAPTURE_STATUS_NONE;
}

/* An event of another context cannot be used in this one. */
static int record_here(const struct cuda_streams *c, CUcontext context, uintptr_t stream,
                       struct device_event *event)
{
        const struct cuda_driver *cu = c->context.cu;
        CUresult result = CUDA_SUCCESS;
        int r;

        if (event->event && event->context != context) {
                cu->cuEventDestroy_v2(event->event);
                event->event = NULL;
        }
        if (!event->event)
                result = cu->cuEventCreate(&event->event, CU_EVENT_DISABLE_TIMING);
        if (result != CUDA_SUCCESS) {
                event->event = NULL;
                r = stream_errno(result);
                return r == -EINVAL ? -EAGAIN : r;
        }
        event->context = context;
        return stream_errno(cu->cuEventRecord(event->event, handle_of(stream)));
}

/* In the context of the stream, which must be of this device. */
static int record_there(const struct cuda_streams *c, CUcontext context, uintptr_t stream,
                        struct device_event *event)
{
        const struct cuda_driver *cu = c->context.cu;
        CUresult result = cu->cuCtxPushCurrent_v2(context);
        CUcontext top;
        CUdevice device;
        int r;

        if (result != CUDA_SUCCESS)
                return stream_errno(result);
        result = cu->cuCtxGetDevice(&device);
        r = stream_errno(result);
        if (r == 0)
                r = device == c->context.device ? record_here(c, context, stream, event) : -EINVAL;
        cu->cuCtxPopCurrent_v2(&top);
        return r;
}

static int record(const struct cuda_streams *c, uintptr_t stream, struct device_event *event)
{
        CUcontext context = c->context.context;
        int r = is_captured(c, stream);

        if (r != 0)
                return r < 0 ? r : -EBUSY;
        if (stream > DEVICE_STREAM_PER_THREAD) /* else the current context's */
                r = stream_errno(c->context.cu->cuStreamGetCtx(handle_of(stream), &context));
        if (r != 0)
                return r;
        return context == c->context.context ? record_here(c, context, stream, event)
                                             : record_there(c, context, stream, event);
}

/* ---- the table's functions ------------------------------------------------ */

/* 0: unknown. */
static uint64_t stream_id(const struct cuda_streams *c, uintptr_t stream)
{
        const struct cuda_driver *cu = c->context.cu;
        unsigned long long id;

        if (!cu->cuStreamGetId || stream <= DEVICE_STREAM_PER_THREAD ||
            cu->cuStreamGetId(handle_of(stream), &id) != CUDA_SUCCESS)
                return 0;
        return id;
}

static int cuda_streams_captured(struct device_streams *d, uintptr_t stream, uint64_t *ret_id)
{
        const struct cuda_streams *c = (struct cuda_streams *)d;
        struct cuda_mode mode;
        int r = cuda_context_visit(&c->context, &mode);

        *ret_id = 0;
        if (r < 0)
                return r;
        r = is_captured(c, stream);
        if (r == 0)
                *ret_id = stream_id(c, stream);
        cuda_context_depart(&c->context, &mode);
        return r;
}

static int cuda_streams_record(struct device_streams *d, uintptr_t stream, struct device_event **event)
{
        const struct cuda_streams *c = (struct cuda_streams *)d;
        struct cuda_mode mode;
        int r;

        if (!*event)
                *event = calloc(1, sizeof(**event));
        if (!*event)
                return -ENOMEM;
        r = cuda_context_visit(&c->context, &mode);
        if (r < 0)
                return r;
        r = record(c, stream, *event);
        cuda_context_depart(&c->context, &mode);
        return r;
}

static int cuda_streams_query(struct device_streams *d, struct device_event *event)
{
        const struct cuda_streams *c = (struct cuda_streams *)d;
        struct cuda_mode mode;
        int r = cuda_context_visit(&c->context, &mode);

        if (r < 0)
                return r;
        r = stream_errno(c->context.cu->cuEventQuery(event->event));
        cuda_context_depart(&c->context, &mode);
        return r;
}

/* If the context is gone, so is the event. */
static struct device_event *cuda_streams_forget(struct device_streams *d, struct device_event *event)
{
        const struct cuda_streams *c = (struct cuda_streams *)d;
        struct cuda_mode mode;

        if (event && event->event && cuda_context_visit(&c->context, &mode) == 0) {
                c->context.cu->cuEventDestroy_v2(event->event);
                cuda_context_depart(&c->context, &mode);
        }
        free(event);
        return NULL;
}

static struct device_streams *cuda_streams_free(struct device_streams *d)
{
        struct cuda_streams *c = (struct cuda_streams *)d;

        cuda_context_close(&c->context);
        free(c);
        return NULL;
}

static const struct device_streams_ops cuda_streams_ops = {
        .name = "cuda",
        .free = cuda_streams_free,
        .is_captured = cuda_streams_captured,
        .record = cuda_streams_record,
        .query = cuda_streams_query,
        .forget = cuda_streams_forget,
};

int cuda_streams_new(const struct device_view *view, struct device_streams **ret)
{
        const struct cuda_driver *cu;
        struct cuda_streams *c;
        const char *why;
        CUdevice device;
        int r;

        r = cuda_driver_get(&cu, &why);
        if (r == 0)
                r = cuda_driver_find(cu, view->uuid, &device);
        if (r < 0)
                return r;
        c = calloc(1, sizeof(*c));
        if (!c)
                return -ENOMEM;
        c->streams.ops = &cuda_streams_ops;
        r = cuda_driver_errno(cuda_context_open(cu, device, &c->context));
        if (r < 0) {
                free(c);
                return r;
        }
        *ret = &c->streams;
        return 0;
}
