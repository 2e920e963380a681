/* bench-growth: how long a request waits beside a large growth of its own tenant, against one of another tenant, and how
 * long two processes take that grow at the same time.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The cases take turns, so that all meet the same machine. The sessions that are timed speak the protocol by hand: what
 * counts is how long the daemon takes to answer a Malloc, not how long a client maps. */
#include <bfcclient.h>

#include <jansson.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>

#include "tests/bench/admin.h"
#include "tests/bench/options.h"

static const char config_text[] = "timeouts: {quarantine: 1s}\n"
                                  "devices:\n"
                                  "  - id: %s\n"
                                  "%s"
                                  "    partitions:\n"
                                  "      - {name: bench, limit: %ldMiB, share: fd}\n"
                                  "tenants:\n"
                                  "  - {name: one, match: {uid: %u}, quotas: [{partition: bench}]}\n"
                                  "  - {name: two, match: {uid: %u}, quotas: [{partition: bench}]}\n";

static struct {
        const char *bfcd;
        long big_mib, small_mib, fitting_mib, pair_mib;
        long n_rounds;
        double max_ms, max_ratio; /* 0: any */
        bool is_cuda, json;
} o = { .big_mib = 4096, .small_mib = 64, .fitting_mib = 32, .pair_mib = 1024, .n_rounds = 7 };

/* Shared with the processes of a case. */
static struct stage {
        _Atomic int n_ready, n_done;
        atomic_bool has_begun;
        uint64_t ended_ns[2];
} * stage;
static struct raw *admin;

struct bench_case {
        const char *key, *what;
        double (*run)(const struct bench_case *c);
        const char *tenants[2]; /* of the large growth and of the small request, or of the pair */
        bool fits;              /* the small request did before the growth */
};

/* ---- processes --------------------------------------------------------------- */

static void pause_ms(void)
{
        (void)poll(NULL, 0, 1);
}

static void stage_begin(void)
{
        admin_wait_quiet(admin, 0);
        *stage = (struct stage){ .n_ready = 0 };
}

/* In a process of the case. */
static void wait_for_begin(void)
{
        atomic_fetch_add(&stage->n_ready, 1);
        while (!atomic_load(&stage->has_begun))
                pause_ms();
}

/* Returns when. */
static uint64_t begin(int n_processes)
{
        uint64_t at_ns;

        while (atomic_load(&stage->n_ready) < n_processes)
                pause_ms();
        at_ns = now_ns();
        atomic_store(&stage->has_begun, true);
        return at_ns;
}

static void wait_for_end(pid_t pid)
{
        int status;

        if (waitpid(pid, &status, 0) < 0 || status != 0)
                die("a process of the case", "it failed");
}

/* ---- a request beside a large growth ----------------------------------------- */

static uint64_t small_bytes(const struct bench_case *c)
{
        return (uint64_t)(c->fits ? o.fitting_mib : o.small_mib) * MIB;
}

/* Milliseconds from a Malloc to its grant. */
static double ask(struct raw *session, uint64_t n_bytes)
{
        uint64_t begin_ns = now_ns();
        Bfcd__Block block;

        if (raw_malloc(session, 0, n_bytes, &block) < 0)
                die("a small request", raw_refusal());
        return ms_since(begin_ns);
}

/* A client of the library, which unmaps what it is asked to. */
static void grow(void *arg)
{
        const struct bench_case *c = arg;
        bfc_client *client;
        void *free_later, *p;

        setenv("BFC_TENANT", c->tenants[0], 1);
        client = client_start(socket_path, "grower", BFC_NO_CACHE);
        if (c->fits) { /* apart from the place of the growth */
                free_later = bench_malloc(client, small_bytes(c));
                p = bench_malloc(client, small_bytes(c));
                bench_free(client, free_later);
        }
        wait_for_begin();
        p = bench_malloc(client, (size_t)o.big_mib * MIB);
        atomic_store(&stage->n_done, 1);
        (void)p;
        bfc_disconnect(client);
}

static double beside(const struct bench_case *c)
{
        struct raw *session;
        pid_t pid;
        double ms;

        stage_begin();
        pid = process_start(grow, (void *)(uintptr_t)c);
        session = session_open(socket_path, c->tenants[1]);
        (void)begin(1);
        while (admin_status(admin).bytes_pending == 0 && atomic_load(&stage->n_done) == 0)
                ;
        ms = ask(session, small_bytes(c));
        raw_close(session);
        wait_for_end(pid);
        return ms;
}

static double alone(const struct bench_case *c)
{
        struct raw *session;
        double ms;

        stage_begin();
        session = session_open(socket_path, c->tenants[1]);
        ms = ask(session, small_bytes(c));
        raw_close(session);
        return ms;
}

/* ---- two growths at the same time -------------------------------------------- */

static const char *tenant_of_process;

static void grow_beside(void *arg)
{
        struct raw *session = session_open(socket_path, tenant_of_process);
        uint64_t *ended_ns = arg;

        wait_for_begin();
        (void)ask(session, (uint64_t)o.pair_mib * MIB);
        *ended_ns = now_ns();
        raw_close(session);
}

/* Until both have their memory. */
static double pair(const struct bench_case *c)
{
        uint64_t begin_ns, end_ns;
        pid_t pids[2];

        stage_begin();
        for (int i = 0; i < 2; i++) {
                tenant_of_process = c->tenants[i];
                pids[i] = process_start(grow_beside, &stage->ended_ns[i]);
        }
        begin_ns = begin(2);
        for (int i = 0; i < 2; i++)
                wait_for_end(pids[i]);
        end_ns = stage->ended_ns[stage->ended_ns[1] > stage->ended_ns[0]];
        return (double)(end_ns - begin_ns) / 1e6;
}

/* ---- all of them --------------------------------------------------------------- */

enum { ALONE, BESIDE_ANOTHER, BESIDE_ITS_OWN, FITTED, TWO_TENANTS, ONE_TENANT, N_CASES };

static const struct bench_case cases[N_CASES] = {
        { "alone", "a small request alone", alone, { "two", "one" }, false },
        { "beside_another", "beside a large growth of another tenant", beside, { "two", "one" }, false },
        { "beside_its_own", "beside one of its own tenant", beside, { "one", "one" }, false },
        { "fitted", "one that fitted before the growth", beside, { "one", "one" }, true },
        { "two_tenants", "two processes of two tenants", pair, { "one", "two" }, false },
        { "one_tenant", "two processes of one tenant", pair, { "one", "one" }, false },
};

static double measure(json_t *list, double medians[N_CASES])
{
        double *ms = need(calloc((size_t)o.n_rounds * N_CASES, sizeof(*ms)));
        size_t n = (size_t)o.n_rounds;

        for (size_t i = 0; i < n; i++)
                for (size_t k = 0; k < N_CASES; k++)
                        ms[k * n + i] = cases[k].run(&cases[k]);
        for (size_t k = 0; k < N_CASES; k++) {
                double *of_case = ms + k * n;

                medians[k] = quantile(of_case, n, 50);
                json_array_append_new(list,
                                      json_pack("{s:s, s:f, s:f, s:f}", "case", cases[k].key, "median_ms",
                                                medians[k], "min_ms", of_case[0], "max_ms", of_case[n - 1]));
                if (!o.json)
                        printf("%-42s %9.1f ms (%.1f to %.1f)\n", cases[k].what, medians[k], of_case[0],
                               of_case[n - 1]);
        }
        free(ms);
        return medians[ONE_TENANT] / medians[TWO_TENANTS];
}

static void parse(int argc, char **argv)
{
        const long max = 1 << 20;
        const struct bench_option options[] = {
                OPTION_BFCD(&o.bfcd),
                OPTION_JSON(&o.json),
                { "big-mib", .count = &o.big_mib, .min = 2, .max = max, .unit = "N",
                  .help = "memory of the large growth" },
                { "small-mib", .count = &o.small_mib, .min = 2, .max = max, .unit = "N",
                  .help = "memory of the small request" },
                { "fitting-mib", .count = &o.fitting_mib, .min = 2, .max = max, .unit = "N",
                  .help = "memory of the small request that fitted before" },
                { "pair-mib", .count = &o.pair_mib, .min = 2, .max = max, .unit = "N",
                  .help = "memory of each of two processes" },
                { "rounds", .count = &o.n_rounds, .min = 1, .max = 100000, .unit = "N",
                  .help = "runs of each case" },
                { "cuda", .flag = &o.is_cuda, .help = "on the GPU cuda:0 instead of the host" },
                { "max-ms", .number = &o.max_ms, .unit = "MS",
                  .help = "limit of a small request beside a growth of its tenant" },
                { "max-ratio", .number = &o.max_ratio, .unit = "F",
                  .help = "limit of two processes of one tenant over those of two" },
                { 0 },
        };

        options_parse(argc, argv,
                      "Times small requests beside a large growth, and two growths at the same time: of one\n"
                      "tenant, and of two. Ends with 1 if a median is above its limit.",
                      options);
        options_require(o.bfcd, "--bfcd is missing");
}

static pid_t start(void)
{
        unsigned uid = (unsigned)geteuid();
        long limit_mib = o.big_mib + o.small_mib + 2 * o.fitting_mib + 2 * o.pair_mib;
        char size[64];
        pid_t pid;

        limit_mib += limit_mib % 2;
        snprintf(size, sizeof(size), "    size: %ldMiB\n", limit_mib);
        pid = daemon_start(o.bfcd, -1, config_text, o.is_cuda ? "cuda:0" : "host", o.is_cuda ? "" : size,
                           limit_mib, uid, uid);
        setenv("BFC_TENANT", "one", 1);
        bfc_disconnect(client_start(socket_path, "first", BFC_NO_CACHE | BFC_NO_THREAD));
        return pid;
}

int main(int argc, char **argv)
{
        double medians[N_CASES], ratio;
        json_t *list = json_array();
        pid_t pid;

        parse(argc, argv);
        make_folder("bench-growth");
        stage = shared_memory(sizeof(*stage));
        pid = start();
        admin = session_open(admin_path, NULL);
        ratio = measure(list, medians);
        raw_close(admin);
        process_stop(pid, SIGTERM);
        if (o.json) {
                print_json(json_pack("{s:i, s:f, s:o}", "schema", 1, "pair_ratio", ratio, "cases", list));
        } else {
                printf("one tenant over two: %.2f\n", ratio);
                json_decref(list);
        }
        return (o.max_ms > 0 && (medians[BESIDE_ITS_OWN] > o.max_ms || medians[FITTED] > o.max_ms)) ||
                               (o.max_ratio > 0 && ratio > o.max_ratio)
                       ? EXIT_FAILURE
                       : EXIT_SUCCESS;
}
