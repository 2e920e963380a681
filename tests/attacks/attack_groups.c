/* A user in as many groups as the kernel allows says hello and is refused, again and again.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <grp.h>
#include <stdlib.h>
#include <unistd.h>

#include "tests/attacks/attack.h"

#define N_GROUPS  65536u
#define FIRST_GID 100000u

/* Only root can; without it this is a crowd of refused hellos. */
static void join_groups(void)
{
        gid_t *gids;

        if (geteuid() != 0)
                return;
        gids = calloc(N_GROUPS, sizeof(*gids));
        for (unsigned i = 0; gids && i < N_GROUPS; i++)
                gids[i] = FIRST_GID + i;
        if (!gids || setgroups(N_GROUPS, gids) < 0)
                _exit(1);
        free(gids);
}

static void act(struct attack_stage *stage)
{
        attack_is_up(stage);
        for (;;) {
                struct raw *raw;

                if (raw_open(stage->socket, &raw) < 0)
                        continue;
                for (unsigned i = 0; i < 3; i++)
                        attack_count(stage, raw_hello(raw, "no-such-tenant", NULL) < 0);
                raw_close(raw);
        }
}

const struct attack attack_groups = { .key = "groups",
                                      .what = "hellos of a user in 65,536 groups",
                                      .n_processes = 2,
                                      .n_uids = 1,
                                      .act = act,
                                      .before_drop = join_groups };

/* Refusals by many users in no group, each of which is another one to the daemon. */
const struct attack attack_refusals = { .key = "refusals",
                                        .what = "refused hellos of 70 users",
                                        .n_processes = 1,
                                        .n_uids = 70,
                                        .act = act,
                                        .fills_places = true };
