/* Filling memory of a GPU with zeroes, in the daemon's context. Memory that is shared by fds has no address: it gets one
 * here for a short time. The context is current in all functions, and errors are those of cuda_driver_owner_errno().
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_DEVICE_CUDA_FILL_H
#define BFC_DEVICE_CUDA_FILL_H

#include <stddef.h>
#include <stdint.h>

#include "device/cuda_driver.h"
#include "device/device.h"

/* A stream of the highest priority, because tenants wait for fills. All zero: it is made by the first fill. */
struct cuda_fill {
        CUstream stream;
};

/* Before the context is closed; takes one that was never used. */
void cuda_fill_close(struct cuda_fill *f, const struct cuda_context *c);

/* Returns when the memory is zeroed. */
int cuda_fill_at(struct cuda_fill *f, const struct cuda_context *c, CUdeviceptr at, uint64_t n_bytes);

/* Zeroes extents that are shared by fds, all of them by one fill. */
int cuda_fill(struct cuda_fill *f, const struct cuda_context *c, const struct device_extent *extents,
              size_t n);

/* Gives such extents neighbouring addresses. All or none. */
int cuda_fill_map(const struct cuda_context *c, const struct device_extent *extents, size_t n,
                  CUdeviceptr *ret);

/* An error: something may be mapped for ever. */
int cuda_fill_unmap(const struct cuda_context *c, CUdeviceptr at, const struct device_extent *extents,
                    size_t n);

#endif
