/* Requests; see request.h. One handler for each request, in a table; each checks the whole request
 * before it changes anything.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/request.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/session/command.h"
#include "daemon/session/explain.h"
#include "daemon/session/lease.h"
#include "daemon/session/report.h"
#include "daemon/session/resume.h"
#include "daemon/base/log.h"
#include "daemon/base/number.h"
#include "daemon/session/delivery.h"
#include "daemon/session/direct.h"
#include "daemon/session/hello.h"
#include "daemon/session/session.h"
#include "daemon/session/park.h"
#include "daemon/session/recall_command.h"
#include "daemon/session/reload.h"
#include "daemon/session/request_refuse.h"
#include "daemon/session/request_wait.h"
#include "daemon/session/session_states.h"
#include "daemon/session/share.h"
#include "daemon/session/shared.h"
#include "daemon/session/trim.h"
#include "daemon/base/clock.h"
#include "daemon/session/accounting.h"

/* ---- malloc -------------------------------------------------------------- */

/* At most 31 bytes of printable ASCII. */
static bool tag_is_valid(const char *tag)
{
        size_t n = 0;

        while (tag[n] >= ' ' && tag[n] <= '~')
                n++;
        return n < LEDGER_TAG_BYTES && tag[n] == '\0';
}

#define MALLOC_FLAGS                                                                                         \
        ((uint64_t)BFCD__MALLOC_FLAG__MALLOC_FLAG_ONE_EXTENT |                                               \
         (uint64_t)BFCD__MALLOC_FLAG__MALLOC_FLAG_AGAIN | (uint64_t)BFCD__MALLOC_FLAG__MALLOC_FLAG_PARKABLE)

/* True: the Malloc is invalid whatever the quota has, and was refused. */
static bool refuse_invalid_malloc(struct session *s, uint64_t id, const Bfcd__Malloc *m)
{
        bool is_parkable = (m->flags & BFCD__MALLOC_FLAG__MALLOC_FLAG_PARKABLE) != 0;
        bool in_extent = (m->flags & BFCD__MALLOC_FLAG__MALLOC_FLAG_ONE_EXTENT) != 0;
        const struct quota *q;

        if (s->role != ROLE_CLIENT) {
                session_refuse(s, id, -EACCES, "the admin socket serves no memory: use the client socket");
                return true;
        }
        if (m->partition >= s->n_shares) {
                session_refuse(s, id, -ENOENT,
                               "no such partition: the reply to the hello lists all partitions");
                return true;
        }
        if (m->n_bytes == 0) {
                session_refuse(s, id, -EINVAL, "the request is for 0 bytes; the smallest block has 1 byte");
                return true;
        }
        if ((m->flags & ~MALLOC_FLAGS) != 0) {
                session_refuse_format(s, id, -EINVAL,
                                      "the flags 0x%" PRIx64
                                      " have bits that this daemon does not support; it "
                                      "supports 0x%" PRIx64,
                                      m->flags, MALLOC_FLAGS);
                return true;
        }

        /* A block that can be parked needs extents that no other block is in. */
        q = s->shares[m->partition].quota;
        if (is_parkable && !park_is_possible(s, q)) {
                session_refuse_format(
                        s, id, -ENOTSUP,
                        "blocks of partition '%s' cannot be parked: it must have 'share: fd' and "
                        "be made on demand, and on a GPU the client must take events",
                        q->partition->name);
                return true;
        }
        if (is_parkable && in_extent && !arena_is_exact(q->arena, m->n_bytes)) {
                session_refuse_format(
                        s, id, -ENOTSUP,
                        "a block of %s in one extent cannot be parked in partition '%s', because it "
                        "gets no extent of its own: ask for 32 MiB or more, without BFC_ONE_EXTENT, "
                        "or for fewer of them",
                        NUMBER_SIZE(m->n_bytes), q->partition->name);
                return true;
        }
        if (!tag_is_valid(m->tag)) {
                session_refuse(s, id, -EINVAL,
                               "the tag is not valid: it has at most 31 bytes of printable ASCII");
                return true;
        }
        return false;
}

static int handle_malloc(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        const Bfcd__Malloc *m = r->malloc;
        bool again = (m->flags & BFCD__MALLOC_FLAG__MALLOC_FLAG_AGAIN) != 0;
        struct quota_request wait = {
                .n_bytes = m->n_bytes,
                .in_extent = (m->flags & BFCD__MALLOC_FLAG__MALLOC_FLAG_ONE_EXTENT) != 0,
                .is_whole = (m->flags & BFCD__MALLOC_FLAG__MALLOC_FLAG_PARKABLE) != 0,
                .is_no_refusal = again,
        };
        struct quota_request needed;
        struct quota *quota;
        bfc_handle handle;
        uint64_t offset;
        int result;

        /* The whole message is checked before the session joins the quota, which is its first change. */
        (void)ret_why;
        if (refuse_invalid_malloc(s, r->id, m) || session_refuse_delivery(s, r->id) ||
            session_join(s, &s->shares[m->partition], r->id) < 0)
                return 0;

        /* What can never be granted is final, so neither the daemon nor the client releases caches for it. A
         * client that has a part of the memory, and asks for the rest, says how much it needs in total. */
        wait.quota = quota = s->shares[m->partition].quota;
        needed = (struct quota_request){
                .quota = quota,
                .n_bytes = m->n_needed > 0 ? m->n_needed : m->n_bytes,
                .in_extent = wait.in_extent,
        };
        result = quota_refuse_at_once(quota, needed.n_bytes);
        if (result < 0) {
                request_refuse(s, r->id, &needed, result, true);
                return 0;
        }

        /* Backed space is given at once. What needs new memory waits in the quota's queue: on_request_done(). */
        if (wait.is_whole)
                result = quota_alloc_whole(quota, m->n_bytes, again);
        else
                result = again ? quota_alloc_or_again(quota, m->n_bytes, wait.in_extent, &handle, &offset)
                               : quota_alloc(quota, m->n_bytes, wait.in_extent, &handle, &offset);
        if (result == 0)
                request_give(s, r->id, m->partition, m->n_bytes, m->tag, handle, offset);
        else if (result < 0)
                request_refuse(s, r->id, &wait, result, false);
        else
                request_wait(s, r->id, m->partition, &wait, m->wait_ms, m->tag);
        return 0;
}

/* The client frees what was answered already or is being delivered. */
static int handle_cancel(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        uint64_t id = r->cancel->request_id;

        (void)ret_why;
        if (!request_drop(s, id) && !shared_withdraw_attach(s, id) && !park_cancel(s, id))
                return 0;
        session_refuse(s, id, -ECANCELED, "the client cancelled this request");
        s->ops->ready(s->userdata);
        return 0;
}

/* ---- blocks -------------------------------------------------------------- */

/* False: the block is not the session's, or its reply has not been sent. */
static bool free_block(struct session *s, uint32_t index)
{
        const struct ledger_block *block;

        if (index == LEDGER_NONE)
                return false;
        block = ledger_block_at(s->broker->ledger, index);
        if (block->parked == LEDGER_IS_COPY)
                return false;
        if (block->shared != LEDGER_NONE)
                return s->role == ROLE_CLIENT && shared_detach(s, index);
        if (block->session != s->index || block->links.in_delivery)
                return false;
        session_free_block(s, index);
        return true;
}

static int handle_free(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        uint64_t id = r->free->block_id;
        uint32_t index = ledger_block_find(s->broker->ledger, id);

        (void)ret_why;
        if (!free_block(s, index)) {
                session_refuse_format(s, r->id, -EINVAL,
                                      "block %" PRIu64
                                      " does not belong to this session: already freed, or never "
                                      "allocated by it",
                                      id);
                return 0;
        }
        session_done(s, r->id);
        return 0;
}

/* Why a Split is invalid; NULL: it is valid. */
static const char *split_fault(const struct session *s, uint32_t index, uint64_t at)
{
        const struct ledger_block *block =
                index != LEDGER_NONE ? ledger_block_at(s->broker->ledger, index) : NULL;

        if (!block || block->session != s->index || block->links.in_delivery || block->parked != LEDGER_AWAKE)
                return "it does not belong to this session, or it is shared or parked";
        if (at == 0 || at % BFC_GRANULE != 0 || at >= block->n_bytes)
                return "the offset is not a multiple of 256 bytes inside the block";
        return NULL;
}

/* 0: *ret_high is the new block. Negative: nothing has changed. */
static int split_block(struct session *s, uint32_t index, uint64_t at, uint32_t n_more, uint32_t *ret_high)
{
        struct ledger *l = s->broker->ledger;
        const struct ledger_block *block = ledger_block_at(l, index);
        struct session_share *share = session_share_of(s, block->quota);
        uint64_t n_bytes = block->n_bytes;
        bfc_handle high;
        int r = ledger_has_block(l) ? quota_split(share->quota, block->handle, at, n_more, &high) : -ENOMEM;

        if (r < 0)
                return r;
        r = ledger_block_split(l, index, at, high, ret_high);
        assert(r == 0);
        trim_split_block(s, share, block->offset, n_bytes, at);
        usage_split(&share->usage, n_bytes);
        s->stats.n_allocs++;
        return r;
}

static int handle_split(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        uint64_t id = r->split->block_id, at = r->split->n_bytes;
        uint32_t index = ledger_block_find(s->broker->ledger, id), high = LEDGER_NONE;
        const char *fault = split_fault(s, index, at);
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        Bfcd__SplitReply split = BFCD__SPLIT_REPLY__INIT;
        int error = 0;

        (void)ret_why;
        if (index != LEDGER_NONE && ledger_block_at(s->broker->ledger, index)->session == s->index)
                high = ledger_block_split_off(s->broker->ledger, index, at);
        if (high == LEDGER_NONE)
                error = fault ? -EINVAL : split_block(s, index, at, r->split->n_more, &high);
        if (error < 0) {
                session_refuse_format(
                        s, r->id, error, "block %" PRIu64 " cannot be split: %s", id,
                        fault ? fault
                        : error == -EDQUOT
                                ? "the tenant's max_blocks in the partition does not hold the parts"
                                : "the daemon is out of memory or block records");
                return 0;
        }
        split.block_id = ledger_block_at(s->broker->ledger, high)->id;
        reply.id = r->id;
        reply.body_case = BFCD__REPLY__BODY_SPLIT;
        reply.split = &split;
        session_send(s, &reply);
        return 0;
}

/* ---- statistics and lists ------------------------------------------------ */

/* By the partition's number in the hello's reply. NULL: the request was refused. */
static struct session_share *find_share(struct session *s, uint64_t id, uint32_t partition)
{
        if (s->role == ROLE_CLIENT && partition < s->n_shares)
                return &s->shares[partition];
        session_refuse(s, id, -ENOENT, "no such partition: the reply to the hello lists all partitions");
        return NULL;
}

/* No memory is free for a session that may not join the quota. */
static void describe_room(const struct session_share *share, Bfcd__Room *ret)
{
        struct quota *q = share->quota;
        bool may_use = share->joined || (!q->is_removed && q->sessions.n < q->max_sessions);

        ret->bytes_total = min_u64(q->account.limit_bytes, q->partition->pool.limit_bytes);
        ret->bytes_free = may_use ? min_u64(quota_obtainable(q), ret->bytes_total) : 0;
}

static int handle_usage(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        struct session_share *share = find_share(s, r->id, r->usage->partition);
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        Bfcd__UsageReply usage = BFCD__USAGE_REPLY__INIT;
        Bfcd__Statistics stats = BFCD__STATISTICS__INIT;
        Bfcd__Room room = BFCD__ROOM__INIT;

        (void)ret_why;
        if (!share)
                return 0;
        report_quota_stats(share->quota, &stats);
        usage.stats = &stats;
        if (r->usage->with_room) {
                describe_room(share, &room);
                usage.room = &room;
        }
        reply.id = r->id;
        reply.body_case = BFCD__REPLY__BODY_USAGE;
        reply.usage = &usage;
        session_send(s, &reply);
        return 0;
}

static int handle_release(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        struct session_share *share = find_share(s, r->id, r->release->partition);
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        Bfcd__Released released = BFCD__RELEASED__INIT;

        (void)ret_why;
        if (!share)
                return 0;
        released.bytes_returning = quota_release_soon(share->quota, r->release->n_bytes);
        reply.id = r->id;
        reply.body_case = BFCD__REPLY__BODY_RELEASED;
        reply.released = &released;
        session_send(s, &reply);
        return 0;
}

static int handle_list(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        struct report report;

        (void)ret_why;
        if (r->list->kind == BFCD__LIST__KIND__WHOAMI && hello_match(s) < 0) {
                session_refuse(s, r->id, -ENOMEM, "the daemon is out of memory");
                return 0;
        }
        if (report_list(s, r->list, &report) < 0) {
                session_refuse(s, r->id, -EINVAL, "there is no such list");
                return 0;
        }
        reply.id = r->id;
        reply.body_case = BFCD__REPLY__BODY_LIST;
        reply.list = &report.list;
        session_send(s, &reply);
        return 0;
}

static int handle_explain(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        struct explanation explanation;
        char sentence[EXPLAIN_SENTENCE];

        (void)ret_why;
        if (explain_page(s, r->explain, &explanation) < 0) {
                explain_names(s, r->explain->tenant, r->explain->partition, sentence, sizeof(sentence));
                session_refuse(s, r->id, -ENOENT, sentence);
                return 0;
        }
        reply.id = r->id;
        reply.body_case = BFCD__REPLY__BODY_EXPLAIN;
        reply.explain = &explanation.reply;
        session_send(s, &reply);
        return 0;
}

/* Answered when all is freed, so that a client that waits for the answer leaves nothing behind. */
static int handle_goodbye(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        (void)ret_why;
        if (r->goodbye->exits) { /* its memory stays mapped until the process ends */
                s->goodbye.exits = true;
                session_done(s, r->id);
                return 0;
        }
        s->goodbye.id = r->id;
        session_close(s, "goodbye");
        return 0;
}

static int handle_reset_peaks(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        const Bfcd__ResetPeaks *reset = r->reset_peaks;
        struct broker *b = s->broker;
        size_t n = 0;

        (void)ret_why;
        if (s->role == ROLE_CLIENT) {
                session_refuse(s, r->id, -EACCES, "reset-peaks is only for operators: use the admin socket");
                return 0;
        }
        for (size_t i = 0; i < b->n_tenants; i++) {
                struct tenant *t = &b->tenants[i];

                for (size_t k = 0; k < t->n_quotas; k++) {
                        struct quota *q = t->quotas[k];

                        if ((reset->tenant[0] && strcmp(reset->tenant, t->name) != 0) ||
                            (reset->partition[0] && strcmp(reset->partition, q->partition->name) != 0))
                                continue;
                        quota_clear_peaks(q);
                        n++;
                }
        }
        if (n == 0) {
                char sentence[EXPLAIN_SENTENCE];

                explain_names(s, reset->tenant, reset->partition, sentence, sizeof(sentence));
                session_refuse(s, r->id, -ENOENT, sentence);
                return 0;
        }
        for (size_t i = 0; i < b->n_partitions && !reset->tenant[0]; i++)
                if (!reset->partition[0] || strcmp(reset->partition, b->partitions[i].name) == 0)
                        partition_clear_peaks(&b->partitions[i]);
        log_info("%s: peaks of %zu quota%s reset", SESSION_LABEL(s), n, n == 1 ? "" : "s");
        session_done(s, r->id);
        return 0;
}

static int handle_show_config(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        Bfcd__ConfigReply config = BFCD__CONFIG_REPLY__INIT;
        const char *text = s->broker->own.text;
        size_t n_text = strlen(text);
        char piece[16384];
        size_t n;

        (void)ret_why;
        if (s->role == ROLE_CLIENT) {
                session_refuse(s, r->id, -EACCES,
                               "the configuration is only for operators: use the admin socket");
                return 0;
        }
        if (r->show_config->cursor > n_text) {
                session_refuse(s, r->id, -EINVAL, "the cursor is past the end of the configuration");
                return 0;
        }
        n = n_text - (size_t)r->show_config->cursor;
        if (n > sizeof(piece) - 1)
                n = sizeof(piece) - 1;
        memcpy(piece, text + r->show_config->cursor, n);
        piece[n] = '\0';
        config.text = piece;
        config.next_cursor = r->show_config->cursor + n < n_text ? r->show_config->cursor + n : 0;
        reply.id = r->id;
        reply.body_case = BFCD__REPLY__BODY_CONFIG;
        reply.config = &config;
        session_send(s, &reply);
        return 0;
}

/* ---- dispatch ------------------------------------------------------------ */

typedef int (*session_handler)(struct session *s, const Bfcd__Request *r, const char **ret_why);

static const session_handler handlers[] = {
        [BFCD__REQUEST__BODY_HELLO] = hello_handle,
        [BFCD__REQUEST__BODY_MALLOC] = handle_malloc,
        [BFCD__REQUEST__BODY_FREE] = handle_free,
        [BFCD__REQUEST__BODY_ACK] = delivery_ack,
        [BFCD__REQUEST__BODY_USAGE] = handle_usage,
        [BFCD__REQUEST__BODY_LIST] = handle_list,
        [BFCD__REQUEST__BODY_GOODBYE] = handle_goodbye,
        [BFCD__REQUEST__BODY_RESET_PEAKS] = handle_reset_peaks,
        [BFCD__REQUEST__BODY_SHOW_CONFIG] = handle_show_config,
        [BFCD__REQUEST__BODY_PUBLISH] = shared_publish,
        [BFCD__REQUEST__BODY_ATTACH] = shared_attach,
        [BFCD__REQUEST__BODY_EXPLAIN] = handle_explain,
        [BFCD__REQUEST__BODY_RELOAD] = reload_handle,
        [BFCD__REQUEST__BODY_TRIM_NOW] = handle_trim_now,
        [BFCD__REQUEST__BODY_EVICT] = handle_evict,
        [BFCD__REQUEST__BODY_HELD] = resume_list,
        [BFCD__REQUEST__BODY_DRAIN] = handle_drain,
        [BFCD__REQUEST__BODY_RESUME] = handle_resume,
        [BFCD__REQUEST__BODY_CANCEL] = handle_cancel,
        [BFCD__REQUEST__BODY_RELEASE] = handle_release,
        [BFCD__REQUEST__BODY_SPLIT] = handle_split,
        [BFCD__REQUEST__BODY_METADATA] = shared_handle_metadata,
        [BFCD__REQUEST__BODY_PARK] = park_handle,
        [BFCD__REQUEST__BODY_WAKE] = park_handle_wake,
        [BFCD__REQUEST__BODY_PARK_NOW] = handle_park_now,
        [BFCD__REQUEST__BODY_FORGET] = shared_handle_forget,
        [BFCD__REQUEST__BODY_CHARGE] = direct_handle_charge,
        [BFCD__REQUEST__BODY_UNCHARGE] = direct_handle_uncharge,
        [BFCD__REQUEST__BODY_LEASE_CREATE] = handle_lease_create,
        [BFCD__REQUEST__BODY_LEASE_SET] = handle_lease_set,
        [BFCD__REQUEST__BODY_LEASE_END] = handle_lease_end,
};

/* What a monitor may send; every other request changes something, or is for memory. */
static const bool monitor_requests[] = {
        [BFCD__REQUEST__BODY_HELLO] = true,   [BFCD__REQUEST__BODY_ACK] = true,
        [BFCD__REQUEST__BODY_LIST] = true,    [BFCD__REQUEST__BODY_GOODBYE] = true,
        [BFCD__REQUEST__BODY_EXPLAIN] = true, [BFCD__REQUEST__BODY_SHOW_CONFIG] = true,
        [BFCD__REQUEST__BODY_CANCEL] = true,
};

static bool monitor_may_send(size_t body)
{
        return body < sizeof(monitor_requests) / sizeof(monitor_requests[0]) && monitor_requests[body];
}

bool session_is_full(const struct session *s)
{
        return s->requests.n >= SESSION_MAX_PENDING;
}

bool session_may_handle(const struct session *s, const Bfcd__Request *request)
{
        return !session_is_full(s) || request->body_case == BFCD__REQUEST__BODY_CANCEL;
}

bool session_looks_at_many(const struct session *s, const Bfcd__Request *request)
{
        switch ((int)request->body_case) {
        case BFCD__REQUEST__BODY_LIST:
        case BFCD__REQUEST__BODY_EXPLAIN:
        case BFCD__REQUEST__BODY_LEASE_CREATE:
        case BFCD__REQUEST__BODY_LEASE_SET:
        case BFCD__REQUEST__BODY_LEASE_END:
                return s->tenant != NULL;
        default:
                return false;
        }
}

int session_handle(struct session *s, const Bfcd__Request *request, const char **ret_why)
{
        size_t body = (size_t)request->body_case;
        session_handler handler = body < sizeof(handlers) / sizeof(handlers[0]) ? handlers[body] : NULL;
        const char *fault;

        if (!handler) {
                *ret_why = "the client sent a request type that this version does not support";
                return -EPROTO;
        }
        if (request->id == 0 && handler != delivery_ack && handler != handle_cancel) {
                *ret_why = "the client sent a request with id 0";
                return -EPROTO;
        }
        fault = session_request_fault(s, request);
        if (fault) {
                *ret_why = fault;
                return -EPROTO;
        }
        if (s->role == ROLE_MONITOR && !monitor_may_send(body)) {
                session_refuse(
                        s, request->id, -EACCES,
                        "the monitor socket only shows the daemon's state and changes nothing: use the "
                        "admin socket to administer, and the client socket for memory");
                return 0;
        }
        return handler(s, request, ret_why);
}

int session_handle_event(struct session *s, const Bfcd__EventReply *reply, const char **ret_why)
{
        return session_is_live(s) ? recall_answer(s, reply->sequence, ret_why) : 0;
}

int session_work(struct session *s, size_t n_blocks, const char **ret_why)
{
        int r;

        if (s->state == SESSION_RESUMING)
                return resume_step(s, n_blocks, ret_why);
        if (!session_is_closing(s))
                return 0;
        r = session_reap(s, n_blocks);
        return r == 0 ? SESSION_DONE : r;
}

/* ---- requests that wait -------------------------------------------------- */

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

/* ---- refusals ------------------------------------------------------------ */

/* Which limit refused, for records. */
static const char *limit_name(const struct quota_request *refused, int error)
{
        const struct quota *q = refused->quota;

        if (refused->device_failed || error == -ENODEV)
                return "device";
        if (error == -EBUSY)
                return "drain";
        if (error == -EINVAL)
                return "extent";
        if (error == -EDQUOT)
                return !refused->is_direct && quota_without_block(q) ? "max_blocks" : "quota";
        return "partition";
}

/* names_holders: the line names the sessions with the most memory. They are searched only if the line is written. */
static void note_refusal(struct session *s, const struct quota_request *refused, int error,
                         bool names_holders, const char *sentence)
{
        char line[SESSION_SENTENCE_BYTES];

        s->stats.n_refusals++;
        snprintf(line, sizeof(line), "%s", sentence);
        if (names_holders && log_limit_is_open(&s->tenant->refusal_log))
                explain_to_log(refused->quota, error, line, sizeof(line));
        accounting_refuse(s, &(struct accounting_refusal){ .quota = refused->quota,
                                                           .n_bytes = refused->n_bytes,
                                                           .limit = limit_name(refused, error),
                                                           .sentence = line,
                                                           .told = sentence });
}

void request_refuse(struct session *s, uint64_t id, const struct quota_request *refused, int error,
                    bool is_final)
{
        char sentence[SESSION_SENTENCE_BYTES];
        bool device_failed = refused->device_failed && error != -ENODEV;
        bool names_holders = !device_failed && (error == -EDQUOT || error == -ENOMEM);

        if (device_failed && error == -ECOMM)
                snprintf(sentence, sizeof(sentence),
                         "a block of %s was refused, because its memory would not survive a restart of the "
                         "daemon: the keeper of host memory does not answer, and is being replaced",
                         NUMBER_SIZE(refused->n_bytes));
        else if (device_failed && error == -ECANCELED)
                snprintf(
                        sentence, sizeof(sentence),
                        "no new memory is allocated for a block of %s: the kernel killed a process for lack of memory while the previous daemon "
                        "allocated memory for tenant '%s' in partition '%s'; try again in %" PRIu64 " s",
                        NUMBER_SIZE(refused->n_bytes), refused->quota->tenant,
                        refused->quota->partition->name, quota_growth_pause_ms(refused->quota) / 1000 + 1);
        else if (device_failed)
                snprintf(sentence, sizeof(sentence),
                         "device '%s' could not allocate memory for a block of %s: %s",
                         refused->quota->partition->device_id, NUMBER_SIZE(refused->n_bytes),
                         device_error(error));
        else
                quota_explain(refused, error, sentence, sizeof(sentence));
        names_holders = names_holders && !refused->is_no_refusal;
        if (!refused->is_no_refusal)
                note_refusal(s, refused, error, names_holders, sentence);
        if (names_holders)
                explain_to_tenant(refused->quota, error, sentence, sizeof(sentence));
        /* Whatever the device lacked. */
        session_refuse_final(s, id, device_failed ? -ENOMEM : error, sentence, is_final);
}
