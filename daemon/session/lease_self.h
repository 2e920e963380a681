/* Leases that users make without an operator: `leases: self` of a tenant in the config.
 *
 * The requests come over the client socket. A user makes leases within the quotas of its own tenant, for its own
 * processes only: a process tree whose root is one of them, a control group that was delegated to the user, or all of
 * the user's. The user changes and ends only its own leases. Their names begin with "u", the uid and ":", so they are
 * no names of operators or other users. They guarantee only what is guaranteed to the tenant.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_LEASE_SELF_H
#define BFCD_LEASE_SELF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define LEASES_PER_USER 64u

struct lease;
struct ledger_lease;
struct quota;
struct session;

/* Of an operator's session all of these allow everything. */

/* True: the session may not make leases at all; the request was refused. what: "leases are made". */
bool lease_self_refuse(struct session *s, uint64_t id, const char *what);

bool lease_self_owns(const struct session *s, const struct lease *lease);

/* The name without the prefix. */
const char *lease_self_name(const struct session *s, const char *name);

/* Whether the name has the prefix, and the tenant is the session's. Negative: a sentence says why not. */
int lease_self_check_names(const struct session *s, const char *name, const char *tenant, char *why,
                           size_t n);

/* Whether the user may make the lease; notes who makes it. */
int lease_self_check(const struct session *s, const struct quota *parent, struct ledger_lease *facts,
                     char *why, size_t n);

/* Whether the reserve of a lease may change so; 0: of a new lease. */
int lease_self_check_reserve(const struct session *s, const struct quota *parent, uint64_t from_bytes,
                             uint64_t to_bytes, char *why, size_t n);

#endif
