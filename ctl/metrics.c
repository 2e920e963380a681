/* bfcctl metrics; see metrics.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The families are columns of lists (ctl/statistics.c). Each is written as a whole, so no two are interleaved. Names have
 * base units. Labels are the device, the partition, the tenant and an operator's lease: sessions, processes, and leases
 * that processes cause would make new time series without end. */
#include "ctl/metrics.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "ctl/statistics.h"

#define N_ELEMENTS(a) (sizeof(a) / sizeof((a)[0]))

const Bfcd__List__Kind metrics_lists[METRICS_LISTS] = { BFCD__LIST__KIND__STATUS,
                                                        BFCD__LIST__KIND__PARTITIONS,
                                                        BFCD__LIST__KIND__TENANTS, BFCD__LIST__KIND__GRANTS,
                                                        BFCD__LIST__KIND__LEASES };

static const struct {
        const char *way, *name, *help;
} grants[] = {
        { "backed", "grant_backed_seconds",
          "Time from request to grant, of requests that fit in free memory." },
        { "grown", "grant_grown_seconds",
          "Time from request to grant, of requests for which memory was made." },
        { "reclaimed", "grant_reclaimed_seconds",
          "Time from request to grant, of requests for which memory was reclaimed." },
        { "waited", "grant_waited_seconds",
          "Time from request to grant, of requests that waited for others to free memory." },
};

/* ---- labels -------------------------------------------------------------------- */

/* Other characters than printable ASCII become '?': a name from the daemon cannot break a line. */
static void put_value(FILE *out, const char *text)
{
        for (; text && *text; text++) {
                if (*text == '"' || *text == '\\')
                        fputc('\\', out);
                fputc(*text >= ' ' && *text <= '~' ? *text : '?', out);
        }
}

struct labels {
        const char *device, *partition, *tenant, *lease; /* NULL: without it */
};

/* With `le` where bound is not NULL. */
static void put_labels(FILE *out, const struct labels *labels, const char *bound)
{
        const char *const names[] = { "device", "partition", "tenant", "lease", "le" };
        const char *const values[] = { labels->device, labels->partition, labels->tenant, labels->lease,
                                       bound };
        const char *before = "{";

        for (size_t i = 0; i < N_ELEMENTS(names); i++) {
                if (!values[i])
                        continue;
                fprintf(out, "%s%s=\"", before, names[i]);
                put_value(out, values[i]);
                fputc('"', out);
                before = ",";
        }
        fputs(*before == ',' ? "} " : " ", out);
}

/* The device of a partition that is listed. */
static const char *device_of(const struct list *l, const char *partition)
{
        for (size_t i = 0; i < l->n_partitions; i++)
                if (strcmp(l->partitions[i]->name, partition) == 0)
                        return l->partitions[i]->device;
        return "";
}

static struct labels tenant_labels(const struct list *l, const char *tenant, const char *partition,
                                   const char *lease)
{
        return (struct labels){ device_of(l, partition), partition, tenant, lease };
}

/* ---- samples -------------------------------------------------------------------- */

struct writer {
        FILE *out;
        const struct list *list;
        bool openmetrics;
        Bfcd__LeaseRow **leases; /* with samples of their own */
        Bfcd__LeaseRow **sums;   /* summed by tenant, partition and maker */
        size_t n_leases, n_sums;
};

/* In OpenMetrics a counter's family has no suffix; in the older format it is named as its sample. */
static void put_head(const struct writer *w, const char *name, bool is_counter, const char *type,
                     const char *help)
{
        const char *suffix = is_counter && !w->openmetrics ? "_total" : "";

        fprintf(w->out, "# HELP bfcd_%s%s %s\n# TYPE bfcd_%s%s %s\n", name, suffix, help, name, suffix, type);
}

static void put_number(FILE *out, uint64_t n, enum table_type type)
{
        if (type == TABLE_DURATION || type == TABLE_AGO)
                fprintf(out, "%" PRIu64 ".%03" PRIu64 "\n", n / 1000, n % 1000);
        else if (type == TABLE_NANOSECONDS)
                fprintf(out, "%" PRIu64 ".%09" PRIu64 "\n", n / 1000000000, n % 1000000000);
        else
                fprintf(out, "%" PRIu64 "\n", n);
}

/* A column that has a metric. */
struct family {
        char name[64]; /* as table_metric, with the kind of its rows */
        const struct table_column *column;
};

static void put_value_of(const struct writer *w, const struct family *f, uint64_t value, struct labels labels)
{
        fprintf(w->out, "bfcd_%s%s", f->name, f->column->metric.is_counter ? "_total" : "");
        put_labels(w->out, &labels, NULL);
        put_number(w->out, value, f->column->type);
}

/* ---- leases ----------------------------------------------------------------------- */

/* Processes cause the others at will: only their sums are shown. */
static bool is_shown_alone(const Bfcd__LeaseRow *row)
{
        return strcmp(row->made_by, "operator") == 0 || strcmp(row->made_by, "scheduler") == 0;
}

static int compare_makers(const void *left, const void *right)
{
        const Bfcd__LeaseRow *const *a = left, *const *b = right;
        int by_tenant = strcmp((*a)->tenant, (*b)->tenant);
        int by_partition = strcmp((*a)->partition, (*b)->partition);

        return by_tenant != 0      ? by_tenant
               : by_partition != 0 ? by_partition
                                   : strcmp((*a)->made_by, (*b)->made_by);
}

/* No lease has a name with parentheses. */
static void put_sums(const struct writer *w, const struct family *f)
{
        for (size_t i = 0, k; i < w->n_sums; i = k) {
                const Bfcd__LeaseRow *first = w->sums[i];
                uint64_t sum = 0;
                char name[32];

                for (k = i; k < w->n_sums && compare_makers(&w->sums[i], &w->sums[k]) == 0; k++)
                        sum += table_number(f->column, w->sums[k]);
                snprintf(name, sizeof(name), "(%s)", first->made_by);
                put_value_of(w, f, sum, tenant_labels(w->list, first->tenant, first->partition, name));
        }
}

static int split_leases(struct writer *w, bool each_lease)
{
        const struct list *l = w->list;

        w->leases = calloc(2 * l->n_leases + 1, sizeof(*w->leases));
        if (!w->leases)
                return -ENOMEM;
        w->sums = w->leases + l->n_leases;
        for (size_t i = 0; i < l->n_leases; i++)
                if (each_lease || is_shown_alone(l->leases[i]))
                        w->leases[w->n_leases++] = l->leases[i];
                else
                        w->sums[w->n_sums++] = l->leases[i];
        qsort(w->sums, w->n_sums, sizeof(*w->sums), compare_makers);
        return 0;
}

/* ---- families ---------------------------------------------------------------------- */

/* Of a row of the list that has these columns. */
static struct labels labels_of(const struct list *l, const struct table_column *columns, const void *row)
{
        const Bfcd__PartitionRow *partition = row;
        const Bfcd__TenantRow *tenant = row;
        const Bfcd__LeaseRow *lease = row;
        struct labels ret = { 0 };

        if (columns == statistics_devices)
                ret.device = ((const Bfcd__DeviceRow *)row)->id;
        else if (columns == statistics_partitions)
                ret = (struct labels){ partition->device, partition->name, NULL, NULL };
        else if (columns == statistics_tenants)
                ret = tenant_labels(l, tenant->tenant, tenant->partition, NULL);
        else if (columns == statistics_leases)
                ret = tenant_labels(l, lease->tenant, lease->partition, lease->name);
        return ret;
}

static void put_families(const struct writer *w, const char *kind, const struct table_column *columns,
                         const void *rows, size_t n_rows)
{
        for (struct family f = { .column = columns }; !table_is_end(f.column); f.column++) {
                const struct table_metric *m = &f.column->metric;

                if (!m->name)
                        continue;
                snprintf(f.name, sizeof(f.name), "%s%s", kind, m->name);
                put_head(w, f.name, m->is_counter, m->is_counter ? "counter" : "gauge", m->help);
                for (size_t i = 0; i < n_rows; i++) {
                        const void *row = ((const void *const *)rows)[i];

                        put_value_of(w, &f, table_number(f.column, row), labels_of(w->list, columns, row));
                }
                if (columns == statistics_leases && (f.column->flags & TABLE_SUM))
                        put_sums(w, &f);
        }
}

/* The state of devices: 1 for the one in which each is. */
static void put_states(const struct writer *w)
{
        static const struct {
                const char *state, *name, *help;
        } states[] = {
                { "lost", "device_lost", "1 where the device is lost." },
                { "hung", "device_hung", "1 where the device does not answer." },
                { "draining", "device_draining", "1 where the device is being drained." },
                { "drained", "device_drained", "1 where the device is drained." },
        };
        const Bfcd__Status *s = w->list->status;

        for (size_t k = 0; k < N_ELEMENTS(states); k++) {
                put_head(w, states[k].name, false, "gauge", states[k].help);
                for (size_t i = 0; i < s->n_devices; i++) {
                        fprintf(w->out, "bfcd_%s", states[k].name);
                        put_labels(w->out, &(struct labels){ .device = s->devices[i]->id }, NULL);
                        put_number(w->out, strcmp(s->devices[i]->state, states[k].state) == 0, TABLE_NUMBER);
                }
        }
}

static void put_version(const struct writer *w)
{
        put_head(w, "build_info", false, "gauge", "Always 1; the label is the version of the daemon.");
        fputs("bfcd_build_info{version=\"", w->out);
        put_value(w->out, w->list->status->version);
        fputs("\"} 1\n", w->out);
}

/* ---- histograms ------------------------------------------------------------------- */

/* NULL: no request was served so. */
static const Bfcd__GrantsRow *find_grants(const struct list *l, const Bfcd__TenantRow *of, const char *way)
{
        for (size_t i = 0; i < l->n_grants; i++)
                if (strcmp(l->grants[i]->way, way) == 0 && strcmp(l->grants[i]->tenant, of->tenant) == 0 &&
                    strcmp(l->grants[i]->partition, of->partition) == 0)
                        return l->grants[i];
        return NULL;
}

static void put_histogram(const struct writer *w, const char *name, const struct labels *labels,
                          const Bfcd__GrantsRow *row)
{
        uint64_t n = 0;
        char bound[32];

        for (size_t i = 0; i <= w->list->n_grant_bounds_ns; i++) {
                n += row && i < row->n_counts ? row->counts[i] : 0;
                if (i < w->list->n_grant_bounds_ns)
                        snprintf(bound, sizeof(bound), "%g", (double)w->list->grant_bounds_ns[i] / 1e9);
                else
                        strcpy(bound, "+Inf");
                fprintf(w->out, "bfcd_%s_bucket", name);
                put_labels(w->out, labels, bound);
                put_number(w->out, n, TABLE_NUMBER);
        }
        fprintf(w->out, "bfcd_%s_sum", name);
        put_labels(w->out, labels, NULL);
        put_number(w->out, row ? row->total_ns : 0, TABLE_NANOSECONDS);
        fprintf(w->out, "bfcd_%s_count", name);
        put_labels(w->out, labels, NULL);
        put_number(w->out, n, TABLE_NUMBER);
}

/* Also of ways in which no request was served, so that a rate has a value from the first one on. */
static void put_grants(const struct writer *w)
{
        const struct list *l = w->list;

        for (size_t k = 0; k < N_ELEMENTS(grants); k++) {
                put_head(w, grants[k].name, false, "histogram", grants[k].help);
                for (size_t i = 0; i < l->n_tenants; i++) {
                        struct labels labels =
                                tenant_labels(l, l->tenants[i]->tenant, l->tenants[i]->partition, NULL);

                        put_histogram(w, grants[k].name, &labels,
                                      find_grants(l, l->tenants[i], grants[k].way));
                }
        }
}

int metrics_print(FILE *out, const struct list *l, const struct metrics_options *o)
{
        struct writer w = { .out = out, .list = l, .openmetrics = o->openmetrics };
        int r = split_leases(&w, o->each_lease);

        if (r < 0)
                return r;
        put_version(&w);
        put_families(&w, "", statistics_status, &l->status, 1);
        put_families(&w, "device_", statistics_devices, l->status->devices, l->status->n_devices);
        put_families(&w, "partition_", statistics_partitions, l->partitions, l->n_partitions);
        put_families(&w, "tenant_", statistics_tenants, l->tenants, l->n_tenants);
        put_families(&w, "lease_", statistics_leases, w.leases, w.n_leases);
        put_states(&w);
        put_grants(&w);
        if (w.openmetrics)
                fputs("# EOF\n", out);
        free(w.leases);
        return ferror(out) ? -EIO : 0;
}
