/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/config/reader.h"

#include <stdlib.h>
#include <string.h>

/* Tenants and quotas: the grammar below the key `tenants`, and what is summed over tenants. */

#define MAX_QUOTA_LIMIT (UINT64_C(512) << 30) /* an arena's address space is twice this: 1 TiB */
#define SMALL_IPC_LIMIT (UINT64_C(256) << 20) /* less than eight pieces of 32 MiB */

/* ---- quotas --------------------------------------------------------------- */

/* The value of a key of a mapping; NULL: there is none. */
static const struct yamltree_node *find_key(const struct yamltree_node *n, const char *key)
{
        if (!n || n->type != YAMLTREE_MAPPING)
                return NULL;
        for (n = n->first_child; n && n->next; n = n->next->next)
                if (config_is_text(n, key))
                        return n->next;
        return NULL;
}

/* The first quota of a partition; NULL: there is none. */
static const struct yamltree_node *find_quota(const struct yamltree_node *quotas, const char *partition)
{
        const struct yamltree_node *n = quotas->first_child, *name;

        while (n && !((name = find_key(n, "partition")) && config_is_text(name, partition)))
                n = n->next;
        return n;
}

bool config_read_quota_partition(struct config_reader *r, struct config_place *p,
                                 const struct config_field *field, const struct yamltree_node *n)
{
        const struct config_tenant *t = p->in->object;
        struct config_quota *q = p->object;
        struct config_names names;

        if (!n || !config_want_name(r, n, field->key))
                return false;
        if (!config_find_partition(r->c, n->text, &q->partition)) {
                if (!r->lacks_partitions) /* it may be one of those that could not be read */
                        config_fail(r, n, "partition '%s' does not exist; the partitions are: %s", SHOW(n),
                                    config_list_names(&names, r->c->partitions, r->c->n_partitions,
                                                      sizeof(r->c->partitions[0]),
                                                      offsetof(struct config_partition, name)));
                return false;
        }
        for (size_t i = 0; i < t->n_quotas; i++) {
                if (t->quotas[i].partition == q->partition)
                        return config_fail(r, n,
                                           "this tenant already has a quota in partition '%s', first %s",
                                           n->text, FIRST(find_quota(p->in->at[TENANT_QUOTAS], n->text), n));
        }
        p->whole_known = config_knows(&r->partitions[q->partition].place, PARTITION_LIMIT);
        p->whole_bytes = p->whole_known ? r->c->partitions[q->partition].limit_bytes : 0;
        q->limit_bytes = p->whole_bytes;
        return true;
}

static uint64_t add_up(uint64_t a, uint64_t b)
{
        return __builtin_add_overflow(a, b, &a) ? UINT64_MAX : a;
}

static void check_reserve(struct config_reader *r, const struct yamltree_node *at,
                          const struct config_quota *q)
{
        struct partition_note *note = &r->partitions[q->partition];

        if (q->reserve_bytes > q->limit_bytes) {
                config_fail(r, at, "reserve %s is more than this quota's limit, %s", SIZE(q->reserve_bytes),
                            SIZE(q->limit_bytes));
                return;
        }
        note->sum_of_reserves = add_up(note->sum_of_reserves, q->reserve_bytes);
        if (note->sum_of_reserves > r->c->partitions[q->partition].limit_bytes && !note->reserve_too_much)
                note->reserve_too_much = at;
}

/* The limits of the quota and of its partition are known. */
static void check_quota(struct config_reader *r, const struct config_place *place,
                        const struct config_quota *q)
{
        const struct config_partition *p = &r->c->partitions[q->partition];
        const struct yamltree_node *at = config_at(place, QUOTA_LIMIT), *reserve = place->at[QUOTA_RESERVE];
        struct partition_note *note = &r->partitions[q->partition];

        if (q->limit_bytes > p->limit_bytes)
                config_fail(r, at, "limit %s is more than the limit of partition '%s', %s",
                            SIZE(q->limit_bytes), p->name, SIZE(p->limit_bytes));
        else if (q->limit_bytes > MAX_QUOTA_LIMIT)
                config_fail(
                        r, at,
                        "limit %s is more than 512GiB, the most that one tenant can have in one partition",
                        SIZE(q->limit_bytes));
        else
                note->sum_of_limits = add_up(note->sum_of_limits, q->limit_bytes);
        /* A partition that preallocates has one extent of the whole limit. */
        if (p->share == CONFIG_SHARE_CUDA_IPC && p->growth == CONFIG_GROWTH_ON_DEMAND &&
            q->limit_bytes < SMALL_IPC_LIMIT)
                config_advise(r, at,
                              "limit %s in partition '%s' is allocated in extents of 32MiB, because the "
                              "partition has share: cuda-ipc; one small block reserves a whole extent; "
                              "with share: fd extents have 2MiB",
                              SIZE(q->limit_bytes), p->name);
        if (reserve && config_knows(place, QUOTA_RESERVE))
                check_reserve(r, reserve, q);
}

/* A section of a quota, whose sizes may be parts of its limit. */
static bool read_part(struct config_reader *r, struct config_place *in, const struct config_field *field,
                      const struct yamltree_node *n, struct config_place *ret)
{
        const struct config_quota *q = in->object;

        *ret = config_inner(in, field, n);
        ret->whole_bytes = q->limit_bytes;
        ret->whole_known = q->limit_bytes > 0;
        return n && config_read_section(r, ret);
}

/* The partition of the quota and `to` are known. */
static bool check_park(struct config_reader *r, const struct config_place *p, const struct config_quota *q)
{
        const struct config_partition *from = &r->c->partitions[q->partition], *to;
        const struct yamltree_node *at = p->at[PARK_TO];
        struct config_names names;
        size_t index;

        to = config_find_partition(r->c, q->park_to, &index);
        if (!to)
                return r->lacks_partitions ||
                       config_fail(r, at, "partition '%s' does not exist; the partitions are: %s", SHOW(at),
                                   config_list_names(&names, r->c->partitions, r->c->n_partitions,
                                                     sizeof(r->c->partitions[0]),
                                                     offsetof(struct config_partition, name)));
        if (index == q->partition)
                return config_fail(r, at, "park is to partition '%s' itself; copies there free no memory",
                                   to->name);
        if (r->c->devices[to->device].is_cuda)
                return config_fail(r, at, "park is to partition '%s' of a GPU; copies need host memory",
                                   to->name);
        if (from->growth == CONFIG_GROWTH_PREALLOCATE || from->share == CONFIG_SHARE_CUDA_IPC)
                config_warn(r, p->node, "park has no effect in partition '%s', which %s", from->name,
                            from->growth == CONFIG_GROWTH_PREALLOCATE
                                    ? "preallocates and never releases its memory"
                                    : "has share: cuda-ipc, where blocks cannot be parked");
        return true;
}

bool config_read_park(struct config_reader *r, struct config_place *in, const struct config_field *field,
                      const struct yamltree_node *n)
{
        struct config_quota *q = in->object;
        struct config_place p;
        bool is_good =
                read_part(r, in, field, n, &p) && config_knows(&p, PARK_TO) && config_knows(&p, PARK_IDLE);

        if (is_good && config_knows(in, QUOTA_PARTITION))
                is_good = check_park(r, &p, q);
        if (!is_good) {
                free(q->park_to);
                q->park_to = NULL;
        }
        return is_good;
}

/* The quota's limit and its partition are known. */
static void check_per(struct config_reader *r, const struct config_place *p, const struct config_quota *q)
{
        const struct config_partition *in = &r->c->partitions[q->partition];

        if (in->growth == CONFIG_GROWTH_PREALLOCATE)
                config_fail(r, p->node,
                            "per is not for partition '%s', which preallocates the whole limits of its "
                            "tenants and has no memory for leases",
                            in->name);
        else if (q->per_limit_bytes > q->limit_bytes)
                config_fail(r, config_at(p, PER_LIMIT), "per has limit %s, more than this quota's limit, %s",
                            SIZE(q->per_limit_bytes), SIZE(q->limit_bytes));
        else if (q->per_reserve_bytes > q->per_limit_bytes)
                config_fail(r, config_at(p, PER_RESERVE), "per has reserve %s, more than its limit, %s",
                            SIZE(q->per_reserve_bytes), SIZE(q->per_limit_bytes));
}

bool config_read_per(struct config_reader *r, struct config_place *in, const struct config_field *field,
                     const struct yamltree_node *n)
{
        struct config_quota *q = in->object;
        struct config_place p;

        if (!read_part(r, in, field, n, &p))
                return false;
        if (config_knows(&p, PER_LIMIT) && (!p.at[PER_RESERVE] || config_knows(&p, PER_RESERVE)) &&
            config_knows(in, QUOTA_PARTITION) && q->limit_bytes > 0)
                check_per(r, &p, q);
        return true;
}

static void free_quota(struct config_quota *q)
{
        free(q->park_to);
        free(q->per_cgroup);
}

static bool keep_quota(struct config_reader *r, struct config_tenant *t, struct config_quota *q)
{
        if (config_append(r, (void **)&t->quotas, &t->n_quotas, q, sizeof(*q)))
                return true;
        free_quota(q);
        return false;
}

bool config_read_quota(struct config_reader *r, const struct yamltree_node *n, struct config_place *in)
{
        struct tenant_note *note = (struct tenant_note *)in;
        struct config_tenant *t = in->object;
        struct config_quota q = { 0 };
        struct config_place p = config_place(&CONFIG_QUOTA, n, &q);

        p.in = in;
        config_init(&CONFIG_QUOTA, &q);
        if (!config_read_section(r, &p)) {
                free_quota(&q);
                return false;
        }
        if (p.whole_known && (!p.at[QUOTA_LIMIT] || config_knows(&p, QUOTA_LIMIT)))
                check_quota(r, &p, &q);
        if (p.at[QUOTA_MAX_SESSIONS])
                note->n_sessions += q.max_sessions;
        if (!config_knows(&p, QUOTA_PARTITION)) {
                free_quota(&q);
                return false;
        }
        r->partitions[q.partition].n_sessions += q.max_sessions;
        t->max_sessions += q.max_sessions;
        return keep_quota(r, t, &q);
}

/* ---- tenants -------------------------------------------------------------- */

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
        config_free_match(t);
        for (size_t i = 0; i < t->n_quotas; i++)
                free_quota(&t->quotas[i]);
        free(t->quotas);
}

/* Where `to` is in the quota of that partition. */
static const struct yamltree_node *find_park_to(const struct yamltree_node *quotas, const char *partition)
{
        const struct yamltree_node *quota = find_quota(quotas, partition);

        return find_key(find_key(quota, "park"), "to");
}

/* The copies are charged to the tenant. */
static void check_parks(struct config_reader *r, const struct config_place *p, const struct config_tenant *t)
{
        for (size_t i = 0; config_knows(p, TENANT_QUOTAS) && i < t->n_quotas; i++) {
                const char *to = t->quotas[i].park_to, *from = r->c->partitions[t->quotas[i].partition].name;
                size_t k = 0;

                while (to && k < t->n_quotas &&
                       strcmp(r->c->partitions[t->quotas[k].partition].name, to) != 0)
                        k++;
                if (to && k == t->n_quotas && !r->lacks_partitions)
                        config_fail(r, find_park_to(p->at[TENANT_QUOTAS], from),
                                    "this tenant has no quota in partition '%s', to which it parks", to);
        }
}

bool config_read_tenant(struct config_reader *r, const struct yamltree_node *n, struct config_place *in)
{
        struct config_tenant t = { 0 };
        struct tenant_note note = { .place = config_place(&CONFIG_TENANT, n, &t) };
        size_t n_notes = r->c->n_tenants;
        const struct config_place *p = &note.place;
        bool has_name, is_kept = false;
        ssize_t first;

        (void)in;
        if (!config_read_section(r, &note.place))
                return false;
        check_parks(r, p, &t);
        has_name = config_knows(p, TENANT_NAME);
        first = has_name ? find_tenant(r->c, t.name) : -1;
        if (first >= 0)
                config_fail(r, p->at[TENANT_NAME], "tenant '%s' is defined twice, first %s", t.name,
                            FIRST(r->tenants[first].place.at[TENANT_NAME], n));
        else if (has_name && r->c->n_tenants == CONFIG_MAX_TENANTS)
                config_fail(r, p->at[TENANT_NAME], "more than %d tenants", CONFIG_MAX_TENANTS);
        else if (has_name)
                is_kept = config_append(r, (void **)&r->tenants, &n_notes, &note, sizeof(note)) &&
                          config_append(r, (void **)&r->c->tenants, &r->c->n_tenants, &t, sizeof(t));
        if (!is_kept)
                config_free_tenant(&t);
        return has_name;
}

void config_read_default_tenant(struct config_reader *r)
{
        const struct yamltree_node *n = r->top.at[TOP_DEFAULT];
        struct config_names names;

        if (!n || !config_want_name(r, n, "default_tenant"))
                return;
        r->c->default_tenant = find_tenant(r->c, n->text);
        if (r->c->default_tenant < 0 && !r->lacks_tenants)
                config_fail(r, n, "default_tenant '%s' does not exist; the tenants are: %s", SHOW(n),
                            config_list_names(&names, r->c->tenants, r->c->n_tenants,
                                              sizeof(r->c->tenants[0]),
                                              offsetof(struct config_tenant, name)));
}

void config_check_sessions(struct config_reader *r)
{
        const struct config *c = r->c;
        uint64_t n_promised = 0;

        if (c->n_tenants > c->max_sessions) {
                config_advise(r, config_at(&r->top, TOP_MAX_SESSIONS),
                              "max_sessions is %u for %zu tenants: no tenant is guaranteed a session; "
                              "raise it",
                              c->max_sessions, c->n_tenants);
                return;
        }
        for (size_t i = 0; i < c->n_tenants; i++)
                n_promised += r->tenants[i].n_sessions;
        if (n_promised > c->max_sessions)
                config_advise(r, config_at(&r->top, TOP_MAX_SESSIONS),
                              "the max_sessions of the quotas sum to %llu, and the daemon's max_sessions "
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
                if (!note->place.at[TENANT_MATCH])
                        config_fail(
                                r, note->place.node,
                                "tenant '%s' lacks match and is not the default_tenant; no process can be "
                                "this tenant: write match, or 'match: {}' where only sockets of leases lead to it",
                                t->name);
                else if (t->names_ids && t->n_uids == 0 && t->n_gids == 0 && !r->has_failed)
                        config_warn(r, note->place.node, "tenant '%s' matches no process", t->name);
        }
}

const struct config_quota *config_quota_in(const struct config_tenant *t, size_t partition)
{
        for (size_t i = 0; t && i < t->n_quotas; i++)
                if (t->quotas[i].partition == partition)
                        return &t->quotas[i];
        return NULL;
}

/* ---- whom a tenant matches ----------------------------------------------- */

/* The key `match` of a tenant: each of its keys has an array in the tenant, of strings or of ids.
 *
 * Invariant: the ids of the users that are configured by name come first in uids, in the order of the names;
 * the same of groups and gids. */

#define MAX_IDS      4096 /* uids or gids of one tenant */
#define MAX_PATTERNS 64

/* uid_t and gid_t are alike, so one function keeps both sets. */
_Static_assert(sizeof(uid_t) == sizeof(uint32_t) && sizeof(gid_t) == sizeof(uint32_t), "ids of 32 bits");

static void **array_of(const struct config_field *field, const struct config_tenant *t)
{
        return (void **)((char *)t + field->offset);
}

static size_t *count_of(const struct config_field *field, const struct config_tenant *t)
{
        return (size_t *)((char *)t + field->n_at);
}

/* Of users their uids. */
static const struct config_field *ids_of(const struct config_field *field)
{
        return field->type == CONFIG_MATCH_NAME ? field + (MATCH_UID - MATCH_USER) : field;
}

static bool append(struct config_reader *r, const struct config_field *field, struct config_tenant *t,
                   const void *element, size_t n_bytes)
{
        return config_append(r, array_of(field, t), count_of(field, t), element, n_bytes);
}

static bool append_string(struct config_reader *r, const struct config_field *field, struct config_tenant *t,
                          const struct yamltree_node *n)
{
        char *string = config_copy_text(r, n->text);

        if (string && append(r, field, t, &string, sizeof(string)))
                return true;
        free(string);
        return false;
}

/* A pattern is kept as it is; what could never match is an error. */
static const char *pattern_fault(const struct yamltree_node *n, const struct config_field *field)
{
        bool is_unit = field == &CONFIG_MATCH.fields[MATCH_UNIT];

        for (size_t i = 0; i < n->n_text; i++)
                if ((unsigned char)n->text[i] < 0x20 || n->text[i] == 0x7f)
                        return "contains a control character";
        if (n->n_text > field->max)
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

static bool read_pattern(struct config_reader *r, const struct config_field *field,
                         const struct yamltree_node *n, struct config_tenant *t)
{
        const char *fault;

        if (!config_want(r, n, YAMLTREE_SCALAR, field->key))
                return false;
        fault = pattern_fault(n, field);
        if (fault)
                return config_fail(r, n, "%s '%s' %s", field->key, SHOW(n), fault);
        if (*count_of(field, t) == MAX_PATTERNS)
                return config_fail(r, n, "more than %d patterns of one kind", MAX_PATTERNS);
        r->c->has_patterns = true;
        return append_string(r, field, t, n);
}

bool config_read_per_cgroup(struct config_reader *r, struct config_place *p, const struct config_field *field,
                            const struct yamltree_node *n)
{
        struct config_quota *q = p->object;
        const char *fault;

        if (!n || !config_want(r, n, YAMLTREE_SCALAR, field->key))
                return false;
        fault = pattern_fault(n, field);
        if (fault)
                return config_fail(r, n, "%s '%s' %s", field->key, SHOW(n), fault);
        q->per_cgroup = config_copy_text(r, n->text);
        r->c->has_patterns = true;
        return q->per_cgroup != NULL;
}

static bool read_id(struct config_reader *r, const struct config_field *field, const struct yamltree_node *n,
                    uint32_t *ret)
{
        uint64_t number;

        if (field == &CONFIG_MATCH.fields[MATCH_USER])
                return config_find_user(r, n, ret);
        if (field == &CONFIG_MATCH.fields[MATCH_GROUP])
                return config_find_group(r, n, "matches no process until a reload", ret);
        if (!config_read_number(r, field, n, &number))
                return false;
        *ret = (uint32_t)number;
        return true;
}

static bool read_one(struct config_reader *r, const struct config_field *field, const struct yamltree_node *n,
                     struct config_tenant *t)
{
        const struct config_field *ids = ids_of(field);
        uint32_t id;

        if (field->type == CONFIG_MATCH_PATTERN)
                return read_pattern(r, field, n, t);
        if (!read_id(r, field, n, &id))
                return false;
        for (size_t i = 0; i < *count_of(ids, t); i++)
                if ((*(uint32_t **)array_of(ids, t))[i] == id)
                        return false;
        if (*count_of(ids, t) == MAX_IDS)
                return config_fail(r, n, "more than %d users or groups; use a group", MAX_IDS);
        return append(r, ids, t, &id, sizeof(id)) && (ids == field || append_string(r, field, t, n));
}

static void read_values(struct config_reader *r, const struct config_field *field,
                        const struct yamltree_node *n, struct config_tenant *t)
{
        bool is_list = n->type == YAMLTREE_SEQUENCE;

        /* An empty list configures ids, too: none. */
        t->names_ids = t->names_ids || field->type != CONFIG_MATCH_PATTERN;
        if (field->type == CONFIG_MATCH_PATTERN && is_list && !n->first_child)
                config_fail(r, n, "%s is empty; leave it out, or write a pattern", field->key);
        if (n->type == YAMLTREE_MAPPING)
                config_fail(r, n, "%s must be a single value or a list, this is a mapping", field->key);
        else if (!is_list)
                read_one(r, field, n, t);
        for (const struct yamltree_node *e = is_list ? n->first_child : NULL; e; e = e->next)
                read_one(r, field, e, t);
}

bool config_read_match(struct config_reader *r, struct config_place *in, const struct config_field *field,
                       const struct yamltree_node *n)
{
        struct config_place p = config_inner(in, field, n);

        if (!n || !config_read_mapping(r, &p))
                return false;
        for (size_t i = 0; CONFIG_MATCH.fields[i].key; i++)
                if (p.at[i])
                        read_values(r, &CONFIG_MATCH.fields[i], p.at[i], in->object);
        return true; /* without any, no process matches: the tenant is reached by sockets of leases */
}

/* Empty lists of ids are written only where the config has ids: with patterns they would match no process. */
void config_put_match(FILE *f, const void *object)
{
        const struct config_tenant *t = object;
        const char *before = "";

        fputc('{', f);
        for (const struct config_field *field = CONFIG_MATCH.fields; field->key; field++) {
                bool is_id = field->type == CONFIG_MATCH_ID;
                size_t first = is_id ? *count_of(field - (MATCH_UID - MATCH_USER), t) : 0;
                size_t n = *count_of(field, t);

                if (is_id ? !t->names_ids : n == 0)
                        continue;
                fprintf(f, "%s%s: [", before, field->key);
                for (size_t i = first; i < n; i++) {
                        fputs(i > first ? ", " : "", f);
                        if (is_id)
                                fprintf(f, "%u", (*(uint32_t **)array_of(field, t))[i]);
                        else
                                config_put_string(f, (*(char ***)array_of(field, t))[i]);
                }
                fputc(']', f);
                before = ", ";
        }
        fputc('}', f);
}

bool config_match_is_alike(const struct config_tenant *a, const struct config_tenant *b)
{
        for (const struct config_field *field = CONFIG_MATCH.fields; field->key; field++) {
                size_t n = *count_of(field, a);
                const void *of_a = *array_of(field, a), *of_b = *array_of(field, b);

                if (field->type == CONFIG_MATCH_NAME) /* the ids tell */
                        continue;
                if (n != *count_of(field, b))
                        return false;
                if (field->type == CONFIG_MATCH_ID && n > 0 && memcmp(of_a, of_b, n * sizeof(uint32_t)) != 0)
                        return false;
                for (size_t i = 0; i < n && field->type == CONFIG_MATCH_PATTERN; i++)
                        if (strcmp(((char *const *)of_a)[i], ((char *const *)of_b)[i]) != 0)
                                return false;
        }
        return a->names_ids == b->names_ids;
}

void config_free_match(struct config_tenant *t)
{
        for (const struct config_field *field = CONFIG_MATCH.fields; field->key; field++) {
                for (size_t i = 0; i < *count_of(field, t) && field->type != CONFIG_MATCH_ID; i++)
                        free((*(char ***)array_of(field, t))[i]);
                free(*array_of(field, t));
        }
}
