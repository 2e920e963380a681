/* Accounts: no charge passes a limit, a guarantee is always there.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdlib.h>

#include "daemon/memory/account.h"
#include "tests/suite.h"

TEST(test_limits)
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

TEST(test_reserves)
{
        struct pool pool;
        struct account a, b;

        pool_init(&pool, 100);
        ck_assert_int_eq(account_init(&a, &pool, 10, 20), -EINVAL);
        ck_assert_int_eq(account_init(&a, &pool, 100, 60), 0);
        ck_assert_int_eq(account_init(&b, &pool, 100, 50), -ENOMEM);
        account_deinit(&a);
}

/* Σ max(reserve, charged) against a plain sum, over random takes and drops. */
TEST(test_random)
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

/* A limit under what is charged: nothing new, growth up to the reserve as ever, and
 * what is dropped stays away. */
TEST(test_lowered_limits)
{
        struct pool pool;
        struct account a, b;
        struct charge x, y, z;
        uint64_t missing = 0;

        pool_init(&pool, 100);
        ck_assert_int_eq(account_init(&a, &pool, 80, 0), 0);
        ck_assert_int_eq(account_init(&b, &pool, 60, 30), 0);
        ck_assert_int_eq(charge_take(&a, 60, &x, &missing), 0);
        ck_assert_int_eq(charge_take(&a, 5, &y, &missing), 0);

        account_set(&a, 20, 0);
        ck_assert_uint_eq(account_excess(&a), 45);
        ck_assert_uint_eq(account_room(&a), 0);
        ck_assert_int_eq(charge_take(&a, 0, &z, &missing), 0);
        ck_assert_int_eq(charge_take(&a, 3, &z, &missing), -EDQUOT);
        ck_assert_uint_eq(missing, 48); /* so much must go before it fits */
        charge_drop(&y);
        ck_assert_uint_eq(a.ceiling_bytes, 60);
        account_set(&a, 62, 0);
        ck_assert_int_eq(charge_take(&a, 2, &y, &missing), 0);
        ck_assert_int_eq(charge_take(&a, 1, &z, &missing), -EDQUOT);

        /* The pool: committed 62 + 30, of 40. */
        pool_set_limit(&pool, 40);
        account_set(&a, 80, 0);
        ck_assert_uint_eq(pool_excess(&pool), 52);
        ck_assert_int_eq(charge_take(&a, 1, &z, &missing), -ENOMEM);
        ck_assert_uint_eq(missing, 53);
        ck_assert_int_eq(charge_take(&b, 30, &z, &missing), 0); /* guaranteed */
        ck_assert_uint_eq(account_room(&b), 0);
        ck_assert(!pool_fits(&pool, 40, 93));
        ck_assert(pool_fits(&pool, 40, 92)); /* it is there already */
        ck_assert(pool_fits(&pool, 93, 93));
        charge_drop(&x);
        charge_drop(&y);
        charge_drop(&z);
        ck_assert_uint_eq(pool.ceiling_bytes, 40);
        ck_assert_uint_eq(pool.committed_bytes, 30);
        ck_assert(!pool_fits(&pool, 40, 41));
        account_deinit(&a);
        account_deinit(&b);
}

/* Limits and reserves that change at random under random charges, as far as
 * pool_fits() lets them: guarantees hold, and nothing passes a limit. */
TEST(test_random_limits)
{
        struct pool pool;
        struct account accounts[4];
        struct charge charges[64] = { { NULL, 0 } };
        unsigned seed = 11, n_changes = 0, n_over = 0;

        pool_init(&pool, 1000);
        for (unsigned i = 0; i < 4; i++)
                ck_assert_int_eq(account_init(&accounts[i], &pool, 500, 0), 0);
        for (unsigned step = 0; step < 40000; step++) {
                struct charge *c = &charges[(unsigned)rand_r(&seed) % 64];
                struct account *a = &accounts[(unsigned)rand_r(&seed) % 4];
                uint64_t sum = 0, guaranteed = 0, missing, n = (unsigned)rand_r(&seed) % 60;
                bool was_over = account_excess(a) > 0, fits;

                if (step % 7 == 0) {
                        uint64_t pool_limit = 200 + (unsigned)rand_r(&seed) % 1000, after;
                        uint64_t limit = 1 + (unsigned)rand_r(&seed) % 600,
                                 reserve = (unsigned)rand_r(&seed) % 200;

                        reserve = reserve < limit ? reserve : limit;
                        for (unsigned i = 0; i < 4; i++)
                                guaranteed += &accounts[i] == a ? reserve : accounts[i].reserve_bytes;
                        after = pool.committed_bytes -
                                (a->charged_bytes > a->reserve_bytes ? a->charged_bytes : a->reserve_bytes) +
                                (a->charged_bytes > reserve ? a->charged_bytes : reserve);
                        if (guaranteed <= pool_limit && pool_fits(&pool, pool_limit, after)) {
                                account_set(a, limit, reserve);
                                pool_set_limit(&pool, pool_limit);
                                n_changes++;
                        }
                } else if (c->account) {
                        charge_drop(c);
                } else if (charge_take(a, n, c, &missing) == 0) {
                        ck_assert(n == 0 || !was_over);
                } else {
                        ck_assert_uint_gt(missing, 0);
                        fits = a->charged_bytes + n <= a->reserve_bytes;
                        ck_assert(!fits || was_over); /* a guarantee is a guarantee */
                }
                for (unsigned i = 0; i < 4; i++) {
                        const struct account *each = &accounts[i];

                        sum += each->charged_bytes > each->reserve_bytes ? each->charged_bytes
                                                                         : each->reserve_bytes;
                        n_over += account_excess(each) > 0;
                        ck_assert_uint_le(each->charged_bytes, each->ceiling_bytes);
                        ck_assert_uint_le(account_room(each), each->limit_bytes);
                }
                ck_assert_uint_eq(sum, pool.committed_bytes);
                ck_assert_uint_le(sum, pool.ceiling_bytes);
        }
        ck_assert_uint_gt(n_changes, 1000);
        ck_assert_uint_gt(n_over, 1000);
        for (unsigned k = 0; k < 64; k++)
                charge_drop(&charges[k]);
        for (unsigned i = 0; i < 4; i++)
                account_deinit(&accounts[i]);
        ck_assert_uint_eq(pool.charged_bytes + pool.committed_bytes, 0);
        ck_assert_uint_eq(pool.ceiling_bytes, pool.limit_bytes);
}

int main(void)
{
        return suite_main("account");
}
