/* The helper process that returns the pages of host extents: it punches a hole over each memfd
 * that it is sent.
 *
 * A client can hold the lock of an extent's inode for as long as it likes, and a thread that
 * waits for that lock keeps its process from exiting. So the daemon never punches an extent that
 * a client was given. It sends the fd to this process, which punches in a child of its own for
 * each lane. A lane is a number that the caller chooses; requests of one lane are done in order,
 * and a lane whose punch is blocked delays no other lane.
 *
 * The helper is not waited for. It ends by itself when the daemon has closed its end and all that
 * was sent is done. If it is killed, the caller starts another and sends again what was not
 * answered: to punch twice is harmless.
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
        uint64_t tag; /* comes back with the answer; the caller uses none twice */
        uint64_t n_bytes;
        uint32_t lane;
        uint32_t pad;
};

struct host_punch_answer {
        uint64_t tag;
        int32_t result; /* 0; -EAGAIN: the helper had no room, send it again later; -errno of fallocate() */
        uint32_t pad;
};

/* Forks the helper. Best called before there are other threads; beside threads it works, too,
 * since the helper calls no function that needs a lock of this process. -errno. */
int host_punch_start(struct host_punch *ret);

/* Closes this end. The helper finishes what it was sent, and ends. */
void host_punch_leave(struct host_punch *h);

/* Neither waits. fd stays the caller's. -EAGAIN: later; another error: the helper is no more. */
int host_punch_send(const struct host_punch *h, const struct host_punch_request *request, int fd);
int host_punch_receive(const struct host_punch *h, struct host_punch_answer *ret);

/* What the helper does, on its end of the socket pair: returns when the other end is closed and
 * all is done. It waits for every child of the process. */
void host_punch_serve(int fd);

/* Punches a hole over the whole of it, in this process. Waits for the lock of the inode. */
int host_punch_whole(int fd, uint64_t n_bytes);

/* fallocate() in steps, because a signal undoes what one call has done so far. */
int host_fallocate_whole(int fd, int mode, uint64_t n_bytes);

#endif
