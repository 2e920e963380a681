/* Places of connections; see places.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/net/places.h"

#include <assert.h>
#include <errno.h>
#include <search.h>
#include <stdlib.h>

/* A job may start as many processes at once as a user has places before the hello. */
const struct places_rules places_before_hello = { .max = 1024,
                                                  .max_of_user = PLACES_OF_USER,
                                                  .max_unmatched = 512 };
const struct places_rules places_of_monitors = { .max = 64, .max_of_user = 16, .are_lasting = true };

void places_init(struct places *p, const struct places_rules *rules)
{
        *p = (struct places){ .rules = rules };
        TAILQ_INIT(&p->classes);
}

/* ---- classes and users ------------------------------------------------------ */

static struct places_class *find_class(const struct places *p, const struct tenant *tenant)
{
        struct places_class *class;

        TAILQ_FOREACH(class, &p->classes, link)
        if (class->tenant == tenant)
                return class;
        return NULL;
}

static int compare_users(const void *a, const void *b)
{
        const struct places_user *u = a, *v = b;

        if (u->tenant != v->tenant)
                return (uintptr_t)u->tenant < (uintptr_t)v->tenant ? -1 : 1;
        return (u->uid > v->uid) - (u->uid < v->uid);
}

static struct places_user *find_user(const struct places *p, const struct tenant *tenant, uid_t uid)
{
        const struct places_user key = { .tenant = tenant, .uid = uid };
        struct places_user *const *found = tfind(&key, &p->users, compare_users);

        return found ? *found : NULL;
}

static struct places_class *find_largest_class(const struct places *p)
{
        struct places_class *class, *largest = TAILQ_FIRST(&p->classes);

        TAILQ_FOREACH(class, &p->classes, link)
        if (class->n_members > largest->n_members)
                largest = class;
        return largest;
}

static struct places_user *find_largest_user(const struct places_class *class)
{
        return TAILQ_FIRST(&class->users[class->n_most]);
}

static struct places_class *class_new(struct places *p, const struct tenant *tenant)
{
        struct places_class *class = calloc(1, sizeof(*class));

        if (!class)
                return NULL;
        class->places = p;
        class->tenant = tenant;
        for (size_t i = 0; i <= PLACES_OF_USER; i++)
                TAILQ_INIT(&class->users[i]);
        TAILQ_INSERT_TAIL(&p->classes, class, link);
        return class;
}

static void class_free_empty(struct places_class *class)
{
        if (class->n_members > 0)
                return;
        TAILQ_REMOVE(&class->places->classes, class, link);
        free(class);
}

static struct places_user *user_new(struct places_class *class, uid_t uid)
{
        struct places_user *u = calloc(1, sizeof(*u));

        if (!u)
                return NULL;
        u->tenant = class->tenant;
        u->uid = uid;
        u->class = class;
        TAILQ_INIT(&u->members);
        if (!tsearch(u, &class->places->users, compare_users)) {
                free(u);
                return NULL;
        }
        return u;
}

static void user_set_members(struct places_user *u, size_t n)
{
        struct places_class *class = u->class;

        assert(n <= PLACES_OF_USER); /* places_look() was asked */
        class->n_members += n - u->n_members;
        class->places->n_members += n - u->n_members;
        if (u->n_members > 0)
                TAILQ_REMOVE(&class->users[u->n_members], u, link);
        u->n_members = n;
        if (n != 0)
                TAILQ_INSERT_TAIL(&class->users[n], u, link);
        if (class->n_most < n)
                class->n_most = n;
        else if (TAILQ_EMPTY(&class->users[class->n_most]))
                class->n_most--; /* the user had as many */
}

/* ---- who makes way ----------------------------------------------------------- */

/* NULL: none may be displaced. */
static struct places_user *find_displaced(const struct places *p, const struct tenant *tenant)
{
        const struct places_class *class = find_class(p, NULL);

        if (!class && tenant)
                class = find_largest_class(p);
        return class ? find_largest_user(class) : NULL;
}

/* The user that loses a lasting place; NULL: none may. A user without any gets one where its class has others. */
static struct places_user *find_displaced_for_long(const struct places *p, const struct places_class *own,
                                                   const struct places_user *user)
{
        const struct places_class *class = find_largest_class(p);
        struct places_user *u;

        if ((own ? own->n_members : 0) + 1 >= class->n_members)
                class = own;
        if (!class)
                return NULL;
        u = find_largest_user(class);
        return class == own && user && user->n_members + 1 >= u->n_members ? NULL : u;
}

int places_look(const struct places *p, const struct tenant *tenant, uid_t uid, struct places_user **ret_user)
{
        const struct places_rules *rules = p->rules;
        const struct places_class *class = find_class(p, tenant);
        struct places_user *user = find_user(p, tenant, uid);
        bool has_share = tenant || rules->are_lasting || !class || class->n_members < rules->max_unmatched;

        if (user && user->n_members >= rules->max_of_user && rules->are_lasting)
                return -EDQUOT;
        if (!user || user->n_members < rules->max_of_user) {
                if (p->n_members < rules->max && has_share)
                        return 0;
                user = rules->are_lasting ? find_displaced_for_long(p, class, user)
                                          : find_displaced(p, tenant);
        }
        if (!user)
                return -EUSERS;
        *ret_user = user;
        return 1;
}

int places_join(struct places *p, struct places_member *m, const struct tenant *tenant, uid_t uid)
{
        struct places_user *u = find_user(p, tenant, uid);
        struct places_class *class = find_class(p, tenant);

        if (!class)
                class = class_new(p, tenant);
        if (!class)
                return -ENOMEM;
        if (!u)
                u = user_new(class, uid);
        if (!u) {
                class_free_empty(class);
                return -ENOMEM;
        }
        m->user = u;
        TAILQ_INSERT_TAIL(&u->members, m, link);
        user_set_members(u, u->n_members + 1);
        return 0;
}

void places_leave(struct places_member *m)
{
        struct places_user *u = m->user;

        if (!u)
                return;
        m->user = NULL;
        TAILQ_REMOVE(&u->members, m, link);
        user_set_members(u, u->n_members - 1);
        if (u->n_members > 0)
                return;
        tdelete(u, &u->class->places->users, compare_users);
        class_free_empty(u->class);
        free(u);
}
