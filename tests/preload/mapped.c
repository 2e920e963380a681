/* Memory of cuMemCreate(), which the program maps: of bfcd, or of the driver and counted.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>
#include <sys/wait.h>

#include "proto/memfd.h"
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

/* A process gets an fd of the memory, and maps it. */
static void import(int fd)
{
        CUmemGenericAllocationHandle handle, again;
        CUmemAllocationProp prop;
        unsigned char byte;
        CUdeviceptr at;
        size_t n;

        context_make();
        n = free_bytes();
        CHECK(n <= 28 * MIB);
        OK(cu.cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)fd,
                                             CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
        OK(cu.cuMemImportFromShareableHandle(&again, (void *)(intptr_t)fd,
                                             CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
        CHECK(free_bytes() == n);
        OK(cu.cuMemRelease(again));
        OK(cu.cuMemGetAllocationPropertiesFromHandle(&prop, handle));
        CHECK(prop.requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && prop.location.id == 0);
        at = map(handle, 4 * MIB);
        OK(cu.cuMemRelease(handle));
        OK(cu.cuMemcpyDtoH_v2(&byte, at + 4 * MIB - 1, 1));
        CHECK(byte == 0x5a);
        OK(cu.cuMemsetD8_v2(at + 3 * MIB, 0xa5, 1));
        unmap(at, 4 * MIB);
}

/* The same fd of another process, whose kernel has or lacks seals for all memfds. */
static void import_copy(int fd, int copy, int seals)
{
        CUmemGenericAllocationHandle handle;
        bool is_sealed = (seals & F_SEAL_WRITE) != 0;
        char bytes[256];
        ssize_t n = pread(fd, bytes, sizeof(bytes), 0);

        CHECK(n > 0 && n < (ssize_t)sizeof(bytes));
        CHECK(copy >= 0 && write(copy, bytes, (size_t)n) == n && fcntl(copy, F_ADD_SEALS, seals) == 0);
        CHECK((cu.cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)copy,
                                                 CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) == CUDA_SUCCESS) ==
              is_sealed);
        if (is_sealed)
                OK(cu.cuMemRelease(handle));
        close(copy);
}

static void import_copies(int fd)
{
        const int all = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE;

        import_copy(fd, memfd_make_bare("copy", 0), all);
        import_copy(fd, memfd_create("copy", MFD_CLOEXEC | MFD_ALLOW_SEALING), all);
        import_copy(fd, memfd_make_bare("copy", 0), all & ~F_SEAL_WRITE);
}

void export_lent_memory(const char *program, const char *way)
{
        CUmemAllocationProp prop = plain;
        CUmemGenericAllocationHandle handle, again;
        unsigned char byte;
        CUdeviceptr at;
        char text[16];
        int fd, status;
        pid_t pid;

        context_make();
        prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        handle = create(4 * MIB, &prop);
        at = map(handle, 4 * MIB);
        OK(cu.cuMemsetD8_v2(at, 0x5a, 4 * MIB));
        OK(cu.cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
        OK(cu.cuMemImportFromShareableHandle(&again, (void *)(intptr_t)fd,
                                             CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
        OK(cu.cuMemRelease(again));
        import_copies(fd);
        snprintf(text, sizeof(text), "%d", dup(fd)); /* which an exec does not close */
        pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
                execl(program, program, way, "import-fd", text, NULL);
                _exit(98);
        }
        CHECK(waitpid(pid, &status, 0) == pid && status == 0);
        OK(cu.cuMemcpyDtoH_v2(&byte, at + 3 * MIB, 1));
        CHECK(byte == 0xa5);
        OK(cu.cuMemRelease(handle));
        unmap(at, 4 * MIB);
        CHECK(free_bytes() == 32 * MIB);
        CHECK(cu.cuMemImportFromShareableHandle(&again, (void *)(intptr_t)fd,
                                                CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != CUDA_SUCCESS);
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
                handle = create(4 * MIB, &prop);
                at = map(handle, 4 * MIB);
                if (is_shared)
                        OK(cu.cuMemExportToShareableHandle(&fd, handle,
                                                           CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
                OK(cu.cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
                OK(cu.cuMemRelease(handle));
                unmap(at, 4 * MIB);
                CHECK(free_bytes() == 32 * MIB);
                OK(cu.cuMemRelease(create(10 * MIB, &plain)));
                OK(cu.cuStreamEndCapture(stream, &graph));
                OK(cu.cuGraphDestroy(graph));
        }
        OK(cu.cuStreamDestroy_v2(stream));
}

void import_lent_memory(const char *fd)
{
        import(atoi(fd));
}

/* As JAX's memory is. */
void map_lent_memory(void)
{
        CUmemGenericAllocationHandle a, b, other;
        CUdeviceptr at, p;

        context_make();
        OK(cu.cuMemAlloc_v2(&p, 4096));
        a = create(10 * MIB, &plain);
        b = create(8 * MIB, &plain);
        CHECK(free_bytes() <= 14 * MIB);
        GIVES(CUDA_ERROR_OUT_OF_MEMORY, cu.cuMemCreate(&other, 14 * MIB, &plain, 0));
        GIVES(CUDA_ERROR_OUT_OF_MEMORY, cu.cuMemAlloc_v2(&p, 14 * MIB));
        OK(cu.cuMemAddressReserve(&at, 20 * MIB, 0, 0, 0));
        GIVES(CUDA_ERROR_NOT_SUPPORTED, cu.cuMemMap(at, 2 * MIB, 0, a, 0));
        GIVES(CUDA_ERROR_NOT_SUPPORTED, cu.cuMemMap(at, 8 * MIB, 2 * MIB, a, 0));
        OK(cu.cuMemMap(at, 10 * MIB, 0, a, 0));
        OK(cu.cuMemMap(at + 12 * MIB, 8 * MIB, 0, b, 0));
        CHECK(cu.cuMemMap(at + 2 * MIB, 8 * MIB, 0, b, 0) != CUDA_SUCCESS); /* there is something */
        CHECK(cu.cuMemMap(at + 4 * MIB, 8 * MIB, 0, b, 0) != CUDA_SUCCESS);
        CHECK(cu.cuMemsetD8_v2(at, 1, MIB) != CUDA_SUCCESS); /* no access yet */
        OK(cu.cuMemSetAccess(at, 10 * MIB, &read_write, 1));
        OK(cu.cuMemSetAccess(at + 12 * MIB, 8 * MIB, &read_write, 1));
        holds_bytes(at, 10 * MIB, 5);
        holds_bytes(at + 12 * MIB, 8 * MIB, 6);
        p = map(a, 10 * MIB);
        OK(cu.cuMemsetD8_v2(at + 3 * MIB, 7, 4 * MIB));
        holds_bytes(p + 7 * MIB, 3 * MIB, 8);
        unmap(p, 10 * MIB);
        CHECK(free_bytes() <= 14 * MIB);
        OK(cu.cuMemRelease(a)); /* it is still mapped */
        CHECK(free_bytes() <= 14 * MIB);
        GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemUnmap(at, 2 * MIB));
        GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemUnmap(at + 2 * MIB, 8 * MIB));
        GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemUnmap(at, 18 * MIB)); /* neither */
        GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemFree_v2(at));
        OK(cu.cuMemUnmap(at, 10 * MIB));
        CHECK(free_bytes() >= 20 * MIB);
        OK(cu.cuMemUnmap(at + 12 * MIB, 8 * MIB));
        OK(cu.cuMemRelease(b));
        CHECK(free_bytes() >= 30 * MIB - 4096);
        OK(cu.cuMemAddressFree(at, 20 * MIB));
        CHECK(cu.cuMemRelease(b) != CUDA_SUCCESS);
}

/* By other functions, and beside the driver's memory. */
void have_names_of_lent_memory(void)
{
        CUmemAllocationProp fabric = plain, fd = plain, found;
        CUarrayMapInfo infos[2] = { { .memOperationType = CU_MEM_OPERATION_TYPE_MAP },
                                    { .memOperationType = CU_MEM_OPERATION_TYPE_MAP } };
        CUmemGenericAllocationHandle a, b, other;
        CUpointer_attribute which = CU_POINTER_ATTRIBUTE_RANGE_SIZE;
        CUdeviceptr at, base;
        void *value;
        size_t n;
        int out;

        context_make();
        fd.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        fabric.requestedHandleTypes = (CUmemAllocationHandleType)(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR |
                                                                  CU_MEM_HANDLE_TYPE_FABRIC);
        GIVES(CUDA_ERROR_NOT_SUPPORTED, cu.cuMemCreate(&a, 4 * MIB, &fabric, 0));
        a = create(4 * MIB, &fd);
        b = create(6 * MIB, &plain);
        memset(&found, 1, sizeof(found));
        OK(cu.cuMemGetAllocationPropertiesFromHandle(&found, a));
        CHECK(memcmp(&found, &fd, sizeof(fd)) == 0);
        GIVES(CUDA_ERROR_INVALID_VALUE,
              cu.cuMemExportToShareableHandle(&out, b, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
        GIVES(CUDA_ERROR_INVALID_VALUE,
              cu.cuMemExportToShareableHandle(&out, a, CU_MEM_HANDLE_TYPE_FABRIC, 0));
        GIVES(CUDA_ERROR_NOT_SUPPORTED, cu.own_cuMulticastBindMem(1, 0, a, 0, 4 * MIB, 0));
        GIVES(CUDA_ERROR_NOT_SUPPORTED, cu.own_cuMulticastBindMem_v2(1, 0, 0, a, 0, 4 * MIB, 0));
        GIVES(CUDA_ERROR_NOT_SUPPORTED, cu.own_cuLogicalEndpointBindMem(1, 0, 0, a, 0, 4 * MIB, 0));
        OK(cu.own_cuMemMapArrayAsync(infos, 2, NULL));
        infos[1].memHandle.memHandle = a;
        GIVES(CUDA_ERROR_NOT_SUPPORTED, cu.own_cuMemMapArrayAsync(infos, 2, NULL));
        GIVES(CUDA_ERROR_NOT_SUPPORTED, cu.own_cuMemMapArrayAsync_ptsz(infos, 2, NULL));
        OK(cu.cuMemAddressReserve(&at, 10 * MIB, 0, 0, 0));
        OK(cu.cuMemMap(at, 4 * MIB, 0, a, 0));
        OK(cu.cuMemMap(at + 4 * MIB, 6 * MIB, 0, b, 0));
        OK(cu.cuMemSetAccess(at, 10 * MIB, &read_write, 1));
        holds_bytes(at, 10 * MIB, 9);
        OK(cu.cuMemGetAddressRange_v2(&base, &n, at + 7 * MIB));
        CHECK(base == at + 4 * MIB && n == 6 * MIB);
        OK(cu.cuPointerGetAttribute(&base, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, at + 4 * MIB - 1));
        CHECK(base == at);
        n = 0;
        value = &n;
        OK(cu.own_cuPointerGetAttributes(1, &which, &value, at + 9 * MIB));
        CHECK(n == 6 * MIB);
        OK(cu.cuMemRelease(b));
        OK(cu.cuMemRetainAllocationHandle(&other, (void *)(uintptr_t)(at + 9 * MIB)));
        CHECK(other == b);
        OK(cu.cuMemUnmap(at, 10 * MIB)); /* both */
        CHECK(free_bytes() <= 22 * MIB);
        OK(cu.cuMemRelease(other));
        OK(cu.cuMemRelease(a));
        CHECK(free_bytes() == 32 * MIB);
        OK(cu.cuMemAddressFree(at, 10 * MIB));
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

/* Each needs small extents beside large ones. */
void have_uneven_sizes(void)
{
        CUmemAllocationProp prop = plain;
        CUmemGenericAllocationHandle first, second, again, third, fourth;
        CUdeviceptr at;
        int fd;

        context_make();
        prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        first = create(130 * MIB, &plain);
        second = create(66 * MIB, &prop);
        at = map(second, 66 * MIB);
        holds_bytes(at, 66 * MIB, 4);
        OK(cu.cuMemExportToShareableHandle(&fd, second, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
        OK(cu.cuMemImportFromShareableHandle(&again, (void *)(intptr_t)fd,
                                             CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
        CHECK(again == second);
        OK(cu.cuMemRelease(again));
        third = create(70 * MIB, &plain);
        fourth = create(68 * MIB, &plain);
        CHECK(free_bytes() == (1024 - 130 - 66 - 70 - 68) * MIB);
        OK(cu.cuMemRelease(fourth));
        OK(cu.cuMemRelease(first));
        first = create(130 * MIB, &plain);
        OK(cu.cuMemRelease(third));
        OK(cu.cuMemRelease(first));
        unmap(at, 66 * MIB);
        OK(cu.cuMemRelease(second));
        CHECK(free_bytes() == 1024 * MIB);
}

/* No extents have 66 MiB together while the memory of cuMemAlloc() has all extents of 2 MiB, which are 32. */
void have_no_even_size(void)
{
        CUmemGenericAllocationHandle handle, lent;
        CUdeviceptr small, at;

        context_make();
        OK(cu.cuMemAlloc_v2(&small, 63 * MIB));
        handle = create(66 * MIB, &plain);
        CHECK(free_bytes() <= (1024 - 63 - 66) * MIB);
        at = map(handle, 66 * MIB);
        holds_bytes(at, 66 * MIB, 4);
        OK(cu.cuMemFree_v2(small));
        OK(cu.cuMemRelease(create(68 * MIB, &plain))); /* now the size is tried again */
        lent = create(66 * MIB, &plain);
        OK(cu.cuMemRelease(lent));
        OK(cu.cuMemRelease(handle));
        unmap(at, 66 * MIB);
        CHECK(free_bytes() == 1024 * MIB);
}
