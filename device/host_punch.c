/* The helper process; see host_punch.h.
 *
 * It has one thread and does not call malloc(), so that it can be forked from a process
 * with threads. It never punches itself: its children do, one for each lane that has work, and
 * each takes all that is queued in its lane when it is forked. A child sends the answers. If it
 * was killed, the helper answers that they must be sent again.
 *
 * An extent that has been punched is kept open by no process of the helper, however long the
 * lane is blocked: pages that a client writes into it again would stay with it. So a child has
 * the fds of its own items only, and closes each when it is punched; the helper has none of them.
 *
 * Invariant: items[0, n_items) are the requests that are not finished; `child` of an item is the
 * process that was forked for it, or 0; it has an fd as long as it has no child.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "device/host_punch.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/capability.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define STEP_BYTES (UINT64_C(16) << 20)
#define N_ITEMS    (1u << 20) /* address space; only what is used takes memory */
#define RETRY_MS   100        /* when no child could be made */

struct item {
        struct host_punch_request request;
        int fd;
        pid_t child;
};

struct helper {
        int fd;
        int signals; /* SIGCHLD */
        struct item *items;
        size_t n_items;
        bool is_left;     /* the other end is closed */
        bool tries_again; /* some items have no child yet */
};

int host_fallocate_whole(int fd, int mode, uint64_t n_bytes)
{
        for (uint64_t at = 0; at < n_bytes;) {
                uint64_t n = n_bytes - at < STEP_BYTES ? n_bytes - at : STEP_BYTES;

                if (fallocate(fd, mode, (off_t)at, (off_t)n) == 0)
                        at += n;
                else if (errno != EINTR)
                        return -errno;
        }
        return 0;
}

int host_punch_whole(int fd, uint64_t n_bytes)
{
        return host_fallocate_whole(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, n_bytes);
}

/* ---- the helper ------------------------------------------------------------ */

static void helper_answer(const struct helper *h, uint64_t tag, int result)
{
        struct host_punch_answer answer = { .tag = tag, .result = result };
        ssize_t n;

        do
                n = send(h->fd, &answer, sizeof(answer), MSG_NOSIGNAL);
        while (n < 0 && errno == EINTR);
}

/* The fd of a message, or -1. There is room for one; the kernel closes more. */
static int message_fd(struct msghdr *m)
{
        struct cmsghdr *c = CMSG_FIRSTHDR(m);
        int fd = -1;

        if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS &&
            c->cmsg_len == CMSG_LEN(sizeof(fd)))
                memcpy(&fd, CMSG_DATA(c), sizeof(fd));
        return fd;
}

static void helper_take(struct helper *h, const struct host_punch_request *request, size_t n, int fd)
{
        bool is_good = n == sizeof(*request) && request->n_bytes > 0 && request->n_bytes <= INT64_MAX;

        if (is_good && fd >= 0 && h->n_items < N_ITEMS) {
                h->items[h->n_items++] = (struct item){ *request, fd, 0 };
                return;
        }
        if (fd >= 0)
                close(fd);
        if (n == sizeof(*request))
                helper_answer(h, request->tag, is_good ? -EAGAIN : -EINVAL);
}

/* Takes all that was sent. */
static void helper_receive(struct helper *h)
{
        while (!h->is_left) {
                struct host_punch_request request;
                union {
                        char bytes[CMSG_SPACE(sizeof(int))];
                        struct cmsghdr align;
                } control;
                struct iovec part = { &request, sizeof(request) };
                struct msghdr m = { .msg_iov = &part,
                                    .msg_iovlen = 1,
                                    .msg_control = control.bytes,
                                    .msg_controllen = sizeof(control.bytes) };
                ssize_t n = recvmsg(h->fd, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);

                /* ECONNRESET: the other end was closed with answers unread. What it sent still comes. */
                if (n < 0 && (errno == EINTR || errno == ECONNRESET))
                        continue;
                if (n < 0 && errno == EAGAIN)
                        return;
                if (n <= 0)
                        h->is_left = true;
                else
                        helper_take(h, &request, m.msg_flags & MSG_TRUNC ? 0 : (size_t)n, message_fd(&m));
        }
}

static bool is_of_lane(const struct item *it, uint32_t lane)
{
        return it->request.lane == lane && it->child == 0;
}

/* In the child: all of the lane that has no other child. */
static void lane_punch(const struct helper *h, uint32_t lane)
{
        for (size_t i = 0; i < h->n_items; i++)
                if (h->items[i].fd >= 0 && !is_of_lane(&h->items[i], lane))
                        close(h->items[i].fd);
        for (size_t i = 0; i < h->n_items; i++) {
                const struct item *it = &h->items[i];
                int r;

                if (!is_of_lane(it, lane))
                        continue;
                r = host_punch_whole(it->fd, it->request.n_bytes);
                close(it->fd);
                helper_answer(h, it->request.tag, r);
        }
}

static bool lane_is_busy(const struct helper *h, uint32_t lane)
{
        for (size_t i = 0; i < h->n_items; i++)
                if (h->items[i].request.lane == lane && h->items[i].child != 0)
                        return true;
        return false;
}

/* A child for each lane that has work and no child. */
static void helper_start_lanes(struct helper *h)
{
        h->tries_again = false;
        for (size_t i = 0; i < h->n_items; i++) {
                uint32_t lane = h->items[i].request.lane;
                pid_t child;

                if (h->items[i].child != 0 || lane_is_busy(h, lane))
                        continue;
                child = fork();
                if (child == 0) {
                        lane_punch(h, lane);
                        _exit(0);
                }
                if (child < 0) {
                        h->tries_again = true;
                        return;
                }
                for (size_t k = i; k < h->n_items; k++) {
                        if (!is_of_lane(&h->items[k], lane))
                                continue;
                        h->items[k].child = child;
                        close(h->items[k].fd);
                        h->items[k].fd = -1;
                }
        }
}

/* A child that was killed may have answered some of its items: the caller knows an answer that it
 * has had. */
static void helper_finish(struct helper *h, pid_t child, bool is_done)
{
        size_t n = 0;

        for (size_t i = 0; i < h->n_items; i++) {
                struct item it = h->items[i];

                if (it.child != child)
                        h->items[n++] = it;
                else if (!is_done)
                        helper_answer(h, it.request.tag, -EAGAIN);
        }
        h->n_items = n;
}

static void helper_wait(struct helper *h)
{
        struct pollfd fds[] = { { .fd = h->signals, .events = POLLIN },
                                { .fd = h->is_left ? -1 : h->fd, .events = POLLIN } };
        struct signalfd_siginfo info;
        int status;
        pid_t pid;

        (void)poll(fds, 2, h->tries_again ? RETRY_MS : -1);
        (void)!read(h->signals, &info, sizeof(info));
        while ((pid = waitpid(-1, &status, WNOHANG)) > 0)
                helper_finish(h, pid, WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

void host_punch_serve(int fd)
{
        struct helper h = { .fd = fd, .signals = -1 };
        sigset_t child;

        sigemptyset(&child);
        sigaddset(&child, SIGCHLD);
        sigprocmask(SIG_BLOCK, &child, NULL);
        h.signals = signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK);
        h.items = mmap(NULL, N_ITEMS * sizeof(struct item), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        while (h.signals >= 0 && h.items != MAP_FAILED) {
                helper_receive(&h);
                helper_start_lanes(&h);
                if (h.is_left && h.n_items == 0)
                        break;
                helper_wait(&h);
        }
        if (h.items != MAP_FAILED)
                munmap(h.items, N_ITEMS * sizeof(struct item));
        if (h.signals >= 0)
                close(h.signals);
}

/* ---- its start --------------------------------------------------------------- */

/* Nothing of the daemon's is kept but the socket, as fd 3. */
static void keep_only(int fd)
{
        int null;

        if (fd != 3)
                dup2(fd, 3);
        syscall(SYS_close_range, 4, ~0u, 0); /* clients with an old C library have this file, too */
        null = open("/dev/null", O_RDWR);
        for (int i = 0; i < 3; i++)
                if (null < 0 || dup2(null, i) < 0)
                        close(i);
        if (null > 3)
                close(null);
        fcntl(3, F_SETFD, FD_CLOEXEC);
}

/* The daemon may have handlers, and a mask. A signal for the daemon's process group is not for
 * the helper, which still has work to do then. */
static void reset_signals(void)
{
        static const int ignored[] = { SIGINT, SIGTERM, SIGHUP, SIGPIPE };
        sigset_t none;

        for (int i = 1; i < NSIG; i++)
                signal(i, SIG_DFL);
        for (size_t i = 0; i < sizeof(ignored) / sizeof(ignored[0]); i++)
                signal(ignored[i], SIG_IGN);
        sigemptyset(&none);
        sigprocmask(SIG_SETMASK, &none, NULL);
}

/* The work needs no right but the fds that are sent. What fails is kept. */
static void drop_rights(void)
{
        struct __user_cap_header_struct header = { .version = _LINUX_CAPABILITY_VERSION_3 };
        struct __user_cap_data_struct none[_LINUX_CAPABILITY_U32S_3] = { 0 };

        prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        (void)syscall(SYS_capset, &header, none);
        (void)!chdir("/");
}

static void raise_own_fd_limit(void)
{
        struct rlimit limit;

        if (getrlimit(RLIMIT_NOFILE, &limit) < 0)
                return;
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
}

static void helper_main(int fd) __attribute__((noreturn));
static void helper_main(int fd)
{
        reset_signals();
        keep_only(fd);
        raise_own_fd_limit();
        prctl(PR_SET_NAME, "bfcd-punch");
        drop_rights();
        host_punch_serve(3);
        _exit(0);
}

int host_punch_start(struct host_punch *ret)
{
        struct host_punch h = HOST_PUNCH_NONE;
        int fds[2];

        if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) < 0)
                return -errno;
        h.pid = fork();
        if (h.pid == 0)
                helper_main(fds[1]);
        if (h.pid < 0) {
                int r = -errno;

                close(fds[0]);
                close(fds[1]);
                return r;
        }
        close(fds[1]);
        h.fd = fds[0];
        h.pidfd = (int)syscall(SYS_pidfd_open, h.pid, 0);
        if (h.pidfd < 0) {
                int r = -errno;

                host_punch_leave(&h);
                return r;
        }
        *ret = h;
        return 0;
}

void host_punch_leave(struct host_punch *h)
{
        if (h->fd >= 0)
                close(h->fd);
        if (h->pidfd >= 0)
                close(h->pidfd);
        *h = HOST_PUNCH_NONE;
}

/* ---- the daemon's end ---------------------------------------------------------- */

int host_punch_send(const struct host_punch *h, const struct host_punch_request *request, int fd)
{
        union {
                char bytes[CMSG_SPACE(sizeof(int))];
                struct cmsghdr align;
        } control = { 0 };
        struct host_punch_request copy = *request;
        struct iovec part = { &copy, sizeof(copy) };
        struct msghdr m = { .msg_iov = &part,
                            .msg_iovlen = 1,
                            .msg_control = control.bytes,
                            .msg_controllen = sizeof(control.bytes) };
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);

        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(fd));
        memcpy(CMSG_DATA(c), &fd, sizeof(fd));
        if (sendmsg(h->fd, &m, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0)
                return 0;
        /* ETOOMANYREFS: as many fds are on their way as this user may have there. */
        return errno == EINTR || errno == ENOBUFS || errno == ENOMEM || errno == ETOOMANYREFS ? -EAGAIN
                                                                                              : -errno;
}

int host_punch_receive(const struct host_punch *h, struct host_punch_answer *ret)
{
        struct host_punch_answer answer;
        ssize_t n = recv(h->fd, &answer, sizeof(answer), MSG_DONTWAIT);

        if (n < 0)
                return errno == EINTR ? -EAGAIN : -errno;
        if (n == 0)
                return -EPIPE;
        if ((size_t)n != sizeof(answer))
                return -EAGAIN;
        *ret = answer;
        return 0;
}
