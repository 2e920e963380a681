/* See lingering.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/integration/lingering.h"
#include "tests/fd_message.h"

#include <errno.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define BUFFER_BYTES 4096 /* as small as the kernel allows, so that many cost little */

static int tcp_socket(void)
{
        int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), n_bytes = BUFFER_BYTES;

        if (fd >= 0) {
                (void)setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &n_bytes, sizeof(n_bytes));
                (void)setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &n_bytes, sizeof(n_bytes));
        }
        return fd;
}

static int connect_pair(int listener, struct lingering *ret)
{
        struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
        socklen_t n = sizeof(address);

        if (bind(listener, (struct sockaddr *)&address, n) < 0 || listen(listener, 1) < 0 ||
            getsockname(listener, (struct sockaddr *)&address, &n) < 0 ||
            connect(ret->fd, (struct sockaddr *)&address, n) < 0)
                return -errno;
        ret->peer = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        return ret->peer < 0 ? -errno : 0;
}

int lingering_new(int linger_s, struct lingering *ret)
{
        const struct linger linger = { .l_onoff = 1, .l_linger = linger_s };
        static const char bytes[65536];
        struct lingering l = { .fd = tcp_socket(), .peer = -1 };
        int listener = tcp_socket(), r = -EMFILE;

        if (listener >= 0 && l.fd >= 0)
                r = connect_pair(listener, &l);
        if (listener >= 0)
                close(listener);
        if (r == 0 && setsockopt(l.fd, SOL_SOCKET, SO_LINGER, &linger, sizeof(linger)) < 0)
                r = -errno;
        if (r < 0) {
                lingering_free(&l);
                return r;
        }
        while (send(l.fd, bytes, sizeof(bytes), MSG_DONTWAIT | MSG_NOSIGNAL) > 0)
                ;
        *ret = l;
        return 0;
}

void lingering_close(struct lingering *l)
{
        if (l->fd >= 0)
                close(l->fd);
        l->fd = -1;
}

void lingering_free(struct lingering *l)
{
        const struct linger at_once = { .l_onoff = 1, .l_linger = 0 };

        if (l->fd >= 0)
                (void)setsockopt(l->fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
        lingering_close(l);
        if (l->peer >= 0)
                close(l->peer);
        l->peer = -1;
}

int fd_send(int socket, const void *bytes, size_t n_bytes, int fd, int flags)
{
        return fd_message_send(socket, bytes, n_bytes, &fd, 1, flags);
}
