/* The process that stands in for the service manager: one loop over NOTIFY_SOCKET, the
 * daemon's pidfd, what is kept with FDPOLL, and the orders. Messages of the daemon are
 * handled before its end, and both before commands: an answer includes all messages before the
 * question.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <linux/close_range.h>
#include <linux/kcmp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tests/fd_message.h"
#include "tests/manager/order.h"

#define FIRST_FD        3
#define MAX_TEXT        4096u /* of a datagram, with the byte that would be too much */
#define MAX_TAGS        64u
#define MAX_ENVIRONMENT (128u * 1024) /* of one string; execve(2) */

struct kept {
        struct kept *next; /* older */
        int fd;
        bool is_polled;
        char name[STAND_IN_NAME_BYTES];
};

struct keeper {
        const struct stand_in_options *o;
        int orders, notify, pidfd, n_sockets, sockets[2];
        struct kept *first;
        struct stand_in_state state;
        bool drops_all;   /* when the daemon has ended */
        bool is_ours;     /* the signal that it ends by */
        uint64_t next_ms; /* when the next one starts; 0: none is to */
};

/* A datagram. */
struct message {
        pid_t pid;
        size_t n_fds, n_tags;
        int fds[STAND_IN_MAX_FDS]; /* -1: taken */
        char *tags[MAX_TAGS];
        char text[MAX_TEXT];
};

static uint64_t now_ms(void)
{
        struct timespec t;

        clock_gettime(CLOCK_MONOTONIC, &t);
        return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

static _Noreturn void fail(const char *what)
{
        fprintf(stderr, "stand-in: %s: %s\n", what, strerror(errno));
        _exit(97);
}

/* ---- what is kept ----------------------------------------------------------- */

static bool is_good_name(const char *name)
{
        size_t n = 0;

        for (; name[n]; n++) {
                if (name[n] < ' ' || name[n] >= 127 || name[n] == ':')
                        return false;
        }
        return n < STAND_IN_NAME_BYTES;
}

/* systemd asks kcmp(2), and where it may not, compares what fstat(2) says. */
static bool is_same(int a, int b)
{
        struct stat x, y;
        long r = syscall(SYS_kcmp, getpid(), getpid(), KCMP_FILE, a, b);

        if (r >= 0)
                return r == 0;
        return fstat(a, &x) == 0 && fstat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino &&
               (x.st_mode & S_IFMT) == (y.st_mode & S_IFMT);
}

/* The fd is taken over. */
static void keep(struct keeper *k, const char *name, int fd, bool is_polled)
{
        struct kept *kept = calloc(1, sizeof(*kept));

        if (!kept)
                fail("memory");
        kept->fd = fd;
        kept->is_polled = is_polled;
        strcpy(kept->name, name);
        kept->next = k->first;
        k->first = kept;
        k->state.n_stored++;
        k->state.n_names += strlen(name) + 1;
}

static void unlink_kept(struct keeper *k, struct kept **at)
{
        struct kept *kept = *at;

        *at = kept->next;
        k->state.n_stored--;
        k->state.n_names -= strlen(kept->name) + 1;
        close(kept->fd);
        free(kept);
}

static int drop(struct keeper *k, const char *name)
{
        int n = 0;

        for (struct kept **at = &k->first; *at;) {
                if (name && strcmp((*at)->name, name) != 0) {
                        at = &(*at)->next;
                        continue;
                }
                unlink_kept(k, at);
                n++;
        }
        return n;
}

static struct kept *find(struct keeper *k, const char *name)
{
        struct kept *kept = k->first;

        while (kept && strcmp(kept->name, name) != 0)
                kept = kept->next;
        return kept;
}

static void store(struct keeper *k, struct message *m, const char *name, bool is_polled)
{
        for (size_t i = 0; i < m->n_fds; i++) {
                bool is_there = false;

                if (k->state.n_stored >= k->o->max_stored) {
                        k->state.n_full++;
                        continue;
                }
                for (struct kept *kept = k->first; kept && !is_there; kept = kept->next)
                        is_there = is_same(kept->fd, m->fds[i]);
                if (is_there)
                        continue;
                keep(k, name, m->fds[i], is_polled);
                m->fds[i] = -1;
        }
}

/* ---- what it is told -------------------------------------------------------- */

static const char *tag(const struct message *m, const char *start)
{
        for (size_t i = 0; i < m->n_tags; i++) {
                if (strncmp(m->tags[i], start, strlen(start)) == 0)
                        return m->tags[i] + strlen(start);
        }
        return NULL;
}

static bool has(const struct message *m, const char *word)
{
        for (size_t i = 0; i < m->n_tags; i++) {
                if (strcmp(m->tags[i], word) == 0)
                        return true;
        }
        return false;
}

static void split(struct message *m)
{
        char *rest = m->text, *line;

        m->n_tags = 0;
        while ((line = strsep(&rest, "\n")) && m->n_tags < MAX_TAGS) {
                if (*line)
                        m->tags[m->n_tags++] = line;
        }
}

static void handle_fds(struct keeper *k, struct message *m)
{
        const char *name = tag(m, "FDNAME=");

        if (name && !is_good_name(name))
                name = NULL;
        if (has(m, "FDSTOREREMOVE=1")) {
                if (name)
                        (void)drop(k, name);
        } else if (has(m, "FDSTORE=1")) {
                store(k, m, name ? name : "stored", !has(m, "FDPOLL=0"));
        }
}

static void handle(struct keeper *k, struct message *m)
{
        const char *status = tag(m, "STATUS=");

        if (has(m, "BARRIER=1")) /* the fd is closed, which is what the sender waits for */
                return;
        if (m->pid != k->state.pid) {
                k->state.n_ignored++;
                return;
        }
        if (has(m, "READY=1") && !k->state.is_ready) {
                k->state.is_ready = true;
                k->state.n_ready++;
        }
        if (has(m, "STOPPING=1"))
                k->state.is_stopping = true;
        if (status)
                snprintf(k->state.said, sizeof(k->state.said), "%s", status);
        handle_fds(k, m);
}

/* Its fds and its sender. */
static void read_control(struct msghdr *header, struct message *m)
{
        for (struct cmsghdr *c = CMSG_FIRSTHDR(header); c; c = CMSG_NXTHDR(header, c)) {
                struct ucred ucred;

                if (c->cmsg_level != SOL_SOCKET)
                        continue;
                if (c->cmsg_type == SCM_RIGHTS) {
                        m->n_fds = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
                        memcpy(m->fds, CMSG_DATA(c), m->n_fds * sizeof(int));
                } else if (c->cmsg_type == SCM_CREDENTIALS) {
                        memcpy(&ucred, CMSG_DATA(c), sizeof(ucred));
                        m->pid = ucred.pid;
                }
        }
}

/* False: there was no message. */
static bool handle_next(struct keeper *k)
{
        static union {
                struct cmsghdr header;
                char bytes[CMSG_SPACE(sizeof(struct ucred)) + CMSG_SPACE(sizeof(int) * STAND_IN_MAX_FDS)];
        } control;
        static struct message m;
        struct iovec iov = { .iov_base = m.text, .iov_len = sizeof(m.text) - 1 };
        struct msghdr header = { .msg_iov = &iov,
                                 .msg_iovlen = 1,
                                 .msg_control = control.bytes,
                                 .msg_controllen = sizeof(control.bytes) };
        ssize_t n = recvmsg(k->notify, &header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT | MSG_TRUNC);

        if (n < 0)
                return errno == EINTR;
        m.pid = 0;
        m.n_fds = 0;
        read_control(&header, &m);
        if (n == 0 || header.msg_flags & (MSG_TRUNC | MSG_CTRUNC) || memchr(m.text, '\0', (size_t)n - 1)) {
                k->state.n_ignored++;
        } else {
                m.text[n] = '\0';
                split(&m);
                handle(k, &m);
        }
        for (size_t i = 0; i < m.n_fds; i++) {
                if (m.fds[i] >= 0)
                        close(m.fds[i]);
        }
        return true;
}

/* ---- the daemon ------------------------------------------------------------- */

/* In the child: fds 3 and up, the sockets first; and what tells of them. */
static void hand_over(const struct keeper *k)
{
        static const char *const names[] = { "client", "admin" };
        static char list[MAX_ENVIRONMENT + 1] = "LISTEN_FDNAMES=";
        char *at = list + strlen(list), *start = at, number[16];
        int n = k->n_sockets + (int)k->state.n_stored, i = 0;
        int *fds = calloc((size_t)n + 1, sizeof(*fds));

        if (!fds || k->state.n_names + 64 > MAX_ENVIRONMENT)
                fail("handing over");
        for (; i < k->n_sockets; i++) {
                fds[i] = k->sockets[i];
                at += sprintf(at, "%s%s", at == start ? "" : ":", names[i]);
        }
        for (struct kept *kept = k->first; kept; kept = kept->next, i++) {
                fds[i] = kept->fd;
                at += sprintf(at, "%s%s", at == start ? "" : ":", kept->name);
        }
        for (i = 0; i < n; i++) { /* out of the way first */
                fds[i] = fcntl(fds[i], F_DUPFD_CLOEXEC, FIRST_FD + n);
                if (fds[i] < 0)
                        fail("handing over");
        }
        for (i = 0; i < n; i++)
                dup2(fds[i], FIRST_FD + i);
        (void)syscall(SYS_close_range, FIRST_FD + n, ~0u, CLOSE_RANGE_CLOEXEC); /* all that was inherited */
        if (n == 0)
                return;
        putenv(list);
        snprintf(number, sizeof(number), "%d", n);
        setenv("LISTEN_FDS", number, 1);
        snprintf(number, sizeof(number), "%d", (int)getpid());
        setenv("LISTEN_PID", number, 1);
}

static _Noreturn void become_daemon(const struct keeper *k)
{
        const struct stand_in_options *o = k->o;
        int null = open("/dev/null", O_RDWR | O_CLOEXEC), log = -1;
        char number[32];

        if (o->log)
                log = open(o->log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
        dup2(null, STDIN_FILENO);
        dup2(log < 0 ? null : log, STDOUT_FILENO);
        if (log >= 0)
                dup2(log, STDERR_FILENO);
        unsetenv("JOURNAL_STREAM");
        setenv("NOTIFY_SOCKET", o->notify, 1);
        snprintf(number, sizeof(number), "%u000", o->watchdog_ms);
        if (o->watchdog_ms > 0)
                setenv("WATCHDOG_USEC", number, 1);
        snprintf(number, sizeof(number), "%u", o->max_stored);
        setenv("BFCD_FDSTORE", number, 1);
        hand_over(k);
        /* Last: what is handed over may be more than it may open itself. */
        if (o->max_fds > 0)
                setrlimit(RLIMIT_NOFILE, &(struct rlimit){ o->max_fds, o->max_fds });
        execv(o->argv[0], (char *const *)(uintptr_t)o->argv);
        fail(o->argv[0]);
}

static void start(struct keeper *k)
{
        pid_t parent = getpid();

        k->next_ms = 0;
        k->is_ours = false;
        k->state.is_ready = k->state.is_stopping = false;
        k->state.pid = fork();
        if (k->state.pid < 0)
                fail("fork");
        if (k->state.pid == 0) {
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                if (getppid() != parent)
                        _exit(98);
                become_daemon(k);
        }
        k->state.n_starts++;
        k->pidfd = (int)syscall(SYS_pidfd_open, k->state.pid, 0);
        if (k->pidfd < 0)
                fail("pidfd_open");
}

static void start_later(struct keeper *k)
{
        if (!k->state.is_held && k->state.pid == 0 && k->next_ms == 0)
                k->next_ms = now_ms() + k->o->restart_ms;
}

static void see_end(struct keeper *k)
{
        bool is_good;

        waitpid(k->state.pid, &k->state.status, 0);
        is_good = WIFEXITED(k->state.status) ? WEXITSTATUS(k->state.status) == 0 : k->is_ours;
        k->state.n_bad += !is_good;
        k->state.pid = 0;
        k->state.is_ready = false;
        close(k->pidfd);
        k->pidfd = -1;
        if (k->drops_all)
                (void)drop(k, NULL);
        k->drops_all = false;
        start_later(k);
}

/* ---- orders ----------------------------------------------------------------- */

static int send_signal(struct keeper *k, int number)
{
        if (k->state.pid == 0)
                return -ESRCH;
        k->is_ours = k->is_ours || number == SIGKILL || number == SIGTERM;
        return kill(k->state.pid, number) < 0 ? -errno : 0;
}

static int hold(struct keeper *k, bool is_held)
{
        k->state.is_held = is_held;
        if (is_held)
                k->next_ms = 0;
        start_later(k);
        return 0;
}

static int stop(struct keeper *k)
{
        hold(k, true);
        if (k->state.pid == 0)
                return (void)drop(k, NULL), 0;
        k->drops_all = true;
        return send_signal(k, SIGTERM);
}

static int replace(struct keeper *k, const char *name, int *fd)
{
        struct kept *kept = find(k, name);

        if (!kept || *fd < 0)
                return -ENOENT;
        close(kept->fd);
        kept->fd = *fd;
        *fd = -1;
        return 0;
}

static int name_of(struct keeper *k, int i, char *ret)
{
        struct kept *kept = k->first;

        for (; kept && i > 0; i--)
                kept = kept->next;
        if (!kept)
                return -ENOENT;
        strcpy(ret, kept->name);
        return 0;
}

/* *fd: what came with the order; what goes with the answer stays the keeper's. */
static int obey(struct keeper *k, const struct order *order, int *fd, struct answer *answer, int *ret_fd)
{
        struct kept *kept;

        switch (order->kind) {
        case ORDER_LOOK:
                answer->state = k->state;
                return 0;
        case ORDER_SIGNAL:
                return send_signal(k, order->number);
        case ORDER_HOLD:
                return hold(k, order->number != 0);
        case ORDER_STOP:
                return stop(k);
        case ORDER_NAME:
                return name_of(k, order->number, answer->name);
        case ORDER_GET:
                kept = find(k, order->name);
                *ret_fd = kept ? kept->fd : -1;
                return kept ? 0 : -ENOENT;
        case ORDER_DROP:
                return drop(k, order->name);
        case ORDER_REPLACE:
                return replace(k, order->name, fd);
        case ORDER_PUT:
                keep(k, order->name, *fd, false);
                *fd = -1;
                return 0;
        }
        return -EINVAL;
}

static void take_order(struct keeper *k)
{
        struct answer answer = { 0 };
        struct order order;
        int fd = -1, ret_fd = -1;

        if (fd_message_receive(k->orders, &order, sizeof(order), &fd) < 0) {
                if (k->state.pid > 0) {
                        kill(k->state.pid, SIGKILL);
                        waitpid(k->state.pid, NULL, 0);
                }
                _exit(0);
        }
        answer.r = obey(k, &order, &fd, &answer, &ret_fd);
        (void)fd_message_send(k->orders, &answer, sizeof(answer), &ret_fd, ret_fd >= 0, 0);
        if (fd >= 0)
                close(fd);
}

/* ---- life ------------------------------------------------------------------- */

static int bind_to(const char *path, int type)
{
        struct sockaddr_un address = { .sun_family = AF_UNIX };
        int fd = socket(AF_UNIX, type | SOCK_CLOEXEC, 0), on = 1;

        if (fd < 0 || strlen(path) >= sizeof(address.sun_path))
                fail(path);
        strcpy(address.sun_path, path);
        if (bind(fd, (struct sockaddr *)&address, sizeof(address)) < 0)
                fail(path);
        if (type == SOCK_DGRAM ? setsockopt(fd, SOL_SOCKET, SO_PASSCRED, &on, sizeof(on)) < 0
                               : listen(fd, 1024) < 0)
                fail(path);
        return fd;
}

static void keeper_open(struct keeper *k)
{
        struct rlimit limit;
        int bytes = 8 << 20;

        if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
                limit.rlim_cur = limit.rlim_max;
                (void)setrlimit(RLIMIT_NOFILE, &limit);
        }
        k->notify = bind_to(k->o->notify, SOCK_DGRAM);
        (void)setsockopt(k->notify, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof(bytes));
        if (k->o->socket)
                k->sockets[k->n_sockets++] = bind_to(k->o->socket, SOCK_STREAM);
        if (k->o->admin_socket)
                k->sockets[k->n_sockets++] = bind_to(k->o->admin_socket, SOCK_STREAM);
}

/* Drops fds that hung up, of those that can be polled. */
static void drop_hung_up(struct keeper *k)
{
        for (struct kept **at = &k->first; *at;) {
                struct pollfd p = { .fd = (*at)->fd };

                if ((*at)->is_polled && poll(&p, 1, 0) > 0 && p.revents & (POLLHUP | POLLERR))
                        unlink_kept(k, at);
                else
                        at = &(*at)->next;
        }
}

static int time_left(const struct keeper *k, bool has_polled)
{
        uint64_t now = now_ms();

        if (k->next_ms > 0)
                return k->next_ms > now ? (int)(k->next_ms - now) : 0;
        return has_polled ? 10 : -1;
}

_Noreturn void keeper_run(const struct stand_in_options *options, int socket)
{
        struct keeper k = { .o = options, .orders = socket, .pidfd = -1 };

        keeper_open(&k);
        start(&k);
        for (;;) {
                struct pollfd p[] = { { .fd = k.notify, .events = POLLIN },
                                      { .fd = k.pidfd, .events = POLLIN },
                                      { .fd = k.orders, .events = POLLIN } };
                bool has_polled = false;

                for (struct kept *kept = k.first; kept && !has_polled; kept = kept->next)
                        has_polled = kept->is_polled;
                if (poll(p, 3, time_left(&k, has_polled)) < 0 && errno != EINTR)
                        fail("poll");
                while (handle_next(&k))
                        ;
                if (p[1].revents)
                        see_end(&k);
                if (has_polled)
                        drop_hung_up(&k);
                if (p[2].revents)
                        take_order(&k);
                if (k.next_ms > 0 && now_ms() >= k.next_ms)
                        start(&k);
        }
}
