/* The session at the daemon: requests and their replies, the extents that the daemon shares and reclaims, and resuming
 * the session when the daemon was restarted.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CLIENT_SESSION_H
#define BFC_CLIENT_SESSION_H

#include <bfcclient.h>
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "client/call.h"
#include "proto/bfcd.pb-c.h"

/* ---- requests -------------------------------------------------------------------- */

/* What the requests of one call of the program have in common. */
struct client_call {
        struct call_interrupt *interrupt; /* NULL: it cannot be interrupted */
        bool is_final;                    /* the daemon refused, and freeing memory does not help */
        int64_t until_ms; /* the end of the wait of the requests with a wait_ms; 0: none was sent */
};

/* Sends one request and returns its reply, of the expected kind, to be freed by
 * bfcd__reply__free_unpacked(). A refusal becomes the daemon's error with its message. If the daemon is
 * gone the session is resumed, and the request repeated; a wait_ms is reduced to the remaining time, and is
 * at least 1. call: NULL, or the call that the request is part of; it is needed for a wait_ms. -EINTR: it
 * was interrupted, with a message; a block that was granted nevertheless has been freed. */
int client_request(bfc_client *client, struct client_call *call, Bfcd__Request *request,
                   Bfcd__Reply__BodyCase expected, Bfcd__Reply **ret_reply, uint64_t *ret_epoch);

/* Sends Wakes with this wait_ms, as client_request() does, and waits for all their replies: n_replies. 0: all
 * arrived; the caller passes each to client_check_reply(). After an interruption that is -ECANCELED for those that
 * had not arrived. call: is needed. */
int client_request_wakes(bfc_client *client, struct client_call *call, Bfcd__Request *const *requests,
                         size_t n, size_t n_replies, Bfcd__Reply **ret_replies, uint64_t *ret_epoch);

/* Uncharges what was counted in this epoch: a later daemon was told already. */
int client_uncharge(bfc_client *client, uint32_t partition, uint64_t n_bytes, uint64_t epoch);

/* -EINTR, with the message. */
int client_interrupted(void);

/* 0: a reply of the kind expected. Else its error, with a message; the reply is freed. */
int client_check_reply(Bfcd__Reply *reply, Bfcd__Reply__BodyCase expected);

/* Frees blocks of the daemon, at most CALL_MAX_AT_ONCE, which left the tables in this epoch, with one
 * wait in total. Tries all; returns the first error. The client's lock is not held. */
int client_free_blocks(bfc_client *client, const uint64_t *block_ids, size_t n, uint64_t epoch);
int client_free_block(bfc_client *client, uint64_t block_id, uint64_t epoch);

/* ---- extents -----------------------------------------------------------------
 *
 * The memory that the daemon shares with this process, and reclaims. */

struct device_range;

/* For call.h: maps them, before the reply whose block is there. */
int client_on_extents(void *userdata, const Bfcd__Extents *extents, int *fds);
/* For events.h: unmaps them. */
int client_on_retire(bfc_client *client, uint64_t epoch, const Bfcd__Retire *retire);

/* The address of a block that the daemon granted. Tries again to map extents that failed before. The lock
 * is held. -EPROTO: no block can be there. -ECANCELED: it cannot be mapped, *ret_why says why. */
int client_resolve(bfc_client *client, const Bfcd__Block *block, int *ret_why, void **ret_ptr);
/* Sets the error for that, and returns it. */
int client_unmappable(const bfc_client *client, uint32_t partition, int why);

/* Waits for the work in a range, before a block there is freed. -EBUSY: a stream is being captured. The
 * message is set. The lock is not held. */
int client_finish(bfc_client *client, uint32_t partition, struct device_range *range);

/* ---- resuming the session at a daemon that was restarted ---------------------------- */

struct reconnect;

int reconnect_init(struct reconnect *b, const char *path, const char *name, unsigned return_ms); /* -ENOMEM */

/* The connection of that epoch is gone. 0: there is another one, made by this or another thread.
 * -ECONNRESET: there is none, `lost` and end_reason are set. -EPROTO. No lock is held. interrupt: NULL,
 * or what interrupts this thread's wait: -EINTR, and the next call tries again. */
int client_reconnect(bfc_client *client, uint64_t epoch, unsigned return_ms,
                     struct call_interrupt *interrupt);

/* For a thread that reconnects without a call that waits: pauses for a random time, so that after a restart
 * of the daemon clients with a call come first, and not all of them in one moment. Ends when another thread
 * has reconnected. */
void reconnect_pause_idle(bfc_client *client, uint64_t epoch);

/* For one that connects again: of many, not all in one moment. */
void reconnect_pause_at_random(void);

/* Makes current and later attempts fail soon, and the threads end; or no longer. */
void reconnect_stop(bfc_client *client, bool stops);
bool reconnect_check_stopping(bfc_client *client);
/* The attempts were given up, but no daemon refused: allows one more. */
bool reconnect_try_once_more(bfc_client *client);
void reconnect_hang_up(bfc_client *client); /* aborts the current attempt */

#endif
