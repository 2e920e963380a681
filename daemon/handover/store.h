/* The store: the fds that the service manager (systemd) keeps for the next daemon (FDSTORE=1 of
 * sd_notify(3)): the ledger's, and one for each extent that an fd keeps. Mechanism without policy: its
 * contents, the fds that were passed at the start, and a bounded queue of messages to the manager.
 *
 * An extent is identified by its key, which is also in its ledger record and is not reused while either
 * may have it. Names are as short as possible ("x1f"), because all names together are in one environment
 * string of at most 128 KiB; a longer one would prevent the start of the next daemon. So the store
 * refuses to exceed that, or the number that the manager keeps.
 *
 * The manager serves all services of the machine, and storing an fd makes it compare the fd with all
 * others. So messages are paced: beyond a burst they use at most an estimated fifth of a processor's
 * time, and callers wait.
 *
 * With NULL, or a store that does not keep, putting and removing do nothing and succeed. Any thread may
 * put and remove extents. This waits, so it is done by workers, never by the loop. All other functions
 * belong to the loop's thread.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_STORE_H
#define BFCD_STORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/handover/manager.h"

struct store;

/* Takes the fds with a store's names from the manager. Reads $FDSTORE (the number that it keeps; systemd
 * 254) and $BFCD_FDSTORE (1: the number in bfcd.service; another number: that many; 0: keep nothing), and
 * removes them from the environment. m is borrowed. -ENOMEM. */
int store_new(struct manager *m, struct store **ret);
struct store *store_free(struct store *s); /* closes remaining fds, which the manager still has; takes NULL */

/* There is a manager, and it keeps fds as configured, or it has passed some. */
bool store_keeps(const struct store *s);

/* True: the environment says that the manager passes a ledger; before manager_new(). */
bool store_has_ledger(void);

/* The number of extents that it would keep in all, and of further ones, apart from the limit on names. SIZE_MAX: it does
 * not keep any. */
size_t store_max(const struct store *s);
size_t store_room(struct store *s);

/* How long one message waits for the manager; by default 5 s. For tests. */
void store_set_timeout(struct store *s, unsigned ms);

/* Fds that were passed, which the caller then owns; -1: none, or several with this name, or nothing is
 * kept. A key that was requested is never returned by store_next_key(). */
int store_take_ledger(struct store *s);
int store_take_extent(struct store *s, uint64_t key);

/* Removes the remaining fds from the manager and closes them: other extents, and a ledger that was
 * neither taken nor put. Returns their number. */
size_t store_drop_rest(struct store *s);

/* A key that is not in the store; 0, which is never a key: the store does not keep. */
uint64_t store_next_key(struct store *s);

/* At the start, for a new ledger: removes a ledger that was passed, and then all remaining extents, so
 * that their memory is free. After an error the store does not keep any more. -errno. */
int store_put_ledger(struct store *s, int fd);
int store_remove_ledger(struct store *s);

/* Replaces the ledger that was taken by its copy: the old one is removed when the new one is stored, and
 * if the daemon is killed in between its successor uses the new one. (If the store is full the old one is
 * removed before.) -ENOSPC: after 63 replacements; -errno: the old one is still valid. */
int store_swap_ledger(struct store *s, int fd);

/* The caller keeps the fd. Key 0: does nothing. -EXFULL: the store is full; -ETIMEDOUT: the manager does
 * not read; -errno. After an error the extent is not stored. */
int store_put_extent(struct store *s, uint64_t key, int fd);

/* Does nothing if it is not stored; its key is not reused. wait: until the manager has closed its fd.
 * After an error it may still be stored; a later call removes it. */
int store_remove_extent(struct store *s, uint64_t key, bool wait);

#endif
