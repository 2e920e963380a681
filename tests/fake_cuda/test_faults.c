/* The fake's own promises: the call that shall fail fails, and no other; what is
 * lost is lost; every call is counted. See fault.c for the rules.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/fake_cuda/test_fake.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

FIXTURE(faults, fake_setup, fake_teardown);

/* ---- faults -------------------------------------------------------------- */

TEST(the_nth_call_fails_and_no_other)
{
        CUdeviceptr p[3];

        setenv("FAKE_CUDA_FAULT", "cuMemAlloc:2,cuMemFree_v2:1:999", 1);
        start();
        OK(cu.cuMemAlloc_v2(&p[0], MIB));
        IS(CUDA_ERROR_OUT_OF_MEMORY, cu.cuMemAlloc_v2(&p[1], MIB));
        OK(cu.cuMemAlloc_v2(&p[2], MIB));
        IS(CUDA_ERROR_UNKNOWN, cu.cuMemFree_v2(p[0]));
        OK(cu.cuMemFree_v2(p[0]));
        OK(cu.cuMemFree_v2(p[2]));
        stop();
}

TEST(from_the_nth_call_on)
{
        size_t n;

        setenv("FAKE_CUDA_FAULT", "cuMemGetInfo:2+:800", 1);
        start();
        OK(cu.cuMemGetInfo_v2(&n, &n));
        IS(CUDA_ERROR_NOT_PERMITTED, cu.cuMemGetInfo_v2(&n, &n));
        IS(CUDA_ERROR_NOT_PERMITTED, cu.cuMemGetInfo_v2(&n, &n));
        stop();
}

TEST(a_sticky_error_breaks_the_context)
{
        CUdeviceptr p, q;

        setenv("FAKE_CUDA_FAULT", "cuMemAlloc:2:719!", 1);
        start();
        OK(cu.cuMemAlloc_v2(&p, MIB));
        IS(CUDA_ERROR_LAUNCH_FAILED, cu.cuMemAlloc_v2(&q, MIB));
        IS(CUDA_ERROR_LAUNCH_FAILED, cu.cuMemAlloc_v2(&q, MIB));
        IS(CUDA_ERROR_LAUNCH_FAILED, cu.cuCtxSynchronize());
        IS(CUDA_ERROR_LAUNCH_FAILED, cu.cuMemFree_v2(p));
        stop(); /* its end takes the memory along */
}

TEST(a_device_is_lost_after_some_calls)
{
        CUmemGenericAllocationHandle handle;
        CUmemAllocationProp prop = gpu_prop(0);
        CUcontext other;
        CUdeviceptr p;
        int n;

        setenv("FAKE_CUDA_FAULT", "lost:0:1000", 1);
        start();
        OK(cu.cuMemAlloc_v2(&p, MIB));
        for (int i = 0; i < 1000; i++)
                OK(cu.cuDeviceGetCount(&n));
        IS(CUDA_ERROR_ECC_UNCORRECTABLE, cu.cuMemAlloc_v2(&p, MIB));
        IS(CUDA_ERROR_ECC_UNCORRECTABLE, cu.cuMemCreate(&handle, 2 * MIB, &prop, 0));
        OK(cu.cuDevicePrimaryCtxRetain(&other, 1)); /* the other one works */
        OK(cu.cuCtxSetCurrent(other));
        OK(cu.cuMemAlloc_v2(&p, MIB));
        OK(cu.cuMemFree_v2(p));
        OK(cu.cuDevicePrimaryCtxRelease_v2(1));
        stop();
}

TEST(a_device_is_lost_to_all_processes)
{
        struct peer_message m = { .op = PEER_START };
        struct peer p;
        char path[128];
        CUdeviceptr at;
        FILE *f;

        start();
        ck_assert_int_eq(peer_start((uid_t)-1, 0, &p), 0);
        OK(peer_call(&p, &m, -1, NULL));
        OK(cu.cuMemAlloc_v2(&at, MIB));
        in_folder("lost-0", path);
        f = fopen(path, "w");
        ck_assert_ptr_nonnull(f);
        fputs("719\n", f);
        fclose(f);
        IS(CUDA_ERROR_LAUNCH_FAILED, cu.cuMemFree_v2(at));
        m = (struct peer_message){ .op = PEER_ALLOC, .a = MIB };
        IS(CUDA_ERROR_LAUNCH_FAILED, peer_call(&p, &m, -1, NULL));
        peer_end(&p);
        unlink(path);
        IS(CUDA_ERROR_LAUNCH_FAILED, cu.cuMemFree_v2(at)); /* what broke stays broken */
        stop();
        start();
        stop();
}

TEST(a_call_hangs_for_a_while)
{
        struct timespec before, after;
        CUdeviceptr p;

        setenv("FAKE_CUDA_FAULT", "hang:cuMemFree:1:300", 1);
        start();
        OK(cu.cuMemAlloc_v2(&p, MIB));
        clock_gettime(CLOCK_MONOTONIC, &before);
        OK(cu.cuMemFree_v2(p));
        clock_gettime(CLOCK_MONOTONIC, &after);
        ck_assert_int_ge((after.tv_sec - before.tv_sec) * 1000 + (after.tv_nsec - before.tv_nsec) / 1000000,
                         299);
        stop();
}

TEST(no_driver_at_all)
{
        CUcontext c;

        setenv("FAKE_CUDA_FAULT", "cuInit:*:34", 1);
        IS(CUDA_ERROR_STUB_LIBRARY, gpu_start(0, &c));
}

/* A misspelt fault must not pass for none. */
TEST(invalid_settings_are_reported)
{
        static const char *const wrong[] = {
                "cuMemAlok:1",  "cuMemAlloc", "cuMemAlloc:x", "hang:cuMemFree:1", "lost:7:1",
                "cuMemFree:1:", ":"
        };

        for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
                int status;
                pid_t pid = fork();

                if (pid == 0) {
                        const char *why;

                        setenv("FAKE_CUDA_FAULT", wrong[i], 1);
                        fclose(stderr);
                        if (gpu_load(&why) == 0)
                                cu.cuInit(0);
                        _exit(0);
                }
                ck_assert_int_eq(waitpid(pid, &status, 0), pid);
                ck_assert_msg(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT, "%s was taken", wrong[i]);
        }
}

/* ---- every call may fail: what a caller's test does with it ---------------- */

static unsigned int count_of(const char *path, const char *name)
{
        FILE *f = fopen(path, "r");
        char is[64];
        unsigned int n, found = 0;

        ck_assert_ptr_nonnull(f);
        while (fscanf(f, "%63s %u", is, &n) == 2)
                if (strcmp(is, name) == 0)
                        found = n;
        fclose(f);
        return found;
}

/* Undoes what it did, and stops at the first error. */
static int a_life(void)
{
        struct gpu_mapping mapping;
        CUdeviceptr p = 0;
        CUcontext c;
        int r = 0;

        if (gpu_start(0, &c) != CUDA_SUCCESS)
                return 1;
        if (cu.cuMemAlloc_v2(&p, MIB) != CUDA_SUCCESS || cu.cuMemsetD8_v2(p, 1, MIB) != CUDA_SUCCESS)
                r = 1;
        if (r == 0 && gpu_create_and_map(0, 2 * MIB, &mapping) == CUDA_SUCCESS)
                r = gpu_unmap(&mapping) != CUDA_SUCCESS;
        else
                r = 1;
        if (p && cu.cuMemFree_v2(p) != CUDA_SUCCESS)
                r = 1;
        return r;
}

static int life_with_fault(const char *fault)
{
        int status;
        pid_t pid = fork();

        if (pid == 0) {
                setenv("FAKE_CUDA_FAULT", fault, 1);
                _exit(a_life());
        }
        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        ck_assert_msg(WIFEXITED(status), "%s: crashed", fault);
        return WEXITSTATUS(status);
}

TEST(every_call_can_be_made_to_fail)
{
        unsigned int n_total, n_failed = 0;
        char path[128], fault[64];

        in_folder("counts", path);
        setenv("FAKE_CUDA_COUNTS", path, 1);
        ck_assert_int_eq(life_with_fault(""), 0);
        n_total = count_of(path, "total");
        ck_assert_uint_ge(n_total, 12);
        ck_assert_uint_eq(count_of(path, "cuMemAlloc_v2"), 1);
        ck_assert_uint_eq(count_of(path, "cuMemCreate"), 1);
        ck_assert_uint_eq(count_of(path, "cuMemcpyDtoD_v2"), 0);
        unsetenv("FAKE_CUDA_COUNTS");
        for (unsigned int i = 1; i <= n_total; i++) {
                snprintf(fault, sizeof(fault), "*:%u", i);
                n_failed += life_with_fault(fault) != 0;
        }
        ck_assert_uint_ge(n_failed, 12);
        /* The dead held something: the next one to ask finds it free. */
        start();
        ck_assert_uint_eq(gpu_n_free(), 64 * MIB);
        stop();
}

TEST(streams_with_a_priority_are_counted_and_can_fail)
{
        int least, greatest;
        CUstream stream;
        char path[128];

        in_folder("counts", path);
        setenv("FAKE_CUDA_COUNTS", path, 1);
        setenv("FAKE_CUDA_FAULT", "cuCtxGetStreamPriorityRange:2,cuStreamCreateWithPriority:2", 1);
        start();
        OK(cu.cuCtxGetStreamPriorityRange(&least, &greatest));
        IS(CUDA_ERROR_OUT_OF_MEMORY, cu.cuCtxGetStreamPriorityRange(&least, &greatest));
        OK(cu.cuStreamCreateWithPriority(&stream, 0, greatest));
        OK(cu.cuStreamDestroy_v2(stream));
        IS(CUDA_ERROR_OUT_OF_MEMORY, cu.cuStreamCreateWithPriority(&stream, 0, greatest));
        ck_assert_uint_eq(count_of(path, "cuCtxGetStreamPriorityRange"), 2);
        ck_assert_uint_eq(count_of(path, "cuStreamCreateWithPriority"), 2);
        ck_assert_uint_eq(count_of(path, "cuStreamCreate"), 0);
        stop();
        unsetenv("FAKE_CUDA_COUNTS");
}

TEST(counts_survive_a_kill)
{
        char path[128];
        pid_t pid;
        int n;

        in_folder("counts", path);
        setenv("FAKE_CUDA_COUNTS", path, 1);
        pid = fork();
        if (pid == 0) {
                start();
                for (int i = 0; i < 5; i++)
                        cu.cuDeviceGetCount(&n);
                raise(SIGKILL);
        }
        ck_assert_int_eq(waitpid(pid, &n, 0), pid);
        ck_assert_uint_eq(count_of(path, "cuDeviceGetCount"), 5);
}
