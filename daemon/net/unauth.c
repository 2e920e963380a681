/* Connections before the hello; see unauth.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/net/unauth.h"

#include <errno.h>
#include <stdlib.h>

void unauth_init(struct unauth *unauth)
{
        *unauth = (struct unauth){ .n_ever = 0 };
        TAILQ_INIT(&unauth->users);
}

static struct unauth_user *find_user(const struct unauth *unauth, uid_t uid, bool is_named)
{
        struct unauth_user *u;

        TAILQ_FOREACH(u, &unauth->users, link)
        if (u->uid == uid && u->is_named == is_named)
                return u;
        return NULL;
}

static bool is_before(const struct unauth_user *a, const struct unauth_user *b)
{
        if (a->n_members != b->n_members)
                return a->n_members > b->n_members;
        return TAILQ_FIRST(&a->members)->number < TAILQ_FIRST(&b->members)->number;
}

/* NULL: there is no such user. */
static struct unauth_user *find_largest(const struct unauth *unauth, bool is_named)
{
        struct unauth_user *u, *largest = NULL;

        TAILQ_FOREACH(u, &unauth->users, link)
        if (u->is_named == is_named && (!largest || is_before(u, largest)))
                largest = u;
        return largest;
}

int unauth_look(const struct unauth *unauth, uid_t uid, bool is_named, struct unauth_user **ret_user)
{
        struct unauth_user *u = find_user(unauth, uid, is_named);
        size_t n_outsiders = unauth->n_members[false];

        if (u && u->n_members >= UNAUTH_MAX_OF_USER) {
                *ret_user = u;
                return 1;
        }
        if (n_outsiders + unauth->n_members[true] < UNAUTH_MAX &&
            (is_named || n_outsiders < UNAUTH_MAX_UNNAMED))
                return 0;
        u = find_largest(unauth, false);
        if (!u && is_named)
                u = find_largest(unauth, true);
        if (!u)
                return -EUSERS;
        *ret_user = u;
        return 1;
}

int unauth_join(struct unauth *unauth, struct unauth_member *m, uid_t uid, bool is_named)
{
        struct unauth_user *u = find_user(unauth, uid, is_named);

        if (!u) {
                u = calloc(1, sizeof(*u));
                if (!u)
                        return -ENOMEM;
                u->uid = uid;
                u->is_named = is_named;
                TAILQ_INIT(&u->members);
                TAILQ_INSERT_TAIL(&unauth->users, u, link);
        }
        m->user = u;
        m->number = ++unauth->n_ever;
        u->n_members++;
        TAILQ_INSERT_TAIL(&u->members, m, link);
        unauth->n_members[is_named]++;
        return 0;
}

void unauth_leave(struct unauth *unauth, struct unauth_member *m)
{
        struct unauth_user *u = m->user;

        if (!u)
                return;
        m->user = NULL;
        unauth->n_members[u->is_named]--;
        TAILQ_REMOVE(&u->members, m, link);
        if (--u->n_members > 0)
                return;
        TAILQ_REMOVE(&unauth->users, u, link);
        free(u);
}
