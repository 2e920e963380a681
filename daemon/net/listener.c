/* A listener; see listener.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/net/listener.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "daemon/base/closer.h"
#include "daemon/base/fd_reserve.h"
#include "daemon/base/log.h"
#include "daemon/net/connection.h"
#include "daemon/net/fd_guard.h"

#define LISTENER_ACCEPTS_PER_TURN 4    /* until one is accepted; the others are gone already, or refused */
#define LISTENER_PAUSE_MS         100u /* without accepting, when no fds are left */
#define LISTENER_MAX_CLOSING      256u /* sockets that wait for the closer; more pause accepting */

/* ---- the socket ------------------------------------------------------------ */

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
        return listen(l->fd, LISTENER_BACKLOG) < 0 ? -errno : 0;
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

int listener_open(struct listener *l, const struct config_socket *c, int passed_fd)
{
        return passed_fd >= 0 ? listener_adopt(l, passed_fd, c) : listener_bind(l, c);
}

const char *listener_trouble(int r)
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

/* ---- accepting -------------------------------------------------------------- */

static void on_pause_end(uv_timer_t *timer)
{
        struct listener *l = timer->data;

        if (poller_set(l->host->poller, &l->item, EPOLLIN) < 0)
                uv_timer_start(&l->pause, on_pause_end, LISTENER_PAUSE_MS, 0);
}

static bool is_shortage(int r)
{
        return r == -EMFILE || r == -ENFILE || r == -ENOMEM || r == -ENOBUFS;
}

/* Without a pause the socket would wake the loop at once, again and again. */
static void listener_pause(struct listener *l, enum log_level level, const char *why)
{
        log_limited(&l->host->accept_log, level, "no connection is accepted for %u ms: %s", LISTENER_PAUSE_MS,
                    why);
        (void)poller_set(l->host->poller, &l->item, 0);
        uv_timer_start(&l->pause, on_pause_end, LISTENER_PAUSE_MS, 0);
}

static void on_listener(struct poller_item *item, uint32_t events)
{
        struct listener *l = (struct listener *)((char *)item - offsetof(struct listener, item));

        (void)events;
        sched_ready(&l->pending);
        l->host->wake(l->host);
}

/* Accepts one connection. 0; 1: there is none, or accepting is paused; -errno: it was refused. */
static int listener_take(struct listener *l)
{
        int fd, r;

        if (closer_n_waiting() >= LISTENER_MAX_CLOSING) {
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
        r = connection_new(l->host, fd, l->role, l->socket);
        sched_owe(&l->pending, clock_ns(), SCHED_ACCEPT_NS);
        if (is_shortage(r)) {
                listener_pause(l, LOG_LEVEL_ERROR, strerror(-r));
                return 1;
        }
        if (r < 0 && r != -EUSERS && r != -ECONNABORTED)
                log_limited(&l->host->accept_log, LOG_LEVEL_ERROR, "a connection could not be accepted: %s",
                            strerror(-r));
        return r;
}

static void on_pending_turn(struct sched_member *m)
{
        struct listener *l = (struct listener *)((char *)m - offsetof(struct listener, pending));
        int r = -1;

        if (l->role == ROLE_ADMIN)
                fd_reserve_begin();
        for (int i = 0; i < LISTENER_ACCEPTS_PER_TURN && r < 0; i++)
                r = listener_take(l);
        if (r <= 0)
                sched_ready(&l->pending); /* the kernel reports it late beside many others */
        if (l->role == ROLE_ADMIN)
                fd_reserve_end();
}

/* ---- life ------------------------------------------------------------------- */

void listener_init(struct listener *l, struct connection_host *host, enum role role)
{
        *l = (struct listener){ .host = host,
                                .role = role,
                                .fd = -1,
                                .lock_fd = -1,
                                .item.report = on_listener,
                                .pending.turn = on_pending_turn };
        uv_timer_init(host->loop, &l->pause);
        l->pause.data = l;
}

int listener_start(struct listener *l)
{
        struct sched_key key = { .kind = SCHED_PENDING, .role = l->role };
        int r = sched_join(&l->host->sched, &l->pending, &key);

        l->item.fd = l->fd;
        return r < 0 ? r : poller_set(l->host->poller, &l->item, EPOLLIN);
}

void listener_stop(struct listener *l)
{
        (void)poller_set(l->host->poller, &l->item, 0);
}

void listener_close(struct listener *l)
{
        listener_stop(l);
        sched_leave(&l->host->sched, &l->pending);
        if (l->fd >= 0)
                closer_close(l->fd); /* slow: it closes connections that were not accepted */
        if (l->path) {
                unlink(l->path);
                free(l->path);
        }
        if (l->lock_fd >= 0)
                close(l->lock_fd);
}
