/* What clients are told; see tell.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/tell.h"

#include "daemon/session/session.h"

static void tell_limits_of(struct session *s)
{
        for (size_t i = 0; i < s->n_shares; i++) {
                Bfcd__Event event = BFCD__EVENT__INIT;
                Bfcd__QuotaChanged changed = BFCD__QUOTA_CHANGED__INIT;

                if (!s->shares[i].quota->sessions.limit_changed)
                        continue;
                changed.partition = (uint32_t)i;
                changed.bytes_limit = s->shares[i].quota->account.limit_bytes;
                event.body_case = BFCD__EVENT__BODY_QUOTA_CHANGED;
                event.quota_changed = &changed;
                s->ops->send_event(s->userdata, &event);
        }
}

/* One event for each limit. */
void tell_limits(struct broker *b)
{
        for (size_t i = 0; i < b->sessions.n_slots; i++) {
                struct session *s = b->sessions.table[i];

                if (s && s->state == SESSION_LIVE && session_has_events(s))
                        tell_limits_of(s);
        }
        for (size_t i = 0; i < b->n_tenants; i++)
                for (size_t k = 0; k < b->tenants[i].n_quotas; k++)
                        b->tenants[i].quotas[k]->sessions.limit_changed = false;
}

static void tell_draining(struct session *s, uint32_t partition, bool is_over)
{
        Bfcd__Event event = BFCD__EVENT__INIT;
        Bfcd__Draining draining = BFCD__DRAINING__INIT;

        draining.partition = partition;
        draining.is_over = is_over;
        event.body_case = BFCD__EVENT__BODY_DRAINING;
        event.draining = &draining;
        s->ops->send_event(s->userdata, &event);
}

/* One event for each partition. */
void tell_drain(struct broker *b, const struct broker_device *d, bool is_over)
{
        for (size_t i = 0; i < b->sessions.n_slots; i++) {
                struct session *s = b->sessions.table[i];

                if (!s || !session_has_events(s) || !session_is_connected(s))
                        continue;
                for (size_t k = 0; k < s->n_shares; k++)
                        if (s->shares[k].quota->partition->device == d->device)
                                tell_draining(s, (uint32_t)k, is_over);
        }
}

void tell_drains_of(struct session *s)
{
        for (size_t k = 0; session_has_events(s) && k < s->n_shares; k++)
                if (s->shares[k].quota->partition->is_draining)
                        tell_draining(s, (uint32_t)k, false);
}
