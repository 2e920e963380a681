/* Refusals of requests for memory.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_REQUEST_REFUSE_H
#define BFCD_REQUEST_REFUSE_H

#include <stdbool.h>
#include <stdint.h>

struct quota_request;
struct session;

/* Refuses a request for memory: counts it, and says why with sizes. is_final: freed memory would not help. */
void request_refuse(struct session *s, uint64_t id, const struct quota_request *refused, int error,
                    bool is_final);

#endif
