/* A device makes, shares, opens and destroys extents.
 *
 * An extent is one piece of memory that the device can share only as a whole.
 * Backends are const tables of functions: host.c (sealed memfds) now, CUDA
 * beside it. The daemon's end makes and destroys; the client's end reserves a
 * region's address space and maps extents into it. Calls of the daemon's end
 * take milliseconds (backing memory): they belong on a worker, never on an
 * event loop. They are thread-safe for different extents. Nothing here logs or
 * decides.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_DEVICE_DEVICE_H
#define BFC_DEVICE_DEVICE_H

#include <stddef.h>
#include <stdint.h>

/* ---- the daemon's end ---------------------------------------------------- */

struct device;

/* An extent as its device made it. Empty: fd -1. */
struct device_extent {
        int fd; /* what is shared; owned */
        uint64_t n_bytes;
};
#define DEVICE_EXTENT_EMPTY ((struct device_extent){ .fd = -1 })

struct device_ops {
        const char *name;
        struct device *(*free)(struct device *d);
        /* Every extent's size is a multiple of this many bytes. */
        uint64_t (*granularity)(const struct device *d);
        /* Makes an extent with memory behind every byte, zeroed. -ENOMEM (the
         * machine has no more), -EMFILE, -EINVAL (size), -ENODEV (lost). */
        int (*make)(struct device *d, uint64_t n_bytes, struct device_extent *ret);
        /* Gives the memory back, also where others still hold fds or mappings
         * of it, and closes. *e is empty afterwards whatever is returned; an
         * error says that memory may not have come back. */
        int (*destroy)(struct device *d, struct device_extent *e);
};

/* Every backend's struct starts with this. */
struct device {
        const struct device_ops *ops;
};

/* The host-memory device: sealed memfds filled by fallocate(). */
int device_host_new(struct device **ret);

static inline struct device *device_free(struct device *d)
{
        return d ? d->ops->free(d) : NULL;
}
static inline uint64_t device_granularity(const struct device *d)
{
        return d->ops->granularity(d);
}
static inline int device_make(struct device *d, uint64_t n_bytes, struct device_extent *ret)
{
        return d->ops->make(d, n_bytes, ret);
}
static inline int device_destroy(struct device *d, struct device_extent *e)
{
        return d->ops->destroy(d, e);
}

/* ---- the client's end ---------------------------------------------------- */

struct device_range; /* address space reserved for one region */

struct device_range_ops {
        const char *name;
        struct device_range *(*free)(struct device_range *r); /* unmaps everything */
        void *(*base)(const struct device_range *r);
        /* Maps the extent behind fd at base + offset, over whatever was there;
         * checks that the fd is what it should be (size, seals). The caller
         * keeps fd. -EINVAL: outside of the range or misaligned; -EPROTO: not
         * such an extent; -ENOMEM. */
        int (*map)(struct device_range *r, uint64_t offset, uint64_t n_bytes, int fd);
};

struct device_range {
        const struct device_range_ops *ops;
};

/* Reserves address space without memory; a forked child does not inherit it. */
int device_host_range_new(uint64_t n_bytes, struct device_range **ret);

static inline struct device_range *device_range_free(struct device_range *r)
{
        return r ? r->ops->free(r) : NULL;
}
static inline void *device_range_base(const struct device_range *r)
{
        return r->ops->base(r);
}
static inline int device_range_map(struct device_range *r, uint64_t offset, uint64_t n_bytes, int fd)
{
        return r->ops->map(r, offset, n_bytes, fd);
}

#endif
