/* The lists of bfcctl: see show.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "ctl/show.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "ctl/process.h"
#include "ctl/statistics.h"
#include "ctl/table.h"
#include "ctl/text.h"

/* ---- columns --------------------------------------------------------------- */

#define R      TABLE_RIGHT
#define WIDE   TABLE_WIDE
#define SUM    TABLE_SUM
#define COLUMN TABLE_COLUMN

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
        COLUMN("STATE", "state", 0, TABLE_TEXT, Bfcd__SessionRow, state, .mark = session_mark),
        COLUMN("UNRESPONSIVE", "unresponsive", WIDE, TABLE_BOOL, Bfcd__SessionRow, is_unresponsive),
        COLUMN("AGE", "age_ms", R | WIDE, TABLE_DURATION, Bfcd__SessionRow, age_ms),
        COLUMN("BLOCKS", "num_blocks", R | WIDE | SUM, TABLE_NUMBER, Bfcd__SessionRow, num_blocks),
        COLUMN("HELD", "bytes_in_use", R | SUM, TABLE_SIZE, Bfcd__SessionRow, bytes_in_use),
        COLUMN("PEAK-HELD", "peak_bytes_in_use", R | WIDE, TABLE_SIZE, Bfcd__SessionRow, peak_bytes_in_use),
        COLUMN(NULL, "client_bytes_reserved", 0, TABLE_SIZE, Bfcd__SessionRow, client_bytes_reserved),
        COLUMN("USED", "client_bytes_in_use", R | WIDE | SUM, TABLE_SIZE, Bfcd__SessionRow,
               client_bytes_in_use, .instead = no_usage),
        COLUMN("IDLE", "client_bytes_idle", R | SUM, TABLE_SIZE, Bfcd__SessionRow, client_bytes_idle,
               .instead = no_usage),
        COLUMN("DIRECT", "bytes_direct", R | WIDE | SUM, TABLE_SIZE, Bfcd__SessionRow, bytes_direct),
        COLUMN("CONTEXTS", "bytes_contexts", R | WIDE | SUM, TABLE_SIZE, Bfcd__SessionRow, bytes_contexts),
        COLUMN("OUTSIDE", "bytes_outside", R | WIDE | SUM, TABLE_SIZE, Bfcd__SessionRow, bytes_outside,
               .instead = nothing_outside),
        { "LEASES", NULL, WIDE | TABLE_CUT_FIRST, TABLE_MADE, .text = session_leases_text },
        { .key = "leases", .json = session_leases_json },
        { "UNIT", "unit", WIDE | TABLE_CUT_FIRST, TABLE_MADE, .text = unit_text },
        { "COMMAND", "command", WIDE | TABLE_CUT_FIRST, TABLE_MADE, .text = command_text },
        { 0 },
};

static const char *no_session(const void *row)
{
        return ((const Bfcd__BlockRow *)row)->session_id == 0 ? "shared" : NULL;
}

static const struct table_column block_columns[] = {
        COLUMN("BLOCK", "block_id", R, TABLE_ID, Bfcd__BlockRow, block_id),
        COLUMN(NULL, "lease", 0, TABLE_TEXT, Bfcd__BlockRow, lease),
        COLUMN("SESSION", "session_id", R, TABLE_NUMBER, Bfcd__BlockRow, session_id, .instead = no_session),
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

static const char *keep_instead(const void *row)
{
        uint64_t n_ms = ((const Bfcd__SharedRow *)row)->keep_ms;

        return n_ms == UINT64_MAX ? "forever" : n_ms == 0 ? "-" : NULL;
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

        return shared->num_references > 0 || shared->kept_ms == UINT64_MAX
                       ? json_null()
                       : table_json_number(shared->kept_ms);
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
        COLUMN("PLACE", "partition_position", R | WIDE, TABLE_NUMBER, Bfcd__WaitingRow, partition_position,
               .instead = place_instead, .json = place_json),
        COLUMN("TENANT", "tenant", 0, TABLE_TEXT, Bfcd__WaitingRow, tenant),
        COLUMN("LEASE", "lease", WIDE, TABLE_TEXT, Bfcd__WaitingRow, lease),
        COLUMN("POS", "position", R, TABLE_NUMBER, Bfcd__WaitingRow, position),
        COLUMN("SESSION", "session_id", R, TABLE_NUMBER, Bfcd__WaitingRow, session_id),
        COLUMN("PID", "pid", R | WIDE, TABLE_NUMBER, Bfcd__WaitingRow, pid),
        COLUMN("ASKED", "n_bytes", R, TABLE_SIZE, Bfcd__WaitingRow, n_bytes),
        COLUMN("LACKS", "bytes_lacking", R | TABLE_UNKNOWN, TABLE_SIZE, Bfcd__WaitingRow, bytes_lacking),
        COLUMN(NULL, "wait_ms", 0, TABLE_NUMBER, Bfcd__WaitingRow, wait_ms),
        COLUMN("SINCE", "waited_ms", R | WIDE, TABLE_DURATION, Bfcd__WaitingRow, waited_ms),
        COLUMN("LEFT", "left_ms", R, TABLE_DURATION, Bfcd__WaitingRow, left_ms),
        COLUMN("ESTIMATE", "estimate_ms", R | TABLE_UNKNOWN, TABLE_DURATION, Bfcd__WaitingRow, estimate_ms),
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
        COLUMN("KEEP", "keep_ms", R | TABLE_UNKNOWN, TABLE_DURATION, Bfcd__SharedRow, keep_ms,
               .instead = keep_instead),
        COLUMN("LEFT", "left_ms", R, TABLE_DURATION, Bfcd__SharedRow, kept_ms, .instead = left_instead,
               .json = left_json),
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
        COLUMN("KEEP", "keep_ms", R | TABLE_UNKNOWN, TABLE_DURATION, Bfcd__SharedRow, keep_ms,
               .instead = keep_instead),
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
        COLUMN("Scheduler", "scheduler", 0, TABLE_BOOL, Bfcd__Whoami, scheduler),
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
        [BFCD__LIST__KIND__STATUS] = { "status", statistics_status, offsetof(struct list, status), 0, NULL },
        [BFCD__LIST__KIND__PARTITIONS] = ROWS(partitions, statistics_partitions, "No partitions."),
        [BFCD__LIST__KIND__TENANTS] = ROWS(tenants, statistics_tenants, "No tenants."),
        [BFCD__LIST__KIND__SESSIONS] = ROWS(sessions, session_columns, "No sessions."),
        [BFCD__LIST__KIND__SHARED] = ROWS(shared, shared_columns, "No shared blocks."),
        [BFCD__LIST__KIND__EXTENTS] = ROWS(extents, extent_columns, "No extents."),
        [BFCD__LIST__KIND__WAITING] = ROWS(waiting, waiting_columns, "No request waits."),
        [BFCD__LIST__KIND__REFUSALS] = ROWS(refusals, refusal_columns, "No request was refused."),
        [BFCD__LIST__KIND__KEPT] = { "keep", kept_columns, offsetof(struct list, shared),
                                     offsetof(struct list, n_shared), "No kept blocks." },
        [BFCD__LIST__KIND__LEASES] = ROWS(leases, statistics_leases, "No leases."),
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
        return table_print(out, statistics_devices, (const void *const *)l->status->devices,
                           l->status->n_devices, NULL);
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
