/* Memory that the driver keeps; see reserved.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A pool gives memory back whenever the program waits for a stream, which is not seen here. So what is charged is compared
 * with what there is when that matters: after a call that takes memory, where a charge was refused, and where others need
 * memory.
 *
 * Invariant: what is charged for memory is at least what the driver has of it, as far as the driver takes no more than is
 * asked for. */
#include "integrations/preload/reserved.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>

#include "integrations/preload/charge.h"

static LIST_HEAD(, reserved) all = LIST_HEAD_INITIALIZER(all);
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic unsigned n_trims;

static void in_child(void)
{
        lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
        LIST_INIT(&all);
}

static void __attribute__((constructor)) watch_forks(void)
{
        pthread_atfork(NULL, NULL, in_child);
}

static bool read_bytes(const struct reserved *r, cuuint64_t *ret)
{
        if (r->pool)
                return real_cuMemPoolGetAttribute(r->pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, ret) ==
                       CUDA_SUCCESS;
        return cuDeviceGetGraphMemAttribute(r->device, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, ret) ==
               CUDA_SUCCESS;
}

/* What is charged and is not there any more. */
static uint64_t settle_locked(struct reserved *r)
{
        cuuint64_t n_bytes;
        uint64_t n_more;

        if (r->n_charged == 0 || !read_bytes(r, &n_bytes) || n_bytes + r->n_coming >= r->n_charged)
                return 0;
        n_more = r->n_charged - n_bytes - r->n_coming;
        r->n_charged -= n_more;
        return n_more;
}

/* While it is relaxed, the driver ends no capture for what this thread does. */
static void swap_capture_mode(CUstreamCaptureMode *mode)
{
        (void)cuThreadExchangeStreamCaptureMode(mode);
}

/* What is not used can only be taken away when the work before it is done. */
static bool wait_for(CUstream stream)
{
        CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
        CUresult result;

        swap_capture_mode(&mode);
        result = cuStreamSynchronize(stream);
        swap_capture_mode(&mode);
        return result == CUDA_SUCCESS;
}

static void list_locked(struct reserved *r)
{
        if (!r->is_listed)
                LIST_INSERT_HEAD(&all, r, link);
        r->is_listed = true;
}

int reserved_begin(struct reserved *r, uint64_t n_most, CUstream stream)
{
        int result = charge_take(r->gpu, n_most);

        if ((result == -ENOMEM || result == -EDQUOT) && wait_for(stream))
                result = charge_take(r->gpu, n_most);
        if (result < 0)
                return result;
        pthread_mutex_lock(&lock);
        list_locked(r);
        r->n_charged += n_most;
        r->n_coming += n_most;
        pthread_mutex_unlock(&lock);
        return 0;
}

void reserved_end(struct reserved *r, uint64_t n_most)
{
        cuuint64_t n_bytes = 0;
        uint64_t n_more, n_missing = 0;

        pthread_mutex_lock(&lock);
        r->n_coming -= n_most;
        n_more = settle_locked(r);
        if (r->n_coming == 0 && read_bytes(r, &n_bytes) && n_bytes > r->n_charged)
                n_missing = n_bytes - r->n_charged;
        pthread_mutex_unlock(&lock);
        if (n_more > 0)
                charge_give(r->gpu, n_more);
        /* The driver has taken more than was asked for. */
        if (n_missing > 0 && charge_take(r->gpu, n_missing) == 0) {
                pthread_mutex_lock(&lock);
                r->n_charged += n_missing;
                pthread_mutex_unlock(&lock);
        }
}

void reserved_hide(struct reserved *r)
{
        pthread_mutex_lock(&lock);
        if (r->is_listed)
                LIST_REMOVE(r, link);
        r->is_listed = false;
        pthread_mutex_unlock(&lock);
}

void reserved_hidden(struct reserved *r, bool has_ended)
{
        uint64_t n = 0;

        pthread_mutex_lock(&lock);
        if (has_ended) {
                n = r->n_charged;
                r->n_charged = 0;
        } else if (r->n_charged > 0) {
                list_locked(r);
        }
        pthread_mutex_unlock(&lock);
        if (n > 0)
                charge_give(r->gpu, n);
}

CUresult reserved_trim_graphs(CUdevice device)
{
        atomic_fetch_add(&n_trims, 1);
        return real_cuDeviceGraphMemTrim(device);
}

unsigned reserved_trims(void)
{
        return atomic_load(&n_trims);
}

static bool settle_all(struct gpu *gpu, bool trims)
{
        CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
        struct reserved *r;
        uint64_t n = 0;

        if (trims)
                swap_capture_mode(&mode);
        pthread_mutex_lock(&lock);
        LIST_FOREACH(r, &all, link)
        {
                if (r->gpu != gpu)
                        continue;
                if (trims && r->n_charged > 0 && r->pool)
                        real_cuMemPoolTrimTo(r->pool, 0);
                else if (trims && r->n_charged > 0)
                        reserved_trim_graphs(r->device);
                n += settle_locked(r);
        }
        pthread_mutex_unlock(&lock);
        if (trims)
                swap_capture_mode(&mode);
        if (n > 0)
                charge_give(gpu, n);
        return n > 0;
}

void reserved_settle(struct gpu *gpu)
{
        (void)settle_all(gpu, false);
}

bool reserved_trim(struct gpu *gpu)
{
        return settle_all(gpu, true);
}
