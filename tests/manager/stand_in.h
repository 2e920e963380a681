/* A stand-in for the service manager: it keeps a daemon's sockets, and starts another daemon as
 * soon as one ends, as systemd does with Restart=always. So that tests, which run without
 * systemd, can restart and kill a daemon as often as they like.
 *
 * What it does is what systemd 252 does with NOTIFY_SOCKET:
 *   - a datagram is the main process's (SCM_CREDENTIALS), or it is not for us; one that is
 *     longer than 4095 bytes, cut off, has fds, or has a NUL inside is dropped
 *   - messages before the end of the process still count
 *
 * It is a process of its own, which dies with the one that started it, and its daemon with
 * it. Functions are for one thread of that process; they return 0 or more, or -errno, and
 * assert nothing.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_MANAGER_STAND_IN_H
#define BFC_TESTS_MANAGER_STAND_IN_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

struct stand_in;

struct stand_in_options {
        const char *const *argv;  /* the daemon; argv[0] is its path */
        const char *socket;       /* its two listening sockets, handed over as "client" and */
        const char *admin_socket; /* "admin"; NULL: none */
        const char *notify;       /* the path that NOTIFY_SOCKET gets */
        const char *log;          /* where its output goes, appended; NULL: ours */
        bool keeps;               /* false: with BFCD_KEEP=0 */
        unsigned max_fds;         /* RLIMIT_NOFILE of the daemon; 0: as it is */
        unsigned restart_ms;      /* RestartSec= */
        unsigned watchdog_ms;     /* WatchdogSec=, only told; 0: none */
};

struct stand_in_state {
        pid_t pid;          /* of the daemon; 0: none runs */
        unsigned n_starts;  /* in all */
        unsigned n_ready;   /* of them, how many said READY=1 */
        bool is_ready;      /* the one that runs has */
        bool is_stopping;   /* and has said STOPPING=1 */
        bool is_held;       /* see stand_in_hold() */
        int status;         /* of wait(2), of the last one that ended */
        unsigned n_bad;     /* that ended otherwise than by exit(0), SIGTERM or a signal of ours */
        unsigned n_ignored; /* datagrams that were not the daemon's, or no good */
        char said[256];     /* STATUS= */
};

/* Starts it and its first daemon; no waiting for READY=1. */
int stand_in_start(const struct stand_in_options *options, struct stand_in **ret);

/* SIGKILL for the daemon where one still runs. Takes NULL. */
struct stand_in *stand_in_end(struct stand_in *s);

int stand_in_look(struct stand_in *s, struct stand_in_state *ret);
pid_t stand_in_pid(const struct stand_in *s); /* of its own process */

/* A signal for the daemon; another is started when it has ended. -ESRCH: none runs. */
int stand_in_signal(struct stand_in *s, int signal);

/* Held: no daemon starts when one ends. Not held: one starts at once. */
int stand_in_hold(struct stand_in *s, bool is_held);

/* Restarts by this signal and waits until the next one says READY=1; -ETIME. */
int stand_in_restart(struct stand_in *s, int signal, int timeout_ms);

/* Waits until the daemon of this number, counted from 1, or one after it is ready; until
 * none runs. -ETIME. */
int stand_in_wait_ready(struct stand_in *s, unsigned n_starts, int timeout_ms);
int stand_in_wait_end(struct stand_in *s, int timeout_ms);

#endif
