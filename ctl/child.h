/* The job of bfcctl run: a main process, its descendants, and the signals to them.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The job stays in the process group of bfcctl, so the terminal's signals and the shell's job control reach it
 * directly. A signal that another process sends to bfcctl is passed to the main process and to those of its
 * descendants that are in the same process group, and to no other process of that group. bfcctl is the subreaper: a
 * descendant whose parent has ended becomes a child of bfcctl. */
#ifndef BFC_CTL_CHILD_H
#define BFC_CTL_CHILD_H

#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct child {
        pid_t pid;     /* of the main process */
        int signal_fd; /* -1: ended */
        sigset_t mask; /* that bfcctl was started with */
};

struct child_variable {
        const char *name, *value;
};

struct child_process {
        pid_t pid, parent, group;
        uint64_t start_time; /* with the pid it identifies a process */
        char state;          /* as in proc_pid_stat(5) */
        char name[16];
        bool is_descendant;
};

/* Makes this process the subreaper of its descendants. Once, before the lease is made. */
int child_adopt(void);

/* Starts a program with these variables in its environment. 0: if *ret_exec_error is not 0, the program could not be
 * executed, and *ret is ended. */
int child_start(char *const *argv, const struct child_variable *variables, size_t n_variables,
                struct child *ret, int *ret_exec_error);

/* Passes signals and reaps processes until the main process has ended. *ret_status: as of waitpid(2). */
int child_wait(struct child *c, int *ret_status);

/* Signals act on bfcctl itself again. May be called again. */
void child_end(struct child *c);

/* The descendants of this process that run: at most n_max of them, and how many there are. */
int child_remaining(struct child_process *ret, size_t n_max, size_t *ret_n);

/* Whether a process has ended. It may be a zombie still. */
bool child_has_ended(pid_t pid);

/* Ends this process as the main process ended: by the same signal, or with its exit status, which is returned. */
int child_exit_as(int status);

#endif
