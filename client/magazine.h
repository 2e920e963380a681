/* Magazines: blocks up to 1 MiB that were freed and wait for the next request of their size, and the
 * exact sum of what is in use.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Neither takes a lock that all threads share, so neither makes threads wait for each other.
 * A client has a few magazines, twice as many as processors and at least 16; a
 * thread begins with the next one and stays there, and where it meets another thread it moves on.
 * So a few threads have one each, and what a thread leaves behind when it ends is another's.
 *
 * A parked block keeps its record in the table and its place in the cache's pool, so parking and
 * unparking is a list and a word. It is idle, and nobody else's to have: who needs it
 * takes all out by magazines_take_all().
 *
 * The sum and its peak: what a free gives back in a magazine stays there as credit for its next
 * block, up to a bound. With that
 *
 *   bound == in use + the sum of the credits <= peak
 *
 * holds at any moment, so who allocates on credit need not look at the peak, and who
 * raises the bound up to the peak needs nobody else. Only who would pass it stops all,
 * collects the credits, and so knows the sum; that is rare, as a peak is.
 *
 * There are two such sums: of the magazines' own partition, and of all partitions. The second one
 * is kept from the first block of another partition on. Before that both are equal, so a process
 * with one partition does not pay for it.
 *
 * Any thread, but for what says "one at a time": this takes a lock of the caller's, the same
 * for all. */
#ifndef BFC_CLIENT_MAGAZINE_H
#define BFC_CLIENT_MAGAZINE_H

#include <stdbool.h>
#include <stdint.h>

#include "client/blocks.h"
#include "proto/pages.h"

#define MAGAZINE_BLOCK_BYTES  (UINT64_C(1) << 20)   /* larger ones are not parked */
#define MAGAZINE_SMALL_BYTES  UINT64_C(16384)       /* larger ones are large */
#define MAGAZINE_BLOCKS       64u                   /* small ones in each, at most */
#define MAGAZINE_LARGE_BLOCKS 16u                   /* large ones */
#define MAGAZINE_MAX_SMALL    (UINT64_C(256) << 10) /* bytes of small ones in each, at most */
#define MAGAZINE_MAX_LARGE    (UINT64_C(2) << 20)   /* and of large ones */

struct magazines;

/* max_bytes: what all may hold together. -ENOMEM. */
int magazines_new(uint64_t max_bytes, struct magazines **ret);
struct magazines *magazines_free(struct magazines *m); /* takes NULL */

/* The bytes of the largest block that may be parked; 0: none. Constant. */
uint64_t magazines_max_block(const struct magazines *m);

/* A block for a request of 1 to magazines_max_block(), used again, and counted as allocated. NULL:
 * there is none, or it cannot be counted so. */
struct record *magazines_get(struct magazines *m, uint64_t n_requested);

/* Takes a parked block and counts it as freed. Returns what does not stay, a list by `below`: the
 * magazine's small ones or its large ones, where it is full of these now. */
struct record *magazines_put(struct magazines *m, struct record *record);

/* One at a time: empties all magazines; a list by `below`. */
struct record *magazines_take_all(struct magazines *m);

/* One at a time: a block came or went otherwise. */
void magazines_count_alloc(struct magazines *m, uint64_t n_bytes);
void magazines_count_free(struct magazines *m, uint64_t n_bytes);

/* The same for a block of another partition than the magazines': it counts only in the sum over all. */
void magazines_count_other_alloc(struct magazines *m, uint64_t n_bytes);
void magazines_count_other_free(struct magazines *m, uint64_t n_bytes);

/* From now on what is parked, and the ages of what was given, is told there too, in at most so many places, which must outlive the
 * magazines. Returns how many are used. Before any other thread comes. */
unsigned magazines_show(struct magazines *m, struct pages_parked *parked, unsigned n_places);

/* One at a time: nobody parks or takes anything, nor tells it, until the latter. */
void magazines_hold(struct magazines *m);
void magazines_release(struct magazines *m);

struct magazine_sums {
        uint64_t num_allocs;      /* by magazines_get() */
        uint64_t num_frees;       /* by magazines_put() */
        uint64_t bytes_requested; /* of the former, less the latter; modulo 2^64 */
        uint64_t bytes_in_use;    /* of all that was counted, but for other partitions */
        uint64_t peak_bytes_in_use;
        uint64_t all_bytes_in_use; /* with other partitions */
        uint64_t all_peak_bytes_in_use;
        uint64_t bytes_parked;
};

/* One at a time; of one moment. */
void magazines_read(struct magazines *m, struct magazine_sums *ret);
void magazines_reset_peak(struct magazines *m); /* both; one at a time */

#endif
