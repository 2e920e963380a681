/* Park and wake: a block is copied elsewhere, its memory is released, and it returns at the same place.
 *
 * A Park waits for room for the copy, then a worker copies, then the block's record names the copy and its
 * extents are released. A Wake waits for room for the extents, then a worker copies back, then the record
 * says that the block is awake, the copy is freed, and the block is delivered. The copy is a block of the
 * session without a name for its client, in new extents of its own that no client gets: one that has the file of the
 * copy could delay the worker, by holes that it punches meanwhile. Until the end of a Park or Wake the client cannot
 * free the block. If the session ends while a worker copies, the memory is freed when the worker is done with it.
 *
 * A shared block is parked when each session that has it has agreed by its Park: until its Wake its client does not
 * use the block. The last Park makes the copy. If the last session that has not agreed ends, the daemon copies by itself; it
 * does not try again where there is no room. A use while a worker copies makes the copy void, because the contents may
 * change. The Wakes of a parked block wait each for itself; the first that gets room copies, and all are answered with
 * that. An Attach of a parked block is a Wake.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_SESSION_PARK_H
#define BFCD_SESSION_PARK_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>

#include "proto/bfcd.pb-c.h"

struct broker;
struct ledger;
struct ledger_block;
struct park;
struct quota;
struct session;
struct shared_name;

/* Whether the session can have blocks of the quota that can be parked. */
bool park_is_possible(const struct session *s, const struct quota *q);

/* The block, of which the session has the quota, can be parked in that. */
bool park_allows(const struct session *s, const struct ledger_block *b);

int park_handle(struct session *s, const Bfcd__Request *r, const char **ret_why);
int park_handle_wake(struct session *s, const Bfcd__Request *r, const char **ret_why);

/* Withdraws a request that waits for room. False: there is none. */
bool park_cancel(struct session *s, uint64_t id);

/* The copy of a parked block, in the ledger. LEDGER_NONE: it has none, or lost it with its partition. */
uint32_t park_copy_of(const struct ledger *l, uint32_t block);

/* Frees a block of the session: its record and its memory, with the copy of a parked block. A worker that still uses
 * the memory frees it later. */
void session_free_block(struct session *s, uint32_t index);

/* ---- shared blocks ---- */

/* A session begins to use the block: what would park it is given up. */
void park_shared_use(struct shared_name *name);

/* Wakes a parked block for an Attach, whose new reference is in delivery; answers it. */
void park_shared_attach(struct session *s, uint64_t id, uint32_t block, uint32_t ref, uint32_t wait_ms);

/* The Wake of a shared block could not be answered: its reference is as before. */
void park_undelivered(struct session *s, uint32_t ref, uint32_t parks_to);

/* The reference ends: what its client has unmapped, it gets again with other blocks. */
void park_shared_leave(struct session *s, uint32_t ref);

/* A session that used the block has left it: it is parked if all others agree. */
void park_shared_look(struct broker *b, struct shared_name *name);

/* The session, which was resumed, still has the reference. If all agree, the previous daemon may have ended before it
 * parked the block by itself. */
void park_shared_resumed(struct session *s, uint32_t ref);

/* The block's record is to be cleared: park_shared_end() is called before. park_shared_free() is called after, with
 * what the record was, and frees the block and its copy; where a worker uses them, it does that at its end. */
struct park_shared_memory {
        bool is_parked;
        bool is_taken; /* a worker uses the memory */
        uint32_t copy; /* in the ledger; LEDGER_NONE: none */
};
struct park_shared_memory park_shared_end(struct broker *b, struct shared_name *name);
void park_shared_free(struct broker *b, const struct ledger_block *block,
                      const struct park_shared_memory *memory);

/* The daemon ends: workers may still copy. */
void park_shared_forget(struct shared_name *name);

/* The session ends: requests that wait get no answer. */
void park_drop_all(struct session *s);
/* The session is freed. */
void park_leave_all(struct session *s);

#endif
