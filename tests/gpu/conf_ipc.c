/* Conformance: legacy IPC handles between processes.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/conformance.h"

#include <string.h>

static struct peer peer;

static void setup(void)
{
        conformance_setup();
        peer = conformance_peer();
}

static void teardown(void)
{
        if (peer.pid > 0)
                peer_end(&peer);
        conformance_teardown();
}

FIXTURE(ipc, setup, teardown);

static uint64_t peer_open(const CUipcMemHandle *handle)
{
        struct peer_message m = { .op = PEER_OPEN, .handle = *handle };

        tell(&peer, &m, -1, NULL);
        return m.a;
}

static void peer_close(uint64_t at)
{
        struct peer_message m = { .op = PEER_CLOSE, .a = at };

        tell(&peer, &m, -1, NULL);
}

static uint64_t peer_count_other(uint64_t at, unsigned char value, size_t n_bytes)
{
        struct peer_message m = { .op = PEER_COUNT, .a = at, .b = value, .c = n_bytes };

        tell(&peer, &m, -1, NULL);
        return m.a;
}

/* The peer exports; returns its pointer. */
static uint64_t peer_export(size_t n_bytes, unsigned char value, CUipcMemHandle *ret)
{
        struct peer_message m = { .op = PEER_ALLOC, .a = n_bytes };
        uint64_t at;

        tell(&peer, &m, -1, NULL);
        at = m.a;
        m = (struct peer_message){ .op = PEER_FILL, .a = at, .b = value, .c = n_bytes };
        tell(&peer, &m, -1, NULL);
        m = (struct peer_message){ .op = PEER_GET_HANDLE, .a = at };
        tell(&peer, &m, -1, NULL);
        *ret = m.handle;
        return at;
}

TEST(two_processes_share_memory_by_handle)
{
        CUipcMemHandle handle;
        CUdeviceptr p;
        uint64_t at;
        struct peer_message m;

        OK(cu.cuMemAlloc_v2(&p, 4 * MIB));
        OK(cu.cuMemsetD8_v2(p, 1, 4 * MIB));
        OK(cu.cuIpcGetMemHandle(&handle, p));
        at = peer_open(&handle);
        ck_assert_uint_eq(peer_count_other(at, 1, 4 * MIB), 0);
        m = (struct peer_message){ .op = PEER_FILL, .a = at + MIB, .b = 2, .c = MIB };
        tell(&peer, &m, -1, NULL);
        ck_assert_uint_eq(gpu_count_other(p, 1, MIB), 0);
        ck_assert_uint_eq(gpu_count_other(p + MIB, 2, MIB), 0);
        ck_assert_uint_eq(gpu_count_other(p + 2 * MIB, 1, 2 * MIB), 0);
        peer_close(at);
        ck_assert_uint_eq(gpu_count_other(p + MIB, 2, MIB), 0); /* the exporter's is untouched */
        OK(cu.cuMemFree_v2(p));
}

TEST(a_handle_of_any_address_opens_the_base)
{
        CUipcMemHandle of_base, of_inside;
        CUdeviceptr p;
        uint64_t at;

        OK(cu.cuMemAlloc_v2(&p, 4 * MIB));
        OK(cu.cuMemsetD8_v2(p, 3, 2 * MIB));
        OK(cu.cuMemsetD8_v2(p + 2 * MIB, 4, 2 * MIB));
        OK(cu.cuIpcGetMemHandle(&of_base, p));
        OK(cu.cuIpcGetMemHandle(&of_inside, p + 2 * MIB + 512));
        ck_assert_int_eq(memcmp(&of_base, &of_inside, sizeof(of_base)), 0);
        at = peer_open(&of_inside);
        ck_assert_uint_eq(peer_count_other(at, 3, 2 * MIB), 0);
        ck_assert_uint_eq(peer_count_other(at + 2 * MIB, 4, 2 * MIB), 0);
        peer_close(at);
        OK(cu.cuMemFree_v2(p));
}

TEST(opened_twice_is_one_mapping_with_a_count)
{
        CUipcMemHandle handle;
        struct peer_message m = { .op = PEER_CLOSE };
        CUdeviceptr p;
        uint64_t at;

        OK(cu.cuMemAlloc_v2(&p, 2 * MIB));
        OK(cu.cuMemsetD8_v2(p, 5, 2 * MIB));
        OK(cu.cuIpcGetMemHandle(&handle, p));
        at = peer_open(&handle);
        ck_assert_uint_eq(peer_open(&handle), at);
        peer_close(at);
        ck_assert_uint_eq(peer_count_other(at, 5, 2 * MIB), 0);
        peer_close(at);
        m.a = at;
        REFUSED(peer_call(&peer, &m, -1, NULL));
        OK(cu.cuMemFree_v2(p));
}

TEST(the_exporter_cannot_open_its_own_handle)
{
        CUipcMemHandle handle;
        CUdeviceptr p, again;

        OK(cu.cuMemAlloc_v2(&p, 2 * MIB));
        OK(cu.cuIpcGetMemHandle(&handle, p));
        IS(CUDA_ERROR_INVALID_CONTEXT,
           cu.cuIpcOpenMemHandle_v2(&again, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
        OK(cu.cuMemFree_v2(p));
}

TEST(invalid_handles_are_refused)
{
        CUipcMemHandle handle, garbage;
        CUdeviceptr p;

        memset(&garbage, 0x42, sizeof(garbage));
        REFUSED(cu.cuIpcOpenMemHandle_v2(&p, garbage, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
        peer_export(2 * MIB, 6, &handle);
        IS(CUDA_ERROR_INVALID_VALUE, cu.cuIpcOpenMemHandle_v2(&p, handle, 0));
        REFUSED(cu.cuIpcGetMemHandle(&handle, 4096));
        REFUSED(cu.cuIpcCloseMemHandle(4096));
        OK(cu.cuCtxSynchronize());
}

TEST(an_opened_pointer_cannot_be_freed)
{
        CUipcMemHandle handle;
        CUdeviceptr p;

        peer_export(2 * MIB, 7, &handle);
        OK(cu.cuIpcOpenMemHandle_v2(&p, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
        REFUSED(cu.cuMemFree_v2(p));
        ck_assert_uint_eq(gpu_count_other(p, 7, 2 * MIB), 0);
        OK(cu.cuIpcCloseMemHandle(p));
        REFUSED(cu.cuIpcCloseMemHandle(p));
}

LOOP_TEST(vmm_memory_has_no_legacy_handle, machine.has_vmm)
{
        struct gpu_mapping mapping;
        CUipcMemHandle handle;

        OK(gpu_create_and_map(device, 2 * MIB, &mapping));
        IS(CUDA_ERROR_INVALID_VALUE, cu.cuIpcGetMemHandle(&handle, mapping.at));
        OK(gpu_unmap(&mapping));
}

/* ---- documented as undefined: as drivers were seen to do -------------------- */

/* It stays, and stays charged, until it is closed; and the handle counts it once more. */
static void check_orphan(CUdeviceptr at, const CUipcMemHandle *handle, unsigned char value, size_t n_free)
{
        CUdeviceptr again = 0;

        ck_assert_uint_eq(gpu_count_other(at, value, 8 * MIB), 0);
        if (is_fake)
                ck_assert_uint_eq(gpu_n_free(), n_free - 8 * MIB);
        OK(cu.cuIpcOpenMemHandle_v2(&again, *handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
        ck_assert_uint_eq(again, at);
        OK(cu.cuIpcCloseMemHandle(at));
        ck_assert_uint_eq(gpu_count_other(at, value, 8 * MIB), 0);
        OK(cu.cuIpcCloseMemHandle(at));
        if (!is_fake)
                return;
        ck_assert_uint_eq(gpu_n_free(), n_free);
        REFUSED(cu.cuIpcOpenMemHandle_v2(&again, *handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
}

TEST(memory_outlives_the_exporters_free)
{
        struct peer_message m = { .op = PEER_FREE };
        CUipcMemHandle handle;
        size_t n_free = gpu_n_free();
        CUdeviceptr p;

        m.a = peer_export(8 * MIB, 8, &handle);
        OK(cu.cuIpcOpenMemHandle_v2(&p, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
        tell(&peer, &m, -1, NULL);
        check_orphan(p, &handle, 8, n_free);
}

TEST(memory_outlives_the_exporters_death)
{
        size_t n_free = gpu_n_free();
        CUipcMemHandle handle;
        CUdeviceptr p;

        peer_export(8 * MIB, 9, &handle);
        OK(cu.cuIpcOpenMemHandle_v2(&p, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
        peer_kill(&peer);
        check_orphan(p, &handle, 9, n_free);
}

TEST(a_stale_mapping_prevents_no_open)
{
        struct peer_message m = { .op = PEER_FREE };
        CUipcMemHandle before, after;
        CUdeviceptr old, new;
        uint64_t at;

        m.a = peer_export(4 * MIB, 1, &before);
        OK(cu.cuIpcOpenMemHandle_v2(&old, before, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
        tell(&peer, &m, -1, NULL);
        at = peer_export(4 * MIB, 2, &after);
        if (is_fake)
                ck_assert_uint_eq(at, m.a); /* the same address again */
        ck_assert_int_ne(memcmp(&before, &after, sizeof(before)), 0);
        OK(cu.cuIpcOpenMemHandle_v2(&new, after, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
        if (is_fake)
                ck_assert_uint_eq(gpu_count_other(new, 2, 4 * MIB), 0);
        OK(cu.cuIpcCloseMemHandle(old));
        OK(cu.cuIpcCloseMemHandle(new));
}

/* A refusal is the answer to one call: no error stays. */
TEST(a_refused_handle_breaks_nothing)
{
        CUipcMemHandle nothing;
        CUdeviceptr at;

        memset(&nothing, 0x5a, sizeof(nothing));
        REFUSED(cu.cuIpcOpenMemHandle_v2(&at, nothing, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
        OK(cu.cuCtxSynchronize());
        OK(cu.cuMemAlloc_v2(&at, 2 * MIB));
        REFUSED(cu.cuIpcCloseMemHandle(at)); /* it was not opened */
        OK(cu.cuMemsetD8_v2(at, 1, 2 * MIB));
        OK(cu.cuMemFree_v2(at));
}
