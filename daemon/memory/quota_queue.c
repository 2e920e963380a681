/* The queue of a quota: requests that wait, in order; see quota.h.
 *
 * Requests are looked at in rounds, a bounded number in each turn. A round is finished before the next
 * begins, so that no request at its end is starved.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/reclaim.h"

#include <errno.h>

#include "daemon/base/clock.h"
#include "daemon/base/list.h"
#include "daemon/base/number.h"

#define QUOTA_LOOKS      256u /* requests looked at in one turn */
#define QUOTA_ROOMS      32u  /* and for so many room is made, or a refusal written */
#define QUOTA_ROOM_LOOKS 8u
#define QUOTA_ROOMS_NS   20000u /* at most about so long: what it takes is a matter of how many there are */

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

void quota_set_blocked(struct quota *q, uint64_t since_ms)
{
        quota_set_ticks(q, since_ms, q->queue.is_deferred);
}

/* ---- the queue ------------------------------------------------------------- */

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

struct quota_request *quota_next_of_group(const struct quota_request *request)
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
void quota_unqueue_served(struct quota_request *request)
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

void quota_complete(struct quota_request *request, int result, bfc_handle handle, uint64_t offset)
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
                quota_count_refusal(request->quota, result);
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
        if (q->growth.request == request)
                q->growth.request = NULL; /* the worker goes on; quota_grown() frees the block */
        else
                quota_unqueue(request);
}

/* ---- a turn ---------------------------------------------------------------- */

bool quota_first_is_aged(const struct quota *q, uint64_t now)
{
        const struct quota_request *first = TAILQ_FIRST(&q->queue.requests);

        return first && first->queued_ms != 0 && now - first->queued_ms >= RECLAIM_AGED_MS;
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
        if (r > 0 && request != first && first->queued_ms != 0 && !q->growth.is_running &&
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

/* Makes room for the first request, or refuses it and the next; false: the budget is used up. */
static bool quota_make_rooms(struct quota *q, unsigned *budget)
{
        struct quota_request *request;
        uint64_t began_ns = 0;

        while (!q->growth.is_running && (request = TAILQ_FIRST(&q->queue.requests))) {
                int r;

                if ((*budget)-- == 0 || (began_ns != 0 && clock_ns() - began_ns >= QUOTA_ROOMS_NS))
                        return false;
                began_ns = began_ns == 0 ? clock_ns() : began_ns;
                q->partition->queue.n_looks++;
                r = q->partition->is_draining ? -EBUSY : reclaim_make_room(q, request);
                if (r == 0) /* it grows, or the others wait behind it */
                        return true;

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

/* ---- claims: what a waiting request gets before later ones --------------- */

#define RECLAIM_CALM_MS 10000u /* after this time without a claim the next one counts as the first */

struct account *reclaim_shared_account(struct quota *q)
{
        return quota_parent(q) ? &quota_parent(q)->account : q->account.n_children > 0 ? &q->account : NULL;
}

/* Claims of leases are their tenant's: one that goes round its leases does not become younger. */
static struct quota_growth *growth_of_tenant(const struct quota *q)
{
        return quota_parent(q) ? &quota_parent(q)->growth : &((struct quota *)(uintptr_t)q)->growth;
}

void reclaim_set_claim(struct quota_request *request, struct account *a, uint64_t n_bytes)
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

void reclaim_note_growth(const struct quota_request *request)
{
        struct quota_growth *growth = growth_of_tenant(request->quota);

        if (reclaim_has_claim(request) && growth->n_claims == 1)
                growth->claim_ms = 0;
}

/* Only the first of a queue has a claim. */
uint64_t reclaim_claims_of(const struct partition *p, const struct account *a)
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

/* ---- waiting requests, for lists ----------------------------------------- */

uint64_t quota_wait_end_ms(const struct quota_request *request)
{
        uint64_t end_ms = request->since_ms + RECLAIM_STEPS * request->quota->partition->reclaim_timeout_ms +
                          request->wait_ms;

        return request->queued_ms != 0 ? min_u64(end_ms, request->queued_ms + request->wait_ms) : end_ms;
}

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
        if (request == q->growth.request)
                w->lacking_bytes = 0;
        else if (request == first)
                w->lacking_bytes = request->lack.refusal != 0 ? request->lack.missing : UINT64_MAX;
        else if (__builtin_add_overflow(w->lacking_bytes, request->n_bytes, &w->lacking_bytes))
                w->lacking_bytes = UINT64_MAX;
        if (request != q->growth.request && first->lack.refusal == 0)
                w->lacking_bytes = UINT64_MAX;

        /* How long it took so far until as many bytes were returned to the account that lacks them. */
        w->estimate_ms = RETURNS_UNKNOWN;
        if (request == q->growth.request || w->lacking_bytes == UINT64_MAX)
                return;
        returns = !first->lack.scope                         ? &q->returns
                  : first->lack.scope == &q->partition->pool ? &q->partition->returns
                                                             : NULL; /* the tenant's, of several quotas */
        if (returns)
                w->estimate_ms = returns_estimate_ms(returns, w->lacking_bytes, w->now_ms);
}

bool quota_next_waiting(const struct quota *q, struct quota_waiting *w)
{
        const struct quota_request *first = TAILQ_FIRST(&q->queue.requests);
        uint64_t end_ms;

        if (w->position == QUOTA_WAITING_SHOWN)
                return false;
        if (w->position == 0)
                w->request = q->growth.request ? q->growth.request : first;
        else
                w->request = w->request == q->growth.request ? first : TAILQ_NEXT(w->request, link);
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

/* ---- requests for parked blocks ------------------------------------------ */

bool quota_can_park(const struct quota *q)
{
        const struct partition *p = q->partition;

        return p->share == DEVICE_SHARE_FD && !p->preallocate && p->device->ops->copy;
}

int quota_alloc_whole(struct quota *q, uint64_t n_bytes, bool again)
{
        int r = quota_can_park(q) ? quota_refusal(q) : -ENOTSUP;

        if (r == 0 && quota_without_block(q))
                r = -EDQUOT;
        return quota_wait_or_refuse(q, n_bytes, r, again);
}

int quota_try_copy(struct quota *q, struct quota_request *request, bfc_handle *ret_handle,
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

static void count_parked(struct quota *q, uint64_t n_bytes)
{
        quota_count_blocks(q, 0, -n_bytes, -n_bytes);
        quota_assert(q);
        (void)quota_note_release(q, n_bytes);
}

int quota_park(struct quota *q, bfc_handle handle, uint64_t n_bytes)
{
        int r = arena_park(q->arena, handle, quota_on_uncharged, q);

        if (r == 0)
                count_parked(q, n_bytes);
        return r;
}

void quota_wake_commit(struct quota *q, bfc_handle handle)
{
        arena_wake_commit(q->arena, handle);
}

void quota_wake_undo(struct quota *q, bfc_handle handle, uint64_t n_bytes)
{
        arena_wake_undo(q->arena, handle);
        count_parked(q, n_bytes);
}

int quota_release_parked(struct quota *q)
{
        int r = arena_release_parked(q->arena, quota_on_uncharged, q);

        (void)quota_note_release(q, 0);
        return r;
}

static bool has_room_for_parked(const struct quota *q, uint64_t parked, uint64_t n_bytes)
{
        uint64_t limit = q->account.limit_bytes;
        uint64_t most = limit <= UINT64_MAX / QUOTA_PARKED_LIMITS ? QUOTA_PARKED_LIMITS * limit : UINT64_MAX;

        return parked <= most && n_bytes <= most - parked;
}

bool quota_may_park(const struct quota *q, uint64_t n_bytes)
{
        const struct quota *of_tenant = quota_of_tenant(q);

        return has_room_for_parked(of_tenant, of_tenant->all.bytes_parked, n_bytes) &&
               has_room_for_parked(q, arena_parked_bytes(q->arena), n_bytes);
}

void quota_drop_parked(struct quota *q, bfc_handle handle)
{
        arena_drop_parked(q->arena, handle);
        quota_count_blocks(q, -(uint32_t)1, 0, 0);
        quota_publish(q);
        quota_make_due(q);
}
