/* The service manager; see manager.h. Its side is described in sd_notify(3),
 * sd_listen_fds(3) and sd_watchdog_enabled(3).
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/net/manager.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "daemon/base/clock.h"

#define MANAGER_FIRST_FD   3
#define MANAGER_MAX_FDS    65536u
#define MANAGER_STATS_MS   5000u /* for operators */
#define MANAGER_TEXT_BYTES 256u

struct manager_fd {
        int fd; /* -1: taken */
        char *name;
};

struct manager {
        int notify_fd; /* -1: there is none */
        struct sockaddr_un address;
        socklen_t n_address;
        uint64_t watchdog_ms;          /* 0: none */
        bool owes_ready;               /* not sent yet */
        char said[MANAGER_TEXT_BYTES]; /* the status that was sent last */
        struct manager_fd *fds;
        size_t n_fds;
};

/* ---- received fds ----------------------------------------------------------- */

static bool parse_u64(const char *text, uint64_t *ret)
{
        char *end;
        unsigned long long n;

        if (!text || *text < '0' || *text > '9')
                return false;
        errno = 0;
        n = strtoull(text, &end, 10);
        if (errno != 0 || *end != '\0')
                return false;
        *ret = n;
        return true;
}

/* A variable with a pid is only for that process. */
static bool is_for_us(const char *pid)
{
        uint64_t n;

        return parse_u64(pid, &n) && n == (uint64_t)getpid();
}

static int manager_read_fds(struct manager *m)
{
        const char *names = getenv("LISTEN_FDNAMES");
        uint64_t n;

        if (!is_for_us(getenv("LISTEN_PID")) || !parse_u64(getenv("LISTEN_FDS"), &n) || n == 0 ||
            n > MANAGER_MAX_FDS)
                return 0;
        if (!names)
                names = "";
        m->fds = calloc(n, sizeof(*m->fds));
        if (!m->fds)
                return -ENOMEM;
        for (size_t i = 0; i < n; i++) {
                size_t n_name = strcspn(names, ":");
                int fd = MANAGER_FIRST_FD + (int)i;

                if (fcntl(fd, F_SETFD, FD_CLOEXEC) < 0)
                        fd = -1; /* there is none, despite the variable */
                m->fds[i].fd = fd;
                m->fds[i].name = strndup(names, n_name);
                m->n_fds = i + 1;
                if (!m->fds[i].name)
                        return -ENOMEM;
                names += names[n_name] == ':' ? n_name + 1 : n_name;
        }
        return 0;
}

int manager_take(struct manager *m, const char *name)
{
        for (size_t i = 0; i < m->n_fds; i++) {
                int fd = m->fds[i].fd;

                if (fd < 0 || strcmp(m->fds[i].name, name) != 0)
                        continue;
                m->fds[i].fd = -1;
                return fd;
        }
        return -1;
}

void manager_drop_rest(struct manager *m, void (*told)(const char *name))
{
        for (size_t i = 0; i < m->n_fds; i++) {
                if (m->fds[i].fd < 0)
                        continue;
                told(m->fds[i].name);
                close(m->fds[i].fd);
                m->fds[i].fd = -1;
        }
}

/* ---- messages --------------------------------------------------------------- */

/* NOTIFY_SOCKET is a path, or an abstract name with '@' for its first byte. */
static int manager_open_notify(struct manager *m)
{
        const char *path = getenv("NOTIFY_SOCKET");
        size_t n = path ? strlen(path) : 0;

        if (n < 2 || n >= sizeof(m->address.sun_path) || (path[0] != '/' && path[0] != '@'))
                return 0;
        m->address.sun_family = AF_UNIX;
        memcpy(m->address.sun_path, path, n + 1);
        m->n_address = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + n);
        if (path[0] == '@')
                m->address.sun_path[0] = '\0';
        else
                m->n_address++;
        m->notify_fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        return m->notify_fd < 0 ? -errno : 0;
}

static void manager_read_watchdog(struct manager *m)
{
        const char *pid = getenv("WATCHDOG_PID");
        uint64_t usec;

        if (m->notify_fd < 0 || (pid && !is_for_us(pid)) || !parse_u64(getenv("WATCHDOG_USEC"), &usec))
                return;
        m->watchdog_ms = usec / 1000;
}

/* True: it was sent. To an address, without a connection, because the manager may make its socket again
 * at the same path. */
static bool manager_say(const struct manager *m, const char *text)
{
        return sendto(m->notify_fd, text, strlen(text), MSG_NOSIGNAL | MSG_DONTWAIT,
                      (const struct sockaddr *)&m->address, m->n_address) >= 0;
}

static const char *format_bytes(uint64_t n_bytes, char *buf, size_t n_buf)
{
        static const char *const units[] = { "KiB", "MiB", "GiB", "TiB" };
        double n = (double)n_bytes / 1024;
        size_t i = 0;

        if (n_bytes < 1024) {
                snprintf(buf, n_buf, "%" PRIu64 " B", n_bytes);
                return buf;
        }
        for (; n >= 1024 && i + 1 < sizeof(units) / sizeof(units[0]); i++)
                n /= 1024;
        snprintf(buf, n_buf, "%.1f %s", n, units[i]);
        return buf;
}

static void format_status(const struct manager_stats *f, char *buf, size_t n_buf)
{
        char in_use[32], reserved[32], lost[48] = "", suspended[48] = "";

        if (f->n_suspended > 0)
                snprintf(suspended, sizeof(suspended), " (%zu suspended)", f->n_suspended);
        if (f->n_lost > 0)
                snprintf(lost, sizeof(lost), "; %zu %s lost", f->n_lost,
                         f->n_lost == 1 ? "device" : "devices");
        snprintf(buf, n_buf, "%zu %s%s, %s in use, %s reserved%s", f->n_sessions,
                 f->n_sessions == 1 ? "session" : "sessions", suspended,
                 format_bytes(f->bytes_in_use, in_use, sizeof(in_use)),
                 format_bytes(f->bytes_reserved, reserved, sizeof(reserved)), lost);
}

uint64_t manager_beat_ms(const struct manager *m)
{
        uint64_t ms = MANAGER_STATS_MS;

        if (m->notify_fd < 0)
                return 0;
        /* Three times per period: one may be late, and one may get lost. */
        if (m->watchdog_ms > 0 && m->watchdog_ms / 3 < ms)
                ms = m->watchdog_ms / 3;
        return ms > 0 ? ms : 1;
}

void manager_beat(struct manager *m, const struct manager_stats *stats)
{
        char status[MANAGER_TEXT_BYTES], text[MANAGER_TEXT_BYTES + 64];
        bool is_news;

        if (m->notify_fd < 0)
                return;
        format_status(stats, status, sizeof(status));
        is_news = strcmp(status, m->said) != 0;
        snprintf(text, sizeof(text), "%s%s%s%s", m->owes_ready ? "READY=1\n" : "",
                 m->watchdog_ms > 0 ? "WATCHDOG=1\n" : "", is_news ? "STATUS=" : "", is_news ? status : "");
        if (text[0] == '\0' || !manager_say(m, text))
                return;
        m->owes_ready = false;
        memcpy(m->said, status, sizeof(status));
}

void manager_ready(struct manager *m, const struct manager_stats *stats)
{
        m->owes_ready = true;
        manager_beat(m, stats);
}

/* The loop does not run while memory is released at the end, so the watchdog is turned off;
 * TimeoutStopSec= bounds the end. */
void manager_ending(struct manager *m, size_t n_sessions)
{
        char text[MANAGER_TEXT_BYTES];

        if (m->notify_fd < 0)
                return;
        snprintf(text, sizeof(text), "STOPPING=1\n%sSTATUS=Ending %zu %s",
                 m->watchdog_ms > 0 ? "WATCHDOG_USEC=0\n" : "", n_sessions,
                 n_sessions == 1 ? "session" : "sessions");
        manager_say(m, text); /* the end is noticed anyway */
}

/* ---- life ----------------------------------------------------------------- */

int manager_new(struct manager **ret)
{
        static const char *const ours[] = { "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID",
                                            "LISTEN_FDS",    "LISTEN_PID",    "LISTEN_FDNAMES" };
        struct manager *m = calloc(1, sizeof(*m));
        int r;

        if (!m)
                return -ENOMEM;
        m->notify_fd = -1;
        r = manager_read_fds(m);
        if (r == 0)
                r = manager_open_notify(m);
        if (r < 0) {
                manager_free(m);
                return r;
        }
        manager_read_watchdog(m);
        for (size_t i = 0; i < sizeof(ours) / sizeof(ours[0]); i++)
                unsetenv(ours[i]);
        *ret = m;
        return 0;
}

struct manager *manager_free(struct manager *m)
{
        if (!m)
                return NULL;
        for (size_t i = 0; i < m->n_fds; i++) {
                if (m->fds[i].fd >= 0)
                        close(m->fds[i].fd);
                free(m->fds[i].name);
        }
        free(m->fds);
        if (m->notify_fd >= 0)
                close(m->notify_fd);
        free(m);
        return NULL;
}
