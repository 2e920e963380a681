/* Tenants: the kernel's word on a process names exactly one, and a refusal says
 * what would have matched.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/tenant.h"

#include <string.h>

#include "tests/suite.h"

enum { ALPHA, BETA, GAMMA, NOBODY, N_TENANTS };

static uid_t alpha_uids[] = { 1001, 1002 };
static gid_t alpha_gids[] = { 50 };
static gid_t beta_gids[] = { 60, 61 };
static uid_t gamma_uids[] = { 1002, 1003 };
static struct config_tenant configs[N_TENANTS] = {
        [ALPHA] = { .name = (char[]){ "alpha" },
                    .names_ids = true,
                    .uids = alpha_uids,
                    .n_uids = 2,
                    .gids = alpha_gids,
                    .n_gids = 1 },
        [BETA] = { .name = (char[]){ "beta" }, .names_ids = true, .gids = beta_gids, .n_gids = 2 },
        [GAMMA] = { .name = (char[]){ "gamma" }, .names_ids = true, .uids = gamma_uids, .n_uids = 2 },
        [NOBODY] = { .name = (char[]){ "nobody" } },
};

static struct tenant tenants[N_TENANTS], *order[N_TENANTS];
static char sentence[512];
static int n_fds_before;

static void setup(void)
{
        n_fds_before = suite_count_fds();
        for (size_t i = 0; i < N_TENANTS; i++)
                tenant_init(order[i] = &tenants[i], &configs[i]);
        strcpy(sentence, "untouched");
}

static void teardown(void)
{
        ck_assert_int_eq(suite_count_fds(), n_fds_before);
}

static struct tenant *choose(struct tenant *fallback, const char *name, uid_t uid, gid_t gid)
{
        struct credentials who = { .uid = uid, .gid = gid };

        return tenant_select(order, N_TENANTS, fallback, name, &who, sentence, sizeof(sentence));
}

START_TEST(test_matches)
{
        gid_t gids[] = { 7, 61, 8 };
        struct credentials by_uid = { .uid = 1002, .gid = 9 }, by_gid = { .uid = 9, .gid = 50 };
        struct credentials by_other = { .uid = 9, .gid = 9, .gids = gids, .n_gids = 3 };
        /* Numbers of the other kind are not theirs. */
        struct credentials crossed = { .uid = 50, .gid = 1001 };

        ck_assert(tenant_matches(&tenants[ALPHA], &by_uid));
        ck_assert(tenant_matches(&tenants[GAMMA], &by_uid));
        ck_assert(!tenant_matches(&tenants[BETA], &by_uid));
        ck_assert(tenant_matches(&tenants[ALPHA], &by_gid));
        ck_assert(!tenant_matches(&tenants[GAMMA], &by_gid));
        ck_assert(tenant_matches(&tenants[BETA], &by_other));
        ck_assert(!tenant_matches(&tenants[ALPHA], &by_other));
        by_other.n_gids = 1; /* only as many as there are */
        ck_assert(!tenant_matches(&tenants[BETA], &by_other));
        for (size_t i = 0; i < N_TENANTS; i++)
                ck_assert(!tenant_matches(&tenants[i], &crossed));
        ck_assert(!tenant_matches(&tenants[NOBODY], &(struct credentials){ .uid = 0 }));
}
END_TEST

START_TEST(test_first_in_the_file)
{
        gid_t gids[] = { 60, 50 };
        struct credentials of_both = { .uid = 9, .gid = 9, .gids = gids, .n_gids = 2 };

        ck_assert_ptr_eq(choose(NULL, "", 1002, 9), &tenants[ALPHA]); /* gamma's too */
        ck_assert_ptr_eq(choose(NULL, "", 1003, 9), &tenants[GAMMA]);
        ck_assert_ptr_eq(choose(NULL, "", 1003, 60), &tenants[BETA]); /* by gid before gamma by uid */
        ck_assert_ptr_eq(tenant_select(order, N_TENANTS, NULL, "", &of_both, sentence, sizeof(sentence)),
                         &tenants[ALPHA]); /* the tenants' order, not the groups' */
        ck_assert_str_eq(sentence, "untouched");
}
END_TEST

START_TEST(test_by_name)
{
        ck_assert_ptr_eq(choose(NULL, "gamma", 1002, 9), &tenants[GAMMA]);
        ck_assert_ptr_eq(choose(NULL, "alpha", 1002, 9), &tenants[ALPHA]);
        ck_assert_ptr_eq(choose(NULL, "beta", 1002, 61), &tenants[BETA]);
        ck_assert_ptr_null(choose(NULL, "beta", 1002, 9));
        ck_assert_ptr_null(choose(NULL, "gamm", 1002, 9));
        ck_assert_ptr_null(choose(NULL, "GAMMA", 1002, 9));
}
END_TEST

START_TEST(test_default)
{
        struct tenant *fallback = &tenants[NOBODY];

        ck_assert_ptr_eq(choose(fallback, "", 9, 9), fallback);
        ck_assert_ptr_eq(choose(fallback, "nobody", 9, 9), fallback);
        /* Who belongs somewhere does not become somebody else. */
        ck_assert_ptr_eq(choose(fallback, "", 1001, 9), &tenants[ALPHA]);
        ck_assert_ptr_null(choose(fallback, "nobody", 1001, 9));
        ck_assert_ptr_null(choose(fallback, "alpha", 9, 9));
        ck_assert_ptr_null(choose(fallback, "delta", 9, 9));
        /* The default tenant may have matches of its own. */
        ck_assert_ptr_eq(choose(&tenants[BETA], "beta", 9, 60), &tenants[BETA]);
        ck_assert_ptr_eq(choose(&tenants[BETA], "beta", 9, 9), &tenants[BETA]);
}
END_TEST

START_TEST(test_sentences)
{
        ck_assert_ptr_null(choose(NULL, "", 9, 10));
        ck_assert_str_eq(sentence,
                         "uid 9, gid 10 matches no tenant; these would match: 'alpha' (uid 1001, "
                         "uid 1002, gid 50), 'beta' (gid 60, gid 61), 'gamma' (uid 1002, uid 1003), "
                         "'nobody' (nobody)");
        ck_assert_ptr_null(choose(NULL, "alpha", 9, 10));
        ck_assert_str_eq(sentence,
                         "uid 9, gid 10 is not of tenant 'alpha'; these would match: 'alpha' (uid 1001, "
                         "uid 1002, gid 50)");
        ck_assert_ptr_null(choose(NULL, "delta", 1001, 10));
        ck_assert_ptr_nonnull(strstr(sentence,
                                     "uid 1001, gid 10 asked for tenant 'delta', which does not exist; "
                                     "there are: 'alpha' ("));
        ck_assert_ptr_nonnull(strstr(sentence, "'gamma' ("));
}
END_TEST

/* Patterns narrow: of each kind that is given, one must match. */
START_TEST(test_patterns)
{
        char *two_units[] = { (char[]){ "slurmd.service" }, (char[]){ "*.scope" } };
        char *one_path[] = { (char[]){ "/system.slice/*/job_*" } };
        uid_t uid = 7;
        struct config_tenant c = { .name = (char[]){ "p" }, .uids = &uid, .n_uids = 1, .names_ids = true };
        struct tenant t, *one = &t;
        char job[] = "/system.slice/slurmd.service/job_1/step_0",
             elsewhere[] = "/system.slice/slurmd.service", scope[] = "/system.slice/x.scope/job_2",
             other[] = "/system.slice/y.service/job_2", odd[] = "/system.slice/\x1b[2J";
        struct credentials who = { .uid = 7, .gid = 7 };

        tenant_init(&t, &c);
        ck_assert(tenant_matches(&t, &who));
        c.units = two_units;
        c.n_units = 2;
        ck_assert(!tenant_matches(&t, &who)); /* nobody knows where it runs */
        who.cgroup = elsewhere;
        ck_assert(tenant_matches(&t, &who));
        who.cgroup = other;
        ck_assert(!tenant_matches(&t, &who));
        who.cgroup = scope;
        ck_assert(tenant_matches(&t, &who));
        c.cgroups = one_path;
        c.n_cgroups = 1;
        ck_assert(tenant_matches(&t, &who));
        who.cgroup = elsewhere;
        ck_assert(!tenant_matches(&t, &who));
        who.cgroup = job;
        ck_assert(tenant_matches(&t, &who));
        who.uid = 8;
        ck_assert(!tenant_matches(&t, &who));
        who.cgroup = odd;
        ck_assert_ptr_null(tenant_select(&one, 1, NULL, "", &who, sentence, sizeof(sentence)));
        ck_assert_str_eq(sentence,
                         "uid 8, gid 7 in cgroup /system.slice/?[2J matches no tenant; these would match: "
                         "'p' (uid 7 in unit slurmd.service or *.scope in cgroup /system.slice/*/job_*)");
        /* No ids: whoever runs there. Ids of which none is known: nobody. */
        who.cgroup = job;
        c.n_uids = 0;
        ck_assert(!tenant_matches(&t, &who));
        c.names_ids = false;
        ck_assert(tenant_matches(&t, &who));
        c.n_units = c.n_cgroups = 0;
        ck_assert(!tenant_matches(&t, &who));
}
END_TEST

START_TEST(test_sentence_is_cut)
{
        char small[24];
        struct credentials who = { .uid = 9, .gid = 10 };

        memset(small, '#', sizeof(small));
        ck_assert_ptr_null(tenant_select(order, N_TENANTS, NULL, "", &who, small, sizeof(small) - 4));
        ck_assert_str_eq(small, "uid 9, gid 10 match");
        ck_assert_mem_eq(small + 20, "####", 4);
}
END_TEST

int main(void)
{
        Suite *suite = suite_create("tenant");
        TCase *tc = tcase_create("tenant");

        tcase_add_checked_fixture(tc, setup, teardown);
        tcase_add_test(tc, test_matches);
        tcase_add_test(tc, test_first_in_the_file);
        tcase_add_test(tc, test_by_name);
        tcase_add_test(tc, test_default);
        tcase_add_test(tc, test_sentences);
        tcase_add_test(tc, test_patterns);
        tcase_add_test(tc, test_sentence_is_cut);
        suite_add_tcase(suite, tc);
        return suite_run(suite);
}
