/* Registered host extents; see cuda_pin.h.
 *
 * The table is keyed by the extent's fd, which belongs to the extent and so names it while it exists. Its lock
 * is never held during a call of the driver: the daemon's loop asks whether an extent is in the table.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "device/cuda_pin.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/queue.h>

#include "device/backend.h"
#include "device/host_pages.h"

#define N_LISTS 256

struct pin {
        struct cuda_pinner *pinner;
        struct device_pins *count;
        int fd;   /* the extent's, borrowed */
        void *at; /* NULL: it could not be registered */
        uint64_t n_bytes;
        LIST_ENTRY(pin) link;
};

static pthread_mutex_t pins_lock = PTHREAD_MUTEX_INITIALIZER;
static LIST_HEAD(pin_list, pin) pins[N_LISTS]; /* by fd; zero-initialised is empty */

/* ---- the table ----------------------------------------------------------- */

/* pinner NULL: of any GPU. */
static struct pin *pins_find(const struct cuda_pinner *pinner, int fd)
{
        struct pin *p;

        LIST_FOREACH(p, &pins[fd % N_LISTS], link)
        if ((!pinner || p->pinner == pinner) && p->fd == fd)
                return p;
        return NULL;
}

static struct pin *pins_find_any(const struct cuda_pinner *pinner)
{
        struct pin *p;

        for (int i = 0; i < N_LISTS; i++)
                LIST_FOREACH(p, &pins[i], link)
        if (p->pinner == pinner)
                return p;
        return NULL;
}

/* fd -1: any extent. */
static struct pin *pins_take(const struct cuda_pinner *pinner, int fd)
{
        struct pin *p;

        pthread_mutex_lock(&pins_lock);
        p = fd < 0 ? pins_find_any(pinner) : pins_find(pinner, fd);
        if (p)
                LIST_REMOVE(p, link);
        pthread_mutex_unlock(&pins_lock);
        return p;
}

static struct cuda_pinner *pins_pinner(int fd)
{
        struct cuda_pinner *pinner = NULL;
        const struct pin *p;

        pthread_mutex_lock(&pins_lock);
        p = pins_find(NULL, fd);
        if (p)
                pinner = p->pinner;
        pthread_mutex_unlock(&pins_lock);
        return pinner;
}

bool cuda_has_pinned(int fd)
{
        return pins_pinner(fd) != NULL;
}

/* ---- registering --------------------------------------------------------- */

static int register_extent(const struct cuda_driver *cu, const struct device_extent *host, void **ret)
{
        void *at = host_pages_map(host->fd, 0, host->n_bytes);
        int r = at ? cuda_driver_owner_errno(cu->cuMemHostRegister_v2(at, host->n_bytes, 0)) : -ENOMEM;

        if (r < 0 && at)
                munmap(at, host->n_bytes);
        if (r == 0)
                *ret = at;
        return r;
}

int cuda_pin(struct cuda_pinner *pinner, const struct device_extent *host, struct device_pins *count,
             void **ret)
{
        struct pin *p;
        int r;

        pthread_mutex_lock(&pins_lock);
        p = pins_find(pinner, host->fd);
        pthread_mutex_unlock(&pins_lock);
        if (p) { /* it stays in the table: one_call is held */
                *ret = p->at;
                return 0;
        }
        p = malloc(sizeof(*p));
        if (!p)
                return -ENOMEM;
        *p = (struct pin){ .pinner = pinner, .count = count, .fd = host->fd, .n_bytes = host->n_bytes };
        r = register_extent(pinner->context->cu, host, &p->at);
        if (r == -ENODEV || r == -ENOTRECOVERABLE) {
                free(p);
                return r;
        }
        if (r < 0)
                atomic_store(&count->error, r);
        else
                atomic_fetch_add(&count->n_bytes, p->n_bytes);
        pthread_mutex_lock(&pins_lock);
        LIST_INSERT_HEAD(&pins[p->fd % N_LISTS], p, link);
        pthread_mutex_unlock(&pins_lock);
        *ret = p->at;
        return 0;
}

/* What the driver did not unregister stays mapped, since the device may still use it. */
static int pin_end(struct pin *p, bool has_context)
{
        int r = 0;

        if (p->at) {
                r = has_context ? cuda_driver_owner_errno(p->pinner->context->cu->cuMemHostUnregister(p->at))
                                : -ENODEV;
                if (r == 0)
                        munmap(p->at, p->n_bytes);
                atomic_fetch_sub(&p->count->n_bytes, p->n_bytes);
        }
        free(p);
        return r;
}

void cuda_pins_drop(struct cuda_pinner *pinner, bool has_context)
{
        struct pin *p;

        while ((p = pins_take(pinner, -1)))
                (void)pin_end(p, has_context);
}

int cuda_unpin(int fd)
{
        struct cuda_pinner *pinner;
        int r = 0;

        while ((pinner = pins_pinner(fd))) {
                struct pin *p;

                pthread_mutex_lock(pinner->one_call);
                p = pins_take(pinner, fd); /* the device may have been closed meanwhile */
                if (p) {
                        bool has_context = pinner->context->cu && cuda_context_enter(pinner->context) == 0;

                        if (pin_end(p, has_context) < 0)
                                r = -EBUSY;
                        if (has_context)
                                cuda_context_leave(pinner->context);
                }
                pthread_mutex_unlock(pinner->one_call);
        }
        return r;
}
