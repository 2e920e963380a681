/* bench-shared: processes that attach one copy of something large, what that takes and what it
 * is charged, and how long it is there when they are killed.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * One process publishes. Then one after the other begins, and measures three kinds of attach:
 *
 *   first    the process has nothing mapped: the daemon sends it every extent
 *   again    it has the block, and attaches it once more
 *   mapped   it had let go of the block, and its extents are still mapped
 *
 * At last all are killed by SIGKILL, the publisher first, and the time is measured from the last
 * kill to the moment at which the tenant uses nothing any more. */
#include <bfcclient.h>

#include <errno.h>
#include <getopt.h>
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

#define MAX_PROCESSES 256
#define MAX_REPEAT    1000
#define MIB           (UINT64_C(1) << 20)
#define NAME          "weights"

enum { FIRST, AGAIN, MAPPED, N_KINDS };
static const char *const kinds[N_KINDS] = { "first", "again", "mapped" };

struct options {
        const char *bfcd;
        long n_processes;
        long n_mib;
        long n_repeat;
        double max_ms; /* of the medians of `again` and `mapped`; 0: no bound */
        bool json;
};
static struct options o = { .n_processes = 16, .n_mib = 1024, .n_repeat = 50 };

/* What the processes measured, in nanoseconds; all of them see it. */
struct results {
        uint64_t first[MAX_PROCESSES];
        uint64_t again[MAX_PROCESSES * MAX_REPEAT];
        uint64_t mapped[MAX_PROCESSES * MAX_REPEAT];
};
static struct results *results;
static int ready[2]; /* a pipe: a byte from each process that has come so far */
static char path[128];

static void *attach(bfc_client *client, uint64_t *ret_ns)
{
        uint64_t begin = now_ns();
        size_t n_bytes = 0;
        void *p = NULL;

        if (bfc_attach(client, NAME, 0, &p, &n_bytes) < 0)
                die("bfc_attach", bfc_last_error());
        *ret_ns = now_ns() - begin;
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
        bfc_client *client = client_start(path, "publisher", 0);
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
        bfc_client *client = client_start(path, "attacher", 0);
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

/* number -1: the publisher. */
static pid_t start(long number)
{
        pid_t pid = fork();
        char byte;

        if (pid < 0)
                die("fork", strerror(errno));
        if (pid == 0) {
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                if (number < 0)
                        publisher();
                else
                        attacher(number);
        }
        if (read(ready[0], &byte, 1) != 1)
                die("pipe", "a process ended");
        return pid;
}

static struct bfc_tenant_usage usage(bfc_client *client)
{
        struct bfc_tenant_usage u = { .struct_size = sizeof(u) };

        if (bfc_usage(client, NULL, &u) < 0)
                die("bfc_usage", bfc_last_error());
        return u;
}

static uint64_t kill_all(bfc_client *client, const pid_t *pids, long n)
{
        uint64_t begin;

        for (long i = 0; i + 1 < n; i++) {
                kill(pids[i], SIGKILL);
                waitpid(pids[i], NULL, 0);
        }
        if (usage(client).bytes_in_use != (uint64_t)o.n_mib * MIB)
                die("usage", "it is gone before its last holder is");
        begin = now_ns();
        kill(pids[n - 1], SIGKILL);
        while (usage(client).bytes_in_use > 0)
                if (now_ns() - begin > UINT64_C(120000000000))
                        die("usage", "it is still there after the last holder was killed");
        waitpid(pids[n - 1], NULL, 0);
        return now_ns() - begin;
}

/* ---- printing ------------------------------------------------------------ */

static int compare(const void *a, const void *b)
{
        uint64_t x, y;

        memcpy(&x, a, sizeof(x));
        memcpy(&y, b, sizeof(y));
        return x < y ? -1 : x > y;
}

struct figures {
        double median_ms, p99_ms, max_ms;
};

static struct figures sum_up(uint64_t *ns, size_t n)
{
        qsort(ns, n, sizeof(*ns), compare);
        return (struct figures){ (double)ns[n / 2] / 1e6, (double)ns[n * 99 / 100] / 1e6,
                                 (double)ns[n - 1] / 1e6 };
}

static void print(const struct figures *f, const struct bfc_tenant_usage *u, double gone_ms)
{
        json_t *j;

        if (!o.json) {
                printf("%ld processes have %ld MiB: in use %.0f MiB, charged %.0f MiB, %llu block\n",
                       o.n_processes + 1, o.n_mib, (double)u->bytes_in_use / (double)MIB,
                       (double)u->bytes_reserved / (double)MIB, (unsigned long long)u->num_blocks);
                for (int k = 0; k < N_KINDS; k++)
                        printf("attach, %-6s  median %8.3f ms  p99 %8.3f ms  max %8.3f ms\n", kinds[k],
                               f[k].median_ms, f[k].p99_ms, f[k].max_ms);
                printf("gone %.1f ms after the last was killed\n", gone_ms);
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
        json_dumpf(j, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(4));
        putchar('\n');
        json_decref(j);
}

/* ---- options ------------------------------------------------------------- */

static _Noreturn void usage_text(FILE *f, int status)
{
        fprintf(f, "Usage: bench-shared --bfcd PROGRAM [--json] [--processes N] [--mib N] [--repeat N]\n"
                   "                    [--max-ms F]\n"
                   "\n"
                   "Times attaches of a shared block by many processes, and its end when they are killed.\n"
                   "Ends with 1 if attaches after the first take more than --max-ms, by the median.\n");
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

static void parse(int argc, char **argv)
{
        static const struct option longs[] = {
                { "bfcd", required_argument, NULL, 'd' },   { "json", no_argument, NULL, 'j' },
                { "mib", required_argument, NULL, 'm' },    { "processes", required_argument, NULL, 'p' },
                { "help", no_argument, NULL, 'h' },         { "repeat", required_argument, NULL, 'n' },
                { "max-ms", required_argument, NULL, 'x' }, { 0 },
        };
        int c;

        while ((c = getopt_long(argc, argv, "h", longs, NULL)) != -1) {
                if (c == 'd')
                        o.bfcd = optarg;
                else if (c == 'j')
                        o.json = true;
                else if (c == 'm')
                        o.n_mib = to_number(optarg, 1, 1 << 20);
                else if (c == 'p')
                        o.n_processes = to_number(optarg, 1, MAX_PROCESSES - 1);
                else if (c == 'n')
                        o.n_repeat = to_number(optarg, 1, MAX_REPEAT);
                else if (c == 'x')
                        o.max_ms = atof(optarg);
                else
                        usage_text(c == 'h' ? stdout : stderr, c == 'h' ? EXIT_SUCCESS : 2);
        }
        if (!o.bfcd || optind < argc)
                usage_text(stderr, 2);
}

int main(int argc, char **argv)
{
        static pid_t pids[MAX_PROCESSES];
        struct figures f[N_KINDS];
        struct bfc_tenant_usage u;
        bfc_client *watcher;
        double gone_ms;
        pid_t daemon;

        parse(argc, argv);
        results = mmap(NULL, sizeof(*results), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (results == MAP_FAILED || pipe(ready) < 0)
                die("memory", strerror(errno));
        make_folder("bench-shared");
        daemon = daemon_start(o.bfcd, (unsigned)(o.n_mib + o.n_mib / 8 + 8), -1);
        snprintf(path, sizeof(path), "%s/bfcd.sock", folder);
        watcher = client_start(path, "watcher", BFC_NO_CACHE);
        for (long i = 0; i <= o.n_processes; i++)
                pids[i] = start(i - 1);
        u = usage(watcher);
        if (u.bytes_in_use != (uint64_t)o.n_mib * MIB || u.num_blocks != 1)
                die("usage", "not charged once");
        gone_ms = (double)kill_all(watcher, pids, o.n_processes + 1) / 1e6;
        bfc_disconnect(watcher);
        kill(daemon, SIGTERM);
        waitpid(daemon, NULL, 0);
        f[FIRST] = sum_up(results->first, (size_t)o.n_processes);
        f[AGAIN] = sum_up(results->again, (size_t)(o.n_processes * o.n_repeat));
        f[MAPPED] = sum_up(results->mapped, (size_t)(o.n_processes * o.n_repeat));
        print(f, &u, gone_ms);
        return o.max_ms > 0 && (f[AGAIN].median_ms > o.max_ms || f[MAPPED].median_ms > o.max_ms)
                       ? EXIT_FAILURE
                       : EXIT_SUCCESS;
}
