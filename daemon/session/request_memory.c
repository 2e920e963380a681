/* Requests for memory; see request_memory.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/request_memory.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/base/number.h"
#include "daemon/session/accounting.h"
#include "daemon/session/delivery.h"
#include "daemon/session/explain.h"
#include "daemon/session/park.h"
#include "daemon/session/session.h"
#include "daemon/session/share.h"
#include "daemon/session/shared.h"
#include "daemon/session/trim.h"

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
        session_refuse_final(s, id, quota_request_error(refused, error), sentence, is_final);
}

/* ---- requests that wait -------------------------------------------------- */

/* Many fields: it is a request that waits in a quota's queue, and who asked. */
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

static void request_give(struct session *s, uint64_t id, size_t share_index, uint64_t n_requested,
                         const char *tag, bfc_handle handle, uint64_t offset)
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

        memcpy(facts.tag, tag, strnlen(tag, sizeof(facts.tag) - 1));
        session_deliver_block(s, id, share, &facts);
}

static void request_remove(struct session *s, struct session_request *request)
{
        s->stats.waited_ns += clock_ns() - request->wait.since_ns;
        TAILQ_REMOVE(&s->requests.list, request, link);
        s->requests.n--;
        free(request);
}

/* The Charge with this id was served: commits and answers it. */
static void direct_grant(struct session *s, uint64_t id, size_t share, struct quota_request *served);

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

int handle_malloc(struct session *s, const Bfcd__Request *r, const char **ret_why)
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

int handle_free(struct session *s, const Bfcd__Request *r, const char **ret_why)
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

int handle_split(struct session *s, const Bfcd__Request *r, const char **ret_why)
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

/* ---- direct charges ------------------------------------------------------------- */

static uint64_t quota_id(const struct quota *q)
{
        return ledger_quota_at(q->partition->ledger, q->index)->id;
}

/* NULL: it was refused. */
static struct session_share *find_direct(struct session *s, uint64_t id, uint32_t partition, bool is_some)
{
        if (s->role != ROLE_CLIENT)
                session_refuse(s, id, -EACCES, "the admin socket charges no memory: use the client socket");
        else if (partition >= s->n_shares)
                session_refuse(s, id, -ENOENT,
                               "no such partition: the reply to the hello lists all partitions");
        else if (!is_some)
                session_refuse(s, id, -EINVAL, "the direct charge is of 0 bytes: charge at least 1 byte");
        else
                return &s->shares[partition];
        return NULL;
}

/* ---- direct charges: requests ------------------------------------------------------------------ */

static void note_contexts(struct session *s, struct session_share *share, uint64_t id, const Bfcd__Charge *m)
{
        if (m->n_bytes > 0) {
                session_refuse(s, id, -EINVAL, "a charge that tells of contexts is of 0 bytes");
        } else if (m->contexts->n_bytes > share->usage.direct.n_bytes) {
                session_refuse_format(
                        s, id, -EINVAL,
                        "this session has charged %s in partition '%s': its contexts cannot be %s",
                        NUMBER_SIZE(share->usage.direct.n_bytes), share->quota->partition->name,
                        NUMBER_SIZE(m->contexts->n_bytes));
        } else {
                usage_set_contexts(&share->usage, m->contexts->n_bytes);
                session_done(s, id);
        }
}

int direct_handle_charge(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        const Bfcd__Charge *m = r->charge;
        struct session_share *share = find_direct(s, r->id, m->partition, m->n_bytes > 0 || m->contexts);
        struct quota_request wait = { .n_bytes = m->n_bytes, .is_direct = true, .is_no_refusal = m->again };
        int result;

        (void)ret_why;
        if (share && m->contexts) {
                note_contexts(s, share, r->id, m);
                return 0;
        }
        if (!share || session_join(s, share, r->id) < 0)
                return 0;
        if (share->quota->partition->preallocate) {
                session_refuse_format(
                        s, r->id, -ENOTSUP,
                        "partition '%s' preallocates: its blocks have all of the limit, so nothing else "
                        "is charged there",
                        share->quota->partition->name);
                return 0;
        }
        wait.quota = share->quota;
        result = quota_refuse_at_once(share->quota, m->n_bytes);
        if (result < 0) {
                request_refuse(s, r->id, &wait, result, true);
                return 0;
        }
        result = quota_charge_direct(share->quota, m->n_bytes, m->again);
        if (result < 0)
                request_refuse(s, r->id, &wait, result, false);
        else
                request_wait(s, r->id, m->partition, &wait, m->wait_ms, "");
        return 0;
}

/* Counts it, and commits it before the answer. */
static int add_direct(struct session *s, struct session_share *share, struct charge *granted)
{
        uint64_t before = share->usage.direct.n_bytes;
        int r = granted->n_bytes <= LEDGER_DIRECT_MAX - before ? 0 : -ENOSPC;

        if (r == 0)
                r = ledger_session_set_direct(s->broker->ledger, s->index, quota_id(share->quota),
                                              before + granted->n_bytes);
        if (r < 0)
                return r;
        quota_count_direct(share->quota, &share->usage.direct, granted);
        usage_note_direct(&share->usage);
        recall_note(&share->pressure.asked.recall, share->usage.direct.n_bytes - before, 0);
        if (share->quota->partition->device->direct.n_due > 0)
                broker_note_direct(s->broker, share->quota);
        s->stats.peak_bytes_direct = max_u64(s->stats.peak_bytes_direct, session_direct_bytes(s));
        return 0;
}

static void direct_grant(struct session *s, uint64_t id, size_t share_index, struct quota_request *served)
{
        struct session_share *share = &s->shares[share_index];
        int r = add_direct(s, share, &served->charge);

        if (r == 0) {
                session_done(s, id);
                return;
        }
        quota_return_direct(share->quota, &served->charge);
        session_refuse_format(
                s, id, -EDQUOT,
                "a session has direct charges in at most %u partitions, and of at most %s in each",
                LEDGER_SESSION_DIRECT, NUMBER_SIZE(LEDGER_DIRECT_MAX));
}

/* So much less, which it has. */
static void drop_direct(struct session *s, struct session_share *share, uint64_t n_bytes)
{
        uint64_t left = share->usage.direct.n_bytes - n_bytes;

        (void)ledger_session_set_direct(s->broker->ledger, s->index, quota_id(share->quota), left);
        usage_set_contexts(&share->usage, min_u64(share->usage.bytes_contexts, left));
        quota_drop_direct(share->quota, &share->usage.direct, n_bytes);
        recall_note(&share->pressure.asked.recall, 0, n_bytes);
}

int direct_handle_uncharge(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        const Bfcd__Uncharge *m = r->uncharge;
        struct session_share *share = find_direct(s, r->id, m->partition, m->n_bytes > 0);

        (void)ret_why;
        if (!share)
                return 0;
        if (m->n_bytes > share->usage.direct.n_bytes) {
                session_refuse_format(s, r->id, -EINVAL,
                                      "this session has charged %s in partition '%s', less than %s",
                                      NUMBER_SIZE(share->usage.direct.n_bytes), share->quota->partition->name,
                                      NUMBER_SIZE(m->n_bytes));
                return 0;
        }
        drop_direct(s, share, m->n_bytes);
        session_done(s, r->id);
        return 0;
}

/* ---- direct charges: ends ----------------------------------------------------------------------- */

void direct_end(struct session *s)
{
        for (size_t i = 0; i < s->n_shares; i++) {
                if (s->shares[i].joined)
                        usage_set_contexts(&s->shares[i].usage, 0);
                quota_end_direct(s->shares[i].quota, &s->shares[i].usage.direct);
        }
}

void direct_leave(struct session *s)
{
        for (size_t i = 0; i < s->n_shares; i++) {
                if (s->shares[i].joined)
                        usage_set_contexts(&s->shares[i].usage, 0);
                quota_leave_direct(s->shares[i].quota, &s->shares[i].usage.direct);
        }
}

/* ---- direct charges: over a restart ------------------------------------------------------------- */

/* That of a quota that was closed stays charged there. */
static struct session_share *share_of_id(struct session *s, uint64_t id)
{
        for (size_t i = 0; i < s->n_shares; i++)
                if (quota_id(s->shares[i].quota) == id)
                        return &s->shares[i];
        return NULL;
}

int direct_restore(struct session *s)
{
        const struct ledger_session *record = ledger_session_at(s->broker->ledger, s->index);
        int r = 0;

        for (size_t i = 0; r == 0 && i < LEDGER_SESSION_DIRECT; i++) {
                const struct ledger_direct *d = &record->direct[i];
                struct session_share *share = d->n_bytes > 0 ? share_of_id(s, d->quota_id) : NULL;

                if (!share)
                        continue;
                r = session_rejoin(s, share);
                if (r == 0)
                        r = quota_take_direct(share->quota, d->n_bytes, &share->usage.direct);
                if (r == 0)
                        usage_note_direct(&share->usage);
        }
        return r == -EACCES ? -EBADMSG : r;
}

void direct_begin_list(struct session *s)
{
        for (size_t i = 0; i < s->n_shares; i++) {
                s->shares[i].is_direct_listed = false;
                s->shares[i].listed_direct_bytes = 0;
                s->shares[i].listed_context_bytes = 0;
        }
}

const char *direct_name(struct session *s, const Bfcd__HeldCharge *listed)
{
        struct session_share *share = listed->partition < s->n_shares ? &s->shares[listed->partition] : NULL;

        if (!share)
                return "the resumed client listed a direct charge in a partition that it does not have";
        if (share->is_direct_listed)
                return "the resumed client listed the direct charge of a partition twice";
        if (listed->n_bytes > share->usage.direct.n_bytes)
                return "the resumed client listed a direct charge of more bytes than it has charged";
        if (listed->bytes_contexts > listed->n_bytes)
                return "the resumed client listed contexts of more bytes than its direct charge";
        share->is_direct_listed = true;
        share->listed_context_bytes = listed->bytes_contexts;
        share->listed_direct_bytes = listed->n_bytes;
        return NULL;
}

void direct_resume(struct session *s)
{
        for (size_t i = 0; i < s->n_shares; i++) {
                struct session_share *share = &s->shares[i];

                if (share->usage.direct.n_bytes > share->listed_direct_bytes)
                        drop_direct(s, share, share->usage.direct.n_bytes - share->listed_direct_bytes);
                if (share->joined)
                        usage_set_contexts(&share->usage, share->listed_context_bytes);
        }
}
