/* bench-bfc: what the allocator costs and wastes, on generated workloads and on
 * traces. Everything is measured in one process on one core, through bfc.h only.
 *
 * Speed: each workload is a script made beforehand, and each run replays it on a new
 * instance. The first part is not timed: it builds up the live blocks, or replays a trace
 * once. A trace begins and ends empty, and is replayed until there are operations enough.
 * The mean is the processor time of the timed part over its steps, with the harness. The
 * median of several runs counts, and the best is shown. A second set of runs reads the
 * clock around every step, and subtracts the cost of that. p99 is over all samples;
 * "slowest" is the slowest single sample; "slowest, repeatable" first takes each
 * step's best of the runs, which are identical. It leaves out what else the machine did.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "bfc/bfc.h"
#include "tests/bench/options.h"
#include "tests/bench/samples.h"
#include "tests/bench/script.h"
#include "tests/bfc_arena.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#if defined(__x86_64__)
#include <x86intrin.h>
#endif

#define MIB        (UINT64_C(1) << 20)
#define MAX_TRACES 64

static struct {
        long n_runs, n_timed, n_live_max;
        const char *workload; /* a prefix of its name */
        bool pack, grow, json;
        const char *traces[MAX_TRACES];
        size_t n_traces;
} o = { .n_runs = 7, .n_timed = 1000000, .n_live_max = 1000000, .workload = "" };

static void *need(void *p)
{
        if (!p)
                abort();
        return p;
}

/* ---- clocks ------------------------------------------------------------------- */

/* Wall time, but for the times when something else had the core. */
static uint64_t processor_ns(void)
{
        struct timespec t;

        (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
        return (uint64_t)t.tv_sec * UINT64_C(1000000000) + (uint64_t)t.tv_nsec;
}

static inline uint64_t ticks(void)
{
#if defined(__x86_64__)
        return __rdtsc();
#else
        return now_ns();
#endif
}

/* ---- speed ------------------------------------------------------------------------ */

#define MIN_TIMED 100000u /* steps of a run */

struct speed {
        double mean_ns, best_ns, p99_ns, slowest_ns, slowest_repeatable_ns;
        double metadata_per_live; /* bytes per block that lives at the peak */
};

static struct bfc *new_instance(const struct script *s)
{
        struct bfc *b = NULL;
        uint64_t room = s->peak_live_bytes * 2 + s->n_live * 2 * BFC_GRANULE + MIB;

        room = room > BFC_MAX_SPACE ? BFC_MAX_SPACE : room / BFC_GRANULE * BFC_GRANULE;
        if (bfc_new(2 * MIB, &b) < 0 || bfc_add_region(b, 0, room, 0, true) < 0)
                abort();
        return b;
}

static inline void do_step(struct bfc *b, const struct step *step, bfc_handle *handles)
{
        uint64_t offset;

        if (step->n_bytes != 0) {
                if (bfc_alloc(b, step->n_bytes, &handles[step->slot], &offset) != 0)
                        abort();
        } else {
                if (bfc_dealloc(b, handles[step->slot]) != 0)
                        abort();
        }
}

/* What is timed. Everything that the loop needs is in registers. */
static __attribute__((noinline)) void do_steps(struct bfc *b, const struct step *step, size_t n,
                                               bfc_handle *handles)
{
        for (const struct step *end = step + n; step < end; step++)
                do_step(b, step, handles);
}

static bool is_trace(const struct script *s)
{
        return s->n_fill == 0;
}

static void do_fill(struct bfc *b, const struct script *s, bfc_handle *handles)
{
        size_t n = is_trace(s) ? s->n_steps : s->n_fill;

        do_steps(b, s->steps, n, handles);
}

static double run_mean(const struct script *s, bfc_handle *handles, double *ret_metadata)
{
        struct bfc *b = new_instance(s);
        size_t n_timed = s->n_steps - s->n_fill, n_rounds = is_trace(s) ? 1 + MIN_TIMED / n_timed : 1;
        struct bfc_stats stats;
        uint64_t begin;
        double ns;

        do_fill(b, s, handles);
        begin = processor_ns();
        for (size_t round = 0; round < n_rounds; round++)
                do_steps(b, s->steps + s->n_fill, n_timed, handles);
        ns = (double)(processor_ns() - begin) / (double)(n_timed * n_rounds);
        bfc_read_stats(b, &stats);
        *ret_metadata = (double)stats.metadata_bytes / (double)s->n_live;
        b = bfc_destroy(b);
        return ns;
}

#define N_BUCKETS 65536 /* of one tick; more than that is counted in the last one */

struct tick_samples {
        uint32_t *best;      /* per step, in ticks */
        uint64_t *histogram; /* of all samples, in ticks */
        uint64_t slowest;
        uint64_t n;
        uint64_t clock_cost;
};

static void run_samples(const struct script *s, bfc_handle *handles, struct tick_samples *t)
{
        struct bfc *b = new_instance(s);

        do_fill(b, s, handles);
        for (size_t i = s->n_fill; i < s->n_steps; i++) {
                uint64_t begin = ticks(), took;

                do_step(b, &s->steps[i], handles);
                took = ticks() - begin;
                took = took > t->clock_cost ? took - t->clock_cost : 0;
                if (took < t->best[i - s->n_fill])
                        t->best[i - s->n_fill] = (uint32_t)took;
                if (took > t->slowest)
                        t->slowest = took;
                t->histogram[took < N_BUCKETS ? took : N_BUCKETS - 1]++;
                t->n++;
        }
        b = bfc_destroy(b);
}

/* What reading the clock twice takes, and how long a tick is. */
static uint64_t calibrate(double *ret_ns_per_tick)
{
        uint64_t ns = now_ns(), begin = ticks(), cost = UINT64_MAX;

        for (int i = 0; i < 100000; i++) {
                uint64_t t = ticks(), u = ticks();

                cost = u - t < cost ? u - t : cost;
        }
        while (now_ns() - ns < 20000000)
                ;
        *ret_ns_per_tick = (double)(now_ns() - ns) / (double)(ticks() - begin);
        return cost;
}

static void measure_samples(const struct script *s, bfc_handle *handles, struct speed *ret)
{
        size_t n_timed = s->n_steps - s->n_fill;
        struct tick_samples t = {
                .best = need(malloc(n_timed * sizeof(uint32_t))),
                .histogram = need(calloc(N_BUCKETS, sizeof(uint64_t))),
        };
        uint64_t seen = 0, p99 = 0, slowest_best = 0;
        double ns_per_tick;

        memset(t.best, 0xff, n_timed * sizeof(uint32_t));
        t.clock_cost = calibrate(&ns_per_tick);
        for (long i = 0; i < o.n_runs; i++)
                run_samples(s, handles, &t);
        while (seen < t.n - t.n / 100)
                seen += t.histogram[p99++];
        for (size_t i = 0; i < n_timed; i++)
                slowest_best = t.best[i] > slowest_best ? t.best[i] : slowest_best;
        ret->p99_ns = (double)(p99 - 1) * ns_per_tick;
        ret->slowest_ns = (double)t.slowest * ns_per_tick;
        ret->slowest_repeatable_ns = (double)slowest_best * ns_per_tick;
        free(t.best);
        free(t.histogram);
}

static struct speed measure_speed(const struct script *s)
{
        bfc_handle *handles = need(calloc(s->n_slots, sizeof(*handles)));
        double *means = need(calloc((size_t)o.n_runs, sizeof(*means)));
        struct speed speed;

        for (long i = 0; i < o.n_runs; i++)
                means[i] = run_mean(s, handles, &speed.metadata_per_live);
        speed.mean_ns = quantile(means, (size_t)o.n_runs, 50);
        speed.best_ns = means[0];
        measure_samples(s, handles, &speed);
        free(means);
        free(handles);
        return speed;
}

static void speed_of(const struct script *s, json_t *ret)
{
        struct speed v = measure_speed(s);

        if (!o.json)
                printf("%-36s %9zu %8.1f %8.1f %8.0f %10.0f %10.0f %8.1f\n", s->name, s->n_live, v.mean_ns,
                       v.best_ns, v.p99_ns, v.slowest_ns, v.slowest_repeatable_ns, v.metadata_per_live);
        (void)json_array_append_new(ret, json_pack("{s:s, s:I, s:I, s:f, s:f, s:f, s:f, s:f, s:f}",
                                                   "workload", s->name, "live_blocks", (json_int_t)s->n_live,
                                                   "operations", (json_int_t)(s->n_steps - s->n_fill),
                                                   "ns_per_operation", v.mean_ns, "best_ns_per_operation",
                                                   v.best_ns, "p99_ns", v.p99_ns, "slowest_ns", v.slowest_ns,
                                                   "slowest_repeatable_ns", v.slowest_repeatable_ns,
                                                   "metadata_bytes_per_live_block", v.metadata_per_live));
        (void)fflush(stdout);
}

/* ---- tightness ----------------------------------------------------------------------- */

static bool replays(const struct script *s, uint64_t capacity, bfc_handle *handles)
{
        struct bfc *b = NULL;
        bool ok = true;

        if (bfc_new(2 * MIB, &b) < 0 || bfc_add_region(b, 0, capacity, 0, true) < 0)
                abort();
        for (size_t i = 0; ok && i < s->n_steps; i++) {
                const struct step *step = &s->steps[i];
                uint64_t offset;

                if (step->n_bytes != 0)
                        ok = bfc_alloc(b, step->n_bytes, &handles[step->slot], &offset) == 0;
                else if (bfc_dealloc(b, handles[step->slot]) != 0)
                        abort();
        }
        b = bfc_destroy(b);
        return ok;
}

/* The first capacity, in steps of a thousandth of the peak, at which nothing fails. */
static void pack_of(const struct script *s, json_t *ret)
{
        bfc_handle *handles = need(calloc(s->n_slots, sizeof(*handles)));
        unsigned k = 1000;

        for (; k < 4000; k++) {
                uint64_t capacity = s->peak_live_bytes / 1000 * k + s->peak_live_bytes % 1000 * k / 1000;

                if (replays(s, capacity / BFC_GRANULE * BFC_GRANULE, handles))
                        break;
        }
        if (!o.json)
                printf("%-36s %14" PRIu64 " %8.3f\n", s->name, s->peak_live_bytes, (double)k / 1000);
        (void)json_array_append_new(ret, json_pack("{s:s, s:I, s:f}", "workload", s->name, "peak_live_bytes",
                                                   (json_int_t)s->peak_live_bytes, "capacity_over_peak_live",
                                                   (double)k / 1000));
        free(handles);
}

/* ---- growth ----------------------------------------------------------------------------- */

struct growth {
        bool ok;
        uint64_t peak_backed;
        uint64_t n_backings, n_releases, n_regions, n_allocs;
};

static struct growth replay_growing(const struct script *s, uint64_t extent, uint64_t limit, bool thrifty,
                                    bfc_handle *handles)
{
        struct growth g = { .ok = true };
        struct bfc_stats stats;
        struct arena_sim a;

        if (arena_sim_init(&a, extent, limit, 1.5) < 0)
                abort();
        a.thrifty = thrifty;
        for (size_t i = 0; g.ok && i < s->n_steps; i++) {
                const struct step *step = &s->steps[i];
                uint64_t offset;
                int r = 0;

                if (step->n_bytes != 0)
                        r = arena_sim_alloc(&a, step->n_bytes, &handles[step->slot], &offset);
                else if (bfc_dealloc(a.b, handles[step->slot]) != 0)
                        abort();
                if (r < 0)
                        abort();
                g.ok = r == 0;
        }
        bfc_read_stats(a.b, &stats);
        g.peak_backed = stats.peak_bytes_reserved;
        g.n_backings = a.n_backings;
        g.n_releases = a.n_releases;
        g.n_regions = a.n_regions;
        g.n_allocs = stats.num_allocs;
        arena_sim_done(&a);
        return g;
}

static double per_1000(uint64_t n, const struct growth *g)
{
        return 1000.0 * (double)n / (double)g->n_allocs;
}

/* Four replays: without a limit; without one, but giving back first; at the smallest limit; at
 * 5 % more. All counts of backings and releases are per 1,000 allocations. */
static void grow_with(const struct script *s, uint64_t extent, json_t *ret)
{
        bfc_handle *handles = need(calloc(s->n_slots, sizeof(*handles)));
        double peak = (double)s->peak_live_bytes;
        uint64_t limit = (s->peak_live_bytes + extent - 1) / extent * extent;
        uint64_t step = (s->peak_live_bytes / 1000 + extent - 1) / extent * extent;
        struct growth lavish = replay_growing(s, extent, limit * 4, false, handles);
        struct growth thrifty = replay_growing(s, extent, limit * 4, true, handles), tight, roomy;

        for (;; limit += step) {
                tight = replay_growing(s, extent, limit, false, handles);
                if (tight.ok)
                        break;
        }
        roomy = replay_growing(s, extent, (uint64_t)((double)limit * 1.05), false, handles);
        if (!o.json)
                printf("%-36s %4" PRIu64 " MiB %8.3f %8.3f %9.2f %8.3f %9.2f %9.2f %7" PRIu64 "\n", s->name,
                       extent / MIB, (double)lavish.peak_backed / peak, (double)thrifty.peak_backed / peak,
                       per_1000(thrifty.n_releases, &thrifty), (double)limit / peak,
                       per_1000(tight.n_backings, &tight), per_1000(roomy.n_releases, &roomy),
                       tight.n_regions);
        (void)json_array_append_new(
                ret, json_pack("{s:s, s:I, s:f, s:f, s:f, s:f, s:f, s:f, s:I}", "workload", s->name,
                               "extent_bytes", (json_int_t)extent, "peak_backed_over_peak_live",
                               (double)lavish.peak_backed / peak, "thrifty_peak_backed_over_peak_live",
                               (double)thrifty.peak_backed / peak, "thrifty_releases_per_1000",
                               per_1000(thrifty.n_releases, &thrifty), "smallest_limit_over_peak_live",
                               (double)limit / peak, "backings_per_1000_at_smallest_limit",
                               per_1000(tight.n_backings, &tight), "releases_per_1000_at_5_percent_more",
                               per_1000(roomy.n_releases, &roomy), "further_regions",
                               (json_int_t)tight.n_regions));
        (void)fflush(stdout);
        free(handles);
}

static void grow_of(const struct script *s, json_t *ret)
{
        static const uint64_t extents[] = { 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 64 * MIB };

        for (size_t i = 0; i < sizeof(extents) / sizeof(extents[0]); i++)
                grow_with(s, extents[i], ret);
}

/* ---- the whole ------------------------------------------------------------------------------ */

typedef void (*measurement)(const struct script *s, json_t *ret);

static bool is_wanted(const struct script *s)
{
        return strncmp(s->name, o.workload, strlen(o.workload)) == 0;
}

/* Runs the traces, or the built-in workloads where no trace is given. */
static int for_all(measurement measure, bool steady, json_t *ret)
{
        static void (*const makers[])(struct script *, uint32_t, size_t) = { script_fifo, script_lifo,
                                                                             script_random };
        static const uint32_t lives[] = { 64, 1000, 10000, 100000, 1000000 };
        struct script s;

        for (size_t i = 0; i < o.n_traces; i++) {
                int r = script_read_trace(&s, o.traces[i]);

                if (r < 0)
                        return r;
                measure(&s, ret);
                script_done(&s);
        }
        if (o.n_traces > 0)
                return 0;
        script_transformer(&s, steady ? 200 : 3);
        if (is_wanted(&s))
                measure(&s, ret);
        script_done(&s);
        for (size_t m = 0; m < 3; m++)
                for (size_t i = 0; i < 5; i++) {
                        /* Capacity and growth are searched for; a thousand blocks tell enough. */
                        if (lives[i] > (uint32_t)o.n_live_max || (!steady && lives[i] != 1000))
                                continue;
                        makers[m](&s, lives[i], steady ? (size_t)o.n_timed : 20000);
                        if (is_wanted(&s))
                                measure(&s, ret);
                        script_done(&s);
                }
        return 0;
}

static int measure_part(const char *name, const char *heading, measurement measure, json_t *root)
{
        json_t *list = json_array();

        if (!o.json)
                puts(heading);
        (void)json_object_set_new(root, name, list);
        return for_all(measure, measure == speed_of, list);
}

static bool parse_trace(const char *path)
{
        if (o.n_traces == MAX_TRACES)
                return false;
        o.traces[o.n_traces++] = path;
        return true;
}

static void parse(int argc, char **argv)
{
        const long max = 1000000000;
        const struct bench_option options[] = {
                { "trace", .parse = parse_trace, .unit = "FILE.csv",
                  .help = "a trace (id,lower,upper,size) instead of the built-in workloads; may be repeated" },
                { "workload", .text = &o.workload, .unit = "NAME",
                  .help = "only workloads with this prefix" },
                { "pack", .flag = &o.pack, .help = "the smallest capacity over peak live that replays it" },
                { "grow", .flag = &o.grow,
                  .help = "growth on demand with extents of 2, 4, 8, 16 and 64 MiB: peak backed over peak\n"
                          "live without a limit (thrifty: what is wholly free is released before more is\n"
                          "backed than ever before); the smallest limit over peak live with backings per\n"
                          "1,000 allocations; releases at 5 % more" },
                OPTION_JSON(&o.json),
                { "runs", .count = &o.n_runs, .min = 1, .max = max, .unit = "N",
                  .help = "runs of each workload" },
                { "operations", .count = &o.n_timed, .min = 1, .max = max, .unit = "N",
                  .help = "timed operations of a built-in workload" },
                { "max-live", .count = &o.n_live_max, .min = 0, .max = max, .unit = "N",
                  .help = "leave out workloads with more live blocks" },
                { 0 },
        };

        options_parse(argc, argv, "Measures the allocator's speed, or with --pack and --grow its waste.",
                      options);
}

int main(int argc, char **argv)
{
        json_t *root = json_pack("{s:i}", "schema", 1);
        int r = 0;

        parse(argc, argv);
        if (o.pack)
                r = measure_part("pack", "workload                             peak live bytes capacity",
                                 pack_of, root);
        if (r == 0 && o.grow)
                r = measure_part(
                        "grow",
                        "workload                              extent   backed  thrifty  releases    limit"
                        "  backings  releases regions",
                        grow_of, root);
        if (r == 0 && !o.pack && !o.grow)
                r = measure_part("speed",
                                 "workload                                  live    ns/op     best      p99"
                                 "    slowest repeatable metadata",
                                 speed_of, root);
        if (r == 0 && o.json)
                print_json(json_incref(root));
        json_decref(root);
        return r == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
