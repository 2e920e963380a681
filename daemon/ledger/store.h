/* The store: what the host's keeper keeps for the next daemon: the ledger's fd, and one for each extent that
 * an fd keeps.
 *
 * An extent is identified by its key, which is also in its ledger record and is not reused while either may
 * have it.
 *
 * With NULL putting and removing do nothing and succeed. Any thread may put and remove extents. This waits
 * for the keeper, so it is done by workers, never by the loop. All other functions belong to the loop's
 * thread, before it runs.
 *
 * This process has all that the keeper has. So from store_tend() on one that ends, or does not answer for
 * 5 s, is replaced by another one, to which a thread of the store gives all of it, and calls that wait
 * meanwhile continue.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_STORE_H
#define BFCD_STORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "keeper/start.h"

struct store;

/* Connects to the keeper, which is started if there is none. One that does not answer in time is ended, with
 * what it has, which is logged, and another one is started. An external one of another version would be so again, and is not
 * ended. k is borrowed. -errno, with a sentence. */
int store_new(struct keepers *k, struct store **ret, char *ret_sentence, size_t n_sentence);
struct store *store_free(struct store *s); /* the keeper keeps what it has; takes NULL */

/* From now on the keeper is replaced as above. Before that calls fail when it has ended: what it had is not
 * known yet. Takes NULL. -errno: there is no thread. */
int store_tend(struct store *s);

/* From now on calls fail, also those that wait. Any thread; does not wait; takes NULL. */
void store_end(struct store *s);

/* Since when the keeper has not answered, by clock_ns(): a call waits for it, or it is being replaced. 0: it
 * has. Any thread; takes NULL. */
uint64_t store_silent_since_ns(const struct store *s);

bool store_keeps(const struct store *s);
bool store_is_new(const struct store *s); /* there was no keeper */

/* Another program starts the keeper, so it stays. Takes NULL. */
bool store_is_external(const struct store *s);

/* Fds that the caller then owns. -ENOENT: none; -errno: it is unknown whether there is one. A key that was
 * requested is never returned by store_next_key(). */
int store_take_ledger(struct store *s);
int store_take_extent(struct store *s, uint64_t key);

/* Drops what was neither put nor taken. Returns the number of these extents. */
size_t store_drop_rest(struct store *s);

/* A key that is not in the store; 0, which is never a key: the store does not keep. */
uint64_t store_next_key(struct store *s);

/* The caller keeps the fd. A ledger replaces the one before. -ENOTCONN: there has been no keeper for a while,
 * or it does not answer; -errno: nothing has changed. */
int store_put_ledger(struct store *s, int fd);
int store_put_extent(struct store *s, uint64_t key, int fd);

/* Does nothing if it is not stored; its key is not reused. The keeper has closed its fd then. */
int store_remove_extent(struct store *s, uint64_t key);

#endif
