/* What a connection may do: it depends on the socket by which it came. Clients get memory of their tenant.
 * Admins see and change everything. Monitors see everything and change nothing.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_ROLE_H
#define BFCD_ROLE_H

enum role { ROLE_CLIENT, ROLE_ADMIN, ROLE_MONITOR, ROLE_COUNT };

#endif
