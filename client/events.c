/* Events and their thread; see events.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The thread is stopped by shutting down the socket for reading: it wakes up with
 * an end of file, and the daemon, to which that is no hang-up, still hears a
 * goodbye on the other socket.
 *
 * A driver may take long to unmap, and may refuse for the length of a capture. So that
 * a Trim behind it is answered in time, a second thread does Retires. It also calls ops->look() at
 * intervals where that is asked for. It is there from the first Retire or events_wake() on: most
 * processes see neither. Answers may be in any order.
 *
 * A socket that has ended can be followed by another, of a later epoch. Whoever reads exchanges them:
 * so nobody reads while it is done, and the number of the fd stays. What was read of the old one
 * and is not done yet is forgotten, and its answers are not sent. */
#include "client/events.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "proto/frame.h"

#include "client/clock.h"

/* A driver's calls are made on it, which may take as much of the stack as they take on a program's
 * first thread. It is address space: memory only as far as it is used. */
#define EVENTS_STACK_BYTES ((size_t)8 << 20)
#define EVENTS_QUEUE_MAX   4096u
#define EVENTS_MAX_EXTENTS 64u /* in one Retire */
#define EVENTS_RETRY_MS    5
#define EVENTS_MAX_RETIRES 18u /* 16 unanswered ones, one whose answer is on its way, one of before */

struct events_socket {
        int fd;
        struct frame_reader *reader;
        struct frame_writer *writer;
};

struct events {
        int fd;      /* constant; what it is changes */
        int poll_fd; /* without a thread: readable where fd is; -1 */
        const struct events_ops *ops;
        void *userdata;
        pthread_t thread;
        bool running;      /* it is to be joined; constant while it runs */
        Bfcd__Event *busy; /* without a thread: to be tried again */
        int error;         /* the same: why it ended */
        struct frame_reader *reader;
        uint64_t epoch; /* of fd; who reads changes it, with the lock */

        pthread_mutex_t lock; /* everything below */
        pthread_cond_t changed;
        bool has_ended; /* the thread */
        struct frame_writer *writer;
        struct events_socket *next; /* NULL: none */
        uint64_t next_epoch;
        pthread_t worker;
        bool has_worker; /* it is to be joined */
        bool is_stopping;
        bool is_woken;
        bool is_looking;
        bool is_retiring;                         /* the first of them */
        int64_t look_ms;                          /* then it looks; -1: it does not */
        Bfcd__Event *retires[EVENTS_MAX_RETIRES]; /* for it; the first is being done */
        size_t n_retires;
};

/* To a socket of that epoch. That it has ended is for who reads to find out. */
static int answer(struct events *e, const Bfcd__EventReply *reply, uint64_t epoch)
{
        uint8_t *payload;
        int r;

        pthread_mutex_lock(&e->lock);
        if (e->epoch != epoch) {
                pthread_mutex_unlock(&e->lock);
                return 0;
        }
        r = frame_writer_add(e->writer, bfcd__event_reply__get_packed_size(reply), NULL, 0, &payload);
        if (r == 0) {
                bfcd__event_reply__pack(reply, payload);
                /* The daemon has few unanswered: the socket's buffer has room. */
                r = frame_writer_flush(e->writer, e->fd) == FRAME_AGAIN ? -ECONNRESET : 0;
        }
        pthread_mutex_unlock(&e->lock);
        return r;
}

static int on_retire(struct events *e, const Bfcd__Retire *retire, uint64_t epoch)
{
        Bfcd__EventReply reply = BFCD__EVENT_REPLY__INIT;
        Bfcd__Retired retired = BFCD__RETIRED__INIT;
        int r;

        if (retire->n_extent_ids == 0 || retire->n_extent_ids > EVENTS_MAX_EXTENTS)
                return -EPROTO;
        r = e->ops->retire(e->userdata, epoch, retire->extent_ids, retire->n_extent_ids);
        if (r < 0)
                return r;
        retired.sequence = retire->sequence;
        reply.body_case = BFCD__EVENT_REPLY__BODY_RETIRED;
        reply.retired = &retired;
        return answer(e, &reply, epoch);
}

static int on_trim(struct events *e, const Bfcd__Trim *trim)
{
        Bfcd__EventReply reply = BFCD__EVENT_REPLY__INIT;
        Bfcd__Trimmed trimmed = BFCD__TRIMMED__INIT;
        int r = e->ops->trim(e->userdata, trim, &trimmed.n_bytes);

        if (r < 0)
                return r;
        trimmed.sequence = trim->sequence;
        reply.body_case = BFCD__EVENT_REPLY__BODY_TRIMMED;
        reply.trimmed = &trimmed;
        return answer(e, &reply, e->epoch);
}

/* An event of a later version is none that this one asked for. What needs no answer and no
 * deed is read and forgotten. */
static int on_event(struct events *e, const Bfcd__Event *event)
{
        switch (event->body_case) {
        case BFCD__EVENT__BODY_RETIRE:
                return on_retire(e, event->retire, e->epoch);
        case BFCD__EVENT__BODY_TRIM:
                return on_trim(e, event->trim);
        case BFCD__EVENT__BODY_DRAINING:
                return e->ops->draining(e->userdata, event->draining->partition, event->draining->is_over);
        case BFCD__EVENT__BODY_QUOTA_CHANGED:
        case BFCD__EVENT__BODY_SHUTDOWN:
                return 0;
        default:
                return -EPROTO;
        }
}

/* False: the thread is to end, or the daemon is gone. */
static bool pause_for(const struct events *e, int ms)
{
        struct pollfd p = { .fd = e->fd, .events = POLLRDHUP };

        return poll(&p, 1, ms) == 0;
}

/* Until it is done. -ECANCELED: the thread is to end. */
static int retire_now(struct events *e, const Bfcd__Retire *retire, uint64_t epoch)
{
        int r;

        while ((r = on_retire(e, retire, epoch)) == -EBUSY)
                if (!pause_for(e, EVENTS_RETRY_MS))
                        return -ECANCELED;
        return r;
}

/* A socket that has ended ends a Retire that waits, and not the thread: there may be another. */
static int retire_first(struct events *e)
{
        Bfcd__Event *event = e->retires[0];
        uint64_t epoch = e->epoch;
        int r;

        e->is_retiring = true;
        pthread_mutex_unlock(&e->lock);
        r = retire_now(e, event->retire, epoch);
        bfcd__event__free_unpacked(event, NULL);
        pthread_mutex_lock(&e->lock);
        e->is_retiring = false;
        memmove(e->retires, e->retires + 1, --e->n_retires * sizeof(e->retires[0]));
        return r == -ECANCELED || r == -ESTALE ? 0 : r;
}

/* Waits for a change, until then at most; -1: for ever. The lock is held. */
static void wait_until(struct events *e, int64_t until_ms)
{
        struct timespec until = { until_ms / 1000, until_ms % 1000 * 1000000 };

        if (until_ms < 0)
                pthread_cond_wait(&e->changed, &e->lock);
        else
                pthread_cond_timedwait(&e->changed, &e->lock, &until);
}

static void look_now(struct events *e)
{
        int ms;

        e->is_woken = false;
        e->is_looking = true;
        pthread_mutex_unlock(&e->lock);
        ms = e->ops->look(e->userdata);
        pthread_mutex_lock(&e->lock);
        e->is_looking = false;
        pthread_cond_broadcast(&e->changed);
        e->look_ms = ms < 0 ? -1 : clock_now_ms() + ms;
}

static void *worker_run(void *userdata)
{
        struct events *e = userdata;
        int r = 0;

        pthread_mutex_lock(&e->lock);
        while (r == 0 && !e->is_stopping) {
                if (e->n_retires > 0)
                        r = retire_first(e);
                else if (e->is_woken || (e->look_ms >= 0 && clock_now_ms() >= e->look_ms))
                        look_now(e);
                else
                        wait_until(e, e->look_ms);
        }
        pthread_mutex_unlock(&e->lock);
        if (r < 0) {
                e->ops->failed(e->userdata, r == -EPROTO ? -EPROTO : -ECONNRESET);
                shutdown(e->fd, SHUT_RD); /* the other thread is to end, too */
        }
        return NULL;
}

static int thread_new(void *(*run)(void *), struct events *e, const char *name, pthread_t *ret)
{
        pthread_attr_t attr;
        sigset_t all, before;
        size_t n_bytes;
        int r = pthread_attr_init(&attr);

        if (r != 0)
                return -r;
        if (pthread_attr_getstacksize(&attr, &n_bytes) == 0 && n_bytes < EVENTS_STACK_BYTES)
                pthread_attr_setstacksize(&attr, EVENTS_STACK_BYTES);
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        r = pthread_create(ret, &attr, run, e);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        pthread_attr_destroy(&attr);
        if (r == 0)
                pthread_setname_np(*ret, name);
        return -r;
}

/* False: no thread can be had. The lock is held. */
static bool worker_start(struct events *e)
{
        if (!e->has_worker)
                e->has_worker = thread_new(worker_run, e, "bfc-worker", &e->worker) == 0;
        return e->has_worker;
}

/* Takes the event over. */
static int retire_later(struct events *e, Bfcd__Event *event)
{
        bool handed = false;
        int r = 0;

        pthread_mutex_lock(&e->lock);
        if (e->n_retires == EVENTS_MAX_RETIRES)
                r = -EPROTO;
        if (r == 0 && worker_start(e)) {
                e->retires[e->n_retires++] = event;
                pthread_cond_broadcast(&e->changed);
                handed = true;
        }
        pthread_mutex_unlock(&e->lock);
        if (handed)
                return 0;
        if (r == 0)
                r = retire_now(e, event->retire, e->epoch);
        bfcd__event__free_unpacked(event, NULL);
        return r;
}

static int on_frame(struct events *e, const uint8_t *payload, size_t n_bytes)
{
        Bfcd__Event *event = bfcd__event__unpack(NULL, n_bytes, payload);
        int r;

        if (!event)
                return -EPROTO;
        if (e->running && event->body_case == BFCD__EVENT__BODY_RETIRE)
                return retire_later(e, event);
        r = on_event(e, event);
        if (r == -EBUSY)
                e->busy = event;
        else
                bfcd__event__free_unpacked(event, NULL);
        return r;
}

static int handle_frames(struct events *e)
{
        const uint8_t *payload;
        size_t n_bytes;
        int r;

        while ((r = frame_reader_next(e->reader, &payload, &n_bytes)) == 0) {
                r = on_frame(e, payload, n_bytes);
                if (r < 0)
                        return r;
        }
        return r < 0 ? r : 0;
}

static int read_events(struct events *e, int flags)
{
        int r;

        do
                r = handle_frames(e);
        while (r == 0 && (r = frame_reader_receive(e->reader, e->fd, flags)) == 0);
        return r;
}

/* ---- another socket -------------------------------------------------------- */

struct events_socket *events_socket_free(struct events_socket *s)
{
        if (!s)
                return NULL;
        if (s->fd >= 0)
                close(s->fd);
        frame_reader_free(s->reader);
        frame_writer_free(s->writer);
        free(s);
        return NULL;
}

int events_socket_new(int fd, struct events_socket **ret)
{
        struct events_socket *s = calloc(1, sizeof(*s));
        int r;

        if (!s) {
                close(fd);
                return -ENOMEM;
        }
        s->fd = fd;
        r = frame_reader_new(false, &s->reader);
        if (r == 0)
                r = frame_writer_new(EVENTS_QUEUE_MAX, &s->writer);
        if (r < 0) {
                events_socket_free(s);
                return r;
        }
        *ret = s;
        return 0;
}

void events_resume(struct events *e, struct events_socket *s, uint64_t epoch)
{
        if (!e) {
                events_socket_free(s);
                return;
        }
        pthread_mutex_lock(&e->lock);
        events_socket_free(e->next);
        e->next = s;
        e->next_epoch = epoch;
        shutdown(e->fd, SHUT_RDWR);
        pthread_mutex_unlock(&e->lock);
}

static void forget_retires(struct events *e)
{
        size_t n_kept = e->is_retiring ? 1 : 0;

        while (e->n_retires > n_kept)
                bfcd__event__free_unpacked(e->retires[--e->n_retires], NULL);
        if (e->busy)
                bfcd__event__free_unpacked(e->busy, NULL);
        e->busy = NULL;
}

static int poll_it(const struct events *e)
{
        struct epoll_event event = { .events = EPOLLIN | EPOLLRDHUP };

        return e->poll_fd < 0 || epoll_ctl(e->poll_fd, EPOLL_CTL_ADD, e->fd, &event) == 0 ? 0 : -errno;
}

/* The lock is held. */
static int exchange(struct events *e)
{
        struct events_socket *s = e->next;
        struct frame_reader *reader = e->reader;
        struct frame_writer *writer = e->writer;

        /* By itself it would go from there only when a forked child has closed it, too. */
        if (e->poll_fd >= 0)
                epoll_ctl(e->poll_fd, EPOLL_CTL_DEL, e->fd, NULL);
        if (dup3(s->fd, e->fd, O_CLOEXEC) < 0)
                return -errno;
        e->next = NULL;
        e->epoch = e->next_epoch;
        e->reader = s->reader;
        e->writer = s->writer;
        s->reader = reader;
        s->writer = writer;
        forget_retires(e);
        events_socket_free(s);
        return poll_it(e);
}

/* What was read ended with r. 0: there is another socket now. */
static int next_socket(struct events *e, int r)
{
        if (r < 0 && r != -ECONNRESET && r != -ECANCELED && r != -ESTALE)
                return r;
        pthread_mutex_lock(&e->lock);
        r = e->is_stopping ? -ECANCELED : 0;
        if (r == 0 && !e->next) {
                pthread_mutex_unlock(&e->lock);
                r = e->ops->lost(e->userdata, e->epoch);
                pthread_mutex_lock(&e->lock);
        }
        if (r == 0 && e->is_stopping) /* it was told so on the old one */
                r = -ECANCELED;
        if (r == 0)
                r = e->next ? exchange(e) : -ECONNRESET;
        pthread_mutex_unlock(&e->lock);
        return r;
}

static void *events_run(void *userdata)
{
        struct events *e = userdata;
        int r;

        do
                r = read_events(e, 0);
        while (next_socket(e, r) == 0);

        /* An end of file is events_stop(), or a daemon that ended the session. So it is
         * while a Retire could not be done. */
        if (r < 0 && r != -ECANCELED && r != -ESTALE)
                e->ops->failed(e->userdata, r == -EPROTO ? -EPROTO : -ECONNRESET);
        e->ops->ended(e->userdata);
        pthread_mutex_lock(&e->lock);
        e->has_ended = true;
        pthread_cond_broadcast(&e->changed);
        pthread_mutex_unlock(&e->lock);
        return NULL;
}

static int thread_start(struct events *e)
{
        int r;

        e->running = true; /* the thread looks at it */
        r = thread_new(events_run, e, "bfc-events", &e->thread);
        if (r < 0)
                e->running = false;
        return r;
}

void events_wake(struct events *e)
{
        if (!e || !e->running)
                return;
        pthread_mutex_lock(&e->lock);
        if (worker_start(e)) {
                e->is_woken = true;
                pthread_cond_broadcast(&e->changed);
        }
        pthread_mutex_unlock(&e->lock);
}

static void locks_init(struct events *e)
{
        pthread_condattr_t attr;

        pthread_mutex_init(&e->lock, NULL);
        pthread_condattr_init(&attr);
        pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
        pthread_cond_init(&e->changed, &attr);
        pthread_condattr_destroy(&attr);
}

static int events_make(int fd, const struct events_ops *ops, void *userdata, struct events **ret)
{
        struct events *e = calloc(1, sizeof(*e));
        int r;

        if (!e) {
                close(fd);
                return -ENOMEM;
        }
        e->fd = fd;
        e->poll_fd = -1;
        e->epoch = 1;
        e->look_ms = -1;
        e->ops = ops;
        e->userdata = userdata;
        locks_init(e);
        r = frame_reader_new(false, &e->reader);
        if (r == 0)
                r = frame_writer_new(EVENTS_QUEUE_MAX, &e->writer);
        if (r < 0) {
                events_free(e);
                return r;
        }
        *ret = e;
        return 0;
}

/* Who looks for events may do so by epoll(7), which would lose a socket that another takes the place
 * of: so what is looked at is an epoll instance, and stays the same. */
int events_new(int fd, const struct events_ops *ops, void *userdata, struct events **ret)
{
        struct events *e;
        int r = events_make(fd, ops, userdata, &e);

        if (r < 0)
                return r;
        e->poll_fd = epoll_create1(EPOLL_CLOEXEC);
        r = e->poll_fd < 0 ? -errno : poll_it(e);
        if (r < 0) {
                events_free(e);
                return r;
        }
        *ret = e;
        return 0;
}

int events_start(int fd, const struct events_ops *ops, void *userdata, struct events **ret)
{
        struct events *e;
        int r = events_make(fd, ops, userdata, &e);

        if (r < 0)
                return r;
        r = thread_start(e);
        if (r < 0) {
                events_free(e);
                return r;
        }
        *ret = e;
        return 0;
}

int events_fd(const struct events *e)
{
        return e->poll_fd;
}

/* What could not be done the last time. */
static int try_again(struct events *e)
{
        Bfcd__Event *event = e->busy;
        int r = event ? on_event(e, event) : 0;

        if (!event || r == -EBUSY)
                return r;
        e->busy = NULL;
        bfcd__event__free_unpacked(event, NULL);
        return r;
}

int events_poll(struct events *e)
{
        int r = e->error;

        if (r < 0)
                return r;
        do {
                r = try_again(e);
                if (r == 0)
                        r = read_events(e, MSG_DONTWAIT);
                if (r == -EBUSY && !pause_for(e, 0)) /* nobody asks for that any more */
                        r = -ECANCELED;
        } while (r != FRAME_AGAIN && r != -EBUSY && next_socket(e, r) == 0);
        if (r == FRAME_AGAIN || r == -EBUSY) {
                e->ops->look(e->userdata);
                return r == -EBUSY ? r : 0;
        }
        /* The daemon ended the session, or what it sent makes no sense. */
        e->error = r == -EPROTO ? -EPROTO : -ECONNRESET;
        e->ops->failed(e->userdata, e->error);
        e->ops->ended(e->userdata);
        return e->error;
}

/* False: the time is over. */
static bool wait_for_end(struct events *e, unsigned timeout_ms)
{
        int64_t until_ms = timeout_ms > 0 ? clock_now_ms() + timeout_ms : -1;
        bool has_ended;

        pthread_mutex_lock(&e->lock);
        while (!(has_ended = e->has_ended && !e->is_looking) && (until_ms < 0 || clock_now_ms() < until_ms))
                wait_until(e, until_ms);
        pthread_mutex_unlock(&e->lock);
        return has_ended;
}

/* Looking may wait for the daemon, and a Retire for the device: that one is waited for. */
int events_stop(struct events *e, unsigned timeout_ms)
{
        if (!e || !e->running)
                return 0;
        pthread_mutex_lock(&e->lock);
        e->is_stopping = true;
        shutdown(e->fd, SHUT_RD);
        pthread_cond_broadcast(&e->changed);
        pthread_mutex_unlock(&e->lock);
        if (!wait_for_end(e, timeout_ms))
                return -ETIMEDOUT;
        pthread_join(e->thread, NULL);
        if (e->has_worker)
                pthread_join(e->worker, NULL);
        e->running = false;
        return 0;
}

struct events *events_free(struct events *e)
{
        if (!e)
                return NULL;
        if (e->fd >= 0)
                close(e->fd);
        if (e->poll_fd >= 0)
                close(e->poll_fd);
        events_socket_free(e->next);
        frame_reader_free(e->reader);
        frame_writer_free(e->writer);
        if (e->busy)
                bfcd__event__free_unpacked(e->busy, NULL);
        for (size_t i = 0; i < e->n_retires; i++)
                bfcd__event__free_unpacked(e->retires[i], NULL);
        pthread_cond_destroy(&e->changed);
        pthread_mutex_destroy(&e->lock);
        free(e);
        return NULL;
}

void events_forget(struct events *e)
{
        if (!e)
                return;
        close(e->fd);
        if (e->poll_fd >= 0)
                close(e->poll_fd);
        e->fd = e->poll_fd = -1;
}
