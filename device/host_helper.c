/* A second thread for copies; see host_helper.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "device/host_helper.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>

#include "device/host_pages.h"

struct host_helper {
        pthread_t thread;
        pthread_mutex_t mutex; /* guards what follows */
        pthread_cond_t changed;
        bool has_work, stop;
        int (*part)(const void *arg, uint64_t begin, uint64_t end);
        const void *arg;
        uint64_t begin, end;
        int result;
};

static void *helper_main(void *userdata)
{
        struct host_helper *h = userdata;

        pthread_mutex_lock(&h->mutex);
        while (!h->stop) {
                int r;

                if (!h->has_work) {
                        pthread_cond_wait(&h->changed, &h->mutex);
                        continue;
                }
                pthread_mutex_unlock(&h->mutex);
                r = h->part(h->arg, h->begin, h->end);
                pthread_mutex_lock(&h->mutex);
                h->result = r;
                h->has_work = false;
                pthread_cond_broadcast(&h->changed);
        }
        pthread_mutex_unlock(&h->mutex);
        return NULL;
}

static bool has_processors(void)
{
        cpu_set_t set;

        return sched_getaffinity(0, sizeof(set), &set) < 0 || CPU_COUNT(&set) > 1;
}

struct host_helper *host_helper_new(void)
{
        struct host_helper *h = has_processors() ? calloc(1, sizeof(*h)) : NULL;
        sigset_t all, before;
        int r;

        if (!h)
                return NULL;
        pthread_mutex_init(&h->mutex, NULL);
        pthread_cond_init(&h->changed, NULL);
        sigfillset(&all); /* signals belong to other threads */
        pthread_sigmask(SIG_SETMASK, &all, &before);
        r = pthread_create(&h->thread, NULL, helper_main, h);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        if (r == 0)
                return h;
        pthread_cond_destroy(&h->changed);
        pthread_mutex_destroy(&h->mutex);
        free(h);
        return NULL;
}

struct host_helper *host_helper_free(struct host_helper *h)
{
        if (!h)
                return NULL;
        pthread_mutex_lock(&h->mutex);
        h->stop = true;
        pthread_cond_broadcast(&h->changed);
        pthread_mutex_unlock(&h->mutex);
        pthread_join(h->thread, NULL);
        pthread_cond_destroy(&h->changed);
        pthread_mutex_destroy(&h->mutex);
        free(h);
        return NULL;
}

int host_helper_run(struct host_helper *h, int (*part)(const void *arg, uint64_t begin, uint64_t end),
                    const void *arg, uint64_t n_bytes)
{
        uint64_t half = (n_bytes / 2 + HOST_HUGE_BYTES - 1) / HOST_HUGE_BYTES * HOST_HUGE_BYTES;
        int r, r_helper;

        if (!h || half >= n_bytes)
                return part(arg, 0, n_bytes);
        pthread_mutex_lock(&h->mutex);
        h->part = part;
        h->arg = arg;
        h->begin = half;
        h->end = n_bytes;
        h->has_work = true;
        pthread_cond_broadcast(&h->changed);
        pthread_mutex_unlock(&h->mutex);
        r = part(arg, 0, half);
        pthread_mutex_lock(&h->mutex);
        while (h->has_work)
                pthread_cond_wait(&h->changed, &h->mutex);
        r_helper = h->result;
        pthread_mutex_unlock(&h->mutex);
        return r < 0 ? r : r_helper;
}
