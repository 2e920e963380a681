/* The commands of bfcctl, and what was asked for on its command line.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A command writes one document to standard output or one sentence to standard error, and returns the exit
 * status. Standard output stays empty until the answer is complete, so a program never reads half of it. Only
 * the list of blocks, which may have millions, is printed as it arrives: its JSON is incomplete if the answer
 * was. */
#ifndef CTL_COMMAND_H
#define CTL_COMMAND_H

#include <limits.h>
#include <stdbool.h>
#include <stdint.h>

#include "ctl/ask.h"

enum {
        EXIT_REFUSED = 1,
        EXIT_USAGE = 2,
        EXIT_TIMED_OUT = 3, /* the request is still in progress */
        /* Of run, whose other statuses are those of its program, as of env(1). */
        EXIT_RUN_FAILED = 125,
        EXIT_NOT_EXECUTABLE = 126,
        EXIT_NOT_FOUND = 127,
};

/* Many fields: one for each option of bfcctl. */
struct invocation {
        const char *socket; /* NULL: by ask_socket()'s rule */
        bool json;
        /* The values of `own_options`; "" for those without one; NULL: not given. */
        const char *dry_run, *tenant, *older, *by, *partition, *bytes, *reason, *timeout, *wait, *svg,
                *logdir, *interval, *count, *once, *since, *until, *file, *tag, *to;
        struct {
                const char *openmetrics, *each_lease;
        } metrics; /* the same */
        struct {
                const char *name, *limit, *reserve, *cgroup, *unit, *socket_name, *pid, *user, *ttl, *evict,
                        *grace;
        } lease;
        struct {
                const char *watch, *sort, *columns;
                int64_t watch_ms;
        } view;
        struct {
                const char *quiet, *strict, *no_preload;
        } run;
        int64_t wait_ms;  /* -1: as long as it takes */
        char **arguments; /* after the command */
        int n_arguments;
        const char *use; /* how this command, or this part of it, is called, for errors */
};

#define RUNS_PROGRAM INT_MAX

struct command {
        const char *name;
        int max_arguments;                              /* RUNS_PROGRAM: its options end at the first one */
        enum { ANYONE, SEES_ALL, ADMIN, ITSELF } needs; /* ITSELF: it connects by itself */
        Bfcd__List__Kind kind;
        int (*run)(struct ask *a, const struct invocation *i, const struct command *c);
        uint64_t options; /* of `own_options`, a bit each */
        const char *use;  /* NULL: it takes no arguments */
};

/* a: NULL for a command that connects by itself. */
int run_list(struct ask *a, const struct invocation *i, const struct command *c);
int run_grants(struct ask *a, const struct invocation *i, const struct command *c);
int run_metrics(struct ask *a, const struct invocation *i, const struct command *c);
int run_top(struct ask *a, const struct invocation *i, const struct command *c);
int run_blocks(struct ask *a, const struct invocation *i, const struct command *c);
int run_config(struct ask *a, const struct invocation *i, const struct command *c);
int run_reset_peaks(struct ask *a, const struct invocation *i, const struct command *c);
int run_reload(struct ask *a, const struct invocation *i, const struct command *c);
int run_explain(struct ask *a, const struct invocation *i, const struct command *c);
int run_leaks(struct ask *a, const struct invocation *i, const struct command *c);
int run_map(struct ask *a, const struct invocation *i, const struct command *c);
int run_snapshot(struct ask *a, const struct invocation *i, const struct command *c);
int run_trim(struct ask *a, const struct invocation *i, const struct command *c);
int run_park(struct ask *a, const struct invocation *i, const struct command *c);
int run_wake(struct ask *a, const struct invocation *i, const struct command *c);
int run_evict(struct ask *a, const struct invocation *i, const struct command *c);
int run_forget(struct ask *a, const struct invocation *i, const struct command *c);
int run_lease(struct ask *a, const struct invocation *i, const struct command *c);
int run_drain(struct ask *a, const struct invocation *i, const struct command *c);
int run_resume(struct ask *a, const struct invocation *i, const struct command *c);
int run_tensorboard(struct ask *a, const struct invocation *i, const struct command *c);
int run_history(struct ask *a, const struct invocation *i, const struct command *c);
int run_events(struct ask *a, const struct invocation *i, const struct command *c);
int run_wait(struct ask *a, const struct invocation *i, const struct command *c);
int run_driver_limits(struct ask *a, const struct invocation *i, const struct command *c);
/* With --watch it waits for the daemon, and says so once. An exit status. */
int driver_limits_no_answer(const struct ask *a, const struct invocation *i, int error);
int run_run(struct ask *a, const struct invocation *i, const struct command *c);

/* Prints the error and what would be right. EXIT_USAGE. */
int command_usage(const char *what, const char *which, const char *right);
bool command_read_id(const char *text, uint64_t *ret); /* "123", not 0 and nothing else */
int command_complain(const struct ask *a);             /* the daemon's error. EXIT_REFUSED */
int command_finish(int r); /* the exit status after writing to standard output with result r */

#endif
