/* No attack: what the victim feels on the same machine without one.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <unistd.h>

#include "tests/attacks/attack.h"

static void act(struct attack_stage *stage)
{
        attack_is_up(stage);
        for (;;)
                pause();
}

const struct attack attack_none = { .key = "none", .what = "no attack", .n_processes = 1, .act = act };
