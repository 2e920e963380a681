/* The service manager (systemd): the sockets that it passes at the start, and the messages to it: ready,
 * status, watchdog, stopping. Each protocol is an environment variable and a datagram, so no library is
 * needed; libsystemd's sd_notify() waits while the manager does not read, which would block all clients.
 * Messages never wait: one that could not be sent is repeated with the next beat. One thread.
 *
 * Without a service manager every call does nothing.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_MANAGER_H
#define BFCD_MANAGER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct manager;

struct manager_stats {
        size_t n_sessions;
        size_t n_suspended;      /* of these, sessions of a previous daemon that may be resumed */
        uint64_t bytes_in_use;   /* of blocks */
        uint64_t bytes_reserved; /* of the extents behind them */
        size_t n_lost;           /* devices */
};

/* Reads NOTIFY_SOCKET, WATCHDOG_USEC, LISTEN_FDS and related variables, and removes them from the
 * environment. Passed fds become close-on-exec. -ENOMEM, or errors of socket(2). */
int manager_new(struct manager **ret);
struct manager *manager_free(struct manager *m); /* closes remaining fds; takes NULL */

/* The fd that was passed with this name, which the caller then owns; -1: none. With several of one name,
 * the first one is returned first. */
int manager_take(struct manager *m, const char *name);

/* Closes the remaining fds, and calls told(name) for each. */
void manager_drop_rest(struct manager *m, void (*told)(const char *name));

/* The period of manager_beat(); 0: there is no manager. */
uint64_t manager_beat_ms(const struct manager *m);

/* Call it when the daemon serves; periodically from its loop; when it ends. */
void manager_ready(struct manager *m, const struct manager_stats *stats);
void manager_beat(struct manager *m, const struct manager_stats *stats);
void manager_ending(struct manager *m, size_t n_sessions);

#endif
