/* bench-shared: processes that attach one copy of something large, what that takes and what it
 * is charged, and how long it is there when they are killed.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * One process publishes. Then one after the other begins, and measures three kinds of attach:
 *
 *   first    the process has nothing mapped: the daemon sends it every extent
 *   again    it has the block, and attaches it once more
 *   mapped   it had detached the block, and its extents are still mapped
 *
 * At last all are killed by SIGKILL, the publisher first, and the time is measured from the last
 * kill to the moment at which the tenant uses nothing any more. */
#include <bfcclient.h>

#include <errno.h>
#include <jansson.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/bench/daemon.h"
#include "tests/bench/options.h"

#define MAX_PROCESSES 256
#define MAX_REPEAT    1000
#define NAME          "weights"

enum { FIRST, AGAIN, MAPPED, N_KINDS };
static const char *const kinds[N_KINDS] = { "first", "again", "mapped" };

static struct {
        const char *bfcd;
        long n_processes;
        long n_mib;
        long n_repeat;
        double max_ms; /* of the medians of `again` and `mapped`; 0: no bound */
        bool json;
} o = { .n_processes = 16, .n_mib = 1024, .n_repeat = 50 };

/* What the processes measured, in milliseconds, in memory that they share. */
struct results {
        double first[MAX_PROCESSES];
        double again[MAX_PROCESSES * MAX_REPEAT];
        double mapped[MAX_PROCESSES * MAX_REPEAT];
};
static struct results *results;
static int ready[2]; /* a pipe: a byte from each process that has come so far */

static void *attach(bfc_client *client, double *ret_ms)
{
        uint64_t begin = now_ns();
        size_t n_bytes = 0;
        void *p = NULL;

        if (bfc_attach(client, NAME, 0, &p, &n_bytes) < 0)
                die("bfc_attach", bfc_last_error());
        *ret_ms = ms_since(begin);
        if (n_bytes != (uint64_t)o.n_mib * MIB)
                die("bfc_attach", "another size than was published");
        return p;
}

static void detach(bfc_client *client, void *p)
{
        if (bfc_detach(client, p) < 0)
                die("bfc_detach", bfc_last_error());
}

static void live(void)
{
        if (write(ready[1], "", 1) != 1)
                die("pipe", strerror(errno));
        for (;;)
                pause();
}

static void publisher(void)
{
        bfc_client *client = client_start(socket_path, "publisher", 0);
        void *p = NULL;

        if (bfc_malloc_flags(client, NULL, (uint64_t)o.n_mib * MIB, BFC_WHOLE, &p) < 0)
                die("bfc_malloc", bfc_last_error());
        memset(p, 42, (uint64_t)o.n_mib * MIB);
        if (bfc_publish(client, p, NAME) < 0)
                die("bfc_publish", bfc_last_error());
        live();
}

static void attacher(long number)
{
        bfc_client *client = client_start(socket_path, "attacher", 0);
        char *p = attach(client, &results->first[number]);

        if (p[0] != 42 || p[(uint64_t)o.n_mib * MIB - 1] != 42)
                die("bfc_attach", "not what was published");
        for (long i = 0; i < o.n_repeat; i++)
                detach(client, attach(client, &results->again[number * o.n_repeat + i]));
        for (long i = 0; i < o.n_repeat; i++) {
                detach(client, p);
                p = attach(client, &results->mapped[number * o.n_repeat + i]);
        }
        live();
}

static void live_as(void *arg)
{
        long number = *(const long *)arg;

        if (number == 0)
                publisher();
        else
                attacher(number - 1);
}

/* number 0: the publisher. */
static pid_t start(long number)
{
        pid_t pid = process_start(live_as, &number);
        char byte;

        if (read(ready[0], &byte, 1) != 1)
                die("pipe", "a process ended");
        return pid;
}

/* Milliseconds from the last kill until the tenant uses nothing. */
static double kill_all(bfc_client *client, const pid_t *pids, long n)
{
        uint64_t begin;

        for (long i = 0; i + 1 < n; i++)
                process_stop(pids[i], SIGKILL);
        if (bench_usage(client).bytes_in_use != (uint64_t)o.n_mib * MIB)
                die("usage", "the block was released before its last process ended");
        begin = now_ns();
        kill(pids[n - 1], SIGKILL);
        while (bench_usage(client).bytes_in_use > 0)
                if (now_ns() - begin > UINT64_C(120000000000))
                        die("usage", "the block is still charged after the last process was killed");
        waitpid(pids[n - 1], NULL, 0);
        return ms_since(begin);
}

/* ---- printing ------------------------------------------------------------ */

struct stats {
        double median_ms, p99_ms, max_ms;
};

static struct stats sum_up(double *ms, size_t n)
{
        return (struct stats){ quantile(ms, n, 50), quantile(ms, n, 99), quantile(ms, n, 100) };
}

static void print(const struct stats *f, const struct bfc_tenant_usage *u, double gone_ms)
{
        json_t *j;

        if (!o.json) {
                printf("%ld processes have %ld MiB: in use %.0f MiB, charged %.0f MiB, %llu block\n",
                       o.n_processes + 1, o.n_mib, (double)u->bytes_in_use / (double)MIB,
                       (double)u->bytes_reserved / (double)MIB, (unsigned long long)u->num_blocks);
                for (int k = 0; k < N_KINDS; k++)
                        printf("attach, %-6s  median %8.3f ms  p99 %8.3f ms  max %8.3f ms\n", kinds[k],
                               f[k].median_ms, f[k].p99_ms, f[k].max_ms);
                printf("released %.1f ms after the last was killed\n", gone_ms);
                return;
        }
        j = json_pack("{s:i, s:I, s:I, s:I, s:I, s:I, s:f}", "schema", 1, "processes",
                      (json_int_t)o.n_processes, "n_bytes", (json_int_t)((uint64_t)o.n_mib * MIB),
                      "bytes_in_use", (json_int_t)u->bytes_in_use, "bytes_reserved",
                      (json_int_t)u->bytes_reserved, "num_blocks", (json_int_t)u->num_blocks, "gone_ms",
                      gone_ms);
        for (int k = 0; k < N_KINDS; k++)
                json_object_set_new(j, kinds[k],
                                    json_pack("{s:f, s:f, s:f}", "median_ms", f[k].median_ms, "p99_ms",
                                              f[k].p99_ms, "max_ms", f[k].max_ms));
        print_json(j);
}

int main(int argc, char **argv)
{
        const struct bench_option options[] = {
                OPTION_BFCD(&o.bfcd),
                OPTION_JSON(&o.json),
                { "mib", .count = &o.n_mib, .min = 1, .max = 1 << 20, .unit = "N",
                  .help = "size of the block" },
                { "processes", .count = &o.n_processes, .min = 1, .max = MAX_PROCESSES - 1, .unit = "N",
                  .help = "processes that attach" },
                { "repeat", .count = &o.n_repeat, .min = 1, .max = MAX_REPEAT, .unit = "N",
                  .help = "attaches of each process and kind" },
                { "max-ms", .number = &o.max_ms, .unit = "MS",
                  .help = "limit of the medians after the first" },
                { 0 },
        };
        static pid_t pids[MAX_PROCESSES];
        struct stats f[N_KINDS];
        struct bfc_tenant_usage u;
        bfc_client *watcher;
        double gone_ms;
        pid_t daemon;

        options_parse(
                argc, argv,
                "Times attaches of a shared block by many processes, and its release when they are killed.\n"
                "Ends with 1 if attaches after the first take more than --max-ms, by the median.",
                options);
        options_require(o.bfcd, "--bfcd is missing");
        make_folder("bench-shared");
        results = shared_memory(sizeof(*results));
        if (pipe(ready) < 0)
                die("pipe", strerror(errno));
        daemon = daemon_start_simple(o.bfcd, (unsigned)(o.n_mib + o.n_mib / 8 + 8), -1);
        for (long i = 0; i <= o.n_processes; i++)
                pids[i] = start(i);
        watcher = client_start(socket_path, "watcher", BFC_NO_CACHE);
        u = bench_usage(watcher);
        if (u.bytes_in_use != (uint64_t)o.n_mib * MIB || u.num_blocks != 1)
                die("usage", "not charged once");
        gone_ms = kill_all(watcher, pids, o.n_processes + 1);
        bfc_disconnect(watcher);
        process_stop(daemon, SIGTERM);
        f[FIRST] = sum_up(results->first, (size_t)o.n_processes);
        f[AGAIN] = sum_up(results->again, (size_t)(o.n_processes * o.n_repeat));
        f[MAPPED] = sum_up(results->mapped, (size_t)(o.n_processes * o.n_repeat));
        print(f, &u, gone_ms);
        return o.max_ms > 0 && (f[AGAIN].median_ms > o.max_ms || f[MAPPED].median_ms > o.max_ms)
                       ? EXIT_FAILURE
                       : EXIT_SUCCESS;
}
