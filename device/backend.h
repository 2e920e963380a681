/* What device.c chooses between; see device.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_DEVICE_BACKEND_H
#define BFC_DEVICE_BACKEND_H

#include "device/device.h"

int host_range_new(const struct device_view *view, uint64_t n_bytes, struct device_range **ret);
int no_memory_range_new(uint64_t n_bytes, struct device_range **ret);
int cuda_range_new(const struct device_view *view, uint64_t n_bytes, struct device_range **ret);
int cuda_prepare(const struct device_view *view);
int host_streams_new(struct device_streams **ret);
/* Waits for the work of all streams of the host: there is some in tests only. -EBUSY: one of them is
 * being captured. */
int host_streams_finish(void);
int cuda_streams_new(const struct device_view *view, struct device_streams **ret);

#endif
