/* Which shared blocks a session has: found, in whatever order they came and went.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/holds.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>

#include "daemon/ledger.h"
#include "tests/suite.h"

#define STEPS 100000

static void add(struct holds *h, uint32_t shared, uint32_t hold)
{
        ck_assert_int_eq(holds_make_room(h), 0);
        holds_add(h, shared, hold);
}

static void check_order(const struct holds *h)
{
        for (size_t i = 1; i < h->n; i++)
                ck_assert_uint_lt(h->list[i - 1].shared, h->list[i].shared);
}

START_TEST(nothing_is_there)
{
        struct holds h = { .list = NULL };

        ck_assert_uint_eq(holds_find(&h, 0), LEDGER_NONE);
        ck_assert_uint_eq(holds_find(&h, LEDGER_NONE), LEDGER_NONE);
        ck_assert_int_eq(holds_make_room(&h), 0);
        ck_assert_uint_eq(holds_find(&h, 0), LEDGER_NONE);
        holds_clear(&h);
        holds_clear(&h);
}
END_TEST

/* Up and down to the most that there may be. */
START_TEST(as_many_as_may_be)
{
        struct holds h = { .list = NULL };

        for (int round = 0; round < 2; round++) {
                for (uint32_t i = 0; i < HOLDS_MAX; i++)
                        add(&h, round ? i : HOLDS_MAX - 1 - i, i + 7);
                check_order(&h);
                ck_assert_uint_eq(h.n_max, HOLDS_MAX);
                for (uint32_t i = 0; i < HOLDS_MAX; i++)
                        ck_assert_uint_eq(holds_find(&h, i), (round ? i : HOLDS_MAX - 1 - i) + 7);
                for (uint32_t i = 0; i < HOLDS_MAX; i++)
                        holds_remove(&h, i);
                ck_assert_uint_eq(h.n, 0);
        }
        holds_clear(&h);
}
END_TEST

START_TEST(random_walk)
{
        static uint32_t model[4 * HOLDS_MAX]; /* 0: not there */
        unsigned short seed[3] = { 20, 24, 11 };
        struct holds h = { .list = NULL };
        size_t n = 0;

        for (int step = 0; step < STEPS; step++) {
                uint32_t shared = (uint32_t)nrand48(seed) % (4 * HOLDS_MAX);

                ck_assert_uint_eq(holds_find(&h, shared), model[shared] ? model[shared] : LEDGER_NONE);
                if (model[shared]) {
                        holds_remove(&h, shared);
                        model[shared] = 0;
                        n--;
                } else if (n < HOLDS_MAX) {
                        model[shared] = (uint32_t)step + 1;
                        add(&h, shared, model[shared]);
                        n++;
                }
                ck_assert_uint_eq(h.n, n);
                if (step % 1024 == 0)
                        check_order(&h);
        }
        holds_clear(&h);
}
END_TEST

int main(void)
{
        Suite *suite = suite_create("holds");
        TCase *tc = tcase_create("holds");

        tcase_add_test(tc, nothing_is_there);
        tcase_add_test(tc, as_many_as_may_be);
        tcase_add_test(tc, random_walk);
        suite_add_tcase(suite, tc);
        return suite_run(suite);
}
