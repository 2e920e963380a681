/* The report of a plan: see plan.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "ctl/plan.h"

#include <inttypes.h>

#include "ctl/job.h"
#include "ctl/show.h"
#include "ctl/table.h"
#include "ctl/text.h"

static void add_difference(struct table_lines *l, const char *title, int64_t n_bytes, const char *why)
{
        char size[TEXT_MAX];

        text_size((uint64_t)(n_bytes < 0 ? -n_bytes : n_bytes), size);
        table_add_line(l, title, "%c %s: %s", n_bytes < 0 ? '-' : '+', size, why);
}

static const char *share_name(const struct plan_place *place)
{
        return place->is_ipc ? "cuda-ipc" : "fd";
}

static bool fits(const struct plan_place *place, const struct plan *p)
{
        return p->limit_bytes <= place->limit_bytes;
}

static void add_lines(struct table_lines *l, const struct plan_report *report)
{
        const struct plan_options *o = report->options;
        const struct plan *p = report->plan;
        char a[TEXT_MAX], b[TEXT_MAX];

        table_add_line(l, "Trace", "%s: %zu buffers, sizes times %g", report->trace_name, o->trace->n_buffers,
                       report->scale);
        table_add_line(l, "Place", "%s, share %s, %s%s", o->place.is_cuda ? "GPU" : "host",
                       share_name(&o->place), o->place.is_preallocated ? "preallocate" : "on-demand",
                       o->has_cache ? "" : ", without the client's cache");
        table_add_line(l, "Limit", "%s (%" PRIu64 "MiB); %.3f times the peak", text_size(p->limit_bytes, a),
                       p->limit_bytes >> 20, (double)p->limit_bytes / (double)p->peak_live_bytes);
        table_add_line(l, "Peak", "%s requested", text_size(p->peak_live_bytes, a));
        add_difference(l, "Rounding", p->rounding_bytes, "blocks are multiples of 256 bytes");
        add_difference(l, "Placement", p->placement_bytes, "gaps between blocks, in one region of memory");
        add_difference(l, "Extents", p->extent_bytes, "memory is charged in whole extents");
        if (o->has_cache)
                add_difference(l, "Cache", p->cache_bytes, "the client's cache");
        table_add_line(l, "Extent", "%s at most; %s charged at the peak",
                       text_size(p->largest_extent_bytes, a), text_size(p->peak_charged_bytes, b));
        if (o->place.limit_bytes > 0)
                table_add_line(l, "Quota", "tenant '%s' has %s in '%s': %s", o->place.tenant,
                               text_size(o->place.limit_bytes, a), o->place.partition,
                               fits(&o->place, p) ? "the trace fits" : "too little");
        table_add_line(l, "Time", "%.3f s for %" PRIu64 " replays", p->seconds, p->n_runs);
}

int plan_print(FILE *out, const struct plan_report *report)
{
        struct table_lines l = { .n = 0 };

        add_lines(&l, report);
        return table_print_lines(out, &l);
}

static json_t *quota_json(const struct plan_place *place, const struct plan *p)
{
        if (place->limit_bytes == 0)
                return json_null();
        return json_pack("{s:s, s:s, s:I, s:b}", "partition", place->partition, "tenant", place->tenant,
                         "limit_bytes", (json_int_t)place->limit_bytes, "fits", fits(place, p));
}

json_t *plan_json(const struct plan_report *report)
{
        const struct plan_options *o = report->options;
        const struct plan *p = report->plan;

        /* clang-format off */
        return json_pack("{s:i, s:o, s:f, s:s, s:s, s:b, s:b, s:I, s:I, s:{s:I, s:I, s:I, s:I}, s:I, s:I, s:I, s:I, s:f, s:o, s:s?}",
                         "schema", SHOW_SCHEMA,
                         "trace", table_json_string(report->trace_name),
                         "scale", report->scale,
                         "device", o->place.is_cuda ? "cuda" : "host",
                         "share", share_name(&o->place),
                         "preallocate", o->place.is_preallocated,
                         "cache", o->has_cache,
                         "limit_bytes", (json_int_t)p->limit_bytes,
                         "peak_live_bytes", (json_int_t)p->peak_live_bytes,
                         "reasons",
                         "rounding_bytes", (json_int_t)p->rounding_bytes,
                         "placement_bytes", (json_int_t)p->placement_bytes,
                         "extent_bytes", (json_int_t)p->extent_bytes,
                         "cache_bytes", (json_int_t)p->cache_bytes,
                         "peak_charged_bytes", (json_int_t)p->peak_charged_bytes,
                         "peak_client_bytes", (json_int_t)p->peak_client_bytes,
                         "largest_extent_bytes", (json_int_t)p->largest_extent_bytes,
                         "replays", (json_int_t)p->n_runs,
                         "seconds", p->seconds,
                         "quota", quota_json(&o->place, p),
                         "left_out", o->trace->left_out);
        /* clang-format on */
}
