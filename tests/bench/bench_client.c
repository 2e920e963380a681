/* bench-client: what bfc_malloc() and bfc_free() cost a job, with the client's cache and
 * without, beside malloc() and free() of the C library.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The three are asked in turn, batch by batch in one run, so that whatever the machine does
 * meanwhile meets all. A sample is the mean of a short run of pairs: a clock's reading is not
 * small beside one pair. Of several threads the samples hide what they cost each other, since a
 * thread that waits is rarely within one; so there the ratio is of the wall time of whole
 * batches, at the lower quartile: of those that the rest of the machine disturbed least. `held` blocks of mixed sizes live all the time, and each pair frees one of
 * its own that is as old as `lag` pairs. */
#include <bfcclient.h>

#include <errno.h>
#include <getopt.h>
#include <jansson.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/bench/client_trace.h"
#include "tests/bench/daemon.h"

#define MAX_THREADS 64
#define MAX_LAG     64
#define MAX_BYTES   (200L << 20)
#define RUN         20u /* pairs in a sample */
#define HELD_BLOCKS 512

struct options {
        const char *bfcd;
        long n_batches;
        long n_runs; /* in a batch; of what always asks the daemon one in 200 */
        long n_threads;
        long n_bytes;
        long lag;
        double max_ratio;         /* of the cache to the C library, one thread; 0: no matter */
        double max_threads_ratio; /* the same for several threads */
        const char *trace;
        unsigned n_repeats;
        unsigned limit_mib;
        bool cached_only; /* the daemon is not asked for each block */
        bool json;
};

enum { CACHE, LIBC, DAEMON, N_KINDS };
static const char *const names[] = { "with the cache", "malloc and free", "without the cache" };
static const char *const keys[] = { "cache", "libc", "daemon" };

struct samples {
        uint32_t *ns; /* per pair */
        size_t n;
        uint32_t median;
        uint32_t p99;
        double mean; /* waiting for the others' turns included */
        double wall; /* of a batch, for a pair of any thread: the lower quartile */
};

static struct options o = {
        .n_batches = 100, .n_runs = 1000, .n_threads = 8, .n_bytes = 4096, .n_repeats = 3
};
static bfc_client *clients[N_KINDS];

static void *__attribute__((noinline)) get(int kind)
{
        void *p = NULL;

        if (kind == LIBC)
                p = malloc((size_t)o.n_bytes);
        else if (bfc_malloc(clients[kind], (size_t)o.n_bytes, &p) < 0)
                die("bfc_malloc", bfc_last_error());
        __asm__ volatile("" : : "r"(p) : "memory"); /* or the compiler leaves the pair out */
        return p;
}

static void __attribute__((noinline)) put(int kind, void *p)
{
        if (kind == LIBC)
                free(p);
        else if (bfc_free(clients[kind], p) < 0)
                die("bfc_free", bfc_last_error());
}

/* ---- runs ---------------------------------------------------------------- */

static uint32_t run_once(int kind, void **lagging, unsigned *at)
{
        uint64_t begin = now_ns();

        for (unsigned i = 0; i < RUN; i++) {
                void **slot = &lagging[(*at)++ % ((unsigned)o.lag + 1)];

                put(kind, *slot);
                *slot = get(kind);
        }
        return (uint32_t)((now_ns() - begin) / RUN);
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
                w->samples.ns[w->samples.n++] = run_once(w->kind, w->lagging, &w->at);
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
        struct worker *workers = calloc((size_t)n, sizeof(*workers));

        for (long i = 0; workers && i < n; i++) {
                workers[i].kind = kind;
                workers[i].n_runs = kind == DAEMON ? (o.n_runs + 199) / 200 : o.n_runs;
                workers[i].samples.ns =
                        calloc((size_t)(workers[i].n_runs * (o.n_batches + 1)), sizeof(uint32_t));
                if (!workers[i].samples.ns)
                        die("memory", strerror(ENOMEM));
        }
        if (!workers)
                die("memory", strerror(ENOMEM));
        return workers;
}

static int compare(const void *a, const void *b)
{
        uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

        return x < y ? -1 : x > y;
}

static int compare_doubles(const void *a, const void *b)
{
        double x = *(const double *)a, y = *(const double *)b;

        return x < y ? -1 : x > y;
}

/* All workers' samples together. */
static struct samples workers_end(struct worker *workers, long n)
{
        struct samples all = { 0 };
        uint32_t *ns;

        for (long i = 0; i < n; i++)
                all.n += workers[i].samples.n;
        ns = calloc(all.n, sizeof(*ns));
        if (!ns)
                die("memory", strerror(ENOMEM));
        all.n = 0;
        for (long i = 0; i < n; i++) {
                memcpy(ns + all.n, workers[i].samples.ns, workers[i].samples.n * sizeof(*ns));
                all.n += workers[i].samples.n;
                for (unsigned k = 0; k <= MAX_LAG; k++)
                        put(workers[i].kind, workers[i].lagging[k]);
                free(workers[i].samples.ns);
        }
        qsort(ns, all.n, sizeof(*ns), compare);
        all.median = ns[all.n / 2];
        all.p99 = ns[all.n * 99 / 100];
        for (size_t i = 0; i < all.n; i++)
                all.mean += (double)ns[i] / (double)all.n;
        free(ns);
        free(workers);
        return all;
}

static int n_kinds(void)
{
        return o.cached_only ? DAEMON : N_KINDS;
}

static void measure(long n_threads, struct samples ret[N_KINDS])
{
        struct worker *workers[N_KINDS];
        double *walls[N_KINDS];

        for (int k = 0; k < n_kinds(); k++) {
                workers[k] = workers_new(k, n_threads);
                walls[k] = calloc((size_t)o.n_batches, sizeof(double));
                if (!walls[k])
                        die("memory", strerror(ENOMEM));
        }
        for (long batch = -1; batch < o.n_batches; batch++)
                for (int k = 0; k < n_kinds(); k++) {
                        if (n_threads == 1)
                                worker_batch(workers[k]);
                        else
                                batch_threads(workers[k], n_threads);
                        for (long i = 0; batch < 0 && i < n_threads; i++)
                                workers[k][i].samples.n = 0; /* that was to warm up */
                        if (batch >= 0)
                                walls[k][batch] = batch_wall(workers[k], n_threads);
                }
        for (int k = 0; k < n_kinds(); k++) {
                ret[k] = workers_end(workers[k], n_threads);
                qsort(walls[k], (size_t)o.n_batches, sizeof(double), compare_doubles);
                ret[k].wall = walls[k][o.n_batches / 4];
                free(walls[k]);
        }
}

/* ---- the report ----------------------------------------------------------- */

static double ratio(const struct samples *s, long n_threads)
{
        if (n_threads > 1)
                return s[LIBC].wall > 0 ? s[CACHE].wall / s[LIBC].wall : 0;
        return s[LIBC].median > 0 ? (double)s[CACHE].median / s[LIBC].median : 0;
}

static void print_text(const char *title, const struct samples *s, long n_threads)
{
        printf("%-24s %10s %10s %10s %10s   (ns for a malloc and a free of %ld bytes)\n", title, "median",
               "p99", "mean", "wall", o.n_bytes);
        for (int k = 0; k < n_kinds(); k++)
                printf("  %-22s %10u %10u %10.0f %10.1f\n", names[k], s[k].median, s[k].p99, s[k].mean,
                       s[k].wall);
        printf("  %-22s %10.2f\n", "cache over malloc", ratio(s, n_threads));
}

static json_t *to_json(const struct samples *s, long n_threads)
{
        json_t *j =
                json_pack("{s:I, s:f}", "num_threads", (json_int_t)n_threads, "ratio", ratio(s, n_threads));

        for (int k = 0; k < n_kinds(); k++)
                json_object_set_new(j, keys[k],
                                    json_pack("{s:I, s:I, s:f, s:f}", "median_ns", (json_int_t)s[k].median,
                                              "p99_ns", (json_int_t)s[k].p99, "mean_ns", s[k].mean, "wall_ns",
                                              s[k].wall));
        return j;
}

static _Noreturn void usage(FILE *f, int status)
{
        fprintf(f,
                "Usage: bench-client --bfcd PROGRAM [--json] [--batches N] [--runs N] [--threads N]\n"
                "                    [--bytes N] [--lag N] [--cached-only] [--max-ratio F]\n"
                "                    [--max-threads-ratio F]\n"
                "       bench-client --bfcd PROGRAM [--json] --trace FILE [--repeat N] [--limit SIZE]\n"
                "\n"
                "Times bfc_malloc and bfc_free with the client's cache and without, and malloc and\n"
                "free, from one thread and from several; --cached-only leaves out the second. Ends with 1 if the cache takes more than\n"
                "--max-ratio times what malloc takes in one thread, or --max-threads-ratio times\n"
                "in several. With a trace: lives through it, and tells what the cache held and how\n"
                "often the daemon was asked; --limit is the tenant's, in MiB or with the unit\n"
                "GiB (138GiB), twice the trace's peak otherwise.\n");
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

/* A size in MiB, or with a unit. */
static unsigned to_mib(const char *word)
{
        char *end;
        long n = strtol(word, &end, 10), n_max = 1 << 20;

        if (strcmp(end, "GiB") == 0 && n >= 0 && n <= n_max >> 10)
                n <<= 10;
        else if (*end && strcmp(end, "MiB") != 0)
                n = 0;
        if (n < 1 || n > n_max)
                die(word, "no size such as 1470MiB or 138GiB");
        return (unsigned)n;
}

static void parse(int argc, char **argv)
{
        static const struct option longs[] = {
                { "bfcd", required_argument, NULL, 'd' },
                { "json", no_argument, NULL, 'j' },
                { "batches", required_argument, NULL, 'b' },
                { "runs", required_argument, NULL, 'n' },
                { "threads", required_argument, NULL, 't' },
                { "bytes", required_argument, NULL, 's' },
                { "lag", required_argument, NULL, 'l' },
                { "cached-only", no_argument, NULL, 'c' },
                { "help", no_argument, NULL, 'h' },
                { "max-ratio", required_argument, NULL, 'r' },
                { "max-threads-ratio", required_argument, NULL, 'R' },
                { "trace", required_argument, NULL, 'f' },
                { "repeat", required_argument, NULL, 'e' },
                { "limit", required_argument, NULL, 'm' },
                { 0 },
        };
        int c;

        while ((c = getopt_long(argc, argv, "h", longs, NULL)) != -1) {
                if (c == 'd')
                        o.bfcd = optarg;
                else if (c == 'j')
                        o.json = true;
                else if (c == 'b')
                        o.n_batches = to_number(optarg, 1, 100000);
                else if (c == 'n')
                        o.n_runs = to_number(optarg, 1, 100000);
                else if (c == 't')
                        o.n_threads = to_number(optarg, 1, MAX_THREADS);
                else if (c == 's')
                        o.n_bytes = to_number(optarg, 1, MAX_BYTES);
                else if (c == 'l')
                        o.lag = to_number(optarg, 0, MAX_LAG);
                else if (c == 'c')
                        o.cached_only = true;
                else if (c == 'r')
                        o.max_ratio = atof(optarg);
                else if (c == 'R')
                        o.max_threads_ratio = atof(optarg);
                else if (c == 'f')
                        o.trace = optarg;
                else if (c == 'e')
                        o.n_repeats = (unsigned)to_number(optarg, 1, 64);
                else if (c == 'm')
                        o.limit_mib = to_mib(optarg);
                else
                        usage(c == 'h' ? stdout : stderr, c == 'h' ? EXIT_SUCCESS : 2);
        }
        if (!o.bfcd || optind < argc)
                usage(stderr, 2);
}

/* So that free space is in pieces, as in a job. */
static void hold(int kind, void **held)
{
        for (int i = 0; i < HELD_BLOCKS; i++) {
                size_t n_bytes = (size_t)1 << (8 + i * 7919 % 9);

                held[i] = NULL;
                if (kind == LIBC)
                        held[i] = malloc(n_bytes);
                else if (bfc_malloc(clients[kind], n_bytes, &held[i]) < 0)
                        die("bfc_malloc", bfc_last_error());
        }
        for (int i = 0; i < HELD_BLOCKS; i += 3) {
                put(kind, held[i]);
                held[i] = NULL;
        }
}

/* For all blocks at once, of both clients. */
static unsigned limit_mib(void)
{
        long n_mib = o.n_bytes / (1 << 20) + 1, n_blocks = 2 * o.n_threads * (o.lag + 1);

        return (unsigned)(256 + n_mib * n_blocks);
}

int main(int argc, char **argv)
{
        struct samples one[N_KINDS], many[N_KINDS];
        static void *held[N_KINDS][HELD_BLOCKS];
        char path[128];
        pid_t pid;

        parse(argc, argv);
        make_folder("bench-client");
        if (o.trace) {
                client_trace(o.bfcd, o.trace, o.n_repeats, o.limit_mib, o.json);
                return EXIT_SUCCESS;
        }
        pid = daemon_start(o.bfcd, limit_mib(), -1);
        snprintf(path, sizeof(path), "%s/bfcd.sock", folder);
        setenv("BFC_CACHE", "on", 1);
        clients[CACHE] = client_start(path, "bench-client", 0);
        clients[DAEMON] = client_start(path, "bench-client", BFC_NO_CACHE);
        for (int k = 0; k < N_KINDS; k++)
                hold(k, held[k]);
        measure(1, one);
        measure(o.n_threads, many);
        for (int k = 0; k < N_KINDS; k++)
                for (int i = 0; i < HELD_BLOCKS; i++)
                        put(k, held[k][i]);
        bfc_disconnect(clients[CACHE]);
        bfc_disconnect(clients[DAEMON]);
        kill(pid, SIGTERM);
        waitpid(pid, NULL, 0);
        if (o.json) {
                json_t *j =
                        json_pack("{s:i, s:I, s:o, s:o}", "schema", 1, "block_bytes", (json_int_t)o.n_bytes,
                                  "one_thread", to_json(one, 1), "threads", to_json(many, o.n_threads));

                json_dumpf(j, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(4));
                putchar('\n');
                json_decref(j);
        } else {
                char title[32];

                snprintf(title, sizeof(title), "%ld threads", o.n_threads);
                print_text("one thread", one, 1);
                print_text(title, many, o.n_threads);
        }
        if ((o.max_ratio > 0 && ratio(one, 1) > o.max_ratio) ||
            (o.max_threads_ratio > 0 && ratio(many, o.n_threads) > o.max_threads_ratio))
                return EXIT_FAILURE;
        return EXIT_SUCCESS;
}
