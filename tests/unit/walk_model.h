/* The model that the random walk (test_walk.c) goes beside: who has which block, how large, under
 * which name, held by whom. It is too simple to be wrong, and knows the daemon's side only by its
 * replies.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_WALK_MODEL_H
#define BFC_TESTS_WALK_MODEL_H

#include <inttypes.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "tests/peer.h"
#include "tests/random.h"

#define N_SLOTS   12u
#define N_BLOCKS  1024u /* of all, in the model */
#define N_PENDING 48u   /* of a session */
#define N_NAMES   6u

extern const char *const walk_names[N_NAMES];

struct block {
        uint64_t id, region, offset, n_bytes, n_requested;
        uint32_t quota;          /* in the ledger */
        unsigned tenant;         /* index */
        int owner;               /* a slot; -1: it is shared */
        int name;                /* where it is shared */
        uint64_t holds[N_SLOTS]; /* where it is shared */
};

enum request { NONE, MALLOC, FREE, PUBLISH, ATTACH, LIST, EXPLAIN, USAGE, GOODBYE };

struct pending {
        uint64_t id;
        enum request what;
        uint64_t n_bytes;
        uint32_t share;
        uint64_t block_id;
        int name;
        int error; /* that it must be refused with; 0: must not; -1: who knows */
};

struct slot {
        struct peer *peer; /* NULL: nobody */
        struct pending pending[N_PENDING];
        size_t n_pending;
        uint64_t stale_id; /* a block that it freed */
};

struct walk {
        uint64_t seed, random, step;
        bool sticky;
        struct broker *b;
        struct peer *admin;
        struct slot slots[N_SLOTS];
        struct block blocks[N_BLOCKS];
        size_t n_blocks;
        uint64_t n_done[16]; /* replies, by request */
        uint64_t n_refused, n_reloads;
};
extern struct walk w;

#define HOLDS(condition, ...)                                                                                \
        do {                                                                                                 \
                if (!(condition)) {                                                                          \
                        fprintf(stderr, "seed %" PRIu64 ", step %" PRIu64 ": %s: ", w.seed, w.step,          \
                                #condition);                                                                 \
                        fprintf(stderr, "" __VA_ARGS__);                                                     \
                        fputc('\n', stderr);                                                                 \
                        abort();                                                                             \
                }                                                                                            \
        } while (0)
static inline uint64_t dice(uint64_t n)
{
        return random_next(&w.random) % n;
}

unsigned slot_index(const struct slot *s);
unsigned tenant_index(const struct session *s);

struct block *block_by_id(uint64_t id);
struct block *block_by_name(unsigned tenant, int name);

/* Whether the session has it, as its own or shared. */
bool has(const struct slot *s, const struct block *block);
/* One that the session has; NULL: none. */
struct block *some_block(const struct slot *s);

/* All that a session had is gone; and what of it a slice has freed. */
void forget_blocks(unsigned slot);
void forget_freed(unsigned slot);

/* The next request of the session is this one, and is answered so: its reply is looked for from now
 * on. Peers number requests from 1. */
struct pending *expect(struct slot *s, enum request what, int error);

/* All replies that came are compared with the model, which learns from them. */
void collect(void);

/* All that the model knows, against the daemon. */
void check_all(void);

#endif
