/* Recalls: an event asks a client to give memory back, and the client has a time-out to answer it.
 *
 * There are three kinds: a Retire has extents unmapped, a Pressure has blocks parked and what programs can spare given
 * back, a Trim has idle memory of the client's cache returned. A recall begins, is sent under the session's next
 * sequence number, and ends with the answer to that number or with the session. The recalls of one kind have the same
 * time-out, so each of the broker's lists is in the order of its deadlines.
 *
 * A recall that is not answered in time is overdue: it loses its deadline and stays open. The client is unresponsive
 * then, and its kind decides what that means.
 *
 * Whom a Pressure or a Trim asks is decided by one search, for a request that is about to be refused. Where a tenant's
 * quota is short (-EDQUOT) its own sessions are asked; where the partition is full (-ENOMEM) so are those of quotas above
 * their guarantees. A client's page is a hint: it decides who is asked, and in which order. What counts is what was
 * released, never what an answer claims. A session has one open recall of a kind in each partition. One that had
 * nothing is not asked again for the requests that wait. Each call looks at a bounded number of sessions, slots and
 * pages; the next one continues.
 *
 * Invariants: only a LIVE session has recalls; in its queue those that were sent come first, by ascending sequence; a
 * recall is in the broker's list exactly while it has a deadline; those without one come first in a session's queue, and
 * tenant.n_unresponsive counts the sessions that have any.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_RECALL_H
#define BFCD_RECALL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/session/session.h"
#include "proto/bfcd.pb-c.h"

#define RECALL_MAX_LOOKS 256u /* at sessions, in one call */
#define RECALL_MAX_READS 32u  /* of clients' pages, in one call */
#define RECALL_MAX_ROUND 16u  /* sessions asked at once */
#define RECALL_HINT_MS   20u  /* a client's page is read again after that */

struct broker_device;

void recall_init(struct recall_state *state);

/* The client answers. -EPROTO: no such open recall; *ret_why says so. */
int recall_answer(struct session *s, uint64_t sequence, const char **ret_why);

/* The session was resumed, and is LIVE: it answers from now on. */
void recall_begin_resumed(struct session *s);

/* The session will answer no Trim and no Pressure any more. */
void recall_end_session(struct session *s);

/* Marks recalls overdue whose time is up. */
void recall_tick(struct broker *b, uint64_t now_ms);

/* Every invariant of one kind; slow. 0, or -EBADMSG and a sentence. */
int retire_check(const struct broker *b, const char **ret_why);
int trim_check(const struct broker *b, const char **ret_why);
int pressure_check(const struct broker *b, const char **ret_why);

/* ---- retirement ------------------------------------------------------------------ */

/* Retirement: if a device cannot empty the mappings of an extent, every session that received the extent
 * is asked to unmap it. The extent is destroyed when the last session has confirmed or ended.
 *
 * A retirement is the recall of at most 64 extents from one session. At most 16
 * retirements of a session are sent and unconfirmed; further ones wait here. A retirement is sent only
 * after all earlier Extents messages were acknowledged, so a client knows each extent that it unmaps.
 *
 * A client that has not confirmed after RETIRE_TIMEOUT_MS is marked unresponsive. Its extents are not waited for until it
 * has confirmed all of its retirements. The session continues, because only its process knows how long
 * its work takes. A session without events could never confirm, so it is disconnected instead.
 *
 * Invariants: each export of a retirement belongs to its session and to a retired extent. An export of a
 * retired extent is late if its session has `ignores_retires`. The retirements of such a session have no
 * deadline if it has events; all others have one. */

#define RETIRE_MAX_EXTENTS 64u /* in one event */
#define RETIRE_MAX_OPEN    16u /* events sent and not confirmed */
#define RETIRE_TIMEOUT_MS  5000u

/* Its hello is granted; whether it takes events is known. */
void retire_begin(struct session *s);

/* For upcalls. */
void retire_extents(struct broker *b, const uint32_t *extents, size_t n_extents);
bool retire_unmaps_soon(const struct broker *b, uint32_t extent);

/* The session has acknowledged more extents, so further retirements may be sent. */
void retire_flush(struct session *s);

/* The session hung up, so its mappings are late. */
void retire_silence(struct session *s);
/* The session closes, which clears its exports anyway. */
void retire_end(struct session *s);

/* Clears an export of the session. All exports are cleared by this. */
void retire_clear_export(struct session *s, uint32_t export);

/* ---- pressure ---------------------------------------------------------------------- */

/* A session is asked to park blocks if its client's page says that parkable blocks have been idle for the time in the
 * `park` key of its quota, and to give back what its program can spare if that has a function for this. Those come first
 * whose blocks have been idle longest, then those with functions, the highest above its guarantee first. As many are
 * asked as seem to be needed; one that releases too slowly is not waited for. A client that does not answer within
 * PRESSURE_TIMEOUT_MS is unresponsive: it is skipped until it answers. Nothing is taken from a quota whose own requests
 * have waited longer: of two that need more than there is, the older gets all. */

#define PRESSURE_TIMEOUT_MS 60000u /* copies take long */

/* For upcalls; see upcalls.h. */
bool pressure_ask(struct broker *b, struct quota *q, struct quota_request *first, const struct account *scope,
                  uint64_t missing);

/* A new or resumed session takes events: in the quotas that it has joined it can be pressed. */
void pressure_begin(struct session *s);

/* ---- trimming ---------------------------------------------------------------------- */

/* Before a request is refused, sessions are asked to return idle memory of their clients' caches, in ranges that would
 * become wholly free (trim.h). The requesting session comes first, then those with the most idle memory. One is asked,
 * then two more, then four, until enough was freed; slow ones are not waited for. A session that does not answer within
 * `timeouts.reclaim` is unresponsive: it is skipped, and its extents are not counted on, until it answers. */

/* Asks for n_bytes of idle memory. False: it cannot be asked now, or has no range. */
bool trim_send(struct trim_share *share, uint64_t n_bytes, uint64_t now_ms);

/* For upcalls; see upcalls.h. */
bool trim_ask(struct broker *b, struct quota *q, struct quota_request *first, const struct account *scope,
              uint64_t missing);
bool trim_is_asked(const struct quota *q, const struct session *s);
void trim_excess(struct broker *b, struct quota *q, uint64_t n_bytes);

/* ---- admin commands ------------------------------------------------------------------ */

/* Admin commands that ask many sessions: trim, park and wake, and the trim of a drain.
 *
 * A command asks all sessions that match, 32 at a time, in each matching partition: by a Trim, or to park or wake by a
 * Pressure. A session that has another open one there is left out. The command is answered when each of them has
 * answered or is unresponsive, a trim also when enough was freed. At the end of a trim the wholly free extents are
 * returned to the device. */

#define RECALL_COMMAND_MAX_OPEN 32u /* unanswered events of one command */
#define RECALL_COMMAND_LOOKS    64u /* sessions looked at in one tick of a drain */

/* The handlers of TrimNow and ParkNow. */
int handle_trim_now(struct session *s, const Bfcd__Request *r, const char **ret_why);
int handle_park_now(struct session *s, const Bfcd__Request *r, const char **ret_why);

/* Asks sessions for idle memory on a device that is draining: some of them, in each call. */
void recall_command_drain(struct broker *b, struct broker_device *d);

/* A trim of a drain before asks all sessions again. */
void recall_command_restart(struct broker_device *d);

/* The admin session has ended. */
void recall_command_drop(struct session *s);

#endif
