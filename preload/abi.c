/* The prototypes of own.h, asserted against the toolkit's cuda.h where there is one; see device/cuda_abi.c. No code.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "preload/api.h"

/* Those that the header declares only for programs that ask for them. */
CUresult cuMemAllocAsync_ptsz(CUdeviceptr *ret_pointer, size_t n_bytes, CUstream stream);
CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *ret_pointer, size_t n_bytes, CUmemoryPool pool,
                                      CUstream stream);
CUresult cuMemFreeAsync_ptsz(CUdeviceptr pointer, CUstream stream);

#define OWN(symbol, base, version, per_thread, arguments)                                                    \
        _Static_assert(__builtin_types_compatible_p(__typeof__(&symbol), CUresult(*) arguments), #symbol);
#include "preload/own.h"
#undef OWN

_Static_assert(sizeof(CUDA_ARRAY_DESCRIPTOR) == 24, "CUDA_ARRAY_DESCRIPTOR");
_Static_assert(sizeof(CUDA_ARRAY3D_DESCRIPTOR) == 40, "CUDA_ARRAY3D_DESCRIPTOR");
_Static_assert(CU_MEM_LOCATION_TYPE_HOST == 2, "CU_MEM_LOCATION_TYPE_HOST");
_Static_assert(CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT == 4, "CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT");
_Static_assert(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT == 5, "CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT");
_Static_assert(CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH == 6, "CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH");
_Static_assert(CU_MEMPOOL_ATTR_USED_MEM_CURRENT == 7, "CU_MEMPOOL_ATTR_USED_MEM_CURRENT");
_Static_assert(CU_MEMPOOL_ATTR_USED_MEM_HIGH == 8, "CU_MEMPOOL_ATTR_USED_MEM_HIGH");
