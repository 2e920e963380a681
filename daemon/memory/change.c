/* Changes of the config; see change.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/change.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/memory/drain.h"
#include "daemon/config/schema.h"
#include "daemon/memory/broker_lease.h"
#include "daemon/memory/broker_lease_auto.h"
#include "daemon/base/number.h"

struct change_tenant {
        struct tenant *tenant; /* NULL: a new one, that has not been made */
        bool is_new;
        size_t n_quotas_before; /* of an existing tenant */
};

struct change_partition {
        uint64_t limit_bytes;
        uint64_t committed_bytes; /* after the change */
};

struct change {
        struct broker *b;
        struct config *next;
        FILE *changes, *errors;
        bool failed;
        size_t *partition_of;                   /* by next's index: the broker's */
        struct change_partition *partitions;    /* by the broker's index */
        struct change_tenant *tenants;          /* as next lists them */
        const struct config_tenant **config_of; /* by the broker's place; NULL: next lacks the tenant */
        struct tenant **by_name;                /* of the broker, sorted */
        size_t n_by_name;
        struct tenant **order;                             /* to be the broker's */
        char *config_text;                                 /* to be the broker's */
        struct matcher *matcher;                           /* to be the broker's */
        struct capacity *capacity;                         /* to be the broker's */
        uint64_t n_quotas, n_extents, n_exports, n_blocks; /* records that may be needed */
};

struct shown_size {
        char text[32];
};
#define SIZE(n_bytes) config_size(n_bytes, (struct shown_size){ { 0 } }.text, sizeof(struct shown_size))

/* ---- the old and the new -------------------------------------------------- */

static int compare_names(const void *left, const void *right)
{
        const struct tenant *const *a = left, *const *b = right;

        return strcmp((*a)->name, (*b)->name);
}

static int compare_name(const void *key, const void *element)
{
        const struct tenant *const *t = element;

        return strcmp(key, (*t)->name);
}

static struct tenant *find_tenant(const struct change *c, const char *name)
{
        struct tenant **found;

        found = bsearch(name, c->by_name, c->n_by_name, sizeof(*c->by_name), compare_name);
        return found ? *found : NULL;
}

/* An existing quota in the next config; NULL: it is removed. */
static const struct config_quota *find_config_quota(const struct change *c, const struct config_tenant *t,
                                                    const struct quota *q)
{
        for (size_t i = 0; t && i < t->n_quotas; i++)
                if (&c->b->partitions[c->partition_of[t->quotas[i].partition]] == q->partition)
                        return &t->quotas[i];
        return NULL;
}

/* Of an existing tenant. */
static const struct config_tenant *change_config_of(const struct change *c, const struct tenant *t)
{
        return c->config_of[t - c->b->tenants];
}

static int change_map_partitions(struct change *c)
{
        const struct config *next = c->next;

        c->partition_of = calloc(next->n_partitions + 1, sizeof(*c->partition_of));
        c->partitions = calloc(c->b->n_partitions + 1, sizeof(*c->partitions));
        if (!c->partition_of || !c->partitions)
                return -ENOMEM;
        for (size_t i = 0; i < next->n_partitions; i++) {
                size_t k = 0;

                while (k < c->b->n_partitions &&
                       strcmp(c->b->partitions[k].name, next->partitions[i].name) != 0)
                        k++;
                assert(k < c->b->n_partitions); /* the reader of the config ensures that */
                c->partition_of[i] = k;
                c->partitions[k].limit_bytes = next->partitions[i].limit_bytes;
        }
        return 0;
}

static int change_map_tenants(struct change *c)
{
        struct broker *b = c->b;

        c->by_name = calloc(b->n_tenants + 1, sizeof(*c->by_name));
        c->tenants = calloc(c->next->n_tenants + 1, sizeof(*c->tenants));
        c->order = calloc(c->next->n_tenants + 1, sizeof(*c->order));
        c->config_of = calloc(b->n_tenants + 1, sizeof(const struct config_tenant *));
        c->config_text = config_format(c->next);
        c->capacity = capacity_new(c->next);

        /* All that the broker takes over is made now: to apply a change needs no memory. */
        if (!c->config_of || !c->by_name || !c->tenants || !c->order || !c->config_text || !c->capacity ||
            matcher_new(c->next, &c->matcher) < 0)
                return -ENOMEM;

        /* Tenants are the same if their names are: sessions of a renamed tenant stay with the old one. */
        for (size_t i = 0; i < b->n_tenants; i++)
                if (b->tenants[i].name[0] != '\0')
                        c->by_name[c->n_by_name++] = &b->tenants[i];
        qsort(c->by_name, c->n_by_name, sizeof(*c->by_name), compare_names);
        for (size_t i = 0; i < c->next->n_tenants; i++) {
                struct change_tenant *t = &c->tenants[i];

                t->tenant = find_tenant(c, c->next->tenants[i].name);
                t->is_new = !t->tenant;
                t->n_quotas_before = t->tenant ? t->tenant->n_quotas : 0;
                if (t->tenant)
                        c->config_of[t->tenant - b->tenants] = &c->next->tenants[i];
        }
        return 0;
}

static void change_free(struct change *c)
{
        free(c->partition_of);
        free(c->partitions);
        free(c->tenants);
        free(c->config_of);
        free(c->by_name);
        free(c->order);
        free(c->config_text);
        free(c->capacity);
        matcher_free(c->matcher);
}

/* ---- checking ------------------------------------------------------------- */

static void change_fail(struct change *c, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void change_fail(struct change *c, const char *format, ...)
{
        va_list args;

        c->failed = true;
        va_start(args, format);
        vfprintf(c->errors, format, args);
        va_end(args);
        fputc('\n', c->errors);
}

/* Adds the records that a quota may need, and what it takes of its pool. */
static void change_count(struct change *c, size_t partition, uint64_t n_extents, uint64_t n_sessions,
                         uint64_t n_blocks, uint64_t committed_bytes)
{
        c->n_quotas++;
        c->n_extents += n_extents;
        c->n_exports += n_extents * min_u64(n_sessions, c->b->room.n_sessions);
        c->n_blocks += n_blocks;
        c->partitions[partition].committed_bytes += committed_bytes;
}

/* Of a lease in a quota, which may follow the config: with the higher of the old and the new limit. */
static uint64_t change_lease_extents(const struct change *c, const struct quota *q,
                                     const struct config_quota *to)
{
        uint64_t limit = q->account.limit_bytes;

        if (lease_auto_follows(c->b, lease_of(c->b, q), to))
                limit = max_u64(limit, lease_auto_limits(q, to).limit_bytes);
        return arena_extent_room(q->arena, limit);
}

/* An existing quota. to: NULL where it is removed. */
static void change_count_quota(struct change *c, const struct quota *q, const struct config_quota *to)
{
        const struct tenant *t = find_tenant(c, q->tenant);
        uint64_t n_extents = arena_extent_room(q->arena, to ? to->limit_bytes : q->account.limit_bytes);
        uint64_t n_sessions = max_u64(to ? to->max_sessions : q->max_sessions, q->all.n_sessions);
        uint64_t n_blocks = max_u64(to ? to->max_blocks : q->max_blocks, q->all.n_blocks);
        uint64_t promised, committed = q->account.charged_bytes, most = n_extents;

        /* A session may be in one of the leases instead: it has extents of the arena with the most. */
        for (size_t i = 0; q->account.n_children > 0 && i < t->n_quotas; i++)
                if (t->quotas[i]->lease.parent == q)
                        most = max_u64(most, change_lease_extents(c, t->quotas[i], to));
        if (to) {
                lease_auto_sums(c->b, t, q, to, &promised, &committed);
                committed = max_u64(to->reserve_bytes, committed);
        }
        change_count(c, (size_t)(q->partition - c->b->partitions), n_extents, 0, n_blocks, committed);
        c->n_exports += most * min_u64(n_sessions, c->b->room.n_sessions);
}

/* The quota's leases, of which some follow the config. */
static int change_prepare_leases(struct change *c, const struct quota *q, const struct config_quota *to)
{
        const struct tenant *t = find_tenant(c, q->tenant);
        uint64_t promised, committed;

        lease_auto_sums(c->b, t, q, to, &promised, &committed);
        if (to->limit_bytes < promised)
                change_fail(c,
                            "tenant '%s': limit %s in partition '%s' is below the %s that are guaranteed to "
                            "its leases: lower their reserves (bfcctl lease set), or end them first",
                            q->tenant, SIZE(to->limit_bytes), q->partition->name, SIZE(promised));
        else if (committed > to->limit_bytes && committed > q->account.committed_bytes)
                change_fail(
                        c,
                        "tenant '%s': with the reserve of per in partition '%s', what is guaranteed to its "
                        "leases and reserved would total %s, above the limit %s: lower the reserve",
                        q->tenant, q->partition->name, SIZE(committed), SIZE(to->limit_bytes));

        /* This ensures that lease_auto_set() cannot fail later. */
        for (size_t i = 0; i < t->n_quotas; i++) {
                struct quota *each = t->quotas[i];
                int r = 0;

                if (each->lease.parent == q && lease_auto_follows(c->b, lease_of(c->b, each), to))
                        r = quota_prepare_limit(each, lease_auto_limits(each, to).limit_bytes);
                if (r < 0)
                        return r;
        }
        return 0;
}

static int change_prepare_quota(struct change *c, struct quota *q, const struct config_quota *to)
{
        int r;

        if (q->partition->preallocate && (q->is_removed || to->limit_bytes != q->account.limit_bytes)) {
                change_fail(c,
                            "tenant '%s': its limit in partition '%s', %s, cannot change while bfcd runs, "
                            "because the partition preallocates: restart bfcd",
                            q->tenant, q->partition->name, SIZE(q->account.limit_bytes));
                return 0;
        }

        /* This ensures that quota_set() cannot fail later. A limit that is prepared and not set changes
         * nothing. */
        r = change_prepare_leases(c, q, to);
        if (r < 0)
                return r;
        r = quota_prepare_limit(q, to->limit_bytes);
        if (r == -ENOTSUP) {
                change_fail(c,
                            "tenant '%s': limit %s in partition '%s' cannot be set while bfcd runs: the "
                            "size of its extents allows at most %s; restart bfcd",
                            q->tenant, SIZE(to->limit_bytes), q->partition->name,
                            SIZE(arena_limit_max(q->arena)));
                return 0;
        }
        return r;
}

static void change_check_new_quota(struct change *c, const char *tenant, const struct config_quota *to)
{
        size_t index = c->partition_of[to->partition];
        const struct partition *p = &c->b->partitions[index];
        struct extent_sizes g = extent_sizes_for(p->share, p->device->is_cuda, to->limit_bytes,
                                                 device_granularity(p->device));

        if (p->preallocate)
                change_fail(c,
                            "tenant '%s' cannot be added to partition '%s' while bfcd runs, because the "
                            "partition preallocates: restart bfcd",
                            tenant, p->name);
        change_count(c, index, extent_max_records(p->share, to->limit_bytes, &g), to->max_sessions,
                     to->max_blocks, to->reserve_bytes);
}

static int change_check_quotas(struct change *c)
{
        for (size_t i = 0; i < c->next->n_tenants; i++) {
                const struct config_tenant *t = &c->next->tenants[i];

                for (size_t k = 0; k < t->n_quotas; k++) {
                        const struct partition *p =
                                &c->b->partitions[c->partition_of[t->quotas[k].partition]];
                        struct tenant *tenant = c->tenants[i].tenant;
                        struct quota *q = tenant ? tenant_quota(tenant, p) : NULL;
                        int r = 0;

                        if (q)
                                r = change_prepare_quota(c, q, &t->quotas[k]);
                        else
                                change_check_new_quota(c, t->name, &t->quotas[k]);
                        if (r < 0)
                                return r;
                        if (q)
                                change_count_quota(c, q, &t->quotas[k]);
                }
        }
        return 0;
}

static void change_check_pools(struct change *c)
{
        for (size_t i = 0; i < c->b->n_partitions; i++) {
                const struct partition *p = &c->b->partitions[i];
                const struct change_partition *to = &c->partitions[i];

                if (account_fits(&p->pool, to->limit_bytes, to->committed_bytes))
                        continue;
                change_fail(c,
                            "partition '%s': guaranteed memory and memory reserved beyond it would total "
                            "%s, above the limit %s: lower the guarantees, or release %s first",
                            p->name, SIZE(to->committed_bytes), SIZE(to->limit_bytes),
                            SIZE(to->committed_bytes - to->limit_bytes));
        }
}

/* The partitions of a device may be over their limits by what is charged, but not take memory from each
 * other. */
static void change_check_device(struct change *c, const struct config_device *d)
{
        const struct broker_device *device = drain_find(c->b, d->id);
        uint64_t room = d->size_bytes - d->headroom_bytes, before = 0, after = 0;

        for (size_t i = 0; i < c->b->n_partitions; i++) {
                const struct change_partition *to = &c->partitions[i];

                if (!device || c->b->partitions[i].device != device->device)
                        continue;
                before += c->b->partitions[i].pool.ceiling_bytes;
                after += max_u64(to->limit_bytes, to->committed_bytes);
        }
        if (after <= max_u64(room, before))
                return;
        change_fail(c,
                    "device '%s': the limits of its partitions and memory reserved beyond them would "
                    "total %s, and the device has %s: release %s first",
                    d->id, SIZE(after), SIZE(room), SIZE(after - room));
}

static void change_check_room(struct change *c)
{
        const struct ledger_limits *room = &c->b->room;
        bool has_leases = c->b->leases.n > 0;
        size_t n_new = 0;

        for (size_t i = 0; i < c->next->n_tenants; i++)
                n_new += c->tenants[i].is_new;
        if (c->n_quotas > room->n_quotas || c->n_extents > room->n_extents ||
            c->n_exports > room->n_exports || c->n_blocks > room->n_blocks)
                change_fail(c,
                            "the daemon's tables are too small: the quotas%s allow %" PRIu64
                            " blocks (room for %" PRIu32 ") and %" PRIu64
                            " extents shared with sessions (room for %" PRIu32
                            "): lower max_blocks or max_sessions, %sor restart bfcd",
                            has_leases ? " and leases" : "", c->n_blocks, room->n_blocks, c->n_exports,
                            room->n_exports, has_leases ? "end leases (bfcctl lease end), " : "");
        if (capacity_refs(c->next) > room->n_refs)
                change_fail(c,
                            "the daemon's tables are too small: %" PRIu32 " sessions may have %" PRIu64
                            " shared blocks (room for %" PRIu32 "): lower max_sessions to %" PRIu32 ", or "
                            "restart bfcd",
                            c->next->max_sessions, capacity_refs(c->next), room->n_refs,
                            room->n_refs / CAPACITY_REFS);
        if (!broker_has_places(c->b, n_new))
                change_fail(
                        c,
                        "too many removed tenants still have sessions: end these sessions, or restart bfcd");
}

static int change_check(struct change *c)
{
        int r = change_map_partitions(c);

        /* The quotas of the next config are prepared and counted. */
        if (r == 0)
                r = change_map_tenants(c);
        if (r == 0)
                r = change_check_quotas(c);
        if (r < 0)
                return r;

        /* Quotas that it no longer has, and leases, stay as long as something of them is in use, so they are
         * counted, too. A lease needs records only for its extents: its sessions, its blocks and what it takes
         * are counted in its tenant's quota. */
        for (size_t i = 0; i < c->n_by_name; i++) {
                const struct tenant *t = c->by_name[i];
                const struct config_tenant *to = change_config_of(c, t);

                for (size_t k = 0; k < t->n_quotas; k++) {
                        const struct quota *q = t->quotas[k];
                        const struct config_quota *quota = find_config_quota(c, to, q);

                        if (q->lease.parent)
                                change_count(c, (size_t)(q->partition - c->b->partitions),
                                             change_lease_extents(c, q, quota), 0, 0, 0);
                        else if (!quota)
                                change_count_quota(c, q, NULL);
                }
        }

        /* The sums are checked. All errors are reported, so that one edit can mend them. */
        change_check_pools(c);
        for (size_t i = 0; i < c->next->n_devices; i++)
                change_check_device(c, &c->next->devices[i]);
        change_check_room(c);
        return c->failed ? -EINVAL : 0;
}

/* ---- telling -------------------------------------------------------------- */

struct tell_usage {
        struct change *c;
        const struct quota *q;
        const struct config_quota *to;
};

/* Continues the line of a limit that is lowered below the usage. */
static void tell_usage(void *userdata, const struct config_field *field)
{
        const struct tell_usage *t = userdata;
        const struct quota *q = t->q;
        const struct account *a = &q->account;
        uint64_t limit = t->to->limit_bytes, n = 0, n_max = UINT64_MAX;

        if (field == &CONFIG_QUOTA.fields[QUOTA_LIMIT] && a->charged_bytes > limit)
                fprintf(t->c->changes,
                        "; it has %s reserved, %s above the limit, and gets no more until it is below",
                        SIZE(a->charged_bytes), SIZE(a->charged_bytes - limit));
        else if (field == &CONFIG_QUOTA.fields[QUOTA_LIMIT] && q->partition->share == DEVICE_SHARE_FD &&
                 limit < ledger_quota_at(q->ledger, q->index)->small_extent_bytes)
                fprintf(t->c->changes, "; its extents have %s until bfcd is restarted, so it gets no memory",
                        SIZE(ledger_quota_at(q->ledger, q->index)->small_extent_bytes));
        if (field == &CONFIG_QUOTA.fields[QUOTA_MAX_SESSIONS])
                n = q->all.n_sessions, n_max = t->to->max_sessions;
        if (field == &CONFIG_QUOTA.fields[QUOTA_MAX_BLOCKS])
                n = q->all.n_blocks, n_max = t->to->max_blocks;
        if (n > n_max)
                fprintf(t->c->changes,
                        "; it has %" PRIu64 ", %" PRIu64
                        " above the limit, and gets no more until it is below",
                        n, n - n_max);
}

/* Their extents were chosen for a lower limit. */
static void tell_lower_leases(struct change *c, const struct tenant *t, const struct quota *q,
                              const struct config_quota *to)
{
        for (size_t i = 0; i < t->n_quotas; i++) {
                const struct quota *each = t->quotas[i];
                uint64_t limit;

                if (each->lease.parent != q || !lease_auto_follows(c->b, lease_of(c->b, each), to))
                        continue;
                limit = lease_auto_limits(each, to).limit_bytes;
                if (limit < to->per_limit_bytes && limit != each->account.limit_bytes)
                        fprintf(c->changes,
                                "lease '%s' of tenant '%s' in partition '%s': limit is %s, the most that the sizes "
                                "of its extents allow\n",
                                each->lease.name, q->tenant, q->partition->name, SIZE(limit));
        }
}

static void tell_quota(struct change *c, const struct tenant *t, const struct quota *q,
                       const struct config_quota *to)
{
        const struct config_quota *per = lease_auto_per(c->b, t, q->partition);
        const struct config_quota *now = broker_config_quota(c->b, t, q->partition);
        const struct config_quota was = {
                .limit_bytes = q->account.limit_bytes,
                .reserve_bytes = q->account.reserve_bytes,
                .max_sessions = q->max_sessions,
                .max_blocks = q->max_blocks,
                .park_to = now ? now->park_to : NULL,
                .park_idle_ms = now ? now->park_idle_ms : 0,
                .per_cgroup = per ? per->per_cgroup : NULL,
                .per_limit_bytes = per ? per->per_limit_bytes : 0,
                .per_reserve_bytes = per ? per->per_reserve_bytes : 0,
        };
        char kind[CONFIG_NAME_MAX + 32];

        if (q->is_removed)
                fprintf(c->changes, "tenant '%s': its quota in partition '%s' is added again\n", q->tenant,
                        q->partition->name);
        snprintf(kind, sizeof(kind), "tenant '%s' in partition", q->tenant);
        config_diff_section(&CONFIG_QUOTA, &was, to, kind, q->partition->name, c->changes, tell_usage,
                            &(struct tell_usage){ c, q, to });
        tell_lower_leases(c, t, q, to);
}

static void tell_tenant(struct change *c, const struct config_tenant *to, const struct tenant *t)
{
        if (!t || !t->config)
                fprintf(c->changes, "tenant '%s' is new\n", to->name);
        else if (!config_match_is_alike(t->config, to))
                fprintf(c->changes, "tenant '%s': match is changed\n", to->name);
        if (t && t->config)
                config_diff_section(&CONFIG_TENANT, t->config, to, "tenant", to->name, c->changes, NULL,
                                    NULL);
        for (size_t i = 0; i < to->n_quotas; i++) {
                const struct partition *p = &c->b->partitions[c->partition_of[to->quotas[i].partition]];
                const struct quota *q = t ? tenant_quota(t, p) : NULL;

                if (q)
                        tell_quota(c, t, q, &to->quotas[i]);
                else
                        fprintf(c->changes,
                                "tenant '%s': new quota in partition '%s': limit %s, reserve %s\n", to->name,
                                p->name, SIZE(to->quotas[i].limit_bytes), SIZE(to->quotas[i].reserve_bytes));
        }
}

/* Of the quota and its leases. */
static uint64_t count_sessions(const struct tenant *t, const struct quota *q)
{
        uint64_t n = q->sessions.n;

        for (size_t i = 0; i < t->n_quotas; i++)
                if (t->quotas[i]->lease.parent == q)
                        n += t->quotas[i]->sessions.n;
        return n;
}

static void tell_ending_lease(struct change *c, const struct quota *q)
{
        const struct ledger_lease *record = lease_record(c->b, lease_of(c->b, q));

        fprintf(c->changes,
                "lease '%s' of tenant '%s' in partition '%s' ends; its existing sessions (%" PRIu32,
                q->lease.name, q->tenant, q->partition->name, q->sessions.n);
        if (record->evicts)
                fprintf(c->changes, ") are evicted after %" PRIu64 "ms\n", (uint64_t)record->grace_ms);
        else
                fputs(") continue, and get no more memory\n", c->changes);
}

static void tell_removed(struct change *c, const struct tenant *t, const struct config_tenant *to)
{
        if (!to && t->config)
                fprintf(c->changes,
                        "tenant '%s' is removed: it gets no new sessions; its existing sessions (%zu) "
                        "continue\n",
                        t->name, t->n_sessions);
        for (size_t k = 0; to && k < t->n_quotas; k++)
                if (!t->quotas[k]->is_removed && !t->quotas[k]->lease.parent &&
                    !find_config_quota(c, to, t->quotas[k]))
                        fprintf(c->changes,
                                "tenant '%s': its quota in partition '%s' is removed; its existing "
                                "sessions there (%" PRIu64 ") continue\n",
                                t->name, t->quotas[k]->partition->name, count_sessions(t, t->quotas[k]));
        for (size_t k = 0; k < t->n_quotas; k++)
                if (t->quotas[k]->lease.parent && !quota_has_ended(t->quotas[k]) &&
                    !find_config_quota(c, to, t->quotas[k]))
                        tell_ending_lease(c, t->quotas[k]);
}

/* A process gets the first tenant that matches it. */
static void tell_order(struct change *c)
{
        size_t at = 0;

        for (size_t i = 0; i < c->next->n_tenants; i++) {
                const struct tenant *t = c->tenants[i].tenant;
                size_t k = at;

                if (!t || !t->config)
                        continue;
                while (k < c->b->selection.n && c->b->selection.order[k] != t)
                        k++;
                if (k == c->b->selection.n) {
                        fputs("the order of the tenants is changed: a process becomes the first tenant "
                              "that matches it\n",
                              c->changes);
                        return;
                }
                at = k + 1;
        }
}

static void change_tell(struct change *c)
{
        config_diff(c->b->config, c->next, c->changes);
        for (size_t i = 0; i < c->next->n_tenants; i++)
                tell_tenant(c, &c->next->tenants[i], c->tenants[i].tenant);
        for (size_t i = 0; i < c->n_by_name; i++)
                tell_removed(c, c->by_name[i], change_config_of(c, c->by_name[i]));
        tell_order(c);
}

/* ---- making --------------------------------------------------------------- */

static int change_make(struct change *c)
{
        int r = 0;

        for (size_t i = 0; r == 0 && i < c->next->n_tenants; i++) {
                const struct config_tenant *to = &c->next->tenants[i];
                struct change_tenant *t = &c->tenants[i];

                if (t->is_new) {
                        t->tenant = broker_tenant_place(c->b);
                        assert(t->tenant); /* change_check_room() has looked */
                        tenant_init(t->tenant, to);
                }
                for (size_t k = 0; r == 0 && k < to->n_quotas; k++) {
                        size_t partition = c->partition_of[to->quotas[k].partition];

                        if (!tenant_quota(t->tenant, &c->b->partitions[partition]))
                                r = broker_add_quota(c->b, t->tenant, partition, &to->quotas[k], 0);
                }
        }
        if (r == 0)
                return 0;

        /* Undo: the new quotas are at the ends of the tenants' lists. */
        for (size_t i = 0; i < c->next->n_tenants; i++) {
                struct tenant *t = c->tenants[i].tenant;

                while (t && t->n_quotas > c->tenants[i].n_quotas_before)
                        quota_free(t->quotas[--t->n_quotas]);
                if (t && c->tenants[i].is_new)
                        broker_leave_place(c->b, t);
        }
        return r;
}

/* ---- applying ------------------------------------------------------------- */

static void apply_quotas(struct change *c, struct tenant *t)
{
        for (size_t i = 0; i < t->n_quotas; i++) {
                struct quota *q = t->quotas[i];
                const struct config_quota *to = find_config_quota(c, t->config, q);

                if (q->lease.parent) { /* its tenant's quota is before it */
                        struct lease *lease = lease_of(c->b, q);

                        lease_follow(lease);
                        if (lease_auto_follows(c->b, lease, to))
                                lease_auto_set(c->b, lease, to);
                        continue;
                }
                if (!to) {
                        quota_remove(q);
                        broker_note_leave(c->b, q);
                        continue;
                }
                quota_set(q, &(struct quota_limits){ to->limit_bytes, to->reserve_bytes, to->max_sessions,
                                                     to->max_blocks });
        }
}

static void apply_tenants(struct change *c)
{
        struct broker *b = c->b;

        /* A tenant without a config is removed: it has no new sessions. */
        for (size_t i = 0; i < b->n_tenants; i++)
                b->tenants[i].config = NULL;
        for (size_t i = 0; i < c->next->n_tenants; i++) {
                c->order[i] = c->tenants[i].tenant;
                c->order[i]->config = &c->next->tenants[i];
        }
        for (size_t i = 0; i < b->n_tenants; i++)
                apply_quotas(c, &b->tenants[i]);

        /* The order in which a process is matched. */
        free(b->selection.order);
        b->selection.order = c->order;
        b->selection.n = c->next->n_tenants;
        c->order = NULL;
        b->selection.fallback =
                c->next->default_tenant >= 0 ? b->selection.order[c->next->default_tenant] : NULL;
        b->changes.may_have_gone = true;
}

static void apply_devices(struct change *c)
{
        struct broker *b = c->b;

        for (size_t i = 0; i < c->next->n_devices; i++) {
                struct broker_device *d = drain_find(b, c->next->devices[i].id);

                if (d)
                        d->config = &c->next->devices[i];
        }
        for (size_t i = 0; i < c->next->n_partitions; i++) {
                struct partition *p = &b->partitions[c->partition_of[i]];

                p->name = c->next->partitions[i].name;
                p->device_id = c->next->devices[c->next->partitions[i].device].id;
                p->context_bytes = c->next->devices[c->next->partitions[i].device].context_bytes;
                partition_set_limit(p, c->next->partitions[i].limit_bytes, c->next->reclaim_timeout_ms);
        }
}

static void change_apply(struct change *c)
{
        struct broker *b = c->b;
        struct config *old = b->own.config;
        struct quota *q;

        /* Everything points into the next config before the old one is freed. */
        apply_tenants(c);
        apply_devices(c);
        free(b->own.text);
        b->own.text = c->config_text;
        c->config_text = NULL;
        matcher_free(b->selection.matcher);
        b->selection.matcher = c->matcher;
        c->matcher = NULL;
        free(b->own.capacity);
        b->own.capacity = c->capacity;
        c->capacity = NULL;
        b->config = b->own.config = c->next;
        broker_promise(b);
        config_free(old);

        /* Sessions are asked for what is charged beyond a limit. */
        for (size_t i = 0; b->options.upcalls && i < b->n_partitions; i++) {
                TAILQ_FOREACH(q, &b->partitions[i].quotas, lists.of_partition)
                if (quota_excess(q) > 0)
                        b->options.upcalls->trim_excess(b, q, quota_excess(q));
        }
        broker_set_standby(b);
}

int change_config(struct broker *b, struct config *next, bool dry_run, FILE *changes, FILE *errors)
{
        struct change c = { .b = b, .next = next, .changes = changes, .errors = errors };
        int r = change_check(&c);

        /* The lines are written first, since they compare with what still is. */
        if (r == 0)
                change_tell(&c);
        if (r == 0 && !dry_run)
                r = change_make(&c);

        /* Nothing can fail from here on. */
        if (r == 0 && !dry_run)
                change_apply(&c);
        if (r < 0 && r != -EINVAL)
                fprintf(errors, "the new configuration could not be set up: %s\n", strerror(-r));
        change_free(&c);
        return r;
}
