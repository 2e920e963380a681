/* Requests that wait; see request_wait.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/request_wait.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "daemon/base/clock.h"
#include "daemon/session/delivery.h"
#include "daemon/session/direct.h"
#include "daemon/session/request_refuse.h"
#include "daemon/session/session.h"

struct session_request {
        struct quota_request wait;
        struct session *session;
        uint64_t id;
        size_t share;
        char tag[LEDGER_TAG_BYTES];
        TAILQ_ENTRY(session_request) link;
};

void request_init(struct request_state *r)
{
        TAILQ_INIT(&r->list);
        TAILQ_INIT(&r->parks);
}

void request_give(struct session *s, uint64_t id, size_t share_index, uint64_t n_requested, const char *tag,
                  bfc_handle handle, uint64_t offset)
{
        struct session_share *share = &s->shares[share_index];
        struct ledger_block facts = {
                .offset = offset,
                .n_bytes = bfc_block_bytes(n_requested),
                .n_requested = n_requested,
                .born_ms = clock_ms(),
                .session = s->index,
                .quota = share->quota->index,
                .handle = handle,
        };

        snprintf(facts.tag, sizeof(facts.tag), "%s", tag);
        session_deliver_block(s, id, share, &facts);
}

static void request_remove(struct session *s, struct session_request *request)
{
        s->stats.waited_ns += clock_ns() - request->wait.since_ns;
        TAILQ_REMOVE(&s->requests.list, request, link);
        s->requests.n--;
        free(request);
}

static void on_request_done(struct quota_request *wait, int result, bfc_handle handle, uint64_t offset)
{
        struct session_request *request = (struct session_request *)wait;
        struct session *s = request->session;

        s->stats.waited_ns += clock_ns() - wait->since_ns;
        TAILQ_REMOVE(&s->requests.list, request, link);
        s->requests.n--;
        if (result < 0)
                request_refuse(s, request->id, wait, result, false);
        else if (wait->is_direct)
                direct_grant(s, request->id, request->share, wait);
        else
                request_give(s, request->id, request->share, wait->n_bytes, request->tag, handle, offset);
        free(request);
        s->ops->ready(s->userdata);
}

void request_wait(struct session *s, uint64_t id, size_t share, const struct quota_request *wait,
                  uint32_t wait_ms, const char *tag)
{
        struct session_request *request = calloc(1, sizeof(*request));

        if (!request) {
                request_refuse(s, id, wait, -ENOMEM, false);
                return;
        }
        request->wait = *wait;
        request->wait.wait_ms = wait_ms < SESSION_MAX_WAIT_MS ? wait_ms : SESSION_MAX_WAIT_MS;
        request->wait.requester = s;
        request->wait.done = on_request_done;
        request->session = s;
        request->id = id;
        request->share = share;
        snprintf(request->tag, sizeof(request->tag), "%s", tag);
        TAILQ_INSERT_TAIL(&s->requests.list, request, link);
        s->requests.n++;
        quota_wait(&request->wait);
}

bool request_drop(struct session *s, uint64_t id)
{
        struct session_request *request;

        TAILQ_FOREACH(request, &s->requests.list, link)
        {
                if (request->id != id)
                        continue;
                quota_cancel(&request->wait);
                request_remove(s, request);
                return true;
        }
        return false;
}

void request_drop_all(struct session *s)
{
        struct session_request *request;

        while ((request = TAILQ_FIRST(&s->requests.list))) {
                quota_cancel(&request->wait);
                request_remove(s, request);
        }
}
