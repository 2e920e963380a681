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
struct lease;
struct lease_end;
struct ledger_lease;
struct quota;
struct session;
struct tenant;

/* Makes a lease of these facts within a quota of the tenant, if its limits and all tables have room. by: for the log.
 * Negative: a sentence says why not. */
int lease_make(struct broker *b, struct tenant *t, struct quota *parent, const struct ledger_lease *facts,
               const char *by, struct lease **ret, char *why, size_t n);

/* Makes the lease one for this control group. -EINVAL, with a sentence. */
int lease_read_cgroup(const char *path, struct ledger_lease *ret, char *why, size_t n);

/* Requests of the admin socket, and of the client socket where lease_self.h allows it; see session_handle(). */
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
