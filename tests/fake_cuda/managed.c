/* Managed memory, which moves between the host and the device.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * It begins on the host and takes nothing of the device. When the device uses a range, all of it moves there, if there
 * is room, and takes its bytes until it is freed or prefetched to the host. Without room it stays on the host, and works
 * all the same: a driver would move other managed memory away.
 *
 * Invariant: a RANGE_MANAGED takes bytes exactly while it is on the device. */
#include "tests/fake_cuda/fake.h"

#include <sys/mman.h>
#include <unistd.h>

#define ATTACH_GLOBAL 1u /* CU_MEM_ATTACH_... */
#define ATTACH_HOST   2u

static unsigned int n_managed; /* what there is of it in the process */

static CUresult alloc(CUcontext c, size_t n_bytes, CUdeviceptr *ret)
{
        size_t n_mapped = fake_round_up(n_bytes);
        uintptr_t at = n_mapped < n_bytes ? 0 : fake_address_take(n_mapped, FAKE_GRANULARITY);
        struct fake_range *r;
        bool is_mapped;
        int fd;

        if (at == 0)
                return CUDA_ERROR_OUT_OF_MEMORY;
        fd = memfd_create("fake-managed", MFD_CLOEXEC);
        is_mapped = fd >= 0 && ftruncate(fd, (off_t)n_mapped) == 0 &&
                    fake_address_map(at, n_mapped, fd, PROT_READ | PROT_WRITE);
        if (fd >= 0)
                close(fd);
        if (!is_mapped) {
                fake_address_give_back(at, n_mapped);
                return CUDA_ERROR_OUT_OF_MEMORY;
        }
        pthread_rwlock_wrlock(&fake_memory_lock);
        r = fake_range_add(RANGE_MANAGED, at, n_bytes, n_mapped);
        r->device = c->device;
        r->context = c;
        __atomic_store_n(&n_managed, 1, __ATOMIC_RELAXED);
        pthread_rwlock_unlock(&fake_memory_lock);
        *ret = at;
        return CUDA_SUCCESS;
}

CUresult cuMemAllocManaged(CUdeviceptr *ret_pointer, size_t n_bytes, unsigned int flags);

API CUresult cuMemAllocManaged(CUdeviceptr *ret_pointer, size_t n_bytes, unsigned int flags)
{
        CUcontext c;
        CUresult r;

        ENTER(cuMemAlloc_v2);
        r = fake_context(&c);
        if (r != CUDA_SUCCESS)
                return r;
        if (!ret_pointer || n_bytes == 0 || (flags != ATTACH_GLOBAL && flags != ATTACH_HOST))
                return CUDA_ERROR_INVALID_VALUE;
        r = fake_capture_allows_unsafe();
        return r != CUDA_SUCCESS ? r : alloc(c, n_bytes, ret_pointer);
}

/* All ranges that any of it is in. False: some of it is not managed memory. */
static bool move(uintptr_t at, size_t n_bytes, bool to_device)
{
        struct fake_range *r;

        for (uintptr_t end = at + n_bytes; at < end; at = r->at + r->n_mapped) {
                r = fake_range_find(at, RANGE_MANAGED);
                if (!r)
                        return false;
                if (!to_device)
                        fake_bytes_give_back(&r->on_device);
                else if (!r->on_device.held)
                        (void)fake_bytes_take(r->device, r->n_mapped, &r->on_device);
        }
        return true;
}

/* Costs nothing in a process that has none. */
void fake_managed_use(uintptr_t at, size_t n_bytes)
{
        if (at == 0 || __atomic_load_n(&n_managed, __ATOMIC_RELAXED) == 0)
                return;
        pthread_rwlock_wrlock(&fake_memory_lock);
        (void)move(at, n_bytes, true);
        pthread_rwlock_unlock(&fake_memory_lock);
}

#ifndef BFC_CUDA_REAL_HEADER /* some have another one by this name */

CUresult cuMemPrefetchAsync(CUdeviceptr pointer, size_t n_bytes, CUdevice device, CUstream stream);

/* At once. Device -1: the host. */
API CUresult cuMemPrefetchAsync(CUdeviceptr pointer, size_t n_bytes, CUdevice device, CUstream stream)
{
        bool is_managed;
        CUcontext c;
        CUresult r;

        ENTER(cuMemsetD8Async);
        (void)stream;
        r = fake_context(&c);
        if (r != CUDA_SUCCESS)
                return r;
        if (n_bytes == 0 || (device != -1 && !fake_device_get(device)))
                return n_bytes == 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_DEVICE;
        pthread_rwlock_wrlock(&fake_memory_lock);
        is_managed = move(pointer, n_bytes, device != -1);
        pthread_rwlock_unlock(&fake_memory_lock);
        return is_managed ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

#endif
