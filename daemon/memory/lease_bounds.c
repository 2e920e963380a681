/* Bounds of leases that processes cause; see lease_bounds.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/lease_bounds.h"

#include <errno.h>
#include <stdio.h>

#include "daemon/base/clock.h"
#include "daemon/memory/broker.h"
#include "daemon/memory/broker_lease.h"
#include "daemon/base/number.h"

/* Of each tenant whose processes may cause leases; at least 1. A quarter of a tenant's places are for operators. */
static size_t share_of_tenant(const struct broker *b)
{
        size_t share = LEASE_BOUNDS_ALL / max_u64(b->own.capacity->n_lease_tenants, 1);

        return max_u64(1, min_u64(share, LEASES_PER_TENANT / 4 * 3));
}

static uint32_t *births_by(struct tenant *t, enum ledger_lease_maker maker)
{
        return maker == LEASE_BY_USER ? &t->lease_births.n_by_users : &t->lease_births.n_by_config;
}

int lease_bounds_take(struct tenant *t, enum ledger_lease_maker maker, char *why, size_t n)
{
        uint64_t now_ms = clock_ms();

        if (maker == LEASE_BY_OPERATOR)
                return 0;
        if (t->lease_births.since_ms == 0 || now_ms - t->lease_births.since_ms >= LEASE_BOUNDS_MS)
                t->lease_births = (struct tenant_births){ .since_ms = now_ms };
        if (*births_by(t, maker) < LEASES_PER_TENANT) {
                ++*births_by(t, maker);
                return 0;
        }
        snprintf(
                why, n,
                "processes of tenant '%s' asked %u times in %u s for a lease or a change of one, which is the most, also "
                "where they were refused: try again later",
                t->name, LEASES_PER_TENANT, LEASE_BOUNDS_MS / 1000);
        return -EDQUOT;
}

int lease_bounds_check(const struct broker *b, const struct tenant *t, enum ledger_lease_maker maker,
                       char *why, size_t n)
{
        size_t share = share_of_tenant(b), of_users = max_u64(1, share / 3 * 2);
        size_t n_by_users = lease_count_by(b, t, LEASE_BY_USER, NULL);

        if (maker == LEASE_BY_OPERATOR)
                return 0;
        if (maker == LEASE_BY_USER && n_by_users >= of_users) {
                snprintf(why, n, "users of tenant '%s' have %zu leases, which is the most for all of them",
                         t->name, of_users);
                return -EDQUOT;
        }
        if (n_by_users + lease_count_by(b, t, LEASE_BY_CONFIG, NULL) < share)
                return 0;
        snprintf(
                why, n,
                "processes of tenant '%s' have %zu leases, which is the most: the share of a tenant in %u leases "
                "that operators did not make",
                t->name, share, LEASE_BOUNDS_ALL);
        return -EDQUOT;
}
