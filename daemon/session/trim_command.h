/* Trims of many sessions: of an admin's command, and of a drain.
 *
 * An admin's trim asks all sessions that match, 32 at a time. It is answered when each of them has answered
 * or is unresponsive, or when enough was freed. At its end the wholly free extents are returned to
 * the device.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_TRIM_COMMAND_H
#define BFCD_TRIM_COMMAND_H

#include <stdint.h>

#include "proto/bfcd.pb-c.h"

#define TRIM_COMMAND_MAX_OPEN 32u /* unanswered Trims of one command */
#define TRIM_COMMAND_LOOKS    64u /* sessions looked at in one tick of a drain */

struct broker;
struct broker_device;
struct session;
struct trim_command;

/* The handler of TrimNow. */
int handle_trim_now(struct session *s, const Bfcd__Request *r, const char **ret_why);

/* Asks sessions for idle memory on a device that is draining: some of them, in each call. */
void trim_command_drain(struct broker *b, struct broker_device *d);

/* A trim of a drain before asks all sessions again. */
void trim_command_restart(struct broker_device *d);

/* A session that the command asked has answered or will not answer: it freed freed_bytes. */
void trim_command_heard(struct trim_command *command, uint64_t freed_bytes);

/* The admin session has ended. */
void trim_command_drop(struct session *s);

#endif
