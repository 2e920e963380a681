/* How much memory the machine and this process's control groups have for host extents.
 *
 * The kernel promises shared memory that it does not have and then kills a process, possibly this daemon,
 * to whose control group the pages are charged. So the room is checked first.
 *
 * Control groups (version 2): the own group and all its parents count. The room of each is the lower of
 * memory.max and memory.high, minus memory.current, plus the page cache that the kernel can drop at once
 * (inactive_file in memory.stat). memory.high counts because a process above it is slowed down until it
 * hangs. Swap does not count: it may be full.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_DEVICE_HOST_FREE_H
#define BFC_DEVICE_HOST_FREE_H

#include <stdint.h>

/* 0; -ENOMEM: the machine has no such memory; -ENOBUFS: a control group has no room for it. */
int host_free_check(uint64_t n_bytes);

/* Parses the text of /sys/devices/system/node/nodeN/meminfo. UINT64_MAX: unknown. Used by the next
 * function and by tests. */
uint64_t host_free_in_node(const char *meminfo);

/* Checks the room of one NUMA node, in addition to host_free_check(). If the kernel does not report it,
 * the check passes. */
int host_free_check_node(uint32_t node, uint64_t n_bytes);

/* Both checks (node NULL: only the first). After 0, n_bytes count as being allocated until
 * host_free_end(), so that concurrent threads do not exceed a limit together. A request that does not fit
 * beside such memory waits for it. From any thread. */
int host_free_begin(const uint32_t *node, uint64_t n_bytes);
void host_free_end(uint64_t n_bytes);

/* The number of OOM kills since the kernel started, in any control group (oom_kill in /proc/vmstat); 0:
 * unknown. */
uint32_t host_free_oom_kills(void);

/* The bytes that are left; UINT64_MAX: unknown. */
uint64_t host_free_bytes(void);

/* The lowest limit of a control group and its parents; UINT64_MAX: none. of: the text of
 * /proc/self/cgroup; NULL: the own one. */
uint64_t host_free_limit(const char *of);

/* The room of the groups in a folder like /sys/fs/cgroup; own: the text of /proc/self/cgroup.
 * *ret_limit_bytes may be NULL. UINT64_MAX: no limit. Used by the above and by tests. */
uint64_t host_free_in_groups(const char *root, const char *own, uint64_t *ret_limit_bytes);

/* The memory needed to make n_bytes, including page tables and a reserve for the daemon itself. */
uint64_t host_free_needed(uint64_t n_bytes);

#endif
