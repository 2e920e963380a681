/* The watch: destroyed extents of host memory that other processes still have open.
 *
 * A hole is punched over a destroyed extent, which empties every mapping of it. A process that kept a
 * mapping or an fd can write to it again, which takes memory that no arena has. No seal forbids that:
 * F_SEAL_WRITE fails while a writable mapping exists, and F_SEAL_SHRINK, which protects the clients of a
 * tenant from each other, forbids truncation. So the daemon keeps an fd of such an extent for a while and
 * checks periodically whether it has memory again. The owner decides what happens then.
 *
 * If no other process has an extent open or mapped, the kernel grants a write lease, because the file has
 * only one file description; the extent is then no longer watched.
 *
 * Bounds: WATCH_MAX_OF_OWNER extents of one owner, and the number given to watch_new() in total. If an
 * owner has too many, its oldest is dropped. If there are too many in total, the owner's oldest is
 * dropped, or else the new one.
 *
 * Invariants: each entry is in the list of all and in its owner's; n_bytes of an owner is the sum over
 * its entries of what the last check found.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_WATCH_H
#define BFCD_WATCH_H

#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>

#define WATCH_MAX_OF_OWNER 1024u /* more than an arena has under its initial limit */

struct watch;
struct watch_entry;
TAILQ_HEAD(watch_entry_list, watch_entry);

/* Embedded in an arena. */
struct watch_owner {
        struct watch_entry_list entries; /* the oldest first */
        size_t n_entries;
        uint64_t n_bytes; /* found in them */
        /* Memory was found in an extent of n_bytes. fd is the watch's; -1: less memory is found than before.
         * NULL: nothing is called. */
        void (*refilled)(struct watch_owner *owner, int fd, uint64_t n_bytes);
};

int watch_new(size_t n_max, struct watch **ret);
struct watch *watch_free(struct watch *w); /* every owner has left; takes NULL */

void watch_owner_init(struct watch_owner *o,
                      void (*refilled)(struct watch_owner *o, int fd, uint64_t n_bytes));

/* Takes over the fd of an extent that was destroyed. w NULL: closes it. */
void watch_add(struct watch *w, struct watch_owner *o, int fd, uint64_t n_bytes);

/* Drops all entries of the owner. */
void watch_leave(struct watch *w, struct watch_owner *o);

/* Checks at most n entries, those first that were not checked for the longest time. */
void watch_look(struct watch *w, size_t n);

size_t watch_n_entries(const struct watch *w);

#endif
