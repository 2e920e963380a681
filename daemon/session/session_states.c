/* The transitions between a session's states, with their actions and time limits; see session_states.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/session_states.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "daemon/base/list.h"
#include "daemon/base/log.h"
#include "daemon/base/number.h"
#include "daemon/session/accounting.h"
#include "daemon/session/delivery.h"
#include "daemon/session/park.h"
#include "daemon/session/recall.h"
#include "daemon/session/reload.h"
#include "daemon/session/request_memory.h"
#include "daemon/session/session.h"
#include "daemon/session/share.h"
#include "daemon/session/shared.h"
#include "daemon/session/trim.h"

static void stop_serving(struct session *s, const char *why);
static void stop_resuming(struct session *s, const char *why);
static void end_resuming(struct session *s, const char *why);
static void forbid_resume(struct session *s, const char *why);
static void begin_closing(struct session *s, const char *why);
static void end_usage(struct session *s, const char *why);
static void leave_ledger(struct session *s, const char *why);
static void leave_behind(struct session *s, const char *why);

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

bool session_has_work(const struct session *s)
{
        return s->state == SESSION_RESUMING || s->state == SESSION_CLOSING ||
               (s->state == SESSION_LINGERING && !s->delivery.in_flight && !session_waits_for_exit(s));
}

bool session_waits_for_exit(const struct session *s)
{
        return s->is_watched && session_direct_bytes(s) > 0;
}

bool session_can_stay(const struct session *s)
{
        bool is_charged = s->state == SESSION_LINGERING && session_waits_for_exit(s);

        return s->role == ROLE_CLIENT && s->index != LEDGER_NONE && (!session_is_closing(s) || is_charged);
}

uint64_t session_deadline_ms(const struct session *s)
{
        return s->deadline_ms;
}

/* The exit of a watched process ends a suspended session. Without that it has the time of a quarantine. */
static enum session_limit limit_of(const struct session *s)
{
        if (s->state == SESSION_SUSPENDED && !s->is_watched)
                return LIMIT_QUARANTINE;
        return session_state_facts(s)->limit;
}

/* mappings_look() looks at it while it is in quarantine. */
static void mappings_begin(struct session *s)
{
        if (LIST_HAS(s, mappings.link) || s->index == LEDGER_NONE)
                return;
        s->mappings.export = LEDGER_NONE;
        LIST_ADD(&s->broker->sessions.mapped, s, mappings.link);
        broker_wake(s->broker);
}

static void mappings_end(struct session *s)
{
        LIST_DROP(&s->broker->sessions.mapped, s, mappings.link);
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
        if (session_state_facts(s)->is_quarantined)
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
        recall_end_session(s);
        recall_command_drop(s);
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
        free(s->resume.current);
        s->resume.current = NULL;
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
        if (s->goodbye.failure)
                why = s->goodbye.failure;
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

        if (s && role == ROLE_ADMIN)
                s->admin = calloc(1, sizeof(*s->admin));
        if (!s || (role == ROLE_ADMIN && !s->admin)) {
                free(s);
                credentials_clear(who);
                return -ENOMEM;
        }
        s->broker = b;
        s->ops = ops;
        s->userdata = userdata;
        s->role = role;
        s->who = *who;
        *who = (struct credentials){ .pid = who->pid, .uid = who->uid, .gid = who->gid };
        s->index = LEDGER_NONE;
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

/* A session with memory ends later, for example with its process. Its record has the failure that ended its connection.
 * Without memory for that text, the record has the later reason. */
static void keep_failure(struct session *s, const char *failure)
{
        if (failure && !s->goodbye.failure && session_is_live(s))
                s->goodbye.failure = strdup(failure);
}

int session_hang_up(struct session *s, const char *failure)
{
        bool is_empty = session_n_records(s) == 0;

        keep_failure(s, failure);
        session_transit(s, is_empty ? EVENT_DISCONNECTED_EMPTY : EVENT_DISCONNECTED,
                        exit_reason(s, failure ? failure : "connection closed"));
        return session_state_facts(s)->is_quarantined || session_waits_for_exit(s);
}

void session_exit(struct session *s)
{
        s->is_watched = false;
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
        if (session_state_facts(s)->expired)
                s->ops->abort(s->userdata, session_state_facts(s)->expired);
        else
                end_quarantine(s);
}

void session_close(struct session *s, const char *why)
{
        session_transit(s, EVENT_CLOSED, why);
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
        if (s->goodbye.id != 0)
                session_done(s, s->goodbye.id);
        s->goodbye.id = 0;
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
        free(s->goodbye.failure);
        free(s->admin);
        free(s);
        return NULL;
}

bool session_may_be_evicted(const struct session *s)
{
        return s->role == ROLE_CLIENT && (session_is_connected(s) || session_is_suspended(s));
}

/* The client is told once, on its connection; a client that resumes the session is told by resume.c. A resume that is
 * in progress ends: else a client could postpone the eviction by resuming again and again. */
int session_evict(struct session *s, const char *reason, const char *ended)
{
        char *sentence;

        if (asprintf(&sentence, "session %" PRIu64 " was evicted%s", s->id, reason) < 0)
                return -ENOMEM;
        free(s->eviction);
        s->eviction = sentence;
        session_refuse(s, 0, -EIDRM, sentence);
        session_forbid_resume(s);
        s->ops->abort(s->userdata, ended);
        return 0;
}

/* ---- the mappings of disconnected clients ------------------------------------ */

/* A process that executes another program loses its mappings and keeps its pid. So the daemon checks
 * periodically whether extents of a session in quarantine are still referenced. The session is closed
 * when each of its extents was seen without another reference. This is possible only for host memory, not
 * for memory on a GPU. */

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
static bool look_at_mappings(struct session *s, size_t n_max, size_t *ret_n)
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
                if (look_at_mappings(s, min_u64(n_left, MAPPINGS_LOOKS_OF_ONE), &n))
                        session_close(s, "process has unmapped all its memory");
                n_left -= n > 0 ? n : 1;
        }
}

bool mappings_are_watched(const struct broker *b)
{
        return !TAILQ_EMPTY(&b->sessions.mapped);
}
