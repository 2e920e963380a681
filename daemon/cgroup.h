/* Where a process runs: its control group, and the systemd unit that this is of, by the
 * kernel's word in /proc/PID/cgroup.
 *
 * One path counts: that of systemd's own hierarchy where there is one (name=systemd,
 * with control groups of version 1), else the unified one (0::). The unit is the first
 * step of the path that is no slice: so it is one of the system's manager. What a
 * user's manager makes lies below user@UID.service and is that unit's, whatever it is
 * called.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_CGROUP_H
#define BFCD_CGROUP_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#define CGROUP_PATH_BYTES 4096u
#define CGROUP_UNIT_BYTES 256u

/* Of a process that lives before and after it is looked at, by its pidfd, so that no
 * other can have its number: 0. -ESRCH: it does not, or there is no pidfd (-1) or no pid (0).
 * -ENODATA: the kernel names none that counts. -errno. proc: "/proc", but in tests. */
int cgroup_of_process(const char *proc, pid_t pid, int pidfd, char ret[static CGROUP_PATH_BYTES]);

/* The path that counts in the text of /proc/PID/cgroup. -ENODATA. */
int cgroup_parse(const char *text, char ret[static CGROUP_PATH_BYTES]);

/* The unit that a path is of; "" if none. */
void cgroup_unit(const char *path, char ret[static CGROUP_UNIT_BYTES]);

/* Patterns of the shell, without escapes: *, ?, [...]. That of a control group matches a
 * path or one above it, and none of them matches a '/'. */
bool cgroup_unit_matches(const char *pattern, const char *unit);
bool cgroup_path_matches(const char *pattern, const char *path);

#endif
