/* The report of bfc-replay: see report.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Sentences of the daemon are escaped before they are printed. */
#include "ctl/report.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "ctl/show.h"
#include "ctl/table.h"
#include "ctl/text.h"

/* Sums over the jobs; the sentences are those of the first job that has one. */
struct sum {
        uint64_t n_allocs;
        uint64_t n_frees;
        uint64_t n_refused;
        uint64_t ns;
        uint64_t n_corruptions;
        uint64_t n_blocks_left;
        uint64_t n_calls;
        uint64_t n_last_calls;
        uint64_t reserved; /* each job's own peak */
        uint64_t blocks;   /* the same */
        uint32_t n_broken; /* jobs that failed */
        uint32_t first_broken;
        bool stopped;
        const char *refusal;
        const char *corruption;
        const char *error;
};

static struct sum sum_of(const struct report *report)
{
        struct sum s = { .refusal = "", .corruption = "", .error = "" };

        for (uint32_t i = 0; i < report->n_jobs; i++) {
                const struct job_result *r = &report->results[i];

                s.n_allocs += r->n_allocs;
                s.n_frees += r->n_frees;
                s.n_refused += r->n_refused;
                s.ns += r->ns;
                s.n_corruptions += r->n_corruptions;
                s.n_blocks_left += r->n_blocks_left;
                s.n_calls += r->n_calls;
                s.n_last_calls += r->n_last_calls;
                s.reserved += r->peak_reserved_bytes;
                s.blocks += r->peak_block_bytes;
                s.stopped = s.stopped || r->stopped;
                if (!*s.refusal)
                        s.refusal = r->refusal;
                if (!*s.corruption)
                        s.corruption = r->corruption;
                if (*r->error && s.n_broken++ == 0) {
                        s.error = r->error;
                        s.first_broken = i;
                }
        }
        return s;
}

static uint64_t operations(uint64_t n_allocs, uint64_t n_frees, uint64_t n_refused)
{
        return n_allocs + n_frees + n_refused; /* a refusal counts as an operation */
}

static double per_operation(uint64_t ns, uint64_t n)
{
        return n ? (double)ns / (double)n : 0;
}

/* The overhead of the cache: each job's own peaks. */
static double held_over_live(const struct sum *s)
{
        return s->blocks ? (double)s->reserved / (double)s->blocks : 0;
}

int report_status(const struct report *report)
{
        struct sum s = sum_of(report);

        if (s.n_corruptions || s.n_blocks_left)
                return REPORT_CORRUPTED;
        return s.n_refused || s.n_broken || s.stopped ? REPORT_REFUSED : REPORT_FINE;
}

/* ---- text ----------------------------------------------------------------- */

static void add_lines(struct table_lines *l, const struct report *report, const struct sum *s, uint64_t n)
{
        char a[TEXT_MAX], b[TEXT_MAX];

        table_add_line(l, "Trace", "%s: %zu buffers, sizes times %g", report->trace_name,
                       report->trace->n_buffers, report->scale);
        table_add_line(l, "Jobs", "%" PRIu32 ", each %" PRIu32 " time%s", report->n_jobs, report->n_repeats,
                       report->n_repeats == 1 ? "" : "s");
        table_add_line(l, "Operations",
                       "%" PRIu64 ": %" PRIu64 " allocations, %" PRIu64 " frees, %" PRIu64 " refused", n,
                       s->n_allocs, s->n_frees, s->n_refused);
        table_add_line(l, "Time", "%.0f ns per operation; %.3f s in total", per_operation(s->ns, n),
                       report->seconds);
        table_add_line(l, "Peak", "%s requested; the trace's own: %s",
                       text_size(report->totals->peak_live_bytes, a),
                       text_size(trace_peak(report->trace, 1), b));
        table_add_line(l, "Peak in blocks", "%s; the trace's own: %s",
                       text_size(report->totals->peak_block_bytes, a),
                       text_size(trace_peak(report->trace, JOB_GRANULE), b));
        table_add_line(l, "Peak reserved", "%s; %.3f times the blocks", text_size(s->reserved, a),
                       held_over_live(s));
        table_add_line(l, "Calls", "%" PRIu64 " to the daemon; %" PRIu64 " in the last repetition",
                       s->n_calls, s->n_last_calls);
        table_add_line(l, "Refused", "%" PRIu64, s->n_refused);
        if (report->verify)
                table_add_line(l, "Corruptions", "%" PRIu64, s->n_corruptions);
        else
                table_add_line(l, "Corruptions", "not checked; use --verify");
        table_add_line(l, "Blocks left", "%" PRIu64, s->n_blocks_left);
}

int report_text(FILE *out, const struct report *report)
{
        struct sum s = sum_of(report);
        uint64_t n = operations(s.n_allocs, s.n_frees, s.n_refused);
        struct table_lines l = { .n = 0 };

        if (n == 0 && s.n_broken == report->n_jobs)
                return 0; /* no job was connected: only the troubles are reported */
        add_lines(&l, report, &s, n);
        return table_print_lines(out, &l);
}

static void trouble(FILE *out, const char *what, const char *sentence)
{
        char *clean = text_escape(sentence);

        fprintf(out, "bfc-replay: %s%s\n", what, clean ? clean : "");
        free(clean);
}

void report_troubles(FILE *out, const struct report *report)
{
        struct sum s = sum_of(report);
        char what[160];

        if (s.n_refused) {
                snprintf(what, sizeof(what),
                         "%" PRIu64 " of %" PRIu64 " allocations were refused; first: ", s.n_refused,
                         s.n_refused + s.n_allocs);
                trouble(out, what, s.refusal);
        }
        if (s.n_broken && report->n_jobs == 1) {
                trouble(out, "the job failed: ", s.error);
        } else if (s.n_broken) {
                snprintf(what, sizeof(what),
                         "%" PRIu32 " of %" PRIu32 " jobs failed; first, job %" PRIu32 ": ", s.n_broken,
                         report->n_jobs, s.first_broken);
                trouble(out, what, s.error);
        }
        if (s.n_corruptions) {
                snprintf(what, sizeof(what), "%" PRIu64 " blocks were corrupted; first: ", s.n_corruptions);
                trouble(out, what, s.corruption);
        }
        if (s.n_blocks_left) {
                snprintf(what, sizeof(what), "%" PRIu64 " blocks were left after everything was freed",
                         s.n_blocks_left);
                trouble(out, what, "");
        }
        if (s.stopped)
                trouble(out, "stopped by a signal before the end", "");
}

/* ---- for programs -------------------------------------------------------- */

/* A sentence, or null where there is none. */
static json_t *sentence(const char *s)
{
        return *s ? table_json_string(s) : json_null();
}

static json_int_t integer(uint64_t n)
{
        return n > INT64_MAX ? INT64_MAX : (json_int_t)n;
}

static json_t *job_json(const struct report *report, uint32_t job)
{
        const struct job_result *r = &report->results[job];
        uint64_t n = operations(r->n_allocs, r->n_frees, r->n_refused);

        /* clang-format off */
        json_t *ret = json_pack("{s:I, s:I, s:I, s:I, s:f, s:I, s:I, s:I, s:I, s:I, s:I, s:o, s:I, s:o, s:I, s:b, s:o}",
                         "job", (json_int_t)job,
                         "operations", integer(n),
                         "allocations", integer(r->n_allocs),
                         "frees", integer(r->n_frees),
                         "ns_per_operation", per_operation(r->ns, n),
                         "peak_live_bytes", integer(r->peak_live_bytes),
                         "peak_block_bytes", integer(r->peak_block_bytes),
                         "peak_reserved_bytes", integer(r->peak_reserved_bytes),
                         "calls", integer(r->n_calls),
                         "calls_last_repeat", integer(r->n_last_calls),
                         "failures", integer(r->n_refused),
                         "failure_message", sentence(r->refusal),
                         "corruptions", integer(r->n_corruptions),
                         "corruption_message", sentence(r->corruption),
                         "blocks_left", integer(r->n_blocks_left),
                         "stopped", r->stopped,
                         "error", sentence(r->error));
        /* clang-format on */

        if (report->ends_at_refusal) {
                table_json_set(&ret, "peak_charged_bytes", table_json_number(r->peak_charged_bytes));
                table_json_set(&ret, "largest_extent_bytes", table_json_number(r->largest_extent_bytes));
        }
        return ret;
}

static json_t *jobs_json(const struct report *report)
{
        json_t *ret = json_array();

        for (uint32_t i = 0; ret && i < report->n_jobs; i++) {
                if (json_array_append_new(ret, job_json(report, i)) < 0) {
                        json_decref(ret);
                        ret = NULL;
                }
        }
        return ret;
}

json_t *report_json(const struct report *report)
{
        struct sum s = sum_of(report);
        uint64_t n = operations(s.n_allocs, s.n_frees, s.n_refused);

        /* clang-format off */
        return json_pack("{s:i, s:o, s:I, s:I, s:f, s:b, s:I, s:I, s:I, s:f, s:f, s:I, s:I, s:I, s:I, "
                         "s:I, s:I, s:f, s:I, s:o, s:I, s:o, s:I, s:b, s:o, s:o}",
                         "schema", SHOW_SCHEMA,
                         "trace", table_json_string(report->trace_name),
                         "jobs", (json_int_t)report->n_jobs,
                         "repeat", (json_int_t)report->n_repeats,
                         "scale", report->scale,
                         "verify", report->verify,
                         "operations", integer(n),
                         "allocations", integer(s.n_allocs),
                         "frees", integer(s.n_frees),
                         "ns_per_operation", per_operation(s.ns, n),
                         "seconds", report->seconds,
                         "peak_live_bytes", integer(report->totals->peak_live_bytes),
                         "peak_block_bytes", integer(report->totals->peak_block_bytes),
                         "trace_peak_live_bytes", integer(trace_peak(report->trace, 1)),
                         "trace_peak_block_bytes", integer(trace_peak(report->trace, JOB_GRANULE)),
                         "calls", integer(s.n_calls),
                         "calls_last_repeat", integer(s.n_last_calls),
                         "held_over_live", held_over_live(&s),
                         "failures", integer(s.n_refused),
                         "failure_message", sentence(s.refusal),
                         "corruptions", integer(s.n_corruptions),
                         "corruption_message", sentence(s.corruption),
                         "blocks_left", integer(s.n_blocks_left),
                         "stopped", s.stopped,
                         "error", sentence(s.error),
                         "per_job", jobs_json(report));
        /* clang-format on */
}
