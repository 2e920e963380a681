/* Queues of work, each with a thread that does it, late: what streams are.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Every job waits FAKE_CUDA_STREAM_DELAY_US before it runs, so that "not ready"
 * is something that tests see. What has been put in is known by its mark; an
 * order between streams (events, the default stream before and after all
 * blocking ones) is a job that waits for marks of jobs put in earlier, so there
 * can be no circle. Work whose memory is gone when its turn comes does nothing
 * and breaks the context with 700, as a real stray access would.
 *
 * Invariant: a mark's references are its job, the stream whose last job it is,
 * jobs that wait for it, events, and callers that wait. */
#include "tests/fake_cuda/fake.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct fake_mark {
        unsigned int n_refs;
        bool is_done;
};

struct fake_job {
        struct fake_job *next;
        struct fake_work work;
        bool has_work;
        struct fake_mark *mark;
        unsigned int n_after;
        struct fake_mark *after[];
};

pthread_mutex_t fake_stream_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER; /* any mark, any queue */
struct CUstream_st *fake_streams;

/* ---- marks, under the lock ----------------------------------------------- */

static struct fake_mark *mark_get(struct fake_mark *m)
{
        if (m)
                m->n_refs++;
        return m;
}

static void mark_put(struct fake_mark *m)
{
        if (m && --m->n_refs == 0)
                free(m);
}

static void mark_wait(struct fake_mark *m)
{
        mark_get(m);
        while (m && !m->is_done)
                pthread_cond_wait(&changed, &fake_stream_lock);
        mark_put(m);
}

/* Puts another mark where an event keeps one. */
void fake_mark_replace(struct fake_mark **at, struct fake_mark *m)
{
        pthread_mutex_lock(&fake_stream_lock);
        mark_put(*at);
        *at = m;
        pthread_mutex_unlock(&fake_stream_lock);
}

bool fake_mark_is_done(struct fake_mark **m)
{
        bool is_done;

        pthread_mutex_lock(&fake_stream_lock);
        is_done = !*m || (*m)->is_done;
        pthread_mutex_unlock(&fake_stream_lock);
        return is_done;
}

void fake_mark_wait(struct fake_mark **m)
{
        pthread_mutex_lock(&fake_stream_lock);
        mark_wait(*m);
        pthread_mutex_unlock(&fake_stream_lock);
}

/* ---- doing the work ------------------------------------------------------ */

/* Whole pages are zeroed by removing them, which costs no page faults. */
static bool is_zeroed(const struct fake_work *w)
{
        return w->value == 0 && w->n_bytes % 4096 == 0 && madvise(w->to, w->n_bytes, MADV_REMOVE) == 0;
}

static void work_do(CUcontext c, const struct fake_work *w)
{
        bool is_allowed;

        if (w->function) {
                w->function(w->data);
                return;
        }
        pthread_rwlock_rdlock(&fake_memory_lock);
        is_allowed = (!w->is_to_device || fake_range_allows((uintptr_t)w->to, w->n_bytes, true)) &&
                     (!w->is_from_device || fake_range_allows((uintptr_t)w->from, w->n_bytes, false));
        if (is_allowed && w->from)
                memmove(w->to, w->from, w->n_bytes);
        else if (is_allowed && !is_zeroed(w))
                memset(w->to, w->value, w->n_bytes);
        pthread_rwlock_unlock(&fake_memory_lock);
        if (!is_allowed)
                fake_context_stick(c, CUDA_ERROR_ILLEGAL_ADDRESS);
}

/* With the lock held, which it gives up meanwhile. */
static void job_run(struct CUstream_st *s, struct fake_job *j)
{
        for (unsigned int i = 0; i < j->n_after; i++) {
                mark_wait(j->after[i]);
                mark_put(j->after[i]);
        }
        pthread_mutex_unlock(&fake_stream_lock);
        if (fake.stream_delay_us > 0)
                usleep(fake.stream_delay_us);
        if (j->has_work)
                work_do(s->context, &j->work);
        pthread_mutex_lock(&fake_stream_lock);
        j->mark->is_done = true;
        mark_put(j->mark);
        free(j);
        pthread_cond_broadcast(&changed);
}

/* It was closed, and has nothing left to do. */
static void stream_end(struct CUstream_st *s)
{
        struct CUstream_st **at = &fake_streams;

        while (*at != s)
                at = &(*at)->next;
        *at = s->next;
        mark_put(s->mark);
        free(s);
        pthread_cond_broadcast(&changed);
}

static void *stream_thread(void *data)
{
        struct CUstream_st *s = data;

        pthread_mutex_lock(&fake_stream_lock);
        for (;;) {
                struct fake_job *j = s->first;

                if (j) {
                        s->first = j->next;
                        if (!s->first)
                                s->last = &s->first;
                        job_run(s, j);
                } else if (s->is_closing) {
                        stream_end(s);
                        break;
                } else {
                        pthread_cond_wait(&changed, &fake_stream_lock);
                }
        }
        pthread_mutex_unlock(&fake_stream_lock);
        return NULL;
}

/* Signals are the program's business, not this thread's. */
static bool stream_start(struct CUstream_st *s)
{
        sigset_t all, before;

        if (s->has_thread)
                return true;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        s->has_thread = pthread_create(&s->thread, NULL, stream_thread, s) == 0;
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        return s->has_thread;
}

/* ---- putting work in ----------------------------------------------------- */

/* The default stream comes after what all blocking streams have been given so
 * far; they come after what it has been given. */
static void order_streams(const struct CUstream_st *s, struct fake_job *j)
{
        CUstream first = __atomic_load_n(&s->context->default_stream, __ATOMIC_RELAXED);

        if (s != first) {
                if (first && first->mark && !(s->flags & CU_STREAM_NON_BLOCKING))
                        j->after[j->n_after++] = mark_get(first->mark);
                return;
        }
        for (struct CUstream_st *other = fake_streams; other; other = other->next)
                if (other != s && other->context == s->context && !(other->flags & CU_STREAM_NON_BLOCKING) &&
                    other->mark)
                        j->after[j->n_after++] = mark_get(other->mark);
}

static CUresult put_locked(struct CUstream_st *s, const struct fake_work *work, struct fake_mark *after)
{
        struct fake_mark *m = calloc(1, sizeof(*m));
        unsigned int n_streams = 0;
        struct fake_job *j;

        for (struct CUstream_st *other = fake_streams; other; other = other->next)
                n_streams++;
        j = calloc(1, sizeof(*j) + (n_streams + 1) * sizeof(j->after[0]));
        if (!m || !j || !stream_start(s)) {
                free(m);
                free(j);
                return CUDA_ERROR_OUT_OF_MEMORY;
        }
        if (after)
                j->after[j->n_after++] = mark_get(after);
        order_streams(s, j);
        if (work) {
                j->work = *work;
                j->has_work = true;
        }
        j->mark = mark_get(m);
        mark_put(s->mark);
        s->mark = mark_get(m);
        *s->last = j;
        s->last = &j->next;
        pthread_cond_broadcast(&changed);
        return CUDA_SUCCESS;
}

CUresult fake_stream_put(CUstream s, const struct fake_work *work, bool wait)
{
        CUresult r;

        pthread_mutex_lock(&fake_stream_lock);
        r = fake_capture_allows_use(s);
        if (r != CUDA_SUCCESS) {
                pthread_mutex_unlock(&fake_stream_lock);
                return r;
        }
        if (s->capture == CU_STREAM_CAPTURE_STATUS_INVALIDATED)
                r = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        else if (s->capture == CU_STREAM_CAPTURE_STATUS_NONE) /* else it would be a node of the graph */
                r = put_locked(s, work, NULL);
        if (r == CUDA_SUCCESS && wait)
                mark_wait(s->mark);
        pthread_mutex_unlock(&fake_stream_lock);
        if (r == CUDA_SUCCESS && wait)
                r = __atomic_load_n(&s->context->sticky, __ATOMIC_RELAXED);
        return r;
}

/* A job without work, behind a mark of another stream; its own mark if wanted. */
CUresult fake_stream_put_marked(CUstream s, struct fake_mark *const *after, struct fake_mark **ret)
{
        CUresult r;

        pthread_mutex_lock(&fake_stream_lock);
        r = fake_capture_allows_use(s);
        if (r == CUDA_SUCCESS)
                r = put_locked(s, NULL, after ? *after : NULL);
        if (r == CUDA_SUCCESS && ret)
                *ret = mark_get(s->mark);
        pthread_mutex_unlock(&fake_stream_lock);
        return r;
}

/* All that the context has been given so far. */
CUresult fake_streams_wait(CUcontext c)
{
        pthread_mutex_lock(&fake_stream_lock);
again:
        for (struct CUstream_st *s = fake_streams; s; s = s->next) {
                if (s->context == c && s->mark && !s->mark->is_done) {
                        mark_wait(s->mark);
                        goto again; /* the list may be another by now */
                }
        }
        pthread_mutex_unlock(&fake_stream_lock);
        return __atomic_load_n(&c->sticky, __ATOMIC_RELAXED);
}

void fake_stream_close(CUstream s)
{
        s->is_closing = true;
        if (s->has_thread)
                pthread_detach(s->thread);
        else
                stream_end(s);
        pthread_cond_broadcast(&changed);
}

void fake_streams_wait_for_end(CUcontext c)
{
        const struct CUstream_st *s;

        do {
                for (s = fake_streams; s && s->context != c; s = s->next)
                        ;
                if (s)
                        pthread_cond_wait(&changed, &fake_stream_lock);
        } while (s);
}
