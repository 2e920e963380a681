/* SPDX-License-Identifier: Apache-2.0 */
/* The configuration in force as YAML, every default spelled out. Users and
 * groups are written as the config names them. Whatever is written here, config_parse() reads back as the same
 * configuration; strings are quoted so that none can be taken for syntax. */
#include "daemon/config.h"
#include "daemon/config_reader.h"

#include <stdlib.h>

static void put_string(FILE *f, const char *text)
{
        fputc('"', f);
        for (; *text; text++) {
                if (*text == '"' || *text == '\\')
                        fputc('\\', f);
                fputc(*text, f);
        }
        fputc('"', f);
}

static void put_socket(FILE *f, const char *key, const struct config_socket *s)
{
        fprintf(f, "%s: {path: ", key);
        put_string(f, s->path);
        fprintf(f, ", mode: \"%04o\"", (unsigned int)s->mode);
        if (s->group_name) {
                fputs(", group: ", f);
                put_string(f, s->group_name);
        } else if (s->group != (gid_t)-1) {
                fprintf(f, ", group: %u", (unsigned int)s->group);
        }
        fputs("}\n", f);
}

static void put_device(FILE *f, const struct config *c, size_t device)
{
        const struct config_device *d = &c->devices[device];

        fputs("  - id: ", f);
        put_string(f, d->id);
        if (!d->is_cuda) {
                fputs("\n    size: ", f);
                fputs(SIZE(d->size_bytes), f);
        }
        fputs("\n    headroom: ", f);
        fputs(SIZE(d->headroom_bytes), f);
        if (d->standby_bytes > 0)
                fprintf(f, "\n    standby: %s", SIZE(d->standby_bytes));
        fputs("\n    partitions:\n", f);
        for (size_t i = 0; i < c->n_partitions; i++) {
                const struct config_partition *p = &c->partitions[i];

                if (p->device != device)
                        continue;
                fputs("      - {name: ", f);
                put_string(f, p->name);
                fputs(", limit: ", f);
                fputs(SIZE(p->limit_bytes), f);
                fprintf(f, ", growth: %s, share: %s%s",
                        p->growth == CONFIG_GROWTH_PREALLOCATE ? "preallocate" : "on-demand",
                        p->share == CONFIG_SHARE_CUDA_IPC ? "cuda-ipc" : "fd",
                        p->clears ? ", clear_on_release: true" : "");
                if (p->pages != CONFIG_PAGES_AUTO)
                        fprintf(f, ", huge_pages: %s", config_pages_name(p->pages));
                if (p->has_node)
                        fprintf(f, ", numa_node: %u", p->node);
                fputs("}\n", f);
        }
}

/* Those after the first, which have names. */
static void put_ids(FILE *f, const char *key, const uint32_t *ids, size_t first, size_t n_ids)
{
        fprintf(f, "%s: [", key);
        for (size_t i = first; i < n_ids; i++)
                fprintf(f, "%s%u", i > first ? ", " : "", ids[i]);
        fputc(']', f);
}

static void put_strings(FILE *f, const char *key, char *const *strings, size_t n_strings)
{
        if (n_strings == 0)
                return;
        fprintf(f, "%s: [", key);
        for (size_t i = 0; i < n_strings; i++) {
                fputs(i ? ", " : "", f);
                put_string(f, strings[i]);
        }
        fputc(']', f);
}

/* Without any key it would be an error, and with ids it would name who. */
static void put_match(FILE *f, const struct config_tenant *t)
{
        bool has_patterns = t->n_units > 0 || t->n_cgroups > 0, has_ids = t->names_ids || !has_patterns;

        if (has_ids) {
                put_strings(f, "user", t->users, t->n_users);
                fputs(t->n_users > 0 ? ", " : "", f);
                put_strings(f, "group", t->groups, t->n_groups);
                fputs(t->n_groups > 0 ? ", " : "", f);
                put_ids(f, "uid", t->uids, t->n_users, t->n_uids);
                fputs(", ", f);
                put_ids(f, "gid", t->gids, t->n_groups, t->n_gids);
        }
        fputs(has_ids && t->n_units > 0 ? ", " : "", f);
        put_strings(f, "unit", t->units, t->n_units);
        fputs((has_ids || t->n_units > 0) && t->n_cgroups > 0 ? ", " : "", f);
        put_strings(f, "cgroup", t->cgroups, t->n_cgroups);
}

static void put_tenant(FILE *f, const struct config *c, const struct config_tenant *t)
{
        fputs("  - name: ", f);
        put_string(f, t->name);
        fputs("\n    match: {", f);
        put_match(f, t);
        fprintf(f, "}\n    max_sessions: %u\n    quotas:\n", t->max_sessions);
        for (size_t i = 0; i < t->n_quotas; i++) {
                const struct config_quota *q = &t->quotas[i];

                fputs("      - {partition: ", f);
                put_string(f, c->partitions[q->partition].name);
                fputs(", limit: ", f);
                fputs(SIZE(q->limit_bytes), f);
                fputs(", reserve: ", f);
                fputs(SIZE(q->reserve_bytes), f);
                fprintf(f, ", max_sessions: %u, max_blocks: %u", q->max_sessions, q->max_blocks);
                if (q->keep_bytes > 0)
                        fprintf(f, ", keep: {bytes: %s, for: %llums}", SIZE(q->keep_bytes),
                                (unsigned long long)q->keep_ms);
                fputs("}\n", f);
        }
}

static void put_config(FILE *f, const struct config *c)
{
        put_socket(f, "socket", &c->socket);
        put_socket(f, "admin_socket", &c->admin_socket);
        fprintf(f, "timeouts: {reclaim: %llums, release: %llums, quarantine: %llums, read: %llums}\n",
                (unsigned long long)c->reclaim_timeout_ms, (unsigned long long)c->release_timeout_ms,
                (unsigned long long)c->quarantine_timeout_ms, (unsigned long long)c->read_timeout_ms);
        fprintf(f, "max_sessions: %u\n", c->max_sessions);
        fputs("devices:\n", f);
        for (size_t i = 0; i < c->n_devices; i++)
                put_device(f, c, i);
        fputs("tenants:\n", f);
        for (size_t i = 0; i < c->n_tenants; i++)
                put_tenant(f, c, &c->tenants[i]);
        if (c->default_tenant >= 0) {
                fputs("default_tenant: ", f);
                put_string(f, c->tenants[c->default_tenant].name);
                fputc('\n', f);
        }
}

char *config_format(const struct config *c)
{
        size_t n_bytes = 0;
        char *text = NULL;
        bool failed;
        FILE *f;

        f = open_memstream(&text, &n_bytes);
        if (!f)
                return NULL;
        put_config(f, c);
        failed = ferror(f) != 0;
        if (fclose(f) != 0 || failed) {
                free(text);
                return NULL;
        }
        return text;
}
