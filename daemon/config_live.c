/* SPDX-License-Identifier: Apache-2.0 */
/* A config that is to follow another while that one is served: what cannot change
 * under sessions, and what differs. See config_reader.h. */
#include "daemon/config_gpu.h"
#include "daemon/config_reader.h"

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
                return false; /* config_check_live() says so */
        memcpy(d->uuid, was->uuid, sizeof(d->uuid));
        d->size_bytes = was->size_bytes;
        d->headroom_bytes = config_default_headroom(was->size_bytes);
        return true;
}

/* ---- what cannot change --------------------------------------------------- */

/* at: where the socket is configured, or the root where it is not. */
static void check_socket(struct config_reader *r, const struct yamltree_node *at, const char *key,
                         const struct config_socket *was, const struct config_socket *now, bool is_given)
{
        if (!is_given && strcmp(was->path, now->path) != 0)
                config_fail(r, at, "the path of %s, '%s', " RESTART, key, was->path);
        if (was->mode != now->mode)
                config_fail(r, at, "the mode of %s, \"%04o\", " RESTART, key, (unsigned)was->mode);
        if (was->group != now->group)
                config_fail(r, at, "the group of %s " RESTART, key);
}

static void check_device(struct config_reader *r, size_t device)
{
        const struct config_device *now = &r->c->devices[device];
        const struct device_note *note = &r->devices[device];
        const struct config_device *was = now->id ? find_device(running(r), now->id) : NULL;

        if (now->id && !was)
                config_fail(r, note->node, "device '%s' is new: devices " RESTART, now->id);
        else if (was && !was->is_cuda && now->size_bytes > 0 && was->size_bytes != now->size_bytes)
                config_fail(r, note->node, "the size of device '%s', %s, " RESTART, now->id,
                            SIZE(was->size_bytes));
}

static const char *growth_name(enum config_growth growth)
{
        return growth == CONFIG_GROWTH_PREALLOCATE ? "preallocate" : "on-demand";
}

static const char *share_name(enum config_share share)
{
        return share == CONFIG_SHARE_FD ? "fd" : "cuda-ipc";
}

static void check_partition(struct config_reader *r, size_t partition)
{
        const struct config_partition *now = &r->c->partitions[partition];
        const struct partition_note *note = &r->partitions[partition];
        const char *id = r->c->devices[now->device].id, *was_id;
        const struct config_partition *was;
        size_t index;

        was = config_find_partition(running(r), now->name, &index);
        if (!was) {
                config_fail(r, note->node, "partition '%s' is new: partitions " RESTART, now->name);
                return;
        }
        was_id = running(r)->devices[was->device].id;
        if (id && strcmp(id, was_id) != 0) {
                config_fail(r, note->node, "the device of partition '%s', '%s', " RESTART, now->name, was_id);
                return;
        }
        if (was->growth != now->growth)
                config_fail(r, note->growth, "the growth of partition '%s', %s, " RESTART, now->name,
                            growth_name(was->growth));
        if (was->share != now->share)
                config_fail(r, note->share, "the share of partition '%s', %s, " RESTART, now->name,
                            share_name(was->share));
        if (was->clears != now->clears)
                config_fail(r, note->clears, "the clear_on_release of partition '%s', %s, " RESTART,
                            now->name, was->clears ? "true" : "false");
        if (was->pages != now->pages)
                config_fail(r, note->pages, "the huge_pages of partition '%s', %s, " RESTART, now->name,
                            config_pages_name(was->pages));
        if (was->has_node != now->has_node || was->node != now->node)
                config_fail(r, note->numa, "the numa_node of partition '%s' " RESTART, now->name);
}

static bool lacks_an_id(const struct config *c)
{
        for (size_t i = 0; i < c->n_devices; i++)
                if (!c->devices[i].id)
                        return true;
        return false;
}

/* Something that could not be read may be what seems to be missing. */
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
        check_socket(r, r->socket_path ? r->socket_path : root, "socket", &was->socket, &r->c->socket,
                     r->machine->socket_is_given);
        check_socket(r, r->admin_socket_path ? r->admin_socket_path : root, "admin_socket",
                     &was->admin_socket, &r->c->admin_socket, r->machine->admin_socket_is_given);
        for (size_t i = 0; i < r->c->n_devices; i++)
                check_device(r, i);
        for (size_t i = 0; i < r->c->n_partitions; i++)
                check_partition(r, i);
        check_gone(r, r->devices_at ? r->devices_at : root);
}

/* ---- what differs ---------------------------------------------------------- */

const char *config_size(uint64_t n_bytes, char *buf, size_t n_buf)
{
        snprintf(buf, n_buf, "%s", SIZE(n_bytes));
        return buf;
}

static void diff_time(const char *what, uint64_t from_ms, uint64_t to_ms, FILE *f)
{
        if (from_ms != to_ms)
                fprintf(f, "timeouts: %s is %llums, was %llums\n", what, (unsigned long long)to_ms,
                        (unsigned long long)from_ms);
}

static const char *default_name(const struct config *c)
{
        return c->default_tenant >= 0 ? c->tenants[c->default_tenant].name : "";
}

void config_diff(const struct config *from, const struct config *to, FILE *f)
{
        const char *was = default_name(from), *now = default_name(to);

        diff_time("reclaim", from->reclaim_timeout_ms, to->reclaim_timeout_ms, f);
        diff_time("release", from->release_timeout_ms, to->release_timeout_ms, f);
        diff_time("quarantine", from->quarantine_timeout_ms, to->quarantine_timeout_ms, f);
        if (from->max_sessions != to->max_sessions)
                fprintf(f, "max_sessions is %u, was %u\n", to->max_sessions, from->max_sessions);
        if (strcmp(was, now) != 0)
                fprintf(f, "default_tenant is %s, was %s\n", *now ? now : "none", *was ? was : "none");
        for (size_t i = 0; i < from->n_devices; i++) {
                const struct config_device *d = &from->devices[i], *e = find_device(to, d->id);

                if (e && e->headroom_bytes != d->headroom_bytes)
                        fprintf(f, "device '%s': headroom is %s, was %s\n", d->id, SIZE(e->headroom_bytes),
                                SIZE(d->headroom_bytes));
                if (e && e->standby_bytes != d->standby_bytes)
                        fprintf(f, "device '%s': standby is %s, was %s\n", d->id, SIZE(e->standby_bytes),
                                SIZE(d->standby_bytes));
        }
        for (size_t i = 0; i < from->n_partitions; i++) {
                const struct config_partition *p = &from->partitions[i], *q;
                size_t index;

                q = config_find_partition(to, p->name, &index);
                if (q && q->limit_bytes != p->limit_bytes)
                        fprintf(f, "partition '%s': limit is %s, was %s\n", p->name, SIZE(q->limit_bytes),
                                SIZE(p->limit_bytes));
        }
}

static bool ids_are_alike(const uint32_t *a, size_t n_a, const uint32_t *b, size_t n_b)
{
        return n_a == n_b && (n_a == 0 || memcmp(a, b, n_a * sizeof(*a)) == 0);
}

static bool patterns_are_alike(char *const *a, size_t n_a, char *const *b, size_t n_b)
{
        if (n_a != n_b)
                return false;
        for (size_t i = 0; i < n_a; i++)
                if (strcmp(a[i], b[i]) != 0)
                        return false;
        return true;
}

bool config_match_is_alike(const struct config_tenant *a, const struct config_tenant *b)
{
        return a->names_ids == b->names_ids &&
               patterns_are_alike(a->units, a->n_units, b->units, b->n_units) &&
               patterns_are_alike(a->cgroups, a->n_cgroups, b->cgroups, b->n_cgroups) &&
               ids_are_alike(a->uids, a->n_uids, b->uids, b->n_uids) &&
               ids_are_alike(a->gids, a->n_gids, b->gids, b->n_gids);
}
