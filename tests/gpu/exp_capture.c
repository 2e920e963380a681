/* Experiments: may a library wait for its caller's context while the caller
 * captures a stream of it?
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/experiments.h"

#include <pthread.h>

static void say_status(const char *name, CUstream s)
{
        CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;

        cu.cuStreamIsCapturing(s, &status);
        say_text(name, status == CU_STREAM_CAPTURE_STATUS_ACTIVE ? "active" : "spoilt");
}

static void *relaxed_wait(void *context)
{
        CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
        CUstreamCaptureStatus status;

        cu.cuCtxPushCurrent_v2(context);
        cu.cuThreadExchangeStreamCaptureMode(&mode);
        say_error("default_stream_asked", cu.cuStreamIsCapturing(CU_STREAM_LEGACY, &status));
        say_error("context_waited_for", cu.cuCtxSynchronize());
        return NULL;
}

static void wait_while_captured(unsigned int flags)
{
        CUgraph graph = NULL;
        CUcontext context;
        pthread_t thread;
        CUstream s;

        start_here();
        cu.cuCtxGetCurrent(&context);
        if (cu.cuStreamCreate(&s, flags) != CUDA_SUCCESS ||
            cu.cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_GLOBAL) != CUDA_SUCCESS)
                skip("cannot capture");
        if (pthread_create(&thread, NULL, relaxed_wait, context) == 0)
                pthread_join(thread, NULL);
        say_status("capture_then", s);
        say_error("end", cu.cuStreamEndCapture(s, &graph));
}

static void capture_wait_blocking(void)
{
        wait_while_captured(CU_STREAM_DEFAULT);
}

static void capture_wait(void)
{
        wait_while_captured(CU_STREAM_NON_BLOCKING);
}

const struct experiment capture_experiments[] = {
        { "capture-wait", "does a relaxed wait for the context spoil a capture", capture_wait },
        { "capture-wait-blocking", "and that of a blocking stream", capture_wait_blocking },
        { NULL, NULL, NULL },
};
