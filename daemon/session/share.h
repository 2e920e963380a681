/* A session's share of a quota: its slots, its blocks and its usage there.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_SHARE_H
#define BFCD_SHARE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/session/pressure.h"
#include "daemon/session/trim.h"
#include "daemon/ledger/ledger.h"
#include "daemon/session/usage.h"

struct session;

/* The session has no write access to the extent. Ids count up from 1 and never have this bit. */
#define SEEN_READ_ONLY (UINT64_C(1) << 63)
#define SEEN_UNMAPPED  (UINT64_C(1) << 62) /* the client has unmapped it, and gets it again when it needs it */

struct session_share {
        struct quota *quota;
        bool joined;
        bool is_barred;      /* no lease or quota could be chosen: it cannot join; quota: the tenant's */
        struct usage usage;  /* once it joined */
        uint64_t peak_bytes; /* largest usage; counted in quota.peaks_bytes */
        uint64_t *seen;      /* by slot: the id of the extent that was exported, or 0; with these flags */
        size_t n_seen;
        uint64_t listed_direct_bytes; /* while the session is resumed: what the client says that it charged */
        bool is_direct_listed;
        bool is_measured, is_outside_logged; /* outside_bytes was, see outside.h */
        uint64_t outside_bytes;
        struct trim_share trim;
        struct pressure_share pressure;
};

/* One share for each quota of the session's tenant, or for the lease in it that the session matches. Where
 * none can be chosen, or the lease has ended, the session gets no memory; in the session's default partition that is an
 * error, and the sentence says why. partition: the default; "": the tenant's first. -ENOMEM. */
int session_take_shares(struct session *s, const char *partition, char *sentence, size_t n_sentence);

/* session_take_shares() for a session of the previous daemon: it had the quotas with ids below quotas_end, and
 * leases. */
int session_take_shares_again(struct session *s, const struct ledger_session *record);

/* Notes in the record of a new session which leases it is in. */
void session_note_leases(const struct session *s, struct ledger_session *facts);
void session_leave_shares(struct session *s);

/* By the quota's index in the ledger. NULL: the quota was added after the hello. */
struct session_share *session_share_of(const struct session *s, uint32_t quota);

/* By the partition's name; the first share for "". -ENOENT. */
int session_find_share(const struct session *s, const char *partition, size_t *ret);

/* Joins the quota, unless it has. On failure the request `id` has been refused. */
int session_join(struct session *s, struct session_share *share, uint64_t id);

/* session_join() for a session of the previous daemon, whatever the limits say now. -ENOMEM. */
int session_rejoin(struct session *s, struct session_share *share);

/* Makes `seen` as long as the arena has slots. -ENOMEM. */
int session_reserve_seen(struct session_share *share);

/* Counts a block of the session. */
void session_add_block(struct session *s, struct session_share *share, uint64_t offset, uint64_t n_bytes);

/* Frees a block of the session. */
void session_remove_block(struct session *s, struct session_share *share, uint64_t offset, uint64_t n_bytes);

/* Frees a block of the session: its record and its memory. */
void session_free_block(struct session *s, uint32_t index);

/* The session has freed all its blocks: its peaks no longer count. */
void session_forget_peaks(struct session *s);

#endif
