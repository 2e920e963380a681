/* Memory of cuMemCreate(), which the program maps: of bfcd, or of the driver and counted.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/wait.h>

#include "tests/preload/job.h"

static const CUmemAllocationProp plain = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                           .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 } };
static const CUmemAllocationProp tile_pool = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                               .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 },
                                               .allocFlags.usage = IS_TILE_POOL };
static const CUmemAccessDesc read_write = { { CU_MEM_LOCATION_TYPE_DEVICE, 0 },
                                            CU_MEM_ACCESS_FLAGS_PROT_READWRITE };

static CUmemGenericAllocationHandle create(size_t n_bytes, const CUmemAllocationProp *prop)
{
        CUmemGenericAllocationHandle handle = 0;

        OK(cu.cuMemCreate(&handle, n_bytes, prop, 0));
        return handle;
}

/* A range in which it is mapped and accessible. */
static CUdeviceptr map(CUmemGenericAllocationHandle handle, size_t n_bytes)
{
        CUdeviceptr at;

        OK(cu.cuMemAddressReserve(&at, n_bytes, 0, 0, 0));
        OK(cu.cuMemMap(at, n_bytes, 0, handle, 0));
        OK(cu.cuMemSetAccess(at, n_bytes, &read_write, 1));
        return at;
}

static void unmap(CUdeviceptr at, size_t n_bytes)
{
        OK(cu.cuMemUnmap(at, n_bytes));
        OK(cu.cuMemAddressFree(at, n_bytes));
}

/* What bfcd does not lend counts, and the limit holds for both kinds together. */
void map_memory(void)
{
        CUmemGenericAllocationHandle handles[2], other;
        CUdeviceptr at, p;

        context_make();
        OK(cu.cuMemAddressReserve(&at, 32 * MIB, 0, 0, 0));
        for (size_t i = 0; i < 2; i++) {
                handles[i] = create(8 * MIB, &tile_pool);
                OK(cu.cuMemMap(at + i * 8 * MIB, 8 * MIB, 0, handles[i], 0));
        }
        OK(cu.cuMemSetAccess(at, 16 * MIB, &read_write, 1));
        holds_bytes(at, 16 * MIB, 5);
        CHECK(free_bytes() == 16 * MIB);
        GIVES(CUDA_ERROR_OUT_OF_MEMORY, cu.cuMemCreate(&other, 18 * MIB, &tile_pool, 0));
        GIVES(CUDA_ERROR_OUT_OF_MEMORY, cu.cuMemCreate(&other, 18 * MIB, &plain, 0));
        GIVES(CUDA_ERROR_OUT_OF_MEMORY, cu.cuMemAlloc_v2(&p, 18 * MIB));
        OK(cu.cuMemAlloc_v2(&p, 8 * MIB));
        OK(cu.cuMemFree_v2(p));
        OK(cu.cuMemRelease(handles[0])); /* it is still mapped */
        CHECK(free_bytes() == 16 * MIB);
        OK(cu.cuMemRetainAllocationHandle(&other, (void *)(uintptr_t)(at + 8 * MIB)));
        OK(cu.cuMemUnmap(at, 16 * MIB));
        CHECK(free_bytes() == 24 * MIB);
        OK(cu.cuMemRelease(handles[1]));
        CHECK(free_bytes() == 24 * MIB);
        OK(cu.cuMemRelease(other));
        CHECK(free_bytes() == 32 * MIB);
        OK(cu.cuMemAddressFree(at, 32 * MIB));
}

/* What is free at some time: memory returns when bfcd's library and the device have answered. */
void wait_free(size_t n_bytes)
{
        for (int i = 0; free_bytes() != n_bytes && i < 120000; i++)
                usleep(1000);
        CHECK(free_bytes() == n_bytes);
}

static _Atomic bool is_over;

static void *be_refused_until_it_is_over(void *context)
{
        CUmemGenericAllocationHandle handle;

        OK(cu.cuCtxSetCurrent(context));
        while (!atomic_load(&is_over))
                GIVES(CUDA_ERROR_OUT_OF_MEMORY, cu.cuMemCreate(&handle, 30 * MIB, &tile_pool, 0));
        return NULL;
}

/* What is refused takes nothing of what another thread can have, not for a moment. */
void create_beside_refusals(void)
{
        CUmemGenericAllocationHandle handles[15];
        pthread_t thread;
        CUcontext context;

        context_make();
        OK(cu.cuCtxGetCurrent(&context));
        for (int i = 0; i < 15; i++)
                handles[i] = create(2 * MIB, &tile_pool);
        CHECK(pthread_create(&thread, NULL, be_refused_until_it_is_over, context) == 0);
        for (int i = 0; i < 100; i++)
                OK(cu.cuMemRelease(create(2 * MIB, &tile_pool)));
        atomic_store(&is_over, true);
        CHECK(pthread_join(thread, NULL) == 0);
        for (int i = 0; i < 15; i++)
                OK(cu.cuMemRelease(handles[i]));
        CHECK(free_bytes() == 32 * MIB);
}

/* ---- blocks, with a limit of 256 MiB ---------------------------------------------------- */

#define LIMIT (256 * MIB)

/* Another process gets an fd of the memory, and maps it. */
void import_lent_memory(const char *text, bool has_proxy)
{
        void *fd = (void *)(intptr_t)atoi(text);
        CUmemGenericAllocationHandle handle, again;
        CUmemAllocationProp prop;
        unsigned char byte;
        CUdeviceptr at;
        size_t n;

        context_make();
        n = free_bytes();
        CHECK(has_proxy ? n == LIMIT - 40 * MIB : n > LIMIT);
        OK(cu.cuMemImportFromShareableHandle(&handle, fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
        OK(cu.cuMemImportFromShareableHandle(&again, fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
        CHECK(free_bytes() == n);
        OK(cu.cuMemRelease(again));
        OK(cu.cuMemGetAllocationPropertiesFromHandle(&prop, handle));
        CHECK(prop.requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && prop.location.id == 0);
        at = map(handle, 40 * MIB);
        OK(cu.cuMemRelease(handle));
        OK(cu.cuMemcpyDtoH_v2(&byte, at + 40 * MIB - 1, 1));
        CHECK(byte == 0x5a);
        OK(cu.cuMemsetD8_v2(at + 39 * MIB, 0xa5, 1));
        unmap(at, 40 * MIB);
}

/* In a process with or without the proxy, which is in the first folder of the path. */
static void import_elsewhere(const char *program, const char *way, int fd, bool has_proxy)
{
        const char *path = strchr(getenv("LD_LIBRARY_PATH"), ':');
        char text[16];
        int status;
        pid_t pid;

        snprintf(text, sizeof(text), "%d", fd);
        pid = fork();
        CHECK(pid >= 0 && path);
        if (pid == 0) {
                if (!has_proxy)
                        setenv("LD_LIBRARY_PATH", path + 1, 1);
                execl(program, program, way, has_proxy ? "import-fd" : "import-fd-alone", text, NULL);
                _exit(98);
        }
        CHECK(waitpid(pid, &status, 0) == pid && status == 0);
}

void export_lent_memory(const char *program, const char *way)
{
        CUmemAllocationProp prop = plain;
        CUmemGenericAllocationHandle handle, again;
        unsigned char byte;
        CUdeviceptr at;
        int fd, copy;

        context_make();
        prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        handle = create(40 * MIB, &prop);
        at = map(handle, 40 * MIB);
        OK(cu.cuMemsetD8_v2(at, 0x5a, 40 * MIB));
        OK(cu.cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
        CHECK(fcntl(fd, F_GETFD) == FD_CLOEXEC);
        OK(cu.cuMemImportFromShareableHandle(&again, (void *)(intptr_t)fd,
                                             CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
        OK(cu.cuMemRelease(again));
        copy = dup(fd); /* which an exec does not close */
        import_elsewhere(program, way, copy, true);
        OK(cu.cuMemsetD8_v2(at + 39 * MIB, 0x5a, 1));
        import_elsewhere(program, way, copy, false);
        OK(cu.cuMemcpyDtoH_v2(&byte, at + 39 * MIB, 1));
        CHECK(byte == 0xa5);
        close(copy);
        OK(cu.cuMemRelease(handle));
        unmap(at, 40 * MIB);
        wait_free(LIMIT - 40 * MIB); /* the fd keeps the memory */
        close(fd);
        wait_free(LIMIT);
}

#define NCCL_BYTES(i) ((i) == 0 ? 2 * MIB : (i) == 1 ? 10 * MIB : 40 * MIB)

/* The other process of a communicator. */
void import_as_nccl(const char *text)
{
        CUmemGenericAllocationHandle handle;
        unsigned char byte;
        CUdeviceptr at;
        size_t n;

        context_make();
        n = free_bytes();
        for (int i = 0, fd = atoi(text); i < 3; i++, fd++) {
                OK(cu.cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)fd,
                                                     CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
                at = map(handle, NCCL_BYTES(i));
                OK(cu.cuMemcpyDtoH_v2(&byte, at + NCCL_BYTES(i) - 1, 1));
                CHECK(byte == i);
                OK(cu.cuMemsetD8_v2(at, 0x77, MIB));
                unmap(at, NCCL_BYTES(i));
                OK(cu.cuMemRelease(handle));
        }
        CHECK(free_bytes() == n);
}

/* A fabric handle beside the fd, or the fd alone where there is none; buffers that are charged, and blocks. */
void export_as_nccl(const char *program, const char *way)
{
        CUmemGenericAllocationHandle handles[3];
        CUmemAllocationProp prop = plain;
        CUdeviceptr at[3];
        char text[16];
        int fd, status;
        pid_t pid;

        context_make();
        for (int i = 0; i < 3; i++) {
                CUresult result;

                prop.requestedHandleTypes =
                        (CUmemAllocationHandleType)(CU_MEM_HANDLE_TYPE_FABRIC |
                                                    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
                result = cu.cuMemCreate(&handles[i], NCCL_BYTES(i), &prop, 0);
                CHECK(result == CUDA_ERROR_NOT_SUPPORTED || result == CUDA_ERROR_NOT_PERMITTED);
                prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
                handles[i] = create(NCCL_BYTES(i), &prop);
                at[i] = map(handles[i], NCCL_BYTES(i));
                OK(cu.cuMemsetD8_v2(at[i], (unsigned char)i, NCCL_BYTES(i)));
                OK(cu.cuMemExportToShareableHandle(&fd, handles[i], CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                                   0));
                CHECK(dup2(fd, 200 + i) == 200 + i && close(fd) == 0); /* which an exec does not close */
        }
        CHECK(free_bytes() == LIMIT - 52 * MIB);
        snprintf(text, sizeof(text), "%d", 200);
        pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
                execl(program, program, way, "import-nccl", text, NULL);
                _exit(98);
        }
        CHECK(waitpid(pid, &status, 0) == pid && status == 0);
        for (int i = 0; i < 3; i++) {
                unsigned char byte;

                OK(cu.cuMemcpyDtoH_v2(&byte, at[i], 1));
                CHECK(byte == 0x77);
                close(200 + i);
                unmap(at[i], NCCL_BYTES(i));
                OK(cu.cuMemRelease(handles[i]));
        }
        wait_free(LIMIT);
}

/* In a stream that bfcd was not told of. A wait would end the capture. */
void release_lent_memory_in_capture(void)
{
        CUmemAllocationProp prop = plain;
        CUmemGenericAllocationHandle handle;
        CUstream stream;
        CUgraph graph;
        CUdeviceptr at;
        int fd;

        context_make();
        prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        OK(cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
        for (int is_shared = 0; is_shared < 2; is_shared++) {
                handle = create(200 * MIB, &prop);
                at = map(handle, 200 * MIB);
                if (is_shared) {
                        OK(cu.cuMemExportToShareableHandle(&fd, handle,
                                                           CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
                        close(fd);
                }
                OK(cu.cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
                OK(cu.cuMemRelease(handle));
                unmap(at, 200 * MIB);
                CHECK(free_bytes() == LIMIT);
                OK(cu.cuMemRelease(create(100 * MIB, &plain)));
                OK(cu.cuStreamEndCapture(stream, &graph));
                OK(cu.cuGraphDestroy(graph));
        }
        OK(cu.cuStreamDestroy_v2(stream));
}

/* As JAX's memory is. */
void map_lent_memory(void)
{
        CUmemGenericAllocationHandle a, b, other;
        CUdeviceptr at, p;

        context_make();
        OK(cu.cuMemAlloc_v2(&p, 4096));
        a = create(100 * MIB, &plain);
        b = create(34 * MIB, &plain);
        CHECK(free_bytes() <= LIMIT - 134 * MIB - 4096);
        GIVES(CUDA_ERROR_OUT_OF_MEMORY, cu.cuMemCreate(&other, 122 * MIB, &plain, 0));
        GIVES(CUDA_ERROR_OUT_OF_MEMORY, cu.cuMemAlloc_v2(&p, 122 * MIB));
        GIVES(CUDA_ERROR_OUT_OF_MEMORY, cu.cuMemCreate(&other, 300 * MIB, &plain, 0));
        GIVES(CUDA_ERROR_INVALID_VALUE,
              cu.cuMemCreate(&other, 33 * MIB, &plain, 0)); /* the driver's answer */
        OK(cu.cuMemAddressReserve(&at, 134 * MIB, 0, 0, 0));
        OK(cu.cuMemMap(at, 100 * MIB, 0, a, 0));
        OK(cu.cuMemMap(at + 100 * MIB, 34 * MIB, 0, b, 0));
        CHECK(cu.cuMemMap(at + 2 * MIB, 34 * MIB, 0, b, 0) != CUDA_SUCCESS); /* there is something */
        CHECK(cu.cuMemsetD8_v2(at, 1, MIB) != CUDA_SUCCESS);                 /* no access yet */
        OK(cu.cuMemSetAccess(at, 134 * MIB, &read_write, 1));
        holds_bytes(at, 100 * MIB, 5);
        holds_bytes(at + 100 * MIB, 34 * MIB, 6);
        p = map(a, 100 * MIB);
        OK(cu.cuMemsetD8_v2(at + 3 * MIB, 7, 4 * MIB));
        holds_bytes(p + 7 * MIB, 3 * MIB, 8);
        unmap(p, 100 * MIB);
        OK(cu.cuMemRelease(a)); /* it is still mapped */
        OK(cu.cuMemRetainAllocationHandle(&other, (void *)(uintptr_t)(at + 99 * MIB)));
        CHECK(other == a && free_bytes() <= LIMIT - 134 * MIB);
        GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemFree_v2(at));
        OK(cu.cuMemUnmap(at, 100 * MIB));
        CHECK(free_bytes() <= LIMIT - 134 * MIB); /* it has a handle */
        OK(cu.cuMemRelease(other));
        CHECK(free_bytes() >= LIMIT - 36 * MIB - 4096);
        OK(cu.cuMemUnmap(at + 100 * MIB, 34 * MIB));
        OK(cu.cuMemRelease(b));
        CHECK(free_bytes() >= LIMIT - 2 * MIB - 4096);
        OK(cu.cuMemAddressFree(at, 134 * MIB));
        OK(cu.cuMemRelease(create(250 * MIB, &plain))); /* it waits for what is returned */
}

/* By other functions, and beside the driver's memory. */
void have_names_of_lent_memory(void)
{
        CUmemAllocationProp fabric = plain, fd = plain, rdma = plain, found;
        CUmemGenericAllocationHandle a, b, c, other;
        CUpointer_attribute which = CU_POINTER_ATTRIBUTE_RANGE_SIZE;
        CUdeviceptr at, base;
        void *value;
        size_t n;
        int out;

        context_make();
        fd.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        fabric.requestedHandleTypes = (CUmemAllocationHandleType)(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR |
                                                                  CU_MEM_HANDLE_TYPE_FABRIC);
        rdma.allocFlags.gpuDirectRDMACapable = 1;
        GIVES(CUDA_ERROR_NOT_SUPPORTED, cu.cuMemCreate(&a, 32 * MIB, &fabric, 0)); /* the driver's answer */
        a = create(32 * MIB, &rdma); /* the driver's own, charged, unless bfcd's extents are such */
        OK(cu.cuMemGetAllocationPropertiesFromHandle(&found, a));
        CHECK(found.allocFlags.gpuDirectRDMACapable && free_bytes() == LIMIT - 32 * MIB);
        OK(cu.cuMemRelease(a));
        a = create(32 * MIB, &fd);
        b = create(34 * MIB, &plain);
        c = create(8 * MIB, &tile_pool); /* charged */
        memset(&found, 1, sizeof(found));
        OK(cu.cuMemGetAllocationPropertiesFromHandle(&found, a));
        CHECK(memcmp(&found, &fd, sizeof(fd)) == 0);
        GIVES(CUDA_ERROR_INVALID_VALUE,
              cu.cuMemExportToShareableHandle(&out, b, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
        GIVES(CUDA_ERROR_INVALID_VALUE,
              cu.cuMemExportToShareableHandle(&out, c, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
        GIVES(CUDA_ERROR_INVALID_VALUE,
              cu.cuMemExportToShareableHandle(&out, a, CU_MEM_HANDLE_TYPE_FABRIC, 0));
        OK(cu.cuMemAddressReserve(&at, 74 * MIB, 0, 0, 0));
        OK(cu.cuMemMap(at, 32 * MIB, 0, a, 0));
        OK(cu.cuMemMap(at + 32 * MIB, 34 * MIB, 0, b, 0));
        OK(cu.cuMemMap(at + 66 * MIB, 8 * MIB, 0, c, 0));
        OK(cu.cuMemSetAccess(at, 74 * MIB, &read_write, 1));
        holds_bytes(at, 74 * MIB, 9);
        OK(cu.cuMemGetAddressRange_v2(&base, &n, at + 35 * MIB));
        CHECK(base == at + 32 * MIB && n == 34 * MIB);
        OK(cu.cuPointerGetAttribute(&base, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, at + 32 * MIB - 1));
        CHECK(base == at);
        n = 0;
        value = &n;
        OK(cu.own_cuPointerGetAttributes(1, &which, &value, at + 65 * MIB));
        CHECK(n == 34 * MIB);
        OK(cu.cuMemRelease(b));
        OK(cu.cuMemRetainAllocationHandle(&other, (void *)(uintptr_t)(at + 65 * MIB)));
        CHECK(other == b);
        OK(cu.cuMemUnmap(at, 74 * MIB)); /* all of them */
        CHECK(free_bytes() <= LIMIT - 74 * MIB);
        OK(cu.cuMemRelease(other));
        OK(cu.cuMemRelease(a));
        OK(cu.cuMemRelease(c));
        CHECK(free_bytes() == LIMIT);
        OK(cu.cuMemAddressFree(at, 74 * MIB));
}

/* The driver gives no handle of it, so that it is charged. */
void have_charged_memory(void)
{
        CUmemGenericAllocationHandle handle, other;
        CUdeviceptr at;

        context_make();
        handle = create(40 * MIB, &plain);
        CHECK(free_bytes() == LIMIT - 40 * MIB);
        at = map(handle, 40 * MIB);
        holds_bytes(at, 40 * MIB, 3);
        GIVES(CUDA_ERROR_OUT_OF_MEMORY, cu.cuMemCreate(&other, 218 * MIB, &plain, 0));
        unmap(at, 40 * MIB);
        OK(cu.cuMemRelease(handle));
        CHECK(free_bytes() == LIMIT);
}

void have_memory_that_is_not_lent(void)
{
        CUmemGenericAllocationHandle handle;
        CUdeviceptr at;

        context_make();
        handle = create(8 * MIB, &plain);
        CHECK(free_bytes() <= 24 * MIB);
        at = map(handle, 8 * MIB);
        holds_bytes(at, 8 * MIB, 3);
        unmap(at, 8 * MIB);
        OK(cu.cuMemRelease(handle));
}

/* On a part of a GPU, as CUDA 13.4 has it, and on one that CUDA may have later: only the driver can make it. */
void have_localized_memory(void)
{
        CUmemAllocationProp prop = plain;
        CUmemGenericAllocationHandle handle, more;
        CUdeviceptr at;

        context_make();
        prop.location = (CUmemLocation){ (CUmemLocationType)6, 1 << 8 };
        handle = create(8 * MIB, &prop);
        CHECK(free_bytes() == 24 * MIB);
        at = map(handle, 8 * MIB);
        holds_bytes(at, 8 * MIB, 3);
        GIVES(CUDA_ERROR_OUT_OF_MEMORY, cu.cuMemCreate(&more, 26 * MIB, &prop, 0));
        prop.location.type = (CUmemLocationType)7;
        GIVES(CUDA_ERROR_OUT_OF_MEMORY, cu.cuMemCreate(&more, 26 * MIB, &prop, 0));
        prop.location.type = (CUmemLocationType)CU_MEM_LOCATION_TYPE_HOST;
        GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemCreate(&more, 26 * MIB, &prop, 0)); /* the driver's answer */
        unmap(at, 8 * MIB);
        OK(cu.cuMemRelease(handle));
        CHECK(free_bytes() == 32 * MIB);
}
