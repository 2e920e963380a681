/* What each state of a session allows, and small parts of a session that many files use; see session.h. The transitions are in
 * session_states.c.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/session.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/number.h"

/* ---- the states ----------------------------------------------------------- */

static const struct session_state_facts states[SESSION_STATE_COUNT] = {
        [SESSION_NEW] = { "new", LIMIT_HELLO, .may_read = true, .only = BFCD__REQUEST__BODY_HELLO,
                          .fault = "the first request of the client was not a hello",
                          .expired = "timeout: the client did not send a hello within 10 s" },
        [SESSION_LIVE] = { "live", LIMIT_NONE, .may_read = true, .is_connected = true },
        [SESSION_QUARANTINED] = { "quarantined", LIMIT_QUARANTINE, .is_quarantined = true },
        [SESSION_SUSPENDED] = { "suspended", LIMIT_NONE, .is_quarantined = true }, /* but see limit_of() */
        [SESSION_LISTING] = { "resuming", LIMIT_LIST, .may_read = true, .is_connected = true,
                              .only = BFCD__REQUEST__BODY_HELD,
                              .fault = "the resumed client sent a request before the list of its memory",
                              .expired = "timeout: the resumed client did not list its memory within 10 s" },
        [SESSION_RESUMING] = { "resuming", LIMIT_LIST, .is_connected = true, .only = BFCD__REQUEST__BODY_HELD,
                               .fault = "the resumed client sent a request before the list of its memory",
                               .expired = "timeout: the resumed client did not list its memory within 10 s" },
        [SESSION_CLOSING] = { "closing", LIMIT_NONE, .is_closing = true },
        [SESSION_LINGERING] = { "closing", LIMIT_NONE, .is_closing = true },
        [SESSION_ENDED] = { "closing", LIMIT_NONE, .is_closing = true },
};

const struct session_state_facts *session_state_facts(const struct session *s)
{
        return &states[s->state];
}

bool session_is_greeted(const struct session *s)
{
        return s->state != SESSION_NEW;
}

bool session_is_live(const struct session *s)
{
        return s->state == SESSION_LIVE;
}

bool session_is_connected(const struct session *s)
{
        return states[s->state].is_connected;
}

bool session_is_suspended(const struct session *s)
{
        return s->state == SESSION_SUSPENDED;
}

bool session_is_closing(const struct session *s)
{
        return states[s->state].is_closing;
}

bool session_has_events(const struct session *s)
{
        return s->index != LEDGER_NONE && ledger_session_at(s->broker->ledger, s->index)->has_events;
}

bool session_may_read(const struct session *s)
{
        return states[s->state].may_read;
}

bool session_may_deliver(const struct session *s)
{
        return s->delivery.is_due;
}

bool session_has_fds_in_flight(const struct session *s)
{
        return s->delivery.in_flight;
}

const char *session_state_name(const struct session *s)
{
        return states[s->state].name;
}

const char *session_label(const struct session *s, struct session_label *ret)
{
        const char *role = s->role == ROLE_MONITOR     ? "monitor"
                           : s->role == ROLE_SCHEDULER ? "scheduler"
                                                       : "operator";
        char *end = ret->text + sizeof(ret->text),
             *at = ret->text + snprintf(ret->text, sizeof(ret->text), "session %" PRIu64 " (", s->id);

        if (s->id == 0)
                snprintf(at, (size_t)(end - at), "no hello yet; uid %u, pid %d)", (unsigned)s->who.uid,
                         (int)s->who.pid);
        else
                snprintf(at, (size_t)(end - at), "%s%s%s, uid %u, pid %d, %s)", s->tenant ? "tenant '" : "",
                         s->tenant ? s->tenant->name : role, s->tenant ? "'" : "", (unsigned)s->who.uid,
                         (int)s->who.pid, s->name);
        return ret->text;
}

const char *session_request_fault(const struct session *s, const Bfcd__Request *request)
{
        Bfcd__Request__BodyCase only = states[s->state].only;

        assert(session_is_live(s) || only != 0);
        return only != 0 && request->body_case != only ? states[s->state].fault : NULL;
}

size_t session_n_records(const struct session *s)
{
        const struct ledger_session *record;

        if (s->index == LEDGER_NONE)
                return 0;
        record = ledger_session_at(s->broker->ledger, s->index);
        return (size_t)record->links.n_blocks + record->links.n_refs + record->links.n_exports +
               s->delivery.n;
}

void session_set_name(struct session *s, const char *name)
{
        size_t i;

        for (i = 0; i < sizeof(s->name) - 1 && name[i]; i++)
                s->name[i] = name[i] < ' ' || name[i] > '~' ? '?' : name[i];
        s->name[i] = '\0';
}

void session_enlist(struct session *s)
{
        struct broker *b = s->broker;

        s->id = ledger_session_at(b->ledger, s->index)->id;
        b->sessions.table[s->index] = s;
        if (s->index >= b->sessions.n_slots)
                b->sessions.n_slots = (size_t)s->index + 1;
        b->sessions.n++;
        if (s->tenant)
                broker_session_begins(b, s->tenant);
}

/* ---- replies -------------------------------------------------------------- */

void session_send(struct session *s, const Bfcd__Reply *reply)
{
        s->ops->send(s->userdata, reply, NULL, 0);
}

void session_refuse_final(struct session *s, uint64_t id, int error, const char *sentence, bool is_final)
{
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        Bfcd__Refusal refusal = BFCD__REFUSAL__INIT;
        char copy[SESSION_SENTENCE_BYTES];

        /* protobuf-c's strings are not const. */
        snprintf(copy, sizeof(copy), "%s", sentence);
        refusal.error = (uint32_t)-error;
        refusal.message = copy;
        refusal.is_final = is_final;
        reply.id = id;
        reply.body_case = BFCD__REPLY__BODY_REFUSAL;
        reply.refusal = &refusal;
        session_send(s, &reply);
}

void session_refuse(struct session *s, uint64_t id, int error, const char *sentence)
{
        session_refuse_final(s, id, error, sentence, false);
}

void session_refuse_format(struct session *s, uint64_t id, int error, const char *format, ...)
{
        char sentence[SESSION_SENTENCE_BYTES];
        va_list args;

        va_start(args, format);
        vsnprintf(sentence, sizeof(sentence), format, args);
        va_end(args);
        session_refuse(s, id, error, sentence);
}

void session_done(struct session *s, uint64_t id)
{
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        Bfcd__Done done = BFCD__DONE__INIT;

        reply.id = id;
        reply.body_case = BFCD__REPLY__BODY_DONE;
        reply.done = &done;
        session_send(s, &reply);
}

/* ---- statistics of the client's cache ------------------------------------- */

void session_client_usage(const struct session *s, struct client_usage *ret, uint64_t *ret_bytes_outside)
{
        uint64_t max = session_bytes_in_use(s); /* of each sum, so that none overflows */
        struct client_usage sum = { 0 };
        struct client_word word;

        *ret_bytes_outside = 0;
        if (client_page_read(s->page, &word) == 0) {
                *ret_bytes_outside = word.bytes_outside;
                for (size_t i = 0; i <= PAGES_MAX_PARTITIONS; i++) {
                        const struct client_usage *each = &word.partitions[i];

                        sum.bytes_held += min_u64(each->bytes_held, max - sum.bytes_held);
                        sum.bytes_in_use += min_u64(each->bytes_in_use, max - sum.bytes_in_use);
                        sum.bytes_idle += min_u64(each->bytes_idle, max - sum.bytes_idle);
                }
        }
        *ret = sum;
}

struct session_hint session_read_hint(const struct session *s, uint32_t partition)
{
        uint64_t used = s->shares[partition].usage.bytes;
        struct session_hint hint = { .idle_bytes = used };
        struct client_word word;

        if (client_page_read(s->page, &word) < 0)
                return hint;
        /* What it has in further partitions may be in this one. */
        hint.idle_bytes = min_u64(word.partitions[min_u64(partition, PAGES_MAX_PARTITIONS)].bytes_idle, used);
        if (partition >= PAGES_MAX_PARTITIONS)
                return hint;
        hint.park = word.idle[partition];
        hint.park.bytes = min_u64(hint.park.bytes, used);
        hint.has_fn = word.has_pressure_fn;
        return hint;
}

struct session_share *session_share_of(const struct session *s, uint32_t quota)
{
        for (size_t i = 0; i < s->n_shares; i++)
                if (s->shares[i].quota->index == quota)
                        return &s->shares[i];
        return NULL;
}

int session_find_share(const struct session *s, const char *partition, size_t *ret)
{
        for (size_t i = 0; i < s->n_shares; i++) {
                if (partition[0] == '\0' || strcmp(partition, s->shares[i].quota->partition->name) == 0) {
                        *ret = i;
                        return 0;
                }
        }
        return -ENOENT;
}

int session_reserve_seen(struct session_share *share)
{
        size_t n = arena_n_slots(share->quota->arena);
        uint64_t *seen;

        if (n <= share->n_seen)
                return 0;
        seen = realloc(share->seen, n * sizeof(*seen));
        if (!seen)
                return -ENOMEM;
        memset(seen + share->n_seen, 0, (n - share->n_seen) * sizeof(*seen));
        share->seen = seen;
        share->n_seen = n;
        return 0;
}

bool session_is_unresponsive(const struct session *s)
{
        for (size_t i = 0; i < RECALL_KINDS; i++) {
                const struct recall *first = TAILQ_FIRST(&s->recall.queues[i].open);

                if (first && !first->has_deadline)
                        return true;
        }
        return false;
}

uint64_t session_lease_number(const struct session *s)
{
        for (size_t i = 0; i < s->n_shares; i++)
                if (quota_parent(s->shares[i].quota))
                        return ledger_quota_at(s->broker->ledger, s->shares[i].quota->index)->id;
        return 0;
}

uint64_t session_bytes_in_use(const struct session *s)
{
        uint64_t n_bytes = 0;

        for (size_t i = 0; i < s->n_shares; i++)
                n_bytes += s->shares[i].usage.bytes;
        return n_bytes;
}

uint64_t session_direct_bytes(const struct session *s)
{
        uint64_t n_bytes = 0;

        for (size_t i = 0; i < s->n_shares; i++)
                n_bytes += s->shares[i].usage.direct.n_bytes;
        return n_bytes;
}

uint64_t session_context_bytes(const struct session *s)
{
        uint64_t n_bytes = 0;

        for (size_t i = 0; i < s->n_shares; i++)
                n_bytes += s->shares[i].usage.bytes_contexts;
        return n_bytes;
}

bool session_refuse_client(struct session *s, uint64_t id, const char *what)
{
        char sentence[96];

        if (s->role != ROLE_CLIENT)
                return false;
        snprintf(sentence, sizeof(sentence), "%s only for operators: use the admin socket", what);
        session_refuse(s, id, -EACCES, sentence);
        return true;
}

/* ---- events that tell clients what changed ---------------------------------- */

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
