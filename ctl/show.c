/* What bfcctl prints of a list: see show.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Each kind has a function for the table and one for the JSON, side by side in
 * `views`, so that a field that is added to the one is missed in the other by
 * nobody who looks. */
#include "ctl/show.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ctl/process.h"
#include "ctl/table.h"
#include "ctl/text.h"

#define N_ELEMENTS(a) (sizeof(a) / sizeof((a)[0]))

/* A row without figures is a row of zeroes. */
static const Bfcd__Figures *figures_of(const Bfcd__Figures *figures)
{
        static const Bfcd__Figures none = BFCD__FIGURES__INIT;

        return figures ? figures : &none;
}

/* ---- tables -------------------------------------------------------------- */

/* How long ago something was, for people; it never was where it has no time. */
static void add_ago(struct table *t, uint64_t time_ms)
{
        uint64_t now_ms = (uint64_t)time(NULL) * 1000;

        if (time_ms == 0)
                table_text(t, "-");
        else
                table_duration(t, now_ms > time_ms ? now_ms - time_ms : 0);
}

static const struct table_column tenant_columns[] = {
        { "TENANT", TABLE_LEFT },
        { "PARTITION", TABLE_LEFT },
        { "IN-USE", TABLE_RIGHT },
        { "PEAK", TABLE_RIGHT },
        { "AGO", TABLE_RIGHT | TABLE_WIDE },
        { "RESERVED", TABLE_RIGHT },
        { "PEAK-RES", TABLE_RIGHT | TABLE_WIDE },
        { "LIMIT", TABLE_RIGHT },
        { "REFUSED", TABLE_RIGHT | TABLE_NARROW },
        { "EDQUOT", TABLE_RIGHT | TABLE_WIDE },
        { "ENOMEM", TABLE_RIGHT | TABLE_WIDE },
        { "LAST", TABLE_RIGHT | TABLE_WIDE },
        { "UNRECLAIMED", TABLE_RIGHT | TABLE_WIDE },
        { "KEPT", TABLE_RIGHT | TABLE_WIDE },
};

/* Above nine tenths of the limit, and above the limit, which was lowered. */
static enum table_mark fullness(const Bfcd__Figures *f)
{
        return f->bytes_reserved > f->bytes_limit                         ? TABLE_ALARM
               : f->bytes_reserved > f->bytes_limit - f->bytes_limit / 10 ? TABLE_WARNING
                                                                          : TABLE_PLAIN;
}

/* What a reload took out of the configuration has no limit of its own any more; its sessions go on. */
static void add_limit(struct table *t, const Bfcd__TenantRow *row)
{
        if (row->is_removed)
                table_text(t, "removed");
        else
                table_size(t, figures_of(row->figures)->bytes_limit);
}

static void add_tenants(struct table *t, const struct list *l)
{
        for (size_t i = 0; i < l->n_tenants; i++) {
                const Bfcd__Figures *f = figures_of(l->tenants[i]->figures);

                table_text(t, l->tenants[i]->tenant);
                table_text(t, l->tenants[i]->partition);
                table_size(t, f->bytes_in_use);
                table_size(t, f->peak_bytes_in_use);
                add_ago(t, f->peak_bytes_in_use_time_ms);
                table_size(t, f->bytes_reserved);
                table_mark(t, fullness(f));
                table_size(t, f->peak_bytes_reserved);
                add_limit(t, l->tenants[i]);
                table_number(t, f->num_refusals);
                table_number(t, f->num_over_quota);
                table_number(t, f->num_out_of_memory);
                add_ago(t, f->last_refusal_time_ms);
                table_size(t, f->bytes_escaped);
                table_size(t, l->tenants[i]->bytes_kept);
        }
}

/* What the extents were made of; a client may split a page of 2 MiB later. */
static const char *pages_of(const Bfcd__PartitionRow *p)
{
        if (p->bytes_in_2mib_pages == 0)
                return p->bytes_in_4kib_pages == 0 ? "-" : "4 KiB";
        return p->bytes_in_4kib_pages == 0 ? "2 MiB" : "mixed";
}

static const struct table_column partition_columns[] = {
        { "PARTITION", TABLE_LEFT },
        { "DEVICE", TABLE_LEFT },
        { "GROWTH", TABLE_LEFT | TABLE_WIDE },
        { "IN-USE", TABLE_RIGHT },
        { "PEAK", TABLE_RIGHT | TABLE_WIDE },
        { "AGO", TABLE_RIGHT | TABLE_WIDE },
        { "RESERVED", TABLE_RIGHT },
        { "PEAK-RES", TABLE_RIGHT | TABLE_WIDE },
        { "GUARANTEED", TABLE_RIGHT },
        { "LIMIT", TABLE_RIGHT },
        { "PAGES", TABLE_LEFT },
        { "ENOMEM", TABLE_RIGHT },
        { "UNRECLAIMED", TABLE_RIGHT | TABLE_WIDE },
};

static void add_partitions(struct table *t, const struct list *l)
{
        for (size_t i = 0; i < l->n_partitions; i++) {
                const Bfcd__PartitionRow *row = l->partitions[i];
                const Bfcd__Figures *f = figures_of(row->figures);

                table_text(t, row->name);
                table_text(t, row->device);
                table_text(t, row->growth);
                table_size(t, f->bytes_in_use);
                table_size(t, f->peak_bytes_in_use);
                add_ago(t, f->peak_bytes_in_use_time_ms);
                table_size(t, f->bytes_reserved);
                table_size(t, f->peak_bytes_reserved);
                table_size(t, f->bytes_guaranteed);
                table_size(t, f->bytes_limit);
                table_text(t, pages_of(row));
                table_number(t, f->num_out_of_memory);
                table_size(t, f->bytes_escaped);
        }
}

static const struct table_column session_columns[] = {
        { "SESSION", TABLE_RIGHT },
        { "TENANT", TABLE_LEFT },
        { "USER", TABLE_LEFT },
        { "UID", TABLE_RIGHT | TABLE_WIDE },
        { "PID", TABLE_RIGHT },
        { "JOB", TABLE_LEFT | TABLE_NARROW },
        { "NAME", TABLE_LEFT | TABLE_WIDE },
        { "STATE", TABLE_LEFT },
        { "AGE", TABLE_RIGHT | TABLE_WIDE },
        { "BLOCKS", TABLE_RIGHT | TABLE_WIDE },
        { "HELD", TABLE_RIGHT },
        { "PEAK-HELD", TABLE_RIGHT | TABLE_WIDE },
        { "USED", TABLE_RIGHT | TABLE_WIDE },
        { "IDLE", TABLE_RIGHT },
        { "UNIT", TABLE_LEFT | TABLE_WIDE },
        { "COMMAND", TABLE_LEFT | TABLE_WIDE },
};

/* Held and not a word of it: an older client, or one without a page. */
static bool is_silent(const Bfcd__SessionRow *row)
{
        return row->bytes_in_use > 0 && row->client_bytes_reserved == 0;
}

static void client_size(struct table *t, const Bfcd__SessionRow *row, uint64_t n_bytes)
{
        if (is_silent(row))
                table_text(t, "-");
        else
                table_size(t, n_bytes);
}

static void add_sessions(struct table *t, const struct list *l)
{
        for (size_t i = 0; i < l->n_sessions; i++) {
                const Bfcd__SessionRow *row = l->sessions[i];
                char text[PROCESS_TEXT_MAX];

                table_number(t, row->session_id);
                table_text(t, row->tenant);
                table_text(t, process_user(row->uid, text));
                table_number(t, row->uid);
                table_number(t, row->pid);
                table_text(t, process_job(row->pid, row->name, text));
                table_text(t, row->name);
                table_text(t, row->state);
                table_mark(t, strcmp(row->state, "live") == 0 ? TABLE_PLAIN : TABLE_WARNING);
                table_duration(t, row->age_ms);
                table_number(t, row->num_blocks);
                table_size(t, row->bytes_in_use);
                table_size(t, row->peak_bytes_in_use);
                client_size(t, row, row->client_bytes_in_use);
                client_size(t, row, row->client_bytes_idle);
                table_text(t, process_unit(row->pid, text));
                table_text(t, process_command(row->pid, text));
        }
}

static const struct table_column block_columns[] = {
        { "BLOCK", TABLE_RIGHT },
        { "SESSION", TABLE_RIGHT },
        { "TENANT", TABLE_LEFT },
        { "PARTITION", TABLE_LEFT },
        { "REGION", TABLE_RIGHT | TABLE_WIDE },
        { "OFFSET", TABLE_RIGHT | TABLE_WIDE },
        { "SIZE", TABLE_RIGHT },
        { "REQUESTED", TABLE_RIGHT | TABLE_WIDE },
        { "AGE", TABLE_RIGHT },
};

static void add_block(struct table *t, const Bfcd__BlockRow *row)
{
        table_number(t, row->block_id);
        if (row->session_id != 0)
                table_number(t, row->session_id);
        else
                table_text(t, "shared");
        table_text(t, row->tenant);
        table_text(t, row->partition);
        table_number(t, row->region_id);
        table_hex(t, row->offset);
        table_size(t, row->n_bytes);
        table_size(t, row->n_requested);
        table_duration(t, row->age_ms);
}

static const struct table_column shared_columns[] = {
        { "NAME", TABLE_LEFT },      { "TENANT", TABLE_LEFT },
        { "PARTITION", TABLE_LEFT }, { "BLOCK", TABLE_RIGHT | TABLE_WIDE },
        { "SIZE", TABLE_RIGHT },     { "REQUESTED", TABLE_RIGHT | TABLE_WIDE },
        { "HOLDERS", TABLE_RIGHT },  { "AGE", TABLE_RIGHT },
};

static void add_shared(struct table *t, const struct list *l)
{
        for (size_t i = 0; i < l->n_shared; i++) {
                const Bfcd__SharedRow *row = l->shared[i];

                table_text(t, row->name);
                table_text(t, row->tenant);
                table_text(t, row->partition);
                table_number(t, row->block_id);
                table_size(t, row->n_bytes);
                table_size(t, row->n_requested);
                table_number(t, row->num_holders);
                table_duration(t, row->age_ms);
        }
}

static const struct table_column whoami_columns[] = {
        { "Tenant", TABLE_LEFT },           { "Session", TABLE_LEFT }, { "User id", TABLE_LEFT },
        { "Group id", TABLE_LEFT },         { "Process", TABLE_LEFT }, { "Admin", TABLE_LEFT },
        { "Matching tenants", TABLE_LEFT },
};

static void add_whoami(struct table *t, const struct list *l)
{
        const Bfcd__Whoami *w = l->whoami;
        char *names = NULL;
        size_t n_names;
        FILE *joined = open_memstream(&names, &n_names);

        for (size_t i = 0; joined && i < w->n_matching_tenants; i++)
                fprintf(joined, "%s%s", i ? ", " : "", w->matching_tenants[i]);
        if (joined)
                fclose(joined);
        table_text(t, w->tenant);
        table_number(t, w->session_id);
        table_number(t, w->uid);
        table_number(t, w->gid);
        table_number(t, w->pid);
        table_text(t, w->admin ? "yes" : "no");
        table_text(t, names);
        free(names);
}

static const struct table_column status_columns[] = {
        { "Version", TABLE_LEFT }, { "Protocol", TABLE_LEFT },    { "Process", TABLE_LEFT },
        { "Uptime", TABLE_LEFT },  { "Tenants", TABLE_LEFT },     { "Sessions", TABLE_LEFT },
        { "At most", TABLE_LEFT }, { "Quarantined", TABLE_LEFT }, { "Blocks", TABLE_LEFT },
        { "Extents", TABLE_LEFT }, { "Allocated", TABLE_LEFT },   { "Resident", TABLE_LEFT },
};

static void add_status(struct table *t, const struct list *l)
{
        const Bfcd__Status *s = l->status;

        table_text(t, s->version);
        table_number(t, s->protocol_version);
        table_number(t, s->pid);
        table_duration(t, s->uptime_ms);
        table_number(t, s->num_tenants);
        table_number(t, s->num_sessions);
        table_number(t, s->max_sessions);
        table_number(t, s->num_quarantined);
        table_number(t, s->num_blocks);
        table_number(t, s->num_extents);
        table_size(t, s->bytes_allocated);
        table_size(t, s->bytes_resident);
}

#define UUID_BYTES 16u
#define UUID_TEXT  48u

/* As nvidia-smi writes it; "" where there is none. */
static const char *uuid_text(const Bfcd__DeviceRow *row, char text[UUID_TEXT])
{
        size_t n = 0;

        text[0] = '\0';
        if (row->uuid.len != UUID_BYTES)
                return text;
        n = (size_t)snprintf(text, UUID_TEXT, "%s", strncmp(row->id, "MIG-", 4) == 0 ? "MIG-" : "GPU-");
        for (size_t i = 0; i < UUID_BYTES; i++)
                n += (size_t)snprintf(text + n, UUID_TEXT - n, "%s%02x",
                                      i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", row->uuid.data[i]);
        return text;
}

static const struct table_column device_columns[] = {
        { "DEVICE", TABLE_LEFT },
        { "STATE", TABLE_LEFT },
        { "RESERVED", TABLE_RIGHT },
        { "PENDING", TABLE_RIGHT | TABLE_WIDE },
        { "STANDBY", TABLE_RIGHT | TABLE_WIDE },
        { "UNRECLAIMED", TABLE_RIGHT },
        { "TOTAL", TABLE_RIGHT },
        { "RESERVED%", TABLE_RIGHT },
        { "NAME", TABLE_LEFT },
        { "UUID", TABLE_LEFT | TABLE_WIDE },
};

static int show_devices(FILE *out, const Bfcd__Status *s)
{
        struct table *t;
        int r = table_new(device_columns, N_ELEMENTS(device_columns), &t);

        if (r < 0)
                return r;
        for (size_t i = 0; i < s->n_devices; i++) {
                const Bfcd__DeviceRow *row = s->devices[i];
                char uuid[UUID_TEXT];

                table_text(t, row->id);
                table_text(t, row->state);
                table_mark(t, strcmp(row->state, "ok") == 0     ? TABLE_PLAIN
                              : strcmp(row->state, "lost") == 0 ? TABLE_ALARM
                                                                : TABLE_WARNING);
                table_size(t, row->bytes_reserved);
                table_size(t, row->bytes_pending);
                table_size(t, row->bytes_standby);
                table_size(t, row->bytes_escaped);
                table_mark(t, row->bytes_escaped > 0 ? TABLE_ALARM : TABLE_PLAIN);
                table_size(t, row->bytes_total);
                table_percent(t, row->bytes_reserved, row->bytes_total);
                table_text(t, row->name);
                table_text(t, uuid_text(row, uuid));
        }
        fputc('\n', out);
        r = table_print(t, out);
        table_free(t);
        return r;
}

/* ---- JSON ---------------------------------------------------------------- */

json_t *show_string(const char *s)
{
        char *valid = text_valid(s);
        json_t *ret = valid ? json_string(valid) : NULL;

        free(valid);
        return ret;
}

/* JSON's numbers are signed here, and no figure that is a size or a count comes
 * near the end of them. */
static uint64_t signed_of(uint64_t n)
{
        return n > INT64_MAX ? INT64_MAX : n;
}

static json_t *number(uint64_t n)
{
        return json_integer((json_int_t)signed_of(n));
}

static json_t *id(uint64_t n)
{
        char text[TEXT_MAX];

        snprintf(text, sizeof(text), "%" PRIu64, n);
        return json_string(text);
}

static void set(json_t **object, const char *key, json_t *value)
{
        if (!*object) {
                json_decref(value);
        } else if (json_object_set_new(*object, key, value) < 0) {
                json_decref(*object);
                *object = NULL;
        }
}

static void push(json_t **array, json_t *value)
{
        if (!*array) {
                json_decref(value);
        } else if (json_array_append_new(*array, value) < 0) {
                json_decref(*array);
                *array = NULL;
        }
}

static void set_figures(json_t **row, const Bfcd__Figures *figures)
{
        const Bfcd__Figures *f = figures_of(figures);
        double share = f->bytes_free ? (double)f->bytes_fragmented / (double)f->bytes_free : 0;

        set(row, "bytes_limit", number(f->bytes_limit));
        set(row, "bytes_reserved", number(f->bytes_reserved));
        set(row, "peak_bytes_reserved", number(f->peak_bytes_reserved));
        set(row, "lifetime_peak_bytes_reserved", number(f->lifetime_peak_bytes_reserved));
        set(row, "bytes_guaranteed", number(f->bytes_guaranteed));
        set(row, "bytes_escaped", number(f->bytes_escaped));
        set(row, "bytes_in_use", number(f->bytes_in_use));
        set(row, "peak_bytes_in_use", number(f->peak_bytes_in_use));
        set(row, "lifetime_peak_bytes_in_use", number(f->lifetime_peak_bytes_in_use));
        set(row, "bytes_requested", number(f->bytes_requested));
        set(row, "bytes_free", number(f->bytes_free));
        set(row, "largest_free_block_bytes", number(f->largest_free_block_bytes));
        set(row, "bytes_fragmented", number(f->bytes_fragmented));
        set(row, "fragmentation", json_real(share));
        set(row, "largest_alloc_size", number(f->largest_alloc_size));
        set(row, "num_allocs", number(f->num_allocs));
        set(row, "num_blocks", number(f->num_blocks));
        set(row, "num_sessions", number(f->num_sessions));
        set(row, "num_extents", number(f->num_extents));
        set(row, "num_refusals", number(f->num_refusals));
        set(row, "num_over_quota", number(f->num_over_quota));
        set(row, "num_out_of_memory", number(f->num_out_of_memory));
        set(row, "last_refusal_time_ms", number(f->last_refusal_time_ms));
        set(row, "peak_bytes_in_use_time_ms", number(f->peak_bytes_in_use_time_ms));
        set(row, "peak_bytes_reserved_time_ms", number(f->peak_bytes_reserved_time_ms));
}

/* The same by the names that other files know. */
json_t *show_number(uint64_t n)
{
        return number(n);
}

json_t *show_id(uint64_t n)
{
        return id(n);
}

void show_set(json_t **object, const char *key, json_t *value)
{
        set(object, key, value);
}

void show_push(json_t **array, json_t *value)
{
        push(array, value);
}

void show_set_figures(json_t **row, const Bfcd__Figures *figures)
{
        set_figures(row, figures);
}

static json_t *json_tenants(const struct list *l)
{
        json_t *ret = json_array();

        for (size_t i = 0; i < l->n_tenants; i++) {
                json_t *row = json_object();

                set(&row, "tenant", show_string(l->tenants[i]->tenant));
                set(&row, "partition", show_string(l->tenants[i]->partition));
                set(&row, "removed", json_boolean(l->tenants[i]->is_removed));
                set(&row, "bytes_pending", number(l->tenants[i]->bytes_pending));
                set(&row, "bytes_kept", number(l->tenants[i]->bytes_kept));
                set(&row, "kept_ms", number(l->tenants[i]->kept_ms));
                set_figures(&row, l->tenants[i]->figures);
                /* Nobody keeps this peak for a partition. */
                set(&row, "peak_bytes_requested",
                    number(figures_of(l->tenants[i]->figures)->peak_bytes_requested));
                push(&ret, row);
        }
        return ret;
}

static json_t *json_partitions(const struct list *l)
{
        json_t *ret = json_array();

        for (size_t i = 0; i < l->n_partitions; i++) {
                const Bfcd__PartitionRow *p = l->partitions[i];
                json_t *row = json_object();

                set(&row, "partition", show_string(p->name));
                set(&row, "device", show_string(p->device));
                set(&row, "growth", show_string(p->growth));
                set(&row, "share", show_string(p->share));
                set(&row, "clear_on_release", json_boolean(p->clears_on_release));
                set(&row, "pages", show_string(pages_of(p)));
                set(&row, "bytes_in_2mib_pages", number(p->bytes_in_2mib_pages));
                set(&row, "bytes_in_4kib_pages", number(p->bytes_in_4kib_pages));
                set(&row, "num_tenants", number(p->num_tenants));
                set_figures(&row, p->figures);
                push(&ret, row);
        }
        return ret;
}

static json_t *json_sessions(const struct list *l)
{
        json_t *ret = json_array();

        for (size_t i = 0; i < l->n_sessions; i++) {
                const Bfcd__SessionRow *s = l->sessions[i];
                char text[PROCESS_TEXT_MAX];
                json_t *row = json_object();

                set(&row, "session_id", number(s->session_id));
                set(&row, "tenant", show_string(s->tenant));
                set(&row, "pid", number(s->pid));
                set(&row, "uid", number(s->uid));
                set(&row, "user", show_string(process_user(s->uid, text)));
                set(&row, "unit", show_string(process_unit(s->pid, text)));
                set(&row, "command", show_string(process_command(s->pid, text)));
                set(&row, "name", show_string(s->name));
                set(&row, "state", show_string(s->state));
                set(&row, "age_ms", number(s->age_ms));
                set(&row, "num_blocks", number(s->num_blocks));
                set(&row, "bytes_in_use", number(s->bytes_in_use));
                set(&row, "peak_bytes_in_use", number(s->peak_bytes_in_use));
                set(&row, "client_bytes_reserved", number(s->client_bytes_reserved));
                set(&row, "client_bytes_in_use", number(s->client_bytes_in_use));
                set(&row, "client_bytes_idle", number(s->client_bytes_idle));
                push(&ret, row);
        }
        return ret;
}

static json_t *json_shared(const struct list *l)
{
        json_t *ret = json_array();

        for (size_t i = 0; i < l->n_shared; i++) {
                const Bfcd__SharedRow *s = l->shared[i];
                json_t *row = json_object();

                set(&row, "name", show_string(s->name));
                set(&row, "tenant", show_string(s->tenant));
                set(&row, "partition", show_string(s->partition));
                set(&row, "block_id", id(s->block_id));
                set(&row, "n_bytes", number(s->n_bytes));
                set(&row, "n_requested", number(s->n_requested));
                set(&row, "num_holders", number(s->num_holders));
                set(&row, "age_ms", number(s->age_ms));
                push(&ret, row);
        }
        return ret;
}

static json_t *json_whoami(const struct list *l)
{
        const Bfcd__Whoami *w = l->whoami;
        json_t *matching = json_array();
        json_t *ret = json_object();

        for (size_t i = 0; i < w->n_matching_tenants; i++)
                push(&matching, show_string(w->matching_tenants[i]));
        set(&ret, "tenant", show_string(w->tenant));
        set(&ret, "session_id", number(w->session_id));
        set(&ret, "uid", number(w->uid));
        set(&ret, "gid", number(w->gid));
        set(&ret, "pid", number(w->pid));
        set(&ret, "admin", json_boolean(w->admin));
        set(&ret, "matching_tenants", matching);
        return ret;
}

static json_t *json_devices(const Bfcd__Status *s)
{
        json_t *ret = json_array();

        for (size_t i = 0; i < s->n_devices; i++) {
                const Bfcd__DeviceRow *d = s->devices[i];
                json_t *row = json_object();
                char uuid[UUID_TEXT];

                uuid_text(d, uuid);
                set(&row, "device", show_string(d->id));
                set(&row, "state", show_string(d->state));
                set(&row, "name", show_string(d->name));
                set(&row, "uuid", uuid[0] ? json_string(uuid) : json_null());
                set(&row, "bytes_total", number(d->bytes_total));
                set(&row, "bytes_reserved", number(d->bytes_reserved));
                set(&row, "bytes_pending", number(d->bytes_pending));
                set(&row, "bytes_standby", number(d->bytes_standby));
                set(&row, "bytes_escaped", number(d->bytes_escaped));
                push(&ret, row);
        }
        return ret;
}

static json_t *json_status(const struct list *l)
{
        const Bfcd__Status *s = l->status;
        json_t *ret = json_object();

        set(&ret, "version", show_string(s->version));
        set(&ret, "protocol_version", number(s->protocol_version));
        set(&ret, "pid", number(s->pid));
        set(&ret, "uptime_ms", number(s->uptime_ms));
        set(&ret, "num_tenants", number(s->num_tenants));
        set(&ret, "num_sessions", number(s->num_sessions));
        set(&ret, "max_sessions", number(s->max_sessions));
        set(&ret, "num_quarantined", number(s->num_quarantined));
        set(&ret, "num_blocks", number(s->num_blocks));
        set(&ret, "num_extents", number(s->num_extents));
        set(&ret, "bytes_allocated", number(s->bytes_allocated));
        set(&ret, "bytes_resident", number(s->bytes_resident));
        set(&ret, "devices", json_devices(s));
        return ret;
}

/* ---- both ---------------------------------------------------------------- */

static const struct view {
        const char *name;
        const struct table_column *columns;
        size_t n_columns;
        void (*add)(struct table *t, const struct list *l);
        json_t *(*json)(const struct list *l);
        bool upright; /* one row, shown as lines */
} views[] = {
#define VIEW(noun, columns, upright)                                                                         \
        {                                                                                                    \
#noun, columns, N_ELEMENTS(columns), add_##noun, json_##noun, upright                        \
        }
        [BFCD__LIST__KIND__STATUS] = VIEW(status, status_columns, true),
        [BFCD__LIST__KIND__PARTITIONS] = VIEW(partitions, partition_columns, false),
        [BFCD__LIST__KIND__TENANTS] = VIEW(tenants, tenant_columns, false),
        [BFCD__LIST__KIND__SESSIONS] = VIEW(sessions, session_columns, false),
        [BFCD__LIST__KIND__SHARED] = VIEW(shared, shared_columns, false),
        [BFCD__LIST__KIND__WHOAMI] = VIEW(whoami, whoami_columns, true),
#undef VIEW
};

int show_table(FILE *out, Bfcd__List__Kind kind, const struct list *l)
{
        const struct view *view = &views[kind];
        struct table *t;
        int r = table_new(view->columns, view->n_columns, &t);

        if (r < 0)
                return r;
        view->add(t, l);
        r = view->upright ? table_print_upright(t, out) : table_print(t, out);
        table_free(t);
        if (r == 0 && kind == BFCD__LIST__KIND__STATUS)
                r = show_devices(out, l->status);
        return r;
}

/* ---- blocks -------------------------------------------------------------- */

#define BLOCKS_AT_ONCE 128u /* rows of the table that are kept for their widths */

/* JSON of the last string: rows that follow each other often have the same. */
struct last_string {
        char *text, *json;
};

struct show_blocks {
        FILE *out;
        struct last_string strings[4];
        struct table *table; /* NULL: JSON */
        size_t n_kept, n_rows;
};

int show_blocks_new(FILE *out, bool json, struct show_blocks **ret)
{
        struct show_blocks *s = calloc(1, sizeof(*s));
        int r = s && !json ? table_new(block_columns, N_ELEMENTS(block_columns), &s->table) : 0;

        if (!s || r < 0) {
                free(s);
                return -ENOMEM;
        }
        s->out = out;
        *ret = s;
        return 0;
}

struct show_blocks *show_blocks_free(struct show_blocks *s)
{
        for (size_t i = 0; s && i < N_ELEMENTS(s->strings); i++) {
                free(s->strings[i].text);
                free(s->strings[i].json);
        }
        if (s)
                table_free(s->table);
        free(s);
        return NULL;
}

/* NULL when out of memory. */
static const char *json_of(struct last_string *last, const char *s)
{
        json_t *string;

        if (last->text && strcmp(last->text, s) == 0)
                return last->json;
        free(last->text);
        free(last->json);
        string = show_string(s);
        last->text = strdup(s);
        last->json = string ? json_dumps(string, JSON_ENCODE_ANY) : NULL;
        json_decref(string);
        return last->text ? last->json : NULL;
}

/* Written by hand: to build an object takes several times as long. */
static int print_json_block(struct show_blocks *s, const Bfcd__BlockRow *b)
{
        const char *tenant = json_of(&s->strings[0], b->tenant);
        const char *partition = json_of(&s->strings[1], b->partition);
        const char *tag = json_of(&s->strings[2], b->tag);
        const char *name = b->shared_name[0] ? json_of(&s->strings[3], b->shared_name) : "null";

        if (!tenant || !partition || !tag || !name)
                return -ENOMEM;
        if (s->n_rows++ == 0)
                fprintf(s->out, "{\n  \"schema\": %d,\n  \"blocks\": [\n", SHOW_SCHEMA);
        else
                fputs(",\n", s->out);
        fprintf(s->out,
                "    {\"block_id\": \"%" PRIu64 "\", \"session_id\": %" PRIu64
                ", \"tenant\": %s, \"partition\": %s, \"region_id\": %" PRIu64 ", \"offset\": %" PRIu64
                ", \"n_bytes\": %" PRIu64 ", \"n_requested\": %" PRIu64 ", \"age_ms\": %" PRIu64
                ", \"tag\": %s, \"shared_name\": %s}",
                b->block_id, signed_of(b->session_id), tenant, partition, signed_of(b->region_id),
                signed_of(b->offset), signed_of(b->n_bytes), signed_of(b->n_requested), signed_of(b->age_ms),
                tag, name);
        return ferror(s->out) ? -EIO : 0;
}

int show_blocks_add(struct show_blocks *s, const Bfcd__BlockRow *row)
{
        if (!s->table)
                return print_json_block(s, row);
        add_block(s->table, row);
        if (++s->n_kept < BLOCKS_AT_ONCE)
                return 0;
        s->n_kept = 0;
        return table_print_part(s->table, s->out);
}

int show_blocks_end(struct show_blocks *s)
{
        if (s->table)
                return table_print_part(s->table, s->out);
        if (s->n_rows == 0)
                fprintf(s->out, "{\n  \"schema\": %d,\n  \"blocks\": []\n}\n", SHOW_SCHEMA);
        else
                fputs("\n  ]\n}\n", s->out);
        return ferror(s->out) ? -EIO : 0;
}

/* ---- documents ----------------------------------------------------------- */

json_t *show_document(const char *name, json_t *value)
{
        json_t *ret = json_object();

        set(&ret, "schema", json_integer(SHOW_SCHEMA));
        set(&ret, name, value);
        return ret;
}

json_t *show_json(Bfcd__List__Kind kind, const struct list *l)
{
        return show_document(views[kind].name, views[kind].json(l));
}

int show_print(FILE *out, json_t *document)
{
        int r = document ? json_dumpf(document, out, JSON_INDENT(2) | JSON_REAL_PRECISION(6)) : 0;

        if (!document)
                return -ENOMEM;
        json_decref(document);
        fputc('\n', out);
        return r < 0 || ferror(out) ? -EIO : 0;
}
