/* The devices; see devices.h. A handful: a list is enough.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/devices.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "keeper/collapse.h"
#include "keeper/remote.h"

struct opened {
        char *id;
        struct device *device;
};

struct devices {
        struct opened *items;
        size_t n_items;
        enum devices_kind kind;
        struct keepers *keepers; /* NULL: not opened */
        bool have_left;
};

int devices_new(enum devices_kind kind, struct devices **ret)
{
        struct devices *d = calloc(1, sizeof(*d));

        if (!d)
                return -ENOMEM;
        d->kind = kind;
        *ret = d;
        return 0;
}

int devices_keepers(struct devices *d, const char *admin_socket, struct keepers **ret, char *ret_sentence,
                    size_t n_sentence)
{
        if ((d->kind == DEVICES_KEPT || d->kind == DEVICES_EXTERNAL) && !d->keepers) {
                int r = keepers_open(admin_socket, &d->keepers, ret_sentence, n_sentence);

                if (r < 0)
                        return r;
                if (d->kind == DEVICES_EXTERNAL)
                        keepers_set_external(d->keepers);
                d->have_left = keepers_listen(d->keepers, KEEPER_HOST);
        }
        *ret = d->keepers;
        return 0;
}

bool devices_have_left(const struct devices *d)
{
        return d->have_left;
}

struct keepers *devices_take_keepers(struct devices *d)
{
        struct keepers *k = d->keepers;

        d->keepers = NULL;
        return k;
}

struct devices *devices_free(struct devices *d)
{
        if (!d)
                return NULL;
        for (size_t i = 0; i < d->n_items; i++) {
                device_free(d->items[i].device);
                free(d->items[i].id);
        }
        free(d->items);
        keeper_stop_collapsing();
        keepers_close(d->keepers);
        free(d);
        return NULL;
}

static struct device *devices_find(const struct devices *d, const char *id)
{
        for (size_t i = 0; i < d->n_items; i++)
                if (strcmp(d->items[i].id, id) == 0)
                        return d->items[i].device;
        return NULL;
}

/* The host's has the ledger. */
static bool is_used(const void *userdata, const char *id)
{
        return strcmp(id, KEEPER_HOST) == 0 || devices_find(userdata, id);
}

void devices_drop_rest(const struct devices *d)
{
        if (d->keepers)
                (void)keepers_end(d->keepers, KEEPER_END_MS, is_used, d);
}

int devices_put(struct devices *d, const char *id, struct device *device)
{
        struct opened *items;

        if (devices_find(d, id))
                return -EEXIST;
        items = reallocarray(d->items, d->n_items + 1, sizeof(*items));
        if (!items)
                return -ENOMEM;
        d->items = items;
        items[d->n_items] = (struct opened){ .id = strdup(id), .device = device };
        if (!items[d->n_items].id)
                return -ENOMEM;
        d->n_items++;
        return 0;
}

/* bfcd loads no driver: a GPU's memory belongs to a keeper. */
static int open_by_id(struct devices *d, const char *id, struct device **ret, char *ret_sentence,
                      size_t n_sentence)
{
        int r;

        if (d->kind == DEVICES_NO_MEMORY) {
                r = device_no_memory_new(id, ret);
                if (r < 0)
                        snprintf(ret_sentence, n_sentence, "%s: %s", id, strerror(-r));
                return r;
        }
        if (strcmp(id, "host") != 0)
                return keeper_device_new(d->keepers, id, ret, ret_sentence, n_sentence);
        keeper_start_collapsing();
        r = device_host_new(ret);
        if (r < 0)
                snprintf(
                        ret_sentence, n_sentence, "%s: %s", id,
                        r == -ENOTSUP
                                ? "the kernel grants no write leases, which show that no process has memory any "
                                  "more: set fs.leases-enable to 1, and mount /proc"
                                : strerror(-r));
        return r;
}

int devices_open(struct devices *d, const char *id, struct device **ret, char *ret_sentence,
                 size_t n_sentence)
{
        struct device *device = devices_find(d, id);
        int r;

        if (device) {
                *ret = device;
                return 0;
        }
        r = open_by_id(d, id, &device, ret_sentence, n_sentence);
        if (r < 0)
                return r;
        /* All that the config promises is in these pieces. */
        if (CONFIG_GRANULARITY % device_granularity(device) != 0) {
                snprintf(ret_sentence, n_sentence,
                         "%s: its allocation granularity is %" PRIu64 " bytes, and 2MiB is not a multiple "
                         "of it",
                         id, device_granularity(device));
                r = -ENOTSUP;
        } else {
                r = devices_put(d, id, device);
                if (r < 0)
                        snprintf(ret_sentence, n_sentence, "%s: %s", id, strerror(-r));
        }
        if (r < 0) {
                device_free(device);
                return r;
        }
        *ret = device;
        return 0;
}

int devices_look(void *userdata, const char *admin_socket, const char *id, struct config_gpu *ret,
                 char *ret_sentence, size_t n_sentence)
{
        struct device *device = NULL;
        struct device_facts facts;
        char sentence[512];
        struct keepers *unused;
        int r = devices_keepers(userdata, admin_socket, &unused, sentence, sizeof(sentence));

        if (r < 0)
                snprintf(ret_sentence, n_sentence, "%s: %s", id, sentence);
        else
                r = devices_open(userdata, id, &device, ret_sentence, n_sentence);

        if (r < 0)
                return r;
        r = device_facts(device, &facts);
        if (r < 0) {
                snprintf(ret_sentence, n_sentence, "%s: the device does not respond: %s", id, strerror(-r));
                return r;
        }
        *ret = (struct config_gpu){ .bytes_total = facts.bytes_total,
                                    .bytes_free = facts.bytes_free,
                                    .lacks_fd = !facts.shares[DEVICE_SHARE_FD],
                                    .lacks_ipc = !facts.shares[DEVICE_SHARE_CUDA_IPC] };
        memcpy(ret->uuid, facts.uuid, sizeof(ret->uuid));
        return 0;
}

struct device_supply devices_supply(const struct config_partition *p)
{
        return (struct device_supply){ .is_bound = p->has_node,
                                       .node = p->node,
                                       .collapse = keeper_collapse };
}

int devices_look_pages(const struct config_partition *p, char *ret_clause, size_t n_clause)
{
        struct device_supply supply = devices_supply(p);

        return device_host_check(&supply, ret_clause, n_clause);
}

_Static_assert(CONFIG_UUID_BYTES == DEVICE_UUID_BYTES, "one kind of UUID");
