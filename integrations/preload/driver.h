/* The real driver, which the proxy is in front of.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * It is loaded at the first call of any function, and never unloaded. */
#ifndef BFC_PRELOAD_DRIVER_H
#define BFC_PRELOAD_DRIVER_H

#include <stdbool.h>

#include "integrations/preload/api.h"

/* A function of the real driver by its symbol; NULL: it has none, or there is no driver. */
void *driver_symbol(const char *symbol);

/* Whether the address of a function is in the proxy itself. */
bool driver_is_proxy(const void *function);

/* Functions after which memory of cuMemCreate() may be used elsewhere, in ways that are not known here. Programs are to
 * call them by the proxy. NULL: it is none of them. */
void *driver_find_binding(const char *symbol);

/* None of them works from now on (CUDA_ERROR_NOT_SUPPORTED). False: the program has called one, and all are as before. */
bool driver_stop_bindings(void);

/* For libraries that need the real driver, as dlopen() returns it: device/cuda_driver.c asks each libcuda.so.1 for
 * this function. NULL: there is none. */
__attribute__((visibility("default"))) void *bfc_preload_driver(void);

/* As bfc_version(): `python -m bfcd doctor` compares the two. */
__attribute__((visibility("default"))) const char *bfc_preload_version(void);

#endif
