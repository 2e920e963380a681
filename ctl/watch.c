/* bfcctl events and bfcctl wait; see watch.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Two lists of sessions are merged by their numbers, and those of refusals by their tenants, so that a look takes time in
 * proportion to the lists. */
#include "ctl/watch.h"

#include <errno.h>
#include <string.h>
#include <time.h>

#include "ctl/amount.h"
#include "ctl/clock.h"
#include "ctl/command.h"
#include "ctl/table.h"
#include "ctl/text.h"

#define LOOK_MS      1000u
#define TENANT_BYTES 256

/* ---- events ----------------------------------------------------------------- */

static json_t *event_new(const char *what, uint64_t time_ms)
{
        json_t *ret = json_object();

        table_json_set(&ret, "event", json_string(what));
        table_json_set(&ret, "time_ms", table_json_number(time_ms));
        return ret;
}

static int put(FILE *out, json_t *event)
{
        int r = event ? json_dumpf(event, out, JSON_COMPACT) : -ENOMEM;

        json_decref(event);
        if (r == 0)
                fputc('\n', out);
        return r == -ENOMEM ? r : ferror(out) ? -EIO : 0;
}

static int put_session(FILE *out, const char *what, uint64_t time_ms, const Bfcd__SessionRow *s)
{
        json_t *e = event_new(what, time_ms);

        table_json_set(&e, "session_id", table_json_number(s->session_id));
        table_json_set(&e, "tenant", table_json_string(s->tenant));
        table_json_set(&e, "name", table_json_string(s->name));
        table_json_set(&e, "pid", table_json_number(s->pid));
        table_json_set(&e, "uid", table_json_number(s->uid));
        table_json_set(&e, "peak_bytes_in_use", table_json_number(s->peak_bytes_in_use));
        return put(out, e);
}

static int put_refusal(FILE *out, const Bfcd__RefusalRow *f)
{
        json_t *e = event_new("refusal", f->time_ms);

        table_json_set(&e, "tenant", table_json_string(f->tenant));
        table_json_set(&e, "partition", table_json_string(f->partition));
        table_json_set(&e, "lease", table_json_string(f->lease));
        table_json_set(&e, "session_id", table_json_number(f->session_id));
        table_json_set(&e, "name", table_json_string(f->program));
        table_json_set(&e, "pid", table_json_number(f->pid));
        table_json_set(&e, "uid", table_json_number(f->uid));
        table_json_set(&e, "n_bytes", table_json_number(f->n_bytes));
        table_json_set(&e, "limit", table_json_string(f->limit));
        table_json_set(&e, "sentence", table_json_string(f->sentence));
        return put(out, e);
}

/* Sessions without a tenant are programs that ask, such as this one. */
static int put_sessions(FILE *out, const struct list *a, const struct list *b, uint64_t own_id,
                        uint64_t time_ms)
{
        size_t i = 0, k = 0;
        int r = 0;

        while (r == 0 && (i < a->n_sessions || k < b->n_sessions)) {
                const Bfcd__SessionRow *old = i < a->n_sessions ? a->sessions[i] : NULL,
                                       *new = k < b->n_sessions ? b->sessions[k] : NULL;
                bool is_end = !new || (old && old->session_id < new->session_id);
                bool is_begin = !old || (new &&new->session_id < old->session_id);
                const Bfcd__SessionRow *s = is_end ? old : new;

                i += !is_begin;
                k += !is_end;
                if (!*s->tenant || s->session_id == own_id)
                        continue;
                if (is_begin)
                        r = put_session(out, "session_begin", time_ms, s);
                if (r == 0 && !is_end && s->is_evicted && (is_begin || !old->is_evicted))
                        r = put_session(out, "eviction", time_ms, s);
                if (is_end)
                        r = put_session(out, "session_end", time_ms, s);
        }
        return r;
}

static int compare_refusals(const Bfcd__RefusalRow *a, const Bfcd__RefusalRow *b)
{
        int r = strcmp(a->tenant, b->tenant);

        return r ? r : (a->number > b->number) - (a->number < b->number);
}

static int put_refusals(FILE *out, const struct list *a, const struct list *b)
{
        size_t i = 0;
        int r = 0;

        for (size_t k = 0; r == 0 && k < b->n_refusals; k++) {
                while (i < a->n_refusals && compare_refusals(a->refusals[i], b->refusals[k]) < 0)
                        i++;
                if (i == a->n_refusals || compare_refusals(a->refusals[i], b->refusals[k]) != 0)
                        r = put_refusal(out, b->refusals[k]);
        }
        return r;
}

static int put_devices(FILE *out, const struct list *a, const struct list *b, uint64_t time_ms)
{
        const Bfcd__Status *old = a->status, *new = b->status;
        int r = 0;

        for (size_t i = 0; r == 0 && old && new &&i < new->n_devices &&i < old->n_devices; i++) {
                json_t *e;

                if (strcmp(old->devices[i]->state, new->devices[i]->state) == 0)
                        continue;
                e = event_new("device", time_ms);
                table_json_set(&e, "device", table_json_string(new->devices[i]->id));
                table_json_set(&e, "state", table_json_string(new->devices[i]->state));
                r = put(out, e);
        }
        return r;
}

int watch_print(FILE *out, const struct list *before, const struct list *now, uint64_t own_session_id,
                uint64_t time_ms)
{
        int r = put_sessions(out, before, now, own_session_id, time_ms);

        if (r == 0)
                r = put_refusals(out, before, now);
        return r == 0 ? put_devices(out, before, now, time_ms) : r;
}

static uint64_t wall_ms(void)
{
        struct timespec now;

        clock_gettime(CLOCK_REALTIME, &now);
        return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

int run_events(struct ask *a, const struct invocation *i, const struct command *c)
{
        static const Bfcd__List__Kind kinds[] = { BFCD__LIST__KIND__STATUS, BFCD__LIST__KIND__SESSIONS,
                                                  BFCD__LIST__KIND__REFUSALS };
        struct list *before = NULL, *now;
        int r;

        (void)i;
        (void)c;
        for (;;) {
                if (ask_lists(a, kinds, sizeof(kinds) / sizeof(kinds[0]), &now) < 0)
                        break;
                r = before ? watch_print(stdout, before, now, a->session_id, wall_ms()) : 0;
                list_free(before);
                before = now;
                if (r < 0 || fflush(stdout) != 0) {
                        list_free(before);
                        return command_finish(r < 0 ? r : -EIO);
                }
                clock_pause(LOOK_MS);
        }
        list_free(before);
        return command_complain(a);
}

/* ---- wait -------------------------------------------------------------------- */

static uint64_t least(uint64_t a, uint64_t b)
{
        return a < b ? a : b;
}

static uint64_t rest(const Bfcd__Statistics *s)
{
        return s && s->bytes_limit > s->bytes_reserved ? s->bytes_limit - s->bytes_reserved : 0;
}

static const Bfcd__Statistics *of_tenant(const struct list *l, const char *tenant, const char *partition)
{
        for (size_t i = 0; i < l->n_tenants; i++)
                if (strcmp(l->tenants[i]->tenant, tenant) == 0 &&
                    strcmp(l->tenants[i]->partition, partition) == 0)
                        return l->tenants[i]->stats;
        return NULL;
}

static const Bfcd__Statistics *of_partition(const struct list *l, const char *partition)
{
        for (size_t i = 0; i < l->n_partitions; i++)
                if (strcmp(l->partitions[i]->name, partition) == 0)
                        return l->partitions[i]->stats;
        return NULL;
}

uint64_t watch_room(const struct list *l, const char *tenant, const char *partition)
{
        const Bfcd__Statistics *quota = of_tenant(l, tenant, partition), *whole = of_partition(l, partition);

        return quota && whole ? quota->bytes_free + least(rest(quota), rest(whole)) : 0;
}

struct awaited {
        const char *lease;              /* the end of this lease, or: */
        const char *tenant, *partition; /* this room */
        uint64_t n_bytes;
};

/* Whether so much could ever be there, with the limits as they are. */
static int check_limit(struct ask *a, const struct list *l, const struct awaited *w)
{
        const Bfcd__Statistics *quota = of_tenant(l, w->tenant, w->partition);
        const Bfcd__Statistics *whole = of_partition(l, w->partition);
        char asked[TEXT_MAX], limit[TEXT_MAX];
        uint64_t n_bytes;

        if (!quota || !whole) {
                snprintf(a->error, sizeof(a->error), "Tenant '%.63s' has no quota in partition '%.63s'",
                         w->tenant, w->partition);
                return -ENOENT;
        }
        n_bytes = least(quota->bytes_limit, whole->bytes_limit);
        if (w->n_bytes <= n_bytes)
                return 0;
        snprintf(a->error, sizeof(a->error),
                 "%s is more than the limit of tenant '%.63s' in partition '%.63s', %s",
                 text_size(w->n_bytes, asked), w->tenant, w->partition, text_size(n_bytes, limit));
        return -EDQUOT;
}

/* 1: it has come. */
static int look(struct ask *a, const struct awaited *w)
{
        static const Bfcd__List__Kind of_room[] = { BFCD__LIST__KIND__TENANTS, BFCD__LIST__KIND__PARTITIONS };
        static const Bfcd__List__Kind of_lease[] = { BFCD__LIST__KIND__LEASES };
        struct list *l;
        int r = w->lease ? ask_lists(a, of_lease, 1, &l) : ask_lists(a, of_room, 2, &l);

        if (r < 0)
                return r;
        if (w->lease) {
                r = 1;
                for (size_t i = 0; i < l->n_leases; i++)
                        r = strcmp(l->leases[i]->name, w->lease) == 0 ? 0 : r;
        } else {
                r = ask_check_name(a, l, BFCD__LIST__KIND__PARTITIONS, w->partition);
                if (r == 0)
                        r = ask_check_name(a, l, BFCD__LIST__KIND__TENANTS, w->tenant);
                if (r == 0)
                        r = watch_room(l, w->tenant, w->partition) >= w->n_bytes;
                if (r == 0)
                        r = check_limit(a, l, w);
        }
        list_free(l);
        return r;
}

static int wait_for(struct ask *a, const struct awaited *w, int64_t timeout_ms)
{
        uint64_t begin_ms = clock_ms();
        int r;

        while ((r = look(a, w)) == 0) {
                uint64_t waited_ms = clock_ms() - begin_ms;

                if (timeout_ms >= 0 && waited_ms >= (uint64_t)timeout_ms) {
                        fprintf(stderr, "bfcctl: Timeout.\n");
                        return EXIT_TIMED_OUT;
                }
                clock_pause((unsigned)(timeout_ms < 0 ? LOOK_MS
                                                      : least((uint64_t)timeout_ms - waited_ms, LOOK_MS)));
        }
        return r < 0 ? command_complain(a) : EXIT_SUCCESS;
}

/* The tenant of this user, if none is named. */
static int own_tenant(struct ask *a, char ret[static TENANT_BYTES])
{
        struct list *l;

        if (ask_list(a, BFCD__LIST__KIND__WHOAMI, &l) < 0)
                return -1;
        snprintf(ret, TENANT_BYTES, "%s", l->whoami->tenant);
        list_free(l);
        return 0;
}

int run_wait(struct ask *a, const struct invocation *i, const struct command *c)
{
        bool is_lease = strcmp(i->arguments[0], "lease") == 0, is_room = !is_lease;
        char name[ASK_NAME_BYTES], tenant[TENANT_BYTES] = "";
        struct awaited w = { .tenant = i->tenant ? i->tenant : tenant };
        uint64_t timeout_ms = 0;

        (void)c;
        if (i->timeout && !amount_time(i->timeout, &timeout_ms))
                return command_usage("wrong value for --timeout", i->timeout, AMOUNT_TIME);
        if (is_room && (!amount_size(i->arguments[2], &w.n_bytes) || w.n_bytes == 0))
                return command_usage("wrong size", i->arguments[2], "a size, as in 512MiB");
        if (is_lease ? ask_lease_name(a, i->arguments[1], name) < 0 : !i->tenant && own_tenant(a, tenant) < 0)
                return command_complain(a);
        if (is_room && !*w.tenant)
                return command_usage("no --tenant", NULL, i->use);
        if (is_lease)
                w.lease = name;
        else
                w.partition = i->arguments[1];
        return wait_for(a, &w, i->timeout ? (int64_t)timeout_ms : -1);
}
