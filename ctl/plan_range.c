/* Address ranges for the client library in a plan, instead of a device's ranges. They are only numbers: nothing is
 * mapped there, and no code reads or writes there.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "ctl/plan_daemon.h"
#include "device/device.h"

/* Above all addresses that Linux gives to a process. Ranges are at most 1 TiB each. */
#define FIRST_ADDRESS (UINT64_C(1) << 60)
#define ALIGNMENT     (UINT64_C(2) << 20)

struct plan_range {
        struct device_range range; /* first: it is one */
        uint64_t base;
};

static uint64_t next_base = FIRST_ADDRESS;

static struct device_range *range_free(struct device_range *r)
{
        free(r);
        return NULL;
}

static void *range_base(const struct device_range *r)
{
        return (void *)(uintptr_t)((const struct plan_range *)r)->base;
}

static int range_map(struct device_range *r, uint64_t offset, const struct device_extent *extent)
{
        (void)r;
        (void)offset;
        (void)extent;
        return 0;
}

static int range_unmap(struct device_range *r, uint64_t offset, uint64_t n_bytes)
{
        (void)r;
        (void)offset;
        (void)n_bytes;
        return 0;
}

static int range_finish(struct device_range *r)
{
        (void)r;
        return 0;
}

static int range_read(struct device_range *r, uint64_t offset, uint64_t n_bytes, void *ret)
{
        (void)r;
        (void)offset;
        (void)n_bytes;
        (void)ret;
        return -EIO;
}

static int range_write(struct device_range *r, uint64_t offset, const void *bytes, uint64_t n_bytes)
{
        (void)r;
        (void)offset;
        (void)bytes;
        (void)n_bytes;
        return -EIO;
}

static const struct device_range_ops range_ops = {
        .name = "plan",
        .free = range_free,
        .base = range_base,
        .map = range_map,
        .unmap = range_unmap,
        .finish = range_finish,
        .read = range_read,
        .write = range_write,
};

int device_range_new(const struct device_view *view, uint64_t n_bytes, struct device_range **ret)
{
        struct plan_range *r = calloc(1, sizeof(*r));

        (void)view;
        if (!r)
                return -ENOMEM;
        *r = (struct plan_range){ { &range_ops }, next_base };
        next_base += (n_bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
        *ret = &r->range;
        return 0;
}

/* A plan gives no work to a device. */
int device_streams_new(const struct device_view *view, struct device_streams **ret)
{
        (void)view;
        (void)ret;
        return -ENODEV;
}

int device_cuda_check_peer(int ordinal, int peer)
{
        (void)ordinal, (void)peer;
        return -ENODEV;
}

int device_cuda_ordinal_uuid(int ordinal, uint8_t ret[static DEVICE_UUID_BYTES])
{
        static const uint8_t uuid[DEVICE_UUID_BYTES] = PLAN_GPU_UUID;

        if (ordinal != 0)
                return -ENODEV;
        memcpy(ret, uuid, sizeof(uuid));
        return 0;
}
