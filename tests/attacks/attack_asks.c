/* Asks for what the daemon looks at many objects for: leases that are refused, tenants that do not exist, and lists.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <unistd.h>

#include "tests/attacks/attack.h"

static void ask(struct raw *raw, Bfcd__Request *request)
{
        Bfcd__Reply *reply;

        if (raw_call(raw, request, &reply) == 0)
                bfcd__reply__free_unpacked(reply, NULL);
}

static void ask_lease(struct raw *raw, char *partition)
{
        Bfcd__LeaseCreate m = BFCD__LEASE_CREATE__INIT;
        Bfcd__Request request = BFCD__REQUEST__INIT;
        char name[32];

        snprintf(name, sizeof(name), "u%u:x", (unsigned)getuid());
        m.name = name;
        m.partition = partition;
        m.match_case = BFCD__LEASE_CREATE__MATCH_UID;
        m.uid = getuid();
        m.bytes_limit = UINT64_C(192) << 20;
        m.bytes_reserve = m.bytes_limit; /* which no tenant has free */
        request.body_case = BFCD__REQUEST__BODY_LEASE_CREATE;
        request.lease_create = &m;
        ask(raw, &request);
}

static void ask_explain(struct raw *raw, char *tenant)
{
        Bfcd__Explain m = BFCD__EXPLAIN__INIT;
        Bfcd__Request request = BFCD__REQUEST__INIT;

        m.tenant = tenant;
        request.body_case = BFCD__REQUEST__BODY_EXPLAIN;
        request.explain = &m;
        ask(raw, &request);
}

static void act(struct attack_stage *stage)
{
        static const Bfcd__List__Kind kinds[] = { BFCD__LIST__KIND__STATUS, BFCD__LIST__KIND__PARTITIONS,
                                                  BFCD__LIST__KIND__TENANTS, BFCD__LIST__KIND__SESSIONS,
                                                  BFCD__LIST__KIND__GRANTS };
        char a[] = "a", nowhere[] = "nowhere", unknown[] = "unknown";
        struct raw *raw = attack_session(stage);
        Bfcd__Reply *reply;

        attack_is_up(stage);
        for (size_t i = 0;; i++) {
                ask_lease(raw, i % 2 == 0 ? a : nowhere);
                ask_explain(raw, unknown);
                if (raw_list(raw, kinds[i % (sizeof(kinds) / sizeof(kinds[0]))], 0, &reply) == 0)
                        bfcd__reply__free_unpacked(reply, NULL);
                attack_count(stage, 3);
        }
}

const struct attack attack_asks = {
        .key = "asks",
        .what = "requests for leases, explanations and lists, of 400 more tenants",
        .n_processes = 4,
        .n_more_tenants = 400,
        .act = act
};
