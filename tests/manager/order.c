/* See order.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/manager/order.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>

int order_send(int socket, const void *bytes, size_t n_bytes, int fd)
{
        union {
                struct cmsghdr header;
                char bytes[CMSG_SPACE(sizeof(int))];
        } control = { 0 };
        struct iovec iov = { .iov_base = (void *)(uintptr_t)bytes, .iov_len = n_bytes };
        struct msghdr message = { .msg_iov = &iov, .msg_iovlen = 1 };

        if (fd >= 0) {
                message.msg_control = control.bytes;
                message.msg_controllen = sizeof(control.bytes);
                control.header.cmsg_level = SOL_SOCKET;
                control.header.cmsg_type = SCM_RIGHTS;
                control.header.cmsg_len = CMSG_LEN(sizeof(int));
                memcpy(CMSG_DATA(&control.header), &fd, sizeof(fd));
        }
        return sendmsg(socket, &message, MSG_NOSIGNAL) < 0 ? -errno : 0;
}

int order_receive(int socket, void *bytes, size_t n_bytes, int *ret_fd)
{
        union {
                struct cmsghdr header;
                char bytes[CMSG_SPACE(sizeof(int))];
        } control = { 0 };
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
        if (n <= 0)
                return n < 0 ? -errno : -ENODATA;
        *ret_fd = -1;
        c = CMSG_FIRSTHDR(&message);
        if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS)
                memcpy(ret_fd, CMSG_DATA(c), sizeof(*ret_fd));
        return (size_t)n == n_bytes ? 0 : -EPROTO;
}
