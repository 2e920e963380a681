/* bench-trim: how long a request takes for which another process has to give back what lies idle in
 * its cache, or what it freed in the order of a stream whose work is done; while that process sleeps,
 * and while its only thread is busy. How often such a request is refused, which on a machine
 * with nothing else to do is never.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * No new memory is made: what comes back is what the request gets. So it is the way from the
 * request to the daemon, to the other client's thread, its frees, its answer, and back. One that is
 * refused is made again, and waits; its time is of both. */
#include <bfcclient.h>

#include <errno.h>
#include <jansson.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/bench/daemon.h"

#define MIB         (UINT64_C(1) << 20)
#define LIMIT_MIB   64u
#define SLABS       32u
#define SLAB_BYTES  (2 * MIB - 4096)
#define ASKED_BYTES (16 * MIB)

struct mode {
        const char *name;
        bool is_busy;
        bool is_async; /* of a stream */
};
static const struct mode modes[] = {
        { "sleeping", false, false },
        { "busy", true, false },
        { "streams-sleeping", false, true },
        { "streams-busy", true, true },
};
#define N_MODES (sizeof(modes) / sizeof(modes[0]))

struct result { /* in memory that processes share */
        size_t n_refused;
        double ms[]; /* sorted */
};

static char path[128];

/* ---- the one that has ---------------------------------------------------- */

/* In the default stream, which has nothing to do. */
static void fill(bfc_client *client, bool is_async)
{
        void *p[SLABS];
        unsigned n = 0;

        while (n < SLABS && (is_async ? bfc_malloc_async(client, SLAB_BYTES, 0, &p[n])
                                      : bfc_malloc(client, SLAB_BYTES, &p[n])) == 0)
                n++;
        if (n < SLABS / 2)
                die("bfc_malloc", bfc_last_error());
        while (n-- > 0)
                if ((is_async ? bfc_free_async(client, p[n], 0) : bfc_free(client, p[n])) < 0)
                        die("bfc_free", bfc_last_error());
}

/* A byte: fill the cache again, and say so. No more bytes: the end. */
static void have(int in, int out, const struct mode *mode)
{
        struct pollfd p = { .fd = in, .events = POLLIN };
        bfc_client *client = client_start(path, "has", 0);
        char word;

        while (read(in, &word, 1) == 1) {
                fill(client, mode->is_async);
                if (write(out, &word, 1) != 1)
                        break;
                while (mode->is_busy && poll(&p, 1, 0) == 0)
                        for (volatile int i = 0; i < 100000; i++)
                                ;
        }
        bfc_disconnect(client);
        _exit(0);
}

/* ---- the one that needs --------------------------------------------------- */

static int compare(const void *a, const void *b)
{
        double x = *(const double *)a, y = *(const double *)b;

        return (x > y) - (x < y);
}

/* Not at once, where it is refused; then on a machine that is busy a time-out may have passed. */
static void need(bfc_client *client, struct result *result, double *ret_ms)
{
        struct bfc_malloc_options how = { .struct_size = sizeof(how) };
        uint64_t began = now_ns();
        void *p;
        int r = bfc_malloc_with(client, ASKED_BYTES, &how, &p);

        if (r == -EDQUOT || r == -ENOMEM) {
                result->n_refused++;
                how.wait_ms = 120000;
                r = bfc_malloc_with(client, ASKED_BYTES, &how, &p);
        }
        if (r < 0)
                die("bfc_malloc", bfc_last_error());
        *ret_ms = (double)(now_ns() - began) / 1e6;
        if (bfc_free(client, p) < 0)
                die("bfc_free", bfc_last_error());
}

static void measure(const struct mode *mode, size_t n_runs, struct result *result)
{
        int to[2], from[2];
        bfc_client *client;
        char word = 'x';
        pid_t pid;

        if (pipe(to) < 0 || pipe(from) < 0 || (pid = fork()) < 0)
                die("fork", strerror(errno));
        if (pid == 0) {
                close(to[1]);
                have(to[0], from[1], mode);
        }
        close(to[0]);
        close(from[1]);
        result->n_refused = 0;
        client = client_start(path, "needs", BFC_NO_CACHE);
        for (size_t i = 0; i < n_runs; i++) {
                if (write(to[1], &word, 1) != 1 || read(from[0], &word, 1) != 1)
                        die("the other process", "it is gone");
                need(client, result, &result->ms[i]);
        }
        bfc_disconnect(client);
        close(to[1]);
        close(from[0]);
        waitpid(pid, NULL, 0);
        qsort(result->ms, n_runs, sizeof(result->ms[0]), compare);
}

/* In a process of its own: who was forked by one that used a GPU can use none. */
static void measure_apart(const struct mode *mode, size_t n_runs, struct result *result)
{
        pid_t pid = fork();
        int status = 0;

        if (pid < 0)
                die("fork", strerror(errno));
        if (pid == 0) {
                measure(mode, n_runs, result);
                _exit(0);
        }
        if (waitpid(pid, &status, 0) < 0 || status != 0)
                die(mode->name, "the measurement failed");
}

/* ---- the rest ------------------------------------------------------------- */

/* share: NULL for the host, or how a GPU's memory is shared. */
static pid_t start(const char *bfcd, const char *share)
{
        char rest[600];

        snprintf(rest, sizeof(rest),
                 "devices:\n"
                 "  - id: %s\n%s"
                 "    partitions:\n"
                 "      - {name: bench, limit: %uMiB, growth: on-demand, share: %s}\n"
                 "tenants:\n"
                 "  - name: bench\n"
                 "    match: {uid: [%u]}\n"
                 "    quotas: [{partition: bench, limit: %uMiB}]\n",
                 share ? "cuda:0" : "host", share ? "" : "    size: 64MiB\n", LIMIT_MIB, share ? share : "fd",
                 (unsigned)geteuid(), LIMIT_MIB);
        return daemon_start_with(bfcd, rest, -1);
}

struct options {
        const char *bfcd;
        const char *share;
        long n_runs;
        long max_ms; /* 0: any */
        bool is_strict;
        bool json;
};

static long number(const char *word)
{
        char *end;
        long n = strtol(word, &end, 10);

        if (end == word || *end || n < 1 || n > 100000)
                die(word, "not a number that makes sense here");
        return n;
}

static struct options parse(int argc, char **argv)
{
        struct options o = { .n_runs = 100 };

        for (int i = 1; i < argc; i++) {
                if (strcmp(argv[i], "--json") == 0)
                        o.json = true;
                else if (strcmp(argv[i], "--no-refusals") == 0)
                        o.is_strict = true;
                else if (i + 1 < argc && strcmp(argv[i], "--bfcd") == 0)
                        o.bfcd = argv[++i];
                else if (i + 1 < argc && strcmp(argv[i], "--cuda") == 0)
                        o.share = argv[++i];
                else if (i + 1 < argc && strcmp(argv[i], "--runs") == 0)
                        o.n_runs = number(argv[++i]);
                else if (i + 1 < argc && strcmp(argv[i], "--max-ms") == 0)
                        o.max_ms = number(argv[++i]);
                else
                        die(argv[i], "usage: bench-trim --bfcd PATH [--cuda fd|cuda-ipc] [--runs N] "
                                     "[--max-ms N] [--no-refusals] [--json]");
        }
        if (!o.bfcd)
                die("bench-trim", "--bfcd PATH is needed");
        return o;
}

/* False: it was slower than it may be, or refused. */
static bool tell(const struct options *o, const struct mode *mode, const struct result *result, json_t *all)
{
        size_t n = (size_t)o->n_runs;
        double median = result->ms[n / 2], p95 = result->ms[n * 95 / 100], max = result->ms[n - 1];

        json_object_set_new(all, mode->name,
                            json_pack("{s:f, s:f, s:f, s:I}", "median_ms", median, "p95_ms", p95, "max_ms",
                                      max, "refused", (json_int_t)result->n_refused));
        if (!o->json)
                printf("the other %-17s median %7.3f ms, 95 %% within %7.3f ms, at most %7.3f ms, refused %zu of "
                       "%zu\n",
                       mode->name, median, p95, max, result->n_refused, n);
        return (o->max_ms == 0 || p95 <= (double)o->max_ms) && !(o->is_strict && result->n_refused > 0);
}

int main(int argc, char **argv)
{
        struct options o = parse(argc, argv);
        size_t n_bytes = sizeof(struct result) + (size_t)o.n_runs * sizeof(double);
        struct result *result =
                mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        json_t *all = json_object();
        bool good = true;
        pid_t daemon_pid;

        if (result == MAP_FAILED)
                die("bench-trim", "out of memory");
        make_folder("bench-trim");
        snprintf(path, sizeof(path), "%s/bfcd.sock", folder);
        daemon_pid = start(o.bfcd, o.share);
        for (size_t i = 0; i < N_MODES; i++) {
                measure_apart(&modes[i], (size_t)o.n_runs, result);
                good = tell(&o, &modes[i], result, all) && good;
        }
        kill(daemon_pid, SIGTERM);
        waitpid(daemon_pid, NULL, 0);
        if (o.json) {
                json_dumpf(all, stdout, JSON_INDENT(2));
                putchar('\n');
        }
        json_decref(all);
        munmap(result, n_bytes);
        return good ? EXIT_SUCCESS : EXIT_FAILURE;
}
