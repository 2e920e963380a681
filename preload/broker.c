/* The proxy and bfcd; see broker.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Invariant: gpus[i] is constant once its state is not UNKNOWN, except for its counters. */
#include "preload/broker.h"

#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "preload/driver.h"

#define MAX_GPUS    64
#define CACHE_BYTES (UINT64_C(4) << 20) /* that are idle, for small blocks */

enum gpu_state { UNKNOWN, BROKERED, PASSED_ON };

static struct gpu gpus[MAX_GPUS];
static _Atomic enum gpu_state states[MAX_GPUS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* while the client or a GPU is looked up */
static _Atomic(bfc_client *) the_client;
static _Atomic bool passes_all_on; /* no daemon */
static _Atomic bool is_child;      /* of a process that has used CUDA */

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

/* ---- the client ------------------------------------------------------------------ */

static void in_child(void)
{
        lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
        if (atomic_exchange(&the_client, NULL))
                atomic_store(&is_child, true);
}

static void __attribute__((constructor)) watch_forks(void)
{
        pthread_atfork(NULL, NULL, in_child);
}

bfc_client *broker_client(void)
{
        return atomic_load_explicit(&the_client, memory_order_acquire);
}

/* The lock is held. */
static bfc_client *connect_locked(void)
{
        const struct bfc_options options = { .struct_size = sizeof(options),
                                             .cache_idle_bytes = CACHE_BYTES };
        bfc_client *client = atomic_load(&the_client);

        if (client)
                return client;
        if (bfc_connect(&options, &client) < 0) {
                broker_say("no GPU memory is taken from bfcd: %s", bfc_last_error());
                atomic_store(&passes_all_on, true);
                return NULL;
        }
        atomic_store(&the_client, client);
        return client;
}

/* ---- GPUs ------------------------------------------------------------------------- */

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
        bfc_client *client = connect_locked();
        int r;

        if (!client)
                return PASSED_ON;
        r = find_partition(client, device, &info);
        if (r < 0) {
                broker_say("memory of GPU %d is not taken from bfcd: %s", (int)device,
                           r == -ENOENT ? "the tenant has no quota there" : bfc_last_error());
                return PASSED_ON;
        }
        gpus[device].client = client;
        gpus[device].partition = strcmp(info.partition, bfc_partition(client)) == 0 ? NULL : info.partition;
        gpus[device].share = info.share;
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

bool broker_find_block(CUdeviceptr pointer, struct bfc_block_info *ret)
{
        bfc_client *client = broker_client();

        *ret = (struct bfc_block_info){ .struct_size = sizeof(*ret) };
        return client && pointer && bfc_block_info(client, (void *)(uintptr_t)pointer, ret) == 0 &&
               ret->device_ordinal >= 0;
}

/* ---- room ---------------------------------------------------------------------------- */

CUresult broker_mem_info(struct gpu *gpu, size_t *ret_n_free, size_t *ret_n_total)
{
        uint64_t n_outside = __atomic_load_n(&gpu->outside_bytes, __ATOMIC_RELAXED);
        size_t n_free, n_total;
        int r = bfc_mem_get_info(gpu->client, gpu->partition, &n_free, &n_total);

        if (r < 0)
                return broker_result(r);
        *ret_n_free = n_free > n_outside ? n_free - n_outside : 0;
        *ret_n_total = n_total;
        return CUDA_SUCCESS;
}

int bfc_preload_mem_info(const char *uuid, size_t *ret_n_free, size_t *ret_n_total)
{
        bfc_client *client = broker_client();
        uint64_t n_outside = 0;
        const char *partition;
        int r = client ? bfc_partition_for_uuid(client, uuid, &partition) : -ENOENT;

        if (r == 0)
                r = bfc_mem_get_info(client, partition, ret_n_free, ret_n_total);
        for (size_t i = 0; r == 0 && i < MAX_GPUS; i++) {
                const struct gpu *gpu = &gpus[i];

                if (atomic_load(&states[i]) == BROKERED &&
                    strcmp(gpu->partition ? gpu->partition : bfc_partition(client), partition) == 0)
                        n_outside = __atomic_load_n(&gpu->outside_bytes, __ATOMIC_RELAXED);
        }
        if (r == 0)
                *ret_n_free = *ret_n_free > n_outside ? *ret_n_free - n_outside : 0;
        return r;
}

CUresult broker_check_room(struct gpu *gpu, size_t n_bytes)
{
        size_t n_free, n_total;
        CUresult result;

        if (__atomic_load_n(&gpu->outside_bytes, __ATOMIC_RELAXED) == 0)
                return CUDA_SUCCESS;
        result = broker_mem_info(gpu, &n_free, &n_total);
        if (result != CUDA_SUCCESS)
                return result;
        return n_bytes <= n_free ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
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
