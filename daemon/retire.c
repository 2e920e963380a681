/* Retirement; see retire.h.
 *
 * A retirement is what one event tells one session. All of them have the same
 * time-out, so the broker's list of those that are not late is in the order of
 * their deadlines.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/retire.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>

#include "daemon/clock.h"
#include "daemon/log.h"
#include "daemon/session.h"

struct retirement {
        struct session *session;
        uint64_t sequence;       /* of the event; 0: not sent yet */
        uint64_t after_sequence; /* of the Extents that are to be acknowledged before */
        uint64_t since_ms;
        bool has_deadline; /* it is in the broker's list */
        TAILQ_ENTRY(retirement) of_session, of_broker;
        size_t n_exports;
        uint32_t exports[RETIRE_MAX_EXTENTS]; /* in the ledger */
};

void retire_init(struct retire *r)
{
        TAILQ_INIT(&r->open);
        r->silent = true;
}

void retire_begin(struct session *s, bool has_events)
{
        s->has_events = has_events;
        s->retire.silent = !has_events;
}

static struct arena *extent_arena(const struct session *s, uint32_t extent)
{
        uint32_t quota = ledger_extent_at(s->broker->ledger, extent)->quota;
        size_t i = 0;

        while (s->shares[i].quota->index != quota)
                i++;
        return s->shares[i].quota->arena;
}

static uint32_t export_extent(const struct session *s, uint32_t export)
{
        return ledger_export_at(s->broker->ledger, export)->extent;
}

void retire_clear_export(struct session *s, uint32_t export)
{
        uint32_t extent = export_extent(s, export);
        struct arena *arena = extent_arena(s, extent);

        ledger_export_clear(s->broker->ledger, export);
        arena_export_is_gone(arena, extent, s->retire.silent);
}

static void retirement_clear_deadline(struct retirement *r)
{
        if (r->has_deadline)
                TAILQ_REMOVE(&r->session->broker->retirements, r, of_broker);
        r->has_deadline = false;
}

static void retirement_free(struct retirement *r)
{
        struct session *s = r->session;

        if (r->sequence != 0)
                s->retire.n_open--;
        TAILQ_REMOVE(&s->retire.open, r, of_session);
        retirement_clear_deadline(r);
        free(r);
}

/* ---- telling ------------------------------------------------------------- */

/* The session's retirement for one more export, asked for now. */
static struct retirement *retirement_for(struct session *s, uint64_t now_ms)
{
        struct retirement *r = TAILQ_LAST(&s->retire.open, retirement_list);

        if (r && r->sequence == 0 && r->n_exports < RETIRE_MAX_EXTENTS && r->since_ms == now_ms &&
            r->after_sequence == s->sequence)
                return r;
        r = calloc(1, sizeof(*r));
        if (!r)
                return NULL;
        r->session = s;
        r->after_sequence = s->sequence;
        r->since_ms = now_ms;
        TAILQ_INSERT_TAIL(&s->retire.open, r, of_session);
        r->has_deadline = !s->has_events || !s->retire.silent; /* who is late is so already */
        if (r->has_deadline)
                TAILQ_INSERT_TAIL(&s->broker->retirements, r, of_broker);
        return r;
}

static void retire_export(struct session *s, uint32_t export, uint64_t now_ms)
{
        uint32_t extent = export_extent(s, export);
        struct retirement *r;

        if (s->retire.silent)
                arena_export_is_late(extent_arena(s, extent), extent);
        if (s->state != SESSION_LIVE)
                return; /* its exports go with it */
        r = retirement_for(s, now_ms);
        if (r) {
                r->exports[r->n_exports++] = export;
                return;
        }
        if (!s->retire.silent)
                arena_export_is_late(extent_arena(s, extent), extent);
        retire_silence(s);
        s->ops->abort(s->userdata, "out of memory");
}

static void retirement_send(struct retirement *r)
{
        struct session *s = r->session;
        Bfcd__Event event = BFCD__EVENT__INIT;
        Bfcd__Retire message = BFCD__RETIRE__INIT;
        uint64_t ids[RETIRE_MAX_EXTENTS];

        for (size_t i = 0; i < r->n_exports; i++)
                ids[i] = ledger_extent_at(s->broker->ledger, export_extent(s, r->exports[i]))->id;
        r->sequence = ++s->retire.sequence;
        s->retire.n_open++;
        message.sequence = r->sequence;
        message.n_extent_ids = r->n_exports;
        message.extent_ids = ids;
        event.body_case = BFCD__EVENT__BODY_RETIRE;
        event.retire = &message;
        s->ops->send_event(s->userdata, &event);
}

void retire_flush(struct session *s)
{
        struct retirement *r;

        if (!s->has_events)
                return;
        TAILQ_FOREACH(r, &s->retire.open, of_session)
        {
                if (r->sequence != 0)
                        continue;
                if (s->retire.n_open == RETIRE_MAX_OPEN || r->after_sequence > s->acked_sequence)
                        return;
                retirement_send(r);
        }
}

void retire_begin_late(struct session *s, bool has_events)
{
        struct ledger *l = s->broker->ledger;
        uint32_t x = ledger_session_at(l, s->index)->links.first_export;
        uint64_t now_ms = clock_ms();

        s->has_events = has_events;
        for (; x != LEDGER_NONE; x = ledger_export_at(l, x)->links.next_of_session) {
                struct retirement *r;

                if (!arena_extent_is_retired(extent_arena(s, export_extent(s, x)), export_extent(s, x)))
                        continue;
                r = retirement_for(s, now_ms);
                if (!r) {
                        s->ops->abort(s->userdata, "out of memory");
                        return;
                }
                r->exports[r->n_exports++] = x;
        }
        if (TAILQ_EMPTY(&s->retire.open))
                s->retire.silent = !has_events;
        retire_flush(s);
}

void retire_extents(struct broker *b, const uint32_t *extents, size_t n_extents)
{
        uint64_t now_ms = clock_ms();

        for (size_t i = 0; i < n_extents; i++) {
                uint32_t x = ledger_extent_at(b->ledger, extents[i])->links.first_export;

                for (; x != LEDGER_NONE; x = ledger_export_at(b->ledger, x)->links.next_of_extent)
                        retire_export(b->sessions[ledger_export_at(b->ledger, x)->session], x, now_ms);
        }
        for (size_t i = 0; i < n_extents; i++) {
                uint32_t x = ledger_extent_at(b->ledger, extents[i])->links.first_export;

                for (; x != LEDGER_NONE; x = ledger_export_at(b->ledger, x)->links.next_of_extent)
                        retire_flush(b->sessions[ledger_export_at(b->ledger, x)->session]);
        }
}

bool retire_lets_go(const struct broker *b, uint32_t extent)
{
        uint32_t x = ledger_extent_at(b->ledger, extent)->links.first_export;

        for (; x != LEDGER_NONE; x = ledger_export_at(b->ledger, x)->links.next_of_extent)
                if (b->sessions[ledger_export_at(b->ledger, x)->session]->retire.silent)
                        return false;
        return true;
}

/* ---- answers, and none --------------------------------------------------- */

int retire_confirm(struct session *s, uint64_t sequence, const char **ret_why)
{
        struct retirement *r;

        TAILQ_FOREACH(r, &s->retire.open, of_session)
        if (r->sequence == sequence)
                break;
        if (!r || sequence == 0) {
                *ret_why = "the client confirmed a Retire that was not sent or was already confirmed";
                return -EPROTO;
        }
        for (size_t i = 0; i < r->n_exports; i++)
                retire_clear_export(s, r->exports[i]);
        retirement_free(r);
        if (TAILQ_EMPTY(&s->retire.open))
                s->retire.silent = false; /* it has caught up: the next one has its own time */
        retire_flush(s);
        return 0;
}

void retire_silence(struct session *s)
{
        struct retirement *r;

        if (s->retire.silent)
                return;
        s->retire.silent = true;
        TAILQ_FOREACH(r, &s->retire.open, of_session)
        {
                retirement_clear_deadline(r);
                for (size_t i = 0; i < r->n_exports; i++) {
                        uint32_t extent = export_extent(s, r->exports[i]);

                        arena_export_is_late(extent_arena(s, extent), extent);
                }
        }
}

void retire_end(struct session *s)
{
        struct retirement *r;

        while ((r = TAILQ_FIRST(&s->retire.open)))
                retirement_free(r);
}

/* Busy or stuck: only the client's process knows when it unmaps the memory. */
static void retire_is_late(struct session *s)
{
        log_limited(&s->tenant->late_log, LOG_LEVEL_WARNING,
                    "session %" PRIu64 " (uid %u, pid %d): the client did not unmap memory within "
                    "timeouts.release; this memory stays charged to tenant '%s' until it does",
                    s->id, (unsigned)s->who.uid, (int)s->who.pid, s->tenant->name);
        retire_silence(s);
}

void retire_tick(struct broker *b, uint64_t now_ms)
{
        struct retirement *r;

        while ((r = TAILQ_FIRST(&b->retirements)) && now_ms - r->since_ms >= b->config->release_timeout_ms) {
                struct session *s = r->session;

                if (s->has_events) {
                        retire_is_late(s);
                } else {
                        retire_end(s);
                        s->ops->abort(s->userdata, "the client has no events socket, so it cannot be "
                                                   "told to unmap memory");
                }
        }
}

/* ---- the check ----------------------------------------------------------- */

static const char *check_retirement(const struct retirement *r)
{
        struct ledger *ledger = r->session->broker->ledger;

        if (r->session->state != SESSION_LIVE)
                return "an ended session has a Retire to confirm";
        if (r->n_exports == 0)
                return "a Retire has no exports";
        for (size_t i = 0; i < r->n_exports; i++) {
                const struct ledger_export *x = ledger_export_at(ledger, r->exports[i]);

                if (x->session != r->session->index)
                        return "a Retire contains another session's export";
        }
        return NULL;
}

static const char *check_session(const struct session *s)
{
        const struct retirement *r;
        const char *why = NULL;
        uint64_t last = 0;
        unsigned n_open = 0;
        bool unsent = false;

        TAILQ_FOREACH(r, &s->retire.open, of_session)
        {
                if (r->sequence != 0 && (unsent || r->sequence <= last))
                        return "a session's Retires are not in sequence";
                if (r->has_deadline == (s->has_events && s->retire.silent))
                        return "a Retire's deadline does not match its late state";
                why = check_retirement(r);
                if (why)
                        return why;
                last = r->sequence;
                unsent = r->sequence == 0;
                n_open += !unsent;
        }
        if (n_open != s->retire.n_open || n_open > RETIRE_MAX_OPEN)
                return "a session's count of open Retires is wrong";
        return NULL;
}

int retire_check(const struct broker *b, const char **ret_why)
{
        const struct retirement *r;
        uint64_t since_ms = 0;
        const char *why = NULL;

        TAILQ_FOREACH(r, &b->retirements, of_broker)
        {
                if (r->since_ms < since_ms || !r->has_deadline)
                        why = "deadlines are not in order";
                since_ms = r->since_ms;
        }
        for (uint32_t i = 0; !why && i < b->n_session_slots; i++)
                why = b->sessions[i] ? check_session(b->sessions[i]) : NULL;
        if (!why)
                return 0;
        *ret_why = why;
        return -EBADMSG;
}
