/* Experiments: legacy IPC handles.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/experiments.h"

#include <signal.h>
#include <string.h>

#define SIZE   (8 * MIB)
#define NOBODY ((uid_t)65534)

/* The peer allocates, fills and exports. */
static uint64_t peer_export(struct peer *p, unsigned char value, CUipcMemHandle *ret)
{
        struct peer_message m = { .op = PEER_ALLOC, .a = SIZE };
        uint64_t at;

        if (ask(p, &m) != CUDA_SUCCESS)
                skip("the peer cannot allocate");
        at = m.a;
        m = (struct peer_message){ .op = PEER_FILL, .a = at, .b = value, .c = SIZE };
        ask(p, &m);
        m = (struct peer_message){ .op = PEER_GET_HANDLE, .a = at };
        if (ask(p, &m) != CUDA_SUCCESS) {
                say_error("get_handle", m.result);
                skip("no handle");
        }
        *ret = m.handle;
        return at;
}

static CUdeviceptr export_here(unsigned char value, CUipcMemHandle *ret)
{
        CUdeviceptr at = 0;

        if (cu.cuMemAlloc_v2(&at, SIZE) != CUDA_SUCCESS ||
            cu.cuMemsetD8_v2(at, value, SIZE) != CUDA_SUCCESS ||
            cu.cuIpcGetMemHandle(ret, at) != CUDA_SUCCESS)
                skip("cannot export");
        return at;
}

/* Can a peer of that kind open what this process exported, and read it? */
static void open_by(struct peer *p)
{
        struct peer_message m = { .op = PEER_OPEN };

        export_here(0x31, &m.handle);
        say_error("open", ask(p, &m));
        if (m.result == CUDA_SUCCESS) {
                m = (struct peer_message){ .op = PEER_COUNT, .a = m.a, .b = 0x31, .c = SIZE };
                ask(p, &m);
                say_flag("same_bytes", m.a == 0);
        }
        peer_end(p);
}

static void other_user(void)
{
        struct peer p = start_peer(NOBODY, 0);

        start_here();
        open_by(&p);
}

static void other_user_exports(void)
{
        struct peer p = start_peer(NOBODY, 0);
        CUipcMemHandle handle;
        CUdeviceptr at;

        start_here();
        peer_export(&p, 0x32, &handle);
        say_error("open", cu.cuIpcOpenMemHandle_v2(&at, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
        peer_end(&p);
}

static void other_pid_namespace(void)
{
        struct peer p = start_peer((uid_t)-1, PEER_NEW_PID_NAMESPACE);

        start_here();
        open_by(&p);
}

static void other_net_namespace(void)
{
        struct peer p = start_peer((uid_t)-1, PEER_NEW_NET_NAMESPACE);

        start_here();
        open_by(&p);
}

/* Two small allocations may share what one handle opens. */
static void small_allocations(void)
{
        struct peer p = start_peer((uid_t)-1, 0);
        struct peer_message m = { .op = PEER_OPEN };
        CUdeviceptr a = 0, b = 0;

        start_here();
        cu.cuMemAlloc_v2(&a, 4096);
        cu.cuMemAlloc_v2(&b, 4096);
        cu.cuMemsetD8_v2(a, 0x35, 4096);
        cu.cuMemsetD8_v2(b, 0x36, 4096);
        say_number("distance", (double)(int64_t)(b - a));
        say_error("get_handle", cu.cuIpcGetMemHandle(&m.handle, a));
        if (ask(&p, &m) == CUDA_SUCCESS) {
                uint64_t base = m.a;

                m = (struct peer_message){ .op = PEER_COUNT, .a = base, .b = 0x35, .c = 4096 };
                ask(&p, &m);
                say_flag("opens_at_the_first", m.a == 0);
                m = (struct peer_message){ .op = PEER_COUNT, .a = base + (b - a), .b = 0x36, .c = 4096 };
                ask(&p, &m);
                say_flag("second_readable_too", m.a == 0);
        }
        peer_end(&p);
}

/* ---- what is documented as undefined -------------------------------------- */

enum ending { ENDING_FREE, ENDING_EXIT, ENDING_KILL };

static void end_exporter(struct peer *p, uint64_t at, enum ending how)
{
        struct peer_message m = { .op = PEER_FREE, .a = at };

        switch (how) {
        case ENDING_FREE:
                say_error("exporters_free", ask(p, &m));
                break;
        case ENDING_EXIT:
                peer_end(p);
                break;
        case ENDING_KILL:
                peer_kill(p);
                break;
        }
}

static void after_end(enum ending how)
{
        struct peer p = start_peer((uid_t)-1, 0);
        CUipcMemHandle handle;
        CUdeviceptr at = 0, again;
        size_t n_free, n_other;
        uint64_t there;

        start_here();
        there = peer_export(&p, 0x37, &handle);
        say_error("open_before", cu.cuIpcOpenMemHandle_v2(&at, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
        end_exporter(&p, there, how);
        n_other = gpu_count_other(at, 0x37, SIZE);
        say_text("mapping_then", n_other == 0          ? "the same bytes"
                                 : n_other == SIZE_MAX ? "cannot be read"
                                                       : "other bytes");
        say_error("error_then", cu.cuCtxSynchronize());
        say_error("open_again", cu.cuIpcOpenMemHandle_v2(&again, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
        n_free = gpu_n_free();
        say_error("close", cu.cuIpcCloseMemHandle(at));
        say_number("returned_by_close", (double)gpu_n_free() - (double)n_free);
        say_error("open_after_close",
                  cu.cuIpcOpenMemHandle_v2(&again, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
        if (p.pid > 0)
                peer_end(&p);
}

static void after_free(void)
{
        after_end(ENDING_FREE);
}

static void after_exit(void)
{
        after_end(ENDING_EXIT);
}

static void after_kill(void)
{
        after_end(ENDING_KILL);
}

/* A relaxed thread, beside the capture of a stream that does not wait for the default stream. */
static void close_in_capture(void)
{
        CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
        struct peer p = start_peer((uid_t)-1, 0);
        CUgraph graph = NULL;
        CUipcMemHandle handle;
        CUdeviceptr at;
        CUstream s;

        start_here();
        peer_export(&p, 0x39, &handle);
        if (cu.cuStreamCreate(&s, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS ||
            cu.cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_GLOBAL) != CUDA_SUCCESS)
                skip("cannot capture");
        cu.cuThreadExchangeStreamCaptureMode(&mode);
        say_error("open", cu.cuIpcOpenMemHandle_v2(&at, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
        say_error("close", cu.cuIpcCloseMemHandle(at));
        say_error("end_of_capture", cu.cuStreamEndCapture(s, &graph));
        peer_end(&p);
}

static void stale_overlap(void)
{
        struct peer p = start_peer((uid_t)-1, 0);
        struct peer_message m = { .op = PEER_FREE };
        CUipcMemHandle before, after;
        CUdeviceptr old, new;
        CUresult r;

        start_here();
        m.a = peer_export(&p, 1, &before);
        say_error("open_old", cu.cuIpcOpenMemHandle_v2(&old, before, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
        ask(&p, &m);
        say_flag("same_address_again", peer_export(&p, 2, &after) == m.a);
        say_flag("same_handle_again", memcmp(&before, &after, sizeof(before)) == 0);
        r = cu.cuIpcOpenMemHandle_v2(&new, after, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
        say_error("open_new", r);
        if (r == CUDA_SUCCESS) {
                say_flag("new_has_its_bytes", gpu_count_other(new, 2, SIZE) == 0);
                say_flag("old_has_its_bytes", gpu_count_other(old, 1, SIZE) == 0);
        }
        say_error("close_old", cu.cuIpcCloseMemHandle(old));
        say_error("open_new_then", cu.cuIpcOpenMemHandle_v2(&new, after, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
        peer_end(&p);
}

static void reexport(void)
{
        struct peer p = start_peer((uid_t)-1, 0), third = start_peer((uid_t)-1, 0);
        struct peer_message m = { .op = PEER_OPEN };
        CUipcMemHandle handle;
        CUdeviceptr at = 0;
        CUresult r;

        start_here();
        peer_export(&p, 0x38, &handle);
        say_error("open", cu.cuIpcOpenMemHandle_v2(&at, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
        r = cu.cuIpcGetMemHandle(&m.handle, at);
        say_error("get_handle_of_opened", r);
        if (r == CUDA_SUCCESS) {
                say_flag("same_handle", memcmp(&handle, &m.handle, sizeof(handle)) == 0);
                say_error("third_process_opens_it", ask(&third, &m));
        }
        m = (struct peer_message){ .op = PEER_OPEN, .handle = handle };
        say_error("third_process_opens_original", ask(&third, &m));
        peer_end(&p);
        peer_end(&third);
}

const struct experiment ipc_experiments[] = {
        { "ipc-other-user", "does a handle open under another uid", other_user },
        { "ipc-other-user-exports", "and the other way round", other_user_exports },
        { "ipc-pid-namespace", "does a handle open in another PID namespace", other_pid_namespace },
        { "ipc-net-namespace", "does a handle open in another network namespace", other_net_namespace },
        { "ipc-small-allocations", "does one handle show a neighbour's small allocation", small_allocations },
        { "ipc-after-free", "a mapping, and opening, after the exporter's free", after_free },
        { "ipc-after-exit", "a mapping, and opening, after the exporter's exit", after_exit },
        { "ipc-after-kill", "a mapping, and opening, after the exporter's SIGKILL", after_kill },
        { "ipc-close-in-capture", "does opening and closing a handle spoil a capture", close_in_capture },
        { "ipc-stale-overlap", "opening what lies where a freed allocation is still open", stale_overlap },
        { "ipc-reexport", "can an opened pointer be exported again", reexport },
        { NULL, NULL, NULL },
};
