/* The process that connected, held by a pidfd: while that is open and the process lives, its pid is
 * nobody else's.
 *
 * From Linux 6.5 on the kernel gives the pidfd (SO_PEERPIDFD). Before, pidfd_open() takes the pid that SO_PEERCRED
 * tells, and the one that connected may be gone by then, its pid another's. So there the process has to
 * show itself: by bytes that were sent when the pidfd was open already (nothing was left to be read in
 * between), and whose sender has that pid by the kernel's word (SCM_CREDENTIALS). Then who speaks on
 * this socket lived, with this pid, beside the process of the pidfd, and two cannot have one pid.
 *
 * Whoever connects, says hello and waits for the answer shows it with its first request at the latest,
 * and need not know of it. Not thread-safe.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_PIN_H
#define BFCD_PIN_H

#include <stdbool.h>
#include <sys/types.h>

struct pin {
        pid_t pid;
        bool is_open;   /* it has yet to show itself: senders are looked at */
        bool was_empty; /* what is read now was sent after the pidfd was opened */
};

/* For a socket that was just accepted, of which the kernel says that `pid` connected. *ret_pidfd is the
 * caller's; -1: the process cannot be watched. -ESRCH: it is no more. -EMFILE, -ENFILE. */
int pin_new(struct pin *pin, int socket, pid_t pid, int *ret_pidfd);

/* Bytes were read while the pin is open. sender: by whose word the kernel sent them; 0: it does not say.
 * -EPERM: another process did. -ESRCH: the process has exited. */
int pin_heard(struct pin *pin, int socket, int pidfd, pid_t sender);

/* Senders are not looked at any more. Also where the pin is not open. */
void pin_end(struct pin *pin, int socket);

#endif
