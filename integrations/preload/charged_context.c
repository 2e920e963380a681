/* Charges of contexts; see charged_context.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * One context of a GPU is made or released at a time, so that what is measured is its own. Another thread's memory of that
 * moment counts twice until the context ends.
 *
 * Invariant: while gpu->primary is set, the primary context is charged, or need not be. */
#include "integrations/preload/charged_context.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "device/nvml.h"
#include "integrations/preload/charge.h"
#include "integrations/preload/outside.h"

#define UNKNOWN UINT64_MAX
#define OFF     UINT64_MAX

enum kind { PRIMARY, CREATE, CREATE_V2, CREATE_V3, CREATE_V4, GREEN };

/* The arguments of a function that makes a context. */
struct making {
        enum kind kind;
        CUcontext *ret;
        CUgreenCtx *ret_green;       /* GREEN */
        CUdevResourceDesc resources; /* the same */
        void *parameters;
        int n_parameters;
        unsigned int flags;
        CUdevice device;
};

static bool has_made;            /* atomic: the program, a context of its own */
static struct nvml *opened_nvml; /* atomic; NULL: not yet, or there is none */

/* ---- sizes -------------------------------------------------------------------------- */

/* What a context is charged where it cannot be measured. OFF: none is charged. */
static uint64_t default_bytes(const struct gpu *gpu)
{
        const char *text = getenv("BFC_CONTEXT");
        char *unit;
        uint64_t n;

        if (!text || !*text)
                return gpu->context_bytes;
        if (strcmp(text, "off") == 0)
                return OFF;
        if (strcmp(text, "measured") == 0)
                return 0;
        errno = 0;
        n = strtoull(text, &unit, 10);
        if (strcmp(unit, "GiB") == 0 && n < 1 << 20)
                return n << 30;
        if (strcmp(unit, "MiB") == 0 && n < 1 << 30)
                return n << 20;
        if (*unit || unit == text || *text == '-' || errno != 0 || n > UINT64_C(1) << 50) {
                broker_say(
                        "BFC_CONTEXT=%s is no size, as 512MiB, and neither \"measured\" nor \"off\"; what bfcd's "
                        "configuration says applies",
                        text);
                return gpu->context_bytes;
        }
        return n;
}

/* NULL: there is none, or it is not needed. Without a lock: the dynamic loader has one, under which constructors of other
 * libraries may make contexts. */
static struct nvml *open_nvml(const struct gpu *gpu)
{
        struct nvml *found = __atomic_load_n(&opened_nvml, __ATOMIC_ACQUIRE), *other = NULL;

        if (found || default_bytes(gpu) == OFF || nvml_open(&found) < 0 ||
            __atomic_compare_exchange_n(&opened_nvml, &other, found, false, __ATOMIC_ACQ_REL,
                                        __ATOMIC_ACQUIRE))
                return found;
        nvml_close(found);
        return other;
}

/* Of this process. UNKNOWN also in a PID namespace of its own. */
static uint64_t measure(struct nvml *nvml, const struct gpu *gpu)
{
        const char *uuid = gpu->uuid;
        const struct nvml_use *own;
        struct nvml_use *uses;
        uint64_t n_bytes = UNKNOWN;
        size_t n_uses;

        if (!nvml)
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
        case CREATE:
                return real_cuCtxCreate(m->ret, m->flags, m->device);
        case CREATE_V2:
                return real_cuCtxCreate_v2(m->ret, m->flags, m->device);
        case CREATE_V3:
                return real_cuCtxCreate_v3(m->ret, m->parameters, m->n_parameters, m->flags, m->device);
        case CREATE_V4:
                return real_cuCtxCreate_v4(m->ret, m->parameters, m->flags, m->device);
        case GREEN:
                return real_cuGreenCtxCreate(m->ret_green, m->resources, m->device, m->flags);
        default:
                return real_cuDevicePrimaryCtxRetain(m->ret, m->device);
        }
}

static void unmake(const struct making *m)
{
        if (m->kind == GREEN) {
                real_cuGreenCtxDestroy(*m->ret_green);
                *m->ret_green = NULL;
                return;
        }
        if (m->kind == PRIMARY)
                real_cuDevicePrimaryCtxRelease_v2(m->device);
        else
                real_cuCtxDestroy_v2(*m->ret);
        *m->ret = NULL;
}

static uint64_t key_of(const struct making *m)
{
        return (uint64_t)(m->kind == GREEN ? (uintptr_t)*m->ret_green : (uintptr_t)*m->ret);
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

/* What has come with the context. after: by NVML. */
static uint64_t needed(uint64_t n_charged, uint64_t before, uint64_t after)
{
        if (after == UNKNOWN)
                return n_charged;
        if (before == UNKNOWN)
                return after;
        return after > before ? after - before : 0; /* it was there */
}

/* What the context takes is measured when it is there. The lock is held. */
static CUresult make_charged(struct gpu *gpu, struct nvml *nvml, const struct making *m)
{
        struct outside charged = { .gpu = gpu, .is_charged = true };
        uint64_t n_default = default_bytes(gpu), n_needed, before;
        uint64_t n_charged = m->kind == GREEN ? 0 : n_default; /* it has no context of its own */
        CUresult result;
        int r;

        if (n_default == OFF)
                return make(m);
        r = n_charged > 0 ? charge_take(gpu, n_charged) : 0;
        if (r == -ENOTSUP) /* a partition that preallocates, or an older daemon */
                return make(m);
        if (r < 0)
                return refuse(gpu, m, n_charged, r);
        before = measure(nvml, gpu);
        result = make(m);
        if (result != CUDA_SUCCESS) {
                charge_give(gpu, n_charged);
                return result;
        }
        n_needed = needed(n_charged, before, measure(nvml, gpu));
        if (n_needed > n_charged)
                r = charge_take(gpu, n_needed - n_charged);
        else
                charge_give(gpu, n_charged - n_needed);
        if (r == -ENOTSUP)
                return CUDA_SUCCESS;
        if (r < 0) {
                unmake(m);
                charge_give(gpu, n_charged);
                return refuse(gpu, m, n_needed, r);
        }
        charged.n_bytes = n_needed;
        return outside_end(&charged, result, m->kind == GREEN ? OUTSIDE_GREEN : OUTSIDE_CONTEXT, key_of(m));
}

/* ---- primary contexts -------------------------------------------------------------------- */

static bool has_ended(CUdevice device)
{
        unsigned int flags;
        int is_active;

        return cuDevicePrimaryCtxGetState(device, &flags, &is_active) == CUDA_SUCCESS && !is_active;
}

/* NULL also where the driver will give an error. */
static struct gpu *gpu_of(CUdevice device)
{
        unsigned int flags;
        int is_active;

        return cuDevicePrimaryCtxGetState(device, &flags, &is_active) == CUDA_SUCCESS ? broker_gpu(device)
                                                                                      : NULL;
}

/* It has ended, with what it had at the mark. The next one is charged again. The lock is held. */
static void forget_primary(struct gpu *gpu, uint64_t mark)
{
        if (gpu->primary)
                outside_forget(gpu->primary, mark);
        __atomic_store_n(&gpu->primary, NULL, __ATOMIC_RELEASE);
}

/* The lock is held. */
static CUresult retain_locked(struct gpu *gpu, struct nvml *nvml, const struct making *m)
{
        CUresult result;

        if (gpu->primary && has_ended(m->device)) /* by a release of the library */
                forget_primary(gpu, outside_mark());
        if (gpu->primary)
                return make(m);
        result = make_charged(gpu, nvml, m);
        if (result == CUDA_SUCCESS)
                __atomic_store_n(&gpu->primary, *m->ret, __ATOMIC_RELEASE);
        return result;
}

static CUresult retain(struct gpu *gpu, const struct making *m)
{
        struct nvml *nvml = open_nvml(gpu);
        CUresult result;

        pthread_mutex_lock(&gpu->contexts);
        result = retain_locked(gpu, nvml, m);
        pthread_mutex_unlock(&gpu->contexts);
        return result;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *ret_context, CUdevice device)
{
        const struct making m = { .kind = PRIMARY, .ret = ret_context, .device = device };
        IN_CALL;
        struct gpu *gpu = ret_context ? gpu_of(device) : NULL;

        return gpu ? retain(gpu, &m) : make(&m);
}

CUresult context_release(struct gpu *gpu)
{
        CUresult result;
        uint64_t mark;

        pthread_mutex_lock(&gpu->contexts);
        mark = outside_mark();
        result = real_cuDevicePrimaryCtxRelease_v2(gpu->device);
        if (has_ended(gpu->device))
                forget_primary(gpu, mark);
        pthread_mutex_unlock(&gpu->contexts);
        return result;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
        IN_CALL;
        struct gpu *gpu = gpu_of(device);

        return gpu ? context_release(gpu) : real_cuDevicePrimaryCtxRelease_v2(device);
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device)
{
        return cuDevicePrimaryCtxRelease_v2(device);
}

CUresult context_make_primary(struct gpu *gpu)
{
        CUcontext context;
        const struct making m = { .kind = PRIMARY, .ret = &context, .device = gpu->device };
        struct nvml *nvml;
        CUresult result = CUDA_SUCCESS;

        if (__atomic_load_n(&gpu->primary, __ATOMIC_ACQUIRE))
                return CUDA_SUCCESS;
        nvml = open_nvml(gpu);
        if (__atomic_load_n(&has_made, __ATOMIC_RELAXED) && default_bytes(gpu) != OFF)
                broker_say(
                        "GPU %d: the program has made a CUDA context of its own, and memory of bfcd needs the "
                        "primary one beside it; both are charged",
                        (int)gpu->device);
        pthread_mutex_lock(&gpu->contexts);
        if (!gpu->primary) {
                result = retain_locked(gpu, nvml, &m);
                gpu->is_retained = result == CUDA_SUCCESS;
        }
        pthread_mutex_unlock(&gpu->contexts);
        return result;
}

CUresult context_client(struct gpu *gpu, bfc_client **ret)
{
        CUresult result = broker_client_to_ask(gpu, ret);

        return result == CUDA_SUCCESS ? context_make_primary(gpu) : result;
}

static CUresult charge_for_library(CUdevice device)
{
        IN_CALL;
        struct gpu *gpu = gpu_of(device);

        return gpu ? context_make_primary(gpu) : CUDA_SUCCESS;
}

CUresult bfc_preload_charge_context(CUdevice device)
{
        return broker_is_in_call() ? CUDA_SUCCESS : charge_for_library(device);
}

void context_drop_primary(struct gpu *gpu)
{
        if (gpu->is_retained)
                (void)context_release(gpu);
        gpu->is_retained = false;
}

void context_was_reset(struct gpu *gpu)
{
        pthread_mutex_lock(&gpu->contexts);
        forget_primary(gpu, outside_mark());
        pthread_mutex_unlock(&gpu->contexts);
}

/* ---- contexts of the program ---------------------------------------------------------------- */

static CUresult create_in(struct gpu *gpu, const struct making *m)
{
        struct nvml *nvml = open_nvml(gpu);
        CUresult result;

        pthread_mutex_lock(&gpu->contexts);
        result = make_charged(gpu, nvml, m);
        pthread_mutex_unlock(&gpu->contexts);
        return result;
}

static CUresult create(const struct making *m)
{
        struct gpu *gpu = m->ret ? gpu_of(m->device) : NULL;
        CUresult result = gpu ? create_in(gpu, m) : make(m);

        if (gpu && result == CUDA_SUCCESS)
                __atomic_store_n(&has_made, true, __ATOMIC_RELAXED);
        return result;
}

/* Of CUDA before 3.2. */
CUresult cuCtxCreate(CUcontext *ret_context, unsigned int flags, CUdevice device)
{
        IN_CALL;

        return create(
                &(struct making){ .kind = CREATE, .ret = ret_context, .flags = flags, .device = device });
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

/* The driver makes the primary context for it. */
CUresult cuGreenCtxCreate(CUgreenCtx *ret_context, CUdevResourceDesc resources, CUdevice device,
                          unsigned int flags)
{
        CUcontext context;
        const struct making primary = { .kind = PRIMARY, .ret = &context, .device = device };
        const struct making m = { .kind = GREEN,
                                  .ret_green = ret_context,
                                  .resources = resources,
                                  .flags = flags,
                                  .device = device };
        IN_CALL;
        struct gpu *gpu = ret_context ? gpu_of(device) : NULL;
        CUresult result;

        if (!gpu)
                return make(&m);
        result = retain(gpu, &primary);
        if (result != CUDA_SUCCESS)
                return result;
        result = create_in(gpu, &m);
        (void)context_release(gpu);
        return result;
}

/* The primary context may end with it. */
CUresult cuGreenCtxDestroy(CUgreenCtx context)
{
        uint64_t mark = outside_mark();
        IN_CALL;
        struct outside_entry *entry = outside_take(OUTSIDE_GREEN, (uint64_t)(uintptr_t)context);
        struct gpu *gpu = outside_gpu(entry);
        CUresult result = outside_took(entry, real_cuGreenCtxDestroy(context));

        if (!gpu)
                return result;
        pthread_mutex_lock(&gpu->contexts);
        if (has_ended(gpu->device))
                forget_primary(gpu, mark);
        pthread_mutex_unlock(&gpu->contexts);
        return result;
}
