/* The service manager (systemd), as the daemon meets it: sockets that it hands over
 * at the start, and what it is told: that the daemon is ready, how it fares, that its
 * loop still turns (the watchdog), that it ends. Its protocols are an environment
 * variable and a datagram each, so no library is needed; and libsystemd's sd_notify()
 * waits while the manager takes nothing, which would stop every client with it.
 * Nothing here waits: what could not be said is said with the next beat.
 *
 * One thread. Where there is no service manager every call does nothing.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_MANAGER_H
#define BFCD_MANAGER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct manager;

struct manager_figures {
        size_t n_sessions;
        uint64_t bytes_in_use;   /* of blocks */
        uint64_t bytes_reserved; /* of the extents behind them */
        size_t n_lost;           /* devices */
};

/* Reads NOTIFY_SOCKET, WATCHDOG_USEC, LISTEN_FDS and what belongs to them, and takes
 * them out of the environment. Fds that are handed over become close-on-exec.
 * -ENOMEM, or what socket(2) says. */
int manager_new(struct manager **ret);
struct manager *manager_free(struct manager *m); /* closes what nobody took; takes NULL */

/* The fd that was handed over under this name, the caller's from now on; -1: none. Where
 * a name comes twice the first is taken first. */
int manager_take(struct manager *m, const char *name);

/* Names what nobody took, and closes it: calls told(name) for each. */
void manager_drop_rest(struct manager *m, void (*told)(const char *name));

/* How often manager_beat() is to be called; 0: nobody listens. */
uint64_t manager_beat_ms(const struct manager *m);

/* Once the daemon serves; again and again from its loop; once it ends. */
void manager_ready(struct manager *m, const struct manager_figures *figures);
void manager_beat(struct manager *m, const struct manager_figures *figures);
void manager_ending(struct manager *m, size_t n_sessions);

#endif
