/* Calls over one connection, from any thread; see call.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A caller puts a waiter on the list, sends, and then either leads (reads for
 * all) or sleeps on its own condition until its reply is delivered or the
 * lead is free. A lone caller so needs one send() and one recvmsg(), no wake-up
 * and no other thread. A leader whose reply has come leaves the lead to the
 * oldest waiter.
 *
 * Neither recvmsg() nor a condition tells reliably of a signal, but poll() does, whatever SA_RESTART says.
 * So a waiter that can be interrupted polls the socket while it leads, and else an eventfd of its own.
 *
 * Invariant: while there are waiters, one of them leads, is about to (it was
 * signalled), or the connection has an error and all were told. `reader` belongs
 * to the leader; everything else is under `lock`, which is never held while
 * anything waits for the daemon.
 *
 * A connection that has failed can continue over another socket: fd, reader and writer are
 * exchanged when there are no waiters. */
#include "client/call.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "proto/frame.h"

#include "client/process.h"

/* Requests are a few dozen bytes: with so many queued the daemon does not read. */
#define CALL_MAX_QUEUED_BYTES (4u << 20)

/* How long a sender that finds the socket full leaves the reading to others
 * before it checks again. */
#define CALL_RECHECK_MS 10

#define CALL_WORDS_BYTES 320

struct call_waiter {
        struct call_waiter *next;
        uint64_t id;
        Bfcd__Reply *reply; /* once delivered */
        pthread_cond_t cond;
        struct call_interrupt *interrupt; /* NULL: nothing interrupts it */
        int wake_fd;                      /* then; an eventfd that is used like cond; -1: cond is used */
        int64_t until_ms;                 /* it waits until then at most; 0: for ever */
};

struct call_connection {
        int fd;
        int events_fd;   /* the leader's until it is taken; -1: none */
        int page_fds[2]; /* the same; of usage, of the client */
        int error;       /* 0, or what every call returns from now on */
        uint64_t epoch;
        int timeout_ms;
        bool has_leader;
        call_extents_fn on_extents;
        void *userdata;
        pthread_mutex_t lock;
        struct frame_reader *reader;
        struct frame_writer *writer;
        uint64_t last_id;
        struct call_waiter *first; /* oldest first */
        struct call_waiter **last;
        pthread_cond_t idle;               /* no call waits for a reply */
        char last_words[CALL_WORDS_BYTES]; /* why the daemon ended the session; "": it did not say */
};

/* Blocking from then on, in any case. */
static int connect_fd(int fd, const struct sockaddr_un *address, bool may_wait)
{
        int r;

        if (!may_wait && fcntl(fd, F_SETFL, O_NONBLOCK) < 0)
                return -errno;
        do
                r = connect(fd, (const struct sockaddr *)address, sizeof(*address));
        while (r < 0 && errno == EINTR);
        if (r == 0 && !may_wait)
                r = fcntl(fd, F_SETFL, 0);
        return r < 0 ? -errno : 0;
}

static int connect_to(const char *path, bool may_wait, int *ret_fd)
{
        struct sockaddr_un address = { .sun_family = AF_UNIX };
        int fd, r;

        if (strlen(path) >= sizeof(address.sun_path))
                return -ENAMETOOLONG;
        strcpy(address.sun_path, path);
        fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (fd < 0)
                return -errno;
        r = connect_fd(fd, &address, may_wait);
        if (r < 0) {
                close(fd);
                return r;
        }
        *ret_fd = fd;
        return 0;
}

static int call_connect_to(const char *path, bool may_wait, call_extents_fn on_extents, void *userdata,
                           struct call_connection **ret)
{
        struct call_connection *c = calloc(1, sizeof(*c));
        int r;

        if (!c)
                return -ENOMEM;
        c->fd = -1;
        c->events_fd = -1;
        c->page_fds[0] = c->page_fds[1] = -1;
        c->timeout_ms = -1;
        c->on_extents = on_extents;
        c->userdata = userdata;
        c->last = &c->first;
        c->epoch = 1;
        pthread_mutex_init(&c->lock, NULL);
        pthread_cond_init(&c->idle, NULL);
        r = frame_reader_new(on_extents != NULL, &c->reader);
        if (r == 0)
                r = frame_writer_new(CALL_MAX_QUEUED_BYTES, &c->writer);
        if (r == 0)
                r = connect_to(path, may_wait, &c->fd);
        if (r < 0) {
                call_free(c);
                return r;
        }
        *ret = c;
        return 0;
}

int call_connect(const char *path, call_extents_fn on_extents, void *userdata, struct call_connection **ret)
{
        return call_connect_to(path, true, on_extents, userdata, ret);
}

int call_connect_now(const char *path, call_extents_fn on_extents, void *userdata,
                     struct call_connection **ret)
{
        return call_connect_to(path, false, on_extents, userdata, ret);
}

struct call_connection *call_free(struct call_connection *c)
{
        if (!c)
                return NULL;
        if (c->fd >= 0)
                close(c->fd);
        if (c->events_fd >= 0)
                close(c->events_fd);
        for (size_t i = 0; i < 2; i++)
                if (c->page_fds[i] >= 0)
                        close(c->page_fds[i]);
        frame_reader_free(c->reader);
        frame_writer_free(c->writer);
        pthread_cond_destroy(&c->idle);
        pthread_mutex_destroy(&c->lock);
        free(c);
        return NULL;
}

int call_take_events_fd(struct call_connection *c)
{
        int fd = c->events_fd;

        c->events_fd = -1;
        return fd;
}

void call_take_page_fds(struct call_connection *c, int ret_fds[2])
{
        for (size_t i = 0; i < 2; i++) {
                ret_fds[i] = c->page_fds[i];
                c->page_fds[i] = -1;
        }
}

void call_forget(struct call_connection *c)
{
        if (c->fd >= 0)
                close(c->fd);
        c->fd = -1;
}

void call_set_timeout(struct call_connection *c, unsigned timeout_ms)
{
        struct timeval tv = { .tv_sec = timeout_ms / 1000, .tv_usec = timeout_ms % 1000 * 1000 };

        setsockopt(c->fd, SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof(tv));
        c->timeout_ms = timeout_ms > 0 ? (int)timeout_ms : -1;
}

/* ---- under the lock ------------------------------------------------------ */

static void waiter_wake(struct call_waiter *w)
{
        pthread_cond_signal(&w->cond);
        if (w->wake_fd >= 0)
                (void)eventfd_write(w->wake_fd, 1);
}

static bool waiter_listens(const struct call_waiter *w)
{
        return w->interrupt && !w->interrupt->is_interrupted;
}

/* Ends the connection and wakes all waiters. */
static void call_fail(struct call_connection *c, int error)
{
        if (c->error < 0)
                return;
        c->error = error == -EPROTO || error == -EIDRM || error == -EMFILE ? error : -ECONNRESET;
        shutdown(c->fd, SHUT_RDWR);
        for (struct call_waiter *w = c->first; w; w = w->next)
                waiter_wake(w);
}

/* A socket that is full keeps the rest queued. One that is closed is no failure
 * yet: why it was closed may be waiting to be read. */
static int call_flush(struct call_connection *c)
{
        int r = frame_writer_flush(c->writer, c->fd);

        return r == -EPIPE || r == -ECONNRESET ? 0 : r;
}

/* The replies have consecutive ids, from the request's on. */
static size_t n_replies_to(const Bfcd__Request *request)
{
        return request->body_case == BFCD__REQUEST__BODY_WAKE ? request->wake->n_block_ids : 1;
}

/* Queues the request, which is given its id. */
static int call_queue(struct call_connection *c, Bfcd__Request *request)
{
        size_t n_bytes;
        uint8_t *payload;
        int r;

        request->id = c->last_id + 1;
        c->last_id += n_replies_to(request);
        n_bytes = bfcd__request__get_packed_size(request);
        r = frame_writer_add(c->writer, n_bytes, NULL, 0, &payload);
        if (r == 0)
                bfcd__request__pack(request, payload);
        return r;
}

/* Sends what is queued, as far as the socket takes it. */
static void call_push(struct call_connection *c)
{
        int r = call_flush(c);

        if (r < 0)
                call_fail(c, r);
}

static int call_put(struct call_connection *c, Bfcd__Request *request)
{
        int r = call_queue(c, request);

        if (r == 0)
                call_push(c);
        return r;
}

/* Of all waiters of the call, once: from then on they are like any other. */
static void call_cancel(struct call_connection *c, struct call_waiter *w)
{
        Bfcd__Cancel cancel = BFCD__CANCEL__INIT;
        Bfcd__Request request = REQUEST(CANCEL, cancel, &cancel);

        w->interrupt->is_interrupted = true;
        if (w->reply || c->error < 0)
                return;
        if (w->interrupt->hangs_up) {
                call_fail(c, -ECONNRESET);
                return;
        }
        for (const struct call_waiter *other = c->first; other; other = other->next) {
                if (other->interrupt != w->interrupt || other->reply)
                        continue;
                cancel.request_id = other->id;
                (void)call_put(c, &request); /* where it has no room the request waits on */
        }
}

static void waiter_add(struct call_connection *c, struct call_waiter *w)
{
        *c->last = w;
        c->last = &w->next;
}

static void waiter_remove(struct call_connection *c, struct call_waiter *w)
{
        struct call_waiter **at = &c->first;

        while (*at != w)
                at = &(*at)->next;
        *at = w->next;
        if (!*at)
                c->last = at;
}

/* ---- the leader, without the lock ---------------------------------------- */

static int deliver(struct call_connection *c, Bfcd__Reply *reply)
{
        struct call_waiter *w;
        int r = 0;

        pthread_mutex_lock(&c->lock);
        for (w = c->first; w && w->id != reply->id; w = w->next)
                ;
        if (w && !w->reply) {
                w->reply = reply;
                waiter_wake(w);
        } else {
                r = -EPROTO;
        }
        pthread_mutex_unlock(&c->lock);
        return r;
}

/* Tells the daemon which extents lost their fds at the limit of open files, so that it sends them again. */
static int take_extents(struct call_connection *c, const Bfcd__Extents *extents)
{
        Bfcd__Ack ack = BFCD__ACK__INIT;
        Bfcd__Request request = REQUEST(ACK, ack, &ack);
        int fds[FRAME_MAX_FDS], taken[FRAME_MAX_FDS], r;
        uint64_t lost[FRAME_MAX_FDS];
        size_t n_fds = 0;

        if (!c->on_extents || extents->n_extents > FRAME_MAX_FDS)
                return -EPROTO;
        for (size_t i = 0; i < extents->n_extents; i++)
                n_fds += extents->extents[i]->handle.len == 0;
        r = frame_reader_take_fds(c->reader, taken, n_fds);
        if (r < 0 && r != -EMFILE)
                return r;
        for (size_t i = extents->n_extents; i-- > 0;)
                fds[i] = extents->extents[i]->handle.len == 0 ? taken[--n_fds] : -1;
        for (size_t i = 0; i < extents->n_extents; i++)
                if (extents->extents[i]->handle.len == 0 && fds[i] < 0)
                        lost[ack.n_lost_extent_ids++] = extents->extents[i]->extent_id;
        ack.lost_extent_ids = lost;
        r = c->on_extents(c->userdata, extents, fds);
        if (r < 0)
                return r;
        ack.sequence = extents->sequence;
        pthread_mutex_lock(&c->lock);
        r = call_put(c, &request);
        pthread_mutex_unlock(&c->lock);
        return r;
}

/* Before the reply is delivered, so that its caller finds them. */
static int take_hello_fds(struct call_connection *c, const Bfcd__HelloReply *hello)
{
        int r = 0;

        if (hello->has_events)
                r = c->events_fd >= 0 ? -EPROTO : frame_reader_take_fds(c->reader, &c->events_fd, 1);
        if (r == 0 && hello->has_pages)
                r = c->page_fds[0] >= 0 ? -EPROTO : frame_reader_take_fds(c->reader, c->page_fds, 2);
        return r;
}

/* The last message: an administrator ended the session. */
static int take_last_words(struct call_connection *c, const Bfcd__Reply *reply)
{
        if (reply->refusal->error != EIDRM)
                return -EPROTO;
        pthread_mutex_lock(&c->lock);
        snprintf(c->last_words, sizeof(c->last_words), "%s",
                 reply->refusal->message[0] ? reply->refusal->message : "the daemon ended the session");
        pthread_mutex_unlock(&c->lock);
        return -EIDRM;
}

static int dispatch(struct call_connection *c, const uint8_t *payload, size_t n_bytes)
{
        Bfcd__Reply *reply = bfcd__reply__unpack(NULL, n_bytes, payload);
        int r;

        if (!reply)
                return -EPROTO;
        if (reply->body_case == BFCD__REPLY__BODY_REFUSAL && reply->id == 0) {
                r = take_last_words(c, reply);
                bfcd__reply__free_unpacked(reply, NULL);
                return r;
        }
        if (reply->body_case == BFCD__REPLY__BODY_EXTENTS) {
                r = reply->id == 0 ? take_extents(c, reply->extents) : -EPROTO;
                bfcd__reply__free_unpacked(reply, NULL);
                return r;
        }
        r = reply->body_case == BFCD__REPLY__BODY_HELLO ? take_hello_fds(c, reply->hello) : 0;
        if (r == 0)
                r = deliver(c, reply);
        if (r < 0)
                bfcd__reply__free_unpacked(reply, NULL);
        return r;
}

/* Waits for events on fd. *ret_interrupted: a signal came, or the waiter's cancel_fd is readable. */
static int poll_for(int fd, short events, int timeout_ms, const struct call_interrupt *interrupt,
                    bool *ret_interrupted)
{
        struct pollfd p[2] = { { .fd = fd, .events = events },
                               { .fd = interrupt ? interrupt->cancel_fd : -1, .events = POLLIN } };
        int r = poll(p, 2, timeout_ms);

        *ret_interrupted = (r < 0 && errno == EINTR) || (r > 0 && p[1].revents != 0);
        if (r < 0)
                return errno == EINTR ? 0 : -errno;
        return r == 0 ? -ETIMEDOUT : 0;
}

static int dispatch_all(struct call_connection *c)
{
        const uint8_t *payload;
        size_t n_bytes;
        int r;

        while ((r = frame_reader_next(c->reader, &payload, &n_bytes)) == 0) {
                r = dispatch(c, payload, n_bytes);
                if (r < 0)
                        return r;
        }
        return r < 0 ? r : 0;
}

/* One receive, and all frames that it brought. also_write: returns also when the socket can be written. */
static int read_for_all(struct call_connection *c, bool also_write, const struct call_interrupt *interrupt,
                        bool *ret_interrupted)
{
        bool polls = also_write || interrupt;
        int r = 0;

        if (polls)
                r = poll_for(c->fd, also_write ? POLLIN | POLLOUT : POLLIN, c->timeout_ms, interrupt,
                             ret_interrupted);
        if (r < 0)
                return r;
        r = frame_reader_receive(c->reader, c->fd, polls ? MSG_DONTWAIT : 0);
        if (r == FRAME_AGAIN) /* a blocking receive is empty after its time-out */
                return polls ? 0 : -ETIMEDOUT;
        if (r != 0)
                return r < 0 ? r : -ECONNRESET;
        return dispatch_all(c);
}

/* ---- calls --------------------------------------------------------------- */

/* 1: there is something to read. 0: the time is over, or a signal came. */
static int poll_until(const struct call_connection *c, int64_t until_ms)
{
        struct pollfd p = { .fd = c->fd, .events = POLLIN };
        int64_t left_ms = until_ms - clock_now_ms();
        int r = poll(&p, 1, left_ms > 0 ? (int)left_ms : 0);

        if (r < 0)
                return errno == EINTR ? 0 : -errno;
        return r;
}

/* Leads for one receive. The lock is held before and after. */
static void call_lead(struct call_connection *c, struct call_waiter *w)
{
        bool also_write = frame_writer_n_queued(c->writer) > 0, is_interrupted = false;
        const struct call_interrupt *interrupt = waiter_listens(w) ? w->interrupt : NULL;
        int r;

        c->has_leader = true;
        pthread_mutex_unlock(&c->lock);
        r = w->until_ms > 0 ? poll_until(c, w->until_ms) : 1;
        if (r > 0)
                r = read_for_all(c, also_write || w->until_ms > 0, interrupt, &is_interrupted);
        pthread_mutex_lock(&c->lock);
        c->has_leader = false;
        if (r == 0 && also_write)
                r = call_flush(c);
        if (r < 0)
                call_fail(c, r);
        else if (interrupt && is_interrupted)
                call_cancel(c, w);
}

/* Another thread reads. Sleeps until the waiter is woken or interrupted. If the socket is full, also until it
 * can be written: the leader may sleep in recvmsg(), and would not notice that. */
static void call_sleep(struct call_connection *c, struct call_waiter *w)
{
        const struct call_interrupt *interrupt = waiter_listens(w) ? w->interrupt : NULL;
        bool is_full = frame_writer_n_queued(c->writer) > 0, is_interrupted = false;
        eventfd_t count;
        int r = 0;

        if (!is_full && w->wake_fd < 0) {
                condition_wait(&w->cond, &c->lock, w->until_ms > 0 ? w->until_ms : -1);
                return;
        }
        pthread_mutex_unlock(&c->lock);
        if (is_full)
                (void)poll_for(c->fd, POLLOUT, CALL_RECHECK_MS, interrupt, &is_interrupted);
        else
                (void)poll_for(w->wake_fd, POLLIN, -1, interrupt, &is_interrupted);
        pthread_mutex_lock(&c->lock);
        if (w->wake_fd >= 0)
                (void)eventfd_read(w->wake_fd, &count);
        if (is_full)
                r = call_flush(c);
        if (r < 0)
                call_fail(c, r);
        else if (interrupt && is_interrupted)
                call_cancel(c, w);
}

/* Waits for the reply, and leads meanwhile if no other thread does. */
static void call_wait(struct call_connection *c, struct call_waiter *w)
{
        while (!w->reply && c->error == 0 && (w->until_ms == 0 || clock_now_ms() < w->until_ms)) {
                if (!c->has_leader)
                        call_lead(c, w);
                else
                        call_sleep(c, w);
        }
        waiter_remove(c, w);
        if (!c->has_leader && c->first)
                waiter_wake(c->first);
}

/* Waits for the replies in the order of the requests. waiters: one for each reply. */
static int call_exchange(struct call_connection *c, Bfcd__Request *const *requests, size_t n,
                         struct call_waiter *waiters)
{
        size_t n_put = 0;
        int r = c->error;

        for (size_t i = 0; r == 0 && i < n; i++) {
                r = call_queue(c, requests[i]);
                for (size_t k = 0; r == 0 && k < n_replies_to(requests[i]); k++, n_put++) {
                        condition_init(&waiters[n_put].cond);
                        waiters[n_put].id = requests[i]->id + k;
                        waiter_add(c, &waiters[n_put]);
                }
        }
        if (n_put > 0)
                call_push(c);
        for (size_t i = 0; i < n_put; i++) {
                call_wait(c, &waiters[i]);
                if (!waiters[i].reply)
                        r = c->error;
        }
        return r;
}

static int call_send_some(struct call_connection *c, uint64_t upto, Bfcd__Request *const *requests, size_t n,
                          struct call_waiter *waiters, uint64_t *ret_epoch)
{
        int r, cancel_state;

        /* A leader cancelled in recvmsg() would leave all others waiting. */
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel_state);
        pthread_mutex_lock(&c->lock);
        *ret_epoch = c->epoch; /* changes only without waiters */
        if (upto > 0 && c->epoch > upto)
                r = -ESTALE;
        else
                r = call_exchange(c, requests, n, waiters);
        if (!c->first)
                pthread_cond_broadcast(&c->idle);
        pthread_mutex_unlock(&c->lock);
        pthread_setcancelstate(cancel_state, NULL);
        return r;
}

int call_send_at(struct call_connection *c, uint64_t upto, Bfcd__Request *request, Bfcd__Reply **ret_reply,
                 uint64_t *ret_epoch)
{
        struct call_waiter w = { .wake_fd = -1 };
        int r = call_send_some(c, upto, &request, 1, &w, ret_epoch);

        if (r == 0)
                *ret_reply = w.reply;
        return r;
}

/* Without an eventfd it can be interrupted only while it leads. */
int call_send_interruptible(struct call_connection *c, struct call_interrupt *interrupt,
                            Bfcd__Request *request, Bfcd__Reply **ret_reply, uint64_t *ret_epoch)
{
        struct call_waiter w = { .interrupt = interrupt, .wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK) };
        int r = call_send_some(c, 0, &request, 1, &w, ret_epoch);

        if (w.wake_fd >= 0)
                close(w.wake_fd);
        if (r == 0)
                *ret_reply = w.reply;
        return r;
}

int call_send(struct call_connection *c, Bfcd__Request *request, Bfcd__Reply **ret_reply)
{
        uint64_t epoch;

        return call_send_at(c, 0, request, ret_reply, &epoch);
}

int call_send_all_at(struct call_connection *c, uint64_t upto, Bfcd__Request *const *requests, size_t n,
                     Bfcd__Reply **ret_replies, uint64_t *ret_epoch)
{
        struct call_waiter waiters[CALL_MAX_AT_ONCE];
        int r;

        for (size_t i = 0; i < n; i++)
                waiters[i] = (struct call_waiter){ .wake_fd = -1 };
        r = call_send_some(c, upto, requests, n, waiters, ret_epoch);

        for (size_t i = 0; i < n; i++)
                ret_replies[i] = waiters[i].reply;
        return r;
}

int call_send_wakes(struct call_connection *c, struct call_interrupt *interrupt,
                    Bfcd__Request *const *requests, size_t n, size_t n_replies, Bfcd__Reply **ret_replies,
                    uint64_t *ret_epoch)
{
        struct call_waiter *waiters = calloc(n_replies + 1, sizeof(*waiters));
        int wake_fd = interrupt && waiters ? eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK) : -1;
        int r;

        if (!waiters)
                return -ENOMEM;
        for (size_t i = 0; i < n_replies; i++)
                waiters[i] = (struct call_waiter){ .interrupt = interrupt, .wake_fd = wake_fd };
        r = call_send_some(c, 0, requests, n, waiters, ret_epoch);
        for (size_t i = 0; i < n_replies; i++)
                ret_replies[i] = waiters[i].reply;
        if (wake_fd >= 0)
                close(wake_fd);
        free(waiters);
        return r;
}

/* ---- a last call ----------------------------------------------------------- */

int call_send_within(struct call_connection *c, unsigned timeout_ms, Bfcd__Request *request)
{
        struct call_waiter w = { .wake_fd = -1, .until_ms = clock_now_ms() + timeout_ms };
        struct timespec until;
        int r, cancel_state;

        /* The thread that exits may hold the lock itself, where it does so in a signal's handler. */
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_sec += timeout_ms / 1000 + 1;
        if (pthread_mutex_timedlock(&c->lock, &until) != 0)
                return -ETIMEDOUT;
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel_state);
        r = call_exchange(c, &request, 1, &w);
        if (!c->first)
                pthread_cond_broadcast(&c->idle);
        pthread_mutex_unlock(&c->lock);
        pthread_setcancelstate(cancel_state, NULL);
        if (w.reply)
                bfcd__reply__free_unpacked(w.reply, NULL);
        return r == 0 && !w.reply ? -ETIMEDOUT : r;
}

/* ---- another socket ------------------------------------------------------- */

uint64_t call_epoch(struct call_connection *c)
{
        uint64_t epoch;

        pthread_mutex_lock(&c->lock);
        epoch = c->epoch;
        pthread_mutex_unlock(&c->lock);
        return epoch;
}

void call_drain(struct call_connection *c)
{
        pthread_mutex_lock(&c->lock);
        while (c->first || c->has_leader)
                condition_wait(&c->idle, &c->lock, -1);
        pthread_mutex_unlock(&c->lock);
}

/* The old socket is closed with `from`. */
void call_replace(struct call_connection *c, struct call_connection *from, uint64_t epoch)
{
        struct frame_reader *reader;
        struct frame_writer *writer;
        int fd;

        pthread_mutex_lock(&c->lock);
        fd = c->fd;
        reader = c->reader;
        writer = c->writer;
        c->fd = from->fd;
        c->reader = from->reader;
        c->writer = from->writer;
        c->last_id = from->last_id;
        c->timeout_ms = from->timeout_ms;
        c->error = from->error;
        c->epoch = epoch;
        pthread_mutex_unlock(&c->lock);
        from->fd = fd;
        from->reader = reader;
        from->writer = writer;
        call_free(from);
}

/* Leads, for what is there already. A socket that was shut down here still has what was received. The lock is
 * held. */
static void call_hear(struct call_connection *c)
{
        int r = 0;

        c->has_leader = true;
        pthread_mutex_unlock(&c->lock);
        while (r == 0) {
                r = dispatch_all(c);
                if (r == 0)
                        r = frame_reader_receive(c->reader, c->fd, MSG_DONTWAIT);
        }
        pthread_mutex_lock(&c->lock);
        c->has_leader = false;
        if (r < 0)
                call_fail(c, r);
        if (c->first)
                waiter_wake(c->first);
        pthread_cond_broadcast(&c->idle); /* call_drain() waits for this, too */
}

bool call_read_end_reason(struct call_connection *c, char *buf, size_t n_buf)
{
        bool ret;

        pthread_mutex_lock(&c->lock);
        if (!c->last_words[0] && c->fd >= 0 && !c->has_leader && !c->first)
                call_hear(c);
        ret = c->last_words[0] != '\0';
        if (ret)
                snprintf(buf, n_buf, "%s", c->last_words);
        pthread_mutex_unlock(&c->lock);
        return ret;
}

int call_end(struct call_connection *c, int error)
{
        pthread_mutex_lock(&c->lock);
        call_fail(c, error);
        error = c->error;
        pthread_mutex_unlock(&c->lock);
        return error;
}
