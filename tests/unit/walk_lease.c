/* Leases in the random walk: the commands, beside a model of which leases there are, which sessions are in them, and
 * what every level may have charged.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <string.h>

#include "daemon/memory/broker_lease.h"
#include "tests/suite.h"
#include "tests/unit/walk_model.h"

static const char *const tenants[] = { "a", "b", "c" };
static const char *const partitions[] = { "p", "q" };
static const uint64_t partition_limits[] = { 40 * MIB, 16 * MIB };
static const char *const groups[] = { "/g", "/g/x", "/h" };

struct lease_model *lease_model_of(const char *name)
{
        for (size_t i = 0; i < N_LEASES; i++)
                if (w.leases[i].exists && strcmp(w.leases[i].name, name) == 0)
                        return &w.leases[i];
        return NULL;
}

static struct lease_model *some_lease(void)
{
        struct lease_model *m = &w.leases[dice(N_LEASES)];

        snprintf(m->name, sizeof(m->name), "l%u", (unsigned)(m - w.leases));
        return m;
}

/* The tenant's number for the partition; N_SHARES: it has no quota there. */
static uint32_t share_of(unsigned tenant, unsigned partition)
{
        static const uint32_t shares[3][2] = { { 0, 1 }, { 0, N_SHARES }, { N_SHARES, 0 } };

        return shares[tenant][partition];
}

/* ---- sessions ----------------------------------------------------------------- */

const char *walk_some_group(void)
{
        return dice(2) ? groups[dice(3)] : NULL;
}

/* 0: it does not match. */
static size_t rank_of(const struct lease_model *m, const struct credentials *who)
{
        size_t n = m->group ? strlen(m->group) : 0;

        if (!m->group)
                return who->uid == m->uid ? 1 : 0;
        return who->cgroup && strncmp(who->cgroup, m->group, n) == 0 &&
                               (who->cgroup[n] == '\0' || who->cgroup[n] == '/')
                       ? n
                       : 0;
}

void walk_joined(const struct session *s)
{
        for (uint32_t share = 0; share < s->n_shares; share++) {
                const char *name = s->shares[share].quota->lease;
                const struct lease_model *best = NULL;

                if (s->shares[share].is_barred) {
                        HOLDS(!name && !s->who.cgroup, "barred, but its control group is known");
                        continue;
                }
                for (size_t i = 0; i < N_LEASES; i++) {
                        const struct lease_model *m = &w.leases[i];

                        if (!m->exists || m->tenant != tenant_index(s) || m->share != share ||
                            rank_of(m, &s->who) == 0)
                                continue;
                        if (!best || rank_of(m, &s->who) > rank_of(best, &s->who) ||
                            (rank_of(m, &s->who) == rank_of(best, &s->who) && m->number > best->number))
                                best = m;
                }
                HOLDS(strcmp(name ? name : "", best ? best->name : "") == 0, "it joined '%s', not '%s'",
                      name ? name : "", best ? best->name : "");
                w.n_joined += best != NULL;
        }
}

static bool is_in(const struct session *s, const struct quota *q)
{
        for (size_t i = 0; i < s->n_shares; i++)
                if (s->shares[i].quota == q)
                        return true;
        return false;
}

/* ---- what every level has --------------------------------------------------------- */

static uint64_t max_of(uint64_t a, uint64_t b)
{
        return a > b ? a : b;
}

static uint64_t min_of(uint64_t a, uint64_t b)
{
        return a < b ? a : b;
}

struct committed {
        uint64_t charged, committed;
};

static struct quota *tenants_quota(unsigned tenant, uint32_t share)
{
        return w.b->tenants[tenant].quotas[share];
}

static uint64_t lease_own(const struct lease_model *m)
{
        return lease_find(w.b, m->name)->quota->account.own_bytes;
}

static struct committed sum_tenant(unsigned tenant, uint32_t share)
{
        uint64_t own = tenants_quota(tenant, share)->account.own_bytes;
        struct committed sum = { own, own };

        for (size_t i = 0; i < N_LEASES; i++) {
                const struct lease_model *m = &w.leases[i];

                if (!m->exists || m->tenant != tenant || m->share != share)
                        continue;
                sum.charged += lease_own(m);
                sum.committed += max_of(m->reserve, lease_own(m));
        }
        return sum;
}

static struct committed sum_partition(unsigned partition)
{
        struct committed sum = { 0, 0 };

        for (unsigned tenant = 0; tenant < 3; tenant++) {
                uint32_t share = share_of(tenant, partition);
                struct committed one;

                if (share == N_SHARES)
                        continue;
                one = sum_tenant(tenant, share);
                sum.charged += one.charged;
                sum.committed += max_of(tenants_quota(tenant, share)->account.reserve_bytes, one.committed);
        }
        return sum;
}

/* After its limit was lowered a level may have what it had then, less what was released. */
static void check_level(const char *what, const struct account *a, struct committed sum, uint64_t limit,
                        uint64_t *allowed)
{
        HOLDS(a->charged_bytes == sum.charged && a->committed_bytes == sum.committed,
              "%s: %" PRIu64 " and %" PRIu64 ", not %" PRIu64 " and %" PRIu64, what, a->charged_bytes,
              a->committed_bytes, sum.charged, sum.committed);
        HOLDS(sum.charged <= sum.committed && sum.committed <= max_of(limit, *allowed),
              "%s: %" PRIu64 " above its limit of %" PRIu64, what, sum.committed, limit);
        *allowed = max_of(limit, min_of(*allowed, sum.committed));
}

static void check_lease(struct lease_model *m)
{
        const struct lease *lease = lease_find(w.b, m->name);
        uint64_t n_bytes = 0;

        HOLDS(lease || m->is_ended, "lease '%s' is gone", m->name);
        if (!lease) {
                *m = (struct lease_model){ .exists = false };
                w.n_leases_gone++;
                return;
        }
        HOLDS(quota_has_ended(lease->quota) == m->is_ended, "lease '%s'", m->name);
        HOLDS(m->is_ended || (lease->quota->account.limit_bytes == m->limit &&
                              lease->quota->account.reserve_bytes == m->reserve),
              "lease '%s' has another limit or reserve", m->name);
        for (size_t i = 0; i < w.n_blocks; i++)
                if (w.blocks[i].quota == lease->quota->index)
                        n_bytes += w.blocks[i].n_bytes;
        for (size_t i = 0; i < N_SLOTS; i++)
                if (w.slots[i].peer && keeps_direct(&w.slots[i]) &&
                    w.slots[i].peer->session->shares[m->share].quota == lease->quota)
                        n_bytes += w.slots[i].direct[m->share];
        HOLDS(n_bytes <= lease_own(m), "lease '%s': %" PRIu64 " bytes in blocks and charged directly",
              m->name, n_bytes);
        check_level(m->name, &lease->quota->account, (struct committed){ lease_own(m), lease_own(m) },
                    m->is_ended ? 0 : m->limit, &m->allowed);
}

void walk_check_levels(void)
{
        for (size_t i = 0; i < N_LEASES; i++)
                if (w.leases[i].exists)
                        check_lease(&w.leases[i]);
        for (unsigned partition = 0; partition < 2; partition++) {
                struct partition *p = &w.b->partitions[partition];

                for (unsigned tenant = 0; tenant < 3; tenant++) {
                        uint32_t share = share_of(tenant, partition);

                        if (share < N_SHARES)
                                check_level(tenants[tenant], &tenants_quota(tenant, share)->account,
                                            sum_tenant(tenant, share), w.limits[tenant][share],
                                            &w.allowed[tenant][share]);
                }
                check_level(p->name, &p->pool, sum_partition(partition), partition_limits[partition],
                            &w.partitions_allowed[partition]);
        }
}

/* ---- commands ----------------------------------------------------------------------- */

/* Whether the tenant and the partition have a reserve for a lease that has `own` charged and `before` promised. */
static bool have_reserve(unsigned tenant, unsigned partition, uint64_t own, uint64_t before, uint64_t reserve)
{
        const struct account *a = &tenants_quota(tenant, share_of(tenant, partition))->account;
        uint64_t more, committed = sum_tenant(tenant, share_of(tenant, partition)).committed;

        if (max_of(own, reserve) <= max_of(own, before))
                return true;
        more = max_of(own, reserve) - max_of(own, before);
        if (committed + more > a->limit_bytes)
                return false;
        more = max_of(a->reserve_bytes, committed + more) - max_of(a->reserve_bytes, committed);
        return sum_partition(partition).committed + more <= partition_limits[partition];
}

static int check_sizes(unsigned tenant, unsigned partition, uint64_t limit, uint64_t reserve, bool sets_limit)
{
        bool is_below = limit <= w.limits[tenant][share_of(tenant, partition)];

        return reserve > limit || (sets_limit && !is_below) ? EINVAL : 0;
}

static const Bfcd__Reply *ask(Bfcd__Request *r, int error)
{
        uint64_t id;

        HOLDS(peer_send(w.admin, r, &id) == 0, "a command about leases");
        HOLDS(peer_error(w.admin, id) == error, "%d, not %d", peer_error(w.admin, id), error);
        w.n_leases_refused += error != 0;
        return peer_reply(w.admin, id);
}

void op_lease_create(struct slot *s)
{
        Bfcd__LeaseCreate c = BFCD__LEASE_CREATE__INIT;
        Bfcd__Request r = REQUEST(LEASE_CREATE, lease_create, &c);
        struct lease_model *m = some_lease(), next = *m;
        unsigned partition = (unsigned)dice(2);
        int error;

        (void)s;
        next.tenant = (unsigned)dice(3);
        next.share = share_of(next.tenant, partition);
        next.partition = partition;
        next.limit = next.allowed = 2 * MIB * (1 + dice(14));
        next.reserve = dice(3) ? 0 : 2 * MIB * dice(4);
        next.group = dice(3) ? groups[dice(3)] : NULL;
        next.uid = 1 + (uint32_t)dice(5);
        next.number = ++w.n_leases;
        error = m->exists ? EEXIST
                : next.share == N_SHARES
                        ? ENOENT
                        : check_sizes(next.tenant, partition, next.limit, next.reserve, true);
        if (error == 0 && !have_reserve(next.tenant, partition, 0, 0, next.reserve))
                error = ENOMEM;
        c.name = m->name;
        c.tenant = (char *)(uintptr_t)tenants[next.tenant];
        c.partition = (char *)(uintptr_t)partitions[partition];
        c.bytes_limit = next.limit;
        c.bytes_reserve = next.reserve;
        if (next.group)
                c.match_case = BFCD__LEASE_CREATE__MATCH_CGROUP, c.cgroup = (char *)(uintptr_t)next.group;
        else
                c.match_case = BFCD__LEASE_CREATE__MATCH_UID, c.uid = next.uid;
        (void)ask(&r, error);
        if (error != 0)
                return;
        next.exists = true;
        *m = next;
}

void op_lease_set(struct slot *s)
{
        Bfcd__LeaseSet set = BFCD__LEASE_SET__INIT;
        Bfcd__Request r = REQUEST(LEASE_SET, lease_set, &set);
        struct lease_model *m = some_lease();
        uint64_t limit, reserve;
        int error;

        (void)s;
        set.name = m->name;
        set.bytes_limit = dice(4) ? 2 * MIB * (1 + dice(14)) : 0;
        set.sets_reserve = dice(2) > 0;
        set.bytes_reserve = 2 * MIB * dice(4);
        limit = set.bytes_limit ? set.bytes_limit : m->limit;
        reserve = set.sets_reserve ? set.bytes_reserve : m->reserve;
        error = !m->exists    ? ENOENT
                : m->is_ended ? EBUSY
                              : check_sizes(m->tenant, m->partition, limit, reserve, set.bytes_limit != 0);
        if (error == 0 && !have_reserve(m->tenant, m->partition, lease_own(m), m->reserve, reserve))
                error = ENOMEM;
        (void)ask(&r, error);
        if (error != 0)
                return;
        m->limit = limit;
        m->reserve = reserve;
}

/* Sessions are evicted at a tick; the walk hangs up or exits for them. */
void op_lease_end(struct slot *s)
{
        Bfcd__LeaseEnd end = BFCD__LEASE_END__INIT;
        Bfcd__Request r = REQUEST(LEASE_END, lease_end, &end);
        struct lease_model *m = some_lease();
        const struct lease *lease = lease_find(w.b, m->name);
        const Bfcd__Reply *reply;
        uint64_t n_sessions = 0;

        (void)s;
        for (size_t i = 0; lease && i < N_SLOTS; i++)
                n_sessions += w.slots[i].peer && is_in(w.slots[i].peer->session, lease->quota);
        end.name = m->name;
        end.evicts = dice(2) > 0;
        end.grace_ms = dice(200);
        reply = ask(&r, m->exists ? 0 : ENOENT);
        if (!m->exists)
                return;
        HOLDS(reply->lease_end->num_sessions == n_sessions, "%" PRIu64 " sessions in '%s', not %" PRIu64,
              (uint64_t)reply->lease_end->num_sessions, m->name, n_sessions);
        m->is_ended = true;
        m->reserve = 0;
        w.n_lease_evictions += end.evicts && n_sessions > 0;
}

void walk_end_leases(void)
{
        for (size_t i = 0; i < N_LEASES; i++) {
                Bfcd__LeaseEnd end = BFCD__LEASE_END__INIT;
                Bfcd__Request r = REQUEST(LEASE_END, lease_end, &end);

                if (!w.leases[i].exists || !lease_find(w.b, w.leases[i].name))
                        continue;
                end.name = w.leases[i].name;
                (void)ask(&r, 0);
        }
        peer_settle(w.b);
        HOLDS(w.b->leases.n == 0, "%zu leases are left", w.b->leases.n);
}
