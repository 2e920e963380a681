/* Resume; see resume.h.
 *
 * What a client has listed is marked in the ledger, so that it is found and marked in constant time. A block
 * is marked by the number of the session's resumption (links.in_delivery). A reference is marked by how much
 * of its count was not listed (links.n_in_delivery). Extents are in a list of the resumption, by id.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/resume.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>

#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/session/direct.h"
#include "daemon/session/session.h"
#include "daemon/session/park.h"
#include "daemon/session/recall.h"
#include "daemon/session/retire.h"
#include "daemon/session/session_states.h"
#include "daemon/session/share.h"
#include "daemon/session/shared.h"
#include "daemon/session/trim.h"
#include "daemon/session/welcome.h"

#define MAX_RESUMPTIONS 16u /* of one session: each may leave unread fds in flight */
#define LOOKS_A_FREE    8u  /* to free a block costs as much as to look at so many */

struct resumption_extent {
        uint64_t id;
        uint32_t index; /* in the ledger */
        uint32_t export;
        bool is_named;
};

enum stage { STAGE_CHECK, STAGE_BLOCKS, STAGE_REFS, STAGE_EXPORTS, STAGE_DONE };

struct resumption {
        uint32_t number; /* counts resumptions of the session; marks its blocks */
        enum stage stage;
        uint32_t block;      /* the next one to look at */
        size_t i;            /* the next reference, or extent */
        uint64_t request_id; /* of the last Held */
        size_t n_freed;
        size_t n_extents;
        struct resumption_extent extents[]; /* by id; some may be released by now */
};

/* ---- hello --------------------------------------------------------------- */

static struct session *find_suspended(const struct broker *b, uint64_t id)
{
        struct kept_record key = { .id = id };
        const struct kept_record *found = b->suspended.n_slots > 0
                                                  ? bsearch(&key, b->suspended.records, b->suspended.n_slots,
                                                            sizeof(key), kept_record_compare)
                                                  : NULL;
        struct session *s = found ? b->sessions.table[found->index] : NULL;

        return s && s->id == id && !session_is_closing(s) ? s : NULL;
}

/* In constant time, so that a client cannot guess the secret byte by byte. */
static bool is_secret(const struct session *s, const ProtobufCBinaryData *secret)
{
        const struct ledger_session *record = ledger_session_at(s->broker->ledger, s->index);
        volatile uint8_t differs = 0;

        if (secret->len != sizeof(record->secret))
                return false;
        for (size_t i = 0; i < sizeof(record->secret); i++)
                differs = (uint8_t)(differs | (record->secret[i] ^ secret->data[i]));
        return differs == 0;
}

/* Why the process may not resume the session; NULL: it may. *ret_kind: the index in broker.return_logs. */
static const char *find_impostor(const struct session *kept, const struct credentials *who,
                                 const ProtobufCBinaryData *secret, size_t *ret_kind)
{
        const struct credentials *was = &kept->who;

        *ret_kind = 0;
        if (who->uid != was->uid)
                return "it belongs to another user";
        *ret_kind = 1;
        if (who->pid != was->pid || was->pid <= 0)
                return "it belongs to another process";
        *ret_kind = 2;
        if (who->start_time != was->start_time || was->start_time == 0)
                return "it belongs to an earlier process with the same pid";
        *ret_kind = 3;
        return is_secret(kept, secret) ? NULL : "wrong secret";
}

static void refuse_return(struct session *s, const Bfcd__Request *r, int error, size_t kind, const char *why,
                          const char *sentence)
{
        log_limited(log_limit_of_user(&s->broker->logs.returns[kind], s->who.uid), LOG_LEVEL_NOTICE,
                    "session %" PRIu64 ": resume by uid %u, pid %d refused: %s", r->hello->session_id,
                    (unsigned)s->who.uid, (int)s->who.pid, why);
        session_refuse(s, r->id, error, sentence);
}

/* Of this user, and left aside by this daemon or an earlier one. */
static bool is_aside(const struct broker *b, uint64_t id, uid_t uid)
{
        for (uint32_t i = 0; b->restored.n_aside > 0 && i < ledger_session_end(b->ledger); i++) {
                const struct ledger_session *s = ledger_session_get(b->ledger, i);

                if (s && s->id == id && s->uid == uid && s->can_resume == LEDGER_ASIDE)
                        return true;
        }
        return false;
}

static const char lost_memory[] =
        "memory of this session was lost: its arena was closed when the daemon restarted; "
        "see the daemon's log for the cause";

/* Its record says that it can be resumed, but restore.c did not allow it. All that ends this later is in the record. */
static bool has_lost_memory(const struct session *s)
{
        return s->state == SESSION_QUARANTINED &&
               ledger_session_at(s->broker->ledger, s->index)->can_resume == LEDGER_CAN_RESUME;
}

/* NULL: the hello was refused. */
static struct session *find_own(struct session *s, const Bfcd__Request *r)
{
        struct session *kept = find_suspended(s->broker, r->hello->session_id);
        const char *why;
        size_t kind;

        /* There is no such session, so there is nothing to hide: the user learns why. */
        if (!kept && is_aside(s->broker, r->hello->session_id, s->who.uid)) {
                refuse_return(
                        s, r, -EIO, 4, "it was left aside",
                        "the daemon failed while it restored this session, and left it aside: restart the "
                        "program; see the daemon's log");
                return NULL;
        }
        if (!kept) {
                refuse_return(s, r, -ESTALE, 4, "the daemon has no suspended session with this number",
                              "the daemon has no suspended session with this number: it ended, or the "
                              "daemon restarted without it");
                return NULL;
        }

        /* Another process learns nothing of the session's state. */
        why = find_impostor(kept, &s->who, &r->hello->secret, &kind);
        if (why) {
                refuse_return(s, r, -EACCES, kind, why, "this session belongs to another process");
                return NULL;
        }

        /* This is the session's own process: it learns why it cannot resume, and whether to try again
         * (-EAGAIN). */
        if (kept->eviction) {
                refuse_return(s, r, -EIDRM, 4, "evicted by an operator", kept->eviction);
                return NULL;
        }
        if (has_lost_memory(kept)) {
                refuse_return(s, r, -EIO, 4, lost_memory, lost_memory);
                return NULL;
        }
        if ((!session_is_suspended(kept) && !kept->resume.current) ||
            kept->resume.n_begun >= MAX_RESUMPTIONS) {
                refuse_return(s, r, -ESTALE, 4, "it disconnected before, or it does not support resume",
                              "this session cannot be resumed");
                return NULL;
        }
        if (!session_is_suspended(kept)) {
                session_refuse(s, r->id, -EAGAIN, "this session is being resumed on another connection");
                return NULL;
        }
        return kept;
}

static int compare_extents(const void *x, const void *y)
{
        const struct resumption_extent *p = x, *q = y;

        return p->id < q->id ? -1 : p->id > q->id;
}

/* NULL: out of memory. */
static struct resumption *resumption_new(const struct session *s)
{
        struct ledger *l = s->broker->ledger;
        const struct ledger_session *record = ledger_session_at(l, s->index);
        struct resumption *h =
                calloc(1, sizeof(*h) + ((size_t)record->links.n_exports + 1) * sizeof(h->extents[0]));
        uint32_t x = record->links.first_export;

        if (!h)
                return NULL;

        /* The list has all extents that the session was given. Each reference is marked as not listed at all. */
        for (; x != LEDGER_NONE; x = ledger_export_at(l, x)->links.next_of_session) {
                uint32_t extent = ledger_export_at(l, x)->extent;

                h->extents[h->n_extents++] =
                        (struct resumption_extent){ ledger_extent_at(l, extent)->id, extent, x, false };
        }
        qsort(h->extents, h->n_extents, sizeof(h->extents[0]), compare_extents);
        for (size_t i = 0; i < s->shared.refs.n; i++) {
                struct ledger_ref *ref = ledger_ref_at(l, s->shared.refs.list[i].ref);

                ref->links.n_in_delivery = ref->count;
        }
        return h;
}

int resume_hello(struct session *s, const Bfcd__Request *r)
{
        struct session *kept = find_own(s, r);
        struct resumption *h;
        size_t share;
        int fd = -1;

        if (!kept)
                return 0;
        if (session_find_share(kept, r->hello->partition, &share) < 0 || kept->shares[share].is_barred) {
                session_refuse(s, r->id, -ENOENT, "this session has no such partition");
                return 0;
        }

        /* Everything that can fail comes before the connection becomes the session's. */
        h = resumption_new(kept);
        if (!h || session_rejoin(kept, &kept->shares[share]) < 0 || welcome_open_events(s, r, &fd) < 0) {
                free(h);
                session_refuse(s, r->id, -ENOMEM,
                               "the daemon is out of memory or file descriptors: try again");
                return 0;
        }
        s->ops->resume_kept(s->userdata, kept);
        h->number = ++kept->resume.n_begun;
        direct_begin_list(kept);
        kept->resume.current = h;
        session_transit(kept, EVENT_RESUMED, NULL);
        welcome_send(kept, r, share, fd);
        log_debug("session %" PRIu64 " is being resumed", kept->id);
        return 0;
}

void resume_stop(struct session *s)
{
        free(s->resume.current);
        s->resume.current = NULL;
}

/* ---- the list ------------------------------------------------------------ */

static struct resumption_extent *find_extent(struct resumption *h, uint64_t id)
{
        struct resumption_extent key = { .id = id };

        return bsearch(&key, h->extents, h->n_extents, sizeof(key), compare_extents);
}

static bool extent_is_there(const struct broker *b, uint64_t id, uint32_t index)
{
        const struct ledger_extent *e = ledger_extent_get(b->ledger, index);

        return e && e->id == id;
}

static const char *name_extent(struct session *s, uint64_t id)
{
        struct resumption_extent *e = find_extent(s->resume.current, id);
        const struct broker *b = s->broker;
        struct kept_record key = { .id = id }, *found;

        if (e && e->is_named)
                return "the resumed client listed an extent twice";
        if (e) {
                e->is_named = true;
                return NULL;
        }

        /* It is not exported to the session. It may have been, and be released by now: that is no fault. */
        if (id == 0 || id >= b->restored.extents_end)
                return "the resumed client listed an extent that never existed";
        found = bsearch(&key, b->restored.extents, b->restored.n_extents, sizeof(key), kept_record_compare);
        if (found && extent_is_there(b, id, found->index))
                return "the resumed client listed an extent of another session";
        return NULL;
}

static const char *name_shared(struct session *s, uint32_t index, uint32_t count)
{
        struct ledger *l = s->broker->ledger;
        uint32_t shared = index == LEDGER_NONE || ledger_block_at(l, index)->parked == LEDGER_IS_COPY
                                  ? LEDGER_NONE
                                  : ledger_block_at(l, index)->shared;
        uint32_t at = shared == LEDGER_NONE ? LEDGER_NONE : refs_find(&s->shared.refs, shared);
        struct ledger_ref *ref = at == LEDGER_NONE ? NULL : ledger_ref_at(l, at);

        if (!ref)
                return "the resumed client listed a shared block that it has not attached";
        if (ref->links.n_in_delivery < ref->count)
                return "the resumed client listed a shared block twice";
        if (count == 0 || count > ref->count)
                return "the resumed client listed more references to a shared block than it has";
        ref->links.n_in_delivery = ref->count - count;
        return NULL;
}

static const char *name_block(struct session *s, uint64_t id)
{
        struct ledger *l = s->broker->ledger;
        uint32_t index = ledger_block_find(l, id);
        struct ledger_block *block = index == LEDGER_NONE ? NULL : ledger_block_at(l, index);

        if (block && block->shared != LEDGER_NONE && refs_find(&s->shared.refs, block->shared) != LEDGER_NONE)
                return name_shared(s, index, 1); /* the client lost the answer to its Publish */
        if (!block || block->session != s->index || block->parked == LEDGER_IS_COPY)
                return "the resumed client listed a block that it has freed or never had";
        if (block->links.in_delivery == s->resume.current->number)
                return "the resumed client listed a block twice";
        block->links.in_delivery = s->resume.current->number;
        index = park_copy_of(l, index);
        if (index != LEDGER_NONE)
                ledger_block_at(l, index)->links.in_delivery = s->resume.current->number;
        return NULL;
}

int resume_list(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        const Bfcd__Held *held = r->held;
        struct resumption *h = s->resume.current;
        struct ledger *l = s->broker->ledger;
        const char *why = NULL;

        if (s->state != SESSION_LISTING) {
                *ret_why = "the client sent a list of its memory outside a resume";
                return -EPROTO;
        }

        /* Nothing but marks changes until the list is complete: a client that is wrong loses only its own
         * session. */
        for (size_t i = 0; !why && i < held->n_extent_ids; i++)
                why = name_extent(s, held->extent_ids[i]);
        for (size_t i = 0; !why && i < held->n_block_ids; i++)
                why = name_block(s, held->block_ids[i]);
        for (size_t i = 0; !why && i < held->n_shared; i++)
                why = name_shared(s, ledger_block_find(l, held->shared[i]->block_id), held->shared[i]->count);
        for (size_t i = 0; !why && i < held->n_charges; i++)
                why = direct_name(s, held->charges[i]);
        if (why) {
                *ret_why = why;
                return -EPROTO;
        }
        if (!held->is_last) {
                session_done(s, r->id);
                return 0;
        }

        /* A Split whose answer the client lost: the part that was split off is kept with the other one. */
        if (held->splitting) {
                uint32_t index = ledger_block_find(l, held->splitting->block_id), high = LEDGER_NONE;

                if (index != LEDGER_NONE && ledger_block_at(l, index)->session == s->index &&
                    ledger_block_at(l, index)->links.in_delivery == h->number)
                        high = ledger_block_split_off(l, index, held->splitting->n_bytes);
                if (high != LEDGER_NONE)
                        ledger_block_at(l, high)->links.in_delivery = h->number;
        }

        /* resume_step() compares the list with the ledger, in turns. */
        h->request_id = r->id;
        h->block = ledger_session_at(l, s->index)->links.first_block;
        session_transit(s, EVENT_LISTED, NULL);
        return 0;
}

/* ---- reconciliation ------------------------------------------------------- */

/* The client listed every extent of the block too. */
static bool is_in_named(const struct session *s, const struct ledger_block *block)
{
        const struct arena *arena = session_share_of(s, block->quota)->quota->arena;
        size_t slot, last;

        for (slot = arena_slots(arena, block->offset, block->n_bytes, &last); slot <= last; slot++) {
                uint32_t extent = arena_slot_extent(arena, slot);
                const struct resumption_extent *e =
                        find_extent(s->resume.current, ledger_extent_at(s->broker->ledger, extent)->id);

                if (!e || !e->is_named)
                        return false;
        }
        return true;
}

/* Parked blocks, their copies, and those whose client may not have seen yet that they are awake. */
static bool may_be_unmapped(const struct session *s, const struct ledger_block *block)
{
        return block->parked != LEDGER_AWAKE ||
               arena_is_whole(session_share_of(s, block->quota)->quota->arena, block->offset, block->n_bytes);
}

static bool block_is_named(const struct session *s, const struct ledger_block *block)
{
        return block->links.in_delivery == s->resume.current->number;
}

static int resumption_check(struct session *s, size_t *looks)
{
        struct ledger *l = s->broker->ledger;
        struct resumption *h = s->resume.current;

        /* A client has all extents of a block that it uses: a list without them is wrong. */
        for (; *looks > 0 && h->block != LEDGER_NONE; (*looks)--) {
                const struct ledger_block *block = ledger_block_at(l, h->block);

                if (block_is_named(s, block) && !may_be_unmapped(s, block) && !is_in_named(s, block))
                        return -EPROTO;
                h->block = block->links.next_of_session;
        }
        for (; *looks > 0 && h->i < s->shared.refs.n; h->i++, (*looks)--) {
                const struct ledger_ref *ref = ledger_ref_at(l, s->shared.refs.list[h->i].ref);
                const struct ledger_block *block =
                        ledger_block_at(l, ledger_shared_at(l, ref->shared)->block);

                if (ref->links.n_in_delivery < ref->count && !may_be_unmapped(s, block) &&
                    !is_in_named(s, block))
                        return -EPROTO;
        }
        if (h->block != LEDGER_NONE || h->i < s->shared.refs.n)
                return SESSION_MORE;
        h->stage = STAGE_BLOCKS;
        h->block = ledger_session_at(l, s->index)->links.first_block;
        return 0;
}

static void spend(size_t *looks, size_t n)
{
        *looks -= n < *looks ? n : *looks;
}

static void resumption_free_blocks(struct session *s, size_t *looks)
{
        struct ledger *l = s->broker->ledger;
        struct resumption *h = s->resume.current;

        while (*looks > 0 && h->block != LEDGER_NONE) {
                struct ledger_block *block = ledger_block_at(l, h->block);
                uint32_t at = h->block;

                /* The next one is found before the free, which also frees a parked block's copy: that may be
                 * the next. */
                h->block = block->links.next_of_session;
                if (h->block != LEDGER_NONE && !block_is_named(s, block) && h->block == park_copy_of(l, at))
                        h->block = ledger_block_at(l, h->block)->links.next_of_session;
                if (block_is_named(s, block)) {
                        block->links.in_delivery = 0;
                        spend(looks, 1);
                } else {
                        session_free_block(s, at);
                        h->n_freed++;
                        spend(looks, LOOKS_A_FREE);
                }
        }
        if (h->block != LEDGER_NONE)
                return;
        h->stage = STAGE_REFS;
        h->i = s->shared.refs.n;
}

/* From the last on, so that the others do not move. */
static void resumption_free_refs(struct session *s, size_t *looks)
{
        struct resumption *h = s->resume.current;

        for (; *looks > 0 && h->i > 0; h->i--) {
                uint32_t ref = s->shared.refs.list[h->i - 1].ref;

                if (shared_drop_unlisted(s, ref))
                        h->n_freed++;
                else
                        park_shared_resumed(s, ref);
                spend(looks, LOOKS_A_FREE);
        }
        if (h->i > 0)
                return;
        h->stage = STAGE_EXPORTS;
}

static void resumption_end_exports(struct session *s, size_t *looks)
{
        struct ledger *l = s->broker->ledger;
        struct resumption *h = s->resume.current;

        for (; *looks > 0 && h->i < h->n_extents; h->i++) {
                const struct resumption_extent *e = &h->extents[h->i];
                struct session_share *share;
                size_t last;

                spend(looks, 1);
                if (e->is_named || !extent_is_there(s->broker, e->id, e->index))
                        continue;

                /* The client does not have it: it is sent again with the next block there, and no Retire waits
                 * for it. */
                share = session_share_of(s, ledger_extent_at(l, e->index)->quota);
                share->seen[arena_slots(share->quota->arena, ledger_extent_at(l, e->index)->offset, 1,
                                        &last)] = 0;
                retire_clear_export(s, e->export);
        }
        if (h->i == h->n_extents)
                h->stage = STAGE_DONE;
}

static void finish(struct session *s)
{
        struct resumption *h = s->resume.current;
        uint64_t now_ms = clock_ms();

        direct_resume(s);
        s->resume.current = NULL;
        session_transit(s, EVENT_RECONCILED, NULL);
        log_limited(&s->tenant->return_log, LOG_LEVEL_INFO,
                    "session %" PRIu64 " resumed: tenant '%s', uid %u, pid %d, %s; %zu blocks freed that "
                    "the client did not list",
                    s->id, s->tenant->name, (unsigned)s->who.uid, (int)s->who.pid, s->name, h->n_freed);
        session_done(s, h->request_id);

        /* From here on the client can be asked for memory. Limits may have been lowered with the restart, when
         * it could not. */
        recall_begin_resumed(s);
        for (size_t i = 0; i < s->n_shares; i++)
                (void)trim_send(&s->shares[i].trim, quota_excess(s->shares[i].quota), now_ms);
        free(h);

        /* No session is suspended any more: a crash from here on was not caused by the restore. */
        if (s->broker->suspended.n == 0)
                broker_note_well(s->broker);
}

int resume_step(struct session *s, size_t n, const char **ret_why)
{
        struct resumption *h = s->resume.current;
        size_t looks = n * LOOKS_A_FREE;

        assert(s->state == SESSION_RESUMING);
        if (h->stage == STAGE_CHECK && resumption_check(s, &looks) < 0) {
                *ret_why = "the resumed client listed a block without an extent of this block";
                return -EPROTO;
        }
        if (h->stage == STAGE_BLOCKS)
                resumption_free_blocks(s, &looks);
        if (h->stage == STAGE_REFS)
                resumption_free_refs(s, &looks);
        if (h->stage == STAGE_EXPORTS)
                resumption_end_exports(s, &looks);
        if (h->stage != STAGE_DONE)
                return SESSION_MORE;
        finish(s);
        return 0;
}
