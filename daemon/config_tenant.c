/* SPDX-License-Identifier: Apache-2.0 */
/* Tenants: whom they match and what they may have, the grammar below the key
 * `tenants`. They come after the partitions that their quotas name, and after
 * them who is nobody's. See config_reader.h. */
#include "daemon/config_reader.h"
#include "daemon/config_value.h"

#include <stdlib.h>
#include <string.h>

#define MAX_MATCHES                4096                  /* uids or gids of one tenant */
#define MAX_QUOTA_LIMIT            (UINT64_C(512) << 30) /* an arena's address space is twice this: 1 TiB */
#define MAX_PATTERNS               64
#define MAX_UNIT_BYTES             255
#define MAX_CGROUP_BYTES           4095
#define DEFAULT_QUOTA_MAX_SESSIONS 1024
#define MAX_BLOCKS                 16777216
#define DEFAULT_MAX_BLOCKS         100000
#define SMALL_IPC_LIMIT            (UINT64_C(256) << 20) /* less than eight pieces of 32 MiB */

/* ---- whom a tenant matches ------------------------------------------------ */

/* uid_t and gid_t are alike, so one function keeps both sets. */
_Static_assert(sizeof(uid_t) == sizeof(uint32_t) && sizeof(gid_t) == sizeof(uint32_t), "ids of 32 bits");

/* true: it is a new one. */
static bool add_match(struct config_reader *r, const struct yamltree_node *n, uint32_t id, uint32_t **ids,
                      size_t *n_ids)
{
        uint32_t *slot;

        for (size_t i = 0; i < *n_ids; i++)
                if ((*ids)[i] == id)
                        return false;
        if (*n_ids == MAX_MATCHES) {
                config_fail(r, n, "more than %d users or groups; use a group", MAX_MATCHES);
                return false;
        }
        slot = config_grow(r, (void **)ids, *n_ids, sizeof(*slot));
        if (!slot)
                return false;
        *slot = id;
        (*n_ids)++;
        return true;
}

static void add_name(struct config_reader *r, const struct yamltree_node *n, char ***names, size_t *n_names)
{
        char **slot = config_grow(r, (void **)names, *n_names, sizeof(*slot));

        if (slot && (*slot = config_copy_text(r, n->text)))
                (*n_names)++;
}

/* A pattern is kept as it is; what could never match is an error. */
static const char *pattern_fault(const struct yamltree_node *n, bool is_unit)
{
        for (size_t i = 0; i < n->n_text; i++)
                if ((unsigned char)n->text[i] < 0x20 || n->text[i] == 0x7f)
                        return "contains a control character";
        if (n->n_text > (is_unit ? MAX_UNIT_BYTES : MAX_CGROUP_BYTES))
                return "is too long";
        if (is_unit && strchr(n->text, '/'))
                return "is not a unit name, because it contains '/'; write it as in slurmd.service, or "
                       "use cgroup";
        if (!is_unit && n->text[0] != '/')
                return "does not begin with '/'; write the path as in /system.slice/slurmd.service";
        if (!is_unit && (strstr(n->text, "//") || (n->n_text > 1 && n->text[n->n_text - 1] == '/')))
                return "has an empty component; write it as /proc/PID/cgroup shows it";
        return NULL;
}

static void add_pattern(struct config_reader *r, const struct yamltree_node *n, bool is_unit,
                        char ***patterns, size_t *n_patterns)
{
        const char *what = is_unit ? "unit" : "cgroup", *fault;
        char **slot;

        if (!config_want(r, n, YAMLTREE_SCALAR, what))
                return;
        fault = pattern_fault(n, is_unit);
        if (fault) {
                config_fail(r, n, "%s '%s' %s", what, SHOW(n), fault);
                return;
        }
        if (*n_patterns == MAX_PATTERNS) {
                config_fail(r, n, "more than %d patterns of one kind", MAX_PATTERNS);
                return;
        }
        slot = config_grow(r, (void **)patterns, *n_patterns, sizeof(*slot));
        if (slot)
                *slot = config_copy_text(r, n->text);
        if (!slot || !*slot)
                return;
        (*n_patterns)++;
        r->c->has_patterns = true;
}

enum match_key { MATCH_USER, MATCH_GROUP, MATCH_UID, MATCH_GID, MATCH_UNIT, MATCH_CGROUP };

static void read_match_one(struct config_reader *r, const struct yamltree_node *n, enum match_key key,
                           struct config_tenant *t)
{
        bool is_user = key == MATCH_USER || key == MATCH_UID;
        uint64_t number;
        uint32_t id;
        bool found;

        if (key == MATCH_UNIT) {
                add_pattern(r, n, true, &t->units, &t->n_units);
                return;
        }
        if (key == MATCH_CGROUP) {
                add_pattern(r, n, false, &t->cgroups, &t->n_cgroups);
                return;
        }
        if (key == MATCH_USER) {
                found = config_find_user(r, n, &id);
        } else if (key == MATCH_GROUP) {
                found = config_find_group(r, n, "matches no process until a reload", &id);
        } else {
                /* the last number is no id: it means "unchanged" to chown() */
                found = config_read_number(r, n, key == MATCH_UID ? "uid" : "gid", 0, UINT32_MAX - 1,
                                           &number);
                id = found ? (uint32_t)number : 0;
        }
        /* Names are read before numbers, so they are those of the first ids. */
        if (found && add_match(r, n, id, is_user ? &t->uids : &t->gids, is_user ? &t->n_uids : &t->n_gids) &&
            (key == MATCH_USER || key == MATCH_GROUP))
                add_name(r, n, is_user ? &t->users : &t->groups, is_user ? &t->n_users : &t->n_groups);
}

static void read_match(struct config_reader *r, const struct yamltree_node *n, struct config_tenant *t)
{
        static const char *const known[] = { "user", "group", "uid", "gid", "unit", "cgroup", NULL };
        const struct yamltree_node *v[CONFIG_MAX_KEYS];
        bool has_any = false;

        if (!config_read_mapping(r, n, "match", known, v))
                return;
        for (size_t i = 0; known[i]; i++) {
                if (!v[i])
                        continue;
                has_any = true;
                /* An empty list, too, says who: nobody. */
                t->names_ids = t->names_ids || i <= MATCH_GID;
                if (i > MATCH_GID && v[i]->type == YAMLTREE_SEQUENCE && !v[i]->first_child)
                        config_fail(r, v[i], "%s is empty; leave it out, or write a pattern", known[i]);
                if (v[i]->type == YAMLTREE_MAPPING)
                        config_fail(r, v[i], "%s must be a single value or a list, this is a mapping",
                                    known[i]);
                else if (v[i]->type != YAMLTREE_SEQUENCE)
                        read_match_one(r, v[i], (enum match_key)i, t);
                for (const struct yamltree_node *c = v[i]->first_child; c && v[i]->type == YAMLTREE_SEQUENCE;
                     c = c->next)
                        read_match_one(r, c, (enum match_key)i, t);
        }
        if (!has_any)
                config_fail(r, n, "match is empty; write user, group, uid, gid, unit or cgroup");
}

/* ---- quotas --------------------------------------------------------------- */

static void fail_unknown_partition(struct config_reader *r, const struct yamltree_node *n)
{
        char list[512] = "";
        size_t used = 0;

        if (r->lacks_partitions)
                return; /* it may be one of those that could not be read */
        for (size_t i = 0; i < r->c->n_partitions && used < sizeof(list); i++)
                used += (size_t)snprintf(list + used, sizeof(list) - used, "%s%s", i ? ", " : "",
                                         r->c->partitions[i].name);
        if (used >= sizeof(list))
                memcpy(list + sizeof(list) - 4, "...", 4);
        config_fail(r, n, "partition '%s' does not exist; the partitions are: %s", SHOW(n), list);
}

static void check_quota(struct config_reader *r, const struct yamltree_node *n,
                        const struct yamltree_node *limit_node, const struct yamltree_node *reserve_node,
                        bool reserve_known, const struct config_quota *q)
{
        const struct config_partition *p = &r->c->partitions[q->partition];
        struct partition_note *note = &r->partitions[q->partition];

        if (q->limit_bytes > p->limit_bytes)
                config_fail(r, limit_node, "limit %s is more than the limit of partition '%s', %s",
                            SIZE(q->limit_bytes), p->name, SIZE(p->limit_bytes));
        else if (q->limit_bytes > MAX_QUOTA_LIMIT)
                config_fail(
                        r, limit_node ? limit_node : n,
                        "limit %s is more than 512GiB, the most that one tenant can have in one partition",
                        SIZE(q->limit_bytes));
        else if (__builtin_add_overflow(note->sum_of_limits, q->limit_bytes, &note->sum_of_limits))
                note->sum_of_limits = UINT64_MAX;
        /* What preallocates is one extent of the whole limit. */
        if (p->share == CONFIG_SHARE_CUDA_IPC && p->growth == CONFIG_GROWTH_ON_DEMAND &&
            q->limit_bytes < SMALL_IPC_LIMIT)
                config_advise(r, limit_node ? limit_node : n,
                              "limit %s in partition '%s' is allocated in extents of 32MiB, because the "
                              "partition has share: cuda-ipc; one small block reserves a whole extent; "
                              "with share: fd extents have 2MiB",
                              SIZE(q->limit_bytes), p->name);
        if (!reserve_known)
                return;
        if (q->reserve_bytes > q->limit_bytes) {
                config_fail(r, reserve_node, "reserve %s is more than this quota's limit, %s",
                            SIZE(q->reserve_bytes), SIZE(q->limit_bytes));
                return;
        }
        if (__builtin_add_overflow(note->sum_of_reserves, q->reserve_bytes, &note->sum_of_reserves))
                note->sum_of_reserves = UINT64_MAX;
        if (note->sum_of_reserves > p->limit_bytes && !note->reserve_too_much)
                note->reserve_too_much = reserve_node;
}

static void read_quota_sizes(struct config_reader *r, const struct yamltree_node *n,
                             const struct yamltree_node *limit_node, const struct yamltree_node *reserve_node,
                             bool partition_known, struct config_quota *q)
{
        struct size_rule limit = { .what = "limit", .whole_name = "the partition's limit" };
        struct size_rule reserve = { .what = "reserve",
                                     .zero_allowed = true,
                                     .whole_name = "the partition's limit" };
        bool reserve_known = true;
        bool limit_known;

        if (partition_known && r->partitions[q->partition].limit_known) {
                limit.whole = reserve.whole = r->c->partitions[q->partition].limit_bytes;
                limit.whole_known = reserve.whole_known = true;
        }
        q->limit_bytes = limit.whole;
        limit_known = limit.whole_known;
        if (limit_node)
                limit_known = config_read_size(r, limit_node, &limit, &q->limit_bytes) && limit.whole_known;
        if (reserve_node)
                reserve_known = config_read_size(r, reserve_node, &reserve, &q->reserve_bytes);
        if (limit_known)
                check_quota(r, n, limit_node, reserve_node, reserve_known, q);
}

/* false: the quota cannot be kept. */
static bool find_quota_partition(struct config_reader *r, const struct yamltree_node *n,
                                 const struct yamltree_node *name_node, const struct config_tenant *t,
                                 size_t *ret_index)
{
        const char *name;
        size_t index;

        if (!name_node) {
                config_fail(r, n, "a quota lacks its partition");
                return false;
        }
        name = config_read_name(r, name_node, "partition");
        if (!name)
                return false;
        if (!config_find_partition(r->c, name, &index)) {
                fail_unknown_partition(r, name_node);
                return false;
        }
        for (size_t i = 0; i < t->n_quotas; i++) {
                if (t->quotas[i].partition == index) {
                        config_fail(r, name_node, "this tenant already has a quota in partition '%s'", name);
                        return false;
                }
        }
        *ret_index = index;
        return true;
}

/* The quota's limit is known. */
static void check_keep(struct config_reader *r, const struct yamltree_node *n,
                       const struct yamltree_node *bytes, const struct config_quota *q)
{
        const struct config_partition *p = &r->c->partitions[q->partition];

        if (q->keep_bytes > q->limit_bytes)
                config_fail(r, bytes, "keep has %s, more than this quota's limit, %s", SIZE(q->keep_bytes),
                            SIZE(q->limit_bytes));
        else if (p->growth == CONFIG_GROWTH_PREALLOCATE)
                config_warn(r, n,
                            "keep has no effect in partition '%s', which preallocates and never releases "
                            "its memory",
                            p->name);
}

static void read_keep(struct config_reader *r, const struct yamltree_node *n, bool partition_known,
                      struct config_quota *q)
{
        static const char *const known[] = { "bytes", "for", NULL };
        struct size_rule bytes = { .what = "bytes", .whole_name = "this quota's limit" };
        const struct yamltree_node *v[CONFIG_MAX_KEYS];

        if (!n || !config_read_mapping(r, n, "keep", known, v))
                return;
        if (!v[0] || !v[1]) {
                config_fail(r, n, "keep lacks %s; write it as in keep: {bytes: 1GiB, for: 30s}",
                            v[0] ? "for" : "bytes");
                return;
        }
        bytes.whole = q->limit_bytes;
        bytes.whole_known = q->limit_bytes > 0;
        config_read_duration(r, v[1], "for", &q->keep_ms);
        if (config_read_size(r, v[0], &bytes, &q->keep_bytes) && partition_known && q->limit_bytes > 0)
                check_keep(r, n, v[0], q);
}

/* *n_sessions: the largest max_sessions that is written. */
static void read_quota(struct config_reader *r, const struct yamltree_node *n, struct config_tenant *t,
                       uint32_t *n_sessions)
{
        static const char *const known[] = { "partition",  "limit", "reserve", "max_sessions",
                                             "max_blocks", "keep",  NULL };
        struct config_quota q = { .max_sessions = DEFAULT_QUOTA_MAX_SESSIONS,
                                  .max_blocks = DEFAULT_MAX_BLOCKS };
        const struct yamltree_node *v[CONFIG_MAX_KEYS];
        struct config_quota *slot;
        bool is_known;

        if (!config_read_mapping(r, n, "a quota", known, v))
                return;
        is_known = find_quota_partition(r, n, v[0], t, &q.partition);
        read_quota_sizes(r, n, v[1], v[2], is_known, &q);
        config_read_count(r, v[3], "max_sessions", CONFIG_MAX_SESSIONS, &q.max_sessions);
        config_read_count(r, v[4], "max_blocks", MAX_BLOCKS, &q.max_blocks);
        read_keep(r, v[5], is_known, &q);
        if (v[3] && q.max_sessions > *n_sessions)
                *n_sessions = q.max_sessions;
        if (!is_known)
                return;
        r->partitions[q.partition].n_sessions += q.max_sessions;
        slot = config_grow(r, (void **)&t->quotas, t->n_quotas, sizeof(*slot));
        if (!slot)
                return;
        *slot = q;
        t->n_quotas++;
}

static void read_quotas(struct config_reader *r, const struct yamltree_node *tenant,
                        const struct yamltree_node *n, struct config_tenant *t, uint32_t *n_sessions)
{
        if (!n) {
                config_fail(r, tenant, "a tenant lacks its quotas; without one it can allocate nothing");
                return;
        }
        if (!config_want(r, n, YAMLTREE_SEQUENCE, "quotas"))
                return;
        if (!n->first_child)
                config_fail(r, n, "quotas is empty; without one a tenant can allocate nothing");
        for (const struct yamltree_node *q = n->first_child; q; q = q->next)
                read_quota(r, q, t, n_sessions);
}

/* ---- tenants -------------------------------------------------------------- */

static struct config_tenant *add_tenant(struct config_reader *r, const char *name,
                                        const struct yamltree_node *node, bool has_match)
{
        size_t n = r->c->n_tenants;
        struct tenant_note *note = config_grow(r, (void **)&r->tenants, n, sizeof(*note));
        struct config_tenant *t = note ? config_grow(r, (void **)&r->c->tenants, n, sizeof(*t)) : NULL;

        if (!t)
                return NULL;
        note->node = node;
        note->has_match = has_match;
        t->name = config_copy_text(r, name);
        if (!t->name)
                return NULL;
        r->c->n_tenants++;
        return t;
}

static ssize_t find_tenant(const struct config *c, const char *name)
{
        for (size_t i = 0; i < c->n_tenants; i++)
                if (strcmp(c->tenants[i].name, name) == 0)
                        return (ssize_t)i;
        return -1;
}

void config_free_tenant(struct config_tenant *t)
{
        free(t->name);
        free(t->uids);
        free(t->gids);
        for (size_t i = 0; i < t->n_users; i++)
                free(t->users[i]);
        for (size_t i = 0; i < t->n_groups; i++)
                free(t->groups[i]);
        free(t->users);
        free(t->groups);
        for (size_t i = 0; i < t->n_units; i++)
                free(t->units[i]);
        for (size_t i = 0; i < t->n_cgroups; i++)
                free(t->cgroups[i]);
        free(t->units);
        free(t->cgroups);
        free(t->quotas);
}

/* A session counts in each partition that it uses, so the largest of the quotas' numbers is the default: a
 * tenant has no more sessions for having quotas in more partitions. */
static void read_tenant_sessions(struct config_reader *r, const struct yamltree_node *n,
                                 struct config_tenant *t)
{
        for (size_t i = 0; i < t->n_quotas; i++)
                if (t->quotas[i].max_sessions > t->max_sessions)
                        t->max_sessions = t->quotas[i].max_sessions;
        config_read_count(r, n, "max_sessions", CONFIG_MAX_SESSIONS, &t->max_sessions);
        for (size_t i = 0; i < t->n_quotas; i++)
                if (t->quotas[i].max_sessions > t->max_sessions)
                        r->partitions[t->quotas[i].partition].n_sessions -=
                                t->quotas[i].max_sessions - t->max_sessions;
}

static void read_tenant(struct config_reader *r, const struct yamltree_node *n)
{
        static const char *const known[] = { "name", "match", "quotas", "max_sessions", NULL };
        const struct yamltree_node *v[CONFIG_MAX_KEYS];
        struct config_tenant unnamed = { 0 };
        struct config_tenant *t = &unnamed;
        uint32_t n_sessions = 0;
        const char *name = NULL;

        if (!config_read_mapping(r, n, "a tenant", known, v)) {
                r->lacks_tenants = true;
                return;
        }
        if (v[0])
                name = config_read_name(r, v[0], "name");
        else
                config_fail(r, n, "a tenant lacks its name");
        if (!name)
                r->lacks_tenants = true;
        else if (find_tenant(r->c, name) >= 0)
                config_fail(r, v[0], "tenant '%s' is defined twice", name);
        else if (r->c->n_tenants == CONFIG_MAX_TENANTS)
                config_fail(r, v[0], "more than %d tenants", CONFIG_MAX_TENANTS);
        else
                t = add_tenant(r, name, n, v[1] != NULL);
        if (!t)
                return;
        if (v[1])
                read_match(r, v[1], t);
        read_quotas(r, n, v[2], t, &n_sessions);
        read_tenant_sessions(r, v[3], t);
        if (t == &unnamed)
                config_free_tenant(t);
        else
                r->tenants[t - r->c->tenants].n_sessions = v[3] ? t->max_sessions : n_sessions;
}

void config_read_tenants(struct config_reader *r, const struct yamltree_node *n)
{
        if (!config_want(r, n, YAMLTREE_SEQUENCE, "tenants")) {
                r->lacks_tenants = true;
                return;
        }
        for (const struct yamltree_node *t = n->first_child; t; t = t->next)
                read_tenant(r, t);
}

void config_read_default_tenant(struct config_reader *r, const struct yamltree_node *n)
{
        char list[512] = "";
        size_t used = 0;
        const char *name;

        if (!n)
                return;
        name = config_read_name(r, n, "default_tenant");
        if (!name)
                return;
        r->c->default_tenant = find_tenant(r->c, name);
        if (r->c->default_tenant >= 0 || r->lacks_tenants)
                return;
        for (size_t i = 0; i < r->c->n_tenants && used < sizeof(list); i++)
                used += (size_t)snprintf(list + used, sizeof(list) - used, "%s%s", i ? ", " : "",
                                         r->c->tenants[i].name);
        if (used >= sizeof(list))
                memcpy(list + sizeof(list) - 4, "...", 4);
        config_fail(r, n, "default_tenant '%s' does not exist; the tenants are: %s", SHOW(n), list);
}

void config_check_sessions(struct config_reader *r)
{
        const struct config *c = r->c;
        uint64_t n_promised = 0;

        if (c->n_tenants > c->max_sessions) {
                config_advise(r, r->sessions_at,
                              "max_sessions is %u for %zu tenants: no tenant is guaranteed a session; "
                              "raise it",
                              c->max_sessions, c->n_tenants);
                return;
        }
        for (size_t i = 0; i < c->n_tenants; i++)
                n_promised += r->tenants[i].n_sessions;
        if (n_promised > c->max_sessions)
                config_advise(r, r->sessions_at,
                              "the max_sessions of the tenants sum to %llu, and the daemon's max_sessions "
                              "is %u: each tenant is guaranteed at most %u sessions; lower the former, or "
                              "raise the latter",
                              (unsigned long long)n_promised, c->max_sessions,
                              c->max_sessions / (uint32_t)c->n_tenants);
}

void config_check_matches(struct config_reader *r, bool default_known)
{
        for (size_t i = 0; i < r->c->n_tenants; i++) {
                const struct config_tenant *t = &r->c->tenants[i];
                const struct tenant_note *note = &r->tenants[i];
                bool is_default = (ssize_t)i == r->c->default_tenant;

                if (is_default || !default_known)
                        continue;
                if (!note->has_match)
                        config_fail(
                                r, note->node,
                                "tenant '%s' lacks match and is not the default_tenant; no process can be "
                                "this tenant",
                                t->name);
                else if (t->names_ids && t->n_uids == 0 && t->n_gids == 0 && !r->has_failed)
                        config_warn(r, note->node, "tenant '%s' matches no process", t->name);
        }
}
