/* The functions that the proxy implements: OWN(symbol, name for cuGetProcAddress, CUDA version of this variant,
 * per_thread, arguments). per_thread: 1 for the variant of which stream 0 is the thread's own, 0 for the one of which
 * it is the legacy stream, ANY_STREAM without variants. Also included by trampolines.S.
 *
 * SPDX-License-Identifier: Apache-2.0 */
/* clang-format off */
OWN(cuGetProcAddress, "cuGetProcAddress", 11030, ANY_STREAM, (const char *name, void **ret_function, int version, cuuint64_t flags))
OWN(cuGetProcAddress_v2, "cuGetProcAddress", 12000, ANY_STREAM,
    (const char *name, void **ret_function, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *ret_status))
OWN(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", 7000, ANY_STREAM, (CUcontext *ret_context, CUdevice device))
OWN(cuCtxCreate, "cuCtxCreate", 2000, ANY_STREAM, (CUcontext *ret_context, unsigned int flags, CUdevice device))
OWN(cuCtxCreate_v2, "cuCtxCreate", 3020, ANY_STREAM, (CUcontext *ret_context, unsigned int flags, CUdevice device))
OWN(cuCtxCreate_v3, "cuCtxCreate", 11040, ANY_STREAM,
    (CUcontext *ret_context, CUexecAffinityParam *parameters, int n_parameters, unsigned int flags, CUdevice device))
OWN(cuCtxCreate_v4, "cuCtxCreate", 12050, ANY_STREAM,
    (CUcontext *ret_context, CUctxCreateParams *parameters, unsigned int flags, CUdevice device))
OWN(cuGreenCtxCreate, "cuGreenCtxCreate", 12040, ANY_STREAM,
    (CUgreenCtx *ret_context, CUdevResourceDesc resources, CUdevice device, unsigned int flags))
OWN(cuGreenCtxDestroy, "cuGreenCtxDestroy", 12040, ANY_STREAM, (CUgreenCtx context))
OWN(cuDevicePrimaryCtxReset, "cuDevicePrimaryCtxReset", 7000, ANY_STREAM, (CUdevice device))
OWN(cuDevicePrimaryCtxReset_v2, "cuDevicePrimaryCtxReset", 11000, ANY_STREAM, (CUdevice device))
OWN(cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease", 7000, ANY_STREAM, (CUdevice device))
OWN(cuDevicePrimaryCtxRelease_v2, "cuDevicePrimaryCtxRelease", 11000, ANY_STREAM, (CUdevice device))
OWN(cuCtxDestroy, "cuCtxDestroy", 2000, ANY_STREAM, (CUcontext context))
OWN(cuCtxDestroy_v2, "cuCtxDestroy", 4000, ANY_STREAM, (CUcontext context))
OWN(cuCtxDetach, "cuCtxDetach", 2000, ANY_STREAM, (CUcontext context))
OWN(cuCtxEnablePeerAccess, "cuCtxEnablePeerAccess", 4000, ANY_STREAM, (CUcontext context, unsigned int flags))
OWN(cuDeviceTotalMem_v2, "cuDeviceTotalMem", 3020, ANY_STREAM, (size_t *ret_n_bytes, CUdevice device))
OWN(cuMemGetInfo_v2, "cuMemGetInfo", 3020, ANY_STREAM, (size_t *ret_n_free, size_t *ret_n_total))
OWN(cuMemAlloc_v2, "cuMemAlloc", 3020, ANY_STREAM, (CUdeviceptr *ret_pointer, size_t n_bytes))
OWN(cuMemAllocPitch_v2, "cuMemAllocPitch", 3020, ANY_STREAM,
    (CUdeviceptr *ret_pointer, size_t *ret_pitch, size_t n_width, size_t n_height, unsigned int n_element))
OWN(cuMemAllocManaged, "cuMemAllocManaged", 6000, ANY_STREAM, (CUdeviceptr *ret_pointer, size_t n_bytes, unsigned int flags))
OWN(cuMemFree_v2, "cuMemFree", 3020, ANY_STREAM, (CUdeviceptr pointer))
OWN(cuMemGetAddressRange_v2, "cuMemGetAddressRange", 3020, ANY_STREAM, (CUdeviceptr *ret_base, size_t *ret_n_bytes, CUdeviceptr pointer))
OWN(cuPointerGetAttribute, "cuPointerGetAttribute", 4000, ANY_STREAM, (void *ret_value, CUpointer_attribute which, CUdeviceptr pointer))
OWN(cuPointerGetAttributes, "cuPointerGetAttributes", 7000, ANY_STREAM,
    (unsigned int n, CUpointer_attribute *which, void **ret_values, CUdeviceptr pointer))
OWN(cuMemAllocAsync, "cuMemAllocAsync", 11020, 0, (CUdeviceptr *ret_pointer, size_t n_bytes, CUstream stream))
OWN(cuMemAllocAsync_ptsz, "cuMemAllocAsync", 11020, 1, (CUdeviceptr *ret_pointer, size_t n_bytes, CUstream stream))
OWN(cuMemAllocFromPoolAsync, "cuMemAllocFromPoolAsync", 11020, 0,
    (CUdeviceptr *ret_pointer, size_t n_bytes, CUmemoryPool pool, CUstream stream))
OWN(cuMemAllocFromPoolAsync_ptsz, "cuMemAllocFromPoolAsync", 11020, 1,
    (CUdeviceptr *ret_pointer, size_t n_bytes, CUmemoryPool pool, CUstream stream))
OWN(cuMemFreeAsync, "cuMemFreeAsync", 11020, 0, (CUdeviceptr pointer, CUstream stream))
OWN(cuMemFreeAsync_ptsz, "cuMemFreeAsync", 11020, 1, (CUdeviceptr pointer, CUstream stream))
OWN(cuMemPoolCreate, "cuMemPoolCreate", 11020, ANY_STREAM, (CUmemoryPool *ret_pool, const CUmemPoolProps *what))
OWN(cuMemPoolDestroy, "cuMemPoolDestroy", 11020, ANY_STREAM, (CUmemoryPool pool))
OWN(cuMemPoolGetAttribute, "cuMemPoolGetAttribute", 11020, ANY_STREAM, (CUmemoryPool pool, CUmemPool_attribute which, void *ret_value))
OWN(cuMemPoolSetAccess, "cuMemPoolSetAccess", 11020, ANY_STREAM, (CUmemoryPool pool, const CUmemAccessDesc *what, size_t n))
OWN(cuMemPoolTrimTo, "cuMemPoolTrimTo", 11020, ANY_STREAM, (CUmemoryPool pool, size_t n_bytes))
OWN(cuStreamDestroy, "cuStreamDestroy", 2000, ANY_STREAM, (CUstream stream))
OWN(cuStreamDestroy_v2, "cuStreamDestroy", 4000, ANY_STREAM, (CUstream stream))
OWN(cuMemCreate, "cuMemCreate", 10020, ANY_STREAM,
    (CUmemGenericAllocationHandle *ret_handle, size_t n_bytes, const CUmemAllocationProp *prop, unsigned long long flags))
OWN(cuMemRelease, "cuMemRelease", 10020, ANY_STREAM, (CUmemGenericAllocationHandle handle))
OWN(cuMemRetainAllocationHandle, "cuMemRetainAllocationHandle", 11000, ANY_STREAM,
    (CUmemGenericAllocationHandle *ret_handle, void *pointer))
OWN(cuMemMap, "cuMemMap", 10020, ANY_STREAM,
    (CUdeviceptr pointer, size_t n_bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags))
OWN(cuMemExportToShareableHandle, "cuMemExportToShareableHandle", 10020, ANY_STREAM,
    (void *ret_os_handle, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type, unsigned long long flags))
OWN(cuMemImportFromShareableHandle, "cuMemImportFromShareableHandle", 10020, ANY_STREAM,
    (CUmemGenericAllocationHandle *ret_handle, void *os_handle, CUmemAllocationHandleType type))
OWN(cuMemGetAllocationPropertiesFromHandle, "cuMemGetAllocationPropertiesFromHandle", 10020, ANY_STREAM,
    (CUmemAllocationProp *ret_prop, CUmemGenericAllocationHandle handle))
OWN(cuMemUnmap, "cuMemUnmap", 10020, ANY_STREAM, (CUdeviceptr pointer, size_t n_bytes))
OWN(cuArrayCreate_v2, "cuArrayCreate", 3020, ANY_STREAM, (CUarray *ret_array, const CUDA_ARRAY_DESCRIPTOR *what))
OWN(cuArray3DCreate_v2, "cuArray3DCreate", 3020, ANY_STREAM, (CUarray *ret_array, const CUDA_ARRAY3D_DESCRIPTOR *what))
OWN(cuArrayDestroy, "cuArrayDestroy", 2000, ANY_STREAM, (CUarray array))
OWN(cuMipmappedArrayCreate, "cuMipmappedArrayCreate", 5000, ANY_STREAM,
    (CUmipmappedArray *ret_array, const CUDA_ARRAY3D_DESCRIPTOR *what, unsigned int n_levels))
OWN(cuMipmappedArrayDestroy, "cuMipmappedArrayDestroy", 5000, ANY_STREAM, (CUmipmappedArray array))
OWN(cuGraphInstantiate, "cuGraphInstantiate", 10000, ANY_STREAM,
    (CUgraphExec *ret_exec, CUgraph graph, CUgraphNode *ret_node, char *ret_log, size_t n_log))
OWN(cuGraphInstantiate_v2, "cuGraphInstantiate", 11000, ANY_STREAM,
    (CUgraphExec *ret_exec, CUgraph graph, CUgraphNode *ret_node, char *ret_log, size_t n_log))
OWN(cuGraphInstantiateWithFlags, "cuGraphInstantiateWithFlags", 11040, ANY_STREAM,
    (CUgraphExec *ret_exec, CUgraph graph, unsigned long long flags))
OWN(cuGraphInstantiateWithParams, "cuGraphInstantiateWithParams", 12000, 0,
    (CUgraphExec *ret_exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *parameters))
OWN(cuGraphInstantiateWithParams_ptsz, "cuGraphInstantiateWithParams", 12000, 1,
    (CUgraphExec *ret_exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *parameters))
OWN(cuGraphLaunch, "cuGraphLaunch", 10000, 0, (CUgraphExec exec, CUstream stream))
OWN(cuGraphLaunch_ptsz, "cuGraphLaunch", 10000, 1, (CUgraphExec exec, CUstream stream))
OWN(cuGraphUpload, "cuGraphUpload", 11010, 0, (CUgraphExec exec, CUstream stream))
OWN(cuGraphUpload_ptsz, "cuGraphUpload", 11010, 1, (CUgraphExec exec, CUstream stream))
OWN(cuGraphExecDestroy, "cuGraphExecDestroy", 10000, ANY_STREAM, (CUgraphExec exec))
OWN(cuDeviceGraphMemTrim, "cuDeviceGraphMemTrim", 11040, ANY_STREAM, (CUdevice device))
OWN(cuIpcGetMemHandle, "cuIpcGetMemHandle", 4010, ANY_STREAM, (CUipcMemHandle *ret_handle, CUdeviceptr pointer))
OWN(cuIpcOpenMemHandle, "cuIpcOpenMemHandle", 4010, ANY_STREAM, (CUdeviceptr *ret_pointer, CUipcMemHandle handle, unsigned int flags))
OWN(cuIpcOpenMemHandle_v2, "cuIpcOpenMemHandle", 11000, ANY_STREAM, (CUdeviceptr *ret_pointer, CUipcMemHandle handle, unsigned int flags))
OWN(cuIpcCloseMemHandle, "cuIpcCloseMemHandle", 4010, ANY_STREAM, (CUdeviceptr pointer))
/* clang-format on */
