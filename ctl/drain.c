/* bfcctl drain: see drain.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The daemon sends no event when a device is drained, so its status is polled. */
#include "ctl/drain.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ctl/clock.h"
#include "ctl/progress.h"
#include "ctl/show.h"
#include "ctl/table.h"
#include "ctl/text.h"

#define LOOK_MS 50 /* between two looks */

static const Bfcd__Statistics *stats_of(const Bfcd__ExplainRow *row)
{
        static const Bfcd__Statistics none = BFCD__STATISTICS__INIT;

        return row->stats ? row->stats : &none;
}

/* ---- looking ------------------------------------------------------------- */

void drain_look_end(struct drain_look *l)
{
        list_free(l->status);
        list_free(l->partitions);
        list_free(l->explained);
        *l = (struct drain_look){ 0 };
}

static int look(struct ask *a, const char *device, struct drain_look *ret)
{
        int r = ask_list(a, BFCD__LIST__KIND__STATUS, &ret->status);

        for (size_t i = 0; r == 0 && i < ret->status->status->n_devices; i++)
                if (strcmp(ret->status->status->devices[i]->id, device) == 0)
                        ret->device = ret->status->status->devices[i];
        if (r < 0)
                return r;
        ret->is_drained = ret->device && strcmp(ret->device->state, "drained") == 0;
        if (ret->is_drained || (ret->device && strcmp(ret->device->state, "draining") == 0))
                return 0;
        snprintf(a->error, sizeof(a->error), "The device is no longer draining: it was resumed.");
        return -EINVAL;
}

static void show_progress(struct progress *p, uint64_t n_left)
{
        uint64_t total = p->n_total > n_left ? p->n_total : n_left;

        progress_set(p, total - n_left, total);
}

int drain_wait(struct ask *a, const char *device, int64_t timeout_ms, struct drain_look *ret)
{
        int64_t until_ms = timeout_ms < 0 ? INT64_MAX : (int64_t)clock_ms() + timeout_ms;
        struct drain_look l = { 0 };
        struct progress progress;
        int r;

        progress_begin(&progress, NULL, "drain", 0);
        while ((r = look(a, device, &l)) == 0 && !l.is_drained && (int64_t)clock_ms() < until_ms) {
                show_progress(&progress, l.device->bytes_reserved);
                drain_look_end(&l);
                clock_pause(LOOK_MS);
        }
        progress_end(&progress);
        if (r == 0 && !l.is_drained)
                r = ask_list(a, BFCD__LIST__KIND__PARTITIONS, &l.partitions);
        if (r == 0 && !l.is_drained)
                r = ask_explain(a, "", "", &l.explained);
        if (r < 0) {
                drain_look_end(&l);
                return r;
        }
        *ret = l;
        return 0;
}

/* ---- what is in use -------------------------------------------------------- */

static bool is_of_device(const struct drain_look *l, const Bfcd__ExplainRow *row)
{
        for (size_t i = 0; i < l->partitions->n_partitions; i++)
                if (strcmp(l->partitions->partitions[i]->name, row->partition) == 0)
                        return strcmp(l->partitions->partitions[i]->device, l->device->id) == 0;
        return false;
}

/* A tenant that uses memory of the device; rows without a tenant are sums. */
static bool is_told(const struct drain_look *l, const Bfcd__ExplainRow *row)
{
        return *row->tenant && stats_of(row)->bytes_reserved > 0 && is_of_device(l, row);
}

/* Bytes of blocks that are not in the holders: shared blocks, and sessions beyond those that are listed. */
static uint64_t rest_of(const Bfcd__ExplainRow *row)
{
        uint64_t n_bytes = stats_of(row)->bytes_in_use;

        for (size_t i = 0; i < row->n_holders; i++)
                n_bytes -= row->holders[i]->bytes_in_use < n_bytes ? row->holders[i]->bytes_in_use : n_bytes;
        return n_bytes;
}

/* Bytes of extents without blocks: being released, or still mapped by a former user. */
static uint64_t mapped_of(const Bfcd__ExplainRow *row)
{
        const Bfcd__Statistics *f = stats_of(row);
        uint64_t gone =
                f->bytes_unreclaimed < f->bytes_reserved ? f->bytes_reserved - f->bytes_unreclaimed : 0;

        return row->bytes_retiring < gone ? row->bytes_retiring : gone;
}

/* A session that uses memory of the device, or other memory, which `what` describes and the JSON leaves out. */
struct drain_row {
        const char *tenant, *partition, *what;
        uint64_t n_bytes;
        const Bfcd__Holder *holder; /* or NULL */
};

static const char *no_holder(const void *row)
{
        return ((const struct drain_row *)row)->holder ? NULL : "-";
}

static const char *no_name(const void *row)
{
        return ((const struct drain_row *)row)->what;
}

#define ROW(title, key, flags, type, member) TABLE_COLUMN(title, key, flags, type, struct drain_row, member)
#define HOLDER(title, key, flags, type, member)                                                              \
        title, key, flags, type, TABLE_MEMBER(Bfcd__Holder, member), .via = offsetof(struct drain_row, holder)

static const struct table_column columns[] = {
        ROW("TENANT", "tenant", TABLE_LEFT, TABLE_TEXT, tenant),
        ROW("PARTITION", "partition", TABLE_LEFT, TABLE_TEXT, partition),
        { HOLDER("SESSION", "session_id", TABLE_RIGHT, TABLE_NUMBER, session_id), .instead = no_holder },
        { HOLDER("PID", "pid", TABLE_RIGHT, TABLE_NUMBER, pid), .instead = no_holder },
        { HOLDER("NAME", "name", TABLE_LEFT, TABLE_TEXT, name), .instead = no_name },
        { HOLDER("STATE", "state", TABLE_LEFT, TABLE_TEXT, state), .instead = no_holder },
        ROW("HELD", "bytes_in_use", TABLE_RIGHT, TABLE_SIZE, n_bytes),
        { HOLDER("IDLE", "client_bytes_idle", TABLE_RIGHT, TABLE_SIZE, client_bytes_idle),
          .instead = no_holder },
        { 0 },
};

/* Calls `add` for each row, those without a holder too. */
static int for_each_row(const struct drain_look *l, int (*add)(void *to, const struct drain_row *row),
                        void *to)
{
        int r = 0;

        for (size_t i = 0; l->explained && i < l->explained->n_explained && r == 0; i++) {
                const Bfcd__ExplainRow *e = l->explained->explained[i];
                struct drain_row row = { .tenant = e->tenant, .partition = e->partition };

                if (!is_told(l, e))
                        continue;
                for (size_t k = 0; k < e->n_holders && r == 0; k++) {
                        row.holder = e->holders[k];
                        row.n_bytes = row.holder->bytes_in_use;
                        r = add(to, &row);
                }
                row.holder = NULL;
                row.what = "(shared or other)";
                row.n_bytes = rest_of(e);
                if (r == 0 && row.n_bytes > 0)
                        r = add(to, &row);
                row.what = "(being released)";
                row.n_bytes = mapped_of(e);
                if (r == 0 && row.n_bytes > 0)
                        r = add(to, &row);
        }
        return r;
}

static int add_line(void *table, const struct drain_row *row)
{
        return table_add(table, row);
}

static int print_holders(FILE *out, const struct drain_look *l)
{
        struct table *t;
        int r = table_new(columns, NULL, &t);

        if (r < 0)
                return r;
        r = for_each_row(l, add_line, t);
        if (r == 0)
                r = table_flush(t, out);
        table_free(t);
        return r;
}

int drain_print(FILE *out, const struct drain_look *l)
{
        char *id = text_escape(l->device->id);
        uint64_t n_unreclaimed = l->device->bytes_unreclaimed, n_held = l->device->bytes_reserved;
        char size[TEXT_MAX];

        if (!id)
                return -ENOMEM;
        n_held -= n_unreclaimed < n_held ? n_unreclaimed : n_held;
        if (l->is_drained)
                fprintf(out, "Device %s is drained.\n", id);
        else
                fprintf(out, "Device %s is draining; still in use: %s\n", id, text_size(n_held, size));
        if (n_unreclaimed > 0)
                fprintf(out, "%s are unreclaimed; processes may still have them mapped.\n",
                        text_size(n_unreclaimed, size));
        free(id);
        return l->is_drained ? 0 : print_holders(out, l);
}

/* ---- for programs ------------------------------------------------------------ */

static int add_json(void *holders, const struct drain_row *row)
{
        if (row->holder)
                table_json_push(holders, table_json(columns, row));
        return 0;
}

json_t *drain_json(const struct drain_look *l)
{
        json_t *value = json_object(), *holders = json_array();

        for_each_row(l, add_json, &holders);
        table_json_set(&value, "device", table_json_string(l->device->id));
        table_json_set(&value, "state", table_json_string(l->device->state));
        table_json_set(&value, "bytes_reserved", table_json_number(l->device->bytes_reserved));
        table_json_set(&value, "bytes_unreclaimed", table_json_number(l->device->bytes_unreclaimed));
        table_json_set(&value, "holders", holders);
        return show_document("drain", value);
}
