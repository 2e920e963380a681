/* The pages of a host extent: how large they are, and on which NUMA node.
 *
 * A memfd's page is 4 KiB. The kernel replaces 512 of them by one of 2 MiB where it is asked
 * (MADV_COLLAPSE, Linux 6.1), whatever the settings of transparent huge pages for shared memory
 * say, unless they are "deny". Pages of MFD_HUGETLB come from those that the operator reserved.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_DEVICE_HOST_PAGES_H
#define BFC_DEVICE_HOST_PAGES_H

#include <stddef.h>
#include <stdint.h>

#include "device/device.h"

#define HOST_HUGE_BYTES (UINT64_C(2) << 20)

/* An empty, guarded memfd of the right kind. -errno. */
int host_pages_open(const struct device_supply *supply);

/* Puts a page behind every byte of a memfd of that size that no other process has. No page is touched
 * by a store: without memory this fails and raises no signal. *ret_huge_bytes: how much of it is in
 * pages of 2 MiB, by what the kernel says. -ENOMEM; -ENOSPC: too few pages are reserved; -errno. */
int host_pages_fill(int fd, uint64_t n_bytes, const struct device_supply *supply, uint64_t *ret_huge_bytes);

/* What this machine lacks for it, as a clause for people. 0: nothing. -ENODEV: there is no such node, so
 * nothing can be made. -ENOTSUP: pages will be smaller, or growth beyond n_bytes will be refused. */
int host_pages_check(const struct device_supply *supply, uint64_t n_bytes, char *ret_clause, size_t n_clause);

/* A mapping of a memfd, or of nothing (fd -1, PROT_NONE), at a multiple of 2 MiB; NULL. */
void *host_pages_map(int fd, uint64_t n_bytes);

#endif
