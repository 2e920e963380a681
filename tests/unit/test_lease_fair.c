/* Leases of one tenant do not starve each other: waiting requests of several leases, and of the tenant itself.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/broker_lease.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/session/lease.h"
#include "daemon/base/clock.h"
#include "daemon/memory/queue.h"
#include "tests/suite.h"
#include "tests/unit/sessions.h"
#include "tests/unit/still_clock.h"

#define WAIT_MS 60000u

static struct peer *x, *y, *own;

static struct peer *peer_in(const char *cgroup)
{
        struct peer *p = peer_new(b, 1, false);

        p->session->who.cgroup = strdup(cgroup);
        return say_hello(p);
}

/* A partition with room for all; a tenant with 40 MiB, and a lease of them for each control group below /j. */
static void setup(void)
{
        sessions_start("devices: [{id: host, size: 256MiB, partitions: [{name: a, limit: 128MiB}]}]\n"
                       "tenants:\n"
                       "  - {name: red, match: {uid: 1}, quotas: [{partition: a, limit: 40MiB,\n"
                       "     per: {cgroup: /j/*, limit: 40MiB}}]}\n"
                       "  - {name: blue, match: {uid: 2}, quotas: [{partition: a}]}\n");
        x = peer_in("/j/x");
        y = peer_in("/j/y");
        own = peer_in("/none");
}

static void teardown(void)
{
        settle();
        for (unsigned i = 0; i < 2; i++) /* a look at LEASE_LOOKS of them */
                lease_tick(b, clock_ms());
        settle();
        ck_assert_uint_eq(b->leases.n, 0);
        sessions_end();
}

FIXTURE(lease_fair, setup, teardown);

enum { N = 20 };

static void fill(struct peer *p, uint64_t blocks[static N])
{
        for (unsigned i = 0; i < N; i++)
                blocks[i] = must_malloc(p, 0, 2 * MIB);
}

static bool is_served(struct peer *p, uint64_t id)
{
        return peer_reply(p, id) && peer_reply(p, id)->body_case == BFCD__REPLY__BODY_BLOCK;
}

static void close_all(void)
{
        must_close(x);
        must_close(y);
        must_close(own);
}

/* An old large request of one lease, and many later small ones of another: what others return is for the old one. */
static void check_order(struct peer *holder, struct peer *first, struct peer *later)
{
        uint64_t blocks[N], large, small[N];

        fill(holder, blocks);
        large = peer_malloc_wait(first, 0, 8 * MIB, WAIT_MS);
        settle();
        still_clock_pass(10);
        for (unsigned i = 0; i < N; i++)
                small[i] = peer_malloc_wait(later, 0, 2 * MIB, WAIT_MS);
        settle();
        for (unsigned i = 0; i < 4; i++) {
                ck_assert(!is_served(first, large));
                must_free(holder, blocks[i]);
                still_clock_pass(50);
                broker_tick(b);
                settle();
        }
        ck_assert(is_served(first, large));
        ck_assert(!is_served(later, small[0]));
        for (unsigned i = 4; i < N; i++) {
                must_free(holder, blocks[i]);
                still_clock_pass(50);
                broker_tick(b);
                settle();
        }
        ck_assert(is_served(later, small[0]) && is_served(later, small[15]));
        ck_assert(!is_served(later, small[16])); /* the tenant is at its limit */
        close_all();
}

TEST_OF(lease_fair, many_requests_do_not_starve_another_lease)
{
        check_order(own, x, y);
}

TEST_OF(lease_fair, leases_do_not_starve_their_tenant)
{
        check_order(x, own, y);
}

TEST_OF(lease_fair, a_tenant_does_not_starve_its_leases)
{
        check_order(y, x, own);
}

/* ---- beside another tenant ----------------------------------------------------- */

/* A request that finds no room claims what is free, and later ones of others wait, until that has taken as long as all
 * steps can. A tenant does not begin again in each of its leases. */
TEST_OF(lease_fair, a_tenant_that_goes_round_its_leases_does_not_keep_another_waiting)
{
        const uint32_t long_ms = 60000;
        const uint64_t most_ms = RECLAIM_STEPS * b->partitions[0].reclaim_timeout_ms + 2000;
        struct peer *other = open_session(2), *lease;
        uint64_t waited_ms = 0;
        char group[16];
        uint64_t id;

        must_malloc(other, 0, 90 * MIB);
        for (unsigned i = 0; i < 15; i++) {
                snprintf(group, sizeof(group), "/j/%u", i);
                lease = peer_in(group);
                (void)peer_malloc_wait(lease, 0, 40 * MIB, long_ms);
                settle();
                id = peer_malloc(other, 0, 2 * MIB);
                settle();
                for (; !is_served(other, id) && waited_ms <= most_ms; waited_ms += 100) {
                        still_clock_pass(100);
                        broker_tick(b);
                        settle();
                }
                ck_assert_msg(is_served(other, id), "in round %u after %" PRIu64 " ms", i, waited_ms);
                must_close(lease);
                settle();
        }
        ck_assert_uint_gt(waited_ms, 0);
        close_all();
        must_close(other);
}
