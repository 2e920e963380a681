/* The sums over a partition, and over a tenant with its leases, in reports; see report.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/admin/report.h"

#include <stdlib.h>

#include "daemon/clock.h"
#include "daemon/number.h"

#define REPORT_MANY    64u /* quotas of a partition, whose sums are kept for monitors for so long */
#define REPORT_KEPT_MS 100u

static void report_pool_stats(const struct partition *p, Bfcd__Statistics *f)
{
        f->peak_bytes_reserved = p->pool.peak_charged_bytes;
        f->lifetime_peak_bytes_reserved = p->pool.lifetime_peak_charged_bytes;
        f->peak_bytes_reserved_time_ms = p->pool.peak_charged_ms;
        f->peak_bytes_in_use = p->use.peak_bytes;
        f->peak_bytes_in_use_time_ms = p->use.peak_ms;
        f->lifetime_peak_bytes_in_use = p->use.lifetime_peak_bytes;
}

/* What report_quota_stats() has without leases. */
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

                if (lease->lease.parent != q)
                        continue;
                report_quota_stats(lease, &one);
                add_own_stats(ret, &one);
                ret_more->num_waiting += lease->queue.n;
                ret_more->bytes_waiting += lease->queue.n_bytes;
                ret_more->bytes_retiring += arena_retiring_bytes(lease->arena);
        }
}

/* What includes the tenant's leases. */
static void add_tenants_stats(Bfcd__Statistics *f, const Bfcd__Statistics *one)
{
        f->num_sessions += one->num_sessions;
        f->bytes_in_use += one->bytes_in_use;
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
        const struct quota *q;

        f->bytes_limit = p->pool.limit_bytes;
        f->bytes_reserved = p->pool.charged_bytes;
        if (viewer->admin)
                report_pool_stats(p, f);
        TAILQ_FOREACH(q, &p->quotas, lists.of_partition)
        {
                Bfcd__Statistics one = BFCD__STATISTICS__INIT;

                if (!report_shows(viewer, q))
                        continue;
                report_quota_stats(q, &one);
                if (!q->lease.parent)
                        add_tenants_stats(f, &one);
                add_own_stats(f, &one);
                f->last_refusal_time_ms = max_u64(f->last_refusal_time_ms, one.last_refusal_time_ms);
        }
}

/* Sums over many quotas for monitors: they can ask again and again. */
struct partition_report {
        uint64_t looked_ms; /* 0: never */
        Bfcd__Statistics stats;
};

void report_partition_stats(const struct session *viewer, const struct partition *p, Bfcd__Statistics *f)
{
        struct broker *b = viewer->broker;
        struct partition_report *kept = NULL;
        uint64_t now_ms;

        if (viewer->is_monitor && p->n_quotas > REPORT_MANY && !b->reports.partitions)
                b->reports.partitions = calloc(b->n_partitions, sizeof(*b->reports.partitions));
        if (viewer->is_monitor && p->n_quotas > REPORT_MANY && b->reports.partitions)
                kept = &b->reports.partitions[p - b->partitions];
        now_ms = kept ? clock_ms() : 0;
        if (kept && kept->looked_ms != 0 && now_ms - kept->looked_ms < REPORT_KEPT_MS) {
                *f = kept->stats;
                return;
        }
        sum_partition_stats(viewer, p, f);
        if (kept)
                *kept = (struct partition_report){ now_ms, *f };
}
