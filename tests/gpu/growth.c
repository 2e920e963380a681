/* growth: a program grows as PyTorch's allocator does, in segments of one size, frees all of them, and does so again.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * usage: growth malloc|async|vmm BYTES SEGMENT_BYTES
 *
 * malloc: cuMemAlloc; async: cuMemAllocAsync in a pool that keeps what is freed; vmm: cuMemCreate and cuMemMap in a
 * reserved range. Prints one line of JSON: for each round the first, median, 99th percentile and longest allocation, and
 * the sums for growth and for the frees. Unmodified under `bfcctl run`, it measures bfcd. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tests/gpu/driver.h"

#define POOL_KEEPS 4 /* CU_MEMPOOL_ATTR_RELEASE_THRESHOLD of cuda.h */

enum way { WAY_MALLOC, WAY_ASYNC, WAY_VMM, WAY_COUNT };
static const char *const way_names[WAY_COUNT] = { "malloc", "async", "vmm" };

static struct {
        CUresult (*alloc)(CUdeviceptr *ret, size_t n_bytes, CUstream stream);
        CUresult (*free)(CUdeviceptr p, CUstream stream);
        CUresult (*default_pool)(void **ret, CUdevice device);
        CUresult (*set_attribute)(void *pool, int which, void *value);
} pools; /* the table of driver.h does not have these */

static enum way way;
static size_t n_segments, segment_bytes;
static CUdevice device;
static CUdeviceptr range;

static double now_us(void)
{
        struct timespec t;

        clock_gettime(CLOCK_MONOTONIC, &t);
        return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static void check(CUresult r, const char *what)
{
        if (r == CUDA_SUCCESS)
                return;
        fprintf(stderr, "growth: %s: %s\n", what, gpu_error(r));
        exit(EXIT_FAILURE);
}

static void find_pools(void)
{
        cuuint64_t all = UINT64_MAX; /* bytes */
        void *pool;
        void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);

        *(void **)&pools.alloc = dlsym(library, "cuMemAllocAsync");
        *(void **)&pools.free = dlsym(library, "cuMemFreeAsync");
        *(void **)&pools.default_pool = dlsym(library, "cuDeviceGetDefaultMemPool");
        *(void **)&pools.set_attribute = dlsym(library, "cuMemPoolSetAttribute");
        if (!pools.alloc || !pools.free || !pools.default_pool || !pools.set_attribute)
                check(CUDA_ERROR_NOT_FOUND, "functions of memory pools");
        check(pools.default_pool(&pool, device), "cuDeviceGetDefaultMemPool");
        check(pools.set_attribute(pool, POOL_KEEPS, &all), "cuMemPoolSetAttribute");
}

static void map_segment(CUdeviceptr at)
{
        const CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                           .location = { CU_MEM_LOCATION_TYPE_DEVICE, device } };
        const CUmemAccessDesc access = { prop.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
        CUmemGenericAllocationHandle handle;

        check(cu.cuMemCreate(&handle, segment_bytes, &prop, 0), "cuMemCreate");
        check(cu.cuMemMap(at, segment_bytes, 0, handle, 0), "cuMemMap");
        check(cu.cuMemRelease(handle), "cuMemRelease");
        check(cu.cuMemSetAccess(at, segment_bytes, &access, 1), "cuMemSetAccess");
}

static void take(CUdeviceptr *p, size_t i)
{
        if (way == WAY_MALLOC)
                check(cu.cuMemAlloc_v2(p, segment_bytes), "cuMemAlloc");
        else if (way == WAY_ASYNC)
                check(pools.alloc(p, segment_bytes, NULL), "cuMemAllocAsync");
        else
                map_segment(*p = range + i * segment_bytes);
        if (way == WAY_ASYNC)
                check(cu.cuStreamSynchronize(NULL), "cuStreamSynchronize");
}

static void give(CUdeviceptr p)
{
        if (way == WAY_MALLOC)
                check(cu.cuMemFree_v2(p), "cuMemFree");
        else if (way == WAY_ASYNC)
                check(pools.free(p, NULL), "cuMemFreeAsync");
        else
                check(cu.cuMemUnmap(p, segment_bytes), "cuMemUnmap");
}

static int compare(const void *a, const void *b)
{
        const double *x = a, *y = b;

        return (*x > *y) - (*x < *y);
}

static void do_round(int round, CUdeviceptr *segments, double *times_us)
{
        double first_us, sum_us = 0, begin_us;

        for (size_t i = 0; i < n_segments; i++) {
                begin_us = now_us();
                take(&segments[i], i);
                times_us[i] = now_us() - begin_us;
                sum_us += times_us[i];
        }
        first_us = times_us[0];
        qsort(times_us, n_segments, sizeof(*times_us), compare);
        begin_us = now_us();
        for (size_t i = 0; i < n_segments; i++)
                give(segments[i]);
        if (way == WAY_ASYNC)
                check(cu.cuStreamSynchronize(NULL), "cuStreamSynchronize");
        printf(", \"round%d\": {\"first_us\": %.0f, \"p50_us\": %.1f, \"p99_us\": %.1f, \"max_us\": %.0f, "
               "\"grow_ms\": %.2f, \"free_ms\": %.2f}",
               round, first_us, times_us[n_segments / 2], times_us[n_segments * 99 / 100],
               times_us[n_segments - 1], sum_us / 1e3, (now_us() - begin_us) / 1e3);
}

static void parse(int argc, char **argv)
{
        size_t n_bytes = argc == 4 ? strtoull(argv[2], NULL, 10) : 0;

        segment_bytes = argc == 4 ? strtoull(argv[3], NULL, 10) : 0;
        while (argc == 4 && way < WAY_COUNT && strcmp(argv[1], way_names[way]) != 0)
                way++;
        if (argc != 4 || way == WAY_COUNT || segment_bytes == 0 || segment_bytes % (2u << 20) != 0 ||
            n_bytes < segment_bytes) {
                fprintf(stderr, "usage: growth malloc|async|vmm BYTES SEGMENT_BYTES (a multiple of 2 MiB)\n");
                exit(2);
        }
        n_segments = n_bytes / segment_bytes;
}

int main(int argc, char **argv)
{
        CUdeviceptr *segments;
        double *times_us, begin_us = now_us();
        CUcontext context;

        parse(argc, argv);
        segments = calloc(n_segments, sizeof(*segments));
        times_us = calloc(n_segments, sizeof(*times_us));
        if (!segments || !times_us)
                check(CUDA_ERROR_OUT_OF_MEMORY, "memory for the results");
        check(gpu_start(0, &context), "start");
        check(cu.cuDeviceGet(&device, 0), "cuDeviceGet");
        printf("{\"context_ms\": %.1f", (now_us() - begin_us) / 1e3);
        if (way == WAY_ASYNC)
                find_pools();
        if (way == WAY_VMM)
                check(cu.cuMemAddressReserve(&range, n_segments * segment_bytes, 0, 0, 0),
                      "cuMemAddressReserve");
        for (int round = 1; round <= 2; round++)
                do_round(round, segments, times_us);
        printf("}\n");
        free(segments);
        free(times_us);
        return EXIT_SUCCESS;
}
