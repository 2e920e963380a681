/* bench-turns: two jobs that each need most of a partition compute in turns. A turn begins when all blocks of the
 * job are awake, for which those of the other job are parked. How long that takes, and how many bytes a second are
 * woken meanwhile; as many are parked.
 *
 * SPDX-License-Identifier: Apache-2.0 */
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

#define BLOCKS    6u
#define MAX_TURNS 1000
#define MARK      4096u /* bytes at the begin and the end of a block that are written and compared */
#define WAIT_MS   600000u
#define GIB_BYTES 1073741824.0

struct turns {       /* of a job, in memory that processes share */
        int pass[2]; /* a pipe: a byte for each turn that it may take */
        size_t n;
        double ms[MAX_TURNS];
        uint64_t n_bytes[MAX_TURNS]; /* that were woken */
};

static struct {
        const char *bfcd;
        const char *share; /* of a GPU's memory; NULL: host memory */
        long n_turns, mib;
        bool json;
} o = { .n_turns = 20, .mib = 240 };
static struct turns *jobs; /* two */

static uint64_t block_bytes(void)
{
        return (uint64_t)o.mib * 8 / 10 / BLOCKS / 2 * 2 * MIB;
}

/* ---- a job ------------------------------------------------------------------------ */

static void mark(bfc_client *client, char *p, uint64_t turn)
{
        unsigned char bytes[MARK];

        memset(bytes, (int)(turn % 251), sizeof(bytes));
        if (bfc_write(client, p, bytes, MARK) < 0 ||
            bfc_write(client, p + block_bytes() - MARK, bytes, MARK) < 0)
                die("bfc_write", bfc_last_error());
}

static void compare(bfc_client *client, const char *p, uint64_t turn)
{
        unsigned char expected[MARK], first[MARK], last[MARK];

        memset(expected, (int)(turn % 251), sizeof(expected));
        if (bfc_read(client, first, p, MARK) < 0 ||
            bfc_read(client, last, p + block_bytes() - MARK, MARK) < 0)
                die("bfc_read", bfc_last_error());
        if (memcmp(first, expected, MARK) != 0 || memcmp(last, expected, MARK) != 0)
                die("a block", "it has other contents");
}

static uint64_t parked_bytes(bfc_client *client, char *const *blocks)
{
        uint64_t n_bytes = 0;
        char byte;

        for (unsigned i = 0; i < BLOCKS; i++)
                n_bytes += bfc_read(client, &byte, blocks[i], 1) == -EBUSY ? block_bytes() : 0;
        return n_bytes;
}

static void take_turn(bfc_client *client, char *const *blocks, struct turns *t)
{
        uint64_t n_bytes = parked_bytes(client, blocks), began = now_ns();

        if (bfc_use_begin_tag(client, "model", WAIT_MS) < 0)
                die("bfc_use_begin_tag", bfc_last_error());
        t->ms[t->n] = ms_since(began);
        t->n_bytes[t->n] = n_bytes;
        for (unsigned i = 0; i < BLOCKS; i++) {
                compare(client, blocks[i], t->n);
                mark(client, blocks[i], t->n + 1);
        }
        t->n++;
        if (bfc_use_end_tag(client, "model") < 0)
                die("bfc_use_end_tag", bfc_last_error());
}

static void run_job(void *arg)
{
        struct bfc_malloc_options how = {
                .struct_size = sizeof(how), .flags = BFC_PARKABLE, .wait_ms = WAIT_MS, .tag = "model"
        };
        struct turns *t = arg;
        bfc_client *client;
        char *blocks[BLOCKS];

        setenv("BFC_TENANT", t == jobs ? "red" : "blue", 1);
        client = client_start(socket_path, "job", 0);
        for (unsigned i = 0; i < BLOCKS; i++) {
                void *p;

                if (bfc_malloc_with(client, block_bytes(), &how, &p) < 0)
                        die("bfc_malloc_with", bfc_last_error());
                blocks[i] = p;
                mark(client, blocks[i], 0);
        }
        for (long i = 0; i < o.n_turns; i++) {
                struct turns *other = &jobs[t == jobs];
                char byte;

                if (read(t->pass[0], &byte, 1) != 1)
                        die("the other job", "it is gone");
                take_turn(client, blocks, t);
                if (write(other->pass[1], "x", 1) != 1)
                        die("the other job", "it is gone");
        }
        bfc_disconnect(client);
}

/* ---- the rest ------------------------------------------------------------------------ */

static int compare_ms(const void *a, const void *b)
{
        const double *x = a, *y = b;

        return (*x > *y) - (*x < *y);
}

/* Turns for which nothing was to be woken are of no interest. */
static void report(void)
{
        static double ms[2 * MAX_TURNS];
        uint64_t n_bytes = 0;
        double sum_ms = 0, median, rate;
        size_t n = 0;

        for (size_t i = 0; i < 2; i++) {
                for (size_t k = 0; k < jobs[i].n; k++) {
                        if (jobs[i].n_bytes[k] == 0)
                                continue;
                        ms[n++] = jobs[i].ms[k];
                        sum_ms += jobs[i].ms[k];
                        n_bytes += jobs[i].n_bytes[k];
                }
        }
        if (n == 0)
                die("the jobs", "they never took turns");
        qsort(ms, n, sizeof(ms[0]), compare_ms);
        median = ms[n / 2];
        rate = (double)n_bytes / GIB_BYTES / (sum_ms / 1000);
        if (o.json)
                print_json(json_pack("{s:I, s:f, s:f, s:I, s:f}", "turns", (json_int_t)n, "median_ms", median,
                                     "max_ms", ms[n - 1], "bytes_woken", (json_int_t)n_bytes, "gib_per_s",
                                     rate));
        else
                printf("%zu turns: median %.1f ms, at most %.1f ms; %.1f MiB woken in each, %.2f GiB/s\n", n,
                       median, ms[n - 1], (double)n_bytes / (double)n / (double)MIB, rate);
}

#define TENANT(name)                                                                                         \
        "  - name: " name "\n"                                                                               \
        "    match: {uid: [%u]}\n"                                                                           \
        "    quotas: [{partition: bench, park: {to: copies, idle: 1ms}}, {partition: copies}]\n"

static pid_t start(void)
{
        const char *host = o.share ? "  - id: host\n    size: 1TiB\n    partitions:\n" : "";
        unsigned uid = (unsigned)geteuid();

        return daemon_start(o.bfcd, -1,
                            "devices:\n"
                            "  - id: %s\n%s"
                            "    partitions:\n"
                            "      - {name: bench, limit: %ldMiB, share: %s}\n"
                            "%s"
                            "      - {name: copies, limit: %ldMiB}\n"
                            "tenants:\n" TENANT("red") TENANT("blue"),
                            o.share ? "cuda:0" : "host", o.share ? "" : "    size: 1TiB\n", o.mib,
                            o.share ? o.share : "fd", host, 2 * o.mib, uid, uid);
}

int main(int argc, char **argv)
{
        const struct bench_option options[] = {
                OPTION_BFCD(&o.bfcd),
                OPTION_JSON(&o.json),
                { "cuda", .text = &o.share, .unit = "SHARE", .help = "use cuda:0, shared by fd" },
                { "turns", .count = &o.n_turns, .min = 1, .max = MAX_TURNS, .unit = "N",
                  .help = "turns of each job" },
                { "mib", .count = &o.mib, .min = 60, .max = 1000000, .unit = "MIB",
                  .help = "of the partition; each job needs 80 % of it" },
                { 0 },
        };
        pid_t daemon_pid, children[2];

        options_parse(argc, argv, "Times two jobs that share a partition in turns.", options);
        options_require(o.bfcd, "--bfcd is missing");
        make_folder("bench-turns");
        jobs = shared_memory(2 * sizeof(*jobs));
        if (pipe(jobs[0].pass) < 0 || pipe(jobs[1].pass) < 0 || write(jobs[0].pass[1], "x", 1) != 1)
                die("pipe", strerror(errno));
        daemon_pid = start();
        for (size_t i = 0; i < 2; i++)
                children[i] = process_start(run_job, &jobs[i]);
        for (size_t i = 0; i < 2; i++) {
                int status;

                if (waitpid(children[i], &status, 0) < 0 || status != 0)
                        die("a job", "it failed");
        }
        process_stop(daemon_pid, SIGTERM);
        report();
        return EXIT_SUCCESS;
}
