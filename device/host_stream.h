/* What a host stream has to do, as tests tell it: the processor's work is done when a
 * function returns, so nothing else puts any in.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * For the whole process; any thread. */
#ifndef BFC_DEVICE_HOST_STREAM_H
#define BFC_DEVICE_HOST_STREAM_H

#include <stdint.h>

/* One more piece of work, and the end of the oldest that is not done. While the stream is
 * captured a piece goes into the graph, and there is nothing to end. */
void host_stream_begin(uintptr_t stream);
void host_stream_end(uintptr_t stream);

void host_stream_begin_capture(uintptr_t stream);
void host_stream_end_capture(uintptr_t stream);

/* What every question about this stream, and every event in it, answers instead: -EIO,
 * -ENODEV, -EINVAL, -ENOMEM. 0: as it is. */
void host_stream_fail(uintptr_t stream, int error);

/* How many events there are, and how often one was asked. */
unsigned host_stream_n_events(void);
uint64_t host_stream_n_queries(void);

void host_stream_reset(void); /* nobody has anything to do */

#endif
