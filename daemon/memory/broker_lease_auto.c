/* Limits of leases by the config; see broker_lease_auto.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/broker_lease_auto.h"

#include <string.h>

#include "daemon/memory/broker.h"
#include "daemon/memory/broker_lease.h"
#include "daemon/base/number.h"

const struct config_quota *broker_config_quota(const struct broker *b, const struct tenant *t,
                                               const struct partition *p)
{
        for (size_t i = 0; t->config && i < t->config->n_quotas; i++)
                if (strcmp(b->config->partitions[t->config->quotas[i].partition].name, p->name) == 0)
                        return &t->config->quotas[i];
        return NULL;
}

const struct config_quota *lease_auto_per(const struct broker *b, const struct tenant *t,
                                          const struct partition *p)
{
        const struct config_quota *q = broker_config_quota(b, t, p);

        return q && q->per_cgroup ? q : NULL;
}

bool lease_auto_follows(const struct broker *b, const struct lease *lease, const struct config_quota *per)
{
        return per && per->per_cgroup && lease_record(b, lease)->maker == LEASE_BY_CONFIG &&
               !quota_has_ended(lease->quota);
}

struct lease_auto_limits lease_auto_limits(const struct quota *q, const struct config_quota *per)
{
        uint64_t limit = min_u64(per->per_limit_bytes, arena_limit_max(q->arena));

        return (struct lease_auto_limits){ limit, min_u64(per->per_reserve_bytes, limit) };
}

void lease_auto_sums(const struct broker *b, const struct tenant *t, const struct quota *parent,
                     const struct config_quota *per, uint64_t *ret_promised, uint64_t *ret_committed)
{
        *ret_promised = parent->account.promised_bytes;
        *ret_committed = parent->account.committed_bytes;
        for (size_t i = 0; i < b->leases.n; i++) {
                const struct lease *lease = b->leases.list[i];
                const struct account *a = &lease->quota->account;
                uint64_t reserve;

                if (lease->tenant != t || lease->quota->lease.parent != parent ||
                    !lease_auto_follows(b, lease, per))
                        continue;
                reserve = lease_auto_limits(lease->quota, per).reserve_bytes;
                *ret_promised += reserve - a->reserve_bytes;
                *ret_committed +=
                        max_u64(reserve, a->committed_bytes) - max_u64(a->reserve_bytes, a->committed_bytes);
        }
}

/* The reserve is never above the limit, also if the daemon is killed between the stores. */
void lease_store_limits(struct broker *b, const struct lease *lease, uint64_t limit_bytes,
                        uint64_t reserve_bytes)
{
        struct ledger_lease *record = lease_record(b, lease);

        if (reserve_bytes < record->reserve_bytes)
                record->reserve_bytes = reserve_bytes;
        record->limit_bytes = limit_bytes;
        record->reserve_bytes = reserve_bytes;
}

void lease_auto_set(struct broker *b, struct lease *lease, const struct config_quota *per)
{
        struct lease_auto_limits to = lease_auto_limits(lease->quota, per);
        struct quota *q = lease->quota;

        if (q->account.limit_bytes == to.limit_bytes && q->account.reserve_bytes == to.reserve_bytes)
                return;
        lease_store_limits(b, lease, to.limit_bytes, to.reserve_bytes);
        quota_set(q, &(struct quota_limits){ .limit_bytes = to.limit_bytes,
                                             .reserve_bytes = to.reserve_bytes,
                                             .max_sessions = q->max_sessions,
                                             .max_blocks = q->max_blocks });
}
