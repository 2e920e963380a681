/* Conformance: before and after cuInit, finding functions, devices, contexts.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/conformance.h"

#include <pthread.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

TEST(nothing_works_before_init)
{
        const char *why;
        size_t n_bytes;
        CUcontext c;
        int n;

        ck_assert_int_eq(gpu_load(&why), 0);
        IS(CUDA_ERROR_NOT_INITIALIZED, cu.cuDeviceGetCount(&n));
        IS(CUDA_ERROR_NOT_INITIALIZED, cu.cuDevicePrimaryCtxRetain(&c, 0));
        IS(CUDA_ERROR_NOT_INITIALIZED, cu.cuMemGetInfo_v2(&n_bytes, &n_bytes));
        OK(cu.cuDriverGetVersion(&n));
        ck_assert_int_ge(n, 11000);
        IS(CUDA_ERROR_INVALID_VALUE, cu.cuInit(1));
        OK(cu.cuInit(0));
        OK(cu.cuInit(0));
        OK(cu.cuDeviceGetCount(&n));
        ck_assert_int_ge(n, 1);
}

FIXTURE(driver, conformance_setup, conformance_teardown);

TEST(a_forked_child_has_no_driver)
{
        int status;
        pid_t pid = fork();

        if (pid == 0) {
                int n;

                _exit(cu.cuDeviceGetCount(&n) == CUDA_ERROR_NOT_INITIALIZED &&
                                      cu.cuInit(0) == CUDA_ERROR_NOT_INITIALIZED
                              ? 0
                              : 1);
        }
        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        ck_assert_int_eq(status, 0);
        OK(cu.cuCtxSynchronize()); /* and the parent's is whole */
}

TEST(functions_by_name_and_version)
{
        CUdriverProcAddressQueryResult status;
        void *p = &p;
        int version;

        if (!cu.cuGetProcAddress_v2)
                return;
        OK(cu.cuGetProcAddress_v2("cuMemAlloc", &p, 3020, 0, &status));
        ck_assert_int_eq((int)status, CU_GET_PROC_ADDRESS_SUCCESS);
        ck_assert_ptr_nonnull(p);
        OK(cu.cuGetProcAddress_v2("cuNoSuchFunction", &p, 12000, 0, &status));
        ck_assert_int_eq((int)status, CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
        ck_assert_ptr_null(p);
        p = &p;
        OK(cu.cuGetProcAddress_v2("cuMemCreate", &p, 10010, 0, &status));
        ck_assert_int_eq((int)status, CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);
        ck_assert_ptr_null(p);
        OK(cu.cuDriverGetVersion(&version));
        IS(CUDA_ERROR_INVALID_VALUE, cu.cuGetProcAddress_v2("cuInit", &p, version + 1000, 0, &status));
}

TEST(errors_have_names)
{
        const char *text = NULL;

        OK(cu.cuGetErrorName(CUDA_ERROR_OUT_OF_MEMORY, &text));
        ck_assert_str_eq(text, "CUDA_ERROR_OUT_OF_MEMORY");
        OK(cu.cuGetErrorString(CUDA_ERROR_OUT_OF_MEMORY, &text));
        ck_assert_str_eq(text, "out of memory");
        IS(CUDA_ERROR_INVALID_VALUE, cu.cuGetErrorName((CUresult)123456, &text));
}

TEST(devices_describe_themselves)
{
        static const CUuuid none;
        char name[128] = "", pci[16] = "";
        CUuuid uuid = none;
        size_t n_bytes = 0;
        CUdevice d;
        int n;

        OK(cu.cuDeviceGetCount(&n));
        IS(CUDA_ERROR_INVALID_DEVICE, cu.cuDeviceGet(&d, n));
        IS(CUDA_ERROR_INVALID_DEVICE, cu.cuDeviceGet(&d, -1));
        IS(CUDA_ERROR_INVALID_DEVICE, cu.cuDeviceTotalMem_v2(&n_bytes, n));
        OK(cu.cuDeviceGetName(name, sizeof(name), device));
        ck_assert_uint_gt(strlen(name), 0);
        OK(cu.cuDeviceGetUuid_v2(&uuid, device));
        ck_assert_int_ne(memcmp(&uuid, &none, sizeof(uuid)), 0);
        OK(cu.cuDeviceTotalMem_v2(&n_bytes, device));
        ck_assert_uint_ge(n_bytes, gpu_n_free());
        OK(cu.cuDeviceGetPCIBusId(pci, sizeof(pci), device));
        ck_assert_uint_ge(strlen(pci), 7);
        ck_assert_int_eq(gpu_attribute(device, CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING), 1);
        IS(CUDA_ERROR_INVALID_VALUE, cu.cuDeviceGetAttribute(&n, (CUdevice_attribute)9999, device));
}

TEST(a_primary_context_is_counted)
{
        unsigned int flags;
        CUcontext again;
        int is_active;

        OK(cu.cuDevicePrimaryCtxRetain(&again, device));
        ck_assert_ptr_eq(again, context);
        OK(cu.cuDevicePrimaryCtxRelease_v2(device));
        OK(cu.cuDevicePrimaryCtxGetState(device, &flags, &is_active));
        ck_assert_int_eq(is_active, 1);
        OK(cu.cuCtxSynchronize());
        OK(cu.cuDevicePrimaryCtxRelease_v2(device));
        OK(cu.cuDevicePrimaryCtxGetState(device, &flags, &is_active));
        ck_assert_int_eq(is_active, 0);
        REFUSED(cu.cuCtxSynchronize());
        REFUSED(cu.cuDevicePrimaryCtxRelease_v2(device));
        OK(cu.cuDevicePrimaryCtxRetain(&context, device));
        OK(cu.cuCtxSetCurrent(context));
        OK(cu.cuCtxSynchronize());
}

static void *in_another_thread(void *data)
{
        CUcontext c = context;
        CUdeviceptr p;
        CUdevice d;

        (void)data;
        OK(cu.cuCtxGetCurrent(&c));
        ck_assert_ptr_null(c);
        IS(CUDA_ERROR_INVALID_CONTEXT, cu.cuMemAlloc_v2(&p, 4096));
        IS(CUDA_ERROR_INVALID_CONTEXT, cu.cuCtxGetDevice(&d));
        IS(CUDA_ERROR_INVALID_CONTEXT, cu.cuCtxSynchronize());
        OK(cu.cuCtxSetCurrent(context));
        OK(cu.cuCtxGetDevice(&d));
        ck_assert_int_eq(d, device);
        return NULL;
}

TEST(each_thread_has_its_own_current_context)
{
        pthread_t thread;

        ck_assert_int_eq(pthread_create(&thread, NULL, in_another_thread, NULL), 0);
        pthread_join(thread, NULL);
        OK(cu.cuCtxSynchronize());
}

TEST(current_contexts_are_a_stack)
{
        CUcontext c = NULL;

        OK(cu.cuCtxPushCurrent_v2(context));
        OK(cu.cuCtxPopCurrent_v2(&c));
        ck_assert_ptr_eq(c, context);
        OK(cu.cuCtxPopCurrent_v2(&c));
        ck_assert_ptr_eq(c, context);
        OK(cu.cuCtxGetCurrent(&c));
        ck_assert_ptr_null(c);
        IS(CUDA_ERROR_INVALID_CONTEXT, cu.cuCtxPopCurrent_v2(&c));
        REFUSED(cu.cuCtxPushCurrent_v2(NULL));
        OK(cu.cuCtxSetCurrent(context));
        OK(cu.cuCtxSetCurrent(NULL));
        OK(cu.cuCtxGetCurrent(&c));
        ck_assert_ptr_null(c);
        OK(cu.cuCtxSetCurrent(context));
}

LOOP_TEST(two_devices_are_two, machine.has_two_devices)
{
        CUuuid a, b;
        CUcontext other;
        int can;

        OK(cu.cuDeviceGetUuid_v2(&a, 0));
        OK(cu.cuDeviceGetUuid_v2(&b, 1));
        ck_assert_int_ne(memcmp(&a, &b, sizeof(a)), 0);
        OK(cu.cuDevicePrimaryCtxRetain(&other, 1));
        ck_assert_ptr_ne(other, context);
        OK(cu.cuDevicePrimaryCtxRelease_v2(1));
        OK(cu.cuDeviceCanAccessPeer(&can, 0, 1));
        OK(cu.cuDeviceCanAccessPeer(&can, 0, 0));
        ck_assert_int_eq(can, 0);
}

/* The least that threads of bfcd and its library have: what each of them calls. */
static void *call_what_they_call(void *ret)
{
        CUmemGenericAllocationHandle handle;
        CUmemAllocationProp prop = gpu_prop(device);
        CUdeviceptr at, there;
        CUcontext top;
        size_t n;

        *(bool *)ret = cu.cuCtxPushCurrent_v2(context) == CUDA_SUCCESS &&
                       cu.cuMemGetInfo_v2(&n, &n) == CUDA_SUCCESS &&
                       cu.cuMemAlloc_v2(&at, 2 * MIB) == CUDA_SUCCESS &&
                       cu.cuMemsetD8_v2(at, 0, 2 * MIB) == CUDA_SUCCESS &&
                       cu.cuCtxSynchronize() == CUDA_SUCCESS && cu.cuMemFree_v2(at) == CUDA_SUCCESS;
        if (cu.cuMemCreate(&handle, 2 * MIB, &prop, 0) == CUDA_SUCCESS &&
            cu.cuMemAddressReserve(&there, 2 * MIB, 0, 0, 0) ==
                    CUDA_SUCCESS) { /* where there is such memory */
                cu.cuMemMap(there, 2 * MIB, 0, handle, 0);
                cu.cuMemUnmap(there, 2 * MIB);
                cu.cuMemAddressFree(there, 2 * MIB);
                cu.cuMemRelease(handle);
        }
        cu.cuCtxPopCurrent_v2(&top);
        return NULL;
}

TEST(calls_fit_into_a_stack_of_8_mib)
{
        pthread_attr_t attr;
        pthread_t thread;
        bool ok = false;

        ck_assert_int_eq(pthread_attr_init(&attr), 0);
        ck_assert_int_eq(pthread_attr_setstacksize(&attr, 8 * MIB), 0);
        ck_assert_int_eq(pthread_create(&thread, &attr, call_what_they_call, &ok), 0);
        ck_assert_int_eq(pthread_join(thread, NULL), 0);
        pthread_attr_destroy(&attr);
        ck_assert(ok);
}
