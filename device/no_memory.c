/* Devices without memory; see device.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Extents are numbers. Where they are shared by fds, each is an fd of one empty file that stays empty, because
 * each end counts fds. */
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "device/backend.h"
#include "proto/memfd.h"

#define GRANULARITY (UINT64_C(2) << 20)
#define GPU_BYTES   (UINT64_C(1) << 46) /* no limit is above it */

struct no_memory_device {
        struct device device; /* first: it is one */
        uint8_t uuid[DEVICE_UUID_BYTES];
        _Atomic uint64_t n_made;
        int fd;
};

/* ---- the daemon's side --------------------------------------------------- */

static struct device *no_memory_free(struct device *d)
{
        close(((struct no_memory_device *)d)->fd);
        free(d);
        return NULL;
}

static uint64_t no_memory_granularity(const struct device *d)
{
        (void)d;
        return GRANULARITY;
}

static int no_memory_make(struct device *device, const struct device_supply *supply, enum device_share share,
                          struct device_extent *extents, size_t n)
{
        struct no_memory_device *d = (struct no_memory_device *)device;

        (void)supply;
        for (struct device_extent *e = extents; e < extents + n; e++) {
                uint64_t number = atomic_fetch_add(&d->n_made, 1) + 1;

                *e = (struct device_extent){
                        .fd = -1, .share = share, .n_bytes = e->n_bytes, .native = number
                };
                if (share == DEVICE_SHARE_CUDA_IPC)
                        memcpy(e->handle, &number, sizeof(number));
        }
        return 0;
}

static int no_memory_destroy(struct device *d, struct device_extent *e)
{
        (void)d;
        *e = DEVICE_EXTENT_EMPTY;
        return 0;
}

static int no_memory_lend(struct device *d, const struct device_extent *e, bool is_read_only)
{
        int fd = fcntl(((struct no_memory_device *)d)->fd, F_DUPFD_CLOEXEC, 3);

        (void)e;
        (void)is_read_only;
        return fd < 0 ? -errno : fd;
}

static int no_memory_facts(struct device *d, struct device_facts *ret)
{
        *ret = (struct device_facts){ .name = "without memory",
                                      .bytes_total = d->is_cuda ? GPU_BYTES : 0,
                                      .bytes_free = GPU_BYTES,
                                      .shares = { true, d->is_cuda } };
        memcpy(ret->uuid, ((const struct no_memory_device *)d)->uuid, sizeof(ret->uuid));
        return 0;
}

static const struct device_ops no_memory_ops = {
        .name = "no-memory",
        .free = no_memory_free,
        .granularity = no_memory_granularity,
        .make = no_memory_make,
        .destroy = no_memory_destroy,
        .lend = no_memory_lend,
        .facts = no_memory_facts,
};

/* Different ids are different GPUs. */
static uint64_t hash_text(const char *text)
{
        uint64_t hash = 14695981039346656037u;

        for (; *text; text++)
                hash = (hash ^ (unsigned char)*text) * 1099511628211u;
        return hash;
}

int device_no_memory_new(const char *id, struct device **ret)
{
        bool is_cuda = strcmp(id, "host") != 0;
        struct no_memory_device *d = calloc(1, sizeof(*d));
        uint64_t hash = hash_text(id);
        int r;

        if (!d)
                return -ENOMEM;
        d->device = (struct device){
                .ops = &no_memory_ops, .is_cuda = is_cuda, .charges_process = !is_cuda, .has_no_memory = true
        };
        memcpy(d->uuid, &hash, sizeof(hash));
        d->fd = memfd_make_bare("bfcd-no-memory");
        r = d->fd;
        if (r >= 0 &&
            fcntl(d->fd, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE) < 0) {
                r = -errno;
                close(d->fd);
        }
        if (r < 0) {
                free(d);
                return r;
        }
        *ret = &d->device;
        return 0;
}

/* ---- the client's side --------------------------------------------------- */

struct no_memory_range {
        struct device_range range; /* first: it is one */
        void *base;                /* addresses that fault */
        uint64_t n_bytes;
};

static struct device_range *no_memory_range_free(struct device_range *range)
{
        struct no_memory_range *r = (struct no_memory_range *)range;

        munmap(r->base, r->n_bytes);
        free(r);
        return NULL;
}

static void *no_memory_range_base(const struct device_range *r)
{
        return ((const struct no_memory_range *)r)->base;
}

static int no_memory_range_map(struct device_range *r, uint64_t offset, const struct device_extent *extent)
{
        (void)r;
        (void)offset;
        (void)extent;
        return 0;
}

static int no_memory_range_unmap(struct device_range *r, uint64_t offset, uint64_t n_bytes)
{
        (void)r;
        (void)offset;
        (void)n_bytes;
        return 0;
}

static int no_memory_range_finish(struct device_range *r)
{
        (void)r;
        return 0;
}

static int no_memory_range_read(struct device_range *r, uint64_t offset, uint64_t n_bytes, void *ret)
{
        (void)r;
        (void)offset;
        (void)n_bytes;
        (void)ret;
        return -EIO;
}

static int no_memory_range_write(struct device_range *r, uint64_t offset, const void *bytes, uint64_t n_bytes)
{
        (void)r;
        (void)offset;
        (void)bytes;
        (void)n_bytes;
        return -EIO;
}

static const struct device_range_ops no_memory_range_ops = {
        .name = "no-memory",
        .free = no_memory_range_free,
        .base = no_memory_range_base,
        .map = no_memory_range_map,
        .unmap = no_memory_range_unmap,
        .finish = no_memory_range_finish,
        .read = no_memory_range_read,
        .write = no_memory_range_write,
};

int no_memory_range_new(uint64_t n_bytes, struct device_range **ret)
{
        struct no_memory_range *r;

        if (n_bytes == 0 || n_bytes % GRANULARITY != 0 || n_bytes > SIZE_MAX / 2)
                return -EINVAL;
        r = malloc(sizeof(*r));
        if (!r)
                return -ENOMEM;
        *r = (struct no_memory_range){ .range.ops = &no_memory_range_ops, .n_bytes = n_bytes };
        r->base = mmap(NULL, n_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (r->base == MAP_FAILED) {
                free(r);
                return -ENOMEM;
        }
        *ret = &r->range;
        return 0;
}
