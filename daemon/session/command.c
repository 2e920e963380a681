/* Admin commands; see command.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/command.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>

#include "daemon/memory/drain.h"
#include "daemon/base/log.h"
#include "daemon/session/session.h"
#include "daemon/session/session_states.h"
#include "daemon/session/shared.h"
#include "daemon/session/recall.h"

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
        if (session_refuse_client(s, r->id, "evict is"))
                return 0;
        if (!reason_is_printable(r->evict->reason)) {
                session_refuse(s, r->id, -EINVAL,
                               "the reason is not valid: it has at most 200 bytes of printable ASCII");
                return 0;
        }
        other = find_session(s->broker, r->evict->session_id);
        if (!other || !session_may_be_evicted(other)) {
                snprintf(sentence, sizeof(sentence), "session %" PRIu64 " cannot be evicted: %s%s",
                         r->evict->session_id, other ? "it is " : "",
                         !other                       ? "there is no such session"
                         : other->role != ROLE_CLIENT ? "not a client's session"
                                                      : session_state_name(other));
                session_refuse(s, r->id, -ENOENT, sentence);
                return 0;
        }
        note_eviction(s, other, r->evict->reason);
        snprintf(sentence, sizeof(sentence), " by an operator%s%s", *r->evict->reason ? ": " : "",
                 r->evict->reason);
        if (session_evict(other, sentence, "evicted by an operator") < 0)
                session_refuse(s, r->id, -ENOMEM, "the daemon is out of memory");
        else
                session_done(s, r->id);
        return 0;
}

/* ---- drains -------------------------------------------------------------- */

void command_tick(struct broker *b, uint64_t now_ms)
{
        for (size_t i = 0; i < b->n_devices; i++) {
                struct broker_device *d = &b->devices[i];

                if (d->command || (drain_is_waiting(d) && now_ms - d->asked_ms >= COMMAND_AGAIN_MS))
                        recall_command_drain(b, d);
        }
}

/* The device of the request, or NULL: it was refused. */
static struct broker_device *command_device(struct session *s, uint64_t id, const char *name)
{
        struct broker *b = s->broker;
        struct broker_device *d;
        char sentence[512];
        size_t n;

        if (session_refuse_client(s, id, "drain and resume are"))
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
                tell_drain(s->broker, d, false);
        if (!was_draining)
                recall_command_restart(d);
        if (drain_is_waiting(d))
                recall_command_drain(s->broker, d);
        return 0;
}

/* The session that asked may be gone. */
static void finish_resume(struct broker *b, struct broker_device *d, int result, const char *why)
{
        if (result == 0)
                tell_drain(b, d, true);
        for (size_t i = 0; i < b->sessions.n_slots; i++) {
                struct session *s = b->sessions.table[i];
                char sentence[512];

                if (!s || !s->admin || s->admin->resumed != d)
                        continue;
                s->admin->resumed = NULL;
                if (s->state != SESSION_LIVE)
                        continue;
                snprintf(sentence, sizeof(sentence), "could not be resumed: %s", why);
                if (result < 0)
                        refuse_device(s, s->admin->resume_id, d, result, sentence);
                else
                        session_done(s, s->admin->resume_id);
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
        if (s->admin->resumed) {
                refuse_device(s, r->id, s->admin->resumed, -EBUSY,
                              "is being resumed for this session: only one resume per session at a time");
                return 0;
        }
        s->admin->resumed = d;
        s->admin->resume_id = r->id;
        log_notice("%s: resume of device '%s' requested", SESSION_LABEL(s), d->config->id);
        result = drain_resume(d, finish_resume);
        if (result == 0)
                return 0;
        s->admin->resumed = NULL;
        snprintf(sentence, sizeof(sentence), "is not drained: it is %s", drain_state(d));
        refuse_device(s, r->id, d, result,
                      result == -EBUSY    ? "is already being resumed"
                      : result == -ENODEV ? "is lost and still in use: it is opened again when all "
                                            "blocks there are freed"
                                          : sentence);
        return 0;
}
