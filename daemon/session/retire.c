/* Retirement; see retire.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/retire.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>

#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/session/session.h"
#include "daemon/session/recall.h"

struct retirement {
        struct recall recall;
        uint64_t after_sequence; /* of the Extents that must be acknowledged before */
        size_t n_exports;
        uint32_t exports[RETIRE_MAX_EXTENTS]; /* in the ledger */
};

static struct recall_queue *retire_queue(struct session *s)
{
        return &s->recall.queues[RECALL_RETIRE];
}

void retire_begin(struct session *s)
{
        s->recall.ignores_retires = !session_has_events(s);
}

static struct arena *extent_arena(const struct session *s, uint32_t extent)
{
        return session_share_of(s, ledger_extent_at(s->broker->ledger, extent)->quota)->quota->arena;
}

static uint32_t export_extent(const struct session *s, uint32_t export)
{
        return ledger_export_at(s->broker->ledger, export)->extent;
}

static void mark_late(const struct session *s, uint32_t export)
{
        uint32_t extent = export_extent(s, export);

        arena_note_late_export(extent_arena(s, extent), extent);
}

void retire_clear_export(struct session *s, uint32_t export)
{
        uint32_t extent = export_extent(s, export);
        struct arena *arena = extent_arena(s, extent);

        ledger_export_clear(s->broker->ledger, export);
        arena_note_export_gone(arena, extent, s->recall.ignores_retires);
}

static void retirement_free(struct retirement *r)
{
        recall_end(&r->recall);
        free(r);
}

/* ---- telling ------------------------------------------------------------- */

/* A retirement of the session that has room for one more export. */
static struct retirement *retirement_for(struct session *s, uint64_t now_ms)
{
        struct retirement *r = (struct retirement *)TAILQ_LAST(&retire_queue(s)->open, recall_list);

        if (r && r->recall.sequence == 0 && r->n_exports < RETIRE_MAX_EXTENTS &&
            r->recall.since_ms == now_ms && r->after_sequence == s->delivery.sequence)
                return r;
        r = calloc(1, sizeof(*r));
        if (!r)
                return NULL;
        r->after_sequence = s->delivery.sequence;
        recall_begin(&r->recall, RECALL_RETIRE, s, now_ms);
        if (session_has_events(s) && s->recall.ignores_retires) /* it is late already */
                recall_clear_deadline(&r->recall);
        return r;
}

/* False: out of memory. */
static bool retire_export(struct session *s, uint32_t export, uint64_t now_ms)
{
        struct retirement *r = retirement_for(s, now_ms);

        if (r)
                r->exports[r->n_exports++] = export;
        else
                s->ops->abort(s->userdata, "out of memory");
        return r != NULL;
}

static void retirement_send(struct retirement *r)
{
        struct session *s = r->recall.session;
        Bfcd__Event event = BFCD__EVENT__INIT;
        Bfcd__Retire message = BFCD__RETIRE__INIT;
        uint64_t ids[RETIRE_MAX_EXTENTS];

        for (size_t i = 0; i < r->n_exports; i++)
                ids[i] = ledger_extent_at(s->broker->ledger, export_extent(s, r->exports[i]))->id;
        event.sequence = recall_number(&r->recall);
        message.n_extent_ids = r->n_exports;
        message.extent_ids = ids;
        event.body_case = BFCD__EVENT__BODY_RETIRE;
        event.retire = &message;
        s->ops->send_event(s->userdata, &event);
}

void retire_flush(struct session *s)
{
        struct recall_queue *queue = retire_queue(s);
        struct recall *each;
        unsigned n_sent = 0;

        if (!session_has_events(s))
                return;
        TAILQ_FOREACH(each, &queue->open, of_session)
        {
                struct retirement *r = (struct retirement *)each;

                if (++n_sent > RETIRE_MAX_OPEN)
                        return;
                if (each->sequence != 0)
                        continue;
                if (r->after_sequence > s->delivery.acked_sequence)
                        return;
                retirement_send(r);
        }
}

void retire_begin_resumed(struct session *s)
{
        struct ledger *l = s->broker->ledger;
        uint32_t x = ledger_session_at(l, s->index)->links.first_export;
        uint64_t now_ms = clock_ms();

        for (; x != LEDGER_NONE; x = ledger_export_at(l, x)->links.next_of_session)
                if (arena_extent_is_retired(extent_arena(s, export_extent(s, x)), export_extent(s, x)) &&
                    !retire_export(s, x, now_ms))
                        return;
        if (TAILQ_EMPTY(&retire_queue(s)->open))
                s->recall.ignores_retires = !session_has_events(s);
        retire_flush(s);
}

/* NULL: it was left aside, and never unmaps anything. */
static struct session *session_of_export(const struct broker *b, uint32_t x)
{
        return b->sessions.table[ledger_export_at(b->ledger, x)->session];
}

void retire_extents(struct broker *b, const uint32_t *extents, size_t n_extents)
{
        uint64_t now_ms = clock_ms();

        for (size_t i = 0; i < n_extents; i++) {
                uint32_t x = ledger_extent_at(b->ledger, extents[i])->links.first_export;

                for (; x != LEDGER_NONE; x = ledger_export_at(b->ledger, x)->links.next_of_extent) {
                        struct session *s = session_of_export(b, x);

                        if (!s)
                                continue;
                        if (s->recall.ignores_retires)
                                mark_late(s, x);
                        if (s->state != SESSION_LIVE || retire_export(s, x, now_ms))
                                continue; /* exports of a session that is not LIVE end with it */
                        if (!s->recall.ignores_retires)
                                mark_late(s, x);
                        retire_silence(s);
                }
        }
        for (size_t i = 0; i < n_extents; i++) {
                uint32_t x = ledger_extent_at(b->ledger, extents[i])->links.first_export;

                for (; x != LEDGER_NONE; x = ledger_export_at(b->ledger, x)->links.next_of_extent)
                        if (session_of_export(b, x))
                                retire_flush(session_of_export(b, x));
        }
}

bool retire_unmaps_soon(const struct broker *b, uint32_t extent)
{
        uint32_t x = ledger_extent_at(b->ledger, extent)->links.first_export;

        for (; x != LEDGER_NONE; x = ledger_export_at(b->ledger, x)->links.next_of_extent)
                if (!session_of_export(b, x) || session_of_export(b, x)->recall.ignores_retires)
                        return false;
        return true;
}

/* ---- answers and missed deadlines ---------------------------------------- */

void retire_answer(struct recall *recall)
{
        struct retirement *r = (struct retirement *)recall;
        struct session *s = recall->session;

        for (size_t i = 0; i < r->n_exports; i++)
                retire_clear_export(s, r->exports[i]);
        retirement_free(r);
        if (TAILQ_EMPTY(&retire_queue(s)->open))
                s->recall.ignores_retires = false; /* the next retirement has a deadline again */
        retire_flush(s);
}

void retire_silence(struct session *s)
{
        struct recall *each;

        if (s->recall.ignores_retires)
                return;
        s->recall.ignores_retires = true;
        TAILQ_FOREACH(each, &retire_queue(s)->open, of_session)
        {
                const struct retirement *r = (const struct retirement *)each;

                recall_clear_deadline(each);
                for (size_t i = 0; i < r->n_exports; i++)
                        mark_late(s, r->exports[i]);
        }
}

void retire_end(struct session *s)
{
        struct recall *r;

        while ((r = TAILQ_FIRST(&retire_queue(s)->open)))
                retirement_free((struct retirement *)r);
}

void retire_miss(struct recall *r)
{
        struct session *s = r->session;

        if (!session_has_events(s)) {
                retire_end(s);
                s->ops->abort(s->userdata,
                              "timeout: without an events socket the client cannot unmap memory");
                return;
        }
        log_limited(&s->tenant->late_log, LOG_LEVEL_WARNING,
                    "session %" PRIu64 " (uid %u, pid %d): the client did not unmap memory within 5 s; "
                    "this memory stays charged to tenant '%s' until it does",
                    s->id, (unsigned)s->who.uid, (int)s->who.pid, s->tenant->name);
        retire_silence(s);
}

/* ---- the check ----------------------------------------------------------- */

static const char *check_retirement(const struct session *s, const struct retirement *r)
{
        if (r->recall.has_deadline == (session_has_events(s) && s->recall.ignores_retires))
                return "a Retire's deadline does not match its late state";
        if (r->n_exports == 0)
                return "a Retire has no exports";
        for (size_t i = 0; i < r->n_exports; i++)
                if (ledger_export_at(s->broker->ledger, r->exports[i])->session != s->index)
                        return "a Retire contains another session's export";
        return NULL;
}

static const char *check_session(const struct session *s)
{
        const struct recall_queue *queue = &s->recall.queues[RECALL_RETIRE];
        const struct recall *r;
        const char *why = NULL;
        unsigned n_sent = 0;

        TAILQ_FOREACH(r, &queue->open, of_session)
        {
                n_sent += r->sequence != 0;
                if (!why)
                        why = check_retirement(s, (const struct retirement *)r);
        }
        return n_sent > RETIRE_MAX_OPEN ? "a session has too many open Retires" : why;
}

int retire_check(const struct broker *b, const char **ret_why)
{
        const char *why = recall_check(b, RECALL_RETIRE);

        for (size_t i = 0; !why && i < b->sessions.n_slots; i++)
                why = b->sessions.table[i] ? check_session(b->sessions.table[i]) : NULL;
        if (why)
                *ret_why = why;
        return why ? -EBADMSG : 0;
}
