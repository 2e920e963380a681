/* Calls and events of a plan's client, in place of client/call.c and client/events.c: a request is handled by
 * the plan's daemon inside the call.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * One thread does all. While a call waits, the daemon has turns, and its events are served between them, as a
 * client's thread would. An event is served outside of the daemon, because it makes calls itself. */
#include "ctl/plan_call.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "client/call.h"
#include "client/events.h"
#include "ctl/plan_daemon.h"

#define MAX_EVENTS  64u
#define TURN_NS     1000000 /* where the daemon waits for time to pass */
#define MAX_REPLIES 64u     /* not taken yet; calls in calls have one each */

struct events {
        const struct events_ops *ops;
        void *userdata;
        int fd;
};

struct call_connection {
        struct plan_daemon *daemon;
        call_extents_fn on_extents;
        void *userdata;
        struct events *events; /* NULL: none yet */
        uint64_t last_id;
        uint64_t to_ack; /* the last Extents message; 0: none */
        int error;       /* the first */
        int events_fd, page_fds[2];
        Bfcd__Reply *replies[MAX_REPLIES];
        size_t n_replies;
        Bfcd__Event *queue[MAX_EVENTS];
        size_t n_queued;
};

/* The daemon of the next connection, and the connection. */
static struct plan_daemon *served;
static struct call_connection *connection;

void plan_call_serve(struct plan_daemon *daemon)
{
        served = daemon;
}

static void call_fail(struct call_connection *c, int error)
{
        if (c->error == 0)
                c->error = error;
}

/* ---- what the daemon sends ---------------------------------------------------- */

static void take_extents(struct call_connection *c, const Bfcd__Extents *extents, const int *fds,
                         size_t n_fds)
{
        int own[64];
        size_t n_used = 0;

        if (extents->n_extents > sizeof(own) / sizeof(own[0])) {
                call_fail(c, -EPROTO);
                return;
        }
        for (size_t i = 0; i < extents->n_extents; i++) {
                bool has_fd = extents->extents[i]->handle.len == 0 && n_used < n_fds;

                own[i] = has_fd ? fcntl(fds[n_used++], F_DUPFD_CLOEXEC, 3) : -1;
        }
        if (c->on_extents(c->userdata, extents, own) < 0)
                call_fail(c, -EPROTO);
        c->to_ack = extents->sequence;
}

static void take_hello_fds(struct call_connection *c, const Bfcd__HelloReply *hello, const int *fds,
                           size_t n_fds)
{
        size_t n = 0;

        if (hello->has_events && n < n_fds)
                c->events_fd = fcntl(fds[n++], F_DUPFD_CLOEXEC, 3);
        for (size_t i = 0; hello->has_pages && i < 2 && n < n_fds; i++)
                c->page_fds[i] = fcntl(fds[n++], F_DUPFD_CLOEXEC, 3);
}

static Bfcd__Reply *copy_reply(const Bfcd__Reply *reply)
{
        size_t n = bfcd__reply__get_packed_size(reply);
        uint8_t small[512], *bytes = n <= sizeof(small) ? small : malloc(n);
        Bfcd__Reply *copy = NULL;

        if (bytes) {
                bfcd__reply__pack(reply, bytes);
                copy = bfcd__reply__unpack(NULL, n, bytes);
        }
        if (bytes != small)
                free(bytes);
        return copy;
}

static void on_reply(void *userdata, const Bfcd__Reply *reply, const int *fds, size_t n_fds)
{
        struct call_connection *c = userdata;

        if (reply->body_case == BFCD__REPLY__BODY_EXTENTS) {
                take_extents(c, reply->extents, fds, n_fds);
                return;
        }
        if (reply->body_case == BFCD__REPLY__BODY_HELLO)
                take_hello_fds(c, reply->hello, fds, n_fds);
        if (c->n_replies == MAX_REPLIES || !(c->replies[c->n_replies] = copy_reply(reply)))
                call_fail(c, -ENOMEM);
        else
                c->n_replies++;
}

static void on_event(void *userdata, const Bfcd__Event *event)
{
        struct call_connection *c = userdata;
        size_t n = bfcd__event__get_packed_size(event);
        uint8_t *bytes = c->n_queued < MAX_EVENTS ? malloc(n + 1) : NULL;

        if (bytes) {
                bfcd__event__pack(event, bytes);
                c->queue[c->n_queued] = bfcd__event__unpack(NULL, n, bytes);
        }
        if (bytes && c->queue[c->n_queued])
                c->n_queued++;
        else
                call_fail(c, -ENOMEM);
        free(bytes);
}

static const struct plan_daemon_ops daemon_ops = { .reply = on_reply, .event = on_event };

/* ---- events --------------------------------------------------------------------- */

static int serve_trim(struct call_connection *c, const Bfcd__Trim *trim)
{
        Bfcd__EventReply reply = BFCD__EVENT_REPLY__INIT;
        Bfcd__Trimmed body = BFCD__TRIMMED__INIT;
        int r = c->events->ops->trim(c->events->userdata, trim, &body.n_bytes);

        if (r < 0)
                return r;
        body.sequence = trim->sequence;
        reply.body_case = BFCD__EVENT_REPLY__BODY_TRIMMED;
        reply.trimmed = &body;
        return plan_daemon_answer(c->daemon, &reply);
}

static int serve_retire(struct call_connection *c, const Bfcd__Retire *retire)
{
        Bfcd__EventReply reply = BFCD__EVENT_REPLY__INIT;
        Bfcd__Retired body = BFCD__RETIRED__INIT;
        int r = c->events->ops->retire(c->events->userdata, 1, retire->extent_ids, retire->n_extent_ids);

        if (r < 0)
                return r;
        body.sequence = retire->sequence;
        reply.body_case = BFCD__EVENT_REPLY__BODY_RETIRED;
        reply.retired = &body;
        return plan_daemon_answer(c->daemon, &reply);
}

int events_relieve(struct events *e, uint64_t epoch, uint64_t sequence, uint64_t n_bytes)
{
        Bfcd__EventReply reply = BFCD__EVENT_REPLY__INIT;
        Bfcd__Relieved body = BFCD__RELIEVED__INIT;

        (void)e;
        (void)epoch;
        body.sequence = sequence;
        body.n_bytes = n_bytes;
        reply.body_case = BFCD__EVENT_REPLY__BODY_RELIEVED;
        reply.relieved = &body;
        return connection ? plan_daemon_answer(connection->daemon, &reply) : -ECONNRESET;
}

/* The oldest. False: there is none. */
static bool serve_event(struct call_connection *c)
{
        Bfcd__Event *event;
        int r = 0;

        if (c->n_queued == 0 || !c->events)
                return false;
        event = c->queue[0];
        memmove(c->queue, c->queue + 1, --c->n_queued * sizeof(c->queue[0]));
        if (event->body_case == BFCD__EVENT__BODY_TRIM)
                r = serve_trim(c, event->trim);
        else if (event->body_case == BFCD__EVENT__BODY_RETIRE)
                r = serve_retire(c, event->retire);
        bfcd__event__free_unpacked(event, NULL);
        if (r < 0)
                call_fail(c, -EPROTO);
        return true;
}

int events_new(int fd, bool has_thread, const struct events_ops *ops, void *userdata, struct events **ret)
{
        struct events *e = calloc(1, sizeof(*e));

        (void)has_thread;
        if (!e) {
                close(fd);
                return -ENOMEM;
        }
        *e = (struct events){ ops, userdata, fd };
        if (connection)
                connection->events = e;
        *ret = e;
        return 0;
}

struct events *events_free(struct events *e)
{
        if (!e)
                return NULL;
        if (connection && connection->events == e)
                connection->events = NULL;
        close(e->fd);
        free(e);
        return NULL;
}

int events_poll(struct events *e)
{
        (void)e;
        return 0;
}

int events_fd(const struct events *e)
{
        (void)e;
        return -1;
}

int events_stop(struct events *e, unsigned timeout_ms)
{
        (void)e;
        (void)timeout_ms;
        return 0;
}

void events_wake(struct events *e)
{
        (void)e; /* work on a device is never pending: there is none */
}

void events_forget(struct events *e)
{
        (void)e;
}

/* The plan's daemon is never restarted. */
int events_socket_new(int fd, struct events_socket **ret)
{
        (void)ret;
        close(fd);
        return -ENOMEM;
}

struct events_socket *events_socket_free(struct events_socket *s)
{
        (void)s;
        return NULL;
}

void events_resume(struct events *e, struct events_socket *s, uint64_t epoch)
{
        (void)e;
        (void)s;
        (void)epoch;
}

/* ---- connections ------------------------------------------------------------------ */

int call_connect(const char *path, call_extents_fn on_extents, void *userdata, struct call_connection **ret)
{
        struct call_connection *c = served ? calloc(1, sizeof(*c)) : NULL;
        int r;

        (void)path;
        if (!c)
                return served ? -ENOMEM : -ECONNREFUSED;
        *c = (struct call_connection){ .daemon = served,
                                       .on_extents = on_extents,
                                       .userdata = userdata,
                                       .events_fd = -1,
                                       .page_fds = { -1, -1 } };
        served = NULL;
        r = plan_daemon_connect(c->daemon, &daemon_ops, c);
        if (r < 0) {
                free(c);
                return r;
        }
        connection = *ret = c;
        return 0;
}

int call_connect_now(const char *path, call_extents_fn on_extents, void *userdata,
                     struct call_connection **ret)
{
        (void)path;
        (void)on_extents;
        (void)userdata;
        (void)ret;
        return -ECONNREFUSED;
}

struct call_connection *call_free(struct call_connection *c)
{
        int fds[2];

        if (!c)
                return NULL;
        for (size_t i = 0; i < c->n_replies; i++)
                bfcd__reply__free_unpacked(c->replies[i], NULL);
        for (size_t i = 0; i < c->n_queued; i++)
                bfcd__event__free_unpacked(c->queue[i], NULL);
        if (c->events_fd >= 0)
                close(c->events_fd);
        call_take_page_fds(c, fds);
        for (size_t i = 0; i < 2; i++)
                if (fds[i] >= 0)
                        close(fds[i]);
        if (connection == c)
                connection = NULL;
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

/* ---- calls ------------------------------------------------------------------------ */

static Bfcd__Reply *take_reply(struct call_connection *c, uint64_t id)
{
        for (size_t i = 0; i < c->n_replies; i++) {
                Bfcd__Reply *reply = c->replies[i];

                if (reply->id != id)
                        continue;
                memmove(c->replies + i, c->replies + i + 1, (--c->n_replies - i) * sizeof(c->replies[0]));
                return reply;
        }
        return NULL;
}

static void call_ack(struct call_connection *c)
{
        Bfcd__Ack ack = BFCD__ACK__INIT;
        Bfcd__Request request = REQUEST(ACK, ack, &ack);

        if (c->to_ack == 0)
                return;
        ack.sequence = c->to_ack;
        c->to_ack = 0;
        request.id = ++c->last_id;
        if (plan_daemon_handle(c->daemon, &request) < 0)
                call_fail(c, -EPROTO);
}

/* What the daemon would read: on the wire there is no difference between no string and an empty one. */
static int call_handle(struct call_connection *c, Bfcd__Request *request)
{
        static char nothing[] = "";

        if (request->body_case == BFCD__REQUEST__BODY_MALLOC && !request->malloc->tag)
                request->malloc->tag = nothing;
        return plan_daemon_handle(c->daemon, request);
}

static int call_exchange(struct call_connection *c, Bfcd__Request *request, Bfcd__Reply **ret_reply)
{
        static const struct timespec turn = { 0, TURN_NS };
        Bfcd__Reply *reply = NULL;
        uint64_t id = ++c->last_id;

        request->id = id;
        if (c->error == 0 && call_handle(c, request) < 0)
                call_fail(c, -EPROTO);
        while (c->error == 0) {
                bool is_busy;

                call_ack(c);
                reply = take_reply(c, id);
                if (reply)
                        break;
                is_busy = plan_daemon_turn(c->daemon);
                is_busy |= serve_event(c); /* a daemon that waits for an answer may have turns all the time */
                if (!is_busy && c->to_ack == 0)
                        nanosleep(&turn, NULL);
        }
        if (!reply)
                return c->error;
        *ret_reply = reply;
        return 0;
}

int call_send_at(struct call_connection *c, uint64_t upto, Bfcd__Request *request, Bfcd__Reply **ret_reply,
                 uint64_t *ret_epoch)
{
        (void)upto;
        *ret_epoch = 1;
        return call_exchange(c, request, ret_reply);
}

int call_send(struct call_connection *c, Bfcd__Request *request, Bfcd__Reply **ret_reply)
{
        return call_exchange(c, request, ret_reply);
}

int call_send_interruptible(struct call_connection *c, struct call_interrupt *interrupt,
                            Bfcd__Request *request, Bfcd__Reply **ret_reply, uint64_t *ret_epoch)
{
        (void)interrupt; /* no request of a plan waits for others */
        *ret_epoch = 1;
        return call_exchange(c, request, ret_reply);
}

int call_send_all_at(struct call_connection *c, uint64_t upto, Bfcd__Request *const *requests, size_t n,
                     Bfcd__Reply **ret_replies, uint64_t *ret_epoch)
{
        int r = 0;

        (void)upto;
        *ret_epoch = 1;
        for (size_t i = 0; r == 0 && i < n; i++)
                r = call_exchange(c, requests[i], &ret_replies[i]);
        return r;
}

/* A plan parks no block. */
int call_send_wakes(struct call_connection *c, struct call_interrupt *interrupt,
                    Bfcd__Request *const *requests, size_t n, size_t n_replies, Bfcd__Reply **ret_replies,
                    uint64_t *ret_epoch)
{
        (void)c;
        (void)interrupt;
        (void)requests;
        (void)n;
        (void)n_replies;
        (void)ret_replies;
        *ret_epoch = 1;
        return -ECONNRESET;
}

int call_send_within(struct call_connection *c, unsigned timeout_ms, Bfcd__Request *request)
{
        (void)c;
        (void)timeout_ms;
        (void)request;
        return -ECONNRESET;
}

bool call_read_end_reason(struct call_connection *c, char *buf, size_t n_buf)
{
        (void)c;
        (void)buf;
        (void)n_buf;
        return false;
}

int call_end(struct call_connection *c, int error)
{
        call_fail(c, error);
        return c->error;
}

void call_drain(struct call_connection *c)
{
        (void)c;
}

void call_replace(struct call_connection *c, struct call_connection *from, uint64_t epoch)
{
        (void)c;
        (void)epoch;
        call_free(from);
}

void call_set_timeout(struct call_connection *c, unsigned timeout_ms)
{
        (void)c;
        (void)timeout_ms;
}

void call_forget(struct call_connection *c)
{
        (void)c;
}
