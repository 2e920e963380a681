/* The quota and its ladder; see quota.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/quota.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/clock.h"

#define QUOTA_LOOKS 256u /* requests looked at in one turn */
#define QUOTA_ROOMS 32u  /* and for so many room is made, or a refusal written */

static void quota_settle(struct quota *q);

static void quota_assert(const struct quota *q)
{
        assert(q->bytes_in_use <= q->account.charged_bytes);
        assert(q->account.charged_bytes <= q->account.limit_bytes);
        assert(q->n_blocks <= q->max_blocks);
        assert(q->bytes_requested <= q->bytes_in_use);
        (void)q;
}

static uint64_t min_u64(uint64_t a, uint64_t b)
{
        return a < b ? a : b;
}

static uint64_t max_u64(uint64_t a, uint64_t b)
{
        return a > b ? a : b;
}

/* ---- making one ---------------------------------------------------------- */

/* The only way to charge: the ledger learns of the peak. */
static int quota_charge(struct quota *q, uint64_t n_bytes, struct charge *ret, uint64_t *ret_missing_bytes)
{
        bool empty = q->account.charged_bytes == 0;
        int r = charge_take(&q->account, n_bytes, ret, ret_missing_bytes);

        if (r < 0)
                return r;
        q->high_bytes = empty ? n_bytes : max_u64(q->high_bytes, q->account.charged_bytes);
        ledger_quota_at(q->ledger, q->index)->lifetime_peak_reserved = q->account.lifetime_peak_charged_bytes;
        return 0;
}

static int quota_open_arena(struct quota *q, const struct quota_options *from)
{
        struct partition *p = q->partition;
        uint64_t limit_bytes = q->account.limit_bytes;
        struct arena_options options = {
                .ledger = q->ledger,
                .device = p->device,
                .worker = p->worker,
                .share = p->share,
                .limit_bytes = limit_bytes,
                .extent_bytes = arena_extent_bytes(p->share, limit_bytes, device_granularity(p->device)),
                .retire = from->retire,
                .lets_go = from->lets_go,
                .userdata = from->userdata,
        };
        struct ledger_quota facts = { .extent_bytes = options.extent_bytes };
        struct charge charge;
        uint64_t missing;
        int r;

        snprintf(facts.tenant, sizeof(facts.tenant), "%s", q->tenant);
        snprintf(facts.partition, sizeof(facts.partition), "%s", p->name);
        r = ledger_quota_add(q->ledger, &facts, &q->index);
        if (r < 0)
                return r;
        options.quota = q->index;
        r = arena_new(&options, &q->arena);
        if (r < 0 || !p->preallocate)
                return r;
        r = quota_charge(q, limit_bytes, &charge, &missing);
        if (r < 0)
                return r;
        r = arena_back(q->arena, &charge);
        charge_drop(&charge); /* what was not used up, after a failure */
        return r;
}

int quota_new(const struct quota_options *options, struct quota **ret)
{
        struct quota *q = calloc(1, sizeof(*q));
        int r;

        if (!q)
                return -ENOMEM;
        q->partition = options->partition;
        q->tenant = options->tenant;
        q->ledger = options->ledger;
        q->max_sessions = options->max_sessions;
        q->max_blocks = options->max_blocks;
        q->index = LEDGER_NONE;
        TAILQ_INIT(&q->waiting);
        TAILQ_INSERT_TAIL(&q->partition->quotas, q, of_partition);
        q->partition->n_quotas++;

        r = account_init(&q->account, &q->partition->pool, options->limit_bytes, options->reserve_bytes);
        if (r == 0)
                r = quota_open_arena(q, options);
        if (r < 0) {
                quota_free(q);
                return r;
        }
        *ret = q;
        return 0;
}

struct quota *quota_free(struct quota *q)
{
        if (!q)
                return NULL;
        assert(q->n_sessions == 0 && q->n_blocks == 0 && TAILQ_EMPTY(&q->waiting));
        assert(!q->growing && q->held.n_bytes == 0);
        q->arena = arena_free(q->arena);
        if (q->index != LEDGER_NONE)
                ledger_quota_clear(q->ledger, q->index);
        account_deinit(&q->account);
        if (q->is_due)
                TAILQ_REMOVE(&q->partition->due, q, of_due);
        TAILQ_REMOVE(&q->partition->quotas, q, of_partition);
        q->partition->n_quotas--;
        free(q);
        return NULL;
}

/* ---- blocks -------------------------------------------------------------- */

static void quota_ask_for_turn(struct quota *q)
{
        struct partition *p = q->partition;

        if (q->is_due)
                return;
        q->is_due = true;
        TAILQ_INSERT_TAIL(&p->due, q, of_due);
        if (p->wake)
                p->wake(p->userdata);
}

/* Something changed for those who wait, if anybody does. */
static void quota_make_due(struct quota *q)
{
        if (TAILQ_EMPTY(&q->waiting))
                return;
        q->look_again = true;
        quota_ask_for_turn(q);
}

static void quota_count_alloc(struct quota *q, uint64_t n_bytes)
{
        struct ledger_quota *record = ledger_quota_at(q->ledger, q->index);
        struct partition *p = q->partition;

        q->n_blocks++;
        q->bytes_in_use += bfc_block_bytes(n_bytes);
        q->bytes_requested += n_bytes;
        p->bytes_in_use += bfc_block_bytes(n_bytes);
        p->peak_bytes_in_use = max_u64(p->peak_bytes_in_use, p->bytes_in_use);
        p->lifetime_peak_bytes_in_use = max_u64(p->lifetime_peak_bytes_in_use, p->bytes_in_use);
        q->peak_bytes_in_use = max_u64(q->peak_bytes_in_use, q->bytes_in_use);
        q->peak_bytes_requested = max_u64(q->peak_bytes_requested, q->bytes_requested);
        if (q->bytes_in_use > record->lifetime_peak_in_use)
                record->lifetime_peak_in_use = q->bytes_in_use;
        quota_assert(q);
}

static int quota_try(struct quota *q, uint64_t n_bytes, bool in_extent, bfc_handle *ret_handle,
                     uint64_t *ret_offset)
{
        int r;

        if (q->partition->is_lost)
                return -ENODEV;
        if (q->n_blocks >= q->max_blocks)
                return -EDQUOT;
        r = in_extent ? arena_alloc_in_extent(q->arena, n_bytes, ret_handle, ret_offset)
                      : arena_alloc(q->arena, n_bytes, ret_handle, ret_offset);
        if (r == 0)
                quota_count_alloc(q, n_bytes);
        return r;
}

static bool quota_is_refusal(int r)
{
        return r == -EDQUOT || r == -ENOMEM;
}

int quota_alloc(struct quota *q, uint64_t n_bytes, bool in_extent, bfc_handle *ret_handle,
                uint64_t *ret_offset)
{
        int r;

        if (n_bytes == 0)
                return -EINVAL;
        if (q->partition->is_lost)
                r = -ENODEV;
        else if (n_bytes > q->account.limit_bytes)
                r = -EDQUOT;
        else if (in_extent && n_bytes > arena_max_in_extent(q->arena))
                r = -EINVAL;
        else if (q->is_due)
                r = QUOTA_WAIT; /* those who came before are looked at first */
        else
                r = quota_try(q, n_bytes, in_extent, ret_handle, ret_offset);
        if (quota_is_refusal(r))
                q->n_refusals++;
        return r > 0 ? QUOTA_WAIT : r;
}

void quota_dealloc(struct quota *q, bfc_handle handle, uint64_t n_bytes, uint64_t n_requested)
{
        int r = arena_dealloc(q->arena, handle);

        assert(r == 0);
        (void)r;
        assert(q->n_blocks > 0);
        q->n_blocks--;
        q->bytes_in_use -= n_bytes;
        q->bytes_requested -= n_requested;
        q->partition->bytes_in_use -= n_bytes;
        quota_assert(q);
        quota_make_due(q);
}

/* ---- the ladder ---------------------------------------------------------- */

/* Everybody in the partition who waits may now have what others gave back. */
static void partition_make_due(struct partition *p)
{
        struct quota *q;

        TAILQ_FOREACH(q, &p->quotas, of_partition)
        quota_make_due(q);
}

/* Nobody grows with what is held. */
static void quota_unhold(struct quota *q)
{
        q->trade_bytes = 0;
        if (q->held.n_bytes == 0)
                return;
        charge_drop(&q->held);
        partition_make_due(q->partition);
}

static void quota_unqueue(struct quota_request *request)
{
        struct quota *q = request->quota;

        if (q->next == request)
                q->next = TAILQ_NEXT(request, link);
        TAILQ_REMOVE(&q->waiting, request, link);
        if (!TAILQ_EMPTY(&q->waiting))
                return;
        q->blocked_ms = 0;
        quota_unhold(q);
}

/* It gets what it wants. If that was the first, the next has its time before it; who is
 * served past the first changes nothing for it. */
static void quota_unqueue_served(struct quota_request *request)
{
        struct quota *q = request->quota;

        if (TAILQ_FIRST(&q->waiting) == request)
                q->blocked_ms = 0;
        quota_unqueue(request);
}

static void quota_complete(struct quota_request *request, int result, bfc_handle handle, uint64_t offset)
{
        if (quota_is_refusal(result))
                request->quota->n_refusals++;
        request->done(request, result, handle, offset);
}

void partition_lose(struct partition *p)
{
        p->is_lost = true;
        partition_make_due(p);
}

static void quota_grown(void *userdata, int result, bfc_handle handle, uint64_t offset)
{
        struct quota *q = userdata;
        struct quota_request *request = q->growing_for;

        q->growing = false;
        q->growing_for = NULL;
        if (request && result == 0 && q->n_blocks >= q->max_blocks)
                result = -EDQUOT; /* others that passed by took the last ones */
        else if (request && result < 0)
                request->device_failed = true;
        else if (request)
                quota_count_alloc(q, request->n_bytes);

        if (handle != 0 && (!request || result < 0)) {
                (void)arena_dealloc(q->arena, handle);
                handle = 0;
        }
        if (request)
                quota_complete(request, result, handle, offset);
        quota_make_due(q);
        quota_settle(q);
}

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

/* What was given back is uncharged by now, in this very turn of the loop: nobody else had it.
 * Less than n_bytes is where the device did not take all of it back. */
static void quota_released(void *userdata, uint64_t n_bytes)
{
        struct quota *q = userdata;
        uint64_t traded = min_u64(n_bytes, q->trade_bytes);

        q->trade_bytes -= traded;
        (void)quota_hold(q, q->held.n_bytes + traded);
        quota_settle(q);
        partition_make_due(q->partition);
}

/* Starts giving back; returns how many bytes. */
static uint64_t quota_release(struct quota *q, uint64_t want_bytes, const struct bfc_growth *keep)
{
        if (q->partition->preallocate)
                return 0;
        return arena_release(q->arena, want_bytes, keep, quota_released, q);
}

/* A tenant without blocks whose last session has left holds nothing: its extents
 * go back. */
static void quota_settle(struct quota *q)
{
        if (q->n_sessions == 0 && !q->growing)
                (void)quota_release(q, UINT64_MAX, NULL);
}

/* Bytes of this quota on their way back, late ones not counted. */
static uint64_t quota_coming(const struct quota *q)
{
        return arena_leaving_bytes(q->arena) + arena_awaited_bytes(q->arena);
}

static bool partition_is_closing(const struct partition *p)
{
        struct quota *q;

        TAILQ_FOREACH(q, &p->quotas, of_partition)
        if (q->n_closing > 0)
                return true;
        return false;
}

/* What a quota holds beyond what its reserve keeps anyway: only that can come
 * back to its pool. */
static uint64_t quota_surplus(const struct quota *q)
{
        const struct account *a = &q->account;

        return a->charged_bytes > a->reserve_bytes ? a->charged_bytes - a->reserve_bytes : 0;
}

/* Of what the first in line is given back for, what is still on its way. */
static uint64_t quota_traded(const struct quota *q)
{
        return min_u64(q->trade_bytes, quota_coming(q));
}

/* What comes back to the pool, but for what q trades. */
static uint64_t partition_coming(const struct quota *q)
{
        const struct quota *each;
        uint64_t n_bytes = 0;

        TAILQ_FOREACH(each, &q->partition->quotas, of_partition)
        n_bytes += min_u64(quota_coming(each) - (each == q ? quota_traded(q) : 0), quota_surplus(each));
        return n_bytes;
}

/* What a quota could return to its pool by giving back what is wholly free, not
 * counting what comes anyway. */
static uint64_t quota_yield(const struct quota *q)
{
        uint64_t surplus = quota_surplus(q), coming = min_u64(quota_coming(q), surplus);

        if (q->partition->preallocate || surplus == coming)
                return 0;
        return min_u64(arena_releasable(q->arena, NULL), surplus - coming);
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
        if (n_bytes == 0 || !quota_hold(q, plan->new_bytes - traded))
                return false;
        n_bytes = arena_release_soon(q->arena, n_bytes, plan, quota_released, q);
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
        struct quota *other;

        TAILQ_FOREACH(other, &q->partition->quotas, of_partition)
        if (other != q && quota_may_be_asked(other, again))
                sum += quota_yield(other);
        if (sum < missing)
                return false;

        if (own > 0)
                n_begun = quota_give_for(q, plan, min_u64(missing, own));
        TAILQ_FOREACH(other, &q->partition->quotas, of_partition)
        {
                bool ask = other != q && n_begun < missing && quota_may_be_asked(other, again);
                uint64_t yield = ask ? quota_yield(other) : 0;

                if (yield > 0)
                        n_begun += quota_release(other, min_u64(missing - n_begun, yield), NULL);
        }
        return quota_traded(q) + partition_coming(q) > 0; /* none where all are late */
}

/* The first in line waits for others; true: for longer than it is to. */
static bool quota_is_late(struct quota *q)
{
        uint64_t now = clock_ms();

        if (q->blocked_ms == 0)
                q->blocked_ms = now;
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

/* Its own limit misses so many bytes. 0: they are on their way. */
static int quota_reclaim(struct quota *q, uint64_t missing, const struct bfc_growth *plan)
{
        uint64_t coming = quota_coming(q);

        if (coming < missing && arena_releasable(q->arena, plan) >= missing - coming)
                coming += quota_give_for(q, plan, missing - coming);
        if (coming < missing && q->n_closing == 0)
                return -EDQUOT;
        return quota_wait_for_own(q, missing, -EDQUOT);
}

/* The partition misses so many bytes, beyond those that are traded. 0: they are on their way. */
static int quota_reclaim_in_partition(struct quota *q, uint64_t missing, const struct bfc_growth *plan)
{
        struct quota_request *first = TAILQ_FIRST(&q->waiting);
        uint64_t coming = partition_coming(q);

        if (coming < missing && !partition_is_closing(q->partition) &&
            !quota_reclaim_from_partition(q, missing - coming, plan, false))
                return -ENOMEM;
        if (!quota_is_late(q))
                return 0;
        /* What did not come may hide what others would give: they are asked as if it never came. */
        if (first->asked_again || !quota_reclaim_from_partition(q, missing, plan, true))
                return -ENOMEM;
        first->asked_again = true;
        q->blocked_ms = clock_ms();
        return 0;
}

/* Starts the growth, for which the limits have room; the request is not in line any more. */
static int quota_grow(struct quota *q, struct quota_request *request, const struct bfc_growth *plan)
{
        struct charge charge;
        uint64_t missing;
        int r;

        quota_unhold(q);
        r = quota_charge(q, plan->new_bytes, &charge, &missing);
        if (r < 0)
                return r;
        r = arena_grow(q->arena, plan, &charge, quota_grown, q);
        if (r < 0) {
                charge_drop(&charge);
                return r;
        }
        quota_unqueue_served(request);
        q->growing = true;
        q->growing_for = request;
        return 0;
}

/* Makes room for the first in line. 0: something is under way, wait for it.
 * Negative: it is refused. */
static int quota_make_room(struct quota *q, struct quota_request *request)
{
        uint64_t need, after, want, traded = quota_traded(q), missing = 0;
        uint64_t room = account_room(&q->account) + q->held.n_bytes;
        struct bfc_growth plan;
        int r;

        r = request->in_extent ? arena_plan_in_extent(q->arena, request->n_bytes, room, &plan)
                               : arena_plan(q->arena, request->n_bytes, room, &plan);
        if (r < 0)
                return r;
        if (plan.new_bytes == 0) { /* it fits by now: the next round serves it */
                q->look_again = true;
                return 0;
        }
        need = plan.new_bytes - min_u64(plan.new_bytes, q->held.n_bytes);
        after = q->account.charged_bytes + need;
        r = account_probe(&q->account, need, &missing);
        want = max_u64(missing, after > q->high_bytes ? after - q->high_bytes : 0);
        if (want > traded && (r < 0 || !quota_is_late(q)) && quota_trade(q, &plan, want - traded))
                return quota_wait_for_others(q, 0); /* from now on */
        if (r == 0)
                return traded > 0 && !quota_is_late(q) ? 0 : quota_grow(q, request, &plan);
        if (r == -EDQUOT)
                return quota_reclaim(q, missing, &plan);
        if (traded >= missing)
                return quota_wait_for_own(q, missing, r);
        return quota_reclaim_in_partition(q, missing - traded, &plan);
}

/* Gives those who wait what fits; false: the budget is used up. */
static bool quota_serve(struct quota *q, unsigned *budget)
{
        while (q->next && *budget > 0) {
                struct quota_request *request = q->next;
                bfc_handle handle = 0;
                uint64_t offset = 0;
                int r = quota_try(q, request->n_bytes, request->in_extent, &handle, &offset);

                (*budget)--;
                q->next = TAILQ_NEXT(request, link);
                if (r > 0)
                        continue;
                quota_unqueue_served(request);
                quota_complete(request, r, handle, offset);
        }
        return !q->next;
}

/* Makes room for the first in line, or refuses it and the next; false: the
 * budget is used up. */
static bool quota_make_rooms(struct quota *q, unsigned *budget)
{
        struct quota_request *request;

        while (!q->growing && (request = TAILQ_FIRST(&q->waiting))) {
                int r;

                if ((*budget)-- == 0)
                        return false;
                r = quota_make_room(q, request);
                if (r == 0)
                        return true;
                quota_unqueue(request);
                quota_complete(request, r, 0, 0);
        }
        return true;
}

void quota_turn(struct quota *q)
{
        unsigned looks = QUOTA_LOOKS, rooms = QUOTA_ROOMS;

        /* A round is finished before the next begins: nobody at its end is starved. */
        if (q->look_again && !q->next) {
                q->look_again = false;
                q->next = TAILQ_FIRST(&q->waiting);
        }
        if (!quota_serve(q, &looks) || !quota_make_rooms(q, &rooms) || q->look_again)
                return;
        q->is_due = false;
        TAILQ_REMOVE(&q->partition->due, q, of_due);
}

void quota_tick(struct quota *q)
{
        if (q->blocked_ms != 0)
                quota_make_due(q);
}

void quota_wait(struct quota_request *request)
{
        struct quota *q = request->quota;

        request->since_ms = clock_ms();
        request->asked_again = false;
        TAILQ_INSERT_TAIL(&q->waiting, request, link);
        /* The round is over: it goes on with this one, unless all are to be looked at again. */
        if (!q->next && !q->look_again)
                q->next = request;
        quota_ask_for_turn(q);
}

void quota_cancel(struct quota_request *request)
{
        struct quota *q = request->quota;

        if (q->growing_for == request)
                q->growing_for = NULL;
        else
                quota_unqueue(request);
}

/* ---- sessions ------------------------------------------------------------ */

int quota_join(struct quota *q)
{
        if (q->n_sessions >= q->max_sessions)
                return -EDQUOT;
        q->n_sessions++;
        return 0;
}

void quota_closing(struct quota *q)
{
        q->n_closing++;
        assert(q->n_closing <= q->n_sessions);
}

void quota_closed(struct quota *q)
{
        assert(q->n_closing > 0);
        q->n_closing--;
        partition_make_due(q->partition);
}

void quota_leave(struct quota *q)
{
        assert(q->n_sessions > q->n_closing);
        q->n_sessions--;
        quota_settle(q);
}

/* ---- words and figures --------------------------------------------------- */

/* A block that must lie in one extent is larger than that. */
static void quota_explain_extent(const struct quota_request *refused, char *buf, size_t n_buf)
{
        const struct quota *q = refused->quota;
        const struct partition *p = q->partition;

        snprintf(buf, n_buf,
                 "%" PRIu64
                 " bytes cannot lie in one extent of tenant '%s' in partition '%s', which has %" PRIu64
                 " bytes: ask for less, or have a limit of %" PRIu64 " bytes or more%s",
                 refused->n_bytes, q->tenant, p->name, arena_max_in_extent(q->arena),
                 arena_limit_for_extent(refused->n_bytes, device_granularity(p->device)),
                 p->is_cuda ? ", or 'share: cuda-ipc', with which every block lies in one extent" : "");
}

void quota_explain(const struct quota_request *refused, int error, char *buf, size_t n_buf)
{
        const char *how = refused->in_extent ? " in one extent" : "";
        const struct quota *q = refused->quota;
        const struct account *a = &q->account;
        const struct pool *p = &q->partition->pool;
        struct bfc_stats stats;

        arena_read_stats(q->arena, &stats);
        if (error == -ENODEV)
                snprintf(buf, n_buf,
                         "device '%s' of partition '%s' is lost, and its memory with it, until the daemon is "
                         "started again",
                         q->partition->device_id, q->partition->name);
        else if (error == -EINVAL)
                quota_explain_extent(refused, buf, n_buf);
        else if (error == -EDQUOT && q->n_blocks >= q->max_blocks)
                snprintf(buf, n_buf,
                         "tenant '%s' holds %" PRIu32
                         " blocks in partition '%s': its limit max_blocks is %" PRIu32,
                         q->tenant, q->n_blocks, q->partition->name, q->max_blocks);
        else if (error == -EDQUOT)
                snprintf(buf, n_buf,
                         "%" PRIu64
                         " bytes%s do not fit the limit of tenant '%s' in partition '%s': limit %" PRIu64
                         ", reserved %" PRIu64 ", in use %" PRIu64 ", largest free piece %" PRIu64 " bytes",
                         refused->n_bytes, how, q->tenant, q->partition->name, a->limit_bytes,
                         a->charged_bytes, q->bytes_in_use, stats.largest_free_block_bytes);
        else
                snprintf(buf, n_buf,
                         "%" PRIu64 " bytes%s do not fit in partition '%s': its limit %" PRIu64
                         ", reserved or guaranteed %" PRIu64 "; tenant '%s': limit %" PRIu64
                         ", reserved %" PRIu64 ", in use %" PRIu64 ", largest free piece %" PRIu64 " bytes",
                         refused->n_bytes, how, q->partition->name, p->limit_bytes, p->committed_bytes,
                         q->tenant, a->limit_bytes, a->charged_bytes, q->bytes_in_use,
                         stats.largest_free_block_bytes);
}

void quota_clear_peaks(struct quota *q)
{
        q->peak_bytes_in_use = q->bytes_in_use;
        q->peak_bytes_requested = q->bytes_requested;
        account_clear_peaks(&q->account);
}

int quota_check(const struct quota *q, const char **ret_why)
{
        struct bfc_stats stats;
        int r = arena_check(q->arena, ret_why);

        if (r < 0)
                return r;
        arena_read_stats(q->arena, &stats);
        if (stats.bytes_reserved > q->account.charged_bytes) {
                *ret_why = "the allocator has more bytes reserved than are charged";
                return -EBADMSG;
        }
        /* A growing block is the allocator's already and the quota's not yet. */
        if (!q->growing && (stats.bytes_in_use != q->bytes_in_use || stats.num_blocks != q->n_blocks)) {
                *ret_why = "blocks of the quota and of the allocator differ";
                return -EBADMSG;
        }
        return 0;
}
