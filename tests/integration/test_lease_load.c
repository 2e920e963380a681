/* Many leases that are made, used by three processes each, and ended, while limits are sampled; and kills of the daemon in
 * the middle, beside leases that stay. In the end nothing is left.
 *
 * BFC_TEST_SECONDS=60 and BFC_TEST_RESTARTS=20 are the long run.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "tests/integration/json.h"
#include "tests/integration/kept.h"
#include "tests/integration/tools.h"
#include "tests/random.h"

#define N_DRIVERS   4u
#define N_PROCESSES 3u /* of a lease */
#define N_STAYING   5u
#define LIMIT_BYTES (8 * MIB)
#define SAMPLE_US   50000u

static const struct rig_config config = {
        .size = "256MiB",
        .partitions = "      - {name: train, limit: 192MiB, growth: on-demand}\n",
        .tenants =
                TENANT("red", "@UID@", "train, limit: 64MiB") TENANT("blue", "@UID@", "train, limit: 128MiB"),
};

struct load {
        char socket[96], admin_socket[96];
        unsigned n_each; /* leases of each driver; 0: until `stop` is set */
        bool has_kills;
        uint64_t seed;
        _Atomic bool stop;
        _Atomic unsigned n_started, n_leases, n_granted, n_refused, n_evicted, n_ready;
};

static uint64_t number_from(const char *variable, uint64_t fallback)
{
        const char *text = getenv(variable);
        uint64_t n = text ? strtoull(text, NULL, 0) : 0;

        return n > 0 ? n : fallback;
}

/* ---- commands, also while the daemon is away ------------------------------------------ */

/* The refusal's error, or 0. */
static int command(const struct load *l, struct raw **admin, Bfcd__Request *request)
{
        for (unsigned i = 0; i < SETTLE_MS; i++, usleep(1000)) {
                Bfcd__Reply *reply = NULL;
                int error;

                if (!*admin)
                        *admin = raw_connect(l->admin_socket, NULL);
                request->id = 0;
                if (*admin && raw_call(*admin, request, &reply) == 0) {
                        error = reply->body_case == BFCD__REPLY__BODY_REFUSAL ? (int)reply->refusal->error
                                                                              : 0;
                        bfcd__reply__free_unpacked(reply, NULL);
                        return error;
                }
                REQUIRE(l->has_kills, "the daemon did not answer");
                if (*admin)
                        *admin = raw_close(*admin);
        }
        REQUIRE(false, "the daemon did not return");
        return EIO;
}

static void lease_create(const struct load *l, struct raw **admin, const char *tenant, const char *name,
                         pid_t pid)
{
        Bfcd__LeaseCreate m = BFCD__LEASE_CREATE__INIT;
        Bfcd__Request request = REQUEST(LEASE_CREATE, lease_create, &m);
        int error;

        m.name = (char *)(uintptr_t)name;
        m.tenant = (char *)(uintptr_t)tenant;
        m.partition = (char *)(uintptr_t) "train";
        m.bytes_limit = LIMIT_BYTES;
        m.bytes_reserve = 2 * MIB;
        m.match_case = BFCD__LEASE_CREATE__MATCH_PID;
        m.pid = (uint64_t)pid;
        error = command(l, admin, &request);
        /* The tenant may not have the reserve until the memory of ended leases is released. */
        for (unsigned i = 0; error == ENOMEM && i < SETTLE_MS; i++, usleep(1000))
                error = command(l, admin, &request);
        REQUIRE(error == 0 || (l->has_kills && error == EEXIST), "%d", error);
}

/* It may have ended already, with its process. */
static void lease_end(const struct load *l, struct raw **admin, const char *name, bool evicts)
{
        Bfcd__LeaseEnd m = BFCD__LEASE_END__INIT;
        Bfcd__Request request = REQUEST(LEASE_END, lease_end, &m);
        int error;

        m.name = (char *)(uintptr_t)name;
        m.evicts = evicts;
        error = command(l, admin, &request);
        REQUIRE(error == 0 || error == ENOENT, "%d", error);
}

/* ---- the processes of a lease ------------------------------------------------------------ */

static bfc_client *job_connect(const struct load *l, const char *tenant)
{
        const struct bfc_options options = { .struct_size = sizeof(options),
                                             .socket = l->socket,
                                             .tenant = tenant };
        bfc_client *client = NULL;
        int r = bfc_connect(&options, &client);

        for (unsigned i = 0; r < 0 && l->has_kills && i < SETTLE_MS / 10; i++) {
                usleep(10000);
                r = bfc_connect(&options, &client);
        }
        if (r == -EACCES && strstr(bfc_last_error(), "has ended"))
                _exit(0); /* its lease was ended before it connected */
        REQUIRE(r == 0, "%d: %s", r, bfc_last_error());
        return client;
}

/* Some blocks, in all more than the lease's limit; some processes exit with their blocks. */
static void job_work(struct load *l, uint64_t random)
{
        bfc_client *client = job_connect(l, "red");
        void *blocks[4] = { NULL };
        size_t sizes[4];

        for (unsigned i = 0; i < 4; i++) {
                int r;

                sizes[i] = 1 + (size_t)(random_next(&random) % (4 * MIB));
                r = bfc_malloc_flags(client, NULL, sizes[i], BFC_WHOLE, &blocks[i]);
                REQUIRE(r == 0 || r == -EDQUOT || r == -ENOMEM || r == -EIDRM, "%d: %s", r, bfc_last_error());
                if (r == -EIDRM) {
                        atomic_fetch_add(&l->n_evicted, 1);
                        _exit(0);
                }
                atomic_fetch_add(r == 0 ? &l->n_granted : &l->n_refused, 1);
                if (r == 0)
                        block_fill(client, blocks[i], 4096 < sizes[i] ? 4096 : sizes[i], i);
        }
        if (random_next(&random) % 3 == 0)
                _exit(0);
        for (unsigned i = 0; i < 4; i++)
                if (blocks[i])
                        (void)bfc_free(client, blocks[i]); /* it may be evicted */
        bfc_disconnect(client);
        _exit(0);
}

/* Until `stop`, with a block in the lease. */
static void job_stay(struct load *l, uint64_t seed)
{
        bfc_client *client = job_connect(l, "blue");
        void *p;

        REQUIRE(bfc_malloc_flags(client, NULL, MIB, BFC_WHOLE, &p) == 0, "%s", bfc_last_error());
        block_fill(client, p, MIB, seed);
        atomic_fetch_add(&l->n_ready, 1);
        while (!atomic_load(&l->stop))
                usleep(10000);
        REQUIRE(block_has(client, p, MIB, seed), "other contents");
        REQUIRE(bfc_free(client, p) == 0, "%s", bfc_last_error());
        bfc_disconnect(client);
        _exit(0);
}

/* The first process, for whose tree the lease is; it begins when the pipe has a byte. */
static pid_t tree_start(struct load *l, void (*work)(struct load *, uint64_t), uint64_t seed, int *ret_go)
{
        pid_t pids[N_PROCESSES], pid;
        int go[2], status;
        char byte;

        REQUIRE(pipe2(go, O_CLOEXEC) == 0, "pipe");
        pid = fork();
        REQUIRE(pid >= 0, "fork");
        if (pid > 0) {
                close(go[0]);
                *ret_go = go[1];
                return pid;
        }
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(go[1]);
        REQUIRE(read(go[0], &byte, 1) == 1, "nothing to do");
        for (unsigned i = 0; i < N_PROCESSES; i++) {
                pids[i] = fork();
                if (pids[i] == 0) {
                        prctl(PR_SET_PDEATHSIG, SIGKILL);
                        work(l, seed + i * 100);
                }
        }
        for (unsigned i = 0; i < N_PROCESSES; i++)
                REQUIRE(waitpid(pids[i], &status, 0) == pids[i] && status == 0, "status %x",
                        (unsigned)status);
        _exit(0);
}

static void tree_go(int go)
{
        REQUIRE(write(go, "", 1) == 1, "write");
        close(go);
}

/* ---- load ---------------------------------------------------------------------------------- */

static void drive(void *arg)
{
        struct load *l = arg;
        unsigned number = atomic_fetch_add(&l->n_started, 1);
        uint64_t random = l->seed + number * 1000;
        struct raw *admin = NULL;
        char name[32];

        for (unsigned i = 0; l->n_each ? i < l->n_each : !atomic_load(&l->stop); i++) {
                int go, status;
                pid_t pid = tree_start(l, job_work, random_next(&random), &go);

                snprintf(name, sizeof(name), "job-%u-%u", number, i);
                lease_create(l, &admin, "red", name, pid);
                tree_go(go);
                if (i % 4 == 0)
                        lease_end(l, &admin, name, i % 8 == 0);
                REQUIRE(waitpid(pid, &status, 0) == pid && status == 0, "status %x", (unsigned)status);
                lease_end(l, &admin, name, false);
                atomic_fetch_add(&l->n_leases, 1);
        }
        raw_close(admin);
}

static struct load *load_new(const struct kept *k, unsigned n_each, bool has_kills)
{
        struct load *l = shared_memory(sizeof(*l));

        memset(l, 0, sizeof(*l));
        snprintf(l->socket, sizeof(l->socket), "%s", k->rig->socket);
        snprintf(l->admin_socket, sizeof(l->admin_socket), "%s", k->rig->admin_socket);
        l->n_each = n_each;
        l->has_kills = has_kills;
        l->seed = number_from("BFC_TEST_SEED", 1);
        return l;
}

/* No row has more than its limit. Returns how many rows there are. */
static size_t sample(const struct kept *k, const char *const *words, const char *key)
{
        json_t *rows, *row;
        size_t i, n;
        char *out;

        ck_assert_int_eq(ctl(k->rig->monitor_socket, words, &out, NULL), 0);
        rows = json_loads(out, 0, NULL);
        ck_assert_ptr_nonnull(rows);
        n = json_array_size(json_object_get(rows, key));
        json_array_foreach(json_object_get(rows, key), i, row)
                ck_assert_msg(number_of(row, "bytes_reserved") <= number_of(row, "bytes_limit"), "%s", out);
        json_decref(rows);
        free(out);
        return n;
}

static size_t n_leases(const struct kept *k)
{
        return sample(k, WORDS("--json", "lease", "list"), "leases");
}

/* A driver has not ended. One that failed is noticed by child_join(). */
static bool is_driven(const pid_t *pids)
{
        for (unsigned i = 0; i < N_DRIVERS; i++) {
                siginfo_t info = { .si_pid = 0 };

                if (waitid(P_PID, (id_t)pids[i], &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == 0)
                        return true;
        }
        return false;
}

TEST(leases_under_load)
{
        uint64_t seconds = number_from("BFC_TEST_SECONDS", 0);
        struct kept *k = kept_start(&config);
        struct load *l = load_new(k, seconds ? 0 : 10, false);
        int64_t begin = clock_ms();
        size_t n_samples = 0, n_most = 0;
        pid_t pids[N_DRIVERS];

        for (unsigned i = 0; i < N_DRIVERS; i++)
                pids[i] = child_start(drive, l);
        do {
                size_t n = n_leases(k);

                n_most = n > n_most ? n : n_most;
                (void)sample(k, WORDS("--json", "tenants"), "tenants");
                (void)sample(k, WORDS("--json", "partitions"), "partitions");
                n_samples++;
                usleep(SAMPLE_US); /* so that most of the processors' time is for the jobs */
                atomic_store(&l->stop, clock_ms() - begin >= (int64_t)seconds * 1000);
        } while (is_driven(pids));
        printf("# %u leases in %.1f s, at most %zu at a time: %u blocks granted, %u refused, %u evicted; %zu "
               "samples\n",
               atomic_load(&l->n_leases), (double)(clock_ms() - begin) / 1000, n_most,
               atomic_load(&l->n_granted), atomic_load(&l->n_refused), atomic_load(&l->n_evicted), n_samples);
        fflush(stdout);
        for (unsigned i = 0; i < N_DRIVERS; i++)
                child_join(pids[i]);
        ck_assert_uint_gt(atomic_load(&l->n_granted), 0);
        ck_assert_uint_gt(atomic_load(&l->n_refused), 0);
        ck_assert(WAIT_FOR(n_leases(k) == 0, SETTLE_MS));
        kept_stop(k);
}

/* ---- kills ----------------------------------------------------------------------------------- */

/* Leases that stay, their limits and usage; their sessions and blocks. Others are gone. */
static char *staying(struct kept *k)
{
        char *sessions = kept_sessions(k), *blocks = kept_blocks(k), *out, *text = NULL;
        json_t *rows, *row;
        size_t i;

        ck_assert_int_eq(ctl(k->rig->monitor_socket, WORDS("--json", "lease", "list"), &out, NULL), 0);
        rows = json_loads(out, 0, NULL);
        free(out);
        ck_assert_int_ge(asprintf(&text, "%s%s", sessions, blocks), 0);
        json_array_foreach(json_object_get(rows, "leases"), i, row)
        {
                char *before = text;

                ck_assert_int_ge(asprintf(&text,
                                          "%s%s %s limit %.0f reserve %.0f in use %.0f sessions %.0f\n",
                                          before, json_string_value(json_object_get(row, "name")),
                                          json_string_value(json_object_get(row, "state")),
                                          (double)number_of(row, "bytes_limit"),
                                          (double)number_of(row, "bytes_guaranteed"),
                                          (double)number_of(row, "bytes_in_use"),
                                          (double)number_of(row, "num_sessions")),
                                 0);
                free(before);
        }
        json_decref(rows);
        free(sessions);
        free(blocks);
        return text;
}

static bool staying_is(struct kept *k, const char *before)
{
        char *now = staying(k);
        bool is_same = strcmp(now, before) == 0;

        free(now);
        return is_same;
}

static void assert_staying(struct kept *k, const char *before)
{
        if (!WAIT_FOR(staying_is(k, before), SETTLE_MS))
                ck_assert_str_eq(staying(k), before);
}

static void kill_once(struct kept *k, uint64_t *random, unsigned *n_leases_made)
{
        struct load *l = load_new(k, 4, true);
        pid_t pids[N_DRIVERS];

        for (unsigned i = 0; i < N_DRIVERS; i++)
                pids[i] = child_start(drive, l);
        usleep((useconds_t)(random_next(random) % 100000));
        kept_restart(k, SIGKILL);
        for (unsigned i = 0; i < N_DRIVERS; i++)
                child_join(pids[i]);
        *n_leases_made += atomic_load(&l->n_leases);
}

TEST(kills_under_load)
{
        uint64_t n = number_from("BFC_TEST_RESTARTS", 2), random = number_from("BFC_TEST_SEED", 1);
        struct raw *admin = NULL;
        unsigned n_made = 0;
        pid_t pids[N_STAYING];
        struct load *l;
        struct kept *k;
        char name[32], *before;

        setenv("BFC_RETURN_MS", "300000", 1);
        k = kept_start(&config);
        l = load_new(k, 0, true);
        for (unsigned i = 0; i < N_STAYING; i++) {
                int go;

                pids[i] = tree_start(l, job_stay, i, &go);
                snprintf(name, sizeof(name), "stays-%u", i);
                lease_create(l, &admin, "blue", name, pids[i]);
                tree_go(go);
        }
        admin = raw_close(admin);
        ck_assert(WAIT_FOR(atomic_load(&l->n_ready) == N_STAYING * N_PROCESSES, SETTLE_MS));
        before = staying(k);
        for (uint64_t i = 0; i < n; i++) {
                kill_once(k, &random, &n_made);
                assert_staying(k, before);
        }
        printf("# %llu kills, %u leases made beside %u that stay\n", (unsigned long long)n, n_made,
               N_STAYING);
        fflush(stdout);
        ck_assert(strstr(before, "stays-4") && strstr(before, "sessions 3"));
        free(before);
        atomic_store(&l->stop, true);
        for (unsigned i = 0; i < N_STAYING; i++) {
                int status;

                ck_assert_int_eq(waitpid(pids[i], &status, 0), pids[i]);
                ck_assert_int_eq(status, 0);
        }
        ck_assert(WAIT_FOR(n_leases(k) == 0, SETTLE_MS));
        kept_stop(k);
}

int main(void)
{
        return harness_cases_with("lease_load", 1800, NULL);
}
