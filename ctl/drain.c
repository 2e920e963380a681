/* bfcctl drain: see drain.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The daemon tells no operator when it is done, so its status is looked at. */
#include "ctl/drain.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ctl/show.h"
#include "ctl/table.h"
#include "ctl/text.h"

#define LOOK_MS 50 /* between two looks */

static const Bfcd__Figures *figures_of(const Bfcd__ExplainRow *row)
{
        static const Bfcd__Figures none = BFCD__FIGURES__INIT;

        return row->figures ? row->figures : &none;
}

/* ---- looking ------------------------------------------------------------- */

static int64_t now_ms(void)
{
        struct timespec now;

        clock_gettime(CLOCK_MONOTONIC, &now);
        return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

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

int drain_wait(struct ask *a, const char *device, int64_t timeout_ms, struct drain_look *ret)
{
        const struct timespec pause = { .tv_nsec = LOOK_MS * 1000000L };
        int64_t until_ms = timeout_ms < 0 ? INT64_MAX : now_ms() + timeout_ms;
        struct drain_look l = { 0 };
        int r;

        while ((r = look(a, device, &l)) == 0 && !l.is_drained && now_ms() < until_ms) {
                drain_look_end(&l);
                nanosleep(&pause, NULL);
        }
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

/* ---- who holds what -------------------------------------------------------- */

static bool is_of_device(const struct drain_look *l, const Bfcd__ExplainRow *row)
{
        for (size_t i = 0; i < l->partitions->n_partitions; i++)
                if (strcmp(l->partitions->partitions[i]->name, row->partition) == 0)
                        return strcmp(l->partitions->partitions[i]->device, l->device->id) == 0;
        return false;
}

/* A tenant's, which has something there; the rows without a tenant are sums. */
static bool is_told(const struct drain_look *l, const Bfcd__ExplainRow *row)
{
        return *row->tenant && figures_of(row)->bytes_reserved > 0 && is_of_device(l, row);
}

/* Blocks that are none of the sessions' that are named: shared ones, and of more sessions than there are
 * names for. */
static uint64_t rest_of(const Bfcd__ExplainRow *row)
{
        uint64_t n_bytes = figures_of(row)->bytes_in_use;

        for (size_t i = 0; i < row->n_holders; i++)
                n_bytes -= row->holders[i]->bytes_in_use < n_bytes ? row->holders[i]->bytes_in_use : n_bytes;
        return n_bytes;
}

/* Extents in which no block lies: on their way, or still mapped by who had them. */
static uint64_t mapped_of(const Bfcd__ExplainRow *row)
{
        const Bfcd__Figures *f = figures_of(row);
        uint64_t gone = f->bytes_escaped < f->bytes_reserved ? f->bytes_reserved - f->bytes_escaped : 0;

        return row->bytes_retiring < gone ? row->bytes_retiring : gone;
}

static const struct table_column columns[] = {
        { "TENANT", TABLE_LEFT }, { "PARTITION", TABLE_LEFT }, { "SESSION", TABLE_RIGHT },
        { "PID", TABLE_RIGHT },   { "NAME", TABLE_LEFT },      { "STATE", TABLE_LEFT },
        { "HELD", TABLE_RIGHT },  { "IDLE", TABLE_RIGHT },
};

static void add_other(struct table *t, const Bfcd__ExplainRow *row, const char *what, uint64_t n_bytes)
{
        if (n_bytes == 0)
                return;
        table_text(t, row->tenant);
        table_text(t, row->partition);
        table_text(t, "-");
        table_text(t, "-");
        table_text(t, what);
        table_text(t, "-");
        table_size(t, n_bytes);
        table_text(t, "-");
}

static void add_row(struct table *t, const Bfcd__ExplainRow *row)
{
        for (size_t i = 0; i < row->n_holders; i++) {
                const Bfcd__Holder *h = row->holders[i];

                table_text(t, row->tenant);
                table_text(t, row->partition);
                table_number(t, h->session_id);
                table_number(t, h->pid);
                table_text(t, h->name);
                table_text(t, h->state);
                table_size(t, h->bytes_in_use);
                table_size(t, h->client_bytes_idle);
        }
        add_other(t, row, "(shared or other)", rest_of(row));
        add_other(t, row, "(being released)", mapped_of(row));
}

static int print_holders(FILE *out, const struct drain_look *l)
{
        struct table *t;
        int r = table_new(columns, sizeof(columns) / sizeof(columns[0]), &t);

        if (r < 0)
                return r;
        for (size_t i = 0; i < l->explained->n_explained; i++)
                if (is_told(l, l->explained->explained[i]))
                        add_row(t, l->explained->explained[i]);
        r = table_print(t, out);
        table_free(t);
        return r;
}

int drain_print(FILE *out, const struct drain_look *l)
{
        char *id = text_escape(l->device->id);
        uint64_t n_escaped = l->device->bytes_escaped, n_held = l->device->bytes_reserved;
        char size[TEXT_MAX];

        if (!id)
                return -ENOMEM;
        n_held -= n_escaped < n_held ? n_escaped : n_held;
        if (l->is_drained)
                fprintf(out, "Device %s is drained.\n", id);
        else
                fprintf(out, "Device %s is draining; still in use: %s\n", id, text_size(n_held, size));
        if (n_escaped > 0)
                fprintf(out, "%s are unreclaimed; processes may still have them mapped.\n",
                        text_size(n_escaped, size));
        free(id);
        return l->is_drained ? 0 : print_holders(out, l);
}

/* ---- for programs ------------------------------------------------------------ */

static json_t *holder_json(const Bfcd__ExplainRow *row, const Bfcd__Holder *h)
{
        json_t *value = json_object();

        show_set(&value, "tenant", show_string(row->tenant));
        show_set(&value, "partition", show_string(row->partition));
        show_set(&value, "session_id", show_number(h->session_id));
        show_set(&value, "pid", show_number(h->pid));
        show_set(&value, "name", show_string(h->name));
        show_set(&value, "state", show_string(h->state));
        show_set(&value, "bytes_in_use", show_number(h->bytes_in_use));
        show_set(&value, "client_bytes_idle", show_number(h->client_bytes_idle));
        return value;
}

json_t *drain_json(const struct drain_look *l)
{
        json_t *value = json_object(), *holders = json_array();

        for (size_t i = 0; l->explained && i < l->explained->n_explained; i++) {
                const Bfcd__ExplainRow *row = l->explained->explained[i];

                for (size_t k = 0; is_told(l, row) && k < row->n_holders; k++)
                        show_push(&holders, holder_json(row, row->holders[k]));
        }
        show_set(&value, "device", show_string(l->device->id));
        show_set(&value, "state", show_string(l->device->state));
        show_set(&value, "bytes_reserved", show_number(l->device->bytes_reserved));
        show_set(&value, "bytes_escaped", show_number(l->device->bytes_escaped));
        show_set(&value, "holders", holders);
        return show_document("drain", value);
}
