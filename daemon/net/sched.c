/* Scheduling classes; see sched.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/net/sched.h"

#include <errno.h>
#include <stdlib.h>

void sched_init(struct sched *all)
{
        TAILQ_INIT(&all->all);
        TAILQ_INIT(&all->due);
        TAILQ_INIT(&all->unauthenticated_due);
        all->unauthenticated = (struct class){ .n_members = 0 };
}

static bool is_unauthenticated(const struct class *p)
{
        return p->key.role == ROLE_CLIENT    ? !p->key.tenant
               : p->key.role == ROLE_MONITOR ? p->key.kind == SCHED_PENDING
                                             : false;
}

static void class_set_due(struct sched *all, struct class *p)
{
        if (!is_unauthenticated(p)) {
                TAILQ_INSERT_TAIL(&all->due, p, of_due);
                return;
        }
        if (TAILQ_EMPTY(&all->unauthenticated_due))
                TAILQ_INSERT_TAIL(&all->due, &all->unauthenticated, of_due);
        TAILQ_INSERT_TAIL(&all->unauthenticated_due, p, of_due);
}

static void class_unset_due(struct sched *all, struct class *p)
{
        if (!is_unauthenticated(p)) {
                TAILQ_REMOVE(&all->due, p, of_due);
                return;
        }
        TAILQ_REMOVE(&all->unauthenticated_due, p, of_due);
        if (TAILQ_EMPTY(&all->unauthenticated_due))
                TAILQ_REMOVE(&all->due, &all->unauthenticated, of_due);
}

static bool is_key(const struct class *p, const struct sched_key *key)
{
        return p->key.tenant == key->tenant && p->key.uid == key->uid && p->key.role == key->role &&
               p->key.kind == key->kind;
}

/* Few: one for each tenant, and for each user with unauthenticated connections. */
static struct class *class_find(const struct sched *all, const struct sched_key *key)
{
        struct class *p;

        TAILQ_FOREACH(p, &all->all, of_all)
        if (is_key(p, key))
                return p;
        return NULL;
}

static struct class *class_new(struct sched *all, const struct sched_key *key)
{
        struct class *p = calloc(1, sizeof(*p));

        if (!p)
                return NULL;
        p->key = *key;
        TAILQ_INIT(&p->ready);
        TAILQ_INSERT_TAIL(&all->all, p, of_all);
        return p;
}

int sched_join(struct sched *all, struct sched_member *m, const struct sched_key *key)
{
        struct class *p = class_find(all, key);
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
        TAILQ_REMOVE(&all->all, p, of_all);
        free(p);
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

struct sched_member *sched_next(struct sched *all)
{
        struct class *p = TAILQ_FIRST(&all->due);
        struct sched_member *m;

        if (!p)
                return NULL;
        move_to_tail(&all->due, p);
        if (p == &all->unauthenticated) {
                p = TAILQ_FIRST(&all->unauthenticated_due);
                move_to_tail(&all->unauthenticated_due, p);
        }
        m = TAILQ_FIRST(&p->ready);
        sched_idle(all, m);
        return m;
}
