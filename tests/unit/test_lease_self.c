/* Leases that users make, by sessions without sockets: for what they may be, and whose they are.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/lease.h"
#include "daemon/session/request.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/memory/broker_lease.h"
#include "tests/unit/room.h"
#include "tests/suite.h"
#include "tests/unit/leases.h"
#include "tests/unit/still_clock.h"

#define OTHER 54321u /* a user who is not the one that runs the test */

static struct peer *admin, *own, *other;
static char config_text[1024], prefix[16];

static struct peer *ask_as(uid_t uid)
{
        struct peer *p = peer_new(b, uid, false);
        Bfcd__Hello hello = BFCD__HELLO__INIT;
        Bfcd__Request r = REQUEST(HELLO, hello, &hello);
        uint64_t id;

        p->session->who.cgroup = strdup("/somewhere");
        hello.version = 1;
        hello.no_memory = true;
        ck_assert_int_eq(peer_send(p, &r, &id), 0);
        ck_assert_int_eq(peer_error(p, id), 0);
        ck_assert_uint_eq(p->session->n_shares, 0);
        return p;
}

static void setup(void)
{
        snprintf(config_text, sizeof(config_text),
                 "devices: [{id: host, size: 256MiB, partitions: [{name: a, limit: 64MiB}]}]\n"
                 "tenants:\n"
                 "  - {name: red, match: {uid: [%u, %u]}, leases: self,\n"
                 "     quotas: [{partition: a, limit: 40MiB, reserve: 8MiB}]}\n"
                 "  - {name: blue, match: {uid: 2}, quotas: [{partition: a}]}\n",
                 (unsigned)geteuid(), OTHER);
        snprintf(prefix, sizeof(prefix), "u%u:", (unsigned)geteuid());
        sessions_start(config_text);
        admin = open_admin_session();
        own = ask_as(geteuid());
        other = ask_as(OTHER);
}

static void teardown(void)
{
        settle();
        ck_assert_uint_eq(b->leases.n, 0);
        must_close(own);
        must_close(other);
        must_close(admin);
        sessions_end();
}

FIXTURE(lease_self, setup, teardown);

/* A name of the user of this process, unless it has a ':', or an operator makes it. */
static uint64_t ask_own(struct peer *p, struct wanted w)
{
        char name[128];

        snprintf(name, sizeof(name), "%s%s", strchr(w.name, ':') || p == admin ? "" : prefix, w.name);
        w.name = name;
        w.tenant = w.tenant ? w.tenant : "";
        if (!w.by_user && !w.pid)
                w.pid = (uint64_t)getpid();
        return ask_create(p, &w);
}

#define CREATE(p, ...) ck_assert_int_eq(peer_error(p, ask_own(p, (struct wanted){ __VA_ARGS__ })), 0)
#define REFUSED(p, error, text, ...)                                                                         \
        do {                                                                                                 \
                const char *sentence_ = refusal_of(p, ask_own(p, (struct wanted){ __VA_ARGS__ }), error);    \
                ck_assert_msg(strstr(sentence_, text), "%s", sentence_);                                     \
        } while (0)

static uint64_t set_reserve(struct peer *p, const char *name, uint64_t reserve)
{
        Bfcd__LeaseSet m = BFCD__LEASE_SET__INIT;

        m.bytes_limit = 10 * MIB;
        m.sets_reserve = true;
        m.bytes_reserve = reserve;
        return ask_set(p, name, &m);
}

/* Of the user of this process. */
static const char *name_of(const char *name)
{
        static char whole[128];

        snprintf(whole, sizeof(whole), "%s%s", prefix, name);
        return whole;
}

/* The refusal does not tell whether somebody else has a lease of that name. */
static void refused_as_unknown(struct peer *p, const char *name, bool sets)
{
        uint64_t id = sets ? set_reserve(p, name, 0) : ask_end(p, name, false, 0);
        const char *sentence = refusal_of(p, id, ENOENT);

        ck_assert_msg(strstr(sentence, "that was made by this user"), "%s", sentence);
        id = sets ? set_reserve(p, "none", 0) : ask_end(p, "none", false, 0);
        sentence = refusal_of(p, id, ENOENT);
        ck_assert_msg(strstr(sentence, "that was made by this user"), "%s", sentence);
}

TEST_OF(lease_self, only_own_processes_get_a_lease)
{
        char of_other[32], group[64];

        snprintf(of_other, sizeof(of_other), "u%u:x", OTHER);
        CREATE(own, .name = "x", .limit = 8 * MIB);
        CREATE(own, .name = "all", .limit = 8 * MIB, .by_user = true, .uid = geteuid());
        REFUSED(own, EEXIST, "exists", .name = "x", .limit = 8 * MIB);
        REFUSED(own, EACCES, "only for its own processes", .name = "y", .limit = 8 * MIB, .by_user = true,
                .uid = OTHER);
        REFUSED(own, EACCES, "only by operators", .name = "y", .limit = 8 * MIB, .unit = "job.service");
        REFUSED(own, EINVAL, "begins with 'u", .name = "other:y", .limit = 8 * MIB);
        REFUSED(own, EINVAL, "begins with 'u", .name = of_other, .limit = 8 * MIB);
        REFUSED(own, EACCES, "own tenant, 'red'", .name = "y", .tenant = "blue", .limit = 8 * MIB);
        REFUSED(own, EINVAL, "limit of tenant 'red'", .name = "y", .limit = 42 * MIB);
        REFUSED(other, EACCES, "does not belong to this user", .name = of_other, .limit = 8 * MIB);
        REFUSED(other, EACCES, "does not belong to this user", .name = of_other, .limit = 8 * MIB, .pid = 1);
        REFUSED(other, EACCES, "does not belong to this user", .name = of_other, .limit = 8 * MIB,
                .cgroup = "/");
        snprintf(group, sizeof(group), "/bfcd-none-%d", (int)getpid());
        REFUSED(own, EACCES, "does not belong to this user", .name = "y", .limit = 8 * MIB, .cgroup = group);
        ck_assert_uint_eq(b->leases.n, 2);
        ck_assert_str_eq(list_page(own, BFCD__LIST__KIND__LEASES, 0)->leases[0]->made_by, "user");
        ck_assert_int_eq(peer_error(own, ask_end(own, name_of("x"), false, 0)), 0);
        ck_assert_int_eq(peer_error(own, ask_end(own, name_of("all"), false, 0)), 0);
}

/* Not a limit that an operator gave the user, and not the sessions of other users, whatever their ancestors. */
TEST_OF(lease_self, it_lifts_no_limit_and_limits_no_other_user)
{
        struct peer *in, *not_in;

        CREATE(own, .name = "x", .limit = 16 * MIB);
        in = open_session(geteuid());
        ck_assert_str_eq(in->session->shares[0].quota->lease, name_of("x"));
        must_close(in);
        not_in = open_session(OTHER); /* its process is this one, too */
        ck_assert_ptr_null(quota_parent(not_in->session->shares[0].quota));
        must_close(not_in);
        CREATE(admin, .name = "op", .tenant = "red", .limit = 4 * MIB, .by_user = true, .uid = geteuid());
        in = open_session(geteuid());
        ck_assert_str_eq(in->session->shares[0].quota->lease, "op");
        must_close(in);
        ck_assert_int_eq(peer_error(admin, ask_end(admin, "op", false, 0)), 0);
        ck_assert_int_eq(peer_error(own, ask_end(own, name_of("x"), false, 0)), 0);
}

TEST_OF(lease_self, only_the_maker_and_operators_change_a_lease)
{
        struct peer *blue = ask_as(2), *in;

        REFUSED(blue, EACCES, "'leases: self' for tenant 'blue'", .name = "u2:x", .limit = 8 * MIB);
        CREATE(own, .name = "x", .limit = 8 * MIB);
        in = open_session(geteuid());
        must_malloc(in, 0, 4 * MIB);
        refused_as_unknown(other, name_of("x"), true);
        refused_as_unknown(other, name_of("x"), false);
        refusal_of(blue, ask_end(blue, name_of("x"), false, 0), EACCES);
        ck_assert_int_eq(peer_error(own, set_reserve(own, name_of("x"), 2 * MIB)), 0);
        ck_assert_uint_eq(lease_find(b, name_of("x"))->quota->account.limit_bytes, 10 * MIB);
        ck_assert_int_eq(peer_error(admin, set_reserve(admin, name_of("x"), 0)), 0);
        must_close(in);
        ck_assert_int_eq(peer_error(admin, ask_end(admin, name_of("x"), false, 0)), 0);

        CREATE(admin, .name = "operators", .tenant = "red", .limit = 8 * MIB);
        refused_as_unknown(own, "operators", true);
        refused_as_unknown(own, "operators", false);
        ck_assert_int_eq(peer_error(admin, ask_end(admin, "operators", false, 0)), 0);
        must_close(blue);
}

TEST_OF(lease_self, users_guarantee_only_what_their_tenant_has)
{
        CREATE(own, .name = "x", .limit = 16 * MIB, .reserve = 6 * MIB);
        ck_assert_uint_eq(b->partitions[0].pool.committed_bytes, 8 * MIB);
        REFUSED(own, EACCES, "of the reserve of tenant 'red'", .name = "y", .limit = 8 * MIB,
                .reserve = 4 * MIB);
        CREATE(own, .name = "y", .limit = 8 * MIB, .reserve = 2 * MIB);
        refusal_of(own, set_reserve(own, name_of("x"), 8 * MIB), EACCES);
        ck_assert_int_eq(peer_error(own, set_reserve(own, name_of("x"), 4 * MIB)), 0);
        ck_assert_int_eq(peer_error(own, set_reserve(own, name_of("x"), 6 * MIB)), 0);
        ck_assert_uint_eq(b->partitions[0].pool.committed_bytes, 8 * MIB);
        ck_assert_int_eq(peer_error(own, ask_end(own, name_of("x"), false, 0)), 0);
        ck_assert_int_eq(peer_error(own, ask_end(own, name_of("y"), false, 0)), 0);
}

TEST_OF(lease_self, a_user_has_so_many_leases)
{
        char name[32];

        for (unsigned i = 0; i <= LEASES_PER_USER; i++) {
                snprintf(name, sizeof(name), "n%u", i);
                if (i < LEASES_PER_USER)
                        CREATE(own, .name = name, .limit = 2 * MIB);
                else
                        REFUSED(own, EDQUOT, "has 64 leases", .name = name, .limit = 2 * MIB);
        }
        for (unsigned i = 0; i < LEASES_PER_USER; i++) {
                snprintf(name, sizeof(name), "n%u", i);
                ck_assert_int_eq(peer_error(own, ask_end(own, name_of(name), false, 0)), 0);
        }
}

TEST_OF(lease_self, a_user_changes_them_so_often)
{
        unsigned n = 1;

        CREATE(own, .name = "x", .limit = 8 * MIB);
        while (peer_error(own, set_reserve(own, name_of("x"), 0)) == 0)
                ck_assert_uint_lt(n++, 1000);
        ck_assert_uint_eq(n, LEASES_PER_TENANT);
        ck_assert_int_eq(peer_error(admin, set_reserve(admin, name_of("x"), 2 * MIB)), 0);
        still_clock_pass(LEASE_BOUNDS_MS);
        ck_assert_int_eq(peer_error(own, set_reserve(own, name_of("x"), 0)), 0);
        ck_assert_int_eq(peer_error(own, ask_end(own, name_of("x"), false, 0)), 0);
}

TEST_OF(lease_self, refused_requests_count_too)
{
        for (unsigned i = 0; i < LEASES_PER_TENANT; i++)
                if (i % 2 == 0)
                        REFUSED(own, EINVAL, "multiples of 2 MiB", .name = "x", .limit = 1);
                else
                        refusal_of(own, set_reserve(own, name_of("none"), 0), ENOENT);
        REFUSED(own, EDQUOT, "asked 256 times in 60 s", .name = "x", .limit = 8 * MIB);
        refusal_of(own, set_reserve(own, name_of("none"), 0), EDQUOT);
        CREATE(admin, .name = "operators", .tenant = "red", .limit = 8 * MIB);
        ck_assert_int_eq(peer_error(admin, ask_end(admin, "operators", false, 0)), 0);
        still_clock_pass(LEASE_BOUNDS_MS);
        CREATE(own, .name = "x", .limit = 8 * MIB);
        ck_assert_int_eq(peer_error(own, ask_end(own, name_of("x"), false, 0)), 0);
}

/* A session that only asks and manages: it gets no memory, and no lease that ended refuses it. */
TEST_OF(lease_self, a_session_without_memory_joins_nothing)
{
        struct peer *in, *late;

        CREATE(own, .name = "x", .limit = 8 * MIB);
        in = open_session(geteuid());
        ck_assert_str_eq(in->session->shares[0].quota->lease, name_of("x"));
        ck_assert_int_eq(peer_error(own, ask_end(own, name_of("x"), false, 0)), 0);
        late = ask_as(geteuid());
        refusal_of(late, peer_malloc(late, 0, MIB), ENOENT);
        ck_assert_int_eq(peer_error(late, ask_end(late, name_of("x"), false, 0)), 0);
        must_close(late);
        must_close(in);
}

/* ---- what requests cost ---------------------------------------------------------- */

enum { MANY = 70, OF_MANY = 35 }; /* tenants, in two partitions; and the one that asks */

#define NOWHERE (UINT64_C(1) << 50) /* makes an address invalid */

static struct quota *(*untouchable)[3]; /* what others' quotas were before */

static void start_many(void)
{
        char *text = NULL;
        size_t n;
        FILE *out = open_memstream(&text, &n);

        fputs("max_sessions: 80\n"
              "devices: [{id: host, size: 512MiB, partitions: [{name: a, limit: 64MiB}, {name: b, limit: 64MiB}]}]\n"
              "tenants:\n",
              out);
        for (unsigned i = 0; i < MANY; i++)
                fprintf(out,
                        "  - {name: t%u, match: {uid: %u}, leases: self,\n"
                        "     quotas: [{partition: a, max_blocks: 100}, {partition: b, max_blocks: 100}]}\n",
                        i, i == OF_MANY ? (unsigned)geteuid() : 1000 + i);
        fclose(out);
        snprintf(prefix, sizeof(prefix), "u%u:", (unsigned)geteuid());
        sessions_start(text);
        free(text);
}

FIXTURE(lease_self_many, start_many, sessions_end);

/* Whoever looks at a quota of another tenant, or at one after another in a partition, crashes, but for the leases of the
 * tenant that asks. */
static void forbid_others(struct quota *invalid)
{
        untouchable = calloc(MANY, sizeof(*untouchable));
        ck_assert_ptr_nonnull(untouchable);
        for (unsigned i = 0; i < MANY; i++) {
                struct tenant *t = &b->tenants[i];

                for (size_t k = 0; k < t->n_quotas; k++)
                        untouchable[i][k] = TAILQ_NEXT(t->quotas[k], lists.of_partition);
                for (size_t k = 0; k < t->n_quotas; k++) {
                        if (!untouchable[i][k] || quota_parent(untouchable[i][k]) != t->quotas[k])
                                TAILQ_NEXT(t->quotas[k], lists.of_partition) = invalid;
                        if (i != OF_MANY)
                                t->quotas[k]->arena =
                                        (struct arena *)((uintptr_t)t->quotas[k]->arena ^ NOWHERE);
                }
        }
}

static void allow_others(void)
{
        for (unsigned i = 0; i < MANY; i++)
                for (size_t k = 0; k < b->tenants[i].n_quotas; k++) {
                        struct quota *q = b->tenants[i].quotas[k];

                        TAILQ_NEXT(q, lists.of_partition) = untouchable[i][k];
                        if (i != OF_MANY)
                                q->arena = (struct arena *)((uintptr_t)q->arena ^ NOWHERE);
                }
        free(untouchable);
}

static struct {
        int error;
        uint64_t cursor; /* of Explain's next page */
} told;

/* Instead of the peer's, which checks all quotas. */
static void note_reply(void *userdata, const Bfcd__Reply *reply, const int *fds, size_t n_fds)
{
        (void)userdata;
        (void)fds;
        (void)n_fds;
        told.error = reply->body_case == BFCD__REPLY__BODY_REFUSAL ? (int)reply->refusal->error : 0;
        told.cursor = reply->body_case == BFCD__REPLY__BODY_EXPLAIN ? reply->explain->next_cursor : 0;
}

static int error_of(struct session *s, Bfcd__Request *r)
{
        const char *why;

        r->id = 1;
        told.error = -1;
        ck_assert_int_eq(session_handle(s, r, &why), 0);
        return told.error;
}

static int error_of_create(struct session *s, const char *name, const char *partition)
{
        Bfcd__LeaseCreate m = BFCD__LEASE_CREATE__INIT;
        Bfcd__Request r = REQUEST(LEASE_CREATE, lease_create, &m);

        m.name = (char *)(uintptr_t)name;
        m.partition = (char *)(uintptr_t)partition;
        m.bytes_limit = 8 * MIB;
        m.match_case = BFCD__LEASE_CREATE__MATCH_UID;
        m.uid = geteuid();
        return error_of(s, &r);
}

static int error_of_explain(struct session *s, const char *tenant)
{
        Bfcd__Explain m = BFCD__EXPLAIN__INIT;
        Bfcd__Request r = REQUEST(EXPLAIN, explain, &m);

        m.tenant = (char *)(uintptr_t)tenant;
        while (error_of(s, &r) == 0 && told.cursor > 0)
                m.cursor = told.cursor;
        return told.error;
}

static int error_of_usage(struct session *s)
{
        Bfcd__Usage m = BFCD__USAGE__INIT;
        Bfcd__Request r = REQUEST(USAGE, usage, &m);

        return error_of(s, &r);
}

static int error_of_malloc(struct session *s, uint64_t n_bytes)
{
        Bfcd__Malloc m = BFCD__MALLOC__INIT;
        Bfcd__Request r = REQUEST(MALLOC, malloc, &m);

        m.n_bytes = n_bytes;
        return error_of(s, &r);
}

/* So what one client asks costs no more with thousands of tenants. Sums over a device are kept for a tenth of a second. */
TEST_OF(lease_self_many, a_client_asks_and_no_quota_of_others_is_looked_at)
{
        struct session_ops ops;
        const struct session_ops *before;
        char name[32];
        struct peer *p = ask_as(geteuid()), *beside = open_session(geteuid());

        CREATE(p, .name = "y", .tenant = "", .limit = 2 * MIB);
        snprintf(name, sizeof(name), "%sx", prefix);
        list_page(p, BFCD__LIST__KIND__STATUS, 0);
        room = broker_room(b);
        room.n_extents = 1;
        before = p->session->ops;
        ops = *before;
        ops.send = note_reply;
        p->session->ops = beside->session->ops = &ops;
        forbid_others((struct quota *)16);
        ck_assert_int_eq(error_of_usage(beside->session), 0);
        ck_assert_int_eq(error_of_malloc(beside->session, 65 * MIB), EDQUOT);
        ck_assert_int_eq(error_of_create(p->session, name, "c"), ENOENT);
        ck_assert_int_eq(error_of_create(p->session, name, "a"), EDQUOT);
        ck_assert_int_eq(error_of_explain(p->session, ""), 0);
        ck_assert_int_eq(error_of_explain(p->session, "t1"), ENOENT);
        for (int kind = 0; kind <= BFCD__LIST__KIND__REFUSALS; kind++) {
                Bfcd__List m = BFCD__LIST__INIT;
                Bfcd__Request r = REQUEST(LIST, list, &m);

                m.kind = (Bfcd__List__Kind)kind;
                ck_assert_int_ge(error_of(p->session, &r), 0);
        }
        allow_others();
        p->session->ops = beside->session->ops = before;
        room.n_quotas = 0;
        must_close(beside);
        ck_assert_int_eq(peer_error(p, ask_end(p, name_of("y"), false, 0)), 0);
        must_close(p);
}
