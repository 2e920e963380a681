/* Requests; see serve.h.
 *
 * Invariants: each extent that exists is in the tree; a host extent is in the list while the device has it registered, or
 * a copy uses it.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "keeper/serve.h"

#include <errno.h>
#include <search.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>
#include <unistd.h>

#include "keeper/wire.h"

struct kept {
        uint64_t key;
        struct device_extent extent;
};

/* An extent of the host, by the name that bfcd gives it. */
struct host_file {
        int32_t name;
        struct device_extent extent;
        struct device_pins pins;
        LIST_ENTRY(host_file) link;
};

struct keeper {
        const char *id;
        struct device *device; /* NULL before the hello */
        void *extents;         /* struct kept, by key */
        uint64_t next_key;
        LIST_HEAD(, host_file) hosts;
};

/* A request with the fds that came with it. What was taken is -1. */
struct call {
        const struct keeper_request *request;
        int fds[KEEPER_FDS];
        size_t n_fds;
        struct keeper_reply *reply;
        int reply_fds[KEEPER_FDS]; /* closed when they are sent */
        size_t n_reply_fds;
};

/* ---- extents ---------------------------------------------------------------- */

static int compare_keys(const void *a, const void *b)
{
        uint64_t x = ((const struct kept *)a)->key, y = ((const struct kept *)b)->key;

        return (x > y) - (x < y);
}

static struct kept *kept_find(struct keeper *k, uint64_t key)
{
        const struct kept wanted = { .key = key };
        struct kept **place = tfind(&wanted, &k->extents, compare_keys);

        return place ? *place : NULL;
}

/* With an extent that is to be set. NULL: no memory. */
static struct kept *kept_new(struct keeper *k)
{
        struct kept *e = calloc(1, sizeof(*e));

        if (!e)
                return NULL;
        e->key = ++k->next_key;
        e->extent = DEVICE_EXTENT_EMPTY;
        if (tsearch(e, &k->extents, compare_keys))
                return e;
        free(e);
        return NULL;
}

static void kept_free(struct keeper *k, struct kept *e)
{
        tdelete(e, &k->extents, compare_keys);
        free(e);
}

/* The fd goes to bfcd: memory is here by the device's own name. */
static void kept_set(struct kept *e, struct device_extent made, struct call *c)
{
        struct keeper_extent *to = &c->reply->extents[c->reply->n_extents++];

        to->key = e->key;
        memcpy(to->handle, made.handle, sizeof(to->handle));
        if (made.fd >= 0)
                c->reply_fds[c->n_reply_fds++] = made.fd;
        made.fd = -1;
        e->extent = made;
}

static int serve_make(struct keeper *k, struct call *c)
{
        static const struct device_supply supply = { .pages = DEVICE_PAGES_AUTO };
        const struct keeper_request *q = c->request;
        struct device_extent made[DEVICE_MAKES];
        struct kept *kept[DEVICE_MAKES];
        size_t n_kept = 0;
        int r = 0;

        if (q->n == 0 || q->n > DEVICE_MAKES || q->share > DEVICE_SHARE_CUDA_IPC)
                return -EPROTO;
        for (; n_kept < q->n && (kept[n_kept] = kept_new(k)); n_kept++) {
                made[n_kept] = DEVICE_EXTENT_EMPTY;
                made[n_kept].n_bytes = q->n_bytes[n_kept];
        }
        r = n_kept < q->n ? -ENOMEM
                          : device_make_all(k->device, &supply, (enum device_share)q->share, made, n_kept);
        for (size_t i = 0; i < n_kept; i++)
                if (r == 0)
                        kept_set(kept[i], made[i], c);
                else
                        kept_free(k, kept[i]);
        return r;
}

static int serve_adopt(struct keeper *k, struct call *c)
{
        struct device_extent made;
        struct kept *e;
        int r;

        if (c->n_fds != 1)
                return -EPROTO;
        e = kept_new(k);
        if (!e)
                return -ENOMEM;
        r = device_adopt(k->device, c->fds[0], c->request->n_bytes[0], &made);
        if (r < 0) {
                kept_free(k, e);
                return r;
        }
        made.fd = -1; /* bfcd has it, and the message's is closed */
        kept_set(e, made, c);
        return 0;
}

static int serve_destroy(struct keeper *k, struct call *c)
{
        struct kept *e = kept_find(k, c->request->key);
        int r;

        if (!e)
                return -EPROTO;
        e->extent.clears = c->request->clears;
        r = device_destroy(k->device, &e->extent);
        kept_free(k, e);
        return r;
}

/* ---- copies ------------------------------------------------------------------- */

static struct host_file *host_find(struct keeper *k, int32_t name)
{
        struct host_file *h;

        LIST_FOREACH(h, &k->hosts, link)
        if (h->name == name)
                return h;
        return NULL;
}

/* *fd: taken over if the extent is new. -ENOMEM; -EPROTO: another size. */
static int host_get(struct keeper *k, const struct keeper_copy *copy, int *fd, struct host_file **ret)
{
        struct host_file *h = host_find(k, copy->host);

        if (!h) {
                h = calloc(1, sizeof(*h));
                if (!h)
                        return -ENOMEM;
                h->name = copy->host;
                h->extent = DEVICE_EXTENT_EMPTY;
                h->extent.fd = *fd;
                h->extent.n_bytes = copy->host_bytes;
                *fd = -1;
                LIST_INSERT_HEAD(&k->hosts, h, link);
        }
        *ret = h;
        return h->extent.n_bytes == copy->host_bytes ? 0 : -EPROTO;
}

static void host_free_unpinned(struct host_file *h)
{
        if (device_is_pinned(&h->extent))
                return;
        LIST_REMOVE(h, link);
        close(h->extent.fd);
        free(h);
}

static int copy_look(struct keeper *k, struct call *c, size_t i, struct host_file **ret_host,
                     struct device_copy *ret)
{
        const struct keeper_copy *from = &c->request->copies[i];
        struct kept *e = kept_find(k, from->key);
        int r = e ? host_get(k, from, &c->fds[i], ret_host) : -EPROTO;

        if (r < 0)
                return r;
        *ret = (struct device_copy){ .extent = &e->extent,
                                     .offset = from->offset,
                                     .host = &(*ret_host)->extent,
                                     .host_offset = from->host_offset,
                                     .n_bytes = from->n_bytes,
                                     .to_host = from->to_host,
                                     .pins = from->pins ? &(*ret_host)->pins : NULL };
        return 0;
}

static int32_t pin_state(const struct host_file *h)
{
        if (!device_is_pinned(&h->extent))
                return 0;
        return h->pins.n_bytes > 0 ? 1 : h->pins.error;
}

static int serve_copy(struct keeper *k, struct call *c)
{
        size_t n = c->request->n, n_hosts = 0;
        struct host_file *hosts[DEVICE_COPIES] = { NULL };
        struct device_copy copies[DEVICE_COPIES];
        int r = n > 0 && n <= DEVICE_COPIES && c->n_fds == n ? 0 : -EPROTO;

        for (size_t i = 0; r == 0 && i < n; i++) {
                r = copy_look(k, c, i, &hosts[i], &copies[i]);
                n_hosts += hosts[i] != NULL;
        }
        if (r == 0)
                r = device_copy(k->device, copies, n);
        for (size_t i = 0; i < n_hosts; i++)
                c->reply->pins[i] = pin_state(hosts[i]);
        for (size_t i = 0; i < n_hosts; i++)
                if (host_find(k, c->request->copies[i].host)) /* unless an earlier copy had the same */
                        host_free_unpinned(hosts[i]);
        return r;
}

static int serve_unpin(struct keeper *k, struct call *c)
{
        struct host_file *h = host_find(k, c->request->host);
        int r;

        if (!h)
                return 0; /* it ended with the device's context */
        r = device_unpin(&h->extent);
        host_free_unpinned(h);
        return r;
}

/* ---- the device --------------------------------------------------------------- */

static int open_device(struct keeper *k, char *ret_sentence, size_t n_sentence)
{
        if (strcmp(k->id, "host") == 0)
                return device_host_new(&k->device);
        return device_cuda_new(k->id, &k->device, ret_sentence, n_sentence);
}

static int serve_hello(struct keeper *k, struct call *c)
{
        struct keeper_reply *to = c->reply;
        int r = k->device ? 0 : open_device(k, to->sentence, sizeof(to->sentence));

        if (r < 0)
                return r;
        to->granularity = device_granularity(k->device);
        return device_facts(k->device, &to->facts);
}

static int serve_facts(struct keeper *k, struct call *c)
{
        return device_facts(k->device, &c->reply->facts);
}

static int serve_others(struct keeper *k, struct call *c)
{
        return device_foreign_bytes(k->device, &c->reply->n_bytes);
}

static int serve(struct keeper *k, struct call *c)
{
        static int (*const ops[KEEPER_N_OPS])(struct keeper * k, struct call * c) = {
                [KEEPER_HELLO] = serve_hello,     [KEEPER_MAKE] = serve_make,
                [KEEPER_DESTROY] = serve_destroy, [KEEPER_ADOPT] = serve_adopt,
                [KEEPER_COPY] = serve_copy,       [KEEPER_UNPIN] = serve_unpin,
                [KEEPER_FACTS] = serve_facts,     [KEEPER_OTHERS] = serve_others,
        };

        if (c->request->op >= KEEPER_N_OPS || (!k->device && c->request->op != KEEPER_HELLO))
                return -EPROTO;
        return ops[c->request->op](k, c);
}

static void close_all(const int *fds, size_t n)
{
        for (size_t i = 0; i < n; i++)
                if (fds[i] >= 0)
                        close(fds[i]);
}

/* The reply cannot be sent with its fds. */
static int take_back(struct keeper *k, struct call *c, int fd)
{
        close_all(c->reply_fds, c->n_reply_fds);
        c->n_reply_fds = 0;
        for (size_t i = 0; i < c->reply->n_extents; i++) {
                struct kept *e = kept_find(k, c->reply->extents[i].key);

                (void)device_destroy(k->device, &e->extent);
                kept_free(k, e);
        }
        c->reply->n_extents = 0;
        c->reply->result = -EMFILE;
        return keeper_send(fd, c->reply, sizeof(*c->reply), NULL, 0);
}

static int serve_one(struct keeper *k, int fd)
{
        struct keeper_request request;
        struct keeper_reply reply;
        struct call c = { .request = &request, .reply = &reply };
        int r = keeper_receive(fd, &request, sizeof(request), c.fds, &c.n_fds);

        if (r < 0 && r != -EMFILE)
                return r;
        memset(&reply, 0, sizeof(reply)); /* the padding, too */
        reply.version = KEEPER_VERSION;
        reply.result = r < 0 ? r : serve(k, &c);
        r = keeper_send(fd, &reply, sizeof(reply), c.reply_fds, c.n_reply_fds);
        if (r == -EMFILE)
                r = take_back(k, &c, fd);
        close_all(c.fds, c.n_fds);
        close_all(c.reply_fds, c.n_reply_fds);
        return r;
}

static void keeper_close(struct keeper *k)
{
        struct host_file *h;

        while ((h = LIST_FIRST(&k->hosts))) {
                (void)device_unpin(&h->extent);
                LIST_REMOVE(h, link);
                close(h->extent.fd);
                free(h);
        }
        while (k->extents) {
                struct kept *e = *(struct kept **)k->extents;

                (void)device_destroy(k->device, &e->extent);
                kept_free(k, e);
        }
        device_free(k->device);
}

int keeper_serve(int fd, const char *id)
{
        struct keeper k = { .id = id };
        int r = 0;

        LIST_INIT(&k.hosts);
        while (r == 0)
                r = serve_one(&k, fd);
        if (k.device)
                device_end(k.device);
        keeper_close(&k);
        return r == -ECONNRESET || r == -EPIPE ? 0 : r;
}
