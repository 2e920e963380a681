/* A device behind a keeper; see remote.h.
 *
 * Invariant: link.fd is -1 exactly if there is no keeper.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "keeper/remote.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "device/pins.h"
#include "keeper/start.h"
#include "keeper/wire.h"

#define MIN_MS 100 /* to see that it has ended, where others took that time */

struct remote {
        struct device device; /* first: a device is cast to it */
        struct pinner pinner;
        char *id;
        uint64_t granularity;
        pthread_mutex_t mutex;      /* guards a call, and what follows */
        struct keepers *keepers;    /* borrowed; NULL: it ends with this process */
        bool is_lost;               /* it has not answered */
        int lost_by;                /* the error: why */
        struct keeper_link link;    /* changed with link_mutex, too */
        pthread_mutex_t link_mutex; /* never held during a call */
        int watched;                /* an epoll set, with the keeper's process or else its connection */
        int end;                    /* an eventfd: device_end() */
        int64_t end_ms; /* of device_end(), which all devices have had before the first is closed; 0: not yet */
};

/* Fds of a message. */
struct fds {
        int items[KEEPER_FDS];
        size_t n;
};

static bool is_ending(const struct remote *d)
{
        return __atomic_load_n(&d->device.is_ending, __ATOMIC_RELAXED);
}

/* ---- the process -------------------------------------------------------------- */

static bool allows_mps;

void keeper_device_allow_mps(void)
{
        allows_mps = true;
}

static int watched_fd(const struct keeper_link *link)
{
        return link->process >= 0 ? link->process : link->fd;
}

static struct keeper_link take_link(struct remote *d)
{
        struct keeper_link link;

        pthread_mutex_lock(&d->link_mutex);
        link = d->link;
        d->link = KEEPER_LINK_NONE;
        if (link.fd >= 0)
                (void)epoll_ctl(d->watched, EPOLL_CTL_DEL, watched_fd(&link), NULL);
        pthread_mutex_unlock(&d->link_mutex);
        return link;
}

/* There is none before. -ECANCELED: the device ends. */
static int set_link(struct remote *d, const struct keeper_link *link)
{
        struct epoll_event end = { .events = (link->process >= 0 ? EPOLLIN : EPOLLRDHUP) | EPOLLONESHOT };
        int r = 0;

        pthread_mutex_lock(&d->link_mutex);
        d->link = *link;
        (void)epoll_ctl(d->watched, EPOLL_CTL_ADD, watched_fd(link),
                        &end); /* without it calls show the end */
        if (is_ending(d)) {
                shutdown(link->fd, SHUT_RDWR);
                r = -ECANCELED;
        }
        pthread_mutex_unlock(&d->link_mutex);
        d->is_lost = false;
        return r;
}

static void forget_pins(struct remote *d)
{
        struct pin *p;

        while ((p = pins_take(&d->pinner, -1)))
                free(p);
}

static void leave_keeper(struct remote *d)
{
        struct keeper_link link = take_link(d);

        forget_pins(d);
        keeper_leave(&link);
}

/* All devices end together. */
static void end_keeper(struct remote *d)
{
        int64_t end_ms = __atomic_load_n(&d->end_ms, __ATOMIC_RELAXED);
        int64_t left_ms = end_ms != 0 ? end_ms + KEEPER_END_MS - keeper_now_ms() : KEEPER_END_MS;
        struct keeper_link link = take_link(d);

        forget_pins(d);
        keeper_end(&link, left_ms > MIN_MS ? (int)left_ms : MIN_MS);
}

static int remote_watched(const struct device *device)
{
        return ((const struct remote *)device)->watched;
}

static bool remote_has_ended(struct device *device)
{
        struct epoll_event event;

        return epoll_wait(((struct remote *)device)->watched, &event, 1, 0) > 0;
}

static int start_keeper(struct remote *d)
{
        const char *const more[] = { allows_mps ? KEEPER_ALLOW_MPS : NULL, NULL };
        struct keeper_link link;
        int r = d->keepers ? keepers_connect(d->keepers, d->id, more, d->end, &link)
                           : keeper_start_own(d->id, more, &link);

        return r < 0 ? r : set_link(d, &link);
}

/* ---- calls -------------------------------------------------------------------- */

static void note_call(struct remote *d, bool is_under_way)
{
        struct timespec now = { 0 };

        if (is_under_way)
                clock_gettime(CLOCK_MONOTONIC, &now);
        __atomic_store_n(&d->device.call_began_ns, (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec,
                         __ATOMIC_RELAXED);
}

static void close_fds(struct fds *fds)
{
        while (fds->n > 0)
                close(fds->items[--fds->n]);
}

/* With the mutex. One that ends with this process ends now, and nothing stays registered. */
static int lose(struct remote *d)
{
        d->is_lost = true;
        if (d->link.fd >= 0)
                shutdown(d->link.fd, SHUT_RDWR);
        return -ENODEV;
}

/* Whatever the other end has sent. */
static void end_texts(struct keeper_reply *reply)
{
        reply->sentence[sizeof(reply->sentence) - 1] = '\0';
        reply->facts.name[sizeof(reply->facts.name) - 1] = '\0';
}

/* The keeper's result. -ENODEV: it has ended. fds, ret_fds: NULL: none. */
static int call_locked(struct remote *d, const struct keeper_request *request, const struct fds *fds,
                       struct keeper_reply *ret, struct fds *ret_fds)
{
        struct fds none = { .n = 0 }, *came = ret_fds ? ret_fds : &none;
        int r = d->link.fd >= 0 && !d->is_lost ? 0 : -ENODEV;

        note_call(d, true);
        if (r == 0)
                r = keeper_send(d->link.fd, request, sizeof(*request), fds ? fds->items : NULL,
                                fds ? fds->n : 0);
        if (r == 0)
                r = keeper_receive(d->link.fd, ret, sizeof(*ret), came->items, &came->n);
        if (r == 0)
                end_texts(ret);
        note_call(d, false);
        if (r == 0 && (!ret_fds || ret->result != 0))
                close_fds(came);
        if (is_ending(d))
                return r < 0 ? -ECANCELED : ret->result;
        if (r == 0 || r == -EMFILE)
                return r < 0 ? r : ret->result;
        d->lost_by = r;
        return lose(d);
}

static int call(struct remote *d, const struct keeper_request *request, const struct fds *fds,
                struct keeper_reply *ret, struct fds *ret_fds)
{
        int r;

        pthread_mutex_lock(&d->mutex);
        r = call_locked(d, request, fds, ret, ret_fds);
        pthread_mutex_unlock(&d->mutex);
        return r;
}

/* ---- extents ------------------------------------------------------------------ */

static int remote_destroy_key(struct remote *d, uint64_t key, bool clears)
{
        struct keeper_request q = keeper_request_of(KEEPER_DESTROY);
        struct keeper_reply reply;

        q.key = key;
        q.clears = clears;
        return call(d, &q, NULL, &reply, NULL);
}

/* A keeper that answers otherwise than it was asked has a fault, and its memory is not known. */
static int distrust(struct remote *d, struct fds *fds)
{
        int r;

        close_fds(fds);
        pthread_mutex_lock(&d->mutex);
        r = lose(d);
        pthread_mutex_unlock(&d->mutex);
        return r;
}

/* Extents, and an fd for each that is shared by one. */
static bool is_as_asked(const struct keeper_reply *reply, uint64_t key, uint32_t n, const uint64_t *n_bytes,
                        uint32_t share, size_t n_fds)
{
        if (reply->n_extents != n || n_fds != (share == DEVICE_SHARE_FD ? n : 0))
                return false;
        for (size_t i = 0; i < n; i++)
                if (reply->extents[i].key != key + i || reply->extents[i].n_bytes != n_bytes[i] ||
                    reply->extents[i].share != share)
                        return false;
        return true;
}

/* The fds are taken from the last one on. */
static struct device_extent extent_of(const struct keeper_extent *from, struct fds *fds)
{
        struct device_extent e = { .fd = from->share == DEVICE_SHARE_FD && fds->n > 0 ? fds->items[--fds->n]
                                                                                      : -1,
                                   .share = (enum device_share)from->share,
                                   .n_bytes = from->n_bytes,
                                   .native = from->key };

        memcpy(e.handle, from->handle, sizeof(e.handle));
        return e;
}

static int remote_make(struct device *device, const struct device_supply *supply, enum device_share share,
                       struct device_extent *extents, size_t n)
{
        struct remote *d = (struct remote *)device;
        struct keeper_request q = keeper_request_of(KEEPER_MAKE);
        struct keeper_reply reply = { .n_extents = 0 };
        struct fds fds = { .n = 0 };
        int r;

        (void)supply;
        if (n == 0 || n > DEVICE_MAKES)
                return -EINVAL;
        q.share = share;
        q.n = (uint32_t)n;
        q.key = keeper_next_keys(n);
        for (size_t i = 0; i < n; i++)
                q.n_bytes[i] = extents[i].n_bytes;
        r = call(d, &q, NULL, &reply, &fds);
        for (size_t i = 0; r == -EMFILE && reply.n_extents == n && i < n; i++)
                (void)remote_destroy_key(d, q.key + i, false);
        if (r == 0 && !is_as_asked(&reply, q.key, q.n, q.n_bytes, q.share, fds.n))
                r = distrust(d, &fds);
        for (size_t i = n; r == 0 && i-- > 0;)
                extents[i] = extent_of(&reply.extents[i], &fds);
        return r;
}

/* An fd keeps the memory: it is closed before the keeper looks whether the memory has returned. */
static int remote_destroy(struct device *device, struct device_extent *e)
{
        struct remote *d = (struct remote *)device;
        uint64_t key = e->native;
        bool clears = e->clears;

        if (e->n_bytes == 0)
                return 0;
        if (e->fd >= 0)
                close(e->fd);
        *e = DEVICE_EXTENT_EMPTY;
        return is_ending(d) ? 0 : remote_destroy_key(d, key, clears);
}

static int remote_take(struct device *device, uint64_t native, uint64_t n_bytes, struct device_extent *ret)
{
        struct remote *d = (struct remote *)device;
        struct keeper_request q = keeper_request_of(KEEPER_TAKE);
        struct keeper_reply reply;
        struct fds fds = { .n = 0 };
        int r;

        if (native == 0)
                return -ENOENT;
        keeper_pass_key(native);
        q.key = native;
        keeper_limit_wait(&d->link, KEEPER_LEFT_S); /* at the start, which must not wait for ever */
        r = call(d, &q, NULL, &reply, &fds);
        keeper_limit_wait(&d->link, 0);
        if (r < 0)
                return r;
        if (!is_as_asked(&reply, native, 1, &n_bytes, reply.extents[0].share, fds.n)) {
                close_fds(&fds);
                return -EPROTO;
        }
        *ret = extent_of(&reply.extents[0], &fds);
        return 0;
}

static void remote_drop_rest(struct device *device)
{
        struct keeper_request q = keeper_request_of(KEEPER_REST);
        struct keeper_reply reply;

        (void)call((struct remote *)device, &q, NULL, &reply, NULL);
}

/* ---- copies ------------------------------------------------------------------- */

static int unpin_locked(struct remote *d, int fd)
{
        struct keeper_request q = keeper_request_of(KEEPER_UNPIN);
        struct keeper_reply reply;

        q.host = fd;
        return call_locked(d, &q, NULL, &reply, NULL);
}

/* Notes what the keeper has registered. Without memory for that it is registered no more: another extent with this fd
 * would be taken for this one. */
static void note_pin(struct remote *d, const struct device_copy *copy, int32_t state)
{
        struct pin *p;

        if (state == 0 || pins_find(&d->pinner, copy->host->fd))
                return;
        p = malloc(sizeof(*p));
        if (!p) {
                (void)unpin_locked(d, copy->host->fd);
                return;
        }
        *p = (struct pin){ .pinner = &d->pinner, .count = copy->pins, .fd = copy->host->fd };
        if (state > 0)
                p->n_bytes = copy->host->n_bytes;
        else
                atomic_store(&copy->pins->error, state);
        pins_add(p);
}

static int remote_copy(struct device *device, const struct device_copy *copies, size_t n)
{
        struct remote *d = (struct remote *)device;
        struct keeper_request q = keeper_request_of(KEEPER_COPY);
        struct keeper_reply reply;
        struct fds fds = { .n = n };
        int r;

        q.n = (uint32_t)n;
        for (size_t i = 0; i < n; i++) {
                const struct device_copy *c = &copies[i];

                fds.items[i] = c->host->fd;
                q.copies[i] = (struct keeper_copy){ .key = c->extent->native,
                                                    .offset = c->offset,
                                                    .host_offset = c->host_offset,
                                                    .host_bytes = c->host->n_bytes,
                                                    .n_bytes = c->n_bytes,
                                                    .host = c->host->fd,
                                                    .to_host = c->to_host,
                                                    .pins = c->pins != NULL };
        }
        memset(reply.pins, 0, sizeof(reply.pins));
        pthread_mutex_lock(&d->mutex);
        r = call_locked(d, &q, &fds, &reply, NULL);
        for (size_t i = 0; i < n; i++)
                if (copies[i].pins)
                        note_pin(d, &copies[i], reply.pins[i]);
        pthread_mutex_unlock(&d->mutex);
        return r;
}

/* If the keeper has ended nothing is registered. */
static int remote_unpin(struct pinner *pinner, int fd)
{
        struct remote *d = (struct remote *)((char *)pinner - offsetof(struct remote, pinner));
        struct pin *p;
        int r = 0;

        pthread_mutex_lock(&d->mutex);
        p = pins_take(pinner, fd);
        if (p)
                r = unpin_locked(d, fd);
        pthread_mutex_unlock(&d->mutex);
        free(p);
        return r == -ENODEV || r == -ECANCELED ? 0 : r;
}

/* ---- the rest ----------------------------------------------------------------- */

static uint64_t remote_granularity(const struct device *device)
{
        return ((const struct remote *)device)->granularity;
}

static int remote_facts(struct device *device, struct device_facts *ret)
{
        struct keeper_request q = keeper_request_of(KEEPER_FACTS);
        struct keeper_reply reply;
        int r = call((struct remote *)device, &q, NULL, &reply, NULL);

        if (r == 0)
                *ret = reply.facts;
        return r;
}

static int remote_others(struct device *device, uint64_t *ret_bytes)
{
        struct keeper_request q = keeper_request_of(KEEPER_OTHERS);
        struct keeper_reply reply;
        int r = call((struct remote *)device, &q, NULL, &reply, NULL);

        if (r == 0)
                *ret_bytes = reply.n_bytes;
        return r;
}

/* In order, so that the next question makes progress. */
static bool are_uses(const struct keeper_reply *reply, uint64_t pid)
{
        if (reply->n_uses > DEVICE_USES)
                return false;
        for (size_t i = 0; i < reply->n_uses; pid = reply->uses[i++].pid)
                if (reply->uses[i].pid <= pid)
                        return false;
        return true;
}

static int remote_uses(struct device *device, uint64_t pid, struct device_use ret[static DEVICE_USES],
                       size_t *ret_n)
{
        struct remote *d = (struct remote *)device;
        struct keeper_request q = keeper_request_of(KEEPER_USES);
        struct keeper_reply reply;
        struct fds none = { .n = 0 };
        int r;

        q.key = pid;
        r = call(d, &q, NULL, &reply, NULL);
        if (r == 0 && !are_uses(&reply, pid))
                r = distrust(d, &none);
        if (r < 0)
                return r;
        memcpy(ret, reply.uses, reply.n_uses * sizeof(*ret));
        *ret_n = reply.n_uses;
        return 0;
}

static void remote_close(struct device *device)
{
        struct remote *d = (struct remote *)device;

        pthread_mutex_lock(&d->mutex);
        end_keeper(d);
        pthread_mutex_unlock(&d->mutex);
}

/* A call under way ends. */
static void remote_end(struct device *device)
{
        struct remote *d = (struct remote *)device;

        __atomic_store_n(&d->end_ms, keeper_now_ms(), __ATOMIC_RELAXED);
        pthread_mutex_lock(&d->link_mutex);
        if (d->link.fd >= 0)
                shutdown(d->link.fd, SHUT_RDWR);
        pthread_mutex_unlock(&d->link_mutex);
        (void)eventfd_write(d->end, 1);
}

/* To end it would bring one of the same version. */
static bool is_other_external(const struct remote *d, int r)
{
        return r == -ENODEV && d->is_lost && d->lost_by == -EPROTO && d->keepers &&
               keepers_are_external(d->keepers);
}

static int hello(struct remote *d, struct keeper_reply *reply, char *ret_sentence, size_t n_sentence)
{
        struct keeper_request q = keeper_request_of(KEEPER_HELLO);
        int r = call_locked(d, &q, NULL, reply, NULL);

        if (r == 0)
                keeper_pass_key(reply->n_bytes);
        else if (is_other_external(d, r))
                snprintf(
                        ret_sentence, n_sentence,
                        "%s: its bfcd-keeper, which another program starts, is of another version: end all jobs, "
                        "then the keepers, and start those of this version",
                        d->id);
        else if (r == -ENODEV && d->is_lost)
                snprintf(ret_sentence, n_sentence,
                         "%s: its bfcd-keeper ended before it had opened the device; if bfcd was upgraded "
                         "meanwhile, restart it",
                         d->id);
        else if (r < 0 && reply->sentence[0])
                snprintf(ret_sentence, n_sentence, "%s", reply->sentence);
        else if (r < 0)
                snprintf(ret_sentence, n_sentence, "%s: the device does not respond: %s", d->id,
                         strerror(-r));
        return r;
}

/* One that an earlier bfcd has left answers soon, or is ended. */
static int meet(struct remote *d, struct keeper_reply *reply, char *ret_sentence, size_t n_sentence)
{
        int r = start_keeper(d);

        if (r < 0) {
                if (r == -ETIMEDOUT)
                        snprintf(ret_sentence, n_sentence,
                                 "%s: no bfcd-keeper listens, which another program starts", d->id);
                else
                        snprintf(ret_sentence, n_sentence, "%s: bfcd-keeper, which %s: %s", d->id,
                                 d->keepers && keepers_are_external(d->keepers)
                                         ? "another program starts as bfcd's user, cannot be reached"
                                         : "must be beside bfcd, cannot be started",
                                 strerror(-r));
                return r;
        }
        if (!d->link.is_new)
                keeper_limit_wait(&d->link, KEEPER_LEFT_S);
        r = hello(d, reply, ret_sentence, n_sentence);
        keeper_limit_wait(&d->link, 0);
        return r;
}

static int open_locked(struct remote *d, char *ret_sentence, size_t n_sentence)
{
        struct keeper_reply reply = { .sentence = "" };
        int r = meet(d, &reply, ret_sentence, n_sentence);

        if (r == -ENODEV && d->is_lost && !d->link.is_new && !is_other_external(d, r)) {
                end_keeper(d);
                r = meet(d, &reply, ret_sentence, n_sentence);
        }
        if (r < 0 && d->link.fd < 0)
                return r;
        if (r == 0 && d->granularity != 0 && d->granularity != reply.granularity) {
                snprintf(ret_sentence, n_sentence, "%s: its allocation granularity has changed", d->id);
                r = -ENOTSUP;
        }
        if (r == 0)
                d->granularity = reply.granularity;
        else if ((d->link.is_new || r == -ENODEV) && !is_other_external(d, r))
                end_keeper(d);
        else
                leave_keeper(d); /* with what jobs have */
        return r;
}

static int remote_open(struct device *device, char *ret_sentence, size_t n_sentence)
{
        struct remote *d = (struct remote *)device;
        int r;

        pthread_mutex_lock(&d->mutex);
        end_keeper(d);
        r = open_locked(d, ret_sentence, n_sentence);
        pthread_mutex_unlock(&d->mutex);
        return r;
}

static struct device *remote_free(struct device *device)
{
        struct remote *d = (struct remote *)device;

        if (d->keepers)
                leave_keeper(d);
        else
                end_keeper(d);
        pthread_mutex_destroy(&d->link_mutex);
        pthread_mutex_destroy(&d->mutex);
        if (d->watched >= 0)
                close(d->watched);
        if (d->end >= 0)
                close(d->end);
        free(d->id);
        free(d);
        return NULL;
}

static const struct device_ops remote_ops = {
        .name = "keeper",
        .free = remote_free,
        .granularity = remote_granularity,
        .make = remote_make,
        .destroy = remote_destroy,
        .take = remote_take,
        .drop_rest = remote_drop_rest,
        .copy = remote_copy,
        .facts = remote_facts,
        .others = remote_others,
        .uses = remote_uses,
        .close = remote_close,
        .open = remote_open,
        .end = remote_end,
        .watched = remote_watched,
        .has_ended = remote_has_ended,
};

int keeper_device_new(struct keepers *keepers, const char *id, struct device **ret, char *ret_sentence,
                      size_t n_sentence)
{
        struct remote *d = malloc(sizeof(*d));
        char *copy = strdup(id);
        int r;

        if (!d || !copy) {
                snprintf(ret_sentence, n_sentence, "%s: out of memory", id);
                free(copy);
                free(d);
                return -ENOMEM;
        }
        *d = (struct remote){ .device = { .ops = &remote_ops, .is_cuda = true },
                              .pinner = { remote_unpin },
                              .keepers = keepers,
                              .id = copy,
                              .watched = epoll_create1(EPOLL_CLOEXEC),
                              .end = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK),
                              .link = KEEPER_LINK_NONE };
        pthread_mutex_init(&d->mutex, NULL);
        pthread_mutex_init(&d->link_mutex, NULL);
        r = d->watched < 0 || d->end < 0 ? -errno : 0;
        if (r < 0)
                snprintf(ret_sentence, n_sentence, "%s: %s", id, strerror(-r));
        else
                r = open_locked(d, ret_sentence, n_sentence);
        if (r < 0) {
                remote_free(&d->device);
                return r;
        }
        *ret = &d->device;
        return 0;
}
