/* Processes of one lease that take memory in all ways, each killed at a random moment.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "tests/preload/job.h"
#include "tests/random.h"

#define N_AT_ONCE   4u
#define N_ITEMS     8u
#define MAX_LIFE_US 60000u /* some die before they have a context */

/* ---- a life -------------------------------------------------------------------------- */

enum kind { NONE, BLOCK, FROM_POOL, SMALL, LARGE, ARRAY, GRAPH, FROM_SHARED, N_KINDS };

struct item {
        enum kind kind;
        CUdeviceptr at;
        CUmemGenericAllocationHandle handle;
        CUarray array;
        struct graph graph;
};

static CUresult take(struct item *item, uint64_t *random)
{
        const CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                           .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 } };
        const CUDA_ARRAY_DESCRIPTOR array = { .Width = 1024,
                                              .Height = 1 + random_next(random) % 4096,
                                              .Format = 0x20 /* float */,
                                              .NumChannels = 1 };
        size_t n_bytes = (size_t)(1 + random_next(random) % ((uint64_t)4096 << random_next(random) % 12));

        switch (item->kind) {
        case BLOCK:
                return cu.cuMemAlloc_v2(&item->at, n_bytes);
        case FROM_POOL:
                return cu.own_cuMemAllocAsync(&item->at, n_bytes, NULL);
        case SMALL:
                return cu.cuMemCreate(&item->handle, 2 * MIB * (1 + random_next(random) % 8), &prop, 0);
        case LARGE:
                return cu.cuMemCreate(&item->handle, 32 * MIB, &prop, 0);
        case ARRAY:
                return cu.own_cuArrayCreate_v2(&item->array, &array);
        case GRAPH:
                return graph_take(&item->graph, n_bytes);
        case FROM_SHARED:
                return cu.own_cuMemAllocFromPoolAsync(&item->at, n_bytes, shared_pool(), NULL);
        default:
                return CUDA_ERROR_INVALID_VALUE;
        }
}

static void give(struct item *item)
{
        switch (item->kind) {
        case BLOCK:
                OK(cu.cuMemFree_v2(item->at));
                break;
        case FROM_POOL:
        case FROM_SHARED:
                OK(cu.own_cuMemFreeAsync(item->at, NULL));
                break;
        case ARRAY:
                OK(cu.own_cuArrayDestroy(item->array));
                break;
        case GRAPH:
                graph_give(&item->graph);
                break;
        default:
                OK(cu.cuMemRelease(item->handle));
                break;
        }
        item->kind = NONE;
}

void take_until_killed(unsigned seed)
{
        struct item items[N_ITEMS] = { { .kind = NONE } };
        uint64_t random = seed;

        context_make();
        for (;;) {
                struct item *item = &items[random_next(&random) % N_ITEMS];
                CUresult result;

                if (item->kind != NONE) {
                        give(item);
                        continue;
                }
                item->kind = (enum kind)(1 + random_next(&random) % (N_KINDS - 1));
                result = take(item, &random);
                CHECK(result == CUDA_SUCCESS || result == CUDA_ERROR_OUT_OF_MEMORY);
                if (result != CUDA_SUCCESS)
                        item->kind = NONE;
        }
}

/* ---- lives --------------------------------------------------------------------------- */

static pid_t start(const char *program, const char *way, uint64_t seed)
{
        pid_t parent = getpid(), pid = fork();
        char text[32];

        CHECK(pid >= 0);
        if (pid > 0)
                return pid;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        snprintf(text, sizeof(text), "%u", (unsigned)(seed % 1000000));
        if (getppid() == parent)
                execl(program, program, way, "take-until-killed", text, NULL);
        _exit(98);
}

static void end(pid_t pid)
{
        int status;

        CHECK(kill(pid, SIGKILL) == 0);
        CHECK(waitpid(pid, &status, 0) == pid && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

/* Then all of the lease is free. */
void kill_processes(const char *program, const char *way, unsigned n, unsigned seed)
{
        pid_t pids[N_AT_ONCE] = { 0 };
        uint64_t random = seed;

        for (unsigned i = 0; i < n; i++) {
                pid_t *pid = &pids[random_next(&random) % N_AT_ONCE];

                if (*pid > 0)
                        end(*pid);
                *pid = start(program, way, random_next(&random));
                usleep((useconds_t)(random_next(&random) % (MAX_LIFE_US / N_AT_ONCE)));
        }
        for (unsigned i = 0; i < N_AT_ONCE; i++)
                if (pids[i] > 0)
                        end(pids[i]);
        context_make();
        while (free_bytes() < total_bytes())
                usleep(1000);
}
