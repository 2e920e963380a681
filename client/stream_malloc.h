/* Allocation on streams.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CLIENT_STREAM_MALLOC_H
#define BFC_CLIENT_STREAM_MALLOC_H

#include <bfcclient.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct malloc_how;

/* bfc_malloc_async_in() with flags and a wait. */
int client_malloc_async(bfc_client *client, const char *partition, size_t n_bytes, uintptr_t stream,
                        const struct malloc_how *how, void **ret_ptr);

/* For frameworks, which do not destroy their streams: the driver may get this one at any time. */
int client_record_permanent_stream(bfc_client *client, const void *ptr, uintptr_t stream);

#endif
