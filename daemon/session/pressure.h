/* Pressure: before sessions are asked for idle memory of their clients' caches, they are asked to park blocks that
 * were idle for long, and to give back what their programs can spare. This is the reclaim step for which the
 * quota layer calls upcalls.press().
 *
 * A Pressure is a recall (see recall.h) of a number of bytes. A session is asked if its client's page says that
 * parkable blocks have been idle for the time in the `park` key of its quota, or that its program has a function
 * for this. The page is a hint: it decides who is asked, and in which order. What counts is what was released,
 * never what an answer claims. Where a tenant's quota is short its own sessions are asked, the requesting session
 * too; where the partition is full, the sessions of quotas above their guarantees. Those come first whose blocks
 * have been idle longest, then those with functions, the highest above its guarantee first. As many are asked
 * as seem to be needed; one that releases too slowly is not waited for.
 *
 * A session has one open Pressure in each partition. A client that does not answer within
 * PRESSURE_TIMEOUT_MS is unresponsive: it is skipped until it answers. One that released nearly nothing is
 * not asked again for the requests that wait. Nothing is taken from a quota whose own requests have waited longer: of two
 * that need more than there is, the older gets all.
 *
 * Each call looks at a bounded number of sessions, pages and open Pressures.
 *
 * Invariants: a share is in its partition's list only while its session is LIVE and it takes events,
 * and only such a share has an open Pressure; n_pressed counts them.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_PRESSURE_H
#define BFCD_PRESSURE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>

#include "daemon/session/recall.h"
#include "daemon/memory/broker.h"

#define PRESSURE_TIMEOUT_MS 60000u /* copies take long */
#define PRESSURE_MAX_LOOKS  256u   /* sessions, in one call */
#define PRESSURE_MAX_READS  32u    /* clients' pages, in one call */
#define PRESSURE_MAX_ROUND  16u    /* sessions asked in one call */
#define PRESSURE_MAX_OPEN   64u    /* that are looked at for what is coming */
#define PRESSURE_HINT_MS    20u    /* a client's page is read again after that */
#define PRESSURE_AGAIN_MS   100u   /* when no session is left, all are looked at again after that */

/* A session is waited for so long: for a request that would be refused, and for one that has time. What it has
 * released since it was asked adds time at this rate. A time since the last release would let a client hide all others
 * by a small release now and then. */
#define PRESSURE_SLOW_MS      100u
#define PRESSURE_SLOWS_MS     500u
#define PRESSURE_BYTES_PER_MS (UINT64_C(1) << 18)
#define PRESSURE_MIN_BYTES    (UINT64_C(2) << 20) /* a session that released less has nothing more */
#define PRESSURE_MAX_SHIFT    2u

struct session;
struct session_share;

/* For upcalls; see upcalls.h. */
bool pressure_ask(struct broker *b, struct quota *q, struct quota_request *first, const struct account *scope,
                  uint64_t missing);

/* The session has joined the quota; it was resumed; it will not answer any more. */
void pressure_join(struct session *s, struct session_share *share);
void pressure_begin(struct session *s);
void pressure_end(struct session *s);

/* What a session is asked for. */
struct pressure_order {
        uint64_t n_bytes;
        bool parks, wakes, is_own;
        uint32_t idle_ms;
        size_t to; /* of the session's shares */
        const char *tag;
        bool is_command;
};

/* False: it cannot be asked now. */
bool pressure_send(struct pressure_share *share, const struct pressure_order *order, uint64_t now_ms);

/* The index of the share for the copies, by the partition's name; NULL: as the config has it for this quota.
 * -ENOENT: there is none, or of another kind of memory. */
int pressure_find_to(const struct session *s, const struct session_share *from, const char *partition,
                     size_t *ret);

/* The client has answered a Pressure, or missed its time-out. */
void pressure_answer(struct recall *r);
void pressure_miss(struct recall *r);

/* Every invariant; slow. 0, or -EBADMSG and a sentence. */
int pressure_check(const struct broker *b, const char **ret_why);

#endif
