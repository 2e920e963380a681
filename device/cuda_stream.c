/* Streams of a CUDA device, as the client's end sees them; see device.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * An event is made in the device's primary context, which the runtime API's streams
 * belong to; a stream of another device, or of another context, is none of ours and
 * refused by the driver. As in cuda_range.c the thread is in relaxed capture mode
 * meanwhile, in which a driver lets events be made and asked beside a capture.
 *
 * A stream that is being captured has no work: what it is given becomes a graph, which
 * runs later, or never. An event recorded there would become a part of the graph and could
 * never be asked (907). So the stream is asked first; where a capture begins between the
 * two, the query finds out. */
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
};

/* What nobody expects says nothing about the work, so it is no -EIO. */
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

/* 906 for the default stream: a stream that waits for it is captured. */
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

static int record(const struct cuda_streams *c, uintptr_t stream, struct device_event *event)
{
        const struct cuda_driver *cu = c->context.cu;
        CUresult result = CUDA_SUCCESS;
        int r = is_captured(c, stream);

        if (r != 0)
                return r < 0 ? r : -EBUSY;
        if (!event->event)
                result = cu->cuEventCreate(&event->event, CU_EVENT_DISABLE_TIMING);
        if (result != CUDA_SUCCESS) {
                event->event = NULL;
                r = stream_errno(result);
                return r == -EINVAL ? -EAGAIN : r;
        }
        return stream_errno(cu->cuEventRecord(event->event, handle_of(stream)));
}

/* ---- the table's functions ------------------------------------------------ */

static int cuda_streams_captured(struct device_streams *d, uintptr_t stream)
{
        const struct cuda_streams *c = (struct cuda_streams *)d;
        struct cuda_mode mode;
        int r = cuda_context_visit(&c->context, &mode);

        if (r < 0)
                return r;
        r = is_captured(c, stream);
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

/* In a context that is gone the event is gone too. */
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
