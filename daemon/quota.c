/* The quota; see quota.h. How room is made for the first in line is in ladder.c.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/quota.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/clock.h"
#include "daemon/ladder.h"
#include "daemon/number.h"

#define QUOTA_LOOKS      256u /* requests looked at in one turn */
#define QUOTA_ROOMS      32u  /* and for so many room is made, or a refusal written */
#define QUOTA_ROOM_LOOKS 8u
#define QUOTA_ROOMS_NS   20000u /* at most about so long: what it takes is a matter of how many there are */

/* Before any reply that goes out because of the change: a client that knows of it reads it. */
void quota_publish(struct quota *q)
{
        uint64_t figures[PAGES_N_FIGURES];
        struct bfc_stats stats;

        if (!q->usage)
                return;
        arena_read_stats(q->arena, &stats);
        figures[PAGES_BYTES_LIMIT] = q->account.limit_bytes;
        figures[PAGES_BYTES_RESERVED] = q->account.charged_bytes;
        figures[PAGES_PEAK_BYTES_RESERVED] = q->account.peak_charged_bytes;
        figures[PAGES_BYTES_IN_USE] = q->bytes_in_use;
        figures[PAGES_PEAK_BYTES_IN_USE] = q->peak_bytes_in_use;
        figures[PAGES_BYTES_REQUESTED] = q->bytes_requested;
        figures[PAGES_NUM_BLOCKS] = q->n_blocks;
        figures[PAGES_NUM_SESSIONS] = q->n_sessions;
        figures[PAGES_LARGEST_FREE_BLOCK_BYTES] = stats.largest_free_block_bytes;
        figures[PAGES_LIFETIME_PEAK_BYTES_IN_USE] = ledger_quota_at(q->ledger, q->index)->life.peak_in_use;
        figures[PAGES_LIFETIME_PEAK_BYTES_RESERVED] = q->account.lifetime_peak_charged_bytes;
        pages_write(q->usage, figures);
}

void quota_note_change(struct quota *q)
{
        if (q->is_changed)
                return;
        q->is_changed = true;
        TAILQ_INSERT_TAIL(&q->partition->changed, q, of_changed);
}

static void quota_forget_change(struct quota *q)
{
        if (q->is_changed)
                TAILQ_REMOVE(&q->partition->changed, q, of_changed);
        q->is_changed = false;
}

struct quota *partition_next_changed(struct partition *p)
{
        struct quota *q = TAILQ_FIRST(&p->changed);

        if (q)
                quota_forget_change(q);
        return q;
}

static void quota_charge_changed(struct account *a)
{
        struct quota *q = (struct quota *)(void *)((char *)a - offsetof(struct quota, account));

        quota_note_change(q);
        quota_publish(q);
}

static void quota_assert(const struct quota *q)
{
        assert(q->bytes_in_use <= q->account.charged_bytes);
        assert(q->account.charged_bytes <= q->account.ceiling_bytes);
        assert(q->n_blocks <= q->blocks_ceiling);
        assert(q->bytes_requested <= q->bytes_in_use);
        (void)q;
}

/* The present values may be new peaks. */
static void quota_note_peaks(struct quota *q)
{
        struct partition *p = q->partition;
        bool is_new = q->bytes_in_use > q->peak_bytes_in_use;
        bool is_partitions = p->bytes_in_use > p->peak_bytes_in_use;
        uint64_t now_ms = is_new || is_partitions ? clock_wall_ms() : 0;

        if (is_new) {
                q->peak_bytes_in_use = q->bytes_in_use;
                q->peak_in_use_ms = now_ms;
        }
        if (is_partitions) {
                p->peak_bytes_in_use = p->bytes_in_use;
                p->peak_in_use_ms = now_ms;
        }
}

/* ---- making one ---------------------------------------------------------- */

/* The only way to charge: the ledger learns of the peak. */
int quota_charge(struct quota *q, uint64_t n_bytes, struct charge *ret, uint64_t *ret_missing_bytes)
{
        bool empty = q->account.charged_bytes == 0;
        int r = charge_take(&q->account, n_bytes, ret, ret_missing_bytes);
        struct ledger_lifetime *life;

        if (r < 0)
                return r;
        q->high_bytes = empty ? n_bytes : max_u64(q->high_bytes, q->account.charged_bytes);
        life = &ledger_quota_at(q->ledger, q->index)->life;
        life->peak_reserved = q->account.lifetime_peak_charged_bytes;
        life->partition_peak_reserved = q->partition->pool.lifetime_peak_charged_bytes;
        return 0;
}

struct arena_grid quota_grid(const struct ledger_quota *record)
{
        return (struct arena_grid){ record->extent_bytes, record->small_extent_bytes,
                                    record->extents_per_zone };
}

static void quota_describe_arena(struct quota *q, const struct quota_options *from,
                                 const struct arena_grid *grid, struct arena_options *ret)
{
        const struct partition *p = q->partition;

        *ret = (struct arena_options){
                .ledger = q->ledger,
                .device = p->device,
                .worker = p->worker,
                .punch = p->punch,
                .store = p->store,
                .watch = p->watch,
                .standby = p->standby.standby,
                .quota = q->index,
                .share = p->share,
                .clears = p->clears,
                .supply = p->supply,
                .limit_bytes = q->account.limit_bytes,
                .extent_bytes = grid->extent_bytes,
                .small_extent_bytes = grid->small_extent_bytes,
                .extents_per_zone = grid->extents_per_zone,
                .retire = from->retire,
                .lets_go = from->lets_go,
                .userdata = from->userdata,
        };
}

/* As much as there may be now: others may be over what is theirs. */
static int quota_charge_some(struct quota *q, uint64_t n_bytes, struct charge *ret)
{
        uint64_t missing = 0;
        int r = quota_charge(q, n_bytes, ret, &missing);

        return r < 0 && missing < n_bytes ? quota_charge(q, n_bytes - missing, ret, &missing) : r;
}

void quota_pause_growth(struct quota *q)
{
        q->paused_until_ms = clock_ms() + QUOTA_PAUSE_MS;
}

uint64_t quota_growth_pause_ms(const struct quota *q)
{
        uint64_t now_ms = q->paused_until_ms != 0 ? clock_ms() : 0;

        return now_ms < q->paused_until_ms ? q->paused_until_ms - now_ms : 0;
}

int quota_back_early(struct quota *q)
{
        uint64_t n_room = q->account.limit_bytes - min_u64(q->account.limit_bytes, q->account.charged_bytes);
        uint64_t n_bytes = 0;
        struct charge charge;
        int r;

        if (q->partition->preallocate && !q->is_removed)
                n_bytes = min_u64(arena_unbacked_bytes(q->arena, q->account.limit_bytes), n_room);
        if (n_bytes == 0)
                return 0;
        if (quota_growth_pause_ms(q) > 0)
                return -ECANCELED;
        r = quota_charge_some(q, n_bytes, &charge);
        if (r < 0)
                return r;
        r = arena_back(q->arena, q->account.limit_bytes, &charge);
        charge_drop(&charge); /* what was not used up */
        quota_publish(q);
        return r;
}

static int quota_open_arena(struct quota *q, const struct quota_options *from)
{
        const struct partition *p = q->partition;
        uint64_t limit_bytes = q->account.limit_bytes;
        struct arena_grid grid = arena_grid(p->share, limit_bytes, device_granularity(p->device));
        struct ledger_quota facts = { .extent_bytes = grid.extent_bytes,
                                      .small_extent_bytes = grid.small_extent_bytes,
                                      .extents_per_zone = grid.extents_per_zone };
        struct arena_options options;
        int r;

        snprintf(facts.tenant, sizeof(facts.tenant), "%s", q->tenant);
        snprintf(facts.partition, sizeof(facts.partition), "%s", p->name);
        r = ledger_quota_add(q->ledger, &facts, &q->index);
        if (r < 0)
                return r;
        quota_describe_arena(q, from, &grid, &options);
        r = arena_new(&options, &q->arena);
        if (r < 0 || !p->preallocate || from->is_backed_later)
                return r;
        r = quota_back_early(q);
        return r == 0 && q->account.charged_bytes < limit_bytes ? -ENOMEM : r;
}

/* ---- from what was left -------------------------------------------------- */

static void quota_count_remains(struct quota *q, const struct arena_remains *from)
{
        struct partition *p = q->partition;

        for (size_t i = 0; i < from->n_blocks; i++) {
                const struct ledger_block *b = ledger_block_at(q->ledger, from->blocks[i]);

                q->bytes_in_use += b->n_bytes;
                q->bytes_requested += b->n_requested;
        }
        q->n_blocks = (uint32_t)from->n_blocks;
        q->blocks_ceiling = q->n_blocks > q->max_blocks ? q->n_blocks : q->max_blocks;
        q->peak_bytes_requested = q->bytes_requested;
        p->bytes_in_use += q->bytes_in_use;
        p->lifetime_peak_bytes_in_use = max_u64(p->lifetime_peak_bytes_in_use, p->bytes_in_use);
        quota_note_peaks(q);
}

/* Its record stays whatever happens. */
static int quota_restore_arena(struct quota *q, const struct quota_options *from)
{
        struct ledger_quota *record = ledger_quota_at(q->ledger, from->index);
        struct arena_grid grid = quota_grid(record);
        struct arena_options options;
        struct charge charge = { NULL, 0 };
        uint64_t missing;
        int r;

        *from->ret_why = "extents of this size are not supported";
        if (!arena_grid_is_valid(&grid, device_granularity(q->partition->device)))
                return -EBADMSG;
        q->index = from->index;
        q->account.lifetime_peak_charged_bytes = record->life.peak_reserved;
        quota_describe_arena(q, from, &grid, &options);
        r = quota_charge(q, from->remains_bytes, &charge, &missing);
        *from->ret_why = NULL;
        if (r == 0)
                r = arena_restore(&options, from->remains, &charge, &q->arena, from->ret_why);
        charge_drop(&charge);
        if (r < 0) {
                q->index = LEDGER_NONE;
                return r;
        }
        quota_count_remains(q, from->remains);
        return q->partition->punch ? ladder_resume_release(q) : 0;
}

static int quota_open(struct quota *q, const struct quota_options *from)
{
        uint64_t missing;
        int r;

        r = account_init(&q->account, &q->partition->pool, from->limit_bytes, from->reserve_bytes);
        if (r == 0)
                r = charge_take(&q->account, from->closed_bytes, &q->closed, &missing);
        if (r < 0)
                return r;
        return from->remains ? quota_restore_arena(q, from) : quota_open_arena(q, from);
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
        q->keep_bytes = options->keep_bytes;
        q->keep_ms = options->keep_ms;
        q->blocks_ceiling = options->max_blocks;
        q->trim = options->trim;
        q->userdata = options->userdata;
        q->index = LEDGER_NONE;
        TAILQ_INIT(&q->waiting);
        TAILQ_INIT(&q->holdings);
        TAILQ_INSERT_TAIL(&q->partition->quotas, q, of_partition);
        q->partition->n_quotas++;
        ladder_note_free(q);

        r = quota_open(q, options);
        if (r < 0) {
                quota_free(q);
                return r;
        }
        q->account.changed = quota_charge_changed;
        quota_note_change(q);
        q->usage = options->usage;
        quota_publish(q);
        *ret = q;
        return 0;
}

static void quota_end(struct quota *q)
{
        struct partition *p = q->partition;

        ladder_unkeep(q);
        ladder_end_recall(q, true);
        charge_drop(&q->closed);
        account_deinit(&q->account);
        if (q->is_due)
                TAILQ_REMOVE(&p->due, q, of_due);
        ladder_leave_lists(q);
        quota_forget_change(q);
        TAILQ_REMOVE(&p->quotas, q, of_partition);
        p->n_quotas--;
        free(q->report);
        free(q);
}

struct quota *quota_free(struct quota *q)
{
        struct partition *p;

        if (!q)
                return NULL;
        assert(q->n_sessions == 0 && q->n_blocks == 0 && TAILQ_EMPTY(&q->waiting));
        assert(!q->growing && !q->backed && q->held.n_bytes == 0 && !q->asked);
        q->usage = NULL; /* the arena's figures go first */
        q->arena = arena_free(q->arena);
        p = q->partition;
        if (q->index != LEDGER_NONE)
                ledger_quota_clear(q->ledger, q->index);
        quota_end(q);
        partition_keep_life(p);
        return NULL;
}

struct quota *quota_abandon(struct quota *q)
{
        if (!q)
                return NULL;
        assert(q->n_sessions == 0 && TAILQ_EMPTY(&q->waiting));
        assert(!q->growing && q->held.n_bytes == 0);
        q->usage = NULL;
        q->account.changed = NULL;
        q->arena = arena_leave(q->arena);
        q->partition->bytes_in_use -= q->bytes_in_use;
        quota_end(q);
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

/* ---- who is in line -------------------------------------------------------- */

static bool quota_needs_ticks(const struct quota *q)
{
        return q->blocked_ms != 0 || q->is_put_off;
}

static void quota_set_ticks(struct quota *q, uint64_t blocked_ms, bool is_put_off)
{
        bool needed = quota_needs_ticks(q);

        q->blocked_ms = blocked_ms;
        q->partition->n_put_off += is_put_off;
        q->partition->n_put_off -= q->is_put_off;
        q->is_put_off = is_put_off;
        q->partition->n_blocked += quota_needs_ticks(q);
        q->partition->n_blocked -= needed;
}

void quota_set_blocked(struct quota *q, uint64_t since_ms)
{
        quota_set_ticks(q, since_ms, q->is_put_off);
}

static void quota_begin_waiting(struct quota *q)
{
        if (!TAILQ_EMPTY(&q->waiting))
                return;
        TAILQ_INSERT_TAIL(&q->partition->waiting, q, of_waiting);
        q->least_bytes = UINT64_MAX;
}

static void quota_enqueue(struct quota_request *request)
{
        struct quota *q = request->quota;

        quota_begin_waiting(q);
        TAILQ_INSERT_TAIL(&q->waiting, request, link);
        q->least_bytes = min_u64(q->least_bytes, request->n_bytes);
}

void quota_enqueue_first(struct quota_request *request)
{
        struct quota *q = request->quota;

        quota_begin_waiting(q);
        TAILQ_INSERT_HEAD(&q->waiting, request, link);
        q->least_bytes = min_u64(q->least_bytes, request->n_bytes);
}

/* Something changed for those who wait, if anybody does. */
void quota_make_due(struct quota *q)
{
        if (TAILQ_EMPTY(&q->waiting))
                return;
        q->look_again = true;
        quota_ask_for_turn(q);
}

void quota_count_alloc(struct quota *q, uint64_t n_bytes)
{
        struct ledger_quota *record = ledger_quota_at(q->ledger, q->index);
        struct partition *p = q->partition;

        q->n_blocks++;
        q->bytes_in_use += bfc_block_bytes(n_bytes);
        q->bytes_requested += n_bytes;
        p->bytes_in_use += bfc_block_bytes(n_bytes);
        quota_note_peaks(q);
        p->lifetime_peak_bytes_in_use = max_u64(p->lifetime_peak_bytes_in_use, p->bytes_in_use);
        q->peak_bytes_requested = max_u64(q->peak_bytes_requested, q->bytes_requested);
        record->life.peak_in_use = max_u64(record->life.peak_in_use, q->bytes_in_use);
        record->life.partition_peak_in_use = p->lifetime_peak_bytes_in_use;
        quota_assert(q);
        quota_publish(q);
}

static int quota_try(struct quota *q, uint64_t n_bytes, bool in_extent, bfc_handle *ret_handle,
                     uint64_t *ret_offset)
{
        int r;

        if (q->partition->is_draining)
                return -EBUSY;
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

static void quota_count_refusal(struct quota *q, int r)
{
        struct ledger_lifetime *life = &ledger_quota_at(q->ledger, q->index)->life;

        if (r != -EDQUOT && r != -ENOMEM)
                return;
        q->n_refusals++;
        if (r == -EDQUOT)
                q->n_over_quota++;
        else
                q->n_out_of_memory++;
        q->last_refusal_ms = clock_wall_ms();
        life->n_over_quota = q->n_over_quota;
        life->n_out_of_memory = q->n_out_of_memory;
        life->last_refusal_ms = q->last_refusal_ms;
}

void partition_keep_life(struct partition *p)
{
        struct quota *q;

        TAILQ_FOREACH(q, &p->quotas, of_partition)
        {
                struct ledger_lifetime *life = &ledger_quota_at(q->ledger, q->index)->life;

                life->partition_peak_in_use = p->lifetime_peak_bytes_in_use;
                life->partition_peak_reserved = p->pool.lifetime_peak_charged_bytes;
        }
}

void partition_adopt_life(struct partition *p, const struct ledger_lifetime *life)
{
        p->lifetime_peak_bytes_in_use = max_u64(p->lifetime_peak_bytes_in_use, life->partition_peak_in_use);
        p->pool.lifetime_peak_charged_bytes =
                max_u64(p->pool.lifetime_peak_charged_bytes, life->partition_peak_reserved);
}

void quota_adopt_life(struct quota *q, const struct ledger_lifetime *from)
{
        struct ledger_lifetime *life = &ledger_quota_at(q->ledger, q->index)->life;
        struct account *a = &q->account;

        life->peak_in_use = max_u64(life->peak_in_use, from->peak_in_use);
        a->lifetime_peak_charged_bytes = max_u64(a->lifetime_peak_charged_bytes, from->peak_reserved);
        life->peak_reserved = a->lifetime_peak_charged_bytes;
        life->n_over_quota = q->n_over_quota = max_u64(q->n_over_quota, from->n_over_quota);
        life->n_out_of_memory = q->n_out_of_memory = max_u64(q->n_out_of_memory, from->n_out_of_memory);
        life->last_refusal_ms = q->last_refusal_ms = max_u64(q->last_refusal_ms, from->last_refusal_ms);
        q->n_refusals = q->n_over_quota + q->n_out_of_memory;
        quota_publish(q);
}

bool quota_is_impossible(const struct quota *q, uint64_t n_bytes)
{
        return n_bytes > max_u64(account_attainable(&q->account), q->account.charged_bytes);
}

int quota_never_holds(const struct quota *q, uint64_t n_bytes)
{
        if (n_bytes > q->account.limit_bytes)
                return -EDQUOT;
        return quota_is_impossible(q, n_bytes) ? -ENOMEM : 0;
}

int quota_refuse_at_once(struct quota *q, uint64_t n_bytes)
{
        int r = q->partition->is_draining || q->partition->is_lost ? 0 : quota_never_holds(q, n_bytes);

        quota_count_refusal(q, r);
        return r;
}

int quota_alloc_or_again(struct quota *q, uint64_t n_bytes, bool in_extent, bfc_handle *ret_handle,
                         uint64_t *ret_offset)
{
        int r;

        if (n_bytes == 0)
                return -EINVAL;
        if (q->partition->is_draining)
                r = -EBUSY;
        else if (q->partition->is_lost)
                r = -ENODEV;
        else if (n_bytes > q->account.limit_bytes)
                r = -EDQUOT;
        else if (in_extent && n_bytes > arena_max_in_extent(q->arena))
                r = -EINVAL;
        else if (q->is_due || (q->blocked_ms != 0 && quota_first_is_aged(q, clock_ms())))
                r = QUOTA_WAIT; /* those who came before are looked at first */
        else
                r = quota_try(q, n_bytes, in_extent, ret_handle, ret_offset);
        if (r > 0 && quota_is_impossible(q, n_bytes))
                r = -ENOMEM;
        return r > 0 ? QUOTA_WAIT : r;
}

int quota_alloc(struct quota *q, uint64_t n_bytes, bool in_extent, bfc_handle *ret_handle,
                uint64_t *ret_offset)
{
        int r = quota_alloc_or_again(q, n_bytes, in_extent, ret_handle, ret_offset);

        quota_count_refusal(q, r);
        return r;
}

/* Something may lie idle there, which is to go back. */
static void quota_note_idle(struct quota *q)
{
        struct partition *p = q->partition;

        q->has_freed = true;
        p->has_idle = true;
        if (p->wake)
                p->wake(p->userdata);
}

/* A block was freed: by that there may be room for those who wait for the partition's. Frees that follow each
 * other closely make them due once. */
static void partition_make_claims_due(struct partition *p)
{
        uint64_t now_ms = clock_ms();
        struct quota *q;

        if (now_ms - p->claims_ms < QUOTA_ROUND_MS) {
                p->is_put_off = true;
                return;
        }
        p->claims_ms = now_ms;
        p->is_put_off = false;
        TAILQ_FOREACH(q, &p->waiting, of_waiting)
        if (TAILQ_FIRST(&q->waiting)->claim > 0)
                quota_make_due(q);
}

/* A block was freed while requests wait. Where one of them may fit by now there is a round at once. Room for
 * the first may also have come from a free that no request fits in, but to find that out costs as much as
 * many frees: so that is not done for each. */
static void quota_note_free(struct quota *q)
{
        struct bfc_stats stats;

        arena_read_stats(q->arena, &stats);
        if (stats.largest_free_block_bytes >= q->least_bytes || q->n_blocks + 1 >= q->max_blocks ||
            clock_ms() - q->round_ms >= QUOTA_ROUND_MS)
                quota_make_due(q);
        else
                quota_set_ticks(q, q->blocked_ms, true);
}

void quota_dealloc(struct quota *q, bfc_handle handle, uint64_t n_bytes, uint64_t n_requested)
{
        int r = arena_dealloc(q->arena, handle);

        assert(r == 0);
        (void)r;
        assert(q->n_blocks > 0);
        q->n_blocks--;
        if (q->blocks_ceiling > q->max_blocks)
                q->blocks_ceiling = q->n_blocks > q->max_blocks ? q->n_blocks : q->max_blocks;
        q->bytes_in_use -= n_bytes;
        q->bytes_requested -= n_requested;
        q->partition->bytes_in_use -= n_bytes;
        ladder_note_free(q);
        quota_assert(q);
        quota_publish(q);
        if (!TAILQ_EMPTY(&q->waiting))
                quota_note_free(q);
        if (q->partition->n_claims > 0)
                partition_make_claims_due(q->partition);
        if (q->partition->is_draining)
                quota_note_idle(q);
}

int quota_split(struct quota *q, bfc_handle handle, uint64_t at, uint32_t n_more, bfc_handle *ret_high)
{
        bool has_room = (uint64_t)q->n_blocks + n_more < q->max_blocks;
        int r = has_room ? arena_split(q->arena, handle, at, ret_high) : -EDQUOT;

        if (r < 0)
                return r;
        q->n_blocks++;
        quota_assert(q);
        quota_publish(q);
        return 0;
}

/* ---- who waits ---------------------------------------------------------- */

/* Everybody in the partition who waits may now have what others gave back. */
void partition_make_due(struct partition *p)
{
        struct quota *q;

        TAILQ_FOREACH(q, &p->waiting, of_waiting)
        quota_make_due(q);
}

static void quota_unqueue(struct quota_request *request)
{
        struct quota *q = request->quota;

        if (q->next == request)
                q->next = TAILQ_NEXT(request, link);
        TAILQ_REMOVE(&q->waiting, request, link);
        ladder_claim(request, 0);
        if (!TAILQ_EMPTY(&q->waiting))
                return;
        TAILQ_REMOVE(&q->partition->waiting, q, of_waiting);
        quota_set_ticks(q, 0, false);
        ladder_unhold(q);
}

/* It gets what it wants. If that was the first, the next has its time before it; who is
 * served past the first changes nothing for it. */
void quota_unqueue_served(struct quota_request *request)
{
        struct quota *q = request->quota;

        if (TAILQ_FIRST(&q->waiting) == request)
                quota_set_blocked(q, 0);
        quota_unqueue(request);
}

void quota_complete(struct quota_request *request, int result, bfc_handle handle, uint64_t offset)
{
        request->quota->n_waiting--;
        if (!request->is_no_refusal)
                quota_count_refusal(request->quota, result);
        request->done(request, result, handle, offset);
}

void partition_lose(struct partition *p)
{
        p->is_lost = true;
        partition_make_due(p);
}

void partition_tell_standby(struct partition *p)
{
        bool takes = p->share == DEVICE_SHARE_FD && !p->preallocate && !p->is_draining && !p->is_lost;
        uint64_t limit = takes ? p->pool.limit_bytes : 0;

        standby_set_room(&p->standby, limit - min_u64(limit, p->pool.charged_bytes));
}

void partition_set_draining(struct partition *p, bool is_draining)
{
        struct quota *q;

        p->is_draining = is_draining;
        p->has_idle = false;
        if (!is_draining)
                return;
        partition_make_due(p);
        TAILQ_FOREACH(q, &p->quotas, of_partition)
        {
                ladder_unkeep(q);
                quota_note_idle(q);
        }
}

bool quota_is_drained(const struct quota *q)
{
        return !q->growing && !q->backed && arena_is_quiet(q->arena);
}

static void quota_backed(void *userdata, int result, bfc_handle handle, uint64_t offset)
{
        struct quota *q = userdata;
        void (*done)(void *, struct quota *, int) = q->backed;

        (void)handle;
        (void)offset;
        q->backed = NULL;
        ladder_note_free(q);
        quota_note_change(q);
        quota_publish(q);
        done(q->backed_userdata, q, result);
}

int quota_back(struct quota *q, void (*done)(void *userdata, struct quota *q, int result), void *userdata)
{
        uint64_t n_bytes = 0, missing;
        struct charge charge;
        int r;

        if (q->partition->preallocate && !q->is_removed)
                n_bytes = arena_unbacked_bytes(q->arena, q->account.limit_bytes);
        if (n_bytes == 0)
                return QUOTA_WAIT;
        r = quota_charge(q, n_bytes, &charge, &missing);
        if (r < 0)
                return r;
        r = arena_back_later(q->arena, q->account.limit_bytes, &charge, quota_backed, q);
        charge_drop(&charge); /* after a failure */
        if (r < 0)
                return r;
        q->backed = done;
        q->backed_userdata = userdata;
        return 0;
}

bool quota_first_is_aged(const struct quota *q, uint64_t now)
{
        const struct quota_request *first = TAILQ_FIRST(&q->waiting);

        return first && first->queued_ms != 0 && now - first->queued_ms >= LADDER_AGED_MS;
}

/* Whether it may have what fits now. */
static bool quota_may_pass(const struct quota_request *request, uint64_t now)
{
        const struct quota *q = request->quota;

        return request == TAILQ_FIRST(&q->waiting) || !quota_first_is_aged(q, now) ||
               q->partition->is_draining || now - request->since_ms >= q->partition->reclaim_timeout_ms;
}

/* Behind a first in line that waits for others to free: has it waited for as long as it would
 * have been waiting as the first? */
static bool quota_is_over(const struct quota_request *request, uint64_t now)
{
        const struct quota *q = request->quota;
        const struct quota_request *first = TAILQ_FIRST(&q->waiting);

        return request != first && first->queued_ms != 0 && !q->growing &&
               now - request->since_ms >= LADDER_STEPS * q->partition->reclaim_timeout_ms + request->wait_ms;
}

/* 0: it is served, or grows. Positive: it goes on waiting. */
static int quota_serve_one(struct quota *q, struct quota_request *request, uint64_t now, unsigned *budget)
{
        bfc_handle handle = 0;
        uint64_t offset = 0;
        int r = QUOTA_WAIT;

        if (quota_may_pass(request, now))
                r = quota_try(q, request->n_bytes, request->in_extent, &handle, &offset);
        if (r > 0 && quota_is_over(request, now)) {
                *budget -= *budget > QUOTA_ROOM_LOOKS ? QUOTA_ROOM_LOOKS : *budget;
                r = ladder_last_chance(q, request);
                if (r == 0)
                        return 0;
        }
        if (r > 0)
                return r;
        quota_unqueue_served(request);
        quota_complete(request, r, handle, offset);
        return 0;
}

/* Gives those who wait what fits; false: the budget is used up. */
static bool quota_serve(struct quota *q, unsigned *budget)
{
        uint64_t now = q->next ? clock_ms() : 0;

        while (q->next && *budget > 0) {
                struct quota_request *request = q->next;

                (*budget)--;
                q->partition->n_looks++;
                q->next = TAILQ_NEXT(request, link);
                quota_serve_one(q, request, now, budget);
        }
        return !q->next;
}

/* Makes room for the first in line, or refuses it and the next; false: the
 * budget is used up. */
static bool quota_make_rooms(struct quota *q, unsigned *budget)
{
        struct quota_request *request;
        uint64_t began_ns = 0;

        while (!q->growing && (request = TAILQ_FIRST(&q->waiting))) {
                int r;

                if ((*budget)-- == 0 || (began_ns != 0 && clock_ns() - began_ns >= QUOTA_ROOMS_NS))
                        return false;
                began_ns = began_ns == 0 ? clock_ns() : began_ns;
                q->partition->n_looks++;
                r = q->partition->is_draining ? -EBUSY : ladder_make_room(q, request);
                if (r == 0)
                        return true;
                quota_unqueue(request);
                quota_complete(request, r, 0, 0);
        }
        return true;
}

static void quota_begin_round(struct quota *q)
{
        q->look_again = false;
        q->next = TAILQ_FIRST(&q->waiting);
        q->round_ms = clock_ms();
        quota_set_ticks(q, q->blocked_ms, false);
}

void quota_turn(struct quota *q)
{
        unsigned looks = QUOTA_LOOKS, rooms = QUOTA_ROOMS;

        /* A round is finished before the next begins: nobody at its end is starved. */
        if (q->look_again && !q->next)
                quota_begin_round(q);
        if (!quota_serve(q, &looks) || !quota_make_rooms(q, &rooms) || q->look_again)
                return;
        q->is_due = false;
        TAILQ_REMOVE(&q->partition->due, q, of_due);
}

bool partition_is_put_off(const struct partition *p)
{
        return p->n_put_off > 0 || (p->is_put_off && p->n_claims > 0);
}

void partition_look_again(struct partition *p)
{
        struct quota *q;

        if (!partition_is_put_off(p))
                return;
        TAILQ_FOREACH(q, &p->waiting, of_waiting)
        if (q->is_put_off || (p->is_put_off && TAILQ_FIRST(&q->waiting)->claim > 0))
                quota_make_due(q);
        p->claims_ms = clock_ms();
        p->is_put_off = false;
}

void partition_tick(struct partition *p)
{
        struct quota *q;

        TAILQ_FOREACH(q, &p->waiting, of_waiting)
        if (q->blocked_ms != 0)
                quota_make_due(q);
        partition_look_again(p);
}

bool partition_is_blocked(const struct partition *p)
{
        return p->n_blocked > 0 || (p->is_put_off && p->n_claims > 0);
}

void quota_wait(struct quota_request *request)
{
        struct quota *q = request->quota;

        request->since_ms = clock_ms();
        request->ticket = ++q->partition->n_tickets;
        request->asked_again = false;
        request->has_recalled = false;
        request->queued_ms = 0;
        request->claim = 0;
        request->asking = (struct quota_asking){ 0 };
        quota_enqueue(request);
        q->n_waiting++;
        /* The round is over: it goes on with this one, unless all are to be looked at again. */
        if (!q->next && !q->look_again)
                q->next = request;
        quota_ask_for_turn(q);
}

void quota_heard(struct quota *q, bool gave)
{
        struct quota_request *first;
        struct quota *each;

        TAILQ_FOREACH(each, &q->partition->waiting, of_waiting)
        {
                first = TAILQ_FIRST(&each->waiting);
                if (!gave || first->asking.begun_ms == 0)
                        continue;
                first->asking.heard_ms = clock_ms();
                first->asking.n_gave++;
        }
        partition_make_due(q->partition);
}

void quota_cancel(struct quota_request *request)
{
        struct quota *q = request->quota;

        q->n_waiting--;
        if (q->growing_for == request)
                q->growing_for = NULL;
        else
                quota_unqueue(request);
}

/* ---- limits that change -------------------------------------------------- */

int quota_prepare_limit(struct quota *q, uint64_t limit_bytes)
{
        return arena_prepare_limit(q->arena, limit_bytes);
}

void quota_set_early(struct quota *q, const struct quota_limits *limits)
{
        arena_set_limit(q->arena, limits->limit_bytes);
        account_set(&q->account, limits->limit_bytes, limits->reserve_bytes);
        q->max_sessions = limits->max_sessions;
        q->max_blocks = limits->max_blocks;
        q->blocks_ceiling = q->n_blocks > q->max_blocks ? q->n_blocks : q->max_blocks;
        q->is_removed = false;
        quota_assert(q);
}

void quota_set(struct quota *q, const struct quota_limits *limits)
{
        quota_set_early(q, limits);
        ladder_set_keep(q, limits->keep_bytes, limits->keep_ms);
        ladder_shed(q);
}

void quota_remove(struct quota *q)
{
        account_set(&q->account, q->account.limit_bytes, 0);
        q->is_removed = true;
        ladder_unkeep(q);
        ladder_settle(q);
}

bool quota_is_gone(const struct quota *q)
{
        return q->is_removed && q->n_shares == 0 && q->n_sessions == 0 && q->n_blocks == 0 && !q->growing &&
               !q->backed && TAILQ_EMPTY(&q->waiting) && q->account.charged_bytes == 0 &&
               arena_is_quiet(q->arena);
}

void partition_set_limit(struct partition *p, uint64_t limit_bytes, uint64_t reclaim_timeout_ms)
{
        pool_set_limit(&p->pool, limit_bytes);
        p->reclaim_timeout_ms = reclaim_timeout_ms;
        ladder_shed_partition(p);
        partition_make_due(p);
}

/* ---- sessions ------------------------------------------------------------ */

int quota_join(struct quota *q)
{
        if (q->is_removed)
                return -ENOENT;
        if (q->n_sessions >= q->max_sessions)
                return -EDQUOT;
        /* The peak of jobs that have ended does not excuse what the next one reserves. */
        if (q->n_sessions == 0 && q->kept_until_ms != 0)
                q->high_bytes = q->account.charged_bytes;
        q->n_sessions++;
        quota_publish(q);
        return 0;
}

void quota_rejoin(struct quota *q)
{
        q->n_sessions++;
        quota_publish(q);
}

void quota_settle(struct quota *q)
{
        if (q->n_sessions == 0 && q->account.charged_bytes > 0)
                quota_keep(q);
        ladder_settle(q);
        ladder_shed(q);
}

void quota_closing(struct quota *q)
{
        q->n_closing++;
        q->partition->n_closing++;
        assert(q->n_closing <= q->n_sessions);
}

void quota_closed(struct quota *q)
{
        assert(q->n_closing > 0);
        q->n_closing--;
        q->partition->n_closing--;
        partition_make_due(q->partition);
}

void quota_leave(struct quota *q)
{
        assert(q->n_sessions > q->n_closing);
        q->n_sessions--;
        ladder_settle(q);
        quota_publish(q);
}

/* ---- words and figures --------------------------------------------------- */

/* A block that must lie in one extent is larger than that. */
static void quota_explain_extent(const struct quota_request *refused, char *buf, size_t n_buf)
{
        const struct quota *q = refused->quota;
        const struct partition *p = q->partition;

        snprintf(buf, n_buf,
                 "a block of %" PRIu64 " bytes does not fit in one extent of tenant '%s' in '%s', which "
                 "has at most %" PRIu64 " bytes: request less, or raise the limit to %s or more%s",
                 refused->n_bytes, q->tenant, p->name, arena_max_in_extent(q->arena),
                 NUMBER_SIZE(arena_limit_for_extent(refused->n_bytes, device_granularity(p->device))),
                 p->is_cuda ? ", or set 'share: cuda-ipc', where every block is in one extent" : "");
}

/* The partition is full, or promised to others. */
static void quota_explain_partition(const struct quota_request *refused, char *buf, size_t n_buf)
{
        const char *how = refused->in_extent ? " in one extent" : "";
        const struct quota *q = refused->quota;
        const struct account *a = &q->account;
        const struct pool *p = &q->partition->pool;
        uint64_t claims = ladder_claims_before(refused);
        struct bfc_stats stats;
        int n;

        if (quota_is_impossible(q, refused->n_bytes)) {
                snprintf(buf, n_buf,
                         "partition '%s' can never serve this request: asked %s, tenant '%s' can have at "
                         "most %s, because %s of %s are guaranteed to other tenants",
                         q->partition->name, NUMBER_SIZE(refused->n_bytes), q->tenant,
                         NUMBER_SIZE(p->limit_bytes - (p->reserve_bytes - a->reserve_bytes)),
                         NUMBER_SIZE(p->reserve_bytes - a->reserve_bytes), NUMBER_SIZE(p->limit_bytes));
                return;
        }
        arena_read_stats(q->arena, &stats);
        n = snprintf(
                buf, n_buf,
                "partition '%s' is full: asked %s%s, %s of %s reserved or guaranteed; tenant '%s': %s of %s "
                "reserved, %s in blocks, largest free piece %s",
                q->partition->name, NUMBER_SIZE(refused->n_bytes), how, NUMBER_SIZE(p->committed_bytes),
                NUMBER_SIZE(p->limit_bytes), q->tenant, NUMBER_SIZE(a->charged_bytes),
                NUMBER_SIZE(a->limit_bytes), NUMBER_SIZE(q->bytes_in_use),
                NUMBER_SIZE(stats.largest_free_block_bytes));
        if (claims > 0 && n > 0 && (size_t)n < n_buf)
                snprintf(buf + n, n_buf - (size_t)n, "; earlier requests of other tenants wait for %s",
                         NUMBER_SIZE(claims));
}

static void quota_explain_limit(const struct quota_request *refused, char *buf, size_t n_buf)
{
        const struct quota *q = refused->quota;
        struct bfc_stats stats;

        if (q->n_blocks >= q->max_blocks) {
                snprintf(buf, n_buf,
                         "tenant '%s' is at its limit in '%s': it has %" PRIu32
                         " blocks, and max_blocks is %" PRIu32,
                         q->tenant, q->partition->name, q->n_blocks, q->max_blocks);
                return;
        }
        arena_read_stats(q->arena, &stats);
        snprintf(
                buf, n_buf,
                "tenant '%s' %s its limit in '%s': asked %s%s, %s of %s reserved, %s in blocks, largest free "
                "piece %s",
                q->tenant, refused->n_bytes > q->account.limit_bytes ? "asked for more than" : "is at",
                q->partition->name, NUMBER_SIZE(refused->n_bytes), refused->in_extent ? " in one extent" : "",
                NUMBER_SIZE(q->account.charged_bytes), NUMBER_SIZE(q->account.limit_bytes),
                NUMBER_SIZE(q->bytes_in_use), NUMBER_SIZE(stats.largest_free_block_bytes));
}

void quota_explain(const struct quota_request *refused, int error, char *buf, size_t n_buf)
{
        const struct quota *q = refused->quota;

        if (error == -EBUSY)
                snprintf(
                        buf, n_buf,
                        "device '%s' of partition '%s' is draining or drained: it serves no new memory until an operator "
                        "resumes it",
                        q->partition->device_id, q->partition->name);
        else if (error == -ENODEV)
                snprintf(buf, n_buf,
                         "device '%s' of partition '%s' is lost, and so is its memory; an operator must "
                         "drain and resume it, or restart the daemon",
                         q->partition->device_id, q->partition->name);
        else if (error == -EINVAL)
                quota_explain_extent(refused, buf, n_buf);
        else if (error == -EDQUOT)
                quota_explain_limit(refused, buf, n_buf);
        else
                quota_explain_partition(refused, buf, n_buf);
}

void quota_clear_peaks(struct quota *q)
{
        q->peak_bytes_in_use = q->bytes_in_use;
        q->peak_bytes_requested = q->bytes_requested;
        account_clear_peaks(&q->account);
        quota_publish(q);
        q->peak_in_use_ms = q->account.peak_charged_ms;
}

int quota_check(const struct quota *q, const char **ret_why)
{
        struct bfc_stats stats;
        int r = arena_check(q->arena, ret_why);

        if (r < 0)
                return r;
        if (q->kept_until_ms != 0 && (q->keep_bytes == 0 || q->is_removed || q->partition->is_draining)) {
                *ret_why = "memory is kept although keep does not allow it";
                return -EBADMSG;
        }
        if (q->is_releasing != (arena_retiring_bytes(q->arena) > 0) ||
            (!q->may_have_free && arena_releasable(q->arena, NULL) > 0)) {
                *ret_why = "a quota with free or leaving extents is not listed";
                return -EBADMSG;
        }
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
