/* bench-neighbours: what the worst neighbours cost somebody else.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A victim mallocs and frees through the daemon, one request at a time. Beside it
 * are as many processes of another tenant, which are polite, or flood, die, hold
 * the line. Daemon and victim have one core, the neighbours the other. Phases are
 * short and go to and fro between polite and hostile, so that whatever the
 * machine does meanwhile meets both; what counts is the victim's p99 beside a
 * hostile neighbour against that beside an equally busy polite one. In each phase
 * a third tenant grows up to its reserve, from nothing; it must be granted.
 *
 * The kinds `grow` and `release` are not beside the polite: see supply.h. */
#include <bfcclient.h>

#include <errno.h>
#include <getopt.h>
#include <grp.h>
#include <jansson.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/bench/daemon.h"
#include "tests/bench/hostile.h"
#include "tests/bench/supply.h"
#include "tests/integration/raw.h"

#define BLOCK_BYTES    4000u
#define MAX_NEIGHBOURS 64
#define MAX_SAMPLES    (UINT32_C(4) << 20)
#define NEIGHBOUR_UID  4242u /* for runs as root: no user of the victim's */
#define RESERVE_MIB    32u
#define SETTLE_MS      120000

/* The neighbours may take all that the others' reserves leave. */
static const char config_text[] =
        "timeouts: {quarantine: 1s}\n"
        "devices:\n"
        "  - id: host\n"
        "    size: 192MiB\n"
        "    partitions:\n"
        "      - {name: bench, limit: 192MiB, growth: on-demand}\n"
        "tenants:\n"
        "  - {name: victim, match: {uid: %u}, quotas: [{partition: bench, limit: 32MiB, reserve: 32MiB}]}\n"
        "  - {name: grower, match: {uid: %u}, quotas: [{partition: bench, limit: 32MiB, reserve: 32MiB}]}\n"
        "  - {name: " NEIGHBOUR
        ", match: {uid: [%u, %u]}, quotas: [{partition: bench, limit: 192MiB, max_sessions: 256}]}\n";

static struct {
        const char *bfcd;
        const char *only; /* one kind of neighbour */
        long n_neighbours, n_rounds, phase_ms;
        double max_ratio, max_ms;
        int core, other_core;
        bool json, is_cuda;
        long supply_mib;
} o = { .supply_mib = 4096, .n_neighbours = 4, .n_rounds = 10, .phase_ms = 200, .core = 0, .other_core = 1 };

struct samples {
        uint32_t *ns;
        size_t n;
        uint64_t n_acts; /* of the neighbours */
        uint64_t n_ms;
        unsigned n_refused; /* grants that the reserve promises */
        unsigned n_granted;
        uint32_t median, p99, max;
};

static struct stage *stage;
static bfc_client *victim;
static void *held[64]; /* so that the victim's memory stays backed */

/* ---- one phase ------------------------------------------------------------- */

static pid_t neighbour_start(const struct hostile *kind)
{
        pid_t parent = getpid(), pid = fork();

        if (pid < 0)
                die("fork", strerror(errno));
        if (pid > 0)
                return pid;
        pin(0, o.other_core);
        if (geteuid() == 0 && (setgroups(0, NULL) < 0 || setgid(NEIGHBOUR_UID) < 0 || setuid(NEIGHBOUR_UID)))
                die("setuid", strerror(errno));
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        signal(SIGCHLD, SIG_DFL);
        if (getppid() == parent)
                kind->act(stage);
        _exit(0);
}

static void victim_works(struct samples *s, uint64_t until_ns)
{
        uint64_t begin, middle, end = now_ns();

        while (end < until_ns && s->n + 2 <= MAX_SAMPLES) {
                void *p;

                begin = now_ns();
                if (bfc_malloc(victim, BLOCK_BYTES, &p) < 0)
                        die("the victim's malloc", bfc_last_error());
                middle = now_ns();
                if (bfc_free(victim, p) < 0)
                        die("the victim's free", bfc_last_error());
                end = now_ns();
                s->ns[s->n++] = (uint32_t)(middle - begin);
                s->ns[s->n++] = (uint32_t)(end - middle);
        }
}

/* From nothing to the reserve, which is promised whatever the neighbours hold. */
static void grow(struct samples *s)
{
        struct bfc_options options = { .struct_size = sizeof(options),
                                       .socket = stage->socket,
                                       .tenant = "grower",
                                       .flags = BFC_NO_CACHE };
        bfc_client *client;
        void *p;

        if (bfc_connect(&options, &client) < 0) {
                fprintf(stderr, "grower: %s\n", bfc_last_error());
                s->n_refused++;
                return;
        }
        for (unsigned i = 0; i < RESERVE_MIB / 2; i++) {
                int r = bfc_malloc(client, 2u << 20, &p);

                s->n_granted += r == 0;
                s->n_refused += r < 0;
                if (r < 0)
                        fprintf(stderr, "grower: %s\n", bfc_last_error());
        }
        bfc_disconnect(client);
}

/* Until the daemon is done with the neighbours of the phase before. */
static void settle(void)
{
        static struct raw *admin;
        char path[160];

        snprintf(path, sizeof(path), "%s/admin.sock", folder);
        if (!admin && !(admin = raw_connect(path, NULL)))
                die(path, "no session there");
        for (int i = 0; i < SETTLE_MS; i++) {
                Bfcd__Reply *reply;
                uint64_t n_sessions, n_pending = 0;

                if (raw_list(admin, BFCD__LIST__KIND__STATUS, 0, &reply) < 0)
                        die("status", raw_refusal());
                n_sessions = reply->list->status->num_sessions;
                for (size_t k = 0; k < reply->list->status->n_devices; k++)
                        n_pending += reply->list->status->devices[k]->bytes_pending;
                bfcd__reply__free_unpacked(reply, NULL);
                if (n_sessions == 1 && n_pending == 0)
                        return;
                (void)poll(NULL, 0, 1);
        }
        die("neighbours", "the daemon is not done with those of the last phase");
}

static void phase(const struct hostile *kind, struct samples *s)
{
        pid_t pids[MAX_NEIGHBOURS];
        uint64_t begin;

        settle();
        atomic_store(&stage->n_up, 0);
        for (long i = 0; i < o.n_neighbours; i++)
                pids[i] = neighbour_start(kind);
        while (atomic_load(&stage->n_up) < (uint64_t)o.n_neighbours)
                (void)poll(NULL, 0, 1);
        (void)poll(NULL, 0, 20);
        atomic_store(&stage->n_acts, 0);
        begin = now_ns();
        victim_works(s, begin + (uint64_t)o.phase_ms * 1000000);
        s->n_acts += atomic_load(&stage->n_acts);
        s->n_ms += (now_ns() - begin) / 1000000;
        grow(s);
        for (long i = 0; i < o.n_neighbours; i++)
                kill(pids[i], SIGKILL);
        for (long i = 0; i < o.n_neighbours; i++)
                (void)waitpid(pids[i], NULL, 0);
}

/* ---- figures --------------------------------------------------------------- */

static void samples_new(struct samples *s)
{
        *s = (struct samples){ .ns = malloc(MAX_SAMPLES * sizeof(*s->ns)) }; /* untouched: no memory */
        if (!s->ns)
                die("memory", strerror(ENOMEM));
}

static int compare(const void *a, const void *b)
{
        uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

        return x < y ? -1 : x > y;
}

static void evaluate(struct samples *s)
{
        qsort(s->ns, s->n, sizeof(*s->ns), compare);
        if (s->n == 0)
                return;
        s->median = s->ns[s->n / 2];
        s->p99 = s->ns[s->n * 99 / 100];
        s->max = s->ns[s->n - 1];
}

static json_t *to_json(const struct samples *s)
{
        return json_pack("{s:I, s:I, s:I, s:I, s:I}", "median_ns", (json_int_t)s->median, "p99_ns",
                         (json_int_t)s->p99, "max_ns", (json_int_t)s->max, "num_requests", (json_int_t)s->n,
                         "neighbours_acts_per_second",
                         (json_int_t)(s->n_ms ? s->n_acts * 1000 / s->n_ms : 0));
}

static void print_row(const char *what, const struct samples *s)
{
        printf("  %-26s %9.1f %9.1f %9.1f %10llu %12llu\n", what, s->median / 1e3, s->p99 / 1e3, s->max / 1e3,
               (unsigned long long)s->n, (unsigned long long)(s->n_ms ? s->n_acts * 1000 / s->n_ms : 0));
}

/* One kind of neighbour beside the polite one; the ratio. */
static double measure(const struct hostile *kind, json_t *list, unsigned *n_refused)
{
        struct samples with_polite, with_hostile;
        double ratio;

        samples_new(&with_polite);
        samples_new(&with_hostile);
        for (long i = 0; i < o.n_rounds; i++) {
                phase(&polite, &with_polite);
                phase(kind, &with_hostile);
        }
        evaluate(&with_polite);
        evaluate(&with_hostile);
        ratio = with_polite.p99 ? (double)with_hostile.p99 / with_polite.p99 : 0;
        *n_refused += with_polite.n_refused + with_hostile.n_refused;
        if (o.json) {
                json_array_append_new(list,
                                      json_pack("{s:s, s:f, s:o, s:o, s:i, s:i}", "neighbour", kind->key,
                                                "ratio", ratio, "polite", to_json(&with_polite), "hostile",
                                                to_json(&with_hostile), "reserve_grants",
                                                (int)with_hostile.n_granted, "reserve_refusals",
                                                (int)(with_polite.n_refused + with_hostile.n_refused)));
        } else {
                printf("%s: ratio %.2f\n", kind->what, ratio);
                print_row("beside the polite", &with_polite);
                print_row("beside the hostile", &with_hostile);
                fflush(stdout);
        }
        free(with_polite.ns);
        free(with_hostile.ns);
        return ratio;
}

/* ---- the program ----------------------------------------------------------- */

static _Noreturn void usage(FILE *f, int status)
{
        fprintf(f,
                "Usage: bench-neighbours --bfcd PROGRAM [--json] [--pin CORE,CORE | --pin none] [--rounds N]\n"
                "                        [--phase-ms N] [--neighbours N] [--only KIND] [--max-ratio F]\n"
                "                        [--supply-mib N] [--max-ms F] [--cuda]\n"
                "\n"
                "What hostile neighbours cost a victim, beside polite ones. Microseconds; acts are requests,\n"
                "connections or deaths. Ends with 1 if a ratio of the p99s is above --max-ratio, or if\n"
                "anybody was refused what its reserve promises.\n"
                "The kinds 'grow' and 'release': how long 64 MiB take beside a growth or release of --supply-mib\n"
                "(4096). Ends with 1 if a median is above --max-ms. --cuda: only these, on the GPU cuda:0.\n");
        exit(status);
}

static long to_number(const char *word, long min, long max)
{
        char *end;
        long n = strtol(word, &end, 10);

        if (*end || end == word || n < min || n > max)
                die(word, "not a number that makes sense here");
        return n;
}

static void parse_pin(const char *word)
{
        if (strcmp(word, "none") == 0)
                o.core = o.other_core = -1;
        else if (sscanf(word, "%d,%d", &o.core, &o.other_core) != 2 || o.core < 0 || o.other_core < 0)
                die(word, "give two cores, as 0,1, or none");
}

static void parse(int argc, char **argv)
{
        static const struct option longs[] = {
                { "bfcd", required_argument, NULL, 'd' },
                { "json", no_argument, NULL, 'j' },
                { "pin", required_argument, NULL, 'p' },
                { "rounds", required_argument, NULL, 'r' },
                { "phase-ms", required_argument, NULL, 'm' },
                { "neighbours", required_argument, NULL, 'n' },
                { "only", required_argument, NULL, 'o' },
                { "max-ratio", required_argument, NULL, 'x' },
                { "supply-mib", required_argument, NULL, 's' },
                { "max-ms", required_argument, NULL, 'M' },
                { "cuda", no_argument, NULL, 'c' },
                { "help", no_argument, NULL, 'h' },
                { 0 },
        };
        int c;

        if (sysconf(_SC_NPROCESSORS_ONLN) < 2)
                o.core = o.other_core = -1;
        while ((c = getopt_long(argc, argv, "h", longs, NULL)) != -1) {
                if (c == 'd')
                        o.bfcd = optarg;
                else if (c == 'j')
                        o.json = true;
                else if (c == 'p')
                        parse_pin(optarg);
                else if (c == 'r')
                        o.n_rounds = to_number(optarg, 1, 100000);
                else if (c == 'm')
                        o.phase_ms = to_number(optarg, 1, 100000);
                else if (c == 'n')
                        o.n_neighbours = to_number(optarg, 1, MAX_NEIGHBOURS);
                else if (c == 'o')
                        o.only = optarg;
                else if (c == 's')
                        o.supply_mib = to_number(optarg, 2, 1 << 20);
                else if (c == 'M')
                        o.max_ms = atof(optarg);
                else if (c == 'c')
                        o.is_cuda = true;
                else if (c == 'x')
                        o.max_ratio = atof(optarg);
                else
                        usage(c == 'h' ? stdout : stderr, c == 'h' ? EXIT_SUCCESS : 2);
        }
        if (!o.bfcd || optind < argc)
                usage(stderr, 2);
}

static pid_t set_the_stage(void)
{
        unsigned uid = (unsigned)geteuid();
        char text[2048];
        pid_t pid;

        stage = mmap(NULL, sizeof(*stage), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (stage == MAP_FAILED)
                die("memory", strerror(errno));
        snprintf(stage->socket, sizeof(stage->socket), "%s/bfcd.sock", folder);
        snprintf(text, sizeof(text), config_text, uid, uid, uid, NEIGHBOUR_UID);
        pid = daemon_start_with(o.bfcd, text, o.core);
        victim = client_start(stage->socket, "victim", BFC_NO_CACHE | BFC_NO_THREAD);
        pin(0, o.core);
        for (size_t i = 0; i < sizeof(held) / sizeof(held[0]); i++)
                if (bfc_malloc(victim, BLOCK_BYTES, &held[i]) < 0)
                        die("bfc_malloc", bfc_last_error());
        return pid;
}

static bool is_supply(const char *kind)
{
        return strcmp(kind, "grow") == 0 || strcmp(kind, "release") == 0;
}

/* All kinds but those of supply.h; the worst ratio. */
static double measure_hostiles(json_t *list, unsigned *n_refused)
{
        pid_t pid = set_the_stage();
        double worst = 0;

        if (!o.json)
                printf("  %-26s %9s %9s %9s %10s %12s\n", "", "median", "p99", "max", "requests", "acts/s");
        for (size_t i = 0; i < n_hostiles; i++) {
                double ratio = !o.only || strcmp(o.only, hostiles[i].key) == 0
                                       ? measure(&hostiles[i], list, n_refused)
                                       : 0;

                worst = ratio > worst ? ratio : worst;
        }
        settle();
        bfc_disconnect(victim);
        kill(pid, SIGTERM);
        waitpid(pid, NULL, 0);
        return worst;
}

int main(int argc, char **argv)
{
        json_t *list = json_array(), *supplies = json_array();
        unsigned n_refused = 0;
        double worst = 0, worst_ms = 0;

        parse(argc, argv);
        make_folder("bench-neighbours");
        if (chmod(folder, 0755) < 0)
                die(folder, strerror(errno));
        if (!o.is_cuda && (!o.only || !is_supply(o.only)))
                worst = measure_hostiles(list, &n_refused);
        if (!o.only || is_supply(o.only))
                worst_ms = supply_measure(
                        &(struct supply){ o.bfcd, o.n_rounds, o.supply_mib, o.is_cuda, o.json }, o.only,
                        supplies);
        if (o.json) {
                json_t *root =
                        json_pack("{s:i, s:i, s:b, s:f, s:i, s:o, s:o}", "schema", 1, "num_neighbours",
                                  (int)o.n_neighbours, "pinned", o.core >= 0, "worst_ratio", worst,
                                  "reserve_refusals", (int)n_refused, "neighbours", list, "supply", supplies);

                json_dumpf(root, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(4));
                putchar('\n');
                json_decref(root);
        } else {
                printf("worst ratio %.2f; refused of what reserves promise: %u\n", worst, n_refused);
                json_decref(list);
                json_decref(supplies);
        }
        return n_refused > 0 || (o.max_ratio > 0 && worst > o.max_ratio) ||
                               (o.max_ms > 0 && worst_ms > o.max_ms)
                       ? EXIT_FAILURE
                       : EXIT_SUCCESS;
}
