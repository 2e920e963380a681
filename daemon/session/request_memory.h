/* Requests for memory: blocks and direct charges. They wait for room in the queue of their quota, are granted, or are
 * refused with sizes.
 *
 * Direct charges are bytes of memory that a process took by itself, for example from the driver, and has the daemon
 * charge. A session has one sum in each quota. The ledger has it, too, so a successor continues with it. A charge waits
 * for room as a block does, and is granted without an extent.
 *
 * It ends by the client's word, or when the kernel has reported the exit of its process: neither a goodbye nor the
 * end of the connection returns memory that the daemon did not give. Until then a session that is closed lingers.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_REQUEST_MEMORY_H
#define BFCD_REQUEST_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/memory/quota.h"
#include "proto/bfcd.pb-c.h"

struct quota_request;
struct request_state;
struct session;

/* The handlers of Malloc, Free and Split; see request.c. */
int handle_malloc(struct session *s, const Bfcd__Request *r, const char **ret_why);
int handle_free(struct session *s, const Bfcd__Request *r, const char **ret_why);
int handle_split(struct session *s, const Bfcd__Request *r, const char **ret_why);

/* Refuses a request for memory: counts it, and says why with sizes. is_final: freed memory would not help. */
void request_refuse(struct session *s, uint64_t id, const struct quota_request *refused, int error,
                    bool is_final);

void request_init(struct request_state *r);

/* Queues a request for memory in a share, whose own fields are set; it is answered later. */
void request_wait(struct session *s, uint64_t id, size_t share, const struct quota_request *wait,
                  uint32_t wait_ms, const char *tag);

/* Drops the request with this id, without an answer. False: none waits. */
bool request_drop(struct session *s, uint64_t id);

/* Drops all requests that wait for room, without an answer. */
void request_drop_all(struct session *s);

/* ---- direct charges ---------------------------------------------------------- */

int direct_handle_charge(struct session *s, const Bfcd__Request *r, const char **ret_why);
int direct_handle_uncharge(struct session *s, const Bfcd__Request *r, const char **ret_why);

/* The end of the session, when its process has ended; and before a successor inherits it. */
void direct_end(struct session *s);
void direct_leave(struct session *s);

/* A session of the previous daemon gets what its record says. -EBADMSG, -ENOMEM. */
int direct_restore(struct session *s);

/* While the session is resumed: begins, notes what the client lists (NULL, or why that is a violation), and in the end
 * drops what it did not list. */
void direct_begin_list(struct session *s);
const char *direct_name(struct session *s, const Bfcd__HeldCharge *listed);
void direct_resume(struct session *s);

#endif
