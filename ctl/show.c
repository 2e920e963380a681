/* The lists of bfcctl: see show.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "ctl/show.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "ctl/process.h"
#include "ctl/table.h"
#include "ctl/text.h"

/* ---- columns --------------------------------------------------------------- */

#define R    TABLE_RIGHT
#define WIDE TABLE_WIDE
#define SUM  TABLE_SUM
/* A value of a row, and one of its statistics. */
#define COLUMN(title, key, flags, type, row, member)                                                         \
        {                                                                                                    \
                title, key, flags, type, TABLE_MEMBER(row, member)                                           \
        }
#define STAT(title, flags, type, row, member)                                                                \
        {                                                                                                    \
                title, NULL, flags, type, TABLE_MEMBER(Bfcd__Statistics, member),                            \
                        .via = offsetof(row, stats)                                                          \
        }
#define STATS(row)                                                                                           \
        {                                                                                                    \
                .type = TABLE_KEYS, .via = offsetof(row, stats), .keys = show_stats_columns                  \
        }

static json_t *fragmentation(const void *row)
{
        const Bfcd__Statistics *f = row;

        return json_real(f->bytes_free ? (double)f->bytes_fragmented / (double)f->bytes_free : 0);
}

#define NUMBER(member)                                                                                       \
        {                                                                                                    \
                .key = #member, .type = TABLE_NUMBER, TABLE_MEMBER(Bfcd__Statistics, member)                 \
        }

const struct table_column show_stats_columns[] = {
        NUMBER(bytes_limit),
        NUMBER(bytes_reserved),
        NUMBER(peak_bytes_reserved),
        NUMBER(lifetime_peak_bytes_reserved),
        NUMBER(bytes_guaranteed),
        NUMBER(bytes_unreclaimed),
        NUMBER(bytes_in_use),
        NUMBER(peak_bytes_in_use),
        NUMBER(lifetime_peak_bytes_in_use),
        NUMBER(bytes_parked),
        NUMBER(bytes_direct),
        NUMBER(bytes_contexts),
        NUMBER(bytes_outside),
        NUMBER(bytes_requested),
        NUMBER(bytes_free),
        NUMBER(largest_free_block_bytes),
        NUMBER(bytes_fragmented),
        { .key = "fragmentation", .json = fragmentation },
        NUMBER(largest_alloc_size),
        NUMBER(num_allocs),
        NUMBER(num_blocks),
        NUMBER(num_sessions),
        NUMBER(num_extents),
        NUMBER(num_refusals),
        NUMBER(num_over_quota),
        NUMBER(num_out_of_memory),
        NUMBER(last_refusal_time_ms),
        NUMBER(peak_bytes_in_use_time_ms),
        NUMBER(peak_bytes_reserved_time_ms),
        { 0 },
};

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

static const struct table_column tenant_columns[] = {
        COLUMN("TENANT", "tenant", 0, TABLE_TEXT, Bfcd__TenantRow, tenant),
        COLUMN("PARTITION", "partition", 0, TABLE_TEXT, Bfcd__TenantRow, partition),
        COLUMN(NULL, "removed", 0, TABLE_BOOL, Bfcd__TenantRow, is_removed),
        COLUMN(NULL, "bytes_pending", 0, TABLE_SIZE, Bfcd__TenantRow, bytes_pending),
        COLUMN(NULL, "num_leases", 0, TABLE_NUMBER, Bfcd__TenantRow, num_leases),
        STATS(Bfcd__TenantRow),
        { .key = "peak_bytes_requested", /* not of a partition */
          .type = TABLE_SIZE,
          .via = offsetof(Bfcd__TenantRow, stats),
          TABLE_MEMBER(Bfcd__Statistics, peak_bytes_requested) },
        STAT("IN-USE", R | SUM, TABLE_SIZE, Bfcd__TenantRow, bytes_in_use),
        STAT("PEAK", R, TABLE_SIZE, Bfcd__TenantRow, peak_bytes_in_use),
        STAT("AGO", R | WIDE, TABLE_AGO, Bfcd__TenantRow, peak_bytes_in_use_time_ms),
        { "RESERVED", NULL, R | SUM, TABLE_SIZE, TABLE_MEMBER(Bfcd__Statistics, bytes_reserved),
          .via = offsetof(Bfcd__TenantRow, stats), .mark = tenant_mark },
        STAT("PEAK-RES", R | WIDE, TABLE_SIZE, Bfcd__TenantRow, peak_bytes_reserved),
        { "LIMIT", NULL, R, TABLE_SIZE, TABLE_MEMBER(Bfcd__Statistics, bytes_limit),
          .via = offsetof(Bfcd__TenantRow, stats), .instead = no_limit },
        STAT("REFUSED", R | TABLE_NARROW | SUM, TABLE_NUMBER, Bfcd__TenantRow, num_refusals),
        STAT("EDQUOT", R | WIDE | SUM, TABLE_NUMBER, Bfcd__TenantRow, num_over_quota),
        STAT("ENOMEM", R | WIDE | SUM, TABLE_NUMBER, Bfcd__TenantRow, num_out_of_memory),
        STAT("LAST", R | WIDE, TABLE_AGO, Bfcd__TenantRow, last_refusal_time_ms),
        STAT("UNRECLAIMED", R | WIDE | SUM, TABLE_SIZE, Bfcd__TenantRow, bytes_unreclaimed),
        STAT("PARKED", R | WIDE | SUM, TABLE_SIZE, Bfcd__TenantRow, bytes_parked),
        STAT("DIRECT", R | WIDE | SUM, TABLE_SIZE, Bfcd__TenantRow, bytes_direct),
        STAT("CONTEXTS", R | WIDE | SUM, TABLE_SIZE, Bfcd__TenantRow, bytes_contexts),
        STAT("OUTSIDE", R | WIDE | SUM, TABLE_SIZE, Bfcd__TenantRow, bytes_outside),
        COLUMN("WAITING", "num_waiting", R | WIDE | SUM, TABLE_NUMBER, Bfcd__TenantRow, num_waiting),
        COLUMN("FOR", "bytes_waiting", R | WIDE | SUM, TABLE_SIZE, Bfcd__TenantRow, bytes_waiting),
        { 0 },
};

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

static const struct table_column partition_columns[] = {
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
        STATS(Bfcd__PartitionRow),
        STAT("IN-USE", R, TABLE_SIZE, Bfcd__PartitionRow, bytes_in_use),
        { "PEAK", NULL, R | WIDE, TABLE_SIZE, TABLE_MEMBER(Bfcd__Statistics, peak_bytes_in_use),
          .via = offsetof(Bfcd__PartitionRow, stats), .instead = no_peak },
        STAT("AGO", R | WIDE, TABLE_AGO, Bfcd__PartitionRow, peak_bytes_in_use_time_ms),
        STAT("RESERVED", R, TABLE_SIZE, Bfcd__PartitionRow, bytes_reserved),
        { "PEAK-RES", NULL, R | WIDE, TABLE_SIZE, TABLE_MEMBER(Bfcd__Statistics, peak_bytes_reserved),
          .via = offsetof(Bfcd__PartitionRow, stats), .instead = no_peak },
        STAT("GUARANTEED", R, TABLE_SIZE, Bfcd__PartitionRow, bytes_guaranteed),
        STAT("LIMIT", R, TABLE_SIZE, Bfcd__PartitionRow, bytes_limit),
        { "PAGES", "pages", .type = TABLE_MADE, .text = pages_text },
        STAT("ENOMEM", R, TABLE_NUMBER, Bfcd__PartitionRow, num_out_of_memory),
        STAT("UNRECLAIMED", R | WIDE, TABLE_SIZE, Bfcd__PartitionRow, bytes_unreclaimed),
        STAT("DIRECT", R | WIDE, TABLE_SIZE, Bfcd__PartitionRow, bytes_direct),
        STAT("CONTEXTS", R | WIDE, TABLE_SIZE, Bfcd__PartitionRow, bytes_contexts),
        { 0 },
};

/* The client has blocks and reports no usage: an older client, or one without a page for it. */
static const char *no_usage(const void *row)
{
        const Bfcd__SessionRow *s = row;

        return s->bytes_in_use > 0 && s->client_bytes_reserved == 0 ? "-" : NULL;
}

static enum table_mark session_mark(const void *row)
{
        const Bfcd__SessionRow *s = row;

        return strcmp(s->state, "live") == 0 && !s->is_unresponsive ? TABLE_PLAIN : TABLE_WARNING;
}

static void user_text(const void *row, char ret[static TABLE_TEXT_MAX])
{
        process_user(((const Bfcd__SessionRow *)row)->uid, ret);
}

static void job_text(const void *row, char ret[static TABLE_TEXT_MAX])
{
        const Bfcd__SessionRow *s = row;
        const char *job = process_job(s->pid, s->uid, s->name, ret);

        memmove(ret, job, strlen(job) + 1);
}

static void unit_text(const void *row, char ret[static TABLE_TEXT_MAX])
{
        process_unit(((const Bfcd__SessionRow *)row)->pid, ret);
}

static void command_text(const void *row, char ret[static TABLE_TEXT_MAX])
{
        process_command(((const Bfcd__SessionRow *)row)->pid, ((const Bfcd__SessionRow *)row)->uid, ret);
}

_Static_assert(PROCESS_TEXT_MAX <= TABLE_TEXT_MAX, "a column has room for the texts of a process");

static json_t *session_leases_json(const void *row)
{
        const Bfcd__SessionRow *s = row;
        json_t *array = json_array();

        for (size_t i = 0; array && i < s->n_leases; i++)
                json_array_append_new(array, table_json_string(s->leases[i]));
        return array;
}

static const char *nothing_outside(const void *row)
{
        return ((const Bfcd__SessionRow *)row)->bytes_outside == 0 ? "-" : NULL;
}

static void session_leases_text(const void *row, char ret[static TABLE_TEXT_MAX])
{
        const Bfcd__SessionRow *s = row;

        ret[0] = '\0';
        for (size_t i = 0; i < s->n_leases; i++)
                snprintf(ret + strlen(ret), TABLE_TEXT_MAX - strlen(ret), "%s%s", i > 0 ? "," : "",
                         s->leases[i]);
}

static const struct table_column session_columns[] = {
        COLUMN("SESSION", "session_id", R, TABLE_NUMBER, Bfcd__SessionRow, session_id),
        COLUMN("TENANT", "tenant", 0, TABLE_TEXT, Bfcd__SessionRow, tenant),
        { "USER", "user", .type = TABLE_MADE, .text = user_text },
        COLUMN("UID", "uid", R | WIDE, TABLE_NUMBER, Bfcd__SessionRow, uid),
        COLUMN("PID", "pid", R, TABLE_NUMBER, Bfcd__SessionRow, pid),
        { "JOB", NULL, TABLE_NARROW | TABLE_CUT_FIRST, TABLE_MADE, .text = job_text },
        COLUMN("NAME", "name", WIDE | TABLE_CUT_FIRST, TABLE_TEXT, Bfcd__SessionRow, name),
        { "STATE", "state", 0, TABLE_TEXT, TABLE_MEMBER(Bfcd__SessionRow, state), .mark = session_mark },
        COLUMN("UNRESPONSIVE", "unresponsive", WIDE, TABLE_BOOL, Bfcd__SessionRow, is_unresponsive),
        COLUMN("AGE", "age_ms", R | WIDE, TABLE_DURATION, Bfcd__SessionRow, age_ms),
        COLUMN("BLOCKS", "num_blocks", R | WIDE | SUM, TABLE_NUMBER, Bfcd__SessionRow, num_blocks),
        COLUMN("HELD", "bytes_in_use", R | SUM, TABLE_SIZE, Bfcd__SessionRow, bytes_in_use),
        COLUMN("PEAK-HELD", "peak_bytes_in_use", R | WIDE, TABLE_SIZE, Bfcd__SessionRow, peak_bytes_in_use),
        COLUMN(NULL, "client_bytes_reserved", 0, TABLE_SIZE, Bfcd__SessionRow, client_bytes_reserved),
        { "USED", "client_bytes_in_use", R | WIDE | SUM, TABLE_SIZE,
          TABLE_MEMBER(Bfcd__SessionRow, client_bytes_in_use), .instead = no_usage },
        { "IDLE", "client_bytes_idle", R | SUM, TABLE_SIZE, TABLE_MEMBER(Bfcd__SessionRow, client_bytes_idle),
          .instead = no_usage },
        COLUMN("DIRECT", "bytes_direct", R | WIDE | SUM, TABLE_SIZE, Bfcd__SessionRow, bytes_direct),
        COLUMN("CONTEXTS", "bytes_contexts", R | WIDE | SUM, TABLE_SIZE, Bfcd__SessionRow, bytes_contexts),
        { "OUTSIDE", "bytes_outside", R | WIDE | SUM, TABLE_SIZE,
          TABLE_MEMBER(Bfcd__SessionRow, bytes_outside), .instead = nothing_outside },
        { "LEASES", NULL, WIDE | TABLE_CUT_FIRST, TABLE_MADE, .text = session_leases_text },
        { .key = "leases", .json = session_leases_json },
        { "UNIT", "unit", WIDE | TABLE_CUT_FIRST, TABLE_MADE, .text = unit_text },
        { "COMMAND", "command", WIDE | TABLE_CUT_FIRST, TABLE_MADE, .text = command_text },
        { 0 },
};

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

static const struct table_column lease_columns[] = {
        COLUMN("LEASE", "name", 0, TABLE_TEXT, Bfcd__LeaseRow, name),
        COLUMN("TENANT", "tenant", 0, TABLE_TEXT, Bfcd__LeaseRow, tenant),
        COLUMN("PARTITION", "partition", 0, TABLE_TEXT, Bfcd__LeaseRow, partition),
        COLUMN("STATE", "state", 0, TABLE_TEXT, Bfcd__LeaseRow, state),
        STAT("IN-USE", R | SUM, TABLE_SIZE, Bfcd__LeaseRow, bytes_in_use),
        STAT("PEAK", R | WIDE, TABLE_SIZE, Bfcd__LeaseRow, peak_bytes_in_use),
        STAT("RESERVED", R | SUM, TABLE_SIZE, Bfcd__LeaseRow, bytes_reserved),
        STAT("LIMIT", R, TABLE_SIZE, Bfcd__LeaseRow, bytes_limit),
        STAT("RESERVE", R | WIDE | SUM, TABLE_SIZE, Bfcd__LeaseRow, bytes_guaranteed),
        STAT("DIRECT", R | WIDE | SUM, TABLE_SIZE, Bfcd__LeaseRow, bytes_direct),
        STAT("CONTEXTS", R | WIDE | SUM, TABLE_SIZE, Bfcd__LeaseRow, bytes_contexts),
        STAT("OUTSIDE", R | WIDE | SUM, TABLE_SIZE, Bfcd__LeaseRow, bytes_outside),
        STAT("SESSIONS", R | WIDE | SUM, TABLE_NUMBER, Bfcd__LeaseRow, num_sessions),
        STAT("REFUSED", R | WIDE | SUM, TABLE_NUMBER, Bfcd__LeaseRow, num_refusals),
        COLUMN("AGE", "age_ms", R | WIDE, TABLE_DURATION, Bfcd__LeaseRow, age_ms),
        { "TTL", "ttl_ms", R, TABLE_DURATION, TABLE_MEMBER(Bfcd__LeaseRow, ttl_ms), .instead = no_ttl },
        COLUMN(NULL, "evicts", 0, TABLE_BOOL, Bfcd__LeaseRow, evicts),
        COLUMN(NULL, "grace_ms", 0, TABLE_DURATION, Bfcd__LeaseRow, grace_ms),
        COLUMN(NULL, "bytes_pending", 0, TABLE_SIZE, Bfcd__LeaseRow, bytes_pending),
        COLUMN("WAITING", "num_waiting", R | WIDE | SUM, TABLE_NUMBER, Bfcd__LeaseRow, num_waiting),
        COLUMN(NULL, "bytes_waiting", 0, TABLE_SIZE, Bfcd__LeaseRow, bytes_waiting),
        COLUMN(NULL, "waited_ns", 0, TABLE_NUMBER, Bfcd__LeaseRow, waited_ns),
        { "MATCH", NULL, WIDE, TABLE_MADE, .text = lease_match_text },
        COLUMN(NULL, "match_kind", 0, TABLE_TEXT, Bfcd__LeaseRow, match_kind),
        COLUMN(NULL, "match", 0, TABLE_TEXT, Bfcd__LeaseRow, match),
        COLUMN("BY", "made_by", WIDE, TABLE_TEXT, Bfcd__LeaseRow, made_by),
        STATS(Bfcd__LeaseRow),
        { 0 },
};

static const char *no_session(const void *row)
{
        return ((const Bfcd__BlockRow *)row)->session_id == 0 ? "shared" : NULL;
}

static const struct table_column block_columns[] = {
        COLUMN("BLOCK", "block_id", R, TABLE_ID, Bfcd__BlockRow, block_id),
        COLUMN(NULL, "lease", 0, TABLE_TEXT, Bfcd__BlockRow, lease),
        { "SESSION", "session_id", R, TABLE_NUMBER, TABLE_MEMBER(Bfcd__BlockRow, session_id),
          .instead = no_session },
        COLUMN("TENANT", "tenant", 0, TABLE_TEXT, Bfcd__BlockRow, tenant),
        COLUMN("PARTITION", "partition", 0, TABLE_TEXT, Bfcd__BlockRow, partition),
        COLUMN("REGION", "region_id", R | WIDE, TABLE_NUMBER, Bfcd__BlockRow, region_id),
        COLUMN("OFFSET", "offset", R | WIDE, TABLE_HEX, Bfcd__BlockRow, offset),
        COLUMN("SIZE", "n_bytes", R, TABLE_SIZE, Bfcd__BlockRow, n_bytes),
        COLUMN("REQUESTED", "n_requested", R | WIDE, TABLE_SIZE, Bfcd__BlockRow, n_requested),
        COLUMN("AGE", "age_ms", R, TABLE_DURATION, Bfcd__BlockRow, age_ms),
        COLUMN("STATE", "state", 0, TABLE_TEXT, Bfcd__BlockRow, state),
        COLUMN(NULL, "tag", 0, TABLE_TEXT, Bfcd__BlockRow, tag),
        COLUMN(NULL, "shared_name", TABLE_NULL, TABLE_TEXT, Bfcd__BlockRow, shared_name),
        { 0 },
};

static const struct table_column extent_columns[] = {
        COLUMN("TENANT", "tenant", 0, TABLE_TEXT, Bfcd__ExtentRow, tenant),
        COLUMN("PARTITION", "partition", 0, TABLE_TEXT, Bfcd__ExtentRow, partition),
        COLUMN("LEASE", "lease", WIDE, TABLE_TEXT, Bfcd__ExtentRow, lease),
        COLUMN("REGION", "region_id", R, TABLE_NUMBER, Bfcd__ExtentRow, region_id),
        COLUMN("REGION-SIZE", "region_bytes", R | WIDE, TABLE_SIZE, Bfcd__ExtentRow, region_bytes),
        COLUMN("OFFSET", "offset", R, TABLE_HEX, Bfcd__ExtentRow, offset),
        COLUMN("SIZE", "n_bytes", R | SUM, TABLE_SIZE, Bfcd__ExtentRow, n_bytes),
        COLUMN("RETIRING", "retiring", 0, TABLE_BOOL, Bfcd__ExtentRow, is_retiring),
        { 0 },
};

/* UINT64_MAX: the daemon does not know it, or it is for ever. */
static json_t *known_json(uint64_t n)
{
        return n == UINT64_MAX ? json_null() : table_json_number(n);
}

static const char *keep_instead(const void *row)
{
        uint64_t n_ms = ((const Bfcd__SharedRow *)row)->keep_ms;

        return n_ms == UINT64_MAX ? "forever" : n_ms == 0 ? "-" : NULL;
}

static json_t *keep_json(const void *row)
{
        return known_json(((const Bfcd__SharedRow *)row)->keep_ms);
}

/* The time of a block with references has not begun. */
static const char *left_instead(const void *row)
{
        const Bfcd__SharedRow *shared = row;

        return shared->num_references > 0 ? "-" : shared->kept_ms == UINT64_MAX ? "forever" : NULL;
}

static json_t *left_json(const void *row)
{
        const Bfcd__SharedRow *shared = row;

        return shared->num_references > 0 ? json_null() : known_json(shared->kept_ms);
}

static json_t *lacking_json(const void *row)
{
        return known_json(((const Bfcd__WaitingRow *)row)->bytes_lacking);
}

static const char *lacking_instead(const void *row)
{
        return ((const Bfcd__WaitingRow *)row)->bytes_lacking == UINT64_MAX ? "-" : NULL;
}

static json_t *estimate_json(const void *row)
{
        return known_json(((const Bfcd__WaitingRow *)row)->estimate_ms);
}

static const char *estimate_instead(const void *row)
{
        return ((const Bfcd__WaitingRow *)row)->estimate_ms == UINT64_MAX ? "-" : NULL;
}

/* Only the first request of a tenant has a place in the partition. */
static json_t *place_json(const void *row)
{
        uint64_t place = ((const Bfcd__WaitingRow *)row)->partition_position;

        return place == 0 ? json_null() : table_json_number(place);
}

static const char *place_instead(const void *row)
{
        return ((const Bfcd__WaitingRow *)row)->partition_position == 0 ? "-" : NULL;
}

static const struct table_column refusal_columns[] = {
        COLUMN("AGO", "time_ms", R, TABLE_AGO, Bfcd__RefusalRow, time_ms),
        COLUMN("TENANT", "tenant", 0, TABLE_TEXT, Bfcd__RefusalRow, tenant),
        COLUMN("PARTITION", "partition", 0, TABLE_TEXT, Bfcd__RefusalRow, partition),
        COLUMN("LEASE", "lease", WIDE, TABLE_TEXT, Bfcd__RefusalRow, lease),
        COLUMN("SESSION", "session_id", R | WIDE, TABLE_NUMBER, Bfcd__RefusalRow, session_id),
        COLUMN("PROGRAM", "program", TABLE_CUT_FIRST, TABLE_TEXT, Bfcd__RefusalRow, program),
        COLUMN("PID", "pid", R, TABLE_NUMBER, Bfcd__RefusalRow, pid),
        COLUMN("SIZE", "n_bytes", R, TABLE_SIZE, Bfcd__RefusalRow, n_bytes),
        COLUMN("LIMIT", "limit", 0, TABLE_TEXT, Bfcd__RefusalRow, limit),
        COLUMN("SENTENCE", "sentence", WIDE, TABLE_TEXT, Bfcd__RefusalRow, sentence),
        { 0 },
};

static const struct table_column waiting_columns[] = {
        COLUMN("PARTITION", "partition", 0, TABLE_TEXT, Bfcd__WaitingRow, partition),
        { "PLACE", "partition_position", R | WIDE, TABLE_NUMBER,
          TABLE_MEMBER(Bfcd__WaitingRow, partition_position), .instead = place_instead, .json = place_json },
        COLUMN("TENANT", "tenant", 0, TABLE_TEXT, Bfcd__WaitingRow, tenant),
        COLUMN("LEASE", "lease", WIDE, TABLE_TEXT, Bfcd__WaitingRow, lease),
        COLUMN("POS", "position", R, TABLE_NUMBER, Bfcd__WaitingRow, position),
        COLUMN("SESSION", "session_id", R, TABLE_NUMBER, Bfcd__WaitingRow, session_id),
        COLUMN("PID", "pid", R | WIDE, TABLE_NUMBER, Bfcd__WaitingRow, pid),
        COLUMN("ASKED", "n_bytes", R, TABLE_SIZE, Bfcd__WaitingRow, n_bytes),
        { "LACKS", "bytes_lacking", R, TABLE_SIZE, TABLE_MEMBER(Bfcd__WaitingRow, bytes_lacking),
          .instead = lacking_instead, .json = lacking_json },
        COLUMN(NULL, "wait_ms", 0, TABLE_NUMBER, Bfcd__WaitingRow, wait_ms),
        COLUMN("SINCE", "waited_ms", R | WIDE, TABLE_DURATION, Bfcd__WaitingRow, waited_ms),
        COLUMN("LEFT", "left_ms", R, TABLE_DURATION, Bfcd__WaitingRow, left_ms),
        { "ESTIMATE", "estimate_ms", R, TABLE_DURATION, TABLE_MEMBER(Bfcd__WaitingRow, estimate_ms),
          .instead = estimate_instead, .json = estimate_json },
        { 0 },
};

static const struct table_column kept_columns[] = {
        COLUMN("TENANT", "tenant", 0, TABLE_TEXT, Bfcd__SharedRow, tenant),
        COLUMN("PARTITION", "partition", 0, TABLE_TEXT, Bfcd__SharedRow, partition),
        COLUMN("NAME", "name", 0, TABLE_TEXT, Bfcd__SharedRow, name),
        COLUMN("BLOCK", "block_id", R | WIDE, TABLE_ID, Bfcd__SharedRow, block_id),
        COLUMN("SIZE", "n_bytes", R, TABLE_SIZE, Bfcd__SharedRow, n_bytes),
        COLUMN("METADATA", "n_metadata_bytes", R | WIDE, TABLE_SIZE, Bfcd__SharedRow, n_metadata_bytes),
        COLUMN("REFERENCES", "num_references", R, TABLE_NUMBER, Bfcd__SharedRow, num_references),
        { "KEEP", "keep_ms", R, TABLE_DURATION, TABLE_MEMBER(Bfcd__SharedRow, keep_ms),
          .instead = keep_instead, .json = keep_json },
        { "LEFT", "left_ms", R, TABLE_DURATION, TABLE_MEMBER(Bfcd__SharedRow, kept_ms),
          .instead = left_instead, .json = left_json },
        { 0 },
};

static const struct table_column shared_columns[] = {
        COLUMN("NAME", "name", 0, TABLE_TEXT, Bfcd__SharedRow, name),
        COLUMN("TENANT", "tenant", 0, TABLE_TEXT, Bfcd__SharedRow, tenant),
        COLUMN("PARTITION", "partition", 0, TABLE_TEXT, Bfcd__SharedRow, partition),
        COLUMN("BLOCK", "block_id", R | WIDE, TABLE_ID, Bfcd__SharedRow, block_id),
        COLUMN("SIZE", "n_bytes", R, TABLE_SIZE, Bfcd__SharedRow, n_bytes),
        COLUMN("REQUESTED", "n_requested", R | WIDE, TABLE_SIZE, Bfcd__SharedRow, n_requested),
        COLUMN("REFERENCES", "num_references", R, TABLE_NUMBER, Bfcd__SharedRow, num_references),
        COLUMN("AGE", "age_ms", R, TABLE_DURATION, Bfcd__SharedRow, age_ms),
        { "KEEP", "keep_ms", R, TABLE_DURATION, TABLE_MEMBER(Bfcd__SharedRow, keep_ms),
          .instead = keep_instead, .json = keep_json },
        { 0 },
};

static void matching_text(const void *row, char ret[static TABLE_TEXT_MAX])
{
        const Bfcd__Whoami *w = row;
        size_t n = 0;

        for (size_t i = 0; i < w->n_matching_tenants && n < TABLE_TEXT_MAX; i++)
                n += (size_t)snprintf(ret + n, TABLE_TEXT_MAX - n, "%s%s", i ? ", " : "",
                                      w->matching_tenants[i]);
        if (n >= TABLE_TEXT_MAX)
                strcpy(ret + TABLE_TEXT_MAX - 4, "...");
}

static json_t *matching_json(const void *row)
{
        const Bfcd__Whoami *w = row;
        json_t *ret = json_array();

        for (size_t i = 0; i < w->n_matching_tenants; i++)
                table_json_push(&ret, table_json_string(w->matching_tenants[i]));
        return ret;
}

static void whoami_user_text(const void *row, char ret[static TABLE_TEXT_MAX])
{
        process_user(((const Bfcd__Whoami *)row)->uid, ret);
}

static const struct table_column whoami_columns[] = {
        COLUMN("Tenant", "tenant", 0, TABLE_TEXT, Bfcd__Whoami, tenant),
        COLUMN("Session", "session_id", 0, TABLE_NUMBER, Bfcd__Whoami, session_id),
        { "User", NULL, .type = TABLE_MADE, .text = whoami_user_text },
        COLUMN("User id", "uid", 0, TABLE_NUMBER, Bfcd__Whoami, uid),
        COLUMN("Group id", "gid", 0, TABLE_NUMBER, Bfcd__Whoami, gid),
        COLUMN("Process", "pid", 0, TABLE_NUMBER, Bfcd__Whoami, pid),
        COLUMN("Admin", "admin", 0, TABLE_BOOL, Bfcd__Whoami, admin),
        COLUMN("Monitor", "monitor", 0, TABLE_BOOL, Bfcd__Whoami, monitor),
        { "Matching tenants", "matching_tenants", .type = TABLE_MADE, .text = matching_text,
          .json = matching_json },
        { 0 },
};

#define UUID_BYTES 16u

void show_device_uuid(const void *device, char ret[static TABLE_TEXT_MAX])
{
        const Bfcd__DeviceRow *row = device;
        size_t n;

        if (row->uuid.len != UUID_BYTES)
                return;
        n = (size_t)snprintf(ret, TABLE_TEXT_MAX, "%s", strncmp(row->id, "MIG-", 4) == 0 ? "MIG-" : "GPU-");
        for (size_t i = 0; i < UUID_BYTES; i++)
                n += (size_t)snprintf(ret + n, TABLE_TEXT_MAX - n, "%s%02x",
                                      i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", row->uuid.data[i]);
}

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

static const struct table_column calls_columns[] = {
        COLUMN(NULL, "num_calls", 0, TABLE_NUMBER, Bfcd__DeviceCalls, num_calls),
        COLUMN(NULL, "num_failed", 0, TABLE_NUMBER, Bfcd__DeviceCalls, num_failed),
        COLUMN(NULL, "total_ns", 0, TABLE_NUMBER, Bfcd__DeviceCalls, total_ns),
        COLUMN(NULL, "longest_ns", 0, TABLE_NUMBER, Bfcd__DeviceCalls, longest_ns),
        { 0 },
};

static json_t *makes_json(const void *row)
{
        const Bfcd__DeviceCalls *calls = ((const Bfcd__DeviceRow *)row)->makes;

        return calls ? table_json(calls_columns, calls) : json_null();
}

static json_t *destroys_json(const void *row)
{
        const Bfcd__DeviceCalls *calls = ((const Bfcd__DeviceRow *)row)->destroys;

        return calls ? table_json(calls_columns, calls) : json_null();
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

static const struct table_column device_columns[] = {
        COLUMN("DEVICE", "device", 0, TABLE_TEXT, Bfcd__DeviceRow, id),
        { "STATE", "state", 0, TABLE_TEXT, TABLE_MEMBER(Bfcd__DeviceRow, state), .mark = state_mark },
        COLUMN("RESERVED", "bytes_reserved", R, TABLE_SIZE, Bfcd__DeviceRow, bytes_reserved),
        COLUMN("PENDING", "bytes_pending", R | WIDE, TABLE_SIZE, Bfcd__DeviceRow, bytes_pending),
        COLUMN("STANDBY", "bytes_standby", R | WIDE, TABLE_SIZE, Bfcd__DeviceRow, bytes_standby),
        { "UNRECLAIMED", "bytes_unreclaimed", R, TABLE_SIZE, TABLE_MEMBER(Bfcd__DeviceRow, bytes_unreclaimed),
          .mark = unreclaimed_mark },
        COLUMN("TOTAL", "bytes_total", R, TABLE_SIZE, Bfcd__DeviceRow, bytes_total),
        { "RESERVED%", NULL, R, TABLE_MADE, .text = reserved_text },
        { "MAKE-TIME", NULL, R | WIDE, TABLE_MADE, .text = make_time_text },
        { "FAILED", NULL, R | WIDE, TABLE_MADE, .text = failed_text },
        { .key = "makes", .json = makes_json },
        { .key = "destroys", .json = destroys_json },
        COLUMN("NAME", "name", 0, TABLE_TEXT, Bfcd__DeviceRow, name),
        COLUMN("MPS", "mps", WIDE | TABLE_NULL, TABLE_TEXT, Bfcd__DeviceRow, mps),
        { "UUID", "uuid", WIDE | TABLE_NULL, TABLE_MADE, .text = show_device_uuid },
        { 0 },
};

static json_t *devices_json(const void *row)
{
        const Bfcd__Status *s = row;

        return table_json_rows(device_columns, (const void *const *)s->devices, s->n_devices);
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

static const struct table_column status_columns[] = {
        COLUMN("Version", "version", 0, TABLE_TEXT, Bfcd__Status, version),
        COLUMN("Protocol", "protocol_version", 0, TABLE_NUMBER, Bfcd__Status, protocol_version),
        COLUMN("Process", "pid", 0, TABLE_NUMBER, Bfcd__Status, pid),
        COLUMN("Uptime", "uptime_ms", 0, TABLE_DURATION, Bfcd__Status, uptime_ms),
        COLUMN("Tenants", "num_tenants", 0, TABLE_NUMBER, Bfcd__Status, num_tenants),
        COLUMN("Sessions", "num_sessions", 0, TABLE_NUMBER, Bfcd__Status, num_sessions),
        COLUMN("Max sessions", "max_sessions", 0, TABLE_NUMBER, Bfcd__Status, max_sessions),
        COLUMN("Quarantined", "num_quarantined", 0, TABLE_NUMBER, Bfcd__Status, num_quarantined),
        COLUMN("Unresponsive", "num_unresponsive", 0, TABLE_NUMBER, Bfcd__Status, num_unresponsive),
        COLUMN("Blocks", "num_blocks", 0, TABLE_NUMBER, Bfcd__Status, num_blocks),
        COLUMN("Extents", "num_extents", 0, TABLE_NUMBER, Bfcd__Status, num_extents),
        { "Allocated", "bytes_allocated", 0, TABLE_SIZE, TABLE_MEMBER(Bfcd__Status, bytes_allocated),
          .instead = not_told },
        { "Resident", "bytes_resident", 0, TABLE_SIZE, TABLE_MEMBER(Bfcd__Status, bytes_resident),
          .instead = not_told },
        { "Longest turn", NULL, 0, TABLE_MADE, .text = turn_text, .instead = not_told },
        COLUMN(NULL, "longest_turn_ns", 0, TABLE_NUMBER, Bfcd__Status, longest_turn_ns),
        COLUMN(NULL, "recent_longest_turn_ns", 0, TABLE_NUMBER, Bfcd__Status, recent_longest_turn_ns),
        { "Lost log lines", "num_log_lines_lost", 0, TABLE_NUMBER,
          TABLE_MEMBER(Bfcd__Status, num_log_lines_lost), .instead = not_told },
        { "Lost records", "num_records_lost", 0, TABLE_NUMBER, TABLE_MEMBER(Bfcd__Status, num_records_lost),
          .instead = not_told },
        { .key = "devices", .json = devices_json },
        { 0 },
};

/* ---- lists ---------------------------------------------------------------- */

static const struct view {
        const char *name;
        const struct table_column *columns;
        size_t rows, n_rows; /* where a list has them; n_rows 0: it is one row, shown as lines */
        const char *nothing; /* instead of a table without rows */
} views[] = {
#define ROWS(noun, columns, nothing)                                                                         \
        {                                                                                                    \
#noun, columns, offsetof(struct list, noun), offsetof(struct list, n_##noun), nothing        \
        }
        [BFCD__LIST__KIND__STATUS] = { "status", status_columns, offsetof(struct list, status), 0, NULL },
        [BFCD__LIST__KIND__PARTITIONS] = ROWS(partitions, partition_columns, "No partitions."),
        [BFCD__LIST__KIND__TENANTS] = ROWS(tenants, tenant_columns, "No tenants."),
        [BFCD__LIST__KIND__SESSIONS] = ROWS(sessions, session_columns, "No sessions."),
        [BFCD__LIST__KIND__SHARED] = ROWS(shared, shared_columns, "No shared blocks."),
        [BFCD__LIST__KIND__EXTENTS] = ROWS(extents, extent_columns, "No extents."),
        [BFCD__LIST__KIND__WAITING] = ROWS(waiting, waiting_columns, "No request waits."),
        [BFCD__LIST__KIND__REFUSALS] = ROWS(refusals, refusal_columns, "No request was refused."),
        [BFCD__LIST__KIND__KEPT] = { "keep", kept_columns, offsetof(struct list, shared),
                                     offsetof(struct list, n_shared), "No kept blocks." },
        [BFCD__LIST__KIND__LEASES] = ROWS(leases, lease_columns, "No leases."),
        [BFCD__LIST__KIND__WHOAMI] = { "whoami", whoami_columns, offsetof(struct list, whoami), 0, NULL },
#undef ROWS
};

/* The rows, or the one row. */
static const void *rows_of(const struct view *view, const struct list *l, size_t *ret_n_rows)
{
        const void *rows;

        memcpy(&rows, (const char *)l + view->rows, sizeof(rows));
        *ret_n_rows = view->n_rows ? *(const size_t *)((const char *)l + view->n_rows) : 1;
        return rows;
}

const struct table_column *show_columns(Bfcd__List__Kind kind)
{
        return views[kind].columns;
}

void show_sort(Bfcd__List__Kind kind, struct list *l, const struct table_column *by)
{
        size_t n_rows;
        const void *rows = rows_of(&views[kind], l, &n_rows);

        table_sort(by, (const void **)(uintptr_t)rows, n_rows);
}

int show_table(FILE *out, Bfcd__List__Kind kind, const struct list *l)
{
        const struct view *view = &views[kind];
        size_t n_rows;
        const void *rows = rows_of(view, l, &n_rows);
        int r = view->n_rows ? table_print(out, view->columns, rows, n_rows, view->nothing)
                             : table_print_upright(out, view->columns, rows);

        if (r < 0 || kind != BFCD__LIST__KIND__STATUS)
                return r;
        fputc('\n', out);
        return table_print(out, device_columns, (const void *const *)l->status->devices, l->status->n_devices,
                           NULL);
}

json_t *show_json(Bfcd__List__Kind kind, const struct list *l)
{
        const struct view *view = &views[kind];
        size_t n_rows;
        const void *rows = rows_of(view, l, &n_rows);

        return show_document(view->name, view->n_rows ? table_json_rows(view->columns, rows, n_rows)
                                                      : table_json(view->columns, rows));
}

/* ---- blocks -------------------------------------------------------------- */

#define BLOCKS_AT_ONCE 128u /* rows of the table that are kept for their widths */

struct show_blocks {
        FILE *out;
        struct table *table; /* NULL: JSON */
        size_t n_rows;
};

int show_blocks_new(FILE *out, bool json, struct show_blocks **ret)
{
        struct show_blocks *s = calloc(1, sizeof(*s));

        if (!s || (!json && table_new(block_columns, "No blocks.", &s->table) < 0)) {
                free(s);
                return -ENOMEM;
        }
        s->out = out;
        *ret = s;
        return 0;
}

struct show_blocks *show_blocks_free(struct show_blocks *s)
{
        if (s)
                table_free(s->table);
        free(s);
        return NULL;
}

int show_blocks_add(struct show_blocks *s, const Bfcd__BlockRow *row)
{
        size_t n = s->n_rows++;
        int r;

        if (s->table) {
                r = table_add(s->table, row);
                return r == 0 && s->n_rows % BLOCKS_AT_ONCE == 0 ? table_flush(s->table, s->out) : r;
        }
        if (n == 0)
                fprintf(s->out, "{\n  \"schema\": %d,\n  \"blocks\": [\n    ", SHOW_SCHEMA);
        else
                fputs(",\n    ", s->out);
        table_json_line(s->out, block_columns, row);
        return ferror(s->out) ? -EIO : 0;
}

int show_blocks_end(struct show_blocks *s)
{
        if (s->table)
                return table_flush(s->table, s->out);
        if (s->n_rows == 0)
                fprintf(s->out, "{\n  \"schema\": %d,\n  \"blocks\": []\n}\n", SHOW_SCHEMA);
        else
                fputs("\n  ]\n}\n", s->out);
        return ferror(s->out) ? -EIO : 0;
}
