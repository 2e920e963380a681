/* The service manager (systemd), as the daemon meets it: sockets that it hands over
 * at the start, and what it is told: that the daemon is ready, how it fares, that its
 * loop still turns (the watchdog), that it ends. Its protocols are an environment
 * variable and a datagram each, so no library is needed; and libsystemd's sd_notify()
 * waits while the manager takes nothing, which would stop every client with it.
 * What the loop says never waits: what could not be said is said with the next beat. Who
 * may wait (never the loop) has manager_tell() and manager_barrier(), which any thread may
 * call; all else is one thread's.
 *
 * Where there is no service manager every call does nothing.
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
        size_t n_awaited;        /* of these, those that were another daemon's and may come back */
        uint64_t bytes_in_use;   /* of blocks */
        uint64_t bytes_reserved; /* of the extents behind them */
        size_t n_lost;           /* devices */
};

/* Reads NOTIFY_SOCKET, WATCHDOG_USEC, LISTEN_FDS and what belongs to them, and takes
 * them out of the environment. Fds that are handed over become close-on-exec.
 * -ENOMEM, or what socket(2) says. */
int manager_new(struct manager **ret);
struct manager *manager_free(struct manager *m); /* closes what nobody took; takes NULL */

/* Whether a manager hands over an fd of this name; before manager_new(). */
bool manager_brings(const char *name);

/* The fd that was handed over under this name, the caller's from now on; -1: none. Where
 * a name comes twice the first is taken first. */
int manager_take(struct manager *m, const char *name);

/* Shows what nobody took, in the order in which it came: where take() returns true the fd is
 * the callee's from now on. */
void manager_take_all(struct manager *m, bool (*take)(void *userdata, const char *name, int fd),
                      void *userdata);

/* Names what nobody took, and closes it: calls told(name) for each. */
void manager_drop_rest(struct manager *m, void (*told)(const char *name));

/* NOTIFY_SOCKET was there. */
bool manager_listens(const struct manager *m);

/* Says this (lines of sd_notify(3)), with an fd (-1: none), which stays the caller's. Waits
 * for a place in the manager's queue, so long at most. What was said is said, also where this
 * process ends now. -ETIMEDOUT: nothing was said; -errno, the same (the manager is gone, say). */
int manager_tell(const struct manager *m, const char *text, int fd, unsigned timeout_ms);

/* Waits until the manager has done what it was told before by this thread, so long at most.
 * -ETIMEDOUT: it is not known; -errno. */
int manager_barrier(const struct manager *m, unsigned timeout_ms);

/* How often manager_beat() is to be called; 0: nobody listens. */
uint64_t manager_beat_ms(const struct manager *m);

/* Once the daemon serves; again and again from its loop; once it ends. */
void manager_ready(struct manager *m, const struct manager_figures *figures);
void manager_beat(struct manager *m, const struct manager_figures *figures);
void manager_ending(struct manager *m, size_t n_sessions);

#endif
