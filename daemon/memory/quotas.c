/* A partition's quotas together: what standby memory needs to know of them, and peaks that outlive them.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/quota.h"

#include "daemon/base/number.h"
#include "daemon/memory/reclaim.h"
#include "daemon/base/clock.h"

/* Of some quotas that have begun, since each costs time. */
#define MAX_BEGUN 32u

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
