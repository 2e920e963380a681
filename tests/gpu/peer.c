/* See peer.h: the caller's end, and the peer's own.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/peer.h"
#include "tests/fd_message.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- the caller's end ---------------------------------------------------- */

static void exec_peer(int fd)
{
        char number[16], path[4096];
        ssize_t n = readlink("/proc/self/exe", path, sizeof(path) - 1); /* valgrind knows what it is */

        path[n > 0 ? n : 0] = '\0';
        snprintf(number, sizeof(number), "%d", fd);
        fcntl(fd, F_SETFD, 0);
        execl(path, path, "--peer", number, (char *)NULL);
        _exit(126);
}

/* A PID namespace begins with the next child; the one between waits for it, and
 * dies with it. */
static void enter_pid_namespace(void)
{
        pid_t pid;
        int status;

        if (unshare(CLONE_NEWPID) < 0)
                _exit(125);
        pid = fork();
        if (pid == 0) {
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                return;
        }
        if (pid > 0)
                waitpid(pid, &status, 0);
        _exit(0);
}

int peer_start(uid_t uid, unsigned int flags, struct peer *ret)
{
        int fds[2];
        pid_t pid;

        if ((uid != (uid_t)-1 || flags != 0) && geteuid() != 0)
                return -EPERM;
        if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) < 0)
                return -errno;
        pid = fork();
        if (pid < 0) {
                close(fds[0]);
                close(fds[1]);
                return -EAGAIN;
        }
        if (pid == 0) {
                if ((flags & PEER_NEW_NET_NAMESPACE) && unshare(CLONE_NEWNET) < 0)
                        _exit(125);
                if (flags & PEER_NEW_PID_NAMESPACE)
                        enter_pid_namespace();
                if (uid != (uid_t)-1 && (setresgid(uid, uid, uid) < 0 || setresuid(uid, uid, uid) < 0))
                        _exit(125);
                exec_peer(fds[1]);
        }
        close(fds[1]);
        *ret = (struct peer){ .pid = pid, .fd = fds[0], .pidfd = (int)syscall(SYS_pidfd_open, pid, 0) };
        return 0;
}

CUresult peer_call(struct peer *p, struct peer_message *m, int fd, int *ret_fd)
{
        int got = -1;

        if (fd_message_send(p->fd, m, sizeof(*m), &fd, fd >= 0, 0) < 0 ||
            fd_message_receive(p->fd, m, sizeof(*m), &got) < 0)
                m->result = CUDA_ERROR_UNKNOWN;
        if (ret_fd)
                *ret_fd = got;
        else if (got >= 0)
                close(got);
        return m->result;
}

static void reap(struct peer *p)
{
        int status;

        waitpid(p->pid, &status, 0);
        close(p->fd);
        if (p->pidfd >= 0)
                close(p->pidfd);
        *p = (struct peer){ .pid = -1, .fd = -1, .pidfd = -1 };
}

void peer_kill(struct peer *p)
{
        kill(p->pid, SIGKILL);
        reap(p);
}

void peer_end(struct peer *p)
{
        struct peer_message m = { .op = PEER_EXIT };

        peer_call(p, &m, -1, NULL);
        reap(p);
}

/* ---- the peer's own end -------------------------------------------------- */

static CUdevice device;
static int connection = -1;

static CUresult do_map(CUmemGenericAllocationHandle handle, size_t n_bytes, struct peer_message *m)
{
        struct gpu_mapping mapping;
        CUresult r = gpu_map(device, handle, n_bytes, &mapping);

        if (r != CUDA_SUCCESS) {
                cu.cuMemRelease(handle);
                return r;
        }
        m->a = mapping.handle;
        m->b = mapping.at;
        return CUDA_SUCCESS;
}

static CUresult do_create(struct peer_message *m)
{
        CUmemAllocationProp prop = gpu_prop(device);
        CUmemGenericAllocationHandle handle;
        CUresult r = cu.cuMemCreate(&handle, m->a, &prop, 0);

        return r == CUDA_SUCCESS ? do_map(handle, m->a, m) : r;
}

static CUresult do_import(struct peer_message *m, int fd)
{
        CUmemGenericAllocationHandle handle;
        CUresult r = cu.cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)fd,
                                                       CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);

        return r == CUDA_SUCCESS ? do_map(handle, m->a, m) : r;
}

static CUresult do_export(const struct peer_message *m, int *ret_fd)
{
        int fd = -1;
        CUresult r = cu.cuMemExportToShareableHandle(&fd, m->a, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);

        if (r == CUDA_SUCCESS)
                *ret_fd = fd;
        return r;
}

static CUresult do_spin(const struct peer_message *m)
{
        CUdeviceptr at = m->a;
        void *parameters[] = { &at };
        CUfunction function;
        CUstream stream;
        CUmodule module;
        CUresult r;

        if (!cu.cuModuleLoadData || !cu.cuLaunchKernel)
                return CUDA_ERROR_NOT_SUPPORTED;
        r = cu.cuModuleLoadData(&module, gpu_kernels_ptx);
        if (r == CUDA_SUCCESS)
                r = cu.cuModuleGetFunction(&function, module, "spin");
        if (r == CUDA_SUCCESS)
                r = cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
        if (r == CUDA_SUCCESS)
                r = cu.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL);
        return r;
}

/* Holds what a fork() inherits, and not the socket, so that no process waits for it. */
static CUresult do_fork(struct peer_message *m)
{
        pid_t pid = fork();

        if (pid == 0) {
                close(connection);
                sleep(60);
                _exit(0);
        }
        m->a = (uint64_t)pid;
        return pid > 0 ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

static CUresult do_request(struct peer_message *m, int fd, int *ret_fd)
{
        struct gpu_mapping mapping = { .handle = m->a, .at = m->b, .n_bytes = m->c };
        CUcontext context;
        CUdeviceptr p = 0;
        CUresult r;

        switch (m->op) {
        case PEER_START:
                device = (CUdevice)m->a;
                return gpu_start((int)m->a, &context);
        case PEER_ALLOC:
                r = cu.cuMemAlloc_v2(&p, m->a);
                m->a = p;
                return r;
        case PEER_FREE:
                return cu.cuMemFree_v2(m->a);
        case PEER_GET_HANDLE:
                return cu.cuIpcGetMemHandle(&m->handle, m->a);
        case PEER_OPEN:
                r = cu.cuIpcOpenMemHandle_v2(&p, m->handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
                m->a = p;
                return r;
        case PEER_CLOSE:
                return cu.cuIpcCloseMemHandle(m->a);
        case PEER_FILL:
                r = cu.cuMemsetD8_v2(m->a, (unsigned char)m->b, m->c);
                return r == CUDA_SUCCESS ? cu.cuCtxSynchronize() : r;
        case PEER_COUNT:
                m->a = gpu_count_other(m->a, (unsigned char)m->b, m->c);
                return CUDA_SUCCESS;
        case PEER_CREATE:
                return do_create(m);
        case PEER_EXPORT:
                return do_export(m, ret_fd);
        case PEER_IMPORT:
                return do_import(m, fd);
        case PEER_UNMAP:
                return gpu_unmap(&mapping);
        case PEER_N_FREE:
                m->a = gpu_n_free();
                return CUDA_SUCCESS;
        case PEER_SPIN:
                return do_spin(m);
        case PEER_FORK:
                return do_fork(m);
        case PEER_EXIT:
                break;
        }
        return CUDA_SUCCESS;
}

int peer_main(int argc, char *const argv[])
{
        int to = connection = argc > 2 ? atoi(argv[2]) : -1;
        struct peer_message m;
        int fd, answer_fd;

        prctl(PR_SET_PDEATHSIG, SIGKILL);
        while (fd_message_receive(to, &m, sizeof(m), &fd) == 0) {
                bool is_last = m.op == PEER_EXIT;

                answer_fd = -1;
                m.result = do_request(&m, fd, &answer_fd);
                if (fd_message_send(to, &m, sizeof(m), &answer_fd, answer_fd >= 0, 0) < 0)
                        return 1;
                if (answer_fd >= 0)
                        close(answer_fd);
                if (fd >= 0)
                        close(fd);
                if (is_last)
                        break;
        }
        return 0;
}
