/* The connection; see connection.h.
 *
 * Handles of libuv lie inside the connection, which is freed by the close callback of the last of them.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/net/connection.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <uv.h>

#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/net/events.h"
#include "daemon/base/fd_reserve.h"
#include "daemon/memory/broker_lease.h"
#include "daemon/net/peer_process.h"
#include "daemon/net/poller.h"
#include "daemon/net/stream.h"
#include "daemon/session/session.h"
#include "daemon/session/delivery.h"
#include "daemon/session/request.h"
#include "daemon/session/session_states.h"
#include "proto/frame.h"
#include "proto/quick.h"

#define CONNECTION_REQUESTS_PER_TURN 8u
#define CONNECTION_TURN_NS           10000u /* a request begun after that waits for the next turn */
#define CONNECTION_SLICE_NS          20000u /* of turns; then the kernel is asked for new events */
#define CONNECTION_ENDS_NS           10000u /* an end begun after that waits for the next turn */
#define CONNECTION_CLOSING_COST      8u     /* blocks that could be freed instead of an end */
#define CONNECTION_READ_MS           30000u /* for which replies may be left unread */
#define CONNECTION_WATCH_MS          100u   /* after the hello at most, the process is watched */
#define CONNECTION_ADMINS            64u    /* connections on the admin socket; of the others see places.h */
#define CONNECTION_EVICT_LOOKS       4u /* at most as many sockets are asked whether their hello has come */

/* Many fields: the socket and the process at its other end, which are parts with files of their own, are most of them. */
struct connection {
        struct connection_host *host;
        enum role role;
        struct session *session;
        struct stream stream;
        struct events *events; /* NULL: none */
        struct peer_process process;
        uv_timer_t timer; /* for the session's deadline, or else to watch its process */
        uint64_t deadline_ms;
        unsigned n_timers; /* that are not closed */
        bool is_new;       /* has not said hello */
        bool is_gone;      /* its peer; to be dropped */
        bool is_dropped;   /* the socket is no longer used, though perhaps not closed */
        bool is_working;   /* it is in host->working */
        bool in_batch;     /* replies are flushed at its end */
        bool has_frames;   /* the stream may have whole frames */
        bool is_blocked;   /* the next of these may be handled only when fewer requests wait */
        char failure[192]; /* not empty: to be dropped for this. The daemon's texts are shorter than 128 */
        struct sched_member member;
        struct places_member place; /* of a client while it is_new, or of a monitor or scheduler */
        TAILQ_ENTRY(connection) of_all, of_working;
};

/* ---- lists --------------------------------------------------------------- */

static struct connection *connection_of(struct sched_member *m)
{
        return (struct connection *)((char *)m - offsetof(struct connection, member));
}

static struct connection *connection_of_place(const struct places_member *m)
{
        return (struct connection *)((uintptr_t)m - offsetof(struct connection, place));
}

static bool connection_is_failing(const struct connection *c)
{
        return c->is_gone || c->failure[0] != '\0';
}

static void connection_make_ready(void *userdata)
{
        struct connection *c = userdata;

        if (c->is_dropped)
                return;
        sched_ready(&c->member);
        c->host->wake(c->host);
}

static void connection_make_working(struct connection *c)
{
        if (c->is_working)
                return;
        c->is_working = true;
        TAILQ_INSERT_TAIL(&c->host->working, c, of_working);
        c->host->wake(c->host);
}

/* A connection ends in these steps:
 *
 *   connection_fail()      notes the reason, and asks for a turn. is_gone instead: the client hung up
 *   connection_end_turn()  discards unread input, in slices, and drops the connection
 *   connection_drop()      closes the socket, logs the reason, and tells the session, which may stay in quarantine
 *   connection_finish()    frees the session when it is reaped, and ends the connection
 *   connection_end()       leaves all lists; libuv's close callbacks free the struct
 *
 * connection_leave() drops a connection whose session is reaped, for example after a goodbye: it writes the answer first.
 * connection_evict() frees the place of a connection for another one: it drops a monitor or scheduler, and also finishes a client without a
 * hello. on_session_resume_kept() ends the connection without a socket of a session that is resumed, but not the session. */

static void connection_fail(void *userdata, const char *why)
{
        struct connection *c = userdata;

        if (c->failure[0] == '\0')
                snprintf(c->failure, sizeof(c->failure), "%s", why);
        connection_make_ready(c);
}

/* ---- the end ------------------------------------------------------------- */

static void on_stream_closed(void *userdata)
{
        struct connection *c = userdata;

        if (--c->n_timers > 0)
                return;
        events_free(c->events);
        stream_free(&c->stream);
        free(c);
}

static void on_handle_closed(uv_handle_t *handle)
{
        on_stream_closed(handle->data);
}

/* Ends a connection that has no socket any more, without its session. */
static void connection_end(struct connection *c)
{
        assert(c->is_dropped);
        places_leave(&c->place);
        sched_leave(&c->host->sched, &c->member);
        if (c->is_working)
                TAILQ_REMOVE(&c->host->working, c, of_working);
        c->is_working = false;
        TAILQ_REMOVE(&c->host->all, c, of_all);
        c->host->n_connections[c->role]--;
        if (c->stream.is_open)
                stream_end(&c->stream);
        uv_close((uv_handle_t *)&c->timer, on_handle_closed);
        peer_process_close(&c->process);
}

static void connection_close_socket(struct connection *c)
{
        c->is_dropped = true;
        events_close(c->events);
        stream_shut(&c->stream, session_has_fds_in_flight(c->session));
        sched_idle(&c->member);
        if (c->member.class)
                sched_owe(&c->member, clock_ns(), SCHED_END_NS);
}

/* Gives up the socket. The connection stays until nothing of the session is left. */
static void connection_drop(struct connection *c, const char *why)
{
        struct session *s = c->session;

        if (c->is_dropped)
                return;
        connection_close_socket(c);
        if (why)
                log_limited(s->tenant ? &s->tenant->disconnect_log
                                      : log_limit_of_user(&c->host->disconnect_logs, s->who.uid),
                            LOG_LEVEL_NOTICE, "%s: disconnected: %s", SESSION_LABEL(s), why);
        if (session_hang_up(s, why) > 0 && peer_process_has_exited(&c->process))
                session_exit(s);
}

/* Writes what is queued, such as the answer to a goodbye, and gives up the socket. */
static void connection_leave(struct connection *c)
{
        if (c->is_dropped)
                return;
        (void)stream_flush(&c->stream, STREAM_NO_TIMEOUT);
        connection_drop(c, NULL);
}

/* The session is reaped: nothing but the handles is left. */
static void connection_finish(struct connection *c)
{
        connection_leave(c);
        c->session = session_free(c->session);
        connection_end(c); /* before the hello it counts until nothing of it is left */
}

/* ---- the process ---------------------------------------------------------- */

/* Also without a hang-up: a forked child may keep the socket open. */
static void on_process_exit(struct poller_item *item, uint32_t events)
{
        struct connection *c =
                (struct connection *)((char *)item - offsetof(struct connection, process.item));

        (void)events;
        peer_process_ignore(&c->process); /* it exits once */
        if (c->is_dropped)
                session_exit(c->session);
        c->is_gone = true;
        connection_make_ready(c); /* its turn drops it: many may exit at once */
}

static void connection_watch_process(struct connection *c)
{
        if (peer_process_watch(&c->process, c->host->poller, on_process_exit) < 0)
                peer_identity_end(&c->process.identity, c->stream.fd);
        session_set_watched(c->session, peer_process_is_watched(&c->process));
}

static void on_timer(uv_timer_t *timer)
{
        struct connection *c = timer->data;

        if (c->deadline_ms != 0)
                session_expire(c->session);
        else if (!c->is_dropped && !session_is_closing(c->session))
                connection_watch_process(c);
}

/* The client said hello: the connection gets turns with its tenant's. Its process is watched from its next request
 * on, when something may depend on it, or soon: so a crowd that says hello and disconnects costs less. */
static int connection_change_class(struct connection *c)
{
        struct sched_key key = { .tenant = c->session->tenant,
                                 .lease = session_lease_number(c->session),
                                 .role = c->role };

        c->is_new = false;
        if (c->role == ROLE_CLIENT)
                places_leave(&c->place);
        c->is_gone = peer_process_has_exited(&c->process); /* another one may have been matched by its pid */
        if (session_is_live(c->session))
                uv_timer_start(&c->timer, on_timer, CONNECTION_WATCH_MS, 0);
        else /* it is resumed */
                connection_watch_process(c);
        sched_owe(&c->member, clock_ns(), SCHED_HELLO_NS);
        return sched_join(&c->host->sched, &c->member, &key);
}

/* ---- writing ------------------------------------------------------------- */

static bool connection_is_paused(const struct connection *c)
{
        return !session_may_read(c->session) || stream_is_full(&c->stream) ||
               (c->is_blocked && session_is_full(c->session));
}

static void connection_flush(struct connection *c)
{
        bool has_deadline = session_deadline_ms(c->session) != 0; /* which comes first */
        int r = stream_flush(&c->stream, has_deadline ? STREAM_NO_TIMEOUT : CONNECTION_READ_MS);

        if ((r == -EPIPE || r == -ECONNRESET) && c->failure[0] == '\0')
                c->is_gone = true; /* and has not read its replies */
        else if (r < 0)
                connection_fail(c, strerror(-r));
}

/* ---- what the session calls ------------------------------------------------ */

static void on_session_send(void *userdata, const Bfcd__Reply *reply, const int *fds, size_t n_fds)
{
        struct connection *c = userdata;
        uint8_t quick[QUICK_REPLY_BYTES], *payload;
        size_t n_quick = quick_pack_reply(reply, quick);
        int r = -EPIPE;

        if (!c->is_dropped && !connection_is_failing(c))
                r = frame_writer_add(c->stream.writer,
                                     n_quick > 0 ? n_quick : bfcd__reply__get_packed_size(reply), fds, n_fds,
                                     &payload);
        if (r < 0) {
                for (size_t i = 0; i < n_fds; i++)
                        close(fds[i]);
                if (!c->is_dropped && !c->is_gone) /* keeps the first failure */
                        connection_fail(c, r == -ENOBUFS
                                                   ? "too many unread replies: the client does not read them"
                                                   : strerror(-r));
                return;
        }
        if (n_quick > 0)
                memcpy(payload, quick, n_quick);
        else
                bfcd__reply__pack(reply, payload);
        if (!c->in_batch)
                connection_make_ready(c); /* its turn flushes */
}

static void on_session_changed(void *userdata)
{
        struct connection *c = userdata;
        uint64_t deadline_ms = session_deadline_ms(c->session), now_ms;

        if (session_is_closing(c->session) && !session_waits_for_exit(c->session))
                peer_process_ignore(&c->process);
        if (session_has_work(c->session))
                connection_make_working(c);
        if (deadline_ms == c->deadline_ms)
                return;
        c->deadline_ms = deadline_ms;
        now_ms = clock_ms();
        if (deadline_ms == 0)
                uv_timer_stop(&c->timer);
        else
                uv_timer_start(&c->timer, on_timer, deadline_ms > now_ms ? deadline_ms - now_ms : 0, 0);
}

static void on_session_send_event(void *userdata, const Bfcd__Event *event)
{
        struct connection *c = userdata;

        if (!c->is_dropped && !connection_is_failing(c))
                events_send(c->events, event);
}

static int on_event_reply(void *userdata, const Bfcd__EventReply *reply, const char **ret_why)
{
        const struct connection *c = userdata;

        if (connection_is_failing(c))
                return 0;
        return session_handle_event(c->session, reply, ret_why);
}

/* The exit of a process may be heard here first. A client that closed only this socket has disconnected too,
 * because it could not unmap anything any more. */
static void on_events_end(void *userdata, const char *why)
{
        struct connection *c = userdata;

        if (why)
                connection_fail(c, why);
        else if (!session_is_closing(c->session))
                c->is_gone = true; /* so ends a process of which a child has the connection, too */
        connection_make_ready(c);  /* its turn drops it */
}

static const struct events_ops connection_events_ops = {
        .ready = connection_make_ready,
        .reply = on_event_reply,
        .end = on_events_end,
};

/* A new one for each hello, because the one before may have been refused. */
static int on_session_open_events(void *userdata, int *ret_fd)
{
        struct connection *c = userdata;

        c->events = events_free(c->events);
        return events_new(c->host->poller, c->host->arena, &connection_events_ops, c, &c->events, ret_fd);
}

/* Both sessions have the same process; the new connection has read more about it. */
static void on_session_resume_kept(void *userdata, struct session *kept)
{
        struct connection *c = userdata;
        struct credentials *who = &c->session->who;

        credentials_clear(&kept->who);
        kept->who = *who;
        kept->ops = c->session->ops;
        *who = (struct credentials){ .pid = kept->who.pid };
        session_free(c->session);
        connection_end(kept->userdata);
        c->session = kept;
        kept->userdata = c;
}

static const struct session_ops connection_session_ops = {
        .send = on_session_send,
        .ready = connection_make_ready,
        .changed = on_session_changed,
        .abort = connection_fail,
        .open_events = on_session_open_events,
        .send_event = on_session_send_event,
        .resume_kept = on_session_resume_kept,
};

/* ---- reading ------------------------------------------------------------- */

static const char *failure_of(int r)
{
        return r == -ENOMEM ? "out of memory" : strerror(-r);
}

static int connection_handle_frame(struct connection *c, const uint8_t *payload, size_t n_bytes)
{
        const Bfcd__Request *request = message_unpack_request(c->host->arena, payload, n_bytes);
        const char *why = "the client sent a frame that is not a request";
        bool is_hello = request && request->body_case == BFCD__REQUEST__BODY_HELLO;
        int r = -EPROTO;

        if (request) {
                r = peer_process_match(&c->process, c->host->broker, c->stream.fd,
                                       is_hello && !session_is_greeted(c->session), &c->session->who);
                if (r < 0)
                        why = failure_of(r);
        }
        if (request && c->process.identity.is_open && session_is_greeted(c->session)) {
                why = "the client did not wait for the reply to its hello, so its process cannot be "
                      "identified";
                r = -EPERM;
        }
        if (r == 0)
                r = session_handle(c->session, request, &why);
        if (r == 0 && session_looks_at_many(c->session, request))
                sched_owe(&c->member, clock_ns(), SCHED_LOOK_NS);
        if (r == 0 && c->is_new && session_is_greeted(c->session)) {
                r = connection_change_class(c);
                if (r < 0)
                        why = failure_of(r);
        } else if (r == 0 && !c->is_new && request->body_case != BFCD__REQUEST__BODY_GOODBYE) {
                connection_watch_process(c);
        }
        if (r < 0)
                connection_fail(c, why);
        return r;
}

/* Whether the next frame has to wait, because the session may not handle it yet. */
static void connection_look_ahead(struct connection *c)
{
        const Bfcd__Request *request;
        const uint8_t *payload;
        size_t n_bytes;

        c->is_blocked = false;
        if (!session_is_full(c->session) || frame_reader_peek(c->stream.reader, &payload, &n_bytes) != 0)
                return;
        request = message_unpack_request(c->host->arena, payload, n_bytes);
        c->is_blocked = request && !session_may_handle(c->session, request);
}

/* Handles whole frames in the buffer, up to a turn's worth. */
static void connection_handle_frames(struct connection *c)
{
        unsigned n_most = role_is_bounded(c->role) ? 1 : CONNECTION_REQUESTS_PER_TURN;
        uint64_t end_ns = c->host->sched.now_ns + CONNECTION_TURN_NS;

        c->in_batch = true;
        c->has_frames = false;
        for (unsigned n = 0; !connection_is_failing(c); n++) {
                const uint8_t *payload;
                size_t n_bytes;
                int r;

                connection_look_ahead(c);
                /* The clock is asked only between two frames. */
                if (n > 0 && frame_reader_peek(c->stream.reader, &payload, &n_bytes) == FRAME_AGAIN)
                        break;
                if (n == n_most || (n > 0 && clock_ns() >= end_ns) || connection_is_paused(c)) {
                        c->has_frames = true;
                        break;
                }
                r = stream_next(&c->stream, &payload, &n_bytes);
                if (r < 0)
                        connection_fail(c, "the client sent a frame with an invalid length");
                if (r != 0 || connection_handle_frame(c, payload, n_bytes) < 0)
                        break;
        }
        c->in_batch = false;
}

static void connection_receive(struct connection *c)
{
        int r = stream_read(&c->stream, &c->process);

        if (r == 0)
                connection_handle_frames(c);
        else if (r == FRAME_EOF || r == -ECONNRESET)
                c->is_gone = true; /* the turn's end drops it */
        else if (r == -EPROTO)
                connection_fail(c, "the client sent file descriptors, which the protocol does not allow");
        else if (r == -EPERM)
                connection_fail(c, "a process other than the one that connected sent data");
        else if (r < 0)
                connection_fail(c, strerror(-r));
}

/* ---- turns ---------------------------------------------------------------- */

/* Sends what was queued in the turn, and drops the connection if it has failed. */
static void connection_end_turn(struct connection *c)
{
        bool is_paused;

        if (!c->is_dropped && !c->is_gone)
                connection_flush(c); /* also of a failing one: the client may be told why */
        if (connection_is_failing(c) && !c->is_dropped &&
            (stream_drop_input(&c->stream) || events_drop_input(c->events))) {
                sched_owe(&c->member, clock_ns(), SCHED_DROP_NS);
                connection_make_ready(c); /* the rest has further turns */
                return;
        }
        if (connection_is_failing(c))
                connection_drop(c, c->is_gone ? NULL : c->failure);
        if (c->is_dropped)
                return;
        /* The flush may have ended a pause, with frames waiting in the buffer. What the kernel has reported, it does not
         * report again. */
        is_paused = connection_is_paused(c);
        if (stream_has_left(&c->stream) || (!is_paused && (c->has_frames || stream_is_readable(&c->stream))))
                connection_make_ready(c);
        stream_wait(&c->stream, !is_paused);
}

static void connection_serve(struct connection *c)
{
        bool is_paused;

        if (c->events)
                events_turn(c->events);
        if (c->is_dropped)
                return;
        if (session_may_deliver(c->session) && !connection_is_failing(c)) {
                c->in_batch = true;
                session_deliver(c->session);
                c->in_batch = false;
                connection_end_turn(c);
                connection_make_ready(c); /* what has come is read in a later turn */
                return;
        }
        is_paused = connection_is_paused(c);
        if (connection_is_failing(c))
                ; /* the turn's end drops it */
        else if (c->has_frames && !is_paused)
                connection_handle_frames(c);
        else if (stream_is_readable(&c->stream) && !is_paused)
                connection_receive(c);
        else if (stream_has_left(&c->stream))
                c->is_gone = true; /* also while paused: nothing more that it has sent is handled */
        connection_end_turn(c);
}

static void connection_take_turn(struct sched_member *m)
{
        struct connection *c = connection_of(m);
        bool is_admin = c->role == ROLE_ADMIN;

        if (is_admin)
                fd_reserve_begin();
        connection_serve(c);
        if (is_admin)
                fd_reserve_end();
}

static void on_stream_drained(void *userdata)
{
        const struct connection *c = userdata;

        session_end_linger(c->session);
}

static const struct stream_ops connection_stream_ops = {
        .ready = connection_make_ready,
        .fail = connection_fail,
        .drained = on_stream_drained,
        .closed = on_stream_closed,
};

/* ---- places ---------------------------------------------------------------- */

/* The oldest whose hello has not come yet. If the hellos of the oldest wait to be read, the newest: the oldest are served
 * next, and would all be lost if very many connect in one moment. */
static struct connection *find_displaced(const struct places_user *user)
{
        struct places_member *m = TAILQ_FIRST(&user->members);

        for (unsigned i = 0; m && i < CONNECTION_EVICT_LOOKS; i++, m = TAILQ_NEXT(m, link))
                if (stream_n_input(&connection_of_place(m)->stream) == 0)
                        return connection_of_place(m);
        return connection_of_place(TAILQ_LAST(&user->members, places_members));
}

/* It is in no turn of its own now, so it can end at once; a session ends in a turn. */
static void connection_evict(struct connection *c)
{
        const struct credentials *who = &c->session->who;

        places_leave(&c->place);
        if (role_is_bounded(c->role)) {
                connection_drop(c, c->role == ROLE_MONITOR
                                           ? "the monitor socket has too many connections, and most of them "
                                             "belong to this user or its tenant"
                                           : "the lease socket has too many connections, and most of them "
                                             "belong to this user or its tenant");
                return;
        }
        log_limited(log_limit_of_user(&c->host->unauth_logs, who->uid), LOG_LEVEL_WARNING,
                    "uid %u (pid %d) was disconnected before its hello: too many connections have sent no "
                    "hello, and most of them belong to this user or its tenant",
                    (unsigned)who->uid, (int)who->pid);
        connection_drop(c, NULL);
        connection_finish(c);
}

static const char *place_trouble(enum role role, int r)
{
        if (role == ROLE_CLIENT)
                return "too many connections have sent no hello";
        if (role == ROLE_ADMIN)
                return "the admin socket has too many connections";
        if (role == ROLE_SCHEDULER)
                return r == -EDQUOT ? "the user has too many connections to the lease socket"
                                    : "the lease socket has too many connections";
        return r == -EDQUOT ? "the user has too many connections to the monitor socket"
                            : "the monitor socket has too many connections";
}

static int connection_refuse(struct connection *c, const struct credentials *who, int r)
{
        log_limited(log_limit_of_user(&c->host->unauth_logs, who->uid), LOG_LEVEL_WARNING,
                    "uid %u (pid %d): connection refused: %s", (unsigned)who->uid, (int)who->pid,
                    place_trouble(c->role, r));
        return -EUSERS;
}

static int connection_find_place(struct connection *c, int fd, const struct lease_socket *socket,
                                 struct credentials *who)
{
        struct connection_host *host = c->host;
        struct places *places = c->role == ROLE_CLIENT    ? &host->unauth
                                : c->role == ROLE_MONITOR ? &host->monitors
                                                          : &host->schedulers;
        const struct tenant *tenant;
        struct places_user *user;
        int r = peer_process_expect(&c->process, host->broker, fd, who, &tenant);

        if (r < 0)
                return r;
        if (socket)
                tenant = socket->tenant;
        r = places_look(places, tenant, who->uid, &user);
        if (r < 0)
                return connection_refuse(c, who, r);
        if (r > 0)
                connection_evict(find_displaced(user));
        return places_join(places, &c->place, tenant, who->uid);
}

/* ---- what the server calls ----------------------------------------------- */

/* All but libuv's handles. */
static int connection_prepare(struct connection *c, int fd, const struct lease_socket *socket,
                              const struct fd_guard *guard)
{
        struct connection_host *host = c->host;
        struct credentials who = { .pid = 0 };
        struct sched_key key = { .role = c->role };
        /* Soon: bytes that were sent before do not show their sender, on older kernels. */
        int r = peer_process_new(&c->process, fd, &who);

        if (r == -ESRCH) /* as stream_has_hung_up() */
                r = -ECONNABORTED;
        if (r == 0 && c->role != ROLE_ADMIN)
                r = connection_find_place(c, fd, socket, &who);
        else if (r == 0 && host->n_connections[ROLE_ADMIN] >= CONNECTION_ADMINS)
                r = connection_refuse(c, &who, -EUSERS);
        if (r == 0)
                r = session_new(host->broker, c->role, &who, &connection_session_ops, c, &c->session);
        if (r == 0 && socket)
                c->session->lease_socket = socket->number;
        if (r == 0 && c->role == ROLE_CLIENT)
                key = (struct sched_key){ .kind = SCHED_HELLO,
                                          .tenant = c->place.user->class->tenant,
                                          .uid = who.uid };
        if (r == 0)
                r = sched_join(&host->sched, &c->member, &key);
        if (r == 0)
                r = stream_open(&c->stream, host->loop, host->poller, fd, guard, &connection_stream_ops, c);
        credentials_clear(&who);
        return r;
}

int connection_new(struct connection_host *host, int fd, enum role role, const struct lease_socket *socket)
{
        struct connection *c = NULL;
        struct fd_guard guard;
        int r = 0;

        fd_guard_init(&guard, fd);
        if (stream_has_hung_up(fd)) /* not logged: so a crowd that connects and disconnects costs little */
                r = -ECONNABORTED;
        else if (!(c = calloc(1, sizeof(*c))))
                r = -ENOMEM;
        if (r < 0) {
                fd_guard_close(&guard, fd);
                return r;
        }
        c->host = host;
        c->member.turn = connection_take_turn;
        c->role = role;
        c->process.pidfd = -1;
        r = connection_prepare(c, fd, socket, &guard);
        if (r < 0) {
                peer_process_close(&c->process);
                places_leave(&c->place);
                sched_leave(&host->sched, &c->member);
                session_free(c->session);
                free(c);
                fd_guard_close(&guard, fd);
                return r;
        }
        uv_timer_init(host->loop, &c->timer);
        c->timer.data = c;
        c->n_timers = 2; /* with the stream's */
        c->is_new = true;
        host->n_connections[role]++;
        TAILQ_INSERT_TAIL(&host->all, c, of_all);
        on_session_changed(c);
        return 0;
}

int connection_keep(struct connection_host *host, struct session *s)
{
        struct connection *c = calloc(1, sizeof(*c));
        int r;

        if (!c)
                return -ENOMEM;
        ledger_note_session(s->broker->ledger, s->index);
        c->host = host;
        c->session = s;
        c->stream.fd = -1;
        c->is_dropped = true;
        r = peer_process_find(&c->process, &s->who);
        uv_timer_init(host->loop, &c->timer);
        c->n_timers = 1;
        c->timer.data = c;
        connection_watch_process(c);
        host->n_connections[ROLE_CLIENT]++;
        TAILQ_INSERT_TAIL(&host->all, c, of_all);
        session_attach(s, &connection_session_ops, c, r == -ESRCH);
        if (peer_process_has_exited(&c->process))
                session_exit(s);
        ledger_note_nothing(s->broker->ledger);
        return 0;
}

int connection_host_init(struct connection_host *host)
{
        TAILQ_INIT(&host->all);
        TAILQ_INIT(&host->working);
        sched_init(&host->sched);
        places_init(&host->unauth, &places_before_hello);
        places_init(&host->monitors, &places_of_monitors);
        places_init(&host->schedulers, &places_of_monitors);
        return poller_new(&host->poller);
}

/* One slice of the first session's work; its next turn comes after the others'. */
static void work_one(struct connection_host *host, size_t n_blocks)
{
        struct connection *c = TAILQ_FIRST(&host->working);
        const char *why = "";
        int r;

        TAILQ_REMOVE(&host->working, c, of_working);
        c->is_working = false;
        if (connection_is_failing(c) && !c->is_dropped && !session_is_closing(c->session))
                return; /* its turn drops it */
        r = session_work(c->session, n_blocks, &why);
        if (r == SESSION_MORE) {
                connection_make_working(c);
        } else if (r == SESSION_LINGERS) {
                connection_leave(c);
                if (session_has_fds_in_flight(c->session))
                        stream_drain(&c->stream);
        } else if (r == SESSION_DONE) {
                connection_finish(c);
        } else if (r < 0) {
                connection_fail(c, why);
        } else {
                connection_make_ready(c); /* for what the client has sent meanwhile */
        }
}

/* An end costs as much as the freeing of some blocks, and all share one slice of these. */
static void work(struct connection_host *host)
{
        uint64_t end_ns = TAILQ_EMPTY(&host->working) ? 0 : clock_ns() + CONNECTION_ENDS_NS;
        size_t n_blocks = SESSION_REAP_SLICE;

        while (n_blocks > 0 && !TAILQ_EMPTY(&host->working)) {
                const struct connection *c = TAILQ_FIRST(&host->working);
                size_t n_spent = session_n_records(c->session) + CONNECTION_CLOSING_COST;

                work_one(host, n_blocks);
                n_blocks -= n_spent < n_blocks ? n_spent : n_blocks;
                if (clock_ns() >= end_ns)
                        return;
        }
}

void connection_turn(struct connection_host *host, uint64_t now_ns)
{
        sched_run(&host->sched, now_ns, CONNECTION_SLICE_NS);
        work(host);
}

bool connection_is_due(const struct connection_host *host)
{
        return !TAILQ_EMPTY(&host->sched.root.due) || !TAILQ_EMPTY(&host->working);
}

void connection_leave_all(struct connection_host *host, const char *why)
{
        struct connection *c, *next;

        for (c = TAILQ_FIRST(&host->all); c; c = next) {
                next = TAILQ_NEXT(c, of_all);
                if (!session_can_stay(c->session))
                        continue;
                if (!c->is_dropped)
                        connection_close_socket(c);
                session_leave_behind(c->session);
                connection_finish(c);
        }
        connection_drop_all(host, why);
}

void connection_drop_all(struct connection_host *host, const char *why)
{
        struct connection *c;

        TAILQ_FOREACH(c, &host->all, of_all)
        {
                connection_drop(c, NULL);
                session_close(c->session, why);
        }
        while (!TAILQ_EMPTY(&host->working))
                work(host);
        /* Sessions that linger do not wait any longer. */
        while ((c = TAILQ_FIRST(&host->all))) {
                session_exit(c->session);
                session_end_linger(c->session);
                work(host);
        }
}
