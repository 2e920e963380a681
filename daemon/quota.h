/* A quota: one tenant's share of one partition. It decides what the arena only
 * carries out: who may have a block now, who waits, what is given back to make
 * room, and who is refused.
 *
 * A request that fits in backed space is served at once, also past others that
 * wait. Otherwise it waits in order, and the first in line gets room made: by
 * growth within the limits, after giving back wholly free extents, the tenant's
 * own first and, where the partition is short, those of its neighbours. When
 * nothing of that helps, or what is on its way back does not come within the
 * reclaim time-out, the request is refused; before that the neighbours who were not
 * asked yet are asked for all that it lacks, and it waits once more. One growth is
 * under way at a time, so that many small requests share one extent; what is given
 * back holds up nobody who does not need just that.
 *
 * Before a growth would take more than the tenant ever had, it gives back what
 * is wholly free: it trades extents. The room for the growth is charged before
 * they go, as far as they do not make it, and what they leave is charged again in
 * the same turn of the loop: no neighbour can come between, and the tenant never
 * has more charged than before or after. Extents of sessions that would not let go
 * of them in time are not traded: that is no reason to end anybody.
 *
 * Those who wait are looked at in turns, a bounded number in each, and only
 * there: so no request, however many wait, holds up the others, and done() is
 * never called inside another call.
 *
 * Invariant, asserted at every change:
 *   bytes_in_use <= charged extent bytes <= limit; n_blocks <= max_blocks
 * where a limit that was lowered counts as what was there then, as far as that has
 * not gone since (see account.h).
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_QUOTA_H
#define BFCD_QUOTA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>

#include "daemon/account.h"
#include "daemon/arena.h"
#include "daemon/ledger.h"
#include "daemon/pages.h"
#include "daemon/partition.h"

struct quota;
struct trim_quota;

/* What of a request's asking sessions for what lies idle in them is remembered. */
struct quota_asking {
        uint64_t begun_ms; /* 0: nobody was asked */
        uint64_t heard_ms; /* when somebody gave back something; 0: nobody did */
        unsigned n_gave;   /* how often that was */
        uint64_t clock;    /* the rest is for who asks: quota_options.trim() */
        unsigned n_round;
        unsigned n_vain; /* sessions that were looked at in vain */
};

/* A request that waits. Embedded by the session; it leaves the queue before
 * done() is called, or by quota_cancel(). */
struct quota_request {
        struct quota *quota;
        uint64_t n_bytes;
        bool in_extent;     /* the block must lie in one extent */
        bool device_failed; /* result: the device could not, the limits could */
        uint32_t wait_ms;   /* for others to free, when the ladder has nothing more */
        bool is_no_refusal; /* where it is refused another follows: that is not counted */
        void *asker;        /* whose it is, for quota_options.trim; may be NULL */
        uint64_t since_ms;  /* the quota's: it waits from then on */
        uint64_t ticket;    /* the quota's: the lower has waited longer, in the whole partition */
        bool asked_again;   /* the quota's: the neighbours were, when its time was up */
        bool has_recalled;  /* the quota's: the device had no memory for it, so what was kept was released */
        uint64_t queued_ms; /* the ladder's: from then on it waits for others to free; 0: not yet */
        uint64_t claim;     /* the ladder's: so many bytes of the partition it is to have before later ones */
        struct quota_asking asking; /* the ladder's */
        /* 0: the block is the callee's. -EDQUOT, -ENOMEM, -ENODEV, ... */
        void (*done)(struct quota_request *request, int result, bfc_handle handle, uint64_t offset);
        TAILQ_ENTRY(quota_request) link;
};
TAILQ_HEAD(quota_request_list, quota_request);

/* What a session has of a quota, and who has the most: the session floor's, see holding.h. */
struct holding;
TAILQ_HEAD(holding_list, holding);
#define QUOTA_RANKS 3u
struct quota_ranks {
        uint64_t since_ms; /* 0: never looked for */
        struct holding *by_bytes[QUOTA_RANKS], *by_blocks[QUOTA_RANKS];
};

/* What is costly in a report, for whoever asks next: explain.c's. */
#define QUOTA_HOLDERS 16u
struct quota_report {
        uint64_t since_ms;
        struct holding *most[QUOTA_HOLDERS];
        uint64_t idle_bytes[QUOTA_HOLDERS]; /* theirs, by their clients' word then */
        char picture[PICTURE_CHARACTERS + 1];
};

struct quota {
        struct partition *partition;
        const char *tenant; /* name, the config's */
        struct account account;
        struct arena *arena;
        struct ledger *ledger;
        struct pages_entry *usage; /* where its clients read its figures; NULL: nowhere */
        uint32_t index;            /* in the ledger */
        uint32_t max_sessions;
        uint32_t max_blocks;
        uint32_t blocks_ceiling; /* max_blocks, or what there was when it was lowered */
        bool is_removed;         /* the config has it no more: who is in it may stay */
        bool is_left;            /* a successor is to have it: nothing is given back */
        bool limit_changed;      /* whoever changed it is to tell the sessions */
        uint32_t n_shares;       /* sessions that were told of it, joined or not */
        uint32_t n_sessions;
        uint32_t n_closing; /* sessions that are gone and whose blocks are being freed */
        uint32_t n_blocks;
        uint64_t bytes_in_use;
        uint64_t bytes_requested;
        uint64_t peak_bytes_in_use; /* since the start or the last reset */
        uint64_t peak_in_use_ms;    /* when: milliseconds since 1970; 0: never */
        uint64_t peak_bytes_requested;
        uint64_t n_refusals; /* == n_over_quota + n_out_of_memory */
        uint64_t n_over_quota;
        uint64_t n_out_of_memory;
        uint64_t last_refusal_ms;      /* since 1970; 0: none */
        uint64_t logged_escaped_bytes; /* the broker's: what it has told of */
        uint64_t logged_refills;       /* the same of the arena's refills */
        uint64_t high_bytes;           /* most that was charged since nothing was */
        uint64_t peaks_bytes;          /* the sum of its sessions' peaks: what they may need again together */
        uint64_t keep_bytes, keep_ms;  /* the config's `keep`; 0: nothing */
        uint64_t kept_until_ms;        /* 0: nothing is kept. Else it is one of partition.keepers */
        bool is_recalled;              /* it counts in keepers.n_recalled */
        struct charge closed;          /* for quota_options.closed_bytes */
        struct charge held;            /* for the growth of the first in line */
        uint64_t trade_bytes;          /* to be held too, as they come back */
        bool growing;
        uint64_t paused_until_ms;          /* no growth before; 0: there is no pause */
        struct quota_request *growing_for; /* NULL: it was cancelled */
        uint64_t claim_ms;     /* since when its requests have claims, and none of them grew; 0: never */
        uint64_t unclaimed_ms; /* when it last had none any more */
        struct quota_request_list waiting;
        uint32_t n_waiting;         /* requests, with the one that it grows for */
        struct quota_request *next; /* to be looked at in this round; NULL: all were */
        bool is_due;                /* in partition.due */
        bool is_changed;            /* in partition.changed */
        bool is_releasing;          /* in partition.releasing */
        bool may_have_free;         /* in partition.freed: set by a free, cleared by a look that finds none */
        bool look_again;            /* something changed: begin a new round */
        uint64_t blocked_ms;        /* since when those who wait are blocked by others; 0: they are not */
        uint64_t least_bytes;       /* no waiting request asks for less; UINT64_MAX: none waits */
        uint64_t round_ms;          /* when the last round began */
        bool is_put_off;            /* a free since then has not made it due: see partition_look_again() */
        struct holding_list holdings;
        struct quota_ranks ranks;
        struct quota_report *report; /* NULL: there was none */
        bool has_freed;              /* while its partition drains: since it was looked at */
        void (*backed)(void *userdata, struct quota *q, int result); /* NULL: nothing is being backed */
        void *backed_userdata;
        struct trim_quota *asked; /* the trimming's, see trim.h; NULL: it knows no session of it */
        bool may_have_idle;       /* the same: it is in partition.asked */
        bool (*trim)(void *userdata, struct quota *q, struct quota_request *first, int refusal,
                     uint64_t missing);
        void *userdata;
        TAILQ_ENTRY(quota)
        of_partition, of_due, of_waiting, of_kept, of_releasing, of_freed, of_asked, of_changed;
};

struct quota_options {
        const char *tenant;
        struct partition *partition;
        struct ledger *ledger;
        struct pages_entry *usage; /* borrowed, outlives the quota; may be NULL */
        uint64_t limit_bytes;
        uint64_t reserve_bytes;
        uint32_t max_sessions;
        uint32_t max_blocks;
        uint64_t keep_bytes, keep_ms; /* 0: nothing is kept */
        /* What a process that is no more left of it, under `index` in the ledger, with so many bytes
         * in its extents; the limit is not below that. NULL: it is a new one. See arena_restore(). */
        const struct arena_remains *remains;
        uint32_t index;
        uint64_t remains_bytes;
        const char **ret_why;  /* its sentence, where they do not fit together */
        uint64_t closed_bytes; /* in arenas of its that are closed for good: charged, for they are not back */
        bool is_backed_later;  /* by quota_back_early() */
        void (*retire)(void *userdata, const uint32_t *extents, size_t n_extents); /* see arena.h */
        bool (*lets_go)(void *userdata, uint32_t extent);                          /* see arena.h */
        /* The first in line is about to be refused: it lacks so many bytes, of its quota
         * (-EDQUOT) or of the partition (-ENOMEM). Asks sessions for what lies idle in
         * them, more with each call. False: nobody is left to ask, and all have answered.
         * May be NULL. Nothing of a quota may be called in it but quota_surplus(). */
        bool (*trim)(void *userdata, struct quota *q, struct quota_request *first, int refusal,
                     uint64_t missing);
        void *userdata;
};

/* The grid of its arena, as the ledger has it. */
struct arena_grid quota_grid(const struct ledger_quota *record);

/* -ENOMEM, or the device's error where a preallocating partition could not be
 * backed; of remains, what arena_restore() says. */
int quota_new(const struct quota_options *options, struct quota **ret);

/* No session, block, request or operation may be left. Takes NULL. */
struct quota *quota_free(struct quota *q);

/* Ends it as the end of this process would: a successor goes on with what is in the ledger. No
 * session, request or operation may be left. */
struct quota *quota_abandon(struct quota *q);

/* Changes limits while everything goes on. What is held beyond them stays until it is
 * given back, and nothing grows meanwhile; what lies wholly free goes back at
 * once. quota_prepare_limit() makes room for the limit and comes first (-ENOMEM,
 * and nothing has changed; -ENOTSUP: the arena's extents are too small for it);
 * then this cannot fail. Ends a removal. Whether the pool has the reserve is the
 * caller's business: see account_set(). Those who wait are looked at by
 * partition_set_limit(), which comes last. */
struct quota_limits {
        uint64_t limit_bytes;
        uint64_t reserve_bytes;
        uint32_t max_sessions;
        uint32_t max_blocks;
        uint64_t keep_bytes, keep_ms;
};
int quota_prepare_limit(struct quota *q, uint64_t limit_bytes);
void quota_set(struct quota *q, const struct quota_limits *limits);

/* The same before sessions are there: what lies free goes back by quota_settle(). */
void quota_set_early(struct quota *q, const struct quota_limits *limits);
void partition_set_limit(struct partition *p, uint64_t limit_bytes, uint64_t reclaim_timeout_ms);

/* Nobody joins any more and nothing is guaranteed; those who have joined go on. And:
 * they all have gone, with all that was theirs: free it. */
void quota_remove(struct quota *q);
bool quota_is_gone(const struct quota *q);

enum {
        QUOTA_WAIT = 1, /* it must wait: hand in a quota_request */
};

/* A block at once, inside one extent if it must: 0, QUOTA_WAIT, or a refusal:
 * -EINVAL (0 bytes, or more than an extent has), -EDQUOT (max_blocks, or more than
 * the limit), -ENOMEM (more than the others' reserves ever leave), -ENODEV (the device is lost),
 * -EBUSY (it is being drained). */
int quota_alloc(struct quota *q, uint64_t n_bytes, bool in_extent, bfc_handle *ret_handle,
                uint64_t *ret_offset);

/* The same for one that its client asks for again where this is refused: that is not counted. */
int quota_alloc_or_again(struct quota *q, uint64_t n_bytes, bool in_extent, bfc_handle *ret_handle,
                         uint64_t *ret_offset);

/* Whether no memory that is given back makes room for so many bytes, by the limits as they are: 0, -EDQUOT,
 * -ENOMEM. And: such a request is refused, which is counted. */
int quota_never_holds(const struct quota *q, uint64_t n_bytes);
int quota_refuse_at_once(struct quota *q, uint64_t n_bytes);

/* Queues a request (quota, n_bytes, in_extent, wait_ms, is_no_refusal, asker and done are set). */
void quota_wait(struct quota_request *request);

/* One turn for those who wait, for a quota in its partition's `due`; it stays
 * there while there is more to do at once. */
void quota_turn(struct quota *q);

/* Time has passed: looks at each quota whose first request waits for others, and again. */
void partition_tick(struct partition *p);

/* Looks at each quota for which the look after a free was put off. While there are any: call it
 * QUOTA_ROUND_MS later. */
#define QUOTA_ROUND_MS 2u /* between looks for frees in which no request that waits fits */
bool partition_is_put_off(const struct partition *p);
void partition_look_again(struct partition *p);

/* Whether partition_tick() is to be called. */
bool partition_is_blocked(const struct partition *p);

/* Sessions have answered: everybody in the partition who waits is looked at. gave: of this
 * quota's memory something came back by it. */
void quota_heard(struct quota *q, bool gave);

/* What it holds beyond what its reserve keeps anyway: only that can come back to its pool. */
uint64_t quota_surplus(const struct quota *q);

/* What it holds beyond limits that came down: its own, or its partition's as far as it helps that. */
uint64_t quota_excess(const struct quota *q);

/* Gives back to the device all extents in which nothing lies. */
void quota_release_idle(struct quota *q);

/* The same with at least n_bytes of those that are expected to be back soon, so that no session ends
 * by it. Returns how much of the quota's is on its way back by now, late bytes not counted. */
uint64_t quota_release_soon(struct quota *q, uint64_t n_bytes);

/* How many bytes further requests of the tenant can get in all, in blocks of whatever size: what is
 * free in its extents, and new extents as far as its limit and the partition's have room. What is on
 * its way back counts, but for late bytes. What waiting requests claim, and what others hold idle,
 * does not. */
uint64_t quota_obtainable(struct quota *q);
/* A session has ended: of what it leaves, the sessions that go on keep as much as they ever had together. What
 * else is wholly free is given back, as far as no session has it mapped: so none of them is asked. */
void quota_release_surplus(struct quota *q);

/* A session that had blocks has ended: for the next keep_ms the quota keeps keep_bytes, in whole
 * extents, of what would be given back otherwise: those with the lowest offsets. They stay
 * charged and are idle memory like any other: every reclaim step takes them. */
void quota_keep(struct quota *q);

/* How much it keeps now, and for how long yet; 0 outside of that time. */
uint64_t quota_kept_bytes(const struct quota *q);
uint64_t quota_kept_ms(const struct quota *q);

/* Gives back what was kept for long enough, of a bounded number of quotas: call it when the time of the
 * first has passed. */
void quota_expire_kept(struct keepers *keepers);

/* Takes a request out, whatever state it is in; done() is not called. */
void quota_cancel(struct quota_request *request);

/* Frees a block that was handed out: its rounded size and as it was asked for. */
void quota_dealloc(struct quota *q, bfc_handle handle, uint64_t n_bytes, uint64_t n_requested);

/* Cuts a block in two, see bfc_split(). -EDQUOT: max_blocks does not hold this one and n_more. -EINVAL,
 * -ENOMEM. */
int quota_split(struct quota *q, bfc_handle handle, uint64_t at, uint32_t n_more, bfc_handle *ret_high);

/* Sessions that use this quota. -EDQUOT: max_sessions. -ENOENT: it was removed. */
int quota_join(struct quota *q);
void quota_leave(struct quota *q);

/* A session that had joined before a restart; no limit counts. And: all of them have, so what
 * nobody is there for goes back. */
void quota_rejoin(struct quota *q);
void quota_settle(struct quota *q);

/* A joined session is gone and its blocks are being freed; requests wait for
 * that rather than being refused. And: they all are. */
void quota_closing(struct quota *q);
void quota_closed(struct quota *q);

/* What a process before kept of the quota, or of its partition: lifetime peaks and counts of refusals are at
 * least that from now on. And: all quotas of the partition keep its peaks, so that the end of one of
 * them does not lose them. */
void quota_adopt_life(struct quota *q, const struct ledger_lifetime *from);
void partition_adopt_life(struct partition *p, const struct ledger_lifetime *life);
void partition_keep_life(struct partition *p);

/* The sentence for a refusal, with figures, into buf. Of the request quota, n_bytes
 * and in_extent are read. */
void quota_explain(const struct quota_request *refused, int error, char *buf, size_t n_buf);

void quota_clear_peaks(struct quota *q);

/* The next quota of the partition that changed since it was last asked for here; NULL: none. */
struct quota *partition_next_changed(struct partition *p);

/* Writes its figures where its clients read them. All that changes them does so itself. */
void quota_publish(struct quota *q);

/* The partition's device is lost: who waits in it is refused at the next turn,
 * and everybody from now on. */
void partition_lose(struct partition *p);

/* How much the partition's quotas can grow yet is what standby memory may be there for. Called before a
 * growth begins that takes of it. */
void partition_tell_standby(struct partition *p);

/* The same where it is to be given up for a while, until false is said; and what nobody uses goes
 * back, also what was made in advance. Those who free call partition.wake(). */
void partition_set_draining(struct partition *p, bool is_draining);

/* Of a partition that is draining. */
bool quota_is_drained(const struct quota *q); /* nothing is there, and nothing on its way */

/* Makes at once, on the caller's thread and before sessions are served, what a quota of a partition that
 * preallocates has in advance and lacks: as much of it as its partition has for it. The device's error, or
 * -ENOMEM where there is nothing for it; what was made stays. */
int quota_back_early(struct quota *q);

/* Makes by the worker what a quota of a partition that preallocates has in advance and lacks; done()
 * is called from worker_poll(): 0, or the device's error, and nothing was made. 0: so it is;
 * QUOTA_WAIT: there is nothing to make, done() is not called. -EDQUOT or -ENOMEM: what escaped
 * is still charged. One at a time. */
int quota_back(struct quota *q, void (*done)(void *userdata, struct quota *q, int result), void *userdata);

/* The process before died while it made memory for this quota: it is given no more for a minute, so
 * that not every request ends a daemon. How long the pause still lasts; 0: there is none. */
#define QUOTA_PAUSE_MS 60000u
void quota_pause_growth(struct quota *q);
uint64_t quota_growth_pause_ms(const struct quota *q);

/* Charges, blocks and figures agree; slow. 0, or -EBADMSG and a sentence. */
int quota_check(const struct quota *q, const char **ret_why);

#endif
