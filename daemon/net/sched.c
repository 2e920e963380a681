/* Scheduling classes; see sched.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/net/sched.h"

#include <errno.h>
#include <search.h>
#include <stdlib.h>

#include "daemon/base/clock.h"

static void group_init(struct class *p, struct class *group)
{
        p->group = group;
        p->is_group = true;
        TAILQ_INIT(&p->due);
}

void sched_init(struct sched *all)
{
        *all = (struct sched){ .now_ns = 0 };
        group_init(&all->root, NULL);
        group_init(&all->unauthenticated, &all->root);
        group_init(&all->hellos, &all->unauthenticated);
        all->root.is_fixed = all->unauthenticated.is_fixed = all->hellos.is_fixed = true;
}

/* With its group, if it is the first of it. */
static void class_set_due(struct class *p)
{
        bool is_first = true;

        for (; p->group && is_first; p = p->group) {
                is_first = TAILQ_EMPTY(&p->group->due);
                TAILQ_INSERT_TAIL(&p->group->due, p, of_due);
        }
}

static void class_unset_due(struct class *p)
{
        bool is_last = true;

        for (; p->group && is_last; p = p->group) {
                TAILQ_REMOVE(&p->group->due, p, of_due);
                is_last = TAILQ_EMPTY(&p->group->due);
        }
}

static int compare(uint64_t a, uint64_t b)
{
        return (a > b) - (a < b);
}

static int compare_classes(const void *a, const void *b)
{
        const struct class *p = a, *q = b;
        int r = compare((uintptr_t)p->group, (uintptr_t)q->group);

        if (r == 0)
                r = compare((uintptr_t)p->key.tenant, (uintptr_t)q->key.tenant);
        if (r == 0)
                r = compare(p->key.lease, q->key.lease);
        if (r == 0)
                r = compare(p->key.uid, q->key.uid);
        if (r == 0)
                r = compare(p->key.role, q->key.role);
        return r == 0 ? compare(p->key.kind, q->key.kind) : r;
}

static struct class *class_find(const struct sched *all, struct class *group, const struct sched_key *key)
{
        const struct class wanted = { .key = *key, .group = group };
        struct class *const *found = tfind(&wanted, &all->classes, compare_classes);

        return found ? *found : NULL;
}

static struct class *class_alloc(struct sched *all, struct class *group, const struct sched_key *key)
{
        struct class *p = calloc(1, sizeof(*p));

        if (!p)
                return NULL;
        p->key = *key;
        p->group = group;
        TAILQ_INIT(&p->ready);
        if (!tsearch(p, &all->classes, compare_classes)) {
                free(p);
                return NULL;
        }
        group->n_classes++;
        return p;
}

/* A class without members, or a group without classes; and its group, if it was the last. */
static void class_free(struct sched *all, struct class *p)
{
        struct class *group = p->group;

        if (p->is_fixed)
                return;
        if (p->is_group && p->owes_until_ns > all->left_owing_until_ns)
                all->left_owing_until_ns = p->owes_until_ns;
        tdelete(p, &all->classes, compare_classes);
        free(p);
        if (--group->n_classes == 0)
                class_free(all, group);
}

/* In *ret the group of a class with the key; it may be without classes. */
static int find_group(struct sched *all, const struct sched_key *key, struct class **ret)
{
        struct sched_key of_tenant = { .tenant = key->tenant, .kind = key->kind };
        struct class *above = key->kind == SCHED_HELLO ? &all->hellos : &all->root;

        if (key->kind != SCHED_HELLO && !key->tenant) {
                *ret = key->kind == SCHED_PENDING && key->role != ROLE_ADMIN ? &all->unauthenticated
                                                                             : &all->root;
                return 0;
        }
        *ret = class_find(all, above, &of_tenant);
        if (*ret)
                return 0;
        *ret = class_alloc(all, above, &of_tenant);
        if (!*ret)
                return -ENOMEM;
        group_init(*ret, above);
        (*ret)->owes_until_ns = above == &all->root ? all->left_owing_until_ns : 0;
        return 0;
}

/* The class with the key; it may be without members. NULL: no memory. */
static struct class *class_get(struct sched *all, const struct sched_key *key)
{
        struct class *group, *p;

        if (find_group(all, key, &group) < 0)
                return NULL;
        p = class_find(all, group, key);
        if (!p)
                p = class_alloc(all, group, key);
        if (!p && group->n_classes == 0)
                class_free(all, group);
        return p;
}

int sched_join(struct sched *all, struct sched_member *m, const struct sched_key *key)
{
        struct class *p = class_get(all, key);
        bool was_ready = m->is_ready;

        if (!p)
                return -ENOMEM;
        if (p == m->class)
                return 0;
        p->n_members++;
        sched_leave(all, m);
        m->class = p;
        if (was_ready)
                sched_ready(m);
        return 0;
}

void sched_leave(struct sched *all, struct sched_member *m)
{
        struct class *p = m->class;

        if (!p)
                return;
        sched_idle(m);
        m->class = NULL;
        if (--p->n_members > 0)
                return;
        class_free(all, p);
}

void sched_ready(struct sched_member *m)
{
        struct class *p = m->class;

        if (m->is_ready)
                return;
        m->is_ready = true;
        if (TAILQ_EMPTY(&p->ready))
                class_set_due(p);
        TAILQ_INSERT_TAIL(&p->ready, m, link);
}

void sched_idle(struct sched_member *m)
{
        struct class *p = m->class;

        if (!m->is_ready)
                return;
        m->is_ready = false;
        TAILQ_REMOVE(&p->ready, m, link);
        if (TAILQ_EMPTY(&p->ready))
                class_unset_due(p);
}

static void move_to_tail(struct class *p)
{
        TAILQ_REMOVE(&p->group->due, p, of_due);
        TAILQ_INSERT_TAIL(&p->group->due, p, of_due);
}

/* The first without debt among the first few, or else the one of them whose debt ends first. */
static struct class *find_due(const struct sched *all, bool owing)
{
        struct class *p = TAILQ_FIRST(&all->root.due), *soonest = p;

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
        move_to_tail(p);
        while (p->is_group) {
                p = TAILQ_FIRST(&p->due);
                move_to_tail(p);
        }
        m = TAILQ_FIRST(&p->ready);
        sched_idle(m);
        return m;
}

void sched_owe(struct sched_member *m, uint64_t now_ns, uint64_t n_ns)
{
        struct class *p = m->class;
        uint64_t max_ns = now_ns + SCHED_DEBT_MAX_NS;

        while (p->group->group)
                p = p->group;
        if (p->owes_until_ns < now_ns)
                p->owes_until_ns = now_ns;
        p->owes_until_ns = n_ns < max_ns - p->owes_until_ns ? p->owes_until_ns + n_ns : max_ns;
}

void sched_run(struct sched *all, uint64_t now_ns, uint64_t slice_ns)
{
        uint64_t end_ns = now_ns + slice_ns;
        struct sched_member *m = sched_next(all, now_ns, true);

        while (m) {
                m->turn(m);
                now_ns = clock_ns();
                m = now_ns < end_ns ? sched_next(all, now_ns, false) : NULL;
        }
}
