/* What this machine knows of a session's process, for people.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * /proc and the user database are read when a list is shown, so a process that has ended has no
 * command, and one in another PID namespace may have another's. The caller escapes the text when it prints it. */
#ifndef BFC_CTL_PROCESS_H
#define BFC_CTL_PROCESS_H

#include <stdint.h>

#define PROCESS_TEXT_MAX 256 /* longer commands are cut */

/* The user's name, or the number where it has none. Returns ret, as do the next two. */
const char *process_user(uint64_t uid, char ret[PROCESS_TEXT_MAX]);

/* The command line; "" where the process is not to be seen. */
const char *process_command(uint64_t pid, char ret[PROCESS_TEXT_MAX]);

/* The innermost systemd service or scope that it runs in; "" where there is none. */
const char *process_unit(uint64_t pid, char ret[PROCESS_TEXT_MAX]);

/* The service's name, else the command without its folder, else `name`, which the client gave itself; in ret. */
const char *process_job(uint64_t pid, const char *name, char ret[PROCESS_TEXT_MAX]);

#endif
