/* The model of the random walk (test_walk.c): which session has which block, how large, under
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
#define N_SHARES  2u /* of a tenant, at most */
#define N_LEASES  6u

#define RECLAIM_MS 40u    /* timeouts.reclaim */
#define TIMEOUT_MS 20000u /* no request waits longer, with N_PENDING before it */

extern const char *const walk_names[N_NAMES];

struct block {
        uint64_t id, region, offset, n_bytes, n_requested;
        uint32_t quota;         /* in the ledger */
        unsigned tenant;        /* index */
        uint32_t share;         /* of the tenant */
        int owner;              /* a slot; -1: it is shared */
        int name;               /* where it is shared */
        uint64_t refs[N_SLOTS]; /* where it is shared */
};

enum request { NONE, MALLOC, FREE, PUBLISH, ATTACH, LIST, EXPLAIN, USAGE, CHARGE, UNCHARGE, GOODBYE };

/* A Trim that a session was sent and has not answered. */
struct asked {
        uint64_t sequence; /* 0: there is none */
        uint64_t sent_ms;
        bool is_unresponsive;
};

struct pending {
        uint64_t id;
        enum request what;
        uint64_t n_bytes;
        uint32_t share;
        uint64_t block_id;
        int name;
        uint64_t since_ms;
        int error; /* that it must be refused with; 0: must not; -1: either */
};

struct slot {
        struct peer *peer; /* NULL: none */
        struct pending pending[N_PENDING];
        size_t n_pending;
        uint64_t stale_id;         /* a block that it freed */
        uint64_t direct[N_SHARES]; /* charged directly */
        struct asked asked[N_SHARES];
        uint64_t n_missed; /* Trims, in time */
};

struct lease_model {
        bool exists, is_ended;
        char name[8];
        unsigned tenant, partition; /* indices */
        uint32_t share;             /* of the tenant */
        uint64_t limit, reserve;
        uint64_t allowed;  /* the limit, or what was charged when it was lowered, less what was released */
        const char *group; /* NULL: it is for a user */
        uint32_t uid;
        uint64_t number; /* the newest has the highest */
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
        uint64_t limits[3][N_SHARES];          /* by tenant, in bytes */
        uint64_t order_id, order_ms;           /* of the operator's Trim that is open; 0: none */
        uint64_t n_retired;                    /* Retires that were answered */
        uint64_t n_relieved;                   /* Pressures that were answered, truly or not */
        uint64_t n_trims, n_answers, n_missed; /* answered truly or not; not in time */
        uint64_t n_orders, n_evicted, n_lies;
        uint64_t longest_wait_ms;
        unsigned n_growths; /* the most of a quota at once */
        struct lease_model leases[N_LEASES];
        uint64_t allowed[3][N_SHARES], partitions_allowed[2]; /* as in leases */
        uint64_t n_leases, n_leases_gone, n_leases_refused, n_lease_evictions, n_joined;
};
extern struct walk w;
extern uint64_t walk_now_ns; /* of the only clock there is */

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
static inline uint64_t now_ms(void)
{
        return walk_now_ns / 1000000u;
}

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
/* Whether what it has charged directly must be charged: while it lives, and in the end until its process has ended. */
bool keeps_direct(const struct slot *s);
/* One that the session has; NULL: none. */
struct block *some_block(const struct slot *s);

/* All that a session had is gone; and what of it a slice has freed. */
void forget_blocks(unsigned slot);
void forget_freed(unsigned slot);

/* The next request of the session is this one, and is answered so: its reply is looked for from now
 * on. Peers number requests from 1. */
struct pending *expect(struct slot *s, enum request what, int error);

/* Whether it has asked for that block to be freed, and has no answer yet. */
bool is_being_freed(const struct slot *s, uint64_t id);

/* Whether any of the block lies in that range. */
bool lies_in(const struct block *block, uint64_t region, uint64_t offset, uint64_t n_bytes);

/* Time has passed: marks late answers, and checks that no request waits for ever. */
void time_passed(void);

/* All replies that came are compared with the model, which learns from them. */
void collect(void);

/* All that the model knows, against the daemon. */
void check_all(void);

/* ---- leases (walk_lease.c) ------------------------------------------------------ */

struct lease_model *lease_model_of(const char *name);

/* The control group of a session that begins; NULL: none. */
const char *walk_some_group(void);
/* The session has begun, and is in the leases that it should be in. */
void walk_joined(const struct session *s);

/* Sums and limits of leases, tenants and partitions, after each step. */
void walk_check_levels(void);

void op_lease_create(struct slot *s);
void op_lease_set(struct slot *s);
void op_lease_end(struct slot *s);

/* When there is no session any more. */
void walk_end_leases(void);

#endif
