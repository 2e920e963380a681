/* Looks for mappings; see mappings.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/mappings.h"

#include "daemon/base/number.h"
#include "daemon/session/session.h"
#include "daemon/session/session_states.h"

#define MAPPINGS_LOOKS        128u /* at extents, in one mappings_look() */
#define MAPPINGS_LOOKS_OF_ONE 32u  /* of these, at one session's */

/* An extent without another reference never gets one again: the session is given no extent any more, and
 * only the daemon may open it. So it is enough to see each extent alone once. */
static bool extent_is_alone(const struct session *s, uint32_t index)
{
        const struct ledger_extent *extent = ledger_extent_at(s->broker->ledger, index);
        struct device_extent memory = { .fd = extent->fd, .n_bytes = extent->n_bytes };
        struct device *device = session_share_of(s, extent->quota)->quota->partition->device;

        /* A worker has an extent that is leaving; its export is cleared soon. */
        return !extent->is_leaving && device_is_alone(device, &memory);
}

/* Looks at n_max of the session's extents at most. True: the session has no mapping. */
static bool session_look(struct session *s, size_t n_max, size_t *ret_n)
{
        struct ledger *l = s->broker->ledger;
        struct mappings_state *m = &s->mappings;
        const struct ledger_export *x = m->export != LEDGER_NONE ? ledger_export_get(l, m->export) : NULL;
        uint32_t at;

        /* The record may be another session's by now. This one gets no more exports. */
        if (x && x->session == s->index)
                at = m->export;
        else
                at = ledger_session_at(l, s->index)->links.first_export;
        for (*ret_n = 0; at != LEDGER_NONE; at = x->links.next_of_session) {
                x = ledger_export_at(l, at);
                m->export = at;
                if (*ret_n == n_max)
                        return false;
                (*ret_n)++;
                if (!extent_is_alone(s, x->extent))
                        return false;
        }
        return true;
}

/* Each session at most once. A session whose memory is mapped costs one look. */
void mappings_look(struct broker *b)
{
        const struct session *last = TAILQ_LAST(&b->sessions.mapped, session_list);
        size_t n_left = MAPPINGS_LOOKS, n;
        bool is_last = !last;

        while (!is_last && n_left > 0) {
                struct session *s = TAILQ_FIRST(&b->sessions.mapped);

                is_last = s == last;
                TAILQ_REMOVE(&b->sessions.mapped, s, mappings.link);
                TAILQ_INSERT_TAIL(&b->sessions.mapped, s, mappings.link);
                if (session_look(s, min_u64(n_left, MAPPINGS_LOOKS_OF_ONE), &n))
                        session_close(s, "process has unmapped all its memory");
                n_left -= n > 0 ? n : 1;
        }
}

bool mappings_are_watched(const struct broker *b)
{
        return !TAILQ_EMPTY(&b->sessions.mapped);
}
