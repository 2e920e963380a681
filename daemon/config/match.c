/* SPDX-License-Identifier: Apache-2.0 */
/* The key `match` of a tenant: each of its keys has an array in the tenant, of strings or of ids.
 *
 * Invariant: the ids of the users that are configured by name come first in uids, in the order of the names;
 * the same of groups and gids. */
#include "daemon/config/reader.h"

#include <stdlib.h>
#include <string.h>

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
        bool has_any = false;

        if (!n || !config_read_mapping(r, &p))
                return false;
        for (size_t i = 0; CONFIG_MATCH.fields[i].key; i++) {
                has_any = has_any || p.at[i];
                if (p.at[i])
                        read_values(r, &CONFIG_MATCH.fields[i], p.at[i], in->object);
        }
        return has_any || config_fail(r, n, "match is empty; write user, group, uid, gid, unit or cgroup");
}

/* Without any key a mapping is an error. Empty lists of ids are written only where the config has ids: with
 * patterns they would match no process. */
void config_put_match(FILE *f, const void *object)
{
        const struct config_tenant *t = object;
        bool has_ids = t->names_ids || (t->n_units == 0 && t->n_cgroups == 0);
        const char *before = "{";

        for (const struct config_field *field = CONFIG_MATCH.fields; field->key; field++) {
                bool is_id = field->type == CONFIG_MATCH_ID;
                size_t first = is_id ? *count_of(field - (MATCH_UID - MATCH_USER), t) : 0;
                size_t n = *count_of(field, t);

                if (is_id ? !has_ids : n == 0)
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
