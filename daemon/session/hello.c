/* The hello; see hello.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/hello.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "daemon/session/resume.h"
#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/session/accounting.h"
#include "daemon/session/session.h"
#include "daemon/session/retire.h"
#include "daemon/session/session_states.h"
#include "daemon/session/share.h"
#include "daemon/session/share_take.h"
#include "daemon/session/welcome.h"

int hello_match(struct session *s)
{
        int r = match_ids(s->broker->selection.matcher, &s->who, NULL, 0);

        if (r == 0)
                match_places(s->broker->selection.matcher, &s->who);
        return r;
}

static void forget_tenant(struct session *s)
{
        session_leave_shares(s);
        s->tenant = NULL;
}

static void refuse_partition(struct session *s, const Bfcd__Request *r)
{
        char sentence[SESSION_SENTENCE_BYTES];

        snprintf(sentence, sizeof(sentence),
                 "tenant '%s' has no quota in partition '%.63s'; its partitions are:", s->tenant->name,
                 r->hello->partition);
        for (size_t i = 0; i < s->n_shares; i++) {
                size_t used = strlen(sentence);

                snprintf(sentence + used, sizeof(sentence) - used, " '%s'",
                         s->shares[i].quota->partition->name);
        }
        session_refuse(s, r->id, -ENOENT, sentence);
}

/* Refuses the hello where that fails. */
static int take_shares(struct session *s, const Bfcd__Request *request)
{
        char sentence[SESSION_SENTENCE_BYTES] = "the daemon is out of memory";
        int r = session_take_shares(s, request->hello->partition, sentence, sizeof(sentence));

        if (r < 0 && r != -ENOMEM)
                accounting_refuse_hello(s, "lease", sentence);
        if (r < 0)
                session_refuse(s, request->id, r, sentence);
        return r;
}

/* It counts in no quota, so without a limit of its own one tenant could have all free sessions. It takes no place of a
 * session with memory. */
static int admit_without_memory(struct session *s, uint64_t id)
{
        const struct tenant *t = s->tenant;
        char sentence[SESSION_SENTENCE_BYTES];

        if (t->n_sessions < t->config->max_sessions)
                return 0;
        snprintf(sentence, sizeof(sentence),
                 "tenant '%s' has %zu sessions: the max_sessions of its quotas sum to %" PRIu32, t->name,
                 t->n_sessions, t->config->max_sessions);
        accounting_refuse_hello(s, "max_sessions", sentence);
        session_refuse(s, id, -EDQUOT, sentence);
        return -EDQUOT;
}

/* Finds the tenant and joins a quota. Refuses the hello where that fails. */
static int find_place(struct session *s, const Bfcd__Request *r, size_t *ret_share)
{
        struct broker *b = s->broker;
        char sentence[SESSION_SENTENCE_BYTES];
        int result;

        if (hello_match(s) < 0) {
                session_refuse(s, r->id, -ENOMEM, "the daemon is out of memory");
                return -ENOMEM;
        }
        s->tenant = tenant_select(b->selection.order, b->selection.n, b->selection.fallback, r->hello->tenant,
                                  &s->who, sentence, sizeof(sentence));
        if (!s->tenant) {
                accounting_refuse_hello(s, "tenant", sentence);
                session_refuse(s, r->id, -EACCES, sentence);
                return -EACCES;
        }
        if (broker_admits(b, s->tenant, sentence, sizeof(sentence)) < 0) {
                accounting_refuse_hello(s, "max_sessions", sentence);
                session_refuse(s, r->id, -EDQUOT, sentence);
                return -EDQUOT;
        }
        if (r->hello->no_memory)
                return admit_without_memory(s, r->id);
        result = take_shares(s, r);
        if (result < 0)
                return result;
        if (session_find_share(s, r->hello->partition, ret_share) < 0) {
                refuse_partition(s, r);
                return -ENOENT;
        }
        return session_join(s, &s->shares[*ret_share], r->id);
}

/* Random bytes for many sessions come with one system call; each is given once. */
static int make_secret(uint8_t *ret, size_t n_bytes)
{
        static uint8_t pool[16 * sizeof(((struct ledger_session *)0)->secret)];
        static size_t n_left;

        if (n_left < n_bytes) {
                if (getrandom(pool, sizeof(pool), 0) != (ssize_t)sizeof(pool))
                        return -EIO;
                n_left = sizeof(pool);
        }
        n_left -= n_bytes;
        memcpy(ret, pool + n_left, n_bytes);
        explicit_bzero(pool + n_left, n_bytes);
        return 0;
}

static int add_record(struct session *s, bool no_memory, bool has_events)
{
        struct broker *b = s->broker;
        struct ledger_session facts = {
                .start_time = s->who.start_time,
                .pid = (uint32_t)s->who.pid,
                .uid = s->who.uid,
                .gid = s->who.gid,
                .born_ms = clock_ms(),
                .has_events = has_events,
                .quotas_end = no_memory ? 0 : ledger_quotas_end(b->ledger),
        };
        int r;

        session_note_leases(s, &facts);
        snprintf(facts.name, sizeof(facts.name), "%s", s->name);
        r = make_secret(facts.secret, sizeof(facts.secret));
        if (r < 0)
                return r;
        if (s->tenant)
                snprintf(facts.tenant, sizeof(facts.tenant), "%s", s->tenant->name);
        r = ledger_session_add(b->ledger, &facts, &s->index);
        if (r < 0)
                return r;
        session_enlist(s);
        session_transit(s, EVENT_ADMITTED, NULL);
        return 0;
}

/* Refuses the hello where that fails. */
static int begin_session(struct session *s, const Bfcd__Request *r, int *ret_events_fd)
{
        int fd, result = welcome_open_events(s, r, &fd);

        if (result == 0)
                result = add_record(s, r->hello->no_memory, fd >= 0);
        if (result == 0) {
                *ret_events_fd = fd;
                return 0;
        }
        if (fd >= 0)
                close(fd);
        forget_tenant(s);
        if (result == -ENOSPC)
                session_refuse(s, r->id, -EDQUOT, "the daemon's table of sessions is full");
        else if (result == -EMFILE || result == -ENFILE)
                session_refuse(s, r->id, -ENOMEM,
                               "the daemon has no file descriptors left for an events socket");
        else
                session_refuse(s, r->id, result, strerror(-result));
        return result;
}

int hello_handle(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        size_t share = 0;
        int events_fd = -1;

        if (session_is_greeted(s)) {
                *ret_why = "the client sent a second hello";
                return -EPROTO;
        }
        if (++s->hello.n > SESSION_MAX_HELLOS) {
                *ret_why = "too many refused hellos";
                return -EPROTO;
        }
        if (r->hello->version != SESSION_PROTOCOL_VERSION) {
                session_refuse_format(
                        s, r->id, -EPROTO,
                        "the client uses protocol version %u and this daemon uses version %u: install "
                        "libbfcclient and bfcd of the same release",
                        r->hello->version, SESSION_PROTOCOL_VERSION);
                return 0;
        }
        if (r->hello->session_id != 0 && s->role == ROLE_CLIENT)
                return resume_hello(s, r);
        session_set_name(s, r->hello->name);
        if (s->role == ROLE_CLIENT && find_place(s, r, &share) < 0) {
                forget_tenant(s);
                return 0;
        }
        if (begin_session(s, r, &events_fd) < 0)
                return 0;
        retire_begin(s);
        welcome_send(s, r, share, events_fd);
        log_debug("%s started", SESSION_LABEL(s));
        return 0;
}
