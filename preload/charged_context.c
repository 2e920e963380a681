/* Charges of contexts; see charged_context.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * One context is made at a time, so that what is measured is its own. Another thread's memory of that moment counts twice
 * until the context ends. */
#include "preload/charged_context.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "device/nvml.h"
#include "preload/charge.h"
#include "preload/outside.h"

#define UNKNOWN UINT64_MAX
#define OFF     UINT64_MAX

enum kind { PRIMARY, CREATE_V2, CREATE_V3, CREATE_V4 };

/* The arguments of a function that makes a context. */
struct making {
        enum kind kind;
        CUcontext *ret;
        void *parameters;
        int n_parameters;
        unsigned int flags;
        CUdevice device;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of what follows, and while a context is made */
static bool has_made;                                    /* the program, a context of its own */
static struct nvml *nvml;                                /* NULL: not yet, or there is none */

static void in_child(void)
{
        lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
        nvml = NULL;
}

static void __attribute__((constructor)) watch_forks(void)
{
        pthread_atfork(NULL, NULL, in_child);
}

/* ---- sizes -------------------------------------------------------------------------- */

/* BFC_CONTEXT; OFF: nothing is charged. */
static uint64_t default_bytes(void)
{
        const char *text = getenv("BFC_CONTEXT");
        char *unit;
        uint64_t n;

        if (!text || !*text || strcmp(text, "off") == 0)
                return OFF;
        errno = 0;
        n = strtoull(text, &unit, 10);
        if (strcmp(unit, "GiB") == 0 && n < 1 << 20)
                return n << 30;
        if (strcmp(unit, "MiB") == 0 && n < 1 << 30)
                return n << 20;
        if (*unit || unit == text || *text == '-' || errno != 0 || n > UINT64_C(1) << 50) {
                broker_say(
                        "BFC_CONTEXT=%s is no size, as 512MiB; contexts are charged where NVML tells their size",
                        text);
                return 0;
        }
        return n;
}

/* Of this process. UNKNOWN also in a PID namespace of its own. The lock is held. */
static uint64_t measure(const struct gpu *gpu)
{
        const char *uuid = gpu->uuid;
        const struct nvml_use *own;
        struct nvml_use *uses;
        uint64_t n_bytes = UNKNOWN;
        size_t n_uses;

        if (!nvml && nvml_open(&nvml) < 0)
                return UNKNOWN;
        if (nvml_read(nvml, &uuid, 1, &uses, &n_uses) < 0)
                return UNKNOWN;
        own = nvml_find_own(uses, n_uses);
        if (own)
                n_bytes = own->n_bytes;
        free(uses);
        return n_bytes;
}

/* ---- contexts ------------------------------------------------------------------------ */

static CUresult make(const struct making *m)
{
        switch (m->kind) {
        case CREATE_V2:
                return real_cuCtxCreate_v2(m->ret, m->flags, m->device);
        case CREATE_V3:
                return real_cuCtxCreate_v3(m->ret, m->parameters, m->n_parameters, m->flags, m->device);
        case CREATE_V4:
                return real_cuCtxCreate_v4(m->ret, m->parameters, m->flags, m->device);
        default:
                return real_cuDevicePrimaryCtxRetain(m->ret, m->device);
        }
}

static void unmake(const struct making *m)
{
        if (m->kind == PRIMARY)
                real_cuDevicePrimaryCtxRelease_v2(m->device);
        else
                real_cuCtxDestroy_v2(*m->ret);
        *m->ret = NULL;
}

static CUresult refuse(struct gpu *gpu, const struct making *m, uint64_t n_bytes, int r)
{
        if (r == -EBUSY) /* the device is drained */
                return CUDA_ERROR_OUT_OF_MEMORY;
        if (r != -EDQUOT && r != -ENOMEM)
                return broker_result(r);
        broker_say(
                "GPU %d: a CUDA context takes %.1f MiB, for which the limit of %.1f MiB has no room; allow that much "
                "more than the program itself needs, as by bfcctl run --limit, or set BFC_CONTEXT=off: %s",
                (int)m->device, (double)n_bytes / (1 << 20), (double)broker_total(gpu) / (1 << 20),
                bfc_last_error());
        return CUDA_ERROR_OUT_OF_MEMORY;
}

/* What the context takes is measured when it is there. The lock is held. */
static CUresult make_charged(struct gpu *gpu, const struct making *m)
{
        struct outside charged = { .gpu = gpu, .is_charged = true };
        uint64_t n_charged = default_bytes(), n_needed, before, after;
        int r = n_charged > 0 ? charge_take(gpu, n_charged) : 0;
        CUresult result;

        if (r == -ENOTSUP) /* a partition that preallocates, or an older daemon */
                return make(m);
        if (r < 0)
                return refuse(gpu, m, n_charged, r);
        before = measure(gpu);
        result = make(m);
        if (result != CUDA_SUCCESS) {
                charge_give(gpu, n_charged);
                return result;
        }
        after = measure(gpu);
        n_needed = after == UNKNOWN ? n_charged : 0;
        if (after != UNKNOWN && before == UNKNOWN)
                n_needed = after;
        else if (after != UNKNOWN && after > before) /* else it was there */
                n_needed = after - before;
        if (n_needed > n_charged)
                r = charge_take(gpu, n_needed - n_charged);
        else if (n_needed < n_charged)
                charge_give(gpu, n_charged - n_needed);
        if (r == -ENOTSUP)
                return CUDA_SUCCESS;
        if (r < 0) {
                unmake(m);
                charge_give(gpu, n_charged);
                return refuse(gpu, m, n_needed, r);
        }
        charged.n_bytes = n_needed;
        return outside_end(&charged, result, OUTSIDE_CONTEXT, (uint64_t)(uintptr_t)*m->ret);
}

/* NULL: its contexts are not charged. */
static struct gpu *charged_gpu(CUdevice device)
{
        return default_bytes() == OFF ? NULL : broker_gpu(device);
}

static CUresult retain(struct gpu *gpu, const struct making *m)
{
        CUresult result;

        pthread_mutex_lock(&lock);
        if (gpu->has_context) {
                result = make(m);
        } else {
                result = make_charged(gpu, m);
                if (result == CUDA_SUCCESS)
                        __atomic_store_n(&gpu->has_context, true, __ATOMIC_RELEASE);
        }
        pthread_mutex_unlock(&lock);
        return result;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *ret_context, CUdevice device)
{
        const struct making m = { .kind = PRIMARY, .ret = ret_context, .device = device };
        IN_CALL;
        struct gpu *gpu = ret_context ? charged_gpu(device) : NULL;

        return gpu && !__atomic_load_n(&gpu->has_context, __ATOMIC_ACQUIRE) ? retain(gpu, &m) : make(&m);
}

CUresult context_charge_primary(struct gpu *gpu, CUdevice device)
{
        CUcontext context;
        const struct making m = { .kind = PRIMARY, .ret = &context, .device = device };

        if (__atomic_load_n(&gpu->has_context, __ATOMIC_ACQUIRE) || default_bytes() == OFF)
                return CUDA_SUCCESS;
        if (__atomic_load_n(&has_made, __ATOMIC_RELAXED))
                broker_say(
                        "GPU %d: the program has made a CUDA context of its own, and memory of bfcd needs the "
                        "primary one beside it; both are charged",
                        (int)device);
        return retain(gpu, &m); /* for the library, which would make it */
}

/* One that the program makes. */
static CUresult create(const struct making *m)
{
        struct gpu *gpu = m->ret ? charged_gpu(m->device) : NULL;
        CUresult result;

        if (!gpu)
                return make(m);
        pthread_mutex_lock(&lock);
        result = make_charged(gpu, m);
        pthread_mutex_unlock(&lock);
        __atomic_store_n(&has_made, true, __ATOMIC_RELAXED);
        return result;
}

CUresult cuCtxCreate_v2(CUcontext *ret_context, unsigned int flags, CUdevice device)
{
        IN_CALL;

        return create(
                &(struct making){ .kind = CREATE_V2, .ret = ret_context, .flags = flags, .device = device });
}

CUresult cuCtxCreate_v3(CUcontext *ret_context, CUexecAffinityParam *parameters, int n_parameters,
                        unsigned int flags, CUdevice device)
{
        IN_CALL;

        return create(&(struct making){ .kind = CREATE_V3,
                                        .ret = ret_context,
                                        .parameters = parameters,
                                        .n_parameters = n_parameters,
                                        .flags = flags,
                                        .device = device });
}

CUresult cuCtxCreate_v4(CUcontext *ret_context, CUctxCreateParams *parameters, unsigned int flags,
                        CUdevice device)
{
        IN_CALL;

        return create(&(struct making){ .kind = CREATE_V4,
                                        .ret = ret_context,
                                        .parameters = parameters,
                                        .flags = flags,
                                        .device = device });
}
