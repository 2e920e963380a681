/* Retirement: where a device cannot empty the mappings of an extent, every
 * session that was given it is told to let go of it, and the extent is destroyed
 * when the last one has confirmed, or is gone.
 *
 * A session is told by Retire events of 64 extents at most, of which 16 may be
 * unanswered; what is more waits here. It is told of an extent only after it has
 * acknowledged all Extents sent so far, so it never has to let go of what it has
 * not seen. Who has not confirmed within the release time-out is late: nobody waits
 * for its extents any more until it has confirmed all it was told, but it stays a
 * session, since only its process knows how long its work takes. Who takes no events
 * could never confirm, and is ended then; its memory comes back as after any hang-up.
 *
 * Invariants: n_open == retirements of the session that were sent; each of their
 * exports is the session's and of a retired extent; only a LIVE session has any.
 * Of a retired extent, the late exports are those of sessions that are silent.
 * Retirements of a late session have no deadline, all others have.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_RETIRE_H
#define BFCD_RETIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>

#include "daemon/broker.h"

#define RETIRE_MAX_EXTENTS 64u /* in one event */
#define RETIRE_MAX_OPEN    16u /* events sent and not confirmed */

struct session;

/* A session's part. */
struct retire {
        struct retirement_list open; /* in order; those that were sent come first */
        unsigned n_open;
        uint64_t sequence; /* of the last Retire */
        bool silent;       /* it answers none: without events, ended, or late */
};

/* Of a new session; and once it has said hello, whether it takes events. */
void retire_init(struct retire *r);
void retire_begin(struct session *s, bool has_events);

/* The same for one that has come back and is LIVE: until now it could be told nothing, so of
 * what was retired meanwhile it is told as one that is late. */
void retire_begin_late(struct session *s, bool has_events);

/* For broker_options.retire. */
void retire_extents(struct broker *b, const uint32_t *extents, size_t n_extents);

/* For broker_options.lets_go: no session that has this extent takes no events, is
 * late, or has hung up. */
bool retire_lets_go(const struct broker *b, uint32_t extent);

/* The session has acknowledged more extents. */
void retire_flush(struct session *s);

/* Its confirmation. -EPROTO: of nothing that it was told, or not for the first
 * time; *ret_why says so. */
int retire_confirm(struct session *s, uint64_t sequence, const char **ret_why);

/* It hung up; what it holds is late. And: it closes, so that what it holds is on
 * its way back. */
void retire_silence(struct session *s);
void retire_end(struct session *s);

/* The session has one extent less; the way in which every export ends. */
void retire_clear_export(struct session *s, uint32_t export);

/* Sessions whose time is up are late, or ended where they take no events. */
void retire_tick(struct broker *b, uint64_t now_ms);

/* Every invariant; slow. 0, or -EBADMSG and a sentence. */
int retire_check(const struct broker *b, const char **ret_why);

#endif
