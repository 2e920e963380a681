/* bench-restart: a thousand sessions with a hundred thousand blocks, and another daemon.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Each session is a process, with the library. A few of them call all the time, the others
 * wait; and some are a bare connection, which takes next to no time to come back. The daemon is restarted by SIGTERM and by SIGKILL, in turn, under the stand-in for
 * the service manager, which starts the next one as soon as one has ended. What counts: from
 * the old daemon's last reply to the new one's first, to any of them; until each of the callers has what
 * it asked for; and until all sessions are back, which the daemon itself
 * counts. For an eighth, a quarter, half and all of the sessions. */
#include <bfcclient.h>

#include <errno.h>
#include <getopt.h>
#include <jansson.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/bench/daemon.h"
#include "tests/integration/raw.h"
#include "tests/manager/stand_in.h"

#define BLOCK_BYTES 256u
#define N_CALLERS   16    /* with the library */
#define N_PROBES    8     /* bare */
#define CALL_US     2000u /* between two calls */
#define MAX_ROUNDS  100
#define N_STEPS     4
#define SETTLE_MS   100
#define PATIENCE_MS 600000

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
static char socket_path[96], admin_path[96], notify_path[96], config_path[96];

/* ---- sessions ---------------------------------------------------------------- */

static void fill(bfc_client *client)
{
        void *p;

        for (long i = 0; i < o.n_blocks / o.n_sessions; i++) {
                if (bfc_malloc(client, BLOCK_BYTES, &p) < 0)
                        die("a session's malloc", bfc_last_error());
        }
}

/* The answer of another daemon than the one before: between the two lies the restart. */
static void note(bfc_client *client, struct caller *c)
{
        static uint64_t done, num_returns;
        struct bfc_client_stats stats = { .struct_size = sizeof(stats) };
        uint64_t now = now_ns();

        if (bfc_stats(client, &stats) < 0)
                die("a caller's figures", bfc_last_error());
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
                if (bfc_malloc(client, BLOCK_BYTES, &p) < 0)
                        die("a caller", bfc_last_error());
                note(client, c);
                if (bfc_free(client, p) < 0)
                        die("a caller", bfc_last_error());
                note(client, c);
        }
}

/* Asks and asks; when it is hung up on it knocks again, and waits for the next daemon. */
static _Noreturn void probe(struct caller *c)
{
        struct raw_held nothing = { 0 };
        Bfcd__Figures figures;
        struct raw *raw = NULL, *next;
        uint64_t done = 0;

        if (raw_open(socket_path, &raw) < 0)
                die(socket_path, "no connection");
        raw->wants_events = raw->wants_return = true;
        if (raw_hello(raw, "crowd", NULL) < 0)
                die("a probe", raw_refusal());
        atomic_fetch_add(&stage->n_up, 1);
        for (;; (void)usleep(CALL_US)) {
                if (raw_usage(raw, 0, &figures) == 0) {
                        done = now_ns();
                        continue;
                }
                if (raw_open(socket_path, &next) < 0)
                        die(socket_path, "no connection");
                next->wants_events = next->wants_return = next->comes_back = true;
                next->session_id = raw->session_id;
                memcpy(next->secret, raw->secret, sizeof(next->secret));
                raw_close(raw);
                raw = next;
                if (raw_hello(raw, NULL, NULL) < 0)
                        die("a probe", raw_refusal());
                atomic_store(&c->begin_ns, done);
                atomic_store(&c->end_ns, now_ns());
                if (raw_held(raw, &nothing) < 0)
                        die("a probe", raw_refusal());
        }
}

static _Noreturn void live(long i)
{
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
        pid_t parent = getpid();

        for (long i = from; i < to; i++) {
                pids[i] = fork();
                if (pids[i] < 0)
                        die("fork", strerror(errno));
                if (pids[i] > 0)
                        continue;
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                if (getppid() == parent)
                        live(i);
                _exit(0);
        }
        for (int i = 0; atomic_load(&stage->n_up) < to; i++) {
                if (i == PATIENCE_MS / 10 || waitpid(-1, NULL, WNOHANG) > 0)
                        die("sessions", "one is missing");
                (void)poll(NULL, 0, 10);
        }
}

/* ---- a restart ------------------------------------------------------------------ */

static struct raw *admin_open(void)
{
        struct raw *admin = raw_connect(admin_path, NULL);

        if (!admin)
                die(admin_path, "no session there");
        return admin;
}

static Bfcd__Status status_of(struct raw *admin)
{
        Bfcd__Status status;
        Bfcd__Reply *reply;

        if (raw_list(admin, BFCD__LIST__KIND__STATUS, 0, &reply) < 0)
                die("status", raw_refusal());
        status = *reply->list->status;
        bfcd__reply__free_unpacked(reply, NULL);
        return status;
}

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
        if (waitpid(-1, NULL, WNOHANG) > 0 || now_ns() - since_ns > (uint64_t)PATIENCE_MS * 1000000)
                die("sessions", "some did not come back");
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

/* Waits until the daemon counts nobody who is away. */
static uint64_t await_all(long n_sessions)
{
        struct raw *admin = admin_open();
        uint64_t begin = now_ns();

        for (;;) {
                Bfcd__Status s = status_of(admin);

                if (s.num_quarantined == 0 && all_are_live(admin, n_sessions))
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
        if (stand_in_restart(manager, kind == BY_TERM ? SIGTERM : SIGKILL, PATIENCE_MS) < 0)
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

/* ---- figures --------------------------------------------------------------------- */

static int compare(const void *a, const void *b)
{
        double x = *(const double *)a, y = *(const double *)b;

        return x < y ? -1 : x > y;
}

static void steps_sort(struct step *steps)
{
        for (int i = 0; i < N_STEPS; i++) {
                for (int kind = 0; kind < N_KINDS; kind++) {
                        for (int what = 0; what < N_WHATS; what++)
                                qsort(steps[i].ms[kind][what], (size_t)o.n_rounds, sizeof(double), compare);
                }
        }
}

static json_t *step_json(const struct step *step)
{
        json_t *ret = json_pack("{s:I, s:I}", "num_sessions", (json_int_t)step->n_sessions, "num_blocks",
                                (json_int_t)(o.n_blocks / o.n_sessions * step->n_sessions));

        for (int kind = 0; kind < N_KINDS; kind++) {
                json_t *one = json_object();

                for (int what = 0; what < N_WHATS; what++)
                        json_object_set_new(one, what_names[what],
                                            json_pack("{s:f, s:f}", "median",
                                                      step->ms[kind][what][o.n_rounds / 2], "max",
                                                      step->ms[kind][what][o.n_rounds - 1]));
                json_object_set_new(ret, kind_names[kind], one);
        }
        return ret;
}

static void print_json(const struct step *steps)
{
        json_t *list = json_array(), *all;

        for (int i = 0; i < N_STEPS; i++)
                json_array_append_new(list, step_json(steps + i));
        all = json_pack("{s:i, s:I, s:o}", "schema", 1, "rounds", (json_int_t)o.n_rounds, "steps", list);
        json_dumpf(all, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(4));
        putchar('\n');
        json_decref(all);
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
                                printf(" %8.1f %8.1f", steps[i].ms[kind][what][o.n_rounds / 2],
                                       steps[i].ms[kind][what][o.n_rounds - 1]);
                        putchar('\n');
                }
        }
}

/* Medians: the machine does other things, too. */
static bool is_good(const struct step *steps)
{
        bool good = true;

        for (int kind = 0; kind < N_KINDS; kind++) {
                const double(*ms)[MAX_ROUNDS] = steps[N_STEPS - 1].ms[kind];

                good = good && (o.max_first_ms == 0 || ms[FIRST][o.n_rounds / 2] <= o.max_first_ms) &&
                       (o.max_back_ms == 0 || ms[BACK][o.n_rounds / 2] <= o.max_back_ms);
        }
        return good;
}

/* ---- the program -------------------------------------------------------------------- */

static long to_number(const char *word, long min, long max)
{
        char *end;
        long n = strtol(word, &end, 10);

        if (*end || end == word || n < min || n > max)
                die(word, "not a number that makes sense here");
        return n;
}

static _Noreturn void usage(int status)
{
        fprintf(status == 0 ? stdout : stderr,
                "Usage: bench-restart --bfcd PROGRAM [--json] [--sessions N] [--blocks N] [--rounds N]\n"
                "                     [--restart-ms N] [--max-first-ms MS] [--max-back-ms MS]\n");
        exit(status);
}

static void parse(int argc, char **argv)
{
        static const struct option longs[] = {
                { "bfcd", required_argument, NULL, 'd' },
                { "json", no_argument, NULL, 'j' },
                { "sessions", required_argument, NULL, 's' },
                { "blocks", required_argument, NULL, 'b' },
                { "rounds", required_argument, NULL, 'r' },
                { "restart-ms", required_argument, NULL, 'w' },
                { "max-first-ms", required_argument, NULL, 'f' },
                { "max-back-ms", required_argument, NULL, 'm' },
                { "help", no_argument, NULL, 'h' },
                { 0 },
        };
        int c;

        while ((c = getopt_long(argc, argv, "h", longs, NULL)) != -1) {
                if (c == 'd')
                        o.bfcd = optarg;
                else if (c == 'j')
                        o.json = true;
                else if (c == 's')
                        o.n_sessions = to_number(optarg, 8, 4000);
                else if (c == 'b')
                        o.n_blocks = to_number(optarg, 8, 4000000);
                else if (c == 'r')
                        o.n_rounds = to_number(optarg, 1, MAX_ROUNDS);
                else if (c == 'w')
                        o.restart_ms = to_number(optarg, 0, 10000);
                else if (c == 'f')
                        o.max_first_ms = atof(optarg);
                else if (c == 'm')
                        o.max_back_ms = atof(optarg);
                else
                        usage(c == 'h' ? 0 : 2);
        }
        if (!o.bfcd || optind < argc)
                usage(2);
}

static void write_config(void)
{
        unsigned long mib = (unsigned long)o.n_blocks * BLOCK_BYTES / (1u << 20) + 64;
        FILE *f = fopen(config_path, "we");

        if (!f)
                die(config_path, strerror(errno));
        fprintf(f,
                "socket: {path: %s, mode: \"0666\"}\n"
                "admin_socket: {path: %s, mode: \"0600\"}\n"
                "max_sessions: 5000\n"
                "devices:\n"
                "  - id: host\n"
                "    size: %luMiB\n"
                "    partitions: [{name: bench, limit: %luMiB}]\n"
                "tenants:\n"
                "  - name: crowd\n"
                "    match: {uid: %u}\n"
                "    quotas: [{partition: bench, limit: %luMiB, max_sessions: 4096, max_blocks: 4100000}]\n",
                socket_path, admin_path, mib, mib, (unsigned)geteuid(), mib);
        fclose(f);
}

static void set_the_stage(void)
{
        const char *argv[] = { o.bfcd, "--config", config_path, "--log-level", "warning", NULL };
        struct stand_in_options options = { .argv = argv,
                                            .socket = socket_path,
                                            .admin_socket = admin_path,
                                            .notify = notify_path,
                                            .max_stored = 8192,
                                            .restart_ms = (unsigned)o.restart_ms };

        make_folder("bench-restart");
        snprintf(socket_path, sizeof(socket_path), "%s/bfcd.sock", folder);
        snprintf(admin_path, sizeof(admin_path), "%s/admin.sock", folder);
        snprintf(notify_path, sizeof(notify_path), "%s/notify", folder);
        snprintf(config_path, sizeof(config_path), "%s/bfcd.yaml", folder);
        write_config();
        stage = mmap(NULL, sizeof(*stage), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (stage == MAP_FAILED)
                die("memory", strerror(errno));
        if (stand_in_start(&options, &manager) < 0 || stand_in_wait_ready(manager, 1, PATIENCE_MS) < 0)
                die(o.bfcd, "is not ready");
}

int main(int argc, char **argv)
{
        struct step *steps = calloc(N_STEPS, sizeof(*steps));
        long n_there = 0;
        pid_t *pids;
        bool good;

        parse(argc, argv);
        pids = calloc((size_t)o.n_sessions + N_PROBES, sizeof(*pids));
        if (!pids || !steps)
                die("memory", strerror(ENOMEM));
        set_the_stage();
        for (int i = 0; i < N_STEPS; i++) {
                steps[i].n_sessions = o.n_sessions >> (N_STEPS - 1 - i);
                sessions_start(pids, n_there, steps[i].n_sessions + N_PROBES);
                n_there = steps[i].n_sessions + N_PROBES;
                for (long round = 0; round < o.n_rounds; round++) {
                        restart_once(steps + i, BY_TERM, round);
                        restart_once(steps + i, BY_KILL, round);
                }
        }
        for (long i = 0; i < n_there; i++)
                kill(pids[i], SIGKILL);
        for (long i = 0; i < n_there; i++)
                (void)waitpid(pids[i], NULL, 0);
        stand_in_end(manager);
        steps_sort(steps);
        if (o.json)
                print_json(steps);
        else
                print_table(steps);
        good = is_good(steps);
        free(pids);
        free(steps);
        return good ? EXIT_SUCCESS : EXIT_FAILURE;
}
