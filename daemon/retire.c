/* Retirement; see retire.h.
 *
 * A retirement is what one event tells one session. All of them have the same
 * time-out, so the broker's list of them is in the order of their deadlines.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/retire.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

#include "daemon/clock.h"
#include "daemon/session.h"

struct retirement {
        struct session *session;
        uint64_t sequence;       /* of the event; 0: not sent yet */
        uint64_t after_sequence; /* of the Extents that are to be acknowledged before */
        uint64_t since_ms;
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

static void retirement_free(struct retirement *r)
{
        struct session *s = r->session;

        if (r->sequence != 0)
                s->retire.n_open--;
        TAILQ_REMOVE(&s->retire.open, r, of_session);
        TAILQ_REMOVE(&s->broker->retirements, r, of_broker);
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

        if (s->retire.silent)
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

void retire_extents(struct broker *b, const uint32_t *extents, size_t n_extents)
{
        uint64_t now_ms = clock_ms();
        struct retirement *r;

        for (size_t i = 0; i < n_extents; i++) {
                uint32_t x = ledger_extent_at(b->ledger, extents[i])->links.first_export;

                while (x != LEDGER_NONE) {
                        const struct ledger_export *export = ledger_export_at(b->ledger, x);

                        retire_export(b->sessions[export->session], x, now_ms);
                        x = export->links.next_of_extent;
                }
        }
        TAILQ_FOREACH_REVERSE(r, &b->retirements, retirement_list, of_broker)
        {
                if (r->since_ms != now_ms)
                        break;
                if (r->sequence == 0)
                        retire_flush(r->session);
        }
}

/* ---- answers, and none --------------------------------------------------- */

int retire_confirm(struct session *s, uint64_t sequence, const char **ret_why)
{
        struct retirement *r;

        TAILQ_FOREACH(r, &s->retire.open, of_session)
        if (r->sequence == sequence)
                break;
        if (!r || sequence == 0) {
                *ret_why = "it confirmed a Retire that was not sent, or confirmed before";
                return -EPROTO;
        }
        for (size_t i = 0; i < r->n_exports; i++)
                retire_clear_export(s, r->exports[i]);
        retirement_free(r);
        retire_flush(s);
        return 0;
}

void retire_silence(struct session *s)
{
        const struct retirement *r;

        if (s->retire.silent)
                return;
        s->retire.silent = true;
        TAILQ_FOREACH(r, &s->retire.open, of_session)
        for (size_t i = 0; i < r->n_exports; i++) {
                uint32_t extent = export_extent(s, r->exports[i]);

                arena_export_is_late(extent_arena(s, extent), extent);
        }
}

void retire_end(struct session *s)
{
        struct retirement *r;

        while ((r = TAILQ_FIRST(&s->retire.open)))
                retirement_free(r);
}

void retire_tick(struct broker *b, uint64_t now_ms)
{
        struct retirement *r;

        while ((r = TAILQ_FIRST(&b->retirements)) && now_ms - r->since_ms >= b->config->release_timeout_ms) {
                struct session *s = r->session;

                retire_silence(s);
                retire_end(s);
                s->ops->abort(s->userdata, s->has_events
                                                   ? "it did not let go of memory within timeouts.release"
                                                   : "it takes no events, so it cannot let go of memory");
        }
}

/* ---- the check ----------------------------------------------------------- */

static const char *check_retirement(const struct retirement *r)
{
        struct ledger *ledger = r->session->broker->ledger;

        if (r->session->state != SESSION_LIVE)
                return "a session that is over is to confirm a Retire";
        if (r->n_exports == 0)
                return "a Retire is about nothing";
        for (size_t i = 0; i < r->n_exports; i++) {
                const struct ledger_export *x = ledger_export_at(ledger, r->exports[i]);

                if (x->session != r->session->index)
                        return "a session is to let go of what another one has";
        }
        return NULL;
}

static const char *check_session(const struct session *s)
{
        const struct retirement *r;
        uint64_t last = 0;
        unsigned n_open = 0;
        bool unsent = false;

        TAILQ_FOREACH(r, &s->retire.open, of_session)
        {
                if (r->sequence != 0 && (unsent || r->sequence <= last))
                        return "a session's Retires are not in order";
                last = r->sequence;
                unsent = r->sequence == 0;
                n_open += !unsent;
        }
        if (n_open != s->retire.n_open || n_open > RETIRE_MAX_OPEN)
                return "a session has not as many open Retires as it says";
        return NULL;
}

int retire_check(const struct broker *b, const char **ret_why)
{
        const struct retirement *r;
        uint64_t since_ms = 0;
        const char *why = NULL;

        TAILQ_FOREACH(r, &b->retirements, of_broker)
        {
                why = r->since_ms < since_ms ? "deadlines are not in order" : check_retirement(r);
                if (!why)
                        why = check_session(r->session);
                if (why) {
                        *ret_why = why;
                        return -EBADMSG;
                }
                since_ms = r->since_ms;
        }
        return 0;
}
