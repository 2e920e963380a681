/* Memory that is kept: the attack gives extents up, keeps their fds, and writes into them for ever.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <fcntl.h>
#include <unistd.h>

#include "tests/attacks/attack.h"

#define MIB      (UINT64_C(1) << 20)
#define MAX_KEPT 48u /* extents of 2 MiB, by each process */

struct kept {
        int fds[MAX_KEPT];
        size_t n; /* ever kept; the places are used again */
};

static void keep(struct kept *kept, const struct raw *raw)
{
        for (size_t i = 0; i < raw->n_extents; i++) {
                int *place = &kept->fds[kept->n % MAX_KEPT];

                if (kept->n++ >= MAX_KEPT)
                        close(*place);
                *place = fcntl(raw->extents[i].fd, F_DUPFD_CLOEXEC, 3);
        }
}

/* The first block's extents are released for the third, if the limit has no room for all. */
static void have_some_destroyed(struct raw *raw, uint32_t partition)
{
        Bfcd__Block blocks[3];

        if (raw_malloc(raw, partition, 40 * MIB, &blocks[0]) == 0 &&
            raw_malloc(raw, partition, 40 * MIB, &blocks[1]) == 0 && raw_free(raw, blocks[0].block_id) == 0)
                (void)raw_malloc(raw, partition, 80 * MIB, &blocks[2]);
}

static void refill(struct attack_stage *stage, const struct kept *kept)
{
        static const char bytes[65536] = { 1 };
        size_t n = kept->n < MAX_KEPT ? kept->n : MAX_KEPT;

        for (size_t i = 0; i < n; i++)
                for (uint64_t at = 0; at < 2 * MIB; at += sizeof(bytes))
                        if (pwrite(kept->fds[i], bytes, sizeof(bytes), (off_t)at) > 0)
                                attack_count(stage, 1);
}

static void act(struct attack_stage *stage)
{
        struct kept kept = { .n = 0 };
        uint32_t partition = 1 + (uint32_t)getpid() % 3; /* not the victim's */
        struct raw *raw = attack_session(stage);

        attack_is_up(stage);
        for (;;) {
                have_some_destroyed(raw, partition);
                keep(&kept, raw);
                raw_goodbye(raw);
                raw_close(raw);
                for (unsigned i = 0; i < 20; i++)
                        refill(stage, &kept);
                raw = attack_session(stage);
        }
}

const struct attack attack_refill = {
        .key = "refill",
        .what = "memory that is kept after it was given up",
        .n_processes = 2,
        .act = act,
        .log_line = "did not return memory of tenant",
};
