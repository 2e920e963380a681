/* Many jobs at work, which write every block and check it before they free it, and
 * some that share blocks, while the daemon is restarted and killed at random moments, again
 * and again. No job fails, no byte is another, and in the end nothing is charged and the
 * ledger is empty.
 *
 * BFC_TEST_RESTARTS=100 is the long run: so many of each kind. The seed is printed;
 * BFC_TEST_SEED takes another one.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "tests/integration/json.h"
#include "tests/integration/kept.h"
#include "tests/random.h"
#include "tests/integration/tools.h"

#define N_REPLAYS    2u /* with the cache and without */
#define N_SHARERS    4u
#define N_NAMES      6u
#define SHARED_BYTES 70000u
#define MAX_PAUSE_MS 300u

static const struct rig_config roomy = {
        .size = "768MiB",
        .partitions = "      - {name: train, limit: 512MiB, growth: on-demand}\n",
        .tenants = TENANT("red", "@UID@", "train, limit: 384MiB")
                TENANT("blue", "@UID@", "train, limit: 96MiB, reserve: 16MiB"),
};

static uint64_t number_from(const char *variable, uint64_t fallback)
{
        const char *text = getenv(variable);
        uint64_t n = text ? strtoull(text, NULL, 0) : 0;

        return n > 0 ? n : fallback;
}

/* Of each replay. They work as fast as they can, and would use the processor for longer than the restarts take. */
static const char *jobs(void)
{
        return suite_is_long() || getenv("BFC_TEST_RESTARTS") ? "14" : "5";
}

/* ---- jobs ------------------------------------------------------------------------ */

struct replay {
        pid_t pid;
        const char *cache;
        char out[128], err[128];
};

static void replay_start(struct replay *r, struct kept *k, const char *trace, const char *cache)
{
        pid_t parent = getpid();

        r->cache = cache;
        snprintf(r->out, sizeof(r->out), "%s/replay-%s.json", k->rig->folder, cache);
        snprintf(r->err, sizeof(r->err), "%s/replay-%s.err", k->rig->folder, cache);
        r->pid = fork();
        ck_assert_int_ge(r->pid, 0);
        if (r->pid > 0)
                return;
        prctl(PR_SET_PDEATHSIG, SIGTERM);
        if (getppid() != parent || !freopen(r->out, "w", stdout) || !freopen(r->err, "w", stderr))
                _exit(126);
        execl(program_replay(), "bfc-replay", "--socket", k->rig->socket, "--tenant", "red", "--jobs", jobs(),
              "--repeat", "1000000", "--verify", "--json", "--cache", cache, trace, (char *)NULL);
        _exit(127);
}

static bool is_alive(const struct replay *r)
{
        siginfo_t info = { .si_pid = 0 };

        return waitid(P_PID, (id_t)r->pid, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == 0;
}

/* It is stopped, and has nothing else to complain of. How many operations there were. */
static uint64_t replay_stop(struct replay *r)
{
        char *err, *said;
        uint64_t n;
        json_t *json;
        int status;

        kill(r->pid, SIGTERM);
        ck_assert_int_eq(waitpid(r->pid, &status, 0), r->pid);
        said = file_text(r->out);
        err = file_text(r->err);
        json = json_loads(said ? said : "", 0, NULL);
        ck_assert_msg(json, "status %x: %s", (unsigned)status, err);
        ck_assert_msg(json_is_null(json_object_get(json, "error")) && number_of(json, "failures") == 0 &&
                              number_of(json, "corruptions") == 0 && number_of(json, "blocks_left") == 0,
                      "%s", err);
        ck_assert_msg(json_is_true(json_object_get(json, "stopped")), "it ended by itself: %s", err);
        n = (uint64_t)number_of(json, "operations");
        json_decref(json);
        free(said);
        free(err);
        return n;
}

/* ---- sharing ----------------------------------------------------------------------- */

struct sharers {
        char socket[96];
        uint64_t seed;
        _Atomic bool stop;
        _Atomic uint64_t n_published, n_attached, n_started;
};

static void write_shared(bfc_client *client, void *p, unsigned name)
{
        static char bytes[SHARED_BYTES];

        pattern_write(bytes, sizeof(bytes), name);
        REQUIRE(bfc_write(client, p, bytes, sizeof(bytes)) == 0, "%s", bfc_last_error());
}

static void check_shared(bfc_client *client, const void *p, unsigned name)
{
        static char bytes[SHARED_BYTES];

        REQUIRE(bfc_read(client, bytes, p, sizeof(bytes)) == 0, "%s", bfc_last_error());
        REQUIRE(pattern_holds(bytes, sizeof(bytes), name), "another content of name %u", name);
}

/* A block that it published, or NULL: another process published the name first. */
static void *publish(bfc_client *client, unsigned name)
{
        char text[16];
        void *p;
        int r;

        snprintf(text, sizeof(text), "n%u", name);
        REQUIRE(bfc_malloc_flags(client, NULL, SHARED_BYTES, BFC_WHOLE, &p) == 0, "%s", bfc_last_error());
        write_shared(client, p, name);
        r = bfc_publish(client, p, text);
        REQUIRE(r == 0 || r == -EEXIST, "%d: %s", r, bfc_last_error());
        if (r == 0)
                return p;
        REQUIRE(bfc_free(client, p) == 0, "%s", bfc_last_error());
        return NULL;
}

static void *attach(bfc_client *client, unsigned name, uint32_t wait_ms)
{
        size_t n_bytes = 0;
        char text[16];
        void *p;
        int r;

        snprintf(text, sizeof(text), "n%u", name);
        r = bfc_attach(client, text, wait_ms, &p, &n_bytes);
        REQUIRE(r == 0 || r == -ENOENT || r == -ETIMEDOUT, "%d: %s", r, bfc_last_error());
        REQUIRE(r < 0 || n_bytes == SHARED_BYTES, "%zu", n_bytes);
        return r == 0 ? p : NULL;
}

/* Charges some memory directly, or uncharges all of it, which the daemon must know of. */
static void charge(bfc_client *client, uint64_t *charged, uint64_t *random)
{
        size_t n_bytes = 1 + (size_t)(random_next(random) % (64 << 10));
        int r;

        if (*charged > 0 && random_next(random) % 2) {
                REQUIRE(bfc_uncharge(client, NULL, *charged) == 0, "%s", bfc_last_error());
                *charged = 0;
                return;
        }
        r = bfc_charge(client, NULL, n_bytes, random_next(random) % 2 ? 20 : 0);
        REQUIRE(r == 0 || r == -EDQUOT || r == -ENOMEM, "%d: %s", r, bfc_last_error());
        *charged += r == 0 ? n_bytes : 0;
}

static void share(void *arg)
{
        struct sharers *s = arg;
        uint64_t random = s->seed + atomic_fetch_add(&s->n_started, 1) * 1000;
        bfc_client *client = child_client_open(s->socket, "blue");
        void *held[N_NAMES] = { NULL };
        uint64_t charged = 0;

        while (!atomic_load(&s->stop)) {
                unsigned name = (unsigned)(random_next(&random) % N_NAMES);

                if (held[name]) {
                        check_shared(client, held[name], name);
                        REQUIRE(bfc_detach(client, held[name]) == 0, "%s", bfc_last_error());
                        held[name] = NULL;
                } else if (random_next(&random) % 2) {
                        held[name] = publish(client, name);
                        atomic_fetch_add(&s->n_published, held[name] != NULL);
                } else {
                        held[name] = attach(client, name, random_next(&random) % 2 ? 20 : 0);
                        if (held[name])
                                check_shared(client, held[name], name);
                        atomic_fetch_add(&s->n_attached, held[name] != NULL);
                }
                charge(client, &charged, &random);
                usleep((useconds_t)(random_next(&random) % 2000));
        }
        bfc_disconnect(client);
}

/* ---- the test ------------------------------------------------------------------------ */

struct stats {
        uint64_t n_terms, n_kills, sum_ms, max_ms;
};

/* One more restart; some of the waits begin only once the next daemon is ready, and some do
 * not wait for that. */
static void restart_once(struct kept *k, uint64_t *random, bool kills, struct stats *f)
{
        unsigned pause_ms = (unsigned)(random_next(random) % MAX_PAUSE_MS);
        struct stand_in_state state = kept_state(k);
        bool waits = kills || random_next(random) % 4 != 0;
        int64_t begin = clock_ms();
        uint64_t ms;

        ck_assert_int_eq(stand_in_signal(k->manager, kills ? SIGKILL : SIGTERM), 0);
        if (waits) {
                kept_await(k, state.n_starts + 1);
                ms = (uint64_t)(clock_ms() - begin);
                f->sum_ms += ms;
                f->max_ms = ms > f->max_ms ? ms : f->max_ms;
        } else if (!WAIT_FOR(kept_state(k).n_starts > state.n_starts && kept_state(k).pid != 0, SETTLE_MS)) {
                kept_give_up(k, "no next daemon starts");
        }
        f->n_kills += kills;
        f->n_terms += !kills;
        usleep(pause_ms * 1000);
}

static void restart_many(struct kept *k, struct replay *replays, uint64_t seed, uint64_t n, struct stats *f)
{
        k->rig->admin = raw_close(k->rig->admin);
        while (f->n_terms < n || f->n_kills < n) {
                bool kills = f->n_kills < n && (f->n_terms >= n || random_next(&seed) % 2);

                restart_once(k, &seed, kills, f);
                for (unsigned i = 0; i < N_REPLAYS; i++)
                        ck_assert_msg(is_alive(replays + i),
                                      "the jobs (cache %s) ended after %llu restarts: %s", replays[i].cache,
                                      (unsigned long long)(f->n_terms + f->n_kills),
                                      file_text(replays[i].err));
        }
        kept_await(k, 1);
        k->rig->pid = kept_state(k).pid;
        rig_meet(k->rig);
}

static void look_well(struct kept *k, const struct sharers *s, const struct stats *f, uint64_t n_operations)
{
        printf("# %llu restarts, %llu kills: ready after %.1f ms, at most %llu; %llu operations, "
               "%llu published, %llu attached\n",
               (unsigned long long)f->n_terms, (unsigned long long)f->n_kills,
               (double)f->sum_ms / (double)(f->n_terms + f->n_kills), (unsigned long long)f->max_ms,
               (unsigned long long)n_operations, (unsigned long long)s->n_published,
               (unsigned long long)s->n_attached);
        fflush(stdout);
        ck_assert_uint_gt(n_operations, 1000);
        ck_assert_uint_gt(s->n_published, 0);
        ck_assert_uint_gt(s->n_attached, 0);
        /* Extents go back one after the other, once the sessions have gone. */
        ck_assert(WAIT_FOR(rig_charge(k->rig, "red", "train") == 0, SETTLE_MS));
}

TEST(restarts_at_random)
{
        uint64_t n = number_from("BFC_TEST_RESTARTS", 3), seed = number_from("BFC_TEST_SEED", 1);
        struct sharers *sharers = shared_memory(sizeof(*sharers));
        struct replay replays[N_REPLAYS];
        struct stats f = { 0 };
        pid_t pids[N_SHARERS];
        uint64_t n_operations = 0;
        char trace[96];
        struct kept *k;

        printf("# seed %llu\n", (unsigned long long)seed);
        setenv("BFC_RETURN_MS", "300000", 1); /* with slow builds no daemon lives long enough for all */
        k = kept_start(&roomy);
        snprintf(trace, sizeof(trace), "%s/t.csv", k->rig->folder);
        make_trace(trace, "random", "0.02");
        strcpy(sharers->socket, k->rig->socket);
        sharers->seed = seed;
        for (unsigned i = 0; i < N_REPLAYS; i++)
                replay_start(replays + i, k, trace, i == 0 ? "on" : "off");
        for (unsigned i = 0; i < N_SHARERS; i++)
                pids[i] = child_start(share, sharers);
        ck_assert(WAIT_FOR(rig_count(k->rig).n_sessions == N_REPLAYS * (unsigned)atoi(jobs()) + N_SHARERS,
                           SETTLE_MS));
        restart_many(k, replays, seed, n, &f);
        for (unsigned i = 0; i < N_REPLAYS; i++)
                n_operations += replay_stop(replays + i);
        atomic_store(&sharers->stop, true);
        for (unsigned i = 0; i < N_SHARERS; i++)
                child_join(pids[i]);
        ck_assert(WAIT_FOR(rig_count(k->rig).n_sessions == 0, SETTLE_MS));
        look_well(k, sharers, &f, n_operations);
        kept_stop(k);
}

int main(void)
{
        return harness_cases_with("restarts", 1800, NULL);
}
