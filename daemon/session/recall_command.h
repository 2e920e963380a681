/* Admin commands that ask many sessions: trim, park and wake, and the trim of a drain.
 *
 * A command asks all sessions that match, 32 at a time, in each matching partition: by a Trim, or to park or wake by a
 * Pressure. A session that has another open one there is left out. The command is answered when each of them has
 * answered or is unresponsive, a trim also when enough was freed. At the end of a trim the wholly free extents are
 * returned to the device.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_RECALL_COMMAND_H
#define BFCD_RECALL_COMMAND_H

#include <stdint.h>

#include "proto/bfcd.pb-c.h"

#define RECALL_COMMAND_MAX_OPEN 32u /* unanswered events of one command */
#define RECALL_COMMAND_LOOKS    64u /* sessions looked at in one tick of a drain */

struct broker;
struct broker_device;
struct recall;
struct session;

/* The handlers of TrimNow and ParkNow. */
int handle_trim_now(struct session *s, const Bfcd__Request *r, const char **ret_why);
int handle_park_now(struct session *s, const Bfcd__Request *r, const char **ret_why);

/* Asks sessions for idle memory on a device that is draining: some of them, in each call. */
void recall_command_drain(struct broker *b, struct broker_device *d);

/* A trim of a drain before asks all sessions again. */
void recall_command_restart(struct broker_device *d);

/* A session has answered or will not answer: the command that asked it goes on, if there is one. */
void recall_command_hear(struct recall *r);

/* The admin session has ended. */
void recall_command_drop(struct session *s);

#endif
