/* Orders; see order.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/order.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/clock.h"
#include "daemon/log.h"
#include "daemon/session.h"
#include "daemon/trim.h"

struct trim_order {
        struct session *operator;
        uint64_t id; /* of the request */
        char tenant[LEDGER_NAME_BYTES];
        char partition[LEDGER_NAME_BYTES];
        uint64_t want_bytes;
        uint64_t freed_bytes;
        uint64_t n_asked;
        size_t n_open;
        uint32_t next;     /* session's slot */
        size_t next_share; /* of that session */
        bool is_asking;    /* inside order_go_on() */
};

static bool name_matches(const char *wanted, const char *name)
{
        return wanted[0] == '\0' || strcmp(wanted, name) == 0;
}

static bool order_matches(const struct trim_order *order, const struct quota *q)
{
        return name_matches(order->tenant, q->tenant) && name_matches(order->partition, q->partition->name);
}

/* How many quotas it is about; and the extents in which nothing lies go back. */
static size_t order_each_quota(const struct trim_order *order, bool release)
{
        struct broker *b = order->operator->broker;
        size_t n = 0;

        for (size_t i = 0; i < b->n_tenants; i++) {
                for (size_t k = 0; k < b->tenants[i].n_quotas; k++) {
                        struct quota *q = b->tenants[i].quotas[k];

                        if (!order_matches(order, q))
                                continue;
                        n++;
                        if (release)
                                quota_release_idle(q);
                }
        }
        return n;
}

static void order_is_done(struct trim_order *order)
{
        struct session *s = order->operator;
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        Bfcd__TrimReply trim = BFCD__TRIM_REPLY__INIT;

        order_each_quota(order, true);
        log_info("session %" PRIu64 " (uid %u): trim: %" PRIu64 " sessions asked, %" PRIu64
                 " bytes came back",
                 s->id, (unsigned)s->who.uid, order->n_asked, order->freed_bytes);
        trim.n_asked = order->n_asked;
        trim.n_bytes = order->freed_bytes;
        reply.id = order->id;
        reply.body_case = BFCD__REPLY__BODY_TRIM;
        reply.trim = &trim;
        s->order = NULL;
        free(order);
        session_send(s, &reply);
}

static bool order_has_enough(const struct trim_order *order)
{
        return order->freed_bytes >= order->want_bytes;
}

/* Asks the next of its sessions in one quota; false: there are none left. */
static bool order_ask_next(struct trim_order *order, uint64_t now_ms)
{
        struct broker *b = order->operator->broker;

        for (; order->next < b->n_session_slots; order->next++, order->next_share = 0) {
                struct session *s = b->sessions[order->next];

                while (s && s->tenant && order->next_share < s->n_shares) {
                        struct session_share *share = &s->shares[order->next_share++];

                        if (!order_matches(order, share->quota) ||
                            !trim_send(&share->trim, order->want_bytes - order->freed_bytes, now_ms))
                                continue;
                        share->trim.order = order;
                        order->n_asked++;
                        order->n_open++;
                        return true;
                }
        }
        return false;
}

static void order_go_on(struct trim_order *order)
{
        uint64_t now_ms = clock_ms();

        if (order->is_asking)
                return;
        order->is_asking = true;
        while (order->n_open < ORDER_MAX_OPEN && !order_has_enough(order) && order_ask_next(order, now_ms))
                ;
        order->is_asking = false;
        if (order->n_open == 0)
                order_is_done(order);
}

void order_heard(struct trim_order *order, uint64_t freed_bytes)
{
        order->n_open--;
        order->freed_bytes += freed_bytes;
        order_go_on(order);
}

void order_drop(struct session *s)
{
        struct trim_share *share;

        if (!s->order)
                return;
        TAILQ_FOREACH(share, &s->broker->trims, of_broker)
        if (share->order == s->order)
                share->order = NULL;
        free(s->order);
        s->order = NULL;
}

int handle_trim_now(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        const Bfcd__TrimNow *m = r->trim_now;
        struct trim_order *order;

        (void)ret_why;
        if (!s->admin || s->order) {
                session_refuse(s, r->id, s->admin ? -EBUSY : -EACCES,
                               s->admin ? "this session's last trim is not done yet"
                                        : "sessions are trimmed by operators, on the admin socket");
                return 0;
        }
        order = calloc(1, sizeof(*order));
        if (!order) {
                session_refuse(s, r->id, -ENOMEM, "the daemon is out of memory");
                return 0;
        }
        order->operator= s;
        order->id = r->id;
        order->want_bytes = m->n_bytes > 0 ? m->n_bytes : UINT64_MAX;
        /* A name that is too long matches nothing. */
        snprintf(order->tenant, sizeof(order->tenant), "%s", m->tenant);
        snprintf(order->partition, sizeof(order->partition), "%s", m->partition);
        if (order_each_quota(order, false) == 0) {
                session_refuse(s, r->id, -ENOENT, "no such tenant has a quota in such a partition");
                free(order);
                return 0;
        }
        s->order = order;
        order_go_on(order);
        return 0;
}

static struct session *find_session(const struct broker *b, uint64_t id)
{
        for (uint32_t i = 0; i < b->n_session_slots; i++)
                if (b->sessions[i] && b->sessions[i]->id == id)
                        return b->sessions[i];
        return NULL;
}

int handle_evict(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        struct session *other;
        char sentence[256];

        (void)ret_why;
        if (!s->admin) {
                session_refuse(s, r->id, -EACCES, "sessions are evicted by operators, on the admin socket");
                return 0;
        }
        other = find_session(s->broker, r->evict->session_id);
        if (!other || other->admin || other->state != SESSION_LIVE) {
                snprintf(sentence, sizeof(sentence), "there is no session %" PRIu64 " to evict%s%s",
                         r->evict->session_id, other ? ": it is " : "",
                         !other         ? ""
                         : other->admin ? "an operator's"
                                        : session_state_name(other));
                session_refuse(s, r->id, -ENOENT, sentence);
                return 0;
        }
        log_notice("session %" PRIu64 " (tenant '%s', uid %u, pid %d, %s): evicted by session %" PRIu64
                   " (uid %u, pid %d)",
                   other->id, other->tenant->name, (unsigned)other->who.uid, (int)other->who.pid, other->name,
                   s->id, (unsigned)s->who.uid, (int)s->who.pid);
        other->ops->abort(other->userdata, "an operator evicted it");
        session_done(s, r->id);
        return 0;
}
