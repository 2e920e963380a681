/* Types of the driver API that only the proxy needs, and its own functions; see device/cuda_api.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_PRELOAD_API_H
#define BFC_PRELOAD_API_H

#include "device/cuda_api.h"

#ifndef BFC_CUDA_REAL_HEADER
typedef struct CUmemPoolHandle_st *CUmemoryPool;
typedef struct CUarray_st *CUarray;
typedef struct CUmipmappedArray_st *CUmipmappedArray;
typedef struct CUgraphNode_st *CUgraphNode;
typedef struct CUgreenCtx_st *CUgreenCtx;
typedef struct CUdevResourceDesc_st *CUdevResourceDesc;
typedef int CUarray_format;
typedef int CUmemPool_attribute;
typedef struct CUgraphExec_st *CUgraphExec;
typedef int CUgraphNodeType, CUgraphInstantiateResult;
typedef int CUgraphMem_attribute;
typedef void CUexecAffinityParam, CUctxCreateParams; /* passed on only */

typedef struct {
        size_t Width, Height;
        CUarray_format Format;
        unsigned int NumChannels;
} CUDA_ARRAY_DESCRIPTOR;

typedef struct {
        size_t Width, Height, Depth;
        CUarray_format Format;
        unsigned int NumChannels;
        unsigned int Flags;
} CUDA_ARRAY3D_DESCRIPTOR;

typedef struct {
        int allocType, handleTypes;
        CUmemLocation location;
        void *win32SecurityAttributes;
        size_t maxSize;
        unsigned short usage;
        unsigned char reserved[54];
} CUmemPoolProps;

typedef struct {
        CUmemPoolProps poolProps;
        const CUmemAccessDesc *accessDescs;
        size_t accessDescCount, bytesize;
        CUdeviceptr dptr;
} CUDA_MEM_ALLOC_NODE_PARAMS;

typedef struct {
        cuuint64_t flags;
        CUstream hUploadStream;
        CUgraphNode hErrNode_out;
        CUgraphInstantiateResult result_out;
} CUDA_GRAPH_INSTANTIATE_PARAMS;

enum { CU_MEM_LOCATION_TYPE_HOST = 2, CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT = 4 };
enum { CU_MEM_ALLOCATION_TYPE_MANAGED = 2 };
enum {
        CU_MEMPOOL_ATTR_RELEASE_THRESHOLD = 4,
        CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT = 5,
        CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH = 6,
        CU_MEMPOOL_ATTR_USED_MEM_CURRENT = 7,
        CU_MEMPOOL_ATTR_USED_MEM_HIGH = 8,
};
enum { CU_GRAPH_NODE_TYPE_GRAPH = 4, CU_GRAPH_NODE_TYPE_MEM_ALLOC = 10, CU_GRAPH_NODE_TYPE_MEM_FREE = 11 };
enum { CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT = 0, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT = 2 };
enum { CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD = 2 };
enum { CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM = 2 };

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *ret_pool, CUdevice device);
CUresult cuDeviceGetMemPool(CUmemoryPool *ret_pool, CUdevice device);
CUresult cuDeviceSetMemPool(CUdevice device, CUmemoryPool pool);
CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute which, void *value);
CUresult cuDeviceGetGraphMemAttribute(CUdevice device, CUgraphMem_attribute which, void *ret_value);
CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *ret_nodes, size_t *n);
CUresult cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType *ret_type);
CUresult cuGraphMemAllocNodeGetParams(CUgraphNode node, CUDA_MEM_ALLOC_NODE_PARAMS *ret_parameters);
CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode node, CUgraph *ret_graph);

/* The exported functions, and the real driver's, by trampolines. */
#define OWN(symbol, base, version, per_thread, arguments)                                                    \
        __attribute__((visibility("default"))) CUresult symbol arguments;                                    \
        CUresult real_##symbol arguments;
#include "integrations/preload/own.h"
#undef OWN
#endif

#define ANY_STREAM 2 /* of OWN(): the function takes no stream */

#endif
