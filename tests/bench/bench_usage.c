/* bench-usage: what bfc_usage() costs, and whether it ever returns inconsistent statistics.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Two other processes write while this one reads. One allocates and frees blocks of one size
 * through the daemon as fast as possible: at every moment bytes_in_use is num_blocks times that
 * size. The other writes a page of its own without a pause, and all its statistics are multiples
 * of one number. A reader meets that page in the middle of a write nearly every time, so a torn
 * read is found within milliseconds. */
#include <bfcclient.h>

#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "proto/pages.h"
#include "tests/bench/daemon.h"
#include "tests/bench/options.h"

#define RUN         1000u /* reads in a sample: a clock's reading is not small beside one */
#define BLOCK_BYTES 4096u
#define MAX_HELD    256u

static struct {
        const char *bfcd;
        long n_samples;
        double seconds; /* of each of the two checks */
        double max_ns;
        bool json;
} o = { .n_samples = 2000, .seconds = 3 };

/* ---- how long ------------------------------------------------------------ */

struct cost {
        struct samples reads;
        uint64_t n_calls; /* requests to the daemon among the reads */
};

static uint64_t n_calls(bfc_client *client)
{
        return bench_stats(client).num_calls;
}

static void read_usage(bfc_client *client, struct bfc_tenant_usage *ret)
{
        ret->struct_size = sizeof(*ret);
        if (bfc_usage(client, NULL, ret) < 0)
                die("bfc_usage", bfc_last_error());
        __asm__ volatile("" : : "r"(ret) : "memory");
}

static struct cost measure(bfc_client *client)
{
        struct cost cost = { .n_calls = n_calls(client) };
        struct bfc_tenant_usage usage;

        samples_new(&cost.reads, (size_t)o.n_samples);
        for (long i = 0; i < o.n_samples; i++) {
                uint64_t begin = now_ns();

                for (unsigned k = 0; k < RUN; k++)
                        read_usage(client, &usage);
                samples_add(&cost.reads, (now_ns() - begin) / RUN);
        }
        samples_evaluate(&cost.reads);
        cost.n_calls = n_calls(client) - cost.n_calls;
        return cost;
}

/* ---- whether it is so ----------------------------------------------------- */

struct check {
        uint64_t n_reads;
        uint64_t n_changes; /* reads that found another state than the one before */
        uint64_t n_busy;    /* bounded tries were not enough */
        uint64_t n_wrong;
};

/* For o.seconds, and on until a write was seen: a busy machine may not run the writer for long. */
static bool goes_on(uint64_t begin, const struct check *c)
{
        double seconds = (double)(now_ns() - begin) / 1e9;

        return seconds < o.seconds || (c->n_changes < 2 && seconds < o.seconds + 600);
}

static void run_allocator(void *arg)
{
        bfc_client *client = client_start(arg, "bench-usage-writer", BFC_NO_CACHE);
        static void *held[MAX_HELD];

        for (uint32_t i = 1;; i = i * 1664525u + 1013904223u) {
                void **slot = &held[(i >> 16) % MAX_HELD];

                if (*slot)
                        bench_free(client, *slot);
                *slot = *slot ? NULL : bench_malloc(client, BLOCK_BYTES);
        }
}

static struct check check_usage(bfc_client *client)
{
        uint64_t begin = now_ns(), calls = n_calls(client), last = UINT64_MAX;
        struct check c = { 0 };
        struct bfc_tenant_usage u;

        while (goes_on(begin, &c)) {
                for (unsigned i = 0; i < RUN; i++, c.n_reads++) {
                        read_usage(client, &u);
                        c.n_wrong += u.bytes_in_use != u.num_blocks * BLOCK_BYTES ||
                                     u.bytes_requested != u.bytes_in_use ||
                                     u.bytes_in_use > u.bytes_reserved ||
                                     u.bytes_in_use > u.peak_bytes_in_use ||
                                     u.peak_bytes_in_use > u.lifetime_peak_bytes_in_use;
                        c.n_changes += u.num_blocks != last;
                        last = u.num_blocks;
                }
        }
        c.n_busy = n_calls(client) - calls;
        return c;
}

static void run_writer(void *arg)
{
        struct pages_entry *e = arg;
        uint64_t stats[PAGES_N_STATS];

        for (uint64_t n = 1;; n++) {
                for (unsigned i = 0; i < PAGES_N_STATS; i++)
                        stats[i] = n * (i + 1);
                pages_write(e, stats);
        }
}

static bool is_one_state(const uint64_t *stats)
{
        for (unsigned i = 1; i < PAGES_N_STATS; i++)
                if (stats[i] != stats[0] * (i + 1))
                        return false;
        return true;
}

static struct check check_page(void)
{
        uint64_t begin, last = 0, stats[PAGES_N_STATS];
        struct pages_entry *e;
        struct check c = { 0 };
        void *map;
        pid_t pid;
        int fd, r = pages_make("bench-usage", pages_usage_bytes(1), true, &map, &fd);

        if (r < 0)
                die("a page", strerror(-r));
        e = ((struct pages_usage *)map)->entries;
        pid = process_start(run_writer, e);
        begin = now_ns();
        while (goes_on(begin, &c)) {
                for (unsigned i = 0; i < RUN; i++) {
                        if (pages_read(e, stats) < 0) {
                                c.n_busy++;
                                continue;
                        }
                        c.n_reads++;
                        c.n_wrong += !is_one_state(stats);
                        c.n_changes += stats[0] != last;
                        last = stats[0];
                }
        }
        process_stop(pid, SIGKILL);
        munmap(map, pages_usage_bytes(1));
        close(fd);
        return c;
}

/* ---- the program --------------------------------------------------------- */

struct results {
        struct cost idle, busy;
        struct check usage, page;
};

static void print_text(const struct results *r)
{
        printf("bfc_usage(), without other processes %4u ns   p99 %4u ns   asked the daemon %llu times\n",
               r->idle.reads.median, r->idle.reads.p99, (unsigned long long)r->idle.n_calls);
        printf("  while a process allocates          %4u ns   p99 %4u ns   asked the daemon %llu times\n",
               r->busy.reads.median, r->busy.reads.p99, (unsigned long long)r->busy.n_calls);
        printf("against an allocating process: %llu reads, %llu changes seen, %llu wrong\n",
               (unsigned long long)r->usage.n_reads, (unsigned long long)r->usage.n_changes,
               (unsigned long long)r->usage.n_wrong);
        printf("against a writer without pauses: %llu reads, %llu changes seen, %llu given up, %llu wrong\n",
               (unsigned long long)r->page.n_reads, (unsigned long long)r->page.n_changes,
               (unsigned long long)r->page.n_busy, (unsigned long long)r->page.n_wrong);
}

static json_t *cost_json(const struct cost *c)
{
        return json_pack("{s:I, s:I, s:I}", "median_ns", (json_int_t)c->reads.median, "p99_ns",
                         (json_int_t)c->reads.p99, "num_calls", (json_int_t)c->n_calls);
}

static json_t *check_json(const struct check *c)
{
        return json_pack("{s:I, s:I, s:I, s:I}", "num_reads", (json_int_t)c->n_reads, "num_changes",
                         (json_int_t)c->n_changes, "num_busy", (json_int_t)c->n_busy, "num_wrong",
                         (json_int_t)c->n_wrong);
}

static bool is_good(const struct results *r)
{
        return r->usage.n_wrong == 0 && r->page.n_wrong == 0 && r->usage.n_changes > 1 &&
               r->page.n_changes > 1 && r->idle.n_calls == 0 &&
               (o.max_ns <= 0 || (r->idle.reads.median <= o.max_ns && r->busy.reads.median <= o.max_ns));
}

int main(int argc, char **argv)
{
        const struct bench_option options[] = {
                OPTION_BFCD(&o.bfcd),
                OPTION_JSON(&o.json),
                { "samples", .count = &o.n_samples, .min = 1, .max = 100000000, .unit = "N",
                  .help = "of 1000 reads" },
                { "seconds", .number = &o.seconds, .unit = "S",
                  .help = "duration of each of the two checks" },
                { "max-ns", .number = &o.max_ns, .unit = "NS", .help = "limit of the median of a read" },
                { 0 },
        };
        struct results r;
        pid_t daemon_pid, writer;
        bfc_client *client;

        options_parse(argc, argv,
                      "Times bfc_usage() and reads against writers in other processes. Ends with 1 if a\n"
                      "statistic was wrong, if no write was seen, if the daemon was asked while nothing was\n"
                      "written, or if a read takes longer than --max-ns.",
                      options);
        options_require(o.bfcd && o.seconds > 0, "--bfcd is missing, or --seconds is 0");
        make_folder("bench-usage");
        daemon_pid = daemon_start_simple(o.bfcd, 64, -1);
        client = client_start(socket_path, "bench-usage", BFC_NO_CACHE | BFC_NO_THREAD);
        r.idle = measure(client);
        r.page = check_page();
        writer = process_start(run_allocator, socket_path);
        r.usage = check_usage(client);
        r.busy = measure(client);
        process_stop(writer, SIGKILL);
        bfc_disconnect(client);
        process_stop(daemon_pid, SIGTERM);
        if (o.json)
                print_json(json_pack("{s:i, s:o, s:o, s:o, s:o}", "schema", 1, "idle", cost_json(&r.idle),
                                     "busy", cost_json(&r.busy), "usage_check", check_json(&r.usage),
                                     "page_check", check_json(&r.page)));
        else
                print_text(&r);
        return is_good(&r) ? EXIT_SUCCESS : EXIT_FAILURE;
}
