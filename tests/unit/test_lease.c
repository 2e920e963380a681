/* Leases, by sessions without sockets: who joins which, limits at every level, the end, reloads, and restarts.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/lease.h"

#include <sys/syscall.h>
#include <pthread.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/session/resume.h"
#include "daemon/memory/broker_lease.h"
#include "daemon/memory/change.h"
#include "daemon/base/fd_reserve.h"
#include "daemon/session/accounting.h"
#include "daemon/session/session_states.h"
#include "tests/unit/room.h"
#include "tests/fake_store.h"
#include "tests/suite.h"
#include "tests/unit/leases.h"
#include "tests/unit/still_clock.h"

#define CONFIG(red) CONFIG_BLUE(red, "limit: 64MiB")
#define CONFIG_BLUE(red, blue)                                                                               \
        "devices:\n"                                                                                         \
        "  - id: host\n"                                                                                     \
        "    size: 256MiB\n"                                                                                 \
        "    partitions: [{name: a, limit: 64MiB}, {name: pre, limit: 8MiB, growth: preallocate}]\n"         \
        "tenants:\n"                                                                                         \
        "  - {name: red, match: {uid: [1, 3]}, quotas: [" red "{partition: pre, limit: 4MiB}]}\n"            \
        "  - {name: blue, match: {uid: 2}, quotas: [{partition: a, " blue "}]}\n"
static const char config_text[] = CONFIG("{partition: a, limit: 40MiB}, ");

static struct peer *admin;
static struct store *store;
static int n_fds_before;

void __real_tell_limits(struct broker *b);
void __wrap_tell_limits(struct broker *b);

static unsigned n_tellings; /* passes over all sessions and quotas */

void __wrap_tell_limits(struct broker *of)
{
        n_tellings++;
        __real_tell_limits(of);
}

void __real_lease_gone(const struct lease_end *end);
void __wrap_lease_gone(const struct lease_end *end);

static struct {
        unsigned n;
        char name[LEDGER_NAME_BYTES];
        uint64_t peak_bytes;
} gone; /* records of leases that ended */

void __wrap_lease_gone(const struct lease_end *end)
{
        gone.n++;
        gone.peak_bytes = end->life->peak_in_use;
        snprintf(gone.name, sizeof(gone.name), "%s", end->record->name);
        __real_lease_gone(end);
}

static void setup(void)
{
        n_fds_before = suite_count_fds();
        store = fake_store_new();
        b = peer_broker_kept(config_text, NULL, NULL, store, &config);
        admin = open_admin_session();
}

static void teardown(void)
{
        settle();
        ck_assert_uint_eq(b->leases.n, 0);
        must_close(admin);
        b = peer_broker_free(b, config);
        store = fake_store_free(store);
        ck_assert_int_eq(suite_count_fds(), n_fds_before);
}

FIXTURE(lease, setup, teardown);

#define CREATE(...) ck_assert_int_eq(peer_error(admin, ask_create(admin, &(struct wanted){ __VA_ARGS__ })), 0)
#define REFUSED(error, text, ...)                                                                            \
        do {                                                                                                 \
                const char *sentence_ =                                                                      \
                        refusal_of(admin, ask_create(admin, &(struct wanted){ __VA_ARGS__ }), error);        \
                ck_assert_msg(strstr(sentence_, text), "%s", sentence_);                                     \
        } while (0)

static uint64_t set_sizes(const char *name, uint64_t limit, bool sets_reserve, uint64_t reserve)
{
        Bfcd__LeaseSet m = BFCD__LEASE_SET__INIT;

        m.bytes_limit = limit;
        m.sets_reserve = sets_reserve;
        m.bytes_reserve = reserve;
        return ask_set(admin, name, &m);
}

static const Bfcd__LeaseEndReply *end(const char *name, bool evicts, uint64_t grace_ms)
{
        uint64_t id = ask_end(admin, name, evicts, grace_ms);

        ck_assert_int_eq(peer_error(admin, id), 0);
        return peer_reply(admin, id)->lease_end;
}

/* In this control group; and its lease in the partition `a`, "": none. */
static struct peer *join(uid_t uid, const char *cgroup, const char *lease)
{
        struct peer *p = peer_new(b, uid, false);

        p->session->who.cgroup = cgroup ? strdup(cgroup) : NULL;
        say_hello(p);
        ck_assert_str_eq(p->session->shares[0].quota->lease ? p->session->shares[0].quota->lease : "", lease);
        return p;
}

static const char *refused_block(struct peer *p, uint64_t n_bytes, int error)
{
        return refusal_of(p, peer_malloc(p, 0, n_bytes), error);
}

static void assert_has(const char *sentence, const char *text)
{
        ck_assert_msg(strstr(sentence, text), "\"%s\" does not have \"%s\"", sentence, text);
}

static struct quota *quota_of(const char *name)
{
        return lease_find(b, name)->quota;
}

/* ---- names, sizes and matches ---------------------------------------------------- */

TEST_OF(lease, what_is_wrong_is_refused)
{
        CREATE(.name = "x", .cgroup = "/jobs/x", .limit = 8 * MIB);
        REFUSED(EEXIST, "lease 'x' exists", .name = "x", .cgroup = "/jobs/y", .limit = 8 * MIB);
        REFUSED(EINVAL, "name", .name = "", .cgroup = "/jobs/y", .limit = 8 * MIB);
        REFUSED(EINVAL, "name", .name = "a b", .cgroup = "/jobs/y", .limit = 8 * MIB);
        REFUSED(ENOENT, "see: red in a, blue in a", .name = "y", .tenant = "green", .cgroup = "/y",
                .limit = 8 * MIB);
        REFUSED(ENOENT, "no quota", .name = "y", .tenant = "blue", .partition = "pre", .cgroup = "/y",
                .limit = 2 * MIB);
        REFUSED(EOPNOTSUPP, "preallocates", .name = "y", .partition = "pre", .cgroup = "/y",
                .limit = 2 * MIB);
        REFUSED(EINVAL, "multiples", .name = "y", .cgroup = "/y", .limit = 3 * MIB);
        REFUSED(EINVAL, "multiples", .name = "y", .cgroup = "/y", .limit = 0);
        REFUSED(EINVAL, "reserve", .name = "y", .cgroup = "/y", .limit = 4 * MIB, .reserve = 6 * MIB);
        REFUSED(EINVAL, "limit of tenant 'red'", .name = "y", .cgroup = "/y", .limit = 42 * MIB);
        REFUSED(EINVAL, "which processes", .name = "y", .limit = 4 * MIB);
        REFUSED(EINVAL, "control group", .name = "y", .cgroup = "y", .limit = 4 * MIB);
        REFUSED(EINVAL, "control group", .name = "y", .cgroup = "", .limit = 4 * MIB);
        REFUSED(EINVAL, "control group", .name = "y", .cgroup = "/y//z", .limit = 4 * MIB);
        REFUSED(EINVAL, "control group", .name = "y", .cgroup = "/y/../z", .limit = 4 * MIB);
        REFUSED(EINVAL, "control group", .name = "y", .cgroup = "/y/..", .limit = 4 * MIB);
        REFUSED(EINVAL, "control group", .name = "y", .cgroup = "/.", .limit = 4 * MIB);
        REFUSED(EINVAL, "unit", .name = "y", .unit = "y", .limit = 4 * MIB);
        REFUSED(ESRCH, "no process", .name = "y", .pid = INT32_MAX, .limit = 4 * MIB);
        REFUSED(EINVAL, "uid", .name = "y", .by_user = true, .uid = UINT64_MAX, .limit = 4 * MIB);
        ck_assert_uint_eq(b->leases.n, 1);
        ck_assert_ptr_nonnull(
                strstr(refusal_of(admin, set_sizes("none", 4 * MIB, false, 0), ENOENT), "'none'"));
        ck_assert_uint_eq(end("x", false, 0)->num_sessions, 0);
}

TEST_OF(lease, times_that_are_too_long_are_refused)
{
        const uint64_t most = UINT64_C(36500) * 24 * 3600 * 1000;
        Bfcd__LeaseSet ttl = BFCD__LEASE_SET__INIT;

        REFUSED(EINVAL, "the time-out is longer than 36500 days: use a shorter one, or 0 for none",
                .name = "x", .cgroup = "/x", .limit = 4 * MIB, .ttl_ms = most + 1);
        REFUSED(EINVAL, "the grace time is longer than 36500 days: use a shorter one", .name = "x",
                .cgroup = "/x", .limit = 4 * MIB, .evicts = true, .grace_ms = UINT64_MAX);
        CREATE(.name = "x", .cgroup = "/x", .limit = 4 * MIB, .ttl_ms = most, .evicts = true,
               .grace_ms = most);
        ttl.sets_ttl = true;
        ttl.ttl_ms = most + 1;
        assert_has(refusal_of(admin, ask_set(admin, "x", &ttl), EINVAL), "the time-out is longer than");
        assert_has(refusal_of(admin, ask_end(admin, "x", true, most + 1), EINVAL),
                   "the grace time is longer than");
        ck_assert(!quota_has_ended(quota_of("x")));
        end("x", false, 0);
}

TEST_OF(lease, guarantees_must_fit_every_level)
{
        struct peer *blue = open_session(2);
        uint64_t block;

        CREATE(.name = "x", .cgroup = "/x", .limit = 32 * MIB, .reserve = 30 * MIB);
        REFUSED(ENOMEM, "tenant 'red'", .name = "y", .cgroup = "/y", .limit = 32 * MIB, .reserve = 12 * MIB);
        block = must_malloc(blue, 0, 32 * MIB);
        refused_block(blue, 4 * MIB, ENOMEM); /* 30 MiB are promised to x */
        ck_assert_int_eq(peer_error(admin, set_sizes("x", 0, true, 32 * MIB)), 0);
        CREATE(.name = "y", .cgroup = "/y", .limit = 32 * MIB);
        assert_has(refusal_of(admin, set_sizes("y", 0, true, 2 * MIB), ENOMEM), "partition 'a'");
        ck_assert_int_eq(peer_error(admin, set_sizes("x", 0, true, 0)), 0);
        ck_assert_int_eq(peer_error(admin, set_sizes("y", 0, true, 2 * MIB)), 0);
        must_free(blue, block);
        must_close(blue);
        end("x", false, 0);
        end("y", false, 0);
}

TEST_OF(lease, the_innermost_lease_is_joined)
{
        struct peer *p[8];

        CREATE(.name = "user", .by_user = true, .uid = 3, .limit = 8 * MIB);
        CREATE(.name = "unit", .unit = "job.service", .limit = 8 * MIB);
        CREATE(.name = "slice", .cgroup = "/system.slice", .limit = 8 * MIB);
        CREATE(.name = "deep", .cgroup = "/system.slice/other.service/deep/", .limit = 8 * MIB);
        CREATE(.name = "blue", .tenant = "blue", .cgroup = "/", .limit = 8 * MIB);
        p[0] = join(3, "/else", "user");
        p[1] = join(1, "/else", "");
        p[2] = join(1, "/user.slice/job.service/x", "unit");
        p[3] = join(1, "/system.slice/job.service", "slice");
        p[4] = join(3, "/system.slice/other.service/deep/er", "deep");
        p[5] = join(1, "/system.slice/other.service/deeper", "slice");
        p[6] = join(1, "/system.slicer", "");
        p[7] = join(2, "/anything", "blue");
        ck_assert_str_eq(lease_record(b, lease_find(b, "unit"))->place, "/user.slice/job.service");
        for (size_t i = 0; i < 8; i++)
                must_close(p[i]);
        CREATE(.name = "newer", .by_user = true, .uid = 3, .limit = 8 * MIB);
        must_close(join(3, "/else", "newer"));
        CREATE(.name = "tree", .pid = (uint64_t)getppid(), .limit = 8 * MIB);
        must_close(join(3, "/system.slice", "tree"));
        CREATE(.name = "self", .pid = (uint64_t)getpid(), .limit = 8 * MIB);
        must_close(join(3, "/else", "self"));
        for (const char *const *name = (const char *const[]){ "user", "unit", "slice", "deep", "blue",
                                                              "newer", "tree", "self", NULL };
             *name; name++)
                end(*name, false, 0);
}

/* The last of n processes, each the parent of the next. */
static pid_t fork_chain(unsigned n)
{
        pid_t leaf;
        int fds[2];

        ck_assert_int_eq(pipe(fds), 0);
        if (fork() == 0) {
                for (pid_t child = 0; child == 0 && --n > 0;)
                        child = fork();
                leaf = getpid();
                if (n == 0 && write(fds[1], &leaf, sizeof(leaf)) != sizeof(leaf))
                        _exit(1);
                close(fds[0]);
                close(fds[1]);
                pause();
                _exit(0);
        }
        close(fds[1]);
        ck_assert_int_eq(read(fds[0], &leaf, sizeof(leaf)), sizeof(leaf));
        close(fds[0]);
        return leaf;
}

/* From the leaf up to this process. */
static void kill_chain(pid_t leaf)
{
        struct process p;

        for (pid_t pid = leaf; pid != getpid(); pid = p.parent) {
                ck_assert_int_eq(process_read("/proc", pid, &p), 0);
                kill(pid, SIGKILL);
                if (p.parent == getpid())
                        ck_assert_int_eq(waitpid(pid, NULL, 0), pid);
        }
}

static struct peer *peer_of_process(pid_t pid)
{
        struct peer *p = peer_new(b, 1, false);

        p->session->who.pid = pid;
        return p;
}

TEST_OF(lease, a_job_cannot_hide_behind_many_ancestors)
{
        pid_t leaf = fork_chain(70);
        struct peer *x = peer_of_process(leaf);
        const char *sentence;

        CREATE(.name = "p", .pid = (uint64_t)getpid(), .limit = 8 * MIB);
        sentence = refusal_of(x, peer_hello(x, "", ""), EACCES);
        assert_has(sentence, "lease 'p' in partition 'a'");
        assert_has(sentence, "more than 64 ancestors");
        ck_assert_uint_eq(x->session->n_shares, 0);
        end("p", false, 0);
        say_hello(x); /* no lease asks for its ancestors */
        must_close(x);
        kill_chain(leaf);
}

TEST_OF(lease, a_job_cannot_hide_its_control_group)
{
        struct peer *x = peer_of_process(getpid()), *far = peer_of_process(0);

        CREATE(.name = "g", .cgroup = "/g", .limit = 8 * MIB);
        assert_has(refusal_of(x, peer_hello(x, "", ""), EACCES), "its control group could not be read");
        assert_has(refusal_of(far, peer_hello(far, "", ""), EACCES),
                   "lease 'g' in partition 'a': it is in a PID namespace that the daemon does not see");
        end("g", false, 0);
        CREATE(.name = "u", .unit = "job.service", .limit = 8 * MIB);
        assert_has(refusal_of(x, peer_hello(x, "", ""), EACCES), "lease 'u'");
        end("u", false, 0);
        must_close(say_hello(x));
        must_close(say_hello(far)); /* no lease asks where it is */
}

/* ---- limits ---------------------------------------------------------------------- */

TEST_OF(lease, each_level_refuses_by_name)
{
        struct peer *x, *y, *own, *blue = open_session(2);
        uint64_t block;

        CREATE(.name = "x", .cgroup = "/x", .limit = 16 * MIB);
        CREATE(.name = "y", .cgroup = "/y", .limit = 32 * MIB);
        x = join(1, "/x", "x");
        y = join(1, "/y", "y");
        own = join(1, "/z", "");
        assert_has(refused_block(x, 18 * MIB, EDQUOT),
                   "lease 'x' of tenant 'red' asked for more than its limit");
        must_malloc(x, 0, 16 * MIB);
        assert_has(refused_block(x, 1, EDQUOT), "lease 'x' of tenant 'red' is at its limit");
        must_malloc(own, 0, 4 * MIB);
        assert_has(refused_block(y, 22 * MIB, EDQUOT), "tenant 'red' is at its limit");
        must_malloc(y, 0, 20 * MIB);
        assert_has(refused_block(own, 2 * MIB, EDQUOT), "tenant 'red' is at its limit");
        ck_assert_uint_eq(quota_parent(quota_of("y"))->account.charged_bytes, 40 * MIB);
        block = must_malloc(blue, 0, 24 * MIB);
        assert_has(refused_block(blue, 2 * MIB, ENOMEM), "partition 'a' is full");
        must_free(blue, block);
        must_close(x);
        must_close(y);
        must_close(own);
        must_close(blue);
        ck_assert_uint_eq(b->partitions[0].pool.charged_bytes, 0);
        end("x", false, 0);
        end("y", false, 0);
}

TEST_OF(lease, waiting_requests_name_their_lease)
{
        Bfcd__List list = BFCD__LIST__INIT;
        Bfcd__Request r = REQUEST(LIST, list, &list);
        const Bfcd__ListReply *reply;
        struct peer *x;
        uint64_t id;

        CREATE(.name = "x", .cgroup = "/x", .limit = 8 * MIB);
        x = join(1, "/x", "x");
        must_malloc(x, 0, 8 * MIB);
        (void)peer_malloc_wait(x, 0, 2 * MIB, 60000);
        settle();
        list.kind = BFCD__LIST__KIND__WAITING;
        ck_assert_int_eq(peer_send(admin, &r, &id), 0);
        reply = peer_reply(admin, id)->list;
        ck_assert_uint_eq(reply->n_waiting, 1);
        ck_assert_str_eq(reply->waiting[0]->lease, "x");
        ck_assert_str_eq(reply->waiting[0]->tenant, "red");
        must_close(x);
        end("x", false, 0);
}

/* A lease whose tenant is at its limit gets what another lease has free. */
TEST_OF(lease, free_memory_moves_between_leases)
{
        struct peer *x, *y;
        uint64_t block;

        CREATE(.name = "x", .cgroup = "/x", .limit = 40 * MIB);
        CREATE(.name = "y", .cgroup = "/y", .limit = 40 * MIB);
        x = join(1, "/x", "x");
        y = join(1, "/y", "y");
        block = must_malloc(x, 0, 30 * MIB);
        must_malloc(x, 0, 1);
        must_free(x, block);
        ck_assert_uint_gt(quota_of("x")->account.own_bytes, 20 * MIB); /* it keeps its free extents */
        must_malloc(y, 0, 30 * MIB);
        ck_assert_uint_le(quota_of("x")->account.own_bytes, 10 * MIB);
        ck_assert_uint_le(quota_parent(quota_of("x"))->account.charged_bytes, 40 * MIB);
        must_close(x);
        must_close(y);
        end("x", false, 0);
        end("y", false, 0);
}

/* Many short jobs: no level is ever above its limit, and nothing is left of them. */
TEST_OF(lease, many_leases_come_and_go)
{
        enum { N_LEASES = 100, N_SESSIONS = 3 };
        struct peer *peers[N_LEASES][N_SESSIONS];
        struct ledger_counts before, after;
        unsigned n_granted = 0, n_refused = 0;
        char name[32], group[32];

        ledger_count(b->ledger, &before);
        for (unsigned round = 0; round < 3; round++) {
                for (unsigned i = 0; i < N_LEASES; i++) {
                        snprintf(name, sizeof(name), "job-%u", i);
                        snprintf(group, sizeof(group), "/job-%u", i);
                        CREATE(.name = name, .cgroup = group, .limit = 2 * MIB);
                        for (unsigned k = 0; k < N_SESSIONS; k++) {
                                uint64_t id;

                                peers[i][k] = join(1, group, name);
                                id = peer_malloc(peers[i][k], 0, 64 << 10);
                                peer_settle(b);
                                n_granted += peer_error(peers[i][k], id) == 0;
                                n_refused += peer_error(peers[i][k], id) == EDQUOT;
                                ck_assert_uint_le(quota_of(name)->account.charged_bytes, 2 * MIB);
                                ck_assert_uint_le(quota_parent(quota_of(name))->account.committed_bytes,
                                                  40 * MIB);
                        }
                        peer_forget_replies(admin);
                }
                check();
                for (unsigned i = 0; i < N_LEASES; i++) {
                        snprintf(name, sizeof(name), "job-%u", i);
                        ck_assert_uint_eq(end(name, false, 0)->num_sessions, N_SESSIONS);
                        for (unsigned k = 0; k < N_SESSIONS; k++)
                                peer_free(peers[i][k]);
                        peer_settle(b);
                        ck_assert_ptr_null(lease_find(b, name));
                        peer_forget_replies(admin);
                }
        }
        ck_assert_uint_eq(n_granted, 3 * 20 * N_SESSIONS); /* 40 MiB are 20 leases */
        ck_assert_uint_eq(n_granted + n_refused, 3 * N_LEASES * N_SESSIONS);
        ledger_count(b->ledger, &after);
        ck_assert_int_eq(memcmp(&before, &after, sizeof(before)), 0);
}

/* ---- reports --------------------------------------------------------------------- */

static const Bfcd__TenantRow *row_of_red(void)
{
        const Bfcd__ListReply *rows = list_page(admin, BFCD__LIST__KIND__TENANTS, 0);

        for (size_t i = 0; i < rows->n_tenants; i++)
                if (strcmp(rows->tenants[i]->tenant, "red") == 0 &&
                    strcmp(rows->tenants[i]->partition, "a") == 0)
                        return rows->tenants[i];
        ck_abort_msg("red has no row");
}

static const Bfcd__PartitionRow *row_of_a(void)
{
        return list_page(admin, BFCD__LIST__KIND__PARTITIONS, 0)->partitions[0];
}

TEST_OF(lease, a_lease_is_no_tenant_of_its_partition)
{
        CREATE(.name = "x", .cgroup = "/x", .limit = 16 * MIB);
        ck_assert_uint_eq(row_of_a()->num_tenants, 2);
        ck_assert_uint_eq(b->partitions[0].n_quotas, 3);
        end("x", false, 0);
        ck_assert_uint_eq(row_of_a()->num_tenants, 2);
        ck_assert_uint_eq(b->partitions[0].n_quotas, 2);
}

/* Else a tenant that gets a daemon killed for lack of memory goes on in another lease. */
TEST_OF(lease, a_pause_of_growth_is_the_tenants)
{
        struct quota *of_red = b->tenants[0].quotas[0], *of_blue = b->tenants[1].quotas[0];

        CREATE(.name = "x", .cgroup = "/x", .limit = 16 * MIB);
        CREATE(.name = "y", .cgroup = "/y", .limit = 16 * MIB);
        quota_pause_growth(b->leases.list[0]->quota);
        ck_assert_uint_gt(quota_growth_pause_ms(b->leases.list[0]->quota), 0);
        ck_assert_uint_gt(quota_growth_pause_ms(b->leases.list[1]->quota), 0);
        ck_assert_uint_gt(quota_growth_pause_ms(of_red), 0);
        ck_assert_uint_eq(quota_growth_pause_ms(of_blue), 0);
        end("x", false, 0);
        end("y", false, 0);
        ck_assert_uint_gt(quota_growth_pause_ms(of_red), 0);
}

TEST_OF(lease, guarantees_are_summed)
{
        CREATE(.name = "x", .cgroup = "/x", .limit = 16 * MIB, .reserve = 8 * MIB);
        CREATE(.name = "y", .cgroup = "/y", .limit = 16 * MIB, .reserve = 4 * MIB);
        ck_assert_uint_eq(row_of_red()->stats->bytes_guaranteed, 12 * MIB);
        ck_assert_uint_eq(row_of_a()->stats->bytes_guaranteed, 12 * MIB);
        end("x", false, 0);
        ck_assert_uint_eq(row_of_red()->stats->bytes_guaranteed, 4 * MIB);
        end("y", false, 0);
        ck_assert_uint_eq(row_of_red()->stats->bytes_guaranteed, 0);
}

static const Bfcd__ExplainRow *explain_red(const char *lease)
{
        Bfcd__Explain m = BFCD__EXPLAIN__INIT;
        Bfcd__Request r = REQUEST(EXPLAIN, explain, &m);
        const Bfcd__ExplainReply *page;
        uint64_t id;

        m.partition = (char *)(uintptr_t) "a";
        m.tenant = (char *)(uintptr_t) "red";
        do {
                r.id = 0;
                ck_assert_int_eq(peer_send(admin, &r, &id), 0);
                ck_assert_int_eq(peer_error(admin, id), 0);
                page = peer_reply(admin, id)->explain;
                if (page->n_rows > 0 && page->rows[0]->tenant[0] && strcmp(page->rows[0]->lease, lease) == 0)
                        return page->rows[0];
                m.cursor = page->next_cursor;
        } while (m.cursor != 0);
        ck_abort_msg("no row of '%s'", lease);
}

/* What a tenant's statistics have, they have of its leases, too; in all reports. */
TEST_OF(lease, a_tenants_statistics_include_its_leases)
{
        struct peer *x, *own;
        const Bfcd__Statistics *all[2], *of_a;

        CREATE(.name = "x", .cgroup = "/x", .limit = 16 * MIB);
        x = join(1, "/x", "x");
        own = join(1, "/z", "");
        must_malloc(x, 0, 6 * MIB);
        must_malloc(x, 0, 1 * MIB);
        must_malloc(own, 0, 2 * MIB);
        all[0] = row_of_red()->stats;
        all[1] = explain_red("")->stats;
        of_a = row_of_a()->stats;
        for (size_t i = 0; i < 2; i++) {
                ck_assert_uint_eq(all[i]->num_allocs, 3);
                ck_assert_uint_eq(all[i]->num_sessions, 2);
                ck_assert_uint_eq(all[i]->bytes_in_use, 9 * MIB);
                ck_assert_uint_eq(all[i]->largest_alloc_size, 6 * MIB);
                ck_assert_uint_eq(all[i]->largest_free_block_bytes, of_a->largest_free_block_bytes);
                ck_assert_uint_eq(all[i]->bytes_free, of_a->bytes_free);
                ck_assert_uint_eq(all[i]->num_sessions, of_a->num_sessions);
        }
        ck_assert_uint_gt(of_a->largest_free_block_bytes, 0); /* of the lease's extents */
        end("x", false, 0);
        ck_assert_uint_eq(explain_red("x")->stats->bytes_limit, 16 * MIB);
        ck_assert_uint_eq(list_page(admin, BFCD__LIST__KIND__LEASES, 0)->leases[0]->stats->bytes_limit,
                          16 * MIB);
        must_close(x);
        ck_assert_uint_eq(row_of_red()->stats->num_sessions, 1);
        must_close(own);
}

/* ---- the end --------------------------------------------------------------------- */

TEST_OF(lease, an_ended_lease_waits_for_its_sessions)
{
        const Bfcd__LeaseEndReply *reply;
        struct peer *x, *idle, *late;
        uint64_t block;

        CREATE(.name = "x", .cgroup = "/x", .limit = 8 * MIB, .reserve = 8 * MIB);
        x = join(1, "/x", "x");
        idle = join(1, "/x", "x");
        block = must_malloc(x, 0, 8 * MIB);
        reply = end("x", false, 0);
        ck_assert_uint_eq(reply->num_sessions, 2);
        ck_assert_uint_eq(reply->n_sessions, 2);
        ck_assert_uint_eq(reply->sessions[0]->n_leases, 1);
        ck_assert_str_eq(reply->sessions[0]->leases[0], "x");
        ck_assert_uint_eq(reply->bytes_in_use, 8 * MIB);
        settle();
        ck_assert_ptr_nonnull(lease_find(b, "x"));
        ck_assert_uint_eq(b->partitions[0].pool.promised_bytes, 0);
        late = peer_new(b, 1, false);
        late->session->who.cgroup = strdup("/x");
        assert_has(refusal_of(late, peer_hello(late, "", ""), EACCES),
                   "lease 'x' in partition 'a' has ended");
        REFUSED(EEXIST, "lease 'x' of tenant 'red' is still ending, with 2 sessions and 8.0 MiB", .name = "x",
                .cgroup = "/x", .limit = 2 * MIB);
        CREATE(.name = "y", .cgroup = "/x", .limit = 2 * MIB); /* the newer one */
        ck_assert_str_eq(say_hello(late)->session->shares[0].quota->lease, "y");
        must_close(late);
        end("y", false, 0);
        must_free(x, block);
        must_free(x, must_malloc(x, 0, 2 * MIB)); /* in what the lease has */
        assert_has(refused_block(x, 10 * MIB, EDQUOT), "has ended");
        must_close(x);
        ck_assert_ptr_nonnull(lease_find(b, "x"));
        must_close(idle);
        ck_assert_ptr_null(lease_find(b, "x"));
}

TEST_OF(lease, sessions_are_evicted_after_the_grace_time)
{
        struct peer *x;

        CREATE(.name = "x", .cgroup = "/x", .limit = 8 * MIB);
        x = join(1, "/x", "x");
        must_malloc(x, 0, 4 * MIB);
        ck_assert_uint_eq(end("x", true, 5000)->num_sessions, 1);
        lease_tick(b, clock_ms());
        ck_assert_ptr_null(x->session->eviction);
        still_clock_pass(5000);
        lease_tick(b, clock_ms());
        ck_assert_ptr_nonnull(x->session->eviction);
        assert_has(x->session->eviction, "its lease 'x' has ended");
        ck_assert_str_eq(x->why, "evicted: its lease has ended");
        must_close(x);
        ck_assert_ptr_null(lease_find(b, "x"));
}

/* A user ends its own leases, and evicts as many sessions as it has. The end of each is a line of those that are bounded. */
TEST_OF(lease, evictions_by_a_lease_fill_no_log)
{
        enum { N = 2 * ACCOUNTING_SHORT };
        struct peer *peers[N];
        unsigned n = 0;

        CREATE(.name = "x", .cgroup = "/x", .limit = 8 * MIB);
        for (unsigned i = 0; i < N; i++)
                peers[i] = join(1, "/x", "x");
        log_catch();
        end("x", true, 0);
        lease_tick(b, clock_ms());
        for (unsigned i = 0; i < N; i++) {
                ck_assert_ptr_nonnull(peers[i]->session->eviction);
                must_close(peers[i]);
        }
        for (const char *at = log_caught(); (at = strstr(at, "its lease 'x' has ended")); at++)
                n++;
        ck_assert_uint_eq(n, ACCOUNTING_SHORT);
}

static void *wait_for_end(void *arg)
{
        pause();
        return arg;
}

/* /proc shows it as a zombie when its main thread has exited. */
TEST_OF(lease, a_process_ends_with_its_last_thread)
{
        struct process p;
        pthread_t thread;
        pid_t pid = fork();

        if (pid == 0) {
                if (pthread_create(&thread, NULL, wait_for_end, NULL) != 0)
                        _exit(99);
                syscall(SYS_exit, 0); /* of this thread */
        }
        do
                ck_assert_int_eq(process_read("/proc", pid, &p), 0);
        while (p.state != 'Z');
        ck_assert(!process_has_ended(pid, p.start_time));
        ck_assert(process_has_ended(pid, p.start_time + 1));
        ck_assert_int_eq(kill(pid, SIGKILL), 0);
        while (!process_has_ended(pid, p.start_time)) /* it is a zombie, now as a whole */
                ;
        ck_assert_int_eq(waitpid(pid, NULL, 0), pid);
        ck_assert(process_has_ended(pid, p.start_time));
}

TEST_OF(lease, a_lease_ends_by_its_time_or_its_process)
{
        pid_t child = fork();

        if (child == 0) {
                pause();
                _exit(0);
        }
        CREATE(.name = "t", .cgroup = "/t", .limit = 8 * MIB, .ttl_ms = 1000);
        CREATE(.name = "p", .pid = (uint64_t)child, .limit = 8 * MIB);
        CREATE(.name = "g", .cgroup = "/does/not/exist", .limit = 8 * MIB);
        still_clock_pass(999);
        lease_tick(b, clock_ms());
        settle();
        ck_assert_uint_eq(b->leases.n, 3);
        still_clock_pass(1);
        lease_tick(b, clock_ms());
        settle();
        ck_assert_ptr_null(lease_find(b, "t"));
        ck_assert_ptr_nonnull(lease_find(b, "p"));
        kill(child, SIGKILL);
        for (siginfo_t info; waitid(P_PID, (id_t)child, &info, WEXITED | WNOWAIT) < 0;)
                ;
        lease_tick(b, clock_ms()); /* a zombie */
        settle();
        ck_assert_ptr_null(lease_find(b, "p"));
        ck_assert_int_eq(waitpid(child, NULL, 0), child);
        ck_assert_ptr_nonnull(lease_find(b, "g")); /* it may come into being */
        end("g", false, 0);
}

/* However many leases end at once: one pass tells the sessions, and one evicts them. */
TEST_OF(lease, a_tick_is_a_pass_over_all_sessions)
{
        enum { N = 8 };
        struct peer *peers[N];
        char name[16], group[16];
        unsigned n_before;

        for (unsigned i = 0; i < N; i++) {
                snprintf(name, sizeof(name), "l%u", i);
                snprintf(group, sizeof(group), "/l%u", i);
                CREATE(.name = name, .cgroup = group, .limit = 2 * MIB, .ttl_ms = 1000, .evicts = true);
                peers[i] = join(1, group, name);
        }
        still_clock_pass(1000);
        n_before = n_tellings;
        lease_tick(b, clock_ms());
        ck_assert_uint_eq(n_tellings - n_before, 1);
        for (unsigned i = 0; i < N; i++)
                ck_assert_ptr_nonnull(peers[i]->session->eviction);
        free(peers[0]->session->eviction);
        peers[0]->session->eviction = NULL;
        lease_tick(b, clock_ms()); /* which does not look at the sessions: all were evicted */
        ck_assert_ptr_null(peers[0]->session->eviction);
        ck_assert_uint_eq(n_tellings - n_before, 1);
        for (unsigned i = 0; i < N; i++)
                must_close(peers[i]);
}

/* Leases do not wake the daemon before there is something to do. */
TEST_OF(lease, ticks_are_planned)
{
        struct peer *x;
        uint64_t now_ms;

        ck_assert_uint_eq(lease_tick_due(b), 0);
        CREATE(.name = "x", .cgroup = "/x", .limit = 2 * MIB, .ttl_ms = 1300, .evicts = true,
               .grace_ms = 200);
        ck_assert(!broker_is_blocked(b));
        ck_assert_uint_le(lease_tick_due(b), clock_ms());
        x = join(1, "/x", "x");
        now_ms = clock_ms();
        lease_tick(b, now_ms);
        ck_assert_uint_eq(lease_tick_due(b), now_ms + 1000); /* a look at the control group */
        lease_tick(b, now_ms + 1000);
        ck_assert_uint_eq(lease_tick_due(b), now_ms + 1300);
        still_clock_pass(1300);
        lease_tick(b, clock_ms());
        ck_assert_uint_eq(lease_tick_due(b), clock_ms() + 200);
        still_clock_pass(200);
        lease_tick(b, clock_ms());
        ck_assert_uint_eq(lease_tick_due(b), clock_ms() + 1000); /* evicted */
        must_close(x);
        settle();
        ck_assert_uint_eq(lease_tick_due(b), 0);
}

/* Else a client that resumes its session again and again would never be evicted. */
LOOP_TEST_OF(lease, a_session_that_is_being_resumed_is_evicted_at_once, 2)
{
        struct peer *x;

        CREATE(.name = "x", .cgroup = "/x", .limit = 2 * MIB, .ttl_ms = 1000, .evicts = true);
        x = join(1, "/x", "x");
        x->session->state = _i == 0 ? SESSION_LISTING : SESSION_RESUMING;
        still_clock_pass(1000);
        lease_tick(b, clock_ms());
        ck_assert_ptr_nonnull(x->session->eviction);
        ck_assert(x->aborted);
        ck_assert_str_eq(session_state_name(x->session), "quarantined");
        ck_assert(!session_has_work(x->session));
        must_close(x);
}

/* ---- reloads --------------------------------------------------------------------- */

static int reload(const char *text)
{
        return reload_told(text, false, NULL);
}

TEST_OF(lease, a_reload_keeps_leases_or_ends_them)
{
        struct peer *x;

        CREATE(.name = "x", .cgroup = "/x", .limit = 16 * MIB, .reserve = 8 * MIB);
        x = join(1, "/x", "x");
        must_malloc(x, 0, 12 * MIB);
        ck_assert_int_eq(reload(CONFIG("{partition: a, limit: 6MiB}, ")), -EINVAL); /* below the reserve */
        ck_assert_int_eq(reload(CONFIG("{partition: a, limit: 8MiB}, ")), 0);
        assert_has(refused_block(x, 2 * MIB, EDQUOT), "tenant 'red'");
        ck_assert_int_eq(reload(config_text), 0);
        must_malloc(x, 0, 2 * MIB);
        ck_assert_int_eq(reload(CONFIG("")), 0);
        lease_tick(b, clock_ms()); /* which is due at once */
        ck_assert(quota_has_ended(quota_of("x")));
        ck_assert_str_eq(lease_find(b, "x")->tenant->name, "red");
        ck_assert_int_eq(reload(config_text), 0);
        ck_assert(quota_has_ended(quota_of("x")));
        must_close(x);
        ck_assert_ptr_null(lease_find(b, "x"));
}

/* A tenant's limit may fall below those of its leases, which can be changed then, too. */
TEST_OF(lease, what_is_not_set_is_not_checked)
{
        Bfcd__LeaseSet ttl = BFCD__LEASE_SET__INIT;

        CREATE(.name = "x", .cgroup = "/x", .limit = 32 * MIB);
        ck_assert_int_eq(reload(CONFIG("{partition: a, limit: 8MiB}, ")), 0);
        ck_assert_int_eq(peer_error(admin, set_sizes("x", 0, true, 4 * MIB)), 0);
        ttl.sets_ttl = true;
        ttl.ttl_ms = 5000;
        ck_assert_int_eq(peer_error(admin, ask_set(admin, "x", &ttl)), 0);
        ck_assert_uint_eq(quota_of("x")->account.limit_bytes, 32 * MIB);
        ck_assert_uint_eq(quota_of("x")->account.reserve_bytes, 4 * MIB);
        assert_has(refusal_of(admin, set_sizes("x", 16 * MIB, false, 0), EINVAL), "limit of tenant 'red'");
        assert_has(refusal_of(admin, set_sizes("x", 0, true, 10 * MIB), ENOMEM), "tenant 'red'");
        ck_assert_int_eq(peer_error(admin, set_sizes("x", 8 * MIB, false, 0)), 0);
        end("x", false, 0);
}

/* Records of extents, and of extents that sessions have, that all quotas and leases may need. */
static void count_needs(uint64_t *ret_extents, uint64_t *ret_exports)
{
        *ret_extents = *ret_exports = 0;
        for (size_t i = 0; i < b->n_tenants; i++)
                for (size_t k = 0; k < b->tenants[i].n_quotas; k++) {
                        const struct quota *q = b->tenants[i].quotas[k];
                        uint64_t n = arena_extent_room(q->arena, q->account.limit_bytes);

                        *ret_extents += n;
                        if (!quota_parent(q)) /* no lease here has a higher limit */
                                *ret_exports += n * q->max_sessions;
                }
}

TEST_OF(lease, limits_need_room_in_the_tables)
{
        uint64_t n_extents, n_exports;

        CREATE(.name = "x", .cgroup = "/x", .limit = 2 * MIB);
        count_needs(&n_extents, &n_exports);
        room = broker_room(b);
        room.n_extents = (uint32_t)n_extents;
        REFUSED(ENOSPC, "tables", .name = "y", .cgroup = "/y", .limit = 2 * MIB);
        assert_has(refusal_of(admin, set_sizes("x", 16 * MIB, false, 0), ENOSPC), "tables");
        ck_assert_uint_eq(quota_of("x")->account.limit_bytes, 2 * MIB);
        ck_assert_int_eq(peer_error(admin, set_sizes("x", 2 * MIB, true, 2 * MIB)), 0);
        room.n_quotas = 0;
        ck_assert_int_eq(peer_error(admin, set_sizes("x", 16 * MIB, false, 0)), 0);
        end("x", false, 0);
}

/* The sessions of a quota and of its leases are together at most the quota's, so leases need no more of the table. */
TEST_OF(lease, sessions_of_leases_count_once)
{
        uint64_t n_extents, n_exports;

        ck_assert_int_eq(reload(CONFIG("{partition: a, limit: 40MiB, max_sessions: 2048}, ")), 0);
        count_needs(&n_extents, &n_exports);
        room = broker_room(b);
        room.n_exports = (uint32_t)n_exports;
        CREATE(.name = "x", .cgroup = "/x", .limit = 40 * MIB);
        ck_assert_int_eq(reload(config_text), 0);
        ck_assert_int_eq(reload(CONFIG("{partition: a, limit: 40MiB, max_sessions: 2048}, ")), 0);
        ck_assert_int_eq(reload(config_text), 0);
        room.n_exports--;
        ck_assert_int_eq(reload_told(CONFIG("{partition: a, limit: 40MiB, max_sessions: 2048}, "), false,
                                     "the quotas and leases allow"),
                         -EINVAL);
        end("x", false, 0);
        room.n_quotas = 0;
}

/* However many leases it has, a tenant has no more sessions than its limit. */
TEST_OF(lease, max_sessions_is_of_a_tenant_with_its_leases)
{
        struct peer *x, *own, *more;

        ck_assert_int_eq(reload(CONFIG("{partition: a, limit: 40MiB, max_sessions: 2}, ")), 0);
        CREATE(.name = "x", .cgroup = "/x", .limit = 8 * MIB);
        CREATE(.name = "y", .cgroup = "/y", .limit = 8 * MIB);
        x = join(1, "/x", "x");
        own = join(1, "/z", "");
        more = peer_new(b, 1, false);
        more->session->who.cgroup = strdup("/y");
        assert_has(
                refusal_of(more, peer_hello(more, "", ""), EDQUOT),
                "tenant 'red' has 2 sessions in partition 'a' with its leases: its limit max_sessions is 2");
        must_close(own);
        say_hello(more);
        ck_assert_uint_eq(quota_of("y")->sessions.n, 1);
        must_close(more);
        must_close(x);
        end("x", false, 0);
        end("y", false, 0);
}

/* Each extent is an fd. The limit is what two leases need, in a partition that has more than its quotas. */
TEST_OF(lease, leases_need_fds)
{
        const struct capacity_lease both[] = { { 0, 2 * MIB }, { 0, 16 * MIB } };
        struct rlimit tight = { 0 };
        uint64_t n_both;

        ck_assert_int_eq(reload(CONFIG_BLUE("{partition: a, limit: 20MiB}, ", "limit: 2MiB")), 0);
        n_both = capacity_fds(b->own.capacity, 0, both, 2);
        ck_assert_uint_gt(n_both, capacity_fds(b->own.capacity, 0, both, 1));
        while (fd_reserve_usable_of(&tight) < n_both)
                tight.rlim_cur = ++tight.rlim_max;
        ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &tight), 0); /* of the process of this case only */
        CREATE(.name = "x", .cgroup = "/x", .limit = 2 * MIB);
        CREATE(.name = "y", .cgroup = "/y", .limit = 16 * MIB);
        REFUSED(EMFILE, "LimitNOFILE=", .name = "z", .cgroup = "/z", .limit = 16 * MIB);
        assert_has(refusal_of(admin, set_sizes("x", 16 * MIB, false, 0), EMFILE), "file descriptors");
        ck_assert_uint_eq(quota_of("x")->account.limit_bytes, 2 * MIB);
        end("x", false, 0);
        ck_assert_int_eq(peer_error(admin, set_sizes("y", 14 * MIB, false, 0)), 0);
        ck_assert_int_eq(peer_error(admin, set_sizes("y", 16 * MIB, false, 0)), 0);
        CREATE(.name = "z", .cgroup = "/z", .limit = 2 * MIB);
        end("y", false, 0);
        end("z", false, 0);
}

/* They count in their partition, at whichever place the config lists it. */
TEST_OF(lease, leases_need_fds_where_a_reload_changed_the_order_of_partitions)
{
        static const struct capacity_lease one = { 1, 16 * MIB };
        struct rlimit tight = { 0 };

        ck_assert_int_eq(
                reload("devices:\n"
                       "  - id: host\n"
                       "    size: 256MiB\n"
                       "    partitions: [{name: pre, limit: 8MiB, growth: preallocate},\n"
                       "                 {name: a, limit: 64MiB}]\n"
                       "tenants:\n"
                       "  - {name: red, match: {uid: [1, 3]}, quotas: [{partition: a, limit: 20MiB},\n"
                       "                                              {partition: pre, limit: 4MiB}]}\n"
                       "  - {name: blue, match: {uid: 2}, quotas: [{partition: a, limit: 2MiB}]}\n"),
                0);
        while (fd_reserve_usable_of(&tight) + 1 < capacity_fds(b->own.capacity, 0, &one, 1))
                tight.rlim_cur = ++tight.rlim_max;
        ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &tight), 0); /* of the process of this case only */
        REFUSED(EMFILE, "LimitNOFILE=", .name = "x", .cgroup = "/x", .limit = 16 * MIB);
}

/* Lines of the log with a text, which is written to a file from here on. */
static unsigned count_logged(int fd, const char *text)
{
        char *log = calloc(1, MIB);
        unsigned n = 0;

        ck_assert_ptr_nonnull(log);
        ck_assert_int_ge(pread(fd, log, MIB - 1, 0), 0);
        for (const char *at = log; (at = strstr(at, text)); at++)
                n++;
        free(log);
        return n;
}

TEST_OF(lease, requests_for_leases_do_not_fill_the_log)
{
        int fd = memfd_create("log", MFD_CLOEXEC), before = dup(STDERR_FILENO);
        struct rlimit tight = { 0 };

        ck_assert_int_eq(
                reload("max_sessions: 64\n" CONFIG_BLUE("{partition: a, limit: 20MiB}, ", "limit: 2MiB")), 0);
        while (fd_reserve_usable_of(&tight) < capacity_fds(b->own.capacity, b->config->max_sessions, NULL, 0))
                tight.rlim_cur = ++tight.rlim_max;
        ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &tight), 0); /* of the process of this case only */
        dup2(fd, STDERR_FILENO);
        log_open(LOG_LEVEL_WARNING);
        CREATE(.name = "x", .cgroup = "/x", .limit = 2 * MIB);
        for (unsigned i = 0; i < 100; i++) {
                ck_assert_int_eq(peer_error(admin, set_sizes("x", 16 * MIB, false, 0)), 0);
                ck_assert_int_eq(peer_error(admin, set_sizes("x", 2 * MIB, false, 0)), 0);
        }
        dup2(before, STDERR_FILENO);
        ck_assert_uint_eq(count_logged(fd, "for all leases beside max_sessions"), 1);
        close(fd);
        close(before);
        end("x", false, 0);
}

/* The sessions of a lease are told of, and evicted as the lease says. */
TEST_OF(lease, a_reload_tells_of_leases_that_it_ends)
{
        static const char without[] = CONFIG("");
        struct peer *x, *y;

        CREATE(.name = "x", .cgroup = "/x", .limit = 16 * MIB, .evicts = true, .grace_ms = 5000);
        CREATE(.name = "y", .cgroup = "/y", .limit = 16 * MIB);
        x = join(1, "/x", "x");
        must_malloc(x, 0, 2 * MIB);
        y = join(1, "/y", "y");
        must_malloc(y, 0, 2 * MIB);
        ck_assert_int_eq(reload_told(without, true, "existing sessions there (2) continue"), 0);
        ck_assert_int_eq(reload_told(without, true,
                                     "lease 'x' of tenant 'red' in partition 'a' ends; its existing "
                                     "sessions (1) are evicted after 5000ms"),
                         0);
        ck_assert(!quota_has_ended(quota_of("x")));
        ck_assert_int_eq(reload_told(without, false,
                                     "lease 'y' of tenant 'red' in partition 'a' ends; its existing "
                                     "sessions (1) continue"),
                         0);
        ck_assert_uint_le(lease_tick_due(b), clock_ms());
        lease_tick(b, clock_ms());
        ck_assert(quota_has_ended(quota_of("x")) && quota_has_ended(quota_of("y")));
        still_clock_pass(5000);
        lease_tick(b, clock_ms());
        ck_assert_ptr_nonnull(x->session->eviction);
        ck_assert_ptr_null(y->session->eviction);
        must_close(x);
        must_close(y);
}

/* ---- restarts -------------------------------------------------------------------- */

static struct session *session_with(uint64_t id)
{
        size_t i = 0;

        while (!b->sessions.table[i] || b->sessions.table[i]->id != id)
                ck_assert_uint_lt(++i, b->sessions.n_slots);
        return b->sessions.table[i];
}

/* Another daemon with this config. */
static void restart(const char *text)
{
        peer_drop(admin);
        fake_store_die(store);
        peer_broker_leave(b, config);
        b = peer_broker_kept(text, NULL, NULL, store, &config);
        (void)store_drop_rest(store);
        check();
        admin = open_admin_session();
}

/* Another daemon inherits the leases, with their sessions in them. */
TEST_OF(lease, a_restart_keeps_leases)
{
        struct peer *x, *own;
        uint64_t id, quota;

        CREATE(.name = "x", .cgroup = "/x", .limit = 16 * MIB, .reserve = 4 * MIB, .ttl_ms = 60000);
        CREATE(.name = "ended", .cgroup = "/e", .limit = 16 * MIB);
        CREATE(.name = "empty", .unit = "job.service", .limit = 6 * MIB);
        x = join(1, "/x", "x");
        x->session->is_watched = true;
        own = join(1, "/e", "ended");
        must_malloc(x, 0, 12 * MIB);
        must_malloc(own, 0, 2 * MIB);
        end("ended", false, 0);
        assert_has(refused_block(x, 18 * MIB, EDQUOT), "lease 'x'");
        id = x->session->id;
        quota = ledger_quota_at(b->ledger, quota_of("x")->index)->id;

        for (unsigned i = 0; i < 3; i++) {
                if (i == 0) {
                        peer_drop(x);
                        peer_drop(own);
                }
                restart(config_text);
                ck_assert_uint_eq(b->leases.n, 3);
                ck_assert_uint_eq(ledger_quota_at(b->ledger, quota_of("x")->index)->id, quota);
                ck_assert_uint_eq(quota_of("x")->account.own_bytes, 12 * MIB);
                ck_assert_uint_eq(quota_of("x")->account.limit_bytes, 16 * MIB);
                ck_assert_uint_eq(quota_of("x")->account.reserve_bytes, 4 * MIB);
                ck_assert_uint_eq(quota_parent(quota_of("x"))->account.charged_bytes, 14 * MIB);
                ck_assert_uint_eq(quota_parent(quota_of("x"))->account.limit_bytes, 40 * MIB);
                ck_assert_uint_eq(quota_life(quota_of("x"))->n_over_quota, 1);
                ck_assert_uint_ne(lease_record(b, lease_find(b, "x"))->ends_ms, 0);
                ck_assert(quota_has_ended(quota_of("ended")));
                ck_assert_uint_eq(quota_of("empty")->account.limit_bytes, 6 * MIB);
                ck_assert_str_eq(session_with(id)->shares[0].quota->lease, "x");
        }
        end_sessions();
        settle();
        ck_assert_ptr_null(lease_find(b, "ended"));
        end("x", false, 0);
        end("empty", false, 0);
}

/* A daemon was killed while it made a lease: its quota has no lease and no memory. */
TEST_OF(lease, a_restart_forgets_a_lease_that_was_not_made)
{
        struct ledger_quota facts = { .tenant = "red", .partition = "a", .is_lease = 1 };
        struct ledger_counts before, after;
        uint32_t index;

        CREATE(.name = "x", .cgroup = "/x", .limit = 16 * MIB);
        ledger_count(b->ledger, &before);
        facts.extent_bytes = ledger_quota_at(b->ledger, quota_of("x")->index)->extent_bytes;
        ck_assert_int_eq(ledger_quota_add(b->ledger, &facts, &index), 0);
        restart(config_text);
        ledger_count(b->ledger, &after);
        ck_assert_uint_eq(after.n_quotas, before.n_quotas);
        ck_assert_uint_eq(after.n_leases, 1);
        end("x", false, 0);
}

/* Its session is not in the tenant's quota instead, without the limit of the lease. */
TEST_OF(lease, a_session_of_a_closed_lease_gets_no_memory)
{
        struct peer *x;
        uint64_t id;

        CREATE(.name = "x", .cgroup = "/x", .limit = 16 * MIB);
        x = join(1, "/x", "x");
        x->session->is_watched = true;
        id = x->session->id;
        ledger_quota_close(b->ledger, quota_of("x")->index);
        peer_drop(x);
        restart(config_text);
        ck_assert_ptr_null(lease_find(b, "x"));
        ck_assert(session_with(id)->shares[0].is_barred);
        end_sessions();
        settle();
}

/* Its bytes are charged to the tenant as long as it is in the ledger, and no longer. */
TEST_OF(lease, the_charge_of_a_closed_lease_ends)
{
        struct peer *x, *own;

        CREATE(.name = "x", .cgroup = "/x", .limit = 16 * MIB);
        own = join(1, "/", "");
        must_malloc(own, 0, 4 * MIB);
        x = join(1, "/x", "x");
        must_malloc(x, 0, 6 * MIB);
        ledger_quota_close(b->ledger, quota_of("x")->index);
        peer_drop(own);
        peer_drop(x);
        for (unsigned i = 0; i < 2; i++) {
                restart(config_text);
                ck_assert_uint_eq(b->tenants[0].quotas[0]->account.charged_bytes, (i == 0 ? 10 : 4) * MIB);
                ck_assert_ptr_null(lease_find(b, "x"));
        }
        end_sessions();
        settle();
}

/* A lease that cannot be restored ends, its sessions continue, and the daemon starts. */
TEST_OF(lease, a_restart_ends_a_lease_with_a_wrong_limit)
{
        struct peer *x;
        uint64_t id;

        CREATE(.name = "x", .cgroup = "/x", .limit = 16 * MIB, .reserve = 4 * MIB);
        x = join(1, "/x", "x");
        x->session->is_watched = true;
        must_malloc(x, 0, 6 * MIB);
        id = x->session->id;
        ledger_session_at(b->ledger, x->session->index)->start_time = 1;
        ledger_session_at(b->ledger, x->session->index)->can_resume = LEDGER_CAN_RESUME;
        peer_drop(x);
        lease_record(b, lease_find(b, "x"))->limit_bytes = UINT64_C(1) << 50;
        for (unsigned i = 0; i < 2; i++) {
                restart(config_text);
                ck_assert(quota_has_ended(quota_of("x")));
                ck_assert_uint_eq(quota_of("x")->account.own_bytes, 6 * MIB);
                ck_assert_uint_eq(b->partitions[0].pool.promised_bytes, 0);
                ck_assert_str_eq(session_with(id)->shares[0].quota->lease, "x");
                ck_assert(session_is_suspended(session_with(id))); /* it has lost nothing */
        }
        end_sessions();
        settle();
        ck_assert_ptr_null(lease_find(b, "x"));
        ck_assert_str_eq(gone.name, "x");
        ck_assert_uint_eq(gone.peak_bytes, 6 * MIB);
}

/* The partition preallocates now: it has no memory for leases. Those that exist end, and only quotas of tenants are
 * backed. */
TEST_OF(lease, a_restart_with_preallocation_ends_leases)
{
        static const char preallocates[] =
                "devices:\n"
                "  - id: host\n"
                "    size: 256MiB\n"
                "    partitions: [{name: a, limit: 64MiB, growth: preallocate}]\n"
                "tenants:\n"
                "  - {name: red, match: {uid: [1, 3]}, quotas: [{partition: a, limit: 40MiB}]}\n";
        struct peer *x, *own;

        CREATE(.name = "x", .cgroup = "/x", .limit = 16 * MIB);
        CREATE(.name = "idle", .cgroup = "/idle", .limit = 16 * MIB, .reserve = 8 * MIB);
        x = join(1, "/x", "x");
        x->session->is_watched = true;
        must_malloc(x, 0, 12 * MIB);
        peer_drop(x);
        restart(preallocates);
        ck_assert_uint_eq(quota_of("x")->account.own_bytes, 12 * MIB);
        ck_assert_uint_eq(quota_of("idle")->account.own_bytes, 0);
        ck_assert_uint_eq(quota_parent(quota_of("x"))->account.charged_bytes, 40 * MIB - 8 * MIB);
        lease_tick(b, clock_ms());
        ck_assert(quota_has_ended(quota_of("x")));
        settle();
        ck_assert_ptr_null(lease_find(b, "idle"));
        end_sessions();
        settle();
        ck_assert_ptr_null(lease_find(b, "x"));
        own = open_session(1);
        for (unsigned i = 0; i < 20; i++)
                must_malloc(own, 0, 2 * MIB); /* the rest is made on demand */
        must_close(own);
}

/* A kill between the two stores of `lease set`, or a damaged record, does not stop the next start. */
TEST_OF(lease, a_restart_repairs_sizes)
{
        CREATE(.name = "torn", .cgroup = "/torn", .limit = 20 * MIB, .reserve = 16 * MIB);
        CREATE(.name = "none", .cgroup = "/none", .limit = 4 * MIB);
        CREATE(.name = "odd", .cgroup = "/odd", .limit = 4 * MIB, .reserve = 2 * MIB);
        lease_record(b, lease_find(b, "torn"))->limit_bytes = 10 * MIB;
        lease_record(b, lease_find(b, "none"))->limit_bytes = 0;
        lease_record(b, lease_find(b, "odd"))->reserve_bytes = MIB;
        restart(config_text);
        ck_assert_ptr_null(lease_find(b, "none"));
        ck_assert_ptr_null(lease_find(b, "odd"));
        ck_assert_uint_eq(quota_of("torn")->account.limit_bytes, 10 * MIB);
        ck_assert_uint_eq(quota_of("torn")->account.reserve_bytes, 10 * MIB);
        ck_assert_uint_eq(lease_record(b, lease_find(b, "torn"))->reserve_bytes, 10 * MIB);
        end("torn", false, 0);
}

/* Changes the lease `x` up and down. */
static void be_traced(void)
{
        if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) < 0)
                _exit(77);
        raise(SIGSTOP);
        (void)set_sizes("x", 16 * MIB, true, 16 * MIB);
        (void)set_sizes("x", 4 * MIB, true, 4 * MIB);
        (void)set_sizes("x", 6 * MIB, true, 2 * MIB);
        _exit(0);
}

/* However many instructions of `lease set` were executed, the ledger has a reserve within the limit. */
TEST_OF(lease, a_change_can_end_at_any_instruction)
{
        struct ledger_lease *record;
        unsigned n_steps = 0, n_limits = 0;
        uint64_t limit = 8 * MIB;
        int status;
        pid_t pid;

        CREATE(.name = "x", .cgroup = "/x", .limit = 8 * MIB, .reserve = 2 * MIB);
        record = lease_record(b, lease_find(b, "x"));
        pid = fork();
        if (pid == 0)
                be_traced();
        while (waitpid(pid, &status, 0) == pid && WIFSTOPPED(status)) {
                ck_assert_uint_le(record->reserve_bytes, record->limit_bytes);
                n_limits += record->limit_bytes != limit;
                limit = record->limit_bytes;
                n_steps++;
                ck_assert_int_eq(ptrace(PTRACE_SINGLESTEP, pid, NULL, NULL), 0);
        }
        ck_assert(WIFEXITED(status));
        if (WEXITSTATUS(status) == 77)
                fputs("# skipped: processes cannot be traced here\n", stderr);
        else
                ck_assert_uint_eq(n_limits, 3);
        fprintf(stderr, "# %u steps\n", n_steps);
        record->reserve_bytes = 2 * MIB; /* as this process has them */
        record->limit_bytes = 8 * MIB;
        end("x", false, 0);
}

/* A reserve is lowered to what the config leaves for it, so that no account promises what it has not. */
TEST_OF(lease, a_restart_lowers_reserves_to_the_config)
{
        struct peer *x = NULL, *blue;

        CREATE(.name = "x", .cgroup = "/x", .limit = 32 * MIB, .reserve = 32 * MIB);
        CREATE(.name = "y", .cgroup = "/y", .limit = 8 * MIB, .reserve = 8 * MIB);
        x = join(1, "/x", "x");
        x->session->is_watched = true;
        must_malloc(x, 0, 8 * MIB);
        peer_drop(x);
        restart(CONFIG_BLUE("{partition: a, limit: 12MiB}, ", "limit: 64MiB, reserve: 46MiB"));
        ck_assert_uint_eq(quota_of("x")->account.reserve_bytes, 12 * MIB);
        ck_assert_uint_eq(lease_record(b, lease_find(b, "x"))->reserve_bytes, 12 * MIB);
        ck_assert_uint_eq(quota_of("x")->account.limit_bytes, 32 * MIB);
        ck_assert_uint_eq(quota_of("y")->account.reserve_bytes, 0);
        restart(CONFIG_BLUE("{partition: a, limit: 40MiB}, ", "limit: 64MiB, reserve: 54MiB"));
        ck_assert_uint_eq(quota_of("x")->account.reserve_bytes, 10 * MIB);
        blue = open_session(2);
        must_malloc(blue, 0, 54 * MIB);
        refused_block(blue, 2 * MIB, ENOMEM);
        ck_assert_uint_eq(b->partitions[0].pool.committed_bytes, 64 * MIB);
        must_close(blue);
        restart(CONFIG_BLUE("{partition: a, limit: 6MiB}, ", "limit: 64MiB"));
        ck_assert_uint_eq(quota_of("x")->account.reserve_bytes, 6 * MIB); /* of 8 MiB charged */
        end_sessions();
        end("x", false, 0);
        end("y", false, 0);
}

/* What is wanted of leases counts in each account above, and nothing has changed before it is applied. */
TEST_OF(lease, a_wanted_tree_is_summed_up)
{
        const struct quota *red;
        struct tree tree;
        struct tree_node *x, *y, *pool;

        CREATE(.name = "x", .cgroup = "/x", .limit = 32 * MIB, .reserve = 8 * MIB);
        red = quota_parent(quota_of("x"));
        ck_assert_int_eq(tree_new(b, NULL, 1, &tree), 0);
        x = tree_find(&tree, quota_of("x"));
        pool = x->parent->parent;
        ck_assert_ptr_eq(x->parent->quota, red);
        y = tree_add(&tree, x->parent, &(struct quota_limits){ 64 * MIB, 20 * MIB, 1, 1 });
        x->to.reserve_bytes = 14 * MIB;
        tree_sum(&tree);
        ck_assert_uint_eq(x->parent->promised_bytes, 34 * MIB);
        ck_assert_uint_eq(x->parent->committed_bytes, 34 * MIB);
        ck_assert_uint_eq(pool->committed_bytes, 34 * MIB);
        ck_assert_uint_gt(y->n_extents, x->parent->n_extents); /* a session can have more of them there */
        ck_assert_uint_eq(x->parent->n_extents_leased, y->n_extents);
        ck_assert_ptr_null(tree_misfit(y));
        y->to.reserve_bytes = 28 * MIB;
        tree_sum(&tree);
        ck_assert_ptr_eq(tree_misfit(y), &red->account);
        x->parent->to.limit_bytes = 48 * MIB;
        ck_assert_ptr_null(tree_misfit(y));
        pool->to.limit_bytes = 40 * MIB;
        ck_assert_ptr_eq(tree_misfit(y), pool->account);
        tree_free(&tree);
        ck_assert_uint_eq(red->account.promised_bytes, 8 * MIB);
        ck_assert_uint_eq(red->account.limit_bytes, 40 * MIB);
        end("x", false, 0);
}
