/* cuGetProcAddress(): programs, and the CUDA runtime, get the proxy's functions by it.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The driver answers, also for functions that names.h does not have. Where it has a function of own.h, the answer is
 * the proxy's. */
#include <stdio.h>
#include <string.h>

#include "integrations/preload/driver.h"

#define NEWEST_VERSION 13050 /* up to which own.h has all variants */

static const struct own_function {
        const char *base;
        int version, per_thread;
        void (*address)(void);
} own_functions[] = {
#define OWN(symbol, base, version, per_thread, arguments)                                                    \
        { base, version, per_thread, (void (*)(void))symbol },
#include "integrations/preload/own.h"
#undef OWN
        /* The header of CUDA 12 gives this name to another function. */
        { "cuGraphInstantiate", 12000, ANY_STREAM, (void (*)(void))cuGraphInstantiateWithFlags },
};

/* The newest variant up to this version; NULL: the function is not in own.h. */
static const struct own_function *find_own(const char *name, int version, cuuint64_t flags)
{
        int per_thread = (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0;
        const struct own_function *found = NULL;

        for (size_t i = 0; i < sizeof(own_functions) / sizeof(own_functions[0]); i++) {
                const struct own_function *f = &own_functions[i];

                if (f->version <= version && (f->per_thread == ANY_STREAM || f->per_thread == per_thread) &&
                    strcmp(f->base, name) == 0 && (!found || f->version > found->version))
                        found = f;
        }
        return found;
}

static CUresult ask_driver(const char *name, void **ret_function, int version, cuuint64_t flags,
                           CUdriverProcAddressQueryResult *ret_status)
{
        CUresult result;

        if (driver_symbol("cuGetProcAddress_v2"))
                return real_cuGetProcAddress_v2(name, ret_function, version, flags, ret_status);
        result = real_cuGetProcAddress(name, ret_function, version, flags);
        if (ret_status)
                *ret_status = result == CUDA_SUCCESS ? CU_GET_PROC_ADDRESS_SUCCESS
                                                     : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
        return result;
}

/* A driver that is newer than own.h may have another variant. */
static bool is_newer_variant(const char *name, int version, cuuint64_t flags, const void *function)
{
        CUdriverProcAddressQueryResult status;
        void *known = NULL;

        return version > NEWEST_VERSION &&
               ask_driver(name, &known, NEWEST_VERSION, flags, &status) == CUDA_SUCCESS && known &&
               known != function;
}

#define FIRST_BINDING_VERSION 12010 /* of those that have a second variant */

/* The proxy's address of a function that binds memory; NULL: it is none. */
static void *binding_address(const char *name, int version, cuuint64_t flags, const void *function)
{
        void *first = driver_find_binding(name), *second, *known = NULL;
        CUdriverProcAddressQueryResult status;
        char symbol[64];

        if (!first || is_newer_variant(name, version, flags, function))
                return NULL;
        snprintf(symbol, sizeof(symbol), "%s_v2", name);
        second = driver_find_binding(symbol);
        return second && (ask_driver(name, &known, FIRST_BINDING_VERSION, flags, &status) != CUDA_SUCCESS ||
                          known != function)
                       ? second
                       : first;
}

/* function: the driver's answer. */
static void *own_address(const char *name, int version, cuuint64_t flags, void *function)
{
        const struct own_function *own = find_own(name, version, flags);
        void *address = function, *binding = binding_address(name, version, flags, function);

        if (binding)
                address = binding;
        else if (own && !is_newer_variant(name, version, flags, function))
                memcpy(&address, &own->address, sizeof(address));
        return address;
}

CUresult cuGetProcAddress_v2(const char *name, void **ret_function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *ret_status)
{
        CUresult result = ask_driver(name, ret_function, version, flags, ret_status);

        if (result == CUDA_SUCCESS && *ret_function)
                *ret_function = own_address(name, version, flags, *ret_function);
        return result;
}

CUresult cuGetProcAddress(const char *name, void **ret_function, int version, cuuint64_t flags)
{
        CUresult result = real_cuGetProcAddress(name, ret_function, version, flags);

        if (result == CUDA_SUCCESS && *ret_function)
                *ret_function = own_address(name, version, flags, *ret_function);
        return result;
}
