/* See process.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/process.h"

#include <check.h>
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static int send_message(int to, const struct message *m)
{
        struct iovec iov = { .iov_base = (void *)(uintptr_t)m, .iov_len = sizeof(*m) };
        _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(int))] = { 0 };
        struct msghdr header = { .msg_iov = &iov, .msg_iovlen = 1 };
        struct cmsghdr *c = (struct cmsghdr *)control;

        if (m->fd >= 0) {
                header.msg_control = control;
                header.msg_controllen = sizeof(control);
                c->cmsg_level = SOL_SOCKET;
                c->cmsg_type = SCM_RIGHTS;
                c->cmsg_len = CMSG_LEN(sizeof(int));
                memcpy(CMSG_DATA(c), &m->fd, sizeof(int));
        }
        return sendmsg(to, &header, MSG_NOSIGNAL) == (ssize_t)sizeof(*m) ? 0 : -EPIPE;
}

static int receive_message(int from, struct message *ret)
{
        struct iovec iov = { .iov_base = ret, .iov_len = sizeof(*ret) };
        _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(int))] = { 0 };
        struct msghdr header = {
                .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control)
        };
        struct cmsghdr *c;
        ssize_t n;

        do {
                n = recvmsg(from, &header, MSG_CMSG_CLOEXEC);
        } while (n < 0 && errno == EINTR);
        if (n != (ssize_t)sizeof(*ret))
                return -EPIPE;
        ret->fd = -1;
        c = CMSG_FIRSTHDR(&header);
        if (c && c->cmsg_type == SCM_RIGHTS)
                memcpy(&ret->fd, CMSG_DATA(c), sizeof(int));
        return 0;
}

/* The ends of this process: one that is forked later must not keep them open. */
static int ends[16];
static unsigned int n_ends;

static void forget_end(int fd)
{
        for (unsigned int i = 0; i < n_ends; i++)
                if (ends[i] == fd)
                        ends[i] = ends[--n_ends];
        close(fd);
}

/* An fd that run() leaves in the message is sent, and closed here. */
static void serve(int fd)
{
        struct message m;

        prctl(PR_SET_PDEATHSIG, SIGKILL);
        while (receive_message(fd, &m) == 0) {
                m.result = m.run(&m);
                if (send_message(fd, &m) < 0)
                        break;
                if (m.fd >= 0)
                        close(m.fd);
        }
}

struct process process_start(void)
{
        struct process p;
        int fds[2];

        ck_assert_int_eq(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds), 0);
        p.fd = fds[0];
        p.pid = fork();
        ck_assert_int_ge(p.pid, 0);
        if (p.pid == 0) {
                close(fds[0]);
                while (n_ends > 0)
                        close(ends[--n_ends]);
                serve(fds[1]);
                exit(0); /* not _exit(): leaks are looked for on the way out */
        }
        close(fds[1]);
        ck_assert_uint_lt(n_ends, sizeof(ends) / sizeof(ends[0]));
        ends[n_ends++] = p.fd;
        return p;
}

int process_call(struct process *p, int (*run)(struct message *m), struct message *m)
{
        m->run = run;
        if (send_message(p->fd, m) < 0 || receive_message(p->fd, m) < 0) {
                m->result = -EPIPE;
                m->fd = -1;
        }
        return m->result;
}

static int reap(struct process *p)
{
        int status = 0;

        ck_assert_int_eq(waitpid(p->pid, &status, 0), p->pid);
        p->pid = -1;
        return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

void process_kill(struct process *p)
{
        kill(p->pid, SIGKILL);
        reap(p);
        forget_end(p->fd);
}

int process_end(struct process *p)
{
        forget_end(p->fd);
        return reap(p);
}
