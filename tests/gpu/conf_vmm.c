/* Conformance: memory, addresses and access apart; fds between processes.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/conformance.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static size_t granularity;
static CUmemAllocationProp prop;

static void setup(void)
{
        conformance_setup();
        prop = gpu_prop(device);
        OK(cu.cuMemGetAllocationGranularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
}

FIXTURE(vmm, setup, conformance_teardown);

LOOP_TEST(sizes_are_multiples_of_the_granularity, machine.has_vmm)
{
        CUmemGenericAllocationHandle handle;
        CUmemAllocationProp wrong = prop;
        size_t n_total, n_free;

        ck_assert_uint_ge(granularity, 4096);
        ck_assert_uint_eq(granularity & (granularity - 1), 0);
        IS(CUDA_ERROR_INVALID_VALUE, cu.cuMemCreate(&handle, granularity + 4096, &prop, 0));
        IS(CUDA_ERROR_INVALID_VALUE, cu.cuMemCreate(&handle, granularity, &prop, 1));
        wrong.location.id = 1000;
        REFUSED(cu.cuMemCreate(&handle, granularity, &wrong, 0));
        OK(cu.cuMemGetInfo_v2(&n_free, &n_total));
        n_total -= n_total % granularity;
        IS(CUDA_ERROR_OUT_OF_MEMORY, cu.cuMemCreate(&handle, n_total + granularity, &prop, 0));
        OK(cu.cuMemCreate(&handle, granularity, &prop, 0));
        memset(&wrong, 0, sizeof(wrong));
        OK(cu.cuMemGetAllocationPropertiesFromHandle(&wrong, handle));
        ck_assert_int_eq((int)wrong.type, CU_MEM_ALLOCATION_TYPE_PINNED);
        ck_assert_int_eq(wrong.location.id, device);
        OK(cu.cuMemRelease(handle));
}

LOOP_TEST(no_access_before_it_is_set, machine.has_vmm)
{
        CUmemAccessDesc access = { .location = { CU_MEM_LOCATION_TYPE_DEVICE, device },
                                   .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
        CUmemGenericAllocationHandle handle;
        unsigned long long flags = 99;
        CUdeviceptr at;

        OK(cu.cuMemCreate(&handle, granularity, &prop, 0));
        OK(cu.cuMemAddressReserve(&at, 2 * granularity, 0, 0, 0));
        ck_assert_uint_eq(at % granularity, 0);
        REFUSED(cu.cuMemsetD8_v2(at, 1, 16));
        REFUSED(cu.cuMemSetAccess(at, granularity, &access, 1));
        OK(cu.cuMemMap(at, granularity, 0, handle, 0));
        REFUSED(cu.cuMemsetD8_v2(at, 1, 16));
        OK(cu.cuMemGetAccess(&flags, &access.location, at));
        ck_assert_uint_eq(flags, CU_MEM_ACCESS_FLAGS_PROT_NONE);
        OK(cu.cuMemSetAccess(at, granularity, &access, 1));
        OK(cu.cuMemGetAccess(&flags, &access.location, at));
        ck_assert_uint_eq(flags, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
        OK(cu.cuMemsetD8_v2(at, 1, granularity));
        ck_assert_uint_eq(gpu_count_other(at, 1, granularity), 0);
        OK(cu.cuMemUnmap(at, granularity));
        REFUSED(cu.cuMemsetD8_v2(at, 1, 16));
        OK(cu.cuMemMap(at + granularity, granularity, 0, handle, 0)); /* elsewhere, the same bytes */
        OK(cu.cuMemSetAccess(at + granularity, granularity, &access, 1));
        ck_assert_uint_eq(gpu_count_other(at + granularity, 1, granularity), 0);
        OK(cu.cuMemUnmap(at + granularity, granularity));
        OK(cu.cuMemAddressFree(at, 2 * granularity));
        OK(cu.cuMemRelease(handle));
}

LOOP_TEST(maps_are_whole_and_do_not_overlap, machine.has_vmm)
{
        CUmemGenericAllocationHandle handle;
        CUdeviceptr at;

        OK(cu.cuMemCreate(&handle, 2 * granularity, &prop, 0));
        OK(cu.cuMemAddressReserve(&at, 4 * granularity, 0, 0, 0));
        REFUSED(cu.cuMemMap(at, granularity, granularity, handle, 0));
        REFUSED(cu.cuMemMap(at + 4096, 2 * granularity, 0, handle, 0));
        IS(CUDA_ERROR_NOT_SUPPORTED, cu.cuMemMap(at, granularity, 0, handle, 0)); /* of another size */
        OK(cu.cuMemMap(at, 2 * granularity, 0, handle, 0));
        REFUSED(cu.cuMemMap(at + granularity, 2 * granularity, 0, handle, 0));
        REFUSED(cu.cuMemUnmap(at, granularity));
        OK(cu.cuMemUnmap(at, 2 * granularity));
        OK(cu.cuMemUnmap(at, 2 * granularity)); /* nothing is mapped there, which is no error */
        OK(cu.cuMemAddressFree(at, 4 * granularity));
        OK(cu.cuMemRelease(handle));
}

/* What a region rests on: pieces made one by one, side by side, are one range. */
LOOP_TEST(adjacent_maps_are_one_range, machine.has_vmm)
{
        CUmemAccessDesc access = { .location = { CU_MEM_LOCATION_TYPE_DEVICE, device },
                                   .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
        CUmemGenericAllocationHandle handles[2];
        CUdeviceptr at;

        OK(cu.cuMemAddressReserve(&at, 2 * granularity, 0, 0, 0));
        for (int i = 0; i < 2; i++) {
                OK(cu.cuMemCreate(&handles[i], granularity, &prop, 0));
                OK(cu.cuMemMap(at + (size_t)i * granularity, granularity, 0, handles[i], 0));
                OK(cu.cuMemSetAccess(at + (size_t)i * granularity, granularity, &access, 1));
                OK(cu.cuMemRelease(handles[i])); /* the mapping keeps it */
        }
        OK(cu.cuMemsetD8_v2(at + granularity / 2, 0x21, granularity));
        ck_assert_uint_eq(gpu_count_other(at + granularity / 2, 0x21, granularity), 0);
        OK(cu.cuMemUnmap(at, 2 * granularity));
        OK(cu.cuMemAddressFree(at, 2 * granularity));
}

LOOP_TEST(a_handle_from_an_address, machine.has_vmm)
{
        CUmemGenericAllocationHandle handle;
        struct gpu_mapping mapping;

        OK(gpu_create_and_map(device, granularity, &mapping));
        OK(cu.cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)(mapping.at + 4096)));
        OK(cu.cuMemRelease(handle));
        OK(gpu_unmap(&mapping));
        REFUSED(cu.cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)mapping.at));
}

static uint64_t peer_count_other(struct peer *p, uint64_t at, unsigned char value, size_t n_bytes)
{
        struct peer_message m = { .op = PEER_COUNT, .a = at, .b = value, .c = n_bytes };

        tell(p, &m, -1, NULL);
        return m.a;
}

LOOP_TEST(an_fd_shares_it_with_another_process, machine.has_vmm)
{
        struct peer p = conformance_peer();
        struct peer_message m = { .op = PEER_IMPORT, .a = 2 * granularity };
        struct gpu_mapping mapping;
        uint64_t there;
        int fd = -1;

        OK(gpu_create_and_map(device, 2 * granularity, &mapping));
        OK(cu.cuMemsetD8_v2(mapping.at, 0x11, 2 * granularity));
        OK(cu.cuMemExportToShareableHandle(&fd, mapping.handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
        ck_assert_int_ge(fd, 0);
        tell(&p, &m, fd, NULL);
        close(fd);
        there = m.b;
        ck_assert_uint_eq(peer_count_other(&p, there, 0x11, 2 * granularity), 0);
        m = (struct peer_message){ .op = PEER_FILL, .a = there + granularity, .b = 0x12, .c = granularity };
        tell(&p, &m, -1, NULL);
        ck_assert_uint_eq(gpu_count_other(mapping.at, 0x11, granularity), 0);
        ck_assert_uint_eq(gpu_count_other(mapping.at + granularity, 0x12, granularity), 0);
        OK(gpu_unmap(&mapping));
        ck_assert_uint_eq(peer_count_other(&p, there, 0x11, granularity),
                          0); /* the peer's mapping keeps it */
        peer_end(&p);
}

/* What a restart without loss rests on. */
LOOP_TEST(an_fd_keeps_the_memory_of_a_killed_process, machine.has_vmm)
{
        struct peer p = conformance_peer();
        struct peer_message m = { .op = PEER_CREATE, .a = 4 * granularity };
        CUmemGenericAllocationHandle handle;
        size_t n_free = gpu_n_free();
        struct gpu_mapping mapping;
        int fd = -1;

        tell(&p, &m, -1, NULL);
        m.op = PEER_EXPORT;
        tell(&p, &m, -1, &fd);
        ck_assert_int_ge(fd, 0);
        m = (struct peer_message){ .op = PEER_FILL, .a = m.b, .b = 0x77, .c = 4 * granularity };
        tell(&p, &m, -1, NULL);
        peer_kill(&p);
        if (is_fake)
                ck_assert_uint_eq(gpu_n_free(), n_free - 4 * granularity);
        OK(cu.cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)fd,
                                             CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
        OK(gpu_map(device, handle, 4 * granularity, &mapping));
        ck_assert_uint_eq(gpu_count_other(mapping.at, 0x77, 4 * granularity), 0);
        close(fd);
        OK(gpu_unmap(&mapping));
}

/* It is opened by the driver alone: nothing may look into it. It can be imported again and again. */
LOOP_TEST(an_fd_is_no_regular_file, machine.has_vmm)
{
        CUmemGenericAllocationHandle handle;
        struct peer_message m = { .op = PEER_CREATE, .a = 2 * granularity };
        struct gpu_mapping mapping;
        struct peer p;
        struct stat st;
        char byte;
        int fd = -1;

        setenv("FAKE_CUDA_FD", "socket", 1);
        p = conformance_peer();
        unsetenv("FAKE_CUDA_FD");
        tell(&p, &m, -1, NULL);
        m.op = PEER_EXPORT;
        tell(&p, &m, -1, &fd);
        ck_assert_int_ge(fd, 0);
        ck_assert_int_eq(fstat(fd, &st), 0);
        ck_assert(!S_ISREG(st.st_mode));
        ck_assert_int_lt(pread(fd, &byte, 1, 0), 0);
        ck_assert_int_lt(ftruncate(fd, 0), 0);
        m = (struct peer_message){ .op = PEER_FILL, .a = m.b, .b = 0x77, .c = 2 * granularity };
        tell(&p, &m, -1, NULL);
        peer_kill(&p);
        for (int i = 0; i < 2; i++) {
                OK(cu.cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)fd,
                                                     CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
                OK(gpu_map(device, handle, 2 * granularity, &mapping));
                ck_assert_uint_eq(gpu_count_other(mapping.at, 0x77, 2 * granularity), 0);
                OK(gpu_unmap(&mapping));
        }
        close(fd);
}

/* It stays out of a program that the process becomes, and an import cannot be passed on by another export. */
LOOP_TEST(an_exported_fd, machine.has_vmm)
{
        CUmemGenericAllocationHandle handle, imported;
        int fd = -1, other = -1;

        OK(cu.cuMemCreate(&handle, granularity, &prop, 0));
        OK(cu.cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
        ck_assert_int_eq(fcntl(fd, F_GETFD), FD_CLOEXEC);
        OK(cu.cuMemExportToShareableHandle(&other, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
        close(other);
        OK(cu.cuMemImportFromShareableHandle(&imported, (void *)(intptr_t)fd,
                                             CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
        IS(CUDA_ERROR_INVALID_VALUE,
           cu.cuMemExportToShareableHandle(&other, imported, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
        close(fd);
        OK(cu.cuMemRelease(imported));
        OK(cu.cuMemRelease(handle));
}

LOOP_TEST(memory_is_freed_with_its_last_reference, machine.has_vmm)
{
        CUmemGenericAllocationHandle imported;
        size_t n_free = gpu_n_free(),
               n_bytes = 32 * MIB + (granularity - 32 * MIB % granularity) % granularity;
        struct gpu_mapping mapping;
        int fd = -1;

        OK(gpu_create_and_map(device, n_bytes, &mapping));
        OK(cu.cuMemExportToShareableHandle(&fd, mapping.handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
        OK(gpu_unmap(&mapping));
        ck_assert_uint_le(gpu_n_free(), n_free - n_bytes); /* the fd has it */
        OK(cu.cuMemImportFromShareableHandle(&imported, (void *)(intptr_t)fd,
                                             CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
        close(fd);
        ck_assert_uint_le(gpu_n_free(), n_free - n_bytes); /* the handle has it */
        OK(cu.cuMemRelease(imported));
        ck_assert_uint_ge(gpu_n_free() + 4 * MIB, n_free);
}

LOOP_TEST(only_exportable_memory_can_be_exported, machine.has_vmm)
{
        CUmemAllocationProp private_prop = prop;
        CUmemGenericAllocationHandle handle;
        int fd = -1;

        private_prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_NONE;
        OK(cu.cuMemCreate(&handle, granularity, &private_prop, 0));
        REFUSED(cu.cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
        OK(cu.cuMemRelease(handle));
        REFUSED(cu.cuMemImportFromShareableHandle(&handle, (void *)0,
                                                  CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
}
