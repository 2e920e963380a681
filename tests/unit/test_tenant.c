/* Tenants: the kernel's word on a process names exactly one, and a refusal says
 * what would have matched.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/tenant.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

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

static struct config config = { .tenants = configs, .n_tenants = N_TENANTS };
static struct tenant tenants[N_TENANTS], *order[N_TENANTS];
static struct matcher *matcher;
static char sentence[512];

static void setup(void)
{
        for (size_t i = 0; i < N_TENANTS; i++)
                tenant_init(order[i] = &tenants[i], &configs[i]);
        ck_assert_int_eq(matcher_new(&config, &matcher), 0);
        strcpy(sentence, "untouched");
}

static void teardown(void)
{
        matcher = matcher_free(matcher);
}

FIXTURE(tenant, setup, teardown);

static void match(struct matcher *by, struct credentials *who, const gid_t *gids, size_t n_gids)
{
        ck_assert_int_eq(match_ids(by, who, gids, n_gids), 0);
        ck_assert(match_ids_are_known(by, who) && !match_is_known(by, who));
        match_places(by, who);
        ck_assert(match_is_known(by, who));
}

static struct tenant *choose(struct tenant *fallback, const char *name, uid_t uid, gid_t gid)
{
        struct credentials who = { .pid = 1, .uid = uid, .gid = gid };
        struct tenant *t;

        match(matcher, &who, NULL, 0);
        t = tenant_select(order, N_TENANTS, fallback, name, &who, sentence, sizeof(sentence));
        credentials_clear(&who);
        return t;
}

/* Which of the tenants match, as bits. */
static unsigned matching(uid_t uid, gid_t gid, gid_t *gids, size_t n_gids)
{
        struct credentials who = { .pid = 1, .uid = uid, .gid = gid };
        unsigned bits = 0;

        match_sort_gids(gids, n_gids);
        match(matcher, &who, gids, n_gids);
        for (size_t i = 0; i < who.matches.n_tenants; i++)
                bits |= 1u << who.matches.tenants[i];
        credentials_clear(&who);
        return bits;
}

TEST(test_matches)
{
        gid_t gids[] = { 7, 61, 8 }, both[] = { 60, 50, 60 }, many[1000];

        ck_assert_uint_eq(matching(1002, 9, NULL, 0), 1u << ALPHA | 1u << GAMMA);
        ck_assert_uint_eq(matching(9, 50, NULL, 0), 1u << ALPHA);
        ck_assert_uint_eq(matching(9, 9, gids, 3), 1u << BETA);
        ck_assert_uint_eq(matching(9, 9, gids, 2), 0); /* only as many as there are: 7 and 8 */
        ck_assert_uint_eq(matching(9, 61, both, 3), 1u << ALPHA | 1u << BETA); /* each once */
        /* Numbers of the other kind are not theirs. */
        ck_assert_uint_eq(matching(50, 1001, NULL, 0), 0);
        ck_assert_uint_eq(matching(0, 0, NULL, 0), 0);
        /* More groups than the tenants have. */
        for (size_t i = 0; i < 1000; i++)
                many[i] = (gid_t)(100000 - i);
        ck_assert_uint_eq(matching(9, 9, many, 1000), 0);
        many[0] = 61;
        ck_assert_uint_eq(matching(9, 9, many, 1000), 1u << BETA);
}

/* What is known is not looked for again, until another config is in force. */
TEST(lookups_are_cached)
{
        struct credentials who = { .pid = 1, .uid = 1003, .gid = 9 };
        struct matcher *later;

        match(matcher, &who, NULL, 0);
        ck_assert_uint_eq(who.matches.n_tenants, 1);
        who.uid = 9; /* it would match no tenant now */
        ck_assert_int_eq(match_ids(matcher, &who, NULL, 0), 0);
        ck_assert_uint_eq(who.matches.n_tenants, 1);
        ck_assert_int_eq(matcher_new(&config, &later), 0);
        ck_assert(!match_ids_are_known(later, &who));
        match(later, &who, NULL, 0);
        ck_assert_uint_eq(who.matches.n_tenants, 0);
        matcher_free(later);
        credentials_clear(&who);
}

enum { N_MANY_GIDS = 65536, N_MANY = CONFIG_MAX_TENANTS };

/* Processor time of one matching, the least of some. */
static int64_t cost_ns(struct matcher *m, gid_t *gids, size_t n_gids, size_t n_found)
{
        int64_t least = INT64_MAX;

        for (unsigned i = 0; i < 9; i++) {
                struct credentials who = { .pid = 1, .uid = 9, .gid = 9 };
                struct timespec from, to;
                int64_t ns;

                clock_gettime(CLOCK_THREAD_CPUTIME_ID, &from);
                match_sort_gids(gids, n_gids);
                match(m, &who, gids, n_gids);
                clock_gettime(CLOCK_THREAD_CPUTIME_ID, &to);
                ns = (to.tv_sec - from.tv_sec) * 1000000000 + to.tv_nsec - from.tv_nsec;
                least = ns < least ? ns : least;
                ck_assert_uint_eq(who.matches.n_tenants, n_found);
                credentials_clear(&who);
        }
        return least;
}

/* 65,536 groups and 4,096 tenants with a group each cost as much as their sum, not as their product. */
TEST(test_many_groups)
{
        struct config_tenant *many = calloc(N_MANY, sizeof(*many));
        gid_t *gids = calloc(N_MANY_GIDS, sizeof(*gids)), *of_tenants = calloc(N_MANY, sizeof(*of_tenants));
        struct config large = { .tenants = many, .n_tenants = N_MANY };
        int64_t few_ns, many_ns;
        struct matcher *m;

        ck_assert(many && gids && of_tenants);
        for (unsigned i = 0; i < N_MANY; i++) {
                of_tenants[i] = 1000000 + i;
                many[i].names_ids = true;
                many[i].gids = &of_tenants[i];
                many[i].n_gids = 1;
        }
        for (unsigned i = 0; i < N_MANY_GIDS; i++)
                gids[i] = 100000 + i;
        ck_assert_int_eq(matcher_new(&large, &m), 0);
        few_ns = cost_ns(m, gids, N_MANY_GIDS / 16, 0);
        many_ns = cost_ns(m, gids, N_MANY_GIDS, 0);
        printf("# %d groups: %lld ns, %d: %lld ns\n", N_MANY_GIDS / 16, (long long)few_ns, N_MANY_GIDS,
               (long long)many_ns);
        ck_assert_int_lt(many_ns, 10 * few_ns);
        gids[7] = of_tenants[4000];
        (void)cost_ns(m, gids, N_MANY_GIDS, 1);
        matcher_free(m);
        free(of_tenants);
        free(gids);
        free(many);
}

TEST(test_first_in_the_file)
{
        gid_t gids[] = { 60, 50 };
        struct credentials of_both = { .uid = 9, .gid = 9 };

        match_sort_gids(gids, 2);
        match(matcher, &of_both, gids, 2);

        ck_assert_ptr_eq(choose(NULL, "", 1002, 9), &tenants[ALPHA]); /* gamma's too */
        ck_assert_ptr_eq(choose(NULL, "", 1003, 9), &tenants[GAMMA]);
        ck_assert_ptr_eq(choose(NULL, "", 1003, 60), &tenants[BETA]); /* by gid before gamma by uid */
        ck_assert_ptr_eq(tenant_select(order, N_TENANTS, NULL, "", &of_both, sentence, sizeof(sentence)),
                         &tenants[ALPHA]); /* the tenants' order, not the groups' */
        credentials_clear(&of_both);
        ck_assert_str_eq(sentence, "untouched");
}

TEST(test_by_name)
{
        ck_assert_ptr_eq(choose(NULL, "gamma", 1002, 9), &tenants[GAMMA]);
        ck_assert_ptr_eq(choose(NULL, "alpha", 1002, 9), &tenants[ALPHA]);
        ck_assert_ptr_eq(choose(NULL, "beta", 1002, 61), &tenants[BETA]);
        ck_assert_ptr_null(choose(NULL, "beta", 1002, 9));
        ck_assert_ptr_null(choose(NULL, "gamm", 1002, 9));
        ck_assert_ptr_null(choose(NULL, "GAMMA", 1002, 9));
}

TEST(test_default)
{
        struct tenant *fallback = &tenants[NOBODY];

        ck_assert_ptr_eq(choose(fallback, "", 9, 9), fallback);
        ck_assert_ptr_eq(choose(fallback, "nobody", 9, 9), fallback);
        /* A session keeps its tenant. */
        ck_assert_ptr_eq(choose(fallback, "", 1001, 9), &tenants[ALPHA]);
        ck_assert_ptr_null(choose(fallback, "nobody", 1001, 9));
        ck_assert_ptr_null(choose(fallback, "alpha", 9, 9));
        ck_assert_ptr_null(choose(fallback, "delta", 9, 9));
        /* The default tenant may have matches of its own. */
        ck_assert_ptr_eq(choose(&tenants[BETA], "beta", 9, 60), &tenants[BETA]);
        ck_assert_ptr_eq(choose(&tenants[BETA], "beta", 9, 9), &tenants[BETA]);
}

TEST(refusal_texts)
{
        ck_assert_ptr_null(choose(NULL, "", 9, 10));
        ck_assert_str_eq(sentence,
                         "uid 9, gid 10 matches no tenant; the match rules are: 'alpha' (uid 1001, uid "
                         "1002, gid 50), 'beta' (gid 60, gid 61), 'gamma' (uid 1002, uid 1003), "
                         "'nobody' (no process)");
        ck_assert_ptr_null(choose(NULL, "alpha", 9, 10));
        ck_assert_str_eq(sentence,
                         "uid 9, gid 10 does not match tenant 'alpha'; its match rule is: 'alpha' (uid "
                         "1001, uid 1002, gid 50)");
        ck_assert_ptr_null(choose(NULL, "delta", 1001, 10));
        ck_assert_ptr_nonnull(strstr(sentence,
                                     "uid 1001, gid 10 requested tenant 'delta', which does not exist; "
                                     "the tenants are: 'alpha' ("));
        ck_assert_ptr_nonnull(strstr(sentence, "'gamma' ("));
}

/* Processes of other namespaces than the daemon's. */
TEST(refusals_of_containers)
{
        struct credentials who = { .pid = 0, .uid = 9, .gid = 10 };

        match(matcher, &who, NULL, 0);
        ck_assert_ptr_null(tenant_select(order, N_TENANTS, NULL, "", &who, sentence, sizeof(sentence)));
        ck_assert_msg(strstr(sentence, "uid 9, gid 10 in a PID namespace that the daemon does not see (its "
                                       "control group is unknown) matches no tenant; "),
                      "%s", sentence);
        who.pid = 1;
        who.gid = MATCH_NO_ID;
        ck_assert_ptr_null(tenant_select(order, N_TENANTS, NULL, "", &who, sentence, sizeof(sentence)));
        ck_assert_msg(strstr(sentence, "uid 9, a group without a gid in the daemon's user namespace matches"),
                      "%s", sentence);
        who.uid = MATCH_NO_ID;
        ck_assert_ptr_null(tenant_select(order, N_TENANTS, NULL, "", &who, sentence, sizeof(sentence)));
        ck_assert_msg(strstr(sentence, "a user without a uid in the daemon's user namespace matches no"),
                      "%s", sentence);
        credentials_clear(&who);
}

/* Patterns narrow: of each kind that is given, one must match. */
static bool matches(struct config_tenant *c, const struct credentials *who)
{
        struct config one = { .tenants = c, .n_tenants = 1 };
        struct credentials copy = { .uid = who->uid, .gid = who->gid };
        struct matcher *m;
        bool found;

        copy.cgroup = who->cgroup ? strdup(who->cgroup) : NULL;
        ck_assert_int_eq(matcher_new(&one, &m), 0);
        match(m, &copy, NULL, 0);
        found = copy.matches.n_tenants == 1;
        credentials_clear(&copy);
        matcher_free(m);
        return found;
}

TEST(test_patterns)
{
        char *two_units[] = { (char[]){ "slurmd.service" }, (char[]){ "*.scope" } };
        char *one_path[] = { (char[]){ "/system.slice/*/job_*" } };
        uid_t uid = 7;
        struct config_tenant c = { .name = (char[]){ "p" }, .uids = &uid, .n_uids = 1, .names_ids = true };
        struct tenant t, *one = &t;
        char job[] = "/system.slice/slurmd.service/job_1/step_0",
             elsewhere[] = "/system.slice/slurmd.service", scope[] = "/system.slice/x.scope/job_2",
             other[] = "/system.slice/y.service/job_2", odd[] = "/system.slice/\x1b[2J";
        struct credentials who = { .pid = 1, .uid = 7, .gid = 7 };

        tenant_init(&t, &c);
        ck_assert(matches(&c, &who));
        c.units = two_units;
        c.n_units = 2;
        ck_assert(!matches(&c, &who)); /* its control group is not known */
        who.cgroup = elsewhere;
        ck_assert(matches(&c, &who));
        who.cgroup = other;
        ck_assert(!matches(&c, &who));
        who.cgroup = scope;
        ck_assert(matches(&c, &who));
        c.cgroups = one_path;
        c.n_cgroups = 1;
        ck_assert(matches(&c, &who));
        who.cgroup = elsewhere;
        ck_assert(!matches(&c, &who));
        who.cgroup = job;
        ck_assert(matches(&c, &who));
        who.uid = 8;
        ck_assert(!matches(&c, &who));
        who.cgroup = odd;
        ck_assert_ptr_null(tenant_select(&one, 1, NULL, "", &who, sentence, sizeof(sentence)));
        ck_assert_str_eq(sentence,
                         "uid 8, gid 7 in cgroup /system.slice/?[2J matches no tenant; the match rules "
                         "are: 'p' (uid 7 in unit slurmd.service or *.scope in cgroup "
                         "/system.slice/*/job_*)");
        /* No ids: every process there. Ids of which none is known: no process. */
        who.cgroup = job;
        c.n_uids = 0;
        ck_assert(!matches(&c, &who));
        c.names_ids = false;
        ck_assert(matches(&c, &who));
        c.n_units = c.n_cgroups = 0;
        ck_assert(!matches(&c, &who));
}

TEST(test_sentence_is_cut)
{
        char small[24];
        struct credentials who = { .pid = 1, .uid = 9, .gid = 10 };

        memset(small, '#', sizeof(small));
        ck_assert_ptr_null(tenant_select(order, N_TENANTS, NULL, "", &who, small, sizeof(small) - 4));
        ck_assert_str_eq(small, "uid 9, gid 10 match");
        ck_assert_mem_eq(small + 20, "####", 4);
}
