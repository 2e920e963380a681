/* Parties: turns go round among them, and round among the members of each.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/party.h"
#include "tests/suite.h"

static struct parties all;
static const struct party_key red = { .tenant = (const struct tenant *)&all };
static const struct party_key uid_7 = { .uid = 7 }, uid_8 = { .uid = 8 };

static size_t n_members(const struct party_key *key)
{
        const struct party *p;

        TAILQ_FOREACH(p, &all.all, of_all)
        if (p->key.tenant == key->tenant && p->key.uid == key->uid && p->key.admin == key->admin &&
            p->key.kind == key->kind)
                return p->n_members;
        return 0;
}

static void setup(void)
{
        parties_init(&all);
}

START_TEST(a_crowd_waits_among_itself)
{
        struct party_member crowd[3] = { { 0 } }, one = { 0 };

        for (int i = 0; i < 3; i++) {
                ck_assert_int_eq(party_join(&all, &crowd[i], &uid_7), 0);
                party_ready(&all, &crowd[i]);
                party_ready(&all, &crowd[i]);
        }
        ck_assert_int_eq(party_join(&all, &one, &red), 0);
        party_ready(&all, &one);
        ck_assert_ptr_eq(party_next(&all), &crowd[0]);
        party_ready(&all, &crowd[0]); /* it has more to do already */
        ck_assert_ptr_eq(party_next(&all), &one);
        party_ready(&all, &one);
        ck_assert_ptr_eq(party_next(&all), &crowd[1]);
        ck_assert_ptr_eq(party_next(&all), &one);
        ck_assert_ptr_eq(party_next(&all), &crowd[2]);
        ck_assert_ptr_eq(party_next(&all), &crowd[0]);
        ck_assert_ptr_null(party_next(&all));
        for (int i = 0; i < 3; i++)
                party_leave(&all, &crowd[i]);
        party_leave(&all, &one);
        ck_assert(TAILQ_EMPTY(&all.all) && TAILQ_EMPTY(&all.due));
}
END_TEST

START_TEST(who_says_hello_changes_parties)
{
        struct party_member a = { 0 }, b = { 0 };

        ck_assert_int_eq(party_join(&all, &a, &uid_7), 0);
        ck_assert_int_eq(party_join(&all, &b, &uid_8), 0);
        ck_assert_uint_eq(n_members(&uid_7), 1);
        party_ready(&all, &a);
        ck_assert_int_eq(party_join(&all, &a, &red), 0); /* with what it has to do */
        ck_assert_int_eq(party_join(&all, &a, &red), 0);
        ck_assert_uint_eq(n_members(&uid_7), 0);
        ck_assert_uint_eq(n_members(&red), 1);
        ck_assert_ptr_eq(party_next(&all), &a);
        party_ready(&all, &b);
        party_rest(&all, &b);
        party_rest(&all, &b);
        ck_assert_ptr_null(party_next(&all));
        party_ready(&all, &b);
        party_leave(&all, &b);
        ck_assert_ptr_null(party_next(&all));
        party_leave(&all, &b);
        party_leave(&all, &a);
        ck_assert(TAILQ_EMPTY(&all.all) && TAILQ_EMPTY(&all.due));
}
END_TEST

/* Who knocks has turns of its own beside whoever else has nothing in its key. */
START_TEST(a_kind_is_a_party)
{
        static const struct party_key knocking = { .kind = PARTY_KNOCKING },
                                      of_admins = { .kind = PARTY_KNOCKING, .admin = true },
                                      root = { .uid = 0 };
        struct party_member m[3] = { { 0 } };

        ck_assert_int_eq(party_join(&all, &m[0], &knocking), 0);
        ck_assert_int_eq(party_join(&all, &m[1], &of_admins), 0);
        ck_assert_int_eq(party_join(&all, &m[2], &root), 0);
        ck_assert_uint_eq(n_members(&root), 1);
        for (int i = 0; i < 3; i++)
                party_ready(&all, &m[i]);
        ck_assert_ptr_eq(party_next(&all), &m[0]);
        party_ready(&all, &m[0]);
        for (int i = 1; i < 3; i++)
                ck_assert_ptr_eq(party_next(&all), &m[i]);
        ck_assert_ptr_eq(party_next(&all), &m[0]);
        for (int i = 0; i < 3; i++)
                party_leave(&all, &m[i]);
        ck_assert(TAILQ_EMPTY(&all.all) && TAILQ_EMPTY(&all.due));
}
END_TEST

/* However many users they are of. */
START_TEST(strangers_are_as_one)
{
        static const struct party_key knocking = { .kind = PARTY_KNOCKING };
        struct party_member m[3] = { { 0 } }, one = { 0 };

        ck_assert_int_eq(party_join(&all, &m[0], &knocking), 0);
        ck_assert_int_eq(party_join(&all, &m[1], &uid_7), 0);
        ck_assert_int_eq(party_join(&all, &m[2], &uid_8), 0);
        ck_assert_int_eq(party_join(&all, &one, &red), 0);
        for (int i = 0; i < 3; i++)
                party_ready(&all, &m[i]);
        party_ready(&all, &one);
        for (int i = 0; i < 6; i++) {
                struct party_member *next = party_next(&all);

                ck_assert_ptr_eq(next, i % 2 ? &one : &m[i / 2]);
                party_ready(&all, next);
        }
        party_rest(&all, &m[0]); /* from the middle of their turns */
        ck_assert_ptr_eq(party_next(&all), &m[1]);
        party_leave(&all, &m[2]);
        ck_assert_ptr_eq(party_next(&all), &one);
        ck_assert_ptr_null(party_next(&all));
        party_ready(&all, &m[1]);
        ck_assert_int_eq(party_join(&all, &m[1], &red), 0); /* and is none any more */
        ck_assert(TAILQ_EMPTY(&all.strangers_due));
        ck_assert_ptr_eq(party_next(&all), &m[1]);
        ck_assert_ptr_null(party_next(&all));
        party_leave(&all, &m[0]);
        party_leave(&all, &m[1]);
        party_leave(&all, &one);
        ck_assert(TAILQ_EMPTY(&all.all) && TAILQ_EMPTY(&all.due));
}
END_TEST

int main(void)
{
        Suite *suite = suite_create("party");
        TCase *tc = tcase_create("party");

        tcase_add_checked_fixture(tc, setup, NULL);
        tcase_add_test(tc, a_crowd_waits_among_itself);
        tcase_add_test(tc, who_says_hello_changes_parties);
        tcase_add_test(tc, a_kind_is_a_party);
        tcase_add_test(tc, strangers_are_as_one);
        suite_add_tcase(suite, tc);
        return suite_run(suite);
}
