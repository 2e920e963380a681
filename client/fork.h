/* What a forked child finds of the clients of its parent.
 *
 * A client registers its address ranges and its sockets. In the child the handler of fork(2) puts
 * reserved addresses (PROT_NONE) in the place of each range before any other code of the program
 * runs there, and closes the sockets. The ranges are inherited mappings until then, so there is no
 * moment at which another mapping could be placed there.
 *
 * The list has a lock of its own, which is held over fork() and otherwise only while an entry is
 * added or removed. No code waits or takes another lock under it, so fork() cannot deadlock.
 *
 * Invariant: a registered range is mapped by its owner, and by nothing else.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CLIENT_FORK_H
#define BFC_CLIENT_FORK_H

#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>

/* Embedded in its owner. */
struct fork_entry {
        /* Called in the child, on its only thread. Async-signal-safe functions only; no lock. */
        void (*in_child)(struct fork_entry *entry);
        void *userdata;
        void *base; /* of a range */
        size_t n_bytes;
        LIST_ENTRY(fork_entry) link;
};

/* Must succeed once before the registrations count. -ENOMEM. */
int fork_watch(void);

/* in_child, userdata, base and n_bytes are the caller's to set. */
void fork_add(struct fork_entry *entry);
/* A range is removed before it is unmapped. */
void fork_remove(struct fork_entry *entry);

/* For in_child: reserves the range, whatever is mapped there. */
void fork_hide(struct fork_entry *entry);
/* The same for a range of which the child inherits nothing. Where it inherits a part, nothing is
 * changed. */
void fork_fill(struct fork_entry *entry);

/* How often this process has forked, as far as fork_watch() can tell. */
uint64_t fork_count(void);

#endif
