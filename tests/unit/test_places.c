/* Places of connections: which connection is closed when one is needed.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/net/places.h"

#include <errno.h>

#include "tests/suite.h"

static struct places places;
static struct places_member members[4 * 1024];
static size_t n_used;

static const struct tenant *const RED = (const struct tenant *)&places,
                                  *const BLUE = (const struct tenant *)&members;

static void setup(void)
{
        places_init(&places, &places_before_hello);
        n_used = 0;
}

static void teardown(void)
{
        for (size_t i = 0; i < n_used; i++) {
                places_leave(&members[i]);
                places_leave(&members[i]);
        }
        ck_assert(TAILQ_EMPTY(&places.classes));
        ck_assert_ptr_null(places.users);
        ck_assert_uint_eq(places.n_members, 0);
}

FIXTURE(places, setup, teardown);

/* A connection comes; NULL: it found a place. Else the one that was closed for it. */
static struct places_member *come(const struct tenant *tenant, uid_t uid)
{
        struct places_member *closed = NULL;
        struct places_user *user;
        int r = places_look(&places, tenant, uid, &user);

        ck_assert_int_ge(r, 0);
        if (r > 0) {
                closed = TAILQ_FIRST(&user->members);
                places_leave(closed);
        }
        ck_assert_int_eq(places_join(&places, &members[n_used++], tenant, uid), 0);
        return closed;
}

static int refused(const struct tenant *tenant, uid_t uid)
{
        struct places_user *user;

        return places_look(&places, tenant, uid, &user);
}

static size_t count(const struct tenant *tenant)
{
        const struct places_class *class;

        TAILQ_FOREACH(class, &places.classes, link)
        if (class->tenant == tenant)
                return class->n_members;
        return 0;
}

TEST(oldest_connection_of_the_same_user_is_displaced)
{
        const unsigned n_most = 128;

        (void)come(RED, 8);
        for (unsigned i = 0; i < n_most; i++)
                ck_assert_ptr_null(come(RED, 7));
        ck_assert_ptr_eq(come(RED, 7), &members[1]);
        ck_assert_ptr_eq(come(RED, 7), &members[2]);
        ck_assert_uint_eq(count(RED), n_most + 1);
}

/* However many unmatched users there are, they share their part of the places. */
TEST(unknown_users_have_a_share)
{
        const unsigned n_most = 512;

        for (unsigned i = 0; i < n_most; i++)
                ck_assert_ptr_null(come(NULL, 100 + i));
        for (unsigned i = 0; i < 2; i++) /* all have one, so the oldest goes */
                ck_assert_ptr_eq(come(NULL, 7), &members[i]);
        ck_assert_ptr_eq(come(NULL, 7), &members[n_most]); /* and now the user with two */
        ck_assert_uint_eq(count(NULL), n_most);
        for (uid_t uid = 10; uid < 14; uid++)
                for (unsigned i = 0; i < 128; i++)
                        ck_assert_ptr_null(come(RED, uid));
        ck_assert_uint_eq(places.n_members, 1024);
}

/* Users of tenants take what others have, and not the other way round. */
TEST(users_in_the_config_have_priority)
{
        for (unsigned i = 0; i < 4; i++)
                ck_assert_ptr_null(come(NULL, 100));
        for (unsigned i = 0; i < 1020; i++)
                ck_assert_ptr_null(come(RED, 10 + i / 128));
        ck_assert_ptr_eq(come(NULL, 101), &members[0]);
        for (unsigned i = 0; i < 4; i++) {
                ck_assert_ptr_nonnull(come(RED, 200 + i));
                ck_assert_uint_eq(count(NULL), 3 - i);
        }
        ck_assert_int_eq(refused(NULL, 101), -EUSERS);
        /* Among themselves the one with the most gives way; of equal ones the oldest. */
        ck_assert_ptr_eq(come(RED, 300), &members[4]);
        ck_assert_ptr_eq(come(RED, 301), &members[4 + 128]);
        ck_assert_uint_eq(places.n_members, 1024);
}

/* Of users with equally many, the one that has had as many for the longest time loses one. */
TEST(users_with_equally_many_lose_in_turn)
{
        const uid_t uids[] = { 7, 8, 8, 7 };
        const size_t order[] = { 1, 0, 4, 5 };

        for (size_t i = 0; i < 4; i++)
                ck_assert_ptr_null(come(RED, uids[i]));
        for (unsigned i = 0; i < 1020; i++)
                ck_assert_ptr_null(come(RED, 100 + i));
        for (unsigned i = 0; i < 4; i++)
                ck_assert_ptr_eq(come(RED, 5000 + i), &members[order[i]]);
}

/* A user with many uids that match a tenant displaces connections of that tenant only. */
TEST(uids_of_one_tenant_displace_each_other)
{
        for (unsigned i = 0; i < 200; i++)
                ck_assert_ptr_null(come(BLUE, 5 + i / 100));
        for (unsigned i = 0; i < 3000; i++)
                (void)come(RED, 1000 + i);
        ck_assert_uint_eq(count(BLUE), 200);
        ck_assert_uint_eq(count(RED), 824);
        for (unsigned i = 0; i < 300; i++)
                (void)come(BLUE, 2000 + i);
        ck_assert_uint_eq(count(BLUE), 500);
}

/* ---- monitors --------------------------------------------------------------- */

#define N_MONITORS 64u

TEST(a_monitor_displaces_one_of_the_largest_class)
{
        places_init(&places, &places_of_monitors);
        for (unsigned i = 0; i < N_MONITORS; i++)
                ck_assert_ptr_null(come(RED, i / 16));
        for (unsigned i = 0; i < N_MONITORS / 2; i++) /* each class has half at last */
                ck_assert_int_eq(come(NULL, 100 + i / 8)->user == NULL, true);
        ck_assert_uint_eq(count(NULL), N_MONITORS / 2);
        ck_assert_int_eq(refused(NULL, 103), -EUSERS);
        ck_assert_int_eq(refused(RED, 0), -EUSERS);
        for (unsigned i = 0; i < N_MONITORS / 3; i++)
                ck_assert_ptr_nonnull(come(BLUE, 7 + i / 8));
        ck_assert_uint_eq(count(BLUE), N_MONITORS / 3);
        ck_assert_int_eq(refused(BLUE, 7), -EUSERS); /* the largest class has one more */
}

/* The users of a class share what it has: each gets a place. */
TEST(a_user_has_few_places_of_monitors)
{
        places_init(&places, &places_of_monitors);
        for (unsigned i = 0; i < 16; i++)
                ck_assert_ptr_null(come(RED, 1));
        ck_assert_int_eq(refused(RED, 1), -EDQUOT);
        for (unsigned i = 16; i < N_MONITORS; i++)
                ck_assert_ptr_null(come(RED, 1 + i / 16));
        for (unsigned i = 0; i < 12; i++)
                ck_assert_ptr_nonnull(come(RED, 9));
        ck_assert_int_eq(refused(RED, 9), -EUSERS); /* they would displace each other in turn */
        for (unsigned i = 0; i < 2 * N_MONITORS; i++)
                ck_assert_ptr_nonnull(come(RED, 1000 + i));
        ck_assert_uint_eq(count(RED), N_MONITORS);
}
