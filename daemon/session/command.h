/* Admin commands that are about sessions: evict, drain and resume.
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

#define COMMAND_AGAIN_MS 2000u /* between a drain's rounds */

struct broker;
struct session;

/* Requests of the admin socket; see session_handle(). */
int handle_evict(struct session *s, const Bfcd__Request *r, const char **ret_why);
int handle_drain(struct session *s, const Bfcd__Request *r, const char **ret_why);
int handle_resume(struct session *s, const Bfcd__Request *r, const char **ret_why);

/* Asks sessions for idle memory on devices that are draining. */
void command_tick(struct broker *b, uint64_t now_ms);

#endif
