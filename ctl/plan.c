/* The search for a plan; see plan.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A run is a whole replay, and each tells only whether a limit serves. What separates the limit from the peak
 * is found by three searches: in one region of memory without extents, with the daemon but without the client's
 * cache, and with both. */
#include "ctl/plan.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "bfc/bfc.h"
#include "ctl/job.h"
#include "ctl/plan_bfcd.h"
#include "ctl/progress.h"

#define REGION_STEPS  16384u /* the region is searched in steps of peak / REGION_STEPS */
#define MAX_DOUBLINGS 8u     /* of the peak: a refusal with that limit has another cause */

struct search {
        const struct plan_options *options;
        struct progress progress;
        bool has_cache;
        uint64_t n_runs;
        struct job_result result; /* of the last run */
        struct job_result served; /* of the last run that was served */
        uint64_t served_bytes;    /* its limit */
        char *error;
};

static uint64_t round_up(uint64_t n, uint64_t unit)
{
        return (n + unit - 1) / unit * unit;
}

/* ---- one run ------------------------------------------------------------------- */

/* A job that ended for no refusal: as where the daemon could not start. */
static int run_failed(struct search *s, char *words)
{
        if (*s->options->stop) {
                free(words);
                return -EINTR;
        }
        s->error = words ? words : strdup(s->result.error);
        return -EIO;
}

/* 1: served; 0: refused. */
static int run_daemon(struct search *s, uint64_t limit_bytes)
{
        const struct plan_options *o = s->options;
        struct job_totals totals = { 0 };
        struct plan_bfcd d;
        struct job_plan plan = { .trace = o->trace,
                                 .socket = d.socket,
                                 .n_repeats = 1,
                                 .ends_at_refusal = true,
                                 .stop = o->stop };
        char *words = NULL;
        int r = setenv("BFC_CACHE", s->has_cache ? "on" : "off", 1) < 0 ? -errno : 0;

        s->n_runs++;
        s->result = (struct job_result){ 0 };
        if (r == 0)
                r = plan_bfcd_start(&o->place, limit_bytes, &d);
        if (r < 0)
                return r;
        job_run(&plan, &totals, &s->result);
        plan_bfcd_end(&d, s->result.error[0] ? &words : NULL);
        if (s->result.error[0] || *o->stop)
                return run_failed(s, words);
        progress_step(&s->progress, o->trace->n_events);
        if (s->result.n_refused > 0)
                return 0;
        s->served = s->result;
        s->served_bytes = limit_bytes;
        return 1;
}

static int live_in_region(struct search *s, struct bfc *b, bfc_handle *handles)
{
        const struct trace *t = s->options->trace;
        uint64_t offset;

        for (size_t i = 0; i < t->n_events; i++) {
                const struct trace_event *e = &t->events[i];
                int r = e->is_free
                                ? bfc_dealloc(b, handles[e->buffer])
                                : bfc_alloc(b, t->buffers[e->buffer].n_bytes, &handles[e->buffer], &offset);

                if (r != 0)
                        return r < 0 ? r : 0;
                progress_step(&s->progress, 1);
        }
        return 1;
}

/* A run in one region of memory, without extents. As run_daemon(). */
static int run_region(struct search *s, uint64_t n_bytes)
{
        bfc_handle *handles = calloc(s->options->trace->n_buffers, sizeof(*handles));
        struct bfc *b = NULL;
        int r = handles ? bfc_new(n_bytes, &b) : -ENOMEM;

        s->n_runs++;
        if (r == 0)
                r = bfc_add_region(b, 0, n_bytes, n_bytes, true);
        if (r == 0)
                r = live_in_region(s, b, handles);
        bfc_destroy(b);
        free(handles);
        return r;
}

/* ---- the search ------------------------------------------------------------------ */

typedef int (*run_fn)(struct search *s, uint64_t n_bytes);

/* Nothing below `least`, a multiple of step, serves. From there up in growing steps, then by bisection: what
 * tests/bench/plan.py does with daemons. */
static int search(struct search *s, run_fn run, uint64_t step, uint64_t least, uint64_t *ret)
{
        uint64_t low = least - step, high = least, most = least;
        uint64_t stride = low / 64 / step * step;
        int r = run(s, high);

        if (stride == 0)
                stride = step;
        for (unsigned i = 0; i < MAX_DOUBLINGS && most < BFC_MAX_SPACE / 2; i++)
                most *= 2;
        for (; r == 0; stride *= 2) {
                low = high;
                high += stride;
                r = high > most ? -ERANGE : run(s, high);
        }
        while (r >= 0 && high - low > step) {
                uint64_t middle = low + (high - low) / 2 / step * step;

                r = run(s, middle);
                if (r > 0)
                        high = middle;
                else
                        low = middle;
        }
        *ret = high;
        return r < 0 ? r : 0;
}

/* The smallest region of memory. Without gaps it is exactly the peak, which need not be a multiple of step. */
static int find_region(struct search *s, uint64_t peak_blocks, uint64_t *ret)
{
        uint64_t step = round_up(peak_blocks / REGION_STEPS + 1, BFC_GRANULE);
        int r = run_region(s, peak_blocks);

        if (r > 0)
                *ret = peak_blocks;
        if (r != 0)
                return r < 0 ? r : 0;
        return search(s, run_region, step, round_up(peak_blocks + 1, step), ret);
}

static int find_all(struct search *s, struct plan *ret)
{
        uint64_t peak_blocks = trace_peak(s->options->trace, BFC_GRANULE), region = 0, without = 0, limit = 0;
        uint64_t least = round_up(peak_blocks, PLAN_STEP_BYTES);
        int r;

        ret->peak_live_bytes = trace_peak(s->options->trace, 1);
        if (peak_blocks > BFC_MAX_SPACE / 2) {
                s->error = strdup("the peak is above 512 GiB; an arena has at most 1 TiB of addresses");
                return -ERANGE;
        }
        r = find_region(s, peak_blocks, &region);
        if (r == 0)
                r = search(s, run_daemon, PLAN_STEP_BYTES, least, &without);
        limit = without;
        s->has_cache = s->options->has_cache;
        if (r == 0 && s->has_cache)
                r = search(s, run_daemon, PLAN_STEP_BYTES, least, &limit);
        if (r < 0)
                return r;
        ret->limit_bytes = limit;
        ret->rounding_bytes = (int64_t)(peak_blocks - ret->peak_live_bytes);
        ret->placement_bytes = (int64_t)(region - peak_blocks);
        ret->extent_bytes = (int64_t)without - (int64_t)region;
        ret->cache_bytes = (int64_t)limit - (int64_t)without;
        return 0;
}

static double now_seconds(void)
{
        struct timespec t;

        clock_gettime(CLOCK_MONOTONIC, &t);
        return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* What there is to say of an error. */
static void explain(struct search *s, int error, char **ret_error)
{
        *ret_error = s->error;
        if (s->error)
                return;
        if (error == -ERANGE && s->result.refusal[0])
                *ret_error = strdup(s->result.refusal);
        else
                *ret_error = strdup(strerror(-error));
}

/* A daemon that is gone does not come back. */
static int set_variables(void)
{
        char name[128];

        for (char **v = environ; *v;) {
                size_t n = strcspn(*v, "=");

                if (strncmp(*v, "BFC_", 4) != 0 || n >= sizeof(name)) {
                        v++;
                        continue;
                }
                memcpy(name, *v, n);
                name[n] = '\0';
                unsetenv(name); /* the next one takes its place */
        }
        return setenv("BFC_RETURN_MS", "1", 1) < 0 ? -errno : 0;
}

int plan_find(const struct plan_options *options, struct plan *ret, char **ret_error)
{
        double begin = now_seconds();
        struct plan plan = { 0 };
        struct search s = { .options = options };
        int r;

        progress_begin(&s.progress, NULL, "plan", 0);
        r = set_variables();
        if (r == 0)
                r = find_all(&s, &plan);
        if (r == 0 && s.served_bytes != plan.limit_bytes)
                r = run_daemon(&s, plan.limit_bytes);
        progress_end(&s.progress);
        if (r < 0) {
                explain(&s, r, ret_error);
                return r;
        }
        plan.peak_charged_bytes = s.served.peak_charged_bytes;
        plan.peak_client_bytes = s.served.peak_reserved_bytes;
        plan.largest_extent_bytes = s.served.largest_extent_bytes;
        plan.n_runs = s.n_runs;
        plan.seconds = now_seconds() - begin;
        *ret = plan;
        return 0;
}
