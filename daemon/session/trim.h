/* What clients could return: the lists of sessions that can be asked for memory (see recall.h), and what a Trim can ask
 * for.
 *
 * A Trim asks for ranges that would become wholly free: extents that contain only blocks of sessions that answer. To
 * find them without a look at blocks, blocks are counted by slot of their arena (see arena.h): all, those of sessions
 * that answer, and each session's own. A session without a range is skipped until a block of its quota is added or
 * removed, or a session becomes unresponsive or answers again.
 *
 * Invariants: of a slot, n_responsive is the sum of n_own over the listed shares without an overdue Trim, and
 * n_responsive <= n_all; a share is listed only while its session is LIVE and takes events; n_open counts the Trims with
 * a deadline, n_pressed the shares of a partition's list.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_TRIM_H
#define BFCD_TRIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/session/session.h"

#define TRIM_MAX_RANGES 64u   /* in one event */
#define TRIM_MAX_SLOTS  4096u /* for the ranges of one session */

/* Of a quota. */
struct trim_quota {
        struct recall_share_list shares;
        size_t n_shares;
        size_t n_open;    /* Trims with a deadline */
        uint64_t sent_ms; /* the last of all */
        uint64_t n_blocks;
        uint64_t n_changes; /* of anything that decides what can be asked for */
        size_t n_empty;     /* shares that were found to have no range since the last change */
        struct trim_slot *slots;
        size_t n_slots;
};

/* The session has one more block in that quota, or one fewer. */
void trim_add_block(struct session *s, struct session_share *share, uint64_t offset, uint64_t n_bytes);
void trim_remove_block(struct session_share *share, uint64_t offset, uint64_t n_bytes);

/* One of its blocks was split into two. */
void trim_split_block(struct session *s, struct session_share *share, uint64_t offset, uint64_t n_bytes,
                      uint64_t at);

/* A block is shared from now on, so no single session can return it; and a shared block was freed. */
void trim_publish_block(struct session_share *share, uint64_t offset, uint64_t n_bytes);
void trim_remove_shared_block(struct quota *q, uint64_t offset, uint64_t n_bytes);

/* After a restart: blocks of a session are added as new ones; this adds a shared block; and a resumed
 * session answers from now on. */
void trim_add_shared_block(struct quota *q, uint64_t offset, uint64_t n_bytes);
void trim_begin(struct session *s);

/* The session's share is not listed any more: it will not answer. */
void trim_unlist(struct trim_share *share);

/* The session has joined the quota: it can be pressed, if it takes events. */
void trim_list_pressed(struct session *s, struct session_share *share);
void trim_unlist_pressed(struct session_share *share);

/* Drops all counts of the quota, which has no session. */
void trim_forget(struct quota *q);

/* Frees the session's counts in a quota. */
void trim_share_free(struct session_share *share);

/* Whether its session answers a Trim; and that it does from now on, or does not. */
bool trim_is_responsive(const struct trim_share *share);
void trim_count_responsive(struct trim_share *share, bool responsive);

/* The partition's list of quotas whose sessions may have idle memory. */
void trim_quota_list(struct quota *q);
void trim_quota_unlist(struct quota *q);

struct trim_ranges {
        size_t n;
        Bfcd__TrimRange ranges[TRIM_MAX_RANGES];
        bool alone[TRIM_MAX_RANGES]; /* all blocks there are the session's own */
        Bfcd__TrimRange *pointers[TRIM_MAX_RANGES];
};

/* Finds ranges from the share's cursor on. Moves the cursor behind them; at the end it is 0. */
void trim_find_ranges(struct trim_share *share, struct trim_ranges *ret);
bool trim_has_ranges(const struct trim_share *share);

/* Every invariant; slow. NULL, or a sentence. */
const char *trim_check_quota(const struct quota *q);
const char *trim_check_partition(const struct partition *p);

#endif
