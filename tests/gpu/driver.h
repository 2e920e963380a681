/* The driver API as found at run time: dlopen, and a table of pointers.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The same programs run on a real driver and on the fake, so nothing is linked.
 * A function that the driver lacks is NULL. Test code calls cu.cuMemAlloc_v2().
 * gpu_load() may be called in a child only, as CUDA does not survive fork(). */
#ifndef BFC_TESTS_GPU_DRIVER_H
#define BFC_TESTS_GPU_DRIVER_H

#include <stdbool.h>

#include "device/cuda_api.h"

#define F(symbol, base, version, arguments) CUresult(*symbol) arguments;
struct gpu_driver {
#include "device/cuda_functions.h"
        /* These the fake has not: nothing here could run a kernel. */
        CUresult (*cuModuleLoadData)(CUmodule *ret, const void *image);
        CUresult (*cuModuleUnload)(CUmodule module);
        CUresult (*cuModuleGetFunction)(CUfunction *ret, CUmodule module, const char *name);
        CUresult (*cuLaunchKernel)(CUfunction f, unsigned int grid_x, unsigned int grid_y,
                                   unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                                   unsigned int block_z, unsigned int n_shared, CUstream stream,
                                   void **parameters, void **extra);
};
#undef F
extern struct gpu_driver cu;

/* 0, or -1 where there is no libcuda.so.1 to load; then *ret_why says so. */
int gpu_load(const char **ret_why);
/* For main(): gives the fake a machine of this program's own, unless the
 * environment names one; the second takes it away. Nothing to a real driver. */
void gpu_machine_new(void);
void gpu_machine_remove(void);
/* Loads, initialises, and makes the primary context of a device current. */
CUresult gpu_start(int ordinal, CUcontext *ret);

bool gpu_is_fake(void);
int gpu_attribute(CUdevice device, CUdevice_attribute which); /* 0 where unknown */
const char *gpu_error(CUresult r);
size_t gpu_n_free(void);
CUmemAllocationProp gpu_prop(CUdevice device); /* of memory that can be shared by fd */

/* Memory by cuMemCreate, mapped and accessible. */
struct gpu_mapping {
        CUmemGenericAllocationHandle handle;
        CUdeviceptr at;
        size_t n_bytes;
};
CUresult gpu_map(CUdevice device, CUmemGenericAllocationHandle handle, size_t n_bytes,
                 struct gpu_mapping *ret);
CUresult gpu_create_and_map(CUdevice device, size_t n_bytes, struct gpu_mapping *ret);
CUresult gpu_unmap(struct gpu_mapping *m); /* and releases the handle */

/* How many of n bytes of device memory are not value; SIZE_MAX: cannot be read. */
size_t gpu_count_other(CUdeviceptr at, unsigned char value, size_t n_bytes);

#endif
