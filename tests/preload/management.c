/* A program that asks NVML how much memory its GPUs have.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/preload/job.h"

#include <dlfcn.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>

#define LIBRARY_NOT_FOUND  12
#define FUNCTION_NOT_FOUND 13

struct memory {
        unsigned long long n_total, n_free, n_used;
};

struct memory_v2 {
        unsigned int version;
        unsigned long long n_total, n_reserved, n_free, n_used;
};

static struct {
        int (*init)(void), (*count)(unsigned int *), (*device)(unsigned int, void **),
                (*temperature)(void *, int, int *);
        int (*memory)(void *, struct memory *), (*memory_v2)(void *, struct memory_v2 *);
        const char *(*text)(int);
} nvml;

static void find_functions(void)
{
        void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);

        CHECK(library);
        *(void **)&nvml.init = dlsym(library, "nvmlInit_v2");
        *(void **)&nvml.count = dlsym(library, "nvmlDeviceGetCount_v2");
        *(void **)&nvml.device = dlsym(library, "nvmlDeviceGetHandleByIndex_v2");
        *(void **)&nvml.temperature = dlsym(library, "nvmlDeviceGetTemperature");
        *(void **)&nvml.memory = dlsym(library, "nvmlDeviceGetMemoryInfo");
        *(void **)&nvml.memory_v2 = dlsym(library, "nvmlDeviceGetMemoryInfo_v2");
        *(void **)&nvml.text = dlsym(library, "nvmlErrorString");
        CHECK(nvml.init && nvml.count && nvml.device && nvml.temperature && nvml.memory && nvml.memory_v2 &&
              nvml.text);
}

/* Both functions say the same. */
static struct memory memory_of(unsigned int index)
{
        struct memory_v2 second = { .version = 2u << 24 | sizeof(second) };
        struct memory first;
        void *device;

        CHECK(nvml.device(index, &device) == 0);
        CHECK(nvml.memory(device, &first) == 0);
        CHECK(nvml.memory_v2(device, &second) == 0 && second.version == (2u << 24 | sizeof(second)));
        CHECK(second.n_total == first.n_total && second.n_free == first.n_free);
        CHECK(second.n_used + second.n_reserved == first.n_used);
        CHECK(first.n_used + first.n_free == first.n_total);
        return first;
}

/* CUDA begins in the child, so nothing may have initialised it in the parent. */
static void be_child(int to_parent)
{
        CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                     .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 } };
        CUmemGenericAllocationHandle handle;
        CUdeviceptr p;

        CHECK(memory_of(0).n_used == 0);
        context_make();
        OK(cu.cuMemCreate(&handle, 2 * MIB, &prop, 0));
        CHECK(memory_of(0).n_free == free_bytes() && memory_of(0).n_used >= 2 * MIB);
        OK(cu.cuMemAlloc_v2(&p, 8 * MIB));
        CHECK(memory_of(0).n_free == free_bytes() && memory_of(0).n_used >= 10 * MIB);
        OK(cu.cuMemRelease(handle));
        CHECK(write(to_parent, "", 1) == 1);
        pause();
}

/* GPU 0 has a quota, the second one has none. */
void ask_nvml(void)
{
        int fds[2], temperature, status;
        void *device;
        unsigned int n;
        char byte;
        pid_t pid;

        find_functions();
        CHECK(nvml.init() == 0 && nvml.count(&n) == 0 && n == 2);
        CHECK(memory_of(0).n_total == 32 * MIB && memory_of(0).n_free == 32 * MIB);
        CHECK(memory_of(1).n_total == 80ull << 30 && memory_of(1).n_used == (500ull << 20) + 12345);
        CHECK(nvml.device(0, &device) == 0);
        CHECK(nvml.temperature(device, 0, &temperature) == FUNCTION_NOT_FOUND);
        CHECK(strcmp(nvml.text(0), "Success") == 0);
        CHECK(pipe(fds) == 0);
        pid = fork();
        CHECK(pid >= 0);
        if (pid == 0)
                be_child(fds[1]);
        close(fds[1]);
        CHECK(read(fds[0], &byte, 1) == 1);
        CHECK(memory_of(0).n_total == 32 * MIB && memory_of(0).n_used >= 8 * MIB);
        CHECK(kill(pid, SIGKILL) == 0 && waitpid(pid, &status, 0) == pid);
}

void have_no_nvml(void)
{
        CHECK(!dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL));
}

/* The proxy alone. */
void have_nvml_of_nothing(void)
{
        struct memory memory;
        unsigned int n;

        find_functions();
        CHECK(nvml.init() == LIBRARY_NOT_FOUND && nvml.count(&n) == LIBRARY_NOT_FOUND);
        CHECK(nvml.memory(NULL, &memory) == LIBRARY_NOT_FOUND);
        CHECK(strcmp(nvml.text(LIBRARY_NOT_FOUND), "NVML Shared Library Not Found") == 0);
}

/* Without bfcd all is as the library says. */
void have_plain_nvml(void)
{
        unsigned int n;

        find_functions();
        CHECK(nvml.init() == 0 && nvml.count(&n) == 0 && n == 2);
        CHECK(memory_of(0).n_total == 80ull << 30);
}
