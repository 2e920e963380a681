/* The choices between backends that are made at run time; see device.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "device/device.h"

#include "device/backend.h"

int device_range_new(const struct device_view *view, uint64_t n_bytes, struct device_range **ret)
{
        return view->is_cuda ? cuda_range_new(view, n_bytes, ret) : host_range_new(n_bytes, ret);
}

int device_streams_new(const struct device_view *view, struct device_streams **ret)
{
        return view->is_cuda ? cuda_streams_new(view, ret) : host_streams_new(ret);
}
