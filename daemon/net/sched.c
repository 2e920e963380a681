/* Scheduling classes; see sched.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/net/sched.h"

#include <errno.h>
#include <stdlib.h>

#include "daemon/clock.h"

void sched_init(struct sched *all)
{
        TAILQ_INIT(&all->all);
        TAILQ_INIT(&all->due);
        all->now_ns = all->left_owing_until_ns = 0;
        all->unauthenticated = (struct class){ .is_group = true };
        TAILQ_INIT(&all->unauthenticated.due);
}

static bool is_unauthenticated(const struct sched_key *key)
{
        return key->role == ROLE_CLIENT    ? !key->tenant
               : key->role == ROLE_MONITOR ? key->kind == SCHED_PENDING
                                           : false;
}

static void class_set_due(struct sched *all, struct class *p)
{
        struct class *group = p->group;

        if (group && TAILQ_EMPTY(&group->due))
                TAILQ_INSERT_TAIL(&all->due, group, of_due);
        TAILQ_INSERT_TAIL(group ? &group->due : &all->due, p, of_due);
}

static void class_unset_due(struct sched *all, struct class *p)
{
        struct class *group = p->group;

        TAILQ_REMOVE(group ? &group->due : &all->due, p, of_due);
        if (group && TAILQ_EMPTY(&group->due))
                TAILQ_REMOVE(&all->due, group, of_due);
}

static bool is_key(const struct class *p, const struct sched_key *key, bool is_group)
{
        return p->is_group == is_group && p->key.tenant == key->tenant && p->key.lease == key->lease &&
               p->key.uid == key->uid && p->key.role == key->role && p->key.kind == key->kind;
}

/* Few: one for each tenant and lease, and for each user with unauthenticated connections. */
static struct class *class_find(const struct sched *all, const struct sched_key *key, bool is_group)
{
        struct class *p;

        TAILQ_FOREACH(p, &all->all, of_all)
        if (is_key(p, key, is_group))
                return p;
        return NULL;
}

static struct class *class_alloc(struct sched *all, const struct sched_key *key, bool is_group)
{
        struct class *p = calloc(1, sizeof(*p));

        if (!p)
                return NULL;
        p->key = *key;
        p->is_group = is_group;
        TAILQ_INIT(&p->ready);
        TAILQ_INIT(&p->due);
        TAILQ_INSERT_TAIL(&all->all, p, of_all);
        return p;
}

/* A class without members, or a group without classes. */
static void class_free(struct sched *all, struct class *p)
{
        struct class *group = p->group;

        if (p->is_group && p->owes_until_ns > all->left_owing_until_ns)
                all->left_owing_until_ns = p->owes_until_ns;
        TAILQ_REMOVE(&all->all, p, of_all);
        free(p);
        if (group && --group->n_members == 0 && group != &all->unauthenticated)
                class_free(all, group);
}

/* In *ret the group of a class with the key; NULL: none. */
static int find_group(struct sched *all, const struct sched_key *key, struct class **ret)
{
        struct sched_key of_tenant = *key;

        *ret = is_unauthenticated(key) ? &all->unauthenticated : NULL;
        if (!key->tenant)
                return 0;
        of_tenant.lease = 0;
        *ret = class_find(all, &of_tenant, true);
        if (*ret)
                return 0;
        *ret = class_alloc(all, &of_tenant, true);
        if (!*ret)
                return -ENOMEM;
        (*ret)->owes_until_ns = all->left_owing_until_ns;
        return 0;
}

static struct class *class_new(struct sched *all, const struct sched_key *key)
{
        struct class *group, *p = NULL;

        if (find_group(all, key, &group) == 0)
                p = class_alloc(all, key, false);
        if (p && group)
                group->n_members++;
        else if (group && group->n_members == 0 && group != &all->unauthenticated)
                class_free(all, group);
        if (p)
                p->group = group;
        return p;
}

int sched_join(struct sched *all, struct sched_member *m, const struct sched_key *key)
{
        struct class *p = class_find(all, key, false);
        bool was_ready = m->is_ready;

        if (p && p == m->class)
                return 0;
        if (!p)
                p = class_new(all, key);
        if (!p)
                return -ENOMEM;
        p->n_members++;
        sched_leave(all, m);
        m->class = p;
        if (was_ready)
                sched_ready(all, m);
        return 0;
}

void sched_leave(struct sched *all, struct sched_member *m)
{
        struct class *p = m->class;

        if (!p)
                return;
        sched_idle(all, m);
        m->class = NULL;
        if (--p->n_members > 0)
                return;
        class_free(all, p);
}

void sched_ready(struct sched *all, struct sched_member *m)
{
        struct class *p = m->class;

        if (m->is_ready)
                return;
        m->is_ready = true;
        if (TAILQ_EMPTY(&p->ready))
                class_set_due(all, p);
        TAILQ_INSERT_TAIL(&p->ready, m, link);
}

void sched_idle(struct sched *all, struct sched_member *m)
{
        struct class *p = m->class;

        if (!m->is_ready)
                return;
        m->is_ready = false;
        TAILQ_REMOVE(&p->ready, m, link);
        if (TAILQ_EMPTY(&p->ready))
                class_unset_due(all, p);
}

static void move_to_tail(struct sched_class_list *list, struct class *p)
{
        TAILQ_REMOVE(list, p, of_due);
        TAILQ_INSERT_TAIL(list, p, of_due);
}

/* The first without debt among the first few, or else the one of them whose debt ends first. */
static struct class *find_due(const struct sched *all, bool owing)
{
        struct class *p = TAILQ_FIRST(&all->due), *soonest = p;

        for (unsigned i = 0; p && i < SCHED_LOOKS; i++, p = TAILQ_NEXT(p, of_due)) {
                if (p->owes_until_ns <= all->now_ns)
                        return p;
                if (p->owes_until_ns < soonest->owes_until_ns)
                        soonest = p;
        }
        return owing ? soonest : NULL;
}

struct sched_member *sched_next(struct sched *all, uint64_t now_ns, bool owing)
{
        struct sched_member *m;
        struct class *p;

        all->now_ns = now_ns;
        p = find_due(all, owing);
        if (!p)
                return NULL;
        move_to_tail(&all->due, p);
        if (p->is_group) {
                struct class *first = TAILQ_FIRST(&p->due);

                move_to_tail(&p->due, first);
                p = first;
        }
        m = TAILQ_FIRST(&p->ready);
        sched_idle(all, m);
        return m;
}

void sched_owe(struct sched_member *m, uint64_t now_ns, uint64_t n_ns)
{
        struct class *p = m->class->group ? m->class->group : m->class;
        uint64_t max_ns = now_ns + SCHED_DEBT_MAX_NS;

        if (p->owes_until_ns < now_ns)
                p->owes_until_ns = now_ns;
        p->owes_until_ns = n_ns < max_ns - p->owes_until_ns ? p->owes_until_ns + n_ns : max_ns;
}

void sched_run(struct sched *all, uint64_t slice_ns)
{
        uint64_t now_ns = clock_ns(), end_ns = now_ns + slice_ns;
        struct sched_member *m = sched_next(all, now_ns, true);

        while (m) {
                m->turn(m);
                now_ns = clock_ns();
                m = now_ns < end_ns ? sched_next(all, now_ns, false) : NULL;
        }
}
