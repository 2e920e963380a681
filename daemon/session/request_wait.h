/* Requests for memory that wait for room, and what those get that are granted.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_REQUEST_WAIT_H
#define BFCD_REQUEST_WAIT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/memory/quota.h"

struct request_state;
struct session;

void request_init(struct request_state *r);

/* A block was taken out of the quota of the share for request `id`: it is delivered. */
void request_give(struct session *s, uint64_t id, size_t share_index, uint64_t n_requested, const char *tag,
                  bfc_handle handle, uint64_t offset);

/* Queues a request for memory in a share, whose own fields are set; it is answered later. */
void request_wait(struct session *s, uint64_t id, size_t share, const struct quota_request *wait,
                  uint32_t wait_ms, const char *tag);

/* Drops the request with this id, without an answer. False: none waits. */
bool request_drop(struct session *s, uint64_t id);

/* Drops all requests that wait for room, without an answer. */
void request_drop_all(struct session *s);

#endif
