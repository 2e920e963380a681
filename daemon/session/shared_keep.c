/* Kept blocks: shared blocks that outlive their last reference; see shared.h.
 *
 * The kept blocks without references are in one binary heap, by the time at which they are freed. Its room
 * is made when a block is published, so nothing can fail when the last reference is released. A block that is
 * to be freed at once has the time 0.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/session/session.h"
#include "daemon/session/shared_internal.h"
#include "daemon/session/park.h"
#include "daemon/session/refs.h"
#include "daemon/session/shared.h"

/* ---- the heap ------------------------------------------------------------ */

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

int keep_make_room(struct broker *b)
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

void keep_add(struct broker *b, struct shared_name *name)
{
        const struct ledger_shared *shared = record_of(b, name);

        if (shared->keep_ms == 0 && shared->metadata == LEDGER_NONE)
                return;
        name->is_counted = true;
        name->owner->n_kept++;
        b->shared.n_kept++;
}

void keep_remove(struct broker *b, struct shared_name *name)
{
        if (name->idle_at > 0)
                heap_remove(b, name);
        if (!name->is_counted)
                return;
        name->is_counted = false;
        name->owner->n_kept--;
        b->shared.n_kept--;
}

/* ---- time ---------------------------------------------------------------- */

static bool may_keep_in(const struct quota *q)
{
        return !q->is_removed && !q->partition->is_draining;
}

/* A copy could not be woken by anyone else, and its quota would never go. */
bool keep_allows(const struct broker *b, const struct shared_name *name)
{
        uint32_t copy = park_copy_of(b->ledger, record_of(b, name)->block);

        return record_of(b, name)->keep_ms > 0 && may_keep_in(quota_of(b, name)) &&
               (copy == LEDGER_NONE || may_keep_in(b->quotas[ledger_block_at(b->ledger, copy)->quota]));
}

/* The time is in the ledger before the last reference is gone: a successor knows it. */
void keep_begin(struct broker *b, struct shared_name *name)
{
        uint64_t until_ms;

        if (__builtin_add_overflow(clock_ms(), record_of(b, name)->keep_ms, &until_ms))
                until_ms = LEDGER_FOREVER;
        ledger_shared_keep_until(b->ledger, name->shared, until_ms);
        heap_add(b, name);
}

void keep_end(struct broker *b, struct shared_name *name)
{
        if (name->idle_at > 0)
                heap_remove(b, name);
}

void keep_restore(struct broker *b, struct shared_name *name)
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

void keep_expire(struct broker *b, uint64_t now_ms, unsigned *budget)
{
        for (; *budget > 0 && b->shared.n_idle > 0 && time_at(b, 1) <= now_ms; (*budget)--)
                end_idle(b, b->shared.idle[0]);
}

bool shared_frees_kept_now(const struct broker *b)
{
        return b->shared.n_idle > 0 && time_at(b, 1) == 0;
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

/* Only those without references are in the heap. */
void shared_review_kept(struct broker *b)
{
        for (size_t i = 0; i < b->shared.n_idle; i++)
                if (!keep_allows(b, b->shared.idle[i]))
                        ledger_shared_keep_until(b->ledger, b->shared.idle[i]->shared, 0);
        for (size_t at = b->shared.n_idle / 2; at > 0; at--)
                heap_sink(b, at);
        if (b->shared.n_idle > 0)
                broker_wake(b);
}

void shared_end_kept(struct broker *b)
{
        while (b->shared.n_idle > 0)
                end_idle(b, b->shared.idle[b->shared.n_idle - 1]);
        free(b->shared.idle);
        b->shared.idle = NULL;
        b->shared.n_idle_room = 0;
}

/* ---- requests ------------------------------------------------------------ */

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
