/* What a connection may do: it depends on the socket by which it came. Clients get memory of their tenant.
 * Admins see and change everything. Monitors see everything and change nothing. Schedulers make leases for jobs, and
 * change and end those that schedulers made.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_ROLE_H
#define BFCD_ROLE_H

#include <stdbool.h>

enum role { ROLE_CLIENT, ROLE_ADMIN, ROLE_MONITOR, ROLE_SCHEDULER, ROLE_COUNT };

/* It has no tenant, and must not delay others: its connections have places, and short turns and pages. */
static inline bool role_is_bounded(enum role role)
{
        return role == ROLE_MONITOR || role == ROLE_SCHEDULER;
}

#endif
