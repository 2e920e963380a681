/* Which host extents are registered with GPUs, and by whom. An extent's fd belongs to it and so names it while it exists.
 *
 * Any thread. The lock is never held during a call of a driver or of a keeper: the daemon's loop asks whether an extent
 * is in the table.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_DEVICE_PINS_H
#define BFC_DEVICE_PINS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>

struct device_pins;

/* Registers extents. Embedded in a device of a GPU. */
struct pinner {
        /* Takes the extent's pin, if it is still there, and ends it. -EBUSY: the GPU still uses the pages. */
        int (*unpin)(struct pinner *pinner, int fd);
};

struct pin {
        struct pinner *pinner;
        struct device_pins *count;
        int fd;
        void *at;         /* the pinner's */
        uint64_t n_bytes; /* registered; 0: it could not be */
        LIST_ENTRY(pin) link;
};

/* pinner NULL: of any GPU. A pin stays as long as its pinner lets nobody take it. */
struct pin *pins_find(const struct pinner *pinner, int fd);

/* Counts it, and adds it, on the heap. */
void pins_add(struct pin *p);

/* The caller owns it then, and it counts no more. fd -1: any extent's. NULL: there is none. */
struct pin *pins_take(const struct pinner *pinner, int fd);

/* All registrations of the extent end. -EBUSY: a GPU still uses the pages. */
int pins_end(int fd);

#endif
