/* Ends of clients: by kill -9, by goodbye, by a hang-up of a process that lives
 * on, by fork. What a dead one held is released; what a living one may still
 * touch stays charged until it is gone or its time is up.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "tests/integration/tools.h"

#define BACK_MS SETTLE_MS /* a dead client's charges are back by then */

static const struct rig_config patient = { .top = "timeouts: {quarantine: 60m}\n" };
static const struct rig_config patient_moves_clock = { .top = "timeouts: {quarantine: 60m}\n",
                                                       .moves_clock = true };

#define QUARANTINE_MS (60 * 60 * 1000) /* of the patient */
#define LOOK_MS       250              /* between the daemon's looks at what processes have */

/* The daemon has looked several times. */
static void pass_looks(struct rig *rig)
{
        for (unsigned i = 0; i < 6; i++)
                rig_pass(rig, LOOK_MS);
}

struct life {
        char socket[96];
        struct gate up;    /* the child holds what it wanted */
        struct gate done;  /* the test has finished */
        int error;         /* that work_on() is told in the end */
        const char *words; /* in its sentence */
};

static struct life life_new(const struct rig *rig)
{
        struct life life = { .up = gate_new(), .done = gate_new() };

        strcpy(life.socket, rig->socket);
        return life;
}

static void take_some(bfc_client *client)
{
        void *p;

        for (unsigned i = 0; i < 10; i++) {
                REQUIRE(bfc_malloc(client, 1 * MIB + i, &p) == 0, "%s", bfc_last_error());
                memset(p, 0x5a, 1 * MIB);
        }
}

/* ---- kill -9 -------------------------------------------------------------- */

static void hold_and_wait(void *arg)
{
        struct life *life = arg;
        bfc_client *client = child_client_open(life->socket, NULL);

        take_some(client);
        gate_open(&life->up);
        gate_wait(&life->done, SETTLE_MS);
        bfc_disconnect(client);
}

RIG_TEST(a_killed_client_returns_everything, patient)
{
        struct life life = life_new(rig);
        pid_t pid = child_start_until(&life.up, hold_and_wait, &life);

        ck_assert_uint_ge(rig_stats(rig, "red", "train").bytes_in_use, 10 * MIB);
        ck_assert_uint_eq(rig_count(rig).n_sessions, 1);
        child_kill(pid);
        ck_assert_msg(WAIT_FOR(rig_charge(rig, "red", "train") == 0, BACK_MS), "still charged: %llu bytes",
                      (unsigned long long)rig_charge(rig, "red", "train"));
        ck_assert_uint_eq(rig_count(rig).n_sessions, 0);
        ck_assert_uint_eq(rig_stats(rig, "red", "train").peak_bytes_in_use,
                          10 * MIB + 9 * GRANULE); /* the first block is exactly 1 MiB */
}

/* A forked child keeps the parent's socket open: only the parent's own end tells. */
static void leave_a_child_behind(void *arg)
{
        struct life *life = arg;
        bfc_client *client = child_client_open(life->socket, NULL);

        take_some(client);
        if (fork() == 0) {
                gate_wait(&life->done, SETTLE_MS);
                _exit(0);
        }
        gate_open(&life->up);
        pause();
}

RIG_TEST(a_death_is_detected_without_a_hang_up, patient)
{
        struct life life = life_new(rig);
        pid_t pid = child_start_until(&life.up, leave_a_child_behind, &life);

        ck_assert_uint_ge(rig_charge(rig, "red", "train"), 20 * MIB);
        child_kill(pid);
        ck_assert(WAIT_FOR(rig_charge(rig, "red", "train") == 0, BACK_MS));
        ck_assert_uint_eq(rig_count(rig).n_sessions, 0);
        gate_open(&life.done);
}

/* Its process is watched from the first request on. Without one, soon. */
static void leave_a_child_behind_without_a_request(void *arg)
{
        struct life *life = arg;

        REQUIRE(raw_connect(life->socket, NULL), "%s", raw_refusal()); /* which fork() does not close */
        if (fork() == 0) {
                gate_wait(&life->done, SETTLE_MS);
                _exit(0);
        }
        gate_open(&life->up);
        pause();
}

TEST(the_death_of_an_idle_session_is_detected)
{
        struct rig *rig = rig_start(&patient);
        struct life life = life_new(rig);
        pid_t pid = child_start_until(&life.up, leave_a_child_behind_without_a_request, &life);

        ck_assert_uint_eq(rig_count(rig).n_sessions, 1);
        child_kill(pid);
        ck_assert(WAIT_FOR(rig_count(rig).n_sessions == 0, BACK_MS));
        gate_open(&life.done);
        rig_stop(rig);
}

/* ---- leaving -------------------------------------------------------------- */

RIG_TEST(goodbye_releases_at_once, patient)
{
        bfc_client *client = client_open(rig, NULL, NULL);
        void *p;

        ck_assert_ok(bfc_malloc(client, 20 * MIB, &p));
        memset(p, 1, 20 * MIB);
        bfc_disconnect(client); /* this process lives on, and yet: */
        ck_assert(WAIT_FOR(rig_charge(rig, "red", "train") == 0 && rig_count(rig).n_sessions == 0, BACK_MS));
        ck_assert_uint_eq(rig_count(rig).n_quarantined, 0);
}

/* Hangs up without a goodbye and lives on until it is told to end. */
static void hang_up_and_wait(void *arg)
{
        struct life *life = arg;
        struct raw *raw = raw_connect(life->socket, NULL);
        Bfcd__Block block;

        REQUIRE(raw, "no connection");
        REQUIRE(raw_malloc(raw, 0, 10 * MIB, &block) == 0, "%s", raw_refusal());
        close(raw->fd); /* this process keeps the extents */
        raw->fd = -1;
        gate_open(&life->up);
        gate_wait(&life->done, SETTLE_MS);
}

RIG_TEST(a_hang_up_is_no_death, patient_moves_clock)
{
        struct life life = life_new(rig);
        pid_t pid = child_start_until(&life.up, hang_up_and_wait, &life);

        ck_assert(WAIT_FOR(rig_count(rig).n_quarantined == 1, BACK_MS));
        pass_looks(rig);
        ck_assert_uint_ge(rig_stats(rig, "red", "train").bytes_reserved, 10 * MIB);
        ck_assert_uint_eq(rig_count(rig).n_quarantined, 1);
        gate_open(&life.done);
        child_join(pid);
        ck_assert(WAIT_FOR(rig_charge(rig, "red", "train") == 0, BACK_MS));
        ck_assert_uint_eq(rig_count(rig).n_quarantined, 0);
}

/* Memory cannot be taken from a process that has it mapped: only the exit releases it. */
RIG_TEST(quarantine_ends, patient_moves_clock)
{
        struct life life = life_new(rig);
        pid_t pid = child_start(hang_up_and_wait, &life);
        char *log;

        rig->forgiven = "quarantine"; /* may be logged as an error */
        ck_assert(gate_wait(&life.up, SETTLE_MS));
        ck_assert(WAIT_FOR(rig_count(rig).n_quarantined == 1, BACK_MS));
        rig_pass(rig, QUARANTINE_MS);
        pass_looks(rig);
        ck_assert_uint_ge(rig_charge(rig, "red", "train"), 10 * MIB);
        ck_assert_uint_eq(rig_count(rig).n_quarantined, 1);
        ck_assert_uint_eq(rig_stats(rig, "red", "train").bytes_unreclaimed, 0);
        log = rig_log(rig);
        text_has(log, "until the process exits");
        gate_open(&life.done);
        child_join(pid);
        ck_assert(WAIT_FOR(rig_charge(rig, "red", "train") == 0, BACK_MS));
        ck_assert(WAIT_FOR(rig_count(rig).n_sessions == 0, BACK_MS));
        ck_assert_uint_eq(rig_count(rig).n_quarantined, 0);
}

/* ---- exec ----------------------------------------------------------------- */

static const struct rig_config endless = { .top = "timeouts: {quarantine: 600s}\n", .moves_clock = true };

static void become_another_program(void)
{
        execl("/bin/sleep", "sleep", "600", (char *)NULL);
        REQUIRE(false, "no /bin/sleep: %s", strerror(errno));
}

static void hold_and_exec(void *arg)
{
        struct life *life = arg;

        take_some(child_client_open(life->socket, NULL));
        gate_open(&life->up);
        become_another_program();
}

/* The mappings went with the old process image. Of a GPU's memory nothing proves that. */
RIG_TEST(exec_releases_all_references, endless)
{
        struct life life = life_new(rig);
        pid_t pid = child_start_until(&life.up, hold_and_exec, &life);

        if (rig_device() == ON_HOST) {
                ck_assert_msg(WAIT_FOR(rig_charge(rig, "red", "train") == 0, 60000),
                              "still charged: %llu bytes",
                              (unsigned long long)rig_charge(rig, "red", "train"));
                ck_assert(WAIT_FOR(rig_count(rig).n_sessions == 0, SETTLE_MS));
        } else {
                ck_assert(WAIT_FOR(rig_count(rig).n_quarantined == 1, SETTLE_MS));
                pass_looks(rig);
                ck_assert_uint_ge(rig_charge(rig, "red", "train"), 10 * MIB);
        }
        child_kill(pid); /* it lived until now */
        ck_assert(WAIT_FOR(rig_charge(rig, "red", "train") == 0, BACK_MS));
}

/* The kernel sends SIGIO to the holder of a lease when another process opens the file just then; root may do that,
 * to look into /proc/PID/fd for instance. */
RIG_TEST(a_broken_lease_ends_no_session, patient)
{
        ck_assert_int_eq(kill(rig->pid, SIGIO), 0);
        bfc_disconnect(client_open(rig, "red", NULL));
}

/* The child keeps one mapping and nothing else: no fd of an extent and none of the session's sockets. */
static void leave_a_mapping_behind(void *arg)
{
        struct life *life = arg;
        struct raw *raw = raw_connect(life->socket, NULL);
        pid_t parent = getpid();
        Bfcd__Block block;
        uint64_t n_bytes;
        char *at;

        REQUIRE(raw, "no connection");
        REQUIRE(raw_malloc(raw, 0, 10 * MIB, &block) == 0, "%s", raw_refusal());
        n_bytes = raw->extents[0].n_bytes;
        at = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, raw->extents[0].fd, 0);
        REQUIRE(at != MAP_FAILED, "%s", strerror(errno));
        if (fork() == 0) {
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                REQUIRE(getppid() == parent, "its parent is gone");
                raw_close(raw);
                at[0] = 1;
                gate_open(&life->up);
                gate_wait(&life->done, 120000);
                at[1] = 1;
                munmap(at, n_bytes);
                pause();
        }
        become_another_program();
}

TEST(a_childs_mapping_keeps_the_charge)
{
        struct rig *rig = rig_start(&endless);
        struct life life = life_new(rig);
        pid_t pid;

        if (rig_device() != ON_HOST) {
                rig_stop(rig);
                return;
        }
        pid = child_start_until(&life.up, leave_a_mapping_behind, &life);
        ck_assert(WAIT_FOR(rig_count(rig).n_quarantined == 1, SETTLE_MS));
        pass_looks(rig);
        ck_assert_uint_ge(rig_stats(rig, "red", "train").bytes_reserved, 10 * MIB);
        ck_assert_uint_eq(rig_count(rig).n_quarantined, 1);
        gate_open(&life.done);
        ck_assert(WAIT_FOR(rig_charge(rig, "red", "train") == 0, 60000));
        child_kill(pid);
        rig_stop(rig);
}

/* A client that held nothing has nothing to be quarantined for. */
RIG_TEST(a_hang_up_without_extents_is_no_quarantine, patient)
{
        struct raw *raw = raw_connect(rig->socket, NULL), *silent = NULL;

        ck_assert_ptr_nonnull(raw);
        ck_assert_int_eq(raw_open(rig->socket, &silent), 0);
        ck_assert(WAIT_FOR(rig_count(rig).n_sessions == 1, BACK_MS));
        raw_close(raw);
        raw_close(silent);
        ck_assert(WAIT_FOR(rig_count(rig).n_sessions == 0 && rig_count(rig).n_quarantined == 0, BACK_MS));
}

/* ---- fork ----------------------------------------------------------------- */

RIG_TEST(a_forked_child_has_no_session, patient)
{
        bfc_client *client = client_open(rig, NULL, NULL);
        void *p, *q;
        int status;
        pid_t pid;

        ck_assert_ok(bfc_malloc(client, 4 * MIB, &p));
        pattern_write(p, 4 * MIB, 1);
        pid = fork();
        if (pid == 0) {
                struct bfc_tenant_usage usage = { .struct_size = sizeof(usage) };
                struct bfc_client_stats stats = { .struct_size = sizeof(stats) };
                bfc_client *own;

                REQUIRE(bfc_malloc(client, 256, &q) == -ECHILD, "malloc");
                REQUIRE(bfc_free(client, p) == -ECHILD, "free");
                REQUIRE(bfc_usage(client, NULL, &usage) == -ECHILD, "usage");
                REQUIRE(bfc_stats(client, &stats) == -ECHILD, "stats");
                REQUIRE(*bfc_last_error(), "there is no sentence");
                own = child_client_open(rig->socket, NULL);
                if (rig_device() != ON_HOST) { /* CUDA does not survive fork() */
                        REQUIRE(bfc_malloc(own, 4 * MIB, &q) < 0, "a child that uses its parent's driver");
                        REQUIRE(*bfc_last_error(), "there is no sentence");
                        bfc_disconnect(client);
                        bfc_disconnect(own);
                        _exit(0);
                }
                REQUIRE(bfc_malloc(own, 4 * MIB, &q) == 0, "%s", bfc_last_error());
                pattern_write(q, 4 * MIB, 2);
                REQUIRE(pattern_holds(q, 4 * MIB, 2), "the child's own block");
                bfc_disconnect(client); /* only forgets */
                REQUIRE(pattern_holds(q, 4 * MIB, 2), "the child's own block, after forgetting the parent's");
                bfc_disconnect(own);
                _exit(0);
        }
        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        ck_assert_int_eq(status, 0);
        ck_assert(pattern_holds(p, 4 * MIB, 1));
        ck_assert_ok(bfc_malloc(client, 1 * MIB, &q));
        pattern_write(q, 1 * MIB, 3);
        ck_assert(pattern_holds(q, 1 * MIB, 3));
        ck_assert_uint_eq(client_usage(client, NULL).bytes_in_use, 5 * MIB);
        ck_assert_ok(bfc_free(client, q));
        ck_assert_ok(bfc_free(client, p));
        bfc_disconnect(client);
}

/* The parent's memory is not in the child at all: a stray write hits nothing. */
RIG_TEST(a_forked_child_cannot_touch_the_parents_blocks, patient)
{
        bfc_client *client = client_open(rig, NULL, NULL);
        int status;
        void *p;
        pid_t pid;

        ck_assert_ok(bfc_malloc(client, 1 * MIB, &p));
        pattern_write(p, 1 * MIB, 1);
        pid = fork();
        if (pid == 0) {
                signal(SIGSEGV, SIG_DFL); /* a sanitizer would report it */
                signal(SIGBUS, SIG_DFL);
                memset(p, 0, 1 * MIB);
                _exit(0);
        }
        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        ck_assert(WIFSIGNALED(status));
        ck_assert(pattern_holds(p, 1 * MIB, 1));
        bfc_disconnect(client);
}

/* A program that the job starts gets neither the session nor the memory. */
RIG_TEST(exec_inherits_no_fd, patient)
{
        static const char *const list_fds[] = { "/bin/ls", "-l", "/proc/self/fd", NULL };
        bfc_client *client = client_open(rig, NULL, NULL);
        struct raw *raw = session_open(rig->socket, NULL);
        char *out;
        void *p;

        ck_assert_ok(bfc_malloc(client, 4 * MIB, &p));
        ck_assert_int_eq(program_run(list_fds, &out, NULL), 0);
        ck_assert_msg(!strstr(out, "socket:"), "a socket is inherited:\n%s", out);
        ck_assert_msg(!strstr(out, "bfcd"), "memory is inherited:\n%s", out);
        free(out);
        session_end(raw);
        bfc_disconnect(client);
}

/* ---- the other end --------------------------------------------------------- */

/* Serves itself from its cache until the end is seen. */
static void work_on(void *arg)
{
        struct life *life = arg;
        bfc_client *client;
        void *kept, *p = NULL;
        int64_t deadline;
        int r = 0;

        setenv("BFC_CACHE", "on", 1);
        client = child_client_open(life->socket, NULL);
        REQUIRE(bfc_malloc(client, 1 * MIB, &kept) == 0, "%s", bfc_last_error());
        REQUIRE(bfc_malloc(client, 5 * MIB, &p) == 0, "%s", bfc_last_error());
        REQUIRE(bfc_free(client, p) == 0, "%s", bfc_last_error());
        REQUIRE(bfc_malloc(client, 200, &p) == 0, "%s", bfc_last_error());
        REQUIRE(bfc_free(client, p) == 0, "%s", bfc_last_error());
        gate_meet(&life->up, &life->done);
        for (deadline = clock_ms() + SETTLE_MS; r == 0 && clock_ms() < deadline;) {
                r = bfc_malloc(client, 200, &p);
                if (r == 0)
                        (void)bfc_free(client, p);
        }
        REQUIRE(r == life->error, "%d: %s", r, bfc_last_error());
        REQUIRE(strstr(bfc_last_error(), life->words), "%s", bfc_last_error());
        REQUIRE(bfc_malloc(client, 4 * MIB, &p) == r, "%s", bfc_last_error());
        REQUIRE(bfc_malloc_async(client, 200, 0, &p) == r, "%s", bfc_last_error());
        REQUIRE(bfc_free(client, kept) == r, "%s", bfc_last_error());
        REQUIRE(strstr(bfc_last_error(), life->words), "%s", bfc_last_error());
        bfc_disconnect(client);
}

static void evict_all(struct rig *rig)
{
        Bfcd__Reply *reply;

        ck_assert_int_eq(raw_list(rig->admin, BFCD__LIST__KIND__SESSIONS, 0, &reply), 0);
        for (size_t i = 0; i < reply->list->n_sessions; i++) {
                Bfcd__Evict evict = BFCD__EVICT__INIT;
                Bfcd__Request request = REQUEST(EVICT, evict, &evict);

                if (strcmp(reply->list->sessions[i]->tenant, "red") != 0)
                        continue;
                evict.reason = (char *)(uintptr_t) "the node is drained";
                evict.session_id = reply->list->sessions[i]->session_id;
                ck_assert_msg(raw_do(rig->admin, &request) == 0, "%s", raw_refusal());
        }
        bfcd__reply__free_unpacked(reply, NULL);
}

/* A job whose session is over is told so, also when its cache could serve it for ever. */
LOOP_TEST(an_evicted_job_is_told, CHILDREN_HAVE_EVENTS)
{
        struct rig *rig = rig_start(&patient);
        struct life life = life_new(rig);
        pid_t pid;

        life.error = -EIDRM;
        life.words = " was evicted by an operator: the node is drained";
        pid = child_start(work_on, &life);
        rig->forgiven = "evict";
        ck_assert(gate_wait(&life.up, SETTLE_MS));
        evict_all(rig);
        gate_open(&life.done);
        child_join(pid);
        rig_stop(rig);
}

LOOP_TEST(a_job_of_a_killed_daemon_is_told, CHILDREN_HAVE_EVENTS)
{
        struct rig *rig = rig_start(&patient);
        struct life life = life_new(rig);
        pid_t pid;
        int status;

        life.error = -ECONNRESET;
        life.words = "ended the session";
        pid = child_start_until(&life.up, work_on, &life);
        ck_assert_int_eq(kill(rig->pid, SIGKILL), 0);
        ck_assert_int_eq(waitpid(rig->pid, &status, 0), rig->pid);
        gate_open(&life.done);
        child_join(pid);
        rig_discard(rig);
}

/* A client that is gone when its answers are written has hung up, and violated nothing. */
RIG_TEST(a_client_that_disconnects_before_the_answer, patient)
{
        struct raw *raw = session_open(rig->socket, NULL);
        char *log;

        child_stop(rig->pid);
        for (int i = 0; i < 4; i++) {
                Bfcd__Usage usage = BFCD__USAGE__INIT;
                Bfcd__Request request = REQUEST(USAGE, usage, &usage);

                ck_assert_int_eq(raw_send(raw, &request), 0);
        }
        raw_close(raw);
        ck_assert_int_eq(kill(rig->pid, SIGCONT), 0);
        ck_assert(WAIT_FOR(rig_count(rig).n_sessions == 0, SETTLE_MS));
        log = rig_log(rig);
        ck_assert_msg(!strstr(log, "disconnected"), "%s", log);
        free(log);
}
