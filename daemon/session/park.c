/* Park and wake; see park.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/park.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "daemon/session/delivery.h"
#include "daemon/session/park_internal.h"
#include "daemon/session/session.h"
#include "daemon/session/refs.h"
#include "daemon/session/request_refuse.h"
#include "daemon/session/share.h"
#include "daemon/session/shared.h"

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

struct park *park_new(struct session *s, uint64_t id, uint32_t block, uint32_t ref)
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
        p->copy_block = LEDGER_NONE;
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
void park_free(struct park *p)
{
        struct session *s = p->session;

        park_copy_deinit(&p->copying);
        if (s)
                TAILQ_REMOVE(&s->requests.parks, p, link);
        if (s && !p->is_dropped)
                s->requests.n--;
        free(p);
}

void park_end(struct park *p)
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
void park_refuse(struct park *p, int error, const char *sentence)
{
        struct session *s = p->session;
        uint64_t id = p->id;

        park_end(p);
        session_refuse(s, id, error, sentence);
        s->ops->ready(s->userdata);
}

/* ---- park ---------------------------------------------------------------------- */

void park_describe_copy(const struct park_copying *c, const struct ledger_block *block,
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

const char park_over_limit[] =
        "the parked blocks would exceed four times the limit of the tenant in the partition";

void park_record(const struct quota *q, uint32_t block, uint64_t parked)
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

void park_refuse_room(struct park *p, int error)
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

int park_fault(struct session *s, const struct ledger_block *b, const Bfcd__Park *m,
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

void park_refuse_wake(struct park *p, int error)
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
        if (p->copy_block == LEDGER_NONE) {
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
        p->copy_block = copy;
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

/* The record of the session's block was cleared. True: a worker still uses the memory, which is freed later. */
static bool park_takes_over(struct session *s, uint32_t block)
{
        struct park *p;

        TAILQ_FOREACH(p, &s->requests.parks, link)
        {
                if (p->copying.n_copiers > 0 && p->block == block && !p->copying.memory.is_owned) {
                        p->copying.memory.is_owned = true;
                        return true;
                }
                if (p->copying.n_copiers > 0 && p->wakes && p->copy_block == block &&
                    !p->copying.copy.is_owned) {
                        p->copying.copy.is_owned = true;
                        return true;
                }
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
        if (!park_takes_over(s, index))
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
        if (!park_takes_over(s, index))
                quota_dealloc(share->quota, handle, n_bytes, n_requested);
}
