/* A second thread for copies by the processor, because one does not use all of the memory's bandwidth.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_DEVICE_HOST_HELPER_H
#define BFC_DEVICE_HOST_HELPER_H

#include <stdint.h>

struct host_helper;

/* NULL: this process has one processor, or no memory or thread more. */
struct host_helper *host_helper_new(void);

/* Ends the thread. Takes NULL, and returns it. */
struct host_helper *host_helper_free(struct host_helper *h);

/* Calls part() for [0, n_bytes): for two parts at once if there is a helper and more than one large page. Returns 0, or
 * an error of part(). One thread at a time. */
int host_helper_run(struct host_helper *h, int (*part)(const void *arg, uint64_t begin, uint64_t end),
                    const void *arg, uint64_t n_bytes);

#endif
