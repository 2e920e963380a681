/* Trims of many sessions; see trim_command.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/trim_command.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/base/number.h"
#include "daemon/memory/drain.h"
#include "daemon/session/explain.h"
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
        while (c->n_open < TRIM_COMMAND_MAX_OPEN && c->freed_bytes < c->want_bytes &&
               command_ask_next(c, now_ms))
                ;
        c->is_asking = false;
        if (c->n_open > 0)
                return;
        if (!c->device)
                finish_trim(c);
        else if (command_has_looked(c))
                finish_drain(c);
}

void trim_command_heard(struct trim_command *c, uint64_t freed_bytes)
{
        c->n_open--;
        c->freed_bytes += freed_bytes;
        command_go_on(c);
}

void trim_command_drop(struct session *s)
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

int handle_trim_now(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        const Bfcd__TrimNow *m = r->trim_now;
        struct trim_command *c;

        (void)ret_why;
        if (session_refuse_client(s, r->id, "trim is"))
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

void trim_command_drain(struct broker *b, struct broker_device *d)
{
        if (!d->command) {
                d->command = calloc(1, sizeof(*d->command));
                if (!d->command)
                        return; /* later */
                d->command->broker = b;
                d->command->device = d;
                d->command->want_bytes = UINT64_MAX;
        }
        d->command->n_looks = TRIM_COMMAND_LOOKS;
        command_go_on(d->command);
}

void trim_command_restart(struct broker_device *d)
{
        if (d->command)
                d->command->next = 0;
}
