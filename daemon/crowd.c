/* The crowd; see crowd.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/crowd.h"

#include <errno.h>
#include <stdlib.h>

void crowd_init(struct crowd *crowd)
{
        *crowd = (struct crowd){ .n_ever = 0 };
        TAILQ_INIT(&crowd->users);
}

static struct crowd_user *find_user(const struct crowd *crowd, uid_t uid, bool is_named)
{
        struct crowd_user *u;

        TAILQ_FOREACH(u, &crowd->users, link)
        if (u->uid == uid && u->is_named == is_named)
                return u;
        return NULL;
}

static bool is_before(const struct crowd_user *a, const struct crowd_user *b)
{
        if (a->n_members != b->n_members)
                return a->n_members > b->n_members;
        return TAILQ_FIRST(&a->members)->number < TAILQ_FIRST(&b->members)->number;
}

/* NULL: there is no such user. */
static struct crowd_user *find_largest(const struct crowd *crowd, bool is_named)
{
        struct crowd_user *u, *largest = NULL;

        TAILQ_FOREACH(u, &crowd->users, link)
        if (u->is_named == is_named && (!largest || is_before(u, largest)))
                largest = u;
        return largest;
}

int crowd_look(const struct crowd *crowd, uid_t uid, bool is_named, struct crowd_user **ret_user)
{
        struct crowd_user *u = find_user(crowd, uid, is_named);
        size_t n_outsiders = crowd->n_members[false];

        if (u && u->n_members >= CROWD_OF_USER) {
                *ret_user = u;
                return 1;
        }
        if (n_outsiders + crowd->n_members[true] < CROWD_PLACES &&
            (is_named || n_outsiders < CROWD_OUTSIDERS))
                return 0;
        u = find_largest(crowd, false);
        if (!u && is_named)
                u = find_largest(crowd, true);
        if (!u)
                return -EUSERS;
        *ret_user = u;
        return 1;
}

int crowd_join(struct crowd *crowd, struct crowd_member *m, uid_t uid, bool is_named)
{
        struct crowd_user *u = find_user(crowd, uid, is_named);

        if (!u) {
                u = calloc(1, sizeof(*u));
                if (!u)
                        return -ENOMEM;
                u->uid = uid;
                u->is_named = is_named;
                TAILQ_INIT(&u->members);
                TAILQ_INSERT_TAIL(&crowd->users, u, link);
        }
        m->user = u;
        m->number = ++crowd->n_ever;
        u->n_members++;
        TAILQ_INSERT_TAIL(&u->members, m, link);
        crowd->n_members[is_named]++;
        return 0;
}

void crowd_leave(struct crowd *crowd, struct crowd_member *m)
{
        struct crowd_user *u = m->user;

        if (!u)
                return;
        m->user = NULL;
        crowd->n_members[u->is_named]--;
        TAILQ_REMOVE(&u->members, m, link);
        if (--u->n_members > 0)
                return;
        TAILQ_REMOVE(&crowd->users, u, link);
        free(u);
}
