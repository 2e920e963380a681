/* The guard of a socket that an untrusted process writes to: keeps the loop from closing file
 * descriptors that come with SCM_RIGHTS.
 *
 * Since Linux 6.16 the kernel refuses them: with SO_PASSRIGHTS off, the sender's sendmsg() fails
 * with EPERM. An accepted socket inherits this from the listening one, as it was when the client
 * connected. If the option was always off, the guard has nothing to do: it is shut.
 *
 * Otherwise the guard is open: file descriptors may wait in the queue. Then each read looks first
 * (MSG_PEEK): the kernel says that there are some, and neither installs nor closes them. Such a
 * message is never taken from the queue. A socket whose queue may hold one is closed by the closer.
 *
 * A socket with more unread input than one fd_guard_drop() drops is also closed by the closer: a close takes as long as there
 * are buffers in the queue, and their number is the sender's choice. But where as many sockets wait as there are threads,
 * the loop closes it, so that accepting does not pause.
 *
 * Not thread-safe.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_FD_GUARD_H
#define BFCD_FD_GUARD_H

#include <stdbool.h>
#include <stddef.h>

#define FD_GUARD_LOOK_BYTES 128u /* looked at, and read, at once */
#define FD_GUARD_FEW_BYTES  64u  /* closed at once, though each may be in a buffer of its own */

struct fd_guard {
        bool is_open; /* the queue may hold file descriptors */
        bool refuses; /* no further ones can come */
};

/* Switches SCM_RIGHTS off; of a listening socket, for connections from now on. False: the kernel does not know SO_PASSRIGHTS. */
bool fd_guard_refuse(int fd);

/* For a socket that was just accepted. */
void fd_guard_init(struct fd_guard *g, int fd);

/* For one end of a pair of which no other process has the other yet. */
void fd_guard_init_pair(struct fd_guard *g, int fd);

/* Before each read. 0: at most *n_bytes, which is reduced, may be read without a control buffer
 * for SCM_RIGHTS. -EPROTO: file descriptors come with them; the socket must not be read any more.
 * FRAME_AGAIN: the queue is empty; -errno. has_sender: SO_PASSCRED is set on the socket. */
int fd_guard_look(struct fd_guard *g, int fd, bool has_sender, size_t *n_bytes);

/* Before fd_guard_close(), which takes as long as there are buffers in the queue, and their number is the sender's choice:
 * shuts the socket down and drops some bytes, for about 10 us. False: few are left, or there may be file descriptors
 * among them, so that the closer closes the socket. */
bool fd_guard_drop(const struct fd_guard *g, int fd);

/* Closes the socket. The peer sees the end at once, also where the close takes long. */
void fd_guard_close(const struct fd_guard *g, int fd);

#endif
