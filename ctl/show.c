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
#include <string.h>
#include <time.h>

#include "ctl/table.h"
#include "ctl/text.h"

#define N_ELEMENTS(a) (sizeof(a) / sizeof((a)[0]))

/* A row without figures is a row of zeroes. */
static const Bfcd__Figures *figures_of(const Bfcd__Figures *figures)
{
        static const Bfcd__Figures none = BFCD__FIGURES__INIT;

        return figures ? figures : &none;
}

/* How much of what is free lies outside the largest free block. */
static uint64_t scattered(const Bfcd__Figures *f)
{
        return f->bytes_free > f->largest_free_block_bytes ? f->bytes_free - f->largest_free_block_bytes : 0;
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

/* Tables are for terminals of 120 columns; explain and JSON tell the rest. */
static const struct table_column tenant_columns[] = {
        { "TENANT", false }, { "PARTITION", false }, { "IN-USE", true },   { "PEAK", true },
        { "AGO", true },     { "RESERVED", true },   { "PEAK-RES", true }, { "LIMIT", true },
        { "EDQUOT", true },  { "ENOMEM", true },     { "LAST", true },     { "ESCAPED", true },
};

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
                table_size(t, f->peak_bytes_reserved);
                table_size(t, f->bytes_limit);
                table_number(t, f->num_over_quota);
                table_number(t, f->num_out_of_memory);
                add_ago(t, f->last_refusal_time_ms);
                table_size(t, f->bytes_escaped);
        }
}

static const struct table_column partition_columns[] = {
        { "PARTITION", false }, { "DEVICE", false }, { "GROWTH", false },  { "IN-USE", true },
        { "PEAK", true },       { "AGO", true },     { "RESERVED", true }, { "PEAK-RES", true },
        { "GUARANTEED", true }, { "LIMIT", true },   { "ENOMEM", true },   { "ESCAPED", true },
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
                table_number(t, f->num_out_of_memory);
                table_size(t, f->bytes_escaped);
        }
}

static const struct table_column session_columns[] = {
        { "SESSION", true }, { "TENANT", false },   { "PID", true },  { "UID", true },
        { "NAME", false },   { "STATE", false },    { "AGE", true },  { "BLOCKS", true },
        { "HELD", true },    { "PEAK-HELD", true }, { "USED", true }, { "IDLE", true },
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

                table_number(t, row->session_id);
                table_text(t, row->tenant);
                table_number(t, row->pid);
                table_number(t, row->uid);
                table_text(t, row->name);
                table_text(t, row->state);
                table_duration(t, row->age_ms);
                table_number(t, row->num_blocks);
                table_size(t, row->bytes_in_use);
                table_size(t, row->peak_bytes_in_use);
                client_size(t, row, row->client_bytes_in_use);
                client_size(t, row, row->client_bytes_idle);
        }
}

static const struct table_column block_columns[] = {
        { "BLOCK", true },      { "SESSION", true },   { "TENANT", false },
        { "PARTITION", false }, { "REGION", true },    { "OFFSET", true },
        { "SIZE", true },       { "REQUESTED", true }, { "AGE", true },
};

static void add_blocks(struct table *t, const struct list *l)
{
        for (size_t i = 0; i < l->n_blocks; i++) {
                const Bfcd__BlockRow *row = l->blocks[i];

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
}

static const struct table_column shared_columns[] = {
        { "NAME", false }, { "TENANT", false },   { "PARTITION", false }, { "BLOCK", true },
        { "SIZE", true },  { "REQUESTED", true }, { "HOLDERS", true },    { "AGE", true },
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
        { "Tenant", false },  { "Session", false }, { "User id", false },          { "Group id", false },
        { "Process", false }, { "Admin", false },   { "Matching tenants", false },
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
        { "Version", false }, { "Protocol", false }, { "Process", false },   { "Uptime", false },
        { "Tenants", false }, { "Sessions", false }, { "At most", false },   { "Quarantined", false },
        { "Blocks", false },  { "Extents", false },  { "Allocated", false }, { "Resident", false },
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
        { "DEVICE", false },   { "STATE", false },  { "RESERVED", true },
        { "PENDING", true },   { "ESCAPED", true }, { "TOTAL", true },
        { "RESERVED%", true }, { "NAME", false },   { "UUID", false },
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
                table_size(t, row->bytes_reserved);
                table_size(t, row->bytes_pending);
                table_size(t, row->bytes_escaped);
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
static json_t *number(uint64_t n)
{
        return json_integer(n > INT64_MAX ? INT64_MAX : (json_int_t)n);
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
        double share = f->bytes_free ? (double)scattered(f) / (double)f->bytes_free : 0;

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
                json_t *row = json_object();

                set(&row, "session_id", number(s->session_id));
                set(&row, "tenant", show_string(s->tenant));
                set(&row, "pid", number(s->pid));
                set(&row, "uid", number(s->uid));
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

static json_t *json_blocks(const struct list *l)
{
        json_t *ret = json_array();

        for (size_t i = 0; i < l->n_blocks; i++) {
                const Bfcd__BlockRow *b = l->blocks[i];
                json_t *row = json_object();

                set(&row, "block_id", id(b->block_id));
                set(&row, "session_id", number(b->session_id));
                set(&row, "tenant", show_string(b->tenant));
                set(&row, "partition", show_string(b->partition));
                set(&row, "region_id", number(b->region_id));
                set(&row, "offset", number(b->offset));
                set(&row, "n_bytes", number(b->n_bytes));
                set(&row, "n_requested", number(b->n_requested));
                set(&row, "age_ms", number(b->age_ms));
                set(&row, "tag", show_string(b->tag));
                set(&row, "shared_name", b->shared_name[0] ? show_string(b->shared_name) : json_null());
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
        [BFCD__LIST__KIND__BLOCKS] = VIEW(blocks, block_columns, false),
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
