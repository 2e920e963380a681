/* Experiments: cuMemCreate and fds.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/experiments.h"

#include <unistd.h>

#define SIZE   (8 * MIB)
#define NOBODY ((uid_t)65534)

static void need_vmm(void)
{
        if (!gpu_attribute(0, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED))
                skip("the device shares no memory by fd");
}

static int export_here(unsigned char value, struct gpu_mapping *ret)
{
        int fd = -1;

        if (gpu_create_and_map(0, SIZE, ret) != CUDA_SUCCESS ||
            cu.cuMemsetD8_v2(ret->at, value, SIZE) != CUDA_SUCCESS ||
            cu.cuMemExportToShareableHandle(&fd, ret->handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) !=
                    CUDA_SUCCESS)
                skip("cannot export");
        return fd;
}

static void import_by(uid_t uid, unsigned int flags)
{
        struct peer p = start_peer(uid, flags);
        struct peer_message m = { .op = PEER_IMPORT, .a = SIZE };
        struct gpu_mapping mapping;
        int fd;

        start_here();
        need_vmm();
        fd = export_here(0x41, &mapping);
        say_error("import", peer_call(&p, &m, fd, NULL));
        if (m.result == CUDA_SUCCESS) {
                m = (struct peer_message){ .op = PEER_COUNT, .a = m.b, .b = 0x41, .c = SIZE };
                ask(&p, &m);
                say_flag("same_bytes", m.a == 0);
        }
        peer_end(&p);
}

static void other_user(void)
{
        import_by(NOBODY, 0);
}

static void other_pid_namespace(void)
{
        import_by((uid_t)-1, PEER_NEW_PID_NAMESPACE);
}

static void other_net_namespace(void)
{
        import_by((uid_t)-1, PEER_NEW_NET_NAMESPACE);
}

/* An fd of a process that is gone, held by one that does nothing with it for a
 * second: as a service manager's store would. */
static void fd_after_exit(void)
{
        struct peer p = start_peer((uid_t)-1, 0), next;
        struct peer_message m = { .op = PEER_CREATE, .a = SIZE };
        int fd = -1;

        if (ask(&p, &m) != CUDA_SUCCESS)
                skip("the peer cannot create");
        m.op = PEER_EXPORT;
        say_error("export", peer_call(&p, &m, -1, &fd));
        m = (struct peer_message){ .op = PEER_FILL, .a = m.b, .b = 0x42, .c = SIZE };
        ask(&p, &m);
        peer_end(&p);
        sleep(is_quick ? 0 : 1);
        next = start_peer((uid_t)-1, 0); /* no process here has a context meanwhile */
        m = (struct peer_message){ .op = PEER_IMPORT, .a = SIZE };
        say_error("import", peer_call(&next, &m, fd, NULL));
        if (m.result == CUDA_SUCCESS) {
                m = (struct peer_message){ .op = PEER_COUNT, .a = m.b, .b = 0x42, .c = SIZE };
                ask(&next, &m);
                say_flag("same_bytes", m.a == 0);
        }
        peer_end(&next);
        close(fd);
}

static void without_context(void)
{
        CUmemAllocationProp prop = gpu_prop(0);
        CUmemGenericAllocationHandle handle;
        struct gpu_mapping mapping;
        CUresult r;
        int fd = -1;

        start_here();
        need_vmm();
        cu.cuCtxSetCurrent(NULL);
        cu.cuDevicePrimaryCtxRelease_v2(0);
        say_error("create", r = cu.cuMemCreate(&handle, SIZE, &prop, 0));
        if (r != CUDA_SUCCESS)
                return;
        say_error("export",
                  cu.cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
        say_error("map_and_access", gpu_map(0, handle, SIZE, &mapping));
}

/* Documented: offset 0 only. And less than the whole? */
static void partial_maps(void)
{
        CUmemAllocationProp prop = gpu_prop(0);
        CUmemGenericAllocationHandle handle;
        CUdeviceptr at = 0;

        start_here();
        need_vmm();
        cu.cuMemCreate(&handle, SIZE, &prop, 0);
        cu.cuMemAddressReserve(&at, 4 * SIZE, 0, 0, 0);
        say_error("half", cu.cuMemMap(at, SIZE / 2, 0, handle, 0));
        say_error("second_half", cu.cuMemMap(at + SIZE, SIZE / 2, SIZE / 2, handle, 0));
        say_error("whole", cu.cuMemMap(at + 2 * SIZE, SIZE, 0, handle, 0));
        say_error("whole_again_elsewhere", cu.cuMemMap(at + 3 * SIZE, SIZE, 0, handle, 0));
}

static void granularities(void)
{
        CUmemAllocationProp prop = gpu_prop(0);
        size_t minimum = 0, recommended = 0, rdma = 0;

        start_here();
        need_vmm();
        cu.cuMemGetAllocationGranularity(&minimum, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
        cu.cuMemGetAllocationGranularity(&recommended, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
        say_number("minimum", (double)minimum);
        say_number("recommended", (double)recommended);
        say_number("rdma_with_vmm",
                   gpu_attribute(0, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED));
        prop.allocFlags.gpuDirectRDMACapable = 1;
        say_error("granularity_with_rdma",
                  cu.cuMemGetAllocationGranularity(&rdma, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
        say_number("minimum_with_rdma", (double)rdma);
}

/* A block may span two extents: what do other libraries learn about its addresses? */
static void two_extents(void)
{
        const size_t n_range = 4 * SIZE;
        CUmemAccessDesc access = { .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 },
                                   .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
        CUmemAllocationProp prop = gpu_prop(0);
        CUmemGenericAllocationHandle handles[2];
        CUdeviceptr at, base = 0;
        CUipcMemHandle handle;
        size_t n = 0;

        start_here();
        need_vmm();
        if (cu.cuMemAddressReserve(&at, n_range, 0, 0, 0) != CUDA_SUCCESS)
                skip("cannot reserve");
        for (size_t i = 0; i < 2; i++)
                if (cu.cuMemCreate(&handles[i], SIZE, &prop, 0) != CUDA_SUCCESS ||
                    cu.cuMemMap(at + i * SIZE, SIZE, 0, handles[i], 0) != CUDA_SUCCESS ||
                    cu.cuMemSetAccess(at + i * SIZE, SIZE, &access, 1) != CUDA_SUCCESS)
                        skip("cannot map");
        say_error("address_range", cu.cuMemGetAddressRange_v2(&base, &n, at + SIZE + MIB));
        say_number("base_minus_range", (double)(int64_t)(base - at));
        say_number("bytes", (double)n);
        say_error("ipc_handle", cu.cuIpcGetMemHandle(&handle, at));
        say_error("fill_over_both", cu.cuMemsetD8_v2(at + SIZE - MIB, 1, 2 * MIB));
        say_error("context", cu.cuCtxSynchronize());
        /* A driver may refuse this, or break the context: so it is last. */
        say_error("fill_reserved_only", cu.cuMemsetD8_v2(at + 2 * SIZE + MIB, 0, 16));
        say_error("context_then", cu.cuCtxSynchronize());
}

const struct experiment vmm_experiments[] = {
        { "vmm-other-user", "does an fd import under another uid", other_user },
        { "vmm-pid-namespace", "does an fd import in another PID namespace", other_pid_namespace },
        { "vmm-net-namespace", "does an fd import in another network namespace", other_net_namespace },
        { "vmm-fd-after-exit", "does an fd keep the bytes of a process that ended", fd_after_exit },
        { "vmm-without-context", "what works without a context", without_context },
        { "vmm-partial-maps", "must a mapping be of the whole handle", partial_maps },
        { "vmm-two-extents", "what a range over two handles is to the driver", two_extents },
        { "vmm-granularity", "what sizes are allowed", granularities },
        { NULL, NULL, NULL },
};
