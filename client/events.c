/* Events and their threads; see events.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * events_serve() is the only reader: the client's thread calls it whenever the socket is readable, and
 * events_poll() calls it for a program that polls. It does not wait for the daemon.
 *
 * A driver may take long to unmap, and may refuse while a stream is captured. A Trim behind a Retire is
 * answered in time nevertheless: Retires are queued. A second thread works on the queue and calls
 * ops->look() at intervals. It starts with the first Retire or events_wake(). Without it events_serve() works
 * on the queue itself. Answers may be in any order.
 *
 * events_stop() shuts the socket down for reading, which wakes the thread with an end of file. The daemon
 * does not notice, and still receives a goodbye on the other socket.
 *
 * When a socket has ended, another of a later epoch can replace it. The reader replaces it, so no thread
 * reads meanwhile, and the number of the fd stays the same. Events of the old socket that are not done are
 * dropped, and their answers are not sent. */
#include "client/events.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "proto/frame.h"

#include "client/process.h"

#define EVENTS_QUEUE_MAX   4096u
#define EVENTS_MAX_EXTENTS 64u /* in one Retire */
#define EVENTS_RETRY_MS    5
#define EVENTS_MAX_RETIRES 18u /* 16 unanswered, one whose answer is in flight, one of the last epoch */

struct events_socket {
        int fd;
        struct frame_reader *reader; /* the reader's */
        struct frame_writer *writer;
};

struct events {
        struct events_socket socket; /* fd is constant, what it refers to changes; writer: under the lock */
        int poll_fd;                 /* without a thread: readable where the socket is; -1 */
        const struct events_ops *ops;
        void *userdata;
        pthread_t thread;
        bool is_running; /* the thread must be joined; constant while it runs */
        bool is_polled;  /* a thread is in events_poll(); atomic */
        int error;       /* why events_serve() ended */
        uint64_t epoch;  /* of the socket; changed by the reader, under the lock */

        pthread_mutex_t lock; /* everything below */
        pthread_cond_t changed;
        bool has_ended;             /* the thread */
        struct events_socket *next; /* NULL: none */
        uint64_t next_epoch;
        pthread_t worker;
        bool has_worker; /* it must be joined */
        bool is_stopping;
        bool is_woken;
        bool is_looking;
        bool is_retiring;                         /* the first of them, without the lock */
        int64_t look_ms;                          /* when the worker calls look(); -1: it does not */
        Bfcd__Event *retires[EVENTS_MAX_RETIRES]; /* the queue */
        size_t n_retires;
};

/* That the socket has ended is found out by the reader. */
int events_answer(struct events *e, uint64_t epoch, uint64_t sequence)
{
        Bfcd__EventReply reply = BFCD__EVENT_REPLY__INIT;
        uint8_t *payload;
        int r;

        reply.sequence = sequence;
        pthread_mutex_lock(&e->lock);
        if (e->epoch != epoch) {
                pthread_mutex_unlock(&e->lock);
                return 0;
        }
        r = frame_writer_add(e->socket.writer, bfcd__event_reply__get_packed_size(&reply), NULL, 0, &payload);
        if (r == 0) {
                bfcd__event_reply__pack(&reply, payload);
                /* The daemon limits the unanswered events, so the socket's buffer has room. */
                r = frame_writer_flush(e->socket.writer, e->socket.fd) == FRAME_AGAIN ? -ECONNRESET : 0;
        }
        pthread_mutex_unlock(&e->lock);
        return r;
}

/* EVENTS_TAKEN: the event was taken over. */
static int recall(struct events *e, Bfcd__Event *event, uint64_t epoch)
{
        int r = e->ops->recall(e->userdata, epoch, event);

        return r == 0 ? events_answer(e, epoch, event->sequence) : r;
}

/* The queue's first Retire. -EBUSY: it stays there. The lock is held, but not while the driver is called. */
static int retire_first(struct events *e)
{
        Bfcd__Event *event = e->retires[0];
        uint64_t epoch = e->epoch;
        int r;

        e->is_retiring = true;
        pthread_mutex_unlock(&e->lock);
        r = recall(e, event, epoch);
        pthread_mutex_lock(&e->lock);
        e->is_retiring = false;
        if (r == -EBUSY && e->epoch == epoch)
                return r;
        bfcd__event__free_unpacked(event, NULL);
        memmove(e->retires, e->retires + 1, --e->n_retires * sizeof(e->retires[0]));
        return r == -ESTALE || r == -EBUSY ? 0 : r;
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
        int64_t retry_ms = 0;
        int r = 0;

        pthread_mutex_lock(&e->lock);
        while (r == 0 && !e->is_stopping) {
                if (e->n_retires > 0 && clock_now_ms() >= retry_ms) {
                        r = retire_first(e);
                        retry_ms = r == -EBUSY ? clock_now_ms() + EVENTS_RETRY_MS : 0;
                        r = r == -EBUSY ? 0 : r;
                } else if (e->is_woken || (e->look_ms >= 0 && clock_now_ms() >= e->look_ms)) {
                        look_now(e);
                } else {
                        condition_wait(&e->changed, &e->lock, e->n_retires > 0 ? retry_ms : e->look_ms);
                }
        }
        pthread_mutex_unlock(&e->lock);
        if (r < 0) {
                e->ops->failed(e->userdata, r == -EPROTO ? -EPROTO : -ECONNRESET);
                shutdown(e->socket.fd, SHUT_RD); /* the other thread is to end, too */
        }
        return NULL;
}

/* False: no thread can be had. The lock is held. */
static bool worker_start(struct events *e)
{
        if (!e->has_worker)
                e->has_worker = thread_new(worker_run, e, "bfc-worker", &e->worker) == 0;
        return e->has_worker;
}

/* Queues the event, which is taken over. */
static int retire_later(struct events *e, Bfcd__Event *event)
{
        const Bfcd__Retire *retire = event->retire;
        int r = 0;

        pthread_mutex_lock(&e->lock);
        if (e->n_retires == EVENTS_MAX_RETIRES || retire->n_extent_ids == 0 ||
            retire->n_extent_ids > EVENTS_MAX_EXTENTS) {
                bfcd__event__free_unpacked(event, NULL);
                r = -EPROTO;
        } else {
                e->retires[e->n_retires++] = event;
                if (e->is_running)
                        (void)worker_start(e); /* without it events_serve() does it */
                pthread_cond_broadcast(&e->changed);
        }
        pthread_mutex_unlock(&e->lock);
        return r;
}

/* Unknown events were not asked for. Events that need no answer and no action are read and dropped. */
static int on_frame(struct events *e, const uint8_t *payload, size_t n_bytes)
{
        Bfcd__Event *event = bfcd__event__unpack(NULL, n_bytes, payload);
        int r = -EPROTO;

        if (!event)
                return r;
        switch (event->body_case) {
        case BFCD__EVENT__BODY_RETIRE:
                return retire_later(e, event);
        case BFCD__EVENT__BODY_TRIM:
        case BFCD__EVENT__BODY_PRESSURE:
                r = recall(e, event, e->epoch);
                if (r == EVENTS_TAKEN)
                        return 0;
                break;
        case BFCD__EVENT__BODY_DRAINING:
                r = e->ops->draining(e->userdata, e->epoch, event->draining);
                break;
        case BFCD__EVENT__BODY_QUOTA_CHANGED:
                r = 0;
                break;
        default:
                break;
        }
        bfcd__event__free_unpacked(event, NULL);
        return r;
}

/* All that is there now. FRAME_AGAIN; FRAME_EOF; an error. */
static int read_events(struct events *e)
{
        const uint8_t *payload;
        size_t n_bytes;
        int r;

        do {
                while ((r = frame_reader_next(e->socket.reader, &payload, &n_bytes)) == 0) {
                        r = on_frame(e, payload, n_bytes);
                        if (r < 0)
                                return r;
                }
        } while (r == FRAME_AGAIN &&
                 (r = frame_reader_receive(e->socket.reader, e->socket.fd, MSG_DONTWAIT)) == 0);
        return r;
}

/* Where there is no worker. -EBUSY: some cannot be done now. */
static int retire_all(struct events *e)
{
        int r = 0;

        pthread_mutex_lock(&e->lock);
        while (r == 0 && !e->has_worker && e->n_retires > 0)
                r = retire_first(e);
        pthread_mutex_unlock(&e->lock);
        return r;
}

/* ---- another socket -------------------------------------------------------- */

static void socket_clear(struct events_socket *s)
{
        if (s->fd >= 0)
                close(s->fd);
        frame_reader_free(s->reader);
        frame_writer_free(s->writer);
}

/* fd: taken over, also on failure. */
static int socket_init(struct events_socket *s, int fd)
{
        int r;

        s->fd = fd;
        r = frame_reader_new(false, &s->reader);
        return r < 0 ? r : frame_writer_new(EVENTS_QUEUE_MAX, &s->writer);
}

struct events_socket *events_socket_free(struct events_socket *s)
{
        if (!s)
                return NULL;
        socket_clear(s);
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
        r = socket_init(s, fd);
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
        shutdown(e->socket.fd, SHUT_RDWR);
        pthread_mutex_unlock(&e->lock);
}

static void forget_retires(struct events *e)
{
        size_t n_kept = e->is_retiring ? 1 : 0;

        while (e->n_retires > n_kept)
                bfcd__event__free_unpacked(e->retires[--e->n_retires], NULL);
}

static int poll_it(const struct events *e)
{
        struct epoll_event event = { .events = EPOLLIN | EPOLLRDHUP };

        if (e->poll_fd < 0 || epoll_ctl(e->poll_fd, EPOLL_CTL_ADD, e->socket.fd, &event) == 0)
                return 0;
        return -errno;
}

/* The lock is held. */
static int exchange(struct events *e)
{
        struct events_socket *next = e->next, old = e->socket;

        /* It would leave the epoll instance only when a forked child has closed it, too. */
        if (e->poll_fd >= 0)
                epoll_ctl(e->poll_fd, EPOLL_CTL_DEL, e->socket.fd, NULL);
        if (dup3(next->fd, e->socket.fd, O_CLOEXEC) < 0)
                return -errno;
        e->next = NULL;
        e->epoch = e->next_epoch;
        e->socket.reader = next->reader;
        e->socket.writer = next->writer;
        next->reader = old.reader;
        next->writer = old.writer;
        forget_retires(e);
        events_socket_free(next);
        return poll_it(e);
}

/* The socket ended with r. 0: there is another one now. */
static int next_socket(struct events *e, int r)
{
        if (r < 0 && r != -ECONNRESET)
                return r;
        pthread_mutex_lock(&e->lock);
        r = e->is_stopping ? -ECANCELED : 0;
        if (r == 0 && !e->next) {
                pthread_mutex_unlock(&e->lock);
                r = e->ops->lost(e->userdata, e->epoch);
                pthread_mutex_lock(&e->lock);
        }
        if (r == 0 && e->is_stopping) /* the old socket was shut down for that */
                r = -ECANCELED;
        if (r == 0)
                r = e->next ? exchange(e) : -ECONNRESET;
        pthread_mutex_unlock(&e->lock);
        return r;
}

/* Serves all that is there now. 0; -EBUSY: some Retires cannot be done now, and there is no worker; call it
 * again soon. Another error: no event comes any more. */
static int events_serve(struct events *e)
{
        int r = e->error;

        if (r < 0)
                return r;
        do {
                r = read_events(e);
                if (r == FRAME_AGAIN)
                        r = retire_all(e);
                if (r == 0 || r == -EBUSY)
                        return r;
        } while (next_socket(e, r) == 0);
        /* An end of file is events_stop(), or a daemon that ended the session. */
        e->error = r == -EPROTO ? -EPROTO : -ECONNRESET;
        if (r < 0)
                e->ops->failed(e->userdata, e->error);
        e->ops->ended(e->userdata);
        return e->error;
}

static void *events_run(void *userdata)
{
        struct events *e = userdata;
        struct pollfd p = { .fd = e->socket.fd, .events = POLLIN | POLLRDHUP };
        int r = 0;

        while (r == 0 || r == -EBUSY) {
                (void)poll(&p, 1, r == -EBUSY ? EVENTS_RETRY_MS : -1);
                r = events_serve(e);
        }
        pthread_mutex_lock(&e->lock);
        e->has_ended = true;
        forget_retires(e);
        pthread_cond_broadcast(&e->changed);
        pthread_mutex_unlock(&e->lock);
        return NULL;
}

void events_wake(struct events *e)
{
        if (!e || !e->is_running)
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
        pthread_mutex_init(&e->lock, NULL);
        condition_init(&e->changed);
}

/* A program may watch the fd by epoll(7), which would lose a socket that is replaced. So the fd is that of
 * an epoll instance, which stays the same. */
static int poll_fd_open(struct events *e)
{
        e->poll_fd = epoll_create1(EPOLL_CLOEXEC);
        return e->poll_fd < 0 ? -errno : poll_it(e);
}

static int thread_start(struct events *e)
{
        int r;

        e->is_running = true; /* the thread reads it */
        r = thread_new(events_run, e, "bfc-events", &e->thread);
        if (r < 0)
                e->is_running = false;
        return r;
}

int events_new(int fd, bool has_thread, const struct events_ops *ops, void *userdata, struct events **ret)
{
        struct events *e = calloc(1, sizeof(*e));
        int r;

        *ret = e;
        if (!e) {
                close(fd);
                return -ENOMEM;
        }
        e->poll_fd = -1;
        e->epoch = 1;
        e->look_ms = -1;
        e->ops = ops;
        e->userdata = userdata;
        locks_init(e);
        r = socket_init(&e->socket, fd);
        if (r == 0)
                r = has_thread ? thread_start(e) : poll_fd_open(e);
        if (r < 0)
                *ret = events_free(e);
        return r;
}

bool events_has_thread(const struct events *e)
{
        return e->poll_fd < 0;
}

int events_fd(const struct events *e)
{
        return e ? e->poll_fd : -1;
}

int events_poll(struct events *e)
{
        int r, cancel_state;

        if (__atomic_exchange_n(&e->is_polled, true, __ATOMIC_ACQUIRE))
                return 0; /* another thread serves them */
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel_state);
        r = events_serve(e);
        if (r == 0 || r == -EBUSY)
                e->ops->look(e->userdata);
        __atomic_store_n(&e->is_polled, false, __ATOMIC_RELEASE);
        pthread_setcancelstate(cancel_state, NULL);
        return r;
}

/* False: the time is over. */
static bool wait_for_end(struct events *e, unsigned timeout_ms)
{
        int64_t until_ms = timeout_ms > 0 ? clock_now_ms() + timeout_ms : -1;
        bool has_ended;

        pthread_mutex_lock(&e->lock);
        while (!(has_ended = e->has_ended && !e->is_looking) && (until_ms < 0 || clock_now_ms() < until_ms))
                condition_wait(&e->changed, &e->lock, until_ms);
        pthread_mutex_unlock(&e->lock);
        return has_ended;
}

/* look() may wait for the daemon, which the timeout is for. A Retire may wait for the device: it is
 * joined. */
int events_stop(struct events *e, unsigned timeout_ms)
{
        if (!e || !e->is_running)
                return 0;
        pthread_mutex_lock(&e->lock);
        e->is_stopping = true;
        shutdown(e->socket.fd, SHUT_RD);
        pthread_cond_broadcast(&e->changed);
        pthread_mutex_unlock(&e->lock);
        if (!wait_for_end(e, timeout_ms))
                return -ETIMEDOUT;
        pthread_join(e->thread, NULL);
        if (e->has_worker)
                pthread_join(e->worker, NULL);
        e->is_running = false;
        return 0;
}

struct events *events_free(struct events *e)
{
        if (!e)
                return NULL;
        if (e->poll_fd >= 0)
                close(e->poll_fd);
        socket_clear(&e->socket);
        events_socket_free(e->next);
        forget_retires(e);
        pthread_cond_destroy(&e->changed);
        pthread_mutex_destroy(&e->lock);
        free(e);
        return NULL;
}

void events_forget(struct events *e)
{
        if (!e)
                return;
        close(e->socket.fd);
        if (e->poll_fd >= 0)
                close(e->poll_fd);
        e->socket.fd = e->poll_fd = -1;
}
