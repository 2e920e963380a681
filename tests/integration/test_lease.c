/* Leases with a real daemon: bfcctl lease, limits at every level, restarts, the end with and without evictions, and
 * processes that leave their session.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "tests/integration/json.h"
#include "tests/integration/kept.h"
#include "tests/integration/tools.h"

static const struct rig_config config = {
        .tenants =
                TENANT("red", "@UID@", "train, limit: 64MiB") TENANT("blue", "@UID@", "train, limit: 128MiB"),
};

static struct kept *k;

static void setup(void)
{
        k = kept_start(&config);
}

static void teardown(void)
{
        kept_stop(k);
}

FIXTURE(lease, setup, teardown);

/* bfcctl lease WORD...; it succeeds. */
#define LEASE(...) free(ctl_text(k->rig, WORDS("lease", __VA_ARGS__)))

/* The list as it is printed; the caller releases it. */
static json_t *list_leases(void)
{
        json_t *document, *rows;
        char *out;

        ck_assert_int_eq(ctl(k->rig->monitor_socket, WORDS("--json", "lease", "list"), &out, NULL), 0);
        document = json_loads(out, 0, NULL);
        rows = json_incref(json_object_get(document, "leases"));
        json_decref(document);
        free(out);
        return rows;
}

static size_t n_leases(void)
{
        json_t *rows = list_leases();
        size_t n = json_array_size(rows);

        json_decref(rows);
        return n;
}

static char *own_pid(void)
{
        static char text[32];

        snprintf(text, sizeof(text), "%d", (int)getpid());
        return text;
}

/* ---- a job: a process that allocates when it is told ------------------------------- */

struct job {
        pid_t pid;
        int to, from;
};

enum what { MALLOC, FREE, CHARGE, UNCHARGE, DISCONNECT };

struct order {
        uint64_t n_bytes; /* 0: exit */
        enum what what;   /* FREE: the last block */
        uint32_t wait_ms; /* of a CHARGE */
};

struct answer {
        pid_t pid;
        int error;
        char text[1000];
};

/* Takes memory of the GPU by the driver. */
static void take_by_driver(uint64_t n_bytes)
{
        void *driver = dlopen("libcuda.so.1", RTLD_NOW);
        int (*init)(unsigned) = (int (*)(unsigned))dlsym(driver, "cuInit");
        int (*retain)(void **, int) = (int (*)(void **, int))dlsym(driver, "cuDevicePrimaryCtxRetain");
        int (*set)(void *) = (int (*)(void *))dlsym(driver, "cuCtxSetCurrent");
        int (*alloc)(uint64_t *, size_t) = (int (*)(uint64_t *, size_t))dlsym(driver, "cuMemAlloc_v2");
        void *context;
        uint64_t ptr;

        REQUIRE(driver && init && retain && set && alloc, "the driver");
        REQUIRE(init(0) == 0 && retain(&context, 0) == 0 && set(context) == 0 && alloc(&ptr, n_bytes) == 0,
                "cuMemAlloc(%llu)", (unsigned long long)n_bytes);
}

static int job_do(bfc_client **client, const struct order *order, void **block)
{
        int r;

        switch (order->what) {
        case FREE:
                return bfc_free(*client, *block);
        case CHARGE:
                r = bfc_charge(*client, NULL, order->n_bytes, order->wait_ms);
                if (r == 0 && rig_device() != ON_HOST)
                        take_by_driver(order->n_bytes);
                return r;
        case UNCHARGE:
                return bfc_uncharge(*client, NULL, order->n_bytes);
        case DISCONNECT:
                bfc_disconnect(*client);
                *client = NULL;
                return 0;
        default:
                return bfc_malloc_flags(*client, NULL, order->n_bytes, BFC_WHOLE, block);
        }
}

static void job_work(int from, int to)
{
        bfc_client *client = child_client_with(.socket = k->rig->socket, .tenant = "red");
        struct answer answer = { .pid = getpid() };
        struct order order;
        void *block = NULL;

        REQUIRE(write(to, &answer, sizeof(answer)) == sizeof(answer), "write");
        while (read(from, &order, sizeof(order)) == sizeof(order) && order.n_bytes > 0) {
                answer.error = job_do(&client, &order, &block);
                snprintf(answer.text, sizeof(answer.text), "%s", answer.error < 0 ? bfc_last_error() : "");
                REQUIRE(write(to, &answer, sizeof(answer)) == sizeof(answer), "write");
        }
        bfc_disconnect(client);
        _exit(0);
}

static void job_read(const struct job *j, struct answer *ret)
{
        ck_assert_int_eq(read(j->from, ret, sizeof(*ret)), sizeof(*ret));
}

/* is_orphan: its process is a child of one that has exited, in a session of its own. */
static void job_start(struct job *j, bool is_orphan)
{
        int to[2], from[2];
        struct answer ready;

        ck_assert_int_eq(pipe2(to, O_CLOEXEC), 0);
        ck_assert_int_eq(pipe2(from, O_CLOEXEC), 0);
        j->pid = fork();
        if (j->pid == 0) {
                close(to[1]);
                close(from[0]);
                if (is_orphan && (setsid() < 0 || fork() > 0))
                        _exit(0);
                job_work(to[0], from[1]);
        }
        close(to[0]);
        close(from[1]);
        j->to = to[1];
        j->from = from[0];
        if (is_orphan)
                ck_assert_int_eq(waitpid(j->pid, NULL, 0), j->pid);
        job_read(j, &ready);
        j->pid = ready.pid; /* an orphan is adopted by this subreaper */
}

static int job_order(const struct job *j, struct order order, struct answer *ret)
{
        ck_assert_int_eq(write(j->to, &order, sizeof(order)), sizeof(order));
        job_read(j, ret);
        return ret->error;
}

static int job_malloc(const struct job *j, uint64_t n_bytes, struct answer *ret)
{
        return job_order(j, (struct order){ .n_bytes = n_bytes }, ret);
}

static int job_free(const struct job *j, struct answer *ret)
{
        return job_order(j, (struct order){ .n_bytes = 1, .what = FREE }, ret);
}

static void job_end(struct job *j)
{
        close(j->to);
        close(j->from);
        ck_assert_int_eq(waitpid(j->pid, NULL, 0), j->pid);
}

/* ---- limits ------------------------------------------------------------------------ */

TEST_OF(lease, limits_hold_at_every_level)
{
        bfc_client *own, *blue;
        struct answer answer;
        struct job job;
        void *p;

        own = client_with(.socket = k->rig->socket, .tenant = "red"); /* before the lease: not in it */
        LEASE("create", "one", "--tenant", "red", "--partition", "train", "--limit", "32MiB", "--pid",
              own_pid());
        LEASE("create", "two", "--tenant", "red", "--partition", "train", "--limit", "64MiB", "--cgroup",
              "/none");
        ctl_refuses(k->rig,
                    WORDS("lease", "create", "one", "--tenant", "red", "--partition", "train", "--limit",
                          "2MiB", "--user", "0"),
                    1, "lease 'one' exists already");
        ctl_refuses(k->rig, WORDS("lease", "create", "x", "--tenant", "red", "--limit", "2MiB"), 2,
                    "--partition");
        ck_assert_uint_eq(n_leases(), 2);
        job_start(&job, false);
        ck_assert_int_eq(job_malloc(&job, 34 * MIB, &answer), -EDQUOT);
        ck_assert_msg(strstr(answer.text, "lease 'one' of tenant 'red'"), "%s", answer.text);
        ck_assert_int_eq(job_malloc(&job, 30 * MIB, &answer), 0);
        ctl_says(k->rig, WORDS("explain", "train"), "Lease one of tenant red in partition train\n");
        ctl_says(k->rig, WORDS("--json", "explain", "train"), "\"lease\": \"one\"");
        ck_assert_ok(bfc_malloc_flags(own, NULL, 32 * MIB, BFC_WHOLE, &p));
        ck_assert_int_eq(bfc_malloc_flags(own, NULL, 32 * MIB, BFC_WHOLE, &p), -EDQUOT);
        ck_assert_msg(strstr(bfc_last_error(), "tenant 'red' is at its limit"), "%s", bfc_last_error());
        LEASE("set", "one", "--limit", "64MiB");
        ck_assert_int_eq(job_malloc(&job, 32 * MIB, &answer), -EDQUOT);
        ck_assert_msg(strstr(answer.text, "tenant 'red' is at its limit"), "%s", answer.text);
        blue = client_with(.socket = k->rig->socket, .tenant = "blue");
        ck_assert_int_eq(bfc_malloc_flags(blue, NULL, 96 * MIB, BFC_WHOLE, &p), -ENOMEM);
        bfc_disconnect(blue);
        bfc_disconnect(own);
        job_end(&job);
        LEASE("end", "one");
        LEASE("end", "two");
        ck_assert(WAIT_FOR(n_leases() == 0, SETTLE_MS));
}

/* ---- the end ------------------------------------------------------------------------- */

TEST_OF(lease, the_end_waits_or_evicts)
{
        struct answer answer;
        struct job job;
        char *out;

        LEASE("create", "one", "--tenant", "red", "--partition", "train", "--limit", "32MiB", "--pid",
              own_pid());
        job_start(&job, false);
        ck_assert_int_eq(job_malloc(&job, 8 * MIB, &answer), 0);
        out = ctl_text(k->rig, WORDS("lease", "end", "one"));
        text_has(out, "1 session still has 8.0 MiB");
        ck_assert_int_eq(job_malloc(&job, 32 * MIB, &answer), -EDQUOT);
        ck_assert_msg(strstr(answer.text, "has ended"), "%s", answer.text);
        ck_assert_uint_eq(n_leases(), 1);
        out = ctl_text(k->rig, WORDS("lease", "end", "one", "--evict", "--grace", "1h"));
        text_has(out, "1 session still has 8.0 MiB and is evicted in 1h 00m:\n  session ");
        out = ctl_text(k->rig, WORDS("lease", "end", "one", "--evict"));
        text_has(out, "1 session still has 8.0 MiB and is evicted now:\n  session ");
        ck_assert(WAIT_FOR(job_malloc(&job, MIB, &answer) == -EIDRM, SETTLE_MS));
        job_end(&job);
        ck_assert(WAIT_FOR(n_leases() == 0, SETTLE_MS));

        LEASE("create", "short", "--tenant", "red", "--partition", "train", "--limit", "32MiB", "--user", "0",
              "--ttl", "50ms");
        ck_assert(WAIT_FOR(n_leases() == 0, SETTLE_MS));
}

/* The daemon waits for both with one timer: what is kept for long does not delay the end of a lease. */
TEST_OF(lease, a_lease_ends_beside_a_kept_block)
{
        const struct bfc_publish_options keep = { .struct_size = sizeof(keep), .keep_ms = 3600000 };
        bfc_client *client = client_with(.socket = k->rig->socket, .tenant = "red");
        void *p;

        ck_assert_ok(bfc_malloc_flags(client, NULL, 4096, BFC_WHOLE, &p));
        ck_assert_ok(bfc_publish_with(client, p, "weights", &keep));
        ck_assert_ok(bfc_detach(client, p));
        LEASE("create", "short", "--tenant", "red", "--partition", "train", "--limit", "32MiB", "--user", "0",
              "--ttl", "50ms");
        ck_assert(WAIT_FOR(n_leases() == 0, SETTLE_MS));
        ck_assert_ok(bfc_forget(client, "weights")); /* it was there still */
        bfc_disconnect(client);
}

/* A process that left its session and its parent is in the lease as long as a subreaper is above it. */
TEST_OF(lease, orphans_stay_in_a_process_tree)
{
        struct answer answer;
        struct job job;

        ck_assert_int_eq(prctl(PR_SET_CHILD_SUBREAPER, 1), 0);
        LEASE("create", "tree", "--tenant", "red", "--partition", "train", "--limit", "8MiB", "--pid",
              own_pid());
        job_start(&job, true);
        ck_assert_int_eq(job_malloc(&job, 10 * MIB, &answer), -EDQUOT);
        ck_assert_msg(strstr(answer.text, "lease 'tree'"), "%s", answer.text);
        job_end(&job);
        LEASE("end", "tree");
        ck_assert(WAIT_FOR(n_leases() == 0, SETTLE_MS));
}

TEST_OF(lease, a_lease_ends_with_its_process)
{
        char pid[32];
        pid_t child = fork();

        if (child == 0) {
                pause();
                _exit(0);
        }
        snprintf(pid, sizeof(pid), "%d", (int)child);
        LEASE("create", "one", "--tenant", "red", "--partition", "train", "--limit", "32MiB", "--pid", pid);
        ck_assert_uint_eq(n_leases(), 1);
        kill(child, SIGKILL);
        ck_assert_int_eq(waitpid(child, NULL, 0), child);
        ck_assert(WAIT_FOR(n_leases() == 0, SETTLE_MS));
}

struct group {
        char path[128], name[64];
};

/* A control group below the root, in the hierarchy where the daemon looks first. False: none can be made here. */
static bool make_group(struct group *g)
{
        static const char *const roots[] = { "/sys/fs/cgroup/systemd", "/sys/fs/cgroup/unified",
                                             "/sys/fs/cgroup" };

        snprintf(g->name, sizeof(g->name), "/bfcd-test-%d", (int)getpid());
        for (size_t i = 0; i < 3; i++) {
                snprintf(g->path, sizeof(g->path), "%s%s", roots[i], g->name);
                if (mkdir(g->path, 0755) == 0)
                        return true;
        }
        fputs("# skipped: no control group can be made here\n", stderr);
        return false;
}

static bool join_group(const struct group *g)
{
        char path[160], pid[16];
        int fd, n = snprintf(pid, sizeof(pid), "%d", (int)getpid());
        bool ok;

        snprintf(path, sizeof(path), "%s/cgroup.procs", g->path);
        fd = open(path, O_WRONLY | O_CLOEXEC);
        ok = fd >= 0 && write(fd, pid, (size_t)n) == n;
        close(fd);
        return ok;
}

/* A folder where the daemon looks for control groups is enough. No assertion fails while it exists. */
TEST_OF(lease, a_lease_ends_with_its_control_group)
{
        struct group g;
        size_t n_made;
        int status;

        if (!make_group(&g))
                return;
        status = ctl(k->rig->admin_socket,
                     WORDS("lease", "create", "group", "--tenant", "red", "--partition", "train", "--limit",
                           "32MiB", "--cgroup", g.name),
                     NULL, NULL);
        n_made = n_leases();
        ck_assert_int_eq(rmdir(g.path), 0);
        ck_assert_int_eq(status, 0);
        ck_assert_uint_eq(n_made, 1);
        ck_assert(WAIT_FOR(n_leases() == 0, SETTLE_MS));
}

/* A child that enters the group between two hellos. */
static void hello_in_group(void *arg)
{
        const struct group *g = arg;
        Bfcd__Block block;
        struct raw *raw;

        REQUIRE(raw_open(k->rig->socket, &raw) == 0, "open");
        REQUIRE(raw_hello(raw, "none", "train") == -EACCES, "there is a tenant 'none'");
        REQUIRE(join_group(g), "%s: %s", g->path, strerror(errno));
        REQUIRE(raw_hello(raw, "red", "train") == 0, "%s", raw_refusal());
        REQUIRE(raw_malloc(raw, 0, 4 * MIB, &block) == -EDQUOT, "it is not in the lease");
        REQUIRE(strstr(raw_refusal(), "lease 'group'"), "%s", raw_refusal());
        raw_goodbye(raw);
        raw_close(raw);
}

/* The control group at the hello counts, not that at an earlier one of the connection. */
TEST_OF(lease, the_control_group_is_read_at_the_hello)
{
        struct group g;
        int status;

        if (!make_group(&g))
                return;
        LEASE("create", "group", "--tenant", "red", "--partition", "train", "--limit", "2MiB", "--cgroup",
              g.name);
        ck_assert_int_gt(waitpid(child_start(hello_in_group, &g), &status, 0), 0);
        ck_assert_int_eq(rmdir(g.path), 0);
        ck_assert_int_eq(status, 0);
        ck_assert(WAIT_FOR(n_leases() == 0, SETTLE_MS));
}

/* ---- restarts ------------------------------------------------------------------------ */

TEST_OF(lease, kills_of_the_daemon_keep_leases_and_sessions)
{
        struct answer answer;
        struct job job;

        LEASE("create", "one", "--tenant", "red", "--partition", "train", "--limit", "32MiB", "--reserve",
              "4MiB", "--pid", own_pid());
        LEASE("create", "idle", "--tenant", "blue", "--partition", "train", "--limit", "16MiB", "--cgroup",
              "/none");
        job_start(&job, false);
        ck_assert_int_eq(job_malloc(&job, 16 * MIB, &answer), 0);
        for (unsigned i = 0; i < 3; i++) {
                kept_restart(k, i == 1 ? SIGTERM : SIGKILL);
                ck_assert_uint_eq(n_leases(), 2);
                ck_assert(WAIT_FOR(kept_all_are(k, "live", 1), SETTLE_MS));
                ctl_says(k->rig, WORDS("-w", "sessions"), "one");
                ctl_says(k->rig, WORDS("lease", "list"), "16.0 MiB");
                ck_assert_int_eq(job_malloc(&job, 18 * MIB, &answer), -EDQUOT);
                ck_assert_msg(strstr(answer.text, "lease 'one'"), "%s", answer.text);
        }
        job_end(&job);
        LEASE("end", "one");
        LEASE("end", "idle");
        ck_assert(WAIT_FOR(n_leases() == 0, SETTLE_MS));
}

static int job_charge(const struct job *j, enum what what, uint64_t n_bytes, struct answer *ret)
{
        return job_order(j, (struct order){ .n_bytes = n_bytes, .what = what }, ret);
}

static bool is_charged(uint64_t n_bytes)
{
        Bfcd__Statistics f = rig_stats(k->rig, "red", "train");

        return f.bytes_direct == n_bytes && f.bytes_reserved == n_bytes;
}

/* Two processes of a lease, of which one is killed while there is no daemon, and the other one leaves before its end. */
TEST_OF(lease, direct_charges_count_together_and_end_with_their_processes)
{
        struct answer answer;
        struct job a, other;

        LEASE("create", "one", "--tenant", "red", "--partition", "train", "--limit", "32MiB", "--pid",
              own_pid());
        job_start(&a, false);
        job_start(&other, false);
        ck_assert_int_eq(job_charge(&a, CHARGE, 20 * MIB + 1, &answer), 0);
        ck_assert_int_eq(job_charge(&other, CHARGE, 12 * MIB, &answer), -EDQUOT);
        ck_assert_msg(strstr(answer.text, "lease 'one'") && strstr(answer.text, "20.0 MiB charged directly"),
                      "%s", answer.text);
        ck_assert_int_eq(job_charge(&other, CHARGE, 11 * MIB, &answer), 0);
        ck_assert_int_eq(job_malloc(&other, 2 * MIB, &answer), -EDQUOT);
        kept_restart(k, SIGKILL);
        ck_assert(WAIT_FOR(kept_all_are(k, "live", 2), SETTLE_MS));
        ck_assert(is_charged(31 * MIB + 1));
        ck_assert_int_eq(job_charge(&other, CHARGE, MIB, &answer), -EDQUOT);
        ck_assert_int_eq(job_charge(&a, UNCHARGE, 1, &answer), 0);
        ck_assert_int_eq(job_charge(&a, UNCHARGE, 20 * MIB + 1, &answer), -EINVAL);
        ctl_says(k->rig, WORDS("-w", "sessions"), "20.0 MiB");
        kept_away(k, SIGKILL);
        ck_assert_int_eq(kill(a.pid, SIGKILL), 0);
        kept_back(k);
        ck_assert(WAIT_FOR(is_charged(11 * MIB), SETTLE_MS));
        ck_assert_int_eq(job_order(&other, (struct order){ 20 * MIB, CHARGE, 60000 }, &answer), 0);
        ck_assert_int_eq(job_charge(&other, DISCONNECT, 1, &answer), 0);
        ck_assert(WAIT_FOR(kept_all_are(k, "closing", 1), SETTLE_MS));
        kept_restart(k, SIGTERM);
        ck_assert(is_charged(31 * MIB));
        ck_assert_uint_eq(n_leases(), 1);
        LEASE("end", "one");
        job_end(&other);
        ck_assert(WAIT_FOR(is_charged(0), SETTLE_MS));
        job_end(&a);
        ck_assert(WAIT_FOR(n_leases() == 0, SETTLE_MS));
}

static json_int_t refusals_of(const char *lease)
{
        json_t *rows = list_leases(), *row;
        json_int_t n = -1;
        size_t i;

        json_array_foreach(rows, i, row)
        {
                if (strcmp(json_string_value(json_object_get(row, "name")), lease) == 0)
                        n = json_integer_value(json_object_get(row, "num_refusals"));
        }
        json_decref(rows);
        return n;
}

/* Also of a lease that has ended and had sessions. */
TEST_OF(lease, a_restart_keeps_the_statistics_of_a_lease)
{
        struct answer answer;
        struct job job, last;

        LEASE("create", "one", "--tenant", "red", "--partition", "train", "--limit", "32MiB", "--pid",
              own_pid());
        job_start(&job, false);
        ck_assert_int_eq(job_malloc(&job, 16 * MIB, &answer), 0);
        ck_assert_int_eq(job_malloc(&job, 20 * MIB, &answer), -EDQUOT);
        LEASE("create", "two", "--tenant", "red", "--partition", "train", "--limit", "32MiB", "--pid",
              own_pid());
        job_start(&last, false);
        ck_assert_int_eq(job_malloc(&last, 2 * MIB, &answer), 0);
        LEASE("end", "two");
        ck_assert_int_eq(refusals_of("one"), 1);
        kept_restart(k, SIGKILL);
        ck_assert_int_eq(refusals_of("one"), 1);
        job_end(&last); /* which has the pipes of the other one, too */
        job_end(&job);
        LEASE("end", "one");
        ck_assert(WAIT_FOR(n_leases() == 0, SETTLE_MS));
        ck_assert(kept_logged(k, "lease 'one' of tenant 'red' in partition 'train' ended: "));
        ck_assert(kept_logged(k, "peak 16.0 MiB in use"));
        ck_assert(kept_logged(k, "lease 'two' of tenant 'red' in partition 'train' ended: "));
        ck_assert(kept_logged(k, "peak 2.0 MiB in use"));
}

TEST_OF(lease, a_restart_without_the_tenant_ends_its_leases)
{
        static const struct rig_config without = { .tenants =
                                                           TENANT("blue", "@UID@", "train, limit: 128MiB") };
        struct answer answer;
        struct job job;

        LEASE("create", "one", "--tenant", "red", "--partition", "train", "--limit", "32MiB", "--reserve",
              "8MiB", "--pid", own_pid());
        LEASE("create", "idle", "--tenant", "red", "--partition", "train", "--limit", "32MiB", "--pid",
              own_pid());
        job_start(&job, false);
        ck_assert_int_eq(job_malloc(&job, 8 * MIB, &answer), 0);
        kept_away(k, SIGTERM);
        rig_rewrite_config(k->rig, &without);
        kept_back(k);
        ck_assert(WAIT_FOR(kept_all_are(k, "live", 1), SETTLE_MS));
        ck_assert_int_eq(job_malloc(&job, 4 * MIB, &answer), -EDQUOT);
        ck_assert_msg(strstr(answer.text, "has ended"), "%s", answer.text);
        job_end(&job);
        ck_assert(WAIT_FOR(n_leases() == 0, SETTLE_MS));
        ck_assert(kept_logged(k, "lease 'idle' of tenant 'red' in partition 'train' ended: "));
        rig_rewrite_config(k->rig, &config); /* as many fds as at the start */
        kept_restart(k, SIGTERM);
}

/* How a lease ends whose session goes on, with an extent and no block. */
static const struct rig_config without_tenant = { .tenants =
                                                          TENANT("blue", "@UID@", "train, limit: 128MiB") };
static const struct rig_config lower_limits = {
        .tenants = TENANT("red", "@UID@", "train, limit: 2MiB") TENANT("blue", "@UID@", "train, limit: 8MiB"),
};
static const struct {
        const char *name;
        bool by_operator, by_exit, by_exit_while_away;
        const struct rig_config *config; /* of the next daemon */
} ends[] = {
        { .name = "an operator ends it", .by_operator = true },
        { .name = "its process exits", .by_exit = true },
        { .name = "its process exits while no daemon runs", .by_exit_while_away = true },
        { .name = "the config loses its tenant", .config = &without_tenant },
        { .name = "the config has lower limits, and it has ended",
          .by_operator = true,
          .config = &lower_limits },
        { .name = "the config has lower limits", .config = &lower_limits },
};

/* A process that a lease can be for: it starts the job when it is told to. */
static pid_t root_start(struct job *j, struct gate *go)
{
        int to[2], from[2];
        pid_t root;

        ck_assert_int_eq(prctl(PR_SET_CHILD_SUBREAPER, 1), 0); /* the job outlives it */
        ck_assert_int_eq(pipe2(to, O_CLOEXEC), 0);
        ck_assert_int_eq(pipe2(from, O_CLOEXEC), 0);
        root = fork();
        if (root == 0) {
                close(to[1]);
                close(from[0]);
                if (gate_wait(go, SETTLE_MS) && fork() == 0)
                        job_work(to[0], from[1]);
                close(to[0]);
                close(from[1]);
                pause();
                _exit(0);
        }
        close(to[0]);
        close(from[1]);
        *j = (struct job){ .to = to[1], .from = from[0] };
        return root;
}

static void root_kill(pid_t root)
{
        kill(root, SIGKILL);
        ck_assert_int_eq(waitpid(root, NULL, 0), root);
}

/* Its session goes on, with an extent and no block, and so do those of all other tenants. */
LOOP_TEST_OF(lease, a_lease_that_ends_at_a_restart_ends_no_session, 2 * (int)(sizeof(ends) / sizeof(ends[0])))
{
        struct gate go = gate_new();
        bfc_client *blue;
        struct answer answer;
        struct job job;
        char pid[32];
        pid_t root;
        void *p;
        int i = _i / 2;

        root = root_start(&job, &go);
        snprintf(pid, sizeof(pid), "%d", (int)root);
        LEASE("create", "one", "--tenant", "red", "--partition", "train", "--limit", "32MiB", "--pid", pid);
        gate_open(&go);
        job_read(&job, &answer);
        job.pid = answer.pid;
        ck_assert_int_eq(job_malloc(&job, 16 * MIB, &answer), 0); /* the smallest that has its own extent */
        blue = client_with(.socket = k->rig->socket, .tenant = "blue");
        ck_assert_ok(bfc_malloc_flags(blue, NULL, 4 * MIB, BFC_WHOLE, &p));
        block_fill(blue, p, 4 * MIB, 1);
        if (ends[i].by_operator)
                LEASE("end", "one");
        if (ends[i].by_exit)
                root_kill(root);
        ck_assert_int_eq(job_free(&job, &answer), 0);
        if (ends[i].by_exit)
                ck_assert(WAIT_FOR(kept_logged(k, "its process has exited"), SETTLE_MS));
        kept_away(k, _i % 2 ? SIGTERM : SIGKILL);
        if (ends[i].by_exit_while_away)
                root_kill(root);
        if (ends[i].config)
                rig_rewrite_config(k->rig, ends[i].config);
        kept_back(k);
        ck_assert_msg(WAIT_FOR(kept_all_are(k, "live", 2), SETTLE_MS), "%s", ends[i].name);
        ck_assert_uint_eq(n_leases(), 1);
        ck_assert_int_eq(job_malloc(&job, 20 * MIB, &answer), -EDQUOT);
        ck_assert(block_has(blue, p, 4 * MIB, 1));
        kept_restart(k, SIGKILL);
        ck_assert(WAIT_FOR(kept_all_are(k, "live", 2), SETTLE_MS));
        if (!ends[i].by_exit && !ends[i].by_exit_while_away)
                root_kill(root);
        job_end(&job);
        bfc_disconnect(blue);
        ck_assert(WAIT_FOR(n_leases() == 0, SETTLE_MS));
        if (!ends[i].config)
                return;
        rig_rewrite_config(k->rig, &config); /* as many fds as at the start */
        kept_restart(k, SIGTERM);
}

int main(void)
{
        return harness_cases("lease");
}
