/* bench-supply: how fast memory of the host arrives and goes, beside a plain anonymous mapping of huge
 * pages: until there is a pointer, until each page of 4 KiB was written to, until it was given back; and
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
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/bench/daemon.h"

#define MIB        (UINT64_C(1) << 20)
#define PAGE_BYTES 4096u
#define LINE_BYTES 64u
#define HUGE_BYTES (2 * MIB)

enum figure { TO_POINTER_MS, TO_TOUCHED_MS, RELEASE_MS, LOAD_NS, N_FIGURES };
static const char *const figure_names[N_FIGURES] = { "to_pointer_ms", "to_touched_ms", "release_ms",
                                                     "load_ns" };

struct options {
        const char *bfcd;
        const char *pages;
        size_t n_mib;
        size_t n_rounds;
        size_t n_loads;
        size_t standby_mib; /* kept ready beside the memory that is measured */
        size_t rest_ms;     /* before each case: it is made again */
        double max_touched_ms, max_release_ms, max_load_ratio; /* 0: any */
        bool json;
};
static struct options options = { .pages = "auto", .n_mib = 1024, .n_rounds = 5, .n_loads = 1000000 };
static char path[128];

/* ---- one case ---------------------------------------------------------------- */

static double ms_since(uint64_t began)
{
        return (double)(now_ns() - began) / 1e6;
}

/* No load can begin before the one before it has ended. All of the memory is zero. */
static double load_ns(const uint64_t *memory, size_t n_bytes)
{
        uint64_t state = 1, n_lines = n_bytes / LINE_BYTES, began = now_ns();

        for (size_t i = 0; i < options.n_loads; i++) {
                uint64_t line = (state >> 33) % n_lines;

                state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407) +
                        ((const volatile uint64_t *)memory)[line * (LINE_BYTES / sizeof(*memory))];
        }
        return (double)(now_ns() - began) / (double)options.n_loads;
}

static void use(void *memory, size_t n_bytes, uint64_t began, double ret[N_FIGURES])
{
        ret[TO_POINTER_MS] = ms_since(began);
        for (size_t i = 0; i < n_bytes; i += PAGE_BYTES)
                ((volatile char *)memory)[i] = 0;
        ret[TO_TOUCHED_MS] = ms_since(began);
        ret[LOAD_NS] = load_ns(memory, n_bytes);
}

static void anonymous(size_t n_bytes, double ret[N_FIGURES])
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

static void allocate(bfc_client *client, size_t n_bytes, void **ret)
{
        if (bfc_malloc(client, n_bytes, ret) < 0)
                die("bfc_malloc", bfc_last_error());
}

static void release(bfc_client *client, void *p)
{
        if (bfc_free(client, p) < 0 || bfc_trim(client, SIZE_MAX) < 0)
                die("bfc_free", bfc_last_error());
}

static void cold(size_t n_bytes, double ret[N_FIGURES])
{
        bfc_client *client = client_start(path, "cold", BFC_NO_CACHE);
        uint64_t began = now_ns();
        void *p;

        allocate(client, n_bytes, &p);
        use(p, n_bytes, began, ret);
        began = now_ns();
        release(client, p);
        ret[RELEASE_MS] = ms_since(began);
        bfc_disconnect(client);
}

/* Another process of the tenant had it first, and lives. */
static void warm(size_t n_bytes, double ret[N_FIGURES])
{
        bfc_client *first = client_start(path, "first", BFC_NO_CACHE), *client;
        double unused[N_FIGURES];
        uint64_t began;
        void *p;

        allocate(first, n_bytes, &p);
        use(p, n_bytes, now_ns(), unused);
        if (bfc_free(first, p) < 0)
                die("bfc_free", bfc_last_error());
        client = client_start(path, "warm", BFC_NO_CACHE);
        began = now_ns();
        allocate(client, n_bytes, &p);
        use(p, n_bytes, began, ret);
        began = now_ns();
        release(client, p);
        ret[RELEASE_MS] = ms_since(began);
        bfc_disconnect(client);
        bfc_disconnect(first);
}

static const struct bench_case {
        const char *name;
        void (*run)(size_t n_bytes, double ret[N_FIGURES]);
} cases[] = {
        { "anonymous", anonymous },
        { "cold", cold },
        { "warm", warm },
};
#define N_CASES (sizeof(cases) / sizeof(cases[0]))

/* ---- all of them --------------------------------------------------------------- */

static void run_apart(const struct bench_case *c, double *shared)
{
        int status = 0;
        pid_t pid = fork();

        if (pid < 0)
                die("fork", strerror(errno));
        if (pid == 0) {
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                c->run(options.n_mib * MIB, shared);
                _exit(0);
        }
        if (waitpid(pid, &status, 0) < 0 || status != 0)
                die(c->name, "the measurement failed");
}

static int compare(const void *a, const void *b)
{
        double x = *(const double *)a, y = *(const double *)b;

        return (x > y) - (x < y);
}

static double median_of(const double *figures, size_t of_case, enum figure figure)
{
        double *sorted = calloc(options.n_rounds, sizeof(*sorted)), median;

        if (!sorted)
                die("bench-supply", "out of memory");
        for (size_t i = 0; i < options.n_rounds; i++)
                sorted[i] = figures[(i * N_CASES + of_case) * N_FIGURES + figure];
        qsort(sorted, options.n_rounds, sizeof(*sorted), compare);
        median = sorted[options.n_rounds / 2];
        free(sorted);
        return median;
}

static void tell(double medians[N_CASES][N_FIGURES])
{
        json_t *all = json_object();

        for (size_t i = 0; i < N_CASES; i++) {
                json_t *one = json_object();

                for (size_t k = 0; k < N_FIGURES; k++)
                        json_object_set_new(one, figure_names[k], json_real(medians[i][k]));
                json_object_set_new(all, cases[i].name, one);
                if (!options.json)
                        printf("%-10s %zu MiB: pointer %8.2f ms, touched %8.2f ms, given back %8.2f ms, "
                               "load %6.1f ns\n",
                               cases[i].name, options.n_mib, medians[i][TO_POINTER_MS],
                               medians[i][TO_TOUCHED_MS], medians[i][RELEASE_MS], medians[i][LOAD_NS]);
        }
        if (options.json) {
                json_dumpf(all, stdout, JSON_INDENT(2));
                putchar('\n');
        }
        json_decref(all);
}

static bool is_good(double medians[N_CASES][N_FIGURES])
{
        const double *plain = medians[0];
        bool good = true;

        for (size_t i = 1; i < N_CASES; i++) {
                const double *m = medians[i];

                good = good && (options.max_touched_ms <= 0 || m[TO_TOUCHED_MS] <= options.max_touched_ms) &&
                       (options.max_release_ms <= 0 || m[RELEASE_MS] <= options.max_release_ms) &&
                       (options.max_load_ratio <= 0 || m[LOAD_NS] <= plain[LOAD_NS] * options.max_load_ratio);
        }
        return good;
}

/* ---- the rest -------------------------------------------------------------------- */

static pid_t start(void)
{
        char rest[600], standby[64] = "";

        if (options.standby_mib > 0)
                snprintf(standby, sizeof(standby), "    standby: %zuMiB\n", options.standby_mib);
        snprintf(rest, sizeof(rest),
                 "devices:\n"
                 "  - id: host\n"
                 "    size: %zuMiB\n"
                 "%s"
                 "    partitions:\n"
                 "      - {name: bench, limit: %zuMiB%s%s}\n"
                 "tenants:\n"
                 "  - name: bench\n"
                 "    match: {uid: [%u]}\n"
                 "    quotas: [{partition: bench, limit: %zuMiB}]\n",
                 options.n_mib + options.standby_mib, standby, options.n_mib + options.standby_mib,
                 options.pages ? ", huge_pages: " : "", options.pages ? options.pages : "",
                 (unsigned)geteuid(), options.n_mib);
        return daemon_start_with(options.bfcd, rest, -1);
}

static double number(const char *word)
{
        char *end;
        double n = strtod(word, &end);

        if (end == word || *end || n < 1 || n > 1e9)
                die(word, "not a number that makes sense here");
        return n;
}

static void parse(int argc, char **argv)
{
        for (int i = 1; i < argc; i++) {
                const char *value = i + 1 < argc ? argv[i + 1] : NULL;

                if (strcmp(argv[i], "--json") == 0) {
                        options.json = true;
                        continue;
                }
                if (value && strcmp(argv[i], "--bfcd") == 0)
                        options.bfcd = value;
                else if (value && strcmp(argv[i], "--pages") == 0) /* "": a daemon without the key */
                        options.pages = *value ? value : NULL;
                else if (value && strcmp(argv[i], "--mib") == 0)
                        options.n_mib = (size_t)number(value) / 2 * 2;
                else if (value && strcmp(argv[i], "--rounds") == 0)
                        options.n_rounds = (size_t)number(value);
                else if (value && strcmp(argv[i], "--loads") == 0)
                        options.n_loads = (size_t)number(value);
                else if (value && strcmp(argv[i], "--standby") == 0)
                        options.standby_mib = (size_t)number(value) / 2 * 2;
                else if (value && strcmp(argv[i], "--rest-ms") == 0)
                        options.rest_ms = (size_t)number(value);
                else if (value && strcmp(argv[i], "--max-touched-ms") == 0)
                        options.max_touched_ms = number(value);
                else if (value && strcmp(argv[i], "--max-release-ms") == 0)
                        options.max_release_ms = number(value);
                else if (value && strcmp(argv[i], "--max-load-ratio") == 0)
                        options.max_load_ratio = number(value);
                else
                        die(argv[i],
                            "usage: bench-supply --bfcd PATH [--mib N] [--pages auto|2MiB|off] "
                            "[--rounds N] [--loads N] [--standby MIB] [--rest-ms N] [--max-touched-ms N] [--max-release-ms N] "
                            "[--max-load-ratio N] [--json]");
                i++;
        }
        if (!options.bfcd)
                die("bench-supply", "--bfcd PATH is needed");
}

int main(int argc, char **argv)
{
        double medians[N_CASES][N_FIGURES], *figures;
        size_t n_bytes;
        pid_t daemon_pid;

        parse(argc, argv);
        n_bytes = options.n_rounds * N_CASES * N_FIGURES * sizeof(*figures);
        figures = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (figures == MAP_FAILED)
                die("bench-supply", "out of memory");
        make_folder("bench-supply");
        snprintf(path, sizeof(path), "%s/bfcd.sock", folder);
        daemon_pid = start();
        for (size_t i = 0; i < options.n_rounds * N_CASES; i++) {
                if (options.rest_ms > 0)
                        usleep((useconds_t)options.rest_ms * 1000);
                run_apart(&cases[i % N_CASES], figures + i * N_FIGURES);
        }
        for (size_t i = 0; i < N_CASES; i++)
                for (size_t k = 0; k < N_FIGURES; k++)
                        medians[i][k] = median_of(figures, i, (enum figure)k);
        kill(daemon_pid, SIGTERM);
        waitpid(daemon_pid, NULL, 0);
        tell(medians);
        munmap(figures, n_bytes);
        return is_good(medians) ? EXIT_SUCCESS : EXIT_FAILURE;
}
