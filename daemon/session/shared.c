/* Shared blocks; see shared.h.
 *
 * Names are in one balanced tree (tsearch(3)), by tenant and name, so that no client can choose names that
 * are slow to find.
 *
 * The kept blocks without references are in one binary heap, by the time at which they are freed. Its room
 * is made when a block is published, so nothing can fail when the last reference is released. A block that is
 * to be freed at once has the time 0.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/shared.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <search.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "daemon/base/list.h"
#include "daemon/base/log.h"
#include "daemon/ledger/ledger.h"
#include "daemon/session/delivery.h"
#include "daemon/session/park.h"
#include "daemon/session/session.h"
#include "daemon/session/share.h"
#include "daemon/session/trim.h"

#define EXPIRE_LOOKS 4096u /* at sessions and waits, in one turn */

struct shared_wait {
        struct session *session;
        struct shared_name *name;
        uint64_t request_id;
        uint64_t until_ms;
        bool is_read_only; /* the attach */
        TAILQ_ENTRY(shared_wait) of_session, of_name;
        bool sees[]; /* by index of the session's partitions: the client can map what is there */
};

void shared_init(struct shared_state *shared)
{
        TAILQ_INIT(&shared->waits);
}

/* ---- the references of a session ------------------------------------------- */

/* The index of the reference, or where it would be. */
static size_t place_of(const struct refs *h, uint32_t shared)
{
        size_t first = 0, end = h->n;

        while (first < end) {
                size_t middle = first + (end - first) / 2;

                if (h->list[middle].shared < shared)
                        first = middle + 1;
                else
                        end = middle;
        }
        return first;
}

void refs_clear(struct refs *h)
{
        free(h->list);
        *h = (struct refs){ .list = NULL };
}

uint32_t refs_find(const struct refs *h, uint32_t shared)
{
        size_t at = place_of(h, shared);

        return at < h->n && h->list[at].shared == shared ? h->list[at].ref : LEDGER_NONE;
}

int refs_make_room(struct refs *h)
{
        struct ref_at *list;

        assert(h->n < SHARED_MAX_REFS);
        if ((h->n & (h->n - 1)) != 0)
                return 0;
        list = realloc(h->list, (h->n > 0 ? 2 * h->n : 1) * sizeof(*list));
        if (!list)
                return -ENOMEM;
        h->list = list;
        return 0;
}

void refs_add(struct refs *h, uint32_t shared, uint32_t ref)
{
        size_t at = place_of(h, shared);

        assert(at == h->n || h->list[at].shared != shared);
        memmove(h->list + at + 1, h->list + at, (h->n - at) * sizeof(*h->list));
        h->list[at] = (struct ref_at){ shared, ref };
        h->n++;
}

void refs_remove(struct refs *h, uint32_t shared)
{
        size_t at = place_of(h, shared);

        assert(at < h->n && h->list[at].shared == shared);
        h->n--;
        memmove(h->list + at, h->list + at + 1, (h->n - at) * sizeof(*h->list));
}

/* ---- names --------------------------------------------------------------- */

static int name_compare(const void *a, const void *b)
{
        const struct shared_name *x = a, *y = b;
        int r = strcmp(x->tenant, y->tenant);

        return r != 0 ? r : strcmp(x->name, y->name);
}

static void name_key(const char *tenant, const char *text, struct shared_name *ret)
{
        snprintf(ret->tenant, sizeof(ret->tenant), "%s", tenant);
        snprintf(ret->name, sizeof(ret->name), "%s", text);
}

struct shared_name *shared_name_find(const struct broker *b, const char *tenant, const char *text)
{
        struct shared_name key = { 0 }, *const * found;

        name_key(tenant, text, &key);
        found = tfind(&key, &b->shared.tree, name_compare);
        return found ? *found : NULL;
}

static struct shared_name *name_find(const struct session *s, const char *text)
{
        return shared_name_find(s->broker, s->tenant->name, text);
}

/* A name that does not exist yet. NULL: out of memory. */
static struct shared_name *name_new(struct broker *b, const char *tenant, const char *text)
{
        struct shared_name *name = calloc(1, sizeof(*name));

        if (!name)
                return NULL;
        name_key(tenant, text, name);
        name->shared = LEDGER_NONE;
        TAILQ_INIT(&name->waits);
        if (!tsearch(name, &b->shared.tree, name_compare)) {
                free(name);
                return NULL;
        }
        return name;
}

/* Finds or makes a name. NULL: out of memory. */
static struct shared_name *name_get(struct session *s, const char *text)
{
        struct shared_name *name = name_find(s, text);

        return name ? name : name_new(s->broker, s->tenant->name, text);
}

/* Forgets a name that is neither published nor waited for. */
static void shared_name_drop(struct broker *b, struct shared_name *name)
{
        if (name->shared == LEDGER_NONE || TAILQ_EMPTY(&name->waits))
                LIST_DROP(&b->shared.due, name, of_due);
        if (name->shared != LEDGER_NONE || !TAILQ_EMPTY(&name->waits) || name->is_busy)
                return;
        tdelete(name, &b->shared.tree, name_compare);
        free(name);
}

/* 1 to 63 bytes of printable ASCII. Others are refused. */
static bool shared_refuse_name(struct session *s, uint64_t id, const char *text)
{
        size_t n = strlen(text);

        for (size_t i = 0; i < n; i++)
                if (text[i] < ' ' || text[i] > '~')
                        n = 0;
        if (n > 0 && n < LEDGER_NAME_BYTES)
                return false;
        session_refuse(s, id, -EINVAL, "the name of a shared block must be 1 to 63 bytes of printable ASCII");
        return true;
}

static void shared_end(struct broker *b, struct shared_name *name, uint32_t ref);

/* ---- the heap of kept blocks ------------------------------------------------------------ */

static struct ledger_shared *record_of(const struct broker *b, const struct shared_name *name)
{
        return ledger_shared_at(b->ledger, name->shared);
}

static struct quota *quota_of(const struct broker *b, const struct shared_name *name)
{
        return b->quotas[ledger_block_at(b->ledger, record_of(b, name)->block)->quota];
}

/* at: from 1 on. */
static uint64_t time_at(const struct broker *b, size_t at)
{
        return record_of(b, b->shared.idle[at - 1])->until_ms;
}

static void heap_put(struct broker *b, size_t at, struct shared_name *name)
{
        b->shared.idle[at - 1] = name;
        name->idle_at = at;
}

static void heap_swap(struct broker *b, size_t x, size_t y)
{
        struct shared_name *name = b->shared.idle[x - 1];

        heap_put(b, x, b->shared.idle[y - 1]);
        heap_put(b, y, name);
}

static void heap_rise(struct broker *b, size_t at)
{
        for (; at > 1 && time_at(b, at) < time_at(b, at / 2); at /= 2)
                heap_swap(b, at, at / 2);
}

static void heap_sink(struct broker *b, size_t at)
{
        for (;;) {
                size_t least = at;

                for (size_t child = 2 * at; child <= 2 * at + 1 && child <= b->shared.n_idle; child++)
                        if (time_at(b, child) < time_at(b, least))
                                least = child;
                if (least == at)
                        return;
                heap_swap(b, at, least);
                at = least;
        }
}

static void heap_add(struct broker *b, struct shared_name *name)
{
        assert(name->idle_at == 0 && b->shared.n_idle < b->shared.n_idle_room);
        heap_put(b, ++b->shared.n_idle, name);
        heap_rise(b, name->idle_at);
        broker_wake(b); /* its time has to be watched */
}

static void heap_remove(struct broker *b, struct shared_name *name)
{
        size_t at = name->idle_at, last = b->shared.n_idle--;

        name->idle_at = 0;
        if (at == last)
                return;
        heap_put(b, at, b->shared.idle[last - 1]);
        heap_rise(b, at);
        heap_sink(b, at);
}

/* ---- counts -------------------------------------------------------------- */

/* Makes room for one more block that is kept, so that nothing can fail later. -ENOMEM. */
static int keep_make_room(struct broker *b)
{
        size_t n = b->shared.n_kept + 1;
        struct shared_name **idle;

        if (n <= b->shared.n_idle_room)
                return 0;
        n += n / 2;
        idle = reallocarray(b->shared.idle, n, sizeof(struct shared_name *));
        if (!idle)
                return -ENOMEM;
        b->shared.idle = idle;
        b->shared.n_idle_room = n;
        return 0;
}

/* The name has been published: counts it if the block is kept or has metadata. */
static void keep_add(struct broker *b, struct shared_name *name)
{
        const struct ledger_shared *shared = record_of(b, name);

        if (shared->keep_ms == 0 && shared->metadata == LEDGER_NONE)
                return;
        name->is_counted = true;
        name->owner->n_kept++;
        b->shared.n_kept++;
}

/* Undoes keep_add(), and ends the keep time, before the name is removed. */
static void keep_remove(struct broker *b, struct shared_name *name)
{
        if (name->idle_at > 0)
                heap_remove(b, name);
        if (!name->is_counted)
                return;
        name->is_counted = false;
        name->owner->n_kept--;
        b->shared.n_kept--;
}

/* ---- kept blocks ---------------------------------------------------------------- */

static bool may_keep_in(const struct quota *q)
{
        return !q->is_removed && !q->partition->is_draining;
}

/* A copy could not be woken by anyone else, and its quota would never go. */
static bool keep_allows(const struct broker *b, const struct shared_name *name)
{
        uint32_t copy = park_copy_of(b->ledger, record_of(b, name)->block);

        return record_of(b, name)->keep_ms > 0 && may_keep_in(quota_of(b, name)) &&
               (copy == LEDGER_NONE || may_keep_in(b->quotas[ledger_block_at(b->ledger, copy)->quota]));
}

/* The time is in the ledger before the last reference is gone: a successor knows it. */
static void keep_begin(struct broker *b, struct shared_name *name)
{
        uint64_t until_ms;

        if (__builtin_add_overflow(clock_ms(), record_of(b, name)->keep_ms, &until_ms))
                until_ms = LEDGER_FOREVER;
        ledger_shared_keep_until(b->ledger, name->shared, until_ms);
        heap_add(b, name);
}

static void keep_end(struct broker *b, struct shared_name *name)
{
        if (name->idle_at > 0)
                heap_remove(b, name);
}

/* keep_begin() for a block that an earlier process kept without references. */
static void keep_restore(struct broker *b, struct shared_name *name)
{
        if (!keep_allows(b, name))
                ledger_shared_keep_until(b->ledger, name->shared, 0);
        heap_add(b, name);
}

/* The extents go back to the device, as after the end of a session. */
static void end_idle(struct broker *b, struct shared_name *name)
{
        struct quota *q = quota_of(b, name);

        log_limited(&name->owner->kept_log, LOG_LEVEL_INFO,
                    "tenant '%s' in partition '%s': the kept block '%s' is freed: %s", q->tenant,
                    q->partition->name, name->name,
                    keep_allows(b, name) ? "its time is up" : "it is no longer kept");
        shared_end(b, name, LEDGER_NONE);
        if (q->sessions.n == 0)
                quota_release_unused(q);
        else
                quota_release_surplus(q);
        broker_note_leave(b, q);
}

/* Only those without references are in the heap. */
static void review_kept(struct broker *b)
{
        b->shared.must_review = false;
        for (size_t i = 0; i < b->shared.n_idle; i++)
                if (!keep_allows(b, b->shared.idle[i]))
                        ledger_shared_keep_until(b->ledger, b->shared.idle[i]->shared, 0);
        for (size_t at = b->shared.n_idle / 2; at > 0; at--)
                heap_sink(b, at);
}

/* Frees kept blocks whose time is up, as far as the budget allows. */
static void keep_expire(struct broker *b, uint64_t now_ms, unsigned *budget)
{
        if (b->shared.must_review)
                review_kept(b);
        for (; *budget > 0 && b->shared.n_idle > 0 && time_at(b, 1) <= now_ms; (*budget)--)
                end_idle(b, b->shared.idle[0]);
}

/* A kept block is to be freed at once. */
static bool shared_frees_kept_now(const struct broker *b)
{
        return b->shared.must_review || (b->shared.n_idle > 0 && time_at(b, 1) == 0);
}

uint64_t shared_keeps_until(const struct broker *b)
{
        uint64_t until_ms = b->shared.n_idle > 0 ? time_at(b, 1) : 0;

        return until_ms == LEDGER_FOREVER ? 0 : until_ms;
}

void shared_expire_kept(struct broker *b, uint64_t now_ms)
{
        unsigned budget = SHARED_SLICE;

        keep_expire(b, now_ms, &budget);
}

void shared_end_kept(struct broker *b)
{
        while (b->shared.n_idle > 0)
                end_idle(b, b->shared.idle[b->shared.n_idle - 1]);
        free(b->shared.idle);
        b->shared.idle = NULL;
        b->shared.n_idle_room = 0;
}

/* ---- references ---------------------------------------------------------- */

/* The session has fewer than SHARED_MAX_REFS, and none to this block. -ENOSPC, -ENOMEM. */
static int ref_begin(struct session *s, uint32_t shared, uint32_t *ret_ref)
{
        int r = refs_make_room(&s->shared.refs);

        if (r == 0)
                r = ledger_ref_add(s->broker->ledger, s->index, shared, ret_ref);
        if (r == 0)
                refs_add(&s->shared.refs, shared, *ret_ref);
        return r;
}

/* Frees the block and its name. ref: its last reference; LEDGER_NONE: it has none. */
static void shared_end(struct broker *b, struct shared_name *name, uint32_t ref)
{
        struct ledger *l = b->ledger;
        uint32_t index = name->shared, block_index = ledger_shared_at(l, index)->block;
        const struct ledger_block block = *ledger_block_at(l, block_index);
        const struct park_shared_memory memory = park_shared_end(b, name);

        keep_remove(b, name);
        ledger_block_clear(l, block_index);
        if (ref != LEDGER_NONE)
                ledger_ref_clear(l, ref);
        ledger_shared_clear(l, index);
        name->shared = LEDGER_NONE;
        name->owner = NULL;
        shared_name_drop(b, name);
        park_shared_free(b, &block, &memory);
}

bool shared_protects(const struct session *s, const struct ledger_block *block)
{
        struct ledger *l = s->broker->ledger;
        const struct arena *arena;
        size_t first, last, from, to;

        if (s->shared.n_read_only == 0)
                return false;
        arena = session_share_of(s, block->quota)->quota->arena;
        first = arena_slots(arena, block->offset, block->n_bytes, &last);
        for (size_t i = 0; i < s->shared.refs.n; i++) {
                const struct ledger_ref *ref = ledger_ref_at(l, s->shared.refs.list[i].ref);
                const struct ledger_block *other;

                if (!ref->is_read_only)
                        continue;
                other = ledger_block_at(l, ledger_shared_at(l, ref->shared)->block);
                if (other->quota != block->quota)
                        continue;
                from = arena_slots(arena, other->offset, other->n_bytes, &to);
                if (from <= last && first <= to)
                        return true;
        }
        return false;
}

/* The last reference frees the block, or the block is kept. */
static void ref_end(struct session *s, uint32_t ref)
{
        struct broker *b = s->broker;
        struct ledger *l = b->ledger;
        uint32_t shared = ledger_ref_at(l, ref)->shared;
        bool is_last = ledger_shared_at(l, shared)->links.n_refs == 1,
             was_used = ledger_ref_at(l, ref)->parks_to == 0;
        struct shared_name *name =
                is_last || was_used ? name_find(s, ledger_shared_at(l, shared)->name) : NULL;

        park_shared_leave(s, ref);
        refs_remove(&s->shared.refs, shared);
        s->shared.n_read_only -= ledger_ref_at(l, ref)->is_read_only != 0;
        if (is_last && !keep_allows(b, name)) {
                shared_end(b, name, ref);
                return;
        }
        if (is_last)
                keep_begin(b, name);
        ledger_ref_clear(l, ref);
        if (was_used)
                park_shared_look(b, name);
}

static void ref_count_down(struct session *s, uint32_t ref)
{
        struct ledger_ref *h = ledger_ref_at(s->broker->ledger, ref);

        if (h->count > 1)
                h->count--;
        else
                ref_end(s, ref);
}

bool shared_detach(struct session *s, uint32_t block)
{
        struct ledger *l = s->broker->ledger;
        uint32_t ref = refs_find(&s->shared.refs, ledger_block_at(l, block)->shared);

        if (ref == LEDGER_NONE || ledger_ref_at(l, ref)->count == ledger_ref_at(l, ref)->links.n_in_delivery)
                return false;
        ref_count_down(s, ref);
        return true;
}

void shared_delivered(struct session *s, uint32_t ref)
{
        ledger_ref_at(s->broker->ledger, ref)->links.n_in_delivery--;
}

void shared_undelivered(struct session *s, uint32_t ref)
{
        shared_delivered(s, ref);
        ref_count_down(s, ref);
}

bool shared_drop_unlisted(struct session *s, uint32_t ref)
{
        struct ledger_ref *h = ledger_ref_at(s->broker->ledger, ref);
        uint32_t n = h->links.n_in_delivery;

        h->links.n_in_delivery = 0;
        if (n == h->count) {
                ref_end(s, ref);
                return true;
        }
        h->count -= n;
        return false;
}

/* The last of the list, so that the others do not move. */
void shared_reap(struct session *s)
{
        ref_end(s, s->shared.refs.list[s->shared.refs.n - 1].ref);
}

/* ---- publish ------------------------------------------------------------- */

/* True: the Publish was refused, or answered because the block is published already. */
static bool refuse_publish(struct session *s, uint64_t id, const Bfcd__Publish *p, uint32_t index)
{
        struct ledger *l = s->broker->ledger;
        const struct ledger_block *block = index == LEDGER_NONE ? NULL : ledger_block_at(l, index);
        uint32_t shared = block ? block->shared : LEDGER_NONE;
        const struct shared_name *taken;

        if (shared != LEDGER_NONE && refs_find(&s->shared.refs, shared) != LEDGER_NONE) {
                if (s->resume.n_begun > 0 && strcmp(ledger_shared_at(l, shared)->name, p->name) == 0) {
                        session_done(s, id); /* the previous daemon did, and its answer was lost */
                        return true;
                }
                session_refuse_format(s, id, -EINVAL, "block %" PRIu64 " is already shared as '%s'",
                                      p->block_id, ledger_shared_at(l, shared)->name);
                return true;
        }
        if (!block || block->session != s->index || block->links.in_delivery ||
            block->parked != LEDGER_AWAKE) {
                session_refuse_format(s, id, -EINVAL,
                                      "block %" PRIu64
                                      " does not belong to this session: already freed, or never "
                                      "allocated by it",
                                      p->block_id);
                return true;
        }
        taken = name_find(s, p->name);
        if (taken && taken->shared != LEDGER_NONE) {
                session_refuse_format(
                        s, id, -EEXIST,
                        "tenant '%s' already has a block shared as '%s'; the name is free when the last "
                        "of %" PRIu32 " sessions has detached or freed it%s",
                        s->tenant->name, p->name, ledger_shared_at(l, taken->shared)->links.n_refs,
                        ledger_shared_at(l, taken->shared)->keep_ms > 0 ? " and it is no longer kept" : "");
                return true;
        }
        return false;
}

/* True: the block cannot be kept or described as requested, and the request was refused. */
static bool refuse_keep(struct session *s, uint64_t id, const Bfcd__Publish *p)
{
        if (p->metadata.len > LEDGER_METADATA_BYTES) {
                session_refuse_format(s, id, -EINVAL,
                                      "the metadata has %zu bytes, and at most %u are allowed",
                                      p->metadata.len, LEDGER_METADATA_BYTES);
                return true;
        }
        if (p->keep_ms == 0 && p->metadata.len == 0)
                return false;
        if (s->tenant->n_kept >= SHARED_MAX_KEPT) {
                session_refuse_format(s, id, -EDQUOT,
                                      "tenant '%s' has %zu shared blocks that are kept or have metadata, the "
                                      "maximum",
                                      s->tenant->name, s->tenant->n_kept);
                return true;
        }
        if (keep_make_room(s->broker) == 0)
                return false;
        session_refuse(s, id, -ENOMEM, "the daemon is out of memory");
        return true;
}

/* True: the session has too many references, and the request was refused. */
static bool refuse_excess_ref(struct session *s, uint64_t id)
{
        if (ledger_session_at(s->broker->ledger, s->index)->links.n_refs < SHARED_MAX_REFS)
                return false;
        session_refuse_format(s, id, -EDQUOT, "this session has %u shared blocks, the maximum",
                              SHARED_MAX_REFS);
        return true;
}

/* The block's record is changed last. -ENOSPC: a table is full; -ENOMEM. */
static int publish_write_down(struct session *s, const Bfcd__Publish *p, uint32_t block, uint32_t *ret_shared)
{
        struct ledger *l = s->broker->ledger;
        struct ledger_shared facts = { .block = block, .born_ms = clock_ms(), .keep_ms = p->keep_ms };
        uint32_t shared, ref;
        int r;

        snprintf(facts.name, sizeof(facts.name), "%s", p->name);
        r = ledger_shared_add(l, &facts, &shared);
        if (r < 0)
                return r;
        if (p->metadata.len > 0)
                r = ledger_shared_describe(l, shared, p->metadata.data, p->metadata.len);
        if (r == 0)
                r = ref_begin(s, shared, &ref);
        if (r < 0) {
                ledger_shared_clear(l, shared);
                return r;
        }
        ledger_block_share(l, block, shared);
        *ret_shared = shared;
        return 0;
}

int shared_publish(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        const Bfcd__Publish *p = r->publish;
        struct broker *b = s->broker;
        uint32_t index = ledger_block_find(b->ledger, p->block_id);
        struct shared_name *name;
        int error;

        (void)ret_why;
        if (s->role != ROLE_CLIENT) {
                session_refuse(s, r->id, -EACCES, "the admin socket serves no blocks: use the client socket");
                return 0;
        }
        if (shared_refuse_name(s, r->id, p->name) || refuse_publish(s, r->id, p, index) ||
            refuse_excess_ref(s, r->id) || refuse_keep(s, r->id, p))
                return 0;
        name = name_get(s, p->name);
        error = name ? publish_write_down(s, p, index, &name->shared) : -ENOMEM;
        if (error < 0) {
                if (name)
                        shared_name_drop(b, name);
                session_refuse(s, r->id, -ENOMEM,
                               error == -ENOSPC
                                       ? "the daemon's table of shared blocks, of their references or of "
                                         "their metadata is full"
                                       : "the daemon is out of memory");
                return 0;
        }
        name->owner = s->tenant;
        keep_add(b, name);
        usage_remove(&session_share_of(s, ledger_block_at(b->ledger, index)->quota)->usage,
                     ledger_block_at(b->ledger, index)->n_bytes);
        trim_publish_block(session_share_of(s, ledger_block_at(b->ledger, index)->quota),
                           ledger_block_at(b->ledger, index)->offset,
                           ledger_block_at(b->ledger, index)->n_bytes);
        session_done(s, r->id);
        if (!TAILQ_EMPTY(&name->waits)) {
                LIST_ADD(&b->shared.due, name, of_due);
                broker_wake(b);
        }
        return 0;
}

/* ---- attach -------------------------------------------------------------- */

/* Why the block cannot be attached read-only; NULL: it can. */
static const char *read_only_fault(const struct session *s, const struct session_share *share,
                                   uint32_t shared)
{
        struct ledger *l = s->broker->ledger;
        const struct ledger_block *block = ledger_block_at(l, ledger_shared_at(l, shared)->block);
        const struct arena *arena = share->quota->arena;
        uint32_t ref = refs_find(&s->shared.refs, shared);
        size_t last, slot = arena_slots(arena, block->offset, block->n_bytes, &last);

        if (share->quota->partition->share != DEVICE_SHARE_FD)
                return "its partition has 'share: cuda-ipc', and the driver maps such memory with write access "
                       "only";
        if (ref != LEDGER_NONE)
                return ledger_ref_at(l, ref)->is_read_only ? NULL : "this session has it with write access";
        for (; !ledger_block_is_parked(block) && slot <= last && slot < share->n_seen; slot++)
                if ((share->seen[slot] & ~SEEN_UNMAPPED) ==
                    ledger_extent_at(l, arena_slot_extent(arena, slot))->id)
                        return "this session has write access to the same memory: attach it on another "
                               "connection";
        return NULL;
}

/* Why the session may not attach the block with write access; NULL: it may. What else the session has read-only is
 * seen at the delivery. */
static const char *write_fault(const struct session *s, uint32_t shared)
{
        uint32_t ref = refs_find(&s->shared.refs, shared);

        return ref != LEDGER_NONE && ledger_ref_at(s->broker->ledger, ref)->is_read_only
                       ? "this session has it read-only"
                       : NULL;
}

/* One reference more. On failure the request was refused. */
static int attach_count_up(struct session *s, uint64_t id, uint32_t shared, bool is_read_only,
                           uint32_t *ret_ref)
{
        struct ledger *l = s->broker->ledger;
        int r;
        uint32_t ref = refs_find(&s->shared.refs, shared);

        if (ref == LEDGER_NONE) {
                if (refuse_excess_ref(s, id))
                        return -EDQUOT;
                r = ref_begin(s, shared, &ref);
                if (r == 0)
                        keep_end(s->broker, name_find(s, ledger_shared_at(l, shared)->name));
                if (r == 0 && is_read_only) {
                        ledger_ref_set_read_only(l, ref);
                        s->shared.n_read_only++;
                }
                if (r < 0) {
                        session_refuse(s, id, -ENOMEM,
                                       r == -ENOMEM ? "the daemon is out of memory"
                                                    : "the daemon's table of references to shared "
                                                      "blocks is full");
                        return -ENOMEM;
                }
        } else if (ledger_ref_at(l, ref)->count == UINT32_MAX) {
                session_refuse(s, id, -EDQUOT, "this session has attached that block 2^32 - 1 times");
                return -EDQUOT;
        } else {
                ledger_ref_at(l, ref)->count++;
        }
        ledger_ref_at(l, ref)->links.n_in_delivery++;
        *ret_ref = ref;
        return 0;
}

/* The block is in a quota that the session does not have. */
static void refuse_foreign(struct session *s, uint64_t id, const struct quota *q)
{
        size_t share;

        if (s->lease_socket != 0 && session_find_share(s, q->partition->name, &share) < 0)
                session_refuse_format(
                        s, id, -ENOENT,
                        "the shared block is in partition '%s', where the socket of this session has "
                        "no lease",
                        q->partition->name);
        else if (session_find_share(s, q->partition->name, &share) < 0)
                session_refuse(s, id, -ENOENT,
                               "the shared block is in a partition in which the tenant had no quota "
                               "when this session started: connect again");
        else
                session_refuse_format(
                        s, id, -EXDEV,
                        "the shared block is in %s%s%s, and this session is not: sessions share "
                        "blocks only within a lease",
                        q->lease ? "lease '" : "no lease", q->lease ? q->lease : "", q->lease ? "'" : "");
}

/* It is in delivery. */
static void attach_deliver(struct session *s, uint64_t id, struct session_share *share, uint32_t ref,
                           const struct shared_wait *w)
{
        struct ledger *l = s->broker->ledger;
        const struct ledger_shared *shared = ledger_shared_at(l, ledger_ref_at(l, ref)->shared);
        const struct ledger_ref *r = ledger_ref_at(l, ref);
        /* No request for it was answered: the client does not have its place. */
        bool is_new = r->links.n_in_delivery == r->count;
        uint64_t now_ms = clock_ms();

        if ((r->parks_to == 0 || is_new) && ledger_block_is_parked(ledger_block_at(l, shared->block))) {
                park_shared_attach(s, id, shared->block, ref,
                                   w->until_ms > now_ms ? (uint32_t)(w->until_ms - now_ms) : 0);
                return;
        }
        if (r->parks_to == 0)
                park_shared_use(name_find(s, shared->name));
        if (session_deliver_ref(s, id, share, shared->block, ref) < 0) {
                shared_undelivered(s, ref);
                session_refuse(s, id, -ENOMEM, "the daemon is out of memory");
        }
}

/* Answers an attach of a published name. */
static void attach_give(struct session *s, uint64_t id, uint32_t shared, const struct shared_wait *w)
{
        struct ledger *l = s->broker->ledger;
        uint32_t index = ledger_shared_at(l, shared)->block, ref;
        struct session_share *share = session_share_of(s, ledger_block_at(l, index)->quota);
        const char *fault;
        const struct partition *p;

        if (!share) {
                refuse_foreign(s, id, s->broker->quotas[ledger_block_at(l, index)->quota]);
                return;
        }
        p = share->quota->partition;
        if (p->is_lost || !w->sees[share - s->shares]) {
                session_refuse_format(s, id, -ENODEV, "'%s' is in partition '%s', on device '%s', which %s",
                                      ledger_shared_at(l, shared)->name, p->name, p->device_id,
                                      p->is_lost ? "is lost" : "this process does not see");
                return;
        }
        fault = w->is_read_only ? read_only_fault(s, share, shared) : write_fault(s, shared);
        if (fault) {
                session_refuse_format(s, id, p->share == DEVICE_SHARE_FD ? -EBUSY : -ENOTSUP,
                                      "'%s' cannot be attached%s: %s", ledger_shared_at(l, shared)->name,
                                      w->is_read_only ? " read-only" : "", fault);
                return;
        }
        if (session_join(s, share, id) < 0 || attach_count_up(s, id, shared, w->is_read_only, &ref) < 0)
                return;
        attach_deliver(s, id, share, ref, w);
}

/* The partitions that the client says it can map; all if it names none. */
static void attach_read_sees(const struct session *s, const Bfcd__Attach *a, bool *ret)
{
        for (size_t i = 0; i < s->n_shares; i++)
                ret[i] = a->n_partitions == 0;
        for (size_t i = 0; i < a->n_partitions; i++)
                if (a->partitions[i] < s->n_shares)
                        ret[a->partitions[i]] = true;
}

static void wait_remove(struct shared_wait *w)
{
        struct session *s = w->session;

        TAILQ_REMOVE(&w->name->waits, w, of_name);
        TAILQ_REMOVE(&s->shared.waits, w, of_session);
        s->requests.n--;
        s->broker->shared.n_waits--;
}

static void wait_add(struct session *s, struct shared_wait *w, struct shared_name *name)
{
        w->session = s;
        w->name = name;
        TAILQ_INSERT_TAIL(&name->waits, w, of_name);
        TAILQ_INSERT_TAIL(&s->shared.waits, w, of_session);
        s->requests.n++;
        s->broker->shared.n_waits++;
        broker_wake(s->broker); /* its deadline has to be watched */
}

static bool refuse_wait(struct session *s, uint64_t id, const Bfcd__Attach *a)
{
        const struct shared_wait *w;
        unsigned n = 0;

        TAILQ_FOREACH(w, &s->shared.waits, of_session)
        n++;
        if (a->wait_ms > 0 && n < SHARED_MAX_WAITS)
                return false;
        if (a->wait_ms > 0)
                session_refuse_format(s, id, -EDQUOT, "this session has %u waiting attaches, the maximum",
                                      SHARED_MAX_WAITS);
        else
                session_refuse_format(s, id, -ENOENT, "tenant '%s' has no block shared as '%s'",
                                      s->tenant->name, a->name);
        return true;
}

int shared_attach(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        const Bfcd__Attach *a = r->attach;
        struct shared_name *name;
        struct shared_wait *w;

        (void)ret_why;
        if (s->role != ROLE_CLIENT) {
                session_refuse(s, r->id, -EACCES, "the admin socket serves no blocks: use the client socket");
                return 0;
        }
        if (shared_refuse_name(s, r->id, a->name) || session_refuse_delivery(s, r->id))
                return 0;
        name = name_find(s, a->name);
        if (!(name && name->shared != LEDGER_NONE) && refuse_wait(s, r->id, a))
                return 0;
        w = calloc(1, sizeof(*w) + s->n_shares * sizeof(w->sees[0]));
        name = w ? name_get(s, a->name) : NULL;
        if (!name) {
                free(w);
                session_refuse(s, r->id, -ENOMEM, "the daemon is out of memory");
                return 0;
        }
        w->request_id = r->id;
        w->until_ms = clock_ms() + (a->wait_ms < SHARED_MAX_WAIT_MS ? a->wait_ms : SHARED_MAX_WAIT_MS);
        w->is_read_only = a->read_only;
        attach_read_sees(s, a, w->sees);
        if (name->shared == LEDGER_NONE) {
                wait_add(s, w, name);
                return 0;
        }
        attach_give(s, r->id, name->shared, w);
        free(w);
        return 0;
}

/* ---- waits --------------------------------------------------------------- */

void shared_drop_waits(struct session *s)
{
        struct shared_wait *w;

        while ((w = TAILQ_FIRST(&s->shared.waits))) {
                wait_remove(w);
                shared_name_drop(s->broker, w->name);
                free(w);
        }
}

bool shared_withdraw_attach(struct session *s, uint64_t request_id)
{
        struct shared_wait *w;

        TAILQ_FOREACH(w, &s->shared.waits, of_session)
        {
                if (w->request_id != request_id)
                        continue;
                wait_remove(w);
                shared_name_drop(s->broker, w->name);
                free(w);
                return true;
        }
        return false;
}

/* Serves waits for a name, as far as the budget allows. */
static void name_serve(struct broker *b, struct shared_name *name, unsigned *budget)
{
        struct shared_wait *w;

        name->is_busy = true; /* a failed delivery may release the last reference */
        while (name->shared != LEDGER_NONE && *budget > 0 && (w = TAILQ_FIRST(&name->waits))) {
                struct session *s = w->session;

                (*budget)--;
                wait_remove(w);
                attach_give(s, w->request_id, name->shared, w);
                free(w);
                s->ops->ready(s->userdata);
        }
        name->is_busy = false;
        shared_name_drop(b, name);
}

/* Refuses waits whose time is up. Returns how many waits it looked at. */
static unsigned waits_expire(struct session *s, uint64_t now_ms, unsigned *budget)
{
        struct shared_wait *w, *next;
        unsigned n = 0;

        for (w = TAILQ_FIRST(&s->shared.waits); w; w = next, n++) {
                struct shared_name *name = w->name;

                next = TAILQ_NEXT(w, of_session);
                if (w->until_ms > now_ms || LIST_HAS(name, of_due) || *budget == 0)
                        continue;
                (*budget)--;
                wait_remove(w);
                session_refuse_format(s, w->request_id, -ETIMEDOUT,
                                      "timeout: no process of tenant '%s' shared a block as '%s'",
                                      s->tenant->name, name->name);
                free(w);
                shared_name_drop(s->broker, name);
                s->ops->ready(s->userdata);
        }
        return n;
}

/* Continues what a tick began, for one turn. */
static void expire_some(struct broker *b, unsigned *budget)
{
        for (unsigned i = 0; *budget > 0 && i < EXPIRE_LOOKS && b->shared.n_slots > 0; i++) {
                size_t slot = --b->shared.n_slots;
                struct session *s = slot < b->sessions.n_slots ? b->sessions.table[slot] : NULL;

                if (!s)
                        continue;
                i += waits_expire(s, b->shared.now_ms, budget);
                if (*budget == 0)
                        b->shared.n_slots++; /* it may have more waits to refuse */
        }
        if (b->shared.n_waits == 0)
                b->shared.n_slots = 0;
}

void shared_tick(struct broker *b, uint64_t now_ms)
{
        unsigned budget = SHARED_SLICE;

        if (b->shared.n_waits == 0)
                return;
        if (b->shared.n_slots == 0) { /* that was the last session */
                b->shared.n_slots = b->sessions.n_slots;
                b->shared.now_ms = now_ms;
        }
        expire_some(b, &budget);
}

void shared_turn(struct broker *b)
{
        struct shared_name *name;
        unsigned budget = SHARED_SLICE;

        while (budget > 0 && (name = TAILQ_FIRST(&b->shared.due)))
                name_serve(b, name, &budget);
        expire_some(b, &budget);
        keep_expire(b, 0, &budget);
}

/* A kept block whose time is 0 is to be freed at once. */
bool shared_is_due(const struct broker *b)
{
        return !TAILQ_EMPTY(&b->shared.due) || b->shared.n_slots > 0 || shared_frees_kept_now(b);
}

/* ---- inherited names ------------------------------------------------------ */

static int restore_name(struct broker *b, uint32_t index, struct tenant *const *tenants)
{
        const struct ledger_shared *shared = ledger_shared_at(b->ledger, index);
        uint32_t quota = ledger_block_at(b->ledger, shared->block)->quota;
        struct shared_name *name;

        ledger_note_quota(b->ledger, quota);
        name = name_new(b, tenants[quota]->name, shared->name);
        if (!name)
                return -ENOMEM;
        name->shared = index;
        name->owner = tenants[quota];
        if (keep_make_room(b) < 0)
                return -ENOMEM;
        keep_add(b, name);
        if (shared->links.n_refs == 0)
                keep_restore(b, name);
        return 0;
}

int shared_restore(struct broker *b)
{
        struct tenant **tenants = calloc((size_t)ledger_quota_end(b->ledger) + 1, sizeof(struct tenant *));
        int r = tenants ? 0 : -ENOMEM;

        for (size_t i = 0; r == 0 && i < b->n_tenants; i++)
                for (size_t k = 0; k < b->tenants[i].n_quotas; k++)
                        tenants[b->tenants[i].quotas[k]->index] = &b->tenants[i];
        for (uint32_t i = 0; r == 0 && i < ledger_shared_end(b->ledger); i++)
                if (ledger_shared_get(b->ledger, i))
                        r = restore_name(b, i, tenants);
        free(tenants);
        return r;
}

static void name_forget(void *node)
{
        park_shared_forget(node);
        free(node);
}

void shared_forget(struct broker *b)
{
        assert(b->shared.n_waits == 0 && TAILQ_EMPTY(&b->shared.due));
        tdestroy(b->shared.tree, name_forget);
        b->shared.tree = NULL;
        free(b->shared.idle);
        b->shared.idle = NULL;
        b->shared.n_idle = b->shared.n_idle_room = b->shared.n_kept = 0;
}

/* ---- forget, metadata ------------------------------------------------------------ */

/* The tenant that the request is about; "" was refused. */
static const char *forget_tenant(struct session *s, uint64_t id, const Bfcd__Forget *f)
{
        if (s->role == ROLE_CLIENT && f->tenant[0] != '\0') {
                session_refuse(s, id, -EACCES,
                               "only operators may name a tenant: a session forgets blocks of its own "
                               "tenant");
                return "";
        }
        if (s->role != ROLE_CLIENT && (f->tenant[0] == '\0' || strlen(f->tenant) >= LEDGER_NAME_BYTES)) {
                session_refuse(s, id, -EINVAL, "the request names no tenant");
                return "";
        }
        return s->role != ROLE_CLIENT ? f->tenant : s->tenant->name;
}

int shared_handle_forget(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        const Bfcd__Forget *f = r->forget;
        struct broker *b = s->broker;
        const char *tenant;
        struct shared_name *name;

        (void)ret_why;
        if (shared_refuse_name(s, r->id, f->name))
                return 0;
        tenant = forget_tenant(s, r->id, f);
        if (tenant[0] == '\0')
                return 0;
        name = shared_name_find(b, tenant, f->name);
        if (!name || name->shared == LEDGER_NONE) {
                session_refuse_format(s, r->id, -ENOENT, "tenant '%s' has no block shared as '%s'", tenant,
                                      f->name);
                return 0;
        }
        if (record_of(b, name)->keep_ms > 0)
                log_limited(&name->owner->kept_log, LOG_LEVEL_INFO,
                            "%s: block '%s' of tenant '%s' is no longer kept", SESSION_LABEL(s), f->name,
                            tenant);
        ledger_shared_keep(b->ledger, name->shared, 0);
        if (name->idle_at > 0)
                end_idle(b, name);
        session_done(s, r->id);
        return 0;
}

int shared_handle_metadata(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        struct ledger *l = s->broker->ledger;
        uint32_t index = ledger_block_find(l, r->metadata->block_id);
        uint32_t shared = index == LEDGER_NONE || ledger_block_at(l, index)->parked == LEDGER_IS_COPY
                                  ? LEDGER_NONE
                                  : ledger_block_at(l, index)->shared;
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        Bfcd__MetadataReply body = BFCD__METADATA_REPLY__INIT;

        (void)ret_why;
        if (s->role != ROLE_CLIENT || shared == LEDGER_NONE ||
            refs_find(&s->shared.refs, shared) == LEDGER_NONE) {
                session_refuse_format(s, r->id, -EINVAL,
                                      "block %" PRIu64 " is not a shared block of this session",
                                      r->metadata->block_id);
                return 0;
        }
        if (ledger_shared_at(l, shared)->metadata != LEDGER_NONE) {
                struct ledger_metadata *m = ledger_metadata_at(l, ledger_shared_at(l, shared)->metadata);

                body.metadata = (ProtobufCBinaryData){ m->n_bytes, m->bytes };
        }
        reply.id = r->id;
        reply.body_case = BFCD__REPLY__BODY_METADATA;
        reply.metadata = &body;
        session_send(s, &reply);
        return 0;
}
/* ---- the check ------------------------------------------------------------- */

struct check {
        const struct broker *broker;
        const char *why;
        size_t n_shared, n_waits, n_due, n_kept, n_idle;
};

static const char *check_shared(struct ledger *l, const struct shared_name *name)
{
        const struct ledger_shared *shared = ledger_shared_get(l, name->shared);
        const struct ledger_block *block;

        if (!shared || strcmp(shared->name, name->name) != 0)
                return "a name does not match its shared block";
        block = ledger_block_at(l, shared->block);
        if (strcmp(ledger_quota_at(l, block->quota)->tenant, name->tenant) != 0)
                return "a shared block and its name belong to different tenants";
        for (uint32_t i = shared->links.first_ref; i != LEDGER_NONE;) {
                const struct ledger_ref *h = ledger_ref_at(l, i);

                if (strcmp(ledger_session_at(l, h->session)->tenant, name->tenant) != 0)
                        return "a session has a shared block of another tenant";
                for (uint32_t k = h->links.next_of_shared; k != LEDGER_NONE;
                     k = ledger_ref_at(l, k)->links.next_of_shared)
                        if (ledger_ref_at(l, k)->session == h->session)
                                return "a session has two references to one shared block";
                i = h->links.next_of_shared;
        }
        return NULL;
}

/* The heap has a block exactly while it has no references, and keeps it only where that is allowed. */
static const char *check_kept(const struct broker *b, const struct shared_name *name)
{
        const struct ledger_shared *shared = ledger_shared_at(b->ledger, name->shared);

        if (!name->owner || strcmp(name->owner->name, name->tenant) != 0)
                return "a published name has another owner than its tenant";
        if ((name->idle_at > 0) != (shared->links.n_refs == 0))
                return "a kept block with references is in the heap, or one without is not";
        if (name->idle_at > 0 && b->shared.idle[name->idle_at - 1] != name)
                return "a kept block is not at its place in the heap";
        if (name->idle_at > 0 && shared->until_ms != 0 && !b->shared.must_review && !keep_allows(b, name))
                return "a block is kept where none may be";
        if ((shared->keep_ms > 0 || shared->metadata != LEDGER_NONE) && !name->is_counted)
                return "a kept block is not counted";
        return NULL;
}

static const char *check_heap(const struct broker *b)
{
        for (size_t i = 1; i < b->shared.n_idle; i++)
                if (ledger_shared_at(b->ledger, b->shared.idle[i]->shared)->until_ms <
                    ledger_shared_at(b->ledger, b->shared.idle[(i - 1) / 2]->shared)->until_ms)
                        return "the heap of kept blocks is not in order";
        return NULL;
}

/* The tenants' counts and the broker's. */
static const char *check_counts(const struct broker *b, size_t n_kept, size_t n_idle)
{
        size_t n = 0;

        for (size_t i = 0; i < b->n_tenants; i++)
                n += b->tenants[i].n_kept;
        if (n != n_kept || n_kept != b->shared.n_kept || n_idle != b->shared.n_idle)
                return "a count of kept blocks is wrong";
        if (b->shared.n_idle > b->shared.n_idle_room || (n_kept > 0 && n_kept > b->shared.n_idle_room))
                return "the heap has no room for all kept blocks";
        return check_heap(b);
}

static void check_name(const void *node, VISIT visit, void *userdata)
{
        const struct shared_name *name = *(struct shared_name *const *)node;
        struct check *c = userdata;
        const struct shared_wait *w;

        if ((visit != postorder && visit != leaf) || c->why)
                return;
        if (name->shared == LEDGER_NONE && TAILQ_EMPTY(&name->waits))
                c->why = "a name has neither a shared block nor a waiting attach";
        if (LIST_HAS(name, of_due) != (name->shared != LEDGER_NONE && !TAILQ_EMPTY(&name->waits)))
                c->why = "a name's due state does not match its requests";
        TAILQ_FOREACH(w, &name->waits, of_name)
        {
                if (w->name != name || !session_is_live(w->session))
                        c->why = "a session waits that cannot wait";
                c->n_waits++;
        }
        c->n_due += LIST_HAS(name, of_due);
        c->n_shared += name->shared != LEDGER_NONE;
        c->n_kept += name->is_counted;
        c->n_idle += name->idle_at > 0;
        if (!c->why && name->shared != LEDGER_NONE)
                c->why = check_shared(c->broker->ledger, name);
        if (!c->why && name->shared != LEDGER_NONE)
                c->why = check_kept(c->broker, name);
}

/* The ledger's list of a session's references and the session's own agree. */
static const char *check_refs(const struct session *s)
{
        struct ledger *l = s->broker->ledger;
        uint32_t i = s->index == LEDGER_NONE ? LEDGER_NONE : ledger_session_at(l, s->index)->links.first_ref;
        size_t n = 0, n_read_only = 0;

        for (; i != LEDGER_NONE; i = ledger_ref_at(l, i)->links.next_of_session, n++) {
                if (refs_find(&s->shared.refs, ledger_ref_at(l, i)->shared) != i)
                        return "a session's reference is not in its index";
                n_read_only += ledger_ref_at(l, i)->is_read_only != 0;
        }
        if (n_read_only != s->shared.n_read_only)
                return "a session's count of read-only references is wrong";
        return n == s->shared.refs.n ? NULL
                                     : "a session's index has a reference that the session does not have";
}

static const char *check_session(const struct session *s, size_t *n_waits)
{
        const struct shared_wait *w;
        const char *why = check_refs(s);
        size_t n = 0;

        TAILQ_FOREACH(w, &s->shared.waits, of_session)
        n++;
        *n_waits += n;
        if (!why && (n > SHARED_MAX_WAITS || n > s->requests.n))
                why = "a session has too many waits";
        return why;
}

int shared_check(const struct broker *b, const char **ret_why)
{
        struct check c = { .broker = b };
        const struct shared_name *name;
        struct ledger_counts counts;
        size_t n_of_sessions = 0;

        twalk_r(b->shared.tree, check_name, &c);
        TAILQ_FOREACH(name, &b->shared.due, of_due)
        c.n_due--;
        ledger_count(b->ledger, &counts);
        if (!c.why && c.n_shared != counts.n_shared)
                c.why = "the number of names does not match the number of shared blocks";
        if (!c.why)
                c.why = check_counts(b, c.n_kept, c.n_idle);
        if (!c.why && c.n_due != 0)
                c.why = "not all names that are due are in the list";
        for (size_t i = 0; !c.why && i < b->sessions.n_slots; i++) {
                if (b->sessions.table[i])
                        c.why = check_session(b->sessions.table[i], &n_of_sessions);
        }
        if (!c.why && (c.n_waits != b->shared.n_waits || n_of_sessions != c.n_waits))
                c.why = "the total count of waits is wrong";
        if (!c.why)
                return 0;
        *ret_why = c.why;
        return -EBADMSG;
}
