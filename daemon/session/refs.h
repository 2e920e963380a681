/* References: the shared blocks that a session has, by their index in the ledger.
 *
 * The ledger has each reference in two lists, its session's and its block's, and both can be long. This
 * is a sorted array, so a reference is found by binary search in any order of attaches. Adding or
 * removing one moves at most 8 KiB.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_REFS_H
#define BFCD_REFS_H

#include <stddef.h>
#include <stdint.h>

#include "daemon/memory/broker.h"

#define REFS_MAX CAPACITY_REFS

struct ref_at {
        uint32_t shared, ref; /* in the ledger */
};

/* Zeros are an empty list. */
struct refs {
        struct ref_at *list; /* owned; by `shared`, each once */
        size_t n;            /* the list has room for as many as the next power of two */
};

void refs_clear(struct refs *h); /* and frees */

/* LEDGER_NONE: there is none. */
uint32_t refs_find(const struct refs *h, uint32_t shared);

/* Makes room, so that the next refs_add() cannot fail. There are fewer than REFS_MAX. -ENOMEM. */
int refs_make_room(struct refs *h);
void refs_add(struct refs *h, uint32_t shared, uint32_t ref);

void refs_remove(struct refs *h, uint32_t shared); /* it exists */

#endif
