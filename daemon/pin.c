/* Pins; see pin.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/pin.h"

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

/* Who sends is told from now on, and of what waits since before the accept. */
static int pin_by_pid(struct pin *pin, int socket, int *ret_pidfd)
{
        int yes = 1, pidfd;

        if (pin->pid <= 0) /* of a PID namespace that this one does not see */
                return 0;
        pidfd = (int)syscall(SYS_pidfd_open, pin->pid, 0);
        if (pidfd < 0)
                return errno == ESRCH || errno == EMFILE || errno == ENFILE ? -errno : 0;
        pin->is_open = setsockopt(socket, SOL_SOCKET, SO_PASSCRED, &yes, sizeof(yes)) == 0;
        pin->was_empty = socket_is_empty(socket);
        *ret_pidfd = pidfd;
        return 0;
}

int pin_new(struct pin *pin, int socket, pid_t pid, int *ret_pidfd)
{
        socklen_t n = sizeof(*ret_pidfd);

        *pin = (struct pin){ .pid = pid };
        if (getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, ret_pidfd, &n) == 0)
                return 0;
        *ret_pidfd = -1;
        if (errno == ENOPROTOOPT)
                return pin_by_pid(pin, socket, ret_pidfd);
        if (errno == EMFILE || errno == ENFILE)
                return -errno;
        return errno == EINVAL || errno == ESRCH ? -ESRCH : 0; /* before Linux 6.16: it was waited for */
}

void pin_end(struct pin *pin, int socket)
{
        int no = 0;

        if (pin->is_open)
                (void)setsockopt(socket, SOL_SOCKET, SO_PASSCRED, &no, sizeof(no));
        pin->is_open = false;
}

int pin_heard(struct pin *pin, int socket, int pidfd, pid_t sender)
{
        if (sender != 0 && sender != pin->pid)
                return -EPERM;
        if (sender == 0 || !pin->was_empty) { /* sent between the accept and our asking, or before */
                pin->was_empty = socket_is_empty(socket);
                return 0;
        }
        if (has_exited(pidfd))
                return -ESRCH;
        pin_end(pin, socket);
        return 0;
}
