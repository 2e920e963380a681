/* The last hour of partitions and tenants; see hour.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A series is a ring: the slot with number n since the clock's start is at n % HOUR_SLOTS. All rings have the same
 * newest slot, and time that passes makes the slots that it reaches unknown. */
#include "ctl/hour.h"

#include <errno.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "ctl/show.h"
#include "ctl/table.h"
#include "ctl/text.h"

#define UNKNOWN UINT64_MAX

const Bfcd__List__Kind hour_lists[HOUR_LISTS] = { BFCD__LIST__KIND__PARTITIONS, BFCD__LIST__KIND__TENANTS };

struct series {
        char *partition, *tenant; /* tenant: NULL: of the partition */
        uint64_t last;            /* the slot of its last sample */
        uint64_t in_use[HOUR_SLOTS], reserved[HOUR_SLOTS];
};

struct hour {
        struct series *series[HOUR_SERIES];
        size_t n_series, n_left_out;
        size_t next; /* where the next row's series is expected: lists keep their order */
        uint64_t newest;
};

static struct series *series_free(struct series *s)
{
        if (s) {
                free(s->partition);
                free(s->tenant);
        }
        free(s);
        return NULL;
}

static struct series *series_new(const char *partition, const char *tenant)
{
        struct series *s = calloc(1, sizeof(*s));

        if (!s)
                return NULL;
        s->partition = strdup(partition);
        s->tenant = tenant ? strdup(tenant) : NULL;
        for (size_t i = 0; i < HOUR_SLOTS; i++)
                s->in_use[i] = s->reserved[i] = UNKNOWN;
        return s->partition && (s->tenant || !tenant) ? s : series_free(s);
}

static bool series_is_of(const struct series *s, const char *partition, const char *tenant)
{
        return strcmp(s->partition, partition) == 0 &&
               (tenant && s->tenant ? strcmp(s->tenant, tenant) == 0 : !tenant && !s->tenant);
}

int hour_new(struct hour **ret)
{
        struct hour *h = calloc(1, sizeof(*h));

        if (!h)
                return -ENOMEM;
        *ret = h;
        return 0;
}

struct hour *hour_free(struct hour *h)
{
        if (!h)
                return NULL;
        for (size_t i = 0; i < h->n_series; i++)
                series_free(h->series[i]);
        free(h);
        return NULL;
}

/* ---- time ---------------------------------------------------------------------- */

static void drop_old(struct hour *h)
{
        size_t n = 0;

        for (size_t i = 0; i < h->n_series; i++) {
                if (h->newest - h->series[i]->last < HOUR_SLOTS)
                        h->series[n++] = h->series[i];
                else
                        series_free(h->series[i]);
        }
        h->n_series = n;
}

static void pass_time(struct hour *h, uint64_t now_ms)
{
        uint64_t slot = now_ms / HOUR_SLOT_MS;
        uint64_t begin = slot - h->newest < HOUR_SLOTS ? h->newest + 1 : slot - HOUR_SLOTS + 1;

        if (slot <= h->newest)
                return;
        for (size_t i = 0; i < h->n_series; i++)
                for (uint64_t k = begin; k <= slot; k++)
                        h->series[i]->in_use[k % HOUR_SLOTS] = h->series[i]->reserved[k % HOUR_SLOTS] =
                                UNKNOWN;
        h->newest = slot;
        drop_old(h);
}

/* ---- samples --------------------------------------------------------------------- */

/* NULL: there is none. */
static struct series *find(struct hour *h, const char *partition, const char *tenant)
{
        for (size_t i = 0; i < h->n_series; i++) {
                size_t at = (h->next + i) % h->n_series;

                if (series_is_of(h->series[at], partition, tenant)) {
                        h->next = at + 1;
                        return h->series[at];
                }
        }
        return NULL;
}

static uint64_t higher(uint64_t before, uint64_t n_bytes)
{
        return before == UNKNOWN || n_bytes > before ? n_bytes : before;
}

static int add(struct hour *h, const char *partition, const char *tenant, const Bfcd__Statistics *stats)
{
        struct series *s = find(h, partition, tenant);
        size_t at = h->newest % HOUR_SLOTS;

        if (!stats || (!s && h->n_series == HOUR_SERIES)) {
                h->n_left_out++;
                return 0;
        }
        if (!s) {
                s = series_new(partition, tenant);
                if (!s)
                        return -ENOMEM;
                h->series[h->n_series++] = s;
                h->next = h->n_series;
        }
        s->last = h->newest;
        s->in_use[at] = higher(s->in_use[at], stats->bytes_in_use);
        s->reserved[at] = higher(s->reserved[at], stats->bytes_reserved);
        return 0;
}

int hour_add(struct hour *h, uint64_t now_ms, const struct list *l)
{
        int r = 0;

        pass_time(h, now_ms);
        h->n_left_out = 0;
        h->next = 0;
        for (size_t i = 0; i < l->n_partitions && r == 0; i++)
                r = add(h, l->partitions[i]->name, NULL, l->partitions[i]->stats);
        for (size_t i = 0; i < l->n_tenants && r == 0; i++)
                r = add(h, l->tenants[i]->partition, l->tenants[i]->tenant, l->tenants[i]->stats);
        return r;
}

/* ---- printing -------------------------------------------------------------------- */

static void put_slots(FILE *out, const struct hour *h, const char *key, const uint64_t *slots)
{
        fprintf(out, ", \"%s\": [", key);
        for (size_t i = 1; i <= HOUR_SLOTS; i++) {
                uint64_t n = slots[(h->newest + i) % HOUR_SLOTS];

                if (n == UNKNOWN)
                        fputs("null", out);
                else
                        fprintf(out, "%" PRIu64, n);
                fputs(i < HOUR_SLOTS ? ", " : "]", out);
        }
}

static void put_series(FILE *out, const struct hour *h, const struct series *s)
{
        fputs("{\"partition\": ", out);
        table_json_text(out, s->partition);
        fputs(", \"tenant\": ", out);
        if (s->tenant)
                table_json_text(out, s->tenant);
        else
                fputs("null", out);
        put_slots(out, h, "bytes_in_use", s->in_use);
        put_slots(out, h, "bytes_reserved", s->reserved);
        putc('}', out);
}

int hour_print(FILE *out, struct hour *h, uint64_t now_ms)
{
        pass_time(h, now_ms);
        fprintf(out,
                "{\n  \"schema\": %d,\n  \"hour\": {\"slot_ms\": %u, \"num_left_out\": %zu, \"series\": [",
                SHOW_SCHEMA, HOUR_SLOT_MS, h->n_left_out);
        for (size_t i = 0; i < h->n_series; i++) {
                fputs(i > 0 ? ",\n    " : "\n    ", out);
                put_series(out, h, h->series[i]);
        }
        fputs("\n  ]}\n}\n", out);
        return text_flush(out);
}
