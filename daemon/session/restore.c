/* Sessions of the previous daemon; see restore.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/restore.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "daemon/base/crash.h"
#include "daemon/base/log.h"
#include "daemon/base/number.h"
#include "daemon/session/direct.h"
#include "daemon/session/session.h"
#include "daemon/session/session_states.h"
#include "daemon/session/share.h"
#include "daemon/session/share_take.h"
#include "daemon/session/shared.h"
#include "daemon/session/trim.h"

/* ---- a session's memory --------------------------------------------------- */

/* The share of a record's quota. NULL: *ret says why; no daemon writes a record without one. */
static struct session_share *share_for(struct session *s, uint32_t quota, int *ret)
{
        struct session_share *share = session_share_of(s, quota);

        *ret = share ? session_rejoin(s, share) : -EBADMSG;
        return *ret < 0 ? NULL : share;
}

static bool is_aside(const struct broker *b, uint32_t session)
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

                if (!block || block->session == LEDGER_NONE || is_aside(b, block->session))
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
                if (r == 0)
                        refs_add(&s->shared.refs, shared, i);
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

                if (!record || is_aside(b, i)) {
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
