/* See work.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/integration/work.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <unistd.h>

#include "tests/gpu/driver.h"
#include "tests/host_stream.h"
#include "tests/integration/harness.h"

struct job {
        struct job *next;
        void (*function)(void *data);
        void *data;
};

struct work_stream {
        CUstream cuda;
        uintptr_t number;
        pthread_t thread;
        pthread_mutex_t lock;
        pthread_cond_t changed;
        struct job *first, **last;
        size_t n_left;
        bool is_captured, is_ending;
};

static unsigned delay;

/* ---- the driver -------------------------------------------------------------- */

/* The threads of a test begin without a context. */
static void enter(void)
{
        CUcontext context = NULL;

        if (!cu.cuCtxGetCurrent || cu.cuCtxGetCurrent(&context) != CUDA_SUCCESS || !context)
                REQUIRE(gpu_start(0, &context) == CUDA_SUCCESS, "no driver");
}

void work_setup(unsigned delay_us)
{
        char text[16];

        delay = delay_us;
        if (rig_device() == ON_HOST)
                return;
        snprintf(text, sizeof(text), "%u", delay_us);
        setenv("FAKE_CUDA_STREAM_DELAY_US", text, 1);
        enter();
}

/* ---- a thread that works -------------------------------------------------------- */

static void *run(void *arg)
{
        struct work_stream *s = arg;
        struct job *job;

        pthread_mutex_lock(&s->lock);
        for (;;) {
                while (!s->first && !s->is_ending)
                        pthread_cond_wait(&s->changed, &s->lock);
                job = s->first;
                if (!job)
                        break;
                s->first = job->next;
                if (!s->first)
                        s->last = &s->first;
                pthread_mutex_unlock(&s->lock);
                usleep(delay);
                job->function(job->data);
                free(job);
                host_stream_end(s->number);
                pthread_mutex_lock(&s->lock);
                s->n_left--;
                pthread_cond_broadcast(&s->changed);
        }
        pthread_mutex_unlock(&s->lock);
        return NULL;
}

struct work_stream *work_stream_new(void)
{
        struct work_stream *s = calloc(1, sizeof(*s));

        REQUIRE(s, "no memory");
        if (rig_device() != ON_HOST) {
                enter();
                REQUIRE(cu.cuStreamCreate(&s->cuda, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS, "a stream");
                s->number = (uintptr_t)s->cuda;
                return s;
        }
        s->number = (uintptr_t)s;
        s->last = &s->first;
        pthread_mutex_init(&s->lock, NULL);
        pthread_cond_init(&s->changed, NULL);
        REQUIRE(pthread_create(&s->thread, NULL, run, s) == 0, "a thread");
        return s;
}

struct work_stream *work_stream_free(struct work_stream *s)
{
        if (!s)
                return NULL;
        if (s->cuda) {
                work_wait(s);
                cu.cuStreamDestroy_v2(s->cuda);
        } else {
                pthread_mutex_lock(&s->lock);
                s->is_ending = true;
                pthread_cond_broadcast(&s->changed);
                pthread_mutex_unlock(&s->lock);
                pthread_join(s->thread, NULL);
        }
        free(s);
        return NULL;
}

uintptr_t work_stream_number(const struct work_stream *s)
{
        return s->number;
}

void work_put(struct work_stream *s, void (*function)(void *data), void *data)
{
        struct job *job;

        if (s->cuda) {
                enter();
                REQUIRE(cu.cuLaunchHostFunc(s->cuda, function, data) == CUDA_SUCCESS, "work");
                return;
        }
        job = calloc(1, sizeof(*job));
        REQUIRE(job, "no memory");
        *job = (struct job){ NULL, function, data };
        pthread_mutex_lock(&s->lock);
        if (!s->is_captured) {
                host_stream_begin(s->number);
                *s->last = job;
                s->last = &job->next;
                s->n_left++;
                job = NULL;
        }
        pthread_cond_broadcast(&s->changed);
        pthread_mutex_unlock(&s->lock);
        free(job);
}

void work_wait(struct work_stream *s)
{
        if (s->cuda) {
                enter();
                REQUIRE(cu.cuStreamSynchronize(s->cuda) == CUDA_SUCCESS, "waiting");
                return;
        }
        pthread_mutex_lock(&s->lock);
        while (s->n_left > 0)
                pthread_cond_wait(&s->changed, &s->lock);
        pthread_mutex_unlock(&s->lock);
}

void work_begin_capture(struct work_stream *s)
{
        if (s->cuda) {
                enter();
                REQUIRE(cu.cuStreamBeginCapture_v2(s->cuda, CU_STREAM_CAPTURE_MODE_GLOBAL) == CUDA_SUCCESS,
                        "a capture");
                return;
        }
        pthread_mutex_lock(&s->lock);
        s->is_captured = true;
        host_stream_begin_capture(s->number);
        pthread_mutex_unlock(&s->lock);
}

int work_end_capture(struct work_stream *s)
{
        CUgraph graph = NULL;

        if (s->cuda) {
                enter();
                if (cu.cuStreamEndCapture(s->cuda, &graph) != CUDA_SUCCESS)
                        return -1;
                cu.cuGraphDestroy(graph);
                return 0;
        }
        pthread_mutex_lock(&s->lock);
        s->is_captured = false;
        host_stream_end_capture(s->number);
        pthread_mutex_unlock(&s->lock);
        return 0;
}
