/* What quota.c and queue.c, the two files of a quota, have of each other. Only they include this.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_QUEUE_H
#define BFCD_QUEUE_H

#include "daemon/memory/quota.h"

#define RECLAIM_STEPS 4u /* each lasts at most timeouts.reclaim, before a request is queued or refused */

/* Extents that are being made for a request. */
struct running_growth {
        struct quota *quota;
        struct quota_request *request; /* NULL: it was cancelled */
        bfc_handle wakes;              /* for this parked block; 0: a new one */
        uint64_t new_bytes;            /* of the extents */
        uint64_t rest_bytes;           /* of these, behind the block */
        TAILQ_ENTRY(running_growth) link;
};

/* ---- queue.c: waiting requests --------------------------------------------- */

/* Makes waiting requests due, if there are any; of the quota, or of the whole partition. */
void quota_make_due(struct quota *q);
void partition_make_due(struct partition *p);

/* A block was freed while requests wait; while requests have claims in the partition. */
void quota_note_free(struct quota *q);
void partition_make_claims_due(struct partition *p);

/* True: the first request has waited so long for other sessions that no request of its tenant passes it
 * any more, except one that would otherwise be refused, and that its claim no longer refuses other
 * requests. */
bool quota_first_is_aged(const struct quota *q, uint64_t now);

/* What requests of other quotas that have waited longer claim of the account. now: those that are aged are not counted; 0:
 * all are. */
uint64_t reclaim_claims_before(const struct quota_request *request, const struct account *a, uint64_t now);

/* ---- queue.c: release --------------------------------------------------------- */

/* Extents of the quota may have become wholly free. */
void reclaim_note_free(struct quota *q);

/* See arena_resume_release(). */
int reclaim_resume_release(struct quota *q);

/* If there is no session, releases all free extents except kept ones. */
void reclaim_release_unused(struct quota *q);

/* Releases free extents to get below its limit. */
void reclaim_release_excess(struct quota *q);
/* Releases free extents of all quotas to get below the partition's limit. */
void reclaim_release_partition_excess(struct partition *p);

/* Extents of the quota were released: n_bytes are uncharged. */
void quota_on_uncharged(void *userdata, uint64_t n_bytes);
/* The arena has begun to release n_bytes: the partition lists the quota, and its page shows it. Returns n_bytes. */
uint64_t quota_note_release(struct quota *q, uint64_t n_bytes);

/* ---- quota.c -------------------------------------------------------------- */

/* The quota's charges or extents, or what its device says, have changed. */
void quota_note_change(struct quota *q);

/* Charges an empty quota anew, or one more. Fails as charge_take() does. */
int quota_charge(struct quota *q, uint64_t n_bytes, struct charge *ret, uint64_t *ret_missing_bytes);

/* More than it could get if all others had only their reserves: -EDQUOT or -ENOMEM. 0: it is possible. */
int quota_is_impossible(const struct quota *q, uint64_t n_bytes);

/* Allocates a block in backed space, if that is allowed now: as arena_alloc(), or a refusal. */
int quota_try(struct quota *q, uint64_t n_bytes, bool in_extent, bfc_handle *ret_handle,
              uint64_t *ret_offset);

/* Why no request is granted now; 0: some may be. */
int quota_refusal(const struct quota *q);

/* Counts a block of n_bytes requested; one that wakes; and a refusal. */
void quota_count_alloc(struct quota *q, uint64_t n_bytes);
void quota_count_woken(struct quota *q, uint64_t n_bytes);
void quota_count_refusal(struct quota *q, int r);

#endif
