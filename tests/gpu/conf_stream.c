/* Conformance: work that takes its time, events, and what capture forbids.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The fake is told to be slow, so that "not ready" must be seen; a real GPU may
 * be done before it is asked. */
#include "tests/gpu/conformance.h"

#include <unistd.h>

static CUdeviceptr memory;
static CUstream a, b;

static void setup(void)
{
        setenv("FAKE_CUDA_STREAM_DELAY_US", "20000", 1);
        conformance_setup();
        OK(cu.cuMemAlloc_v2(&memory, 4 * MIB));
        OK(cu.cuStreamCreate(&a, CU_STREAM_NON_BLOCKING));
        OK(cu.cuStreamCreate(&b, CU_STREAM_NON_BLOCKING));
}

static void teardown(void)
{
        OK(cu.cuStreamDestroy_v2(a));
        OK(cu.cuStreamDestroy_v2(b));
        OK(cu.cuMemFree_v2(memory));
        conformance_teardown();
}

FIXTURE(stream, setup, teardown);

static void not_ready_yet(CUresult r)
{
        ck_assert_msg(r == CUDA_ERROR_NOT_READY || (!is_fake && r == CUDA_SUCCESS), "%s", gpu_error(r));
}

TEST(work_runs_asynchronously_and_in_order)
{
        unsigned char first[16], second[16];

        OK(cu.cuMemsetD8Async(memory, 1, MIB, a));
        OK(cu.cuMemcpyDtoHAsync_v2(first, memory, sizeof(first), a));
        OK(cu.cuMemsetD8Async(memory, 2, MIB, a));
        OK(cu.cuMemcpyDtoHAsync_v2(second, memory, sizeof(second), a));
        not_ready_yet(cu.cuStreamQuery(a));
        OK(cu.cuStreamSynchronize(a));
        OK(cu.cuStreamQuery(a));
        ck_assert_int_eq(first[15], 1);
        ck_assert_int_eq(second[15], 2);
        OK(cu.cuStreamQuery(b));
}

TEST(an_event_is_a_point_in_a_stream)
{
        CUevent event;

        OK(cu.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
        OK(cu.cuEventQuery(event)); /* never recorded: passed */
        OK(cu.cuEventSynchronize(event));
        OK(cu.cuMemsetD8Async(memory, 3, MIB, a));
        OK(cu.cuEventRecord(event, a));
        not_ready_yet(cu.cuEventQuery(event));
        OK(cu.cuEventSynchronize(event));
        OK(cu.cuEventQuery(event));
        OK(cu.cuMemsetD8Async(memory, 4, MIB, a));
        OK(cu.cuEventQuery(event)); /* of what was before, not of what comes after */
        OK(cu.cuEventRecord(event, a));
        OK(cu.cuEventDestroy_v2(event)); /* while it is pending */
        OK(cu.cuStreamSynchronize(a));
}

TEST(a_stream_waits_for_anothers_event)
{
        unsigned char byte = 0;
        CUevent event;

        OK(cu.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
        OK(cu.cuMemsetD8Async(memory, 5, 4 * MIB, a));
        OK(cu.cuMemsetD8Async(memory, 6, 4 * MIB, a));
        OK(cu.cuEventRecord(event, a));
        OK(cu.cuStreamWaitEvent(b, event, 0));
        OK(cu.cuMemcpyDtoHAsync_v2(&byte, memory + 4 * MIB - 1, 1, b));
        OK(cu.cuStreamSynchronize(b));
        ck_assert_int_eq(byte, 6);
        OK(cu.cuEventDestroy_v2(event));
}

TEST(the_default_stream_waits_for_blocking_ones)
{
        unsigned char byte = 0;
        CUstream blocking;

        OK(cu.cuStreamCreate(&blocking, CU_STREAM_DEFAULT));
        OK(cu.cuMemsetD8Async(memory, 7, MIB, blocking));
        OK(cu.cuMemcpyDtoH_v2(&byte, memory, 1));
        ck_assert_int_eq(byte, 7);
        OK(cu.cuStreamDestroy_v2(blocking));
}

TEST(free_waits_for_the_work_that_uses_it)
{
        CUdeviceptr p;

        OK(cu.cuMemAlloc_v2(&p, 4 * MIB));
        for (int i = 0; i < 3; i++)
                OK(cu.cuMemsetD8Async(p, (unsigned char)i, 4 * MIB, a));
        OK(cu.cuMemFree_v2(p));
        OK(cu.cuCtxSynchronize());
}

static void note(void *data)
{
        __atomic_add_fetch((int *)data, 1, __ATOMIC_RELAXED);
}

TEST(a_host_function_is_called_in_turn)
{
        int n = 0;

        OK(cu.cuMemsetD8Async(memory, 8, MIB, a));
        OK(cu.cuLaunchHostFunc(a, note, &n));
        OK(cu.cuLaunchHostFunc(a, note, &n));
        OK(cu.cuStreamSynchronize(a));
        ck_assert_int_eq(__atomic_load_n(&n, __ATOMIC_RELAXED), 2);
}

TEST(destroyed_streams_finish_their_work)
{
        CUstream s;
        int n = 0;

        OK(cu.cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
        OK(cu.cuLaunchHostFunc(s, note, &n));
        OK(cu.cuStreamDestroy_v2(s));
        OK(cu.cuCtxSynchronize());
        for (int i = 0; i < 12000 && __atomic_load_n(&n, __ATOMIC_RELAXED) == 0; i++)
                usleep(10000);
        ck_assert_int_eq(__atomic_load_n(&n, __ATOMIC_RELAXED), 1);
}

static void wait_for_flag(void *data)
{
        for (int i = 0; i < 30000 && __atomic_load_n((int *)data, __ATOMIC_ACQUIRE) == 0; i++)
                usleep(10000);
}

/* The work continues, and an event that was recorded in it still reports it. */
TEST(destroying_a_stream_waits_for_nothing)
{
        CUevent event;
        CUstream s;
        int flag = 0, n = 0;

        OK(cu.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
        OK(cu.cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
        OK(cu.cuLaunchHostFunc(s, wait_for_flag, &flag));
        OK(cu.cuLaunchHostFunc(s, note, &n));
        OK(cu.cuEventRecord(event, s));
        OK(cu.cuStreamDestroy_v2(s));
        ck_assert_int_eq(__atomic_load_n(&n, __ATOMIC_RELAXED), 0);
        IS(CUDA_ERROR_NOT_READY, cu.cuEventQuery(event));
        __atomic_store_n(&flag, 1, __ATOMIC_RELEASE);
        OK(cu.cuEventSynchronize(event));
        ck_assert_int_eq(__atomic_load_n(&n, __ATOMIC_RELAXED), 1);
        OK(cu.cuEventQuery(event));
        OK(cu.cuEventDestroy_v2(event));
}

/* ---- capture ------------------------------------------------------------- */

static void expect_capture(CUstream s, CUstreamCaptureStatus expected)
{
        CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;

        OK(cu.cuStreamIsCapturing(s, &status));
        ck_assert_int_eq((int)status, (int)expected);
}

TEST(a_captured_stream_does_nothing_yet)
{
        unsigned char byte = 0;
        CUgraph graph = NULL;

        OK(cu.cuMemsetD8_v2(memory, 9, MIB));
        expect_capture(a, CU_STREAM_CAPTURE_STATUS_NONE);
        OK(cu.cuStreamBeginCapture_v2(a, CU_STREAM_CAPTURE_MODE_RELAXED));
        expect_capture(a, CU_STREAM_CAPTURE_STATUS_ACTIVE);
        expect_capture(b, CU_STREAM_CAPTURE_STATUS_NONE);
        OK(cu.cuMemsetD8Async(memory, 10, MIB, a));
        OK(cu.cuStreamEndCapture(a, &graph));
        ck_assert_ptr_nonnull(graph);
        OK(cu.cuGraphDestroy(graph));
        OK(cu.cuMemcpyDtoH_v2(&byte, memory, 1));
        ck_assert_int_eq(byte, 9);
}

TEST(global_capture_forbids_unsafe_calls)
{
        CUgraph graph = NULL;
        CUdeviceptr p;
        CUevent event;

        OK(cu.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
        OK(cu.cuEventRecord(event, b));
        OK(cu.cuStreamBeginCapture_v2(a, CU_STREAM_CAPTURE_MODE_GLOBAL));
        IS(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cu.cuMemAlloc_v2(&p, MIB));
        expect_capture(a, CU_STREAM_CAPTURE_STATUS_INVALIDATED);
        IS(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cu.cuStreamEndCapture(a, &graph));
        expect_capture(a, CU_STREAM_CAPTURE_STATUS_NONE);
        OK(cu.cuStreamBeginCapture_v2(a, CU_STREAM_CAPTURE_MODE_GLOBAL));
        IS(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cu.cuEventQuery(event));
        REFUSED(cu.cuStreamEndCapture(a, &graph));
        OK(cu.cuEventSynchronize(event));
        OK(cu.cuEventDestroy_v2(event));
}

TEST(relaxed_capture_allows_unsafe_calls)
{
        CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
        CUgraph graph = NULL;
        CUdeviceptr p;

        OK(cu.cuStreamBeginCapture_v2(a, CU_STREAM_CAPTURE_MODE_GLOBAL));
        OK(cu.cuThreadExchangeStreamCaptureMode(&mode));
        ck_assert_int_eq((int)mode, CU_STREAM_CAPTURE_MODE_GLOBAL);
        OK(cu.cuMemAlloc_v2(&p, MIB));
        OK(cu.cuThreadExchangeStreamCaptureMode(&mode));
        ck_assert_int_eq((int)mode, CU_STREAM_CAPTURE_MODE_RELAXED);
        OK(cu.cuStreamEndCapture(a, &graph));
        OK(cu.cuGraphDestroy(graph));
        OK(cu.cuMemFree_v2(p));
}

/* Of any stream of it, by whichever thread. */
LOOP_TEST(synchronizing_the_context_invalidates_a_capture, 2)
{
        const CUstreamCaptureMode modes[] = { CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_RELAXED };
        CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
        CUgraph graph = NULL;

        OK(cu.cuThreadExchangeStreamCaptureMode(&mode));
        OK(cu.cuStreamBeginCapture_v2(a, modes[_i]));
        REFUSED(cu.cuCtxSynchronize());
        expect_capture(a, CU_STREAM_CAPTURE_STATUS_INVALIDATED);
        IS(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cu.cuStreamEndCapture(a, &graph));
        OK(cu.cuCtxSynchronize());
        OK(cu.cuThreadExchangeStreamCaptureMode(&mode));
}

/* What a process does to map an extent, and to unmap it. */
LOOP_TEST(a_relaxed_thread_may_map_and_unmap, machine.has_vmm)
{
        CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
        struct gpu_mapping m;
        CUgraph graph = NULL;

        OK(cu.cuStreamBeginCapture_v2(a, CU_STREAM_CAPTURE_MODE_GLOBAL));
        OK(cu.cuThreadExchangeStreamCaptureMode(&mode));
        OK(gpu_create_and_map(device, 2 * MIB, &m));
        OK(gpu_unmap(&m));
        OK(cu.cuThreadExchangeStreamCaptureMode(&mode));
        OK(cu.cuStreamEndCapture(a, &graph));
        OK(cu.cuGraphDestroy(graph));
}

/* Nor by a relaxed thread. */
TEST(the_default_stream_invalidates_blocking_captures)
{
        CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
        CUgraph graph = NULL;
        CUstream blocking;

        OK(cu.cuStreamCreate(&blocking, CU_STREAM_DEFAULT));
        OK(cu.cuThreadExchangeStreamCaptureMode(&mode));
        OK(cu.cuStreamBeginCapture_v2(blocking, CU_STREAM_CAPTURE_MODE_GLOBAL));
        REFUSED(cu.cuMemsetD8Async(memory, 1, MIB, CU_STREAM_LEGACY));
        IS(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cu.cuStreamEndCapture(blocking, &graph));
        OK(cu.cuThreadExchangeStreamCaptureMode(&mode));
        OK(cu.cuStreamDestroy_v2(blocking));
}

/* What a library may ask about streams that it does not know. */
TEST(the_default_stream_reports_blocking_captures)
{
        CUstreamCaptureStatus status;
        CUgraph graph = NULL;
        CUstream blocking;

        OK(cu.cuStreamCreate(&blocking, CU_STREAM_DEFAULT));
        expect_capture(CU_STREAM_LEGACY, CU_STREAM_CAPTURE_STATUS_NONE);
        OK(cu.cuStreamBeginCapture_v2(blocking, CU_STREAM_CAPTURE_MODE_GLOBAL));
        IS(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, cu.cuStreamIsCapturing(CU_STREAM_LEGACY, &status));
        expect_capture(blocking, CU_STREAM_CAPTURE_STATUS_ACTIVE);
        OK(cu.cuStreamEndCapture(blocking, &graph));
        OK(cu.cuGraphDestroy(graph));
        expect_capture(CU_STREAM_LEGACY, CU_STREAM_CAPTURE_STATUS_NONE);
        OK(cu.cuStreamDestroy_v2(blocking));
}

TEST(a_captured_event_cannot_be_queried)
{
        CUgraph graph = NULL;
        CUevent event;

        OK(cu.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
        OK(cu.cuStreamBeginCapture_v2(a, CU_STREAM_CAPTURE_MODE_RELAXED));
        OK(cu.cuMemsetD8Async(memory, 11, MIB, a));
        OK(cu.cuEventRecord(event, a));
        IS(CUDA_ERROR_CAPTURED_EVENT, cu.cuEventQuery(event));
        cu.cuStreamEndCapture(a, &graph);
        if (graph)
                cu.cuGraphDestroy(graph);
        OK(cu.cuEventDestroy_v2(event));
}

TEST(a_captured_stream_cannot_be_synchronized)
{
        CUgraph graph = NULL;

        OK(cu.cuStreamBeginCapture_v2(a, CU_STREAM_CAPTURE_MODE_RELAXED));
        IS(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cu.cuStreamSynchronize(a));
        REFUSED(cu.cuStreamEndCapture(a, &graph));
        OK(cu.cuStreamSynchronize(a));
}
