/* bench-supply: how fast memory of the host arrives and goes, beside a plain anonymous mapping of huge
 * pages: until there is a pointer, until each page of 4 KiB was written to, until it was released; and
 * what a load at a random place of it costs.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Each case is a process of its own, and the cases take turns, so that all meet the same machine. "warm":
 * the tenant has the memory, and the process has not mapped it yet. */
#include <bfcclient.h>

#include <errno.h>
#include <jansson.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/bench/daemon.h"
#include "tests/bench/options.h"

#define PAGE_BYTES 4096u
#define LINE_BYTES 64u
#define HUGE_BYTES (2 * MIB)

enum stat { TO_POINTER_MS, TO_TOUCHED_MS, RELEASE_MS, LOAD_NS, N_STATS };
static const char *const stat_names[N_STATS] = { "to_pointer_ms", "to_touched_ms", "release_ms", "load_ns" };

static struct {
        const char *bfcd;
        long n_mib;
        long n_rounds;
        long n_loads;
        long standby_mib; /* kept ready beside the memory that is measured */
        long rest_ms;     /* before each case, so that the standby is filled again */
        double max_touched_ms, max_release_ms, max_load_ratio; /* 0: any */
        bool json;
} o = { .n_mib = 1024, .n_rounds = 5, .n_loads = 1000000 };
static double *results; /* of the case that runs; shared with its process */

/* ---- one case ---------------------------------------------------------------- */

/* No load can begin before the one before it has ended. All of the memory is zero. */
static double load_ns(const uint64_t *memory, size_t n_bytes)
{
        uint64_t state = 1, n_lines = n_bytes / LINE_BYTES, began = now_ns();

        for (size_t i = 0; i < (size_t)o.n_loads; i++) {
                uint64_t line = (state >> 33) % n_lines;

                state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407) +
                        ((const volatile uint64_t *)memory)[line * (LINE_BYTES / sizeof(*memory))];
        }
        return (double)(now_ns() - began) / (double)o.n_loads;
}

static void use(void *memory, size_t n_bytes, uint64_t began, double ret[N_STATS])
{
        ret[TO_POINTER_MS] = ms_since(began);
        for (size_t i = 0; i < n_bytes; i += PAGE_BYTES)
                ((volatile char *)memory)[i] = 0;
        ret[TO_TOUCHED_MS] = ms_since(began);
        ret[LOAD_NS] = load_ns(memory, n_bytes);
}

static void anonymous(size_t n_bytes, double ret[N_STATS])
{
        uint64_t began = now_ns();
        char *room =
                mmap(NULL, n_bytes + HUGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        char *at = room + -(uintptr_t)room % HUGE_BYTES;

        if (room == MAP_FAILED)
                die("mmap", strerror(errno));
        (void)madvise(at, n_bytes, MADV_HUGEPAGE);
        use(at, n_bytes, began, ret);
        began = now_ns();
        munmap(room, n_bytes + HUGE_BYTES);
        ret[RELEASE_MS] = ms_since(began);
}

static void release(bfc_client *client, void *p)
{
        if (bfc_free(client, p) < 0 || bfc_trim(client, SIZE_MAX) < 0)
                die("bfc_free", bfc_last_error());
}

static void cold(size_t n_bytes, double ret[N_STATS])
{
        bfc_client *client = client_start(socket_path, "cold", BFC_NO_CACHE);
        uint64_t began = now_ns();
        void *p = bench_malloc(client, n_bytes);

        use(p, n_bytes, began, ret);
        began = now_ns();
        release(client, p);
        ret[RELEASE_MS] = ms_since(began);
        bfc_disconnect(client);
}

/* Another process of the tenant had it first, and lives. */
static void warm(size_t n_bytes, double ret[N_STATS])
{
        bfc_client *first = client_start(socket_path, "first", BFC_NO_CACHE), *client;
        double unused[N_STATS];
        uint64_t began;
        void *p;

        p = bench_malloc(first, n_bytes);
        use(p, n_bytes, now_ns(), unused);
        bench_free(first, p);
        client = client_start(socket_path, "warm", BFC_NO_CACHE);
        began = now_ns();
        p = bench_malloc(client, n_bytes);
        use(p, n_bytes, began, ret);
        began = now_ns();
        release(client, p);
        ret[RELEASE_MS] = ms_since(began);
        bfc_disconnect(client);
        bfc_disconnect(first);
}

static const struct bench_case {
        const char *name;
        void (*run)(size_t n_bytes, double ret[N_STATS]);
} cases[] = {
        { "anonymous", anonymous },
        { "cold", cold },
        { "warm", warm },
};
#define N_CASES (sizeof(cases) / sizeof(cases[0]))

static void run_case(void *arg)
{
        const struct bench_case *c = arg;

        c->run((size_t)o.n_mib * MIB, results);
}

/* ---- all of them --------------------------------------------------------------- */

static double median_of(const double *stats, size_t of_case, enum stat stat)
{
        double *values = need(calloc((size_t)o.n_rounds, sizeof(*values))), median;

        for (size_t i = 0; i < (size_t)o.n_rounds; i++)
                values[i] = stats[(i * N_CASES + of_case) * N_STATS + stat];
        median = quantile(values, (size_t)o.n_rounds, 50);
        free(values);
        return median;
}

static void report(double medians[N_CASES][N_STATS])
{
        json_t *all = json_object();

        for (size_t i = 0; i < N_CASES; i++) {
                json_t *one = json_object();

                for (size_t k = 0; k < N_STATS; k++)
                        json_object_set_new(one, stat_names[k], json_real(medians[i][k]));
                json_object_set_new(all, cases[i].name, one);
                if (!o.json)
                        printf("%-10s %ld MiB: pointer %8.2f ms, touched %8.2f ms, released %8.2f ms, "
                               "load %6.1f ns\n",
                               cases[i].name, o.n_mib, medians[i][TO_POINTER_MS], medians[i][TO_TOUCHED_MS],
                               medians[i][RELEASE_MS], medians[i][LOAD_NS]);
        }
        if (o.json)
                print_json(json_incref(all));
        json_decref(all);
}

static bool is_good(double medians[N_CASES][N_STATS])
{
        const double *plain = medians[0];
        bool good = true;

        for (size_t i = 1; i < N_CASES; i++) {
                const double *m = medians[i];

                good = good && (o.max_touched_ms <= 0 || m[TO_TOUCHED_MS] <= o.max_touched_ms) &&
                       (o.max_release_ms <= 0 || m[RELEASE_MS] <= o.max_release_ms) &&
                       (o.max_load_ratio <= 0 || m[LOAD_NS] <= plain[LOAD_NS] * o.max_load_ratio);
        }
        return good;
}

/* ---- the rest -------------------------------------------------------------------- */

static pid_t start(void)
{
        char standby[64] = "";

        if (o.standby_mib > 0)
                snprintf(standby, sizeof(standby), "    standby: %ldMiB\n", o.standby_mib);
        return daemon_start(o.bfcd, -1,
                            "devices:\n"
                            "  - id: host\n"
                            "    size: %ldMiB\n"
                            "%s"
                            "    partitions:\n"
                            "      - {name: bench, limit: %ldMiB}\n"
                            "tenants:\n"
                            "  - name: bench\n"
                            "    match: {uid: [%u]}\n"
                            "    quotas: [{partition: bench, limit: %ldMiB}]\n",
                            o.n_mib + o.standby_mib, standby, o.n_mib + o.standby_mib, (unsigned)geteuid(),
                            o.n_mib);
}

static void parse(int argc, char **argv)
{
        const long max = 1000000000;
        const struct bench_option options[] = {
                OPTION_BFCD(&o.bfcd),
                OPTION_JSON(&o.json),
                { "mib", .count = &o.n_mib, .min = 2, .max = max, .unit = "N",
                  .help = "memory of each case" },
                { "rounds", .count = &o.n_rounds, .min = 1, .max = max, .unit = "N",
                  .help = "runs of each case" },
                { "loads", .count = &o.n_loads, .min = 1, .max = max, .unit = "N", .help = "timed loads" },
                { "standby", .count = &o.standby_mib, .min = 1, .max = max, .unit = "MIB",
                  .help = "standby memory" },
                { "rest-ms", .count = &o.rest_ms, .min = 1, .max = max, .unit = "N",
                  .help = "pause before a case" },
                { "max-touched-ms", .number = &o.max_touched_ms, .unit = "MS",
                  .help = "limit of to_touched_ms" },
                { "max-release-ms", .number = &o.max_release_ms, .unit = "MS",
                  .help = "limit of release_ms" },
                { "max-load-ratio", .number = &o.max_load_ratio, .unit = "F",
                  .help = "limit of load_ns over that of an anonymous mapping" },
                { 0 },
        };

        options_parse(argc, argv,
                      "Times allocation, first write, release and loads of host memory, beside an anonymous\n"
                      "mapping. Ends with 1 if a median is above its limit.",
                      options);
        options_require(o.bfcd, "--bfcd is missing");
        o.n_mib -= o.n_mib % 2;
        o.standby_mib -= o.standby_mib % 2;
}

int main(int argc, char **argv)
{
        double medians[N_CASES][N_STATS], *stats;
        size_t n_runs;
        pid_t daemon_pid;

        parse(argc, argv);
        make_folder("bench-supply");
        n_runs = (size_t)o.n_rounds * N_CASES;
        stats = shared_memory(n_runs * N_STATS * sizeof(*stats));
        daemon_pid = start();
        for (size_t i = 0; i < n_runs; i++) {
                const struct bench_case *c = &cases[i % N_CASES];

                usleep((useconds_t)o.rest_ms * 1000);
                results = stats + i * N_STATS;
                process_run(c->name, run_case, (void *)(uintptr_t)c);
        }
        for (size_t i = 0; i < N_CASES; i++)
                for (size_t k = 0; k < N_STATS; k++)
                        medians[i][k] = median_of(stats, i, (enum stat)k);
        process_stop(daemon_pid, SIGTERM);
        report(medians);
        return is_good(medians) ? EXIT_SUCCESS : EXIT_FAILURE;
}
