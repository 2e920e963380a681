/* Leases that the daemon makes by itself: `per: cgroup` of a quota in the config.
 *
 * A control group that matches the pattern gets its lease when the first session of a process in it or below it begins,
 * unless the process belongs to a lease that is further inside. The lease ends when the control group is gone and the
 * last session has ended.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_LEASE_AUTO_H
#define BFCD_LEASE_AUTO_H

#include <stddef.h>

struct lease;
struct quota;
struct session;

/* lease: the innermost one within the tenant's quota so far, or NULL; it is replaced by a new one that is further
 * inside. -EACCES: the control group is not known. Other errors: the lease cannot be made, as of lease_make(). */
int lease_auto(struct session *s, struct quota *parent, struct lease **lease, char *why, size_t n);

#endif
