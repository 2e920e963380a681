/* Another process that uses the GPU, and does one thing after another as told.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * It is this program again, started afresh (CUDA does not survive fork()), at
 * the other end of a socket. Requests are answered in order; an fd may travel
 * either way. The caller owns the fds that it gets. */
#ifndef BFC_TESTS_GPU_PEER_H
#define BFC_TESTS_GPU_PEER_H

#include <sys/types.h>

#include "tests/gpu/driver.h"

enum peer_op {
        PEER_START,      /* a: device; the primary context */
        PEER_ALLOC,      /* a: bytes → a: pointer */
        PEER_FREE,       /* a: pointer */
        PEER_GET_HANDLE, /* a: pointer → handle */
        PEER_OPEN,       /* handle → a: pointer */
        PEER_CLOSE,      /* a: pointer */
        PEER_FILL,       /* a: pointer, b: value, c: bytes */
        PEER_COUNT,      /* a: pointer, b: value, c: bytes → a: how many are not that value */
        PEER_CREATE,     /* a: bytes → a: handle; by cuMemCreate, mapped → b: pointer */
        PEER_EXPORT,     /* a: handle → fd */
        PEER_IMPORT,     /* fd, a: bytes → a: handle, b: pointer */
        PEER_UNMAP,      /* a: handle, b: pointer, c: bytes */
        PEER_N_FREE,     /* → a: bytes */
        PEER_SPIN,       /* a: pointer: starts a kernel that counts there for ever */
        PEER_FORK,       /* → a: the pid of a child that does nothing, for a minute at most */
        PEER_EXIT,
};

struct peer_message {
        enum peer_op op;
        CUresult result;
        uint64_t a, b, c;
        CUipcMemHandle handle;
};

struct peer {
        pid_t pid;
        int fd, pidfd;
};

enum { PEER_NEW_PID_NAMESPACE = 1, PEER_NEW_NET_NAMESPACE = 2 };

/* uid (uid_t)-1: the same. 0, or -errno: this process may not do that. */
int peer_start(uid_t uid, unsigned int flags, struct peer *ret);
/* Sends, waits, receives: m is both. fd: what to send, or -1; *ret_fd (may be
 * NULL): what came, or -1. The peer's death is CUDA_ERROR_UNKNOWN. */
CUresult peer_call(struct peer *p, struct peer_message *m, int fd, int *ret_fd);
void peer_kill(struct peer *p);
void peer_end(struct peer *p); /* asks it to exit, and waits */

/* The peer's main(), where argv[1] is "--peer". */
int peer_main(int argc, char *const argv[]);

/* kernel.c: PTX that every GPU since Volta takes. */
extern const char gpu_kernels_ptx[];

#endif
