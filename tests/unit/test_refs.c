/* The index of the shared blocks that a session has: each is found, in whatever order they came and went.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/shared.h"

#include "daemon/ledger/ledger.h"
#include "tests/suite.h"

#define STEPS 100000

static void add(struct refs *h, uint32_t shared, uint32_t ref)
{
        ck_assert_int_eq(refs_make_room(h), 0);
        refs_add(h, shared, ref);
}

static void check_order(const struct refs *h)
{
        for (size_t i = 1; i < h->n; i++)
                ck_assert_uint_lt(h->list[i - 1].shared, h->list[i].shared);
}

TEST(empty_index)
{
        struct refs h = { .list = NULL };

        ck_assert_uint_eq(refs_find(&h, 0), LEDGER_NONE);
        ck_assert_uint_eq(refs_find(&h, LEDGER_NONE), LEDGER_NONE);
        ck_assert_int_eq(refs_make_room(&h), 0);
        ck_assert_uint_eq(refs_find(&h, 0), LEDGER_NONE);
        refs_clear(&h);
        refs_clear(&h);
}

/* Up and down to the most that there may be. */
TEST(full_index)
{
        struct refs h = { .list = NULL };

        for (int round = 0; round < 2; round++) {
                for (uint32_t i = 0; i < SHARED_MAX_REFS; i++)
                        add(&h, round ? i : SHARED_MAX_REFS - 1 - i, i + 7);
                check_order(&h);
                for (uint32_t i = 0; i < SHARED_MAX_REFS; i++)
                        ck_assert_uint_eq(refs_find(&h, i), (round ? i : SHARED_MAX_REFS - 1 - i) + 7);
                for (uint32_t i = 0; i < SHARED_MAX_REFS; i++)
                        refs_remove(&h, i);
                ck_assert_uint_eq(h.n, 0);
        }
        refs_clear(&h);
}

TEST(random_walk)
{
        static uint32_t model[4 * SHARED_MAX_REFS]; /* 0: not there */
        unsigned short seed[3] = { 20, 24, 11 };
        struct refs h = { .list = NULL };
        size_t n = 0;

        for (int step = 0; step < STEPS; step++) {
                uint32_t shared = (uint32_t)nrand48(seed) % (4 * SHARED_MAX_REFS);

                ck_assert_uint_eq(refs_find(&h, shared), model[shared] ? model[shared] : LEDGER_NONE);
                if (model[shared]) {
                        refs_remove(&h, shared);
                        model[shared] = 0;
                        n--;
                } else if (n < SHARED_MAX_REFS) {
                        model[shared] = (uint32_t)step + 1;
                        add(&h, shared, model[shared]);
                        n++;
                }
                ck_assert_uint_eq(h.n, n);
                if (step % 1024 == 0)
                        check_order(&h);
        }
        refs_clear(&h);
}
