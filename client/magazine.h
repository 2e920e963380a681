/* Magazines: freed blocks up to 32 MiB that wait for the next request of their size, and the exact sum of
 * bytes in use.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Neither takes a lock that all threads share. A client has a few magazines, twice as many as processors,
 * at least 16 and at most 64. A thread owns the magazine of its slot (biased_lock.h). Threads without a slot use
 * any, and move on when they meet another thread. Blocks of a thread that ended are used by the slot's next one.
 *
 * Of blocks above 1 MiB a magazine stashes one, and only of a thread that requests and frees one size of them in turn.
 * Others are seldom reused soon: they would only keep the cache's free space in pieces, and make requests of other
 * threads empty all magazines.
 *
 * A stashed block keeps its record in the table and its place in the cache, so stashing and unstashing
 * changes a list and a word. magazines_take_all() removes memory that is needed elsewhere.
 *
 * The sum and its peak: a freed block stays in its magazine as credit for the next block, up to a bound.
 * With that
 *
 *   bound == in use + the sum of the credits <= peak
 *
 * holds at any moment. An allocation on credit does not check the peak, and one that raises the bound up
 * to the peak needs no other magazine. Only an allocation that would exceed the peak stops all magazines,
 * collects the credits, and so knows the sum; new peaks are rare.
 *
 * There are two such sums: of the magazines' own partition, and of all partitions. The second one is kept
 * from the first block of another partition on. Before that both are equal, so a process with one
 * partition does not pay for it.
 *
 * Any thread may call. "One at a time" requires a lock of the caller, the same for all. */
#ifndef BFC_CLIENT_MAGAZINE_H
#define BFC_CLIENT_MAGAZINE_H

#include <stdbool.h>
#include <stdint.h>

#include "client/blocks.h"
#include "proto/pages.h"

#define MAGAZINE_SMALL_BYTES  UINT64_C(16384)      /* larger ones are large */
#define MAGAZINE_LARGE_BYTES  (UINT64_C(1) << 20)  /* larger ones are huge */
#define MAGAZINE_HUGE_BYTES   (UINT64_C(32) << 20) /* larger ones are not stashed */
#define MAGAZINE_HUGE_AFTER   32u /* so many are requested and freed in turn before one is stashed */
#define MAGAZINE_BLOCKS       64u /* the maximum of small ones in each */
#define MAGAZINE_LARGE_BLOCKS 16u /* large ones */
#define MAGAZINE_MAX_SMALL    (UINT64_C(256) << 10) /* the maximum bytes of small ones in each */
#define MAGAZINE_MAX_LARGE    (UINT64_C(2) << 20)   /* and of large ones */

struct magazines;

/* max_bytes: of all blocks in all magazines. -ENOMEM. */
int magazines_new(uint64_t max_bytes, struct magazines **ret);
struct magazines *magazines_free(struct magazines *m); /* takes NULL */

/* The bytes of the largest block that may be stashed; 0: none. Constant. */
uint64_t magazines_max_block(const struct magazines *m);

/* A stashed block for a request of 1 to MAGAZINE_HUGE_BYTES, counted as allocated. NULL: there is none, or
 * it would exceed the peak. */
struct record *magazines_get(struct magazines *m, uint64_t n_requested);

/* Takes a stashed block and counts it as freed. Returns blocks that must leave, a list by `below`: the
 * magazine's small ones, or its large and huge ones, if there are too many of these; or one that is huge. */
struct record *magazines_put(struct magazines *m, struct record *record);

/* One at a time: empties all magazines; a list by `below`. */
struct record *magazines_take_all(struct magazines *m);

/* One at a time: a block was allocated or freed without a magazine. */
void magazines_count_alloc(struct magazines *m, uint64_t n_bytes);
void magazines_count_free(struct magazines *m, uint64_t n_bytes);

/* Counts a block of another partition than the magazines', only in the sum over all. */
void magazines_count_other_alloc(struct magazines *m, uint64_t n_bytes);
void magazines_count_other_free(struct magazines *m, uint64_t n_bytes);

/* From now on the stashed bytes and the ages of blocks are also written to `stashed`, in at most n_places
 * places, which must outlive the magazines. Returns how many are used. Before any other thread. */
unsigned magazines_show(struct magazines *m, struct pages_stashed *stashed, unsigned n_places);

/* One at a time: locks all magazines, and unlocks them. */
void magazines_lock(struct magazines *m);
void magazines_unlock(struct magazines *m);

struct magazine_sums {
        uint64_t num_allocs;      /* by magazines_get() */
        uint64_t num_frees;       /* by magazines_put() */
        uint64_t bytes_requested; /* of the former, less the latter; modulo 2^64 */
        uint64_t bytes_in_use;    /* of everything counted, except other partitions */
        uint64_t peak_bytes_in_use;
        uint64_t all_bytes_in_use; /* including other partitions */
        uint64_t all_peak_bytes_in_use;
        uint64_t bytes_stashed;
};

/* One at a time; a consistent snapshot. */
void magazines_read(struct magazines *m, struct magazine_sums *ret);
void magazines_reset_peak(struct magazines *m); /* both; one at a time */

#endif
