/* One process takes as many sessions as it gets, in each partition of its tenant.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <sys/resource.h>
#include <unistd.h>

#include "tests/attacks/attack.h"

/* The session lives as long as its socket is open. */
static bool take_session(struct attack_stage *stage, const char *partition)
{
        struct raw *raw;
        bool taken;

        if (raw_open(stage->socket, &raw) < 0)
                return false;
        taken = raw_hello(raw, ATTACKER, partition) == 0 && dup(raw->fd) >= 0;
        raw_close(raw);
        return taken;
}

static void act(struct attack_stage *stage)
{
        static const char *const partitions[] = { "a", "b", "c", "d" };
        struct rlimit limit;

        if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
                limit.rlim_cur = limit.rlim_max;
                (void)setrlimit(RLIMIT_NOFILE, &limit);
        }
        attack_is_up(stage);
        for (;;) {
                for (unsigned i = 0; i < 4; i++)
                        while (take_session(stage, partitions[i]))
                                attack_count(stage, 1);
                usleep(1000);
        }
}

const struct attack attack_sessions = {
        .key = "sessions", .what = "one process takes all sessions that it gets", .n_processes = 1, .act = act
};
