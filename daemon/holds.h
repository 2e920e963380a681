/* Which shared blocks a session has: its holds, in order of the shared blocks' places in
 * the ledger.
 *
 * The ledger has each hold in two lists, its session's and its block's, and both can be
 * long: they are walked by whoever wants all of them. Here one is looked for, by halves
 * in one piece of memory, so what that costs is the same whatever clients attach, and in
 * whatever order. To add or remove one moves at most 8 KiB.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_HOLDS_H
#define BFCD_HOLDS_H

#include <stddef.h>
#include <stdint.h>

#include "daemon/broker.h"

#define HOLDS_MAX BROKER_HOLDS

struct hold_at {
        uint32_t shared, hold; /* in the ledger */
};

/* Begins as zeros. */
struct holds {
        struct hold_at *list; /* owned; by `shared`, each once */
        size_t n, n_max;
};

void holds_clear(struct holds *h); /* and frees */

/* LEDGER_NONE: it is not there. */
uint32_t holds_find(const struct holds *h, uint32_t shared);

/* Room for one more, so that the next holds_add() cannot fail. There are fewer than
 * HOLDS_MAX. -ENOMEM. */
int holds_make_room(struct holds *h);
void holds_add(struct holds *h, uint32_t shared, uint32_t hold);

void holds_remove(struct holds *h, uint32_t shared); /* it is there */

#endif
