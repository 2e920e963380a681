/* Each attack of tests/attacks beside a victim: the victim's requests and another
 * tenant's growth are granted while it runs, the daemon's memory stays bounded,
 * and after it nothing is charged and no fd is left.
 *
 * How long the victim waits is measured by bench-attacks, not here.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "tests/attacks/attack.h"
#include "tests/integration/tools.h"

#define N_ROUNDS     50u
#define N_GROWTHS    3u
#define BLOCK_BYTES  4000u
#define GROWTH_BYTES (4 * MIB)
#define MAX_RESIDENT (256 * MIB) /* of the daemon, beside any attack */
#define UP_TIME_MS   SETTLE_MS
#define GENEROUS_MS  SETTLE_MS

static const struct rig_config shared_machine = {
        .top = "timeouts: {quarantine: 1s}\n",
        .size = "640MiB",
        .partitions = "      - {name: a, limit: 160MiB, growth: on-demand}\n"
                      "      - {name: b, limit: 160MiB, growth: on-demand}\n"
                      "      - {name: c, limit: 160MiB, growth: on-demand}\n"
                      "      - {name: d, limit: 160MiB, growth: on-demand}\n",
        .tenants = TENANT("victim", "@UID@", "a, limit: 16MiB, reserve: 16MiB") TENANT(
                "grower", "@UID@",
                "a, limit: 16MiB, reserve: 16MiB") "  - name: " ATTACKER "\n"
                                                   "    match: {uid: [@UID@, @OTHER@], gid: [4245]}\n"
                                                   "    leases: self\n"
                                                   "    quotas: [{partition: a, limit: 128MiB}, {partition: b, limit: 128MiB},\n"
                                                   "             {partition: c, limit: 128MiB}, {partition: d, limit: 128MiB}]\n",
};

static void victim_works(bfc_client *victim, unsigned n_rounds)
{
        for (unsigned i = 0; i < n_rounds; i++) {
                void *p;

                ck_assert_ok(bfc_malloc(victim, BLOCK_BYTES, &p));
                pattern_write(p, BLOCK_BYTES, i);
                ck_assert(pattern_holds(p, BLOCK_BYTES, i));
                ck_assert_ok(bfc_free(victim, p));
        }
}

static void grower_grows(const struct rig *rig)
{
        bfc_client *grower = client_open(rig, "grower", "a");
        void *p;

        for (unsigned i = 0; i < N_GROWTHS; i++)
                ck_assert_ok(bfc_malloc(grower, GROWTH_BYTES, &p));
        bfc_disconnect(grower);
}

/* An attack may leave what the daemon needs a while to clean up. */
static bool is_empty(struct rig *rig)
{
        struct rig_counts now = rig_count(rig);

        return now.n_sessions == 0 && now.n_extents == rig->n_extents && now.bytes_pending == 0 &&
               now.n_quarantined == 0;
}

LOOP_TEST(a_victim_beside_an_attack_is_served, (int)n_attacks)
{
        const struct attack *attack = attacks[_i];
        struct attack_stage *stage;
        struct attack_run run;
        bfc_client *victim;
        struct rig *rig;
        char kept[64];
        void *p;

        if (!attack_may_run(attack))
                return;
        rig = rig_start(&shared_machine);
        stage = attack_stage_new(rig->socket, rig->pid);
        victim = client_open(rig, "victim", "a");
        rig->forgiven = attack->log_line;
        ck_assert_ptr_nonnull(stage);
        ck_assert_ok(bfc_malloc(victim, sizeof(kept), &p));
        pattern_write(p, sizeof(kept), 7);
        ck_assert_int_eq(attack_start(attack, stage, &run), 0);
        ck_assert_msg(WAIT_FOR(atomic_load(&stage->n_up) >= attack_n_processes(attack), UP_TIME_MS),
                      "%s: the attack did not begin", attack->key);
        for (unsigned i = 0; i < N_GROWTHS; i++) {
                victim_works(victim, N_ROUNDS);
                grower_grows(rig);
        }
        ck_assert_msg(rig_count(rig).bytes_resident <= MAX_RESIDENT, "%s: the daemon has %llu bytes",
                      attack->key, (unsigned long long)rig_count(rig).bytes_resident);
        attack_stop(&run);
        ck_assert(pattern_holds(p, sizeof(kept), 7));
        bfc_disconnect(victim);
        ck_assert_msg(WAIT_FOR(is_empty(rig), GENEROUS_MS), "%s: something is left", attack->key);
        rig_stop(rig);
}

int main(void)
{
        return harness_cases_with("attacks", 3 * TEST_TIMEOUT, NULL);
}
