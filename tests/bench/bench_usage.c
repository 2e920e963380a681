/* bench-usage: what bfc_usage() costs, and whether it ever says what never was so.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Two other processes write while this one reads. One takes and gives blocks of one size
 * through the daemon, as fast as that goes: at every moment bytes_in_use is num_blocks times that
 * size. The other writes a page of its own without a pause, all figures of it multiples of
 * one number: there a reader is at it in the middle of a write nearly every time, so one that
 * believes what it must not is found out within milliseconds. */
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

#include "proto/pages.h"
#include "tests/bench/daemon.h"

#define RUN         1000u /* reads in a sample: a clock's reading is not small beside one */
#define BLOCK_BYTES 4096u
#define MAX_HELD    256u

struct options {
        const char *bfcd;
        long n_samples;
        double seconds; /* of each of the two checks */
        double max_ns;
        bool json;
};

static struct options o = { .n_samples = 2000, .seconds = 3 };

static pid_t start(void (*run)(void *), void *arg)
{
        pid_t pid = fork();

        if (pid < 0)
                die("fork", strerror(errno));
        if (pid > 0)
                return pid;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        run(arg);
        _exit(0);
}

static void stop(pid_t pid, int signal_number)
{
        kill(pid, signal_number);
        waitpid(pid, NULL, 0);
}

/* ---- how long ------------------------------------------------------------ */

struct cost {
        uint32_t median_ns;
        uint32_t p99_ns;
        uint64_t n_calls; /* requests to the daemon among the reads */
};

static int compare(const void *a, const void *b)
{
        uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

        return x < y ? -1 : x > y;
}

static uint64_t n_calls(bfc_client *client)
{
        struct bfc_client_stats s = { .struct_size = sizeof(s) };

        if (bfc_stats(client, &s) < 0)
                die("bfc_stats", bfc_last_error());
        return s.num_calls;
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
        uint32_t *ns = calloc((size_t)o.n_samples, sizeof(*ns));
        struct bfc_tenant_usage usage;
        struct cost cost = { .n_calls = n_calls(client) };

        if (!ns)
                die("memory", strerror(ENOMEM));
        for (long i = 0; i < o.n_samples; i++) {
                uint64_t begin = now_ns();

                for (unsigned k = 0; k < RUN; k++)
                        read_usage(client, &usage);
                ns[i] = (uint32_t)((now_ns() - begin) / RUN);
        }
        qsort(ns, (size_t)o.n_samples, sizeof(*ns), compare);
        cost.median_ns = ns[o.n_samples / 2];
        cost.p99_ns = ns[o.n_samples * 99 / 100];
        cost.n_calls = n_calls(client) - cost.n_calls;
        free(ns);
        return cost;
}

/* ---- whether it is so ----------------------------------------------------- */

struct check {
        uint64_t n_reads;
        uint64_t n_changes; /* reads that found another state than the one before */
        uint64_t n_busy;    /* bounded tries were not enough */
        uint64_t n_wrong;
};

static void run_allocator(void *arg)
{
        bfc_client *client = client_start(arg, "bench-usage-writer", BFC_NO_CACHE);
        static void *held[MAX_HELD];

        for (uint32_t i = 1;; i = i * 1664525u + 1013904223u) {
                void **slot = &held[(i >> 16) % MAX_HELD];

                if (*slot) {
                        if (bfc_free(client, *slot) < 0)
                                die("bfc_free", bfc_last_error());
                        *slot = NULL;
                } else if (bfc_malloc(client, BLOCK_BYTES, slot) < 0) {
                        die("bfc_malloc", bfc_last_error());
                }
        }
}

static struct check check_usage(bfc_client *client)
{
        uint64_t end = now_ns() + (uint64_t)(o.seconds * 1e9), calls = n_calls(client), last = UINT64_MAX;
        struct check c = { 0 };
        struct bfc_tenant_usage u;

        while (now_ns() < end) {
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
        uint64_t figures[PAGES_N_FIGURES];

        for (uint64_t n = 1;; n++) {
                for (unsigned i = 0; i < PAGES_N_FIGURES; i++)
                        figures[i] = n * (i + 1);
                pages_write(e, figures);
        }
}

static bool is_one_state(const uint64_t *figures)
{
        for (unsigned i = 1; i < PAGES_N_FIGURES; i++)
                if (figures[i] != figures[0] * (i + 1))
                        return false;
        return true;
}

static struct check check_page(void)
{
        uint64_t end, last = 0, figures[PAGES_N_FIGURES];
        struct pages_entry *e;
        struct check c = { 0 };
        void *map;
        pid_t pid;
        int fd, r = pages_make("bench-usage", pages_usage_bytes(1), true, &map, &fd);

        if (r < 0)
                die("a page", strerror(-r));
        e = ((struct pages_usage *)map)->entries;
        pid = start(run_writer, e);
        end = now_ns() + (uint64_t)(o.seconds * 1e9);
        while (now_ns() < end) {
                for (unsigned i = 0; i < RUN; i++) {
                        if (pages_read(e, figures) < 0) {
                                c.n_busy++;
                                continue;
                        }
                        c.n_reads++;
                        c.n_wrong += !is_one_state(figures);
                        c.n_changes += figures[0] != last;
                        last = figures[0];
                }
        }
        stop(pid, SIGKILL);
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
        printf("bfc_usage(), nobody else is there    %4u ns   p99 %4u ns   asked the daemon %llu times\n",
               r->idle.median_ns, r->idle.p99_ns, (unsigned long long)r->idle.n_calls);
        printf("  while a process allocates          %4u ns   p99 %4u ns   asked the daemon %llu times\n",
               r->busy.median_ns, r->busy.p99_ns, (unsigned long long)r->busy.n_calls);
        printf("against an allocating process: %llu reads, %llu changes seen, %llu wrong\n",
               (unsigned long long)r->usage.n_reads, (unsigned long long)r->usage.n_changes,
               (unsigned long long)r->usage.n_wrong);
        printf("against a writer that never rests: %llu reads, %llu changes seen, %llu given up, %llu wrong\n",
               (unsigned long long)r->page.n_reads, (unsigned long long)r->page.n_changes,
               (unsigned long long)r->page.n_busy, (unsigned long long)r->page.n_wrong);
}

static json_t *cost_json(const struct cost *c)
{
        return json_pack("{s:I, s:I, s:I}", "median_ns", (json_int_t)c->median_ns, "p99_ns",
                         (json_int_t)c->p99_ns, "num_calls", (json_int_t)c->n_calls);
}

static json_t *check_json(const struct check *c)
{
        return json_pack("{s:I, s:I, s:I, s:I}", "num_reads", (json_int_t)c->n_reads, "num_changes",
                         (json_int_t)c->n_changes, "num_busy", (json_int_t)c->n_busy, "num_wrong",
                         (json_int_t)c->n_wrong);
}

static void print_json(const struct results *r)
{
        json_t *root = json_pack("{s:i, s:o, s:o, s:o, s:o}", "schema", 1, "idle", cost_json(&r->idle),
                                 "busy", cost_json(&r->busy), "usage_check", check_json(&r->usage),
                                 "page_check", check_json(&r->page));

        json_dumpf(root, stdout, JSON_INDENT(2));
        putchar('\n');
        json_decref(root);
}

static _Noreturn void usage(FILE *f, int status)
{
        fprintf(f, "Usage: bench-usage --bfcd PROGRAM [--json] [--samples N] [--seconds F] [--max-ns F]\n"
                   "\n"
                   "Times bfc_usage() in samples of 1000 and reads against writers in other processes\n"
                   "for so many seconds each. Ends with 1 if a figure was wrong, if no write was seen, if\n"
                   "the daemon was asked while nobody wrote, or if a read takes longer than --max-ns.\n");
        exit(status);
}

static void parse(int argc, char **argv)
{
        static const struct option longs[] = {
                { "bfcd", required_argument, NULL, 'd' },
                { "json", no_argument, NULL, 'j' },
                { "samples", required_argument, NULL, 's' },
                { "seconds", required_argument, NULL, 't' },
                { "max-ns", required_argument, NULL, 'm' },
                { "help", no_argument, NULL, 'h' },
                { 0 },
        };
        int c;

        while ((c = getopt_long(argc, argv, "h", longs, NULL)) != -1) {
                switch (c) {
                case 'd':
                        o.bfcd = optarg;
                        break;
                case 'j':
                        o.json = true;
                        break;
                case 's':
                        o.n_samples = atol(optarg);
                        break;
                case 't':
                        o.seconds = atof(optarg);
                        break;
                case 'm':
                        o.max_ns = atof(optarg);
                        break;
                case 'h':
                        usage(stdout, EXIT_SUCCESS);
                default:
                        usage(stderr, 2);
                }
        }
        if (!o.bfcd || optind < argc || o.n_samples < 1 || !(o.seconds > 0))
                usage(stderr, 2);
}

static bool is_good(const struct results *r)
{
        return r->usage.n_wrong == 0 && r->page.n_wrong == 0 && r->usage.n_changes > 1 &&
               r->page.n_changes > 1 && r->idle.n_calls == 0 &&
               (o.max_ns <= 0 || (r->idle.median_ns <= o.max_ns && r->busy.median_ns <= o.max_ns));
}

int main(int argc, char **argv)
{
        struct results r;
        char path[128];
        pid_t daemon_pid, writer;
        bfc_client *client;

        parse(argc, argv);
        make_folder("bench-usage");
        snprintf(path, sizeof(path), "%s/bfcd.sock", folder);
        daemon_pid = daemon_start(o.bfcd, 64, -1);
        client = client_start(path, "bench-usage", BFC_NO_CACHE);
        r.idle = measure(client);
        r.page = check_page();
        writer = start(run_allocator, path);
        r.usage = check_usage(client);
        r.busy = measure(client);
        stop(writer, SIGKILL);
        bfc_disconnect(client);
        stop(daemon_pid, SIGTERM);
        if (o.json)
                print_json(&r);
        else
                print_text(&r);
        return is_good(&r) ? EXIT_SUCCESS : EXIT_FAILURE;
}
