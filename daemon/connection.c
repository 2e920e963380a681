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
#include "daemon/fd_guard.h"
#include "daemon/fd_reserve.h"
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
#define CONNECTION_QUEUE_FDS         FRAME_MAX_FDS  /* in the queue of replies; the same */
#define CONNECTION_QUEUE_MAX         (1024u * 1024u)
#define CONNECTION_HELLO_TIMEOUT_MS  10000u
#define CONNECTION_CROWD_MS          20u
#define CONNECTION_LINGER_MAX_MS     128u
#define CONNECTION_CLOSING_COST      8u    /* blocks that could be freed instead of an end */
#define CONNECTION_FEW_GROUPS        1024u /* as many are looked at when a process connects */
#define CONNECTION_NO_USER           ((uid_t)-1)
#define CONNECTION_LOOKS             128u /* at extents that may be mapped, in one connection_look() */
#define CONNECTION_LOOKS_OF_ONE      32u  /* of these, at one session's */
#define CONNECTION_EVICT_LOOKS       4u   /* at most as many are asked whether their hello has come */

/* The kernel says that something came each time it is asked, until it is read. After so many times the socket is
 * taken out of the poll until its turn, which costs three system calls. */
#define CONNECTION_HEARD_MAX 24u

struct connection {
        struct connection_host *host;
        bool admin;
        int fd;
        struct fd_guard guard; /* of fd */
        int pidfd;             /* -1: the process cannot be watched */
        bool is_watched;       /* pid_poll is in use: from the hello on */
        struct pin pin;
        uv_poll_t poll;
        uv_poll_t pid_poll;
        uv_timer_t timer; /* for the hello, while crowded or stuck, for the quarantine, while lingering */
        unsigned n_handles;
        int awaited;   /* events that poll waits for */
        bool in_batch; /* replies are flushed at its end */
        bool is_new;   /* has not said hello */
        bool is_known; /* when its process began was looked at */
        bool is_closing;
        bool has_come, has_left; /* by the kernel's word; its turn will see */
        unsigned n_heard;        /* how often that was said before its turn */
        bool is_muted;           /* so often that the kernel is not asked until then */
        bool has_frames;         /* the reader may hold whole frames */
        bool is_blocked;         /* the next of these is read only when fewer requests wait */
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
        struct crowd_member silent; /* while it is_new, of a client */
        socklen_t n_group_bytes;  /* of its process, where these are too many to be looked at early; else 0 */
        bool is_looked_at;        /* it is in host->looked_at */
        struct session_look look; /* then: where that goes on */
        TAILQ_ENTRY(connection) of_all, of_closing, of_looked_at;
};

static void connection_drop(struct connection *c, const char *why);
static void on_process_exit(uv_poll_t *handle, int status, int events);

/* ---- who is there -------------------------------------------------------- */

/* Matches by ids; groups are the caller's. */
static int match_with(struct connection_host *host, struct credentials *who, gid_t *gids, size_t n_bytes)
{
        int r;

        who->n_gids = n_bytes / sizeof(*gids);
        match_sort_gids(gids, who->n_gids);
        who->gids = gids;
        r = match_ids(host->broker->matcher, who);
        who->gids = NULL;
        who->n_gids = 0;
        return r;
}

/* When a process connects, for its place in the crowd. *ret_n_bytes: of its groups, where they are too many for
 * that; they are matched when its hello comes. */
static int match_early(struct connection_host *host, int fd, struct credentials *who, socklen_t *ret_n_bytes)
{
        gid_t gids[CONNECTION_FEW_GROUPS];
        socklen_t n_bytes = sizeof(gids);

        *ret_n_bytes = 0;
        if (!matcher_needs_groups(host->broker->matcher))
                return match_with(host, who, gids, 0);
        if (getsockopt(fd, SOL_SOCKET, SO_PEERGROUPS, gids, &n_bytes) == 0)
                return match_with(host, who, gids, n_bytes);
        if (errno == ERANGE)
                *ret_n_bytes = n_bytes;
        return 0;
}

/* The groups are those of the connect(), so their number is known where it was asked before. They are not kept:
 * only the tenants are that they match. */
static int match_late(struct connection *c, struct credentials *who)
{
        socklen_t n_bytes = c->n_group_bytes;
        gid_t *gids = NULL;
        int r;

        if (!matcher_needs_groups(c->host->broker->matcher))
                return match_with(c->host, who, gids, 0);
        if (n_bytes == 0 && getsockopt(c->fd, SOL_SOCKET, SO_PEERGROUPS, NULL, &n_bytes) < 0 &&
            errno != ERANGE)
                n_bytes = 0;
        if (n_bytes > 0)
                gids = malloc(n_bytes);
        if (n_bytes > 0 && !gids)
                return -ENOMEM;
        if (n_bytes > 0 && getsockopt(c->fd, SOL_SOCKET, SO_PEERGROUPS, gids, &n_bytes) < 0)
                r = -errno;
        else
                r = match_with(c->host, who, gids, n_bytes);
        free(gids);
        return r;
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

/* What only a hello needs, and takes its time: not for those who connect and say nothing. After a reload
 * it is done again. */
static int connection_look_closer(struct connection *c)
{
        const struct broker *b = c->host->broker;
        struct credentials *who = &c->session->who;
        int r = 0;

        if (!c->is_known)
                who->start_time = process_start_time(who->pid);
        c->is_known = true;
        if (match_is_known(b->matcher, who))
                return 0;
        if (b->config->has_patterns && !who->cgroup)
                connection_look_at_cgroup(c);
        if (!match_ids_are_known(b->matcher, who))
                r = match_late(c, who);
        if (r == 0)
                match_places(b->matcher, who);
        return r;
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

static struct connection *connection_of_silent(const struct crowd_member *m)
{
        return (struct connection *)((uintptr_t)m - offsetof(struct connection, silent));
}

static void connection_count_in(struct connection *c)
{
        c->is_new = true;
        c->host->n_connections[c->admin]++;
        TAILQ_INSERT_TAIL(&c->host->all, c, of_all);
}

static void connection_is_known(struct connection *c)
{
        c->is_new = false;
        crowd_leave(&c->host->crowd, &c->silent);
}

/* Not before the hello, when nothing depends on the process: to watch it costs as much as to accept it. */
static void connection_watch_process(struct connection *c)
{
        if (c->pidfd < 0)
                return;
        if (uv_poll_init(c->host->loop, &c->pid_poll, c->pidfd) < 0) {
                close(c->pidfd);
                c->pidfd = -1;
                pin_end(&c->pin, c->fd);
                return;
        }
        c->is_watched = true;
        c->n_handles++;
        c->pid_poll.data = c;
        uv_poll_start(&c->pid_poll, UV_READABLE, on_process_exit);
}

/* It said hello, and goes on with its tenant. */
static int connection_change_party(struct connection *c)
{
        struct party_key key = { .tenant = c->session->tenant, .admin = c->admin };

        connection_is_known(c);
        connection_watch_process(c);
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
                fd_guard_close(&c->guard, c->fd);
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

static void connection_stop_looks(struct connection *c)
{
        if (c->is_looked_at)
                TAILQ_REMOVE(&c->host->looked_at, c, of_looked_at);
        c->is_looked_at = false;
}

/* Of a connection that has no socket any more, without its session. */
static void connection_end(struct connection *c)
{
        assert(c->dropped);
        connection_is_known(c);
        connection_stop_looks(c);
        party_leave(&c->host->parties, &c->member);
        if (c->is_closing)
                TAILQ_REMOVE(&c->host->closing, c, of_closing);
        c->is_closing = false;
        TAILQ_REMOVE(&c->host->all, c, of_all);
        c->host->n_connections[c->admin]--;
        uv_close((uv_handle_t *)&c->timer, on_handle_closed);
        if (c->is_watched)
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
        connection_stop_looks(c);
        if (c->is_watched)
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
        session_is_over(c, session_exit_reason(c->session, "process exited"));
}

static void on_quarantine_end(uv_timer_t *timer)
{
        struct connection *c = timer->data;
        struct log_limit *log = &c->session->tenant->quarantine_log;

        /* Under a living importer such memory cannot be destroyed: not at all, or not defined. */
        if (c->pidfd >= 0 && session_holds_mappings(c->session)) {
                log_limited(log, LOG_LEVEL_WARNING,
                            "session %" PRIu64 ": pid %d still runs at the end of the quarantine after it "
                            "disconnected; its memory stays charged to tenant '%s' until the process "
                            "exits, because the device cannot reclaim memory from a running process",
                            c->session->id, (int)c->session->who.pid, c->session->tenant->name);
                return;
        }
        log_limited(log, LOG_LEVEL_WARNING,
                    "session %" PRIu64 ": pid %d still runs at the end of the quarantine after it "
                    "disconnected; its memory is released",
                    c->session->id, (int)c->session->who.pid);
        session_is_over(c, "quarantine ended");
}

/* The process lives. It may have begun another program, or unmapped all, so that is looked at from time to
 * time. One that is awaited has its memory mapped, and says so itself. */
static void connection_quarantine(struct connection *c)
{
        if (process_has_exited(c->pidfd)) {
                session_is_over(c, session_exit_reason(c->session, "process exited"));
                return;
        }
        if (c->session->may_return && c->pidfd >= 0)
                return;
        uv_timer_start(&c->timer, on_quarantine_end, c->host->broker->config->quarantine_timeout_ms, 0);
        if (c->is_looked_at || session_holds_mappings(c->session)) /* of a GPU's memory nothing is known */
                return;
        TAILQ_INSERT_TAIL(&c->host->looked_at, c, of_looked_at);
        c->is_looked_at = true;
        c->host->wake(c->host);
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
                fd_guard_close(&c->guard, c->fd);
                c->fd = -1;
        }
        frame_writer_clear(c->writer); /* with references to extents */
        party_rest(&c->host->parties, &c->member);
}

/* Of its tenant; before the hello, and of operators, of its user. */
static struct log_limit *connection_violation_log(struct connection *c)
{
        const struct session *s = c->session;

        return s->tenant ? &s->tenant->violation_log
                         : log_limit_of_user(&c->host->violation_logs, s->who.uid);
}

/* Gives up the socket. The session goes on until nothing of it is left. */
static void connection_drop(struct connection *c, const char *why)
{
        struct session *s = c->session;

        if (c->dropped)
                return;
        connection_close_socket(c);
        if (why)
                log_limited(connection_violation_log(c), LOG_LEVEL_NOTICE,
                            "session %" PRIu64 " (0: no hello yet; uid %u, pid %d): disconnected: %s", s->id,
                            (unsigned)s->who.uid, (int)s->who.pid, why);
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

static bool connection_is_full(const struct connection *c)
{
        return c->session->n_requests >= SESSION_MAX_PENDING;
}

/* Blocks whose extents wait for an acknowledgement do not count: that is read. Fds in the queue count,
 * because a client can acknowledge what it has not read. */
static bool connection_is_paused(const struct connection *c)
{
        return frame_writer_n_queued(c->writer) > CONNECTION_QUEUE_PAUSE ||
               frame_writer_n_fds(c->writer) >= CONNECTION_QUEUE_FDS ||
               (connection_is_full(c) && c->is_blocked) || session_is_settling(c->session);
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
        connection_drop(timer->data, "timeout: the resumed client did not list its memory");
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
                connection_fail(c, "timeout: the client did not read its replies");
}

/* A client that read something gets the whole timeout again. Before the hello another timeout runs. */
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
                connection_fail(c, r == -ENOBUFS ? "too many unread replies: the client does not read them"
                                                 : strerror(-r));
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

        credentials_clear(&kept->who);
        kept->who = *who;
        *who = (struct credentials){ .pid = kept->who.pid };
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
        const char *why = "the client sent a frame that is not a request";
        int r = request ? 0 : -EPROTO;

        if (request && connection_look_closer(c) < 0) {
                why = "out of memory";
                r = -ENOMEM;
        }
        if (request && c->pin.is_open && c->session->state != SESSION_NEW) {
                why = "the client did not wait for the reply to its hello, so its process cannot be "
                      "identified";
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

/* While as many requests wait as may, a request that withdraws one of them is read, and no other. */
static bool connection_is_next_blocked(struct connection *c)
{
        const Bfcd__Request *request;
        const uint8_t *payload;
        size_t n_bytes;

        if (!connection_is_full(c) || frame_reader_peek(c->reader, &payload, &n_bytes) != 0)
                return false;
        request = message_unpack_request(c->host->arena, payload, n_bytes);
        return request && request->body_case != BFCD__REQUEST__BODY_CANCEL;
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

                c->is_blocked = connection_is_next_blocked(c);
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
                        connection_fail(c, "the client sent a frame with an invalid length");
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
        int r = fd_guard_look(&c->guard, c->fd, c->pin.is_open, &n_max);

        if (r != 0)
                return r;
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
                connection_handle_frames(c);
        else if (r == FRAME_EOF || r == -ECONNRESET)
                connection_drop(c, NULL);
        else if (r == -EPROTO)
                connection_fail(c, "the client sent file descriptors, which the protocol does not allow");
        else if (r == -EPERM)
                connection_fail(c, "a process other than the one that connected sent data");
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

/* Notes what the kernel says; the turn does something about it. Where many others have turns before it the
 * kernel is not asked about it again until then. */
static void on_socket(uv_poll_t *handle, int status, int events)
{
        struct connection *c = handle->data;

        if (status < 0)
                connection_fail(c, uv_strerror(status));
        c->is_muted = ++c->n_heard >= CONNECTION_HEARD_MAX;
        c->has_come = c->has_come || (events & UV_READABLE);
        c->has_left = c->has_left || (events & UV_DISCONNECT);
        connection_make_ready(c);
        if (c->is_muted)
                connection_update(c);
}

/* A turn that sends blocks which waited for an acknowledgement. What has come is read in a later one. */
static void connection_deliver(struct connection *c)
{
        c->in_batch = true;
        session_deliver(c->session);
        c->in_batch = false;
        connection_settle(c);
        connection_make_ready(c);
}

static void connection_serve(struct connection *c)
{
        bool has_come = c->has_come, has_left = c->has_left;

        if (c->events)
                events_turn(c->events);
        if (c->dropped)
                return;
        if (c->session->is_delivering && c->failure[0] == '\0') {
                connection_deliver(c);
                return;
        }
        c->has_come = c->has_left = c->is_muted = false;
        c->n_heard = 0;
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

static void connection_take_turn(struct party_member *m)
{
        struct connection *c = connection_of(m);
        bool is_admin = c->admin;

        if (is_admin)
                fd_reserve_begin();
        connection_serve(c);
        if (is_admin)
                fd_reserve_end();
}

static void on_hello_timeout(uv_timer_t *timer)
{
        connection_drop(timer->data, "timeout: the client did not send a hello");
}

/* ---- places before the hello ----------------------------------------------- */

/* The oldest, but rather one whose hello has not come yet. */
static struct connection *find_silent(const struct crowd_user *user)
{
        struct crowd_member *m = TAILQ_FIRST(&user->members);

        for (unsigned i = 0; m && i < CONNECTION_EVICT_LOOKS; i++, m = TAILQ_NEXT(m, link)) {
                struct connection *c = connection_of_silent(m);
                int n_bytes = 0;

                if (c->fd < 0 || ioctl(c->fd, SIOCINQ, &n_bytes) < 0 || n_bytes == 0)
                        return c;
        }
        return connection_of_silent(TAILQ_FIRST(&user->members));
}

/* It is in no turn of its own now, so it can end at once. */
static void connection_evict(struct connection *c)
{
        const struct credentials *who = &c->session->who;

        log_limited(log_limit_of_user(&c->host->crowd_logs, who->uid), LOG_LEVEL_WARNING,
                    "uid %u (pid %d) was disconnected before its hello: too many connections have sent no "
                    "hello, and most of them belong to this user",
                    (unsigned)who->uid, (int)who->pid);
        if (!c->dropped) {
                connection_close_socket(c);
                (void)session_hang_up(c->session);
        }
        connection_finish(c);
}

/* Tenants' users come first, and those whose sessions wait for their clients. */
static bool is_named(const struct connection_host *host, const struct credentials *who)
{
        const struct broker *b = host->broker;

        return b->default_tenant || match_names_user(b->matcher, who) || session_is_awaited_of(b, who->uid);
}

static int connection_find_place(struct connection *c, struct credentials *who)
{
        struct connection_host *host = c->host;
        struct crowd_user *user;
        bool named;
        int r = match_early(host, c->fd, who, &c->n_group_bytes);

        if (r < 0)
                return r;
        named = is_named(host, who);
        r = crowd_look(&host->crowd, who->uid, named, &user);
        if (r < 0) {
                log_limited(log_limit_of_user(&host->crowd_logs, who->uid), LOG_LEVEL_WARNING,
                            "uid %u (pid %d): connection refused: too many connections have sent no hello",
                            (unsigned)who->uid, (int)who->pid);
                return r;
        }
        if (r > 0)
                connection_evict(find_silent(user));
        return crowd_join(&host->crowd, &c->silent, who->uid, named);
}

/* Before the hello. Users that no tenant names are one party, however many they are, so that members wait for
 * one turn of theirs. */
static const struct party_key *connection_first_party(const struct connection *c, struct party_key *ret)
{
        bool is_outsider = !c->admin && !c->silent.user->is_named;

        *ret = (struct party_key){ .admin = c->admin,
                                   .uid = is_outsider ? CONNECTION_NO_USER : c->session->who.uid };
        return ret;
}

/* ---- what the server calls ----------------------------------------------- */

int connection_new(struct connection_host *host, int fd, bool admin)
{
        struct connection *c = calloc(1, sizeof(*c));
        struct credentials who = { .gids = NULL };
        struct party_key key;
        struct fd_guard guard;
        int r;

        fd_guard_init(&guard, fd);
        if (!c) {
                fd_guard_close(&guard, fd);
                return -ENOMEM;
        }
        if (has_hung_up(fd)) {
                fd_guard_close(&guard, fd);
                free(c);
                return -ECONNABORTED;
        }
        c->host = host;
        c->guard = guard;
        c->member.turn = connection_take_turn;
        c->admin = admin;
        c->fd = fd;
        c->pidfd = -1;
        c->linger_ms = 1;
        r = peer_credentials(fd, &who);
        if (r == 0) /* soon: what is sent before it does not tell who sent it, on older kernels */
                r = pin_new(&c->pin, fd, who.pid, &c->pidfd);
        if (r == -ESRCH) /* as has_hung_up() */
                r = -ECONNABORTED;
        if (r == 0 && !admin)
                r = connection_find_place(c, &who);
        if (r == 0)
                r = frame_reader_new(false, &c->reader);
        if (r == 0)
                r = frame_writer_new(CONNECTION_QUEUE_MAX, &c->writer);
        if (r == 0)
                r = session_new(host->broker, admin, &who, &connection_session_ops, c, &c->session);
        if (r == 0)
                r = party_join(&host->parties, &c->member, connection_first_party(c, &key));
        if (r == 0)
                r = uv_poll_init(host->loop, &c->poll, fd);
        if (r < 0)
                goto fail;

        uv_timer_init(host->loop, &c->timer);
        c->n_handles = 2;
        c->poll.data = c->timer.data = c;
        uv_timer_start(&c->timer, on_hello_timeout, CONNECTION_HELLO_TIMEOUT_MS, 0);
        connection_count_in(c);
        connection_update(c);
        return 0;
fail:
        if (c->pidfd >= 0)
                close(c->pidfd);
        crowd_leave(&host->crowd, &c->silent);
        party_leave(&host->parties, &c->member);
        session_free(c->session);
        frame_reader_free(c->reader);
        frame_writer_free(c->writer);
        credentials_clear(&who);
        free(c);
        fd_guard_close(&guard, fd);
        return r;
}

void connection_host_init(struct connection_host *host)
{
        TAILQ_INIT(&host->all);
        TAILQ_INIT(&host->closing);
        TAILQ_INIT(&host->looked_at);
        parties_init(&host->parties);
        crowd_init(&host->crowd);
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

/* Each session at most once. Those whose memory is mapped cost one look each. */
void connection_look(struct connection_host *host)
{
        const struct connection *last = TAILQ_LAST(&host->looked_at, connection_list);
        size_t n_left = CONNECTION_LOOKS, n;
        struct connection *c;
        bool is_last = !last;

        while (!is_last && n_left > 0) {
                c = TAILQ_FIRST(&host->looked_at);
                is_last = c == last;
                TAILQ_REMOVE(&host->looked_at, c, of_looked_at);
                TAILQ_INSERT_TAIL(&host->looked_at, c, of_looked_at);
                n = n_left < CONNECTION_LOOKS_OF_ONE ? n_left : CONNECTION_LOOKS_OF_ONE;
                if (session_look_for_mappings(c->session, &c->look, n, &n) == 0)
                        session_is_over(c, "process has unmapped all its memory");
                n_left -= n > 0 ? n : 1;
        }
}

bool connection_looks(const struct connection_host *host)
{
        return !TAILQ_EMPTY(&host->looked_at);
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
        c->timer.data = c;
        connection_watch_process(c);
        host->n_connections[false]++;
        TAILQ_INSERT_TAIL(&host->all, c, of_all);
        if (is_gone)
                session_is_over(c, "process exited while no daemon was running");
        else if (!s->may_return && session_n_held(s) == 0)
                session_is_over(c, "ended with the previous daemon");
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
