/* What operators order: that sessions give back what lies idle in them, and that a session ends.
 *
 * A trim asks all sessions that match, 32 at a time, and is answered when all have answered, or are
 * deaf, or have given enough. At the end the extents in which nothing lies any more go
 * back to the device.
 *
 * A drain of a device (see drain.h) tells the sessions that may have memory there, and asks them for
 * what lies idle, again and again until nothing is left: a few sessions in each tick.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_ORDER_H
#define BFCD_ORDER_H

#include <stdint.h>

#include "proto/bfcd.pb-c.h"

#define ORDER_MAX_OPEN 32u   /* Trims of one order that are waited for */
#define ORDER_LOOKS    64u   /* sessions, in one tick of a drain */
#define ORDER_AGAIN_MS 2000u /* between a drain's rounds */

struct broker;
struct session;
struct trim_order;

/* Requests of the admin socket; see session_handle(). */
int handle_trim_now(struct session *s, const Bfcd__Request *r, const char **ret_why);
int handle_evict(struct session *s, const Bfcd__Request *r, const char **ret_why);
int handle_drain(struct session *s, const Bfcd__Request *r, const char **ret_why);
int handle_resume(struct session *s, const Bfcd__Request *r, const char **ret_why);

/* A session that has just come in is told which of its partitions are draining. */
void order_tell_drains(struct session *s);

/* Sessions are asked for what lies idle on devices that drain. */
void order_tick(struct broker *b, uint64_t now_ms);

/* One that it asked has answered, or will not: it freed so many bytes. */
void order_heard(struct trim_order *order, uint64_t freed_bytes);

/* The operator is gone. */
void order_drop(struct session *s);

#endif
