/* A daemon that dies after a chosen store to its ledger, or crashes while it restores a chosen object. kill_points.c is
 * linked into a daemon for tests. It sees each store, also those through pointers to records: the ledger is mapped
 * read-only, and the faulting instruction is executed as a single step.
 *
 * A call of the C library, such as memcpy(), counts as one store.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_KILL_POINTS_H
#define BFC_TESTS_KILL_POINTS_H

#include <stdint.h>

/* The environment variable with the path of a file of one page. */
#define KILL_POINTS_FILE "BFC_TEST_KILL_POINTS"

#define KILL_POINTS_DIED UINT32_MAX

/* Shared with the test. */
struct kill_points {
        uint32_t at;        /* die at this store, counted from 1; 0: at none; or KILL_POINTS_DIED */
        uint32_t is_before; /* not 0: before that store, with all other effects of the code in front of it */
        uint32_t n;         /* stores since the test set it to 0 */

        /* Aborts where a daemon begins to restore this, if it is not closed: "session ID", "sessions of TENANT", "quota INDEX",
         * "lease NAME"; "": nothing. */
        char crashes_at[64];
};

#endif
