/* The pages of a host extent: their size and NUMA node.
 *
 * A memfd has pages of 4 KiB. On request the kernel replaces 512 of them by one of 2 MiB (MADV_COLLAPSE,
 * Linux 6.1), whatever the setting of transparent huge pages for shared memory, unless it is "deny".
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_DEVICE_HOST_PAGES_H
#define BFC_DEVICE_HOST_PAGES_H

#include <stddef.h>
#include <stdint.h>

#include "device/device.h"

#define HOST_HUGE_BYTES  (UINT64_C(2) << 20)
#define HOST_EXTENT_NAME "bfcd-extent"

/* Allocates all pages of a memfd of n_bytes that no other process has. No page is touched by a store, so
 * a lack of memory is an error and not a signal. *ret_huge_bytes: bytes in pages of 2 MiB, as the kernel
 * reports. -ENOMEM; -errno. */
int host_pages_fill(int fd, uint64_t n_bytes, const struct device_supply *supply, uint64_t *ret_huge_bytes);

/* Replaces the pages of 4 KiB of a memfd of n_bytes by pages of 2 MiB, where the kernel can; each piece of 2 MiB has a page.
 * This can take seconds where other processes use all processors, or call for the same. */
void host_pages_collapse(int fd, uint64_t n_bytes);

/* What this machine lacks for this supply, as a clause for a message. 0: nothing. -ENODEV: there is no such
 * NUMA node, so no memory can be made. -ENOTSUP: pages will be of 4 KiB. */
int host_pages_check(const struct device_supply *supply, char *ret_clause, size_t n_clause);

/* A mapping of a memfd from an offset on, a multiple of 2 MiB; or an empty one (fd -1, PROT_NONE). Aligned to
 * 2 MiB; NULL on failure. */
void *host_pages_map(int fd, uint64_t offset, uint64_t n_bytes);

#endif
