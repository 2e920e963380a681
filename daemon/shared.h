/* Shared blocks: one copy of something large for many processes of a tenant.
 *
 * A session publishes a block of its own under a name, which is the tenant's, in all its
 * partitions. From then on the block is no session's: each one that has it has a hold,
 * with a count, and it lives until the last hold is gone, be it let go of or be its
 * process dead. It stays charged once, to the tenant, and is one block of its max_blocks;
 * no session's figures have it. What another tenant publishes does not exist here.
 *
 * Who attaches a name that is not there may wait for it. Those who wait are served, a
 * bounded number in each turn, by shared_turn() and nowhere else. When their time is up
 * shared_tick() begins to refuse them, and shared_turn() goes on with it.
 *
 * Invariants: a name is in the broker's tree exactly while it is published or waited
 * for; a tenant has it at most once; a session has at most one hold of a shared block,
 * and has joined the quota that the block is of. So a block of which `shared` in the
 * ledger is not LEDGER_NONE has exports beyond its publisher's, is in no session's list,
 * and nobody can be asked to give it back.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_SHARED_H
#define BFCD_SHARED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>

#include "daemon/broker.h"
#include "daemon/holds.h"
#include "proto/bfcd.pb-c.h"

#define SHARED_MAX_HOLDS   HOLDS_MAX /* different shared blocks that a session may have */
#define SHARED_MAX_WAITS   32u       /* attaches of a session that wait */
#define SHARED_MAX_WAIT_MS 600000u   /* more counts as that */
#define SHARED_SLICE       256u      /* of those who wait, served or refused in one turn */

struct session;
struct shared_wait;
TAILQ_HEAD(shared_wait_list, shared_wait);

/* A session's part. */
struct shared_waits {
        struct shared_wait_list list;
        size_t n;
        uint64_t until_ms; /* no time of these is up before; 0: there are none */
};

void shared_init(struct shared_waits *w);

/* The handlers of Publish and Attach; see session.c. */
int shared_publish(struct session *s, const Bfcd__Request *r, const char **ret_why);
int shared_attach(struct session *s, const Bfcd__Request *r, const char **ret_why);

/* One Free of a shared block. False: the session does not have it, or no reply has told
 * it so yet. */
bool shared_let_go(struct session *s, uint32_t block);

/* An attach that was granted: its reply is sent, or cannot be, and then it is let go of. */
void shared_delivered(struct session *s, uint32_t hold);
void shared_undelivered(struct session *s, uint32_t hold);

/* Of a session that comes back: as many of its count as it has not named (links.n_in_delivery) are
 * let go of, and true is returned where that was all. */
bool shared_settle(struct session *s, uint32_t hold);

/* Of a session that is closing: lets go of one shared block for good. It has some. */
void shared_reap(struct session *s);

/* The session's Attach with this request id waits no more; it is the caller's to answer it. False: none
 * waits. */
bool shared_withdraw_attach(struct session *s, uint64_t request_id);

/* Nobody waits for answers any more. */
void shared_drop_waits(struct session *s);

/* One turn for those who wait for names that are there by now; whether any are to be
 * served; and those whose time is up. */
void shared_turn(struct broker *b);
bool shared_is_due(const struct broker *b);
void shared_tick(struct broker *b, uint64_t now_ms);

/* Names from the ledger of another process, of which quotas and blocks are there. -ENOMEM. And
 * all are forgotten; nobody waits. */
int shared_restore(struct broker *b);
void shared_forget(struct broker *b);

/* Every invariant; slow. 0, or -EBADMSG and a sentence. */
int shared_check(const struct broker *b, const char **ret_why);

#endif
