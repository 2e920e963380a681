/* Requests of a client: one handler for each.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_REQUEST_H
#define BFCD_REQUEST_H

#include <stdbool.h>
#include <stddef.h>

#include "proto/bfcd.pb-c.h"

#define SESSION_MAX_PENDING 64u /* requests that wait for room; one Wake of many blocks may exceed it */

struct session;

/* Handles one request of a session that session_may_read(). Replies are sent by ops->send(), now or
 * later. A negative errno is a violation of the protocol, named in *ret_why: end the session. After a
 * goodbye the session is closing. */
int session_handle(struct session *s, const Bfcd__Request *request, const char **ret_why);

/* Handles a reply on the events socket, as session_handle() does a request. It is ignored unless the session is
 * LIVE. */
int session_handle_event(struct session *s, const Bfcd__EventReply *reply, const char **ret_why);

/* A slice of work for a session that session_has_work(): about as much as freeing n_blocks. 0: the session
 * may be read again. Negative: disconnect it, *ret_why says why. */
int session_work(struct session *s, size_t n_blocks, const char **ret_why);

/* True: a request that costs more than others, because it looks at many objects. Those of admins are not charged, nor are
 * pages of monitors and schedulers, which are short. */
bool session_looks_at_many(const struct session *s, const Bfcd__Request *request);

/* While SESSION_MAX_PENDING requests wait, only a request that cancels one of them may be handled. */
bool session_may_handle(const struct session *s, const Bfcd__Request *request);

/* True: SESSION_MAX_PENDING requests wait. */
bool session_is_full(const struct session *s);

#endif
