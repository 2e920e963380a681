/* bench-neighbours: what hostile neighbours cost another tenant.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A victim mallocs and frees through the daemon, one request at a time. Beside it
 * are as many processes of another tenant, which are polite, or flood, die, or stop
 * reading. Daemon and victim have one core, the neighbours the other. Phases are
 * short and go to and fro between polite and hostile, so that whatever the
 * machine does meanwhile meets both; what counts is the victim's p99 beside a
 * hostile neighbour against that beside an equally busy polite one. In each phase
 * a third tenant grows up to its reserve, from nothing; it must be granted.
 *
 * The kinds `grow` and `release` are not beside the polite: see supply.h. */
#include <bfcclient.h>

#include <errno.h>
#include <grp.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/bench/admin.h"
#include "tests/bench/hostile.h"
#include "tests/bench/options.h"
#include "tests/bench/supply.h"

#define BLOCK_BYTES    4000u
#define MAX_NEIGHBOURS 64
#define MAX_SAMPLES    (UINT32_C(4) << 20)
#define NEIGHBOUR_UID  4242u /* for runs as root: no user of the victim's */
#define RESERVE_MIB    32u

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

struct result {
        struct samples requests;
        uint64_t n_acts; /* of the neighbours */
        uint64_t n_ms;
        unsigned n_refused; /* grants that the reserve promises */
        unsigned n_granted;
};

static struct stage *stage;
static struct raw *admin;
static bfc_client *victim;

/* ---- one phase ------------------------------------------------------------- */

static void neighbour(void *arg)
{
        const struct hostile *kind = arg;

        pin(0, o.other_core);
        if (geteuid() == 0 && (setgroups(0, NULL) < 0 || setgid(NEIGHBOUR_UID) < 0 || setuid(NEIGHBOUR_UID)))
                die("setuid", strerror(errno));
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* again: a change of the user clears it */
        signal(SIGCHLD, SIG_DFL);
        kind->act(stage);
}

static void victim_works(struct samples *s, uint64_t until_ns)
{
        uint64_t begin, middle, end = now_ns();

        while (end < until_ns && s->n + 2 <= s->n_room) {
                void *p;

                begin = now_ns();
                p = bench_malloc(victim, BLOCK_BYTES);
                middle = now_ns();
                bench_free(victim, p);
                end = now_ns();
                samples_add(s, middle - begin);
                samples_add(s, end - middle);
        }
}

/* From nothing to the reserve, which is guaranteed. */
static void grow(struct result *s)
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

static void phase(const struct hostile *kind, struct result *s)
{
        pid_t pids[MAX_NEIGHBOURS];
        uint64_t begin;

        admin_wait_quiet(admin, 1);
        atomic_store(&stage->n_up, 0);
        for (long i = 0; i < o.n_neighbours; i++)
                pids[i] = process_start(neighbour, (void *)(uintptr_t)kind);
        while (atomic_load(&stage->n_up) < (uint64_t)o.n_neighbours)
                (void)poll(NULL, 0, 1);
        (void)poll(NULL, 0, 20);
        atomic_store(&stage->n_acts, 0);
        begin = now_ns();
        victim_works(&s->requests, begin + (uint64_t)o.phase_ms * 1000000);
        s->n_acts += atomic_load(&stage->n_acts);
        s->n_ms += (now_ns() - begin) / 1000000;
        grow(s);
        processes_kill(pids, o.n_neighbours);
}

/* ---- results --------------------------------------------------------------- */

static uint64_t acts_per_second(const struct result *s)
{
        return s->n_ms ? s->n_acts * 1000 / s->n_ms : 0;
}

static json_t *to_json(const struct result *s)
{
        return json_pack("{s:I, s:I, s:I, s:I, s:I}", "median_ns", (json_int_t)s->requests.median, "p99_ns",
                         (json_int_t)s->requests.p99, "max_ns", (json_int_t)s->requests.max, "num_requests",
                         (json_int_t)s->requests.n, "neighbours_acts_per_second",
                         (json_int_t)acts_per_second(s));
}

static void print_row(const char *what, const struct result *s)
{
        printf("  %-26s %9.1f %9.1f %9.1f %10llu %12llu\n", what, s->requests.median / 1e3,
               s->requests.p99 / 1e3, s->requests.max / 1e3, (unsigned long long)s->requests.n,
               (unsigned long long)acts_per_second(s));
}

/* One kind of neighbour beside the polite one; the ratio. */
static double measure(const struct hostile *kind, json_t *list, unsigned *n_refused)
{
        struct result with_polite = { 0 }, with_hostile = { 0 };
        double ratio;

        samples_new(&with_polite.requests, MAX_SAMPLES);
        samples_new(&with_hostile.requests, MAX_SAMPLES);
        for (long i = 0; i < o.n_rounds; i++) {
                phase(&polite, &with_polite);
                phase(kind, &with_hostile);
        }
        samples_evaluate(&with_polite.requests);
        samples_evaluate(&with_hostile.requests);
        ratio = with_polite.requests.p99 ? (double)with_hostile.requests.p99 / with_polite.requests.p99 : 0;
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
                print_row("beside polite ones", &with_polite);
                print_row("beside hostile ones", &with_hostile);
                fflush(stdout);
        }
        return ratio;
}

/* ---- the program ----------------------------------------------------------- */

static bool parse_pin(const char *word)
{
        return options_parse_cores(word, &o.core, &o.other_core);
}

static void parse(int argc, char **argv)
{
        const struct bench_option options[] = {
                OPTION_BFCD(&o.bfcd),
                OPTION_JSON(&o.json),
                { "pin", .parse = parse_pin, .unit = "CORE,CORE",
                  .help = "victim and daemon, neighbours; or none" },
                { "rounds", .count = &o.n_rounds, .min = 1, .max = 100000, .unit = "N",
                  .help = "phases of a kind" },
                { "phase-ms", .count = &o.phase_ms, .min = 1, .max = 100000, .unit = "N",
                  .help = "length of a phase" },
                { "neighbours", .count = &o.n_neighbours, .min = 1, .max = MAX_NEIGHBOURS, .unit = "N",
                  .help = "processes of the other tenant" },
                { "only", .text = &o.only, .unit = "KIND", .help = "run this kind alone" },
                { "max-ratio", .number = &o.max_ratio, .unit = "F",
                  .help = "limit of the ratio of the p99s" },
                { "supply-mib", .count = &o.supply_mib, .min = 2, .max = 1 << 20, .unit = "N",
                  .help = "memory of the kinds grow and release" },
                { "max-ms", .number = &o.max_ms, .unit = "MS",
                  .help = "limit of the medians of grow and release" },
                { "cuda", .flag = &o.is_cuda, .help = "only grow and release, on the GPU cuda:0" },
                { 0 },
        };

        if (sysconf(_SC_NPROCESSORS_ONLN) < 2)
                o.core = o.other_core = -1;
        options_parse(argc, argv,
                      "Measures a victim's requests beside hostile neighbours and beside polite ones.\n"
                      "Microseconds; acts are requests, connections or deaths. The kinds grow and release\n"
                      "time 64 MiB of new memory beside a growth or release of --supply-mib. Ends with 1 if\n"
                      "a limit is passed, or if memory was refused that a reserve promises.",
                      options);
        options_require(o.bfcd, "--bfcd is missing");
}

static pid_t set_up(void)
{
        unsigned uid = (unsigned)geteuid();
        pid_t pid;

        stage = shared_memory(sizeof(*stage));
        snprintf(stage->socket, sizeof(stage->socket), "%s", socket_path);
        snprintf(stage->monitor_socket, sizeof(stage->monitor_socket), "%s/monitor.sock", folder);
        pid = daemon_start(o.bfcd, o.core, config_text, uid, uid, uid, NEIGHBOUR_UID);
        victim = client_start(socket_path, "victim", BFC_NO_CACHE | BFC_NO_THREAD);
        admin = session_open(admin_path, NULL);
        pin(0, o.core);
        for (int i = 0; i < 64; i++) /* keeps the victim's memory backed */
                (void)bench_malloc(victim, BLOCK_BYTES);
        return pid;
}

static bool is_supply(const char *kind)
{
        return strcmp(kind, "grow") == 0 || strcmp(kind, "release") == 0;
}

/* All kinds but those of supply.h; the worst ratio, without that of `busy`, which no daemon can change. */
static double measure_hostiles(json_t *list, unsigned *n_refused)
{
        pid_t pid = set_up();
        double worst = 0;

        if (!o.json)
                printf("  %-26s %9s %9s %9s %10s %12s\n", "", "median", "p99", "max", "requests", "acts/s");
        if (!o.only || strcmp(o.only, busy.key) == 0)
                (void)measure(&busy, list, n_refused);
        for (size_t i = 0; i < n_hostiles; i++) {
                double ratio = !o.only || strcmp(o.only, hostiles[i].key) == 0
                                       ? measure(&hostiles[i], list, n_refused)
                                       : 0;

                worst = ratio > worst ? ratio : worst;
        }
        admin_wait_quiet(admin, 1);
        bfc_disconnect(victim);
        process_stop(pid, SIGTERM);
        return worst;
}

int main(int argc, char **argv)
{
        json_t *list = json_array(), *supplies = json_array();
        unsigned n_refused = 0;
        double worst = 0, worst_ms = 0;

        parse(argc, argv);
        make_folder("bench-neighbours");
        if (!o.is_cuda && (!o.only || !is_supply(o.only)))
                worst = measure_hostiles(list, &n_refused);
        if (!o.only || is_supply(o.only))
                worst_ms = supply_measure(
                        &(struct supply){ o.bfcd, o.n_rounds, o.supply_mib, o.is_cuda, o.json }, o.only,
                        supplies);
        if (o.json) {
                print_json(json_pack("{s:i, s:i, s:b, s:f, s:i, s:o, s:o}", "schema", 1, "num_neighbours",
                                     (int)o.n_neighbours, "pinned", o.core >= 0, "worst_ratio", worst,
                                     "reserve_refusals", (int)n_refused, "neighbours", list, "supply",
                                     supplies));
        } else {
                printf("worst ratio %.2f; refused requests within a reserve: %u\n", worst, n_refused);
                json_decref(list);
                json_decref(supplies);
        }
        return n_refused > 0 || (o.max_ratio > 0 && worst > o.max_ratio) ||
                               (o.max_ms > 0 && worst_ms > o.max_ms)
                       ? EXIT_FAILURE
                       : EXIT_SUCCESS;
}
