/* The internals of a quota. Only its own files include this.
 *
 *   quota.c          blocks, sessions, limits
 *   quota_queue.c    waiting requests and their lists, what they claim before later ones, requests for parked blocks
 *   quota_explain.c  the sentences of refusals
 *   quota_direct.c   direct charges
 *   reclaim.c        makes room for the first in line
 *   quotas.c         the quotas of a partition together: peaks and statistics that outlive it
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_RECLAIM_H
#define BFCD_RECLAIM_H

#include "daemon/memory/quota.h"

#define RECLAIM_STEPS 4u /* each lasts at most timeouts.reclaim, before a request is queued or refused */
/* A request that has waited this long beyond the reclaim steps no longer has priority over all others. */
#define RECLAIM_AGED_MS 1000u

/* ---- reclaim.c ------------------------------------------------------------ */

/* Makes room for the first request. 0: wait, something is in progress. Negative: it is refused. */
int reclaim_make_room(struct quota *q, struct quota_request *request);

/* A request whose time is up: it grows if the limits have room now (0), or is refused. If only the claim
 * of another request denies it the room, it gets the room when that one has waited long enough; until
 * then it waits: RECLAIM_WAIT. */
enum {
        RECLAIM_WAIT = 1,
};
int reclaim_last_chance(struct quota *q, struct quota_request *request);

/* ---- quota_queue.c: claims ------------------------------------------------- */

/* The request claims so many bytes of an account before later requests: that of the partition, or of its tenant's quota if
 * that has leases. 0 bytes: it claims nothing. */
void reclaim_set_claim(struct quota_request *request, struct account *a, uint64_t n_bytes);

/* The request grows: its claim was of use. */
void reclaim_note_growth(const struct quota_request *request);

static inline bool reclaim_has_claim(const struct quota_request *request)
{
        return request->claim.n_bytes > 0;
}

/* The account that the quota shares with leases of its tenant, or with the tenant; NULL: none. */
struct account *reclaim_shared_account(struct quota *q);

/* What requests claim of the account. */
uint64_t reclaim_claims_of(const struct partition *p, const struct account *a);

/* What requests of other quotas that have waited longer claim of the account. now: those that are aged are not counted; 0:
 * all are. */
uint64_t reclaim_claims_before(const struct quota_request *request, const struct account *a, uint64_t now);

/* ---- reclaim.c ------------------------------------------------------------ */

/* Drops the charge that is held for a growth. */
void reclaim_uncharge(struct quota *q);

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

/* ---- quota_direct.c ------------------------------------------------------- */

/* Serves a direct charge, for which the limits have room: nothing is made for it. Fails as charge_take() does. */
int quota_grant_direct(struct quota *q, struct quota_request *request);

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

/* quota_try() for a request that is_copy: it has the block's size then. */
int quota_try_copy(struct quota *q, struct quota_request *request, bfc_handle *ret_handle,
                   uint64_t *ret_offset);

/* The blocks of the quota, and of those above it, are so many more (modulo 2^64). */
void quota_count_blocks(struct quota *q, uint32_t n_blocks, uint64_t n_bytes, uint64_t n_requested);
void quota_assert(const struct quota *q); /* its invariant */

/* The partition is draining: extents that must be released may be free, or a direct charge has ended. */
void quota_note_idle(struct quota *q);

/* Why no request is granted now; 0: some may be. */
int quota_refusal(const struct quota *q);

/* Counts a block of n_bytes requested; one that wakes; and a refusal. */
void quota_count_alloc(struct quota *q, uint64_t n_bytes);
void quota_count_woken(struct quota *q, uint64_t n_bytes);
void quota_count_refusal(struct quota *q, int r);

/* What becomes of a request of n_bytes that needs new memory: QUOTA_WAIT, or a refusal, counted unless it is tried again. r:
 * why it is refused already; 0: it is not. */
int quota_wait_or_refuse(struct quota *q, uint64_t n_bytes, int r, bool again);

/* ---- quota_queue.c -------------------------------------------------------- */

/* Since when the requests are blocked by other sessions; 0: they are not. */
void quota_set_blocked(struct quota *q, uint64_t since_ms);

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

/* It is granted: removes it from the queue. */
void quota_unqueue_served(struct quota_request *request);

/* The next one of its group, which has consecutive places in the queue; NULL: it is the last. */
struct quota_request *quota_next_of_group(const struct quota_request *request);

/* It has left the queue: calls its done(). */
void quota_complete(struct quota_request *request, int result, bfc_handle handle, uint64_t offset);

#endif
