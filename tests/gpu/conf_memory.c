/* Conformance: cuMemAlloc, attributes of a pointer, copies; a kernel.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/conformance.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

FIXTURE(memory, conformance_setup, conformance_teardown);

TEST(alloc_and_free)
{
        size_t n_free = gpu_n_free();
        CUdeviceptr p = 0;

        IS(CUDA_ERROR_INVALID_VALUE, cu.cuMemAlloc_v2(&p, 0));
        OK(cu.cuMemAlloc_v2(&p, 64 * MIB));
        ck_assert_uint_ne(p, 0);
        ck_assert_uint_eq(p % 256, 0);
        ck_assert_uint_le(gpu_n_free(), n_free - 64 * MIB);
        REFUSED(cu.cuMemFree_v2(p + 4096));
        OK(cu.cuMemFree_v2(p));
        REFUSED(cu.cuMemFree_v2(p));
        OK(cu.cuMemFree_v2(0));
        ck_assert_uint_ge(gpu_n_free() + 4 * MIB, n_free);
}

TEST(too_large_an_allocation_is_out_of_memory)
{
        size_t n_free, n_total;
        CUdeviceptr p;

        OK(cu.cuMemGetInfo_v2(&n_free, &n_total));
        IS(CUDA_ERROR_OUT_OF_MEMORY, cu.cuMemAlloc_v2(&p, n_total + 2 * MIB));
        IS(CUDA_ERROR_OUT_OF_MEMORY, cu.cuMemAlloc_v2(&p, n_free + 2 * MIB));
        OK(cu.cuMemAlloc_v2(&p, MIB)); /* no error sticks */
        OK(cu.cuMemFree_v2(p));
}

TEST(a_pointer_knows_its_allocation)
{
        CUdeviceptr p, base = 0, start = 0;
        unsigned int type = 0;
        size_t n_bytes = 0;
        int ordinal = -1;

        OK(cu.cuMemAlloc_v2(&p, 6 * MIB));
        OK(cu.cuMemGetAddressRange_v2(&base, &n_bytes, p + 5 * MIB));
        ck_assert_uint_eq(base, p);
        ck_assert_uint_eq(n_bytes, 6 * MIB);
        OK(cu.cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, p + 1));
        ck_assert_uint_eq(type, CU_MEMORYTYPE_DEVICE);
        OK(cu.cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, p));
        ck_assert_int_eq(ordinal, device);
        OK(cu.cuPointerGetAttribute(&start, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, p + MIB));
        ck_assert_uint_eq(start, p);
        OK(cu.cuMemFree_v2(p));
        REFUSED(cu.cuMemGetAddressRange_v2(&base, &n_bytes, p));
        REFUSED(cu.cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, p));
}

TEST(copies_and_fills)
{
        unsigned char there[4096], back[4096];
        CUdeviceptr p;

        for (size_t i = 0; i < sizeof(there); i++)
                there[i] = (unsigned char)(i * 7);
        OK(cu.cuMemAlloc_v2(&p, 4 * MIB));
        OK(cu.cuMemsetD8_v2(p, 0x5a, 4 * MIB));
        ck_assert_uint_eq(gpu_count_other(p, 0x5a, 4 * MIB), 0);
        OK(cu.cuMemcpyHtoD_v2(p + 100, there, sizeof(there)));
        OK(cu.cuMemcpyDtoD_v2(p + 2 * MIB, p + 100, sizeof(there)));
        OK(cu.cuMemcpyDtoH_v2(back, p + 2 * MIB, sizeof(back)));
        ck_assert_int_eq(memcmp(there, back, sizeof(back)), 0);
        ck_assert_uint_eq(gpu_count_other(p, 0x5a, 100), 0);
        OK(cu.cuMemFree_v2(p));
        REFUSED(cu.cuMemcpyDtoH_v2(back, p, sizeof(back)));
        REFUSED(cu.cuMemsetD8_v2(p, 0, 16));
        OK(cu.cuCtxSynchronize()); /* refused, not broken */
}

TEST(pinned_memory_is_copied_by_streams)
{
        unsigned char *pinned =
                mmap(NULL, 2 * MIB, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        void *unmapped = mmap(NULL, 2 * MIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        unsigned int flags;
        CUstream s;
        CUdeviceptr p;

        ck_assert_ptr_ne(pinned, MAP_FAILED);
        ck_assert_ptr_ne(unmapped, MAP_FAILED);
        OK(cu.cuMemHostRegister_v2(pinned, 2 * MIB, 0));
        IS(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, cu.cuMemHostRegister_v2(pinned, 2 * MIB, 0));
        IS(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, cu.cuMemHostRegister_v2(pinned + MIB, MIB, 0));
        OK(cu.cuMemHostGetFlags(&flags, pinned + MIB));
        REFUSED(cu.cuMemHostGetFlags(&flags, &flags));
        REFUSED(cu.cuMemHostRegister_v2(pinned, 0, 0));
        REFUSED(cu.cuMemHostRegister_v2(unmapped, 2 * MIB, CU_MEMHOSTREGISTER_PORTABLE));
        OK(cu.cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
        OK(cu.cuMemAlloc_v2(&p, 2 * MIB));
        memset(pinned, 0x3b, 2 * MIB);
        OK(cu.cuMemcpyHtoDAsync_v2(p, pinned, 2 * MIB, s));
        OK(cu.cuStreamSynchronize(s));
        memset(pinned, 0, 2 * MIB);
        OK(cu.cuMemcpyDtoHAsync_v2(pinned, p, 2 * MIB, s));
        OK(cu.cuStreamSynchronize(s));
        for (size_t i = 0; i < 2 * MIB; i++)
                if (pinned[i] != 0x3b)
                        ck_abort_msg("byte %zu is %u", i, pinned[i]);
        OK(cu.cuMemFree_v2(p));
        OK(cu.cuStreamDestroy_v2(s));
        OK(cu.cuMemHostUnregister(pinned));
        IS(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, cu.cuMemHostUnregister(pinned));
        REFUSED(cu.cuMemHostGetFlags(&flags, pinned));
        munmap(pinned, 2 * MIB);
        munmap(unmapped, 2 * MIB);
}

/* The contents of fresh memory are undefined; the fake fills pages of it with a pattern. */
LOOP_TEST(fresh_memory_is_not_clear, machine.is_fake)
{
        CUdeviceptr p;

        OK(cu.cuMemAlloc_v2(&p, 2 * MIB));
        ck_assert_uint_eq(gpu_count_other(p, 0xab, 4096), 0);
        ck_assert_uint_eq(gpu_count_other(p + 2 * MIB - 4096, 0xab, 4096), 0);
        OK(cu.cuMemFree_v2(p));
}

TEST(destroying_a_context_frees_its_memory)
{
        CUdeviceptr p;

        OK(cu.cuMemAlloc_v2(&p, 2 * MIB));
        OK(cu.cuDevicePrimaryCtxRelease_v2(device));
        OK(cu.cuDevicePrimaryCtxRetain(&context, device));
        OK(cu.cuCtxSetCurrent(context));
        REFUSED(cu.cuMemFree_v2(p));
}

LOOP_TEST(a_kernel_writes_what_another_process_reads, machine.has_kernels)
{
        unsigned int n = 1 << 20, value = 0x61616161;
        struct peer p = conformance_peer();
        struct peer_message m = { .op = PEER_OPEN };
        CUfunction function;
        CUdeviceptr at;
        CUmodule module;
        void *parameters[] = { &at, &n, &value };

        OK(cu.cuMemAlloc_v2(&at, 4 * MIB));
        OK(cu.cuIpcGetMemHandle(&m.handle, at));
        tell(&p, &m, -1, NULL);
        OK(cu.cuModuleLoadData(&module, gpu_kernels_ptx));
        OK(cu.cuModuleGetFunction(&function, module, "fill32"));
        OK(cu.cuLaunchKernel(function, n / 256, 1, 1, 256, 1, 1, 0, NULL, parameters, NULL));
        OK(cu.cuCtxSynchronize());
        m = (struct peer_message){ .op = PEER_COUNT, .a = m.a, .b = 0x61, .c = 4 * MIB };
        tell(&p, &m, -1, NULL);
        ck_assert_uint_eq(m.a, 0);
        peer_end(&p);
        OK(cu.cuModuleUnload(module));
        OK(cu.cuMemFree_v2(at));
}

/* A peer with a setting of the fake's, which is read when its driver starts. */
static struct peer peer_with(const char *name, const char *value)
{
        struct peer p;

        setenv(name, value, 1);
        p = conformance_peer();
        unsetenv(name);
        return p;
}

static void wait_for_free(size_t n_bytes)
{
        for (int i = 0; i < 6000 && gpu_n_free() < n_bytes; i++)
                usleep(10000);
        ck_assert_uint_ge(gpu_n_free(), n_bytes);
}

/* What no broker can charge, and what its looks at the free bytes must bear. */
TEST(a_context_costs_memory)
{
        size_t n_free = gpu_n_free();
        struct peer p = peer_with("FAKE_CUDA_CONTEXT_BYTES", "8MiB");

        ck_assert_uint_le(gpu_n_free() + 2 * MIB, n_free);
        peer_end(&p);
        wait_for_free(n_free - 4 * MIB);
}

TEST(free_memory_shows_other_processes)
{
        struct peer p = conformance_peer();
        struct peer_message m = { .op = PEER_ALLOC, .a = 64 * MIB };
        size_t n_free = gpu_n_free();

        tell(&p, &m, -1, NULL);
        ck_assert_uint_le(gpu_n_free() + 62 * MIB, n_free);
        m.op = PEER_FREE;
        tell(&p, &m, -1, NULL);
        wait_for_free(n_free - 4 * MIB);
        peer_end(&p);
}

static size_t peer_n_free(struct peer *p)
{
        struct peer_message m = { .op = PEER_N_FREE };

        tell(p, &m, -1, NULL);
        return m.a;
}

/* At once or late; the fake's peer is one that is late. */
TEST(freed_memory_is_available_again)
{
        struct peer p = peer_with("FAKE_CUDA_FREE_LATE_MS", "30");
        struct peer_message m = { .op = PEER_ALLOC, .a = 64 * MIB };
        size_t n_free = peer_n_free(&p);

        tell(&p, &m, -1, NULL);
        ck_assert_uint_le(peer_n_free(&p) + 62 * MIB, n_free);
        m.op = PEER_FREE;
        tell(&p, &m, -1, NULL);
        for (int i = 0; i < 6000 && peer_n_free(&p) + 4 * MIB < n_free; i++)
                usleep(10000);
        ck_assert_uint_ge(peer_n_free(&p) + 4 * MIB, n_free);
        peer_end(&p);
}
