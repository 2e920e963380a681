/* What clients could return; see trim.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/trim.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/list.h"
#include "daemon/base/number.h"

struct trim_slot { /* blocks */
        uint32_t n_all;
        uint32_t n_responsive;
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

void trim_quota_list(struct quota *q)
{
        LIST_ADD(&q->partition->lists.asked, q, trim.of_asked);
}

void trim_quota_unlist(struct quota *q)
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

bool trim_is_responsive(const struct trim_share *share)
{
        return share->asked.session && !recall_is_overdue(&share->asked.recall);
}

void trim_count_responsive(struct trim_share *share, bool responsive)
{
        struct quota *q = share->asked.share->quota;
        struct trim_quota *t = q->trim.state;

        trim_quota_change(q);
        for (size_t i = 0; i < share->n_slots && i < t->n_slots; i++)
                t->slots[i].n_responsive += responsive ? share->n_own[i] : 0u - share->n_own[i];
}

static void share_list(struct session *s, struct session_share *session_share)
{
        struct trim_share *share = &session_share->trim;
        struct quota *q = session_share->quota;

        share->asked.session = s;
        share->asked.share = session_share;
        TAILQ_INSERT_TAIL(&q->trim.state->shares, &share->asked, link);
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
                t->slots[slot].n_responsive += trim_is_responsive(share);
        }
}

void trim_add_block(struct session *s, struct session_share *session_share, uint64_t offset, uint64_t n_bytes)
{
        struct trim_share *share = &session_share->trim;
        struct trim_quota *t = trim_quota_of(session_share->quota);

        if (!t)
                return;
        if (session_has_events(s) && s->state == SESSION_LIVE && !share->asked.session)
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

                if (!session_has_events(s) || share->trim.asked.session || share->usage.bytes == 0 ||
                    !share->quota->trim.state)
                        continue;
                share_list(s, share);
                trim_count_responsive(&share->trim, true);
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
                t->slots[slot].n_responsive -= trim_is_responsive(share);
        }
        t->n_blocks -= of_all && t->n_blocks > 0;
}

void trim_remove_block(struct session_share *session_share, uint64_t offset, uint64_t n_bytes)
{
        struct trim_share *share = &session_share->trim;
        struct quota *q = session_share->quota;

        if (q->trim.state)
                uncount(q, share, offset, n_bytes, true);
        trim_quota_drop(q);
}

void trim_split_block(struct session *s, struct session_share *session_share, uint64_t offset,
                      uint64_t n_bytes, uint64_t at)
{
        if (session_share->quota->trim.state)
                uncount(session_share->quota, &session_share->trim, offset, n_bytes, true);
        trim_add_block(s, session_share, offset, at);
        trim_add_block(s, session_share, offset + at, n_bytes - at);
}

void trim_publish_block(struct session_share *session_share, uint64_t offset, uint64_t n_bytes)
{
        if (session_share->quota->trim.state)
                uncount(session_share->quota, &session_share->trim, offset, n_bytes, false);
}

void trim_remove_shared_block(struct quota *q, uint64_t offset, uint64_t n_bytes)
{
        if (q->trim.state)
                uncount(q, NULL, offset, n_bytes, true);
        trim_quota_drop(q);
}

void trim_unlist(struct trim_share *share)
{
        struct quota *q = share->asked.share->quota;

        share->asked.session = NULL;
        TAILQ_REMOVE(&q->trim.state->shares, &share->asked, link);
        q->trim.state->n_shares--;
        trim_quota_change(q);
        trim_quota_drop(q);
}

/* ---- ranges --------------------------------------------------------------- */

/* False: there is no room for one more. */
static bool ranges_add(struct trim_ranges *r, const struct arena *arena, const struct ledger_extent *extent,
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
static void ranges_sort(struct trim_ranges *r)
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
        return (size_t)min_u64(share->n_slots, share->asked.share->quota->trim.state->n_slots);
}

/* The slot's extent, if it would become wholly free when the session and all others that answer return
 * their blocks; else LEDGER_NONE. */
static uint32_t share_extent(const struct trim_share *share, size_t slot)
{
        const struct quota *q = share->asked.share->quota;
        const struct trim_slot *counts = &q->trim.state->slots[slot];

        return share->n_own[slot] > 0 && counts->n_responsive == counts->n_all
                       ? arena_slot_extent(q->arena, slot)
                       : LEDGER_NONE;
}

void trim_find_ranges(struct trim_share *share, struct trim_ranges *ret)
{
        const struct quota *q = share->asked.share->quota;
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

bool trim_has_ranges(const struct trim_share *share)
{
        size_t n = share_n_slots(share);

        for (size_t slot = 0; slot < n; slot++)
                if (share_extent(share, slot) != LEDGER_NONE)
                        return true;
        return false;
}

/* ---- who can be pressed ---------------------------------------------------- */

void trim_list_pressed(struct session *s, struct session_share *session_share)
{
        struct recall_share *asked = &session_share->pressure.asked;
        struct partition *p = session_share->quota->partition;

        if (!session_has_events(s) || s->state != SESSION_LIVE || asked->session)
                return;
        asked->session = s;
        asked->share = session_share;
        TAILQ_INSERT_TAIL(&p->lists.pressed, asked, link);
        p->lists.n_pressed++;
}

void trim_unlist_pressed(struct session_share *session_share)
{
        struct recall_share *asked = &session_share->pressure.asked;
        struct partition *p = session_share->quota->partition;

        asked->session = NULL;
        TAILQ_REMOVE(&p->lists.pressed, asked, link);
        p->lists.n_pressed--;
}

void trim_share_free(struct session_share *session_share)
{
        assert(!session_share->trim.asked.session);
        free(session_share->trim.n_own);
        session_share->trim.n_own = NULL;
        session_share->trim.n_slots = 0;
}

/* ---- the check ----------------------------------------------------------- */

static const char *check_slots(const struct quota *q)
{
        const struct trim_quota *t = q->trim.state;

        for (size_t i = 0; i < t->n_slots; i++) {
                const struct recall_share *asked;
                uint32_t n_responsive = 0;

                TAILQ_FOREACH(asked, &t->shares, link)
                {
                        const struct trim_share *share = (const struct trim_share *)asked;

                        if (trim_is_responsive(share) && i < share->n_slots)
                                n_responsive += share->n_own[i];
                }
                if (n_responsive != t->slots[i].n_responsive || n_responsive > t->slots[i].n_all)
                        return "blocks are counted wrongly in a slot";
        }
        return NULL;
}

const char *trim_check_quota(const struct quota *q)
{
        const struct trim_quota *t = q->trim.state;
        const struct recall_share *asked;
        size_t n_shares = 0, n_open = 0;

        if (!t)
                return NULL;
        TAILQ_FOREACH(asked, &t->shares, link)
        {
                n_shares++;
                n_open += asked->recall.has_deadline;
                if (asked->session->state != SESSION_LIVE || !session_has_events(asked->session))
                        return "a session that does not answer is in the list of sessions to ask";
                if (asked->recall.session && asked->recall.session != asked->session)
                        return "a session has another session's Trim";
        }
        if (!LIST_HAS(q, trim.of_asked) && (t->n_empty < t->n_shares || t->n_open > 0))
                return "a quota with sessions to ask is not listed";
        if (n_shares != t->n_shares || n_open != t->n_open)
                return "a quota's count of sessions to ask or of open Trims is wrong";
        return check_slots(q);
}

const char *trim_check_partition(const struct partition *p)
{
        const struct recall_share *asked;
        size_t n = 0;

        TAILQ_FOREACH(asked, &p->lists.pressed, link)
        {
                n++;
                if (asked->session->state != SESSION_LIVE || !session_has_events(asked->session))
                        return "a session that does not answer is in the list of sessions to press";
                if (asked->recall.session && asked->recall.session != asked->session)
                        return "a session has another session's Pressure";
        }
        return n != p->lists.n_pressed ? "a partition's count of sessions to press is wrong" : NULL;
}
