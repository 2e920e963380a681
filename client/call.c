/* Calls over one connection, from any thread; see call.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A caller puts a waiter on the list, sends, and then either leads (reads for
 * everybody) or sleeps on its own condition until its reply is delivered or the
 * lead is free. A lone caller so needs one send() and one recvmsg(), no wake-up
 * and no other thread. A leader whose reply has come leaves the lead to the
 * oldest waiter.
 *
 * Invariant: while there are waiters, one of them leads, is about to (it was
 * signalled), or the connection has an error and all were told. `reader` belongs
 * to the leader; everything else is under `lock`, which is never held while
 * anything waits for the daemon.
 *
 * A connection that has failed can go on over another socket: fd, reader and writer are
 * exchanged when nobody waits any more. */
#include "client/call.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "proto/frame.h"

/* Requests are a few dozen bytes; this many waiting means that nobody reads. */
#define CALL_MAX_QUEUED_BYTES (4u << 20)

/* How long a sender that finds the socket full leaves the reading to others
 * before it looks again whether anybody does. */
#define CALL_RECHECK_MS 10

struct call_waiter {
        struct call_waiter *next;
        uint64_t id;
        Bfcd__Reply *reply; /* once delivered */
        pthread_cond_t cond;
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
        pthread_cond_t idle; /* nobody waits */
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

/* Ends the connection and tells everybody who waits. */
static void call_fail(struct call_connection *c, int error)
{
        if (c->error < 0)
                return;
        c->error = error == -EPROTO ? -EPROTO : -ECONNRESET;
        shutdown(c->fd, SHUT_RDWR);
        for (struct call_waiter *w = c->first; w; w = w->next)
                pthread_cond_signal(&w->cond);
}

/* A socket that is full keeps the rest queued. One that is closed is no failure
 * yet: why it was closed may be waiting to be read. */
static int call_flush(struct call_connection *c)
{
        int r = frame_writer_flush(c->writer, c->fd);

        return r == -EPIPE || r == -ECONNRESET ? 0 : r;
}

/* Queues the request, which is given its id. */
static int call_queue(struct call_connection *c, Bfcd__Request *request)
{
        size_t n_bytes;
        uint8_t *payload;
        int r;

        request->id = ++c->last_id;
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
                pthread_cond_signal(&w->cond);
        } else {
                r = -EPROTO;
        }
        pthread_mutex_unlock(&c->lock);
        return r;
}

static int take_extents(struct call_connection *c, const Bfcd__Extents *extents)
{
        Bfcd__Request request = BFCD__REQUEST__INIT;
        Bfcd__Ack ack = BFCD__ACK__INIT;
        int fds[FRAME_MAX_FDS], taken[FRAME_MAX_FDS], r;
        size_t n_fds = 0;

        if (!c->on_extents || extents->n_extents > FRAME_MAX_FDS)
                return -EPROTO;
        for (size_t i = 0; i < extents->n_extents; i++)
                n_fds += extents->extents[i]->handle.len == 0;
        r = frame_reader_take_fds(c->reader, taken, n_fds);
        if (r < 0)
                return r;
        for (size_t i = extents->n_extents; i-- > 0;)
                fds[i] = extents->extents[i]->handle.len == 0 ? taken[--n_fds] : -1;
        r = c->on_extents(c->userdata, extents, fds);
        if (r < 0)
                return r;
        ack.sequence = extents->sequence;
        request.body_case = BFCD__REQUEST__BODY_ACK;
        request.ack = &ack;
        pthread_mutex_lock(&c->lock);
        r = call_put(c, &request);
        pthread_mutex_unlock(&c->lock);
        return r;
}

/* Before the reply is delivered, so that its caller finds them. */
static int take_hello_fds(struct call_connection *c, const Bfcd__HelloReply *hello)
{
        int r = 0;

        if (hello->capabilities & BFCD__CAPABILITY__CAPABILITY_EVENTS)
                r = c->events_fd >= 0 ? -EPROTO : frame_reader_take_fds(c->reader, &c->events_fd, 1);
        if (r == 0 && (hello->capabilities & BFCD__CAPABILITY__CAPABILITY_PAGES))
                r = c->page_fds[0] >= 0 ? -EPROTO : frame_reader_take_fds(c->reader, c->page_fds, 2);
        return r;
}

static int dispatch(struct call_connection *c, const uint8_t *payload, size_t n_bytes)
{
        Bfcd__Reply *reply = bfcd__reply__unpack(NULL, n_bytes, payload);
        int r;

        if (!reply)
                return -EPROTO;
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

/* Waits until the socket can be read or, where requests are queued, written. */
static int wait_for_both(struct call_connection *c)
{
        struct pollfd p = { .fd = c->fd, .events = POLLIN | POLLOUT };
        int r = poll(&p, 1, c->timeout_ms);

        if (r < 0)
                return errno == EINTR ? 0 : -errno;
        return r == 0 ? -ETIMEDOUT : 0;
}

/* One receive, and everything that it brought. */
static int read_for_all(struct call_connection *c, bool also_write)
{
        const uint8_t *payload;
        size_t n_bytes;
        int r = also_write ? wait_for_both(c) : 0;

        if (r < 0)
                return r;
        r = frame_reader_receive(c->reader, c->fd, also_write ? MSG_DONTWAIT : 0);
        if (r == FRAME_AGAIN) /* a blocking receive comes back empty after its time-out */
                return also_write ? 0 : -ETIMEDOUT;
        if (r != 0)
                return r < 0 ? r : -ECONNRESET;
        while ((r = frame_reader_next(c->reader, &payload, &n_bytes)) == 0) {
                r = dispatch(c, payload, n_bytes);
                if (r < 0)
                        return r;
        }
        return r < 0 ? r : 0;
}

/* ---- calls --------------------------------------------------------------- */

/* Leads for one receive. Lock held before and after. */
static void call_lead(struct call_connection *c)
{
        bool also_write = frame_writer_n_queued(c->writer) > 0;
        int r;

        c->has_leader = true;
        pthread_mutex_unlock(&c->lock);
        r = read_for_all(c, also_write);
        pthread_mutex_lock(&c->lock);
        c->has_leader = false;
        if (r == 0 && also_write)
                r = call_flush(c);
        if (r < 0)
                call_fail(c, r);
}

/* The socket is full and somebody else reads: he may sleep in recvmsg(), where
 * he would not notice that it can be written again. */
static void call_wait_writable(struct call_connection *c)
{
        struct pollfd p = { .fd = c->fd, .events = POLLOUT };
        int r;

        pthread_mutex_unlock(&c->lock);
        poll(&p, 1, CALL_RECHECK_MS);
        pthread_mutex_lock(&c->lock);
        r = call_flush(c);
        if (r < 0)
                call_fail(c, r);
}

/* Waits for the reply, and leads meanwhile where nobody else does. */
static void call_wait(struct call_connection *c, struct call_waiter *w)
{
        while (!w->reply && c->error == 0) {
                if (!c->has_leader)
                        call_lead(c);
                else if (frame_writer_n_queued(c->writer) > 0)
                        call_wait_writable(c);
                else
                        pthread_cond_wait(&w->cond, &c->lock);
        }
        waiter_remove(c, w);
        if (!c->has_leader && c->first)
                pthread_cond_signal(&c->first->cond);
}

/* Waits for them in their order: of these, the first in the list is the one that sleeps. */
static int call_exchange(struct call_connection *c, Bfcd__Request *const *requests, size_t n,
                         struct call_waiter *waiters)
{
        size_t n_put = 0;
        int r = c->error;

        for (; r == 0 && n_put < n; n_put++) {
                struct call_waiter *w = &waiters[n_put];

                *w = (struct call_waiter){ .cond = PTHREAD_COND_INITIALIZER };
                r = call_queue(c, requests[n_put]);
                if (r < 0)
                        break;
                w->id = requests[n_put]->id;
                waiter_add(c, w);
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

        /* A leader cancelled in recvmsg() would leave everybody else waiting. */
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel_state);
        pthread_mutex_lock(&c->lock);
        *ret_epoch = c->epoch; /* another comes only when nobody waits */
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
        struct call_waiter w;
        int r = call_send_some(c, upto, &request, 1, &w, ret_epoch);

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
        struct call_waiter waiters[CALL_MAX_AT_ONCE] = { 0 };
        int r = call_send_some(c, upto, requests, n, waiters, ret_epoch);

        for (size_t i = 0; i < n; i++)
                ret_replies[i] = waiters[i].reply;
        return r;
}

/* ---- another socket ------------------------------------------------------- */

void call_drain(struct call_connection *c)
{
        pthread_mutex_lock(&c->lock);
        while (c->first)
                pthread_cond_wait(&c->idle, &c->lock);
        pthread_mutex_unlock(&c->lock);
}

/* What it leaves is freed with the other. */
void call_adopt(struct call_connection *c, struct call_connection *from, uint64_t epoch)
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

int call_end(struct call_connection *c, int error)
{
        pthread_mutex_lock(&c->lock);
        call_fail(c, error);
        error = c->error;
        pthread_mutex_unlock(&c->lock);
        return error;
}
