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
#define LEASE_BOUNDS_MS 60000u /* in so long a tenant's processes ask at most LEASES_PER_TENANT times */

struct broker;
struct tenant;

/* Whether there may be one more. -EDQUOT, with a sentence that names the bound. */
int lease_bounds_check(const struct broker *b, const struct tenant *t, enum ledger_lease_maker maker,
                       char *why, size_t n);

/* Counts a request for a lease or for a change of one, also if it is refused afterwards. -EDQUOT: there were too many; with
 * a sentence that names the bound. */
int lease_bounds_take(struct tenant *t, enum ledger_lease_maker maker, char *why, size_t n);

#endif
