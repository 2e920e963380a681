/* The table of this process's address ranges, and cuMemAlloc with its like.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A device pointer is an address that the host can use as well, which no real
 * one is: tests may look at memory directly, and a stray pointer crashes where
 * it is used. Every range is a shared mapping of an object's file, and keeps
 * the object alive by that alone: there are no fds to leak. A fork()ed child
 * gets none of them. Bytes are charged in multiples of 2 MiB, as a driver takes
 * them; that small allocations share such a piece is not modelled.
 *
 * Invariant: ranges with memory do not overlap one another. */
#include "tests/fake_cuda/fake.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

pthread_rwlock_t fake_memory_lock = PTHREAD_RWLOCK_INITIALIZER;
struct fake_range *fake_ranges;

/* ---- the table ----------------------------------------------------------- */

size_t fake_round_up(size_t n_bytes)
{
        return (n_bytes + FAKE_GRANULARITY - 1) & ~(FAKE_GRANULARITY - 1);
}

struct fake_range *fake_range_find(uintptr_t at, unsigned int kinds)
{
        for (struct fake_range *r = fake_ranges; r; r = r->next)
                if ((r->kind & kinds) && at >= r->at && at - r->at < r->n_bytes)
                        return r;
        return NULL;
}

struct fake_range *fake_range_add(enum fake_range_kind kind, uintptr_t at, size_t n_bytes, size_t n_mapped)
{
        struct fake_range *r = calloc(1, sizeof(*r));

        if (!r)
                fake_die("out of memory");
        r->kind = kind;
        r->at = at;
        r->n_bytes = n_bytes;
        r->n_mapped = n_mapped;
        r->n_refs = 1;
        r->access = kind & (RANGE_RESERVED | RANGE_MAPPED) ? CU_MEM_ACCESS_FLAGS_PROT_NONE
                                                           : CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        r->next = fake_ranges;
        fake_ranges = r;
        return r;
}

void fake_range_remove(struct fake_range *r)
{
        struct fake_range **at = &fake_ranges;

        while (*at != r)
                at = &(*at)->next;
        *at = r->next;
        free(r);
}

void fake_range_destroy(struct fake_range *r)
{
        if (r->kind == RANGE_ALLOC) /* while it is mapped: else another process may take it away before */
                fake_object_disown(&r->object);
        fake_address_give_back(r->at, r->n_mapped);
        if (r->kind == RANGE_MANAGED)
                fake_bytes_give_back(&r->on_device);
        else if (r->kind & RANGE_MEMORY)
                fake_object_drop(&r->object);
        fake_range_remove(r);
}

void fake_ranges_destroy_of(CUcontext c)
{
        struct fake_range *next;

        for (struct fake_range *r = fake_ranges; r; r = next) {
                next = r->next;
                if (r->context == c && (r->kind & (RANGE_ALLOC | RANGE_IPC | RANGE_MANAGED | RANGE_POOL)))
                        fake_range_destroy(r);
        }
}

/* May a device touch all of it? Neighbours that are mapped count as one. */
bool fake_range_allows(uintptr_t at, size_t n_bytes, bool to_write)
{
        while (n_bytes > 0) {
                const struct fake_range *r = fake_range_find(at, RANGE_MEMORY);
                size_t n;

                if (!r || r->access == CU_MEM_ACCESS_FLAGS_PROT_NONE)
                        return false;
                if (to_write && r->access != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
                        return false;
                n = r->n_bytes - (at - r->at);
                if (n >= n_bytes)
                        return true;
                at += n;
                n_bytes -= n;
        }
        return true;
}

/* ---- allocations --------------------------------------------------------- */

CUresult fake_alloc(CUcontext c, enum fake_range_kind kind, size_t n_bytes, CUdeviceptr *ret)
{
        size_t n_mapped = fake_round_up(n_bytes);
        struct fake_object o;
        struct fake_range *r;
        CUresult result;
        uintptr_t at;
        int fd;

        if (n_mapped < n_bytes)
                return CUDA_ERROR_OUT_OF_MEMORY;
        result = fake_object_new(c->device, 'a', n_mapped, &o, &fd);
        if (result != CUDA_SUCCESS)
                return result;
        at = fake_address_take(n_mapped, FAKE_GRANULARITY);
        if (at == 0 || !fake_address_map(at, n_mapped, fd, PROT_READ | PROT_WRITE)) {
                if (at)
                        fake_address_give_back(at, n_mapped);
                fake_object_close(fd);
                fake_object_drop(&o);
                return CUDA_ERROR_OUT_OF_MEMORY;
        }
        fake_object_close(fd);
        pthread_rwlock_wrlock(&fake_memory_lock);
        r = fake_range_add(kind, at, n_bytes, n_mapped);
        r->device = c->device;
        r->context = c;
        r->object = o;
        pthread_rwlock_unlock(&fake_memory_lock);
        *ret = at;
        return CUDA_SUCCESS;
}

API CUresult cuMemAlloc_v2(CUdeviceptr *ret_pointer, size_t n_bytes)
{
        CUcontext c;
        CUresult r;

        ENTER(cuMemAlloc_v2);
        r = fake_context(&c);
        if (r != CUDA_SUCCESS)
                return r;
        if (!ret_pointer || n_bytes == 0)
                return CUDA_ERROR_INVALID_VALUE;
        r = fake_capture_allows_unsafe();
        return r != CUDA_SUCCESS ? r : fake_alloc(c, RANGE_ALLOC, n_bytes, ret_pointer);
}

#define PITCH_BYTES ((size_t)512)

CUresult cuMemAllocPitch_v2(CUdeviceptr *ret_pointer, size_t *ret_pitch, size_t n_width, size_t n_height,
                            unsigned int n_element);

API CUresult cuMemAllocPitch_v2(CUdeviceptr *ret_pointer, size_t *ret_pitch, size_t n_width, size_t n_height,
                                unsigned int n_element)
{
        size_t n_pitch, n_bytes;
        CUresult r;

        if (!ret_pitch || n_width == 0 || n_height == 0 ||
            (n_element != 4 && n_element != 8 && n_element != 16))
                return CUDA_ERROR_INVALID_VALUE;
        n_pitch = (n_width + PITCH_BYTES - 1) & ~(PITCH_BYTES - 1);
        if (n_pitch < n_width || __builtin_mul_overflow(n_pitch, n_height, &n_bytes))
                return CUDA_ERROR_OUT_OF_MEMORY;
        r = cuMemAlloc_v2(ret_pointer, n_bytes);
        if (r == CUDA_SUCCESS)
                *ret_pitch = n_pitch;
        return r;
}

/* Waits for all work of the context first: a free never pulls memory away from
 * under a copy that was begun. */
API CUresult cuMemFree_v2(CUdeviceptr pointer)
{
        struct fake_range *range;
        CUcontext c;
        CUresult r;

        ENTER(cuMemFree_v2);
        r = fake_context(&c);
        if (r != CUDA_SUCCESS)
                return r;
        if (pointer == 0)
                return CUDA_SUCCESS;
        r = fake_capture_allows_unsafe();
        if (r != CUDA_SUCCESS)
                return r;
        r = fake_streams_wait(c);
        if (r != CUDA_SUCCESS)
                return r;
        pthread_rwlock_wrlock(&fake_memory_lock);
        range = fake_range_find(pointer, RANGE_ALLOC | RANGE_MANAGED | RANGE_POOL | RANGE_GRAPH);
        if (range && !(range->kind & (RANGE_POOL | RANGE_GRAPH)) && range->at == pointer)
                fake_range_destroy(range);
        else if (!range ||
                 !(range->kind == RANGE_GRAPH ? fake_graph_free(pointer)
                                              : range->kind == RANGE_POOL && fake_pool_free(pointer)))
                r = CUDA_ERROR_INVALID_VALUE;
        pthread_rwlock_unlock(&fake_memory_lock);
        return r;
}

API CUresult cuMemGetInfo_v2(size_t *ret_n_free, size_t *ret_n_total)
{
        uint64_t n_used;
        CUcontext c;
        CUresult r;

        ENTER(cuMemGetInfo_v2);
        r = fake_context(&c);
        if (r != CUDA_SUCCESS)
                return r;
        if (!ret_n_free || !ret_n_total)
                return CUDA_ERROR_INVALID_VALUE;
        n_used = fake_in_use(c->device->index) + fake_not_shown(c->device->index) + fake_foreign();
        *ret_n_free = n_used < c->device->n_bytes ? c->device->n_bytes - n_used : 0;
        *ret_n_total = c->device->n_bytes;
        return CUDA_SUCCESS;
}

/* NULL: no memory. Else the range, and what was allocated there. */
static const struct fake_range *find_memory(CUdeviceptr pointer, CUdeviceptr *ret_base, size_t *ret_n_bytes)
{
        const struct fake_range *range = fake_range_find(pointer, RANGE_MEMORY);

        if (!range || (range->kind == RANGE_POOL && !fake_pool_find(pointer, ret_base, ret_n_bytes)))
                return NULL;
        if (range->kind != RANGE_POOL) {
                *ret_base = range->at;
                *ret_n_bytes = range->n_bytes;
        }
        return range;
}

API CUresult cuMemGetAddressRange_v2(CUdeviceptr *ret_base, size_t *ret_n_bytes, CUdeviceptr pointer)
{
        CUdeviceptr base;
        size_t n_bytes;
        CUcontext c;
        CUresult r;

        ENTER(cuMemGetAddressRange_v2);
        r = fake_context(&c);
        if (r != CUDA_SUCCESS)
                return r;
        pthread_rwlock_rdlock(&fake_memory_lock);
        if (!find_memory(pointer, &base, &n_bytes)) {
                r = CUDA_ERROR_NOT_FOUND;
        } else {
                if (ret_base)
                        *ret_base = base;
                if (ret_n_bytes)
                        *ret_n_bytes = n_bytes;
        }
        pthread_rwlock_unlock(&fake_memory_lock);
        return r;
}

static CUresult pointer_attribute(CUpointer_attribute which, CUdeviceptr pointer, void *ret)
{
        CUdeviceptr base;
        size_t n_bytes;
        const struct fake_range *range = find_memory(pointer, &base, &n_bytes);

        if (!range)
                return CUDA_ERROR_INVALID_VALUE;
        switch (which) {
        case CU_POINTER_ATTRIBUTE_CONTEXT:
                *(CUcontext *)ret = range->context;
                return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
                *(unsigned int *)ret = CU_MEMORYTYPE_DEVICE;
                return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
                *(CUdeviceptr *)ret = pointer;
                return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
                *(int *)ret = fake_device_ordinal(range->device);
                return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
                *(bool *)ret = range->kind == RANGE_ALLOC;
                return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
                *(CUdeviceptr *)ret = base;
                return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
                *(size_t *)ret = n_bytes;
                return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_IS_MANAGED:
                *(bool *)ret = range->kind == RANGE_MANAGED;
                return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_MAPPED:
                *(bool *)ret = true;
                return CUDA_SUCCESS;
        default:
                return CUDA_ERROR_NOT_SUPPORTED;
        }
}

API CUresult cuPointerGetAttribute(void *ret_value, CUpointer_attribute which, CUdeviceptr pointer)
{
        CUcontext c;
        CUresult r;

        ENTER(cuPointerGetAttribute);
        r = fake_context(&c);
        if (r != CUDA_SUCCESS)
                return r;
        if (!ret_value)
                return CUDA_ERROR_INVALID_VALUE;
        pthread_rwlock_rdlock(&fake_memory_lock);
        r = pointer_attribute(which, pointer, ret_value);
        pthread_rwlock_unlock(&fake_memory_lock);
        return r;
}
