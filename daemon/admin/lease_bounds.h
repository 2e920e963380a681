/* How many leases processes may cause, by control groups (`per: cgroup`) and by requests (`leases: self`), so that they leave
 * places to operators and other tenants, and the log readable. Operators have no such bounds.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_LEASE_BOUNDS_H
#define BFCD_LEASE_BOUNDS_H

#include <stddef.h>

#include "daemon/ledger/ledger.h"

#define LEASE_BOUNDS_ALL                                                                                     \
        768u /* places for such leases; tenants whose processes may cause leases have equal shares */
#define LEASE_BOUNDS_MS 60000u /* in so long a tenant's processes make and change at most LEASES_PER_TENANT */

struct broker;
struct config;
struct tenant;

/* How many tenants' processes may cause leases. */
size_t lease_bounds_tenants(const struct config *c);

/* -EDQUOT, with a sentence that names the bound. Of a new lease; and of a change. */
int lease_bounds_check(const struct broker *b, struct tenant *t, enum ledger_lease_maker maker, char *why,
                       size_t n);
int lease_bounds_check_change(struct tenant *t, enum ledger_lease_maker maker, char *why, size_t n);

/* A lease was made or changed. */
void lease_bounds_note(struct tenant *t, enum ledger_lease_maker maker);

#endif
