/* Parties; see party.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/party.h"

#include <errno.h>
#include <stdlib.h>

void parties_init(struct parties *all)
{
        TAILQ_INIT(&all->all);
        TAILQ_INIT(&all->due);
        TAILQ_INIT(&all->strangers_due);
        all->strangers = (struct party){ .n_members = 0 };
}

static bool is_stranger(const struct party *p)
{
        return !p->key.tenant && !p->key.admin;
}

static void party_set_due(struct parties *all, struct party *p)
{
        if (!is_stranger(p)) {
                TAILQ_INSERT_TAIL(&all->due, p, of_due);
                return;
        }
        if (TAILQ_EMPTY(&all->strangers_due))
                TAILQ_INSERT_TAIL(&all->due, &all->strangers, of_due);
        TAILQ_INSERT_TAIL(&all->strangers_due, p, of_due);
}

static void party_unset_due(struct parties *all, struct party *p)
{
        if (!is_stranger(p)) {
                TAILQ_REMOVE(&all->due, p, of_due);
                return;
        }
        TAILQ_REMOVE(&all->strangers_due, p, of_due);
        if (TAILQ_EMPTY(&all->strangers_due))
                TAILQ_REMOVE(&all->due, &all->strangers, of_due);
}

static bool is_key(const struct party *p, const struct party_key *key)
{
        return p->key.tenant == key->tenant && p->key.uid == key->uid && p->key.admin == key->admin &&
               p->key.kind == key->kind;
}

/* There are as many as tenants, and as users among the newcomers: few. */
static struct party *party_find(const struct parties *all, const struct party_key *key)
{
        struct party *p;

        TAILQ_FOREACH(p, &all->all, of_all)
        if (is_key(p, key))
                return p;
        return NULL;
}

static struct party *party_new(struct parties *all, const struct party_key *key)
{
        struct party *p = calloc(1, sizeof(*p));

        if (!p)
                return NULL;
        p->key = *key;
        TAILQ_INIT(&p->ready);
        TAILQ_INSERT_TAIL(&all->all, p, of_all);
        return p;
}

int party_join(struct parties *all, struct party_member *m, const struct party_key *key)
{
        struct party *p = party_find(all, key);
        bool was_ready = m->is_ready;

        if (p && p == m->party)
                return 0;
        if (!p)
                p = party_new(all, key);
        if (!p)
                return -ENOMEM;
        p->n_members++;
        party_leave(all, m);
        m->party = p;
        if (was_ready)
                party_ready(all, m);
        return 0;
}

void party_leave(struct parties *all, struct party_member *m)
{
        struct party *p = m->party;

        if (!p)
                return;
        party_rest(all, m);
        m->party = NULL;
        if (--p->n_members > 0)
                return;
        TAILQ_REMOVE(&all->all, p, of_all);
        free(p);
}

void party_ready(struct parties *all, struct party_member *m)
{
        struct party *p = m->party;

        if (m->is_ready)
                return;
        m->is_ready = true;
        if (TAILQ_EMPTY(&p->ready))
                party_set_due(all, p);
        TAILQ_INSERT_TAIL(&p->ready, m, link);
}

void party_rest(struct parties *all, struct party_member *m)
{
        struct party *p = m->party;

        if (!m->is_ready)
                return;
        m->is_ready = false;
        TAILQ_REMOVE(&p->ready, m, link);
        if (TAILQ_EMPTY(&p->ready))
                party_unset_due(all, p);
}

static void move_to_tail(struct party_list *list, struct party *p)
{
        TAILQ_REMOVE(list, p, of_due);
        TAILQ_INSERT_TAIL(list, p, of_due);
}

struct party_member *party_next(struct parties *all)
{
        struct party *p = TAILQ_FIRST(&all->due);
        struct party_member *m;

        if (!p)
                return NULL;
        move_to_tail(&all->due, p);
        if (p == &all->strangers) {
                p = TAILQ_FIRST(&all->strangers_due);
                move_to_tail(&all->strangers_due, p);
        }
        m = TAILQ_FIRST(&p->ready);
        party_rest(all, m);
        return m;
}
