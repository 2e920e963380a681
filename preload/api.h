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
typedef int CUarray_format;
typedef int CUmemPool_attribute;
typedef void CUDA_MEM_ALLOC_NODE_PARAMS;             /* passed on only */
typedef void CUexecAffinityParam, CUctxCreateParams; /* the same */

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

enum { CU_MEM_LOCATION_TYPE_HOST = 2, CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT = 4 };
enum {
        CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT = 5,
        CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH = 6,
        CU_MEMPOOL_ATTR_USED_MEM_CURRENT = 7,
        CU_MEMPOOL_ATTR_USED_MEM_HIGH = 8,
};
enum { CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM = 2 };

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *ret_pool, CUdevice device);

/* The exported functions, and the real driver's, by trampolines. */
#define OWN(symbol, base, version, per_thread, arguments)                                                    \
        __attribute__((visibility("default"))) CUresult symbol arguments;                                    \
        CUresult real_##symbol arguments;
#include "preload/own.h"
#undef OWN
#endif

#define ANY_STREAM 2 /* of OWN(): the function takes no stream */

#endif
