/* Admin commands about leases (memory/broker_lease.h): create, set, end; and what ends a lease by itself.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_LEASE_H
#define BFCD_LEASE_H

#include <stddef.h>
#include <stdint.h>

#include "proto/bfcd.pb-c.h"

#define LEASE_LOOKS 16u /* at control groups and processes in one tick */

struct broker;
struct lease_end;
struct session;

/* Requests of the admin socket; see session_handle(). */
int handle_lease_create(struct session *s, const Bfcd__Request *r, const char **ret_why);
int handle_lease_set(struct session *s, const Bfcd__Request *r, const char **ret_why);
int handle_lease_end(struct session *s, const Bfcd__Request *r, const char **ret_why);

/* Ends leases whose time is over or whose processes or quotas are gone, and evicts their sessions where asked; also called after a
 * change of the config. And when it is
 * to be called next: at the next of these times, and to look at each lease about once a second; 0: there is none. */
void lease_tick(struct broker *b, uint64_t now_ms);
uint64_t lease_tick_due(const struct broker *b);

/* See upcalls.h. Writes the record. */
void lease_gone(const struct lease_end *end);

#endif
