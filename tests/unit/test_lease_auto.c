/* Leases by `per: cgroup`: which control groups get one, their limits, bounds, reloads, restarts, and the end.
 *
 * SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/session/lease.h"
#include "daemon/session/request.h"
#include "daemon/session/share.h"
#include "daemon/memory/broker_lease.h"
#include "daemon/base/clock.h"
#include "tests/unit/room.h"
#include "tests/fake_store.h"
#include "tests/suite.h"
#include "tests/unit/leases.h"
#include "tests/unit/still_clock.h"

#define CONFIG(per)                                                                                          \
        "devices:\n"                                                                                         \
        "  - id: host\n"                                                                                     \
        "    size: 1GiB\n"                                                                                   \
        "    partitions: [{name: a, limit: 64MiB}, {name: b, limit: 16MiB}]\n"                               \
        "tenants:\n"                                                                                         \
        "  - {name: red, match: {uid: 1}, quotas: [{partition: a, limit: 40MiB" per                          \
        "}, {partition: b, limit: 4MiB}]}\n"                                                                 \
        "  - {name: blue, match: {uid: 2}, quotas: [{partition: a}]}\n"
#define PER(rest) ", per: {cgroup: /pods/*/*, " rest "}"

static struct peer *admin;
static struct store *store;

static void start(const char *text)
{
        b = peer_broker_kept(text, NULL, NULL, store, &config);
        (void)store_drop_rest(store);
        check();
        admin = open_admin_session();
}

static void setup(void)
{
        store = fake_store_new();
        start(CONFIG(PER("limit: 8MiB, reserve: 2MiB")));
}

static void tick(void)
{
        lease_tick(b, clock_ms());
        settle();
}

static void teardown(void)
{
        for (size_t i = 0; i < LEASES_PER_TENANT / LEASE_LOOKS; i++)
                tick();
        ck_assert_uint_eq(b->leases.n, 0);
        must_close(admin);
        b = peer_broker_free(b, config);
        store = fake_store_free(store);
}

FIXTURE(lease_auto, setup, teardown);

static void restart(const char *text)
{
        peer_drop(admin);
        fake_store_die(store);
        peer_broker_leave(b, config);
        start(text);
}

static struct peer *peer_in(const char *cgroup)
{
        struct peer *p = peer_new(b, 1, false);

        p->session->who.cgroup = cgroup ? strdup(cgroup) : NULL;
        return p;
}

static struct quota *quota_in(const struct peer *p)
{
        return p->session->shares[0].quota;
}

/* Its lease is for this control group; "": it has none. */
static struct peer *join(const char *cgroup, const char *group)
{
        struct peer *p = say_hello(peer_in(cgroup));
        const struct quota *q = quota_in(p);
        const struct lease *lease = quota_parent(q) ? lease_of(q) : NULL;

        ck_assert_str_eq(lease ? lease_record(b, lease)->match : "", group);
        return p;
}

/* A hello is refused with a sentence that has the text. */
static void refused(const char *cgroup, int error, const char *text)
{
        struct peer *p = peer_in(cgroup);
        const char *sentence = refusal_of(p, peer_hello(p, "", ""), error);

        ck_assert_msg(strstr(sentence, text), "%s", sentence);
        must_close(p);
}

static void create(const char *name, const char *cgroup, const char *unit)
{
        const struct wanted w = { .name = name, .cgroup = cgroup, .unit = unit, .limit = 4 * MIB };

        ck_assert_int_eq(peer_error(admin, ask_create(admin, &w)), 0);
}

static void end(const char *name)
{
        ck_assert_int_eq(peer_error(admin, ask_end(admin, name, false, 0)), 0);
}

static int reload(const char *text, const char *told)
{
        return reload_told(text, false, told);
}

/* ---- which control groups get one ------------------------------------------------- */

TEST_OF(lease_auto, each_control_group_that_matches_gets_a_lease)
{
        const Bfcd__LeaseRow *row;
        struct peer *p[6];

        p[0] = join("/pods/x/one", "/pods/x/one");
        p[1] = join("/pods/x/one/deep/er", "/pods/x/one");
        p[2] = join("/pods/x/t\xc3\xa4st two", "/pods/x/t\xc3\xa4st two");
        p[3] = join("/pods/x", "");
        p[4] = join("/other/x/one", "");
        p[5] = join("/", "");
        ck_assert_uint_eq(b->leases.n, 2);
        ck_assert_ptr_eq(quota_in(p[0]), quota_in(p[1]));
        ck_assert_str_eq(p[0]->session->shares[1].quota->tenant, "red"); /* b has no `per` */
        ck_assert_ptr_null(p[0]->session->shares[1].quota->lease);
        ck_assert_int_eq(strncmp(quota_in(p[0])->lease, "one:", 4), 0);
        ck_assert_int_eq(strncmp(quota_in(p[2])->lease, "t__st_two:", 10), 0);
        ck_assert_uint_eq(quota_parent(quota_in(p[0]))->account.promised_bytes, 4 * MIB);
        must_malloc(p[0], 0, 4 * MIB);
        must_malloc(p[1], 0, 4 * MIB);
        ck_assert_ptr_nonnull(strstr(refusal_of(p[1], peer_malloc(p[1], 0, 2 * MIB), EDQUOT), "lease 'one:"));
        row = list_page(admin, BFCD__LIST__KIND__LEASES, 0)->leases[0];
        ck_assert_str_eq(row->made_by, "config");
        ck_assert_str_eq(row->match, "/pods/x/one");
        refused(NULL, EACCES, "control group could not be read");
        for (size_t i = 0; i < 6; i++)
                must_close(p[i]);
}

TEST_OF(lease_auto, the_innermost_lease_counts)
{
        struct peer *p;

        create("same", "/pods/x/1", NULL);
        create("inner", "/pods/x/2/in", NULL);
        create("outer", "/pods", NULL);
        create("unit", NULL, "job.service");
        must_close(join("/pods/x/1/sub", "/pods/x/1"));
        ck_assert_uint_eq(b->leases.n, 4);
        must_close(join("/pods/x/2/in", "/pods/x/2/in"));
        must_close(join("/pods/x", "/pods"));
        must_close(join("/job.service", "job.service"));
        ck_assert_uint_eq(b->leases.n, 4);
        p = join("/pods/job.service/3", "/pods/job.service/3");
        must_close(join("/pods/x/2", "/pods/x/2"));
        ck_assert_uint_eq(b->leases.n, 6);
        end("outer"); /* it is not for processes that have a lease further inside */
        must_close(join("/pods/job.service/3", "/pods/job.service/3"));
        end("same");
        end("inner");
        end("unit");
        must_close(p);
}

/* ---- bounds ----------------------------------------------------------------------- */

TEST_OF(lease_auto, what_has_no_room_is_refused)
{
        char group[64], longest[600] = "/pods/";
        struct peer *p[5];

        for (unsigned i = 0; i < 5; i++) { /* the fifth: 40 MiB are charged or guaranteed */
                snprintf(group, sizeof(group), "/pods/x/%u", i);
                p[i] = join(group, group);
                if (i < 4)
                        must_malloc(p[i], 0, 8 * MIB);
        }
        must_malloc(p[4], 0, 8 * MIB);
        refused("/pods/x/5", ENOMEM, "reserve 2.0 MiB cannot be guaranteed");
        memset(longest + 6, 'l', sizeof(longest) - 7);
        memcpy(longest + 100, "/", 1);
        refused(longest, EINVAL, "at most 511 bytes");
        refused("/pods/x/a\nb", EINVAL, "control group is not valid");
        for (unsigned i = 0; i < 5; i++)
                must_close(p[i]);
}

TEST_OF(lease_auto, the_number_of_leases_is_bounded)
{
        const unsigned share = LEASES_PER_TENANT / 4 * 3;
        struct peer *p;
        char group[64];

        ck_assert_int_eq(reload(CONFIG(PER("limit: 2MiB")), "per is"), 0);
        for (unsigned round = 0; round < 2; round++) {
                for (unsigned i = 0; i < LEASES_PER_TENANT; i++) {
                        if (i == share) {
                                refused("/pods/one/more", EDQUOT,
                                        "processes of tenant 'red' have 192 leases, which is the most");
                                create("operators", "/pods/one/more", NULL);
                                end("operators");
                                while (b->leases.n > 0)
                                        tick();
                        }
                        snprintf(group, sizeof(group), "/pods/%u/%u", round, i);
                        p = join(group, group);
                        must_close(p);
                }
                while (b->leases.n > 0)
                        tick();
                refused("/pods/one/more", EDQUOT, "asked 256 times in 60 s");
                ck_assert_uint_eq(b->leases.n, 0);
                still_clock_pass(LEASE_BOUNDS_MS);
        }
}

static struct peer *open_scheduler(void)
{
        struct peer *p = peer_new(b, 0, true);

        p->session->role = ROLE_SCHEDULER;
        return say_hello(p);
}

static void schedules(struct peer *p, const struct wanted *w, int error)
{
        ck_assert_int_eq(peer_error(p, ask_create(p, w)), error);
}

/* The limit that the config sets for the control group stays. */
TEST_OF(lease_auto, a_scheduler_lifts_no_limit_of_the_config)
{
        struct peer *scheduler = open_scheduler(), *p;
        const struct wanted wide = { .name = "wide", .cgroup = "/pods/x/1", .limit = 40 * MIB },
                            tree = { .name = "tree", .pid = (uint64_t)getpid(), .limit = 40 * MIB };

        schedules(scheduler, &wide, 0);
        schedules(scheduler, &tree, 0);
        p = join("/pods/x/1", "/pods/x/1");
        ck_assert_uint_eq(quota_in(p)->account.limit_bytes, 8 * MIB);
        ck_assert_int_eq((int)lease_record(b, lease_of(quota_in(p)))->maker, LEASE_BY_CONFIG);
        must_close(p);
        must_close(join("/pods/x/1", "/pods/x/1"));
        ck_assert_uint_eq(b->leases.n, 3);
        end("wide");
        end("tree");
        tick();
        must_close(scheduler);
}

static void end_all(void)
{
        while (b->leases.n > 0) {
                char name[LEDGER_NAME_BYTES];

                snprintf(name, sizeof(name), "%s", b->leases.list[0]->name);
                end(name);
        }
}

static void schedules_many(struct peer *p, const char *tenant, unsigned n, const char *told)
{
        char name[64], group[64];
        struct wanted w = { .name = name, .cgroup = group, .limit = 2 * MIB, .tenant = tenant };

        for (unsigned i = 0; i < n + 1; i++) {
                uint64_t id;

                snprintf(name, sizeof(name), "%s-%u", tenant, i);
                snprintf(group, sizeof(group), "/jobs/%u", i);
                id = ask_create(p, &w);
                if (i < n)
                        ck_assert_int_eq(peer_error(p, id), 0);
                else
                        ck_assert_msg(strstr(refusal_of(p, id, EDQUOT), told), "%u: %s", i,
                                      refusal_of(p, id, EDQUOT));
        }
}

/* Operators, and the control groups of this tenant. */
TEST_OF(lease_auto, schedulers_leave_places_to_others)
{
        struct peer *scheduler = open_scheduler();
        char group[64];

        ck_assert_int_eq(reload(CONFIG(PER("limit: 2MiB")), "limit 2MiB"), 0);
        schedules_many(scheduler, "red", 192,
                       "schedulers have 192 leases of tenant 'red', which is the most");
        for (unsigned i = 0; i < 240 - 192; i++) {
                snprintf(group, sizeof(group), "/pods/x/%u", i);
                must_close(join(group, group));
        }
        refused("/pods/x/more", EDQUOT, "tenant 'red' has 240 leases that operators did not make");
        create("operators", "/jobs/more", NULL);
        must_close(scheduler);
        end_all();
}

/* All of them together have as much as one tenant whose processes make leases. */
TEST_OF(lease_auto, schedulers_have_a_share_of_all_places)
{
        char text[4096];
        struct peer *scheduler = open_scheduler();
        size_t n = (size_t)snprintf(text, sizeof(text), "%s", CONFIG(PER("limit: 2MiB")));

        for (unsigned i = 0; i < 15; i++)
                n += (size_t)snprintf(
                        text + n, sizeof(text) - n,
                        "  - {name: t%u, match: {uid: %u}, leases: self, quotas: [{partition: a}]}\n", i,
                        100 + i);
        ck_assert_int_eq(reload(text, "tenant 't14' is new"), 0);
        schedules_many(scheduler, "blue", 768 / 16, "schedulers have 48 leases");
        schedules_many(scheduler, "t0", 0, "schedulers have 48 leases, which is the most");
        must_close(join("/pods/x/1", "/pods/x/1"));
        must_close(scheduler);
        end_all();
}

/* Of all tenants: the leases of two count. */
TEST_OF(lease_auto, schedulers_have_a_share_of_the_tables)
{
        const struct wanted w = { .name = "1", .cgroup = "/jobs/1", .limit = 8 * MIB };
        const struct wanted next = { .name = "2", .tenant = "blue", .cgroup = "/jobs/2", .limit = 8 * MIB };
        struct peer *scheduler = open_scheduler();
        const struct quota *first;
        uint64_t n_extents = 0;

        for (size_t i = 0; i < b->n_tenants; i++)
                for (size_t k = 0; k < b->tenants[i].n_quotas; k++)
                        n_extents += arena_extent_room(b->tenants[i].quotas[k]->arena,
                                                       b->tenants[i].quotas[k]->account.limit_bytes);
        schedules(scheduler, &w, 0);
        first = b->leases.list[0]->quota; /* two of them, and as much for operators */
        room = broker_room(b);
        room.n_extents =
                (uint32_t)(n_extents + 4 * arena_extent_room(first->arena, first->account.limit_bytes) - 1);
        schedules(scheduler, &next, EDQUOT);
        create("operators", "/jobs/2", NULL);
        end("operators");
        room.n_extents++;
        schedules(scheduler, &next, 0);
        room.n_quotas = 0;
        must_close(scheduler);
        end_all();
}

/* A refused request counts, and other tenants have requests of their own. */
TEST_OF(lease_auto, schedulers_ask_so_often)
{
        const struct wanted w = { .name = "1", .cgroup = "/jobs/1", .limit = 1 },
                            blue = { .name = "2", .tenant = "blue", .cgroup = "/jobs/2", .limit = 2 * MIB };
        struct peer *scheduler = open_scheduler();
        Bfcd__LeaseSet m = BFCD__LEASE_SET__INIT;

        for (unsigned i = 0; i < LEASES_PER_TENANT; i++)
                schedules(scheduler, &w, EINVAL);
        schedules(scheduler, &w, EDQUOT);
        create("operators", "/jobs/1", NULL);
        ck_assert_int_eq(peer_error(scheduler, ask_set(scheduler, "operators", &m)), EDQUOT);
        must_close(join("/pods/x/1", "/pods/x/1"));
        schedules(scheduler, &blue, 0);
        still_clock_pass(LEASE_BOUNDS_MS);
        schedules(scheduler, &w, EINVAL);
        must_close(scheduler);
        end_all();
}

/* So the scheduling class owes for them, and others have turns. */
TEST_OF(lease_auto, requests_of_schedulers_are_charged)
{
        static const Bfcd__Request__BodyCase bodies[] = { BFCD__REQUEST__BODY_LEASE_CREATE,
                                                          BFCD__REQUEST__BODY_LEASE_SET,
                                                          BFCD__REQUEST__BODY_LEASE_END };
        struct peer *scheduler = open_scheduler();
        Bfcd__Request r = BFCD__REQUEST__INIT;

        for (size_t i = 0; i < sizeof(bodies) / sizeof(bodies[0]); i++) {
                r.body_case = bodies[i];
                ck_assert(session_looks_at_many(scheduler->session, &r));
                ck_assert(!session_looks_at_many(admin->session, &r));
        }
        must_close(scheduler);
}

/* What leases need of the tables is bounded for each tenant, too, so that others and operators have room. */
TEST_OF(lease_auto, tenants_share_the_room_in_tables)
{
        const struct quota *first;
        uint64_t n_extents = 0;

        for (size_t i = 0; i < b->n_tenants; i++)
                for (size_t k = 0; k < b->tenants[i].n_quotas; k++) {
                        const struct quota *q = b->tenants[i].quotas[k];

                        n_extents += arena_extent_room(q->arena, q->account.limit_bytes);
                }
        must_close(join("/pods/x/1", "/pods/x/1"));
        first = b->leases.list[0]->quota; /* two of them, and as much for operators */
        room = broker_room(b);
        room.n_extents =
                (uint32_t)(n_extents + 4 * arena_extent_room(first->arena, first->account.limit_bytes) - 1);
        refused("/pods/x/2", EDQUOT, "may take of the daemon's tables and file descriptors");
        create("operators", "/pods/x/2", NULL);
        end("operators");
        room.n_extents++;
        must_close(join("/pods/x/2", "/pods/x/2"));
        room.n_quotas = 0;
        while (b->leases.n > 0)
                tick();
}

/* The more tenants have such leases, the fewer each may have. */
TEST_OF(lease_auto, tenants_share_the_places)
{
        char text[4096], group[64];
        size_t n;

        n = (size_t)snprintf(text, sizeof(text), "%s", CONFIG(PER("limit: 2MiB")));
        for (unsigned i = 0; i < 15; i++)
                n += (size_t)snprintf(
                        text + n, sizeof(text) - n,
                        "  - {name: t%u, match: {uid: %u}, leases: self, quotas: [{partition: a}]}\n", i,
                        100 + i);
        ck_assert_int_eq(reload(text, "tenant 't14' is new"), 0);
        for (unsigned i = 0; i < 768 / 16; i++) {
                snprintf(group, sizeof(group), "/pods/x/%u", i);
                must_close(join(group, group));
        }
        refused("/pods/x/more", EDQUOT, "processes of tenant 'red' have 48 leases, which is the most");
        create("operators", "/pods/x/more", NULL);
        end("operators");
}

/* ---- the end ------------------------------------------------------------------------ */

TEST_OF(lease_auto, it_ends_with_its_control_group_and_its_last_session)
{
        struct peer *x = join("/pods/x/1", "/pods/x/1"), *y = join("/pods/x/1", "/pods/x/1");

        tick();
        ck_assert_uint_eq(b->leases.n, 1);
        must_malloc(x, 0, 2 * MIB);
        must_close(y);
        tick();
        ck_assert(!quota_has_ended(quota_in(x)));
        must_malloc(x, 0, 2 * MIB);
        must_close(x);
        ck_assert_uint_eq(b->leases.n, 1);
        tick();
        ck_assert_uint_eq(b->leases.n, 0);
}

/* ---- reloads and restarts ----------------------------------------------------------- */

TEST_OF(lease_auto, a_reload_changes_its_limits)
{
        struct peer *x = join("/pods/x/1", "/pods/x/1"), *y = join("/pods/x/2", "/pods/x/2");
        const struct lease *lease = lease_of(quota_in(x));
        const struct account *a = &quota_in(x)->account;

        must_malloc(x, 0, 8 * MIB);
        ck_assert_int_eq(
                reload(CONFIG(PER("limit: 10MiB, reserve: 4MiB")),
                       "per is /pods/*/* with limit 10MiB, reserve 4MiB, was /pods/*/* with limit 8MiB, "
                       "reserve 2MiB"),
                0);
        ck_assert_uint_eq(a->limit_bytes, 10 * MIB);
        ck_assert_uint_eq(lease_record(b, lease)->limit_bytes, 10 * MIB);
        ck_assert_uint_eq(lease_record(b, lease)->reserve_bytes, 4 * MIB);
        ck_assert_uint_eq(a->parent->promised_bytes, 8 * MIB);
        must_malloc(x, 0, 2 * MIB);
        ck_assert_int_eq(reload(CONFIG(PER("limit: 40MiB, reserve: 32MiB")), "guaranteed to its leases"),
                         -EINVAL);
        ck_assert_uint_eq(a->reserve_bytes, 4 * MIB);
        ck_assert_int_eq(reload(CONFIG(PER("limit: 4MiB")), "per is"), 0);
        ck_assert_uint_eq(a->limit_bytes, 4 * MIB);
        ck_assert_uint_eq(a->charged_bytes, 10 * MIB);
        refusal_of(x, peer_malloc(x, 0, 2 * MIB), EDQUOT);
        ck_assert_int_eq(reload(CONFIG(""), "per is none, was"), 0);
        ck_assert_uint_eq(a->limit_bytes, 4 * MIB); /* it runs out */
        ck_assert(!quota_has_ended(quota_in(x)));
        must_close(join("/pods/x/1", "/pods/x/1"));
        must_close(join("/pods/x/3", ""));
        must_close(x);
        must_close(y);
}

TEST_OF(lease_auto, a_restart_keeps_it)
{
        struct peer *x = join("/pods/x/1", "/pods/x/1");
        const struct quota *q;
        char name[64];

        snprintf(name, sizeof(name), "%s", quota_in(x)->lease);
        x->session->is_watched = true;
        must_malloc(x, 0, 8 * MIB);
        peer_drop(x);
        restart(CONFIG(PER("limit: 12MiB, reserve: 6MiB")));
        q = lease_find(b, name)->quota;
        ck_assert_uint_eq(q->account.limit_bytes, 12 * MIB);
        ck_assert_uint_eq(q->account.reserve_bytes, 6 * MIB);
        tick();
        ck_assert_ptr_nonnull(lease_find(b, name)); /* it has a session */
        x = join("/pods/x/1", "/pods/x/1");
        ck_assert_ptr_eq(quota_in(x), q);
        must_malloc(x, 0, 4 * MIB);
        refusal_of(x, peer_malloc(x, 0, 2 * MIB), EDQUOT);
        must_close(x);
        end_sessions();
}

/* ---- partitions where no lease can be chosen ----------------------------------------- */

static struct session *session_with(uint64_t id)
{
        for (size_t i = 0; i < b->sessions.n_slots; i++)
                if (b->sessions.table[i] && b->sessions.table[i]->id == id)
                        return b->sessions.table[i];
        ck_abort_msg("no session %u", (unsigned)id);
}

/* A lease that has ended, or cannot be made, takes only its partition from later sessions of its processes. A restart
 * gives them no quota there. */
TEST_OF(lease_auto, other_partitions_stay_usable)
{
        struct peer *x, *y, *z;
        uint64_t y_id, z_id;

        create("ended", "/x", NULL);
        x = join("/x", "/x");
        must_malloc(x, 0, 2 * MIB);
        end("ended");
        refused("/x", EACCES, "lease 'ended' in partition 'a' has ended");
        y = peer_in("/x");
        ck_assert_int_eq(peer_error(y, peer_hello(y, "", "b")), 0);
        must_malloc(y, 1, 2 * MIB);
        ck_assert_ptr_nonnull(strstr(refusal_of(y, peer_malloc(y, 0, 2 * MIB), ENOENT), "'ended'"));
        z = peer_in(NULL); /* without a known control group */
        ck_assert_int_eq(peer_error(z, peer_hello(z, "", "b")), 0);
        must_malloc(z, 1, 2 * MIB);
        ck_assert_ptr_nonnull(strstr(refusal_of(z, peer_malloc(z, 0, 2 * MIB), EACCES), "partition 'a'"));
        x->session->is_watched = y->session->is_watched = z->session->is_watched = true;
        y_id = y->session->id;
        z_id = z->session->id;
        peer_drop(x);
        peer_drop(y);
        peer_drop(z);
        for (unsigned i = 0; i < 2; i++) {
                restart(CONFIG(PER("limit: 8MiB")));
                ck_assert(quota_has_ended(session_with(y_id)->shares[0].quota));
                ck_assert(session_with(z_id)->shares[0].is_barred);
                ck_assert_int_eq(session_rejoin(session_with(z_id), &session_with(z_id)->shares[0]), -EACCES);
                ck_assert(!session_with(z_id)->shares[1].is_barred);
        }
        end_sessions();
}
