/* The service manager (systemd): the sockets that it passes at the start, and the messages to it: ready,
 * status, watchdog, stopping. Each protocol is an environment variable and a datagram, so no library is
 * needed; libsystemd's sd_notify() waits while the manager does not read, which would block all clients.
 * The loop's messages never wait: a message that could not be sent is repeated with the next beat.
 * manager_tell() and manager_barrier() wait, so the loop must not call them, but any other thread may;
 * all other functions belong to one thread.
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

/* True: the manager passes an fd with this name; before manager_new(). */
bool manager_has_fd(const char *name);

/* The fd that was passed with this name, which the caller then owns; -1: none. With several of one name,
 * the first one is returned first. */
int manager_take(struct manager *m, const char *name);

/* Offers the remaining fds in their order; the callee owns an fd if take() returns true. */
void manager_take_all(struct manager *m, bool (*take)(void *userdata, const char *name, int fd),
                      void *userdata);

/* Closes the remaining fds, and calls told(name) for each. */
void manager_drop_rest(struct manager *m, void (*told)(const char *name));

/* NOTIFY_SOCKET was set. */
bool manager_listens(const struct manager *m);

/* Sends this text (lines of sd_notify(3)) with an fd (-1: none), which the caller keeps. Waits at most
 * timeout_ms for room in the manager's queue. A sent message arrives even if this process ends now.
 * -ETIMEDOUT, -errno: nothing was sent. */
int manager_tell(const struct manager *m, const char *text, int fd, unsigned timeout_ms);

/* Waits at most timeout_ms until the manager has processed this thread's earlier messages. -ETIMEDOUT:
 * unknown; -errno. */
int manager_barrier(const struct manager *m, unsigned timeout_ms);

/* The period of manager_beat(); 0: there is no manager. */
uint64_t manager_beat_ms(const struct manager *m);

/* Call it when the daemon serves; periodically from its loop; when it ends. */
void manager_ready(struct manager *m, const struct manager_stats *stats);
void manager_beat(struct manager *m, const struct manager_stats *stats);
void manager_ending(struct manager *m, size_t n_sessions);

#endif
