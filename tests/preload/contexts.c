/* Resets of a GPU, and access of other GPUs.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "tests/preload/job.h"

static CUcontext use_gpu(CUdevice device)
{
        CUcontext context;

        OK(cu.cuDevicePrimaryCtxRetain(&context, device));
        OK(cu.cuCtxSetCurrent(context));
        return context;
}

static CUdeviceptr alloc(size_t n_bytes)
{
        CUdeviceptr p = 0;

        OK(cu.cuMemAlloc_v2(&p, n_bytes));
        return p;
}

static CUdeviceptr have_lent_memory(CUmemGenericAllocationHandle *ret_handle)
{
        const CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                           .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 } };
        const CUmemAccessDesc access = { prop.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
        CUdeviceptr at;

        OK(cu.cuMemCreate(ret_handle, 40 * MIB, &prop, 0));
        OK(cu.cuMemAddressReserve(&at, 40 * MIB, 0, 0, 0));
        OK(cu.cuMemMap(at, 40 * MIB, 0, *ret_handle, 0));
        OK(cu.cuMemSetAccess(at, 40 * MIB, &access, 1));
        holds_bytes(at + 39 * MIB, MIB, 3);
        return at;
}

/* Everything that a program can have is gone but memory of cuMemCreate(), and it goes on as a new one. */
void reset_gpu(bool is_lent, bool breaks)
{
        size_t limit = is_lent ? 256 * MIB : 32 * MIB;
        CUmemGenericAllocationHandle handle;
        CUdeviceptr p, managed, at = 0;
        CUresult (*ways[])(CUdevice) = { cu.cuDevicePrimaryCtxReset_v2, cu.own_cuDevicePrimaryCtxReset };

        OK(cu.cuInit(0));
        OK(cu.cuDevicePrimaryCtxReset_v2(0));
        GIVES(CUDA_ERROR_INVALID_DEVICE, cu.cuDevicePrimaryCtxReset_v2(99));
        for (size_t i = 0; i < 2; i++) {
                use_gpu(0);
                CHECK(total_bytes() == limit && free_bytes() == limit);
                p = alloc(10 * MIB);
                (void)alloc(1000);
                holds_bytes(p + 9 * MIB, MIB, 7);
                OK(cu.own_cuMemAllocManaged(&managed, 2 * MIB, 1));
                OK(cu.own_cuMemAllocAsync(&managed, MIB, NULL));
                if (is_lent)
                        at = have_lent_memory(&handle);
                CHECK(free_bytes() <= limit - (is_lent ? 51 : 11) * MIB);
                if (breaks) {
                        while (cu.cuMemsetD8_v2(p, 0, 16) == CUDA_SUCCESS)
                                ;
                        GIVES(CUDA_ERROR_ILLEGAL_ADDRESS, cu.cuCtxSynchronize());
                }
                OK(ways[i](0));
                GIVES(CUDA_ERROR_CONTEXT_IS_DESTROYED, cu.cuCtxSynchronize());
                use_gpu(0);
                GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemFree_v2(p));
                if (is_lent) {
                        wait_free(limit -
                                  40 * MIB); /* it has ended for bfcd's library, and the program has it */
                        holds_bytes(at + 39 * MIB, MIB, 3);
                        OK(cu.cuMemUnmap(at, 40 * MIB));
                        OK(cu.cuMemRelease(handle));
                        OK(cu.cuMemAddressFree(at, 40 * MIB));
                        wait_free(limit);
                }
                CHECK(free_bytes() == limit);
                p = alloc(30 * MIB);
                holds_bytes(p + 29 * MIB, MIB, 9);
                OK(cu.cuMemFree_v2(p));
        }
}

/* What is charged ends with a broken context, too. */
void reset_gpu_with_array(void)
{
        const CUDA_ARRAY_DESCRIPTOR what = {
                .Width = 1024, .Height = 1024, .Format = 0x20, .NumChannels = 2
        };
        CUdeviceptr managed;
        CUarray array;

        OK(cu.cuInit(0));
        use_gpu(0);
        OK(cu.own_cuArrayCreate_v2(&array, &what));
        OK(cu.own_cuMemAllocManaged(&managed, 2 * MIB, 1));
        CHECK(free_bytes() == 24 * MIB);
        GIVES(CUDA_ERROR_ILLEGAL_ADDRESS, cu.cuMemsetD8_v2(managed, 0, 16));
        GIVES(CUDA_ERROR_ILLEGAL_ADDRESS, cu.cuCtxSynchronize());
        OK(cu.cuDevicePrimaryCtxReset_v2(0));
        use_gpu(0);
        CHECK(free_bytes() == 32 * MIB);
}

/* Arrays end with the context that has them, and what others have stays. */
void end_contexts(void)
{
        const CUDA_ARRAY_DESCRIPTOR what = {
                .Width = 1024, .Height = 1024, .Format = 0x20, .NumChannels = 2
        };
        CUresult (*create)(CUcontext *, unsigned int, CUdevice);
        CUcontext first, second;
        CUarray array;

        *(void **)&create = dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), "cuCtxCreate_v2");
        CHECK(create);
        OK(cu.cuInit(0));
        first = use_gpu(0);
        OK(cu.own_cuArrayCreate_v2(&array, &what));
        CHECK(free_bytes() == 24 * MIB);
        OK(create(&second, 0, 0));
        OK(cu.own_cuArrayCreate_v2(&array, &what));
        OK(cu.own_cuArrayCreate_v2(&array, &what));
        CHECK(free_bytes() == 8 * MIB);
        OK(cu.own_cuCtxDestroy_v2(second));
        GIVES(CUDA_ERROR_INVALID_CONTEXT, cu.own_cuCtxDestroy_v2(second));
        OK(cu.cuCtxSetCurrent(first));
        CHECK(free_bytes() == 24 * MIB);
        OK(create(&second, 0, 0));
        OK(cu.own_cuArrayCreate_v2(&array, &what));
        OK(cu.cuDevicePrimaryCtxRetain(&first, 0));
        OK(cu.own_cuDevicePrimaryCtxRelease_v2(0));
        CHECK(free_bytes() == 16 * MIB);
        OK(cu.own_cuDevicePrimaryCtxRelease_v2(0));
        CHECK(free_bytes() == 24 * MIB);
        use_gpu(0);
        OK(cu.cuDevicePrimaryCtxReset_v2(0));
        OK(cu.cuCtxSetCurrent(second));
        CHECK(free_bytes() == 24 * MIB);
        OK(cu.own_cuArrayDestroy(array));
        CHECK(free_bytes() == 32 * MIB);
}

static bool primary_is_active(void)
{
        unsigned int flags;
        int is;

        OK(cu.cuDevicePrimaryCtxGetState(0, &flags, &is));
        return is;
}

/* Each context takes 4 MiB. Nothing of the library keeps the primary one. */
void reset_beside_context(void)
{
        CUcontext own, primary;

        OK(cu.cuInit(0));
        OK(cu.own_cuCtxCreate_v2(&own, 0, 0));
        (void)alloc(2 * MIB); /* in the primary one, which is made for it */
        CHECK(primary_is_active() && free_bytes() <= 22 * MIB);
        OK(cu.cuDevicePrimaryCtxReset_v2(0));
        CHECK(!primary_is_active() && free_bytes() == 28 * MIB);
        OK(cu.cuDevicePrimaryCtxRetain(&primary, 0));
        CHECK(free_bytes() == 24 * MIB);
        OK(cu.own_cuDevicePrimaryCtxRelease_v2(0));
        CHECK(!primary_is_active() && free_bytes() == 28 * MIB);
}

/* The same of contexts that are made in a way of their own. */
void have_other_contexts(void)
{
        CUresult (*attach)(CUcontext *, unsigned int);
        CUcontext own, again;
        CUgreenCtx green;

        *(void **)&attach = dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), "cuCtxAttach");
        CHECK(attach);
        OK(cu.cuInit(0));
        OK(cu.own_cuCtxCreate(&own, 0, 0));
        OK(attach(&again, 0));
        OK(cu.own_cuCtxDetach(own));
        CHECK(free_bytes() == 28 * MIB);
        OK(cu.own_cuCtxDetach(own));
        GIVES(CUDA_ERROR_INVALID_CONTEXT, cu.own_cuCtxDetach(own));
        OK(cu.own_cuGreenCtxCreate(&green, NULL, 0, 1)); /* and the primary one for it */
        OK(cu.own_cuCtxCreate_v2(&own, 0, 0));
        CHECK(primary_is_active() && free_bytes() == 24 * MIB);
        OK(cu.own_cuGreenCtxDestroy(green));
        CHECK(!primary_is_active() && free_bytes() == 28 * MIB);
        OK(cu.own_cuGreenCtxCreate(&green, NULL, 0, 1));
        OK(cu.cuDevicePrimaryCtxReset_v2(0));
        CHECK(free_bytes() == 28 * MIB);
}

/* ---- beside other calls ------------------------------------------------------------ */

struct call {
        void (*make)(CUcontext context);
        const char *function; /* of the driver, which does not return from this call of it */
        unsigned n;
        CUcontext context;
};

static void *make_call(void *userdata)
{
        const struct call *call = userdata;

        call->make(call->context);
        return NULL;
}

/* By the fake driver's file. */
static unsigned count_calls(const char *function)
{
        FILE *f = fopen(getenv("FAKE_CUDA_COUNTS"), "re");
        unsigned n, found = 0;
        char is[64];

        CHECK(f);
        while (fscanf(f, "%63s %u", is, &n) == 2)
                if (strcmp(is, function) == 0)
                        found = n;
        fclose(f);
        return found;
}

static void begin_call(struct call *call)
{
        pthread_t thread;

        CHECK(count_calls(call->function) < call->n);
        CHECK(pthread_create(&thread, NULL, make_call, call) == 0);
        while (count_calls(call->function) < call->n)
                usleep(1000);
}

static void create_memory(CUcontext context)
{
        const CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                           .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 } };
        CUmemGenericAllocationHandle handle;

        OK(cu.cuCtxSetCurrent(context));
        OK(cu.cuMemCreate(&handle, 2 * MIB, &prop, 0));
}

static void destroy_context(CUcontext context)
{
        OK(cu.own_cuCtxDestroy_v2(context));
}

/* A long call of one thread stops none of another one, and the other way round. The driver does not return from
 * cuMemCreate(), and not from the second end of a context. */
void end_contexts_beside_calls(void)
{
        static struct call calls[] = { { create_memory, "cuMemCreate", 1, NULL },
                                       { destroy_context, "cuDevicePrimaryCtxRelease_v2", 2, NULL } };
        CUcontext contexts[3];

        alarm(120); /* else it would wait for ten minutes */
        OK(cu.cuInit(0));
        for (int i = 0; i < 3; i++)
                OK(cu.own_cuCtxCreate_v2(&contexts[i], 0, 0));
        calls[0].context = use_gpu(0);
        calls[1].context = contexts[1];
        begin_call(&calls[0]);
        OK(cu.own_cuCtxDestroy_v2(contexts[0]));
        begin_call(&calls[1]);
        OK(cu.cuMemFree_v2(alloc(MIB)));
        OK(cu.own_cuCtxDestroy_v2(contexts[2]));
        _exit(0);
}

/* ---- two GPUs -------------------------------------------------------------------- */

static unsigned long long access_of(CUdevice device, CUdeviceptr p)
{
        const CUmemLocation where = { CU_MEM_LOCATION_TYPE_DEVICE, device };
        unsigned long long flags = 99;

        OK(cu.cuMemGetAccess(&flags, &where, p));
        return flags;
}

/* Allocates, until the other thread has reset the other GPU. */
static _Atomic bool is_reset;

static void *use_other_gpu(void *context)
{
        OK(cu.cuCtxSetCurrent(context));
        for (unsigned n = 0; n < 100 || !atomic_load(&is_reset); n++) {
                CUdeviceptr p = alloc(n % 2 ? 1000 : 3 * MIB);

                OK(cu.cuMemsetD8_v2(p, 1, 1000));
                OK(cu.cuMemFree_v2(p));
        }
        return NULL;
}

/* What one GPU has stays when another one is reset, also while a thread uses it. */
void reset_one_of_two(void)
{
        CUcontext second;
        CUdeviceptr p, q;
        unsigned char byte;
        pthread_t thread;

        OK(cu.cuInit(0));
        second = use_gpu(1);
        q = alloc(4 * MIB);
        OK(cu.cuMemsetD8_v2(q, 7, 4 * MIB));
        CHECK(pthread_create(&thread, NULL, use_other_gpu, second) == 0);
        for (int i = 0; i < 10; i++) {
                use_gpu(0);
                CHECK(free_bytes() == total_bytes());
                p = alloc(40 * MIB);
                holds_bytes(p, 1000, 5);
                OK(cu.cuDevicePrimaryCtxReset_v2(0));
        }
        atomic_store(&is_reset, true);
        CHECK(pthread_join(thread, NULL) == 0);
        OK(cu.cuCtxSetCurrent(second));
        OK(cu.cuMemcpyDtoH_v2(&byte, q + 4 * MIB - 1, 1));
        CHECK(byte == 7 && free_bytes() <= total_bytes() - 4 * MIB);
        OK(cu.cuMemFree_v2(q));
        CHECK(free_bytes() == total_bytes());
}

/* Which the proxy passes on. */
static CUmemoryPool default_pool(CUdevice device)
{
        void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
        CUresult (*get)(CUmemoryPool * ret_pool, CUdevice device);
        CUmemoryPool pool;

        CHECK(library);
        *(void **)&get = dlsym(library, "cuDeviceGetDefaultMemPool");
        CHECK(get);
        OK(get(&pool, device));
        return pool;
}

/* Another GPU gets access where it is asked for, and until a reset. */
void have_peers(bool has_fds)
{
        const CUmemAccessDesc access = { { CU_MEM_LOCATION_TYPE_DEVICE, 0 },
                                         CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
        CUcontext first, second;
        CUdeviceptr p[2], q;

        OK(cu.cuInit(0));
        second = use_gpu(1);
        q = alloc(2 * MIB);
        first = use_gpu(0);
        p[0] = alloc(4 * MIB);
        if (has_fds)
                CHECK(access_of(0, p[0]) == 3 && access_of(1, p[0]) == 0 && access_of(0, q) == 0);
        OK(cu.cuCtxSetCurrent(second));
        OK(cu.cuCtxEnablePeerAccess(first, 0));
        GIVES((CUresult)704, cu.cuCtxEnablePeerAccess(first, 0));
        OK(cu.cuCtxSetCurrent(first));
        p[1] = alloc(16 * MIB);
        for (int i = 0; has_fds && i < 2; i++)
                CHECK(access_of(0, p[i]) == 3 && access_of(1, p[i] + 2 * MIB) == 3);
        if (has_fds)
                CHECK(access_of(0, q) == 0);
        OK(cu.own_cuMemPoolSetAccess(default_pool(1), &access, 1));
        if (has_fds)
                CHECK(access_of(0, q) == 3);
        OK(cu.cuMemFree_v2(q));
        OK(cu.cuDevicePrimaryCtxReset_v2(0));
        use_gpu(0);
        p[0] = alloc(4 * MIB);
        if (has_fds)
                CHECK(access_of(1, p[0]) == 0);
}

/* The driver's refusal is the program's. */
void have_no_peers(void)
{
        CUcontext first;

        OK(cu.cuInit(0));
        first = use_gpu(0);
        (void)alloc(4 * MIB);
        use_gpu(1);
        GIVES(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, cu.cuCtxEnablePeerAccess(first, 0));
}

/* So it is when only memory of bfcd is refused; then the driver gives no access to its own either. */
void have_refused_peers(void)
{
        CUcontext first;

        OK(cu.cuInit(0));
        first = use_gpu(0);
        (void)alloc(2 * MIB);
        use_gpu(1);
        GIVES(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, cu.cuCtxEnablePeerAccess(first, 0));
        GIVES((CUresult)705, cu.cuCtxDisablePeerAccess(first));
        OK(cu.cuCtxEnablePeerAccess(first, 0));
}
