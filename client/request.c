/* Requests to the daemon; see request.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "client/request.h"

#include <stdio.h>
#include <string.h>

#include "client/client.h"
#include "client/reconnect.h"

int client_check_reply(Bfcd__Reply *reply, Bfcd__Reply__BodyCase expected)
{
        int r;

        if (reply->body_case == expected)
                return 0;
        if (reply->body_case == BFCD__REPLY__BODY_REFUSAL && reply->refusal->error > 0 &&
            reply->refusal->error < 4096)
                r = error_set(-(int)reply->refusal->error, "%s", reply->refusal->message);
        else
                r = error_set(-EPROTO, "the daemon sent a reply of another type than requested");
        bfcd__reply__free_unpacked(reply, NULL);
        return r;
}

int client_interrupted(void)
{
        return error_set(-EINTR, "the wait was interrupted by a signal or by cancel_fd");
}

/* The call is over. What the daemon granted before it read the Cancel is returned. */
static int request_interrupted(bfc_client *client, const Bfcd__Request *request, Bfcd__Reply *reply,
                               uint64_t epoch)
{
        const Bfcd__Block *block = NULL;

        if (reply && reply->body_case == BFCD__REPLY__BODY_BLOCK)
                block = reply->block;
        else if (reply && reply->body_case == BFCD__REPLY__BODY_ATTACHED)
                block = reply->attached->block;
        if (block)
                client_free_block(client, block->block_id, epoch);
        if (reply && reply->body_case == BFCD__REPLY__BODY_DONE &&
            request->body_case == BFCD__REQUEST__BODY_CHARGE)
                client_uncharge(client, request->charge->partition, request->charge->n_bytes, epoch);
        if (reply)
                bfcd__reply__free_unpacked(reply, NULL);
        return client_interrupted();
}

/* The wait_ms of a request; NULL: the request does not wait. */
static uint32_t *request_wait_ms(Bfcd__Request *request)
{
        uint32_t *wait_ms = request->body_case == BFCD__REQUEST__BODY_MALLOC   ? &request->malloc->wait_ms
                            : request->body_case == BFCD__REQUEST__BODY_ATTACH ? &request->attach->wait_ms
                            : request->body_case == BFCD__REQUEST__BODY_WAKE   ? &request->wake->wait_ms
                            : request->body_case == BFCD__REQUEST__BODY_CHARGE ? &request->charge->wait_ms
                                                                               : NULL;

        return wait_ms && *wait_ms > 0 ? wait_ms : NULL;
}

/* All requests of a call that wait have one end. A repeated one waits for at least 1 ms, because the daemon
 * refuses a request that waits by other errors than one that does not. */
static void request_limit_wait(struct client_call *call, Bfcd__Request *request)
{
        uint32_t *wait_ms = request_wait_ms(request);
        int64_t now_ms, left_ms;

        if (!wait_ms)
                return;
        now_ms = clock_now_ms();
        if (call->until_ms == 0)
                call->until_ms = now_ms + *wait_ms;
        left_ms = call->until_ms - now_ms;
        *wait_ms = left_ms > 0 ? (uint32_t)left_ms : 1;
}

int client_request(bfc_client *client, struct client_call *call, Bfcd__Request *request,
                   Bfcd__Reply__BodyCase expected, Bfcd__Reply **ret_reply, uint64_t *ret_epoch)
{
        struct call_interrupt *interrupt = call ? call->interrupt : NULL;
        Bfcd__Reply *reply = NULL;
        int r;

        do {
                if (call)
                        request_limit_wait(call, request);
                r = interrupt ? call_send_interruptible(client->connection, interrupt, request, &reply,
                                                        ret_epoch)
                              : call_send_at(client->connection, 0, request, &reply, ret_epoch);
                __atomic_add_fetch(&client->counters.n_requests, 1, __ATOMIC_RELAXED);
                if (interrupt && interrupt->is_interrupted && r != -EPROTO)
                        return request_interrupted(client, request, reply, *ret_epoch);
        } while (r == -ECONNRESET &&
                 (r = client_reconnect(client, *ret_epoch, client->reconnect.return_ms, interrupt)) == 0);
        if (r == -EINTR)
                return request_interrupted(client, request, NULL, *ret_epoch);
        if (r < 0)
                return client_lost(client, r);
        if (call)
                call->is_final = reply->body_case == BFCD__REPLY__BODY_REFUSAL && reply->refusal->is_final;
        r = client_check_reply(reply, expected);
        if (r == 0)
                *ret_reply = reply;
        return r;
}

int client_request_wakes(bfc_client *client, struct client_call *call, Bfcd__Request *const *requests,
                         size_t n, size_t n_replies, Bfcd__Reply **ret_replies, uint64_t *ret_epoch)
{
        int r;

        do {
                for (size_t i = 0; i < n; i++)
                        request_limit_wait(call, requests[i]);
                r = call_send_wakes(client->connection, call->interrupt, requests, n, n_replies, ret_replies,
                                    ret_epoch);
                __atomic_add_fetch(&client->counters.n_requests, n, __ATOMIC_RELAXED);
                for (size_t i = 0; r < 0 && i < n_replies; i++) {
                        if (ret_replies[i])
                                bfcd__reply__free_unpacked(ret_replies[i], NULL);
                        ret_replies[i] = NULL;
                }
                if (r == -ECONNRESET && call->interrupt && call->interrupt->is_interrupted)
                        r = -EINTR;
        } while (r == -ECONNRESET && (r = client_reconnect(client, *ret_epoch, client->reconnect.return_ms,
                                                           call->interrupt)) == 0);
        if (r == -ENOMEM)
                return error_no_memory();
        if (r == -EINTR)
                return client_interrupted();
        return r < 0 ? client_lost(client, r) : 0;
}

/* The first refusal of these, which are all freed. */
static int check_replies(Bfcd__Reply **replies, size_t n)
{
        int r = 0;

        for (size_t i = 0; i < n; i++) {
                int error = replies[i] ? client_check_reply(replies[i], BFCD__REPLY__BODY_DONE) : 0;

                if (replies[i] && error == 0)
                        bfcd__reply__free_unpacked(replies[i], NULL);
                replies[i] = NULL;
                r = r < 0 ? r : error;
        }
        return r;
}

int client_free_blocks(bfc_client *client, const uint64_t *block_ids, size_t n, uint64_t epoch)
{
        Bfcd__Request requests[CALL_MAX_AT_ONCE], *pointers[CALL_MAX_AT_ONCE] = { NULL };
        Bfcd__Free frees[CALL_MAX_AT_ONCE];
        Bfcd__Reply *replies[CALL_MAX_AT_ONCE] = { NULL };
        uint64_t at = epoch;
        int lost, r = 0, error;

        for (size_t i = 0; i < n; i++) {
                bfcd__request__init(&requests[i]);
                bfcd__free__init(&frees[i]);
                frees[i].block_id = block_ids[i];
                requests[i].body_case = BFCD__REQUEST__BODY_FREE;
                requests[i].free = &frees[i];
                pointers[i] = &requests[i];
        }
        do {
                lost = call_send_all_at(client->connection, epoch, pointers, n, replies, &at);
                __atomic_add_fetch(&client->counters.n_requests, n, __ATOMIC_RELAXED);
                error = check_replies(replies, n);
                r = r < 0 ? r : error;
        } while (lost == -ECONNRESET &&
                 (lost = client_reconnect(client, at, client->reconnect.return_ms, NULL)) == 0);
        return lost < 0 && lost != -ESTALE ? client_lost(client, lost) : r;
}

int client_uncharge(bfc_client *client, uint32_t partition, uint64_t n_bytes, uint64_t epoch)
{
        Bfcd__Uncharge body = BFCD__UNCHARGE__INIT;
        Bfcd__Request request = REQUEST(UNCHARGE, uncharge, &body);
        Bfcd__Reply *reply = NULL;
        uint64_t at = epoch;
        int lost, r = 0;

        body.partition = partition;
        body.n_bytes = n_bytes;
        do {
                lost = call_send_at(client->connection, epoch, &request, &reply, &at);
                __atomic_add_fetch(&client->counters.n_requests, 1, __ATOMIC_RELAXED);
        } while (lost == -ECONNRESET &&
                 (lost = client_reconnect(client, at, client->reconnect.return_ms, NULL)) == 0);
        if (lost < 0)
                return lost == -ESTALE ? 0 : client_lost(client, lost);
        r = client_check_reply(reply, BFCD__REPLY__BODY_DONE);
        if (r == 0)
                bfcd__reply__free_unpacked(reply, NULL);
        return r;
}

int client_free_block(bfc_client *client, uint64_t block_id, uint64_t epoch)
{
        return client_free_blocks(client, &block_id, 1, epoch);
}
