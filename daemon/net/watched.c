/* Watched devices; see watched.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/net/watched.h"

#include <stdlib.h>

struct watched_device {
        struct broker *broker;
        struct poller_item item;
};

struct watched {
        struct poller *poller;
        size_t n_devices;
        struct watched_device devices[];
};

static void on_readable(struct poller_item *item, uint32_t events)
{
        struct watched_device *d =
                (struct watched_device *)(void *)((char *)item - offsetof(struct watched_device, item));

        (void)events;
        broker_note_ended(d->broker);
}

struct watched *watched_new(struct broker *b, struct poller *p)
{
        struct watched *w = calloc(1, sizeof(*w) + b->n_devices * sizeof(w->devices[0]));

        if (!w)
                return NULL;
        w->poller = p;
        for (; w->n_devices < b->n_devices; w->n_devices++) {
                struct watched_device *d = &w->devices[w->n_devices];

                d->broker = b;
                d->item = (struct poller_item){ .fd = device_watched(b->devices[w->n_devices].device),
                                                .report = on_readable };
                if (d->item.fd >= 0)
                        (void)poller_set(p, &d->item, EPOLLIN);
        }
        return w;
}

struct watched *watched_free(struct watched *w)
{
        if (!w)
                return NULL;
        while (w->n_devices > 0)
                (void)poller_set(w->poller, &w->devices[--w->n_devices].item, 0);
        free(w);
        return NULL;
}
