/* bfcctl explain: see explain.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A row without a tenant is the sum over the partition and begins a section. */
#include "ctl/explain.h"

#include <errno.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "ctl/show.h"
#include "ctl/statistics.h"
#include "ctl/table.h"
#include "ctl/text.h"

#define N_ELEMENTS(a) (sizeof(a) / sizeof((a)[0]))

#define OCCUPANCY_MAX 100u /* characters of the picture */

static const Bfcd__Statistics *stats_of(const Bfcd__ExplainRow *row)
{
        static const Bfcd__Statistics none = BFCD__STATISTICS__INIT;

        return row->stats ? row->stats : &none;
}

/* ---- text ---------------------------------------------------------------------- */

static int print_title(FILE *out, const Bfcd__ExplainRow *row)
{
        char *tenant = text_escape(row->tenant), *partition = text_escape(row->partition);
        char *lease = text_escape(row->lease);
        int r = tenant && partition && lease ? 0 : -ENOMEM;

        if (r == 0 && *row->lease)
                fprintf(out, "Lease %s of tenant %s in partition %s\n", lease, tenant, partition);
        else if (r == 0 && *row->tenant)
                fprintf(out, "Tenant %s in partition %s\n", tenant, partition);
        else if (r == 0)
                fprintf(out, "Partition %s\n", partition);
        free(tenant);
        free(partition);
        free(lease);
        return r;
}

/* "  MaxInUse            4096    4.0 KiB, 3m 05s ago" */
static void print_bytes(FILE *out, const char *name, uint64_t n_bytes, uint64_t time_ms, uint64_t now_ms)
{
        char size[TEXT_MAX], ago[TEXT_MAX];

        fprintf(out, "  %-13s %14" PRIu64 "  %10s", name, n_bytes, text_size(n_bytes, size));
        if (time_ms != 0)
                fprintf(out, ", %s ago", text_duration(now_ms > time_ms ? now_ms - time_ms : 0, ago));
        fputc('\n', out);
}

/* A percentage of little memory says little, so the bytes come first. */
static void print_fragmentation(FILE *out, const Bfcd__ExplainRow *row)
{
        const Bfcd__Statistics *f = stats_of(row);
        char size[TEXT_MAX];

        fprintf(out, "  %-13s %14" PRIu64 "  %10s, %.1f %% of Free\n", "Fragmented", f->bytes_fragmented,
                text_size(f->bytes_fragmented, size), 100 * row->fragmentation);
}

static void print_count(FILE *out, const char *name, uint64_t n)
{
        fprintf(out, "  %-13s %14" PRIu64 "\n", name, n);
}

static void print_refusals(FILE *out, const Bfcd__Statistics *f, uint64_t now_ms)
{
        char ago[TEXT_MAX];

        fprintf(out, "  %-13s %14" PRIu64, "Refused", f->num_refusals);
        if (f->num_refusals > 0)
                fprintf(out, "  EDQUOT %" PRIu64 ", ENOMEM %" PRIu64, f->num_over_quota,
                        f->num_out_of_memory);
        if (f->last_refusal_time_ms != 0)
                fprintf(out, ", last %s ago",
                        text_duration(now_ms > f->last_refusal_time_ms ? now_ms - f->last_refusal_time_ms : 0,
                                      ago));
        fputc('\n', out);
}

/* Not of a partition without a peak: a tenant does not see that of all tenants, and the daemon gives it none. */
static void print_peak(FILE *out, const Bfcd__ExplainRow *row, const char *name, uint64_t n_bytes,
                       uint64_t time_ms, uint64_t now_ms)
{
        if (*row->tenant || n_bytes > 0 || time_ms > 0)
                print_bytes(out, name, n_bytes, time_ms, now_ms);
}

static void print_stats(FILE *out, const Bfcd__ExplainRow *row, uint64_t now_ms)
{
        const Bfcd__Statistics *f = stats_of(row);

        print_bytes(out, "Limit", f->bytes_limit, 0, 0);
        print_bytes(out, "InUse", f->bytes_in_use, 0, 0);
        print_peak(out, row, "MaxInUse", f->peak_bytes_in_use, f->peak_bytes_in_use_time_ms, now_ms);
        print_count(out, "NumAllocs", f->num_allocs);
        print_bytes(out, "MaxAllocSize", f->largest_alloc_size, 0, 0);
        print_bytes(out, "Requested", f->bytes_requested, 0, 0);
        print_bytes(out, "Reserved", f->bytes_reserved, 0, 0);
        print_peak(out, row, "MaxReserved", f->peak_bytes_reserved, f->peak_bytes_reserved_time_ms, now_ms);
        print_bytes(out, "Guaranteed", f->bytes_guaranteed, 0, 0);
        print_bytes(out, "Free", f->bytes_free, 0, 0);
        print_bytes(out, "LargestFree", f->largest_free_block_bytes, 0, 0);
        print_fragmentation(out, row);
        print_bytes(out, "Retiring", row->bytes_retiring, 0, 0);
        print_bytes(out, "Unreclaimed", f->bytes_unreclaimed, 0, 0);
        print_bytes(out, "Parked", f->bytes_parked, 0, 0);
        print_bytes(out, "Direct", f->bytes_direct, 0, 0);
        print_bytes(out, "Contexts", f->bytes_contexts, 0, 0);
        print_bytes(out, "Outside", f->bytes_outside, 0, 0);
        print_count(out, "Waiting", row->num_waiting);
        print_refusals(out, f, now_ms);
}

/* The legend is printed below the first picture. */
static int print_occupancy(FILE *out, const Bfcd__ExplainRow *row, bool *legend)
{
        char *picture = text_escape(row->occupancy);

        if (!picture)
                return -ENOMEM;
        if (*picture) {
                size_t n_line = table_look.is_wide ? OCCUPANCY_MAX : OCCUPANCY_MAX / 2;

                for (size_t i = 0; i < strlen(picture); i += n_line)
                        fprintf(out, "  %.*s\n", (int)n_line, picture + i);
                if (*legend)
                        fputs("  # used  . free  + mixed  ~ being released  - no memory\n", out);
                *legend = false;
        }
        free(picture);
        return 0;
}

/* A tenant that never had memory there, nor requested any. */
static bool is_blank(const Bfcd__ExplainRow *row)
{
        const Bfcd__Statistics *f = stats_of(row);

        return *row->tenant && f->num_allocs == 0 && f->num_refusals == 0 && f->bytes_in_use == 0 &&
               f->bytes_reserved == 0 && f->bytes_unreclaimed == 0 && f->bytes_parked == 0 &&
               row->bytes_retiring == 0 && row->num_waiting == 0 && row->n_holders == 0;
}

static void print_blank(FILE *out, const Bfcd__ExplainRow *row)
{
        char limit[TEXT_MAX], guaranteed[TEXT_MAX];

        fprintf(out, "  No allocations yet. Limit %s, guaranteed %s.\n",
                text_size(stats_of(row)->bytes_limit, limit),
                text_size(stats_of(row)->bytes_guaranteed, guaranteed));
}

#define HOLDER(title, key, flags, type, member) TABLE_COLUMN(title, key, flags, type, Bfcd__Holder, member)

static const struct table_column holder_columns[] = {
        HOLDER("SESSION", "session_id", TABLE_RIGHT, TABLE_NUMBER, session_id),
        HOLDER("PID", "pid", TABLE_RIGHT, TABLE_NUMBER, pid),
        HOLDER("NAME", "name", TABLE_LEFT, TABLE_TEXT, name),
        HOLDER("STATE", "state", TABLE_LEFT, TABLE_TEXT, state),
        HOLDER("BLOCKS", "num_blocks", TABLE_RIGHT, TABLE_NUMBER, num_blocks),
        HOLDER("HELD", "bytes_in_use", TABLE_RIGHT, TABLE_SIZE, bytes_in_use),
        HOLDER("IDLE", "client_bytes_idle", TABLE_RIGHT, TABLE_SIZE, client_bytes_idle),
        HOLDER("LARGEST", "largest_block_bytes", TABLE_RIGHT, TABLE_SIZE, largest_block_bytes),
        HOLDER("DIRECT", "bytes_direct", TABLE_RIGHT, TABLE_SIZE, bytes_direct),
        HOLDER("CONTEXTS", "bytes_contexts", TABLE_RIGHT | TABLE_WIDE, TABLE_SIZE, bytes_contexts),
        HOLDER("OUTSIDE", "bytes_outside", TABLE_RIGHT | TABLE_WIDE, TABLE_SIZE, bytes_outside),
        { 0 },
};

static int print_holders(FILE *out, const Bfcd__ExplainRow *row)
{
        int r;

        if (row->n_holders == 0)
                return 0;
        r = table_print(out, holder_columns, (const void *const *)row->holders, row->n_holders, NULL);
        if (r == 0 && stats_of(row)->num_sessions > row->n_holders)
                fprintf(out, "(%zu of %" PRIu64 " sessions)\n", row->n_holders, stats_of(row)->num_sessions);
        return r;
}

int explain_print(FILE *out, const struct list *l, uint64_t now_ms)
{
        bool legend = true;

        for (size_t i = 0; i < l->n_explained; i++) {
                const Bfcd__ExplainRow *row = l->explained[i];
                int r;

                if (i > 0)
                        fputc('\n', out);
                r = print_title(out, row);
                if (r < 0)
                        return r;
                if (is_blank(row)) {
                        print_blank(out, row);
                        continue;
                }
                print_stats(out, row, now_ms);
                r = print_occupancy(out, row, &legend);
                if (r == 0)
                        r = print_holders(out, row);
                if (r < 0)
                        return r;
        }
        return ferror(out) ? -EIO : 0;
}

/* ---- JSON -------------------------------------------------------------------------- */

static json_t *holders_json(const void *row)
{
        const Bfcd__ExplainRow *e = row;

        return table_json_rows(holder_columns, (const void *const *)e->holders, e->n_holders);
}

#define EXPLAIN(key, flags, type, member) TABLE_COLUMN(NULL, key, flags, type, Bfcd__ExplainRow, member)

static const struct table_column explain_columns[] = {
        EXPLAIN("partition", 0, TABLE_TEXT, partition),
        EXPLAIN("tenant", TABLE_NULL, TABLE_TEXT, tenant),
        EXPLAIN("lease", 0, TABLE_TEXT, lease),
        STATISTICS_KEYS(Bfcd__ExplainRow, "peak_bytes_requested"),
        EXPLAIN("bytes_retiring", 0, TABLE_SIZE, bytes_retiring),
        EXPLAIN("num_waiting", 0, TABLE_NUMBER, num_waiting),
        EXPLAIN("occupancy", 0, TABLE_TEXT, occupancy),
        { .key = "holders", .json = holders_json },
        { 0 },
};

json_t *explain_json(const struct list *l)
{
        return show_document("explain", table_json_rows(explain_columns, (const void *const *)l->explained,
                                                        l->n_explained));
}
