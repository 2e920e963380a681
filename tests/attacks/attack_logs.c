/* Provokes as many lines of the log as it can: sessions that end in every way, violations, refusals, and
 * sessions whose quarantine ends.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/attacks/attack.h"

static void provoke(struct attack_stage *stage, unsigned i)
{
        static const uint8_t nonsense[] = { 0xff, 0xff, 0xff, 0xff };
        struct raw *raw;
        Bfcd__Block block;

        if (raw_open(stage->socket, &raw) < 0)
                return;
        if (i % 6 == 0)
                (void)raw_send_bytes(raw, nonsense, sizeof(nonsense)); /* before the hello */
        else if (i % 6 == 1)
                (void)raw_hello(raw, "victim-of-a-typo", NULL);
        else if (raw_hello(raw, ATTACKER, "b") == 0) {
                if (i % 6 == 2)
                        (void)raw_send_bytes(raw, nonsense, sizeof(nonsense));
                else if (i % 6 == 3)
                        (void)raw_malloc(raw, 0, UINT64_C(1) << 40, &block);
                else
                        (void)raw_malloc(raw, 0, 256, &block);
                if (i % 6 == 4)
                        (void)raw_goodbye(raw);
        }
        raw_close(raw);
        attack_count(stage, 1);
}

static void act(struct attack_stage *stage)
{
        attack_is_up(stage);
        for (unsigned i = 0;; i++)
                provoke(stage, i);
}

const struct attack attack_logs = { .key = "logs",
                                    .what = "lines of the log of every kind",
                                    .n_processes = 2,
                                    .act = act,
                                    .log_line = "end of the quarantine" };
