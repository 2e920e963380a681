/* Park and wake by operators; see park_now.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/park_now.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/session/explain.h"
#include "daemon/session/pressure.h"
#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/base/number.h"
#include "daemon/session/session.h"

struct park_now {
        struct session *admin;
        uint64_t id; /* of the request */
        uint64_t session_id;
        char tenant[LEDGER_NAME_BYTES];
        char partition[LEDGER_NAME_BYTES];
        char to[LEDGER_NAME_BYTES]; /* "": as the config has it */
        char tag[LEDGER_TAG_BYTES];
        bool wakes;
        uint64_t n_bytes;
        uint64_t n_asked;  /* sessions */
        uint64_t asked_id; /* the last one */
        size_t n_open;
        uint32_t next;     /* session's slot */
        size_t next_share; /* of that session */
        bool is_asking;    /* inside go_on() */
};

static bool matches_session(const struct park_now *c, const struct session *s)
{
        if (!s || !s->tenant || s->state != SESSION_LIVE)
                return false;
        return c->session_id ? s->id == c->session_id : strcmp(s->tenant->name, c->tenant) == 0;
}

static bool matches(const struct park_now *c, const struct session *s, size_t share)
{
        const char *name = s->shares[share].quota->partition->name;

        return s->shares[share].joined && (!c->partition[0] || strcmp(c->partition, name) == 0);
}

static bool find_to(const struct park_now *c, const struct session *s, size_t share, size_t *ret)
{
        return pressure_find_to(s, &s->shares[share], c->to[0] ? c->to : NULL, ret) == 0;
}

/* Asks the next of its sessions in one quota. False: there is none. */
static bool ask_next(struct park_now *c, uint64_t now_ms)
{
        struct broker *b = c->admin->broker;

        for (; c->next < b->sessions.n_slots; c->next++, c->next_share = 0) {
                struct session *s = b->sessions.table[c->next];

                while (matches_session(c, s) && c->next_share < s->n_shares) {
                        size_t share = c->next_share++;
                        struct pressure_order order = { .n_bytes = UINT64_MAX,
                                                        .parks = !c->wakes,
                                                        .wakes = c->wakes,
                                                        .tag = c->tag,
                                                        .command = c };

                        if (!matches(c, s, share) || (!c->wakes && !find_to(c, s, share, &order.to)) ||
                            !pressure_send(&s->shares[share].pressure, &order, now_ms))
                                continue;
                        c->n_asked += c->asked_id != s->id;
                        c->asked_id = s->id;
                        c->n_open++;
                        return true;
                }
        }
        return false;
}

static void finish(struct park_now *c)
{
        struct session *s = c->admin;
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        Bfcd__TrimReply trim = BFCD__TRIM_REPLY__INIT;

        log_info("%s: %s: %" PRIu64 " session%s asked, %s in blocks %s", SESSION_LABEL(s),
                 c->wakes ? "wake" : "park", c->n_asked, c->n_asked == 1 ? "" : "s", NUMBER_SIZE(c->n_bytes),
                 c->wakes ? "woken" : "parked");
        trim.n_asked = c->n_asked;
        trim.n_bytes = c->n_bytes;
        reply.id = c->id;
        reply.body_case = BFCD__REPLY__BODY_TRIM;
        reply.trim = &trim;
        s->command.park = NULL;
        free(c);
        session_send(s, &reply);
}

static void go_on(struct park_now *c)
{
        uint64_t now_ms = clock_ms();

        if (c->is_asking)
                return;
        c->is_asking = true;
        while (c->n_open < PARK_NOW_MAX_OPEN && ask_next(c, now_ms))
                ;
        c->is_asking = false;
        if (c->n_open == 0)
                finish(c);
}

void park_now_heard(struct park_now *c, uint64_t n_bytes)
{
        c->n_open--;
        c->n_bytes += n_bytes;
        go_on(c);
}

void park_now_drop(struct session *s)
{
        struct recall *r;

        if (!s->command.park)
                return;
        TAILQ_FOREACH(r, &s->broker->recalls.lists[RECALL_PRESSURE], of_broker)
        if (((struct pressure_share *)r)->command == s->command.park)
                ((struct pressure_share *)r)->command = NULL;
        free(s->command.park);
        s->command.park = NULL;
}

/* ---- the request ----------------------------------------------------------- */

/* Where blocks of the matching sessions could go. -ENOENT: there is no such session or partition; -EINVAL: there
 * is no partition for their copies. */
static int check_targets(const struct park_now *c)
{
        const struct broker *b = c->admin->broker;
        int r = -ENOENT;

        for (size_t i = 0; r < 0 && i < b->sessions.n_slots; i++) {
                const struct session *s = b->sessions.table[i];
                size_t to;

                for (size_t k = 0; r < 0 && matches_session(c, s) && k < s->n_shares; k++)
                        if (!c->partition[0] ||
                            strcmp(c->partition, s->shares[k].quota->partition->name) == 0)
                                r = c->wakes || find_to(c, s, k, &to) ? 0 : -EINVAL;
        }
        return r;
}

/* True: the config has such a quota, or names no partition and has the tenant. */
static bool has_quota(const struct park_now *c)
{
        const struct broker *b = c->admin->broker;
        const struct quota *q;

        for (size_t i = 0; i < b->n_partitions; i++) {
                if (c->partition[0] && strcmp(b->partitions[i].name, c->partition) != 0)
                        continue;
                TAILQ_FOREACH(q, &b->partitions[i].quotas, lists.of_partition)
                {
                        if (!q->is_removed && strcmp(q->tenant, c->tenant) == 0)
                                return true;
                }
        }
        return false;
}

static bool has_session(const struct park_now *c)
{
        const struct broker *b = c->admin->broker;

        for (size_t i = 0; i < b->sessions.n_slots; i++)
                if (matches_session(c, b->sessions.table[i]))
                        return true;
        return false;
}

static void refuse_names(const struct park_now *c)
{
        struct session *s = c->admin;
        char sentence[EXPLAIN_SENTENCE];

        if (c->session_id && has_session(c))
                snprintf(sentence, sizeof(sentence), "session %" PRIu64 " has no quota in partition '%s'",
                         c->session_id, c->partition);
        else if (c->session_id)
                snprintf(sentence, sizeof(sentence), "session %" PRIu64 " does not exist", c->session_id);
        else if (has_quota(c))
                snprintf(sentence, sizeof(sentence), "tenant '%s' has no session", c->tenant);
        else
                explain_names(s, c->tenant, c->partition, sentence, sizeof(sentence));
        session_refuse(s, c->id, -ENOENT, sentence);
}

static void refuse_to(const struct park_now *c)
{
        struct session *s = c->admin;
        char sentence[EXPLAIN_SENTENCE];

        if (c->to[0])
                snprintf(
                        sentence, sizeof(sentence),
                        "nothing can be parked to partition '%s': it must be another partition, of host memory, in "
                        "which the tenant has a quota",
                        c->to);
        else
                snprintf(
                        sentence, sizeof(sentence),
                        "no quota of these sessions has the key 'park': name the partition for the copies by --to "
                        "PARTITION");
        session_refuse(s, c->id, -EINVAL, sentence);
}

int park_now_handle(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        const Bfcd__ParkNow *m = r->park_now;
        struct park_now *c;
        int result;

        (void)ret_why;
        if (session_refuse_client(s, r->id, "park and wake of other sessions are"))
                return 0;
        if (s->command.park) {
                session_refuse(s, r->id, -EBUSY,
                               "a park or wake of this session is still running: wait until it is done");
                return 0;
        }
        if (strlen(m->tag) >= sizeof(c->tag)) {
                session_refuse(s, r->id, -EINVAL, "the tag is longer than 31 bytes");
                return 0;
        }
        c = calloc(1, sizeof(*c));
        if (!c) {
                session_refuse(s, r->id, -ENOMEM, "the daemon is out of memory");
                return 0;
        }
        c->admin = s;
        c->id = r->id;
        c->session_id = m->session_id;
        c->wakes = m->wakes;
        /* A name that is too long matches nothing. */
        snprintf(c->tenant, sizeof(c->tenant), "%s", m->tenant);
        snprintf(c->partition, sizeof(c->partition), "%s", m->partition);
        snprintf(c->to, sizeof(c->to), "%s", m->to);
        snprintf(c->tag, sizeof(c->tag), "%s", m->tag);
        result = check_targets(c);
        if (result < 0) {
                if (result == -ENOENT)
                        refuse_names(c);
                else
                        refuse_to(c);
                free(c);
                return 0;
        }
        s->command.park = c;
        go_on(c);
        return 0;
}
