/* Direct charges: bytes of memory that a process took by itself, for example from the driver, and has the daemon charge.
 *
 * A session has one sum in each quota. The ledger has it, too, so a successor continues with it. A charge waits for
 * room in the queue of its quota, as a block does, and is granted without an extent.
 *
 * It ends by the client's word, or when the kernel has reported the exit of its process: neither a goodbye nor the
 * end of the connection returns memory that the daemon did not give. Until then a session that is closed lingers.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_DIRECT_H
#define BFCD_DIRECT_H

#include <stddef.h>
#include <stdint.h>

#include "proto/bfcd.pb-c.h"

struct quota_request;
struct session;

int direct_handle_charge(struct session *s, const Bfcd__Request *r, const char **ret_why);
int direct_handle_uncharge(struct session *s, const Bfcd__Request *r, const char **ret_why);

/* The Charge with this id was served: commits and answers it. */
void direct_grant(struct session *s, uint64_t id, size_t share, struct quota_request *served);

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
