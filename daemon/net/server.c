/* The server; see server.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/net/server.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>
#include <uv.h>

#include "daemon/base/clock.h"
#include "daemon/session/accounting.h"
#include "daemon/base/closer.h"
#include "daemon/net/connection.h"
#include "daemon/net/fd_guard.h"
#include "daemon/base/fd_reserve.h"
#include "daemon/net/peer_process.h"
#include "daemon/net/watched.h"
#include "daemon/base/log.h"
#include "daemon/session/command.h"
#include "daemon/session/lease.h"
#include "daemon/record/records.h"
#include "daemon/session/resume.h"
#include "daemon/session/recall.h"
#include "daemon/session/session_states.h"
#include "daemon/session/outside.h"
#include "daemon/session/shared.h"
#include "daemon/session/reload.h"
#include "proto/message.h"

#define SERVER_ACCEPTS_PER_TURN 4 /* until one is accepted; the others are gone already, or refused */
#define SERVER_BACKLOG          1024
#define SERVER_TICK_MS          50u
#define SERVER_ACCOUNT_MS       250u
#define SERVER_WELL_MS          10000u /* after that a start has succeeded */
#define SERVER_PAUSE_MS         100u   /* without accepting, when no fds are left */
#define SERVER_MAX_CLOSING      256u   /* sockets that wait for the closer; more pause accepting */

struct listener {
        struct server *server;
        enum role role;
        int fd;
        int lock_fd;
        char *path;              /* NULL: not bound here, so not ours to remove */
        struct poller_item item; /* of fd */
        uv_timer_t pause;
        struct sched_member pending; /* connections that are not accepted yet have turns too */
};

/* Many fields: the listeners, the host of connections and a timer for each thing that is due at times. */
struct server {
        uv_loop_t loop;
        struct poller_item loop_item; /* libuv has events */
        bool loop_is_due;             /* it said so */
        bool is_due;                  /* turns are: then the loop does not wait for events */
        uv_async_t async;             /* a worker has finished something */
        uv_signal_t signals[3];
        struct listener listeners[ROLE_COUNT];
        struct watched *watched;
        struct connection_host host;
        struct broker *broker;
        struct log_limit failure_log;
        void (*ready)(const struct broker *b);
        uv_timer_t start;
        uv_timer_t tick;  /* while requests wait for others */
        uv_timer_t again; /* while looks after frees are delayed */
        uv_timer_t look;  /* while sessions in quarantine may have mappings */
        uv_timer_t keep;  /* until keep_ms: a kept block, a lease or a pause of standby memory ends */
        uint64_t keep_ms;
        uv_timer_t account;      /* while lines of the log are due later */
        uv_timer_t beat;         /* for the service manager */
        uv_timer_t well;         /* and from then on each OUTSIDE_MS */
        struct manager *manager; /* borrowed; NULL: none */
        struct reloads *reloads;
        struct reload_request hangup; /* by SIGHUP */
        bool hung_up_again;           /* while that was under way */
        uv_work_t reading;            /* of the config, by reloads */
        bool is_reading, is_ending;
};

/* ---- sockets ------------------------------------------------------------- */

/* Removes a stale socket file. -EADDRINUSE: another daemon serves it. -ENOTSOCK: it is not a socket, so it is
 * not removed. */
static int remove_stale_socket(const struct sockaddr_un *address)
{
        struct stat st;
        int fd, r;

        if (lstat(address->sun_path, &st) < 0)
                return errno == ENOENT ? 0 : -errno;
        if (!S_ISSOCK(st.st_mode))
                return -ENOTSOCK;
        fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (fd < 0)
                return -errno;
        r = connect(fd, (const struct sockaddr *)address, sizeof(*address)) < 0 ? -errno : 0;
        close(fd);
        if (r != -ECONNREFUSED)
                return -EADDRINUSE;
        return unlink(address->sun_path) < 0 ? -errno : 0;
}

/* Two daemons that start at once must not replace each other's socket: the owner of the lock owns the path.
 * The lock file stays: if it were removed, a third daemon could lock a new file beside the old one. */
static int lock_path(const char *path, int *ret_fd)
{
        char lock[sizeof(((struct sockaddr_un *)0)->sun_path) + 8];
        int fd;

        snprintf(lock, sizeof(lock), "%s.lock", path);
        fd = open(lock, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
        if (fd < 0)
                return -errno;
        if (flock(fd, LOCK_EX | LOCK_NB) < 0) {
                int r = errno == EWOULDBLOCK ? -EADDRINUSE : -errno;

                close(fd);
                return r;
        }
        *ret_fd = fd;
        return 0;
}

static int listener_bind(struct listener *l, const struct config_socket *c)
{
        struct sockaddr_un address = { .sun_family = AF_UNIX };
        mode_t umask_before;
        int r;

        if (strlen(c->path) >= sizeof(address.sun_path))
                return -ENAMETOOLONG;
        strcpy(address.sun_path, c->path);
        r = lock_path(c->path, &l->lock_fd);
        if (r < 0)
                return r;
        r = remove_stale_socket(&address);
        if (r < 0)
                return r;
        l->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (l->fd < 0)
                return -errno;
        (void)fd_guard_refuse(l->fd);
        umask_before = umask(0777); /* no client can connect before the mode is set */
        r = bind(l->fd, (struct sockaddr *)&address, sizeof(address)) < 0 ? -errno : 0;
        umask(umask_before);
        if (r < 0)
                return r;
        l->path = strdup(c->path);
        if (!l->path)
                return -ENOMEM;
        if (c->group != (gid_t)-1 && chown(c->path, (uid_t)-1, c->group) < 0)
                return -errno;
        if (chmod(c->path, c->mode) < 0)
                return -errno;
        return listen(l->fd, SERVER_BACKLOG) < 0 ? -errno : 0;
}

/* True: clients that open the path reach this socket. */
static bool is_bound_to(int fd, const char *path)
{
        struct sockaddr_un address = { .sun_family = AF_UNSPEC };
        socklen_t n = sizeof(address) - 1; /* so that the path is terminated */
        struct stat a, b;

        if (getsockname(fd, (struct sockaddr *)&address, &n) < 0 || address.sun_family != AF_UNIX)
                return false;
        return stat(address.sun_path, &a) == 0 && stat(path, &b) == 0 && S_ISSOCK(b.st_mode) &&
               a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

static bool is_listening(int fd)
{
        int type = 0, listens = 0;
        socklen_t n = sizeof(int);

        return getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &n) == 0 && type == SOCK_STREAM &&
               getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &n) == 0 && listens;
}

/* Takes a socket that the service manager has bound. Its group and mode are the config's, whatever the
 * socket's unit says. */
static int listener_adopt(struct listener *l, int fd, const struct config_socket *c)
{
        int flags = fcntl(fd, F_GETFL);
        struct stat st;

        l->fd = fd;
        if (!is_listening(fd) || !is_bound_to(fd, c->path))
                return -EDESTADDRREQ;
        (void)fd_guard_refuse(fd); /* connections that wait already are guarded one by one */
        if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 || stat(c->path, &st) < 0)
                return -errno;
        if (c->group != (gid_t)-1 && st.st_gid != c->group && chown(c->path, (uid_t)-1, c->group) < 0)
                return -errno;
        return (st.st_mode & 07777) != c->mode && chmod(c->path, c->mode) < 0 ? -errno : 0;
}

static int listener_open(struct listener *l, const struct config_socket *c, struct manager *m)
{
        static const char *const names[ROLE_COUNT] = { "client", "admin", "monitor", "lease" };
        int fd = m ? manager_take(m, names[l->role]) : -1;

        return fd >= 0 ? listener_adopt(l, fd, c) : listener_bind(l, c);
}

static const char *listener_trouble(int r)
{
        switch (r) {
        case -EADDRINUSE:
                return "another daemon listens on it";
        case -ENOTSOCK:
                return "a file that is not a socket has this path; move it, or choose another path";
        case -EDESTADDRREQ:
                return "the service manager passed a socket with another path; ListenStream= of the "
                       "socket unit and the configuration must agree";
        case -EPERM:
                return "the daemon is not a member of its group; add the group to SupplementaryGroups= of "
                       "the service";
        default:
                return strerror(-r);
        }
}

static void on_pause_end(uv_timer_t *timer)
{
        struct listener *l = timer->data;

        if (poller_set(l->server->host.poller, &l->item, EPOLLIN) < 0)
                uv_timer_start(&l->pause, on_pause_end, SERVER_PAUSE_MS, 0);
}

static bool is_shortage(int r)
{
        return r == -EMFILE || r == -ENFILE || r == -ENOMEM || r == -ENOBUFS;
}

/* Without a pause the socket would wake the loop at once, again and again. */
static void listener_pause(struct listener *l, enum log_level level, const char *why)
{
        log_limited(&l->server->failure_log, level, "no connection is accepted for %u ms: %s",
                    SERVER_PAUSE_MS, why);
        (void)poller_set(l->server->host.poller, &l->item, 0);
        uv_timer_start(&l->pause, on_pause_end, SERVER_PAUSE_MS, 0);
}

static void on_listener(struct poller_item *item, uint32_t events)
{
        struct listener *l = (struct listener *)((char *)item - offsetof(struct listener, item));

        (void)events;
        sched_ready(&l->pending);
        server_wake(l->server);
}

/* Accepts one connection. 0; 1: there is none, or accepting is paused; -errno: it was refused. */
static int listener_take(struct listener *l)
{
        int fd, r;

        if (closer_n_waiting() >= SERVER_MAX_CLOSING) {
                listener_pause(l, LOG_LEVEL_WARNING,
                               "too many ended connections wait for slow closes of fds that clients sent");
                return 1;
        }
        fd = accept4(l->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0) {
                if (is_shortage(-errno))
                        listener_pause(l, LOG_LEVEL_ERROR, strerror(errno));
                return 1;
        }
        r = connection_new(&l->server->host, fd, l->role);
        sched_owe(&l->pending, clock_ns(), SCHED_ACCEPT_NS);
        if (is_shortage(r)) {
                listener_pause(l, LOG_LEVEL_ERROR, strerror(-r));
                return 1;
        }
        if (r < 0 && r != -EUSERS && r != -ECONNABORTED)
                log_limited(&l->server->failure_log, LOG_LEVEL_ERROR,
                            "a connection could not be accepted: %s", strerror(-r));
        return r;
}

static void on_pending_turn(struct sched_member *m)
{
        struct listener *l = (struct listener *)((char *)m - offsetof(struct listener, pending));
        int r = -1;

        if (l->role == ROLE_ADMIN)
                fd_reserve_begin();
        for (int i = 0; i < SERVER_ACCEPTS_PER_TURN && r < 0; i++)
                r = listener_take(l);
        if (r <= 0)
                sched_ready(&l->pending); /* the kernel reports it late beside many others */
        if (l->role == ROLE_ADMIN)
                fd_reserve_end();
}

/* ---- the loop's other events --------------------------------------------- */

void server_notify(void *userdata)
{
        struct server *s = userdata;

        uv_async_send(&s->async);
}

static void on_async(uv_async_t *handle)
{
        struct server *s = handle->data;

        broker_poll(s->broker);
}

static void on_tick(uv_timer_t *timer)
{
        struct server *s = timer->data;

        broker_tick(s->broker);
        recall_tick(s->broker, clock_ms());
        shared_tick(s->broker, clock_ms());
        command_tick(s->broker, clock_ms());
        server_wake(s); /* which starts the timer again if needed */
}

static void on_again(uv_timer_t *timer)
{
        struct server *s = timer->data;

        broker_look_again(s->broker);
        server_wake(s);
}

static void on_look(uv_timer_t *timer)
{
        struct server *s = timer->data;

        mappings_look(s->broker);
        server_wake(s);
}

static void server_arm_look(struct server *s)
{
        if (!mappings_are_watched(s->broker))
                uv_timer_stop(&s->look);
        else if (!uv_is_active((uv_handle_t *)&s->look))
                uv_timer_start(&s->look, on_look, BROKER_LOOK_MS, 0);
}

static void on_keep(uv_timer_t *timer)
{
        struct server *s = timer->data;

        s->keep_ms = 0;
        broker_stand_by(s->broker);
        shared_expire_kept(s->broker, clock_ms());
        if (lease_tick_due(s->broker) != 0 && clock_ms() >= lease_tick_due(s->broker))
                lease_tick(s->broker, clock_ms());
        server_wake(s);
}

static void server_arm_keep(struct server *s)
{
        const uint64_t others_ms[] = { shared_keeps_until(s->broker), lease_tick_due(s->broker) };
        uint64_t until_ms = broker_standby_due(s->broker), now_ms;

        for (size_t i = 0; i < sizeof(others_ms) / sizeof(others_ms[0]); i++)
                if (others_ms[i] != 0 && (until_ms == 0 || others_ms[i] < until_ms))
                        until_ms = others_ms[i];
        if (until_ms == s->keep_ms)
                return;
        s->keep_ms = until_ms;
        now_ms = clock_ms();
        if (until_ms == 0)
                uv_timer_stop(&s->keep);
        else
                uv_timer_start(&s->keep, on_keep, until_ms > now_ms ? until_ms - now_ms : 0, 0);
}

static void server_arm_account(struct server *s);

static void on_account(uv_timer_t *timer)
{
        struct server *s = timer->data;

        (void)log_flush();
        records_flush();
        s->broker->logs.has_accounts = accounting_tick(s->broker, clock_ms(), false);
        server_arm_account(s);
}

static void server_arm_account(struct server *s)
{
        bool is_due = s->broker->logs.has_accounts || log_is_queued() || records_are_queued();

        if (is_due && !uv_is_active((uv_handle_t *)&s->account))
                uv_timer_start(&s->account, on_account, SERVER_ACCOUNT_MS, 0);
}

/* A running timer is not restarted, or frequent wake-ups would delay it for ever. */
static void server_arm_tick(struct server *s)
{
        if (!broker_is_blocked(s->broker))
                uv_timer_stop(&s->tick);
        else if (!uv_is_active((uv_handle_t *)&s->tick))
                uv_timer_start(&s->tick, on_tick, SERVER_TICK_MS, 0);
}

static void server_arm_again(struct server *s)
{
        if (!broker_is_deferred(s->broker))
                uv_timer_stop(&s->again);
        else if (!uv_is_active((uv_handle_t *)&s->again))
                uv_timer_start(&s->again, on_again, QUOTA_ROUND_MS, 0);
}

void server_wake(void *userdata)
{
        struct server *s = userdata;

        s->is_due = true;
}

static void server_take_turns(struct server *s, uint64_t now_ns)
{
        /* Each may cause work for the others, so all are asked at the end. */
        connection_turn(&s->host, now_ns);
        broker_turn(s->broker);
        shared_turn(s->broker);
        server_arm_tick(s); /* also while turns stay due */
        server_arm_again(s);
        server_arm_look(s);
        server_arm_keep(s);
        server_arm_account(s);
        s->is_due = connection_is_due(&s->host) || broker_is_due(s->broker) || shared_is_due(s->broker);
}

static void on_loop(struct poller_item *item, uint32_t events)
{
        struct server *s = (struct server *)((char *)item - offsetof(struct server, loop_item));

        (void)events;
        s->loop_is_due = true;
}

/* Waits for events and handles them. libuv has timers, signals and workers; it would ask the kernel in each turn. */
static void server_turn(struct server *s)
{
        uint64_t begin_ns, end_ns;

        poller_run(s->host.poller, s->is_due ? 0 : uv_backend_timeout(&s->loop));
        uv_update_time(&s->loop);
        begin_ns = clock_ns();
        if (s->loop_is_due || uv_backend_timeout(&s->loop) == 0) {
                s->loop_is_due = false;
                uv_run(&s->loop, UV_RUN_NOWAIT);
        }
        server_take_turns(s, begin_ns);
        end_ns = clock_ns();
        loop_turns_add(&s->broker->reports.turns, end_ns, end_ns - begin_ns);
}

static void on_wake(struct connection_host *host)
{
        server_wake((char *)host - offsetof(struct server, host));
}

/* ---- reloads -------------------------------------------------------------- */

static void run_reading(uv_work_t *work)
{
        struct server *s = work->data;

        reload_read(s->reloads);
}

static void on_read(uv_work_t *work, int status)
{
        struct server *s = work->data;

        (void)status; /* it is never cancelled */
        s->is_reading = false;
        reload_finish(s->reloads);
}

static void server_read(void *userdata)
{
        struct server *s = userdata;

        s->is_reading = true;
        s->reading.data = s;
        uv_queue_work(&s->loop, &s->reading, run_reading, on_read); /* fails without a function only */
}

static void on_hangup_done(struct reload_request *request, const struct reload_result *result)
{
        struct server *s = (struct server *)((char *)request - offsetof(struct server, hangup));

        (void)result; /* it is in the log */
        if (s->hung_up_again && !s->is_ending) {
                s->hung_up_again = false;
                reload_ask(s->reloads, request);
        }
}

static void server_hang_up(struct server *s)
{
        log_notice("SIGHUP: reloading the configuration");
        if (s->hangup.is_asked) {
                s->hung_up_again = true;
                return;
        }
        s->hangup.done = on_hangup_done;
        reload_ask(s->reloads, &s->hangup);
}

int server_set_config_path(struct server *s, const char *path)
{
        s->reloads = reloads_new(s->broker, path, server_read, s);
        return s->reloads ? 0 : -ENOMEM;
}

static void server_end_reloads(struct server *s)
{
        if (!s->reloads)
                return;
        reload_cancel(s->reloads, &s->hangup);
        while (s->is_reading)
                uv_run(&s->loop, UV_RUN_ONCE);
        s->reloads = reloads_free(s->reloads);
}

/* ---- signals -------------------------------------------------------------- */

static void server_note_end(const struct server *s, const char *why)
{
        bool keeps = broker_has_heirs(s->broker);
        struct record r;

        record_init(&r, RECORD_STOP);
        record_add_text(&r, "reason", why, SIZE_MAX);
        record_add_text(&r, "sessions_are", keeps ? "suspended" : "ended", SIZE_MAX);
        record_add_number(&r, "sessions", s->broker->sessions.n_clients);
        records_write(LOG_LEVEL_NOTICE, &r, "%s: sessions %s: %zu", why,
                      keeps ? "suspended for the next daemon" : "ended", s->broker->sessions.n);
}

static void on_signal(uv_signal_t *handle, int number)
{
        struct server *s = handle->data;

        if (number == SIGHUP) {
                if (s->reloads)
                        server_hang_up(s);
                return;
        }
        s->is_ending = true;
        server_note_end(s, number == SIGTERM ? "SIGTERM" : "SIGINT");
}

/* ---- the service manager -------------------------------------------------- */

static void server_count(const struct server *s, struct manager_stats *ret)
{
        const struct broker *b = s->broker;

        *ret = (struct manager_stats){ .n_sessions = b->sessions.n_clients, .n_suspended = b->suspended.n };
        for (size_t i = 0; i < b->n_partitions; i++) {
                ret->bytes_in_use += b->partitions[i].use.n_bytes;
                ret->bytes_reserved += b->partitions[i].pool.charged_bytes;
        }
        for (size_t i = 0; i < b->n_devices; i++)
                ret->n_lost += b->devices[i].is_lost;
}

/* From the loop, so that the watchdog notices a loop that hangs. */
static void on_beat(uv_timer_t *timer)
{
        struct server *s = timer->data;
        struct manager_stats stats;

        server_count(s, &stats);
        manager_beat(s->manager, &stats);
}

static void on_seconds(uv_timer_t *timer)
{
        outside_look(((struct server *)timer->data)->broker);
        accounting_usage(((struct server *)timer->data)->broker, false);
}

static void on_well(uv_timer_t *timer)
{
        struct server *s = timer->data;

        broker_note_well(s->broker);
        uv_timer_start(&s->well, on_seconds, OUTSIDE_MS, OUTSIDE_MS);
}

static void on_start(uv_timer_t *timer)
{
        struct server *s = timer->data;
        struct manager_stats stats;
        uint64_t beat_ms = s->manager ? manager_beat_ms(s->manager) : 0;

        if (beat_ms > 0) {
                server_count(s, &stats);
                manager_ready(s->manager, &stats);
                uv_timer_start(&s->beat, on_beat, beat_ms, beat_ms);
        }
        s->ready(s->broker);
}

/* ---- start and end -------------------------------------------------------- */

int server_new(struct server **ret)
{
        static const int numbers[] = { SIGTERM, SIGINT, SIGHUP };
        struct server *s = calloc(1, sizeof(*s));
        uv_timer_t *timers[] = { &s->start, &s->tick,    &s->again, &s->look,
                                 &s->keep,  &s->account, &s->beat,  &s->well };
        int r;

        if (!s)
                return -ENOMEM;
        s->host.loop = &s->loop;
        s->host.wake = on_wake;
        peer_process_start();
        r = connection_host_init(&s->host);
        if (r == 0)
                r = message_arena_new(MESSAGE_ARENA_BYTES, &s->host.arena);
        if (r == 0)
                r = uv_loop_init(&s->loop);
        if (r == 0) {
                s->loop_item = (struct poller_item){ .fd = uv_backend_fd(&s->loop), .report = on_loop };
                r = poller_set(s->host.poller, &s->loop_item, EPOLLIN);
        }
        if (r < 0) {
                message_arena_free(s->host.arena);
                poller_free(s->host.poller);
                free(s);
                return r;
        }
        uv_async_init(&s->loop, &s->async, on_async);
        s->async.data = s;
        for (size_t i = 0; i < sizeof(timers) / sizeof(timers[0]); i++) {
                uv_timer_init(&s->loop, timers[i]);
                timers[i]->data = s;
        }
        for (size_t i = 0; i < 3; i++) {
                uv_signal_init(&s->loop, &s->signals[i]);
                s->signals[i].data = s;
                uv_signal_start(&s->signals[i], on_signal, numbers[i]);
        }
        for (int i = 0; i < ROLE_COUNT; i++)
                s->listeners[i] = (struct listener){ .server = s,
                                                     .role = (enum role)i,
                                                     .fd = -1,
                                                     .lock_fd = -1,
                                                     .item.report = on_listener,
                                                     .pending.turn = on_pending_turn };
        *ret = s;
        return 0;
}

/* Sessions of the previous daemon. */
static int server_keep_sessions(struct server *s, char *ret_sentence, size_t n_sentence)
{
        int r = restore_sessions(s->broker);

        for (size_t i = 0; r == 0 && i < s->broker->sessions.n_slots; i++)
                if (s->broker->sessions.table[i])
                        r = connection_keep(&s->host, s->broker->sessions.table[i]);
        if (r < 0)
                snprintf(ret_sentence, n_sentence,
                         "the sessions of the previous daemon could not be restored: %s", strerror(-r));
        else
                lease_tick(s->broker, clock_ms()); /* the config may have changed */
        server_wake(s);
        return r;
}

int server_listen(struct server *s, struct broker *b, const struct config *c, struct manager *m,
                  char *ret_sentence, size_t n_sentence)
{
        const struct config_socket *sockets[ROLE_COUNT] = { &c->socket, &c->admin_socket, &c->monitor_socket,
                                                            &c->lease_socket };

        s->broker = s->host.broker = b;
        s->manager = m;
        for (size_t i = 0; i < ROLE_COUNT; i++) {
                struct listener *l = &s->listeners[i];
                struct sched_key key = { .kind = SCHED_PENDING, .role = l->role };
                int r = 0;

                uv_timer_init(&s->loop, &l->pause);
                l->pause.data = l;
                if (!sockets[i]->path)
                        continue;
                r = listener_open(l, sockets[i], m);
                if (r == 0)
                        r = sched_join(&s->host.sched, &l->pending, &key);
                l->item.fd = l->fd;
                if (r == 0)
                        r = poller_set(s->host.poller, &l->item, EPOLLIN);
                if (r < 0) {
                        snprintf(ret_sentence, n_sentence, "cannot listen on socket %s: %s", sockets[i]->path,
                                 listener_trouble(r));
                        return r;
                }
        }
        return server_keep_sessions(s, ret_sentence, n_sentence);
}

int server_run(struct server *s, void (*ready)(const struct broker *b))
{
        s->ready = ready;
        uv_timer_start(&s->start, on_start, 0, 0);
        uv_timer_start(&s->well, on_well, SERVER_WELL_MS, 0);
        s->loop_is_due = true; /* it has not told the kernel what it waits for */
        s->watched = watched_new(s->broker, s->host.poller);
        while (!s->is_ending)
                server_turn(s);
        s->watched = watched_free(s->watched);
        broker_note_well(s->broker);
        if (s->manager)
                manager_ending(s->manager, s->broker->sessions.n_clients);
        for (size_t i = 0; i < ROLE_COUNT; i++)
                (void)poller_set(s->host.poller, &s->listeners[i].item, 0);
        if (broker_has_heirs(s->broker)) {
                broker_prepare_leave(s->broker);
                connection_leave_all(&s->host, "the daemon restarts");
        } else {
                connection_drop_all(&s->host, "the daemon exits");
        }
        server_end_reloads(s);
        (void)accounting_tick(s->broker, clock_ms(), true);
        accounting_usage(s->broker, true);
        return 0;
}

static void close_handle(uv_handle_t *handle, void *unused)
{
        (void)unused;
        if (!uv_is_closing(handle))
                uv_close(handle, NULL);
}

static void listener_close(struct listener *l)
{
        if (l->fd >= 0)
                closer_close(l->fd); /* slow: it closes connections that were not accepted */
        if (l->path) {
                unlink(l->path);
                free(l->path);
        }
        if (l->lock_fd >= 0)
                close(l->lock_fd);
}

struct server *server_free(struct server *s)
{
        sigset_t endings;

        if (!s)
                return NULL;
        sigemptyset(&endings);
        sigaddset(&endings, SIGTERM);
        sigaddset(&endings, SIGINT);
        pthread_sigmask(SIG_BLOCK, &endings, NULL);
        uv_walk(&s->loop, close_handle, NULL);
        uv_run(&s->loop, UV_RUN_DEFAULT);
        uv_loop_close(&s->loop);
        /* libuv has restored the default actions: a second SIGTERM would end the process before its sockets are
         * removed. */
        signal(SIGTERM, SIG_IGN);
        signal(SIGINT, SIG_IGN);
        pthread_sigmask(SIG_UNBLOCK, &endings, NULL);
        for (size_t i = 0; i < ROLE_COUNT; i++) {
                sched_leave(&s->host.sched, &s->listeners[i].pending);
                listener_close(&s->listeners[i]);
        }
        message_arena_free(s->host.arena);
        poller_free(s->host.poller);
        free(s);
        return NULL;
}
