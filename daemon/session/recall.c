/* Recalls; see recall.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/recall.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "daemon/base/list.h"
#include "daemon/base/log.h"
#include "daemon/base/number.h"
#include "daemon/memory/broker.h"
#include "daemon/memory/drain.h"
#include "daemon/session/explain.h"
#include "daemon/session/session.h"
#include "daemon/session/trim.h"

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

/* Opens a recall; its time-out begins now. */
static void recall_begin(struct recall *r, enum recall_kind kind, struct session *s, uint64_t now_ms)
{
        *r = (struct recall){ .kind = kind, .session = s, .since_ms = now_ms, .has_deadline = true };
        TAILQ_INSERT_TAIL(&queue_of(r)->open, r, of_session);
        TAILQ_INSERT_TAIL(&s->broker->recalls.lists[kind], r, of_broker);
}

/* Returns the sequence number for its event, which is to be sent now. */
static uint64_t recall_number(struct recall *r)
{
        queue_of(r)->n_events++;
        for (size_t i = 0; i < RECALL_KINDS; i++)
                r->sequence += r->session->recall.queues[i].n_events;
        return r->sequence;
}

static void recall_clear_deadline(struct recall *r)
{
        struct session *s = r->session;

        if (!r->has_deadline)
                return;
        s->tenant->n_unresponsive += !session_is_unresponsive(s);
        TAILQ_REMOVE(&s->broker->recalls.lists[r->kind], r, of_broker);
        r->has_deadline = false;
}

static void recall_end(struct recall *r)
{
        struct session *s = r->session;
        bool was_unresponsive = session_is_unresponsive(s);

        if (r->has_deadline)
                TAILQ_REMOVE(&s->broker->recalls.lists[r->kind], r, of_broker);
        r->has_deadline = false;
        TAILQ_REMOVE(&queue_of(r)->open, r, of_session);
        s->tenant->n_unresponsive -= was_unresponsive && !session_is_unresponsive(s);
        r->session = NULL;
        r->sequence = 0;
}

/* The open recall with this number, of any kind; NULL: there is none. */
static struct recall *recall_find(struct session *s, uint64_t sequence)
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

/* ---- retirement: telling ------------------------------------------------------------- */

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

/* retire_begin() for a resumed session that is LIVE. It was not asked to unmap extents that were retired
 * before, so it starts as unresponsive if there are any. */
static void retire_begin_resumed(struct session *s)
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

/* ---- retirement: answers and missed deadlines ---------------------------------------- */

static void retire_answer(struct recall *recall)
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

static void retire_miss(struct recall *r)
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

/* ---- whom to ask ------------------------------------------------------------ */

/* What a Pressure asks for. */
struct pressure_order {
        uint64_t n_bytes;
        bool parks, wakes, is_own;
        uint32_t idle_ms;
        size_t to; /* of the session's shares */
        const char *tag;
        bool is_command;
};

struct candidate {
        struct recall_share *share;
        uint64_t since_ms; /* the longest unused come first; UINT64_MAX: nothing to park */
        uint64_t n_bytes;  /* then those that have the most */
        struct pressure_order order;
};

/* A look at some of the sessions that can be asked for a request; which ones, and for what, is the kind's. */
struct round {
        enum recall_kind kind;
        const struct quota *q;
        const struct account *scope;
        const struct quota_asking *asking;
        const struct session *requester;
        uint64_t ticket; /* of the request */
        uint64_t now_ms, monotonic_ms;
        size_t n_reads; /* of pages */
        size_t n, max;
        struct candidate best[RECALL_MAX_ROUND];
};

/* Whether it may have something for this request: it is listed, it has bytes, and it did not say since the request began
 * to ask that it has no more. */
static bool share_may_give(const struct recall_share *share, uint64_t has_bytes, bool is_own,
                           const struct quota_asking *asking)
{
        return share->session && !share->recall.session && has_bytes > 0 &&
               share->spent_clocks[is_own] < asking->clock;
}

/* It has nothing more for the requests that wait already. */
static void share_mark_spent(struct recall_share *share, bool is_own)
{
        share->spent_clocks[is_own] = ++share->session->broker->recalls.trim_clock;
}

/* What its quota can return to where it is lacking. */
static uint64_t share_surplus(const struct recall_share *share, const struct quota *q,
                              const struct account *scope)
{
        const struct quota *its = share->share->quota;

        if (its == q)
                return UINT64_MAX;
        return scope ? account_surplus(&its->account, scope) : 0;
}

/* Reads the client's page, which is only a hint. That takes system calls, so it is remembered for a moment, and a round
 * reads a few. False: it has read too many. */
static bool round_read_hint(struct round *r, struct recall_share *share)
{
        struct session_hint *hint = &share->hint;

        if (hint->read_ms != 0 && r->now_ms - hint->read_ms < RECALL_HINT_MS)
                return true;
        if (r->n_reads == RECALL_MAX_READS)
                return false;
        r->n_reads++;
        *hint = session_read_hint(share->session, (uint32_t)(share->share - share->session->shares));
        hint->read_ms = r->now_ms;
        return true;
}

static bool comes_before(const struct candidate *a, const struct candidate *b)
{
        return a->since_ms != b->since_ms ? a->since_ms < b->since_ms : a->n_bytes > b->n_bytes;
}

static void round_add(struct round *r, const struct candidate *c)
{
        size_t i = r->n < r->max ? r->n++ : r->max;

        for (; i > 0 && comes_before(c, &r->best[i - 1]); i--)
                if (i < r->max)
                        r->best[i] = r->best[i - 1];
        if (i < r->max)
                r->best[i] = *c;
}

static size_t pressure_look_at(struct round *r, struct recall_share *share);
static size_t trim_look_at(struct round *r, struct recall_share *share);

/* Looks at the first sessions of a list for about n_looks, at one at least; these come last the next time. Returns how
 * many it looked at. */
static size_t round_look(struct round *r, struct recall_share_list *list, size_t n_listed, size_t n_looks)
{
        size_t n = 0;

        for (size_t n_spent = 0; n < n_listed && (n == 0 || n_spent < n_looks); n++) {
                struct recall_share *share = TAILQ_FIRST(list);
                size_t cost = r->kind == RECALL_TRIM ? trim_look_at(r, share) : pressure_look_at(r, share);

                if (cost == 0) /* its page cannot be read now */
                        break;
                TAILQ_REMOVE(list, share, link);
                TAILQ_INSERT_TAIL(list, share, link);
                n_spent += cost;
        }
        return n;
}

/* Whether there is more to ask: some were asked, or the next call looks at further sessions. n_vain: of those that were
 * looked at since one was asked. */
static bool round_goes_on(struct quota *q, size_t n_asked, size_t n_looked, size_t n_all, unsigned *n_vain)
{
        if (n_asked == 0 && n_looked < n_all && (*n_vain += (unsigned)n_looked) < n_all) {
                q->queue.look_again = true;
                return true;
        }
        *n_vain = 0;
        q->queue.look_again |= n_asked > 0; /* there may be more to ask */
        return n_asked > 0;
}

/* ---- pressure ---------------------------------------------------------------- */

/* A session is waited for so long: for a request that would be refused, and for one that has time. What it has
 * released since it was asked adds time at this rate. A time since the last release would let a client hide all others
 * by a small release now and then. */
#define PRESSURE_SLOW_MS      100u
#define PRESSURE_SLOWS_MS     500u
#define PRESSURE_BYTES_PER_MS (UINT64_C(1) << 18)
#define PRESSURE_MIN_BYTES    (UINT64_C(2) << 20) /* a session that released less has nothing more */
#define PRESSURE_MAX_SHIFT    2u
#define PRESSURE_MAX_OPEN     64u  /* that are looked at for what is coming */
#define PRESSURE_AGAIN_MS     100u /* when no session is left, all are looked at again after that */

void pressure_begin(struct session *s)
{
        for (size_t i = 0; i < s->n_shares; i++)
                if (s->shares[i].joined)
                        trim_list_pressed(s, &s->shares[i]);
}

/* The index of the share for the copies, by the partition's name; NULL: as the config has it for this quota.
 * -ENOENT: there is none, or of another kind of memory. */
static int pressure_find_to(const struct session *s, const struct session_share *from, const char *partition,
                            size_t *ret)
{
        const struct config_quota *config =
                partition ? NULL : broker_config_quota(s->broker, s->tenant, from->quota->partition);
        size_t to;

        if (config)
                partition = config->park_to;
        if (!partition || session_find_share(s, partition, &to) < 0 ||
            s->shares[to].quota->partition->is_cuda || &s->shares[to] == from)
                return -ENOENT;
        *ret = to;
        return 0;
}

/* False: it cannot be asked now. */
static bool pressure_send(struct pressure_share *share, const struct pressure_order *order, uint64_t now_ms)
{
        struct session *s = share->asked.session;
        Bfcd__Event event = BFCD__EVENT__INIT;
        Bfcd__Pressure message = BFCD__PRESSURE__INIT;

        if (!s || share->asked.recall.session || order->n_bytes == 0)
                return false;
        recall_begin(&share->asked.recall, RECALL_PRESSURE, s, now_ms);
        share->n_bytes = order->n_bytes;
        share->wakes = order->wakes;
        share->is_own = order->is_own;
        share->asked.hint.read_ms = 0;
        event.sequence = recall_number(&share->asked.recall);
        message.partition = (uint32_t)(share->asked.share - s->shares);
        message.n_bytes = order->n_bytes;
        message.parks = order->parks;
        message.idle_ms = order->idle_ms;
        message.to = (uint32_t)order->to;
        if (order->tag)
                message.tag = (char *)(uintptr_t)order->tag;
        message.is_command = order->is_command;
        message.wakes = order->wakes;
        message.is_own = order->is_own;
        event.body_case = BFCD__EVENT__BODY_PRESSURE;
        event.pressure = &message;
        s->ops->send_event(s->userdata, &event);
        return true;
}

/* Blocks that the config allows to park. */
static bool share_can_park(const struct round *r, const struct recall_share *share,
                           struct pressure_order *ret)
{
        const struct session *s = share->session;
        const struct config_quota *config =
                broker_config_quota(s->broker, s->tenant, share->share->quota->partition);

        if (!config || !config->park_to || share->hint.park.bytes == 0 ||
            share->hint.park.since_ms > r->monotonic_ms ||
            r->monotonic_ms - share->hint.park.since_ms < config->park_idle_ms ||
            pressure_find_to(s, share->share, NULL, &ret->to) < 0)
                return false;
        ret->parks = true;
        ret->idle_ms = (uint32_t)config->park_idle_ms;
        return true;
}

/* Requests of its quota have waited longer: else two that wait could take each other's memory in turns. */
static bool share_waits_longer(const struct round *r, const struct recall_share *share)
{
        const struct quota *its = share->share->quota;
        const struct quota_request *first = TAILQ_FIRST(&its->queue.requests);

        return its != r->q && first && first->ticket < r->ticket;
}

static size_t pressure_look_at(struct round *r, struct recall_share *share)
{
        struct candidate c = { .share = share, .since_ms = UINT64_MAX };

        if (!share_may_give(share, usage_bytes(&share->share->usage), share->session == r->requester,
                            r->asking) ||
            share_waits_longer(r, share))
                return 1;
        c.n_bytes = share_surplus(share, r->q, r->scope);
        if (c.n_bytes == 0)
                return 1;
        if (!round_read_hint(r, share))
                return 0;
        if (share_can_park(r, share, &c.order))
                c.since_ms = share->hint.park.since_ms;
        if (c.order.parks || share->hint.has_fn)
                round_add(r, &c);
        return 1;
}

/* As many as seem to be needed for want_bytes, each for at most `missing`. Returns how many were asked. */
static size_t pressure_send_round(struct round *r, uint64_t missing, uint64_t want_bytes)
{
        size_t n = 0;

        for (size_t i = 0; i < r->n && want_bytes > 0; i++) {
                struct candidate *c = &r->best[i];
                uint64_t expected = min_u64(min_u64(missing, want_bytes), c->n_bytes);

                if (c->order.parks && !c->share->hint.has_fn)
                        expected = min_u64(expected, c->share->hint.park.bytes);
                c->order.n_bytes = expected;
                c->order.is_own = c->share->session == r->requester;
                if (!pressure_send((struct pressure_share *)c->share, &c->order, r->now_ms))
                        continue;
                want_bytes -= expected;
                n++;
        }
        return n;
}

/* More with each answer, so that no session that releases a little each time keeps others from being asked. */
static uint64_t wanted(const struct quota_asking *asking, uint64_t missing)
{
        unsigned shift = asking->n_gave < PRESSURE_MAX_SHIFT ? asking->n_gave : PRESSURE_MAX_SHIFT;

        return missing > UINT64_MAX >> shift ? UINT64_MAX : missing << shift;
}

/* Without what it allocated meanwhile. */
static uint64_t share_released(const struct pressure_share *share)
{
        return excess_u64(share->asked.recall.n_freed, share->asked.recall.n_added);
}

/* What sessions that were asked are expected to release yet. */
static uint64_t coming(const struct broker *b, const struct round *r, uint64_t slow_ms)
{
        struct recall *each;
        uint64_t sum = 0;
        size_t n = 0;

        TAILQ_FOREACH_REVERSE(each, &b->recalls.lists[RECALL_PRESSURE], recall_list, of_broker)
        {
                const struct pressure_share *share = (const struct pressure_share *)each;
                uint64_t released = share_released(share), n_bytes = excess_u64(share->n_bytes, released);

                if (n++ == PRESSURE_MAX_OPEN)
                        break;
                if (share->asked.share->quota->partition != r->q->partition || share->wakes ||
                    r->now_ms - each->since_ms >= slow_ms + released / PRESSURE_BYTES_PER_MS ||
                    share_surplus(&share->asked, r->q, r->scope) == 0)
                        continue;
                sum = n_bytes > UINT64_MAX - sum ? UINT64_MAX : sum + n_bytes;
        }
        return sum;
}

bool pressure_ask(struct broker *b, struct quota *q, struct quota_request *first, const struct account *scope,
                  uint64_t missing)
{
        struct quota_asking *asking = &first->asking;
        struct round round = { .kind = RECALL_PRESSURE,
                               .q = q,
                               .scope = scope,
                               .asking = asking,
                               .requester = first->requester,
                               .ticket = first->ticket,
                               .max = RECALL_MAX_ROUND };
        size_t n_pressed = q->partition->lists.n_pressed, n_looked;
        uint64_t n_coming, want;

        if (n_pressed == 0)
                return false;
        if (asking->clock == 0)
                asking->clock = ++b->recalls.trim_clock;
        round.now_ms = clock_ms();
        round.monotonic_ms = clock_ns() / 1000000;

        /* What was asked for and is coming is waited for. */
        n_coming = coming(b, &round, first->wait_ms > 0 ? PRESSURE_SLOWS_MS : PRESSURE_SLOW_MS);
        want = wanted(asking, missing);
        if (n_coming >= want)
                return true;
        if (asking->press.vain_ms != 0 && round.now_ms - asking->press.vain_ms < PRESSURE_AGAIN_MS)
                return n_coming > 0;

        /* The best of those that have not been looked at are asked for the rest. */
        n_looked = round_look(&round, &q->partition->lists.pressed, n_pressed, RECALL_MAX_LOOKS);
        if (round_goes_on(q, pressure_send_round(&round, missing, want - n_coming), n_looked, n_pressed,
                          &asking->press.n_vain))
                return true;
        asking->press.vain_ms = round.now_ms;
        return n_coming > 0;
}

static void pressure_answer(struct recall *r)
{
        struct pressure_share *share = (struct pressure_share *)r;
        bool gave = share_released(share) > 0 &&
                    share_released(share) >= min_u64(share->n_bytes / 2, PRESSURE_MIN_BYTES);

        recall_end(r);
        if (!gave)
                share_mark_spent(&share->asked, share->is_own);
        share->asked.hint.read_ms = 0;
        quota_note_answer(share->asked.share->quota, gave);
}

static void pressure_end(struct session *s)
{
        for (size_t i = 0; i < s->n_shares; i++) {
                struct recall_share *share = &s->shares[i].pressure.asked;

                if (!share->session)
                        continue;
                if (share->recall.session)
                        recall_end(&share->recall);
                trim_unlist_pressed(&s->shares[i]);
                quota_note_answer(s->shares[i].quota, false);
        }
}

static void pressure_miss(struct recall *r)
{
        struct pressure_share *share = (struct pressure_share *)r;

        quota_note_answer(share->asked.share->quota, false);
}

/* ---- trimming ---------------------------------------------------------------- */

#define TRIM_MAX_BYTES    (UINT64_C(1) << 62) /* asked for at once */
#define TRIM_LOOKS_A_READ 8u                  /* what else counts as a look */
#define TRIM_SLOTS_A_LOOK 64u
#define TRIM_SLOW_MS      40u /* after this time the next sessions are asked too */

static void trim_send_ranges(struct trim_share *share, struct trim_ranges *ranges, uint64_t n_bytes,
                             uint64_t now_ms)
{
        struct session *s = share->asked.session;
        struct trim_quota *t = share->asked.share->quota->trim.state;
        Bfcd__Event event = BFCD__EVENT__INIT;
        Bfcd__Trim message = BFCD__TRIM__INIT;

        recall_begin(&share->asked.recall, RECALL_TRIM, s, now_ms);
        event.sequence = recall_number(&share->asked.recall);
        message.partition = (uint32_t)(share->asked.share - s->shares);
        message.n_bytes = n_bytes;
        message.n_ranges = ranges->n;
        message.ranges = ranges->pointers;
        event.body_case = BFCD__EVENT__BODY_TRIM;
        event.trim = &message;
        t->n_open++;
        t->sent_ms = now_ms;
        trim_quota_list(share->asked.share->quota);
        s->ops->send_event(s->userdata, &event);
}

bool trim_send(struct trim_share *share, uint64_t n_bytes, uint64_t now_ms)
{
        struct trim_ranges ranges;

        if (!share->asked.session || share->asked.recall.session || share->asked.share->usage.bytes == 0 ||
            n_bytes == 0)
                return false;
        trim_find_ranges(share, &ranges);
        if (ranges.n > 0)
                trim_send_ranges(share, &ranges, n_bytes, now_ms);
        else if (share->cursor == 0)
                share_mark_spent(&share->asked, false);
        return ranges.n > 0;
}

static size_t trim_look_at(struct round *r, struct recall_share *asked)
{
        struct trim_share *share = (struct trim_share *)asked;
        uint64_t held = asked->share->usage.bytes;
        size_t n_reads = r->n_reads;
        struct trim_quota *t;

        if (!share_may_give(asked, held, false, r->asking))
                return 1;
        t = asked->share->quota->trim.state;
        if (share->empty_since == t->n_changes)
                return 1;
        if (trim_has_ranges(share)) {
                uint64_t idle = round_read_hint(r, asked) ? min_u64(asked->hint.idle_bytes, held) : held;

                round_add(r, &(struct candidate){ .share = asked, .n_bytes = idle });
        } else {
                share->empty_since = t->n_changes;
                t->n_empty++;
        }
        return 1 + share->n_slots / TRIM_SLOTS_A_LOOK + (r->n_reads - n_reads) * TRIM_LOOKS_A_READ;
}

/* Looks at sessions of a quota. Returns how many; SIZE_MAX: at all. */
static size_t trim_look(struct round *r, struct trim_quota *t, size_t n_looks)
{
        size_t n = t->n_empty < t->n_shares ? round_look(r, &t->shares, t->n_shares, n_looks) : t->n_shares;

        return n == t->n_shares ? SIZE_MAX : n;
}

/* Of the quotas whose sessions are asked for this shortage, the next after `each`. NULL: the first one. */
static struct quota *next_asked(struct quota *q, const struct account *scope, const struct quota *each)
{
        struct partition *p = q->partition;
        struct quota *next;

        if (!scope)
                return !each && LIST_HAS(q, trim.of_asked) ? q : NULL;
        for (next = each ? TAILQ_NEXT(each, trim.of_asked) : TAILQ_FIRST(&p->lists.asked); next;
             next = TAILQ_NEXT(next, trim.of_asked)) {
                p->lists.n_visits++;
                if (next == q || account_surplus(&next->account, scope) > 0)
                        return next;
        }
        return NULL;
}

struct survey {
        size_t n_quotas;
        size_t n_most; /* sessions of one quota */
        size_t n_open;
        bool is_fresh; /* some of these were sent just now */
};

static void survey_make(struct quota *q, const struct account *scope, uint64_t now_ms, struct survey *ret)
{
        struct quota *each, *next;

        *ret = (struct survey){ 0 };
        for (each = next_asked(q, scope, NULL); each; each = next) {
                const struct trim_quota *t = each->trim.state;

                next = next_asked(q, scope, each);
                if (t->n_empty >= t->n_shares && t->n_open == 0) { /* until something changes */
                        trim_quota_unlist(each);
                        continue;
                }
                ret->n_quotas++;
                ret->n_most = t->n_shares > ret->n_most ? t->n_shares : ret->n_most;
                ret->n_open += t->n_open;
                ret->is_fresh |= t->n_open > 0 && now_ms - t->sent_ms < TRIM_SLOW_MS;
        }
}

/* A session of another tenant is asked for no more than its quota's surplus, because memory that its
 * reserve keeps does not help. One extent is added, because blocks do not end where extents do. The
 * amount doubles with each answer that did not make enough extents wholly free. */
static uint64_t trim_bytes(const struct recall_share *share, const struct quota *q,
                           const struct quota_asking *asking, const struct account *scope, uint64_t missing)
{
        const struct quota *its = share->share->quota;
        uint64_t n_bytes = min_u64(missing, share_surplus(share, q, scope));

        if (n_bytes == 0)
                return 0;
        n_bytes = n_bytes < TRIM_MAX_BYTES
                          ? n_bytes + ledger_quota_at(its->partition->ledger, its->index)->extent_bytes
                          : TRIM_MAX_BYTES;
        return n_bytes > TRIM_MAX_BYTES >> min_u64(asking->n_gave, 63) ? TRIM_MAX_BYTES
                                                                       : n_bytes << asking->n_gave;
}

/* The requesting session comes first, where its own tenant's limit is short. */
static bool trim_ask_requester(const struct quota *q, struct quota_request *first,
                               const struct account *scope, uint64_t missing, uint64_t now_ms)
{
        const struct session *s = first->requester;

        if (scope == &q->partition->pool || !s || first->asking.n_round > 0)
                return false;
        for (size_t i = 0; i < s->n_shares; i++) {
                struct trim_share *share = &s->shares[i].trim;

                if (s->shares[i].quota == q)
                        return share_may_give(&share->asked, s->shares[i].usage.bytes, false,
                                              &first->asking) &&
                               trim_send(share, trim_bytes(&share->asked, q, &first->asking, scope, missing),
                                         now_ms);
        }
        return false;
}

/* Returns how many sessions could be asked. *ret_looked: it looked at so many of each quota; SIZE_MAX: at
 * all. */
static size_t trim_ask_round(struct quota *q, struct quota_request *first, const struct account *scope,
                             uint64_t missing, size_t n_looks, uint64_t now_ms, size_t *ret_looked)
{
        unsigned n_round = first->asking.n_round;
        struct round round = { .kind = RECALL_TRIM,
                               .asking = &first->asking,
                               .now_ms = now_ms,
                               .max = n_round < 4 ? (size_t)1 << n_round : RECALL_MAX_ROUND };
        struct quota *each;

        *ret_looked = SIZE_MAX;
        for (each = next_asked(q, scope, NULL); each; each = next_asked(q, scope, each)) {
                size_t n = trim_look(&round, each->trim.state, n_looks);

                *ret_looked = n < *ret_looked ? n : *ret_looked;
        }
        for (size_t i = 0; i < round.n; i++)
                (void)trim_send((struct trim_share *)round.best[i].share,
                                trim_bytes(round.best[i].share, q, &first->asking, scope, missing), now_ms);
        return round.n;
}

bool trim_ask(struct broker *b, struct quota *q, struct quota_request *first, const struct account *scope,
              uint64_t missing)
{
        struct quota_asking *asking = &first->asking;
        uint64_t now_ms = clock_ms();
        struct survey survey;
        size_t n_asked, n_looked = 0;

        survey_make(q, scope, now_ms, &survey);
        if (survey.n_quotas == 0)
                return false;
        if (asking->clock == 0)
                asking->clock = ++b->recalls.trim_clock;
        if (survey.is_fresh)
                return true;
        n_asked = trim_ask_requester(q, first, scope, missing, now_ms)
                          ? 1
                          : trim_ask_round(q, first, scope, missing, RECALL_MAX_LOOKS / survey.n_quotas,
                                           now_ms, &n_looked);
        asking->n_round += n_asked > 0; /* whether it was sent or not */
        return round_goes_on(q, n_asked, n_looked, survey.n_most, &asking->n_vain) || survey.n_open > 0;
}

bool trim_is_asked(const struct quota *q, const struct session *s)
{
        for (size_t i = 0; i < s->n_shares; i++)
                if (s->shares[i].quota == q)
                        return s->shares[i].trim.asked.recall.has_deadline;
        return false;
}

void trim_excess(struct broker *b, struct quota *q, uint64_t n_bytes)
{
        struct quota_asking asking = { .clock = ++b->recalls.trim_clock };
        uint64_t now_ms = clock_ms();
        struct round round = {
                .kind = RECALL_TRIM, .asking = &asking, .now_ms = now_ms, .max = RECALL_MAX_ROUND
        };

        if (q->trim.state)
                (void)trim_look(&round, q->trim.state, RECALL_MAX_LOOKS);
        for (size_t i = 0; i < round.n; i++)
                (void)trim_send((struct trim_share *)round.best[i].share, n_bytes, now_ms);
}

static void trim_end_recall(struct trim_share *share)
{
        share->asked.share->quota->trim.state->n_open -= share->asked.recall.has_deadline;
        recall_end(&share->asked.recall);
}

static void trim_answer(struct recall *r)
{
        struct trim_share *share = (struct trim_share *)r;
        struct quota *q = share->asked.share->quota;
        bool gave = r->n_freed > 0;
        bool was_overdue = recall_is_overdue(r);

        trim_end_recall(share);
        if (was_overdue)
                trim_count_responsive(share, true);
        if (gave)
                share->cursor = 0;
        else if (share->cursor == 0)
                share_mark_spent(&share->asked, false);
        quota_note_answer(q, gave);
}

static void trim_end(struct session *s)
{
        for (size_t i = 0; i < s->n_shares; i++) {
                struct trim_share *share = &s->shares[i].trim;

                if (!share->asked.session)
                        continue;
                if (trim_is_responsive(share))
                        trim_count_responsive(share, false);
                if (share->asked.recall.session)
                        trim_end_recall(share);
                trim_unlist(share);
                quota_note_answer(s->shares[i].quota, false);
        }
}

static void trim_miss(struct recall *r)
{
        struct trim_share *share = (struct trim_share *)r;
        struct quota *q = share->asked.share->quota;

        q->trim.state->n_open--;
        trim_count_responsive(share, false);
        quota_note_answer(q, false);
}

/* ---- admin commands ----------------------------------------------------------- */

struct recall_command {
        enum recall_kind kind; /* RECALL_TRIM, or RECALL_PRESSURE to park or wake */
        struct broker *broker;
        struct session *admin;        /* NULL: a drain's */
        struct broker_device *device; /* that is drained; NULL: an admin's */
        size_t n_looks;               /* a drain's: at sessions, that are left in this tick */
        uint64_t id;                  /* of the request */
        uint64_t session_id;          /* 0: those of the tenant */
        char tenant[LEDGER_NAME_BYTES];
        char partition[LEDGER_NAME_BYTES];
        char to[LEDGER_NAME_BYTES]; /* to park; "": as the config has it */
        char tag[LEDGER_TAG_BYTES];
        bool wakes;
        uint64_t want_bytes;
        uint64_t n_bytes;      /* freed, or woken */
        uint64_t before_bytes; /* reserved, when a trim began */
        uint64_t n_asked;      /* sessions */
        uint64_t asked_id;     /* the last one */
        size_t n_open;
        uint32_t next;     /* session's slot */
        size_t next_share; /* of that session */
        bool is_asking;    /* inside command_go_on() */
};

static bool name_matches(const char *wanted, const char *name)
{
        return wanted[0] == '\0' || strcmp(wanted, name) == 0;
}

static bool matches_partition(const struct recall_command *c, const struct partition *p)
{
        return c->device ? p->device == c->device->device : name_matches(c->partition, p->name);
}

static bool matches_quota(const struct recall_command *c, const struct quota *q)
{
        return matches_partition(c, q->partition) && name_matches(c->tenant, q->tenant);
}

static bool matches_session(const struct recall_command *c, const struct session *s)
{
        if (!s || !s->tenant || s->state != SESSION_LIVE)
                return false;
        return c->session_id ? s->id == c->session_id : name_matches(c->tenant, s->tenant->name);
}

/* Returns how many quotas it is about. */
static size_t count_quotas(const struct recall_command *c, uint64_t *ret_reserved_bytes)
{
        const struct broker *b = c->broker;
        size_t n = 0;

        *ret_reserved_bytes = 0;
        for (size_t i = 0; i < b->n_tenants; i++) {
                for (size_t k = 0; k < b->tenants[i].n_quotas; k++) {
                        if (!matches_quota(c, b->tenants[i].quotas[k]))
                                continue;
                        *ret_reserved_bytes += b->tenants[i].quotas[k]->account.own_bytes;
                        n++;
                }
        }
        return n;
}

static bool find_to(const struct recall_command *c, const struct session *s, size_t share, size_t *ret)
{
        return pressure_find_to(s, &s->shares[share], c->to[0] ? c->to : NULL, ret) == 0;
}

/* ---- admin commands: the end --------------------------------------------------------------- */

static void release_idle(const struct recall_command *c)
{
        const struct broker *b = c->broker;

        for (size_t i = 0; i < b->n_tenants; i++)
                for (size_t k = 0; k < b->tenants[i].n_quotas; k++)
                        if (matches_quota(c, b->tenants[i].quotas[k]))
                                quota_release_idle(b->tenants[i].quotas[k]);
}

static void finish_drain(struct recall_command *c)
{
        if (drain_is_waiting(c->device))
                release_idle(c);
        c->device->command = NULL;
        c->device->asked_ms = clock_ms();
        free(c);
}

static const char *command_name(const struct recall_command *c)
{
        if (c->kind == RECALL_TRIM)
                return "trim";
        return c->wakes ? "wake" : "park";
}

static void finish(struct recall_command *c)
{
        struct session *s = c->admin;
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        Bfcd__TrimReply trim = BFCD__TRIM_REPLY__INIT;

        if (c->kind == RECALL_TRIM)
                release_idle(c);
        log_info("%s: %s: %" PRIu64 " session%s asked, %s in blocks %s", SESSION_LABEL(s), command_name(c),
                 c->n_asked, c->n_asked == 1 ? "" : "s", NUMBER_SIZE(c->n_bytes),
                 c->kind == RECALL_TRIM ? "freed"
                 : c->wakes             ? "woken"
                                        : "parked");
        trim.n_asked = c->n_asked;
        trim.n_bytes = c->n_bytes;
        trim.bytes_reserved_before = c->before_bytes;
        reply.id = c->id;
        reply.body_case = BFCD__REPLY__BODY_TRIM;
        reply.trim = &trim;
        s->admin->recall = NULL;
        free(c);
        session_send(s, &reply);
}

/* ---- admin commands: asking ---------------------------------------------------------------- */

/* False: the session cannot be asked there. */
static bool ask_share(struct recall_command *c, struct session *s, size_t i, uint64_t now_ms)
{
        struct session_share *share = &s->shares[i];
        struct pressure_order order = { .n_bytes = UINT64_MAX,
                                        .parks = !c->wakes,
                                        .wakes = c->wakes,
                                        .tag = c->tag,
                                        .is_command = true };

        if (!matches_partition(c, share->quota->partition))
                return false;
        if (c->kind == RECALL_TRIM) {
                if (!trim_send(&share->trim, c->want_bytes - c->n_bytes, now_ms))
                        return false;
                share->trim.asked.recall.command = c;
                return true;
        }
        if ((!c->wakes && !find_to(c, s, i, &order.to)) || !pressure_send(&share->pressure, &order, now_ms))
                return false;
        share->pressure.asked.recall.command = c;
        return true;
}

static bool has_looked(const struct recall_command *c)
{
        return c->next >= c->broker->sessions.n_slots;
}

/* Asks the next of its sessions in one quota. False: there is none, or a drain has no look left. */
static bool ask_next(struct recall_command *c, uint64_t now_ms)
{
        for (; !has_looked(c); c->next++, c->next_share = 0) {
                struct session *s = c->broker->sessions.table[c->next];

                if (c->device && c->n_looks == 0)
                        return false;
                c->n_looks -= c->device != NULL;
                while (matches_session(c, s) && c->next_share < s->n_shares) {
                        if (!ask_share(c, s, c->next_share++, now_ms))
                                continue;
                        c->n_asked += c->asked_id != s->id;
                        c->asked_id = s->id;
                        c->n_open++;
                        return true;
                }
        }
        return false;
}

static void command_go_on(struct recall_command *c)
{
        uint64_t now_ms = clock_ms();

        if (c->is_asking)
                return;
        c->is_asking = true;
        if (c->device && !drain_is_waiting(c->device))
                c->next = (uint32_t)c->broker->sessions.n_slots;
        while (c->n_open < RECALL_COMMAND_MAX_OPEN && c->n_bytes < c->want_bytes && ask_next(c, now_ms))
                ;
        c->is_asking = false;
        if (c->n_open > 0)
                return;
        if (!c->device)
                finish(c);
        else if (has_looked(c))
                finish_drain(c);
}

/* A session has answered or will not answer: the command that asked it goes on, if there is one. */
static void recall_command_hear(struct recall *r)
{
        struct recall_command *c = r->command;

        if (!c)
                return;
        r->command = NULL;
        c->n_open--;
        c->n_bytes += c->wakes ? r->n_added : r->n_freed;
        command_go_on(c);
}

void recall_command_drop(struct session *s)
{
        struct recall_command *c = s->admin ? s->admin->recall : NULL;
        struct recall *r;

        if (!c)
                return;
        TAILQ_FOREACH(r, &s->broker->recalls.lists[c->kind], of_broker)
        if (r->command == c)
                r->command = NULL;
        free(c);
        s->admin->recall = NULL;
}

/* ---- admin commands: the requests ---------------------------------------------------------- */

/* A name that is too long matches nothing. NULL: it was refused. */
static struct recall_command *command_new(struct session *s, uint64_t id, enum recall_kind kind,
                                          const char *tenant, const char *partition)
{
        struct recall_command *c;

        if (s->admin->recall) {
                session_refuse_format(s, id, -EBUSY,
                                      "a %s of this session is still running: wait until it is done",
                                      command_name(s->admin->recall));
                return NULL;
        }
        c = calloc(1, sizeof(*c));
        if (!c) {
                session_refuse(s, id, -ENOMEM, "the daemon is out of memory");
                return NULL;
        }
        c->kind = kind;
        c->broker = s->broker;
        c->admin = s;
        c->id = id;
        c->want_bytes = UINT64_MAX;
        snprintf(c->tenant, sizeof(c->tenant), "%s", tenant);
        snprintf(c->partition, sizeof(c->partition), "%s", partition);
        return c;
}

static void command_begin(struct recall_command *c)
{
        c->admin->admin->recall = c;
        command_go_on(c);
}

static void refuse_unknown(const struct recall_command *c)
{
        char sentence[EXPLAIN_SENTENCE];

        explain_names(c->admin, c->tenant, c->partition, sentence, sizeof(sentence));
        session_refuse(c->admin, c->id, -ENOENT, sentence);
}

int handle_trim_now(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        const Bfcd__TrimNow *m = r->trim_now;
        struct recall_command *c;

        (void)ret_why;
        if (session_refuse_client(s, r->id, "trim is"))
                return 0;
        c = command_new(s, r->id, RECALL_TRIM, m->tenant, m->partition);
        if (!c)
                return 0;
        if (m->n_bytes > 0)
                c->want_bytes = m->n_bytes;
        if (count_quotas(c, &c->before_bytes) > 0) {
                command_begin(c);
                return 0;
        }
        refuse_unknown(c);
        free(c);
        return 0;
}

/* Where blocks of the matching sessions could go. -ENOENT: there is no such session or partition; -EINVAL: there
 * is no partition for their copies. */
static int check_targets(const struct recall_command *c)
{
        const struct broker *b = c->broker;
        int r = -ENOENT;

        for (size_t i = 0; r < 0 && i < b->sessions.n_slots; i++) {
                const struct session *s = b->sessions.table[i];
                size_t to;

                for (size_t k = 0; r < 0 && matches_session(c, s) && k < s->n_shares; k++)
                        if (matches_partition(c, s->shares[k].quota->partition))
                                r = c->wakes || find_to(c, s, k, &to) ? 0 : -EINVAL;
        }
        return r;
}

/* True: the config has such a quota. */
static bool has_quota(const struct recall_command *c)
{
        const struct broker *b = c->broker;

        for (size_t i = 0; i < b->n_tenants; i++)
                for (size_t k = 0; k < b->tenants[i].n_quotas; k++)
                        if (!b->tenants[i].quotas[k]->is_removed && matches_quota(c, b->tenants[i].quotas[k]))
                                return true;
        return false;
}

static bool has_session(const struct recall_command *c)
{
        for (size_t i = 0; i < c->broker->sessions.n_slots; i++)
                if (matches_session(c, c->broker->sessions.table[i]))
                        return true;
        return false;
}

static void refuse_names(const struct recall_command *c)
{
        struct session *s = c->admin;

        if (c->session_id && has_session(c))
                session_refuse_format(s, c->id, -ENOENT, "session %" PRIu64 " has no quota in partition '%s'",
                                      c->session_id, c->partition);
        else if (c->session_id)
                session_refuse_format(s, c->id, -ENOENT, "session %" PRIu64 " does not exist", c->session_id);
        else if (has_quota(c))
                session_refuse_format(s, c->id, -ENOENT, "tenant '%s' has no session", c->tenant);
        else
                refuse_unknown(c);
}

static void refuse_to(const struct recall_command *c)
{
        struct session *s = c->admin;

        if (c->to[0])
                session_refuse_format(
                        s, c->id, -EINVAL,
                        "nothing can be parked to partition '%s': it must be another partition, of host memory, in "
                        "which the tenant has a quota",
                        c->to);
        else
                session_refuse(
                        s, c->id, -EINVAL,
                        "no quota of these sessions has the key 'park': name the partition for the copies by --to "
                        "PARTITION");
}

int handle_park_now(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        const Bfcd__ParkNow *m = r->park_now;
        struct recall_command *c;
        int result;

        (void)ret_why;
        if (session_refuse_client(s, r->id, "park and wake of other sessions are"))
                return 0;
        if (strlen(m->tag) >= sizeof(c->tag)) {
                session_refuse(s, r->id, -EINVAL, "the tag is longer than 31 bytes");
                return 0;
        }
        if (!m->session_id && !*m->tenant) {
                session_refuse(s, r->id, -ENOENT, "park and wake need a tenant or a session");
                return 0;
        }
        c = command_new(s, r->id, RECALL_PRESSURE, m->tenant, m->partition);
        if (!c)
                return 0;
        c->session_id = m->session_id;
        c->wakes = m->wakes;
        snprintf(c->to, sizeof(c->to), "%s", m->to);
        snprintf(c->tag, sizeof(c->tag), "%s", m->tag);
        result = check_targets(c);
        if (result == 0) {
                command_begin(c);
                return 0;
        }
        if (result == -ENOENT)
                refuse_names(c);
        else
                refuse_to(c);
        free(c);
        return 0;
}

/* ---- drains ---------------------------------------------------------------- */

void recall_command_drain(struct broker *b, struct broker_device *d)
{
        if (!d->command) {
                d->command = calloc(1, sizeof(*d->command));
                if (!d->command)
                        return; /* later */
                d->command->kind = RECALL_TRIM;
                d->command->broker = b;
                d->command->device = d;
                d->command->want_bytes = UINT64_MAX;
        }
        d->command->n_looks = RECALL_COMMAND_LOOKS;
        command_go_on(d->command);
}

void recall_command_restart(struct broker_device *d)
{
        if (d->command)
                d->command->next = 0;
}

/* ---- what each kind does when it is answered, and when its time is up ------------- */

static const struct {
        void (*answer)(struct recall *r);
        void (*miss)(struct recall *r);
        const char *missed; /* for the log; NULL: miss() logs it */
} kinds[RECALL_KINDS] = {
        [RECALL_RETIRE] = { retire_answer, retire_miss, NULL },
        [RECALL_TRIM] = { trim_answer, trim_miss, "a Trim within timeouts.reclaim" },
        [RECALL_PRESSURE] = { pressure_answer, pressure_miss, "a Pressure within 60 s" },
};
_Static_assert(PRESSURE_TIMEOUT_MS == 60000, "the text above");

int recall_answer(struct session *s, uint64_t sequence, const char **ret_why)
{
        struct recall *r = recall_find(s, sequence);
        enum recall_kind kind;

        if (!r) {
                *ret_why = "the client answered an event that was not sent or was already answered";
                return -EPROTO;
        }
        kind = r->kind;
        kinds[kind].answer(r);
        if (kind != RECALL_RETIRE) /* that one is freed */
                recall_command_hear(r);
        return 0;
}

void recall_begin_resumed(struct session *s)
{
        retire_begin_resumed(s);
        trim_begin(s);
        pressure_begin(s);
}

void recall_end_session(struct session *s)
{
        trim_end(s);
        pressure_end(s);
        for (size_t i = 0; i < s->n_shares; i++) { /* a command asks the next session, never this one */
                recall_command_hear(&s->shares[i].trim.asked.recall);
                recall_command_hear(&s->shares[i].pressure.asked.recall);
        }
}

static void log_missed(const struct session *s, const char *missed)
{
        log_limited(&s->tenant->unresponsive_log, LOG_LEVEL_WARNING,
                    "session %" PRIu64
                    " (uid %u, pid %d): the client did not answer %s; it is skipped until it "
                    "answers",
                    s->id, (unsigned)s->who.uid, (int)s->who.pid, missed);
}

void recall_tick(struct broker *b, uint64_t now_ms)
{
        const uint64_t timeouts_ms[RECALL_KINDS] = {
                [RECALL_RETIRE] = RETIRE_TIMEOUT_MS,
                [RECALL_TRIM] = b->config->reclaim_timeout_ms,
                [RECALL_PRESSURE] = PRESSURE_TIMEOUT_MS,
        };

        for (size_t i = 0; i < RECALL_KINDS; i++) {
                struct recall *r;

                while ((r = TAILQ_FIRST(&b->recalls.lists[i])) && r->since_ms + timeouts_ms[i] <= now_ms) {
                        r->session->recall.queues[i].n_missed++;
                        recall_clear_deadline(r);
                        if (kinds[i].missed)
                                log_missed(r->session, kinds[i].missed);
                        kinds[i].miss(r);
                        if (i != RECALL_RETIRE) /* that one may be freed */
                                recall_command_hear(r);
                }
        }
}

/* ---- the check ------------------------------------------------------------------ */

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

                n += s && session_is_unresponsive(s);
        }
        for (size_t i = 0; i < b->n_tenants; i++)
                n -= b->tenants[i].n_unresponsive;
        return n != 0 ? "the tenants' counts of unresponsive sessions are wrong" : NULL;
}

/* The invariants of one kind. NULL, or a sentence. */
static const char *recall_check(const struct broker *b, enum recall_kind kind)
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

static const char *check_retirements(const struct session *s)
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
                why = b->sessions.table[i] ? check_retirements(b->sessions.table[i]) : NULL;
        if (why)
                *ret_why = why;
        return why ? -EBADMSG : 0;
}

int trim_check(const struct broker *b, const char **ret_why)
{
        const char *why = recall_check(b, RECALL_TRIM);

        for (size_t i = 0; !why && i < b->n_tenants; i++)
                for (size_t k = 0; !why && k < b->tenants[i].n_quotas; k++)
                        why = trim_check_quota(b->tenants[i].quotas[k]);
        if (why)
                *ret_why = why;
        return why ? -EBADMSG : 0;
}

int pressure_check(const struct broker *b, const char **ret_why)
{
        const char *why = recall_check(b, RECALL_PRESSURE);

        for (size_t i = 0; !why && i < b->n_partitions; i++)
                why = trim_check_partition(&b->partitions[i]);
        if (why)
                *ret_why = why;
        return why ? -EBADMSG : 0;
}
