/* Scheduling classes: turns go round-robin over them, and round-robin over the members of each.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>

#include "daemon/net/sched.h"
#include "daemon/memory/state.h"
#include "tests/suite.h"

static struct sched all;
static const struct sched_key red = { .tenant = (const struct tenant *)&all };
static const struct sched_key uid_7 = { .kind = SCHED_HELLO, .uid = 7 },
                              uid_8 = { .kind = SCHED_HELLO, .uid = 8 };

/* When no class owes. */
static struct sched_member *next_turn(void)
{
        static uint64_t now_ns;

        now_ns += SCHED_DEBT_MAX_NS;
        return sched_next(&all, now_ns, true);
}

static bool is_empty(void)
{
        return !all.classes && all.root.n_classes == 0 && all.unauthenticated.n_classes == 0 &&
               all.hellos.n_classes == 0 && TAILQ_EMPTY(&all.root.due);
}

static void setup(void)
{
        sched_init(&all);
}

FIXTURE(sched, setup, NULL);

TEST(sessions_of_one_class_share_one_turn)
{
        struct sched_member unauth[3] = { { 0 } }, one = { 0 };

        for (int i = 0; i < 3; i++) {
                ck_assert_int_eq(sched_join(&all, &unauth[i], &uid_7), 0);
                sched_ready(&unauth[i]);
                sched_ready(&unauth[i]);
        }
        ck_assert_int_eq(sched_join(&all, &one, &red), 0);
        sched_ready(&one);
        ck_assert_ptr_eq(next_turn(), &unauth[0]);
        sched_ready(&unauth[0]); /* it has more to do already */
        ck_assert_ptr_eq(next_turn(), &one);
        sched_ready(&one);
        ck_assert_ptr_eq(next_turn(), &unauth[1]);
        ck_assert_ptr_eq(next_turn(), &one);
        ck_assert_ptr_eq(next_turn(), &unauth[2]);
        ck_assert_ptr_eq(next_turn(), &unauth[0]);
        ck_assert_ptr_null(next_turn());
        for (int i = 0; i < 3; i++)
                sched_leave(&all, &unauth[i]);
        sched_leave(&all, &one);
        ck_assert(is_empty());
}

TEST(hello_moves_a_connection_to_its_tenants_class)
{
        struct sched_member a = { 0 }, b = { 0 };

        ck_assert_int_eq(sched_join(&all, &a, &uid_7), 0);
        ck_assert_int_eq(sched_join(&all, &b, &uid_8), 0);
        sched_ready(&a);
        ck_assert_int_eq(sched_join(&all, &a, &red), 0); /* with what it has to do */
        ck_assert_int_eq(sched_join(&all, &a, &red), 0);
        ck_assert_ptr_eq(next_turn(), &a);
        sched_ready(&b);
        sched_idle(&b);
        sched_idle(&b);
        ck_assert_ptr_null(next_turn());
        sched_ready(&b);
        sched_leave(&all, &b);
        ck_assert_ptr_null(next_turn());
        sched_leave(&all, &b);
        sched_leave(&all, &a);
        ck_assert(is_empty());
}

/* A lease with many connections delays neither another lease of its tenant nor the tenant's other sessions. */
TEST(leases_share_the_turns_of_their_tenant)
{
        enum { N = 20, N_TURNS = 60 };
        static const struct sched_key leases[4] = {
                { .tenant = (const struct tenant *)&all, .lease = 7 },
                { .tenant = (const struct tenant *)&all, .lease = 8 },
                { .tenant = (const struct tenant *)&all },
                { .tenant = (const struct tenant *)&leases }, /* of another tenant */
        };
        struct sched_member m[N] = { { 0 } };
        unsigned n_turns[4] = { 0 };

        for (unsigned i = 0; i < N;
             i++) { /* one of lease 8, of the first tenant itself, and of the other tenant */
                ck_assert_int_eq(sched_join(&all, &m[i], &leases[i < 3 ? i + 1 : 0]), 0);
                sched_ready(&m[i]);
        }
        for (unsigned i = 0; i < N_TURNS; i++) {
                struct sched_member *next = next_turn();

                n_turns[next - m < 3 ? next - m + 1 : 0]++;
                sched_ready(next);
        }
        ck_assert_uint_eq(n_turns[3], N_TURNS / 2);
        for (unsigned i = 0; i < 3; i++)
                ck_assert_uint_eq(n_turns[i], N_TURNS / 6);
        for (unsigned i = 0; i < N; i++)
                sched_leave(&all, &m[i]);
        ck_assert(is_empty());
}

/* A pending connection is not in the class of sessions with an empty key. */
TEST(each_kind_is_a_class)
{
        static const struct sched_key pending = { .kind = SCHED_PENDING },
                                      of_admins = { .kind = SCHED_PENDING, .role = ROLE_ADMIN },
                                      root = { .kind = SCHED_HELLO };
        struct sched_member m[3] = { { 0 } };

        ck_assert_int_eq(sched_join(&all, &m[0], &pending), 0);
        ck_assert_int_eq(sched_join(&all, &m[1], &of_admins), 0);
        ck_assert_int_eq(sched_join(&all, &m[2], &root), 0);
        for (int i = 0; i < 3; i++)
                sched_ready(&m[i]);
        ck_assert_ptr_eq(next_turn(), &m[0]);
        sched_ready(&m[0]);
        for (int i = 1; i < 3; i++)
                ck_assert_ptr_eq(next_turn(), &m[i]);
        ck_assert_ptr_eq(next_turn(), &m[0]);
        for (int i = 0; i < 3; i++)
                sched_leave(&all, &m[i]);
        ck_assert(is_empty());
}

static unsigned count_turns(struct sched_member *m, size_t n, const struct sched_member *of, unsigned n_turns)
{
        unsigned n_of = 0;

        for (size_t i = 0; i < n; i++)
                sched_ready(&m[i]);
        for (unsigned i = 0; i < n_turns; i++) {
                struct sched_member *next = next_turn();

                n_of += next == of;
                sched_ready(next);
        }
        return n_of;
}

/* Neither those of unauthenticated connections nor those of other administrators. */
TEST(administrators_are_accepted_beside_others)
{
        static const struct sched_key keys[] = {
                { .kind = SCHED_PENDING, .role = ROLE_ADMIN },
                { .role = ROLE_ADMIN },
                { .role = ROLE_ADMIN },
                { .kind = SCHED_PENDING },
                { .kind = SCHED_HELLO, .uid = 7 },
        };
        struct sched_member m[5] = { { 0 } };

        for (size_t i = 0; i < 5; i++)
                ck_assert_int_eq(sched_join(&all, &m[i], &keys[i]), 0);
        ck_assert_uint_eq(count_turns(m, 5, &m[0], 60), 20);
        for (size_t i = 0; i < 5; i++)
                sched_leave(&all, &m[i]);
        ck_assert(is_empty());
}

/* However many tenants the connections before the hello match. */
TEST(accepts_have_half_of_the_turns)
{
        static const struct sched_key keys[] = {
                { .kind = SCHED_PENDING },
                { .kind = SCHED_HELLO, .tenant = (const struct tenant *)&all, .uid = 7 },
                { .kind = SCHED_HELLO, .tenant = (const struct tenant *)&keys, .uid = 7 },
                { .kind = SCHED_HELLO, .uid = 7 },
        };
        struct sched_member m[4] = { { 0 } };

        for (size_t i = 0; i < 4; i++)
                ck_assert_int_eq(sched_join(&all, &m[i], &keys[i]), 0);
        ck_assert_uint_eq(count_turns(m, 4, &m[0], 60), 30);
        for (size_t i = 0; i < 4; i++)
                sched_leave(&all, &m[i]);
        ck_assert(is_empty());
}

/* Monitors take turns with tenants as one class, and those that are not accepted count with the unauthenticated. */
TEST(monitors_are_a_class)
{
        static const struct sched_key pending = { .kind = SCHED_PENDING },
                                      of_monitors = { .kind = SCHED_PENDING, .role = ROLE_MONITOR },
                                      monitor = { .role = ROLE_MONITOR }, admin = { .role = ROLE_ADMIN };
        struct sched_member m[5] = { { 0 } };

        ck_assert_int_eq(sched_join(&all, &m[0], &pending), 0);
        ck_assert_int_eq(sched_join(&all, &m[1], &of_monitors), 0);
        ck_assert_int_eq(sched_join(&all, &m[2], &monitor), 0);
        ck_assert_int_eq(sched_join(&all, &m[3], &monitor), 0);
        ck_assert_int_eq(sched_join(&all, &m[4], &admin), 0);
        for (int i = 0; i < 5; i++)
                sched_ready(&m[i]);
        ck_assert_ptr_eq(next_turn(), &m[0]);
        ck_assert_ptr_eq(next_turn(), &m[2]);
        ck_assert_ptr_eq(next_turn(), &m[4]);
        ck_assert_ptr_eq(next_turn(), &m[1]);
        ck_assert_ptr_eq(next_turn(), &m[3]);
        ck_assert_ptr_null(next_turn());
        for (int i = 0; i < 5; i++)
                sched_leave(&all, &m[i]);
}

/* However many users they are of. */
TEST(unauthenticated_connections_are_one_class)
{
        static const struct sched_key pending = { .kind = SCHED_PENDING };
        struct sched_member m[3] = { { 0 } }, one = { 0 };

        ck_assert_int_eq(sched_join(&all, &m[0], &pending), 0);
        ck_assert_int_eq(sched_join(&all, &m[1], &uid_7), 0);
        ck_assert_int_eq(sched_join(&all, &m[2], &uid_8), 0);
        ck_assert_int_eq(sched_join(&all, &one, &red), 0);
        for (int i = 0; i < 3; i++)
                sched_ready(&m[i]);
        sched_ready(&one);
        for (int i = 0; i < 8; i++) {
                static const int order[] = { 0, 1, 0, 2 };
                struct sched_member *next = next_turn();

                ck_assert_ptr_eq(next, i % 2 ? &one : &m[order[i / 2]]);
                sched_ready(next);
        }
        sched_idle(&m[0]); /* from the middle of their turns */
        ck_assert_ptr_eq(next_turn(), &m[1]);
        sched_leave(&all, &m[2]);
        ck_assert_ptr_eq(next_turn(), &one);
        ck_assert_ptr_null(next_turn());
        sched_ready(&m[1]);
        ck_assert_int_eq(sched_join(&all, &m[1], &red), 0); /* and is none any more */
        ck_assert(TAILQ_EMPTY(&all.unauthenticated.due));
        ck_assert_ptr_eq(next_turn(), &m[1]);
        ck_assert_ptr_null(next_turn());
        sched_leave(&all, &m[0]);
        sched_leave(&all, &m[1]);
        sched_leave(&all, &one);
        ck_assert(is_empty());
}

/* The hello of a victim of another tenant, or of one that matches none, waits for four turns at most: one of the
 * attacker's, one of the connection's own tenant, and one accept before each. Accepts have half of the turns. */
LOOP_TEST(a_user_of_many_uids_delays_no_hello_of_another_tenant, 2)
{
        enum { N = 1000, N_TURNS = 4 * N };
        static const struct sched_key pending = { .kind = SCHED_PENDING };
        static struct sched_member m[N];
        const struct sched_key blue = { .kind = SCHED_HELLO,
                                        .tenant = _i == 0 ? (const struct tenant *)&uid_7 : NULL };
        struct sched_member accepts = { 0 }, one = { 0 };
        unsigned n_accepts = 0, n_of_one = 0;

        for (unsigned i = 0; i < N; i++) {
                const struct sched_key key = { .kind = SCHED_HELLO, .tenant = red.tenant, .uid = 1000 + i };

                m[i] = (struct sched_member){ 0 };
                ck_assert_int_eq(sched_join(&all, &m[i], &key), 0);
                sched_ready(&m[i]);
        }
        ck_assert_int_eq(sched_join(&all, &accepts, &pending), 0);
        sched_ready(&accepts);
        for (unsigned i = 0; i < N_TURNS; i++) {
                struct sched_member *next = next_turn();

                n_accepts += next == &accepts;
                n_of_one += next == &m[7];
                sched_ready(next);
        }
        ck_assert_uint_eq(n_accepts, N_TURNS / 2);
        ck_assert_uint_eq(n_of_one, N_TURNS / 2 / N);
        ck_assert_int_eq(sched_join(&all, &one, &blue), 0);
        sched_ready(&one);
        for (unsigned i = 0; i < 4 && one.is_ready; i++) {
                struct sched_member *next = next_turn();

                if (next != &one)
                        sched_ready(next);
        }
        ck_assert(!one.is_ready);
        for (unsigned i = 0; i < N; i++)
                sched_leave(&all, &m[i]);
        sched_leave(&all, &accepts);
        sched_leave(&all, &one);
        ck_assert(is_empty());
}

/* The users of a tenant share its turns before the hello, however many connections each has. */
TEST(a_user_of_many_connections_delays_its_tenants_hellos_by_its_turn)
{
        static const struct sched_key of_7 = { .kind = SCHED_HELLO,
                                               .tenant = (const struct tenant *)&all,
                                               .uid = 7 },
                                      of_8 = { .kind = SCHED_HELLO,
                                               .tenant = (const struct tenant *)&all,
                                               .uid = 8 };
        struct sched_member m[100] = { { 0 } }, one = { 0 };

        for (unsigned i = 0; i < 100; i++) {
                ck_assert_int_eq(sched_join(&all, &m[i], &of_7), 0);
                sched_ready(&m[i]);
        }
        ck_assert_ptr_eq(next_turn(), &m[0]);
        ck_assert_int_eq(sched_join(&all, &one, &of_8), 0);
        sched_ready(&one);
        ck_assert_ptr_eq(next_turn(), &m[1]);
        ck_assert_ptr_eq(next_turn(), &one);
        ck_assert_ptr_eq(next_turn(), &m[2]);
        for (unsigned i = 0; i < 100; i++)
                sched_leave(&all, &m[i]);
        sched_leave(&all, &one);
        ck_assert(is_empty());
}

/* The longest time that the loop was busy, recently and ever. */
TEST(longest_turns)
{
        struct loop_turns turns = { 0 };
        uint64_t now_ns = 1000 * LOOP_WINDOW_NS;

        loop_turns_add(&turns, now_ns, 500);
        loop_turns_add(&turns, now_ns + 1, 200);
        ck_assert_uint_eq(loop_turns_recent_ns(&turns), 500);
        loop_turns_add(&turns, now_ns + LOOP_WINDOW_NS, 300); /* the minute before still counts */
        ck_assert_uint_eq(loop_turns_recent_ns(&turns), 500);
        loop_turns_add(&turns, now_ns + 2 * LOOP_WINDOW_NS, 100);
        ck_assert_uint_eq(loop_turns_recent_ns(&turns), 300);
        loop_turns_add(&turns, now_ns + 5 * LOOP_WINDOW_NS, 10); /* nothing happened meanwhile */
        ck_assert_uint_eq(loop_turns_recent_ns(&turns), 10);
        ck_assert_uint_eq(turns.longest_ns, 500);
}

/* It is served only if no other is, and only directly after the kernel was asked. */
TEST(who_owes_gives_way_for_a_time)
{
        const struct sched_key blue = { .tenant = (const struct tenant *)&uid_7 };
        struct sched_member unknown = { 0 }, other = { 0 }, a = { 0 };
        uint64_t now = 5;

        ck_assert_int_eq(sched_join(&all, &unknown, &uid_7), 0);
        ck_assert_int_eq(sched_join(&all, &a, &red), 0);
        ck_assert_int_eq(sched_join(&all, &other, &blue), 0);
        ck_assert_ptr_null(sched_next(&all, now, true));
        sched_owe(&unknown, now, 1000);
        sched_owe(&other, now, 2000);
        sched_ready(&other);
        sched_ready(&unknown);
        ck_assert_ptr_null(sched_next(&all, now, false));
        sched_ready(&a);
        for (int i = 0; i < 3; i++) {
                ck_assert_ptr_eq(sched_next(&all, now, i == 0), &a);
                sched_ready(&a);
        }
        sched_idle(&a);
        ck_assert_ptr_eq(sched_next(&all, now, true), &unknown);
        sched_ready(&unknown);
        sched_ready(&a);
        ck_assert_ptr_eq(sched_next(&all, now + 999, false), &a);
        ck_assert_ptr_eq(sched_next(&all, now + 1000, false), &unknown);
        ck_assert_ptr_null(sched_next(&all, now + 1999, false));
        ck_assert_ptr_eq(sched_next(&all, now + 2000, false), &other);
        sched_leave(&all, &unknown);
        sched_leave(&all, &other);
        sched_leave(&all, &a);
}

/* A debt counts from the end of the work. */
TEST(who_works_for_long_gives_way)
{
        const struct sched_key blue = { .tenant = (const struct tenant *)&uid_7 };
        struct sched_member a = { 0 }, b = { 0 };
        uint64_t now = 5;

        ck_assert_int_eq(sched_join(&all, &a, &red), 0);
        ck_assert_int_eq(sched_join(&all, &b, &blue), 0);
        sched_ready(&a);
        ck_assert_ptr_eq(sched_next(&all, now, true), &a);
        now += 10 * SCHED_DEBT_MAX_NS;
        sched_owe(&a, now, 1000);
        sched_ready(&a);
        sched_ready(&b);
        ck_assert_ptr_eq(sched_next(&all, now, false), &b);
        ck_assert_ptr_null(sched_next(&all, now + 999, false));
        ck_assert_ptr_eq(sched_next(&all, now + 1000, false), &a);
        sched_leave(&all, &a);
        sched_leave(&all, &b);
}

TEST(debts_are_limited)
{
        struct sched_member unknown = { 0 };
        uint64_t now = 5;

        ck_assert_int_eq(sched_join(&all, &unknown, &uid_7), 0);
        ck_assert_ptr_null(sched_next(&all, now, true));
        for (int i = 0; i < 3; i++)
                sched_owe(&unknown, now, UINT64_MAX - 1);
        sched_ready(&unknown);
        ck_assert_ptr_null(sched_next(&all, now + SCHED_DEBT_MAX_NS - 1, false));
        ck_assert_ptr_eq(sched_next(&all, now + SCHED_DEBT_MAX_NS, false), &unknown);
        sched_leave(&all, &unknown);
}

/* Who owes nothing itself waits no longer for what others in its group did, however much that was. */
LOOP_TEST(debts_are_shared, 3)
{
        static const struct sched_key pairs[3][2] = {
                { { .kind = SCHED_HELLO, .uid = 7 }, { .kind = SCHED_HELLO, .uid = 8 } },
                { { .role = ROLE_MONITOR }, { .role = ROLE_MONITOR } },
                { { .tenant = (const struct tenant *)&all, .lease = 7 },
                  { .tenant = (const struct tenant *)&all } },
        };
        const struct sched_key blue = { .tenant = (const struct tenant *)&uid_7 };
        struct sched_member costly = { 0 }, cheap = { 0 }, busy = { 0 };
        uint64_t now = 5;

        ck_assert_int_eq(sched_join(&all, &costly, &pairs[_i][0]), 0);
        ck_assert_int_eq(sched_join(&all, &cheap, &pairs[_i][1]), 0);
        ck_assert_int_eq(sched_join(&all, &busy, &blue), 0);
        for (int i = 0; i < 100; i++)
                sched_owe(&costly, now, SCHED_END_NS);
        sched_ready(&cheap);
        sched_ready(&busy);
        ck_assert_ptr_eq(sched_next(&all, now, true), &busy);
        sched_ready(&busy);
        ck_assert_ptr_eq(sched_next(&all, now + SCHED_DEBT_MAX_NS, false), &cheap);
        sched_leave(&all, &costly);
        sched_leave(&all, &cheap);
        sched_leave(&all, &busy);
}

/* A tenant that comes begins with the longest of those, since it may be one that left. */
TEST(debts_of_tenants_outlast_their_sessions)
{
        const struct sched_key blue = { .tenant = (const struct tenant *)&uid_7 };
        struct sched_member a = { 0 }, b = { 0 };
        uint64_t now = 5;

        ck_assert_ptr_null(sched_next(&all, now, true));
        ck_assert_int_eq(sched_join(&all, &a, &red), 0);
        ck_assert_int_eq(sched_join(&all, &b, &blue), 0);
        sched_owe(&a, now, 2000);
        sched_owe(&b, now, 1000);
        sched_leave(&all, &a);
        sched_leave(&all, &b); /* it owes less, which changes nothing */
        ck_assert_int_eq(sched_join(&all, &a, &red), 0);
        sched_ready(&a);
        ck_assert_ptr_null(sched_next(&all, now + 1999, false));
        ck_assert_ptr_eq(sched_next(&all, now + 2000, false), &a);
        sched_leave(&all, &a);
}

/* A job has a session of its own: it does not wait because its tenant had none before. */
TEST(a_tenant_without_a_cause_does_not_owe)
{
        struct sched_member a = { 0 };
        uint64_t now = 5;

        for (int i = 0; i < 2; i++) {
                ck_assert_ptr_null(sched_next(&all, now, true));
                ck_assert_int_eq(sched_join(&all, &a, &red), 0);
                sched_ready(&a);
                ck_assert_ptr_eq(sched_next(&all, now, false), &a);
                sched_owe(&a, now, 1000);
                sched_leave(&all, &a);
                now += 1000;
        }
}
