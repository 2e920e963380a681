/* Room in the daemon's tables, and file descriptors, for a lease.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_LEASE_ROOM_H
#define BFCD_LEASE_ROOM_H

#include <stddef.h>
#include <stdint.h>

struct broker;
struct lease;
struct quota;

/* For a lease of this limit within `parent`. lease: it exists; NULL: a new one. -ENOSPC, -EMFILE, with a sentence. */
int lease_check_room(const struct broker *b, const struct quota *parent, const struct lease *lease,
                     uint64_t limit, char *why, size_t n);

#endif
