/* The proxy and bfcd; see broker.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Invariant: gpus[i] is constant once its state is not UNKNOWN, except for its client and its counters. A client of
 * a GPU has no memory of another one. */
#include "integrations/preload/broker.h"

#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "integrations/preload/driver.h"

#define MAX_GPUS    64
#define CACHE_BYTES (UINT64_C(4) << 20) /* that are idle, for small blocks */

enum gpu_state { UNKNOWN, BROKERED, PASSED_ON };

static struct gpu gpus[MAX_GPUS] = { [0 ... MAX_GPUS - 1] = { .contexts = PTHREAD_MUTEX_INITIALIZER } };
static _Atomic enum gpu_state states[MAX_GPUS];
static pthread_rwlock_t calls = PTHREAD_RWLOCK_INITIALIZER; /* taken before the next one; see IN_CALL */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;    /* while a client is made or a GPU is looked up */
static _Atomic(bfc_client *) spare;   /* made to look up GPUs, and the next one's that has memory */
static _Atomic(bfc_client *) charger; /* NULL: nothing was charged yet */
static unsigned n_made;               /* clients; under `lock` */
static _Atomic bool passes_all_on;    /* no daemon */
static _Atomic bool is_child;         /* of a process that has used CUDA */
/* Of this thread; see IN_CALL. The proxy is loaded early enough for the faster kind of such variables. */
static __thread unsigned n_calls __attribute__((tls_model("initial-exec")));

/* ---- messages ----------------------------------------------------------------- */

/* False: it was said already, or there is no room to note it. */
static bool note_said(const char *format)
{
        static const char *said[16]; /* atomic */

        for (size_t i = 0; i < sizeof(said) / sizeof(said[0]); i++) {
                const char *other = NULL;

                if (__atomic_compare_exchange_n(&said[i], &other, format, false, __ATOMIC_RELAXED,
                                                __ATOMIC_RELAXED))
                        return true;
                if (other == format)
                        return false;
        }
        return false;
}

void broker_say(const char *format, ...)
{
        va_list arguments;

        if (!note_said(format))
                return;
        flockfile(stderr);
        fprintf(stderr, "bfcd: process %d: ", (int)getpid());
        va_start(arguments, format);
        vfprintf(stderr, format, arguments);
        va_end(arguments);
        fputc('\n', stderr);
        funlockfile(stderr);
}

bool broker_is_strict(void)
{
        static _Atomic int is_strict = -1;
        int value = atomic_load_explicit(&is_strict, memory_order_relaxed);

        if (value < 0) {
                const char *text = getenv("BFC_STRICT");

                value = text && *text && strcmp(text, "0") != 0;
                atomic_store(&is_strict, value);
        }
        return value;
}

CUresult broker_result(int r)
{
        switch (r) {
        case 0:
                return CUDA_SUCCESS;
        case -ENOMEM:
        case -EDQUOT:
                return CUDA_ERROR_OUT_OF_MEMORY;
        case -EINVAL:
                return CUDA_ERROR_INVALID_VALUE;
        case -EBUSY:
                return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        case -ECHILD:
                return CUDA_ERROR_NOT_INITIALIZED;
        case -EIO:
                return CUDA_ERROR_LAUNCH_FAILED;
        default:
                broker_say("%s", bfc_last_error());
                return CUDA_ERROR_DEVICE_UNAVAILABLE;
        }
}

/* ---- calls ------------------------------------------------------------------------- */

bool broker_begin_call(void)
{
        pthread_rwlock_rdlock(&calls);
        n_calls++;
        return true;
}

void broker_end_call(const bool *unused)
{
        (void)unused;
        n_calls--;
        pthread_rwlock_unlock(&calls);
}

bool broker_is_in_call(void)
{
        return n_calls > 0;
}

struct gpu *broker_stop_calls(CUdevice device)
{
        pthread_rwlock_wrlock(&calls);
        n_calls++;
        return device >= 0 && device < MAX_GPUS && states[device] == BROKERED ? &gpus[device] : NULL;
}

void broker_end_client(struct gpu *gpu)
{
        bfc_disconnect(gpu->client);
        gpu->client = NULL;
        gpu->peers = 0;
}

void broker_resume_calls(void)
{
        n_calls--;
        pthread_rwlock_unlock(&calls);
}

/* ---- clients ------------------------------------------------------------------------ */

static void in_child(void)
{
        bool has_client = atomic_exchange(&spare, NULL) || atomic_exchange(&charger, NULL);

        calls = (pthread_rwlock_t)PTHREAD_RWLOCK_INITIALIZER;
        lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
        for (size_t i = 0; i < MAX_GPUS; i++) {
                gpus[i].contexts = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
                has_client |= __atomic_exchange_n(&gpus[i].client, NULL, __ATOMIC_RELAXED) != NULL;
        }
        if (has_client)
                atomic_store(&is_child, true);
}

static void __attribute__((constructor)) watch_forks(void)
{
        pthread_atfork(NULL, NULL, in_child);
}

bfc_client *broker_next_client(size_t *cursor)
{
        bfc_client *client = NULL;

        while (!client && *cursor < MAX_GPUS)
                client = __atomic_load_n(&gpus[(*cursor)++].client, __ATOMIC_ACQUIRE);
        return client;
}

/* One for questions that each can answer. */
static bfc_client *any_client(void)
{
        size_t cursor = 0;
        bfc_client *client = atomic_load_explicit(&spare, memory_order_acquire);

        if (!client)
                client = atomic_load_explicit(&charger, memory_order_acquire);
        return client ? client : broker_next_client(&cursor);
}

/* The trace of a further client of the process is a file of its own, unless the name has a number of it. NULL: it is
 * as the environment has it. The caller frees it. */
static char *trace_name(void)
{
        const char *name = getenv("BFC_TRACE");
        char *numbered = NULL;

        if (n_made == 0 || !name || !*name || strstr(name, "%n") ||
            asprintf(&numbered, "%s.%u", name, n_made) < 0)
                return NULL;
        return numbered;
}

/* The lock is held. */
static int connect_locked(bfc_client **ret)
{
        char *trace = trace_name();
        const struct bfc_options options = { .struct_size = sizeof(options),
                                             .trace = trace,
                                             .cache_idle_bytes = CACHE_BYTES };
        int r = bfc_connect(&options, ret);

        free(trace);
        n_made += r == 0;
        return r;
}

/* For what is said of a GPU. The lock is held. */
static bfc_client *look_up_client_locked(void)
{
        bfc_client *client = any_client();

        if (client)
                return client;
        if (connect_locked(&client) < 0) {
                broker_say("no GPU memory is taken from bfcd: %s", bfc_last_error());
                atomic_store(&passes_all_on, true);
                return NULL;
        }
        atomic_store(&spare, client);
        return client;
}

/* The lock is held. */
static int give_client_locked(struct gpu *gpu)
{
        bfc_client *client = atomic_exchange(&spare, NULL);
        int r = client ? 0 : connect_locked(&client);

        for (int i = 0; r == 0 && i < MAX_GPUS; i++)
                if (gpu->peers >> i & 1)
                        r = bfc_enable_peer_access(client, (int)(gpu - gpus), i);
        if (r < 0) {
                bfc_disconnect(client);
                return r;
        }
        if (gpu->outside_bytes > 0)
                bfc_add_outside(client, gpu->partition, (int64_t)gpu->outside_bytes);
        __atomic_store_n(&gpu->client, client, __ATOMIC_RELEASE);
        return 0;
}

CUresult broker_enable_peer(struct gpu *gpu, CUdevice peer)
{
        int r = 0;

        if (peer < 0 || peer >= MAX_GPUS || peer == gpu - gpus)
                return CUDA_SUCCESS;
        pthread_mutex_lock(&lock);
        if (gpu->client)
                r = bfc_enable_peer_access(gpu->client, (int)(gpu - gpus), peer);
        if (r == 0)
                gpu->peers |= UINT64_C(1) << peer;
        pthread_mutex_unlock(&lock);
        return r == -ENOTSUP ? CUDA_ERROR_PEER_ACCESS_UNSUPPORTED : broker_result(r);
}

CUresult broker_client_to_ask(struct gpu *gpu, bfc_client **ret)
{
        int r = 0;

        *ret = __atomic_load_n(&gpu->client, __ATOMIC_ACQUIRE);
        if (*ret)
                return CUDA_SUCCESS;
        pthread_mutex_lock(&lock);
        if (!gpu->client)
                r = give_client_locked(gpu);
        *ret = gpu->client;
        pthread_mutex_unlock(&lock);
        return broker_result(r);
}

int broker_charger(bfc_pressure_fn on_pressure, bfc_client **ret)
{
        bfc_client *client = atomic_load_explicit(&charger, memory_order_acquire);
        int r = 0;

        if (!client) {
                pthread_mutex_lock(&lock);
                client = atomic_load(&charger);
                if (!client)
                        client = atomic_exchange(&spare, NULL);
                if (!client)
                        r = connect_locked(&client);
                if (r == 0) {
                        atomic_store(&charger, client);
                        (void)bfc_on_pressure(client, on_pressure, NULL);
                }
                pthread_mutex_unlock(&lock);
        }
        if (r == 0)
                *ret = client;
        return r;
}

/* ---- GPUs ------------------------------------------------------------------------- */

/* Of its UUID. */
static uint64_t gpu_id(const char *uuid)
{
        uint64_t hash = UINT64_C(0xcbf29ce484222325);

        for (; *uuid; uuid++)
                hash = (hash ^ (unsigned char)*uuid) * UINT64_C(0x100000001b3);
        return hash;
}

/* The client's own partition if it is on this GPU, else the first one there. */
static int find_partition(bfc_client *client, CUdevice device, struct bfc_partition_info *ret)
{
        const char *own = bfc_partition(client);
        bool is_found = false;
        int r = 0;

        for (size_t i = 0; r == 0; i++) {
                struct bfc_partition_info info = { .struct_size = sizeof(info) };

                r = bfc_partition_info(client, i, &info);
                if (r < 0 || info.device_ordinal != device)
                        continue;
                if (!is_found || strcmp(info.partition, own) == 0)
                        *ret = info;
                is_found = true;
        }
        return is_found ? 0 : r;
}

static enum gpu_state look_up_locked(CUdevice device)
{
        struct bfc_partition_info info = { 0 };
        bfc_client *client = look_up_client_locked();
        struct gpu *gpu = &gpus[device];
        int r;

        if (!client)
                return PASSED_ON;
        r = find_partition(client, device, &info);
        if (r < 0) {
                broker_say("memory of GPU %d is not taken from bfcd: %s", (int)device,
                           r == -ENOENT ? "the tenant has no quota there" : bfc_last_error());
                return PASSED_ON;
        }
        snprintf(gpu->name, sizeof(gpu->name), "%s", info.partition);
        gpu->partition = strcmp(info.partition, bfc_partition(client)) == 0 ? NULL : gpu->name;
        gpu->share = info.share;
        gpu->device = device;
        gpu->context_bytes = info.context_bytes;
        gpu->id = gpu_id(info.device_uuid);
        snprintf(gpu->uuid, sizeof(gpu->uuid), "%s", info.device_uuid);
        return BROKERED;
}

struct gpu *broker_gpu(CUdevice device)
{
        enum gpu_state state;

        if (atomic_load_explicit(&passes_all_on, memory_order_relaxed) ||
            atomic_load_explicit(&is_child, memory_order_relaxed) || device < 0 || device >= MAX_GPUS)
                return NULL;
        state = atomic_load_explicit(&states[device], memory_order_acquire);
        if (state == UNKNOWN) {
                pthread_mutex_lock(&lock);
                state = atomic_load(&states[device]);
                if (state == UNKNOWN) {
                        state = look_up_locked(device);
                        atomic_store(&states[device], state);
                }
                pthread_mutex_unlock(&lock);
        }
        return state == BROKERED ? &gpus[device] : NULL;
}

struct gpu *broker_known_gpu(CUdevice device)
{
        return device >= 0 && device < MAX_GPUS &&
                               atomic_load_explicit(&states[device], memory_order_acquire) == BROKERED &&
                               !atomic_load_explicit(&is_child, memory_order_relaxed)
                       ? &gpus[device]
                       : NULL;
}

struct gpu *broker_gpu_of(const char *partition)
{
        for (size_t i = 0; i < MAX_GPUS; i++)
                if (atomic_load(&states[i]) == BROKERED && strcmp(gpus[i].name, partition) == 0)
                        return &gpus[i];
        return NULL;
}

CUdevice broker_ordinal(const struct gpu *gpu)
{
        return (CUdevice)(gpu - gpus);
}

struct gpu *broker_gpu_by_id(uint64_t id)
{
        int n = 0;

        if (cuDeviceGetCount(&n) != CUDA_SUCCESS)
                return NULL;
        for (CUdevice i = 0; i < n; i++) {
                struct gpu *gpu = broker_gpu(i);

                if (gpu && gpu->id == id)
                        return gpu;
        }
        return NULL;
}

CUresult broker_device(CUdevice *ret)
{
        return atomic_load_explicit(&is_child, memory_order_relaxed) ? CUDA_ERROR_NOT_INITIALIZED
                                                                     : cuCtxGetDevice(ret);
}

CUresult broker_current_gpu(struct gpu **ret)
{
        CUdevice device;
        CUresult result = broker_device(&device);

        if (result == CUDA_SUCCESS)
                *ret = broker_gpu(device);
        return result;
}

bfc_client *broker_find_block(CUdeviceptr pointer, struct bfc_block_info *ret)
{
        bfc_client *client;
        size_t cursor = 0;

        *ret = (struct bfc_block_info){ .struct_size = sizeof(*ret) };
        while (pointer && (client = broker_next_client(&cursor)))
                if (bfc_block_info(client, (void *)(uintptr_t)pointer, ret) == 0 && ret->device_ordinal >= 0)
                        return client;
        return NULL;
}

/* ---- room ---------------------------------------------------------------------------- */

CUresult broker_mem_info(struct gpu *gpu, size_t *ret_n_free, size_t *ret_n_total)
{
        bfc_client *client = __atomic_load_n(&gpu->client, __ATOMIC_ACQUIRE);
        size_t n_free, n_total;
        int r;

        if (!client)
                client = any_client();
        if (!client) { /* the last one's GPU was reset */
                CUresult result = broker_client_to_ask(gpu, &client);

                if (result != CUDA_SUCCESS)
                        return result;
        }
        r = bfc_mem_get_info(client, gpu->name, &n_free, &n_total);
        if (r < 0)
                return broker_result(r);
        __atomic_store_n(&gpu->total_bytes, n_total, __ATOMIC_RELAXED);
        n_free += __atomic_load_n(&gpu->room_bytes, __ATOMIC_RELAXED);
        *ret_n_free = n_free < n_total ? n_free : n_total;
        *ret_n_total = n_total;
        return CUDA_SUCCESS;
}

uint64_t broker_total(struct gpu *gpu)
{
        size_t n_free, n_total = __atomic_load_n(&gpu->total_bytes, __ATOMIC_RELAXED);

        if (n_total == 0)
                (void)broker_mem_info(gpu, &n_free, &n_total);
        return n_total;
}

int bfc_preload_mem_info(const char *uuid, size_t *ret_n_free, size_t *ret_n_total)
{
        const char *partition;
        bfc_client *client;
        struct gpu *gpu;
        IN_CALL;
        int r;

        client = any_client();
        r = client ? bfc_partition_for_uuid(client, uuid, &partition) : -ENOENT;
        if (r < 0)
                return r;
        gpu = broker_gpu_of(partition);
        if (gpu)
                return broker_mem_info(gpu, ret_n_free, ret_n_total) == CUDA_SUCCESS ? 0 : -EIO;
        return bfc_mem_get_info(client, partition, ret_n_free, ret_n_total);
}

/* What the user should know: it is in no statistics of the daemon. */
static void report_gpu(size_t device, const struct gpu *gpu, uint64_t n_bytes)
{
        const size_t n = sizeof(gpu->outside_by) / sizeof(gpu->outside_by[0]);

        flockfile(stderr);
        fprintf(stderr, "bfcd: process %d had up to %.1f MiB of GPU %zu outside of bfcd", (int)getpid(),
                (double)n_bytes / (1 << 20), device);
        for (size_t i = 0; i < n && gpu->outside_by[i]; i++)
                fprintf(stderr, "%s%s", i == 0 ? ", by " : ", ", gpu->outside_by[i]);
        fputc('\n', stderr);
        funlockfile(stderr);
}

static void __attribute__((destructor)) report_outside(void)
{
        for (size_t i = 0; i < MAX_GPUS; i++) {
                uint64_t n = __atomic_load_n(&gpus[i].peak_outside, __ATOMIC_RELAXED);

                if (n > 0 && !atomic_load(&is_child))
                        report_gpu(i, &gpus[i], n);
        }
}
