/* Copies between device memory and memfds: directly where the memfd is mapped and registered with CUDA (cuda_pin.h),
 * else through two buffers of pinned memory. While one is filled or emptied by the device, the other one is by this
 * process, by two threads.
 *
 * Copies are begun one after the other, in one direction, and end together with cuda_copy_finish(): the device
 * works meanwhile.
 *
 * One thread at a time, with the context current in which it was opened.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_DEVICE_CUDA_COPY_H
#define BFC_DEVICE_CUDA_COPY_H

#include <stdbool.h>

#include "device/cuda_driver.h"
#include "device/cuda_pin.h"
#include "device/device.h"

struct host_helper;

/* What the device writes into a buffer, for a memfd. n_bytes 0: nothing. */
struct cuda_copy_rest {
        int to;
        uint64_t to_offset, n_bytes;
};

struct cuda_copier {
        const struct cuda_driver *cu; /* NULL: it is closed */
        int fd;                       /* of the buffers: a memfd of this process alone */
        unsigned char *buffers;
        struct host_helper *helper; /* or NULL */
        CUstream streams[2];        /* one for each buffer */
        struct cuda_copy_rest rests[2];
        unsigned next; /* the buffer that is used next: the one that was begun first */
};

/* Makes the buffers and registers them with CUDA; does nothing where it is open. -ENOMEM, -ENODEV, -EIO, -errno. */
int cuda_copier_open(struct cuda_copier *c, const struct cuda_driver *cu);

/* has_context: else the context is lost, and the driver is not called. A closed one may be closed. */
void cuda_copier_close(struct cuda_copier *c, bool has_context);

/* Begins a copy between the host's extent and that which is mapped there. -EIO: the file ends before; -ENODEV;
 * -ENOMEM; -errno. Then the next call is the finish. */
int cuda_copy_begin(struct cuda_copier *c, struct cuda_pinner *pinner, CUdeviceptr at,
                    const struct device_copy *copy);

/* Ends all copies that were begun, whose result so far is r: returns that, or the first error. No work on their ranges
 * is left then, unless the context is broken. After an error, parts may have been copied. */
int cuda_copy_finish(struct cuda_copier *c, int r);

#endif
