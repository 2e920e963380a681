/* The session; see session.h. One handler a request, in a table; each validates
 * all of the request before it changes anything.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "daemon/accounting.h"
#include "daemon/clock.h"
#include "daemon/explain.h"
#include "daemon/log.h"
#include "daemon/number.h"
#include "daemon/order.h"
#include "daemon/report.h"
#include "daemon/restore.h"
#include "proto/memfd.h"

#define SESSION_SENTENCE_BYTES 1024

struct session_request {
        struct quota_request wait;
        struct session *session;
        uint64_t id;
        size_t share;
        char tag[LEDGER_TAG_BYTES];
        TAILQ_ENTRY(session_request) link;
};

struct session_delivery {
        uint64_t request_id;
        uint32_t block; /* in the ledger */
        uint32_t hold;  /* the same: that it was attached; LEDGER_NONE: it is the session's own */
        size_t share;
        TAILQ_ENTRY(session_delivery) link;
};

/* ---- replies ------------------------------------------------------------- */

void session_send(struct session *s, const Bfcd__Reply *reply)
{
        (void)s->ops->send(s->userdata, reply, NULL, 0);
}

static void session_send_refusal(struct session *s, uint64_t id, int error, const char *sentence,
                                 bool is_final)
{
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        Bfcd__Refusal refusal = BFCD__REFUSAL__INIT;
        char copy[SESSION_SENTENCE_BYTES];

        /* protobuf-c's strings are not const; nobody writes there. */
        snprintf(copy, sizeof(copy), "%s", sentence);
        refusal.error = (uint32_t)-error;
        refusal.message = copy;
        refusal.is_final = is_final;
        reply.id = id;
        reply.body_case = BFCD__REPLY__BODY_REFUSAL;
        reply.refusal = &refusal;
        session_send(s, &reply);
}

void session_refuse(struct session *s, uint64_t id, int error, const char *sentence)
{
        session_send_refusal(s, id, error, sentence, false);
}

void session_done(struct session *s, uint64_t id)
{
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        Bfcd__Done done = BFCD__DONE__INIT;

        reply.id = id;
        reply.body_case = BFCD__REPLY__BODY_DONE;
        reply.done = &done;
        session_send(s, &reply);
}

/* error: the holders are named that matter for it; 0: they do not. They are looked
 * for only where a line is written. */
static void session_log_refusal(struct session *s, const char *sentence, struct quota *q, int error)
{
        char line[SESSION_SENTENCE_BYTES];

        s->n_refusals++;
        snprintf(line, sizeof(line), "%s", sentence);
        if (error != 0 && log_limit_is_open(&s->tenant->refusal_log))
                explain_to_log(q, error, line, sizeof(line));
        log_limited(&s->tenant->refusal_log, LOG_LEVEL_NOTICE,
                    "session %" PRIu64 " (tenant '%s', uid %u, pid %d, %s): refused (%" PRIu64 " so far): %s",
                    s->id, s->tenant->name, (unsigned)s->who.uid, (int)s->who.pid, s->name, s->n_refusals,
                    line);
        s->broker->has_accounts |= s->tenant->refusal_log.n_left_out > 0;
}

/* ---- extents and blocks -------------------------------------------------- */

int session_reserve_seen(struct session_share *share)
{
        size_t n = arena_n_slots(share->quota->arena);
        uint64_t *seen;

        if (n <= share->n_seen)
                return 0;
        seen = realloc(share->seen, n * sizeof(*seen));
        if (!seen)
                return -ENOMEM;
        memset(seen + share->n_seen, 0, (n - share->n_seen) * sizeof(*seen));
        share->seen = seen;
        share->n_seen = n;
        return 0;
}

/* Extents on their way to a session, in one message. */
struct extent_batch {
        size_t n;
        bool more; /* the window or the message takes no more */
        Bfcd__Extent extents[SESSION_MAX_UNACKED];
        Bfcd__Extent *pointers[SESSION_MAX_UNACKED];
        int fds[SESSION_MAX_UNACKED]; /* owned */
        size_t n_fds;
        size_t slots[SESSION_MAX_UNACKED];
        uint32_t exports[SESSION_MAX_UNACKED]; /* in the ledger */
};

/* An error is one of device_lend(); the batch has the extent all the same. */
static int batch_add(struct extent_batch *batch, const struct session_share *share, uint32_t partition,
                     const struct ledger_extent *extent, size_t slot, uint32_t export)
{
        const struct arena *arena = share->quota->arena;
        Bfcd__Extent *e = &batch->extents[batch->n];
        const struct device_extent *memory = arena_slot_memory(arena, slot);
        struct arena_place place;
        int fd;

        arena_locate(arena, extent->offset, &place);
        bfcd__extent__init(e);
        e->extent_id = extent->id;
        e->region_id = place.region_id;
        e->region_bytes = place.region_bytes;
        e->offset = place.offset;
        e->n_bytes = extent->n_bytes;
        e->partition = partition;
        batch->pointers[batch->n] = e;
        batch->slots[batch->n] = slot;
        batch->exports[batch->n] = export;
        batch->n++;
        if (memory->share != DEVICE_SHARE_FD) {
                e->handle = (ProtobufCBinaryData){ sizeof(memory->handle), (uint8_t *)memory->handle };
                return 0;
        }
        fd = device_lend(share->quota->partition->device, memory);
        if (fd < 0)
                return fd;
        batch->fds[batch->n_fds++] = fd;
        return 0;
}

/* They were lent for the message alone, which has duplicates of them. */
static void batch_close_fds(struct extent_batch *batch)
{
        while (batch->n_fds > 0)
                close(batch->fds[--batch->n_fds]);
}

/* Exports what the block lies in and the session has not met. */
static int session_collect_extents(struct session *s, struct session_share *share,
                                   const struct ledger_block *block, struct extent_batch *ret)
{
        struct ledger *ledger = s->broker->ledger;
        struct arena *arena = share->quota->arena;
        size_t slot, last;

        ret->n = 0;
        ret->n_fds = 0;
        ret->more = false;
        for (slot = arena_slots(arena, block->offset, block->n_bytes, &last); slot <= last; slot++) {
                uint32_t index = arena_slot_extent(arena, slot), export;
                struct ledger_extent *extent = ledger_extent_at(ledger, index);
                int r;

                if (share->seen[slot] == extent->id)
                        continue;
                ret->more = s->n_unacked + ret->n == SESSION_MAX_UNACKED;
                if (ret->more)
                        break;
                r = ledger_export_add(ledger, s->index, index, &export);
                if (r < 0)
                        return r;
                share->seen[slot] = extent->id;
                r = batch_add(ret, share, (uint32_t)(share - s->shares), extent, slot, export);
                if (r < 0)
                        return r;
        }
        return 0;
}

static void session_take_back(struct session *s, struct session_share *share,
                              const struct extent_batch *batch)
{
        for (size_t i = 0; i < batch->n; i++) {
                ledger_export_clear(s->broker->ledger, batch->exports[i]);
                share->seen[batch->slots[i]] = 0;
        }
}

/* Sends extents of the block that the session has not met, as many as the
 * window and one message take. 0: all are sent. 1: wait for an ack. Negative:
 * they cannot be sent. */
static int session_send_extents(struct session *s, struct session_share *share,
                                const struct ledger_block *block)
{
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        Bfcd__Extents message = BFCD__EXTENTS__INIT;
        struct extent_batch batch;
        int r = session_collect_extents(s, share, block, &batch);

        if (r == 0 && batch.n > 0) {
                message.sequence = s->sequence + 1;
                message.n_extents = batch.n;
                message.extents = batch.pointers;
                reply.body_case = BFCD__REPLY__BODY_EXTENTS;
                reply.extents = &message;
                r = s->ops->send(s->userdata, &reply, batch.fds, batch.n_fds);
        }
        batch_close_fds(&batch);
        if (r < 0) {
                session_take_back(s, share, &batch);
                return r;
        }
        if (batch.n > 0) {
                s->sequence++;
                s->n_unacked += (uint32_t)batch.n;
                s->in_flight = true;
                s->sent_counts[s->sequence % SESSION_MAX_UNACKED] = (uint8_t)batch.n;
        }
        return batch.more ? 1 : 0;
}

static void session_describe_block(const struct session_share *share, const struct ledger_block *block,
                                   Bfcd__Block *ret)
{
        struct arena_place place;

        bfcd__block__init(ret);
        arena_locate(share->quota->arena, block->offset, &place);
        ret->block_id = block->id;
        ret->region_id = place.region_id;
        ret->offset = place.offset;
        ret->n_bytes = block->n_bytes;
}

static void session_send_block(struct session *s, const struct session_delivery *d)
{
        struct ledger_block *block = ledger_block_at(s->broker->ledger, d->block);
        Bfcd__Attached attached = BFCD__ATTACHED__INIT;
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        Bfcd__Block message;

        session_describe_block(&s->shares[d->share], block, &message);
        reply.id = d->request_id;
        if (d->hold == LEDGER_NONE) {
                block->links.in_delivery = false;
                reply.body_case = BFCD__REPLY__BODY_BLOCK;
                reply.block = &message;
        } else {
                shared_delivered(s, d->hold);
                attached.block = &message;
                attached.partition = (uint32_t)d->share;
                attached.n_requested = block->n_requested;
                reply.body_case = BFCD__REPLY__BODY_ATTACHED;
                reply.attached = &attached;
        }
        session_send(s, &reply);
}

struct session_share *session_share_of(const struct session *s, uint32_t quota)
{
        for (size_t i = 0; i < s->n_shares; i++)
                if (s->shares[i].quota->index == quota)
                        return &s->shares[i];
        return NULL;
}

void session_free_block(struct session *s, uint32_t index)
{
        struct ledger_block *block = ledger_block_at(s->broker->ledger, index);
        struct session_share *share = session_share_of(s, block->quota);
        uint64_t n_bytes = block->n_bytes, n_requested = block->n_requested, handle = block->handle;

        trim_remove_block(share, block->offset, n_bytes);
        ledger_block_clear(s->broker->ledger, index);
        s->bytes_in_use -= n_bytes;
        holding_remove(&share->holding, n_bytes);
        quota_dealloc(share->quota, handle, n_bytes, n_requested);
}

static void session_add_delivery(struct session *s, struct session_delivery *d)
{
        TAILQ_INSERT_TAIL(&s->deliveries, d, link);
        s->n_deliveries++;
}

static void session_remove_delivery(struct session *s, struct session_delivery *d)
{
        TAILQ_REMOVE(&s->deliveries, d, link);
        s->n_deliveries--;
}

/* The block is free, or let go of, and its request is refused. */
static void session_undeliver(struct session *s, struct session_delivery *d, int error, const char *sentence)
{
        session_remove_delivery(s, d);
        if (d->hold == LEDGER_NONE)
                session_free_block(s, d->block);
        else
                shared_undelivered(s, d->hold);
        session_refuse(s, d->request_id, error, sentence);
        free(d);
}

/* Delivers the first block. False: the rest of its extents waits for an acknowledgement. */
static bool session_deliver_first(struct session *s)
{
        struct session_delivery *d = TAILQ_FIRST(&s->deliveries);
        int r = session_send_extents(s, &s->shares[d->share], ledger_block_at(s->broker->ledger, d->block));

        if (r > 0)
                return false;
        if (r < 0) {
                session_undeliver(s, d, -ENOMEM,
                                  r == -EMFILE ? "the daemon has no file descriptors left to share memory"
                                               : "the daemon's table of exports is full");
                return true;
        }
        session_remove_delivery(s, d);
        session_send_block(s, d);
        free(d);
        return true;
}

void session_deliver(struct session *s)
{
        unsigned n = 0;

        while (n < SESSION_DELIVERY_SLICE && s->n_deliveries > 0 && session_deliver_first(s))
                n++;
        s->is_delivering = n == SESSION_DELIVERY_SLICE && s->n_deliveries > 0;
        if (s->is_delivering)
                s->ops->resume(s->userdata);
}

/* The last of the list. Blocks before it wait for an acknowledgement or for session_deliver(). */
static void session_begin_delivery(struct session *s, struct session_delivery *d)
{
        session_add_delivery(s, d);
        if (s->n_deliveries == 1)
                session_deliver(s);
}

/* Requests for blocks are refused then, since the connection must go on reading: the acknowledgement
 * comes behind them. */
bool session_refuses_delivery(struct session *s, uint64_t id)
{
        char sentence[128];

        if (s->n_deliveries < SESSION_MAX_DELIVERIES)
                return false;
        snprintf(sentence, sizeof(sentence),
                 "too many blocks of this session wait for acknowledgements of extents: %zu of at most %u",
                 s->n_deliveries, SESSION_MAX_DELIVERIES);
        session_refuse(s, id, -EDQUOT, sentence);
        return true;
}

int session_deliver_hold(struct session *s, uint64_t id, struct session_share *share, uint32_t block,
                         uint32_t hold)
{
        struct session_delivery *d = malloc(sizeof(*d));

        if (!d || session_reserve_seen(share) < 0) {
                free(d);
                return -ENOMEM;
        }
        *d = (struct session_delivery){
                .request_id = id, .block = block, .hold = hold, .share = (size_t)(share - s->shares)
        };
        session_begin_delivery(s, d);
        return 0;
}

void session_note_peak(struct session_share *share)
{
        if (share->holding.bytes <= share->peak_bytes)
                return;
        share->quota->peaks_bytes += share->holding.bytes - share->peak_bytes;
        share->peak_bytes = share->holding.bytes;
}

static void session_forget_peak(struct session_share *share)
{
        share->quota->peaks_bytes -= share->peak_bytes;
        share->peak_bytes = 0;
}

/* A block has been taken out of the quota for request `id`: writes it down and
 * begins to deliver it. */
static void session_give_block(struct session *s, uint64_t id, size_t share_index, uint64_t n_requested,
                               const char *tag, bfc_handle handle, uint64_t offset)
{
        struct session_share *share = &s->shares[share_index];
        struct session_delivery *d = malloc(sizeof(*d));
        struct ledger_block facts = {
                .offset = offset,
                .n_bytes = bfc_block_bytes(n_requested),
                .n_requested = n_requested,
                .born_ms = clock_ms(),
                .session = s->index,
                .quota = share->quota->index,
                .handle = handle,
        };
        int r = d ? session_reserve_seen(share) : -ENOMEM;

        snprintf(facts.tag, sizeof(facts.tag), "%s", tag);
        if (r == 0)
                r = ledger_block_add(s->broker->ledger, &facts, &d->block);
        if (r < 0) {
                free(d);
                quota_dealloc(share->quota, handle, facts.n_bytes, n_requested);
                session_refuse(s, id, -ENOMEM,
                               r == -ENOSPC ? "the daemon's table of blocks is full"
                                            : "the daemon is out of memory");
                return;
        }
        trim_add_block(s, share, offset, facts.n_bytes);
        s->n_allocs++;
        s->bytes_in_use += facts.n_bytes;
        holding_add(&share->holding, facts.n_bytes);
        session_note_peak(share);
        if (s->bytes_in_use > s->peak_bytes_in_use)
                s->peak_bytes_in_use = s->bytes_in_use;
        d->request_id = id;
        d->hold = LEDGER_NONE;
        d->share = share_index;
        ledger_block_at(s->broker->ledger, d->block)->links.in_delivery = true;
        session_begin_delivery(s, d);
}

/* is_final: nothing that is given back helps. */
static void session_refuse_malloc(struct session *s, uint64_t id, const struct quota_request *refused,
                                  int error, bool is_final)
{
        char sentence[SESSION_SENTENCE_BYTES];
        bool device_failed = refused->device_failed && error != -ENODEV;
        bool names_holders = !device_failed && (error == -EDQUOT || error == -ENOMEM);

        if (device_failed && (error == -EXFULL || error == -ECOMM))
                snprintf(sentence, sizeof(sentence),
                         "a block of %" PRIu64 " bytes was refused, because its memory would not survive "
                         "a restart of the daemon: %s",
                         refused->n_bytes,
                         error == -EXFULL ? "the service manager's fd store is full"
                                          : "the service manager does not store its file descriptor");
        else if (device_failed && error == -ECANCELED)
                snprintf(sentence, sizeof(sentence),
                         "no new memory is allocated for a block of %" PRIu64
                         " bytes: the kernel killed a process for lack of memory while the previous daemon "
                         "allocated memory for tenant '%s' in partition '%s'; try again in %" PRIu64 " s",
                         refused->n_bytes, refused->quota->tenant, refused->quota->partition->name,
                         quota_growth_pause_ms(refused->quota) / 1000 + 1);
        else if (device_failed)
                snprintf(sentence, sizeof(sentence),
                         "device '%s' could not allocate memory for a block of %" PRIu64 " bytes: %s",
                         refused->quota->partition->device_id, refused->n_bytes, device_error(error));
        else
                quota_explain(refused, error, sentence, sizeof(sentence));
        names_holders = names_holders && !refused->is_no_refusal;
        if (!refused->is_no_refusal)
                session_log_refusal(s, sentence, refused->quota, names_holders ? error : 0);
        if (names_holders)
                explain_to_tenant(refused->quota, error, sentence, sizeof(sentence));
        /* Whatever the device lacked. */
        session_send_refusal(s, id, device_failed ? -ENOMEM : error, sentence, is_final);
}

static void session_drop_request(struct session *s, struct session_request *request)
{
        TAILQ_REMOVE(&s->requests, request, link);
        s->n_requests--;
        free(request);
}

static void session_request_done(struct quota_request *wait, int result, bfc_handle handle, uint64_t offset)
{
        struct session_request *request = (struct session_request *)wait;
        struct session *s = request->session;

        TAILQ_REMOVE(&s->requests, request, link);
        s->n_requests--;
        if (result < 0)
                session_refuse_malloc(s, request->id, wait, result, false);
        else
                session_give_block(s, request->id, request->share, wait->n_bytes, request->tag, handle,
                                   offset);
        free(request);
        s->ops->resume(s->userdata);
}

/* ---- handlers ------------------------------------------------------------ */

int session_join(struct session *s, struct session_share *share, uint64_t id)
{
        char sentence[SESSION_SENTENCE_BYTES];
        int r;

        if (share->joined)
                return 0;
        r = quota_join(share->quota);
        if (r == -ENOENT) {
                snprintf(sentence, sizeof(sentence),
                         "tenant '%s' no longer has a quota in partition '%s': the configuration was "
                         "changed",
                         s->tenant->name, share->quota->partition->name);
                session_refuse(s, id, r, sentence);
                return r;
        }
        if (r < 0) {
                snprintf(sentence, sizeof(sentence),
                         "tenant '%s' has %" PRIu32
                         " sessions in partition '%s': its limit max_sessions is %" PRIu32,
                         s->tenant->name, share->quota->n_sessions, share->quota->partition->name,
                         share->quota->max_sessions);
                session_refuse(s, id, r, sentence);
                return r;
        }
        share->joined = true;
        holding_join(&share->holding, s, share->quota);
        return 0;
}

static void session_leave(struct session_share *share)
{
        holding_leave(&share->holding);
        quota_leave(share->quota);
}

/* 31 bytes of printable ASCII at most. */
static bool tag_is_valid(const char *tag)
{
        size_t n = 0;

        while (tag[n] >= ' ' && tag[n] <= '~')
                n++;
        return n < LEDGER_TAG_BYTES && tag[n] == '\0';
}

#define MALLOC_FLAGS                                                                                         \
        ((uint64_t)BFCD__MALLOC_FLAG__MALLOC_FLAG_ONE_EXTENT | (uint64_t)BFCD__MALLOC_FLAG__MALLOC_FLAG_AGAIN)

/* What is wrong with a Malloc in itself; true: it was refused. */
static bool session_refuses_malloc(struct session *s, uint64_t id, const Bfcd__Malloc *m)
{
        char sentence[SESSION_SENTENCE_BYTES];

        if (s->admin) {
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
                snprintf(sentence, sizeof(sentence),
                         "the flags 0x%" PRIx64 " have bits that this daemon does not support; it "
                         "supports 0x%" PRIx64,
                         m->flags, MALLOC_FLAGS);
                session_refuse(s, id, -EINVAL, sentence);
                return true;
        }
        if (!tag_is_valid(m->tag)) {
                session_refuse(s, id, -EINVAL,
                               "the tag is not valid: it has at most 31 bytes of printable ASCII");
                return true;
        }
        return false;
}

/* Of what can never be granted nothing is tried, by this daemon and by the client: whatever they would give
 * back for it, a cache for instance, would be lost in vain. It is refused also where the client has a part of
 * it already and asks for the rest. */
static bool session_refuses_for_good(struct session *s, uint64_t id, struct quota *q, const Bfcd__Malloc *m)
{
        struct quota_request refused = {
                .quota = q,
                .n_bytes = m->n_needed > 0 ? m->n_needed : m->n_bytes,
                .in_extent = (m->flags & BFCD__MALLOC_FLAG__MALLOC_FLAG_ONE_EXTENT) != 0,
        };
        int r = quota_refuse_at_once(q, refused.n_bytes);

        if (r < 0)
                session_refuse_malloc(s, id, &refused, r, true);
        return r < 0;
}

static int handle_malloc(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        const Bfcd__Malloc *m = r->malloc;
        bool in_extent = (m->flags & BFCD__MALLOC_FLAG__MALLOC_FLAG_ONE_EXTENT) != 0;
        bool again = (m->flags & BFCD__MALLOC_FLAG__MALLOC_FLAG_AGAIN) != 0;
        struct session_request *request;
        struct quota *quota;
        bfc_handle handle;
        uint64_t offset;
        int result;

        (void)ret_why;
        if (session_refuses_malloc(s, r->id, m) || session_refuses_delivery(s, r->id) ||
            session_join(s, &s->shares[m->partition], r->id) < 0)
                return 0;

        quota = s->shares[m->partition].quota;
        if (session_refuses_for_good(s, r->id, quota, m))
                return 0;
        result = again ? quota_alloc_or_again(quota, m->n_bytes, in_extent, &handle, &offset)
                       : quota_alloc(quota, m->n_bytes, in_extent, &handle, &offset);
        if (result == 0) {
                session_give_block(s, r->id, m->partition, m->n_bytes, m->tag, handle, offset);
                return 0;
        }
        request = result > 0 ? calloc(1, sizeof(*request)) : NULL;
        if (!request) {
                struct quota_request refused = {
                        .quota = quota, .n_bytes = m->n_bytes, .in_extent = in_extent, .is_no_refusal = again
                };

                session_refuse_malloc(s, r->id, &refused, result > 0 ? -ENOMEM : result, false);
                return 0;
        }
        request->wait.quota = quota;
        request->wait.n_bytes = m->n_bytes;
        request->wait.in_extent = in_extent;
        request->wait.is_no_refusal = again;
        request->wait.wait_ms = m->wait_ms < SESSION_MAX_WAIT_MS ? m->wait_ms : SESSION_MAX_WAIT_MS;
        request->wait.asker = s;
        request->wait.done = session_request_done;
        request->session = s;
        request->id = r->id;
        request->share = m->partition;
        snprintf(request->tag, sizeof(request->tag), "%s", m->tag);
        TAILQ_INSERT_TAIL(&s->requests, request, link);
        s->n_requests++;
        quota_wait(&request->wait);
        return 0;
}

static bool session_withdraw_malloc(struct session *s, uint64_t id)
{
        struct session_request *request;

        TAILQ_FOREACH(request, &s->requests, link)
        {
                if (request->id != id)
                        continue;
                quota_cancel(&request->wait);
                session_drop_request(s, request);
                return true;
        }
        return false;
}

/* What has been answered by now, or is being delivered, is the client's to free. */
static int handle_cancel(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        uint64_t id = r->cancel->request_id;

        (void)ret_why;
        if (!session_withdraw_malloc(s, id) && !shared_withdraw_attach(s, id))
                return 0;
        session_refuse(s, id, -ECANCELED, "the client cancelled this request");
        s->ops->resume(s->userdata);
        return 0;
}

/* False: it is not the session's, or not yet. */
static bool session_gives_back(struct session *s, uint32_t index)
{
        const struct ledger_block *block;

        if (index == LEDGER_NONE)
                return false;
        block = ledger_block_at(s->broker->ledger, index);
        if (block->shared != LEDGER_NONE)
                return !s->admin && shared_let_go(s, index);
        if (block->session != s->index || block->links.in_delivery)
                return false;
        session_free_block(s, index);
        return true;
}

static int handle_free(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        uint64_t id = r->free->block_id;
        uint32_t index = ledger_block_find(s->broker->ledger, id);
        char sentence[SESSION_SENTENCE_BYTES];

        (void)ret_why;
        if (!session_gives_back(s, index)) {
                snprintf(sentence, sizeof(sentence),
                         "block %" PRIu64 " does not belong to this session: already freed, or never "
                         "allocated by it",
                         id);
                session_refuse(s, r->id, -EINVAL, sentence);
                return 0;
        }
        session_done(s, r->id);
        return 0;
}

/* What is wrong with a Split; NULL: nothing. */
static const char *split_fault(const struct session *s, uint32_t index, uint64_t at)
{
        const struct ledger_block *block =
                index != LEDGER_NONE ? ledger_block_at(s->broker->ledger, index) : NULL;

        if (!block || block->session != s->index || block->links.in_delivery)
                return "it does not belong to this session, or it is shared";
        if (at == 0 || at % BFC_GRANULE != 0 || at >= block->n_bytes)
                return "the offset is not a multiple of 256 bytes inside the block";
        return NULL;
}

/* 0: *ret_high is the new block. Nothing changed otherwise. */
static int session_split_block(struct session *s, uint32_t index, uint64_t at, uint32_t n_more,
                               uint32_t *ret_high)
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
        holding_split(&share->holding, n_bytes);
        s->n_allocs++;
        return r;
}

static int handle_split(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        uint64_t id = r->split->block_id, at = r->split->n_bytes;
        uint32_t index = ledger_block_find(s->broker->ledger, id), high = LEDGER_NONE;
        const char *fault = split_fault(s, index, at);
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        Bfcd__SplitReply split = BFCD__SPLIT_REPLY__INIT;
        char sentence[SESSION_SENTENCE_BYTES];
        int error = 0;

        (void)ret_why;
        if (index != LEDGER_NONE && ledger_block_at(s->broker->ledger, index)->session == s->index)
                high = ledger_block_split_off(s->broker->ledger, index, at);
        if (high == LEDGER_NONE)
                error = fault ? -EINVAL : session_split_block(s, index, at, r->split->n_more, &high);
        if (error < 0) {
                snprintf(sentence, sizeof(sentence), "block %" PRIu64 " cannot be split: %s", id,
                         fault ? fault
                         : error == -EDQUOT
                                 ? "the tenant's max_blocks in the partition does not hold the parts"
                                 : "the daemon is out of memory or block records");
                session_refuse(s, r->id, error, sentence);
                return 0;
        }
        split.block_id = ledger_block_at(s->broker->ledger, high)->id;
        reply.id = r->id;
        reply.body_case = BFCD__REPLY__BODY_SPLIT;
        reply.split = &split;
        session_send(s, &reply);
        return 0;
}

/* The session's export of an extent that was sent to it lately: the last ones come first, and at most
 * SESSION_MAX_UNACKED are on their way. LEDGER_NONE: none. */
static uint32_t session_find_sent(const struct session *s, uint64_t extent_id)
{
        struct ledger *l = s->broker->ledger;
        uint32_t x = ledger_session_at(l, s->index)->links.first_export;

        for (unsigned i = 0; i < SESSION_MAX_UNACKED && x != LEDGER_NONE; i++) {
                if (ledger_extent_at(l, ledger_export_at(l, x)->extent)->id == extent_id)
                        return x;
                x = ledger_export_at(l, x)->links.next_of_session;
        }
        return LEDGER_NONE;
}

/* The session has not received the extent, which is sent again before the next block there. A block that
 * waits for more extents would be sent them for as long as the process is at its limit: so it is refused. */
static void session_unsend(struct session *s, uint64_t extent_id)
{
        struct ledger *l = s->broker->ledger;
        struct session_delivery *d = TAILQ_FIRST(&s->deliveries);
        const struct ledger_block *block = d ? ledger_block_at(l, d->block) : NULL;
        uint32_t x = session_find_sent(s, extent_id);
        const struct ledger_extent *extent;
        struct session_share *share;
        size_t slot, last;
        bool waits;

        if (x == LEDGER_NONE)
                return; /* it was released meanwhile, or is named twice */
        extent = ledger_extent_at(l, ledger_export_at(l, x)->extent);
        share = session_share_of(s, extent->quota);
        if (share->quota->partition->share != DEVICE_SHARE_FD ||
            arena_extent_is_retired(share->quota->arena, ledger_export_at(l, x)->extent))
                return; /* the client is to confirm that */
        slot = arena_slots(share->quota->arena, extent->offset, extent->n_bytes, &last);
        share->seen[slot] = 0;
        waits = block && block->quota == extent->quota && block->offset < extent->offset + extent->n_bytes &&
                extent->offset < block->offset + block->n_bytes;
        retire_clear_export(s, x);
        if (waits)
                session_undeliver(s, d, -EMFILE,
                                  "the process is at its limit of open files, so memory could not be passed "
                                  "to it: raise RLIMIT_NOFILE (ulimit -n)");
}

/* With at most as many lost extents as it acknowledges. */
static bool ack_is_valid(const struct session *s, const Bfcd__Ack *ack)
{
        size_t n = 0;

        if (ack->sequence <= s->acked_sequence || ack->sequence > s->sequence)
                return false;
        for (uint64_t i = s->acked_sequence + 1; i <= ack->sequence; i++)
                n += s->sent_counts[i % SESSION_MAX_UNACKED];
        return ack->n_lost_extent_ids <= n;
}

static int handle_ack(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        if (!ack_is_valid(s, r->ack)) {
                *ret_why = "the client acknowledged extents that were not sent";
                return -EPROTO;
        }
        if (r->ack->n_lost_extent_ids > SESSION_MAX_LOST - s->n_lost) {
                *ret_why = "the client did not receive too many extents: raise its RLIMIT_NOFILE (ulimit -n)";
                return -EPROTO;
        }
        s->n_lost += (uint32_t)r->ack->n_lost_extent_ids;
        while (s->acked_sequence < r->ack->sequence)
                s->n_unacked -= s->sent_counts[++s->acked_sequence % SESSION_MAX_UNACKED];
        for (size_t i = 0; i < r->ack->n_lost_extent_ids; i++)
                session_unsend(s, r->ack->lost_extent_ids[i]);
        if (!s->is_delivering)
                session_deliver(s);
        retire_flush(s);
        return 0;
}

/* A partition by its number in the hello's reply; NULL: it was refused. */
static struct session_share *session_find_quota(struct session *s, uint64_t id, uint32_t partition)
{
        if (!s->admin && partition < s->n_shares)
                return &s->shares[partition];
        session_refuse(s, id, -ENOENT, "no such partition: the reply to the hello lists all partitions");
        return NULL;
}

/* A session that may not use the quota gets nothing of it. */
static void describe_room(const struct session_share *share, Bfcd__Room *ret)
{
        struct quota *q = share->quota;
        bool may_use = share->joined || (!q->is_removed && q->n_sessions < q->max_sessions);

        ret->bytes_total = min_u64(q->account.limit_bytes, q->partition->pool.limit_bytes);
        ret->bytes_free = may_use ? min_u64(quota_obtainable(q), ret->bytes_total) : 0;
}

static int handle_usage(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        struct session_share *share = session_find_quota(s, r->id, r->usage->partition);
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        Bfcd__UsageReply usage = BFCD__USAGE_REPLY__INIT;
        Bfcd__Figures figures = BFCD__FIGURES__INIT;
        Bfcd__Room room = BFCD__ROOM__INIT;

        (void)ret_why;
        if (!share)
                return 0;
        report_quota_figures(share->quota, &figures);
        usage.figures = &figures;
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
        struct session_share *share = session_find_quota(s, r->id, r->release->partition);
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

/* By the config in force, unless that is known. */
static int session_match(struct session *s)
{
        int r = match_ids(s->broker->matcher, &s->who);

        if (r == 0)
                match_places(s->broker->matcher, &s->who);
        return r;
}

static int handle_list(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        struct report report;

        (void)ret_why;
        if (r->list->kind == BFCD__LIST__KIND__WHOAMI && session_match(s) < 0) {
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

/* Answered when all is freed, so that a client that waits for it leaves nothing. */
static int handle_goodbye(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        (void)ret_why;
        if (r->goodbye->exits) { /* all is mapped still, and stays the session's until the process ends */
                s->exits = true;
                session_done(s, r->id);
                return 0;
        }
        s->goodbye = true;
        s->goodbye_id = r->id;
        session_close(s, "goodbye");
        return 0;
}

static int handle_reset_peaks(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        const Bfcd__ResetPeaks *reset = r->reset_peaks;
        struct broker *b = s->broker;
        size_t n = 0;

        (void)ret_why;
        if (!s->admin) {
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
        log_info("session %" PRIu64 " (uid %u): peaks of %zu quotas reset", s->id, (unsigned)s->who.uid, n);
        session_done(s, r->id);
        return 0;
}

static int handle_show_config(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        Bfcd__ConfigReply config = BFCD__CONFIG_REPLY__INIT;
        const char *text = s->broker->config_text;
        size_t n_text = strlen(text);
        char piece[16384];
        size_t n;

        (void)ret_why;
        if (!s->admin) {
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

/* ---- hello --------------------------------------------------------------- */

static void session_copy_name(struct session *s, const char *name)
{
        size_t i;

        for (i = 0; i < sizeof(s->name) - 1 && name[i]; i++)
                s->name[i] = (unsigned char)name[i] < ' ' || (unsigned char)name[i] > '~' ? '?' : name[i];
        s->name[i] = '\0';
}

int session_find_share(const struct session *s, const char *partition, size_t *ret)
{
        for (size_t i = 0; i < s->n_shares; i++) {
                if (partition[0] == '\0' || strcmp(partition, s->shares[i].quota->partition->name) == 0) {
                        *ret = i;
                        return 0;
                }
        }
        return -ENOENT;
}

void session_leave_shares(struct session *s)
{
        for (size_t i = 0; i < s->n_shares; i++) {
                struct quota *q = s->shares[i].quota;

                session_forget_peak(&s->shares[i]);
                if (s->shares[i].joined)
                        session_leave(&s->shares[i]);
                q->n_shares--;
                broker_note_leave(s->broker, q);
                free(s->shares[i].seen);
                trim_share_free(&s->shares[i]);
        }
        free(s->shares);
        s->shares = NULL;
        s->n_shares = 0;
}

static void session_forget_tenant(struct session *s)
{
        session_leave_shares(s);
        s->tenant = NULL;
}

/* In all quotas that its tenant has now; what is new later is for later sessions. */
int session_take_shares(struct session *s, uint64_t quotas_end)
{
        const struct tenant *t = s->tenant;

        s->shares = calloc(t->n_quotas + 1, sizeof(*s->shares));
        if (!s->shares)
                return -ENOMEM;
        for (size_t i = 0; i < t->n_quotas; i++) {
                bool is_late = ledger_quota_at(s->broker->ledger, t->quotas[i]->index)->id >= quotas_end;

                if (is_late || (s->index == LEDGER_NONE && t->quotas[i]->is_removed))
                        continue;
                s->shares[s->n_shares++].quota = t->quotas[i];
                t->quotas[i]->n_shares++;
        }
        return 0;
}

static void session_refuse_partition(struct session *s, const Bfcd__Request *r)
{
        char sentence[SESSION_SENTENCE_BYTES];

        snprintf(sentence, sizeof(sentence),
                 "tenant '%s' has no quota in partition '%.63s'; its partitions are:", s->tenant->name,
                 r->hello->partition);
        for (size_t i = 0; i < s->n_shares; i++) {
                size_t used = strlen(sentence);

                snprintf(sentence + used, sizeof(sentence) - used, " '%s'",
                         s->shares[i].quota->partition->name);
        }
        session_refuse(s, r->id, -ENOENT, sentence);
}

/* Finds the tenant and joins its quota. Refuses where that fails. */
static int session_admit(struct session *s, const Bfcd__Request *r, size_t *ret_share)
{
        struct broker *b = s->broker;
        char sentence[SESSION_SENTENCE_BYTES];

        if (session_match(s) < 0) {
                session_refuse(s, r->id, -ENOMEM, "the daemon is out of memory");
                return -ENOMEM;
        }
        s->tenant = tenant_select(b->order, b->n_order, b->default_tenant, r->hello->tenant, &s->who,
                                  sentence, sizeof(sentence));
        if (!s->tenant) {
                log_limited(log_limit_of_user(&b->refusal_logs, s->who.uid), LOG_LEVEL_NOTICE,
                            "pid %d refused: %s", (int)s->who.pid, sentence);
                session_refuse(s, r->id, -EACCES, sentence);
                return -EACCES;
        }
        if (broker_admits(b, s->tenant, sentence, sizeof(sentence)) < 0) {
                session_refuse(s, r->id, -EDQUOT, sentence);
                return -EDQUOT;
        }
        if (session_take_shares(s, UINT64_MAX) < 0) {
                session_refuse(s, r->id, -ENOMEM, "the daemon is out of memory");
                return -ENOMEM;
        }
        if (session_find_share(s, r->hello->partition, ret_share) < 0) {
                session_refuse_partition(s, r);
                return -ENOENT;
        }
        return session_join(s, &s->shares[*ret_share], r->id);
}

void session_enlist(struct session *s)
{
        struct broker *b = s->broker;

        s->id = ledger_session_at(b->ledger, s->index)->id;
        b->sessions[s->index] = s;
        if (s->index >= b->n_session_slots)
                b->n_session_slots = (size_t)s->index + 1;
        b->n_sessions++;
        if (s->tenant)
                broker_session_begins(b, s->tenant);
}

static int session_write_down(struct session *s)
{
        struct broker *b = s->broker;
        struct ledger_session facts = {
                .start_time = s->who.start_time,
                .pid = (uint32_t)s->who.pid,
                .uid = s->who.uid,
                .gid = s->who.gid,
                .born_ms = s->born_ms,
                .quotas_end = ledger_quotas_end(b->ledger),
        };
        int r;

        snprintf(facts.name, sizeof(facts.name), "%s", s->name);
        if (getrandom(facts.secret, sizeof(facts.secret), 0) != (ssize_t)sizeof(facts.secret))
                return -EIO;
        if (s->tenant)
                snprintf(facts.tenant, sizeof(facts.tenant), "%s", s->tenant->name);
        r = ledger_session_add(b->ledger, &facts, &s->index);
        if (r < 0)
                return r;
        s->state = SESSION_LIVE;
        session_enlist(s);
        return 0;
}

/* protobuf-c's strings and bytes are not const; nobody writes there. */
static void session_describe_partition(const struct broker *b, const struct quota *q,
                                       Bfcd__PartitionInfo *ret)
{
        const struct partition *p = q->partition;

        bfcd__partition_info__init(ret);
        ret->name = (char *)(uintptr_t)p->name;
        ret->device = (char *)(uintptr_t)p->device_id;
        ret->bytes_limit = q->account.limit_bytes;
        ret->share = (char *)(uintptr_t)p->share_name;
        ret->usage_entry = (uint32_t)(p - b->partitions);
        if (p->is_cuda) {
                ret->device_uuid.data = (uint8_t *)(uintptr_t)p->uuid;
                ret->device_uuid.len = sizeof(p->uuid);
        }
}

/* -1 for a session that did not ask for events; operators hold nothing that
 * events are about. */
int session_open_events(struct session *s, const Bfcd__Request *r, int *ret_fd)
{
        *ret_fd = -1;
        if (s->admin || !s->ops->open_events ||
            !(r->hello->capabilities & BFCD__CAPABILITY__CAPABILITY_EVENTS))
                return 0;
        return s->ops->open_events(s->userdata, ret_fd);
}

/* A successor could take over all that it may come to hold, and would know its process. */
static bool session_could_return(const struct session *s)
{
        if (s->admin || !store_keeps(s->broker->store) || s->who.pid <= 0 || s->who.start_time == 0)
                return false;
        for (size_t i = 0; i < s->n_shares; i++)
                if (s->shares[i].quota->partition->share != DEVICE_SHARE_FD ||
                    !s->shares[i].quota->partition->device->ops->adopt)
                        return false;
        return true;
}

void session_grant(struct session *s, const Bfcd__Request *r, int events_fd)
{
        uint64_t asked = s->admin ? 0 : r->hello->capabilities;

        s->takes_trims = events_fd >= 0 && (asked & BFCD__CAPABILITY__CAPABILITY_TRIM) != 0;
        s->takes_drains = events_fd >= 0 && (asked & BFCD__CAPABILITY__CAPABILITY_DRAIN) != 0;
        s->tries_again = (asked & BFCD__CAPABILITY__CAPABILITY_AGAIN) != 0;
        s->can_return = (asked & BFCD__CAPABILITY__CAPABILITY_RETURN) != 0 && session_could_return(s);
}

/* Writes the session down, which begins with that. Refuses where it fails. */
static int session_enter(struct session *s, const Bfcd__Request *r, int *ret_events_fd)
{
        int fd, result = session_open_events(s, r, &fd);

        if (result == 0)
                result = session_write_down(s);
        if (result == 0) {
                *ret_events_fd = fd;
                session_grant(s, r, fd);
                return 0;
        }
        if (fd >= 0)
                close(fd);
        session_forget_tenant(s);
        if (result == -ENOSPC)
                session_refuse(s, r->id, -EDQUOT, "the daemon's table of sessions is full");
        else if (result == -EMFILE || result == -ENFILE)
                session_refuse(s, r->id, -ENOMEM,
                               "the daemon has no file descriptors left for an events socket");
        else
                session_refuse(s, r->id, result, strerror(-result));
        return result;
}

/* What a hello is answered with; all of it the caller's. */
struct welcome_fds {
        int events; /* the client's end of the events socket, or -1 */
        int usage;  /* the pages, or -1 both */
        int page;
};

/* None where the client did not ask for pages, or there is no room for one; then it asks for figures. */
static void session_open_pages(struct session *s, const Bfcd__Request *r, struct welcome_fds *fds)
{
        int usage, page;

        if (s->admin || !s->tenant->usage || !(r->hello->capabilities & BFCD__CAPABILITY__CAPABILITY_PAGES))
                return;
        usage = memfd_lend(s->tenant->usage->fd, O_RDONLY);
        if (usage < 0)
                return;
        if (client_page_new(&s->page, &page) < 0) {
                close(usage);
                return;
        }
        fds->usage = usage;
        fds->page = page;
}

static void session_close_pages(struct welcome_fds *fds)
{
        if (fds->page < 0)
                return;
        close(fds->usage);
        close(fds->page);
        fds->usage = fds->page = -1;
}

/* The reply with the fds of what it grants. */
static int session_send_welcome(struct session *s, Bfcd__Reply *reply, const struct welcome_fds *from)
{
        uint64_t granted = s->tries_again ? BFCD__CAPABILITY__CAPABILITY_AGAIN : 0;
        size_t n_fds = 0;
        int fds[3];

        granted |= s->can_return ? BFCD__CAPABILITY__CAPABILITY_RETURN : 0;
        if (from->events >= 0) {
                granted |= BFCD__CAPABILITY__CAPABILITY_EVENTS;
                if (s->takes_trims)
                        granted |= BFCD__CAPABILITY__CAPABILITY_TRIM;
                if (s->takes_drains)
                        granted |= BFCD__CAPABILITY__CAPABILITY_DRAIN;
                fds[n_fds++] = from->events;
        }
        if (from->page >= 0) {
                granted |= BFCD__CAPABILITY__CAPABILITY_PAGES;
                fds[n_fds++] = from->usage;
                fds[n_fds++] = from->page;
        }
        s->in_flight = n_fds > 0;
        reply->hello->capabilities = granted;
        ledger_session_at(s->broker->ledger, s->index)->capabilities = granted;
        return s->ops->send(s->userdata, reply, fds, n_fds);
}

/* The reply, filled but for what both can. infos, pointers: room for all its partitions. */
static void session_describe(const struct session *s, size_t share, Bfcd__PartitionInfo *infos,
                             Bfcd__PartitionInfo **pointers, Bfcd__HelloReply *ret)
{
        struct ledger_session *record = ledger_session_at(s->broker->ledger, s->index);

        for (size_t i = 0; i < s->n_shares; i++) {
                session_describe_partition(s->broker, s->shares[i].quota, &infos[i]);
                pointers[i] = &infos[i];
        }
        bfcd__hello_reply__init(ret);
        ret->version = SESSION_PROTOCOL_VERSION;
        ret->session_id = s->id;
        ret->secret.data = record->secret;
        ret->secret.len = sizeof(record->secret);
        if (s->tenant)
                ret->tenant = (char *)(uintptr_t)s->tenant->name;
        ret->n_partitions = s->n_shares;
        ret->partitions = pointers;
        ret->default_partition = (uint32_t)share;
}

static void session_welcome(struct session *s, uint64_t id, size_t share, struct welcome_fds *fds)
{
        Bfcd__PartitionInfo *infos = calloc(s->n_shares + 1, sizeof(*infos)),
                            **pointers = calloc(s->n_shares + 1, sizeof(*pointers));
        Bfcd__HelloReply hello;
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        int sent;

        if (!infos || !pointers) {
                s->ops->abort(s->userdata, "out of memory");
                goto out;
        }
        session_describe(s, share, infos, pointers, &hello);
        reply.id = id;
        reply.body_case = BFCD__REPLY__BODY_HELLO;
        reply.hello = &hello;
        sent = session_send_welcome(s, &reply, fds);
        if (sent < 0 && fds->page >= 0) {
                /* Pages are a convenience: where fds are short the session comes first. */
                s->page = client_page_free(s->page);
                session_close_pages(fds);
                sent = session_send_welcome(s, &reply, fds);
        }
        if (sent < 0)
                s->ops->abort(s->userdata, "the daemon has no file descriptors left");
        else
                order_tell_drains(s);
out:
        free(infos);
        free(pointers);
}

void session_greet(struct session *s, const Bfcd__Request *r, size_t share, int events_fd)
{
        struct welcome_fds fds = { .events = events_fd, .usage = -1, .page = -1 };

        session_open_pages(s, r, &fds);
        session_welcome(s, r->id, share, &fds);
        if (events_fd >= 0)
                close(events_fd);
        session_close_pages(&fds);
}

static int handle_hello(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        size_t share = 0;
        int events_fd = -1;

        if (s->state != SESSION_NEW) {
                *ret_why = "the client sent a second hello";
                return -EPROTO;
        }
        if (++s->n_hellos > SESSION_MAX_HELLOS) {
                *ret_why = "too many refused hellos";
                return -EPROTO;
        }
        if (r->hello->version == 0) {
                session_refuse(s, r->id, -EPROTO,
                               "the client offered protocol version 0; this daemon speaks version 1");
                return 0;
        }
        if (r->hello->session_id != 0 && !s->admin)
                return homecoming_hello(s, r);
        session_copy_name(s, r->hello->name);
        if (!s->admin && session_admit(s, r, &share) < 0) {
                session_forget_tenant(s);
                return 0;
        }
        if (session_enter(s, r, &events_fd) < 0)
                return 0;
        retire_begin(s, events_fd >= 0);
        session_greet(s, r, share, events_fd);
        log_debug("session %" PRIu64 " started: tenant '%s', uid %u, pid %d, %s", s->id,
                  s->tenant ? s->tenant->name : "(admin)", (unsigned)s->who.uid, (int)s->who.pid, s->name);
        return 0;
}

/* ---- dispatch ------------------------------------------------------------ */

typedef int (*session_handler)(struct session *s, const Bfcd__Request *r, const char **ret_why);

static const session_handler handlers[] = {
        [BFCD__REQUEST__BODY_HELLO] = handle_hello,
        [BFCD__REQUEST__BODY_MALLOC] = handle_malloc,
        [BFCD__REQUEST__BODY_FREE] = handle_free,
        [BFCD__REQUEST__BODY_ACK] = handle_ack,
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
        [BFCD__REQUEST__BODY_HELD] = homecoming_held,
        [BFCD__REQUEST__BODY_DRAIN] = handle_drain,
        [BFCD__REQUEST__BODY_RESUME] = handle_resume,
        [BFCD__REQUEST__BODY_CANCEL] = handle_cancel,
        [BFCD__REQUEST__BODY_RELEASE] = handle_release,
        [BFCD__REQUEST__BODY_SPLIT] = handle_split,
};

int session_handle(struct session *s, const Bfcd__Request *request, const char **ret_why)
{
        size_t body = (size_t)request->body_case;
        session_handler handler = body < sizeof(handlers) / sizeof(handlers[0]) ? handlers[body] : NULL;

        if (!handler) {
                *ret_why = "the client sent a request type that this version does not support";
                return -EPROTO;
        }
        if (request->id == 0 && handler != handle_ack && handler != handle_cancel) {
                *ret_why = "the client sent a request with id 0";
                return -EPROTO;
        }
        if (s->state == SESSION_NEW && handler != handle_hello) {
                *ret_why = "the first request of the client was not a hello";
                return -EPROTO;
        }
        if (s->state == SESSION_RETURNING && handler != homecoming_held) {
                *ret_why = "the resumed client sent a request before the list of its memory";
                return -EPROTO;
        }
        assert(s->state == SESSION_NEW || s->state == SESSION_LIVE || s->state == SESSION_RETURNING);
        return handler(s, request, ret_why);
}

int session_handle_event(struct session *s, const Bfcd__EventReply *reply, const char **ret_why)
{
        if (s->state != SESSION_LIVE)
                return 0;
        if (reply->body_case == BFCD__EVENT_REPLY__BODY_RETIRED)
                return retire_confirm(s, reply->retired->sequence, ret_why);
        if (reply->body_case == BFCD__EVENT_REPLY__BODY_TRIMMED)
                return trim_answer(s, reply->trimmed->sequence, ret_why);
        *ret_why = "the client sent an event reply type that this version does not support";
        return -EPROTO;
}

/* ---- life ---------------------------------------------------------------- */

int session_new(struct broker *b, bool admin, struct credentials *who, const struct session_ops *ops,
                void *userdata, struct session **ret)
{
        struct session *s = calloc(1, sizeof(*s));

        if (!s) {
                credentials_clear(who);
                return -ENOMEM;
        }
        s->broker = b;
        s->ops = ops;
        s->userdata = userdata;
        s->admin = admin;
        s->who = *who;
        *who = (struct credentials){ .pid = who->pid, .uid = who->uid, .gid = who->gid };
        s->index = LEDGER_NONE;
        s->born_ms = clock_ms();
        TAILQ_INIT(&s->requests);
        TAILQ_INIT(&s->deliveries);
        shared_init(&s->waits);
        retire_init(&s->retire);
        *ret = s;
        return 0;
}

/* Requests that wait get no answer any more. Deliveries are freed by session_reap(), in slices. What is
 * retired comes last: the end of a Trim may be that of an operator's order, which gives extents back. */
static void session_drop_pending(struct session *s)
{
        struct session_request *request;

        s->is_delivering = false;
        shared_drop_waits(s);
        reload_end_session(s);
        trim_end(s);
        order_drop(s);
        while ((request = TAILQ_FIRST(&s->requests))) {
                quota_cancel(&request->wait);
                session_drop_request(s, request);
        }
        retire_end(s);
}

/* Frees at most n_max; returns how many fewer it freed. */
static size_t session_drop_deliveries(struct session *s, size_t n_max)
{
        struct session_delivery *d;

        for (; n_max > 0 && (d = TAILQ_FIRST(&s->deliveries)); n_max--) {
                session_remove_delivery(s, d);
                free(d);
        }
        return n_max;
}

size_t session_n_held(const struct session *s)
{
        const struct ledger_session *record;

        if (s->index == LEDGER_NONE)
                return 0;
        record = ledger_session_at(s->broker->ledger, s->index);
        return (size_t)record->links.n_blocks + record->links.n_holds + record->links.n_exports +
               s->n_deliveries;
}

void session_client_figures(const struct session *s, struct client_figures *ret)
{
        struct client_figures sum = { 0 };
        struct client_word word;

        if (client_page_read(s->page, &word) == 0) {
                for (size_t i = 0; i <= PAGES_MAX_PARTITIONS; i++) {
                        const struct client_figures *each = &word.partitions[i];

                        /* The sums are at most what there is, so nothing overflows. */
                        sum.bytes_held += min_u64(each->bytes_held, s->bytes_in_use - sum.bytes_held);
                        sum.bytes_in_use += min_u64(each->bytes_in_use, s->bytes_in_use - sum.bytes_in_use);
                        sum.bytes_idle += min_u64(each->bytes_idle, s->bytes_in_use - sum.bytes_idle);
                }
        }
        *ret = sum;
}

uint64_t session_idle_hint(const struct session *s, uint32_t partition)
{
        uint64_t held = s->shares[partition].holding.bytes;
        struct client_word word;

        if (held == 0 || client_page_read(s->page, &word) < 0)
                return held;
        /* What it has in further partitions may be in this one. */
        return min_u64(word.partitions[min_u64(partition, PAGES_MAX_PARTITIONS)].bytes_idle, held);
}

static struct device *session_extent_device(const struct session *s, uint32_t extent)
{
        uint32_t quota = ledger_extent_at(s->broker->ledger, extent)->quota;
        size_t i = 0;

        while (s->shares[i].quota->index != quota)
                i++;
        return s->shares[i].quota->partition->device;
}

bool session_holds_mappings(const struct session *s)
{
        struct ledger *ledger = s->broker->ledger;
        uint32_t x;

        if (s->index == LEDGER_NONE)
                return false;
        x = ledger_session_at(ledger, s->index)->links.first_export;
        for (; x != LEDGER_NONE; x = ledger_export_at(ledger, x)->links.next_of_session)
                if (!session_extent_device(s, ledger_export_at(ledger, x)->extent)->empties_mappings)
                        return true;
        return false;
}

/* An extent without another reference cannot be had again: the session is given none any more, and
 * only the daemon may open it. So each needs to be seen alone once only, at any time. */
static bool session_extent_is_alone(const struct session *s, uint32_t index)
{
        const struct ledger_extent *extent = ledger_extent_at(s->broker->ledger, index);
        struct device_extent memory = { .fd = extent->fd, .n_bytes = extent->n_bytes };
        struct device *device = session_extent_device(s, index);

        /* What is being given back the worker has; its export goes soon. */
        return device->empties_mappings && !extent->is_leaving && device_is_alone(device, &memory);
}

int session_look_for_mappings(struct session *s, struct session_look *look, size_t n_max, size_t *ret_n)
{
        struct ledger *l = s->broker->ledger;
        const struct ledger_export *x;
        uint32_t at;

        assert(s->state == SESSION_QUARANTINED);
        x = look->id != 0 ? ledger_export_get(l, look->export) : NULL;
        /* The extent may be gone since, and the record another's. */
        if (x && x->id == look->id && x->session == s->index)
                at = look->export;
        else
                at = ledger_session_at(l, s->index)->links.first_export;
        for (*ret_n = 0; at != LEDGER_NONE; at = x->links.next_of_session) {
                x = ledger_export_at(l, at);
                *look = (struct session_look){ at, x->id };
                if (*ret_n == n_max)
                        return SESSION_MORE;
                (*ret_n)++;
                if (!session_extent_is_alone(s, x->extent))
                        return SESSION_MAPPED;
        }
        return 0;
}

bool session_is_awaited(const struct session *s)
{
        return s->state == SESSION_QUARANTINED && s->may_return;
}

/* Nor by a successor. */
static void session_forget_return(struct session *s)
{
        if (s->index != LEDGER_NONE)
                ledger_session_at(s->broker->ledger, s->index)->capabilities &=
                        ~(uint64_t)BFCD__CAPABILITY__CAPABILITY_RETURN;
}

void session_stop_awaiting(struct session *s)
{
        if (!session_is_awaited(s))
                return;
        s->may_return = false;
        s->broker->n_awaited--;
        session_forget_return(s);
}

const char *session_exit_reason(const struct session *s, const char *otherwise)
{
        return s->exits ? "goodbye at exit" : otherwise;
}

int session_hang_up(struct session *s)
{
        if (s->state == SESSION_RETURNING) {
                homecoming_break_off(s);
                return 1;
        }
        assert(s->state == SESSION_NEW || s->state == SESSION_LIVE);
        session_forget_return(s); /* who hung up does not come back */
        if (session_n_held(s) > 0)
                retire_silence(s);
        session_drop_pending(s);
        if (s->state == SESSION_NEW || session_n_held(s) == 0) {
                session_close(s, session_exit_reason(s, "connection closed"));
                return 0;
        }
        s->state = SESSION_QUARANTINED;
        s->tenant->n_quarantined++;
        return 1;
}

void session_close(struct session *s, const char *why)
{
        enum session_state was = s->state;

        if (was == SESSION_CLOSING)
                return;
        s->state = SESSION_CLOSING; /* nothing is asked of it any more */
        session_drop_pending(s);
        if (was == SESSION_RETURNING) {
                homecoming_break_off(s);
                s->state = SESSION_CLOSING;
                was = SESSION_QUARANTINED;
        }
        if (was == SESSION_QUARANTINED) {
                s->tenant->n_quarantined--;
                s->broker->n_awaited -= s->may_return;
        }
        if (was != SESSION_NEW && s->tenant) {
                accounting_end(s, s->eviction ? s->eviction : why);
                for (size_t i = 0; i < s->n_shares; i++)
                        if (s->shares[i].joined)
                                quota_closing(s->shares[i].quota);
        }
}

bool session_may_stay(const struct session *s)
{
        return !s->admin && s->index != LEDGER_NONE && s->state != SESSION_CLOSING;
}

void session_leave_behind(struct session *s)
{
        struct broker *b = s->broker;

        session_drop_pending(s);
        session_drop_deliveries(s, SIZE_MAX);
        if (s->state == SESSION_RETURNING)
                homecoming_break_off(s);
        if (s->state == SESSION_QUARANTINED) {
                s->tenant->n_quarantined--;
                b->n_awaited -= s->may_return;
        }
        broker_session_ends(b, s->tenant);
        b->n_sessions--;
        b->sessions[s->index] = NULL;
        for (size_t i = 0; i < s->n_shares; i++) { /* the ledger has them */
                s->shares[i].holding.n_blocks = 0;
                s->shares[i].holding.bytes = 0;
        }
        session_leave_shares(s);
        s->page = client_page_free(s->page);
        s->index = LEDGER_NONE;
        s->state = SESSION_CLOSING;
}

/* The last step: the session leaves its quotas and the ledger. */
static void session_strike(struct session *s)
{
        struct broker *b = s->broker;

        if (s->index == LEDGER_NONE)
                return;
        if (s->tenant) {
                broker_session_ends(b, s->tenant);
                session_leave_shares(s);
        }
        s->page = client_page_free(s->page);
        ledger_session_clear(b->ledger, s->index);
        b->sessions[s->index] = NULL;
        b->n_sessions--;
        s->index = LEDGER_NONE;
}

/* Its blocks are free, its extents are no longer its own. */
static void session_is_closed(struct session *s)
{
        if (s->closed || !s->tenant)
                return;
        s->closed = true;
        for (size_t i = 0; i < s->n_shares; i++)
                if (s->shares[i].joined) {
                        if (s->shares[i].peak_bytes > 0)
                                quota_keep(s->shares[i].quota);
                        session_forget_peak(&s->shares[i]);
                        quota_closed(s->shares[i].quota);
                        quota_release_surplus(s->shares[i].quota);
                }
}

int session_reap(struct session *s, size_t n_blocks)
{
        struct ledger *ledger = s->broker->ledger;
        struct ledger_session *record;
        bool lingers;

        assert(s->state == SESSION_CLOSING);
        if (s->index == LEDGER_NONE)
                return 0;
        record = ledger_session_at(ledger, s->index);
        n_blocks = session_drop_deliveries(s, n_blocks); /* they name the blocks */
        for (; n_blocks > 0 && record->links.first_block != LEDGER_NONE; n_blocks--)
                session_free_block(s, record->links.first_block);
        for (; n_blocks > 0 && record->links.first_hold != LEDGER_NONE; n_blocks--)
                shared_reap(s);
        for (; n_blocks > 0 && record->links.first_export != LEDGER_NONE; n_blocks--)
                retire_clear_export(s, record->links.first_export);
        if (s->n_deliveries > 0 || record->links.first_block != LEDGER_NONE ||
            record->links.first_hold != LEDGER_NONE || record->links.first_export != LEDGER_NONE)
                return SESSION_MORE;
        session_is_closed(s);
        lingers = s->in_flight;
        if (!lingers)
                session_strike(s);
        if (s->goodbye)
                session_done(s, s->goodbye_id);
        s->goodbye = false;
        return lingers ? SESSION_LINGERS : 0;
}

void session_let_go(struct session *s)
{
        s->in_flight = false;
}

struct session *session_free(struct session *s)
{
        if (!s)
                return NULL;
        assert(s->index == LEDGER_NONE);
        assert(TAILQ_EMPTY(&s->requests) && TAILQ_EMPTY(&s->deliveries));
        holds_clear(&s->holds);
        credentials_clear(&s->who);
        free(s->eviction);
        free(s);
        return NULL;
}

const char *session_state_name(const struct session *s)
{
        switch (s->state) {
        case SESSION_NEW:
                return "new";
        case SESSION_LIVE:
                return "live";
        case SESSION_QUARANTINED:
                return session_is_awaited(s) ? "awaited" : "quarantined";
        case SESSION_RETURNING:
                return "returning";
        case SESSION_CLOSING:
                return "closing";
        }
        return "?";
}
