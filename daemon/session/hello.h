/* The hello: finds the client's tenant, begins the session and answers with what it grants.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_HELLO_H
#define BFCD_HELLO_H

#include <stddef.h>
#include <stdint.h>

#include "proto/bfcd.pb-c.h"

#define SESSION_PROTOCOL_VERSION 1u
#define SESSION_MAX_HELLOS       3u /* a client may repeat a refused hello, up to so many in all */

struct session;

/* A session's part. */
struct hello_state {
        unsigned n; /* hellos so far */
};

/* The handler of Hello. */
int hello_handle(struct session *s, const Bfcd__Request *r, const char **ret_why);

/* Matches the client's credentials with the current config, unless that was done. -ENOMEM. */
int hello_match(struct session *s);

/* The events socket that a hello asks for; -1 if it asks for none. -errno. */
int hello_open_events(struct session *s, const Bfcd__Request *r, int *ret_fd);

/* Answers a granted hello of a session that has a ledger record. Takes over events_fd. */
void hello_welcome(struct session *s, const Bfcd__Request *r, size_t share, int events_fd);

#endif
