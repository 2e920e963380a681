/* cuMemCreate() by bfcd; see lent.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The library has the extent mapped. Memory has one reference to the driver's handle, beside those of the program, so
 * that the driver uses its number for nothing else. Once it has slept the program's references are counted in outside.c only.
 * The block is in use (bfc_use_begin()) unless the memory sleeps, so nothing else parks it.
 *
 * Invariant: memory is on one of the lists, and its GPU has a client while it has a block. The names of all are different. */
#include "integrations/preload/lent.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>

#include "integrations/preload/charge.h"
#include "integrations/preload/charged_context.h"
#include "integrations/preload/outside.h"

#define MIN_BYTES  ((size_t)32 << 20) /* the library gives no smaller block an extent of its own */
#define UNIT_BYTES ((size_t)2 << 20)  /* extents are multiples of it */

struct lent {
        LIST_ENTRY(lent) link;
        CUmemGenericAllocationHandle name;   /* the program's number; a released one is the driver's */
        CUmemGenericAllocationHandle handle; /* the driver's number; 0: it sleeps */
        struct gpu *gpu;
        void *block; /* NULL: it ended with its client */
        size_t n_bytes;
        bool has_fd;     /* it can be exported */
        bool is_shared;  /* others may have it: it was exported, or a NIC may use it */
        bool is_counted; /* see lent_is_counted() */
        bool is_listed;  /* it was there before its uses were begun by the tag */
};

static LIST_HEAD(lent_list, lent) all_lent = LIST_HEAD_INITIALIZER(all_lent);
static struct lent_list all_left = LIST_HEAD_INITIALIZER(all_left); /* whose block could not be freed */
static size_t n_counted; /* atomic; 0: all names are the driver's numbers */
static size_t n_asleep;  /* atomic */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void in_child(void)
{
        lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
        LIST_INIT(&all_lent);
        LIST_INIT(&all_left);
        n_counted = n_asleep = 0;
}

static void __attribute__((constructor)) watch_forks(void)
{
        pthread_atfork(NULL, NULL, in_child);
}

/* ---- ending ----------------------------------------------------------------------- */

/* Without a wait, as the driver's: the program has no mapping, so no work uses it. False: the library could not free it. */
static bool free_block(struct lent *l)
{
        int r = l->block ? bfc_free_unused(l->gpu->client, l->block) : 0;

        if (r < 0 && r != -EINVAL)
                return false;
        free(l);
        return true;
}

static void free_or_leave(struct lent *l)
{
        if (free_block(l))
                return;
        pthread_mutex_lock(&lock);
        LIST_INSERT_HEAD(&all_left, l, link);
        pthread_mutex_unlock(&lock);
}

/* Tries again. */
static void free_left(void)
{
        struct lent_list left = LIST_HEAD_INITIALIZER(left);
        struct lent *l;

        pthread_mutex_lock(&lock);
        while ((l = LIST_FIRST(&all_left))) {
                LIST_REMOVE(l, link);
                LIST_INSERT_HEAD(&left, l, link);
        }
        pthread_mutex_unlock(&lock);
        while ((l = LIST_FIRST(&left))) {
                LIST_REMOVE(l, link);
                free_or_leave(l);
        }
}

static void note_counted(struct lent *l)
{
        if (!l->is_counted)
                __atomic_add_fetch(&n_counted, 1, __ATOMIC_RELEASE);
        l->is_counted = true;
}

void lent_end(struct lent *l)
{
        pthread_mutex_lock(&lock);
        LIST_REMOVE(l, link);
        if (l->is_counted)
                __atomic_sub_fetch(&n_counted, 1, __ATOMIC_RELEASE);
        if (l->handle == 0)
                __atomic_sub_fetch(&n_asleep, 1, __ATOMIC_RELEASE);
        pthread_mutex_unlock(&lock);
        if (l->handle != 0)
                real_cuMemRelease(l->handle);
        free_left();
        free_or_leave(l);
}

void lent_forget(const struct gpu *gpu)
{
        struct lent *l;

        pthread_mutex_lock(&lock);
        LIST_FOREACH(l, &all_lent, link)
        {
                if (l->gpu == gpu)
                        l->block = NULL;
        }
        LIST_FOREACH(l, &all_left, link)
        {
                if (l->gpu == gpu)
                        l->block = NULL;
        }
        pthread_mutex_unlock(&lock);
}

/* ---- making ----------------------------------------------------------------------- */

bool lent_is_for(struct gpu *gpu, size_t n_bytes, const CUmemAllocationProp *prop, unsigned long long flags)
{
        return gpu && gpu->share == BFC_SHARE_FD && flags == 0 && n_bytes >= MIN_BYTES &&
               n_bytes % UNIT_BYTES == 0 && prop->type == CU_MEM_ALLOCATION_TYPE_PINNED &&
               prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE && !prop->win32HandleMetaData &&
               prop->allocFlags.compressionType == 0 && prop->allocFlags.usage == 0 &&
               ((int)prop->requestedHandleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) == 0;
}

/* 0, LENT_NOT, or an error of the library. */
static int take_block(struct gpu *gpu, size_t n_bytes, bool has_fd, void **ret_block)
{
        const struct bfc_malloc_options options = {
                .struct_size = sizeof(options),
                .partition = gpu->partition,
                .flags = BFC_ONE_EXTENT | BFC_PARKABLE | (has_fd ? BFC_SHAREABLE : 0),
                .tag = LENT_TAG,
        };
        struct bfc_block_info info;
        int r;

        do
                r = bfc_malloc_with(gpu->client, n_bytes, &options, ret_block);
        while (charge_makes_room(gpu, r));
        if (r < 0)
                return r == -EINVAL || r == -ENOTSUP ? LENT_NOT : r;
        /* Else it is in an extent with others: there are no more of their own, or all are made in advance. */
        if (broker_find_block((CUdeviceptr)(uintptr_t)*ret_block, &info) && info.extent_offset == 0 &&
            info.extent_bytes == n_bytes && bfc_use_begin(gpu->client, *ret_block, 0) == 0)
                return 0;
        (void)bfc_free_unused(gpu->client, *ret_block);
        return LENT_NOT;
}

/* The driver's handle, with two references. */
static CUresult retain(void *block, const CUmemAllocationProp *prop, CUmemGenericAllocationHandle *ret)
{
        CUmemGenericAllocationHandle again;
        CUmemAllocationProp found;
        CUresult result = real_cuMemRetainAllocationHandle(ret, block);

        if (result != CUDA_SUCCESS)
                return result;
        if (prop->allocFlags.gpuDirectRDMACapable &&
            (real_cuMemGetAllocationPropertiesFromHandle(&found, *ret) != CUDA_SUCCESS ||
             !found.allocFlags.gpuDirectRDMACapable))
                result = CUDA_ERROR_NOT_SUPPORTED;
        if (result == CUDA_SUCCESS)
                result = real_cuMemRetainAllocationHandle(&again, block);
        if (result != CUDA_SUCCESS)
                real_cuMemRelease(*ret);
        return result;
}

/* The program has the memory. */
static CUresult enter(struct lent *l, size_t n_bytes, CUmemGenericAllocationHandle *ret_handle)
{
        const struct outside o = { .gpu = l->gpu, .n_bytes = n_bytes, .lent = l };

        l->name = l->handle;
        if (lent_has_name(l->handle)) { /* an address is no number of the driver, and unique */
                l->name = (CUmemGenericAllocationHandle)(uintptr_t)l;
                note_counted(l);
                real_cuMemRelease(l->handle);
        }
        pthread_mutex_lock(&lock);
        LIST_INSERT_HEAD(&all_lent, l, link);
        pthread_mutex_unlock(&lock);
        *ret_handle = l->name;
        return outside_end_create(&o, CUDA_SUCCESS, l->name);
}

int lent_create(struct gpu *gpu, size_t n_bytes, const CUmemAllocationProp *prop,
                CUmemGenericAllocationHandle *ret_handle)
{
        bool has_fd = (int)prop->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        bfc_client *client;
        CUresult result = context_client(gpu, &client);
        struct lent *l;
        int r;

        if (result != CUDA_SUCCESS)
                return (int)result;
        free_left();
        l = malloc(sizeof(*l));
        if (!l)
                return CUDA_ERROR_OUT_OF_MEMORY;
        *l = (struct lent){ .gpu = gpu,
                            .n_bytes = n_bytes,
                            .has_fd = has_fd,
                            .is_shared = prop->allocFlags.gpuDirectRDMACapable };
        r = take_block(gpu, n_bytes, has_fd, &l->block);
        if (r != 0) {
                free(l);
                return r == LENT_NOT ? r : r == -EBUSY ? CUDA_ERROR_OUT_OF_MEMORY : (int)broker_result(r);
        }
        result = retain(l->block, prop, &l->handle);
        if (result == CUDA_SUCCESS)
                return (int)enter(l, n_bytes, ret_handle);
        if (!prop->allocFlags.gpuDirectRDMACapable)
                broker_say(
                        "memory of cuMemCreate is not taken from bfcd: the driver gives no handle of it (error %d)",
                        (int)result);
        free_or_leave(l);
        return LENT_NOT;
}

/* ---- sharing ------------------------------------------------------------------------ */

static struct lent *find_locked(CUmemGenericAllocationHandle handle)
{
        struct lent *l;

        LIST_FOREACH(l, &all_lent, link)
        {
                if (l->name == handle)
                        return l;
        }
        return NULL;
}

static struct lent *find_by_handle_locked(CUmemGenericAllocationHandle handle)
{
        struct lent *l;

        LIST_FOREACH(l, &all_lent, link)
        {
                if (l->handle == handle)
                        return l;
        }
        return NULL;
}

int lent_export(CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type, unsigned long long flags,
                void *ret_os_handle)
{
        int result = LENT_NOT, r, fd;
        struct lent *l;

        pthread_mutex_lock(&lock);
        l = find_locked(handle);
        if (l && l->handle == 0) {
                result = CUDA_ERROR_NOT_READY;
        } else if (l && (!ret_os_handle || flags != 0 || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ||
                         !l->has_fd || !l->block)) {
                result = CUDA_ERROR_INVALID_VALUE;
        } else if (l) {
                r = bfc_extent_fd(l->gpu->client, l->block, &fd);
                if (r == 0)
                        memcpy(ret_os_handle, &fd, sizeof(fd));
                l->is_shared |= r == 0;
                result = r == 0 ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
        }
        pthread_mutex_unlock(&lock);
        return result;
}

/* ---- numbers ------------------------------------------------------------------------ */

CUresult lent_find_handle(CUmemGenericAllocationHandle *handle)
{
        CUresult result = CUDA_SUCCESS;
        const struct lent *l;

        if (__atomic_load_n(&n_counted, __ATOMIC_ACQUIRE) == 0)
                return CUDA_SUCCESS;
        pthread_mutex_lock(&lock);
        l = find_locked(*handle);
        if (l && l->handle == 0)
                result = CUDA_ERROR_NOT_READY;
        else if (l)
                *handle = l->handle;
        pthread_mutex_unlock(&lock);
        return result;
}

CUresult lent_retained(CUmemGenericAllocationHandle *handle)
{
        CUmemGenericAllocationHandle name = *handle;
        bool is_counted = false;
        const struct lent *l;

        if (__atomic_load_n(&n_counted, __ATOMIC_ACQUIRE) == 0)
                return CUDA_SUCCESS;
        pthread_mutex_lock(&lock);
        l = find_by_handle_locked(*handle);
        if (l) {
                name = l->name;
                is_counted = l->is_counted;
        }
        pthread_mutex_unlock(&lock);
        if (is_counted || (!l && lent_has_name(name)))
                real_cuMemRelease(*handle);
        if (!l && lent_has_name(name)) /* the driver has given the number to memory that had none */
                return CUDA_ERROR_NOT_SUPPORTED;
        *handle = name;
        return CUDA_SUCCESS;
}

bool lent_has_name(CUmemGenericAllocationHandle handle)
{
        const struct lent *l;
        bool has;

        if (__atomic_load_n(&n_counted, __ATOMIC_ACQUIRE) == 0)
                return false;
        pthread_mutex_lock(&lock);
        l = find_locked(handle);
        has = l && l->handle != handle;
        pthread_mutex_unlock(&lock);
        return has;
}

bool lent_is_counted(const struct lent *l)
{
        return l->is_counted;
}

/* ---- sleep -------------------------------------------------------------------------- */

bool lent_is_asleep(const struct lent *l)
{
        return l->handle == 0;
}

bool lent_sleeps(void)
{
        return __atomic_load_n(&n_asleep, __ATOMIC_ACQUIRE) > 0;
}

bool lent_has_any(void)
{
        bool has;

        pthread_mutex_lock(&lock);
        has = !LIST_EMPTY(&all_lent);
        pthread_mutex_unlock(&lock);
        return has;
}

static bool put_to_sleep(struct lent *l)
{
        unsigned n_references = l->is_counted ? 1 : 1 + outside_n_handles(l);
        CUmemGenericAllocationHandle handle = l->handle;

        if (!l->block || l->is_shared || !outside_unmap_lent(l, l->handle))
                return false;
        /* Before the driver may give the number to small memory, which is created meanwhile: see lent_has_name(). */
        pthread_mutex_lock(&lock);
        l->handle = 0;
        note_counted(l);
        pthread_mutex_unlock(&lock);
        __atomic_add_fetch(&n_asleep, 1, __ATOMIC_RELEASE);
        while (n_references-- > 0)
                real_cuMemRelease(handle);
        while (bfc_use_end(l->gpu->client, l->block) == 0) /* it has two if it was made while others woke */
                ;
        return true;
}

uint64_t lent_sleep(void)
{
        uint64_t n_bytes = 0;
        struct lent *l;

        LIST_FOREACH(l, &all_lent, link)
        {
                if (l->handle == 0 || put_to_sleep(l))
                        n_bytes += l->n_bytes;
        }
        return n_bytes;
}

struct gpu *lent_sleeping_gpu(void)
{
        struct gpu *gpu = NULL;
        struct lent *l;

        pthread_mutex_lock(&lock);
        LIST_FOREACH(l, &all_lent, link)
        {
                l->is_listed = true;
                if (l->handle == 0)
                        gpu = l->gpu;
        }
        pthread_mutex_unlock(&lock);
        return gpu;
}

static CUresult wake_up(struct lent *l)
{
        CUmemGenericAllocationHandle handle;
        CUresult result = real_cuMemRetainAllocationHandle(&handle, l->block);

        if (result != CUDA_SUCCESS)
                return result;
        result = outside_map_lent(l, handle);
        if (result != CUDA_SUCCESS) {
                real_cuMemRelease(handle);
                return result;
        }
        pthread_mutex_lock(&lock);
        l->handle = handle;
        pthread_mutex_unlock(&lock);
        __atomic_sub_fetch(&n_asleep, 1, __ATOMIC_RELEASE);
        return CUDA_SUCCESS;
}

int lent_wake(struct gpu *gpu)
{
        struct lent *l;
        int r = 0;

        LIST_FOREACH(l, &all_lent, link)
        {
                CUresult result;

                if (l->gpu != gpu || !l->block || !l->is_listed)
                        continue;
                if (l->handle == 0) {
                        result = wake_up(l);
                        if (result == CUDA_SUCCESS)
                                continue; /* it keeps the use */
                        broker_say("memory of cuMemCreate cannot be mapped again (error %d)", (int)result);
                        r = -EIO;
                }
                (void)bfc_use_end(gpu->client, l->block);
        }
        return r;
}
