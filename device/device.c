/* The choices between backends that are made at run time; see device.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "device/device.h"

#include <fcntl.h>
#include <string.h>

#include "device/backend.h"
#include "device/pins.h"

int device_lend(struct device *d, const struct device_extent *e, bool is_read_only)
{
        int fd;

        if (d->ops->lend)
                return d->ops->lend(d, e, is_read_only);
        fd = fcntl(e->fd, F_DUPFD_CLOEXEC, 3);
        return fd < 0 ? -errno : fd;
}

static bool has_part(const struct device_extent *e, uint64_t offset, uint64_t n_bytes)
{
        return offset <= e->n_bytes && n_bytes <= e->n_bytes - offset;
}

int device_copy(struct device *d, const struct device_copy *copies, size_t n)
{
        if (!d->ops->copy)
                return -ENOTSUP;
        if (n > DEVICE_COPIES)
                return -EINVAL;
        for (const struct device_copy *c = copies; c < copies + n; c++) {
                if (c->extent->share != DEVICE_SHARE_FD || c->host->share != DEVICE_SHARE_FD)
                        return -ENOTSUP;
                if (!has_part(c->extent, c->offset, c->n_bytes) ||
                    !has_part(c->host, c->host_offset, c->n_bytes))
                        return -EINVAL;
        }
        return d->ops->copy(d, copies, n);
}

bool device_is_pinned(const struct device_extent *host)
{
        return host->fd >= 0 && pins_find(NULL, host->fd);
}

int device_unpin(const struct device_extent *host)
{
        return host->fd >= 0 ? pins_end(host->fd) : 0;
}

int device_range_new(const struct device_view *view, uint64_t n_bytes, struct device_range **ret)
{
        if (view->has_no_memory)
                return no_memory_range_new(n_bytes, ret);
        return view->is_cuda ? cuda_range_new(view, n_bytes, ret) : host_range_new(view, n_bytes, ret);
}

int device_prepare(const struct device_view *view)
{
        return view->is_cuda ? cuda_prepare(view) : 0;
}

int device_streams_new(const struct device_view *view, struct device_streams **ret)
{
        return view->is_cuda && !view->has_no_memory ? cuda_streams_new(view, ret) : host_streams_new(ret);
}

const char *device_error(int error)
{
        if (error == -ENOBUFS)
                return "a memory limit of the daemon's control group (memory.max, memory.high) leaves no room; "
                       "raise MemoryMax= of the service, or make the device smaller";
        if (error == -ENOTRECOVERABLE)
                return "its keeper's CUDA context is broken, and memory that is there stays in use: drain and resume "
                       "the device, or restart bfcd";
        return strerror(-error);
}
