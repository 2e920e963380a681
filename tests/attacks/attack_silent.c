/* Users that no tenant matches hold connections that say nothing, and open a new one for each that is closed.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <poll.h>
#include <unistd.h>

#include "tests/attacks/attack.h"

#define N_HELD         200u /* more than one user has places */
#define N_HELD_OF_MANY 20u  /* more than the share of each of 70 users in all places of theirs */

static void hold(struct attack_stage *stage, unsigned n_held)
{
        struct pollfd held[N_HELD];

        for (unsigned i = 0; i < n_held; i++)
                held[i] = (struct pollfd){ .fd = attack_socket(stage), .events = POLLIN };
        attack_is_up(stage);
        for (;;) {
                (void)poll(held, n_held, -1);
                for (unsigned i = 0; i < n_held; i++) {
                        if (!held[i].revents)
                                continue;
                        close(held[i].fd);
                        held[i].fd = attack_socket(stage);
                        attack_count(stage, 1);
                }
        }
}

static void act(struct attack_stage *stage)
{
        hold(stage, N_HELD);
}

static void act_as_one_of_many(struct attack_stage *stage)
{
        hold(stage, N_HELD_OF_MANY);
}

const struct attack attack_silent = { .key = "silent",
                                      .what = "8 users hold connections that say nothing",
                                      .n_processes = 1,
                                      .n_uids = 8,
                                      .act = act,
                                      .fills_places = true,
                                      .log_line = "have sent no hello" };

/* As many users as share all places that such users have. */
const struct attack attack_many_silent = { .key = "many-silent",
                                           .what = "70 users hold connections that say nothing",
                                           .n_processes = 1,
                                           .n_uids = 70,
                                           .act = act_as_one_of_many,
                                           .fills_places = true,
                                           .log_line = "have sent no hello" };
