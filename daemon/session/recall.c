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
        if (!r->has_deadline)
                return;
        TAILQ_REMOVE(&r->session->broker->recalls.lists[r->kind], r, of_broker);
        r->has_deadline = false;
        if (r->session->recall.n_overdue++ == 0)
                r->session->tenant->n_unresponsive++;
}

void recall_end(struct recall *r)
{
        recall_clear_deadline(r);
        if (--r->session->recall.n_overdue == 0)
                r->session->tenant->n_unresponsive--;
        TAILQ_REMOVE(&queue_of(r)->open, r, of_session);
        r->session = NULL;
        r->sequence = 0;
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
        bool unsent = false;

        TAILQ_FOREACH(r, &queue->open, of_session)
        {
                if (r->session != s || s->state != SESSION_LIVE)
                        return "an ended session has an open recall";
                if (r->sequence != 0 && (unsent || r->sequence <= last))
                        return "a session's recalls are not in sequence";
                last = r->sequence;
                unsent = r->sequence == 0;
        }
        return NULL;
}

static bool overdue_is_counted(const struct session *s)
{
        const struct recall *r;
        unsigned n = 0;

        for (size_t i = 0; i < RECALL_KINDS; i++)
                TAILQ_FOREACH(r, &s->recall.queues[i].open, of_session)
        n += !r->has_deadline;
        return n == s->recall.n_overdue;
}

static const char *check_overdue(const struct broker *b)
{
        size_t n = 0;

        for (size_t i = 0; i < b->sessions.n_slots; i++) {
                const struct session *s = b->sessions.table[i];

                if (s && !overdue_is_counted(s))
                        return "a session's count of overdue recalls is wrong";
                n += s && s->recall.n_overdue > 0;
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
