/* The control group of a process and its systemd unit, from /proc/PID/cgroup.
 *
 * One path is used: that of systemd's own hierarchy if there is one (name=systemd, with control groups of
 * version 1), else the unified one (0::). The unit is the first component of the path that is no slice,
 * so it is a unit of the system manager. Everything below user@UID.service belongs to that unit, whatever
 * a user's manager calls it.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_CGROUP_H
#define BFCD_CGROUP_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#define CGROUP_PATH_BYTES 4096u
#define CGROUP_UNIT_BYTES 256u

/* Of a process that is alive before and after the read, as its pidfd shows, so that the pid was not
 * reused: 0. -ESRCH: it is not alive, or there is no pidfd (-1) or no pid (0). -ENODATA: there is no
 * usable path. -errno. proc: "/proc", except in tests. */
int cgroup_of_process(const char *proc, pid_t pid, int pidfd, char ret[static CGROUP_PATH_BYTES]);

/* Finds the path in the text of /proc/PID/cgroup. -ENODATA. */
int cgroup_parse(const char *text, char ret[static CGROUP_PATH_BYTES]);

/* The unit of a path; "" if none. */
void cgroup_unit(const char *path, char ret[static CGROUP_UNIT_BYTES]);

/* Shell patterns without escapes: *, ?, [...]. A control group's pattern matches a path or one above it,
 * and no wildcard matches '/'. */
bool cgroup_unit_matches(const char *pattern, const char *unit);
bool cgroup_path_matches(const char *pattern, const char *path);

/* The length of the shortest control group that matches the whole pattern and has the path in it, or is it; 0: none
 * matches. */
size_t cgroup_prefix(const char *pattern, const char *path);

/* Whether the control group exists in some hierarchy that is visible here. And whether it belongs to the user: it is
 * visible, and its folder belongs to the user in each hierarchy that has it. */
bool cgroup_exists(const char *path);
bool cgroup_is_of_user(const char *path, uid_t uid);

#endif
