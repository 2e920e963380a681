/* Memory on its own: cuMemCreate, its handles, and the fds that share it.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * What cuMemCreate makes has no address (map.c gives it some) and belongs to no
 * context. It lives while a handle, a mapping or an fd of it lives, in any
 * process: handles keep a page of it mapped, so nothing here owns an fd, and an
 * exported fd is the caller's alone. Each import is a handle of its own, which
 * cannot be exported again. What kind of file a driver's fd is, is undocumented. Here it is a regular one, or, where
 * settings say so, a socket that has it in its queue.
 *
 * Numbers of handles that are gone are used again, the last one first.
 *
 * Invariant: a handle is on the list exactly while n_refs > 0. */
#include "tests/fake_cuda/fake.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define HANDLE_TYPE_FABRIC_SUPPORTED 128 /* CU_DEVICE_ATTRIBUTE_... */
#define LOCALITY_DOMAIN                                                                                      \
        6 /* CU_MEM_LOCATION_TYPE_DEVICE_...: bytes of the device and of its part are the id */

struct handle {
        struct handle *next;
        CUmemGenericAllocationHandle value;
        struct fake_object object;
        CUmemAllocationProp prop;
        unsigned int n_refs;
        bool is_imported;
        void *held; /* a page, which keeps the object alive */
};

static struct handle *handles;
static CUmemGenericAllocationHandle last_value = 0x1000, freed_values[16];
static size_t n_freed;

/* ---- handles ------------------------------------------------------------- */

static struct handle *handle_find(CUmemGenericAllocationHandle value)
{
        for (struct handle *h = handles; h; h = h->next)
                if (h->value == value)
                        return h;
        return NULL;
}

bool fake_handle_object(CUmemGenericAllocationHandle value, struct fake_object *ret)
{
        const struct handle *h = handle_find(value);

        if (h)
                *ret = h->object;
        return h != NULL;
}

/* Closes fd in any case. */
static CUresult handle_add(const struct fake_object *o, const CUmemAllocationProp *prop, int fd,
                           bool is_imported, CUmemGenericAllocationHandle *ret)
{
        struct handle *h = calloc(1, sizeof(*h));

        if (h)
                h->held = fake_object_map(NULL, 4096, PROT_NONE, fd);
        fake_object_close(fd);
        if (!h || !h->held) {
                free(h);
                return CUDA_ERROR_OUT_OF_MEMORY;
        }
        h->object = *o;
        h->prop = *prop;
        h->n_refs = 1;
        h->is_imported = is_imported;
        pthread_rwlock_wrlock(&fake_memory_lock);
        h->value = n_freed > 0 ? freed_values[--n_freed] : (last_value += 0x10);
        h->next = handles;
        handles = h;
        *ret = h->value;
        pthread_rwlock_unlock(&fake_memory_lock);
        return CUDA_SUCCESS;
}

static void handle_free(struct handle *h)
{
        struct handle **at = &handles;

        while (*at != h)
                at = &(*at)->next;
        *at = h->next;
        munmap(h->held, 4096);
        fake_object_drop(&h->object);
        if (n_freed < sizeof(freed_values) / sizeof(freed_values[0]))
                freed_values[n_freed++] = h->value;
        free(h);
}

/* ---- making and sharing -------------------------------------------------- */

/* Fabric handles are known where the settings say so, and no process may make memory with one. */
static bool asks_for_fabric(const struct fake_device *d, const CUmemAllocationProp *prop)
{
        return ((unsigned)prop->requestedHandleTypes & CU_MEM_HANDLE_TYPE_FABRIC) != 0 &&
               fake_device_attribute(d, (CUdevice_attribute)HANDLE_TYPE_FABRIC_SUPPORTED) > 0;
}

static CUresult check_prop(const CUmemAllocationProp *prop, struct fake_device **ret)
{
        struct fake_device *d;
        int types;

        if (!prop || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
            (prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE &&
             (int)prop->location.type != LOCALITY_DOMAIN))
                return CUDA_ERROR_INVALID_VALUE;
        d = fake_device_get(prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE ? prop->location.id
                                                                               : prop->location.id & 0xff);
        if (!d)
                return CUDA_ERROR_INVALID_DEVICE;
        if (fake_device_attribute(d, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) <= 0)
                return CUDA_ERROR_NOT_SUPPORTED;
        types = (int)prop->requestedHandleTypes;
        if (asks_for_fabric(d, prop))
                types &= ~CU_MEM_HANDLE_TYPE_FABRIC;
        switch (types) {
        case CU_MEM_HANDLE_TYPE_NONE:
                break;
        case CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR:
                if (fake_device_attribute(
                            d, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED) > 0)
                        break;
                return CUDA_ERROR_NOT_SUPPORTED;
        default:
                return CUDA_ERROR_NOT_SUPPORTED;
        }
        if (prop->allocFlags.gpuDirectRDMACapable &&
            fake_device_attribute(d, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED) <= 0)
                return CUDA_ERROR_NOT_SUPPORTED;
        *ret = d;
        return fake_device_health(d);
}

API CUresult cuMemGetAllocationGranularity(size_t *ret_n_bytes, const CUmemAllocationProp *prop,
                                           CUmemAllocationGranularity_flags which)
{
        struct fake_device *d;
        CUresult r;

        ENTER(cuMemGetAllocationGranularity);
        if (!ret_n_bytes || (unsigned int)which > CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)
                return CUDA_ERROR_INVALID_VALUE;
        r = check_prop(prop, &d);
        if (r == CUDA_SUCCESS)
                *ret_n_bytes = FAKE_GRANULARITY;
        return r;
}

/* As a device does that is as slow as the settings say. */
static void take_time(uint64_t n_bytes)
{
        uint64_t us = n_bytes / 1024 * fake.ms_per_gib * 1000 / (1024 * 1024);

        if (us > 0)
                usleep((useconds_t)us);
}

/* For a bench: handles of no memory. */
#define INSTANT (UINT64_C(1) << 63)
static uint64_t n_instant; /* atomic */

API CUresult cuMemCreate(CUmemGenericAllocationHandle *ret_handle, size_t n_bytes,
                         const CUmemAllocationProp *prop, unsigned long long flags)
{
        struct fake_device *d;
        struct fake_object o;
        CUresult r;
        int fd;

        ENTER(cuMemCreate);
        if (fake.create_is_instant) {
                *ret_handle = INSTANT | __atomic_add_fetch(&n_instant, 16, __ATOMIC_RELAXED);
                return CUDA_SUCCESS;
        }
        r = check_prop(prop, &d);
        if (r != CUDA_SUCCESS)
                return r;
        if (!ret_handle || flags != 0 || n_bytes == 0 || n_bytes % FAKE_GRANULARITY != 0)
                return CUDA_ERROR_INVALID_VALUE;
        if (asks_for_fabric(d, prop))
                return CUDA_ERROR_NOT_PERMITTED;
        r = fake_object_new(d, 'v', n_bytes, &o, &fd);
        if (r != CUDA_SUCCESS)
                return r;
        take_time(n_bytes);
        r = handle_add(&o, prop, fd, false, ret_handle);
        if (r != CUDA_SUCCESS)
                fake_object_drop(&o);
        return r;
}

API CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
        CUresult r = CUDA_SUCCESS;
        uint64_t n_bytes = 0;
        struct handle *h;

        ENTER(cuMemRelease);
        if (handle >= INSTANT)
                return CUDA_SUCCESS;
        pthread_rwlock_wrlock(&fake_memory_lock);
        h = handle_find(handle);
        if (!h)
                r = CUDA_ERROR_INVALID_VALUE;
        else if (--h->n_refs == 0) {
                n_bytes = h->object.n_bytes;
                handle_free(h);
        }
        pthread_rwlock_unlock(&fake_memory_lock);
        take_time(n_bytes);
        return r;
}

API CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *ret_prop,
                                                    CUmemGenericAllocationHandle handle)
{
        CUresult r = CUDA_SUCCESS;
        struct handle *h;

        ENTER(cuMemGetAllocationPropertiesFromHandle);
        pthread_rwlock_rdlock(&fake_memory_lock);
        h = handle_find(handle);
        if (h && ret_prop)
                *ret_prop = h->prop;
        else
                r = CUDA_ERROR_INVALID_VALUE;
        pthread_rwlock_unlock(&fake_memory_lock);
        return r;
}

/* The fd is close-on-exec. */
API CUresult cuMemExportToShareableHandle(void *ret_os_handle, CUmemGenericAllocationHandle handle,
                                          CUmemAllocationHandleType type, unsigned long long flags)
{
        CUresult r = CUDA_ERROR_INVALID_VALUE;
        struct handle *h;
        int fd;

        ENTER(cuMemExportToShareableHandle);
        if (!ret_os_handle || flags != 0 || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
                return CUDA_ERROR_INVALID_VALUE;
        pthread_rwlock_rdlock(&fake_memory_lock);
        h = handle_find(handle);
        if (h && !h->is_imported && h->prop.requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
                r = fake_object_open(&h->object, &fd);
        pthread_rwlock_unlock(&fake_memory_lock);
        if (r != CUDA_SUCCESS)
                return r;
        fd = fake_fd_wrap(fake_object_take_fd(fd));
        if (fd < 0)
                return CUDA_ERROR_OPERATING_SYSTEM;
        memcpy(ret_os_handle, &fd, sizeof(fd));
        return CUDA_SUCCESS;
}

static CUresult import_object(const struct fake_object *o, int fd, bool is_imported,
                              CUmemGenericAllocationHandle *ret)
{
        CUmemAllocationProp prop = {
                .type = CU_MEM_ALLOCATION_TYPE_PINNED,
                .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                .location.type = CU_MEM_LOCATION_TYPE_DEVICE,
        };
        const struct fake_device *d = fake_device_by_index(o->device);
        CUresult r;

        if (!d) {
                fake_object_close(fd);
                return CUDA_ERROR_INVALID_DEVICE;
        }
        r = fake_device_health(d);
        if (r != CUDA_SUCCESS) {
                fake_object_close(fd);
                return r;
        }
        prop.location.id = fake_device_ordinal(d);
        return handle_add(o, &prop, fd, is_imported, ret);
}

/* The caller keeps its fd. */
API CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *ret_handle, void *os_handle,
                                            CUmemAllocationHandleType type)
{
        int fd = (int)(intptr_t)os_handle;
        struct fake_object o;
        CUresult r;

        ENTER(cuMemImportFromShareableHandle);
        if (!ret_handle || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
                return CUDA_ERROR_INVALID_VALUE;
        fd = fake_fd_unwrap(fd);
        if (fd < 0)
                return errno == EMFILE ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_ERROR_INVALID_VALUE;
        r = fake_object_of_fd(fd, &o);
        if (r == CUDA_SUCCESS && o.kind == 'v')
                return import_object(&o, fd, true, ret_handle);
        close(fd);
        return CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *ret_handle, void *pointer)
{
        const struct fake_range *range;
        struct fake_object o;
        struct handle *h = NULL;
        CUresult r;
        int fd;

        ENTER(cuMemRetainAllocationHandle);
        pthread_rwlock_wrlock(&fake_memory_lock);
        range = ret_handle ? fake_range_find((uintptr_t)pointer, RANGE_MAPPED) : NULL;
        if (range) {
                o = range->object;
                for (h = handles; h && h->object.id != o.id; h = h->next)
                        ;
                if (h) {
                        h->n_refs++;
                        *ret_handle = h->value;
                }
        }
        pthread_rwlock_unlock(&fake_memory_lock);
        if (!range)
                return CUDA_ERROR_INVALID_VALUE;
        if (h)
                return CUDA_SUCCESS;
        r = fake_object_open(&o, &fd); /* all handles were released, the mapping lives */
        return r != CUDA_SUCCESS ? r : import_object(&o, fd, false, ret_handle);
}
