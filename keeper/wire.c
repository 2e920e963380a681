/* Messages; see wire.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "keeper/wire.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define RETRY_MS 10

/* A keeper of the version before runs until its bfcd stops: it must not take these messages for its own. */
_Static_assert(KEEPER_VERSION == 2 && sizeof(struct keeper_request) == 1632 &&
                       sizeof(struct keeper_reply) == 2392 && sizeof(struct keeper_extent) == 88 &&
                       sizeof(struct keeper_copy) == 48 && KEEPER_N_OPS == 15,
               "the messages have changed: increment KEEPER_VERSION, and enter it and what is new here");

union control {
        char bytes[CMSG_SPACE(KEEPER_FDS * sizeof(int))];
        struct cmsghdr align;
};

/* The kernel has no memory for the message at the moment. */
static bool is_short(int error)
{
        return (error == ENOBUFS || error == ENOMEM) && poll(NULL, 0, RETRY_MS) == 0;
}

struct keeper_request keeper_request_of(enum keeper_op op)
{
        struct keeper_request q;

        memset(&q, 0, sizeof(q)); /* the padding, too */
        q.version = KEEPER_VERSION;
        q.op = op;
        return q;
}

int keeper_send(int fd, const void *message, size_t n_bytes, const int *fds, size_t n_fds)
{
        union control control = { .bytes = { 0 } };
        struct iovec part = { (void *)(uintptr_t)message, n_bytes };
        struct msghdr m = { .msg_iov = &part, .msg_iovlen = 1 };
        struct cmsghdr *c;
        ssize_t n;

        if (n_fds > KEEPER_FDS)
                return -EINVAL;
        if (n_fds > 0) {
                m.msg_control = control.bytes;
                m.msg_controllen = CMSG_SPACE(n_fds * sizeof(int));
                c = CMSG_FIRSTHDR(&m);
                c->cmsg_level = SOL_SOCKET;
                c->cmsg_type = SCM_RIGHTS;
                c->cmsg_len = CMSG_LEN(n_fds * sizeof(int));
                memcpy(CMSG_DATA(c), fds, n_fds * sizeof(int));
        }
        do
                n = sendmsg(fd, &m, MSG_NOSIGNAL);
        while (n < 0 && (errno == EINTR || is_short(errno)));
        if (n < 0)
                return errno == ETOOMANYREFS ? -EMFILE : -errno;
        return 0;
}

static size_t take_fds(struct msghdr *m, int ret_fds[static KEEPER_FDS])
{
        size_t n = 0;

        for (struct cmsghdr *c = CMSG_FIRSTHDR(m); c; c = CMSG_NXTHDR(m, c)) {
                size_t n_here = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);

                if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS || n_here > KEEPER_FDS - n)
                        continue;
                memcpy(&ret_fds[n], CMSG_DATA(c), n_here * sizeof(int));
                n += n_here;
        }
        return n;
}

/* 0, or the error of keeper_receive(). */
static int check(const void *message, size_t n_bytes, ssize_t n_received, int flags)
{
        uint32_t version;

        if (n_received == 0)
                return -ECONNRESET;
        if (n_received != (ssize_t)n_bytes || flags & MSG_TRUNC)
                return -EPROTO;
        memcpy(&version, message, sizeof(version));
        if (version != KEEPER_VERSION)
                return -EPROTO;
        return flags & MSG_CTRUNC ? -EMFILE : 0;
}

int keeper_receive(int fd, void *ret, size_t n_bytes, int ret_fds[static KEEPER_FDS], size_t *ret_n_fds)
{
        union control control = { .bytes = { 0 } };
        struct iovec part = { ret, n_bytes };
        struct msghdr m = { .msg_iov = &part,
                            .msg_iovlen = 1,
                            .msg_control = control.bytes,
                            .msg_controllen = sizeof(control.bytes) };
        ssize_t n;
        int r;

        *ret_n_fds = 0;
        do
                n = recvmsg(fd, &m, MSG_CMSG_CLOEXEC);
        while (n < 0 && errno == EINTR);
        if (n < 0)
                return -errno;
        *ret_n_fds = take_fds(&m, ret_fds);
        r = check(ret, n_bytes, n, m.msg_flags);
        while (r < 0 && *ret_n_fds > 0)
                close(ret_fds[--*ret_n_fds]);
        return r;
}
