/* Sorting of records, by a radix sort from the lowest byte to the highest; see sort.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/ledger/sort.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define N_DIGITS 16u /* bytes of a and b */
#define N_VALUES 256u

static unsigned digit_of(uint64_t a, uint64_t b, unsigned digit)
{
        return (digit < 8 ? b >> (8 * digit) : a >> (8 * (digit - 8))) % N_VALUES;
}

static void sort_by(unsigned digit, const struct ledger_key *from, struct ledger_key *to, size_t n)
{
        size_t starts[N_VALUES + 1] = { 0 };

        for (size_t i = 0; i < n; i++)
                starts[digit_of(from[i].a, from[i].b, digit) + 1]++;
        for (size_t i = 1; i < N_VALUES; i++)
                starts[i] += starts[i - 1];
        for (size_t i = 0; i < n; i++)
                to[starts[digit_of(from[i].a, from[i].b, digit)]++] = from[i];
}

int ledger_sort(struct ledger_key *keys, size_t n)
{
        struct ledger_key *from = keys, *to = n > 0 ? calloc(n, sizeof(*to)) : NULL, *other = to;
        uint64_t differ_a = 0, differ_b = 0;

        if (n > 0 && !to)
                return -ENOMEM;
        for (size_t i = 1; i < n; i++) {
                differ_a |= keys[i].a ^ keys[0].a;
                differ_b |= keys[i].b ^ keys[0].b;
        }
        for (unsigned digit = 0; digit < N_DIGITS; digit++) {
                struct ledger_key *sorted = to;

                if (digit_of(differ_a, differ_b, digit) == 0)
                        continue;
                sort_by(digit, from, to, n);
                to = from;
                from = sorted;
        }
        if (from != keys)
                memcpy(keys, from, n * sizeof(*keys));
        free(other);
        return 0;
}
