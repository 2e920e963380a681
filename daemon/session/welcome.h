/* The answer to a granted hello, of a new session or of one that is resumed.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_WELCOME_H
#define BFCD_WELCOME_H

#include <stddef.h>

#include "proto/bfcd.pb-c.h"

struct session;

/* The events socket that a hello asks for; -1 if it asks for none. -errno. */
int welcome_open_events(struct session *s, const Bfcd__Request *r, int *ret_fd);

/* Answers a granted hello of a session that has a ledger record. Takes over events_fd. */
void welcome_send(struct session *s, const Bfcd__Request *r, size_t share, int events_fd);

#endif
