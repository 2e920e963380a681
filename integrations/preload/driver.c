/* The real driver and its functions; see driver.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "integrations/preload/driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#include "integrations/preload/find.h"

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

const char *bfc_preload_version(void)
{
        return BFCD_VERSION;
}

/* ---- its functions ----------------------------------------------------------- */

extern void *preload_slots[];

static const char *const symbols[] = {
#define OWN(symbol, base, version, per_thread, arguments) #symbol,
#include "integrations/preload/own.h"
#undef OWN
#define FORWARD(symbol) #symbol,
#include "integrations/preload/names.h"
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

/* A function that would let memory be used elsewhere, in a program that has said that it is idle. */
static CUresult stopped_function(void)
{
        return CUDA_ERROR_NOT_SUPPORTED;
}

static bool is_stopped(const void *function)
{
        CUresult (*stopped)(void) = stopped_function;

        return memcmp(&stopped, &function, sizeof(stopped)) == 0;
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

/* The first call of a function. Another one, or driver_stop_bindings(), may have been faster. */
void *preload_resolve(void **slot)
{
        void *was = __atomic_load_n(slot, __ATOMIC_ACQUIRE),
             *found = driver_symbol(symbols[slot - preload_slots]);
        CUresult (*missing)(void) = bfc_preload_driver() ? no_function : no_driver;

        if (!found)
                memcpy(&found, &missing, sizeof(found));
        if (is_stopped(was))
                return was;
        return __atomic_compare_exchange_n(slot, &was, found, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)
                       ? found
                       : was;
}

/* ---- functions that bind memory -------------------------------------------------- */

#define BINDINGS(F)                                                                                          \
        F(cuMemGetHandleForAddressRange)                                                                     \
        F(cuMulticastCreate)                                                                                 \
        F(cuMulticastBindMem)                                                                                \
        F(cuMulticastBindMem_v2)                                                                             \
        F(cuMulticastBindAddr)                                                                               \
        F(cuMulticastBindAddr_v2)                                                                            \
        F(cuLogicalEndpointBindMem)                                                                          \
        F(cuLogicalEndpointBindAddr)

#define DECLARE(symbol) extern char trampoline_##symbol[] __asm__(#symbol);
BINDINGS(DECLARE)

static const struct binding {
        const char *symbol;
        void *trampoline;
} bindings[] = {
#define ENTRY(symbol) { #symbol, trampoline_##symbol },
        BINDINGS(ENTRY)
};

#define N_BINDINGS (sizeof(bindings) / sizeof(bindings[0]))

void *driver_find_binding(const char *symbol)
{
        for (size_t i = 0; i < N_BINDINGS; i++)
                if (strcmp(bindings[i].symbol, symbol) == 0)
                        return bindings[i].trampoline;
        return NULL;
}

static void **slot_of(const char *symbol)
{
        void **slot = preload_slots;

        while (strcmp(symbols[slot - preload_slots], symbol) != 0)
                slot++;
        return slot;
}

/* A slot has an address of the proxy until the first call. */
static bool stop(void **slot, void **ret_was)
{
        CUresult (*stopped)(void) = stopped_function;
        void *was = __atomic_load_n(slot, __ATOMIC_ACQUIRE), *now;

        memcpy(&now, &stopped, sizeof(now));
        *ret_was = was;
        return is_stopped(was) ||
               (driver_is_proxy(was) &&
                __atomic_compare_exchange_n(slot, &was, now, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
}

bool driver_stop_bindings(void)
{
        void *was[N_BINDINGS];
        size_t n = 0;

        while (n < N_BINDINGS && stop(slot_of(bindings[n].symbol), &was[n]))
                n++;
        if (n == N_BINDINGS)
                return true;
        while (n-- > 0)
                __atomic_store_n(slot_of(bindings[n].symbol), was[n], __ATOMIC_RELEASE);
        return false;
}
