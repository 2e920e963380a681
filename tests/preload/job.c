/* A CUDA program that knows nothing of bfcd: the test runs it with and without bfcctl run.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * usage: job WAY CASE [ARGUMENT...] */
#include "tests/preload/job.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>

struct functions cu;

/* ---- the three ways to the driver ------------------------------------------------- */

#ifdef IS_LINKED
static void find_linked(void)
{
#define F(symbol, base, version, arguments) cu.symbol = symbol;
#include "device/cuda_functions.h"
#undef F
#define OWN(symbol, base, version, per_thread, arguments) cu.own_##symbol = symbol;
#include "integrations/preload/own.h"
#undef OWN
}
#else
/* The fake driver alone does not have all of own.h. */
static void find_by_dlsym(void)
{
        void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);

        CHECK(library);
#define F(symbol, base, version, arguments)                                                                  \
        *(void **)&cu.symbol = dlsym(library, #symbol);                                                      \
        CHECK(cu.symbol);
#include "device/cuda_functions.h"
#undef F
#define OWN(symbol, base, version, per_thread, arguments)                                                    \
        *(void **)&cu.own_##symbol = dlsym(library, #symbol);
#include "integrations/preload/own.h"
#undef OWN
}

/* What the fake driver does not have, cuGetProcAddress() does not find. */
static void find_by_proc_address(void)
{
        CUdriverProcAddressQueryResult status;

        find_by_dlsym();
#define F(symbol, base, version, arguments)                                                                  \
        cu.symbol = NULL;                                                                                    \
        OK(cu.own_cuGetProcAddress_v2(base, (void **)&cu.symbol, version, 0, &status));                      \
        CHECK(cu.symbol &&status == CU_GET_PROC_ADDRESS_SUCCESS);
#include "device/cuda_functions.h"
#undef F
}
#endif

void functions_find(const char *way)
{
#ifdef IS_LINKED
        CHECK(strcmp(way, "linked") == 0);
        find_linked();
#else
        if (strcmp(way, "proc-address") == 0)
                find_by_proc_address();
        else
                find_by_dlsym();
#endif
}

/* ---- tools -------------------------------------------------------------------------- */

void context_make(void)
{
        CUcontext context;
        CUdevice device;

        OK(cu.cuInit(0));
        OK(cu.cuDeviceGet(&device, 0));
        OK(cu.cuDevicePrimaryCtxRetain(&context, device));
        OK(cu.cuCtxSetCurrent(context));
}

size_t free_bytes(void)
{
        size_t n_free, n_total;

        OK(cu.cuMemGetInfo_v2(&n_free, &n_total));
        CHECK(n_free <= n_total);
        return n_free;
}

size_t total_bytes(void)
{
        size_t n_free, n_total;

        OK(cu.cuMemGetInfo_v2(&n_free, &n_total));
        return n_total;
}

static CUdeviceptr alloc(size_t n_bytes)
{
        CUdeviceptr p = 0;

        OK(cu.cuMemAlloc_v2(&p, n_bytes));
        return p;
}

void holds_bytes(CUdeviceptr p, size_t n_bytes, unsigned char value)
{
        unsigned char *bytes = malloc(n_bytes);

        CHECK(bytes);
        OK(cu.cuMemsetD8_v2(p, value, n_bytes));
        OK(cu.cuMemcpyDtoH_v2(bytes, p, n_bytes));
        for (size_t i = 0; i < n_bytes; i += 509)
                CHECK(bytes[i] == value);
        free(bytes);
}

/* ---- cases --------------------------------------------------------------------------- */

/* Of 32 MiB. */
static void be_limited(void)
{
        CUdeviceptr p, q;
        size_t n_total;

        context_make();
        CHECK(total_bytes() == 32 * MIB && free_bytes() == 32 * MIB);
        OK(cu.cuDeviceTotalMem_v2(&n_total, 0));
        CHECK(n_total == 32 * MIB);
        p = alloc(20 * MIB);
        CHECK(free_bytes() <= 12 * MIB && total_bytes() == 32 * MIB);
        holds_bytes(p, 20 * MIB, 7);
        GIVES(CUDA_ERROR_OUT_OF_MEMORY, cu.cuMemAlloc_v2(&q, 20 * MIB));
        q = alloc(1000);
        holds_bytes(q, 1000, 8);
        OK(cu.cuMemFree_v2(p));
        OK(cu.cuMemFree_v2(q));
        CHECK(free_bytes() == 32 * MIB);
        p = alloc(30 * MIB);
        OK(cu.cuMemFree_v2(p));
}

static void have_errors(void)
{
        CUdeviceptr p;
        CUcontext none = NULL, context;
        size_t n;

        GIVES(CUDA_ERROR_NOT_INITIALIZED, cu.cuMemAlloc_v2(&p, 4096));
        GIVES(CUDA_ERROR_NOT_INITIALIZED, cu.cuMemFree_v2(4096));
        GIVES(CUDA_ERROR_NOT_INITIALIZED, cu.cuMemGetInfo_v2(&n, &n));
        OK(cu.cuInit(0));
        GIVES(CUDA_ERROR_INVALID_CONTEXT, cu.cuMemAlloc_v2(&p, 4096));
        GIVES(CUDA_ERROR_INVALID_CONTEXT, cu.cuMemGetInfo_v2(&n, &n));
        context_make();
        GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemAlloc_v2(&p, 0));
        GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemAlloc_v2(NULL, 4096));
        GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemFree_v2(4096));
        OK(cu.cuMemFree_v2(0));
        p = alloc(4096);
        OK(cu.cuCtxGetCurrent(&context));
        OK(cu.cuCtxSetCurrent(none));
        GIVES(CUDA_ERROR_INVALID_CONTEXT, cu.cuMemFree_v2(p));
        OK(cu.cuCtxSetCurrent(context));
        GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemFree_v2(p + 256));
        OK(cu.cuMemFree_v2(p));
        GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemFree_v2(p));
}

static void know_addresses(void)
{
        CUdeviceptr p, base, from_attribute;
        CUmemGenericAllocationHandle handle;
        size_t n, pitch;
        unsigned int type;
        bool is_shareable = false;

        context_make();
        (void)alloc(4096);
        p = alloc(5000);
        (void)alloc(4096);
        OK(cu.cuMemGetAddressRange_v2(&base, &n, p + 4321));
        CHECK(base == p && n == 5000);
        OK(cu.cuMemGetAddressRange_v2(NULL, NULL, p));
        OK(cu.cuPointerGetAttribute(&from_attribute, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, p + 99));
        CHECK(from_attribute == p);
        OK(cu.cuPointerGetAttribute(&n, CU_POINTER_ATTRIBUTE_RANGE_SIZE, p + 99));
        CHECK(n == 5000);
        OK(cu.cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, p + 99));
        CHECK(type == CU_MEMORYTYPE_DEVICE);
        GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)p));
        OK(cu.cuPointerGetAttribute(&is_shareable, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, p));
        CHECK(!is_shareable);
        OK(cu.cuPointerGetAttribute(&is_shareable, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
                                    alloc(2 * MIB)));
        CHECK(is_shareable);
        OK(cu.own_cuMemAllocPitch_v2(&p, &pitch, 1000, 10, 4));
        CHECK(pitch == 1024);
        OK(cu.cuMemGetAddressRange_v2(&base, &n, p + 9 * pitch));
        CHECK(base == p && n == 10 * pitch);
        GIVES(CUDA_ERROR_INVALID_VALUE, cu.own_cuMemAllocPitch_v2(&p, &pitch, 1000, 10, 3));
        GIVES(CUDA_ERROR_OUT_OF_MEMORY,
              cu.own_cuMemAllocPitch_v2(&p, &pitch, (size_t)1 << 40, (size_t)1 << 40, 4));
}

static void *be_thread(void *seed)
{
        CUcontext context;

        OK(cu.cuDevicePrimaryCtxRetain(&context, 0));
        OK(cu.cuCtxSetCurrent(context));
        run_random((unsigned)(uintptr_t)seed, getenv("BFC_TEST_LONG") ? 500 : 150, 0);
        return NULL;
}

static void have_threads(void)
{
        pthread_t threads[8];

        context_make();
        for (size_t i = 0; i < 8; i++)
                CHECK(pthread_create(&threads[i], NULL, be_thread, (void *)(i + 1)) == 0);
        for (size_t i = 0; i < 8; i++)
                CHECK(pthread_join(threads[i], NULL) == 0);
        CHECK(free_bytes() == 32 * MIB);
}

/* Blocks pass from stream to stream; the memory of a destroyed stream is available again. */
static void use_streams(void)
{
        CUstream streams[3] = { NULL };
        CUdeviceptr p[8];
        CUdeviceptr q;

        context_make();
        OK(cu.cuStreamCreate(&streams[1], CU_STREAM_NON_BLOCKING));
        OK(cu.cuStreamCreate(&streams[2], CU_STREAM_NON_BLOCKING));
        for (unsigned round = 0; round < 20; round++) {
                for (size_t i = 0; i < 8; i++) {
                        OK(cu.own_cuMemAllocAsync(&p[i], 100000 * (i + 1), streams[i % 3]));
                        OK(cu.cuMemsetD8Async(p[i], (unsigned char)i, 100000, streams[i % 3]));
                }
                for (size_t i = 0; i < 8; i++)
                        OK(cu.own_cuMemFreeAsync(p[i], streams[i % 3]));
        }
        OK(cu.own_cuMemAllocAsync_ptsz(&q, MIB, NULL));
        OK(cu.own_cuMemFreeAsync_ptsz(q, NULL));
        OK(cu.own_cuMemAllocAsync(&q, MIB, streams[1]));
        GIVES(CUDA_ERROR_OUT_OF_MEMORY, cu.own_cuMemAllocAsync(&p[0], 32 * MIB, streams[1]));
        GIVES(CUDA_ERROR_INVALID_VALUE, cu.own_cuMemAllocAsync(&p[0], 0, streams[1]));
        OK(cu.cuStreamDestroy_v2(streams[1]));
        OK(cu.cuStreamDestroy_v2(streams[2]));
        OK(cu.cuMemFree_v2(q));
        OK(cu.cuCtxSynchronize());
        OK(cu.cuMemAlloc_v2(&q, 24 * MIB));
        OK(cu.cuMemFree_v2(q));
}

static int may_end; /* atomic */

static void wait_until_it_may_end(void *unused)
{
        (void)unused;
        for (int i = 0; i < 300000 && !__atomic_load_n(&may_end, __ATOMIC_ACQUIRE); i++)
                usleep(200);
}

/* The library hears of a stream's end before the driver does. Here no id tells the next stream with that handle from
 * it. */
static void end_streams(void)
{
        CUstream s = NULL, later = NULL;
        CUdeviceptr first, second;

        context_make();
        OK(cu.cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
        OK(cu.own_cuMemAllocAsync(&first, MIB, s));
        OK(cu.cuLaunchHostFunc(s, wait_until_it_may_end, NULL));
        OK(cu.own_cuMemFreeAsync(first, s));
        OK(cu.cuStreamDestroy_v2(s));
        OK(cu.cuStreamCreate(&later, CU_STREAM_NON_BLOCKING));
        CHECK(later == s);
        OK(cu.own_cuMemAllocAsync(&second, MIB, later));
        CHECK(second != first);
        __atomic_store_n(&may_end, 1, __ATOMIC_RELEASE);
        OK(cu.own_cuMemFreeAsync(second, later));
        OK(cu.cuStreamDestroy_v2(later));
        OK(cu.cuMemAlloc_v2(&first, 24 * MIB));
        OK(cu.cuMemFree_v2(first));
}

/* cuGetProcAddress() gives each variant that the driver has, and those of the proxy are the exported ones. */
static void find_variants(void)
{
        static const struct {
                const char *symbol, *base;
                int version, per_thread;
        } all[] = {
#define OWN(symbol, base, version, per_thread, arguments) { #symbol, base, version, per_thread },
#include "integrations/preload/own.h"
#undef OWN
        };
        void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), *found;
        CUdriverProcAddressQueryResult status;
        size_t n_found = 0, n_per_thread = 0;

        context_make();
        for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
                for (cuuint64_t flags = 0; flags <= 2; flags++) {
                        if (all[i].per_thread != ANY_STREAM && all[i].per_thread != (flags == 2))
                                continue;
                        OK(cu.own_cuGetProcAddress_v2(all[i].base, &found, all[i].version, flags, &status));
                        CHECK(!found == (status != CU_GET_PROC_ADDRESS_SUCCESS));
                        CHECK(!found || found == dlsym(library, all[i].symbol));
                        n_found += found != NULL;
                        n_per_thread += found && all[i].per_thread == 1;
                }
        CHECK(n_found >= 70 && n_per_thread == 6);
        OK(cu.own_cuGetProcAddress_v2("cuMemAlloc", &found, 3010, 0, &status));
        CHECK(!found && status == CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);
        OK(cu.own_cuGetProcAddress_v2("cuMemAllocAsync", &found, 12000, 0, &status));
        CHECK(found == dlsym(library, "cuMemAllocAsync"));
        OK(cu.own_cuGetProcAddress("cuMemFree", &found, 12000, 0));
        CHECK(found == dlsym(library, "cuMemFree_v2"));
        GIVES(CUDA_ERROR_NOT_FOUND, cu.own_cuGetProcAddress("cuNoSuchFunction", &found, 12000, 0));
}

/* A context beside the primary one. */
static void use_contexts(void)
{
        CUresult (*create)(void **, void *, CUdevice, unsigned int);
        CUdeviceptr p;
        void *green, *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);

        *(void **)&create = dlsym(library, "cuGreenCtxCreate");
        context_make();
        p = alloc(4096);
        OK(cu.cuMemFree_v2(alloc(4096)));
        OK(create(&green, NULL, 0, 1));
        OK(cu.cuCtxPushCurrent_v2(green));
        CHECK(total_bytes() == 32 * MIB);
        OK(cu.cuMemFree_v2(p));
        p = alloc(MIB);
        OK(cu.cuMemFree_v2(p));
        OK(cu.cuCtxPopCurrent_v2(NULL));
}

static int in_child(void (*run)(CUdeviceptr), CUdeviceptr p)
{
        pid_t pid = fork();
        int status;

        CHECK(pid >= 0);
        if (pid == 0) {
                run(p);
                _exit(0);
        }
        CHECK(waitpid(pid, &status, 0) == pid);
        return status;
}

static void have_no_cuda(CUdeviceptr p)
{
        CUdeviceptr q;
        size_t n;

        GIVES(CUDA_ERROR_NOT_INITIALIZED, cu.cuMemAlloc_v2(&q, 4096));
        GIVES(CUDA_ERROR_NOT_INITIALIZED, cu.cuMemFree_v2(p));
        GIVES(CUDA_ERROR_NOT_INITIALIZED, cu.cuMemGetInfo_v2(&n, &n));
        GIVES(CUDA_ERROR_NOT_INITIALIZED, cu.own_cuMemFreeAsync(p, NULL));
}

static void be_first(CUdeviceptr p)
{
        (void)p;
        be_limited();
}

static void fork_children(void)
{
        CUdeviceptr p;

        CHECK(in_child(be_first, 0) == 0);
        context_make();
        p = alloc(4096);
        CHECK(in_child(have_no_cuda, p) == 0);
        holds_bytes(p, 4096, 9);
        OK(cu.cuMemFree_v2(p));
}

/* Pools are the partition, arrays are charged, and managed memory is counted. */
static void have_others(void)
{
        CUDA_ARRAY_DESCRIPTOR what = { .Width = 1024, .Height = 1024, .Format = 0x20, .NumChannels = 2 };
        CUpointer_attribute which[] = { CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_RANGE_SIZE };
        CUresult (*get_pool)(CUmemoryPool *, CUdevice);
        CUmemoryPool pool;
        CUdeviceptr p, q;
        cuuint64_t n_used, n_reserved;
        unsigned int type;
        CUarray array;
        size_t n;

        *(void **)&get_pool =
                dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), "cuDeviceGetDefaultMemPool");
        CHECK(get_pool);
        context_make();
        OK(get_pool(&pool, 0));
        OK(cu.own_cuMemAllocFromPoolAsync(&p, MIB, pool, NULL));
        OK(cu.own_cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &n_used));
        OK(cu.own_cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &n_reserved));
        CHECK(n_used == MIB && n_reserved >= n_used);
        OK(cu.own_cuPointerGetAttributes(2, which, (void *[]){ &type, &n }, p + 5));
        CHECK(type == CU_MEMORYTYPE_DEVICE && n == MIB);
        GIVES(CUDA_ERROR_OUT_OF_MEMORY, cu.own_cuMemAllocFromPoolAsync(&q, 32 * MIB, pool, NULL));
        OK(cu.own_cuMemFreeAsync(p, NULL));
        OK(cu.cuCtxSynchronize());
        OK(cu.own_cuMemPoolTrimTo(pool, 0));
        n = free_bytes();
        OK(cu.own_cuArrayCreate_v2(&array, &what));
        CHECK(free_bytes() == n - 8 * MIB);
        OK(cu.own_cuMemAllocManaged(&p, 40 * MIB, 1));
        CHECK(free_bytes() == n - 8 * MIB);
        OK(cu.cuMemFree_v2(p));
        OK(cu.own_cuArrayDestroy(array));
        what.Width = 0;
        CHECK(cu.own_cuArrayCreate_v2(&array, &what) != CUDA_SUCCESS);
        CHECK(free_bytes() == n);
}

/* What the driver has given of the device, to all processes. */
size_t device_bytes(void)
{
        void *proxy = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), *(*driver)(void);
        CUresult (*get)(size_t *, size_t *);
        size_t n_free, n_total;

        *(void **)&driver = dlsym(proxy, "bfc_preload_driver");
        CHECK(driver);
        *(void **)&get = dlsym(driver(), "cuMemGetInfo_v2");
        OK(get(&n_free, &n_total));
        return n_total - n_free;
}

static void have_large_arrays(void)
{
        CUDA_ARRAY3D_DESCRIPTOR what = {
                .Width = 256, .Height = 64, .Depth = 64, .Format = 0x10 /* half */, .NumChannels = 4
        };
        CUmipmappedArray mipmapped;
        CUarray array, other, uneven;
        size_t n, n_device;

        context_make();
        n = free_bytes();
        n_device = device_bytes();
        OK(cu.own_cuArray3DCreate_v2(&array, &what));
        CHECK(free_bytes() == n - 8 * MIB && device_bytes() == n_device + 8 * MIB);
        OK(cu.own_cuMipmappedArrayCreate(&mipmapped, &what, 3));
        CHECK(free_bytes() == n - 18 * MIB && device_bytes() == n_device + 18 * MIB);
        OK(cu.own_cuArray3DCreate_v2(
                &uneven,
                &(CUDA_ARRAY3D_DESCRIPTOR){
                        .Width = 1, .Height = 8193, .Format = 1, .NumChannels = 1, .Depth = 4, .Flags = 1 }));
        CHECK(free_bytes() == n - 22 * MIB && device_bytes() == n_device + 22 * MIB);
        OK(cu.own_cuArrayDestroy(uneven));
        what.Depth = 4096;
        GIVES(CUDA_ERROR_OUT_OF_MEMORY, cu.own_cuArray3DCreate_v2(&other, &what));
        what.Depth = SIZE_MAX;
        GIVES(CUDA_ERROR_OUT_OF_MEMORY, cu.own_cuMipmappedArrayCreate(&mipmapped, &what, 1));
        what.Depth = 64;
        CHECK(cu.own_cuMipmappedArrayCreate(&mipmapped, &what, 0) != CUDA_SUCCESS);
        what.Flags = 0x40; /* sparse */
        OK(cu.own_cuArray3DCreate_v2(&uneven, &what));
        CHECK(free_bytes() == n - 18 * MIB && device_bytes() == n_device + 18 * MIB);
        OK(cu.own_cuArrayDestroy(array));
        OK(cu.own_cuMipmappedArrayDestroy(mipmapped));
        CHECK(free_bytes() == n);
}

/* Normalized and compressed ones, which have less than 4 bytes for each channel of an element. */
static void have_array_formats(void)
{
        static const struct {
                CUarray_format format;
                size_t height, n_bytes;
        } all[] = { { 0xc2 /* UNORM_INT8X4 */, 1024, 8 * MIB },
                    { 0x91 /* BC1_UNORM */, 4096, 4 * MIB },
                    { 0x9d /* BC7_UNORM */, 4098, 8 * MIB + 8 * 16 * 512 } };
        CUarray array;
        size_t n_device;

        context_make();
        n_device = device_bytes();
        for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
                CUDA_ARRAY3D_DESCRIPTOR what = {
                        .Width = 2048, .Height = all[i].height, .Format = all[i].format, .NumChannels = 4
                };
                size_t n = (all[i].n_bytes + 2 * MIB - 1) / (2 * MIB) * 2 * MIB;

                OK(cu.own_cuArray3DCreate_v2(&array, &what));
                CHECK(device_bytes() == n_device + n && free_bytes() == 32 * MIB - n);
                OK(cu.own_cuArrayDestroy(array));
        }
}

/* Also a pool of the program is the partition: the driver's would take 32 MiB at once. */
static void have_other_pools(void)
{
        CUmemPoolProps what = { .allocType = 1, .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 } };
        size_t n_device, n;
        CUmemoryPool pool;
        CUstream stream;
        CUdeviceptr p, q, r;

        context_make();
        n_device = device_bytes();
        OK(cu.own_cuMemPoolCreate(&pool, &what));
        OK(cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
        r = alloc(16 * MIB);
        n = free_bytes();
        OK(cu.own_cuMemAllocFromPoolAsync(&p, 4 * MIB, pool, stream));
        OK(cu.own_cuMemAllocFromPoolAsync_ptsz(&q, MIB, pool, stream));
        CHECK(free_bytes() <= n - 5 * MIB && device_bytes() - n_device <= 32 * MIB);
        GIVES(CUDA_ERROR_OUT_OF_MEMORY, cu.own_cuMemAllocFromPoolAsync(&q, 30 * MIB, pool, stream));
        OK(cu.own_cuMemFreeAsync(p, stream));
        OK(cu.own_cuMemPoolDestroy(pool));
        CHECK(cu.own_cuMemPoolDestroy(pool) != CUDA_SUCCESS);
        CHECK(cu.own_cuMemAllocFromPoolAsync(&p, MIB, pool, stream) != CUDA_SUCCESS);
        OK(cu.own_cuMemFreeAsync_ptsz(q, stream));
        OK(cu.cuCtxSynchronize());
        OK(cu.cuMemFree_v2(r));
        while (free_bytes() < 32 * MIB)
                usleep(1000);
}

/* All that can be charged is given; with NOT_PERMITTED nothing can be. */
static void be_strict_and(CUresult expected)
{
        CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                     .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 },
                                     .allocFlags.usage = IS_TILE_POOL };
        CUDA_ARRAY_DESCRIPTOR what = { .Width = 1, .Format = 0x20, .NumChannels = 1 };
        CUDA_ARRAY3D_DESCRIPTOR what_3d = { .Width = 1, .Format = 0x20, .NumChannels = 1 };
        CUmemGenericAllocationHandle handle;
        CUmipmappedArray mipmapped;
        CUarray array;
        CUdeviceptr p;

        context_make();
        GIVES(expected, launch_graph(4 * MIB));
        GIVES(expected, cu.cuMemCreate(&handle, 2 * MIB, &prop, 0));
        prop.location.type = (CUmemLocationType)6; /* a locality domain */
        GIVES(expected, cu.cuMemCreate(&handle, 2 * MIB, &prop, 0));
        GIVES(expected, cu.own_cuMemAllocManaged(&p, 3 * MIB, 1)); /* of 4 MiB */
        GIVES(expected, cu.own_cuArrayCreate_v2(&array, &what));
        GIVES(expected, cu.own_cuArray3DCreate_v2(&array, &what_3d));
        GIVES(expected, cu.own_cuMipmappedArrayCreate(&mipmapped, &what_3d, 1));
        if (expected == CUDA_SUCCESS) {
                CHECK(free_bytes() == 18 * MIB);
                GIVES(CUDA_ERROR_OUT_OF_MEMORY, cu.own_cuMemAllocManaged(&p, 26 * MIB, 1));
        }
        p = alloc(4096);
        OK(cu.cuMemFree_v2(p));
}

static void be_strict(void)
{
        be_strict_and(CUDA_SUCCESS);
}

static void be_refused(void)
{
        be_strict_and(CUDA_ERROR_NOT_PERMITTED);
}

/* The driver's own memory. */
static void be_passed_on(void)
{
        CUdeviceptr p;

        context_make();
        CHECK(total_bytes() > 64 * MIB);
        p = alloc(48 * MIB);
        CHECK(free_bytes() <= total_bytes() - 48 * MIB);
        OK(cu.cuMemFree_v2(p));
}

static void have_no_driver(void)
{
        CUdeviceptr p;
        size_t n;

        GIVES(CUDA_ERROR_NO_DEVICE, cu.cuInit(0));
        GIVES(CUDA_ERROR_NO_DEVICE, cu.cuMemAlloc_v2(&p, 4096));
        GIVES(CUDA_ERROR_NO_DEVICE, cu.cuMemGetInfo_v2(&n, &n));
}

/* What bfcctl shows by this key, of this process's sessions together. */
static unsigned long long shown_bytes(const char *bfcctl, const char *key)
{
        char text[65536] = "", mine[32], *at = text;
        unsigned long long n_bytes = 0;
        FILE *out;

        CHECK(setenv("BFCCTL", bfcctl, 1) == 0);
        out = popen("exec \"$BFCCTL\" sessions --json", "re");
        CHECK(out && fread(text, 1, sizeof(text) - 1, out) > 0 && pclose(out) == 0);
        snprintf(mine, sizeof(mine), "\"pid\": %d,", (int)getpid());
        while ((at = strstr(at, mine)) && (at = strstr(at, key)))
                n_bytes += strtoull(at += strlen(key), NULL, 10);
        return n_bytes;
}

/* Fills the lease with the driver's memory, and is killed. */
static void be_killed(void)
{
        CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                     .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 },
                                     .allocFlags.usage = IS_TILE_POOL };
        CUmemGenericAllocationHandle handle;
        size_t n = 0;

        context_make();
        while (n < 99 && cu.cuMemCreate(&handle, 2 * MIB, &prop, 0) == CUDA_SUCCESS)
                n++;
        CHECK(n == 16);
        kill(getpid(), SIGKILL);
}

/* The lease is full to its last byte, though no step beside that fits, and the one refusal is counted once. */
static void be_full(void)
{
        CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                     .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 },
                                     .allocFlags.usage = IS_TILE_POOL };
        CUmemGenericAllocationHandle handle, more;

        context_make();
        OK(cu.cuMemCreate(&handle, 32 * MIB, &prop, 0));
        GIVES(CUDA_ERROR_OUT_OF_MEMORY, cu.cuMemCreate(&more, 2 * MIB, &prop, 0));
        OK(cu.cuMemRelease(handle));
}

/* What another process keeps for its next calls is to be had. */
static void have_all(void)
{
        CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                     .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 },
                                     .allocFlags.usage = IS_TILE_POOL };
        CUmemGenericAllocationHandle handle;
        CUresult result;

        context_make();
        for (unsigned i = 0; i < 1000; i++) {
                result = cu.cuMemCreate(&handle, 32 * MIB, &prop, 0);
                if (result != CUDA_ERROR_OUT_OF_MEMORY)
                        break;
                usleep(100000);
        }
        OK(result);
}

static void run_another(const char *program, const char *way, const char *name)
{
        pid_t pid = fork();
        int status;

        CHECK(pid >= 0);
        if (pid == 0) {
                execl(program, program, way, name, NULL);
                _exit(98);
        }
        CHECK(waitpid(pid, &status, 0) == pid && status == 0);
}

static void give_room(const char *program, const char *way)
{
        CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                     .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 },
                                     .allocFlags.usage = IS_TILE_POOL };
        CUmemGenericAllocationHandle handle;

        context_make();
        OK(cu.cuMemCreate(&handle, 2 * MIB, &prop, 0));
        OK(cu.cuMemRelease(handle));
        run_another(program, way, "all");
        OK(cu.cuMemCreate(&handle, 32 * MIB, &prop, 0));
}

/* A second process of the lease gets what the first one left, and all when that was killed. */
static void be_two(const char *program, const char *way)
{
        CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                     .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 },
                                     .allocFlags.usage = IS_TILE_POOL };
        CUmemGenericAllocationHandle handle;
        pid_t pid = fork();
        int status;

        CHECK(pid >= 0);
        if (pid == 0) {
                execl(program, program, way, "killed", NULL);
                _exit(98);
        }
        CHECK(waitpid(pid, &status, 0) == pid && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
        context_make();
        while (free_bytes() < 32 * MIB)
                usleep(1000);
        OK(cu.cuMemCreate(&handle, 20 * MIB, &prop, 0));
        run_another(program, way, "left");
        OK(cu.cuMemRelease(handle));
}

/* Beside 20 MiB of another process. */
static void have_what_is_left(void)
{
        CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                     .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 },
                                     .allocFlags.usage = IS_TILE_POOL };
        CUmemGenericAllocationHandle handle;
        CUdeviceptr p;

        context_make();
        CHECK(free_bytes() <= 12 * MIB && free_bytes() >= 10 * MIB);
        GIVES(CUDA_ERROR_OUT_OF_MEMORY, cu.cuMemCreate(&handle, 14 * MIB, &prop, 0));
        GIVES(CUDA_ERROR_OUT_OF_MEMORY, cu.cuMemAlloc_v2(&p, 14 * MIB));
        OK(cu.cuMemCreate(&handle, 8 * MIB, &prop, 0));
        OK(cu.cuMemRelease(handle));
        p = alloc(8 * MIB); /* which has the room */
        OK(cu.cuMemFree_v2(p));
}

enum kind { NOTHING, DRIVERS, CREATED, BLOCK, ARRAY, GRAPH, FROM_SHARED, N_KINDS };

struct held {
        enum kind kind;
        CUmemGenericAllocationHandle handle;
        CUdeviceptr p;
        CUarray array;
        struct graph graph;
};

/* Of 2 to 10 MiB. */
static CUresult take(struct held *h, unsigned random)
{
        CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                     .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 } };
        size_t n = 1 + random / N_KINDS % 5;

        h->kind = (enum kind)(1 + random % (N_KINDS - 1));
        if (h->kind == BLOCK)
                return cu.cuMemAlloc_v2(&h->p, n * 2 * MIB - random % MIB);
        if (h->kind == GRAPH)
                return graph_take(&h->graph, n * 2 * MIB);
        if (h->kind == FROM_SHARED)
                return cu.own_cuMemAllocFromPoolAsync(&h->p, n * MIB, shared_pool(), NULL);
        if (h->kind == ARRAY)
                return cu.own_cuArrayCreate_v2(&h->array,
                                               &(CUDA_ARRAY_DESCRIPTOR){ MIB / 4 - 99, 8 * n, 1, 1 });
        prop.allocFlags.usage = h->kind == DRIVERS ? IS_TILE_POOL : 0;
        return cu.cuMemCreate(&h->handle, n * 2 * MIB, &prop, 0);
}

static void give_back(struct held *h)
{
        if (h->kind == BLOCK || h->kind == FROM_SHARED)
                OK(cu.cuMemFree_v2(h->p));
        else if (h->kind == GRAPH)
                graph_give(&h->graph);
        else if (h->kind == ARRAY)
                OK(cu.own_cuArrayDestroy(h->array));
        else if (h->kind != NOTHING)
                OK(cu.cuMemRelease(h->handle));
        h->kind = NOTHING;
}

/* All kinds of memory in turns. What the device has given to the lease's processes never exceeds the limit. */
static void be_one_of_two(unsigned seed, size_t n_device)
{
        struct held held[16] = { 0 };
        unsigned n_refused = 0;

        for (unsigned i = 0; i < 500; i++) {
                struct held *h = &held[rand_r(&seed) % 16];

                if (h->kind != NOTHING) {
                        give_back(h);
                } else {
                        CUresult result = take(h, (unsigned)rand_r(&seed));

                        CHECK(result == CUDA_SUCCESS || result == CUDA_ERROR_OUT_OF_MEMORY);
                        if (result != CUDA_SUCCESS) {
                                n_refused++;
                                h->kind = NOTHING;
                        }
                }
                CHECK(device_bytes() <= n_device + 32 * MIB);
        }
        CHECK(n_refused > 0);
        for (size_t i = 0; i < 16; i++)
                give_back(&held[i]);
}

static void share_limit(const char *program, const char *way, const char *n_before)
{
        size_t n_device = n_before ? strtoull(n_before, NULL, 10) : 0;
        char text[32];
        int status;
        pid_t pid;

        context_make();
        if (n_before) {
                be_one_of_two(2, n_device);
                return;
        }
        n_device = device_bytes();
        snprintf(text, sizeof(text), "%zu", n_device);
        pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
                execl(program, program, way, "share-limit", text, NULL);
                _exit(98);
        }
        be_one_of_two(1, n_device);
        CHECK(waitpid(pid, &status, 0) == pid && status == 0);
}

#define N_MANY ((size_t)300)

static void be_shown(const char *bfcctl)
{
        static const char outside[] = "\"bytes_outside\": ", direct[] = "\"bytes_direct\": ";
        CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                     .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 },
                                     .allocFlags.usage = IS_TILE_POOL };
        CUmemGenericAllocationHandle handle, more;
        CUdeviceptr p, many[N_MANY];

        context_make();
        OK(cu.cuMemCreate(&handle, 6 * MIB, &prop, 0));
        (void)alloc(4096);
        CHECK(shown_bytes(bfcctl, outside) == 0 && shown_bytes(bfcctl, direct) >= 6 * MIB);
        OK(cu.own_cuMemAllocManaged(&p, 3 * MIB, 1));
        CHECK(shown_bytes(bfcctl, outside) == 3 * MIB && shown_bytes(bfcctl, direct) <= 8 * MIB);
        GIVES(CUDA_ERROR_OUT_OF_MEMORY, cu.cuMemCreate(&more, 32 * MIB, &prop, 0));
        CHECK(shown_bytes(bfcctl, outside) == 3 * MIB);
        for (size_t i = 0; i < N_MANY; i++)
                OK(cu.own_cuMemAllocManaged(&many[i], 4096, 1));
        CHECK(shown_bytes(bfcctl, outside) == 3 * MIB + N_MANY * 4096);
        for (size_t i = 0; i < N_MANY; i++)
                OK(cu.cuMemFree_v2(many[i * 7 % N_MANY]));
        CHECK(shown_bytes(bfcctl, outside) == 3 * MIB);
        OK(cu.cuMemFree_v2(p));
        CHECK(shown_bytes(bfcctl, outside) == 0);
        OK(cu.cuMemRelease(handle));
        CHECK(shown_bytes(bfcctl, direct) < 6 * MIB);
}

/* ---- contexts that are charged ------------------------------------------------------------ */

/* Each takes 4 MiB. */
static void have_shown_contexts(const char *bfcctl)
{
        static const char contexts[] = "\"bytes_contexts\": ";
        CUcontext own, primary;

        OK(cu.cuInit(0));
        OK(cu.own_cuCtxCreate_v2(&own, 0, 0));
        CHECK(shown_bytes(bfcctl, contexts) == 4 * MIB);
        OK(cu.cuDevicePrimaryCtxRetain(&primary, 0));
        CHECK(shown_bytes(bfcctl, contexts) == 8 * MIB);
        OK(cu.own_cuCtxDestroy_v2(own));
        CHECK(shown_bytes(bfcctl, contexts) == 4 * MIB);
        OK(cu.cuDevicePrimaryCtxReset_v2(0));
        CHECK(shown_bytes(bfcctl, contexts) == 0);
}

/* Each takes 4 MiB, and a process of 32 MiB has no more than one of them while it has another one's memory. */
static void have_charged_contexts(void)
{
        CUcontext own, primary;
        CUdeviceptr p;

        OK(cu.cuInit(0));
        OK(cu.own_cuCtxCreate_v2(&own, 0, 0));
        CHECK(free_bytes() == 28 * MIB);
        p = alloc(2 * MIB); /* in the primary one, which is made for it */
        CHECK(free_bytes() <= 22 * MIB && free_bytes() >= 20 * MIB);
        OK(cu.cuMemFree_v2(p));
        OK(cu.own_cuCtxDestroy_v2(own));
        OK(cu.cuDevicePrimaryCtxRetain(&primary, 0));
        OK(cu.cuCtxSetCurrent(primary));
        CHECK(free_bytes() == 28 * MIB);
        OK(cu.own_cuCtxCreate_v3(&own, NULL, 0, 0, 0));
        CHECK(free_bytes() == 24 * MIB);
}

static void have_large_context(void)
{
        CUcontext context;

        OK(cu.cuInit(0));
        GIVES(CUDA_ERROR_OUT_OF_MEMORY, cu.cuDevicePrimaryCtxRetain(&context, 0));
        GIVES(CUDA_ERROR_OUT_OF_MEMORY, cu.own_cuCtxCreate_v2(&context, 0, 0));
}

/* A context of 3 MiB takes two units. What it leaves of them stays for the next one when a block finds no room, so the lease is full
 * to its last unit. */
static void have_contexts_of_odd_sizes(void)
{
        CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                     .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 },
                                     .allocFlags.usage = IS_TILE_POOL };
        CUmemGenericAllocationHandle handle;
        CUcontext own;
        CUdeviceptr p;

        context_make();
        OK(cu.cuMemCreate(&handle, 26 * MIB, &prop, 0));
        GIVES(CUDA_ERROR_OUT_OF_MEMORY, cu.cuMemAlloc_v2(&p, 4 * MIB));
        OK(cu.own_cuCtxCreate_v2(&own, 0, 0));
        GIVES(CUDA_ERROR_OUT_OF_MEMORY, cu.cuMemAlloc_v2(&p, 2 * MIB));
}

/* ---- processes that share a block ------------------------------------------------------ */

static void export_block(const char *program, const char *way)
{
        CUipcMemHandle handle, again;
        CUdeviceptr p, q;
        char text[2 * sizeof(handle) + 1];
        unsigned char byte;
        int status;
        pid_t pid;

        context_make();
        (void)alloc(4 * MIB);
        p = alloc(4 * MIB);
        OK(cu.cuMemsetD8_v2(p, 0x5a, 4 * MIB));
        OK(cu.cuIpcGetMemHandle(&handle, p));
        OK(cu.cuIpcGetMemHandle(&again, p + 4096));
        CHECK(memcmp(&handle, &again, sizeof(handle)) == 0);
        GIVES(CUDA_ERROR_INVALID_CONTEXT,
              cu.cuIpcOpenMemHandle_v2(&q, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
        for (size_t i = 0; i < sizeof(handle); i++)
                snprintf(text + 2 * i, 3, "%02x", (unsigned char)((char *)&handle)[i]);
        pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
                execl(program, program, way, "import", text, NULL);
                _exit(98);
        }
        CHECK(waitpid(pid, &status, 0) == pid && status == 0);
        OK(cu.cuMemcpyDtoH_v2(&byte, p + 3 * MIB, 1));
        CHECK(byte == 0xa5);
        OK(cu.cuMemFree_v2(p));
}

static void import_block(const char *text)
{
        CUipcMemHandle handle;
        unsigned char bytes[2];
        CUdeviceptr p, again, base;
        size_t n;

        for (size_t i = 0; i < sizeof(handle); i++) {
                unsigned int value;

                CHECK(sscanf(text + 2 * i, "%2x", &value) == 1);
                ((unsigned char *)&handle)[i] = (unsigned char)value;
        }
        context_make();
        OK(cu.cuIpcOpenMemHandle_v2(&p, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
        OK(cu.cuIpcOpenMemHandle_v2(&again, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
        CHECK(again == p);
        OK(cu.cuIpcCloseMemHandle(p));
        OK(cu.cuMemGetAddressRange_v2(&base, &n, p + 77));
        CHECK(base == p && n == 4 * MIB);
        OK(cu.cuMemcpyDtoH_v2(&bytes[0], p, 1));
        OK(cu.cuMemcpyDtoH_v2(&bytes[1], p + 4 * MIB - 1, 1));
        CHECK(bytes[0] == 0x5a && bytes[1] == 0x5a);
        OK(cu.cuMemsetD8_v2(p + 3 * MIB, 0xa5, 1));
        OK(cu.cuIpcCloseMemHandle(p));
        CHECK(cu.cuIpcCloseMemHandle(p) != CUDA_SUCCESS);
}

/* ---- main ------------------------------------------------------------------------------- */

static void make_random_calls(void)
{
        context_make();
        run_random(1, getenv("BFC_TEST_LONG") ? 4000 : 1000, 32 * MIB);
        CHECK(free_bytes() == 32 * MIB);
}

static void reset_plain(void)
{
        reset_gpu(false, false);
}

static void reset_lent(void)
{
        reset_gpu(true, false);
}

static void reset_broken(void)
{
        reset_gpu(false, true);
}

static void reset_broken_lent(void)
{
        reset_gpu(true, true);
}

static void have_peers_by_fds(void)
{
        have_peers(true);
}

static void have_peers_by_handles(void)
{
        have_peers(false);
}

int main(int argc, char **argv)
{
        static const struct {
                const char *name;
                void (*run)(void);
        } cases[] = {
                { "limit", be_limited },
                { "errors", have_errors },
                { "addresses", know_addresses },
                { "random", make_random_calls },
                { "threads", have_threads },
                { "streams", use_streams },
                { "ended-streams", end_streams },
                { "contexts", use_contexts },
                { "charged-contexts", have_charged_contexts },
                { "large-context", have_large_context },
                { "odd-contexts", have_contexts_of_odd_sizes },
                { "fork", fork_children },
                { "fork-threads", fork_beside_threads },
                { "map", map_memory },
                { "beside-refusals", create_beside_refusals },
                { "lent", map_lent_memory },
                { "lent-names", have_names_of_lent_memory },
                { "lent-capture", release_lent_memory_in_capture },
                { "lent-not", have_memory_that_is_not_lent },
                { "localized", have_localized_memory },
                { "lent-charged", have_charged_memory },
                { "others", have_others },
                { "strict", be_strict },
                { "refused", be_refused },
                { "full", be_full },
                { "all", have_all },
                { "killed", be_killed },
                { "left", have_what_is_left },
                { "passed-on", be_passed_on },
                { "no-driver", have_no_driver },
                { "variants", find_variants },
                { "arrays", have_large_arrays },
                { "array-formats", have_array_formats },
                { "pools", have_other_pools },
                { "driver-pools", have_pools_of_the_driver },
                { "graphs", have_graphs },
                { "captured-graphs", capture_graphs },
                { "host-pools", have_pools_of_the_host },
                { "reset", reset_plain },
                { "reset-lent", reset_lent },
                { "reset-broken", reset_broken },
                { "reset-broken-lent", reset_broken_lent },
                { "reset-array", reset_gpu_with_array },
                { "ended-contexts", end_contexts },
                { "ended-beside-calls", end_contexts_beside_calls },
                { "reset-beside-context", reset_beside_context },
                { "other-contexts", have_other_contexts },
                { "reset-one", reset_one_of_two },
                { "peers", have_peers_by_fds },
                { "peers-by-handles", have_peers_by_handles },
                { "no-peers", have_no_peers },
                { "refused-peers", have_refused_peers },
                { "nvml", ask_nvml },
                { "no-nvml", have_no_nvml },
                { "plain-nvml", have_plain_nvml },
                { "nvml-of-nothing", have_nvml_of_nothing },
        };

        CHECK(argc >= 3);
        functions_find(argv[1]);
        for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
                if (strcmp(argv[2], cases[i].name) == 0) {
                        cases[i].run();
                        return 0;
                }
        if (strcmp(argv[2], "export") == 0)
                export_block(argv[0], argv[1]);
        else if (strcmp(argv[2], "two") == 0)
                be_two(argv[0], argv[1]);
        else if (strcmp(argv[2], "share-limit") == 0)
                share_limit(argv[0], argv[1], argv[3]);
        else if (strcmp(argv[2], "give-room") == 0)
                give_room(argv[0], argv[1]);
        else if (strcmp(argv[2], "export-fd") == 0)
                export_lent_memory(argv[0], argv[1]);
        else if (strcmp(argv[2], "import-fd") == 0 && argc == 4)
                import_lent_memory(argv[3], true);
        else if (strcmp(argv[2], "import-fd-alone") == 0 && argc == 4)
                import_lent_memory(argv[3], false);
        else if (strcmp(argv[2], "nccl") == 0)
                export_as_nccl(argv[0], argv[1]);
        else if (strcmp(argv[2], "import-nccl") == 0 && argc == 4)
                import_as_nccl(argv[3]);
        else if (strcmp(argv[2], "shown") == 0 && argc == 4)
                be_shown(argv[3]);
        else if (strcmp(argv[2], "shown-contexts") == 0 && argc == 4)
                have_shown_contexts(argv[3]);
        else if (strcmp(argv[2], "idle") == 0 && argc == 4)
                be_idle(argv[3]);
        else if (strcmp(argv[2], "idle-bound") == 0 && argc == 4)
                be_bound(argv[3]);
        else if (strcmp(argv[2], "idle-interrupted") == 0 && argc == 4)
                be_interrupted(argv[3]);
        else if (strncmp(argv[2], "idle-", 5) == 0 && argc == 5)
                be_idle_meanwhile(argv[3], argv[4], strcmp(argv[2], "idle-killed") == 0);
        else if (strcmp(argv[2], "take-until-killed") == 0 && argc == 4)
                take_until_killed((unsigned)atoi(argv[3]));
        else if (strcmp(argv[2], "kill-processes") == 0 && argc == 5)
                kill_processes(argv[0], argv[1], (unsigned)atoi(argv[3]), (unsigned)atoi(argv[4]));
        else if (strcmp(argv[2], "import") == 0 && argc == 4)
                import_block(argv[3]);
        else
                CHECK(argc == 0); /* there is no such case */
        return 0;
}
