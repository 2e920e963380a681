/* Copies between device memory and memfds: directly where the memfd is mapped and registered with CUDA (cuda_pin.h),
 * else through two buffers of pinned memory. While one is filled or emptied by the device, the other one is by this
 * process.
 *
 * One thread at a time, with the context current in which it was opened.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_DEVICE_CUDA_COPY_H
#define BFC_DEVICE_CUDA_COPY_H

#include <stdbool.h>

#include "device/cuda_driver.h"

#define CUDA_COPY_PIECE (UINT64_C(8) << 20) /* of one buffer */

struct cuda_copier {
        const struct cuda_driver *cu; /* NULL: it is closed */
        int fd;                       /* of the buffers: a memfd of this process alone */
        unsigned char *buffers;
        CUstream streams[2]; /* one for each buffer */
};

/* Makes the buffers and registers them with CUDA; does nothing where it is open. -ENOMEM, -ENODEV, -EIO, -errno. */
int cuda_copier_open(struct cuda_copier *c, const struct cuda_driver *cu);

/* has_context: else the context is lost, and the driver is not called. A closed one may be closed. */
void cuda_copier_close(struct cuda_copier *c, bool has_context);

/* To the memfd, and from it. No work on the range is left when they return, unless the context is broken.
 * -EIO: the file ends before; -ENODEV; -errno. Then a part may have been copied. */
int cuda_copy_out(struct cuda_copier *c, CUdeviceptr from, int to, uint64_t to_offset, uint64_t n_bytes);
int cuda_copy_in(struct cuda_copier *c, int from, uint64_t from_offset, CUdeviceptr to, uint64_t n_bytes);

/* The same with registered memory. Only for so many bytes: a driver may read a small piece with the processor,
 * which would fault where a client has removed the page. */
#define CUDA_COPY_DIRECT_MIN (UINT64_C(1) << 20)
int cuda_copy_out_directly(struct cuda_copier *c, CUdeviceptr from, void *to, uint64_t n_bytes);
int cuda_copy_in_directly(struct cuda_copier *c, const void *from, CUdeviceptr to, uint64_t n_bytes);

#endif
