/* bench-trim: how long a request takes for which another process has to release what is idle in
 * its cache, or what it freed in the order of a stream whose work is done; while that process sleeps,
 * and while its only thread is busy. How often such a request is refused, which on a machine
 * with nothing else to do is never.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * No new memory is made: the request receives the released memory. So the time is the way from the
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
#include <sys/wait.h>
#include <unistd.h>

#include "tests/bench/daemon.h"
#include "tests/bench/options.h"

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

static struct {
        const char *bfcd;
        const char *share; /* of a GPU's memory; NULL: host memory */
        long n_runs;
        double max_ms; /* 0: any */
        bool is_strict;
        bool json;
} o = { .n_runs = 100 };
static struct result *result;

/* ---- the process with memory ---------------------------------------------------- */

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

/* Fills the cache again for each byte, and answers with a byte. Ends with the pipe. */
static void hold(int in, int out, const struct mode *mode)
{
        struct pollfd p = { .fd = in, .events = POLLIN };
        bfc_client *client = client_start(socket_path, "has", 0);
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

/* ---- the process that needs it --------------------------------------------------- */

/* A request that is refused is made again, and waits: on a busy machine a time-out may have passed. */
static void request(bfc_client *client, double *ret_ms)
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
        *ret_ms = ms_since(began);
        bench_free(client, p);
}

/* In a process of its own: a child of a process that used a GPU cannot use one. */
static void measure(void *arg)
{
        const struct mode *mode = arg;
        int to[2], from[2];
        bfc_client *client;
        char word = 'x';
        pid_t pid;

        if (pipe(to) < 0 || pipe(from) < 0 || (pid = fork()) < 0)
                die("fork", strerror(errno));
        if (pid == 0) {
                close(to[1]);
                hold(to[0], from[1], mode);
        }
        close(to[0]);
        close(from[1]);
        result->n_refused = 0;
        client = client_start(socket_path, "needs", BFC_NO_CACHE);
        for (long i = 0; i < o.n_runs; i++) {
                if (write(to[1], &word, 1) != 1 || read(from[0], &word, 1) != 1)
                        die("the other process", "it is gone");
                request(client, &result->ms[i]);
        }
        bfc_disconnect(client);
        close(to[1]);
        close(from[0]);
        waitpid(pid, NULL, 0);
}

/* ---- the rest ------------------------------------------------------------- */

/* False: it was slower than the limit, or refused. */
static bool report(const struct mode *mode, json_t *all)
{
        size_t n = (size_t)o.n_runs;
        double median = quantile(result->ms, n, 50), p95 = quantile(result->ms, n, 95);
        double max = quantile(result->ms, n, 100);

        json_object_set_new(all, mode->name,
                            json_pack("{s:f, s:f, s:f, s:I}", "median_ms", median, "p95_ms", p95, "max_ms",
                                      max, "refused", (json_int_t)result->n_refused));
        if (!o.json)
                printf("the other %-17s median %7.3f ms, 95 %% within %7.3f ms, at most %7.3f ms, refused %zu of "
                       "%zu\n",
                       mode->name, median, p95, max, result->n_refused, n);
        return (o.max_ms <= 0 || p95 <= o.max_ms) && !(o.is_strict && result->n_refused > 0);
}

static pid_t start(void)
{
        return daemon_start(o.bfcd, -1,
                            "devices:\n"
                            "  - id: %s\n%s"
                            "    partitions:\n"
                            "      - {name: bench, limit: %uMiB, growth: on-demand, share: %s}\n"
                            "tenants:\n"
                            "  - name: bench\n"
                            "    match: {uid: [%u]}\n"
                            "    quotas: [{partition: bench, limit: %uMiB}]\n",
                            o.share ? "cuda:0" : "host", o.share ? "" : "    size: 64MiB\n", LIMIT_MIB,
                            o.share ? o.share : "fd", (unsigned)geteuid(), LIMIT_MIB);
}

int main(int argc, char **argv)
{
        const struct bench_option options[] = {
                OPTION_BFCD(&o.bfcd),
                OPTION_JSON(&o.json),
                { "cuda", .text = &o.share, .unit = "SHARE", .help = "use cuda:0, shared by fd or cuda-ipc" },
                { "runs", .count = &o.n_runs, .min = 1, .max = 100000, .unit = "N",
                  .help = "requests per mode" },
                { "max-ms", .number = &o.max_ms, .unit = "MS", .help = "limit of the 95th percentile" },
                { "no-refusals", .flag = &o.is_strict, .help = "fail if a request was refused" },
                { 0 },
        };
        json_t *all = json_object();
        bool good = true;
        pid_t daemon_pid;

        options_parse(argc, argv, "Times requests for memory that another process has to release first.",
                      options);
        options_require(o.bfcd, "--bfcd is missing");
        make_folder("bench-trim");
        result = shared_memory(sizeof(*result) + (size_t)o.n_runs * sizeof(double));
        daemon_pid = start();
        for (size_t i = 0; i < N_MODES; i++) {
                process_run(modes[i].name, measure, (void *)(uintptr_t)&modes[i]);
                good = report(&modes[i], all) && good;
        }
        process_stop(daemon_pid, SIGTERM);
        if (o.json)
                print_json(json_incref(all));
        json_decref(all);
        return good ? EXIT_SUCCESS : EXIT_FAILURE;
}
