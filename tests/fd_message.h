/* A message over a Unix socket, with file descriptors beside it.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_FD_MESSAGE_H
#define BFC_TESTS_FD_MESSAGE_H

#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>

#define FD_MESSAGE_MAX 253 /* fds in one message; the kernel's limit */

/* flags: of sendmsg(). 0 or -errno. */
static inline int fd_message_send(int socket, const void *bytes, size_t n_bytes, const int *fds, size_t n_fds,
                                  int flags)
{
        union {
                struct cmsghdr header;
                char bytes[CMSG_SPACE(sizeof(int) * FD_MESSAGE_MAX)];
        } control = { .bytes = { 0 } };
        struct iovec iov = { .iov_base = (void *)(uintptr_t)bytes, .iov_len = n_bytes };
        struct msghdr message = { .msg_iov = &iov, .msg_iovlen = 1 };

        if (n_fds > 0) {
                message.msg_control = control.bytes;
                message.msg_controllen = CMSG_SPACE(sizeof(int) * n_fds);
                control.header = (struct cmsghdr){ .cmsg_len = CMSG_LEN(sizeof(int) * n_fds),
                                                   .cmsg_level = SOL_SOCKET,
                                                   .cmsg_type = SCM_RIGHTS };
                memcpy(CMSG_DATA(&control.header), fds, sizeof(int) * n_fds);
        }
        return sendmsg(socket, &message, flags | MSG_NOSIGNAL) < 0 ? -errno : 0;
}

/* A message of exactly n_bytes with at most one fd; *ret_fd is -1 or the caller's. 0, -ENODATA at the
 * end, -errno. */
static inline int fd_message_receive(int socket, void *bytes, size_t n_bytes, int *ret_fd)
{
        union {
                struct cmsghdr header;
                char bytes[CMSG_SPACE(sizeof(int))];
        } control = { .bytes = { 0 } };
        struct iovec iov = { .iov_base = bytes, .iov_len = n_bytes };
        struct msghdr message = { .msg_iov = &iov,
                                  .msg_iovlen = 1,
                                  .msg_control = control.bytes,
                                  .msg_controllen = sizeof(control.bytes) };
        struct cmsghdr *c;
        ssize_t n;

        do
                n = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
        while (n < 0 && errno == EINTR);
        *ret_fd = -1;
        if (n <= 0)
                return n < 0 ? -errno : -ENODATA;
        c = CMSG_FIRSTHDR(&message);
        if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS)
                memcpy(ret_fd, CMSG_DATA(c), sizeof(*ret_fd));
        return (size_t)n == n_bytes ? 0 : -EPROTO;
}

#endif
