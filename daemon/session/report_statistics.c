/* The statistics of a quota, and their sums over a tenant with its leases and over a partition, in reports; see report.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/report.h"

#include <stdlib.h>

#include "daemon/base/clock.h"
#include "daemon/base/number.h"

#define REPORT_MANY    64u /* quotas of a partition, whose sums are kept for so long */
#define REPORT_KEPT_MS 100u

void report_quota_stats(const struct quota *q, Bfcd__Statistics *f)
{
        const struct ledger_lifetime *life = quota_life(q);
        struct bfc_stats stats;

        arena_read_stats(q->arena, &stats);
        f->bytes_limit = q->account.limit_bytes;
        f->bytes_reserved = q->account.charged_bytes;
        f->peak_bytes_reserved = q->account.peak_charged_bytes;
        f->bytes_in_use = q->all.bytes_in_use;
        f->peak_bytes_in_use = q->peaks.bytes_in_use;
        f->bytes_requested = q->all.bytes_requested;
        f->peak_bytes_requested = q->peaks.bytes_requested;
        f->num_allocs = stats.num_allocs;
        f->largest_alloc_size = stats.largest_alloc_size;
        f->largest_free_block_bytes = stats.largest_free_block_bytes;
        f->bytes_free = stats.bytes_free;
        if (stats.bytes_free > stats.largest_free_block_bytes)
                f->bytes_fragmented = stats.bytes_free - stats.largest_free_block_bytes;
        f->num_blocks = q->all.n_blocks;
        f->num_sessions = q->all.n_sessions;
        f->num_extents = arena_n_extents(q->arena);
        f->num_refusals = quota_n_refusals(q);
        f->num_over_quota = life->n_over_quota;
        f->num_out_of_memory = life->n_out_of_memory;
        f->last_refusal_time_ms = life->last_refusal_ms;
        f->peak_bytes_in_use_time_ms = q->peaks.in_use_ms;
        f->peak_bytes_reserved_time_ms = q->account.peak_charged_ms;
        f->lifetime_peak_bytes_in_use = life->peak_in_use;
        f->lifetime_peak_bytes_reserved = life->peak_reserved;
        f->bytes_guaranteed = account_guaranteed(&q->account);
        f->bytes_unreclaimed = arena_unreclaimed_bytes(q->arena);
        f->bytes_parked = arena_parked_bytes(q->arena);
        f->bytes_direct = q->all.bytes_direct;
        f->bytes_contexts = usage_contexts(q);
        f->bytes_outside = q->all.bytes_outside;
}

static void report_pool_stats(const struct partition *p, Bfcd__Statistics *f)
{
        f->peak_bytes_reserved = p->pool.peak_charged_bytes;
        f->lifetime_peak_bytes_reserved = p->use.lifetime_peak_charged;
        f->peak_bytes_reserved_time_ms = p->pool.peak_charged_ms;
        f->peak_bytes_in_use = p->use.peak_bytes;
        f->peak_bytes_in_use_time_ms = p->use.peak_ms;
        f->lifetime_peak_bytes_in_use = p->use.lifetime_peak_bytes;
}

/* A lease is a quota below its tenant's quota. The tenant's quota counts some statistics with those of its leases, others without.
 * So each statistic that is summed is in one of two functions: add_own_stats() for those without (the arena's), which sums
 * tenants and leases, and add_tenants_stats() for those with, which sums only tenants. In the wrong function a lease is counted
 * twice, or not at all. */

/* Statistics that report_quota_stats() has without the leases. */
static void add_own_stats(Bfcd__Statistics *f, const Bfcd__Statistics *one)
{
        f->bytes_unreclaimed += one->bytes_unreclaimed;
        f->num_allocs += one->num_allocs;
        f->bytes_free += one->bytes_free;
        f->bytes_fragmented += one->bytes_fragmented;
        f->bytes_parked += one->bytes_parked;
        f->num_extents += one->num_extents;
        f->largest_alloc_size = max_u64(f->largest_alloc_size, one->largest_alloc_size);
        f->largest_free_block_bytes = max_u64(f->largest_free_block_bytes, one->largest_free_block_bytes);
}

void report_tenant_stats(const struct tenant *t, const struct quota *q, Bfcd__Statistics *ret,
                         struct report_more *ret_more)
{
        *ret_more = (struct report_more){ q->queue.n, q->queue.n_bytes, arena_retiring_bytes(q->arena) };
        report_quota_stats(q, ret);
        for (size_t i = 0; q->account.n_children > 0 && i < t->n_quotas; i++) {
                const struct quota *lease = t->quotas[i];
                Bfcd__Statistics one = BFCD__STATISTICS__INIT;

                if (quota_parent(lease) != q)
                        continue;
                report_quota_stats(lease, &one);
                add_own_stats(ret, &one);
                ret_more->num_waiting += lease->queue.n;
                ret_more->bytes_waiting += lease->queue.n_bytes;
                ret_more->bytes_retiring += arena_retiring_bytes(lease->arena);
        }
}

/* Statistics that report_quota_stats() has with the leases. */
static void add_tenants_stats(Bfcd__Statistics *f, const Bfcd__Statistics *one)
{
        f->num_sessions += one->num_sessions;
        f->bytes_in_use += one->bytes_in_use;
        f->bytes_direct += one->bytes_direct;
        f->bytes_contexts += one->bytes_contexts;
        f->bytes_outside += one->bytes_outside;
        f->bytes_requested += one->bytes_requested;
        f->num_blocks += one->num_blocks;
        f->num_refusals += one->num_refusals;
        f->num_over_quota += one->num_over_quota;
        f->num_out_of_memory += one->num_out_of_memory;
        f->bytes_guaranteed += one->bytes_guaranteed;
}

/* All viewers see the limit and the charges of a partition, which explain a refusal. */
static void sum_partition_stats(const struct session *viewer, const struct partition *p, Bfcd__Statistics *f)
{
        struct report_walk w = { NULL, 0 };
        const struct quota *q;

        f->bytes_limit = p->pool.limit_bytes;
        f->bytes_reserved = p->pool.charged_bytes;
        if (viewer->role != ROLE_CLIENT)
                report_pool_stats(p, f);
        while ((q = report_next(viewer, p, &w))) {
                Bfcd__Statistics one = BFCD__STATISTICS__INIT;

                report_quota_stats(q, &one);
                if (!quota_parent(q))
                        add_tenants_stats(f, &one);
                add_own_stats(f, &one);
                f->last_refusal_time_ms = max_u64(f->last_refusal_time_ms, one.last_refusal_time_ms);
        }
}

/* Sums over many quotas, for viewers that can ask again and again. */
struct partition_report {
        uint64_t looked_ms; /* 0: never */
        Bfcd__Statistics stats;
        uint64_t leaving_looked_ms; /* the same */
        uint64_t bytes_pending, bytes_unreclaimed;
};

/* NULL: the sums are made for the viewer. */
static struct partition_report *find_kept(const struct session *viewer, const struct partition *p)
{
        struct broker *b = viewer->broker;

        if (viewer->role == ROLE_ADMIN || p->n_quotas <= REPORT_MANY)
                return NULL;
        if (!b->reports.partitions)
                b->reports.partitions = calloc(b->n_partitions, sizeof(*b->reports.partitions));
        return b->reports.partitions ? &b->reports.partitions[p - b->partitions] : NULL;
}

static bool is_recent(uint64_t looked_ms, uint64_t now_ms)
{
        return looked_ms != 0 && now_ms - looked_ms < REPORT_KEPT_MS;
}

void report_partition_stats(const struct session *viewer, const struct partition *p, Bfcd__Statistics *f)
{
        struct partition_report *kept = viewer->role == ROLE_MONITOR ? find_kept(viewer, p) : NULL;
        uint64_t now_ms = kept ? clock_ms() : 0;

        if (kept && is_recent(kept->looked_ms, now_ms)) {
                *f = kept->stats;
                return;
        }
        sum_partition_stats(viewer, p, f);
        if (kept) {
                kept->looked_ms = now_ms;
                kept->stats = *f;
        }
}

void report_add_leaving(const struct session *viewer, const struct partition *p, Bfcd__DeviceRow *row)
{
        struct partition_report own = { 0 }, *kept = find_kept(viewer, p), *sums = kept ? kept : &own;
        uint64_t now_ms = clock_ms();
        const struct quota *q;

        if (!is_recent(sums->leaving_looked_ms, now_ms)) {
                sums->leaving_looked_ms = now_ms;
                sums->bytes_pending = sums->bytes_unreclaimed = 0;
                TAILQ_FOREACH(q, &p->quotas, lists.of_partition)
                {
                        sums->bytes_pending += arena_pending_bytes(q->arena);
                        sums->bytes_unreclaimed += arena_unreclaimed_bytes(q->arena);
                }
        }
        row->bytes_pending += sums->bytes_pending;
        row->bytes_unreclaimed += sums->bytes_unreclaimed;
}
