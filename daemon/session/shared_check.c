/* The check of shared blocks; see shared.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <search.h>
#include <string.h>

#include "daemon/base/list.h"
#include "daemon/session/session.h"
#include "daemon/session/shared_internal.h"
#include "daemon/session/refs.h"
#include "daemon/session/shared.h"

struct check {
        const struct broker *broker;
        const char *why;
        size_t n_shared, n_waits, n_due, n_kept, n_idle;
};

static const char *check_shared(struct ledger *l, const struct shared_name *name)
{
        const struct ledger_shared *shared = ledger_shared_get(l, name->shared);
        const struct ledger_block *block;

        if (!shared || strcmp(shared->name, name->name) != 0)
                return "a name does not match its shared block";
        block = ledger_block_at(l, shared->block);
        if (strcmp(ledger_quota_at(l, block->quota)->tenant, name->tenant) != 0)
                return "a shared block and its name belong to different tenants";
        for (uint32_t i = shared->links.first_ref; i != LEDGER_NONE;) {
                const struct ledger_ref *h = ledger_ref_at(l, i);

                if (strcmp(ledger_session_at(l, h->session)->tenant, name->tenant) != 0)
                        return "a session has a shared block of another tenant";
                for (uint32_t k = h->links.next_of_shared; k != LEDGER_NONE;
                     k = ledger_ref_at(l, k)->links.next_of_shared)
                        if (ledger_ref_at(l, k)->session == h->session)
                                return "a session has two references to one shared block";
                i = h->links.next_of_shared;
        }
        return NULL;
}

/* The heap has a block exactly while it has no references, and keeps it only where that is allowed. */
static const char *check_kept(const struct broker *b, const struct shared_name *name)
{
        const struct ledger_shared *shared = ledger_shared_at(b->ledger, name->shared);

        if (!name->owner || strcmp(name->owner->name, name->tenant) != 0)
                return "a published name has another owner than its tenant";
        if ((name->idle_at > 0) != (shared->links.n_refs == 0))
                return "a kept block with references is in the heap, or one without is not";
        if (name->idle_at > 0 && b->shared.idle[name->idle_at - 1] != name)
                return "a kept block is not at its place in the heap";
        if (name->idle_at > 0 && shared->until_ms != 0 && !keep_allows(b, name))
                return "a block is kept where none may be";
        if ((shared->keep_ms > 0 || shared->metadata != LEDGER_NONE) && !name->is_counted)
                return "a kept block is not counted";
        return NULL;
}

static const char *check_heap(const struct broker *b)
{
        for (size_t i = 1; i < b->shared.n_idle; i++)
                if (ledger_shared_at(b->ledger, b->shared.idle[i]->shared)->until_ms <
                    ledger_shared_at(b->ledger, b->shared.idle[(i - 1) / 2]->shared)->until_ms)
                        return "the heap of kept blocks is not in order";
        return NULL;
}

/* The tenants' counts and the broker's. */
static const char *check_counts(const struct broker *b, size_t n_kept, size_t n_idle)
{
        size_t n = 0;

        for (size_t i = 0; i < b->n_tenants; i++)
                n += b->tenants[i].n_kept;
        if (n != n_kept || n_kept != b->shared.n_kept || n_idle != b->shared.n_idle)
                return "a count of kept blocks is wrong";
        if (b->shared.n_idle > b->shared.n_idle_room || (n_kept > 0 && n_kept > b->shared.n_idle_room))
                return "the heap has no room for all kept blocks";
        return check_heap(b);
}

static void check_name(const void *node, VISIT visit, void *userdata)
{
        const struct shared_name *name = *(struct shared_name *const *)node;
        struct check *c = userdata;
        const struct shared_wait *w;

        if ((visit != postorder && visit != leaf) || c->why)
                return;
        if (name->shared == LEDGER_NONE && TAILQ_EMPTY(&name->waits))
                c->why = "a name has neither a shared block nor a waiting attach";
        if (LIST_HAS(name, of_due) != (name->shared != LEDGER_NONE && !TAILQ_EMPTY(&name->waits)))
                c->why = "a name's due state does not match its requests";
        TAILQ_FOREACH(w, &name->waits, of_name)
        {
                if (w->name != name || !session_is_live(w->session))
                        c->why = "a session waits that cannot wait";
                c->n_waits++;
        }
        c->n_due += LIST_HAS(name, of_due);
        c->n_shared += name->shared != LEDGER_NONE;
        c->n_kept += name->is_counted;
        c->n_idle += name->idle_at > 0;
        if (!c->why && name->shared != LEDGER_NONE)
                c->why = check_shared(c->broker->ledger, name);
        if (!c->why && name->shared != LEDGER_NONE)
                c->why = check_kept(c->broker, name);
}

/* The ledger's list of a session's references and the session's own agree. */
static const char *check_refs(const struct session *s)
{
        struct ledger *l = s->broker->ledger;
        uint32_t i = s->index == LEDGER_NONE ? LEDGER_NONE : ledger_session_at(l, s->index)->links.first_ref;
        size_t n = 0;

        for (; i != LEDGER_NONE; i = ledger_ref_at(l, i)->links.next_of_session, n++)
                if (refs_find(&s->shared.refs, ledger_ref_at(l, i)->shared) != i)
                        return "a session's reference is not in its index";
        return n == s->shared.refs.n ? NULL
                                     : "a session's index has a reference that the session does not have";
}

static const char *check_session(const struct session *s, size_t *n_waits)
{
        const struct shared_wait *w;
        const char *why = check_refs(s);
        size_t n = 0;

        TAILQ_FOREACH(w, &s->shared.waits, of_session)
        n++;
        *n_waits += n;
        if (!why && (n > SHARED_MAX_WAITS || n > s->requests.n))
                why = "a session has too many waits";
        return why;
}

int shared_check(const struct broker *b, const char **ret_why)
{
        struct check c = { .broker = b };
        const struct shared_name *name;
        struct ledger_counts counts;
        size_t n_of_sessions = 0;

        twalk_r(b->shared.tree, check_name, &c);
        TAILQ_FOREACH(name, &b->shared.due, of_due)
        c.n_due--;
        ledger_count(b->ledger, &counts);
        if (!c.why && c.n_shared != counts.n_shared)
                c.why = "the number of names does not match the number of shared blocks";
        if (!c.why)
                c.why = check_counts(b, c.n_kept, c.n_idle);
        if (!c.why && c.n_due != 0)
                c.why = "not all names that are due are in the list";
        for (size_t i = 0; !c.why && i < b->sessions.n_slots; i++) {
                if (b->sessions.table[i])
                        c.why = check_session(b->sessions.table[i], &n_of_sessions);
        }
        if (!c.why && (c.n_waits != b->shared.n_waits || n_of_sessions != c.n_waits))
                c.why = "the total count of waits is wrong";
        if (!c.why)
                return 0;
        *ret_why = c.why;
        return -EBADMSG;
}
