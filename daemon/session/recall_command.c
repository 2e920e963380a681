/* Admin commands that ask many sessions; see recall_command.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/recall_command.h"

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
#include "daemon/session/pressure.h"
#include "daemon/session/session.h"
#include "daemon/session/trim.h"

struct recall_command {
        enum recall_kind kind; /* RECALL_TRIM, or RECALL_PRESSURE to park or wake */
        struct broker *broker;
        struct session *admin;        /* NULL: a drain's */
        struct broker_device *device; /* that is drained; NULL: an admin's */
        size_t n_looks;               /* a drain's: at sessions, that are left in this tick */
        uint64_t id;                  /* of the request */
        uint64_t session_id;          /* 0: those of the tenant */
        char tenant[LEDGER_NAME_BYTES];
        char partition[LEDGER_NAME_BYTES];
        char to[LEDGER_NAME_BYTES]; /* to park; "": as the config has it */
        char tag[LEDGER_TAG_BYTES];
        bool wakes;
        uint64_t want_bytes;
        uint64_t n_bytes;      /* freed, or woken */
        uint64_t before_bytes; /* reserved, when a trim began */
        uint64_t n_asked;      /* sessions */
        uint64_t asked_id;     /* the last one */
        size_t n_open;
        uint32_t next;     /* session's slot */
        size_t next_share; /* of that session */
        bool is_asking;    /* inside command_go_on() */
};

static bool name_matches(const char *wanted, const char *name)
{
        return wanted[0] == '\0' || strcmp(wanted, name) == 0;
}

static bool matches_partition(const struct recall_command *c, const struct partition *p)
{
        return c->device ? p->device == c->device->device : name_matches(c->partition, p->name);
}

static bool matches_quota(const struct recall_command *c, const struct quota *q)
{
        return matches_partition(c, q->partition) && name_matches(c->tenant, q->tenant);
}

static bool matches_session(const struct recall_command *c, const struct session *s)
{
        if (!s || !s->tenant || s->state != SESSION_LIVE)
                return false;
        return c->session_id ? s->id == c->session_id : name_matches(c->tenant, s->tenant->name);
}

/* Returns how many quotas it is about. */
static size_t count_quotas(const struct recall_command *c, uint64_t *ret_reserved_bytes)
{
        const struct broker *b = c->broker;
        size_t n = 0;

        *ret_reserved_bytes = 0;
        for (size_t i = 0; i < b->n_tenants; i++) {
                for (size_t k = 0; k < b->tenants[i].n_quotas; k++) {
                        if (!matches_quota(c, b->tenants[i].quotas[k]))
                                continue;
                        *ret_reserved_bytes += b->tenants[i].quotas[k]->account.own_bytes;
                        n++;
                }
        }
        return n;
}

static bool find_to(const struct recall_command *c, const struct session *s, size_t share, size_t *ret)
{
        return pressure_find_to(s, &s->shares[share], c->to[0] ? c->to : NULL, ret) == 0;
}

/* ---- the end --------------------------------------------------------------- */

static void release_idle(const struct recall_command *c)
{
        const struct broker *b = c->broker;

        for (size_t i = 0; i < b->n_tenants; i++)
                for (size_t k = 0; k < b->tenants[i].n_quotas; k++)
                        if (matches_quota(c, b->tenants[i].quotas[k]))
                                quota_release_idle(b->tenants[i].quotas[k]);
}

static void finish_drain(struct recall_command *c)
{
        if (drain_is_waiting(c->device))
                release_idle(c);
        c->device->command = NULL;
        c->device->asked_ms = clock_ms();
        free(c);
}

static const char *command_name(const struct recall_command *c)
{
        if (c->kind == RECALL_TRIM)
                return "trim";
        return c->wakes ? "wake" : "park";
}

static void finish(struct recall_command *c)
{
        struct session *s = c->admin;
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        Bfcd__TrimReply trim = BFCD__TRIM_REPLY__INIT;

        if (c->kind == RECALL_TRIM)
                release_idle(c);
        log_info("%s: %s: %" PRIu64 " session%s asked, %s in blocks %s", SESSION_LABEL(s), command_name(c),
                 c->n_asked, c->n_asked == 1 ? "" : "s", NUMBER_SIZE(c->n_bytes),
                 c->kind == RECALL_TRIM ? "freed"
                 : c->wakes             ? "woken"
                                        : "parked");
        trim.n_asked = c->n_asked;
        trim.n_bytes = c->n_bytes;
        trim.bytes_reserved_before = c->before_bytes;
        reply.id = c->id;
        reply.body_case = BFCD__REPLY__BODY_TRIM;
        reply.trim = &trim;
        s->command.recall = NULL;
        free(c);
        session_send(s, &reply);
}

/* ---- asking ---------------------------------------------------------------- */

/* False: the session cannot be asked there. */
static bool ask_share(struct recall_command *c, struct session *s, size_t i, uint64_t now_ms)
{
        struct session_share *share = &s->shares[i];
        struct pressure_order order = { .n_bytes = UINT64_MAX,
                                        .parks = !c->wakes,
                                        .wakes = c->wakes,
                                        .tag = c->tag,
                                        .is_command = true };

        if (!matches_partition(c, share->quota->partition))
                return false;
        if (c->kind == RECALL_TRIM) {
                if (!trim_send(&share->trim, c->want_bytes - c->n_bytes, now_ms))
                        return false;
                share->trim.recall.command = c;
                return true;
        }
        if ((!c->wakes && !find_to(c, s, i, &order.to)) || !pressure_send(&share->pressure, &order, now_ms))
                return false;
        share->pressure.recall.command = c;
        return true;
}

static bool has_looked(const struct recall_command *c)
{
        return c->next >= c->broker->sessions.n_slots;
}

/* Asks the next of its sessions in one quota. False: there is none, or a drain has no look left. */
static bool ask_next(struct recall_command *c, uint64_t now_ms)
{
        for (; !has_looked(c); c->next++, c->next_share = 0) {
                struct session *s = c->broker->sessions.table[c->next];

                if (c->device && c->n_looks == 0)
                        return false;
                c->n_looks -= c->device != NULL;
                while (matches_session(c, s) && c->next_share < s->n_shares) {
                        if (!ask_share(c, s, c->next_share++, now_ms))
                                continue;
                        c->n_asked += c->asked_id != s->id;
                        c->asked_id = s->id;
                        c->n_open++;
                        return true;
                }
        }
        return false;
}

static void command_go_on(struct recall_command *c)
{
        uint64_t now_ms = clock_ms();

        if (c->is_asking)
                return;
        c->is_asking = true;
        if (c->device && !drain_is_waiting(c->device))
                c->next = (uint32_t)c->broker->sessions.n_slots;
        while (c->n_open < RECALL_COMMAND_MAX_OPEN && c->n_bytes < c->want_bytes && ask_next(c, now_ms))
                ;
        c->is_asking = false;
        if (c->n_open > 0)
                return;
        if (!c->device)
                finish(c);
        else if (has_looked(c))
                finish_drain(c);
}

void recall_command_hear(struct recall *r)
{
        struct recall_command *c = r->command;

        if (!c)
                return;
        r->command = NULL;
        c->n_open--;
        c->n_bytes += c->wakes ? r->n_added : r->n_freed;
        command_go_on(c);
}

void recall_command_drop(struct session *s)
{
        struct recall_command *c = s->command.recall;
        struct recall *r;

        if (!c)
                return;
        TAILQ_FOREACH(r, &s->broker->recalls.lists[c->kind], of_broker)
        if (r->command == c)
                r->command = NULL;
        free(c);
        s->command.recall = NULL;
}

/* ---- the requests ---------------------------------------------------------- */

/* A name that is too long matches nothing. NULL: it was refused. */
static struct recall_command *command_new(struct session *s, uint64_t id, enum recall_kind kind,
                                          const char *tenant, const char *partition)
{
        struct recall_command *c;

        if (s->command.recall) {
                session_refuse_format(s, id, -EBUSY,
                                      "a %s of this session is still running: wait until it is done",
                                      command_name(s->command.recall));
                return NULL;
        }
        c = calloc(1, sizeof(*c));
        if (!c) {
                session_refuse(s, id, -ENOMEM, "the daemon is out of memory");
                return NULL;
        }
        c->kind = kind;
        c->broker = s->broker;
        c->admin = s;
        c->id = id;
        c->want_bytes = UINT64_MAX;
        snprintf(c->tenant, sizeof(c->tenant), "%s", tenant);
        snprintf(c->partition, sizeof(c->partition), "%s", partition);
        return c;
}

static void command_begin(struct recall_command *c)
{
        c->admin->command.recall = c;
        command_go_on(c);
}

static void refuse_unknown(const struct recall_command *c)
{
        char sentence[EXPLAIN_SENTENCE];

        explain_names(c->admin, c->tenant, c->partition, sentence, sizeof(sentence));
        session_refuse(c->admin, c->id, -ENOENT, sentence);
}

int handle_trim_now(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        const Bfcd__TrimNow *m = r->trim_now;
        struct recall_command *c;

        (void)ret_why;
        if (session_refuse_client(s, r->id, "trim is"))
                return 0;
        c = command_new(s, r->id, RECALL_TRIM, m->tenant, m->partition);
        if (!c)
                return 0;
        if (m->n_bytes > 0)
                c->want_bytes = m->n_bytes;
        if (count_quotas(c, &c->before_bytes) > 0) {
                command_begin(c);
                return 0;
        }
        refuse_unknown(c);
        free(c);
        return 0;
}

/* Where blocks of the matching sessions could go. -ENOENT: there is no such session or partition; -EINVAL: there
 * is no partition for their copies. */
static int check_targets(const struct recall_command *c)
{
        const struct broker *b = c->broker;
        int r = -ENOENT;

        for (size_t i = 0; r < 0 && i < b->sessions.n_slots; i++) {
                const struct session *s = b->sessions.table[i];
                size_t to;

                for (size_t k = 0; r < 0 && matches_session(c, s) && k < s->n_shares; k++)
                        if (matches_partition(c, s->shares[k].quota->partition))
                                r = c->wakes || find_to(c, s, k, &to) ? 0 : -EINVAL;
        }
        return r;
}

/* True: the config has such a quota. */
static bool has_quota(const struct recall_command *c)
{
        const struct broker *b = c->broker;

        for (size_t i = 0; i < b->n_tenants; i++)
                for (size_t k = 0; k < b->tenants[i].n_quotas; k++)
                        if (!b->tenants[i].quotas[k]->is_removed && matches_quota(c, b->tenants[i].quotas[k]))
                                return true;
        return false;
}

static bool has_session(const struct recall_command *c)
{
        for (size_t i = 0; i < c->broker->sessions.n_slots; i++)
                if (matches_session(c, c->broker->sessions.table[i]))
                        return true;
        return false;
}

static void refuse_names(const struct recall_command *c)
{
        struct session *s = c->admin;

        if (c->session_id && has_session(c))
                session_refuse_format(s, c->id, -ENOENT, "session %" PRIu64 " has no quota in partition '%s'",
                                      c->session_id, c->partition);
        else if (c->session_id)
                session_refuse_format(s, c->id, -ENOENT, "session %" PRIu64 " does not exist", c->session_id);
        else if (has_quota(c))
                session_refuse_format(s, c->id, -ENOENT, "tenant '%s' has no session", c->tenant);
        else
                refuse_unknown(c);
}

static void refuse_to(const struct recall_command *c)
{
        struct session *s = c->admin;

        if (c->to[0])
                session_refuse_format(
                        s, c->id, -EINVAL,
                        "nothing can be parked to partition '%s': it must be another partition, of host memory, in "
                        "which the tenant has a quota",
                        c->to);
        else
                session_refuse(
                        s, c->id, -EINVAL,
                        "no quota of these sessions has the key 'park': name the partition for the copies by --to "
                        "PARTITION");
}

int handle_park_now(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        const Bfcd__ParkNow *m = r->park_now;
        struct recall_command *c;
        int result;

        (void)ret_why;
        if (session_refuse_client(s, r->id, "park and wake of other sessions are"))
                return 0;
        if (strlen(m->tag) >= sizeof(c->tag)) {
                session_refuse(s, r->id, -EINVAL, "the tag is longer than 31 bytes");
                return 0;
        }
        if (!m->session_id && !*m->tenant) {
                session_refuse(s, r->id, -ENOENT, "park and wake need a tenant or a session");
                return 0;
        }
        c = command_new(s, r->id, RECALL_PRESSURE, m->tenant, m->partition);
        if (!c)
                return 0;
        c->session_id = m->session_id;
        c->wakes = m->wakes;
        snprintf(c->to, sizeof(c->to), "%s", m->to);
        snprintf(c->tag, sizeof(c->tag), "%s", m->tag);
        result = check_targets(c);
        if (result == 0) {
                command_begin(c);
                return 0;
        }
        if (result == -ENOENT)
                refuse_names(c);
        else
                refuse_to(c);
        free(c);
        return 0;
}

/* ---- drains ---------------------------------------------------------------- */

void recall_command_drain(struct broker *b, struct broker_device *d)
{
        if (!d->command) {
                d->command = calloc(1, sizeof(*d->command));
                if (!d->command)
                        return; /* later */
                d->command->kind = RECALL_TRIM;
                d->command->broker = b;
                d->command->device = d;
                d->command->want_bytes = UINT64_MAX;
        }
        d->command->n_looks = RECALL_COMMAND_LOOKS;
        command_go_on(d->command);
}

void recall_command_restart(struct broker_device *d)
{
        if (d->command)
                d->command->next = 0;
}
