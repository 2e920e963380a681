/* How much memory the machine and this process's control groups leave for host extents.
 *
 * The kernel promises shared memory that it does not have, and then kills a process: perhaps this
 * daemon, to whose control group the pages are charged. So it is asked first.
 *
 * Of control groups (version 2) the own one and all its parents count. The room of each is the
 * lower of memory.max and memory.high, less memory.current, and more by the page cache that the
 * kernel can drop at once (inactive_file in memory.stat). memory.high counts because a process
 * above it is slowed down until it hangs. Swap does not count: it may be full.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_DEVICE_HOST_FREE_H
#define BFC_DEVICE_HOST_FREE_H

#include <stdint.h>

/* 0; -ENOMEM: the machine has no such memory; -ENOBUFS: a control group has no room for it. */
int host_free_check(uint64_t n_bytes);

/* From a text as /sys/devices/system/node/nodeN/meminfo has it. UINT64_MAX: not known. For tests, and the
 * next one. */
uint64_t host_free_in_node(const char *meminfo);

/* Whether one NUMA node has room, beside host_free_check(). What the kernel cannot tell is enough. */
int host_free_check_node(uint32_t node, uint64_t n_bytes);

/* Both checks (node NULL: only the first), and after 0 the bytes count as being made until host_free_end(),
 * so that threads which make memory side by side do not pass a limit together. What does not fit beside
 * memory that is being made waits for that. From any thread. */
int host_free_begin(const uint32_t *node, uint64_t n_bytes);
void host_free_end(uint64_t n_bytes);

/* How many processes the kernel has killed for lack of memory since it started, in any control group
 * (oom_kill in /proc/vmstat); 0: not known. */
uint32_t host_free_oom_kills(void);

/* So many bytes are left; UINT64_MAX: not known. */
uint64_t host_free_bytes(void);

/* The lowest limit of a control group and its parents; UINT64_MAX: there is none. of: a text as
 * /proc/self/cgroup has it; NULL: the own one. */
uint64_t host_free_limit(const char *of);

/* The same of the groups in a folder as /sys/fs/cgroup is; own: a text as /proc/self/cgroup has
 * it. *ret_limit_bytes may be NULL. UINT64_MAX: no limit. For tests, and the above. */
uint64_t host_free_in_groups(const char *root, const char *own, uint64_t *ret_limit_bytes);

/* What making n_bytes takes, with the kernel's own tables and something for the daemon itself. */
uint64_t host_free_needed(uint64_t n_bytes);

#endif
