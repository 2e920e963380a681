/* The driver itself: initialising, finding functions, describing devices.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A process's devices are those that CUDA_VISIBLE_DEVICES leaves it, in that
 * order. None at all is an error of cuInit, as on a machine without a GPU.
 * FAKE_CUDA_ATTRIBUTES ("20=3,1/102=0": number=value, for one device or all)
 * overrides what a device says of itself, and is believed by the fake too. */
#include "tests/fake_cuda/fake.h"

#include <stdio.h>
#include <string.h>

API CUresult cuInit(unsigned int flags)
{
        ENTER(cuInit);
        if (flags != 0)
                return CUDA_ERROR_INVALID_VALUE;
        if (fake.n_visible == 0)
                return CUDA_ERROR_NO_DEVICE;
        fake_set_initialised();
        return CUDA_SUCCESS;
}

API CUresult cuDriverGetVersion(int *ret_version)
{
        ENTER(cuDriverGetVersion);
        if (!ret_version)
                return CUDA_ERROR_INVALID_VALUE;
        *ret_version = fake.version;
        return CUDA_SUCCESS;
}

/* ---- finding functions --------------------------------------------------- */

#define F(symbol, base, version, arguments) (void (*)(void)) symbol,
static void (*const addresses[N_FUNCTIONS])(void) = {
#include "device/cuda_functions.h"
};
#undef F

static bool is_missing(const char *name)
{
        const char *list = fake.missing;
        size_t n = strlen(name);

        while (list && *list) {
                if (strncmp(list, name, n) == 0 && (list[n] == ',' || list[n] == '\0'))
                        return true;
                list = strchr(list, ',');
                if (list)
                        list++;
        }
        return false;
}

static CUdriverProcAddressQueryResult find(const char *name, int version, void **ret)
{
        *ret = NULL;
        for (int i = 0; i < N_FUNCTIONS && !is_missing(name); i++) {
                if (strcmp(fake_functions[i].base, name) != 0)
                        continue;
                if (fake_functions[i].version > version)
                        return CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
                memcpy(ret, &addresses[i], sizeof(*ret)); /* a function is no object to C */
                return CU_GET_PROC_ADDRESS_SUCCESS;
        }
        return CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
}

/* What it does not have is no error: success, and a NULL pointer. */
API CUresult cuGetProcAddress_v2(const char *name, void **ret_function, int version, cuuint64_t flags,
                                 CUdriverProcAddressQueryResult *ret_status)
{
        CUdriverProcAddressQueryResult status;

        ENTER(cuGetProcAddress_v2);
        if (!name || !ret_function || flags > 3 || version > fake.version)
                return CUDA_ERROR_INVALID_VALUE;
        status = find(name, version, ret_function);
        if (!*ret_function && !is_missing(name) && (*ret_function = fake_extra(name, version, flags & 2)))
                status = CU_GET_PROC_ADDRESS_SUCCESS;
        if (ret_status)
                *ret_status = status;
        return CUDA_SUCCESS;
}

API CUresult cuGetProcAddress(const char *name, void **ret_function, int version, cuuint64_t flags)
{
        CUresult r = cuGetProcAddress_v2(name, ret_function, version, flags, NULL);

        return r == CUDA_SUCCESS && !*ret_function ? CUDA_ERROR_NOT_FOUND : r;
}

/* ---- error texts --------------------------------------------------------- */

static const struct {
        CUresult error;
        const char *name, *text;
} errors[] = {
#define E(name, text)                                                                                        \
        {                                                                                                    \
                name, #name, text                                                                            \
        }
        E(CUDA_SUCCESS, "no error"),
        E(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
        E(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
        E(CUDA_ERROR_NOT_INITIALIZED, "initialization error"),
        E(CUDA_ERROR_DEINITIALIZED, "driver shutting down"),
        E(CUDA_ERROR_STUB_LIBRARY, "CUDA driver is a stub library"),
        E(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
        E(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"),
        E(CUDA_ERROR_INVALID_CONTEXT, "invalid device context"),
        E(CUDA_ERROR_MAP_FAILED, "mapping of buffer object failed"),
        E(CUDA_ERROR_ALREADY_MAPPED, "resource already mapped"),
        E(CUDA_ERROR_ECC_UNCORRECTABLE, "uncorrectable ECC error encountered"),
        E(CUDA_ERROR_CONTAINED, "an exception occurred that was contained by the GPU"),
        E(CUDA_ERROR_OPERATING_SYSTEM, "OS call failed or operation not supported on this OS"),
        E(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"),
        E(CUDA_ERROR_NOT_FOUND, "named symbol not found"),
        E(CUDA_ERROR_NOT_READY, "device not ready"),
        E(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
        E(CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed"),
        E(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure"),
        E(CUDA_ERROR_TENSOR_MEMORY_LEAK, "tensor memory was not freed by the kernel"),
        E(CUDA_ERROR_NOT_PERMITTED, "operation not permitted"),
        E(CUDA_ERROR_NOT_SUPPORTED, "operation not supported"),
        E(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing"),
        E(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "operation failed due to a previous error during capture"),
        E(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
          "operation would make the legacy stream depend on a capturing blocking stream"),
        E(CUDA_ERROR_CAPTURED_EVENT,
          "operation not permitted on an event last recorded in a capturing stream"),
        E(CUDA_ERROR_UNKNOWN, "unknown error"),
#undef E
};

static CUresult error_text(CUresult error, bool want_name, const char **ret)
{
        if (!ret)
                return CUDA_ERROR_INVALID_VALUE;
        *ret = NULL;
        for (size_t i = 0; i < sizeof(errors) / sizeof(errors[0]); i++)
                if (errors[i].error == error)
                        *ret = want_name ? errors[i].name : errors[i].text;
        return *ret ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuGetErrorName(CUresult error, const char **ret_text)
{
        ENTER(cuGetErrorName);
        return error_text(error, true, ret_text);
}

API CUresult cuGetErrorString(CUresult error, const char **ret_text)
{
        ENTER(cuGetErrorString);
        return error_text(error, false, ret_text);
}

/* ---- devices ------------------------------------------------------------- */

API CUresult cuDeviceGetCount(int *ret_n)
{
        ENTER(cuDeviceGetCount);
        if (!ret_n)
                return CUDA_ERROR_INVALID_VALUE;
        *ret_n = (int)fake.n_visible;
        return CUDA_SUCCESS;
}

API CUresult cuDeviceGet(CUdevice *ret_device, int ordinal)
{
        ENTER(cuDeviceGet);
        if (!ret_device)
                return CUDA_ERROR_INVALID_VALUE;
        if (!fake_device_get(ordinal))
                return CUDA_ERROR_INVALID_DEVICE;
        *ret_device = ordinal;
        return CUDA_SUCCESS;
}

API CUresult cuDeviceGetName(char *ret_name, int n_bytes, CUdevice device)
{
        const struct fake_device *d;

        ENTER(cuDeviceGetName);
        d = fake_device_get(device);
        if (!ret_name || n_bytes <= 0)
                return CUDA_ERROR_INVALID_VALUE;
        if (!d)
                return CUDA_ERROR_INVALID_DEVICE;
        snprintf(ret_name, (size_t)n_bytes, "Fake CUDA Device %u%s", d->index, d->is_mig ? " MIG 1g" : "");
        return CUDA_SUCCESS;
}

API CUresult cuDeviceGetUuid_v2(CUuuid *ret_uuid, CUdevice device)
{
        const struct fake_device *d;

        ENTER(cuDeviceGetUuid_v2);
        d = fake_device_get(device);
        if (!ret_uuid)
                return CUDA_ERROR_INVALID_VALUE;
        if (!d)
                return CUDA_ERROR_INVALID_DEVICE;
        *ret_uuid = d->uuid;
        return CUDA_SUCCESS;
}

API CUresult cuDeviceTotalMem_v2(size_t *ret_n_bytes, CUdevice device)
{
        const struct fake_device *d;

        ENTER(cuDeviceTotalMem_v2);
        d = fake_device_get(device);
        if (!ret_n_bytes)
                return CUDA_ERROR_INVALID_VALUE;
        if (!d)
                return CUDA_ERROR_INVALID_DEVICE;
        *ret_n_bytes = d->n_bytes;
        return CUDA_SUCCESS;
}

/* "1/102=0" or "102=0" in the list; the last one counts. */
static bool attribute_overridden(const struct fake_device *d, int which, int *ret)
{
        bool is_found = false;

        for (const char *at = fake.attributes; at && *at;) {
                unsigned int index, number;
                int value, n_read = 0;

                if (sscanf(at, "%u/%u=%d%n", &index, &number, &value, &n_read) != 3) {
                        index = d->index;
                        if (sscanf(at, "%u=%d%n", &number, &value, &n_read) != 2)
                                fake_die("FAKE_CUDA_ATTRIBUTES: cannot read \"%s\"", at);
                }
                if (index == d->index && number == (unsigned int)which) {
                        *ret = value;
                        is_found = true;
                }
                at += n_read;
                if (*at == ',')
                        at++;
        }
        return is_found;
}

/* What frameworks ask for before they launch kernels. What is not in the table is 0 up to the last attribute of
 * CUDA 13, as of a GPU that lacks it. */
static int attribute_of_kernels(int which, int *ret)
{
        static const struct {
                int which, value;
        } known[] = {
                { 2, 1024 },                                           /* threads of a block: x, y, z */
                { 3, 1024 },       { 4, 64 },        { 5, INT32_MAX }, /* blocks of a grid: x, y, z */
                { 6, 65535 },      { 7, 65535 },     { 8, 48 << 10 },  /* shared memory of a block */
                { 9, 64 << 10 },                                       /* constant memory */
                { 10, 32 },                                            /* threads of a warp */
                { 11, INT32_MAX },                                     /* pitch */
                { 12, 65536 },                                         /* registers of a block */
                { 13, 1000000 },                                       /* kHz */
                { 14, 512 },                                           /* alignment of textures */
                { 31, 1 },                                             /* concurrent kernels */
                { 36, 1000000 },                                       /* kHz, and bits of the memory bus */
                { 37, 5120 },      { 38, 1 << 20 },                    /* bytes of the cache */
                { 39, 2048 },                                          /* threads of a multiprocessor */
                { 40, 1 },                                             /* copy engines */
                { 81, 96 << 10 },                    /* shared memory and registers of a multiprocessor */
                { 82, 65536 },     { 97, 48 << 10 }, /* shared memory that a kernel can opt in to */
        };

        if (which < 1 || which > 149)
                return -1;
        *ret = 0;
        for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++)
                if (known[i].which == which)
                        *ret = known[i].value;
        return 0;
}

/* What a usual GPU of a server says: all that can be shared can be shared. */
static int attribute_usual(const struct fake_device *d, CUdevice_attribute which, int *ret)
{
        switch (which) {
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
                *ret = 1024;
                return 0;
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
        case CU_DEVICE_ATTRIBUTE_ECC_ENABLED:
        case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED:
                *ret = 1;
                return 0;
        case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
                *ret = (int)d->index + 1;
                return 0;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
                *ret = 9;
                return 0;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_MODE: /* CU_COMPUTEMODE_DEFAULT */
        case CU_DEVICE_ATTRIBUTE_INTEGRATED:
        case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID:
        case CU_DEVICE_ATTRIBUTE_TCC_DRIVER:
        case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID:
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
        case CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS:
        case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
                *ret = 0;
                return 0;
        case CU_DEVICE_ATTRIBUTE_MPS_ENABLED:
                *ret = fake.is_mps_client;
                return 0;
        default:
                return attribute_of_kernels((int)which, ret);
        }
}

int fake_device_attribute(const struct fake_device *d, CUdevice_attribute which)
{
        int value = 0;

        if (!attribute_overridden(d, (int)which, &value) && attribute_usual(d, which, &value) < 0)
                return -1;
        return value;
}

API CUresult cuDeviceGetAttribute(int *ret_value, CUdevice_attribute which, CUdevice device)
{
        const struct fake_device *d;
        int value;

        ENTER(cuDeviceGetAttribute);
        d = fake_device_get(device);
        if (!ret_value)
                return CUDA_ERROR_INVALID_VALUE;
        if (!d)
                return CUDA_ERROR_INVALID_DEVICE;
        value = fake_device_attribute(d, which);
        if (value < 0)
                return CUDA_ERROR_INVALID_VALUE;
        *ret_value = value;
        return CUDA_SUCCESS;
}

API CUresult cuDeviceGetPCIBusId(char *ret_text, int n_bytes, CUdevice device)
{
        const struct fake_device *d;

        ENTER(cuDeviceGetPCIBusId);
        d = fake_device_get(device);
        if (!ret_text || n_bytes < 13)
                return CUDA_ERROR_INVALID_VALUE;
        if (!d)
                return CUDA_ERROR_INVALID_DEVICE;
        snprintf(ret_text, (size_t)n_bytes, "0000:%02X:00.0", d->index + 1);
        return CUDA_SUCCESS;
}

API CUresult cuDeviceCanAccessPeer(int *ret_can, CUdevice device, CUdevice peer)
{
        ENTER(cuDeviceCanAccessPeer);
        if (!ret_can)
                return CUDA_ERROR_INVALID_VALUE;
        if (!fake_device_get(device) || !fake_device_get(peer))
                return CUDA_ERROR_INVALID_DEVICE;
        *ret_can = device != peer && fake.peer_access;
        return CUDA_SUCCESS;
}
