/* The prototypes of own.h, asserted against the toolkit's cuda.h where there is one; see device/cuda_abi.c. No code.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "integrations/preload/api.h"

/* Those that the header declares only for programs that ask for them. */
CUresult cuMemAllocAsync_ptsz(CUdeviceptr *ret_pointer, size_t n_bytes, CUstream stream);
CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *ret_pointer, size_t n_bytes, CUmemoryPool pool,
                                      CUstream stream);
CUresult cuMemFreeAsync_ptsz(CUdeviceptr pointer, CUstream stream);
CUresult cuGraphInstantiateWithParams_ptsz(CUgraphExec *ret_exec, CUgraph graph,
                                           CUDA_GRAPH_INSTANTIATE_PARAMS *parameters);
CUresult cuGraphLaunch_ptsz(CUgraphExec exec, CUstream stream);
CUresult cuGraphUpload_ptsz(CUgraphExec exec, CUstream stream);

/* The header gives this name to another function; and those before it, which it has no more. */
#undef cuGraphInstantiate
CUresult cuGraphInstantiate(CUgraphExec *ret_exec, CUgraph graph, CUgraphNode *ret_node, char *ret_log,
                            size_t n_log);
CUresult cuGraphInstantiate_v2(CUgraphExec *ret_exec, CUgraph graph, CUgraphNode *ret_node, char *ret_log,
                               size_t n_log);

/* By this name the header means a newer variant, and that of CUDA 13 does not have the next ones. */
#undef cuCtxCreate
CUresult cuCtxCreate(CUcontext *ret_context, unsigned int flags, CUdevice device);
CUresult cuCtxCreate_v2(CUcontext *ret_context, unsigned int flags, CUdevice device);
CUresult cuCtxCreate_v3(CUcontext *ret_context, CUexecAffinityParam *parameters, int n_parameters,
                        unsigned int flags, CUdevice device);

#pragma GCC diagnostic ignored "-Wdeprecated-declarations" /* cuCtxDetach() */

#define OWN(symbol, base, version, per_thread, arguments)                                                    \
        _Static_assert(__builtin_types_compatible_p(__typeof__(&symbol), CUresult(*) arguments), #symbol);
#include "integrations/preload/own.h"
#undef OWN

_Static_assert(sizeof(CUDA_ARRAY_DESCRIPTOR) == 24, "CUDA_ARRAY_DESCRIPTOR");
_Static_assert(sizeof(CUDA_ARRAY3D_DESCRIPTOR) == 40, "CUDA_ARRAY3D_DESCRIPTOR");
_Static_assert(CU_MEM_LOCATION_TYPE_HOST == 2, "CU_MEM_LOCATION_TYPE_HOST");
_Static_assert(CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT == 4, "CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT");
_Static_assert(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT == 5, "CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT");
_Static_assert(CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH == 6, "CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH");
_Static_assert(CU_MEMPOOL_ATTR_USED_MEM_CURRENT == 7, "CU_MEMPOOL_ATTR_USED_MEM_CURRENT");
_Static_assert(CU_MEMPOOL_ATTR_USED_MEM_HIGH == 8, "CU_MEMPOOL_ATTR_USED_MEM_HIGH");
_Static_assert(sizeof(CUmemPoolProps) == 88, "CUmemPoolProps");
_Static_assert(sizeof(CUDA_MEM_ALLOC_NODE_PARAMS) == 120, "CUDA_MEM_ALLOC_NODE_PARAMS");
_Static_assert(offsetof(CUDA_MEM_ALLOC_NODE_PARAMS, bytesize) == 104, "CUDA_MEM_ALLOC_NODE_PARAMS");
_Static_assert(sizeof(CUDA_GRAPH_INSTANTIATE_PARAMS) == 32, "CUDA_GRAPH_INSTANTIATE_PARAMS");
_Static_assert(CU_GRAPH_NODE_TYPE_GRAPH == 4, "CU_GRAPH_NODE_TYPE_GRAPH");
_Static_assert(CU_GRAPH_NODE_TYPE_MEM_ALLOC == 10, "CU_GRAPH_NODE_TYPE_MEM_ALLOC");
_Static_assert(CU_GRAPH_NODE_TYPE_MEM_FREE == 11, "CU_GRAPH_NODE_TYPE_MEM_FREE");
_Static_assert(CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT == 2, "CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT");
_Static_assert(CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD == 2, "CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD");
