/* The real driver, which the proxy is in front of.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * It is loaded at the first call of any function, and never unloaded. */
#ifndef BFC_PRELOAD_DRIVER_H
#define BFC_PRELOAD_DRIVER_H

#include <stdbool.h>

#include "preload/api.h"

/* A function of the real driver by its symbol; NULL: it has none, or there is no driver. */
void *driver_symbol(const char *symbol);

/* Whether the address of a function is in the proxy itself. */
bool driver_is_proxy(const void *function);

/* For libraries that need the real driver, as dlopen() returns it: device/cuda_driver.c asks each libcuda.so.1 for
 * this function. NULL: there is none. */
__attribute__((visibility("default"))) void *bfc_preload_driver(void);

#endif
