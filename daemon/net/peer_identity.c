/* The peer identity check; see peer_identity.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/net/peer_identity.h"

#include <errno.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <linux/sockios.h>

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77 /* Linux 6.5 */
#endif

static bool socket_is_empty(int socket)
{
        int n_bytes = 0;

        return ioctl(socket, SIOCINQ, &n_bytes) == 0 && n_bytes == 0;
}

static bool has_exited(int pidfd)
{
        struct pollfd p = { .fd = pidfd, .events = POLLIN };

        return poll(&p, 1, 0) == 1;
}

/* From now on the kernel reports senders, also of bytes that were sent before the accept. */
static int identify_by_pid(struct peer_identity *identity, int socket, int *ret_pidfd)
{
        int yes = 1, pidfd;

        if (identity->pid <= 0) /* of a PID namespace that is not visible here */
                return 0;
        pidfd = (int)syscall(SYS_pidfd_open, identity->pid, 0);
        if (pidfd < 0)
                return errno == ESRCH || errno == EMFILE || errno == ENFILE ? -errno : 0;
        identity->is_open = setsockopt(socket, SOL_SOCKET, SO_PASSCRED, &yes, sizeof(yes)) == 0;
        identity->was_empty = socket_is_empty(socket);
        *ret_pidfd = pidfd;
        return 0;
}

int peer_identity_new(struct peer_identity *identity, int socket, pid_t pid, int *ret_pidfd)
{
        socklen_t n = sizeof(*ret_pidfd);

        *identity = (struct peer_identity){ .pid = pid };
        if (getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, ret_pidfd, &n) == 0)
                return 0;
        *ret_pidfd = -1;
        if (errno == ENOPROTOOPT)
                return identify_by_pid(identity, socket, ret_pidfd);
        if (errno == EMFILE || errno == ENFILE)
                return -errno;
        return errno == EINVAL || errno == ESRCH ? -ESRCH : 0; /* EINVAL: it was reaped, before Linux 6.16 */
}

void peer_identity_end(struct peer_identity *identity, int socket)
{
        int no = 0;

        if (identity->is_open)
                (void)setsockopt(socket, SOL_SOCKET, SO_PASSCRED, &no, sizeof(no));
        identity->is_open = false;
}

int peer_identity_verify_sender(struct peer_identity *identity, int socket, int pidfd, pid_t sender)
{
        if (sender != 0 && sender != identity->pid)
                return -EPERM;
        if (sender == 0 || !identity->was_empty) { /* sent before the kernel was asked for senders */
                identity->was_empty = socket_is_empty(socket);
                return 0;
        }
        if (has_exited(pidfd))
                return -ESRCH;
        peer_identity_end(identity, socket);
        return 0;
}
