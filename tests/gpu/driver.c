/* Finding the driver's functions, and what every program here does with them;
 * see driver.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/driver.h"

#include <dirent.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct gpu_driver cu;

/* ---- loading ------------------------------------------------------------- */

typedef CUresult (*proc_address_fn)(const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *);
typedef CUresult (*proc_address_old_fn)(const char *, void **, int, cuuint64_t);

static void *library;
static proc_address_fn proc_address;
static proc_address_old_fn proc_address_old;

/* Success and NULL is how a driver says that it has no such function; then the
 * symbol's own name is asked for, as older drivers need. */
static void *find(const char *symbol, const char *base, int version)
{
        CUdriverProcAddressQueryResult status;
        void *p = NULL;

        if (proc_address && proc_address(base, &p, version, 0, &status) == CUDA_SUCCESS && p)
                return p;
        if (!proc_address && proc_address_old && proc_address_old(base, &p, version, 0) == CUDA_SUCCESS && p)
                return p;
        return dlsym(library, symbol);
}

int gpu_load(const char **ret_why)
{
        if (library)
                return 0;
        library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
        if (!library) {
                *ret_why = dlerror();
                return -1;
        }
        *(void **)&proc_address = dlsym(library, "cuGetProcAddress_v2");
        *(void **)&proc_address_old = dlsym(library, "cuGetProcAddress");
#define F(symbol, base, version, arguments) *(void **)&cu.symbol = find(#symbol, base, version);
#include "device/cuda_functions.h"
#undef F
        *(void **)&cu.cuModuleLoadData = find("cuModuleLoadData", "cuModuleLoadData", 2000);
        *(void **)&cu.cuModuleUnload = find("cuModuleUnload", "cuModuleUnload", 2000);
        *(void **)&cu.cuModuleGetFunction = find("cuModuleGetFunction", "cuModuleGetFunction", 2000);
        *(void **)&cu.cuLaunchKernel = find("cuLaunchKernel", "cuLaunchKernel", 4000);
        return 0;
}

CUresult gpu_start(int ordinal, CUcontext *ret)
{
        const char *why;
        CUdevice device;
        CUresult r;

        if (gpu_load(&why) < 0)
                return CUDA_ERROR_NO_DEVICE;
        r = cu.cuInit(0);
        if (r == CUDA_SUCCESS)
                r = cu.cuDeviceGet(&device, ordinal);
        if (r == CUDA_SUCCESS)
                r = cu.cuDevicePrimaryCtxRetain(ret, device);
        return r == CUDA_SUCCESS ? cu.cuCtxSetCurrent(*ret) : r;
}

/* ---- the fake's state folder --------------------------------------------- */

static char machine[64];

void gpu_machine_new(void)
{
        if (getenv("FAKE_CUDA_STATE"))
                return;
        snprintf(machine, sizeof(machine), "/dev/shm/fake-cuda-XXXXXX");
        if (!mkdtemp(machine))
                machine[0] = '\0';
        else
                setenv("FAKE_CUDA_STATE", machine, 1);
        if (machine[0])
                chmod(machine, 01777); /* peers may be other users */
}

void gpu_machine_remove(void)
{
        DIR *d = machine[0] ? opendir(machine) : NULL;
        struct dirent *e;

        while (d && (e = readdir(d)))
                if (e->d_name[0] != '.')
                        unlinkat(dirfd(d), e->d_name, 0);
        if (d) {
                closedir(d);
                rmdir(machine);
        }
}

/* ---- asking -------------------------------------------------------------- */

bool gpu_is_fake(void)
{
        char name[128] = "";
        CUdevice device;

        if (cu.cuDeviceGet(&device, 0) != CUDA_SUCCESS)
                return false;
        cu.cuDeviceGetName(name, sizeof(name), device);
        return strncmp(name, "Fake CUDA", 9) == 0;
}

int gpu_attribute(CUdevice device, CUdevice_attribute which)
{
        int value = 0;

        return cu.cuDeviceGetAttribute(&value, which, device) == CUDA_SUCCESS ? value : 0;
}

const char *gpu_error(CUresult r)
{
        static __thread char number[32];
        const char *name = NULL, *why;

        if (gpu_load(&why) == 0 && cu.cuGetErrorName && cu.cuGetErrorName(r, &name) == CUDA_SUCCESS && name)
                return name;
        snprintf(number, sizeof(number), "error %d", (int)r);
        return number;
}

size_t gpu_n_free(void)
{
        size_t n_free = 0, n_total;

        cu.cuMemGetInfo_v2(&n_free, &n_total);
        return n_free;
}

CUmemAllocationProp gpu_prop(CUdevice device)
{
        CUmemAllocationProp prop;

        memset(&prop, 0, sizeof(prop));
        prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
        prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
        prop.location.id = device;
        return prop;
}

/* ---- memory -------------------------------------------------------------- */

CUresult gpu_map(CUdevice device, CUmemGenericAllocationHandle handle, size_t n_bytes,
                 struct gpu_mapping *ret)
{
        CUmemAccessDesc access = { .location = { CU_MEM_LOCATION_TYPE_DEVICE, device },
                                   .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
        struct gpu_mapping m = { .handle = handle, .n_bytes = n_bytes };
        CUresult r;

        r = cu.cuMemAddressReserve(&m.at, n_bytes, 0, 0, 0);
        if (r != CUDA_SUCCESS)
                return r;
        r = cu.cuMemMap(m.at, n_bytes, 0, handle, 0);
        if (r == CUDA_SUCCESS) {
                r = cu.cuMemSetAccess(m.at, n_bytes, &access, 1);
                if (r != CUDA_SUCCESS)
                        cu.cuMemUnmap(m.at, n_bytes);
        }
        if (r != CUDA_SUCCESS) {
                cu.cuMemAddressFree(m.at, n_bytes);
                return r;
        }
        *ret = m;
        return CUDA_SUCCESS;
}

CUresult gpu_create_and_map(CUdevice device, size_t n_bytes, struct gpu_mapping *ret)
{
        CUmemAllocationProp prop = gpu_prop(device);
        CUmemGenericAllocationHandle handle;
        CUresult r;

        r = cu.cuMemCreate(&handle, n_bytes, &prop, 0);
        if (r != CUDA_SUCCESS)
                return r;
        r = gpu_map(device, handle, n_bytes, ret);
        if (r != CUDA_SUCCESS)
                cu.cuMemRelease(handle);
        return r;
}

CUresult gpu_unmap(struct gpu_mapping *m)
{
        CUresult r = cu.cuMemUnmap(m->at, m->n_bytes);

        if (r == CUDA_SUCCESS)
                r = cu.cuMemAddressFree(m->at, m->n_bytes);
        if (r == CUDA_SUCCESS)
                r = cu.cuMemRelease(m->handle);
        *m = (struct gpu_mapping){ 0 };
        return r;
}

size_t gpu_count_other(CUdeviceptr at, unsigned char value, size_t n_bytes)
{
        const size_t n_piece = (size_t)1 << 20;
        unsigned char *bytes = malloc(n_piece);
        size_t n_other = 0;

        for (size_t done = 0; bytes && done < n_bytes;) {
                size_t n = n_bytes - done < n_piece ? n_bytes - done : n_piece;

                if (cu.cuMemcpyDtoH_v2(bytes, at + done, n) != CUDA_SUCCESS) {
                        n_other = SIZE_MAX;
                        break;
                }
                /* A loop over all bytes takes most of a test's time in a build without optimization. */
                if (bytes[0] != value || memcmp(bytes, bytes + 1, n - 1) != 0)
                        for (size_t i = 0; i < n; i++)
                                n_other += bytes[i] != value;
                done += n;
        }
        free(bytes);
        return n_other;
}
