/* An instance of bfc/ and the oracle, led through the same operations. Unit and
 * fuzz tests choose the operations; here the two are compared: every result,
 * offset and plan at once, and on request every chunk, statistic and invariant.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_PAIR_H
#define BFC_TESTS_PAIR_H

#include "bfc/bfc.h"
#include "tests/bfc_oracle.h"

enum pair_op {
        PAIR_ALLOC,       /* value: bytes */
        PAIR_FREE,        /* value: which one, modulo their number; the same below */
        PAIR_GROW,        /* value: bytes; plans and begins */
        PAIR_COMMIT,      /* value: which pending one */
        PAIR_CANCEL,      /* value: which pending one */
        PAIR_RELEASE,     /* value: granules; plans, and begins what was planned */
        PAIR_RELEASE_ANY, /* value: which extents; begins, free or not */
        PAIR_RETIRED,     /* value: which retiring one */
        PAIR_BACK,        /* value: which extents */
        PAIR_STALE,       /* value: a handle from anywhere, or which old one */
        PAIR_CLEAR_PEAKS,
        PAIR_REGION,          /* value: which region; takes it away, or adds it again */
        PAIR_ALLOC_IN_EXTENT, /* value: bytes */
        PAIR_GROW_IN_EXTENT,  /* value: bytes; plans and begins */
        PAIR_SPLIT,           /* value: which one; from bit 16 on: where, in granules, modulo its size */
        PAIR_N_OPS,
};

struct pair_block {
        bfc_handle handle;
        uint32_t id;
};

#define PAIR_MAX_RANGES 64
#define PAIR_N_STALE    64
#define PAIR_N_REGIONS  8

struct pair_region {
        uint64_t base, n_bytes;
        struct bfc_zones zones;
        bool away;
};

struct pair {
        struct bfc *b;
        struct oracle o;
        uint32_t last_id;
        struct pair_block *live;
        size_t n_live, n_live_room;
        struct pair_block pending[PAIR_MAX_RANGES];
        size_t n_pending;
        struct bfc_range retiring[PAIR_MAX_RANGES];
        size_t n_retiring;
        struct pair_region regions[PAIR_N_REGIONS];
        size_t n_regions;
        bfc_handle stale[PAIR_N_STALE];
        size_t n_stale;
        uint64_t n_ok[PAIR_N_OPS]; /* how often each operation did something */
};

void pair_init(struct pair *p, uint64_t extent_bytes);
void pair_done(struct pair *p);

/* NULL, or a sentence about the difference. */
const char *pair_add_region(struct pair *p, uint64_t base, uint64_t n_bytes, uint64_t first, bool backed);
const char *pair_add_zoned_region(struct pair *p, uint64_t base, uint64_t n_bytes,
                                  const struct bfc_zones *zones, bool backed);
const char *pair_step(struct pair *p, enum pair_op op, uint64_t value);
const char *pair_compare(const struct pair *p);

#endif
