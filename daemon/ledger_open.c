/* SPDX-License-Identifier: Apache-2.0 */
/* A successor opens the ledger; see ledger.h.
 *
 * Nothing in the memfd is believed before it was looked at: no index is followed that
 * leads out of its table, or to a record that is free or was found bad. So each pass
 * relies on those before it: quotas, regions, sessions, extents, exports, names, blocks, shared
 * records, holds. What has passed them all satisfies ledger_check() once it is linked.
 *
 * A kill can come here too. Whatever is done is therefore done in such an order that a
 * next opening finds the rest still to do: an arena is closed before the record for which
 * it is closed is cleared; the half of a publication is cleared as an id is cleared; the
 * rest are links, which nobody reads. Two records of one id, or of one pair, are both bad:
 * it is not known which one is right. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/ledger_table.h"

#define SEALS_NEEDED (F_SEAL_GROW | F_SEAL_SHRINK)

/* Of a record: what it is sorted by. */
struct key {
        uint64_t a, b;
        uint32_t index;
};

struct opening {
        struct ledger *l;
        void (*on_fault)(void *userdata, const struct ledger_fault *fault);
        void *userdata;
        uint64_t n_faults;
        struct key *extents; /* sound ones, by quota and offset */
        size_t n_extents;
        bool *is_bad_extent; /* by index: rejected, its quota was in use */
};

static const char *const TABLE_NAMES[N_TABLES] = { "quota", "session", "extent", "export",
                                                   "block", "shared",  "hold",   "region" };

/* ---- faults ---------------------------------------------------------------- */

static void tell(struct opening *o, const char *table, uint32_t index, uint64_t id, uint32_t quota,
                 const char *why)
{
        struct ledger_fault fault = { table, index, id, quota, why };

        o->n_faults++;
        if (o->on_fault)
                o->on_fault(o->userdata, &fault);
}

static struct table *table_of(struct opening *o, int kind)
{
        return &o->l->tables[kind];
}

static bool is_used(struct opening *o, int kind, uint32_t index)
{
        return in_use(table_of(o, kind), index);
}

/* Nothing is closed for it. */
static void clear_bad(struct opening *o, int kind, uint32_t index, uint32_t quota, const char *why)
{
        const struct table *t = table_of(o, kind);
        uint64_t id = record_id(t, index);

        uncommit(t, index);
        tell(o, TABLE_NAMES[kind], index, id, quota, why);
}

static void close_tenant(struct opening *o, const char *tenant)
{
        const struct table *t = table_of(o, TABLE_QUOTA);

        for (uint32_t i = table_next(t, 0); i != LEDGER_NONE; i = table_next(t, i + 1)) {
                const struct ledger_quota *q = record(t, i);

                if (!tenant || strcmp(q->tenant, tenant) == 0)
                        ledger_quota_close(o->l, i);
        }
}

/* Closes what a bad record may have been of, and clears it. */
static void reject(struct opening *o, int kind, uint32_t index, uint32_t quota, uint32_t session,
                   const char *why)
{
        bool is_known = is_used(o, TABLE_QUOTA, quota);

        if (is_known)
                ledger_quota_close(o->l, quota);
        else if (is_used(o, TABLE_SESSION, session))
                close_tenant(o, ledger_session_at(o->l, session)->tenant);
        else
                close_tenant(o, NULL);
        clear_bad(o, kind, index, is_known ? quota : LEDGER_NONE, why);
}

/* ---- what is common ---------------------------------------------------------- */

static bool is_name(const char name[LEDGER_NAME_BYTES])
{
        return name[0] != '\0' && memchr(name, '\0', LEDGER_NAME_BYTES);
}

static bool was_given(const struct table *t, uint32_t index)
{
        return record_id(t, index) < atomic_load(&t->shared->next_id);
}

/* Whether the session's tenant is the quota's. A quota that was bad has no name. */
static bool is_tenants(struct opening *o, uint32_t session, uint32_t quota)
{
        const char *tenant = ledger_quota_at(o->l, quota)->tenant;

        return tenant[0] == '\0' || strcmp(ledger_session_at(o->l, session)->tenant, tenant) == 0;
}

static int compare_keys(const void *x, const void *y)
{
        const struct key *p = x, *q = y;

        if (p->a != q->a)
                return p->a < q->a ? -1 : 1;
        if (p->b != q->b)
                return p->b < q->b ? -1 : 1;
        return p->index < q->index ? -1 : p->index > q->index;
}

typedef void (*key_fn)(const void *record, struct key *ret);

/* The keys of all records in use, sorted; the caller frees them. */
static int sort_table(struct opening *o, int kind, key_fn key_of, struct key **ret, size_t *ret_n)
{
        const struct table *t = table_of(o, kind);
        struct key *keys;
        size_t n = 0;

        for (uint32_t i = table_next(t, 0); i != LEDGER_NONE; i = table_next(t, i + 1))
                n++;
        keys = calloc(n > 0 ? n : 1, sizeof(*keys));
        if (!keys)
                return -ENOMEM;
        n = 0;
        for (uint32_t i = table_next(t, 0); i != LEDGER_NONE; i = table_next(t, i + 1)) {
                keys[n].index = i;
                key_of(record(t, i), &keys[n++]);
        }
        qsort(keys, n, sizeof(*keys), compare_keys);
        *ret = keys;
        *ret_n = n;
        return 0;
}

typedef void (*reject_fn)(struct opening *o, int kind, uint32_t index, const char *why);

/* Rejects all whose key another one has too. */
static int reject_twins(struct opening *o, int kind, key_fn key_of, reject_fn reject_one, const char *why)
{
        struct key *keys;
        size_t n;
        int r = sort_table(o, kind, key_of, &keys, &n);

        if (r < 0)
                return r;
        for (size_t i = 0; i < n; i++) {
                bool same = i > 0 && keys[i].a == keys[i - 1].a && keys[i].b == keys[i - 1].b;

                same = same || (i + 1 < n && keys[i].a == keys[i + 1].a && keys[i].b == keys[i + 1].b);
                if (same)
                        reject_one(o, kind, keys[i].index, why);
        }
        free(keys);
        return 0;
}

static void key_by_id(const void *record, struct key *ret)
{
        ret->a = atomic_load((const _Atomic uint64_t *)record);
}

/* ---- quotas and sessions -------------------------------------------------------- */

/* It stays, so that what is charged to it is still known as one arena's. */
static void reject_quota(struct opening *o, int kind, uint32_t index, const char *why)
{
        const struct table *t = table_of(o, kind);
        struct ledger_quota *q = record(t, index);
        uint64_t id = q->id;

        ledger_quota_close(o->l, index);
        memset(q->tenant, 0, sizeof(q->tenant));
        memset(q->partition, 0, sizeof(q->partition));
        atomic_thread_fence(memory_order_release);
        commit(t, index, next_id(t));
        tell(o, TABLE_NAMES[kind], index, id, index, why);
}

static int open_quotas(struct opening *o)
{
        const struct table *t = table_of(o, TABLE_QUOTA);

        for (uint32_t i = table_next(t, 0); i != LEDGER_NONE; i = table_next(t, i + 1)) {
                const struct ledger_quota *q = record(t, i);
                bool is_nameless = q->is_closed && q->tenant[0] == '\0' && q->partition[0] == '\0';

                if (!was_given(t, i))
                        reject_quota(o, TABLE_QUOTA, i, "its id was never assigned");
                else if (!is_nameless && (!is_name(q->tenant) || !is_name(q->partition)))
                        reject_quota(o, TABLE_QUOTA, i, "it has no name");
        }
        return reject_twins(o, TABLE_QUOTA, key_by_id, reject_quota, "its id is used twice");
}

/* Its arenas are closed by what names it. */
static void reject_alone(struct opening *o, int kind, uint32_t index, const char *why)
{
        clear_bad(o, kind, index, LEDGER_NONE, why);
}

static int open_sessions(struct opening *o)
{
        const struct table *t = table_of(o, TABLE_SESSION);

        for (uint32_t i = table_next(t, 0); i != LEDGER_NONE; i = table_next(t, i + 1)) {
                const struct ledger_session *s = record(t, i);

                if (!was_given(t, i))
                        reject_alone(o, TABLE_SESSION, i, "its id was never assigned");
                else if (s->tenant[0] == '\0')
                        uncommit(t, i); /* an operator's: it has no memory and is not resumed */
                else if (!is_name(s->tenant))
                        reject_alone(o, TABLE_SESSION, i, "its tenant has no name");
                else if (!memchr(s->name, '\0', sizeof(s->name)))
                        reject_alone(o, TABLE_SESSION, i, "its name is not terminated");
        }
        return reject_twins(o, TABLE_SESSION, key_by_id, reject_alone, "its id is used twice");
}

/* ---- regions ------------------------------------------------------------------------ */

static void key_of_region(const void *record, struct key *ret)
{
        const struct ledger_region *r = record;

        ret->a = r->quota;
        ret->b = r->base;
}

static void key_of_number(const void *record, struct key *ret)
{
        const struct ledger_region *r = record;

        ret->a = r->quota;
        ret->b = r->number;
}

static void reject_region(struct opening *o, int kind, uint32_t index, const char *why)
{
        const struct ledger_region *r = record(table_of(o, kind), index);

        reject(o, kind, index, r->quota, LEDGER_NONE, why);
}

static int open_regions(struct opening *o)
{
        const struct table *t = table_of(o, TABLE_REGION);
        const struct ledger_region *before = NULL;
        struct key *keys;
        size_t n;
        int r;

        for (uint32_t i = table_next(t, 0); i != LEDGER_NONE; i = table_next(t, i + 1)) {
                const struct ledger_region *g = record(t, i);
                uint64_t end;

                if (!was_given(t, i))
                        reject_region(o, TABLE_REGION, i, "its id was never assigned");
                else if (!is_used(o, TABLE_QUOTA, g->quota))
                        reject_region(o, TABLE_REGION, i, "its quota is not in use");
                else if (g->n_bytes == 0 || __builtin_add_overflow(g->base, g->n_bytes, &end))
                        reject_region(o, TABLE_REGION, i, "its address or size is invalid");
                else if (g->first_extent_bytes > g->n_bytes)
                        reject_region(o, TABLE_REGION, i, "its first extent does not fit in it");
        }
        r = reject_twins(o, TABLE_REGION, key_of_number, reject_region, "its number is used twice");
        if (r == 0)
                r = sort_table(o, TABLE_REGION, key_of_region, &keys, &n);
        if (r < 0)
                return r;
        for (size_t i = 0; i < n; i++) {
                const struct ledger_region *g = record(t, keys[i].index);

                if (before && before->quota == g->quota && g->base - before->base < before->n_bytes)
                        reject_region(o, TABLE_REGION, keys[i].index, "it overlaps another one");
                else
                        before = g;
        }
        free(keys);
        return 0;
}

/* ---- extents and exports --------------------------------------------------------- */

static void key_of_extent(const void *record, struct key *ret)
{
        const struct ledger_extent *e = record;

        ret->a = e->quota;
        ret->b = e->offset;
}

/* What is not in the store has a key of its own as well, one that no other has. */
static void key_of_store(const void *record, struct key *ret)
{
        const struct ledger_extent *e = record;

        ret->a = e->store_key;
        ret->b = e->store_key == 0 ? e->id : 0;
}

static void reject_extent(struct opening *o, int kind, uint32_t index, const char *why)
{
        const struct ledger_extent *e = record(table_of(o, kind), index);
        uint32_t quota = is_used(o, TABLE_QUOTA, e->quota) ? e->quota : LEDGER_NONE;

        o->is_bad_extent[index] = quota != LEDGER_NONE;
        if (quota != LEDGER_NONE)
                ledger_quota_close(o->l, quota);
        clear_bad(o, kind, index, quota, why);
}

static void open_extent(struct opening *o, uint32_t index)
{
        const struct table *t = table_of(o, TABLE_EXTENT);
        const struct ledger_extent *e = record(t, index);
        uint64_t end;

        if (!was_given(t, index))
                reject_extent(o, TABLE_EXTENT, index, "its id was never assigned");
        else if (!is_used(o, TABLE_QUOTA, e->quota))
                reject_extent(o, TABLE_EXTENT, index, "its quota is not in use");
        else if (e->n_bytes == 0 || __builtin_add_overflow(e->offset, e->n_bytes, &end))
                reject_extent(o, TABLE_EXTENT, index, "its address or size is invalid");
        else if (e->is_leaving > 1)
                reject_extent(o, TABLE_EXTENT, index, "its release state is invalid");
}

/* Leaves those that are sound in o->extents. */
static int open_extents(struct opening *o)
{
        const struct table *t = table_of(o, TABLE_EXTENT);
        const struct ledger_extent *before = NULL;
        size_t n = 0, n_sound = 0;
        int r;

        o->is_bad_extent = calloc((size_t)t->n_touched + 1, sizeof(bool));
        if (!o->is_bad_extent)
                return -ENOMEM;
        for (uint32_t i = table_next(t, 0); i != LEDGER_NONE; i = table_next(t, i + 1))
                open_extent(o, i);
        r = reject_twins(o, TABLE_EXTENT, key_by_id, reject_extent, "its id is used twice");
        if (r == 0)
                r = reject_twins(o, TABLE_EXTENT, key_of_store, reject_extent,
                                 "its key in the store is used twice");
        if (r == 0)
                r = sort_table(o, TABLE_EXTENT, key_of_extent, &o->extents, &n);
        if (r < 0)
                return r;
        for (size_t i = 0; i < n; i++) {
                const struct ledger_extent *e = record(t, o->extents[i].index);

                if (before && before->quota == e->quota && e->offset - before->offset < before->n_bytes) {
                        reject_extent(o, TABLE_EXTENT, o->extents[i].index, "it overlaps another one");
                        continue;
                }
                o->extents[n_sound++] = o->extents[i];
                before = e;
        }
        o->n_extents = n_sound;
        return 0;
}

static void key_of_export(const void *record, struct key *ret)
{
        const struct ledger_export *x = record;

        ret->a = x->extent;
        ret->b = x->session;
}

static void reject_export(struct opening *o, int kind, uint32_t index, const char *why)
{
        const struct table *extents = table_of(o, TABLE_EXTENT);
        const struct ledger_export *x = record(table_of(o, kind), index);
        bool has_extent =
                x->extent < extents->n_touched && (in_use(extents, x->extent) || o->is_bad_extent[x->extent]);

        reject(o, kind, index,
               has_extent ? ((const struct ledger_extent *)record(extents, x->extent))->quota : LEDGER_NONE,
               x->session, why);
}

static int open_exports(struct opening *o)
{
        const struct table *t = table_of(o, TABLE_EXPORT);

        for (uint32_t i = table_next(t, 0); i != LEDGER_NONE; i = table_next(t, i + 1)) {
                const struct ledger_export *x = record(t, i);

                if (!was_given(t, i))
                        reject_export(o, TABLE_EXPORT, i, "its id was never assigned");
                else if (!is_used(o, TABLE_EXTENT, x->extent))
                        reject_export(o, TABLE_EXPORT, i, "its extent is not in use");
                else if (!is_used(o, TABLE_SESSION, x->session))
                        reject_export(o, TABLE_EXPORT, i, "its session is not in use");
                else if (!is_tenants(o, x->session, ledger_extent_at(o->l, x->extent)->quota))
                        reject_export(o, TABLE_EXPORT, i,
                                      "its session and its extent belong to different tenants");
        }
        return reject_twins(o, TABLE_EXPORT, key_of_export, reject_export,
                            "its session received its extent twice");
}

/* ---- blocks ------------------------------------------------------------------------- */

/* An index of which the generations cannot be told is never used again. */
static void reject_block(struct opening *o, int kind, uint32_t index, const char *why)
{
        struct ledger_block *b = record(table_of(o, kind), index);
        uint64_t id = b->id;

        if ((uint32_t)id != index || b->links.generation <= (uint32_t)(id >> 32))
                b->links.generation = 0;
        reject(o, kind, index, b->quota, b->session, why);
}

/* NULL, or what is wrong with a block by itself. */
static const char *block_fault(struct opening *o, uint32_t index)
{
        const struct ledger_block *b = record(table_of(o, TABLE_BLOCK), index);
        uint64_t end;

        if ((uint32_t)b->id != index || b->id >> 32 == 0)
                return "its id was never assigned at its index";
        if (b->links.generation != 0 && b->links.generation <= (uint32_t)(b->id >> 32))
                return "its next id is not newer than its id";
        if (!is_used(o, TABLE_QUOTA, b->quota))
                return "its quota is not in use";
        if (b->n_bytes == 0 || __builtin_add_overflow(b->offset, b->n_bytes, &end))
                return "its address or size is invalid";
        if (b->n_requested == 0 || b->n_requested > b->n_bytes)
                return "it is smaller than its requested size";
        if (!memchr(b->tag, '\0', sizeof(b->tag)))
                return "its tag is not terminated";
        return NULL;
}

/* NULL, or what is wrong with whose it is. The last stores of a publication are made
 * here if they were not. */
static const char *block_owner_fault(struct opening *o, uint32_t index)
{
        struct ledger_block *b = record(table_of(o, TABLE_BLOCK), index);
        const struct table *shared = table_of(o, TABLE_SHARED);

        if (b->shared != LEDGER_NONE) {
                if (!in_use(shared, b->shared))
                        return "its shared record is not in use";
                if (((const struct ledger_shared *)record(shared, b->shared))->block != index)
                        return "its shared record belongs to another block";
                b->session = LEDGER_NONE;
                return NULL;
        }
        if (!is_used(o, TABLE_SESSION, b->session))
                return "its session is not in use";
        return is_tenants(o, b->session, b->quota) ? NULL
                                                   : "its session and its quota belong to different "
                                                     "tenants";
}

static void key_of_block(const void *record, struct key *ret)
{
        const struct ledger_block *b = record;

        ret->a = b->quota;
        ret->b = b->offset;
}

/* Whether extents of the quota that stay lie behind all of it. *at: the first of o->extents that
 * may; blocks come in their order. */
static bool is_backed(struct opening *o, const struct ledger_block *b, size_t *at)
{
        const struct table *t = table_of(o, TABLE_EXTENT);
        uint64_t up_to = b->offset, end = b->offset + b->n_bytes;

        for (; *at < o->n_extents; (*at)++) {
                const struct ledger_extent *e = record(t, o->extents[*at].index);

                if (e->quota > b->quota || (e->quota == b->quota && e->offset + e->n_bytes > b->offset))
                        break;
        }
        for (size_t i = *at; i < o->n_extents && up_to < end; i++) {
                const struct ledger_extent *e = record(t, o->extents[i].index);

                if (e->quota != b->quota || e->offset > up_to || e->is_leaving)
                        break;
                up_to = e->offset + e->n_bytes;
        }
        return up_to >= end;
}

static int place_blocks(struct opening *o)
{
        const struct ledger_block *before = NULL;
        size_t n, at = 0;
        struct key *keys;
        int r = sort_table(o, TABLE_BLOCK, key_of_block, &keys, &n);

        if (r < 0)
                return r;
        for (size_t i = 0; i < n; i++) {
                const struct ledger_block *b = record(table_of(o, TABLE_BLOCK), keys[i].index);

                if (before && before->quota == b->quota && b->offset - before->offset < before->n_bytes) {
                        reject_block(o, TABLE_BLOCK, keys[i].index, "it overlaps another one");
                        continue;
                }
                if (!is_backed(o, b, &at))
                        reject_block(o, TABLE_BLOCK, keys[i].index, "it is not completely inside extents");
                before = b;
        }
        free(keys);
        return 0;
}

/* Of the session's own; NULL: it is not there any more. */
static struct ledger_block *find_own_block(struct opening *o, uint32_t session, uint64_t id)
{
        const struct table *t = table_of(o, TABLE_BLOCK);
        uint32_t index = (uint32_t)id;
        struct ledger_block *b;

        if (id == 0 || index >= t->n_touched || record_id(t, index) != id)
                return NULL;
        b = record(t, index);
        return b->session == session && b->shared == LEDGER_NONE ? b : NULL;
}

/* The last split of each session was the last thing that a kill may have left half done. */
static void finish_splits(struct opening *o)
{
        const struct table *t = table_of(o, TABLE_SESSION);

        for (uint32_t i = table_next(t, 0); i != LEDGER_NONE; i = table_next(t, i + 1)) {
                const struct ledger_session *s = record(t, i);
                struct ledger_block *low = find_own_block(o, i, s->split_id);
                const struct ledger_block *high = find_own_block(o, i, s->split_off_id);

                if (!low || !high || low->quota != high->quota || high->offset <= low->offset)
                        continue;
                if (high->offset - low->offset < low->n_requested)
                        uncommit(table_of(o, TABLE_BLOCK), (uint32_t)s->split_off_id);
                else if (high->offset - low->offset == low->n_requested)
                        low->n_bytes = low->n_requested;
        }
}

static int open_blocks(struct opening *o)
{
        const struct table *t = table_of(o, TABLE_BLOCK);

        finish_splits(o);
        for (uint32_t i = table_next(t, 0); i != LEDGER_NONE; i = table_next(t, i + 1)) {
                const char *why = block_fault(o, i);

                if (!why)
                        why = block_owner_fault(o, i);
                if (why)
                        reject_block(o, TABLE_BLOCK, i, why);
        }
        return place_blocks(o);
}

/* ---- shared blocks -------------------------------------------------------------------- */

/* The block that a shared record counts for, or LEDGER_NONE. */
static uint32_t block_of_shared(struct opening *o, uint32_t index)
{
        const struct ledger_shared *s = record(table_of(o, TABLE_SHARED), index);
        const struct table *blocks = table_of(o, TABLE_BLOCK);

        if (!in_use(blocks, s->block) ||
            ((const struct ledger_block *)record(blocks, s->block))->shared != index)
                return LEDGER_NONE;
        return s->block;
}

static uint32_t quota_of_shared(struct opening *o, uint32_t index)
{
        uint32_t block = is_used(o, TABLE_SHARED, index) ? block_of_shared(o, index) : LEDGER_NONE;

        return block != LEDGER_NONE ? ledger_block_at(o->l, block)->quota : LEDGER_NONE;
}

/* With its block, if it counts: without a sound name or a hold nobody could end it. Where
 * it counts for none, a block that names it is bad in its own turn. */
static void reject_shared(struct opening *o, int kind, uint32_t index, const char *why)
{
        uint32_t block = block_of_shared(o, index);

        if (block != LEDGER_NONE)
                reject_block(o, TABLE_BLOCK, block, "its shared record is bad");
        clear_bad(o, kind, index, LEDGER_NONE, why);
}

/* Before blocks are looked at. */
static int open_names(struct opening *o)
{
        const struct table *t = table_of(o, TABLE_SHARED);

        for (uint32_t i = table_next(t, 0); i != LEDGER_NONE; i = table_next(t, i + 1)) {
                const struct ledger_shared *s = record(t, i);

                if (!was_given(t, i))
                        reject_shared(o, TABLE_SHARED, i, "its id was never assigned");
                else if (!is_name(s->name))
                        reject_shared(o, TABLE_SHARED, i, "it has no name");
                else if (s->block >= table_of(o, TABLE_BLOCK)->n_touched)
                        reject_shared(o, TABLE_SHARED, i, "its block was never used");
        }
        return reject_twins(o, TABLE_SHARED, key_by_id, reject_shared, "its id is used twice");
}

/* After blocks were looked at: what no block names was never published, or has ended. */
static void clear_half_shared(struct opening *o)
{
        const struct table *t = table_of(o, TABLE_SHARED);

        for (uint32_t i = table_next(t, 0); i != LEDGER_NONE; i = table_next(t, i + 1))
                if (block_of_shared(o, i) == LEDGER_NONE)
                        uncommit(t, i);
}

static int compare_names(const void *x, const void *y, void *userdata)
{
        struct opening *o = userdata;
        uint32_t i = *(const uint32_t *)x, j = *(const uint32_t *)y;
        int r = strcmp(ledger_quota_at(o->l, quota_of_shared(o, i))->tenant,
                       ledger_quota_at(o->l, quota_of_shared(o, j))->tenant);

        return r != 0 ? r : strcmp(ledger_shared_at(o->l, i)->name, ledger_shared_at(o->l, j)->name);
}

/* A name is one block's of the tenant, over all its partitions. */
static int check_names(struct opening *o)
{
        const struct table *t = table_of(o, TABLE_SHARED);
        uint32_t *names = calloc((size_t)t->n_touched + 1, sizeof(*names));
        bool *is_twin = calloc((size_t)t->n_touched + 1, sizeof(*is_twin));
        size_t n = 0;

        if (!names || !is_twin) {
                free(names);
                free(is_twin);
                return -ENOMEM;
        }
        for (uint32_t i = table_next(t, 0); i != LEDGER_NONE; i = table_next(t, i + 1))
                names[n++] = i;
        qsort_r(names, n, sizeof(*names), compare_names, o);
        for (size_t i = 1; i < n; i++)
                if (compare_names(&names[i - 1], &names[i], o) == 0)
                        is_twin[i - 1] = is_twin[i] = true;
        for (size_t i = 0; i < n; i++)
                if (is_twin[i])
                        reject_shared(o, TABLE_SHARED, names[i], "its name is used twice");
        free(names);
        free(is_twin);
        return 0;
}

static void key_of_hold(const void *record, struct key *ret)
{
        const struct ledger_hold *h = record;

        ret->a = h->shared;
        ret->b = h->session;
}

static void reject_hold(struct opening *o, int kind, uint32_t index, const char *why)
{
        const struct ledger_hold *h = record(table_of(o, kind), index);

        reject(o, kind, index, quota_of_shared(o, h->shared), h->session, why);
}

static void open_hold(struct opening *o, uint32_t index)
{
        const struct table *t = table_of(o, TABLE_HOLD);
        const struct ledger_hold *h = record(t, index);

        if (!was_given(t, index))
                reject_hold(o, TABLE_HOLD, index, "its id was never assigned");
        else if (h->shared >= table_of(o, TABLE_SHARED)->n_touched)
                reject_hold(o, TABLE_HOLD, index, "its shared block was never used");
        else if (!is_used(o, TABLE_SHARED, h->shared))
                uncommit(t, index); /* what it was a hold of was never published, or has ended */
        else if (!is_used(o, TABLE_SESSION, h->session))
                reject_hold(o, TABLE_HOLD, index, "its session is not in use");
        else if (h->count == 0)
                reject_hold(o, TABLE_HOLD, index, "its count is 0");
        else if (!is_tenants(o, h->session, quota_of_shared(o, h->shared)))
                reject_hold(o, TABLE_HOLD, index, "its session and its block belong to different tenants");
}

/* A shared block without references would never be freed. */
static int check_held(struct opening *o)
{
        const struct table *t = table_of(o, TABLE_SHARED), *holds = table_of(o, TABLE_HOLD);
        bool *is_held = calloc((size_t)t->n_touched + 1, sizeof(*is_held));

        if (!is_held)
                return -ENOMEM;
        for (uint32_t i = table_next(holds, 0); i != LEDGER_NONE; i = table_next(holds, i + 1))
                is_held[((const struct ledger_hold *)record(holds, i))->shared] = true;
        for (uint32_t i = table_next(t, 0); i != LEDGER_NONE; i = table_next(t, i + 1))
                if (!is_held[i])
                        reject_shared(o, TABLE_SHARED, i, "it has no references");
        free(is_held);
        return 0;
}

static int open_shared(struct opening *o)
{
        const struct table *holds = table_of(o, TABLE_HOLD);
        int r;

        clear_half_shared(o);
        r = check_names(o);
        if (r < 0)
                return r;
        for (uint32_t i = table_next(holds, 0); i != LEDGER_NONE; i = table_next(holds, i + 1))
                open_hold(o, i);
        r = reject_twins(o, TABLE_HOLD, key_of_hold, reject_hold, "its session has two references to it");
        return r < 0 ? r : check_held(o);
}

/* ---- what a running process has beside the facts -------------------------------------- */

static void count_table(struct table *t, bool is_blocks)
{
        for (uint32_t i = t->n_touched; i-- > 0;) {
                const struct ledger_block *b = is_blocks ? record(t, i) : NULL;

                if (in_use(t, i))
                        t->n_used++;
                else if (b && b->links.generation == 0)
                        t->n_retired++;
                else
                        table_chain(t, i);
        }
}

static void link_owners(struct ledger *l)
{
        const struct table *sessions = &l->tables[TABLE_SESSION], *extents = &l->tables[TABLE_EXTENT],
                           *shared = &l->tables[TABLE_SHARED];

        for (uint32_t i = 0; i < sessions->n_touched; i++) {
                struct ledger_session *s = record(sessions, i);

                if (!in_use(sessions, i)) /* a kill came before it was wiped */
                        explicit_bzero(s->secret, sizeof(s->secret));
                else
                        ledger_link_nothing(s);
        }
        for (uint32_t i = table_next(extents, 0); i != LEDGER_NONE; i = table_next(extents, i + 1)) {
                struct ledger_extent *e = record(extents, i);

                e->links.first_export = LEDGER_NONE;
                e->links.n_exports = 0;
                e->fd = -1;
        }
        for (uint32_t i = table_next(shared, 0); i != LEDGER_NONE; i = table_next(shared, i + 1)) {
                struct ledger_shared *s = record(shared, i);

                s->links.first_hold = LEDGER_NONE;
                s->links.n_holds = 0;
        }
}

static void link_all(struct ledger *l)
{
        const struct table *exports = &l->tables[TABLE_EXPORT], *blocks = &l->tables[TABLE_BLOCK],
                           *holds = &l->tables[TABLE_HOLD];

        link_owners(l);
        for (uint32_t i = table_next(exports, 0); i != LEDGER_NONE; i = table_next(exports, i + 1))
                ledger_link_export(l, i);
        for (uint32_t i = table_next(blocks, 0); i != LEDGER_NONE; i = table_next(blocks, i + 1)) {
                struct ledger_block *b = record(blocks, i);

                b->handle = 0;
                b->links.in_delivery = 0;
                if (b->session != LEDGER_NONE)
                        ledger_link_block(l, i);
        }
        for (uint32_t i = table_next(holds, 0); i != LEDGER_NONE; i = table_next(holds, i + 1)) {
                ((struct ledger_hold *)record(holds, i))->links.n_in_delivery = 0;
                ledger_link_hold(l, i);
        }
}

/* ---- the header -------------------------------------------------------------------------- */

/* NULL, or what is wrong; the tables lie where this process would lay them. */
static const char *header_fault(const struct header *h, uint64_t n_bytes)
{
        const struct header_table *t = h->tables;
        struct ledger_limits limits = {
                .n_quotas = t[TABLE_QUOTA].n_records,
                .n_sessions = t[TABLE_SESSION].n_records,
                .n_extents = t[TABLE_EXTENT].n_records,
                .n_exports = t[TABLE_EXPORT].n_records,
                .n_blocks = t[TABLE_BLOCK].n_records,
                .n_shared = t[TABLE_SHARED].n_records,
                .n_holds = t[TABLE_HOLD].n_records,
        };
        struct header want;

        if (h->magic != LEDGER_MAGIC || h->layout != LEDGER_LAYOUT || h->n_tables != N_TABLES)
                return "its layout is not supported";
        if (ledger_lay_out(&limits, &want) < 0 || want.n_bytes != h->n_bytes || h->n_bytes != n_bytes)
                return "its sizes are inconsistent";
        for (size_t i = 0; i < N_TABLES; i++) {
                if (t[i].offset != want.tables[i].offset || t[i].record_bytes != want.tables[i].record_bytes)
                        return "its tables are at wrong offsets";
                if (t[i].n_touched > t[i].n_records || t[i].next_id == 0)
                        return "its counters are invalid";
        }
        return NULL;
}

static int open_header(struct opening *o)
{
        struct ledger *l = o->l;
        const char *why = NULL;
        struct stat st;
        int seals = fcntl(l->fd, F_GET_SEALS), r;

        if (fstat(l->fd, &st) < 0)
                return -errno;
        /* Without the seals another process could truncate the file later. */
        if (!S_ISREG(st.st_mode) || seals < 0 || (seals & SEALS_NEEDED) != SEALS_NEEDED ||
            (uint64_t)st.st_size < sizeof(struct header))
                why = "it is not a sealed memfd";
        if (!why) {
                l->n_bytes = (size_t)st.st_size;
                r = ledger_map(l);
                if (r < 0)
                        return r;
                why = header_fault(l->header, l->n_bytes);
        }
        if (!why)
                return 0;
        tell(o, "header", 0, 0, LEDGER_NONE, why);
        return -EBADMSG;
}

static int open_tables(struct opening *o)
{
        static int (*const PASSES[])(struct opening * o) = {
                open_quotas,  open_regions, open_sessions, open_extents,
                open_exports, open_names,   open_blocks,   open_shared,
        };
        struct ledger *l = o->l;
        int r = 0;

        ledger_find_tables(l);
        for (size_t i = 0; i < N_TABLES; i++)
                l->tables[i].n_touched = l->header->tables[i].n_touched;
        for (size_t i = 0; r == 0 && i < sizeof(PASSES) / sizeof(PASSES[0]); i++)
                r = PASSES[i](o);
        if (r < 0)
                return r;
        for (size_t i = 0; i < N_TABLES; i++)
                count_table(&l->tables[i], i == TABLE_BLOCK);
        link_all(l);
        return 0;
}

int ledger_open(int fd, void (*on_fault)(void *userdata, const struct ledger_fault *fault), void *userdata,
                struct ledger **ret)
{
        struct opening o = { .on_fault = on_fault, .userdata = userdata };
        int r;

        o.l = calloc(1, sizeof(*o.l));
        if (!o.l)
                return -ENOMEM;
        o.l->fd = fd;
        r = open_header(&o);
        if (r == 0)
                r = open_tables(&o);
        free(o.extents);
        free(o.is_bad_extent);
        if (r < 0) {
                o.l->fd = -1;
                ledger_free(o.l);
                return r;
        }
        *ret = o.l;
        return o.n_faults > 0 ? LEDGER_HAS_FAULTS : 0;
}
