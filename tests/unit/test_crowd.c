/* Connections that have not said hello: which one is closed when a place is needed.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/crowd.h"

#include <errno.h>

#include "tests/suite.h"

static struct crowd crowd;
static struct crowd_member members[4 * CROWD_PLACES];
static size_t n_used;

static void setup(void)
{
        crowd_init(&crowd);
        n_used = 0;
}

static void teardown(void)
{
        for (size_t i = 0; i < n_used; i++) {
                crowd_leave(&crowd, &members[i]);
                crowd_leave(&crowd, &members[i]);
                members[i] = (struct crowd_member){ .user = NULL };
        }
        ck_assert(TAILQ_EMPTY(&crowd.users));
        ck_assert_uint_eq(crowd.n_members[0] + crowd.n_members[1], 0);
}

/* A connection comes; NULL: it found a place. Else the one that was closed for it. */
static struct crowd_member *come(uid_t uid, bool is_named)
{
        struct crowd_member *closed = NULL;
        struct crowd_user *user;
        int r = crowd_look(&crowd, uid, is_named, &user);

        ck_assert_int_ge(r, 0);
        if (r > 0) {
                closed = TAILQ_FIRST(&user->members);
                crowd_leave(&crowd, closed);
        }
        ck_assert_int_eq(crowd_join(&crowd, &members[n_used++], uid, is_named), 0);
        return closed;
}

static size_t count(uid_t uid, bool is_named)
{
        struct crowd_user *u;

        TAILQ_FOREACH(u, &crowd.users, link)
        if (u->uid == uid && u->is_named == is_named)
                return u->n_members;
        return 0;
}

START_TEST(a_user_makes_way_for_itself)
{
        struct crowd_member *first = &members[1];

        (void)come(8, true);
        for (unsigned i = 0; i < CROWD_OF_USER; i++)
                ck_assert_ptr_null(come(7, true));
        ck_assert_ptr_eq(come(7, true), first);
        ck_assert_ptr_eq(come(7, true), first + 1);
        ck_assert_uint_eq(count(7, true), CROWD_OF_USER);
        ck_assert_uint_eq(count(8, true), 1);
}
END_TEST

/* However many outsiders there are, they share their part of the places. */
START_TEST(outsiders_have_their_part)
{
        for (uid_t uid = 100; uid < 100 + CROWD_OUTSIDERS; uid++)
                ck_assert_ptr_null(come(uid, false));
        for (unsigned i = 0; i < 2; i++) /* all have one, so the oldest goes */
                ck_assert_ptr_eq(come(7, false), &members[i]);
        ck_assert_ptr_eq(come(7, false), &members[CROWD_OUTSIDERS]); /* and now the user with two */
        ck_assert_uint_eq(crowd.n_members[false], CROWD_OUTSIDERS);
        for (uid_t uid = 10; uid < 14; uid++)
                for (unsigned i = 0; i < CROWD_OF_USER; i++)
                        ck_assert_ptr_null(come(uid, true));
        ck_assert_uint_eq(crowd.n_members[true], CROWD_PLACES - CROWD_OUTSIDERS);
}
END_TEST

/* Named users take what outsiders have, and not the other way round. */
START_TEST(named_users_come_first)
{
        struct crowd_user *user;

        for (unsigned i = 0; i < 4; i++)
                ck_assert_ptr_null(come(100, false));
        for (uid_t uid = 10; crowd.n_members[true] < CROWD_PLACES - 4; uid++)
                for (unsigned i = 0; i < CROWD_OF_USER && crowd.n_members[true] < CROWD_PLACES - 4; i++)
                        ck_assert_ptr_null(come(uid, true));
        ck_assert_ptr_eq(come(101, false), &members[0]);
        for (unsigned i = 0; i < 4; i++) {
                struct crowd_member *closed = come(200 + i, true);

                ck_assert_ptr_nonnull(closed);
                ck_assert_uint_eq(crowd.n_members[false], 3 - i);
        }
        ck_assert_int_eq(crowd_look(&crowd, 101, false, &user), -EUSERS);
        /* Among themselves the one with the most gives way; of equal ones the oldest. */
        ck_assert_ptr_eq(come(300, true), &members[4]);
        ck_assert_ptr_eq(come(301, true), &members[4 + CROWD_OF_USER]);
        ck_assert_uint_eq(crowd.n_members[true], CROWD_PLACES);
}
END_TEST

int main(void)
{
        Suite *suite = suite_create("crowd");
        TCase *tc = tcase_create("crowd");

        tcase_add_checked_fixture(tc, setup, teardown);
        tcase_add_test(tc, a_user_makes_way_for_itself);
        tcase_add_test(tc, outsiders_have_their_part);
        tcase_add_test(tc, named_users_come_first);
        suite_add_tcase(suite, tc);
        return suite_run(suite);
}
