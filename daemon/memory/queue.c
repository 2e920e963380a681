/* The queue of a quota: requests that wait, in order, and how room is made for the first one; see quota.h.
 *
 * Requests are looked at in rounds, a bounded number in each turn. A round is finished before the next begins, so that no
 * request at its end is starved.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/queue.h"

#include <errno.h>
#include <stdlib.h>

#include "daemon/base/clock.h"
#include "daemon/base/list.h"
#include "daemon/base/number.h"
#include "daemon/memory/upcalls.h"

#define QUOTA_LOOKS      256u /* requests looked at in one turn */
#define QUOTA_ROOMS      32u  /* and for so many room is made, or a refusal written */
#define QUOTA_ROOM_LOOKS 8u
#define QUOTA_ROOMS_NS   20000u /* at most about so long: what it takes is a matter of how many there are */

/* A request that has waited this long beyond the reclaim steps no longer has priority over all others. */
#define RECLAIM_AGED_MS  1000u
#define RECLAIM_CALM_MS  10000u /* after this time without a claim the next one counts as the first */
#define RECLAIM_AGAIN_MS 500u
#define RECLAIM_PRESS_MS 100u /* between the ends of Pressures and the next */

/* What a growth leaves of its last extent counts from this part of another growth on: so growths beside each other take
 * little more than one after the other. */
#define GROWTH_REST_PART 16u

enum {
        RECLAIM_WAIT = 1, /* something is in progress for the request */
};

/* ---- turns and ticks ------------------------------------------------------- */

static void quota_ask_for_turn(struct quota *q)
{
        struct partition *p = q->partition;

        if (LIST_HAS(q, queue.of_due))
                return;
        LIST_ADD(&p->queue.due, q, queue.of_due);
        if (p->turn.wake)
                p->turn.wake(p->turn.userdata);
}

void quota_make_due(struct quota *q)
{
        if (TAILQ_EMPTY(&q->queue.requests))
                return;
        q->queue.look_again = true;
        quota_ask_for_turn(q);
}

void partition_make_due(struct partition *p)
{
        struct quota *q;

        TAILQ_FOREACH(q, &p->queue.waiting, queue.of_waiting)
        quota_make_due(q);
}

static bool quota_needs_ticks(const struct quota *q)
{
        return q->queue.blocked_ms != 0 || q->queue.is_deferred;
}

static void quota_set_ticks(struct quota *q, uint64_t blocked_ms, bool is_deferred)
{
        bool needed = quota_needs_ticks(q);

        q->queue.blocked_ms = blocked_ms;
        q->partition->queue.n_deferred += is_deferred;
        q->partition->queue.n_deferred -= q->queue.is_deferred;
        q->queue.is_deferred = is_deferred;
        q->partition->queue.n_blocked += quota_needs_ticks(q);
        q->partition->queue.n_blocked -= needed;
}

/* Since when the requests are blocked by other sessions; 0: they are not. */
static void quota_set_blocked(struct quota *q, uint64_t since_ms)
{
        quota_set_ticks(q, since_ms, q->queue.is_deferred);
}

bool quota_first_is_aged(const struct quota *q, uint64_t now)
{
        const struct quota_request *first = TAILQ_FIRST(&q->queue.requests);

        return first && first->queued_ms != 0 && now - first->queued_ms >= RECLAIM_AGED_MS;
}

/* ---- claims: what a waiting request gets before later ones --------------- */

static bool reclaim_has_claim(const struct quota_request *request)
{
        return request->claim.n_bytes > 0;
}

/* The account that the quota shares with leases of its tenant, or with the tenant; NULL: none. */
static struct account *reclaim_shared_account(struct quota *q)
{
        return quota_parent(q) ? &quota_parent(q)->account : q->account.n_children > 0 ? &q->account : NULL;
}

/* Claims of leases are their tenant's: one that goes round its leases does not become younger. */
static struct quota_growth *growth_of_tenant(const struct quota *q)
{
        return quota_parent(q) ? &quota_parent(q)->growth : &((struct quota *)(uintptr_t)q)->growth;
}

/* The request claims so many bytes of an account before later requests: that of the partition, or of its tenant's quota if
 * that has leases. 0 bytes: it claims nothing. */
static void reclaim_set_claim(struct quota_request *request, struct account *a, uint64_t n_bytes)
{
        struct partition *p = request->quota->partition;
        struct quota_growth *growth = growth_of_tenant(request->quota);
        bool had = reclaim_has_claim(request), has = n_bytes > 0;
        struct quota *q;

        request->claim = (struct charge){ a, n_bytes };

        /* A claim soon after another one of the tenant continues its age: small requests in a row are as old
         * together as a large one. */
        if (!had && has) {
                uint64_t now = clock_ms();

                p->claims.n++;
                if (growth->n_claims++ == 0 &&
                    (growth->claim_ms == 0 || now - growth->unclaimed_ms >= RECLAIM_CALM_MS))
                        growth->claim_ms = now;
        }

        /* What it claimed is there for others. */
        if (had && !has) {
                growth->unclaimed_ms = clock_ms();
                growth->n_claims--;
                p->claims.n--;
                TAILQ_FOREACH(q, &p->queue.waiting, queue.of_waiting)
                if (q != request->quota) /* those behind it */
                        quota_make_due(q);
        }
}

/* The request grows: its claim was of use. */
static void reclaim_note_growth(const struct quota_request *request)
{
        struct quota_growth *growth = growth_of_tenant(request->quota);

        if (reclaim_has_claim(request) && growth->n_claims == 1)
                growth->claim_ms = 0;
}

/* What requests claim of the account. Only the first of a queue has a claim. */
static uint64_t reclaim_claims_of(const struct partition *p, const struct account *a)
{
        const struct quota *q;
        uint64_t n_bytes = 0;

        if (p->claims.n == 0)
                return 0;
        TAILQ_FOREACH(q, &p->queue.waiting, queue.of_waiting)
        {
                const struct charge *claim = &TAILQ_FIRST(&q->queue.requests)->claim;

                n_bytes += claim->account == a ? claim->n_bytes : 0;
        }
        return n_bytes;
}

uint64_t reclaim_claims_before(const struct quota_request *request, const struct account *a, uint64_t now)
{
        const struct partition *p = request->quota->partition;
        uint64_t aged_ms = RECLAIM_STEPS * p->reclaim_timeout_ms + RECLAIM_AGED_MS, n_bytes = 0;
        const struct quota *q;

        if (p->claims.n == 0)
                return 0;
        TAILQ_FOREACH(q, &p->queue.waiting, queue.of_waiting)
        {
                const struct quota_request *first = TAILQ_FIRST(&q->queue.requests);

                if (q == request->quota || first->ticket >= request->ticket || !reclaim_has_claim(first) ||
                    (now != 0 && quota_first_is_aged(q, now)))
                        continue;

                /* A claim is aged, too, if the tenant's requests, one after the other, have had claims for as
                 * long as that can take. */
                if (now != 0 && now - growth_of_tenant(q)->claim_ms >= aged_ms)
                        continue;
                n_bytes += first->claim.account == a ? first->claim.n_bytes : 0;
        }
        return n_bytes;
}

/* ---- the queue ------------------------------------------------------------- */

/* Drops the charge that is held for a growth. */
static void reclaim_uncharge(struct quota *q)
{
        q->growth.own_release_bytes = 0;
        if (q->growth.held.n_bytes == 0)
                return;
        charge_drop(&q->growth.held);
        partition_make_due(q->partition);
}

static void quota_begin_waiting(struct quota *q)
{
        if (!TAILQ_EMPTY(&q->queue.requests))
                return;
        TAILQ_INSERT_TAIL(&q->partition->queue.waiting, q, queue.of_waiting);
        q->queue.least_bytes = UINT64_MAX;
}

static void quota_enqueue(struct quota_request *request)
{
        struct quota *q = request->quota;

        quota_begin_waiting(q);
        TAILQ_INSERT_TAIL(&q->queue.requests, request, link);
        q->queue.least_bytes = min_u64(q->queue.least_bytes, request->n_bytes);
}

/* The next one of its group, which has consecutive places in the queue; NULL: it is the last. */
static struct quota_request *quota_next_of_group(const struct quota_request *request)
{
        struct quota_request *next = TAILQ_NEXT(request, link);
        bool is_of_group = next && request->wakes != 0 && next->wakes != 0 &&
                           next->requester == request->requester && next->group == request->group;

        return is_of_group ? next : NULL;
}

static void quota_unqueue(struct quota_request *request)
{
        struct quota *q = request->quota;
        bool is_held_for = request->wakes != 0 && TAILQ_FIRST(&q->queue.requests) == request &&
                           !quota_next_of_group(request);

        if (q->queue.next == request)
                q->queue.next = TAILQ_NEXT(request, link);
        TAILQ_REMOVE(&q->queue.requests, request, link);
        /* Later requests, also of other quotas, may have what was kept for this one. */
        reclaim_set_claim(request, NULL, 0);
        if (is_held_for)
                reclaim_uncharge(q);
        if (!TAILQ_EMPTY(&q->queue.requests))
                return;
        TAILQ_REMOVE(&q->partition->queue.waiting, q, queue.of_waiting);
        quota_set_ticks(q, 0, false);
        reclaim_uncharge(q);
}

/* If that was the first, the next one has its time before it; one that is served past the first changes
 * nothing for it. */
static void quota_unqueue_served(struct quota_request *request)
{
        struct quota *q = request->quota;

        if (TAILQ_FIRST(&q->queue.requests) == request)
                quota_set_blocked(q, 0);
        quota_unqueue(request);
}

static void quota_count_wait(const struct quota_request *request)
{
        uint64_t ns = clock_ns() - request->since_ns;

        for (struct quota *q = request->quota; q; q = quota_parent(q))
                quota_life(q)->waited_ns += ns;
}

/* It has left the queue: calls its done(). */
static void quota_complete(struct quota_request *request, int result, bfc_handle handle, uint64_t offset)
{
        struct quota *q = request->quota;
        /* The costliest step that it needed. */
        enum grant_way way = request->queued_ms != 0  ? GRANT_WAITED
                             : request->has_reclaimed ? GRANT_RECLAIMED
                             : request->has_grown     ? GRANT_GROWN
                                                      : GRANT_BACKED;

        quota_count_wait(request);
        q->queue.n--;
        q->queue.n_bytes -= request->n_bytes;
        for (struct quota *each = q; each && result == 0; each = quota_parent(each))
                grants_add(&each->grants, way, clock_ns() - request->since_ns);
        if (result == 0 && request->lack.refusal != 0 && !request->lack.scope && !request->has_grown)
                returns_add(&q->returns, request->n_bytes, clock_ms()); /* freed, and used again */
        if (!request->is_no_refusal)
                quota_count_refusal(request->quota, quota_request_error(request, result));
        /* This comes last: it may free the request, and queue another one. */
        request->done(request, result, handle, offset);
}

void quota_wait(struct quota_request *request)
{
        struct quota *q = request->quota;

        request->since_ms = clock_ms();
        request->ticket = ++q->partition->queue.n_tickets;
        request->since_ns = clock_ns();
        request->asked_again = false;
        request->has_reclaimed = false;
        request->has_grown = false;
        request->queued_ms = 0;
        request->growth = NULL;
        request->claim = (struct charge){ NULL, 0 };
        request->lack = (struct quota_shortage){ 0 };
        request->asking = (struct quota_asking){ 0 };
        quota_enqueue(request);
        q->queue.n++;
        q->queue.n_bytes += request->n_bytes;

        /* The round is over: it continues with this one, unless a new round is due. */
        if (!q->queue.next && !q->queue.look_again)
                q->queue.next = request;
        quota_ask_for_turn(q);
}

void quota_cancel(struct quota_request *request)
{
        struct quota *q = request->quota;

        quota_count_wait(request);
        q->queue.n--;
        q->queue.n_bytes -= request->n_bytes;
        if (!request->growth) {
                quota_unqueue(request);
                return;
        }

        /* The worker goes on, and quota_grown() frees the block, whose place others can have. */
        request->growth->request = NULL;
        if (request->wakes == 0)
                request->growth->rest_bytes = request->growth->new_bytes;
        request->growth = NULL;
        quota_make_due(q);
}

/* When the wait of a request ends at the latest. */
static uint64_t quota_wait_end_ms(const struct quota_request *request)
{
        uint64_t end_ms = request->since_ms + RECLAIM_STEPS * request->quota->partition->reclaim_timeout_ms +
                          request->wait_ms;

        return request->queued_ms != 0 ? min_u64(end_ms, request->queued_ms + request->wait_ms) : end_ms;
}

/* ---- reclaim: which quotas can release -------------------------------------------- */

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
        struct running_growth *growth = userdata;
        struct quota *q = growth->quota;
        struct quota_request *request = growth->request;
        bfc_handle wakes = growth->wakes;

        TAILQ_REMOVE(&q->growth.running, growth, link);
        free(growth);
        if (request)
                request->growth = NULL;

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

/* ---- reclaim: what a request needs --------------------------------------------------- */

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

/* ---- reclaim: growing --------------------------------------------------------------- */

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
        if (q->sessions.n == 0 && TAILQ_EMPTY(&q->growth.running))
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
        return quota_time_out(q) ? refusal : RECLAIM_WAIT;
}

/* So many bytes are missing, and are being released. */
static int quota_wait_for_own(struct quota *q, uint64_t missing, int refusal)
{
        /* The device takes its time; sessions get a limited one. */
        return arena_leaving_bytes(q->arena) >= missing ? RECLAIM_WAIT : quota_wait_for_others(q, refusal);
}

/* It lacks so many bytes of lack->scope, without those that the quota releases itself. RECLAIM_WAIT: they are being
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
                return RECLAIM_WAIT;

        /* What did not come may hide what others would give: they are asked as if it never came. */
        if (first->asked_again || !quota_reclaim_from(q, lack->scope, missing, plan, true))
                return lack->refusal;
        first->asked_again = true;
        quota_set_blocked(q, clock_ms());
        return RECLAIM_WAIT;
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

/* Serves a direct charge, for which the limits have room: nothing is made for it. Fails as charge_take() does. */
static int quota_grant_direct(struct quota *q, struct quota_request *request)
{
        uint64_t missing;
        int r = quota_charge(q, request->n_bytes, &request->charge, &missing);

        if (r < 0)
                return r;

        /* Standby memory leaves room for what the process takes by itself from now on. */
        partition_tell_standby(q->partition);
        reclaim_note_growth(request);
        quota_unqueue_served(request);
        request->has_grown = true;
        quota_complete(request, 0, 0, 0);
        quota_make_due(q);
        return 0;
}

/* What is held for the growth of a request. */
static uint64_t held_for(const struct quota_request *request)
{
        const struct quota *q = request->quota;

        return request == TAILQ_FIRST(&q->queue.requests) ? q->growth.held.n_bytes : 0;
}

/* The worker makes the extents, and quota_grown() is called. */
static int growth_start(struct quota *q, struct quota_request *request, const struct bfc_growth *plan,
                        struct charge *charge)
{
        struct running_growth *growth = malloc(sizeof(*growth));
        int r = -ENOMEM;

        if (growth && request->wakes != 0)
                r = arena_wake(q->arena, request->wakes, charge, quota_grown, growth, quota_on_uncharged, q);
        else if (growth)
                r = arena_grow(q->arena, plan, charge, quota_grown, growth);
        if (r < 0) {
                free(growth);
                return r;
        }
        *growth = (struct running_growth){
                .quota = q,
                .request = request,
                .wakes = request->wakes,
                .new_bytes = plan->new_bytes,
                .rest_bytes = excess_u64(plan->span.end, plan->offset + plan->n_bytes),
        };
        TAILQ_INSERT_TAIL(&q->growth.running, growth, link);
        request->growth = growth;
        return 0;
}

/* Begins the growth, for which the limits have room, and takes the request out of the queue. If it fails, the request is
 * still there. */
static int quota_grow(struct quota *q, struct quota_request *request, const struct bfc_growth *plan)
{
        uint64_t missing, later = later_of_group(request);
        struct charge charge;
        int r;

        /* What was held for this growth is charged again with the rest: no other code runs in between. */
        if (held_for(request) > 0)
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
        partition_tell_standby(q->partition); /* before anything is made */
        r = growth_start(q, request, plan, &charge);
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
        quota_publish(q); /* the free space that it takes in is spoken for */
        return 0;
}

static int reclaim_plan(struct quota *q, const struct quota_request *request, struct bfc_growth *ret)
{
        uint64_t room = account_room(&q->account) + held_for(request);

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
        return excess_u64(plan->new_bytes + later_of_group(request), held_for(request));
}

/* Whether a growth of at most so many bytes leaves room for the request, or for a part of it that counts beside these
 * bytes: the block can begin there, except one that must be in one extent. */
static bool leaves_room(const struct running_growth *growth, const struct quota_request *request,
                        uint64_t max_new_bytes)
{
        uint64_t needed = bfc_block_bytes(request->n_bytes);

        if (!request->in_extent)
                needed = min_u64(needed, max_new_bytes / GROWTH_REST_PART);
        return !request->is_whole && growth->new_bytes <= max_new_bytes && growth->rest_bytes >= needed;
}

/* Whether it waits for a growth that runs: for one that leaves room, or because the blocks of all of them may be the last
 * that the quota may have. */
static bool awaits_growth(const struct quota *q, const struct quota_request *request, uint64_t max_new_bytes)
{
        const struct running_growth *growth;
        bool has_room = false;
        uint64_t n_blocks = 0;

        if (request->is_direct || request->wakes != 0)
                return false;
        TAILQ_FOREACH(growth, &q->growth.running, link)
        {
                has_room = has_room || leaves_room(growth, request, max_new_bytes);
                n_blocks += growth->wakes == 0;
        }
        for (const struct quota *each = q; each && n_blocks > 0; each = quota_parent(each))
                has_room = has_room || n_blocks + each->all.n_blocks >= each->max_blocks;
        return has_room;
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
                return RECLAIM_WAIT;
        }
        if (awaits_growth(q, request, plan.new_bytes))
                return RECLAIM_WAIT;

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
                return RECLAIM_WAIT;
        if (r < 0 && awaits_growth(q, request, UINT64_MAX))
                return RECLAIM_WAIT;

        /* Own free extents pay for the new ones, before more is charged than ever since the quota was last
         * empty, so that reserved bytes stay near the peak of bytes in use. Where there is room anyway, that
         * may only delay the growth for a limited time. */
        want = max_u64(ret->missing, excess_u64(q->account.own_bytes + need, q->growth.high_bytes));
        if (want > own_released && (r < 0 || !quota_time_out(q)) &&
            quota_release_own(q, &plan, want - own_released)) {
                request->has_reclaimed = true;
                (void)quota_time_out(q); /* from now on */
                return RECLAIM_WAIT;
        }
        if (r == 0)
                return own_released > 0 && !quota_time_out(q) ? RECLAIM_WAIT : quota_grow(q, request, &plan);
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

/* A request whose time is up: it grows if the limits have room now (0), or is refused. If only the claim
 * of another request denies it the room, it gets the room when that one has waited long enough; until
 * then it waits: RECLAIM_WAIT. */
static int reclaim_last_chance(struct quota *q, struct quota_request *request)
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

/* Makes room for the first request. 0: it has left the queue, because it grows or is served. RECLAIM_WAIT: something is
 * in progress. Negative: it is refused. */
static int reclaim_make_room(struct quota *q, struct quota_request *request)
{
        struct quota_shortage lack = { 0 };
        int r = reclaim_make_room_by_itself(q, request, &lack);
        uint64_t now;

        if (r >= 0 || lack.refusal == 0)
                return r;

        /* The limits lack room, and no extent on its way will do. Sessions are asked; then the request waits. */
        now = clock_ms();
        if (q->queue.blocked_ms == 0)
                quota_set_blocked(q, now);
        if (reclaim_ask_sessions(q, request, &lack, now) || reclaim_wait_on(q, request, now))
                return RECLAIM_WAIT;

        /* Its time is up. A refusal that only claims of others cause can still turn into a grant. */
        return r == -ENOMEM || lack.scope ? reclaim_last_chance(q, request) : r;
}

/* Makes room for the second request while the first one waits for own extents, whose room it has already. As above, but it
 * is not refused. */
static int reclaim_make_room_beside(struct quota *q, struct quota_request *request)
{
        const struct quota_request *first = TAILQ_FIRST(&q->queue.requests);
        struct reclaim_need need;
        struct bfc_growth plan;

        if (first->lack.refusal != 0 || q->growth.own_release_bytes == 0 || request->wakes != 0 ||
            quota_growth_pause_ms(q) > 0)
                return RECLAIM_WAIT;
        if (reclaim_plan(q, request, &plan) < 0 || plan.new_bytes == 0 ||
            awaits_growth(q, request, plan.new_bytes))
                return RECLAIM_WAIT;

        /* It may take free memory that the first was to have, which must then be able to grow by as much more. */
        if (reclaim_probe(request, plan.new_bytes + request->n_bytes, 0, &need) < 0)
                return RECLAIM_WAIT;
        return quota_grow(q, request, &plan) == 0 ? 0 : RECLAIM_WAIT;
}

void quota_release_surplus(struct quota *q)
{
        /* What is charged for something other than extents that can be used or released. */
        uint64_t unusable = arena_retiring_bytes(q->arena) + arena_unreclaimed_bytes(q->arena) +
                            q->extentless.closed.n_bytes + q->growth.held.n_bytes +
                            quota_own(q).bytes_direct + q->extentless.direct_left.n_bytes;
        uint64_t surplus = excess_u64(q->account.own_bytes, q->sessions.peaks_bytes + unusable);

        /* A waiting request uses the free extents, or releases them itself. */
        if (surplus == 0 || q->partition->up.is_inherited || !TAILQ_EMPTY(&q->growth.running) ||
            q->growth.backed || !TAILQ_EMPTY(&q->queue.requests) ||
            (q->partition->preallocate && !q->is_removed))
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

/* ---- a turn ---------------------------------------------------------------- */

/* quota_try() for a request that is_copy: it has the block's size then. */
static int quota_try_copy(struct quota *q, struct quota_request *request, bfc_handle *ret_handle,
                          uint64_t *ret_offset)
{
        uint64_t n_bytes;
        int r = quota_refusal(q);

        if (r < 0)
                return r;
        if (quota_without_block(q))
                return -EDQUOT;

        /* The copy gets whole extents, so it becomes as large as they are. */
        r = arena_alloc_unseen(q->arena, request->n_bytes, ret_handle, ret_offset, &n_bytes);
        if (r != 0)
                return r;
        q->queue.n_bytes += n_bytes - request->n_bytes;
        request->n_bytes = n_bytes;
        quota_count_alloc(q, n_bytes);
        return 0;
}

/* Whether it may have what fits now. */
static bool quota_may_pass(const struct quota_request *request, uint64_t now)
{
        const struct quota *q = request->quota;

        return request == TAILQ_FIRST(&q->queue.requests) || !quota_first_is_aged(q, now) ||
               q->partition->is_draining || now - request->since_ms >= q->partition->reclaim_timeout_ms;
}

/* 0: it is served, or grows. Positive: it continues to wait. */
static int quota_serve_one(struct quota *q, struct quota_request *request, uint64_t now, unsigned *budget)
{
        const struct quota_request *first = TAILQ_FIRST(&q->queue.requests);
        uint64_t limit_ms = RECLAIM_STEPS * q->partition->reclaim_timeout_ms + request->wait_ms;
        bfc_handle handle = 0;
        uint64_t offset = 0;
        int r = QUOTA_WAIT;

        /* The request gets backed space that is free now. One that always needs new memory can only be refused
         * here. */
        if (request->is_copy && quota_may_pass(request, now))
                r = quota_try_copy(q, request, &handle, &offset);
        else if (request->is_whole || request->is_direct || request->wakes != 0)
                r = quota_refusal(q) < 0 ? quota_refusal(q) : QUOTA_WAIT;
        else if (quota_may_pass(request, now))
                r = quota_try(q, request->n_bytes, request->in_extent, &handle, &offset);

        /* Behind a request that waits for others to free, it has waited for as long as it would have as the
         * first: it grows now, waits for a claim to age, or is refused. That costs as much as many looks. */
        if (r > 0 && request != first && first->queued_ms != 0 && TAILQ_EMPTY(&q->growth.running) &&
            now - request->since_ms >= limit_ms) {
                *budget -= *budget > QUOTA_ROOM_LOOKS ? QUOTA_ROOM_LOOKS : *budget;
                r = reclaim_last_chance(q, request);
                if (r == 0)
                        return 0;
        }
        if (r > 0)
                return r;
        quota_unqueue_served(request);
        quota_complete(request, r, handle, offset);
        return 0;
}

/* Serves the requests that fit; false: the budget is used up. */
static bool quota_serve(struct quota *q, unsigned *budget)
{
        uint64_t now = q->queue.next ? clock_ms() : 0, began_ns = 0;

        while (q->queue.next && *budget > 0) {
                struct quota_request *request = q->queue.next;

                if (request->is_copy && began_ns != 0 && clock_ns() - began_ns >= QUOTA_ROOMS_NS)
                        return false;
                if (request->is_copy && began_ns == 0) /* all free extents are looked at */
                        began_ns = clock_ns();
                (*budget)--;
                q->partition->queue.n_looks++;
                q->queue.next = TAILQ_NEXT(request, link);
                quota_serve_one(q, request, now, budget);
        }
        return !q->queue.next;
}

/* The group of the first request waits behind all others. */
static void quota_defer_group(struct quota_request *first)
{
        struct quota_request *last = first, *next;

        while ((next = quota_next_of_group(last)))
                last = next;
        for (struct quota_request *request = first;; request = next) {
                next = TAILQ_NEXT(request, link);
                quota_unqueue_served(request);
                quota_enqueue(request);
                if (request == last)
                        return;
        }
}

/* Makes room for the first request, or refuses it and the next; false: there is more to do. One growth begins in a turn,
 * so that requests of other quotas that came before the next one are looked at before it. */
static bool quota_make_rooms(struct quota *q, unsigned *budget)
{
        struct quota_request *request, *next;
        uint64_t began_ns = 0;

        while ((request = TAILQ_FIRST(&q->queue.requests))) {
                int r;

                if ((*budget)-- == 0 || (began_ns != 0 && clock_ns() - began_ns >= QUOTA_ROOMS_NS))
                        return false;
                began_ns = began_ns == 0 ? clock_ns() : began_ns;
                q->partition->queue.n_looks++;
                r = q->partition->is_draining ? -EBUSY : reclaim_make_room(q, request);
                next = r == RECLAIM_WAIT ? TAILQ_NEXT(request, link) : NULL;
                if (next)
                        r = reclaim_make_room_beside(q, next);
                if (r == 0)
                        return TAILQ_EMPTY(&q->queue.requests);
                if (r == RECLAIM_WAIT) /* the others wait behind it */
                        return true;
                if ((r == -EDQUOT || r == -ENOMEM) && !TAILQ_EMPTY(&q->growth.running))
                        return true; /* one of these may leave room, or fail */

                /* Parked blocks whose old extents have not left in time wait behind the others, for as long as
                 * their request says. */
                if (r == -EBUSY && request->wakes != 0 && !q->partition->is_draining &&
                    clock_ms() - request->since_ms < request->wait_ms) {
                        quota_defer_group(request);
                        continue;
                }
                quota_unqueue(request);
                quota_complete(request, r, 0, 0);
        }
        return true;
}

void quota_turn(struct quota *q)
{
        unsigned looks = QUOTA_LOOKS, rooms = QUOTA_ROOMS;

        /* A round is finished before the next begins, so that no request at its end is starved. */
        if (q->queue.look_again && !q->queue.next) {
                q->queue.look_again = false;
                q->queue.next = TAILQ_FIRST(&q->queue.requests);
                q->queue.round_ms = clock_ms();
                quota_set_ticks(q, q->queue.blocked_ms, false);
        }

        /* Room is made only when all that fits has been served: a small request need not wait for a growth. The
         * quota stays due while a budget is used up, or a change asks for a new round. */
        if (!quota_serve(q, &looks) || !quota_make_rooms(q, &rooms) || q->queue.look_again)
                return;
        LIST_DROP(&q->partition->queue.due, q, queue.of_due);
}

/* ---- what makes it due ----------------------------------------------------- */

/* A block was freed: there may be room for requests that wait for the partition's memory. Frees that
 * follow each other closely make them due once. */
void partition_make_claims_due(struct partition *p)
{
        uint64_t now_ms = clock_ms();
        struct quota *q;

        if (now_ms - p->claims.looked_ms < QUOTA_ROUND_MS) {
                p->claims.is_deferred = true;
                return;
        }
        p->claims.looked_ms = now_ms;
        p->claims.is_deferred = false;
        TAILQ_FOREACH(q, &p->queue.waiting, queue.of_waiting)
        if (reclaim_has_claim(TAILQ_FIRST(&q->queue.requests)))
                quota_make_due(q);
}

/* A block was freed while requests wait. Where one of them may fit by now there is a round at once. Room for
 * the first may also have come from a free that no request fits in, but to find that out costs as much as
 * many frees: so that is not done for each. */
void quota_note_free(struct quota *q)
{
        struct bfc_stats stats;

        arena_read_stats(q->arena, &stats);
        if (stats.largest_free_block_bytes >= q->queue.least_bytes || quota_without_block(q) ||
            clock_ms() - q->queue.round_ms >= QUOTA_ROUND_MS)
                quota_make_due(q);
        else
                quota_set_ticks(q, q->queue.blocked_ms, true);
}

bool partition_is_deferred(const struct partition *p)
{
        return p->queue.n_deferred > 0 || (p->claims.is_deferred && p->claims.n > 0);
}

void partition_look_again(struct partition *p)
{
        struct quota *q;

        if (!partition_is_deferred(p))
                return;
        TAILQ_FOREACH(q, &p->queue.waiting, queue.of_waiting)
        if (q->queue.is_deferred ||
            (p->claims.is_deferred && reclaim_has_claim(TAILQ_FIRST(&q->queue.requests))))
                quota_make_due(q);
        p->claims.looked_ms = clock_ms();
        p->claims.is_deferred = false;
}

void partition_tick(struct partition *p)
{
        struct quota *q;

        TAILQ_FOREACH(q, &p->queue.waiting, queue.of_waiting)
        if (q->queue.blocked_ms != 0)
                quota_make_due(q);
        partition_look_again(p);
}

bool partition_is_blocked(const struct partition *p)
{
        return p->queue.n_blocked > 0 || (p->claims.is_deferred && p->claims.n > 0);
}

void quota_note_answer(struct quota *q, bool gave)
{
        struct quota_request *first;
        struct quota *each;

        TAILQ_FOREACH(each, &q->partition->queue.waiting, queue.of_waiting)
        {
                first = TAILQ_FIRST(&each->queue.requests);
                if (!gave || (first->asking.press.begun_ms == 0 && first->asking.begun_ms == 0))
                        continue;
                first->asking.heard_ms = clock_ms();
                first->asking.n_gave++;
        }
        partition_make_due(q->partition);
}

/* ---- waiting requests, for lists ----------------------------------------- */

/* The place of a quota's first request among those of all quotas of the partition. */
static uint64_t partition_position(const struct quota_request *first)
{
        const struct quota *q;
        uint64_t n = 1;

        TAILQ_FOREACH(q, &first->quota->partition->queue.waiting, queue.of_waiting)
        n += TAILQ_FIRST(&q->queue.requests)->ticket < first->ticket;
        return n;
}

/* What the first one lacks was found when it was last tried. Those behind it are served after it. */
static void waiting_set_lack(const struct quota *q, struct quota_waiting *w)
{
        const struct quota_request *request = w->request, *first = TAILQ_FIRST(&q->queue.requests);
        const struct returns *returns;

        /* The sum over the requests from the first one on; UINT64_MAX: it is not known. */
        if (request->growth)
                w->lacking_bytes = 0;
        else if (request == first)
                w->lacking_bytes = request->lack.refusal != 0 ? request->lack.missing : UINT64_MAX;
        else if (__builtin_add_overflow(w->lacking_bytes, request->n_bytes, &w->lacking_bytes))
                w->lacking_bytes = UINT64_MAX;
        if (!request->growth && first->lack.refusal == 0)
                w->lacking_bytes = UINT64_MAX;

        /* How long it took so far until as many bytes were returned to the account that lacks them. */
        w->estimate_ms = RETURNS_UNKNOWN;
        if (request->growth || w->lacking_bytes == UINT64_MAX)
                return;
        returns = !first->lack.scope                         ? &q->returns
                  : first->lack.scope == &q->partition->pool ? &q->partition->returns
                                                             : NULL; /* the tenant's, of several quotas */
        if (returns)
                w->estimate_ms = returns_estimate_ms(returns, w->lacking_bytes, w->now_ms);
}

/* Those that the quota grows for come first. NULL: from the start. */
static const struct quota_request *waiting_after(const struct quota *q, const struct quota_request *request)
{
        const struct running_growth *growth = TAILQ_FIRST(&q->growth.running);

        if (request && !request->growth)
                return TAILQ_NEXT(request, link);
        if (request)
                growth = TAILQ_NEXT(request->growth, link);
        while (growth && !growth->request)
                growth = TAILQ_NEXT(growth, link);
        return growth ? growth->request : TAILQ_FIRST(&q->queue.requests);
}

bool quota_next_waiting(const struct quota *q, struct quota_waiting *w)
{
        const struct quota_request *first = TAILQ_FIRST(&q->queue.requests);
        uint64_t end_ms;

        if (w->position == QUOTA_WAITING_SHOWN)
                return false;
        w->request = waiting_after(q, w->position == 0 ? NULL : w->request);
        if (!w->request)
                return false;
        if (w->position++ == 0)
                w->now_ms = clock_ms();
        end_ms = quota_wait_end_ms(w->request);
        w->waited_ms = w->now_ms - w->request->since_ms;
        w->left_ms = excess_u64(end_ms, w->now_ms);
        w->partition_position = w->request == first ? partition_position(first) : 0;
        waiting_set_lack(q, w);
        return true;
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
