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

#include "device/device.h"
#include "device/host_pages.h"
#include "keeper/uses.h"
#include "keeper/wire.h"

struct kept {
        uint64_t key;
        struct device_extent extent; /* of an fd that is kept: only that */
        bool is_claimed;             /* made, kept or taken since the hello */
        LIST_ENTRY(kept) link;
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
        LIST_HEAD(, kept) all; /* the same */
        uint64_t last_key;
        struct uses *uses; /* NULL before the hello */
        int ledger;        /* -1: none */
        bool is_over;
        LIST_HEAD(, host_file) hosts;
};

/* A request with the fds that came with it. What was taken is -1. */
struct call {
        const struct keeper_request *request;
        int fds[KEEPER_FDS];
        size_t n_fds;
        struct keeper_reply *reply;
        int reply_fds[KEEPER_FDS]; /* they stay open */
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

/* With an extent that is to be set, under a key that is not there. NULL: no memory. */
static struct kept *kept_new(struct keeper *k, uint64_t key)
{
        struct kept *e = calloc(1, sizeof(*e));

        if (!e)
                return NULL;
        e->key = key;
        e->extent = DEVICE_EXTENT_EMPTY;
        e->is_claimed = true;
        if (tsearch(e, &k->extents, compare_keys)) {
                LIST_INSERT_HEAD(&k->all, e, link);
                k->last_key = key > k->last_key ? key : k->last_key;
                return e;
        }
        free(e);
        return NULL;
}

static void kept_free(struct keeper *k, struct kept *e)
{
        tdelete(e, &k->extents, compare_keys);
        LIST_REMOVE(e, link);
        free(e);
}

/* The fd stays open: to export the memory again for another caller would take a driver most of a millisecond. */
static void kept_tell(const struct kept *e, struct call *c)
{
        struct keeper_extent *to = &c->reply->extents[c->reply->n_extents++];

        to->key = e->key;
        to->n_bytes = e->extent.n_bytes;
        to->share = e->extent.share;
        memcpy(to->handle, e->extent.handle, sizeof(to->handle));
        if (e->extent.fd >= 0)
                c->reply_fds[c->n_reply_fds++] = e->extent.fd;
}

static void kept_set(struct kept *e, struct device_extent made, struct call *c)
{
        e->extent = made;
        kept_tell(e, c);
}

static bool are_new(struct keeper *k, uint64_t key, uint32_t n)
{
        if (key == 0 || key > UINT64_MAX - n)
                return false;
        while (n > 0)
                if (kept_find(k, key + --n))
                        return false;
        return true;
}

static int serve_make(struct keeper *k, struct call *c)
{
        static const struct device_supply supply = { 0 };
        const struct keeper_request *q = c->request;
        struct device_extent made[DEVICE_MAKES];
        struct kept *kept[DEVICE_MAKES];
        size_t n_kept = 0;
        int r = 0;

        if (q->n == 0 || q->n > DEVICE_MAKES || q->share > DEVICE_SHARE_CUDA_IPC || !are_new(k, q->key, q->n))
                return -EPROTO;
        for (; n_kept < q->n && (kept[n_kept] = kept_new(k, q->key + n_kept)); n_kept++) {
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

static bool is_made(const struct kept *e)
{
        return e->extent.n_bytes > 0;
}

/* An fd keeps the memory: it is closed before the device looks whether the memory has returned. */
static int kept_end(struct keeper *k, struct kept *e)
{
        int r = 0;

        if (e->extent.fd >= 0)
                close(e->extent.fd);
        e->extent.fd = -1;
        if (is_made(e))
                r = device_destroy(k->device, &e->extent);
        kept_free(k, e);
        return r;
}

static int serve_destroy(struct keeper *k, struct call *c)
{
        struct kept *e = kept_find(k, c->request->key);

        if (!e || !is_made(e))
                return -EPROTO;
        e->extent.clears = c->request->clears;
        return kept_end(k, e);
}

/* ---- fds that are kept ---------------------------------------------------------- */

static int serve_keep(struct keeper *k, struct call *c)
{
        uint64_t key = c->request->key;
        struct kept *e;

        if (c->n_fds != 1 || !are_new(k, key, 1))
                return -EPROTO;
        e = kept_new(k, key);
        if (!e)
                return -ENOMEM;
        e->extent.fd = c->fds[0];
        c->fds[0] = -1;
        return 0;
}

static int serve_take(struct keeper *k, struct call *c)
{
        struct kept *e = kept_find(k, c->request->key);

        if (!e)
                return -ENOENT;
        e->is_claimed = true;
        kept_tell(e, c);
        return 0;
}

static int serve_drop(struct keeper *k, struct call *c)
{
        struct kept *e = kept_find(k, c->request->key);

        if (e && !is_made(e))
                (void)kept_end(k, e);
        return 0;
}

static int serve_rest(struct keeper *k, struct call *c)
{
        struct kept *e = LIST_FIRST(&k->all), *next;

        for (; e; e = next) {
                next = LIST_NEXT(e, link);
                if (e->is_claimed)
                        continue;
                (void)kept_end(k, e);
                c->reply->n_bytes++;
        }
        return 0;
}

static int serve_ledger(struct keeper *k, struct call *c)
{
        if (c->n_fds > 1)
                return -EPROTO;
        if (c->n_fds == 1) {
                if (k->ledger >= 0)
                        close(k->ledger);
                k->ledger = c->fds[0];
                c->fds[0] = -1;
        } else if (k->ledger < 0) {
                return -ENOENT;
        } else {
                c->reply_fds[c->n_reply_fds++] = k->ledger;
        }
        return 0;
}

static int serve_collapse(struct keeper *k, struct call *c)
{
        (void)k;
        if (c->n_fds != 1)
                return -EPROTO;
        host_pages_collapse(c->fds[0], c->request->n_bytes[0]);
        return 0;
}

static int serve_end(struct keeper *k, struct call *c)
{
        (void)c;
        k->is_over = true;
        return 0;
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
        int r = e && is_made(e) ? host_get(k, from, &c->fds[i], ret_host) : -EPROTO;

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

static int start_uses(struct keeper *k, const uint8_t *bytes)
{
        char uuid[64];
        size_t n = (size_t)snprintf(uuid, sizeof(uuid), "GPU-");

        for (size_t i = 0; i < DEVICE_UUID_BYTES; i++)
                n += (size_t)snprintf(uuid + n, sizeof(uuid) - n, "%s%02x",
                                      i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", bytes[i]);
        k->uses = uses_new(uuid);
        return k->uses ? 0 : -ENOMEM;
}

static int serve_hello(struct keeper *k, struct call *c)
{
        struct keeper_reply *to = c->reply;
        int r = k->device ? 0 : open_device(k, to->sentence, sizeof(to->sentence));

        if (r < 0)
                return r;
        to->granularity = device_granularity(k->device);
        to->n_bytes = k->last_key;
        r = device_facts(k->device, &to->facts);
        if (r == 0 && !k->uses)
                r = start_uses(k, to->facts.uuid);
        return r;
}

static int serve_facts(struct keeper *k, struct call *c)
{
        return device_facts(k->device, &c->reply->facts);
}

static int serve_others(struct keeper *k, struct call *c)
{
        return device_foreign_bytes(k->device, &c->reply->n_bytes);
}

static int serve_uses(struct keeper *k, struct call *c)
{
        return k->uses ? uses_read(k->uses, c->request->key, c->reply->uses, &c->reply->n_uses) : -EPROTO;
}

static int serve(struct keeper *k, struct call *c)
{
        static int (*const ops[KEEPER_N_OPS])(struct keeper * k, struct call * c) = {
                [KEEPER_HELLO] = serve_hello,     [KEEPER_MAKE] = serve_make,
                [KEEPER_DESTROY] = serve_destroy, [KEEPER_COPY] = serve_copy,
                [KEEPER_UNPIN] = serve_unpin,     [KEEPER_FACTS] = serve_facts,
                [KEEPER_OTHERS] = serve_others,   [KEEPER_KEEP] = serve_keep,
                [KEEPER_TAKE] = serve_take,       [KEEPER_DROP] = serve_drop,
                [KEEPER_REST] = serve_rest,       [KEEPER_LEDGER] = serve_ledger,
                [KEEPER_END] = serve_end,         [KEEPER_COLLAPSE] = serve_collapse,
                [KEEPER_USES] = serve_uses,
        };
        uint32_t op = c->request->op;

        if (op >= KEEPER_N_OPS || (!k->device && op != KEEPER_HELLO && op != KEEPER_COLLAPSE))
                return -EPROTO;
        return ops[op](k, c);
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
        c->n_reply_fds = 0;
        for (size_t i = 0; i < c->reply->n_extents; i++) {
                struct kept *e = kept_find(k, c->reply->extents[i].key);

                if (c->request->op == KEEPER_MAKE)
                        (void)kept_end(k, e);
                else
                        e->is_claimed = false;
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
        return r;
}

/* Of one caller: the names of the host's extents are its own. */
static void forget_hosts(struct keeper *k)
{
        struct host_file *h;

        while ((h = LIST_FIRST(&k->hosts))) {
                (void)device_unpin(&h->extent);
                LIST_REMOVE(h, link);
                close(h->extent.fd);
                free(h);
        }
}

struct keeper *keeper_new(const char *id)
{
        struct keeper *k = malloc(sizeof(*k));

        if (!k)
                return NULL;
        *k = (struct keeper){ .id = id, .ledger = -1 };
        LIST_INIT(&k->all);
        LIST_INIT(&k->hosts);
        return k;
}

struct keeper *keeper_free(struct keeper *k)
{
        struct kept *e;

        if (!k)
                return NULL;
        if (k->device)
                device_end(k->device);
        forget_hosts(k);
        while ((e = LIST_FIRST(&k->all)))
                (void)kept_end(k, e);
        if (k->ledger >= 0)
                close(k->ledger);
        device_free(k->device);
        uses_free(k->uses);
        free(k);
        return NULL;
}

bool keeper_is_over(const struct keeper *k)
{
        return k->is_over;
}

int keeper_serve(struct keeper *k, int fd)
{
        struct kept *e;
        int r = 0;

        LIST_FOREACH(e, &k->all, link)
        e->is_claimed = false;
        if (k->uses)
                uses_forget(k->uses);
        while (r == 0 && !k->is_over)
                r = serve_one(k, fd);
        forget_hosts(k);
        return r == -ECONNRESET || r == -EPIPE ? 0 : r;
}
