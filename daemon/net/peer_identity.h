/* The peer identity check: which process connected, as a pidfd. While the pidfd is open and the process
 * is alive, no other process can have its pid.
 *
 * From Linux 6.5 on the kernel gives the pidfd (SO_PEERPIDFD). Before, pidfd_open() takes the pid of
 * SO_PEERCRED, which may belong to another process if the peer has exited. So on older kernels the
 * process must prove its identity by bytes that it sent after the pidfd was opened: the queue was empty
 * in between, and the kernel reports their sender's pid (SCM_CREDENTIALS). The sender was alive together
 * with the process of the pidfd and had the same pid, and two processes cannot share a pid.
 *
 * A client that waits for the reply to its hello proves its identity by its first request, and need not
 * know that. Not thread-safe.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_PEER_IDENTITY_H
#define BFCD_PEER_IDENTITY_H

#include <stdbool.h>
#include <sys/types.h>

struct peer_identity {
        pid_t pid;
        bool is_open;   /* not proven yet: senders are checked */
        bool was_empty; /* bytes that are read now were sent after the pidfd was opened */
};

/* For a socket that was just accepted; pid: of SO_PEERCRED. *ret_pidfd is the caller's; -1: the process cannot
 * be watched. -ESRCH: it has exited. -EMFILE, -ENFILE. */
int peer_identity_new(struct peer_identity *identity, int socket, pid_t pid, int *ret_pidfd);

/* Bytes were read while the check is open. sender: their sender's pid; 0: the kernel does not report it.
 * -EPERM: another process sent them. -ESRCH: the process has exited. */
int peer_identity_verify_sender(struct peer_identity *identity, int socket, int pidfd, pid_t sender);

/* Ends the check, if it is open. */
void peer_identity_end(struct peer_identity *identity, int socket);

#endif
