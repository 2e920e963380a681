/* bfcctl explain: see explain.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A row without a tenant is the partition in all: it opens a section. */
#include "ctl/explain.h"

#include <errno.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "ctl/show.h"
#include "ctl/table.h"
#include "ctl/text.h"

#define N_ELEMENTS(a) (sizeof(a) / sizeof((a)[0]))

#define OCCUPANCY_MAX 100u /* characters of the picture */

static const Bfcd__Figures *figures_of(const Bfcd__ExplainRow *row)
{
        static const Bfcd__Figures none = BFCD__FIGURES__INIT;

        return row->figures ? row->figures : &none;
}

/* ---- for people --------------------------------------------------------------- */

static int print_title(FILE *out, const Bfcd__ExplainRow *row)
{
        char *tenant = text_escape(row->tenant), *partition = text_escape(row->partition);
        int r = tenant && partition ? 0 : -ENOMEM;

        if (r == 0 && *row->tenant)
                fprintf(out, "Tenant %s in partition %s\n", tenant, partition);
        else if (r == 0)
                fprintf(out, "Partition %s\n", partition);
        free(tenant);
        free(partition);
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

/* A share of a small rest says little, so the bytes come first. */
static void print_fragmentation(FILE *out, const Bfcd__ExplainRow *row)
{
        const Bfcd__Figures *f = figures_of(row);
        char size[TEXT_MAX];

        fprintf(out, "  %-13s %14" PRIu64 "  %10s, %.1f %% of Free\n", "Fragmented", f->bytes_fragmented,
                text_size(f->bytes_fragmented, size), 100 * row->fragmentation);
}

static void print_count(FILE *out, const char *name, uint64_t n)
{
        fprintf(out, "  %-13s %14" PRIu64 "\n", name, n);
}

static void print_refusals(FILE *out, const Bfcd__Figures *f, uint64_t now_ms)
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

static void print_figures(FILE *out, const Bfcd__ExplainRow *row, uint64_t now_ms)
{
        const Bfcd__Figures *f = figures_of(row);

        print_bytes(out, "Limit", f->bytes_limit, 0, 0);
        print_bytes(out, "InUse", f->bytes_in_use, 0, 0);
        print_bytes(out, "MaxInUse", f->peak_bytes_in_use, f->peak_bytes_in_use_time_ms, now_ms);
        print_count(out, "NumAllocs", f->num_allocs);
        print_bytes(out, "MaxAllocSize", f->largest_alloc_size, 0, 0);
        print_bytes(out, "Requested", f->bytes_requested, 0, 0);
        print_bytes(out, "Reserved", f->bytes_reserved, 0, 0);
        print_bytes(out, "MaxReserved", f->peak_bytes_reserved, f->peak_bytes_reserved_time_ms, now_ms);
        print_bytes(out, "Guaranteed", f->bytes_guaranteed, 0, 0);
        print_bytes(out, "Free", f->bytes_free, 0, 0);
        print_bytes(out, "LargestFree", f->largest_free_block_bytes, 0, 0);
        print_fragmentation(out, row);
        print_bytes(out, "Retiring", row->bytes_retiring, 0, 0);
        print_bytes(out, "Unreclaimed", f->bytes_escaped, 0, 0);
        print_count(out, "Waiting", row->num_waiting);
        print_refusals(out, f, now_ms);
}

/* What the characters mean is said below the first picture. */
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

/* A tenant that never had anything there, nor asked for it. */
static bool is_blank(const Bfcd__ExplainRow *row)
{
        const Bfcd__Figures *f = figures_of(row);

        return *row->tenant && f->num_allocs == 0 && f->num_refusals == 0 && f->bytes_in_use == 0 &&
               f->bytes_reserved == 0 && f->bytes_escaped == 0 && row->bytes_retiring == 0 &&
               row->num_waiting == 0 && row->n_holders == 0;
}

static void print_blank(FILE *out, const Bfcd__ExplainRow *row)
{
        char limit[TEXT_MAX], guaranteed[TEXT_MAX];

        fprintf(out, "  No allocations yet. Limit %s, guaranteed %s.\n",
                text_size(figures_of(row)->bytes_limit, limit),
                text_size(figures_of(row)->bytes_guaranteed, guaranteed));
}

static const struct table_column holder_columns[] = {
        { "SESSION", TABLE_RIGHT }, { "PID", TABLE_RIGHT },     { "NAME", TABLE_LEFT },
        { "STATE", TABLE_LEFT },    { "BLOCKS", TABLE_RIGHT },  { "HELD", TABLE_RIGHT },
        { "IDLE", TABLE_RIGHT },    { "LARGEST", TABLE_RIGHT },
};

static int print_holders(FILE *out, const Bfcd__ExplainRow *row)
{
        struct table *t;
        int r;

        if (row->n_holders == 0)
                return 0;
        r = table_new(holder_columns, N_ELEMENTS(holder_columns), &t);
        if (r < 0)
                return r;
        for (size_t i = 0; i < row->n_holders; i++) {
                const Bfcd__Holder *h = row->holders[i];

                table_number(t, h->session_id);
                table_number(t, h->pid);
                table_text(t, h->name);
                table_text(t, h->state);
                table_number(t, h->num_blocks);
                table_size(t, h->bytes_in_use);
                table_size(t, h->client_bytes_idle);
                table_size(t, h->largest_block_bytes);
        }
        r = table_print(t, out);
        table_free(t);
        if (r == 0 && figures_of(row)->num_sessions > row->n_holders)
                fprintf(out, "(%zu of %" PRIu64 " sessions)\n", row->n_holders,
                        figures_of(row)->num_sessions);
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
                print_figures(out, row, now_ms);
                r = print_occupancy(out, row, &legend);
                if (r == 0)
                        r = print_holders(out, row);
                if (r < 0)
                        return r;
        }
        return ferror(out) ? -EIO : 0;
}

/* ---- JSON -------------------------------------------------------------------------- */

static json_t *json_holders(const Bfcd__ExplainRow *row)
{
        json_t *ret = json_array();

        for (size_t i = 0; i < row->n_holders; i++) {
                const Bfcd__Holder *h = row->holders[i];
                json_t *holder = json_object();

                show_set(&holder, "session_id", show_number(h->session_id));
                show_set(&holder, "pid", show_number(h->pid));
                show_set(&holder, "name", show_string(h->name));
                show_set(&holder, "state", show_string(h->state));
                show_set(&holder, "num_blocks", show_number(h->num_blocks));
                show_set(&holder, "bytes_in_use", show_number(h->bytes_in_use));
                show_set(&holder, "client_bytes_idle", show_number(h->client_bytes_idle));
                show_set(&holder, "largest_block_bytes", show_number(h->largest_block_bytes));
                show_push(&ret, holder);
        }
        return ret;
}

json_t *explain_json(const struct list *l)
{
        json_t *rows = json_array();

        for (size_t i = 0; i < l->n_explained; i++) {
                const Bfcd__ExplainRow *e = l->explained[i];
                json_t *row = json_object();

                show_set(&row, "partition", show_string(e->partition));
                show_set(&row, "tenant", *e->tenant ? show_string(e->tenant) : json_null());
                show_set_figures(&row, e->figures);
                show_set(&row, "bytes_retiring", show_number(e->bytes_retiring));
                show_set(&row, "num_waiting", show_number(e->num_waiting));
                show_set(&row, "occupancy", show_string(e->occupancy));
                show_set(&row, "holders", json_holders(e));
                show_push(&rows, row);
        }
        return show_document("explain", rows);
}
