/* Sessions of another process; see restore.h.
 *
 * What a client has named is marked where it lies: a block by the number of its session's
 * homecoming, a hold by how much of its count was not named, as replies that were not sent
 * are (links.in_delivery, links.n_in_delivery); so whatever it names is found and marked in
 * constant time. Of extents a homecoming has a list of its own, by id.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/restore.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/clock.h"
#include "daemon/log.h"

#define MAX_HOMECOMINGS 16u /* begun: each may leave fds in flight that nobody reads */
#define LOOKS_A_FREE    8u  /* blocks that are only looked at cost so much less than those that are freed */

struct homecoming_extent {
        uint64_t id;
        uint32_t index; /* in the ledger */
        uint32_t export;
        bool is_named;
};

enum stage { STAGE_NAMING, STAGE_CHECK, STAGE_BLOCKS, STAGE_HOLDS, STAGE_EXPORTS, STAGE_DONE };

struct homecoming {
        uint32_t number; /* of the session's: it marks its blocks */
        bool has_events;
        enum stage stage;
        uint32_t block;      /* the next of the session's to be looked at */
        size_t i;            /* the next hold, or extent */
        uint64_t request_id; /* of the last Held */
        size_t n_freed;
        size_t n_extents;
        struct homecoming_extent extents[]; /* by id; some may be gone by now */
};

/* ---- what it has --------------------------------------------------------- */

static int join_again(struct session *s, struct session_share *share)
{
        if (!share->joined) {
                share->joined = true;
                holding_join(&share->holding, s, share->quota);
                quota_rejoin(share->quota);
        }
        return session_reserve_seen(share);
}

/* Its share of what a record is of. NULL: there is none, which no daemon writes. */
static struct session_share *share_for(struct session *s, uint32_t quota, int *ret)
{
        struct session_share *share = session_share_of(s, quota);

        *ret = share ? join_again(s, share) : -EBADMSG;
        return *ret < 0 ? NULL : share;
}

static int restore_blocks(struct session *s)
{
        struct ledger *l = s->broker->ledger;
        uint32_t i = ledger_session_at(l, s->index)->links.first_block;
        int r = 0;

        for (; r == 0 && i != LEDGER_NONE; i = ledger_block_at(l, i)->links.next_of_session) {
                const struct ledger_block *b = ledger_block_at(l, i);
                struct session_share *share = share_for(s, b->quota, &r);

                if (!share)
                        return r;
                trim_add_block(s, share, b->offset, b->n_bytes);
                holding_add(&share->holding, b->n_bytes);
                session_note_peak(share);
                s->bytes_in_use += b->n_bytes;
        }
        s->peak_bytes_in_use = s->bytes_in_use;
        return r;
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
                        share->seen[arena_slots(share->quota->arena, e->offset, e->n_bytes, &last)] = e->id;
        }
        return r;
}

static int restore_holds(struct session *s)
{
        struct ledger *l = s->broker->ledger;
        uint32_t i = ledger_session_at(l, s->index)->links.first_hold;
        int r = 0;

        if (ledger_session_at(l, s->index)->links.n_holds > HOLDS_MAX)
                return -EBADMSG;
        for (; r == 0 && i != LEDGER_NONE; i = ledger_hold_at(l, i)->links.next_of_session) {
                uint32_t shared = ledger_hold_at(l, i)->shared;

                (void)share_for(s, ledger_block_at(l, ledger_shared_at(l, shared)->block)->quota, &r);
                if (r == 0)
                        r = holds_make_room(&s->holds);
                if (r == 0)
                        holds_add(&s->holds, shared, i);
        }
        return r;
}

/* ---- whose it is --------------------------------------------------------- */

/* Whether it was told of a quota that is not there any more: of those of one tenant in one
 * partition it knew the last that there was. */
static bool has_lost_a_quota(const struct broker *b, const char *tenant, uint64_t quotas_end)
{
        const struct remains *r = b->remains;
        size_t i = remains_first_of(r, tenant);

        while (i < r->n_quotas && strcmp(r->quotas[i].tenant, tenant) == 0) {
                const char *partition = r->quotas[i].partition;
                const struct remains_quota *known = NULL;

                for (; i < r->n_quotas && strcmp(r->quotas[i].tenant, tenant) == 0 &&
                       strcmp(r->quotas[i].partition, partition) == 0;
                     i++)
                        if (r->quotas[i].id < quotas_end)
                                known = &r->quotas[i];
                if (known && !known->quota)
                        return true;
        }
        return false;
}

/* Nobody is there. */
static int no_send(void *userdata, const Bfcd__Reply *reply, const int *fds, size_t n_fds)
{
        (void)userdata;
        (void)reply;
        (void)fds;
        (void)n_fds;
        return 0;
}

static void no_resume(void *userdata)
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
        .resume = no_resume,
        .abort = no_abort,
        .send_event = no_event,
};

static void describe(struct session *s, const struct ledger_session *record)
{
        size_t i;

        s->born_ms = record->born_ms;
        for (i = 0; i < sizeof(s->name) - 1 && record->name[i]; i++)
                s->name[i] = record->name[i] < ' ' || record->name[i] > '~' ? '?' : record->name[i];
        s->takes_trims = (record->capabilities & BFCD__CAPABILITY__CAPABILITY_TRIM) != 0;
        s->takes_drains = (record->capabilities & BFCD__CAPABILITY__CAPABILITY_DRAIN) != 0;
        if (has_lost_a_quota(s->broker, record->tenant, record->quotas_end))
                s->refusal = "memory of this session was lost: its arena was closed when the daemon "
                             "restarted; see the daemon's log for the cause";
        s->may_return = !s->refusal && record->start_time != 0 &&
                        (record->capabilities & BFCD__CAPABILITY__CAPABILITY_RETURN) != 0;
}

static int restore_session(struct broker *b, struct tenant *tenant, uint32_t index)
{
        const struct ledger_session *record = ledger_session_at(b->ledger, index);
        struct credentials who = { .pid = (pid_t)record->pid,
                                   .uid = record->uid,
                                   .gid = record->gid,
                                   .start_time = record->start_time };
        struct session *s;
        int r = session_new(b, false, &who, &no_ops, NULL, &s);

        if (r < 0)
                return r;
        s->index = index;
        s->tenant = tenant;
        s->state = SESSION_QUARANTINED;
        describe(s, record);
        session_enlist(s);
        tenant->n_quarantined++;
        b->n_awaited += s->may_return;
        b->awaited[b->n_awaited_slots++] = (struct kept_record){ s->id, index };
        r = session_take_shares(s, record->quotas_end);
        if (r == 0)
                r = restore_exports(s);
        if (r == 0)
                r = restore_blocks(s);
        return r < 0 ? r : restore_holds(s);
}

/* ---- all of them --------------------------------------------------------- */

static int compare_tenants(const void *x, const void *y)
{
        const struct tenant *const *p = x, *const *q = y;

        return strcmp((*p)->name, (*q)->name);
}

static int compare_tenant(const void *name, const void *element)
{
        const struct tenant *const *t = element;

        return strcmp(name, (*t)->name);
}

static int restore_sessions(struct broker *b)
{
        struct tenant **by_name = calloc(b->n_tenants + 1, sizeof(*by_name));
        size_t n = 0;
        int r = 0;

        b->awaited = calloc((size_t)ledger_session_end(b->ledger) + 1, sizeof(*b->awaited));
        if (!by_name || !b->awaited)
                r = -ENOMEM;
        for (size_t i = 0; r == 0 && i < b->n_tenants; i++)
                by_name[n++] = &b->tenants[i];
        if (r == 0)
                qsort(by_name, n, sizeof(*by_name), compare_tenants);
        for (uint32_t i = 0; r == 0 && i < ledger_session_end(b->ledger); i++) {
                const struct ledger_session *record = ledger_session_get(b->ledger, i);
                struct tenant **found =
                        record ? bsearch(record->tenant, by_name, n, sizeof(*by_name), compare_tenant) : NULL;

                if (found)
                        r = restore_session(b, *found, i);
                else if (record &&
                         record->links.n_blocks + record->links.n_exports + record->links.n_holds == 0)
                        ledger_session_clear(b->ledger, i); /* neither it nor its tenant has anything */
                else if (record)
                        r = -EBADMSG;
        }
        free(by_name);
        if (r == 0)
                qsort(b->awaited, b->n_awaited_slots, sizeof(*b->awaited), kept_record_compare);
        return r;
}

static int compare_uids(const void *x, const void *y)
{
        const uid_t *p = x, *q = y;

        return *p < *q ? -1 : *p > *q;
}

static int note_awaited_uids(struct broker *b)
{
        b->awaited_uids = calloc(b->n_awaited + 1, sizeof(*b->awaited_uids));
        if (!b->awaited_uids)
                return -ENOMEM;
        for (size_t i = 0; i < b->n_awaited_slots; i++) {
                const struct session *s = b->sessions[b->awaited[i].index];

                if (s->may_return)
                        b->awaited_uids[b->n_awaited_uids++] = s->who.uid;
        }
        if (b->n_awaited_uids > 1)
                qsort(b->awaited_uids, b->n_awaited_uids, sizeof(*b->awaited_uids), compare_uids);
        return 0;
}

bool session_is_awaited_of(const struct broker *b, uid_t uid)
{
        return b->n_awaited > 0 && b->n_awaited_uids > 0 &&
               bsearch(&uid, b->awaited_uids, b->n_awaited_uids, sizeof(uid), compare_uids);
}

static void restore_shared_counts(struct broker *b)
{
        for (size_t i = 0; i < b->remains->n_quotas; i++) {
                const struct remains_quota *from = &b->remains->quotas[i];
                struct quota *q = from->quota;

                for (size_t k = 0; q && k < from->arena.n_blocks; k++) {
                        const struct ledger_block *block = ledger_block_at(b->ledger, from->arena.blocks[k]);

                        if (block->shared != LEDGER_NONE)
                                trim_add_shared_block(q, block->offset, block->n_bytes);
                }
        }
}

/* What nobody has any more, or is beyond a limit that came down. */
static void settle_quotas(struct broker *b)
{
        for (size_t i = 0; i < b->n_tenants; i++)
                for (size_t k = 0; k < b->tenants[i].n_quotas; k++) {
                        quota_settle(b->tenants[i].quotas[k]);
                        broker_note_leave(b, b->tenants[i].quotas[k]);
                }
        for (size_t i = 0; i < b->n_partitions; i++)
                partition_set_limit(&b->partitions[i], b->partitions[i].pool.limit_bytes,
                                    b->partitions[i].reclaim_timeout_ms);
        b->may_have_gone = true;
}

int session_restore_all(struct broker *b)
{
        uint64_t began_ns = clock_ns();
        int r;

        if (!b->remains)
                return 0;
        r = restore_sessions(b);
        if (r == 0)
                r = note_awaited_uids(b);
        if (r == 0)
                r = shared_restore(b);
        if (r < 0)
                return r;
        restore_shared_counts(b);
        b->remains = remains_free(b->remains);
        settle_quotas(b);
        b->taken_ns += clock_ns() - began_ns;
        log_notice("%zu sessions, %" PRIu32 " blocks, %" PRIu64 " bytes restored after restart in %.1f "
                   "ms; %zu sessions suspended",
                   b->n_client_sessions, b->taken_blocks, b->taken_bytes, (double)b->taken_ns / 1e6,
                   b->n_awaited);
        if (b->n_client_sessions == 0) /* nothing that a further start could spoil */
                broker_is_well(b);
        return 0;
}

void session_forget_all(struct broker *b)
{
        for (size_t i = 0; i < b->n_session_slots; i++) {
                struct session *s = b->sessions[i];

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

/* ---- hello --------------------------------------------------------------- */

static struct session *find_awaited(const struct broker *b, uint64_t id)
{
        struct kept_record key = { .id = id };
        const struct kept_record *found =
                b->n_awaited_slots > 0
                        ? bsearch(&key, b->awaited, b->n_awaited_slots, sizeof(key), kept_record_compare)
                        : NULL;
        struct session *s = found ? b->sessions[found->index] : NULL;

        return s && s->id == id && !s->has_returned && s->state != SESSION_CLOSING ? s : NULL;
}

/* As long as it takes, whatever is the same. */
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

/* NULL: it is this process's own. *ret_kind: which of the broker's logs tells of it. */
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
        log_limited(log_limit_of_user(&s->broker->return_logs[kind], s->who.uid), LOG_LEVEL_NOTICE,
                    "session %" PRIu64 ": resume by uid %u, pid %d refused: %s", r->hello->session_id,
                    (unsigned)s->who.uid, (int)s->who.pid, why);
        session_refuse(s, r->id, error, sentence);
}

/* NULL: refused. */
static struct session *find_own(struct session *s, const Bfcd__Request *r)
{
        struct session *kept = find_awaited(s->broker, r->hello->session_id);
        const char *why;
        size_t kind;

        if (!kept) {
                refuse_return(s, r, -ESTALE, 4, "the daemon has no suspended session with this number",
                              "the daemon has no suspended session with this number: it ended, or the "
                              "daemon restarted without it");
                return NULL;
        }
        why = find_impostor(kept, &s->who, &r->hello->secret, &kind);
        if (why) {
                refuse_return(s, r, -EACCES, kind, why, "this session belongs to another process");
                return NULL;
        }
        if (kept->eviction) {
                refuse_return(s, r, -EIDRM, 4, "evicted by an operator", kept->eviction);
                return NULL;
        }
        if (kept->refusal) {
                refuse_return(s, r, -EIO, 4, kept->refusal, kept->refusal);
                return NULL;
        }
        if (!kept->may_return || kept->n_homecomings == MAX_HOMECOMINGS) {
                refuse_return(s, r, -ESTALE, 4, "it disconnected before, or it does not support resume",
                              "this session cannot be resumed");
                return NULL;
        }
        if (kept->state == SESSION_RETURNING) {
                session_refuse(s, r->id, -EAGAIN, "this session is being resumed on another connection");
                return NULL;
        }
        return kept;
}

static int compare_extents(const void *x, const void *y)
{
        const struct homecoming_extent *p = x, *q = y;

        return p->id < q->id ? -1 : p->id > q->id;
}

/* NULL: out of memory. */
static struct homecoming *homecoming_new(const struct session *s)
{
        struct ledger *l = s->broker->ledger;
        const struct ledger_session *record = ledger_session_at(l, s->index);
        struct homecoming *h =
                calloc(1, sizeof(*h) + ((size_t)record->links.n_exports + 1) * sizeof(h->extents[0]));
        uint32_t x = record->links.first_export;

        if (!h)
                return NULL;
        for (; x != LEDGER_NONE; x = ledger_export_at(l, x)->links.next_of_session) {
                uint32_t extent = ledger_export_at(l, x)->extent;

                h->extents[h->n_extents++] =
                        (struct homecoming_extent){ ledger_extent_at(l, extent)->id, extent, x, false };
        }
        qsort(h->extents, h->n_extents, sizeof(h->extents[0]), compare_extents);
        for (size_t i = 0; i < s->holds.n; i++) {
                struct ledger_hold *hold = ledger_hold_at(l, s->holds.list[i].hold);

                hold->links.n_in_delivery = hold->count;
        }
        return h;
}

int homecoming_hello(struct session *s, const Bfcd__Request *r)
{
        struct session *kept = find_own(s, r);
        struct homecoming *h;
        size_t share;
        int fd = -1;

        if (!kept)
                return 0;
        if (session_find_share(kept, r->hello->partition, &share) < 0) {
                session_refuse(s, r->id, -ENOENT, "this session has no such partition");
                return 0;
        }
        h = homecoming_new(kept);
        if (!h || join_again(kept, &kept->shares[share]) < 0 || session_open_events(s, r, &fd) < 0) {
                free(h);
                session_refuse(s, r->id, -ENOMEM,
                               "the daemon is out of memory or file descriptors: try again");
                return 0;
        }
        s->ops->take_over(s->userdata, kept);
        h->number = ++kept->n_homecomings;
        h->has_events = fd >= 0;
        kept->homecoming = h;
        kept->state = SESSION_RETURNING;
        kept->tenant->n_quarantined--;
        kept->broker->n_awaited--;
        session_grant(kept, r, fd);
        session_greet(kept, r, share, fd);
        log_debug("session %" PRIu64 " is being resumed", kept->id);
        return 0;
}

void homecoming_break_off(struct session *s)
{
        free(s->homecoming);
        s->homecoming = NULL;
        s->page = client_page_free(s->page);
        s->state = SESSION_QUARANTINED;
        s->tenant->n_quarantined++;
        s->broker->n_awaited++;
}

bool session_is_settling(const struct session *s)
{
        return s->state == SESSION_RETURNING && s->homecoming->stage != STAGE_NAMING;
}

/* ---- held ---------------------------------------------------------------- */

static struct homecoming_extent *find_extent(struct homecoming *h, uint64_t id)
{
        struct homecoming_extent key = { .id = id };

        return bsearch(&key, h->extents, h->n_extents, sizeof(key), compare_extents);
}

static bool extent_is_there(const struct broker *b, uint64_t id, uint32_t index)
{
        const struct ledger_extent *e = ledger_extent_get(b->ledger, index);

        return e && e->id == id;
}

/* Not one of its own: but it may have been, and be gone. */
static const char *name_stale_extent(const struct broker *b, uint64_t id)
{
        struct kept_record key = { .id = id };
        const struct kept_record *found = bsearch(&key, b->kept, b->n_kept, sizeof(key), kept_record_compare);

        if (id == 0 || id >= b->extents_end)
                return "the resumed client listed an extent that never existed";
        if (found && extent_is_there(b, id, found->index))
                return "the resumed client listed an extent of another session";
        return NULL;
}

static const char *name_extent(struct session *s, uint64_t id)
{
        struct homecoming_extent *e = find_extent(s->homecoming, id);

        if (!e)
                return name_stale_extent(s->broker, id);
        if (e->is_named)
                return "the resumed client listed an extent twice";
        e->is_named = true;
        return NULL;
}

static const char *name_shared(struct session *s, uint32_t index, uint32_t count)
{
        struct ledger *l = s->broker->ledger;
        uint32_t shared = index == LEDGER_NONE ? LEDGER_NONE : ledger_block_at(l, index)->shared;
        uint32_t at = shared == LEDGER_NONE ? LEDGER_NONE : holds_find(&s->holds, shared);
        struct ledger_hold *hold = at == LEDGER_NONE ? NULL : ledger_hold_at(l, at);

        if (!hold)
                return "the resumed client listed a shared block that it has not attached";
        if (hold->links.n_in_delivery < hold->count)
                return "the resumed client listed a shared block twice";
        if (count == 0 || count > hold->count)
                return "the resumed client listed more references to a shared block than it has";
        hold->links.n_in_delivery = hold->count - count;
        return NULL;
}

static const char *name_block(struct session *s, uint64_t id)
{
        struct ledger *l = s->broker->ledger;
        uint32_t index = ledger_block_find(l, id);
        struct ledger_block *block = index == LEDGER_NONE ? NULL : ledger_block_at(l, index);

        if (block && block->shared != LEDGER_NONE && holds_find(&s->holds, block->shared) != LEDGER_NONE)
                return name_shared(s, index, 1); /* it does not know yet that it has published it */
        if (!block || block->session != s->index)
                return "the resumed client listed a block that it has freed or never had";
        if (block->links.in_delivery == s->homecoming->number)
                return "the resumed client listed a block twice";
        block->links.in_delivery = s->homecoming->number;
        return NULL;
}

/* A Split that the client knows no answer to. What it split off is kept with what it was split off from. */
static void name_split_off(struct session *s, const Bfcd__Split *split)
{
        struct ledger *l = s->broker->ledger;
        uint32_t index = ledger_block_find(l, split->block_id), high;
        uint32_t number = s->homecoming->number;

        if (index == LEDGER_NONE || ledger_block_at(l, index)->session != s->index ||
            ledger_block_at(l, index)->links.in_delivery != number)
                return;
        high = ledger_block_split_off(l, index, split->n_bytes);
        if (high != LEDGER_NONE)
                ledger_block_at(l, high)->links.in_delivery = number;
}

int homecoming_held(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        const Bfcd__Held *held = r->held;
        struct homecoming *h = s->homecoming;
        const char *why = NULL;

        if (s->state != SESSION_RETURNING || h->stage != STAGE_NAMING) {
                *ret_why = "the client sent a list of its memory outside a resume";
                return -EPROTO;
        }
        for (size_t i = 0; !why && i < held->n_extent_ids; i++)
                why = name_extent(s, held->extent_ids[i]);
        for (size_t i = 0; !why && i < held->n_block_ids; i++)
                why = name_block(s, held->block_ids[i]);
        for (size_t i = 0; !why && i < held->n_shared; i++)
                why = name_shared(s, ledger_block_find(s->broker->ledger, held->shared[i]->block_id),
                                  held->shared[i]->count);
        if (why) {
                *ret_why = why;
                return -EPROTO;
        }
        if (!held->is_last) {
                session_done(s, r->id);
                return 0;
        }
        if (held->splitting)
                name_split_off(s, held->splitting);
        h->request_id = r->id;
        h->stage = STAGE_CHECK;
        h->block = ledger_session_at(s->broker->ledger, s->index)->links.first_block;
        return 0;
}

/* ---- what it did not name ------------------------------------------------ */

/* Every extent behind it was named too. */
static bool is_in_named(struct session *s, const struct ledger_block *block)
{
        const struct arena *arena = session_share_of(s, block->quota)->quota->arena;
        size_t slot, last;

        for (slot = arena_slots(arena, block->offset, block->n_bytes, &last); slot <= last; slot++) {
                uint32_t extent = arena_slot_extent(arena, slot);
                const struct homecoming_extent *e =
                        find_extent(s->homecoming, ledger_extent_at(s->broker->ledger, extent)->id);

                if (!e || !e->is_named)
                        return false;
        }
        return true;
}

static bool block_is_named(const struct session *s, const struct ledger_block *block)
{
        return block->links.in_delivery == s->homecoming->number;
}

static int settle_check(struct session *s, size_t *looks)
{
        struct ledger *l = s->broker->ledger;
        struct homecoming *h = s->homecoming;

        for (; *looks > 0 && h->block != LEDGER_NONE; (*looks)--) {
                const struct ledger_block *block = ledger_block_at(l, h->block);

                if (block_is_named(s, block) && !is_in_named(s, block))
                        return -EPROTO;
                h->block = block->links.next_of_session;
        }
        for (; *looks > 0 && h->i < s->holds.n; h->i++, (*looks)--) {
                const struct ledger_hold *hold = ledger_hold_at(l, s->holds.list[h->i].hold);

                if (hold->links.n_in_delivery < hold->count &&
                    !is_in_named(s, ledger_block_at(l, ledger_shared_at(l, hold->shared)->block)))
                        return -EPROTO;
        }
        if (h->block != LEDGER_NONE || h->i < s->holds.n)
                return SESSION_MORE;
        h->stage = STAGE_BLOCKS;
        h->block = ledger_session_at(l, s->index)->links.first_block;
        return 0;
}

static void spend(size_t *looks, size_t n)
{
        *looks -= n < *looks ? n : *looks;
}

static void settle_blocks(struct session *s, size_t *looks)
{
        struct ledger *l = s->broker->ledger;
        struct homecoming *h = s->homecoming;

        while (*looks > 0 && h->block != LEDGER_NONE) {
                struct ledger_block *block = ledger_block_at(l, h->block);
                uint32_t at = h->block;

                h->block = block->links.next_of_session;
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
        h->stage = STAGE_HOLDS;
        h->i = s->holds.n;
}

/* From the last on, so that those before stay where they are. */
static void settle_holds(struct session *s, size_t *looks)
{
        struct homecoming *h = s->homecoming;

        for (; *looks > 0 && h->i > 0; h->i--) {
                h->n_freed += shared_settle(s, s->holds.list[h->i - 1].hold);
                spend(looks, LOOKS_A_FREE);
        }
        if (h->i > 0)
                return;
        h->stage = STAGE_EXPORTS;
}

static void settle_exports(struct session *s, size_t *looks)
{
        struct ledger *l = s->broker->ledger;
        struct homecoming *h = s->homecoming;

        for (; *looks > 0 && h->i < h->n_extents; h->i++) {
                const struct homecoming_extent *e = &h->extents[h->i];
                struct session_share *share;
                size_t last;

                spend(looks, 1);
                if (e->is_named || !extent_is_there(s->broker, e->id, e->index))
                        continue;
                share = session_share_of(s, ledger_extent_at(l, e->index)->quota);
                share->seen[arena_slots(share->quota->arena, ledger_extent_at(l, e->index)->offset, 1,
                                        &last)] = 0;
                retire_clear_export(s, e->export);
        }
        if (h->i == h->n_extents)
                h->stage = STAGE_DONE;
}

/* Limits that came down with the start, when nobody could be asked yet. */
static void give_back_excess(struct session *s)
{
        uint64_t now_ms = clock_ms();

        for (size_t i = 0; i < s->n_shares; i++)
                (void)trim_send(&s->shares[i].trim, quota_excess(s->shares[i].quota), now_ms);
}

static void finish(struct session *s)
{
        struct homecoming *h = s->homecoming;

        s->homecoming = NULL;
        s->state = SESSION_LIVE;
        s->may_return = false;
        s->has_returned = true;
        log_limited(&s->tenant->return_log, LOG_LEVEL_INFO,
                    "session %" PRIu64 " resumed: tenant '%s', uid %u, pid %d, %s; %zu blocks freed that "
                    "the client did not list",
                    s->id, s->tenant->name, (unsigned)s->who.uid, (int)s->who.pid, s->name, h->n_freed);
        session_done(s, h->request_id);
        retire_begin_late(s, h->has_events);
        trim_begin(s);
        give_back_excess(s);
        free(h);
        if (s->broker->n_awaited == 0)
                broker_is_well(s->broker);
}

int homecoming_settle(struct session *s, size_t n, const char **ret_why)
{
        struct homecoming *h = s->homecoming;
        size_t looks = n * LOOKS_A_FREE;

        assert(session_is_settling(s));
        if (h->stage == STAGE_CHECK && settle_check(s, &looks) < 0) {
                *ret_why = "the resumed client listed a block without an extent of this block";
                return -EPROTO;
        }
        if (h->stage == STAGE_BLOCKS)
                settle_blocks(s, &looks);
        if (h->stage == STAGE_HOLDS)
                settle_holds(s, &looks);
        if (h->stage == STAGE_EXPORTS)
                settle_exports(s, &looks);
        if (h->stage != STAGE_DONE)
                return SESSION_MORE;
        finish(s);
        return 0;
}
