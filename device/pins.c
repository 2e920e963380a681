/* The table of registered host extents; see pins.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "device/pins.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>

#include "device/device.h"

#define N_LISTS 256

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static LIST_HEAD(pin_list, pin) pins[N_LISTS]; /* by fd; zero-initialised is empty */

static struct pin *find(const struct pinner *pinner, int fd)
{
        struct pin *p;

        LIST_FOREACH(p, &pins[fd % N_LISTS], link)
        if ((!pinner || p->pinner == pinner) && p->fd == fd)
                return p;
        return NULL;
}

static struct pin *find_any(const struct pinner *pinner)
{
        struct pin *p;

        for (int i = 0; i < N_LISTS; i++)
                LIST_FOREACH(p, &pins[i], link)
        if (p->pinner == pinner)
                return p;
        return NULL;
}

struct pin *pins_find(const struct pinner *pinner, int fd)
{
        struct pin *p;

        pthread_mutex_lock(&lock);
        p = find(pinner, fd);
        pthread_mutex_unlock(&lock);
        return p;
}

void pins_add(struct pin *p)
{
        atomic_fetch_add(&p->count->n_bytes, p->n_bytes);
        pthread_mutex_lock(&lock);
        LIST_INSERT_HEAD(&pins[p->fd % N_LISTS], p, link);
        pthread_mutex_unlock(&lock);
}

struct pin *pins_take(const struct pinner *pinner, int fd)
{
        struct pin *p;

        pthread_mutex_lock(&lock);
        p = fd < 0 ? find_any(pinner) : find(pinner, fd);
        if (p)
                LIST_REMOVE(p, link);
        pthread_mutex_unlock(&lock);
        if (p)
                atomic_fetch_sub(&p->count->n_bytes, p->n_bytes);
        return p;
}

static struct pinner *pinner_of(int fd)
{
        const struct pin *p;
        struct pinner *pinner;

        pthread_mutex_lock(&lock);
        p = find(NULL, fd);
        pinner = p ? p->pinner : NULL;
        pthread_mutex_unlock(&lock);
        return pinner;
}

int pins_end(int fd)
{
        struct pinner *pinner;
        int r = 0;

        while ((pinner = pinner_of(fd)))
                if (pinner->unpin(pinner, fd) < 0)
                        r = -EBUSY;
        return r;
}
