/* What contexts, arrays, pools, and host and managed memory take of the fake's device.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/fake_cuda/test_fake.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "integrations/preload/api.h"

FIXTURE(sizes, fake_setup, fake_teardown);

/* Of the fake driver, in the newest variant up to a version. */
static void *find(const char *base, int version)
{
        CUdriverProcAddressQueryResult status;
        void *found = NULL;

        OK(cu.cuGetProcAddress_v2(base, &found, version, 0, &status));
        ck_assert_ptr_nonnull(found);
        return found;
}

#define FIND(symbol, base, version, ...)                                                                     \
        CUresult (*symbol)(__VA_ARGS__);                                                                     \
        *(void **)&(symbol) = find(base, version)

/* ---- contexts -------------------------------------------------------------------- */

TEST_OF(sizes, made_contexts)
{
        CUcontext made[2], primary, current;
        CUdeviceptr p;

        setenv("FAKE_CUDA_CONTEXT_BYTES", "10MiB", 1);
        primary = start();
        FIND(create, "cuCtxCreate", 11030, CUcontext *, unsigned int, CUdevice);
        FIND(create_v3, "cuCtxCreate", 12000, CUcontext *, void *, int, unsigned int, CUdevice);
        FIND(destroy, "cuCtxDestroy", 12000, CUcontext);

        ck_assert_uint_eq(gpu_n_free(), 54 * MIB);
        OK(create(&made[0], 0, 0));
        OK(create_v3(&made[1], NULL, 0, 8, 0));
        ck_assert_uint_eq(gpu_n_free(), 34 * MIB);
        OK(cu.cuCtxGetCurrent(&current));
        ck_assert_ptr_eq(current, made[1]);
        OK(cu.cuMemAlloc_v2(&p, 4 * MIB));
        IS(CUDA_ERROR_INVALID_CONTEXT, destroy(primary));
        OK(destroy(made[1])); /* with the memory in it; the one below is current then */
        OK(cu.cuCtxGetCurrent(&current));
        ck_assert_ptr_eq(current, made[0]);
        ck_assert_uint_eq(gpu_n_free(), 44 * MIB);
        IS(CUDA_ERROR_INVALID_CONTEXT, destroy(made[1]));
        IS(CUDA_ERROR_INVALID_CONTEXT, cu.cuCtxPushCurrent_v2(made[1]));
        OK(cu.cuCtxPushCurrent_v2(primary));
        OK(destroy(made[0]));
        ck_assert_uint_eq(gpu_n_free(), 54 * MIB);
        OK(cu.cuCtxPopCurrent_v2(NULL));
        IS(CUDA_ERROR_CONTEXT_IS_DESTROYED, cu.cuMemAlloc_v2(&p, 4 * MIB));
        OK(cu.cuCtxPopCurrent_v2(&current));
        ck_assert_ptr_eq(current, made[0]);
        IS(CUDA_ERROR_INVALID_DEVICE, create(&made[0], 0, 7));
        OK(create(&made[0], 0, 1)); /* another device's memory */
        ck_assert_uint_eq(gpu_n_free(), 22 * MIB);
        OK(destroy(made[0]));
        stop();
}

TEST_OF(sizes, made_context_without_room)
{
        CUcontext made, current;
        CUdeviceptr p;

        setenv("FAKE_CUDA_CONTEXT_BYTES", "40MiB", 1);
        start();
        FIND(create, "cuCtxCreate", 11030, CUcontext *, unsigned int, CUdevice);
        IS(CUDA_ERROR_OUT_OF_MEMORY, create(&made, 0, 0));
        OK(cu.cuCtxGetCurrent(&current));
        OK(cu.cuMemAlloc_v2(&p, 24 * MIB));
        OK(cu.cuMemFree_v2(p));
        stop();
}

/* The most that was taken of each device is in a file. */
TEST_OF(sizes, peaks)
{
        unsigned long long n_bytes = 0;
        CUdeviceptr p, q;
        char path[128];
        FILE *f;

        setenv("FAKE_CUDA_PEAK", "1", 1);
        start();
        OK(cu.cuMemAlloc_v2(&p, 10 * MIB));
        OK(cu.cuMemFree_v2(p));
        OK(cu.cuMemAlloc_v2(&p, 4 * MIB));
        OK(cu.cuMemAlloc_v2(&q, 8 * MIB));
        OK(cu.cuMemFree_v2(p));
        OK(cu.cuMemFree_v2(q));
        OK(cu.cuMemAlloc_v2(&p, 2 * MIB));
        in_folder("peak-0", path);
        f = fopen(path, "re");
        ck_assert_ptr_nonnull(f);
        ck_assert_int_eq(fscanf(f, "%llu", &n_bytes), 1);
        fclose(f);
        unlink(path);
        ck_assert_uint_eq(n_bytes, 12 * MIB);
        stop();
}

/* ---- rows and arrays --------------------------------------------------------------- */

TEST_OF(sizes, pitches)
{
        CUdeviceptr p, base;
        size_t n_pitch, n;

        start();
        FIND(alloc, "cuMemAllocPitch", 12000, CUdeviceptr *, size_t *, size_t, size_t, unsigned int);
        OK(alloc(&p, &n_pitch, 4096 - 8, 10, 16));
        ck_assert_uint_eq(n_pitch, 4096);
        OK(cu.cuMemFree_v2(p));
        OK(alloc(&p, &n_pitch, 4097, 4096, 4));
        ck_assert_uint_eq(n_pitch, 4608);
        OK(cu.cuMemGetAddressRange_v2(&base, &n, p));
        ck_assert(base == p && n == 4608 * 4096);
        ck_assert_uint_eq(gpu_n_free(), 46 * MIB); /* of 18 MiB */
        OK(cu.cuMemFree_v2(p));
        IS(CUDA_ERROR_INVALID_VALUE, alloc(&p, &n_pitch, 100, 10, 3));
        IS(CUDA_ERROR_INVALID_VALUE, alloc(&p, &n_pitch, 100, 0, 4));
        IS(CUDA_ERROR_OUT_OF_MEMORY, alloc(&p, &n_pitch, SIZE_MAX - 5, 1, 4));
        IS(CUDA_ERROR_OUT_OF_MEMORY, alloc(&p, &n_pitch, 4096, SIZE_MAX / 4096 + 1, 4));
        stop();
}

TEST_OF(sizes, arrays)
{
        CUDA_ARRAY_DESCRIPTOR flat = { .Width = 2048, .Height = 1025, .Format = 0x03, .NumChannels = 2 };
        CUDA_ARRAY3D_DESCRIPTOR deep = { .Width = 100, .Height = 100, .Depth = 100, .Format = 0x01 };
        CUarray a, b;

        start();
        FIND(create, "cuArrayCreate", 12000, CUarray *, const CUDA_ARRAY_DESCRIPTOR *);
        FIND(create_3d, "cuArray3DCreate", 12000, CUarray *, const CUDA_ARRAY3D_DESCRIPTOR *);
        FIND(destroy, "cuArrayDestroy", 12000, CUarray);
        OK(create(&a, &flat)); /* 1032 rows of 16 KiB: 16.1 MiB */
        ck_assert_uint_eq(gpu_n_free(), 46 * MIB);
        IS(CUDA_ERROR_INVALID_VALUE, create_3d(&b, &deep)); /* without channels */
        deep.NumChannels = 1;
        OK(create_3d(&b, &deep)); /* 100 times 104 rows of 128 bytes: 1.3 MiB */
        ck_assert_uint_eq(gpu_n_free(), 44 * MIB);
        OK(destroy(a));
        IS(CUDA_ERROR_INVALID_HANDLE, destroy(a));
        ck_assert_uint_eq(gpu_n_free(), 62 * MIB);
        flat.Height = 8192;
        IS(CUDA_ERROR_OUT_OF_MEMORY, create(&a, &flat));
        flat.Width = SIZE_MAX;
        IS(CUDA_ERROR_OUT_OF_MEMORY, create(&a, &flat));
        flat.Width = 0;
        IS(CUDA_ERROR_INVALID_VALUE, create(&a, &flat));
        deep.Flags = 0x40; /* sparse: without memory */
        deep.Width = deep.Height = 1 << 14;
        OK(create_3d(&a, &deep));
        ck_assert_uint_eq(gpu_n_free(), 62 * MIB);
        stop(); /* they end with the context */
}

TEST_OF(sizes, mipmapped_arrays)
{
        CUDA_ARRAY3D_DESCRIPTOR what = { .Width = 1024, .Height = 1024, .Format = 0x20, .NumChannels = 4 };
        CUmipmappedArray m;

        start();
        FIND(create, "cuMipmappedArrayCreate", 12000, CUmipmappedArray *, const CUDA_ARRAY3D_DESCRIPTOR *,
             unsigned int);
        FIND(destroy, "cuMipmappedArrayDestroy", 12000, CUmipmappedArray);
        FIND(destroy_array, "cuArrayDestroy", 12000, CUarray);
        OK(create(&m, &what, 3)); /* 16, 4 and 1 MiB */
        ck_assert_uint_eq(gpu_n_free(), 42 * MIB);
        IS(CUDA_ERROR_INVALID_HANDLE, destroy_array((CUarray)m));
        OK(destroy(m));
        what.Depth = 2;
        what.Flags = 1; /* layers, which do not halve */
        OK(create(&m, &what, 2));
        ck_assert_uint_eq(gpu_n_free(), 24 * MIB);
        IS(CUDA_ERROR_INVALID_VALUE, create(&m, &what, 0));
        stop();
}

/* ---- the host's memory --------------------------------------------------------------- */

TEST_OF(sizes, host_memory)
{
        unsigned int flags;
        CUdeviceptr at;
        void *p, *q;

        start();
        FIND(alloc, "cuMemHostAlloc", 12000, void **, size_t, unsigned int);
        FIND(alloc_plain, "cuMemAllocHost", 12000, void **, size_t);
        FIND(release, "cuMemFreeHost", 12000, void *);
        FIND(device_pointer, "cuMemHostGetDevicePointer", 12000, CUdeviceptr *, void *, unsigned int);
        OK(alloc(&p, 5000, 2));
        OK(alloc_plain(&q, 5000));
        ck_assert_uint_eq(gpu_n_free(), 64 * MIB);
        OK(cu.cuMemHostGetFlags(&flags, p));
        ck_assert_uint_eq(flags, 2);
        OK(device_pointer(&at, (char *)p + 99, 0));
        ck_assert(at == (uintptr_t)p + 99);
        IS(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, cu.cuMemHostUnregister(p));
        OK(release(p));
        IS(CUDA_ERROR_INVALID_VALUE, release(p));
        IS(CUDA_ERROR_INVALID_VALUE, device_pointer(&at, p, 0));
        IS(CUDA_ERROR_INVALID_VALUE, alloc(&p, 0, 0));
        stop(); /* with q */
}

/* It is on the host until the device uses it. */
TEST_OF(sizes, managed_memory)
{
        CUdeviceptr p, q;
        bool is_managed;
        char byte = 1;

        start();
        FIND(alloc, "cuMemAllocManaged", 12000, CUdeviceptr *, size_t, unsigned int);
        FIND(prefetch, "cuMemPrefetchAsync", 12000, CUdeviceptr, size_t, CUdevice, CUstream);
        OK(alloc(&p, 5 * MIB, 1));
        OK(alloc(&q, 100 * MIB, 1)); /* more than there is */
        *(char *)(uintptr_t)p = 1;
        ck_assert_uint_eq(gpu_n_free(), 64 * MIB);
        OK(cu.cuPointerGetAttribute(&is_managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, p + 7));
        ck_assert(is_managed);
        OK(cu.cuMemsetD8_v2(p, 7, 10));
        ck_assert_uint_eq(gpu_n_free(), 58 * MIB);
        OK(cu.cuMemcpyHtoD_v2(q, &byte, 1)); /* stays where there is room */
        ck_assert_uint_eq(gpu_n_free(), 58 * MIB);
        OK(prefetch(p, 5 * MIB, -1, NULL));
        ck_assert_uint_eq(gpu_n_free(), 64 * MIB);
        OK(prefetch(p + MIB, MIB, 0, NULL));
        ck_assert_uint_eq(gpu_n_free(), 58 * MIB);
        ck_assert(*(char *)(uintptr_t)p == 7 && *(char *)(uintptr_t)q == 1);
        IS(CUDA_ERROR_INVALID_VALUE, alloc(&q, 4096, 5));
        IS(CUDA_ERROR_INVALID_VALUE, prefetch(1 << 20, 4096, 0, NULL));
        OK(cu.cuMemFree_v2(p));
        ck_assert_uint_eq(gpu_n_free(), 64 * MIB);
        stop(); /* with q */
}

/* ---- pools ---------------------------------------------------------------------------- */

static cuuint64_t attribute(CUmemoryPool pool, CUmemPool_attribute which)
{
        cuuint64_t value;

        FIND(get, "cuMemPoolGetAttribute", 12000, CUmemoryPool, CUmemPool_attribute, void *);
        OK(get(pool, which, &value));
        return value;
}

/* 32 MiB at once, and what is free goes back. */
TEST_OF(sizes, pools)
{
        cuuint64_t threshold = 2 * MIB;
        CUdeviceptr p[3], base;
        CUmemoryPool pool;
        CUdeviceptr none;
        size_t n;

        start();
        FIND(default_pool, "cuDeviceGetDefaultMemPool", 12000, CUmemoryPool *, CUdevice);
        FIND(set, "cuMemPoolSetAttribute", 12000, CUmemoryPool, CUmemPool_attribute, void *);
        FIND(trim, "cuMemPoolTrimTo", 12000, CUmemoryPool, size_t);
        FIND(alloc, "cuMemAllocAsync", 12000, CUdeviceptr *, size_t, CUstream);
        FIND(release, "cuMemFreeAsync", 12000, CUdeviceptr, CUstream);
        OK(default_pool(&pool, 0));
        OK(alloc(&p[0], 1000, NULL));
        OK(alloc(&p[1], 20 * MIB, NULL));
        ck_assert_uint_eq(gpu_n_free(), 32 * MIB);
        OK(cu.cuMemGetAddressRange_v2(&base, &n, p[1] + 5));
        ck_assert(base == p[1] && n == 20 * MIB);
        IS(CUDA_ERROR_NOT_FOUND, cu.cuMemGetAddressRange_v2(&base, &n, p[1] + 21 * MIB));
        OK(cu.cuMemsetD8_v2(p[1], 1, 20 * MIB));
        ck_assert_uint_eq(attribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT), 20 * MIB + 1024);
        ck_assert_uint_eq(attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), 32 * MIB);
        OK(alloc(&p[2], 30 * MIB, NULL)); /* a second piece */
        ck_assert_uint_eq(gpu_n_free(), 0);
        IS(CUDA_ERROR_OUT_OF_MEMORY, alloc(&none, 20 * MIB, NULL));
        OK(release(p[2], NULL));
        ck_assert_uint_eq(gpu_n_free(), 32 * MIB);
        OK(release(p[1], NULL));
        ck_assert_uint_eq(gpu_n_free(), 32 * MIB); /* p[0] is in the piece */
        OK(set(pool, (CUmemPool_attribute)4, &threshold));
        OK(cu.cuMemFree_v2(p[0]));
        ck_assert_uint_eq(gpu_n_free(), 64 * MIB);
        threshold = 64 * MIB;
        OK(set(pool, (CUmemPool_attribute)4, &threshold));
        OK(alloc(&p[0], MIB, NULL));
        OK(release(p[0], NULL));
        IS(CUDA_ERROR_INVALID_VALUE, release(p[0], NULL));
        ck_assert_uint_eq(gpu_n_free(), 32 * MIB); /* kept */
        ck_assert_uint_eq(attribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT), 0);
        ck_assert_uint_eq(attribute(pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH), 50 * MIB + 1024);
        ck_assert_uint_eq(attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH), 64 * MIB);
        OK(trim(pool, 0));
        ck_assert_uint_eq(gpu_n_free(), 64 * MIB);
        stop();
}

TEST_OF(sizes, made_pools)
{
        struct {
                int allocation_type, handle_types;
                CUmemLocation location;
                char rest[64];
        } what = { .allocation_type = 1, .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 } };
        CUmemoryPool pool, other;
        CUdeviceptr p, q;

        start();
        FIND(create, "cuMemPoolCreate", 12000, CUmemoryPool *, void *);
        FIND(destroy, "cuMemPoolDestroy", 12000, CUmemoryPool);
        FIND(set_current, "cuDeviceSetMemPool", 12000, CUdevice, CUmemoryPool);
        FIND(get_current, "cuDeviceGetMemPool", 12000, CUmemoryPool *, CUdevice);
        FIND(get_default, "cuDeviceGetDefaultMemPool", 12000, CUmemoryPool *, CUdevice);
        FIND(alloc, "cuMemAllocAsync", 12000, CUdeviceptr *, size_t, CUstream);
        FIND(alloc_from, "cuMemAllocFromPoolAsync", 12000, CUdeviceptr *, size_t, CUmemoryPool, CUstream);
        FIND(release, "cuMemFreeAsync", 12000, CUdeviceptr, CUstream);
        OK(create(&pool, &what));
        OK(alloc_from(&p, 40 * MIB, pool, NULL));
        OK(alloc_from(&q, 10 * MIB, pool, NULL)); /* no room for a piece of 32 MiB */
        ck_assert_uint_eq(gpu_n_free(), 14 * MIB);
        IS(CUDA_ERROR_INVALID_VALUE, destroy(pool));
        OK(release(p, NULL));
        OK(set_current(0, pool));
        OK(get_current(&other, 0));
        ck_assert_ptr_eq(other, pool);
        OK(get_default(&other, 0));
        ck_assert_ptr_ne(other, pool);
        OK(alloc(&p, MIB, NULL));
        ck_assert_uint_eq(attribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT), 11 * MIB);
        OK(release(p, NULL));
        OK(release(q, NULL));
        OK(destroy(pool));
        IS(CUDA_ERROR_INVALID_VALUE, alloc_from(&p, MIB, pool, NULL));
        OK(alloc(&p, MIB, NULL)); /* of the default one again */
        what.location.id = 9;
        IS(CUDA_ERROR_INVALID_DEVICE, create(&pool, &what));
        stop(); /* with what was allocated */
        start();
        OK(alloc(&p, MIB, NULL));
        OK(release(p, NULL));
        stop();
}

/* ---- graphs ---------------------------------------------------------------------------- */

static cuuint64_t graph_bytes(CUgraphMem_attribute which)
{
        cuuint64_t value;

        FIND(get, "cuDeviceGetGraphMemAttribute", 12000, CUdevice, CUgraphMem_attribute, void *);
        OK(get(0, which, &value));
        return value;
}

/* Memory comes with the launch, and stays until it is trimmed. */
TEST_OF(sizes, graphs)
{
        CUDA_MEM_ALLOC_NODE_PARAMS what = { .poolProps.location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 },
                                            .bytesize = 5 * MIB };
        CUgraph graph, captured;
        CUgraphExec exec, second;
        CUgraphNode nodes[2];
        CUstream stream;
        CUdeviceptr p;
        size_t n = 2;

        start();
        FIND(create, "cuGraphCreate", 12000, CUgraph *, unsigned int);
        FIND(add, "cuGraphAddMemAllocNode", 12000, CUgraphNode *, CUgraph, const CUgraphNode *, size_t,
             CUDA_MEM_ALLOC_NODE_PARAMS *);
        FIND(get_nodes, "cuGraphGetNodes", 12000, CUgraph, CUgraphNode *, size_t *);
        FIND(instantiate, "cuGraphInstantiate", 12000, CUgraphExec *, CUgraph, unsigned long long);
        FIND(launch, "cuGraphLaunch", 12000, CUgraphExec, CUstream);
        FIND(destroy_exec, "cuGraphExecDestroy", 12000, CUgraphExec);
        FIND(trim, "cuDeviceGraphMemTrim", 12000, CUdevice);
        FIND(alloc, "cuMemAllocAsync", 12000, CUdeviceptr *, size_t, CUstream);
        FIND(release, "cuMemFreeAsync", 12000, CUdeviceptr, CUstream);
        OK(create(&graph, 0));
        OK(add(&nodes[0], graph, NULL, 0, &what));
        OK(instantiate(&exec, graph, 0));
        IS(CUDA_ERROR_NOT_SUPPORTED, instantiate(&second, graph, 0));
        IS(CUDA_ERROR_INVALID_VALUE, cu.cuMemFree_v2(what.dptr));
        ck_assert_uint_eq(gpu_n_free(), 64 * MIB);
        OK(launch(exec, NULL));
        OK(cu.cuMemsetD8_v2(what.dptr, 1, 5 * MIB));
        IS(CUDA_ERROR_INVALID_VALUE, launch(exec, NULL));
        OK(trim(0)); /* it is used */
        ck_assert_uint_eq(gpu_n_free(), 58 * MIB);
        ck_assert_uint_eq(graph_bytes(CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT), 6 * MIB);
        OK(cu.cuMemFree_v2(what.dptr));
        ck_assert_uint_eq(graph_bytes(CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT), 0);
        OK(cu.cuGraphDestroy(graph));
        OK(launch(exec, NULL));
        OK(release(what.dptr, NULL));
        OK(destroy_exec(exec));
        ck_assert_uint_eq(graph_bytes(CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT), 6 * MIB);
        OK(trim(0));
        ck_assert_uint_eq(gpu_n_free(), 64 * MIB);
        OK(cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
        OK(cu.cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
        OK(alloc(&p, 60 * MIB, stream));
        OK(release(p, stream));
        OK(cu.cuStreamEndCapture(stream, &captured));
        OK(get_nodes(captured, nodes, &n));
        ck_assert_uint_eq(n, 2);
        OK(instantiate(&exec, captured, 0));
        OK(launch(exec, stream));
        OK(launch(exec, stream));
        ck_assert_uint_eq(gpu_n_free(), 4 * MIB);
        OK(trim(0));
        OK(cu.cuMemAlloc_v2(&p, 10 * MIB));
        IS(CUDA_ERROR_OUT_OF_MEMORY, launch(exec, stream));
        OK(destroy_exec(exec));
        OK(cu.cuGraphDestroy(captured));
        stop();
}

/* ---- addresses --------------------------------------------------------------------------- */

TEST_OF(sizes, preferred_addresses)
{
        const CUdeviceptr far = (CUdeviceptr)0x2a << 40; /* nothing is there */
        CUmemAllocationProp prop = gpu_prop(0);
        CUmemAccessDesc access = { prop.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
        CUmemGenericAllocationHandle handle;
        CUdeviceptr p, q;

        start();
        OK(cu.cuMemAddressReserve(&p, 8 * MIB, 0, 0, 0));
        OK(cu.cuMemAddressFree(p, 8 * MIB));
        OK(cu.cuMemAddressReserve(&q, 2 * MIB, 0, p + 4 * MIB, 0));
        ck_assert(q == p + 4 * MIB);
        OK(cu.cuMemAddressReserve(&p, 8 * MIB, 0, q, 0)); /* taken, so elsewhere */
        ck_assert(p != q);
        OK(cu.cuMemAddressFree(p, 8 * MIB));
        OK(cu.cuMemAddressFree(q, 2 * MIB));
        OK(cu.cuMemAddressReserve(&p, 2 * MIB, 0, far, 0));
        ck_assert(p == far);
        OK(cu.cuMemAddressReserve(&q, 2 * MIB, 0, far, 0));
        ck_assert(q != far);
        OK(cu.cuMemAddressFree(q, 2 * MIB));
        OK(cu.cuMemCreate(&handle, 2 * MIB, &prop, 0));
        OK(cu.cuMemMap(far, 2 * MIB, 0, handle, 0));
        OK(cu.cuMemSetAccess(far, 2 * MIB, &access, 1));
        OK(cu.cuMemsetD8_v2(far, 5, 2 * MIB));
        ck_assert_uint_eq(gpu_count_other(far, 5, 2 * MIB), 0);
        OK(cu.cuMemUnmap(far, 2 * MIB));
        OK(cu.cuMemAddressFree(far, 2 * MIB));
        OK(cu.cuMemRelease(handle));
        OK(cu.cuMemAddressReserve(&p, 2 * MIB, 0, far, 0)); /* free again */
        ck_assert(p == far);
        OK(cu.cuMemAddressFree(p, 2 * MIB));
        OK(cu.cuMemAddressReserve(&p, 2 * MIB, 0, far + 4096, 0)); /* no multiple */
        ck_assert(p != far + 4096);
        OK(cu.cuMemAddressFree(p, 2 * MIB));
        stop();
}
