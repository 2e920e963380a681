/* Admin commands that are about sessions: trim, evict, drain and resume.
 *
 * A trim asks all sessions that match, 32 at a time. It is answered when each of them has answered
 * or is unresponsive, or when enough was freed. At its end the wholly free extents are returned to
 * the device.
 *
 * A drain of a device (see drain.h) tells the sessions that may have memory there, and asks them for
 * idle memory again and again until nothing is left: a few sessions in each tick.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_COMMAND_H
#define BFCD_COMMAND_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/bfcd.pb-c.h"

#define COMMAND_MAX_OPEN 32u   /* unanswered Trims of one command */
#define COMMAND_LOOKS    64u   /* sessions looked at in one tick of a drain */
#define COMMAND_AGAIN_MS 2000u /* between a drain's rounds */

struct broker;
struct broker_device;
struct session;
struct park_now;
struct trim_command;

/* The commands of an admin session; all zeros: none. */
struct command_state {
        struct trim_command *trim;
        struct park_now *park;         /* see park_now.h */
        struct broker_device *resumed; /* a device that is being resumed */
        uint64_t resume_id;            /* of that request */
};

/* True: the request came from the client socket and was refused. `what` ("trim is") begins the sentence. */
bool command_refuse_client(struct session *s, uint64_t id, const char *what);

/* Requests of the admin socket; see session_handle(). */
int handle_trim_now(struct session *s, const Bfcd__Request *r, const char **ret_why);
int handle_evict(struct session *s, const Bfcd__Request *r, const char **ret_why);
int handle_drain(struct session *s, const Bfcd__Request *r, const char **ret_why);
int handle_resume(struct session *s, const Bfcd__Request *r, const char **ret_why);

/* Ends a session that command_may_evict(). reason: continues "session N was evicted", for the client; ended:
 * for the log and the records. -ENOMEM. */
bool command_may_evict(const struct session *s);
int command_evict(struct session *s, const char *reason, const char *ended);

/* Tells a new session which of its partitions are draining. */
void command_tell_drains(struct session *s);

/* Asks sessions for idle memory on devices that are draining. */
void command_tick(struct broker *b, uint64_t now_ms);

/* A session that the command asked has answered or will not answer: it freed freed_bytes. */
void command_heard(struct trim_command *command, uint64_t freed_bytes);

/* The admin session has ended. */
void command_drop(struct session *s);

#endif
