/* The program's word that it is idle; see idle.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "integrations/preload/idle.h"

#include <errno.h>
#include <pthread.h>
#include <time.h>

#include "integrations/preload/driver.h"
#include "integrations/preload/lent.h"

static pthread_mutex_t turns =
        PTHREAD_MUTEX_INITIALIZER; /* taken before calls are stopped; also while memory wakes */
static unsigned n_begun;

static void in_child(void)
{
        turns = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
        n_begun = 0;
}

static void __attribute__((constructor)) watch_forks(void)
{
        pthread_atfork(NULL, NULL, in_child);
}

/* ---- begin ------------------------------------------------------------------------ */

static bool finish_current(void)
{
        CUcontext context = NULL;

        return cuCtxGetCurrent(&context) != CUDA_SUCCESS || !context || cuCtxSynchronize() == CUDA_SUCCESS;
}

/* The primary context, in which bfcd's library has all memory. */
static bool finish_primary(CUdevice device)
{
        CUcontext context, top;
        unsigned int flags;
        int is_active = 0;
        bool is_done;

        if (cuDevicePrimaryCtxGetState(device, &flags, &is_active) != CUDA_SUCCESS || !is_active ||
            cuDevicePrimaryCtxRetain(&context, device) != CUDA_SUCCESS)
                return true;
        is_done = cuCtxPushCurrent_v2(context) == CUDA_SUCCESS;
        if (is_done) {
                is_done = cuCtxSynchronize() == CUDA_SUCCESS;
                cuCtxPopCurrent_v2(&top);
        }
        cuDevicePrimaryCtxRelease_v2(device);
        return is_done;
}

/* Calls are not stopped meanwhile: the work may wait for a thread that is in one. */
static bool finish_all(void)
{
        bool is_done = finish_current();
        int n = 0;

        if (cuDeviceGetCount(&n) != CUDA_SUCCESS) /* before cuInit() */
                return true;
        for (CUdevice device = 0; device < n && is_done; device++)
                is_done = finish_primary(device);
        return is_done;
}

int64_t bfc_idle_begin(void)
{
        int64_t n_bytes = -EBUSY;

        pthread_mutex_lock(&turns);
        if (finish_all()) {
                (void)broker_stop_calls(-1);
                n_bytes = lent_has_any() && driver_stop_bindings() ? (int64_t)lent_sleep() : 0;
                broker_resume_calls();
                n_begun++;
        }
        pthread_mutex_unlock(&turns);
        return n_bytes;
}

/* ---- end -------------------------------------------------------------------------- */

/* Its client does not end meanwhile: idle_stop() waits for its turn. */
static int wake_all(uint32_t wait_ms)
{
        struct gpu *gpu;
        int r = 0;

        while (r == 0 && (gpu = lent_sleeping_gpu())) {
                r = bfc_use_begin_tag(__atomic_load_n(&gpu->client, __ATOMIC_ACQUIRE), LENT_TAG, wait_ms);
                if (r < 0) {
                        if (r != -EINTR)
                                broker_say("memory of this program cannot wake yet: %s", bfc_last_error());
                        continue;
                }
                (void)broker_stop_calls(-1);
                r = lent_wake(gpu);
                broker_resume_calls();
        }
        return r;
}

int bfc_idle_end(uint32_t wait_ms)
{
        int r;

        pthread_mutex_lock(&turns);
        r = n_begun == 0 ? -EINVAL : n_begun > 1 ? 0 : wake_all(wait_ms);
        n_begun -= r == 0;
        pthread_mutex_unlock(&turns);
        return r;
}

static int64_t now_ms(void)
{
        struct timespec now;

        clock_gettime(CLOCK_MONOTONIC, &now);
        return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

bool idle_stop(void)
{
        int64_t until_ms, left_ms;
        int r;

        pthread_mutex_lock(&turns);
        until_ms = now_ms() + IDLE_WAIT_MS;
        do {
                left_ms = until_ms - now_ms();
                r = wake_all(left_ms > 0 ? (uint32_t)left_ms : 0);
        } while (r == -EINTR);
        return r == 0;
}

void idle_resume(void)
{
        pthread_mutex_unlock(&turns);
}
