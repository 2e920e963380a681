/* Admin commands about leases (memory/broker_lease.h): create, set, end; and what ends a lease by itself.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_LEASE_H
#define BFCD_LEASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/bfcd.pb-c.h"

struct broker;
struct lease;
struct lease_end;
struct quota;
struct session;

#define LEASE_LOOKS 16u /* at control groups and processes in one tick */

/* Requests of the admin socket, and of the client socket where `leases: self` allows it; see session_handle(). */
int handle_lease_create(struct session *s, const Bfcd__Request *r, const char **ret_why);
int handle_lease_set(struct session *s, const Bfcd__Request *r, const char **ret_why);
int handle_lease_end(struct session *s, const Bfcd__Request *r, const char **ret_why);

/* Ends leases whose time is over or whose processes or quotas are gone, and evicts their sessions where asked; also called
 * after a change of the config. lease_tick_due(): when it is to be called next, at the next of these times, and to look at
 * each lease about once a second; 0: there is none. */
void lease_tick(struct broker *b, uint64_t now_ms);
uint64_t lease_tick_due(const struct broker *b);

/* See upcalls.h. Writes the record. */
void lease_gone(const struct lease_end *end);

/* Leases that users make without an operator: `leases: self` of a tenant in the config.
 *
 * The requests come over the client socket. A user makes leases within the quotas of its own tenant, for its own
 * processes only: a process tree whose root is one of them, a control group that was delegated to the user, or all of
 * the user's. The user changes and ends only its own leases. Their names begin with "u", the uid and ":", so they are
 * no names of operators or other users. They guarantee only what is guaranteed to the tenant. */

#define LEASES_PER_USER 64u

/* Leases that the daemon makes by itself: `per: cgroup` of a quota in the config.
 *
 * A control group that matches the pattern gets its lease when the first session of a process in it or below it begins,
 * unless the process belongs to a lease that is further inside. The lease ends when the control group is gone and the
 * last session has ended. */

/* lease: the innermost one within the tenant's quota so far, or NULL; it is replaced by a new one that is further
 * inside. -EACCES: the control group is not known. Other errors: the lease cannot be made, as of lease_make(). */
int lease_auto(struct session *s, struct quota *parent, struct lease **lease, char *why, size_t n);

#endif
