/* Memory of processes; see uses.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "keeper/uses.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "device/nvml.h"

struct answer {
        int result; /* -EAGAIN: there is none */
        struct nvml_use *uses;
        size_t n;
};

struct uses {
        char uuid[64];
        struct answer told; /* to the last question */
        struct nvml *nvml;  /* the thread's, while it is asking; NULL: not yet, or there is none */
        pthread_mutex_t lock;
        /* Under the lock. */
        bool is_asking, is_over; /* over: the thread frees all */
        struct answer next;
};

static void set_answer(struct answer *a, struct answer next)
{
        free(a->uses);
        *a = next;
}

static void destroy(struct uses *u)
{
        nvml_close(u->nvml);
        free(u->told.uses);
        free(u->next.uses);
        pthread_mutex_destroy(&u->lock);
        free(u);
}

/* This process has a context there. If NVML does not name it, its pids are of another PID namespace, and mean nothing to
 * bfcd. */
static struct answer ask(struct uses *u)
{
        const char *uuid = u->uuid;
        struct answer a = { .result = u->nvml ? 0 : nvml_open(&u->nvml) };

        if (a.result == 0)
                a.result = nvml_read(u->nvml, &uuid, 1, &a.uses, &a.n);
        if (a.result == 0 && !nvml_find_own(a.uses, a.n))
                a.result = -ENOENT;
        return a;
}

static void *run(void *userdata)
{
        struct uses *u = userdata;
        struct answer a = ask(u);
        bool is_over;

        pthread_mutex_lock(&u->lock);
        set_answer(&u->next, a);
        u->is_asking = false;
        is_over = u->is_over;
        pthread_mutex_unlock(&u->lock);
        if (is_over)
                destroy(u);
        return NULL;
}

/* Without a thread there is no answer to the next question. */
static void start(struct uses *u)
{
        pthread_attr_t attributes;
        pthread_t thread;

        if (pthread_attr_init(&attributes) != 0)
                return;
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        u->is_asking = pthread_create(&thread, &attributes, run, u) == 0;
        pthread_attr_destroy(&attributes);
}

static void take_answer(struct uses *u)
{
        pthread_mutex_lock(&u->lock);
        set_answer(&u->told, u->next);
        u->next = (struct answer){ .result = -EAGAIN };
        if (!u->is_asking)
                start(u);
        pthread_mutex_unlock(&u->lock);
}

int uses_read(struct uses *u, uint64_t pid, struct device_use ret[static DEVICE_USES], uint32_t *ret_n)
{
        uint32_t n = 0;

        if (pid == 0)
                take_answer(u);
        if (u->told.result < 0)
                return u->told.result;
        for (size_t i = 0; i < u->told.n && n < DEVICE_USES; i++)
                if (u->told.uses[i].pid > pid && u->told.uses[i].pid != (uint64_t)getpid())
                        ret[n++] = (struct device_use){ u->told.uses[i].pid, u->told.uses[i].n_bytes };
        *ret_n = n;
        return 0;
}

void uses_forget(struct uses *u)
{
        pthread_mutex_lock(&u->lock);
        set_answer(&u->next, (struct answer){ .result = -EAGAIN });
        set_answer(&u->told, (struct answer){ .result = -EAGAIN });
        pthread_mutex_unlock(&u->lock);
}

struct uses *uses_new(const char *uuid)
{
        struct uses *u = calloc(1, sizeof(*u));

        if (!u)
                return NULL;
        strncpy(u->uuid, uuid, sizeof(u->uuid) - 1);
        u->told.result = u->next.result = -EAGAIN;
        pthread_mutex_init(&u->lock, NULL);
        return u;
}

struct uses *uses_free(struct uses *u)
{
        bool is_asking;

        if (!u)
                return NULL;
        pthread_mutex_lock(&u->lock);
        is_asking = u->is_asking;
        u->is_over = true;
        pthread_mutex_unlock(&u->lock);
        if (!is_asking)
                destroy(u);
        return NULL;
}
