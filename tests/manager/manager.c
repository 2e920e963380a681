/* The process that stands in for the service manager: one loop over NOTIFY_SOCKET, the
 * daemon's pidfd, and the orders. Messages of the daemon are handled before its end, and both
 * before orders: an answer includes all messages before the question.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <linux/close_range.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tests/manager/order.h"

#define FIRST_FD 3
#define MAX_TEXT 4096u /* of a datagram, with the byte that would be too much */
#define MAX_TAGS 64u

struct manager {
        const struct stand_in_options *o;
        int orders, notify, pidfd, n_sockets, sockets[2];
        struct stand_in_state state;
        bool is_ours;     /* the signal that it ends by */
        uint64_t next_ms; /* when the next one starts; 0: none is to */
};

/* A datagram. */
struct message {
        pid_t pid;
        size_t n_tags;
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

static void handle(struct manager *k, struct message *m)
{
        const char *status = tag(m, "STATUS=");

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
}

static pid_t sender_of(struct msghdr *header)
{
        struct ucred ucred;

        for (struct cmsghdr *c = CMSG_FIRSTHDR(header); c; c = CMSG_NXTHDR(header, c)) {
                if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_CREDENTIALS)
                        continue;
                memcpy(&ucred, CMSG_DATA(c), sizeof(ucred));
                return ucred.pid;
        }
        return 0;
}

/* False: there was no message. One with fds is cut off. */
static bool handle_next(struct manager *k)
{
        union {
                struct cmsghdr header;
                char bytes[CMSG_SPACE(sizeof(struct ucred))];
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
        m.pid = sender_of(&header);
        if (n == 0 || header.msg_flags & (MSG_TRUNC | MSG_CTRUNC) || memchr(m.text, '\0', (size_t)n - 1)) {
                k->state.n_ignored++;
                return true;
        }
        m.text[n] = '\0';
        split(&m);
        handle(k, &m);
        return true;
}

/* ---- the daemon ------------------------------------------------------------- */

/* In the child: the sockets become fds 3 and up. */
static void hand_over(const struct manager *k)
{
        int n = k->n_sockets, fds[2];
        char number[16];

        for (int i = 0; i < n; i++) { /* out of the way first */
                fds[i] = fcntl(k->sockets[i], F_DUPFD_CLOEXEC, FIRST_FD + n);
                if (fds[i] < 0)
                        fail("handing over");
        }
        for (int i = 0; i < n; i++)
                dup2(fds[i], FIRST_FD + i);
        (void)syscall(SYS_close_range, FIRST_FD + n, ~0u, CLOSE_RANGE_CLOEXEC); /* all that was inherited */
        if (n == 0)
                return;
        setenv("LISTEN_FDNAMES", n == 2 ? "client:admin" : k->o->socket ? "client" : "admin", 1);
        snprintf(number, sizeof(number), "%d", n);
        setenv("LISTEN_FDS", number, 1);
        snprintf(number, sizeof(number), "%d", (int)getpid());
        setenv("LISTEN_PID", number, 1);
}

static _Noreturn void become_daemon(const struct manager *k)
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
        if (o->keeps)
                unsetenv("BFCD_KEEP");
        else
                setenv("BFCD_KEEP", "0", 1);
        hand_over(k);
        /* Last: what is handed over may be more than it may open itself. */
        if (o->max_fds > 0)
                setrlimit(RLIMIT_NOFILE, &(struct rlimit){ o->max_fds, o->max_fds });
        execv(o->argv[0], (char *const *)(uintptr_t)o->argv);
        fail(o->argv[0]);
}

static void start(struct manager *k)
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

static void start_later(struct manager *k)
{
        if (!k->state.is_held && k->state.pid == 0 && k->next_ms == 0)
                k->next_ms = now_ms() + k->o->restart_ms;
}

static void see_end(struct manager *k)
{
        bool is_good;

        waitpid(k->state.pid, &k->state.status, 0);
        is_good = WIFEXITED(k->state.status) ? WEXITSTATUS(k->state.status) == 0 : k->is_ours;
        k->state.n_bad += !is_good;
        k->state.pid = 0;
        k->state.is_ready = false;
        close(k->pidfd);
        k->pidfd = -1;
        start_later(k);
}

/* ---- orders ----------------------------------------------------------------- */

static int send_signal(struct manager *k, int number)
{
        if (k->state.pid == 0)
                return -ESRCH;
        k->is_ours = k->is_ours || number == SIGKILL || number == SIGTERM;
        return kill(k->state.pid, number) < 0 ? -errno : 0;
}

static int hold(struct manager *k, bool is_held)
{
        k->state.is_held = is_held;
        if (is_held)
                k->next_ms = 0;
        start_later(k);
        return 0;
}

static int obey(struct manager *k, const struct order *order, struct answer *answer)
{
        switch (order->kind) {
        case ORDER_LOOK:
                answer->state = k->state;
                return 0;
        case ORDER_SIGNAL:
                return send_signal(k, order->number);
        case ORDER_HOLD:
                return hold(k, order->number != 0);
        }
        return -EINVAL;
}

static void take_order(struct manager *k)
{
        struct answer answer = { 0 };
        struct order order;

        if (recv(k->orders, &order, sizeof(order), 0) != sizeof(order)) {
                if (k->state.pid > 0) {
                        kill(k->state.pid, SIGKILL);
                        waitpid(k->state.pid, NULL, 0);
                }
                _exit(0);
        }
        answer.r = obey(k, &order, &answer);
        (void)send(k->orders, &answer, sizeof(answer), MSG_NOSIGNAL);
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

static void manager_open(struct manager *k)
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

static int time_left(const struct manager *k)
{
        uint64_t now = now_ms();

        if (k->next_ms == 0)
                return -1;
        return k->next_ms > now ? (int)(k->next_ms - now) : 0;
}

_Noreturn void manager_run(const struct stand_in_options *options, int socket)
{
        struct manager k = { .o = options, .orders = socket, .pidfd = -1 };

        manager_open(&k);
        start(&k);
        for (;;) {
                struct pollfd p[] = { { .fd = k.notify, .events = POLLIN },
                                      { .fd = k.pidfd, .events = POLLIN },
                                      { .fd = k.orders, .events = POLLIN } };

                if (poll(p, 3, time_left(&k)) < 0 && errno != EINTR)
                        fail("poll");
                while (handle_next(&k))
                        ;
                if (p[1].revents)
                        see_end(&k);
                if (p[2].revents)
                        take_order(&k);
                if (k.next_ms > 0 && now_ms() >= k.next_ms)
                        start(&k);
        }
}
