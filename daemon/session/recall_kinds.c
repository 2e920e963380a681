/* What each kind of recall does when it is answered, and when its time is up; see recall.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>

#include "daemon/session/pressure.h"
#include "daemon/session/recall.h"
#include "daemon/session/retire.h"
#include "daemon/session/session.h"
#include "daemon/session/trim.h"

static const struct {
        void (*answer)(struct recall *r);
        void (*miss)(struct recall *r);
} kinds[RECALL_KINDS] = {
        [RECALL_RETIRE] = { retire_answer, retire_miss },
        [RECALL_TRIM] = { trim_answer, trim_miss },
        [RECALL_PRESSURE] = { pressure_answer, pressure_miss },
};

int recall_answer(struct session *s, uint64_t sequence, const char **ret_why)
{
        struct recall *r = recall_find(s, sequence);

        if (!r) {
                *ret_why = "the client answered an event that was not sent or was already answered";
                return -EPROTO;
        }
        kinds[r->kind].answer(r);
        return 0;
}

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
                        kinds[i].miss(r);
                }
        }
}
