/* Accounts: no charge passes a limit, a guarantee is always there.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdlib.h>

#include "daemon/memory/account.h"
#include "tests/suite.h"

TEST(test_limits)
{
        struct account pool;
        struct account a, b;
        struct charge w, x, y, z;
        uint64_t missing = 0;

        account_init_root(&pool, 100);
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
        struct account pool;
        struct account a, b;

        account_init_root(&pool, 100);
        ck_assert_int_eq(account_init(&a, &pool, 10, 20), -EINVAL);
        ck_assert_int_eq(account_init(&a, &pool, 100, 60), 0);
        ck_assert_int_eq(account_init(&b, &pool, 100, 50), -ENOMEM);
        account_deinit(&a);
}

/* Σ max(reserve, charged) against a plain sum, over random takes and drops. */
TEST(test_random)
{
        struct account pool;
        struct account accounts[4];
        struct charge charges[64] = { { NULL, 0 } };
        unsigned seed = 7;

        account_init_root(&pool, 1000);
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
        struct account pool;
        struct account a, b;
        struct charge x, y, z;
        uint64_t missing = 0;

        account_init_root(&pool, 100);
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
        ck_assert_uint_eq(account_ceiling(&a), 60);
        account_set(&a, 62, 0);
        ck_assert_int_eq(charge_take(&a, 2, &y, &missing), 0);
        ck_assert_int_eq(charge_take(&a, 1, &z, &missing), -EDQUOT);

        /* The pool: committed 62 + 30, of 40. */
        account_set(&pool, 40, 0);
        account_set(&a, 80, 0);
        ck_assert_uint_eq(account_excess(&pool), 52);
        ck_assert_int_eq(charge_take(&a, 1, &z, &missing), -ENOMEM);
        ck_assert_uint_eq(missing, 53);
        ck_assert_int_eq(charge_take(&b, 30, &z, &missing), 0); /* guaranteed */
        ck_assert_uint_eq(account_room(&b), 0);
        ck_assert(!account_fits(&pool, 40, 93));
        ck_assert(account_fits(&pool, 40, 92)); /* it is there already */
        ck_assert(account_fits(&pool, 93, 93));
        charge_drop(&x);
        charge_drop(&y);
        charge_drop(&z);
        ck_assert_uint_eq(account_ceiling(&pool), 40);
        ck_assert_uint_eq(pool.committed_bytes, 30);
        ck_assert(!account_fits(&pool, 40, 41));
        account_deinit(&a);
        account_deinit(&b);
}

/* Limits and reserves that change at random under random charges, as far as
 * account_fits() lets them: guarantees hold, and nothing passes a limit. */
TEST(test_random_limits)
{
        struct account pool;
        struct account accounts[4];
        struct charge charges[64] = { { NULL, 0 } };
        unsigned seed = 11, n_changes = 0, n_over = 0;

        account_init_root(&pool, 1000);
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
                        if (guaranteed <= pool_limit && account_fits(&pool, pool_limit, after)) {
                                account_set(a, limit, reserve);
                                account_set(&pool, pool_limit, 0);
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
                        ck_assert_uint_le(account_room(each), each->limit_bytes);
                }
                ck_assert_uint_eq(sum, pool.committed_bytes);
        }
        ck_assert_uint_gt(n_changes, 1000);
        ck_assert_uint_gt(n_over, 1000);
        for (unsigned k = 0; k < 64; k++)
                charge_drop(&charges[k]);
        for (unsigned i = 0; i < 4; i++)
                account_deinit(&accounts[i]);
        ck_assert_uint_eq(pool.charged_bytes + pool.committed_bytes, 0);
}

/* ---- the tree -------------------------------------------------------------- */

/* A lease lacks what its tenant lacks, and what is guaranteed to a lease is taken at each level. */
TEST(test_tree)
{
        struct account pool, tenant, other, x, y;
        struct charge c, d, e;
        uint64_t missing = 0;

        account_init_root(&pool, 100);
        ck_assert_int_eq(account_init(&tenant, &pool, 60, 0), 0);
        ck_assert_int_eq(account_init(&other, &pool, 100, 0), 0);
        ck_assert_int_eq(account_init(&x, &tenant, 50, 20), 0);
        ck_assert_int_eq(account_init(&y, &tenant, 50, 0), 0);
        ck_assert_uint_eq(tenant.committed_bytes, 20);
        ck_assert_uint_eq(pool.committed_bytes, 20);
        ck_assert_uint_eq(account_attainable(&y, NULL), 40);
        ck_assert_uint_eq(account_attainable(&tenant, NULL), 40);
        ck_assert_uint_eq(account_attainable(&other, NULL), 80);

        ck_assert_int_eq(charge_take(&y, 41, &c, &missing), -EDQUOT); /* the tenant's limit */
        ck_assert_ptr_eq(account_short_of(&y, 41), &tenant);
        ck_assert_uint_eq(missing, 1);
        ck_assert_int_eq(charge_take(&y, 51, &c, &missing), -EDQUOT);
        ck_assert_ptr_eq(account_short_of(&y, 51), &y);
        ck_assert_int_eq(charge_take(&y, 40, &c, &missing), 0);
        ck_assert_int_eq(charge_take(&tenant, 1, &d, &missing), -EDQUOT);
        ck_assert_int_eq(charge_take(&other, 40, &d, &missing), 0);
        ck_assert_int_eq(charge_take(&other, 1, &e, &missing), -ENOMEM);
        ck_assert_int_eq(charge_take(&x, 20, &e, &missing), 0); /* guaranteed */
        ck_assert_uint_eq(tenant.charged_bytes, 60);
        ck_assert_uint_eq(tenant.own_bytes, 0);
        ck_assert_uint_eq(account_surplus(&y, &pool), 40);
        ck_assert_uint_eq(account_surplus(&x, &pool), 0); /* its reserve keeps them */
        ck_assert_uint_eq(account_surplus(&y, &other), 0);

        charge_drop(&c);
        charge_drop(&d);
        charge_drop(&e);
        account_deinit(&x);
        account_deinit(&y);
        account_deinit(&tenant);
        account_deinit(&other);
        ck_assert_uint_eq(pool.committed_bytes + pool.promised_bytes, 0);
}

#define MODEL_TENANTS 3u
#define MODEL_LEASES  4u /* of each tenant */
#define MODEL_NODES   (1u + MODEL_TENANTS * (1u + MODEL_LEASES))
#define MODEL_CHARGES 48u

/* Node 0 is the partition, then each tenant with its leases. */
static struct {
        struct account accounts[MODEL_NODES];
        bool exists[MODEL_NODES];
        uint64_t ceilings[MODEL_NODES]; /* the most that may be committed */
        struct charge charges[MODEL_CHARGES];
        unsigned of[MODEL_CHARGES];
        unsigned seed;
} m;

static unsigned pick(unsigned n)
{
        return (unsigned)rand_r(&m.seed) % n;
}

static bool is_tenant(unsigned i)
{
        return i > 0 && (i - 1) % (1 + MODEL_LEASES) == 0;
}

static unsigned parent_of(unsigned i)
{
        return is_tenant(i) ? 0 : i - (i - 1) % (1 + MODEL_LEASES);
}

static uint64_t model_own(unsigned i)
{
        uint64_t sum = 0;

        for (unsigned k = 0; k < MODEL_CHARGES; k++)
                sum += m.charges[k].account && m.of[k] == i ? m.charges[k].n_bytes : 0;
        return sum;
}

/* What it has charged, or has charged and guaranteed, with all below. */
static uint64_t model_sum(unsigned i, bool committed)
{
        uint64_t sum = model_own(i);

        for (unsigned k = 1; k < MODEL_NODES; k++) {
                uint64_t its;

                if (!m.exists[k] || parent_of(k) != i)
                        continue;
                its = model_sum(k, committed);
                sum += committed && its < m.accounts[k].reserve_bytes ? m.accounts[k].reserve_bytes : its;
        }
        return sum;
}

/* Whether the limit of each level has n bytes more for node i, by trying. */
static int model_probe(unsigned i, uint64_t n)
{
        for (unsigned at = i;; at = parent_of(at)) {
                uint64_t before = model_sum(at, true), after = before + n;

                if (n > 0 && after > m.accounts[at].limit_bytes)
                        return at > 0 ? -EDQUOT : -ENOMEM;
                if (at == 0)
                        return 0;
                before = before > m.accounts[at].reserve_bytes ? before : m.accounts[at].reserve_bytes;
                after = after > m.accounts[at].reserve_bytes ? after : m.accounts[at].reserve_bytes;
                n = after - before;
        }
}

static void model_charge(unsigned i)
{
        unsigned k = pick(MODEL_CHARGES);
        uint64_t n = pick(80), missing = 0, room;
        int r;

        if (m.charges[k].account) {
                charge_drop(&m.charges[k]);
                return;
        }
        if (i == 0 || !m.exists[i])
                return;
        room = account_room(&m.accounts[i]);
        ck_assert_int_eq(model_probe(i, room), 0);
        ck_assert_int_lt(model_probe(i, room + 1), 0);
        r = model_probe(i, n);
        m.of[k] = i;
        ck_assert_int_eq(charge_take(&m.accounts[i], n, &m.charges[k], &missing), r);
        ck_assert(r == 0 || missing > 0);
}

/* A guarantee may be made if all levels have it. */
static bool model_may_reserve(unsigned i, uint64_t reserve)
{
        uint64_t its = m.exists[i] ? model_sum(i, true) : 0,
                 was = m.exists[i] ? m.accounts[i].reserve_bytes : 0;
        uint64_t before = its > was ? its : was, after = its > reserve ? its : reserve;

        return after <= before || model_probe(parent_of(i), after - before) == 0;
}

static void model_create(unsigned i)
{
        uint64_t limit = 1 + pick(400), reserve = pick(3) ? 0 : pick(150);
        int r;

        if (i == 0 || m.exists[i] || !m.exists[parent_of(i)])
                return;
        r = reserve > limit ? -EINVAL : model_may_reserve(i, reserve) ? 0 : -ENOMEM;
        ck_assert_int_eq(account_init(&m.accounts[i], &m.accounts[parent_of(i)], limit, reserve), r);
        m.exists[i] = r == 0;
}

static void model_end(unsigned i)
{
        bool is_used = i == 0 || !m.exists[i];

        for (unsigned k = 1; k < MODEL_NODES; k++)
                is_used = is_used || (m.exists[k] && parent_of(k) == i);
        if (is_used)
                return;
        for (unsigned k = 0; k < MODEL_CHARGES; k++)
                if (m.charges[k].account && m.of[k] == i)
                        charge_drop(&m.charges[k]);
        account_deinit(&m.accounts[i]);
        m.exists[i] = false;
}

/* Limits may be set below what is charged; guarantees must fit. */
static void model_set(unsigned i)
{
        struct account *a = &m.accounts[i];
        uint64_t limit = 1 + pick(i == 0 ? 1200 : 400), reserve = i == 0 || pick(2) ? 0 : pick(150);

        if (!m.exists[i] || reserve > limit)
                return;
        if (i > 0 && !model_may_reserve(i, reserve))
                return;
        account_set(a, limit, reserve);
}

/* is_set: limits or reserves were changed. Otherwise nothing grows that is over its limit. */
static void model_check(bool is_set)
{
        for (unsigned i = 0; i < MODEL_NODES; i++) {
                const struct account *a = &m.accounts[i];
                uint64_t committed;

                if (!m.exists[i])
                        continue;
                committed = model_sum(i, true);
                ck_assert_uint_eq(a->own_bytes, model_own(i));
                ck_assert_uint_eq(a->charged_bytes, model_sum(i, false));
                ck_assert_uint_eq(a->committed_bytes, committed);
                ck_assert(is_set || committed <= m.ceilings[i]);
                m.ceilings[i] = committed > a->limit_bytes ? committed : a->limit_bytes;
                ck_assert_uint_eq(account_ceiling(a), m.ceilings[i]);
                ck_assert_uint_eq(account_excess(a),
                                  committed > a->limit_bytes ? committed - a->limit_bytes : 0);
        }
}

/* The tree beside a plain model, in random steps: create, set, end, charge, release. */
TEST(test_tree_model)
{
        uint64_t n_steps = suite_steps(50000);

        m.seed = 3;
        account_init_root(&m.accounts[0], 1000);
        m.exists[0] = true;
        for (uint64_t step = 0; step < n_steps; step++) {
                unsigned i = pick(MODEL_NODES), what = pick(16);

                if (what == 0)
                        model_end(i);
                else if (what <= 2)
                        model_set(i);
                else if (what <= 5)
                        model_create(i);
                else
                        model_charge(i);
                model_check(what == 1 || what == 2);
        }
        for (unsigned i = MODEL_NODES; i-- > 1;)
                model_end(i);
        ck_assert_uint_eq(m.accounts[0].committed_bytes + m.accounts[0].promised_bytes, 0);
        ck_assert_uint_eq(m.accounts[0].n_children, 0);
}
