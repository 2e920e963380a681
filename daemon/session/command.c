/* Admin commands; see command.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/command.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "daemon/memory/drain.h"
#include "daemon/session/explain.h"
#include "daemon/base/log.h"
#include "daemon/base/number.h"
#include "daemon/session/session.h"
#include "daemon/session/trim.h"

struct trim_command {
        struct broker *broker;
        struct session *admin;        /* NULL: a drain's */
        struct broker_device *device; /* that is drained; NULL: an admin's */
        size_t n_looks;               /* a drain's: at sessions, that are left in this tick */
        uint64_t id;                  /* of the request */
        char tenant[LEDGER_NAME_BYTES];
        char partition[LEDGER_NAME_BYTES];
        uint64_t want_bytes;
        uint64_t freed_bytes;
        uint64_t before_bytes; /* reserved, when it began */
        uint64_t n_asked;
        size_t n_open;
        uint32_t next;     /* session's slot */
        size_t next_share; /* of that session */
        bool is_asking;    /* inside command_go_on() */
};

static bool name_matches(const char *wanted, const char *name)
{
        return wanted[0] == '\0' || strcmp(wanted, name) == 0;
}

static bool command_matches(const struct trim_command *c, const struct quota *q)
{
        if (c->device)
                return q->partition->device == c->device->device;
        return name_matches(c->tenant, q->tenant) && name_matches(c->partition, q->partition->name);
}

/* Returns how many quotas it is about. */
static size_t command_count_quotas(const struct trim_command *c, uint64_t *ret_reserved_bytes)
{
        const struct broker *b = c->broker;
        size_t n = 0;

        *ret_reserved_bytes = 0;
        for (size_t i = 0; i < b->n_tenants; i++) {
                for (size_t k = 0; k < b->tenants[i].n_quotas; k++) {
                        if (!command_matches(c, b->tenants[i].quotas[k]))
                                continue;
                        *ret_reserved_bytes += b->tenants[i].quotas[k]->account.own_bytes;
                        n++;
                }
        }
        return n;
}

static void command_release_idle(const struct trim_command *c)
{
        const struct broker *b = c->broker;

        for (size_t i = 0; i < b->n_tenants; i++)
                for (size_t k = 0; k < b->tenants[i].n_quotas; k++)
                        if (command_matches(c, b->tenants[i].quotas[k]))
                                quota_release_idle(b->tenants[i].quotas[k]);
}

static void finish_drain(struct trim_command *c)
{
        if (drain_is_waiting(c->device))
                command_release_idle(c);
        c->device->command = NULL;
        c->device->asked_ms = clock_ms();
        free(c);
}

static void finish_trim(struct trim_command *c)
{
        struct session *s = c->admin;
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        Bfcd__TrimReply trim = BFCD__TRIM_REPLY__INIT;

        command_release_idle(c);
        log_info("%s: trim: %" PRIu64 " session%s asked, %s in blocks freed", SESSION_LABEL(s), c->n_asked,
                 c->n_asked == 1 ? "" : "s", NUMBER_SIZE(c->freed_bytes));
        trim.n_asked = c->n_asked;
        trim.n_bytes = c->freed_bytes;
        trim.bytes_reserved_before = c->before_bytes;
        reply.id = c->id;
        reply.body_case = BFCD__REPLY__BODY_TRIM;
        reply.trim = &trim;
        s->command.trim = NULL;
        free(c);
        session_send(s, &reply);
}

static bool command_has_looked(const struct trim_command *c)
{
        return c->next >= c->broker->sessions.n_slots;
}

/* Asks the next of its sessions in one quota. False: there is none, or a drain has no look left. */
static bool command_ask_next(struct trim_command *c, uint64_t now_ms)
{
        struct broker *b = c->broker;

        for (; !command_has_looked(c); c->next++, c->next_share = 0) {
                struct session *s = b->sessions.table[c->next];

                if (c->device && c->n_looks == 0)
                        return false;
                c->n_looks -= c->device != NULL;
                while (s && s->tenant && c->next_share < s->n_shares) {
                        struct session_share *share = &s->shares[c->next_share++];

                        if (!command_matches(c, share->quota) ||
                            !trim_send(&share->trim, c->want_bytes - c->freed_bytes, now_ms))
                                continue;
                        share->trim.command = c;
                        c->n_asked++;
                        c->n_open++;
                        return true;
                }
        }
        return false;
}

static void command_go_on(struct trim_command *c)
{
        uint64_t now_ms = clock_ms();

        if (c->is_asking)
                return;
        c->is_asking = true;
        if (c->device && !drain_is_waiting(c->device))
                c->next = (uint32_t)c->broker->sessions.n_slots;
        while (c->n_open < COMMAND_MAX_OPEN && c->freed_bytes < c->want_bytes && command_ask_next(c, now_ms))
                ;
        c->is_asking = false;
        if (c->n_open > 0)
                return;
        if (!c->device)
                finish_trim(c);
        else if (command_has_looked(c))
                finish_drain(c);
}

void command_heard(struct trim_command *c, uint64_t freed_bytes)
{
        c->n_open--;
        c->freed_bytes += freed_bytes;
        command_go_on(c);
}

void command_drop(struct session *s)
{
        struct recall *r;

        if (!s->command.trim)
                return;
        TAILQ_FOREACH(r, &s->broker->recalls.lists[RECALL_TRIM], of_broker)
        if (((struct trim_share *)r)->command == s->command.trim)
                ((struct trim_share *)r)->command = NULL;
        free(s->command.trim);
        s->command.trim = NULL;
}

bool command_refuse_client(struct session *s, uint64_t id, const char *what)
{
        char sentence[96];

        if (s->admin)
                return false;
        snprintf(sentence, sizeof(sentence), "%s only for operators: use the admin socket", what);
        session_refuse(s, id, -EACCES, sentence);
        return true;
}

int handle_trim_now(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        const Bfcd__TrimNow *m = r->trim_now;
        struct trim_command *c;

        (void)ret_why;
        if (command_refuse_client(s, r->id, "trim is"))
                return 0;
        if (s->command.trim) {
                session_refuse(s, r->id, -EBUSY,
                               "a trim of this session is still running: wait until it is done");
                return 0;
        }
        c = calloc(1, sizeof(*c));
        if (!c) {
                session_refuse(s, r->id, -ENOMEM, "the daemon is out of memory");
                return 0;
        }
        c->broker = s->broker;
        c->admin = s;
        c->id = r->id;
        c->want_bytes = m->n_bytes > 0 ? m->n_bytes : UINT64_MAX;
        /* A name that is too long matches nothing. */
        snprintf(c->tenant, sizeof(c->tenant), "%s", m->tenant);
        snprintf(c->partition, sizeof(c->partition), "%s", m->partition);
        if (command_count_quotas(c, &c->before_bytes) == 0) {
                char sentence[EXPLAIN_SENTENCE];

                explain_names(s, m->tenant, m->partition, sentence, sizeof(sentence));
                session_refuse(s, r->id, -ENOENT, sentence);
                free(c);
                return 0;
        }
        s->command.trim = c;
        command_go_on(c);
        return 0;
}

static struct session *find_session(const struct broker *b, uint64_t id)
{
        for (uint32_t i = 0; i < b->sessions.n_slots; i++)
                if (b->sessions.table[i] && b->sessions.table[i]->id == id)
                        return b->sessions.table[i];
        return NULL;
}

#define REASON_MAX 200u /* bytes */

/* Only printable ASCII reaches logs and terminals. */
static bool reason_is_printable(const char *reason)
{
        size_t n = 0;

        while (reason[n] >= ' ' && reason[n] <= '~')
                n++;
        return n <= REASON_MAX && reason[n] == '\0';
}

bool command_may_evict(const struct session *s)
{
        return !s->admin && (session_is_connected(s) || session_is_suspended(s));
}

/* The client is told once, on its connection; a client that resumes the session is told by resume.c. A resume that is
 * in progress ends: else a client could postpone the eviction by resuming again and again. */
int command_evict(struct session *s, const char *reason, const char *ended)
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

static void note_eviction(const struct session *s, const struct session *other, const char *reason)
{
        struct record r;

        record_init(&r, RECORD_EVICTION);
        if (other->tenant)
                record_add_text(&r, "tenant", other->tenant->name, CONFIG_NAME_MAX);
        record_add_number(&r, "session", other->id);
        record_add_number(&r, "uid", s->who.uid);
        record_add_number(&r, "pid", (uint64_t)s->who.pid);
        record_add_text(&r, "reason", reason, REASON_MAX);
        records_write(LOG_LEVEL_NOTICE, &r, "%s: evicted by %s%s%s", SESSION_LABEL(other), SESSION_LABEL(s),
                      *reason ? ": " : "", reason);
}

int handle_evict(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        struct session *other;
        char sentence[256];

        (void)ret_why;
        if (command_refuse_client(s, r->id, "evict is"))
                return 0;
        if (!reason_is_printable(r->evict->reason)) {
                session_refuse(s, r->id, -EINVAL,
                               "the reason is not valid: it has at most 200 bytes of printable ASCII");
                return 0;
        }
        other = find_session(s->broker, r->evict->session_id);
        if (!other || !command_may_evict(other)) {
                snprintf(sentence, sizeof(sentence), "session %" PRIu64 " cannot be evicted: %s%s",
                         r->evict->session_id, other ? "it is " : "",
                         !other         ? "there is no such session"
                         : other->admin ? "an operator's session"
                                        : session_state_name(other));
                session_refuse(s, r->id, -ENOENT, sentence);
                return 0;
        }
        note_eviction(s, other, r->evict->reason);
        snprintf(sentence, sizeof(sentence), " by an operator%s%s", *r->evict->reason ? ": " : "",
                 r->evict->reason);
        if (command_evict(other, sentence, "evicted by an operator") < 0)
                session_refuse(s, r->id, -ENOMEM, "the daemon is out of memory");
        else
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

/* One event for each partition. The event queue bounds a client that does not read; it is not waited for. */
static void tell_all_draining(struct broker *b, const struct broker_device *d, bool is_over)
{
        for (size_t i = 0; i < b->sessions.n_slots; i++) {
                struct session *s = b->sessions.table[i];

                if (!s || !s->has_events || !session_is_connected(s))
                        continue;
                for (size_t k = 0; k < s->n_shares; k++)
                        if (s->shares[k].quota->partition->device == d->device)
                                tell_draining(s, (uint32_t)k, is_over);
        }
}

void command_tell_drains(struct session *s)
{
        for (size_t k = 0; s->has_events && k < s->n_shares; k++)
                if (s->shares[k].quota->partition->is_draining)
                        tell_draining(s, (uint32_t)k, false);
}

static void drain_ask(struct broker *b, struct broker_device *d)
{
        if (!d->command) {
                d->command = calloc(1, sizeof(*d->command));
                if (!d->command)
                        return; /* later */
                d->command->broker = b;
                d->command->device = d;
                d->command->want_bytes = UINT64_MAX;
        }
        d->command->n_looks = COMMAND_LOOKS;
        command_go_on(d->command);
}

void command_tick(struct broker *b, uint64_t now_ms)
{
        for (size_t i = 0; i < b->n_devices; i++) {
                struct broker_device *d = &b->devices[i];

                if (d->command || (drain_is_waiting(d) && now_ms - d->asked_ms >= COMMAND_AGAIN_MS))
                        drain_ask(b, d);
        }
}

/* The device of the request, or NULL: it was refused. */
static struct broker_device *command_device(struct session *s, uint64_t id, const char *name)
{
        struct broker *b = s->broker;
        struct broker_device *d;
        char sentence[512];
        size_t n;

        if (command_refuse_client(s, id, "drain and resume are"))
                return NULL;
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

static void note_drain(const struct session *s, const struct broker_device *d, bool was_draining)
{
        struct record r;

        drain_record(d, "begun", &r);
        record_add_number(&r, "uid", s->who.uid);
        record_add_number(&r, "pid", (uint64_t)s->who.pid);
        if (was_draining)
                log_notice("%s: drain of device '%s' requested; it is already draining or drained",
                           SESSION_LABEL(s), d->config->id);
        else
                records_write(LOG_LEVEL_NOTICE, &r, "%s: drain of device '%s' requested", SESSION_LABEL(s),
                              d->config->id);
}

int handle_drain(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        struct broker_device *d = command_device(s, r->id, r->drain->device);
        bool was_draining;
        int result;

        (void)ret_why;
        if (!d)
                return 0;
        was_draining = drain_has_begun(d);
        result = drain_begin(s->broker, d);
        if (result < 0) {
                refuse_device(s, r->id, d, result,
                              result == -EBUSY ? "is being resumed: drain it after that"
                                               : "cannot be drained: the daemon is out of memory");
                return 0;
        }
        note_drain(s, d, was_draining);
        session_done(s, r->id);
        shared_review_kept(s->broker);
        if (!was_draining)
                tell_all_draining(s->broker, d, false);
        if (!was_draining && d->command) /* of a drain before */
                d->command->next = 0;
        if (drain_is_waiting(d))
                drain_ask(s->broker, d);
        return 0;
}

/* The session that asked may be gone. */
static void finish_resume(struct broker *b, struct broker_device *d, int result, const char *why)
{
        if (result == 0)
                tell_all_draining(b, d, true);
        for (size_t i = 0; i < b->sessions.n_slots; i++) {
                struct session *s = b->sessions.table[i];
                char sentence[512];

                if (!s || s->command.resumed != d)
                        continue;
                s->command.resumed = NULL;
                if (s->state != SESSION_LIVE)
                        continue;
                snprintf(sentence, sizeof(sentence), "could not be resumed: %s", why);
                if (result < 0)
                        refuse_device(s, s->command.resume_id, d, result, sentence);
                else
                        session_done(s, s->command.resume_id);
        }
}

int handle_resume(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        struct broker_device *d = command_device(s, r->id, r->resume->device);
        char sentence[160];
        int result;

        (void)ret_why;
        if (!d)
                return 0;
        if (s->command.resumed) {
                refuse_device(s, r->id, s->command.resumed, -EBUSY,
                              "is being resumed for this session: only one resume per session at a time");
                return 0;
        }
        s->command.resumed = d;
        s->command.resume_id = r->id;
        log_notice("%s: resume of device '%s' requested", SESSION_LABEL(s), d->config->id);
        result = drain_resume(d, finish_resume);
        if (result == 0)
                return 0;
        s->command.resumed = NULL;
        snprintf(sentence, sizeof(sentence), "is not drained: it is %s", drain_state(d));
        refuse_device(s, r->id, d, result,
                      result == -EBUSY    ? "is already being resumed"
                      : result == -ENODEV ? "is lost and still in use: it is opened again when all "
                                            "blocks there are freed"
                                          : sentence);
        return 0;
}
