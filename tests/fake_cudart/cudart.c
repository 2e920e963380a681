/* A CUDA runtime for machines without a GPU, above the fake driver (tests/fake_cuda), of CUDA 12 or 13, as the headers are:
 * enough for PyTorch to make, copy and free tensors, to record events and to capture graphs. Kernels do nothing, and so does a graph. It is loaded in
 * place of NVIDIA's by LD_PRELOAD, under the same soname.
 *
 * Numbers of the driver's errors are those of the runtime's, as far as the fake driver returns any. A device's memory
 * is mapped in this process, which is how peer copies and host copies of unknown direction are made.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))

static _Thread_local cudaError_t last_error;
static _Thread_local int current_device;
static _Thread_local CUcontext current_context;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct host_range { /* pinned */
        char *p;
        size_t n_bytes;
        struct host_range *next;
} * host_ranges;
static unsigned long long last_capture;
static struct capture {
        CUstream stream;
        unsigned long long id;
        struct capture *next;
} * captures;

static cudaError_t done(CUresult r)
{
        cudaError_t e = (cudaError_t)r;

        if (e != cudaSuccess && e != cudaErrorNotReady)
                last_error = e;
        return e;
}

static cudaError_t failed(cudaError_t e)
{
        last_error = e;
        return e;
}

/* The device's primary context is current, as the runtime has it after its first call. */
static CUresult enter(void)
{
        CUresult r;
        CUdevice device;

        if (current_context)
                return CUDA_SUCCESS;
        if ((r = cuInit(0)) != CUDA_SUCCESS || (r = cuDeviceGet(&device, current_device)) != CUDA_SUCCESS ||
            (r = cuDevicePrimaryCtxRetain(&current_context, device)) != CUDA_SUCCESS)
                return r;
        return cuCtxSetCurrent(current_context);
}

#define ENTER()                                                                                              \
        do {                                                                                                 \
                CUresult entered_ = enter();                                                                 \
                if (entered_ != CUDA_SUCCESS)                                                                \
                        return done(entered_);                                                               \
        } while (0)

static CUdeviceptr device_ptr(const void *p)
{
        return (CUdeviceptr)(uintptr_t)p;
}

static bool is_device(const void *p)
{
        CUdeviceptr base;
        size_t n_bytes;

        return cuMemGetAddressRange(&base, &n_bytes, device_ptr(p)) == CUDA_SUCCESS;
}

/* ---- devices ---------------------------------------------------------------- */

API cudaError_t cudaGetDeviceCount(int *count)
{
        CUresult r = cuInit(0);

        *count = 0;
        if (r == CUDA_SUCCESS)
                r = cuDeviceGetCount(count);
        if (r == CUDA_SUCCESS && *count == 0)
                r = CUDA_ERROR_NO_DEVICE;
        return done(r);
}

API cudaError_t cudaGetDevice(int *device)
{
        *device = current_device;
        return cudaSuccess;
}

API cudaError_t cudaSetDevice(int device)
{
        CUdevice found;
        CUresult r;

        if ((r = cuInit(0)) != CUDA_SUCCESS || (r = cuDeviceGet(&found, device)) != CUDA_SUCCESS)
                return done(r);
        if (device != current_device)
                current_context = NULL;
        current_device = device;
        ENTER();
        return cudaSuccess;
}

API cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device)
{
        CUdevice found;
        CUresult r;

        if ((r = cuInit(0)) != CUDA_SUCCESS || (r = cuDeviceGet(&found, device)) != CUDA_SUCCESS)
                return done(r);
        if (cuDeviceGetAttribute(value, (CUdevice_attribute)which, found) != CUDA_SUCCESS)
                *value = 0; /* of what the fake driver does not know */
        return cudaSuccess;
}

/* The headers of CUDA 12 rename it. */
API cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device)
{
        CUdevice found;
        CUuuid uuid;
        CUresult r;

        if ((r = cuInit(0)) != CUDA_SUCCESS || (r = cuDeviceGet(&found, device)) != CUDA_SUCCESS)
                return done(r);
        memset(p, 0, sizeof(*p));
        (void)cuDeviceGetName(p->name, (int)sizeof(p->name), found);
        if (cuDeviceGetUuid_v2(&uuid, found) == CUDA_SUCCESS)
                memcpy(&p->uuid, &uuid, sizeof(uuid));
        (void)cuDeviceTotalMem(&p->totalGlobalMem, found);
        (void)cuDeviceGetAttribute(&p->pciBusID, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, found);
        p->major = 8;
        p->warpSize = 32;
        p->multiProcessorCount = 1;
        p->maxThreadsPerBlock = 1024;
        p->maxThreadsPerMultiProcessor = 2048;
        p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
        p->maxThreadsDim[2] = 64;
        p->maxGridSize[0] = 0x7fffffff;
        p->maxGridSize[1] = p->maxGridSize[2] = 65535;
        p->sharedMemPerBlock = p->sharedMemPerBlockOptin = 48 << 10;
        p->sharedMemPerMultiprocessor = 96 << 10;
        p->regsPerBlock = p->regsPerMultiprocessor = 65536;
        p->textureAlignment = 512;
        p->concurrentKernels = p->unifiedAddressing = p->asyncEngineCount = 1;
        p->l2CacheSize = 1 << 20;
        return cudaSuccess;
}

API cudaError_t cudaDeviceGetPCIBusId(char *text, int n_bytes, int device)
{
        CUdevice found;
        CUresult r = cuDeviceGet(&found, device);

        return done(r == CUDA_SUCCESS ? cuDeviceGetPCIBusId(text, n_bytes, found) : r);
}

API cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer)
{
        *can = device != peer;
        return cudaSuccess;
}

API cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned int flags)
{
        (void)peer, (void)flags;
        return cudaSuccess;
}

API cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
        *least = *greatest = 0;
        return cudaSuccess;
}

API cudaError_t cudaDeviceSynchronize(void)
{
        ENTER();
        return done(cuCtxSynchronize());
}

API cudaError_t cudaDeviceReset(void)
{
        ENTER();
        current_context = NULL;
        (void)cuCtxSetCurrent(NULL);
        return done(cuDevicePrimaryCtxReset(current_device));
}

API cudaError_t cudaDriverGetVersion(int *version)
{
        return done(cuDriverGetVersion(version));
}

API cudaError_t cudaRuntimeGetVersion(int *version)
{
        *version = CUDART_VERSION;
        return cudaSuccess;
}

API cudaError_t cudaGetDriverEntryPoint(const char *symbol, void **function, unsigned long long flags,
                                        enum cudaDriverEntryPointQueryResult *status)
{
        return cudaGetDriverEntryPointByVersion(symbol, function, CUDART_VERSION, flags, status);
}

static CUresult no_such_function(void)
{
        return CUDA_ERROR_NOT_SUPPORTED;
}

/* A function that the fake driver lacks always fails: PyTorch insists on having some that it calls for multicasts only. */
API cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned int version,
                                                 unsigned long long flags,
                                                 enum cudaDriverEntryPointQueryResult *status)
{
        CUdriverProcAddressQueryResult found = CU_GET_PROC_ADDRESS_SUCCESS;
        CUresult r = cuGetProcAddress_v2(symbol, function, (int)version, flags, &found);

        if (r != CUDA_SUCCESS)
                *function = NULL;
        if (found == CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND) {
                *function = (void *)no_such_function;
                found = CU_GET_PROC_ADDRESS_SUCCESS;
        }
        if (status)
                *status = (enum cudaDriverEntryPointQueryResult)found;
        return cudaSuccess; /* as CUDA does: the status has the rest */
}

/* ---- errors ------------------------------------------------------------------ */

API cudaError_t cudaGetLastError(void)
{
        cudaError_t e = last_error;

        last_error = cudaSuccess;
        return e;
}

API cudaError_t cudaPeekAtLastError(void)
{
        return last_error;
}

API const char *cudaGetErrorName(cudaError_t e)
{
        const char *text = NULL;

        return cuGetErrorName((CUresult)e, &text) == CUDA_SUCCESS && text ? text : "cudaErrorUnknown";
}

API const char *cudaGetErrorString(cudaError_t e)
{
        const char *text = NULL;

        return cuGetErrorString((CUresult)e, &text) == CUDA_SUCCESS && text ? text : "unknown error";
}

/* ---- memory ------------------------------------------------------------------ */

API cudaError_t cudaMalloc(void **ret, size_t n_bytes)
{
        CUdeviceptr p = 0;
        CUresult r;

        ENTER();
        r = n_bytes > 0 ? cuMemAlloc(&p, n_bytes) : CUDA_SUCCESS;
        if (r == CUDA_SUCCESS)
                *ret = (void *)(uintptr_t)p;
        return done(r);
}

API cudaError_t cudaMallocManaged(void **ret, size_t n_bytes, unsigned int flags)
{
        CUdeviceptr p = 0;
        CUresult r;

        ENTER();
        r = cuMemAllocManaged(&p, n_bytes, flags);
        if (r == CUDA_SUCCESS)
                *ret = (void *)(uintptr_t)p;
        return done(r);
}

API cudaError_t cudaFree(void *p)
{
        ENTER();
        return p ? done(cuMemFree(device_ptr(p))) : cudaSuccess;
}

API cudaError_t cudaMemGetInfo(size_t *n_free, size_t *n_total)
{
        ENTER();
        return done(cuMemGetInfo(n_free, n_total));
}

static struct host_range **find_host(const void *p)
{
        struct host_range **r = &host_ranges;

        while (*r && !((const char *)p >= (*r)->p && (const char *)p < (*r)->p + (*r)->n_bytes))
                r = &(*r)->next;
        return r;
}

API cudaError_t cudaHostRegister(void *p, size_t n_bytes, unsigned int flags)
{
        struct host_range *r = malloc(sizeof(*r));

        (void)flags;
        if (!r)
                return failed(cudaErrorMemoryAllocation);
        (void)pthread_mutex_lock(&lock);
        *r = (struct host_range){ p, n_bytes, host_ranges };
        host_ranges = r;
        (void)pthread_mutex_unlock(&lock);
        return cudaSuccess;
}

API cudaError_t cudaHostUnregister(void *p)
{
        struct host_range **at, *r;

        (void)pthread_mutex_lock(&lock);
        at = find_host(p);
        r = *at;
        if (r)
                *at = r->next;
        (void)pthread_mutex_unlock(&lock);
        free(r);
        return r ? cudaSuccess : failed(cudaErrorHostMemoryNotRegistered);
}

API cudaError_t cudaHostAlloc(void **ret, size_t n_bytes, unsigned int flags)
{
        void *p;

        if (posix_memalign(&p, 4096, n_bytes > 0 ? n_bytes : 1) != 0)
                return failed(cudaErrorMemoryAllocation);
        *ret = p;
        return cudaHostRegister(p, n_bytes, flags);
}

API cudaError_t cudaMallocHost(void **ret, size_t n_bytes)
{
        return cudaHostAlloc(ret, n_bytes, 0);
}

/* The same address, as with unified addresses. */
API cudaError_t cudaHostGetDevicePointer(void **ret, void *p, unsigned int flags)
{
        bool is_pinned;

        (void)flags;
        (void)pthread_mutex_lock(&lock);
        is_pinned = *find_host(p) != NULL;
        (void)pthread_mutex_unlock(&lock);
        if (!is_pinned)
                return failed(cudaErrorInvalidValue);
        *ret = p;
        return cudaSuccess;
}

API cudaError_t cudaFreeHost(void *p)
{
        cudaError_t e = p ? cudaHostUnregister(p) : cudaSuccess;

        if (e == cudaSuccess)
                free(p);
        return e;
}

API cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *ret, const void *p)
{
        int ordinal;

        ENTER();
        memset(ret, 0, sizeof(*ret));
        ret->device = current_device;
        if (is_device(p)) {
                ret->type = cudaMemoryTypeDevice;
                if (cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, device_ptr(p)) ==
                    CUDA_SUCCESS)
                        ret->device = ordinal;
                ret->devicePointer = (void *)(uintptr_t)p;
                return cudaSuccess;
        }
        (void)pthread_mutex_lock(&lock);
        ret->type = *find_host(p) ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
        (void)pthread_mutex_unlock(&lock);
        if (ret->type == cudaMemoryTypeHost)
                ret->hostPointer = ret->devicePointer = (void *)(uintptr_t)p;
        return cudaSuccess;
}

API cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n_bytes, enum cudaMemcpyKind kind,
                                cudaStream_t stream)
{
        CUresult r;

        (void)kind; /* is known from the addresses */
        ENTER();
        if (n_bytes == 0)
                return cudaSuccess;
        if (is_device(to))
                r = is_device(from) ? cuMemcpyDtoDAsync(device_ptr(to), device_ptr(from), n_bytes, stream)
                                    : cuMemcpyHtoDAsync(device_ptr(to), from, n_bytes, stream);
        else if (is_device(from))
                r = cuMemcpyDtoHAsync(to, device_ptr(from), n_bytes, stream);
        else if ((r = cuStreamSynchronize(stream)) == CUDA_SUCCESS)
                memcpy(to, from, n_bytes);
        return done(r);
}

API cudaError_t cudaMemcpy(void *to, const void *from, size_t n_bytes, enum cudaMemcpyKind kind)
{
        cudaError_t e = cudaMemcpyAsync(to, from, n_bytes, kind, NULL);

        return e == cudaSuccess ? done(cuStreamSynchronize(NULL)) : e;
}

API cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device,
                                    size_t n_bytes, cudaStream_t stream)
{
        (void)to_device, (void)from_device;
        return cudaMemcpyAsync(to, from, n_bytes, cudaMemcpyDefault, stream);
}

API cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                                  size_t width, size_t height, enum cudaMemcpyKind kind, cudaStream_t stream)
{
        cudaError_t e = cudaSuccess;

        for (size_t y = 0; y < height && e == cudaSuccess; y++)
                e = cudaMemcpyAsync((char *)to + y * to_pitch, (const char *)from + y * from_pitch, width,
                                    kind, stream);
        return e;
}

API cudaError_t cudaMemsetAsync(void *p, int value, size_t n_bytes, cudaStream_t stream)
{
        ENTER();
        return n_bytes > 0 ? done(cuMemsetD8Async(device_ptr(p), (unsigned char)value, n_bytes, stream))
                           : cudaSuccess;
}

API cudaError_t cudaMemset(void *p, int value, size_t n_bytes)
{
        cudaError_t e = cudaMemsetAsync(p, value, n_bytes, NULL);

        return e == cudaSuccess ? done(cuStreamSynchronize(NULL)) : e;
}

API cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *p)
{
        ENTER();
        return done(cuIpcGetMemHandle((CUipcMemHandle *)handle, device_ptr(p)));
}

API cudaError_t cudaIpcOpenMemHandle(void **ret, cudaIpcMemHandle_t handle, unsigned int flags)
{
        CUipcMemHandle h;
        CUdeviceptr p;
        CUresult r;

        ENTER();
        memcpy(&h, &handle, sizeof(h));
        r = cuIpcOpenMemHandle(&p, h, flags);
        if (r == CUDA_SUCCESS)
                *ret = (void *)(uintptr_t)p;
        return done(r);
}

API cudaError_t cudaIpcCloseMemHandle(void *p)
{
        ENTER();
        return done(cuIpcCloseMemHandle(device_ptr(p)));
}

/* ---- streams and events ------------------------------------------------------- */

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *ret, unsigned int flags, int priority)
{
        (void)priority;
        ENTER();
        return done(cuStreamCreate(ret, flags));
}

API cudaError_t cudaStreamCreate(cudaStream_t *ret)
{
        return cudaStreamCreateWithPriority(ret, 0, 0);
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *ret, unsigned int flags)
{
        return cudaStreamCreateWithPriority(ret, flags, 0);
}
API cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
        return done(cuStreamDestroy(stream));
}

API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority)
{
        (void)stream;
        *priority = 0;
        return cudaSuccess;
}

API cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long *id)
{
        ENTER();
        return done(cuStreamGetId(stream, id));
}

API cudaError_t cudaStreamQuery(cudaStream_t stream)
{
        ENTER();
        return done(cuStreamQuery(stream));
}

API cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
        ENTER();
        return done(cuStreamSynchronize(stream));
}

API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags)
{
        ENTER();
        return done(cuStreamWaitEvent(stream, event, flags));
}

API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data)
{
        ENTER();
        return done(cuLaunchHostFunc(stream, function, data));
}

struct callback {
        cudaStreamCallback_t function;
        cudaStream_t stream;
        void *data;
};

static void call_back(void *p)
{
        struct callback *c = p;

        c->function(c->stream, cudaSuccess, c->data);
        free(c);
}

API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *data,
                                      unsigned int flags)
{
        struct callback *c = malloc(sizeof(*c));
        cudaError_t e;

        (void)flags;
        if (!c)
                return failed(cudaErrorMemoryAllocation);
        *c = (struct callback){ function, stream, data };
        e = cudaLaunchHostFunc(stream, call_back, c);
        if (e != cudaSuccess)
                free(c);
        return e;
}

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *ret, unsigned int flags)
{
        ENTER();
        return done(cuEventCreate(ret, flags));
}

API cudaError_t cudaEventCreate(cudaEvent_t *ret)
{
        return cudaEventCreateWithFlags(ret, 0);
}
API cudaError_t cudaEventDestroy(cudaEvent_t event)
{
        return done(cuEventDestroy(event));
}
API cudaError_t cudaEventQuery(cudaEvent_t event)
{
        return done(cuEventQuery(event));
}
API cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
        return done(cuEventSynchronize(event));
}

API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned int flags)
{
        (void)flags;
        ENTER();
        return done(cuEventRecord(event, stream));
}

API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
        return cudaEventRecordWithFlags(event, stream, 0);
}

API cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t begin, cudaEvent_t end)
{
        (void)begin, (void)end;
        *ms = 0;
        return cudaSuccess;
}

/* ---- captures and graphs, which have memory only ----------------------------------- */

API cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
        ENTER();
        return done(cuThreadExchangeStreamCaptureMode((CUstreamCaptureMode *)mode));
}

static struct capture **find_capture(cudaStream_t stream)
{
        struct capture **c = &captures;

        while (*c && (*c)->stream != stream)
                c = &(*c)->next;
        return c;
}

API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
        struct capture *c;
        CUresult r;

        ENTER();
        r = cuStreamBeginCapture(stream, (CUstreamCaptureMode)mode);
        if (r != CUDA_SUCCESS)
                return done(r);
        c = malloc(sizeof(*c));
        if (!c)
                abort();
        (void)pthread_mutex_lock(&lock);
        *c = (struct capture){ stream, ++last_capture, captures };
        captures = c;
        (void)pthread_mutex_unlock(&lock);
        return cudaSuccess;
}

API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
        struct capture **at, *c;

        ENTER();
        (void)pthread_mutex_lock(&lock);
        at = find_capture(stream);
        c = *at;
        if (c)
                *at = c->next;
        (void)pthread_mutex_unlock(&lock);
        free(c);
        return done(cuStreamEndCapture(stream, graph));
}

API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
        CUstreamCaptureStatus found;
        CUresult r;

        ENTER();
        r = cuStreamIsCapturing(stream, &found);
        if (r == CUDA_SUCCESS)
                *status = (enum cudaStreamCaptureStatus)found;
        return done(r);
}

static cudaError_t capture_info(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                unsigned long long *id, cudaGraph_t *graph,
                                const cudaGraphNode_t **dependencies, size_t *n_dependencies)
{
        struct capture *c;
        cudaError_t e = cudaStreamIsCapturing(stream, status);

        (void)pthread_mutex_lock(&lock);
        c = *find_capture(stream);
        if (id)
                *id = c ? c->id : 0;
        (void)pthread_mutex_unlock(&lock);
        if (graph)
                *graph = NULL;
        if (dependencies)
                *dependencies = NULL;
        if (n_dependencies)
                *n_dependencies = 0;
        return e;
}

#if CUDART_VERSION >= 13000
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                         unsigned long long *id, cudaGraph_t *graph,
                                         const cudaGraphNode_t **dependencies,
                                         const cudaGraphEdgeData **edges, size_t *n_dependencies)
{
        if (edges)
                *edges = NULL;
        return capture_info(stream, status, id, graph, dependencies, n_dependencies);
}
#else
API cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                            unsigned long long *id, cudaGraph_t *graph,
                                            const cudaGraphNode_t **dependencies, size_t *n_dependencies)
{
        return capture_info(stream, status, id, graph, dependencies, n_dependencies);
}
#endif

API cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
        return done(cuGraphDestroy(graph));
}

API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *ret, cudaGraph_t graph,
                                              unsigned long long flags)
{
        ENTER();
        return done(cuGraphInstantiateWithFlags(ret, graph, flags));
}

API cudaError_t cudaGraphInstantiate(cudaGraphExec_t *ret, cudaGraph_t graph, unsigned long long flags)
{
        return cudaGraphInstantiateWithFlags(ret, graph, flags);
}

API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph)
{
        return done(cuGraphExecDestroy(graph));
}

API cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream)
{
        ENTER();
        return done(cuGraphLaunch(graph, stream));
}

API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *n_nodes)
{
        return done(cuGraphGetNodes(graph, nodes, n_nodes));
}

API cudaError_t cudaGraphDebugDotPrint(cudaGraph_t graph, const char *path, unsigned int flags)
{
        (void)graph, (void)path, (void)flags;
        return cudaSuccess;
}

/* ---- kernels, which do nothing ------------------------------------------------------ */

static _Thread_local struct {
        dim3 grid, block;
        size_t n_shared_bytes;
        void *stream;
} configuration;

API void **__cudaRegisterFatBinary(void *binary)
{
        static void *a_handle;

        (void)binary;
        return &a_handle;
}

API void __cudaRegisterFatBinaryEnd(void **handle)
{
        (void)handle;
}
API void __cudaUnregisterFatBinary(void **handle)
{
        (void)handle;
}

API void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit,
                                uint3 *tid, uint3 *bid, dim3 *block, dim3 *grid, int *size)
{
        (void)handle, (void)host, (void)device, (void)name, (void)limit;
        (void)tid, (void)bid, (void)block, (void)grid, (void)size;
}

API void __cudaRegisterVar(void **handle, char *host, char *address, const char *name, int is_external,
                           size_t n_bytes, int is_constant, int is_global)
{
        (void)handle, (void)host, (void)address, (void)name;
        (void)is_external, (void)n_bytes, (void)is_constant, (void)is_global;
}

API char __cudaInitModule(void **handle)
{
        (void)handle;
        return 1;
}

API unsigned int __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t n_shared_bytes,
                                             struct CUstream_st *stream)
{
        configuration.grid = grid;
        configuration.block = block;
        configuration.n_shared_bytes = n_shared_bytes;
        configuration.stream = stream;
        return 0;
}

API cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *n_shared_bytes, void *stream)
{
        *grid = configuration.grid;
        *block = configuration.block;
        *n_shared_bytes = configuration.n_shared_bytes;
        memcpy(stream, &configuration.stream, sizeof(configuration.stream));
        return cudaSuccess;
}

API cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments,
                                 size_t n_shared_bytes, cudaStream_t stream)
{
        (void)function, (void)grid, (void)block, (void)arguments, (void)n_shared_bytes, (void)stream;
        ENTER();
        return cudaSuccess;
}

API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments)
{
        (void)config, (void)function, (void)arguments;
        ENTER();
        return cudaSuccess;
}

/* CUDA 13's launches. Not all headers have these. */
API cudaError_t get_kernel(void **ret, const void *function) __asm__("__cudaGetKernel");
API cudaError_t get_kernel(void **ret, const void *function)
{
        *ret = (void *)function;
        return cudaSuccess;
}

API cudaError_t launch_kernel(void *kernel, dim3 grid, dim3 block, void **arguments, size_t n_shared_bytes,
                              cudaStream_t stream) __asm__("__cudaLaunchKernel");
API cudaError_t launch_kernel(void *kernel, dim3 grid, dim3 block, void **arguments, size_t n_shared_bytes,
                              cudaStream_t stream)
{
        return cudaLaunchKernel(kernel, grid, block, arguments, n_shared_bytes, stream);
}

API cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *ret, const void *function)
{
        (void)function;
        memset(ret, 0, sizeof(*ret));
        ret->maxThreadsPerBlock = 1024;
        ret->numRegs = 32;
        ret->binaryVersion = ret->ptxVersion = 80;
        return cudaSuccess;
}

API cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute which, int value)
{
        (void)function, (void)which, (void)value;
        return cudaSuccess;
}

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *ret, const void *function,
                                                                       int block, size_t n_shared_bytes,
                                                                       unsigned int flags)
{
        (void)function, (void)block, (void)n_shared_bytes, (void)flags;
        *ret = 1;
        return cudaSuccess;
}

API cudaError_t cudaProfilerStart(void)
{
        return cudaSuccess;
}
API cudaError_t cudaProfilerStop(void)
{
        return cudaSuccess;
}

/* ---- what there is none of ------------------------------------------------------------ */

/* ---- pools that a program makes, as RMM does ------------------------------------------- */

/* The numbers and structures of the driver's are those of the runtime's. */
API cudaError_t cudaMemPoolCreate(cudaMemPool_t *ret, const struct cudaMemPoolProps *props)
{
        CUresult r = enter();

        return done(r != CUDA_SUCCESS ? r
                                      : cuMemPoolCreate(ret, (const CUmemPoolProps *)(const void *)props));
}

API cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool)
{
        return done(cuMemPoolDestroy(pool));
}

API cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr which, void *value)
{
        return done(cuMemPoolSetAttribute(pool, (CUmemPool_attribute)which, value));
}

API cudaError_t cudaMallocFromPoolAsync(void **ret, size_t n, cudaMemPool_t pool, cudaStream_t s)
{
        CUresult r = enter();
        CUdeviceptr p = 0;

        if (r == CUDA_SUCCESS)
                r = cuMemAllocFromPoolAsync(&p, n, pool, s);
        if (r == CUDA_SUCCESS)
                *ret = (void *)p;
        return done(r);
}

API cudaError_t cudaFreeAsync(void *p, cudaStream_t s)
{
        CUresult r = enter();

        return done(r != CUDA_SUCCESS ? r : cuMemFreeAsync((CUdeviceptr)p, s));
}

#define NONE(name, ...)                                                                                      \
        API cudaError_t name(__VA_ARGS__)                                                                    \
        {                                                                                                    \
                return failed(cudaErrorNotSupported);                                                        \
        }
NONE(cudaMallocAsync, void **p, size_t n, cudaStream_t s)
NONE(cudaDeviceGetDefaultMemPool, cudaMemPool_t *pool, int device)
NONE(cudaMemPoolGetAttribute, cudaMemPool_t pool, enum cudaMemPoolAttr which, void *value)
NONE(cudaMemPoolSetAccess, cudaMemPool_t pool, const struct cudaMemAccessDesc *access, size_t n)
NONE(cudaMemPoolTrimTo, cudaMemPool_t pool, size_t n)
NONE(cudaIpcGetEventHandle, cudaIpcEventHandle_t *handle, cudaEvent_t event)
NONE(cudaIpcOpenEventHandle, cudaEvent_t *event, cudaIpcEventHandle_t handle)

/* What PyTorch for CUDA 13 links, too. Without prototypes: not all headers have all of them. */
#define ABSENT(name)                                                                                         \
        API cudaError_t absent_##name(void) __asm__(#name);                                                  \
        API cudaError_t absent_##name(void)                                                                  \
        {                                                                                                    \
                return failed(cudaErrorNotSupported);                                                        \
        }
ABSENT(cudaDeviceGetGraphMemAttribute)
ABSENT(cudaDeviceSetGraphMemAttribute)
ABSENT(cudaGetSymbolAddress)
ABSENT(cudaGraphAddNode)
ABSENT(cudaGraphConditionalHandleCreate)
ABSENT(cudaGraphNodeGetDependencies)
ABSENT(cudaGraphRetainUserObject)
ABSENT(cudaKernelSetAttributeForDevice)
ABSENT(cudaLaunchCooperativeKernel)
ABSENT(cudaLibraryGetKernel)
ABSENT(cudaLibraryLoadData)
ABSENT(cudaLibraryUnload)
ABSENT(cudaMemcpyToSymbol)
ABSENT(cudaOccupancyMaxActiveBlocksPerMultiprocessor)
ABSENT(cudaStreamBeginCaptureToGraph)
ABSENT(cudaStreamUpdateCaptureDependencies)
ABSENT(cudaUserObjectCreate)
ABSENT(cudaUserObjectRelease)
