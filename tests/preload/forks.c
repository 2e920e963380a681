/* Forks while another thread has a lock of the proxy.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <pthread.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "tests/preload/job.h"

static enum { GOES_ON, SHALL_WAIT, WAITS } random_state; /* atomic; of getrandom() */
static int may_end;                                      /* atomic */

/* The proxy calls it with the lock of ipc.c. */
ssize_t getrandom(void *buffer, size_t n_bytes, unsigned int flags)
{
        if (__atomic_load_n(&random_state, __ATOMIC_ACQUIRE) == SHALL_WAIT) {
                __atomic_store_n(&random_state, WAITS, __ATOMIC_RELEASE);
                while (__atomic_load_n(&random_state, __ATOMIC_ACQUIRE) == WAITS)
                        usleep(200);
        }
        return syscall(SYS_getrandom, buffer, n_bytes, flags);
}

static void *share_block(void *block)
{
        CUipcMemHandle handle;

        OK(cu.cuIpcGetMemHandle(&handle, *(CUdeviceptr *)block));
        return NULL;
}

/* The lock of outside.c is held across the call of the driver. */
static void *release_handles(void *unused)
{
        const CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                           .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 },
                                           .allocFlags.usage = IS_TILE_POOL };
        CUmemGenericAllocationHandle handle;

        while (!__atomic_load_n(&may_end, __ATOMIC_ACQUIRE)) {
                OK(cu.cuMemCreate(&handle, 2 * MIB, &prop, 0));
                OK(cu.cuMemRelease(handle));
        }
        return unused;
}

/* A child that waits for a lock is killed by its alarm. */
static void fork_child(CUmemGenericAllocationHandle handle)
{
        pid_t pid = fork();
        int status;

        CHECK(pid >= 0);
        if (pid == 0) {
                alarm(60);
                GIVES(CUDA_ERROR_NOT_INITIALIZED, cu.cuIpcCloseMemHandle(4096));
                GIVES(CUDA_ERROR_NOT_INITIALIZED, cu.cuMemMap(4096, 8 * MIB, 0, handle, 0));
                GIVES(CUDA_ERROR_NOT_INITIALIZED, cu.cuMemRelease(handle));
                GIVES(CUDA_ERROR_NOT_INITIALIZED, cu.cuMemUnmap(4096, 4096));
                _exit(0);
        }
        CHECK(waitpid(pid, &status, 0) == pid && status == 0);
}

void fork_beside_threads(void)
{
        const CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                           .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 } };
        CUmemGenericAllocationHandle handle;
        CUdeviceptr block;
        pthread_t thread;

        context_make();
        OK(cu.cuMemCreate(&handle, 8 * MIB, &prop, 0));
        OK(cu.cuMemAlloc_v2(&block, 4 * MIB));
        __atomic_store_n(&random_state, SHALL_WAIT, __ATOMIC_RELEASE);
        CHECK(pthread_create(&thread, NULL, share_block, &block) == 0);
        while (__atomic_load_n(&random_state, __ATOMIC_ACQUIRE) != WAITS)
                usleep(200);
        fork_child(handle);
        __atomic_store_n(&random_state, GOES_ON, __ATOMIC_RELEASE);
        CHECK(pthread_join(thread, NULL) == 0);

        CHECK(pthread_create(&thread, NULL, release_handles, NULL) == 0);
        for (size_t i = 0; i < 20; i++)
                fork_child(handle);
        __atomic_store_n(&may_end, 1, __ATOMIC_RELEASE);
        CHECK(pthread_join(thread, NULL) == 0);
        OK(cu.cuMemRelease(handle));
        OK(cu.cuMemFree_v2(block));
        CHECK(free_bytes() == 32 * MIB);
}
