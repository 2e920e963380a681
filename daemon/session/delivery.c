/* Deliveries; see delivery.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/delivery.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "daemon/session/session.h"
#include "daemon/session/park.h"
#include "daemon/session/recall.h"
#include "daemon/session/share.h"
#include "daemon/session/shared.h"

struct session_delivery {
        uint64_t request_id;
        uint32_t block; /* in the ledger */
        uint32_t ref;   /* in the ledger, to a shared block; LEDGER_NONE: the block is the session's own */
        size_t share;
        bool stays;        /* the session had the block before, and keeps it if it cannot be delivered */
        uint32_t parks_to; /* of the reference then, if it stays */
        TAILQ_ENTRY(session_delivery) link;
};

void delivery_init(struct delivery_state *d)
{
        TAILQ_INIT(&d->list);
}

/* ---- extents ------------------------------------------------------------- */

/* Extents on their way to a session, in one message. */
struct extent_batch {
        size_t n;
        bool more; /* the window or the message takes no more */
        Bfcd__Extent extents[SESSION_MAX_UNACKED];
        Bfcd__Extent *pointers[SESSION_MAX_UNACKED];
        int fds[SESSION_MAX_UNACKED]; /* owned until they are sent */
        size_t n_fds;
        size_t slots[SESSION_MAX_UNACKED];
        uint32_t exports[SESSION_MAX_UNACKED]; /* in the ledger */
        uint64_t before[SESSION_MAX_UNACKED];  /* the session had it already: its place in `seen`; else 0 */
};

/* Errors of device_lend(); the batch has the extent also then. */
static int batch_add(struct extent_batch *batch, const struct session_share *share, uint32_t partition,
                     const struct ledger_extent *extent, size_t slot, bool is_read_only)
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
        e->read_only = is_read_only;
        batch->pointers[batch->n] = e;
        batch->slots[batch->n] = slot;
        batch->n++;
        if (memory->share != DEVICE_SHARE_FD) {
                e->handle = (ProtobufCBinaryData){ sizeof(memory->handle), (uint8_t *)memory->handle };
                return 0;
        }
        fd = device_lend(share->quota->partition->device, memory, is_read_only);
        if (fd < 0)
                return fd;
        batch->fds[batch->n_fds++] = fd;
        return 0;
}

static void batch_close_fds(struct extent_batch *batch)
{
        while (batch->n_fds > 0)
                close(batch->fds[--batch->n_fds]);
}

/* The session's export of an extent, which it has. */
static uint32_t export_of(const struct session *s, const struct ledger_extent *extent)
{
        struct ledger *l = s->broker->ledger;
        uint32_t x = extent->links.first_export;

        while (ledger_export_at(l, x)->session != s->index)
                x = ledger_export_at(l, x)->links.next_of_extent;
        return x;
}

/* Writes down what the session gets, before it is sent. *ret_before: it had the extent without write access, or
 * has unmapped it; else 0. */
static int export_extent(struct session *s, struct session_share *share, size_t slot, bool is_read_only,
                         uint32_t *ret_export, uint64_t *ret_before)
{
        struct ledger *l = s->broker->ledger;
        uint32_t index = arena_slot_extent(share->quota->arena, slot);
        const struct ledger_extent *extent = ledger_extent_at(l, index);
        int r = 0;

        *ret_before =
                (share->seen[slot] & ~(SEEN_READ_ONLY | SEEN_UNMAPPED)) == extent->id ? share->seen[slot] : 0;
        if (*ret_before & SEEN_UNMAPPED) /* forget_extent() looks for the newest ones */
                retire_clear_export(s, export_of(s, extent));
        if (*ret_before != 0 && !(*ret_before & SEEN_UNMAPPED))
                *ret_export = export_of(s, extent);
        else
                r = ledger_export_add(l, s->index, index, ret_export);
        if (r < 0)
                return r;
        ledger_export_set_read_only(l, *ret_export, is_read_only);
        share->seen[slot] = extent->id | (is_read_only ? SEEN_READ_ONLY : 0);
        return 0;
}

/* A session has an extent with or without write access. It has write access from its first block there that is
 * not read-only on. */
static bool has_extent(const struct session_share *share, size_t slot, uint64_t id, bool is_read_only)
{
        return share->seen[slot] == id || (is_read_only && share->seen[slot] == (id | SEEN_READ_ONLY));
}

/* Extents that were sent and not acknowledged, up to the message `sequence`. */
static size_t count_unacked(const struct session *s, uint64_t sequence)
{
        size_t n = 0;

        for (uint64_t i = s->delivery.acked_sequence + 1; i <= sequence; i++)
                n += s->delivery.sent_counts[i % SESSION_MAX_UNACKED];
        return n;
}

/* Exports the extents of the block that the session has not seen. */
static int collect_extents(struct session *s, struct session_share *share, const struct ledger_block *block,
                           bool is_read_only, struct extent_batch *ret)
{
        struct ledger *ledger = s->broker->ledger;
        struct arena *arena = share->quota->arena;
        size_t slot, last, n_unacked = count_unacked(s, s->delivery.sequence);

        ret->n = 0;
        ret->n_fds = 0;
        ret->more = false;
        for (slot = arena_slots(arena, block->offset, block->n_bytes, &last); slot <= last; slot++) {
                struct ledger_extent *extent = ledger_extent_at(ledger, arena_slot_extent(arena, slot));
                int r;

                if (has_extent(share, slot, extent->id, is_read_only))
                        continue;
                ret->more = n_unacked + ret->n == SESSION_MAX_UNACKED;
                if (ret->more)
                        break;
                r = export_extent(s, share, slot, is_read_only, &ret->exports[ret->n], &ret->before[ret->n]);
                if (r < 0)
                        return r;
                r = batch_add(ret, share, (uint32_t)(share - s->shares), extent, slot, is_read_only);
                if (r < 0)
                        return r;
        }
        return 0;
}

static void take_back_extents(struct session *s, struct session_share *share,
                              const struct extent_batch *batch)
{
        for (size_t i = 0; i < batch->n; i++) {
                if (batch->before[i] != 0) {
                        ledger_export_set_read_only(s->broker->ledger, batch->exports[i],
                                                    (batch->before[i] & SEEN_READ_ONLY) != 0);
                        share->seen[batch->slots[i]] = batch->before[i];
                        continue;
                }
                ledger_export_clear(s->broker->ledger, batch->exports[i]);
                share->seen[batch->slots[i]] = 0;
        }
}

/* Sends extents of the block that the session has not seen, as many as the window and one message
 * take. 0: all are sent. 1: wait for an acknowledgement. Negative: they cannot be sent. */
static int send_extents(struct session *s, struct session_share *share, const struct ledger_block *block,
                        bool is_read_only)
{
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        Bfcd__Extents message = BFCD__EXTENTS__INIT;
        struct extent_batch batch;
        int r = collect_extents(s, share, block, is_read_only, &batch);

        if (r == 0 && batch.n > 0) {
                message.sequence = s->delivery.sequence + 1;
                message.n_extents = batch.n;
                message.extents = batch.pointers;
                reply.body_case = BFCD__REPLY__BODY_EXTENTS;
                reply.extents = &message;
                s->ops->send(s->userdata, &reply, batch.fds, batch.n_fds);
        }
        if (r < 0) {
                batch_close_fds(&batch);
                take_back_extents(s, share, &batch);
                return r;
        }
        if (batch.n > 0) {
                s->delivery.sequence++;
                s->delivery.in_flight = s->delivery.in_flight || batch.n_fds > 0; /* handles are no fds */
                s->delivery.sent_counts[s->delivery.sequence % SESSION_MAX_UNACKED] = (uint8_t)batch.n;
        }
        return batch.more ? 1 : 0;
}

static void describe_block(const struct session_share *share, const struct ledger_block *block,
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

static void describe_attached(const struct session *s, const struct session_delivery *d,
                              const struct ledger_block *block, Bfcd__Attached *ret)
{
        bfcd__attached__init(ret);
        ret->partition = (uint32_t)d->share;
        ret->n_requested = block->n_requested;
        ret->is_parked = ledger_ref_at(s->broker->ledger, d->ref)->parks_to != 0;
        ret->parkable = park_allows(s, block);
        ret->tag = (char *)(uintptr_t)block->tag;
}

static void send_block(struct session *s, const struct session_delivery *d)
{
        struct ledger_block *block = ledger_block_at(s->broker->ledger, d->block);
        Bfcd__Attached attached;
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        Bfcd__Block message;

        describe_block(&s->shares[d->share], block, &message);
        reply.id = d->request_id;
        if (d->ref != LEDGER_NONE)
                shared_delivered(s, d->ref);
        else
                block->links.in_delivery = false;
        if (d->ref == LEDGER_NONE || d->stays) {
                reply.body_case = BFCD__REPLY__BODY_BLOCK;
                reply.block = &message;
        } else {
                describe_attached(s, d, block, &attached);
                attached.block = &message;
                reply.body_case = BFCD__REPLY__BODY_ATTACHED;
                reply.attached = &attached;
        }
        session_send(s, &reply);
}

/* ---- deliveries ---------------------------------------------------------- */

static void delivery_remove(struct session *s, struct session_delivery *d)
{
        TAILQ_REMOVE(&s->delivery.list, d, link);
        s->delivery.n--;
}

/* Frees or detaches the block and refuses its request. */
static void delivery_refuse(struct session *s, struct session_delivery *d, int error, const char *sentence)
{
        delivery_remove(s, d);
        if (d->stays && d->ref == LEDGER_NONE)
                ledger_block_at(s->broker->ledger, d->block)->links.in_delivery = false;
        else if (d->stays)
                park_undelivered(s, d->ref, d->parks_to);
        else if (d->ref == LEDGER_NONE)
                session_free_block(s, d->block);
        else
                shared_undelivered(s, d->ref);
        session_refuse(s, d->request_id, error, sentence);
        free(d);
}

/* Delivers the first block. False: the rest of its extents waits for an acknowledgement. */
static bool deliver_first(struct session *s)
{
        struct session_delivery *d = TAILQ_FIRST(&s->delivery.list);
        const struct ledger_block *block = ledger_block_at(s->broker->ledger, d->block);
        const struct ledger_ref *ref =
                d->ref != LEDGER_NONE ? ledger_ref_at(s->broker->ledger, d->ref) : NULL;
        bool is_read_only = ref && ref->is_read_only != 0;
        int r = 0;

        if (!is_read_only && shared_protects(s, block)) {
                delivery_refuse(s, d, -EBUSY,
                                "the block would be in memory that this session has attached read-only: use "
                                "another connection for blocks that are written, or detach that block first");
                return true;
        }
        if (!ref || ref->parks_to == 0) /* else its client asks for them by a Wake */
                r = send_extents(s, &s->shares[d->share], block, is_read_only);
        if (r > 0)
                return false;
        if (r < 0) {
                delivery_refuse(s, d, -ENOMEM,
                                r == -EMFILE   ? "the daemon has no file descriptors left to share memory"
                                : r == -EACCES ? "the daemon cannot open the memory read-only: is /proc "
                                                 "mounted?"
                                               : "the daemon's table of exports is full");
                return true;
        }
        delivery_remove(s, d);
        send_block(s, d);
        free(d);
        return true;
}

void session_deliver(struct session *s)
{
        unsigned n = 0;

        while (n < SESSION_DELIVERY_SLICE && s->delivery.n > 0 && deliver_first(s))
                n++;
        s->delivery.is_due = n == SESSION_DELIVERY_SLICE && s->delivery.n > 0;
        if (s->delivery.is_due)
                s->ops->ready(s->userdata);
}

static void delivery_add(struct session *s, struct session_delivery *d)
{
        TAILQ_INSERT_TAIL(&s->delivery.list, d, link);
        if (s->delivery.n++ == 0)
                session_deliver(s);
}

/* The connection must continue to read, because the acknowledgement comes after the requests. So requests
 * are refused instead of left unread. */
bool session_refuse_delivery(struct session *s, uint64_t id)
{
        if (s->delivery.n < SESSION_MAX_DELIVERIES)
                return false;
        session_refuse_format(
                s, id, -EDQUOT,
                "too many blocks of this session wait for acknowledgements of extents: %zu of at most %u",
                s->delivery.n, SESSION_MAX_DELIVERIES);
        return true;
}

static struct session_delivery *delivery_new(struct session *s, uint64_t id, struct session_share *share,
                                             uint32_t block, uint32_t ref)
{
        struct session_delivery *d = malloc(sizeof(*d));

        if (!d || session_reserve_seen(share) < 0) {
                free(d);
                return NULL;
        }
        *d = (struct session_delivery){
                .request_id = id, .block = block, .ref = ref, .share = (size_t)(share - s->shares)
        };
        return d;
}

int session_deliver_ref(struct session *s, uint64_t id, struct session_share *share, uint32_t block,
                        uint32_t ref)
{
        struct session_delivery *d = delivery_new(s, id, share, block, ref);

        if (!d)
                return -ENOMEM;
        delivery_add(s, d);
        return 0;
}

int session_deliver_again(struct session *s, uint64_t id, uint32_t block)
{
        struct ledger_block *b = ledger_block_at(s->broker->ledger, block);
        struct session_delivery *d = delivery_new(s, id, session_share_of(s, b->quota), block, LEDGER_NONE);

        if (!d)
                return -ENOMEM;
        d->stays = true;
        b->links.in_delivery = true;
        delivery_add(s, d);
        return 0;
}

int session_deliver_woken(struct session *s, uint64_t id, uint32_t block, uint32_t ref, uint32_t parks_to)
{
        struct ledger_block *b = ledger_block_at(s->broker->ledger, block);
        struct session_delivery *d = delivery_new(s, id, session_share_of(s, b->quota), block, ref);

        if (!d)
                return -ENOMEM;
        d->stays = true;
        d->parks_to = parks_to;
        delivery_add(s, d);
        return 0;
}

void session_deliver_block(struct session *s, uint64_t id, struct session_share *share,
                           const struct ledger_block *facts)
{
        struct session_delivery *d = delivery_new(s, id, share, LEDGER_NONE, LEDGER_NONE);
        int r = d ? ledger_block_add(s->broker->ledger, facts, &d->block) : -ENOMEM;

        if (r < 0) {
                free(d);
                quota_dealloc(share->quota, facts->handle, facts->n_bytes, facts->n_requested);
                session_refuse(s, id, -ENOMEM,
                               r == -ENOSPC ? "the daemon's table of blocks is full"
                                            : "the daemon is out of memory");
                return;
        }
        s->stats.n_allocs++;
        session_add_block(s, share, facts->offset, facts->n_bytes);
        ledger_block_at(s->broker->ledger, d->block)->links.in_delivery = true;
        delivery_add(s, d);
}

size_t session_drop_deliveries(struct session *s, size_t n_max)
{
        struct session_delivery *d;

        for (; n_max > 0 && (d = TAILQ_FIRST(&s->delivery.list)); n_max--) {
                delivery_remove(s, d);
                free(d);
        }
        return n_max;
}

/* ---- acknowledgements ---------------------------------------------------- */

/* The session's export of an extent that was sent lately: the newest come first, and at most
 * SESSION_MAX_UNACKED are on their way. LEDGER_NONE: none. */
static uint32_t find_sent(const struct session *s, uint64_t extent_id)
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

/* The client did not receive the extent. It is sent again before the next block there. A block that
 * waits for more extents is refused: they would be sent as long as the process is at its limit. */
static void forget_extent(struct session *s, uint64_t extent_id)
{
        struct ledger *l = s->broker->ledger;
        struct session_delivery *d = TAILQ_FIRST(&s->delivery.list);
        const struct ledger_block *block = d ? ledger_block_at(l, d->block) : NULL;
        uint32_t x = find_sent(s, extent_id);
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
                delivery_refuse(s, d, -EMFILE,
                                "the process is at its limit of open files, so memory could not be passed "
                                "to it: raise RLIMIT_NOFILE (ulimit -n)");
}

static bool ack_is_valid(const struct session *s, const Bfcd__Ack *ack)
{
        return ack->sequence > s->delivery.acked_sequence && ack->sequence <= s->delivery.sequence &&
               ack->n_lost_extent_ids <= count_unacked(s, ack->sequence);
}

int delivery_ack(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        if (!ack_is_valid(s, r->ack)) {
                *ret_why = "the client acknowledged extents that were not sent";
                return -EPROTO;
        }
        if (r->ack->n_lost_extent_ids > SESSION_MAX_LOST - s->delivery.n_lost) {
                *ret_why = "the client lost the fds of too many extents: raise its RLIMIT_NOFILE (ulimit -n)";
                return -EPROTO;
        }
        s->delivery.n_lost += (uint32_t)r->ack->n_lost_extent_ids;
        s->delivery.acked_sequence = r->ack->sequence;
        for (size_t i = 0; i < r->ack->n_lost_extent_ids; i++)
                forget_extent(s, r->ack->lost_extent_ids[i]);
        if (!s->delivery.is_due)
                session_deliver(s);
        retire_flush(s);
        return 0;
}
