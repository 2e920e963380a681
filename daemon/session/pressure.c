/* Pressure; see pressure.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/pressure.h"

#include <errno.h>
#include <inttypes.h>

#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/memory/broker.h"
#include "daemon/base/number.h"
#include "daemon/session/session.h"
#include "daemon/session/recall.h"

/* ---- the list ------------------------------------------------------------- */

void pressure_join(struct session *s, struct session_share *session_share)
{
        struct pressure_share *share = &session_share->pressure;
        struct partition *p = session_share->quota->partition;

        if (!session_has_events(s) || s->state != SESSION_LIVE || share->session)
                return;
        share->session = s;
        share->share = session_share;
        TAILQ_INSERT_TAIL(&p->lists.pressed, share, of_partition);
        p->lists.n_pressed++;
}

void pressure_begin(struct session *s)
{
        for (size_t i = 0; i < s->n_shares; i++)
                if (s->shares[i].joined)
                        pressure_join(s, &s->shares[i]);
}

/* ---- asking ---------------------------------------------------------------- */

int pressure_find_to(const struct session *s, const struct session_share *from, const char *partition,
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

bool pressure_send(struct pressure_share *share, const struct pressure_order *order, uint64_t now_ms)
{
        struct session *s = share->session;
        Bfcd__Event event = BFCD__EVENT__INIT;
        Bfcd__Pressure message = BFCD__PRESSURE__INIT;

        if (!s || share->recall.session || order->n_bytes == 0)
                return false;
        recall_begin(&share->recall, RECALL_PRESSURE, s, now_ms);
        share->n_bytes = order->n_bytes;
        share->wakes = order->wakes;
        share->is_own = order->is_own;
        share->hint.read_ms = 0;
        event.sequence = recall_number(&share->recall);
        message.partition = (uint32_t)(share->share - s->shares);
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

/* ---- selection ------------------------------------------------------------- */

struct candidate {
        struct pressure_share *share;
        struct pressure_order order;
        uint64_t since_ms; /* UINT64_MAX: nothing to park */
        uint64_t surplus;
};

struct press_round {
        const struct quota *q;
        const struct account *scope;
        const struct quota_asking *asking;
        const struct session *requester;
        uint64_t ticket; /* of the request */
        size_t n, n_reads;
        struct candidate best[PRESSURE_MAX_ROUND];
        uint64_t now_ms, monotonic_ms;
};

/* What its quota can return to where it is lacking. */
static uint64_t share_surplus(const struct pressure_share *share, const struct quota *q,
                              const struct account *scope)
{
        const struct quota *its = share->share->quota;

        if (its == q)
                return UINT64_MAX;
        return scope ? account_surplus(&its->account, scope) : 0;
}

/* False: too many pages were read. */
static bool share_read_hint(struct press_round *r, struct pressure_share *share)
{
        struct session_pressure_hint hint;

        if (share->hint.read_ms != 0 && r->now_ms - share->hint.read_ms < PRESSURE_HINT_MS)
                return true;
        if (r->n_reads == PRESSURE_MAX_READS)
                return false;
        r->n_reads++;
        hint = session_pressure_hint(share->session, (uint32_t)(share->share - share->session->shares));
        share->hint = (struct pressure_hint){ min_u64(hint.idle.bytes, share->share->usage.bytes),
                                              hint.idle.since_ms, hint.has_fn, r->now_ms };
        return true;
}

/* Blocks that the config allows to park. */
static bool share_can_park(const struct press_round *r, const struct pressure_share *share,
                           struct pressure_order *ret)
{
        const struct session *s = share->session;
        const struct config_quota *config =
                broker_config_quota(s->broker, s->tenant, share->share->quota->partition);

        if (!config || !config->park_to || share->hint.bytes == 0 || share->hint.since_ms > r->monotonic_ms ||
            r->monotonic_ms - share->hint.since_ms < config->park_idle_ms ||
            pressure_find_to(s, share->share, NULL, &ret->to) < 0)
                return false;
        ret->parks = true;
        ret->idle_ms = (uint32_t)config->park_idle_ms;
        return true;
}

static bool comes_before(const struct candidate *a, const struct candidate *b)
{
        return a->since_ms != b->since_ms ? a->since_ms < b->since_ms : a->surplus > b->surplus;
}

static void round_add(struct press_round *r, const struct candidate *c)
{
        size_t i = r->n < PRESSURE_MAX_ROUND ? r->n++ : PRESSURE_MAX_ROUND;

        for (; i > 0 && comes_before(c, &r->best[i - 1]); i--)
                if (i < PRESSURE_MAX_ROUND)
                        r->best[i] = r->best[i - 1];
        if (i < PRESSURE_MAX_ROUND)
                r->best[i] = *c;
}

/* Requests of its quota have waited longer: else two that wait could take each other's memory in turns. */
static bool share_waits_longer(const struct press_round *r, const struct pressure_share *share)
{
        const struct quota *its = share->share->quota;
        const struct quota_request *first = TAILQ_FIRST(&its->queue.requests);

        return its != r->q && first && first->ticket < r->ticket;
}

/* False: its page could not be read now. */
static bool round_look_at(struct press_round *r, struct pressure_share *share)
{
        struct candidate c = { .share = share, .since_ms = UINT64_MAX };

        if (share->recall.session || usage_bytes(&share->share->usage) == 0 ||
            share->spent_clocks[share->session == r->requester] >= r->asking->clock ||
            share_waits_longer(r, share))
                return true;
        c.surplus = share_surplus(share, r->q, r->scope);
        if (c.surplus == 0)
                return true;
        if (!share_read_hint(r, share))
                return false;
        if (share_can_park(r, share, &c.order))
                c.since_ms = share->hint.since_ms;
        if (c.order.parks || share->hint.has_fn)
                round_add(r, &c);
        return true;
}

/* Those that were looked at come last the next time. Returns their number. */
static size_t round_look(struct press_round *r, struct partition *p)
{
        size_t n = 0;

        for (; n < p->lists.n_pressed && n < PRESSURE_MAX_LOOKS; n++) {
                struct pressure_share *share = TAILQ_FIRST(&p->lists.pressed);

                if (!round_look_at(r, share))
                        break;
                TAILQ_REMOVE(&p->lists.pressed, share, of_partition);
                TAILQ_INSERT_TAIL(&p->lists.pressed, share, of_partition);
        }
        return n;
}

/* As many as seem to be needed for want_bytes, each for at most `missing`. Returns how many were asked. */
static size_t round_send(struct press_round *r, uint64_t missing, uint64_t want_bytes)
{
        size_t n = 0;

        for (size_t i = 0; i < r->n && want_bytes > 0; i++) {
                struct candidate *c = &r->best[i];
                uint64_t expected = min_u64(min_u64(missing, want_bytes), c->surplus);

                if (c->order.parks && !c->share->hint.has_fn)
                        expected = min_u64(expected, c->share->hint.bytes);
                c->order.n_bytes = expected;
                c->order.is_own = c->share->session == r->requester;
                if (!pressure_send(c->share, &c->order, r->now_ms))
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
        return excess_u64(share->recall.n_freed, share->recall.n_added);
}

/* What sessions that were asked are expected to release yet. */
static uint64_t coming(const struct broker *b, const struct press_round *r, uint64_t slow_ms)
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
                if (share->share->quota->partition != r->q->partition || share->wakes ||
                    r->now_ms - each->since_ms >= slow_ms + released / PRESSURE_BYTES_PER_MS ||
                    share_surplus(share, r->q, r->scope) == 0)
                        continue;
                sum = n_bytes > UINT64_MAX - sum ? UINT64_MAX : sum + n_bytes;
        }
        return sum;
}

bool pressure_ask(struct broker *b, struct quota *q, struct quota_request *first, const struct account *scope,
                  uint64_t missing)
{
        struct quota_asking *asking = &first->asking;
        struct press_round round = { .q = q,
                                     .scope = scope,
                                     .asking = asking,
                                     .requester = first->requester,
                                     .ticket = first->ticket };
        size_t n_pressed = q->partition->lists.n_pressed;
        uint64_t n_coming, want;

        if (n_pressed == 0)
                return false;
        if (asking->clock == 0)
                asking->clock = ++b->recalls.trim_clock;
        round.now_ms = clock_ms();
        round.monotonic_ms = clock_ns() / 1000000;
        n_coming = coming(b, &round, first->wait_ms > 0 ? PRESSURE_SLOWS_MS : PRESSURE_SLOW_MS);
        want = wanted(asking, missing);
        if (n_coming >= want)
                return true;
        if (asking->press.vain_ms != 0 && round.now_ms - asking->press.vain_ms < PRESSURE_AGAIN_MS)
                return n_coming > 0;
        asking->press.n_vain += (unsigned)round_look(&round, q->partition);
        if (round_send(&round, missing, want - n_coming) > 0) {
                asking->press.n_vain = 0;
                q->queue.look_again = true; /* there may be more to ask */
                return true;
        }
        if (asking->press.n_vain < n_pressed) { /* the next call looks at further sessions */
                q->queue.look_again = true;
                return true;
        }
        asking->press.n_vain = 0;
        asking->press.vain_ms = round.now_ms;
        return n_coming > 0;
}

/* ---- answers and missed deadlines ------------------------------------------ */

void pressure_answer(struct recall *r)
{
        struct pressure_share *share = (struct pressure_share *)r;
        bool gave = share_released(share) > 0 &&
                    share_released(share) >= min_u64(share->n_bytes / 2, PRESSURE_MIN_BYTES);

        recall_end(r);
        if (!gave)
                share->spent_clocks[share->is_own] = ++share->session->broker->recalls.trim_clock;
        share->hint.read_ms = 0;
        quota_note_answer(share->share->quota, gave);
}

void pressure_end(struct session *s)
{
        for (size_t i = 0; i < s->n_shares; i++) {
                struct pressure_share *share = &s->shares[i].pressure;
                struct partition *p = s->shares[i].quota->partition;

                if (!share->session)
                        continue;
                if (share->recall.session)
                        recall_end(&share->recall);
                share->session = NULL;
                TAILQ_REMOVE(&p->lists.pressed, share, of_partition);
                p->lists.n_pressed--;
                quota_note_answer(s->shares[i].quota, false);
        }
}

void pressure_miss(struct recall *r)
{
        struct pressure_share *share = (struct pressure_share *)r;

        quota_note_answer(share->share->quota, false);
}

/* ---- the check --------------------------------------------------------------- */

int pressure_check(const struct broker *b, const char **ret_why)
{
        const char *why = recall_check(b, RECALL_PRESSURE);

        for (size_t i = 0; !why && i < b->n_partitions; i++) {
                const struct pressure_share *share;
                size_t n = 0;

                TAILQ_FOREACH(share, &b->partitions[i].lists.pressed, of_partition)
                {
                        n++;
                        if (share->session->state != SESSION_LIVE || !session_has_events(share->session))
                                why = "a session that does not answer is in the list of sessions to press";
                        if (share->recall.session && share->recall.session != share->session)
                                why = "a session has another session's Pressure";
                }
                if (n != b->partitions[i].lists.n_pressed)
                        why = "a partition's count of sessions to press is wrong";
        }
        if (why)
                *ret_why = why;
        return why ? -EBADMSG : 0;
}
