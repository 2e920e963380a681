/* SPDX-License-Identifier: Apache-2.0 */
/* A config that replaces the one in force: what cannot change while the daemon runs, and what differs. */
#include "daemon/config/reader.h"

#include <string.h>

#define RESTART "cannot change while bfcd runs: restart bfcd"

static const struct config *running(const struct config_reader *r)
{
        return r->machine ? r->machine->running : NULL;
}

static const struct config_device *find_device(const struct config *c, const char *id)
{
        for (size_t i = 0; i < c->n_devices; i++)
                if (c->devices[i].id && strcmp(c->devices[i].id, id) == 0)
                        return &c->devices[i];
        return NULL;
}

bool config_recall_gpu(struct config_reader *r, size_t device)
{
        struct config_device *d = &r->c->devices[device];
        const struct config_device *was = find_device(running(r), d->id);

        if (!was)
                return false; /* config_check_live() reports it */
        memcpy(d->uuid, was->uuid, sizeof(d->uuid));
        d->size_bytes = was->size_bytes;
        d->headroom_bytes = config_default_headroom(was->size_bytes);
        return true;
}

/* ---- what cannot change --------------------------------------------------- */

/* at: the values of the keys in the new config, NULL where it has none: `where` is reported then. */
static void check_section(struct config_reader *r, const struct config_section *s, const void *was,
                          const void *now, const struct yamltree_node *const at[],
                          const struct yamltree_node *where, const char *kind, const char *name)
{
        for (size_t i = 0; s->fields[i].key; i++) {
                const struct config_field *field = &s->fields[i];
                const char *quote = field->type == CONFIG_PATH || field->type == CONFIG_FILE ? "'"
                                    : field->type == CONFIG_MODE                             ? "\""
                                                                                             : "";
                char text[CONFIG_TEXT_BYTES];

                if (!field->is_fixed || config_is_alike(field, was, now))
                        continue;
                config_text(NULL, field, was, text);
                quote = text[0] ? quote : "";
                config_fail(r, at[i] ? at[i] : where, "the %s of %s%s%s%s, %s%s%s, " RESTART, field->key,
                            kind, *name ? " '" : "", name, *name ? "'" : "", quote, text[0] ? text : "none",
                            quote);
        }
}

static void check_socket(struct config_reader *r, const struct config_place *p,
                         const struct yamltree_node *root, const char *what, const struct config_socket *was,
                         const struct config_socket *now)
{
        check_section(r, &CONFIG_SOCKET, was, now, p->at, p->node ? p->node : root, what, "");
}

static void check_device(struct config_reader *r, size_t device)
{
        const struct config_device *now = &r->c->devices[device];
        const struct config_place *p = &r->devices[device].place;
        const struct config_device *was = now->id ? find_device(running(r), now->id) : NULL;

        if (now->id && !was)
                config_fail(r, p->at[DEVICE_ID], "device '%s' is new: devices " RESTART, now->id);
        else if (was && now->size_bytes > 0)
                check_section(r, &CONFIG_DEVICE, was, now, p->at, p->node, "device", now->id);
}

static void check_partition(struct config_reader *r, size_t partition)
{
        const struct config_partition *now = &r->c->partitions[partition];
        const struct config_place *p = &r->partitions[partition].place;
        const char *id = r->c->devices[now->device].id, *was_id;
        const struct config_partition *was;
        size_t index;

        was = config_find_partition(running(r), now->name, &index);
        if (!was) {
                config_fail(r, p->node, "partition '%s' is new: partitions " RESTART, now->name);
                return;
        }
        was_id = running(r)->devices[was->device].id;
        if (id && strcmp(id, was_id) != 0)
                config_fail(r, p->node, "the device of partition '%s', '%s', " RESTART, now->name, was_id);
        else
                check_section(r, &CONFIG_PARTITION, was, now, p->at, p->node, "partition", now->name);
}

static bool lacks_an_id(const struct config *c)
{
        for (size_t i = 0; i < c->n_devices; i++)
                if (!c->devices[i].id)
                        return true;
        return false;
}

/* Where an element could not be read, it may be the missing one. */
static void check_gone(struct config_reader *r, const struct yamltree_node *at)
{
        const struct config *was = running(r);
        size_t index;

        if (r->lacks_partitions || lacks_an_id(r->c))
                return;
        for (size_t i = 0; i < was->n_devices; i++)
                if (!find_device(r->c, was->devices[i].id))
                        config_fail(r, at, "device '%s' is missing: devices " RESTART, was->devices[i].id);
        for (size_t i = 0; i < was->n_partitions; i++)
                if (find_device(r->c, was->devices[was->partitions[i].device].id) &&
                    !config_find_partition(r->c, was->partitions[i].name, &index))
                        config_fail(r, at, "partition '%s' is missing: partitions " RESTART,
                                    was->partitions[i].name);
}

void config_check_live(struct config_reader *r, const struct yamltree_node *root)
{
        const struct config *was = running(r);

        if (!was)
                return;
        check_socket(r, &r->socket, root, "socket", &was->socket, &r->c->socket);
        check_socket(r, &r->admin_socket, root, "admin_socket", &was->admin_socket, &r->c->admin_socket);
        check_socket(r, &r->monitor_socket, root, "monitor_socket", &was->monitor_socket,
                     &r->c->monitor_socket);
        check_socket(r, &r->lease_socket, root, "lease_socket", &was->lease_socket, &r->c->lease_socket);
        check_section(r, &CONFIG_RECORDS, &was->records, &r->c->records, r->records.at,
                      r->records.node ? r->records.node : root, "records", "");
        for (size_t i = 0; i < r->c->n_devices; i++)
                check_device(r, i);
        for (size_t i = 0; i < r->c->n_partitions; i++)
                check_partition(r, i);
        check_gone(r, r->top.at[TOP_DEVICES] ? r->top.at[TOP_DEVICES] : root);
}

/* ---- the order -------------------------------------------------------------- */

static void order_devices(struct config *c, const struct config *was)
{
        for (size_t i = 0; i < was->n_devices; i++) {
                struct config_device moved = c->devices[i];
                size_t from = i;

                while (strcmp(c->devices[from].id, was->devices[i].id) != 0)
                        from++;
                c->devices[i] = c->devices[from];
                c->devices[from] = moved;
                for (size_t k = 0; k < c->n_partitions; k++)
                        c->partitions[k].device = c->partitions[k].device == i      ? from
                                                  : c->partitions[k].device == from ? i
                                                                                    : c->partitions[k].device;
        }
}

void config_order_as(struct config *c, const struct config *was)
{
        order_devices(c, was);
        for (size_t i = 0; i < c->n_tenants; i++)
                for (size_t k = 0; k < c->tenants[i].n_quotas; k++) {
                        struct config_quota *q = &c->tenants[i].quotas[k];

                        config_find_partition(was, c->partitions[q->partition].name, &q->partition);
                }
        for (size_t i = 0; i < was->n_partitions; i++) {
                struct config_partition moved = c->partitions[i];
                size_t from;

                config_find_partition(c, was->partitions[i].name, &from);
                c->partitions[i] = c->partitions[from];
                c->partitions[from] = moved;
        }
}

/* ---- what differs ---------------------------------------------------------- */

const char *config_size(uint64_t n_bytes, char *buf, size_t n_buf)
{
        snprintf(buf, n_buf, "%s", SIZE(n_bytes));
        return buf;
}

void config_diff_section(const struct config_section *s, const void *from, const void *to, const char *kind,
                         const char *name, FILE *f,
                         void (*more)(void *userdata, const struct config_field *field), void *userdata)
{
        for (const struct config_field *field = s->fields; field->key; field++) {
                bool is_top = s == &CONFIG_TOP;
                char was[CONFIG_TEXT_BYTES], is[CONFIG_TEXT_BYTES];

                if (field->is_fixed || field->type == CONFIG_LIST ||
                    (field->type == CONFIG_MAPPING && !field->text))
                        continue;
                config_text(is_top ? from : NULL, field, from, was);
                config_text(is_top ? to : NULL, field, to, is);
                if (strcmp(was, is) == 0)
                        continue;
                fprintf(f, "%s%s%s%s%s%s is %s, was %s", kind, *name ? " '" : "", name, *name ? "'" : "",
                        *kind ? ": " : "", field->key, *is ? is : "none", *was ? was : "none");
                if (more)
                        more(userdata, field);
                fputc('\n', f);
        }
}

void config_diff(const struct config *from, const struct config *to, FILE *f)
{
        config_diff_section(&CONFIG_TIMEOUTS, from, to, "timeouts", "", f, NULL, NULL);
        config_diff_section(&CONFIG_TOP, from, to, "", "", f, NULL, NULL);
        for (size_t i = 0; i < from->n_devices; i++) {
                const struct config_device *d = &from->devices[i], *e = find_device(to, d->id);

                if (e)
                        config_diff_section(&CONFIG_DEVICE, d, e, "device", d->id, f, NULL, NULL);
        }
        for (size_t i = 0; i < from->n_partitions; i++) {
                const struct config_partition *p = &from->partitions[i], *q;
                size_t index;

                q = config_find_partition(to, p->name, &index);
                if (q)
                        config_diff_section(&CONFIG_PARTITION, p, q, "partition", p->name, f, NULL, NULL);
        }
}
