/* Connections that have not said hello: which one is closed when a place is needed.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/net/unauth.h"

#include <errno.h>

#include "tests/suite.h"

static struct unauth unauth;
static struct unauth_member members[4 * UNAUTH_MAX];
static size_t n_used;

static void setup(void)
{
        unauth_init(&unauth);
        n_used = 0;
}

static void teardown(void)
{
        for (size_t i = 0; i < n_used; i++) {
                unauth_leave(&unauth, &members[i]);
                unauth_leave(&unauth, &members[i]);
                members[i] = (struct unauth_member){ .user = NULL };
        }
        ck_assert(TAILQ_EMPTY(&unauth.users));
        ck_assert_uint_eq(unauth.n_members[0] + unauth.n_members[1], 0);
}

FIXTURE(unauth, setup, teardown);

/* A connection comes; NULL: it found a place. Else the one that was closed for it. */
static struct unauth_member *come(uid_t uid, bool is_named)
{
        struct unauth_member *closed = NULL;
        struct unauth_user *user;
        int r = unauth_look(&unauth, uid, is_named, &user);

        ck_assert_int_ge(r, 0);
        if (r > 0) {
                closed = TAILQ_FIRST(&user->members);
                unauth_leave(&unauth, closed);
        }
        ck_assert_int_eq(unauth_join(&unauth, &members[n_used++], uid, is_named), 0);
        return closed;
}

static size_t count(uid_t uid, bool is_named)
{
        struct unauth_user *u;

        TAILQ_FOREACH(u, &unauth.users, link)
        if (u->uid == uid && u->is_named == is_named)
                return u->n_members;
        return 0;
}

TEST(oldest_connection_of_the_same_user_is_displaced)
{
        struct unauth_member *first = &members[1];

        (void)come(8, true);
        for (unsigned i = 0; i < UNAUTH_MAX_OF_USER; i++)
                ck_assert_ptr_null(come(7, true));
        ck_assert_ptr_eq(come(7, true), first);
        ck_assert_ptr_eq(come(7, true), first + 1);
        ck_assert_uint_eq(count(7, true), UNAUTH_MAX_OF_USER);
        ck_assert_uint_eq(count(8, true), 1);
}

/* However many outsiders there are, they share their part of the places. */
TEST(unknown_users_have_a_share)
{
        for (uid_t uid = 100; uid < 100 + UNAUTH_MAX_UNNAMED; uid++)
                ck_assert_ptr_null(come(uid, false));
        for (unsigned i = 0; i < 2; i++) /* all have one, so the oldest goes */
                ck_assert_ptr_eq(come(7, false), &members[i]);
        ck_assert_ptr_eq(come(7, false), &members[UNAUTH_MAX_UNNAMED]); /* and now the user with two */
        ck_assert_uint_eq(unauth.n_members[false], UNAUTH_MAX_UNNAMED);
        for (uid_t uid = 10; uid < 14; uid++)
                for (unsigned i = 0; i < UNAUTH_MAX_OF_USER; i++)
                        ck_assert_ptr_null(come(uid, true));
        ck_assert_uint_eq(unauth.n_members[true], UNAUTH_MAX - UNAUTH_MAX_UNNAMED);
}

/* Named users take what outsiders have, and not the other way round. */
TEST(users_in_the_config_have_priority)
{
        struct unauth_user *user;

        for (unsigned i = 0; i < 4; i++)
                ck_assert_ptr_null(come(100, false));
        for (uid_t uid = 10; unauth.n_members[true] < UNAUTH_MAX - 4; uid++)
                for (unsigned i = 0; i < UNAUTH_MAX_OF_USER && unauth.n_members[true] < UNAUTH_MAX - 4; i++)
                        ck_assert_ptr_null(come(uid, true));
        ck_assert_ptr_eq(come(101, false), &members[0]);
        for (unsigned i = 0; i < 4; i++) {
                struct unauth_member *closed = come(200 + i, true);

                ck_assert_ptr_nonnull(closed);
                ck_assert_uint_eq(unauth.n_members[false], 3 - i);
        }
        ck_assert_int_eq(unauth_look(&unauth, 101, false, &user), -EUSERS);
        /* Among themselves the one with the most gives way; of equal ones the oldest. */
        ck_assert_ptr_eq(come(300, true), &members[4]);
        ck_assert_ptr_eq(come(301, true), &members[4 + UNAUTH_MAX_OF_USER]);
        ck_assert_uint_eq(unauth.n_members[true], UNAUTH_MAX);
}
