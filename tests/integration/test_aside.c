/* A daemon crashes while it restores one object: its successor leaves that one aside, says which, and restores the
 * rest. The crash is an abort() where the daemon begins with the object (kill_points.h).
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include "daemon/ledger/ledger.h"
#include "keeper/wire.h"
#include "tests/integration/kept.h"
#include "tests/keeper_caller.h"
#include "tests/integration/kill_points.h"
#include "tests/integration/tools.h"

#define SMALL  3000u
#define LARGE  (6 * MIB)
#define N_JOBS 4u

static const struct rig_config config = {
        .top = "timeouts: {quarantine: 20ms}\n",
        .tenants =
                TENANT("red", "@UID@", "train, limit: 64MiB") TENANT("blue", "@UID@", "train, limit: 32MiB"),
};

static struct kept *k;
static struct kill_points *points;
static char points_path[64];

static void setup(void)
{
        const struct rlimit no_core = { 0, 0 };
        int fd;

        setrlimit(RLIMIT_CORE, &no_core);
        strcpy(points_path, "/tmp/bfc-aside-XXXXXX");
        fd = mkostemp(points_path, O_CLOEXEC);
        ck_assert_int_ge(fd, 0);
        ck_assert_int_eq(ftruncate(fd, sizeof(*points)), 0);
        points = mmap(NULL, sizeof(*points), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        ck_assert(points != MAP_FAILED);
        close(fd);
        setenv(KILL_POINTS_FILE, points_path, 1);
        k = kept_start(&config);
}

static void teardown(void)
{
        kept_stop(k);
        munmap(points, sizeof(*points));
        unlink(points_path);
}

FIXTURE(aside, setup, teardown);

/* So many daemons fail before the one that is ready. */
static void restart_from_away(unsigned n_failures)
{
        struct stand_in_state before = kept_state(k), after;

        ck_assert_int_eq(stand_in_hold(k->manager, false), 0);
        ck_assert(WAIT_FOR((after = kept_state(k), after.n_ready > before.n_ready), SETTLE_MS));
        kept_ready(k);
        ck_assert_uint_eq(after.n_starts, before.n_starts + 1 + n_failures);
        ck_assert_uint_eq(after.n_bad, before.n_bad + n_failures);
        k->n_bad = after.n_bad;
}

/* The daemon is killed, and its successors crash at the object until one leaves it aside. */
static void restart_crashing_at(const char *object, unsigned n_crashes)
{
        snprintf(points->crashes_at, sizeof(points->crashes_at), "%s", object);
        kept_away(k, SIGKILL);
        restart_from_away(n_crashes);
}

/* ---- a job, whose session or lease is left aside ---------------------------------------- */

struct job {
        char socket[96];
        struct gate begin, up, go;
        bool is_left_aside; /* its session, and not its arena: what it has mapped stays */
        pid_t pid;
};

static void job_run(void *arg)
{
        struct job *j = arg;
        bfc_client *client;
        void *small, *large, *p;
        int r;

        REQUIRE(gate_wait(&j->begin, SETTLE_MS), "begin");
        client = child_client_open(j->socket, "red");
        REQUIRE(bfc_malloc_flags(client, NULL, SMALL, BFC_WHOLE, &small) == 0, "%s", bfc_last_error());
        REQUIRE(bfc_malloc_flags(client, NULL, LARGE, BFC_WHOLE, &large) == 0, "%s", bfc_last_error());
        block_fill(client, small, SMALL, 1);
        block_fill(client, large, LARGE, 2);
        r = bfc_attach(client, "ours", 0, &p, NULL);
        REQUIRE(r == 0 || r == -ENOENT || r == -EXDEV, "%s", bfc_last_error()); /* EXDEV: of another lease */
        gate_meet(&j->up, &j->go);
        r = bfc_malloc_flags(client, NULL, SMALL, BFC_WHOLE, &p);
        REQUIRE(r == -ECONNRESET, "%d: %s", r, bfc_last_error());
        REQUIRE(!j->is_left_aside || strstr(bfc_last_error(), "left it aside"), "%s", bfc_last_error());
        REQUIRE(rig_device() != ON_HOST || !j->is_left_aside ||
                        (pattern_holds(small, SMALL, 1) && pattern_holds(large, LARGE, 2)),
                "another content");
        bfc_disconnect(client);
}

/* Before this process has a client: a child can do nothing with a GPU that its parent has used. */
static void job_fork(struct job *j, bool is_left_aside)
{
        j->is_left_aside = is_left_aside;
        strcpy(j->socket, k->rig->socket);
        j->begin = gate_new();
        j->up = gate_new();
        j->go = gate_new();
        j->pid = child_start(job_run, j);
}

static void job_begin(struct job *j)
{
        gate_open(&j->begin);
        ck_assert(gate_wait(&j->up, SETTLE_MS));
}

static void job_join(struct job *j)
{
        gate_open(&j->go);
        child_join(j->pid);
}

static uint64_t session_of(pid_t pid)
{
        char *text = kept_sessions(k), *rest = text, *line;
        uint64_t id = 0, each;
        int its_pid;

        while ((line = strsep(&rest, "\n")))
                if (sscanf(line, "%" SCNu64 " of %*[^:]: pid %d", &each, &its_pid) == 2 &&
                    its_pid == (int)pid)
                        id = each;
        free(text);
        ck_assert_uint_ne(id, 0);
        return id;
}

/* ---- sessions that go on ------------------------------------------------------------------ */

struct victim {
        bfc_client *client;
        void *small, *large, *shared;
};

static void victim_start(struct victim *v, const char *tenant)
{
        v->client = client_with(.socket = k->rig->socket, .tenant = tenant);
        ck_assert_ok(bfc_malloc_flags(v->client, NULL, SMALL, BFC_WHOLE, &v->small));
        ck_assert_ok(bfc_malloc_flags(v->client, NULL, LARGE, BFC_WHOLE, &v->large));
        ck_assert_ok(bfc_malloc_flags(v->client, NULL, SMALL, BFC_WHOLE, &v->shared));
        block_fill(v->client, v->small, SMALL, 11);
        block_fill(v->client, v->large, LARGE, 12);
        block_fill(v->client, v->shared, SMALL, 13);
        ck_assert_ok(bfc_publish(v->client, v->shared, "ours"));
}

/* It has all, and can get more, which is of no other session. */
static void victim_check(const struct victim *v)
{
        void *p, *q;

        ck_assert(block_has(v->client, v->small, SMALL, 11));
        ck_assert(block_has(v->client, v->large, LARGE, 12));
        ck_assert(block_has(v->client, v->shared, SMALL, 13));
        ck_assert_ok(bfc_malloc_flags(v->client, NULL, SMALL, BFC_WHOLE, &p));
        ck_assert_ok(bfc_malloc_flags(v->client, NULL, LARGE, BFC_WHOLE, &q));
        block_fill(v->client, p, SMALL, 14);
        block_fill(v->client, q, LARGE, 15);
        ck_assert(block_has(v->client, v->large, LARGE, 12));
        ck_assert_ok(bfc_free(v->client, p));
        ck_assert_ok(bfc_free(v->client, q));
        ck_assert_ok(bfc_trim(v->client, SIZE_MAX));
}

static void victim_end(const struct victim *v)
{
        bfc_disconnect(v->client);
}

/* Of the job in the lists, by the id of its session. */
static bool has_blocks_of(uint64_t session)
{
        char *text = kept_blocks(k), part[48];
        bool has;

        snprintf(part, sizeof(part), " of %" PRIu64 " (", session);
        has = strstr(text, part) != NULL;
        free(text);
        return has;
}

/* ---- one object ---------------------------------------------------------------------------- */

TEST_OF(aside, one_session)
{
        struct victim red, blue;
        struct job job;
        char object[48], part[96];
        uint64_t id;

        job_fork(&job, true);
        victim_start(&red, "red");
        victim_start(&blue, "blue");
        job_begin(&job);
        id = session_of(job.pid);
        snprintf(object, sizeof(object), "session %" PRIu64, id);
        restart_crashing_at(object, 1);
        for (unsigned i = 0; i < 2; i++) { /* it stays aside, and counts no more */
                victim_check(&red);
                victim_check(&blue);
                ck_assert(has_blocks_of(id));
                restart_crashing_at(object, 0);
        }
        snprintf(part, sizeof(part), "failed while it restored session %" PRIu64 " (", id);
        ck_assert_uint_eq(kept_count_logged(k, part), 1);
        job_join(&job);
        kept_restart(k, SIGTERM);
        ck_assert(!has_blocks_of(id));
        victim_check(&red);
        victim_check(&blue);
        victim_end(&red);
        victim_end(&blue);
        k->rig->forgiven = "failed while it restored session";
}

/* The session knows no quota, and has blocks: the daemon refuses that, and exits. */
TEST_OF(aside, a_session_that_does_not_fit)
{
        struct ledger *ledger = NULL;
        struct victim red, blue;
        struct job job;
        uint64_t id;

        job_fork(&job, true);
        victim_start(&red, "red");
        victim_start(&blue, "blue");
        job_begin(&job);
        id = session_of(job.pid);
        kept_away(k, SIGKILL);
        ck_assert_int_eq(
                ledger_open(keeper_ask_in(k->rig->folder, "host", KEEPER_LEDGER, 0, -1), NULL, NULL, &ledger),
                0);
        for (uint32_t i = 0; i < ledger_session_end(ledger); i++)
                if (ledger_session_get(ledger, i) && ledger_session_get(ledger, i)->id == id)
                        ledger_session_at(ledger, i)->quotas_end = 0;
        ledger_free(ledger);
        restart_from_away(1);
        victim_check(&red);
        victim_check(&blue);
        ck_assert(has_blocks_of(id));
        job_join(&job);
        kept_restart(k, SIGTERM);
        ck_assert(!has_blocks_of(id));
        victim_end(&red);
        victim_end(&blue);
        k->rig->forgiven = "the previous daemon";
}

/* Each of them crashes a daemon, and the other tenant loses nothing. */
TEST_OF(aside, all_sessions_of_a_tenant)
{
        struct victim blue;
        struct job jobs[N_JOBS];

        for (unsigned i = 0; i < N_JOBS; i++)
                job_fork(&jobs[i], true);
        victim_start(&blue, "blue");
        for (unsigned i = 0; i < N_JOBS; i++)
                job_begin(&jobs[i]);
        restart_crashing_at("sessions of red", N_JOBS);
        victim_check(&blue);
        ck_assert_uint_eq(kept_count_logged(k, "of tenant 'red', uid"), N_JOBS);
        for (unsigned i = 0; i < N_JOBS; i++)
                job_join(&jobs[i]);
        kept_restart(k, SIGTERM);
        ck_assert_uint_eq(rig_charge(k->rig, "red", "train"), 0);
        victim_check(&blue);
        victim_end(&blue);
        k->rig->forgiven = "failed while it restored session";
}

TEST_OF(aside, one_arena)
{
        struct victim blue;
        struct victim red;
        struct job job;

        job_fork(&job, false);
        victim_start(&red, "red");
        victim_start(&blue, "blue");
        job_begin(&job);
        restart_crashing_at("quota 0", 1);
        victim_check(&blue);
        ck_assert_uint_eq(kept_count_logged(k, "failed while it restored tenant 'red' in partition 'train'"),
                          1);
        job_join(&job);
        ck_assert_int_eq(bfc_malloc(red.client, SMALL, &red.small), -ECONNRESET);
        victim_end(&red);
        ck_assert(WAIT_FOR(kept_all_are(k, "live", 1), SETTLE_MS));
        points->crashes_at[0] = '\0';
        kept_restart(k, SIGTERM); /* after which it is charged no longer */
        victim_start(&red, "red");
        victim_check(&red);
        victim_check(&blue);
        victim_end(&red);
        victim_end(&blue);
        k->rig->forgiven = "tenant 'red' in partition 'train'";
}

/* The tenant's other sessions go on. */
TEST_OF(aside, one_lease)
{
        struct victim red, blue;
        struct job job;
        char pid[32];

        job_fork(&job, false);
        victim_start(&red, "red");
        victim_start(&blue, "blue");
        snprintf(pid, sizeof(pid), "%d", (int)getpid());
        free(ctl_text(k->rig, WORDS("lease", "create", "job", "--tenant", "red", "--partition", "train",
                                    "--limit", "16MiB", "--pid", pid)));
        job_begin(&job);
        restart_crashing_at("lease job", 1);
        victim_check(&red);
        victim_check(&blue);
        ck_assert_uint_eq(
                kept_count_logged(k, "failed while it restored lease 'job' of tenant 'red' in partition "
                                     "'train'"),
                1);
        job_join(&job);
        ck_assert(WAIT_FOR(kept_all_are(k, "live", 2), SETTLE_MS));
        points->crashes_at[0] = '\0';
        kept_restart(k, SIGTERM);
        victim_check(&red);
        victim_check(&blue);
        victim_end(&red);
        victim_end(&blue);
        k->rig->forgiven = "tenant 'red' in partition 'train'";
}
