/* Reclaim steps: how room is made for the first request in a queue; see quota.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/reclaim.h"

#include <errno.h>

#include "daemon/base/clock.h"
#include "daemon/base/list.h"
#include "daemon/memory/upcalls.h"
#include "daemon/base/number.h"

#define RECLAIM_AGAIN_MS 500u
#define RECLAIM_PRESS_MS 100u /* between the ends of Pressures and the next */

/* Drops the charge that is held for a growth. */
void reclaim_uncharge(struct quota *q)
{
        q->growth.own_release_bytes = 0;
        if (q->growth.held.n_bytes == 0)
                return;
        charge_drop(&q->growth.held);
        partition_make_due(q->partition);
}

/* ---- which quotas can release -------------------------------------------- */

void reclaim_note_free(struct quota *q)
{
        LIST_ADD(&q->partition->lists.freed, q, lists.of_freed);
}

/* After the arena has begun or ended to release extents. */
static void reclaim_list_releasing(struct quota *q)
{
        if (arena_retiring_bytes(q->arena) + arena_ended_bytes(q->arena) > 0)
                LIST_ADD(&q->partition->lists.releasing, q, lists.of_releasing);
        else
                LIST_DROP(&q->partition->lists.releasing, q, lists.of_releasing);
}

uint64_t quota_note_release(struct quota *q, uint64_t n_bytes)
{
        reclaim_list_releasing(q);
        if (n_bytes > 0)
                quota_publish(q);
        return n_bytes;
}

static uint64_t quota_release(struct quota *q, uint64_t want_bytes, const struct bfc_growth *keep);

static void quota_grown(void *userdata, int result, bfc_handle handle, uint64_t offset)
{
        struct quota *q = userdata;
        struct quota_request *request = q->growth.request;
        bfc_handle wakes = q->growth.wakes;

        /* The quota is free for the next growth before any callback runs, since that can queue a request. */
        q->growth.is_running = false;
        q->growth.request = NULL;
        q->growth.wakes = 0;

        /* The queue was served meanwhile, so what the request was promised can be gone. */
        if (request && result == 0 && q->partition->is_draining)
                result = -EBUSY;
        else if (request && result == 0 && wakes != 0)
                quota_count_woken(q, request->n_bytes);
        else if (request && result == 0 && quota_without_block(q))
                result = -EDQUOT; /* others that passed by took the last ones */
        else if (request && result < 0)
                request->device_failed = true;
        else if (request)
                quota_count_alloc(q, request->n_bytes);

        /* No request takes the block: its extents serve others, or are released like any free ones. */
        if (handle != 0 && (!request || result < 0)) {
                if (wakes == 0)
                        (void)arena_dealloc(q->arena, handle);
                else
                        arena_wake_undo(q->arena, handle);
                quota_release_exact(q);
                reclaim_list_releasing(q);
                handle = 0;
        }

        /* The page shows the growth before the client has its reply. The rest of the new extents can serve
         * others. */
        reclaim_note_free(q);
        quota_note_change(q);
        quota_publish(q);
        if (request)
                quota_complete(request, result, handle, offset);
        quota_make_due(q);
        if (q->partition->is_draining)
                (void)quota_release(q, UINT64_MAX, NULL);
        reclaim_release_unused(q);
}

/* ---- what a request needs --------------------------------------------------- */

struct reclaim_need {
        uint64_t missing;
        struct account *scope; /* which lacks it, of its own or above; NULL: none does */
        uint64_t takes;        /* of this account */
};

/* Whether an account that others share has the room that the request needs there, beside what requests that waited
 * longer claim of it. */
static bool has_room(const struct quota_request *request, struct account *a, uint64_t n_bytes, uint64_t now,
                     struct reclaim_need *ret)
{
        uint64_t room = excess_u64(a->limit_bytes, a->committed_bytes);
        uint64_t takes = account_takes_of(&request->quota->account, a, n_bytes);

        room -= min_u64(room, takes > 0 ? reclaim_claims_before(request, a, now) : 0);
        if (takes == 0 || takes <= room)
                return true;
        *ret = (struct reclaim_need){ takes - room + excess_u64(a->committed_bytes, a->limit_bytes), a,
                                      takes };
        return false;
}

/* Whether n_bytes may be charged now for this request, beside claims of other requests (now: as of
 * reclaim_claims_before()); fails as account_probe() does. What is free in an account is for the request that has waited
 * the longest; what reserves keep is available to all. */
static int reclaim_probe(const struct quota_request *request, uint64_t n_bytes, uint64_t now,
                         struct reclaim_need *ret)
{
        struct account *a = &request->quota->account, *shared = reclaim_shared_account(request->quota);
        int r = account_probe(a, n_bytes, &ret->missing);

        /* A limit that the quota shares with no other request refuses first: claims do not matter there. */
        ret->scope = NULL;
        if (r == -EDQUOT && account_short_of(a, n_bytes) != shared) {
                ret->scope = a;
                return r;
        }

        /* Then the tenant's quota and the partition, in this order. Bytes that a guarantee covers are taken of neither. */
        if (shared && !has_room(request, shared, n_bytes, now, ret))
                return -EDQUOT;
        return has_room(request, &request->quota->partition->pool, n_bytes, now, ret) ? 0 : -ENOMEM;
}

/* ---- growing --------------------------------------------------------------- */

/* Holds at least n_bytes for the next growth; false: they are not available. */
static bool quota_hold(struct quota *q, uint64_t n_bytes)
{
        struct charge more;
        uint64_t missing;

        if (n_bytes <= q->growth.held.n_bytes)
                return true;
        if (quota_charge(q, n_bytes - q->growth.held.n_bytes, &more, &missing) < 0)
                return false;
        charge_join(&q->growth.held, &more);
        return true;
}

/* What was released is uncharged by now, in this turn of the loop: no other quota could take it. It is
 * less than n_bytes where the device did not return all of it. */
void quota_on_uncharged(void *userdata, uint64_t n_bytes)
{
        struct quota *q = userdata;
        uint64_t own_released = min_u64(n_bytes, q->growth.own_release_bytes), now = clock_ms();

        quota_note_change(q);
        reclaim_list_releasing(q);

        /* What was released for the quota's own growth stays charged, so that no other quota takes it. Others
         * get the rest, and only the rest counts as returned to the partition. */
        q->growth.own_release_bytes -= own_released;
        returns_add(&q->returns, n_bytes, now);
        returns_add(&q->partition->returns, n_bytes - own_released, now);
        (void)quota_hold(q, q->growth.held.n_bytes + own_released);

        reclaim_release_unused(q);
        partition_make_due(q->partition);
}

/* What was made in advance stays, and what a successor is to have. While the ledger is read, there are no sessions
 * yet that could be asked to unmap an extent: restore_sessions() releases what is free. */
static bool quota_may_release(const struct quota *q)
{
        return !q->partition->up.is_inherited &&
               (!q->partition->preallocate || q->is_removed || q->partition->is_draining);
}

/* Begins to release; returns how many bytes. */
static uint64_t quota_release(struct quota *q, uint64_t want_bytes, const struct bfc_growth *keep)
{
        if (!quota_may_release(q))
                return 0;
        return quota_note_release(q, arena_release(q->arena, want_bytes, keep, quota_on_uncharged, q));
}

int reclaim_resume_release(struct quota *q)
{
        int r = arena_resume_release(q->arena, quota_on_uncharged, q);

        reclaim_list_releasing(q);
        return r;
}

void quota_release_exact(struct quota *q)
{
        if (quota_may_release(q))
                (void)quota_note_release(q, arena_release_exact(q->arena, quota_on_uncharged, q));
}

void reclaim_release_unused(struct quota *q)
{
        if (q->sessions.n == 0 && !q->growth.is_running)
                (void)quota_release(q, UINT64_MAX, NULL);
}

/* Bytes that this quota is releasing, without late ones. */
static uint64_t quota_coming(const struct quota *q)
{
        return arena_leaving_bytes(q->arena) + arena_suspended_bytes(q->arena) + arena_ended_bytes(q->arena);
}

/* Of what is released for the next growth, what is still being released. */
static uint64_t quota_own_coming(const struct quota *q)
{
        return min_u64(q->growth.own_release_bytes, quota_coming(q));
}

/* What is being released to `scope`, which is the account of the partition or one in it; without what q (may
 * be NULL) releases for its own growth. */
static uint64_t coming_beside(struct partition *p, const struct account *scope, const struct quota *q)
{
        struct quota *each;
        uint64_t n_bytes = 0;

        TAILQ_FOREACH(each, &p->lists.releasing, lists.of_releasing)
        account_clear_tally(&each->account);
        TAILQ_FOREACH(each, &p->lists.releasing, lists.of_releasing)
        {
                uint64_t coming = quota_coming(each);

                p->lists.n_visits++;
                coming -= each == q ? min_u64(q->growth.own_release_bytes, coming) : 0;
                n_bytes += account_tally(&each->account, scope, coming);
        }
        return n_bytes;
}

static uint64_t coming_in(struct partition *p, const struct account *scope)
{
        return coming_beside(p, scope, NULL);
}

/* What a quota could return to `scope` by releasing free extents, without what is being released anyway. */
static uint64_t quota_yield(struct quota *q, const struct account *scope)
{
        uint64_t surplus = account_surplus(&q->account, scope), coming = min_u64(quota_coming(q), surplus);
        uint64_t n_free;

        q->partition->lists.n_visits++;
        if ((surplus == coming && q->account.own_bytes > 0) || q->partition->preallocate)
                return 0;
        n_free = arena_releasable(q->arena, NULL);
        if (n_free == 0) /* no later search looks here, until a block is freed */
                LIST_DROP(&q->partition->lists.freed, q, lists.of_freed);
        return min_u64(n_free, surplus - coming);
}

/* So many bytes are released for a growth, which gets the room. */
static void quota_note_own_release(struct quota *q, const struct bfc_growth *plan, uint64_t n_bytes)
{
        q->growth.own_release_bytes = min_u64(q->growth.own_release_bytes + n_bytes,
                                              excess_u64(plan->new_bytes, q->growth.held.n_bytes));
}

/* Begins to release for a growth; returns how many bytes. */
static uint64_t quota_release_for_growth(struct quota *q, const struct bfc_growth *plan, uint64_t want_bytes)
{
        uint64_t n_bytes = quota_release(q, want_bytes, plan);

        quota_note_own_release(q, plan, n_bytes);
        return n_bytes;
}

/* Releases own free extents first, so many bytes more of them or as many as there are, for those of the plan.
 * What they do not pay for is charged now. False: there are none, or not enough. No session is asked that may
 * not unmap them in time: it is no reason to end it. */
static bool quota_release_own(struct quota *q, const struct bfc_growth *plan, uint64_t want_bytes)
{
        const struct quota_request *first = TAILQ_FIRST(&q->queue.requests);
        uint64_t n_bytes = q->partition->preallocate ? 0 : arena_releasable_soon(q->arena, plan);
        uint64_t held = q->growth.held.n_bytes, unpaid;
        struct reclaim_need need;

        n_bytes = min_u64(n_bytes, want_bytes);
        if (n_bytes == 0)
                return false;

        /* The part that these extents do not pay for must be there now, else they are released in vain. What
         * older requests claim is not taken for it. */
        unpaid = excess_u64(plan->new_bytes, quota_own_coming(q) + n_bytes);
        if (unpaid > held && reclaim_probe(first, unpaid - held, 0, &need) < 0)
                return false;
        if (!quota_hold(q, unpaid))
                return false;
        n_bytes = quota_note_release(q, arena_release_soon(q->arena, n_bytes, plan, quota_on_uncharged, q));
        quota_note_own_release(q, plan, n_bytes);
        return n_bytes > 0;
}

/* False: the quota's sessions were already waited for without success. */
static bool quota_can_trim(const struct quota *q, bool again)
{
        return !again || arena_suspended_bytes(q->arena) == 0;
}

/* Begins to release want_bytes of free extents of the quotas in `scope`, or as many as there are. except:
 * may be NULL. */
static void release_in(struct partition *p, const struct account *scope, uint64_t want_bytes,
                       const struct quota *except, bool again)
{
        struct quota *q, *next;

        for (q = TAILQ_FIRST(&p->lists.freed); q && want_bytes > 0; q = next) {
                bool ask = q != except && quota_can_trim(q, again);
                uint64_t yield;

                next = TAILQ_NEXT(q, lists.of_freed);
                yield = ask ? quota_yield(q, scope) : 0;
                if (yield > 0)
                        want_bytes =
                                excess_u64(want_bytes, quota_release(q, min_u64(want_bytes, yield), NULL));
        }
}

/* What other quotas could return to `scope`, beside what they are releasing. */
static uint64_t others_yield(const struct quota *q, const struct account *scope, bool again)
{
        struct partition *p = q->partition;
        struct quota *other, *next;
        uint64_t sum = 0;

        /* Of quotas below one account only the surplus of the account counts, once. What is being released is
         * tallied first, since it comes anyway. */
        TAILQ_FOREACH(other, &p->lists.freed, lists.of_freed)
        account_clear_tally(&other->account);
        (void)coming_in(p, scope);
        for (other = TAILQ_FIRST(&p->lists.freed); other; other = next) {
                next = TAILQ_NEXT(other, lists.of_freed);
                if (other != q && quota_can_trim(other, again) && quota_yield(other, scope) > 0)
                        sum += account_tally(&other->account, scope, arena_releasable(other->arena, NULL));
        }
        return sum;
}

/* `scope` lacks `missing` bytes: releases free extents, the quota's own first, then others'. False: they
 * are not enough. `again`: skips quotas that were asked without success. */
static bool quota_reclaim_from(struct quota *q, const struct account *scope, uint64_t missing,
                               const struct bfc_growth *plan, bool again)
{
        bool looks = quota_can_trim(q, again) && !q->partition->preallocate;
        uint64_t own = looks ? arena_releasable(q->arena, plan) : 0; /* also what its reserve keeps */

        /* A release that is not enough helps no request, and the quotas would have to grow again. */
        if (own + others_yield(q, scope, again) < missing)
                return false;

        if (own > 0)
                missing = excess_u64(missing, quota_release_for_growth(q, plan, min_u64(missing, own)));
        release_in(q->partition, scope, missing, q, again);
        return quota_own_coming(q) + coming_beside(q->partition, scope, q) > 0; /* none where all are late */
}

/* Begins the time in which the first request waits for others, unless it has begun. True: it is over. */
static bool quota_time_out(struct quota *q)
{
        uint64_t now = clock_ms();

        if (q->queue.blocked_ms == 0)
                quota_set_blocked(q, now);
        return now - max_u64(q->queue.blocked_ms, TAILQ_FIRST(&q->queue.requests)->since_ms) >
               q->partition->reclaim_timeout_ms;
}

/* Waits for what others release, within that time. */
static int quota_wait_for_others(struct quota *q, int refusal)
{
        return quota_time_out(q) ? refusal : 0;
}

/* So many bytes are missing, and are being released. */
static int quota_wait_for_own(struct quota *q, uint64_t missing, int refusal)
{
        /* The device takes its time; sessions get a limited one. */
        return arena_leaving_bytes(q->arena) >= missing ? 0 : quota_wait_for_others(q, refusal);
}

/* It lacks so many bytes of lack->scope, without those that the quota releases itself. 0: they are being
 * released. */
static int reclaim_from_account(struct quota *q, const struct quota_shortage *lack, uint64_t missing,
                                const struct bfc_growth *plan)
{
        struct quota_request *first = TAILQ_FIRST(&q->queue.requests);
        uint64_t coming = coming_beside(q->partition, lack->scope, q);

        /* Only what is not on its way yet is released. A closing session is freeing its blocks: its extents
         * count as on their way. */
        if (coming < missing && q->partition->queue.n_closing == 0 &&
            !quota_reclaim_from(q, lack->scope, missing - coming, plan, false))
                return lack->refusal;
        if (!quota_time_out(q))
                return 0;

        /* What did not come may hide what others would give: they are asked as if it never came. */
        if (first->asked_again || !quota_reclaim_from(q, lack->scope, missing, plan, true))
                return lack->refusal;
        first->asked_again = true;
        quota_set_blocked(q, clock_ms());
        return 0;
}

/* Bytes of later requests of its group. */
static uint64_t later_of_group(const struct quota_request *request)
{
        uint64_t n_bytes = 0;

        while ((request = quota_next_of_group(request)))
                n_bytes += request->n_bytes;
        return n_bytes;
}

/* Whether no memory is left from which it and the later ones of its group were parked. A group that began without one
 * of its blocks would have a part of them, and keep others from having all of theirs. */
static bool group_is_away(const struct quota *q, const struct quota_request *request)
{
        for (; request; request = quota_next_of_group(request))
                if (!arena_is_away(q->arena, request->wakes))
                        return false;
        return true;
}

/* Begins the growth, for which the limits have room, and takes the request out of the queue. */
static int quota_grow(struct quota *q, struct quota_request *request, const struct bfc_growth *plan)
{
        uint64_t missing, later = later_of_group(request);
        struct charge charge;
        int r;

        /* What was held for this growth is charged again with the rest: no other code runs in between. */
        reclaim_uncharge(q);
        if (request->is_direct)
                return quota_grant_direct(q, request);
        if (quota_growth_pause_ms(q) > 0) {
                request->device_failed = true;
                return -ECANCELED;
        }
        r = quota_charge(q, plan->new_bytes, &charge, &missing);
        if (r < 0)
                return r;

        /* The worker makes the extents, and quota_grown() is called. If this fails, the request is still the
         * first. */
        partition_tell_standby(q->partition); /* before anything is made */
        r = request->wakes != 0
                    ? arena_wake(q->arena, request->wakes, &charge, quota_grown, quota_on_uncharged, q)
                    : arena_grow(q->arena, plan, &charge, quota_grown, q);
        if (r < 0) {
                charge_drop(&charge);
                return r;
        }

        /* The queue goes on without it. The room of the others of its group is held, so that no quota takes it
         * between two of their growths. */
        reclaim_note_growth(request);
        quota_unqueue_served(request);
        if (later > 0)
                (void)quota_hold(q, later); /* for the next in line */
        request->has_grown = true;
        if (plan->is_whole) {
                q->queue.n_bytes += plan->n_bytes - request->n_bytes;
                request->n_bytes = plan->n_bytes;
        }
        q->growth.is_running = true;
        q->growth.wakes = request->wakes;
        q->growth.request = request;
        quota_publish(q); /* the free space that it takes in is spoken for */
        return 0;
}

static int reclaim_plan(struct quota *q, const struct quota_request *request, struct bfc_growth *ret)
{
        uint64_t room = account_room(&q->account) + q->growth.held.n_bytes;

        if (request->wakes != 0) {
                *ret = (struct bfc_growth){ .n_bytes = request->n_bytes, .new_bytes = request->n_bytes };
                return group_is_away(q, request) ? 0 : -EBUSY;
        }
        if (request->is_direct) {
                *ret = (struct bfc_growth){ .n_bytes = request->n_bytes, .new_bytes = request->n_bytes };
                return 0;
        }
        if (request->is_whole)
                return arena_plan_whole(q->arena, request->n_bytes, request->in_extent, room, ret);
        return request->in_extent ? arena_plan_in_extent(q->arena, request->n_bytes, room, ret)
                                  : arena_plan(q->arena, request->n_bytes, room, ret);
}

/* What it and those that belong to it take beside what is held for them. */
static uint64_t growth_need(const struct quota_request *request, const struct bfc_growth *plan)
{
        return excess_u64(plan->new_bytes + later_of_group(request), request->quota->growth.held.n_bytes);
}

/* What the request lacks to grow by n_bytes; 0: nothing. It claims what it takes of the account that lacks it. */
static int reclaim_look(struct quota *q, struct quota_request *request, uint64_t n_bytes,
                        struct quota_shortage *ret)
{
        uint64_t after = q->account.own_bytes + n_bytes, most;
        struct reclaim_need need = { .missing = 0 };
        int r = reclaim_probe(request, n_bytes, 0, &need);

        *ret = (struct quota_shortage){ r, need.missing, need.scope };
        if (r < 0) {
                /* Guarantees of others are theirs for good: above what these leave, only own extents can help,
                 * and nothing is claimed of others. */
                most = account_attainable(&q->account, ret->scope);
                if (after > most) {
                        ret->missing = after - most;
                        ret->scope = NULL;
                }
        }

        /* A claim is set only in the account that refuses: elsewhere it would keep others from room that does
         * not help this request. */
        reclaim_set_claim(request, need.scope, ret->scope ? need.takes : 0);
        request->lack = *ret;
        return r;
}

/* The steps that ask no session: free extents are released, or are being released. */
static int reclaim_make_room_by_itself(struct quota *q, struct quota_request *request,
                                       struct quota_shortage *ret)
{
        const struct upcalls *calls = q->partition->up.calls;
        uint64_t need, want, coming, own_released = quota_own_coming(q);
        struct bfc_growth plan;
        int r;

        /* The plan is made anew each time, because blocks and extents were freed since the last look. */
        r = reclaim_plan(q, request, &plan);
        if (r == -EBUSY) /* what it was parked from still leaves */
                return quota_wait_for_others(q, r);
        if (r < 0)
                return r;
        if (plan.new_bytes == 0) { /* it fits by now: the next round serves it */
                q->queue.look_again = true;
                return 0;
        }

        /* What no release can ever give is refused now, before anything is released for it. */
        r = quota_has_ended(q) ? -EDQUOT : quota_is_impossible(q, request->n_bytes + later_of_group(request));
        if (r < 0)
                return r;

        /* reclaim_look() finds what is missing, and in which account. From here on the request has a claim
         * there. While the requesting client frees what was asked of it, nothing is done: with a part of it
         * another place would seem best, and more would be released for it than is needed. */
        need = growth_need(request, &plan);
        r = reclaim_look(q, request, need, ret);
        if (r < 0 && !ret->scope && request->requester && calls && calls->is_trimming &&
            calls->is_trimming(q, request->requester))
                return 0;

        /* Own free extents pay for the new ones, before more is charged than ever since the quota was last
         * empty, so that reserved bytes stay near the peak of bytes in use. Where there is room anyway, that
         * may only delay the growth for a limited time. */
        want = max_u64(ret->missing, excess_u64(q->account.own_bytes + need, q->growth.high_bytes));
        if (want > own_released && (r < 0 || !quota_time_out(q)) &&
            quota_release_own(q, &plan, want - own_released)) {
                request->has_reclaimed = true;
                return quota_wait_for_others(q, 0); /* from now on */
        }
        if (r == 0)
                return own_released > 0 && !quota_time_out(q) ? 0 : quota_grow(q, request, &plan);
        request->has_reclaimed = true; /* or it is refused */

        /* An account that it shares lacks room: what the quota releases itself comes first, then what others
         * can. */
        if (ret->scope)
                return own_released >= ret->missing
                               ? quota_wait_for_own(q, ret->missing, r)
                               : reclaim_from_account(q, ret, ret->missing - own_released, &plan);

        /* Its own limit, or what others' reserves leave it, lacks room: only its own extents help, also those
         * that unresponsive sessions have, for a time. */
        coming = quota_coming(q) + arena_late_bytes(q->arena);
        if (coming < ret->missing && arena_releasable(q->arena, &plan) >= ret->missing - coming)
                coming += quota_release_for_growth(q, &plan, ret->missing - coming);
        if (coming < ret->missing && q->sessions.n_closing == 0)
                return r;
        return quota_wait_for_own(q, ret->missing, r);
}

/* Asks sessions for their idle memory. True: wait for them. */
static bool reclaim_ask_sessions(struct quota *q, struct quota_request *request,
                                 const struct quota_shortage *lack, uint64_t now)
{
        const struct partition *p = q->partition;
        const struct account *scope = lack->scope;
        struct quota_asking *asking = &request->asking;
        uint64_t coming;

        /* Pressure: sessions park blocks and give back what their programs can spare. */
        if (asking->press.begun_ms == 0)
                asking->press.begun_ms = now;
        if (p->up.calls && p->up.calls->press && now - asking->press.begun_ms <= p->reclaim_timeout_ms &&
            p->up.calls->press(p->up.broker, q, request, scope, lack->missing))
                return true;

        /* Trim: sessions return the idle memory of their caches. */
        if (asking->begun_ms == 0)
                asking->begun_ms = now;
        if (p->up.calls && now - asking->begun_ms <= p->reclaim_timeout_ms &&
            p->up.calls->trim(p->up.broker, q, request, scope, lack->missing))
                return true;

        /* What sessions freed may still be on its way to the account: each answer extends the wait for it. */
        coming = !scope ? quota_coming(q) : quota_own_coming(q) + coming_beside(q->partition, scope, q);
        return coming > 0 && asking->heard_ms != 0 && now - asking->heard_ms <= p->reclaim_timeout_ms;
}

/* Waits for as long as the request itself says. More memory may become idle meanwhile, so sessions are asked
 * again now and then. False: its time is up. */
static bool reclaim_wait_on(struct quota *q, struct quota_request *request, uint64_t now)
{
        if (request->wait_ms == 0)
                return false;
        if (request->queued_ms == 0)
                request->queued_ms = now;
        if (now >= quota_wait_end_ms(request))
                return false;
        if (now - request->asking.begun_ms >= q->partition->reclaim_timeout_ms + RECLAIM_AGAIN_MS)
                request->asking = (struct quota_asking){ 0 };
        else if (now - request->asking.press.begun_ms >= RECLAIM_PRESS_MS)
                request->asking.press.begun_ms = 0; /* those that were not asked may be idle by now */
        return true;
}

int reclaim_last_chance(struct quota *q, struct quota_request *request)
{
        uint64_t n_bytes, missing;
        struct reclaim_need need;
        struct bfc_growth plan;
        int r = reclaim_plan(q, request, &plan);

        if (r < 0)
                return r;

        /* Claims that are aged have had their turn: they refuse no other request. */
        n_bytes = growth_need(request, &plan);
        r = reclaim_probe(request, n_bytes, clock_ms(), &need);
        if (r == 0)
                return quota_grow(q, request, &plan);
        return account_probe(&q->account, n_bytes, &missing) == 0 ? RECLAIM_WAIT : r;
}

int reclaim_make_room(struct quota *q, struct quota_request *request)
{
        struct quota_shortage lack = { 0 };
        int r = reclaim_make_room_by_itself(q, request, &lack);
        uint64_t now;

        if (r == 0 || lack.refusal == 0)
                return r;

        /* The limits lack room, and no extent on its way will do. Sessions are asked; then the request waits. */
        now = clock_ms();
        if (q->queue.blocked_ms == 0)
                quota_set_blocked(q, now);
        if (reclaim_ask_sessions(q, request, &lack, now) || reclaim_wait_on(q, request, now))
                return 0;

        /* Its time is up. A refusal that only claims of others cause can still turn into a grant. */
        r = r == -ENOMEM || lack.scope ? reclaim_last_chance(q, request) : r;
        return r == RECLAIM_WAIT ? 0 : r;
}

void quota_release_surplus(struct quota *q)
{
        /* What is charged for something other than extents that can be used or released. */
        uint64_t unusable = arena_retiring_bytes(q->arena) + arena_unreclaimed_bytes(q->arena) +
                            q->extentless.closed.n_bytes + q->growth.held.n_bytes +
                            quota_own(q).bytes_direct + q->extentless.direct_left.n_bytes;
        uint64_t surplus = excess_u64(q->account.own_bytes, q->sessions.peaks_bytes + unusable);

        /* A waiting request uses the free extents, or releases them itself. */
        if (surplus == 0 || q->partition->up.is_inherited || q->growth.is_running || q->growth.backed ||
            !TAILQ_EMPTY(&q->queue.requests) || (q->partition->preallocate && !q->is_removed))
                return;
        (void)quota_note_release(q, arena_release_unmapped(q->arena, surplus, quota_on_uncharged, q));
}

void quota_release_idle(struct quota *q)
{
        (void)quota_release(q, UINT64_MAX, NULL);
}

uint64_t quota_release_soon(struct quota *q, uint64_t n_bytes)
{
        if (n_bytes > 0 && quota_may_release(q))
                (void)quota_note_release(q,
                                         arena_release_soon(q->arena, n_bytes, NULL, quota_on_uncharged, q));
        return quota_coming(q);
}

/* ---- what there is room for ------------------------------------------------ */

/* Bytes of new extents that the quota may have, once all that is being released is returned. */
static uint64_t quota_growth_room(const struct quota *q)
{
        uint64_t room = UINT64_MAX, guaranteed = 0;

        if (quota_growth_pause_ms(q) > 0 || quota_has_ended(q))
                return 0;
        /* The room at a level is what is free once all releases have ended, without claims, and what is
         * guaranteed below this level. The tightest level counts. */
        for (const struct account *a = &q->account; a; a = a->parent) {
                uint64_t after = excess_u64(a->committed_bytes, coming_in(q->partition, a));
                uint64_t n_free = excess_u64(a->limit_bytes, after);

                room = min_u64(room, excess_u64(n_free, reclaim_claims_of(q->partition, a)) + guaranteed);
                guaranteed += excess_u64(a->reserve_bytes, after);
        }
        return arena_growable(q->arena, room);
}

uint64_t quota_obtainable(struct quota *q)
{
        struct bfc_stats stats;

        if (q->partition->is_draining || q->partition->is_lost || quota_without_block(q))
                return 0;
        arena_read_stats(q->arena, &stats);
        return stats.bytes_free + quota_growth_room(q);
}

/* ---- limits that were lowered -------------------------------------------- */

uint64_t quota_excess(const struct quota *q)
{
        uint64_t n_bytes = 0;

        for (const struct account *a = &q->account; a; a = a->parent)
                n_bytes = max_u64(n_bytes, min_u64(account_excess(a), account_surplus(&q->account, a)));
        return n_bytes;
}

void reclaim_release_excess(struct quota *q)
{
        uint64_t excess = excess_u64(account_excess(&q->account), coming_in(q->partition, &q->account));

        if (excess > 0 && q->account.n_children > 0)
                release_in(q->partition, &q->account, excess, NULL, false);
        else if (excess > 0)
                (void)quota_release(q, excess, NULL);
}

void reclaim_release_partition_excess(struct partition *p)
{
        release_in(p, &p->pool, excess_u64(account_excess(&p->pool), coming_in(p, &p->pool)), NULL, false);
}
