/* An admin command by which operators have sessions park or wake blocks.
 *
 * It asks the sessions that match, 32 at a time, in each matching partition, by a Pressure (see pressure.h), and
 * is answered when each of them has answered or is unresponsive. A session with another open Pressure there is left
 * out.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_PARK_NOW_H
#define BFCD_PARK_NOW_H

#include <stdint.h>

#include "proto/bfcd.pb-c.h"

#define PARK_NOW_MAX_OPEN 32u /* unanswered Pressures of one command */

struct park_now;
struct session;

/* A request of the admin socket; see session_handle(). */
int park_now_handle(struct session *s, const Bfcd__Request *r, const char **ret_why);

/* A session that the command asked has answered or will not answer: so many bytes were released, or woken. */
void park_now_heard(struct park_now *command, uint64_t n_bytes);

/* The admin session has ended. */
void park_now_drop(struct session *s);

#endif
