/* Finding the library that a proxy is in front of.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * By name the dynamic linker would find the proxy again, so the library is opened by its path: that of a variable,
 * else the first one of the name that is no proxy, in the order of the dynamic linker: LD_LIBRARY_PATH, ld.so.cache,
 * the standard folders. */
#ifndef BFC_PRELOAD_FIND_H
#define BFC_PRELOAD_FIND_H

struct found {
        const char *name;     /* "libcuda.so.1" */
        const char *variable; /* of the environment, with a path */
        const char *marker;   /* a function that proxies have */
        const char *function; /* one that the library has */
};

/* As dlopen() returns it; never closed. NULL: there is none. */
void *find_library(const struct found *f);

/* For trampolines.S: the address for a slot. Each proxy has one. */
void *preload_resolve(void **slot);

#endif
