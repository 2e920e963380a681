/* Bounds of leases that processes cause; see lease_bounds.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/admin/lease_bounds.h"

#include <errno.h>
#include <stdio.h>

#include "daemon/clock.h"
#include "daemon/memory/broker.h"
#include "daemon/memory/broker_lease.h"
#include "daemon/number.h"

static bool may_cause_leases(const struct config_tenant *t)
{
        for (size_t i = 0; i < t->n_quotas; i++)
                if (t->quotas[i].per_cgroup)
                        return true;
        return t->leases_self;
}

size_t lease_bounds_tenants(const struct config *c)
{
        size_t n = 0;

        for (size_t i = 0; i < c->n_tenants; i++)
                n += may_cause_leases(&c->tenants[i]);
        return n;
}

/* Of each tenant whose processes may cause leases; at least 1. A quarter of a tenant's places are for operators. */
static size_t share_of_tenant(const struct config *c)
{
        size_t share = LEASE_BOUNDS_ALL / max_u64(lease_bounds_tenants(c), 1);

        return max_u64(1, min_u64(share, LEASES_PER_TENANT / 4 * 3));
}

/* Of all makers but operators; or only of users. */
static size_t count_caused(const struct broker *b, const struct tenant *t, bool of_users)
{
        size_t n = 0;

        for (size_t i = 0; i < b->leases.n; i++) {
                uint32_t maker = lease_record(b, b->leases.list[i])->maker;

                n += b->leases.list[i]->tenant == t && maker != LEASE_BY_OPERATOR &&
                     (!of_users || maker == LEASE_BY_USER);
        }
        return n;
}

static uint32_t *births_by(struct tenant *t, enum ledger_lease_maker maker)
{
        return maker == LEASE_BY_USER ? &t->lease_births.n_by_users : &t->lease_births.n_by_config;
}

int lease_bounds_check_change(struct tenant *t, enum ledger_lease_maker maker, char *why, size_t n)
{
        uint64_t now_ms = clock_ms();

        if (maker == LEASE_BY_OPERATOR)
                return 0;
        if (t->lease_births.since_ms == 0 || now_ms - t->lease_births.since_ms >= LEASE_BOUNDS_MS)
                t->lease_births = (struct tenant_births){ .since_ms = now_ms };
        if (*births_by(t, maker) < LEASES_PER_TENANT)
                return 0;
        snprintf(
                why, n,
                "processes of tenant '%s' made or changed %u leases in %u s, which is the most: try again later",
                t->name, LEASES_PER_TENANT, LEASE_BOUNDS_MS / 1000);
        return -EDQUOT;
}

int lease_bounds_check(const struct broker *b, struct tenant *t, enum ledger_lease_maker maker, char *why,
                       size_t n)
{
        size_t share = share_of_tenant(b->config), of_users = max_u64(1, share / 3 * 2);

        if (maker == LEASE_BY_OPERATOR)
                return 0;
        if (maker == LEASE_BY_USER && count_caused(b, t, true) >= of_users) {
                snprintf(why, n, "users of tenant '%s' have %zu leases, which is the most for all of them",
                         t->name, of_users);
                return -EDQUOT;
        }
        if (count_caused(b, t, false) < share)
                return lease_bounds_check_change(t, maker, why, n);
        snprintf(
                why, n,
                "processes of tenant '%s' have %zu leases, which is the most: the share of a tenant in %u leases "
                "that operators did not make",
                t->name, share, LEASE_BOUNDS_ALL);
        return -EDQUOT;
}

void lease_bounds_note(struct tenant *t, enum ledger_lease_maker maker)
{
        if (maker != LEASE_BY_OPERATOR)
                ++*births_by(t, maker);
}
