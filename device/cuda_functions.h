/* Functions of the driver API: F(symbol, base name, the CUDA version that
 * brought this variant, arguments). Included wherever a list of them is needed,
 * with F defined; no include guard for that reason. The first part is what bfcd
 * calls, the second what only its tests and their fake driver need.
 *
 * SPDX-License-Identifier: Apache-2.0 */
/* clang-format off */
F(cuInit, "cuInit", 2000, (unsigned int flags))
F(cuGetErrorName, "cuGetErrorName", 6000, (CUresult error, const char **ret_text))
F(cuGetErrorString, "cuGetErrorString", 6000, (CUresult error, const char **ret_text))
F(cuDeviceGetCount, "cuDeviceGetCount", 2000, (int *ret_n))
F(cuDeviceGet, "cuDeviceGet", 2000, (CUdevice *ret_device, int ordinal))
F(cuDeviceGetName, "cuDeviceGetName", 2000, (char *ret_name, int n_bytes, CUdevice device))
F(cuDeviceGetUuid_v2, "cuDeviceGetUuid", 11040, (CUuuid *ret_uuid, CUdevice device))
F(cuDeviceGetAttribute, "cuDeviceGetAttribute", 2000, (int *ret_value, CUdevice_attribute which, CUdevice device))
F(cuDeviceCanAccessPeer, "cuDeviceCanAccessPeer", 4000, (int *ret_can, CUdevice device, CUdevice peer))
F(cuDevicePrimaryCtxGetState, "cuDevicePrimaryCtxGetState", 7000, (CUdevice device, unsigned int *ret_flags, int *ret_active))
F(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", 7000, (CUcontext *ret_context, CUdevice device))
F(cuDevicePrimaryCtxRelease_v2, "cuDevicePrimaryCtxRelease", 11000, (CUdevice device))
F(cuCtxPushCurrent_v2, "cuCtxPushCurrent", 4000, (CUcontext context))
F(cuCtxPopCurrent_v2, "cuCtxPopCurrent", 4000, (CUcontext *ret_context))
F(cuCtxGetDevice, "cuCtxGetDevice", 2000, (CUdevice *ret_device))
F(cuCtxSynchronize, "cuCtxSynchronize", 2000, (void))
F(cuMemGetInfo_v2, "cuMemGetInfo", 3020, (size_t *ret_n_free, size_t *ret_n_total))
F(cuMemAlloc_v2, "cuMemAlloc", 3020, (CUdeviceptr *ret_pointer, size_t n_bytes))
F(cuMemFree_v2, "cuMemFree", 3020, (CUdeviceptr pointer))
F(cuMemGetAddressRange_v2, "cuMemGetAddressRange", 3020, (CUdeviceptr *ret_base, size_t *ret_n_bytes, CUdeviceptr pointer))
F(cuIpcGetMemHandle, "cuIpcGetMemHandle", 4010, (CUipcMemHandle *ret_handle, CUdeviceptr pointer))
F(cuIpcOpenMemHandle_v2, "cuIpcOpenMemHandle", 11000, (CUdeviceptr *ret_pointer, CUipcMemHandle handle, unsigned int flags))
F(cuIpcCloseMemHandle, "cuIpcCloseMemHandle", 4010, (CUdeviceptr pointer))
F(cuMemGetAllocationGranularity, "cuMemGetAllocationGranularity", 10020,
  (size_t *ret_n_bytes, const CUmemAllocationProp *prop, CUmemAllocationGranularity_flags which))
F(cuMemCreate, "cuMemCreate", 10020,
  (CUmemGenericAllocationHandle *ret_handle, size_t n_bytes, const CUmemAllocationProp *prop, unsigned long long flags))
F(cuMemRelease, "cuMemRelease", 10020, (CUmemGenericAllocationHandle handle))
F(cuMemExportToShareableHandle, "cuMemExportToShareableHandle", 10020,
  (void *ret_os_handle, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type, unsigned long long flags))
F(cuMemImportFromShareableHandle, "cuMemImportFromShareableHandle", 10020,
  (CUmemGenericAllocationHandle *ret_handle, void *os_handle, CUmemAllocationHandleType type))
F(cuMemGetAllocationPropertiesFromHandle, "cuMemGetAllocationPropertiesFromHandle", 10020,
  (CUmemAllocationProp *ret_prop, CUmemGenericAllocationHandle handle))
F(cuMemAddressReserve, "cuMemAddressReserve", 10020,
  (CUdeviceptr *ret_pointer, size_t n_bytes, size_t alignment, CUdeviceptr hint, unsigned long long flags))
F(cuMemAddressFree, "cuMemAddressFree", 10020, (CUdeviceptr pointer, size_t n_bytes))
F(cuMemMap, "cuMemMap", 10020,
  (CUdeviceptr pointer, size_t n_bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags))
F(cuMemUnmap, "cuMemUnmap", 10020, (CUdeviceptr pointer, size_t n_bytes))
F(cuMemSetAccess, "cuMemSetAccess", 10020, (CUdeviceptr pointer, size_t n_bytes, const CUmemAccessDesc *desc, size_t n_desc))
F(cuMemcpyHtoD_v2, "cuMemcpyHtoD", 3020, (CUdeviceptr to, const void *from, size_t n_bytes))
F(cuMemcpyDtoH_v2, "cuMemcpyDtoH", 3020, (void *to, CUdeviceptr from, size_t n_bytes))
F(cuMemsetD8Async, "cuMemsetD8Async", 3020, (CUdeviceptr to, unsigned char value, size_t n_bytes, CUstream stream))
F(cuMemHostRegister_v2, "cuMemHostRegister", 6050, (void *memory, size_t n_bytes, unsigned int flags))
F(cuMemHostUnregister, "cuMemHostUnregister", 4000, (void *memory))
F(cuMemcpyHtoDAsync_v2, "cuMemcpyHtoDAsync", 3020, (CUdeviceptr to, const void *from, size_t n_bytes, CUstream stream))
F(cuMemcpyDtoHAsync_v2, "cuMemcpyDtoHAsync", 3020, (void *to, CUdeviceptr from, size_t n_bytes, CUstream stream))
F(cuStreamCreate, "cuStreamCreate", 2000, (CUstream *ret_stream, unsigned int flags))
F(cuCtxGetStreamPriorityRange, "cuCtxGetStreamPriorityRange", 5050, (int *ret_least, int *ret_greatest))
F(cuStreamCreateWithPriority, "cuStreamCreateWithPriority", 5050, (CUstream *ret_stream, unsigned int flags, int priority))
F(cuStreamDestroy_v2, "cuStreamDestroy", 4000, (CUstream stream))
F(cuStreamIsCapturing, "cuStreamIsCapturing", 10000, (CUstream stream, CUstreamCaptureStatus *ret_status))
F(cuStreamGetCtx, "cuStreamGetCtx", 9020, (CUstream stream, CUcontext *ret_context))
F(cuStreamGetId, "cuStreamGetId", 12000, (CUstream stream, unsigned long long *ret_id))
F(cuStreamSynchronize, "cuStreamSynchronize", 2000, (CUstream stream))
F(cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode", 10010, (CUstreamCaptureMode *mode))
F(cuEventCreate, "cuEventCreate", 2000, (CUevent *ret_event, unsigned int flags))
F(cuEventRecord, "cuEventRecord", 2000, (CUevent event, CUstream stream))
F(cuEventQuery, "cuEventQuery", 2000, (CUevent event))
F(cuEventDestroy_v2, "cuEventDestroy", 4000, (CUevent event))

#ifndef CUDA_FUNCTIONS_OF_BFCD
F(cuDriverGetVersion, "cuDriverGetVersion", 2020, (int *ret_version))
F(cuGetProcAddress_v2, "cuGetProcAddress", 12000,
  (const char *name, void **ret_function, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *ret_status))
F(cuDeviceTotalMem_v2, "cuDeviceTotalMem", 3020, (size_t *ret_n_bytes, CUdevice device))
F(cuDeviceGetPCIBusId, "cuDeviceGetPCIBusId", 4010, (char *ret_text, int n_bytes, CUdevice device))
F(cuDevicePrimaryCtxSetFlags_v2, "cuDevicePrimaryCtxSetFlags", 11000, (CUdevice device, unsigned int flags))
F(cuDevicePrimaryCtxReset_v2, "cuDevicePrimaryCtxReset", 11000, (CUdevice device))
F(cuCtxSetCurrent, "cuCtxSetCurrent", 4000, (CUcontext context))
F(cuCtxEnablePeerAccess, "cuCtxEnablePeerAccess", 4000, (CUcontext context, unsigned int flags))
F(cuCtxDisablePeerAccess, "cuCtxDisablePeerAccess", 4000, (CUcontext context))
F(cuCtxGetCurrent, "cuCtxGetCurrent", 4000, (CUcontext *ret_context))
F(cuPointerGetAttribute, "cuPointerGetAttribute", 4000, (void *ret_value, CUpointer_attribute which, CUdeviceptr pointer))
F(cuMemHostGetFlags, "cuMemHostGetFlags", 2030, (unsigned int *ret_flags, void *memory))
F(cuMemRetainAllocationHandle, "cuMemRetainAllocationHandle", 11000, (CUmemGenericAllocationHandle *ret_handle, void *pointer))
F(cuMemGetAccess, "cuMemGetAccess", 10020, (unsigned long long *ret_flags, const CUmemLocation *location, CUdeviceptr pointer))
F(cuMemsetD8_v2, "cuMemsetD8", 3020, (CUdeviceptr to, unsigned char value, size_t n_bytes))
F(cuMemcpyDtoD_v2, "cuMemcpyDtoD", 3020, (CUdeviceptr to, CUdeviceptr from, size_t n_bytes))
F(cuMemcpyDtoDAsync_v2, "cuMemcpyDtoDAsync", 3020, (CUdeviceptr to, CUdeviceptr from, size_t n_bytes, CUstream stream))
F(cuStreamQuery, "cuStreamQuery", 2000, (CUstream stream))
F(cuStreamWaitEvent, "cuStreamWaitEvent", 3020, (CUstream stream, CUevent event, unsigned int flags))
F(cuStreamBeginCapture_v2, "cuStreamBeginCapture", 10010, (CUstream stream, CUstreamCaptureMode mode))
F(cuStreamEndCapture, "cuStreamEndCapture", 10000, (CUstream stream, CUgraph *ret_graph))
F(cuGraphDestroy, "cuGraphDestroy", 10000, (CUgraph graph))
F(cuLaunchHostFunc, "cuLaunchHostFunc", 10000, (CUstream stream, CUhostFn function, void *data))
F(cuEventSynchronize, "cuEventSynchronize", 2000, (CUevent event))
#endif
/* clang-format on */
