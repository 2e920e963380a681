/* The hello; see hello.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/hello.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/memory/broker_lease.h"
#include "daemon/session/accounting.h"
#include "daemon/session/lease.h"
#include "daemon/session/resume.h"
#include "daemon/session/recall.h"
#include "daemon/session/session.h"
#include "daemon/session/session_states.h"
#include "daemon/session/share.h"
#include "proto/memfd.h"

/* ---- the shares of a session ---------------------------------------------------- */

static int shares_alloc(struct session *s)
{
        size_t n = 1; /* those of leases take the place of their tenant's */

        for (size_t i = 0; i < s->tenant->n_quotas; i++)
                n += quota_parent(s->tenant->quotas[i]) == NULL;
        s->shares = calloc(n, sizeof(*s->shares));
        return s->shares ? 0 : -ENOMEM;
}

static struct session_share *take_share(struct session *s, struct quota *q)
{
        struct session_share *share = &s->shares[s->n_shares++];

        share->quota = q;
        q->sessions.n_told++;
        return share;
}

/* The lease of the session within the quota, which may be made for it now. */
static int match_lease(struct session *s, struct quota *parent, struct lease_peer *peer, struct lease **ret,
                       char *sentence, size_t n_sentence)
{
        int r = lease_match(s->broker, parent, peer, ret, sentence, n_sentence);

        if (r == 0 && s->lease_socket == 0)
                r = lease_auto(s, parent, ret, sentence, n_sentence);
        return r;
}

static const char socket_has_ended[] = "the leases of this socket have ended";

static int refuse_ended(const struct lease *lease, char *sentence, size_t n_sentence)
{
        snprintf(sentence, n_sentence, "lease '%s' in partition '%s' has ended", lease->name,
                 lease->quota->partition->name);
        return -EACCES;
}

/* Whether the quota is that of the session's default partition. */
static bool is_default(const struct session *s, const struct quota *q, const char *partition)
{
        return partition[0] == '\0' ? s->n_shares == 0 : strcmp(partition, q->partition->name) == 0;
}

/* One share for each quota of the session's tenant, or for the lease in it that the session matches; by a socket of leases, only
 * for these. Where none can be chosen, or the lease has ended, the session gets no memory; in the session's default partition
 * that is an error, and the sentence says why. partition: the default; "": the first of the session. -ENOMEM. */
static int session_take_shares(struct session *s, const char *partition, char *sentence, size_t n_sentence)
{
        struct lease_peer peer = { .who = &s->who, .tenant = s->tenant, .socket = s->lease_socket };
        const struct tenant *t = s->tenant;
        size_t n_noted = 0;
        int r = shares_alloc(s);

        for (size_t i = 0; r == 0 && i < t->n_quotas; i++) {
                struct quota *q = t->quotas[i];
                struct lease *lease = NULL;
                bool is_first_choice;

                if (q->is_removed || quota_parent(q))
                        continue;
                r = match_lease(s, q, &peer, &lease, sentence, n_sentence);
                if (r == 0 && !lease && s->lease_socket != 0)
                        continue;
                is_first_choice = is_default(s, q, partition);
                if (r == 0 && is_first_choice && lease && quota_has_ended(lease->quota))
                        r = refuse_ended(lease, sentence, n_sentence);
                n_noted += r < 0 || lease;
                if (r < 0 && (is_first_choice || n_noted > LEDGER_SESSION_LEASES))
                        return r;
                take_share(s, r == 0 && lease ? lease->quota : q)->is_barred = r < 0;
                r = 0;
        }
        if (r == 0 && s->lease_socket != 0 && s->n_shares == 0) {
                snprintf(sentence, n_sentence, "%s", socket_has_ended);
                r = -EACCES;
        }
        return r;
}

/* The lease of the session within a quota; else the quota. */
static struct quota *innermost(const struct session *s, const struct ledger_session *record, struct quota *q)
{
        for (size_t i = 0; q->account.n_children > 0 && i < s->tenant->n_quotas; i++) {
                struct quota *each = s->tenant->quotas[i];

                for (size_t k = 0; quota_parent(each) == q && k < LEDGER_SESSION_LEASES; k++)
                        if (record->leases[k] == ledger_quota_at(each->partition->ledger, each->index)->id)
                                return each;
        }
        return q;
}

/* The socket of the leases that the session was in; 0: they have none. *ret_has_lost: a lease could not be restored, and the
 * session is not to have the tenant's whole quota instead. */
static uint64_t find_socket(const struct session *s, const struct ledger_session *record, bool *ret_has_lost)
{
        uint64_t number = 0;

        *ret_has_lost = false;
        for (size_t k = 0; k < LEDGER_SESSION_LEASES; k++) {
                const struct quota *found = NULL;

                if (record->leases[k] == 0 || (record->leases[k] & LEDGER_BARRED))
                        continue;
                for (size_t i = 0; i < s->tenant->n_quotas && !found; i++)
                        if (record->leases[k] ==
                            ledger_quota_at(s->broker->ledger, s->tenant->quotas[i]->index)->id)
                                found = s->tenant->quotas[i];
                if (found && found->lease && lease_of(found)->socket)
                        number = lease_of(found)->socket->number;
                *ret_has_lost = *ret_has_lost || !found;
        }
        return number;
}

static bool was_barred(const struct ledger_session *record, uint64_t quota_id)
{
        for (size_t k = 0; k < LEDGER_SESSION_LEASES; k++)
                if (record->leases[k] == (quota_id | LEDGER_BARRED))
                        return true;
        return false;
}

int session_take_shares_again(struct session *s, const struct ledger_session *record)
{
        const struct tenant *t = s->tenant;
        bool has_lost;
        int r = shares_alloc(s);

        s->lease_socket = find_socket(s, record, &has_lost);
        for (size_t i = 0; r == 0 && i < t->n_quotas; i++) {
                uint64_t id = ledger_quota_at(s->broker->ledger, t->quotas[i]->index)->id;
                struct quota *q;

                if (quota_parent(t->quotas[i]) || id >= record->quotas_end)
                        continue;
                q = innermost(s, record, t->quotas[i]);
                if (s->lease_socket == 0 || q != t->quotas[i])
                        take_share(s, q)->is_barred =
                                (has_lost && q == t->quotas[i]) || was_barred(record, id);
        }
        return r;
}

/* Notes in the record of a new session which leases it is in. */
static void session_note_leases(const struct session *s, struct ledger_session *facts)
{
        size_t n = 0;

        for (size_t i = 0; i < s->n_shares; i++) {
                const struct session_share *share = &s->shares[i];
                uint64_t id = ledger_quota_at(share->quota->partition->ledger, share->quota->index)->id;

                if ((quota_parent(share->quota) || share->is_barred) && n < LEDGER_SESSION_LEASES)
                        facts->leases[n++] = id | (share->is_barred ? LEDGER_BARRED : 0);
        }
}

/* ---- the answer -------------------------------------------------------------------- */

/* A successor would recognize its process. */
static bool can_be_resumed(const struct session *s)
{
        return s->role == ROLE_CLIENT && store_keeps(s->broker->options.store) && s->who.pid > 0 &&
               s->who.start_time != 0;
}

/* protobuf-c's strings and bytes are not const, but it does not write them. */
static void describe_partition(const struct broker *b, const struct quota *q, Bfcd__PartitionInfo *ret)
{
        const struct partition *p = q->partition;

        bfcd__partition_info__init(ret);
        ret->name = (char *)(uintptr_t)p->name;
        ret->device = (char *)(uintptr_t)p->device_id;
        ret->bytes_limit = q->account.limit_bytes;
        ret->share = (char *)(uintptr_t)partition_share_name(p);
        ret->usage_entry = q->lease ? UINT32_MAX : (uint32_t)(p - b->partitions); /* a lease has no entry */
        ret->lease = (char *)(uintptr_t)(q->lease ? q->lease : "");
        ret->pinned = p->memory.is_pinned;
        ret->no_memory = p->device->has_no_memory;
        if (p->is_cuda) {
                ret->charges_contexts = p->context_bytes != CONFIG_NO_CONTEXTS;
                ret->context_bytes = ret->charges_contexts ? p->context_bytes : 0;
                ret->device_uuid.data = (uint8_t *)(uintptr_t)p->uuid;
                ret->device_uuid.len = sizeof(p->uuid);
        }
}

int welcome_open_events(struct session *s, const Bfcd__Request *r, int *ret_fd)
{
        *ret_fd = -1;
        if (s->role != ROLE_CLIENT || !s->ops->open_events || !r->hello->wants_events)
                return 0;
        return s->ops->open_events(s->userdata, ret_fd);
}

/* Owned until they are sent. */
struct welcome_fds {
        int events; /* the client's end of the events socket, or -1 */
        int usage;  /* the pages; both or none of them are -1 */
        int page;
};

/* No pages if the client did not ask for them, or there is no room: then it asks for statistics. */
static void open_pages(struct session *s, const Bfcd__Request *r, struct welcome_fds *fds)
{
        int usage, page;

        if (s->role != ROLE_CLIENT || !s->tenant->usage || !r->hello->wants_pages)
                return;
        usage = memfd_lend(s->tenant->usage->fd, O_RDONLY);
        if (usage < 0)
                return;
        if (client_page_new(&s->page, &page) < 0) {
                close(usage);
                return;
        }
        fds->usage = usage;
        fds->page = page;
}

static void close_fds(const struct welcome_fds *fds)
{
        if (fds->events >= 0)
                close(fds->events);
        if (fds->page < 0)
                return;
        close(fds->usage);
        close(fds->page);
}

static void send_welcome(struct session *s, Bfcd__Reply *reply, const struct welcome_fds *from)
{
        size_t n_fds = 0;
        int fds[3];

        if (from->events >= 0)
                fds[n_fds++] = from->events;
        if (from->page >= 0) {
                fds[n_fds++] = from->usage;
                fds[n_fds++] = from->page;
        }
        s->delivery.in_flight = n_fds > 0;
        reply->hello->has_events = session_has_events(s);
        reply->hello->has_pages = from->page >= 0;
        s->ops->send(s->userdata, reply, fds, n_fds);
}

/* Fills the reply but for has_events and has_pages. infos, pointers: one for each share. */
static void describe(const struct session *s, size_t share, Bfcd__PartitionInfo *infos,
                     Bfcd__PartitionInfo **pointers, Bfcd__HelloReply *ret)
{
        struct ledger_session *record = ledger_session_at(s->broker->ledger, s->index);

        for (size_t i = 0; i < s->n_shares; i++) {
                describe_partition(s->broker, s->shares[i].quota, &infos[i]);
                pointers[i] = &infos[i];
        }
        bfcd__hello_reply__init(ret);
        ret->version = SESSION_PROTOCOL_VERSION;
        ret->session_id = s->id;
        ret->secret.data = record->secret;
        ret->secret.len = sizeof(record->secret);
        if (s->tenant)
                ret->tenant = (char *)(uintptr_t)s->tenant->name;
        ret->n_partitions = s->n_shares;
        ret->partitions = pointers;
        ret->default_partition = (uint32_t)share;
        ret->can_resume = record->can_resume != 0;
        ret->takes_charges = s->tenant != NULL;
        ret->is_monitor = s->role == ROLE_MONITOR;
        ret->is_scheduler = s->role == ROLE_SCHEDULER;
}

static void welcome(struct session *s, uint64_t id, size_t share, const struct welcome_fds *fds)
{
        Bfcd__PartitionInfo *infos = calloc(s->n_shares + 1, sizeof(*infos)),
                            **pointers = calloc(s->n_shares + 1, sizeof(*pointers));
        Bfcd__HelloReply hello;
        Bfcd__Reply reply = BFCD__REPLY__INIT;

        if (!infos || !pointers) {
                close_fds(fds);
                s->ops->abort(s->userdata, "out of memory");
                goto out;
        }
        describe(s, share, infos, pointers, &hello);
        reply.id = id;
        reply.body_case = BFCD__REPLY__BODY_HELLO;
        reply.hello = &hello;
        send_welcome(s, &reply, fds);
        tell_drains_of(s);
out:
        free(infos);
        free(pointers);
}

void welcome_send(struct session *s, const Bfcd__Request *r, size_t share, int events_fd)
{
        struct ledger_session *record = ledger_session_at(s->broker->ledger, s->index);
        struct welcome_fds fds = { .events = events_fd, .usage = -1, .page = -1 };

        record->has_events = events_fd >= 0;
        pressure_begin(s);
        record->can_resume = r->hello->can_resume && can_be_resumed(s);
        open_pages(s, r, &fds);
        welcome(s, r->id, share, &fds);
}

/* ---- the hello --------------------------------------------------------------------- */

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

        snprintf(sentence, sizeof(sentence), "%s '%s' has no %s in partition '%.63s'; its partitions are:",
                 s->lease_socket != 0 ? "socket" : "tenant",
                 s->lease_socket != 0 ? lease_socket_numbered(s->broker, s->lease_socket)->name
                                      : s->tenant->name,
                 s->lease_socket != 0 ? "lease" : "quota", r->hello->partition);
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

/* The tenant of the leases by whose socket the session came. NULL, with a sentence. */
static struct tenant *find_socket_tenant(const struct session *s, const char *name, char *sentence, size_t n)
{
        const struct lease_socket *socket = lease_socket_numbered(s->broker, s->lease_socket);

        if (!socket || !socket->tenant->config) {
                snprintf(sentence, n, "%s", socket_has_ended);
                return NULL;
        }
        if (name[0] == '\0' || strcmp(name, socket->tenant->name) == 0)
                return socket->tenant;
        snprintf(sentence, n, "socket '%s' is of leases of tenant '%s' and leads to no other tenant",
                 socket->name, socket->tenant->name);
        return NULL;
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
        s->tenant = s->lease_socket != 0
                            ? find_socket_tenant(s, r->hello->tenant, sentence, sizeof(sentence))
                            : tenant_select(b->selection.order, b->selection.n, b->selection.fallback,
                                            r->hello->tenant, &s->who, sentence, sizeof(sentence));
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
