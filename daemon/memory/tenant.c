/* Tenants; see tenant.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/tenant.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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
