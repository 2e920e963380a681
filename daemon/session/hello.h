/* The hello: finds the client's tenant, begins the session and answers with what it grants.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_HELLO_H
#define BFCD_HELLO_H

#include <stddef.h>
#include <stdint.h>

#include "proto/bfcd.pb-c.h"

struct ledger_session;
struct session;

#define SESSION_MAX_HELLOS 3u /* a client may repeat a refused hello, up to so many in all */

/* The handler of Hello. */
int hello_handle(struct session *s, const Bfcd__Request *r, const char **ret_why);

/* Matches the client's credentials with the current config, unless that was done. -ENOMEM. */
int hello_match(struct session *s);

/* The shares that a session gets at its hello: in each partition the quota of its tenant, or the lease there that it is in. */

/* session_take_shares() for a session of the previous daemon: it had the quotas with ids below quotas_end, and
 * leases. */
int session_take_shares_again(struct session *s, const struct ledger_session *record);

/* The answer to a granted hello, of a new session or of one that is resumed. */

/* The events socket that a hello asks for; -1 if it asks for none. -errno. */
int welcome_open_events(struct session *s, const Bfcd__Request *r, int *ret_fd);

/* Answers a granted hello of a session that has a ledger record. Takes over events_fd. */
void welcome_send(struct session *s, const Bfcd__Request *r, size_t share, int events_fd);

#endif
