/* The columns of the lists that have statistics; see statistics.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "ctl/statistics.h"

#include <string.h>

#include "ctl/process.h"
#include "ctl/show.h"
#include "ctl/text.h"
#include "proto/bfcd.pb-c.h"

#define R      TABLE_RIGHT
#define WIDE   TABLE_WIDE
#define SUM    TABLE_SUM
#define COLUMN TABLE_COLUMN
/* A statistic of a row. */
#define STAT(title, flags, type, row, member, ...)                                                           \
        {                                                                                                    \
                title, #member, (flags) | TABLE_OF_KEYS, type, TABLE_MEMBER(Bfcd__Statistics, member),       \
                        .via = offsetof(row, stats), __VA_ARGS__                                             \
        }
#define GAUGE(name, help)   .metric = { name, help, false }
#define COUNTER(name, help) .metric = { name, help, true }
#define PAGE(title)         .page = title

#define OUTSIDE                                                                                              \
        "Memory of the device that processes have outside of bfcd, with and without a session, as NVML tells."

json_t *statistics_fragmentation(const void *statistics)
{
        const Bfcd__Statistics *f = statistics;

        return json_real(f && f->bytes_free ? (double)f->bytes_fragmented / (double)f->bytes_free : 0);
}

/* ---- tenants ----------------------------------------------------------------- */

/* Above nine tenths of the limit, and above the limit, which was lowered. */
static enum table_mark tenant_mark(const void *row)
{
        const Bfcd__Statistics *f = ((const Bfcd__TenantRow *)row)->stats;

        return !f                                                         ? TABLE_PLAIN
               : f->bytes_reserved > f->bytes_limit                       ? TABLE_ALARM
               : f->bytes_reserved > f->bytes_limit - f->bytes_limit / 10 ? TABLE_WARNING
                                                                          : TABLE_PLAIN;
}

/* A tenant that a reload removed has no limit any more; its sessions continue. */
static const char *no_limit(const void *row)
{
        return ((const Bfcd__TenantRow *)row)->is_removed ? "removed" : NULL;
}

#define TENANT(title, flags, type, member, ...) STAT(title, flags, type, Bfcd__TenantRow, member, __VA_ARGS__)

const struct table_column statistics_tenants[] = {
        COLUMN("TENANT", "tenant", 0, TABLE_TEXT, Bfcd__TenantRow, tenant, PAGE("Tenant")),
        COLUMN("PARTITION", "partition", 0, TABLE_TEXT, Bfcd__TenantRow, partition, PAGE("Partition")),
        COLUMN(NULL, "removed", 0, TABLE_BOOL, Bfcd__TenantRow, is_removed),
        COLUMN(NULL, "bytes_pending", 0, TABLE_SIZE, Bfcd__TenantRow, bytes_pending,
               GAUGE("pending_bytes", "Memory of extents that are being returned to the device.")),
        TENANT("IN-USE", R | SUM, TABLE_SIZE, bytes_in_use, PAGE("In use"),
               GAUGE("in_use_bytes", "Memory of blocks.")),
        TENANT("PEAK", R, TABLE_SIZE, peak_bytes_in_use,
               GAUGE("peak_in_use_bytes", "Peak of the memory of blocks since its reset.")),
        TENANT("AGO", R | WIDE, TABLE_AGO, peak_bytes_in_use_time_ms),
        TENANT(NULL, 0, TABLE_SIZE, lifetime_peak_bytes_in_use,
               GAUGE("lifetime_peak_in_use_bytes", "Peak of the memory of blocks that no reset erases.")),
        TENANT("RESERVED", R | SUM, TABLE_SIZE, bytes_reserved, .mark = tenant_mark, PAGE("Reserved"),
               GAUGE("reserved_bytes", "Memory of extents and direct charges, to which the limit applies.")),
        TENANT("PEAK-RES", R | WIDE, TABLE_SIZE, peak_bytes_reserved, PAGE("Peak reserved"),
               GAUGE("peak_reserved_bytes", "Peak of the reserved memory since its reset.")),
        TENANT(NULL, 0, TABLE_SIZE, lifetime_peak_bytes_reserved,
               GAUGE("lifetime_peak_reserved_bytes", "Peak of the reserved memory that no reset erases.")),
        TENANT(NULL, 0, TABLE_SIZE, bytes_guaranteed, PAGE("Guaranteed"),
               GAUGE("guaranteed_bytes", "Memory that is guaranteed to the tenant.")),
        TENANT("LIMIT", R, TABLE_SIZE, bytes_limit, .instead = no_limit, PAGE("Limit"),
               GAUGE("limit_bytes", "Limit of the tenant in the partition.")),
        TENANT(NULL, 0, TABLE_SIZE, bytes_requested,
               GAUGE("requested_bytes", "Sizes of blocks before they were rounded up.")),
        TENANT(NULL, 0, TABLE_SIZE, bytes_free, GAUGE("free_bytes", "Free memory inside of extents.")),
        TENANT(NULL, 0, TABLE_SIZE, largest_free_block_bytes,
               GAUGE("largest_free_bytes", "Largest free piece inside of extents.")),
        TENANT(NULL, 0, TABLE_SIZE, bytes_fragmented,
               GAUGE("fragmented_bytes", "Free memory outside of the largest free piece.")),
        TENANT(NULL, 0, TABLE_NUMBER, num_allocs, COUNTER("allocations", "Blocks that were allocated.")),
        TENANT("REFUSED", R | TABLE_NARROW | SUM, TABLE_NUMBER, num_refusals, PAGE("Refused")),
        TENANT("EDQUOT", R | WIDE | SUM, TABLE_NUMBER, num_over_quota,
               COUNTER("refusals_over_quota", "Requests that were refused by the tenant's own limits.")),
        TENANT("ENOMEM", R | WIDE | SUM, TABLE_NUMBER, num_out_of_memory,
               COUNTER("refusals_out_of_memory",
                       "Requests that were refused because the partition or the device had no memory.")),
        TENANT("LAST", R | WIDE, TABLE_AGO, last_refusal_time_ms,
               GAUGE("last_refusal_timestamp_seconds",
                     "Time of the last refusal since 1970; 0: there was none.")),
        TENANT("UNRECLAIMED", R | WIDE | SUM, TABLE_SIZE, bytes_unreclaimed,
               GAUGE("unreclaimed_bytes", "Memory that was not returned and stays charged.")),
        TENANT("PARKED", R | WIDE | SUM, TABLE_SIZE, bytes_parked, PAGE("Parked"),
               GAUGE("parked_bytes", "Blocks that are parked and have no memory.")),
        TENANT("DIRECT", R | WIDE | SUM, TABLE_SIZE, bytes_direct, PAGE("Direct"),
               GAUGE("direct_bytes", "Memory that processes took by themselves, and charged.")),
        TENANT("CONTEXTS", R | WIDE | SUM, TABLE_SIZE, bytes_contexts,
               GAUGE("contexts_bytes", "CUDA contexts in the direct charges, as clients say.")),
        TENANT("OUTSIDE", R | WIDE | SUM, TABLE_SIZE, bytes_outside, GAUGE("outside_bytes", OUTSIDE)),
        COLUMN("WAITING", "num_waiting", R | WIDE | SUM, TABLE_NUMBER, Bfcd__TenantRow, num_waiting,
               GAUGE("waiting_requests", "Requests that wait for memory.")),
        COLUMN("FOR", "bytes_waiting", R | WIDE | SUM, TABLE_SIZE, Bfcd__TenantRow, bytes_waiting,
               GAUGE("waiting_bytes", "Memory that waiting requests ask for.")),
        COLUMN(NULL, "num_leases", 0, TABLE_NUMBER, Bfcd__TenantRow, num_leases, PAGE("Leases")),
        TENANT(NULL, 0, TABLE_NUMBER, num_sessions, PAGE("Sessions"),
               GAUGE("sessions", "Sessions that use the partition.")),
        TENANT(NULL, 0, TABLE_NUMBER, num_blocks, GAUGE("blocks", "Allocated blocks.")),
        TENANT(NULL, 0, TABLE_NUMBER, num_extents, GAUGE("extents", "Extents.")),
        STATISTICS_KEYS(Bfcd__TenantRow, NULL),
        { 0 },
};

/* ---- partitions ------------------------------------------------------------- */

/* The pages that the extents were made of; a client may split a page of 2 MiB later. */
static void pages_text(const void *row, char ret[static TABLE_TEXT_MAX])
{
        const Bfcd__PartitionRow *p = row;
        const char *text = p->bytes_in_2mib_pages == 0   ? p->bytes_in_4kib_pages == 0 ? "-" : "4 KiB"
                           : p->bytes_in_4kib_pages == 0 ? "2 MiB"
                                                         : "mixed";

        snprintf(ret, TABLE_TEXT_MAX, "%s%s", text, p->pinned ? ", pinned" : "");
}

/* Of the whole partition: a tenant does not see its peaks, and the daemon gives it none. */
static const char *no_peak(const void *row)
{
        const Bfcd__Statistics *f = ((const Bfcd__PartitionRow *)row)->stats;

        return f && f->peak_bytes_reserved == 0 && f->peak_bytes_reserved_time_ms == 0 ? "-" : NULL;
}

#define PARTITION(title, flags, type, member, ...)                                                           \
        STAT(title, flags, type, Bfcd__PartitionRow, member, __VA_ARGS__)

const struct table_column statistics_partitions[] = {
        COLUMN("PARTITION", "partition", 0, TABLE_TEXT, Bfcd__PartitionRow, name),
        COLUMN("DEVICE", "device", 0, TABLE_TEXT, Bfcd__PartitionRow, device),
        COLUMN("GROWTH", "growth", WIDE, TABLE_TEXT, Bfcd__PartitionRow, growth),
        COLUMN(NULL, "share", 0, TABLE_TEXT, Bfcd__PartitionRow, share),
        COLUMN(NULL, "clear_on_release", 0, TABLE_BOOL, Bfcd__PartitionRow, clears_on_release),
        COLUMN(NULL, "pinned", 0, TABLE_BOOL, Bfcd__PartitionRow, pinned),
        COLUMN(NULL, "bytes_pinned", 0, TABLE_SIZE, Bfcd__PartitionRow, bytes_pinned),
        COLUMN(NULL, "bytes_in_2mib_pages", 0, TABLE_SIZE, Bfcd__PartitionRow, bytes_in_2mib_pages),
        COLUMN(NULL, "bytes_in_4kib_pages", 0, TABLE_SIZE, Bfcd__PartitionRow, bytes_in_4kib_pages),
        COLUMN(NULL, "num_tenants", 0, TABLE_NUMBER, Bfcd__PartitionRow, num_tenants),
        /* The page begins with these. */
        PARTITION(NULL, 0, TABLE_SIZE, bytes_limit, PAGE("Limit"),
                  GAUGE("limit_bytes", "Limit of the partition.")),
        PARTITION(NULL, 0, TABLE_SIZE, bytes_guaranteed, PAGE("Guaranteed"),
                  GAUGE("guaranteed_bytes", "Sum of the guarantees of tenants.")),
        PARTITION("IN-USE", R, TABLE_SIZE, bytes_in_use,
                  GAUGE("in_use_bytes", "Memory of blocks in the partition.")),
        PARTITION("PEAK", R | WIDE, TABLE_SIZE, peak_bytes_in_use, .instead = no_peak,
                  GAUGE("peak_in_use_bytes", "Peak of the memory of blocks since its reset.")),
        PARTITION("AGO", R | WIDE, TABLE_AGO, peak_bytes_in_use_time_ms),
        PARTITION("RESERVED", R, TABLE_SIZE, bytes_reserved,
                  GAUGE("reserved_bytes", "Memory of extents and direct charges in the partition.")),
        PARTITION("PEAK-RES", R | WIDE, TABLE_SIZE, peak_bytes_reserved, .instead = no_peak,
                  PAGE("Peak reserved"),
                  GAUGE("peak_reserved_bytes", "Peak of the reserved memory since its reset.")),
        PARTITION("GUARANTEED", R, TABLE_SIZE, bytes_guaranteed),
        PARTITION("LIMIT", R, TABLE_SIZE, bytes_limit),
        { "PAGES", "pages", .type = TABLE_MADE, .text = pages_text },
        PARTITION("ENOMEM", R, TABLE_NUMBER, num_out_of_memory),
        PARTITION("UNRECLAIMED", R | WIDE, TABLE_SIZE, bytes_unreclaimed),
        PARTITION("DIRECT", R | WIDE, TABLE_SIZE, bytes_direct, PAGE("Charged directly"),
                  GAUGE("direct_bytes", "Memory that processes took by themselves, and charged.")),
        PARTITION("CONTEXTS", R | WIDE, TABLE_SIZE, bytes_contexts, PAGE("Of these contexts"),
                  GAUGE("contexts_bytes", "CUDA contexts in the direct charges, as clients say.")),
        PARTITION(NULL, 0, TABLE_SIZE, bytes_outside, PAGE("Outside of bfcd"),
                  GAUGE("outside_bytes", OUTSIDE)),
        PARTITION(NULL, 0, TABLE_SIZE, bytes_unreclaimed, PAGE("Unreclaimed"),
                  GAUGE("unreclaimed_bytes", "Memory that was not returned and stays charged.")),
        PARTITION(NULL, 0, TABLE_NUMBER, num_refusals, PAGE("Refused requests")),
        STATISTICS_KEYS(Bfcd__PartitionRow, "peak_bytes_requested"),
        { 0 },
};

/* ---- leases ------------------------------------------------------------------ */

static void lease_match_text(const void *row, char ret[static TABLE_TEXT_MAX])
{
        const Bfcd__LeaseRow *l = row;
        char user[PROCESS_TEXT_MAX];
        bool is_user = strcmp(l->match_kind, "user") == 0;

        snprintf(ret, TABLE_TEXT_MAX, "%s %s", l->match_kind,
                 is_user ? process_user(strtoull(l->match, NULL, 10), user) : l->match);
}

static const char *no_ttl(const void *row)
{
        return ((const Bfcd__LeaseRow *)row)->ttl_ms == 0 ? "-" : NULL;
}

#define LEASE(title, flags, type, member, ...) STAT(title, flags, type, Bfcd__LeaseRow, member, __VA_ARGS__)

/* A metric that is TABLE_SUM is also that of leases that processes caused, together. */
const struct table_column statistics_leases[] = {
        COLUMN("LEASE", "name", 0, TABLE_TEXT, Bfcd__LeaseRow, name, PAGE("Lease")),
        COLUMN("TENANT", "tenant", 0, TABLE_TEXT, Bfcd__LeaseRow, tenant, PAGE("Tenant")),
        COLUMN("PARTITION", "partition", 0, TABLE_TEXT, Bfcd__LeaseRow, partition, PAGE("Partition")),
        COLUMN("STATE", "state", 0, TABLE_TEXT, Bfcd__LeaseRow, state, PAGE("State")),
        LEASE("IN-USE", R | SUM, TABLE_SIZE, bytes_in_use, PAGE("In use"),
              GAUGE("in_use_bytes", "Memory of blocks.")),
        LEASE("PEAK", R | WIDE, TABLE_SIZE, peak_bytes_in_use),
        LEASE("RESERVED", R | SUM, TABLE_SIZE, bytes_reserved, PAGE("Reserved"),
              GAUGE("reserved_bytes", "Memory of extents, to which the limit applies.")),
        LEASE("LIMIT", R, TABLE_SIZE, bytes_limit, PAGE("Limit")),
        LEASE("RESERVE", R | WIDE | SUM, TABLE_SIZE, bytes_guaranteed,
              GAUGE("guaranteed_bytes", "Memory that is guaranteed to the lease.")),
        LEASE("DIRECT", R | WIDE | SUM, TABLE_SIZE, bytes_direct),
        LEASE("CONTEXTS", R | WIDE | SUM, TABLE_SIZE, bytes_contexts),
        LEASE("OUTSIDE", R | WIDE | SUM, TABLE_SIZE, bytes_outside),
        LEASE("SESSIONS", R | WIDE | SUM, TABLE_NUMBER, num_sessions,
              GAUGE("sessions", "Sessions in the lease.")),
        LEASE("REFUSED", R | WIDE | SUM, TABLE_NUMBER, num_refusals, PAGE("Refused")),
        LEASE(NULL, 0, TABLE_NUMBER, num_sessions, PAGE("Sessions")),
        COLUMN("AGE", "age_ms", R | WIDE, TABLE_DURATION, Bfcd__LeaseRow, age_ms, PAGE("Age")),
        COLUMN("TTL", "ttl_ms", R, TABLE_DURATION, Bfcd__LeaseRow, ttl_ms, .instead = no_ttl, PAGE("Left")),
        COLUMN(NULL, "evicts", 0, TABLE_BOOL, Bfcd__LeaseRow, evicts),
        COLUMN(NULL, "grace_ms", 0, TABLE_DURATION, Bfcd__LeaseRow, grace_ms),
        COLUMN(NULL, "bytes_pending", 0, TABLE_SIZE, Bfcd__LeaseRow, bytes_pending),
        COLUMN("WAITING", "num_waiting", R | WIDE | SUM, TABLE_NUMBER, Bfcd__LeaseRow, num_waiting,
               GAUGE("waiting_requests", "Requests that wait for memory.")),
        COLUMN(NULL, "bytes_waiting", 0, TABLE_SIZE, Bfcd__LeaseRow, bytes_waiting),
        COLUMN(NULL, "waited_ns", 0, TABLE_NANOSECONDS, Bfcd__LeaseRow, waited_ns,
               COUNTER("waited_seconds", "Time that requests have waited.")),
        LEASE(NULL, SUM, TABLE_SIZE, bytes_limit, GAUGE("limit_bytes", "Limit of the lease.")),
        LEASE(NULL, 0, TABLE_SIZE, lifetime_peak_bytes_reserved,
              GAUGE("peak_reserved_bytes", "Peak of the reserved memory.")),
        LEASE(NULL, 0, TABLE_SIZE, lifetime_peak_bytes_in_use,
              GAUGE("peak_in_use_bytes", "Peak of the memory of blocks.")),
        LEASE(NULL, 0, TABLE_NUMBER, num_over_quota,
              COUNTER("refusals_over_quota",
                      "Requests that were refused by the limits of the lease or of its tenant.")),
        LEASE(NULL, 0, TABLE_NUMBER, num_out_of_memory,
              COUNTER("refusals_out_of_memory",
                      "Requests that were refused because the partition or the device had no memory.")),
        { "MATCH", NULL, WIDE, TABLE_MADE, .text = lease_match_text },
        COLUMN(NULL, "match_kind", 0, TABLE_TEXT, Bfcd__LeaseRow, match_kind),
        COLUMN(NULL, "match", 0, TABLE_TEXT, Bfcd__LeaseRow, match),
        COLUMN("BY", "made_by", WIDE, TABLE_TEXT, Bfcd__LeaseRow, made_by),
        STATISTICS_KEYS(Bfcd__LeaseRow, "peak_bytes_requested"),
        { 0 },
};

/* ---- the daemon and its devices ------------------------------------------- */

static void reserved_text(const void *row, char ret[static TABLE_TEXT_MAX])
{
        text_percent(((const Bfcd__DeviceRow *)row)->bytes_reserved,
                     ((const Bfcd__DeviceRow *)row)->bytes_total, ret);
}

static enum table_mark state_mark(const void *row)
{
        const char *state = ((const Bfcd__DeviceRow *)row)->state; /* ok, draining, drained, hung or lost */

        return strcmp(state, "ok") == 0 ? TABLE_PLAIN : state[0] == 'd' ? TABLE_WARNING : TABLE_ALARM;
}

static enum table_mark unreclaimed_mark(const void *row)
{
        return ((const Bfcd__DeviceRow *)row)->bytes_unreclaimed > 0 ? TABLE_ALARM : TABLE_PLAIN;
}

static json_t *calls_json(const void *calls)
{
        static const struct table_column columns[] = {
                { .type = TABLE_KEYS, .keys = &bfcd__device_calls__descriptor },
                { 0 },
        };

        return calls ? table_json(columns, calls) : json_null();
}

/* The mean of the calls that make an extent; "-": there was none, or this session is not told. */
static void make_time_text(const void *row, char ret[static TABLE_TEXT_MAX])
{
        const Bfcd__DeviceCalls *calls = ((const Bfcd__DeviceRow *)row)->makes;

        if (calls && calls->num_calls > 0)
                text_time(calls->total_ns / calls->num_calls, ret);
        else
                strcpy(ret, "-");
}

static void failed_text(const void *row, char ret[static TABLE_TEXT_MAX])
{
        const Bfcd__DeviceRow *d = row;

        if (d->makes && d->destroys)
                snprintf(ret, TABLE_TEXT_MAX, "%llu",
                         (unsigned long long)(d->makes->num_failed + d->destroys->num_failed));
        else
                strcpy(ret, "-");
}

#define CALLS(type, calls, member, ...)                                                                      \
        {                                                                                                    \
                NULL, NULL, 0, type, TABLE_MEMBER(Bfcd__DeviceCalls, member),                                \
                        .via = offsetof(Bfcd__DeviceRow, calls), __VA_ARGS__                                 \
        }

const struct table_column statistics_devices[] = {
        COLUMN("DEVICE", "device", 0, TABLE_TEXT, Bfcd__DeviceRow, id),
        COLUMN("STATE", "state", 0, TABLE_TEXT, Bfcd__DeviceRow, state, .mark = state_mark),
        COLUMN("RESERVED", "bytes_reserved", R, TABLE_SIZE, Bfcd__DeviceRow, bytes_reserved,
               GAUGE("reserved_bytes", "Memory of extents on the device.")),
        COLUMN("PENDING", "bytes_pending", R | WIDE, TABLE_SIZE, Bfcd__DeviceRow, bytes_pending,
               GAUGE("pending_bytes", "Memory of extents that are being made or destroyed.")),
        COLUMN("STANDBY", "bytes_standby", R | WIDE, TABLE_SIZE, Bfcd__DeviceRow, bytes_standby,
               GAUGE("standby_bytes", "Memory that is ready in advance.")),
        COLUMN("UNRECLAIMED", "bytes_unreclaimed", R, TABLE_SIZE, Bfcd__DeviceRow, bytes_unreclaimed,
               .mark = unreclaimed_mark,
               GAUGE("unreclaimed_bytes", "Memory that the device did not return, or that a process keeps.")),
        COLUMN("TOTAL", "bytes_total", R, TABLE_SIZE, Bfcd__DeviceRow, bytes_total,
               GAUGE("size_bytes", "Memory of the device.")),
        { "RESERVED%", NULL, R, TABLE_MADE, .text = reserved_text },
        { "MAKE-TIME", NULL, R | WIDE, TABLE_MADE, .text = make_time_text },
        { "FAILED", NULL, R | WIDE, TABLE_MADE, .text = failed_text },
        { .key = "makes", .via = offsetof(Bfcd__DeviceRow, makes), .json = calls_json },
        { .key = "destroys", .via = offsetof(Bfcd__DeviceRow, destroys), .json = calls_json },
        CALLS(TABLE_NUMBER, makes, num_calls,
              COUNTER("make_calls", "Calls of the device that make an extent.")),
        CALLS(TABLE_NUMBER, makes, num_failed, COUNTER("make_failures", "Such calls that failed.")),
        CALLS(TABLE_NANOSECONDS, makes, total_ns,
              COUNTER("make_seconds", "Time of calls that make an extent.")),
        CALLS(TABLE_NANOSECONDS, makes, longest_ns,
              GAUGE("longest_make_seconds", "Time of the longest call that made an extent.")),
        CALLS(TABLE_NUMBER, destroys, num_calls,
              COUNTER("destroy_calls", "Calls of the device that destroy an extent.")),
        CALLS(TABLE_NUMBER, destroys, num_failed,
              COUNTER("destroy_failures", "Such calls after which the device had not returned the memory.")),
        CALLS(TABLE_NANOSECONDS, destroys, total_ns,
              COUNTER("destroy_seconds", "Time of calls that destroy an extent.")),
        CALLS(TABLE_NANOSECONDS, destroys, longest_ns,
              GAUGE("longest_destroy_seconds", "Time of the longest call that destroyed an extent.")),
        COLUMN("NAME", "name", 0, TABLE_TEXT, Bfcd__DeviceRow, name),
        COLUMN("MPS", "mps", WIDE | TABLE_NULL, TABLE_TEXT, Bfcd__DeviceRow, mps),
        { "UUID", "uuid", WIDE | TABLE_NULL, TABLE_MADE, .text = show_device_uuid },
        { 0 },
};

static json_t *devices_json(const void *row)
{
        const Bfcd__Status *s = row;

        return table_json_rows(statistics_devices, (const void *const *)s->devices, s->n_devices);
}

static void turn_text(const void *row, char ret[static TABLE_TEXT_MAX])
{
        const Bfcd__Status *s = row;
        char longest[TEXT_MAX], recent[TEXT_MAX];

        snprintf(ret, TABLE_TEXT_MAX, "%s; recently %s", text_time(s->longest_turn_ns, longest),
                 text_time(s->recent_longest_turn_ns, recent));
}

/* Of the daemon itself: the daemon tells a tenant none of it. */
static const char *not_told(const void *row)
{
        return ((const Bfcd__Status *)row)->bytes_resident == 0 ? "-" : NULL;
}

const struct table_column statistics_status[] = {
        COLUMN("Version", "version", 0, TABLE_TEXT, Bfcd__Status, version),
        COLUMN("Protocol", "protocol_version", 0, TABLE_NUMBER, Bfcd__Status, protocol_version),
        COLUMN("Process", "pid", 0, TABLE_NUMBER, Bfcd__Status, pid),
        COLUMN("Uptime", "uptime_ms", 0, TABLE_DURATION, Bfcd__Status, uptime_ms,
               GAUGE("uptime_seconds", "Time since the daemon started.")),
        COLUMN("Tenants", "num_tenants", 0, TABLE_NUMBER, Bfcd__Status, num_tenants),
        COLUMN("Sessions", "num_sessions", 0, TABLE_NUMBER, Bfcd__Status, num_sessions,
               GAUGE("sessions", "Sessions of clients.")),
        COLUMN("Max sessions", "max_sessions", 0, TABLE_NUMBER, Bfcd__Status, max_sessions,
               GAUGE("max_sessions", "Sessions of clients that are allowed.")),
        COLUMN("Quarantined", "num_quarantined", 0, TABLE_NUMBER, Bfcd__Status, num_quarantined,
               GAUGE("quarantined_sessions", "Sessions that have ended and whose process has not.")),
        COLUMN("Unresponsive", "num_unresponsive", 0, TABLE_NUMBER, Bfcd__Status, num_unresponsive,
               GAUGE("unresponsive_sessions",
                     "Sessions that have not returned or unmapped memory in time when they were asked to.")),
        COLUMN("Blocks", "num_blocks", 0, TABLE_NUMBER, Bfcd__Status, num_blocks,
               GAUGE("blocks", "Allocated blocks.")),
        COLUMN("Extents", "num_extents", 0, TABLE_NUMBER, Bfcd__Status, num_extents,
               GAUGE("extents", "Extents that back the address space of arenas.")),
        COLUMN("Allocated", "bytes_allocated", 0, TABLE_SIZE, Bfcd__Status, bytes_allocated,
               .instead = not_told,
               GAUGE("daemon_allocated_bytes", "Memory that the daemon has allocated for itself.")),
        COLUMN("Resident", "bytes_resident", 0, TABLE_SIZE, Bfcd__Status, bytes_resident, .instead = not_told,
               GAUGE("daemon_resident_bytes", "Resident memory of the daemon.")),
        { "Longest turn", NULL, 0, TABLE_MADE, .text = turn_text, .instead = not_told },
        COLUMN(NULL, "longest_turn_ns", 0, TABLE_NANOSECONDS, Bfcd__Status, longest_turn_ns,
               GAUGE("loop_longest_turn_seconds",
                     "Longest time that the event loop was busy at once since the daemon started.")),
        COLUMN(NULL, "recent_longest_turn_ns", 0, TABLE_NANOSECONDS, Bfcd__Status, recent_longest_turn_ns,
               GAUGE("loop_recent_longest_turn_seconds",
                     "Longest time that the event loop was busy at once in the last one to two minutes.")),
        COLUMN("Lost log lines", "num_log_lines_lost", 0, TABLE_NUMBER, Bfcd__Status, num_log_lines_lost,
               .instead = not_told,
               COUNTER("log_lines_lost",
                       "Lines of the log that were dropped because its reader was too slow.")),
        COLUMN("Lost records", "num_records_lost", 0, TABLE_NUMBER, Bfcd__Status, num_records_lost,
               .instead = not_told,
               COUNTER("records_lost",
                       "Records that were dropped because the journal, or their file, did not take them.")),
        { .key = "devices", .json = devices_json },
        { 0 },
};

/* ---- the page ------------------------------------------------------------------- */

static json_t *page_columns(const struct table_column *columns)
{
        static const char *const types[] = { [TABLE_TEXT] = "text",
                                             [TABLE_NUMBER] = "count",
                                             [TABLE_SIZE] = "bytes",
                                             [TABLE_DURATION] = "time" };
        json_t *ret = json_array();

        for (const struct table_column *c = columns; !table_is_end(c); c++)
                if (c->page)
                        table_json_push(&ret, json_pack("{ssssss}", "title", c->page, "key", c->key, "type",
                                                        types[c->type]));
        return ret;
}

json_t *statistics_page(void)
{
        json_t *lists = json_object();

        table_json_set(&lists, "partitions", page_columns(statistics_partitions));
        table_json_set(&lists, "tenants", page_columns(statistics_tenants));
        table_json_set(&lists, "leases", page_columns(statistics_leases));
        return show_document("columns", lists);
}
