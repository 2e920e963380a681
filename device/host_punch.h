/* The helper process that returns the pages of host extents: it punches a hole over each memfd that it
 * receives.
 *
 * A client can hold the lock of an extent's inode indefinitely, and a thread that waits for that lock
 * prevents its process from exiting. So the daemon never punches an extent that a client has received. It
 * sends the fd to this process, which punches in a child per lane. A lane is a number that the caller
 * chooses; requests of one lane run in order, and a lane whose punch is blocked delays no other lane.
 *
 * The daemon does not wait for the helper. It ends when the daemon has closed its end and all requests
 * are done. If it is killed, the caller starts another one and sends unanswered requests again, because a
 * repeated punch is harmless.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_DEVICE_HOST_PUNCH_H
#define BFC_DEVICE_HOST_PUNCH_H

#include <stdint.h>
#include <sys/types.h>

struct host_punch {
        pid_t pid;
        int pidfd; /* readable when the helper has ended */
        int fd;    /* the daemon's end of the socket pair; SOCK_SEQPACKET */
};
#define HOST_PUNCH_NONE ((struct host_punch){ .pid = -1, .pidfd = -1, .fd = -1 })

struct host_punch_request {
        uint64_t tag; /* returned in the answer; the caller uses each value once */
        uint64_t n_bytes;
        uint32_t lane;
        uint32_t pad;
};

struct host_punch_answer {
        uint64_t tag;
        int32_t result; /* 0; -EAGAIN: the helper had no room, send again later; -errno of fallocate() */
        uint32_t pad;
};

/* Forks the helper. Preferably called before there are other threads. It also works beside threads,
 * because the helper calls no function that needs a lock of this process. -errno. */
int host_punch_start(struct host_punch *ret);

/* Closes this end. The helper finishes its requests and ends. */
void host_punch_leave(struct host_punch *h);

/* Neither waits. The caller keeps fd. -EAGAIN: later; another error: the helper has ended. */
int host_punch_send(const struct host_punch *h, const struct host_punch_request *request, int fd);
int host_punch_receive(const struct host_punch *h, struct host_punch_answer *ret);

/* The helper's main function, on its end of the socket pair. Returns when the other end is closed and all
 * requests are done. Waits for every child of the process. */
void host_punch_serve(int fd);

/* Punches a hole over the whole file, in this process. Waits for the lock of the inode. */
int host_punch_whole(int fd, uint64_t n_bytes);

/* fallocate() in steps, because a signal undoes the progress of one call. */
int host_fallocate_whole(int fd, int mode, uint64_t n_bytes);

#endif
