/* Park and wake; see park.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/park.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/base/number.h"
#include "daemon/memory/quota.h"
#include "daemon/memory/worker.h"
#include "daemon/session/delivery.h"
#include "daemon/session/request_memory.h"
#include "daemon/session/session.h"
#include "daemon/session/share.h"
#include "daemon/session/shared.h"
#include "daemon/session/trim.h"

/* Memory of a quota. */
struct park_memory {
        struct quota *quota;
        bfc_handle handle; /* 0: none */
        uint64_t offset, n_bytes;
        bool is_owned; /* no record names it: it is freed with the park */
};

/* One of the jobs that copy pieces, in turns of a worker. */
struct park_copier {
        struct worker_job job;
        struct park_copying *copying;
        size_t n_a_turn; /* pieces */
};

struct park_piece {
        struct device_extent memory, copy; /* borrowed */
        uint64_t memory_offset, copy_offset;
        uint64_t n_bytes;
};

/* The contents of a block between its memory and its copy. */
struct park_copying {
        struct park_memory memory, copy; /* the copy has at least the size of the memory */
        bool to_copy;                    /* else from the copy */
        struct park_copier copiers[2];
        unsigned n_copiers; /* that are not done; 0: it does not run */
        void (*done)(struct park_copying *c);
        struct park_piece *pieces; /* constant while they are copied */
        size_t n_pieces, n_taken;  /* atomic: the pieces before are copied or being copied */
        int result;                /* atomic; not 0: the copiers end */
};

struct park_shared;

/* A request.
 *
 * Many fields: a request that waits in a quota's queue, and a copying, are inside. */
struct park {
        struct quota_request wait; /* for the copy's memory, or the block's */
        struct park_copying copying;
        struct session *session; /* NULL: it has been freed */
        bool is_dropped;         /* the session ends: there is no answer */
        bool wakes;
        uint64_t id;    /* of the request */
        uint32_t block; /* in the ledger */
        TAILQ_ENTRY(park) link;
        /* Of a shared block: the copying is in `shared`, and in_delivery is counted in the reference. */
        struct park_shared *shared; /* NULL: the block is the session's own */
        uint32_t ref;
        bool attaches;  /* a wake for an Attach, whose reference it begins */
        bool is_queued; /* the wait is in the quota's queue */
        TAILQ_ENTRY(park) of_shared;
};

/* ==== copying, by workers ==================================================== */

#define PIECE_BYTES (UINT64_C(8) << 20)
#define FIRST_TURN  3u /* pieces: about as much as a turn is to take where the processor copies */

static struct park_copier *copier_of(struct worker_job *job)
{
        return (struct park_copier *)(void *)((char *)job - offsetof(struct park_copier, job));
}

/* On a worker thread. */
static int copy_pieces(const struct park_copying *c, const struct park_piece *pieces, size_t n)
{
        struct device *device = c->memory.quota->partition->device;
        struct partition *host = c->copy.quota->partition;
        struct device_copy copies[DEVICE_COPIES];

        if (__atomic_load_n(&device->is_ending, __ATOMIC_RELAXED))
                return -ECANCELED;
        for (size_t i = 0; i < n; i++)
                copies[i] =
                        (struct device_copy){ .extent = &pieces[i].memory,
                                              .offset = pieces[i].memory_offset,
                                              .host = &pieces[i].copy,
                                              .host_offset = pieces[i].copy_offset,
                                              .n_bytes = pieces[i].n_bytes,
                                              .to_host = c->to_copy,
                                              .pins = host->memory.is_pinned ? &host->memory.pins : NULL };
        return device_copy(device, copies, n);
}

static void copier_run(struct worker_job *job)
{
        struct park_copier *copier = copier_of(job);
        struct park_copying *c = copier->copying;
        size_t first = __atomic_fetch_add(&c->n_taken, copier->n_a_turn, __ATOMIC_RELAXED);
        size_t end = min_u64(first + copier->n_a_turn, c->n_pieces);
        uint64_t begun_ns = clock_ns();
        bool goes_on = first < end && __atomic_load_n(&c->result, __ATOMIC_RELAXED) == 0;
        int r = goes_on ? copy_pieces(c, &c->pieces[first], end - first) : 0;

        /* A failure ends the other copier, too. */
        if (r < 0)
                __atomic_store_n(&c->result, r, __ATOMIC_RELAXED);
        copier->n_a_turn = min_u64(worker_next_turn(copier->n_a_turn, clock_ns() - begun_ns), DEVICE_COPIES);
        job->goes_on = goes_on && end < c->n_pieces && __atomic_load_n(&c->result, __ATOMIC_RELAXED) == 0;
}

static void copier_done(struct worker_job *job)
{
        struct park_copying *c = copier_of(job)->copying;
        struct partition *host = c->copy.quota->partition;
        int pin_error = atomic_load(&host->memory.pins.error);

        /* The last one ends the copying. */
        if (--c->n_copiers > 0)
                return;
        if (pin_error != 0 && !host->memory.has_told_of_pins) {
                host->memory.has_told_of_pins = true;
                log_warning(
                        "partition '%s' is pinned, but CUDA could not register its memory: %s; blocks are parked there "
                        "through buffers, which is slower",
                        host->name, strerror(-pin_error));
        }
        c->done(c);
}

/* The extent at this place of a block; returns how many bytes it has from there on. */
static uint64_t extent_at(const struct park_memory *m, uint64_t at, struct device_extent *ret,
                          uint64_t *ret_offset)
{
        const struct arena *arena = m->quota->arena;
        size_t last, slot = arena_slots(arena, m->offset + at, 1, &last);
        const struct ledger_extent *e =
                ledger_extent_at(m->quota->partition->ledger, arena_slot_extent(arena, slot));

        *ret = *arena_slot_memory(arena, slot);
        *ret_offset = m->offset + at - e->offset;
        return e->n_bytes - *ret_offset;
}

static size_t cut_pieces(const struct park_copying *c, struct park_piece *ret)
{
        uint64_t at = 0;
        size_t n = 0;

        for (; at < c->memory.n_bytes; n++) {
                struct park_piece piece;
                uint64_t rest = extent_at(&c->memory, at, &piece.memory, &piece.memory_offset);

                rest = min_u64(rest, extent_at(&c->copy, at, &piece.copy, &piece.copy_offset));
                piece.n_bytes = min_u64(min_u64(rest, PIECE_BYTES), c->memory.n_bytes - at);
                at += piece.n_bytes;
                if (ret)
                        ret[n] = piece;
        }
        return n;
}

/* One for all leases of a tenant in the partition: a client can hold up one copy in each lane, and each takes a thread. */
static struct worker_lane *lane_of(const struct quota *q)
{
        return arena_copy_lane(quota_of_tenant(q)->arena);
}

/* Extents of the host that clients have are read under locks of their pages, which clients can hold. Copies are in extents
 * that no client has. */
static bool may_be_held(const struct park_copying *c)
{
        return c->to_copy && !c->memory.quota->partition->is_cuda;
}

static void copier_start(struct park_copying *c, struct worker_lane *lane)
{
        struct park_copier *copier = &c->copiers[c->n_copiers++];

        copier->copying = c;
        copier->n_a_turn = FIRST_TURN;
        copier->job = (struct worker_job){
                .run = copier_run, .done = copier_done, .lane = lane, .may_be_held = may_be_held(c)
        };
        worker_submit(c->memory.quota->partition->worker, &copier->job);
}

/* Between two partitions of the host two threads copy, each in turns of one of the partitions: one does not use all of
 * the memory's bandwidth. */
static int park_copy_start(struct park_copying *c, void (*done)(struct park_copying *c))
{
        struct worker_lane *lane = lane_of(c->memory.quota), *other = lane_of(c->copy.quota);

        c->n_pieces = cut_pieces(c, NULL);
        c->pieces = calloc(c->n_pieces, sizeof(*c->pieces));
        if (!c->pieces)
                return -ENOMEM;
        (void)cut_pieces(c, c->pieces);
        c->done = done;
        copier_start(c, lane);
        if (other != lane && c->copy.quota->partition->worker == c->memory.quota->partition->worker)
                copier_start(c, other);
        return 0;
}

/* The contents are of no use any more: the copy ends soon, with -ECANCELED or 0. */
static void park_copy_drop(struct park_copying *c)
{
        __atomic_store_n(&c->result, -ECANCELED, __ATOMIC_RELAXED);
}

/* Frees it if it is owned: perhaps no session is left that would release it later. */
static void park_memory_free(struct park_memory *m)
{
        struct quota *q = m->quota;
        bool was_owned = m->is_owned;

        m->is_owned = false;
        if (!was_owned)
                return;

        /* The undo of a wake is not needed any more; without a wake this does nothing. */
        quota_wake_commit(q, m->handle);
        quota_dealloc(q, m->handle, m->n_bytes, m->n_bytes);

        /* A quota without sessions keeps nothing, and may be gone after that. */
        if (q->sessions.n > 0 || __atomic_load_n(&q->partition->device->is_ending, __ATOMIC_RELAXED))
                return;
        quota_release_unused(q);
        broker_note_leave(q->partition->up.broker, q);
}

/* After done(), or without a copy: frees memory that no record names. */
static void park_copy_deinit(struct park_copying *c)
{
        park_memory_free(&c->copy);
        park_memory_free(&c->memory);
        free(c->pieces);
}

/* For the refusal of a request whose copy failed. */
static const char *park_copy_sentence(int error)
{
        return error == -ECANCELED ? "the daemon is ending"
                                   : "the daemon could not copy the block's contents";
}

/* ==== a session's own blocks ================================================= */

/* Of shared blocks; see below. */
static void park_shared_handle(struct session *s, uint64_t id, const Bfcd__Park *m, uint32_t block,
                               uint32_t ref);
static struct park *park_shared_wake(struct session *s, uint64_t id, uint32_t block, uint32_t ref,
                                     uint32_t wait_ms);
static bool park_shared_cancel(struct park *p);
static void park_shared_drop(struct park *p);

#define PARK_MAX_WAKES 64u /* in a request */

uint32_t park_copy_of(const struct ledger *l, uint32_t block)
{
        struct ledger *table = (struct ledger *)(uintptr_t)l;
        const struct ledger_block *b = ledger_block_at(table, block), *copy;
        uint32_t index;

        if (!ledger_block_is_parked(b) || b->parked == LEDGER_DISCARDED)
                return LEDGER_NONE;
        index = ledger_block_find(l, b->parked);
        copy = index == LEDGER_NONE ? NULL : ledger_block_at(table, index);
        return copy && copy->parked == LEDGER_IS_COPY && copy->session == b->session ? index : LEDGER_NONE;
}

/* ---- life --------------------------------------------------------------------- */

/* A request about a block that is not the session's own has a reference. NULL: it was refused. */
static struct park *park_new(struct session *s, uint64_t id, uint32_t block, uint32_t ref)
{
        struct ledger_block *b = ledger_block_at(s->broker->ledger, block);
        struct park *p = calloc(1, sizeof(*p));

        if (!p) {
                session_refuse(s, id, -ENOMEM, "the daemon is out of memory");
                return NULL;
        }
        p->session = s;
        p->id = p->wait.group = id;
        p->block = block;
        p->ref = ref;
        p->copying.memory = (struct park_memory){ session_share_of(s, b->quota)->quota, b->handle, b->offset,
                                                  b->n_bytes, false };
        p->wait.n_bytes = b->n_bytes;
        p->wait.requester = s;
        TAILQ_INSERT_TAIL(&s->requests.parks, p, link);
        s->requests.n++;
        if (ref == LEDGER_NONE)
                b->links.in_delivery = true;
        else
                ledger_ref_at(s->broker->ledger, ref)->links.n_in_delivery++;
        return p;
}

static struct park *park_of(struct park_copying *c)
{
        return (struct park *)(void *)((char *)c - offsetof(struct park, copying));
}

/* Also of a session that is gone. */
static void park_free(struct park *p)
{
        struct session *s = p->session;

        park_copy_deinit(&p->copying);
        if (s)
                TAILQ_REMOVE(&s->requests.parks, p, link);
        if (s && !p->is_dropped)
                s->requests.n--;
        free(p);
}

/* Ends it without an answer. The block is the session's as before; or the reference ends that was begun. */
static void park_end(struct park *p)
{
        struct session *s = p->session;
        uint32_t block = p->block, ref = p->ref;
        bool attaches = p->attaches;

        park_free(p);
        if (attaches)
                shared_undelivered(s, ref);
        else if (ref != LEDGER_NONE)
                shared_delivered(s, ref);
        else
                ledger_block_at(s->broker->ledger, block)->links.in_delivery = false;
}

/* The block is as it was before. */
static void park_refuse(struct park *p, int error, const char *sentence)
{
        struct session *s = p->session;
        uint64_t id = p->id;

        park_end(p);
        session_refuse(s, id, error, sentence);
        s->ops->ready(s->userdata);
}

/* ---- park ---------------------------------------------------------------------- */

/* The facts of a copy. */
static void park_describe_copy(const struct park_copying *c, const struct ledger_block *block,
                               struct ledger_block *ret)
{
        *ret = (struct ledger_block){
                .offset = c->copy.offset,
                .n_bytes = c->copy.n_bytes,
                .n_requested = c->copy.n_bytes,
                .born_ms = clock_ms(),
                .session = block->session,
                .shared = block->shared,
                .quota = c->copy.quota->index,
                .handle = c->copy.handle,
                .parked = LEDGER_IS_COPY,
        };
        memcpy(ret->tag, block->tag, sizeof(ret->tag));
}

static const char park_over_limit[] =
        "the parked blocks would exceed four times the limit of the tenant in the partition";

/* The block is parked from now on; parked: as in its record. */
static void park_record(const struct quota *q, uint32_t block, uint64_t parked)
{
        struct ledger_block *b = ledger_block_at(q->partition->ledger, block);
        struct arena_place place;

        arena_locate(q->arena, b->offset, &place);
        b->region_id = place.region_id;
        ledger_block_park(q->partition->ledger, block, parked);
}

/* The contents are in the copy, if there is one. */
static void park_commit(struct park *p)
{
        struct session *s = p->session;
        struct ledger *l = s->broker->ledger;
        struct ledger_block *block = ledger_block_at(l, p->block);
        struct ledger_block facts;
        uint32_t copy = LEDGER_NONE;
        uint64_t id = p->id;
        int r = 0;

        /* Others were parked meanwhile. */
        if (!quota_may_park(p->copying.memory.quota, p->copying.memory.n_bytes)) {
                park_refuse(p, -EDQUOT, park_over_limit);
                return;
        }

        /* One word of the block's record names the copy. If the daemon is killed before it is written, the
         * successor frees the copy, which no block names; after it, the block is parked. */
        if (p->copying.copy.handle != 0) {
                park_describe_copy(&p->copying, block, &facts);
                r = ledger_block_add(l, &facts, &copy);
        }
        if (r == 0) {
                park_record(p->copying.memory.quota, p->block,
                            copy == LEDGER_NONE ? LEDGER_DISCARDED : ledger_block_at(l, copy)->id);
                r = quota_park(p->copying.memory.quota, p->copying.memory.handle, p->copying.memory.n_bytes);
        }
        if (r < 0) {
                ledger_block_park(l, p->block, LEDGER_AWAKE);
                if (copy != LEDGER_NONE)
                        ledger_block_clear(l, copy);
                park_refuse(p, -ENOMEM, "the daemon is out of memory or block records");
                return;
        }

        /* From here on the session uses the copy instead of the block. */
        session_remove_block(session_share_of(s, block->quota), block->offset, p->copying.memory.n_bytes);
        if (copy != LEDGER_NONE)
                session_add_block(s, session_share_of(s, p->copying.copy.quota->index),
                                  p->copying.copy.offset, p->copying.copy.n_bytes);
        p->copying.copy.is_owned = false;
        block->links.in_delivery = false;
        park_free(p);
        session_done(s, id);
        s->ops->ready(s->userdata);
}

static void park_copied(struct park_copying *c)
{
        struct park *p = park_of(c);

        if (!p->session || p->is_dropped)
                park_free(p);
        else if (p->copying.result < 0)
                park_refuse(p, -EIO, park_copy_sentence(p->copying.result));
        else
                park_commit(p);
}

/* Ends a request that was not carried out. With the reason of the quota; or with a sentence. */
static void park_refuse_room(struct park *p, int error)
{
        struct session *s = p->session;
        struct quota_request refused = p->wait;
        uint64_t id = p->id;

        park_end(p);
        request_refuse(s, id, &refused, error, false);
        s->ops->ready(s->userdata);
}

static void on_copy_room(struct quota_request *wait, int result, bfc_handle handle, uint64_t offset)
{
        struct park *p = (struct park *)wait;

        p->session->stats.waited_ns += clock_ns() - wait->since_ns;
        if (result < 0) {
                park_refuse_room(p, result);
                return;
        }

        /* The copy is this park's until it is committed: park_free() frees it. */
        p->copying.copy.handle = handle;
        p->copying.copy.offset = offset;
        p->copying.copy.n_bytes = wait->n_bytes;
        p->copying.copy.is_owned = true;
        p->copying.to_copy = true;
        if (park_copy_start(&p->copying, park_copied) < 0)
                park_refuse(p, -ENOMEM, "the daemon is out of memory");
}

/* The session's own block that its client may use. LEDGER_NONE: the request was refused. */
static uint32_t find_block(struct session *s, uint64_t id, uint64_t block_id)
{
        struct ledger *l = s->broker->ledger;
        uint32_t index = s->role != ROLE_CLIENT ? LEDGER_NONE : ledger_block_find(l, block_id);
        const struct ledger_block *b = index == LEDGER_NONE ? NULL : ledger_block_at(l, index);

        if (!b || b->session != s->index || b->parked == LEDGER_IS_COPY) {
                session_refuse_format(s, id, -EINVAL, "block %" PRIu64 " does not belong to this session",
                                      block_id);
                return LEDGER_NONE;
        }
        if (b->links.in_delivery) {
                session_refuse_format(s, id, -EBUSY, "block %" PRIu64 " is being delivered, parked or woken",
                                      block_id);
                return LEDGER_NONE;
        }
        return index;
}

/* The session's reference to a shared block; LEDGER_NONE: it is not shared, or the session does not have it. */
static uint32_t find_ref(const struct session *s, uint64_t block_id, uint32_t *ret_block)
{
        struct ledger *l = s->broker->ledger;
        const struct ledger_block *b;

        *ret_block = s->role != ROLE_CLIENT ? LEDGER_NONE : ledger_block_find(l, block_id);
        b = *ret_block == LEDGER_NONE ? NULL : ledger_block_at(l, *ret_block);
        if (!b || b->shared == LEDGER_NONE || b->parked == LEDGER_IS_COPY)
                return LEDGER_NONE;
        return refs_find(&s->shared.refs, b->shared);
}

/* A client that cannot be asked to unmap memory would keep it. */
bool park_is_possible(const struct session *s, const struct quota *q)
{
        return quota_can_park(q) && session_has_events(s);
}

bool park_allows(const struct session *s, const struct ledger_block *b)
{
        const struct quota *q = session_share_of(s, b->quota)->quota;

        /* Other blocks in its extents would lose their memory, too. */
        return park_is_possible(s, q) && b->n_requested == b->n_bytes &&
               arena_is_whole(q->arena, b->offset, b->n_bytes);
}

/* Why the block cannot be parked; 0: it can. */
static int park_fault(struct session *s, const struct ledger_block *b, const Bfcd__Park *m,
                      const char **ret_sentence)
{
        const struct quota *q = session_share_of(s, b->quota)->quota;

        if (!park_allows(s, b)) {
                *ret_sentence = "the block was not allocated as one that can be parked";
                return -EINVAL;
        }
        if (!quota_may_park(q, b->n_bytes)) {
                *ret_sentence = park_over_limit;
                return -EDQUOT;
        }
        if (m->discard)
                return 0;
        if (m->partition >= s->n_shares) {
                *ret_sentence = "no such partition: the reply to the hello lists all partitions";
                return -ENOENT;
        }
        if (s->shares[m->partition].quota->partition->is_cuda) {
                *ret_sentence = "a block can be parked only in a partition of host memory";
                return -EINVAL;
        }
        if (s->shares[m->partition].quota->partition == q->partition) {
                *ret_sentence = "a block cannot be parked in its own partition: a copy there frees no memory";
                return -EINVAL;
        }
        if (!quota_can_park(s->shares[m->partition].quota)) {
                *ret_sentence = "copies of parked blocks need a partition with 'growth: on-demand'";
                return -EINVAL;
        }
        return 0;
}

int park_handle(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        const Bfcd__Park *m = r->park;
        uint32_t index, ref = find_ref(s, m->block_id, &index);
        const struct ledger_block *b;
        const char *sentence = NULL;
        struct park *p;
        int result;

        (void)ret_why;

        /* A shared block needs the agreement of all its sessions. */
        if (ref != LEDGER_NONE) {
                park_shared_handle(s, r->id, m, index, ref);
                return 0;
        }
        index = find_block(s, r->id, m->block_id);
        if (index == LEDGER_NONE)
                return 0;
        b = ledger_block_at(s->broker->ledger, index);
        if (ledger_block_is_parked(b)) { /* its client lost the answer */
                session_done(s, r->id);
                return 0;
        }

        /* All checks come before the block is marked as being parked. */
        result = park_fault(s, b, m, &sentence);
        if (result < 0) {
                session_refuse(s, r->id, result, sentence);
                return 0;
        }
        if (!m->discard && session_join(s, &s->shares[m->partition], r->id) < 0)
                return 0;
        p = park_new(s, r->id, index, LEDGER_NONE);
        if (!p)
                return 0;
        if (m->discard) {
                park_commit(p);
                return 0;
        }

        /* The park waits for room for the copy: on_copy_room() is called when there is, or when the time is up. */
        p->copying.copy.quota = p->wait.quota = s->shares[m->partition].quota;
        p->wait.wait_ms = m->wait_ms < SESSION_MAX_WAIT_MS ? m->wait_ms : SESSION_MAX_WAIT_MS;
        p->wait.done = on_copy_room;
        p->wait.is_whole = p->wait.is_copy = true;
        result = quota_alloc_whole(p->copying.copy.quota, p->copying.memory.n_bytes, false);
        if (result < 0)
                park_refuse_room(p, result);
        else
                quota_wait(&p->wait);
        return 0;
}

/* ---- wake ---------------------------------------------------------------------- */

/* The contents are back. */
static void wake_commit(struct park *p)
{
        struct session *s = p->session;
        struct ledger *l = s->broker->ledger;
        struct ledger_block *block = ledger_block_at(l, p->block);
        uint32_t index = p->block, copy = park_copy_of(l, index);
        uint64_t id = p->id;

        /* The record says awake before the copy is freed: there is always one with the contents. */
        quota_wake_commit(p->copying.memory.quota, p->copying.memory.handle);
        ledger_block_park(l, index, LEDGER_AWAKE);
        session_add_block(s, session_share_of(s, block->quota), block->offset, block->n_bytes);
        block->links.in_delivery = false;
        park_free(p);
        if (copy != LEDGER_NONE)
                session_free_block(s, copy);

        /* The client has unmapped the extents, so they are sent again with the block. */
        if (session_deliver_again(s, id, index) < 0)
                session_refuse(s, id, -ENOMEM, "the daemon is out of memory: wake the block again");
        s->ops->ready(s->userdata);
}

/* The block stays parked. */
static void wake_undo(struct park *p, int error)
{
        quota_wake_undo(p->copying.memory.quota, p->copying.memory.handle, p->copying.memory.n_bytes);
        park_refuse(p, error == -ENOMEM ? error : -EIO, park_copy_sentence(error));
}

static void wake_copied(struct park_copying *c)
{
        struct park *p = park_of(c);
        struct session *s = p->session;

        /* A session that ends and still has the block: it is freed here. One that left it keeps the record. */
        if (s && p->is_dropped && s->index != LEDGER_NONE && !p->copying.memory.is_owned) {
                ledger_block_clear(s->broker->ledger, p->block);
                p->copying.memory.is_owned = true;
        }
        if (!s || p->is_dropped)
                park_free(p);
        else if (p->copying.result < 0)
                wake_undo(p, p->copying.result);
        else
                wake_commit(p);
}

static void park_refuse_wake(struct park *p, int error)
{
        if (error == -EBUSY && !p->wait.quota->partition->is_draining)
                park_refuse(p, error, "the memory from which the block was parked is still being released");
        else
                park_refuse_room(p, error);
}

static void on_wake_room(struct quota_request *wait, int result, bfc_handle handle, uint64_t offset)
{
        struct park *p = (struct park *)wait;
        int r;

        (void)handle;
        (void)offset;
        p->session->stats.waited_ns += clock_ns() - wait->since_ns;
        if (result < 0) {
                park_refuse_wake(p, result);
                return;
        }
        if (p->copying.copy.handle == 0) { /* the contents were discarded */
                wake_commit(p);
                return;
        }
        r = park_copy_start(&p->copying, wake_copied);
        if (r < 0)
                wake_undo(p, r);
}

/* NULL: it was answered. */
static struct park *wake_block(struct session *s, uint64_t id, uint64_t block_id, uint32_t wait_ms)
{
        uint32_t index, copy, ref = find_ref(s, block_id, &index);
        struct ledger *l = s->broker->ledger;
        const struct ledger_block *b;
        struct park *p;

        if (ref != LEDGER_NONE)
                return park_shared_wake(s, id, index, ref, wait_ms);
        index = find_block(s, id, block_id);
        if (index == LEDGER_NONE || session_refuse_delivery(s, id))
                return NULL;
        b = ledger_block_at(l, index);
        if (!ledger_block_is_parked(b)) { /* its client lost the answer */
                if (session_deliver_again(s, id, index) < 0)
                        session_refuse(s, id, -ENOMEM, "the daemon is out of memory");
                return NULL;
        }

        /* What was discarded has no copy: its contents are undefined after the wake. */
        copy = park_copy_of(l, index);
        if (copy == LEDGER_NONE && b->parked != LEDGER_DISCARDED) {
                session_refuse(s, id, -EIO, "the block's copy was lost with its partition");
                return NULL;
        }
        p = park_new(s, id, index, LEDGER_NONE);
        if (!p)
                return NULL;
        p->wakes = true;
        if (copy != LEDGER_NONE) {
                const struct ledger_block *c = ledger_block_at(l, copy);

                p->copying.copy = (struct park_memory){ session_share_of(s, c->quota)->quota, c->handle,
                                                        c->offset, c->n_bytes, false };
        }

        /* The wake waits for new extents in the block's place: on_wake_room() is called when they are made. */
        p->wait.quota = p->copying.memory.quota;
        p->wait.wakes = p->copying.memory.handle;
        p->wait.wait_ms = wait_ms < SESSION_MAX_WAIT_MS ? wait_ms : SESSION_MAX_WAIT_MS;
        p->wait.done = on_wake_room;
        quota_wait(&p->wait);
        return p;
}

/* Why the request is a violation; NULL: it is none. */
static const char *wake_fault(const Bfcd__Request *r)
{
        const Bfcd__Wake *m = r->wake;

        if (m->n_block_ids == 0 || m->n_block_ids > PARK_MAX_WAKES)
                return "the client sent a Wake of no block or of too many";
        if (r->id > UINT64_MAX - m->n_block_ids)
                return "the client sent a Wake whose answers have no ids";
        for (size_t i = 0; i < m->n_block_ids; i++)
                for (size_t k = 0; k < i; k++)
                        if (m->block_ids[i] == m->block_ids[k])
                                return "the client sent a Wake of one block twice";
        return NULL;
}

/* All wait from this moment on, so that other sessions' blocks come before all of them or behind. Those of one quota are
 * a group: jobs that wake many blocks take turns, and none gets a part of its blocks. */
int park_handle_wake(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        const char *fault = wake_fault(r);

        if (fault) {
                *ret_why = fault;
                return -EPROTO;
        }
        for (size_t i = 0; i < r->wake->n_block_ids; i++) {
                struct park *p = wake_block(s, r->id + i, r->wake->block_ids[i], r->wake->wait_ms);

                if (p)
                        p->wait.group = r->id;
        }
        return 0;
}

/* ---- ends ---------------------------------------------------------------------- */

bool park_cancel(struct session *s, uint64_t id)
{
        struct park *p;

        TAILQ_FOREACH(p, &s->requests.parks, link)
        {
                if (p->id != id || p->copying.n_copiers > 0)
                        continue;
                if (p->shared)
                        return park_shared_cancel(p);
                quota_cancel(&p->wait);
                park_end(p);
                return true;
        }
        return false;
}

static bool take_over(struct park_memory *m, const struct quota *q, bfc_handle handle)
{
        if (m->quota != q || m->handle != handle || m->is_owned)
                return false;
        m->is_owned = true;
        return true;
}

/* The record of a block of the session was cleared. True: a worker still uses the memory, which is freed later. */
static bool park_takes_over(struct session *s, const struct quota *q, bfc_handle handle)
{
        struct park *p;

        TAILQ_FOREACH(p, &s->requests.parks, link)
        {
                if (p->copying.n_copiers > 0 &&
                    (take_over(&p->copying.memory, q, handle) || take_over(&p->copying.copy, q, handle)))
                        return true;
        }
        return false;
}

static void free_parked(struct session *s, uint32_t index)
{
        struct ledger *l = s->broker->ledger;
        const struct ledger_block *block = ledger_block_at(l, index);
        struct quota *q = session_share_of(s, block->quota)->quota;
        uint32_t copy = park_copy_of(l, index);
        bfc_handle handle = block->handle;

        /* While a worker copies, the copying owns the memory and frees it at its end. */
        ledger_block_clear(l, index);
        if (!park_takes_over(s, q, handle))
                quota_drop_parked(q, handle);
        if (copy != LEDGER_NONE)
                session_free_block(s, copy);
}

void park_drop_all(struct session *s)
{
        struct park *p, *next;

        for (p = TAILQ_FIRST(&s->requests.parks); p; p = next) {
                next = TAILQ_NEXT(p, link);
                if (p->shared) {
                        park_shared_drop(p);
                        continue;
                }

                /* A copy that a worker makes cannot be freed now; its end finds is_dropped. */
                if (!p->is_dropped)
                        s->requests.n--;
                p->is_dropped = true;
                park_copy_drop(&p->copying);
                if (p->copying.n_copiers > 0)
                        continue;
                quota_cancel(&p->wait);
                park_free(p);
        }
}

void park_leave_all(struct session *s)
{
        struct park *p;

        while ((p = TAILQ_FIRST(&s->requests.parks))) {
                TAILQ_REMOVE(&s->requests.parks, p, link);
                p->session = NULL;
        }
}

void session_free_block(struct session *s, uint32_t index)
{
        struct ledger_block *block = ledger_block_at(s->broker->ledger, index);
        struct session_share *share = session_share_of(s, block->quota);
        uint64_t n_bytes = block->n_bytes, n_requested = block->n_requested, handle = block->handle;

        if (ledger_block_is_parked(block)) {
                free_parked(s, index);
                return;
        }
        session_remove_block(share, block->offset, n_bytes);
        ledger_block_clear(s->broker->ledger, index);
        if (!park_takes_over(s, share->quota, handle))
                quota_dealloc(share->quota, handle, n_bytes, n_requested);
}

/* ==== shared blocks ========================================================== */

#define PARK_MAX_HOLDERS 64u

/* Many fields: a request that waits in a quota's queue, and a copying, are inside. */
struct park_shared {
        struct quota_request wait; /* for the copy's room */
        struct park_copying copying;
        struct broker *broker;    /* NULL: the daemon ends */
        struct shared_name *name; /* NULL: the block has been freed, or the daemon ends */
        bool is_waiting;          /* for the copy's room */
        bool is_void;             /* a session used the block meanwhile */
        struct park *asker;       /* the Park to be answered; NULL: none */
        struct park_list wakes;   /* at most SHARED_SLICE: they are answered in one turn */
};

/* The name of the shared block of a reference. */
static struct shared_name *name_of(const struct session *s, uint32_t ref)
{
        struct ledger *l = s->broker->ledger;

        return shared_name_find(s->broker, s->tenant->name,
                                ledger_shared_at(l, ledger_ref_at(l, ref)->shared)->name);
}

/* ---- shared blocks: life ----------------------------------------------------- */

static struct ledger_block *block_of(const struct broker *b, const struct shared_name *name)
{
        return ledger_block_at(b->ledger, ledger_shared_at(b->ledger, name->shared)->block);
}

static struct quota *quota_of(const struct broker *b, const struct shared_name *name)
{
        return b->quotas[block_of(b, name)->quota];
}

/* NULL: no memory. */
static struct park_shared *parking_new(struct broker *b, struct shared_name *name)
{
        const struct ledger_block *block = block_of(b, name);
        struct park_shared *ps = calloc(1, sizeof(*ps));

        if (!ps)
                return NULL;
        ps->broker = b;
        ps->name = name;
        ps->copying.memory = (struct park_memory){ quota_of(b, name), block->handle, block->offset,
                                                   block->n_bytes, false };
        TAILQ_INIT(&ps->wakes);
        name->parking = ps;
        return ps;
}

static void parking_free(struct park_shared *ps)
{
        assert(!ps->asker && TAILQ_EMPTY(&ps->wakes) && !ps->is_waiting);
        if (ps->name)
                ps->name->parking = NULL;
        park_copy_deinit(&ps->copying);
        free(ps);
}

static void ready(struct session *s)
{
        s->ops->ready(s->userdata);
}

/* The Park is carried out, or others use the block: its session agrees to that anyway. */
static void answer_asker(struct park_shared *ps)
{
        struct park *p = ps->asker;
        struct session *s;
        uint64_t id;
        uint32_t ref;

        ps->asker = NULL;
        if (!p)
                return;
        s = p->session;
        id = p->id;
        ref = p->ref;
        park_free(p);
        shared_delivered(s, ref);
        session_done(s, id);
        ready(s);
}

/* The asker's session uses the block as before. Takes NULL. */
static struct park *take_asker(struct park_shared *ps)
{
        struct park *p = ps->asker;

        ps->asker = NULL;
        if (p)
                ledger_ref_set_parks_to(ps->broker->ledger, p->ref, 0);
        return p;
}

/* ---- shared blocks: the copy's record ---------------------------------------- */

static void clear_copy(struct broker *b, uint32_t copy)
{
        const struct ledger_block facts = *ledger_block_at(b->ledger, copy);
        struct quota *q = b->quotas[facts.quota];

        ledger_block_clear(b->ledger, copy);
        trim_remove_shared_block(q, facts.offset, facts.n_bytes);
}

static void free_copy(struct broker *b, uint32_t copy)
{
        const struct ledger_block *c = ledger_block_at(b->ledger, copy);
        struct park_memory memory = { b->quotas[c->quota], c->handle, c->offset, c->n_bytes, true };

        clear_copy(b, copy);
        park_memory_free(&memory);
}

/* ---- shared blocks: park ----------------------------------------------------- */

/* All sessions that have the block agree. */
static bool all_agree(struct ledger *l, uint32_t shared)
{
        const struct ledger_shared *record = ledger_shared_at(l, shared);
        uint32_t i = record->links.first_ref;

        if (record->links.n_refs == 0 || record->links.n_refs > PARK_MAX_HOLDERS)
                return false;
        for (; i != LEDGER_NONE; i = ledger_ref_at(l, i)->links.next_of_shared)
                if (ledger_ref_at(l, i)->parks_to == 0)
                        return false;
        return true;
}

/* 0, or an error and why: nothing has changed. */
static int commit_shared(struct park_shared *ps, const char **ret_sentence)
{
        struct broker *b = ps->broker;
        struct park_memory *memory = &ps->copying.memory, *copy = &ps->copying.copy;
        uint32_t block = ledger_shared_at(b->ledger, ps->name->shared)->block, index;
        struct ledger_block facts;
        int r;

        /* Quotas and limits may have changed while the worker shared_copied. */
        *ret_sentence = "the quota for the copy is removed or draining";
        if (copy->quota->is_removed || copy->quota->partition->is_draining) /* see keep_allows() */
                return -EBUSY;
        *ret_sentence = park_over_limit;
        if (!quota_may_park(memory->quota, memory->n_bytes)) /* others were parked meanwhile */
                return -EDQUOT;

        /* One word of the block's record names the copy: after a kill the block is parked, or the copy is
         * freed. */
        *ret_sentence = "the daemon is out of memory or block records";
        park_describe_copy(&ps->copying, ledger_block_at(b->ledger, block), &facts);
        if (ledger_block_add(b->ledger, &facts, &index) < 0)
                return -ENOMEM;
        park_record(memory->quota, block, ledger_block_at(b->ledger, index)->id);
        r = quota_park(memory->quota, memory->handle, memory->n_bytes);
        if (r < 0) {
                ledger_block_park(b->ledger, block, LEDGER_AWAKE);
                ledger_block_clear(b->ledger, index);
                return r;
        }

        /* From here on the copy is what the sessions share. */
        trim_remove_shared_block(memory->quota, memory->offset, memory->n_bytes);
        trim_add_shared_block(copy->quota, copy->offset, copy->n_bytes);
        copy->is_owned = false;
        return 0;
}

/* What the daemon began by itself has no one to tell. */
static void refuse_shared(struct park_shared *ps, int error, const char *sentence)
{
        struct park *p = take_asker(ps);

        if (p)
                park_refuse(p, error, sentence);
        parking_free(ps);
}

static void shared_copied(struct park_copying *c);

static struct park_shared *parking_of(struct park_copying *c)
{
        return (struct park_shared *)(void *)((char *)c - offsetof(struct park_shared, copying));
}

static void on_shared_copy_room(struct quota_request *wait, int result, bfc_handle handle, uint64_t offset)
{
        struct park_shared *ps = (struct park_shared *)wait;
        struct park *p;

        ps->is_waiting = false;
        if (ps->asker)
                ps->asker->session->stats.waited_ns += clock_ns() - wait->since_ns;
        if (result < 0) {
                p = take_asker(ps);
                if (p) {
                        p->wait = *wait;
                        park_refuse_room(p, result);
                }
                parking_free(ps);
                return;
        }
        ps->copying.copy =
                (struct park_memory){ ps->copying.copy.quota, handle, offset, wait->n_bytes, true };
        ps->copying.to_copy = true;
        if (park_copy_start(&ps->copying, shared_copied) < 0)
                refuse_shared(ps, -ENOMEM, "the daemon is out of memory");
}

/* All agree. p: the Park; NULL: the daemon does it by itself. */
static void begin_shared(struct broker *b, struct shared_name *name, struct park *p, struct quota *to,
                         uint32_t wait_ms)
{
        struct park_shared *ps = parking_new(b, name);
        int r;

        if (!ps) {
                if (p) {
                        ledger_ref_set_parks_to(b->ledger, p->ref, 0);
                        park_refuse(p, -ENOMEM, "the daemon is out of memory");
                }
                return;
        }
        ps->asker = p;
        if (p)
                p->shared = ps;

        /* It waits for room for the copy. What the daemon does by itself counts no refusal, and names no
         * session to be asked. */
        ps->copying.copy.quota = ps->wait.quota = to;
        ps->wait.n_bytes = ps->copying.memory.n_bytes;
        ps->wait.requester = p ? p->session : NULL;
        ps->wait.is_no_refusal = !p;
        ps->wait.wait_ms = wait_ms < SESSION_MAX_WAIT_MS ? wait_ms : SESSION_MAX_WAIT_MS;
        ps->wait.is_whole = ps->wait.is_copy = true;
        ps->wait.done = on_shared_copy_room;
        r = quota_alloc_whole(to, ps->wait.n_bytes, !p);
        if (r < 0) {
                on_shared_copy_room(&ps->wait, r, 0, 0);
                return;
        }
        ps->is_waiting = true;
        quota_wait(&ps->wait);
}

/* The quota for a copy that the daemon makes by itself: the one that a session which has the block chose, if the
 * session has that quota. The index may be that of another lease by now. NULL: there is none. */
static struct quota *find_shared_to(const struct broker *b, const struct shared_name *name)
{
        struct ledger *l = b->ledger;
        const struct quota *q = quota_of(b, name);
        uint32_t i = ledger_shared_at(l, name->shared)->links.first_ref;

        if (!quota_may_park(q, block_of(b, name)->n_bytes))
                return NULL;
        for (; i != LEDGER_NONE; i = ledger_ref_at(l, i)->links.next_of_shared) {
                const struct ledger_ref *ref = ledger_ref_at(l, i);
                const struct session *s = b->sessions.table[ref->session]; /* NULL: left to a successor */
                const struct session_share *share = s ? session_share_of(s, ref->parks_to - 1) : NULL;
                struct quota *to = share && !share->is_barred ? share->quota : NULL;

                if (to && !to->is_removed && !to->partition->is_cuda && to->partition != q->partition &&
                    quota_can_park(to))
                        return to;
        }
        return NULL;
}

void park_shared_look(struct broker *b, struct shared_name *name)
{
        const struct ledger_block *block = block_of(b, name);
        const struct quota *q = quota_of(b, name);
        struct quota *to;

        if (name->parking || ledger_block_is_parked(block) || block->n_requested != block->n_bytes ||
            !quota_can_park(q) || !arena_is_whole(q->arena, block->offset, block->n_bytes) ||
            !all_agree(b->ledger, name->shared))
                return;
        to = find_shared_to(b, name);
        if (to)
                begin_shared(b, name, NULL, to, 0);
}

void park_shared_resumed(struct session *s, uint32_t ref)
{
        if (ledger_ref_at(s->broker->ledger, ref)->parks_to != 0)
                park_shared_look(s->broker, name_of(s, ref));
}

static void shared_copied(struct park_copying *c)
{
        struct park_shared *ps = parking_of(c);
        struct shared_name *name = ps->name;
        struct broker *b = ps->broker;
        const char *sentence;
        int r;

        /* The block was freed meanwhile, or a session used it: then the copy is not of use. */
        if (!name) {
                parking_free(ps);
                return;
        }
        if (ps->is_void) {
                parking_free(ps);
                park_shared_look(b, name); /* they may all agree again */
                return;
        }
        r = c->result < 0 ? -EIO : commit_shared(ps, &sentence);
        if (r < 0) {
                refuse_shared(ps, r, r == -EIO ? park_copy_sentence(c->result) : sentence);
                return;
        }
        answer_asker(ps);
        parking_free(ps);
}

void park_shared_use(struct shared_name *name)
{
        struct park_shared *ps = name->parking;

        if (!ps || !TAILQ_EMPTY(&ps->wakes) || (ps->copying.n_copiers > 0 && !ps->copying.to_copy))
                return;
        answer_asker(ps);

        /* A wait for room ends here. A worker that copies stops soon, and shared_copied() then finds is_void. */
        if (ps->is_waiting) {
                quota_cancel(&ps->wait);
                ps->is_waiting = false;
                parking_free(ps);
                return;
        }
        ps->is_void = true;
        park_copy_drop(&ps->copying);
}

/* Whether the request is refused. */
static bool refuse_park(struct session *s, uint64_t id, const Bfcd__Park *m, uint32_t block, uint32_t ref)
{
        struct ledger *l = s->broker->ledger;
        const struct ledger_ref *r = ledger_ref_at(l, ref);
        const char *sentence = NULL;
        int error = 0;

        if (m->discard) {
                error = -EINVAL;
                sentence = "the contents of a shared block cannot be discarded";
        } else if (r->links.n_in_delivery > 0) {
                error = -EBUSY;
                sentence = "the shared block is being delivered, parked or woken";
        } else if (ledger_shared_at(l, r->shared)->links.n_refs > PARK_MAX_HOLDERS) {
                error = -EBUSY;
                sentence = "a block that more than 64 sessions share cannot be parked";
        } else if (!ledger_block_is_parked(ledger_block_at(l, block))) {
                error = park_fault(s, ledger_block_at(l, block), m, &sentence);
        }
        if (error < 0)
                session_refuse(s, id, error, sentence);
        return error < 0;
}

/* Another Park of the session was refused, so its client goes on to use the block, if that is awake. */
static void take_back_agreement(struct broker *b, struct shared_name *name, uint32_t ref)
{
        const struct ledger_ref *r = ledger_ref_at(b->ledger, ref);

        if (r->links.n_in_delivery > 0 || r->parks_to == 0 || ledger_block_is_parked(block_of(b, name)))
                return;
        park_shared_use(name);
        ledger_ref_set_parks_to(b->ledger, ref, 0);
}

/* A Park and a Wake of a shared block that the session has. NULL: it was answered, or waits for a copy. */
static void park_shared_handle(struct session *s, uint64_t id, const Bfcd__Park *m, uint32_t block,
                               uint32_t ref)
{
        struct broker *b = s->broker;
        struct ledger *l = b->ledger;
        uint32_t shared = ledger_ref_at(l, ref)->shared;
        struct shared_name *name = name_of(s, ref);
        struct park *p;

        /* All checks come before the session's agreement is recorded. */
        if (refuse_park(s, id, m, block, ref)) {
                take_back_agreement(b, name, ref);
                return;
        }
        if (ledger_block_is_parked(ledger_block_at(l, block))) { /* its client lost the answer */
                session_done(s, id);
                return;
        }
        if (session_join(s, &s->shares[m->partition], id) < 0) {
                take_back_agreement(b, name, ref);
                return;
        }

        /* The session agrees. The last one to agree has its Park answered when the block is parked, the others
         * at once. What is under way is void, and looks again at its end. */
        ledger_ref_set_parks_to(l, ref, s->shares[m->partition].quota->index + 1);
        if (name->parking || !all_agree(l, shared)) {
                session_done(s, id);
                return;
        }
        p = park_new(s, id, block, ref);
        if (p)
                begin_shared(b, name, p, s->shares[m->partition].quota, m->wait_ms);
        else
                ledger_ref_set_parks_to(l, ref, 0); /* the request was refused */
}

/* ---- shared blocks: wake ----------------------------------------------------- */

static void unqueue(struct park *p)
{
        if (!p->is_queued)
                return;
        quota_cancel(&p->wait);
        p->is_queued = false;
}

/* A wake is over that is not carried out. */
static void leave_wakes(struct park *p)
{
        struct park_shared *ps = p->shared;

        unqueue(p);
        TAILQ_REMOVE(&ps->wakes, p, of_shared);
        if (!ps->is_waiting && ps->copying.n_copiers == 0 && TAILQ_EMPTY(&ps->wakes))
                parking_free(ps);
}

/* The client has unmapped the block. */
static void note_unmapped(struct session *s, const struct ledger_block *block)
{
        struct session_share *share = session_share_of(s, block->quota);
        size_t last, slot = arena_slots(share->quota->arena, block->offset, block->n_bytes, &last);

        for (; slot <= last && slot < share->n_seen; slot++)
                if (share->seen[slot] != 0)
                        share->seen[slot] |= SEEN_UNMAPPED;
}

/* Also where the session before it could not be served, and the others agreed: see ref_end(). */
static void begin_use(struct session *s, uint32_t ref)
{
        park_shared_use(name_of(s, ref));
        ledger_ref_set_parks_to(s->broker->ledger, ref, 0);
}

/* The block is awake: it is the session's from now on. */
static void deliver_shared(struct session *s, uint64_t id, uint32_t block, uint32_t ref)
{
        struct ledger *l = s->broker->ledger;
        uint32_t parks_to = ledger_ref_at(l, ref)->parks_to;

        if (parks_to != 0)
                note_unmapped(s, ledger_block_at(l, block));
        begin_use(s, ref);
        if (session_deliver_woken(s, id, block, ref, parks_to) == 0)
                return;
        park_undelivered(s, ref, parks_to);
        session_refuse(s, id, -ENOMEM, "the daemon is out of memory: wake the block again");
}

/* Later deliveries of the reference, whose client uses the block, still wait: then it does not agree. */
void park_undelivered(struct session *s, uint32_t ref, uint32_t parks_to)
{
        shared_delivered(s, ref);
        if (parks_to != 0 && ledger_ref_at(s->broker->ledger, ref)->links.n_in_delivery == 0)
                ledger_ref_set_parks_to(s->broker->ledger, ref, parks_to);
}

/* Answers all wakes. error: the block is still parked. */
static void answer_wakes(struct park_shared *ps, int error)
{
        struct park_list wakes = TAILQ_HEAD_INITIALIZER(wakes);
        struct park *p;

        TAILQ_CONCAT(&wakes, &ps->wakes, of_shared);
        parking_free(ps); /* an answer may end the last reference */
        while ((p = TAILQ_FIRST(&wakes))) {
                struct session *s = p->session;
                struct session_share *share;
                uint64_t id = p->id;
                uint32_t block = p->block, ref = p->ref;
                bool attaches = p->attaches;

                TAILQ_REMOVE(&wakes, p, of_shared);
                if (error < 0) {
                        park_refuse(p, error == -ENOMEM ? error : -EIO, park_copy_sentence(error));
                        continue;
                }
                park_free(p);
                if (!attaches) {
                        deliver_shared(s, id, block, ref);
                        ready(s);
                        continue;
                }

                /* The session has the block for the first time. */
                share = session_share_of(s, ledger_block_at(s->broker->ledger, block)->quota);
                begin_use(s, ref);
                if (session_deliver_ref(s, id, share, block, ref) < 0) {
                        shared_undelivered(s, ref);
                        session_refuse(s, id, -ENOMEM, "the daemon is out of memory");
                }
                ready(s);
        }
}

static void undo_shared_wake(struct park_shared *ps, int error)
{
        quota_wake_undo(ps->copying.memory.quota, ps->copying.memory.handle, ps->copying.memory.n_bytes);
        answer_wakes(ps, error);
}

static void shared_woken(struct park_copying *c)
{
        struct park_shared *ps = parking_of(c);
        struct broker *b = ps->broker;
        uint32_t block, copy;

        if (!ps->name) {
                parking_free(ps);
                return;
        }
        if (c->result < 0 || TAILQ_EMPTY(&ps->wakes)) { /* those who waited have ended */
                undo_shared_wake(ps, c->result);
                return;
        }

        /* The record says awake before the copy is freed: there is always one with the contents. */
        block = ledger_shared_at(b->ledger, ps->name->shared)->block;
        copy = park_copy_of(b->ledger, block);
        quota_wake_commit(c->memory.quota, c->memory.handle);
        ledger_block_park(b->ledger, block, LEDGER_AWAKE);
        trim_add_shared_block(c->memory.quota, c->memory.offset, c->memory.n_bytes);
        free_copy(b, copy);
        answer_wakes(ps, 0);
}

static void on_shared_wake_room(struct quota_request *wait, int result, bfc_handle handle, uint64_t offset)
{
        struct park *p = (struct park *)wait, *other;
        struct park_shared *ps = p->shared;
        const struct ledger_block *copy;
        int r;

        (void)handle;
        (void)offset;
        p->is_queued = false;
        p->session->stats.waited_ns += clock_ns() - wait->since_ns;
        if (result < 0) {
                leave_wakes(p);
                park_refuse_wake(p, result);
                return;
        }

        /* The first wake that gets room copies for all: the others leave the queue and wait for the worker. */
        TAILQ_FOREACH(other, &ps->wakes, of_shared)
        unqueue(other);
        copy = ledger_block_at(ps->broker->ledger, park_copy_of(ps->broker->ledger, p->block));
        ps->copying.copy = (struct park_memory){ ps->broker->quotas[copy->quota], copy->handle, copy->offset,
                                                 copy->n_bytes, false };
        r = park_copy_start(&ps->copying, shared_woken);
        if (r < 0)
                undo_shared_wake(ps, r);
}

static bool has_most_wakes(const struct park_shared *ps)
{
        const struct park *p;
        size_t n = 0;

        TAILQ_FOREACH(p, &ps->wakes, of_shared)
        n++;
        return n >= SHARED_SLICE;
}

/* Waits for the block. NULL: the request was refused, and a reference that it has begun has ended. */
static struct park *wait_for_shared(struct session *s, uint64_t id, uint32_t block, uint32_t ref,
                                    uint32_t wait_ms, bool attaches)
{
        struct broker *b = s->broker;
        struct shared_name *name = name_of(s, ref);
        struct park *p = park_new(s, id, block, ref);
        struct park_shared *ps = name->parking;

        if (!p) {
                if (attaches)
                        shared_undelivered(s, ref);
                return NULL;
        }
        if (attaches)
                shared_delivered(s, ref); /* it was counted before */
        p->wakes = true;
        p->attaches = attaches;
        if (ps && has_most_wakes(ps)) {
                park_refuse(p, -EBUSY, "too many requests wait for this parked block");
                return NULL;
        }
        if (!ps)
                ps = parking_new(b, name);
        if (!ps) {
                park_refuse(p, -ENOMEM, "the daemon is out of memory");
                return NULL;
        }

        /* It waits for the copying that runs already, or for room like the other wakes. */
        p->shared = ps;
        TAILQ_INSERT_TAIL(&ps->wakes, p, of_shared);
        if (ps->copying.n_copiers > 0)
                return p;
        p->wait.quota = ps->copying.memory.quota;
        p->wait.wakes = ps->copying.memory.handle;
        p->wait.wait_ms = wait_ms < SESSION_MAX_WAIT_MS ? wait_ms : SESSION_MAX_WAIT_MS;
        p->wait.done = on_shared_wake_room;
        p->is_queued = true;
        quota_wait(&p->wait);
        return p;
}

static struct park *park_shared_wake(struct session *s, uint64_t id, uint32_t block, uint32_t ref,
                                     uint32_t wait_ms)
{
        struct ledger *l = s->broker->ledger;
        struct ledger_ref *r = ledger_ref_at(l, ref);
        struct park *p;

        if (r->links.n_in_delivery >= r->count) {
                session_refuse(s, id, -EBUSY, "the shared block is being delivered, parked or woken");
                return NULL;
        }
        if (session_refuse_delivery(s, id))
                return NULL;
        if (!ledger_block_is_parked(ledger_block_at(l, block))) {
                r->links.n_in_delivery++;
                deliver_shared(s, id, block, ref);
                return NULL;
        }
        if (park_copy_of(l, block) == LEDGER_NONE) {
                session_refuse(s, id, -EIO, "the block's copy was lost with its partition");
                return NULL;
        }
        p = wait_for_shared(s, id, block, ref, wait_ms, false);
        return p && p->is_queued ? p : NULL;
}

void park_shared_attach(struct session *s, uint64_t id, uint32_t block, uint32_t ref, uint32_t wait_ms)
{
        struct ledger *l = s->broker->ledger;
        uint32_t copy = park_copy_of(l, block);

        if (copy == LEDGER_NONE) {
                shared_undelivered(s, ref);
                session_refuse(s, id, -EIO, "the block's copy was lost with its partition");
                return;
        }
        ledger_ref_set_parks_to(l, ref, ledger_block_at(l, copy)->quota + 1); /* it does not use it yet */
        (void)wait_for_shared(s, id, block, ref, wait_ms, true);
}

/* ---- shared blocks: ends ----------------------------------------------------- */

/* The client withdraws the request: false if it cannot any more. */
static bool park_shared_cancel(struct park *p)
{
        struct park_shared *ps = p->shared;

        if (p->wakes && !p->is_queued)
                return false;
        if (p->wakes) {
                leave_wakes(p);
        } else {
                if (!ps->is_waiting)
                        return false;
                quota_cancel(&ps->wait);
                ps->is_waiting = false;
                (void)take_asker(ps);
                parking_free(ps);
        }
        park_end(p);
        return true;
}

/* A copy goes on without it: what it was asked for is still so. */
static void park_shared_drop(struct park *p)
{
        struct park_shared *ps = p->shared;

        if (p->wakes) {
                leave_wakes(p);
        } else {
                ps->asker = NULL;
                ps->wait.requester = NULL;
        }
        park_free(p);
}

void park_shared_leave(struct session *s, uint32_t ref)
{
        struct ledger *l = s->broker->ledger;
        const struct ledger_ref *r = ledger_ref_at(l, ref);

        if (r->parks_to != 0 && session_is_live(s))
                note_unmapped(s, ledger_block_at(l, ledger_shared_at(l, r->shared)->block));
}

struct park_shared_memory park_shared_end(struct broker *b, struct shared_name *name)
{
        struct park_shared_memory ret = { .is_parked = ledger_block_is_parked(block_of(b, name)) };
        struct park_shared *ps = name->parking;

        ret.copy = park_copy_of(b->ledger, ledger_shared_at(b->ledger, name->shared)->block);
        if (!ps)
                return ret;
        assert(!ps->asker && TAILQ_EMPTY(&ps->wakes));
        if (ps->is_waiting) {
                quota_cancel(&ps->wait);
                ps->is_waiting = false;
                parking_free(ps);
                return ret;
        }

        /* While the worker copies, the copying owns both memories, and frees them at its end. */
        ret.is_taken = true;
        ps->copying.memory.is_owned = true;
        ps->copying.copy.is_owned = true;
        park_copy_drop(&ps->copying);
        ps->name = NULL;
        name->parking = NULL;
        return ret;
}

void park_shared_free(struct broker *b, const struct ledger_block *block,
                      const struct park_shared_memory *memory)
{
        struct quota *q = b->quotas[block->quota];

        if (!memory->is_parked)
                trim_remove_shared_block(q, block->offset, block->n_bytes);
        if (memory->is_taken) { /* only the record of the copy is left */
                if (memory->copy != LEDGER_NONE)
                        clear_copy(b, memory->copy);
                return;
        }
        if (memory->is_parked)
                quota_drop_parked(q, block->handle);
        else
                quota_dealloc(q, block->handle, block->n_bytes, block->n_requested);
        if (memory->copy != LEDGER_NONE)
                free_copy(b, memory->copy);
}

void park_shared_forget(struct shared_name *name)
{
        struct park_shared *ps = name->parking;

        if (!ps)
                return;
        assert(!ps->asker && TAILQ_EMPTY(&ps->wakes));
        ps->broker = NULL;
        if (ps->is_waiting) {
                quota_cancel(&ps->wait);
                ps->is_waiting = false;
                parking_free(ps);
                return;
        }
        park_copy_drop(&ps->copying);
        ps->name = NULL;
        name->parking = NULL;
}
