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
#include "daemon/drain.h"
#include "daemon/explain.h"
#include "daemon/log.h"
#include "daemon/session.h"
#include "daemon/trim.h"

struct trim_order {
        struct broker *broker;
        struct session *operator;     /* NULL: a drain's */
        struct broker_device *device; /* what is drained; NULL: an operator's */
        size_t n_looks;               /* a drain's: at so many sessions it may still look in this tick */
        uint64_t id;                  /* of the request */
        char tenant[LEDGER_NAME_BYTES];
        char partition[LEDGER_NAME_BYTES];
        uint64_t want_bytes;
        uint64_t freed_bytes;
        uint64_t before_bytes; /* reserved, when it came */
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
        if (order->device)
                return q->partition->device == order->device->device;
        return name_matches(order->tenant, q->tenant) && name_matches(order->partition, q->partition->name);
}

/* How many quotas it is about; and the extents in which nothing lies go back. */
static size_t order_each_quota(const struct trim_order *order, bool release)
{
        struct broker *b = order->broker;
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

static uint64_t order_reserved_bytes(const struct trim_order *order)
{
        const struct broker *b = order->broker;
        uint64_t n_bytes = 0;

        for (size_t i = 0; i < b->n_tenants; i++)
                for (size_t k = 0; k < b->tenants[i].n_quotas; k++)
                        if (order_matches(order, b->tenants[i].quotas[k]))
                                n_bytes += b->tenants[i].quotas[k]->account.charged_bytes;
        return n_bytes;
}

static void drain_order_is_done(struct trim_order *order)
{
        order_each_quota(order, drain_is_waiting(order->device));
        order->device->order = NULL;
        order->device->asked_ms = clock_ms();
        free(order);
}

static void order_is_done(struct trim_order *order)
{
        struct session *s = order->operator;
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        Bfcd__TrimReply trim = BFCD__TRIM_REPLY__INIT;

        order_each_quota(order, true);
        log_info("session %" PRIu64 " (uid %u): trim: %" PRIu64 " sessions asked, %" PRIu64 " bytes in "
                 "blocks freed",
                 s->id, (unsigned)s->who.uid, order->n_asked, order->freed_bytes);
        trim.n_asked = order->n_asked;
        trim.n_bytes = order->freed_bytes;
        trim.bytes_reserved_before = order->before_bytes;
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

static bool order_has_looked(const struct trim_order *order)
{
        return order->next >= order->broker->n_session_slots;
}

/* Asks the next of its sessions in one quota; false: there are none left, or none for now. */
static bool order_ask_next(struct trim_order *order, uint64_t now_ms)
{
        struct broker *b = order->broker;

        if (order->device && !drain_is_waiting(order->device))
                order->next = (uint32_t)b->n_session_slots;
        for (; !order_has_looked(order); order->next++, order->next_share = 0) {
                struct session *s = b->sessions[order->next];

                if (order->device && order->n_looks-- == 0) {
                        order->n_looks = 0;
                        return false;
                }

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
        if (order->n_open > 0 || (order->device && !order_has_looked(order)))
                return;
        if (order->device)
                drain_order_is_done(order);
        else
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
                               s->admin ? "a trim of this session is still running: wait until it is done"
                                        : "trim is only for operators: use the admin socket");
                return 0;
        }
        order = calloc(1, sizeof(*order));
        if (!order) {
                session_refuse(s, r->id, -ENOMEM, "the daemon is out of memory");
                return 0;
        }
        order->broker = s->broker;
        order->operator= s;
        order->id = r->id;
        order->want_bytes = m->n_bytes > 0 ? m->n_bytes : UINT64_MAX;
        /* A name that is too long matches nothing. */
        snprintf(order->tenant, sizeof(order->tenant), "%s", m->tenant);
        snprintf(order->partition, sizeof(order->partition), "%s", m->partition);
        if (order_each_quota(order, false) == 0) {
                char sentence[EXPLAIN_SENTENCE];

                explain_names(s, m->tenant, m->partition, sentence, sizeof(sentence));
                session_refuse(s, r->id, -ENOENT, sentence);
                free(order);
                return 0;
        }
        order->before_bytes = order_reserved_bytes(order);
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

#define REASON_MAX 200u /* bytes */

/* Printable ASCII, so that neither a log nor a terminal is given anything else. */
static bool reason_is_valid(const char *reason)
{
        size_t n = 0;

        while (reason[n] >= ' ' && reason[n] <= '~')
                n++;
        return n <= REASON_MAX && reason[n] == '\0';
}

/* The client is told once, on its connection; a client that resumes the session is told by restore.c. */
static int order_tell_eviction(struct session *other, const char *reason)
{
        char *sentence;

        if (asprintf(&sentence, "session %" PRIu64 " was evicted by an operator%s%s", other->id,
                     *reason ? ": " : "", reason) < 0)
                return -ENOMEM;
        free(other->eviction);
        other->eviction = sentence;
        session_refuse(other, 0, -EIDRM, sentence);
        return 0;
}

int handle_evict(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        struct session *other;
        char sentence[256];

        (void)ret_why;
        if (!s->admin) {
                session_refuse(s, r->id, -EACCES, "evict is only for operators: use the admin socket");
                return 0;
        }
        if (!reason_is_valid(r->evict->reason)) {
                session_refuse(s, r->id, -EINVAL,
                               "the reason is not valid: it has at most 200 bytes of printable ASCII");
                return 0;
        }
        other = find_session(s->broker, r->evict->session_id);
        if (!other || other->admin || (other->state != SESSION_LIVE && !session_is_awaited(other))) {
                snprintf(sentence, sizeof(sentence), "session %" PRIu64 " cannot be evicted: %s%s",
                         r->evict->session_id, other ? "it is " : "",
                         !other         ? "there is no such session"
                         : other->admin ? "an operator's session"
                                        : session_state_name(other));
                session_refuse(s, r->id, -ENOENT, sentence);
                return 0;
        }
        if (order_tell_eviction(other, r->evict->reason) < 0) {
                session_refuse(s, r->id, -ENOMEM, "the daemon is out of memory");
                return 0;
        }
        log_notice("session %" PRIu64 " (tenant '%s', uid %u, pid %d, %s): evicted by session %" PRIu64
                   " (uid %u, pid %d)%s%s",
                   other->id, other->tenant->name, (unsigned)other->who.uid, (int)other->who.pid, other->name,
                   s->id, (unsigned)s->who.uid, (int)s->who.pid, *r->evict->reason ? ": " : "",
                   r->evict->reason);
        session_stop_awaiting(other);
        other->ops->abort(other->userdata, "evicted by an operator");
        session_done(s, r->id);
        return 0;
}

/* ---- drains -------------------------------------------------------------- */

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

/* One event for each partition; who does not read them has its queue's bound, and is not
 * waited for. */
static void tell_all_draining(struct broker *b, const struct broker_device *d, bool is_over)
{
        for (size_t i = 0; i < b->n_session_slots; i++) {
                struct session *s = b->sessions[i];

                if (!s || !s->takes_drains || (s->state != SESSION_LIVE && s->state != SESSION_RETURNING))
                        continue;
                for (size_t k = 0; k < s->n_shares; k++)
                        if (s->shares[k].quota->partition->device == d->device)
                                tell_draining(s, (uint32_t)k, is_over);
        }
}

void order_tell_drains(struct session *s)
{
        for (size_t k = 0; s->takes_drains && k < s->n_shares; k++)
                if (s->shares[k].quota->partition->is_draining)
                        tell_draining(s, (uint32_t)k, false);
}

static void drain_ask(struct broker *b, struct broker_device *d)
{
        if (!d->order) {
                d->order = calloc(1, sizeof(*d->order));
                if (!d->order)
                        return; /* later */
                d->order->broker = b;
                d->order->device = d;
                d->order->want_bytes = UINT64_MAX;
        }
        d->order->n_looks = ORDER_LOOKS;
        order_go_on(d->order);
}

void order_tick(struct broker *b, uint64_t now_ms)
{
        for (size_t i = 0; b->n_drains > 0 && i < b->n_devices; i++) {
                struct broker_device *d = &b->devices[i];

                if (d->order || (drain_is_waiting(d) && now_ms - d->asked_ms >= ORDER_AGAIN_MS))
                        drain_ask(b, d);
        }
}

/* The device of the request, or NULL: it was refused. */
static struct broker_device *order_device(struct session *s, uint64_t id, const char *name)
{
        struct broker *b = s->broker;
        struct broker_device *d;
        char sentence[512];
        size_t n;

        if (!s->admin) {
                session_refuse(s, id, -EACCES,
                               "drain and resume are only for operators: use the admin socket");
                return NULL;
        }
        d = drain_find(b, name);
        if (d)
                return d;
        n = (size_t)snprintf(sentence, sizeof(sentence),
                             "there is no device '%.63s'; the devices are:", name);
        for (size_t i = 0; i < b->n_devices && n < sizeof(sentence); i++)
                n += (size_t)snprintf(sentence + n, sizeof(sentence) - n, " '%s'", b->devices[i].config->id);
        session_refuse(s, id, -ENOENT, sentence);
        return NULL;
}

static void refuse_device(struct session *s, uint64_t id, const struct broker_device *d, int error,
                          const char *why)
{
        char sentence[640];

        snprintf(sentence, sizeof(sentence), "device '%s' %s", d->config->id, why);
        session_refuse(s, id, error, sentence);
}

int handle_drain(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        struct broker_device *d = order_device(s, r->id, r->drain->device);
        bool was_draining;
        int result;

        (void)ret_why;
        if (!d)
                return 0;
        was_draining = strcmp(drain_state(d), "draining") == 0 || strcmp(drain_state(d), "drained") == 0;
        result = drain_begin(s->broker, d);
        if (result < 0) {
                refuse_device(s, r->id, d, result,
                              result == -EBUSY ? "is being resumed: drain it after that"
                                               : "cannot be drained: the daemon is out of memory");
                return 0;
        }
        log_notice("session %" PRIu64 " (uid %u, pid %d): drain of device '%s' requested%s", s->id,
                   (unsigned)s->who.uid, (int)s->who.pid, d->config->id,
                   was_draining ? "; it is already draining or drained" : "");
        session_done(s, r->id);
        if (!was_draining)
                tell_all_draining(s->broker, d, false);
        if (!was_draining && d->order) /* of a drain before */
                d->order->next = 0;
        if (drain_is_waiting(d))
                drain_ask(s->broker, d);
        return 0;
}

/* Whoever asked may be gone. */
static void drain_is_resumed(struct broker *b, struct broker_device *d, int result, const char *why)
{
        if (result == 0)
                tell_all_draining(b, d, true);
        for (size_t i = 0; i < b->n_session_slots; i++) {
                struct session *s = b->sessions[i];
                char sentence[512];

                if (!s || s->resumes != d)
                        continue;
                s->resumes = NULL;
                if (s->state != SESSION_LIVE)
                        continue;
                snprintf(sentence, sizeof(sentence), "could not be resumed: %s", why);
                if (result < 0)
                        refuse_device(s, s->resume_id, d, result, sentence);
                else
                        session_done(s, s->resume_id);
        }
}

int handle_resume(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        struct broker_device *d = order_device(s, r->id, r->resume->device);
        char sentence[160];
        int result;

        (void)ret_why;
        if (!d)
                return 0;
        if (s->resumes) {
                refuse_device(s, r->id, s->resumes, -EBUSY,
                              "is being resumed for this session: only one resume per session at a time");
                return 0;
        }
        s->resumes = d;
        s->resume_id = r->id;
        log_notice("session %" PRIu64 " (uid %u, pid %d): resume of device '%s' requested", s->id,
                   (unsigned)s->who.uid, (int)s->who.pid, d->config->id);
        result = drain_resume(s->broker, d, drain_is_resumed);
        if (result == 0)
                return 0;
        s->resumes = NULL;
        snprintf(sentence, sizeof(sentence), "is not drained: it is %s%s", drain_state(d),
                 d->is_lost ? "; drain it first" : "");
        refuse_device(s, r->id, d, result,
                      result == -EBUSY    ? "is already being resumed"
                      : result == -ENODEV ? "is lost and still in use, so it cannot be opened again: "
                                            "wait until it is drained"
                                          : sentence);
        return 0;
}
