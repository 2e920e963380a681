/* For frameworks: the client of a whole process, and functions in the shapes that PyTorch
 * and CuPy load by name.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * These functions cannot return an error, and the frameworks take NULL for memory, so
 * a failure is reported on stderr: the one place of the library that prints, once for each
 * errno. A GPU's number means the partition on that GPU and no other, because memory
 * of another device would be taken for memory of this one. Only a process that sees no GPU
 * uses the client's own partition: its work runs on the host.
 *
 * A block that is freed while a stream is being captured is never freed: the graph may use it each
 * time that it is launched, and its end is not announced.
 *
 * Invariant: what is in `default_client` and `partitions` is this process's; a forked
 * child begins with none. */
#include <bfcclient.h>

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

#include "client/client.h"
#include "client/alloc.h"
#include "client/streams.h"
#include "client/stream_alloc.h"

#define N_CACHED_DEVICES 64
#define MAX_ERRNO        4095
#define TAG_BYTES        32u /* with its end */
#define OWN_PARTITION    ""  /* in `partitions` */

static pthread_mutex_t default_lock = PTHREAD_MUTEX_INITIALIZER; /* while it is being made */
static _Atomic(bfc_client *) default_client;
static pid_t default_pid;
static _Atomic(const char *) partitions[N_CACHED_DEVICES]; /* by ordinal; NULL: not looked up yet */
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;
static int fork_error;
static char parkable_tags[BFC_TORCH_PARKABLE_POOLS][TAG_BYTES];
static pthread_mutex_t parkable_lock = PTHREAD_MUTEX_INITIALIZER; /* guards the tags */

/* ---- the client of the process ------------------------------------------- */

/* A thread of the parent may have the lock; the child has one thread. */
static void in_child(void)
{
        default_lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
        parkable_lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
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

static int default_connect(const struct bfc_options *options, bfc_client **ret_client)
{
        int r;

        pthread_once(&fork_once, watch_forks);
        if (fork_error < 0)
                return error_set(fork_error, "this process is out of memory");
        r = bfc_connect(options, ret_client);
        if (r < 0)
                return r;
        default_pid = getpid();
        atomic_store(&default_client, *ret_client);
        return 0;
}

BFC_API int bfc_default(bfc_client **ret_client)
{
        return bfc_default_with(NULL, ret_client);
}

BFC_API int bfc_default_with(const struct bfc_options *options, bfc_client **ret_client)
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
                        r = default_connect(options, &client);
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

/* Frameworks give their GPUs access to each other at the first copy, by calls that are not seen here. So those whose
 * memory they ask for have it. */
static void enable_peer(bfc_client *client, int ordinal, int peer)
{
        int r = device_cuda_check_peer(ordinal, peer) == 0 ? bfc_enable_peer_access(client, ordinal, peer)
                                                           : 0;

        if (r < 0)
                say("bfc_enable_peer_access", r, "work on one GPU cannot use memory of the other");
}

static void note_partition(bfc_client *client, int ordinal, const char *name)
{
        pthread_mutex_lock(&default_lock);
        for (int i = 0; i < N_CACHED_DEVICES && name[0] && !atomic_load(&partitions[ordinal]); i++) {
                const char *other = atomic_load(&partitions[i]);

                if (!other || !other[0])
                        continue;
                enable_peer(client, ordinal, i);
                enable_peer(client, i, ordinal);
        }
        atomic_store(&partitions[ordinal], name);
        pthread_mutex_unlock(&default_lock);
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
                        note_partition(client, ordinal, name);
        }
        *ret_name = name[0] ? name : NULL;
        return 0;
}

/* What a framework's function asks for. */
struct framework_request {
        const char *function;
        size_t n_bytes;
        int ordinal;
        const uintptr_t *stream; /* NULL: the framework names none */
        uint64_t flags;          /* BFC_ONE_EXTENT, BFC_PARKABLE */
        const char *tag;
};

/* Those of the environment at the first call. */
static pthread_once_t wait_once = PTHREAD_ONCE_INIT;
static uint32_t timeout_ms;
static bool timeout_is_invalid;

static void read_wait(void)
{
        timeout_is_invalid = client_read_timeout(&timeout_ms) < 0;
}

/* How long a request waits for memory. */
static int request_wait(uint32_t *ret_ms)
{
        pthread_once(&wait_once, read_wait);
        if (timeout_is_invalid)
                return client_read_timeout(ret_ms); /* with the sentence, which is each thread's */
        *ret_ms = timeout_ms;
        return 0;
}

static int request_block(const struct framework_request *q, void **ret_ptr)
{
        struct bfc_malloc_options options = { .struct_size = sizeof(options),
                                              .flags = q->flags,
                                              .tag = q->tag };
        struct malloc_how how = { .flags = q->flags };
        bfc_client *client;
        int r;

        r = request_wait(&options.wait_ms);
        if (r == 0)
                r = bfc_default(&client);
        if (r == 0)
                r = partition_of_device(client, q->ordinal, &options.partition);
        if (r < 0)
                return r;
        if (!q->stream)
                return bfc_malloc_with(client, q->n_bytes, &options, ret_ptr);
        how.wait_ms = options.wait_ms;
        how.is_stream_permanent = true;
        return client_malloc_async(client, options.partition, q->n_bytes, *q->stream, &how, ret_ptr);
}

static void *framework_malloc(const struct framework_request *q)
{
        void *ptr = NULL;
        int r = q->n_bytes > 0 ? request_block(q, &ptr) : 0;

        if (r < 0)
                say(q->function, r, "it returns NULL");
        return ptr;
}

/* A process without a client, as a forked child, has nothing to free. stream: of one block. */
static void framework_free(const char *function, void *const *ptrs, size_t n, const uintptr_t *stream)
{
        bfc_client *client = atomic_load(&default_client);
        int r = 0;

        if (client && stream && ptrs[0])
                r = client_free_async_unless_captured(client, ptrs[0], *stream);
        else if (client && !stream)
                r = client_free_unless_captured(client, ptrs, n);
        if (r == -EBUSY)
                say(function, r, "the block is kept until the process ends, because a CUDA graph may use it");
        else if (r < 0)
                say(function, r, "nothing is freed");
}

/* ---- PyTorch: torch.cuda.memory.CUDAPluggableAllocator -------------------- */

static void *torch_malloc(struct framework_request *q, ssize_t n_bytes)
{
        if (n_bytes < 0) {
                say(q->function, error_set(-EINVAL, "the size is negative: %zd bytes", n_bytes),
                    "it returns NULL");
                return NULL;
        }
        q->n_bytes = (size_t)n_bytes;
        return framework_malloc(q);
}

BFC_API void *bfc_torch_malloc(ssize_t n_bytes, int device, struct CUstream_st *stream)
{
        uintptr_t number = (uintptr_t)stream;
        struct framework_request q = { .function = "bfc_torch_malloc", .ordinal = device, .stream = &number };

        return torch_malloc(&q, n_bytes);
}

BFC_API void *bfc_torch_malloc_one_extent(ssize_t n_bytes, int device, struct CUstream_st *stream)
{
        uintptr_t number = (uintptr_t)stream;
        struct framework_request q = { .function = "bfc_torch_malloc_one_extent",
                                       .ordinal = device,
                                       .stream = &number,
                                       .flags = BFC_ONE_EXTENT };

        return torch_malloc(&q, n_bytes);
}

BFC_API void bfc_torch_free(void *ptr, ssize_t n_bytes, int device, struct CUstream_st *stream)
{
        uintptr_t number = (uintptr_t)stream;

        (void)n_bytes;
        (void)device;
        framework_free("bfc_torch_free", &ptr, 1, &number);
}

/* A pool frees memory that no work uses: PyTorch has waited. So nothing is left to a stream's order. */
BFC_API void *bfc_torch_pool_malloc(ssize_t n_bytes, int device, struct CUstream_st *stream)
{
        struct framework_request q = { .function = "bfc_torch_pool_malloc", .ordinal = device };

        (void)stream;
        return torch_malloc(&q, n_bytes);
}

BFC_API void *bfc_torch_pool_malloc_one_extent(ssize_t n_bytes, int device, struct CUstream_st *stream)
{
        struct framework_request q = { .function = "bfc_torch_pool_malloc_one_extent",
                                       .ordinal = device,
                                       .flags = BFC_ONE_EXTENT };

        (void)stream;
        return torch_malloc(&q, n_bytes);
}

/* ---- PyTorch: pools that are parked and woken -------------------------------- */

static void *torch_malloc_parkable(unsigned slot, ssize_t n_bytes, int device)
{
        char tag[TAG_BYTES];
        struct framework_request q = { .function = "bfc_torch_pool_malloc_parkable",
                                       .ordinal = device,
                                       .flags = BFC_PARKABLE,
                                       .tag = tag };

        pthread_mutex_lock(&parkable_lock);
        memcpy(tag, parkable_tags[slot], sizeof(tag));
        pthread_mutex_unlock(&parkable_lock);
        return torch_malloc(&q, n_bytes);
}

#define SLOTS(F, tens) F(tens##0) F(tens##1) F(tens##2) F(tens##3) F(tens##4) F(tens##5) F(tens##6) F(tens##7)
#define ALL_SLOTS(F)   SLOTS(F, 00) SLOTS(F, 01) SLOTS(F, 02) SLOTS(F, 03) /* octal */
#define DEFINE(slot)                                                                                         \
        static void *torch_malloc_parkable_##slot(ssize_t n_bytes, int device, struct CUstream_st *stream)   \
        {                                                                                                    \
                (void)stream;                                                                                \
                return torch_malloc_parkable(slot, n_bytes, device);                                         \
        }
ALL_SLOTS(DEFINE)
#undef DEFINE

BFC_API bfc_torch_malloc_fn bfc_torch_pool_malloc_parkable(unsigned slot, const char *tag)
{
#define NAME(slot) torch_malloc_parkable_##slot,
        static const bfc_torch_malloc_fn functions[BFC_TORCH_PARKABLE_POOLS] = { ALL_SLOTS(NAME) };
#undef NAME

        if (slot >= BFC_TORCH_PARKABLE_POOLS || !tag || strlen(tag) >= TAG_BYTES) {
                (void)error_set(
                        -EINVAL,
                        "bfc_torch_pool_malloc_parkable: the slot is not below %u, or the tag has more "
                        "than %u bytes",
                        BFC_TORCH_PARKABLE_POOLS, TAG_BYTES - 1);
                return NULL;
        }
        pthread_mutex_lock(&parkable_lock);
        strcpy(parkable_tags[slot], tag);
        pthread_mutex_unlock(&parkable_lock);
        return functions[slot];
}

/* Blocks that wait for bfc_torch_pool_free_end(). */
struct noted {
        void **ptrs;
        size_t n, n_max;
};

/* Of this thread; NULL: blocks are freed at once. */
static __thread struct noted *noted;

/* False: it is not possible, and the block is freed now. So a capture that goes on now is noticed, also if it ends before
 * the noted blocks are freed. */
static bool note_free(void *ptr)
{
        bfc_client *client = atomic_load(&default_client);
        size_t n_max;
        void **ptrs;

        if (!noted || !client || streams_check_captured(client, client->partition))
                return false;
        if (noted->n == noted->n_max) {
                n_max = noted->n_max > 0 ? 2 * noted->n_max : 64;
                ptrs = reallocarray(noted->ptrs, n_max, sizeof(*ptrs));
                if (!ptrs)
                        return false;
                noted->ptrs = ptrs;
                noted->n_max = n_max;
        }
        noted->ptrs[noted->n++] = ptr;
        return true;
}

BFC_API void bfc_torch_pool_free(void *ptr, ssize_t n_bytes, int device, struct CUstream_st *stream)
{
        (void)n_bytes;
        (void)device;
        (void)stream;
        if (!ptr || !note_free(ptr))
                framework_free("bfc_torch_pool_free", &ptr, 1, NULL);
}

/* Without memory blocks are freed at once. */
BFC_API void bfc_torch_pool_free_begin(void)
{
        if (!noted)
                noted = calloc(1, sizeof(*noted));
}

BFC_API void bfc_torch_pool_free_end(void)
{
        struct noted *ended = noted;

        noted = NULL;
        if (!ended)
                return;
        framework_free("bfc_torch_pool_free", ended->ptrs, ended->n, NULL);
        free(ended->ptrs);
        free(ended);
}

BFC_API void bfc_torch_record_stream(void *ptr, struct CUstream_st *stream)
{
        bfc_client *client = atomic_load(&default_client);
        int r = client && ptr ? client_record_permanent_stream(client, ptr, (uintptr_t)stream) : 0;

        if (r < 0)
                say("bfc_torch_record_stream", r, "the block may be reused too early");
}

/* ---- CuPy: cupy.cuda.memory.CFunctionAllocator ---------------------------- */

BFC_API void *bfc_cupy_malloc(void *param, size_t n_bytes, int device)
{
        struct framework_request q = { .function = "bfc_cupy_malloc", .n_bytes = n_bytes, .ordinal = device };

        (void)param;
        return framework_malloc(&q);
}

BFC_API void bfc_cupy_free(void *param, void *ptr, int device)
{
        (void)param;
        (void)device;
        framework_free("bfc_cupy_free", &ptr, 1, NULL);
}
