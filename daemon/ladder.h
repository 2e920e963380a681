/* The inside of a quota, in two files: quota.c knows who has what and who waits, ladder.c makes
 * room for the first in line. Nobody else includes this.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_LADDER_H
#define BFCD_LADDER_H

#include "daemon/quota.h"

#define LADDER_STEPS 3u /* that last timeouts.reclaim each, at most, before a request is queued or refused */

/* ---- ladder.c ------------------------------------------------------------ */

/* Makes room for the first in line. 0: something is under way, wait for it.
 * Negative: it is refused. */
int ladder_make_room(struct quota *q, struct quota_request *request);

/* A request behind a first in line that waits for others to free, when its own time is up: it grows
 * if the limits have room now (0), or is refused. */
int ladder_last_chance(struct quota *q, struct quota_request *request);

/* The request is to have so many bytes of the partition before those that came later. */
void ladder_claim(struct quota_request *request, uint64_t n_bytes);

/* Nobody grows with what is held. */
void ladder_unhold(struct quota *q);

/* A tenant without blocks whose last session has left holds nothing: its extents
 * go back. */
void ladder_settle(struct quota *q);

/* What is over the limit and lies idle in the tenant's own extents goes back. */
void ladder_shed(struct quota *q);
/* The same for what the partition is over its limit, of those who have it. */
void ladder_shed_partition(struct partition *p);

/* ---- quota.c ------------------------------------------------------------- */

/* The only way to charge: the ledger learns of the peak. Fails as charge_take() does. */
int quota_charge(struct quota *q, uint64_t n_bytes, struct charge *ret, uint64_t *ret_missing_bytes);

/* A block of so many bytes, as they were asked for, is the quota's. */
void quota_count_alloc(struct quota *q, uint64_t n_bytes);

/* Something changed for those who wait, if anybody does; in the whole partition. */
void quota_make_due(struct quota *q);
void partition_make_due(struct partition *p);

/* It gets what it wants: takes it out of the line. */
void quota_unqueue_served(struct quota_request *request);

/* It is out of the line: tells its owner. */
void quota_complete(struct quota_request *request, int result, bfc_handle handle, uint64_t offset);

#endif
