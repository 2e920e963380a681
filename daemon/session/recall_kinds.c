/* What each kind of recall does when it is answered, and when its time is up; see recall.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <inttypes.h>

#include "daemon/base/log.h"
#include "daemon/session/pressure.h"
#include "daemon/session/recall.h"
#include "daemon/session/recall_command.h"
#include "daemon/session/retire.h"
#include "daemon/session/session.h"
#include "daemon/session/trim.h"

static const struct {
        void (*answer)(struct recall *r);
        void (*miss)(struct recall *r);
        const char *missed; /* for the log; NULL: miss() logs it */
} kinds[RECALL_KINDS] = {
        [RECALL_RETIRE] = { retire_answer, retire_miss, NULL },
        [RECALL_TRIM] = { trim_answer, trim_miss, "a Trim within timeouts.reclaim" },
        [RECALL_PRESSURE] = { pressure_answer, pressure_miss, "a Pressure within 60 s" },
};
_Static_assert(PRESSURE_TIMEOUT_MS == 60000, "the text above");

int recall_answer(struct session *s, uint64_t sequence, const char **ret_why)
{
        struct recall *r = recall_find(s, sequence);
        enum recall_kind kind;

        if (!r) {
                *ret_why = "the client answered an event that was not sent or was already answered";
                return -EPROTO;
        }
        kind = r->kind;
        kinds[kind].answer(r);
        if (kind != RECALL_RETIRE) /* that one is freed */
                recall_command_hear(r);
        return 0;
}

void recall_begin_resumed(struct session *s)
{
        retire_begin_resumed(s);
        trim_begin(s);
        pressure_begin(s);
}

void recall_end_session(struct session *s)
{
        trim_end(s);
        pressure_end(s);
        for (size_t i = 0; i < s->n_shares; i++) { /* a command asks the next session, never this one */
                recall_command_hear(&s->shares[i].trim.recall);
                recall_command_hear(&s->shares[i].pressure.recall);
        }
}

static void log_missed(const struct session *s, const char *missed)
{
        log_limited(&s->tenant->unresponsive_log, LOG_LEVEL_WARNING,
                    "session %" PRIu64
                    " (uid %u, pid %d): the client did not answer %s; it is skipped until it "
                    "answers",
                    s->id, (unsigned)s->who.uid, (int)s->who.pid, missed);
}

void recall_tick(struct broker *b, uint64_t now_ms)
{
        const uint64_t timeouts_ms[RECALL_KINDS] = {
                [RECALL_RETIRE] = RETIRE_TIMEOUT_MS,
                [RECALL_TRIM] = b->config->reclaim_timeout_ms,
                [RECALL_PRESSURE] = PRESSURE_TIMEOUT_MS,
        };

        for (size_t i = 0; i < RECALL_KINDS; i++) {
                struct recall *r;

                while ((r = TAILQ_FIRST(&b->recalls.lists[i])) && r->since_ms + timeouts_ms[i] <= now_ms) {
                        r->session->recall.queues[i].n_missed++;
                        recall_clear_deadline(r);
                        if (kinds[i].missed)
                                log_missed(r->session, kinds[i].missed);
                        kinds[i].miss(r);
                        if (i != RECALL_RETIRE) /* that one may be freed */
                                recall_command_hear(r);
                }
        }
}
