/* Loading the driver; see cuda_driver.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Functions are asked for by name and version where the driver can be asked so,
 * because a newer driver may have another function behind the bare symbol. Its
 * answer "success, NULL" means that it has none. */
#include "device/cuda_driver.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef CUresult (*proc_address_fn)(const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *);
typedef CUresult (*proc_address_old_fn)(const char *, void **, int, cuuint64_t);

/* Written once, by the thread that loads. */
static struct {
        struct cuda_driver functions;
        int result;
        char sentence[256];
        pid_t loaded_by;
        CUresult (*charge_context)(CUdevice device); /* the proxy's; NULL: there is none, or an older one */
        bool is_loaded;                              /* set last; atomic */
} driver;

/* ---- loading ------------------------------------------------------------- */

static void *driver_function(void *library, bool by_symbol, const char *symbol, const char *base, int version)
{
        CUdriverProcAddressQueryResult status;
        proc_address_old_fn ask_old;
        proc_address_fn ask;
        void *found = NULL;

        if (by_symbol)
                return dlsym(library, symbol);
        *(void **)&ask = dlsym(library, "cuGetProcAddress_v2");
        *(void **)&ask_old = dlsym(library, "cuGetProcAddress");
        if (ask && ask(base, &found, version, 0, &status) == CUDA_SUCCESS && found)
                return found;
        if (!ask && ask_old && ask_old(base, &found, version, 0) == CUDA_SUCCESS && found)
                return found;
        return dlsym(library, symbol);
}

/* Drivers before CUDA 12.0 have no ids of streams. */
static bool is_optional(const char *symbol)
{
        return strcmp(symbol, "cuStreamGetId") == 0;
}

/* Whether all of them are there; else the name of one that is not. */
static bool driver_functions(void *library, bool by_symbol, struct cuda_driver *ret, const char **ret_missing)
{
        const char *missing = NULL;

#define CUDA_FUNCTIONS_OF_BFCD
#define F(symbol, base, version, arguments)                                                                  \
        *(void **)&ret->symbol = driver_function(library, by_symbol, #symbol, base, version);                \
        if (!ret->symbol && !is_optional(#symbol))                                                           \
                missing = #symbol;
#include "device/cuda_functions.h"
#undef F
#undef CUDA_FUNCTIONS_OF_BFCD
        if (missing)
                *ret_missing = missing;
        return !missing;
}

static void say_why_not_started(const struct cuda_driver *cu, CUresult r)
{
        const char *visible = getenv("CUDA_VISIBLE_DEVICES");
        char text[160];

        if (r == CUDA_ERROR_STUB_LIBRARY) {
                snprintf(driver.sentence, sizeof(driver.sentence),
                         "no CUDA driver: the libcuda.so.1 found is the toolkit's stub");
        } else if (r == CUDA_ERROR_NO_DEVICE && visible && strncmp(visible, "MIG-", 4) == 0) {
                snprintf(driver.sentence, sizeof(driver.sentence),
                         "the CUDA driver finds no such MIG device: nvidia-smi -L lists all devices");
        } else if (r == CUDA_ERROR_NO_DEVICE) {
                snprintf(driver.sentence, sizeof(driver.sentence), "the CUDA driver finds no GPU");
        } else {
                cuda_driver_describe(cu, r, text, sizeof(text));
                snprintf(driver.sentence, sizeof(driver.sentence),
                         "the CUDA driver cannot be initialized: %s", text);
        }
}

/* In a program that runs with our proxy (integrations/preload/) the name leads to that, which has loaded the driver itself. The
 * driver may take the proxy's functions for its own when it is asked for one by name, as both have the same symbols:
 * so they are found by symbol then. */
static void *open_library(bool *ret_is_behind_proxy)
{
        void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
        void *(*real_driver)(void) = NULL;

        if (library)
                *(void **)&real_driver = dlsym(library, "bfc_preload_driver");
        if (real_driver)
                *(void **)&driver.charge_context = dlsym(library, "bfc_preload_charge_context");
        *ret_is_behind_proxy = real_driver;
        return real_driver ? real_driver() : library;
}

static void driver_load(void)
{
        const char *missing, *why;
        bool is_behind_proxy;
        void *library;
        CUresult r;

        driver.loaded_by = getpid();
        driver.result = -ENODEV;
        library = open_library(&is_behind_proxy);
        if (!library) {
                why = dlerror();
                snprintf(driver.sentence, sizeof(driver.sentence), "no CUDA driver: %s",
                         why ? why : "libcuda.so.1 cannot be loaded");
                return;
        }
        if (!driver_functions(library, is_behind_proxy, &driver.functions, &missing)) {
                snprintf(driver.sentence, sizeof(driver.sentence), "the CUDA driver is too old: it has no %s",
                         missing);
                return;
        }
        r = driver.functions.cuInit(0);
        if (r != CUDA_SUCCESS) {
                say_why_not_started(&driver.functions, r);
                return;
        }
        driver.result = 0;
        __atomic_store_n(&driver.is_loaded, true, __ATOMIC_RELEASE);
}

static bool is_forked_child(void)
{
        return driver.loaded_by != getpid();
}

int cuda_driver_get(const struct cuda_driver **ret, const char **ret_sentence)
{
        static pthread_once_t once = PTHREAD_ONCE_INIT;

        pthread_once(&once, driver_load);
        if (driver.result == 0 && is_forked_child()) {
                *ret_sentence = "this process was forked after CUDA was used, and CUDA does not work in it";
                return -ENODEV;
        }
        if (driver.result < 0) {
                *ret_sentence = driver.sentence;
                return driver.result;
        }
        *ret = &driver.functions;
        return 0;
}

CUresult cuda_driver_charge_context(CUdevice device)
{
        return driver.charge_context ? driver.charge_context(device) : CUDA_SUCCESS;
}

/* Another library of the process has initialised it: only then a device can be counted. */
static bool is_used_by_others(void)
{
        void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
        CUresult (*count)(int *ret_n) = NULL;
        bool is = false;
        int n;

        if (!library)
                return false;
        *(void **)&count = dlsym(library, "cuDeviceGetCount");
        is = count && count(&n) == CUDA_SUCCESS;
        dlclose(library);
        return is;
}

int cuda_driver_get_used(const struct cuda_driver **ret)
{
        const char *why;

        if (!__atomic_load_n(&driver.is_loaded, __ATOMIC_ACQUIRE) && !is_used_by_others())
                return -ENODEV;
        return cuda_driver_get(ret, &why);
}

/* ---- errors -------------------------------------------------------------- */

bool cuda_driver_broke_context(CUresult result)
{
        switch (result) {
        case CUDA_ERROR_ILLEGAL_ADDRESS:
        case CUDA_ERROR_LAUNCH_TIMEOUT:
        case CUDA_ERROR_CONTEXT_IS_DESTROYED:
        case CUDA_ERROR_ASSERT:
        case CUDA_ERROR_HARDWARE_STACK_ERROR:
        case CUDA_ERROR_ILLEGAL_INSTRUCTION:
        case CUDA_ERROR_MISALIGNED_ADDRESS:
        case CUDA_ERROR_INVALID_ADDRESS_SPACE:
        case CUDA_ERROR_INVALID_PC:
        case CUDA_ERROR_LAUNCH_FAILED:
        case CUDA_ERROR_TENSOR_MEMORY_LEAK:
        case CUDA_ERROR_CONTAINED: /* ends this process's work, not others' */
        case CUDA_ERROR_MPS_CLIENT_TERMINATED:
        case CUDA_ERROR_EXTERNAL_DEVICE:
                return true;
        default:
                return false;
        }
}

int cuda_driver_errno(CUresult result)
{
        if (cuda_driver_broke_context(result))
                return -ENODEV; /* to this process */
        switch (result) {
        case CUDA_SUCCESS:
                return 0;
        case CUDA_ERROR_OUT_OF_MEMORY:
        case CUDA_ERROR_MAP_FAILED:
                return -ENOMEM;
        case CUDA_ERROR_INVALID_VALUE:
        case CUDA_ERROR_INVALID_HANDLE:
        case CUDA_ERROR_INVALID_CONTEXT:
        case CUDA_ERROR_NOT_FOUND:
                return -EINVAL;
        case CUDA_ERROR_NOT_SUPPORTED:
        case CUDA_ERROR_NOT_PERMITTED:
                return -ENOTSUP;
        /* There is no driver, or no such device. */
        case CUDA_ERROR_NOT_INITIALIZED:
        case CUDA_ERROR_DEINITIALIZED:
        case CUDA_ERROR_STUB_LIBRARY:
        case CUDA_ERROR_NO_DEVICE:
        case CUDA_ERROR_INVALID_DEVICE:
        case CUDA_ERROR_SYSTEM_NOT_READY:
        case CUDA_ERROR_SYSTEM_DRIVER_MISMATCH:
        /* The device was lost. */
        case CUDA_ERROR_DEVICE_UNAVAILABLE:
        case CUDA_ERROR_ECC_UNCORRECTABLE:
        case CUDA_ERROR_NVLINK_UNCORRECTABLE:
        case CUDA_ERROR_UNKNOWN:
                return -ENODEV;
        case CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED:
        case CUDA_ERROR_STREAM_CAPTURE_INVALIDATED:
        case CUDA_ERROR_STREAM_CAPTURE_MERGE:
        case CUDA_ERROR_STREAM_CAPTURE_UNMATCHED:
        case CUDA_ERROR_STREAM_CAPTURE_UNJOINED:
        case CUDA_ERROR_STREAM_CAPTURE_ISOLATION:
        case CUDA_ERROR_STREAM_CAPTURE_IMPLICIT:
        case CUDA_ERROR_CAPTURED_EVENT:
        case CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD:
                return -EBUSY;
        default:
                return -EIO;
        }
}

int cuda_driver_owner_errno(CUresult result)
{
        return cuda_driver_broke_context(result) ? -ENOTRECOVERABLE : cuda_driver_errno(result);
}

void cuda_driver_describe(const struct cuda_driver *cu, CUresult result, char *ret, size_t n_bytes)
{
        const char *name = NULL, *text = NULL;

        if (cu->cuGetErrorName(result, &name) != CUDA_SUCCESS || !name ||
            cu->cuGetErrorString(result, &text) != CUDA_SUCCESS || !text)
                snprintf(ret, n_bytes, "CUDA error %d", (int)result);
        else
                snprintf(ret, n_bytes, "%s (%s)", text, name);
}

/* ---- devices and contexts ------------------------------------------------ */

int cuda_driver_find(const struct cuda_driver *cu, const uint8_t uuid[16], CUdevice *ret)
{
        CUdevice device;
        CUuuid other;
        CUresult r;
        int n;

        r = cu->cuDeviceGetCount(&n);
        for (int i = 0; r == CUDA_SUCCESS && i < n; i++) {
                r = cu->cuDeviceGet(&device, i);
                if (r == CUDA_SUCCESS)
                        r = cu->cuDeviceGetUuid_v2(&other, device);
                if (r == CUDA_SUCCESS && memcmp(other.bytes, uuid, sizeof(other.bytes)) == 0) {
                        *ret = device;
                        return 0;
                }
        }
        return r == CUDA_SUCCESS ? -ENODEV : cuda_driver_errno(r);
}

CUresult cuda_context_open(const struct cuda_driver *cu, CUdevice device, struct cuda_context *ret)
{
        CUcontext context;
        CUresult r = cu->cuDevicePrimaryCtxRetain(&context, device);

        if (r == CUDA_SUCCESS)
                *ret = (struct cuda_context){ .cu = cu, .device = device, .context = context };
        return r;
}

void cuda_context_close(struct cuda_context *c)
{
        if (c->context && !is_forked_child())
                c->cu->cuDevicePrimaryCtxRelease_v2(c->device);
        *c = (struct cuda_context){ 0 };
}

int cuda_context_enter(const struct cuda_context *c)
{
        int r;

        if (is_forked_child())
                return -ENODEV;
        r = cuda_driver_errno(c->cu->cuCtxPushCurrent_v2(c->context));
        return r == -EINVAL ? -ENODEV : r; /* the program reset the device */
}

void cuda_context_leave(const struct cuda_context *c)
{
        CUcontext top;

        c->cu->cuCtxPopCurrent_v2(&top);
}

CUresult cuda_context_wait(const struct cuda_driver *cu)
{
        CUstreamCaptureStatus status;
        CUresult result = cu->cuStreamIsCapturing(CU_STREAM_LEGACY, &status);

        return result == CUDA_SUCCESS ? cu->cuCtxSynchronize() : result;
}

int cuda_context_visit(const struct cuda_context *c, struct cuda_mode *ret)
{
        CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
        int r = cuda_context_enter(c);

        if (r < 0)
                return r;
        ret->is_changed = c->cu->cuThreadExchangeStreamCaptureMode(&mode) == CUDA_SUCCESS;
        ret->before = mode;
        return 0;
}

void cuda_context_depart(const struct cuda_context *c, struct cuda_mode *mode)
{
        if (mode->is_changed)
                c->cu->cuThreadExchangeStreamCaptureMode(&mode->before);
        cuda_context_leave(c);
}
