/* The connection; see connection.h.
 *
 * Handles of libuv lie inside the connection, which is freed by the close
 * callback of the last of them.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/connection.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/sockios.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <uv.h>

#include "daemon/cgroup.h"
#include "daemon/events.h"
#include "daemon/log.h"
#include "daemon/pin.h"
#include "daemon/restore.h"
#include "daemon/session.h"
#include "proto/frame.h"

#define CONNECTION_REQUESTS_PER_TURN 8u
#define CONNECTION_TURN_NS           10000u         /* begun after that is the next turn's */
#define CONNECTION_SLICE_NS          20000u         /* of turns, then the kernel is asked who else came */
#define CONNECTION_ENDS_NS           10000u         /* an end begun after that is the next turn's */
#define CONNECTION_RECEIVE_BYTES     128u           /* in one turn: several requests */
#define CONNECTION_DRIBBLE_BYTES     16u            /* from who was read last time without a whole request */
#define CONNECTION_QUEUE_PAUSE       (128u * 1024u) /* bytes of replies; then no more reading */
#define CONNECTION_QUEUE_MAX         (1024u * 1024u)
#define CONNECTION_HELLO_TIMEOUT_MS  10000u
#define CONNECTION_CROWD_MS          20u
#define CONNECTION_LINGER_MAX_MS     128u
#define CONNECTION_CLOSING_COST      8u    /* blocks that could be freed instead of an end */
#define CONNECTION_NEWCOMERS         1024u /* in all */
#define CONNECTION_NEWCOMERS_OF_USER 128u  /* a job of as many processes may begin at once */

struct connection {
        struct connection_host *host;
        bool admin;
        int fd;
        int pidfd; /* -1: the process cannot be watched, pid_poll is not used */
        struct pin pin;
        uv_poll_t poll;
        uv_poll_t pid_poll;
        uv_timer_t timer; /* for the hello, while crowded or stuck, for the quarantine, while lingering */
        unsigned n_handles;
        int awaited;   /* events that poll waits for */
        bool in_batch; /* replies are flushed at its end */
        bool is_new;   /* has not said hello */
        bool is_known; /* who it is was looked at, all of it */
        bool is_closing;
        bool has_come, has_left; /* by the kernel's word; its turn will see */
        bool is_muted;           /* that was said twice before its turn */
        bool has_frames;         /* the reader may hold whole frames */
        bool dribbles;           /* what came last made no frame whole */
        bool crowded;            /* no fds can be sent for a while */
        bool is_stuck;           /* replies wait for the peer to read; timer runs */
        int n_unread;            /* bytes in its socket when that time began */
        bool dropped;            /* the socket is no longer used, though perhaps not closed */
        uint64_t linger_ms;      /* until the next look, doubling */
        char failure[96];        /* not empty: to be dropped for this */
        struct frame_reader *reader;
        struct frame_writer *writer;
        struct session *session;
        struct events *events; /* NULL: none */
        struct party_member member;
        TAILQ_ENTRY(connection) of_all, of_closing;
};

static void connection_drop(struct connection *c, const char *why);
static void on_process_exit(uv_poll_t *handle, int status, int events);

/* ---- who is there -------------------------------------------------------- */

static int peer_groups(int fd, struct credentials *who)
{
        socklen_t n_bytes = 0;

        who->gids = NULL;
        who->n_gids = 0;
        if (getsockopt(fd, SOL_SOCKET, SO_PEERGROUPS, NULL, &n_bytes) == 0 || errno != ERANGE || n_bytes == 0)
                return 0;
        who->gids = malloc(n_bytes);
        if (!who->gids)
                return -ENOMEM;
        if (getsockopt(fd, SOL_SOCKET, SO_PEERGROUPS, who->gids, &n_bytes) < 0)
                return -errno;
        who->n_gids = n_bytes / sizeof(gid_t);
        return 0;
}

/* Field 22 of /proc/PID/stat; the name before it may contain anything. */
static uint64_t process_start_time(pid_t pid)
{
        char path[64], buf[1024], *at;
        uint64_t start_time = 0;
        ssize_t n;
        int fd;

        snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
        fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
                return 0;
        n = read(fd, buf, sizeof(buf) - 1);
        close(fd);
        if (n <= 0)
                return 0;
        buf[n] = '\0';
        at = strrchr(buf, ')');
        if (!at ||
            sscanf(at + 1,
                   " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %" SCNu64,
                   &start_time) != 1)
                return 0;
        return start_time;
}

static int peer_credentials(int fd, struct credentials *ret)
{
        struct ucred ucred;
        socklen_t n = sizeof(ucred);

        if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &ucred, &n) < 0)
                return -errno;
        *ret = (struct credentials){ .pid = ucred.pid, .uid = ucred.uid, .gid = ucred.gid };
        return 0;
}

/* What cannot be known matches no pattern. */
static void connection_look_at_cgroup(struct connection *c)
{
        struct credentials *who = &c->session->who;
        char path[CGROUP_PATH_BYTES];

        if (cgroup_of_process("/proc", who->pid, c->pidfd, path) == 0)
                who->cgroup = strdup(path);
}

/* What only a hello needs, and takes its time: not for those who connect and say nothing. */
static int connection_look_closer(struct connection *c)
{
        struct credentials *who = &c->session->who;

        if (c->is_known)
                return 0;
        c->is_known = true;
        who->start_time = process_start_time(who->pid);
        if (c->host->broker->config->has_patterns)
                connection_look_at_cgroup(c);
        return peer_groups(c->fd, who);
}

/* Without a word: a crowd that connects and disconnects costs little more than that. */
static bool has_hung_up(int fd)
{
        char c;

        return recv(fd, &c, 1, MSG_PEEK | MSG_DONTWAIT) == 0;
}

static bool process_has_exited(int pidfd)
{
        struct pollfd p = { .fd = pidfd, .events = POLLIN };

        return pidfd >= 0 && poll(&p, 1, 0) == 1;
}

/* ---- lists --------------------------------------------------------------- */

static struct connection *connection_of(struct party_member *m)
{
        return (struct connection *)((char *)m - offsetof(struct connection, member));
}

/* Nobody may keep others out by connecting and saying nothing. */
static bool newcomers_are_too_many(const struct connection_host *host, const struct party_key *key)
{
        return party_n_members(&host->parties, key) >= CONNECTION_NEWCOMERS_OF_USER ||
               host->n_newcomers >= CONNECTION_NEWCOMERS;
}

static void connection_count_in(struct connection *c)
{
        c->is_new = true;
        c->host->n_newcomers++;
        c->host->n_connections[c->admin]++;
        TAILQ_INSERT_TAIL(&c->host->all, c, of_all);
}

static void connection_is_known(struct connection *c)
{
        if (!c->is_new)
                return;
        c->is_new = false;
        c->host->n_newcomers--;
}

/* It said hello, and goes on with its tenant. */
static int connection_change_party(struct connection *c)
{
        struct party_key key = { .tenant = c->session->tenant, .admin = c->admin };

        connection_is_known(c);
        return party_join(&c->host->parties, &c->member, &key);
}

static void connection_make_ready(struct connection *c)
{
        if (c->dropped)
                return;
        party_ready(&c->host->parties, &c->member);
        c->host->wake(c->host);
}

static void connection_make_closing(struct connection *c)
{
        if (c->is_closing)
                return;
        c->is_closing = true;
        TAILQ_INSERT_TAIL(&c->host->closing, c, of_closing);
        c->host->wake(c->host);
}

/* ---- the end ------------------------------------------------------------- */

static void on_handle_closed(uv_handle_t *handle)
{
        struct connection *c = handle->data;

        if (--c->n_handles > 0)
                return;
        if (c->fd >= 0)
                close(c->fd);
        if (c->pidfd >= 0)
                close(c->pidfd);
        frame_reader_free(c->reader);
        frame_writer_free(c->writer);
        free(c);
}

/* As the kernel counts them. */
static int socket_n_unread(int fd)
{
        int n_bytes = 0;

        return fd >= 0 && ioctl(fd, SIOCOUTQ, &n_bytes) == 0 ? n_bytes : 0;
}

static void connection_linger(struct connection *c);

static void on_linger(uv_timer_t *timer)
{
        connection_linger(timer->data);
}

/* Fds that were sent are in flight until the peer reads them or every copy of
 * its socket is closed, which is when nothing of ours waits in its queue. Were
 * the place given up before, one process could fill the kernel's limit on fds
 * in flight with sockets of dead children. */
static void connection_linger(struct connection *c)
{
        if (socket_n_unread(c->fd) > 0) {
                uv_timer_start(&c->timer, on_linger, c->linger_ms, 0);
                if (c->linger_ms < CONNECTION_LINGER_MAX_MS)
                        c->linger_ms *= 2;
                return;
        }
        session_let_go(c->session);
        connection_make_closing(c);
}

/* The last word goes out, the answer to a goodbye, and then the socket goes. */
static void connection_leave(struct connection *c)
{
        if (c->dropped)
                return;
        (void)frame_writer_flush(c->writer, c->fd);
        connection_drop(c, NULL);
}

/* Of a connection that has no socket any more, without its session. */
static void connection_end(struct connection *c)
{
        assert(c->dropped);
        connection_is_known(c);
        party_leave(&c->host->parties, &c->member);
        if (c->is_closing)
                TAILQ_REMOVE(&c->host->closing, c, of_closing);
        c->is_closing = false;
        TAILQ_REMOVE(&c->host->all, c, of_all);
        c->host->n_connections[c->admin]--;
        uv_close((uv_handle_t *)&c->timer, on_handle_closed);
        if (c->pidfd >= 0)
                uv_close((uv_handle_t *)&c->pid_poll, on_handle_closed);
}

/* The session is reaped: nothing but the handles is left. */
static void connection_finish(struct connection *c)
{
        connection_leave(c);
        c->session = session_free(c->session);
        connection_end(c); /* a silent one counts until nothing of it is left */
}

static void session_is_over(struct connection *c, const char *why)
{
        uv_timer_stop(&c->timer);
        if (c->pidfd >= 0)
                uv_poll_stop(&c->pid_poll);
        session_close(c->session, why);
        connection_make_closing(c);
}

/* Also without a hang-up: a forked child may keep the socket open. */
static void on_process_exit(uv_poll_t *handle, int status, int events)
{
        struct connection *c = handle->data;

        (void)status;
        (void)events;
        connection_drop(c, NULL);
        session_is_over(c, "its process exited");
}

static void on_quarantine_end(uv_timer_t *timer)
{
        struct connection *c = timer->data;

        /* Under a living importer such memory cannot be destroyed: not at all, or not defined. */
        if (c->pidfd >= 0 && session_holds_mappings(c->session)) {
                log_warning(
                        "session %" PRIu64
                        ": pid %d still lives after its hang-up and the quarantine's end; what it held "
                        "stays charged to tenant '%s' until it exits, since its device cannot take memory "
                        "from a living process",
                        c->session->id, (int)c->session->who.pid, c->session->tenant->name);
                return;
        }
        log_warning("session %" PRIu64
                    ": pid %d still lives after its hang-up and the quarantine's end; what it "
                    "held is released",
                    c->session->id, (int)c->session->who.pid);
        session_is_over(c, "quarantine ended");
}

static void connection_quarantine(struct connection *c)
{
        if (process_has_exited(c->pidfd))
                session_is_over(c, "its process exited");
        else if (!c->session->may_return || c->pidfd < 0)
                uv_timer_start(&c->timer, on_quarantine_end, c->host->broker->config->quarantine_timeout_ms,
                               0);
}

static void connection_close_socket(struct connection *c)
{
        c->dropped = true;
        uv_timer_stop(&c->timer);
        c->events = events_close(c->events);
        uv_close((uv_handle_t *)&c->poll, on_handle_closed);
        if (c->session->in_flight) {
                shutdown(c->fd, SHUT_RDWR); /* what was sent can still be read */
        } else {
                close(c->fd);
                c->fd = -1;
        }
        party_rest(&c->host->parties, &c->member);
}

/* Gives up the socket. The session goes on until nothing of it is left. */
static void connection_drop(struct connection *c, const char *why)
{
        struct session *s = c->session;

        if (c->dropped)
                return;
        connection_close_socket(c);
        if (why)
                log_limited(&c->host->violation_log, LOG_LEVEL_NOTICE,
                            "session %" PRIu64 " (0: before the hello; uid %u, pid %d): disconnected: %s",
                            s->id, (unsigned)s->who.uid, (int)s->who.pid, why);
        if (s->state == SESSION_CLOSING)
                return;
        if (session_hang_up(s) > 0)
                connection_quarantine(c);
        else
                connection_make_closing(c);
}

/* ---- writing ------------------------------------------------------------- */

static void connection_fail(struct connection *c, const char *why)
{
        if (c->failure[0] == '\0')
                snprintf(c->failure, sizeof(c->failure), "%s", why);
        connection_make_ready(c);
}

/* Blocks whose extents wait for an acknowledgement do not count: that is read. */
static bool connection_is_paused(const struct connection *c)
{
        return frame_writer_n_queued(c->writer) > CONNECTION_QUEUE_PAUSE ||
               c->session->n_requests >= SESSION_MAX_PENDING || session_is_settling(c->session);
}

static void on_socket(uv_poll_t *handle, int status, int events);

/* Waits for what the connection needs now. A paused one still hears its peer
 * hang up. */
static void connection_update(struct connection *c)
{
        int events = UV_DISCONNECT;

        if (c->dropped)
                return;
        if (c->is_muted) {
                c->awaited = 0;
                uv_poll_stop(&c->poll);
                return;
        }
        if (c->session->state != SESSION_CLOSING && !connection_is_paused(c))
                events |= UV_READABLE;
        if (frame_writer_n_queued(c->writer) > 0 && !c->crowded)
                events |= UV_WRITABLE;
        if (events == c->awaited)
                return;
        c->awaited = events;
        uv_poll_start(&c->poll, events, on_socket);
}

static void on_crowd_end(uv_timer_t *timer);

static void on_return_timeout(uv_timer_t *timer)
{
        connection_drop(timer->data, "it did not say in time what it holds");
}

static void connection_start_returning_time(struct connection *c)
{
        uv_timer_start(&c->timer, on_return_timeout, CONNECTION_HELLO_TIMEOUT_MS, 0);
}

static void on_read_timeout(uv_timer_t *timer);

static void connection_start_reading_time(struct connection *c)
{
        c->n_unread = socket_n_unread(c->fd);
        uv_timer_start(&c->timer, on_read_timeout, c->host->broker->config->read_timeout_ms, 0);
}

/* The socket takes more only when most of it was read: a slow reader may have taken something. */
static void on_read_timeout(uv_timer_t *timer)
{
        struct connection *c = timer->data;

        if (socket_n_unread(c->fd) < c->n_unread)
                connection_start_reading_time(c);
        else
                connection_fail(c, "it takes none of its replies");
}

/* Who takes something has all of its time again. Before the hello that has its own. */
static void connection_watch_reader(struct connection *c, size_t n_before)
{
        size_t n_queued = frame_writer_n_queued(c->writer);

        if (c->is_new || c->session->state == SESSION_RETURNING ||
            (c->is_stuck && n_queued > 0 && n_queued >= n_before))
                return;
        if (n_queued > 0)
                connection_start_reading_time(c);
        else if (c->is_stuck)
                uv_timer_stop(&c->timer);
        c->is_stuck = n_queued > 0;
}

static void connection_flush(struct connection *c)
{
        size_t n_before = frame_writer_n_queued(c->writer);
        int r;

        if (c->crowded)
                return;
        r = frame_writer_flush(c->writer, c->fd);
        if ((r == -EPIPE || r == -ECONNRESET) && c->failure[0] == '\0') {
                connection_drop(c, NULL); /* it is gone, with its answers unread */
        } else if (r < 0) {
                connection_fail(c, strerror(-r));
        } else if (r == FRAME_CROWDED) {
                c->crowded = true;
                c->is_stuck = false;
                uv_timer_start(&c->timer, on_crowd_end, CONNECTION_CROWD_MS, 0);
        } else {
                connection_watch_reader(c, n_before);
        }
}

static void on_crowd_end(uv_timer_t *timer)
{
        struct connection *c = timer->data;

        c->crowded = false;
        if (c->session->state == SESSION_RETURNING)
                connection_start_returning_time(c);
        connection_make_ready(c); /* its turn flushes */
}

static int on_session_send(void *userdata, const Bfcd__Reply *reply, const int *fds, size_t n_fds)
{
        struct connection *c = userdata;
        uint8_t *payload;
        int r;

        if (c->dropped || c->failure[0] != '\0')
                return 0;
        r = frame_writer_add(c->writer, bfcd__reply__get_packed_size(reply), fds, n_fds, &payload);
        if (r == -EMFILE)
                return r;
        if (r < 0) {
                connection_fail(c, r == -ENOBUFS ? "it does not read its replies" : strerror(-r));
                return 0;
        }
        bfcd__reply__pack(reply, payload);
        if (!c->in_batch)
                connection_make_ready(c); /* its turn flushes */
        return 0;
}

static void on_session_resume(void *userdata)
{
        connection_make_ready(userdata);
}

/* Of a session that is awaited there is no socket to close: it has the quarantine's time. */
static void on_session_abort(void *userdata, const char *why)
{
        struct connection *c = userdata;

        if (c->dropped && c->session->state == SESSION_QUARANTINED && !uv_is_active((uv_handle_t *)&c->timer))
                connection_quarantine(c);
        else
                connection_fail(c, why);
}

/* ---- events -------------------------------------------------------------- */

static int on_event_reply(void *userdata, const Bfcd__EventReply *reply, const char **ret_why)
{
        const struct connection *c = userdata;

        if (c->failure[0] != '\0')
                return 0;
        return session_handle_event(c->session, reply, ret_why);
}

/* A process that ends may be heard here first. One that closed only this socket
 * hangs up too: it could let go of nothing any more. */
static void on_events_end(void *userdata, const char *why)
{
        struct connection *c = userdata;

        if (why)
                connection_fail(c, why);
        else if (c->session->state != SESSION_CLOSING)
                connection_drop(c, NULL);
}

static void on_events_ready(void *userdata)
{
        connection_make_ready(userdata);
}

static const struct events_ops connection_events_ops = {
        .ready = on_events_ready,
        .reply = on_event_reply,
        .end = on_events_end,
};

/* Anew for each hello: one before may have been refused. */
static int on_session_open_events(void *userdata, int *ret_fd)
{
        struct connection *c = userdata;

        c->events = events_close(c->events);
        return events_new(c->host->loop, c->host->arena, &connection_events_ops, c, &c->events, ret_fd);
}

static void on_session_send_event(void *userdata, const Bfcd__Event *event)
{
        struct connection *c = userdata;

        if (!c->dropped && c->failure[0] == '\0')
                events_send(c->events, event);
}

static const struct session_ops connection_session_ops;

/* It knows who the process is as well as the one before did: they are the same. */
static void on_session_take_over(void *userdata, struct session *kept)
{
        struct connection *c = userdata;
        struct credentials *who = &c->session->who;

        free(kept->who.gids);
        free(kept->who.cgroup);
        kept->who = *who;
        who->gids = NULL;
        who->cgroup = NULL;
        session_free(c->session);
        connection_end(kept->userdata);
        c->session = kept;
        kept->userdata = c;
        kept->ops = &connection_session_ops;
}

static const struct session_ops connection_session_ops = {
        .send = on_session_send,
        .resume = on_session_resume,
        .abort = on_session_abort,
        .open_events = on_session_open_events,
        .send_event = on_session_send_event,
        .take_over = on_session_take_over,
};

/* ---- reading ------------------------------------------------------------- */

static int connection_handle_frame(struct connection *c, const uint8_t *payload, size_t n_bytes)
{
        const Bfcd__Request *request = message_unpack_request(c->host->arena, payload, n_bytes);
        const char *why = "it sent a frame that is no request";
        int r = request ? 0 : -EPROTO;

        if (request && c->pin.is_open && c->session->state != SESSION_NEW) {
                why = "it did not wait for the answer to its hello, so that nobody knows whose process it is";
                r = -EPERM;
        }
        if (r == 0)
                r = session_handle(c->session, request, &why);
        if (r == 0 && c->is_new && c->session->state != SESSION_NEW) {
                uv_timer_stop(&c->timer);
                if (c->session->state == SESSION_RETURNING)
                        connection_start_returning_time(c);
                r = connection_change_party(c);
                why = "out of memory";
        }
        if (r < 0)
                connection_fail(c, why);
        return r;
}

/* Handles whole frames in the buffer, up to a turn's worth. */
static void connection_handle_frames(struct connection *c)
{
        uint64_t end_ns = uv_hrtime() + CONNECTION_TURN_NS;
        unsigned n = 0;

        c->in_batch = true;
        c->has_frames = false;
        while (c->failure[0] == '\0' && c->session->state != SESSION_CLOSING) {
                const uint8_t *payload;
                size_t n_bytes;
                int r;

                if (n == CONNECTION_REQUESTS_PER_TURN || (n > 0 && uv_hrtime() >= end_ns) ||
                    connection_is_paused(c)) {
                        c->has_frames = true;
                        break;
                }
                n++;
                r = frame_reader_next(c->reader, &payload, &n_bytes);
                if (r > 0)
                        break;
                if (r < 0) {
                        connection_fail(c, "it sent a frame of an impossible length");
                        break;
                }
                c->dribbles = false;
                if (connection_handle_frame(c, payload, n_bytes) < 0)
                        break;
        }
        c->in_batch = false;
        if (c->session->state == SESSION_CLOSING || session_is_settling(c->session))
                connection_make_closing(c);
}

/* As frame_reader_receive_some(), and looks at who sent it where that is to be known. */
static int connection_read(struct connection *c, size_t n_max)
{
        pid_t sender;
        int r;

        if (!c->pin.is_open)
                return frame_reader_receive_some(c->reader, c->fd, MSG_DONTWAIT, n_max);
        r = frame_reader_receive_from(c->reader, c->fd, MSG_DONTWAIT, n_max, &sender);
        return r == 0 ? pin_heard(&c->pin, c->fd, c->pidfd, sender) : r;
}

static void connection_receive(struct connection *c)
{
        size_t n_max = c->dribbles ? CONNECTION_DRIBBLE_BYTES : CONNECTION_RECEIVE_BYTES;
        int r = connection_read(c, n_max);

        c->dribbles = true; /* until there is a frame */
        if (r == 0)
                r = connection_look_closer(c);
        if (r == 0)
                connection_handle_frames(c);
        else if (r == FRAME_EOF || r == -ECONNRESET)
                connection_drop(c, NULL);
        else if (r == -EPROTO)
                connection_fail(c, "it sent fds; clients never do");
        else if (r == -EPERM)
                connection_fail(c, "another process than the one that connected speaks");
        else if (r < 0)
                connection_fail(c, strerror(-r));
}

/* After anything was handled: what is to be sent is sent, failures are final. */
static void connection_settle(struct connection *c)
{
        if (c->dropped)
                return;
        connection_flush(c); /* also of a failing one: it may be told why */
        if (c->failure[0] != '\0') {
                connection_drop(c, c->failure);
                return;
        }
        /* The flush may have ended a pause, with frames waiting in the buffer. */
        if (c->has_frames && !connection_is_paused(c))
                connection_make_ready(c);
        connection_update(c);
}

/* Notes what the kernel says; the turn does something about it. Who has not had one since
 * the last word is not asked about again until then. */
static void on_socket(uv_poll_t *handle, int status, int events)
{
        struct connection *c = handle->data;

        if (status < 0)
                connection_fail(c, uv_strerror(status));
        c->is_muted = c->has_come || c->has_left;
        c->has_come = c->has_come || (events & UV_READABLE);
        c->has_left = c->has_left || (events & UV_DISCONNECT);
        connection_make_ready(c);
        if (c->is_muted)
                connection_update(c);
}

static void connection_take_turn(struct party_member *m)
{
        struct connection *c = connection_of(m);
        bool has_come = c->has_come, has_left = c->has_left;

        c->has_come = c->has_left = c->is_muted = false;
        if (c->events)
                events_turn(c->events);
        if (c->dropped)
                return;
        if (c->failure[0] != '\0')
                ; /* it is settled */
        else if (c->has_frames && !connection_is_paused(c))
                connection_handle_frames(c);
        else if (has_come)
                connection_receive(c);
        else if (has_left)
                connection_drop(c, NULL);
        connection_settle(c);
}

static void on_hello_timeout(uv_timer_t *timer)
{
        connection_drop(timer->data, "it did not say hello in time");
}

/* ---- what the server calls ----------------------------------------------- */

int connection_new(struct connection_host *host, int fd, bool admin)
{
        struct connection *c = calloc(1, sizeof(*c));
        struct credentials who = { .gids = NULL };
        struct party_key key = { .admin = admin };
        int r;

        if (!c) {
                close(fd);
                return -ENOMEM;
        }
        if (has_hung_up(fd)) {
                close(fd);
                free(c);
                return -ECONNABORTED;
        }
        c->host = host;
        c->member.turn = connection_take_turn;
        c->admin = admin;
        c->fd = fd;
        c->pidfd = -1;
        c->linger_ms = 1;
        r = peer_credentials(fd, &who);
        if (r < 0)
                goto fail;
        key.uid = who.uid;
        if (newcomers_are_too_many(host, &key)) {
                log_limited(&host->crowd_log, LOG_LEVEL_WARNING,
                            "uid %u (pid %d) was turned away: too many connections that have not said hello",
                            (unsigned)who.uid, (int)who.pid);
                r = -EUSERS;
                goto fail;
        }
        r = pin_new(&c->pin, fd, who.pid, &c->pidfd);
        if (r == -ESRCH) /* as has_hung_up() */
                r = -ECONNABORTED;
        if (r == 0)
                r = frame_reader_new(false, &c->reader);
        if (r == 0)
                r = frame_writer_new(CONNECTION_QUEUE_MAX, &c->writer);
        if (r == 0)
                r = session_new(host->broker, admin, &who, &connection_session_ops, c, &c->session);
        if (r == 0)
                r = party_join(&host->parties, &c->member, &key);
        if (r == 0)
                r = uv_poll_init(host->loop, &c->poll, fd);
        if (r < 0)
                goto fail;

        uv_timer_init(host->loop, &c->timer);
        c->n_handles = 2;
        if (c->pidfd >= 0 && uv_poll_init(host->loop, &c->pid_poll, c->pidfd) < 0) {
                close(c->pidfd);
                c->pidfd = -1;
                c->pin.is_open = false;
        }
        if (c->pidfd >= 0) {
                c->n_handles++;
                uv_poll_start(&c->pid_poll, UV_READABLE, on_process_exit);
        }
        c->poll.data = c->timer.data = c->pid_poll.data = c;
        uv_timer_start(&c->timer, on_hello_timeout, CONNECTION_HELLO_TIMEOUT_MS, 0);
        connection_count_in(c);
        connection_update(c);
        return 0;
fail:
        if (c->pidfd >= 0)
                close(c->pidfd);
        party_leave(&host->parties, &c->member);
        session_free(c->session);
        frame_reader_free(c->reader);
        frame_writer_free(c->writer);
        free(who.gids);
        free(c);
        close(fd);
        return r;
}

void connection_host_init(struct connection_host *host)
{
        TAILQ_INIT(&host->all);
        TAILQ_INIT(&host->closing);
        parties_init(&host->parties);
}

/* Turns, for as long as a slice. Who comes meanwhile waits no longer than that, and for one
 * turn of each other party. */
static void turn_ready(struct connection_host *host)
{
        uint64_t end_ns = uv_hrtime() + CONNECTION_SLICE_NS;
        struct party_member *m;

        do {
                m = party_next(&host->parties);
                if (m)
                        m->turn(m);
        } while (m && uv_hrtime() < end_ns);
}

static void settle_one(struct connection *c, size_t n_blocks)
{
        const char *why = "";
        int r = homecoming_settle(c->session, n_blocks, &why);

        if (r == SESSION_MORE) {
                connection_make_closing(c);
        } else if (r < 0) {
                connection_fail(c, why);
        } else {
                uv_timer_stop(&c->timer);
                connection_make_ready(c); /* with what it has sent meanwhile */
        }
}

/* One slice of the first session; it has its next turn after the others. */
static void turn_closing_one(struct connection_host *host, size_t n_blocks)
{
        struct connection *c = TAILQ_FIRST(&host->closing);

        TAILQ_REMOVE(&host->closing, c, of_closing);
        c->is_closing = false;
        if (session_is_settling(c->session)) {
                if (c->failure[0] == '\0')
                        settle_one(c, n_blocks);
                return;
        }
        if (c->session->state != SESSION_CLOSING) /* it was settling, and has gone */
                return;
        switch (session_reap(c->session, n_blocks)) {
        case SESSION_MORE:
                connection_make_closing(c);
                break;
        case SESSION_LINGERS:
                connection_leave(c);
                connection_linger(c);
                break;
        default:
                connection_finish(c);
        }
}

/* An end costs as much as the freeing of some blocks, and all share one slice of these. */
static void turn_closing(struct connection_host *host)
{
        uint64_t end_ns = uv_hrtime() + CONNECTION_ENDS_NS;
        size_t n_blocks = SESSION_REAP_SLICE;

        while (n_blocks > 0) {
                struct connection *c = TAILQ_FIRST(&host->closing);
                size_t n_spent = (c ? session_n_held(c->session) : 0) + CONNECTION_CLOSING_COST;

                if (!c)
                        return;
                turn_closing_one(host, n_blocks);
                n_blocks -= n_spent < n_blocks ? n_spent : n_blocks;
                if (uv_hrtime() >= end_ns)
                        return;
        }
}

void connection_turn(struct connection_host *host)
{
        turn_ready(host);
        turn_closing(host);
}

bool connection_is_due(const struct connection_host *host)
{
        return !TAILQ_EMPTY(&host->parties.due) || !TAILQ_EMPTY(&host->closing);
}

/* ---- sessions of another process ------------------------------------------ */

/* -1 with errno ESRCH: it is no more, whoever has its pid by now. */
static int open_process(const struct credentials *who)
{
        int pidfd = who->pid > 0 ? (int)syscall(SYS_pidfd_open, who->pid, 0) : -1;
        uint64_t start_time;

        if (who->pid <= 0)
                errno = EINVAL;
        if (pidfd < 0 || who->start_time == 0)
                return pidfd;
        start_time = process_start_time(who->pid); /* 0: it may not be looked at */
        if (start_time == 0 || start_time == who->start_time)
                return pidfd;
        close(pidfd);
        errno = ESRCH;
        return -1;
}

int connection_keep(struct connection_host *host, struct session *s)
{
        struct connection *c = calloc(1, sizeof(*c));
        bool is_gone;

        if (!c)
                return -ENOMEM;
        c->host = host;
        c->fd = -1;
        c->dropped = c->is_known = true;
        c->linger_ms = 1;
        c->session = s;
        s->ops = &connection_session_ops;
        s->userdata = c;
        c->pidfd = open_process(&s->who);
        is_gone = c->pidfd < 0 && errno == ESRCH;
        uv_timer_init(host->loop, &c->timer);
        c->n_handles = 1;
        c->timer.data = c->pid_poll.data = c;
        if (c->pidfd >= 0 && uv_poll_init(host->loop, &c->pid_poll, c->pidfd) < 0) {
                close(c->pidfd);
                c->pidfd = -1;
        }
        if (c->pidfd >= 0) {
                c->n_handles++;
                uv_poll_start(&c->pid_poll, UV_READABLE, on_process_exit);
        }
        host->n_connections[false]++;
        TAILQ_INSERT_TAIL(&host->all, c, of_all);
        if (is_gone)
                session_is_over(c, "its process exited while no daemon was there");
        else if (!s->may_return && session_n_held(s) == 0)
                session_is_over(c, "it ended with the daemon before");
        else
                connection_quarantine(c);
        return 0;
}

void connection_leave_all(struct connection_host *host, const char *why)
{
        struct connection *c, *next;

        for (c = TAILQ_FIRST(&host->all); c; c = next) {
                next = TAILQ_NEXT(c, of_all);
                if (!session_may_stay(c->session))
                        continue;
                if (!c->dropped)
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
                if (!c->dropped)
                        connection_drop(c, NULL);
                session_is_over(c, why);
        }
        while (!TAILQ_EMPTY(&host->closing))
                turn_closing(host);
        /* What lingers waits for nobody any more. */
        while ((c = TAILQ_FIRST(&host->all))) {
                session_let_go(c->session);
                connection_make_closing(c);
                turn_closing(host);
        }
}
