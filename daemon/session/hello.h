/* The hello: finds the client's tenant, begins the session and answers with what it grants.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_HELLO_H
#define BFCD_HELLO_H

#include <stddef.h>
#include <stdint.h>

#include "proto/bfcd.pb-c.h"

#define SESSION_MAX_HELLOS 3u /* a client may repeat a refused hello, up to so many in all */

struct session;

/* The handler of Hello. */
int hello_handle(struct session *s, const Bfcd__Request *r, const char **ret_why);

/* Matches the client's credentials with the current config, unless that was done. -ENOMEM. */
int hello_match(struct session *s);

#endif
