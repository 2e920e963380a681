/* The guard; see fd_guard.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/net/fd_guard.h"

#include <errno.h>
#include <stdint.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <linux/sockios.h>

#include "daemon/base/clock.h"
#include "daemon/base/closer.h"
#include "proto/frame.h"

#define FD_GUARD_DROP_NS    10000u /* at once */
#define FD_GUARD_DROP_BYTES 16u    /* by the first read */
#define FD_GUARD_QUICK_NS   2000u  /* a read that dropped few buffers */
#define FD_GUARD_READ_BYTES 4096u

#ifndef SO_PASSRIGHTS
#define SO_PASSRIGHTS 83 /* Linux 6.16 */
#endif

static int n_unread(int fd)
{
        int n_bytes = 0;

        return ioctl(fd, SIOCINQ, &n_bytes) == 0 ? n_bytes : -1;
}

bool fd_guard_refuse(int fd)
{
        int no = 0;

        return setsockopt(fd, SOL_SOCKET, SO_PASSRIGHTS, &no, sizeof(no)) == 0;
}

static bool was_refused_from_birth(int fd)
{
        int passes = 1;
        socklen_t n = sizeof(passes);

        return getsockopt(fd, SOL_SOCKET, SO_PASSRIGHTS, &passes, &n) == 0 && passes == 0;
}

/* MSG_PEEK rather than SIOCINQ: it takes the lock that a sender has from the kernel's check until its
 * message is in the queue. */
static bool has_something(int fd)
{
        uint8_t byte;

        return recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) >= 0 || errno != EAGAIN;
}

void fd_guard_init(struct fd_guard *g, int fd)
{
        int yes = 1;

        *g = (struct fd_guard){ .refuses = true };
        if (was_refused_from_birth(fd))
                return;
        g->refuses = fd_guard_refuse(fd);
        g->is_open = !g->refuses || has_something(fd);
        /* Out-of-band bytes stay in line: reading past one would otherwise drop it, with its fds. */
        if (g->is_open)
                (void)setsockopt(fd, SOL_SOCKET, SO_OOBINLINE, &yes, sizeof(yes));
}

void fd_guard_init_pair(struct fd_guard *g, int fd)
{
        *g = (struct fd_guard){ .refuses = fd_guard_refuse(fd) };
        if (!g->refuses)
                fd_guard_init(g, fd);
}

/* Room for the sender's credentials only: the kernel reports that there is more. */
union sender_control {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(struct ucred))];
};

/* Returns how many bytes are at the front of the queue, at most n_max. -EPROTO: file descriptors come with
 * them, or credentials without room for these. */
static int look(int fd, bool has_sender, size_t n_max)
{
        uint8_t bytes[FD_GUARD_LOOK_BYTES];
        union sender_control control;
        struct iovec iov = { .iov_base = bytes };
        struct msghdr msg;
        ssize_t n;

        iov.iov_len = n_max < sizeof(bytes) ? n_max : sizeof(bytes);
        do {
                msg = (struct msghdr){ .msg_iov = &iov, .msg_iovlen = 1 };
                msg.msg_control = has_sender ? &control : NULL;
                msg.msg_controllen = has_sender ? sizeof(control) : 0;
                n = recvmsg(fd, &msg, MSG_PEEK | MSG_DONTWAIT);
        } while (n < 0 && errno == EINTR);
        if (n < 0)
                return -errno;
        return msg.msg_flags & MSG_CTRUNC ? -EPROTO : (int)n;
}

int fd_guard_look(struct fd_guard *g, int fd, bool has_sender, size_t *n_bytes)
{
        int n;

        if (!g->is_open)
                return 0;
        n = look(fd, has_sender, *n_bytes);
        if (n < 0)
                return n == -EAGAIN ? FRAME_AGAIN : n;
        if (n > 0)
                *n_bytes = (size_t)n;
        /* The whole queue was looked at, and nothing more can come. */
        if (g->refuses && n_unread(fd) == n)
                g->is_open = false;
        return 0;
}

/* After a shutdown nothing more can come. If one look covers the whole queue, no closer thread is needed, as
 * for clients that connect and hang up at once. */
static bool may_contain_fds(int fd)
{
        int no = 0, n;

        (void)setsockopt(fd, SOL_SOCKET, SO_PASSCRED, &no, sizeof(no)); /* see look() */
        n = look(fd, false, FD_GUARD_LOOK_BYTES);
        return n < 0 || n_unread(fd) != n;
}

/* A read takes about as long as there are buffers in what it reads, and longer than their close. So it begins with few
 * bytes, and reads more only after a read that was quick. Without a control buffer file descriptors would be closed here.
 */
bool fd_guard_drop(const struct fd_guard *g, int fd)
{
        uint8_t bytes[FD_GUARD_READ_BYTES];
        size_t n = FD_GUARD_DROP_BYTES;
        uint64_t now_ns, end_ns;

        if (g->is_open || n_unread(fd) <= (int)FD_GUARD_FEW_BYTES)
                return false;
        shutdown(fd, SHUT_RDWR); /* nothing more can come */
        now_ns = clock_ns();
        end_ns = now_ns + FD_GUARD_DROP_NS;
        while (now_ns < end_ns) {
                uint64_t begin_ns = now_ns;

                if (recv(fd, bytes, n, MSG_DONTWAIT) <= 0)
                        return false;
                now_ns = clock_ns();
                if (now_ns - begin_ns < FD_GUARD_QUICK_NS && n < sizeof(bytes))
                        n *= 2;
        }
        return true;
}

void fd_guard_close(const struct fd_guard *g, int fd)
{
        bool has_much = fd_guard_drop(g, fd) && closer_n_waiting() < CLOSER_THREADS;

        if (g->is_open)
                shutdown(fd, SHUT_RDWR); /* drops nothing from the queue */
        if (g->is_open ? may_contain_fds(fd) : has_much)
                closer_close(fd);
        else
                close(fd);
}
