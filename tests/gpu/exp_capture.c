/* Experiments: may a library wait for its caller's context while the caller
 * captures a stream of it? And which other calls may it make meanwhile?
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

/* ---- each call beside a capture of its own -------------------------------- */

#define CALL_SIZE (4 * MIB)

/* What the calls work on; a call uses what the calls before it made. */
static struct {
        CUstream other;
        CUevent event;
        CUmemGenericAllocationHandle handle, imported;
        CUdeviceptr at, plain, opened;
        CUipcMemHandle exported, of_peer;
        int fd;
} made;

static CUresult call_event_create(void)
{
        return cu.cuEventCreate(&made.event, CU_EVENT_DISABLE_TIMING);
}

static CUresult call_event_record(void)
{
        return cu.cuEventRecord(made.event, made.other);
}

static CUresult call_event_query(void)
{
        return cu.cuEventQuery(made.event);
}

static CUresult call_event_synchronize(void)
{
        return cu.cuEventSynchronize(made.event);
}

static CUresult call_create(void)
{
        CUmemAllocationProp prop = gpu_prop(0);

        return cu.cuMemCreate(&made.handle, CALL_SIZE, &prop, 0);
}

static CUresult call_export(void)
{
        return cu.cuMemExportToShareableHandle(&made.fd, made.handle,
                                               CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
}

static CUresult call_import(void)
{
        return cu.cuMemImportFromShareableHandle(&made.imported, (void *)(intptr_t)made.fd,
                                                 CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
}

static CUresult call_reserve(void)
{
        return cu.cuMemAddressReserve(&made.at, CALL_SIZE, 0, 0, 0);
}

static CUresult call_map(void)
{
        return cu.cuMemMap(made.at, CALL_SIZE, 0, made.imported, 0);
}

static CUresult call_set_access(void)
{
        CUmemAccessDesc access = { .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 },
                                   .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE };

        return cu.cuMemSetAccess(made.at, CALL_SIZE, &access, 1);
}

static CUresult call_copy_in(void)
{
        const char bytes[64] = { 1 };

        return cu.cuMemcpyHtoD_v2(made.at, bytes, sizeof(bytes));
}

static CUresult call_copy_out(void)
{
        char bytes[64];

        return cu.cuMemcpyDtoH_v2(bytes, made.at, sizeof(bytes));
}

static CUresult call_fill(void)
{
        return cu.cuMemsetD8_v2(made.at, 1, CALL_SIZE);
}

static CUresult call_unmap(void)
{
        return cu.cuMemUnmap(made.at, CALL_SIZE);
}

static CUresult call_release(void)
{
        return cu.cuMemRelease(made.imported);
}

static CUresult call_alloc(void)
{
        return cu.cuMemAlloc_v2(&made.plain, CALL_SIZE);
}

static CUresult call_get_handle(void)
{
        return cu.cuIpcGetMemHandle(&made.exported, made.plain);
}

static CUresult call_open_handle(void)
{
        return cu.cuIpcOpenMemHandle_v2(&made.opened, made.of_peer, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
}

static CUresult call_close_handle(void)
{
        return cu.cuIpcCloseMemHandle(made.opened);
}

static CUresult call_free(void)
{
        return cu.cuMemFree_v2(made.plain);
}

static CUresult call_info(void)
{
        size_t n_free, n_total;

        return cu.cuMemGetInfo_v2(&n_free, &n_total);
}

static CUresult call_event_destroy(void)
{
        return cu.cuEventDestroy_v2(made.event);
}

static CUresult call_stream_query(void)
{
        return cu.cuStreamQuery(made.other);
}

static CUresult call_stream_synchronize(void)
{
        return cu.cuStreamSynchronize(made.other);
}

static CUresult call_default_synchronize(void)
{
        return cu.cuStreamSynchronize(CU_STREAM_LEGACY);
}

static CUresult call_context_synchronize(void)
{
        return cu.cuCtxSynchronize();
}

static const struct call {
        const char *name;
        CUresult (*make)(void);
} calls[] = {
        { "cuEventCreate", call_event_create },
        { "cuEventRecord", call_event_record },
        { "cuEventQuery", call_event_query },
        { "cuEventSynchronize", call_event_synchronize },
        { "cuMemCreate", call_create },
        { "cuMemExportToShareableHandle", call_export },
        { "cuMemImportFromShareableHandle", call_import },
        { "cuMemAddressReserve", call_reserve },
        { "cuMemMap", call_map },
        { "cuMemSetAccess", call_set_access },
        { "cuMemcpyHtoD", call_copy_in },
        { "cuMemcpyDtoH", call_copy_out },
        { "cuMemsetD8", call_fill },
        { "cuMemUnmap", call_unmap },
        { "cuMemRelease", call_release },
        { "cuMemAlloc", call_alloc },
        { "cuIpcGetMemHandle", call_get_handle },
        { "cuIpcOpenMemHandle", call_open_handle },
        { "cuIpcCloseMemHandle", call_close_handle },
        { "cuMemFree", call_free },
        { "cuMemGetInfo", call_info },
        { "cuEventDestroy", call_event_destroy },
        { "cuStreamQuery", call_stream_query },
        { "cuStreamSynchronize", call_stream_synchronize },
        { "cuStreamSynchronize_default", call_default_synchronize },
        { "cuCtxSynchronize", call_context_synchronize },
};

/* Waiting for a captured stream never succeeds, and a spoilt capture must not change
 * the answer to the next call: so each call has a stream and a capture of its own. */
static const struct call *called;
static CUresult answer;

static void *relaxed_call(void *context)
{
        CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;

        cu.cuCtxPushCurrent_v2(context);
        cu.cuThreadExchangeStreamCaptureMode(&mode);
        answer = called->make();
        return NULL;
}

static void call_beside_capture(const struct call *call, CUdeviceptr work, unsigned int flags)
{
        CUgraph graph = NULL;
        CUcontext context;
        pthread_t thread;
        CUstream s;

        cu.cuCtxGetCurrent(&context);
        if (cu.cuStreamCreate(&s, flags) != CUDA_SUCCESS ||
            cu.cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_GLOBAL) != CUDA_SUCCESS)
                skip("cannot capture");
        cu.cuMemsetD8Async(work, 1, MIB, s);
        called = call;
        answer = CUDA_ERROR_UNKNOWN;
        if (pthread_create(&thread, NULL, relaxed_call, context) == 0)
                pthread_join(thread, NULL);
        say_open(NULL, '{');
        say_text("call", call->name);
        say_error("answer", answer);
        say_status("capture_then", s);
        say_error("end", cu.cuStreamEndCapture(s, &graph));
        say_close('}');
        if (graph)
                cu.cuGraphDestroy(graph);
        cu.cuStreamDestroy_v2(s);
}

static void calls_while_captured(unsigned int flags)
{
        struct peer p = start_peer((uid_t)-1, 0);
        struct peer_message m = { .op = PEER_ALLOC, .a = CALL_SIZE };
        CUdeviceptr work;

        if (ask(&p, &m) == CUDA_SUCCESS) {
                m = (struct peer_message){ .op = PEER_GET_HANDLE, .a = m.a };
                ask(&p, &m);
                made.of_peer = m.handle;
        }
        start_here();
        if (cu.cuMemAlloc_v2(&work, MIB) != CUDA_SUCCESS ||
            cu.cuStreamCreate(&made.other, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS)
                skip("cannot make a stream");
        say_open("calls", '[');
        for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++)
                call_beside_capture(&calls[i], work, flags);
        say_close(']');
        say_error("context", cu.cuCtxSynchronize());
        peer_end(&p);
}

static void capture_calls(void)
{
        calls_while_captured(CU_STREAM_NON_BLOCKING);
}

static void capture_calls_blocking(void)
{
        calls_while_captured(CU_STREAM_DEFAULT);
}

const struct experiment capture_experiments[] = {
        { "capture-wait", "does a relaxed wait for the context spoil a capture", capture_wait },
        { "capture-wait-blocking", "and that of a blocking stream", capture_wait_blocking },
        { "capture-calls", "which calls of a relaxed thread spoil a capture", capture_calls },
        { "capture-calls-blocking", "and that of a blocking stream", capture_calls_blocking },
        { NULL, NULL, NULL },
};
