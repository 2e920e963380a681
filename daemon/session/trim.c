/* Trimming; see trim.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/trim.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "daemon/base/list.h"
#include "daemon/base/log.h"
#include "daemon/base/number.h"
#include "daemon/session/session.h"
#include "daemon/session/recall.h"

struct trim_slot { /* blocks */
        uint32_t n_all;
        uint32_t n_responsive;
};

struct trim_quota {
        TAILQ_HEAD(, trim_share) shares;
        size_t n_shares;
        size_t n_open;    /* Trims with a deadline */
        uint64_t sent_ms; /* the last of all */
        uint64_t n_blocks;
        uint64_t n_changes; /* of anything that decides what can be asked for */
        size_t n_empty;     /* shares that were found to have no range since the last change */
        struct trim_slot *slots;
        size_t n_slots;
};

/* ---- counting ------------------------------------------------------------ */

static void *grow_zeroed(void *array, size_t *n, size_t n_new, size_t size)
{
        unsigned char *grown = realloc(array, n_new * size);

        if (!grown)
                return NULL;
        memset(grown + *n * size, 0, (n_new - *n) * size);
        *n = n_new;
        return grown;
}

static struct trim_quota *trim_quota_of(struct quota *q)
{
        size_t n = arena_n_slots(q->arena);

        if (!q->trim.state) {
                q->trim.state = calloc(1, sizeof(*q->trim.state));
                if (!q->trim.state)
                        return NULL;
                TAILQ_INIT(&q->trim.state->shares);
                q->trim.state->n_changes = 1;
        }
        if (q->trim.state->n_slots < n) {
                struct trim_slot *slots =
                        grow_zeroed(q->trim.state->slots, &q->trim.state->n_slots, n, sizeof(*slots));

                if (slots)
                        q->trim.state->slots = slots;
        }
        return q->trim.state;
}

/* The partition's list of quotas whose sessions may have idle memory. */
static void trim_quota_list(struct quota *q)
{
        LIST_ADD(&q->partition->lists.asked, q, trim.of_asked);
}

static void trim_quota_unlist(struct quota *q)
{
        LIST_DROP(&q->partition->lists.asked, q, trim.of_asked);
}

static void trim_quota_drop(struct quota *q)
{
        struct trim_quota *t = q->trim.state;

        if (!t || t->n_shares > 0 || t->n_blocks > 0)
                return;
        trim_quota_unlist(q);
        free(t->slots);
        free(t);
        q->trim.state = NULL;
}

void trim_forget(struct quota *q)
{
        if (q->trim.state)
                q->trim.state->n_blocks = 0;
        trim_quota_drop(q);
}

/* Sessions that had no range may have one now. */
static void trim_quota_change(struct quota *q)
{
        q->trim.state->n_changes++;
        q->trim.state->n_empty = 0;
        trim_quota_list(q);
}

static bool share_is_responsive(const struct trim_share *share)
{
        return share->session && !recall_is_overdue(&share->recall);
}

/* Its session answers from now on, or does not. */
static void share_count_responsive(struct trim_share *share, struct quota *q, bool responsive)
{
        struct trim_quota *t = q->trim.state;

        trim_quota_change(q);
        for (size_t i = 0; i < share->n_slots && i < t->n_slots; i++)
                t->slots[i].n_responsive += responsive ? share->n_own[i] : 0u - share->n_own[i];
}

static void share_list(struct session *s, struct session_share *session_share)
{
        struct trim_share *share = &session_share->trim;
        struct quota *q = session_share->quota;

        share->session = s;
        share->share = session_share;
        TAILQ_INSERT_TAIL(&q->trim.state->shares, share, of_quota);
        q->trim.state->n_shares++;
}

/* Without memory for the counts less can be asked for. */
static void share_reserve(struct trim_share *share, size_t n)
{
        uint32_t *mine = share->n_slots < n
                                 ? grow_zeroed(share->n_own, &share->n_slots, n, sizeof(*share->n_own))
                                 : NULL;

        if (mine)
                share->n_own = mine;
}

/* share: of the block's session; NULL: the block is shared. */
static void count(struct quota *q, struct trim_share *share, uint64_t offset, uint64_t n_bytes)
{
        struct trim_quota *t = q->trim.state;
        size_t slot, last;

        t->n_blocks++;
        trim_quota_change(q);
        for (slot = arena_slots(q->arena, offset, n_bytes, &last); slot <= last && slot < t->n_slots;
             slot++) {
                t->slots[slot].n_all++;
                if (!share || slot >= share->n_slots)
                        continue;
                share->n_own[slot]++;
                t->slots[slot].n_responsive += share_is_responsive(share);
        }
}

void trim_add_block(struct session *s, struct session_share *session_share, uint64_t offset, uint64_t n_bytes)
{
        struct trim_share *share = &session_share->trim;
        struct trim_quota *t = trim_quota_of(session_share->quota);

        share->bytes_held += n_bytes;
        if (!t)
                return;
        if (session_has_events(s) && s->state == SESSION_LIVE && !share->session)
                share_list(s, session_share);
        if (session_has_events(s))
                share_reserve(share, t->n_slots);
        count(session_share->quota, share, offset, n_bytes);
}

void trim_add_shared_block(struct quota *q, uint64_t offset, uint64_t n_bytes)
{
        if (trim_quota_of(q))
                count(q, NULL, offset, n_bytes);
}

void trim_begin(struct session *s)
{
        for (size_t i = 0; i < s->n_shares; i++) {
                struct session_share *share = &s->shares[i];

                if (!session_has_events(s) || share->trim.session || share->trim.bytes_held == 0 ||
                    !share->quota->trim.state)
                        continue;
                share_list(s, share);
                share_count_responsive(&share->trim, share->quota, true);
        }
}

/* The share loses a block. of_all: the quota loses it, too. */
static void uncount(struct quota *q, struct trim_share *share, uint64_t offset, uint64_t n_bytes, bool of_all)
{
        struct trim_quota *t = q->trim.state;
        size_t slot, last;

        trim_quota_change(q);
        for (slot = arena_slots(q->arena, offset, n_bytes, &last); slot <= last && slot < t->n_slots;
             slot++) {
                if (of_all && t->slots[slot].n_all > 0)
                        t->slots[slot].n_all--;
                if (!share || slot >= share->n_slots || share->n_own[slot] == 0)
                        continue;
                share->n_own[slot]--;
                t->slots[slot].n_responsive -= share_is_responsive(share);
        }
        t->n_blocks -= of_all && t->n_blocks > 0;
}

void trim_remove_block(struct session_share *session_share, uint64_t offset, uint64_t n_bytes)
{
        struct trim_share *share = &session_share->trim;
        struct quota *q = session_share->quota;

        share->bytes_held -= n_bytes;
        if (q->trim.state)
                uncount(q, share, offset, n_bytes, true);
        trim_quota_drop(q);
}

void trim_split_block(struct session *s, struct session_share *session_share, uint64_t offset,
                      uint64_t n_bytes, uint64_t at)
{
        if (session_share->quota->trim.state)
                uncount(session_share->quota, &session_share->trim, offset, n_bytes, true);
        session_share->trim.bytes_held -= n_bytes;
        trim_add_block(s, session_share, offset, at);
        trim_add_block(s, session_share, offset + at, n_bytes - at);
}

void trim_publish_block(struct session_share *session_share, uint64_t offset, uint64_t n_bytes)
{
        session_share->trim.bytes_held -= n_bytes;
        if (session_share->quota->trim.state)
                uncount(session_share->quota, &session_share->trim, offset, n_bytes, false);
}

void trim_remove_shared_block(struct quota *q, uint64_t offset, uint64_t n_bytes)
{
        if (q->trim.state)
                uncount(q, NULL, offset, n_bytes, true);
        trim_quota_drop(q);
}

/* ---- asking -------------------------------------------------------------- */

struct ranges {
        size_t n;
        Bfcd__TrimRange ranges[TRIM_MAX_RANGES];
        bool alone[TRIM_MAX_RANGES]; /* all blocks there are the session's own */
        Bfcd__TrimRange *pointers[TRIM_MAX_RANGES];
};

/* False: there is no room for one more. */
static bool ranges_add(struct ranges *r, const struct arena *arena, const struct ledger_extent *extent,
                       bool alone)
{
        Bfcd__TrimRange *last = r->n > 0 ? &r->ranges[r->n - 1] : NULL;
        struct arena_place place;

        arena_locate(arena, extent->offset, &place);
        if (last && r->alone[r->n - 1] == alone && last->region_id == place.region_id &&
            last->offset + last->n_bytes == place.offset) {
                last->n_bytes += extent->n_bytes;
                return true;
        }
        if (r->n == TRIM_MAX_RANGES)
                return false;
        last = &r->ranges[r->n];
        bfcd__trim_range__init(last);
        last->region_id = place.region_id;
        last->offset = place.offset;
        last->n_bytes = extent->n_bytes;
        r->alone[r->n++] = alone;
        return true;
}

/* The session's own come first. */
static void ranges_sort(struct ranges *r)
{
        size_t n = 0;

        for (size_t pass = 0; pass < 2; pass++)
                for (size_t i = 0; i < r->n; i++)
                        if (r->alone[i] == (pass == 0))
                                r->pointers[n++] = &r->ranges[i];
}

/* How many slots are counted, both of the session and of the quota. */
static size_t share_n_slots(const struct trim_share *share)
{
        return (size_t)min_u64(share->n_slots, share->share->quota->trim.state->n_slots);
}

/* The slot's extent, if it would become wholly free when the session and all others that answer return
 * their blocks; else LEDGER_NONE. */
static uint32_t share_extent(const struct trim_share *share, size_t slot)
{
        const struct quota *q = share->share->quota;
        const struct trim_slot *counts = &q->trim.state->slots[slot];

        return share->n_own[slot] > 0 && counts->n_responsive == counts->n_all
                       ? arena_slot_extent(q->arena, slot)
                       : LEDGER_NONE;
}

/* Finds such extents from its cursor on. Moves the cursor behind them; at the end it is 0. */
static void share_find_ranges(struct trim_share *share, struct ranges *ret)
{
        const struct quota *q = share->share->quota;
        size_t n = share_n_slots(share);
        size_t slot = share->cursor, end = n - slot > TRIM_MAX_SLOTS ? slot + TRIM_MAX_SLOTS : n;

        ret->n = 0;
        for (; slot < end; slot++) {
                uint32_t extent = share_extent(share, slot);

                if (extent != LEDGER_NONE &&
                    !ranges_add(ret, q->arena, ledger_extent_at(q->partition->ledger, extent),
                                share->n_own[slot] == q->trim.state->slots[slot].n_all))
                        break;
        }
        share->cursor = slot < n ? slot : 0;
        ranges_sort(ret);
}

static bool share_has_ranges(const struct trim_share *share)
{
        size_t n = share_n_slots(share);

        for (size_t slot = 0; slot < n; slot++)
                if (share_extent(share, slot) != LEDGER_NONE)
                        return true;
        return false;
}

static void share_send(struct trim_share *share, struct ranges *ranges, uint64_t n_bytes, uint64_t now_ms)
{
        struct session *s = share->session;
        struct trim_quota *t = share->share->quota->trim.state;
        Bfcd__Event event = BFCD__EVENT__INIT;
        Bfcd__Trim message = BFCD__TRIM__INIT;

        recall_begin(&share->recall, RECALL_TRIM, s, now_ms);
        event.sequence = recall_number(&share->recall);
        message.partition = (uint32_t)(share->share - s->shares);
        message.n_bytes = n_bytes;
        message.n_ranges = ranges->n;
        message.ranges = ranges->pointers;
        event.body_case = BFCD__EVENT__BODY_TRIM;
        event.trim = &message;
        t->n_open++;
        t->sent_ms = now_ms;
        trim_quota_list(share->share->quota);
        s->ops->send_event(s->userdata, &event);
}

/* It has nothing more for the requests that wait already. */
static void share_mark_spent(struct trim_share *share)
{
        share->spent_clock = ++share->session->broker->recalls.trim_clock;
}

bool trim_send(struct trim_share *share, uint64_t n_bytes, uint64_t now_ms)
{
        struct ranges ranges;

        if (!share->session || share->recall.session || share->bytes_held == 0 || n_bytes == 0)
                return false;
        share_find_ranges(share, &ranges);
        if (ranges.n > 0)
                share_send(share, &ranges, n_bytes, now_ms);
        else if (share->cursor == 0)
                share_mark_spent(share);
        return ranges.n > 0;
}

/* ---- selection ----------------------------------------------------------- */

/* The sessions to ask, those with the most idle memory first. */
struct round {
        size_t n, max;
        struct trim_share *best[TRIM_MAX_ROUND];
        uint64_t idle[TRIM_MAX_ROUND];
        size_t n_reads; /* of pages */
        uint64_t now_ms;
};

/* Idle bytes by the client's statistics, which are only a hint. To read them takes system calls, so they
 * are remembered for a moment, and a round reads a few. */
static uint64_t share_idle(struct round *r, struct trim_share *share)
{
        uint64_t held = share->share->usage.bytes;

        if (share->hint_ms == 0 || r->now_ms - share->hint_ms >= TRIM_HINT_MS) {
                if (r->n_reads == TRIM_MAX_READS)
                        return held;
                r->n_reads++;
                share->hint =
                        session_idle_hint(share->session, (uint32_t)(share->share - share->session->shares));
                share->hint_ms = r->now_ms;
        }
        return min_u64(share->hint, held);
}

static void round_add(struct round *r, struct trim_share *share)
{
        uint64_t idle = share_idle(r, share);
        size_t i = r->n < r->max ? r->n++ : r->max;

        for (; i > 0 && r->idle[i - 1] < idle; i--) {
                if (i == r->max)
                        continue;
                r->best[i] = r->best[i - 1];
                r->idle[i] = r->idle[i - 1];
        }
        if (i == r->max)
                return;
        r->best[i] = share;
        r->idle[i] = idle;
}

static bool share_can_trim(const struct trim_share *share, const struct quota_asking *asking)
{
        return share->session && !share->recall.session && share->bytes_held > 0 &&
               share->spent_clock < asking->clock;
}

/* Returns the cost in looks. */
static size_t round_look_at(struct round *r, struct trim_share *share, const struct quota_asking *asking)
{
        size_t n_reads = r->n_reads;
        struct trim_quota *t;

        if (!share_can_trim(share, asking))
                return 1;
        t = share->share->quota->trim.state;
        if (share->empty_since == t->n_changes)
                return 1;
        if (share_has_ranges(share)) {
                round_add(r, share);
        } else {
                share->empty_since = t->n_changes;
                t->n_empty++;
        }
        return 1 + share->n_slots / TRIM_SLOTS_A_LOOK + (r->n_reads - n_reads) * TRIM_LOOKS_A_READ;
}

/* Looks at sessions of a quota for about n_looks, at one at least; these come last the next time.
 * Returns how many sessions it looked at; SIZE_MAX: at all. */
static size_t round_look(struct round *r, struct trim_quota *t, const struct quota_asking *asking,
                         size_t n_looks)
{
        size_t n = 0;

        if (t->n_empty >= t->n_shares)
                return SIZE_MAX;
        for (size_t n_spent = 0; n < t->n_shares && (n == 0 || n_spent < n_looks); n++) {
                struct trim_share *share = TAILQ_FIRST(&t->shares);

                TAILQ_REMOVE(&t->shares, share, of_quota);
                TAILQ_INSERT_TAIL(&t->shares, share, of_quota);
                n_spent += round_look_at(r, share, asking);
        }
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
static uint64_t trim_bytes(const struct trim_share *share, const struct quota *q,
                           const struct quota_asking *asking, const struct account *scope, uint64_t missing)
{
        const struct quota *its = share->share->quota;
        uint64_t n_bytes = its == q ? missing : min_u64(missing, account_surplus(&its->account, scope));

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
        for (size_t i = 0; i < s->n_shares; i++)
                if (s->shares[i].quota == q)
                        return share_can_trim(&s->shares[i].trim, &first->asking) &&
                               trim_send(&s->shares[i].trim,
                                         trim_bytes(&s->shares[i].trim, q, &first->asking, scope, missing),
                                         now_ms);
        return false;
}

/* Returns how many sessions could be asked. *ret_looked: it looked at so many of each quota; SIZE_MAX: at
 * all. */
static size_t trim_ask_round(struct quota *q, struct quota_request *first, const struct account *scope,
                             uint64_t missing, size_t n_looks, uint64_t now_ms, size_t *ret_looked)
{
        unsigned n_round = first->asking.n_round;
        struct round round = { .max = n_round < 4 ? (size_t)1 << n_round : TRIM_MAX_ROUND, .now_ms = now_ms };
        struct quota *each;

        *ret_looked = SIZE_MAX;
        for (each = next_asked(q, scope, NULL); each; each = next_asked(q, scope, each)) {
                size_t n = round_look(&round, each->trim.state, &first->asking, n_looks);

                *ret_looked = n < *ret_looked ? n : *ret_looked;
        }
        for (size_t i = 0; i < round.n; i++)
                (void)trim_send(round.best[i], trim_bytes(round.best[i], q, &first->asking, scope, missing),
                                now_ms);
        return round.n;
}

bool trim_ask(struct broker *b, struct quota *q, struct quota_request *first, const struct account *scope,
              uint64_t missing)
{
        struct quota_asking *asking = &first->asking;
        uint64_t now_ms = clock_ms();
        struct survey survey;
        size_t n_looks, n_looked;

        survey_make(q, scope, now_ms, &survey);
        if (survey.n_quotas == 0)
                return false;
        if (asking->clock == 0)
                asking->clock = ++b->recalls.trim_clock;
        if (survey.is_fresh)
                return true;
        n_looks = TRIM_MAX_LOOKS / survey.n_quotas;
        if (trim_ask_requester(q, first, scope, missing, now_ms) ||
            trim_ask_round(q, first, scope, missing, n_looks, now_ms, &n_looked) > 0) {
                asking->n_vain = 0;
                asking->n_round++;
                q->queue.look_again = true; /* whether it was sent or not, there may be more to ask */
                return true;
        }
        /* The next call looks at further sessions. */
        if (n_looked < survey.n_most && (asking->n_vain += (unsigned)n_looked) < survey.n_most) {
                q->queue.look_again = true;
                return true;
        }
        asking->n_vain = 0;
        return survey.n_open > 0;
}

bool trim_is_asked(const struct quota *q, const struct session *s)
{
        for (size_t i = 0; i < s->n_shares; i++)
                if (s->shares[i].quota == q)
                        return s->shares[i].trim.recall.has_deadline;
        return false;
}

void trim_excess(struct broker *b, struct quota *q, uint64_t n_bytes)
{
        struct quota_asking asking = { .clock = ++b->recalls.trim_clock };
        uint64_t now_ms = clock_ms();
        struct round round = { .max = TRIM_MAX_ROUND, .now_ms = now_ms };

        if (q->trim.state)
                (void)round_look(&round, q->trim.state, &asking, TRIM_MAX_LOOKS);
        for (size_t i = 0; i < round.n; i++)
                (void)trim_send(round.best[i], n_bytes, now_ms);
}

/* ---- answers and missed deadlines ---------------------------------------- */

static void share_end_recall(struct trim_share *share)
{
        share->share->quota->trim.state->n_open -= share->recall.has_deadline;
        recall_end(&share->recall);
}

void trim_answer(struct recall *r)
{
        struct trim_share *share = (struct trim_share *)r;
        struct quota *q = share->share->quota;
        bool gave = r->n_freed > 0;
        bool was_overdue = recall_is_overdue(r);

        share_end_recall(share);
        if (was_overdue)
                share_count_responsive(share, q, true);
        if (gave)
                share->cursor = 0;
        else if (share->cursor == 0)
                share_mark_spent(share);
        quota_note_answer(q, gave);
}

void trim_end(struct session *s)
{
        for (size_t i = 0; i < s->n_shares; i++) {
                struct trim_share *share = &s->shares[i].trim;
                struct quota *q = s->shares[i].quota;

                if (!share->session)
                        continue;
                if (share_is_responsive(share))
                        share_count_responsive(share, q, false);
                if (share->recall.session)
                        share_end_recall(share);
                share->session = NULL;
                TAILQ_REMOVE(&q->trim.state->shares, share, of_quota);
                q->trim.state->n_shares--;
                trim_quota_change(q);
                trim_quota_drop(q);
                quota_note_answer(q, false);
        }
}

void trim_share_free(struct session_share *session_share)
{
        assert(!session_share->trim.session);
        free(session_share->trim.n_own);
        session_share->trim.n_own = NULL;
        session_share->trim.n_slots = 0;
}

void trim_miss(struct recall *r)
{
        struct trim_share *share = (struct trim_share *)r;
        struct quota *q = share->share->quota;

        q->trim.state->n_open--;
        share_count_responsive(share, q, false);
        quota_note_answer(q, false);
}

/* ---- the check ----------------------------------------------------------- */

static const char *check_slots(const struct quota *q)
{
        const struct trim_quota *t = q->trim.state;

        for (size_t i = 0; i < t->n_slots; i++) {
                const struct trim_share *share;
                uint32_t n_responsive = 0;

                TAILQ_FOREACH(share, &t->shares, of_quota)
                if (share_is_responsive(share) && i < share->n_slots)
                        n_responsive += share->n_own[i];
                if (n_responsive != t->slots[i].n_responsive || n_responsive > t->slots[i].n_all)
                        return "blocks are counted wrongly in a slot";
        }
        return NULL;
}

static const char *check_quota(const struct quota *q)
{
        const struct trim_quota *t = q->trim.state;
        const struct trim_share *share;
        size_t n_shares = 0, n_open = 0;

        if (!t)
                return NULL;
        TAILQ_FOREACH(share, &t->shares, of_quota)
        {
                n_shares++;
                n_open += share->recall.has_deadline;
                if (share->session->state != SESSION_LIVE || !session_has_events(share->session))
                        return "a session that does not answer is in the list of sessions to ask";
                if (share->recall.session && share->recall.session != share->session)
                        return "a session has another session's Trim";
        }
        if (!LIST_HAS(q, trim.of_asked) && (t->n_empty < t->n_shares || t->n_open > 0))
                return "a quota with sessions to ask is not listed";
        if (n_shares != t->n_shares || n_open != t->n_open)
                return "a quota's count of sessions to ask or of open Trims is wrong";
        return check_slots(q);
}

int trim_check(const struct broker *b, const char **ret_why)
{
        const char *why = recall_check(b, RECALL_TRIM);

        for (size_t i = 0; !why && i < b->n_tenants; i++)
                for (size_t k = 0; !why && k < b->tenants[i].n_quotas; k++)
                        why = check_quota(b->tenants[i].quotas[k]);
        if (why)
                *ret_why = why;
        return why ? -EBADMSG : 0;
}
