/* A proxy of NVIDIA's management library, libnvidia-ml.so.1: a program that asks it how much memory a GPU has and has
 * left is told what its limit has.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * It passes every function on, and answers that of memory itself for GPUs on which the tenant has a quota. A program
 * may ask NVML before it forks, to leave CUDA for its children, so nothing here initialises CUDA. If the process has
 * a client of the proxy of libcuda.so.1, that one answers. Else a client is made for the questions, which allocates
 * nothing; a forked child makes its own. Without the library all functions fail as a loader of it would. */
#include <bfcclient.h>

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <string.h>

#include "integrations/preload/find.h"

#define SUCCESS            0
#define LIBRARY_NOT_FOUND  12
#define FUNCTION_NOT_FOUND 13
#define UUID_BYTES         96 /* NVML_DEVICE_UUID_V2_BUFFER_SIZE */

struct nvml_memory { /* nvmlMemory_t */
        unsigned long long n_total, n_free, n_used;
};

struct nvml_memory_v2 { /* nvmlMemory_v2_t */
        unsigned int version;
        unsigned long long n_total, n_reserved, n_free, n_used;
};

_Static_assert(sizeof(struct nvml_memory) == 24 && sizeof(struct nvml_memory_v2) == 40, "layout of NVML");

#define OWN(symbol, type, arguments)                                                                         \
        __attribute__((visibility("default"))) type symbol arguments;                                        \
        type real_##symbol arguments;
#include "integrations/preload/nvml/own.h"
#undef OWN

/* The library, as dlopen() returns it. NULL: there is none. */
__attribute__((visibility("default"))) void *bfc_preload_nvml(void);

/* ---- the library --------------------------------------------------------------- */

static void *library;

extern void *preload_slots[];

static const char *const symbols[] = {
#define OWN(symbol, type, arguments) #symbol,
#include "integrations/preload/nvml/own.h"
#undef OWN
#define FORWARD(symbol) #symbol,
#include "integrations/preload/nvml/names.h"
#undef FORWARD
};

static void load(void)
{
        library = find_library(&(struct found){ "libnvidia-ml.so.1", "BFC_NVML_LIBRARY", "bfc_preload_nvml",
                                                "nvmlInit_v2" });
}

void *bfc_preload_nvml(void)
{
        static pthread_once_t once = PTHREAD_ONCE_INIT;

        pthread_once(&once, load);
        return library;
}

static int no_library(void)
{
        return LIBRARY_NOT_FOUND;
}

/* An older library. */
static int no_function(void)
{
        return FUNCTION_NOT_FOUND;
}

void *preload_resolve(void **slot)
{
        void *handle = bfc_preload_nvml();
        void *found = handle ? dlsym(handle, symbols[slot - preload_slots]) : NULL;
        int (*missing)(void) = handle ? no_function : no_library;

        if (!found)
                memcpy(&found, &missing, sizeof(found));
        __atomic_store_n(slot, found, __ATOMIC_RELEASE);
        return found;
}

const char *nvmlErrorString(int result)
{
        if (bfc_preload_nvml())
                return real_nvmlErrorString(result);
        return result == LIBRARY_NOT_FOUND ? "NVML Shared Library Not Found" : "Unknown Error";
}

/* ---- what bfcd says -------------------------------------------------------------- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of the client */
static bfc_client *client;

static void in_child(void)
{
        lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
        client = NULL;
}

static void __attribute__((constructor)) watch_forks(void)
{
        pthread_atfork(NULL, NULL, in_child);
}

/* The lock is held. A daemon that is gone may be back. */
static int connect_locked(void)
{
        const struct bfc_options options = { .struct_size = sizeof(options),
                                             .flags = BFC_NO_THREAD | BFC_NO_CACHE,
                                             .trace = "" };

        return bfc_connect(&options, &client);
}

static int ask_locked(const char *uuid, size_t *ret_n_free, size_t *ret_n_total)
{
        const char *partition;
        int r = client ? 0 : connect_locked();

        if (r == 0)
                r = bfc_partition_for_uuid(client, uuid, &partition);
        if (r == 0)
                r = bfc_mem_get_info(client, partition, ret_n_free, ret_n_total);
        if (r < 0 && r != -ENOENT && client) {
                bfc_disconnect(client);
                client = NULL;
        }
        return r;
}

/* -ENOENT: the process has no client there. */
static int ask_proxy_of_cuda(const char *uuid, size_t *ret_n_free, size_t *ret_n_total)
{
        int (*mem_info)(const char *, size_t *, size_t *);
        void *cuda = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
        void *found = cuda ? dlsym(cuda, "bfc_preload_mem_info") : NULL;
        int r = -ENOENT;

        memcpy(&mem_info, &found, sizeof(found));
        if (found)
                r = mem_info(uuid, ret_n_free, ret_n_total);
        if (cuda)
                dlclose(cuda);
        return r;
}

/* False: the library's answer is the one. */
static bool has_limit(void *device, size_t *ret_n_free, size_t *ret_n_total)
{
        int (*get_uuid)(void *, char *, unsigned int);
        void *found = dlsym(bfc_preload_nvml(), "nvmlDeviceGetUUID");
        char uuid[UUID_BYTES];
        int r;

        memcpy(&get_uuid, &found, sizeof(found));
        if (!found || get_uuid(device, uuid, sizeof(uuid)) != SUCCESS)
                return false;
        r = ask_proxy_of_cuda(uuid, ret_n_free, ret_n_total);
        if (r == 0)
                return true;
        pthread_mutex_lock(&lock);
        r = ask_locked(uuid, ret_n_free, ret_n_total);
        if (r == -ECONNRESET || r == -EIDRM)
                r = ask_locked(uuid, ret_n_free, ret_n_total);
        pthread_mutex_unlock(&lock);
        return r == 0;
}

int nvmlDeviceGetMemoryInfo(void *device, struct nvml_memory *ret)
{
        size_t n_free, n_total;
        int result = real_nvmlDeviceGetMemoryInfo(device, ret);

        if (result == SUCCESS && has_limit(device, &n_free, &n_total))
                *ret = (struct nvml_memory){ .n_total = n_total,
                                             .n_free = n_free,
                                             .n_used = n_total - n_free };
        return result;
}

int nvmlDeviceGetMemoryInfo_v2(void *device, struct nvml_memory_v2 *ret)
{
        size_t n_free, n_total;
        int result = real_nvmlDeviceGetMemoryInfo_v2(device, ret);

        if (result == SUCCESS && has_limit(device, &n_free, &n_total))
                *ret = (struct nvml_memory_v2){ .version = ret->version,
                                                .n_total = n_total,
                                                .n_free = n_free,
                                                .n_used = n_total - n_free };
        return result;
}
