/* cuIpcGetMemHandle() of blocks: another process of the tenant, with the proxy, opens them.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A driver's handle would open the extent, and the opener expects the address of its block. So the block is published
 * by a name (bfc_publish()), which is in the handle. It stays until its last process frees or closes it. Only a block
 * of the daemon can be published, so a small one cannot be shared. */
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

#include "integrations/preload/charged_context.h"
#include "integrations/preload/ipc.h"

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
        CUresult result = gpu ? context_client(gpu, &client) : CUDA_ERROR_INVALID_VALUE;
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
