/* The real driver and its functions; see driver.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "preload/driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#include "preload/find.h"

static void *library;

static void load(void)
{
        library = find_library(
                &(struct found){ "libcuda.so.1", "BFC_CUDA_LIBRARY", "bfc_preload_driver", "cuInit" });
}

void *bfc_preload_driver(void)
{
        static pthread_once_t once = PTHREAD_ONCE_INIT;

        pthread_once(&once, load);
        return library;
}

/* ---- its functions ----------------------------------------------------------- */

extern void *preload_slots[];

static const char *const symbols[] = {
#define OWN(symbol, base, version, per_thread, arguments) #symbol,
#include "preload/own.h"
#undef OWN
#define FORWARD(symbol) #symbol,
#include "preload/names.h"
#undef FORWARD
};

static CUresult no_driver(void)
{
        return CUDA_ERROR_NO_DEVICE;
}

/* An older driver. */
static CUresult no_function(void)
{
        return CUDA_ERROR_NOT_SUPPORTED;
}

void *driver_symbol(const char *symbol)
{
        void *handle = bfc_preload_driver();

        return handle ? dlsym(handle, symbol) : NULL;
}

bool driver_is_proxy(const void *function)
{
        Dl_info of_function, own;

        return dladdr(function, &of_function) && dladdr(preload_slots, &own) &&
               of_function.dli_fbase == own.dli_fbase;
}

void *preload_resolve(void **slot)
{
        void *found = driver_symbol(symbols[slot - preload_slots]);
        CUresult (*missing)(void) = bfc_preload_driver() ? no_function : no_driver;

        if (!found)
                memcpy(&found, &missing, sizeof(found));
        __atomic_store_n(slot, found, __ATOMIC_RELEASE);
        return found;
}
