/* Addresses, what is mapped there, and who may touch it.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * cuMemAddressReserve takes addresses, cuMemMap puts memory there, and
 * cuMemSetAccess lets a device touch it: before that a copy is refused, and the
 * host's hand burnt (SIGSEGV). A mapping is of a whole handle, from offset 0,
 * and is undone as a whole.
 *
 * Invariant: every RANGE_MAPPED lies in one RANGE_RESERVED; addresses of a
 * reservation that are not mapped are PROT_NONE and nobody else's. */
#include "tests/fake_cuda/fake.h"

#include <sys/mman.h>
#include <unistd.h>

/* ---- addresses ----------------------------------------------------------- */

API CUresult cuMemAddressReserve(CUdeviceptr *ret_pointer, size_t n_bytes, size_t alignment, CUdeviceptr hint,
                                 unsigned long long flags)
{
        uintptr_t at;

        ENTER(cuMemAddressReserve);
        if (!ret_pointer || flags != 0 || n_bytes == 0 || n_bytes % FAKE_GRANULARITY != 0 ||
            (alignment & (alignment - 1)) != 0)
                return CUDA_ERROR_INVALID_VALUE;
        if (alignment < FAKE_GRANULARITY)
                alignment = FAKE_GRANULARITY;
        if (hint != 0 && hint % alignment == 0 && fake_address_take_at(hint, n_bytes))
                at = hint;
        else
                at = fake_address_take(n_bytes, alignment);
        if (at == 0)
                return CUDA_ERROR_OUT_OF_MEMORY;
        pthread_rwlock_wrlock(&fake_memory_lock);
        fake_range_add(RANGE_RESERVED, at, n_bytes, n_bytes);
        pthread_rwlock_unlock(&fake_memory_lock);
        *ret_pointer = at;
        return CUDA_SUCCESS;
}

static bool overlaps_mapped(uintptr_t at, size_t n_bytes)
{
        for (const struct fake_range *r = fake_ranges; r; r = r->next)
                if (r->kind == RANGE_MAPPED && r->at < at + n_bytes && at < r->at + r->n_bytes)
                        return true;
        return false;
}

API CUresult cuMemAddressFree(CUdeviceptr pointer, size_t n_bytes)
{
        CUresult r = CUDA_SUCCESS;
        struct fake_range *range;

        ENTER(cuMemAddressFree);
        pthread_rwlock_wrlock(&fake_memory_lock);
        range = fake_range_find(pointer, RANGE_RESERVED);
        if (range && range->at == pointer && range->n_bytes == n_bytes && !overlaps_mapped(pointer, n_bytes))
                fake_range_destroy(range);
        else
                r = CUDA_ERROR_INVALID_VALUE;
        pthread_rwlock_unlock(&fake_memory_lock);
        return r;
}

/* ---- mapping and access --------------------------------------------------- */

static CUresult map_locked(uintptr_t at, size_t n_bytes, CUmemGenericAllocationHandle handle)
{
        const struct fake_range *reserved = fake_range_find(at, RANGE_RESERVED);
        struct fake_object o;
        struct fake_range *r;
        CUresult result;
        int fd;

        if (!fake_handle_object(handle, &o) || at % FAKE_GRANULARITY != 0)
                return CUDA_ERROR_INVALID_VALUE;
        if (o.n_bytes != n_bytes)
                return CUDA_ERROR_NOT_SUPPORTED;
        if (!reserved || n_bytes > reserved->n_bytes - (at - reserved->at) || overlaps_mapped(at, n_bytes))
                return CUDA_ERROR_INVALID_VALUE;
        result = fake_object_open(&o, &fd);
        if (result != CUDA_SUCCESS)
                return result;
        if (!fake_address_map(at, n_bytes, fd, PROT_NONE)) {
                fake_object_close(fd);
                return CUDA_ERROR_OUT_OF_MEMORY;
        }
        fake_object_close(fd);
        r = fake_range_add(RANGE_MAPPED, at, n_bytes, n_bytes);
        r->device = fake_device_by_index(o.device);
        r->object = o;
        return CUDA_SUCCESS;
}

API CUresult cuMemMap(CUdeviceptr pointer, size_t n_bytes, size_t offset, CUmemGenericAllocationHandle handle,
                      unsigned long long flags)
{
        CUresult r;

        ENTER(cuMemMap);
        if (flags != 0 || n_bytes == 0)
                return CUDA_ERROR_INVALID_VALUE;
        if (offset != 0)
                return CUDA_ERROR_NOT_SUPPORTED;
        pthread_rwlock_wrlock(&fake_memory_lock);
        r = map_locked(pointer, n_bytes, handle);
        pthread_rwlock_unlock(&fake_memory_lock);
        return r;
}

/* Reserved addresses where nothing is mapped? */
static bool is_unmapped(uintptr_t at, size_t n_bytes)
{
        const struct fake_range *reserved = fake_range_find(at, RANGE_RESERVED);

        return reserved && n_bytes <= reserved->n_bytes - (at - reserved->at) &&
               !overlaps_mapped(at, n_bytes);
}

/* Whole mappings, side by side, and nothing else? */
static bool is_whole_mappings(uintptr_t at, size_t n_bytes)
{
        while (n_bytes > 0) {
                const struct fake_range *r = fake_range_find(at, RANGE_MAPPED);

                if (!r || r->at != at || r->n_bytes > n_bytes)
                        return false;
                at += r->n_bytes;
                n_bytes -= r->n_bytes;
        }
        return true;
}

static CUresult unmap_one(uintptr_t at, size_t *ret_n_bytes)
{
        struct fake_range *r = fake_range_find(at, RANGE_MAPPED);
        struct fake_object o = r->object;

        *ret_n_bytes = r->n_bytes;
        if (!fake_address_blank(at, r->n_bytes))
                return CUDA_ERROR_UNMAP_FAILED;
        fake_range_remove(r);
        fake_object_drop(&o);
        return CUDA_SUCCESS;
}

/* Does not wait for work that still uses it: that work ends the context (700). Needs no context, but one that
 * is broken answers as it does to everything. */
API CUresult cuMemUnmap(CUdeviceptr pointer, size_t n_bytes)
{
        CUcontext c = fake_context_current();
        CUresult r;

        ENTER(cuMemUnmap);
        r = c ? __atomic_load_n(&c->sticky, __ATOMIC_RELAXED) : CUDA_SUCCESS;
        if (r != CUDA_SUCCESS)
                return r;
        pthread_rwlock_wrlock(&fake_memory_lock);
        if (n_bytes > 0 && is_unmapped(pointer, n_bytes)) /* a driver does nothing then */
                n_bytes = 0;
        else if (n_bytes == 0 || !is_whole_mappings(pointer, n_bytes))
                r = CUDA_ERROR_INVALID_VALUE;
        while (r == CUDA_SUCCESS && n_bytes > 0) {
                size_t n;

                r = unmap_one(pointer, &n);
                pointer += n;
                n_bytes -= n;
        }
        pthread_rwlock_unlock(&fake_memory_lock);
        return r;
}

static CUresult check_access(const CUmemAccessDesc *desc, size_t n_desc)
{
        for (size_t i = 0; i < n_desc; i++) {
                if (desc[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE)
                        return CUDA_ERROR_INVALID_VALUE;
                if (!fake_device_get(desc[i].location.id))
                        return CUDA_ERROR_INVALID_DEVICE;
                if (desc[i].flags != CU_MEM_ACCESS_FLAGS_PROT_NONE &&
                    desc[i].flags != CU_MEM_ACCESS_FLAGS_PROT_READ &&
                    desc[i].flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
                        return CUDA_ERROR_INVALID_VALUE;
        }
        return CUDA_SUCCESS;
}

/* The host's page tables know one access: the widest that any device has. */
static void set_access_of(struct fake_range *r, const CUmemAccessDesc *desc, size_t n_desc)
{
        for (size_t i = 0; i < n_desc; i++)
                r->access_of[fake_device_get(desc[i].location.id)->index] = desc[i].flags;
        r->access = CU_MEM_ACCESS_FLAGS_PROT_NONE;
        for (size_t i = 0; i < FAKE_MAX_DEVICES; i++)
                if (r->access_of[i] > r->access)
                        r->access = r->access_of[i];
        mprotect((void *)r->at, r->n_bytes,
                 r->access == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? PROT_READ | PROT_WRITE
                 : r->access == CU_MEM_ACCESS_FLAGS_PROT_READ    ? PROT_READ
                                                                 : PROT_NONE);
}

static void set_access(uintptr_t at, size_t n_bytes, const CUmemAccessDesc *desc, size_t n_desc)
{
        while (n_bytes > 0) {
                struct fake_range *r = fake_range_find(at, RANGE_MAPPED);

                set_access_of(r, desc, n_desc);
                at += r->n_bytes;
                n_bytes -= r->n_bytes;
        }
}

API CUresult cuMemSetAccess(CUdeviceptr pointer, size_t n_bytes, const CUmemAccessDesc *desc, size_t n_desc)
{
        CUresult r;

        ENTER(cuMemSetAccess);
        if (!desc || n_desc == 0 || n_bytes == 0)
                return CUDA_ERROR_INVALID_VALUE;
        r = check_access(desc, n_desc);
        if (r != CUDA_SUCCESS)
                return r;
        pthread_rwlock_wrlock(&fake_memory_lock);
        if (is_whole_mappings(pointer, n_bytes))
                set_access(pointer, n_bytes, desc, n_desc);
        else
                r = CUDA_ERROR_INVALID_VALUE;
        pthread_rwlock_unlock(&fake_memory_lock);
        return r;
}

API CUresult cuMemGetAccess(unsigned long long *ret_flags, const CUmemLocation *location, CUdeviceptr pointer)
{
        const struct fake_range *range;
        CUresult r = CUDA_SUCCESS;

        ENTER(cuMemGetAccess);
        if (!ret_flags || !location || location->type != CU_MEM_LOCATION_TYPE_DEVICE)
                return CUDA_ERROR_INVALID_VALUE;
        if (!fake_device_get(location->id))
                return CUDA_ERROR_INVALID_DEVICE;
        pthread_rwlock_rdlock(&fake_memory_lock);
        range = fake_range_find(pointer, RANGE_MAPPED);
        if (range)
                *ret_flags = range->access_of[fake_device_get(location->id)->index];
        else
                r = CUDA_ERROR_INVALID_VALUE;
        pthread_rwlock_unlock(&fake_memory_lock);
        return r;
}
