/* Streams of the host that have pending work, in place of those of device/host_stream.c: a test adds the
 * work and ends it.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * For the whole process; any thread. */
#ifndef BFC_TESTS_HOST_STREAM_H
#define BFC_TESTS_HOST_STREAM_H

#include <stdbool.h>
#include <stdint.h>

/* One more piece of work, and the end of the oldest that is not done. While the stream is
 * captured a piece goes into the graph, and there is nothing to end. */
void host_stream_begin(uintptr_t stream);
void host_stream_end(uintptr_t stream);

void host_stream_begin_capture(uintptr_t stream);
void host_stream_end_capture(uintptr_t stream);

/* As a driver's streams do, they end: a use of the stream after this ends the process, while its work goes on.
 * The next one can have its number. */
void host_stream_destroy(uintptr_t stream);
void host_stream_create(uintptr_t stream);
/* Clients that connect later learn that streams can be destroyed. fn: NULL, or called before all work is waited
 * for. Until host_stream_reset(). */
void host_streams_set_mortal(bool mortal, void (*fn)(void));

/* Every query of this stream and of its events fails with this error. 0: none fails any more. */
void host_stream_fail(uintptr_t stream, int error);

/* How many events exist, and how often one was queried. */
unsigned host_stream_n_events(void);
uint64_t host_stream_n_queries(void);

void host_stream_reset(void); /* no stream has work */

#endif
