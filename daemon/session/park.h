/* Park and wake: a block is copied elsewhere, its memory is released, and it returns at the same place.
 *
 * A Park waits for room for the copy, then a worker copies, then the block's record names the copy and its
 * extents are released. A Wake waits for room for the extents, then a worker copies back, then the record
 * says that the block is awake, the copy is freed, and the block is delivered. The copy is a block of the
 * session without a name for its client, in new extents of its own that no client gets: one that has the file of the
 * copy could delay the worker, by holes that it punches meanwhile. Until the end of a Park or Wake the client cannot
 * free the block. If the session ends while a worker copies, the memory is freed when the worker is done with it.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_SESSION_PARK_H
#define BFCD_SESSION_PARK_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>

#include "proto/bfcd.pb-c.h"

struct ledger;
struct park;
struct quota;
struct session;
TAILQ_HEAD(park_list, park); /* of a session; at most SESSION_MAX_PENDING that its client waits for */

/* Whether the session can have blocks of the quota that can be parked. */
bool park_is_possible(const struct session *s, const struct quota *q);

int park_handle(struct session *s, const Bfcd__Request *r, const char **ret_why);
int park_handle_wake(struct session *s, const Bfcd__Request *r, const char **ret_why);

/* Withdraws a request that waits for room. False: there is none. */
bool park_cancel(struct session *s, uint64_t id);

/* The copy of a parked block, in the ledger. LEDGER_NONE: it has none, or lost it with its partition. */
uint32_t park_copy_of(const struct ledger *l, uint32_t block);

/* Frees a parked block of the session, with its copy. */
void park_free_block(struct session *s, uint32_t block);

/* The record of the session's block was cleared. True: a worker still uses the memory, which is freed later. */
bool park_takes_over(struct session *s, uint32_t block);

/* The session ends: requests that wait get no answer. And: the session is freed. */
void park_drop_all(struct session *s);
void park_leave_all(struct session *s);

#endif
