/* For frameworks: the client of a whole process, and functions in the shapes that PyTorch
 * and CuPy load by name.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * These functions cannot return an error, and the frameworks take NULL for memory, so
 * what failed is said on stderr: the one place of the library that prints, once for each
 * errno. A GPU's number leads to the partition on that GPU and to no other, because memory
 * of another device would be taken for memory of this one. Only a process that sees no GPU
 * at all is given the client's own partition: what runs there runs on the host.
 *
 * What is freed while a stream is being captured is kept for good: the graph may use it each
 * time that it is launched, and nobody says when it is gone.
 *
 * Invariant: what is in `default_client` and `partitions` is this process's; a forked
 * child begins with none. */
#include <bfcclient.h>

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <sys/types.h>
#include <unistd.h>

#include "client/client.h"
#include "client/error.h"

#define N_CACHED_DEVICES 64
#define MAX_ERRNO        4095
#define OWN_PARTITION    "" /* in `partitions` */

static pthread_mutex_t default_lock = PTHREAD_MUTEX_INITIALIZER; /* while it is being made */
static _Atomic(bfc_client *) default_client;
static pid_t default_pid;
static _Atomic(const char *) partitions[N_CACHED_DEVICES]; /* by ordinal; NULL: not looked up yet */
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;
static int fork_error;

/* ---- the client of the process ------------------------------------------- */

/* The lock may have been a parent's thread's; here is one thread. */
static void in_child(void)
{
        default_lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
        for (int i = 0; i < N_CACHED_DEVICES; i++)
                atomic_store(&partitions[i], NULL);
        bfc_disconnect(atomic_exchange(&default_client, NULL)); /* which forgets it */
}

static void watch_forks(void)
{
        fork_error = -pthread_atfork(NULL, NULL, in_child);
}

/* Other threads may still use the client, so it is not disconnected. A child that shares the memory of
 * its parent (vfork) must not speak for it. */
static void __attribute__((destructor)) end_default(void)
{
        bfc_client *client = atomic_load(&default_client);

        if (client && getpid() == default_pid)
                client_say_exit(client);
}

static int default_connect(bfc_client **ret_client)
{
        int r;

        pthread_once(&fork_once, watch_forks);
        if (fork_error < 0)
                return error_set(fork_error, "this process is out of memory");
        r = bfc_connect(NULL, ret_client);
        if (r < 0)
                return r;
        default_pid = getpid();
        atomic_store(&default_client, *ret_client);
        return 0;
}

BFC_API int bfc_default(bfc_client **ret_client)
{
        bfc_client *client;
        int r = 0;

        if (!ret_client)
                return error_set(-EINVAL, "bfc_default: ret_client is NULL");
        client = atomic_load(&default_client);
        if (!client) {
                pthread_mutex_lock(&default_lock);
                client = atomic_load(&default_client);
                if (!client)
                        r = default_connect(&client);
                pthread_mutex_unlock(&default_lock);
        }
        if (r == 0)
                *ret_client = client;
        return r;
}

/* ---- what both frameworks need ------------------------------------------- */

static void say(const char *function, int error, const char *outcome)
{
        static _Atomic unsigned char said[MAX_ERRNO + 1];

        if (error < -MAX_ERRNO || atomic_exchange(&said[-error], 1))
                return;
        fprintf(stderr, "libbfcclient: %s: %s; %s (reported once for each error code)\n", function,
                bfc_last_error(), outcome);
}

static int look_up_partition(bfc_client *client, int ordinal, const char **ret_name)
{
        uint8_t uuid[DEVICE_UUID_BYTES];
        int r = bfc_partition_for_device(client, ordinal, ret_name);

        if (r == -ENOENT && device_cuda_ordinal_uuid(0, uuid) < 0) {
                *ret_name = OWN_PARTITION;
                return 0;
        }
        return r;
}

/* NULL is the client's own. */
static int partition_of_device(bfc_client *client, int ordinal, const char **ret_name)
{
        bool cached = ordinal >= 0 && ordinal < N_CACHED_DEVICES;
        const char *name = cached ? atomic_load(&partitions[ordinal]) : NULL;
        int r;

        if (!name) {
                r = look_up_partition(client, ordinal, &name);
                if (r < 0)
                        return r;
                if (cached)
                        atomic_store(&partitions[ordinal], name);
        }
        *ret_name = name[0] ? name : NULL;
        return 0;
}

/* stream: NULL is the framework that names none. */
static void *framework_malloc(const char *function, size_t n_bytes, int ordinal, const uintptr_t *stream)
{
        const char *partition;
        bfc_client *client;
        void *ptr = NULL;
        int r;

        if (n_bytes == 0)
                return NULL;
        r = bfc_default(&client);
        if (r == 0)
                r = partition_of_device(client, ordinal, &partition);
        if (r == 0)
                r = stream ? bfc_malloc_async_in(client, partition, n_bytes, *stream, &ptr)
                           : bfc_malloc_in(client, partition, n_bytes, &ptr);
        if (r < 0)
                say(function, r, "it returns NULL");
        return ptr;
}

/* A process without a client of its own, as a forked child, has nothing to free. */
static void framework_free(const char *function, void *ptr, const uintptr_t *stream)
{
        bfc_client *client = atomic_load(&default_client);
        int r = 0;

        if (client && ptr)
                r = stream ? client_free_async_unless_captured(client, ptr, *stream)
                           : client_free_unless_captured(client, ptr);
        if (r == -EBUSY)
                say(function, r, "the block is kept until the process ends, because a CUDA graph may use it");
        else if (r < 0)
                say(function, r, "nothing is freed");
}

/* ---- PyTorch: torch.cuda.memory.CUDAPluggableAllocator -------------------- */

BFC_API void *bfc_torch_malloc(ssize_t n_bytes, int device, struct CUstream_st *stream)
{
        uintptr_t number = (uintptr_t)stream;

        if (n_bytes < 0) {
                say("bfc_torch_malloc", error_set(-EINVAL, "the size is negative: %zd bytes", n_bytes),
                    "it returns NULL");
                return NULL;
        }
        return framework_malloc("bfc_torch_malloc", (size_t)n_bytes, device, &number);
}

BFC_API void bfc_torch_free(void *ptr, ssize_t n_bytes, int device, struct CUstream_st *stream)
{
        uintptr_t number = (uintptr_t)stream;

        (void)n_bytes;
        (void)device;
        framework_free("bfc_torch_free", ptr, &number);
}

BFC_API void bfc_torch_record_stream(void *ptr, struct CUstream_st *stream)
{
        bfc_client *client = atomic_load(&default_client);
        int r = client && ptr ? bfc_record_stream(client, ptr, (uintptr_t)stream) : 0;

        if (r < 0)
                say("bfc_torch_record_stream", r, "the block may be reused too early");
}

/* ---- CuPy: cupy.cuda.memory.CFunctionAllocator ---------------------------- */

BFC_API void *bfc_cupy_malloc(void *param, size_t n_bytes, int device)
{
        (void)param;
        return framework_malloc("bfc_cupy_malloc", n_bytes, device, NULL);
}

BFC_API void bfc_cupy_free(void *param, void *ptr, int device)
{
        (void)param;
        (void)device;
        framework_free("bfc_cupy_free", ptr, NULL);
}
