/* A quota: one tenant's part of one partition, or a lease's part of such a quota. It decides, and the arena
 * carries out: which request is granted now, which waits, what is released to make room, and which is refused.
 *
 * A request that fits into backed space is granted at once, also before others that wait. Otherwise it
 * waits in order, and room is made for the first in line: the quota grows within the limits, after it has
 * released wholly free extents, its own first and, if the partition is short, those of other quotas. If
 * that does not help, or the memory being released does not arrive within the reclaim time-out, the
 * request is refused. Before that, the quotas that were not asked yet are asked for all missing bytes,
 * and it waits once more.
 *
 * Growths run beside each other, and each is charged from its start. A request waits for a growth that is no larger than
 * its own would be, and leaves much of its last extent: so many small requests share one extent. One that lacks room waits
 * for each growth that leaves room for it, and is refused only when no growth runs.
 *
 * Before a growth would exceed the most bytes charged since the quota was last empty (`high_bytes`), the
 * quota releases its own free extents. The part of the growth that they do not cover is charged before
 * they are released, and their bytes are charged again in the same turn of the loop. So no other quota can
 * take them, and the tenant never has more charged than before or after. For this it does not release
 * extents that a session may not unmap in time: that would not justify to disconnect a session.
 *
 * Waiting requests are looked at only in turns, a bounded number in each. So no number of them delays
 * others, and done() is never called inside another call.
 *
 * Invariant, asserted at every change:
 *   bytes_in_use <= charged extent bytes
 *
 * Charged bytes exceed the limit, and blocks max_blocks, only after these were lowered below the usage: nothing is granted
 * beyond them (see account.h).
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_QUOTA_H
#define BFCD_QUOTA_H

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>

#include "daemon/memory/account.h"
#include "daemon/memory/arena.h"
#include "daemon/memory/waits.h"
#include "daemon/ledger/ledger.h"
#include "daemon/memory/pages.h"
#include "daemon/memory/partition.h"
#include "daemon/memory/state.h"

struct quota;
struct running_growth; /* see queue.h */
TAILQ_HEAD(running_growth_list, running_growth);
struct trim_quota;

/* What is known of the sessions that were asked for idle memory, for one request. */
struct quota_asking {
        uint64_t begun_ms; /* 0: no session was asked */
        uint64_t heard_ms; /* when a session last released something; 0: none did */
        unsigned n_gave;   /* how often */
        uint64_t clock;    /* the rest is for upcalls.press() and upcalls.trim() */
        unsigned n_round;
        unsigned n_vain; /* sessions that were looked at in vain */
        struct {
                uint64_t begun_ms; /* 0: not yet */
                uint64_t vain_ms;  /* when no session was left to ask */
                unsigned n_vain;
        } press;
};

/* How much a request lacked when it was last tried as the first, and of what. */
struct quota_shortage {
        int refusal; /* 0: nothing is lacking */
        uint64_t missing;
        const struct account
                *scope; /* what is returned to it helps; NULL: only the quota's own memory does */
};

/* A request that waits. Embedded by the session; it leaves the queue before done() is called, or by
 * quota_cancel(). */
struct quota_request {
        struct quota *quota;
        uint64_t n_bytes;
        bool in_extent; /* the block must be in one extent */
        bool is_whole;  /* the block gets whole extents; n_bytes becomes their size when it grows */
        bool is_copy; /* with is_whole: no session receives it, so free extents that none has received do, too */
        bool is_direct;     /* a direct charge: no block, and nothing is made */
        bfc_handle wakes;   /* this parked block, whose size is n_bytes; 0: a new one */
        uint64_t group;     /* with `wakes`: those of one requester with one number have room together */
        bool device_failed; /* result: the device failed, the limits had room */
        uint32_t wait_ms;   /* time to wait for other sessions' frees, after all reclaim steps */
        bool is_no_refusal; /* the client repeats it if it is refused: a refusal is not counted */
        void *requester;    /* its session, for upcalls.trim(); may be NULL */
        /* Only the quota uses what follows. */
        uint64_t since_ms;  /* the start of its wait */
        uint64_t since_ns;  /* the same, for statistics */
        uint64_t ticket;    /* the lower one has waited longer, in the whole partition */
        bool asked_again;   /* the other quotas were asked again when its time was up */
        bool has_reclaimed; /* memory was reclaimed for it, or a reclaim was started */
        bool has_grown;     /* extents were made for it */
        uint64_t queued_ms; /* since then it waits for other sessions' frees; 0: not yet */
        struct charge
                claim; /* what it gets before later requests, of the account that it lacks: not charged yet */
        struct quota_shortage lack;
        struct quota_asking asking;
        struct running_growth *growth; /* which is for it; NULL: it is in the queue */
        struct charge charge;          /* when done() is called: of a direct charge; the callee takes it */
        /* 0: the callee owns the block. -EDQUOT, -ENOMEM, -ENODEV, ... */
        void (*done)(struct quota_request *request, int result, bfc_handle handle, uint64_t offset);
        TAILQ_ENTRY(quota_request) link;
};
TAILQ_HEAD(quota_request_list, quota_request);

/* What the client is told, and what is counted: -ENOMEM, whatever the device lacked. */
static inline int quota_request_error(const struct quota_request *request, int result)
{
        return request->device_failed && result != -ENODEV ? -ENOMEM : result;
}

/* Waiting requests; looked at in rounds. */
struct quota_queue {
        struct quota_request_list requests;
        uint32_t n;                 /* requests, including those that the quota grows for */
        uint64_t n_bytes;           /* the sum of their sizes */
        struct quota_request *next; /* the next in this round; NULL: all were looked at */
        bool look_again;            /* something changed: begin a new round */
        bool is_deferred;           /* a later free did not make it due: see partition_look_again() */
        uint64_t blocked_ms;        /* since when requests are blocked by other sessions; 0: they are not */
        uint64_t least_bytes;       /* the smallest request; UINT64_MAX: none waits */
        uint64_t round_ms;          /* when the last round began */
        TAILQ_ENTRY(quota) of_due, of_waiting;
};

struct quota_growth {
        struct running_growth_list running;
        struct charge held;         /* for the growth of the first in line */
        uint64_t own_release_bytes; /* charged too when they are released */
        uint64_t high_bytes;        /* the most that was charged since the quota was last empty */
        uint64_t paused_until_ms;   /* 0: there is no pause */
        /* Of a tenant's quota, with its leases. */
        size_t n_claims;
        uint64_t claim_ms;     /* since when there have been claims without a growth; 0: never */
        uint64_t unclaimed_ms; /* when the last claim was lost */
        void (*backed)(struct quota *q, int result); /* NULL: nothing is being backed */
};

/* Places in the lists of the partition. */
struct quota_lists {
        bool has_freed; /* while the partition drains: since drain.c looked */
        TAILQ_ENTRY(quota) of_partition, of_releasing, of_freed, of_changed;
};

struct quota_sessions {
        uint32_t n;
        uint32_t n_told;      /* sessions that were told of the quota in their hello, joined or not */
        uint32_t n_closing;   /* of n, those that ended and whose blocks are being freed */
        uint64_t peaks_bytes; /* the sum of the sessions' peaks: what they may need again together */
        bool limit_changed;   /* the sessions are to be told */
        bool are_evicted;     /* its lease has ended, and the time for it has come */
};

struct quota_peaks { /* since the start or the last reset */
        uint64_t bytes_in_use;
        uint64_t in_use_ms; /* when: milliseconds since 1970; 0: never */
        uint64_t bytes_requested;
        /* Since the last record of them, see quota_take_window(). */
        uint64_t window_in_use;
        uint64_t window_ms;       /* when it began: milliseconds since 1970 */
        uint64_t window_refusals; /* those before it */
        bool window_is_used;      /* a block was made, or memory charged */
};

/* Peaks in an interval. */
struct quota_window {
        uint64_t begin_ms, end_ms; /* since 1970 */
        uint64_t peak_in_use, peak_charged;
        uint64_t n_refusals;
};

/* Of a quota with its leases. */
struct quota_sums {
        uint32_t n_blocks;
        uint32_t n_sessions;
        uint64_t bytes_in_use;
        uint64_t bytes_requested;
        uint64_t bytes_direct;
        uint64_t bytes_outside; /* see outside.h */
        uint64_t bytes_parked;  /* only of a tenant's quota; its arenas count here */
};

/* What is charged beside its arena. */
struct quota_extentless {
        struct charge closed;      /* for quota_options.closed_bytes */
        struct charge direct_left; /* for quota_options.direct_bytes: what no session has taken */
};

/* Of trim.h. */
struct quota_trim {
        struct trim_quota *state; /* NULL: it has no session of this quota */
        TAILQ_ENTRY(quota) of_asked;
};

/* Many fields: a quota is an account, a queue of requests, an arena's owner and a row of statistics, each a part below. */
struct quota {
        struct partition *partition;
        const char *tenant;     /* name, the tenant's own */
        const char *lease;      /* name, the lease's own; NULL: a tenant's */
        struct account account; /* below that of its tenant's quota, or of the partition */
        struct arena *arena;
        struct pages_entry *page; /* for its clients; NULL: none */
        uint32_t index;           /* in the ledger */
        uint32_t max_sessions;
        uint32_t max_blocks;
        bool is_removed; /* the config no longer has it, or the lease has ended; its sessions may stay */
        struct quota_sums all; /* of leases, too; see quota_own() */
        struct quota_extentless extentless;
        struct quota_peaks peaks;
        struct grants grants;
        struct returns returns; /* of its memory, to its own requests and others' */
        struct quota_sessions sessions;
        struct quota_queue queue;
        struct quota_growth growth;
        struct quota_lists lists;
        struct quota_usages usages; /* the session layer's */
        struct {
                uint64_t unreclaimed_bytes;
                bool may_be_unreclaimed; /* it counts in broker.unreclaimed */
                uint64_t recorded_ms;    /* when its peaks were a record, by accounting.h; 0: never */
        } logged;                        /* by the broker */
        struct quota_trim trim;
};

/* Of a lease: its tenant's quota. NULL: it is a tenant's. */
static inline struct quota *quota_parent(const struct quota *q)
{
        struct account *above = q->account.parent;

        return above && above->parent
                       ? (struct quota *)(void *)((char *)above - offsetof(struct quota, account))
                       : NULL;
}

/* Its peaks and counts of refusals, which outlive the daemon. */
static inline struct ledger_lifetime *quota_life(const struct quota *q)
{
        return &ledger_quota_at(q->partition->ledger, q->index)->life;
}

static inline uint64_t quota_n_refusals(const struct quota *q)
{
        return quota_life(q)->n_over_quota + quota_life(q)->n_out_of_memory;
}

/* Of a lease: nothing is charged any more. */
static inline bool quota_has_ended(const struct quota *q)
{
        return q->is_removed && quota_parent(q);
}

/* The account.n_children leases of a tenant's quota follow it in the partition's list, so that they are found without a look at
 * quotas of others. lease: q at first. */
const struct quota *quota_next_lease(const struct quota *lease, const struct quota *q);

/* The sums without those of its leases, at which it looks. */
struct quota_sums quota_own(const struct quota *q);

struct quota_options {
        const char *tenant;
        struct partition *partition;
        struct quota *parent;     /* of a lease; else NULL */
        const char *lease;        /* its name, which outlives the quota; or NULL */
        struct pages_entry *page; /* borrowed, outlives the quota; may be NULL */
        uint64_t limit_bytes;
        uint64_t reserve_bytes;
        uint32_t max_sessions;
        uint32_t max_blocks;
        uint64_t closed_bytes; /* in its permanently closed arenas: they stay charged */
};

/* What the ledger has of a quota; its limit is not below the bytes. See arena_restore(). */
struct quota_records {
        const struct arena_inherited *arena;
        uint32_t index;
        uint64_t extent_bytes;
        uint64_t direct_bytes; /* of its sessions, see quota_take_direct(), and unreclaimed */
};

/* The sizes of its arena's extents, as the ledger has them. */
struct extent_sizes quota_extent_sizes(const struct ledger_quota *record);

/* -ENOMEM. A preallocating partition is backed by quota_back_early(). */
int quota_new(const struct quota_options *options, struct quota **ret);

/* The quota of inherited records. Fails as arena_restore() does; ret_why: a sentence, if the records do not fit together. */
int quota_restore(const struct quota_options *options, const struct quota_records *records,
                  struct quota **ret, const char **ret_why);

/* There must be no session, block, request or operation. Takes NULL. */
struct quota *quota_free(struct quota *q);

/* Leaves its ledger records to the next daemon. There must be no session, request or operation. */
struct quota *quota_abandon(struct quota *q);

/* ---- limits ----------------------------------------------------------------- */

/* Changes limits while sessions use the quota. Charges beyond them stay until they are released, and
 * nothing grows meanwhile; free extents are released at once. Call quota_prepare_limit() first: -ENOTSUP:
 * the arena's extents are too small for the limit. Then this cannot fail. It undoes a removal.
 * The caller ensures that the pool has the reserve, see account_set(), and calls partition_set_limit()
 * last, which makes the waiting requests due. */
struct quota_limits {
        uint64_t limit_bytes;
        uint64_t reserve_bytes;
        uint32_t max_sessions;
        uint32_t max_blocks;
};
int quota_prepare_limit(struct quota *q, uint64_t limit_bytes);
void quota_set(struct quota *q, const struct quota_limits *limits);
void partition_set_limit(struct partition *p, uint64_t limit_bytes);

/* No session can join and nothing is guaranteed any more; joined sessions stay. The quota of a lease is also
 * charged no more than now, so its waiting requests are refused. */
void quota_remove(struct quota *q);
/* It was removed, its sessions have ended and nothing is left, so it can be freed. */
bool quota_is_gone(const struct quota *q);

/* ---- blocks ----------------------------------------------------------------- */

enum {
        QUOTA_WAIT = 1, /* it must wait: hand in a quota_request */
};

/* Allocates a block at once, inside one extent if required: 0, QUOTA_WAIT, or a refusal: -EINVAL (0
 * bytes, or more than an extent), -EDQUOT (max_blocks, or more than the limit), -ENOMEM (more than the
 * others' reserves ever leave), -ENODEV (the device is lost), -EBUSY (it is being drained). */
int quota_alloc(struct quota *q, uint64_t n_bytes, bool in_extent, bfc_handle *ret_handle,
                uint64_t *ret_offset);

/* quota_alloc() for a request that its client repeats after a refusal, which is not counted. */
int quota_alloc_or_again(struct quota *q, uint64_t n_bytes, bool in_extent, bfc_handle *ret_handle,
                         uint64_t *ret_offset);

/* Refuses a request for which released memory can never make room within the current limits: -EDQUOT,
 * -ENOMEM (counted). 0: it may be possible. */
int quota_refuse_at_once(struct quota *q, uint64_t n_bytes);

/* Frees a block: its rounded size, and the requested one. */
void quota_dealloc(struct quota *q, bfc_handle handle, uint64_t n_bytes, uint64_t n_requested);

/* The quota whose max_blocks are in use: it, or its tenant's. NULL: neither. */
const struct quota *quota_without_block(const struct quota *q);

/* Splits a block, see bfc_split(). -EDQUOT: max_blocks does not allow this one and n_more. -EINVAL,
 * -ENOMEM. */
int quota_split(struct quota *q, bfc_handle handle, uint64_t at, uint32_t n_more, bfc_handle *ret_high);

/* ---- parked blocks ------------------------------------------------------------ */

/* Whether a block on whole extents of its own can be waited for: QUOTA_WAIT, or a refusal as of
 * quota_alloc(), and -ENOTSUP: the partition cannot park blocks. again: as of quota_alloc_or_again(). */
int quota_alloc_whole(struct quota *q, uint64_t n_bytes, bool again);

/* Whether blocks of the partition can be parked at all. */
bool quota_can_park(const struct quota *q);

/* A block of n_bytes is parked: its extents are released, and count as such. It still counts for max_blocks.
 * -ENOMEM. A quota_request with `wakes` wakes it. */
int quota_park(struct quota *q, bfc_handle handle, uint64_t n_bytes);

/* The end of a wake whose request was served, before the block is freed: its contents are back; or it stays parked.
 * This cannot fail. The first does nothing to a block that does not wake. */
void quota_wake_commit(struct quota *q, bfc_handle handle);
void quota_wake_undo(struct quota *q, bfc_handle handle, uint64_t n_bytes);

/* After a restart, when the sessions are restored: releases what parked blocks still have. -ENOMEM. */
int quota_release_parked(struct quota *q);

/* Releases the extents of exact blocks that were freed; see arena_release_exact(). */
void quota_release_exact(struct quota *q);

/* The quota that a lease is of; itself where it is none. */
struct quota *quota_of_tenant(const struct quota *q);

/* Whether the parked blocks stay within so many times the limit: each uses up space of the arena. Some jobs of one
 * tenant, each of nearly the limit, can take turns. Those of leases count to their tenant, too. */
#define QUOTA_PARKED_LIMITS 4u
bool quota_may_park(const struct quota *q, uint64_t n_bytes);

/* Frees a parked block. */
void quota_drop_parked(struct quota *q, bfc_handle handle);

/* ---- direct charges ------------------------------------------------------------- */

/* Whether a direct charge can be waited for: QUOTA_WAIT, or a refusal as of quota_alloc(). The quota_request has
 * `is_direct`. */
int quota_charge_direct(struct quota *q, uint64_t n_bytes, bool again);

/* A session has the charge of a request that was served: counts it in its own one. */
void quota_count_direct(struct quota *q, struct charge *own, struct charge *granted);

/* The session cannot have it. */
void quota_return_direct(struct quota *q, struct charge *granted);

/* As quota_count_direct(), for a session of the previous daemon, from quota_options.direct_bytes. -EBADMSG: there are not as many. */
int quota_take_direct(struct quota *q, uint64_t n_bytes, struct charge *own);

/* Drops n_bytes of a session's charge, at the session's word. */
void quota_drop_direct(struct quota *q, struct charge *own, uint64_t n_bytes);

/* Drops all of it, because its process has ended. On a GPU it stays charged until the device has been asked, and as
 * unreclaimed what the device seems not to have returned. */
void quota_end_direct(struct quota *q, struct charge *own);

/* Leaves it to the next daemon. */
void quota_leave_direct(struct quota *q, struct charge *own);

/* ---- waiting requests -------------------------------------------------------- */

/* Queues a request, whose first fields are set. */
void quota_wait(struct quota_request *request);

/* Removes a request in any state; done() is not called. */
void quota_cancel(struct quota_request *request);

/* A waiting request as lists show it. */
struct quota_waiting {
        const struct quota_request *request;
        uint64_t position;           /* in the quota, from 1 */
        uint64_t partition_position; /* of the quota's first, among the first of all quotas; 0: another one */
        uint64_t lacking_bytes;      /* to be returned for it and those before it; UINT64_MAX: not known */
        uint64_t waited_ms, left_ms;
        uint64_t estimate_ms; /* when it may be granted, by waits.h; RETURNS_UNKNOWN */
        uint64_t now_ms;
};

/* Begins with zeroes, and goes to the next request in the order of the queue, at most QUOTA_WAITING_SHOWN of
 * them. False: there is none. */
#define QUOTA_WAITING_SHOWN 1024u
bool quota_next_waiting(const struct quota *q, struct quota_waiting *w);

/* One turn for the requests of a quota in its partition's `due`; it stays there while there is more to do. */
void quota_turn(struct quota *q);

/* Makes each quota due whose first request waits for others; and whether there are any. */
void partition_tick(struct partition *p);
bool partition_is_blocked(const struct partition *p);

/* Makes each quota due whose look after a free was postponed. While there are any: call it QUOTA_ROUND_MS
 * later. */
#define QUOTA_ROUND_MS 2u /* between looks for frees in which no waiting request fits */
bool partition_is_deferred(const struct partition *p);
void partition_look_again(struct partition *p);

/* Sessions have answered: makes all waiting requests of the partition due. gave: they released memory of
 * this quota. */
void quota_note_answer(struct quota *q, bool gave);

/* Peaks since the last call, or since the start. False: nothing was allocated, charged or refused since, so there is
 * nothing to tell. */
bool quota_take_window(struct quota *q, struct quota_window *ret);

/* Writes the sentence for a refusal, with sizes, into buf. Reads quota, n_bytes and in_extent of the
 * request. */
void quota_explain(const struct quota_request *refused, int error, char *buf, size_t n_buf);

/* ---- release ----------------------------------------------------------------- */

/* Charges above lowered limits: its own, or those above as far as releasing helps that. */
uint64_t quota_excess(const struct quota *q);

/* Releases all free extents. */
void quota_release_idle(struct quota *q);

/* Releases at least n_bytes of extents that are expected to be unmapped in time, so that no session
 * without events is disconnected for it. Returns how much of the quota's is being released now, without
 * late bytes. */
uint64_t quota_release_soon(struct quota *q, uint64_t n_bytes);

/* A session has ended: the other sessions keep as much of its memory as their joint peak. Other free
 * extents are released, as far as no session has them mapped. */
void quota_release_surplus(struct quota *q);

/* The total bytes that further requests of the tenant can get, in blocks of any size: free space in its
 * extents, and new extents within its limit and the partition's. Bytes being released count, except late
 * ones. Claims of waiting requests, and others' idle memory, do not. */
uint64_t quota_obtainable(struct quota *q);

/* ---- sessions ----------------------------------------------------------------- */

/* -EDQUOT: max_sessions, see quota_without_session(). -ENOENT: it was removed. */
int quota_join(struct quota *q);
void quota_leave(struct quota *q);

/* The quota, or the one above it, that has as many sessions as it may have; NULL: none. */
const struct quota *quota_without_session(const struct quota *q);

/* A session that had joined before a restart; limits do not apply. */
void quota_rejoin(struct quota *q);

/* Without sessions: releases all free extents. */
void quota_release_unused(struct quota *q);

/* A joined session has ended and its blocks are being freed: requests wait for that instead of being
 * refused, until quota_closed(). */
void quota_closing(struct quota *q);
void quota_closed(struct quota *q);

/* ---- statistics ---------------------------------------------------------------- */

/* Inherited statistics of the quota, or of its partition: lifetime peaks and counts of refusals are at
 * least these from now on. */
void quota_restore_lifetime(struct quota *q, const struct ledger_lifetime *from);
void partition_restore_lifetime(struct partition *p, const struct ledger_lifetime *life);
/* All quotas of the partition record its peaks, so that they outlive the end of one quota. */
void partition_keep_life(struct partition *p);

void quota_clear_peaks(struct quota *q);

/* The next quota of the partition that changed since it was last asked for here; NULL: none. */
struct quota *partition_next_changed(struct partition *p);

/* Writes its statistics into its usage page entry. All functions that change them call it. */
void quota_publish(struct quota *q);

/* ---- devices --------------------------------------------------------------------- */

/* The partition's device is lost: its waiting requests are refused at the next turn, and all later ones
 * at once. */
void partition_lose(struct partition *p);

/* Adds to the goal what the partition's quotas make next. */
void partition_count_next(const struct partition *p, struct standby_goal *goal);

/* Tells standby memory how much the partition's quotas can still grow. Called before a growth that takes
 * of it. */
void partition_tell_standby(struct partition *p);

/* Draining begins, or ends (false): requests are refused, and free extents are released, including
 * preallocated ones. A free calls partition.turn.wake(). */
void partition_set_draining(struct partition *p, bool is_draining);

/* In a partition that is draining: there is no extent, and none is being made or released. */
bool quota_is_drained(const struct quota *q);

/* Its whole limit is backed in advance: of a tenant, in a preallocating partition. */
bool quota_is_preallocated(const struct quota *q);

/* Backs the missing part of a quota in a preallocating partition, on the caller's thread and before
 * sessions are served: as much as its partition has room for. The device's error, or -ENOMEM if there is
 * no room; extents that were made stay. */
int quota_back_early(struct quota *q);

/* quota_back_early() by the worker; done() is called from worker_poll(): 0, or the device's error, and nothing was
 * made. 0: started; QUOTA_WAIT: there is nothing to make, done() is not called. -EDQUOT or -ENOMEM:
 * unreclaimed memory is still charged. One at a time. */
int quota_back(struct quota *q, void (*done)(struct quota *q, int result));

/* The previous process was killed while it made memory for this quota: its tenant's quota there, with the leases, does
 * not grow for a minute, so that repeated requests do not kill every daemon. The remaining time of the pause; 0: none. */
#define QUOTA_PAUSE_MS 60000u
void quota_pause_growth(struct quota *q);
uint64_t quota_growth_pause_ms(const struct quota *q);

#endif
