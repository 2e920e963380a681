/* Experiments: what a driver answers for the handle of a destroyed stream.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Every call is a case of its own, because a driver may crash in it, and then that is the
 * answer. Otherwise each case asks twice: while the work of the destroyed stream is pending, and after it has completed. */
#include "tests/gpu/experiments.h"

#define N_FILLS 200

static CUstream stream; /* destroyed, once destroy_with_work() has returned */
static CUevent event;   /* recorded behind the stream's work */

/* Leaves work pending on a stream and destroys the stream. */
static void destroy_with_work(void)
{
        size_t n_bytes = max_n_bytes < 1024 * MIB ? max_n_bytes : 1024 * MIB;
        CUdeviceptr at;
        double began;
        CUresult r;

        start_here();
        if (cu.cuMemAlloc_v2(&at, n_bytes) != CUDA_SUCCESS ||
            cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS ||
            cu.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS)
                skip("cannot make a stream");
        for (int i = 0; i < (is_quick ? 2 : N_FILLS); i++)
                cu.cuMemsetD8Async(at, (unsigned char)i, n_bytes, stream);
        say_error("record", cu.cuEventRecord(event, stream));
        began = now_us();
        r = cu.cuStreamDestroy_v2(stream);
        say_number("destroy_us", now_us() - began);
        say_error("destroy", r);
}

static void ask_twice(CUresult (*call)(void))
{
        destroy_with_work();
        crash_is_an_answer();
        say_error("while_work_is_pending", call());
        say_error("event", cu.cuEventQuery(event));
        say_error("context", cu.cuCtxSynchronize());
        say_error("after_the_work", call());
        say_error("event_then", cu.cuEventQuery(event));
        say_error("context_then", cu.cuCtxSynchronize());
}

static CUresult call_is_capturing(void)
{
        CUstreamCaptureStatus status;

        return cu.cuStreamIsCapturing(stream, &status);
}

static CUresult call_query(void)
{
        return cu.cuStreamQuery(stream);
}

static CUresult call_record(void)
{
        return cu.cuEventRecord(event, stream);
}

static CUresult call_wait_event(void)
{
        return cu.cuStreamWaitEvent(stream, event, 0);
}

static CUresult call_synchronize(void)
{
        return cu.cuStreamSynchronize(stream);
}

static void destroyed_is_capturing(void)
{
        ask_twice(call_is_capturing);
}

static void destroyed_query(void)
{
        ask_twice(call_query);
}

static void destroyed_record(void)
{
        ask_twice(call_record);
}

static void destroyed_wait_event(void)
{
        ask_twice(call_wait_event);
}

static void destroyed_synchronize(void)
{
        ask_twice(call_synchronize);
}

/* A handle that a driver uses again names another stream: no check can find that. */
static void destroyed_handle_again(void)
{
        CUstream next = NULL;
        int n_same = 0;

        destroy_with_work();
        say_error("event", cu.cuEventQuery(event));
        say_error("event_waited_for", cu.cuEventSynchronize(event));
        for (int i = 0; i < 10; i++)
                if (cu.cuStreamCreate(&next, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS)
                        n_same += next == stream;
        say_number("new_streams_with_that_handle", n_same);
}

const struct experiment stream_experiments[] = {
        { "destroyed-is-capturing", "cuStreamIsCapturing of a destroyed stream", destroyed_is_capturing },
        { "destroyed-query", "cuStreamQuery of a destroyed stream", destroyed_query },
        { "destroyed-record", "cuEventRecord in a destroyed stream", destroyed_record },
        { "destroyed-wait-event", "cuStreamWaitEvent of a destroyed stream", destroyed_wait_event },
        { "destroyed-synchronize", "cuStreamSynchronize of a destroyed stream", destroyed_synchronize },
        { "destroyed-handle-again", "does a new stream get the handle of a destroyed one",
          destroyed_handle_again },
        { NULL, NULL, NULL },
};
