/* The session's states, time limits and transitions; see session.h.
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

#include "daemon/session/command.h"
#include "daemon/session/park_now.h"
#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/base/number.h"
#include "daemon/session/accounting.h"
#include "daemon/session/direct.h"

static void stop_serving(struct session *s, const char *why);
static void stop_resuming(struct session *s, const char *why);
static void end_resuming(struct session *s, const char *why);
static void forbid_resume(struct session *s, const char *why);
static void begin_closing(struct session *s, const char *why);
static void end_usage(struct session *s, const char *why);
static void leave_ledger(struct session *s, const char *why);
static void leave_behind(struct session *s, const char *why);

/* ---- the states ----------------------------------------------------------- */

enum session_limit { LIMIT_NONE, LIMIT_HELLO, LIMIT_LIST, LIMIT_QUARANTINE };

static const struct {
        const char *name; /* in lists */
        enum session_limit limit;
        bool may_read;
        bool is_connected;   /* has a client that was greeted */
        bool is_quarantined; /* counts in tenant.n_quarantined */
        bool is_closing;
        Bfcd__Request__BodyCase only; /* the only request that is allowed; 0: all */
        const char *fault;            /* of any other request */
        const char *expired; /* why the client is disconnected at the deadline; NULL: it already is */
} states[SESSION_STATE_COUNT] = {
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

/* next SESSION_NEW: the event changes nothing. */
static const struct session_transition {
        enum session_state next;
        void (*action)(struct session *s, const char *why);
} transitions[SESSION_STATE_COUNT][EVENT_COUNT] = {
        [SESSION_NEW][EVENT_ADMITTED] = { SESSION_LIVE, NULL },
        [SESSION_NEW][EVENT_RESTORED] = { SESSION_QUARANTINED, NULL },
        [SESSION_NEW][EVENT_RESTORED_RESUMABLE] = { SESSION_SUSPENDED, NULL },
        [SESSION_NEW][EVENT_DISCONNECTED_EMPTY] = { SESSION_CLOSING, begin_closing },
        [SESSION_NEW][EVENT_CLOSED] = { SESSION_CLOSING, begin_closing },
        [SESSION_NEW][EVENT_LEFT] = { SESSION_ENDED, leave_behind },

        [SESSION_LIVE][EVENT_DISCONNECTED] = { SESSION_QUARANTINED, stop_serving },
        [SESSION_LIVE][EVENT_DISCONNECTED_EMPTY] = { SESSION_CLOSING, begin_closing },
        [SESSION_LIVE][EVENT_CLOSED] = { SESSION_CLOSING, begin_closing },
        [SESSION_LIVE][EVENT_RESUME_FORBIDDEN] = { SESSION_LIVE, forbid_resume },
        [SESSION_LIVE][EVENT_LEFT] = { SESSION_ENDED, leave_behind },

        [SESSION_QUARANTINED][EVENT_CLOSED] = { SESSION_CLOSING, begin_closing },
        [SESSION_QUARANTINED][EVENT_LEFT] = { SESSION_ENDED, leave_behind },

        [SESSION_SUSPENDED][EVENT_RESUMED] = { SESSION_LISTING, NULL },
        [SESSION_SUSPENDED][EVENT_RESUME_FORBIDDEN] = { SESSION_QUARANTINED, forbid_resume },
        [SESSION_SUSPENDED][EVENT_CLOSED] = { SESSION_CLOSING, begin_closing },
        [SESSION_SUSPENDED][EVENT_LEFT] = { SESSION_ENDED, leave_behind },

        [SESSION_LISTING][EVENT_LISTED] = { SESSION_RESUMING, NULL },
        [SESSION_LISTING][EVENT_DISCONNECTED] = { SESSION_SUSPENDED, stop_resuming },
        [SESSION_LISTING][EVENT_DISCONNECTED_EMPTY] = { SESSION_SUSPENDED, stop_resuming },
        [SESSION_LISTING][EVENT_RESUME_FORBIDDEN] = { SESSION_QUARANTINED, end_resuming },
        [SESSION_LISTING][EVENT_CLOSED] = { SESSION_CLOSING, begin_closing },
        [SESSION_LISTING][EVENT_LEFT] = { SESSION_ENDED, leave_behind },

        [SESSION_RESUMING][EVENT_RECONCILED] = { SESSION_LIVE, NULL },
        [SESSION_RESUMING][EVENT_DISCONNECTED] = { SESSION_SUSPENDED, stop_resuming },
        [SESSION_RESUMING][EVENT_DISCONNECTED_EMPTY] = { SESSION_SUSPENDED, stop_resuming },
        [SESSION_RESUMING][EVENT_RESUME_FORBIDDEN] = { SESSION_QUARANTINED, end_resuming },
        [SESSION_RESUMING][EVENT_CLOSED] = { SESSION_CLOSING, begin_closing },
        [SESSION_RESUMING][EVENT_LEFT] = { SESSION_ENDED, leave_behind },

        [SESSION_CLOSING][EVENT_REAPED] = { SESSION_LINGERING, end_usage },
        [SESSION_CLOSING][EVENT_LEFT] = { SESSION_ENDED, leave_behind },

        [SESSION_LINGERING][EVENT_REMOVED] = { SESSION_ENDED, leave_ledger },
        [SESSION_LINGERING][EVENT_LEFT] = { SESSION_ENDED, leave_behind },
};

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

bool session_may_read(const struct session *s)
{
        return states[s->state].may_read;
}

bool session_may_deliver(const struct session *s)
{
        return s->delivery.is_due;
}

bool session_has_work(const struct session *s)
{
        return s->state == SESSION_RESUMING || s->state == SESSION_CLOSING ||
               (s->state == SESSION_LINGERING && !s->delivery.in_flight && !session_waits_for_exit(s));
}

bool session_waits_for_exit(const struct session *s)
{
        return s->is_watched && !s->goodbye.has_exited && direct_bytes(s) > 0;
}

bool session_has_fds_in_flight(const struct session *s)
{
        return s->delivery.in_flight;
}

bool session_can_stay(const struct session *s)
{
        bool is_charged = s->state == SESSION_LINGERING && session_waits_for_exit(s);

        return !s->admin && s->index != LEDGER_NONE && (!session_is_closing(s) || is_charged);
}

uint64_t session_deadline_ms(const struct session *s)
{
        return s->deadline_ms;
}

const char *session_state_name(const struct session *s)
{
        return states[s->state].name;
}

const char *session_label(const struct session *s, struct session_label *ret)
{
        const char *role = s->is_monitor ? "monitor" : "operator";
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

/* ---- transitions ---------------------------------------------------------- */

/* The exit of a watched process ends a suspended session. Without that it has the time of a quarantine. */
static enum session_limit limit_of(const struct session *s)
{
        if (s->state == SESSION_SUSPENDED && !s->is_watched)
                return LIMIT_QUARANTINE;
        return states[s->state].limit;
}

static void start_limit(struct session *s)
{
        enum session_limit limit = limit_of(s);
        uint64_t ms = limit == LIMIT_QUARANTINE ? s->broker->config->quarantine_timeout_ms
                                                : SESSION_HELLO_TIMEOUT_MS;

        s->deadline_ms = limit == LIMIT_NONE ? 0 : clock_ms() + ms;
        if (limit == LIMIT_QUARANTINE)
                mappings_begin(s);
        else
                mappings_end(s);
}

static void count_state(struct session *s, size_t n)
{
        if (states[s->state].is_quarantined)
                s->tenant->n_quarantined += n;
        if (s->state == SESSION_SUSPENDED)
                s->broker->suspended.n += n;
}

static void tell_connection(struct session *s)
{
        if (s->ops->changed)
                s->ops->changed(s->userdata);
}

void session_transit(struct session *s, enum session_event event, const char *why)
{
        const struct session_transition *t = &transitions[s->state][event];
        enum session_limit limit = limit_of(s);

        if (t->next == SESSION_NEW)
                return;
        count_state(s, (size_t)-1);
        s->state = t->next;
        count_state(s, 1);
        if (t->action)
                t->action(s, why);
        if (limit_of(s) != limit) /* the same limit continues */
                start_limit(s);
        tell_connection(s);
}

/* Not even by a successor. */
static void forbid_resume(struct session *s, const char *why)
{
        (void)why;
        if (s->index != LEDGER_NONE)
                ledger_session_at(s->broker->ledger, s->index)->can_resume = false;
}

/* Requests that wait get no answer. session_reap() drops deliveries, in slices. Retirements end last: the end
 * of a Trim may end an admin command, which releases extents. */
static void drop_pending(struct session *s)
{
        s->delivery.is_due = false;
        shared_drop_waits(s);
        reload_end_session(s);
        trim_end(s);
        pressure_end(s);
        command_drop(s);
        park_now_drop(s);
        request_drop_all(s);
        park_drop_all(s);
        retire_end(s);
}

static void stop_serving(struct session *s, const char *why)
{
        forbid_resume(s, why);
        retire_silence(s);
        drop_pending(s);
}

static void stop_resuming(struct session *s, const char *why)
{
        (void)why;
        resume_stop(s);
        s->page = client_page_free(s->page);
}

static void end_resuming(struct session *s, const char *why)
{
        stop_resuming(s, why);
        forbid_resume(s, why);
}

/* A successor quarantines what is left, and does not wait for the client. */
static void begin_closing(struct session *s, const char *why)
{
        forbid_resume(s, why);
        drop_pending(s);
        if (s->resume.current)
                stop_resuming(s, why);
        if (!s->tenant)
                return;
        accounting_end(s, s->eviction ? s->eviction : why);
        for (size_t i = 0; i < s->n_shares; i++)
                if (s->shares[i].joined)
                        quota_closing(s->shares[i].quota);
}

static void end_usage(struct session *s, const char *why)
{
        (void)why;
        session_forget_peaks(s);
}

static void leave_broker(struct session *s)
{
        struct broker *b = s->broker;

        if (s->tenant) {
                broker_session_ends(b, s->tenant);
                session_leave_shares(s);
        }
        s->page = client_page_free(s->page);
        b->sessions.table[s->index] = NULL;
        b->sessions.n--;
}

static void leave_ledger(struct session *s, const char *why)
{
        (void)why;
        direct_end(s);
        leave_broker(s);
        ledger_session_clear(s->broker->ledger, s->index);
        s->index = LEDGER_NONE;
}

static void leave_behind(struct session *s, const char *why)
{
        drop_pending(s);
        session_drop_deliveries(s, SIZE_MAX);
        if (s->resume.current)
                stop_resuming(s, why);
        for (size_t i = 0; i < s->n_shares; i++) { /* the ledger has them */
                s->shares[i].usage.n_blocks = 0;
                s->shares[i].usage.bytes = 0;
        }
        direct_leave(s);
        leave_broker(s);
        s->index = LEDGER_NONE;
}

/* ---- entry points --------------------------------------------------------- */

int session_new(struct broker *b, enum role role, struct credentials *who, const struct session_ops *ops,
                void *userdata, struct session **ret)
{
        struct session *s = calloc(1, sizeof(*s));

        if (!s) {
                credentials_clear(who);
                return -ENOMEM;
        }
        s->broker = b;
        s->ops = ops;
        s->userdata = userdata;
        s->admin = role != ROLE_CLIENT;
        s->is_monitor = role == ROLE_MONITOR;
        s->who = *who;
        *who = (struct credentials){ .pid = who->pid, .uid = who->uid, .gid = who->gid };
        s->index = LEDGER_NONE;
        s->born_ms = clock_ms();
        request_init(&s->requests);
        delivery_init(&s->delivery);
        shared_init(&s->shared);
        recall_init(&s->recall);
        start_limit(s);
        *ret = s;
        return 0;
}

void session_set_watched(struct session *s, bool is_watched)
{
        s->is_watched = is_watched;
}

void session_attach(struct session *s, const struct session_ops *ops, void *userdata, bool has_exited)
{
        s->ops = ops;
        s->userdata = userdata;
        start_limit(s);
        s->goodbye.has_exited = has_exited;
        if (has_exited)
                session_close(s, "process exited while no daemon was running");
        else if (s->state == SESSION_QUARANTINED && session_n_records(s) == 0)
                session_close(s, "ended with the previous daemon");
        else
                tell_connection(s);
}

static const char *exit_reason(const struct session *s, const char *otherwise)
{
        return s->goodbye.exits ? "goodbye at exit" : otherwise;
}

int session_hang_up(struct session *s)
{
        bool is_empty = session_n_records(s) == 0;

        session_transit(s, is_empty ? EVENT_DISCONNECTED_EMPTY : EVENT_DISCONNECTED,
                        exit_reason(s, "connection closed"));
        return states[s->state].is_quarantined || session_waits_for_exit(s);
}

void session_exit(struct session *s)
{
        s->goodbye.has_exited = true;
        if (s->state == SESSION_LINGERING)
                tell_connection(s);
        session_close(s, exit_reason(s, "process exited"));
}

static bool session_has_exports(const struct session *s)
{
        return s->index != LEDGER_NONE && ledger_session_at(s->broker->ledger, s->index)->links.n_exports > 0;
}

static void end_quarantine(struct session *s)
{
        struct log_limit *log = &s->tenant->quarantine_log;

        /* The process may use its mappings: other sessions of the tenant must not get the blocks. */
        if (s->is_watched && session_has_exports(s)) {
                log_limited(log, LOG_LEVEL_WARNING,
                            "session %" PRIu64 ": pid %d still runs at the end of the quarantine after it "
                            "disconnected; its memory stays charged to tenant '%s' until the process "
                            "exits, because it can still use that memory",
                            s->id, (int)s->who.pid, s->tenant->name);
                return;
        }
        log_limited(log, LOG_LEVEL_WARNING,
                    "session %" PRIu64 ": pid %d still runs at the end of the quarantine after it "
                    "disconnected; its memory is released",
                    s->id, (int)s->who.pid);
        session_close(s, "quarantine ended");
}

void session_expire(struct session *s)
{
        if (s->deadline_ms == 0)
                return;
        s->deadline_ms = 0;
        if (states[s->state].expired)
                s->ops->abort(s->userdata, states[s->state].expired);
        else
                end_quarantine(s);
}

void session_close(struct session *s, const char *why)
{
        session_transit(s, EVENT_CLOSED, why);
}

int session_work(struct session *s, size_t n_blocks, const char **ret_why)
{
        int r;

        if (s->state == SESSION_RESUMING)
                return resume_step(s, n_blocks, ret_why);
        if (!session_is_closing(s))
                return 0;
        r = session_reap(s, n_blocks);
        return r == 0 ? SESSION_DONE : r;
}

static void reap_records(struct session *s, const struct ledger_session *record, size_t n)
{
        n = session_drop_deliveries(s, n); /* they name the blocks */
        for (; n > 0 && record->links.first_block != LEDGER_NONE; n--)
                session_free_block(s, record->links.first_block);
        for (; n > 0 && record->links.first_ref != LEDGER_NONE; n--)
                shared_reap(s);
        for (; n > 0 && record->links.first_export != LEDGER_NONE; n--)
                retire_clear_export(s, record->links.first_export);
}

int session_reap(struct session *s, size_t n_blocks)
{
        assert(session_is_closing(s));
        if (s->index == LEDGER_NONE)
                return 0;
        reap_records(s, ledger_session_at(s->broker->ledger, s->index), n_blocks);
        if (session_n_records(s) > 0)
                return SESSION_MORE;
        session_transit(s, EVENT_REAPED, NULL);
        if (!s->delivery.in_flight && !session_waits_for_exit(s))
                session_transit(s, EVENT_REMOVED, NULL);
        if (s->goodbye.is_due)
                session_done(s, s->goodbye.id);
        s->goodbye.is_due = false;
        return s->state == SESSION_LINGERING ? SESSION_LINGERS : 0;
}

void session_end_linger(struct session *s)
{
        s->delivery.in_flight = false;
        tell_connection(s);
}

void session_leave_behind(struct session *s)
{
        session_transit(s, EVENT_LEFT, NULL);
}

void session_forbid_resume(struct session *s)
{
        session_transit(s, EVENT_RESUME_FORBIDDEN, NULL);
}

struct session *session_free(struct session *s)
{
        if (!s)
                return NULL;
        assert(s->index == LEDGER_NONE);
        assert(TAILQ_EMPTY(&s->requests.list) && TAILQ_EMPTY(&s->delivery.list));
        park_leave_all(s);
        refs_clear(&s->shared.refs);
        credentials_clear(&s->who);
        free(s->eviction);
        free(s);
        return NULL;
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
        uint64_t max = s->stats.bytes_in_use; /* of each sum, so that none overflows */
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

uint64_t session_idle_hint(const struct session *s, uint32_t partition)
{
        uint64_t used = s->shares[partition].usage.bytes;
        struct client_word word;

        if (used == 0 || client_page_read(s->page, &word) < 0)
                return used;
        /* What it has in further partitions may be in this one. */
        return min_u64(word.partitions[min_u64(partition, PAGES_MAX_PARTITIONS)].bytes_idle, used);
}

struct session_pressure_hint session_pressure_hint(const struct session *s, uint32_t partition)
{
        struct client_word word;

        if (partition >= PAGES_MAX_PARTITIONS || client_page_read(s->page, &word) < 0)
                return (struct session_pressure_hint){ .has_fn = false };
        return (struct session_pressure_hint){ word.idle[partition], word.has_pressure_fn };
}
