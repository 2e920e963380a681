/* Tenants; see tenant.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/tenant.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/cgroup.h"

/* Appends to a sentence; what does not fit is cut. */
static void append(char *buf, size_t n_buf, const char *format, ...) __attribute__((format(printf, 3, 4)));
static void append(char *buf, size_t n_buf, const char *format, ...)
{
        size_t used = strlen(buf);
        va_list args;

        va_start(args, format);
        vsnprintf(buf + used, n_buf - used, format, args);
        va_end(args);
}

/* Nothing more fits: a list of thousands of ids costs no more than what is shown of it. */
static bool is_full(const char *buf, size_t n_buf)
{
        return strlen(buf) + 1 >= n_buf;
}

void tenant_init(struct tenant *t, const struct config_tenant *config)
{
        *t = (struct tenant){ .config = config, .name = t->name_bytes };
        snprintf(t->name_bytes, sizeof(t->name_bytes), "%s", config->name);
}

void tenant_init_removed(struct tenant *t, const char *name)
{
        *t = (struct tenant){ .name = t->name_bytes };
        snprintf(t->name_bytes, sizeof(t->name_bytes), "%s", name);
}

void tenant_deinit(struct tenant *t)
{
        free(t->quotas);
        free(t->refusals);
        usage_page_free(t->usage);
        *t = (struct tenant){ .name = t->name_bytes };
}

static int compare_tenants(const void *left, const void *right)
{
        const struct tenant *const *a = left, *const *b = right;

        return strcmp((*a)->name, (*b)->name);
}

struct tenant **tenant_sort(struct tenant *tenants, size_t n, size_t *ret_n)
{
        struct tenant **sorted = calloc(n + 1, sizeof(*sorted));

        *ret_n = 0;
        for (size_t i = 0; sorted && i < n; i++)
                if (tenants[i].name[0] != '\0')
                        sorted[(*ret_n)++] = &tenants[i];
        if (sorted)
                qsort(sorted, *ret_n, sizeof(*sorted), compare_tenants);
        return sorted;
}

struct tenant *tenant_find(struct tenant *const *sorted, size_t n, const char *name)
{
        const struct tenant key = { .name = name }, *at = &key;
        struct tenant *const *found = bsearch(&at, sorted, n, sizeof(*sorted), compare_tenants);

        return found ? *found : NULL;
}

struct quota *tenant_quota(const struct tenant *t, const struct partition *p)
{
        for (size_t i = 0; i < t->n_quotas; i++)
                if (t->quotas[i]->partition == p && !quota_parent(t->quotas[i]))
                        return t->quotas[i];
        return NULL;
}

static void append_patterns(char *buf, size_t n_buf, const char *what, char *const *patterns,
                            size_t n_patterns)
{
        for (size_t i = 0; i < n_patterns && !is_full(buf, n_buf); i++)
                append(buf, n_buf, "%s%s", i ? " or " : what, patterns[i]);
}

static void describe_match(const struct tenant *t, char *buf, size_t n_buf)
{
        const struct config_tenant *c = t->config;
        bool has_patterns = c->n_units > 0 || c->n_cgroups > 0;

        append(buf, n_buf, "'%s' (", t->name);
        if (c->n_uids == 0 && c->n_gids == 0)
                append(buf, n_buf, has_patterns && !c->names_ids ? "any process" : "no process");
        for (size_t i = 0; i < c->n_uids && !is_full(buf, n_buf); i++)
                append(buf, n_buf, "%suid %u", i ? ", " : "", (unsigned)c->uids[i]);
        for (size_t i = 0; i < c->n_gids && !is_full(buf, n_buf); i++)
                append(buf, n_buf, "%sgid %u", i || c->n_uids ? ", " : "", (unsigned)c->gids[i]);
        append_patterns(buf, n_buf, " in unit ", c->units, c->n_units);
        append_patterns(buf, n_buf, " in cgroup ", c->cgroups, c->n_cgroups);
        append(buf, n_buf, ")");
}

/* A user chose the text, so what is not printable ASCII is replaced. */
static void append_untrusted(char *buf, size_t n_buf, const char *text, int n_max)
{
        size_t used = strlen(buf);

        append(buf, n_buf, "%.*s", n_max, text);
        for (char *at = buf + used; *at; at++)
                if ((unsigned char)*at < ' ' || (unsigned char)*at > '~')
                        *at = '?';
}

static void describe_all(struct tenant *const *tenants, size_t n_tenants, char *buf, size_t n_buf)
{
        for (size_t i = 0; i < n_tenants && !is_full(buf, n_buf); i++) {
                append(buf, n_buf, "%s", i ? ", " : "");
                describe_match(tenants[i], buf, n_buf);
        }
}

/* NULL: there is none. */
static struct tenant *find_named(struct tenant *const *tenants, size_t n_tenants, const char *name)
{
        for (size_t i = 0; name[0] != '\0' && i < n_tenants; i++)
                if (strcmp(tenants[i]->name, name) == 0)
                        return tenants[i];
        return NULL;
}

/* What is known of the process. */
static void describe_process(const struct credentials *who, char *buf, size_t n_buf)
{
        if (who->uid == MATCH_NO_ID)
                append(buf, n_buf, "a user without a uid in the daemon's user namespace ");
        else if (who->gid == MATCH_NO_ID)
                append(buf, n_buf, "uid %u, a group without a gid in the daemon's user namespace ",
                       (unsigned)who->uid);
        else
                append(buf, n_buf, "uid %u, gid %u ", (unsigned)who->uid, (unsigned)who->gid);
        if (who->pid <= 0)
                append(buf, n_buf,
                       "in a PID namespace that the daemon does not see (its control group is unknown) ");
        if (who->cgroup) {
                append(buf, n_buf, "in cgroup ");
                append_untrusted(buf, n_buf, who->cgroup, 200);
                append(buf, n_buf, " ");
        }
}

struct tenant *tenant_select(struct tenant *const *tenants, size_t n_tenants, struct tenant *fallback,
                             const char *name, const struct credentials *who, char *ret_sentence,
                             size_t n_sentence)
{
        const struct match_list *matches = &who->matches;
        struct tenant *named = find_named(tenants, n_tenants, name);

        for (size_t i = 0; i < matches->n_tenants; i++)
                if (name[0] == '\0' || tenants[matches->tenants[i]] == named)
                        return tenants[matches->tenants[i]];
        if (fallback && matches->n_tenants == 0 && (name[0] == '\0' || named == fallback))
                return fallback;

        ret_sentence[0] = '\0';
        describe_process(who, ret_sentence, n_sentence);
        if (named) {
                append(ret_sentence, n_sentence, "does not match tenant '%s'; its match rule is: ", name);
                describe_match(named, ret_sentence, n_sentence);
        } else if (name[0] != '\0') {
                append(ret_sentence, n_sentence, "requested tenant '");
                append_untrusted(ret_sentence, n_sentence, name, CONFIG_NAME_MAX);
                append(ret_sentence, n_sentence, "', which does not exist; the tenants are: ");
                describe_all(tenants, n_tenants, ret_sentence, n_sentence);
        } else {
                append(ret_sentence, n_sentence, "matches no tenant; the match rules are: ");
                describe_all(tenants, n_tenants, ret_sentence, n_sentence);
        }
        return NULL;
}

/* ---- which tenants a process matches ------------------------------------------- */

struct match_entry {
        uint32_t id, tenant;
};

struct match_table {
        struct match_entry *entries; /* by id, then by tenant */
        size_t n_entries;
};

struct matcher {
        uint64_t generation;
        const struct config *config;
        struct match_table uids, gids;
        uint32_t *anyone; /* tenants that have patterns only */
        size_t n_anyone;
};

void credentials_clear(struct credentials *who)
{
        free(who->cgroup);
        free(who->matches.tenants);
        who->cgroup = NULL;
        who->matches = (struct match_list){ .generation = 0 };
}

static int compare_entries(const void *x, const void *y)
{
        const struct match_entry *p = x, *q = y;

        if (p->id != q->id)
                return p->id < q->id ? -1 : 1;
        return p->tenant < q->tenant ? -1 : p->tenant > q->tenant;
}

static int compare_ids(const void *x, const void *y)
{
        const uint32_t *p = x, *q = y;

        return *p < *q ? -1 : *p > *q;
}

void match_sort_gids(gid_t *gids, size_t n_gids)
{
        size_t i = 1;

        while (i < n_gids && gids[i - 1] <= gids[i])
                i++;
        if (i < n_gids)
                qsort(gids, n_gids, sizeof(*gids), compare_ids);
}

/* ---- tables --------------------------------------------------------------- */

static int table_new(struct match_table *table, size_t n_entries)
{
        table->entries = calloc(n_entries + 1, sizeof(*table->entries));
        return table->entries ? 0 : -ENOMEM;
}

static void table_add(struct match_table *table, const uint32_t *ids, size_t n_ids, size_t tenant)
{
        for (size_t i = 0; i < n_ids; i++)
                table->entries[table->n_entries++] = (struct match_entry){ ids[i], (uint32_t)tenant };
}

static void table_sort(struct match_table *table)
{
        if (table->n_entries > 1)
                qsort(table->entries, table->n_entries, sizeof(*table->entries), compare_entries);
}

/* The first entry that is not below the id. */
static size_t table_find(const struct match_table *table, uint32_t id)
{
        size_t low = 0, high = table->n_entries;

        while (low < high) {
                size_t middle = low + (high - low) / 2;

                if (table->entries[middle].id < id)
                        low = middle + 1;
                else
                        high = middle;
        }
        return low;
}

struct matcher *matcher_free(struct matcher *m)
{
        if (!m)
                return NULL;
        free(m->uids.entries);
        free(m->gids.entries);
        free(m->anyone);
        free(m);
        return NULL;
}

int matcher_new(const struct config *c, struct matcher **ret)
{
        static uint64_t n_generations;
        struct matcher *m = calloc(1, sizeof(*m));
        size_t n_uids = 0, n_gids = 0;

        for (size_t i = 0; i < c->n_tenants; i++) {
                n_uids += c->tenants[i].n_uids;
                n_gids += c->tenants[i].n_gids;
        }
        if (m)
                m->anyone = calloc(c->n_tenants + 1, sizeof(*m->anyone));
        if (!m || !m->anyone || table_new(&m->uids, n_uids) < 0 || table_new(&m->gids, n_gids) < 0) {
                matcher_free(m);
                return -ENOMEM;
        }
        for (size_t i = 0; i < c->n_tenants; i++) {
                const struct config_tenant *t = &c->tenants[i];

                table_add(&m->uids, t->uids, t->n_uids, i);
                table_add(&m->gids, t->gids, t->n_gids, i);
                if (!t->names_ids && (t->n_units > 0 || t->n_cgroups > 0))
                        m->anyone[m->n_anyone++] = (uint32_t)i;
        }
        table_sort(&m->uids);
        table_sort(&m->gids);
        m->config = c;
        m->generation = ++n_generations;
        *ret = m;
        return 0;
}

bool matcher_needs_groups(const struct matcher *m)
{
        return m->gids.n_entries > 0;
}

/* ---- answers -------------------------------------------------------------- */

bool match_ids_are_known(const struct matcher *m, const struct credentials *who)
{
        return who->matches.generation == m->generation;
}

bool match_is_known(const struct matcher *m, const struct credentials *who)
{
        return match_ids_are_known(m, who) && who->matches.by_place;
}

static int list_add(struct match_list *list, uint32_t tenant)
{
        size_t n = list->n_tenants;
        uint32_t *more;

        if (n > 0 && list->tenants[n - 1] == tenant)
                return 0;
        if ((n & (n - 1)) == 0) { /* full at each power of two */
                more = reallocarray(list->tenants, n > 0 ? 2 * n : 1, sizeof(*more));
                if (!more)
                        return -ENOMEM;
                list->tenants = more;
        }
        list->tenants[list->n_tenants++] = tenant;
        return 0;
}

static int add_id(struct match_list *list, const struct match_table *table, uint32_t id)
{
        int r = 0;

        for (size_t i = table_find(table, id); r == 0 && i < table->n_entries && table->entries[i].id == id;
             i++)
                r = list_add(list, table->entries[i].tenant);
        return r;
}

/* The shorter of the two is walked, the longer one is searched. */
static int add_groups(struct match_list *list, const struct match_table *table, const gid_t *gids,
                      size_t n_gids)
{
        int r = 0;

        if (n_gids < table->n_entries) {
                for (size_t i = 0; r == 0 && i < n_gids; i++)
                        r = add_id(list, table, gids[i]);
                return r;
        }
        for (size_t i = 0; r == 0 && n_gids > 0 && i < table->n_entries; i++)
                if (bsearch(&table->entries[i].id, gids, n_gids, sizeof(*gids), compare_ids))
                        r = list_add(list, table->entries[i].tenant);
        return r;
}

static void list_sort(struct match_list *list)
{
        size_t n = 0;

        if (list->n_tenants > 1)
                qsort(list->tenants, list->n_tenants, sizeof(*list->tenants), compare_ids);
        for (size_t i = 0; i < list->n_tenants; i++)
                if (n == 0 || list->tenants[n - 1] != list->tenants[i])
                        list->tenants[n++] = list->tenants[i];
        list->n_tenants = n;
}

int match_ids(const struct matcher *m, struct credentials *who, const gid_t *gids, size_t n_gids)
{
        struct match_list list = { .generation = m->generation };
        int r;

        if (match_ids_are_known(m, who))
                return 0;
        r = add_id(&list, &m->uids, who->uid);
        if (r == 0)
                r = add_id(&list, &m->gids, who->gid);
        if (r == 0)
                r = add_groups(&list, &m->gids, gids, n_gids);
        for (size_t i = 0; r == 0 && i < m->n_anyone; i++)
                r = list_add(&list, m->anyone[i]);
        if (r < 0) {
                free(list.tenants);
                return r;
        }
        list_sort(&list);
        free(who->matches.tenants);
        who->matches = list;
        return 0;
}

/* Of each kind that there is, one. */
bool match_place(const struct config_tenant *c, const char *path)
{
        char unit[CGROUP_UNIT_BYTES];
        bool unit_matches = c->n_units == 0, path_matches = c->n_cgroups == 0;

        if (unit_matches && path_matches)
                return true;
        if (!path)
                return false;
        cgroup_unit(path, unit);
        for (size_t i = 0; i < c->n_units && !unit_matches; i++)
                unit_matches = cgroup_unit_matches(c->units[i], unit);
        for (size_t i = 0; i < c->n_cgroups && !path_matches; i++)
                path_matches = cgroup_path_matches(c->cgroups[i], path);
        return unit_matches && path_matches;
}

void match_places(const struct matcher *m, struct credentials *who)
{
        struct match_list *list = &who->matches;
        size_t n = 0;

        if (match_is_known(m, who))
                return;
        for (size_t i = 0; i < list->n_tenants; i++)
                if (match_place(&m->config->tenants[list->tenants[i]], who->cgroup))
                        list->tenants[n++] = list->tenants[i];
        list->n_tenants = n;
        list->by_place = true;
}
