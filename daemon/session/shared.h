/* Shared blocks: one copy of a large block for many processes of a tenant.
 *
 * A session publishes one of its blocks under a name. The name belongs to the tenant, in all its partitions.
 * From then on the block belongs to no session. Each session that has it has one reference, with a count.
 * The block is freed with its last reference, released by the client or by the end of its session. It stays
 * charged once, to the tenant, and counts once in max_blocks; no session's statistics contain it. Names of
 * other tenants are not visible.
 *
 * A kept block stays without references, for a time or until Forget. It is freed at once where its quota was
 * removed or its device is drained. It can have metadata for those that attach it. shared_turn() and
 * shared_expire_kept() free a bounded number.
 *
 * An attach of a name that is not published may wait for it. shared_turn() alone serves waits, a bounded
 * number in each turn. When the time of waits is up, shared_tick() begins to refuse them and shared_turn()
 * continues.
 *
 * Invariants: a name is in the broker's tree exactly while it is published or waited for; a tenant has it at
 * most once; a session has at most one reference to a shared block, and has joined the block's quota. A
 * shared block without references is kept, and in the broker's heap. A
 * block is shared if its `shared` in the ledger is not LEDGER_NONE. It may be exported to other sessions than
 * its publisher's, is in no session's list, and cannot be trimmed.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_SHARED_H
#define BFCD_SHARED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>

#include "daemon/memory/broker.h"
#include "daemon/session/session.h"
#include "proto/bfcd.pb-c.h"

#define SHARED_MAX_REFS    CAPACITY_REFS /* different shared blocks that a session may have */
#define SHARED_MAX_WAITS   32u           /* attaches of a session that wait */
#define SHARED_MAX_WAIT_MS 600000u       /* a longer time counts as this */
#define SHARED_SLICE       256u /* waits that are served or refused, and kept blocks freed, in one turn */
#define SHARED_MAX_KEPT    CAPACITY_KEPT /* shared blocks of a tenant that are kept or have metadata */

struct refs;
struct session;
struct shared_state;

struct shared_name {
        char tenant[LEDGER_NAME_BYTES];
        char name[LEDGER_NAME_BYTES];
        uint32_t shared;      /* in the ledger; LEDGER_NONE: it is only waited for */
        struct tenant *owner; /* while it is published */
        struct shared_wait_list waits;
        struct park_shared *parking;     /* see park.c; NULL: the block is neither being parked nor woken */
        bool is_busy;                    /* in name_serve(), which ends with shared_name_drop() */
        bool is_counted;                 /* in owner->n_kept */
        size_t idle_at;                  /* its place in the broker's heap, from 1 on; 0: it is not there */
        TAILQ_ENTRY(shared_name) of_due; /* in the broker's list: waits can be served */
};

void shared_init(struct shared_state *shared);

/* The handlers of Publish, Attach, Forget and Metadata; see request.c. */
int shared_publish(struct session *s, const Bfcd__Request *r, const char **ret_why);
int shared_attach(struct session *s, const Bfcd__Request *r, const char **ret_why);
int shared_handle_forget(struct session *s, const Bfcd__Request *r, const char **ret_why);
int shared_handle_metadata(struct session *s, const Bfcd__Request *r, const char **ret_why);

/* One Free of a shared block. False: the session does not have it, or its reply has not been sent. */
bool shared_detach(struct session *s, uint32_t block);

/* The session has a block read-only in an extent of this block, to which it must not get write access. */
bool shared_protects(const struct session *s, const struct ledger_block *block);

/* The reply of a granted attach is sent, or cannot be sent: then the session loses the reference. */
void shared_delivered(struct session *s, uint32_t ref);
void shared_undelivered(struct session *s, uint32_t ref);

/* Of a session that is resumed: drops as much of the count as the client did not list
 * (links.n_in_delivery). True: that was all. */
bool shared_drop_unlisted(struct session *s, uint32_t ref);

/* Of a closing session that has shared blocks: drops the last reference. */
void shared_reap(struct session *s);

/* Removes the waiting Attach with this request id; the caller answers it. False: none waits. */
bool shared_withdraw_attach(struct session *s, uint64_t request_id);

/* Drops all waits of the session, without an answer. */
void shared_drop_waits(struct session *s);

/* One turn for waits whose name is published by now; whether any are to be served; and waits whose time is
 * up. */
void shared_turn(struct broker *b);
bool shared_is_due(const struct broker *b);
void shared_tick(struct broker *b, uint64_t now_ms);

/* When the next kept block without references is to be freed, by clock_ms(); 0: never, or shared_is_due(). */
uint64_t shared_keeps_until(const struct broker *b);
/* Frees those whose time is up, a bounded number. */
void shared_expire_kept(struct broker *b, uint64_t now_ms);

/* A quota was removed or a device is drained: kept blocks there without references are freed, in turns. */
static inline void shared_review_kept(struct broker *of)
{
        of->shared.must_review = true;
        broker_wake(of);
}

/* The daemon ends for good: frees all kept blocks. No session is left. */
void shared_end_kept(struct broker *b);

/* Makes the names of an inherited ledger, after its quotas and blocks. -ENOMEM. */
int shared_restore(struct broker *b);
/* Forgets all names, of which none is waited for. */
void shared_forget(struct broker *b);

/* NULL: it is neither published nor waited for. */
struct shared_name *shared_name_find(const struct broker *b, const char *tenant, const char *text);

/* ---- the references of a session, by their index in the ledger ---------------- */

void refs_clear(struct refs *h); /* and frees */

/* LEDGER_NONE: there is none. */
uint32_t refs_find(const struct refs *h, uint32_t shared);

/* Makes room, so that the next refs_add() cannot fail. There are fewer than SHARED_MAX_REFS. -ENOMEM. */
int refs_make_room(struct refs *h);
void refs_add(struct refs *h, uint32_t shared, uint32_t ref);

void refs_remove(struct refs *h, uint32_t shared); /* it exists */

/* Every invariant; slow. 0, or -EBADMSG and a sentence. */
int shared_check(const struct broker *b, const char **ret_why);

#endif
