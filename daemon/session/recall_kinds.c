/* What each kind of recall does when its time is up; see recall.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/pressure.h"
#include "daemon/session/recall.h"
#include "daemon/session/retire.h"
#include "daemon/session/session.h"
#include "daemon/session/trim.h"

static void (*const miss[RECALL_KINDS])(struct recall *r) = {
        [RECALL_RETIRE] = retire_miss,
        [RECALL_TRIM] = trim_miss,
        [RECALL_PRESSURE] = pressure_miss,
};

void recall_tick(struct broker *b, uint64_t now_ms)
{
        const uint64_t timeouts_ms[RECALL_KINDS] = {
                [RECALL_RETIRE] = b->config->release_timeout_ms,
                [RECALL_TRIM] = b->config->reclaim_timeout_ms,
                [RECALL_PRESSURE] = PRESSURE_TIMEOUT_MS,
        };

        for (size_t i = 0; i < RECALL_KINDS; i++) {
                struct recall *r;

                while ((r = TAILQ_FIRST(&b->recalls.lists[i])) && r->since_ms + timeouts_ms[i] <= now_ms) {
                        r->session->recall.queues[i].n_missed++;
                        recall_clear_deadline(r);
                        miss[i](r);
                }
        }
}
