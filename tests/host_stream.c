/* Streams of the host with work that a test adds; see host_stream.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Work is counted: n_given pieces so far, n_done of them complete. An event keeps n_given. A stream
 * that no test has used is in no list, and its events are complete. */
#include "tests/host_stream.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>

#include "device/backend.h"

struct host_stream {
        struct host_stream *next;
        uintptr_t number;
        uint64_t n_given, n_done;
        uint64_t n_suspended; /* what host_streams_finish() waits for */
        uint64_t id;
        bool is_captured, is_destroyed;
        int error;
};

struct device_event {
        uintptr_t stream;
        uint64_t at; /* passed when n_done is that */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER; /* work is done */
static struct host_stream *streams;
static unsigned n_events;  /* atomic */
static uint64_t n_queries; /* atomic */
static unsigned n_streams; /* atomic: spares jobs the lock */
static uint64_t n_ids;
static bool are_mortal;         /* of devices that are opened later */
static void (*on_finish)(void); /* before it waits */

/* ---- the tests' calls ------------------------------------------------------ */

static struct host_stream *stream_find(uintptr_t number)
{
        struct host_stream *s = streams;

        while (s && s->number != number)
                s = s->next;
        return s;
}

/* Out of memory ends the test. */
static struct host_stream *stream_get(uintptr_t number)
{
        struct host_stream *s = stream_find(number);

        if (s)
                return s;
        s = calloc(1, sizeof(*s));
        if (!s)
                abort();
        s->number = number;
        s->id = ++n_ids;
        s->next = streams;
        streams = s;
        __atomic_add_fetch(&n_streams, 1, __ATOMIC_RELEASE);
        return s;
}

void host_stream_begin(uintptr_t stream)
{
        struct host_stream *s;

        pthread_mutex_lock(&lock);
        s = stream_get(stream);
        if (!s->is_captured)
                s->n_given++;
        pthread_mutex_unlock(&lock);
}

void host_stream_end(uintptr_t stream)
{
        struct host_stream *s;

        pthread_mutex_lock(&lock);
        s = stream_get(stream);
        if (s->n_done < s->n_given)
                s->n_done++;
        pthread_cond_broadcast(&changed);
        pthread_mutex_unlock(&lock);
}

static void set_captured(uintptr_t stream, bool is_captured)
{
        pthread_mutex_lock(&lock);
        stream_get(stream)->is_captured = is_captured;
        pthread_mutex_unlock(&lock);
}

void host_stream_begin_capture(uintptr_t stream)
{
        set_captured(stream, true);
}

void host_stream_end_capture(uintptr_t stream)
{
        set_captured(stream, false);
}

void host_stream_destroy(uintptr_t stream)
{
        pthread_mutex_lock(&lock);
        stream_get(stream)->is_destroyed = true;
        pthread_mutex_unlock(&lock);
}

void host_stream_create(uintptr_t stream)
{
        struct host_stream *s;

        pthread_mutex_lock(&lock);
        s = stream_get(stream);
        s->is_destroyed = false;
        s->id = ++n_ids;
        pthread_mutex_unlock(&lock);
}

void host_streams_set_mortal(bool mortal, void (*fn)(void))
{
        are_mortal = mortal;
        on_finish = fn;
}

void host_stream_fail(uintptr_t stream, int error)
{
        pthread_mutex_lock(&lock);
        stream_get(stream)->error = error;
        pthread_mutex_unlock(&lock);
}

unsigned host_stream_n_events(void)
{
        return __atomic_load_n(&n_events, __ATOMIC_RELAXED);
}

uint64_t host_stream_n_queries(void)
{
        return __atomic_load_n(&n_queries, __ATOMIC_RELAXED);
}

void host_stream_reset(void)
{
        pthread_mutex_lock(&lock);
        for (struct host_stream *s = streams, *next; s; s = next) {
                next = s->next;
                free(s);
        }
        streams = NULL;
        __atomic_store_n(&n_streams, 0, __ATOMIC_RELEASE);
        pthread_mutex_unlock(&lock);
        host_streams_set_mortal(false, NULL);
}

/* ---- the device's part --------------------------------------------------- */

/* The stream's error; its counts where that is 0 and it has any. */
static int stream_look(uintptr_t number, struct host_stream *ret)
{
        const struct host_stream *s;

        *ret = (struct host_stream){ 0 };
        if (__atomic_load_n(&n_streams, __ATOMIC_ACQUIRE) == 0)
                return 0;
        pthread_mutex_lock(&lock);
        s = stream_find(number);
        if (s)
                *ret = *s;
        pthread_mutex_unlock(&lock);
        return ret->error;
}

static struct device_streams *host_streams_free(struct device_streams *d)
{
        free(d);
        return NULL;
}

/* A driver ends the process for a stream that was destroyed. */
static int stream_use(uintptr_t number, struct host_stream *ret)
{
        int r = stream_look(number, ret);

        if (ret->is_destroyed)
                abort();
        return r;
}

static int host_streams_captured(struct device_streams *d, uintptr_t stream, uint64_t *ret_id)
{
        struct host_stream s;
        int r = stream_use(stream, &s);

        (void)d;
        *ret_id = r == 0 && !s.is_captured ? s.id : 0;
        return r < 0 ? r : s.is_captured;
}

static int host_streams_record(struct device_streams *d, uintptr_t stream, struct device_event **event)
{
        struct host_stream s;
        int r = stream_use(stream, &s);

        (void)d;
        if (r < 0)
                return r;
        if (s.is_captured)
                return -EBUSY;
        if (!*event) {
                *event = malloc(sizeof(**event));
                if (!*event)
                        return -ENOMEM;
                __atomic_add_fetch(&n_events, 1, __ATOMIC_RELAXED);
        }
        **event = (struct device_event){ stream, s.n_given };
        return 0;
}

static int host_streams_query(struct device_streams *d, struct device_event *event)
{
        struct host_stream s;
        int r = stream_look(event->stream, &s);

        (void)d;
        __atomic_add_fetch(&n_queries, 1, __ATOMIC_RELAXED);
        if (r < 0)
                return r;
        return s.n_done >= event->at || s.n_given < event->at ? 0 : DEVICE_PENDING;
}

static struct device_event *host_streams_forget(struct device_streams *d, struct device_event *event)
{
        (void)d;
        if (event)
                __atomic_sub_fetch(&n_events, 1, __ATOMIC_RELAXED);
        free(event);
        return NULL;
}

/* Whether everything that was given by then is done. The lock is held. */
static bool all_done(void)
{
        for (const struct host_stream *s = streams; s; s = s->next)
                if (s->n_done < s->n_suspended)
                        return false;
        return true;
}

int host_streams_finish(void)
{
        int r = 0;

        if (__atomic_load_n(&n_streams, __ATOMIC_ACQUIRE) == 0)
                return 0;
        if (on_finish)
                on_finish();
        pthread_mutex_lock(&lock);
        for (struct host_stream *s = streams; s; s = s->next) {
                s->n_suspended = s->n_given;
                if (s->is_captured)
                        r = -EBUSY;
        }
        while (r == 0 && !all_done())
                pthread_cond_wait(&changed, &lock);
        pthread_mutex_unlock(&lock);
        return r;
}

static const struct device_streams_ops host_streams_ops = {
        .name = "host",
        .free = host_streams_free,
        .is_captured = host_streams_captured,
        .record = host_streams_record,
        .query = host_streams_query,
        .forget = host_streams_forget,
};

int host_streams_new(struct device_streams **ret)
{
        struct device_streams *d = malloc(sizeof(*d));

        if (!d)
                return -ENOMEM;
        *d = (struct device_streams){ .ops = &host_streams_ops, .are_permanent = !are_mortal };
        *ret = d;
        return 0;
}
