/* Places of connections; see places.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/net/places.h"

#include <errno.h>
#include <stdlib.h>

/* A job may start as many processes at once as a user has places before the hello. */
const struct places_rules places_before_hello = { .max = 1024, .max_of_user = 128, .max_unmatched = 512 };
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

/* class: NULL: there is none. */
static struct places_user *find_user(const struct places_class *class, uid_t uid)
{
        struct places_user *u = class ? TAILQ_FIRST(&class->users) : NULL;

        while (u && u->uid != uid)
                u = TAILQ_NEXT(u, link);
        return u;
}

static struct places_class *find_largest_class(const struct places *p)
{
        struct places_class *class, *largest = TAILQ_FIRST(&p->classes);

        TAILQ_FOREACH(class, &p->classes, link)
        if (class->n_members > largest->n_members)
                largest = class;
        return largest;
}

static bool is_before(const struct places_user *a, const struct places_user *b)
{
        if (a->n_members != b->n_members)
                return a->n_members > b->n_members;
        return TAILQ_FIRST(&a->members)->number < TAILQ_FIRST(&b->members)->number;
}

static struct places_user *find_largest_user(const struct places_class *class)
{
        struct places_user *u, *largest = TAILQ_FIRST(&class->users);

        TAILQ_FOREACH(u, &class->users, link)
        if (is_before(u, largest))
                largest = u;
        return largest;
}

static struct places_class *class_new(struct places *p, const struct tenant *tenant)
{
        struct places_class *class = calloc(1, sizeof(*class));

        if (!class)
                return NULL;
        class->places = p;
        class->tenant = tenant;
        TAILQ_INIT(&class->users);
        TAILQ_INSERT_TAIL(&p->classes, class, link);
        return class;
}

static void class_free_empty(struct places_class *class)
{
        if (!TAILQ_EMPTY(&class->users))
                return;
        TAILQ_REMOVE(&class->places->classes, class, link);
        free(class);
}

static struct places_user *user_new(struct places_class *class, uid_t uid)
{
        struct places_user *u = calloc(1, sizeof(*u));

        if (!u)
                return NULL;
        u->class = class;
        u->uid = uid;
        TAILQ_INIT(&u->members);
        TAILQ_INSERT_TAIL(&class->users, u, link);
        return u;
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

/* The same of lasting places. A user without any gets one where its class has others. */
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
        struct places_user *user = find_user(class, uid);
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
        struct places_class *class = find_class(p, tenant);
        struct places_user *u;

        if (!class)
                class = class_new(p, tenant);
        if (!class)
                return -ENOMEM;
        u = find_user(class, uid);
        if (!u)
                u = user_new(class, uid);
        if (!u) {
                class_free_empty(class);
                return -ENOMEM;
        }
        m->user = u;
        m->number = ++p->n_ever;
        TAILQ_INSERT_TAIL(&u->members, m, link);
        u->n_members++;
        class->n_members++;
        p->n_members++;
        return 0;
}

void places_leave(struct places_member *m)
{
        struct places_user *u = m->user;
        struct places_class *class;

        if (!u)
                return;
        class = u->class;
        m->user = NULL;
        TAILQ_REMOVE(&u->members, m, link);
        u->n_members--;
        class->n_members--;
        class->places->n_members--;
        if (u->n_members > 0)
                return;
        TAILQ_REMOVE(&class->users, u, link);
        free(u);
        class_free_empty(class);
}
