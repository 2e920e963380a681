/* Processes that have memory of a GPU and no session: whose they would be. As a hello of theirs would find the tenant and the
 * lease, but by /proc, where a process can change its credentials: nothing is decided by it.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_OTHERS_H
#define BFCD_OTHERS_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/memory/broker_lease.h"

struct broker;
struct device;
struct quota;

struct other {
        pid_t pid;
        uint64_t n_bytes;
        struct credentials who; /* these are read */
        gid_t *gids;            /* supplementary, sorted; owned */
        size_t n_gids;
        struct lease_peer peer;
};

/* What is needed to find its tenant and lease. Reads /proc: not for the loop. False: it is not there any more. */
bool other_read(struct other *o);
void other_clear(struct other *o);

/* The quota of its lease on the device, else of its tenant. NULL: it matches no tenant, or that has none there. Reads nothing. */
struct quota *other_quota(const struct broker *b, const struct device *device, struct other *o,
                          struct tenant **ret);

#endif
