/* bench-restart: a thousand sessions with a hundred thousand blocks, and another daemon.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Each session is a process with the library. A few of them call all the time, and the others
 * wait. Some are a bare connection, which resumes in next to no time. The daemon is restarted by
 * SIGTERM and by SIGKILL in turn, under the stand-in for the service manager. It starts the next
 * daemon as soon as one has ended. Measured are the times from the old daemon's last reply to the
 * new one's first; until each caller has been served; and until the daemon counts all sessions
 * as live. For an eighth, a quarter, half and all of the sessions. */
#include <bfcclient.h>

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/bench/admin.h"
#include "tests/bench/options.h"
#include "tests/manager/stand_in.h"

#define BLOCK_BYTES 256u
#define N_CALLERS   16    /* with the library */
#define N_PROBES    8     /* bare */
#define CALL_US     2000u /* between two calls */
#define MAX_ROUNDS  100
#define N_STEPS     4
#define SETTLE_MS   100
#define TIMEOUT_MS  600000
#define MAX_TRIES   1000 /* of a probe, to say hello */

static struct {
        const char *bfcd;
        long n_sessions, n_blocks, n_rounds, restart_ms;
        double max_first_ms, max_back_ms;
        bool json;
} o = { .n_sessions = 1000, .n_blocks = 100000, .n_rounds = 5 };

/* One of the callers: the last daemon's last answer to it, and this one's first. */
struct caller {
        _Atomic uint64_t begin_ns, end_ns; /* stored in this order */
};

struct stage {
        _Atomic long n_up;
        struct caller callers[N_CALLERS], probes[N_PROBES];
};

enum kind { BY_TERM, BY_KILL, N_KINDS };
enum what { FIRST, EACH, BACK, READY, N_WHATS };
static const char *const kind_names[] = { "sigterm", "sigkill" };
static const char *const what_names[] = { "first_reply_ms", "callers_served_ms", "all_back_ms", "ready_ms" };

struct step {
        long n_sessions;
        double ms[N_KINDS][N_WHATS][MAX_ROUNDS];
};

static struct stage *stage;
static struct stand_in *manager;

/* ---- sessions ---------------------------------------------------------------- */

static void fill(bfc_client *client)
{
        for (long i = 0; i < o.n_blocks / o.n_sessions; i++)
                (void)bench_malloc(client, BLOCK_BYTES);
}

/* Notes the last answer before a restart and the first one after it. */
static void note(bfc_client *client, struct caller *c)
{
        static uint64_t done, num_returns;
        uint64_t now = now_ns();
        struct bfc_client_stats stats = bench_stats(client);

        if (stats.num_returns != num_returns) {
                atomic_store(&c->begin_ns, done);
                atomic_store(&c->end_ns, now);
        }
        num_returns = stats.num_returns;
        done = now;
}

static _Noreturn void call(bfc_client *client, struct caller *c)
{
        void *p;

        for (;; (void)usleep(CALL_US)) {
                p = bench_malloc(client, BLOCK_BYTES);
                note(client, c);
                bench_free(client, p);
                note(client, c);
        }
}

/* A session, new or that of `before`. As the library: of many that connect in one moment, the daemon closes some, and they
 * connect again. */
static struct raw *greet(struct raw *before)
{
        struct raw *raw;

        for (unsigned i = 0; i < MAX_TRIES; i++) {
                if (raw_open(socket_path, &raw) < 0)
                        die(socket_path, "no connection");
                raw->wants_events = raw->wants_return = true;
                if (before) {
                        raw->comes_back = true;
                        raw->session_id = before->session_id;
                        memcpy(raw->secret, before->secret, sizeof(raw->secret));
                }
                if (raw_hello(raw, before ? NULL : "crowd", NULL) == 0)
                        return raw;
                raw_close(raw);
                (void)usleep((useconds_t)(1000 + random() % 20000));
        }
        die("a probe", raw_refusal());
}

/* Asks all the time. After a hang-up it connects again, and waits for the next daemon. */
static _Noreturn void probe(struct caller *c)
{
        struct raw_held nothing = { 0 };
        Bfcd__Statistics stats;
        struct raw *raw = greet(NULL), *next;
        uint64_t done = 0;

        atomic_fetch_add(&stage->n_up, 1);
        for (;; (void)usleep(CALL_US)) {
                if (raw_usage(raw, 0, &stats) == 0) {
                        done = now_ns();
                        continue;
                }
                next = greet(raw);
                raw_close(raw);
                raw = next;
                atomic_store(&c->begin_ns, done);
                atomic_store(&c->end_ns, now_ns());
                if (raw_held(raw, &nothing) < 0)
                        die("a probe", raw_refusal());
        }
}

static void live(void *arg)
{
        long i = *(const long *)arg;
        bfc_client *client;

        if (i < N_PROBES)
                probe(stage->probes + i);
        i -= N_PROBES;
        client = client_start(socket_path, "crowd", BFC_NO_CACHE);
        fill(client);
        atomic_fetch_add(&stage->n_up, 1);
        if (i < N_CALLERS)
                call(client, stage->callers + i);
        for (;;)
                (void)pause();
}

static void sessions_start(pid_t *pids, long from, long to)
{
        for (long i = from; i < to; i++)
                pids[i] = process_start(live, &i);
        for (int i = 0; atomic_load(&stage->n_up) < to; i++) {
                if (i == TIMEOUT_MS / 10 || waitpid(-1, NULL, WNOHANG) > 0)
                        die("sessions", "one is missing");
                (void)poll(NULL, 0, 10);
        }
}

/* ---- a restart ------------------------------------------------------------------ */

static long n_callers(const struct step *step)
{
        return step->n_sessions < N_CALLERS ? step->n_sessions : N_CALLERS;
}

static bool all_are_live(struct raw *admin, long n_sessions)
{
        uint64_t cursor = 0;
        Bfcd__Reply *page;
        long n = 0;

        do {
                if (raw_list(admin, BFCD__LIST__KIND__SESSIONS, cursor, &page) < 0)
                        die("sessions", raw_refusal());
                for (size_t i = 0; i < page->list->n_sessions; i++)
                        n += page->list->sessions[i]->tenant[0] != '\0' &&
                             strcmp(page->list->sessions[i]->state, "live") == 0;
                cursor = page->list->next_cursor;
                bfcd__reply__free_unpacked(page, NULL);
        } while (cursor != 0);
        return n == n_sessions;
}

static void rest(uint64_t since_ns)
{
        if (waitpid(-1, NULL, WNOHANG) > 0 || now_ns() - since_ns > (uint64_t)TIMEOUT_MS * 1000000)
                die("sessions", "some were not resumed");
        (void)poll(NULL, 0, 2);
}

/* Each caller has been served by the new daemon. */
static void await_callers(const struct step *step, uint64_t since_ns)
{
        for (long i = 0; i < n_callers(step); i++) {
                while (atomic_load(&stage->callers[i].end_ns) < since_ns)
                        rest(since_ns);
        }
        for (long i = 0; i < N_PROBES; i++) {
                while (atomic_load(&stage->probes[i].end_ns) < since_ns)
                        rest(since_ns);
        }
}

/* Waits until no session is suspended. */
static uint64_t await_all(long n_sessions)
{
        struct raw *admin = session_open(admin_path, NULL);
        uint64_t begin = now_ns();

        for (;;) {
                struct admin_status s = admin_status(admin);

                if (s.n_quarantined == 0 && all_are_live(admin, n_sessions))
                        break;
                rest(begin);
        }
        begin = now_ns();
        raw_close(admin);
        return begin;
}

static uint64_t max_u64(uint64_t a, uint64_t b)
{
        return a > b ? a : b;
}

static void restart_once(struct step *step, enum kind kind, long round)
{
        uint64_t last = 0, first = UINT64_MAX, each = 0, back, ready, begin;
        double(*ms)[MAX_ROUNDS] = step->ms[kind];

        begin = now_ns();
        if (stand_in_restart(manager, kind == BY_TERM ? SIGTERM : SIGKILL, TIMEOUT_MS) < 0)
                die("the daemon", "is not ready again");
        ready = now_ns();
        back = await_all(step->n_sessions + N_PROBES);
        await_callers(step, begin);
        for (long i = 0; i < n_callers(step); i++) {
                struct caller *c = stage->callers + i;

                last = max_u64(c->begin_ns, last);
                each = max_u64(c->end_ns, each);
        }
        for (long i = 0; i < N_PROBES; i++) {
                struct caller *c = stage->probes + i;

                last = max_u64(c->begin_ns, last);
                first = c->end_ns < first ? c->end_ns : first;
        }
        ms[FIRST][round] = (double)(first - last) / 1e6;
        ms[EACH][round] = (double)(each - last) / 1e6;
        ms[BACK][round] = (double)(back - last) / 1e6;
        ms[READY][round] = (double)(ready - begin) / 1e6;
        (void)poll(NULL, 0, SETTLE_MS);
}

/* ---- results --------------------------------------------------------------------- */

static double median(const struct step *step, int kind, int what)
{
        return quantile((double *)(uintptr_t)step->ms[kind][what], (size_t)o.n_rounds, 50);
}

static double worst(const struct step *step, int kind, int what)
{
        return quantile((double *)(uintptr_t)step->ms[kind][what], (size_t)o.n_rounds, 100);
}

static json_t *step_json(const struct step *step)
{
        json_t *ret = json_pack("{s:I, s:I}", "num_sessions", (json_int_t)step->n_sessions, "num_blocks",
                                (json_int_t)(o.n_blocks / o.n_sessions * step->n_sessions));

        for (int kind = 0; kind < N_KINDS; kind++) {
                json_t *one = json_object();

                for (int what = 0; what < N_WHATS; what++)
                        json_object_set_new(one, what_names[what],
                                            json_pack("{s:f, s:f}", "median", median(step, kind, what), "max",
                                                      worst(step, kind, what)));
                json_object_set_new(ret, kind_names[kind], one);
        }
        return ret;
}

static json_t *to_json(const struct step *steps)
{
        json_t *list = json_array();

        for (int i = 0; i < N_STEPS; i++)
                json_array_append_new(list, step_json(steps + i));
        return json_pack("{s:i, s:I, s:o}", "schema", 1, "rounds", (json_int_t)o.n_rounds, "steps", list);
}

static void print_table(const struct step *steps)
{
        printf("%ld restarts of each kind; ms from the old daemon's last reply, median and worst\n",
               o.n_rounds);
        printf("%9s %8s %8s %17s %17s %17s\n", "sessions", "blocks", "by", "the first reply", "all callers",
               "all are back");
        for (int i = 0; i < N_STEPS; i++) {
                for (int kind = 0; kind < N_KINDS; kind++) {
                        printf("%9ld %8ld %8s", steps[i].n_sessions,
                               o.n_blocks / o.n_sessions * steps[i].n_sessions, kind_names[kind] + 3);
                        for (int what = 0; what < READY; what++)
                                printf(" %8.1f %8.1f", median(steps + i, kind, what),
                                       worst(steps + i, kind, what));
                        putchar('\n');
                }
        }
}

/* Medians: the machine does other things, too. */
static bool is_good(const struct step *steps)
{
        bool good = true;

        for (int kind = 0; kind < N_KINDS; kind++) {
                const struct step *last = steps + N_STEPS - 1;

                good = good && (o.max_first_ms <= 0 || median(last, kind, FIRST) <= o.max_first_ms) &&
                       (o.max_back_ms <= 0 || median(last, kind, BACK) <= o.max_back_ms);
        }
        return good;
}

/* ---- the program -------------------------------------------------------------------- */

static void parse(int argc, char **argv)
{
        const struct bench_option options[] = {
                OPTION_BFCD(&o.bfcd),
                OPTION_JSON(&o.json),
                { "sessions", .count = &o.n_sessions, .min = 8, .max = 4000, .unit = "N",
                  .help = "sessions" },
                { "blocks", .count = &o.n_blocks, .min = 8, .max = 4000000, .unit = "N",
                  .help = "blocks of all" },
                { "rounds", .count = &o.n_rounds, .min = 1, .max = MAX_ROUNDS, .unit = "N",
                  .help = "restarts of each kind" },
                { "restart-ms", .count = &o.restart_ms, .max = 10000, .unit = "N",
                  .help = "pause before the next daemon" },
                { "max-first-ms", .number = &o.max_first_ms, .unit = "MS",
                  .help = "limit of first_reply_ms" },
                { "max-back-ms", .number = &o.max_back_ms, .unit = "MS", .help = "limit of all_back_ms" },
                { 0 },
        };

        options_parse(argc, argv, "Times restarts of a daemon with many sessions and blocks.", options);
        options_require(o.bfcd, "--bfcd is missing");
}

static void set_up(void)
{
        unsigned long mib = (unsigned long)o.n_blocks * BLOCK_BYTES / (1u << 20) + 64;
        char text[512], config[128], notify[128];
        const char *argv[] = { o.bfcd, "--config", config, "--log-level", "warning", NULL };
        struct stand_in_options options = { .argv = argv,
                                            .socket = socket_path,
                                            .admin_socket = admin_path,
                                            .notify = notify,
                                            .keeps = true,
                                            .restart_ms = (unsigned)o.restart_ms };

        make_folder("bench-restart");
        snprintf(notify, sizeof(notify), "%s/notify", folder);
        snprintf(text, sizeof(text),
                 "max_sessions: 5000\n"
                 "devices:\n"
                 "  - id: host\n"
                 "    size: %luMiB\n"
                 "    partitions: [{name: bench, limit: %luMiB}]\n"
                 "tenants:\n"
                 "  - name: crowd\n"
                 "    match: {uid: %u}\n"
                 "    quotas: [{partition: bench, limit: %luMiB, max_sessions: 4096, max_blocks: 4100000}]\n",
                 mib, mib, (unsigned)geteuid(), mib);
        write_config(text, config, sizeof(config));
        stage = shared_memory(sizeof(*stage));
        if (stand_in_start(&options, &manager) < 0 || stand_in_wait_ready(manager, 1, TIMEOUT_MS) < 0)
                die(o.bfcd, "is not ready");
}

int main(int argc, char **argv)
{
        struct step *steps = need(calloc(N_STEPS, sizeof(*steps)));
        long n_there = 0;
        pid_t *pids;
        bool good;

        parse(argc, argv);
        pids = need(calloc((size_t)o.n_sessions + N_PROBES, sizeof(*pids)));
        set_up();
        for (int i = 0; i < N_STEPS; i++) {
                steps[i].n_sessions = o.n_sessions >> (N_STEPS - 1 - i);
                sessions_start(pids, n_there, steps[i].n_sessions + N_PROBES);
                n_there = steps[i].n_sessions + N_PROBES;
                for (long round = 0; round < o.n_rounds; round++) {
                        restart_once(steps + i, BY_TERM, round);
                        restart_once(steps + i, BY_KILL, round);
                }
        }
        processes_kill(pids, n_there);
        stand_in_end(manager);
        if (o.json)
                print_json(to_json(steps));
        else
                print_table(steps);
        good = is_good(steps);
        free(pids);
        free(steps);
        return good ? EXIT_SUCCESS : EXIT_FAILURE;
}
