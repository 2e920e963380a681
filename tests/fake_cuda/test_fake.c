/* The fake's own promises: capacity that is right whatever becomes of the
 * processes, the environment, and (test_faults.c) faults on demand.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Each case sets the environment before it loads the library, in a state folder
 * of its own; Check forks for each. What a driver does as well is asserted by
 * the conformance suite. */
#include "tests/fake_cuda/test_fake.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static char folder[64];

void fake_setup(void)
{
        snprintf(folder, sizeof(folder), "/dev/shm/fake-cuda-test-XXXXXX");
        ck_assert_ptr_nonnull(mkdtemp(folder));
        setenv("FAKE_CUDA_STATE", folder, 1);
        setenv("FAKE_CUDA_DEVICES", "64MiB,32MiB", 1);
}

void in_folder(const char *name, char ret[static 128])
{
        snprintf(ret, 128, "%s/%s", folder, name);
}

static int count_objects(void)
{
        DIR *d = opendir(folder);
        struct dirent *e;
        int n = 0;

        ck_assert_ptr_nonnull(d);
        while ((e = readdir(d)))
                n += strncmp(e->d_name, "mem-", 4) == 0;
        closedir(d);
        return n;
}

/* Nothing is left: no fd, and no file for what was given back. */
void fake_teardown(void)
{
        char path[128];

        ck_assert_int_eq(count_objects(), 0);
        in_folder("lock", path);
        unlink(path);
        in_folder("lost-0", path);
        unlink(path);
        in_folder("counts", path);
        unlink(path);
        ck_assert_int_eq(rmdir(folder), 0);
}

FIXTURE(fake, fake_setup, fake_teardown);

CUcontext start(void)
{
        CUcontext c = NULL;

        OK(gpu_start(0, &c));
        return c;
}

void stop(void)
{
        cu.cuCtxSetCurrent(NULL);
        OK(cu.cuDevicePrimaryCtxRelease_v2(0));
}

/* ---- capacity ------------------------------------------------------------ */

TEST(capacity_is_shared_by_processes)
{
        struct peer_message m = { .op = PEER_START };
        struct peer p;
        CUdeviceptr at;

        start();
        ck_assert_int_eq(peer_start((uid_t)-1, 0, &p), 0);
        OK(peer_call(&p, &m, -1, NULL));
        m = (struct peer_message){ .op = PEER_ALLOC, .a = 40 * MIB };
        OK(peer_call(&p, &m, -1, NULL));
        ck_assert_uint_eq(gpu_n_free(), 24 * MIB);
        IS(CUDA_ERROR_OUT_OF_MEMORY, cu.cuMemAlloc_v2(&at, 25 * MIB));
        peer_kill(&p);
        ck_assert_uint_eq(gpu_n_free(), 64 * MIB);
        OK(cu.cuMemAlloc_v2(&at, 64 * MIB));
        OK(cu.cuMemFree_v2(at));
        stop();
}

/* The fd of a killed process is queued in a socket that was not read. */
TEST(fd_in_a_socket_keeps_its_bytes)
{
        struct peer_message m = { .op = PEER_START };
        _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(int))] = { 0 };
        struct cmsghdr *c = (struct cmsghdr *)control;
        char byte = 0;
        struct iovec iov = { .iov_base = &byte, .iov_len = 1 };
        struct msghdr header = {
                .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control)
        };
        int fds[2], fd = -1;
        struct peer p;

        start();
        ck_assert_int_eq(peer_start((uid_t)-1, 0, &p), 0);
        OK(peer_call(&p, &m, -1, NULL));
        m = (struct peer_message){ .op = PEER_CREATE, .a = 16 * MIB };
        OK(peer_call(&p, &m, -1, NULL));
        m.op = PEER_EXPORT;
        OK(peer_call(&p, &m, -1, &fd));
        peer_kill(&p);
        ck_assert_int_eq(socketpair(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0, fds), 0);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(c), &fd, sizeof(fd));
        ck_assert_int_eq(sendmsg(fds[0], &header, 0), 1);
        close(fd);
        ck_assert_uint_eq(gpu_n_free(), 48 * MIB);
        close(fds[0]);
        close(fds[1]);
        ck_assert_uint_eq(gpu_n_free(), 64 * MIB);
        stop();
}

TEST(a_context_costs_memory)
{
        struct peer_message m = { .op = PEER_START };
        CUcontext c;
        struct peer p;

        setenv("FAKE_CUDA_CONTEXT_BYTES", "24MiB", 1);
        start();
        ck_assert_uint_eq(gpu_n_free(), 40 * MIB);
        ck_assert_int_eq(peer_start((uid_t)-1, 0, &p), 0);
        OK(peer_call(&p, &m, -1, NULL));
        ck_assert_uint_eq(gpu_n_free(), 16 * MIB);
        OK(cu.cuDevicePrimaryCtxRetain(&c, 1)); /* another device's memory */
        OK(cu.cuDevicePrimaryCtxRelease_v2(1));
        peer_kill(&p);
        ck_assert_uint_eq(gpu_n_free(), 40 * MIB);
        stop();
}

/* ---- the environment ----------------------------------------------------- */

TEST(visible_devices_are_a_choice_and_an_order)
{
        CUuuid uuid;
        size_t n_bytes;
        int n;

        setenv("CUDA_VISIBLE_DEVICES", "1,GPU-fa4ec0da-0000-4000-8000-000000000001,7,0", 1);
        start();
        OK(cu.cuDeviceGetCount(&n));
        ck_assert_int_eq(n, 2);
        OK(cu.cuDeviceTotalMem_v2(&n_bytes, 0));
        ck_assert_uint_eq(n_bytes, 32 * MIB);
        OK(cu.cuDeviceGetUuid_v2(&uuid, 0));
        ck_assert_int_eq(uuid.bytes[15], 2);
        OK(cu.cuDeviceGetUuid_v2(&uuid, 1));
        ck_assert_int_eq(uuid.bytes[15], 1);
        stop();
}

TEST(no_visible_device_is_no_device)
{
        CUcontext c;

        setenv("CUDA_VISIBLE_DEVICES", "", 1);
        IS(CUDA_ERROR_NO_DEVICE, gpu_start(0, &c));
}

TEST(attributes_and_functions_can_be_taken_away)
{
        CUmemGenericAllocationHandle handle;
        CUmemAllocationProp prop = gpu_prop(0);
        void *p = &p;

        setenv("FAKE_CUDA_ATTRIBUTES", "20=3,0/102=0", 1);
        setenv("FAKE_CUDA_MISSING", "cuMemSetAccess,cuMemMap", 1);
        start();
        ck_assert_int_eq(gpu_attribute(0, CU_DEVICE_ATTRIBUTE_COMPUTE_MODE),
                         CU_COMPUTEMODE_EXCLUSIVE_PROCESS);
        ck_assert_int_eq(gpu_attribute(1, CU_DEVICE_ATTRIBUTE_COMPUTE_MODE),
                         CU_COMPUTEMODE_EXCLUSIVE_PROCESS);
        ck_assert_int_eq(gpu_attribute(0, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED), 0);
        ck_assert_int_eq(gpu_attribute(1, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED), 1);
        IS(CUDA_ERROR_NOT_SUPPORTED, cu.cuMemCreate(&handle, 2 * MIB, &prop, 0));
        OK(cu.cuGetProcAddress_v2("cuMemMap", &p, 12000, 0, NULL));
        ck_assert_ptr_null(p);
        stop();
}

/* ---- what would be a crash elsewhere -------------------------------------- */

TEST(work_on_unmapped_memory_breaks_the_context)
{
        struct gpu_mapping mapping;
        CUstream s;

        setenv("FAKE_CUDA_STREAM_DELAY_US", "50000", 1);
        start();
        OK(gpu_create_and_map(0, 2 * MIB, &mapping));
        OK(cu.cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
        OK(cu.cuMemsetD8Async(mapping.at, 1, 2 * MIB, s));
        OK(gpu_unmap(&mapping));
        IS(CUDA_ERROR_ILLEGAL_ADDRESS, cu.cuStreamSynchronize(s));
        IS(CUDA_ERROR_ILLEGAL_ADDRESS, cu.cuStreamQuery(s));
        stop();
}

/* More than is known of drivers: a library that relaxes itself is safe with either. */
TEST(memory_calls_invalidate_a_capture)
{
        CUdeviceptr at = 0;
        CUgraph graph;
        CUstream s;

        start();
        OK(cu.cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
        OK(cu.cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_RELAXED));
        OK(cu.cuMemAddressReserve(&at, 2 * MIB, 0, 0, 0));
        OK(cu.cuStreamEndCapture(s, &graph));
        OK(cu.cuGraphDestroy(graph));
        OK(cu.cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_GLOBAL));
        IS(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cu.cuMemAddressFree(at, 2 * MIB));
        IS(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cu.cuStreamEndCapture(s, &graph));
        OK(cu.cuMemAddressFree(at, 2 * MIB));
        OK(cu.cuStreamDestroy_v2(s));
        stop();
}

/* Other drivers are reported to answer so. */
LOOP_TEST(destroyed_streams, 2)
{
        static const char *const answers[] = { "400", "709" };
        const CUresult expected[] = { CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_CONTEXT_IS_DESTROYED };
        CUstreamCaptureStatus status;
        CUstream s, next;

        setenv("FAKE_CUDA_DESTROYED_STREAM", answers[_i], 1);
        start();
        OK(cu.cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
        OK(cu.cuStreamDestroy_v2(s));
        IS(expected[_i], cu.cuStreamIsCapturing(s, &status));
        IS(expected[_i], cu.cuStreamQuery(s));
        OK(cu.cuCtxSynchronize());
        OK(cu.cuStreamCreate(&next, CU_STREAM_NON_BLOCKING));
        ck_assert_ptr_eq(next, s);
        OK(cu.cuStreamQuery(next));
        OK(cu.cuStreamDestroy_v2(next));
        stop();
}

/* As a real driver does, where settings say nothing else. In a child, before this process has a driver. */
TEST(a_destroyed_stream_ends_the_process)
{
        int end = 0;
        CUstream s;
        pid_t pid;

        pid = fork();
        if (pid == 0) {
                if (prctl(PR_SET_PDEATHSIG, SIGKILL) < 0 || getppid() == 1)
                        _exit(1);
                start();
                if (cu.cuStreamCreate(&s, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS &&
                    cu.cuStreamDestroy_v2(s) == CUDA_SUCCESS)
                        cu.cuStreamQuery(s);
                _exit(1);
        }
        ck_assert(waitpid(pid, &end, 0) == pid);
        ck_assert(WIFSIGNALED(end) && WTERMSIG(end) == SIGABRT);
}

TEST(host_access_follows_device_access)
{
        CUmemAllocationProp prop = gpu_prop(0);
        CUmemGenericAllocationHandle handle;
        CUdeviceptr at;
        int status;
        pid_t pid = fork();

        if (pid == 0) {
                signal(SIGSEGV, SIG_DFL); /* a sanitizer would report it */
                start();
                cu.cuMemCreate(&handle, 2 * MIB, &prop, 0);
                cu.cuMemAddressReserve(&at, 2 * MIB, 0, 0, 0);
                cu.cuMemMap(at, 2 * MIB, 0, handle, 0);
                *(volatile char *)(uintptr_t)at = 1;
                _exit(0);
        }
        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        ck_assert(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
        start();
        ck_assert_uint_eq(gpu_n_free(), 64 * MIB);
        stop();
}

static bool is_over; /* atomic */

static void *allocate_and_free(void *userdata)
{
        CUcontext c = userdata;
        CUdeviceptr at;

        OK(cu.cuCtxPushCurrent_v2(c));
        while (!__atomic_load_n(&is_over, __ATOMIC_RELAXED)) {
                OK(cu.cuMemAlloc_v2(&at, 2 * MIB));
                OK(cu.cuMemFree_v2(at));
        }
        OK(cu.cuCtxPopCurrent_v2(&c));
        return NULL;
}

/* What another thread does at the moment of a fork() does not stay with the child: neither the lock of the
 * machine's memory, for which all processes would wait, nor an fd of an allocation, which would stay charged. */
TEST(forked_child_inherits_nothing)
{
        pid_t pids[64], parent = getpid();
        pthread_t thread;

        ck_assert_int_eq(pthread_create(&thread, NULL, allocate_and_free, start()), 0);
        for (size_t i = 0; i < sizeof(pids) / sizeof(pids[0]); i++) {
                usleep((useconds_t)i * 10); /* any moment will do */
                pids[i] = fork();
                ck_assert_int_ge(pids[i], 0);
                if (pids[i] > 0)
                        continue;
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                while (getppid() == parent)
                        pause();
                _exit(0);
        }
        __atomic_store_n(&is_over, true, __ATOMIC_RELAXED);
        ck_assert_int_eq(pthread_join(thread, NULL), 0);
        for (unsigned i = 0; i < 60000 && gpu_n_free() < 64 * MIB; i++) /* a child may not have run yet */
                usleep(1000);
        ck_assert_uint_eq(gpu_n_free(), 64 * MIB);
        for (size_t i = 0; i < sizeof(pids) / sizeof(pids[0]); i++) {
                kill(pids[i], SIGKILL);
                ck_assert_int_eq(waitpid(pids[i], NULL, 0), pids[i]);
        }
        stop();
}

int main(int argc, char **argv)
{
        if (argc > 1 && strcmp(argv[1], "--peer") == 0)
                return peer_main(argc, argv);
        return suite_main("fake_cuda");
}
