/* Tenants and who they are; see tenant.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/tenant.h"

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

void tenant_init(struct tenant *t, const struct config_tenant *config)
{
        *t = (struct tenant){ .config = config, .name = t->name_bytes };
        snprintf(t->name_bytes, sizeof(t->name_bytes), "%s", config->name);
}

void tenant_deinit(struct tenant *t)
{
        free(t->quotas);
        usage_page_free(t->usage);
        *t = (struct tenant){ .name = t->name_bytes };
}

bool tenant_matches(const struct tenant *t, const struct credentials *who)
{
        const struct config_tenant *c = t->config;

        if (!c)
                return false;
        for (size_t i = 0; i < c->n_uids; i++)
                if (c->uids[i] == who->uid)
                        return true;
        for (size_t i = 0; i < c->n_gids; i++) {
                if (c->gids[i] == who->gid)
                        return true;
                for (size_t j = 0; j < who->n_gids; j++)
                        if (c->gids[i] == who->gids[j])
                                return true;
        }
        return false;
}

static void describe_match(const struct tenant *t, char *buf, size_t n_buf)
{
        const struct config_tenant *c = t->config;

        append(buf, n_buf, "'%s' (", t->name);
        if (c->n_uids == 0 && c->n_gids == 0)
                append(buf, n_buf, "nobody");
        for (size_t i = 0; i < c->n_uids; i++)
                append(buf, n_buf, "%suid %u", i ? ", " : "", (unsigned)c->uids[i]);
        for (size_t i = 0; i < c->n_gids; i++)
                append(buf, n_buf, "%sgid %u", i || c->n_uids ? ", " : "", (unsigned)c->gids[i]);
        append(buf, n_buf, ")");
}

static void describe_all(struct tenant *const *tenants, size_t n_tenants, char *buf, size_t n_buf)
{
        for (size_t i = 0; i < n_tenants; i++) {
                append(buf, n_buf, "%s", i ? ", " : "");
                describe_match(tenants[i], buf, n_buf);
        }
}

struct tenant *tenant_select(struct tenant *const *tenants, size_t n_tenants, struct tenant *fallback,
                             const char *name, const struct credentials *who, char *ret_sentence,
                             size_t n_sentence)
{
        struct tenant *named = NULL;

        for (size_t i = 0; i < n_tenants; i++) {
                bool is_named = strcmp(tenants[i]->name, name) == 0;

                if (is_named)
                        named = tenants[i];
                if ((name[0] == '\0' || is_named) && tenant_matches(tenants[i], who))
                        return tenants[i];
        }
        if (fallback && (name[0] == '\0' || named == fallback)) {
                size_t i = 0;

                while (i < n_tenants && !tenant_matches(tenants[i], who))
                        i++;
                if (i == n_tenants)
                        return fallback;
        }

        ret_sentence[0] = '\0';
        append(ret_sentence, n_sentence, "uid %u, gid %u ", (unsigned)who->uid, (unsigned)who->gid);
        if (named) {
                append(ret_sentence, n_sentence, "is not of tenant '%s'; these would match: ", name);
                describe_match(named, ret_sentence, n_sentence);
        } else if (name[0] != '\0') {
                append(ret_sentence, n_sentence,
                       "asked for tenant '%.63s', which does not exist; there are: ", name);
                describe_all(tenants, n_tenants, ret_sentence, n_sentence);
        } else {
                append(ret_sentence, n_sentence, "matches no tenant; these would match: ");
                describe_all(tenants, n_tenants, ret_sentence, n_sentence);
        }
        return NULL;
}
