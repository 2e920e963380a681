/* Registered host extents; see cuda_pin.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "device/cuda_pin.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "device/host_pages.h"

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
        struct pin *p = pins_find(&pinner->pinner, host->fd);
        int r;

        if (p) { /* it stays in the table: one_call is held */
                *ret = p->at;
                return 0;
        }
        p = malloc(sizeof(*p));
        if (!p)
                return -ENOMEM;
        *p = (struct pin){ .pinner = &pinner->pinner, .count = count, .fd = host->fd };
        r = register_extent(pinner->context->cu, host, &p->at);
        if (r == -ENODEV || r == -ENOTRECOVERABLE) {
                free(p);
                return r;
        }
        if (r < 0)
                atomic_store(&count->error, r);
        else
                p->n_bytes = host->n_bytes;
        pins_add(p);
        *ret = p->at;
        return 0;
}

/* What the driver did not unregister stays mapped, since the device may still use it. */
static int pin_end(const struct cuda_pinner *pinner, struct pin *p, bool has_context)
{
        int r = 0;

        if (p->at) {
                r = has_context ? cuda_driver_owner_errno(pinner->context->cu->cuMemHostUnregister(p->at))
                                : -ENODEV;
                if (r == 0)
                        munmap(p->at, p->n_bytes);
        }
        free(p);
        return r;
}

void cuda_pins_drop(struct cuda_pinner *pinner, bool has_context)
{
        struct pin *p;

        while ((p = pins_take(&pinner->pinner, -1)))
                (void)pin_end(pinner, p, has_context);
}

static int cuda_unpin(struct pinner *any, int fd)
{
        struct cuda_pinner *pinner = (struct cuda_pinner *)any;
        struct pin *p;
        int r = 0;

        pthread_mutex_lock(pinner->one_call);
        p = pins_take(any, fd); /* the device may have been closed meanwhile */
        if (p) {
                bool has_context = pinner->context->cu && cuda_context_enter(pinner->context) == 0;

                r = pin_end(pinner, p, has_context) < 0 ? -EBUSY : 0;
                if (has_context)
                        cuda_context_leave(pinner->context);
        }
        pthread_mutex_unlock(pinner->one_call);
        return r;
}

void cuda_pinner_init(struct cuda_pinner *pinner, const struct cuda_context *context,
                      pthread_mutex_t *one_call)
{
        *pinner = (struct cuda_pinner){ { cuda_unpin }, context, one_call };
}
