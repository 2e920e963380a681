/* Requests of a client: one handler for each.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_REQUEST_H
#define BFCD_REQUEST_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/queue.h>

#include "daemon/session/park.h"
#include "proto/bfcd.pb-c.h"

#define SESSION_MAX_PENDING 64u     /* requests that wait for room; one Wake of many blocks may exceed it */
#define SESSION_MAX_WAIT_MS 600000u /* a longer time in a request counts as this */

struct quota_request;
struct session;
struct session_request; /* a malloc or a charge that waits for room */
TAILQ_HEAD(session_request_list, session_request);

/* A session's part. */
struct request_state {
        struct session_request_list list;
        size_t n; /* waiting, those of shared.h and park.h included */
        struct park_list parks;
};

void request_init(struct request_state *r);

/* Handles one request of a session that session_may_read(). Replies are sent by ops->send(), now or
 * later. A negative errno is a violation of the protocol, named in *ret_why: end the session. After a
 * goodbye the session is closing. */
int session_handle(struct session *s, const Bfcd__Request *request, const char **ret_why);

/* Handles a reply on the events socket, as session_handle() does a request. It is ignored unless the session is
 * LIVE. */
int session_handle_event(struct session *s, const Bfcd__EventReply *reply, const char **ret_why);

/* True: a client's request that costs more than others, because it looks at many objects. */
bool session_looks_at_many(const struct session *s, const Bfcd__Request *request);

/* While SESSION_MAX_PENDING requests wait, only a request that cancels one of them may be handled. */
bool session_may_handle(const struct session *s, const Bfcd__Request *request);

/* True: SESSION_MAX_PENDING requests wait. */
bool session_is_full(const struct session *s);

/* Refuses a request for memory: counts it, and says why with sizes. is_final: freed memory would not help. */
void request_refuse(struct session *s, uint64_t id, const struct quota_request *refused, int error,
                    bool is_final);

/* Queues a request for memory in a share, whose own fields are set; it is answered later. */
void request_wait(struct session *s, uint64_t id, size_t share, const struct quota_request *wait,
                  uint32_t wait_ms, const char *tag);

/* Drops requests that wait for room, without an answer. */
void request_drop_all(struct session *s);

#endif
