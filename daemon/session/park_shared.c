/* Park and wake of shared blocks; see park.h.
 *
 * What is under way for a block is in its name. While the block is awake that is at most a park: it waits for room for
 * the copy, or a worker copies. While it is parked these are the wakes, which wait for room, or for the worker that
 * copies for the first of them. The name may go before the worker has ended.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>

#include "daemon/base/clock.h"
#include "daemon/session/delivery.h"
#include "daemon/session/park_internal.h"
#include "daemon/session/session.h"
#include "daemon/session/shared_internal.h"
#include "daemon/session/park.h"
#include "daemon/session/share.h"
#include "daemon/session/shared.h"
#include "daemon/session/trim.h"

#define PARK_MAX_HOLDERS 64u

struct park_shared {
        struct quota_request wait; /* for the copy's room */
        struct park_copying copying;
        struct broker *broker;    /* NULL: the daemon ends */
        struct shared_name *name; /* NULL: the block has been freed, or the daemon ends */
        bool is_waiting;          /* for the copy's room */
        bool is_void;             /* a session used the block meanwhile */
        struct park *asker;       /* the Park to be answered; NULL: none */
        struct park_list wakes;
        size_t n_wakes; /* at most SHARED_SLICE: they are answered in one turn */
};

/* The name of the shared block of a reference. */
static struct shared_name *name_of(const struct session *s, uint32_t ref)
{
        struct ledger *l = s->broker->ledger;

        return shared_name_find(s->broker, s->tenant->name,
                                ledger_shared_at(l, ledger_ref_at(l, ref)->shared)->name);
}

/* ---- life --------------------------------------------------------------------- */

static struct ledger_block *block_of(const struct broker *b, const struct shared_name *name)
{
        return ledger_block_at(b->ledger, ledger_shared_at(b->ledger, name->shared)->block);
}

static struct quota *quota_of(const struct broker *b, const struct shared_name *name)
{
        return b->quotas[block_of(b, name)->quota];
}

/* NULL: no memory. */
static struct park_shared *shared_new(struct broker *b, struct shared_name *name)
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

static void shared_free(struct park_shared *ps)
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

/* ---- the copy's record ------------------------------------------------------------ */

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

/* ---- park ---------------------------------------------------------------------- */

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
static int commit(struct park_shared *ps, const char **ret_sentence)
{
        struct broker *b = ps->broker;
        struct park_memory *memory = &ps->copying.memory, *copy = &ps->copying.copy;
        uint32_t block = ledger_shared_at(b->ledger, ps->name->shared)->block, index;
        struct ledger_block facts;
        int r;

        /* Quotas and limits may have changed while the worker copied. */
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
static void refuse(struct park_shared *ps, int error, const char *sentence)
{
        struct park *p = take_asker(ps);

        if (p)
                park_refuse(p, error, sentence);
        shared_free(ps);
}

static void copied(struct park_copying *c);

static struct park_shared *shared_of(struct park_copying *c)
{
        return (struct park_shared *)(void *)((char *)c - offsetof(struct park_shared, copying));
}

static void on_copy_room(struct quota_request *wait, int result, bfc_handle handle, uint64_t offset)
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
                shared_free(ps);
                return;
        }
        ps->copying.copy =
                (struct park_memory){ ps->copying.copy.quota, handle, offset, wait->n_bytes, true };
        ps->copying.to_copy = true;
        if (park_copy_start(&ps->copying, copied) < 0)
                refuse(ps, -ENOMEM, "the daemon is out of memory");
}

/* All agree. p: the Park; NULL: the daemon does it by itself. */
static void begin(struct broker *b, struct shared_name *name, struct park *p, struct quota *to,
                  uint32_t wait_ms)
{
        struct park_shared *ps = shared_new(b, name);
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
        ps->wait.done = on_copy_room;
        r = quota_alloc_whole(to, ps->wait.n_bytes, !p);
        if (r < 0) {
                on_copy_room(&ps->wait, r, 0, 0);
                return;
        }
        ps->is_waiting = true;
        quota_wait(&ps->wait);
}

/* The quota for a copy that the daemon makes by itself: the one that a session which has the block chose, if the
 * session has that quota. The index may be that of another lease by now. NULL: there is none. */
static struct quota *find_to(const struct broker *b, const struct shared_name *name)
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
        to = find_to(b, name);
        if (to)
                begin(b, name, NULL, to, 0);
}

void park_shared_resumed(struct session *s, uint32_t ref)
{
        if (ledger_ref_at(s->broker->ledger, ref)->parks_to != 0)
                park_shared_look(s->broker, name_of(s, ref));
}

static void copied(struct park_copying *c)
{
        struct park_shared *ps = shared_of(c);
        struct shared_name *name = ps->name;
        struct broker *b = ps->broker;
        const char *sentence;
        int r;

        /* The block was freed meanwhile, or a session used it: then the copy is not of use. */
        if (!name) {
                shared_free(ps);
                return;
        }
        if (ps->is_void) {
                shared_free(ps);
                park_shared_look(b, name); /* they may all agree again */
                return;
        }
        r = c->result < 0 ? -EIO : commit(ps, &sentence);
        if (r < 0) {
                refuse(ps, r, r == -EIO ? park_copy_sentence(c->result) : sentence);
                return;
        }
        answer_asker(ps);
        shared_free(ps);
}

void park_shared_use(struct shared_name *name)
{
        struct park_shared *ps = name->parking;

        if (!ps || !TAILQ_EMPTY(&ps->wakes) || (ps->copying.n_copiers > 0 && !ps->copying.to_copy))
                return;
        answer_asker(ps);

        /* A wait for room ends here. A worker that copies stops soon, and copied() then finds is_void. */
        if (ps->is_waiting) {
                quota_cancel(&ps->wait);
                ps->is_waiting = false;
                shared_free(ps);
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

void park_shared_handle(struct session *s, uint64_t id, const Bfcd__Park *m, uint32_t block, uint32_t ref)
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
                begin(b, name, p, s->shares[m->partition].quota, m->wait_ms);
        else
                ledger_ref_set_parks_to(l, ref, 0); /* the request was refused */
}

/* ---- wake ---------------------------------------------------------------------- */

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
        ps->n_wakes--;
        if (!ps->is_waiting && ps->copying.n_copiers == 0 && TAILQ_EMPTY(&ps->wakes))
                shared_free(ps);
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
static void deliver(struct session *s, uint64_t id, uint32_t block, uint32_t ref)
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
        shared_free(ps); /* an answer may end the last reference */
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
                        deliver(s, id, block, ref);
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

static void wake_undo(struct park_shared *ps, int error)
{
        quota_wake_undo(ps->copying.memory.quota, ps->copying.memory.handle, ps->copying.memory.n_bytes);
        answer_wakes(ps, error);
}

static void woken(struct park_copying *c)
{
        struct park_shared *ps = shared_of(c);
        struct broker *b = ps->broker;
        uint32_t block, copy;

        if (!ps->name) {
                shared_free(ps);
                return;
        }
        if (c->result < 0 || TAILQ_EMPTY(&ps->wakes)) { /* those who waited have ended */
                wake_undo(ps, c->result);
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

static void on_wake_room(struct quota_request *wait, int result, bfc_handle handle, uint64_t offset)
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
        copy = ledger_block_at(ps->broker->ledger, p->copy_block);
        ps->copying.copy = (struct park_memory){ ps->broker->quotas[copy->quota], copy->handle, copy->offset,
                                                 copy->n_bytes, false };
        r = park_copy_start(&ps->copying, woken);
        if (r < 0)
                wake_undo(ps, r);
}

/* Waits for the block. NULL: the request was refused, and a reference that it has begun has ended. */
static struct park *wait_for_block(struct session *s, uint64_t id, uint32_t block, uint32_t ref,
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
        if (ps && ps->n_wakes == SHARED_SLICE) {
                park_refuse(p, -EBUSY, "too many requests wait for this parked block");
                return NULL;
        }
        if (!ps)
                ps = shared_new(b, name);
        if (!ps) {
                park_refuse(p, -ENOMEM, "the daemon is out of memory");
                return NULL;
        }

        /* It waits for the copying that runs already, or for room like the other wakes. */
        p->shared = ps;
        p->copy_block = park_copy_of(b->ledger, block);
        TAILQ_INSERT_TAIL(&ps->wakes, p, of_shared);
        ps->n_wakes++;
        if (ps->copying.n_copiers > 0)
                return p;
        p->wait.quota = ps->copying.memory.quota;
        p->wait.wakes = ps->copying.memory.handle;
        p->wait.wait_ms = wait_ms < SESSION_MAX_WAIT_MS ? wait_ms : SESSION_MAX_WAIT_MS;
        p->wait.done = on_wake_room;
        p->is_queued = true;
        quota_wait(&p->wait);
        return p;
}

struct park *park_shared_wake(struct session *s, uint64_t id, uint32_t block, uint32_t ref, uint32_t wait_ms)
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
                deliver(s, id, block, ref);
                return NULL;
        }
        if (park_copy_of(l, block) == LEDGER_NONE) {
                session_refuse(s, id, -EIO, "the block's copy was lost with its partition");
                return NULL;
        }
        p = wait_for_block(s, id, block, ref, wait_ms, false);
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
        (void)wait_for_block(s, id, block, ref, wait_ms, true);
}

/* ---- ends ---------------------------------------------------------------------- */

bool park_shared_cancel(struct park *p)
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
                shared_free(ps);
        }
        park_end(p);
        return true;
}

/* A copy goes on without it: what it was asked for is still so. */
void park_shared_drop(struct park *p)
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
                shared_free(ps);
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
                shared_free(ps);
                return;
        }
        park_copy_drop(&ps->copying);
        ps->name = NULL;
        name->parking = NULL;
}
