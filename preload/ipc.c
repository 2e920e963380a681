/* cuIpcGetMemHandle() of blocks, and fds of cuMemCreate()'s: another process of the tenant, with the proxy, opens them.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A driver's handle would open the extent, and the opener expects the address of its block. So the block is published
 * by a name (bfc_publish()), which is in the handle. It stays until its last process frees or closes it. Only a block
 * of the daemon can be published, so a small one cannot be shared.
 *
 * Instead of the driver's fd a program gets one of a sealed memfd, in which is such a handle for each block. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "preload/ipc.h"
#include "preload/lent.h"
#include "proto/memfd.h"

#define MAGIC "bfcdIPC2"
#define NAME  "cuda-ipc-" /* and the block's id */

struct block_handle {
        char magic[8];
        uint64_t process; /* random: of the process that published it */
        uint64_t gpu;     /* gpu->id */
        char name[40];
};
_Static_assert(sizeof(struct block_handle) == sizeof(CUipcMemHandle), "struct block_handle");

struct opened {
        LIST_ENTRY(opened) link;
        const struct gpu *gpu;
        CUdeviceptr pointer;
        unsigned n_opened;
};

static LIST_HEAD(opened_list, opened) all_opened = LIST_HEAD_INITIALIZER(all_opened);
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void in_child(void)
{
        lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
        LIST_INIT(&all_opened);
}

static void __attribute__((constructor)) watch_forks(void)
{
        pthread_atfork(NULL, NULL, in_child);
}

static uint64_t process_number(void)
{
        static uint64_t number;
        uint64_t n = 0;

        pthread_mutex_lock(&lock);
        if (number == 0 && getrandom(&n, sizeof(n), 0) == (ssize_t)sizeof(n))
                number = n;
        n = number;
        pthread_mutex_unlock(&lock);
        return n;
}

/* ---- the process that has the block ------------------------------------------- */

static bool is_published(bfc_client *client, void *pointer)
{
        size_t n;

        return bfc_shared_metadata(client, pointer, NULL, 0, &n) == 0;
}

static CUresult publish(bfc_client *client, const struct bfc_block_info *info, const char *name)
{
        int r;

        if (is_published(client, info->base))
                return CUDA_SUCCESS;
        r = bfc_publish(client, info->base, name);
        if (r == 0 || (r == -EINVAL && is_published(client, info->base)))
                return CUDA_SUCCESS;
        broker_say("memory cannot be shared with other processes: %s", bfc_last_error());
        return r == -EINVAL ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult get_handle(bfc_client *client, const struct bfc_block_info *info, struct block_handle *ret)
{
        const struct gpu *gpu = broker_gpu((CUdevice)info->device_ordinal);

        *ret = (struct block_handle){ .magic = MAGIC, .process = process_number(), .gpu = gpu ? gpu->id : 0 };
        snprintf(ret->name, sizeof(ret->name), NAME "%" PRIx64, info->block_id);
        return publish(client, info, ret->name);
}

CUresult cuIpcGetMemHandle(CUipcMemHandle *ret_handle, CUdeviceptr pointer)
{
        struct bfc_block_info info;
        struct block_handle handle;
        bfc_client *client;
        CUresult result;
        IN_CALL;

        client = broker_find_block(pointer, &info);
        if (!client)
                return real_cuIpcGetMemHandle(ret_handle, pointer);
        if (!ret_handle)
                return CUDA_ERROR_INVALID_VALUE;
        result = get_handle(client, &info, &handle);
        if (result == CUDA_SUCCESS)
                memcpy(ret_handle, &handle, sizeof(handle));
        return result;
}

/* ---- the process that opens it ---------------------------------------------------- */

static struct opened *find_locked(CUdeviceptr pointer)
{
        struct opened *o;

        LIST_FOREACH(o, &all_opened, link)
        {
                if (o->pointer == pointer)
                        return o;
        }
        return NULL;
}

static CUresult note_opened(const struct gpu *gpu, void *pointer)
{
        struct opened *o;

        pthread_mutex_lock(&lock);
        o = find_locked((CUdeviceptr)(uintptr_t)pointer);
        if (!o && (o = calloc(1, sizeof(*o)))) {
                o->gpu = gpu;
                o->pointer = (CUdeviceptr)(uintptr_t)pointer;
                LIST_INSERT_HEAD(&all_opened, o, link);
        }
        if (o)
                o->n_opened++;
        pthread_mutex_unlock(&lock);
        return o ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

void ipc_forget(const struct gpu *gpu)
{
        struct opened *o, *next;

        pthread_mutex_lock(&lock);
        for (o = LIST_FIRST(&all_opened); o; o = next) {
                next = LIST_NEXT(o, link);
                if (o->gpu != gpu)
                        continue;
                LIST_REMOVE(o, link);
                free(o);
        }
        pthread_mutex_unlock(&lock);
}

/* Another process's block, by the client of its GPU. */
static CUresult attach_one(const struct block_handle *handle, struct gpu **ret_gpu, void **ret_pointer)
{
        struct gpu *gpu = broker_gpu_by_id(handle->gpu);
        bfc_client *client;
        CUresult result = gpu ? broker_client(gpu, &client) : CUDA_ERROR_INVALID_VALUE;
        int r;

        if (result != CUDA_SUCCESS)
                return result;
        r = bfc_attach(client, handle->name, 0, ret_pointer, NULL);
        *ret_gpu = gpu;
        return r == -ENOENT ? CUDA_ERROR_INVALID_VALUE /* it was freed */ : broker_result(r);
}

/* device: the current one, which may be another than the block's. All flags ask for access then. */
static CUresult open_block(const struct block_handle *handle, CUdevice device, CUdeviceptr *ret_pointer)
{
        struct gpu *gpu;
        void *pointer;
        CUresult result = attach_one(handle, &gpu, &pointer);

        if (result != CUDA_SUCCESS)
                return result;
        result = broker_enable_peer(gpu, device);
        if (result == CUDA_SUCCESS)
                result = note_opened(gpu, pointer);
        if (result == CUDA_SUCCESS)
                *ret_pointer = (CUdeviceptr)(uintptr_t)pointer;
        else
                bfc_detach(gpu->client, pointer);
        return result;
}

static CUresult attach(const struct block_handle *handle, CUdeviceptr *ret_pointer)
{
        CUdevice device;
        CUresult result = broker_device(&device);

        if (result != CUDA_SUCCESS)
                return result;
        if (!broker_gpu(device) || !ret_pointer || !memchr(handle->name, '\0', sizeof(handle->name)))
                return CUDA_ERROR_INVALID_VALUE;
        if (handle->process == process_number())
                return CUDA_ERROR_INVALID_CONTEXT; /* as the driver answers */
        return open_block(handle, device, ret_pointer);
}

static bool is_block_handle(const CUipcMemHandle *handle, struct block_handle *ret)
{
        memcpy(ret, handle, sizeof(*ret));
        return memcmp(ret->magic, MAGIC, sizeof(ret->magic)) == 0;
}

CUresult cuIpcOpenMemHandle(CUdeviceptr *ret_pointer, CUipcMemHandle handle, unsigned int flags)
{
        struct block_handle of_block;
        IN_CALL;

        return is_block_handle(&handle, &of_block) ? attach(&of_block, ret_pointer)
                                                   : real_cuIpcOpenMemHandle(ret_pointer, handle, flags);
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *ret_pointer, CUipcMemHandle handle, unsigned int flags)
{
        struct block_handle of_block;
        IN_CALL;

        return is_block_handle(&handle, &of_block) ? attach(&of_block, ret_pointer)
                                                   : real_cuIpcOpenMemHandle_v2(ret_pointer, handle, flags);
}

CUresult cuIpcCloseMemHandle(CUdeviceptr pointer)
{
        bfc_client *client = NULL;
        struct opened *o;
        IN_CALL;

        pthread_mutex_lock(&lock);
        o = find_locked(pointer);
        if (o)
                client = o->gpu->client;
        if (o && --o->n_opened == 0) {
                LIST_REMOVE(o, link);
                free(o);
        }
        pthread_mutex_unlock(&lock);
        return client ? broker_result(bfc_detach(client, (void *)(uintptr_t)pointer))
                      : real_cuIpcCloseMemHandle(pointer);
}

/* ---- fds of cuMemCreate()'s memory ---------------------------------------------------- */

#define SEALS (F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE)

/* The blocks of one handle. */
struct block_handles {
        size_t n;
        struct block_handle items[LENT_BLOCKS];
};

static CUresult put_handles(const struct block_handles *handles, int *ret_fd)
{
        const ssize_t n_bytes = (ssize_t)(handles->n * sizeof(handles->items[0]));
        int fd = memfd_make_bare("bfcd-memory", 0);

        if (fd >= 0 && write(fd, handles->items, (size_t)n_bytes) == n_bytes &&
            fcntl(fd, F_ADD_SEALS, SEALS) == 0) {
                *ret_fd = fd;
                return CUDA_SUCCESS;
        }
        if (fd >= 0)
                close(fd);
        return CUDA_ERROR_OPERATING_SYSTEM;
}

CUresult cuMemExportToShareableHandle(void *ret_os_handle, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long flags)
{
        struct block_handles handles = { .n = 0 };
        CUresult result = CUDA_SUCCESS;
        void *blocks[LENT_BLOCKS];
        CUmemAllocationProp prop;
        size_t n;
        IN_CALL;

        if (lent_properties(handle, &prop) == LENT_NOT)
                return real_cuMemExportToShareableHandle(ret_os_handle, handle, type, flags);
        if (!ret_os_handle || flags != 0 || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ||
            prop.requestedHandleTypes != type)
                return CUDA_ERROR_INVALID_VALUE;
        n = lent_blocks(handle, blocks);
        while (handles.n < n && result == CUDA_SUCCESS) {
                struct bfc_block_info info;
                bfc_client *client = broker_find_block((CUdeviceptr)(uintptr_t)blocks[handles.n], &info);

                if (!client)
                        return CUDA_ERROR_INVALID_VALUE;
                result = get_handle(client, &info, &handles.items[handles.n++]);
        }
        return result == CUDA_SUCCESS ? put_handles(&handles, ret_os_handle) : result;
}

/* Kernels add seals of their own. */
static bool is_sealed(int fd)
{
        int seals = fcntl(fd, F_GET_SEALS);

        return seals >= 0 && (seals & SEALS) == SEALS;
}

/* The driver's fd is no regular file. */
static bool get_handles(int fd, struct block_handles *ret)
{
        struct stat st;

        if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode) || !is_sealed(fd) || st.st_size <= 0 ||
            st.st_size > (off_t)sizeof(ret->items) || st.st_size % (off_t)sizeof(ret->items[0]) != 0 ||
            pread(fd, ret->items, (size_t)st.st_size, 0) != (ssize_t)st.st_size)
                return false;
        ret->n = (size_t)st.st_size / sizeof(ret->items[0]);
        for (size_t i = 0; i < ret->n; i++)
                if (memcmp(ret->items[i].magic, MAGIC, sizeof(ret->items[i].magic)) != 0 ||
                    ret->items[i].gpu != ret->items[0].gpu ||
                    strncmp(ret->items[i].name, NAME, strlen(NAME)) != 0 ||
                    !memchr(ret->items[i].name, '\0', sizeof(ret->items[i].name)))
                        return false;
        return true;
}

static CUresult import_blocks(const struct block_handles *handles, CUmemGenericAllocationHandle *ret_handle)
{
        struct bfc_block_info infos[LENT_BLOCKS];
        struct gpu *gpu = NULL;
        void *pointers[LENT_BLOCKS];
        size_t n = 0;
        int n_devices;
        CUresult result = cuDeviceGetCount(&n_devices); /* not before CUDA is used */

        /* Now no child has the process number. */
        if (result == CUDA_SUCCESS && handles->items[0].process == process_number())
                return lent_again(strtoull(handles->items[0].name + strlen(NAME), NULL, 16), ret_handle);
        while (result == CUDA_SUCCESS && n < handles->n) {
                result = attach_one(&handles->items[n], &gpu, &pointers[n]);
                if (result != CUDA_SUCCESS)
                        break;
                if (!broker_find_block((CUdeviceptr)(uintptr_t)pointers[n], &infos[n]))
                        result = CUDA_ERROR_INVALID_VALUE;
                n++;
        }
        if (result == CUDA_SUCCESS)
                result = lent_attach(infos, n, ret_handle);
        while (result != CUDA_SUCCESS && n > 0)
                bfc_detach(gpu->client, pointers[--n]);
        return result;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *ret_handle, void *os_handle,
                                        CUmemAllocationHandleType type)
{
        struct block_handles handles;
        IN_CALL;

        if (!ret_handle || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ||
            !get_handles((int)(intptr_t)os_handle, &handles))
                return real_cuMemImportFromShareableHandle(ret_handle, os_handle, type);
        return import_blocks(&handles, ret_handle);
}
