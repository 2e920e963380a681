/* The host-memory device: an extent is a sealed memfd; see device.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Seals forbid everything that a process could do to a shared memfd besides reading and writing: it
 * cannot shrink under another mapping (SIGBUS), grow, or be sealed further. All pages are allocated from
 * the start, so writing to a block never runs out of memory. The kernel frees the pages with the last
 * reference. The next tenant gets another memfd, with pages that the kernel has zeroed.
 *
 * The client's side reserves a region's addresses with PROT_NONE and maps extents over them with
 * MAP_FIXED. Invariant: all mappings between base and base + n_bytes belong to this range. A forked child
 * inherits all of it, because a hole there could be used by the child's next mapping. */
#include "device/device.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "device/backend.h"
#include "device/host_copy.h"
#include "device/host_free.h"
#include "device/host_pages.h"
#include "device/host_pin.h"
#include "device/pins.h"
#include "proto/memfd.h"

#define HOST_GRANULARITY (UINT64_C(2) << 20)
#define HOST_SEALS       (F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL)

/* ---- the daemon's side --------------------------------------------------- */

struct host_device {
        struct device device;
};

static struct device *host_free(struct device *d)
{
        free(d);
        return NULL;
}

static uint64_t host_granularity(const struct device *d)
{
        (void)d;
        return HOST_GRANULARITY;
}

static int host_fill_and_seal(int fd, uint64_t n_bytes, const struct device_supply *supply,
                              uint64_t *ret_huge_bytes)
{
        int r;

        if (ftruncate(fd, (off_t)n_bytes) < 0)
                return -errno;
        r = host_pages_fill(fd, n_bytes, supply, ret_huge_bytes);
        if (r < 0)
                return r;
        return fcntl(fd, F_ADD_SEALS, HOST_SEALS) < 0 ? -errno : 0;
}

static int host_make_extent(const struct device_supply *supply, uint64_t n_bytes, struct device_extent *ret)
{
        uint64_t huge_bytes = 0;
        int fd = memfd_make(HOST_EXTENT_NAME), r;

        if (fd < 0)
                return fd;
        r = host_fill_and_seal(fd, n_bytes, supply, &huge_bytes);
        if (r < 0) {
                close(fd); /* the only reference: this frees the pages */
                return r == -EFBIG ? -ENOMEM : r;
        }
        *ret = (struct device_extent){ .fd = fd, .n_bytes = n_bytes, .huge_bytes = huge_bytes };
        return 0;
}

static int host_make_one(const struct device_supply *supply, uint64_t n_bytes, struct device_extent *ret)
{
        int r;

        if (n_bytes == 0 || n_bytes % HOST_GRANULARITY != 0 || n_bytes > INT64_MAX)
                return -EINVAL;
        r = host_free_begin(supply->is_bound ? &supply->node : NULL, n_bytes);
        if (r < 0)
                return r;
        r = host_make_extent(supply, n_bytes, ret);
        host_free_end(n_bytes);
        return r;
}

static int host_make(struct device *d, const struct device_supply *supply, enum device_share share,
                     struct device_extent *extents, size_t n)
{
        size_t n_made = 0;
        int r = share == DEVICE_SHARE_FD ? n <= DEVICE_MAKES ? 0 : -EINVAL : -ENOTSUP;

        (void)d;
        while (r == 0 && n_made < n) {
                r = host_make_one(supply, extents[n_made].n_bytes, &extents[n_made]);
                n_made += r == 0;
        }
        while (r < 0 && n_made > 0)
                close(extents[--n_made].fd); /* the only reference: this frees the pages */
        return r;
}

/* Under a write lease: no client can delay the punch, by the inode's lock or by pages. An fd with O_PATH is not seen by
 * the lease and keeps the file, so closing it would not free the pages. */
static int host_empty(const struct device_extent *e)
{
        int own = memfd_seize(e->fd), r;

        if (own < 0)
                return own;
        r = fallocate(own, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, (off_t)e->n_bytes) < 0 ? -errno : 0;
        close(own);
        return r;
}

static int host_destroy(struct device *d, struct device_extent *e)
{
        int r;

        (void)d;
        if (e->fd < 0)
                return 0;
        r = pins_end(e->fd);
        if (r == 0 && e->was_lent && host_empty(e) < 0)
                return -EBUSY;
        close(e->fd);
        *e = DEVICE_EXTENT_EMPTY;
        return r;
}

/* A client may hold the lock of the inode, for which fstat() waits on some kernels. Seals and the end of
 * the file are read without it. */
static int host_adopt(struct device *d, int fd, uint64_t n_bytes, struct device_extent *ret)
{
        int seals = fcntl(fd, F_GET_SEALS);
        off_t end;

        (void)d;
        if (seals < 0 || (seals & HOST_SEALS) != HOST_SEALS)
                return -EPROTO;
        end = lseek(fd, 0, SEEK_END);
        if (n_bytes == 0 || n_bytes % HOST_GRANULARITY != 0 || end < 0 || (uint64_t)end != n_bytes)
                return -EPROTO;
        *ret = (struct device_extent){ .fd = fd, .n_bytes = n_bytes };
        return 0;
}

/* memfd_lend() gives a duplicate where it cannot open the file again, and that has write access. */
static int host_lend(struct device *d, const struct device_extent *e, bool is_read_only)
{
        int fd = memfd_lend(e->fd, is_read_only ? O_RDONLY : O_RDWR);

        (void)d;
        if (fd < 0 || !is_read_only || (fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDONLY)
                return fd;
        close(fd);
        return -EACCES;
}

static bool host_is_alone(struct device *d, const struct device_extent *e)
{
        (void)d;
        return e->fd >= 0 && memfd_is_alone(e->fd);
}

/* The second begins where the first ends, in both extents. */
static bool are_neighbours(const struct device_copy *a, const struct device_copy *b)
{
        return a->extent->fd == b->extent->fd && a->host->fd == b->host->fd && a->to_host == b->to_host &&
               a->offset + a->n_bytes == b->offset && a->host_offset + a->n_bytes == b->host_offset;
}

static int host_copy_extents(struct device *d, const struct device_copy *copies, size_t n)
{
        int r = 0;

        for (size_t i = 0; r == 0 && i < n;) {
                const struct device_copy *c = &copies[i];
                uint64_t n_bytes = 0;

                do
                        n_bytes += copies[i++].n_bytes;
                while (i < n && are_neighbours(&copies[i - 1], &copies[i]));
                r = c->to_host ? host_copy(c->extent->fd, c->offset, c->host->fd, c->host_offset, n_bytes,
                                           &d->is_ending)
                               : host_copy(c->host->fd, c->host_offset, c->extent->fd, c->offset, n_bytes,
                                           &d->is_ending);
        }
        return r;
}

static int host_facts(struct device *d, struct device_facts *ret)
{
        (void)d;
        *ret = (struct device_facts){ .name = "host memory", .bytes_free = host_free_bytes() };
        return 0;
}

static const struct device_ops host_ops = {
        .name = "host",
        .free = host_free,
        .granularity = host_granularity,
        .make = host_make,
        .destroy = host_destroy,
        .adopt = host_adopt,
        .lend = host_lend,
        .is_alone = host_is_alone,
        .copy = host_copy_extents,
        .facts = host_facts,
};

/* Of an empty memfd, which takes no pages. */
static bool has_leases(void)
{
        int fd = memfd_make(HOST_EXTENT_NAME);
        bool has = fd >= 0 && memfd_is_alone(fd);

        if (fd >= 0)
                close(fd);
        return has;
}

int device_host_new(struct device **ret)
{
        struct host_device *h;

        if (!has_leases())
                return -ENOTSUP;
        h = malloc(sizeof(*h));
        if (!h)
                return -ENOMEM;
        h->device = (struct device){ .ops = &host_ops, .charges_process = true };
        *ret = &h->device;
        return 0;
}

int device_host_check(const struct device_supply *supply, char *ret_clause, size_t n_clause)
{
        return host_pages_check(supply, ret_clause, n_clause);
}

/* ---- the client's side --------------------------------------------------- */

struct host_range {
        struct device_range range; /* first: a range is cast to it */
        void *base;
        uint64_t n_bytes;
        bool is_pinned;
        bool stays; /* mappings stay until the process ends */
        struct host_pins pins;
};

/* Registered memory that the driver does not give back stays mapped: a device may use it. */
static struct device_range *host_range_free(struct device_range *r)
{
        struct host_range *h = (struct host_range *)r;

        if (!h->stays && host_pins_remove(&h->pins, h->base, h->n_bytes) == 0)
                munmap(h->base, h->n_bytes);
        free(h);
        return NULL;
}

static void host_range_leave(struct device_range *r)
{
        struct host_range *h = (struct host_range *)r;

        h->stays = host_pins_bytes(&h->pins) > 0;
}

static void *host_range_base(const struct device_range *r)
{
        return ((const struct host_range *)r)->base;
}

/* Checks that the fd may be mapped: it has the announced size, and seals against shrinking, which would
 * kill this process at its next access. */
static int host_check_extent(int fd, uint64_t n_bytes)
{
        struct stat st;
        int seals;

        if (fstat(fd, &st) < 0)
                return -EPROTO;
        seals = fcntl(fd, F_GET_SEALS);
        if (seals < 0 || (seals & HOST_SEALS) != HOST_SEALS)
                return -EPROTO;
        return st.st_size >= 0 && (uint64_t)st.st_size == n_bytes ? 0 : -EPROTO;
}

/* Addresses without memory. */
static int host_reserve(void *hint, uint64_t n_bytes, int flags, void **ret)
{
        void *at = mmap(hint, n_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);

        if (at == MAP_FAILED)
                return -ENOMEM;
        *ret = at;
        return 0;
}

static bool host_range_has(const struct host_range *h, uint64_t offset, uint64_t n_bytes)
{
        return n_bytes > 0 && offset <= h->n_bytes && n_bytes <= h->n_bytes - offset &&
               offset % HOST_GRANULARITY == 0 && n_bytes % HOST_GRANULARITY == 0;
}

static int host_range_map(struct device_range *r, uint64_t offset, const struct device_extent *extent)
{
        struct host_range *h = (struct host_range *)r;
        uint64_t n_bytes = extent->n_bytes;
        int fd = extent->fd, error;
        void *at;

        if (!host_range_has(h, offset, n_bytes))
                return -EINVAL;
        error = host_check_extent(fd, n_bytes);
        if (error < 0)
                return error;
        at = (char *)h->base + offset;
        error = host_pins_remove(&h->pins, at, n_bytes);
        if (error < 0)
                return error;
        if (mmap(at, n_bytes, extent->is_read_only ? PROT_READ : PROT_READ | PROT_WRITE,
                 MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED)
                error = errno == EACCES || errno == EPERM || errno == ENODEV ? -EPROTO : -ENOMEM;
        /* A failed map may have left a hole, in which another mapping could be placed. */
        if (error < 0)
                host_reserve(at, n_bytes, MAP_FIXED, &at);
        else if (h->is_pinned)
                host_pins_add(&h->pins, at, n_bytes, extent->is_read_only);
        return error;
}

static int host_range_unmap(struct device_range *r, uint64_t offset, uint64_t n_bytes)
{
        struct host_range *h = (struct host_range *)r;
        void *at = (char *)h->base + offset;
        int error = host_range_has(h, offset, n_bytes) ? host_pins_remove(&h->pins, at, n_bytes) : -EINVAL;

        return error < 0 ? error : host_reserve(at, n_bytes, MAP_FIXED, &at);
}

/* Only the processor uses host memory, except where it is registered, and in tests. */
static int host_range_finish(struct device_range *r)
{
        int error = host_pins_finish(&((struct host_range *)r)->pins);

        return error < 0 ? error : host_streams_finish();
}

/* Another thread may map and unmap. */
static uint64_t host_range_pinned(const struct device_range *r)
{
        return host_pins_bytes(&((const struct host_range *)r)->pins);
}

static void host_range_pin(struct device_range *r)
{
        host_pins_try(&((struct host_range *)r)->pins);
}

static bool host_range_holds(const struct host_range *h, uint64_t offset, uint64_t n_bytes)
{
        return offset <= h->n_bytes && n_bytes <= h->n_bytes - offset;
}

static int host_range_read(struct device_range *r, uint64_t offset, uint64_t n_bytes, void *ret)
{
        const struct host_range *h = (struct host_range *)r;

        if (!host_range_holds(h, offset, n_bytes))
                return -EINVAL;
        memcpy(ret, (const char *)h->base + offset, n_bytes);
        return 0;
}

static int host_range_write(struct device_range *r, uint64_t offset, const void *bytes, uint64_t n_bytes)
{
        const struct host_range *h = (struct host_range *)r;

        if (!host_range_holds(h, offset, n_bytes))
                return -EINVAL;
        memcpy((char *)h->base + offset, bytes, n_bytes);
        return 0;
}

static const struct device_range_ops host_range_ops = {
        .name = "host",
        .free = host_range_free,
        .leave = host_range_leave,
        .base = host_range_base,
        .map = host_range_map,
        .unmap = host_range_unmap,
        .finish = host_range_finish,
        .read = host_range_read,
        .write = host_range_write,
        .pin = host_range_pin,
        .pinned = host_range_pinned,
};

int host_range_new(const struct device_view *view, uint64_t n_bytes, struct device_range **ret)
{
        struct host_range *h;
        int r;

        if (n_bytes == 0 || n_bytes % HOST_GRANULARITY != 0 || n_bytes > SIZE_MAX / 2)
                return -EINVAL;
        h = malloc(sizeof(*h));
        if (!h)
                return -ENOMEM;
        *h = (struct host_range){ .range.ops = &host_range_ops,
                                  .n_bytes = n_bytes,
                                  .is_pinned = view->is_pinned };
        /* Pages of 2 MiB are mapped as such only at multiples of that. */
        h->base = host_pages_map(-1, 0, n_bytes);
        r = h->base ? 0 : host_reserve(NULL, n_bytes, 0, &h->base);
        if (r < 0) {
                free(h);
                return r;
        }
        *ret = &h->range;
        return 0;
}
