/* bfcctl metrics; see metrics.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * One table of families: each is written as a whole, so no two are interleaved. Names have base units. Labels are the
 * device, the partition, the tenant and an operator's lease: sessions, processes, and leases that processes cause would
 * make new time series without end. */
#include "ctl/metrics.h"

#include <errno.h>
#include <inttypes.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define N_ELEMENTS(a) (sizeof(a) / sizeof((a)[0]))

const Bfcd__List__Kind metrics_lists[METRICS_LISTS] = { BFCD__LIST__KIND__STATUS,
                                                        BFCD__LIST__KIND__PARTITIONS,
                                                        BFCD__LIST__KIND__TENANTS, BFCD__LIST__KIND__GRANTS,
                                                        BFCD__LIST__KIND__LEASES };

/* ---- the families ------------------------------------------------------------- */

enum metric_type { GAUGE, COUNTER };
enum metric_rows {
        OF_STATUS,
        OF_DEVICES,
        OF_PARTITIONS,
        OF_TENANTS,
        OF_LEASES,
        OF_LEASES_AND_SUMS, /* also of those that processes caused, together */
};
enum metric_unit { PLAIN, MILLISECONDS, NANOSECONDS }; /* of the value; it is written in seconds */

struct family {
        const char *name; /* without bfcd_, and without _total */
        enum metric_type type;
        enum metric_rows rows;
        enum metric_unit unit;
        size_t via; /* where in the row a pointer to the struct of the value is; 0: it is the row */
        size_t offset;
        const char *help;
};

#define STATUS(name, type, unit, member, help)                                                               \
        {                                                                                                    \
                name, type, OF_STATUS, unit, 0, offsetof(Bfcd__Status, member), help                         \
        }
#define DEVICE(name, member, help)                                                                           \
        {                                                                                                    \
                "device_" name, GAUGE, OF_DEVICES, PLAIN, 0, offsetof(Bfcd__DeviceRow, member), help         \
        }
#define CALLS(name, type, unit, calls, member, help)                                                         \
        {                                                                                                    \
                "device_" name, type, OF_DEVICES, unit, offsetof(Bfcd__DeviceRow, calls),                    \
                        offsetof(Bfcd__DeviceCalls, member), help                                            \
        }
#define PARTITION(name, member, help)                                                                        \
        {                                                                                                    \
                "partition_" name, GAUGE, OF_PARTITIONS, PLAIN, offsetof(Bfcd__PartitionRow, stats),         \
                        offsetof(Bfcd__Statistics, member), help                                             \
        }
#define TENANT(name, type, unit, member, help)                                                               \
        {                                                                                                    \
                "tenant_" name, type, OF_TENANTS, unit, offsetof(Bfcd__TenantRow, stats),                    \
                        offsetof(Bfcd__Statistics, member), help                                             \
        }
#define TENANT_ROW(name, member, help)                                                                       \
        {                                                                                                    \
                "tenant_" name, GAUGE, OF_TENANTS, PLAIN, 0, offsetof(Bfcd__TenantRow, member), help         \
        }

#define LEASE_STATS(name, type, rows, member, help)                                                          \
        {                                                                                                    \
                "lease_" name, type, rows, PLAIN, offsetof(Bfcd__LeaseRow, stats),                           \
                        offsetof(Bfcd__Statistics, member), help                                             \
        }
#define LEASE(name, type, member, help) LEASE_STATS(name, type, OF_LEASES, member, help)
#define LEASE_SUM(name, member, help)   LEASE_STATS(name, GAUGE, OF_LEASES_AND_SUMS, member, help)

static const struct family families[] = {
        STATUS("uptime_seconds", GAUGE, MILLISECONDS, uptime_ms, "Time since the daemon started."),
        STATUS("sessions", GAUGE, PLAIN, num_sessions, "Sessions of clients."),
        STATUS("max_sessions", GAUGE, PLAIN, max_sessions, "Sessions of clients that are allowed."),
        STATUS("quarantined_sessions", GAUGE, PLAIN, num_quarantined,
               "Sessions that have ended and whose process has not."),
        STATUS("unresponsive_sessions", GAUGE, PLAIN, num_unresponsive,
               "Sessions that have not returned or unmapped memory in time when they were asked to."),
        STATUS("blocks", GAUGE, PLAIN, num_blocks, "Allocated blocks."),
        STATUS("extents", GAUGE, PLAIN, num_extents, "Extents that back the address space of arenas."),
        STATUS("daemon_allocated_bytes", GAUGE, PLAIN, bytes_allocated,
               "Memory that the daemon has allocated for itself."),
        STATUS("daemon_resident_bytes", GAUGE, PLAIN, bytes_resident, "Resident memory of the daemon."),
        STATUS("loop_longest_turn_seconds", GAUGE, NANOSECONDS, longest_turn_ns,
               "Longest time that the event loop was busy at once since the daemon started."),
        STATUS("loop_recent_longest_turn_seconds", GAUGE, NANOSECONDS, recent_longest_turn_ns,
               "Longest time that the event loop was busy at once in the last one to two minutes."),
        STATUS("log_lines_lost", COUNTER, PLAIN, num_log_lines_lost,
               "Lines of the log that were dropped because its reader was too slow."),
        STATUS("records_lost", COUNTER, PLAIN, num_records_lost,
               "Records that were dropped because the journal, or their file, did not take them."),

        DEVICE("size_bytes", bytes_total, "Memory of the device."),
        DEVICE("reserved_bytes", bytes_reserved, "Memory of extents on the device."),
        DEVICE("pending_bytes", bytes_pending, "Memory of extents that are being made or destroyed."),
        DEVICE("unreclaimed_bytes", bytes_unreclaimed,
               "Memory that the device did not return, or that a process keeps."),
        DEVICE("standby_bytes", bytes_standby, "Memory that is ready in advance."),
        CALLS("make_calls", COUNTER, PLAIN, makes, num_calls, "Calls of the device that make an extent."),
        CALLS("make_failures", COUNTER, PLAIN, makes, num_failed, "Such calls that failed."),
        CALLS("make_seconds", COUNTER, NANOSECONDS, makes, total_ns, "Time of calls that make an extent."),
        CALLS("longest_make_seconds", GAUGE, NANOSECONDS, makes, longest_ns,
              "Time of the longest call that made an extent."),
        CALLS("destroy_calls", COUNTER, PLAIN, destroys, num_calls,
              "Calls of the device that destroy an extent."),
        CALLS("destroy_failures", COUNTER, PLAIN, destroys, num_failed,
              "Such calls after which the device had not returned the memory."),
        CALLS("destroy_seconds", COUNTER, NANOSECONDS, destroys, total_ns,
              "Time of calls that destroy an extent."),
        CALLS("longest_destroy_seconds", GAUGE, NANOSECONDS, destroys, longest_ns,
              "Time of the longest call that destroyed an extent."),

        PARTITION("limit_bytes", bytes_limit, "Limit of the partition."),
        PARTITION("reserved_bytes", bytes_reserved, "Memory of extents and direct charges in the partition."),
        PARTITION("peak_reserved_bytes", peak_bytes_reserved, "Peak of the reserved memory since its reset."),
        PARTITION("in_use_bytes", bytes_in_use, "Memory of blocks in the partition."),
        PARTITION("peak_in_use_bytes", peak_bytes_in_use, "Peak of the memory of blocks since its reset."),
        PARTITION("guaranteed_bytes", bytes_guaranteed, "Sum of the guarantees of tenants."),
        PARTITION("unreclaimed_bytes", bytes_unreclaimed, "Memory that was not returned and stays charged."),
        PARTITION("direct_bytes", bytes_direct, "Memory that processes took by themselves, and charged."),
        PARTITION("contexts_bytes", bytes_contexts, "CUDA contexts in the direct charges, as clients say."),
        PARTITION(
                "outside_bytes", bytes_outside,
                "Memory of the device that processes have outside of bfcd, with and without a session, as NVML tells."),

        TENANT("limit_bytes", GAUGE, PLAIN, bytes_limit, "Limit of the tenant in the partition."),
        TENANT("guaranteed_bytes", GAUGE, PLAIN, bytes_guaranteed,
               "Memory that is guaranteed to the tenant."),
        TENANT("reserved_bytes", GAUGE, PLAIN, bytes_reserved,
               "Memory of extents and direct charges, to which the limit applies."),
        TENANT("peak_reserved_bytes", GAUGE, PLAIN, peak_bytes_reserved,
               "Peak of the reserved memory since its reset."),
        TENANT("lifetime_peak_reserved_bytes", GAUGE, PLAIN, lifetime_peak_bytes_reserved,
               "Peak of the reserved memory that no reset erases."),
        TENANT("in_use_bytes", GAUGE, PLAIN, bytes_in_use, "Memory of blocks."),
        TENANT("peak_in_use_bytes", GAUGE, PLAIN, peak_bytes_in_use,
               "Peak of the memory of blocks since its reset."),
        TENANT("lifetime_peak_in_use_bytes", GAUGE, PLAIN, lifetime_peak_bytes_in_use,
               "Peak of the memory of blocks that no reset erases."),
        TENANT("requested_bytes", GAUGE, PLAIN, bytes_requested,
               "Sizes of blocks before they were rounded up."),
        TENANT("free_bytes", GAUGE, PLAIN, bytes_free, "Free memory inside of extents."),
        TENANT("largest_free_bytes", GAUGE, PLAIN, largest_free_block_bytes,
               "Largest free piece inside of extents."),
        TENANT("fragmented_bytes", GAUGE, PLAIN, bytes_fragmented,
               "Free memory outside of the largest free piece."),
        TENANT("unreclaimed_bytes", GAUGE, PLAIN, bytes_unreclaimed,
               "Memory that was not returned and stays charged."),
        TENANT("parked_bytes", GAUGE, PLAIN, bytes_parked, "Blocks that are parked and have no memory."),
        TENANT("direct_bytes", GAUGE, PLAIN, bytes_direct,
               "Memory that processes took by themselves, and charged."),
        TENANT("contexts_bytes", GAUGE, PLAIN, bytes_contexts,
               "CUDA contexts in the direct charges, as clients say."),
        TENANT("outside_bytes", GAUGE, PLAIN, bytes_outside,
               "Memory of the device that processes have outside of bfcd, with and without a session, as NVML tells."),
        TENANT_ROW("pending_bytes", bytes_pending,
                   "Memory of extents that are being returned to the device."),
        TENANT("blocks", GAUGE, PLAIN, num_blocks, "Allocated blocks."),
        TENANT("sessions", GAUGE, PLAIN, num_sessions, "Sessions that use the partition."),
        TENANT("extents", GAUGE, PLAIN, num_extents, "Extents."),
        TENANT("allocations", COUNTER, PLAIN, num_allocs, "Blocks that were allocated."),
        TENANT("refusals_over_quota", COUNTER, PLAIN, num_over_quota,
               "Requests that were refused by the tenant's own limits."),
        TENANT("refusals_out_of_memory", COUNTER, PLAIN, num_out_of_memory,
               "Requests that were refused because the partition or the device had no memory."),
        TENANT("last_refusal_timestamp_seconds", GAUGE, MILLISECONDS, last_refusal_time_ms,
               "Time of the last refusal since 1970; 0: there was none."),
        TENANT_ROW("waiting_requests", num_waiting, "Requests that wait for memory."),
        TENANT_ROW("waiting_bytes", bytes_waiting, "Memory that waiting requests ask for."),

        LEASE_SUM("limit_bytes", bytes_limit, "Limit of the lease."),
        LEASE_SUM("guaranteed_bytes", bytes_guaranteed, "Memory that is guaranteed to the lease."),
        LEASE_SUM("reserved_bytes", bytes_reserved, "Memory of extents, to which the limit applies."),
        LEASE("peak_reserved_bytes", GAUGE, lifetime_peak_bytes_reserved, "Peak of the reserved memory."),
        LEASE_SUM("in_use_bytes", bytes_in_use, "Memory of blocks."),
        LEASE("peak_in_use_bytes", GAUGE, lifetime_peak_bytes_in_use, "Peak of the memory of blocks."),
        LEASE_SUM("sessions", num_sessions, "Sessions in the lease."),
        LEASE("refusals_over_quota", COUNTER, num_over_quota,
              "Requests that were refused by the limits of the lease or of its tenant."),
        LEASE("refusals_out_of_memory", COUNTER, num_out_of_memory,
              "Requests that were refused because the partition or the device had no memory."),
        { "lease_waiting_requests", GAUGE, OF_LEASES_AND_SUMS, PLAIN, 0,
          offsetof(Bfcd__LeaseRow, num_waiting), "Requests that wait for memory." },
        { "lease_waited_seconds", COUNTER, OF_LEASES, NANOSECONDS, 0, offsetof(Bfcd__LeaseRow, waited_ns),
          "Time that requests have waited." },
};

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

static struct labels tenant_labels(const struct list *l, const char *tenant, const char *partition)
{
        return (struct labels){ device_of(l, partition), partition, tenant, NULL };
}

/* ---- samples -------------------------------------------------------------------- */

struct writer {
        FILE *out;
        const struct list *list;
        bool openmetrics;
        Bfcd__LeaseRow **sums; /* leases that are summed, by tenant, partition and maker */
        size_t n_sums;
};

/* In OpenMetrics a counter's family has no suffix; in the older format it is named as its sample. */
static void put_head(const struct writer *w, const char *name, bool is_counter, const char *type,
                     const char *help)
{
        const char *suffix = is_counter && !w->openmetrics ? "_total" : "";

        fprintf(w->out, "# HELP bfcd_%s%s %s\n# TYPE bfcd_%s%s %s\n", name, suffix, help, name, suffix, type);
}

static void put_number(FILE *out, uint64_t n, enum metric_unit unit)
{
        if (unit == MILLISECONDS)
                fprintf(out, "%" PRIu64 ".%03" PRIu64 "\n", n / 1000, n % 1000);
        else if (unit == NANOSECONDS)
                fprintf(out, "%" PRIu64 ".%09" PRIu64 "\n", n / 1000000000, n % 1000000000);
        else
                fprintf(out, "%" PRIu64 "\n", n);
}

static uint64_t value_of(const struct family *f, const void *row)
{
        const char *from = row;
        uint64_t n = 0;

        if (f->via > 0)
                from = *(const char *const *)(const void *)(from + f->via);
        if (from)
                memcpy(&n, from + f->offset, sizeof(n));
        return n;
}

static void put_value_of(const struct writer *w, const struct family *f, uint64_t value, struct labels labels)
{
        fprintf(w->out, "bfcd_%s%s", f->name, f->type == COUNTER ? "_total" : "");
        put_labels(w->out, &labels, NULL);
        put_number(w->out, value, f->unit);
}

static void put_sample(const struct writer *w, const struct family *f, const void *row, struct labels labels)
{
        put_value_of(w, f, value_of(f, row), labels);
}

/* ---- leases ----------------------------------------------------------------------- */

static bool is_of_operator(const Bfcd__LeaseRow *row)
{
        return strcmp(row->made_by, "operator") == 0;
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
                struct labels labels = tenant_labels(w->list, first->tenant, first->partition);
                uint64_t sum = 0;
                char name[32];

                for (k = i; k < w->n_sums && compare_makers(&w->sums[i], &w->sums[k]) == 0; k++)
                        sum += value_of(f, w->sums[k]);
                snprintf(name, sizeof(name), "(%s)", first->made_by);
                labels.lease = name;
                put_value_of(w, f, sum, labels);
        }
}

static void put_leases(const struct writer *w, const struct family *f)
{
        const struct list *l = w->list;

        for (size_t i = 0; i < l->n_leases; i++) {
                struct labels labels = tenant_labels(l, l->leases[i]->tenant, l->leases[i]->partition);

                labels.lease = l->leases[i]->name;
                if (w->n_sums == 0 || is_of_operator(l->leases[i]))
                        put_sample(w, f, l->leases[i], labels);
        }
        if (f->rows == OF_LEASES_AND_SUMS)
                put_sums(w, f);
}

static int find_sums(struct writer *w)
{
        const struct list *l = w->list;

        w->sums = calloc(l->n_leases + 1, sizeof(*w->sums));
        if (!w->sums)
                return -ENOMEM;
        for (size_t i = 0; i < l->n_leases; i++)
                if (!is_of_operator(l->leases[i]))
                        w->sums[w->n_sums++] = l->leases[i];
        qsort(w->sums, w->n_sums, sizeof(*w->sums), compare_makers);
        return 0;
}

/* ---- families ---------------------------------------------------------------------- */

static void put_family(const struct writer *w, const struct family *f)
{
        const struct list *l = w->list;

        put_head(w, f->name, f->type == COUNTER, f->type == COUNTER ? "counter" : "gauge", f->help);
        if (f->rows == OF_STATUS)
                put_sample(w, f, l->status, (struct labels){ 0 });
        for (size_t i = 0; f->rows == OF_DEVICES && i < l->status->n_devices; i++)
                put_sample(w, f, l->status->devices[i],
                           (struct labels){ .device = l->status->devices[i]->id });
        for (size_t i = 0; f->rows == OF_PARTITIONS && i < l->n_partitions; i++)
                put_sample(w, f, l->partitions[i],
                           (struct labels){ l->partitions[i]->device, l->partitions[i]->name, NULL, NULL });
        for (size_t i = 0; f->rows == OF_TENANTS && i < l->n_tenants; i++)
                put_sample(w, f, l->tenants[i],
                           tenant_labels(l, l->tenants[i]->tenant, l->tenants[i]->partition));
        if (f->rows == OF_LEASES || f->rows == OF_LEASES_AND_SUMS)
                put_leases(w, f);
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
                        put_number(w->out, strcmp(s->devices[i]->state, states[k].state) == 0, PLAIN);
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
                put_number(w->out, n, PLAIN);
        }
        fprintf(w->out, "bfcd_%s_sum", name);
        put_labels(w->out, labels, NULL);
        put_number(w->out, row ? row->total_ns : 0, NANOSECONDS);
        fprintf(w->out, "bfcd_%s_count", name);
        put_labels(w->out, labels, NULL);
        put_number(w->out, n, PLAIN);
}

/* Also of ways in which no request was served, so that a rate has a value from the first one on. */
static void put_grants(const struct writer *w)
{
        const struct list *l = w->list;

        for (size_t k = 0; k < N_ELEMENTS(grants); k++) {
                put_head(w, grants[k].name, false, "histogram", grants[k].help);
                for (size_t i = 0; i < l->n_tenants; i++) {
                        struct labels labels =
                                tenant_labels(l, l->tenants[i]->tenant, l->tenants[i]->partition);

                        put_histogram(w, grants[k].name, &labels,
                                      find_grants(l, l->tenants[i], grants[k].way));
                }
        }
}

int metrics_print(FILE *out, const struct list *l, const struct metrics_options *o)
{
        struct writer w = { .out = out, .list = l, .openmetrics = o->openmetrics };
        int r = o->each_lease ? 0 : find_sums(&w);

        if (r < 0)
                return r;
        put_version(&w);
        for (size_t i = 0; i < N_ELEMENTS(families); i++)
                put_family(&w, &families[i]);
        put_states(&w);
        put_grants(&w);
        if (w.openmetrics)
                fputs("# EOF\n", out);
        free(w.sums);
        return ferror(out) ? -EIO : 0;
}
