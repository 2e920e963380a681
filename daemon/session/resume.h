/* Resume: the client of a suspended session continues it on a new connection.
 *
 * The client sends a Hello with the session's id and secret, from the same process. Then the session is
 * LISTING: the client lists its memory in Held messages: extents that it has mapped, blocks, and shared
 * blocks with their counts. Then the session is RESUMING: what the client did not list is freed, in
 * slices, because the client never received it or has freed it. Then the session is LIVE.
 *
 * Nothing is freed before the whole list was checked. A client that lists memory of another session is
 * disconnected without effect.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_RESUME_H
#define BFCD_RESUME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/bfcd.pb-c.h"

struct session;
struct resumption; /* the list, and how far it was processed */

/* A Hello with a session's id on a NEW session. If it is granted, *s has been freed. */
int resume_hello(struct session *s, const Bfcd__Request *r);

/* The handler of Held. */
int resume_list(struct session *s, const Bfcd__Request *r, const char **ret_why);

/* Processes the list of a RESUMING session: about as much work as freeing n blocks. SESSION_MORE. 0: the
 * session is LIVE. Negative: the list is invalid (*ret_why), disconnect the client. */
int resume_step(struct session *s, size_t n, const char **ret_why);

/* Drops the list, if there is one. */
void resume_stop(struct session *s);

#endif
