/* Accounts: no charge passes a limit, a guarantee is always there.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdlib.h>

#include "daemon/account.h"
#include "tests/suite.h"

START_TEST(test_limits)
{
        struct pool pool;
        struct account a, b;
        struct charge w, x, y, z;
        uint64_t missing = 0;

        pool_init(&pool, 100);
        ck_assert_int_eq(account_init(&a, &pool, 80, 0), 0);
        ck_assert_int_eq(account_init(&b, &pool, 60, 30), 0);
        ck_assert_uint_eq(pool.committed_bytes, 30);

        ck_assert_int_eq(charge_take(&a, 81, &x, &missing), -EDQUOT);
        ck_assert_uint_eq(missing, 1);
        ck_assert_int_eq(charge_take(&a, 71, &x, &missing), -ENOMEM);
        ck_assert_uint_eq(missing, 1);
        ck_assert_int_eq(charge_take(&a, 70, &x, &missing), 0);
        /* The pool is full but for the guarantee. */
        ck_assert_int_eq(charge_take(&a, 1, &y, &missing), -ENOMEM);
        ck_assert_int_eq(charge_take(&b, 30, &y, &missing), 0);
        ck_assert_int_eq(charge_take(&b, 1, &z, &missing), -ENOMEM);
        ck_assert_uint_eq(pool.committed_bytes, 100);
        ck_assert_uint_eq(pool.charged_bytes, 100);

        ck_assert_int_eq(account_probe(&a, 10, &missing), -ENOMEM);
        ck_assert_uint_eq(missing, 10);
        ck_assert_int_eq(account_probe(&a, 11, &missing), -EDQUOT);
        ck_assert_uint_eq(missing, 1);
        ck_assert_int_eq(account_probe(&a, 0, &missing), 0);
        ck_assert_uint_eq(a.charged_bytes, 70); /* asking takes nothing */

        charge_split(&x, 20, &z);
        ck_assert_uint_eq(x.n_bytes, 50);
        charge_split(&z, 5, &w);
        charge_join(&z, &w);
        charge_join(&z, &w); /* empty by now */
        ck_assert_uint_eq(z.n_bytes, 20);
        charge_drop(&w);
        charge_join(&w, &z);
        ck_assert_uint_eq(w.n_bytes, 20);
        ck_assert_ptr_eq(w.account, &a);
        ck_assert_ptr_null(z.account);
        ck_assert_uint_eq(a.charged_bytes, 70);
        charge_drop(&w);
        ck_assert_uint_eq(a.charged_bytes, 50);
        ck_assert_uint_eq(a.peak_charged_bytes, 70);
        account_clear_peaks(&a);
        ck_assert_uint_eq(a.peak_charged_bytes, 50);
        ck_assert_uint_eq(a.lifetime_peak_charged_bytes, 70);
        charge_drop(&x);
        charge_drop(&x); /* empty by now */
        charge_drop(&y);
        ck_assert_uint_eq(pool.committed_bytes, 30);
        account_deinit(&a);
        account_deinit(&b);
        ck_assert_uint_eq(pool.committed_bytes, 0);
}
END_TEST

START_TEST(test_reserves)
{
        struct pool pool;
        struct account a, b;

        pool_init(&pool, 100);
        ck_assert_int_eq(account_init(&a, &pool, 10, 20), -EINVAL);
        ck_assert_int_eq(account_init(&a, &pool, 100, 60), 0);
        ck_assert_int_eq(account_init(&b, &pool, 100, 50), -ENOMEM);
        account_deinit(&a);
}
END_TEST

/* Σ max(reserve, charged) against a plain sum, over random takes and drops. */
START_TEST(test_random)
{
        struct pool pool;
        struct account accounts[4];
        struct charge charges[64] = { { NULL, 0 } };
        unsigned seed = 7;

        pool_init(&pool, 1000);
        for (unsigned i = 0; i < 4; i++)
                ck_assert_int_eq(account_init(&accounts[i], &pool, 400 + 100 * i, 50 * i), 0);
        for (unsigned step = 0; step < 20000; step++) {
                struct charge *c = &charges[(unsigned)rand_r(&seed) % 64];
                struct account *a = &accounts[(unsigned)rand_r(&seed) % 4];
                uint64_t sum = 0, missing;

                if (c->account)
                        charge_drop(c);
                else
                        (void)charge_take(a, (unsigned)rand_r(&seed) % 60, c, &missing);
                for (unsigned i = 0; i < 4; i++) {
                        uint64_t charged = 0;

                        for (unsigned k = 0; k < 64; k++)
                                if (charges[k].account == &accounts[i])
                                        charged += charges[k].n_bytes;
                        ck_assert_uint_eq(charged, accounts[i].charged_bytes);
                        ck_assert_uint_le(charged, accounts[i].limit_bytes);
                        sum += charged > accounts[i].reserve_bytes ? charged : accounts[i].reserve_bytes;
                }
                ck_assert_uint_eq(sum, pool.committed_bytes);
                ck_assert_uint_le(sum, pool.limit_bytes);
        }
        for (unsigned k = 0; k < 64; k++)
                charge_drop(&charges[k]);
        for (unsigned i = 0; i < 4; i++)
                account_deinit(&accounts[i]);
        ck_assert_uint_eq(pool.charged_bytes + pool.committed_bytes, 0);
}
END_TEST

int main(void)
{
        Suite *suite = suite_create("account");
        TCase *tc = tcase_create("account");

        tcase_set_timeout(tc, 60);
        tcase_add_test(tc, test_limits);
        tcase_add_test(tc, test_reserves);
        tcase_add_test(tc, test_random);
        suite_add_tcase(suite, tc);
        return suite_run(suite);
}
