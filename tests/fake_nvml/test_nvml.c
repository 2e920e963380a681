/* The fake NVML: what PyTorch asks before it maps memory.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/suite.h"

#define UUID             "GPU-fa4ec0da-0000-4000-8000-000000000001"
#define VERSION_MISMATCH 25

static void *library;
static char path[64];

static void setup(void)
{
        int fd;

        snprintf(path, sizeof(path), "/tmp/fake-nvml-test-XXXXXX");
        fd = mkstemp(path);
        ck_assert_int_eq(write(fd, UUID "\n", strlen(UUID "\n")), (ssize_t)strlen(UUID "\n"));
        close(fd);
        setenv("FAKE_NVML", path, 1);
        library = dlopen(FAKE_NVML "/libnvidia-ml.so.1", RTLD_NOW);
        ck_assert_msg(library != NULL, "%s", dlerror());
}

static void teardown(void)
{
        unlink(path);
}

FIXTURE(nvml, setup, teardown);

#define FIND(symbol, ...)                                                                                    \
        int (*symbol)(__VA_ARGS__);                                                                          \
        *(void **)&(symbol) = dlsym(library, #symbol);                                                       \
        ck_assert_ptr_nonnull(*(void **)&(symbol))

TEST_OF(nvml, devices)
{
        void *by_index = NULL, *by_uuid = NULL, *by_bus = NULL;
        int version;

        FIND(nvmlDeviceGetHandleByIndex_v2, unsigned, void **);
        FIND(nvmlDeviceGetHandleByUUID, const char *, void **);
        FIND(nvmlDeviceGetHandleByPciBusId_v2, const char *, void **);
        FIND(nvmlSystemGetCudaDriverVersion_v2, int *);
        ck_assert_int_eq(nvmlDeviceGetHandleByIndex_v2(0, &by_index), 0);
        ck_assert_int_ne(nvmlDeviceGetHandleByIndex_v2(1, &by_uuid), 0);
        ck_assert_int_eq(nvmlDeviceGetHandleByUUID(UUID, &by_uuid), 0);
        ck_assert_int_ne(nvmlDeviceGetHandleByUUID("GPU-other", &by_bus), 0);
        ck_assert_int_eq(nvmlDeviceGetHandleByPciBusId_v2("0000:01:00.0", &by_bus), 0);
        ck_assert(by_index == by_uuid && by_index == by_bus);
        setenv("FAKE_CUDA_VERSION", "13000", 1);
        ck_assert_int_eq(nvmlSystemGetCudaDriverVersion_v2(&version), 0);
        ck_assert_int_eq(version, 13000);
}

TEST_OF(nvml, no_fabric)
{
        struct {
                unsigned version;
                unsigned char cluster[16];
                int status;
                unsigned clique;
                unsigned char state;
                unsigned health;
        } fabric = { .state = 3 };
        void *device;
        int type;

        FIND(nvmlDeviceGetHandleByIndex_v2, unsigned, void **);
        FIND(nvmlDeviceGetGpuFabricInfoV, void *, void *);
        FIND(nvmlDeviceGetNvLinkRemoteDeviceType, void *, unsigned, int *);
        ck_assert_int_eq(nvmlDeviceGetHandleByIndex_v2(0, &device), 0);
        ck_assert_int_eq(nvmlDeviceGetGpuFabricInfoV(device, &fabric), VERSION_MISMATCH);
        fabric.version = 2u << 24 | sizeof(fabric);
        ck_assert_int_eq(nvmlDeviceGetGpuFabricInfoV(device, &fabric), 0);
        ck_assert_int_eq(fabric.state, 0);
        ck_assert_int_eq(nvmlDeviceGetNvLinkRemoteDeviceType(device, 0, &type), 3);
}

int main(void)
{
        return suite_main("fake_nvml");
}
