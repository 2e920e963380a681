/* Processes and their ancestors, by /proc.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_PROCESS_H
#define BFCD_PROCESS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct process {
        pid_t pid;
        pid_t parent;        /* 0: none that is visible here */
        uint64_t start_time; /* /proc/PID/stat field 22, which tells a process from later ones with its pid */
        char state;          /* of its main thread; 'Z': that has exited, and others may go on */
};

/* -ESRCH: there is no such process, or it may not be seen. Other errors: it is not known. */
int process_read(const char *proc, pid_t pid, struct process *ret);

/* Whether all threads of a process have exited. False where it is not known. */
bool process_has_ended(pid_t pid, uint64_t start_time);

/* The effective user of a process; root, where the process may not be inspected by its user. -ESRCH, -errno. */
int process_owner(const char *proc, pid_t pid, uid_t *ret);

/* The process and its ancestors, the nearest first. A process whose parent has exited has the nearest subreaper as its
 * parent (PR_SET_CHILD_SUBREAPER), or init. Returns how many there are. -ELOOP: more than n_max; -EAGAIN: they changed
 * during each of several walks; -errno: one of them could not be read. Then it is not known which processes are above
 * it. n_max is at least 1.
 *
 * No process is younger than its child, so the list ends at the first one that began before `since` (a start_time; 0:
 * it does not). At most PROCESS_MAX_READS files are read, however the ancestors change. */
#define PROCESS_MAX_ANCESTORS 64u
#define PROCESS_MAX_READS     192u
int process_ancestors(const char *proc, pid_t pid, uint64_t since, struct process *ret, size_t n_max);

#endif
