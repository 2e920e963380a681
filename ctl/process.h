/* What this machine knows about a session's process, for display.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * /proc and the user database are read when a list is shown, so a process that has ended has no command,
 * and for one in another PID namespace the data may belong to another process. The caller escapes the
 * text when it prints it. */
#ifndef BFC_CTL_PROCESS_H
#define BFC_CTL_PROCESS_H

#include <limits.h>
#include <stdbool.h>
#include <stdint.h>

#define PROCESS_TEXT_MAX   1024 /* longer commands are cut */
#define PROCESS_CGROUP_MAX 4096

/* The user's name, or its number if it has none. Returns ret, as do the next two. */
const char *process_user(uint64_t uid, char ret[PROCESS_TEXT_MAX]);

/* The command line; "" if the process is not visible, or its user lets reads of it wait (ctl/cmdline.h). */
const char *process_command(uint64_t pid, uint64_t uid, char ret[PROCESS_TEXT_MAX]);

/* The path of its control group of version 2; "" if there is none. */
void process_cgroup(uint64_t pid, char ret[PROCESS_CGROUP_MAX]);

/* The innermost systemd service or scope of the process; "" if there is none. */
const char *process_unit(uint64_t pid, char ret[PROCESS_TEXT_MAX]);

/* The service's name, else the command without its folder, else `name`, which the client set; in ret. */
const char *process_job(uint64_t pid, uint64_t uid, const char *name, char ret[PROCESS_TEXT_MAX]);

/* The process has the name of a keeper, and the user of the daemon. */
bool process_is_keeper(uint64_t pid, uint64_t daemon);

/* The path of this program's file; "" where it is not known. Returns ret. */
const char *process_own_path(char ret[PATH_MAX]);

#endif
