/* Requests: what a client sends to the daemon, and how a session ends.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CLIENT_REQUEST_H
#define BFC_CLIENT_REQUEST_H

#include <bfcclient.h>
#include <errno.h>
#include <stdbool.h>

#include "client/call.h"

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

#endif
