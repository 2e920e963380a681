/* The inside of a quota, in two files: quota.c knows who has what and who waits, ladder.c makes
 * room for the first in line. Nobody else includes this.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_LADDER_H
#define BFCD_LADDER_H

#include "daemon/quota.h"

#define LADDER_STEPS 3u /* that last timeouts.reclaim each, at most, before a request is queued or refused */
/* Who has waited for so long beyond these steps does not come before everybody any more. */
#define LADDER_AGED_MS 1000u

/* ---- ladder.c ------------------------------------------------------------ */

/* Makes room for the first in line. 0: something is under way, wait for it.
 * Negative: it is refused. */
int ladder_make_room(struct quota *q, struct quota_request *request);

/* A request whose time is up: it grows if the limits have room now (0), or is refused. What only
 * a claim keeps from it, of one that has waited for long enough, is room; where that one has not yet,
 * it waits for that: LADDER_WAIT. */
enum {
        LADDER_WAIT = 1,
};
int ladder_last_chance(struct quota *q, struct quota_request *request);

/* The request is to have so many bytes of the partition before those that came later. */
void ladder_claim(struct quota_request *request, uint64_t n_bytes);

/* What of the partition those are to have who have waited longer than it. */
uint64_t ladder_claims_before(const struct quota_request *request);

/* Nobody grows with what is held. */
void ladder_unhold(struct quota *q);

/* The quota's charges or extents, or what its device says, have changed: quota.c. */
void quota_note_change(struct quota *q);

/* Extents of the quota may have become wholly free. */
void ladder_note_free(struct quota *q);

/* The quota leaves the partition's lists of those that have something to give. */
void ladder_leave_lists(struct quota *q);

/* Goes on to give back what was restored and is leaving: see arena_resume_release(). */
int ladder_resume_release(struct quota *q);

/* A tenant without blocks whose last session has left has only what it keeps: its other
 * extents go back. */
void ladder_settle(struct quota *q);

/* Nothing is kept from now on; gives nothing back. */
void ladder_unkeep(struct quota *q);

/* What a quota gives back of what it kept, because its device had no memory for others, is back. */
void ladder_end_recall(struct quota *q, bool is_over);

/* Another `keep`, whose time begins now if there is memory that is kept; what is too much is given back. */
void ladder_set_keep(struct quota *q, uint64_t keep_bytes, uint64_t keep_ms);

/* What is over the limit and lies idle in the tenant's own extents goes back. */
void ladder_shed(struct quota *q);
/* The same for what the partition is over its limit, of those who have it. */
void ladder_shed_partition(struct partition *p);

/* ---- quota.c ------------------------------------------------------------- */

/* The only way to charge: the ledger learns of the peak. Fails as charge_take() does. */
int quota_charge(struct quota *q, uint64_t n_bytes, struct charge *ret, uint64_t *ret_missing_bytes);

/* So much it could not have if all others had no more than their reserves. */
bool quota_is_impossible(const struct quota *q, uint64_t n_bytes);

/* A block of so many bytes, as they were asked for, is the quota's. */
void quota_count_alloc(struct quota *q, uint64_t n_bytes);

/* Since when those who wait are blocked by others; 0: they are not. */
void quota_set_blocked(struct quota *q, uint64_t since_ms);

/* Something changed for those who wait, if anybody does; in the whole partition. */
void quota_make_due(struct quota *q);
void partition_make_due(struct partition *p);

/* The first in line has waited so long for others to free that nobody of its tenant passes it
 * any more, but for who would be refused otherwise; nor does its claim refuse anybody. */
bool quota_first_is_aged(const struct quota *q, uint64_t now);

/* Puts a request that has left the line back to its head. */
void quota_enqueue_first(struct quota_request *request);

/* It gets what it wants: takes it out of the line. */
void quota_unqueue_served(struct quota_request *request);

/* It is out of the line: tells its owner. */
void quota_complete(struct quota_request *request, int result, bfc_handle handle, uint64_t offset);

#endif
