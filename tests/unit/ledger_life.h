/* SPDX-License-Identifier: Apache-2.0 */
/* A life for a ledger: sessions, extents, exports, blocks and shared blocks come and go
 * at random, as the daemon would have them. All that it knows it reads from the ledger, so
 * another process can go on with it after this one was killed. */
#ifndef TESTS_LEDGER_LIFE_H
#define TESTS_LEDGER_LIFE_H

#include "daemon/ledger/table.h"

enum {
        LIFE_QUOTAS = 3, /* two of "vision", one of "audio" */
        LIFE_SESSIONS = 8,
        LIFE_EXTENTS = 24, /* of each quota 8 places */
        LIFE_EXPORTS = 80,
        LIFE_BLOCKS = 120,
        LIFE_SHARED = 12,
        LIFE_REFS = 40,
        LIFE_METADATA = 5,
        LIFE_PLACES = 8,          /* for extents, in each quota */
        LIFE_CELLS_PER_PLACE = 8, /* for blocks */
        LIFE_CELLS = LIFE_PLACES * LIFE_CELLS_PER_PLACE,
        LIFE_CELL_BYTES = 256 << 10,
};

struct life {
        struct ledger *l;
        uint64_t random; /* state, not 0 */
        uint32_t extents[LIFE_QUOTAS][LIFE_PLACES];
        uint32_t cells[LIFE_QUOTAS][LIFE_CELLS]; /* blocks */
};

/* A new ledger with the quotas. */
struct ledger *life_ledger(void);

/* Finds out what lies where. */
void life_join(struct life *life, struct ledger *l, uint64_t seed);

/* One random operation. */
void life_step(struct life *life);

uint32_t life_random(struct life *life, uint32_t below);

/* NULL, or what of the facts is not as this life writes them. */
const char *life_check(struct ledger *l);

#endif
