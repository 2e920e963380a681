/* Sorting of records.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "daemon/ledger/sort.h"
#include "tests/suite.h"

#define N_KEYS 5000u

static int compare(const void *x, const void *y)
{
        const struct ledger_key *p = x, *q = y;

        if (p->a != q->a)
                return p->a < q->a ? -1 : 1;
        if (p->b != q->b)
                return p->b < q->b ? -1 : 1;
        return p->index < q->index ? -1 : p->index > q->index;
}

static uint64_t random_of(uint64_t *state)
{
        *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        return *state >> 20;
}

/* As qsort() with the index as the last key: equal ones keep their order. */
static void check(uint64_t mask_a, uint64_t mask_b, size_t n)
{
        struct ledger_key *keys = calloc(n + 1, sizeof(*keys)), *expected = calloc(n + 1, sizeof(*expected));
        uint64_t state = mask_a ^ mask_b;

        ck_assert(keys && expected);
        for (uint32_t i = 0; i < n; i++) {
                uint64_t a = (random_of(&state) << 40 | random_of(&state)) & mask_a;

                expected[i] = keys[i] =
                        (struct ledger_key){ a, (random_of(&state) << 40 | random_of(&state)) & mask_b, i };
        }
        qsort(expected, n, sizeof(*expected), compare);
        ck_assert_int_eq(ledger_sort(keys, n), 0);
        for (size_t i = 0; i < n; i++) {
                ck_assert_uint_eq(keys[i].a, expected[i].a);
                ck_assert_uint_eq(keys[i].b, expected[i].b);
                ck_assert_uint_eq(keys[i].index, expected[i].index);
        }
        free(expected);
        free(keys);
}

TEST(keys_of_every_width_are_sorted)
{
        check(UINT64_MAX, UINT64_MAX, N_KEYS);
        check(0xff, 0xffffff00, N_KEYS);
        check(3, 7, N_KEYS);
        check(0, UINT64_C(0xff00ff00ff00ff00), N_KEYS);
        check(UINT64_C(0x8000000000000000), 1, N_KEYS);
}

TEST(few_keys_and_equal_keys)
{
        check(0xffff, 0xffff, 0);
        check(0xffff, 0xffff, 1);
        check(0xffff, 0xffff, 2);
        check(0, 0, N_KEYS);
}
