/* The ladder: how room is made for the first in line; see quota.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/ladder.h"

#include <errno.h>

#include "daemon/clock.h"
#include "daemon/number.h"

#define LADDER_AGAIN_MS 500u
#define LADDER_EXPIRES  16u    /* quotas whose kept memory is given back in one call */
#define LADDER_CALM_MS  10000u /* so long without a claim, and the next is as good as the first */

/* Nobody grows with what is held. */
void ladder_unhold(struct quota *q)
{
        q->trade_bytes = 0;
        if (q->held.n_bytes == 0)
                return;
        charge_drop(&q->held);
        partition_make_due(q->partition);
}

/* ---- who has something to give -------------------------------------------- */

void ladder_note_free(struct quota *q)
{
        if (q->may_have_free)
                return;
        q->may_have_free = true;
        TAILQ_INSERT_TAIL(&q->partition->freed, q, of_freed);
}

static void ladder_has_no_free(struct quota *q)
{
        if (q->may_have_free)
                TAILQ_REMOVE(&q->partition->freed, q, of_freed);
        q->may_have_free = false;
}

/* After the arena has begun or ended to give back extents. */
static void ladder_note_releasing(struct quota *q)
{
        bool is_releasing = arena_retiring_bytes(q->arena) > 0;

        if (is_releasing && !q->is_releasing)
                TAILQ_INSERT_TAIL(&q->partition->releasing, q, of_releasing);
        else if (q->is_releasing && !is_releasing)
                TAILQ_REMOVE(&q->partition->releasing, q, of_releasing);
        q->is_releasing = is_releasing;
}

void ladder_leave_lists(struct quota *q)
{
        ladder_has_no_free(q);
        if (q->is_releasing)
                TAILQ_REMOVE(&q->partition->releasing, q, of_releasing);
        q->is_releasing = false;
}

/* So many bytes are being given back: they are free no more. Returns them. */
static uint64_t quota_begin_release(struct quota *q, uint64_t n_bytes)
{
        ladder_note_releasing(q);
        if (n_bytes > 0)
                quota_publish(q);
        return n_bytes;
}

static uint64_t quota_release(struct quota *q, uint64_t want_bytes, const struct bfc_growth *keep);
static bool ladder_recall_kept(struct quota *q, struct quota_request *request);

/* Whether extents that are kept may be what the device lacked: memory of the machine or of the control group,
 * reserved pages, fds, or places in the store. */
static bool ladder_may_help(int result)
{
        return result == -ENOMEM || result == -ENOBUFS || result == -ENOSPC || result == -EMFILE ||
               result == -EXFULL;
}

static void quota_grown(void *userdata, int result, bfc_handle handle, uint64_t offset)
{
        struct quota *q = userdata;
        struct quota_request *request = q->growing_for;

        q->growing = false;
        q->growing_for = NULL;
        if (request && result == 0 && q->partition->is_draining)
                result = -EBUSY;
        else if (request && result == 0 && q->n_blocks >= q->max_blocks)
                result = -EDQUOT; /* others that passed by took the last ones */
        else if (request && result < 0)
                request->device_failed = true;
        else if (request)
                quota_count_alloc(q, request->n_bytes);

        if (handle != 0 && (!request || result < 0)) {
                (void)arena_dealloc(q->arena, handle);
                handle = 0;
        }
        ladder_note_free(q);
        quota_note_change(q);
        quota_publish(q);
        if (request && !(ladder_may_help(result) && ladder_recall_kept(q, request)))
                quota_complete(request, result, handle, offset);
        quota_make_due(q);
        if (q->partition->is_draining)
                (void)quota_release(q, UINT64_MAX, NULL);
        ladder_settle(q);
}

/* ---- who comes first in the partition -------------------------------------- */

void ladder_claim(struct quota_request *request, uint64_t n_bytes)
{
        struct partition *p = request->quota->partition;
        struct quota *q;

        if (request->claim == 0 && n_bytes > 0) {
                uint64_t now = clock_ms();

                p->n_claims++;
                if (request->quota->claim_ms == 0 || now - request->quota->unclaimed_ms >= LADDER_CALM_MS)
                        request->quota->claim_ms = now;
        }
        if (request->claim > 0 && n_bytes == 0) {
                request->quota->unclaimed_ms = clock_ms();
                p->n_claims--;
                TAILQ_FOREACH(q, &p->waiting, of_waiting)
                if (q != request->quota) /* those behind it */
                        quota_make_due(q);
        }
        p->claimed_bytes += n_bytes - request->claim;
        request->claim = n_bytes;
}

/* Its first in line has waited for a second beyond all steps, or its requests, one after the other,
 * have had claims for as long as that can take. */
static bool quota_claim_is_aged(const struct quota *q, uint64_t now)
{
        return quota_first_is_aged(q, now) ||
               now - q->claim_ms >= LADDER_STEPS * q->partition->reclaim_timeout_ms + LADDER_AGED_MS;
}

/* now: those that are aged are not counted; 0: all are. */
static uint64_t partition_claims_before(const struct quota_request *request, uint64_t now)
{
        const struct partition *p = request->quota->partition;
        const struct quota *q;
        uint64_t n_bytes = 0;

        if (p->n_claims == 0)
                return 0;
        TAILQ_FOREACH(q, &p->waiting, of_waiting)
        {
                const struct quota_request *first = TAILQ_FIRST(&q->waiting);

                if (q != request->quota && first->ticket < request->ticket && first->claim > 0 &&
                    (now == 0 || !quota_claim_is_aged(q, now)))
                        n_bytes += first->claim;
        }
        return n_bytes;
}

uint64_t ladder_claims_before(const struct quota_request *request)
{
        return partition_claims_before(request, 0);
}

/* Whether n_bytes may be charged now for this request, with so much of the partition for others;
 * fails as account_probe() does. What is free in the partition is for who has waited the
 * longest; what the reserve keeps is there whoever waits. *ret_pool_bytes: how much of the
 * partition's it would take. */
static int ladder_probe(const struct quota_request *request, uint64_t n_bytes, uint64_t claims,
                        uint64_t *ret_missing_bytes, uint64_t *ret_pool_bytes)
{
        const struct account *a = &request->quota->account;
        const struct pool *pool = a->pool;
        uint64_t after = a->charged_bytes + n_bytes;
        uint64_t room = pool->limit_bytes - min_u64(pool->limit_bytes, pool->committed_bytes);
        int r = account_probe(a, n_bytes, ret_missing_bytes);

        *ret_pool_bytes = max_u64(after, a->reserve_bytes) - max_u64(a->charged_bytes, a->reserve_bytes);
        if (r == -EDQUOT || *ret_pool_bytes == 0)
                return r;
        room -= min_u64(room, claims);
        if (*ret_pool_bytes <= room)
                return 0;
        *ret_missing_bytes = *ret_pool_bytes - room;
        return -ENOMEM;
}

/* ---- growing --------------------------------------------------------------- */

/* Holds at least n_bytes for the growth of the first in line; false: they are not there. */
static bool quota_hold(struct quota *q, uint64_t n_bytes)
{
        struct charge more;
        uint64_t missing;

        if (n_bytes <= q->held.n_bytes)
                return true;
        if (quota_charge(q, n_bytes - q->held.n_bytes, &more, &missing) < 0)
                return false;
        charge_join(&q->held, &more);
        return true;
}

/* Nobody who has waited longer is to have that. */
static bool quota_may_hold(const struct quota *q, uint64_t n_bytes)
{
        const struct quota_request *first = TAILQ_FIRST(&q->waiting);
        uint64_t missing, of_pool;

        return n_bytes <= q->held.n_bytes ||
               ladder_probe(first, n_bytes - q->held.n_bytes, ladder_claims_before(first), &missing,
                            &of_pool) == 0;
}

void ladder_end_recall(struct quota *q, bool is_over)
{
        if (!q->is_recalled || !is_over)
                return;
        q->is_recalled = false;
        q->partition->keepers->n_recalled--;
}

/* What was given back is uncharged by now, in this very turn of the loop: nobody else had it.
 * Less than n_bytes is where the device did not take all of it back. */
static void quota_released(void *userdata, uint64_t n_bytes)
{
        struct quota *q = userdata;
        uint64_t traded = min_u64(n_bytes, q->trade_bytes);

        quota_note_change(q);
        ladder_note_releasing(q);
        ladder_end_recall(q, arena_leaving_bytes(q->arena) == 0);
        q->trade_bytes -= traded;
        (void)quota_hold(q, q->held.n_bytes + traded);
        ladder_settle(q);
        partition_make_due(q->partition);
}

/* What was made in advance stays, and what a successor is to have. */
static bool quota_may_release(const struct quota *q)
{
        return !q->is_left && (!q->partition->preallocate || q->is_removed || q->partition->is_draining);
}

/* Starts giving back; returns how many bytes. */
static uint64_t quota_release(struct quota *q, uint64_t want_bytes, const struct bfc_growth *keep)
{
        if (!quota_may_release(q))
                return 0;
        return quota_begin_release(q, arena_release(q->arena, want_bytes, keep, quota_released, q));
}

/* How many bytes of wholly free extents it may keep now. */
static uint64_t quota_may_keep(const struct quota *q)
{
        return q->kept_until_ms != 0 ? q->keep_bytes : 0;
}

int ladder_resume_release(struct quota *q)
{
        int r = arena_resume_release(q->arena, quota_released, q);

        ladder_note_releasing(q);
        return r;
}

/* What is charged for something other than extents that can be used or given back. */
static uint64_t quota_unusable_bytes(const struct quota *q)
{
        return arena_retiring_bytes(q->arena) + arena_escaped_bytes(q->arena) + q->closed.n_bytes +
               q->held.n_bytes;
}

void ladder_settle(struct quota *q)
{
        uint64_t n_kept = quota_may_keep(q);

        if (q->n_sessions > 0 || q->growing || !quota_may_release(q) ||
            (n_kept > 0 && q->account.charged_bytes <= n_kept + quota_unusable_bytes(q)))
                return;
        (void)quota_begin_release(q, arena_release_beyond(q->arena, n_kept, quota_released, q));
}

/* Bytes of this quota on their way back, late ones not counted. */
static uint64_t quota_coming(const struct quota *q)
{
        return arena_leaving_bytes(q->arena) + arena_awaited_bytes(q->arena);
}

/* What a quota holds beyond what its reserve keeps anyway: only that can come
 * back to its pool. */
uint64_t quota_surplus(const struct quota *q)
{
        const struct account *a = &q->account;

        return a->charged_bytes > a->reserve_bytes ? a->charged_bytes - a->reserve_bytes : 0;
}

/* Of what the first in line is given back for, what is still on its way. */
static uint64_t quota_traded(const struct quota *q)
{
        return min_u64(q->trade_bytes, quota_coming(q));
}

/* What comes back to the pool. */
static uint64_t partition_coming(struct partition *p)
{
        const struct quota *each;
        uint64_t n_bytes = 0;

        TAILQ_FOREACH(each, &p->releasing, of_releasing)
        {
                p->n_visits++;
                n_bytes += min_u64(quota_coming(each), quota_surplus(each));
        }
        return n_bytes;
}

/* The same but for what q trades. */
static uint64_t partition_coming_beside(const struct quota *q)
{
        uint64_t sum = partition_coming(q->partition); /* first: what is late meanwhile counts no more */
        uint64_t coming = quota_coming(q), surplus = quota_surplus(q);

        return sum - min_u64(coming, surplus) + min_u64(coming - quota_traded(q), surplus);
}

/* What a quota could return to its pool by giving back what is wholly free, not
 * counting what comes anyway. */
static uint64_t quota_yield(struct quota *q)
{
        uint64_t surplus = quota_surplus(q), coming = min_u64(quota_coming(q), surplus), n_free;

        q->partition->n_visits++;
        if (q->partition->preallocate || (surplus == coming && q->account.charged_bytes > 0))
                return 0;
        n_free = arena_releasable(q->arena, NULL);
        if (n_free == 0)
                ladder_has_no_free(q);
        return min_u64(n_free, surplus - coming);
}

/* So many bytes are given back for a growth, which gets the room. */
static void quota_note_trade(struct quota *q, const struct bfc_growth *plan, uint64_t n_bytes)
{
        q->trade_bytes = min_u64(q->trade_bytes + n_bytes,
                                 plan->new_bytes - min_u64(plan->new_bytes, q->held.n_bytes));
}

/* Starts giving back for a growth; returns how many bytes. */
static uint64_t quota_give_for(struct quota *q, const struct bfc_growth *plan, uint64_t want_bytes)
{
        uint64_t n_bytes = quota_release(q, want_bytes, plan);

        quota_note_trade(q, plan, n_bytes);
        return n_bytes;
}

/* Trades wholly free extents, so many bytes more of them or as many as there are, for those of
 * the plan. What they do not pay for is charged now. False: nothing to trade, or not enough.
 * Nobody is asked who would not let go in time: it is no reason to end a session. */
static bool quota_trade(struct quota *q, const struct bfc_growth *plan, uint64_t want_bytes)
{
        uint64_t n_bytes = q->partition->preallocate ? 0 : arena_releasable_soon(q->arena, plan);
        uint64_t traded;

        n_bytes = min_u64(n_bytes, want_bytes);
        traded = min_u64(plan->new_bytes, quota_traded(q) + n_bytes);
        if (n_bytes == 0 || !quota_may_hold(q, plan->new_bytes - traded) ||
            !quota_hold(q, plan->new_bytes - traded))
                return false;
        n_bytes = quota_begin_release(q, arena_release_soon(q->arena, n_bytes, plan, quota_released, q));
        quota_note_trade(q, plan, n_bytes);
        return n_bytes > 0;
}

/* Its own comes back to it, also what its reserve keeps. */
static uint64_t quota_own_yield(const struct quota *q, const struct bfc_growth *plan)
{
        return q->partition->preallocate ? 0 : arena_releasable(q->arena, plan);
}

/* Of a quota whose sessions have been waited for in vain nothing more is expected. */
static bool quota_may_be_asked(const struct quota *q, bool again)
{
        return !again || arena_awaited_bytes(q->arena) == 0;
}

/* The partition misses so many bytes: gives back what nobody uses, the tenant's
 * own first, then its neighbours'. False: it would not be enough. `again`: those who
 * were asked in vain are not. */
static bool quota_reclaim_from_partition(struct quota *q, uint64_t missing, const struct bfc_growth *plan,
                                         bool again)
{
        uint64_t own = quota_may_be_asked(q, again) ? quota_own_yield(q, plan) : 0, sum = own;
        uint64_t n_begun = 0;
        struct quota *other, *next;

        for (other = TAILQ_FIRST(&q->partition->freed); other; other = next) {
                next = TAILQ_NEXT(other, of_freed);
                if (other != q && quota_may_be_asked(other, again))
                        sum += quota_yield(other);
        }
        if (sum < missing)
                return false;

        if (own > 0)
                n_begun = quota_give_for(q, plan, min_u64(missing, own));
        for (other = TAILQ_FIRST(&q->partition->freed); other && n_begun < missing; other = next) {
                bool ask = other != q && quota_may_be_asked(other, again);
                uint64_t yield;

                next = TAILQ_NEXT(other, of_freed);
                yield = ask ? quota_yield(other) : 0;
                if (yield > 0)
                        n_begun += quota_release(other, min_u64(missing - n_begun, yield), NULL);
        }
        return quota_traded(q) + partition_coming_beside(q) > 0; /* none where all are late */
}

/* The first in line waits for others; true: for longer than it is to. */
static bool quota_is_late(struct quota *q)
{
        uint64_t now = clock_ms();

        if (q->blocked_ms == 0)
                quota_set_blocked(q, now);
        return now - max_u64(q->blocked_ms, TAILQ_FIRST(&q->waiting)->since_ms) >
               q->partition->reclaim_timeout_ms;
}

/* Waits for what others give back, for so long and no longer. */
static int quota_wait_for_others(struct quota *q, int refusal)
{
        return quota_is_late(q) ? refusal : 0;
}

/* So many bytes are missing, and on their way. */
static int quota_wait_for_own(struct quota *q, uint64_t missing, int refusal)
{
        /* The device gives back in its own time; sessions get a limited one. */
        return arena_leaving_bytes(q->arena) >= missing ? 0 : quota_wait_for_others(q, refusal);
}

/* Its own limit, or what others' reserves leave it, misses so many bytes. 0: they are on their way. */
static int quota_reclaim(struct quota *q, uint64_t missing, const struct bfc_growth *plan, int refusal)
{
        uint64_t coming =
                quota_coming(q) + arena_late_bytes(q->arena); /* its own it waits for, up to a time */

        if (coming < missing && arena_releasable(q->arena, plan) >= missing - coming)
                coming += quota_give_for(q, plan, missing - coming);
        if (coming < missing && q->n_closing == 0)
                return refusal;
        return quota_wait_for_own(q, missing, refusal);
}

/* The partition misses so many bytes, beyond those that are traded. 0: they are on their way. */
static int quota_reclaim_in_partition(struct quota *q, uint64_t missing, const struct bfc_growth *plan)
{
        struct quota_request *first = TAILQ_FIRST(&q->waiting);
        uint64_t coming = partition_coming_beside(q);

        if (coming < missing && q->partition->n_closing == 0 &&
            !quota_reclaim_from_partition(q, missing - coming, plan, false))
                return -ENOMEM;
        if (!quota_is_late(q))
                return 0;
        /* What did not come may hide what others would give: they are asked as if it never came. */
        if (first->asked_again || !quota_reclaim_from_partition(q, missing, plan, true))
                return -ENOMEM;
        first->asked_again = true;
        quota_set_blocked(q, clock_ms());
        return 0;
}

/* Starts the growth, for which the limits have room; the request is not in line any more. */
static int quota_grow(struct quota *q, struct quota_request *request, const struct bfc_growth *plan)
{
        struct charge charge;
        uint64_t missing;
        int r;

        ladder_unhold(q);
        if (quota_growth_pause_ms(q) > 0) {
                request->device_failed = true;
                return -ECANCELED;
        }
        r = quota_charge(q, plan->new_bytes, &charge, &missing);
        if (r < 0)
                return r;
        partition_tell_standby(q->partition); /* before anything is made */
        r = arena_grow(q->arena, plan, &charge, quota_grown, q);
        if (r < 0) {
                charge_drop(&charge);
                return r;
        }
        if (request->claim > 0)
                q->claim_ms = 0;
        quota_unqueue_served(request);
        q->growing = true;
        q->growing_for = request;
        quota_publish(q); /* the free space that it takes in is spoken for */
        return 0;
}

static int ladder_plan(struct quota *q, const struct quota_request *request, struct bfc_growth *ret)
{
        uint64_t room = account_room(&q->account) + q->held.n_bytes;

        return request->in_extent ? arena_plan_in_extent(q->arena, request->n_bytes, room, ret)
                                  : arena_plan(q->arena, request->n_bytes, room, ret);
}

/* What it takes beside what is held for it. */
static uint64_t growth_need(const struct quota *q, const struct bfc_growth *plan)
{
        return plan->new_bytes - min_u64(plan->new_bytes, q->held.n_bytes);
}

/* How much the request lacks, and of what. */
struct shortage {
        int refusal; /* -EDQUOT: only its own memory helps; -ENOMEM: others' too; 0: nothing is lacking */
        uint64_t missing;
};

/* The steps that ask no session: what is wholly free is given back, or is on its way. */
static int ladder_make_room_by_itself(struct quota *q, struct quota_request *request, struct shortage *ret)
{
        uint64_t need, after, want, traded = quota_traded(q), missing = 0, of_pool;
        uint64_t most = account_attainable(&q->account);
        struct bfc_growth plan;
        bool of_own;
        int r;

        if (request->has_recalled && q->partition->keepers->n_recalled > 0 && !quota_is_late(q))
                return 0;
        r = ladder_plan(q, request, &plan);
        if (r < 0)
                return r;
        if (plan.new_bytes == 0) { /* it fits by now: the next round serves it */
                q->look_again = true;
                return 0;
        }
        if (quota_is_impossible(q, request->n_bytes))
                return -ENOMEM;
        need = growth_need(q, &plan);
        after = q->account.charged_bytes + need;
        r = ladder_probe(request, need, ladder_claims_before(request), &missing, &of_pool);
        of_own = r == -EDQUOT || (r == -ENOMEM && after > most);
        if (r == -ENOMEM && of_own) /* the others have it for good: nothing is claimed of them */
                missing = after - most;
        *ret = (struct shortage){ of_own ? -EDQUOT : r, missing };
        ladder_claim(request, r == -ENOMEM && !of_own ? of_pool : 0);
        want = max_u64(missing, after > q->high_bytes ? after - q->high_bytes : 0);
        if (want > traded && (r < 0 || !quota_is_late(q)) && quota_trade(q, &plan, want - traded))
                return quota_wait_for_others(q, 0); /* from now on */
        if (r == 0)
                return traded > 0 && !quota_is_late(q) ? 0 : quota_grow(q, request, &plan);
        if (of_own)
                return quota_reclaim(q, missing, &plan, r);
        if (traded >= missing)
                return quota_wait_for_own(q, missing, r);
        return quota_reclaim_in_partition(q, missing - traded, &plan);
}

/* What sessions gave is on its way to where it is needed. */
static bool ladder_is_coming(const struct quota *q, const struct quota_request *request, int refusal,
                             uint64_t now)
{
        uint64_t coming = refusal == -EDQUOT ? quota_coming(q) : quota_traded(q) + partition_coming_beside(q);

        return coming > 0 && request->asking.heard_ms != 0 &&
               now - request->asking.heard_ms <= q->partition->reclaim_timeout_ms;
}

/* Asks sessions for what lies idle in them. True: wait for them. */
static bool ladder_ask_sessions(struct quota *q, struct quota_request *request, const struct shortage *lack,
                                uint64_t now)
{
        struct quota_asking *asking = &request->asking;

        if (asking->begun_ms == 0)
                asking->begun_ms = now;
        if (q->trim && now - asking->begun_ms <= q->partition->reclaim_timeout_ms &&
            q->trim(q->userdata, q, request, lack->refusal, lack->missing))
                return true;
        return ladder_is_coming(q, request, lack->refusal, now);
}

/* For as long as the request itself says. Meanwhile more may lie idle than did, so now and then
 * sessions are asked again. */
static bool ladder_queue(struct quota *q, struct quota_request *request, uint64_t now)
{
        if (request->wait_ms == 0)
                return false;
        if (request->queued_ms == 0)
                request->queued_ms = now;
        if (now - request->queued_ms >= request->wait_ms)
                return false;
        if (now - request->asking.begun_ms >= q->partition->reclaim_timeout_ms + LADDER_AGAIN_MS)
                request->asking = (struct quota_asking){ 0 };
        return true;
}

int ladder_last_chance(struct quota *q, struct quota_request *request)
{
        uint64_t need, missing, of_pool;
        struct bfc_growth plan;
        int r = ladder_plan(q, request, &plan);

        if (r < 0)
                return r;
        need = growth_need(q, &plan);
        r = ladder_probe(request, need, partition_claims_before(request, clock_ms()), &missing, &of_pool);
        if (r == 0)
                return quota_grow(q, request, &plan);
        return r == -ENOMEM && account_probe(&q->account, need, &missing) == 0 ? LADDER_WAIT : r;
}

int ladder_make_room(struct quota *q, struct quota_request *request)
{
        struct shortage lack = { 0 };
        int r = ladder_make_room_by_itself(q, request, &lack);
        uint64_t now;

        if (r == 0 || lack.refusal == 0)
                return r;
        now = clock_ms();
        if (q->blocked_ms == 0)
                quota_set_blocked(q, now);
        if (ladder_ask_sessions(q, request, &lack, now) || ladder_queue(q, request, now))
                return 0;
        r = r == -ENOMEM ? ladder_last_chance(q, request) : r;
        return r == LADDER_WAIT ? 0 : r;
}

static void ladder_release_surplus(struct quota *q)
{
        uint64_t kept = q->peaks_bytes + quota_unusable_bytes(q) + quota_may_keep(q);
        uint64_t surplus = q->account.charged_bytes - min_u64(q->account.charged_bytes, kept);

        /* A waiting request uses the free extents, or releases them itself. */
        if (surplus == 0 || q->is_left || q->growing || q->backed || !TAILQ_EMPTY(&q->waiting) ||
            (q->partition->preallocate && !q->is_removed))
                return;
        (void)quota_begin_release(q, arena_release_unmapped(q->arena, surplus, quota_released, q));
}

void quota_release_surplus(struct quota *q)
{
        /* After the last one quota_leave() gives back all but what is kept. */
        if (q->n_sessions > 1 || quota_may_keep(q) == 0)
                ladder_release_surplus(q);
}

void quota_release_idle(struct quota *q)
{
        (void)quota_release(q, UINT64_MAX, NULL);
}

uint64_t quota_release_soon(struct quota *q, uint64_t n_bytes)
{
        if (n_bytes > 0 && quota_may_release(q))
                (void)quota_begin_release(q, arena_release_soon(q->arena, n_bytes, NULL, quota_released, q));
        return quota_coming(q);
}

/* ---- what is kept for the next session ------------------------------------- */

void ladder_unkeep(struct quota *q)
{
        if (q->kept_until_ms != 0)
                TAILQ_REMOVE(&q->partition->keepers->quotas, q, of_kept);
        q->kept_until_ms = 0;
}

void quota_keep(struct quota *q)
{
        struct quota_list *kept = q->partition->keepers ? &q->partition->keepers->quotas : NULL;
        struct quota *before;

        ladder_unkeep(q);
        if (!kept || q->keep_bytes == 0 || q->is_left || q->is_removed || q->partition->preallocate ||
            q->partition->is_draining || q->partition->is_lost)
                return;
        q->kept_until_ms = clock_ms() + q->keep_ms;
        before = TAILQ_LAST(kept, quota_list);
        while (before && before->kept_until_ms > q->kept_until_ms)
                before = TAILQ_PREV(before, quota_list, of_kept);
        if (before)
                TAILQ_INSERT_AFTER(kept, before, q, of_kept);
        else
                TAILQ_INSERT_HEAD(kept, q, of_kept);
}

uint64_t quota_kept_bytes(const struct quota *q)
{
        uint64_t n_kept = quota_may_keep(q), n_free = n_kept > 0 ? arena_releasable(q->arena, NULL) : 0;

        return q->n_sessions == 0 ? n_free : min_u64(n_free, n_kept); /* sessions have free extents, too */
}

uint64_t quota_kept_ms(const struct quota *q)
{
        uint64_t now_ms = q->kept_until_ms != 0 ? clock_ms() : 0;

        return now_ms < q->kept_until_ms ? q->kept_until_ms - now_ms : 0;
}

/* Gives back what is not kept any more. */
static void ladder_release_kept(struct quota *q)
{
        ladder_settle(q);
        if (q->n_sessions > 0)
                ladder_release_surplus(q);
}

void ladder_set_keep(struct quota *q, uint64_t keep_bytes, uint64_t keep_ms)
{
        bool has_changed = keep_bytes != q->keep_bytes || keep_ms != q->keep_ms;

        q->keep_bytes = keep_bytes;
        q->keep_ms = keep_ms;
        if (!has_changed || q->kept_until_ms == 0)
                return;
        quota_keep(q);
        ladder_release_kept(q);
}

static void quota_recall(struct quota *q)
{
        ladder_unkeep(q);
        ladder_release_kept(q);
        if (q->is_recalled || arena_leaving_bytes(q->arena) == 0)
                return;
        q->is_recalled = true;
        q->partition->keepers->n_recalled++;
}

/* The device has no memory for the first in line: what quotas keep of that device is released, and the
 * request is tried again then. False: nothing is kept, or that was done for it before. */
static bool ladder_recall_kept(struct quota *q, struct quota_request *request)
{
        struct keepers *keepers = q->partition->keepers;
        struct quota *each, *next;

        if (!keepers || request->has_recalled)
                return false;
        for (each = TAILQ_FIRST(&keepers->quotas); each; each = next) {
                next = TAILQ_NEXT(each, of_kept);
                if (each->partition->device == q->partition->device)
                        quota_recall(each);
        }
        if (keepers->n_recalled == 0)
                return false;
        request->has_recalled = true;
        request->device_failed = false;
        quota_set_blocked(q, clock_ms());
        quota_enqueue_first(request);
        return true;
}

void quota_expire_kept(struct keepers *keepers)
{
        uint64_t now_ms = clock_ms();
        struct quota *q;

        for (unsigned i = 0; i < LADDER_EXPIRES; i++) {
                q = TAILQ_FIRST(&keepers->quotas);
                if (!q || q->kept_until_ms > now_ms)
                        return;
                ladder_unkeep(q);
                ladder_release_kept(q);
        }
}

/* ---- what there is room for ------------------------------------------------ */

/* Bytes of the pool that new extents may take, once all that is on its way back has arrived. */
static uint64_t partition_room(struct partition *p)
{
        uint64_t room = p->pool.limit_bytes, committed = p->pool.committed_bytes;

        committed -= partition_coming(p);
        room -= min_u64(room, committed);
        return room - min_u64(room, p->claimed_bytes);
}

/* Bytes of new extents that the quota may have. */
static uint64_t quota_growth_room(const struct quota *q)
{
        const struct account *a = &q->account;
        uint64_t after = a->charged_bytes - min_u64(a->charged_bytes, quota_coming(q));
        uint64_t kept = a->reserve_bytes - min_u64(a->reserve_bytes, after); /* by its own reserve */
        uint64_t room;

        if (quota_growth_pause_ms(q) > 0)
                return 0;
        room = min_u64(a->limit_bytes - min_u64(a->limit_bytes, after), kept + partition_room(q->partition));
        return arena_growable(q->arena, room);
}

uint64_t quota_obtainable(struct quota *q)
{
        struct bfc_stats stats;

        if (q->partition->is_draining || q->partition->is_lost || q->n_blocks >= q->max_blocks)
                return 0;
        arena_read_stats(q->arena, &stats);
        return stats.bytes_free + quota_growth_room(q);
}

/* ---- limits that were lowered -------------------------------------------- */

uint64_t quota_excess(const struct quota *q)
{
        return max_u64(account_excess(&q->account),
                       min_u64(pool_excess(&q->partition->pool), quota_surplus(q)));
}

void ladder_shed(struct quota *q)
{
        uint64_t excess = account_excess(&q->account), coming = quota_coming(q);

        if (excess > coming)
                (void)quota_release(q, excess - coming, NULL);
}

void ladder_shed_partition(struct partition *p)
{
        uint64_t excess = pool_excess(&p->pool), n_bytes = partition_coming(p);
        struct quota *q, *next;

        for (q = TAILQ_FIRST(&p->freed); q && n_bytes < excess; q = next) {
                uint64_t yield;

                next = TAILQ_NEXT(q, of_freed);
                yield = quota_yield(q);
                if (yield > 0)
                        n_bytes += quota_release(q, min_u64(excess - n_bytes, yield), NULL);
        }
}
