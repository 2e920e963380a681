/* Sorting of records: a ledger with a million blocks is read while all clients wait.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_LEDGER_SORT_H
#define BFCD_LEDGER_SORT_H

#include <stddef.h>
#include <stdint.h>

struct ledger_key {
        uint64_t a, b;  /* what is sorted by */
        uint32_t index; /* of the record */
};

/* Sorts by a, then by b; equal ones keep their order. Time: n for each byte in which the keys differ.
 * 0, -ENOMEM. */
int ledger_sort(struct ledger_key *keys, size_t n);

#endif
