/* bench-client: what bfc_malloc() and bfc_free() cost a job, with the client's cache and
 * without, beside malloc() and free() of the C library, and of mimalloc where it is installed.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * They are asked in turn, batch by batch in one run, so that whatever the machine does
 * meanwhile meets all. A sample is the mean of a short run of pairs, because
 * reading the clock costs about as much as one pair. With several threads the samples hide what
 * the threads cost each other, since a thread rarely waits within one. There the ratio is of the
 * wall time of whole batches, at the lower quartile: the batches that the rest of the machine
 * disturbed least. HELD_BLOCKS blocks of mixed sizes live all the time. Each pair frees a block
 * that was allocated `lag` pairs before. */
#include <bfcclient.h>

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/bench/client_trace.h"
#include "tests/bench/daemon.h"
#include "tests/bench/options.h"

#define MAX_THREADS 64
#define MAX_LAG     64
#define MAX_BYTES   (200L << 20)
#define RUN         20u /* pairs in a sample */
#define HELD_BLOCKS 512

static struct {
        const char *bfcd;
        long n_batches;
        long n_runs; /* in a batch; of what always asks the daemon one in 200 */
        long n_threads;
        long n_bytes;
        long lag;
        double max_ratio;         /* of the cache to the C library, one thread; 0: no matter */
        double max_threads_ratio; /* the same for several threads */
        const char *trace;
        long n_repeats;
        long limit_mib;   /* of the tenant of a trace; 0: twice the peak */
        bool cached_only; /* the daemon is not asked for each block */
        bool json;
} o = { .n_batches = 100, .n_runs = 1000, .n_threads = 8, .n_bytes = 4096, .n_repeats = 3 };

enum { CACHE, LIBC, MIMALLOC, DAEMON, N_KINDS };
static const char *const names[] = { "with the cache", "malloc and free", "mimalloc", "without the cache" };
static const char *const keys[] = { "cache", "libc", "mimalloc", "daemon" };

/* NULL: it is not installed. */
static void *(*mimalloc)(size_t n_bytes);
static void (*mimalloc_free)(void *p);

struct result {
        struct samples pairs;
        double wall; /* of a batch, for a pair of any thread: the lower quartile */
};

static bfc_client *clients[N_KINDS];

static void *__attribute__((noinline)) get(int kind)
{
        void *p = kind == LIBC       ? malloc((size_t)o.n_bytes)
                  : kind == MIMALLOC ? mimalloc((size_t)o.n_bytes)
                                     : bench_malloc(clients[kind], (size_t)o.n_bytes);

        __asm__ volatile("" : : "r"(p) : "memory"); /* or the compiler leaves the pair out */
        return p;
}

static void __attribute__((noinline)) put(int kind, void *p)
{
        if (kind == LIBC)
                free(p);
        else if (kind == MIMALLOC)
                mimalloc_free(p);
        else
                bench_free(clients[kind], p);
}

/* ---- runs ---------------------------------------------------------------- */

static uint64_t run_once(int kind, void **lagging, unsigned *at)
{
        uint64_t begin = now_ns();

        for (unsigned i = 0; i < RUN; i++) {
                void **slot = &lagging[(*at)++ % ((unsigned)o.lag + 1)];

                put(kind, *slot);
                *slot = get(kind);
        }
        return (now_ns() - begin) / RUN;
}

struct worker {
        pthread_t thread;
        int kind;
        long n_runs;
        struct samples samples;
        void *lagging[MAX_LAG + 1];
        unsigned at;
        uint64_t begin_ns, end_ns; /* of the last batch */
};

static pthread_barrier_t barrier;

static void worker_batch(struct worker *w)
{
        w->begin_ns = now_ns();
        for (long i = 0; i < w->n_runs; i++)
                samples_add(&w->samples, run_once(w->kind, w->lagging, &w->at));
        w->end_ns = now_ns();
}

static void *worker_run(void *userdata)
{
        struct worker *w = userdata;

        pthread_barrier_wait(&barrier);
        worker_batch(w);
        return NULL;
}

static void batch_threads(struct worker *workers, long n)
{
        pthread_barrier_init(&barrier, NULL, (unsigned)n);
        for (long i = 0; i < n; i++)
                if (pthread_create(&workers[i].thread, NULL, worker_run, &workers[i]) != 0)
                        die("pthread_create", "failed");
        for (long i = 0; i < n; i++)
                pthread_join(workers[i].thread, NULL);
        pthread_barrier_destroy(&barrier);
}

/* From the first one's begin to the last one's end, for each pair. */
static double batch_wall(const struct worker *workers, long n)
{
        uint64_t begin = UINT64_MAX, end = 0;

        for (long i = 0; i < n; i++) {
                begin = workers[i].begin_ns < begin ? workers[i].begin_ns : begin;
                end = workers[i].end_ns > end ? workers[i].end_ns : end;
        }
        return (double)(end - begin) / (double)(n * workers[0].n_runs * (long)RUN);
}

static struct worker *workers_new(int kind, long n)
{
        struct worker *workers = need(calloc((size_t)n, sizeof(*workers)));

        for (long i = 0; i < n; i++) {
                workers[i].kind = kind;
                workers[i].n_runs = kind == DAEMON ? (o.n_runs + 199) / 200 : o.n_runs;
                samples_new(&workers[i].samples, (size_t)(workers[i].n_runs * (o.n_batches + 1)));
        }
        return workers;
}

/* All workers' samples together. */
static struct samples workers_end(struct worker *workers, long n)
{
        struct samples all;
        size_t n_samples = 0;

        for (long i = 0; i < n; i++)
                n_samples += workers[i].samples.n;
        samples_new(&all, n_samples);
        for (long i = 0; i < n; i++) {
                for (size_t k = 0; k < workers[i].samples.n; k++)
                        samples_add(&all, workers[i].samples.ns[k]);
                for (unsigned k = 0; k <= MAX_LAG; k++)
                        put(workers[i].kind, workers[i].lagging[k]);
                free(workers[i].samples.ns);
        }
        samples_evaluate(&all);
        free(workers);
        return all;
}

static bool is_measured(int kind)
{
        return kind == MIMALLOC ? mimalloc != NULL : kind != DAEMON || !o.cached_only;
}

/* The first of these that is measured; N_KINDS: there is none. */
static int kind_from(int kind)
{
        while (kind < N_KINDS && !is_measured(kind))
                kind++;
        return kind;
}

static void measure(long n_threads, struct result ret[N_KINDS])
{
        struct worker *workers[N_KINDS];
        double *walls[N_KINDS];

        for (int k = 0; k < N_KINDS; k = kind_from(k + 1)) {
                workers[k] = workers_new(k, n_threads);
                walls[k] = need(calloc((size_t)o.n_batches, sizeof(double)));
        }
        for (long batch = -1; batch < o.n_batches; batch++)
                for (int k = 0; k < N_KINDS; k = kind_from(k + 1)) {
                        if (n_threads == 1)
                                worker_batch(workers[k]);
                        else
                                batch_threads(workers[k], n_threads);
                        for (long i = 0; batch < 0 && i < n_threads; i++)
                                workers[k][i].samples.n = 0; /* the first batch only warms up */
                        if (batch >= 0)
                                walls[k][batch] = batch_wall(workers[k], n_threads);
                }
        for (int k = 0; k < N_KINDS; k = kind_from(k + 1)) {
                ret[k].pairs = workers_end(workers[k], n_threads);
                ret[k].wall = quantile(walls[k], (size_t)o.n_batches, 25);
                free(walls[k]);
        }
}

/* ---- the report ----------------------------------------------------------- */

/* Of the cache to this one. */
static double ratio(const struct result *s, int kind, long n_threads)
{
        if (n_threads > 1)
                return s[kind].wall > 0 ? s[CACHE].wall / s[kind].wall : 0;
        return s[kind].pairs.median > 0 ? (double)s[CACHE].pairs.median / s[kind].pairs.median : 0;
}

static void print_text(const char *title, const struct result *s, long n_threads)
{
        printf("%-24s %10s %10s %10s %10s   (ns for a malloc and a free of %ld bytes)\n", title, "median",
               "p99", "mean", "wall", o.n_bytes);
        for (int k = 0; k < N_KINDS; k = kind_from(k + 1))
                printf("  %-22s %10u %10u %10.0f %10.1f\n", names[k], s[k].pairs.median, s[k].pairs.p99,
                       s[k].pairs.mean, s[k].wall);
        printf("  %-22s %10.2f\n", "cache over malloc", ratio(s, LIBC, n_threads));
        if (mimalloc)
                printf("  %-22s %10.2f\n", "cache over mimalloc", ratio(s, MIMALLOC, n_threads));
}

static json_t *to_json(const struct result *s, long n_threads)
{
        json_t *j = json_pack("{s:I, s:f}", "num_threads", (json_int_t)n_threads, "ratio",
                              ratio(s, LIBC, n_threads));

        if (mimalloc)
                json_object_set_new(j, "mimalloc_ratio", json_real(ratio(s, MIMALLOC, n_threads)));

        for (int k = 0; k < N_KINDS; k = kind_from(k + 1))
                json_object_set_new(j, keys[k],
                                    json_pack("{s:I, s:I, s:f, s:f}", "median_ns",
                                              (json_int_t)s[k].pairs.median, "p99_ns",
                                              (json_int_t)s[k].pairs.p99, "mean_ns", s[k].pairs.mean,
                                              "wall_ns", s[k].wall));
        return j;
}

/* So that free space is in pieces, as in a job. */
static void hold(int kind, void **held)
{
        for (int i = 0; i < HELD_BLOCKS; i++) {
                size_t n_bytes = (size_t)1 << (8 + i * 7919 % 9);

                held[i] = kind == LIBC       ? malloc(n_bytes)
                          : kind == MIMALLOC ? mimalloc(n_bytes)
                                             : bench_malloc(clients[kind], n_bytes);
        }
        for (int i = 0; i < HELD_BLOCKS; i += 3) {
                put(kind, held[i]);
                held[i] = NULL;
        }
}

/* A size in MiB, or with a unit. */
static bool parse_limit(const char *word)
{
        char *end;
        long n = strtol(word, &end, 10), n_max = 1 << 20;

        if (strcmp(end, "GiB") == 0 && n >= 0 && n <= n_max >> 10)
                n <<= 10;
        else if (*end && strcmp(end, "MiB") != 0)
                n = 0;
        o.limit_mib = n;
        return n >= 1 && n <= n_max;
}

static void parse(int argc, char **argv)
{
        const struct bench_option options[] = {
                OPTION_BFCD(&o.bfcd),
                OPTION_JSON(&o.json),
                { "batches", .count = &o.n_batches, .min = 1, .max = 100000, .unit = "N", .help = "batches" },
                { "runs", .count = &o.n_runs, .min = 1, .max = 100000, .unit = "N",
                  .help = "samples per batch" },
                { "threads", .count = &o.n_threads, .min = 1, .max = MAX_THREADS, .unit = "N",
                  .help = "threads" },
                { "bytes", .count = &o.n_bytes, .min = 1, .max = MAX_BYTES, .unit = "N",
                  .help = "size of a block" },
                { "lag", .count = &o.lag, .max = MAX_LAG, .unit = "N",
                  .help = "age of a freed block, in pairs" },
                { "cached-only", .flag = &o.cached_only, .help = "leave out the client without a cache" },
                { "max-ratio", .number = &o.max_ratio, .unit = "F", .help = "limit of cache over malloc" },
                { "max-threads-ratio", .number = &o.max_threads_ratio, .unit = "F",
                  .help = "the same limit with several threads" },
                { "trace", .text = &o.trace, .unit = "FILE", .help = "replay this trace instead" },
                { "repeat", .count = &o.n_repeats, .min = 1, .max = 64, .unit = "N",
                  .help = "replays of the trace" },
                { "limit", .parse = parse_limit, .unit = "SIZE",
                  .help = "the tenant's limit for a trace, in MiB or as 138GiB (twice the trace's peak)" },
                { 0 },
        };

        options_parse(
                argc, argv,
                "Times bfc_malloc and bfc_free with the client's cache and without, and malloc and free,\n"
                "from one thread and from several. Ends with 1 if a ratio is above its limit. With a\n"
                "trace: reports what the cache held and how often it asked the daemon.",
                options);
        options_require(o.bfcd, "--bfcd is missing");
}

static void find_mimalloc(void)
{
        void *library = dlopen("libmimalloc.so.2", RTLD_NOW | RTLD_LOCAL);

        if (!library)
                return;
        mimalloc = (void *(*)(size_t))(uintptr_t)dlsym(library, "mi_malloc");
        mimalloc_free = (void (*)(void *))(uintptr_t)dlsym(library, "mi_free");
        if (!mimalloc_free)
                mimalloc = NULL;
}

/* Enough for all blocks of both clients at once. */
static unsigned limit_mib(void)
{
        long n_mib = o.n_bytes / (1 << 20) + 1, n_blocks = 2 * o.n_threads * (o.lag + 1);

        return (unsigned)(256 + n_mib * n_blocks);
}

int main(int argc, char **argv)
{
        struct result one[N_KINDS], many[N_KINDS];
        static void *held[N_KINDS][HELD_BLOCKS];
        pid_t pid;

        parse(argc, argv);
        make_folder("bench-client");
        find_mimalloc();
        if (o.trace) {
                client_trace(o.bfcd, o.trace, (unsigned)o.n_repeats, (unsigned)o.limit_mib, o.json);
                return EXIT_SUCCESS;
        }
        pid = daemon_start_simple(o.bfcd, limit_mib(), -1);
        setenv("BFC_CACHE", "on", 1);
        clients[CACHE] = client_start(socket_path, "bench-client", 0);
        clients[DAEMON] = client_start(socket_path, "bench-client", BFC_NO_CACHE);
        for (int k = 0; k < N_KINDS; k = kind_from(k + 1))
                hold(k, held[k]);
        measure(1, one);
        measure(o.n_threads, many);
        for (int k = 0; k < N_KINDS; k = kind_from(k + 1))
                for (int i = 0; i < HELD_BLOCKS; i++)
                        put(k, held[k][i]);
        bfc_disconnect(clients[CACHE]);
        bfc_disconnect(clients[DAEMON]);
        process_stop(pid, SIGTERM);
        if (o.json) {
                print_json(json_pack("{s:i, s:I, s:o, s:o}", "schema", 1, "block_bytes",
                                     (json_int_t)o.n_bytes, "one_thread", to_json(one, 1), "threads",
                                     to_json(many, o.n_threads)));
        } else {
                char title[32];

                snprintf(title, sizeof(title), "%ld threads", o.n_threads);
                print_text("one thread", one, 1);
                print_text(title, many, o.n_threads);
        }
        return (o.max_ratio > 0 && ratio(one, LIBC, 1) > o.max_ratio) ||
                               (o.max_threads_ratio > 0 &&
                                ratio(many, LIBC, o.n_threads) > o.max_threads_ratio)
                       ? EXIT_FAILURE
                       : EXIT_SUCCESS;
}
