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
#include <string.h>

#include "daemon/base/clock.h"
#include "daemon/base/crash.h"
#include "daemon/base/log.h"
#include "daemon/base/number.h"
#include "daemon/memory/inherit.h"
#include "daemon/session/request_memory.h"
#include "daemon/session/park.h"
#include "daemon/session/recall.h"
#include "daemon/session/session.h"
#include "daemon/session/session_states.h"
#include "daemon/session/share.h"
#include "daemon/session/hello.h"
#include "daemon/session/shared.h"
#include "daemon/session/trim.h"

/* ==== a client resumes its session =========================================== */

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

/* Its record says that it can be resumed, but resume.c did not allow it. All that ends this later is in the record. */
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

        if (kept->lease_socket != s->lease_socket) {
                refuse_return(s, r, -EACCES, 4, "it came by another socket",
                              "this session began on another socket: resume it there");
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

/* ==== the sessions of the previous daemon ==================================== */

/* ---- a session's memory --------------------------------------------------- */

/* The share of a record's quota. NULL: *ret says why; no daemon writes a record without one. */
static struct session_share *share_for(struct session *s, uint32_t quota, int *ret)
{
        struct session_share *share = session_share_of(s, quota);

        *ret = share ? session_rejoin(s, share) : -EBADMSG;
        return *ret < 0 ? NULL : share;
}

static bool session_is_aside(const struct broker *b, uint32_t session)
{
        return ledger_session_at(b->ledger, session)->can_resume == LEDGER_ASIDE;
}

/* Those of all sessions, in the order of the table: a walk along each session's list would wait for memory
 * at nearly every block. */
static int restore_blocks(struct broker *b)
{
        uint32_t end = ledger_block_end(b->ledger);
        int r = 0;

        for (uint32_t i = 0; i < end; i++) {
                const struct ledger_block *block = ledger_block_get(b->ledger, i);
                struct session_share *share;
                struct session *s;

                if (!block || block->session == LEDGER_NONE || session_is_aside(b, block->session))
                        continue;
                ledger_note_session(b->ledger, block->session);
                s = b->sessions.table[block->session];
                share = share_for(s, block->quota, &r);
                if (!share)
                        return r;
                if (ledger_block_is_parked(block))
                        continue;
                session_add_block(s, share, block->offset, block->n_bytes);
        }
        return 0;
}

static int restore_exports(struct session *s)
{
        struct ledger *l = s->broker->ledger;
        uint32_t i = ledger_session_at(l, s->index)->links.first_export;
        int r = 0;

        for (; r == 0 && i != LEDGER_NONE; i = ledger_export_at(l, i)->links.next_of_session) {
                const struct ledger_extent *e = ledger_extent_at(l, ledger_export_at(l, i)->extent);
                struct session_share *share = share_for(s, e->quota, &r);
                size_t last;

                if (share)
                        share->seen[arena_slots(share->quota->arena, e->offset, e->n_bytes, &last)] =
                                e->id | (ledger_export_at(l, i)->is_read_only ? SEEN_READ_ONLY : 0);
        }
        return r;
}

static int restore_refs(struct session *s)
{
        struct ledger *l = s->broker->ledger;
        uint32_t i = ledger_session_at(l, s->index)->links.first_ref;
        int r = 0;

        if (ledger_session_at(l, s->index)->links.n_refs > SHARED_MAX_REFS)
                return -EBADMSG;
        for (; r == 0 && i != LEDGER_NONE; i = ledger_ref_at(l, i)->links.next_of_session) {
                uint32_t shared = ledger_ref_at(l, i)->shared;

                (void)share_for(s, ledger_block_at(l, ledger_shared_at(l, shared)->block)->quota, &r);
                if (r == 0)
                        r = refs_make_room(&s->shared.refs);
                if (r < 0)
                        break;
                refs_add(&s->shared.refs, shared, i);
                s->shared.n_read_only += ledger_ref_at(l, i)->is_read_only != 0;
        }
        return r;
}

/* ---- a session ------------------------------------------------------------ */

static bool is_leased(const struct ledger_session *record, uint64_t quota_id)
{
        for (size_t i = 0; i < LEDGER_SESSION_LEASES; i++)
                if (record->leases[i] == quota_id)
                        return true;
        return false;
}

static bool has_lost_a_lease(const struct broker *b, const struct ledger_session *record)
{
        const struct inherited *r = b->inherited;
        size_t n = 0;

        for (size_t i = inherited_first_of(r, record->tenant);
             i < r->n_quotas && strcmp(r->quotas[i].tenant, record->tenant) == 0; i++)
                n += r->quotas[i].quota && r->quotas[i].is_lease && is_leased(record, r->quotas[i].id);
        for (size_t i = 0; i < LEDGER_SESSION_LEASES; i++)
                n -= record->leases[i] != 0 && !(record->leases[i] & LEDGER_BARRED);
        return n != 0;
}

/* Whether the session knew a quota that is gone: of a tenant's quotas in a partition it knew the last one
 * that existed at its hello; and its leases. */
static bool has_lost_a_quota(const struct broker *b, const struct ledger_session *record)
{
        const struct inherited *r = b->inherited;
        const char *tenant = record->tenant;
        size_t i = inherited_first_of(r, tenant);

        if (has_lost_a_lease(b, record))
                return true;
        /* Quotas are sorted by partition and id. */
        while (i < r->n_quotas && strcmp(r->quotas[i].tenant, tenant) == 0) {
                const char *partition = r->quotas[i].partition;
                const struct inherited_quota *known = NULL;

                for (; i < r->n_quotas && strcmp(r->quotas[i].tenant, tenant) == 0 &&
                       strcmp(r->quotas[i].partition, partition) == 0;
                     i++)
                        if (r->quotas[i].id < record->quotas_end && !r->quotas[i].is_lease)
                                known = &r->quotas[i];
                if (known && !known->quota)
                        return true;
        }
        return false;
}

/* Until session_attach(). */
static void no_send(void *userdata, const Bfcd__Reply *reply, const int *fds, size_t n_fds)
{
        (void)userdata;
        (void)reply;
        (void)fds;
        (void)n_fds; /* of no reply that it may get */
}

static void no_ready(void *userdata)
{
        (void)userdata;
}

static void no_abort(void *userdata, const char *why)
{
        (void)userdata;
        (void)why;
}

static void no_event(void *userdata, const Bfcd__Event *event)
{
        (void)userdata;
        (void)event;
}

static const struct session_ops no_ops = {
        .send = no_send,
        .ready = no_ready,
        .abort = no_abort,
        .send_event = no_event,
};

static int restore_session(struct broker *b, struct tenant *tenant, uint32_t index)
{
        const struct ledger_session *record = ledger_session_at(b->ledger, index);
        struct credentials who = { .pid = (pid_t)record->pid,
                                   .uid = record->uid,
                                   .gid = record->gid,
                                   .start_time = record->start_time };
        struct session *s;
        int r = session_new(b, ROLE_CLIENT, &who, &no_ops, NULL, &s);

        if (r < 0)
                return r;
        s->index = index;
        s->tenant = tenant;
        session_set_name(s, record->name);
        session_enlist(s);
        b->suspended.records[b->suspended.n_slots++] = (struct kept_record){ s->id, index };

        /* Its quotas, extents, references and direct charges are restored here, the blocks of all sessions
         * together later. */
        r = session_take_shares_again(s, record);
        if (r == 0)
                r = restore_exports(s);
        if (r == 0)
                r = restore_refs(s);
        if (r == 0)
                r = direct_restore(s);
        return r;
}

/* ---- all of them --------------------------------------------------------- */

static int restore_each(struct broker *b)
{
        size_t n;
        struct tenant **by_name = tenant_sort(b->tenants, b->n_tenants, &n);
        int r = 0;

        b->suspended.records =
                calloc((size_t)ledger_session_end(b->ledger) + 1, sizeof(*b->suspended.records));
        if (!by_name || !b->suspended.records)
                r = -ENOMEM;
        for (uint32_t i = 0; r == 0 && i < ledger_session_end(b->ledger); i++) {
                const struct ledger_session *record = ledger_session_get(b->ledger, i);
                struct tenant *found;

                if (!record || session_is_aside(b, i)) {
                        b->restored.n_aside += record != NULL;
                        continue;
                }
                /* A crash in here leaves this session aside at the next start. */
                ledger_note_session(b->ledger, i);
                found = tenant_find(by_name, n, record->tenant);
                if (found)
                        r = restore_session(b, found, i);
                else if (record->links.n_blocks + record->links.n_exports + record->links.n_refs == 0)
                        /* The tenant is gone, and the session has nothing. */
                        ledger_session_clear(b->ledger, i);
                else
                        r = -EBADMSG;
        }
        free(by_name);
        if (r == 0)
                qsort(b->suspended.records, b->suspended.n_slots, sizeof(*b->suspended.records),
                      kept_record_compare);
        return r;
}

static int compare_uids(const void *x, const void *y)
{
        const struct suspended_user *p = x, *q = y;

        return p->uid < q->uid ? -1 : p->uid > q->uid;
}

static int note_suspended_users(struct broker *b)
{
        struct suspended_sessions *all = &b->suspended;

        all->users = calloc(all->n + 1, sizeof(*all->users));
        if (!all->users)
                return -ENOMEM;
        for (size_t i = 0; i < all->n_slots; i++) {
                const struct session *s = b->sessions.table[all->records[i].index];

                if (session_is_suspended(s))
                        all->users[all->n_users++] = (struct suspended_user){ s->who.uid, s->tenant };
        }
        if (all->n_users > 1)
                qsort(all->users, all->n_users, sizeof(*all->users), compare_uids);
        return 0;
}

const struct tenant *restore_suspended_tenant(const struct broker *b, uid_t uid)
{
        const struct suspended_user key = { .uid = uid }, *found = NULL;

        if (b->suspended.n > 0 && b->suspended.n_users > 0)
                found = bsearch(&key, b->suspended.users, b->suspended.n_users, sizeof(key), compare_uids);
        return found ? found->tenant : NULL;
}

static void restore_shared_counts(struct broker *b)
{
        for (size_t i = 0; i < b->inherited->n_quotas; i++) {
                const struct inherited_quota *from = &b->inherited->quotas[i];
                struct quota *q = from->quota;

                if (q)
                        ledger_note_quota(b->ledger, from->index);
                for (size_t k = 0; q && k < from->arena.n_blocks; k++) {
                        const struct ledger_block *block = ledger_block_at(b->ledger, from->arena.blocks[k]);

                        if (block->shared != LEDGER_NONE && !ledger_block_is_parked(block))
                                trim_add_shared_block(q, block->offset, block->n_bytes);
                }
        }
}

/* Releases extents that no session uses, or that are above a lowered limit: nothing is released before this.
 * -ENOMEM. */
static int publish_quotas(struct broker *b)
{
        for (size_t i = 0; i < b->n_partitions; i++)
                b->partitions[i].up.is_inherited = false;
        for (size_t i = 0; i < b->n_tenants; i++)
                for (size_t k = 0; k < b->tenants[i].n_quotas; k++) {
                        ledger_note_quota(b->ledger, b->tenants[i].quotas[k]->index);
                        if (quota_release_parked(b->tenants[i].quotas[k]) < 0)
                                return -ENOMEM;
                        quota_release_exact(b->tenants[i].quotas[k]);
                        quota_release_unused(b->tenants[i].quotas[k]);
                        broker_note_leave(b, b->tenants[i].quotas[k]);
                }
        for (size_t i = 0; i < b->n_partitions; i++)
                partition_set_limit(&b->partitions[i], b->partitions[i].pool.limit_bytes);
        b->changes.may_have_gone = true;
        return 0;
}

int restore_sessions(struct broker *b)
{
        uint64_t began_ns = clock_ns();
        int r;

        if (!b->inherited)
                return 0;

        /* The records are restored. The states are set when all sessions have their memory. */
        r = restore_each(b);
        if (r == 0)
                r = restore_blocks(b);
        for (size_t i = 0; r == 0 && i < b->suspended.n_slots; i++) {
                struct session *s = b->sessions.table[b->suspended.records[i].index];
                const struct ledger_session *record = ledger_session_at(b->ledger, s->index);
                bool can_resume = record->start_time != 0 && record->can_resume == LEDGER_CAN_RESUME &&
                                  !has_lost_a_quota(b, record);

                ledger_note_session(b->ledger, s->index);
                session_transit(s, can_resume ? EVENT_RESTORED_RESUMABLE : EVENT_RESTORED, NULL);
        }
        if (r == 0)
                r = note_suspended_users(b);
        if (r == 0)
                r = shared_restore(b);
        if (r == -EBADMSG) /* the next daemon leaves aside what this one cannot restore */
                *ledger_at(b->ledger) |= CRASH_MARK;
        if (r < 0)
                return r;

        /* Counts, guaranteed places and releases of memory follow from them. */
        restore_shared_counts(b);
        b->inherited = inherited_free(b->inherited);
        broker_promise(b); /* the sessions count */
        r = publish_quotas(b);
        if (r < 0)
                return r;
        ledger_note_nothing(b->ledger);
        b->restored.ns += clock_ns() - began_ns;
        log_notice("%zu session%s, %" PRIu32 " block%s, %s restored after restart in %.1f ms; %zu suspended",
                   b->sessions.n_clients, b->sessions.n_clients == 1 ? "" : "s", b->restored.n_blocks,
                   b->restored.n_blocks == 1 ? "" : "s", NUMBER_SIZE(b->restored.n_bytes),
                   (double)b->restored.ns / 1e6, b->suspended.n);
        if (b->sessions.n_clients == 0) /* no session that another start could lose */
                broker_note_well(b);
        return 0;
}

void restore_forget(struct broker *b)
{
        for (size_t i = 0; i < b->sessions.n_slots; i++) {
                struct session *s = b->sessions.table[i];

                if (!s)
                        continue;
                session_leave_behind(s);
                session_free(s);
        }
        shared_forget(b);
        for (size_t i = 0; i < b->n_tenants; i++)
                for (size_t k = 0; k < b->tenants[i].n_quotas; k++)
                        trim_forget(b->tenants[i].quotas[k]);
}
