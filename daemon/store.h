/* The store: the fds that the service manager (systemd) keeps for the daemon's successor,
 * as sd_notify(3) has it (FDSTORE=1). They are the ledger's, and one for each extent that can
 * be kept by an fd. Mechanism without policy: what is in it, what of it was handed over at the
 * start, and messages that wait, bounded, for the manager.
 *
 * An extent is known in it by its key, which is in its record in the ledger, too, and is never
 * given again while either may have it. Names are as short as they can be ("x1f"), since all of
 * them together travel in one string of the environment, of 128 KiB: more would keep the
 * successor from being started. So the store refuses what would be more, or more than the manager keeps.
 *
 * The manager has every service of the machine to serve, and to keep an fd costs it a look at
 * every other one. So what it is told is paced: beyond a burst a fifth of a processor's time of it,
 * as reckoned, whatever a tenant does; those who tell it wait.
 *
 * NULL, or a store that does not keep: what is put or removed is not, and that is no error.
 * Any thread may put and remove extents; it waits, so a worker does, never the loop. All else
 * belongs to the loop's thread.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_STORE_H
#define BFCD_STORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/manager.h"

struct store;

/* Takes what the manager hands over under the names of a store. Reads $FDSTORE (how many it
 * keeps; systemd 254) and $BFCD_FDSTORE (1: it keeps as many as bfcd.service says; another
 * number: so many; 0: nothing is to be kept), and takes them out of the environment.
 * -ENOMEM. m is borrowed. */
int store_new(struct manager *m, struct store **ret);
struct store *store_free(struct store *s); /* closes what nobody took; the manager keeps it; takes NULL */

/* There is a manager, and it was said that it keeps fds, or it has handed some over. */
bool store_keeps(const struct store *s);

/* Whether the environment says that the manager hands over a ledger; before manager_new(). */
bool store_brings_ledger(void);

/* How many more extents it would keep, their names left aside. */
size_t store_room(struct store *s);

/* How long one message waits for the manager; 5 s where this is not said. For tests. */
void store_set_patience(struct store *s, unsigned ms);

/* What was handed over: the caller's from now on; -1: none, or there is more than one of this
 * name, or nothing is to be kept. A key that was asked for is never given by store_next_key(). */
int store_take_ledger(struct store *s);
int store_take_extent(struct store *s, uint64_t key);

/* What nobody took is removed from the manager, and closed: the rest of the extents, and a ledger
 * that was neither taken nor put. How many. */
size_t store_drop_rest(struct store *s);

/* A key that none in the store has; 0, which names nothing: it does not keep. */
uint64_t store_next_key(struct store *s);

/* At the start, of a ledger that is new: one that was handed over is removed first, and then
 * all extents that nobody took, so that their memory can be had again. After an error it does
 * not keep any more. -errno. */
int store_put_ledger(struct store *s, int fd);
int store_remove_ledger(struct store *s);

/* In the place of the one that was taken, whose copy it is: that is removed when this one is there,
 * and a successor of whoever is killed in between takes this one. (Where the store is full it is
 * removed before.) -ENOSPC: after 63 times; -errno, and the one that was taken still counts. */
int store_swap_ledger(struct store *s, int fd);

/* The fd stays the caller's. Key 0: nothing is done. -EXFULL: it is full; -ETIMEDOUT: the
 * manager takes nothing; -errno. After an error it is not there. */
int store_put_extent(struct store *s, uint64_t key, int fd);

/* Nothing where it is not there; its key is not given again, whoever knew it. wait: until the manager has closed its own. After an error it is still there, or may be;
 * what could not be removed is removed with a later call. */
int store_remove_extent(struct store *s, uint64_t key, bool wait);

#endif
