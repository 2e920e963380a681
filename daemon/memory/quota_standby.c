/* What standby memory needs to know of a partition's quotas.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/quota.h"

#include "daemon/base/number.h"

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
