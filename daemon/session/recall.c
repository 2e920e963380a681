/* Recalls; see recall.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/recall.h"

#include "daemon/session/session.h"

static struct recall_queue *queue_of(const struct recall *r)
{
        return &r->session->recall.queues[r->kind];
}

void recall_init(struct recall_state *state)
{
        for (size_t i = 0; i < RECALL_KINDS; i++)
                TAILQ_INIT(&state->queues[i].open);
        state->ignores_retires = true;
}

void recall_begin(struct recall *r, enum recall_kind kind, struct session *s, uint64_t now_ms)
{
        *r = (struct recall){ .kind = kind, .session = s, .since_ms = now_ms, .has_deadline = true };
        TAILQ_INSERT_TAIL(&queue_of(r)->open, r, of_session);
        TAILQ_INSERT_TAIL(&s->broker->recalls.lists[kind], r, of_broker);
}

uint64_t recall_number(struct recall *r)
{
        queue_of(r)->n_events++;
        for (size_t i = 0; i < RECALL_KINDS; i++)
                r->sequence += r->session->recall.queues[i].n_events;
        return r->sequence;
}

void recall_clear_deadline(struct recall *r)
{
        struct session *s = r->session;

        if (!r->has_deadline)
                return;
        s->tenant->n_unresponsive += !recall_is_unresponsive(s);
        TAILQ_REMOVE(&s->broker->recalls.lists[r->kind], r, of_broker);
        r->has_deadline = false;
}

void recall_end(struct recall *r)
{
        struct session *s = r->session;
        bool was_unresponsive = recall_is_unresponsive(s);

        if (r->has_deadline)
                TAILQ_REMOVE(&s->broker->recalls.lists[r->kind], r, of_broker);
        r->has_deadline = false;
        TAILQ_REMOVE(&queue_of(r)->open, r, of_session);
        s->tenant->n_unresponsive -= was_unresponsive && !recall_is_unresponsive(s);
        r->session = NULL;
        r->sequence = 0;
}

bool recall_is_unresponsive(const struct session *s)
{
        for (size_t i = 0; i < RECALL_KINDS; i++) {
                const struct recall *first = TAILQ_FIRST(&s->recall.queues[i].open);

                if (first && !first->has_deadline)
                        return true;
        }
        return false;
}

struct recall *recall_find(struct session *s, uint64_t sequence)
{
        struct recall *r;

        for (size_t i = 0; sequence != 0 && i < RECALL_KINDS; i++)
                TAILQ_FOREACH(r, &s->recall.queues[i].open, of_session)
                {
                        if (r->sequence == sequence)
                                return r;
                }
        return NULL;
}

static const char *check_queue(const struct session *s, const struct recall_queue *queue)
{
        const struct recall *r;
        uint64_t last = 0;
        bool unsent = false, has_deadline = false;

        TAILQ_FOREACH(r, &queue->open, of_session)
        {
                if (r->session != s || s->state != SESSION_LIVE)
                        return "an ended session has an open recall";
                if (r->sequence != 0 && (unsent || r->sequence <= last))
                        return "a session's recalls are not in sequence";
                if (has_deadline && !r->has_deadline)
                        return "a session's overdue recalls are not the first ones";
                has_deadline = r->has_deadline;
                last = r->sequence;
                unsent = r->sequence == 0;
        }
        return NULL;
}

static const char *check_overdue(const struct broker *b)
{
        size_t n = 0;

        for (size_t i = 0; i < b->sessions.n_slots; i++) {
                const struct session *s = b->sessions.table[i];

                n += s && recall_is_unresponsive(s);
        }
        for (size_t i = 0; i < b->n_tenants; i++)
                n -= b->tenants[i].n_unresponsive;
        return n != 0 ? "the tenants' counts of unresponsive sessions are wrong" : NULL;
}

const char *recall_check(const struct broker *b, enum recall_kind kind)
{
        const struct recall *r;
        const char *why = NULL;
        uint64_t since_ms = 0;

        TAILQ_FOREACH(r, &b->recalls.lists[kind], of_broker)
        {
                if (r->kind != kind || !r->session || !r->has_deadline || r->since_ms < since_ms)
                        return "recalls are not in the order of their deadlines";
                since_ms = r->since_ms;
        }
        for (size_t i = 0; !why && i < b->sessions.n_slots; i++)
                why = b->sessions.table[i]
                              ? check_queue(b->sessions.table[i], &b->sessions.table[i]->recall.queues[kind])
                              : NULL;
        return why ? why : check_overdue(b);
}
