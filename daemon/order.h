/* What operators order: that sessions give back what lies idle in them, and that a session ends.
 *
 * A trim asks all sessions that match, 32 at a time, and is answered when all have answered, or are
 * deaf, or have given enough. At the end the extents in which nothing lies any more go
 * back to the device.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_ORDER_H
#define BFCD_ORDER_H

#include <stdint.h>

#include "proto/bfcd.pb-c.h"

#define ORDER_MAX_OPEN 32u /* Trims of one order that are waited for */

struct session;
struct trim_order;

/* Requests of the admin socket; see session_handle(). */
int handle_trim_now(struct session *s, const Bfcd__Request *r, const char **ret_why);
int handle_evict(struct session *s, const Bfcd__Request *r, const char **ret_why);

/* One that it asked has answered, or will not: it freed so many bytes. */
void order_heard(struct trim_order *order, uint64_t freed_bytes);

/* The operator is gone. */
void order_drop(struct session *s);

#endif
