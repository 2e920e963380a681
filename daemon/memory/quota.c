/* The quota: its blocks, sessions, limits and direct charges, and the sentences of refusals; see quota.h. Requests that wait
 * are in queue.c.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/quota.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "daemon/base/list.h"
#include "daemon/base/number.h"
#include "daemon/memory/queue.h"

#define DIRECT_SAMPLES 3u /* of what others use on the device, after each change */

/* Of some quotas that have begun, since each costs time. */
#define MAX_BEGUN 32u

static void quota_write_page(const struct quota *q)
{
        uint64_t values[PAGES_N_STATS];
        struct bfc_stats stats;

        if (!q->page)
                return;
        arena_read_stats(q->arena, &stats);
        values[PAGES_BYTES_LIMIT] = q->account.limit_bytes;
        values[PAGES_BYTES_RESERVED] = q->account.charged_bytes;
        values[PAGES_PEAK_BYTES_RESERVED] = q->account.peak_charged_bytes;
        values[PAGES_BYTES_IN_USE] = q->all.bytes_in_use;
        values[PAGES_PEAK_BYTES_IN_USE] = q->peaks.bytes_in_use;
        values[PAGES_BYTES_REQUESTED] = q->all.bytes_requested;
        values[PAGES_NUM_BLOCKS] = q->all.n_blocks;
        values[PAGES_NUM_SESSIONS] = q->all.n_sessions;
        values[PAGES_LARGEST_FREE_BLOCK_BYTES] = stats.largest_free_block_bytes;
        values[PAGES_LIFETIME_PEAK_BYTES_IN_USE] = quota_life(q)->peak_in_use;
        values[PAGES_LIFETIME_PEAK_BYTES_RESERVED] = quota_life(q)->peak_reserved;
        values[PAGES_BYTES_DIRECT] = q->all.bytes_direct;
        pages_write(q->page, values);
}

/* Before any reply that goes out because of the change: a client that knows of it reads it. */
void quota_publish(struct quota *q)
{
        for (; q; q = quota_parent(q))
                quota_write_page(q);
}

void quota_note_change(struct quota *q)
{
        LIST_ADD(&q->partition->lists.changed, q, lists.of_changed);
}

struct quota *partition_next_changed(struct partition *p)
{
        struct quota *q = TAILQ_FIRST(&p->lists.changed);

        if (q)
                LIST_DROP(&p->lists.changed, q, lists.of_changed);
        return q;
}

static void quota_charge_changed(struct account *a)
{
        struct quota *q = (struct quota *)(void *)((char *)a - offsetof(struct quota, account));
        struct ledger_lifetime *life = quota_life(q);
        struct partition *p = q->partition;

        p->use.lifetime_peak_charged = max_u64(p->use.lifetime_peak_charged, p->pool.charged_bytes);
        life->peak_reserved = max_u64(life->peak_reserved, a->charged_bytes);
        life->partition_peak_reserved = p->use.lifetime_peak_charged;
        quota_note_change(q);
        quota_write_page(q);
}

static void quota_assert(const struct quota *q)
{
        /* A request is a part of a block, a block is a part of extents, and extents and direct charges are
         * charged: at each level. */
        for (; q; q = quota_parent(q)) {
                assert(q->all.bytes_requested <= q->all.bytes_in_use);
                assert(q->all.bytes_in_use + q->all.bytes_direct <= q->account.charged_bytes);
        }
}

/* The blocks of the quota, and of those above it, are so many more (modulo 2^64). */
static void quota_count_blocks(struct quota *q, uint32_t n_blocks, uint64_t n_bytes, uint64_t n_requested)
{
        q->partition->use.n_bytes += n_bytes;
        for (; q; q = quota_parent(q)) {
                q->all.n_blocks += n_blocks;
                q->all.bytes_in_use += n_bytes;
                q->all.bytes_requested += n_requested;
        }
}

const struct quota *quota_next_lease(const struct quota *lease, const struct quota *q)
{
        const struct quota *next = TAILQ_NEXT(lease, lists.of_partition);

        assert(next && quota_parent(next) == q);
        (void)q;
        return next;
}

struct quota_sums quota_own(const struct quota *q)
{
        struct quota_sums own = q->all;
        const struct quota *each = q;

        for (size_t n = 0; n < q->account.n_children; n++) {
                each = quota_next_lease(each, q);
                own.n_blocks -= each->all.n_blocks;
                own.bytes_in_use -= each->all.bytes_in_use;
                own.bytes_requested -= each->all.bytes_requested;
                own.bytes_direct -= each->all.bytes_direct;
        }
        return own;
}

/* The present values may be new peaks. */
static void quota_note_peaks(struct quota *q)
{
        struct partition *p = q->partition;

        for (; q; q = quota_parent(q)) {
                q->peaks.window_in_use = max_u64(q->peaks.window_in_use, q->all.bytes_in_use);
                q->peaks.window_is_used = true;
                q->peaks.bytes_requested = max_u64(q->peaks.bytes_requested, q->all.bytes_requested);
                if (q->all.bytes_in_use > q->peaks.bytes_in_use) {
                        q->peaks.bytes_in_use = q->all.bytes_in_use;
                        q->peaks.in_use_ms = clock_wall_ms();
                }
        }
        if (p->use.n_bytes > p->use.peak_bytes) {
                p->use.peak_bytes = p->use.n_bytes;
                p->use.peak_ms = clock_wall_ms();
        }
}

/* ---- standby memory ---------------------------------------------------------- */

static bool partition_takes_standby(const struct partition *p)
{
        return p->share == DEVICE_SHARE_FD && !p->preallocate && !p->is_draining && !p->is_lost;
}

void partition_count_next(const struct partition *p, struct standby_goal *goal)
{
        unsigned n_begun = 0;
        const struct quota *q;

        if (!partition_takes_standby(p))
                return;
        TAILQ_FOREACH(q, &p->quotas, lists.of_partition)
        {
                bool has_begun = q->sessions.n > 0 && arena_n_extents(q->arena) > 0;

                goal->has_begun |= has_begun;
                goal->has_unbegun |= !has_begun;
                if (has_begun && n_begun++ < MAX_BEGUN)
                        arena_count_next(q->arena, EXTENT_MIN_BYTES, account_room(&q->account), STANDBY_SIZES,
                                         goal->n_next);
        }
}

void partition_tell_standby(struct partition *p)
{
        bool takes = partition_takes_standby(p);
        uint64_t limit = takes ? p->pool.limit_bytes : 0;

        standby_set_room(&p->standby, excess_u64(limit, p->pool.charged_bytes));
}

/* ---- peaks and statistics that outlive quotas ---------------------------- */

void partition_keep_life(struct partition *p)
{
        struct quota *q;

        TAILQ_FOREACH(q, &p->quotas, lists.of_partition)
        {
                struct ledger_lifetime *life = quota_life(q);

                life->partition_peak_in_use = p->use.lifetime_peak_bytes;
                life->partition_peak_reserved = p->use.lifetime_peak_charged;
        }
}

void partition_restore_lifetime(struct partition *p, const struct ledger_lifetime *life)
{
        p->use.lifetime_peak_bytes = max_u64(p->use.lifetime_peak_bytes, life->partition_peak_in_use);
        p->use.lifetime_peak_charged = max_u64(p->use.lifetime_peak_charged, life->partition_peak_reserved);
}

void quota_restore_lifetime(struct quota *q, const struct ledger_lifetime *from)
{
        struct ledger_lifetime *life = quota_life(q);

        life->peak_in_use = max_u64(life->peak_in_use, from->peak_in_use);
        life->peak_reserved = max_u64(life->peak_reserved, from->peak_reserved);
        life->n_over_quota = max_u64(life->n_over_quota, from->n_over_quota);
        life->n_out_of_memory = max_u64(life->n_out_of_memory, from->n_out_of_memory);
        life->last_refusal_ms = max_u64(life->last_refusal_ms, from->last_refusal_ms);
        life->waited_ns = max_u64(life->waited_ns, from->waited_ns);
        q->peaks.window_refusals = quota_n_refusals(q);
        quota_publish(q);
}

void quota_clear_peaks(struct quota *q)
{
        q->peaks.bytes_in_use = q->all.bytes_in_use;
        q->peaks.bytes_requested = q->all.bytes_requested;
        account_clear_peaks(&q->account);
        quota_publish(q);
        q->peaks.in_use_ms = q->account.peak_charged_ms;
}

bool quota_take_window(struct quota *q, struct quota_window *ret)
{
        uint64_t now_ms = clock_wall_ms();

        if (!q->peaks.window_is_used && q->account.window_peak_bytes == 0 &&
            q->peaks.window_refusals == quota_n_refusals(q)) {
                q->peaks.window_ms = now_ms;
                return false;
        }
        *ret = (struct quota_window){ .begin_ms = q->peaks.window_ms,
                                      .end_ms = now_ms,
                                      .peak_in_use = q->peaks.window_in_use,
                                      .peak_charged = q->account.window_peak_bytes,
                                      .n_refusals = quota_n_refusals(q) - q->peaks.window_refusals };
        q->peaks.window_ms = now_ms;
        q->peaks.window_in_use = q->all.bytes_in_use;
        q->peaks.window_refusals = quota_n_refusals(q);
        q->peaks.window_is_used = false;
        q->account.window_peak_bytes = q->account.charged_bytes;
        return true;
}

/* ---- making and ending one ---------------------------------------------------------- */

int quota_charge(struct quota *q, uint64_t n_bytes, struct charge *ret, uint64_t *ret_missing_bytes)
{
        bool empty = q->account.own_bytes == 0;
        int r = charge_take(&q->account, n_bytes, ret, ret_missing_bytes);

        /* See quota_growth.high_bytes: an empty quota starts anew. */
        if (r == 0)
                q->growth.high_bytes = empty ? n_bytes : max_u64(q->growth.high_bytes, q->account.own_bytes);
        return r;
}

struct extent_sizes quota_extent_sizes(const struct ledger_quota *record)
{
        return (struct extent_sizes){ record->extent_bytes, record->small_extent_bytes,
                                      record->extents_per_zone };
}

static void quota_describe_arena(const struct quota *q, const struct extent_sizes *sizes,
                                 struct arena_options *ret)
{
        *ret = (struct arena_options){
                .partition = q->partition,
                .quota = q->index,
                .parked_bytes = &quota_of_tenant(q)->all.bytes_parked,
                .limit_bytes = q->account.limit_bytes,
                .sizes = *sizes,
        };
}

struct quota *quota_of_tenant(const struct quota *q)
{
        while (quota_parent(q))
                q = quota_parent(q);
        return (struct quota *)(uintptr_t)q;
}

void quota_pause_growth(struct quota *q)
{
        quota_of_tenant(q)->growth.paused_until_ms = clock_ms() + QUOTA_PAUSE_MS;
}

uint64_t quota_growth_pause_ms(const struct quota *q)
{
        uint64_t until_ms = quota_of_tenant(q)->growth.paused_until_ms;
        uint64_t now_ms = until_ms != 0 ? clock_ms() : 0;

        return now_ms < until_ms ? until_ms - now_ms : 0;
}

bool quota_is_preallocated(const struct quota *q)
{
        return q->partition->preallocate && !q->is_removed && !quota_parent(q);
}

int quota_back_early(struct quota *q)
{
        uint64_t n_room = excess_u64(q->account.limit_bytes, q->account.own_bytes);
        uint64_t n_bytes = 0, missing = 0;
        struct charge charge;
        int r;

        if (quota_is_preallocated(q))
                n_bytes = min_u64(arena_unbacked_bytes(q->arena, q->account.limit_bytes), n_room);
        if (n_bytes == 0)
                return 0;
        if (quota_growth_pause_ms(q) > 0)
                return -ECANCELED;

        /* Charges only what there is room for: other quotas may have more than their guarantees. */
        r = quota_charge(q, n_bytes, &charge, &missing);
        if (r < 0 && missing < n_bytes)
                r = quota_charge(q, n_bytes - missing, &charge, &missing);
        if (r < 0)
                return r;
        r = arena_back(q->arena, q->account.limit_bytes, &charge);
        charge_drop(&charge); /* what was not used up */
        quota_publish(q);
        return r;
}

static int quota_open_arena(struct quota *q)
{
        const struct partition *p = q->partition;
        struct extent_sizes sizes = extent_sizes_for(p->share, p->device->is_cuda, q->account.limit_bytes,
                                                     device_granularity(p->device));
        struct ledger_quota facts = { .extent_bytes = sizes.extent_bytes,
                                      .small_extent_bytes = sizes.small_extent_bytes,
                                      .extents_per_zone = sizes.extents_per_zone };
        struct arena_options options;
        int r;

        /* The record comes first: the extents in the ledger name it. */
        snprintf(facts.tenant, sizeof(facts.tenant), "%s", q->tenant);
        snprintf(facts.partition, sizeof(facts.partition), "%s", p->name);
        facts.is_lease = quota_parent(q) != NULL;
        r = ledger_quota_add(q->partition->ledger, &facts, &q->index);
        if (r < 0)
                return r;
        quota_describe_arena(q, &sizes, &options);
        return arena_new(&options, &q->arena);
}

/* ---- from inherited records -------------------------------------------------- */

static void quota_count_inherited(struct quota *q, const struct arena_inherited *from)
{
        struct partition *p = q->partition;

        for (size_t i = 0; i < from->n_blocks; i++) {
                const struct ledger_block *b = ledger_block_at(q->partition->ledger, from->blocks[i]);
                bool is_parked = ledger_block_is_parked(b);

                quota_count_blocks(q, 1, is_parked ? 0 : b->n_bytes, is_parked ? 0 : b->n_requested);
        }
        p->use.lifetime_peak_bytes = max_u64(p->use.lifetime_peak_bytes, p->use.n_bytes);
        quota_note_peaks(q);
}

/* Of a GPU, whose extents are gone. A host has the partition where the config is another one now. */
static void quota_restore_unreclaimed(struct quota *q, uint64_t n_bytes)
{
        struct charge part;

        if (n_bytes == 0)
                return;
        charge_split(&q->extentless.direct_left, n_bytes, &part);
        if (q->partition->device->ops->others)
                arena_note_unreclaimed(q->arena, &part);
        charge_drop(&part);
}

/* Its record stays whatever happens. */
static int quota_restore_arena(struct quota *q, const struct quota_records *from, const char **ret_why)
{
        struct ledger_quota *record = ledger_quota_at(q->partition->ledger, from->index);
        struct extent_sizes sizes = quota_extent_sizes(record);
        struct arena_options options;
        struct charge charge = { NULL, 0 };
        uint64_t unreclaimed_bytes = (uint64_t)record->unreclaimed_mib << 20, missing;
        int r;

        /* The record can be damaged, or be of a daemon with other rules. */
        *ret_why = "extents of this size are not supported";
        if (!extent_sizes_are_valid(&sizes, device_granularity(q->partition->device)))
                return -EBADMSG;
        q->index = from->index;
        quota_describe_arena(q, &sizes, &options);

        /* All that the records say is charged before the arena is made: each extent then takes its own part.
         * Direct charges wait in direct_left until their sessions are restored. */
        r = quota_charge(q, from->extent_bytes, &charge, &missing);
        if (r == 0)
                r = quota_charge(q, from->direct_bytes, &q->extentless.direct_left, &missing);
        *ret_why = NULL;
        if (r == 0)
                r = arena_restore(&options, from->arena, &charge, &q->arena, ret_why);
        charge_drop(&charge);
        if (r < 0) {
                q->index = LEDGER_NONE; /* so that quota_free() leaves the record */
                return r;
        }
        quota_count_inherited(q, from->arena);
        quota_restore_unreclaimed(q, unreclaimed_bytes);
        return reclaim_resume_release(q);
}

/* It has an account, with what closed arenas keep, and no arena. On failure quota_free() undoes all. */
static int quota_begin(const struct quota_options *options, struct quota **ret)
{
        struct quota *q = calloc(1, sizeof(*q));
        uint64_t missing;
        int r;

        if (!q)
                return -ENOMEM;
        q->partition = options->partition;
        q->tenant = options->tenant;
        q->lease = options->lease;
        q->max_sessions = options->max_sessions;
        q->max_blocks = options->max_blocks;
        q->index = LEDGER_NONE;
        q->peaks.window_ms = clock_wall_ms();
        TAILQ_INIT(&q->queue.requests);
        TAILQ_INIT(&q->growth.running);
        quota_usages_init(&q->usages);
        if (options->parent) /* see quota_next_lease() */
                TAILQ_INSERT_AFTER(&q->partition->quotas, options->parent, q, lists.of_partition);
        else
                TAILQ_INSERT_TAIL(&q->partition->quotas, q, lists.of_partition);
        q->partition->n_quotas++;
        reclaim_note_free(q);

        /* What a closed arena of the quota keeps is charged first: it cannot be given back. */
        r = account_init(&q->account, options->parent ? &options->parent->account : &q->partition->pool,
                         options->limit_bytes, options->reserve_bytes);
        q->partition->n_tenants += r == 0 && !options->parent;
        if (r == 0)
                r = charge_take(&q->account, options->closed_bytes, &q->extentless.closed, &missing);
        if (r < 0)
                quota_free(q);
        else
                *ret = q;
        return r;
}

/* Only a quota that stays is shown and logged. */
static void quota_show(struct quota *q, struct pages_entry *page)
{
        q->account.changed = quota_charge_changed;
        account_note_change(&q->account);
        q->page = page;
        quota_publish(q);
}

int quota_new(const struct quota_options *options, struct quota **ret)
{
        struct quota *q;
        int r = quota_begin(options, &q);

        if (r < 0)
                return r;
        r = quota_open_arena(q);
        if (r < 0) {
                quota_free(q);
                return r;
        }
        quota_show(q, options->page);
        *ret = q;
        return 0;
}

int quota_restore(const struct quota_options *options, const struct quota_records *records,
                  struct quota **ret, const char **ret_why)
{
        struct quota *q;
        int r = quota_begin(options, &q);

        if (r < 0)
                return r;
        r = quota_restore_arena(q, records, ret_why);
        if (r < 0) {
                quota_free(q);
                return r;
        }
        quota_show(q, options->page);
        *ret = q;
        return 0;
}

static void quota_end(struct quota *q)
{
        struct partition *p = q->partition;

        charge_drop(&q->extentless.closed);
        charge_drop(&q->extentless.direct_left);
        p->n_tenants -= q->account.parent == &p->pool;
        account_deinit(&q->account);
        LIST_DROP(&p->queue.due, q, queue.of_due);
        LIST_DROP(&p->lists.freed, q, lists.of_freed);
        LIST_DROP(&p->lists.releasing, q, lists.of_releasing);
        LIST_DROP(&p->lists.changed, q, lists.of_changed);
        TAILQ_REMOVE(&p->quotas, q, lists.of_partition);
        p->n_quotas--;
        quota_usages_deinit(&q->usages);
        free(q);
}

struct quota *quota_free(struct quota *q)
{
        struct partition *p;

        if (!q)
                return NULL;
        assert(q->sessions.n == 0 && q->all.n_blocks == 0 && TAILQ_EMPTY(&q->queue.requests));
        assert(TAILQ_EMPTY(&q->growth.running) && !q->growth.backed && q->growth.held.n_bytes == 0 &&
               !q->trim.state);
        q->page = NULL; /* the arena is freed first */
        q->account.changed = NULL;
        q->arena = arena_free(q->arena);
        p = q->partition;
        if (q->index != LEDGER_NONE)
                ledger_quota_clear(q->partition->ledger, q->index);
        quota_end(q);
        partition_keep_life(p);
        return NULL;
}

struct quota *quota_abandon(struct quota *q)
{
        if (!q)
                return NULL;
        assert(q->sessions.n == 0 && TAILQ_EMPTY(&q->queue.requests));
        assert(TAILQ_EMPTY(&q->growth.running) && q->growth.held.n_bytes == 0 && q->account.n_children == 0);
        q->page = NULL;
        q->account.changed = NULL;
        q->arena = arena_leave(q->arena);
        quota_count_blocks(q, -q->all.n_blocks, -q->all.bytes_in_use, -q->all.bytes_requested);
        quota_end(q);
        return NULL;
}

/* ---- blocks -------------------------------------------------------------- */

static void quota_count_granted(struct quota *q, uint32_t n_blocks, uint64_t n_bytes)
{
        struct partition *p = q->partition;

        quota_count_blocks(q, n_blocks, bfc_block_bytes(n_bytes), n_bytes);
        quota_note_peaks(q);
        p->use.lifetime_peak_bytes = max_u64(p->use.lifetime_peak_bytes, p->use.n_bytes);
        for (struct quota *each = q; each; each = quota_parent(each)) {
                struct ledger_lifetime *life = quota_life(each);

                life->peak_in_use = max_u64(life->peak_in_use, each->all.bytes_in_use);
                life->partition_peak_in_use = p->use.lifetime_peak_bytes;
        }
        quota_assert(q);
        quota_publish(q);
}

void quota_count_alloc(struct quota *q, uint64_t n_bytes)
{
        quota_count_granted(q, 1, n_bytes);
}

void quota_count_woken(struct quota *q, uint64_t n_bytes)
{
        quota_count_granted(q, 0, n_bytes);
}

const struct quota *quota_without_block(const struct quota *q)
{
        while (q && q->all.n_blocks < q->max_blocks)
                q = quota_parent(q);
        return q;
}

int quota_refusal(const struct quota *q)
{
        if (q->partition->is_lost)
                return -ENODEV;
        return q->partition->is_draining ? -EBUSY : 0;
}

int quota_try(struct quota *q, uint64_t n_bytes, bool in_extent, bfc_handle *ret_handle, uint64_t *ret_offset)
{
        int r = quota_refusal(q);

        if (r < 0)
                return r;
        if (quota_without_block(q))
                return -EDQUOT;
        r = in_extent ? arena_alloc_in_extent(q->arena, n_bytes, ret_handle, ret_offset)
                      : arena_alloc(q->arena, n_bytes, ret_handle, ret_offset);
        if (r == 0)
                quota_count_alloc(q, n_bytes);
        return r;
}

void quota_count_refusal(struct quota *q, int r)
{
        for (; q && (r == -EDQUOT || r == -ENOMEM); q = quota_parent(q)) {
                struct ledger_lifetime *life = quota_life(q);

                life->n_over_quota += r == -EDQUOT;
                life->n_out_of_memory += r == -ENOMEM;
                life->last_refusal_ms = clock_wall_ms();
        }
}

int quota_is_impossible(const struct quota *q, uint64_t n_bytes)
{
        const struct account *a = &q->account;

        for (const struct account *scope = a; scope; scope = scope->parent)
                if (n_bytes > max_u64(account_attainable(a, scope), a->own_bytes))
                        return scope->parent ? -EDQUOT : -ENOMEM;
        return 0;
}

static int quota_never_holds(const struct quota *q, uint64_t n_bytes)
{
        return n_bytes > q->account.limit_bytes ? -EDQUOT : quota_is_impossible(q, n_bytes);
}

/* What becomes of a request of n_bytes that needs new memory: QUOTA_WAIT, or a refusal, counted unless it is tried again. r:
 * why it is refused already; 0: it is not. */
static int quota_wait_or_refuse(struct quota *q, uint64_t n_bytes, int r, bool again)
{
        if (r == 0)
                r = quota_has_ended(q) ? -EDQUOT : quota_never_holds(q, n_bytes);
        if (r == 0)
                return QUOTA_WAIT;
        if (!again)
                quota_count_refusal(q, r);
        return r;
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

        /* The request gets backed space if it may pass those that wait. This needs no system call. */
        if (n_bytes == 0)
                return -EINVAL;
        if (quota_refusal(q) < 0)
                r = quota_refusal(q);
        else if (n_bytes > q->account.limit_bytes)
                r = -EDQUOT;
        else if (in_extent && n_bytes > arena_max_in_extent(q->arena))
                r = -EINVAL;
        else if (q->queue.next || q->queue.look_again ||
                 (q->queue.blocked_ms != 0 && quota_first_is_aged(q, clock_ms())))
                r = QUOTA_WAIT; /* requests that came before are looked at first */
        else
                r = quota_try(q, n_bytes, in_extent, ret_handle, ret_offset);

        /* A request that is served at once counts in the lowest class, without a look at the clock. */
        for (struct quota *each = q; each && r == 0; each = quota_parent(each))
                each->grants.ways[GRANT_BACKED].n[0]++;

        /* It needs new memory. What no release can make possible is not queued. */
        if (r > 0) {
                int never = quota_has_ended(q) ? -EDQUOT : quota_is_impossible(q, n_bytes);

                r = never < 0 ? never : QUOTA_WAIT;
        }
        return r;
}

int quota_alloc(struct quota *q, uint64_t n_bytes, bool in_extent, bfc_handle *ret_handle,
                uint64_t *ret_offset)
{
        int r = quota_alloc_or_again(q, n_bytes, in_extent, ret_handle, ret_offset);

        quota_count_refusal(q, r);
        return r;
}

/* The partition is draining: extents that must be released may be free, or a direct charge has ended. */
static void quota_note_idle(struct quota *q)
{
        struct partition *p = q->partition;

        q->lists.has_freed = true;
        p->has_idle = true;
        if (p->turn.wake)
                p->turn.wake(p->turn.userdata);
}

void quota_dealloc(struct quota *q, bfc_handle handle, uint64_t n_bytes, uint64_t n_requested)
{
        int r = arena_dealloc(q->arena, handle);

        assert(r == 0);
        (void)r;
        assert(q->all.n_blocks > 0);
        quota_count_blocks(q, -(uint32_t)1, -n_bytes, -n_requested);
        reclaim_note_free(q);
        quota_assert(q);
        quota_release_exact(q);
        quota_publish(q);

        /* The space can serve requests of this quota, older ones of others, and a drain. */
        if (!TAILQ_EMPTY(&q->queue.requests))
                quota_note_free(q);
        if (q->partition->claims.n > 0)
                partition_make_claims_due(q->partition);
        if (q->partition->is_draining)
                quota_note_idle(q);
}

int quota_split(struct quota *q, bfc_handle handle, uint64_t at, uint32_t n_more, bfc_handle *ret_high)
{
        bool has_room = true;
        int r;

        /* The client's further splits are counted, too, so that it does not have to stop half-way. */
        for (const struct quota *each = q; each; each = quota_parent(each))
                has_room = has_room && (uint64_t)each->all.n_blocks + n_more < each->max_blocks;
        r = has_room ? arena_split(q->arena, handle, at, ret_high) : -EDQUOT;
        if (r < 0)
                return r;
        quota_count_blocks(q, 1, 0, 0);
        quota_assert(q);
        quota_publish(q);
        return 0;
}

/* ---- devices and memory in advance ---------------------------------------------------------- */

void partition_lose(struct partition *p)
{
        p->is_lost = true;
        partition_make_due(p);
}

void partition_set_draining(struct partition *p, bool is_draining)
{
        struct quota *q;

        p->is_draining = is_draining;
        p->has_idle = false;
        if (!is_draining)
                return;
        partition_make_due(p);
        TAILQ_FOREACH(q, &p->quotas, lists.of_partition)
        {
                quota_note_idle(q);
        }
}

bool quota_is_drained(const struct quota *q)
{
        return TAILQ_EMPTY(&q->growth.running) && !q->growth.backed && q->all.bytes_direct == 0 &&
               arena_is_quiet(q->arena);
}

static void quota_backed(void *userdata, int result, bfc_handle handle, uint64_t offset)
{
        struct quota *q = userdata;
        void (*done)(struct quota *, int) = q->growth.backed;

        (void)handle;
        (void)offset;
        q->growth.backed = NULL;
        reclaim_note_free(q);
        quota_note_change(q);
        quota_publish(q);
        done(q, result);
}

int quota_back(struct quota *q, void (*done)(struct quota *q, int result))
{
        uint64_t n_bytes = 0, missing;
        struct charge charge;
        int r;

        if (quota_is_preallocated(q))
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
        q->growth.backed = done;
        return 0;
}

/* ---- limits that change -------------------------------------------------- */

int quota_prepare_limit(struct quota *q, uint64_t limit_bytes)
{
        return arena_prepare_limit(q->arena, limit_bytes);
}

void quota_set(struct quota *q, const struct quota_limits *limits)
{
        if (q->account.limit_bytes != limits->limit_bytes && q->sessions.n_told > 0)
                q->sessions.limit_changed = true;
        arena_set_limit(q->arena, limits->limit_bytes);
        account_set(&q->account, limits->limit_bytes, limits->reserve_bytes);
        q->max_sessions = limits->max_sessions;
        q->max_blocks = limits->max_blocks;
        q->is_removed = false;
        quota_assert(q);
        reclaim_release_excess(q);
}

void quota_remove(struct quota *q)
{
        uint64_t limit = q->account.limit_bytes;

        /* A lease that has ended gets no more memory: its limit is what it has. A removed quota loses only its
         * guarantee. */
        q->is_removed = true;
        account_set(&q->account, quota_has_ended(q) ? min_u64(limit, q->account.own_bytes) : limit, 0);
        reclaim_release_unused(q);
        quota_make_due(q);
}

bool quota_is_gone(const struct quota *q)
{
        return q->is_removed && q->sessions.n_told == 0 && q->sessions.n == 0 && q->all.n_blocks == 0 &&
               TAILQ_EMPTY(&q->growth.running) && !q->growth.backed && TAILQ_EMPTY(&q->queue.requests) &&
               q->account.n_children == 0 && q->account.charged_bytes == 0 && arena_is_quiet(q->arena);
}

void partition_set_limit(struct partition *p, uint64_t limit_bytes)
{
        account_set(&p->pool, limit_bytes, 0);
        reclaim_release_partition_excess(p);
        partition_make_due(p);
}

/* ---- sessions ------------------------------------------------------------ */

/* It has n sessions more (modulo 2^32), and so have those above. */
static void quota_count_sessions(struct quota *q, uint32_t n)
{
        q->sessions.n += n;
        for (struct quota *each = q; each; each = quota_parent(each))
                each->all.n_sessions += n;
        quota_publish(q);
}

const struct quota *quota_without_session(const struct quota *q)
{
        while (q && q->all.n_sessions < q->max_sessions)
                q = quota_parent(q);
        return q;
}

int quota_join(struct quota *q)
{
        if (q->is_removed)
                return -ENOENT;
        if (quota_without_session(q))
                return -EDQUOT;
        quota_count_sessions(q, 1);
        return 0;
}

void quota_rejoin(struct quota *q)
{
        quota_count_sessions(q, 1);
}

void quota_release_unused(struct quota *q)
{
        reclaim_release_unused(q);
        reclaim_release_excess(q);
}

void quota_closing(struct quota *q)
{
        q->sessions.n_closing++;
        q->partition->queue.n_closing++;
        assert(q->sessions.n_closing <= q->sessions.n);
}

void quota_closed(struct quota *q)
{
        assert(q->sessions.n_closing > 0);
        q->sessions.n_closing--;
        q->partition->queue.n_closing--;
        partition_make_due(q->partition);
}

void quota_leave(struct quota *q)
{
        assert(q->sessions.n > q->sessions.n_closing);
        quota_count_sessions(q, UINT32_MAX);
        reclaim_release_unused(q);
}

/* ---- parked blocks ---------------------------------------------------------- */

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

/* ---- direct charges: memory that processes take by themselves, and have charged  */

/* What others use on the device tells at the end of a process whether its memory was returned. */
static bool is_asked(const struct quota *q)
{
        return q->partition->device->ops->others != NULL;
}

int quota_charge_direct(struct quota *q, uint64_t n_bytes, bool again)
{
        return quota_wait_or_refuse(q, n_bytes, quota_refusal(q), again);
}

/* n_bytes more (modulo 2^64). */
static void count_direct(struct quota *q, uint64_t n_bytes)
{
        for (struct quota *each = q; each; each = quota_parent(each))
                each->all.bytes_direct += n_bytes;
        q->partition->device->direct.n_bytes += n_bytes;
        quota_note_change(q);
        quota_publish(q);
}

void quota_count_direct(struct quota *q, struct charge *own, struct charge *granted)
{
        uint64_t n_bytes = granted->n_bytes;

        charge_join(own, granted);
        count_direct(q, n_bytes);
        if (is_asked(q))
                q->partition->device->direct.n_due = DIRECT_SAMPLES;
        quota_assert(q);
}

int quota_take_direct(struct quota *q, uint64_t n_bytes, struct charge *own)
{
        struct charge part;

        if (n_bytes > q->extentless.direct_left.n_bytes)
                return -EBADMSG;
        charge_split(&q->extentless.direct_left, n_bytes, &part);
        quota_count_direct(q, own, &part);
        return 0;
}

/* Bytes are uncharged, as far as the device has returned them. */
static void direct_ended(void *userdata, uint64_t n_bytes)
{
        struct quota *q = userdata;
        uint64_t now_ms = clock_ms();

        quota_note_change(q);
        returns_add(&q->returns, n_bytes, now_ms);
        returns_add(&q->partition->returns, n_bytes, now_ms);
        (void)quota_note_release(q, 0);
        partition_make_due(q->partition);
}

void quota_return_direct(struct quota *q, struct charge *granted)
{
        charge_drop(granted);
        partition_make_due(q->partition);
}

/* n_bytes of it are no session's any more. */
static void direct_split(struct quota *q, struct charge *own, uint64_t n_bytes, struct charge *ret)
{
        assert(n_bytes <= own->n_bytes && n_bytes <= q->all.bytes_direct);
        charge_split(own, n_bytes, ret);
        if (own->n_bytes == 0)
                *own = (struct charge){ NULL, 0 };
        count_direct(q, -n_bytes);
        if (q->partition->is_draining)
                quota_note_idle(q);
}

void quota_drop_direct(struct quota *q, struct charge *own, uint64_t n_bytes)
{
        struct charge part;

        if (n_bytes == 0)
                return;
        direct_split(q, own, n_bytes, &part);
        charge_drop(&part);
        direct_ended(q, n_bytes);
}

void quota_end_direct(struct quota *q, struct charge *own)
{
        struct charge part;

        if (own->n_bytes == 0)
                return;
        /* The device cannot be asked, so the word of the process counts. */
        if (!is_asked(q) || q->partition->is_lost) {
                quota_drop_direct(q, own, own->n_bytes);
                return;
        }

        /* Else the bytes stay charged until the device was asked whether they are back. */
        direct_split(q, own, own->n_bytes, &part);
        arena_end_direct(q->arena, &part, direct_ended, q);
        (void)quota_note_release(q, 0);
}

void quota_leave_direct(struct quota *q, struct charge *own)
{
        struct charge part;

        if (own->n_bytes == 0)
                return;
        direct_split(q, own, own->n_bytes, &part);
        charge_drop(&part);
}

/* ---- the sentence of a refusal, with numbers --------------------------------- */

/* "lease 'x' of tenant 'y'", or "tenant 'y'". */
#define QUOTA_NAME(q) quota_name(q, (char[2 * LEDGER_NAME_BYTES + 32]){ 0 })
static const char *quota_name(const struct quota *q, char ret[static 2 * LEDGER_NAME_BYTES + 32])
{
        snprintf(ret, 2 * LEDGER_NAME_BYTES + 32, "%s%s%stenant '%s'", q->lease ? "lease '" : "",
                 q->lease ? q->lease : "", q->lease ? "' of " : "", q->tenant);
        return ret;
}

/* A block that must be in one extent is larger than any can be. */
static void quota_explain_extent(const struct quota_request *refused, char *buf, size_t n_buf)
{
        const struct quota *q = refused->quota;
        const struct partition *p = q->partition;

        snprintf(buf, n_buf,
                 "a block of %" PRIu64 " bytes does not fit in one extent of %s in '%s', which "
                 "has at most %" PRIu64 " bytes: request less, or raise the limit to %s or more%s",
                 refused->n_bytes, QUOTA_NAME(q), p->name, arena_max_in_extent(q->arena),
                 NUMBER_SIZE(extent_limit_for(p->device->is_cuda, refused->n_bytes,
                                              device_granularity(p->device))),
                 p->preallocate ? ", or set 'growth: on-demand'" : "");
}

/* The partition is full, or promised to others. */
static void quota_explain_partition(const struct quota_request *refused, char *buf, size_t n_buf)
{
        const char *how = refused->in_extent ? " in one extent" : "";
        const struct quota *q = refused->quota;
        const struct account *a = &q->account;
        const struct account *p = &q->partition->pool;
        uint64_t attainable = account_attainable(a, NULL);
        uint64_t claims = reclaim_claims_before(refused, p, 0);
        struct bfc_stats stats;
        int n;

        if (quota_is_impossible(q, refused->n_bytes) < 0) {
                snprintf(buf, n_buf,
                         "partition '%s' can never serve this request: asked %s, %s can have at "
                         "most %s, because %s of %s are guaranteed to %s",
                         q->partition->name, NUMBER_SIZE(refused->n_bytes), QUOTA_NAME(q),
                         NUMBER_SIZE(attainable), NUMBER_SIZE(p->limit_bytes - attainable),
                         NUMBER_SIZE(p->limit_bytes), quota_parent(q) ? "others" : "other tenants");
                return;
        }
        arena_read_stats(q->arena, &stats);
        n = snprintf(buf, n_buf,
                     "partition '%s' is full: asked %s%s, %s of %s reserved or guaranteed; %s: %s of %s "
                     "reserved, %s in blocks, largest free piece %s",
                     q->partition->name, NUMBER_SIZE(refused->n_bytes), how, NUMBER_SIZE(p->committed_bytes),
                     NUMBER_SIZE(p->limit_bytes), QUOTA_NAME(q), NUMBER_SIZE(a->charged_bytes),
                     NUMBER_SIZE(a->limit_bytes), NUMBER_SIZE(quota_own(q).bytes_in_use),
                     NUMBER_SIZE(stats.largest_free_block_bytes));
        if (claims > 0 && n > 0 && (size_t)n < n_buf)
                snprintf(buf + n, n_buf - (size_t)n, "; earlier requests of other tenants wait for %s",
                         NUMBER_SIZE(claims));
}

/* Which limit refuses it: the quota's, or that of the quota above. */
static const struct quota *quota_of_limit(const struct quota_request *refused)
{
        const struct quota *q = refused->quota;
        const struct account *a = &q->account, *above = quota_parent(q) ? &quota_parent(q)->account : NULL;

        if (!above || refused->n_bytes > account_attainable(a, a))
                return q;
        return refused->n_bytes > account_attainable(a, above) || refused->lack.scope == above ||
                               account_short_of(a, refused->n_bytes) == above
                       ? quota_parent(q)
                       : q;
}

static void quota_explain_limit(const struct quota_request *refused, char *buf, size_t n_buf)
{
        const struct quota *q = refused->quota, *at = quota_of_limit(refused);
        const struct quota *full = refused->is_direct ? NULL : quota_without_block(q);
        const char *how = refused->in_extent ? " in one extent" : "";
        const struct account *a = &at->account;
        struct bfc_stats stats;
        int n;

        if (quota_has_ended(q))
                snprintf(buf, n_buf, "%s has ended in '%s' and gets no more memory: asked %s, %s reserved",
                         QUOTA_NAME(q), q->partition->name, NUMBER_SIZE(refused->n_bytes),
                         NUMBER_SIZE(q->account.own_bytes));
        else if (full)
                snprintf(buf, n_buf,
                         "%s is at its limit in '%s': it has %" PRIu32 " blocks, and max_blocks is %" PRIu32,
                         QUOTA_NAME(full), q->partition->name, full->all.n_blocks, full->max_blocks);
        if (quota_has_ended(q) || full)
                return;
        arena_read_stats(q->arena, &stats);
        n = snprintf(buf, n_buf, "%s %s its limit in '%s': asked %s%s, %s of %s reserved", QUOTA_NAME(at),
                     refused->n_bytes > a->limit_bytes ? "asked for more than" : "is at", q->partition->name,
                     NUMBER_SIZE(refused->n_bytes), how, NUMBER_SIZE(a->committed_bytes),
                     NUMBER_SIZE(a->limit_bytes));
        if (at != q && n > 0 && (size_t)n < n_buf)
                n += snprintf(buf + n, n_buf - (size_t)n, " or guaranteed; lease '%s': %s of %s reserved",
                              q->lease, NUMBER_SIZE(q->account.own_bytes),
                              NUMBER_SIZE(q->account.limit_bytes));
        else if (a->n_children > 0 && n > 0 && (size_t)n < n_buf)
                n += snprintf(buf + n, n_buf - (size_t)n, " or guaranteed, %s of it by its leases",
                              NUMBER_SIZE(a->committed_bytes - a->own_bytes));
        if (n > 0 && (size_t)n < n_buf)
                snprintf(buf + n, n_buf - (size_t)n, ", %s in blocks, largest free piece %s",
                         NUMBER_SIZE(quota_own(q).bytes_in_use), NUMBER_SIZE(stats.largest_free_block_bytes));
}

void quota_explain(const struct quota_request *refused, int error, char *buf, size_t n_buf)
{
        const struct quota *q = refused->quota;

        if (error == -EBUSY)
                snprintf(
                        buf, n_buf,
                        "device '%s' of partition '%s' is draining or drained: it serves no new memory until "
                        "an operator resumes it",
                        q->partition->device_id, q->partition->name);
        else if (error == -ENODEV)
                snprintf(buf, n_buf,
                         "device '%s' of partition '%s' is lost, and so is its memory; free the "
                         "blocks that are there: the device is opened again when the last one is freed",
                         q->partition->device_id, q->partition->name);
        else if (error == -EINVAL)
                quota_explain_extent(refused, buf, n_buf);
        else if (error == -EDQUOT)
                quota_explain_limit(refused, buf, n_buf);
        else
                quota_explain_partition(refused, buf, n_buf);
}
